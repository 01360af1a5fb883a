//! The tensors of a model, and their byte ranges in its memory.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use crate::checkpoint::{Layout, ModuleId, Per, TensorId};
use crate::schedule::{Compressed, Groups, Place};

/// The tensors of a model by name, and their byte ranges.
pub(crate) struct TensorIndex {
    layout: Arc<Layout>,
    groups: Groups,
    /// The byte range of each tensor in its group's memory.
    ranges: Per<TensorId, Range<usize>>,
    compressed: Compressed,
    by_name: HashMap<String, TensorId>,
}

impl TensorIndex {
    pub(super) fn new(layout: Arc<Layout>, groups: Groups, compressed: Compressed) -> TensorIndex {
        let by_name = layout.tensor_ids().map(|tensor| (layout.at(tensor).name.clone(), tensor)).collect();
        TensorIndex { ranges: groups.tensor_ranges(&layout), compressed, by_name, layout, groups }
    }

    pub(super) fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The groups of modules that lie in one buffer.
    pub(crate) fn groups(&self) -> &Groups {
        &self.groups
    }

    /// The tensors that are compressed where they live.
    pub(crate) fn compressed(&self) -> &Compressed {
        &self.compressed
    }

    /// The place of a tensor in the compressed home of its [`owner`](TensorIndex::owner); `None` if that is not compressed.
    pub(super) fn stored(&self, tensor: TensorId) -> Option<&Place> {
        self.compressed.place(self.layout.storage(tensor))
    }

    /// The tensor `name`; `None` if there is none.
    pub(crate) fn find(&self, name: &str) -> Option<TensorId> {
        self.by_name.get(name).copied()
    }

    /// The byte range of a module in its home.
    pub(super) fn span(&self, module: ModuleId) -> Range<usize> {
        self.groups.place(module)
    }

    /// The module whose memory holds a tensor: the tensor's module, or that of the tensor that it is an alias of.
    pub(crate) fn owner(&self, tensor: TensorId) -> ModuleId {
        self.layout.owner(tensor)
    }

    /// The byte range of a tensor in the home of its [`owner`](TensorIndex::owner).
    pub(crate) fn place(&self, tensor: TensorId) -> Range<usize> {
        self.ranges[self.layout.storage(tensor)].clone()
    }
}
