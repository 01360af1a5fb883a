//! Formats of the values -1, 0 and 1 times a scale.

use super::parts::{bytes, fill, half};

/// Five values in a byte, as digits of base three of a fraction: the value of byte `code` times `power`, a power of three.
#[inline(always)]
fn digit(code: u8, power: u8) -> i8 {
    ((u16::from(code.wrapping_mul(power)) * 3) >> 8) as i8 - 1
}

const POWERS: [u8; 5] = [1, 3, 9, 27, 81];

/// 32 bytes of five values, sixteen of five and four of four. The first values of all bytes come first.
#[inline(always)]
pub(super) fn tq1_0(block: &[u8; 54], values: &mut [f32; 256]) {
    let (first, second): ([u8; 32], [u8; 16]) = (bytes::<0, 32, 54>(block), bytes::<32, 16, 54>(block));
    let (last, scale): ([u8; 4], _) = (bytes::<48, 4, 54>(block), half::<52, 54>(block));
    for (values, power) in values.as_chunks_mut::<32>().0.iter_mut().zip(POWERS) {
        fill(values, |at| scale * f32::from(digit(first[at], power)));
    }
    for (values, power) in values[160..].as_chunks_mut::<16>().0.iter_mut().zip(POWERS) {
        fill(values, |at| scale * f32::from(digit(second[at], power)));
    }
    for (values, power) in values[240..].as_chunks_mut::<4>().0.iter_mut().zip(POWERS) {
        fill(values, |at| scale * f32::from(digit(last[at], power)));
    }
}

/// Four values in a byte; each 32 bytes hold 128.
#[inline(always)]
pub(super) fn tq2_0(block: &[u8; 66], values: &mut [f32; 256]) {
    let (codes, scale): ([u8; 64], _) = (bytes::<0, 64, 66>(block), half::<64, 66>(block));
    for (sub, values) in values.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (first, shift) = (sub / 4 * 32, sub % 4 * 2);
        fill(values, |at| scale * f32::from((codes[first + at] >> shift & 3) as i8 - 1));
    }
}
