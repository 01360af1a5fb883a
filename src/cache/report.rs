//! What a clean-up did.

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
    /// Its key.
    pub key: String,
    /// Whether it stays at the next [`unload_all`](super::ModelCache::unload_all).
    pub kept: bool,
    /// Whether anyone beside the cache holds it.
    pub in_use: bool,
    /// The bytes that it holds on each device.
    pub bytes: BTreeMap<DeviceId, u64>,
    /// Those of them that it shares with no other model.
    pub own: BTreeMap<DeviceId, u64>,
    /// Why it cannot be used any more, where a device that holds some of it is lost.
    pub lost: Option<String>,
}

/// A model that left the cache.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Unloaded {
    /// Its key.
    pub key: String,
    /// The bytes that it held on each device, and no other model holds.
    pub bytes: BTreeMap<DeviceId, u64>,
}

/// What an unload did.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct UnloadReport {
    /// Models whose memory is free now.
    pub unloaded: Vec<Unloaded>,
    /// Models whose resident modules moved to the host, with the bytes that this freed on each device.
    pub demoted: Vec<Unloaded>,
    /// Models that left the cache and will be freed when their last user is done.
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

/// An operation on the cache that failed half way: what it did until then, and why it went no further.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
#[non_exhaustive]
pub struct Unfinished<R: fmt::Debug> {
    /// What was done.
    pub report: Box<R>,
    /// Why not all of it.
    #[source]
    pub error: Error,
}

impl<R: fmt::Debug> From<Unfinished<R>> for Error {
    fn from(unfinished: Unfinished<R>) -> Error {
        unfinished.error
    }
}

/// What a clean-up did.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct CleanupReport {
    /// What was asked for.
    pub request: FreeRequest,
    /// The models that went and stayed.
    pub unload: UnloadReport,
    /// How many reset hooks ran.
    pub resets: usize,
    /// The bytes that each device's allocator gave back.
    pub trimmed: BTreeMap<DeviceId, u64>,
    /// All devices before and after unloading; with `free_memory` also after the reset hooks and after emptying the
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
            write!(f, ", which gave back {}", Amounts(&self.trimmed))?;
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

/// Bytes per device, for people.
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
