//! The process that something belongs to. A fork has a copy of it, and none of the threads, none of the driver's state and
//! none of the pinned memory behind it.

use crate::error::{Error, Result};

/// The process that opened a device or allocated memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Process(u32);

impl Process {
    /// The calling one.
    pub(crate) fn current() -> Process {
        Process(std::process::id())
    }

    /// Whether this is the calling process.
    pub(crate) fn is_current(self) -> bool {
        self == Process::current()
    }

    /// Makes sure of that.
    ///
    /// # Errors
    /// [`Error::Forked`] in a fork of it.
    pub(crate) fn check(self) -> Result<()> {
        let Process(child) = Process::current();
        if child == self.0 { Ok(()) } else { Err(Error::Forked { parent: self.0, child }) }
    }
}
