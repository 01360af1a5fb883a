//! Layouts of weights that are not compressed yet, as they would be then.

use super::super::layout::Stored;
use super::super::{Layout, TensorInfo};
use crate::lossless::padded;

impl Layout {
    /// This layout as it would be in a compressed file whose codes have `ratio` of the bytes of each tensor: for plans and forecasts of
    /// models that are not at hand. bf16 weights have 0.67 to 0.69. A ratio that saves nothing leaves the layout as it is in plain files.
    #[must_use]
    pub fn assume_compressed(self, ratio: f64) -> Layout {
        let stored = |info: &TensorInfo| {
            // No code is empty.
            let bytes = padded(((info.bytes as f64 * ratio) as u64).max(1));
            let is_code = bytes < info.bytes;
            Some(Stored { bytes: if is_code { bytes } else { info.bytes }, is_code, is_made: true })
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
