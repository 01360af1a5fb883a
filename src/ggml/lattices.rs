//! The "IQ" formats of one to three bits: blocks of 256 values, in groups that are points of a [lattice](super::grids).

use super::grids;
use super::parts::{bytes, double, even_signs, fill, half, nibble, signed, words};
use crate::float::lift_f16;

/// Eight values: a point times a scale, with signs.
#[inline(always)]
fn point(values: &mut [f32; 8], scale: f32, point: &[i8; 8], signs: u8) {
    fill(values, |at| signed(scale * f32::from(point[at]), signs, at));
}

/// As [`point`], of two points with four coordinates.
#[inline(always)]
fn points(values: &mut [f32; 8], scale: f32, points: [&[i8; 4]; 2], signs: u8) {
    fill(values, |at| signed(scale * f32::from(points[at / 4][at % 4]), signs, at));
}

/// For each 32 values four indexes, and in 32 bits the signs of each eight and the scale.
#[inline(always)]
pub(super) fn iq2_xxs(block: &[u8; 66], values: &mut [f32; 256]) {
    let (scale, codes): (_, [u8; 64]) = (half::<0, 66>(block), bytes::<2, 64, 66>(block));
    for (codes, values) in codes.as_chunks::<8>().0.iter().zip(values.as_chunks_mut::<32>().0) {
        let rest = double::<4, 8>(codes);
        let scale = scale * (0.5 + (rest >> 28) as f32) * 0.25;
        for (group, values) in values.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            let of_grid = &grids::IQ2_XXS[usize::from(codes[group])];
            point(values, scale, of_grid, even_signs(rest >> (7 * group)));
        }
    }
}

/// For each eight values an index of nine bits and their signs, for each sixteen a scale of four bits.
#[inline(always)]
pub(super) fn iq2_xs(block: &[u8; 74], values: &mut [f32; 256]) {
    let (scale, codes): (_, [u16; 32]) = (half::<0, 74>(block), words::<2, 32, 74>(block));
    let factors: [u8; 8] = bytes::<66, 8, 74>(block);
    for (group, values) in values.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let scale = scale * (0.5 + f32::from(nibble(&factors, group / 2))) * 0.25;
        let of_grid = &grids::IQ2_XS[usize::from(codes[group] & 511)];
        point(values, scale, of_grid, even_signs(u32::from(codes[group] >> 9)));
    }
}

/// For each eight values an index of ten bits and eight signs, for each sixteen a scale of four bits.
#[inline(always)]
pub(super) fn iq2_s(block: &[u8; 82], values: &mut [f32; 256]) {
    let (scale, low): (_, [u8; 32]) = (half::<0, 82>(block), bytes::<2, 32, 82>(block));
    let (signs, high): ([u8; 32], [u8; 8]) = (bytes::<34, 32, 82>(block), bytes::<66, 8, 82>(block));
    let factors: [u8; 8] = bytes::<74, 8, 82>(block);
    for (group, values) in values.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let scale = scale * (0.5 + f32::from(nibble(&factors, group / 2))) * 0.25;
        let index = usize::from(low[group]) | usize::from(high[group / 4] >> (2 * (group % 4)) & 3) << 8;
        point(values, scale, &grids::IQ2_S[index], signs[group]);
    }
}

/// For each four values an index; for each 32, in 32 bits, the signs of each eight and the scale.
#[inline(always)]
pub(super) fn iq3_xxs(block: &[u8; 98], values: &mut [f32; 256]) {
    let (scale, codes): (_, [u8; 64]) = (half::<0, 98>(block), bytes::<2, 64, 98>(block));
    let rests: [u8; 32] = bytes::<66, 32, 98>(block);
    let subs = rests.as_chunks::<4>().0.iter().zip(codes.as_chunks::<8>().0);
    for ((rest, codes), values) in subs.zip(values.as_chunks_mut::<32>().0) {
        let rest = u32::from_le_bytes(*rest);
        let scale = scale * (0.5 + (rest >> 28) as f32) * 0.5;
        for (group, values) in values.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            let of_grid = [0, 1].map(|half| &grids::IQ3_XXS[usize::from(codes[2 * group + half])]);
            points(values, scale, of_grid, even_signs(rest >> (7 * group)));
        }
    }
}

/// For each four values an index of nine bits, for each eight their signs, for each 32 a scale of four bits.
#[inline(always)]
pub(super) fn iq3_s(block: &[u8; 110], values: &mut [f32; 256]) {
    let (scale, low): (_, [u8; 64]) = (half::<0, 110>(block), bytes::<2, 64, 110>(block));
    let (ninth, signs): ([u8; 8], [u8; 32]) = (bytes::<66, 8, 110>(block), bytes::<74, 32, 110>(block));
    let factors: [u8; 4] = bytes::<106, 4, 110>(block);
    for (group, values) in values.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let scale = scale * f32::from(1 + 2 * nibble(&factors, group / 4));
        let of_grid = [2 * group, 2 * group + 1].map(|at| {
            let index = usize::from(low[at]) | usize::from(ninth[at / 8] >> (at % 8) & 1) << 8;
            &grids::IQ3_S[index]
        });
        points(values, scale, of_grid, signs[group]);
    }
}

/// Eight values: a point moved by an eighth in all coordinates, times a scale.
#[inline(always)]
fn moved(values: &mut [f32; 8], scale: f32, point: &[i8; 8], down: bool) {
    let by = if down { -0.125 } else { 0.125 };
    fill(values, |at| scale * (f32::from(point[at]) + by));
}

/// For each eight values an index of eleven bits, for each 32 a scale of three bits and a direction.
#[inline(always)]
pub(super) fn iq1_s(block: &[u8; 50], values: &mut [f32; 256]) {
    let (scale, low): (_, [u8; 32]) = (half::<0, 50>(block), bytes::<2, 32, 50>(block));
    let rests: [u16; 8] = words::<34, 8, 50>(block);
    for (group, values) in values.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let rest = rests[group / 4];
        let scale = scale * f32::from(2 * (rest >> 12 & 7) + 1);
        let index = usize::from(low[group]) | usize::from(rest >> (3 * (group % 4)) & 7) << 8;
        moved(values, scale, &grids::IQ1[index], rest >> 15 == 1);
    }
}

/// For each eight values an index of eleven bits and a direction, for each sixteen a scale of three bits. The scale of the block
/// is the high halves of the high bytes of the scales.
#[inline(always)]
pub(super) fn iq1_m(block: &[u8; 56], values: &mut [f32; 256]) {
    let (low, rests): ([u8; 32], [u8; 16]) = (bytes::<0, 32, 56>(block), bytes::<32, 16, 56>(block));
    let factors: [u16; 4] = words::<48, 4, 56>(block);
    let scale = lift_f16(factors[0] >> 12 | factors[1] >> 12 << 4 | factors[2] >> 12 << 8 | factors[3] >> 12 << 12);
    for (group, values) in values.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let sub = group / 2;
        let scale = scale * f32::from(2 * (factors[sub / 4] >> (3 * (sub % 4)) & 7) + 1);
        let rest = nibble(&rests, group);
        let index = usize::from(low[group]) | usize::from(rest & 7) << 8;
        moved(values, scale, &grids::IQ1[index], rest & 8 != 0);
    }
}
