//! A table of ranks that a byte shuffle can read.

use super::super::ladder::{ESCAPE, RANKS};
use super::super::table::Table;

/// The ranks of 32 exponents up to the largest of a table, and that of zero, which lies far below where there are both zeros
/// and usual weights. The bits of an escape are inverted in them, so that zero stands for whatever lies outside.
pub(super) struct Window {
    /// The first exponent.
    pub(super) base: u8,
    pub(super) ranks: [u8; 32],
    pub(super) of_zero: u8,
}

impl Window {
    /// `None` where an exponent that has a rank lies outside.
    #[inline(always)]
    pub(super) fn of(table: &Table) -> Option<Window> {
        let entries = &table.exponents[..RANKS];
        let base = entries.iter().max().map_or(0, |largest| largest.saturating_sub(31));
        if entries.iter().any(|exponent| *exponent < base && *exponent != 0) {
            return None;
        }
        let ranks = std::array::from_fn(|d| table.rank_of[usize::from(base) + d] ^ ESCAPE);
        Some(Window { base, ranks, of_zero: table.rank_of[0] ^ ESCAPE })
    }
}
