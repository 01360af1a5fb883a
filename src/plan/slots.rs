//! The memory of streamed layers on the compute device: the number and sizes of slots.

use std::collections::BTreeSet;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::bytes::ByteSize;
use crate::schedule::{LayerBlocks, VERDICT_ROOM};

/// Memory on the compute device for streamed layers: slots of one size, or of two where a few layers are far larger than
/// the others and that takes less memory.
///
/// Either way, the number of layers given by the depth can be prefetched at any layer, in the order of the model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Slots {
    /// The number of slots, without large ones: `min(depth + 1, streamed layers)` if all have one size; 0 if the caller
    /// provides the memory.
    pub count: usize,
    /// The bytes of each of these slots: the streamed bytes of the largest layer that goes into them, where each module takes a
    /// multiple of 256. Slots that are divided ([`Plan::grouping`](super::Plan::grouping)) have blocks, each as large as the largest
    /// tensor, or all tensors of a type, that goes into it.
    pub bytes_each: u64,
    /// The number of large slots; 0 if the caller provides the memory.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub large: usize,
    /// The bytes of each large slot, which holds any layer. 0 if all slots have one size.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub large_bytes: u64,
    /// The number of landing buffers, in which tensors in blocks arrive that are unpacked into slots
    /// ([`Planner::unpack`](super::Planner::unpack)), or compressed: one for each kind of route; and one if anything is kept
    /// [compressed](super::Planner::compress_resident) on the compute device, and nothing arrives.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub landings: usize,
    /// The bytes of each landing buffer, which is two halves: tensors are unpacked from one while the next ones arrive in the other. What
    /// is larger than a half arrives in parts ([`Planner::landing_cap`](super::Planner::landing_cap)). Behind them there are 512 for the
    /// device's verdicts on codes, if there are any.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub landing_bytes: u64,
}

/// Large slots must be more than this many times the size of the others. A smaller difference gains too little.
const LARGER: u64 = 2;

/// The most sizes to try for the smaller slots.
const MOST_SIZES: usize = 64;

fn is_zero<N: Default + PartialEq>(number: &N) -> bool {
    *number == N::default()
}

impl Slots {
    /// The slots for streamed layers that need these bytes, in order of execution. `fixed` slots, which are assigned by number,
    /// all have one size.
    pub(crate) fn of(layers: &[u64], depth: usize, fixed: bool) -> Slots {
        let layers: Vec<LayerBlocks> = layers.iter().map(|&bytes| LayerBlocks::whole(bytes)).collect();
        Slots::of_blocks(&layers, depth, fixed).0
    }

    /// As [`of`](Slots::of), for layers that may be divided into blocks. Returns, too, the most bytes of a layer that goes into the
    /// slots that are not large.
    pub(crate) fn of_blocks(layers: &[LayerBlocks], depth: usize, fixed: bool) -> (Slots, u64) {
        // The layers on the device at one time: the one in use, and the prefetched ones.
        let window = layers.len().min(depth.saturating_add(1));
        let bytes: Vec<u64> = layers.iter().map(LayerBlocks::bytes).collect();
        let largest = bytes.iter().copied().max().unwrap_or(0);
        let for_any = LayerBlocks::for_any(layers).bytes();
        let alike = Slots { count: window, bytes_each: for_any, ..Slots::default() };
        if fixed || window < 2 {
            return (alike, largest);
        }
        let sizes: BTreeSet<u64> =
            bytes.iter().copied().filter(|&bytes| bytes.saturating_mul(LARGER) < largest).collect();
        let step = sizes.len().div_ceil(MOST_SIZES).max(1);
        let split = |&most: &u64| {
            let ordinary = layers.iter().zip(&bytes).filter(|(_, bytes)| **bytes <= most).map(|(layer, _)| layer);
            let bytes_each = LayerBlocks::for_any(ordinary).bytes();
            let count = most_at_once(&bytes, window, |bytes| bytes <= most);
            let large = most_at_once(&bytes, window, |bytes| bytes > most);
            (Slots { count, bytes_each, large, large_bytes: for_any, ..Slots::default() }, most)
        };
        let best = sizes.iter().rev().step_by(step).map(split).min_by_key(|(slots, _)| slots.bytes());
        best.filter(|(slots, _)| slots.bytes() < alike.bytes()).unwrap_or((alike, largest))
    }

    /// No slots, for a caller who provides the memory.
    pub(super) fn left_to_caller(self) -> Slots {
        Slots { count: 0, large: 0, ..self }
    }

    /// The bytes of all slots and landing buffers.
    pub fn bytes(self) -> u64 {
        let Slots { count, bytes_each, large, large_bytes, landings, landing_bytes } = self;
        let all = [(count, bytes_each), (large, large_bytes), (landings, landing_bytes)];
        all.into_iter().fold(0, |sum, (count, bytes)| sum.saturating_add(bytes.saturating_mul(count as u64)))
    }

    /// The bytes of each slot, the large ones last. Landing buffers are not among them.
    pub fn sizes(self) -> impl Iterator<Item = u64> {
        let large = std::iter::repeat_n(self.large_bytes, self.large);
        std::iter::repeat_n(self.bytes_each, self.count).chain(large)
    }

    /// The bytes of a slot that holds any streamed layer.
    pub fn largest(self) -> u64 {
        self.bytes_each.max(self.large_bytes)
    }
}

/// The most layers of a kind among any `window` consecutive layers, wrapping from the end to the beginning.
fn most_at_once(layers: &[u64], window: usize, is_of: impl Fn(u64) -> bool) -> usize {
    let of = |at: usize| usize::from(is_of(layers[at % layers.len()]));
    let first: usize = (0..window).map(of).sum();
    let slide = |held: &mut usize, begin: usize| {
        *held = *held + of(begin + window) - of(begin);
        Some(*held)
    };
    (0..layers.len()).scan(first, slide).max().unwrap_or(0).max(first)
}

impl fmt::Display for Slots {
    /// The number and size of the slots.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} x {}", self.count, ByteSize(self.bytes_each).human())?;
        let landing = if self.landing_bytes > VERDICT_ROOM { " to unpack from" } else { " for a verdict" };
        let more = [(self.large, self.large_bytes, ""), (self.landings, self.landing_bytes, landing)];
        more.iter()
            .filter(|(count, ..)| *count > 0)
            .try_for_each(|(count, bytes, what)| write!(f, " + {count} x {}{what}", ByteSize(*bytes).human()))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_few_large_layers_have_slots_of_their_own() {
        let of = |layers: &[u64], depth| {
            let Slots { count, bytes_each, large, large_bytes, .. } = Slots::of(layers, depth, false);
            (count, bytes_each, large, large_bytes)
        };
        assert_eq!(of(&[], 2), (0, 0, 0, 0));
        assert_eq!(of(&[5; 7], 2), (3, 5, 0, 0));
        assert_eq!(of(&[50, 7, 7, 7, 7], 2), (3, 7, 1, 50));
        // An embedding and a head follow each other.
        assert_eq!(of(&[50, 7, 7, 7, 7, 40], 2), (3, 7, 2, 50));
        assert_eq!(of(&[50, 20, 20, 20, 20, 40], 2), (3, 50, 0, 0));
        // Not worth it, and not more than twice as large.
        assert_eq!(of(&[50, 7, 7], 0), (1, 50, 0, 0));
        assert_eq!(of(&[14, 7, 7, 7, 7], 2), (3, 14, 0, 0));
        // Twice as large is not far larger.
        assert_eq!(of(&[14, 7, 7, 7], 2), (3, 14, 0, 0));
        assert_eq!(of(&[15, 7, 7, 7], 2), (3, 7, 1, 15));
        // Two sizes that take as much as one are not worth it.
        assert_eq!(of(&[15, 15, 5, 5, 5], 2), (3, 15, 0, 0));
        // All of them at once.
        assert_eq!(of(&[50, 7, 6, 3], usize::MAX), (3, 7, 1, 50));
        assert_eq!(Slots::of(&[50, 7, 7, 7], 2, true), Slots { count: 3, bytes_each: 50, ..Slots::default() });
        assert_eq!(Slots::of(&[50 << 20, 7 << 20, 7 << 20, 1], 2, false).to_string(), "3 x 7.00 MiB + 1 x 50.00 MiB");
    }

    proptest! {
        /// Two sizes never take more memory than one, and never have too few slots for consecutive layers.
        #[test]
        fn two_sizes_take_less_and_hold_as_many(
            layers in prop::collection::vec(prop_oneof![3 => 1u64..20, 1 => 20u64..1000], 1..30),
            depth in 0usize..8,
            fixed in any::<bool>(),
        ) {
            let slots = Slots::of(&layers, depth, fixed);
            let (window, largest) = (layers.len().min(depth + 1), *layers.iter().max().unwrap());
            let alike = window as u64 * largest;
            prop_assert!(slots.bytes() <= alike && slots.largest() == largest);
            prop_assert_eq!(slots.sizes().sum::<u64>(), slots.bytes());
            prop_assert_eq!(slots.large == 0, slots.large_bytes == 0);
            prop_assert!(slots.large == 0 || (!fixed && slots.bytes() < alike && slots.large_bytes > 2 * slots.bytes_each));
            for begin in 0..layers.len() {
                let at_once = (begin..begin + window).map(|at| layers[at % layers.len()]);
                let (ordinary, large): (Vec<u64>, Vec<u64>) = at_once.partition(|bytes| *bytes <= slots.bytes_each);
                prop_assert!(ordinary.len() <= slots.count && large.len() <= slots.large);
            }
        }
    }
}
