//! Where compressed modules live: what their files have of each tensor, one after the other.

use std::ops::Range;

use super::groups::Groups;
use crate::checkpoint::{Layout, ModuleId, Per, TensorId};
use crate::lossless::padded;

/// The tensors of compressed modules in the memory of their groups.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Compressed {
    /// Empty if no module is compressed.
    places: Per<TensorId, Option<Place>>,
    /// The bytes of each group; `None` for groups that are not compressed. Empty as well.
    bytes: Vec<Option<u64>>,
}

/// The place of a tensor in the memory of a compressed group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) range: Range<usize>,
    /// Whether it is the tensor's code, and not the tensor as it is.
    pub(crate) is_code: bool,
}

impl Compressed {
    /// The modules that are compressed: groups are so as a whole. `layout` tells how the files hold their tensors.
    pub(crate) fn new(layout: &Layout, groups: &Groups, is_compressed: impl Fn(ModuleId) -> bool) -> Compressed {
        if !layout.module_ids().any(&is_compressed) {
            return Compressed::default();
        }
        let mut places = Per::all(layout.tensors().len(), None);
        let mut place = |group: usize| {
            let members = groups.members(group);
            let mut at = 0usize;
            for (tensor, _) in members.iter().flat_map(|&module| groups.ranges_of(layout, module)) {
                let stored = layout.stored(tensor)?;
                // Within what the plan counts, if it is of this layout.
                let end = at.saturating_add(stored.bytes as usize);
                places[tensor] = Some(Place { range: at..end, is_code: stored.is_code });
                at = padded(end as u64) as usize;
            }
            Some(at as u64)
        };
        let bytes =
            (0..groups.len()).map(|group| is_compressed(groups.members(group)[0]).then(|| place(group)).flatten());
        let bytes = bytes.collect();
        Compressed { places, bytes }
    }

    /// The place of a tensor; `None` if its module is not compressed.
    pub(crate) fn place(&self, tensor: TensorId) -> Option<&Place> {
        self.places.get(tensor)?.as_ref()
    }

    /// The bytes of a group; `None` if it is not compressed.
    pub(crate) fn bytes(&self, group: usize) -> Option<u64> {
        self.bytes.get(group).copied().flatten()
    }
}
