//! A described machine whose operations are counted, whose copies are listed, and of which one can be made to fail.

use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use tensor_offload::backend::{
    Backend, Buf, BufMut, Charge, Clock, Countdown, Device, Event, Faulty, Fence, FenceState, Flight, Found, Health,
    Joined, Ledger, MemoryKind, Rejected, Role, Route, Simulated, Stream, Transfer,
};
use tensor_offload::device::{DeviceInfo, MemoryUsage, Topology};
use tensor_offload::{DeviceId, Error, Machine, Registry, Result};

/// A registry over a described machine whose host memory is described too, so that staging is counted there.
pub(crate) struct Watched {
    pub(crate) registry: Registry,
    pub(crate) simulated: Arc<Simulated>,
    pub(crate) countdown: Countdown,
    pub(crate) copies: Copies,
}

impl Watched {
    pub(crate) fn new(machine: Machine, clock: Clock) -> Watched {
        let (simulated, copies) = (Arc::new(Simulated::new(machine, clock)), Copies::default());
        let countdown = Countdown::new();
        let listing = Listing { inner: Arc::clone(&simulated), copies: copies.clone() };
        let backend: Arc<dyn Backend> = Arc::new(Faulty::new(listing, countdown.clone()));
        Watched { registry: Registry::new([backend]), simulated, countdown, copies }
    }

    pub(crate) fn machine(&self) -> &Machine {
        self.registry.machine()
    }

    pub(crate) fn peak(&self, id: DeviceId) -> u64 {
        self.registry.device(id).unwrap().ledger().peak()
    }
}

/// A piece of a copy.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Copied {
    /// What the stream that copied it is for.
    pub(crate) role: Role,
    pub(crate) from: DeviceId,
    pub(crate) to: DeviceId,
    pub(crate) bytes: u64,
}

/// The copies so far.
#[derive(Clone, Debug, Default)]
pub(crate) struct Copies(Arc<Mutex<Seen>>);

#[derive(Debug, Default)]
struct Seen {
    pieces: Vec<Copied>,
    /// How many copies to go until one fails after it was queued, and what it waits for until then.
    spoil: Option<usize>,
    spoilt_after: Option<Event>,
    /// Whether that copy is queued.
    is_spoilt: bool,
    /// Whether compute streams leave waiting to the host.
    host_waits: bool,
    /// A device that will fail, and how many copies to go until then.
    losing: Option<(DeviceId, usize)>,
    /// How many operations to go until one panics.
    panic: Option<u64>,
    /// What copies wait for that are to be held.
    held: Option<Event>,
}

impl Copies {
    /// All pieces since the last time.
    pub(crate) fn take(&self) -> Vec<Copied> {
        std::mem::take(&mut self.seen().pieces)
    }

    /// Lets the n-th copy from now on, the first being 1, be queued and fail a little later.
    pub(crate) fn spoil_nth(&self, n: usize) {
        let mut seen = self.seen();
        (seen.spoil, seen.spoilt_after, seen.is_spoilt) = (Some(n), None, false);
    }

    /// The same, but it does not fail before [`let_go`](Copies::let_go), on either clock.
    pub(crate) fn spoil_nth_when_let_go(&self, n: usize) {
        let mut seen = self.seen();
        let gate = Event::new(Arc::new(Gate::default()));
        (seen.spoil, seen.spoilt_after, seen.is_spoilt) = (Some(n), Some(gate), false);
    }

    /// Lets a device fail for good when the n-th copy from now on is queued, whose event, like all others, says nothing
    /// of that.
    pub(crate) fn lose_at_nth(&self, device: DeviceId, n: usize) {
        self.seen().losing = Some((device, n));
    }

    /// Lets the n-th operation from now on panic.
    pub(crate) fn panic_at_nth(&self, n: u64) {
        self.seen().panic = Some(n);
    }

    /// Counts an operation of a device or stream.
    fn operation(&self) {
        let mut seen = self.seen();
        seen.panic = seen.panic.map(|left| left.wrapping_sub(1));
        let panics = seen.panic == Some(0);
        drop(seen);
        assert!(!panics, "an operation on purpose");
    }

    fn is_lost(&self, device: DeviceId) -> bool {
        self.seen().losing == Some((device, 0))
    }

    /// Lets no copy begin from now on until [`let_go`](Copies::let_go), on a wall clock.
    pub(crate) fn hold(&self) {
        self.seen().held = Some(Event::new(Arc::new(Gate::default())));
    }

    /// Lets those begin that were held, and the one fail that was to fail now, if it is queued by now.
    pub(crate) fn let_go(&self) {
        let mut seen = self.seen();
        let held = [seen.held.take(), seen.spoilt_after.clone().filter(|_| seen.is_spoilt)];
        held.iter().flatten().filter_map(Event::downcast::<Gate>).for_each(Gate::open);
    }

    /// Makes compute streams unable to wait for events.
    pub(crate) fn let_the_host_wait(&self) {
        self.seen().host_waits = true;
    }

    /// Lists a copy; whether it is to fail.
    fn note(&self, role: Role, transfer: &Transfer) -> bool {
        let mut seen = self.seen();
        let to = transfer.dst().device();
        let piece =
            |p: &tensor_offload::backend::Piece| Copied { role, from: p.src.device(), to, bytes: p.from.len() as u64 };
        seen.pieces.extend(transfer.pieces().iter().map(piece));
        seen.spoil = seen.spoil.map(|left| left.wrapping_sub(1));
        seen.losing = seen.losing.map(|(device, left)| (device, left.saturating_sub(1)));
        seen.is_spoilt |= seen.spoil == Some(0);
        seen.spoil == Some(0)
    }

    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.0.lock().unwrap()
    }
}

#[derive(Debug)]
struct Listing {
    inner: Arc<Simulated>,
    copies: Copies,
}

impl Backend for Listing {
    fn discover(&self) -> Vec<Found> {
        self.inner.discover()
    }

    fn open(&self, id: DeviceId) -> Result<Arc<dyn Device>> {
        Ok(Arc::new(ListingDevice { inner: self.inner.open(id)?, copies: self.copies.clone() }))
    }

    fn topology(&self) -> Topology {
        self.inner.topology()
    }
}

#[derive(Debug)]
struct ListingDevice {
    inner: Arc<dyn Device>,
    copies: Copies,
}

impl Device for ListingDevice {
    fn info(&self) -> &DeviceInfo {
        self.inner.info()
    }

    fn ledger(&self) -> &Arc<Ledger> {
        self.inner.ledger()
    }

    fn memory(&self) -> Result<MemoryUsage> {
        self.copies.operation();
        self.inner.memory()
    }

    fn allocate(&self, charge: Charge, kind: MemoryKind) -> Result<BufMut> {
        self.copies.operation();
        self.inner.allocate(charge, kind)
    }

    fn allocate_near(&self, charge: Charge, kind: MemoryKind, near: DeviceId) -> Result<BufMut> {
        self.copies.operation();
        self.inner.allocate_near(charge, kind, near)
    }

    fn stream(&self, role: Role) -> Result<Arc<dyn Stream>> {
        self.copies.operation();
        Ok(Arc::new(ListingStream { inner: self.inner.stream(role)?, role, copies: self.copies.clone() }))
    }

    fn route_from(&self, source: &dyn Device) -> Route {
        self.inner.route_from(source)
    }

    fn trim(&self) -> Result<u64> {
        self.copies.operation();
        self.inner.trim()
    }

    fn health(&self) -> Health {
        match self.copies.is_lost(self.inner.id()) {
            true => Health::Lost("it failed under a copy".to_owned()),
            false => self.inner.health(),
        }
    }
}

struct ListingStream {
    inner: Arc<dyn Stream>,
    role: Role,
    copies: Copies,
}

impl Stream for ListingStream {
    fn device(&self) -> DeviceId {
        self.inner.device()
    }

    fn copy(&self, transfer: Transfer) -> Result<Flight, Box<Rejected>> {
        self.copies.operation();
        if self.copies.note(self.role, &transfer) {
            let after = self.copies.seen().spoilt_after.clone();
            let spoilt = Spoilt::new(self.device(), transfer.waits().into_iter().chain(after).collect());
            return Ok(transfer.launched(Event::new(Arc::new(spoilt))));
        }
        let held = self.copies.seen().held.clone();
        if let Some(error) = held.and_then(|gate| self.inner.wait(&gate).err()) {
            return Err(transfer.rejected(error));
        }
        self.inner.copy(transfer)
    }

    fn wait(&self, event: &Event) -> Result<Joined> {
        if self.role == Role::Compute && self.copies.seen().host_waits {
            return Ok(Joined::HostMustWait);
        }
        self.inner.wait(event)
    }

    fn record(&self, uses: &[Buf]) -> Result<Event> {
        self.copies.operation();
        self.inner.record(uses)
    }

    fn occupy(&self, time: Duration) -> Result<()> {
        self.inner.occupy(time)
    }
}

impl fmt::Debug for ListingStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

/// The event of a copy that was queued and fails a little later, without having copied anything.
struct Spoilt {
    at: Instant,
    waits: Vec<Event>,
    cause: Arc<Error>,
}

impl Spoilt {
    fn new(device: DeviceId, waits: Vec<Event>) -> Spoilt {
        let cause = Error::DeviceLost { device, why: "this copy was to fail".to_owned() };
        Spoilt { at: Instant::now() + Duration::from_millis(2), waits, cause: Arc::new(cause) }
    }
}

#[expect(unsafe_code, reason = "a fence's word is trusted")]
// SAFETY: it stands for no work at all, and says that it is over only when all that it waited for is.
unsafe impl Fence for Spoilt {
    fn state(&self) -> FenceState {
        let over = Instant::now() >= self.at && self.waits.iter().all(Event::is_over);
        if over { FenceState::Failed(Arc::clone(&self.cause)) } else { FenceState::Pending }
    }

    fn wait(&self, deadline: Duration) -> FenceState {
        let until = Instant::now() + deadline;
        std::thread::sleep(self.at.min(until).saturating_duration_since(Instant::now()));
        for event in &self.waits {
            let _ = event.wait(until.saturating_duration_since(Instant::now()));
        }
        self.state()
    }
}

/// The event of something that the test decides about.
#[derive(Default)]
struct Gate {
    open: Mutex<bool>,
    opened: Condvar,
}

impl Gate {
    fn open(&self) {
        *self.open.lock().unwrap() = true;
        self.opened.notify_all();
    }
}

#[expect(unsafe_code, reason = "a fence's word is trusted")]
// SAFETY: it stands for no work at all.
unsafe impl Fence for Gate {
    fn state(&self) -> FenceState {
        if *self.open.lock().unwrap() { FenceState::Done } else { FenceState::Pending }
    }

    fn wait(&self, deadline: Duration) -> FenceState {
        drop(self.opened.wait_timeout_while(self.open.lock().unwrap(), deadline, |open| !*open).unwrap());
        self.state()
    }
}
