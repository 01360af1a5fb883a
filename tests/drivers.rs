//! The backends of drivers that are shaped like CUDA's, over a library that stands in for each of them: conformance, a model from
//! loading to unloading, whatever call fails, and where their rules are other ones than CUDA's.
#![cfg(all(
    feature = "hip",
    feature = "corex",
    feature = "ascend",
    feature = "cambricon",
    feature = "cuda",
    target_os = "linux"
))]

mod card;
mod support;

use std::path::PathBuf;
use std::sync::Arc;

use card::{DEADLINE, StandIn, assert_clean, assert_given_back, stand_in, whatever_call_fails};
use cuda_standin::{Config, Effect, Fault, FaultPlan, MemoryMode, library_path};
use support::whole_path::{source, whole_path};
use tensor_offload::backend::{
    Ascend, Backend, Buf, Cambricon, Corex, Cuda, Device, Found, Health, Hip, Host, Joined, MemoryKind, Role, Route,
    Transfer, conformance,
};
use tensor_offload::device::DeviceKind;
use tensor_offload::{ByteSize, DeviceId, Error, ErrorKind, Registry, Result};

/// The vendors beside NVIDIA.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Vendor {
    Hip,
    Corex,
    Ascend,
    Cambricon,
}

const VENDORS: [Vendor; 4] = [Vendor::Hip, Vendor::Corex, Vendor::Ascend, Vendor::Cambricon];

impl Vendor {
    fn kind(self) -> DeviceKind {
        match self {
            Vendor::Hip => DeviceKind::Hip,
            Vendor::Corex => DeviceKind::Corex,
            Vendor::Ascend => DeviceKind::Npu,
            Vendor::Cambricon => DeviceKind::Mlu,
        }
    }

    fn device(self, number: u32) -> DeviceId {
        DeviceId::new(self.kind(), number).unwrap()
    }

    /// The backend over the stand-in. Contexts take nothing of its small cards.
    fn backend(self) -> Arc<dyn Backend> {
        self.backend_of(library_path().unwrap(), None)
    }

    fn backend_of(self, library: PathBuf, pinned_cap: Option<ByteSize>) -> Arc<dyn Backend> {
        macro_rules! of {
            ($backend:ident) => {{
                let backend = $backend::new().library(library).context_size(ByteSize(0));
                match pinned_cap {
                    Some(cap) => Arc::new(backend.pinned_cap(cap)),
                    None => Arc::new(backend),
                }
            }};
        }
        match self {
            Vendor::Hip => of!(Hip),
            Vendor::Corex => of!(Corex),
            Vendor::Ascend => of!(Ascend),
            Vendor::Cambricon => of!(Cambricon),
        }
    }

    fn registry(self) -> Registry {
        Registry::new([self.backend(), Arc::new(Host::new())])
    }

    /// The device's memory is allocated by this call, ...
    fn allocate(self) -> &'static str {
        match self {
            Vendor::Hip => "hipMalloc",
            Vendor::Corex => "cuMemAlloc_v2",
            Vendor::Ascend => "aclrtMalloc",
            Vendor::Cambricon => "cnMalloc",
        }
    }

    /// ... and its contents are copied to it by this one.
    fn upload(self) -> &'static str {
        match self {
            Vendor::Hip => "hipMemcpyHtoDAsync",
            Vendor::Corex => "cuMemcpyHtoDAsync_v2",
            Vendor::Ascend => "aclrtMemcpyAsync",
            Vendor::Cambricon => "cnMemcpyHtoDAsync_V2",
        }
    }

    /// A result that the device does not recover from.
    fn sticky(self) -> u32 {
        match self {
            Vendor::Hip | Vendor::Corex => 700,
            Vendor::Ascend => 507_013,
            Vendor::Cambricon => 100_016,
        }
    }

    /// Allocations of the vendor's devices.
    fn allocation(self, text: &str) -> String {
        text.replace("card", self.kind().name())
    }
}

/// Two cards that reach each other. CoreX's driver is of the age of CUDA 10.2, without pools.
fn two_cards(vendor: Vendor) -> Config {
    let mut config = Config::with_devices(&[64 << 20, 32 << 20]).all_peers();
    if vendor == Vendor::Corex {
        config.driver_version = 10_020;
        config.refuse_ptx = true;
        for device in &mut config.devices {
            (device.pools, device.name) = (false, "Iluvatar BI-V150".to_owned());
        }
    }
    config
}

fn filled(host: &dyn Device, bytes: usize) -> Buf {
    let mut buffer = host.alloc(bytes, MemoryKind::Pinned).unwrap();
    let pattern = (0..bytes).map(|i| (i as u8).wrapping_mul(7) ^ (i >> 8) as u8);
    buffer.host_mut().unwrap().iter_mut().zip(pattern).for_each(|(byte, value)| *byte = value);
    buffer.freeze()
}

/// Runs `test` over the stand-in for each vendor, and checks that nothing is left.
fn over_each(config: impl Fn(Vendor) -> Config, test: impl Fn(Vendor, &StandIn)) {
    for vendor in VENDORS {
        let Some(driver) = stand_in(&config(vendor)) else { return };
        test(vendor, &driver);
        assert_clean(&driver);
    }
}

#[test]
fn drivers_conform_on_every_machine() {
    let machines: [fn(Config) -> Config; 3] = [
        |config| config.memory(MemoryMode::Quarantine),
        |config| config.memory(MemoryMode::Reuse).seed(11),
        |config| config.memory(MemoryMode::Reuse).late_micros(10_000_000),
    ];
    for machine in machines {
        over_each(
            |vendor| machine(two_cards(vendor)),
            |vendor, _| {
                let backend = vendor.backend();
                let cpu = backend.open(DeviceId::CPU).unwrap();
                for number in 0..2 {
                    conformance::check(&*backend.open(vendor.device(number)).unwrap(), &*cpu);
                }
                conformance::check(&*cpu, &*cpu);
            },
        );
    }
}

#[test]
fn drivers_tell_what_a_device_is_and_open_nothing_for_it() {
    over_each(two_cards, |vendor, driver| {
        let backend = vendor.backend();
        let found = backend.discover();
        let Found::Here(second) = &found[1] else { panic!("{found:?}") };
        assert_eq!((second.id, second.total), (vendor.device(1), 32 << 20), "{vendor:?}");
        assert!(!second.name.is_empty());
        let gpu = second.gpu.as_ref().expect("an address on the bus");
        assert_eq!(gpu.pci_bus_id, "00000000:02:00.0", "{vendor:?}");
        assert!(matches!(&found[2], Found::Here(cpu) if cpu.id == DeviceId::CPU && cpu.pinnable.is_some()));
        assert_eq!(driver.report().live_contexts, 0, "looking opens nothing");
        assert_eq!(backend.open(vendor.device(7)).unwrap_err().kind(), ErrorKind::UnknownDevice);
    });
}

#[test]
fn drivers_say_why_there_is_no_device() {
    for vendor in VENDORS {
        let Some(driver) = stand_in(&two_cards(vendor)) else { return };
        let why = |backend: Arc<dyn Backend>| match &backend.discover()[..] {
            [Found::Absent { kind, why }] if *kind == vendor.kind() => why.clone(),
            other => panic!("{vendor:?}: {other:?}"),
        };
        driver.fault(&FaultPlan { no_devices: true, ..FaultPlan::default() });
        let none = why(vendor.backend());
        driver.no_faults();
        assert!(none.contains("device"), "{vendor:?}: {none}");
        let nowhere = why(vendor.backend_of("/nowhere/libdriver.so".into(), None));
        assert!(nowhere.contains("/nowhere/libdriver.so"), "{vendor:?}: {nowhere}");
        // A library that is something else.
        let other = why(vendor.backend_of("libc.so.6".into(), None));
        assert!(other.starts_with("the driver has no "), "{vendor:?}: {other}");
    }
}

#[test]
fn drivers_deliver_a_patched_model_whole_from_every_home() {
    let source = source();
    let machines: [fn(Config) -> Config; 2] = [
        |config| config.memory(MemoryMode::Quarantine).late_micros(10_000_000),
        |config| config.memory(MemoryMode::Reuse).seed(5),
    ];
    for machine in machines {
        for allocation in
            ["card:0,60kb;card:1,100kb;cpu,*", "card:0,40kb;disk,100kb;card:1,*", "card:0,100%", "card:1,50%;cpu,50%"]
        {
            over_each(
                |vendor| machine(two_cards(vendor)),
                |vendor, _| {
                    let (devices, allocation) = (vendor.registry(), vendor.allocation(allocation));
                    for depth in [0, 2] {
                        whole_path(&devices, &source, vendor.device(0), &allocation, depth).unwrap();
                        assert_given_back(&devices, None, &allocation);
                    }
                },
            );
        }
    }
}

#[test]
fn drivers_without_pinned_memory_deliver_a_model_whole() {
    let source = source();
    over_each(two_cards, |vendor, _| {
        let backend = vendor.backend_of(library_path().unwrap(), Some(ByteSize(0)));
        let devices = Registry::new([backend, Arc::new(Host::new()) as Arc<dyn Backend>]);
        let allocation = vendor.allocation("card:0,40kb;card:1,60kb;cpu,*");
        whole_path(&devices, &source, vendor.device(0), &allocation, 1).unwrap();
        assert_given_back(&devices, None, &allocation);
    });
}

/// Does the whole path with one call of a vendor's driver after another failing.
fn every_failing_call(vendor: Vendor) {
    let source = source();
    let allocation = vendor.allocation("card:0,60kb;disk,20kb;card:1,40kb;cpu,*");
    let path = |devices: &Registry| -> Result<()> {
        match devices.machine().device(vendor.device(0)) {
            Ok(_) => whole_path(devices, &source, vendor.device(0), &allocation, 1),
            Err(error) => Err(error),
        }
    };
    let effects = [Effect::OutOfMemory, Effect::Sticky(vendor.sticky()), Effect::LateSticky(vendor.sticky())];
    // CoreX's driver is CUDA's, whose own tests have the rest.
    let effects = if vendor == Vendor::Corex { &effects[..2] } else { &effects };
    whatever_call_fails(&two_cards(vendor), effects, 10, || vendor.registry(), path);
}

#[test]
fn drivers_whatever_call_of_hip_fails_gives_an_error_or_a_right_result() {
    every_failing_call(Vendor::Hip);
}

#[test]
fn drivers_whatever_call_of_corex_fails_gives_an_error_or_a_right_result() {
    every_failing_call(Vendor::Corex);
}

#[test]
fn drivers_whatever_call_of_acl_fails_gives_an_error_or_a_right_result() {
    every_failing_call(Vendor::Ascend);
}

#[test]
fn drivers_whatever_call_of_cndrv_fails_gives_an_error_or_a_right_result() {
    every_failing_call(Vendor::Cambricon);
}

#[test]
fn drivers_out_of_memory_says_what_was_asked_and_what_is_free() {
    over_each(two_cards, |vendor, driver| {
        let backend = vendor.backend();
        let card = backend.open(vendor.device(0)).unwrap();
        driver.fault(&FaultPlan::one(Fault::nth(vendor.allocate(), 1, Effect::OutOfMemory).onwards()));
        let error = card.alloc(1 << 20, MemoryKind::Whole).unwrap_err();
        driver.no_faults();
        match error {
            Error::OutOfMemory { device, requested, available, .. } => {
                assert_eq!((device, requested), (vendor.device(0), 1 << 20));
                assert!(available > 1 << 20, "{vendor:?}: {available} free");
            }
            other => panic!("{vendor:?}: {other:?}"),
        }
        assert_eq!((card.health(), card.ledger().charged()), (Health::Good, 0));
    });
}

/// The calls of a vendor that make a stream and capture it, which are the caller's business.
#[expect(unsafe_code, reason = "calls of a driver")]
mod own {
    use std::ffi::{c_int, c_uint, c_void};
    use std::sync::Arc;

    use super::*;

    type Handle = *mut c_void;

    /// Calls `name` of the stand-in.
    macro_rules! call {
        ($name:expr, ($($type:ty),*), $($argument:expr),*) => {{
            // SAFETY: the stand-in stays loaded, and the call has this type.
            unsafe {
                let library = libloading::Library::new(library_path().unwrap()).unwrap();
                let call = *library.get::<unsafe extern "C" fn($($type),*) -> c_int>($name).unwrap();
                std::mem::forget(library);
                call($($argument),*)
            }
        }};
    }

    /// A stream of the caller's on the device, made as the vendor's programs make one.
    pub(super) fn stream(vendor: Vendor, card: &Arc<dyn Device>) -> Handle {
        let mut stream: Handle = std::ptr::null_mut();
        // The device's context is current meanwhile.
        card.batched(&mut || {
            let made = match vendor {
                Vendor::Hip => {
                    call!("hipStreamCreateWithPriority", (*mut Handle, c_uint, c_int), &raw mut stream, 1, 0)
                }
                Vendor::Corex => {
                    call!("cuStreamCreateWithPriority", (*mut Handle, c_uint, c_int), &raw mut stream, 1, 0)
                }
                Vendor::Ascend => call!("aclrtCreateStreamWithConfig", (*mut Handle, u32, u32), &raw mut stream, 0, 0),
                Vendor::Cambricon => call!("cnCreateQueue", (*mut Handle, c_uint), &raw mut stream, 0),
            };
            assert_eq!(made, 0, "{vendor:?}");
        });
        stream
    }

    pub(super) fn destroy(vendor: Vendor, card: &Arc<dyn Device>, stream: Handle) {
        let name = match vendor {
            Vendor::Hip => "hipStreamDestroy",
            Vendor::Corex => "cuStreamDestroy_v2",
            Vendor::Ascend => "aclrtDestroyStream",
            Vendor::Cambricon => "cnDestroyQueue",
        };
        card.batched(&mut || assert_eq!(call!(name, (Handle), stream), 0, "{vendor:?}"));
    }

    /// The stream as one of the library's. The caller sees to it that it lives long enough.
    pub(super) fn adopt(
        vendor: Vendor,
        card: &Arc<dyn Device>,
        stream: Handle,
    ) -> Arc<dyn tensor_offload::backend::Stream> {
        use tensor_offload::{ascend, cambricon, corex, hip};
        let keep = Arc::new(());
        // SAFETY: made on the device, and destroyed after the stream that is returned was dropped.
        let adopted = unsafe {
            match vendor {
                Vendor::Hip => hip::adopt_raw_stream(card, stream, keep),
                Vendor::Corex => corex::adopt_raw_stream(card, stream, keep),
                Vendor::Ascend => ascend::adopt_raw_stream(card, stream, keep),
                Vendor::Cambricon => cambricon::adopt_raw_stream(card, stream, keep),
            }
        };
        adopted.unwrap()
    }

    /// Captures the stream while `work` runs.
    pub(super) fn captured(vendor: Vendor, card: &Arc<dyn Device>, stream: Handle, work: impl FnOnce()) {
        let (begin, end, destroy) = match vendor {
            Vendor::Hip => ("hipStreamBeginCapture", "hipStreamEndCapture", "hipGraphDestroy"),
            Vendor::Corex => ("cuStreamBeginCapture_v2", "cuStreamEndCapture", "cuGraphDestroy"),
            Vendor::Ascend => ("aclmdlRICaptureBegin", "aclmdlRICaptureEnd", "aclmdlRIDestroy"),
            Vendor::Cambricon => ("cnQueueBeginCapture", "cnQueueEndCapture", ""),
        };
        // In the mode that forbids the calls of other threads most.
        card.batched(&mut || assert_eq!(call!(begin, (Handle, c_int), stream, 0), 0, "{vendor:?}"));
        work();
        card.batched(&mut || {
            let mut graph: Handle = std::ptr::null_mut();
            assert_eq!(
                call!(end, (Handle, *mut Handle), stream, &raw mut graph),
                0,
                "{vendor:?}: the capture was spoilt"
            );
            if !destroy.is_empty() {
                assert_eq!(call!(destroy, (Handle), graph), 0, "{vendor:?}");
            }
        });
    }
}

#[test]
fn drivers_copy_in_the_order_of_a_callers_stream_but_not_while_it_is_captured() {
    over_each(two_cards, |vendor, _| {
        let backend = vendor.backend();
        let (cpu, card) = (backend.open(DeviceId::CPU).unwrap(), backend.open(vendor.device(0)).unwrap());
        let handle = own::stream(vendor, &card);
        let stream = own::adopt(vendor, &card, handle);
        let bytes = filled(&*cpu, 100_000);
        let copy = |memory| stream.copy(Transfer::whole(&bytes, memory).unwrap());
        let memory = card.alloc(100_000, MemoryKind::Arena).unwrap();
        let mut refused = None;
        own::captured(vendor, &card, handle, || refused = Some(copy(memory).unwrap_err()));
        let rejected = refused.unwrap();
        assert!(matches!(rejected.error, Error::Capturing { .. }), "{vendor:?}: {:?}", rejected.error);
        let there = copy(rejected.dst).unwrap().wait(DEADLINE).unwrap().freeze();
        let back = cpu.alloc(100_000, MemoryKind::Pinned).unwrap();
        let down = card.stream(Role::Download).unwrap();
        let back = down.copy(Transfer::whole(&there, back).unwrap()).unwrap().wait(DEADLINE).unwrap().freeze();
        assert!(back.host(DEADLINE).unwrap() == bytes.host(DEADLINE).unwrap(), "{vendor:?}");
        drop((stream, down));
        own::destroy(vendor, &card, handle);
    });
}

/// An event behind a copy that failed must not read as complete, which it does with ACL's default.
#[test]
fn drivers_tell_of_a_copy_that_failed_late() {
    for (vendor, adopted) in VENDORS.into_iter().flat_map(|vendor| [(vendor, false), (vendor, true)]) {
        let Some(driver) = stand_in(&two_cards(vendor)) else { return };
        let backend = vendor.backend();
        let (cpu, card) = (backend.open(DeviceId::CPU).unwrap(), backend.open(vendor.device(0)).unwrap());
        let bytes = filled(&*cpu, 1 << 20);
        let stream = match adopted {
            true => own::adopt(vendor, &card, own::stream(vendor, &card)),
            false => card.stream(Role::Upload).unwrap(),
        };
        let memory = card.alloc(1 << 20, MemoryKind::Arena).unwrap();
        driver.fault(&FaultPlan::one(Fault::nth(vendor.upload(), 1, Effect::Torn(vendor.sticky()))));
        let copied = stream.copy(Transfer::whole(&bytes, memory).unwrap());
        // It may have failed before the event after it was recorded.
        let error = copied.map_or_else(|rejected| rejected.error, |flight| flight.wait(DEADLINE).unwrap_err());
        driver.no_faults();
        assert!(!matches!(error, Error::TimedOut { .. }), "{vendor:?}, {adopted}: {error:?}");
        assert!(matches!(card.health(), Health::Lost(_)), "{vendor:?}, {adopted}: {error}");
    }
}

#[test]
fn drivers_wait_for_each_other_on_the_device_where_they_can() {
    over_each(
        |vendor| two_cards(vendor).late_micros(10_000_000),
        |vendor, _| {
            let backend = vendor.backend();
            let cpu = backend.open(DeviceId::CPU).unwrap();
            let [first, second] = [0, 1].map(|number| backend.open(vendor.device(number)).unwrap());
            let bytes = filled(&*cpu, 4096);
            let upload = first.stream(Role::Upload).unwrap();
            let memory = first.alloc(4096, MemoryKind::Arena).unwrap();
            let there = upload.copy(Transfer::whole(&bytes, memory).unwrap()).unwrap().chain().freeze();
            let event = upload.record(std::slice::from_ref(&there)).unwrap();
            let (own, other) = (first.stream(Role::Compute).unwrap(), second.stream(Role::Compute).unwrap());
            assert_eq!(own.wait(&event).unwrap(), Joined::OnDevice, "{vendor:?}");
            let across = if vendor == Vendor::Cambricon { Joined::HostMustWait } else { Joined::OnDevice };
            assert_eq!(other.wait(&event).unwrap(), across, "{vendor:?}");
            let route = second.route_from(&*first);
            match vendor {
                Vendor::Cambricon => {
                    assert!(matches!(&route, Route::Staged(why) if why.contains("queue")), "{route:?}");
                }
                _ => assert!(matches!(&route, Route::Direct), "{vendor:?}: {route:?}"),
            }
            event.wait(DEADLINE).unwrap();
        },
    );
}

/// Devices of several drivers at once know nothing of each other's handles: their bytes go through the host.
#[test]
fn drivers_side_by_side_stream_to_each_other_through_the_host() {
    let source = source();
    let Some(driver) = stand_in(&two_cards(Vendor::Hip)) else { return };
    let backends = [Vendor::Hip, Vendor::Ascend, Vendor::Cambricon].map(Vendor::backend);
    let cuda = Arc::new(Cuda::new().context_size(ByteSize(0))) as Arc<dyn Backend>;
    let devices = Registry::new(backends.into_iter().chain([cuda, Arc::new(Host::new()) as Arc<dyn Backend>]));
    for compute in ["hip:0", "npu:0", "mlu:0", "cuda:0"] {
        let allocation = "hip:0,30kb;npu:1,30kb;mlu:0,30kb;cuda:1,30kb;cpu,*";
        whole_path(&devices, &source, compute.parse().unwrap(), allocation, 1).unwrap();
        assert_given_back(&devices, None, compute);
    }
    let open = |id: &str| devices.device(id.parse().unwrap()).unwrap();
    let (hip, cuda) = (open("hip:0"), open("cuda:0"));
    assert!(matches!(cuda.route_from(&*hip), Route::Staged(_)));
    // The event of one is no event of the other.
    let memory = hip.alloc(4096, MemoryKind::Arena).unwrap().freeze();
    let event = hip.stream(Role::Compute).unwrap().record(&[memory]).unwrap();
    let joined = cuda.stream(Role::Compute).unwrap().wait(&event).unwrap();
    assert!(joined == Joined::HostMustWait || event.is_complete(), "{joined:?}");
    drop((hip, cuda, event, devices));
    assert_clean(&driver);
}

#[test]
fn hip_devices_go_by_the_name_that_pytorch_gives_them() {
    let Some(driver) = stand_in(&two_cards(Vendor::Hip)) else { return };
    let devices = Vendor::Hip.registry();
    assert_eq!(devices.device(DeviceId::cuda(1)).unwrap().id(), DeviceId::hip(1));
    whole_path(&devices, &source(), DeviceId::cuda(0), "cuda:0,25%;cpu,75%", 1).unwrap();
    assert_given_back(&devices, None, "cuda:0");
    drop(devices);
    assert_clean(&driver);
}

#[test]
fn hip_uses_no_pools() {
    let Some(driver) = stand_in(&two_cards(Vendor::Hip)) else { return };
    whole_path(&Vendor::Hip.registry(), &source(), DeviceId::hip(0), "hip:0,60kb;cpu,*", 1).unwrap();
    let report = driver.report();
    assert!(report.calls_of("hipMalloc") > 0);
    assert!(report.calls.keys().all(|call| !call.contains("Pool") && call != "hipMallocAsync"), "{:?}", report.calls);
    assert_clean(&driver);
}

/// AMD's library loads without a card. `scripts/drivers-check` fetches it and runs this.
#[test]
#[ignore = "needs the file that AMDS_OWN_HIP names"]
#[expect(unsafe_code, reason = "opening a library")]
fn hip_of_amds_own_library_has_every_call_and_tells_that_there_is_no_device() {
    let file = PathBuf::from(std::env::var_os("AMDS_OWN_HIP").expect("AMDS_OWN_HIP names AMD's library"));
    // What the backend calls, as the stand-in saw it.
    let calls = {
        let Some(driver) = stand_in(&two_cards(Vendor::Hip)) else { return };
        for allocation in ["hip:0,60kb;hip:1,60kb;cpu,*", "hip:0,40kb;disk,60kb;cpu,*"] {
            whole_path(&Vendor::Hip.registry(), &source(), DeviceId::hip(0), allocation, 1).unwrap();
        }
        let calls = driver.report().calls;
        assert_clean(&driver);
        calls
    };
    // SAFETY: it is the library under test; its initialisers run in any program that opens it.
    let library = unsafe { libloading::Library::new(&file) }.expect("AMD's library");
    let own: Vec<_> = calls.keys().filter(|call| call.starts_with("hip")).collect();
    // SAFETY: nothing is called.
    let missing = own.iter().filter(|call| unsafe { library.get::<*const ()>(call.as_bytes()) }.is_err());
    let missing: Vec<_> = missing.collect();
    assert!(own.len() > 30 && missing.is_empty(), "{missing:?} of {} are missing", own.len());
    match &Hip::new().library(&file).discover()[..] {
        [Found::Absent { kind: DeviceKind::Hip, why }] => {
            assert_eq!(why, "the driver sees no HIP device");
            println!("AMD's own library has all {} calls that were made, and says: {why}", own.len());
        }
        [Found::Here(card), ..] => {
            println!("AMD's own library has all {} calls that were made, and {card:?}", own.len());
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn corex_is_not_taken_for_nvidias_driver() {
    let Some(driver) = stand_in(&two_cards(Vendor::Corex)) else { return };
    match &Cuda::new().discover()[..] {
        [Found::Absent { kind: DeviceKind::Cuda, why }] => assert!(why.contains("corex:N"), "{why}"),
        other => panic!("{other:?}"),
    }
    assert!(matches!(&Vendor::Corex.backend().discover()[0], Found::Here(info) if info.id == Vendor::Corex.device(0)));
    assert_clean(&driver);
}
