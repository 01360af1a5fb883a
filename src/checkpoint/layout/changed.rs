//! Layouts made of layouts: in another order of layers, with a tied head, with tensors of other shapes and types.

use std::collections::{HashMap, HashSet};

use super::{Layout, Module, TensorInfo};
use crate::checkpoint::execution::OrderSource;
use crate::checkpoint::id::{LayerId, Per, TensorId};
use crate::checkpoint::names::{Place, Rank, TOKEN_TABLES};
use crate::dtype::DType;
use crate::error::{Error, Missing, Result};

impl Layout {
    /// Marks the model's head as using the embedding's weights (`tie_word_embeddings`).
    #[must_use]
    pub fn tie_embeddings(mut self) -> Layout {
        let is_token_embedding = |m: &&mut Module| {
            let name = m.name.to_ascii_lowercase();
            TOKEN_TABLES.iter().any(|word| name.split('.').any(|part| part == *word))
        };
        if let Some(module) = self.modules.iter_mut().find(is_token_embedding) {
            module.tied = true;
        }
        self
    }

    /// This layout with its layers in the given order, by name. Layers not named follow in their old order.
    ///
    /// # Errors
    /// [`Error::Missing`] naming a layer that does not exist; [`Error::Invalid`] naming one that occurs twice.
    pub fn in_order(self, names: &[&str]) -> Result<Layout> {
        let mut places: Per<LayerId, Option<usize>> = Per::all(self.layers.len(), None);
        let by_name: HashMap<&str, LayerId> = self.layers.iter().map(|layer| (layer.name.as_str(), layer.id)).collect();
        for (place, name) in names.iter().enumerate() {
            let layer = by_name.get(name).ok_or_else(|| Missing::Layer { name: (*name).to_owned() })?;
            if places[*layer].replace(place).is_some() {
                return Err(Error::invalid(format!("layer `{name}` occurs twice in the order given")));
            }
        }
        let mut layout = self;
        let placed = std::mem::take(&mut layout.layers).into_iter().map(|layer| {
            let number = places[layer.id].unwrap_or(names.len() + layer.id.index()) as u64;
            (Place { rank: Rank::Stack, stack: 0, number }, layer)
        });
        let placed = placed.collect();
        layout.arrange(placed);
        layout.order = OrderSource::Given;
        Ok(layout)
    }

    /// This layout with one tensor more, the last, which has the bytes of `of`.
    ///
    /// # Errors
    /// Never for a tensor of this layout.
    pub(crate) fn with_alias(&self, of: TensorId, name: &str) -> Result<Layout> {
        let info = self.tensor(of).ok_or_else(|| Error::bug(format!("there is no tensor at {}", of.index())))?;
        let alias = TensorInfo { name: name.to_owned(), ..info.clone() };
        let order: Vec<&str> = self.layers.iter().map(|layer| layer.name.as_str()).collect();
        Layout::new(self.tensors.iter().cloned().chain([alias]).collect()).in_order(&order)
    }

    /// The same layout once some tensors, given with their new shapes, have been changed.
    ///
    /// A changed tensor has bytes of its own: what aliased it does so no longer. Its `offset` still says where its
    /// bytes were.
    ///
    /// # Errors
    /// As [`TensorInfo::new`] for a shape.
    pub(crate) fn patched(&self, changed: &[(TensorId, Vec<u64>)]) -> Result<Layout> {
        let mut layout = self.clone();
        for (tensor, shape) in changed {
            let info = layout.tensors.get_mut(tensor.index());
            let info = info.ok_or_else(|| Error::bug(format!("there is no tensor at {}", tensor.index())))?;
            *info = TensorInfo::new(info.name.clone(), info.dtype, shape, info.file, info.offset)?;
        }
        let own: HashSet<TensorId> = changed.iter().map(|(tensor, _)| *tensor).collect();
        let mut first = HashMap::new();
        let stored = |tensor: TensorId| match own.contains(&tensor) {
            true => tensor,
            false => *first.entry(self.storage(tensor)).or_insert(tensor),
        };
        layout.storage = self.tensor_ids().map(stored).collect();
        for module in self.modules.iter().filter_map(|m| m.alias_of) {
            layout.modules[module.index()].tied = false;
        }
        layout.arrange_again();
        Ok(layout)
    }

    /// The same layout once some tensors are of other types. Tensors of the same bytes are given together, and still share
    /// storage. Their `offset`s still say where their bytes were.
    ///
    /// # Errors
    /// As [`TensorInfo::new`] for a type.
    pub(crate) fn cast(&self, types: &[(TensorId, DType)]) -> Result<Layout> {
        let mut layout = self.clone();
        for (tensor, dtype) in types {
            let info = layout.tensors.get_mut(tensor.index());
            let info = info.ok_or_else(|| Error::bug(format!("there is no tensor at {}", tensor.index())))?;
            *info = TensorInfo::new(info.name.clone(), *dtype, &info.shape, info.file, info.offset)?;
        }
        layout.arrange_again();
        Ok(layout)
    }

    /// The same layout with the values of blocks as elements of type `dtype`: what slots hold if they are unpacked. A size beyond
    /// `u64` is the largest number.
    pub(crate) fn unpacked(&self, dtype: DType) -> Layout {
        let mut layout = self.clone();
        for info in layout.tensors.iter_mut().filter(|info| info.dtype.is_ggml_block()) {
            info.dtype = dtype;
            info.bytes = dtype.bytes_of(&info.shape).unwrap_or(u64::MAX);
        }
        layout.arrange_again();
        layout
    }
}
