//! Where compressed modules live: the stored form of each tensor, one after the other.

use std::ops::Range;

use super::groups::Groups;
use crate::checkpoint::{Layout, ModuleId, Per, Stored, TensorId};
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

impl Place {
    /// Whether a tensor takes as much here as there, in the same form.
    pub(crate) fn alike(&self, other: &Place) -> bool {
        (self.range.len(), self.is_code) == (other.range.len(), other.is_code)
    }

    /// The places of a group's tensors, given in order, and the bytes of all.
    pub(crate) fn all(tensors: impl IntoIterator<Item = Stored>) -> (Vec<Place>, u64) {
        let mut at = 0usize;
        let place = |stored: Stored| {
            // Within what the plan counts, if it is of this layout.
            let range = at..at.saturating_add(stored.bytes as usize);
            at = padded(range.end as u64) as usize;
            Place { range, is_code: stored.is_code }
        };
        let places = tensors.into_iter().map(place).collect();
        (places, at as u64)
    }
}

impl Compressed {
    /// The modules that are compressed: groups are so as a whole. `layout` tells how the files hold their tensors.
    pub(crate) fn new(layout: &Layout, groups: &Groups, is_compressed: impl Fn(ModuleId) -> bool) -> Compressed {
        if !layout.module_ids().any(&is_compressed) {
            return Compressed::default();
        }
        let mut places = Per::all(layout.tensors().len(), None);
        let mut place = |group: usize| {
            let members = groups.members(group).iter();
            let tensors: Vec<TensorId> =
                members.flat_map(|&module| groups.ranges_of(layout, module)).map(|(tensor, _)| tensor).collect();
            let stored = tensors.iter().map(|&tensor| layout.stored(tensor)).collect::<Option<Vec<_>>>()?;
            let (of_group, bytes) = Place::all(stored);
            tensors.into_iter().zip(of_group).for_each(|(tensor, place)| places[tensor] = Some(place));
            Some(bytes)
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
