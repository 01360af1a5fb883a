//! What a load tells of itself.

use std::sync::atomic::Ordering;
use std::time::Duration;

use super::{Job, lock};
use crate::adapter::Weights;
use crate::load::LoadReport;
use crate::transfer::{DeviceReads, ReadWays};

impl Job<'_> {
    /// The figures of the load, which took this time.
    pub(in crate::load) fn report(&self, time: Duration) -> LoadReport {
        let (patched_on_device, host_instead) = self.on_device.report();
        let requantised = lock(&self.requantised);
        let worst = requantised.iter().max_by(|(_, one), (_, other)| one.severity(other));
        let (direct, dropped, not_direct) = self.read_ways();
        let (gds, not_gds): (Vec<u64>, Vec<_>) = self.device_reads.values().map(DeviceReads::report).unzip();
        LoadReport {
            gds: gds.iter().sum(),
            not_gds: not_gds.concat(),
            direct,
            dropped,
            not_direct,
            patched_on_device,
            host_instead,
            bytes: self.done.load(Ordering::Relaxed),
            read: self.read.load(Ordering::Relaxed),
            in_files: self.in_files.load(Ordering::Relaxed),
            saved: self.plan.devices().iter().map(|share| share.weights.saved).sum(),
            shared: self.shared.load(Ordering::Relaxed),
            copied: self.copied.load(Ordering::Relaxed),
            modules: self.plan.assignments().len(),
            patched: self.patched.load(Ordering::Relaxed),
            saturated: self.saturated.load(Ordering::Relaxed),
            requantised: requantised.values().copied().sum(),
            worst_requantised: worst.map(|(&tensor, _)| self.layout.at(tensor).name.clone()),
            deferred: self.layout.factors().len(),
            deferred_bytes: self
                .layout
                .factors()
                .iter()
                .flat_map(|of| [of.a, of.b])
                .map(|t| self.layout.at(t).bytes)
                .sum(),
            time,
        }
    }

    /// The bytes of files that were read directly and that were dropped from the page cache since the load began, and why files
    /// were not read directly.
    fn read_ways(&self) -> (u64, u64, Vec<String>) {
        let (mut direct, mut dropped, mut refused) = (0, 0, Vec::new());
        let sources = self.weights.map_or(&[][..], |weights| weights.checkpoint().sources());
        for (source, before) in sources.iter().zip(&self.ways) {
            let now = source.ways();
            direct += now.direct.saturating_sub(before.direct);
            dropped += now.dropped.saturating_sub(before.dropped);
            refused.extend(now.refused.map(|why| format!("{}: {why}", source.path().display())));
        }
        (direct, dropped, refused)
    }
}

/// How the files of weights have been read so far.
pub(super) fn ways(weights: &Weights) -> Vec<ReadWays> {
    weights.checkpoint().sources().iter().map(|source| source.ways()).collect()
}
