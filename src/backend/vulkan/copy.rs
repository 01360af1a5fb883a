//! Copies: what each piece of a transfer is to the device, and how it is queued.

use std::ops::Range;
use std::sync::Arc;

use ash::vk;

use super::arena::VulkanMemory;
use super::context::Context;
use super::pinned::PinnedMemory;
use crate::backend::{MemoryBlock, Piece};
use crate::error::{Error, Result};

/// A place in a buffer: the buffer and an offset in bytes.
pub(super) type Place = (vk::Buffer, u64);

/// One copy as a device performs it.
#[derive(Clone, Copy)]
pub(super) enum Move {
    /// Between buffers.
    Direct { src: Place, dst: Place, bytes: u64 },
    /// From host memory that the device cannot reach.
    Up { src: *const u8, dst: Place, bytes: usize },
    /// To such memory.
    Down { src: Place, dst: *mut u8, bytes: usize },
}

/// One end of a copy.
enum End {
    Device(Place),
    Pinned(Place),
    Host(*mut u8),
}

impl End {
    /// The end at offset `at` of an allocation. `None` for memory that no stream of this device can reach.
    fn of(context: &Arc<Context>, block: &MemoryBlock, at: usize) -> Option<End> {
        let offset = |(buffer, start): Place| (buffer, start + at as u64);
        if let Some(memory) = block.downcast::<VulkanMemory>() {
            return memory.place().filter(|_| memory.context().is(context)).map(|place| End::Device(offset(place)));
        }
        if let Some(place) = block.downcast::<PinnedMemory>().and_then(|memory| memory.place(context)) {
            return Some(End::Pinned(offset(place)));
        }
        block.host_at(&(at..at)).map(End::Host)
    }
}

impl Move {
    /// The copy of a piece. `None` for one of no bytes.
    ///
    /// # Errors
    /// [`Error::Unreachable`] for a copy that the device cannot perform: from host to host, or of another device's memory.
    pub(super) fn of(context: &Arc<Context>, piece: &Piece, dst: &MemoryBlock) -> Result<Option<Move>> {
        let bytes = piece.from.len();
        if bytes == 0 {
            return Ok(None);
        }
        let src = piece.src.block();
        let ends = End::of(context, src, piece.from.start).zip(End::of(context, dst, piece.at));
        let found = match ends {
            Some((End::Device(src) | End::Pinned(src), End::Device(dst)) | (End::Device(src), End::Pinned(dst))) => {
                Move::Direct { src, dst, bytes: bytes as u64 }
            }
            Some((End::Host(src), End::Device(dst))) => Move::Up { src, dst, bytes },
            Some((End::Device(src), End::Host(dst))) => Move::Down { src, dst, bytes },
            _ => return Err(Error::Unreachable { stream: context.id(), from: src.device(), to: dst.device() }),
        };
        Ok(Some(found))
    }

    pub(super) fn is_direct(&self) -> bool {
        matches!(self, Move::Direct { .. })
    }
}

/// Records direct copies, in order where one writes what an earlier one wrote.
///
/// # Safety
/// The ranges are inside buffers that live until the command buffer has run, and no copy overlaps its own source.
pub(super) unsafe fn record(device: &ash::Device, commands: vk::CommandBuffer, moves: &[Move]) {
    let mut written: Vec<(vk::Buffer, Range<u64>)> = Vec::new();
    let mut run: Vec<vk::BufferCopy> = Vec::new();
    let (mut ends, mut end) = (None, 0);
    let flush = |ends: Option<(vk::Buffer, vk::Buffer)>, run: &mut Vec<vk::BufferCopy>| {
        if let Some((src, dst)) = ends.filter(|_| !run.is_empty()) {
            // SAFETY: the caller's promise.
            unsafe { device.cmd_copy_buffer(commands, src, dst, run) };
        }
        run.clear();
    };
    for one in moves {
        let &Move::Direct { src, dst, bytes } = one else { continue };
        let range = dst.1..dst.1 + bytes;
        let overlaps = |(buffer, other): &(vk::Buffer, Range<u64>)| {
            *buffer == dst.0 && other.start < range.end && range.start < other.end
        };
        // Pieces mostly come in order.
        if range.start < end && written.iter().any(overlaps) {
            flush(ends, &mut run);
            barrier(device, commands, vk::PipelineStageFlags2::ALL_TRANSFER, vk::AccessFlags2::TRANSFER_WRITE);
            written.clear();
            end = 0;
        }
        if ends != Some((src.0, dst.0)) {
            flush(ends, &mut run);
            ends = Some((src.0, dst.0));
        }
        run.push(vk::BufferCopy { src_offset: src.1, dst_offset: dst.1, size: bytes });
        end = end.max(range.end);
        written.push((dst.0, range));
    }
    flush(ends, &mut run);
    // What the host reads afterwards has to be made visible to it; a wait alone does not.
    barrier(device, commands, vk::PipelineStageFlags2::HOST, vk::AccessFlags2::HOST_READ);
}

/// Makes what copies wrote so far visible to accesses of this kind.
fn barrier(
    device: &ash::Device,
    commands: vk::CommandBuffer,
    stage: vk::PipelineStageFlags2,
    access: vk::AccessFlags2,
) {
    let barriers = [vk::MemoryBarrier2::default()
        .src_stage_mask(vk::PipelineStageFlags2::ALL_TRANSFER)
        .src_access_mask(vk::AccessFlags2::TRANSFER_WRITE)
        .dst_stage_mask(stage)
        .dst_access_mask(access)];
    let dependency = vk::DependencyInfo::default().memory_barriers(&barriers);
    // SAFETY: the command buffer is being recorded; all queues take these stages.
    unsafe { device.cmd_pipeline_barrier2(commands, &dependency) };
}
