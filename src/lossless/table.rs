//! The exponents of a block by their frequency.

use super::ladder::{ESCAPE, RANKS, TABLE};

/// The exponents that have ranks, and the rank of every exponent.
#[derive(Debug)]
pub(super) struct Table {
    /// By rank, the most frequent first; then the one that stands for an escape until its own is put there. No two are the
    /// same, so a code with a wrong bit is never another code of the same exponent. Two zeros follow.
    pub(super) exponents: [u8; 16],
    pub(super) rank_of: [u8; 256],
}

/// Exponents that are looked at together, and how many of them are counted where there are many.
const TOGETHER: usize = 64;
const COUNTED: usize = 16;

/// Up to how many exponents all are counted.
const FEW: usize = 2048;

impl Table {
    /// The table of a block's exponents, at least one, of which `largest` is the largest that there can be. Of many, a quarter
    /// is counted.
    #[inline(always)]
    pub(super) fn of(exponents: &[u8], largest: u8) -> Table {
        // Several counts, so that one can be increased while another is on its way to memory.
        let mut counts = [[0u16; 256]; 4];
        let mut count = |exponents: &[u8]| {
            for four in exponents.as_chunks::<4>().0 {
                four.iter().zip(&mut counts).for_each(|(exponent, counts)| counts[usize::from(*exponent)] += 1);
            }
        };
        let (runs, rest) = exponents.as_chunks::<TOGETHER>();
        if exponents.len() <= FEW {
            runs.iter().for_each(|run| count(run));
        } else {
            for (index, run) in runs.iter().enumerate() {
                // Another quarter for each run and each row of runs, since columns of a matrix differ.
                let quarter = (index ^ index >> 2 ^ index >> 4 ^ index >> 6) % 4;
                count(&run[quarter * COUNTED..][..COUNTED]);
            }
        }
        rest.iter().for_each(|exponent| counts[0][usize::from(*exponent)] += 1);
        let of = |exponent: usize| counts.iter().map(|counts| u32::from(counts[exponent])).sum::<u32>();
        Table::by_frequency(std::array::from_fn(of), largest)
    }

    /// Of equally frequent exponents the larger is first. Those that do not occur come last: the next below the largest that
    /// does, then the next above it.
    fn by_frequency(counts: [u32; 256], largest: u8) -> Table {
        let mut keys = [0u32; 256];
        let mut found = 0;
        for (exponent, count) in counts.iter().enumerate().filter(|(_, count)| **count > 0) {
            keys[found] = count << 8 | exponent as u32;
            found += 1;
        }
        let highest = keys[found.saturating_sub(1)] as u8;
        let keys = &mut keys[..found];
        let mut table = Table { exponents: [0; 16], rank_of: [ESCAPE; 256] };
        let ranked = found.min(RANKS);
        for rank in 0..ranked {
            let Some(most) = (rank..found).max_by_key(|at| keys[*at]) else { break };
            keys.swap(rank, most);
            table.exponents[rank] = keys[rank] as u8;
        }
        let others = (0..highest).rev().chain(highest..=largest);
        let mut others = others.filter(|exponent| !table.exponents[..ranked].contains(exponent));
        let others: [u8; TABLE] =
            std::array::from_fn(|rank| if rank < ranked { 0 } else { others.next().unwrap_or(0) });
        table.exponents[ranked..TABLE].copy_from_slice(&others[ranked..]);
        for (rank, exponent) in table.exponents[..RANKS].iter().enumerate() {
            table.rank_of[usize::from(*exponent)] = rank as u8;
        }
        table
    }
}
