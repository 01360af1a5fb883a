//! The threads that wait for object stores.

use std::sync::{Arc, Mutex, PoisonError};

use tokio::runtime::{Builder, Runtime};

use crate::error::{Error, Result};

/// The runtime, created at first use, and the process that created it: in a forked child its threads do not exist.
static RUNTIME: Mutex<Option<(u32, Arc<Runtime>)>> = Mutex::new(None);

/// The most threads. Taking a gigabyte from an HTTP client costs a core about a second, so some threads keep up with a network.
const MOST: usize = 8;

/// The library's own runtime. Callers wait for it on a channel: in a runtime of theirs, waiting for a future would panic.
///
/// # Errors
/// [`Error::Io`] when the system gives no threads.
pub(super) fn runtime() -> Result<Arc<Runtime>> {
    let mut created = RUNTIME.lock().unwrap_or_else(PoisonError::into_inner);
    let process = std::process::id();
    if let Some((_, runtime)) = created.as_ref().filter(|(by, _)| *by == process) {
        return Ok(Arc::clone(runtime));
    }
    let cores = std::thread::available_parallelism().map_or(2, |cores| cores.get());
    let threads = Builder::new_multi_thread()
        .worker_threads(cores.clamp(2, MOST))
        .thread_name("tensor-offload store")
        .enable_all()
        .build();
    let runtime = Arc::new(threads.map_err(Error::io("start threads for", "object stores"))?);
    // Dropping a runtime stops its threads, and those of the parent process do not exist here.
    std::mem::forget(created.replace((process, Arc::clone(&runtime))));
    Ok(runtime)
}
