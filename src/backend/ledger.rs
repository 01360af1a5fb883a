//! Accounting of the device memory that this process has taken.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::device::DeviceId;
use crate::error::{Error, Mismatch, Result};

/// Counts the memory taken from one device, and refuses charges beyond its limit.
#[derive(Debug)]
pub struct Ledger {
    device: DeviceId,
    limit: u64,
    counts: Mutex<Counts>,
}

#[derive(Debug, Default)]
struct Counts {
    charged: u64,
    reserved: u64,
    peak: u64,
}

impl Ledger {
    /// A ledger with a limit of `limit` bytes.
    pub fn new(device: DeviceId, limit: u64) -> Arc<Ledger> {
        Arc::new(Ledger { device, limit, counts: Mutex::default() })
    }

    /// Takes `bytes`, which are allocated later.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] when less is left; nothing is taken then.
    pub fn charge(self: &Arc<Self>, bytes: u64) -> Result<Charge> {
        let mut counts = self.counts();
        let available = self.limit - counts.charged;
        if bytes > available {
            let (device, limit) = (self.device, self.limit);
            return Err(Error::OutOfMemory { device, requested: bytes, available, limit });
        }
        counts.charged += bytes;
        counts.reserved += bytes;
        counts.peak = counts.peak.max(counts.charged);
        Ok(Charge { ledger: Arc::clone(self), bytes, backed: false })
    }

    /// The bytes taken, both reserved and allocated.
    pub fn charged(&self) -> u64 {
        self.counts().charged
    }

    /// The bytes taken but not allocated yet.
    pub fn reserved(&self) -> u64 {
        self.counts().reserved
    }

    /// The bytes taken, and the part of them that is not allocated yet, at one moment.
    pub fn charged_and_reserved(&self) -> (u64, u64) {
        let counts = self.counts();
        (counts.charged, counts.reserved)
    }

    /// The most bytes ever taken at one time.
    pub fn peak(&self) -> u64 {
        self.counts().peak
    }

    /// The most bytes that can be taken.
    pub fn limit(&self) -> u64 {
        self.limit
    }

    fn counts(&self) -> MutexGuard<'_, Counts> {
        // Every update is a few additions that cannot panic, so a poisoned lock still guards correct counts.
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A number of bytes taken from a ledger. Dropping it releases them.
#[derive(Debug)]
pub struct Charge {
    ledger: Arc<Ledger>,
    bytes: u64,
    backed: bool,
}

impl Charge {
    /// The number of bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// A charge for memory that someone else has taken and accounted for.
    pub fn uncounted(device: DeviceId, bytes: u64) -> Charge {
        let ledger = Ledger::new(device, bytes);
        *ledger.counts() = Counts { charged: bytes, reserved: bytes, peak: bytes };
        Charge { ledger, bytes, backed: false }
    }

    /// The device that the bytes belong to.
    pub fn device(&self) -> DeviceId {
        self.ledger.device
    }

    /// Checks that the charge belongs to the device `id`.
    pub(super) fn check(&self, id: DeviceId) -> Result<()> {
        let charge = self.device();
        if charge == id { Ok(()) } else { Err(Mismatch::Charge { device: id, charge }.into()) }
    }

    /// Splits off a part of this charge, so that reserved memory is used without being counted twice.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] when the charge holds less.
    pub fn split(&mut self, bytes: u64) -> Result<Charge> {
        if bytes > self.bytes {
            let (device, available) = (self.device(), self.bytes);
            return Err(Error::OutOfMemory { device, requested: bytes, available, limit: self.ledger.limit });
        }
        self.bytes -= bytes;
        Ok(Charge { ledger: Arc::clone(&self.ledger), bytes, backed: self.backed })
    }

    /// Adds another charge of the same device that is not allocated either.
    pub(crate) fn join(&mut self, mut other: Charge) {
        debug_assert!(Arc::ptr_eq(&self.ledger, &other.ledger) && !self.backed && !other.backed);
        self.bytes += std::mem::take(&mut other.bytes);
    }

    /// Marks the charge as allocated.
    pub(super) fn back(&mut self) {
        if !std::mem::replace(&mut self.backed, true) {
            self.ledger.counts().reserved -= self.bytes;
        }
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        let mut counts = self.ledger.counts();
        counts.charged -= self.bytes;
        if !self.backed {
            counts.reserved -= self.bytes;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn charges_are_counted_split_and_given_back() {
        let ledger = Ledger::new(DeviceId::cuda(0), 100);
        let mut all = ledger.charge(80).unwrap();
        assert!(matches!(ledger.charge(21), Err(Error::OutOfMemory { available: 20, limit: 100, .. })));
        let mut part = all.split(30).unwrap();
        assert!(all.split(51).is_err());
        part.back();
        assert_eq!((ledger.charged(), ledger.reserved()), (80, 50));
        drop(all);
        assert_eq!((ledger.charged(), ledger.reserved()), (30, 0));
        drop(part);
        assert_eq!((ledger.charged(), ledger.peak()), (0, 80));
    }
}
