//! The contents of slots: the byte ranges that each layer fetches, by which lane, and to which part of its slot.

use std::collections::BTreeMap;
use std::ops::Range;

use super::blocks::{LayerBlocks, Position, SlotBlocks, positions};
use super::compressed::Compressed;
use super::groups::Groups;
use crate::checkpoint::{Layer, LayerId, Layout, ModuleId, Per, TensorId};
use crate::dtype::DType;
use crate::lossless::needed_before;

/// The contents of all layers of a model.
#[derive(Clone, Debug)]
pub(crate) struct Contents(Per<LayerId, Content>);

/// The bytes that one layer fetches.
#[derive(Clone, Debug)]
pub(crate) struct Content {
    /// The parts of its slot, in order of their blocks and lanes. Empty for a layer that fetches nothing.
    pub(crate) parts: Vec<Part>,
    /// The bytes of a slot that holds the layer.
    bytes: u64,
    /// The position of every module's bytes in the slot, in order of module and range.
    located: Vec<Located>,
}

/// A part of a block of a slot, which one lane fills in one operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    /// The number of the block.
    pub(crate) block: usize,
    pub(crate) lane: usize,
    /// The size in bytes, including gaps between slices.
    pub(crate) bytes: usize,
    /// The byte ranges that are copied into it, in order of offset.
    pub(crate) slices: Vec<Slice>,
    /// The tensors in blocks, or compressed, whose values are computed into it, in order of offset.
    pub(crate) unpacked: Vec<Unpacked>,
}

/// A byte range of the memory that a module lives in, its own or its group's, with its offset in the part. Of a compressed module it
/// is that of its compressed form.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Slice {
    pub(crate) module: ModuleId,
    pub(crate) range: Range<usize>,
    pub(crate) at: usize,
}

/// A tensor that is in another form at home than in a slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Unpacked {
    /// Its byte range in the memory that a module lives in, and the offset of its values in the part.
    pub(crate) slice: Slice,
    pub(crate) form: Form,
}

/// The form of a tensor at home.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// Blocks of a type, and the type of their values.
    Blocks { from: DType, to: DType },
    /// Its code, the bytes of its weights, and the most that header and index, and a block, may have.
    Code { weights: usize, head: usize, block: usize },
}

#[derive(Clone, Debug)]
struct Located {
    module: ModuleId,
    range: Range<usize>,
    part: usize,
    at: usize,
    /// The bytes in the slot, if these are not the bytes at home.
    values: Option<usize>,
}

/// Bytes on their way into a slot: a module, or a tensor of one.
struct Piece {
    block: usize,
    lane: usize,
    module: ModuleId,
    /// Their range in the memory that the module lives in, and in its compressed form, if it is compressed.
    range: Range<usize>,
    stored: Range<usize>,
    /// The bytes that they take in the slot.
    room: usize,
    /// The tensor, if it is unpacked on its way.
    unpacked: Option<TensorId>,
}

/// The tensors of a model where they live, and as slots hold them.
struct Forms<'a> {
    home: &'a Layout,
    slot: &'a Layout,
    groups: &'a Groups,
    /// The byte range of each tensor at home.
    ranges: Per<TensorId, Range<usize>>,
    compressed: &'a Compressed,
}

impl Contents {
    /// The contents of the layers of `layout`, whose tensors are those of `in_slots` in a slot. `lanes` has the number of each
    /// module's lane, or `None` for a module that is not fetched or has no bytes.
    ///
    /// A slot has a part for each block and lane. In a slot of one block each module begins at a multiple of 256 bytes, and
    /// the modules of a group are adjacent, as they are at home.
    pub(crate) fn new(
        (layout, in_slots): (&Layout, &Layout),
        (groups, compressed): (&Groups, &Compressed),
        lanes: &Per<ModuleId, Option<usize>>,
        blocks: &SlotBlocks,
    ) -> Contents {
        let forms = Forms { home: layout, slot: in_slots, groups, ranges: groups.tensor_ranges(layout), compressed };
        let content = |layer: &Layer| {
            let mut modules = layout.needs(layer);
            modules.retain(|&module| lanes[module].is_some());
            let grouping = blocks.grouping();
            let bytes = match grouping.is_apart() {
                true if modules.is_empty() => 0,
                true => blocks.bytes_for(&LayerBlocks::of(in_slots, grouping, &modules)),
                false => LayerBlocks::of(in_slots, grouping, &modules).bytes(),
            };
            // Tensors that are neighbours at home are neighbours in a slot, so that they are one piece.
            let modules = groups.in_slot(modules);
            let pieces = match grouping.is_apart() {
                true => forms.divided(lanes, blocks, &modules),
                false => modules.into_iter().flat_map(|module| forms.whole(lanes, module)).collect(),
            };
            Content::new(&forms, pieces, bytes)
        };
        Contents(layout.layers().iter().map(content).collect())
    }

    /// The number of layers, streamed or not.
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// The content of a layer. `None` for a layer of another layout.
    pub(crate) fn get(&self, layer: LayerId) -> Option<&Content> {
        self.0.get(layer)
    }

    /// The content of a layer of this layout.
    pub(crate) fn of(&self, layer: LayerId) -> &Content {
        &self.0[layer]
    }

    /// The contents of all layers, in order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Content> {
        self.0.values()
    }

    /// The number of layers that fetch anything.
    pub(crate) fn streamed(&self) -> usize {
        self.iter().filter(|content| content.is_streamed()).count()
    }

    /// The slot size of each layer that fetches anything, in bytes and in order.
    pub(crate) fn bytes(&self) -> Vec<u64> {
        self.iter().filter(|content| content.is_streamed()).map(Content::bytes).collect()
    }
}

impl Forms<'_> {
    /// Whether a tensor is unpacked on its way into a slot.
    fn is_unpacked(&self, tensor: TensorId) -> bool {
        let is_code = self.compressed.place(tensor).is_some_and(|place| place.is_code);
        is_code || self.home.at(tensor).dtype != self.slot.at(tensor).dtype
    }

    /// The byte range of a tensor in the memory that it is copied from.
    fn stored(&self, tensor: TensorId) -> Range<usize> {
        self.compressed.place(tensor).map_or_else(|| self.ranges[tensor].clone(), |place| place.range.clone())
    }

    /// A module in a slot of one block: in one piece, or tensor by tensor if any is unpacked. Those of a compressed module are.
    fn whole(&self, lanes: &Per<ModuleId, Option<usize>>, module: ModuleId) -> Vec<Piece> {
        let Some(lane) = lanes[module] else { return Vec::new() };
        let all = Layout::slot_bytes(self.slot.at(module).bytes) as usize;
        if !self.home.own_tensors(module).any(|tensor| self.is_unpacked(tensor)) {
            let range = self.groups.place(module);
            return vec![Piece { block: 0, lane, module, stored: range.clone(), range, room: all, unpacked: None }];
        }
        let places = self.groups.ranges_of(self.slot, module);
        let begin = places.first().map_or(0, |(_, first)| first.start);
        let end_of = |place: usize| places.get(place + 1).map_or(all, |(_, next)| next.start - begin);
        let tensor = |(number, (tensor, place)): (usize, &(TensorId, Range<usize>))| {
            let room = end_of(number) - (place.start - begin);
            let (range, stored) = (self.ranges[*tensor].clone(), self.stored(*tensor));
            let unpacked = self.is_unpacked(*tensor).then_some(*tensor);
            Piece { block: 0, lane, module, range, stored, room, unpacked }
        };
        places.iter().enumerate().map(tensor).collect()
    }

    /// The tensors of `modules` in a slot that is divided into blocks.
    fn divided(&self, lanes: &Per<ModuleId, Option<usize>>, blocks: &SlotBlocks, modules: &[ModuleId]) -> Vec<Piece> {
        let piece = |Position { tensor, block }: Position| {
            let (module, range, stored) = (self.home.owner(tensor), self.ranges[tensor].clone(), self.stored(tensor));
            let room = blocks.room(self.slot.at(tensor).bytes) as usize;
            let unpacked = self.is_unpacked(tensor).then_some(tensor);
            Some(Piece { block: blocks.number(block)?, lane: lanes[module]?, module, range, stored, room, unpacked })
        };
        positions(self.slot, blocks.grouping(), modules).into_iter().filter_map(piece).collect()
    }

    /// A tensor that is unpacked to `at` in its part.
    fn unpacked(&self, tensor: TensorId, slice: Slice) -> Unpacked {
        let (home, slot) = (self.home.at(tensor), self.slot.at(tensor));
        let values = home.shape.iter().product::<u64>() as usize;
        let form = match home.dtype == slot.dtype {
            true => {
                let (head, block) = needed_before(home.bytes, values as u64);
                Form::Code { weights: home.bytes as usize, head: head as usize, block: block as usize }
            }
            false => Form::Blocks { from: home.dtype, to: slot.dtype },
        };
        Unpacked { slice, form }
    }
}

impl Content {
    fn new(forms: &Forms<'_>, pieces: Vec<Piece>, bytes: u64) -> Content {
        let (mut parts, mut located) = (BTreeMap::<(usize, usize), Part>::new(), Vec::new());
        for Piece { block, lane, module, range, stored, room, unpacked } in pieces {
            let new = || Part { block, lane, bytes: 0, slices: Vec::new(), unpacked: Vec::new() };
            let part = parts.entry((block, lane)).or_insert_with(new);
            let (at, values) = (part.bytes, unpacked.map(|tensor| forms.slot.at(tensor).bytes as usize));
            located.push(((block, lane), Located { module, range, part: 0, at, values }));
            let slice = Slice { module, range: stored, at };
            match unpacked {
                Some(tensor) => part.unpacked.push(forms.unpacked(tensor, slice)),
                None => part.push(forms.groups, slice),
            }
            part.bytes += room;
        }
        let keys: Vec<(usize, usize)> = parts.keys().copied().collect();
        let found =
            |(key, located): ((usize, usize), Located)| Located { part: keys.partition_point(|k| *k < key), ..located };
        let mut located: Vec<Located> = located.into_iter().map(found).collect();
        located.sort_by_key(|located| (located.module, located.range.start));
        Content { parts: parts.into_values().collect(), bytes, located }
    }

    /// The bytes of a slot that holds the layer.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether the layer fetches anything.
    pub(crate) fn is_streamed(&self) -> bool {
        !self.parts.is_empty()
    }

    /// Finds bytes of a module in the slot: the part, and the range in it, which is that of their values if they are unpacked.
    /// `None` if they are not fetched.
    pub(crate) fn find(&self, module: ModuleId, range: &Range<usize>) -> Option<(usize, Range<usize>)> {
        let after = self.located.partition_point(|l| (l.module, l.range.start) <= (module, range.start));
        let found = &self.located[after.checked_sub(1)?];
        if let Some(values) = found.values {
            let whole = (found.module, &found.range) == (module, range);
            return whole.then_some((found.part, found.at..found.at + values));
        }
        let at = found.at + range.start.checked_sub(found.range.start)?;
        (found.module == module && range.end <= found.range.end).then(|| (found.part, at..at + range.len()))
    }
}

impl Unpacked {
    pub(crate) fn is_code(&self) -> bool {
        matches!(self.form, Form::Code { .. })
    }
}

impl Part {
    /// Adds a slice. Merges it with the last one if the two are adjacent in both source and destination.
    fn push(&mut self, groups: &Groups, slice: Slice) {
        match self.slices.last_mut() {
            Some(last)
                if groups.of(last.module) == groups.of(slice.module)
                    && last.range.end == slice.range.start
                    && last.at + last.range.len() == slice.at =>
            {
                last.range.end = slice.range.end;
            }
            _ => self.slices.push(slice),
        }
    }

    /// Whether any of its tensors are codes, on which the device tells a verdict.
    pub(crate) fn has_codes(&self) -> bool {
        self.unpacked.iter().any(Unpacked::is_code)
    }

    /// The number of bytes that travel for the part.
    pub(crate) fn copied(&self) -> u64 {
        let unpacked = self.unpacked.iter().map(|unpacked| &unpacked.slice);
        self.slices.iter().chain(unpacked).map(|slice| slice.range.len() as u64).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::super::Origin;
    use super::*;
    use crate::checkpoint::TensorInfo;
    use crate::device::DeviceId;
    use crate::dtype::DType;

    /// Slices are one where they are of one group and go on with each other both at home and in the slot.
    #[test]
    fn only_what_goes_on_at_both_ends_is_joined() {
        let names = ["layers.0.a", "layers.0.b", "layers.0.c", "layers.1.a", "layers.1.b"];
        let tensor = |(at, name): (usize, &&str)| {
            TensorInfo::new(format!("{name}.weight"), DType::U8, &[256], 0, at as u64 * 256).unwrap()
        };
        let layout = Layout::new(names.iter().enumerate().map(tensor).collect());
        let groups = Groups::new(&layout, |_| Some(Origin { device: DeviceId::CPU, staged: false, compressed: false }));
        let joined = |second: usize, at: usize| {
            let slice = |module, at| {
                let module = ModuleId::new(module);
                Slice { module, range: groups.place(module), at }
            };
            let mut part = Part { block: 0, lane: 0, bytes: 0, slices: Vec::new(), unpacked: Vec::new() };
            part.push(&groups, slice(0, 0));
            part.push(&groups, slice(second, at));
            part.slices.len() == 1
        };
        assert!(joined(1, 256));
        assert!(!joined(1, 512), "a gap in the slot");
        assert!(!joined(2, 256), "a gap at home");
        assert!(!joined(4, 256), "another layer's memory");
    }
}
