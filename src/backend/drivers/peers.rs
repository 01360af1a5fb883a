//! Peer access: direct copies from one device's memory to another's, enabled in the right direction and verified.

use std::sync::Arc;

use super::context::Context;
use super::device::DriverDevice;
use super::event::DriverFence;
use super::memory::DeviceMemory;
use super::stream::RawStream;
use super::verbs::Meaning;
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
pub(super) fn connect(to: &DriverDevice, from: &DriverDevice) -> Result<(), String> {
    let (sender, receiver) = (from.context(), to.context());
    let asked = receiver.call(|verbs| verbs.can_access_peer(receiver.place().device, sender.place().device));
    if !asked.map_err(|error| error.to_string())? {
        return Err(format!("the driver says that {} cannot reach the memory of {}", receiver.id(), sender.id()));
    }
    // SAFETY: both contexts are retained.
    match receiver.raw(|verbs| unsafe { verbs.enable_peer_access(sender.place()) }) {
        Err(refusal) if !refusal.is(Meaning::PeerAccessAlreadyEnabled) => {
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
fn verify(to: &DriverDevice, from: &DriverDevice, kind: MemoryKind) -> Result<(), String> {
    let (sender, receiver) = (from.context(), to.context());
    let memory = |device: &DriverDevice| {
        let refused = |refusal| device.context().error(refusal).to_string();
        let (memory, ready) = device.memory_of(ROOM, kind).map_err(refused)?;
        let ready = ready.map_or(FenceState::Done, |ready| ready.wait(TRIAL));
        landed(&ready, sender).map(|()| memory)
    };
    let (source, target) = (memory(from)?, memory(to)?);
    let stream = RawStream::create(receiver, None).map_err(|refusal| receiver.error(refusal).to_string())?;
    let outcome = trials(receiver, sender, &stream, &source, &target);
    let fence = DriverFence::new(receiver, Vec::new()).and_then(|fence| fence.record(&stream).map(|()| fence));
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
    let put = |context: &Context, dst, bytes: &[u8]| {
        // SAFETY: memory of ROOM bytes on either side.
        context.call(|verbs| unsafe { verbs.copy_to_device_now(dst, bytes.as_ptr().cast(), ROOM) })
    };
    put(sender, src, &sent).map_err(text)?;
    for (at, bytes) in TRIALS {
        put(receiver, dst, &poison).map_err(text)?;
        let (from, to) = (src + at as u64, dst + at as u64);
        let done = DriverFence::new(receiver, Vec::new()).map_err(|refusal| text(receiver.error(refusal)))?;
        receiver
            .call(|verbs| {
                let (to, from) = ((receiver.place(), to), (sender.place(), from));
                // SAFETY: every trial stays inside ROOM bytes on either side; both contexts are retained.
                unsafe { verbs.copy_between(to, from, bytes, stream.handle()) }
            })
            .map_err(text)?;
        done.record(stream).map_err(|refusal| text(receiver.error(refusal)))?;
        landed(&done.wait(TRIAL), sender)?;
        let mut arrived = vec![0; ROOM];
        // SAFETY: as above.
        let read = receiver.call(|verbs| unsafe { verbs.copy_to_host_now(arrived.as_mut_ptr().cast(), dst, ROOM) });
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
