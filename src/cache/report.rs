//! Reports of unloading and clean-ups.

use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;

use super::FreeRequest;
use crate::bytes::ByteSize;
use crate::device::{DeviceId, MemorySnapshot};
use crate::error::Error;

/// A model in the cache.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct EntryInfo {
    /// The model's key.
    pub key: String,
    /// Whether the model stays at the next [`unload_all`](super::ModelCache::unload_all).
    pub kept: bool,
    /// Whether anyone but the cache holds the model.
    pub in_use: bool,
    /// The bytes that the model holds on each device.
    pub bytes: BTreeMap<DeviceId, u64>,
    /// The bytes among these that no other model shares.
    pub own: BTreeMap<DeviceId, u64>,
    /// Why the model cannot be used any more, if a device that holds part of it is lost.
    pub lost: Option<String>,
}

/// A model that left the cache.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Unloaded {
    /// The model's key.
    pub key: String,
    /// The bytes that the model held on each device and no other model holds.
    pub bytes: BTreeMap<DeviceId, u64>,
}

/// The report of an unload.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct UnloadReport {
    /// The models whose memory is free now.
    pub unloaded: Vec<Unloaded>,
    /// The models whose resident modules moved to the host, with the bytes freed on each device.
    pub demoted: Vec<Unloaded>,
    /// The models that left the cache and will be freed when their last user drops them.
    pub deferred: Vec<Unloaded>,
    /// The keys of the models that stayed.
    pub kept: Vec<String>,
}

impl UnloadReport {
    /// The bytes freed on each device.
    pub fn freed(&self) -> BTreeMap<DeviceId, u64> {
        sum(self.unloaded.iter().chain(&self.demoted))
    }

    pub(super) fn log(&self) {
        if self.unloaded.is_empty() && self.deferred.is_empty() && self.demoted.is_empty() {
            tracing::trace!(kept = self.kept.len(), "nothing to unload");
        } else {
            tracing::info!("{self}");
        }
    }
}

/// A cache operation that failed half way: what was done until then, and the error.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
#[non_exhaustive]
pub struct Unfinished<R: fmt::Debug> {
    /// The report of what was done.
    pub report: Box<R>,
    /// The error that stopped the operation.
    #[source]
    pub error: Error,
}

impl<R: fmt::Debug> From<Unfinished<R>> for Error {
    fn from(unfinished: Unfinished<R>) -> Error {
        unfinished.error
    }
}

/// The report of a clean-up.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct CleanupReport {
    /// The request.
    pub request: FreeRequest,
    /// The unloaded and kept models.
    pub unload: UnloadReport,
    /// The number of reset hooks that ran.
    pub resets: usize,
    /// The bytes that each device's allocator released.
    pub trimmed: BTreeMap<DeviceId, u64>,
    /// Snapshots of all devices before and after unloading; with `free_memory` also after the reset hooks and after emptying the
    /// allocator caches.
    pub snapshots: Vec<MemorySnapshot>,
}

impl fmt::Display for UnloadReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let keys = |list: &[Unloaded]| list.iter().map(|u| u.key.as_str()).collect::<Vec<_>>().join(", ");
        match self.unloaded.as_slice() {
            [] => write!(f, "unloaded nothing")?,
            unloaded => write!(f, "unloaded {} (freed {})", keys(unloaded), Amounts(&sum(unloaded)))?,
        }
        if !self.demoted.is_empty() {
            write!(f, "; demoted {} (freed {})", keys(&self.demoted), Amounts(&sum(&self.demoted)))?;
        }
        if !self.deferred.is_empty() {
            write!(f, "; still in use: {} ({})", keys(&self.deferred), Amounts(&sum(&self.deferred)))?;
        }
        if !self.kept.is_empty() {
            write!(f, "; kept {}", self.kept.join(", "))?;
        }
        Ok(())
    }
}

impl fmt::Display for CleanupReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.unload)?;
        if self.request.free_memory {
            write!(f, "; allocator caches emptied")?;
        }
        if self.trimmed.values().any(|&bytes| bytes > 0) {
            write!(f, ", which released {}", Amounts(&self.trimmed))?;
        }
        if self.resets > 0 {
            write!(f, "; {} reset hooks ran", self.resets)?;
        }
        Ok(())
    }
}

fn sum<'a>(list: impl IntoIterator<Item = &'a Unloaded>) -> BTreeMap<DeviceId, u64> {
    let mut total = BTreeMap::new();
    for (&device, &bytes) in list.into_iter().flat_map(|u| &u.bytes) {
        *total.entry(device).or_default() += bytes;
    }
    total
}

/// Displays bytes per device.
struct Amounts<'a>(&'a BTreeMap<DeviceId, u64>);

impl fmt::Display for Amounts<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("nothing");
        }
        for (index, (device, bytes)) in self.0.iter().enumerate() {
            let comma = if index > 0 { ", " } else { "" };
            write!(f, "{comma}{} on {device}", ByteSize(*bytes).human())?;
        }
        Ok(())
    }
}
