//! Dealing units out to devices so that every running total stays close to its share.

/// Deals units, given one by one in order, to bins with shares.
///
/// With `ideal(i)` = share `i` over all shares x the bytes dealt so far, the unit goes to a bin that is
/// behind its ideal after this unit, and of those to the one that would be first to fall a whole (largest)
/// unit behind. Without caps every running total is then within one unit of its ideal, above because only
/// bins that are behind take a unit, below by the usual argument for earliest deadline first on one
/// processor (units of time are bytes): if a bin missed its deadline, then since the last unit that went to
/// a bin with a later deadline only bins with earlier deadlines were served, all of them not behind at that
/// unit's end, and together they cannot have been due more bytes than went by. The rule for equal units is
/// that of P-fair scheduling (Baruah, Cohen, Plaxton, Varvel, 1996).
#[derive(Debug)]
pub(super) struct Dealer {
    shares: Vec<u64>,
    /// What each bin may take at most.
    caps: Vec<u64>,
    taken: Vec<u64>,
    all_shares: u128,
    dealt: u64,
    largest: u64,
}

impl Dealer {
    /// Bins with these shares and caps, for units of at most `largest` bytes. Shares and units add up to at
    /// most 2^63 each, so that no product below passes `u128`.
    pub(super) fn new(shares: Vec<u64>, caps: Vec<u64>, largest: u64) -> Dealer {
        let all_shares = shares.iter().map(|&share| u128::from(share)).sum();
        let taken = vec![0; shares.len()];
        Dealer { shares, caps, taken, all_shares, dealt: 0, largest }
    }

    /// The bin for the next unit: none where caps keep it from all that are behind. Then the caller
    /// chooses and tells [`Dealer::give`].
    pub(super) fn deal(&mut self, bytes: u64) -> Option<usize> {
        let after = u128::from(self.dealt + bytes);
        let behind = |&bin: &usize| {
            let ideal = u128::from(self.shares[bin]) * after;
            u128::from(self.taken[bin]) * self.all_shares < ideal
        };
        let holds = |&bin: &usize| self.caps[bin] - self.taken[bin].min(self.caps[bin]) >= bytes;
        // The deadline of a bin is where its ideal reaches `taken + largest`.
        let due = |bin: usize| u128::from(self.taken[bin]) + u128::from(self.largest);
        let earlier = |&a: &usize, &b: &usize| {
            let (a_due, b_due) = (due(a) * u128::from(self.shares[b]), due(b) * u128::from(self.shares[a]));
            a_due.cmp(&b_due)
        };
        let bin = (0..self.shares.len()).filter(|bin| behind(bin) && holds(bin)).min_by(earlier)?;
        self.give(bin, bytes);
        Some(bin)
    }

    /// Books a unit that the caller has put into `bin`.
    pub(super) fn give(&mut self, bin: usize, bytes: u64) {
        self.taken[bin] += bytes;
        self.dealt += bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Any shares that add up to the units.
    fn shares_and_units() -> impl Strategy<Value = (Vec<u64>, Vec<u64>)> {
        let units = prop::collection::vec(1u64..1000, 1..200);
        (units, prop::collection::vec(0u64..100, 1..7)).prop_map(|(units, weights)| {
            let (total, sum) = (units.iter().sum::<u64>(), weights.iter().sum::<u64>());
            let mut shares: Vec<u64> = weights.iter().map(|w| total * w / sum.max(1)).collect();
            shares[0] += total - shares.iter().sum::<u64>();
            (shares, units)
        })
    }

    proptest! {
        #[test]
        fn running_totals_stay_within_one_unit((shares, units) in shares_and_units()) {
            let (largest, total) = (*units.iter().max().unwrap(), units.iter().sum::<u64>());
            let mut dealer = Dealer::new(shares.clone(), vec![u64::MAX; shares.len()], largest);
            let mut dealt = 0;
            for unit in units {
                dealer.deal(unit).expect("a bin that is behind");
                dealt += unit;
                for (taken, share) in dealer.taken.iter().zip(&shares) {
                    let off = (i128::from(*taken) * i128::from(total) - i128::from(*share) * i128::from(dealt)).abs();
                    prop_assert!(off < i128::from(largest) * i128::from(total));
                }
            }
            prop_assert_eq!(dealer.taken.iter().sum::<u64>(), total);
        }
    }
}
