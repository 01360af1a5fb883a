//! Cambricon's driver: CNDrv, whose streams are queues and whose events are notifiers.

mod calls;

use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::Path;
use std::ptr;

use libloading::Library;

use self::calls::{Calls, CopyCalls, Device, NO_DEVICE, NOT_SUPPORTED, NOTIFIER_WITHOUT_TIMING, UuidCalls};
use super::driver::{Driver, lacks, named, open_any, pci_bus_id};
use super::table::Spelling;
use super::verbs::{
    Address, Code, ContextHandle, DeviceHandle, EventHandle, Failure, HostFunction, Meaning, Outcome, Peers, Place,
    Rules, StreamHandle, Verbs, given, given_pointer,
};
use super::{Cards, Vendor};
use crate::device::{DeviceId, DeviceInfo, DeviceKind, GpuDetails, gpu_uuid};

/// The environment variable that names the driver's library.
const LIBRARY_VARIABLE: &str = "TENSOR_OFFLOAD_LIBCNDRV";

/// The names of the library: by the search path, and where it is installed.
const LIBRARIES: [&str; 3] = ["libcndrv.so", "libcndrv.so.2", "/usr/local/neuware/lib64/libcndrv.so"];

/// `CN_QUEUE_TYPE_PER_THREAD`.
const PER_THREAD: usize = 1;

/// Why devices do not copy from each other's memory.
const NO_PEERS: &str = "a queue copies only from the memory of its own device";

/// The backend of Cambricon devices through CNDrv, and of `cpu` with memory that they copy from at full speed.
///
/// The devices are `mlu:N`, as the driver numbers them. Its library is the one in the search path, or under `/usr/local/neuware`, or
/// the file that [`library`](Cambricon::library) or the environment variable `TENSOR_OFFLOAD_LIBCNDRV` names. Without a usable one,
/// [`discover`](crate::backend::Backend::discover) returns the reason; nothing panics.
///
/// - Waits for work of another device pass the host, since a queue waits only for notifiers of its own context. Copies between devices
///   go through the host, too, since a queue copies only from its own device's memory.
/// - Patches and the values of blocks are computed on the host.
///
/// ```
/// use tensor_offload::backend::{Backend, Cambricon, Found};
/// for found in Cambricon::new().discover() {
///     match found {
///         Found::Here(device) => println!("{}: {}, {} bytes", device.id, device.name, device.total),
///         Found::Absent { kind, why } => println!("no {kind} device: {why}"),
///         _ => {}
///     }
/// }
/// ```
pub struct Cambricon {
    cards: Cards<CnDrv>,
}

struct CnDrv;

backend!(Cambricon);

impl Cambricon {
    /// The Cambricon devices of this system.
    pub fn new() -> Cambricon {
        Cambricon { cards: Cards::new(CnDrv) }
    }
}

impl Vendor for CnDrv {
    const KIND: DeviceKind = DeviceKind::Mlu;

    fn load(&self, library: Option<&Path>) -> Result<(Driver, Vec<DeviceInfo>), String> {
        let library =
            open_any(named(library, LIBRARY_VARIABLE).as_deref(), &LIBRARIES, "library of Cambricon's CNDrv")?;
        let mut verbs = CnVerbs::find(&library).map_err(lacks)?;
        let uuids = UuidCalls::find(&library, Spelling::Own).ok();
        let found = verbs.start().and_then(|devices| {
            verbs.devices = devices;
            (0..verbs.devices.len())
                .map(|number| verbs.device_info(uuids.as_ref(), number))
                .collect::<Outcome<Vec<_>>>()
        });
        let rules = Rules {
            kind: CnDrv::KIND,
            waits_across: false,
            peers: Peers::Never(NO_PEERS),
            registers: false,
            per_thread: Some(PER_THREAD),
        };
        let driver = Driver::new(verbs, rules);
        match found {
            Ok(devices) if devices.is_empty() => Err(no_device()),
            Ok(devices) => Ok((driver, devices)),
            Err(failure) if failure.code == Code(NO_DEVICE) => Err(no_device()),
            Err(failure) => Err(driver.describe(failure)),
        }
    }
}

/// What is said where there is no device.
fn no_device() -> String {
    match std::env::var("MLU_VISIBLE_DEVICES") {
        Ok(visible) => format!("no Cambricon device is visible; MLU_VISIBLE_DEVICES is `{visible}`"),
        Err(_) => "the driver sees no Cambricon device".to_owned(),
    }
}

/// The calls of CNDrv.
struct CnVerbs {
    calls: Calls,
    copies: Option<CopyCalls>,
    /// The driver's own handles, by number.
    devices: Vec<Device>,
}

impl CnVerbs {
    fn find(library: &Library) -> Result<CnVerbs, &'static str> {
        let copies = CopyCalls::find(library, Spelling::Own).ok();
        Ok(CnVerbs { calls: Calls::find(library, Spelling::Own)?, copies, devices: Vec::new() })
    }

    /// Initialises the driver. Returns its devices.
    fn start(&self) -> Outcome<Vec<Device>> {
        // SAFETY: no flags are defined.
        unsafe { self.calls.init(0) }?;
        // SAFETY: the pointer is to a living integer.
        let count: c_int = given(0, |count| unsafe { self.calls.device_count(count) })?;
        // SAFETY: the pointers are to living numbers.
        (0..count).map(|number| given(0, |device| unsafe { self.calls.device(device, number) })).collect()
    }

    fn device_info(&self, uuids: Option<&UuidCalls>, number: usize) -> Outcome<DeviceInfo> {
        let device = self.handle(number as DeviceHandle);
        let mut name = [0u8; 256];
        // SAFETY: the call writes at most the given number of bytes, the last of them a zero.
        unsafe { self.calls.device_name(name.as_mut_ptr().cast(), name.len() as u32 - 1, device) }?;
        let name = CStr::from_bytes_until_nul(&name).unwrap_or_default().to_string_lossy().into_owned();
        // SAFETY: the pointer is to a living number.
        let total = given(0, |bytes| unsafe { self.calls.device_total(bytes, device) })?;
        // SAFETY: the call writes at most the given number of bytes.
        let address = pci_bus_id(|text, room| unsafe { self.calls.pci_bus_id(text, room, device) });
        // SAFETY: the pointer is to sixteen living bytes.
        let uuid = uuids.and_then(|calls| given([0; 16], |uuid| unsafe { calls.uuid(uuid, device) }).ok());
        let details = GpuDetails { uuid: uuid.map(gpu_uuid), ..GpuDetails::new((0, 0), address.unwrap_or_default()) };
        let id = DeviceId::of(CnDrv::KIND, number as u32);
        Ok(DeviceInfo::new(id, total).name(name).free(None).gpu(details))
    }

    /// The driver's handle of the device of this number; for a number that is none's, one that the driver refuses.
    fn handle(&self, number: DeviceHandle) -> Device {
        usize::try_from(number).ok().and_then(|number| self.devices.get(number)).copied().unwrap_or(Device::MAX)
    }
}

fn text(ask: impl FnOnce(*mut *const c_char) -> Outcome) -> Option<String> {
    let text = given(ptr::null(), ask).ok()?;
    // SAFETY: the driver returns null or a zero-terminated text that lives as long as the driver.
    (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
}

/// Each is a call of the driver: the caller's promise is the one that its documentation asks for, and pointers to write to are to
/// living values.
#[expect(clippy::undocumented_unsafe_blocks, reason = "the same for all: above")]
impl Verbs for CnVerbs {
    fn library(&self) -> usize {
        self.calls.address()
    }

    fn error_name(&self, code: Code) -> Option<String> {
        text(|text| unsafe { self.calls.error_name(code.0, text) })
    }

    fn error_text(&self, code: Code) -> Option<String> {
        text(|text| unsafe { self.calls.error_text(code.0, text) })
    }

    /// The device's number: the driver's handle is wider.
    fn device(&self, number: u32) -> Outcome<DeviceHandle> {
        Ok(DeviceHandle::try_from(number).unwrap_or(DeviceHandle::MAX))
    }

    fn is_active(&self, device: DeviceHandle) -> bool {
        let (mut flags, mut active) = (0, 0);
        let asked = unsafe { self.calls.context_state(self.handle(device), &raw mut flags, &raw mut active) };
        asked.is_ok() && active != 0
    }

    fn can_access_peer(&self, _to: DeviceHandle, _from: DeviceHandle) -> Outcome<bool> {
        Ok(false)
    }

    unsafe fn retain(&self, device: DeviceHandle) -> Outcome<ContextHandle> {
        given_pointer(|context| unsafe { self.calls.retain(context, self.handle(device)) })
    }

    unsafe fn release(&self, device: DeviceHandle) -> Outcome {
        unsafe { self.calls.release(self.handle(device)) }
    }

    fn current(&self) -> Outcome<ContextHandle> {
        given_pointer(|context| unsafe { self.calls.current(context) })
    }

    unsafe fn make_current(&self, context: ContextHandle) -> Outcome {
        unsafe { self.calls.make_current(context) }
    }

    unsafe fn enable_peer_access(&self, _peer: Place) -> Outcome {
        Err(unsupported("cnMemcpyPeerAsync"))
    }

    fn memory_info(&self) -> Outcome<(u64, u64)> {
        let (mut free, mut total) = (0, 0);
        unsafe { self.calls.memory_info(&raw mut free, &raw mut total) }?;
        Ok((free, total))
    }

    unsafe fn allocate(&self, bytes: usize) -> Outcome<Address> {
        given(0, |address| unsafe { self.calls.allocate(address, bytes as u64) })
    }

    unsafe fn free(&self, address: Address) -> Outcome {
        unsafe { self.calls.free(address) }
    }

    unsafe fn host_allocate(&self, bytes: usize) -> Outcome<*mut c_void> {
        given_pointer(|address| unsafe { self.calls.host_allocate(address, bytes as u64) })
    }

    unsafe fn host_free(&self, address: *mut c_void) -> Outcome {
        unsafe { self.calls.host_free(address) }
    }

    unsafe fn host_register(&self, _address: *mut c_void, _bytes: usize) -> Outcome {
        Err(unsupported("cnMallocHost"))
    }

    unsafe fn host_unregister(&self, _address: *mut c_void) -> Outcome {
        Err(unsupported("cnFreeHost"))
    }

    unsafe fn copy_to_device(&self, dst: Address, src: *const c_void, bytes: usize, stream: StreamHandle) -> Outcome {
        unsafe { self.calls.copy_to_device(dst, src, bytes as u64, stream) }
    }

    unsafe fn copy_to_host(&self, dst: *mut c_void, src: Address, bytes: usize, stream: StreamHandle) -> Outcome {
        unsafe { self.calls.copy_to_host(dst, src, bytes as u64, stream) }
    }

    unsafe fn copy_on_device(&self, dst: Address, src: Address, bytes: usize, stream: StreamHandle) -> Outcome {
        match &self.copies {
            Some(calls) => unsafe { calls.copy(dst, src, bytes as u64, stream) },
            None => unsafe { self.calls.copy_on_device(dst, src, bytes as u64, stream) },
        }
    }

    unsafe fn copy_between(
        &self,
        _dst: (Place, Address),
        _src: (Place, Address),
        _bytes: usize,
        _stream: StreamHandle,
    ) -> Outcome {
        Err(unsupported("cnMemcpyPeerAsync"))
    }

    unsafe fn copy_to_device_now(&self, dst: Address, src: *const c_void, bytes: usize) -> Outcome {
        unsafe { self.calls.copy_to_device_now(dst, src, bytes as u64) }
    }

    unsafe fn copy_to_host_now(&self, dst: *mut c_void, src: Address, bytes: usize) -> Outcome {
        unsafe { self.calls.copy_to_host_now(dst, src, bytes as u64) }
    }

    fn stream_priorities(&self) -> Outcome<(c_int, c_int)> {
        let (mut least, mut greatest) = (0, 0);
        unsafe { self.calls.priorities(&raw mut least, &raw mut greatest) }?;
        Ok((least, greatest))
    }

    unsafe fn stream_create(&self, priority: c_int) -> Outcome<StreamHandle> {
        given_pointer(|queue| unsafe { self.calls.queue_create(queue, 0, priority) })
    }

    /// Waits first: the documentation of the runtime above CNDrv says that destroying a queue ends its tasks.
    unsafe fn stream_destroy(&self, stream: StreamHandle) -> Outcome {
        let idle = unsafe { self.calls.queue_sync(stream) };
        unsafe { self.calls.queue_destroy(stream) }.and(idle)
    }

    unsafe fn stream_synchronize(&self, stream: StreamHandle) -> Outcome {
        unsafe { self.calls.queue_sync(stream) }
    }

    unsafe fn stream_wait(&self, stream: StreamHandle, event: EventHandle) -> Outcome {
        unsafe { self.calls.queue_wait(stream, event) }
    }

    unsafe fn launch_host_function(&self, stream: StreamHandle, function: HostFunction, data: *mut c_void) -> Outcome {
        unsafe { self.calls.host_function(stream, function, data) }
    }

    unsafe fn event_create(&self) -> Outcome<EventHandle> {
        given_pointer(|notifier| unsafe { self.calls.notifier_create(notifier, NOTIFIER_WITHOUT_TIMING) })
    }

    unsafe fn event_destroy(&self, event: EventHandle) -> Outcome {
        unsafe { self.calls.notifier_destroy(event) }
    }

    unsafe fn event_query(&self, event: EventHandle) -> Outcome {
        unsafe { self.calls.notifier_query(event) }
    }

    unsafe fn event_record(&self, event: EventHandle, stream: StreamHandle) -> Outcome {
        unsafe { self.calls.notifier_place(event, stream) }
    }
}

/// The refusal of what [`Rules`] says is not done.
fn unsupported(call: &'static str) -> Failure {
    Failure { call, code: Code(NOT_SUPPORTED), meaning: Meaning::NotSupported }
}
