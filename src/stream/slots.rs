//! The slots of a streamer: which layer each holds, and filling one again.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::lanes::Lanes;
use super::turns::{Part, Turns};
use crate::backend::{Buf, BufMut, FenceState};
use crate::error::{Error, Result};
use crate::load::Model;
use crate::transfer::Ticket;

/// All slots. Those of one set are alike, and each layer uses those of one set.
pub(super) struct Slots {
    slots: Vec<Slot>,
    /// For each layer the slot that holds it, or will.
    holder: Vec<Option<usize>>,
    /// For each layer the set of its slots.
    set: Vec<usize>,
    /// Whether the parts stay as they are: each is an allocation of the caller's.
    fixed: bool,
}

/// Device memory for one layer.
struct Slot {
    set: usize,
    /// The layer that is in it or on its way to it; none after a copy that was refused.
    layer: Option<usize>,
    /// Its memory, in parts; none for one that a lane has, or that was lost.
    parts: Vec<Option<Buf>>,
    /// Parts that staging lanes have.
    tickets: Vec<(Vec<usize>, Ticket)>,
}

/// What filling a slot needs.
pub(super) struct Fill<'a> {
    pub(super) model: &'a Model,
    pub(super) turns: &'a Turns,
    pub(super) lanes: &'a Lanes,
    pub(super) layer: usize,
    /// Whether the layer was asked for, so that it is worth waiting for a slot that a lane is busy with.
    pub(super) asked: bool,
    pub(super) deadline: Duration,
}

/// The parts of a slot that one lane fills.
pub(super) type LaneParts<'a> = Vec<(&'a Part, BufMut)>;

/// The slots of a set whose layers are needed last, at the end, with the distances of their layers.
pub(super) type Candidates = Vec<(usize, usize)>;

impl Slots {
    /// Slots of the library's own, as the model keeps them: one set for all layers.
    pub(super) fn shared(memory: Vec<Vec<Buf>>, layers: usize) -> Slots {
        let slots = memory.into_iter().map(|parts| Slot::new(0, parts)).collect();
        Slots { slots, holder: vec![None; layers], set: vec![0; layers], fixed: false }
    }

    /// Slots of the caller's own: sets of slots of parts, and for each layer its set.
    pub(super) fn fixed(sets: Vec<Vec<Vec<BufMut>>>, set: Vec<usize>) -> Slots {
        let slot =
            |number: usize, parts: Vec<BufMut>| Slot::new(number, parts.into_iter().map(BufMut::freeze).collect());
        let of_set =
            |(number, slots): (usize, Vec<Vec<BufMut>>)| slots.into_iter().map(move |parts| slot(number, parts));
        let slots = sets.into_iter().enumerate().flat_map(of_set).collect();
        Slots { slots, holder: vec![None; set.len()], set, fixed: true }
    }

    /// The slot that holds `layer`, or will.
    pub(super) fn find(&self, layer: usize) -> Option<usize> {
        self.holder[layer]
    }

    /// The same, unless a copy into it failed, so that the layer has to be sent for again.
    pub(super) fn find_sound(&mut self, layer: usize) -> Option<usize> {
        let slot = self.holder[layer]?;
        let failed = |memory: &Buf| {
            memory.ready().any(|event| matches!(event.state(), FenceState::Failed(_) | FenceState::Lost(_)))
        };
        if self.slots[slot].parts.iter().flatten().any(failed) {
            self.empty(slot);
        }
        self.holder[layer]
    }

    /// The set whose slots a layer uses.
    pub(super) fn set_of(&self, layer: usize) -> usize {
        self.set[layer]
    }

    /// How many slots there are for a layer.
    pub(super) fn alike(&self, layer: usize) -> usize {
        self.slots.iter().filter(|slot| slot.set == self.set[layer]).count()
    }

    /// The number of a slot among those of its set.
    pub(super) fn number(&self, slot: usize) -> usize {
        let set = self.slots[slot].set;
        self.slots[..slot].iter().filter(|other| other.set == set).count()
    }

    /// Whether a lane has parts of the slot, so that [`collect`](Slots::collect) may wait.
    pub(super) fn is_with_a_lane(&self, slot: usize) -> bool {
        !self.slots[slot].tickets.iter().all(|(_, ticket)| ticket.is_over())
    }

    /// The slots that may be filled with a layer of the set of `layer`, seen from `current`.
    pub(super) fn candidates(&self, turns: &Turns, layer: usize, current: usize) -> Candidates {
        let set = self.set[layer];
        let of_set = self.slots.iter().enumerate().filter(|(_, slot)| slot.set == set);
        let needed = |slot: &Slot| slot.layer.map_or(usize::MAX, |layer| turns.distance(current, layer));
        let mut candidates: Candidates = of_set.map(|(index, slot)| (needed(slot), index)).collect();
        // Of several that are empty the first one comes first.
        candidates.sort_by_key(|&(needed, index)| (needed, usize::MAX - index));
        candidates
    }

    /// Sends for a layer in a slot that no guard holds and whose layer is not needed before `distance`; the slot.
    /// None when there is no such slot.
    pub(super) fn bring(
        &mut self,
        fill: &Fill<'_>,
        distance: usize,
        candidates: &mut Candidates,
    ) -> Result<Option<usize>> {
        let all = if fill.asked { candidates.clone() } else { Vec::new() };
        let slot = match self.reclaim(candidates, distance, Duration::ZERO) {
            Some(found) => Some(found),
            None => self.reclaim(&mut { all }, distance, fill.deadline),
        };
        let Some((slot, memory)) = slot else { return Ok(None) };
        self.fill(fill, slot, memory)?;
        Ok(Some(slot))
    }

    /// Waits until lanes have queued all copies into the slot; its parts.
    ///
    /// # Errors
    /// [`Error::TimedOut`]; why a lane failed, and then the layer has to be sent for again.
    pub(super) fn collect(&mut self, slot: usize, deadline: Duration) -> Result<Vec<Buf>> {
        if let Err(error) = self.slots[slot].collect(deadline) {
            if self.slots[slot].tickets.is_empty() {
                self.empty(slot);
            }
            return Err(error);
        }
        Ok(self.slots[slot].parts.iter().flatten().cloned().collect())
    }

    /// Takes the memory of all slots that lanes can be made to let go of. Guards that are still out keep theirs until
    /// they are dropped.
    pub(super) fn drain(&mut self, deadline: Duration) -> Vec<Vec<Buf>> {
        self.slots.iter().flat_map(|slot| &slot.tickets).for_each(|(_, ticket)| ticket.give_up());
        let until = Instant::now() + deadline;
        let whole = |mut slot: Slot| {
            // Why copies that nobody waits for failed is of no use to anyone.
            let _ = slot.collect(until.saturating_duration_since(Instant::now()));
            slot.parts.into_iter().collect::<Option<Vec<Buf>>>()
        };
        let slots: Vec<_> = self.slots.drain(..).map(whole).collect();
        let lost = slots.iter().filter(|slot| slot.is_none()).count();
        if lost > 0 {
            tracing::error!(lost, "slots are lost: a lane did not let go of them");
        }
        self.holder.fill(None);
        slots.into_iter().flatten().collect()
    }

    /// The sets of slots of the caller's own, when no guard and no lane holds any.
    pub(super) fn take_fixed(&mut self, deadline: Duration) -> Option<Vec<Vec<Vec<BufMut>>>> {
        for slot in &mut self.slots {
            slot.tickets.iter().for_each(|(_, ticket)| ticket.give_up());
            let _ = slot.collect(deadline);
            slot.layer = None;
        }
        self.holder.fill(None);
        if !self.slots.iter().all(Slot::is_free) {
            return None;
        }
        let mut sets: Vec<Vec<Vec<BufMut>>> = Vec::new();
        for slot in self.slots.drain(..) {
            sets.resize_with(sets.len().max(slot.set + 1), Vec::new);
            sets[slot.set].push(slot.parts.into_iter().flatten().filter_map(|part| part.try_reclaim().ok()).collect());
        }
        Some(sets)
    }

    /// The last of `candidates` that can be had, with its memory, to be written.
    fn reclaim(
        &mut self,
        candidates: &mut Candidates,
        distance: usize,
        patience: Duration,
    ) -> Option<(usize, Vec<BufMut>)> {
        while candidates.last().is_some_and(|&(needed, _)| needed > distance) {
            let (_, index) = candidates.pop()?;
            let slot = &mut self.slots[index];
            if !slot.tickets.is_empty() {
                slot.tickets.iter().for_each(|(_, ticket)| ticket.give_up());
                let _ = slot.collect(patience);
                self.empty(index);
            }
            let slot = &mut self.slots[index];
            if slot.is_free() {
                let memory = slot.parts.drain(..).flatten().filter_map(|part| part.try_reclaim().ok()).collect();
                self.empty(index);
                return Some((index, memory));
            }
        }
        None
    }

    /// Queues the copies of a layer into a slot, or gives them to lanes.
    fn fill(&mut self, fill: &Fill<'_>, index: usize, memory: Vec<BufMut>) -> Result<()> {
        let parts = &fill.turns.of_layer(fill.layer).parts;
        let slot = &mut self.slots[index];
        let memory = match self.fixed {
            true => memory,
            false => slot.cut(memory, parts)?,
        };
        let mut by_lane: BTreeMap<usize, (Vec<usize>, LaneParts<'_>)> = BTreeMap::new();
        for (place, dst) in memory.into_iter().enumerate() {
            slot.parts.push(None);
            match parts.get(place) {
                Some(part) => {
                    let (places, parts) = by_lane.entry(part.lane).or_default();
                    places.push(place);
                    parts.push((part, dst));
                }
                None => slot.parts[place] = Some(dst.freeze()),
            }
        }
        let mut outcome = Ok(());
        for (lane, (places, parts)) in by_lane {
            if outcome.is_ok() && fill.lanes.is_staged(lane) {
                let ticket = fill.lanes.order(fill.model, lane, parts, fill.asked, fill.deadline)?;
                slot.tickets.push((places, ticket));
                continue;
            }
            let memory = match outcome {
                Ok(()) => {
                    let (memory, queued) = fill.lanes.queue(fill.model, lane, parts);
                    outcome = queued;
                    memory
                }
                Err(_) => parts.into_iter().map(|(_, dst)| dst.freeze()).collect(),
            };
            places.into_iter().zip(memory).for_each(|(place, memory)| slot.parts[place] = Some(memory));
        }
        outcome?;
        slot.layer = Some(fill.layer);
        self.holder[fill.layer] = Some(index);
        Ok(())
    }

    /// Forgets what a slot holds.
    fn empty(&mut self, slot: usize) {
        if let Some(layer) = self.slots[slot].layer.take() {
            self.holder[layer] = None;
        }
    }
}

impl Slot {
    fn new(set: usize, parts: Vec<Buf>) -> Slot {
        let parts = parts.into_iter().map(Some).collect();
        Slot { set, layer: None, parts, tickets: Vec::new() }
    }

    /// Whether nobody else holds any of it.
    fn is_free(&self) -> bool {
        self.tickets.is_empty() && self.parts.iter().all(|part| part.as_ref().is_some_and(|part| !part.is_shared()))
    }

    /// Waits until lanes are done with its parts, whatever came of it.
    fn collect(&mut self, deadline: Duration) -> Result<()> {
        let until = Instant::now() + deadline;
        let mut outcome = Ok(());
        while let Some((places, ticket)) = self.tickets.first() {
            let ended = match ticket.wait(until.saturating_duration_since(Instant::now())) {
                Ok(ended) => ended,
                Err(Error::TimedOut { what, .. }) => return Err(Error::TimedOut { what, after: deadline }),
                Err(error) => return Err(error),
            };
            for (&place, memory) in places.iter().zip(ended.parts) {
                self.parts[place] = memory;
            }
            outcome = outcome.and(ended.outcome);
            self.tickets.remove(0);
        }
        outcome
    }

    /// Joins the parts of a layer that was in the slot and cuts it into those of another, the last with what is left.
    fn cut(&mut self, memory: Vec<BufMut>, parts: &[Part]) -> Result<Vec<BufMut>> {
        let mut memory = memory.into_iter();
        let mut rest = memory.next().ok_or_else(|| Error::invalid("a slot without memory"))?;
        memory
            .try_for_each(|part| rest.unsplit(part))
            .map_err(|_| Error::invalid("parts of two slots were mixed up"))?;
        let mut cut = Vec::with_capacity(parts.len());
        for part in parts.iter().rev().skip(1).rev() {
            match rest.split_off(part.bytes) {
                Ok(after) => cut.push(std::mem::replace(&mut rest, after)),
                Err(error) => {
                    // It stays one slot, if in parts.
                    self.parts = cut.into_iter().chain([rest]).map(|part| Some(part.freeze())).collect();
                    return Err(error);
                }
            }
        }
        cut.push(rest);
        Ok(cut)
    }
}
