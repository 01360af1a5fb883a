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
