//! Tensors -> modules -> layers, from their names alone.

mod changed;
mod entries;

use std::collections::{HashMap, HashSet};

use serde::Serialize;

use super::execution::{self, OrderSource};
use super::id::{Id, LayerId, ModuleId, Per, TensorId, ids};
use super::names::{Place, Rank, module_name, natural, numbered_prefix};
use crate::dtype::DType;
use crate::lossless::padded;
pub(crate) use changed::FactorShapes;
pub use entries::{Factors, Layer, Module, TensorInfo};

/// The tensors of a model in order of execution, as modules and layers.
///
/// A tensor's layer follows from the outermost number in its name: `model.layers.7.mlp.up_proj.weight` belongs to layer
/// `model.layers.7`. Each module outside any stack is a separate layer.
///
/// Tables have the order in which known networks run their layers: a checkpoint of such a network has that order, whatever the
/// order of its tensors. In any other, layers of one stack are ordered by their numbers, stacks by first appearance, and
/// embeddings come first, then other inputs, the stacks, final norms, and heads last. [`Layout::order`] says which it was, and
/// [`Layout::in_order`] sets another.
///
/// Tensors, modules and layers refer to each other, so no part of a layout can be changed in place:
///
/// ```compile_fail,E0616
/// let mut layout = tensor_offload::checkpoint::Layout::blocks([1 << 30; 40]);
/// layout.modules.pop();
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Layout {
    tensors: Vec<TensorInfo>,
    modules: Vec<Module>,
    layers: Vec<Layer>,
    /// The number of layer classes.
    classes: usize,
    /// For each tensor, the first tensor with the same bytes, which may be itself.
    storage: Vec<TensorId>,
    /// The module of each tensor.
    module_of: Vec<ModuleId>,
    order: OrderSource,
    /// The factors of deferred changes, in order of the weights and of the factors themselves.
    #[serde(skip)]
    factors: Vec<Factors>,
    /// Whether the bytes of each tensor can be read as they are from a file, at any time.
    #[serde(skip)]
    in_file: Vec<bool>,
    /// How each tensor is held where it is kept compressed; `None` for tensors that are not kept so.
    #[serde(skip)]
    stored: Vec<Option<Stored>>,
}

/// How a [compressed](super::write_compressed) file holds a tensor, or a model that compresses while it is loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stored {
    /// The bytes that it takes.
    pub(crate) bytes: u64,
    /// Whether they are its [code](crate::lossless); otherwise they are the tensor as it is.
    pub(crate) is_code: bool,
    /// Whether a load makes them: then their number is an estimate until it has. Otherwise a file has them.
    pub(crate) is_made: bool,
}

impl Layout {
    /// Groups `tensors`; their order is the order of first appearance.
    pub fn new(tensors: Vec<TensorInfo>) -> Layout {
        let storage = first_with_same_bytes(&tensors);
        let mut modules: Vec<Module> = Vec::new();
        let mut layers: Vec<(Place, Layer)> = Vec::new();
        let (mut module_of, mut layer_of, mut stacks) = (HashMap::new(), HashMap::new(), HashMap::new());
        for (tensor, info) in ids(tensors.len()).zip(&tensors) {
            let name = module_name(&info.name);
            let module: ModuleId = *module_of.entry(name).or_insert_with(|| {
                let numbered = numbered_prefix(name);
                let layer_name = numbered.map_or(name, |(_, _, prefix)| prefix);
                let layer: LayerId = *layer_of.entry(layer_name).or_insert_with(|| {
                    let place = match numbered {
                        Some((stack, number, _)) => {
                            let next = stacks.len();
                            Place { rank: Rank::Stack, stack: *stacks.entry(stack).or_insert(next), number }
                        }
                        None => Place { rank: Rank::of(name), stack: 0, number: layers.len() as u64 },
                    };
                    let id = LayerId::new(layers.len());
                    let name = layer_name.to_owned();
                    layers.push((place, Layer { id, name, modules: vec![], bytes: 0, class: 0 }));
                    id
                });
                let role = name[layer_name.len()..].trim_start_matches('.').to_owned();
                let (id, name, tensors) = (ModuleId::new(modules.len()), name.to_owned(), Vec::new());
                let (alias_of, factors_of) = (None, None);
                modules.push(Module { id, name, layer, role, tensors, bytes: 0, alias_of, tied: false, factors_of });
                id
            });
            modules[module.index()].tensors.push(tensor);
        }
        // All of these are given their modules below.
        let module_of = vec![ModuleId::new(0); tensors.len()];
        let order = in_order_of_execution(&mut layers, &modules);
        let (layer_list, factors) = Default::default();
        let (in_file, stored) = (vec![false; tensors.len()], vec![None; tensors.len()]);
        let mut layout = Layout {
            tensors,
            modules,
            layers: layer_list,
            classes: 0,
            storage,
            module_of,
            order,
            factors,
            in_file,
            stored,
        };
        layout.arrange(layers);
        layout
    }

    /// A model of `blocks` layers `block.0`, `block.1`, … of one module each, of these sizes.
    pub fn blocks(sizes: impl IntoIterator<Item = u64>) -> Layout {
        let mut offset = 0u64;
        let tensor = |(index, bytes): (usize, u64)| {
            let name = format!("block.{index}.weight");
            let at = offset;
            offset = offset.saturating_add(bytes);
            TensorInfo { name, dtype: DType::U8, shape: vec![bytes], bytes, file: 0, offset: at }
        };
        Layout::new(sizes.into_iter().enumerate().map(tensor).collect())
    }

    /// All tensors, in the given order. To find one by id, use [`tensor`](Layout::tensor).
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// All modules, in order of execution.
    pub fn modules(&self) -> &[Module] {
        &self.modules
    }

    /// All layers, in order of execution.
    pub fn layers(&self) -> &[Layer] {
        &self.layers
    }

    /// Where the order of the layers comes from.
    pub fn order(&self) -> &OrderSource {
        &self.order
    }

    /// The ids of all tensors, in their order.
    pub fn tensor_ids(&self) -> impl DoubleEndedIterator<Item = TensorId> + ExactSizeIterator + Clone + use<> {
        ids(self.tensors.len())
    }

    /// The ids of all modules, in order of execution.
    pub fn module_ids(&self) -> impl DoubleEndedIterator<Item = ModuleId> + ExactSizeIterator + Clone + use<> {
        ids(self.modules.len())
    }

    /// The ids of all layers, in order of execution. The iterator borrows nothing, so a [`Streamer`](crate::Streamer)
    /// can be asked for each layer in turn.
    pub fn layer_ids(&self) -> impl DoubleEndedIterator<Item = LayerId> + ExactSizeIterator + Clone + use<> {
        ids(self.layers.len())
    }

    /// The tensor `name`; `None` if there is none.
    pub fn find(&self, name: &str) -> Option<TensorId> {
        self.tensors.iter().position(|t| t.name == name).map(TensorId::new)
    }

    /// The layer `name`, such as `model.layers.7`; `None` if there is none.
    pub fn find_layer(&self, name: &str) -> Option<LayerId> {
        self.layers.iter().find(|layer| layer.name == name).map(|layer| layer.id)
    }

    /// A tensor; `None` if there is no such tensor, as for the other lookups by id.
    pub fn tensor(&self, tensor: TensorId) -> Option<&TensorInfo> {
        self.tensors.get(tensor.index())
    }

    /// A module.
    pub fn module(&self, module: ModuleId) -> Option<&Module> {
        self.modules.get(module.index())
    }

    /// A layer.
    pub fn layer(&self, layer: LayerId) -> Option<&Layer> {
        self.layers.get(layer.index())
    }

    /// The modules of a layer; empty for an unknown id.
    pub fn modules_in(&self, layer: LayerId) -> impl Iterator<Item = &Module> {
        self.layer(layer).into_iter().flat_map(|layer| &layer.modules).map(|&module| self.at(module))
    }

    /// The tensors of a module; empty for an unknown id.
    pub fn tensors_in(&self, module: ModuleId) -> impl Iterator<Item = &TensorInfo> {
        self.module(module).into_iter().flat_map(|module| &module.tensors).map(|&tensor| self.at(tensor))
    }

    /// The number of layer classes; every [`Layer::class`] is below it.
    pub fn class_count(&self) -> usize {
        self.classes
    }

    /// The first tensor with the same bytes as `tensor`, which may be `tensor` itself.
    pub fn storage_of(&self, tensor: TensorId) -> Option<TensorId> {
        self.storage.get(tensor.index()).copied()
    }

    /// The module of a tensor.
    pub fn module_of(&self, tensor: TensorId) -> Option<ModuleId> {
        self.module_of.get(tensor.index()).copied()
    }

    /// The factors of the weights whose changes are [deferred](crate::Weights::defer), in order of the weights.
    pub fn factors(&self) -> &[Factors] {
        &self.factors
    }

    /// The factors of a weight; `None` if its changes are not deferred.
    pub fn factors_of(&self, weight: TensorId) -> Option<Factors> {
        let found = self.factors.binary_search_by_key(&weight, |factors| factors.weight).ok()?;
        Some(self.factors[found])
    }

    /// The factors that a tensor is one of.
    pub(crate) fn factors_with(&self, factor: TensorId) -> Option<Factors> {
        // The first factors were added after the last tensor of the checkpoint.
        let next = self.factors.partition_point(|factors| factors.a <= factor);
        let found = self.factors.get(next.checked_sub(1)?)?;
        (found.a == factor || found.b == factor).then_some(*found)
    }

    /// The sum of all tensors' bytes. Shared storage counts once.
    pub fn bytes(&self) -> u64 {
        self.modules.iter().map(|m| m.bytes).fold(0, u64::saturating_add)
    }

    /// The modules whose memory holds a layer's tensors, each once: the layer's modules, and those whose storage its tensors
    /// share.
    pub fn needs_of(&self, layer: LayerId) -> Option<Vec<ModuleId>> {
        self.layer(layer).map(|layer| self.needs(layer))
    }

    /// The bytes that a module of `bytes` takes in a slot: each module begins at a multiple of 256, as kernels require.
    pub fn slot_bytes(bytes: u64) -> u64 {
        bytes.div_ceil(256).saturating_mul(256)
    }

    /// The bytes of a slot for a layer that is streamed whole.
    pub fn slot_of(&self, layer: LayerId) -> Option<u64> {
        self.layer(layer).map(|layer| self.slot(layer))
    }

    /// What has an id of this very layout.
    pub(crate) fn at<I: OfLayout>(&self, id: I) -> &I::What {
        &I::all(self)[id.place()]
    }

    /// As [`storage_of`](Layout::storage_of), for a tensor of this very layout.
    pub(crate) fn storage(&self, tensor: TensorId) -> TensorId {
        self.storage[tensor.index()]
    }

    /// The module whose memory holds a tensor: the tensor's module, or that of the tensor that it is an alias of.
    pub(crate) fn owner(&self, tensor: TensorId) -> ModuleId {
        self.module_of[self.storage(tensor).index()]
    }

    /// The layer of a tensor.
    pub(crate) fn layer_with(&self, tensor: TensorId) -> LayerId {
        self.at(self.module_of[tensor.index()]).layer
    }

    /// Whether all that a module owns can be read as it is from files, at any time: nothing changes it while it loads.
    pub(crate) fn is_in_files(&self, module: ModuleId) -> bool {
        self.own_tensors(module).all(|tensor| self.in_file[tensor.index()])
    }

    /// How a tensor is held where it is kept compressed: as a file has it, if nothing changes it while it loads, or as the load makes
    /// it. `None` if it is not kept so.
    pub(crate) fn stored(&self, tensor: TensorId) -> Option<Stored> {
        self.stored[tensor.index()]
    }

    /// Whether a load makes anything of a module's compressed form.
    pub(crate) fn is_made(&self, module: ModuleId) -> bool {
        self.own_tensors(module).filter_map(|tensor| self.stored(tensor)).any(|stored| stored.is_made)
    }

    /// The bytes of a module in compressed form, each tensor [`padded`]. `None` if not all of its tensors can be kept so, or none of
    /// them as a code, or if that would save nothing.
    pub(crate) fn compressed_bytes(&self, module: ModuleId) -> Option<u64> {
        self.bytes_stored(module, |tensor| self.stored(tensor))
    }

    /// As [`compressed_bytes`](Layout::compressed_bytes), for tensors that are held as `stored` says.
    pub(crate) fn bytes_stored(&self, module: ModuleId, stored: impl Fn(TensorId) -> Option<Stored>) -> Option<u64> {
        let (mut bytes, mut has_code) = (0u64, false);
        for tensor in self.own_tensors(module) {
            let stored = stored(tensor)?;
            has_code |= stored.is_code;
            bytes = bytes.saturating_add(padded(stored.bytes));
        }
        Some(bytes).filter(|bytes| has_code && *bytes < self.at(module).bytes)
    }

    /// The tensors of a module whose bytes lie in its own memory.
    pub(crate) fn own_tensors(&self, module: ModuleId) -> impl Iterator<Item = TensorId> {
        self.at(module).tensors.iter().copied().filter(|&tensor| self.storage(tensor) == tensor)
    }

    /// The layer of a tensor. `None` for a tensor of another layout.
    pub fn layer_of(&self, tensor: TensorId) -> Option<LayerId> {
        self.tensor(tensor).map(|_| self.layer_with(tensor))
    }

    /// As [`needs_of`](Layout::needs_of), for a layer of this very layout.
    pub(crate) fn needs(&self, layer: &Layer) -> Vec<ModuleId> {
        let mut needs = layer.modules.clone();
        for &tensor in layer.modules.iter().flat_map(|&module| &self.at(module).tensors) {
            let owner = self.owner(tensor);
            if self.storage(tensor) != tensor && !needs.contains(&owner) {
                needs.push(owner);
            }
        }
        needs
    }

    /// As [`slot_of`](Layout::slot_of), for a layer of this very layout.
    pub(crate) fn slot(&self, layer: &Layer) -> u64 {
        let slot = |module: ModuleId| Layout::slot_bytes(self.at(module).bytes);
        self.needs(layer).into_iter().map(slot).fold(0, u64::saturating_add)
    }

    /// Computes bytes and classes of the layers, which keep their order.
    fn arrange_again(&mut self) {
        let place = |layer: &Layer| Place { rank: Rank::Stack, stack: 0, number: layer.id.index() as u64 };
        let placed = std::mem::take(&mut self.layers).into_iter().map(|layer| (place(&layer), layer));
        let placed = placed.collect();
        self.arrange(placed);
    }

    /// Sorts layers by place and their modules by name, renumbers both, and computes bytes and classes.
    fn arrange(&mut self, mut layers: Vec<(Place, Layer)>) {
        layers.sort_by_key(|(place, _)| *place);
        let mut new: Per<LayerId, LayerId> = ids(layers.len()).collect();
        for (place, (_, layer)) in ids(layers.len()).zip(&layers) {
            new[layer.id] = place;
        }
        let emptied = |(_, layer): (Place, Layer)| Layer { id: new[layer.id], modules: vec![], bytes: 0, ..layer };
        self.layers = layers.into_iter().map(emptied).collect();
        for module in &mut self.modules {
            module.layer = new[module.layer];
        }
        self.modules.sort_by(|a, b| a.layer.cmp(&b.layer).then_with(|| natural(&a.role, &b.role)));

        for (id, module) in ids(self.modules.len()).zip(&mut self.modules) {
            module.id = id;
            module.tensors.iter().for_each(|t| self.module_of[t.index()] = id);
        }
        for factors in &self.factors {
            let of = self.module_of[factors.weight.index()];
            self.modules[self.module_of[factors.a.index()].index()].factors_of = Some(of);
        }
        for id in self.module_ids() {
            let owns = |t: TensorId| self.storage(t) == t || self.at(t).bytes == 0;
            let module = self.at(id);
            let bytes =
                module.tensors.iter().filter(|&&t| owns(t)).map(|&t| self.at(t).bytes).fold(0, u64::saturating_add);
            let aliased = module.tensors.iter().all(|&t| !owns(t)).then(|| self.owner(module.tensors[0]));
            let (alias_of, layer) = (aliased.filter(|&other| other != id), module.layer);
            let layer = &mut self.layers[layer.index()];
            layer.modules.push(id);
            layer.bytes = layer.bytes.saturating_add(bytes);
            let module = &mut self.modules[id.index()];
            (module.bytes, module.alias_of) = (bytes, alias_of);
            if let Some(other) = alias_of {
                self.modules[other.index()].tied = true;
            }
        }
        let mut classes = HashMap::new();
        for layer in &mut self.layers {
            let signature = |m: &ModuleId| {
                let module = &self.modules[m.index()];
                let info = |t: &TensorId| &self.tensors[t.index()];
                let kinds: Vec<_> = module.tensors.iter().map(|t| (info(t).dtype, info(t).bytes)).collect();
                (module.role.clone(), kinds)
            };
            let next = classes.len();
            let key: Vec<_> = layer.modules.iter().map(signature).collect();
            layer.class = *classes.entry(key).or_insert(next);
        }
        self.classes = classes.len();
    }
}

/// Gives layers, which are in the order of the files, the places that a table has for them. Without one, they keep those that
/// their names give them.
fn in_order_of_execution(layers: &mut [(Place, Layer)], modules: &[Module]) -> OrderSource {
    let names: Vec<&str> = layers.iter().map(|(_, layer)| layer.name.as_str()).collect();
    if let Some(order) = execution::order(&names, modules.iter().map(|module| module.name.as_str())) {
        for (number, &layer) in (0..).zip(&order.layers) {
            layers[layer].0 = Place { rank: Rank::Stack, stack: 0, number };
        }
        return OrderSource::FamilyTable { families: order.families };
    }
    // Only the files tell the order of several stacks, and of several layers of one rank outside of stacks.
    let mut seen = HashSet::new();
    let open = |(place, _): &(Place, Layer)| match place.rank {
        Rank::Stack => place.stack > 0 || !seen.insert((place.rank, place.number)),
        rank => !seen.insert((rank, 0)),
    };
    match layers.iter().any(open) {
        true => OrderSource::FileOrder,
        false => OrderSource::NamesRule,
    }
}

/// What an id is of.
pub(crate) trait OfLayout: Id {
    /// A tensor, module or layer.
    type What;

    /// All of them.
    fn all(layout: &Layout) -> &[Self::What];
}

impl OfLayout for TensorId {
    type What = TensorInfo;

    fn all(layout: &Layout) -> &[TensorInfo] {
        &layout.tensors
    }
}

impl OfLayout for ModuleId {
    type What = Module;

    fn all(layout: &Layout) -> &[Module] {
        &layout.modules
    }
}

impl OfLayout for LayerId {
    type What = Layer;

    fn all(layout: &Layout) -> &[Layer] {
        &layout.layers
    }
}

/// For each tensor, the first tensor with the same byte range of the same file.
fn first_with_same_bytes(tensors: &[TensorInfo]) -> Vec<TensorId> {
    let mut first = HashMap::new();
    let same = |(id, t): (TensorId, &TensorInfo)| match t.bytes {
        0 => id,
        bytes => *first.entry((t.file, t.offset, bytes)).or_insert(id),
    };
    ids(tensors.len()).zip(tensors).map(same).collect()
}

#[cfg(test)]
mod tests;
