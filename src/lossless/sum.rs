//! The checksum of decoded bytes.

/// The odd number that makes the words' factors.
pub(super) const FACTOR: u32 = 0x9e37_79b1;

/// The factor of word `word`.
#[inline(always)]
pub(super) fn factor(word: usize) -> u32 {
    (2 * word as u32 + 1).wrapping_mul(FACTOR)
}

/// The sum of the block of a number before its first word, so that one block does not pass for another.
#[inline(always)]
pub(super) fn start(block: u64) -> u64 {
    (block + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// The sum, modulo 2^64, of little-endian words of 32 bits times their factors, which are odd. The words are counted from
/// `first` on; bytes after the last whole word are one with zeros.
#[inline(always)]
pub(super) fn words(bytes: &[u8], first: usize) -> u64 {
    // Pairs of words, of which a multiplication takes the lower halves of 64 bits.
    const PAIRS: usize = 8;
    const LOW: u64 = u32::MAX as u64;
    let (runs, rest) = bytes.as_chunks::<{ 8 * PAIRS }>();
    let mut sums = [0u64; PAIRS];
    let mut factors: [[u64; PAIRS]; 2] =
        std::array::from_fn(|odd| std::array::from_fn(|pair| u64::from(factor(first + 2 * pair + odd))));
    let step = u64::from(FACTOR.wrapping_mul(4 * PAIRS as u32));
    for run in runs {
        let pairs = run.as_chunks::<8>().0;
        for pair in 0..PAIRS {
            let words = u64::from_le_bytes(pairs[pair]);
            let even = (words & LOW) * (factors[0][pair] & LOW);
            let odd = (words >> 32) * (factors[1][pair] & LOW);
            sums[pair] = sums[pair].wrapping_add(even).wrapping_add(odd);
            factors[0][pair] += step;
            factors[1][pair] += step;
        }
    }
    let mut sum = sums.iter().fold(0, |all: u64, sum| all.wrapping_add(*sum));
    for (word, bytes) in rest.chunks(4).enumerate() {
        let mut whole = [0; 4];
        whole[..bytes.len()].copy_from_slice(bytes);
        let factor = factor(first + runs.len() * 2 * PAIRS + word);
        sum = sum.wrapping_add(u64::from(u32::from_le_bytes(whole)) * u64::from(factor));
    }
    sum
}
