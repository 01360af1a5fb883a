//! Checks of a plan: that its parts agree, that it is as it was written, and that it matches a layout.

use std::collections::{BTreeMap, HashMap};

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::compress::{kept_compressed, saved_on};
use super::slots::Slots;
use super::traffic::BinTraffic;
use super::value::{Assignment, DevicePlan, Parts, Plan, Use};
use crate::checkpoint::{LayerId, Layout, Module};
use crate::device::{DeviceId, DeviceKind};
use crate::dtype::DType;
use crate::error::{Contradiction, PlanFault, PlannedModule, Result};

impl Parts {
    /// Checks that the parts agree with each other, as far as this is known without the layout.
    pub(super) fn validate(&self) -> Result<(), Contradiction> {
        let mut sums = BTreeMap::new();
        for device in &self.devices {
            if sums.insert(device.id, (0u64, 0usize)).is_some() {
                return Err(Contradiction::DeviceTwice { device: device.id });
            }
        }
        let mut saved: BTreeMap<DeviceId, u64> = BTreeMap::new();
        let (mut previous_layer, mut all) = (0, 0u64);
        for (index, a) in self.assignments.iter().enumerate() {
            let layer = a.layer.index();
            if a.index.index() != index || layer < previous_layer || layer > previous_layer + 1 {
                return Err(Contradiction::OutOfOrder { module: a.module.to_string(), index });
            }
            previous_layer = layer;
            let here = matches!(a.usage, Use::Resident | Use::Unpacked);
            // A model that waits on the host uses it in place.
            let compressed = !a.is_compressed() || (a.usage != Use::Resident && a.saved < a.bytes);
            let staged = !a.staged || a.usage == Use::Streamed;
            if here != (a.device == self.compute) || !staged || !compressed {
                let (module, usage, device) = (a.module.to_string(), a.usage.name(), a.device);
                return Err(Contradiction::Usage { module, usage, device });
            }
            let sum = sums.get_mut(&a.device).ok_or(Contradiction::NotListed { device: a.device })?;
            all = all.checked_add(a.bytes).ok_or(Contradiction::Uncountable)?;
            *sum = (sum.0 + a.bytes, sum.1 + 1);
            *saved.entry(a.device).or_default() += a.saved;
        }
        for d in &self.devices {
            let (bytes, modules) = sums[&d.id];
            if (bytes, modules) != (d.weights.bytes, d.weights.modules) {
                let (device, said_bytes, said_modules) = (d.id, d.weights.bytes, d.weights.modules);
                return Err(Contradiction::Sums { device, bytes, modules, said_bytes, said_modules });
            }
            let parts_of_sums = d.weights.staged <= d.weights.streamed && d.weights.pinned <= d.weights.bytes;
            let parts_of_sums = parts_of_sums && d.weights.in_files <= d.weights.bytes;
            // Of a disk's modules, what stays in the model's files is not counted.
            let saved = saved.get(&d.id).copied().unwrap_or(0);
            let is_saved =
                if d.id.kind() == DeviceKind::Disk { d.weights.saved <= saved } else { d.weights.saved == saved };
            let parts_of_sums = parts_of_sums && is_saved;
            let own_terms = d.id == self.compute || (d.beside.slots, d.beside.scratch, d.beside.reserve) == (0, 0, 0);
            if !parts_of_sums || !own_terms || (d.id == self.compute && d.beside.slots != self.slots.bytes()) {
                return Err(Contradiction::Terms { device: d.id });
            }
        }
        self.validate_slots()
    }

    fn validate_slots(&self) -> Result<(), Contradiction> {
        if self.unpacked.is_some_and(|dtype| !is_unpacked_type(dtype)) {
            return Err(Contradiction::Unpacked { dtype: self.unpacked.map_or("", DType::name).to_owned() });
        }
        let (mut fetched_layers, mut largest) = (0usize, 0u64);
        for layer in self.assignments.chunk_by(|a, b| a.layer == b.layer) {
            let mut fetched = layer.iter().filter(|a| a.usage.is_fetched()).peekable();
            fetched_layers += usize::from(fetched.peek().is_some());
            // Divided slots are not padded by module. Values take more than blocks; how much more follows from the layout.
            let in_slot = |a: &Assignment| if self.grouping.is_apart() { a.bytes } else { Layout::slot_bytes(a.bytes) };
            largest = largest.max(fetched.map(in_slot).fold(0, u64::saturating_add));
        }
        // With two sizes, the number of each follows from the layout; `verify` recomputes it.
        let window = fetched_layers.min(self.depth.saturating_add(1));
        let Slots { count, bytes_each, large, large_bytes, landings, landing_bytes } = self.slots;
        let counts = match (self.external_slots, large_bytes > 0) {
            (true, _) => (count, large) == (0, 0),
            (false, false) => (count, large) == (window, 0),
            (false, true) => count <= window && (1..=window).contains(&large),
        };
        let two_sizes = large_bytes == 0 || (large_bytes > bytes_each && !self.fixed_slots);
        let compressed = self.assignments.iter().any(Assignment::is_compressed);
        let lands = (landings == 0 && landing_bytes == 0) || ((self.unpacked.is_some() || compressed) && landings > 0);
        if !counts || !two_sizes || !lands || self.slots.largest() < largest {
            let needed =
                Slots { count: if self.external_slots { 0 } else { window }, bytes_each: largest, ..Slots::default() };
            return Err(other_slots(fetched_layers, needed, self.slots));
        }
        let listed = self.devices.iter().any(|d| d.id == self.compute);
        if listed { Ok(()) } else { Err(Contradiction::NotListed { device: self.compute }) }
    }

    /// FNV-1a of the plan's JSON. A change of any figure almost certainly changes it.
    fn checksum(&self) -> Result<String, serde_json::Error> {
        let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        let hash = serde_json::to_vec(self)?.iter().fold(0xcbf2_9ce4_8422_2325, step);
        Ok(format!("{hash:016x}"))
    }
}

impl Plan {
    /// Checks that this plan was made for `layout`: a plan read from a file may belong to another model. Everything that
    /// follows from the modules' devices is recomputed and compared.
    ///
    /// # Errors
    /// [`Error::Plan`](crate::Error::Plan) naming the first module, device or figure that differs.
    pub fn verify(&self, layout: &Layout) -> Result<()> {
        self.for_codes_of(layout).verify_as_it_is(layout)
    }

    fn verify_as_it_is(&self, layout: &Layout) -> Result<()> {
        let parts = self.parts();
        let (planned, modules) = (&parts.assignments, layout.modules());
        if planned.len() != modules.len() {
            return Err(PlanFault::OtherModel { planned: planned.len(), modules: modules.len() }.into());
        }
        let owner = |m: &Module| m.alias_of.map(|owner| &planned[owner.index()]);
        let apart = |a: &Assignment, m: &Module| owner(m).is_some_and(|owner| owner.device != a.device);
        // What is compressed takes as much as the files say.
        let kept = |a: &Assignment| kept_compressed(layout, a.device, a.index);
        let saves = |a: &Assignment| kept(a).map_or(0, |bytes| layout.at(a.index).bytes - bytes);
        let differs = |(a, m): &(&Assignment, &Module)| {
            *a.module != *m.name || a.bytes != m.bytes || a.layer != m.layer || apart(a, m)
        };
        let known =
            |name: &str, bytes, layer: LayerId| PlannedModule { name: name.to_owned(), bytes, layer: layer.index() };
        if let Some((a, m)) = planned.iter().zip(modules).find(differs) {
            let (index, planned) = (a.index.index(), known(&a.module, a.bytes, a.layer));
            let module = known(&m.name, m.bytes, m.layer);
            return Err(match *a.module != *m.name && self.is_reordered(layout) {
                true => PlanFault::OtherOrder { index, planned, module },
                false => PlanFault::OtherModule { index, planned, module },
            }
            .into());
        }
        if let Some(a) = planned.iter().find(|a| a.is_compressed() && a.saved != saves(a)) {
            let (module, planned, files) = (a.module.to_string(), a.saved, saves(a));
            return Err(PlanFault::OtherCodes { module, planned, files }.into());
        }
        Ok(self.verify_traffic(layout)?)
    }

    /// Whether the plan has the modules of `layout`, grouped into the same layers, in another order of layers.
    fn is_reordered(&self, layout: &Layout) -> bool {
        let mut layers = BTreeMap::new();
        let modules: HashMap<&str, &Module> = layout.modules().iter().map(|m| (m.name.as_str(), m)).collect();
        let same = |a: &Assignment| {
            let module = modules.get(&*a.module);
            module.is_some_and(|m| m.bytes == a.bytes && *layers.entry(a.layer).or_insert(m.layer) == m.layer)
        };
        self.assignments().iter().all(same) && layers.len() == layout.layers().len()
    }

    /// Checks that the slots and the streamed bytes are those of `layout`, whose modules the plan has.
    fn verify_traffic(&self, layout: &Layout) -> Result<(), Contradiction> {
        let parts = self.parts();
        let (moved, mut slots) = parts.traffic(layout);
        if parts.has_made_codes(layout) {
            // They have room for what was planned.
            slots.landing_bytes = slots.landing_bytes.max(parts.slots.landing_bytes);
        }
        if slots != parts.slots {
            return Err(other_slots(self.fetched_layers(), slots, parts.slots));
        }
        let differs = |(device, moved): &(&DevicePlan, BinTraffic)| {
            (device.weights.streamed, device.weights.staged, device.weights.pinned)
                != (moved.streamed, moved.staged, moved.pinned)
        };
        let saves_else = |device: &&DevicePlan| {
            let here = parts.assignments.iter().filter(|a| a.device == device.id);
            here.map(|a| saved_on(layout, device.id, a.index, a.saved)).sum::<u64>() != device.weights.saved
        };
        if let Some(device) = parts.devices.iter().find(saves_else) {
            return Err(Contradiction::Terms { device: device.id });
        }
        match parts.devices.iter().zip(moved).find(differs) {
            None => Ok(()),
            Some((device, BinTraffic { streamed, staged, pinned })) => Err(Contradiction::Traffic {
                device: device.id,
                needed: [streamed, staged, pinned],
                given: [device.weights.streamed, device.weights.staged, device.weights.pinned],
            }),
        }
    }
}

/// The error for slots other than those that so many streamed layers need.
fn other_slots(layers: usize, needed: Slots, given: Slots) -> Contradiction {
    let [needed_landings, given_landings] = [needed, given].map(|slots| (slots.landings, slots.landing_bytes));
    let [(needed, bytes, needed_large), (given, bytes_each, given_large)] =
        [needed, given].map(|slots| (slots.count, slots.bytes_each, (slots.large, slots.large_bytes)));
    if (needed, bytes, needed_large) == (given, bytes_each, given_large) {
        return Contradiction::Landings { needed: needed_landings, given: given_landings };
    }
    Contradiction::Slots { layers, needed, bytes, needed_large, given, bytes_each, given_large }
}

/// Whether slots can hold values of this type in place of blocks.
pub(super) fn is_unpacked_type(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::F16 | DType::BF16)
}

/// The serialised form of a plan.
#[derive(Serialize, Deserialize)]
struct SerializedPlan<P> {
    #[serde(flatten)]
    parts: P,
    /// `None` in plans from before checksums were written.
    #[serde(default)]
    checksum: Option<String>,
}

impl Serialize for Plan {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let checksum = self.parts().checksum().map_err(serde::ser::Error::custom)?;
        SerializedPlan { parts: self.parts(), checksum: Some(checksum) }.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Plan {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        use serde::de::Error as _;
        let SerializedPlan { parts, checksum }: SerializedPlan<Parts> = SerializedPlan::deserialize(deserializer)?;
        let plan = Plan::new(parts).map_err(D::Error::custom)?;
        match checksum {
            Some(checksum) if plan.parts().checksum().map_err(D::Error::custom)? != checksum => {
                Err(D::Error::custom(PlanFault::NotValid(Contradiction::Changed)))
            }
            _ => Ok(plan),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;
    use crate::checkpoint::TensorInfo;
    use crate::dtype::DType;
    use crate::{ByteSize, Machine, Planner};

    /// A tied embedding, norms that share memory, and weights on four devices, some of them staged.
    fn subject() -> (Layout, Plan) {
        let tensor = |name: &str, bytes: u64, at: u64| TensorInfo::new(name, DType::U8, &[bytes], 0, at).unwrap();
        let mut tensors = vec![tensor("embed.weight", 100_000, 0), tensor("lm_head.weight", 100_000, 0)];
        for layer in 0..6 {
            let at = 100_000 + layer * 2_000_000;
            tensors.push(tensor(&format!("layers.{layer}.a.weight"), 1_000_000, at));
            tensors.push(tensor(&format!("layers.{layer}.norm.weight"), 500, at + 1_000_000));
        }
        let layout = Layout::new(tensors);
        let devices = ["cuda:0=24mib", "cuda:1=24mib", "disk=24mib", "cpu=24mib"];
        let machine = Machine::described(&devices.map(|device| device.parse().unwrap()));
        let planner =
            Planner::new(&layout, &machine).allocation("cuda:0,1mib;cuda:1,1mib;disk,1mib;cpu,*".parse().unwrap());
        let planner = planner.scratch(700).reserve(ByteSize(900)).pinned_cap(Some(ByteSize(1_500_000)));
        (layout.clone(), planner.plan().unwrap())
    }

    /// A plan with any figure, word or choice changed is not the one that was written.
    #[test]
    fn a_written_plan_with_anything_changed_is_refused() {
        let (_, plan) = subject();
        let written = serde_json::to_value(&plan).unwrap();
        assert_eq!(serde_json::from_value::<Plan>(written.clone()).unwrap(), plan);
        let mut paths = Vec::new();
        leaves(&written, String::new(), &mut paths);
        assert!(paths.len() > 150, "{} figures", paths.len());
        for path in paths {
            let mut changed = written.clone();
            let value = changed.pointer_mut(&path).unwrap();
            *value = match value.take() {
                Value::Number(number) => (number.as_u64().unwrap() + 1).into(),
                Value::Bool(yes) => (!yes).into(),
                Value::String(text) => format!("{text}1").into(),
                Value::Null => 1.into(),
                other => panic!("{path}: {other}"),
            };
            assert!(serde_json::from_value::<Plan>(changed).is_err(), "{path} was changed");
        }
    }

    fn leaves(value: &Value, path: String, paths: &mut Vec<String>) {
        match value {
            Value::Array(items) => {
                items.iter().enumerate().for_each(|(index, item)| leaves(item, format!("{path}/{index}"), paths));
            }
            Value::Object(fields) => fields.iter().for_each(|(key, item)| leaves(item, format!("{path}/{key}"), paths)),
            _ => paths.push(path),
        }
    }

    /// An embedding nine times as large as each of six layers, and a machine for it.
    fn two_sizes() -> (Layout, Machine) {
        let tensor = |name: &str, bytes: u64, at: u64| TensorInfo::new(name, DType::U8, &[bytes], 0, at).unwrap();
        let mut tensors = vec![tensor("embed.weight", 9_000_000, 0)];
        tensors.extend((0..6).map(|n| tensor(&format!("layers.{n}.a.weight"), 1_000_000, 9_000_000 + n * 1_000_000)));
        let machine = Machine::described(&["cuda:0=24mib", "cpu=24mib"].map(|device| device.parse().unwrap()));
        (Layout::new(tensors), machine)
    }

    /// Slots of two sizes are written only where there are such, and each of their figures is worked out again.
    #[test]
    fn slots_of_two_sizes_follow_from_the_layers() {
        let (layout, machine) = two_sizes();
        let planner = Planner::new(&layout, &machine).allocation("cpu,*".parse().unwrap());
        let plan = planner.clone().plan().unwrap();
        let slots =
            |count, large| Slots { count, bytes_each: 1_000_192, large, large_bytes: 9_000_192, ..Slots::default() };
        assert_eq!((plan.slots(), plan.slots().bytes()), (slots(3, 1), 3 * 1_000_192 + 9_000_192));
        assert!(plan.to_string().contains("3 x 976.75 KiB + 1 x 8.58 MiB"), "{plan}");
        let written = serde_json::to_value(&plan).unwrap();
        assert_eq!(serde_json::from_value::<Plan>(written.clone()).unwrap(), plan);
        assert_eq!((&written["slots"]["large"], &written["slots"]["large_bytes"]), (&1.into(), &9_000_192.into()));
        let written = serde_json::to_value(planner.clone().fixed_slots(true).depth(0).plan().unwrap()).unwrap();
        assert!(written["slots"]["large"].is_null() && written["slots"]["large_bytes"].is_null(), "{written}");
        let own = planner.external_slots(true).plan().unwrap();
        assert_eq!(own.slots(), slots(0, 0));
        for (plan, devices) in [(&plan, true), (&own, false)] {
            plan.verify(&layout).unwrap();
            let refused = |what: &str, change: &dyn Fn(&mut Parts)| {
                let mut parts = plan.parts().clone();
                change(&mut parts);
                if devices {
                    let bytes = parts.slots.bytes();
                    parts.devices.iter_mut().filter(|d| d.id == parts.compute).for_each(|d| d.beside.slots = bytes);
                }
                assert_ne!(&parts, plan.parts(), "{what}");
                assert!(Plan::new(parts).and_then(|plan| plan.verify(&layout)).is_err(), "{what}");
            };
            refused("an ordinary slot more", &|parts| parts.slots.count += 1);
            refused("larger ones", &|parts| parts.slots.bytes_each += 256);
            refused("smaller ones", &|parts| parts.slots.bytes_each -= 256);
            refused("a large slot more", &|parts| parts.slots.large += 1);
            refused("a larger one", &|parts| parts.slots.large_bytes += 256);
            refused("a smaller one", &|parts| parts.slots.large_bytes -= 256);
            refused("fixed ones", &|parts| parts.fixed_slots = true);
            refused("one size", &|parts| {
                parts.slots = Slots { count: parts.slots.count, bytes_each: 9_000_192, ..Slots::default() };
            });
        }
    }

    /// What a plan says of its slots is refused as it is read, before the layout is known.
    #[test]
    fn slots_that_no_streamed_layers_have_are_refused_without_the_layout() {
        let (layout, machine) = two_sizes();
        let planner = Planner::new(&layout, &machine).allocation("cpu,*".parse().unwrap());
        let (plan, own) = (planner.clone().plan().unwrap(), planner.external_slots(true).plan().unwrap());
        let refused = |plan: &Plan, needed: usize, change: &dyn Fn(&mut Parts)| {
            let mut parts = plan.parts().clone();
            parts.validate().unwrap();
            change(&mut parts);
            let bytes = parts.slots.bytes();
            parts.devices.iter_mut().filter(|d| d.id == parts.compute).for_each(|d| d.beside.slots = bytes);
            match parts.validate() {
                Err(Contradiction::Slots { needed: count, bytes, .. }) => {
                    assert_eq!((count, bytes), (needed, 9_000_192));
                }
                other => panic!("{:?}: {other:?}", parts.slots),
            }
        };
        refused(&plan, 3, &|parts| parts.slots.count = 4);
        refused(&plan, 3, &|parts| parts.slots.large = 0);
        refused(&plan, 3, &|parts| parts.slots.large = 4);
        refused(&plan, 3, &|parts| parts.slots.bytes_each = parts.slots.large_bytes);
        refused(&plan, 3, &|parts| parts.fixed_slots = true);
        refused(&own, 0, &|parts| parts.slots.count = 1);
    }

    /// Whoever writes a plan of their own, its checksum too: what follows from where the modules are has to follow.
    #[test]
    fn every_figure_that_follows_from_others_is_worked_out_again() {
        let (layout, plan) = subject();
        plan.verify(&layout).unwrap();
        let refused = |what: &str, change: &dyn Fn(&mut Parts)| {
            let mut parts = plan.parts().clone();
            change(&mut parts);
            assert_ne!(&parts, plan.parts(), "{what}");
            assert!(Plan::new(parts).and_then(|plan| plan.verify(&layout)).is_err(), "{what}");
        };
        refused("a slot without its padding", &|parts| parts.slots.bytes_each -= 12);
        refused("a larger slot", &|parts| parts.slots.bytes_each += 256);
        refused("a slot more", &|parts| parts.slots.count += 1);
        refused("another depth", &|parts| parts.depth = 1);
        refused("slots of the caller's own", &|parts| parts.external_slots = true);
        for device in 0..plan.devices().len() {
            refused("weights", &|parts| parts.devices[device].weights.bytes += 1);
            refused("modules", &|parts| parts.devices[device].weights.modules += 1);
            refused("streamed", &|parts| parts.devices[device].weights.streamed += 1);
            refused("staged", &|parts| parts.devices[device].weights.staged += 1);
            refused("pinned", &|parts| parts.devices[device].weights.pinned += 1);
            refused("slots", &|parts| parts.devices[device].beside.slots += 1);
        }
        for module in 0..plan.assignments().len() {
            refused("a module's bytes", &|parts| parts.assignments[module].bytes += 1);
            refused("a module's layer", &|parts| {
                let layer = &mut parts.assignments[module].layer;
                *layer = LayerId::new(layer.index() + 1);
            });
            refused("a module's name", &|parts| parts.assignments[module].module = "other".into());
            let streamed = plan.assignments()[module].usage == Use::Streamed;
            // What has no bytes of its own has no way either.
            if streamed && layout.modules()[module].bytes > 0 {
                refused("staging", &|parts| parts.assignments[module].staged ^= true);
                refused("a use", &|parts| {
                    (parts.assignments[module].usage, parts.assignments[module].staged) = (Use::InPlace, false);
                });
            }
        }
    }

    /// What slots hold in place of blocks, and the buffers that these land in, follow from the layout.
    #[test]
    fn what_a_plan_unpacks_is_worked_out_again() {
        let tensor = |name: &str, at: u64| TensorInfo::new(name, DType::Q8_0, &[256, 32], 0, at * 8704).unwrap();
        let tensors = (0..6).flat_map(|n| {
            [tensor(&format!("blk.{n}.a.weight"), 2 * n), tensor(&format!("blk.{n}.b.weight"), 2 * n + 1)]
        });
        let layout = Layout::new(tensors.collect());
        let machine = Machine::described(&["cuda:0=24mib", "cpu=24mib"].map(|device| device.parse().unwrap()));
        let planner = Planner::new(&layout, &machine).allocation("cuda:0,30kib;cpu,*".parse().unwrap());
        let plan = planner.unpack(DType::F16).plan().unwrap();
        plan.verify(&layout).unwrap();
        let Slots { count, bytes_each, landings, landing_bytes, .. } = plan.slots();
        assert_eq!((count, bytes_each, landings, landing_bytes), (3, 2 * 16384, 1, 2 * 8704), "{plan}");
        assert!(plan.assignments().iter().any(|a| a.usage == Use::Unpacked), "{plan}");
        let refused = |what: &str, change: &dyn Fn(&mut Parts)| {
            let mut parts = plan.parts().clone();
            change(&mut parts);
            let bytes = parts.slots.bytes();
            parts.devices.iter_mut().filter(|d| d.id == parts.compute).for_each(|d| d.beside.slots = bytes);
            assert_ne!(&parts, plan.parts(), "{what}");
            Plan::new(parts).and_then(|plan| plan.verify(&layout)).unwrap_err().to_string()
        };
        let said = refused("a landing buffer more", &|parts| parts.slots.landings = 2);
        assert!(said.contains("needs 1 landing buffers of 17408 bytes, not 2 of 17408"), "{said}");
        refused("a larger landing buffer", &|parts| parts.slots.landing_bytes += 256);
        refused("none", &|parts| (parts.slots.landings, parts.slots.landing_bytes) = (0, 0));
        refused("slots of blocks", &|parts| parts.unpacked = None);
        refused("other values", &|parts| parts.unpacked = Some(DType::F32));
        refused("slots as large as blocks", &|parts| parts.slots.bytes_each = 2 * 8704);
        let said = refused("values of a type that has none", &|parts| parts.unpacked = Some(DType::Q8_0));
        assert!(said.contains("Q8_0"), "{said}");
    }
}
