//! The fields of the types' bits: each weight is an exponent, which is coded, and the rest of its bits, which stay.
//!
//! The loops are plain Rust over arrays, inlined always, so that they become vector code of whatever instruction set their
//! caller is compiled for.

use super::{TILE, Tile};
use crate::dtype::DType;

/// Where a type has its exponent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fields {
    /// bf16: a byte of exponent, a byte of the rest.
    E8M7,
    /// f16: five bits of exponent, eleven of the rest.
    E5M10,
    /// f32: a byte of exponent, three of the rest.
    E8M23,
    /// The types of eight bits with four bits of exponent.
    E4M3,
    /// The types of eight bits with five bits of exponent.
    E5M2,
}

/// The most bytes that the rest of a weight takes.
pub(super) const RESTS: usize = 3;

impl Fields {
    /// Those of a type that is coded.
    pub(super) fn of(dtype: DType) -> Option<Fields> {
        match dtype {
            DType::BF16 => Some(Fields::E8M7),
            DType::F16 => Some(Fields::E5M10),
            DType::F32 => Some(Fields::E8M23),
            DType::F8E4M3 | DType::F8E4M3Fnuz => Some(Fields::E4M3),
            DType::F8E5M2 | DType::F8E5M2Fnuz => Some(Fields::E5M2),
            _ => None,
        }
    }

    /// Bytes of a weight.
    #[inline(always)]
    pub(super) fn size(self) -> usize {
        match self {
            Fields::E8M7 | Fields::E5M10 => 2,
            Fields::E8M23 => 4,
            Fields::E4M3 | Fields::E5M2 => 1,
        }
    }

    /// The largest exponent.
    #[inline(always)]
    pub(super) fn largest(self) -> u8 {
        match self {
            Fields::E8M7 | Fields::E8M23 => 255,
            Fields::E5M10 | Fields::E5M2 => 31,
            Fields::E4M3 => 15,
        }
    }

    /// How many whole bytes the rest of a weight has: planes of a byte for each weight.
    #[inline(always)]
    pub(super) fn bytes(self) -> usize {
        match self {
            Fields::E8M7 | Fields::E5M10 => 1,
            Fields::E8M23 => 3,
            Fields::E4M3 | Fields::E5M2 => 0,
        }
    }

    /// How many bits the rest of a weight has beyond whole bytes: the plane of bits.
    #[inline(always)]
    pub(super) fn bits(self) -> usize {
        match self {
            Fields::E8M7 | Fields::E8M23 => 0,
            Fields::E5M10 | Fields::E5M2 => 3,
            Fields::E4M3 => 4,
        }
    }

    /// The bytes that a plane has for each tile.
    #[inline(always)]
    pub(super) fn plane(self, plane: usize) -> usize {
        if plane < self.bytes() { TILE } else { self.bits() * TILE / 8 }
    }

    /// The planes: those of bytes, then that of bits if there is one.
    #[inline(always)]
    pub(super) fn planes(self) -> usize {
        self.bytes() + usize::from(self.bits() > 0)
    }

    /// Takes weights apart, up to the shortest of the three: their exponents, and the bytes of the rest, the lowest first.
    #[inline(always)]
    pub(super) fn split(self, weights: &[u8], exponents: &mut [u8], rests: [&mut [u8]; RESTS]) {
        match self {
            Fields::E8M7 => split_16::<8, 7>(weights, exponents, rests),
            Fields::E5M10 => split_16::<5, 10>(weights, exponents, rests),
            Fields::E8M23 => split_32(weights, exponents, rests),
            Fields::E4M3 => split_8::<4, 3>(weights, exponents, rests),
            Fields::E5M2 => split_8::<5, 2>(weights, exponents, rests),
        }
    }

    /// Puts the weights of a tile together, as many as `weights` holds.
    #[inline(always)]
    pub(super) fn join(self, exponents: &Tile, rests: [&Tile; RESTS], weights: &mut [u8]) {
        match self {
            Fields::E8M7 => join_16::<8, 7>(exponents, rests, weights),
            Fields::E5M10 => join_16::<5, 10>(exponents, rests, weights),
            Fields::E8M23 => join_32(exponents, rests, weights),
            Fields::E4M3 => join_8::<4, 3>(exponents, rests, weights),
            Fields::E5M2 => join_8::<5, 2>(exponents, rests, weights),
        }
    }
}

#[inline(always)]
fn split_16<const E: u32, const M: u32>(weights: &[u8], exponents: &mut [u8], [low, high, _]: [&mut [u8]; RESTS]) {
    let weights = weights.as_chunks::<2>().0;
    // One loop for each output, since a loop with two is not made vectors of where one of them is not written.
    for (exponent, weight) in exponents.iter_mut().zip(weights) {
        *exponent = (u16::from_le_bytes(*weight) >> M) as u8 & (u32::MAX >> (32 - E)) as u8;
    }
    let rest = |weight: &[u8; 2]| {
        let weight = u16::from_le_bytes(*weight);
        (weight & ((1 << M) - 1)) | (weight >> (E + M) << M)
    };
    low.iter_mut().zip(weights).for_each(|(low, weight)| *low = rest(weight) as u8);
    if M + 1 > 8 {
        high.iter_mut().zip(weights).for_each(|(high, weight)| *high = (rest(weight) >> 8) as u8);
    }
}

#[inline(always)]
fn split_32(weights: &[u8], exponents: &mut [u8], [low, middle, high]: [&mut [u8]; RESTS]) {
    let weights = weights.as_chunks::<4>().0;
    let each = |bytes: &mut [u8], byte: fn(u32) -> u8| {
        bytes.iter_mut().zip(weights).for_each(|(to, weight)| *to = byte(u32::from_le_bytes(*weight)));
    };
    each(exponents, |weight| (weight >> 23) as u8);
    each(low, |weight| weight as u8);
    each(middle, |weight| (weight >> 8) as u8);
    each(high, |weight| (weight >> 16) as u8 & 0x7f | (weight >> 24) as u8 & 0x80);
}

#[inline(always)]
fn split_8<const E: u32, const M: u32>(weights: &[u8], exponents: &mut [u8], [rests, ..]: [&mut [u8]; RESTS]) {
    for ((weight, exponent), rest) in weights.iter().zip(exponents).zip(rests) {
        *exponent = (weight >> M) & (u32::MAX >> (32 - E)) as u8;
        *rest = weight & ((1 << M) - 1) | (weight >> (E + M) << M);
    }
}

#[inline(always)]
fn join_16<const E: u32, const M: u32>(exponents: &Tile, [low, high, _]: [&Tile; RESTS], weights: &mut [u8]) {
    let weights = weights.as_chunks_mut::<2>().0;
    let join = |exponent: u8, rest: u16| {
        (rest & ((1 << M) - 1) | (u16::from(exponent) << M) | (rest >> M << (E + M))).to_le_bytes()
    };
    if M + 1 > 8 {
        for (((weight, exponent), low), high) in weights.iter_mut().zip(exponents).zip(low).zip(high) {
            *weight = join(*exponent, u16::from(*low) | u16::from(*high) << 8);
        }
    } else {
        for ((weight, exponent), low) in weights.iter_mut().zip(exponents).zip(low) {
            *weight = join(*exponent, u16::from(*low));
        }
    }
}

#[inline(always)]
fn join_32(exponents: &Tile, [low, middle, high]: [&Tile; RESTS], weights: &mut [u8]) {
    let parts = exponents.iter().zip(low).zip(middle).zip(high);
    for (weight, (((exponent, low), middle), high)) in weights.as_chunks_mut::<4>().0.iter_mut().zip(parts) {
        let [exponent, low, middle, high] = [*exponent, *low, *middle, *high].map(u32::from);
        *weight = (low | middle << 8 | (high & 0x7f) << 16 | exponent << 23 | (high & 0x80) << 24).to_le_bytes();
    }
}

#[inline(always)]
fn join_8<const E: u32, const M: u32>(exponents: &Tile, [rests, ..]: [&Tile; RESTS], weights: &mut [u8]) {
    for ((weight, exponent), rest) in weights.iter_mut().zip(exponents).zip(rests) {
        *weight = rest & ((1 << M) - 1) | (exponent << M) | (rest >> M << (E + M));
    }
}
