//! Formats whose blocks have one scale, or one for each few values, and codes of whole bits or of a fixed table.

use super::parts::{bytes, double, fill, fill_by_nibbles, half, nibble, word};
use crate::float::Float;

/// The values that the four bits of IQ4_NL and IQ4_XS stand for.
pub(super) const IQ4: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

#[inline(always)]
pub(super) fn q1_0(block: &[u8; 18], values: &mut [f32; 128]) {
    let (scale, signs): (_, [u8; 16]) = (half::<0, 18>(block), bytes::<2, 16, 18>(block));
    fill(values, |at| if signs[at / 8] >> (at % 8) & 1 == 1 { scale } else { -scale });
}

#[inline(always)]
pub(super) fn q2_0(block: &[u8; 18], values: &mut [f32; 64]) {
    let (scale, codes): (_, [u8; 16]) = (half::<0, 18>(block), bytes::<2, 16, 18>(block));
    fill(values, |at| scale * f32::from((codes[at / 4] >> (2 * (at % 4)) & 3) as i8 - 1));
}

#[inline(always)]
pub(super) fn q4_0(block: &[u8; 18], values: &mut [f32; 32]) {
    let (scale, codes): (_, [u8; 16]) = (half::<0, 18>(block), bytes::<2, 16, 18>(block));
    fill_by_nibbles(&codes, values, |code, _| scale * f32::from(code as i8 - 8));
}

#[inline(always)]
pub(super) fn q4_1(block: &[u8; 20], values: &mut [f32; 32]) {
    let (scale, least) = (half::<0, 20>(block), half::<2, 20>(block));
    let codes: [u8; 16] = bytes::<4, 16, 20>(block);
    fill_by_nibbles(&codes, values, |code, _| scale * f32::from(code) + least);
}

#[inline(always)]
pub(super) fn q5_0(block: &[u8; 22], values: &mut [f32; 32]) {
    let (scale, fifth) = (half::<0, 22>(block), double::<2, 22>(block));
    let codes: [u8; 16] = bytes::<6, 16, 22>(block);
    fill_by_nibbles(&codes, values, |code, at| scale * f32::from(five_bits(code, fifth, at) as i8 - 16));
}

#[inline(always)]
pub(super) fn q5_1(block: &[u8; 24], values: &mut [f32; 32]) {
    let (scale, least, fifth) = (half::<0, 24>(block), half::<2, 24>(block), double::<4, 24>(block));
    let codes: [u8; 16] = bytes::<8, 16, 24>(block);
    fill_by_nibbles(&codes, values, |code, at| scale * f32::from(five_bits(code, fifth, at)) + least);
}

#[inline(always)]
fn five_bits(code: u8, fifth: u32, at: usize) -> u8 {
    code | ((fifth >> at & 1) as u8) << 4
}

#[inline(always)]
pub(super) fn q8_0(block: &[u8; 34], values: &mut [f32; 32]) {
    let (scale, codes): (_, [u8; 32]) = (half::<0, 34>(block), bytes::<2, 32, 34>(block));
    fill(values, |at| scale * f32::from(codes[at] as i8));
}

/// Behind the scale stands the block's sum, which only products need.
#[inline(always)]
pub(super) fn q8_1(block: &[u8; 36], values: &mut [f32; 32]) {
    let (scale, codes): (_, [u8; 32]) = (half::<0, 36>(block), bytes::<4, 32, 36>(block));
    fill(values, |at| scale * f32::from(codes[at] as i8));
}

#[inline(always)]
pub(super) fn iq4_nl(block: &[u8; 18], values: &mut [f32; 32]) {
    let (scale, codes): (_, [u8; 16]) = (half::<0, 18>(block), bytes::<2, 16, 18>(block));
    fill_by_nibbles(&codes, values, |code, _| scale * f32::from(IQ4[usize::from(code & 15)]));
}

/// Eight sub-blocks of 32, with scales of six bits in two fields.
#[inline(always)]
pub(super) fn iq4_xs(block: &[u8; 136], values: &mut [f32; 256]) {
    let (scale, high) = (half::<0, 136>(block), word::<2, 136>(block));
    let (low, codes): ([u8; 4], [u8; 128]) = (bytes::<4, 4, 136>(block), bytes::<8, 128, 136>(block));
    for (sub, (codes, values)) in codes.as_chunks::<16>().0.iter().zip(values.as_chunks_mut::<32>().0).enumerate() {
        let factor = nibble(&low, sub) | ((high >> (2 * sub) & 3) as u8) << 4;
        let scale = scale * f32::from(factor as i8 - 32);
        fill_by_nibbles(codes, values, |code, _| scale * f32::from(IQ4[usize::from(code & 15)]));
    }
}

/// The OCP Microscaling format of four bits, with the halves of 32 values in the halves of bytes. The exponent has no NaN here.
#[inline(always)]
pub(super) fn mxfp4(block: &[u8; 17], values: &mut [f32; 32]) {
    let (scale, codes): (_, [u8; 16]) = (half_power(block[0]), bytes::<1, 16, 17>(block));
    fill_by_nibbles(&codes, values, |code, _| scale * doubled_e2m1(code));
}

/// Half of two to the power of an exponent of eight bits, biased by 127.
#[inline(always)]
pub(super) fn half_power(exponent: u8) -> f32 {
    let normal = u32::from(exponent.wrapping_sub(1)) << 23;
    f32::from_bits(if exponent < 2 { 0x20_0000 << exponent } else { normal })
}

/// Twice the value of a sign, two bits of exponent and one of fraction. Zero has one sign here.
#[inline(always)]
pub(super) fn doubled_e2m1(code: u8) -> f32 {
    let magnitude = code & 7;
    // Up to 4 it is the code itself; then 6, 8 and 12.
    let magnitude = magnitude + (magnitude.max(4) - 4) + 2 * (magnitude.max(6) - 6);
    let magnitude = magnitude as i8;
    f32::from(if code & 8 == 0 { magnitude } else { -magnitude })
}

/// Four sub-blocks of sixteen, with scales in E4M3, of which only the magnitude counts.
#[inline(always)]
pub(super) fn nvfp4(block: &[u8; 36], values: &mut [f32; 64]) {
    let (scales, codes): ([u8; 4], [u8; 32]) = (bytes::<0, 4, 36>(block), bytes::<4, 32, 36>(block));
    let subs = codes.as_chunks::<8>().0.iter().zip(values.as_chunks_mut::<16>().0);
    for (scale, (codes, values)) in scales.iter().zip(subs) {
        let scale = half_e4m3(*scale);
        fill_by_nibbles(codes, values, |code, _| scale * doubled_e2m1(code));
    }
}

/// Half of a magnitude in E4M3. The code of NaN is zero; with a sign bit, which no magnitude has, it goes on counting.
#[inline(always)]
fn half_e4m3(code: u8) -> f32 {
    let mut scale = [0.0];
    Float::E4M3.lift(&[code & 0x7f], &mut scale);
    match code {
        0x7f => 0.0,
        0xff => 240.0,
        _ => scale[0] * 0.5,
    }
}
