//! The memory of a streamer's slots: filling a slot and reclaiming it.

use std::time::{Duration, Instant};

use super::lanes::Lanes;
use crate::backend::{Buf, BufMut, FenceState};
use crate::error::{Error, Result};
use crate::load::Model;
use crate::schedule::Part;
use crate::transfer::PendingOrder;

/// The slots of a streamer.
pub(super) struct Slots(Vec<Slot>);

/// Device memory for one layer.
struct Slot {
    /// Its memory, in parts. `None` for a part that a lane holds, or that was lost.
    parts: Vec<Option<Buf>>,
    /// The orders of staging lanes, with the index of the part that each fills.
    orders: Vec<(usize, PendingOrder)>,
}

/// The parameters of filling a slot.
pub(super) struct Fill<'a> {
    pub(super) model: &'a Model,
    pub(super) lanes: &'a Lanes,
    /// The parts that the layer fetches.
    pub(super) parts: &'a [Part],
    /// A fetch on demand, which lanes serve before prefetches.
    pub(super) on_demand: bool,
    pub(super) deadline: Duration,
}

impl Slots {
    /// Slots with this memory. Each slot is in the parts that it was last split into.
    pub(super) fn new(memory: impl IntoIterator<Item = Vec<Buf>>) -> Slots {
        let slot = |parts: Vec<Buf>| Slot { parts: parts.into_iter().map(Some).collect(), orders: Vec::new() };
        Slots(memory.into_iter().map(slot).collect())
    }

    pub(super) fn count(&self) -> usize {
        self.0.len()
    }

    /// The size of each slot, in bytes.
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

    /// Whether a lane still works on parts of the slot, so that [`collect`](Slots::collect) may block.
    pub(super) fn is_with_a_lane(&self, slot: usize) -> bool {
        !self.0[slot].orders.iter().all(|(_, order)| order.is_finished())
    }

    /// Waits until lanes have queued all copies into the slot. Returns its parts.
    ///
    /// # Errors
    /// [`Error::TimedOut`]; the error of a lane that failed: the lanes have then released the slot, and its layer must be
    /// fetched again.
    pub(super) fn collect(&mut self, slot: usize, deadline: Duration) -> Result<Vec<Buf>> {
        self.0[slot].collect(deadline)?;
        Ok(self.0[slot].parts.iter().flatten().cloned().collect())
    }

    /// Whether lanes have released all parts of the slot, successfully or not.
    pub(super) fn is_collected(&self, slot: usize) -> bool {
        self.0[slot].orders.is_empty()
    }

    /// Makes lanes release the slot, within `patience`. Returns whether any lane held it: its layer is then incomplete.
    pub(super) fn cancel(&mut self, slot: usize, patience: Duration) -> bool {
        let slot = &mut self.0[slot];
        let had = !slot.orders.is_empty();
        slot.orders.iter().for_each(|(_, order)| order.cancel());
        // Nobody waits for these copies, so their errors are dropped.
        let _ = slot.collect(patience);
        had
    }

    /// Takes the memory of a slot, to be written. `None` while a guard or a lane holds any of it.
    pub(super) fn take(&mut self, slot: usize) -> Option<Vec<BufMut>> {
        let slot = &mut self.0[slot];
        let free = slot.is_free();
        free.then(|| slot.parts.drain(..).flatten().filter_map(|part| part.try_reclaim().ok()).collect())
    }

    /// Queues the copies of a layer into a slot whose memory was taken, or submits them to lanes.
    pub(super) fn fill(&mut self, fill: &Fill<'_>, slot: usize, memory: Vec<BufMut>) -> Result<()> {
        let (slot, parts) = (&mut self.0[slot], fill.parts);
        let memory = slot.split(memory, parts)?;
        let mut outcome = Ok(());
        for (index, (part, dst)) in parts.iter().zip(memory).enumerate() {
            let memory = match &outcome {
                // Parts after a rejected copy stay as they are.
                Err(_) => dst,
                Ok(()) if fill.lanes.is_staged(part.lane) => {
                    let order = fill.lanes.order(fill.model, part, dst, fill.on_demand, fill.deadline)?;
                    slot.orders.push((index, order));
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

    /// Takes the memory of all slots that lanes release in time. Live guards keep the memory of their layers until they
    /// are dropped.
    pub(super) fn drain(&mut self, deadline: Duration) -> Vec<Vec<Buf>> {
        self.0.iter().flat_map(|slot| &slot.orders).for_each(|(_, order)| order.cancel());
        let until = Instant::now() + deadline;
        let whole = |mut slot: Slot| {
            // Nobody waits for these copies, so their errors are dropped.
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

    /// Takes the memory of all slots, each joined into one buffer. `None` if a guard or a lane holds any of it.
    pub(super) fn take_all(&mut self, deadline: Duration) -> Option<Vec<BufMut>> {
        let until = Instant::now() + deadline;
        for slot in 0..self.count() {
            self.cancel(slot, until.saturating_duration_since(Instant::now()));
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
    /// Whether the slot has memory and nobody else holds any of it.
    fn is_free(&self) -> bool {
        let collected = self.orders.is_empty() && !self.parts.is_empty();
        collected && self.parts.iter().all(|part| part.as_ref().is_some_and(|part| !part.is_shared()))
    }

    /// Waits until lanes are done with its parts, successfully or not.
    fn collect(&mut self, deadline: Duration) -> Result<()> {
        let until = Instant::now() + deadline;
        let mut outcome = Ok(());
        while let Some((index, order)) = self.orders.first() {
            let finished = match order.wait(until.saturating_duration_since(Instant::now())) {
                Ok(finished) => finished,
                Err(Error::TimedOut { what, .. }) => return Err(Error::TimedOut { what, after: deadline }),
                Err(error) => return Err(error),
            };
            self.parts[*index] = finished.memory;
            outcome = outcome.and(finished.outcome);
            self.orders.remove(0);
        }
        outcome
    }

    /// Joins the parts of the previous layer and splits the slot into the parts of the next one. The last part takes what
    /// is left.
    fn split(&mut self, memory: Vec<BufMut>, parts: &[Part]) -> Result<Vec<BufMut>> {
        let mut rest = joined(memory)?;
        let mut split = Vec::with_capacity(parts.len());
        for part in parts.iter().rev().skip(1).rev() {
            match rest.split_off(part.bytes) {
                Ok(after) => split.push(std::mem::replace(&mut rest, after)),
                Err(error) => {
                    // The slot keeps all its memory, in parts.
                    self.parts = split.into_iter().chain([rest]).map(|part| Some(part.freeze())).collect();
                    return Err(error);
                }
            }
        }
        split.push(rest);
        Ok(split)
    }
}

/// Joins the parts of a buffer that was split.
fn joined(memory: Vec<BufMut>) -> Result<BufMut> {
    let mut memory = memory.into_iter();
    let mut whole = memory.next().ok_or_else(|| Error::bug("a slot without memory"))?;
    let joined = memory.try_for_each(|part| whole.unsplit(part));
    joined.map_err(|_| Error::bug("parts of two slots were mixed up"))?;
    Ok(whole)
}
