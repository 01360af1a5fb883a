//! Devices without room, and resources in use.

use std::fmt;

use serde::Serialize;

use crate::device::DeviceId;

/// The reason why a cache cannot make room: both numbers, and the holders of the device's memory.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{device} has {available} bytes free, the request needs {requested}: {short} bytes short; it is held by {}",
    Holders(self)
)]
#[non_exhaustive]
pub struct NoRoom {
    /// The device.
    pub device: DeviceId,
    /// Bytes asked for.
    pub requested: u64,
    /// Bytes that can be had now.
    pub available: u64,
    /// Bytes that are missing when all that may go has gone.
    pub short: u64,
    /// The cached models that hold memory there, in order of key.
    pub holders: Vec<Holder>,
    /// Bytes that this process has taken there and no cached model holds.
    pub others: u64,
}

/// A cached model that holds memory of a device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Holder {
    /// Its key.
    pub key: String,
    /// The bytes that it holds there.
    pub bytes: u64,
    /// Whether it is to be kept.
    pub kept: bool,
    /// Whether anyone but the cache holds it.
    pub in_use: bool,
}

struct Holders<'a>(&'a NoRoom);

impl fmt::Display for Holders<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for Holder { key, bytes, kept, in_use } in &self.0.holders {
            let (kept, used) = (if *kept { ", kept" } else { "" }, if *in_use { ", in use" } else { "" });
            write!(f, "`{key}` ({bytes} bytes{kept}{used}), ")?;
        }
        write!(f, "others ({} bytes)", self.0.others)
    }
}

/// A resource in use: drop what holds it, or wait.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InUse {
    /// Guards hold all slots of a streamer that are large enough for the layer that is asked for.
    #[error(
        "all {count} slots are held by guards; drop one before asking for another layer, or plan with a greater depth"
    )]
    Slots {
        /// How many there are.
        count: usize,
    },
    /// Another streamer has the model's slots.
    #[error("the model, or one that shares its slots, is being streamed already; they are for one streamer")]
    Streamed,
    /// The model is being loaded by this thread, or by one that waits for it.
    #[error(
        "the model `{key}` is being loaded and is asked for inside of that load, or of one that it waits for, so none of them would end"
    )]
    Loading {
        /// Its key.
        key: String,
    },
    /// Copies that are under way use a buffer.
    #[error("a buffer of {bytes} bytes on {device} is in use by copies that are under way")]
    Buffer {
        /// Where it is.
        device: DeviceId,
        /// How many bytes.
        bytes: usize,
    },
}
