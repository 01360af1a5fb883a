//! The library's own thread pool, for parallel work on host memory: patching, and large copies. And plain threads, for work that
//! waits: reads.
//!
//! The pool is separate from the caller's. In the caller's pool this work could wait for threads that are all waiting for
//! it, for example if each of them called a load. Work in this pool waits only for other parts of itself, and takes no
//! lock.

use std::panic::resume_unwind;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::vec::IntoIter;

use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::error::{Error, Result};
use crate::interrupt;

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
        waits.join().map_or_else(|panic| resume_unwind(panic), Ok)
    })
}

/// Does `work` on each item: in this thread, and in as many more as there are permits. A thread holds its permit while it works.
/// Permits are asked for before each item of this thread. Reads of
/// all these threads end when those of this one [would](interrupt). Other than in the pool, `work` may wait, for a disk or for a device.
///
/// # Errors
/// One that `work` returned; then items that no thread has begun with are dropped.
pub(crate) fn work_through<T: Send, P: Send, E: Send>(
    items: Vec<T>,
    mut permit: impl FnMut() -> Option<P>,
    work: impl Fn(T) -> Result<(), E> + Sync,
) -> Result<(), E> {
    let rest = Rest(Mutex::new(items.into_iter()));
    let begin = |item: T| {
        let unfinished = Unfinished(&rest);
        work(item)?;
        std::mem::forget(unfinished);
        Ok(())
    };
    let check = interrupt::current();
    let help = |permit: P| {
        let work = || std::iter::from_fn(|| rest.lock().next()).try_for_each(&begin);
        let outcome = interrupt::interruptible_by(check.clone(), work);
        drop(permit);
        outcome
    };
    std::thread::scope(|scope| {
        let (mut helpers, mut own) = (Vec::new(), Ok(()));
        while own.is_ok()
            && let Some(item) = { rest.lock().next() }
        {
            let left = rest.lock().len();
            for permit in (0..left).map_while(|_| permit()) {
                let (help, helper) = (&help, std::thread::Builder::new().name("tensor-offload reads".to_owned()));
                // If no more threads can be had, fewer do the work.
                helpers.extend(helper.spawn_scoped(scope, move || help(permit)).ok());
            }
            own = begin(item);
        }
        let others = helpers.into_iter().map(|helper| helper.join().unwrap_or_else(|panic| resume_unwind(panic)));
        others.fold(own, Result::and)
    })
}

/// How many may do something at a time.
pub(crate) struct Permits {
    left: Mutex<usize>,
    given_back: Condvar,
}

/// One of some [`Permits`], given back when it is dropped.
pub(crate) struct Permit<'a>(&'a Permits);

impl Permits {
    pub(crate) fn new(count: usize) -> Permits {
        Permits { left: Mutex::new(count), given_back: Condvar::new() }
    }

    /// A permit, if one is left.
    pub(crate) fn free(&self) -> Option<Permit<'_>> {
        let mut left = self.lock();
        *left = left.checked_sub(1)?;
        Some(Permit(self))
    }

    /// A permit, once one is left. Whoever has one must not wait for anything that the caller holds.
    pub(crate) fn wait(&self) -> Permit<'_> {
        let left = self.given_back.wait_while(self.lock(), |left| *left == 0);
        *left.unwrap_or_else(PoisonError::into_inner) -= 1;
        Permit(self)
    }

    fn lock(&self) -> MutexGuard<'_, usize> {
        self.left.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        *self.0.lock() += 1;
        self.0.given_back.notify_one();
    }
}

/// Items that no thread has begun with.
struct Rest<T>(Mutex<IntoIter<T>>);

impl<T> Rest<T> {
    fn lock(&self) -> MutexGuard<'_, IntoIter<T>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Drops the rest of the items when the work on one fails or panics.
struct Unfinished<'a, T>(&'a Rest<T>);

impl<T> Drop for Unfinished<'_, T> {
    fn drop(&mut self) {
        let rest = std::mem::replace(&mut *self.0.lock(), Vec::new().into_iter());
        drop(rest);
    }
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

    /// Each item is worked on once, by as many threads as there are permits for and the caller's, and a failure ends the work.
    #[test]
    fn items_are_shared_out_by_permits() {
        use std::collections::HashSet;
        use std::thread::ThreadId;
        use std::time::Duration;
        for permits in [0, 1, 3] {
            let (mut left, seen) = (permits, Mutex::new((Vec::new(), HashSet::<ThreadId>::new())));
            let (all, arrived) = (permits + 1, Condvar::new());
            let permit = || {
                left = usize::checked_sub(left, 1)?;
                Some(())
            };
            let done = work_through((0..100).collect(), permit, |item: usize| {
                let mut begun = seen.lock().unwrap();
                begun.0.push(item);
                begun.1.insert(std::thread::current().id());
                arrived.notify_all();
                // However late a helper starts, items are left for it: no thread ends its first before all have begun one.
                let late = arrived.wait_timeout_while(begun, Duration::from_secs(60), |begun| begun.1.len() < all);
                assert!(!late.unwrap().1.timed_out(), "fewer than {all} threads work");
                // Time for a thread too many to take one of the rest.
                std::thread::sleep(Duration::from_micros(100));
                Ok::<(), ()>(())
            });
            let (mut items, threads) = seen.into_inner().unwrap();
            items.sort();
            assert!(done.is_ok() && items == (0..100).collect::<Vec<_>>());
            assert_eq!(threads.len(), all, "{threads:?}");
        }
        let begun = Mutex::new(0);
        let fails = |item: usize| {
            *begun.lock().unwrap() += 1;
            if item == 5 { Err(item) } else { Ok(()) }
        };
        assert_eq!(work_through((0..1000).collect(), || None::<()>, fails), Err(5));
        assert_eq!(begun.into_inner().unwrap(), 6);
        let panics =
            || work_through((0..9).collect(), || Some(()), |item: usize| -> Result<(), ()> { panic!("{item}") });
        assert!(std::panic::catch_unwind(panics).is_err());
    }

    #[test]
    fn permits_are_had_by_as_many_as_there_are() {
        use std::sync::atomic::{AtomicBool, Ordering};
        let permits = Permits::new(2);
        // Whether or not the thread waits by then, it has none before one is given back.
        for _ in 0..100 {
            let (first, _second) = (permits.wait(), permits.free().unwrap());
            assert!(permits.free().is_none());
            let given_back = AtomicBool::new(false);
            std::thread::scope(|scope| {
                let waits = scope.spawn(|| {
                    let _permit = permits.wait();
                    assert!(given_back.load(Ordering::SeqCst), "a third permit of two");
                });
                std::thread::yield_now();
                given_back.store(true, Ordering::SeqCst);
                drop(first);
                waits.join().unwrap();
            });
        }
        let both = (permits.free(), permits.free());
        assert!(both.0.is_some() && both.1.is_some() && permits.free().is_none());
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
