//! Copies straight from one device's memory to another's: enabled in the right direction, and tried out.

use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::{self, CUresult};

use super::context::{Context, Refusal};
use super::device::CudaDevice;
use super::event::CudaFence;
use super::memory::{DeviceMemory, create_stream, destroy_stream};
use crate::backend::{Fence, FenceState};

/// How long the trial may take before the way counts as broken.
const DEADLINE: Duration = Duration::from_secs(5);

/// The sizes and offsets that are tried, in bytes: small, odd, and over several pages.
const TRIALS: [(usize, usize); 4] = [(0, 1), (3, 255), (4096, 65_536), (1 << 20, (1 << 20) + 13)];

/// The bytes of the memory that the trials use.
const ROOM: usize = (2 << 20) + 64;

/// Lets `to` reach the memory of `from`.
///
/// # Errors
/// Why not: the driver says so, or what arrives is not what was sent.
pub(super) fn connect(to: &CudaDevice, from: &CudaDevice) -> Result<(), String> {
    let (there, here) = (from.context(), to.context());
    let mut can = 0;
    let ask = || {
        // SAFETY: the pointer is to a living integer, the devices come from the driver.
        unsafe { sys::cuDeviceCanAccessPeer(&raw mut can, here.device(), there.device()) }.result()
    };
    let asked = here.raw("cuDeviceCanAccessPeer", ask);
    asked.map_err(|refusal| here.error(refusal).to_string())?;
    if can == 0 {
        return Err(format!("the driver says that {} cannot reach the memory of {}", here.id(), there.id()));
    }
    // SAFETY: both contexts are retained.
    match here.raw("cuCtxEnablePeerAccess", || unsafe { sys::cuCtxEnablePeerAccess(there.handle(), 0) }.result()) {
        Ok(()) | Err(Refusal::Code(_, DriverError(CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED))) => {}
        Err(refusal) => return Err(here.error(refusal).to_string()),
    }
    if let Some(pool) = from.pool() {
        pool.grant(here.id().index()).map_err(|error| error.to_string())?;
    }
    verify(here, there)
}

/// Sends patterns over poisoned memory and looks at what arrived, from the receiving side.
fn verify(here: &Arc<Context>, there: &Arc<Context>) -> Result<(), String> {
    let memory = |context: &Arc<Context>| {
        DeviceMemory::plain(context, ROOM).map_err(|refusal| context.error(refusal).to_string())
    };
    let (source, target) = (memory(there)?, memory(here)?);
    let stream = create_stream(here, 0).map_err(|error| error.to_string())?;
    let outcome = trials(here, there, stream, &source, &target);
    let ended = CudaFence::record(here, stream).is_ok_and(|fence| matches!(fence.wait(DEADLINE), FenceState::Done));
    destroy_stream(here, stream);
    if !ended {
        // Nobody knows whether a copy still uses the memory.
        std::mem::forget((source, target));
    }
    outcome
}

fn trials(
    here: &Arc<Context>,
    there: &Arc<Context>,
    stream: sys::CUstream,
    source: &DeviceMemory,
    target: &DeviceMemory,
) -> Result<(), String> {
    let text = |error: crate::error::Error| error.to_string();
    let sent: Vec<u8> = (0..ROOM).map(|i| (i as u8).wrapping_mul(29) ^ (i >> 9) as u8).collect();
    let poison: Vec<u8> = sent.iter().map(|byte| !byte).collect();
    let (src, dst) = (source.device_address(), target.device_address());
    // SAFETY: memory of ROOM bytes on either side; these calls return when the bytes are there.
    there.call("cuMemcpyHtoD", || unsafe { result::memcpy_htod_sync(src, &sent) }).map_err(text)?;
    for (at, bytes) in TRIALS {
        // SAFETY: as above.
        here.call("cuMemcpyHtoD", || unsafe { result::memcpy_htod_sync(dst, &poison) }).map_err(text)?;
        let (from, to) = (src + at as u64, dst + at as u64);
        // SAFETY: every trial stays inside ROOM bytes on either side.
        let copy = || unsafe { result::memcpy_peer_async(here.handle(), to, there.handle(), from, bytes, stream) };
        here.call("cuMemcpyPeerAsync", copy).map_err(text)?;
        let done = CudaFence::record(here, stream).map_err(|refusal| here.error(refusal).to_string())?;
        match done.wait(DEADLINE) {
            FenceState::Done => {}
            FenceState::Failed(error) => return Err(error.to_string()),
            FenceState::Pending => return Err(format!("a copy from {} took over {DEADLINE:?}", there.id())),
        }
        let mut arrived = vec![0; ROOM];
        // SAFETY: as above.
        here.call("cuMemcpyDtoH", || unsafe { result::memcpy_dtoh_sync(&mut arrived, dst) }).map_err(text)?;
        let right = (0..ROOM).all(|i| arrived[i] == if (at..at + bytes).contains(&i) { sent[i] } else { poison[i] });
        if !right {
            return Err(format!("copies from {} deliver wrong bytes", there.id()));
        }
    }
    Ok(())
}
