//! What a driver of this shape does, in the same words for all vendors: contexts, memory, copies, streams and events.
//!
//! A vendor fills in [`Verbs`]. All that is made of them (contexts that are lost after an error that sticks, events as fences,
//! streams in order, pinned memory, peers) is written once, and asks [`Rules`] where drivers differ.

use std::ffi::{c_int, c_void};
use std::fmt;
use std::ptr;

use crate::device::DeviceKind;

/// Declares a handle type of drivers.
macro_rules! handle {
    ($(#[$doc:meta])* $name:ident, $what:ident) => {
        #[doc(hidden)]
        pub(crate) enum $what {}
        $(#[$doc])*
        pub(crate) type $name = *mut $what;
    };
}

handle!(/// `CUcontext`, `hipCtx_t`, `aclrtContext`, `CNcontext`.
    ContextHandle, OpaqueContext);
handle!(/// `CUstream`, `hipStream_t`, `aclrtStream`, `CNqueue`.
    StreamHandle, OpaqueStream);
handle!(/// `CUevent`, `hipEvent_t`, `aclrtEvent`, `CNnotifier`.
    EventHandle, OpaqueEvent);

/// A device of the driver: `CUdevice`, `hipDevice_t`, `CNdev`, or its number.
pub(super) type DeviceHandle = c_int;

/// An address in a device's memory: `CUdeviceptr`, `hipDeviceptr_t`, `CNaddr`, or a pointer.
pub(super) type Address = u64;

/// A function that a stream calls on a thread of the driver.
pub(super) type HostFunction = unsafe extern "system" fn(*mut c_void);

/// A device and its context, as an end of a copy between devices.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) device: DeviceHandle,
    pub(super) context: ContextHandle,
}

/// A result that is not success, as the driver numbers it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Code(pub(super) c_int);

/// What a result means for what comes next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Meaning {
    /// The call cannot be what this driver takes.
    InvalidValue,
    OutOfMemory,
    /// The work that was asked for is not complete.
    NotReady,
    PeerAccessAlreadyEnabled,
    /// The memory is not registered, any more or at all.
    NotRegistered,
    NotSupported,
    /// A capture prevents the call, which may succeed once the capture has ended.
    OfCaptures,
    /// As [`OfCaptures`](Meaning::OfCaptures): this stream waits for another that is captured.
    CaptureImplicit,
    /// The error is sticky: every later call returns it, and by its documentation the process must end before the device can be
    /// used again.
    Sticks,
    /// As [`Sticks`](Meaning::Sticks), but some systems also refuse so to pin memory beyond a limit.
    Unknown,
    /// Only that this call was refused.
    Refused,
}

impl Meaning {
    pub(super) fn sticks(self) -> bool {
        matches!(self, Meaning::Sticks | Meaning::Unknown)
    }

    pub(super) fn is_of_captures(self) -> bool {
        matches!(self, Meaning::OfCaptures | Meaning::CaptureImplicit)
    }
}

/// A call that was refused.
#[derive(Clone, Copy, Debug)]
pub(super) struct Failure {
    /// The call, by its name in the driver's documentation.
    pub(super) call: &'static str,
    pub(super) code: Code,
    pub(super) meaning: Meaning,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} returned {}", self.call, self.code.0)
    }
}

/// The result of a call.
pub(super) type Outcome<T = ()> = Result<T, Failure>;

/// How devices of a driver copy from each other's memory, where it says that they can.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Peers {
    /// A stream of either device copies.
    Both,
    /// A stream of the device that the bytes go to copies.
    #[cfg_attr(not(feature = "ascend"), expect(dead_code, reason = "that backend is not built"))]
    Pull,
    /// None does, for this reason.
    #[cfg_attr(not(feature = "cambricon"), expect(dead_code, reason = "that backend is not built"))]
    Never(&'static str),
}

/// Where drivers differ, as far as data can say it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rules {
    /// The kind of the driver's devices.
    pub(super) kind: DeviceKind,
    /// Whether a stream can wait for an event of another device. Otherwise the host waits.
    pub(super) waits_across: bool,
    /// How devices copy from each other's memory.
    pub(super) peers: Peers,
    /// Whether memory that the library maps is registered, which is touched in parallel and on huge pages. Otherwise the driver
    /// allocates all pinned memory.
    pub(super) registers: bool,
    /// The handle of the per-thread default stream, if there is one.
    pub(super) per_thread: Option<usize>,
}

/// The verbs of a driver.
///
/// Calls on memory, streams and events need the context of their device to be current in the calling thread, as
/// [`Context::enter`](super::context::Context::enter) makes it.
///
/// # Safety of the calls
/// All handles are the driver's own and not yet destroyed, and ranges of memory stay until the work on them is complete.
#[allow(clippy::missing_safety_doc, reason = "the same for all: above")]
pub(super) trait Verbs: Send + Sync {
    /// An address that tells the libraries of drivers apart: that of one of its calls.
    fn library(&self) -> usize;
    /// The driver's name for a code.
    fn error_name(&self, code: Code) -> Option<String>;
    /// The driver's description of a code.
    fn error_text(&self, code: Code) -> Option<String>;

    /// The device of a number.
    fn device(&self, number: u32) -> Outcome<DeviceHandle>;
    /// Whether a context of the device is active in this process, opened for example by the caller.
    fn is_active(&self, device: DeviceHandle) -> bool;
    /// Whether `to` can reach the memory of `from`, according to the driver.
    fn can_access_peer(&self, to: DeviceHandle, from: DeviceHandle) -> Outcome<bool>;

    /// Retains the context that everything in the process shares.
    unsafe fn retain(&self, device: DeviceHandle) -> Outcome<ContextHandle>;
    unsafe fn release(&self, device: DeviceHandle) -> Outcome;
    /// The context that is current in the calling thread; null if none is.
    fn current(&self) -> Outcome<ContextHandle>;
    /// Makes a context current in the calling thread. Null: none, where the driver can.
    unsafe fn make_current(&self, context: ContextHandle) -> Outcome;
    /// Lets the current device reach the memory of `peer`.
    unsafe fn enable_peer_access(&self, peer: Place) -> Outcome;

    /// The free and total bytes of the current device.
    fn memory_info(&self) -> Outcome<(u64, u64)>;
    unsafe fn allocate(&self, bytes: usize) -> Outcome<Address>;
    unsafe fn free(&self, address: Address) -> Outcome;
    /// Allocates pinned host memory, pinned for all devices.
    unsafe fn host_allocate(&self, bytes: usize) -> Outcome<*mut c_void>;
    unsafe fn host_free(&self, address: *mut c_void) -> Outcome;
    /// Pins host memory for all devices.
    unsafe fn host_register(&self, address: *mut c_void, bytes: usize) -> Outcome;
    unsafe fn host_unregister(&self, address: *mut c_void) -> Outcome;

    unsafe fn copy_to_device(&self, dst: Address, src: *const c_void, bytes: usize, stream: StreamHandle) -> Outcome;
    unsafe fn copy_to_host(&self, dst: *mut c_void, src: Address, bytes: usize, stream: StreamHandle) -> Outcome;
    unsafe fn copy_on_device(&self, dst: Address, src: Address, bytes: usize, stream: StreamHandle) -> Outcome;
    unsafe fn copy_between(
        &self,
        dst: (Place, Address),
        src: (Place, Address),
        bytes: usize,
        stream: StreamHandle,
    ) -> Outcome;
    /// Copies while the calling thread waits: the bytes have arrived for streams, too.
    unsafe fn copy_to_device_now(&self, dst: Address, src: *const c_void, bytes: usize) -> Outcome;
    unsafe fn copy_to_host_now(&self, dst: *mut c_void, src: Address, bytes: usize) -> Outcome;

    /// The priorities of compute streams and of streams that copy for them, on the current device: the copies come first.
    fn stream_priorities(&self) -> Outcome<(c_int, c_int)>;
    /// Creates a stream whose work does not wait for a default stream, and does not go on after work that failed.
    unsafe fn stream_create(&self, priority: c_int) -> Outcome<StreamHandle>;
    unsafe fn stream_destroy(&self, stream: StreamHandle) -> Outcome;
    unsafe fn stream_synchronize(&self, stream: StreamHandle) -> Outcome;
    unsafe fn stream_wait(&self, stream: StreamHandle, event: EventHandle) -> Outcome;
    unsafe fn launch_host_function(&self, stream: StreamHandle, function: HostFunction, data: *mut c_void) -> Outcome;

    /// Creates an event without timing, which streams can wait for and which is recorded again and again.
    unsafe fn event_create(&self) -> Outcome<EventHandle>;
    unsafe fn event_destroy(&self, event: EventHandle) -> Outcome;
    /// Success if the event's work is complete, [`Meaning::NotReady`] if it is not.
    unsafe fn event_query(&self, event: EventHandle) -> Outcome;
    unsafe fn event_record(&self, event: EventHandle, stream: StreamHandle) -> Outcome;
}

/// Runs a call that writes a value through a pointer.
pub(super) fn given<T>(first: T, call: impl FnOnce(*mut T) -> Outcome) -> Outcome<T> {
    let mut value = first;
    call(&raw mut value)?;
    Ok(value)
}

/// As [`given`], for a pointer that is null at first.
pub(super) fn given_pointer<T>(call: impl FnOnce(*mut *mut T) -> Outcome) -> Outcome<*mut T> {
    given(ptr::null_mut(), call)
}
