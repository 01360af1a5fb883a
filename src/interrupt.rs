//! The end of a read that is no longer wanted.
//!
//! A read of a file is over before anyone would end it. One of a store far away may wait for seconds, so the thread that reads asks from
//! time to time whether it should go on. What it asks belongs to the work that the thread does, and not to one source or one call.

use std::cell::RefCell;
use std::sync::Arc;

use crate::error::Result;

/// What tells whether to go on.
pub(crate) type Check = Arc<dyn Fn() -> Result<()> + Send + Sync>;

thread_local! {
    static CHECK: RefCell<Option<Check>> = const { RefCell::new(None) };
}

/// Runs `work`. Reads that this thread makes meanwhile end with the error of `check`, once it returns one.
pub(crate) fn interruptible<T>(check: impl Fn() -> Result<()> + Send + Sync + 'static, work: impl FnOnce() -> T) -> T {
    interruptible_by(Some(Arc::new(check)), work)
}

/// The check of the work that this thread does, for threads that help it.
pub(crate) fn current() -> Option<Check> {
    CHECK.with_borrow(Clone::clone)
}

/// As [`interruptible`], with the check of another thread.
pub(crate) fn interruptible_by<T>(check: Option<Check>, work: impl FnOnce() -> T) -> T {
    /// Puts the check of the work around this one back, even if this one panics.
    struct Before(Option<Check>);
    impl Drop for Before {
        fn drop(&mut self) {
            CHECK.set(self.0.take());
        }
    }
    let _before = Before(CHECK.replace(check));
    work()
}

/// Fails when the work that this thread reads for, a load for example, has been cancelled or is out of time. A
/// [`Source`](crate::transfer::Source) whose reads may wait asks this several times a second. In threads that do no such work it never fails.
///
/// # Errors
/// [`Error::Cancelled`](crate::Error::Cancelled), [`Error::TimedOut`](crate::Error::TimedOut).
pub fn check_interrupt() -> Result<()> {
    current().map_or(Ok(()), |check| check())
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;
    use crate::error::Error;

    #[test]
    fn the_check_is_that_of_the_innermost_work() {
        let on = Arc::new(AtomicBool::new(false));
        let cancelled = || Err(Error::Cancelled { done: crate::ByteSize(1), of: crate::ByteSize(2) });
        assert!(check_interrupt().is_ok());
        let inner = Arc::clone(&on);
        interruptible(
            || Err(Error::bug("the outer check")),
            || {
                let check = move || if inner.load(Ordering::Relaxed) { cancelled() } else { Ok(()) };
                interruptible(check, || {
                    assert!(check_interrupt().is_ok());
                    on.store(true, Ordering::Relaxed);
                    assert!(matches!(check_interrupt(), Err(Error::Cancelled { .. })));
                    assert!(std::thread::spawn(|| check_interrupt().is_ok()).join().unwrap());
                });
                assert!(matches!(check_interrupt(), Err(Error::Bug { .. })));
            },
        );
        let panics = || interruptible(cancelled, || panic!("as it should"));
        assert!(std::panic::catch_unwind(panics).is_err());
        assert!(check_interrupt().is_ok());
    }
}
