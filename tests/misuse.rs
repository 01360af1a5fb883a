//! Every public trait that safe code can implement, implemented wrongly: a caller gets errors or wrong bytes, and never
//! memory that is read or written past its end, while someone else has it, or after it was freed.
//!
//! What a slice shows is checked by the compiler's bounds, what devices touch by the rules of the stand-in driver, and all of
//! it once more where `scripts/sanitize` runs this under other eyes. The package denies unsafe code, and this file has none.

#[cfg(all(feature = "cuda", target_os = "linux"))]
mod card;
mod support;

use std::any::Any;
use std::collections::VecDeque;
use std::fmt;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use support::compressed::Compressed;
use support::{GPU0, Subject, llama, safetensors, without_hanging};
use tensor_offload::backend::{
    Backend, Buf, BufMut, Charge, Clock, Decompress, DecompressFlight, Device, Event, Extents, Flight, Found, Health,
    Host, Joined, Kernels, Ledger, MemoryBlock, MemoryKind, PatchFlight, Rejected, Role, Route, SentPatch, Simulated,
    Stream, Transfer, Undecoded, conformance,
};
use tensor_offload::checkpoint::write_compressed;
use tensor_offload::device::{DeviceInfo, MemoryUsage, Topology};
use tensor_offload::error::Missing;
use tensor_offload::load::Progress;
use tensor_offload::registry::{LinkTiming, measure_links};
use tensor_offload::transfer::{Source, Stamp};
use tensor_offload::{
    Cancel, Checkpoint, DType, DeviceId, Error, LayerId, Loader, Machine, ModelCache, Registry, Result, Retention,
    Streamer,
};

const DEADLINE: Duration = Duration::from_secs(5);

/// What is done wrongly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lie {
    /// Nothing: the wrapper alone.
    None,
    /// Memory with fewer bytes than were asked for.
    ShortMemory,
    /// Memory of another device.
    MemoryElsewhere,
    /// The ledger of nobody.
    OtherLedger,
    /// Work that is not run, or run twice.
    NotInOneGo,
    TwiceInOneGo,
    /// Every device reaches every other, straight.
    RoutesEverywhere,
    /// No copy holds anybody up.
    HoldsNobodyUp,
    /// All are lost, or all are well.
    AlwaysLost,
    /// Another id than it was opened by.
    OtherId,
    /// Copies that are never made and are done at once.
    CopiesNothing,
    /// The destination of the copy before in place of this one's.
    SwapsDestinations,
    /// Nobody waits for anything.
    WaitsForNothing,
    /// The host waits for everything.
    HostWaits,
    /// The mark after a use is one of long ago.
    RecordsThePast,
    /// Streams of another device.
    StreamsElsewhere,
    /// Patches that are not made, on buffers that are swapped.
    PatchesNothing,
    /// Codes that are not decoded, or into buffers that are swapped.
    DecodesNothing,
    SwapsDecoded,
    /// Every second operation fails.
    FailsEverySecond,
}

const LIES: [Lie; 20] = [
    Lie::None,
    Lie::ShortMemory,
    Lie::MemoryElsewhere,
    Lie::OtherLedger,
    Lie::NotInOneGo,
    Lie::TwiceInOneGo,
    Lie::RoutesEverywhere,
    Lie::HoldsNobodyUp,
    Lie::AlwaysLost,
    Lie::OtherId,
    Lie::CopiesNothing,
    Lie::SwapsDestinations,
    Lie::WaitsForNothing,
    Lie::HostWaits,
    Lie::RecordsThePast,
    Lie::StreamsElsewhere,
    Lie::PatchesNothing,
    Lie::DecodesNothing,
    Lie::SwapsDecoded,
    Lie::FailsEverySecond,
];

#[derive(Debug)]
struct LyingBackend {
    inner: Arc<dyn Backend>,
    lie: Lie,
    told: Arc<Told>,
}

/// What lies have in common.
#[derive(Debug, Default)]
struct Told {
    /// The lie is told only while this is set, so that there is something to be wrong about.
    on: AtomicBool,
    operations: AtomicUsize,
    lies: AtomicUsize,
    /// Destinations, and an event of the past, to be handed out wrongly.
    kept: Mutex<VecDeque<BufMut>>,
    past: Mutex<Option<Event>>,
    other: Mutex<Option<Arc<dyn Device>>>,
}

impl Told {
    fn is_on(&self) -> bool {
        self.on.load(Ordering::Relaxed)
    }

    /// Whether `lie` is the one to be told now.
    fn tells(&self, lie: Lie, this: Lie) -> bool {
        let tells = lie == this && self.is_on();
        self.lies.fetch_add(usize::from(tells), Ordering::Relaxed);
        tells
    }

    fn fails(&self, lie: Lie, device: DeviceId) -> Result<()> {
        let number = self.operations.fetch_add(1, Ordering::Relaxed);
        if self.tells(lie, Lie::FailsEverySecond) && number % 2 == 1 {
            return Err(Error::DeviceLost { device, why: "every second operation fails".to_owned() });
        }
        Ok(())
    }
}

impl Backend for LyingBackend {
    fn discover(&self) -> Vec<Found> {
        self.inner.discover()
    }

    fn open(&self, id: DeviceId) -> Result<Arc<dyn Device>> {
        let inner = self.inner.open(id)?;
        let ledger = Ledger::new(id, 1 << 40);
        let device = Arc::new(LyingDevice { inner, ledger, lie: self.lie, told: Arc::clone(&self.told) });
        *self.told.other.lock().unwrap() = Some(Arc::clone(&device.inner));
        Ok(device)
    }

    fn topology(&self) -> Topology {
        self.inner.topology()
    }
}

#[derive(Debug)]
struct LyingDevice {
    inner: Arc<dyn Device>,
    ledger: Arc<Ledger>,
    lie: Lie,
    told: Arc<Told>,
}

impl LyingDevice {
    fn tells(&self, this: Lie) -> bool {
        self.told.tells(self.lie, this)
    }
}

impl Device for LyingDevice {
    fn info(&self) -> &DeviceInfo {
        self.inner.info()
    }

    fn ledger(&self) -> &Arc<Ledger> {
        if self.tells(Lie::OtherLedger) { &self.ledger } else { self.inner.ledger() }
    }

    fn memory(&self) -> Result<MemoryUsage> {
        self.inner.memory()
    }

    fn allocate(&self, charge: Charge, kind: MemoryKind) -> Result<BufMut> {
        self.told.fails(self.lie, self.inner.info().id)?;
        if self.tells(Lie::ShortMemory) {
            return self.inner.alloc((charge.bytes() / 2) as usize, kind);
        }
        if self.tells(Lie::MemoryElsewhere) {
            let other = self.told.other.lock().unwrap().clone().expect("one was opened");
            return other.alloc(charge.bytes() as usize, kind);
        }
        self.inner.allocate(charge, kind)
    }

    fn stream(&self, role: Role) -> Result<Arc<dyn Stream>> {
        let elsewhere = self.tells(Lie::StreamsElsewhere);
        let other = || self.told.other.lock().unwrap().clone().expect("one was opened");
        let inner = if elsewhere { other().stream(role)? } else { self.inner.stream(role)? };
        Ok(Arc::new(LyingStream { inner, lie: self.lie, told: Arc::clone(&self.told) }))
    }

    fn route_from(&self, source: &dyn Device) -> Route {
        if self.tells(Lie::RoutesEverywhere) { Route::Direct } else { self.inner.route_from(source) }
    }

    fn copies_block(&self, source: &MemoryBlock) -> bool {
        !self.tells(Lie::HoldsNobodyUp) && self.inner.copies_block(source)
    }

    fn kernels(&self) -> Option<&dyn Kernels> {
        Some(self)
    }

    fn read_only(&self, contents: Extents) -> Result<Option<Buf>> {
        self.told.fails(self.lie, self.inner.info().id)?;
        if self.tells(Lie::ShortMemory) {
            return self.inner.read_only(Extents::default());
        }
        if self.tells(Lie::MemoryElsewhere) {
            let other = self.told.other.lock().unwrap().clone().expect("one was opened");
            return Ok(Some(other.alloc(contents.bytes(), MemoryKind::Arena)?.freeze()));
        }
        self.inner.read_only(contents)
    }

    fn batched(&self, work: &mut dyn FnMut()) {
        if !self.tells(Lie::NotInOneGo) {
            self.inner.batched(work);
        }
        if self.tells(Lie::TwiceInOneGo) {
            work();
        }
    }

    fn trim(&self) -> Result<u64> {
        self.inner.trim()
    }

    fn health(&self) -> Health {
        if self.tells(Lie::AlwaysLost) { Health::Lost("they say".to_owned()) } else { self.inner.health() }
    }
}

impl Kernels for LyingDevice {
    fn patches(&self) -> bool {
        self.lie == Lie::PatchesNothing
    }

    fn ready(&self) -> Result<(), String> {
        Ok(())
    }

    fn decompresses(&self, stream: &dyn Stream, dtype: DType) -> Result<(), String> {
        let none = || Err("the device has no kernels".to_owned());
        self.inner.kernels().map_or_else(none, |kernels| kernels.decompresses(inner_of(stream), dtype))
    }

    fn decompress(&self, stream: &dyn Stream, work: Decompress) -> Result<DecompressFlight, Box<Undecoded>> {
        if let Err(error) = self.told.fails(self.lie, self.inner.info().id) {
            return Err(work.rejected(error));
        }
        let past = self.told.past.lock().unwrap().clone();
        if let Some(past) = past.filter(|_| self.tells(Lie::DecodesNothing)) {
            return Ok(work.launched(past));
        }
        let stream = inner_of(stream);
        let Some(kernels) = self.inner.kernels() else { return Err(work.rejected(nothing_to_lie_with(self))) };
        let DecompressFlight { weights, verdict } = kernels.decompress(stream, work)?;
        match self.tells(Lie::SwapsDecoded) {
            true => Ok(DecompressFlight { weights: verdict, verdict: weights }),
            false => Ok(DecompressFlight { weights, verdict }),
        }
    }

    fn patch<'a>(
        &self,
        _stream: &dyn Stream,
        patch: SentPatch<'a>,
        weight: BufMut,
        _at: usize,
    ) -> Result<PatchFlight<'a>> {
        self.tells(Lie::PatchesNothing);
        let done = self.told.past.lock().unwrap().clone();
        let mut kept = self.told.kept.lock().unwrap();
        kept.push_back(weight);
        let other = if kept.len() > 1 { kept.pop_front() } else { kept.pop_back() };
        let (Some(other), Some(done)) = (other, done) else {
            return Err(nothing_to_lie_with(self));
        };
        Ok(PatchFlight { weight: Flight::of(other, done), patch })
    }
}

fn inner_of(stream: &dyn Stream) -> &dyn Stream {
    (stream as &dyn Any).downcast_ref::<LyingStream>().map_or(stream, |lying| &*lying.inner)
}

fn nothing_to_lie_with(device: &LyingDevice) -> Error {
    Error::DeviceLost { device: device.inner.info().id, why: "nothing to lie with".to_owned() }
}

struct LyingStream {
    inner: Arc<dyn Stream>,
    lie: Lie,
    told: Arc<Told>,
}

impl LyingStream {
    fn tells(&self, this: Lie) -> bool {
        self.told.tells(self.lie, this)
    }

    fn past(&self) -> Option<Event> {
        self.told.past.lock().unwrap().clone()
    }
}

impl Stream for LyingStream {
    fn device(&self) -> DeviceId {
        if self.tells(Lie::OtherId) { DeviceId::DISK } else { self.inner.device() }
    }

    fn copy(&self, transfer: Transfer) -> Result<Flight, Box<Rejected>> {
        if let Err(error) = self.told.fails(self.lie, self.inner.device()) {
            return Err(transfer.rejected(error));
        }
        if let Some(past) = self.past().filter(|_| self.tells(Lie::CopiesNothing)) {
            return Ok(transfer.launched(past));
        }
        let flight = self.inner.copy(transfer)?;
        if !self.tells(Lie::SwapsDestinations) {
            return Ok(flight);
        }
        let done = flight.done().clone();
        let mut kept = self.told.kept.lock().unwrap();
        kept.push_back(flight.chain());
        let other = if kept.len() > 1 { kept.pop_front() } else { kept.pop_back() };
        Ok(Flight::of(other.expect("one was just put there"), done))
    }

    fn wait(&self, event: &Event) -> Result<Joined> {
        if self.tells(Lie::WaitsForNothing) {
            return Ok(Joined::OnDevice);
        }
        if self.tells(Lie::HostWaits) {
            return Ok(Joined::HostMustWait);
        }
        self.inner.wait(event)
    }

    fn record(&self, uses: &[Buf]) -> Result<Event> {
        self.told.fails(self.lie, self.inner.device())?;
        let event = self.inner.record(uses)?;
        let mut past = self.told.past.lock().unwrap();
        if past.is_none() {
            event.wait(DEADLINE)?;
        }
        let long_ago = past.get_or_insert_with(|| event.clone()).clone();
        Ok(if self.tells(Lie::RecordsThePast) { long_ago } else { event })
    }
}

impl fmt::Debug for LyingStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

/// Loads, streams, reads, derives, moves and lets go, whatever comes of it.
fn whole_path(devices: &Registry, subject: &Subject, told: &Told, allocation: &str) -> Result<()> {
    let loader = Loader::new(devices).workers(2).deadline(DEADLINE);
    let plan = subject.planner(devices.machine(), allocation).depth(1).compress(true).compress_resident(true).plan()?;
    // An event of the past, to lie with.
    let card = devices.device(GPU0)?;
    drop(card.stream(Role::Compute)?.record(&[])?);
    for on in [false, true] {
        told.on.store(on, Ordering::Relaxed);
        let model = Arc::new(loader.load(&subject.weights, &plan)?);
        told.on.store(true, Ordering::Relaxed);
        if let Ok(streamer) = Streamer::new(&model) {
            let mut streamer = streamer.deadline(DEADLINE);
            for layer in model.layout().layer_ids().chain([2, 0, 1].map(LayerId::new)) {
                let Ok(guard) = streamer.layer(layer) else { continue };
                let _ = guard.wait(DEADLINE);
                for tensor in guard.tensors() {
                    let mut bytes = vec![0; tensor.info().bytes as usize];
                    let _ = guard.read(&tensor.info().name, &mut bytes);
                }
            }
            let _ = streamer.verify();
        }
        for tensor in model.layout().tensors() {
            let _ = model.read(&tensor.name, &mut vec![0; tensor.bytes as usize]);
        }
        let _ = loader.derive(&model, &subject.weights, &plan).map(drop);
        let elsewhere = subject.planner(devices.machine(), "cpu,*").depth(1).plan()?;
        let _ = loader.relocate(&model, &elsewhere).map(drop);
        let cache = ModelCache::new();
        cache.insert("m", model, Retention::Unload);
        cache.unload_all();
        let _ = devices.trim();
    }
    Ok(())
}

fn lie_to(devices: impl Fn() -> Arc<dyn Backend>, lie: Lie) -> usize {
    let told = Arc::new(Told::default());
    let backend = LyingBackend { inner: devices(), lie, told: Arc::clone(&told) };
    let subject = Subject::patched(&llama(3, 16), 7);
    let registry = Registry::new([Arc::new(backend) as Arc<dyn Backend>]);
    let compressed = Compressed::new(&llama(3, 64), 8);
    let compressed = Subject::new(compressed.open().into());
    for (subject, allocation) in [
        (&subject, "cuda:0,8kb;cpu,*"),
        (&subject, "cuda:0,100%"),
        (&subject, "cuda:1,9kb;cpu,*"),
        (&compressed, "cuda:0,8kb;disk,60kb;cpu,*"),
        (&compressed, "cuda:0,*"),
    ] {
        told.on.store(false, Ordering::Relaxed);
        let outcome = whole_path(&registry, subject, &told, allocation);
        assert!(outcome.is_ok() || lie != Lie::None, "{outcome:?}");
    }
    told.on.store(false, Ordering::Relaxed);
    told.kept.lock().unwrap().clear();
    *told.other.lock().unwrap() = None;
    *told.past.lock().unwrap() = None;
    told.lies.load(Ordering::Relaxed)
}

fn described() -> Machine {
    let devices = ["cpu=64mb,link=20", "cuda:0=4mb,link=20", "cuda:1=4mb,link=20", "disk=16mb"];
    Machine::described(&devices.map(|text| text.parse().unwrap()))
}

#[test]
fn wrong_backends_get_errors_and_break_no_memory() {
    for lie in LIES {
        for clock in [Clock::Virtual, Clock::Wall] {
            let lies = without_hanging(format!("{lie:?} on the clock {clock:?}"), move || {
                lie_to(|| Arc::new(Simulated::new(described(), clock)), lie)
            });
            assert!(lies > 0 || lie == Lie::None, "{lie:?} was never told");
        }
    }
}

/// What only a wrong backend can do is told as a bug, with both sizes or both devices.
#[test]
fn memory_that_was_not_asked_for_is_told_as_a_bug() {
    for (lie, found) in [
        (Lie::ShortMemory, "cuda:0 was asked for 64 bytes and gave 32 on cuda:0"),
        (Lie::MemoryElsewhere, "cuda:0 was asked for 64 bytes and gave 64 on cuda:1"),
    ] {
        let told = Arc::new(Told { on: AtomicBool::new(true), ..Told::default() });
        let inner = Arc::new(Simulated::new(described(), Clock::Virtual));
        let backend = LyingBackend { inner, lie, told };
        let device = backend.open(GPU0).unwrap();
        let _other = backend.open(DeviceId::cuda(1)).unwrap();
        let error = device.alloc(64, MemoryKind::Arena).unwrap_err();
        assert!(matches!(&error, Error::Bug { what } if what == found), "{lie:?}: {error}");
    }
}

/// The same of memory that is only read: layers that stay in a file.
#[test]
fn files_that_are_not_the_memory_asked_for_are_told_as_a_bug() {
    let file = Compressed::new(&llama(2, 64), 9);
    let subject = Subject::new(file.open().into());
    for (lie, found) in [(Lie::ShortMemory, " and gave 0 on disk"), (Lie::MemoryElsewhere, " on cpu")] {
        let told = Arc::new(Told::default());
        let inner = Arc::new(Simulated::new(described(), Clock::Virtual));
        let backend = LyingBackend { inner, lie, told: Arc::clone(&told) };
        let devices = Registry::new([Arc::new(backend) as Arc<dyn Backend>]);
        let (_card, _other) = (devices.device(GPU0).unwrap(), devices.device(DeviceId::cuda(1)).unwrap());
        for compress in [false, true] {
            let plan = subject.planner(devices.machine(), "disk,*").compress(compress).plan().unwrap();
            told.on.store(true, Ordering::Relaxed);
            let error = Loader::new(&devices).load(&subject.weights, &plan).unwrap_err();
            told.on.store(false, Ordering::Relaxed);
            let Error::Bug { what } = &error else { panic!("{lie:?}: {error}") };
            assert!(what.starts_with("disk was asked for ") && what.ends_with(found), "{lie:?}: {error}");
        }
        *told.other.lock().unwrap() = None;
    }
}

/// A backend of another crate may have only what streams must have: it conforms, and its links can be measured.
#[test]
fn streams_that_cannot_be_kept_busy_conform() {
    let inner = Arc::new(Simulated::new(described(), Clock::Wall));
    let backend = Arc::new(LyingBackend { inner, lie: Lie::None, told: Arc::default() });
    let (cpu, card) = (backend.open(DeviceId::CPU).unwrap(), backend.open(GPU0).unwrap());
    let error = card.stream(Role::Compute).unwrap().occupy(DEADLINE).unwrap_err();
    assert!(matches!(&error, Error::Missing(Missing::Occupy { device: GPU0 })), "{error}");
    conformance::check(&*card, &*cpu);
    drop((cpu, card));
    let links = measure_links(&Registry::new([backend as Arc<dyn Backend>]), &LinkTiming::quick()).unwrap().links;
    assert!(links.iter().any(|link| link.to == GPU0), "{links:?}");
}

#[cfg(all(feature = "cuda", target_os = "linux"))]
#[test]
fn cuda_wrong_wrappers_get_errors_and_break_no_memory() {
    use cuda_standin::{Config, Rule};
    use tensor_offload::backend::{Cuda, Host};

    /// CUDA devices, and the host's disk.
    #[derive(Debug)]
    struct Both(Cuda, Host);

    impl Backend for Both {
        fn discover(&self) -> Vec<Found> {
            let is_disk = |found: &Found| matches!(found, Found::Here(info) if info.id == DeviceId::DISK);
            self.0.discover().into_iter().chain(self.1.discover().into_iter().filter(is_disk)).collect()
        }

        fn open(&self, id: DeviceId) -> Result<Arc<dyn Device>> {
            if id == DeviceId::DISK { self.1.open(id) } else { self.0.open(id) }
        }
    }

    for lie in LIES {
        let config = Config::with_devices(&[64 << 20, 64 << 20]).late_micros(200).seed(6);
        let Some(driver) = card::stand_in(&config) else { return };
        without_hanging(format!("{lie:?}"), move || {
            let cuda = || Cuda::new().context_size(tensor_offload::ByteSize(0));
            lie_to(|| Arc::new(Both(cuda(), Host::new())), lie)
        });
        card::wait_until_closed(&driver, card::DEADLINE);
        // A stream that waits for nothing has devices race for their own memory, and a mark of long ago has them do so later: the
        // bytes are wrong, which is what such a stream is for. What is left is the memory itself.
        let memory = |rule: Rule| {
            !matches!(
                rule,
                Rule::Unordered | Rule::ReusedUnordered | Rule::Leak | Rule::NoPeerAccess | Rule::SourceChanged
            )
        };
        let broken: Vec<_> = driver.report().violations.into_iter().filter(|v| memory(v.rule)).collect();
        assert!(broken.is_empty(), "{lie:?}: {broken:?}");
    }
}

/// A source that says one thing and gives another.
#[derive(Debug)]
struct LyingSource {
    bytes: Vec<u8>,
    stamp: Stamp,
    reads: AtomicUsize,
    lie: usize,
}

impl Source for LyingSource {
    fn path(&self) -> &Path {
        Path::new("lies.safetensors")
    }

    fn stamp(&self) -> Stamp {
        // Longer, shorter, or another each time.
        match self.lie {
            0 => Stamp::unique(u64::MAX),
            1 => Stamp::unique(8),
            2 => Stamp::unique(self.bytes.len() as u64),
            _ => self.stamp,
        }
    }

    fn read_at(&self, at: u64, dst: &mut [u8]) -> Result<()> {
        let read = self.reads.fetch_add(1, Ordering::Relaxed);
        let from = usize::try_from(at).unwrap_or(usize::MAX).min(self.bytes.len());
        let part = &self.bytes[from..self.bytes.len().min(from.saturating_add(dst.len()))];
        dst[..part.len()].copy_from_slice(part);
        match self.lie {
            // Nothing is read, and all is well; or it fails now and then; or the bytes are others.
            3 if read > 2 => dst.fill(0xff),
            4 if read % 3 == 2 => return Err(Error::TimedOut { what: "nothing".to_owned(), after: DEADLINE }),
            5 => dst.reverse(),
            _ => {}
        }
        Ok(())
    }

    #[allow(clippy::reversed_empty_ranges, reason = "a lie")]
    fn read_within(&self, at: u64, len: usize, buffer: &mut [u8]) -> Result<Range<usize>> {
        self.read_at(at, &mut buffer[..len])?;
        // Beyond the buffer, backwards, or too many.
        Ok(match self.lie {
            7 => buffer.len()..buffer.len() + len,
            8 => usize::MAX..0,
            9 => 0..usize::MAX,
            _ => 0..len,
        })
    }

    fn may_stay(&self) -> bool {
        self.lie > 9
    }

    fn stored(&self, _at: u64, len: u64) -> u64 {
        if self.lie > 9 { u64::MAX } else { len }
    }
}

#[test]
fn wrong_sources_get_errors() {
    let folder = tempfile::tempdir().unwrap();
    let plain = safetensors(&llama(3, 64), 3);
    let compressed = folder.path().join("compressed.safetensors");
    let checkpoint = Checkpoint::from_bytes("plain", plain.clone()).unwrap();
    let specs: Vec<_> = llama(3, 64);
    write_compressed(&compressed, &specs, &Default::default(), |tensor, out| {
        let id = checkpoint.find(&specs[tensor].name).unwrap();
        let mut bytes = vec![0; out.left() as usize];
        checkpoint.read(id, &mut bytes)?;
        out.put(&bytes)
    })
    .unwrap();
    let files = [plain, std::fs::read(compressed).unwrap()];
    for (lie, bytes) in (0..11).flat_map(|lie| files.iter().map(move |bytes| (lie, bytes.clone()))) {
        let stamp = Stamp::unique(bytes.len() as u64);
        let path = folder.path().join("model.safetensors");
        std::fs::write(&path, &bytes).unwrap();
        let source = Arc::new(LyingSource { bytes, stamp, reads: AtomicUsize::new(0), lie });
        let opened = Checkpoint::open_with(&path, |_| Ok(Arc::clone(&source) as Arc<dyn Source>));
        let Ok(checkpoint) = opened else { continue };
        let devices = Registry::described(described(), Clock::Virtual);
        let weights = tensor_offload::Weights::new(checkpoint);
        let planner = tensor_offload::Planner::new(weights.layout(), devices.machine()).compute(GPU0);
        let planner = planner.allocation("cuda:0,80kb;disk,60kb;cpu,*".parse().unwrap());
        for plan in [planner.clone().plan().unwrap(), planner.compress(true).plan().unwrap()] {
            let loaded = Loader::new(&devices).load(&weights, &plan).map(Arc::new);
            assert!(loaded.is_ok() || devices.opened().iter().all(|device| device.ledger().charged() == 0));
            let Ok(mut streamer) = loaded.and_then(|model| Streamer::new(&model)) else { continue };
            for layer in weights.layout().layer_ids() {
                let _ = streamer.layer(layer).and_then(|guard| guard.wait(DEADLINE));
            }
            let _ = streamer.verify();
        }
        // And layers that stay there, of which it says anything.
        let devices = Registry::new([Arc::new(Host::new().disk_folder(folder.path())) as Arc<dyn Backend>]);
        let planner = tensor_offload::Planner::new(weights.layout(), devices.machine()).compute(DeviceId::CPU);
        let plan = planner.allocation("disk,*".parse().unwrap()).plan().unwrap();
        let Ok(model) = Loader::new(&devices).load(&weights, &plan) else { continue };
        let mut streamer = Streamer::new(&Arc::new(model)).unwrap();
        let layers: Vec<_> = weights.layout().layer_ids().collect();
        let read = layers.iter().map(|&layer| streamer.layer(layer).map(drop)).filter(Result::is_ok).count();
        assert!(lie <= 9 || read == layers.len(), "{lie}: {read} layers");
    }
}

/// Progress that is told of each module, and panics or cancels at one.
struct Interrupts {
    at: usize,
    panics: bool,
    cancel: Cancel,
    told: AtomicUsize,
}

impl Progress for Interrupts {
    fn advance(&self, _done: u64, _of: u64) {
        if self.told.fetch_add(1, Ordering::Relaxed) == self.at {
            self.cancel.cancel();
            assert!(!self.panics, "a progress that panics");
        }
    }
}

#[test]
fn progress_that_panics_or_cancels_leaves_nothing() {
    let subject = Subject::patched(&llama(3, 16), 8);
    for panics in [false, true] {
        for at in [0, 1, 5, 12] {
            let devices = Registry::described(described(), Clock::Wall);
            let plan = subject.planner(devices.machine(), "cuda:0,8kb;cpu,*").depth(1).plan().unwrap();
            let cancel = Cancel::new();
            let progress = Interrupts { at, panics, cancel: cancel.clone(), told: AtomicUsize::new(0) };
            let load = || {
                let loader = Loader::new(&devices).workers(2).deadline(DEADLINE).progress(&progress).cancel(&cancel);
                loader.load(&subject.weights, &plan).map(drop)
            };
            let outcome = catch_unwind(AssertUnwindSafe(load));
            assert!(outcome.is_err() == panics || outcome.is_ok_and(|outcome| outcome.is_err()));
            support::comes_back(&devices);
        }
    }
}
