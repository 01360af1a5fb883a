//! Layouts made of layouts: in another order of layers, with a tied head, with tensors of other shapes and types, with the
//! factors of deferred changes.

use std::collections::{HashMap, HashSet};

use super::{Factors, Layout, Module, Stored, TensorInfo};
use crate::checkpoint::execution::OrderSource;
use crate::checkpoint::id::{LayerId, ModuleId, Per, TensorId};
use crate::checkpoint::names::{Place, Rank, TOKEN_TABLES};
use crate::dtype::DType;
use crate::error::{AdapterFault, Error, Missing, Result};

/// The factors of a weight's deferred change, before they are tensors of a layout.
pub(crate) struct FactorShapes {
    pub(crate) weight: TensorId,
    pub(crate) dtype: DType,
    pub(crate) a: Vec<u64>,
    pub(crate) b: Vec<u64>,
}

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
        let layout = Layout::new(self.tensors.iter().cloned().chain([alias]).collect()).in_order(&order)?;
        let in_file = self.in_file.iter().copied().chain([self.in_file[of.index()]]).collect();
        let stored = self.stored.iter().copied().chain([self.stored[of.index()]]).collect();
        Ok(Layout { in_file, stored, ..layout })
    }

    /// The layout of some of these tensors, in their order, which may have other shapes and places. Layers and what is known of their
    /// order stay.
    ///
    /// # Errors
    /// Never for tensors with the names of this layout.
    pub(in crate::checkpoint) fn part(&self, tensors: Vec<TensorInfo>) -> Result<Layout> {
        let mut layout = Layout::new(tensors);
        let kept: HashSet<&str> = layout.layers.iter().map(|layer| layer.name.as_str()).collect();
        let order: Vec<&str> =
            self.layers.iter().map(|layer| layer.name.as_str()).filter(|name| kept.contains(name)).collect();
        layout = layout.clone().in_order(&order)?;
        let tied: HashSet<&str> =
            self.modules.iter().filter(|module| module.tied).map(|module| module.name.as_str()).collect();
        layout
            .modules
            .iter_mut()
            .filter(|module| tied.contains(module.name.as_str()))
            .for_each(|module| module.tied = true);
        Ok(Layout { order: self.order.clone(), ..layout })
    }

    /// The same layout, of a checkpoint: `in_file` tells which of its files can be read at any time.
    pub(in crate::checkpoint) fn read_from(self, in_file: &[bool]) -> Layout {
        let in_file = self.tensors.iter().map(|info| in_file[info.file]).collect();
        Layout { in_file, ..self }
    }

    /// The same layout, with what `stored` tells of how each tensor is held where it is kept compressed.
    pub(in crate::checkpoint) fn stored_as(self, stored: impl FnMut(&TensorInfo) -> Option<Stored>) -> Layout {
        let stored = self.tensors.iter().map(stored).collect();
        Layout { stored, ..self }
    }

    /// The same layout, with what is known of how some tensors are held where they are kept compressed.
    pub(crate) fn with_stored(&self, known: impl IntoIterator<Item = (TensorId, Stored)>) -> Layout {
        let mut layout = self.clone();
        known.into_iter().for_each(|(tensor, stored)| layout.stored[tensor.index()] = Some(stored));
        layout
    }

    /// A changed tensor is in no file.
    fn leave_files(&mut self, tensor: TensorId) {
        self.in_file[tensor.index()] = false;
        self.stored[tensor.index()] = None;
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
            layout.leave_files(*tensor);
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
            layout.leave_files(*tensor);
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

    /// This layout, which has no factors, with those of some weights, in their order: `X.lora_A.weight` and `X.lora_B.weight`
    /// for `X.weight`, as the last tensors. They are a module by themselves, `X.lora`, in the weight's layer, so that they can
    /// change while the weight stays where it is.
    ///
    /// # Errors
    /// [`Error::Unpatchable`] with [`AdapterFault::FactorName`] for a weight beside which there is a tensor or a module of such a
    /// name; as [`TensorInfo::new`] for a shape.
    pub(crate) fn with_factors(&self, shapes: &[FactorShapes]) -> Result<Layout> {
        let mut layout = self.clone();
        let tensors: HashSet<&str> = self.tensors.iter().map(|tensor| tensor.name.as_str()).collect();
        let modules: HashSet<&str> = self.modules.iter().map(|module| module.name.as_str()).collect();
        for FactorShapes { weight, dtype, a, b } in shapes {
            let info = self.tensor(*weight).ok_or_else(|| Error::bug(format!("no tensor at {}", weight.index())))?;
            let base = factor_base(&info.name);
            let (name, names) = (format!("{base}.lora"), ["A", "B"].map(|side| format!("{base}.lora_{side}.weight")));
            let taken = names.iter().find(|name| tensors.contains(name.as_str()));
            if let Some(taken) = taken.or(Some(&name).filter(|name| modules.contains(name.as_str()))) {
                let fault = Box::new(AdapterFault::FactorName { name: taken.clone() });
                return Err(Error::Unpatchable { tensor: info.name.clone(), fault });
            }
            let (id, layer) = (ModuleId::new(layout.modules.len()), self.layer_with(*weight));
            let own = name.strip_prefix(&self.at(layer).name).unwrap_or(&name).trim_start_matches('.').to_owned();
            let mut ids = Vec::new();
            for (name, shape) in names.into_iter().zip([a, b]) {
                ids.push(TensorId::new(layout.tensors.len()));
                layout.tensors.push(TensorInfo::new(name, *dtype, shape, info.file, info.offset)?);
                layout.in_file.push(false);
                layout.stored.push(None);
            }
            layout.storage.extend(&ids);
            layout.module_of.extend([id, id]);
            layout.factors.push(Factors { weight: *weight, a: ids[0], b: ids[1] });
            let (alias_of, factors_of, tied) = (None, None, false);
            layout.modules.push(Module {
                id,
                name,
                layer,
                role: own,
                tensors: ids,
                bytes: 0,
                alias_of,
                tied,
                factors_of,
            });
        }
        layout.arrange_again();
        Ok(layout)
    }
}

/// What the names of a weight's factors begin with.
fn factor_base(weight: &str) -> &str {
    let endings = [".weight", ".weight_packed", ".qweight"];
    endings.iter().find_map(|ending| weight.strip_suffix(ending)).unwrap_or(weight)
}
