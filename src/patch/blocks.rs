//! Blocks of GGML's types as values, and values as blocks.

use rayon::prelude::*;

use super::vector::Tier;
use crate::dtype::DType;
use crate::error::{Error, Measured, Mismatch, Result};
use crate::ggml::Format;
use crate::threads;

/// Values that are worth a task of their own, a multiple of every block.
const TOGETHER: usize = 1 << 16;

/// Computes the values that `blocks` of a type of GGML stand for, those of the first block first. They are exactly those of
/// gguf-py's `dequantize`; NaN may have other bits.
///
/// Above a MiB of values the work runs on the library's threads, one for each core.
///
/// ```
/// use tensor_offload::DType;
/// use tensor_offload::patch::dequantise;
/// // A scale of 0.5 in f16, and 32 codes of eight bits.
/// let block: Vec<u8> = [0x00, 0x38].into_iter().chain(0..32).collect();
/// let mut values = [0.0; 32];
/// dequantise(DType::Q8_0, &block, &mut values)?;
/// assert_eq!(values[..4], [0.0, 0.5, 1.0, 1.5]);
/// # Ok::<(), tensor_offload::Error>(())
/// ```
///
/// # Errors
/// [`Error::Mismatch`] for a type that is no block type of GGML; [`Error::WrongSize`] when `blocks` is not as long as blocks of as many
/// values, or these are not a whole number of blocks; [`Error::Io`] when no threads can be created.
pub fn dequantise(dtype: DType, blocks: &[u8], values: &mut [f32]) -> Result<()> {
    let format = Format::of(dtype).ok_or(Mismatch::NoBlocks { dtype })?;
    check(format, blocks.len(), values.len())?;
    let tier = Tier::best();
    if values.len() <= TOGETHER * 4 {
        tier.dequantise(format, blocks, values);
        return Ok(());
    }
    threads::run(|| {
        let blocks = blocks.par_chunks(TOGETHER / format.elements() * format.bytes());
        values
            .par_chunks_mut(TOGETHER)
            .zip(blocks)
            .for_each(|(values, blocks)| tier.dequantise(format, blocks, values));
    })
}

/// Computes the blocks of a type of GGML that come nearest to `values`. Returns how many of them the type cannot express.
///
/// For Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 and MXFP4 they are, byte for byte, those of gguf-py's `quantize`; for Q4_K, Q5_K, Q6_K
/// and IQ4_NL their errors are those of llama.cpp's `quantize_row_…_ref` and `quantize_iq4_nl`, without an importance matrix.
/// Other types cannot be written.
///
/// A block with a value that is NaN or infinite is one that the type cannot express, as is, in Q4_K, Q5_K, Q6_K and IQ4_NL,
/// one whose scale is beyond f16: all its values become NaN (in MXFP4, which has no NaN, infinite). In Q4_0, Q4_1, Q5_0, Q5_1
/// and Q8_0 a scale beyond f16 is stored as an infinity.
///
/// # Errors
/// [`Error::Mismatch`] for a type that is not written; otherwise as [`dequantise`].
pub fn quantise(dtype: DType, values: &[f32], blocks: &mut [u8]) -> Result<u64> {
    let written = Format::of(dtype).filter(|format| format.is_written());
    let format = written.ok_or_else(|| Mismatch::NotWritten { dtype, written: Format::written().collect() })?;
    check(format, blocks.len(), values.len())?;
    let tier = Tier::best();
    if values.len() <= TOGETHER {
        return Ok(tier.quantise(format, values, blocks).unwrap_or_default());
    }
    threads::run(|| {
        let blocks = blocks.par_chunks_mut(TOGETHER / 8 / format.elements() * format.bytes());
        let tasks = values.par_chunks(TOGETHER / 8).zip(blocks);
        tasks.map(|(values, blocks)| tier.quantise(format, values, blocks).unwrap_or_default()).sum()
    })
}

/// Fails unless `bytes` are whole blocks of `count` values.
fn check(format: Format, bytes: usize, count: usize) -> Result<()> {
    let needed = count.div_ceil(format.elements()).saturating_mul(format.bytes());
    if needed == bytes && count.is_multiple_of(format.elements()) {
        return Ok(());
    }
    let what = Measured::Blocks { dtype: format.dtype(), values: count };
    Err(Error::WrongSize { what, needed: needed as u64, given: bytes as u64 })
}
