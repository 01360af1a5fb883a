//! The streaming schedule: which layer is fetched when, into which slot, in which pieces. It is pure: no device, no bytes, no
//! time. [`Streamer`](crate::Streamer) executes it, and a plan's forecast computes how long that takes, so both do the same.
//!
//! [`Contents`] has the byte ranges that each layer fetches by each lane (`contents`). Small modules that share memory are one
//! range (`groups`), slots may be divided into blocks (`blocks`), and ranges are split into chunks if they go through buffers on
//! the host (`chunks`). Tensors that are unpacked arrive in rounds (`rounds`), and compressed ones live elsewhere than as they are
//! (`compressed`). [`Schedule`] predicts from the layers asked for so far what comes next (`order`), and chooses the slot that it goes
//! into.

mod blocks;
mod chunks;
mod compressed;
mod contents;
mod groups;
mod order;
mod rounds;

pub(crate) use blocks::{LayerBlocks, SlotBlocks};
pub(crate) use chunks::{Chunk, chunks, split};
pub(crate) use compressed::{Compressed, Place};
use contents::Content;
pub(crate) use contents::{Contents, Form, Part, Slice, Unpacked};
pub(crate) use groups::{Groups, Origin};
use order::Order;
pub(crate) use rounds::{Carried, LANDING_CAP, Landed, Round, VERDICT_ROOM, landed, landing_bytes, rounds};

use crate::checkpoint::{LayerId, Per};

/// The layers that the slots hold, and the layers that come next.
#[derive(Clone, Debug)]
pub(crate) struct Schedule {
    order: Order,
    depth: usize,
    /// Whether slots are fixed: the k-th streamed layer always uses slot k mod n.
    fixed: bool,
    /// The slot size that each layer needs, in bytes, and the largest of these sizes.
    needs: Per<LayerId, u64>,
    largest: u64,
    /// The size of each slot, in bytes.
    sizes: Vec<u64>,
    /// The layer that each slot holds or is being filled with.
    layers: Vec<Option<LayerId>>,
    /// The slot that holds each layer or is being filled with it.
    slots: Per<LayerId, Option<usize>>,
}

impl Schedule {
    /// A schedule with empty slots of these `sizes`, which expects the layers of `contents` in their order. Streamed layers
    /// are prefetched up to `depth` ahead. Fixed slots must be large enough for any layer.
    pub(crate) fn new(contents: &Contents, sizes: Vec<u64>, depth: usize, fixed: bool) -> Schedule {
        let order = Order::new(&contents.iter().map(Content::is_streamed).collect());
        let needs: Per<LayerId, u64> = contents.iter().map(Content::bytes).collect();
        let largest = needs.values().copied().max().unwrap_or(0);
        let (layers, slots) = (vec![None; sizes.len()], Per::all(contents.len(), None));
        Schedule { order, depth, fixed, needs, largest, sizes, layers, slots }
    }

    /// The number of slots.
    pub(crate) fn slots(&self) -> usize {
        self.layers.len()
    }

    /// The number of slots that are large enough for `layer`.
    pub(crate) fn slots_for(&self, layer: LayerId) -> usize {
        self.sizes.iter().filter(|&&bytes| bytes >= self.needs[layer]).count()
    }

    /// Records that `layer` is asked for.
    pub(crate) fn turn(&mut self, layer: LayerId) {
        self.order.turn(layer);
    }

    /// The slot that holds `layer` or is being filled with it.
    pub(crate) fn slot_of(&self, layer: LayerId) -> Option<usize> {
        self.slots[layer]
    }

    /// The slot that `layer` always uses, if slots are fixed.
    pub(crate) fn fixed_slot_of(&self, layer: LayerId) -> Option<usize> {
        let number = self.order.number(layer).filter(|_| self.fixed && self.slots() > 0);
        number.map(|number| number % self.slots())
    }

    /// The layers to prefetch, in order: those after the current layer that no slot holds.
    pub(crate) fn ahead(&self) -> Vec<LayerId> {
        self.order.ahead(self.depth).filter(|&layer| self.slots[layer].is_none()).collect()
    }

    /// The slots that can hold `layer`: those that are large enough, or the one that it always uses.
    pub(crate) fn usable(&self, layer: LayerId) -> impl Iterator<Item = usize> {
        let fixed = self.fixed_slot_of(layer);
        let usable = move |slot: &usize| fixed.map_or(self.sizes[*slot] >= self.needs[layer], |fixed| fixed == *slot);
        (0..self.slots()).filter(usable)
    }

    /// The slots that `layer` may be fetched into, best first. Candidates are large enough, and hold a layer that is needed
    /// later than `layer`; the one needed last comes first. Slots that are large enough for any layer come after all others,
    /// so that they stay available to the layers that need them.
    pub(crate) fn candidates(&self, layer: LayerId) -> Vec<usize> {
        let own = self.order.distance(layer);
        let needed = |slot: usize| self.layers[slot].map_or(usize::MAX, |other| self.order.distance(other));
        let slots = self.usable(layer).map(|slot| (needed(slot), slot));
        let mut candidates: Vec<(usize, usize)> = slots.filter(|(needed, _)| *needed > own).collect();
        candidates.sort_by_key(|&(needed, slot)| (self.sizes[slot] >= self.largest, std::cmp::Reverse(needed)));
        candidates.into_iter().map(|(_, slot)| slot).collect()
    }

    /// Records that `layer` is fetched into `slot`.
    pub(crate) fn hold(&mut self, slot: usize, layer: LayerId) {
        self.empty(slot);
        if let Some(other) = self.slots[layer].replace(slot) {
            self.layers[other] = None;
        }
        self.layers[slot] = Some(layer);
    }

    /// Records that `slot` no longer holds its layer, or that the layer did not arrive.
    pub(crate) fn empty(&mut self, slot: usize) {
        if let Some(layer) = self.layers[slot].take() {
            self.slots[layer] = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::{Layout, ModuleId, TensorInfo};
    use crate::dtype::DType;
    use proptest::prelude::*;

    const MIB: u64 = 1 << 20;

    /// Contents of layers of 1 MiB, some of which are streamed.
    fn contents(streamed: &[bool]) -> Contents {
        contents_of(streamed, &vec![MIB; streamed.len()])
    }

    fn contents_of(streamed: &[bool], sizes: &[u64]) -> Contents {
        let layout = Layout::blocks(sizes.iter().copied());
        let lanes: Per<ModuleId, Option<usize>> = streamed.iter().map(|streamed| streamed.then_some(0)).collect();
        Contents::new(
            (&layout, &layout),
            (&Groups::new(&layout, |_| None), &Compressed::default()),
            &lanes,
            &SlotBlocks::whole(0, 0),
        )
    }

    /// Simulates a caller that asks for layers in this order and keeps no guard. Returns whether each layer was a hit, and the
    /// number of fetches.
    fn run(schedule: &mut Schedule, contents: &Contents, asked: &[usize]) -> (Vec<bool>, usize) {
        let mut fetches = 0;
        let mut fetch = |schedule: &mut Schedule, layer: LayerId| {
            let Some(&slot) = schedule.candidates(layer).first() else { return };
            schedule.hold(slot, layer);
            fetches += 1;
        };
        let mut turn = |&layer: &usize| {
            let layer = LayerId::new(layer);
            schedule.turn(layer);
            let ahead = schedule.slot_of(layer).is_some();
            if contents.of(layer).is_streamed() && !ahead {
                fetch(schedule, layer);
                assert!(schedule.slot_of(layer).is_some(), "there is a slot for the layer that has its turn");
            }
            schedule.ahead().into_iter().for_each(|next| fetch(schedule, next));
            ahead
        };
        (asked.iter().map(&mut turn).collect(), fetches)
    }

    /// diffusers writes Flux with its single blocks before the double ones, and runs them after these.
    #[test]
    fn the_second_pass_goes_by_what_followed_what_in_the_first() {
        let contents = contents(&[true; 12]);
        // By name: two inputs, five single blocks, four double ones, the end.
        let pass = [0, 1, 7, 8, 9, 10, 2, 3, 4, 5, 6, 11];
        let mut schedule = Schedule::new(&contents, vec![MIB; 3], 2, false);
        let (first, _) = run(&mut schedule, &contents, &pass);
        assert_eq!(
            first.iter().filter(|ahead| !**ahead).count(),
            4,
            "the first, and where the order differs: {first:?}"
        );
        for _ in 0..3 {
            let (ahead, fetches) = run(&mut schedule, &contents, &pass);
            // The first layer of the second pass was not known to come.
            assert!(ahead[1..].iter().all(|ahead| *ahead), "{ahead:?}");
            assert!(fetches <= pass.len() + 1, "{fetches} fetches for {} layers", pass.len());
        }
        let (settled, fetches) = run(&mut schedule, &contents, &pass);
        assert_eq!((settled, fetches), (vec![true; 12], 12));
    }

    #[test]
    fn another_order_starts_over() {
        let contents = contents(&[true; 6]);
        let mut schedule = Schedule::new(&contents, vec![MIB; 2], 1, false);
        let (odd, even) = ([0, 2, 4, 1, 3, 5], [0, 1, 2, 3, 4, 5]);
        (0..3).for_each(|_| drop(run(&mut schedule, &contents, &odd)));
        assert_eq!(run(&mut schedule, &contents, &odd).0, [true; 6]);
        // The order of the model, known again as soon as it is clear that the other one is left.
        assert_eq!(run(&mut schedule, &contents, &even).0, [true, false, false, true, true, true]);
        assert_eq!(run(&mut schedule, &contents, &even).0, [true; 6]);
        (0..2).for_each(|_| drop(run(&mut schedule, &contents, &odd)));
        assert_eq!(run(&mut schedule, &contents, &odd).0, [true; 6]);
        // An unfinished pass, and one that skips a layer: the order is still the same.
        run(&mut schedule, &contents, &odd[..3]);
        assert_eq!(run(&mut schedule, &contents, &odd).0, [false, true, true, true, true, true]);
        (0..2).for_each(|_| drop(run(&mut schedule, &contents, &odd)));
        assert_eq!(run(&mut schedule, &contents, &[0, 2, 1, 3, 5]).0, [true, true, false, true, true]);
        // Left out for good, it is not fetched any more.
        (0..2).for_each(|_| drop(run(&mut schedule, &contents, &[0, 2, 1, 3, 5])));
        assert_eq!(run(&mut schedule, &contents, &[0, 2, 1, 3, 5]), (vec![true; 5], 5));
    }

    #[test]
    fn a_layer_may_come_twice_in_a_pass() {
        let contents = contents(&[true; 5]);
        let mut schedule = Schedule::new(&contents, vec![MIB; 2], 1, false);
        let pass = [0, 1, 1, 4, 2, 1, 3];
        (0..2).for_each(|_| drop(run(&mut schedule, &contents, &pass)));
        assert_eq!(run(&mut schedule, &contents, &pass).0, [true; 7]);
    }

    #[test]
    fn fixed_slots_are_known_before_the_first_pass() {
        // Layer 2 is resident, so the streamed ones are 0, 1, 3, 4, 5.
        let streamed = [true, true, false, true, true, true];
        let contents = contents(&streamed);
        let mut schedule = Schedule::new(&contents, vec![MIB; 2], 1, true);
        let slots: Per<LayerId, Option<usize>> = (0..6).map(|at| schedule.fixed_slot_of(LayerId::new(at))).collect();
        assert_eq!(slots, [Some(0), Some(1), None, Some(0), Some(1), Some(0)].into_iter().collect());
        for pass in 0..3 {
            let (ahead, fetches) = run(&mut schedule, &contents, &[0, 1, 2, 3, 4, 5]);
            // The last layer and the first have one slot, so the first cannot be fetched ahead.
            assert_eq!(ahead, [false, true, false, true, true, true], "pass {pass}");
            assert_eq!(fetches, 5);
        }
        for (layer, slot) in slots.iter() {
            schedule.turn(layer);
            assert!(schedule.slot_of(layer).is_none_or(|held| Some(held) == *slot));
        }
    }

    /// An embedding and a head, that follow each other around the end, and one large slot more than one of them needs.
    #[test]
    fn large_layers_have_large_slots_and_leave_the_others_to_all() {
        let sizes = [9 * MIB, MIB, MIB, MIB, MIB, 8 * MIB];
        let contents = contents_of(&[true; 6], &sizes);
        assert_eq!(contents.bytes(), sizes);
        for (slots, late) in [(vec![MIB, MIB, MIB, 9 * MIB, 9 * MIB], 0), (vec![MIB, MIB, MIB, 9 * MIB], 1)] {
            let mut schedule = Schedule::new(&contents, slots.clone(), 2, false);
            let layers = [0, 1, 2, 3, 4, 5].map(LayerId::new);
            assert_eq!(
                layers.map(|layer| schedule.slots_for(layer)),
                [1, 5, 5, 5, 5, 1].map(|n| match n {
                    1 => slots.len() - 3,
                    _ => slots.len(),
                })
            );
            run(&mut schedule, &contents, &[0, 1, 2, 3, 4, 5]);
            let (ahead, fetches) = run(&mut schedule, &contents, &[0, 1, 2, 3, 4, 5]);
            assert_eq!(ahead.iter().filter(|ahead| !**ahead).count(), late, "{slots:?}");
            // What has a slot to itself stays in it.
            assert_eq!(fetches, if late == 0 { 2 } else { 4 }, "{slots:?}");
            for (slot, held) in schedule.layers.iter().enumerate() {
                assert!(held.is_none_or(|layer| (sizes[layer.index()] > MIB) == (slot > 2)), "{schedule:?}");
            }
        }
        // A guard holds an ordinary slot: a large slot may be used, if its layer is not needed sooner.
        let mut schedule = Schedule::new(&contents, vec![MIB, 9 * MIB], 0, false);
        schedule.turn(LayerId::new(2));
        assert_eq!(schedule.candidates(LayerId::new(2)), [0, 1]);
        assert_eq!(schedule.candidates(LayerId::new(5)), [1]);
    }

    #[test]
    fn a_layer_is_fetched_over_what_is_needed_later_only() {
        let contents = contents(&[true; 4]);
        let mut schedule = Schedule::new(&contents, vec![MIB; 3], 2, false);
        [0, 1, 2].into_iter().for_each(|at| schedule.hold(at, LayerId::new(at)));
        schedule.turn(LayerId::new(0));
        // It is in slot 1 already; slot 0 has what is in use.
        assert_eq!(schedule.candidates(LayerId::new(1)), [2]);
        assert_eq!(schedule.candidates(LayerId::new(3)), [0; 0]);
        schedule.turn(LayerId::new(3));
        assert_eq!(schedule.candidates(LayerId::new(3)), [2, 1, 0], "what is needed last in front");
        assert_eq!(
            Schedule::new(&contents, vec![MIB; 0], 1, true).fixed_slot_of(LayerId::new(0)),
            None,
            "there is no slot"
        );
    }

    /// Deviations from a known order are borne with when two passes went by it since the last.
    #[test]
    fn an_order_is_forgotten_when_it_is_left_twice() {
        let odd = [0, 2, 4, 1, 3, 5];
        let next_after = |passes: usize| {
            let mut schedule = Schedule::new(&contents(&[true; 6]), vec![MIB; 2], 1, false);
            let mut turns = |layers: &[usize]| layers.iter().for_each(|&at| schedule.turn(LayerId::new(at)));
            (0..2).for_each(|_| turns(&odd));
            // Layer 4 is left out, so that 1 is not what was to come.
            turns(&[0, 2, 1, 3, 5]);
            (0..passes).for_each(|_| turns(&odd));
            // 2 is left out.
            turns(&[0, 4]);
            schedule.ahead()
        };
        // After 4 comes 5 in the model, and 1 in the order that is known.
        assert_eq!([0, 1, 2].map(next_after), [5, 5, 1].map(|at| vec![LayerId::new(at)]));
    }

    #[test]
    fn a_pass_may_have_four_times_as_many_turns_as_layers() {
        let learns = |pairs: usize| {
            let mut schedule = Schedule::new(&contents(&[true; 4]), vec![MIB; 2], 1, false);
            let pass = [&[0][..], &[2, 1].repeat(pairs), &[3]].concat();
            pass.iter().chain(&[0]).for_each(|&at| schedule.turn(LayerId::new(at)));
            // 2 in the order of the pass; 1 in the model's.
            schedule.ahead() == [LayerId::new(2)]
        };
        assert_eq!([1, 3, 7, 8].map(learns), [true, true, true, false]);
    }

    #[test]
    fn a_slot_has_a_part_for_each_lane() {
        let tensor = |name: &str, bytes: u64, at: u64| TensorInfo::new(name, DType::U8, &[bytes], 0, at).unwrap();
        let layout = Layout::new(vec![
            tensor("layers.0.a.weight", 512, 0),
            tensor("layers.0.b.weight", 300, 512),
            tensor("layers.0.c.weight", 256, 812),
            tensor("layers.0.d.weight", 700_000, 1_068),
        ]);
        let lanes: Per<ModuleId, Option<usize>> = [Some(1), Some(0), Some(1), Some(1)].into_iter().collect();
        let origin = |module: ModuleId| {
            let device = |lane| crate::DeviceId::cuda(lane as u32);
            lanes[module].map(|lane| Origin { device: device(lane), staged: false, compressed: false })
        };
        let groups = Groups::new(&layout, origin);
        let contents =
            Contents::new((&layout, &layout), (&groups, &Compressed::default()), &lanes, &SlotBlocks::whole(0, 0));
        let content = contents.of(LayerId::new(0));
        let slice = |module, range, at| Slice { module: ModuleId::new(module), range, at };
        assert_eq!(
            content.parts,
            [
                Part { block: 0, lane: 0, bytes: 512, slices: vec![slice(1, 0..300, 0)], unpacked: vec![] },
                // The two small modules are adjacent at home and are copied as one.
                Part {
                    block: 0,
                    lane: 1,
                    bytes: 768 + 700_160,
                    slices: vec![slice(0, 0..768, 0), slice(3, 0..700_000, 768)],
                    unpacked: vec![],
                },
            ]
        );
        assert_eq!(content.parts[1].copied(), 700_768);
        let find = |module, range| content.find(ModuleId::new(module), &range);
        assert_eq!(find(2, 512..768), Some((1, 512..768)));
        assert_eq!(find(1, 10..20), Some((0, 10..20)));
        assert_eq!((find(1, 0..301), find(2, 0..256)), (None, None));
    }

    #[test]
    fn chunks_fill_their_buffers() {
        let (piece, half) = (crate::limits::STAGING_BYTES, crate::limits::STAGING_BYTES / 2);
        let slice = |module, bytes: usize, at| Slice { module: ModuleId::new(module), range: 0..bytes, at };
        let slices = vec![slice(0, half, 0), slice(1, piece, piece), slice(2, piece, 2 * piece)];
        let chunks = chunks(&slices);
        let sizes: Vec<Vec<(usize, usize, usize)>> = chunks
            .iter()
            .map(|chunk| chunk.iter().map(|s| (s.module.index(), s.at, s.range.len())).collect())
            .collect();
        assert_eq!(
            sizes,
            [
                vec![(0, 0, half), (1, piece, half)],
                vec![(1, piece + half, half), (2, 2 * piece, half)],
                vec![(2, 2 * piece + half, half)],
            ]
        );
        // A range in the middle of a group's memory.
        let middle = Slice { module: ModuleId::new(0), range: 100..piece + 150, at: 7 };
        let ranges = super::chunks(&[middle]);
        let ranges: Vec<_> = ranges.iter().flatten().map(|slice| (slice.range.clone(), slice.at)).collect();
        assert_eq!(ranges, [(100..piece + 100, 7), (piece + 100..piece + 150, piece + 7)]);
    }

    proptest! {
        /// In any order of requests: the current layer gets a slot while one is available, no slot holds two layers, no layer
        /// is in two slots, and no prefetch replaces a layer that is needed sooner.
        #[test]
        fn any_order_keeps_slots_and_layers_apart(
            layers in prop::collection::vec(any::<(bool, bool)>(), 1..12),
            large in prop::collection::vec(any::<bool>(), 0..6),
            depth in 0usize..8,
            fixed in any::<bool>(),
            steps in prop::collection::vec((any::<prop::sample::Index>(), prop::collection::vec(any::<bool>(), 5)), 1..80),
        ) {
            let (streamed, far_larger): (Vec<bool>, Vec<bool>) = layers.into_iter().unzip();
            let sizes: Vec<u64> = far_larger.iter().map(|&far| if far { 5 * MIB } else { MIB }).collect();
            let contents = contents_of(&streamed, &sizes);
            // One at least holds any layer, and fixed ones all do.
            let large: Vec<bool> = large.into_iter().map(|large| large || fixed).chain([true]).collect();
            let slots: Vec<u64> = large.iter().map(|&large| if large { 5 * MIB } else { MIB }).collect();
            let mut schedule = Schedule::new(&contents, slots.clone(), depth, fixed);
            for (layer, held) in steps {
                let layer = LayerId::new(layer.index(streamed.len()));
                schedule.turn(layer);
                let free = |slot: &usize| !held.get(*slot).copied().unwrap_or(false);
                if streamed[layer.index()] && schedule.slot_of(layer).is_none() {
                    let candidates = schedule.candidates(layer);
                    let most = if fixed { 1 } else { schedule.slots_for(layer) };
                    prop_assert!(most >= 1 && (sizes[layer.index()] > MIB || fixed || most == slots.len()));
                    prop_assert_eq!(candidates.len(), most, "any slot may be taken for the layer that has its turn");
                    candidates.into_iter().find(free).into_iter().for_each(|slot| schedule.hold(slot, layer));
                }
                let ahead = schedule.ahead();
                prop_assert!(ahead.len() <= depth && !ahead.contains(&layer));
                for next in ahead {
                    prop_assert!(streamed[next.index()]);
                    let before = schedule.clone();
                    if let Some(slot) = schedule.candidates(next).into_iter().find(free) {
                        prop_assert!(before.slot_of(layer) != Some(slot), "the layer in use keeps its slot");
                        schedule.hold(slot, next);
                        prop_assert!(!fixed || schedule.fixed_slot_of(next) == Some(slot));
                    }
                }
                for (layer, slot) in schedule.slots.iter() {
                    prop_assert!(slot.is_none_or(|slot| schedule.layers[slot] == Some(layer)));
                    prop_assert!(slot.is_none_or(|slot| slots[slot] >= sizes[layer.index()]), "a layer fits its slot");
                }
                let held = schedule.layers.iter().flatten().count();
                prop_assert_eq!(held, schedule.slots.values().flatten().count());
            }
        }
    }
}
