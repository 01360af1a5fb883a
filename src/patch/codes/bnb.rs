//! NF4 and FP4 of bitsandbytes.
//!
//! A value is its code's number times the largest magnitude of its block (`absmax`), in row-major order; the first of two codes
//! is the upper half of a byte. `absmax` may be quantised itself: it is then eight-bit codes of `nested_quant_map`, times the
//! `nested_absmax` of their block, plus `nested_offset`. Codes are the nearest ones, the lower one of two that are as near.
//!
//! Sources: bitsandbytes 0.50's `QuantState`, `quantize_4bit` and `get_4bit_type` (`functional.py`) and its kernels
//! (`dQuantizeNF4`, `dQuantizeFP4`, `dQuantize`). `nested_offset` is kept, since it is text of some length; bitsandbytes takes the
//! mean of `absmax`.

use rayon::prelude::*;
use serde_json::{Map, Value};

use super::{Part, Repacked, beside, differ, largest, nibble, set_nibble};
use crate::checkpoint::{Siblings, TensorId, TensorInfo};
use crate::dtype::DType;
use crate::error::{Packing, PackingFault};
use crate::patch::Requantised;

/// The numbers of NF4's codes.
const NF4: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

/// Twelve times the numbers of FP4's first eight codes; the others are their negatives.
const FP4: [f32; 8] = [0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0];

/// FP4's first eight codes in the order of their numbers.
const FP4_ORDER: [u8; 8] = [0, 1, 6, 7, 4, 5, 2, 3];

/// What `quant_state` says of a weight's codes.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct BitsAndBytes {
    is_nf4: bool,
    /// The number of values.
    count: usize,
    /// The number of values of a block.
    block: usize,
    nested: Option<Nested>,
}

// An offset is finite.
impl Eq for BitsAndBytes {}

/// How `absmax` is quantised.
#[derive(Clone, Debug, PartialEq)]
struct Nested {
    block: usize,
    offset: f32,
}

/// The fields of `quant_state`.
struct State {
    block: u64,
    shape: Vec<u64>,
    nested: Option<(u64, f32)>,
}

// The order of the parts.
const ABSMAX: usize = 1;
const MAP: usize = 2;
const NESTED_ABSMAX: usize = 3;
const NESTED_MAP: usize = 4;

impl BitsAndBytes {
    /// Also the values' shape, and the tensors that belong to the codes.
    pub(super) fn of(
        tensor: TensorId,
        weight: &TensorInfo,
        packing: Packing,
        siblings: &Siblings<'_>,
    ) -> Result<(BitsAndBytes, Vec<u64>, Vec<Part>), PackingFault> {
        let is_nf4 = packing == Packing::BitsAndBytesNf4;
        let kind = if is_nf4 { "nf4" } else { "fp4" };
        let name = |ending: &str| format!("{}.{ending}", weight.name);
        let known = ["absmax", "quant_map", "nested_absmax", "nested_quant_map"];
        let state_name = name(&format!("quant_state.bitsandbytes__{kind}"));
        let own = name("");
        let other = siblings.under(&own).find(|(rest, _, info)| !known.contains(rest) && info.name != state_name);
        if let Some((_, _, info)) = other {
            return Err(PackingFault::Unknown { tensor: info.name.clone() });
        }
        let (state_id, state_info) = beside(siblings, state_name)?;
        let note = |reason| PackingFault::Note { tensor: state_info.name.clone(), reason };
        let text = siblings.text(state_id, state_info).map_err(note)?;
        let State { block, shape, nested } = State::parse(&text, kind).map_err(note)?;
        let count = shape.iter().try_fold(1u64, |all, &side| all.checked_mul(side));
        let count = count.filter(|&count| count > 0 && usize::try_from(count).is_ok());
        let count = count.ok_or_else(|| note(format!("the shape is {shape:?}")))?;
        let size = weight.bytes.max(1) / weight.shape.iter().product::<u64>().max(1);
        if count.div_ceil(2).next_multiple_of(size.max(1)) != weight.bytes {
            let (tensor, found) = (weight.name.clone(), weight.shape.clone());
            return Err(PackingFault::Shape { tensor, found, wanted: vec![count.div_ceil(2), 1] });
        }
        let blocks = count.div_ceil(block);
        let absmax = if nested.is_some() { DType::U8 } else { DType::F32 };
        let mut parts = vec![
            Part::of(tensor, weight, true),
            Part::new(beside(siblings, name("absmax"))?, absmax, blocks, true)?,
            Part::new(beside(siblings, name("quant_map"))?, DType::F32, 16, false)?,
        ];
        if let Some((nested_block, _)) = nested {
            let groups = blocks.div_ceil(nested_block);
            parts.push(Part::new(beside(siblings, name("nested_absmax"))?, DType::F32, groups, true)?);
            parts.push(Part::new(beside(siblings, name("nested_quant_map"))?, DType::F32, 256, false)?);
        } else if let Some((_, info)) = siblings.find(&name("nested_absmax")) {
            return Err(PackingFault::Unknown { tensor: info.name.clone() });
        }
        let nested = nested.map(|(block, offset)| Nested { block: block as usize, offset });
        Ok((BitsAndBytes { is_nf4, count: count as usize, block: block as usize, nested }, shape, parts))
    }

    fn numbers(&self) -> [f32; 16] {
        numbers(self.is_nf4)
    }

    /// The `absmax` of each block, in f32.
    fn absmax(&self, parts: &[Part], bytes: &[&[u8]]) -> Result<Vec<f32>, PackingFault> {
        let map = parts[MAP].numbers(bytes[MAP])?;
        let off = |(own, wanted): (&f32, &f32)| (own - wanted).abs() > 1e-6;
        if let Some(index) = map.iter().zip(&self.numbers()).position(off) {
            return Err(parts[MAP].value(index, map[index]));
        }
        let Some(nested) = &self.nested else { return parts[ABSMAX].numbers(bytes[ABSMAX]) };
        let scales = parts[NESTED_ABSMAX].numbers(bytes[NESTED_ABSMAX])?;
        let map = parts[NESTED_MAP].numbers(bytes[NESTED_MAP])?;
        if let Some(index) = map.windows(2).position(|two| two[0] > two[1]) {
            return Err(parts[NESTED_MAP].value(index + 1, map[index + 1]));
        }
        let groups = bytes[ABSMAX].chunks(nested.block).zip(&scales);
        let of_group = |(codes, scale): (&[u8], &f32)| {
            codes.iter().map(|&code| nested.value(&map, code, *scale)).collect::<Vec<f32>>()
        };
        Ok(groups.flat_map(of_group).collect())
    }

    pub(super) fn lift(&self, parts: &[Part], bytes: &[&[u8]]) -> Result<Vec<f32>, PackingFault> {
        let (numbers, absmax) = (self.numbers(), self.absmax(parts, bytes)?);
        let mut values = vec![0.0; self.count];
        let blocks = values.par_chunks_mut(self.block).zip(bytes[0].par_chunks(self.block / 2)).zip(&absmax);
        blocks.for_each(|((values, codes), absmax)| lift_block(&numbers, codes, *absmax, values));
        Ok(values)
    }

    pub(super) fn pack(
        &self,
        parts: &[Part],
        bytes: &[&[u8]],
        old: &[f32],
        new: &[f32],
    ) -> Result<Repacked, PackingFault> {
        let (numbers, was) = (self.numbers(), self.absmax(parts, bytes)?);
        let (mut codes, mut absmax) = (bytes[0].to_vec(), was.clone());
        let values = old.par_chunks(self.block).zip(new.par_chunks(self.block));
        let blocks = codes.par_chunks_mut(self.block / 2).zip(&mut absmax);
        let changed = values.zip(blocks).filter(|((old, new), _)| differ(old, new));
        changed.for_each(|((_, new), (codes, absmax))| {
            *absmax = largest(new);
            let scale = 1.0 / absmax.max(1e-38);
            for (index, value) in new.iter().enumerate() {
                let code = self.nearest(&numbers, (value * scale).clamp(-1.0, 1.0));
                set_nibble(&mut codes[index / 2], index.is_multiple_of(2), code);
            }
        });
        let mut written = match &self.nested {
            None => vec![absmax.iter().flat_map(|value| value.to_le_bytes()).collect()],
            Some(nested) => {
                let scales = parts[NESTED_ABSMAX].numbers(bytes[NESTED_ABSMAX])?;
                let map = parts[NESTED_MAP].numbers(bytes[NESTED_MAP])?;
                nested.pack((bytes[ABSMAX], scales), &map, &was, &mut absmax)
            }
        };
        let mut requantised = Requantised::default();
        let mut stored = vec![0.0; self.block];
        for ((wanted, codes), absmax) in new.chunks(self.block).zip(codes.chunks(self.block / 2)).zip(&absmax) {
            let stored = &mut stored[..wanted.len()];
            lift_block(&numbers, codes, *absmax, stored);
            requantised.count(wanted, stored);
        }
        written.insert(0, codes);
        Ok(Repacked { parts: written, requantised })
    }

    /// The code whose number is the nearest.
    fn nearest(&self, numbers: &[f32; 16], value: f32) -> u8 {
        let middle = |low: f32, high: f32| f32::midpoint(low, high);
        if self.is_nf4 {
            return numbers.windows(2).filter(|two| middle(two[0], two[1]) < value).count() as u8;
        }
        let number = |code: u8| numbers[usize::from(code)];
        let above = |two: &&[u8]| middle(number(two[0]), number(two[1])) < value.abs();
        let code = FP4_ORDER[FP4_ORDER.windows(2).filter(above).count()];
        if value < 0.0 { code + 8 } else { code }
    }
}

/// The number of each code of NF4 or of FP4.
pub(super) fn numbers(is_nf4: bool) -> [f32; 16] {
    if is_nf4 {
        return NF4;
    }
    std::array::from_fn(|code| if code < 8 { FP4[code] / 12.0 } else { -FP4[code - 8] / 12.0 })
}

/// The values of a block.
fn lift_block(numbers: &[f32; 16], codes: &[u8], absmax: f32, values: &mut [f32]) {
    for (index, value) in values.iter_mut().enumerate() {
        *value = numbers[nibble(codes[index / 2], index.is_multiple_of(2))] * absmax;
    }
}

impl Nested {
    fn value(&self, map: &[f32], code: u8, scale: f32) -> f32 {
        map[usize::from(code)] * scale + self.offset
    }

    /// Quantises `absmax`, which was `was` in `codes` and `scales`, and replaces it by what is stored. Groups that do not change
    /// keep their codes. Gives the bytes of the codes and of the scales.
    fn pack(
        &self,
        (codes, mut scales): (&[u8], Vec<f32>),
        map: &[f32],
        was: &[f32],
        absmax: &mut [f32],
    ) -> Vec<Vec<u8>> {
        let mut codes = codes.to_vec();
        let middles: Vec<f32> = map.windows(2).map(|two| f32::midpoint(two[0], two[1])).collect();
        let groups = codes.chunks_mut(self.block).zip(&mut scales);
        let values = was.chunks(self.block).zip(absmax.chunks_mut(self.block));
        for ((codes, scale), (was, absmax)) in groups.zip(values).filter(|(_, (was, now))| differ(was, now)) {
            let centred: Vec<f32> = absmax.iter().map(|value| value - self.offset).collect();
            *scale = largest(&centred);
            let factor = 1.0 / scale.max(1e-38);
            for ((code, value), absmax) in codes.iter_mut().zip(&centred).zip(&mut *absmax) {
                let value = (value * factor).clamp(-1.0, 1.0);
                *code = middles.partition_point(|middle| *middle < value) as u8;
                *absmax = self.value(map, *code, *scale);
            }
            debug_assert_eq!(was.len(), absmax.len());
        }
        vec![codes, scales.iter().flat_map(|scale| scale.to_le_bytes()).collect()]
    }
}

impl State {
    /// # Errors
    /// What is not understood.
    fn parse(text: &[u8], kind: &str) -> Result<State, String> {
        let fields: Map<String, Value> = serde_json::from_slice(text).map_err(|error| error.to_string())?;
        let field = |name: &str| fields.get(name).ok_or_else(|| format!("it has no `{name}`"));
        let size = |name: &str| {
            let value = field(name)?;
            // A block is whole bytes of codes.
            let size = value.as_u64().filter(|size| (2..=1 << 16).contains(size) && size.is_multiple_of(2));
            size.ok_or_else(|| format!("`{name}` is {value}"))
        };
        if field("quant_type")?.as_str() != Some(kind) {
            return Err(format!("`quant_type` is {}", field("quant_type")?));
        }
        let sides = field("shape")?.as_array().map(|sides| sides.iter().map(Value::as_u64).collect::<Option<Vec<_>>>());
        let shape = sides.flatten().ok_or_else(|| format!("`shape` is {}", fields["shape"]))?;
        let nested = match fields.get("nested_offset") {
            None if fields.contains_key("nested_blocksize") => return Err("it has no `nested_offset`".to_owned()),
            None => None,
            Some(value) => {
                let offset = value.as_f64().map(|offset| offset as f32).filter(|offset| offset.is_finite());
                let offset = offset.ok_or_else(|| format!("`nested_offset` is {value}"))?;
                Some((size("nested_blocksize")?, offset))
            }
        };
        Ok(State { block: size("blocksize")?, shape, nested })
    }
}
