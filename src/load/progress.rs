//! Progress of a load, and cancelling it.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Receives the progress of a load. Implemented by every `Fn(u64, u64) + Sync`.
pub trait Progress: Sync {
    /// Called when `done` bytes of `of` are in place, by the load's workers and in any order. `done` never exceeds `of`.
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

/// A switch that stops a load from another thread. Clones share one switch.
#[derive(Clone, Debug, Default)]
pub struct Cancel(Arc<AtomicBool>);

impl Cancel {
    /// A switch that is not set.
    pub fn new() -> Cancel {
        Cancel::default()
    }

    /// Sets the switch. It stays set.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Whether the switch is set.
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}
