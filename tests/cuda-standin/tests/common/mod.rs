//! A thin hand on cudarc's raw calls, for programs that keep the rules and for ones that do not.
#![allow(dead_code, reason = "each test file uses its part")]

pub(crate) mod kernel;
pub(crate) mod loaded;

use std::ffi::c_void;
use std::time::{Duration, Instant};

use cuda_standin::{Driver, Report};
use cudarc::driver::result;
use cudarc::driver::result::stream::StreamKind;
use cudarc::driver::sys::{self, CUcontext, CUdevice, CUdeviceptr, CUevent, CUresult, CUstream};

pub(crate) const MIB: u64 = 1 << 20;

/// Bytes that differ from place to place and from seed to seed.
pub(crate) fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|i| (i as u8).wrapping_mul(31).wrapping_add((i >> 8) as u8).wrapping_add(seed)).collect()
}

/// The report once no work is pending. After 20 s it is the one with what hangs.
pub(crate) fn settled(standin: &Driver) -> Report {
    let until = Instant::now() + Duration::from_secs(20);
    loop {
        let report = standin.report();
        if report.pending == 0 || Instant::now() > until {
            return report;
        }
    }
}

/// One device with its primary context.
pub(crate) struct Cuda {
    pub(crate) device: CUdevice,
    pub(crate) context: CUcontext,
}

impl Cuda {
    /// Retains the context and makes it current.
    pub(crate) fn open(ordinal: i32) -> Cuda {
        result::init().unwrap();
        let device = result::device::get(ordinal).unwrap();
        // SAFETY: the device was just got.
        let context = unsafe { result::primary_ctx::retain(device).unwrap() };
        let cuda = Cuda { device, context };
        cuda.bind();
        cuda
    }

    pub(crate) fn bind(&self) {
        // SAFETY: the context is retained.
        unsafe { result::ctx::set_current(self.context).unwrap() };
    }

    pub(crate) fn close(self) {
        // SAFETY: retained by `open`.
        unsafe { result::primary_ctx::release(self.device).unwrap() };
    }

    pub(crate) fn stream(&self) -> CUstream {
        result::stream::create(StreamKind::NonBlocking).unwrap()
    }

    pub(crate) fn blocking_stream(&self) -> CUstream {
        result::stream::create(StreamKind::Default).unwrap()
    }

    pub(crate) fn destroy(&self, stream: CUstream) {
        // SAFETY: handles are checked by the stand-in.
        unsafe { result::stream::destroy(stream).unwrap() };
    }

    pub(crate) fn synchronize(&self, stream: CUstream) {
        // SAFETY: handles are checked by the stand-in.
        unsafe { result::stream::synchronize(stream).unwrap() };
    }

    pub(crate) fn alloc(&self, len: usize) -> CUdeviceptr {
        // SAFETY: the context is current.
        unsafe { result::malloc_sync(len).unwrap() }
    }

    pub(crate) fn free(&self, address: CUdeviceptr) {
        // SAFETY: addresses are checked by the stand-in.
        unsafe { result::free_sync(address).unwrap() };
    }

    /// Pinned memory with these bytes in it.
    pub(crate) fn pin(&self, bytes: &[u8]) -> *mut c_void {
        // SAFETY: the memory is as long as the bytes.
        unsafe {
            let pinned = result::malloc_host(bytes.len(), sys::CU_MEMHOSTALLOC_PORTABLE).unwrap();
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), pinned.cast::<u8>(), bytes.len());
            pinned
        }
    }

    pub(crate) fn unpin(&self, pinned: *mut c_void) {
        // SAFETY: addresses are checked by the stand-in.
        unsafe { result::free_host(pinned).unwrap() };
    }

    /// A copy of pinned memory.
    pub(crate) fn host(&self, pinned: *mut c_void, len: usize) -> Vec<u8> {
        // SAFETY: the callers give memory of at least this length that nothing writes to any more.
        unsafe { std::slice::from_raw_parts(pinned.cast::<u8>(), len) }.to_vec()
    }

    pub(crate) fn upload(&self, dst: CUdeviceptr, src: *mut c_void, len: usize, stream: CUstream) {
        assert_eq!(self.try_upload(dst, src, len, stream), CUresult::CUDA_SUCCESS);
    }

    pub(crate) fn try_upload(&self, dst: CUdeviceptr, src: *mut c_void, len: usize, stream: CUstream) -> CUresult {
        // SAFETY: ranges are checked by the stand-in.
        unsafe { sys::cuMemcpyHtoDAsync_v2(dst, src, len, stream) }
    }

    pub(crate) fn download(&self, dst: *mut c_void, src: CUdeviceptr, len: usize, stream: CUstream) {
        // SAFETY: ranges are checked by the stand-in.
        unsafe { sys::cuMemcpyDtoHAsync_v2(dst, src, len, stream) }.result().unwrap();
    }

    pub(crate) fn copy(&self, dst: CUdeviceptr, src: CUdeviceptr, len: usize, stream: CUstream) {
        // SAFETY: ranges are checked by the stand-in.
        unsafe { result::memcpy_dtod_async(dst, src, len, stream).unwrap() };
    }

    pub(crate) fn fill(&self, dst: CUdeviceptr, byte: u8, len: usize, stream: CUstream) {
        // SAFETY: ranges are checked by the stand-in.
        unsafe { result::memset_d8_async(dst, byte, len, stream).unwrap() };
    }

    /// A new event, recorded.
    pub(crate) fn record(&self, stream: CUstream) -> CUevent {
        let event = result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING).unwrap();
        // SAFETY: handles are checked by the stand-in.
        unsafe { result::event::record(event, stream).unwrap() };
        event
    }

    pub(crate) fn wait(&self, stream: CUstream, event: CUevent) {
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: handles are checked by the stand-in.
        unsafe { result::stream::wait_event(stream, event, flags).unwrap() };
    }

    pub(crate) fn forget(&self, event: CUevent) {
        // SAFETY: handles are checked by the stand-in.
        unsafe { result::event::destroy(event).unwrap() };
    }

    pub(crate) fn enable_peer(&self, peer: &Cuda) {
        // SAFETY: the peer's context is retained.
        unsafe { sys::cuCtxEnablePeerAccess(peer.context, 0) }.result().unwrap();
    }
}
