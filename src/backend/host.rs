//! The host's own memory, `cpu`, and its disk, `disk`.

use std::path::PathBuf;
use std::sync::Arc;

use super::host_memory::HostMemory;
use super::process::Process;
use super::software::{Medium, SoftwareDevice};
use super::{Backend, Device, Found, Ledger};
use crate::device::{DeviceId, DeviceInfo};
use crate::error::{Error, Result};

/// The backend of `cpu` and `disk`: real memory and files. Each stream has its own thread.
///
/// The memory of `cpu` is the system's, lowered to the limits of control groups (versions 1 and 2). `disk` keeps weights in
/// unnamed files, which the system removes when they are closed, however the process ends.
#[derive(Clone, Debug)]
pub struct Host {
    folder: PathBuf,
}

impl Default for Host {
    fn default() -> Self {
        Host::new()
    }
}

impl Host {
    /// The host, with its disk tier in the system's folder for temporary files.
    pub fn new() -> Host {
        Host { folder: std::env::temp_dir() }
    }

    /// Sets the folder of the disk tier. Use a folder on a real disk if the folder for temporary files is in memory (tmpfs).
    #[must_use]
    pub fn disk_folder(mut self, folder: impl Into<PathBuf>) -> Host {
        self.folder = folder.into();
        self
    }

    /// The current state of the host's memory.
    pub(super) fn cpu(&self) -> DeviceInfo {
        let memory = HostMemory::read();
        DeviceInfo::new(DeviceId::CPU, memory.total).name("host memory").free(Some(memory.available))
    }

    fn disk(&self) -> DeviceInfo {
        let (total, free) = disk_space(&self.folder);
        DeviceInfo::new(DeviceId::DISK, total).name(format!("files in {}", self.folder.display())).free(free)
    }
}

impl Backend for Host {
    fn discover(&self) -> Vec<Found> {
        vec![Found::Here(self.cpu()), Found::Here(self.disk())]
    }

    fn open(&self, id: DeviceId) -> Result<Arc<dyn Device>> {
        let (info, medium) = match id {
            DeviceId::CPU => (self.cpu(), Medium::Host),
            DeviceId::DISK => (self.disk(), Medium::Files(self.folder.clone())),
            _ => return Err(Error::UnknownDevice { device: id, known: vec![DeviceId::CPU, DeviceId::DISK] }),
        };
        let free: Option<fn() -> u64> = (id == DeviceId::CPU).then_some(|| HostMemory::read().available);
        let ledger = Ledger::new(id, info.total.min(u64::MAX / 2));
        let process = Process::current();
        Ok(Arc::new(SoftwareDevice { info, ledger, medium, timeline: None, process, free }))
    }
}

/// The total and free bytes of the file system that holds `folder`, as far as they are known.
#[cfg(unix)]
fn disk_space(folder: &std::path::Path) -> (u64, Option<u64>) {
    match rustix::fs::statvfs(folder) {
        Ok(space) => {
            let bytes = |blocks: u64| blocks.saturating_mul(space.f_frsize);
            (bytes(space.f_blocks), Some(bytes(space.f_bavail)))
        }
        Err(_) => (u64::MAX / 2, None),
    }
}

#[cfg(not(unix))]
fn disk_space(_folder: &std::path::Path) -> (u64, Option<u64>) {
    (u64::MAX / 2, None)
}
