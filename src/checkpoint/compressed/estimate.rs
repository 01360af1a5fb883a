//! What a checkpoint would be if its files were compressed, by samples.

use super::super::layout::Stored;
use super::super::{Checkpoint, Layout, TensorInfo};
use crate::checkpoint::TensorId;
use crate::error::Result;
use crate::lossless::{self, BLOCK_WEIGHTS, padded};

/// The blocks of a tensor that are looked at, spread over it.
const SAMPLED: u64 = 4;

impl Checkpoint {
    /// The layout that these tensors have in a file of [`write_compressed`](super::write_compressed), with the sizes of codes estimated
    /// from a few blocks of each: to see what [`Planner::compress`](crate::Planner::compress) would bring before such a file is
    /// written. Tensors that are in that form already count as they are. What is loaded has to be the file itself.
    ///
    /// ```
    /// # use tensor_offload::{Checkpoint, Machine, Planner};
    /// # let path = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/data/tiny-llama");
    /// let machine = Machine::described(&["cuda:0=1mb,link=10".parse()?, "cpu=64mb".parse()?]);
    /// let layout = Checkpoint::open(path)?.estimate_compressed()?;
    /// let plan = Planner::new(&layout, &machine).allocation("cpu,*".parse()?).compress(true).plan()?;
    /// println!("{}", plan.streamed_bytes());
    /// # Ok::<(), tensor_offload::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`read`](Checkpoint::read).
    pub fn estimate_compressed(&self) -> Result<Layout> {
        let layout = self.layout();
        let stored = |tensor: TensorId| {
            let info = layout.at(tensor);
            let plain = Stored { bytes: info.bytes, is_code: false };
            match layout.stored(tensor) {
                Some(known) if known.is_code => Ok(known),
                _ => Ok(self.sampled(tensor, info)?.map_or(plain, |bytes| Stored { bytes, is_code: true })),
            }
        };
        let stored = layout.tensor_ids().map(stored).collect::<Result<Vec<_>>>()?;
        let mut stored = stored.into_iter();
        Ok(layout.clone().stored_as(|_| stored.next()))
    }

    /// The bytes of a tensor's code, by a sample. `None` if it would stay as it is.
    fn sampled(&self, tensor: TensorId, info: &TensorInfo) -> Result<Option<u64>> {
        let size = info.dtype.element_bytes().unwrap_or(1) as u64;
        let (count, block) = (info.bytes / size, BLOCK_WEIGHTS as u64);
        if info.bytes == 0 || lossless::compressed_bound(info.dtype, 0).is_none() {
            return Ok(None);
        }
        let blocks = count.div_ceil(block);
        let mut sample = Vec::new();
        for number in (0..blocks).step_by(blocks.div_ceil(SAMPLED) as usize) {
            let (at, weights) = (number * block, block.min(count - number * block));
            let begin = sample.len();
            sample.resize(begin + (weights * size) as usize, 0);
            self.read_at(tensor, at * size, &mut sample[begin..])?;
        }
        let ratio = lossless::estimate(info.dtype, &sample).unwrap_or(1.0);
        let index = lossless::Info::BYTES + 4 * (blocks + 1);
        let bytes = padded(((info.bytes as f64 * ratio) as u64).saturating_add(index));
        // A tensor stays as it is if that saves less than a twentieth.
        Ok(Some(bytes).filter(|bytes| *bytes < info.bytes - info.bytes / 20))
    }
}

impl Layout {
    /// This layout as it would be in a compressed file whose codes have `ratio` of the bytes of each tensor: for plans and forecasts of
    /// models that are not at hand. bf16 weights have 0.67 to 0.69. A ratio that saves nothing leaves the layout as it is in plain files.
    #[must_use]
    pub fn assume_compressed(self, ratio: f64) -> Layout {
        let stored = |info: &TensorInfo| {
            // No code is empty.
            let bytes = padded(((info.bytes as f64 * ratio) as u64).max(1));
            let is_code = bytes < info.bytes;
            Some(Stored { bytes: if is_code { bytes } else { info.bytes }, is_code })
        };
        self.stored_as(stored)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// No number is too large, and none that is no ratio saves more than all.
    #[test]
    fn any_ratio_and_any_size_is_assumed() {
        for ratio in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -1.0, 0.0, 1e-300, 0.675, 1.0, 1e300] {
            for bytes in [0, 1, 16, 17, 1 << 30, u64::MAX - 1, u64::MAX] {
                let layout = Layout::blocks([bytes]).assume_compressed(ratio);
                let module = layout.modules()[0].id;
                let compressed = layout.compressed_bytes(module);
                assert!(compressed.is_none_or(|some| some > 0 && some < bytes), "{bytes} by {ratio}: {compressed:?}");
                let saves = bytes > 16 && (ratio.is_nan() || ratio < 1.0);
                assert_eq!(compressed.is_some(), saves, "{bytes} by {ratio}");
            }
        }
    }
}
