//! Device memory: ranges of blocks that are each one allocation of the driver and one buffer.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ash::vk;
use range_alloc::RangeAllocator;

use super::context::{Context, Named, Outcome, Refusal};
use crate::backend::{MemoryKind, Storage};

/// The size of a block in bytes. A driver may allow no more than 4096 allocations, so what is small shares one.
const BLOCK: u64 = 64 << 20;

/// The size from which memory is a block of its own.
const SHARED_BELOW: u64 = BLOCK / 4;

/// The alignment of ranges in bytes: the most that drivers ask of the offset of a storage buffer.
pub(super) const ALIGNMENT: u64 = 256;

/// What buffers of device memory are for.
const USAGE: vk::BufferUsageFlags = vk::BufferUsageFlags::from_raw(
    vk::BufferUsageFlags::TRANSFER_SRC.as_raw()
        | vk::BufferUsageFlags::TRANSFER_DST.as_raw()
        | vk::BufferUsageFlags::STORAGE_BUFFER.as_raw(),
);

/// The memory of a device that is in use or kept for reuse.
pub(super) struct Arena {
    context: Arc<Context>,
    blocks: Mutex<Vec<Arc<Block>>>,
}

/// An allocation of the driver, with the buffer that is bound to all of it.
struct Block {
    context: Arc<Context>,
    memory: vk::DeviceMemory,
    buffer: vk::Buffer,
    ranges: Mutex<RangeAllocator<u64>>,
    /// Whether it was made for one range alone.
    whole: bool,
}

/// A range of a block.
pub(super) struct VulkanMemory {
    bytes: usize,
    /// `None` for no bytes.
    place: Option<(Arc<Block>, Range<u64>)>,
    arena: Arc<Arena>,
}

impl Arena {
    pub(super) fn new(context: &Arc<Context>) -> Arc<Arena> {
        Arc::new(Arena { context: Arc::clone(context), blocks: Mutex::default() })
    }

    /// Allocates memory, from a block or separately.
    pub(super) fn allocate(self: &Arc<Self>, bytes: usize, kind: MemoryKind) -> Result<VulkanMemory, Refusal> {
        let memory = |place| VulkanMemory { bytes, place, arena: Arc::clone(self) };
        if bytes == 0 {
            return Ok(memory(None));
        }
        let size = (bytes as u64).checked_next_multiple_of(ALIGNMENT).filter(|&size| size <= self.largest());
        let size = size.ok_or(Refusal::Code("vkAllocateMemory", vk::Result::ERROR_OUT_OF_DEVICE_MEMORY))?;
        if kind == MemoryKind::Whole || size >= SHARED_BELOW {
            let block = Arc::new(Block::new(&self.context, size, true)?);
            let range = block.take(size).unwrap_or(0..size);
            self.blocks().push(Arc::clone(&block));
            return Ok(memory(Some((block, range))));
        }
        let find = |blocks: &[Arc<Block>]| {
            let shared = blocks.iter().filter(|block| !block.whole);
            shared.map(|block| block.take(size).map(|range| (Arc::clone(block), range))).find_map(|found| found)
        };
        let mut blocks = self.blocks();
        if let Some(place) = find(&blocks) {
            return Ok(memory(Some(place)));
        }
        // A device that is nearly full may have room for this, but not for a block.
        let most = self.context.limits().allocation.min(BLOCK);
        let new = Block::new(&self.context, most.max(size), false);
        let block = match new {
            Err(refusal) if refusal.is_out_of_memory() => Block::new(&self.context, size, false)?,
            new => new?,
        };
        blocks.push(Arc::new(block));
        Ok(memory(find(&blocks)))
    }

    /// The bytes of the largest allocation that the driver makes.
    pub(super) fn largest(&self) -> u64 {
        self.context.limits().allocation
    }

    /// Gives unused blocks back to the driver. Returns the number of bytes released.
    pub(super) fn trim(&self) -> u64 {
        let unused: Vec<_> = self.blocks().extract_if(.., |block| block.is_unused()).collect();
        unused.iter().map(|block| block.bytes()).sum()
    }

    /// Takes a range back. One unused block is kept for the next.
    fn give_back(&self, block: &Arc<Block>, range: Range<u64>) {
        let mut blocks = self.blocks();
        block.ranges().free_range(range);
        let kept = |other: &Arc<Block>| !other.whole && !Arc::ptr_eq(other, block) && other.is_unused();
        let unused = block.is_unused() && (block.whole || blocks.iter().any(kept));
        if unused {
            blocks.retain(|other| !Arc::ptr_eq(other, block));
        }
    }

    fn blocks(&self) -> MutexGuard<'_, Vec<Arc<Block>>> {
        // Every change is one push or removal, so a poisoned lock still guards a consistent list.
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Block {
    fn new(context: &Arc<Context>, bytes: u64, whole: bool) -> Result<Block, Refusal> {
        let (memory, buffer) = context.raw(|device| {
            let (buffer, needs) = buffer(context, device, bytes, USAGE, None)?;
            let destroy = |refusal| {
                // SAFETY: made above, and nobody else has it.
                unsafe { device.destroy_buffer(buffer, None) };
                refusal
            };
            let kind =
                context.physical.memory_type(needs.memory_type_bits, &[vk::MemoryPropertyFlags::DEVICE_LOCAL], true);
            let kind = kind.ok_or(("vkGetBufferMemoryRequirements", vk::Result::ERROR_FORMAT_NOT_SUPPORTED));
            let mut alone = vk::MemoryDedicatedAllocateInfo::default().buffer(buffer);
            let allocate = vk::MemoryAllocateInfo::default().allocation_size(needs.size);
            let allocate = if whole { allocate.push_next(&mut alone) } else { allocate };
            let allocate = allocate.memory_type_index(kind.map_err(destroy)?);
            bound(context, device, &allocate, buffer).map(|memory| (memory, buffer)).map_err(destroy)
        })?;
        let ranges = Mutex::new(RangeAllocator::new(0..bytes));
        Ok(Block { context: Arc::clone(context), memory, buffer, ranges, whole })
    }

    fn take(&self, bytes: u64) -> Option<Range<u64>> {
        self.ranges().allocate_range(bytes).ok()
    }

    fn is_unused(&self) -> bool {
        self.ranges().is_empty()
    }

    fn bytes(&self) -> u64 {
        let range = self.ranges().initial_range().clone();
        range.end - range.start
    }

    fn ranges(&self) -> MutexGuard<'_, RangeAllocator<u64>> {
        self.ranges.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Creates a buffer for all queues in use. Returns it with what it needs of memory.
pub(super) fn buffer(
    context: &Context,
    device: &ash::Device,
    bytes: u64,
    usage: vk::BufferUsageFlags,
    external: Option<vk::ExternalMemoryHandleTypeFlags>,
) -> Outcome<(vk::Buffer, vk::MemoryRequirements)> {
    let (mode, families) = context.queues().sharing();
    let mut from = vk::ExternalMemoryBufferCreateInfo::default().handle_types(external.unwrap_or_default());
    let create =
        vk::BufferCreateInfo::default().size(bytes).usage(usage).sharing_mode(mode).queue_family_indices(families);
    let create = if external.is_some() { create.push_next(&mut from) } else { create };
    // SAFETY: what the structures point to outlives the call.
    let buffer = unsafe { device.create_buffer(&create, None) }.of("vkCreateBuffer")?;
    // SAFETY: it was created above.
    Ok((buffer, unsafe { device.get_buffer_memory_requirements(buffer) }))
}

/// Allocates memory and binds a buffer to it. If that fails, nothing is allocated, and the buffer is the caller's still.
pub(super) fn bound(
    context: &Context,
    device: &ash::Device,
    allocate: &vk::MemoryAllocateInfo<'_>,
    buffer: vk::Buffer,
) -> Outcome<vk::DeviceMemory> {
    let memory = context.allocate(device, allocate)?;
    // SAFETY: the memory is as large as the buffer needs, and of a type that it can be bound to.
    unsafe { device.bind_buffer_memory(buffer, memory, 0) }.of("vkBindBufferMemory").inspect_err(|_| {
        // SAFETY: allocated above, and nothing is bound to it.
        unsafe { context.free_memory(device, memory) };
    })?;
    Ok(memory)
}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: ranges are given back after their last use was observed to be complete, and no range is taken.
        self.context.destroy(|device| unsafe {
            device.destroy_buffer(self.buffer, None);
            self.context.free_memory(device, self.memory);
        });
    }
}

impl VulkanMemory {
    pub(super) fn context(&self) -> &Context {
        &self.arena.context
    }

    /// The buffer and the offset of the first byte. `None` for no bytes.
    pub(super) fn place(&self) -> Option<(vk::Buffer, u64)> {
        self.place.as_ref().map(|(block, range)| (block.buffer, range.start))
    }
}

// SAFETY: the memory has no address.
unsafe impl Storage for VulkanMemory {
    fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for VulkanMemory {
    fn drop(&mut self) {
        if let Some((block, range)) = self.place.take() {
            self.arena.give_back(&block, range);
        }
    }
}
