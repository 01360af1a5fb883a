//! The verbs of CUDA's driver, and of drivers that have its calls under other names.

use std::ffi::{CStr, c_int, c_void};
use std::ptr;

use libloading::Library;

use super::calls::{
    Calls, CaptureCalls, CaptureModeCalls, ContextCalls, ContextStateCalls, DeviceCalls, EVENT_WITHOUT_TIMING,
    HOST_ALLOCATION_PORTABLE, OldReleaseCalls, REGISTER_PORTABLE, ReleaseCalls, STREAM_NON_BLOCKING,
};
use crate::backend::drivers::driver::text;
use crate::backend::drivers::table::Spelling;
use crate::backend::drivers::verbs::{
    Address, CAPTURE_NONE, CaptureMode, Code, ContextHandle, DeviceHandle, EventHandle, HostFunction, Outcome, Place,
    StreamHandle, Verbs, given, given_pointer,
};

/// The required calls of a driver, by one of their spellings.
pub(in crate::backend::drivers) struct CudaVerbs {
    pub(in crate::backend::drivers) calls: Calls,
    contexts: Contexts,
    states: Option<ContextStateCalls>,
    captures: Option<CaptureCalls>,
    capture_modes: Option<CaptureModeCalls>,
}

/// What is current in a thread.
enum Contexts {
    /// A device's primary context, or none.
    Primary(ContextCalls, Release),
    /// Always a device. HIP's contexts are no more than that, its calls for them leave things behind in the thread, and one of them
    /// ([`hipCtxEnablePeerAccess`]) does nothing: `hip_context.cpp` and `hip_peer.cpp` of ROCm's clr, 5.7 to 7.
    ///
    /// [`hipCtxEnablePeerAccess`]: https://rocm.docs.amd.com/projects/HIP/en/latest/reference/deprecated_api_list.html
    Devices(DeviceCalls),
}

/// The release of a primary context.
enum Release {
    Now(ReleaseCalls),
    Old(OldReleaseCalls),
}

/// The handle that stands for a device that is always current. None is null.
fn numbered(device: DeviceHandle) -> ContextHandle {
    ptr::without_provenance_mut(device.unsigned_abs() as usize + 1)
}

impl CudaVerbs {
    /// Finds the calls of a driver.
    ///
    /// # Errors
    /// The name of a call that the library does not have.
    pub(in crate::backend::drivers) fn find(library: &Library, spelling: Spelling) -> Result<CudaVerbs, &'static str> {
        let contexts = match spelling {
            Spelling::Own => {
                let now = ReleaseCalls::find(library, spelling).map(Release::Now);
                let old = |missing| OldReleaseCalls::find(library, spelling).map(Release::Old).map_err(|_| missing);
                Contexts::Primary(ContextCalls::find(library, spelling)?, now.or_else(old)?)
            }
            Spelling::Hip => Contexts::Devices(DeviceCalls::find(library, spelling)?),
        };
        Ok(CudaVerbs {
            calls: Calls::find(library, spelling)?,
            contexts,
            states: ContextStateCalls::find(library, spelling).ok(),
            captures: CaptureCalls::find(library, spelling).ok(),
            capture_modes: CaptureModeCalls::find(library, spelling).ok(),
        })
    }

    pub(in crate::backend::drivers) fn version(&self) -> Outcome<c_int> {
        // SAFETY: the pointer is to a living integer.
        given(0, |version| unsafe { self.calls.driver_version(version) })
    }

    pub(in crate::backend::drivers) fn device_count(&self) -> Outcome<c_int> {
        // SAFETY: the pointer is to a living integer.
        given(0, |count| unsafe { self.calls.device_count(count) })
    }

    pub(in crate::backend::drivers) fn device_name(&self, device: DeviceHandle) -> Outcome<String> {
        let mut name = [0u8; 256];
        // SAFETY: the call writes at most the given number of bytes, the last of them a zero.
        unsafe { self.calls.device_name(name.as_mut_ptr().cast(), name.len() as c_int - 1, device) }?;
        Ok(CStr::from_bytes_until_nul(&name).unwrap_or_default().to_string_lossy().into_owned())
    }

    pub(in crate::backend::drivers) fn device_total(&self, device: DeviceHandle) -> Outcome<u64> {
        // SAFETY: the pointer is to a living number.
        given(0, |bytes| unsafe { self.calls.device_total(bytes, device) }).map(|bytes: usize| bytes as u64)
    }

    /// An attribute of a device; 0 if the driver does not know it.
    pub(in crate::backend::drivers) fn attribute(&self, device: DeviceHandle, attribute: c_int) -> c_int {
        // SAFETY: the pointer is to a living integer, the device comes from the driver.
        given(0, |value| unsafe { self.calls.device_attribute(value, attribute, device) }).unwrap_or(0)
    }
}

/// Each is a call of the driver: the caller's promise is the one that its documentation asks for, and pointers to write to are to
/// living values.
#[expect(clippy::undocumented_unsafe_blocks, reason = "the same for all: above")]
impl Verbs for CudaVerbs {
    fn library(&self) -> usize {
        self.calls.address()
    }

    fn error_name(&self, code: Code) -> Option<String> {
        text(|text| unsafe { self.calls.error_name(code.0, text) })
    }

    fn error_text(&self, code: Code) -> Option<String> {
        text(|text| unsafe { self.calls.error_text(code.0, text) })
    }

    fn device(&self, number: u32) -> Outcome<DeviceHandle> {
        let number = c_int::try_from(number).unwrap_or(c_int::MAX);
        given(0, |device| unsafe { self.calls.device(device, number) })
    }

    fn is_active(&self, device: DeviceHandle) -> bool {
        let Some(calls) = &self.states else { return false };
        let (mut flags, mut active) = (0, 0);
        let asked = unsafe { calls.state(device, &raw mut flags, &raw mut active) };
        asked.is_ok() && active != 0
    }

    fn can_access_peer(&self, to: DeviceHandle, from: DeviceHandle) -> Outcome<bool> {
        given(0, |can| unsafe { self.calls.can_access_peer(can, to, from) }).map(|can: c_int| can != 0)
    }

    unsafe fn retain(&self, device: DeviceHandle) -> Outcome<ContextHandle> {
        match &self.contexts {
            Contexts::Primary(calls, _) => given_pointer(|context| unsafe { calls.retain(context, device) }),
            Contexts::Devices(_) => Ok(numbered(device)),
        }
    }

    unsafe fn release(&self, device: DeviceHandle) -> Outcome {
        match &self.contexts {
            Contexts::Primary(_, Release::Now(calls)) => unsafe { calls.release(device) },
            Contexts::Primary(_, Release::Old(calls)) => unsafe { calls.release(device) },
            Contexts::Devices(_) => Ok(()),
        }
    }

    fn current(&self) -> Outcome<ContextHandle> {
        match &self.contexts {
            Contexts::Primary(calls, _) => given_pointer(|context| unsafe { calls.current(context) }),
            Contexts::Devices(calls) => given(0, |device| unsafe { calls.current(device) }).map(numbered),
        }
    }

    unsafe fn make_current(&self, context: ContextHandle) -> Outcome {
        match &self.contexts {
            Contexts::Primary(calls, _) => unsafe { calls.make_current(context) },
            Contexts::Devices(calls) => match context.addr().checked_sub(1) {
                Some(number) => unsafe { calls.make_current(number as DeviceHandle) },
                None => Ok(()),
            },
        }
    }

    unsafe fn enable_peer_access(&self, peer: Place) -> Outcome {
        match &self.contexts {
            Contexts::Primary(calls, _) => unsafe { calls.enable_peer_access(peer.context, 0) },
            Contexts::Devices(calls) => unsafe { calls.enable_peer_access(peer.device, 0) },
        }
    }

    fn memory_info(&self) -> Outcome<(u64, u64)> {
        let (mut free, mut total) = (0, 0);
        unsafe { self.calls.memory_info(&raw mut free, &raw mut total) }?;
        Ok((free as u64, total as u64))
    }

    unsafe fn allocate(&self, bytes: usize) -> Outcome<Address> {
        given(0, |address| unsafe { self.calls.allocate(address, bytes) })
    }

    unsafe fn free(&self, address: Address) -> Outcome {
        unsafe { self.calls.free(address) }
    }

    /// Without the write-combining flag, so that the host reads the memory at full speed.
    unsafe fn host_allocate(&self, bytes: usize) -> Outcome<*mut c_void> {
        given_pointer(|address| unsafe { self.calls.host_allocate(address, bytes, HOST_ALLOCATION_PORTABLE) })
    }

    unsafe fn host_free(&self, address: *mut c_void) -> Outcome {
        unsafe { self.calls.host_free(address) }
    }

    unsafe fn host_register(&self, address: *mut c_void, bytes: usize) -> Outcome {
        unsafe { self.calls.host_register(address, bytes, REGISTER_PORTABLE) }
    }

    unsafe fn host_unregister(&self, address: *mut c_void) -> Outcome {
        unsafe { self.calls.host_unregister(address) }
    }

    unsafe fn copy_to_device(&self, dst: Address, src: *const c_void, bytes: usize, stream: StreamHandle) -> Outcome {
        unsafe { self.calls.copy_to_device(dst, src, bytes, stream) }
    }

    unsafe fn copy_to_host(&self, dst: *mut c_void, src: Address, bytes: usize, stream: StreamHandle) -> Outcome {
        unsafe { self.calls.copy_to_host(dst, src, bytes, stream) }
    }

    unsafe fn copy_on_device(&self, dst: Address, src: Address, bytes: usize, stream: StreamHandle) -> Outcome {
        unsafe { self.calls.copy_on_device(dst, src, bytes, stream) }
    }

    unsafe fn copy_between(
        &self,
        (to, dst): (Place, Address),
        (from, src): (Place, Address),
        bytes: usize,
        stream: StreamHandle,
    ) -> Outcome {
        match &self.contexts {
            Contexts::Primary(calls, _) => unsafe { calls.copy(dst, to.context, src, from.context, bytes, stream) },
            Contexts::Devices(calls) => unsafe { calls.copy(dst, to.device, src, from.device, bytes, stream) },
        }
    }

    unsafe fn copy_to_device_now(&self, dst: Address, src: *const c_void, bytes: usize) -> Outcome {
        // From memory that is not pinned, the call returns once the bytes were read; streams do not wait for them.
        unsafe { self.calls.copy_to_device_now(dst, src, bytes) }?;
        unsafe { self.calls.stream_synchronize(ptr::null_mut()) }
    }

    unsafe fn copy_to_host_now(&self, dst: *mut c_void, src: Address, bytes: usize) -> Outcome {
        unsafe { self.calls.copy_to_host_now(dst, src, bytes) }
    }

    fn stream_priorities(&self) -> Outcome<(Option<c_int>, Option<c_int>)> {
        let (mut least, mut greatest) = (0, 0);
        unsafe { self.calls.stream_priorities(&raw mut least, &raw mut greatest) }?;
        // The least is the default one, 0, but for HIP, which has a lower one.
        Ok((Some(least.min(0)), Some(greatest)))
    }

    unsafe fn stream_create(&self, priority: Option<c_int>) -> Outcome<StreamHandle> {
        let priority = priority.unwrap_or(0);
        given_pointer(|stream| unsafe { self.calls.stream_create(stream, STREAM_NON_BLOCKING, priority) })
    }

    unsafe fn stream_destroy(&self, stream: StreamHandle) -> Outcome {
        unsafe { self.calls.stream_destroy(stream) }
    }

    unsafe fn stream_synchronize(&self, stream: StreamHandle) -> Outcome {
        unsafe { self.calls.stream_synchronize(stream) }
    }

    unsafe fn stream_wait(&self, stream: StreamHandle, event: EventHandle) -> Outcome {
        unsafe { self.calls.stream_wait(stream, event, 0) }
    }

    unsafe fn launch_host_function(&self, stream: StreamHandle, function: HostFunction, data: *mut c_void) -> Outcome {
        unsafe { self.calls.launch_host_function(stream, function, data) }
    }

    unsafe fn is_capturing(&self, stream: StreamHandle) -> Outcome<bool> {
        let Some(calls) = &self.captures else { return Ok(false) };
        given(CAPTURE_NONE, |status| unsafe { calls.is_capturing(stream, status) }).map(|status| status != CAPTURE_NONE)
    }

    fn exchange_capture_mode(&self, CaptureMode(mode): CaptureMode) -> Option<CaptureMode> {
        let calls = self.capture_modes.as_ref()?;
        given(mode, |mode| unsafe { calls.exchange(mode) }).ok().map(CaptureMode)
    }

    unsafe fn event_create(&self) -> Outcome<EventHandle> {
        given_pointer(|event| unsafe { self.calls.event_create(event, EVENT_WITHOUT_TIMING) })
    }

    unsafe fn event_destroy(&self, event: EventHandle) -> Outcome {
        unsafe { self.calls.event_destroy(event) }
    }

    unsafe fn event_query(&self, event: EventHandle) -> Outcome {
        unsafe { self.calls.event_query(event) }
    }

    unsafe fn event_record(&self, event: EventHandle, stream: StreamHandle) -> Outcome {
        unsafe { self.calls.event_record(event, stream) }
    }
}
