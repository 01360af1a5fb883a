//! A software stand-in for the CUDA driver, for tests: the library that programs open as `libcuda.so.1`, without a
//! card, and stricter than one. It runs copies late, in pieces and in threads of their own, and it names what a card
//! lets pass: accesses without an order, pinned memory refilled too early, memory used after it was freed, the wrong
//! context, leaks. What goes wrong on a real machine can be made to go wrong here, at a chosen call.
//!
//! A test asks for the machine it wants, then uses the driver as ever:
//!
//! ```no_run
//! use cuda_standin::{Config, Effect, Fault, FaultPlan, session};
//!
//! let cuda = session(&Config::with_devices(&[8 << 30, 4 << 30]).all_peers().late_micros(1000));
//! cuda.fault(&FaultPlan::one(Fault::nth("cuMemAlloc_v2", 3, Effect::OutOfMemory)));
//! // ... the code under test, over cudarc ...
//! cuda.report().assert_clean();
//! ```
//!
//! The library stands in for NVIDIA's management library too, over the same machine; programs that open
//! `libnvidia-ml.so.1` in that folder get this one.
//!
//! Three other vendors' drivers are of the same shape, and the library speaks as them, too, over the same machine: AMD's HIP
//! (`hip*`), Ascend's ACL (`acl*`) and Cambricon's CNDrv (`cn*`). A test opens it by its path ([`library_path`]) in place of
//! the vendor's. Faults and reports name calls as they are exported, numbers of faults are the vendor's own, and where a
//! driver's rules are not CUDA's, those are enforced:
//!
//! - HIP: each thread has a device current from its start, and no context takes it back; calls with a stream take the device
//!   from it; peers are device numbers; memory pools must not be used; functions of the program are called even if their
//!   stream has failed; of modules only texts in PTX are taken.
//! - ACL: nothing is current at first; work is enqueued in the context of its stream alone; copies of what is not pinned are
//!   over with their call; a failed copy goes unnoticed unless its context stops on failure; peer access goes one way; streams
//!   and recorded events run out ([`DeviceConfig::streams_limit`], [`DeviceConfig::events_limit`]).
//! - CNDrv: memory, queues and notifiers belong to a context, and no queue waits for a notifier of another one; no copy goes
//!   from one context of a device to another; host memory cannot be registered.
//!
//! The crate is built twice in one run: as the shared library that is the driver, and as the ordinary library that a
//! test links. The second one loads the first and speaks to it through exported calls named `standin_*`.
//! Programs that know nothing of this are run over it with `LD_LIBRARY_PATH` set to the folder `cuda-standin-names`
//! beside the built library (any test makes it), and the machine as JSON in `CUDA_STANDIN_CONFIG`.

mod acl;
mod alive;
mod backing;
mod batch;
mod capture;
mod client;
mod cndrv;
mod code;
mod config;
mod contexts;
mod control;
mod copy;
mod counted;
mod device;
mod extents;
mod fault;
mod ffi;
mod graph;
mod hazard;
mod hip;
mod kernel;
mod lane;
mod mapping;
mod memory;
mod nvml;
mod pace;
mod pinned;
mod pointer;
mod pool;
mod ptx;
mod ptx_compute;
mod ptx_decode;
mod ptx_op;
mod ptx_run;
mod ptx_shared;
mod ptx_table;
mod ptx_warp;
mod report;
mod shared;
mod stream;
mod sync;
mod vendor;
mod worker;
mod world;

pub use client::{Driver, LoadError, Session, library_path, session};
pub use config::{Config, DeviceConfig, Link, MemoryMode, Pcie, Peer};
pub use counted::Counted;
pub use fault::{Effect, Fault, FaultPlan};
pub use report::{Report, Rule, Violation};
