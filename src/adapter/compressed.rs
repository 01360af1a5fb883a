//! How long the codes will be that a load makes of weights: estimates, by a few blocks of each tensor.

use super::patches::Patches;
use crate::checkpoint::{Checkpoint, Stored, TensorId, TensorInfo};
use crate::error::Result;
use crate::float::Float;
use crate::lossless::{self, BLOCK_WEIGHTS, Info, padded};
use crate::patch::TensorPatch;

/// The blocks of a tensor that are looked at, spread over it.
const SAMPLED: u64 = 4;

/// A part of the weights' bytes that an estimate is larger than the sample says, since the other blocks may be a little longer.
const MARGIN: u64 = 128;

impl Patches {
    /// These patches, with estimates for all tensors that no file has compressed.
    pub(super) fn compress(self, checkpoint: &Checkpoint) -> Result<Patches> {
        let layout = self.layout();
        let unknown = layout.tensor_ids().filter(|&t| layout.storage(t) == t && layout.stored(t).is_none());
        let estimate = |tensor: TensorId| {
            let info = layout.at(tensor);
            let plain = Stored { bytes: info.bytes, is_code: false, is_made: true };
            // Factors of deferred changes are small, and in no file.
            let code = if self.factor(tensor).is_none() { self.estimate(checkpoint, tensor, info)? } else { None };
            Ok((tensor, code.map_or(plain, |bytes| Stored { bytes, is_code: true, is_made: true })))
        };
        let layout = layout.with_stored(unknown.map(estimate).collect::<Result<Vec<_>>>()?);
        Ok(self.with_layout(layout))
    }

    /// The bytes of a tensor's code. `None` if it would stay as it is.
    fn estimate(&self, checkpoint: &Checkpoint, tensor: TensorId, info: &TensorInfo) -> Result<Option<u64>> {
        if info.bytes == 0 || lossless::compressed_bound(info.dtype, 0).is_none() {
            return Ok(None);
        }
        let ratio = lossless::estimate(info.dtype, &self.sample(checkpoint, tensor, info)?).unwrap_or(1.0);
        let blocks = (info.bytes / info.dtype.element_bytes().unwrap_or(1) as u64).div_ceil(BLOCK_WEIGHTS as u64);
        let index = Info::BYTES + 4 * (blocks + 1);
        let bytes = padded(((info.bytes as f64 * ratio) as u64).saturating_add(index));
        // A tensor stays as it is if that saves less than a twentieth.
        let is_code = bytes < info.bytes - info.bytes / 20;
        Ok(is_code.then(|| padded(bytes.saturating_add(info.bytes / MARGIN)).min(info.bytes)))
    }

    /// Some blocks of a tensor in the type that it is loaded in. They are not changed by adapters, which changes little.
    fn sample(&self, checkpoint: &Checkpoint, tensor: TensorId, info: &TensorInfo) -> Result<Vec<u8>> {
        let (size, block) = (info.dtype.element_bytes().unwrap_or(1) as u64, BLOCK_WEIGHTS as u64);
        let stored = checkpoint.info(tensor)?;
        let cast = Float::of(info.dtype).filter(|_| stored.dtype != info.dtype);
        // What cannot be cast has been refused.
        let cast = cast.and_then(|float| TensorPatch::of_cast(stored, float).ok());
        // A padded weight has more elements than its file.
        let count = stored.shape.iter().product::<u64>().min(info.bytes / size);
        let mut sample = Vec::new();
        for number in (0..count.div_ceil(block)).step_by(count.div_ceil(block).div_ceil(SAMPLED).max(1) as usize) {
            let (at, weights) = (number * block, block.min(count - number * block));
            let begin = sample.len();
            sample.resize(begin + (weights * size) as usize, 0);
            match &cast {
                Some(cast) => drop(cast.read_part(checkpoint, tensor, (at * size) as usize, &mut sample[begin..])?),
                None => checkpoint.read_at(tensor, at * size, &mut sample[begin..])?,
            }
        }
        Ok(sample)
    }
}
