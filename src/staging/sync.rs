//! What the queues between threads are made of. `tests/loom` puts loom's types in their place and tries every order in
//! which threads can run.

pub(crate) use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
