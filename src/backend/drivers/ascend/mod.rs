//! Ascend's driver: ACL, the runtime of CANN.

mod calls;

use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::Path;
use std::ptr;

use libloading::Library;

use self::calls::{
    BusCalls, Calls, ContextStateCalls, CopyKind, DEVICE_MEMORY, DeviceInfoCalls, EVENT_FOR_STREAMS, EVENT_NOT_READY,
    HUGE_FIRST, HUGE_FIRST_FOR_PEERS, HostFunctionCalls, NAMES, NO_CONTEXT, NO_DEVICE, NOT_SUPPORTED, PriorityCalls,
    REPEATED_INIT, RecentMessage, STOP_ON_FAILURE, STUB, SocName, TOTAL_MEMORY,
};
use super::driver::{Driver, lacks, named, open_any, pci_bus_id};
use super::table::Spelling;
use super::verbs::{
    Address, Code, ContextHandle, DeviceHandle, EventHandle, Failure, HostFunction, Meaning, Outcome, Peers, Place,
    Rules, StreamHandle, Verbs, given, given_pointer,
};
use super::{Cards, Vendor};
use crate::device::{DeviceId, DeviceInfo, DeviceKind, GpuDetails};

/// The environment variable that names the driver's library.
const LIBRARY_VARIABLE: &str = "TENSOR_OFFLOAD_LIBASCENDCL";

/// The names of the library: as CANN's `set_env.sh` has it found, and where it is installed.
const LIBRARIES: [&str; 3] = [
    "libascendcl.so",
    "/usr/local/Ascend/ascend-toolkit/latest/lib64/libascendcl.so",
    "/usr/local/Ascend/latest/lib64/libascendcl.so",
];

/// The backend of Ascend devices through CANN's runtime, ACL, and of `cpu` with memory that they copy from at full speed.
///
/// The devices are `npu:N`, as the runtime numbers them, so `ASCEND_RT_VISIBLE_DEVICES` applies. CANN 8.0 or later is needed. Its
/// library is the one in the search path, or under `/usr/local/Ascend`, or the file that [`library`](Ascend::library) or the
/// environment variable `TENSOR_OFFLOAD_LIBASCENDCL` names. Without a usable one, [`discover`](crate::backend::Backend::discover)
/// returns the reason; nothing panics.
///
/// - A device's context is the default one of the process (`aclrtSetDevice`). It stays to the process's end, and stays current in
///   threads that had none, since ACL cannot take it away from them.
/// - Streams stop at the first failure (`ACL_STOP_ON_FAILURE`), because otherwise an event behind a failed copy reads as complete.
///   ACL applies that to all streams of the context, a framework's included.
/// - Patches and the values of blocks are computed on the host.
///
/// ```
/// use tensor_offload::backend::{Ascend, Backend, Found};
/// for found in Ascend::new().discover() {
///     match found {
///         Found::Here(device) => println!("{}: {}, {} bytes", device.id, device.name, device.total),
///         Found::Absent { kind, why } => println!("no {kind} device: {why}"),
///         _ => {}
///     }
/// }
/// ```
pub struct Ascend {
    cards: Cards<Acl>,
}

struct Acl;

backend!(Ascend);

impl Ascend {
    /// The Ascend devices of this system.
    pub fn new() -> Ascend {
        Ascend { cards: Cards::new(Acl) }
    }
}

impl Vendor for Acl {
    const KIND: DeviceKind = DeviceKind::Npu;

    fn load(&self, library: Option<&Path>) -> Result<(Driver, Vec<DeviceInfo>), String> {
        let library = open_any(named(library, LIBRARY_VARIABLE).as_deref(), &LIBRARIES, "library of Ascend's ACL")?;
        let mut verbs = AclVerbs::find(&library).map_err(lacks)?;
        let devices = verbs.start().and_then(|count| {
            verbs.policy = if count > 1 { HUGE_FIRST_FOR_PEERS } else { HUGE_FIRST };
            (0..count).map(|number| verbs.device_info(&library, number)).collect::<Outcome<Vec<_>>>()
        });
        let driver = Driver::new(
            verbs,
            Rules { kind: Acl::KIND, waits_across: true, peers: Peers::Pull, registers: false, per_thread: None },
        );
        match devices {
            Ok(devices) if devices.is_empty() => Err(no_device()),
            Ok(devices) => Ok((driver, devices)),
            Err(failure) if failure.code == Code(NO_DEVICE) => Err(no_device()),
            Err(failure) if failure.code == Code(STUB) => {
                Err("the library is the stub that programs are linked with, without a driver".to_owned())
            }
            Err(failure) => Err(driver.describe(failure)),
        }
    }
}

/// What is said where there is no device.
fn no_device() -> String {
    match std::env::var("ASCEND_RT_VISIBLE_DEVICES") {
        Ok(visible) => format!("no Ascend device is visible; ASCEND_RT_VISIBLE_DEVICES is `{visible}`"),
        Err(_) => "the driver sees no Ascend device".to_owned(),
    }
}

/// The calls of ACL.
struct AclVerbs {
    calls: Calls,
    infos: Option<DeviceInfoCalls>,
    states: Option<ContextStateCalls>,
    priorities: Option<PriorityCalls>,
    host_functions: Option<HostFunctionCalls>,
    soc_name: Option<SocName>,
    message: Option<RecentMessage>,
    /// Which memory is allocated.
    policy: c_int,
}

impl AclVerbs {
    fn find(library: &Library) -> Result<AclVerbs, &'static str> {
        const SPELLING: Spelling = Spelling::Own;
        // SAFETY: the documented types of these calls. The library is never closed.
        let (soc_name, message) = unsafe {
            let soc_name = library.get::<SocName>(b"aclrtGetSocName").ok().map(|call| *call);
            (soc_name, library.get::<RecentMessage>(b"aclGetRecentErrMsg").ok().map(|call| *call))
        };
        Ok(AclVerbs {
            calls: Calls::find(library, SPELLING)?,
            infos: DeviceInfoCalls::find(library, SPELLING).ok(),
            states: ContextStateCalls::find(library, SPELLING).ok(),
            priorities: PriorityCalls::find(library, SPELLING).ok(),
            host_functions: HostFunctionCalls::find(library, SPELLING).ok(),
            soc_name,
            message,
            policy: HUGE_FIRST,
        })
    }

    /// Initialises ACL. Returns the number of devices. It is never finalised, since others in the process may use it.
    fn start(&self) -> Outcome<u32> {
        // SAFETY: null is the documented way to have no configuration.
        match unsafe { self.calls.init(ptr::null()) } {
            Err(failure) if failure.code != Code(REPEATED_INIT) => return Err(failure),
            _ => {}
        }
        // SAFETY: the pointer is to a living number.
        given(0, |count| unsafe { self.calls.device_count(count) })
    }

    fn device_info(&self, library: &Library, number: u32) -> Outcome<DeviceInfo> {
        let id = DeviceId::of(Acl::KIND, number);
        // SAFETY: takes nothing.
        let name = self.soc_name.and_then(|call| text(unsafe { call() })).unwrap_or_else(|| "Ascend".to_owned());
        let info = DeviceInfo::new(id, self.total(number)?).name(name).free(None);
        let bus = BusCalls::find(library, Spelling::Own).ok();
        let address = bus.and_then(|calls| {
            // SAFETY: the call writes at most the given number of bytes.
            pci_bus_id(|text, room| unsafe { calls.pci_bus_id(number as i32, text, room) })
        });
        Ok(match address {
            Some(address) => info.gpu(GpuDetails::new((0, 0), address)),
            None => info,
        })
    }

    /// The bytes of a device's memory. An older CANN tells only of a device that is set: then a thread of its own sets it for a
    /// moment.
    fn total(&self, number: u32) -> Outcome<u64> {
        if let Some(calls) = &self.infos {
            // SAFETY: the pointer is to a living number.
            let total = given(0, |value| unsafe { calls.info(number, TOTAL_MEMORY, value) });
            if let Ok(total @ 1..) = total {
                return Ok(total.unsigned_abs());
            }
        }
        let ask = || {
            let device = number as i32;
            // SAFETY: the number is one of a device; each set is paired with a reset.
            unsafe { self.calls.set_device(device) }?;
            let asked = self.memory_info();
            // SAFETY: as above.
            unsafe { self.calls.reset_device(device) }?;
            asked.map(|(_, total)| total)
        };
        std::thread::scope(|scope| scope.spawn(ask).join()).unwrap_or_else(|_| {
            Err(Failure { call: "aclrtGetMemInfo", code: Code(NOT_SUPPORTED), meaning: Meaning::NotSupported })
        })
    }

    unsafe fn copy(
        &self,
        dst: *mut c_void,
        src: *const c_void,
        bytes: usize,
        kind: CopyKind,
        stream: StreamHandle,
    ) -> Outcome {
        // SAFETY: the caller's promise. The room at the destination is what is copied.
        unsafe { self.calls.copy(dst, bytes, src, bytes, kind as c_int, stream) }
    }
}

/// A text of the library's, if it is one.
fn text(at: *const c_char) -> Option<String> {
    // SAFETY: the library gives null or a zero-terminated text.
    (!at.is_null())
        .then(|| unsafe { CStr::from_ptr(at) }.to_string_lossy().into_owned())
        .filter(|text| !text.is_empty())
}

/// An address as ACL has it.
fn pointer(address: Address) -> *mut c_void {
    ptr::with_exposed_provenance_mut(address as usize)
}

/// Each is a call of the driver: the caller's promise is the one that its documentation asks for, and pointers to write to are to
/// living values.
#[expect(clippy::undocumented_unsafe_blocks, reason = "the same for all: above")]
impl Verbs for AclVerbs {
    fn library(&self) -> usize {
        self.calls.address()
    }

    fn error_name(&self, code: Code) -> Option<String> {
        NAMES.iter().find(|(known, _)| *known == code.0).map(|(_, name)| (*name).to_owned())
    }

    /// What ACL says of the failure of this thread that was the last, since it has no words for a code.
    fn error_text(&self, _code: Code) -> Option<String> {
        self.message.and_then(|call| text(unsafe { call() }))
    }

    fn device(&self, number: u32) -> Outcome<DeviceHandle> {
        Ok(DeviceHandle::try_from(number).unwrap_or(DeviceHandle::MAX))
    }

    fn is_active(&self, device: DeviceHandle) -> bool {
        let Some(calls) = &self.states else { return false };
        let (mut flags, mut active) = (0, 0);
        let asked = unsafe { calls.state(device, &raw mut flags, &raw mut active) };
        asked.is_ok() && active != 0
    }

    fn can_access_peer(&self, to: DeviceHandle, from: DeviceHandle) -> Outcome<bool> {
        given(0, |can| unsafe { self.calls.can_access_peer(can, to, from) }).map(|can: i32| can != 0)
    }

    /// The default context of the device, which this counts. The thread's context is as before, if it had one.
    unsafe fn retain(&self, device: DeviceHandle) -> Outcome<ContextHandle> {
        let before = self.current()?;
        unsafe { self.calls.set_device(device) }?;
        let context = self.current()?;
        if !before.is_null() {
            unsafe { self.make_current(before) }?;
        }
        Ok(context)
    }

    /// Nothing: the last release would free a context that is still current in threads that had none before.
    unsafe fn release(&self, _device: DeviceHandle) -> Outcome {
        Ok(())
    }

    fn current(&self) -> Outcome<ContextHandle> {
        match given_pointer(|context| unsafe { self.calls.current(context) }) {
            Err(failure) if failure.code == Code(NO_CONTEXT) => Ok(ptr::null_mut()),
            outcome => outcome,
        }
    }

    /// ACL refuses null: a thread that had no context keeps the one that it has.
    unsafe fn make_current(&self, context: ContextHandle) -> Outcome {
        if context.is_null() {
            return Ok(());
        }
        unsafe { self.calls.make_current(context) }
    }

    unsafe fn enable_peer_access(&self, peer: Place) -> Outcome {
        unsafe { self.calls.enable_peer_access(peer.device, 0) }
    }

    fn memory_info(&self) -> Outcome<(u64, u64)> {
        let (mut free, mut total) = (0, 0);
        unsafe { self.calls.memory_info(DEVICE_MEMORY, &raw mut free, &raw mut total) }?;
        Ok((free as u64, total as u64))
    }

    unsafe fn allocate(&self, bytes: usize) -> Outcome<Address> {
        let memory = given_pointer(|address| unsafe { self.calls.allocate(address, bytes, self.policy) })?;
        Ok(memory.expose_provenance() as Address)
    }

    unsafe fn free(&self, address: Address) -> Outcome {
        unsafe { self.calls.free(pointer(address)) }
    }

    unsafe fn host_allocate(&self, bytes: usize) -> Outcome<*mut c_void> {
        given_pointer(|address| unsafe { self.calls.host_allocate(address, bytes) })
    }

    unsafe fn host_free(&self, address: *mut c_void) -> Outcome {
        unsafe { self.calls.host_free(address) }
    }

    /// Not done ([`Rules::registers`]): registered memory gave 6.5 GB/s where allocated memory gave 25.6, by one public measurement.
    unsafe fn host_register(&self, _address: *mut c_void, _bytes: usize) -> Outcome {
        Err(Failure { call: "aclrtHostRegister", code: Code(NOT_SUPPORTED), meaning: Meaning::NotSupported })
    }

    unsafe fn host_unregister(&self, _address: *mut c_void) -> Outcome {
        Err(Failure { call: "aclrtHostUnregister", code: Code(NOT_SUPPORTED), meaning: Meaning::NotRegistered })
    }

    unsafe fn copy_to_device(&self, dst: Address, src: *const c_void, bytes: usize, stream: StreamHandle) -> Outcome {
        unsafe { self.copy(pointer(dst), src, bytes, CopyKind::ToDevice, stream) }
    }

    unsafe fn copy_to_host(&self, dst: *mut c_void, src: Address, bytes: usize, stream: StreamHandle) -> Outcome {
        unsafe { self.copy(dst, pointer(src), bytes, CopyKind::ToHost, stream) }
    }

    unsafe fn copy_on_device(&self, dst: Address, src: Address, bytes: usize, stream: StreamHandle) -> Outcome {
        unsafe { self.copy(pointer(dst), pointer(src), bytes, CopyKind::OnDevices, stream) }
    }

    unsafe fn copy_between(
        &self,
        (_, dst): (Place, Address),
        (_, src): (Place, Address),
        bytes: usize,
        stream: StreamHandle,
    ) -> Outcome {
        unsafe { self.copy(pointer(dst), pointer(src), bytes, CopyKind::OnDevices, stream) }
    }

    unsafe fn copy_to_device_now(&self, dst: Address, src: *const c_void, bytes: usize) -> Outcome {
        unsafe { self.calls.copy_now(pointer(dst), bytes, src, bytes, CopyKind::ToDevice as c_int) }
    }

    unsafe fn copy_to_host_now(&self, dst: *mut c_void, src: Address, bytes: usize) -> Outcome {
        unsafe { self.calls.copy_now(dst, bytes, pointer(src), bytes, CopyKind::ToHost as c_int) }
    }

    fn stream_priorities(&self) -> Outcome<(c_int, c_int)> {
        let Some(calls) = &self.priorities else { return Ok((0, 0)) };
        let (mut least, mut greatest) = (0, 0);
        unsafe { calls.range(&raw mut least, &raw mut greatest) }?;
        Ok((least, greatest))
    }

    unsafe fn stream_create(&self, priority: c_int) -> Outcome<StreamHandle> {
        let priority = priority.max(0).unsigned_abs();
        let stream = given_pointer(|stream| unsafe { self.calls.stream_create(stream, priority, 0) })?;
        let stops = unsafe { self.calls.stream_stops(stream, STOP_ON_FAILURE) };
        if stops.is_err() {
            let _ = unsafe { self.calls.stream_destroy(stream) };
        }
        stops.map(|()| stream)
    }

    unsafe fn stream_destroy(&self, stream: StreamHandle) -> Outcome {
        unsafe { self.calls.stream_destroy(stream) }
    }

    unsafe fn stream_synchronize(&self, stream: StreamHandle) -> Outcome {
        unsafe { self.calls.stream_synchronize(stream) }
    }

    unsafe fn stream_wait(&self, stream: StreamHandle, event: EventHandle) -> Outcome {
        unsafe { self.calls.stream_wait(stream, event) }
    }

    unsafe fn launch_host_function(&self, stream: StreamHandle, function: HostFunction, data: *mut c_void) -> Outcome {
        let call = "aclrtLaunchHostFunc";
        let missing = Failure { call, code: Code(NOT_SUPPORTED), meaning: Meaning::NotSupported };
        unsafe { self.host_functions.as_ref().ok_or(missing)?.launch(stream, function, data) }
    }

    unsafe fn event_create(&self) -> Outcome<EventHandle> {
        given_pointer(|event| unsafe { self.calls.event_create(event, EVENT_FOR_STREAMS) })
    }

    unsafe fn event_destroy(&self, event: EventHandle) -> Outcome {
        unsafe { self.calls.event_destroy(event) }
    }

    unsafe fn event_query(&self, event: EventHandle) -> Outcome {
        match given(EVENT_NOT_READY, |status| unsafe { self.calls.event_query(event, status) })? {
            EVENT_NOT_READY => {
                Err(Failure { call: "aclrtQueryEventStatus", code: Code(0), meaning: Meaning::NotReady })
            }
            _ => Ok(()),
        }
    }

    unsafe fn event_record(&self, event: EventHandle, stream: StreamHandle) -> Outcome {
        unsafe { self.calls.event_record(event, stream) }
    }
}
