//! The library's own thread pool, for parallel work on host memory: patching, and large copies.
//!
//! The pool is separate from the caller's. In the caller's pool this work could wait for threads that are all waiting for
//! it, for example if each of them called a load. Work in this pool waits only for other parts of itself, and takes no
//! lock.

use std::sync::{Arc, Mutex, PoisonError};

use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::error::{Error, Result};

/// The pool, created at first use, and the process that created it: in a forked child its threads do not exist.
static POOL: Mutex<Option<(u32, Arc<ThreadPool>)>> = Mutex::new(None);

/// Runs `work`, with its parallel iterators, on the pool and waits for it.
///
/// # Errors
/// When the system gives no threads.
pub(crate) fn run<R: Send>(work: impl FnOnce() -> R + Send) -> Result<R> {
    let pool = pool()?;
    if rayon::current_thread_index().is_none() || pool.current_thread_index().is_some() {
        return Ok(pool.install(work));
    }
    // A waiting thread of another rayon pool would run other work of that pool meanwhile. That work may need a lock, or a
    // turn, that the waiting caller holds. A thread outside any pool simply waits.
    std::thread::scope(|scope| {
        let waits = std::thread::Builder::new().name("tensor-offload waits".to_owned());
        let waits = waits.spawn_scoped(scope, || pool.install(work)).map_err(no_threads)?;
        waits.join().map_or_else(|panic| std::panic::resume_unwind(panic), Ok)
    })
}

fn pool() -> Result<Arc<ThreadPool>> {
    let mut created = POOL.lock().unwrap_or_else(PoisonError::into_inner);
    let process = std::process::id();
    if let Some((_, pool)) = created.as_ref().filter(|(by, _)| *by == process) {
        return Ok(Arc::clone(pool));
    }
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    let threads = ThreadPoolBuilder::new().num_threads(cores).thread_name(|thread| format!("tensor-offload {thread}"));
    let pool = Arc::new(threads.build().map_err(std::io::Error::other).map_err(no_threads)?);
    // Dropping a pool stops its threads, and those of the parent process do not exist here.
    std::mem::forget(created.replace((process, Arc::clone(&pool))));
    Ok(pool)
}

fn no_threads(error: std::io::Error) -> Error {
    Error::io("start threads for", "work on host memory")(error)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use rayon::prelude::*;

    use super::*;

    #[test]
    fn work_is_done_by_threads_of_the_librarys_own() {
        let name = || std::thread::current().name().unwrap_or_default().to_owned();
        let of_run = || run(|| (0..64).into_par_iter().map(|_| name()).collect::<Vec<_>>()).unwrap();
        let callers = ThreadPoolBuilder::new().num_threads(2).build().unwrap();
        for names in [of_run(), callers.install(of_run), run(of_run).unwrap()] {
            assert!(names.iter().all(|name| name.starts_with("tensor-offload ")), "{names:?}");
        }
    }

    #[test]
    fn a_panic_reaches_the_caller() {
        let panics = || std::panic::catch_unwind(|| run(|| panic!("on purpose")).unwrap()).unwrap_err();
        let callers = ThreadPoolBuilder::new().num_threads(1).build().unwrap();
        for panic in [panics(), callers.install(panics)] {
            assert_eq!(*panic.downcast::<&str>().unwrap(), "on purpose");
        }
        assert_eq!(run(|| 5).unwrap(), 5, "the threads live on");
    }

    /// A thread of the caller's pool that waits here runs no other task of that pool.
    #[test]
    fn a_waiting_thread_takes_no_other_work() {
        thread_local!(static WAITS: Cell<bool> = const { Cell::new(false) });
        let callers = ThreadPoolBuilder::new().num_threads(1).build().unwrap();
        callers.in_place_scope(|scope| {
            scope.spawn(|scope| {
                (0..8).for_each(|_| scope.spawn(|_| assert!(!WAITS.get(), "taken up in the middle of another task")));
                WAITS.set(true);
                run(|| std::thread::sleep(std::time::Duration::from_millis(5))).unwrap();
                WAITS.set(false);
            });
        });
    }
}
