//! The fields of blocks.

use crate::float::lift_f16;

/// Sets each value by its place. A loop, since the standard library's functions on arrays are compiled for the baseline where
/// they are not inlined.
#[inline(always)]
pub(super) fn fill<const N: usize>(values: &mut [f32; N], of: impl Fn(usize) -> f32) {
    for (at, value) in values.iter_mut().enumerate() {
        *value = of(at);
    }
}

/// What a function makes of each value, as [`fill`] sets them.
#[inline(always)]
pub(super) fn mapped<T: Copy + Default, const N: usize>(values: &[f32; N], of: impl Fn(f32) -> T) -> [T; N] {
    let mut mapped = [T::default(); N];
    for (mapped, value) in mapped.iter_mut().zip(values) {
        *mapped = of(*value);
    }
    mapped
}

/// The `N` bytes of a block from byte `AT` on.
#[inline(always)]
pub(super) fn bytes<const AT: usize, const N: usize, const BYTES: usize>(block: &[u8; BYTES]) -> [u8; N] {
    const { assert!(AT + N <= BYTES) };
    let mut bytes = [0; N];
    bytes.copy_from_slice(&block[AT..AT + N]);
    bytes
}

/// The half float at byte `AT`.
#[inline(always)]
pub(super) fn half<const AT: usize, const BYTES: usize>(block: &[u8; BYTES]) -> f32 {
    lift_f16(word::<AT, BYTES>(block))
}

/// The sixteen bits at byte `AT`.
#[inline(always)]
pub(super) fn word<const AT: usize, const BYTES: usize>(block: &[u8; BYTES]) -> u16 {
    u16::from_le_bytes(bytes::<AT, 2, BYTES>(block))
}

/// The `N` numbers of sixteen bits from byte `AT` on.
#[inline(always)]
pub(super) fn words<const AT: usize, const N: usize, const BYTES: usize>(block: &[u8; BYTES]) -> [u16; N] {
    const { assert!(AT + 2 * N <= BYTES) };
    let mut words = [0; N];
    for (word, raw) in words.iter_mut().zip(block[AT..].as_chunks().0) {
        *word = u16::from_le_bytes(*raw);
    }
    words
}

/// The 32 bits at byte `AT`.
#[inline(always)]
pub(super) fn double<const AT: usize, const BYTES: usize>(block: &[u8; BYTES]) -> u32 {
    u32::from_le_bytes(bytes::<AT, 4, BYTES>(block))
}

/// Sets values by their half bytes and their places: those of the low halves of all bytes, and after these of the high ones.
#[inline(always)]
pub(super) fn fill_by_nibbles<const N: usize>(bytes: &[u8; N], values: &mut [f32], of: impl Fn(u8, usize) -> f32) {
    let (low, high) = values.split_at_mut(N);
    for (at, (value, byte)) in low.iter_mut().zip(bytes).enumerate() {
        *value = of(byte & 15, at);
    }
    for (at, (value, byte)) in high.iter_mut().zip(bytes).enumerate() {
        *value = of(byte >> 4, N + at);
    }
}

/// Half byte number `at`, of which a byte has the low one first.
#[inline(always)]
pub(super) fn nibble<const N: usize>(bytes: &[u8; N], at: usize) -> u8 {
    bytes[at / 2] >> (4 * (at % 2)) & 15
}

/// `value` with its sign changed where `bit` of `signs` is set.
#[inline(always)]
pub(super) fn signed(value: f32, signs: u8, bit: usize) -> f32 {
    f32::from_bits(value.to_bits() ^ (u32::from(signs) >> bit) << 31)
}

/// The eight signs that seven bits stand for: the eighth makes the number of minus signs even.
#[inline(always)]
pub(super) fn even_signs(bits: u32) -> u8 {
    let bits = bits as u8 & 0x7f;
    bits | (bits.count_ones() as u8 & 1) << 7
}
