//! What a hostile caller, a device that breaks, another library in the process and a driver that refuses must not bring
//! about: memory that changes under a slice, wrong bytes without an error, memory that is freed while a device uses it.
#![cfg(all(feature = "cuda", target_os = "linux"))]
#![expect(unsafe_code, reason = "the driver's calls that another library of the process makes")]

mod card;
mod support;

use std::future::Future;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use card::{StandIn, assert_clean, driver, has_calls, registry, stand_in, wait_until_closed};
use cuda_standin::{Config, Effect, Fault, FaultPlan, Link, Session};
use cudarc::driver::{CudaContext, CudaStream, sys};
use support::{GPU0, Subject, llama};
use tensor_offload::backend::{
    Backend, Buf, BufMut, Charge, Cuda, Device, Health, Host, MemoryKind, Role, Route, Storage, Stream, Transfer,
};
use tensor_offload::{ByteSize, DeviceId, ErrorKind, LayerId, Loader, Model, Registry, Streamer, cuda};

const DEADLINE: Duration = Duration::from_secs(20);
const MB: usize = 1 << 20;

/// Slow enough that a copy of a few MiB is under way for long after its call.
fn slow() -> Config {
    Config::with_devices(&[64 << 20]).links(Link::new(20_000_000, 0))
}

struct Machine {
    cpu: Arc<dyn Device>,
    card: Arc<dyn Device>,
    /// What opened them.
    backend: Cuda,
}

fn machine() -> Machine {
    let backend = Cuda::new();
    Machine { cpu: backend.open(DeviceId::CPU).unwrap(), card: backend.open(GPU0).unwrap(), backend }
}

impl Machine {
    fn pinned(&self, bytes: usize, value: u8) -> BufMut {
        let mut buffer = self.cpu.alloc(bytes, MemoryKind::Pinned).unwrap();
        buffer.host_mut().unwrap().fill(value);
        buffer
    }

    /// Memory of the card that holds this value.
    fn there(&self, bytes: usize, value: u8) -> Buf {
        let (up, dst) = (self.card.stream(Role::Upload).unwrap(), self.card.alloc(bytes, MemoryKind::Arena).unwrap());
        copy(&*up, &self.pinned(bytes, value).freeze(), dst).freeze()
    }
}

fn copy(stream: &dyn Stream, src: &Buf, dst: BufMut) -> BufMut {
    stream.copy(Transfer::whole(src, dst).unwrap()).unwrap().wait(DEADLINE).unwrap()
}

/// A session in which a device breaks. What still works is closed a moment after the last handle, and must not be in the
/// next session.
struct Broken(StandIn);

impl Drop for Broken {
    fn drop(&mut self) {
        wait_until_closed(&self.0, DEADLINE);
    }
}

fn breakable(config: &Config) -> Option<Broken> {
    stand_in(config).map(Broken)
}

fn eventually(what: &str, mut check: impl FnMut() -> bool) {
    let until = Instant::now() + DEADLINE;
    while !check() {
        assert!(Instant::now() < until, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// An event that a caller brings is one more use of a buffer; it takes the place of none.
#[test]
fn cuda_an_event_of_the_callers_erases_no_pending_use() {
    let driver = driver(&slow());
    {
        let m = machine();
        let (down, there) = (m.card.stream(Role::Download).unwrap(), m.there(4 * MB, 7));
        let over = down.record(&[]).unwrap();
        over.wait(DEADLINE).unwrap();
        let flight = down.copy(Transfer::whole(&there, m.pinned(4 * MB, 0)).unwrap()).unwrap();
        let real = flight.done().clone();
        let flight = Transfer::whole(&there, flight.chain()).unwrap().launched(over);
        let mut dst = flight.wait(Duration::ZERO).unwrap();
        let seen = dst.host_mut().is_some();
        assert!(!seen || real.is_complete(), "bytes that a device writes are a slice of the host's");
        dst.wait_unused(DEADLINE).unwrap();
        assert!(dst.host_mut().unwrap().iter().all(|&byte| byte == 7));
    }
    driver.assert_clean();
}

/// Pinned memory that a lost device pinned is released through one that works, before it is unmapped.
#[test]
fn cuda_pinned_memory_of_a_lost_device_is_released_through_another() {
    let Some(broken) = breakable(&Config::with_devices(&[64 << 20, 64 << 20])) else { return };
    let driver = &broken.0;
    let m = machine();
    let other = m.backend.open(DeviceId::cuda(1)).unwrap();
    let (idle, small) = (m.pinned(8 * MB, 1), m.pinned(4096, 2));
    let charged = m.cpu.ledger().charged();
    lose(driver, &m);
    drop((idle, small));
    assert_eq!((charged, driver.report().live_pinned_bytes), (8 * MB as u64 + 4096, 0));
    assert_eq!((m.cpu.ledger().charged(), other.health()), (0, Health::Good));
}

/// Where nobody can have the driver let go of pinned memory, it is never unmapped, and stays charged: its addresses would
/// come back as ordinary memory that the driver takes for pinned.
#[test]
fn cuda_pinned_memory_that_cannot_be_released_is_kept_until_it_can() {
    let Some(broken) = breakable(&Config::with_devices(&[64 << 20, 64 << 20])) else { return };
    let driver = &broken.0;
    let m = machine();
    let mut idle = m.pinned(8 * MB, 1);
    let place = |buffer: &mut BufMut| buffer.host_mut().unwrap().as_ptr_range();
    let old = place(&mut idle);
    lose(driver, &m);
    drop(idle);
    assert_eq!((driver.report().live_pinned_bytes, m.cpu.ledger().charged()), (8 * MB as u64, 8 * MB as u64));
    let mut plain: Vec<_> = (0..12).map(|_| m.cpu.alloc(8 * MB, MemoryKind::Arena).unwrap()).collect();
    for buffer in &mut plain {
        let new = place(buffer);
        assert!(new.end <= old.start || old.end <= new.start, "{new:?} is registered as {old:?}");
    }
    drop(plain);
    // A device that works lets it go.
    let other = m.backend.open(DeviceId::cuda(1)).unwrap();
    m.cpu.trim().unwrap();
    assert_eq!((driver.report().live_pinned_bytes, m.cpu.ledger().charged()), (0, 0));
    drop(other);
}

/// Makes the first device lost, by something else than the memory looked at.
fn lose(driver: &Session, m: &Machine) {
    driver.fault(&FaultPlan::one(Fault::nth("cuMemGetInfo_v2", 1, Effect::Sticky(700))));
    assert_eq!(m.card.memory().unwrap_err().kind(), ErrorKind::DeviceLost);
    driver.no_faults();
}

fn end_of_capture(stream: &Arc<CudaStream>) -> sys::CUresult {
    let mut graph = std::ptr::null_mut();
    // SAFETY: the stream is alive, and the pointer is to a living handle.
    unsafe { sys::cuStreamEndCapture(stream.cu_stream(), &raw mut graph) }
}

/// The calls with which a program captures.
const CAPTURES: [&str; 2] = ["cuStreamBeginCapture_v2", "cuStreamEndCapture"];

const GLOBAL: sys::CUstreamCaptureMode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;

/// Another thread lets pinned memory go while a capture forbids other threads nearly everything: the driver lets go of
/// it, the capture goes on, and so does this thread's own mode.
#[test]
fn cuda_memory_is_let_go_during_a_capture_and_the_capture_goes_on() {
    let Some(driver) = stand_in(&Config::with_devices(&[64 << 20])) else { return };
    {
        let theirs = CudaContext::new(0).unwrap().new_stream().unwrap();
        let m = machine();
        let (large, small, there) = (m.pinned(8 * MB, 1), m.pinned(4096, 1), m.there(MB, 3));
        theirs.begin_capture(GLOBAL).unwrap();
        let thread = std::thread::spawn(move || drop((large, small, there)));
        thread.join().unwrap();
        eventually("the driver has the memory still", || driver.report().live_pinned_bytes == 0);
        let more = m.pinned(2 * MB, 1);
        assert!(more.block().pinned(), "memory can be pinned meanwhile");
        assert_eq!(end_of_capture(&theirs), sys::CUresult::CUDA_SUCCESS);
    }
    assert_clean(&driver);
}

/// What the library's own threads do while a capture forbids other threads nearly everything leaves it whole: staging
/// lanes, the thread that wakes futures, the workers of a load.
#[test]
fn cuda_threads_of_the_library_leave_captures_whole() {
    if !has_calls(&CAPTURES) {
        return;
    }
    let subject = Subject::patched(&llama(3, 32), 40);
    for pinned in [u64::MAX, 0] {
        let driver = driver(&Config::with_devices(&[64 << 20]).links(Link::new(4_000_000, 0)));
        {
            let theirs = CudaContext::new(0).unwrap().new_stream().unwrap();
            let devices = registry();
            let planner = subject.planner(devices.machine(), "cpu,*").depth(1).pinned_cap(Some(ByteSize(pinned)));
            let plan = planner.plan().unwrap();
            let load = || Loader::new(&devices).workers(2).load(&subject.weights, &plan).unwrap();
            let model = Arc::new(load());
            let mut streamer = Streamer::new(&model).unwrap();
            // A pass, so that slots have uses pending.
            model.layout().layer_ids().for_each(|layer| drop(streamer.layer(layer).unwrap()));
            streamer.compute().occupy(Duration::from_millis(20)).unwrap();
            let busy = streamer.compute().record(&[]).unwrap();
            let mut fired = Box::pin(busy.completed());
            let poll = fired.as_mut().poll(&mut Context::from_waker(Waker::noop()));
            assert!(matches!(poll, Poll::Pending) || busy.is_complete());
            let guard = streamer.layer(LayerId::new(1)).unwrap();
            theirs.begin_capture(GLOBAL).unwrap();
            // This thread calls nothing of the library meanwhile; others do.
            std::thread::scope(|scope| {
                scope.spawn(|| load().tensor("lm_head.weight").is_some());
                scope.spawn(|| guard.wait(DEADLINE).unwrap());
            });
            eventually("the future's event", || busy.is_complete());
            assert_eq!(end_of_capture(&theirs), sys::CUresult::CUDA_SUCCESS, "with {pinned} bytes pinned");
            drop(guard);
        }
        driver.assert_clean();
    }
}

/// A storage of another backend.
struct Theirs {
    address: usize,
    bytes: usize,
    freed: Arc<AtomicBool>,
}

impl Theirs {
    /// So many bytes, which are never given back.
    fn new(bytes: usize, freed: &Arc<AtomicBool>) -> Box<Theirs> {
        let memory = Box::leak(vec![0u8; bytes].into_boxed_slice());
        Box::new(Theirs { address: memory.as_mut_ptr().expose_provenance(), bytes, freed: Arc::clone(freed) })
    }
}

// SAFETY: the bytes are initialised, stay where they are and are this value's own.
unsafe impl Storage for Theirs {
    fn bytes(&self) -> usize {
        self.bytes
    }

    fn host(&self) -> Option<NonNull<u8>> {
        NonNull::new(std::ptr::with_exposed_provenance_mut(self.address))
    }

    fn free(self: Box<Self>, _charge: Charge) {
        self.freed.store(true, Ordering::SeqCst);
        panic!("freeing this memory panics");
    }
}

/// Another backend's memory panics when it is freed, on the thread that keeps memory until devices are done with it: what
/// that thread keeps besides is freed when its own copies are over, and not before.
#[test]
fn cuda_a_panic_in_freeing_memory_frees_no_other_memory_early() {
    let Some(driver) = stand_in(&slow()) else { return };
    {
        let m = machine();
        let (one, other) = (m.card.stream(Role::Upload).unwrap(), m.card.stream(Role::Upload).unwrap());
        let freed = Arc::new(AtomicBool::new(false));
        let odd = BufMut::new(Theirs::new(64, &freed), m.cpu.ledger().charge(64).unwrap()).unwrap().freeze();
        let long = m.pinned(4 * MB, 1).freeze();
        let flight = one.copy(Transfer::whole(&long, m.card.alloc(4 * MB, MemoryKind::Whole).unwrap()).unwrap());
        drop(other.copy(Transfer::whole(&odd, m.card.alloc(64, MemoryKind::Whole).unwrap()).unwrap()).unwrap());
        drop((flight.unwrap(), long, odd));
        eventually("the odd memory is freed", || freed.load(Ordering::SeqCst));
        eventually("all memory comes back", || m.card.ledger().charged() == 0);
    }
    assert_clean(&driver);
}

/// Memory with fewer bytes than its charge says is refused, whoever brings it.
#[test]
fn memory_has_as_many_bytes_as_are_charged() {
    let cpu = Host::new().open(DeviceId::CPU).unwrap();
    let short = Theirs::new(64, &Arc::default());
    let made = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        BufMut::new(short, cpu.ledger().charge(65).unwrap()).map(|_| ())
    }));
    assert!(made.is_err(), "its free panics");
    assert_eq!(cpu.ledger().charged(), 0);
    let disk = Host::new().open(DeviceId::DISK).unwrap();
    let error = cpu.allocate(disk.ledger().charge(8).unwrap(), MemoryKind::Arena).unwrap_err();
    assert_eq!((error.kind(), disk.ledger().charged()), (ErrorKind::Mismatch, 0));
}

/// A peer that was closed and opened again is another: access is enabled and tried out again.
#[test]
fn cuda_a_peer_that_was_closed_is_connected_to_again() {
    let Some(driver) = stand_in(&Config::with_devices(&[64 << 20, 64 << 20]).all_peers()) else { return };
    {
        let m = machine();
        let up = m.card.stream(Role::Upload).unwrap();
        for _ in 0..2 {
            let peer = m.backend.open(DeviceId::cuda(1)).unwrap();
            assert_eq!(m.card.route_from(&*peer), Route::Direct);
            for kind in [MemoryKind::Arena, MemoryKind::Whole] {
                let src = copy(&*peer.stream(Role::Upload).unwrap(), &m.pinned(MB, 5).freeze(), {
                    peer.alloc(MB, kind).unwrap()
                });
                let here = copy(&*up, &src.freeze(), m.card.alloc(MB, kind).unwrap()).freeze();
                let back = copy(&*m.card.stream(Role::Download).unwrap(), &here, m.pinned(MB, 0)).freeze();
                assert!(back.host(DEADLINE).unwrap().unwrap().iter().all(|&byte| byte == 5));
            }
            drop(peer);
            wait_until_closed_but_one(&driver);
        }
    }
    assert_clean(&driver);
}

fn wait_until_closed_but_one(driver: &Session) {
    eventually("the peer is closed", || driver.report().live_contexts == 1);
}

/// Calls that the driver refuses for now, because of a capture, lose no device, and nothing that is under way is taken for
/// over.
#[test]
fn cuda_a_refused_mark_takes_nothing_for_over() {
    let Some(driver) = stand_in(&slow()) else { return };
    {
        let m = machine();
        let (up, down) = (m.card.stream(Role::Upload).unwrap(), m.card.stream(Role::Download).unwrap());
        let there = m.there(4 * MB, 7);
        let refuse = |calls: &[&str]| {
            let faults = calls.iter().map(|call| Fault::nth(call, 1, Effect::Fail(900))).collect();
            driver.fault(&FaultPlan { faults, ..FaultPlan::default() });
        };
        let flight = down.copy(Transfer::whole(&there, m.pinned(4 * MB, 0)).unwrap()).unwrap();
        refuse(&["cuEventRecord", "cuStreamSynchronize"]);
        let other = m.card.stream(Role::Compute).unwrap();
        assert_eq!(other.record(&[]).unwrap_err().kind(), ErrorKind::Driver);
        assert_eq!(m.card.health(), Health::Good);
        let mut dst = flight.wait(DEADLINE).unwrap();
        assert!(dst.host_mut().unwrap().iter().all(|&byte| byte == 7));

        // A copy that runs and whose mark is refused: its memory is in use until it is over, and nobody sees it sooner.
        refuse(&["cuEventRecord", "cuStreamSynchronize"]);
        dst.host_mut().unwrap().fill(0);
        let rejected = down.copy(Transfer::whole(&there, dst).unwrap()).unwrap_err();
        let mut dst = rejected.dst;
        let pending = dst.pending();
        let seen = dst.host_mut().is_some();
        assert!(!seen || pending.iter().all(|event| event.is_complete()), "the copy is under way");
        dst.wait_unused(DEADLINE).unwrap();
        assert!(dst.host_mut().unwrap().iter().all(|&byte| byte == 7));
        drop((dst, rejected.error));

        // So it is where the memory is let go of at once.
        refuse(&["cuEventRecord", "cuStreamSynchronize"]);
        let src = m.pinned(4 * MB, 9).freeze();
        let dst = m.card.alloc(4 * MB, MemoryKind::Whole).unwrap();
        drop((up.copy(Transfer::whole(&src, dst).unwrap()).unwrap_err(), src));
        drop(there);
        eventually("all memory comes back", || m.card.ledger().charged() + m.cpu.ledger().charged() == 0);
        assert_eq!(m.card.health(), Health::Good);
    }
    assert_clean(&driver);
}

/// When a device is lost, memory that it may still write is never handed out: not to the host, and not to others.
#[test]
fn cuda_memory_that_a_lost_device_may_write_is_not_handed_out() {
    let Some(broken) = breakable(&slow()) else { return };
    let driver = &broken.0;
    let m = machine();
    let (down, there) = (m.card.stream(Role::Download).unwrap(), m.there(4 * MB, 7));
    // Held until the device is lost.
    let held = Fault::nth("cuMemcpyDtoHAsync_v2", 1, Effect::Hold);
    let lost = Fault::nth("cuMemGetInfo_v2", 1, Effect::Sticky(700));
    driver.fault(&FaultPlan { faults: vec![held, lost], ..FaultPlan::default() });
    let flight = down.copy(Transfer::whole(&there, m.pinned(4 * MB, 0)).unwrap()).unwrap();
    assert_eq!(m.card.memory().unwrap_err().kind(), ErrorKind::DeviceLost);
    driver.no_faults();
    let mut dst = flight.chain();
    assert_eq!(dst.wait_unused(DEADLINE).unwrap_err().kind(), ErrorKind::DeviceLost);
    assert!(dst.host_mut().is_none() && !dst.pending().is_empty());
    let buf = dst.freeze();
    assert_eq!(buf.host(DEADLINE).unwrap_err().kind(), ErrorKind::DeviceLost);
    let mut dst = buf.try_reclaim().unwrap();
    assert!(dst.host_mut().is_none(), "freezing it does not make it safe");
    let rejected = m.cpu.stream(Role::Upload).unwrap().copy(Transfer::whole(&m.pinned(8, 1).freeze(), dst).unwrap());
    let copied = rejected.map_err(|rejected| rejected.error).and_then(|flight| flight.wait(DEADLINE));
    assert_eq!(copied.unwrap_err().kind(), ErrorKind::DeviceLost);
    // It stays where it is, and taken.
    eventually("the rest comes back", || m.cpu.ledger().charged() >= 4 * MB as u64);
    assert!(driver.report().live_pinned_bytes >= 4 * MB as u64);
}

/// A donor fails under a copy by way of the host: the copy onward, on a device that works, brings stale bytes and says so.
#[test]
fn cuda_a_copy_of_what_a_failing_device_was_to_write_fails() {
    let Some(broken) = breakable(&Config::with_devices(&[64 << 20, 64 << 20]).late_micros(300_000)) else { return };
    let driver = &broken.0;
    let m = machine();
    let donor = m.backend.open(DeviceId::cuda(1)).unwrap();
    let (up, compute) = (m.card.stream(Role::Upload).unwrap(), m.card.stream(Role::Compute).unwrap());
    let down = donor.stream(Role::Download).unwrap();
    let src = m.pinned(2 * MB, 7).freeze();
    let there = copy(&*donor.stream(Role::Upload).unwrap(), &src, donor.alloc(2 * MB, MemoryKind::Arena).unwrap());
    let dst = m.card.alloc(2 * MB, MemoryKind::Arena).unwrap();
    let ring = m.pinned(2 * MB, 3);
    driver.fault(&FaultPlan::one(Fault::nth("cuMemcpyDtoHAsync_v2", 1, Effect::LateSticky(700))));
    let ring = down.copy(Transfer::whole(&there.freeze(), ring).unwrap()).unwrap().chain().freeze();
    let flight = match up.copy(Transfer::whole(&ring, dst).unwrap()) {
        Ok(flight) => flight,
        // On a busy machine the donor may have failed by now; then it is refused.
        Err(rejected) => return assert_eq!(rejected.error.kind(), ErrorKind::DeviceLost),
    };
    // Whatever comes after it on another stream of the device that works fails with it.
    let landed = flight.done().clone();
    let Ok(here) = flight.order(&*compute, DEADLINE) else {
        return assert_eq!(landed.wait(DEADLINE).unwrap_err().kind(), ErrorKind::DeviceLost);
    };
    let used = compute.record(std::slice::from_ref(&here)).unwrap();
    assert_eq!(landed.wait(DEADLINE).unwrap_err().kind(), ErrorKind::DeviceLost);
    assert_eq!(here.wait(DEADLINE).unwrap_err().kind(), ErrorKind::DeviceLost);
    assert_eq!(used.wait(DEADLINE).unwrap_err().kind(), ErrorKind::DeviceLost);
    // Once it has failed it fails what is queued next, and no more.
    let later = || compute.record(&[]).unwrap().wait(DEADLINE);
    assert!(later().is_ok() || later().is_ok());
    assert!(matches!(donor.health(), Health::Lost(_)));
    assert_eq!(m.card.health(), Health::Good);
    // And its own memory is as good as before.
    let again = copy(&*up, &src, here.try_reclaim().unwrap()).freeze();
    let back = copy(&*m.card.stream(Role::Download).unwrap(), &again, m.pinned(2 * MB, 0)).freeze();
    assert!(back.host(DEADLINE).unwrap().unwrap().iter().all(|&byte| byte == 7));
}

fn donated(devices: &Registry, subject: &Subject) -> Arc<Model> {
    let plan = subject.planner(devices.machine(), "cuda:1,*").depth(1).plan().unwrap();
    Arc::new(Loader::new(devices).load(&subject.weights, &plan).unwrap())
}

/// The same for a model that is streamed from the donor: no layer has wrong bytes without an error, whichever copy fails.
#[test]
fn cuda_layers_from_a_failing_donor_fail_and_are_never_stale() {
    let subject = Subject::plain(&llama(3, 32), 41);
    for nth in 1..=4 {
        let Some(broken) = breakable(&Config::with_devices(&[64 << 20, 64 << 20]).late_micros(300_000)) else { return };
        let driver = &broken.0;
        let devices = registry();
        let model = donated(&devices, &subject);
        let mut streamer = Streamer::new(&model).unwrap();
        let layers = model.layout().layer_ids();
        layers.clone().for_each(|layer| drop(streamer.layer(layer).unwrap()));
        driver.fault(&FaultPlan::one(Fault::nth("cuMemcpyDtoHAsync_v2", nth, Effect::LateSticky(700))));
        let mut failed = 0;
        for layer in layers {
            let Ok(guard) = streamer.layer(layer) else {
                failed += 1;
                continue;
            };
            let arrived = guard.wait(DEADLINE);
            for tensor in guard.tensors() {
                let name = &tensor.info().name;
                let mut bytes = vec![0; tensor.info().bytes as usize];
                match guard.read(name, &mut bytes) {
                    Ok(()) => assert!(bytes == subject.bytes_of(name), "stale bytes of {name}"),
                    Err(_) => failed += usize::from(arrived.is_err()),
                }
            }
        }
        assert!(failed > 0, "the fault of copy {nth} was seen by nobody");
    }
}

/// Codes that the newest drivers give are numbers like all others: those that stick make the device lost, the rest are
/// refusals, and none is an enumeration's value that does not exist.
#[test]
fn cuda_codes_that_no_binding_knows_are_errors() {
    for (code, lost) in [(226, true), (721, true), (806, true), (810, true), (913, false), (919, false), (4_000, false)]
    {
        let Some(broken) = breakable(&Config::with_devices(&[64 << 20])) else { return };
        let driver = &broken.0;
        let m = machine();
        driver.fault(&FaultPlan::one(Fault::nth("cuMemAlloc_v2", 1, Effect::Fail(code))));
        let error = m.card.alloc(4096, MemoryKind::Whole).unwrap_err();
        let (kind, health) = (error.kind(), m.card.health());
        assert_eq!((kind == ErrorKind::DeviceLost, health != Health::Good), (lost, lost), "{code}: {error}");
        driver.no_faults();
        assert_eq!(m.card.alloc(4096, MemoryKind::Whole).is_err(), lost, "{code}");
    }
}

/// The stream that every thread has its own of is refused, and where its handle is forced in, it works in one thread only:
/// elsewhere, work is refused, and what a guard held is not used again.
#[test]
fn cuda_the_per_thread_default_stream_belongs_to_one_thread() {
    let subject = Subject::plain(&llama(3, 32), 42);
    let driver = driver(&Config::with_devices(&[64 << 20]));
    {
        let context = CudaContext::new(0).unwrap();
        let devices = registry();
        let plan = subject.planner(devices.machine(), "cpu,*").depth(1).plan().unwrap();
        let model = Arc::new(Loader::new(&devices).load(&subject.weights, &plan).unwrap());
        let device = model.residency().device();
        let own = context.per_thread_stream();
        #[cfg(feature = "cudarc")]
        assert_eq!(cuda::adopt_stream(device, &own).unwrap_err().kind(), ErrorKind::Invalid);
        // SAFETY: the handle is the driver's own, and works as long as the context, which is held.
        let compute =
            unsafe { cuda::adopt_raw_stream(device, own.cu_stream().cast(), Arc::clone(&context) as _) }.unwrap();
        let mut streamer = Streamer::on(&model, Arc::clone(&compute)).unwrap();
        let guard = streamer.layer(LayerId::new(1)).unwrap();
        let slot = guard.slot();
        std::thread::spawn(move || {
            assert_eq!(compute.record(&[]).unwrap_err().kind(), ErrorKind::Invalid);
            drop(guard);
        })
        .join()
        .unwrap();
        for layer in [2, 3, 2, 3] {
            let guard = streamer.layer(LayerId::new(layer)).unwrap();
            assert_ne!(guard.slot(), slot, "a slot is filled again, whose last use nobody could mark");
        }
    }
    // What nobody could mark then is marked when the model goes.
    driver.assert_clean();
}

/// Another library resets the primary context, as `cudaDeviceReset` does, and goes on with the device: what was under way is
/// lost, waits say so at once, and nobody asks the driver for ever.
#[test]
fn cuda_a_context_that_another_library_resets_is_lost() {
    let Some(broken) = breakable(&slow()) else { return };
    let driver = &broken.0;
    let m = machine();
    let up = m.card.stream(Role::Upload).unwrap();
    let src = m.pinned(4 * MB, 1).freeze();
    driver.fault(&FaultPlan::one(Fault::nth("cuMemcpyHtoDAsync_v2", 1, Effect::Hold)));
    let flight = up.copy(Transfer::whole(&src, m.card.alloc(4 * MB, MemoryKind::Arena).unwrap()).unwrap()).unwrap();
    let mut theirs = std::ptr::null_mut();
    // SAFETY: the device is there, and the pointer is to a living handle.
    unsafe {
        assert_eq!(sys::cuDevicePrimaryCtxReset_v2(0), sys::CUresult::CUDA_SUCCESS);
        assert_eq!(sys::cuDevicePrimaryCtxRetain(&raw mut theirs, 0), sys::CUresult::CUDA_SUCCESS);
    }
    assert_eq!(flight.wait(DEADLINE).unwrap_err().kind(), ErrorKind::DeviceLost);
    assert!(matches!(m.card.health(), Health::Lost(_)));
    let asked = || driver.report().calls_of("cuEventQuery");
    let mut before = asked();
    eventually("the driver is asked for ever", || {
        std::thread::sleep(Duration::from_millis(20));
        std::mem::replace(&mut before, asked()) == asked()
    });
    drop((src, up));
    // SAFETY: retained above.
    unsafe { sys::cuDevicePrimaryCtxRelease_v2(0) }.result().unwrap();
}

/// A driver that refuses to register memory may give pinned memory of its own, a code that stands for anything loses no
/// device, and without pools memory is allocated plainly.
#[test]
fn cuda_what_a_driver_refuses_has_another_way() {
    let Some(driver) = stand_in(&Config::with_devices(&[64 << 20])) else { return };
    {
        let m = machine();
        for code in [2, 801, 999] {
            driver.fault(&FaultPlan::one(Fault::nth("cuMemHostRegister_v2", 1, Effect::Fail(code))));
            let pinned = m.cpu.alloc(2 * MB, MemoryKind::Pinned).unwrap();
            assert!(pinned.block().pinned(), "{code}: the driver has pinned memory of its own");
            let faults = ["cuMemHostRegister_v2", "cuMemHostAlloc"].map(|call| Fault::nth(call, 1, Effect::Fail(code)));
            driver.fault(&FaultPlan { faults: faults.into(), ..FaultPlan::default() });
            let plain = m.cpu.alloc(2 * MB, MemoryKind::Pinned).unwrap();
            assert!(!plain.block().pinned());
            driver.no_faults();
            assert_eq!(m.card.health(), Health::Good, "{code}");
            m.card.alloc(4096, MemoryKind::Arena).unwrap();
        }
    }
    assert_clean(&driver);
    drop(driver);
    let Some(driver) = stand_in(&Config::with_devices(&[64 << 20])) else { return };
    {
        driver.fault(&FaultPlan::one(Fault::nth("cuMemPoolCreate", 1, Effect::Fail(801)).onwards()));
        let m = machine();
        let there = m.there(MB, 4);
        let back = copy(&*m.card.stream(Role::Download).unwrap(), &there, m.pinned(MB, 0)).freeze();
        assert!(back.host(DEADLINE).unwrap().unwrap().iter().all(|&byte| byte == 4));
        assert!(driver.report().calls_of("cuMemAlloc_v2") > 0);
    }
    assert_clean(&driver);
}

/// A stream copies from and to memory of its own device; another's is refused before the driver sees it.
#[test]
fn cuda_a_stream_of_one_device_does_not_copy_for_another() {
    let Some(driver) = stand_in(&Config::with_devices(&[64 << 20, 64 << 20])) else { return };
    {
        let m = machine();
        let other = m.backend.open(DeviceId::cuda(1)).unwrap();
        let (up, there) = (m.card.stream(Role::Upload).unwrap(), other.alloc(MB, MemoryKind::Arena).unwrap());
        let rejected = up.copy(Transfer::whole(&m.pinned(MB, 1).freeze(), there).unwrap()).unwrap_err();
        assert_eq!(rejected.error.kind(), ErrorKind::Unreachable, "{rejected}");
        let error = m.card.allocate(other.ledger().charge(8).unwrap(), MemoryKind::Arena).unwrap_err();
        assert_eq!((error.kind(), other.ledger().charged()), (ErrorKind::Mismatch, MB as u64));
        drop(rejected.dst);
    }
    assert_clean(&driver);
}

unsafe extern "C" {
    safe fn fork() -> i32;
    safe fn _exit(status: i32) -> !;
    fn waitpid(process: i32, status: *mut i32, options: i32) -> i32;
}

/// Whether the mapping that holds these bytes is not copied into forks (`dc` among its flags).
fn stays_out_of_forks(bytes: &[u8]) -> bool {
    let address = bytes.as_ptr().addr();
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let range = |line: &str| {
        let (start, end) = line.split_whitespace().next()?.split_once('-')?;
        Some(usize::from_str_radix(start, 16).ok()?..usize::from_str_radix(end, 16).ok()?)
    };
    let mut lines = maps.lines().skip_while(|line| !range(line).is_some_and(|range| range.contains(&address)));
    let flags = lines.find_map(|line| line.strip_prefix("VmFlags:")).expect("flags of the mapping");
    flags.split_whitespace().any(|flag| flag == "dc")
}

/// A fork of the process has none of the devices: everything says so, nothing is freed there, and the parent goes on.
#[test]
fn cuda_a_fork_of_the_process_gets_errors() {
    let subject = Subject::plain(&llama(2, 32), 43);
    let driver = driver(&Config::with_devices(&[64 << 20]));
    {
        let m = machine();
        let (up, cpu_stream) = (m.card.stream(Role::Upload).unwrap(), m.cpu.stream(Role::Upload).unwrap());
        let (large, mut writable) = (m.pinned(4 * MB, 6).freeze(), m.pinned(4096, 1));
        let there = m.there(4096, 2);
        assert!(!large.block().pinned() || stays_out_of_forks(large.host(DEADLINE).unwrap().unwrap()));
        let devices = registry();
        let plan = subject.planner(devices.machine(), "cpu,*").depth(1).plan().unwrap();
        let model = Arc::new(Loader::new(&devices).load(&subject.weights, &plan).unwrap());
        let mut streamer = Streamer::new(&model).unwrap();
        let planner = subject.planner(devices.machine(), "cpu,*").depth(1).pinned_cap(Some(ByteSize(0)));
        let loaded = Loader::new(&devices).load(&subject.weights, &planner.plan().unwrap());
        let mut staged = Streamer::new(&Arc::new(loaded.unwrap())).unwrap();
        // Still pending at the fork, however late that is; nobody waits for it here.
        cpu_stream.occupy(DEADLINE).unwrap();
        let slept = cpu_stream.record(&[]).unwrap();
        let transfer = |dst: BufMut| Transfer::whole(&there, dst).unwrap();
        let (down, host_dst, plain) = (
            m.card.stream(Role::Download).unwrap(),
            m.pinned(4096, 0),
            m.cpu.alloc(4096, MemoryKind::Arena).unwrap().freeze(),
        );
        let plain_copy = Transfer::whole(&plain, m.cpu.alloc(4096, MemoryKind::Arena).unwrap()).unwrap();
        let mut kinds = Vec::with_capacity(16);
        match fork() {
            0 => {
                // Threads are not here; only what answers at once may be asked.
                kinds.push(large.host(DEADLINE).err().map(|error| error.kind()));
                kinds.push(m.card.memory().err().map(|error| error.kind()));
                kinds.push(m.card.alloc(8, MemoryKind::Whole).err().map(|error| error.kind()));
                kinds.push(up.record(&[]).err().map(|error| error.kind()));
                kinds.push(down.copy(transfer(host_dst)).err().map(|rejected| rejected.error.kind()));
                kinds.push(cpu_stream.copy(plain_copy).err().map(|rejected| rejected.error.kind()));
                kinds.push(streamer.layer(LayerId::new(1)).err().map(|error| error.kind()));
                kinds.push(staged.layer(LayerId::new(1)).err().map(|error| error.kind()));
                kinds.push(m.cpu.alloc(8, MemoryKind::Arena).err().map(|error| error.kind()));
                kinds.push(slept.wait(DEADLINE).err().map(|error| error.kind()));
                let right = kinds.iter().all(|kind| *kind == Some(ErrorKind::Forked)) && writable.host_mut().is_none();
                drop((large, writable, there, plain));
                _exit(if right {
                    0
                } else {
                    1 + kinds.iter().take_while(|k| **k == Some(ErrorKind::Forked)).count() as i32
                });
            }
            child => {
                let mut status = -1;
                // SAFETY: the pointer is to a living integer.
                assert_eq!(unsafe { waitpid(child, &raw mut status, 0) }, child);
                assert_eq!(status, 0, "the child saw something else (status {status:#x})");
            }
        }
        // The parent's are as they were.
        assert!(large.host(DEADLINE).unwrap().unwrap().iter().all(|&byte| byte == 6));
        copy(&*down, &there, host_dst);
        model.layout().layer_ids().for_each(|layer| streamer.layer(layer).unwrap().wait(DEADLINE).unwrap());
        drop((writable, plain_copy));
    }
    driver.assert_clean();
}
