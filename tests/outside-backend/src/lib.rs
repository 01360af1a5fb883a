//! A backend for tensor-offload in a crate of its own: accelerators named `loopback:0`, `loopback:1` and so on.
//!
//! An accelerator has memory that the host cannot see, and queues that copy while the host does something else. Both are
//! software: its memory is ordinary memory that is handed out to nobody, and each of its queues is a thread. What a driver would
//! do is therefore in plain sight, and the rest is what every backend needs. To write one for real hardware, start from this
//! crate and go through its modules:
//!
//! | module | implements | stands for |
//! |---|---|---|
//! | this one | [`Backend`] | the driver, which lists and opens devices |
//! | `accelerator` | [`Device`] | an open device: its ledger, its memory, its routes, its health |
//! | `memory` | `Storage` (`unsafe`) | one allocation |
//! | `queue` | `Stream` | a queue of copies, in order |
//! | `signal` | `Fence` (`unsafe`) | a point in a queue's work |
//!
//! Its tests show how a backend is checked: the conformance suite, every operation failing in turn, and a whole model.

mod accelerator;
mod memory;
mod queue;
mod signal;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use accelerator::Accelerator;
use tensor_offload::backend::{Backend, Device, Found};
use tensor_offload::device::{Bandwidth, KindName, Topology};
use tensor_offload::{DeviceId, Error, Result};

/// The name of the kind. That it is well-formed, and none of the library's own, is checked when this is compiled.
const NAME: KindName = KindName::new("loopback").unwrap();

/// The accelerators of this process.
#[derive(Debug)]
pub struct Loopback {
    /// By number. Keeping them open takes nothing. A driver's devices are opened in [`open`](Backend::open), and while one is
    /// open, opening it again gives the same memory and the same ledger.
    accelerators: Vec<Accelerator>,
}

impl Loopback {
    /// One accelerator with so many bytes of memory for each of `sizes`.
    pub fn new(sizes: &[u64]) -> Loopback {
        let numbered = (0..).zip(sizes);
        Loopback { accelerators: numbered.map(|(index, &total)| Accelerator::new(index, total)).collect() }
    }

    /// The accelerator `loopback:index`, which need not exist.
    pub const fn id(index: u32) -> DeviceId {
        DeviceId::other(NAME, index)
    }

    /// Pulls an accelerator out of its slot, for tests of what follows: it is lost, and its work fails from now on.
    ///
    /// # Errors
    /// [`Error::UnknownDevice`] if there is none of this name.
    pub fn unplug(&self, id: DeviceId) -> Result<()> {
        self.find(id).map(|accelerator| accelerator.lose("it was unplugged"))
    }

    fn find(&self, id: DeviceId) -> Result<&Accelerator> {
        let found = self.accelerators.iter().find(|accelerator| accelerator.id() == id);
        let known = || self.accelerators.iter().map(|accelerator| accelerator.id()).collect();
        found.ok_or_else(|| Error::UnknownDevice { device: id, known: known() })
    }
}

impl Backend for Loopback {
    fn discover(&self) -> Vec<Found> {
        self.accelerators.iter().map(|accelerator| Found::Here(accelerator.info_now())).collect()
    }

    fn open(&self, id: DeviceId) -> Result<Arc<dyn Device>> {
        let accelerator = self.find(id)?;
        accelerator.check()?;
        Ok(Arc::new(accelerator.clone()))
    }

    fn topology(&self) -> Topology {
        // About the speed of memory. A plan's forecasts count on it until the links are measured.
        let speed = Bandwidth::bytes_per_second(8_000_000_000);
        let mut topology = Topology::new();
        for (number, accelerator) in self.accelerators.iter().enumerate() {
            topology = topology.link(accelerator.id(), speed);
            for other in &self.accelerators[..number] {
                topology = topology.peer(accelerator.id(), other.id(), speed);
            }
        }
        topology.estimated()
    }
}

/// Locks. What the locks of this crate guard is whole at every moment, so it is even if a thread panicked.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
