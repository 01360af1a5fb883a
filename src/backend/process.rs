//! The process that owns an object. A fork has a copy of the object, but none of the threads, driver state or pinned memory
//! behind it.

use crate::error::{Error, Result};

/// The process that opened a device or allocated memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Process(u32);

impl Process {
    /// The calling process.
    pub(crate) fn current() -> Process {
        Process(std::process::id())
    }

    /// Whether this is the calling process.
    pub(crate) fn is_current(self) -> bool {
        self == Process::current()
    }

    /// Checks that this is the calling process.
    ///
    /// # Errors
    /// [`Error::Forked`] in a fork of this process.
    pub(crate) fn check(self) -> Result<()> {
        let Process(child) = Process::current();
        if child == self.0 { Ok(()) } else { Err(Error::Forked { parent: self.0, child }) }
    }
}
