//! Copies by the driver's own calls, with nothing of the library around them: what the library is measured by.

#![expect(unsafe_code, reason = "the driver's interface is one of raw handles and addresses")]

use std::ffi::c_void;

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys;

/// A device's primary context, current on this thread, and a stream of it.
pub(crate) struct Card {
    device: sys::CUdevice,
    context: sys::CUcontext,
    stream: sys::CUstream,
}

/// Memory of the driver's, or ordinary host memory, freed with the value.
pub(crate) enum Memory {
    Device(u64, usize, sys::CUcontext),
    Pinned(*mut u8, usize),
    Pageable(Vec<u8>),
}

impl Card {
    /// Device number `index`; the driver has been initialised by whoever found the device.
    pub(crate) fn open(index: u32) -> Result<Card, DriverError> {
        result::init()?;
        let device = result::device::get(i32::try_from(index).unwrap_or(i32::MAX))?;
        // SAFETY: the device comes from the driver; the context is released by `drop`.
        let context = unsafe { result::primary_ctx::retain(device) }?;
        // SAFETY: retained above.
        unsafe { result::ctx::set_current(context) }?;
        let stream = result::stream::create(result::stream::StreamKind::NonBlocking)?;
        Ok(Card { device, context, stream })
    }

    /// Makes its context the one of this thread, on which one bench runs after the other.
    pub(crate) fn make_current(&self) {
        // SAFETY: retained for as long as `self` lives.
        let _ = unsafe { result::ctx::set_current(self.context) };
    }

    /// Memory of this device.
    pub(crate) fn memory(&self, bytes: usize) -> Result<Memory, DriverError> {
        self.make_current();
        // SAFETY: only copied to and from, by this file; freed by `drop`.
        unsafe { result::malloc_sync(bytes) }.map(|address| Memory::Device(address, bytes, self.context))
    }

    /// Host memory pinned by the driver.
    pub(crate) fn pinned(&self, bytes: usize) -> Result<Memory, DriverError> {
        self.make_current();
        // SAFETY: as above; written once, so that copies read what is there.
        let address = unsafe { result::malloc_host(bytes, sys::CU_MEMHOSTALLOC_PORTABLE) }?.cast::<u8>();
        // SAFETY: `bytes` fresh bytes.
        unsafe { address.write_bytes(1, bytes) };
        Ok(Memory::Pinned(address, bytes))
    }

    /// Queues `count` copies of `bytes` from `src` to `dst`, both of at least that size.
    ///
    /// # Safety
    /// Both ends live until [`wait`](Card::wait) has returned, and nobody else touches them before.
    pub(crate) unsafe fn copy(&self, src: &Memory, dst: &Memory, bytes: usize, count: u64) -> Result<(), DriverError> {
        assert!(bytes <= src.bytes() && bytes <= dst.bytes(), "a copy past the end");
        for _ in 0..count {
            match (src.ends(), dst.ends()) {
                ((Some(src), _), (None, Some(dst))) => {
                    // SAFETY: the caller's promise, and the sizes above; so for the two below.
                    unsafe { sys::cuMemcpyDtoHAsync_v2(dst, src.0, bytes, self.stream) }.result()?;
                }
                ((None, Some(src)), (Some(dst), _)) => {
                    // SAFETY: as above.
                    unsafe { sys::cuMemcpyHtoDAsync_v2(dst.0, src, bytes, self.stream) }.result()?;
                }
                ((Some(src), _), (Some(dst), _)) => {
                    // SAFETY: as above.
                    unsafe { result::memcpy_peer_async(dst.1, dst.0, src.1, src.0, bytes, self.stream) }?;
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Waits for all copies of this card's stream.
    pub(crate) fn wait(&self) -> Result<(), DriverError> {
        // SAFETY: the stream is this value's own.
        unsafe { result::stream::synchronize(self.stream) }
    }
}

impl Drop for Card {
    fn drop(&mut self) {
        self.make_current();
        // SAFETY: created and retained by `open`, let go once, after its copies were waited for.
        let _ = unsafe { result::stream::destroy(self.stream) };
        // SAFETY: as above.
        let _ = unsafe { result::primary_ctx::release(self.device) };
    }
}

impl Memory {
    /// Ordinary host memory, its pages there.
    pub(crate) fn pageable(bytes: usize) -> Memory {
        Memory::Pageable(vec![1; bytes])
    }

    fn bytes(&self) -> usize {
        match self {
            Memory::Device(_, bytes, _) | Memory::Pinned(_, bytes) => *bytes,
            Memory::Pageable(memory) => memory.len(),
        }
    }

    /// Its address and context on a device, or its address in the host's memory.
    fn ends(&self) -> (Option<(u64, sys::CUcontext)>, Option<*mut c_void>) {
        match self {
            Memory::Device(address, _, context) => (Some((*address, *context)), None),
            Memory::Pinned(address, _) => (None, Some(address.cast())),
            Memory::Pageable(memory) => (None, Some(memory.as_ptr().cast_mut().cast())),
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let freed = match self {
            // SAFETY: allocated by `Card::memory`, whose context the device's bench keeps; freed once.
            Memory::Device(address, _, context) => unsafe {
                result::ctx::set_current(*context).and_then(|()| result::free_sync(*address))
            },
            // SAFETY: allocated by `Card::pinned`, freed once.
            Memory::Pinned(address, _) => unsafe { result::free_host(address.cast()) },
            Memory::Pageable(_) => Ok(()),
        };
        if let Err(error) = freed {
            eprintln!("memory of the raw copies could not be freed: {error:?}");
        }
    }
}
