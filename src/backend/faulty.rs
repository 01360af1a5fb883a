//! A backend that fails one operation on purpose, to test that no failure leaks anything.

use std::any::{Any, TypeId};
use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::{
    Backend, BufMut, Charge, Decompress, DecompressFlight, Dequantise, Device, Event, Extents, FileReads, Flight,
    Found, Health, Joined, Kernels, Ledger, MemoryBlock, MemoryKind, PatchFlight, Rejected, Role, Route, SentPatch,
    Stream, Transfer, Undecoded,
};
use crate::backend::Buf;
use crate::device::{DeviceId, DeviceInfo, MemoryUsage, Topology};
use crate::dtype::DType;
use crate::error::{Error, Result};

/// A kind of operation that a [`Countdown`] counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
#[allow(missing_docs, reason = "each is the method of that name")]
pub enum Operation {
    Open,
    Memory,
    Allocate,
    ReadOnly,
    Stream,
    Trim,
    Copy,
    Wait,
    Record,
    Occupy,
    Patch,
    Dequantise,
    Decompress,
}

/// Counts the operations of a [`Faulty`] backend and fails the n-th.
#[derive(Clone, Debug, Default)]
pub struct Countdown(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    calls: u64,
    by_operation: BTreeMap<Operation, u64>,
    fail_at: Option<u64>,
}

impl Countdown {
    /// A countdown that counts, but fails nothing.
    pub fn new() -> Countdown {
        Countdown::default()
    }

    /// Makes the n-th operation from now on fail, counted from 1.
    pub fn fail_nth(&self, n: u64) {
        let mut state = self.state();
        state.fail_at = Some(state.calls + n);
    }

    /// The number of operations so far.
    pub fn calls(&self) -> u64 {
        self.state().calls
    }

    /// The number of operations of one kind so far.
    pub fn calls_of(&self, operation: Operation) -> u64 {
        self.state().by_operation.get(&operation).copied().unwrap_or(0)
    }

    fn count(&self, operation: Operation, device: DeviceId) -> Result<()> {
        let mut state = self.state();
        state.calls += 1;
        *state.by_operation.entry(operation).or_default() += 1;
        if state.fail_at == Some(state.calls) {
            let why = format!("{operation:?} failed on purpose, as operation {}", state.calls);
            return Err(Error::DeviceLost { device, why });
        }
        Ok(())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A backend whose operations a [`Countdown`] counts and can fail.
#[derive(Debug)]
pub struct Faulty<B> {
    inner: B,
    countdown: Countdown,
}

impl<B: Backend> Faulty<B> {
    /// Wraps `inner`, whose operations `countdown` counts.
    pub fn new(inner: B, countdown: Countdown) -> Faulty<B> {
        Faulty { inner, countdown }
    }
}

impl<B: Backend> Backend for Faulty<B> {
    fn discover(&self) -> Vec<Found> {
        self.inner.discover()
    }

    fn open(&self, id: DeviceId) -> Result<Arc<dyn Device>> {
        self.countdown.count(Operation::Open, id)?;
        let (inner, countdown) = (self.inner.open(id)?, self.countdown.clone());
        Ok(Arc::new(FaultyDevice { inner, countdown }))
    }

    fn topology(&self) -> Topology {
        self.inner.topology()
    }
}

#[derive(Debug)]
struct FaultyDevice {
    inner: Arc<dyn Device>,
    countdown: Countdown,
}

impl FaultyDevice {
    fn count(&self, operation: Operation) -> Result<()> {
        self.countdown.count(operation, self.inner.id())
    }
}

impl Device for FaultyDevice {
    fn info(&self) -> &DeviceInfo {
        self.inner.info()
    }

    fn ledger(&self) -> &Arc<Ledger> {
        self.inner.ledger()
    }

    fn memory(&self) -> Result<MemoryUsage> {
        self.count(Operation::Memory)?;
        self.inner.memory()
    }

    fn allocate(&self, charge: Charge, kind: MemoryKind) -> Result<BufMut> {
        self.count(Operation::Allocate)?;
        self.inner.allocate(charge, kind)
    }

    fn allocate_near(&self, charge: Charge, kind: MemoryKind, near: DeviceId) -> Result<BufMut> {
        self.count(Operation::Allocate)?;
        self.inner.allocate_near(charge, kind, near)
    }

    fn read_only(&self, contents: Extents) -> Result<Option<Buf>> {
        self.count(Operation::ReadOnly)?;
        self.inner.read_only(contents)
    }

    fn stream(&self, role: Role) -> Result<Arc<dyn Stream>> {
        self.count(Operation::Stream)?;
        let (inner, countdown) = (self.inner.stream(role)?, self.countdown.clone());
        Ok(Arc::new(FaultyStream { inner, countdown }))
    }

    fn route_from(&self, source: &dyn Device) -> Route {
        self.inner.route_from(source)
    }

    fn kernels(&self) -> Option<&dyn Kernels> {
        self.inner.kernels().map(|_| self as &dyn Kernels)
    }

    fn file_reads(&self) -> Option<&dyn FileReads> {
        self.inner.file_reads()
    }

    fn copies_block(&self, source: &MemoryBlock) -> bool {
        self.inner.copies_block(source)
    }

    fn batched(&self, work: &mut dyn FnMut()) {
        self.inner.batched(work);
    }

    fn trim(&self) -> Result<u64> {
        self.count(Operation::Trim)?;
        self.inner.trim()
    }

    fn health(&self) -> Health {
        self.inner.health()
    }
}

impl Kernels for FaultyDevice {
    fn patches(&self) -> bool {
        self.inner.kernels().is_some_and(Kernels::patches)
    }

    /// Forwards to the device. Only work is counted.
    fn ready(&self) -> Result<(), String> {
        self.inner.kernels().map_or_else(|| Err("the device has no kernels".to_owned()), Kernels::ready)
    }

    fn patch<'a>(
        &self,
        stream: &dyn Stream,
        patch: SentPatch<'a>,
        weight: BufMut,
        at: usize,
    ) -> Result<PatchFlight<'a>> {
        self.count(Operation::Patch)?;
        let Some(kernels) = self.inner.kernels() else { return Err(Error::bug("the device has no kernels")) };
        kernels.patch(inner_of(stream), patch, weight, at)
    }

    fn dequantises(&self, stream: &dyn Stream, from: DType, to: DType) -> Result<(), String> {
        let none = || Err("the device has no kernels".to_owned());
        self.inner.kernels().map_or_else(none, |kernels| kernels.dequantises(inner_of(stream), from, to))
    }

    fn dequantise(&self, stream: &dyn Stream, work: Dequantise) -> Result<Flight, Box<Rejected>> {
        if let Err(error) = self.count(Operation::Dequantise) {
            return Err(work.rejected(error));
        }
        match self.inner.kernels() {
            Some(kernels) => kernels.dequantise(inner_of(stream), work),
            None => Err(work.rejected(Error::bug("the device has no kernels"))),
        }
    }

    fn decompresses(&self, stream: &dyn Stream, dtype: DType) -> Result<(), String> {
        let none = || Err("the device has no kernels".to_owned());
        self.inner.kernels().map_or_else(none, |kernels| kernels.decompresses(inner_of(stream), dtype))
    }

    fn decompress(&self, stream: &dyn Stream, work: Decompress) -> Result<DecompressFlight, Box<Undecoded>> {
        if let Err(error) = self.count(Operation::Decompress) {
            return Err(work.rejected(error));
        }
        match self.inner.kernels() {
            Some(kernels) => kernels.decompress(inner_of(stream), work),
            None => Err(work.rejected(Error::bug("the device has no kernels"))),
        }
    }
}

/// The stream that a stream of a faulty device wraps, or itself.
fn inner_of(stream: &dyn Stream) -> &dyn Stream {
    (stream as &dyn Any).downcast_ref::<FaultyStream>().map_or(stream, |stream| &*stream.inner)
}

/// The type of the innermost stream, which does the work.
pub(super) fn type_of(stream: &dyn Stream) -> TypeId {
    let stream = stream as &dyn Any;
    stream.downcast_ref::<FaultyStream>().map_or_else(|| stream.type_id(), |stream| type_of(&*stream.inner))
}

struct FaultyStream {
    inner: Arc<dyn Stream>,
    countdown: Countdown,
}

impl FaultyStream {
    fn count(&self, operation: Operation) -> Result<()> {
        self.countdown.count(operation, self.inner.device())
    }
}

impl Stream for FaultyStream {
    fn device(&self) -> DeviceId {
        self.inner.device()
    }

    fn copy(&self, transfer: Transfer) -> Result<Flight, Box<Rejected>> {
        match self.count(Operation::Copy) {
            Ok(()) => self.inner.copy(transfer),
            Err(error) => Err(transfer.rejected(error)),
        }
    }

    fn wait(&self, event: &Event) -> Result<Joined> {
        self.count(Operation::Wait)?;
        self.inner.wait(event)
    }

    fn record(&self, uses: &[Buf]) -> Result<Event> {
        self.count(Operation::Record)?;
        self.inner.record(uses)
    }

    fn occupy(&self, time: Duration) -> Result<()> {
        self.count(Operation::Occupy)?;
        self.inner.occupy(time)
    }
}

impl fmt::Debug for FaultyStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}
