//! Groups of small modules of a layer that share memory at home, so that they are copied as one piece. Vectors (norms,
//! biases, scales) are grouped, and if a layer has many small modules, all of these are. Other matrices have separate
//! memory: adapters change them, and a group is rebuilt when one of its modules changes.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::ops::Range;

use crate::checkpoint::{LayerId, Layout, Module, ModuleId, Per, TensorId, TensorInfo};
use crate::device::DeviceId;

/// The size up to which a module is small, in bytes. At 25 GB/s such a module takes 10 us, about twice the fixed cost of a
/// copy, so larger modules have little to gain.
const SMALL: u64 = 256 << 10;

/// The number of small modules of a layer with the same origin from which all of them share memory: experts of some models
/// are hundreds of small matrices. Separate copies would cost a layer over a tenth of a millisecond.
const MANY: usize = 32;

/// The alignment of modules in a slot, in bytes. A module whose size is no multiple is in no group: grouping it would need
/// padding at home, which the plan does not count.
const ALIGNED: u64 = 256;

/// The origin of a streamed module's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Origin {
    pub(crate) device: DeviceId,
    pub(crate) staged: bool,
    /// Whether it lives there compressed.
    pub(crate) compressed: bool,
}

/// The modules of a model, grouped by the memory that they share at home. Most modules are alone in their group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Groups {
    /// The modules of each group, in order. Groups are in order of their first modules.
    members: Vec<Vec<ModuleId>>,
    /// The group of each module, and its byte range in the group's memory.
    of: Per<ModuleId, (usize, Range<usize>)>,
}

/// Whether a module may be in a group with others.
fn is_small(module: &Module) -> bool {
    (1..=SMALL).contains(&module.bytes) && module.bytes.is_multiple_of(ALIGNED)
}

impl Groups {
    /// Groups the modules of `layout`. `origin` returns the origin of a module, or `None` if it is not streamed. Small modules
    /// of one layer with the same origin share memory if they are vectors, or if there are many.
    pub(crate) fn new(layout: &Layout, origin: impl Fn(ModuleId) -> Option<Origin>) -> Groups {
        let small = |module: &Module| is_small(module).then(|| Some((module.layer, origin(module.id)?))).flatten();
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

    /// Whether a module may share memory with others of its layer, whatever their origins.
    pub(crate) fn may_join(layout: &Layout, module: ModuleId) -> bool {
        let module = layout.at(module);
        let mut small = layout.at(module.layer).modules.iter().filter(|&&other| is_small(layout.at(other)));
        let are_vectors = || layout.own_tensors(module.id).all(|tensor| layout.at(tensor).shape.len() <= 1);
        is_small(module) && (are_vectors() || small.nth(MANY - 1).is_some())
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

    /// The byte range of a module in the memory of its group.
    pub(crate) fn place(&self, module: ModuleId) -> Range<usize> {
        self.of[module].1.clone()
    }

    /// The size of a group in bytes, the sum of its modules.
    pub(crate) fn bytes(&self, group: usize) -> u64 {
        self.members[group].last().map_or(0, |&last| self.of[last].1.end as u64)
    }

    /// The byte range of each tensor in the memory of its module's group. Within a module the tensors with the greatest
    /// alignment come first, so that each begins at a multiple of its own without a gap; among equals, the largest tensor.
    pub(crate) fn tensor_ranges(&self, layout: &Layout) -> Per<TensorId, Range<usize>> {
        let mut ranges = Per::all(layout.tensors().len(), 0..0);
        layout.module_ids().flat_map(|module| self.ranges_of(layout, module)).for_each(|(t, range)| ranges[t] = range);
        ranges
    }

    /// The tensors that a module owns, in order of their byte ranges in the memory of its group.
    pub(crate) fn ranges_of(&self, layout: &Layout, module: ModuleId) -> Vec<(TensorId, Range<usize>)> {
        let mut own: Vec<TensorId> = layout.own_tensors(module).collect();
        let largest_first = |info: &TensorInfo| Reverse((info.dtype.alignment(), info.bytes));
        own.sort_by_key(|&tensor| largest_first(layout.at(tensor)));
        let mut at = self.place(module).start;
        let range = |tensor: TensorId| {
            let end = at + layout.at(tensor).bytes as usize;
            (tensor, std::mem::replace(&mut at, end)..end)
        };
        own.into_iter().map(range).collect()
    }

    /// Sorts modules into the order of a slot, in which the modules of a group are adjacent.
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

    const HOST: Origin = Origin { device: DeviceId::CPU, staged: false, compressed: false };

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
