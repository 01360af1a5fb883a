//! Seeing how far a load is, and stopping it.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Is told how far a load is. Any `Fn(u64, u64) + Sync` is one.
pub trait Progress: Sync {
    /// `done` bytes of `of` are in place. Called by the load's workers, in any order; `done` never passes `of`.
    fn advance(&self, done: u64, of: u64);
}

impl<F: Fn(u64, u64) + Sync> Progress for F {
    fn advance(&self, done: u64, of: u64) {
        self(done, of);
    }
}

impl fmt::Debug for dyn Progress + '_ {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Progress")
    }
}

/// Stops a load from another thread. Clones are the same switch.
#[derive(Clone, Debug, Default)]
pub struct Cancel(Arc<AtomicBool>);

impl Cancel {
    /// A switch that is not set.
    pub fn new() -> Cancel {
        Cancel::default()
    }

    /// Sets it; it stays set.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Whether it is set.
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}
