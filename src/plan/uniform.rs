//! Interleaving by roles and whole layers, so that the streamed layers of a class look alike.

use super::place::Placement;
use super::place::ProportionalSplit;
use super::warning::Warning;
use crate::checkpoint::Layer;

impl Placement<'_> {
    /// Fills the compute device's share with roles, the largest first, each in all layers of its class, then
    /// with whole layers, evenly spaced; the rest is spread over the other bins module by module.
    pub(super) fn uniform(&mut self) {
        let compute = self.quotas.compute;
        let total = self.layout.modules().iter().filter(|m| self.is_open(m.id)).map(|m| m.bytes).sum();
        let share = self.shares(total, 1, &|_| true)[compute];
        let left = share - self.place_roles(share);
        self.place_layers(left);
        let before = self.resident();
        self.spread_modules(|bin| bin != compute);
        if self.resident() > before {
            let device = self.quotas.bins[compute].device;
            self.warnings.push(Warning::NotUniform { device });
        }
    }

    /// Returns the bytes placed.
    fn place_roles(&mut self, share: u64) -> u64 {
        let layout = self.layout;
        let mut layers_of = vec![0usize; layout.class_count()];
        let mut roles_of = vec![0usize; layout.class_count()];
        for layer in layout.layers() {
            layers_of[layer.class] += 1;
            roles_of[layer.class] = layer.modules.len();
        }
        // Layers of a class list their roles in one order, so a role is an index into that list.
        let first: Vec<usize> =
            roles_of.iter().scan(0, |next, roles| Some(std::mem::replace(next, *next + roles))).collect();
        let group = |class: usize, place: usize| first[class] + place;
        let mut bytes = vec![0u64; roles_of.iter().sum()];
        for layer in layout.layers().iter().filter(|layer| layers_of[layer.class] > 1) {
            for (place, &module) in layer.modules.iter().enumerate().filter(|(_, m)| self.is_open(**m)) {
                bytes[group(layer.class, place)] += self.bytes(module);
            }
        }
        let mut by_size: Vec<usize> = (0..bytes.len()).filter(|&g| bytes[g] > 0).collect();
        by_size.sort_by_key(|&g| std::cmp::Reverse(bytes[g]));
        let (mut chosen, mut left) = (vec![false; bytes.len()], share);
        for g in by_size {
            if bytes[g] <= left {
                left -= bytes[g];
                chosen[g] = true;
            }
        }
        for layer in layout.layers() {
            for (place, &module) in layer.modules.iter().enumerate() {
                if chosen[group(layer.class, place)] && self.is_open(module) {
                    self.put(module, self.quotas.compute);
                }
            }
        }
        share - left
    }

    /// Splits the layers' open parts between the compute device, up to `left` bytes, and all other bins.
    fn place_layers(&mut self, left: u64) {
        let layout = self.layout;
        let open = |this: &Self, layer: &Layer| -> u64 {
            layer.modules.iter().filter(|m| this.is_open(**m)).map(|&m| this.bytes(m)).sum()
        };
        let rests: Vec<(&Layer, u64)> =
            layout.layers().iter().map(|l| (l, open(self, l))).filter(|rest| rest.1 > 0).collect();
        let largest = rests.iter().map(|rest| rest.1).max().unwrap_or(0);
        let smallest = rests.iter().map(|rest| rest.1).min().unwrap_or(0);
        let total: u64 = rests.iter().map(|rest| rest.1).sum();
        let grain = if smallest == largest { largest.max(1) } else { 1 };
        // The remainder device must take at least its share, because the others are capped.
        let takes_rest = self.quotas.takes_rest(self.quotas.compute);
        let share = match takes_rest {
            true if grain > 1 => left.next_multiple_of(grain),
            true => left.saturating_add(largest),
            false => left - left % grain,
        };
        let share = share.min(total);
        let cap = if takes_rest { u64::MAX } else { left };
        let mut split = ProportionalSplit::new(vec![share, total - share], vec![cap, u64::MAX], largest);
        for (layer, bytes) in rests {
            match split.assign(bytes) {
                Some(0) => {
                    for &module in &layer.modules {
                        if self.is_open(module) {
                            self.put(module, self.quotas.compute);
                        }
                    }
                }
                Some(_) => (),
                None => split.record(1, bytes),
            }
        }
    }

    /// The bytes on the compute device.
    fn resident(&self) -> u64 {
        self.used(self.quotas.compute)
    }
}
