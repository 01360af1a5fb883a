//! The "K" formats: blocks of 256 values in sub-blocks, whose scales are themselves codes of a scale of the block.

use super::parts::{bytes, fill, half};

/// Sixteen sub-blocks of sixteen.
#[inline(always)]
pub(super) fn q2_k(block: &[u8; 84], values: &mut [f32; 256]) {
    let (factors, codes): ([u8; 16], [u8; 64]) = (bytes::<0, 16, 84>(block), bytes::<16, 64, 84>(block));
    let (scale, least) = (half::<80, 84>(block), half::<82, 84>(block));
    for (sub, values) in values.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let (scale, least) = (scale * f32::from(factors[sub] & 15), least * f32::from(factors[sub] >> 4));
        let (first, shift) = two_bits(sub);
        fill(values, |at| scale * f32::from(codes[first + at] >> shift & 3) - least);
    }
}

/// Where the two-bit codes of a sub-block of sixteen lie in 64 bytes: the first byte, and the place in each.
#[inline(always)]
fn two_bits(sub: usize) -> (usize, usize) {
    (sub / 8 * 32 + sub % 2 * 16, sub % 8 / 2 * 2)
}

/// Sixteen sub-blocks of sixteen. A set bit of the mask is the third bit of a code, from which four is taken off.
#[inline(always)]
pub(super) fn q3_k(block: &[u8; 110], values: &mut [f32; 256]) {
    let (mask, codes): ([u8; 32], [u8; 64]) = (bytes::<0, 32, 110>(block), bytes::<32, 64, 110>(block));
    let factors: [u8; 12] = bytes::<96, 12, 110>(block);
    let scale = half::<108, 110>(block);
    for (sub, values) in values.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let low = factors[sub % 8] >> (sub / 8 * 4) & 15;
        let high = factors[8 + sub % 4] >> (sub / 4 * 2) & 3;
        let scale = scale * f32::from((low | high << 4) as i8 - 32);
        let (first, shift) = two_bits(sub);
        fill(values, |at| {
            let third = mask[sub % 2 * 16 + at] >> (sub / 2) & 1;
            scale * f32::from((codes[first + at] >> shift & 3 | third << 2) as i8 - 4)
        });
    }
}

/// The factors of scale and least value of eight sub-blocks, each of six bits.
#[inline(always)]
pub(super) fn six_bits(packed: &[u8; 12], sub: usize) -> (u8, u8) {
    if sub < 4 {
        return (packed[sub] & 63, packed[sub + 4] & 63);
    }
    let low = packed[sub + 4];
    (low & 15 | packed[sub - 4] >> 6 << 4, low >> 4 | packed[sub] >> 6 << 4)
}

/// Eight sub-blocks of 32; each 32 bytes hold two of them.
#[inline(always)]
pub(super) fn q4_k(block: &[u8; 144], values: &mut [f32; 256]) {
    let (scale, least) = (half::<0, 144>(block), half::<2, 144>(block));
    let (factors, codes): ([u8; 12], [u8; 128]) = (bytes::<4, 12, 144>(block), bytes::<16, 128, 144>(block));
    for (sub, values) in values.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (of_scale, of_least) = six_bits(&factors, sub);
        let (scale, least) = (scale * f32::from(of_scale), least * f32::from(of_least));
        let (first, shift) = (sub / 2 * 32, sub % 2 * 4);
        fill(values, |at| scale * f32::from(codes[first + at] >> shift & 15) - least);
    }
}

/// As [`q4_k`], with the fifth bits of all sub-blocks in 32 bytes.
#[inline(always)]
pub(super) fn q5_k(block: &[u8; 176], values: &mut [f32; 256]) {
    let (scale, least) = (half::<0, 176>(block), half::<2, 176>(block));
    let (factors, fifth): ([u8; 12], [u8; 32]) = (bytes::<4, 12, 176>(block), bytes::<16, 32, 176>(block));
    let codes: [u8; 128] = bytes::<48, 128, 176>(block);
    for (sub, values) in values.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (of_scale, of_least) = six_bits(&factors, sub);
        let (scale, least) = (scale * f32::from(of_scale), least * f32::from(of_least));
        let (first, shift) = (sub / 2 * 32, sub % 2 * 4);
        fill(values, |at| scale * f32::from(codes[first + at] >> shift & 15 | (fifth[at] >> sub & 1) << 4) - least);
    }
}

/// Sixteen sub-blocks of sixteen, with whole bytes for their factors.
#[inline(always)]
pub(super) fn q6_k(block: &[u8; 210], values: &mut [f32; 256]) {
    let (low, high): ([u8; 128], [u8; 64]) = (bytes::<0, 128, 210>(block), bytes::<128, 64, 210>(block));
    let factors: [u8; 16] = bytes::<192, 16, 210>(block);
    let scale = half::<208, 210>(block);
    for (sub, values) in values.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (first, shift) = (sub / 4 * 64 + sub % 2 * 32, sub % 4 / 2 * 4);
        let (high_first, high_shift) = (sub / 4 * 32, sub % 4 * 2);
        let scales = [0, 1].map(|half| scale * f32::from(factors[2 * sub + half] as i8));
        fill(values, |at| {
            let code = low[first + at] >> shift & 15 | (high[high_first + at] >> high_shift & 3) << 4;
            scales[at / 16] * f32::from(code as i8 - 32)
        });
    }
}

/// A scale in f32, the codes, and sums that only products need.
#[inline(always)]
pub(super) fn q8_k(block: &[u8; 292], values: &mut [f32; 256]) {
    let (scale, codes): (_, [u8; 256]) = (f32::from_le_bytes(bytes::<0, 4, 292>(block)), bytes::<4, 256, 292>(block));
    fill(values, |at| scale * f32::from(codes[at] as i8));
}
