//! Modules that share memory where they live: the small ones of a layer, so that they travel as one piece. Vectors (norms,
//! biases, scales) do, and where a layer has many small modules, all of those. Other matrices have memory of their own:
//! adapters change them, and a group is made anew when one of its modules changes.

use std::collections::BTreeMap;
use std::ops::Range;

use super::value::{Assignment, Plan, Use};
use crate::checkpoint::Layout;
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

/// The modules of a plan by the memory that they have at home: most have some of their own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Groups {
    /// The modules of each group, in order; groups in order of their first modules.
    members: Vec<Vec<usize>>,
    /// For each module its group, and its place in the group's memory.
    of: Vec<(usize, Range<usize>)>,
}

impl Plan {
    /// Which modules share memory: those of one layer that are streamed from one device the same way, small, and vectors
    /// or many.
    pub(crate) fn groups(&self, layout: &Layout) -> Groups {
        let mut groups = Groups { members: Vec::new(), of: Vec::new() };
        let mut open: BTreeMap<Way, (usize, usize)> = BTreeMap::new();
        let mut small: BTreeMap<Way, usize> = BTreeMap::new();
        for assignment in self.assignments().iter().filter(|assignment| is_small(assignment)) {
            *small.entry(way(assignment)).or_default() += 1;
        }
        let is_vector = |tensor: usize| layout.tensors[tensor].shape.len() <= 1;
        for assignment in self.assignments() {
            let bytes = assignment.bytes as usize;
            let joins = is_small(assignment)
                && (small.get(&way(assignment)).is_some_and(|&count| count >= MANY)
                    || layout.own_tensors(assignment.index).all(is_vector));
            let (group, start) = match joins {
                true => open.entry(way(assignment)).or_insert_with(|| {
                    groups.members.push(Vec::new());
                    (groups.members.len() - 1, 0)
                }),
                false => {
                    groups.members.push(Vec::new());
                    &mut (groups.members.len() - 1, 0)
                }
            };
            groups.members[*group].push(assignment.index);
            groups.of.push((*group, *start..*start + bytes));
            *start += bytes;
        }
        groups
    }
}

/// What modules of one group have in common: their layer, where they live, and whether they are staged.
type Way = (usize, DeviceId, bool);

fn way(assignment: &Assignment) -> Way {
    (assignment.layer, assignment.device, assignment.staged)
}

fn is_small(assignment: &Assignment) -> bool {
    let bytes = assignment.bytes;
    assignment.usage == Use::Streamed && (1..=SMALL).contains(&bytes) && bytes.is_multiple_of(ALIGNED)
}

impl Groups {
    pub(crate) fn len(&self) -> usize {
        self.members.len()
    }

    /// The modules of a group: at least one.
    pub(crate) fn members(&self, group: usize) -> &[usize] {
        &self.members[group]
    }

    /// The group of a module.
    pub(crate) fn of(&self, module: usize) -> usize {
        self.of[module].0
    }

    /// Where a module's bytes lie in the memory of its group.
    pub(crate) fn place(&self, module: usize) -> Range<usize> {
        self.of[module].1.clone()
    }

    /// The bytes of a group: those of its modules.
    pub(crate) fn bytes(&self, group: usize) -> u64 {
        self.members[group].last().map_or(0, |&last| self.of[last].1.end as u64)
    }

    /// Modules in the order in which a slot has them: those of a group together.
    pub(crate) fn in_slot(&self, mut modules: Vec<usize>) -> Vec<usize> {
        modules.sort_by_key(|&module| (self.of(module), module));
        modules
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::TensorInfo;
    use crate::dtype::DType;
    use crate::{Machine, Planner};

    #[test]
    fn many_small_modules_of_a_layer_share_memory() {
        let experts = |count: usize| {
            let tensor = |expert: usize| {
                let name = format!("layers.0.experts.{expert}.weight");
                TensorInfo::new(name, DType::U8, &[16, 16], 0, expert as u64 * 256).unwrap()
            };
            let layout = Layout::new((0..count).map(tensor).collect());
            let machine = Machine::described(&["cpu=64mb".parse().unwrap(), "cuda:0=64mb".parse().unwrap()]);
            let planner = Planner::new(&layout, &machine).compute(DeviceId::cuda(0)).depth(0);
            planner.allocation("cpu,*".parse().unwrap()).plan().unwrap().groups(&layout).len()
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
        let machine = Machine::described(&["cpu=64mb".parse().unwrap(), "cuda:0=64mb".parse().unwrap()]);
        let plan = |allocation: &str| {
            let planner = Planner::new(&layout, &machine).compute(DeviceId::cuda(0));
            planner.allocation(allocation.parse().unwrap()).depth(0).plan().unwrap()
        };
        let groups = plan("cpu,*").groups(&layout);
        let members: Vec<&[usize]> = (0..groups.len()).map(|group| groups.members(group)).collect();
        assert_eq!(members, [&[0, 2, 5][..], &[1], &[3], &[4], &[6]]);
        assert_eq!((groups.bytes(0), groups.place(5)), (SMALL + 768, SMALL as usize + 256..SMALL as usize + 768));
        assert_eq!(groups.in_slot((0..7).collect()), [0, 2, 5, 1, 3, 4, 6]);
        let resident = plan("cuda:0,*").groups(&layout);
        assert_eq!(resident.len(), 7, "what stays where it is has memory of its own");
    }
}
