//! The memory of a streamer's slots: filling one, and having it back.

use std::time::{Duration, Instant};

use super::lanes::Lanes;
use crate::backend::{Buf, BufMut, FenceState};
use crate::error::{Error, Result};
use crate::load::Model;
use crate::schedule::Part;
use crate::transfer::Ticket;

/// All slots.
pub(super) struct Slots(Vec<Slot>);

/// Device memory for one layer.
struct Slot {
    /// Its memory, in parts; none for one that a lane has, or that was lost.
    parts: Vec<Option<Buf>>,
    /// Parts that staging lanes have, by place.
    tickets: Vec<(usize, Ticket)>,
}

/// What filling a slot needs.
pub(super) struct Fill<'a> {
    pub(super) model: &'a Model,
    pub(super) lanes: &'a Lanes,
    /// What the layer fetches.
    pub(super) parts: &'a [Part],
    /// Whether the layer was asked for, so that lanes bring it before what is fetched ahead.
    pub(super) asked: bool,
    pub(super) deadline: Duration,
}

impl Slots {
    /// Slots with this memory, each in the parts into which it was cut last.
    pub(super) fn new(memory: impl IntoIterator<Item = Vec<Buf>>) -> Slots {
        let slot = |parts: Vec<Buf>| Slot { parts: parts.into_iter().map(Some).collect(), tickets: Vec::new() };
        Slots(memory.into_iter().map(slot).collect())
    }

    pub(super) fn count(&self) -> usize {
        self.0.len()
    }

    /// The bytes of each.
    pub(super) fn sizes(&self) -> Vec<u64> {
        let parts = self.0.iter().map(|slot| slot.parts.iter().flatten());
        parts.map(|parts| parts.map(|part| part.bytes() as u64).sum()).collect()
    }

    /// Whether no copy into the slot failed.
    pub(super) fn is_sound(&self, slot: usize) -> bool {
        let failed = |memory: &Buf| {
            memory.ready().any(|event| matches!(event.state(), FenceState::Failed(_) | FenceState::Lost(_)))
        };
        !self.0[slot].parts.iter().flatten().any(failed)
    }

    /// Whether a lane has parts of the slot, so that [`collect`](Slots::collect) may wait.
    pub(super) fn is_with_a_lane(&self, slot: usize) -> bool {
        !self.0[slot].tickets.iter().all(|(_, ticket)| ticket.is_over())
    }

    /// Waits until lanes have queued all copies into the slot; its parts.
    ///
    /// # Errors
    /// [`Error::TimedOut`]; why a lane failed: then the lanes let go of the slot, and its layer has to be fetched again.
    pub(super) fn collect(&mut self, slot: usize, deadline: Duration) -> Result<Vec<Buf>> {
        self.0[slot].collect(deadline)?;
        Ok(self.0[slot].parts.iter().flatten().cloned().collect())
    }

    /// Whether lanes have let go of all parts of the slot, whatever came of it.
    pub(super) fn is_collected(&self, slot: usize) -> bool {
        self.0[slot].tickets.is_empty()
    }

    /// Makes lanes let go of the slot, within `patience`; whether any had it, so that what it was to hold is not in it.
    pub(super) fn give_up(&mut self, slot: usize, patience: Duration) -> bool {
        let slot = &mut self.0[slot];
        let had = !slot.tickets.is_empty();
        slot.tickets.iter().for_each(|(_, ticket)| ticket.give_up());
        // Why copies that nobody waits for failed is of no use to anyone.
        let _ = slot.collect(patience);
        had
    }

    /// The memory of a slot, to be written; none while a guard or a lane has some of it.
    pub(super) fn take(&mut self, slot: usize) -> Option<Vec<BufMut>> {
        let slot = &mut self.0[slot];
        let free = slot.is_free();
        free.then(|| slot.parts.drain(..).flatten().filter_map(|part| part.try_reclaim().ok()).collect())
    }

    /// Queues the copies of a layer into a slot whose memory was taken, or gives them to lanes.
    pub(super) fn fill(&mut self, fill: &Fill<'_>, slot: usize, memory: Vec<BufMut>) -> Result<()> {
        let (slot, parts) = (&mut self.0[slot], fill.parts);
        let memory = slot.cut(memory, parts)?;
        let mut outcome = Ok(());
        for (place, (part, dst)) in parts.iter().zip(memory).enumerate() {
            let memory = match &outcome {
                // What comes after a copy that was refused stays as it is.
                Err(_) => dst,
                Ok(()) if fill.lanes.is_staged(part.lane) => {
                    let ticket = fill.lanes.order(fill.model, part, dst, fill.asked, fill.deadline)?;
                    slot.tickets.push((place, ticket));
                    slot.parts.push(None);
                    continue;
                }
                Ok(()) => fill.lanes.queue(fill.model, part, dst).unwrap_or_else(|rejected| {
                    outcome = Err(rejected.error);
                    rejected.dst
                }),
            };
            slot.parts.push(Some(memory.freeze()));
        }
        outcome
    }

    /// Takes the memory of all slots that lanes can be made to let go of. Guards that are still out keep theirs until
    /// they are dropped.
    pub(super) fn drain(&mut self, deadline: Duration) -> Vec<Vec<Buf>> {
        self.0.iter().flat_map(|slot| &slot.tickets).for_each(|(_, ticket)| ticket.give_up());
        let until = Instant::now() + deadline;
        let whole = |mut slot: Slot| {
            // Why copies that nobody waits for failed is of no use to anyone.
            let _ = slot.collect(until.saturating_duration_since(Instant::now()));
            slot.parts.into_iter().collect::<Option<Vec<Buf>>>()
        };
        let slots: Vec<_> = self.0.drain(..).map(whole).collect();
        let lost = slots.iter().filter(|slot| slot.is_none()).count();
        if lost > 0 {
            tracing::error!(lost, "slots are lost: a lane did not let go of them");
        }
        slots.into_iter().flatten().collect()
    }

    /// The memory of all slots, each whole, when no guard and no lane has any.
    pub(super) fn take_all(&mut self, deadline: Duration) -> Option<Vec<BufMut>> {
        let until = Instant::now() + deadline;
        for slot in 0..self.count() {
            self.give_up(slot, until.saturating_duration_since(Instant::now()));
        }
        if !self.0.iter().all(Slot::is_free) {
            return None;
        }
        let count = self.count();
        let slots = (0..count).map(|slot| joined(self.take(slot)?).ok()).collect();
        self.0.clear();
        slots
    }
}

impl Slot {
    /// Whether nobody else holds any of it.
    fn is_free(&self) -> bool {
        let there = self.tickets.is_empty() && !self.parts.is_empty();
        there && self.parts.iter().all(|part| part.as_ref().is_some_and(|part| !part.is_shared()))
    }

    /// Waits until lanes are done with its parts, whatever came of it.
    fn collect(&mut self, deadline: Duration) -> Result<()> {
        let until = Instant::now() + deadline;
        let mut outcome = Ok(());
        while let Some((place, ticket)) = self.tickets.first() {
            let ended = match ticket.wait(until.saturating_duration_since(Instant::now())) {
                Ok(ended) => ended,
                Err(Error::TimedOut { what, .. }) => return Err(Error::TimedOut { what, after: deadline }),
                Err(error) => return Err(error),
            };
            self.parts[*place] = ended.memory;
            outcome = outcome.and(ended.outcome);
            self.tickets.remove(0);
        }
        outcome
    }

    /// Joins the parts of a layer that was in the slot and cuts it into those of another, the last with what is left.
    fn cut(&mut self, memory: Vec<BufMut>, parts: &[Part]) -> Result<Vec<BufMut>> {
        let mut rest = joined(memory)?;
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

/// One buffer of the parts into which it was cut.
fn joined(memory: Vec<BufMut>) -> Result<BufMut> {
    let mut memory = memory.into_iter();
    let mut whole = memory.next().ok_or_else(|| Error::bug("a slot without memory"))?;
    let joined = memory.try_for_each(|part| whole.unsplit(part));
    joined.map_err(|_| Error::bug("parts of two slots were mixed up"))?;
    Ok(whole)
}
