//! The fields of blocks.

use crate::float::lift_f16;

/// The `N` bytes of a block from byte `AT` on.
#[inline(always)]
pub(super) fn bytes<const AT: usize, const N: usize, const BYTES: usize>(block: &[u8; BYTES]) -> [u8; N] {
    const { assert!(AT + N <= BYTES) };
    std::array::from_fn(|at| block[AT + at])
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
    std::array::from_fn(|at| u16::from_le_bytes([block[AT + 2 * at], block[AT + 2 * at + 1]]))
}

/// The 32 bits at byte `AT`.
#[inline(always)]
pub(super) fn double<const AT: usize, const BYTES: usize>(block: &[u8; BYTES]) -> u32 {
    u32::from_le_bytes(bytes::<AT, 4, BYTES>(block))
}

/// The low halves of all bytes, and after these the high halves.
#[inline(always)]
pub(super) fn nibbles<const N: usize>(bytes: &[u8; N], at: usize) -> u8 {
    if at < N { bytes[at] & 15 } else { bytes[at - N] >> 4 }
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
