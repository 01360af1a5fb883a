//! Which tensors a model has, and where in its memory they lie.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use crate::checkpoint::{Layout, ModuleId, Per, TensorId, TensorInfo};
use crate::schedule::Groups;

/// The tensors of a model by name, and their places.
pub(crate) struct TensorIndex {
    layout: Arc<Layout>,
    groups: Groups,
    /// For each tensor where its bytes lie in its group's memory.
    places: Per<TensorId, Range<usize>>,
    by_name: HashMap<String, TensorId>,
}

impl TensorIndex {
    pub(super) fn new(layout: Arc<Layout>, groups: Groups) -> TensorIndex {
        let by_name = layout.tensor_ids().map(|tensor| (layout.at(tensor).name.clone(), tensor)).collect();
        TensorIndex { places: places(&layout, &groups), by_name, layout, groups }
    }

    pub(super) fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Which modules share memory.
    pub(crate) fn groups(&self) -> &Groups {
        &self.groups
    }

    /// The tensor `name`.
    pub(crate) fn find(&self, name: &str) -> Option<TensorId> {
        self.by_name.get(name).copied()
    }

    /// Where a module's bytes lie in the memory where it lives.
    pub(super) fn span(&self, module: ModuleId) -> Range<usize> {
        self.groups.place(module)
    }

    /// The module whose memory holds a tensor: its own, or that of the tensor that it is an alias of.
    pub(crate) fn owner(&self, tensor: TensorId) -> ModuleId {
        self.layout.owner(tensor)
    }

    /// Where a tensor's bytes lie in the memory where its owner lives.
    pub(crate) fn place(&self, tensor: TensorId) -> Range<usize> {
        self.places[self.layout.storage(tensor)].clone()
    }
}

/// For each tensor where its bytes lie in the memory of its module's group. Of a module the tensors with the largest
/// elements come first, so that each begins at a multiple of its element's size without a gap; among equals the largest.
pub(super) fn places(layout: &Layout, groups: &Groups) -> Per<TensorId, Range<usize>> {
    let mut places = Per::all(layout.tensors().len(), 0..0);
    for module in layout.module_ids() {
        let mut own: Vec<TensorId> = layout.own_tensors(module).collect();
        let largest_first = |info: &TensorInfo| std::cmp::Reverse((info.dtype.bits(), info.bytes));
        own.sort_by_key(|&tensor| largest_first(layout.at(tensor)));
        let mut at = groups.place(module).start;
        for tensor in own {
            let end = at + layout.at(tensor).bytes as usize;
            places[tensor] = at..end;
            at = end;
        }
    }
    places
}
