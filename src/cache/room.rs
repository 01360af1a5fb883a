//! Making room on one device: which models to unload, or to demote to the host.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::report::{UnloadReport, Unloaded};
use super::{Entries, Entry, ModelCache, Retention, Unfinished, no_model, release};
use crate::backend::Device;
use crate::device::{DeviceId, Machine};
use crate::error::{Error, Holder, NoRoom, Result};
use crate::load::{Loader, Model, Part};
use crate::plan::Plan;
use crate::registry::Registry;

/// Which models may be unloaded or demoted to make room. Models in use are never touched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Evict {
    /// Flagged models are unloaded.
    Flagged,
    /// Flagged models are unloaded; then kept models are demoted: their modules on the device move to the host.
    Demote,
    /// Flagged models are unloaded; then kept models are demoted, and unloaded if that is not enough.
    Kept,
}

/// The models to unload and to demote.
#[derive(Default)]
struct Victims {
    /// The entries removed from the cache.
    leaving: Vec<(String, Entry)>,
    demoted: Vec<Demotion>,
    /// The keys of the models that stay.
    kept: Vec<String>,
}

/// A model to move to the host.
#[derive(Clone)]
struct Demotion {
    key: String,
    plan: Plan,
    /// The bytes freed on its compute device.
    frees: u64,
    /// The bytes needed on the host.
    takes: u64,
}

/// Selects the models to unload or demote.
struct Selector<'a> {
    entries: &'a Entries,
    id: DeviceId,
    machine: &'a Machine,
    short: u64,
    /// The bytes available on the host.
    host: u64,
}

impl ModelCache {
    /// Makes `bytes` available on a device. If there is not enough memory, it unloads flagged models that hold memory there and
    /// that nobody uses. If these are not enough and `evict` allows it, it [demotes](Plan::demoted) kept models whose compute
    /// device this is. Only if that is not enough either, and `evict` allows it, it unloads kept models, as few as possible.
    /// The least recently used model is always the first. Models on other devices stay.
    ///
    /// A demoted model has the same bytes under its key, and is streamed from the host; `get_or_load` with its former
    /// plan derives the model from there. If other work takes the memory of its slots at that moment, it stays on the host
    /// without slots, and all of it is used in place.
    ///
    /// # Errors
    /// Each with the report until then: [`Error::NoRoom`] with the missing bytes and everyone who holds memory there; no model
    /// is unloaded if that would not be enough. [`Error::UnknownDevice`] and [`Error::DeviceAbsent`] as
    /// [`Registry::device`]; any error of querying the device and of copying. A model that could not be demoted is unchanged.
    pub fn make_room(
        &self,
        registry: &Registry,
        device: DeviceId,
        bytes: u64,
        evict: Evict,
    ) -> Result<UnloadReport, Unfinished<UnloadReport>> {
        let mut report = UnloadReport::default();
        match self.room(registry, device, bytes, evict, &mut report) {
            Ok(()) => Ok(report),
            Err(error) => Err(Unfinished { report: Box::new(report), error }),
        }
    }

    fn room(
        &self,
        registry: &Registry,
        device: DeviceId,
        bytes: u64,
        evict: Evict,
        report: &mut UnloadReport,
    ) -> Result<()> {
        let device = registry.device(device)?;
        let mut available = available(&*device)?;
        let mut victims = self.choose(registry, device.id(), bytes.saturating_sub(available), evict);
        if victims.is_none() {
            // The missing memory may be in the allocator's cache.
            device.trim()?;
            available = self::available(&*device)?;
            victims = self.choose(registry, device.id(), bytes.saturating_sub(available), evict);
        }
        let Some(Victims { leaving, demoted, kept }) = victims else {
            return Err(self.no_room(&*device, bytes, available));
        };
        *report = release(leaving, kept);
        let moved = demoted.iter().try_for_each(|demotion| self.demote(registry, demotion, report));
        report.log();
        moved?;
        let until = Instant::now() + registry.limits().release;
        loop {
            available = self::available(&*device)?;
            if available >= bytes {
                return Ok(());
            }
            if Instant::now() >= until {
                return Err(self.no_room(&*device, bytes, available));
            }
            device.trim()?;
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Flags every model but `key` that holds memory of a device. Returns the keys of the newly flagged models.
    ///
    /// # Errors
    /// [`Error::Missing`] when there is no model `key`; then nothing is flagged.
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

    /// Removes as many models as needed for `short` more bytes, and returns them with those to demote. `None`, without removing
    /// any, if all together are not enough.
    fn choose(&self, registry: &Registry, id: DeviceId, short: u64, evict: Evict) -> Option<Victims> {
        let host = registry.device(DeviceId::CPU).and_then(|host| available(&*host)).unwrap_or(0);
        let mut entries = self.entries();
        let selector = Selector { entries: &entries, id, machine: registry.machine(), short, host };
        let (leaving, demoted) = selector.choose(evict)?;
        let leaving = leaving.into_iter().filter_map(|key| entries.models.remove_entry(&key)).collect();
        Some(Victims { leaving, demoted, kept: entries.models.keys().cloned().collect() })
    }

    /// Moves a model to the host, unless someone has started to use it.
    fn demote(&self, registry: &Registry, demotion: &Demotion, report: &mut UnloadReport) -> Result<()> {
        let Demotion { key, plan, .. } = demotion;
        let unused = |entries: &Entries| {
            let entry = entries.models.get(key).filter(|entry| !entry.in_use());
            entry.map(|entry| Arc::clone(&entry.model))
        };
        let Some(base) = unused(&self.entries()) else { return Ok(()) };
        let before = base.own_bytes();
        let parked = plan.parked(base.layout(), registry.machine())?;
        let demotion = Loader::new(registry).prepare_demotion(&base, plan.clone(), &parked)?;
        base.wait_unused()?;
        // Nobody may get the model between the last check of its users and its replacement.
        let mut entries = self.entries();
        let Some(entry) = entries.models.get_mut(key).filter(|entry| Arc::ptr_eq(&entry.model, &base)) else {
            return Ok(());
        };
        drop(base);
        if entry.in_use() {
            return Ok(());
        }
        // From here on the entry holds a model with all of its bytes, whatever fails.
        entry.identity = entry.identity.take().map(|identity| identity.with_plan(&parked));
        demotion.replace(&mut entry.model);
        entry.identity = entry.identity.take().map(|identity| identity.with_plan(entry.model.plan()));
        let after = entry.model.own_bytes();
        let freed = |(&id, &bytes): (&DeviceId, &u64)| {
            let still = after.get(&id).copied().unwrap_or(0);
            (bytes > still).then(|| (id, bytes - still))
        };
        report.demoted.push(Unloaded { key: key.clone(), bytes: before.iter().filter_map(freed).collect() });
        Ok(())
    }

    fn no_room(&self, device: &dyn Device, requested: u64, available: u64) -> Error {
        let id = device.id();
        let holder = |(key, entry): (&String, &Entry)| Holder {
            key: key.clone(),
            bytes: entry.bytes_on(id),
            kept: entry.retention == Retention::Keep,
            in_use: entry.in_use(),
        };
        let entries = self.entries();
        let holders: Vec<Holder> = entries.models.iter().map(holder).filter(|h| h.bytes > 0).collect();
        // Memory that several models share counts once.
        let parts = entries.models.values().flat_map(|entry| entry.parts_on(id));
        let held: HashMap<usize, u64> = parts.map(|part| (part.id, part.bytes)).collect();
        let (short, held) = (requested.saturating_sub(available), held.values().sum());
        let others = device.ledger().charged().saturating_sub(held);
        Error::NoRoom(Box::new(NoRoom { device: id, requested, available, short, holders, others }))
    }
}

impl Selector<'_> {
    /// The keys of the models to unload, and the models to demote; `None` if all together are not enough.
    fn choose(&self, evict: Evict) -> Option<(Vec<String>, Vec<Demotion>)> {
        let mut leaving = Vec::new();
        for key in self.candidates(Retention::Unload) {
            if self.freed(&leaving) >= self.short {
                break;
            }
            leaving.push(key);
        }
        if self.freed(&leaving) >= self.short {
            return Some((leaving, Vec::new()));
        }
        let kept = if evict == Evict::Flagged { Vec::new() } else { self.candidates(Retention::Keep) };
        let movable: Vec<Option<Demotion>> = kept.iter().map(|key| self.demotion(key)).collect();
        let most = if evict == Evict::Kept { kept.len() } else { 0 };
        (0..=most).find_map(|dropped| {
            let leaving: Vec<String> = leaving.iter().chain(&kept[..dropped]).cloned().collect();
            let (mut freed, mut host, mut demoted) = (self.freed(&leaving), self.host, Vec::new());
            for demotion in movable[dropped..].iter().flatten() {
                if freed < self.short && demotion.takes <= host {
                    (freed, host) = (freed + demotion.frees, host - demotion.takes);
                    demoted.push(demotion.clone());
                }
            }
            (freed >= self.short).then_some((leaving, demoted))
        })
    }

    /// The models that hold memory on the device and are not in use, least recently used first.
    fn candidates(&self, retention: Retention) -> Vec<String> {
        let models = self.entries.models.iter();
        let mut keys: Vec<_> = models
            .filter(|(_, e)| e.retention == retention && e.bytes_on(self.id) > 0 && !e.in_use())
            .map(|(key, entry)| (entry.used, key.clone()))
            .collect();
        keys.sort();
        keys.into_iter().map(|(_, key)| key).collect()
    }

    /// The bytes freed on the device by unloading these models: the parts that only they hold.
    fn freed(&self, leaving: &[String]) -> u64 {
        let mut holders: HashMap<usize, (usize, Part)> = HashMap::new();
        for part in leaving.iter().flat_map(|key| self.entries.models[key].parts_on(self.id)) {
            holders.entry(part.id).or_insert((0, part)).0 += 1;
        }
        holders.values().filter(|(count, part)| *count == part.holders).map(|(_, part)| part.bytes).sum()
    }

    /// The demotion of this model; `None` if it frees nothing.
    fn demotion(&self, key: &str) -> Option<Demotion> {
        let model: &Model = &self.entries.models[key].model;
        let memory = |id: DeviceId| self.machine.device(id).map(|info| info.domain).ok();
        if model.plan().compute() != self.id || memory(self.id)? == memory(DeviceId::CPU)? || model.lost().is_some() {
            return None;
        }
        let plan = model.plan().demoted(model.layout(), self.machine).ok()?;
        let own = model.parts().filter(|part| part.device == self.id && part.holders == 1).map(|part| part.bytes);
        let frees = own.sum::<u64>().checked_sub(plan.slots().bytes()).filter(|&frees| frees > 0)?;
        let takes = model.plan().device(self.id)?.weights.bytes;
        Some(Demotion { key: key.to_owned(), plan, frees, takes })
    }
}

impl Entry {
    fn bytes_on(&self, device: DeviceId) -> u64 {
        self.model.bytes().get(&device).copied().unwrap_or(0)
    }

    fn parts_on(&self, device: DeviceId) -> impl Iterator<Item = Part> {
        self.model.parts().filter(move |part| part.device == device)
    }
}

/// The bytes that a load could allocate now: at most what the system or driver has, and what the ledger allows.
fn available(device: &dyn Device) -> Result<u64> {
    let ledger: &Arc<_> = device.ledger();
    Ok(device.memory()?.available().min(ledger.limit().saturating_sub(ledger.charged())))
}
