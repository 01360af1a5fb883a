//! Numbers that look like weights: those of `data/gguf/reference.py`.

/// A sequence of its own for each seed and name.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn of(seed: u64, name: &str) -> Random {
        Random(name.bytes().fold(seed + 1, |state, byte| (state ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)))
    }

    pub(crate) fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 40) as f32 / (1 << 24) as f32 - 0.5
    }
}
