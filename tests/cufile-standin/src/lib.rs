//! A software stand-in for libcufile, NVIDIA's library of GPUDirect Storage, for tests: without a card, and stricter than the
//! real one. A read copies bytes of the file to device memory by the CUDA driver that is loaded, so over `cuda-standin` that
//! driver's rules hold for it too. What breaks the library's own rules it refuses and names: calls before the driver is open or
//! without a context, files that are not open for direct reads, handles that are unknown or given back during a read, memory that is
//! not the device's, and what is still registered when it is closed.
//!
//! The crate is built twice in one run: as the shared library, and as the ordinary library that a test links. The second one
//! loads the first and speaks to it through exported calls named `standin_*`.
//!
//! ```no_run
//! use cufile_standin::{Config, Fault, session};
//!
//! let library = session(&Config::default());
//! library.fault(&[Fault::nth("cuFileRead", 2, -5030)]);
//! // ... the code under test, with library_path() as its libcufile ...
//! library.report().assert_clean();
//! ```
#![cfg(target_os = "linux")]

mod client;
mod config;
mod cuda;
mod ffi;
mod world;

pub use client::{Session, library_path, session};
pub use config::{Config, Fault, Report};
