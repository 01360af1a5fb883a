//! Room on one device: who has to go for it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Entries, Entry, ModelCache, Retention, UnloadReport, let_go, no_model};
use crate::backend::Device;
use crate::device::DeviceId;
use crate::error::{Error, Holder, NoRoom, Result};
use crate::registry::Registry;

/// Which models may go to make room. Those in use never do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Evict {
    /// The flagged ones.
    Flagged,
    /// The flagged ones, then the kept ones.
    Kept,
}

/// What was taken out of the cache for room, and the keys of those that stay.
struct Chosen {
    leaving: Vec<(String, Entry)>,
    kept: Vec<String>,
}

/// How long memory that is let go of may take to come back: devices free when the last work that used it is done.
const DEADLINE: Duration = Duration::from_secs(5);

impl ModelCache {
    /// Sees to it that `bytes` can be taken on a device. Where they cannot, lets go of models that hold memory there and
    /// that nobody uses: flagged ones first, then kept ones if `evict` allows it, each time the one used least
    /// recently, and no more than it takes. Models on other devices stay.
    ///
    /// # Errors
    /// [`Error::NoRoom`] with the bytes short and all that hold memory there; nothing goes when that would not be
    /// enough. [`Error::UnknownDevice`] and [`Error::DeviceAbsent`] as [`Registry::device`]; whatever asking the
    /// device meets.
    pub fn make_room(&self, registry: &Registry, device: DeviceId, bytes: u64, evict: Evict) -> Result<UnloadReport> {
        let device = registry.device(device)?;
        let mut available = available(&*device)?;
        let mut chosen = self.choose(device.id(), bytes, available, evict);
        if chosen.is_none() {
            // What the allocator keeps for reuse may be what is missing.
            device.trim()?;
            available = self::available(&*device)?;
            chosen = self.choose(device.id(), bytes, available, evict);
        }
        let Some(Chosen { leaving, kept }) = chosen else { return Err(self.no_room(&*device, bytes, available)) };
        let report = let_go(leaving, kept);
        report.log();
        let until = Instant::now() + DEADLINE;
        loop {
            available = self::available(&*device)?;
            if available >= bytes {
                return Ok(report);
            }
            if Instant::now() >= until {
                return Err(self.no_room(&*device, bytes, available));
            }
            device.trim()?;
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Flags every model but `key` that holds memory of a device; the keys of those flagged now.
    ///
    /// # Errors
    /// [`Error::Invalid`] when there is no model `key`; nothing is flagged then.
    pub fn eject_others(&self, key: &str, device: DeviceId) -> Result<Vec<String>> {
        let mut entries = self.entries();
        if !entries.models.contains_key(key) {
            return Err(no_model(key));
        }
        let others = entries.models.iter_mut().filter(|(other, entry)| *other != key && entry.bytes_on(device) > 0);
        let flag = |(other, entry): (&String, &mut Entry)| {
            entry.retention = Retention::Unload;
            other.clone()
        };
        Ok(others.map(flag).collect())
    }

    /// Takes as many models out as it needs to get from `available` to `bytes`, with the keys of those that stay; none
    /// when all together are too few, and nothing is taken out then.
    fn choose(&self, id: DeviceId, bytes: u64, available: u64, evict: Evict) -> Option<Chosen> {
        let entries: &mut Entries = &mut self.entries();
        let may_go = |entry: &Entry| entry.retention == Retention::Unload || evict == Evict::Kept;
        let candidates = entries.models.iter().filter(|(_, e)| may_go(e) && e.bytes_on(id) > 0 && !e.in_use());
        let mut order: Vec<_> = candidates
            .map(|(key, entry)| ((entry.retention == Retention::Keep, entry.used), key.clone(), entry.bytes_on(id)))
            .collect();
        order.sort();
        let mut short = bytes.saturating_sub(available);
        let needed = order.iter().take_while(|(_, _, held)| {
            let still = short > 0;
            short = short.saturating_sub(*held);
            still
        });
        let keys: Vec<String> = needed.map(|(_, key, _)| key.clone()).collect();
        if short > 0 {
            return None;
        }
        let leaving = keys.into_iter().filter_map(|key| entries.models.remove_entry(&key)).collect();
        Some(Chosen { leaving, kept: entries.models.keys().cloned().collect() })
    }

    fn no_room(&self, device: &dyn Device, requested: u64, available: u64) -> Error {
        let id = device.id();
        let holder = |(key, entry): (&String, &Entry)| Holder {
            key: key.clone(),
            bytes: entry.bytes_on(id),
            kept: entry.retention == Retention::Keep,
            in_use: entry.in_use(),
        };
        let holders: Vec<Holder> = self.entries().models.iter().map(holder).filter(|h| h.bytes > 0).collect();
        let held = holders.iter().map(|holder| holder.bytes).sum();
        let (short, others) = (requested.saturating_sub(available), device.ledger().charged().saturating_sub(held));
        Error::NoRoom(Box::new(NoRoom { device: id, requested, available, short, holders, others }))
    }
}

impl Entry {
    fn bytes_on(&self, device: DeviceId) -> u64 {
        self.model.bytes().get(&device).copied().unwrap_or(0)
    }
}

/// What a load could take there now: no more than the system or driver has, and no more than the ledger allows.
fn available(device: &dyn Device) -> Result<u64> {
    let ledger: &Arc<_> = device.ledger();
    Ok(device.memory()?.available().min(ledger.limit().saturating_sub(ledger.charged())))
}
