//! The driver that a test runs over: the stand-in as a machine of the test's choice, or the driver that
//! `TENSOR_OFFLOAD_LIBCUDA` names, a real card's for example, as it is.
#![allow(dead_code, reason = "each test file uses its part")]

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::ops::Deref;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use cuda_standin::{Config, Effect, Fault, FaultPlan, Rule, Session, session};
use cudarc::driver::CudaStream;
use tensor_offload::backend::{Backend, Cuda, Device, Found, Health, Host, Stream};
use tensor_offload::device::DeviceKind;
use tensor_offload::{DeviceId, Error, Registry, Result, cuda};

pub(crate) const DEADLINE: Duration = Duration::from_secs(20);

static NAMED: Mutex<()> = Mutex::new(());

/// What a test has to itself while it runs.
pub(crate) enum Driver {
    StandIn(StandIn),
    Named(MutexGuard<'static, ()>),
}

/// The stand-in, for one test at a time. It ends when no device of the test's is open any more: the last handle of a context
/// goes a moment after its device, and in the next session it would be that session's context that is given back.
pub(crate) struct StandIn(Session);

/// How long a thread that is being started may have no name of its own, on a machine that is busy.
const STARTING: Duration = Duration::from_secs(3);

/// How long the stand-in waits for devices that a test keeps open.
const KEPT_OPEN: Duration = Duration::from_secs(2);

impl Deref for StandIn {
    type Target = Session;

    fn deref(&self) -> &Session {
        &self.0
    }
}

impl<'a> From<&'a StandIn> for Option<&'a Session> {
    fn from(stand_in: &'a StandIn) -> Option<&'a Session> {
        Some(&stand_in.0)
    }
}

impl Drop for StandIn {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            wait_until_closed(&self.0, KEPT_OPEN);
        }
    }
}

/// Whether the tests run over a driver that the environment names.
pub(crate) fn named() -> bool {
    std::env::var_os("TENSOR_OFFLOAD_LIBCUDA").is_some()
}

/// The driver: the stand-in as `config` says, or the one named, whatever it has.
pub(crate) fn driver(config: &Config) -> Driver {
    match named() {
        true => Driver::Named(NAMED.lock().unwrap_or_else(PoisonError::into_inner)),
        false => Driver::StandIn(StandIn(session(config))),
    }
}

/// The stand-in, for what only it can do; none, with a word, over another driver.
pub(crate) fn stand_in(config: &Config) -> Option<StandIn> {
    if named() {
        let thread = std::thread::current();
        eprintln!("skipped {}: its faults, links or machine need the stand-in", thread.name().unwrap_or("a test"));
        return None;
    }
    Some(StandIn(session(config)))
}

/// A stream of cudarc's, of the primary context of the device, as one of the library's.
#[expect(unsafe_code, reason = "a raw handle crosses the border")]
pub(crate) fn adopted(device: &Arc<dyn Device>, stream: &Arc<CudaStream>) -> Arc<dyn Stream> {
    // SAFETY: cudarc's contexts are primary ones, and the `Arc` holds the stream.
    unsafe { cuda::adopt_raw_stream(device, stream.cu_stream().cast(), Arc::clone(stream) as _) }.unwrap()
}

/// Whether there are so many devices; with a word where the driver that is named has fewer.
pub(crate) fn has_devices(count: usize) -> bool {
    let enough = devices().len() >= count;
    if !enough {
        assert!(named(), "the stand-in has as many as it was told");
        let thread = std::thread::current();
        eprintln!("skipped {}: the driver has fewer than {count} devices", thread.name().unwrap_or("a test"));
    }
    enough
}

/// Whether the driver has these calls, which a test makes itself; with a word where the one named lacks one.
#[expect(unsafe_code, reason = "opening a library")]
pub(crate) fn has_calls(calls: &[&str]) -> bool {
    let Some(library) = std::env::var_os("TENSOR_OFFLOAD_LIBCUDA") else { return true };
    // SAFETY: it is the driver that the test runs over; its initialisers run anyway.
    let library = unsafe { libloading::Library::new(library) }.expect("the driver that is named");
    // SAFETY: nothing is called.
    let lacks = |call: &&&str| unsafe { library.get::<*const ()>(call.as_bytes()) }.is_err();
    let missing = calls.iter().find(lacks);
    if let Some(call) = missing {
        let thread = std::thread::current();
        eprintln!("skipped {}: the driver has no {call}", thread.name().unwrap_or("a test"));
    }
    missing.is_none()
}

/// The driver's devices and this host.
pub(crate) fn registry() -> Registry {
    registry_of(Cuda::new())
}

pub(crate) fn registry_of(cuda: Cuda) -> Registry {
    Registry::new([Arc::new(cuda) as Arc<dyn Backend>, Arc::new(Host::new())])
}

/// The numbers of calls to fail: each of the first, where each call is another, then about forty spread over the rest.
pub(crate) fn spread(first: u64, calls: u64) -> impl Iterator<Item = u64> {
    (1..=first).chain((first + 1..=calls).step_by(usize::try_from(calls / 40).unwrap().max(1)))
}

/// Runs `path` over the stand-in as `config` says, with one call of the driver after another failing in each of these ways, the
/// `first` ones all. Its outcome may be an error or right: nothing hangs or keeps memory.
pub(crate) fn whatever_call_fails(
    config: &Config,
    effects: &[Effect],
    first: u64,
    registry: impl Fn() -> Registry,
    path: impl Fn(&Registry) -> Result<()>,
) {
    let calls: u64 = {
        let Some(cuda) = stand_in(config) else { return };
        path(&registry()).unwrap();
        wait_until_closed(&cuda, DEADLINE);
        cuda.report().calls.values().sum()
    };
    for &effect in effects {
        for nth in spread(first, calls + 20) {
            let Some(cuda) = stand_in(config) else { return };
            cuda.fault(&FaultPlan::one(Fault::any(nth, effect)));
            let devices = registry();
            let outcome = path(&devices);
            if let Err(Error::TimedOut { what, .. }) = &outcome {
                panic!("{effect:?} at call {nth}: hung on {what}");
            }
            assert_given_back(&devices, &cuda, &format!("{effect:?} at call {nth}, {outcome:?}"));
            drop(devices);
            assert_at_most_one_leak(&cuda, &format!("{effect:?} at call {nth}"));
        }
    }
}

/// The CUDA devices that there are.
pub(crate) fn devices() -> Vec<DeviceId> {
    let found = Cuda::new().discover().into_iter();
    let cuda = found.filter_map(|found| match found {
        Found::Here(info) if info.id.kind() == DeviceKind::Cuda => Some(info.id),
        _ => None,
    });
    cuda.collect()
}

impl Driver {
    /// Zero hazards and nothing left, as far as the driver can tell. The backend lets go of memory when it has seen
    /// the last event of its use, a moment after the last handle.
    pub(crate) fn assert_clean(&self) {
        if let Driver::StandIn(cuda) = self {
            assert_clean(cuda);
        }
    }
}

/// Waits until nothing is taken of any device: memory is let go of when the last event of its use has been seen, a moment
/// after the last handle. Where a device was lost, the host keeps what the driver has pinned still: nobody can have it let
/// go of, so it is never unmapped.
pub(crate) fn assert_given_back<'a>(devices: &Registry, cuda: impl Into<Option<&'a Session>>, what: &str) {
    let cuda = cuda.into();
    devices.opened().iter().for_each(|device| assert_comes_to(devices, cuda, device.id(), 0, what));
}

/// The same for one device, of which so much is to be taken.
pub(crate) fn assert_comes_to<'a>(
    devices: &Registry,
    cuda: impl Into<Option<&'a Session>>,
    id: DeviceId,
    bytes: u64,
    what: &str,
) {
    let (device, cuda) = (devices.device(id).unwrap(), cuda.into());
    // It may be lost as late as when the last memory is let go of.
    let lost = || devices.opened().iter().any(|device| device.health() != Health::Good);
    let pinned = || cuda.filter(|_| id == DeviceId::CPU && lost()).map_or(0, |cuda| cuda.report().live_pinned_bytes);
    let wanted = || bytes.max(pinned());
    let until = Instant::now() + DEADLINE;
    while device.ledger().charged() != wanted() {
        let (taken, wanted) = (device.ledger().charged(), wanted());
        assert!(Instant::now() < until, "{what}: {taken} bytes of {id} are taken, not {wanted}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Waits until so many bytes are pinned: what was let go of comes back when the last event of its use has been seen.
pub(crate) fn assert_pinned_comes_to(cuda: &Session, bytes: u64) {
    let until = Instant::now() + DEADLINE;
    while cuda.report().live_pinned_bytes != bytes {
        let pinned = cuda.report().live_pinned_bytes;
        assert!(Instant::now() < until, "{pinned} bytes are pinned, not {bytes}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Zero hazards and nothing left on the stand-in.
pub(crate) fn assert_clean(cuda: &Session) {
    let until = Instant::now() + DEADLINE;
    while !cuda.report().is_clean() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(2));
    }
    wait_until_closed(cuda, Duration::from_millis(500));
    cuda.report().assert_clean();
}

/// After a call that failed, which may be the one that gives a thing back: that thing, and no other, stays. Memory is missed
/// twice then, by its pool and by its context.
pub(crate) fn assert_at_most_one_leak(cuda: &Session, what: &str) {
    wait_until_closed(cuda, DEADLINE);
    let report = cuda.report();
    let of = |leaks: bool| {
        let violations = report.violations.iter().filter(move |violation| (violation.rule == Rule::Leak) == leaks);
        violations.map(|violation| violation.count).sum::<u64>()
    };
    assert!(of(false) == 0 && of(true) <= 2, "{what}: {:?}", report.violations);
}

/// The last handle of a context goes a moment after the devices, and must not go in the session after this one. A context
/// that is lost is never closed: then until no thread of its device's is left. What a test keeps open is not closed at all: no
/// longer than `most`. Of a driver that is named, only its devices' threads tell.
pub(crate) fn wait_until_closed<'a>(cuda: impl Into<Option<&'a Session>>, most: Duration) {
    let (until, cuda) = (Instant::now() + most, cuda.into());
    // HIP has no contexts that anyone could close.
    let has_contexts = |cuda: &Session| {
        let report = cuda.report();
        report.live_contexts > 0 || report.calls_of("hipInit") > 0
    };
    let may_be_open = || cuda.is_none_or(has_contexts) && has_device_threads();
    while may_be_open() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// How the names of devices begin that the stand-in has drivers for.
const KINDS: [&str; 5] = ["cuda:", "hip:", "corex:", "npu:", "mlu:"];

/// Threads that had the name of the one that looked at them, which they were perhaps started by, and since when.
static UNNAMED: Mutex<BTreeMap<(OsString, String), Instant>> = Mutex::new(BTreeMap::new());

/// Whether this process has threads that call the driver for an open device: its reaper and its lanes. Only Linux tells.
fn has_device_threads() -> bool {
    let name = |thread: &Path| std::fs::read_to_string(thread.join("comm")).unwrap_or_default();
    let Ok(threads) = std::fs::read_dir("/proc/self/task") else { return true };
    let own = std::fs::read_link("/proc/thread-self").ok().and_then(|path| Some(path.file_name()?.to_owned()));
    let starter = name(Path::new("/proc/thread-self"));
    let names: Vec<_> = threads.flatten().map(|thread| (thread.file_name(), name(&thread.path()))).collect();
    // A thread that has only just been started still has the name of the one that started it. One that keeps it is another test's,
    // called alike in the first 15 letters, which are all that a thread's name has.
    let mut unnamed = UNNAMED.lock().unwrap_or_else(PoisonError::into_inner);
    unnamed.retain(|(id, of), _| *of != starter || names.iter().any(|(now, name)| (now, name) == (id, of)));
    names.into_iter().any(|(id, name)| {
        let is_starting = name == starter && Some(&id) != own.as_ref();
        KINDS.iter().any(|kind| name.starts_with(kind) || name.contains(&format!(" to {kind}")))
            || (is_starting && unnamed.entry((id, name)).or_insert_with(Instant::now).elapsed() < STARTING)
    })
}
