//! A library between a program and Vulkan's loader, for tests. It is loaded in place of the loader, passes every call on, and
//!
//! - counts the calls that can fail, and makes the n-th of them fail;
//! - counts the objects that are alive, so that a test sees what was left;
//! - records the messages of the validation layer, where the environment has it;
//! - leaves waits and barriers out, each in its turn, so that a test of the tests sees that the layer notices.
//!
//! ```no_run
//! let probe = vulkan_probe::session();
//! probe.fail(7, vulkan_probe::Failure::DeviceMemory);
//! // ... open probe.library() as Vulkan's library, and use it ...
//! assert!(probe.messages().is_empty() && probe.alive().is_empty());
//! ```

mod calls;
mod client;
mod state;

pub use client::{Session, library_path, session};
pub use state::{Failure, Omission};
