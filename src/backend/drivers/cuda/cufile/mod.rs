//! NVIDIA GPUDirect Storage: files that libcufile reads straight into a device's memory.
//!
//! The library is found at run time, like the driver, and opened when a device first reads a file. The devices that use it share
//! it. It keeps memory of its own in a device's context, so contexts that it was used with stay until it is closed, with the
//! last of its devices, files and registered memory.
//!
//! Reads are synchronous: the calling thread waits, and nothing writes to the destination after the call. Offsets and sizes need
//! no alignment. The library reads what is not aligned, and what goes to memory that is not registered with it, through
//! buffers of its own on the device.

mod calls;
#[cfg(any(target_os = "linux", test))]
mod support;

use std::any::Any;
use std::ffi::OsStr;
use std::fmt;
use std::fs::File;
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak, mpsc};
use std::time::Duration;

use libloading::Library;

use self::calls::{Calls, FileHandle, Properties};
use crate::backend::drivers::context::{Context, ContextGuard};
use crate::backend::drivers::memory::DeviceMemory;
use crate::backend::process::Process;
use crate::backend::sysfs::Sysfs;
use crate::backend::{BufMut, DeviceFile, FileReads, Gds, MemoryBlock, NoFileReads};

/// The environment variables that name the library's file and the setting.
const LIBRARY_VARIABLE: &str = "TENSOR_OFFLOAD_LIBCUFILE";
const SETTING_VARIABLE: &str = "TENSOR_OFFLOAD_GDS";

/// The library's name, as CUDA's toolkit installs it.
const NAME: &str = "libcufile.so.0";

/// What the kernel module nvidia-fs shows of itself while it is loaded.
const NVIDIA_FS: &str = "/proc/driver/nvidia-fs/version";

/// What the library reads when it is opened. Where it is missing, libcufile 1.14 and 1.20 never end reading it.
const MODULES: &str = "/proc/modules";

/// `CU_FILE_DRIVER_ALREADY_OPEN`.
const ALREADY_OPEN: i32 = 5026;

/// Why bytes that the library reads pass host memory, or may pass it.
const COMPATIBILITY: &str = "libcufile is in compatibility mode, in which bytes pass host memory";
const UNTOLD: &str = "libcufile may read its storage through host memory and does not tell; it would refuse with \
                      \"allow_compat_mode\": false in its configuration";

/// How long opening the library may take. It looks at all storage of the system.
const OPENING: Duration = Duration::from_secs(30);

/// What is wanted of the library, and the library while it is open.
pub(in crate::backend::drivers) struct Settings {
    gds: Option<Gds>,
    library: Option<PathBuf>,
    #[cfg_attr(not(target_os = "linux"), expect(dead_code, reason = "the library is on Linux alone"))]
    sysfs: Sysfs,
    open: Mutex<Weak<CuFile>>,
}

impl Settings {
    pub(in crate::backend::drivers) fn new(gds: Option<Gds>, library: Option<PathBuf>, sysfs: Sysfs) -> Settings {
        Settings { gds, library, sysfs, open: Mutex::new(Weak::new()) }
    }

    /// The setting: the caller's, or the environment's.
    fn gds(&self) -> Result<Gds, NoFileReads> {
        let Some(text) = self.gds.is_none().then(|| std::env::var_os(SETTING_VARIABLE)).flatten() else {
            return Ok(self.gds.unwrap_or_default());
        };
        let why = |why| NoFileReads::Absent { why: format!("{SETTING_VARIABLE}: {why}") };
        text.to_string_lossy().parse().map_err(|error| why(format!("{error}")))
    }

    /// The library, which is opened for the device of `context` unless it is open.
    fn library(&self, context: &Arc<Context>) -> Result<Arc<CuFile>, NoFileReads> {
        let gds = self.gds()?;
        let absent = |why: String| NoFileReads::Absent { why };
        if gds == Gds::Off {
            return Err(NoFileReads::Off);
        }
        if cfg!(not(target_os = "linux")) {
            return Err(absent("GPUDirect Storage is on Linux alone".to_owned()));
        }
        if gds == Gds::Auto && !Path::new(NVIDIA_FS).exists() {
            return Err(absent("the kernel module nvidia-fs is not loaded".to_owned()));
        }
        let named = self.library.clone().or_else(|| std::env::var_os(LIBRARY_VARIABLE).map(PathBuf::from));
        if named.is_none() && !Path::new(MODULES).exists() {
            return Err(absent(format!("{MODULES} is not there, which {NAME} reads")));
        }
        let mut open = lock(&self.open);
        let library = match open.upgrade() {
            Some(library) => library,
            None => CuFile::open_in_time(named.as_deref(), context)?,
        };
        *open = Arc::downgrade(&library);
        if gds != Gds::Always && !library.properties.is_direct() {
            return Err(NoFileReads::Bounced { why: COMPATIBILITY.to_owned() });
        }
        library.keep(context);
        Ok(library)
    }

    /// Fails if the library may read a file through host memory without telling.
    #[cfg(target_os = "linux")]
    fn check_storage(&self, file: &File, properties: &Properties) -> Result<(), NoFileReads> {
        let (magic, number) = support::storage(file).map_err(|error| NoFileReads::system("fstatfs", &error))?;
        let device = self.sysfs.block_device(number);
        if support::is_direct(properties.nvfs.supported, magic, device.as_deref()) {
            return Ok(());
        }
        Err(NoFileReads::Bounced { why: UNTOLD.to_owned() })
    }

    #[cfg(not(target_os = "linux"))]
    fn check_storage(&self, _file: &File, _properties: &Properties) -> Result<(), NoFileReads> {
        Ok(())
    }
}

/// The library, open.
struct CuFile {
    calls: Calls,
    properties: Properties,
    /// Whether this opened it.
    ours: bool,
    /// Whether it has memory that it would not let go of. It must not be closed then.
    has_memory: AtomicBool,
    process: Process,
    /// The contexts that it was used with. They are released after it is closed.
    contexts: Mutex<Vec<Arc<Context>>>,
}

impl CuFile {
    /// Opens the library in a thread of its own, since it has been seen not to return. Such a library is not tried again.
    fn open_in_time(named: Option<&Path>, context: &Arc<Context>) -> Result<Arc<CuFile>, NoFileReads> {
        static STUCK: Mutex<Vec<Option<PathBuf>>> = Mutex::new(Vec::new());
        let (file, context) = (named.map(Path::to_owned), Arc::clone(context));
        let (send, receive) = mpsc::channel();
        let mut stuck = lock(&STUCK);
        if !stuck.contains(&file) {
            let name = file.clone();
            let open = move || {
                // If nobody waits any more, what was opened is closed again.
                let _ = send.send(CuFile::open(name.as_deref(), &context));
            };
            let thread = std::thread::Builder::new().name("open libcufile".to_owned()).spawn(open);
            thread.map_err(|error| NoFileReads::system("start a thread", &error))?;
            if let Ok(opened) = receive.recv_timeout(OPENING) {
                return opened;
            }
            stuck.push(file);
        }
        let why = format!("cuFileDriverOpen did not return within {} s", OPENING.as_secs());
        Err(NoFileReads::Absent { why })
    }

    fn open(named: Option<&Path>, context: &Arc<Context>) -> Result<Arc<CuFile>, NoFileReads> {
        let name = named.map_or(OsStr::new(NAME), Path::as_os_str);
        let absent = |why: String| NoFileReads::Absent { why };
        // SAFETY: loading the library runs its initialisers, which is what opening it means.
        let library = unsafe { Library::new(name) };
        let shown = Path::new(name).display();
        let library = library.map_err(|error| absent(format!("{shown} cannot be loaded: {error}")))?;
        // It has threads of its own, so it is never unloaded.
        let library = ManuallyDrop::new(library);
        let lacks = |call| absent(format!("{shown} has no {call}"));
        let calls = Calls::find(&library).map_err(lacks)?;
        let _entered = context.enter().map_err(|refusal| absent(context.error(refusal).to_string()))?;
        let ours = match calls.open() {
            // Libraries that do not count opens: someone else opened it, and closes it.
            Err(NoFileReads::Refused { status: ALREADY_OPEN, .. }) => false,
            opened => opened.map(|()| true)?,
        };
        let (process, contexts) = (Process::current(), Mutex::new(vec![Arc::clone(context)]));
        // From here on, dropping it closes it.
        let mut library = CuFile {
            calls,
            properties: Properties::default(),
            ours,
            has_memory: AtomicBool::new(false),
            process,
            contexts,
        };
        library.properties = library.calls.properties()?;
        let CuFile { calls, properties, .. } = &library;
        tracing::debug!(version = calls.version(), ?properties, "opened libcufile");
        Ok(Arc::new(library))
    }

    /// Keeps a context until the library is closed.
    fn keep(&self, context: &Arc<Context>) {
        let mut contexts = lock(&self.contexts);
        if !contexts.iter().any(|known| Arc::ptr_eq(known, context)) {
            contexts.push(Arc::clone(context));
        }
    }
}

impl Drop for CuFile {
    fn drop(&mut self) {
        // A fork has none of the library's threads.
        if !self.ours || *self.has_memory.get_mut() || !self.process.is_current() {
            return;
        }
        let contexts = lock(&self.contexts);
        let _entered = contexts.iter().find_map(|context| context.enter().ok());
        if let Err(why) = self.calls.close() {
            tracing::warn!(%why, "libcufile could not be closed");
        }
    }
}

/// The reads of one device.
pub(in crate::backend::drivers) struct Reads {
    settings: Arc<Settings>,
    library: OnceLock<Result<Arc<CuFile>, NoFileReads>>,
    context: Arc<Context>,
}

impl Reads {
    pub(in crate::backend::drivers) fn new(settings: Arc<Settings>, context: &Arc<Context>) -> Reads {
        Reads { settings, library: OnceLock::new(), context: Arc::clone(context) }
    }

    fn library(&self) -> Result<&Arc<CuFile>, NoFileReads> {
        let library = self.library.get_or_init(|| self.settings.library(&self.context));
        library.as_ref().map_err(Clone::clone)
    }

    fn always(&self) -> bool {
        self.settings.gds().is_ok_and(|gds| gds == Gds::Always)
    }
}

impl FileReads for Reads {
    fn ready(&self) -> Result<(), NoFileReads> {
        self.library().map(drop)
    }

    fn takes_cached(&self) -> bool {
        self.always()
    }

    fn bounces(&self) -> Option<NoFileReads> {
        let properties = &self.library().ok()?.properties;
        let why = match (properties.is_direct(), properties.allows_compatibility()) {
            (false, _) => COMPATIBILITY,
            (true, true) if self.always() => UNTOLD,
            (true, _) => return None,
        };
        Some(NoFileReads::Bounced { why: why.to_owned() })
    }

    fn register(&self, file: File) -> Result<Box<dyn DeviceFile>, NoFileReads> {
        let library = self.library()?;
        if !self.always() && library.properties.allows_compatibility() {
            self.settings.check_storage(&file, &library.properties)?;
        }
        let _entered = enter(library, &self.context)?;
        let handle = Handle(library.calls.register(descriptor(&file)?)?);
        let (library, context) = (Arc::clone(library), Arc::clone(&self.context));
        Ok(Box::new(RegisteredFile { handle, file, library, context }))
    }

    fn register_memory(&self, memory: &Arc<MemoryBlock>) -> Result<Box<dyn Any + Send + Sync>, NoFileReads> {
        let library = self.library()?;
        let (address, bytes) = (address_in(memory, &self.context)?, memory.bytes());
        let _entered = enter(library, &self.context)?;
        // SAFETY: the allocation of this many bytes stays until the value below is dropped, which deregisters it first.
        unsafe { library.calls.register_memory(address, bytes) }?;
        let (library, context) = (Arc::clone(library), Arc::clone(&self.context));
        Ok(Box::new(RegisteredMemory { address, library, context, _memory: Arc::clone(memory) }))
    }
}

impl fmt::Debug for Reads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reads").field("device", &self.context.id()).finish_non_exhaustive()
    }
}

/// A file's handle of the library.
struct Handle(FileHandle);

// SAFETY: the library's calls may be made by any thread.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

/// A file that the library reads.
struct RegisteredFile {
    handle: Handle,
    file: File,
    library: Arc<CuFile>,
    context: Arc<Context>,
}

impl DeviceFile for RegisteredFile {
    fn file(&self) -> &File {
        &self.file
    }

    fn read(&self, at: u64, dst: &mut BufMut, to: Range<usize>) -> Result<usize, NoFileReads> {
        let memory = |why: &str| NoFileReads::Memory { why: why.to_owned() };
        let base = address_in(dst.block(), &self.context)?;
        if to.start > to.end || to.end > dst.bytes() {
            return Err(memory("the range is outside the memory"));
        }
        if !dst.pending().is_empty() {
            return Err(memory("the memory is in use"));
        }
        let numbers = i64::try_from(at).ok().zip(i64::try_from(dst.start() + to.start).ok());
        let numbers = numbers.ok_or_else(|| memory("a position beyond those of the system"))?;
        let _entered = enter(&self.library, &self.context)?;
        // SAFETY: the handle is registered until `drop`; the range is within `dst`, which is borrowed until this returns and
        // has no use that is pending.
        let read = unsafe { self.library.calls.read(self.handle.0, base, to.len(), numbers) }?;
        if read > to.len() {
            return Err(NoFileReads::File { why: format!("cuFileRead returned {read} for {} bytes", to.len()) });
        }
        Ok(read)
    }
}

impl Drop for RegisteredFile {
    fn drop(&mut self) {
        if !self.library.process.is_current() {
            return;
        }
        // Also where the device is lost.
        let _entered = self.context.enter();
        // SAFETY: registered by `register`, deregistered once; no read is going on, since a read borrows the value.
        unsafe { self.library.calls.deregister(self.handle.0) };
    }
}

impl fmt::Debug for RegisteredFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RegisteredFile").field("file", &self.file).finish_non_exhaustive()
    }
}

/// Memory that the library has mapped for reads.
struct RegisteredMemory {
    address: u64,
    library: Arc<CuFile>,
    context: Arc<Context>,
    /// Freed after it is deregistered.
    _memory: Arc<MemoryBlock>,
}

impl Drop for RegisteredMemory {
    fn drop(&mut self) {
        if !self.library.process.is_current() {
            return;
        }
        let _entered = self.context.enter();
        // SAFETY: registered by `register_memory`, deregistered once.
        if let Err(why) = unsafe { self.library.calls.deregister_memory(self.address) } {
            tracing::warn!(%why, "memory could not be deregistered");
            self.library.has_memory.store(true, Ordering::Relaxed);
        }
    }
}

/// Makes a device's context current for calls of the library.
fn enter<'a>(library: &CuFile, context: &'a Context) -> Result<ContextGuard<'a>, NoFileReads> {
    let refused = |error: crate::error::Error| NoFileReads::Memory { why: error.to_string() };
    library.process.check().map_err(refused)?;
    context.enter().map_err(|refusal| refused(context.error(refusal)))
}

/// The address of memory, if it is memory of the device of `context`.
fn address_in(memory: &Arc<MemoryBlock>, context: &Arc<Context>) -> Result<u64, NoFileReads> {
    let here = memory.downcast::<DeviceMemory>().filter(|memory| Arc::ptr_eq(memory.context(), context));
    let address = here.and_then(|_| memory.address());
    address.ok_or_else(|| NoFileReads::Memory { why: format!("it is not memory of {}", context.id()) })
}

#[cfg(unix)]
fn descriptor(file: &File) -> Result<std::ffi::c_int, NoFileReads> {
    Ok(std::os::fd::AsRawFd::as_raw_fd(file))
}

#[cfg(not(unix))]
fn descriptor(_file: &File) -> Result<std::ffi::c_int, NoFileReads> {
    Err(NoFileReads::Absent { why: "files have no descriptors here".to_owned() })
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
#[cfg(target_os = "linux")]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_lacks_a_call_is_named_with_the_call() {
        // SAFETY: the system's mathematics, which is loaded anyway.
        let library = unsafe { Library::new("libm.so.6") }.unwrap();
        assert_eq!(Calls::find(&library).err(), Some("cuFileDriverOpen"));
    }
}
