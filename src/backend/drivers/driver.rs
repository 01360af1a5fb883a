//! A driver that is loaded: its verbs, what it has beyond them, and its library.

use std::ffi::{CStr, OsStr, c_char, c_int};
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use libloading::Library;

use super::cuda::calls::{BatchCalls, CopyAttributes, KernelCalls, OldBatchCalls, PoolCalls};
use super::table::Spelling;
use super::verbs::{
    Address, CaptureMode, Code, DeviceHandle, Failure, Meaning, Outcome, Peers, Rules, StreamHandle, Verbs, given,
};
use crate::backend::process::Process;
use crate::device::DeviceId;

/// A driver that is loaded, has the required calls, and is initialised.
pub(super) struct Driver {
    pub(super) verbs: Box<dyn Verbs>,
    pub(super) rules: Rules,
    /// The calls of memory pools, if the driver has them. A device may still not support pools.
    pub(super) pools: Option<PoolCalls>,
    /// The calls of kernels, or why there are none.
    pub(super) kernels: Result<KernelCalls, String>,
    /// The calls that queue several copies at once, in one of two interfaces.
    pub(super) batches: Option<Batches>,
    /// Whether the driver has refused a batch.
    refuses_batches: AtomicBool,
    /// The process that initialised it.
    pub(super) process: Process,
}

/// The interfaces of batched copies.
pub(super) enum Batches {
    Now(BatchCalls),
    Old(OldBatchCalls),
}

impl Batches {
    /// Finds the interface of a driver for this version of CUDA.
    pub(super) fn find(library: &Library, version: c_int) -> Option<Batches> {
        match version {
            13_000.. => BatchCalls::find(library, Spelling::Own).map(Batches::Now).ok(),
            12_080.. => OldBatchCalls::find(library, Spelling::Own).map(Batches::Old).ok(),
            _ => None,
        }
    }
}

impl Driver {
    /// A driver that has its verbs and no more.
    pub(super) fn new(verbs: impl Verbs + 'static, rules: Rules) -> Driver {
        let none = format!("there are no kernels for {} devices", rules.kind);
        Driver {
            verbs: Box::new(verbs),
            rules,
            pools: None,
            kernels: Err(none),
            batches: None,
            refuses_batches: AtomicBool::new(false),
            process: Process::current(),
        }
    }

    /// Whether both are the same library, whose handles are then the same, too.
    pub(super) fn is(&self, other: &Driver) -> bool {
        self.verbs.library() == other.verbs.library()
    }

    /// Whether several copies can be queued by one call.
    pub(super) fn takes_batches(&self) -> bool {
        self.batches.is_some() && !self.refuses_batches.load(Ordering::Relaxed)
    }

    /// Queues copies between addresses with one call. If the driver refuses, single copies are queued from then on.
    ///
    /// # Safety
    /// As for single copies. The three lists are equally long, and no destination overlaps another source or destination.
    pub(super) unsafe fn copy_batch(
        &self,
        dst: &[Address],
        src: &[Address],
        bytes: &[usize],
        stream: StreamHandle,
    ) -> Option<Outcome> {
        let (count, attributes, from) = (dst.len(), CopyAttributes::IN_STREAM_ORDER, 0);
        let (dst, src, bytes) = (dst.as_ptr(), src.as_ptr(), bytes.as_ptr());
        let mut failed = 0;
        // SAFETY: the lists and the attributes outlive the call; the rest is the caller's promise.
        let outcome = unsafe {
            match self.batches.as_ref()? {
                Batches::Now(calls) => {
                    calls.copy(dst, src, bytes, count, &raw const attributes, &raw const from, 1, stream)
                }
                Batches::Old(calls) => calls.copy(
                    dst,
                    src,
                    bytes,
                    count,
                    &raw const attributes,
                    &raw const from,
                    1,
                    &raw mut failed,
                    stream,
                ),
            }
        };
        match outcome {
            Err(failure) if matches!(failure.meaning, Meaning::InvalidValue | Meaning::NotSupported) => {
                tracing::debug!(%failure, "copies are queued one by one");
                self.refuses_batches.store(true, Ordering::Relaxed);
                None
            }
            outcome => Some(outcome),
        }
    }

    /// Relaxes the calling thread's capture mode, so that captures of other threads cannot forbid it to query events, to free
    /// or to pin: this backend's calls concern its own work, never captured work. Returns the previous mode, to be
    /// [restored](Driver::restore_capture_mode), if it was another.
    pub(super) fn leave_captures(&self) -> Option<CaptureMode> {
        self.verbs.exchange_capture_mode(CaptureMode::RELAXED).filter(|&before| before != CaptureMode::RELAXED)
    }

    /// Restores the calling thread's previous capture mode.
    pub(super) fn restore_capture_mode(&self, mode: CaptureMode) {
        let _ = self.verbs.exchange_capture_mode(mode);
    }

    /// Whether the device's context is active in this process, opened for example by the caller.
    pub(super) fn has_context(&self, id: DeviceId) -> bool {
        self.handle(id).is_some_and(|device| self.verbs.is_active(device))
    }

    /// Whether `to` can reach the memory of `from`, according to the driver. Opens neither.
    pub(super) fn can_reach(&self, to: DeviceId, from: DeviceId) -> bool {
        if matches!(self.rules.peers, Peers::Never(_)) {
            return false;
        }
        let (Some(to), Some(from)) = (self.handle(to), self.handle(from)) else { return false };
        self.verbs.can_access_peer(to, from).unwrap_or(false)
    }

    /// The driver's name for a code, or its number if the driver has none.
    pub(super) fn code_name(&self, code: Code) -> String {
        self.verbs.error_name(code).unwrap_or_else(|| format!("code {}", code.0))
    }

    /// The driver's description of a code.
    pub(super) fn code_text(&self, code: Code) -> String {
        self.verbs.error_text(code).unwrap_or_else(|| "this driver has no words for it".to_owned())
    }

    /// A refused call with the driver's description.
    pub(super) fn describe(&self, failure: Failure) -> String {
        let Failure { call, code, .. } = failure;
        format!("{}: {} ({})", shown(call), self.code_name(code), self.code_text(code))
    }

    /// The driver's own handle of a device.
    pub(super) fn handle(&self, id: DeviceId) -> Option<DeviceHandle> {
        self.verbs.device(id.index()).ok()
    }
}

/// A call's name without the version of its interface, as in the documentation.
pub(super) fn shown(call: &'static str) -> &'static str {
    call.trim_end_matches("_v2")
}

/// A device's address on the bus as `ask` writes it into a text of so many bytes, in the form of all backends: with a domain of eight
/// digits.
#[cfg(any(feature = "ascend", feature = "cambricon", feature = "hip"))]
pub(super) fn pci_bus_id(ask: impl FnOnce(*mut c_char, c_int) -> Outcome) -> Option<String> {
    let mut text = [0u8; 64];
    ask(text.as_mut_ptr().cast(), text.len() as c_int - 1).ok()?;
    let text = CStr::from_bytes_until_nul(&text).ok()?.to_str().ok()?;
    let (domain, rest) = text.split_once(':')?;
    Some(format!("{:08x}:{}", u32::from_str_radix(domain, 16).ok()?, rest.to_ascii_lowercase()))
}

/// What is said of a library that lacks a required call.
pub(super) fn lacks(missing: &str) -> String {
    format!("the driver has no {missing}; it is older than this library can use")
}

/// The file that the caller names, or else the environment.
pub(super) fn named(file: Option<&Path>, variable: &str) -> Option<PathBuf> {
    file.map(Path::to_owned).or_else(|| std::env::var_os(variable).map(PathBuf::from))
}

/// Opens a library for good.
///
/// # Errors
/// The reason.
pub(super) fn open(name: &OsStr) -> Result<ManuallyDrop<Library>, libloading::Error> {
    // SAFETY: loading a driver runs its initialisers, which is what opening a driver means.
    unsafe { Library::new(name) }.map(ManuallyDrop::new)
}

/// Opens the library `file`, or the first of `names` that is there. `what` is what a library by these names is.
///
/// # Errors
/// The reason, with what the system says of one that is there and cannot be loaded.
pub(super) fn open_any(file: Option<&Path>, names: &[PathBuf], what: &str) -> Result<ManuallyDrop<Library>, String> {
    if let Some(file) = file {
        return open(file.as_os_str()).map_err(|error| format!("{} cannot be loaded: {error}", file.display()));
    }
    let mut broken = String::new();
    for name in names {
        match open(name.as_os_str()) {
            Ok(library) => return Ok(library),
            // One that is nowhere is not worth a word.
            Err(error) => {
                let error = error.to_string();
                let nowhere = error.starts_with(&*name.to_string_lossy()) && error.contains("No such file");
                if !nowhere && cfg!(target_os = "linux") {
                    broken = format!(" ({error})");
                }
            }
        }
    }
    let names: Vec<_> = names.iter().map(|name| name.display().to_string()).collect();
    Err(format!("no {what}: none of {} can be loaded{broken}", names.join(", ")))
}

/// A file of a vendor's toolkit: in the folder that the first of these variables names, or else in `folder`.
#[cfg(any(feature = "ascend", feature = "cambricon", feature = "corex"))]
pub(super) fn installed(variables: &[&str], folder: &str, file: &str) -> PathBuf {
    let named = variables.iter().find_map(std::env::var_os);
    named.map_or_else(|| PathBuf::from(folder), PathBuf::from).join(file)
}

/// What is said where a driver sees no device. `what` is whose they would be, `variables` limit which are seen.
pub(super) fn no_device(what: &str, variables: &[&str]) -> String {
    let set = variables.iter().find_map(|name| std::env::var(name).ok().map(|set| (name, set)));
    match set {
        Some((name, visible)) => format!("no {what} device is visible; {name} is `{visible}`"),
        None => format!("the driver sees no {what} device"),
    }
}

/// A text of the driver's whose address `ask` writes.
pub(super) fn text(ask: impl FnOnce(*mut *const c_char) -> Outcome) -> Option<String> {
    let text = given(std::ptr::null(), ask).ok()?;
    // SAFETY: the driver returns null or a zero-terminated text that lives as long as the driver.
    (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
}
