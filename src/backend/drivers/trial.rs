//! A trial of the kernels that patch, on a device whose like they were never tested on: small matrices, whose bytes must be those
//! that the host makes of them. Code may round otherwise than the host in many ways (subnormals that are zero, products that are
//! rounded before they are added, quotients that are not rounded to nearest), none of which the device would report.

use std::ops::Range;
use std::sync::Arc;

use super::context::{Context, Refusal};
use super::event::DriverFence;
use super::kernels::{Patching, name};
use super::memory::DeviceMemory;
use super::module::{Module, Unfit, Unloaded};
use super::stream::RawStream;
use crate::backend::{BlockScales, Fence, FenceState, MatrixPatch, PackedProduct};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::limits::TRIAL;

/// What the host makes of each of [`CASES`]: the matrix, and the number of its values that were saturated. The tests below compare it
/// with the code of the host, and write it.
const WANTED: &[u8] = include_bytes!("kernels/trial.bin");

/// A matrix to patch. Its values and those of the factors follow from its number.
struct Case {
    dtype: DType,
    shape: (usize, usize),
    products: &'static [Added],
    /// The columns of a block of scales, each of which is one row high; 0: there are no scales.
    scaled: usize,
}

/// A product, by its rank, the rows that it is added to, and its scale.
type Added = (usize, Range<usize>, f32);

/// More rows than a block of threads patches, columns that are no multiple of four, and a rank that is none of eight.
const ONE: &[Added] = &[(11, 0..67, 1.5)];
/// Products of some rows, in more columns than a block of threads patches.
const SEVERAL: &[Added] = &[(3, 0..12, -0.7), (9, 5..12, 1.5), (8, 0..3, 1.0e-3)];

/// All functions, with and without scales.
const CASES: [Case; 12] = [
    Case { dtype: DType::F32, shape: (67, 37), products: ONE, scaled: 0 },
    Case { dtype: DType::F16, shape: (67, 37), products: ONE, scaled: 0 },
    Case { dtype: DType::BF16, shape: (67, 37), products: ONE, scaled: 0 },
    Case { dtype: DType::F8E4M3, shape: (67, 37), products: ONE, scaled: 0 },
    Case { dtype: DType::F8E5M2, shape: (67, 37), products: ONE, scaled: 0 },
    Case { dtype: DType::F8E4M3, shape: (67, 37), products: ONE, scaled: 37 },
    Case { dtype: DType::F8E5M2, shape: (67, 37), products: ONE, scaled: 37 },
    Case { dtype: DType::F32, shape: (12, 140), products: SEVERAL, scaled: 0 },
    Case { dtype: DType::F16, shape: (12, 140), products: SEVERAL, scaled: 0 },
    Case { dtype: DType::BF16, shape: (12, 140), products: SEVERAL, scaled: 0 },
    Case { dtype: DType::F8E4M3, shape: (12, 140), products: SEVERAL, scaled: 28 },
    Case { dtype: DType::F8E5M2, shape: (12, 140), products: SEVERAL, scaled: 28 },
];

/// The bytes between two matrices, and two work memories, which no kernel may change; and what is there.
const BETWEEN: usize = 256;
const UNTOUCHED: u8 = 0xa5;

/// Patches the cases with the functions of a module.
///
/// # Errors
/// What is wrong with them: a byte that differs, a call that fails, or a kernel that takes too long.
pub(super) fn run(context: &Arc<Context>, module: &Module) -> Result<(), Unfit> {
    let idle = |why: String| Unfit::Idle(Unloaded { why, lasts: true });
    let refused = |refusal| Unfit::Idle(Unloaded::of(context, refusal));
    let factors: Vec<Factors> = CASES.iter().zip(0..).map(|(case, number)| Factors::of(case, number)).collect();
    let patches: Result<Vec<MatrixPatch<'_>>> = factors.iter().map(Factors::patch).collect();
    let patches = patches.map_err(|error| idle(error.to_string()))?;
    let (mut matrices, mut works) = (Memory::default(), Memory::default());
    for (patch, number) in patches.iter().zip(0..) {
        matrices.add(&weights(patch, number));
        let mut work = vec![0; patch.work_bytes()];
        patch.write(&mut work).map_err(|error| idle(error.to_string()))?;
        works.add(&work);
    }
    let mut wanted = [matrices.clone(), works.clone()];
    expect(&patches, &mut wanted);
    let mut held = Held {
        stream: RawStream::create(context, None).map_err(refused)?,
        host: [matrices, works].map(|memory| memory.bytes),
        device: [
            DeviceMemory::plain(context, wanted[0].bytes.len()).map_err(refused)?,
            DeviceMemory::plain(context, wanted[1].bytes.len()).map_err(refused)?,
        ],
    };
    let outcome = held.patch(context, module, &patches, &wanted);
    // After a failure, too, what was queued before it may still run.
    if let Err(why) = settled(context, &held.stream) {
        std::mem::forget(held);
        return Err(Unfit::Running(outcome.err().unwrap_or(why)));
    }
    outcome.map_err(idle)?;
    let wrong = patches.iter().enumerate().find(|(number, _)| {
        [0, 1].iter().any(|side| held.part(*side, *number, &wanted[*side]) != wanted[*side].part(*number))
    });
    match wrong {
        Some((_, patch)) => {
            let (rows, cols) = (patch.rows(), patch.cols());
            Err(idle(format!("{} gives wrong bytes for a matrix of {rows} by {cols}", name(patch))))
        }
        None if held.host != wanted.map(|memory| memory.bytes) => {
            Err(idle("a kernel writes outside of its matrix".to_owned()))
        }
        None => Ok(()),
    }
}

/// Puts what the host makes of the patches in the place of the matrices, and the numbers of saturated values into the work memories.
fn expect(patches: &[MatrixPatch<'_>], [matrices, works]: &mut [Memory; 2]) {
    let mut rest = WANTED;
    for (number, patch) in patches.iter().enumerate() {
        let (matrix, later) = rest.split_at(patch.matrix_bytes());
        let (saturated, later) = later.split_at(MatrixPatch::SATURATED.len());
        matrices.part_mut(number).copy_from_slice(matrix);
        works.part_mut(number)[MatrixPatch::SATURATED].copy_from_slice(saturated);
        rest = later;
    }
}

/// What the device may use until the trial's last work is complete.
struct Held {
    stream: RawStream,
    /// The bytes of the matrices, and those of the work memories; first as they are sent, then as they are when all is done.
    host: [Vec<u8>; 2],
    device: [DeviceMemory; 2],
}

impl Held {
    fn patch(
        &mut self,
        context: &Arc<Context>,
        module: &Module,
        patches: &[MatrixPatch<'_>],
        places: &[Memory; 2],
    ) -> Result<(), String> {
        let text = |error: Error| error.to_string();
        let stream = self.stream.handle();
        let [matrices, works] = [&self.device[0], &self.device[1]].map(DeviceMemory::device_address);
        for (host, dst) in self.host.iter().zip([matrices, works]) {
            // SAFETY: both ends are that long, and are kept until the stream is known to be done.
            let copy = |(src, bytes)| context.call(|verbs| unsafe { verbs.copy_to_device(dst, src, bytes, stream) });
            copy((host.as_ptr().cast(), host.len())).map_err(text)?;
        }
        for (number, patch) in patches.iter().enumerate() {
            let patching = Patching::of(module, patch).map_err(text)?;
            let patching = patching.ok_or_else(|| format!("there is no function for {}", patch.dtype()))?;
            let at = |side: usize| places[side].parts[number].start as u64;
            // SAFETY: at these places are the matrix and the patch's work memory, in memory that is kept as above.
            unsafe { patching.queue(context, matrices + at(0), works + at(1), stream) }.map_err(text)?;
        }
        // A copy to the host may wait in the call, for as long as a kernel takes.
        settled(context, &self.stream)?;
        for (host, src) in self.host.iter_mut().zip([matrices, works]) {
            let (dst, bytes) = (host.as_mut_ptr().cast(), host.len());
            // SAFETY: as for the copies to the device.
            context.call(|verbs| unsafe { verbs.copy_to_host(dst, src, bytes, stream) }).map_err(text)?;
        }
        settled(context, &self.stream)
    }

    /// The bytes of a case.
    fn part(&self, side: usize, number: usize, places: &Memory) -> &[u8] {
        &self.host[side][places.parts[number].clone()]
    }
}

/// Waits until all work of a stream is done.
fn settled(context: &Arc<Context>, stream: &RawStream) -> Result<(), String> {
    let text = |refusal: Refusal| context.error(refusal).to_string();
    let fence = DriverFence::new(context, Vec::new()).map_err(text)?;
    fence.record(stream).map_err(text)?;
    match fence.wait(TRIAL) {
        FenceState::Done => Ok(()),
        FenceState::Failed(error) | FenceState::Lost(error) => Err(error.to_string()),
        FenceState::Pending => Err(format!("the trial of the kernels took over {TRIAL:?}")),
    }
}

/// Bytes of several cases, with some between that belong to none.
#[derive(Clone, Default)]
struct Memory {
    bytes: Vec<u8>,
    parts: Vec<Range<usize>>,
}

impl Memory {
    fn add(&mut self, part: &[u8]) {
        self.bytes.resize(self.bytes.len().next_multiple_of(BETWEEN) + BETWEEN, UNTOUCHED);
        let from = self.bytes.len();
        self.bytes.extend_from_slice(part);
        self.parts.push(from..self.bytes.len());
        self.bytes.resize(self.bytes.len() + BETWEEN, UNTOUCHED);
    }

    fn part(&self, number: usize) -> &[u8] {
        &self.bytes[self.parts[number].clone()]
    }

    fn part_mut(&mut self, number: usize) -> &mut [u8] {
        &mut self.bytes[self.parts[number].clone()]
    }
}

/// The factors and scales of a case.
struct Factors {
    case: &'static Case,
    /// Of each product, packed by tile.
    packed: Vec<[Vec<f32>; 2]>,
    scales: Vec<f32>,
}

impl Factors {
    fn of(case: &'static Case, number: u32) -> Factors {
        let [high, wide] = MatrixPatch::TILE;
        let (_, cols) = case.shape;
        let packed = case.products.iter().zip(0..).map(|((rank, rows, _), product)| {
            let random = Random { case: number, product };
            let up_at = |row: usize, k| if rows.contains(&row) { random.up(row - rows.start, k) } else { 0.0 };
            let tiles = rows.start / high..rows.end.div_ceil(high);
            let up =
                tiles.flat_map(|tile| (0..*rank).flat_map(move |k| (0..high).map(move |row| (tile * high + row, k))));
            let down_at = |k, col| if col < cols { random.down(k, col) } else { 0.0 };
            let tiles = 0..cols.div_ceil(wide);
            let down =
                tiles.flat_map(|tile| (0..*rank).flat_map(move |k| (0..wide).map(move |col| (k, tile * wide + col))));
            [up.map(|(row, k)| up_at(row, k)).collect(), down.map(|(k, col)| down_at(k, col)).collect()]
        });
        Factors { case, packed: packed.collect(), scales: case.scales(number) }
    }

    fn patch(&self) -> Result<MatrixPatch<'_>> {
        let Case { dtype, shape, products, scaled } = self.case;
        let products = products.iter().zip(&self.packed).map(|((rank, rows, scale), [up, down])| PackedProduct {
            up,
            down,
            rank: *rank,
            rows: rows.clone(),
            scale: *scale,
        });
        let grid_cols = if *scaled > 0 { shape.1.div_ceil(*scaled) } else { 0 };
        let scales = (*scaled > 0).then(|| BlockScales { values: &self.scales, block: [1, *scaled], grid_cols });
        MatrixPatch::new(*dtype, *shape, products.collect(), scales)
    }
}

impl Case {
    /// The scales. Some are subnormal, and have no reciprocal.
    fn scales(&self, number: u32) -> Vec<f32> {
        let (rows, cols) = self.shape;
        let count = if self.scaled > 0 { rows * cols.div_ceil(self.scaled) } else { 0 };
        let random = Random { case: number, product: SCALES };
        let scale = |index: usize| match (index % 7, random.bits(index, 0)) {
            (3, bits) => f32::from_bits(1 << 19 | bits as u32 >> 13),
            (_, bits) => float(bits, -5).abs(),
        };
        (0..count).map(scale).collect()
    }
}

/// The weights of a case: like weights most of them, and of all kinds the others.
fn weights(patch: &MatrixPatch<'_>, number: u32) -> Vec<u8> {
    let random = Random { case: number, product: WEIGHTS };
    let (size, mantissa, one) = match patch.dtype() {
        DType::F32 => (4, 23, 127),
        DType::F16 => (2, 10, 15),
        DType::BF16 => (2, 7, 127),
        DType::F8E4M3 => (1, 3, 7),
        _ => (1, 2, 15),
    };
    // Of E4M3, the largest values and NaN.
    let infinite = 2 * one + 1;
    let code = |index: usize| {
        let bits = random.bits(index, 0);
        let any = bits as u32 >> (32 - 8 * size);
        let (sign, fraction) = (any & 1 << (8 * size - 1), any & ((1 << mantissa) - 1));
        let magnitude = match bits & 15 {
            0 | 1 => return any,
            2..6 => fraction,
            6 => infinite << mantissa,
            7 => infinite << mantissa | fraction,
            kind => (one + 1 - (kind as u32 & 3)) << mantissa | fraction,
        };
        sign | magnitude
    };
    (0..patch.rows() * patch.cols())
        .flat_map(|index| code(index).to_le_bytes().into_iter().take(size as usize))
        .collect()
}

/// Numbers that look random, and are the same everywhere.
struct Random {
    case: u32,
    /// The product that they are for, or what else.
    product: u32,
}

const WEIGHTS: u32 = 100;
const SCALES: u32 = 101;

impl Random {
    /// A number for each two, by splitmix64 (Steele, Lea and Flood 2014).
    fn bits(&self, i: usize, j: usize) -> u64 {
        let place = (self.case << 8 | self.product) as u64;
        let state = (place << 40 | (i as u64) << 20 | j as u64).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A factor of a row. Of some rows the first two cancel each other but for what the product was rounded by.
    fn up(&self, row: usize, k: usize) -> f32 {
        let exponent = match row % 8 {
            1 if k > 1 => return 0.0,
            1 => return float(self.bits(row, 0), 24) * if k == 0 { 1.0 } else { -1.0 },
            3 => -100,
            5 => 90,
            6 => -12,
            _ => 0,
        };
        float(self.bits(row, k), exponent)
    }

    /// A factor of a column. With those of the rows, sums become subnormal, and infinite.
    fn down(&self, k: usize, col: usize) -> f32 {
        let exponent = match col % 8 {
            2 => -40,
            4 => 45,
            6 => -8,
            _ => 0,
        };
        float(self.bits(if k == 1 { 0 } else { k } | 1 << 12, col), exponent)
    }
}

/// A value of this exponent, or of the one below.
fn float(bits: u64, exponent: i32) -> f32 {
    let sign_and_mantissa = bits as u32 & 0x807f_ffff;
    let exponent = (127 + exponent - (bits >> 32 & 1) as i32) as u32;
    f32::from_bits(sign_and_mantissa | exponent << 23)
}

#[cfg(test)]
mod tests {
    use super::super::kernels::tests::function_names;
    use super::*;
    use crate::checkpoint::{Layout, Siblings, TensorInfo};
    use crate::float::Float;
    use crate::patch::{Changes, Delta, Matrix, Product, Step, TensorPatch};

    /// A case, its patch by the host's code, and its scales' bytes.
    fn by_the_host(case: &'static Case, number: u32) -> (TensorPatch, Vec<Vec<u8>>) {
        let (rows, cols) = case.shape;
        let info = |name, dtype, cols: usize| TensorInfo::new(name, dtype, &[rows as u64, cols as u64], 0, 0).unwrap();
        let weight = info("w.weight", case.dtype, cols);
        let steps = case.products.iter().zip(0..).map(|((rank, rows, scale), product)| {
            let (random, rank) = (Random { case: number, product }, *rank);
            let up = (0..rows.len()).flat_map(|row| (0..rank).map(|k| (row, k)).collect::<Vec<_>>());
            let down = (0..rank).flat_map(|k| (0..cols).map(|col| (k, col)).collect::<Vec<_>>());
            let up = Matrix { rows: rows.len(), cols: rank, values: up.map(|(row, k)| random.up(row, k)).collect() };
            let down = Matrix { rows: rank, cols, values: down.map(|(k, col)| random.down(k, col)).collect() };
            Step::add(rows.clone(), Delta::Product(Product { up, down }), *scale)
        });
        let changes = Changes { steps: steps.collect(), shape: weight.shape.clone(), ..Changes::default() };
        let scales = case.scales(number);
        let beside = (case.scaled > 0).then(|| info("w.weight_scale", DType::F32, scales.len() / rows));
        let layout = Layout::new([Some(weight.clone()), beside].into_iter().flatten().collect());
        let patch = TensorPatch::new(&weight, changes, &Siblings::of(&layout)).unwrap();
        let bytes = scales.iter().flat_map(|scale| scale.to_le_bytes()).collect::<Vec<_>>();
        (patch, if case.scaled > 0 { vec![bytes] } else { Vec::new() })
    }

    /// The bytes that the file has to have.
    fn wanted() -> Vec<u8> {
        let one = |(case, number)| {
            let (patch, scales) = by_the_host(case, number);
            let factors = Factors::of(case, number);
            let mut bytes = weights(&factors.patch().unwrap(), number);
            let scales: Vec<&[u8]> = scales.iter().map(Vec::as_slice).collect();
            let outcome = patch.apply(&mut bytes, &scales).unwrap();
            bytes.extend(outcome.saturated.to_le_bytes());
            bytes
        };
        CASES.iter().zip(0..).flat_map(one).collect()
    }

    #[test]
    fn the_bytes_are_those_of_the_host() {
        assert!(WANTED == wanted(), "run cargo test --lib write_the_bytes_of_the_trial -- --ignored");
    }

    #[test]
    #[ignore = "writes the file"]
    fn write_the_bytes_of_the_trial() {
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/src/backend/drivers/kernels/trial.bin");
        std::fs::write(file, wanted()).unwrap();
    }

    #[test]
    fn the_device_is_given_what_the_host_patches_with() {
        for (case, number) in CASES.iter().zip(0..) {
            let (patch, scales) = by_the_host(case, number);
            let scales = patch.scales(&scales.iter().map(Vec::as_slice).collect::<Vec<_>>()).unwrap();
            let (factors, wanted) = (Factors::of(case, number), patch.products(scales.as_ref()).unwrap());
            let given = factors.patch().unwrap();
            let [mut bytes, mut wanted_bytes] = [&given, &wanted].map(|patch| vec![0; patch.work_bytes()]);
            given.write(&mut bytes).unwrap();
            wanted.write(&mut wanted_bytes).unwrap();
            assert_eq!((given.dtype(), given.rows(), given.cols()), (wanted.dtype(), wanted.rows(), wanted.cols()));
            // A block of scales may be larger than the matrix.
            let block =
                |patch: &MatrixPatch<'_>| patch.scales().map(|scales| scales.block.map(|side| side.min(patch.cols())));
            assert_eq!(block(&given), block(&wanted));
            assert!(bytes == wanted_bytes, "case {number}");
        }
    }

    #[test]
    fn every_function_is_tried() {
        let tried: Vec<String> = CASES.iter().map(|case| name(&Factors::of(case, 0).patch().unwrap())).collect();
        assert!(function_names().all(|name| tried.contains(&name)), "{tried:?}");
    }

    /// How a device might compute.
    #[derive(Clone, Copy, PartialEq)]
    enum Device {
        /// As the host does.
        Right,
        /// Products are rounded before they are added.
        Unfused,
        /// Subnormals are zero.
        Flushing,
        /// Quotients are products with a reciprocal.
        Reciprocal,
    }

    /// The definition, element by element: the bytes that such a device gives.
    fn computed(case: &'static Case, number: u32, device: Device) -> Vec<u8> {
        let (float, (rows, cols)) = (Float::of(case.dtype).unwrap(), case.shape);
        let kept = |value: f32| match device {
            Device::Flushing if value.is_subnormal() => 0.0f32.copysign(value),
            _ => value,
        };
        let fused = |a: f32, b: f32, c: f32| match device {
            Device::Unfused => kept(kept(a * b) + c),
            _ => kept(kept(a).mul_add(kept(b), kept(c))),
        };
        let mut bytes = weights(&Factors::of(case, number).patch().unwrap(), number);
        let mut values = vec![0.0; rows * cols];
        float.lift(&bytes, &mut values);
        let scales = case.scales(number);
        let scale_of = |row: usize, col: usize| scales[row * cols.div_ceil(case.scaled) + col / case.scaled];
        for (index, value) in values.iter_mut().enumerate() {
            let (row, col) = (index / cols, index % cols);
            if case.scaled > 0 {
                *value = kept(kept(*value) * kept(scale_of(row, col)));
            }
            for ((rank, rows, scale), product) in case.products.iter().zip(0..) {
                if !rows.contains(&row) {
                    continue;
                }
                let random = Random { case: number, product };
                let sum =
                    (0..*rank).fold(0.0, |sum, k| fused(random.up(row - rows.start, k), random.down(k, col), sum));
                *value = kept(kept(*value) + kept(scale * sum));
            }
            if case.scaled > 0 {
                let scale = kept(scale_of(row, col));
                *value = kept(if device == Device::Reciprocal { *value * kept(1.0 / scale) } else { *value / scale });
            }
        }
        let saturated = float.round(&values, &mut bytes);
        bytes.extend(saturated.to_le_bytes());
        bytes
    }

    /// What the trial is for: a device that rounds otherwise in any of these ways fails in each case that it can fail in.
    #[test]
    fn a_device_that_rounds_otherwise_gives_other_bytes() {
        for (case, number) in CASES.iter().zip(0..) {
            let right = computed(case, number, Device::Right);
            let differs = |device| computed(case, number, device) != right;
            let what = format!("case {number}: {} {:?}", case.dtype, case.shape);
            assert!(differs(Device::Unfused), "{what}");
            // In the other types, a value near f32's subnormals is zero anyway.
            let has_subnormals = matches!(case.dtype, DType::F32 | DType::BF16) || case.scaled > 0;
            assert!(differs(Device::Flushing) || !has_subnormals, "{what}");
            assert_eq!(differs(Device::Reciprocal), case.scaled > 0, "{what}");
        }
    }

    /// Each type has results of each kind that it can have, and most are ordinary.
    #[test]
    fn the_results_are_of_all_kinds() {
        let mut rest = WANTED;
        for case in &CASES {
            let (float, count) = (Float::of(case.dtype).unwrap(), case.shape.0 * case.shape.1);
            let (matrix, later) = rest.split_at(count * float.size());
            let (saturated, later) = later.split_at(8);
            rest = later;
            let mut values = vec![0.0; count];
            float.lift(matrix, &mut values);
            let of = |kind: &dyn Fn(&f32) -> bool| values.iter().filter(|value| kind(value)).count();
            let fp8 = float.is_fp8();
            let least = match float {
                Float::F16 => 2f32.powi(-14),
                Float::E4M3 => 2f32.powi(-6),
                Float::E5M2 => 2f32.powi(-14),
                _ => f32::MIN_POSITIVE,
            };
            let what = format!("{} {:?}", case.dtype, case.shape);
            assert!(of(&|value| value.is_nan()) > 4, "{what}");
            assert!(of(&|value| *value != 0.0 && value.abs() < least) > 4, "{what}");
            assert!(of(&|value| value.is_infinite()) > 4 || float == Float::E4M3, "{what}");
            assert!(of(&|value| value.abs() >= least && value.abs() < float.largest()) > count / 3, "{what}");
            assert_eq!(u64::from_le_bytes(saturated.try_into().unwrap()) > 10, fp8, "{what}");
        }
        assert!(rest.is_empty());
    }
}
