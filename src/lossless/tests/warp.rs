//! Decoding as the 32 threads of a warp do: each finds its bits by sums over the threads before it, and no thread waits for
//! what another decodes.

use super::super::ladder::{place, threes};
use super::*;

/// `count` bits from bit `at` on.
fn bits(bytes: &[u8], at: usize, count: usize) -> u128 {
    let mut window = [0; 16];
    let bytes = &bytes[at / 8..bytes.len().min(at / 8 + 16)];
    window[..bytes.len()].copy_from_slice(bytes);
    u128::from_le_bytes(window) >> (at % 8) & ((1 << count) - 1)
}

/// Sums over the lanes before each.
fn before(counts: [usize; LANES]) -> [usize; LANES] {
    std::array::from_fn(|lane| counts[..lane].iter().sum())
}

/// The ranks of one lane's weights, by its codes, and its bits of the two levels.
fn lane_ranks(codes: u64, mut second: u128, mut third: u128) -> [[u8; 8]; 4] {
    let mut ranks = [[0; 8]; 4];
    for (group, ranks) in ranks.iter_mut().enumerate() {
        for (j, rank) in ranks.iter_mut().enumerate() {
            *rank = (codes >> (32 * (group / 2) + 2 * (group % 2) + 4 * j)) as u8 & 3;
            if *rank == 3 {
                *rank += second as u8 & 3;
                second >>= 2;
                if *rank == 6 {
                    *rank += third as u8 & 7;
                    third >>= 3;
                }
            }
        }
    }
    ranks
}

/// A block of bf16 in whole tiles.
fn decode(block: &[u8], weights: &mut [u16]) {
    let table = &block[16..32];
    let tiles = weights.len() / TILE;
    let (rests, codes) = (&block[32..], &block[32 + TILE * tiles..]);
    let escapes = u16::from_le_bytes([block[8], block[9]]);
    let escapes = &codes[CODES * tiles..][..4 * usize::from(escapes)];
    let mut tail = &codes[CODES * tiles + escapes.len()..];
    for tile in 0..tiles {
        let codes: [u64; LANES] =
            std::array::from_fn(|lane| u64::from_le_bytes(codes[CODES * tile + 8 * lane..][..8].try_into().unwrap()));
        let seconds = codes.map(|codes| threes(codes) as usize);
        let (at_second, all_seconds) = (before(seconds), seconds.iter().sum::<usize>());
        let second: [u128; LANES] = std::array::from_fn(|lane| bits(tail, 2 * at_second[lane], 2 * seconds[lane]));
        let thirds = second.map(|second| (second & second >> 1 & (u128::MAX / 3)).count_ones() as usize);
        let (at_third, all_thirds) = (before(thirds), thirds.iter().sum::<usize>());
        let third = &tail[(2 * all_seconds).div_ceil(8)..];
        for lane in 0..LANES {
            let third = bits(third, 3 * at_third[lane], 3 * thirds[lane]);
            for (group, ranks) in lane_ranks(codes[lane], second[lane], third).iter().enumerate() {
                for (j, rank) in ranks.iter().enumerate() {
                    let at = tile * TILE + place(lane, group) + j;
                    let (rest, exponent) = (u16::from(rests[at]), u16::from(table[usize::from(*rank)]));
                    weights[at] = (rest & 0x7f) | (rest & 0x80) << 8 | exponent << 7;
                }
            }
        }
        let bytes = (2 * all_seconds).div_ceil(8) + (3 * all_thirds).div_ceil(8);
        tail = &tail[bytes.next_multiple_of(4)..];
    }
    for escape in escapes.chunks(4) {
        let [exponent, low, high, _] = escape.try_into().unwrap();
        let weight = &mut weights[usize::from(u16::from_le_bytes([low, high]))];
        *weight = *weight & 0x807f | u16::from(exponent) << 7;
    }
}

#[test]
fn a_warp_decodes_a_block_by_sums_over_lanes() {
    let rare = |(at, value): (usize, f32)| if at % 97 == 0 { f32::from_bits(at as u32 * 77_777) } else { value };
    let bytes = stored(DType::BF16, normal(9, 0.04).enumerate().map(rare).take(2 * BLOCK));
    let code = compress(DType::BF16, &bytes).unwrap();
    let code = Code::open(&code).unwrap();
    let mut weights = vec![0; 2 * BLOCK];
    for (block, weights) in weights.chunks_mut(BLOCK).enumerate() {
        decode(code.block(block as u64).unwrap(), weights);
    }
    assert!(weights.iter().flat_map(|weight| weight.to_le_bytes()).eq(bytes));
}
