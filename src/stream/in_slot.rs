//! The slots from outside: which a layer can use, where its tensors lie in them, and overwriting their contents.

use std::ops::Range;
use std::sync::Arc;

use super::Streamer;
use crate::backend::{BufMut, MemoryBlock, MemoryKind, Piece, Transfer};
use crate::checkpoint::{LayerId, TensorId, TensorInfo};
use crate::error::{Error, InUse, Result};
use crate::limits::STAGING_BYTES;

/// Where a tensor lies while a slot holds its layer; see [`Streamer::in_slot`].
#[derive(Clone, Debug)]
pub struct InSlot<'s> {
    info: &'s TensorInfo,
    block: &'s Arc<MemoryBlock>,
    range: Range<usize>,
}

impl<'s> InSlot<'s> {
    /// The tensor, as slots hold it: values have the type that the plan [unpacks](crate::Planner::unpack) to.
    pub fn info(&self) -> &'s TensorInfo {
        self.info
    }

    /// The allocation: the whole slot, or a part of it if the plan [divides](crate::Plan::grouping) slots.
    pub fn block(&self) -> &'s Arc<MemoryBlock> {
        self.block
    }

    /// The tensor's byte range there.
    pub fn byte_range(&self) -> Range<usize> {
        self.range.clone()
    }
}

impl Streamer {
    /// The number of slots; see [`LayerGuard::slot`](crate::LayerGuard::slot).
    pub fn slot_count(&self) -> usize {
        self.slots.count()
    }

    /// The slots that may come to hold a layer, in order. With [fixed slots](crate::Planner::fixed_slots) it is one. None if
    /// nothing of the layer is streamed, or there is no such layer.
    pub fn slots_of(&self, layer: LayerId) -> Vec<usize> {
        let streamed = self.streamed.contents.get(layer).is_some_and(|content| content.is_streamed());
        if streamed { self.schedule.usable(layer).collect() } else { Vec::new() }
    }

    /// Where the tensor `name` lies while this slot holds its layer. It is always the same place, so a framework's tensor can be
    /// a view of it, made once. `None` if the tensor is not streamed or has no bytes, the slot does not hold its layer, or there
    /// is no such tensor or slot.
    pub fn in_slot(&self, slot: usize, name: &str) -> Option<InSlot<'_>> {
        let tensor = self.model.index().find(name)?;
        let layer = self.model.layout().layer_with(tensor);
        self.slots_of(layer).contains(&slot).then_some(())?;
        let (block, range) = self.place_in_slot(tensor).filter(|(_, range)| !range.is_empty())?;
        let block = self.slots.allocation(slot, block)?;
        let layout = self.streamed.unpacked.as_ref().unwrap_or(self.model.layout());
        Some(InSlot { info: layout.at(tensor), block, range })
    }

    /// The byte range of the tensor `name` in a slot that holds its layer, or in its block if the plan
    /// [divides](crate::Plan::grouping) slots. Unless slots are divided by tensor, it starts at a multiple of 256 for the first
    /// tensor of each module. `None` if the tensor is not streamed, or there is no such tensor.
    pub fn range_in_slot(&self, name: &str) -> Option<Range<usize>> {
        let tensor = self.model.index().find(name)?;
        self.place_in_slot(tensor).map(|(_, range)| range)
    }

    /// The number of the block that holds a tensor, and the byte range there.
    fn place_in_slot(&self, tensor: TensorId) -> Option<(usize, Range<usize>)> {
        let index = self.model.index();
        let content = self.streamed.contents.of(self.model.layout().layer_with(tensor));
        let (part, range) = content.find(index.owner(tensor), &index.place(tensor))?;
        let block = content.parts[part].block;
        let before = content.parts[..part].iter().filter(|part| part.block == block);
        let before: usize = before.map(|part| part.bytes).sum();
        Some((block, before + range.start..before + range.end))
    }

    /// Overwrites all slots with `byte`, so that layers are fetched again. It finds code that copies weights where it should keep
    /// views of them: such code computes with what it copied, and bytes of 0xff are NaN in every floating-point type.
    ///
    /// # Errors
    /// [`Error::InUse`] while a guard holds a slot; any error of the copies. The slots before that one are overwritten then.
    pub fn overwrite_slots(&mut self, byte: u8) -> Result<()> {
        self.process.check()?;
        for slot in 0..self.slots.count() {
            self.slots.cancel(slot, self.deadline);
            self.schedule.empty(slot);
            if !self.slots.has_memory(slot) {
                continue;
            }
            let memory = self.slots.take(slot).ok_or(InUse::Slots { count: self.slots.count() })?;
            let (mut blocks, mut outcome) = (Vec::with_capacity(memory.len()), Ok(()));
            for parts in memory {
                let overwritten = parts.into_iter().map(|part| match &outcome {
                    Ok(()) => self.overwrite(part, byte).unwrap_or_else(|(error, part)| {
                        outcome = Err(error);
                        part
                    }),
                    Err(_) => part,
                });
                blocks.push(overwritten.collect());
            }
            self.slots.put(slot, blocks);
            outcome?;
        }
        Ok(())
    }

    /// Overwrites a buffer.
    fn overwrite(&self, mut dst: BufMut, byte: u8) -> Result<BufMut, (Error, BufMut)> {
        if let Err(error) = dst.wait_unused(self.deadline) {
            return Err((error, dst));
        }
        match dst.write_with(|bytes| bytes.fill(byte)) {
            Ok(Some(())) => return Ok(dst),
            Ok(None) => {}
            Err(error) => return Err((error, dst)),
        }
        self.overwrite_on_device(dst, byte)
    }

    /// Overwrites a buffer that the host cannot address.
    fn overwrite_on_device(&self, mut dst: BufMut, byte: u8) -> Result<BufMut, (Error, BufMut)> {
        let bytes = dst.bytes();
        let staging = self.model.host().alloc_near(bytes.min(STAGING_BYTES), MemoryKind::Pinned, dst.device());
        let filled = staging.and_then(|mut staging| {
            let filled = staging.write_with(|bytes| bytes.fill(byte))?;
            filled.ok_or_else(|| Error::bug("staging memory that the host cannot address"))?;
            Ok(staging.freeze())
        });
        let src = match filled {
            Ok(src) => src,
            Err(error) => return Err((error, dst)),
        };
        for at in (0..bytes).step_by(src.bytes().max(1)) {
            let piece = Piece { src: src.clone(), from: 0..src.bytes().min(bytes - at), at };
            let sent = Transfer::new(vec![piece], dst).and_then(|transfer| self.compute.send(transfer));
            dst = match sent {
                Ok(flight) => flight.chain(),
                Err(rejected) => return Err((rejected.error, rejected.dst)),
            };
        }
        Ok(dst)
    }
}
