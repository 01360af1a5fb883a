//! The host's own memory, `cpu`, and its disk, `disk`.

use std::path::PathBuf;
use std::sync::Arc;

use super::host_memory::HostMemory;
use super::process::Process;
use super::software::{DiskFolder, Medium, SoftwareDevice};
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

    /// Sets the folder of the disk tier. Use a folder on a real disk if the folder for temporary files is in memory (tmpfs,
    /// ramfs): `disk` is then a part of the memory of `cpu` (its [`domain`](DeviceInfo::domain)), and a plan that uses it says
    /// so ([`Warning::DiskInMemory`](crate::plan::Warning::DiskInMemory)).
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
        let (name, memory) = match file_system_in_memory(&self.folder) {
            Some(kind) => (format!("files in {}, in memory ({kind})", self.folder.display()), DeviceId::CPU),
            None => (format!("files in {}", self.folder.display()), DeviceId::DISK),
        };
        DeviceInfo::new(DeviceId::DISK, total).name(name).free(free).domain(memory)
    }
}

impl Backend for Host {
    fn discover(&self) -> Vec<Found> {
        vec![Found::Here(self.cpu()), Found::Here(self.disk())]
    }

    fn open(&self, id: DeviceId) -> Result<Arc<dyn Device>> {
        let (info, medium) = match id {
            DeviceId::CPU => (self.cpu(), Medium::Host),
            DeviceId::DISK => (self.disk(), Medium::Files(DiskFolder::new(&self.folder))),
            _ => return Err(Error::UnknownDevice { device: id, known: vec![DeviceId::CPU, DeviceId::DISK] }),
        };
        if id == DeviceId::DISK && info.domain != id {
            tracing::warn!(folder = %self.folder.display(), "the folder of the disk tier is in memory");
        }
        let free: Option<fn() -> u64> = (id == DeviceId::CPU).then_some(|| HostMemory::read().available);
        let ledger = Ledger::new(id, info.total.min(u64::MAX / 2));
        let process = Process::current();
        Ok(Arc::new(SoftwareDevice { info, ledger, medium, timeline: None, process, free }))
    }
}

/// The kind of the file system that holds `folder`, if it keeps its files in memory.
#[cfg(target_os = "linux")]
fn file_system_in_memory(folder: &std::path::Path) -> Option<&'static str> {
    // The numbers are those of the kernel's `linux/magic.h`.
    const KINDS: [(u32, &str); 3] = [(0x0102_1994, "tmpfs"), (0x8584_58f6, "ramfs"), (0x9584_58f6, "hugetlbfs")];
    // They are of 32 bits; the field is wider on some machines, and signed on some.
    let found = rustix::fs::statfs(folder).ok()?.f_type as u32;
    KINDS.into_iter().find(|&(number, _)| number == found).map(|(_, kind)| kind)
}

#[cfg(not(target_os = "linux"))]
fn file_system_in_memory(_folder: &std::path::Path) -> Option<&'static str> {
    None
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

#[cfg(windows)]
fn disk_space(folder: &std::path::Path) -> (u64, Option<u64>) {
    match (fs4::total_space(folder), fs4::available_space(folder)) {
        (Ok(total), Ok(available)) => (total, Some(available)),
        _ => (u64::MAX / 2, None),
    }
}

#[cfg(not(any(unix, windows)))]
fn disk_space(_folder: &std::path::Path) -> (u64, Option<u64>) {
    (u64::MAX / 2, None)
}
