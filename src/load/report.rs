//! How a load went, as plain figures.

use std::fmt;
use std::time::Duration;

use serde::Serialize;

use crate::bytes::ByteSize;

/// How a load went.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct LoadReport {
    /// Bytes placed.
    pub bytes: u64,
    /// Bytes read from the checkpoint's files. Those of a tensor that an adapter changes count as the file has them, with
    /// what its patch needs beside them.
    pub read: u64,
    /// Bytes of memory that is another model's, too: of a model made [out of it](crate::Loader::derive).
    pub shared: u64,
    /// Bytes copied from the memory of such a model.
    pub copied: u64,
    /// Modules placed.
    pub modules: usize,
    /// Tensors that adapters changed.
    pub patched: usize,
    /// Those of them that the device they are for patched, by its kernels; the host patched the others, to the same bytes.
    pub patched_on_device: usize,
    /// For each device whose kernels were to patch and could not the first reason.
    pub host_instead: Vec<String>,
    /// Values that the storage type could not hold and that were set to its largest.
    pub saturated: u64,
    /// The time that it took.
    pub time: Duration,
}

impl fmt::Display for LoadReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.time.as_secs_f64();
        write!(f, "{} in {} modules, {} tensors patched, ", ByteSize(self.bytes).human(), self.modules, self.patched)?;
        write!(f, "{seconds:.3} s ({:.2} GB/s)", self.bytes as f64 / seconds.max(1e-9) / 1e9)?;
        for (bytes, how) in [(self.shared, "shared with"), (self.copied, "copied from")] {
            if bytes > 0 {
                write!(f, ", {} {how} another model", ByteSize(bytes).human())?;
            }
        }
        if self.saturated > 0 {
            write!(f, ", {} values saturated", self.saturated)?;
        }
        if self.patched_on_device > 0 {
            write!(f, ", {} patched on the device", self.patched_on_device)?;
        }
        self.host_instead.iter().try_for_each(|why| write!(f, ", patched on the host instead: {why}"))
    }
}
