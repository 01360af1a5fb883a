//! The locks that the queues between threads use. `tests/loom` substitutes loom's types and tries every interleaving of the
//! threads.

pub(crate) use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
