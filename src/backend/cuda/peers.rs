//! Peer access: direct copies from one device's memory to another's, enabled in the right direction and verified.

use std::sync::Arc;

use super::calls::Code;
use super::context::Context;
use super::device::CudaDevice;
use super::event::CudaFence;
use super::memory::DeviceMemory;
use super::stream::RawStream;
use crate::backend::{Fence, FenceState, MemoryKind};
use crate::error::Error;
use crate::limits::TRIAL;

/// The offsets and sizes of the trial copies, in bytes: small, odd, and over several pages.
const TRIALS: [(usize, usize); 4] = [(0, 1), (3, 255), (4096, 65_536), (1 << 20, (1 << 20) + 13)];

/// The size of the memory that the trials use, in bytes.
const ROOM: usize = (2 << 20) + 64;

/// Enables access of `to` to the memory of `from`, and verifies it.
///
/// # Errors
/// The reason why sender is none: the driver denies it, or the wrong bytes arrive.
pub(super) fn connect(to: &CudaDevice, from: &CudaDevice) -> Result<(), String> {
    let (sender, receiver) = (from.context(), to.context());
    let mut can = 0;
    // SAFETY: the pointer is to a living integer, the devices come from the driver.
    let asked =
        receiver.call(|calls| unsafe { calls.can_access_peer(&raw mut can, receiver.device(), sender.device()) });
    asked.map_err(|error| error.to_string())?;
    if can == 0 {
        return Err(format!("the driver says that {} cannot reach the memory of {}", receiver.id(), sender.id()));
    }
    // SAFETY: both contexts are retained.
    match receiver.raw(|calls| unsafe { calls.enable_peer_access(sender.handle(), 0) }) {
        Err(refusal) if !refusal.is(Code::PEER_ACCESS_ALREADY_ENABLED) => {
            return Err(receiver.error(refusal).to_string());
        }
        _ => {}
    }
    if let Some(pool) = from.pool() {
        pool.grant(receiver.id().index()).map_err(|error| error.to_string())?;
    }
    // Access to pool memory and to the driver's own allocations are separate, and both are used.
    [MemoryKind::Arena, MemoryKind::Whole].into_iter().try_for_each(|kind| verify(to, from, kind))
}

/// Copies patterns over poisoned memory of this kind and checks, on the receiving side, what arrived.
fn verify(to: &CudaDevice, from: &CudaDevice, kind: MemoryKind) -> Result<(), String> {
    let (sender, receiver) = (from.context(), to.context());
    let memory = |device: &CudaDevice| {
        let refused = |refusal| device.context().error(refusal).to_string();
        let (memory, ready) = device.memory_of(ROOM, kind).map_err(refused)?;
        let ready = ready.map_or(FenceState::Done, |ready| ready.wait(TRIAL));
        landed(&ready, sender).map(|()| memory)
    };
    let (source, target) = (memory(from)?, memory(to)?);
    let stream = RawStream::create(receiver, 0).map_err(|refusal| receiver.error(refusal).to_string())?;
    let outcome = trials(receiver, sender, &stream, &source, &target);
    let fence = CudaFence::new(receiver, Vec::new()).and_then(|fence| fence.record(&stream).map(|()| fence));
    let ended = fence.is_ok_and(|fence| matches!(fence.wait(TRIAL), FenceState::Done));
    if !ended {
        // It is unknown whether a copy still uses the memory.
        std::mem::forget((source, target));
    }
    outcome
}

fn trials(
    receiver: &Arc<Context>,
    sender: &Arc<Context>,
    stream: &RawStream,
    source: &DeviceMemory,
    target: &DeviceMemory,
) -> Result<(), String> {
    let text = |error: Error| error.to_string();
    let sent: Vec<u8> = (0..ROOM).map(|i| (i as u8).wrapping_mul(29) ^ (i >> 9) as u8).collect();
    let poison: Vec<u8> = sent.iter().map(|byte| !byte).collect();
    let (src, dst) = (source.device_address(), target.device_address());
    // The trial copies run on a stream that does not wait for the stream that these bytes are copied on.
    let put = |context: &Context, dst, bytes: &[u8]| {
        context.call(|calls| {
            // SAFETY: memory of ROOM bytes on either side; null is the stream of such calls.
            unsafe {
                calls.copy_to_device_now(dst, bytes.as_ptr().cast(), ROOM)?;
                calls.stream_synchronize(std::ptr::null_mut())
            }
        })
    };
    put(sender, src, &sent).map_err(text)?;
    for (at, bytes) in TRIALS {
        put(receiver, dst, &poison).map_err(text)?;
        let (from, to) = (src + at as u64, dst + at as u64);
        let done = CudaFence::new(receiver, Vec::new()).map_err(|refusal| text(receiver.error(refusal)))?;
        receiver
            .call(|calls| {
                // SAFETY: every trial stays inside ROOM bytes on either side; both contexts are retained.
                unsafe { calls.copy_from_peer(to, receiver.handle(), from, sender.handle(), bytes, stream.handle()) }
            })
            .map_err(text)?;
        done.record(stream).map_err(|refusal| text(receiver.error(refusal)))?;
        landed(&done.wait(TRIAL), sender)?;
        let mut arrived = vec![0; ROOM];
        // SAFETY: as above.
        let read = receiver.call(|calls| unsafe { calls.copy_to_host_now(arrived.as_mut_ptr().cast(), dst, ROOM) });
        read.map_err(text)?;
        let right = (0..ROOM).all(|i| arrived[i] == if (at..at + bytes).contains(&i) { sent[i] } else { poison[i] });
        if !right {
            return Err(format!("copies from {} deliver wrong bytes", sender.id()));
        }
    }
    Ok(())
}

fn landed(state: &FenceState, from: &Context) -> Result<(), String> {
    match state {
        FenceState::Done => Ok(()),
        FenceState::Failed(error) | FenceState::Lost(error) => Err(error.to_string()),
        FenceState::Pending => Err(format!("a copy from {} took over {TRIAL:?}", from.id())),
    }
}
