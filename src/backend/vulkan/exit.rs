//! The end of the process: its libraries are taken down while threads of it still run, and a driver is not asked any more then.

use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{PoisonError, RwLock, RwLockReadGuard};
use std::time::{Duration, Instant};

/// Whether the process is ending.
static ENDING: AtomicBool = AtomicBool::new(false);

/// Held for reading by calls of a driver.
static CALLS: RwLock<()> = RwLock::new(());

/// How long the end of the process waits for calls that are being made. Only compiling a kernel may take as long.
const LONGEST: Duration = Duration::from_secs(2);

unsafe extern "C" {
    /// The C library's, which every target of Vulkan has.
    fn atexit(handler: extern "C" fn()) -> c_int;
}

/// Has the end of the process stop the calls. The handler runs before the libraries that are loaded by now are taken down, so it is
/// registered after an instance was made, and again after a device was opened.
pub(super) fn watch() {
    static TIMES: AtomicU32 = AtomicU32::new(0);
    PROCESS.store(std::process::id(), Ordering::SeqCst);
    if TIMES.fetch_add(1, Ordering::Relaxed) < MOST_HANDLERS {
        // If it is not taken, the process may end less cleanly.
        // SAFETY: the handler touches statics alone.
        let _ = unsafe { atexit(ending) };
    }
}

/// How often the handler is registered: the C library has no end of room for them.
const MOST_HANDLERS: u32 = 8;

/// The process that makes the calls. A fork has the handler, and perhaps a lock that nobody will release.
static PROCESS: AtomicU32 = AtomicU32::new(0);

/// A guard for calls of a driver. `None` once the process is ending.
pub(super) fn enter() -> Option<RwLockReadGuard<'static, ()>> {
    let calls = CALLS.read().unwrap_or_else(PoisonError::into_inner);
    (!ENDING.load(Ordering::SeqCst)).then_some(calls)
}

extern "C" fn ending() {
    ENDING.store(true, Ordering::SeqCst);
    if PROCESS.load(Ordering::SeqCst) != std::process::id() {
        return;
    }
    let until = Instant::now() + LONGEST;
    // Not by waiting for the lock: a thread that makes a call within a call would then wait, too.
    while CALLS.try_write().is_err() && Instant::now() < until {
        std::thread::sleep(Duration::from_micros(200));
    }
}
