//! The report of a load.

use std::fmt;
use std::time::Duration;

use serde::Serialize;

use crate::bytes::ByteSize;
use crate::patch::Requantised;

/// The figures of a load.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct LoadReport {
    /// Bytes placed.
    pub bytes: u64,
    /// Bytes read from the checkpoint's files. A patched tensor counts with its bytes in the file, and with the bytes of the
    /// other tensors that its patch needs, and a [compressed](crate::checkpoint::write_compressed) one with those of its values.
    pub read: u64,
    /// Bytes that stay in the checkpoint's files, where a plan has them on `disk` and nothing changes them. They are not read by the
    /// load; a layer reads them for its turn.
    pub in_files: u64,
    /// Bytes that are not in memory because modules are kept [compressed](crate::Planner::compress). They count as placed.
    pub saved: u64,
    /// The bytes of files that were read directly from the disk in this time, past the page cache. Loads that read the same files
    /// at one time count each other's bytes, here and in the next two.
    pub direct: u64,
    /// The bytes of files that the page cache dropped as soon as they were read, where the system refused direct reads.
    pub dropped: u64,
    /// For each file of which parts were not in the page cache, and that the system would not read directly, why.
    pub not_direct: Vec<String>,
    /// Bytes of files that a device read straight into its own memory, without host memory in between
    /// ([GPUDirect Storage](crate::backend::FileReads)). They count in `read` too. If the caller wants these reads even where they pass
    /// host memory ([`Gds::Always`](crate::backend::Gds::Always)), they count as well, and `not_gds` says so.
    pub gds: u64,
    /// For each device that could have read so, and each file that it did not take, why bytes passed host memory.
    pub not_gds: Vec<String>,
    /// Bytes of memory shared with the model that this one was [derived](crate::Loader::derive) from.
    pub shared: u64,
    /// Bytes copied from the memory of that model.
    pub copied: u64,
    /// Modules placed.
    pub modules: usize,
    /// Tensors that adapters changed, or that were cast.
    pub patched: usize,
    /// The tensors among these that their device's kernels patched. The host patched the others, with the same bytes as
    /// result.
    pub patched_on_device: usize,
    /// For each device whose kernels could not patch what they should have, the first reason.
    pub host_instead: Vec<String>,
    /// Values beyond the range of the storage type, set to its largest.
    pub saturated: u64,
    /// The values of changed weights that became blocks of GGML's types [again](crate::Weights::requantise), or were
    /// [packed again](crate::Weights::repacked), and how near these came to them.
    pub requantised: Requantised,
    /// Of the tensors of these, the one whose error is the largest for the size of its values, or that has the most
    /// inexpressible blocks if any has one.
    pub worst_requantised: Option<String>,
    /// Weights whose changes are [deferred](crate::Weights::defer): they have the file's bytes, and factors beside them.
    pub deferred: usize,
    /// The bytes of these factors, which count as placed and not as read.
    pub deferred_bytes: u64,
    /// The time that the load took.
    pub time: Duration,
}

impl fmt::Display for LoadReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.time.as_secs_f64();
        write!(f, "{} in {} modules, {} tensors patched, ", ByteSize(self.bytes).human(), self.modules, self.patched)?;
        // What is left in files takes no time.
        let moved = self.bytes.saturating_sub(self.in_files);
        write!(f, "{seconds:.3} s ({:.2} GB/s)", moved as f64 / seconds.max(1e-9) / 1e9)?;
        for (bytes, how) in [(self.shared, "shared with"), (self.copied, "copied from")] {
            if bytes > 0 {
                write!(f, ", {} {how} another model", ByteSize(bytes).human())?;
            }
        }
        if self.deferred > 0 {
            write!(
                f,
                ", {} weights deferred with {} of factors",
                self.deferred,
                ByteSize(self.deferred_bytes).human()
            )?;
        }
        if self.in_files > 0 {
            write!(f, ", {} left in the model's files", ByteSize(self.in_files).human())?;
        }
        if self.saved > 0 {
            write!(f, ", {} saved by compression", ByteSize(self.saved).human())?;
        }
        for (bytes, how) in [(self.direct, "directly"), (self.dropped, "without keeping them cached")] {
            if bytes > 0 {
                write!(f, ", {} read {how}", ByteSize(bytes).human())?;
            }
        }
        self.not_direct.iter().try_for_each(|why| write!(f, ", not read directly: {why}"))?;
        if self.gds > 0 {
            write!(f, ", {} read by GPUDirect Storage", ByteSize(self.gds).human())?;
            self.not_gds.iter().try_for_each(|why| write!(f, ", not by it: {why}"))?;
        }
        if self.saturated > 0 {
            write!(f, ", {} values saturated", self.saturated)?;
        }
        let requantised = &self.requantised;
        if requantised.values > 0 {
            let (error, rms) = (requantised.rms_error(), requantised.rms());
            write!(f, ", {} values requantised with an RMS error of {error:.3e} (RMS {rms:.3e})", requantised.values)?;
            self.worst_requantised.iter().try_for_each(|worst| write!(f, ", worst in `{worst}`"))?;
        }
        if requantised.inexpressible > 0 {
            write!(f, ", {} blocks not finite", requantised.inexpressible)?;
        }
        if self.patched_on_device > 0 {
            write!(f, ", {} patched on the device", self.patched_on_device)?;
        }
        self.host_instead.iter().try_for_each(|why| write!(f, ", patched on the host instead: {why}"))
    }
}
