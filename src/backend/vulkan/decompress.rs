//! The weights of the lossless code, decoded on the device.

use super::device::VulkanDevice;
use super::dispatch::{Binding, Dispatch, ROW};
use super::pipelines::{Pipeline, Program};
use crate::backend::{Decompress, Stream};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::lossless::{BLOCK_WEIGHTS, CODE_ALIGN, CodePart, Info, longest_block};

/// The SPIR-V that `scripts/kernels/vulkan` makes of `kernels/lossless.comp`.
const TEXT: &[u8] = include_bytes!("kernels/lossless.spv");

/// The number of a format in the kernel; types whose weights have the same fields share one.
fn format(dtype: DType) -> Option<u32> {
    match dtype {
        DType::BF16 => Some(0),
        DType::F16 => Some(1),
        DType::F32 => Some(2),
        DType::F8E4M3 | DType::F8E4M3Fnuz => Some(3),
        DType::F8E5M2 | DType::F8E5M2Fnuz => Some(4),
        _ => None,
    }
}

/// The kernel for this type.
///
/// # Errors
/// The reason why the device has none, for the user.
pub(super) fn pipeline(device: &VulkanDevice, stream: &dyn Stream, dtype: DType) -> Result<Pipeline, String> {
    let format = format(dtype).ok_or_else(|| format!("{} has no kernel that decodes {dtype}", stream.device()))?;
    device.kernel(stream, &Program { name: format!("weights of format {format}"), text: TEXT, constants: vec![format] })
}

/// The kernels that decode a part of a code. Each is for as much of the code, and for as many weights, as bindings can hold; those that
/// find no block there end at once.
pub(super) fn dispatches(device: &VulkanDevice, stream: &dyn Stream, work: &Decompress) -> Result<Vec<Dispatch>> {
    let info = work.info();
    let pipeline = pipeline(device, stream, info.dtype);
    let pipeline = pipeline.map_err(|why| Error::invalid(format!("{} does not decompress: {why}", stream.device())))?;
    if info.count == 0 {
        return Ok(Vec::new());
    }
    let most = Binding::most(device.context());
    let too_many = || Error::invalid(format!("{} weights are too many for {}", info.count, stream.device()));
    let narrow = |number: u64| u32::try_from(number).map_err(|_| too_many());
    if info.head_bytes() > most {
        return Err(too_many());
    }
    let size = info.dtype.element_bytes().unwrap_or(1) as u64;
    if most < longest_block(size).max(BLOCK_WEIGHTS as u64 * size) + CODE_ALIGN as u64 {
        return Err(Binding::too_small(device.context()));
    }
    let head = device.source("what is to be decompressed", work.source(), work.offset())?;
    let code = device.source("what is to be decompressed", work.source(), work.part_offset())?;
    let weights = device.target(WEIGHTS, work.dst(), work.at(), info.decoded_bytes as usize)?;
    let verdict = device.target(VERDICT, work.verdict(), work.place(), Decompress::VERDICT)?;
    let bound = |place, bytes| Binding::new(device.context(), place, bytes);
    let head = bound(head, info.head_bytes());
    let verdict = bound(verdict, Decompress::VERDICT as u64);
    let blocks = info.blocks();
    let last = narrow(info.count - (blocks - 1) * BLOCK_WEIGHTS as u64)?;
    let less_expected = info.sum.wrapping_neg();
    let part = work.code_part();
    let mut dispatches = Vec::new();
    for window in windows(part, info, most) {
        for (first, end) in ranges(info, most) {
            let of_window = bound((code.0, code.1 + window.begin - part.begin), window.end - window.begin);
            let begin = first * BLOCK_WEIGHTS as u64 * size;
            let bytes = (end * BLOCK_WEIGHTS as u64 * size).min(info.decoded_bytes) - begin;
            let of_range = bound((weights.0, weights.1 + begin), bytes);
            let units = [window.begin, window.after, window.end].map(|place| narrow(place / CODE_ALIGN as u64));
            let [unit_begin, unit_after, unit_end] = units;
            let groups = groups(&window, end - first, size);
            let arguments = vec![
                head.at,
                of_window.at,
                of_range.at,
                verdict.at,
                unit_begin?,
                unit_after?,
                unit_end?,
                groups,
                narrow(blocks)?,
                last,
                info.in_blocks.into(),
                less_expected as u32,
                (less_expected >> 32) as u32,
                narrow(first)?,
                narrow(end)?,
                (dispatches.is_empty() && part.after == 0).into(),
            ];
            let bindings = vec![head, of_window, of_range, verdict];
            dispatches.push(Dispatch { pipeline, bindings, arguments, groups });
        }
    }
    Ok(dispatches)
}

/// The groups of a kernel for a window and so many blocks: one for each block, if the window's blocks are half as long as blocks of
/// weights of `size` bytes can be, or longer. The kernel knows groups by their columns alone, and goes on where they are fewer.
fn groups(window: &CodePart, blocks: u64, size: u64) -> u32 {
    let likely = (2 * (window.end - window.after)).div_ceil(longest_block(size));
    likely.min(blocks).min(u64::from(ROW)) as u32
}

/// The part in as few parts as have no more bytes than `most`.
fn windows(part: CodePart, info: &Info, most: u64) -> Vec<CodePart> {
    let CodePart { begin, after, end } = part;
    if end - begin <= most {
        return vec![part];
    }
    // Behind the end of the window before, as much as a block that ends after it may have.
    let unit = CODE_ALIGN as u64;
    let tail = longest_block(info.decoded_bytes / info.count.max(1)).next_multiple_of(unit);
    let step = most.saturating_sub(tail).max(unit) / unit * unit;
    let window =
        |after: u64| CodePart { begin: after.saturating_sub(tail).max(begin), after, end: end.min(after + step) };
    (after..end).step_by(step as usize).map(window).collect()
}

/// The blocks in ranges whose weights have no more bytes than `most`.
fn ranges(info: &Info, most: u64) -> Vec<(u64, u64)> {
    let size = info.decoded_bytes / info.count.max(1);
    let step = (most / (BLOCK_WEIGHTS as u64 * size)).max(1);
    (0..info.blocks()).step_by(step as usize).map(|first| (first, info.blocks().min(first + step))).collect()
}

/// What the buffers are called.
const WEIGHTS: &str = "the memory for the weights of a code";
const VERDICT: &str = "the memory for the verdict on a code";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lossless::{compress, compressed_bound};

    #[test]
    fn all_types_that_are_coded_have_a_number() {
        assert!(DType::all().all(|dtype| compressed_bound(dtype, 1).is_some() == format(dtype).is_some()));
    }

    #[test]
    fn groups_are_in_one_row() {
        let part = |bytes: u64| CodePart { begin: 0, after: 0, end: bytes };
        assert_eq!(groups(&part(5 * longest_block(2)), 7, 2), 7);
        assert_eq!(groups(&part(2 * longest_block(2)), 7, 2), 4);
        assert_eq!(groups(&part(4 << 30), 1 << 20, 2), ROW);
    }

    #[test]
    fn windows_and_ranges_are_small_enough_and_cover_all() {
        let weights: Vec<u8> =
            (0..40 * 16384u32).map(|at| (at.wrapping_mul(0x9e37_79b1) >> 24) as u8 & 0x87 | 0x38).collect();
        let info = Info::read(&compress(DType::BF16, &weights).unwrap()).unwrap();
        let whole = CodePart::whole(&info);
        let later = CodePart { begin: 20_000 / 16 * 16, after: 60_000 / 16 * 16, end: info.bytes };
        for most in [40_000, 50_001, 65_536, 1 << 30] {
            for part in [whole, later] {
                assert!(part.is_of(&info));
                let windows = windows(part, &info, most);
                assert_eq!((windows[0].after, windows.last().unwrap().end), (part.after, part.end));
                assert!(windows.iter().all(|window| window.is_of(&info) && window.end - window.begin <= most.max(16)));
                assert!(windows.iter().all(|window| window.begin >= part.begin));
                assert!(windows.windows(2).all(|pair| pair[0].end == pair[1].after));
            }
            let ranges = ranges(&info, most);
            assert_eq!((ranges[0].0, ranges.last().unwrap().1), (0, info.blocks()));
            assert!(ranges.iter().all(|(first, end)| (end - first) * 16384 <= most));
            assert!(ranges.windows(2).all(|pair| pair[0].1 == pair[1].0));
        }
    }
}
