//! The memory of a streamer's slots: filling a slot and reclaiming it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::lanes::Lanes;
use super::verdict::{Places, Verdict};
use crate::backend::{Buf, BufMut, FenceState, MemoryBlock};
use crate::error::{Error, Result};
use crate::load::{Model, SlotMemory};
use crate::schedule::Part;
use crate::transfer::PendingOrder;

/// The slots of a streamer.
pub(super) struct Slots(Vec<Slot>);

/// Device memory for one layer, in blocks.
struct Slot(Vec<Block>);

/// An allocation of a slot.
struct Block {
    /// Its memory, in parts. `None` for a part that a lane holds, or that was lost. Empty if the slot lacks this block.
    parts: Vec<Option<Buf>>,
    /// The number of parts that the present layer uses.
    used: usize,
    /// The orders of staging lanes.
    orders: Vec<Pending>,
    /// The verdicts on the codes of the present layer.
    verdicts: Vec<Arc<Verdict>>,
    /// Whether an order of the present layer failed. Its memory tells nothing of that.
    failed: bool,
    allocation: Option<Arc<MemoryBlock>>,
}

/// An order of a staging lane.
struct Pending {
    /// The index of the part that it fills.
    part: usize,
    order: PendingOrder,
    /// Where a verdict on its codes is from.
    places: Option<Arc<Places>>,
}

/// The memory of a slot while it is written, block by block, each in parts.
pub(super) type Writable = Vec<Vec<BufMut>>;

/// The parameters of filling a slot.
pub(super) struct Fill<'a> {
    pub(super) model: &'a Model,
    pub(super) lanes: &'a Lanes,
    /// The parts that the layer fetches, in order of their blocks.
    pub(super) parts: &'a [Part],
    /// A fetch on demand, which lanes serve before prefetches.
    pub(super) on_demand: bool,
    pub(super) deadline: Duration,
}

impl Slots {
    /// Slots with this memory. Each block is in the parts that it was last split into.
    pub(super) fn new(memory: impl IntoIterator<Item = SlotMemory>) -> Slots {
        let slot = |blocks: SlotMemory| Slot(blocks.into_iter().map(Block::new).collect());
        Slots(memory.into_iter().map(slot).collect())
    }

    pub(super) fn count(&self) -> usize {
        self.0.len()
    }

    /// The size of each slot, in bytes.
    pub(super) fn sizes(&self) -> Vec<u64> {
        let of =
            |slot: &Slot| slot.0.iter().flat_map(|block| block.parts.iter().flatten()).map(|p| p.bytes() as u64).sum();
        self.0.iter().map(of).collect()
    }

    /// The allocations of all slots.
    pub(super) fn allocations(&self) -> impl Iterator<Item = Arc<MemoryBlock>> {
        self.0.iter().flat_map(|slot| &slot.0).filter_map(|block| block.allocation.clone())
    }

    /// The allocation of a block of a slot. `None` if the slot lacks the block.
    pub(super) fn allocation(&self, slot: usize, block: usize) -> Option<&Arc<MemoryBlock>> {
        self.0.get(slot)?.0.get(block)?.allocation.as_ref()
    }

    /// Whether a slot has any memory. It has none if its layers are streamed without a byte.
    pub(super) fn has_memory(&self, slot: usize) -> bool {
        self.0[slot].0.iter().any(|block| block.allocation.as_ref().is_some_and(|memory| memory.bytes() > 0))
    }

    /// Whether no copy of the present layer failed.
    pub(super) fn is_sound(&self, slot: usize) -> bool {
        let failed = |memory: &Buf| {
            memory.ready().any(|event| matches!(event.state(), FenceState::Failed(_) | FenceState::Lost(_)))
        };
        let slot = &self.0[slot];
        let damaged = |verdict: &Arc<Verdict>| !matches!(verdict.known(), Ok(None | Some(true)));
        !slot.0.iter().any(|block| block.failed || block.verdicts.iter().any(damaged))
            && !slot.used().any(|part| part.as_ref().is_some_and(failed))
    }

    /// The verdicts on the codes of the present layer, once lanes have queued all copies into the slot.
    pub(super) fn verdicts(&self, slot: usize) -> Vec<Arc<Verdict>> {
        self.0[slot].0.iter().flat_map(|block| &block.verdicts).cloned().collect()
    }

    /// Whether a lane still works on parts of the slot, so that [`collect`](Slots::collect) may block.
    pub(super) fn is_with_a_lane(&self, slot: usize) -> bool {
        !self.0[slot].orders().all(|pending| pending.order.is_finished())
    }

    /// Waits until lanes have queued all copies into the slot. Returns the parts that the present layer uses.
    ///
    /// # Errors
    /// [`Error::TimedOut`]; the error of a lane that failed: the lanes have then released the slot, and its layer must be
    /// fetched again.
    pub(super) fn collect(&mut self, slot: usize, deadline: Duration) -> Result<Vec<Buf>> {
        self.0[slot].collect(deadline)?;
        Ok(self.0[slot].used().flatten().cloned().collect())
    }

    /// Whether lanes have released all parts of the slot, successfully or not.
    pub(super) fn is_collected(&self, slot: usize) -> bool {
        self.0[slot].orders().next().is_none()
    }

    /// Makes lanes release the slot, within `patience`. Returns whether any lane held it: its layer is then incomplete.
    pub(super) fn cancel(&mut self, slot: usize, patience: Duration) -> bool {
        let slot = &mut self.0[slot];
        let had = slot.orders().next().is_some();
        slot.orders().for_each(|pending| pending.order.cancel());
        // Nobody waits for these copies, so their errors are dropped.
        let _ = slot.collect(patience);
        had
    }

    /// Takes the memory of a slot, to be written. `None` while a guard or a lane holds any of it.
    pub(super) fn take(&mut self, slot: usize) -> Option<Writable> {
        let slot = &mut self.0[slot];
        let reclaim = |block: &mut Block| {
            (block.used, block.failed) = (0, false);
            block.verdicts.clear();
            block.parts.drain(..).flatten().filter_map(|part| part.try_reclaim().ok()).collect()
        };
        slot.is_free().then(|| slot.0.iter_mut().map(reclaim).collect())
    }

    /// Queues the copies of a layer into a slot whose memory was taken, or submits them to lanes.
    pub(super) fn fill(&mut self, fill: &Fill<'_>, slot: usize, memory: Writable) -> Result<()> {
        let mut outcome = Ok(());
        for (number, (block, memory)) in self.0[slot].0.iter_mut().zip(memory).enumerate() {
            let parts = fill.parts.iter().skip_while(|part| part.block < number);
            let parts: Vec<&Part> = parts.take_while(|part| part.block == number).collect();
            if parts.is_empty() || outcome.is_err() {
                block.parts = memory.into_iter().map(|part| Some(part.freeze())).collect();
                continue;
            }
            outcome = block.fill(fill, &parts, memory);
        }
        outcome
    }

    /// Returns the memory of a slot that was [taken](Slots::take). No layer uses it.
    pub(super) fn put(&mut self, slot: usize, memory: Writable) {
        for (block, memory) in self.0[slot].0.iter_mut().zip(memory) {
            block.parts = memory.into_iter().map(|part| Some(part.freeze())).collect();
        }
    }

    /// Takes the memory of all slots that lanes release in time. Live guards keep the memory of their layers until they
    /// are dropped.
    pub(super) fn drain(&mut self, deadline: Duration) -> Vec<SlotMemory> {
        self.0.iter().flat_map(Slot::orders).for_each(|pending| pending.order.cancel());
        let until = Instant::now() + deadline;
        let whole = |mut slot: Slot| {
            // Nobody waits for these copies, so their errors are dropped.
            let _ = slot.collect(until.saturating_duration_since(Instant::now()));
            let parts = |block: Block| block.parts.into_iter().collect::<Option<Vec<Buf>>>();
            slot.0.into_iter().map(parts).collect::<Option<SlotMemory>>()
        };
        let slots: Vec<_> = self.0.drain(..).map(whole).collect();
        let lost = slots.iter().filter(|slot| slot.is_none()).count();
        if lost > 0 {
            tracing::error!(lost, "slots are lost: a lane did not let go of them");
        }
        slots.into_iter().flatten().collect()
    }

    /// Takes the memory of all slots, each block joined into one buffer. `None` if a guard or a lane holds any of it.
    pub(super) fn take_all(&mut self, deadline: Duration) -> Option<Vec<Vec<BufMut>>> {
        let until = Instant::now() + deadline;
        for slot in 0..self.count() {
            self.cancel(slot, until.saturating_duration_since(Instant::now()));
        }
        if !self.0.iter().all(Slot::is_free) {
            return None;
        }
        let count = self.count();
        let joined = |slot| {
            let blocks = self.take(slot)?.into_iter().filter(|parts| !parts.is_empty());
            blocks.map(joined).collect::<Result<_>>().ok()
        };
        let slots = (0..count).map(joined).collect();
        self.0.clear();
        slots
    }
}

impl Slot {
    /// Whether the slot has memory and nobody else holds any of it.
    fn is_free(&self) -> bool {
        self.0.iter().any(|block| !block.parts.is_empty()) && self.0.iter().all(Block::is_free)
    }

    fn orders(&self) -> impl Iterator<Item = &Pending> {
        self.0.iter().flat_map(|block| &block.orders)
    }

    /// The parts that the present layer uses.
    fn used(&self) -> impl Iterator<Item = &Option<Buf>> {
        self.0.iter().flat_map(|block| &block.parts[..block.used.min(block.parts.len())])
    }

    /// Waits until lanes are done with its parts, successfully or not.
    fn collect(&mut self, deadline: Duration) -> Result<()> {
        let until = Instant::now() + deadline;
        let mut outcome = Ok(());
        for block in &mut self.0 {
            block.collect(until, deadline, &mut outcome)?;
        }
        outcome
    }
}

impl Block {
    fn new(parts: Vec<Buf>) -> Block {
        let allocation = parts.first().map(|part| Arc::clone(part.block()));
        let (orders, verdicts) = Default::default();
        Block { parts: parts.into_iter().map(Some).collect(), used: 0, orders, verdicts, failed: false, allocation }
    }

    fn is_free(&self) -> bool {
        self.orders.is_empty() && self.parts.iter().all(|part| part.as_ref().is_some_and(|part| !part.is_shared()))
    }

    /// Queues the copies of a layer's parts into the block, or submits them to lanes.
    fn fill(&mut self, fill: &Fill<'_>, parts: &[&Part], memory: Vec<BufMut>) -> Result<()> {
        let memory = self.split(memory, parts)?;
        self.used = parts.len();
        let mut outcome = Ok(());
        for (index, (part, dst)) in parts.iter().zip(memory).enumerate() {
            let memory = match &outcome {
                // Parts after a rejected copy stay as they are.
                Err(_) => dst,
                Ok(()) if fill.lanes.is_staged(part.lane) => {
                    let order = fill.lanes.order(fill.model, part, dst, fill.on_demand, fill.deadline)?;
                    self.orders.push(Pending { part: index, order, places: fill.lanes.places() });
                    self.parts.push(None);
                    continue;
                }
                Ok(()) => match fill.lanes.queue(fill.model, part, dst) {
                    Ok((memory, verdict)) => {
                        self.verdicts.extend(verdict);
                        memory
                    }
                    Err(rejected) => {
                        outcome = Err(rejected.error);
                        rejected.dst
                    }
                },
            };
            self.parts.push(Some(memory.freeze()));
        }
        outcome
    }

    /// Waits until lanes are done with its parts. The first of their errors goes into `outcome`.
    fn collect(&mut self, until: Instant, deadline: Duration, outcome: &mut Result<()>) -> Result<()> {
        while let Some(Pending { part, order, places }) = self.orders.first() {
            let finished = match order.wait(until.saturating_duration_since(Instant::now())) {
                Ok(finished) => finished,
                Err(Error::TimedOut { what, .. }) => return Err(Error::TimedOut { what, after: deadline }),
                Err(error) => return Err(error),
            };
            self.parts[*part] = finished.memory;
            self.verdicts.extend(finished.verdict.zip(places.as_ref()).map(|(place, places)| places.verdict(place)));
            self.failed |= finished.outcome.is_err();
            if outcome.is_ok() {
                *outcome = finished.outcome;
            }
            self.orders.remove(0);
        }
        Ok(())
    }

    /// Joins the parts of the previous layer and splits the block into the parts of the next one. The last part takes what
    /// is left.
    fn split(&mut self, memory: Vec<BufMut>, parts: &[&Part]) -> Result<Vec<BufMut>> {
        let mut rest = joined(memory)?;
        let mut split = Vec::with_capacity(parts.len());
        for part in parts.iter().rev().skip(1).rev() {
            match rest.split_off(part.bytes) {
                Ok(after) => split.push(std::mem::replace(&mut rest, after)),
                Err(error) => {
                    // The block keeps all its memory, in parts.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::{Backend, Host, MemoryKind};
    use crate::device::DeviceId;
    use crate::transfer::Finished;

    /// The memory that a failed order returns does not show that bytes are missing, and its error is told to one caller alone,
    /// if to any: here a later order is late.
    #[test]
    fn a_layer_that_an_order_failed_stays_unsound_until_its_slot_is_taken() {
        let host = Host::new().open(DeviceId::CPU).unwrap();
        let memory = || host.alloc(8, MemoryKind::Whole).unwrap().freeze();
        let pending = |order| vec![Pending { part: 0, order: PendingOrder::in_state(order), places: None }];
        let block = |order| {
            let block = Block::new(vec![memory()]);
            Block { parts: vec![None], used: 1, orders: pending(order), ..block }
        };
        let failed =
            Finished { memory: Some(memory()), verdict: None, outcome: Err(Error::bug("the file is damaged")) };
        let mut slots = Slots(vec![Slot(vec![block(Some(failed)), block(None)])]);
        assert!(matches!(slots.collect(0, Duration::ZERO), Err(Error::TimedOut { .. })));
        assert!(!slots.is_sound(0));
        let late = Finished { memory: Some(memory()), verdict: None, outcome: Ok(()) };
        slots.0[0].0[1].orders = pending(Some(late));
        assert_eq!(slots.collect(0, Duration::ZERO).unwrap().len(), 2);
        assert!(!slots.is_sound(0));
        let memory = slots.take(0).unwrap();
        slots.put(0, memory);
        assert!(slots.is_sound(0));
    }
}
