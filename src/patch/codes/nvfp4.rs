//! NVFP4: a value is the number of its E2M1 code, times the F8_E4M3 scale of its sixteen columns of a row (`weight_scale`)
//! times the F32 scale of the weight (`weight_scale_2`).
//!
//! Two programs write such tensors beside `X.weight`. NVIDIA's ModelOpt puts the first of two codes into the lower half of a byte,
//! and the scales row by row. ComfyUI (comfy-kitchen) puts it into the upper half, and the scales into tiles as cuBLAS takes
//! them; it notes the format, `nvfp4`. So the note tells the order of both.
//!
//! The scale of sixteen values is their largest magnitude divided by 6 and by `weight_scale_2`, rounded, and codes are the nearest,
//! those with an even last bit of two that are as near (comfy-kitchen's `quantize_nvfp4`, ModelOpt's `NVFP4QTensor`).
//! `weight_scale_2` is kept, since programs fuse weights that share it, unless a scale would exceed 448; then it is the largest
//! magnitude divided by 6 and 448.

use rayon::prelude::*;

use super::{Part, Repacked, beside, differ, largest, nibble, set_nibble};
use crate::checkpoint::{Format, Role, Siblings, TensorId, TensorInfo};
use crate::dtype::DType;
use crate::error::PackingFault;
use crate::float::Float;
use crate::patch::Requantised;
use crate::patch::scales::Grid;

/// The magnitudes of codes.
const E2M1: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// The largest number of a code.
const LARGEST: f32 = 6.0;

/// The largest scale.
const LARGEST_SCALE: f32 = 448.0;

/// Values that share a scale.
const BLOCK: usize = 16;

/// How the codes and their scales are ordered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Nvfp4 {
    grid: Grid,
    /// Whether the first of two codes is the upper half of a byte.
    upper_first: bool,
}

const SCALE: usize = 1;
const SCALE_2: usize = 2;

impl Nvfp4 {
    /// Also the values' shape, and the tensors that belong to the codes.
    pub(super) fn of(
        tensor: TensorId,
        weight: &TensorInfo,
        siblings: &Siblings<'_>,
    ) -> Result<(Nvfp4, Vec<u64>, Vec<Part>), PackingFault> {
        let Some(stem) = weight.name.strip_suffix(".weight") else {
            return Err(PackingFault::Unknown { tensor: weight.name.clone() });
        };
        let names = [".weight_scale", ".weight_scale_2"].map(|ending| format!("{stem}{ending}"));
        let other = siblings
            .beside(weight)
            .into_iter()
            .find(|sibling| !names.contains(&sibling.info.name) && matches!(sibling.role, Role::Scale | Role::Unknown));
        if let Some(other) = other {
            return Err(PackingFault::Unknown { tensor: other.info.name.clone() });
        }
        let note = siblings.note(weight).map_err(|(tensor, reason)| PackingFault::Note { tensor, reason })?;
        let upper_first = match note.map(|note| note.format) {
            None => false,
            Some(Format::Nvfp4) => true,
            Some(_) => {
                let (tensor, reason) = (weight.name.clone(), "its note names another format".to_owned());
                return Err(PackingFault::Note { tensor, reason });
            }
        };
        let [name, name_2] = names;
        let (scale, scale_2) = (beside(siblings, name)?, beside(siblings, name_2)?);
        let shape = |wanted: Vec<u64>, info: &TensorInfo| PackingFault::Shape {
            tensor: info.name.clone(),
            found: info.shape.clone(),
            wanted,
        };
        if weight.dtype != DType::U8 {
            return Err(PackingFault::BadDType { tensor: weight.name.clone(), dtype: weight.dtype });
        }
        let (rows, cols) = match weight.shape[..] {
            [rows, bytes] if rows > 0 && bytes > 0 && bytes.is_multiple_of(BLOCK as u64 / 2) => (rows, bytes * 2),
            _ => return Err(shape(vec![0, BLOCK as u64 / 2], weight)),
        };
        let grid = Grid::of_runs([rows, cols], BLOCK as u64, upper_first);
        let grid = grid.ok_or_else(|| shape(weight.shape.clone(), weight))?;
        let wanted = grid.stored_shape();
        if scale.1.shape != wanted {
            return Err(shape(wanted, scale.1));
        }
        let parts = vec![
            Part::of(tensor, weight, true),
            Part::new(scale, DType::F8E4M3, wanted.iter().product(), true)?,
            Part::new(scale_2, DType::F32, 1, true)?,
        ];
        Ok((Nvfp4 { grid, upper_first }, vec![rows, cols], parts))
    }

    /// The scales of blocks in order, and the scale of all.
    fn scales(&self, parts: &[Part], bytes: &[&[u8]]) -> Result<(Vec<f32>, f32), PackingFault> {
        let stored = parts[SCALE].numbers(bytes[SCALE])?;
        let all = parts[SCALE_2].numbers(bytes[SCALE_2])?[0];
        if all <= 0.0 {
            return Err(parts[SCALE_2].value(0, all));
        }
        Ok(((0..self.grid.count()).map(|index| stored[self.grid.place(index)]).collect(), all))
    }

    pub(super) fn lift(&self, parts: &[Part], bytes: &[&[u8]]) -> Result<Vec<f32>, PackingFault> {
        let (scales, all) = self.scales(parts, bytes)?;
        let mut values = vec![0.0; scales.len() * BLOCK];
        let blocks = values.par_chunks_mut(BLOCK).zip(bytes[0].par_chunks(BLOCK / 2)).zip(&scales);
        blocks.for_each(|((values, codes), scale)| self.lift_block(codes, all * scale, values));
        Ok(values)
    }

    pub(super) fn pack(
        &self,
        parts: &[Part],
        bytes: &[&[u8]],
        old: &[f32],
        new: &[f32],
    ) -> Result<Repacked, PackingFault> {
        let (mut scales, was) = self.scales(parts, bytes)?;
        let most = largest(new);
        let all = if most > LARGEST * (was * LARGEST_SCALE) { most / (LARGEST * LARGEST_SCALE) } else { was };
        let mut codes = bytes[0].to_vec();
        let values = old.par_chunks(BLOCK).zip(new.par_chunks(BLOCK));
        let blocks = codes.par_chunks_mut(BLOCK / 2).zip(&mut scales);
        let changed = values.zip(blocks).filter(|((old, new), _)| all != was || differ(old, new));
        changed.for_each(|((_, new), (codes, scale))| {
            *scale = nearest_scale(largest(new) / LARGEST / all);
            let both = all * *scale;
            for (index, value) in new.iter().enumerate() {
                let code = if both == 0.0 { 0 } else { nearest(value / both) };
                set_nibble(&mut codes[index / 2], self.is_upper(index), code);
            }
        });
        let (mut requantised, mut stored) = (Requantised::default(), [0.0; BLOCK]);
        for ((wanted, codes), scale) in new.chunks(BLOCK).zip(codes.chunks(BLOCK / 2)).zip(&scales) {
            self.lift_block(codes, all * scale, &mut stored);
            requantised.count(wanted, &stored);
        }
        let mut of_blocks = bytes[SCALE].to_vec();
        for (index, scale) in scales.iter().enumerate() {
            let at = self.grid.place(index);
            Float::E4M3.round(std::slice::from_ref(scale), &mut of_blocks[at..=at]);
        }
        Ok(Repacked { parts: vec![codes, of_blocks, all.to_le_bytes().to_vec()], requantised })
    }

    fn is_upper(&self, index: usize) -> bool {
        index.is_multiple_of(2) == self.upper_first
    }

    /// The values of a block, whose scales' product is `scale`.
    fn lift_block(&self, codes: &[u8], scale: f32, values: &mut [f32]) {
        for (index, value) in values.iter_mut().enumerate() {
            let code = nibble(codes[index / 2], self.is_upper(index));
            let magnitude = E2M1[code & 7];
            *value = if code < 8 { magnitude } else { -magnitude } * scale;
        }
    }
}

/// A scale, rounded to F8_E4M3.
fn nearest_scale(scale: f32) -> f32 {
    let mut byte = [0];
    Float::E4M3.round(&[scale.min(LARGEST_SCALE)], &mut byte);
    let mut rounded = [0.0];
    Float::E4M3.lift(&byte, &mut rounded);
    rounded[0]
}

/// The code whose number is the nearest to `value`.
fn nearest(value: f32) -> u8 {
    let magnitude = value.abs();
    let above = |(low, two): (usize, &[f32])| {
        let middle = f32::midpoint(two[0], two[1]);
        // A tie goes to the even code.
        magnitude > middle || magnitude == middle && low % 2 == 1
    };
    let code = E2M1.windows(2).enumerate().filter(|&pair| above(pair)).count() as u8;
    if value.is_sign_negative() { code + 8 } else { code }
}
