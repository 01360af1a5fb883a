//! Modules that share memory where they live: the small ones of a layer, so that they travel as one piece. Vectors (norms,
//! biases, scales) do, and where a layer has many small modules, all of those. Other matrices have memory of their own:
//! adapters change them, and a group is made anew when one of its modules changes.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::checkpoint::{LayerId, Layout, Module, ModuleId, Per, TensorId};
use crate::device::DeviceId;

/// The bytes up to which a module is small. At 25 GB/s they take 10 us, about twice what a copy costs whatever its size,
/// so what is larger has little to gain.
const SMALL: u64 = 256 << 10;

/// From how many small modules of a layer on, by one way, all of them share memory: experts of some models are hundreds of
/// small matrices. A copy for each would cost a layer over a tenth of a millisecond.
const MANY: usize = 32;

/// The bytes to whose multiples modules are rounded in a slot. One that is no multiple is in no group: behind it the bytes
/// would stand together at home only with padding, which the plan does not count.
const ALIGNED: u64 = 256;

/// Where the bytes of a streamed module come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Origin {
    pub(crate) device: DeviceId,
    pub(crate) staged: bool,
}

/// The modules of a model by the memory that they have at home: most have some of their own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Groups {
    /// The modules of each group, in order; groups in order of their first modules.
    members: Vec<Vec<ModuleId>>,
    /// For each module its group, and its place in the group's memory.
    of: Per<ModuleId, (usize, Range<usize>)>,
}

impl Groups {
    /// Which modules share memory, `origin` telling where each comes from, if it is streamed: those of one layer that come
    /// from one device the same way, small, and vectors or many.
    pub(crate) fn new(layout: &Layout, origin: impl Fn(ModuleId) -> Option<Origin>) -> Groups {
        let small = |module: &Module| {
            let is_small = (1..=SMALL).contains(&module.bytes) && module.bytes.is_multiple_of(ALIGNED);
            is_small.then(|| Some((module.layer, origin(module.id)?))).flatten()
        };
        let mut counts: BTreeMap<(LayerId, Origin), usize> = BTreeMap::new();
        for kind in layout.modules().iter().filter_map(small) {
            *counts.entry(kind).or_default() += 1;
        }
        let is_vector = |tensor: TensorId| layout.at(tensor).shape.len() <= 1;
        let mut members: Vec<Vec<ModuleId>> = Vec::new();
        let mut open: BTreeMap<(LayerId, Origin), (usize, usize)> = BTreeMap::new();
        let place = |module: &Module| {
            let many = |kind: &(LayerId, Origin)| counts.get(kind).is_some_and(|&count| count >= MANY);
            let joins = small(module).filter(|kind| many(kind) || layout.own_tensors(module.id).all(is_vector));
            let mut alone = || {
                members.push(Vec::new());
                (members.len() - 1, 0)
            };
            let (group, start) = match joins {
                Some(kind) => open.entry(kind).or_insert_with(alone),
                None => &mut alone(),
            };
            members[*group].push(module.id);
            let (group, begin, end) = (*group, *start, *start + module.bytes as usize);
            *start = end;
            (group, begin..end)
        };
        let of = layout.modules().iter().map(place).collect();
        Groups { members, of }
    }

    pub(crate) fn len(&self) -> usize {
        self.members.len()
    }

    /// The modules of a group: at least one.
    pub(crate) fn members(&self, group: usize) -> &[ModuleId] {
        &self.members[group]
    }

    /// The group of a module.
    pub(crate) fn of(&self, module: ModuleId) -> usize {
        self.of[module].0
    }

    /// Where a module's bytes lie in the memory of its group.
    pub(crate) fn place(&self, module: ModuleId) -> Range<usize> {
        self.of[module].1.clone()
    }

    /// The bytes of a group: those of its modules.
    pub(crate) fn bytes(&self, group: usize) -> u64 {
        self.members[group].last().map_or(0, |&last| self.of[last].1.end as u64)
    }

    /// Modules in the order in which a slot has them: those of a group together.
    pub(crate) fn in_slot(&self, mut modules: Vec<ModuleId>) -> Vec<ModuleId> {
        modules.sort_by_key(|&module| (self.of(module), module));
        modules
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::TensorInfo;
    use crate::dtype::DType;

    const HOST: Origin = Origin { device: DeviceId::CPU, staged: false };

    #[test]
    fn many_small_modules_of_a_layer_share_memory() {
        let experts = |count: usize| {
            let tensor = |expert: usize| {
                let name = format!("layers.0.experts.{expert}.weight");
                TensorInfo::new(name, DType::U8, &[16, 16], 0, expert as u64 * 256).unwrap()
            };
            let layout = Layout::new((0..count).map(tensor).collect());
            Groups::new(&layout, |_| Some(HOST)).len()
        };
        assert_eq!([experts(MANY - 1), experts(MANY), experts(MANY + 1)], [MANY - 1, 1, 1]);
    }

    #[test]
    fn small_vectors_of_a_layer_share_memory() {
        let tensor = |(name, shape): (&str, &[u64])| TensorInfo::new(name, DType::U8, shape, 0, 0).unwrap();
        let tensors: [(&str, &[u64]); 7] = [
            ("layers.0.a", &[256]),
            ("layers.0.b", &[16, 16]),
            ("layers.0.c", &[SMALL]),
            ("layers.0.d", &[300]),
            ("layers.0.e", &[SMALL + 256]),
            ("layers.0.f", &[512]),
            ("layers.1.a", &[256]),
        ];
        let mut at = 0;
        let placed = tensors.map(|(name, shape)| {
            let tensor = TensorInfo { offset: at, ..tensor((&format!("{name}.weight"), shape)) };
            at += tensor.bytes;
            tensor
        });
        let layout = Layout::new(placed.to_vec());
        let groups = Groups::new(&layout, |_| Some(HOST));
        let indices = |modules: &[ModuleId]| modules.iter().map(|module| module.index()).collect::<Vec<_>>();
        let members: Vec<Vec<usize>> = (0..groups.len()).map(|group| indices(groups.members(group))).collect();
        assert_eq!(members, [&[0, 2, 5][..], &[1], &[3], &[4], &[6]]);
        let last = groups.members(0)[2];
        assert_eq!((groups.bytes(0), groups.place(last)), (SMALL + 768, SMALL as usize + 256..SMALL as usize + 768));
        assert_eq!(indices(&groups.in_slot(layout.module_ids().collect())), [0, 2, 5, 1, 3, 4, 6]);
        let resident = Groups::new(&layout, |_| None);
        assert_eq!(resident.len(), 7, "what stays where it is has memory of its own");
        let halves = Groups::new(&layout, |module| Some(Origin { staged: module.index() < 2, ..HOST }));
        assert_eq!(indices(halves.members(0)), [0], "what comes another way is apart");
    }
}
