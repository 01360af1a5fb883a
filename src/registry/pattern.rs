//! Test patterns whose bytes identify their position, to verify that a copy arrived.

use rayon::prelude::*;

use crate::error::Result;
use crate::threads;

/// The bytes that one thread fills or compares at a time.
const PART: usize = 1 << 20;

/// Fills `bytes` with the pattern number `seed`. No two patterns have the same eight bytes at any position.
pub(super) fn fill(bytes: &mut [u8], seed: u64) -> Result<()> {
    threads::run(|| {
        bytes.par_chunks_mut(PART).enumerate().for_each(|(part, bytes)| {
            let (words, rest) = bytes.as_chunks_mut::<8>();
            let start = part * (PART / 8);
            words.iter_mut().enumerate().for_each(|(i, bytes)| *bytes = word(seed, start + i));
            rest.copy_from_slice(&word(seed, start + words.len())[..rest.len()]);
        });
    })
}

/// Whether `bytes` hold the pattern number `seed`.
pub(super) fn matches(bytes: &[u8], seed: u64) -> Result<bool> {
    threads::run(|| {
        bytes.par_chunks(PART).enumerate().all(|(part, bytes)| {
            let (words, rest) = bytes.as_chunks::<8>();
            let start = part * (PART / 8);
            let whole = words.iter().enumerate().all(|(i, bytes)| *bytes == word(seed, start + i));
            whole && *rest == word(seed, start + words.len())[..rest.len()]
        })
    })
}

fn word(seed: u64, index: usize) -> [u8; 8] {
    // Multiplying by an odd factor is a bijection on 64 bits: positions and patterns stay distinct.
    let position = (index as u64).wrapping_add(seed.wrapping_mul(0xD1B5_4A32_D192_ED03));
    position.wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_is_known_by_every_byte() {
        for bytes in [0, 1, 7, 8, 13, PART - 1, PART, PART + 11] {
            let mut memory = vec![0; bytes];
            fill(&mut memory, 5).unwrap();
            assert!(matches(&memory, 5).unwrap(), "{bytes}");
            let mut copied = vec![0; bytes];
            crate::staging::copy(None, vec![(&memory, &mut copied)]).unwrap();
            assert_eq!(copied, memory);
            if let Some(last) = memory.last_mut() {
                *last ^= 1;
                assert!(!matches(&memory, 5).unwrap() && !matches(&copied, 6).unwrap(), "{bytes}");
            }
        }
    }
}
