//! The blocks of a slot: the allocations into which the tensors of a streamed layer are divided.

use std::collections::BTreeMap;

use crate::checkpoint::{Layout, ModuleId, TensorId};
use crate::dtype::{DType, TensorGrouping};

/// A block of a slot: its element type, and its number among the blocks of that type. `None` if types are mixed.
pub(crate) type BlockKey = (Option<DType>, usize);

/// The block of slots that are not divided.
const WHOLE: BlockKey = (None, 0);

/// The memory that one layer takes in each block of a slot, in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct LayerBlocks(BTreeMap<BlockKey, u64>);

impl LayerBlocks {
    /// The blocks for the tensors of these modules, all those of a layer that are streamed.
    pub(crate) fn of(layout: &Layout, grouping: TensorGrouping, modules: &[ModuleId]) -> LayerBlocks {
        if !grouping.is_apart() {
            let bytes = modules.iter().map(|&module| Layout::slot_bytes(layout.at(module).bytes));
            return LayerBlocks::whole(bytes.fold(0, u64::saturating_add));
        }
        let mut blocks = LayerBlocks::default();
        for Position { tensor, block } in positions(layout, grouping, modules) {
            let block = blocks.0.entry(block).or_default();
            *block = block.saturating_add(room(grouping, layout.at(tensor).bytes));
        }
        blocks
    }

    /// One block of mixed types.
    pub(crate) fn whole(bytes: u64) -> LayerBlocks {
        LayerBlocks(BTreeMap::from([(WHOLE, bytes)]))
    }

    /// The bytes of all blocks.
    pub(crate) fn bytes(&self) -> u64 {
        self.0.values().copied().fold(0, u64::saturating_add)
    }

    /// Grows the blocks until they hold `other`, too.
    pub(crate) fn grow(&mut self, other: &LayerBlocks) {
        for (&key, &bytes) in &other.0 {
            let block = self.0.entry(key).or_default();
            *block = bytes.max(*block);
        }
    }

    /// The smallest blocks that hold any of these layers.
    pub(crate) fn for_any<'a>(layers: impl IntoIterator<Item = &'a LayerBlocks>) -> LayerBlocks {
        let mut blocks = LayerBlocks::default();
        layers.into_iter().for_each(|layer| blocks.grow(layer));
        blocks
    }
}

/// The bytes that a tensor of `bytes` takes in a block of a divided slot.
fn room(grouping: TensorGrouping, bytes: u64) -> u64 {
    match grouping {
        TensorGrouping::PerType => Layout::slot_bytes(bytes),
        _ => bytes,
    }
}

/// The block of a divided slot that a tensor goes into, after those that come before it there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Position {
    pub(super) tensor: TensorId,
    pub(super) block: BlockKey,
}

/// The positions of the tensors that these modules own in a divided slot, in order. Tensors without bytes have none.
pub(super) fn positions(layout: &Layout, grouping: TensorGrouping, modules: &[ModuleId]) -> Vec<Position> {
    let own = modules.iter().flat_map(|&module| layout.own_tensors(module));
    let mut tensors: Vec<TensorId> = own.filter(|&tensor| layout.at(tensor).bytes > 0).collect();
    if grouping == TensorGrouping::PerTensor {
        // The sort is stable, so layers of a class have their tensors in the same blocks.
        tensors.sort_by_key(|&tensor| std::cmp::Reverse(layout.at(tensor).bytes));
    }
    let mut next: BTreeMap<DType, usize> = BTreeMap::new();
    let position = |tensor: TensorId| {
        let dtype = layout.at(tensor).dtype;
        let number = next.entry(dtype).or_default();
        let block = (Some(dtype), *number);
        *number += usize::from(grouping == TensorGrouping::PerTensor);
        Position { tensor, block }
    };
    tensors.into_iter().map(position).collect()
}

/// The blocks of all slots of a plan. The blocks of a slot are numbered alike in all slots, so an ordinary slot may lack some
/// that only large layers need.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SlotBlocks {
    grouping: TensorGrouping,
    keys: Vec<BlockKey>,
    /// The bytes of each block of an ordinary slot, and of a large one.
    sizes: [Vec<u64>; 2],
    /// The most bytes of a layer that goes into ordinary slots.
    most: u64,
}

impl SlotBlocks {
    /// Slots that are not divided, of these sizes.
    pub(crate) fn whole(bytes: u64, large_bytes: u64) -> SlotBlocks {
        let sizes = [vec![bytes], vec![large_bytes]];
        SlotBlocks { grouping: TensorGrouping::Joined, keys: vec![WHOLE], sizes, most: bytes }
    }

    /// Divided slots for these streamed layers, the ordinary ones for layers of at most `most` bytes.
    pub(crate) fn divided(grouping: TensorGrouping, layers: &[LayerBlocks], most: u64) -> SlotBlocks {
        let all = LayerBlocks::for_any(layers);
        let ordinary = LayerBlocks::for_any(layers.iter().filter(|layer| layer.bytes() <= most));
        let keys: Vec<BlockKey> = all.0.keys().copied().collect();
        let sizes = [&ordinary, &all].map(|blocks| {
            let bytes = |key| blocks.0.get(key).copied().unwrap_or(0);
            keys.iter().map(bytes).collect()
        });
        SlotBlocks { grouping, keys, sizes, most }
    }

    /// How slots are divided.
    pub(crate) fn grouping(&self) -> TensorGrouping {
        self.grouping
    }

    /// The bytes that a tensor of `bytes` takes in a block of a divided slot.
    pub(super) fn room(&self, bytes: u64) -> u64 {
        room(self.grouping, bytes)
    }

    /// The number of a block.
    pub(super) fn number(&self, block: BlockKey) -> Option<usize> {
        self.keys.binary_search(&block).ok()
    }

    /// The element type and size in bytes of each block of an ordinary or a large slot.
    pub(crate) fn of_slot(&self, large: bool) -> impl Iterator<Item = (Option<DType>, u64)> {
        let types = self.keys.iter().map(|&(dtype, _)| dtype);
        types.zip(self.sizes[usize::from(large)].iter().copied())
    }

    /// The bytes of the smallest kind of slot that holds a layer.
    pub(super) fn bytes_for(&self, layer: &LayerBlocks) -> u64 {
        let large = usize::from(layer.bytes() > self.most);
        self.sizes[large].iter().copied().fold(0, u64::saturating_add)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::TensorInfo;

    fn layout(tensors: &[(&str, DType, &[u64])]) -> Layout {
        let mut at = 0;
        let tensor = |&(name, dtype, shape): &(&str, DType, &[u64])| {
            let tensor = TensorInfo::new(name, dtype, shape, 0, at).unwrap();
            at += tensor.bytes;
            tensor
        };
        Layout::new(tensors.iter().map(tensor).collect())
    }

    fn blocks_of(layout: &Layout, grouping: TensorGrouping) -> Vec<LayerBlocks> {
        layout.layers().iter().map(|layer| LayerBlocks::of(layout, grouping, &layer.modules)).collect()
    }

    const TENSORS: [(&str, DType, &[u64]); 6] = [
        ("layers.0.norm.weight", DType::F32, &[8]),
        ("layers.0.up.weight", DType::F16, &[32, 8]),
        ("layers.0.up.bias", DType::F16, &[32]),
        ("layers.1.norm.weight", DType::F32, &[16]),
        ("layers.1.up.weight", DType::F16, &[8, 8]),
        ("layers.1.down.weight", DType::F16, &[4, 4]),
    ];

    #[test]
    fn a_slot_holds_the_largest_of_each_rank_of_each_type() {
        let layout = layout(&TENSORS);
        let layers = blocks_of(&layout, TensorGrouping::PerTensor);
        assert_eq!(layers.iter().map(LayerBlocks::bytes).collect::<Vec<_>>(), [32 + 512 + 64, 64 + 128 + 32]);
        let slots = SlotBlocks::divided(TensorGrouping::PerTensor, &layers, u64::MAX);
        let (f16, f32) = (Some(DType::F16), Some(DType::F32));
        let mut blocks: Vec<_> = slots.of_slot(false).collect();
        blocks.sort_by_key(|&(dtype, bytes)| (dtype != f16, std::cmp::Reverse(bytes)));
        assert_eq!(blocks, [(f16, 512), (f16, 64), (f32, 64)]);
        assert_eq!([slots.bytes_for(&layers[0]), slots.bytes_for(&layers[1])], [640, 640]);
    }

    #[test]
    fn ordinary_slots_lack_what_only_large_layers_need() {
        let layout = layout(&TENSORS);
        let layers = blocks_of(&layout, TensorGrouping::PerTensor);
        let slots = SlotBlocks::divided(TensorGrouping::PerTensor, &layers, layers[1].bytes());
        let sizes = |large| slots.of_slot(large).map(|(_, bytes)| bytes).collect::<Vec<_>>();
        assert_eq!(sizes(true).iter().sum::<u64>(), 640);
        assert_eq!(sizes(false).iter().sum::<u64>(), 224);
        assert_eq!(sizes(true).len(), sizes(false).len());
        assert_eq!([slots.bytes_for(&layers[0]), slots.bytes_for(&layers[1])], [640, 224]);
    }

    #[test]
    fn types_have_a_block_each_with_room_for_aligned_tensors() {
        let layout = layout(&TENSORS);
        let layers = blocks_of(&layout, TensorGrouping::PerType);
        assert_eq!(layers.iter().map(LayerBlocks::bytes).collect::<Vec<_>>(), [256 + 512 + 256, 256 + 256 + 256]);
        let slots = SlotBlocks::divided(TensorGrouping::PerType, &layers, u64::MAX);
        let mut blocks: Vec<_> = slots.of_slot(false).collect();
        blocks.sort_by_key(|&(_, bytes)| bytes);
        assert_eq!(blocks, [(Some(DType::F32), 256), (Some(DType::F16), 768)]);
    }

    #[test]
    fn an_undivided_slot_is_one_block_of_padded_modules() {
        let layout = layout(&TENSORS);
        let layers = blocks_of(&layout, TensorGrouping::Joined);
        assert_eq!(layers[0], LayerBlocks::whole(256 + 768));
        assert_eq!(LayerBlocks::for_any(&layers).bytes(), 1024);
    }
}
