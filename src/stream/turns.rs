//! What each layer brings, from where, and to which part of its slot.

use std::collections::BTreeMap;
use std::ops::Range;

use super::lanes::Lanes;
use crate::checkpoint::{Layer, Layout};
use crate::error::Result;
use crate::load::Model;
use crate::plan::Use;

/// All layers of a model, and which of them are streamed.
pub(super) struct Turns {
    layers: Vec<Turn>,
    /// The streamed layers, in order.
    streamed: Vec<usize>,
    /// For each layer the place in `streamed` of the first streamed layer that is not before it.
    next: Vec<usize>,
}

/// What one layer needs on the compute device.
#[derive(Debug, Default)]
pub(super) struct Turn {
    /// The parts of its slot; empty for a layer that brings nothing.
    pub(super) parts: Vec<Part>,
    /// Every module's bytes that are brought, in order of module and place, for finding a tensor.
    brought: Vec<Brought>,
    /// The modules that it needs and that stay on the compute device.
    pub(super) resident: Vec<usize>,
}

/// Bytes of a slot that one lane fills in one go.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) lane: usize,
    pub(super) bytes: usize,
    pub(super) pieces: Vec<From>,
}

/// Bytes of a home, that of a module and maybe others, and where they begin in their part.
#[derive(Clone, Debug)]
pub(super) struct From {
    pub(super) module: usize,
    pub(super) place: Range<usize>,
    pub(super) at: usize,
}

#[derive(Debug)]
struct Brought {
    module: usize,
    place: Range<usize>,
    part: usize,
    at: usize,
}

impl Turns {
    /// For slots of the library's own: a part for each lane, in which each module begins at a multiple of 256 and those of
    /// a group stand together as they do at home.
    pub(super) fn by_lane(model: &Model, lanes: &mut Lanes) -> Result<Turns> {
        let layout = model.layout();
        Turns::of(model, lanes, |lanes, layer| {
            let mut parts: BTreeMap<usize, Part> = BTreeMap::new();
            for module in model.groups().in_slot(streamed(model, layer).collect()) {
                let Some(lane) = lanes.lane_of(model, module)? else { continue };
                let part = parts.entry(lane).or_insert_with(|| Part { lane, bytes: 0, pieces: Vec::new() });
                let bytes = layout.modules[module].bytes;
                part.pieces.push(From { module, place: model.span(module), at: part.bytes });
                part.bytes += Layout::slot_bytes(bytes) as usize;
            }
            Ok(parts.into_values().collect())
        })
    }

    /// For slots of the caller's own: a part for each tensor.
    pub(super) fn by_tensor(model: &Model, lanes: &mut Lanes) -> Result<Turns> {
        Turns::of(model, lanes, |lanes, layer| {
            let mut parts = Vec::new();
            for tensor in streamed_tensors(model, layer) {
                let (module, place) = (model.owner(tensor), model.place(tensor));
                let Some(lane) = lanes.lane_of(model, module)? else { continue };
                parts.push(Part { lane, bytes: place.len(), pieces: vec![From { module, place, at: 0 }] });
            }
            Ok(parts)
        })
    }

    fn of(model: &Model, lanes: &mut Lanes, parts: impl Fn(&mut Lanes, &Layer) -> Result<Vec<Part>>) -> Result<Turns> {
        let layout = model.layout();
        let turn = |layer: &Layer| Ok(Turn::new(model, parts(lanes, layer)?, resident(model, layer)));
        let layers = layout.layers.iter().map(turn).collect::<Result<Vec<_>>>()?;
        layers.iter().for_each(|turn| lanes.expect(&turn.parts));
        let streamed: Vec<usize> = (0..layers.len()).filter(|&layer| !layers[layer].parts.is_empty()).collect();
        let next = (0..layers.len()).map(|layer| streamed.partition_point(|&other| other < layer)).collect();
        Ok(Turns { layers, streamed, next })
    }

    pub(super) fn count(&self) -> usize {
        self.layers.len()
    }

    pub(super) fn of_layer(&self, layer: usize) -> &Turn {
        &self.layers[layer]
    }

    /// Whether any layer is streamed.
    pub(super) fn streams(&self) -> bool {
        !self.streamed.is_empty()
    }

    pub(super) fn is_streamed(&self, layer: usize) -> bool {
        !self.layers[layer].parts.is_empty()
    }

    /// The streamed layers after `layer`, around the end to the beginning, without itself.
    pub(super) fn after(&self, layer: usize) -> impl Iterator<Item = usize> + use<'_> {
        let own = usize::from(self.is_streamed(layer));
        let count = self.streamed.len();
        (own..count).map(move |ahead| self.streamed[(self.next[layer] + ahead) % count])
    }

    /// How many streamed layers have their turn before `other` has, from `layer` on: 0 for itself.
    pub(super) fn distance(&self, layer: usize, other: usize) -> usize {
        let count = self.streamed.len();
        let between = (self.next[other] + count - self.next[layer]) % count;
        between + usize::from(!self.is_streamed(layer))
    }
}

impl Turn {
    fn new(model: &Model, mut parts: Vec<Part>, resident: Vec<usize>) -> Turn {
        let brought = |(part, Part { pieces, .. }): (usize, &Part)| {
            let of = move |From { module, place, at }: From| Brought { module, place, part, at };
            pieces.clone().into_iter().map(of).collect::<Vec<_>>()
        };
        let mut brought: Vec<Brought> = parts.iter().enumerate().flat_map(brought).collect();
        brought.sort_by_key(|brought| (brought.module, brought.place.start));
        parts.iter_mut().for_each(|part| part.merge(model));
        Turn { parts, brought, resident }
    }

    /// Where bytes of a module are in the slot: the part, and the place in it. None where they are not brought.
    pub(super) fn find(&self, module: usize, place: &Range<usize>) -> Option<(usize, Range<usize>)> {
        let after = self.brought.partition_point(|b| (b.module, b.place.start) <= (module, place.start));
        let found = &self.brought[after.checked_sub(1)?];
        let at = found.at + place.start.checked_sub(found.place.start)?;
        (found.module == module && place.end <= found.place.end).then(|| (found.part, at..at + place.len()))
    }
}

impl Part {
    /// Makes one piece of those where one begins on both ends where the one before it ends.
    fn merge(&mut self, model: &Model) {
        let group = |from: &From| model.groups().of(from.module);
        self.pieces.dedup_by(|next, last| {
            let merges = group(next) == group(last)
                && last.place.end == next.place.start
                && last.at + last.place.len() == next.at;
            if merges {
                last.place.end = next.place.end;
            }
            merges
        });
    }

    /// Where its last bytes end; after that there is nothing but room.
    pub(super) fn end(&self) -> usize {
        self.pieces.last().map_or(0, |from| from.at + from.place.len())
    }

    /// The bytes that are copied into it.
    pub(super) fn copied(&self) -> u64 {
        self.pieces.iter().map(|from| from.place.len() as u64).sum()
    }
}

/// The modules that a layer has to bring: its own streamed ones, and those whose storage its tensors share, if these
/// are streamed.
fn streamed(model: &Model, layer: &Layer) -> impl Iterator<Item = usize> {
    let (layout, plan) = (model.layout(), model.plan());
    let moves = |&module: &usize| plan.assignments()[module].usage == Use::Streamed && layout.modules[module].bytes > 0;
    layout.needs_of(layer).into_iter().filter(moves)
}

/// The tensors that a layer has to bring, each storage once.
pub(super) fn streamed_tensors(model: &Model, layer: &Layer) -> Vec<usize> {
    let (layout, plan) = (model.layout(), model.plan());
    let own = layer.modules.iter().flat_map(|&module| &layout.modules[module].tensors).copied();
    let mut seen = std::collections::HashSet::new();
    let moves = |&tensor: &usize| {
        let streamed = plan.assignments()[model.owner(tensor)].usage == Use::Streamed;
        streamed && layout.tensors[tensor].bytes > 0 && seen.insert(layout.storage[tensor])
    };
    own.filter(moves).collect()
}

fn resident(model: &Model, layer: &Layer) -> Vec<usize> {
    let compute = model.residency().device().id();
    let here = |module: &usize| model.home(*module).is_some_and(|home| home.device() == compute);
    model.layout().needs_of(layer).into_iter().filter(here).collect()
}
