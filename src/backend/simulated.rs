//! Simulated devices: any kinds, sizes and links, on a machine that has none of them.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::process::Process;
use super::software::{Clock, DiskFolder, Medium, SoftwareDevice, Timeline};
use super::{Backend, Device, Found, Ledger};
use crate::device::{DeviceId, DeviceKind, Machine, Topology};
use crate::error::Result;

/// The contents of the memory of simulated devices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Contents {
    /// Real bytes, in host memory or, for `disk`, in files.
    #[default]
    Stored,
    /// No bytes. Memory is counted and refused as usual and copies take their time, but no byte is kept or moved, so a
    /// machine of any size costs no memory. Copies from it to memory with bytes are refused.
    SizesOnly,
}

/// A described machine with the capacities of its devices and the bandwidths of its links. It stores and moves real bytes,
/// unless it is set to keep [sizes only](Contents::SizesOnly).
///
/// On [`Clock::Wall`] a copy takes as long as its links need. On [`Clock::Virtual`] it is executed immediately, and after
/// waiting for its event [`now`](Simulated::now) has advanced to the time at which the links would have completed it.
///
/// ```
/// use tensor_offload::backend::{Backend, Clock, MemoryKind, Role, Simulated, Transfer};
/// use tensor_offload::{DeviceId, Machine};
/// use std::time::Duration;
///
/// let machine = Machine::described(&["cpu=1gib".parse()?, "cuda:0=1gib,link=1".parse()?]);
/// let simulated = Simulated::new(machine, Clock::Virtual);
/// let (cpu, card) = (simulated.open(DeviceId::CPU)?, simulated.open(DeviceId::cuda(0))?);
/// let source = cpu.alloc(1_000_000, MemoryKind::Pinned)?.freeze();
/// let transfer = Transfer::whole(&source, card.alloc(1_000_000, MemoryKind::Arena)?)?;
/// card.stream(Role::Upload)?.copy(transfer)?.wait(Duration::from_secs(1))?;
/// assert_eq!(simulated.now(), Duration::from_millis(1)); // a megabyte at 1 GB/s
/// # Ok::<(), tensor_offload::Error>(())
/// ```
pub struct Simulated {
    machine: Machine,
    timeline: Arc<Timeline>,
    contents: Contents,
}

impl Simulated {
    /// Simulates a described machine, with nothing allocated and its clock at zero.
    pub fn new(machine: Machine, clock: Clock) -> Simulated {
        let timeline = Arc::new(Timeline::new(clock, machine.topology().clone()));
        Simulated { machine, timeline, contents: Contents::Stored }
    }

    /// Sets whether memory holds bytes or sizes only. Default: [`Contents::Stored`].
    #[must_use]
    pub fn contents(mut self, contents: Contents) -> Simulated {
        self.contents = contents;
        self
    }

    /// The time since the start. On a virtual clock it is the time of the latest event that was waited for.
    pub fn now(&self) -> Duration {
        self.timeline.now()
    }
}

impl Backend for Simulated {
    fn discover(&self) -> Vec<Found> {
        self.machine.devices().iter().cloned().map(Found::Here).collect()
    }

    fn open(&self, id: DeviceId) -> Result<Arc<dyn Device>> {
        let info = self.machine.device(id)?.clone();
        let medium = match id.kind() {
            _ if self.contents == Contents::SizesOnly => Medium::Nowhere,
            DeviceKind::Cpu => Medium::Host,
            DeviceKind::Disk => Medium::Files(DiskFolder::new(std::env::temp_dir())),
            _ => Medium::Hidden,
        };
        // Memory that the description has as taken stays taken.
        let ledger = Ledger::new(id, info.usable());
        let (timeline, process) = (Some(Arc::clone(&self.timeline)), Process::current());
        Ok(Arc::new(SoftwareDevice { info, ledger, medium, timeline, process, free: None }))
    }

    fn topology(&self) -> Topology {
        self.machine.topology().clone()
    }
}

impl fmt::Debug for Simulated {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Simulated")
            .field("machine", &self.machine)
            .field("contents", &self.contents)
            .finish_non_exhaustive()
    }
}
