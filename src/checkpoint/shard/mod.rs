//! The part of a model that one rank has: some of the layers, and of some tensors a part.
//!
//! A part is a checkpoint whose sources read the rank's bytes of each tensor ([`CutSource`]), so whatever takes a checkpoint takes a part.
//! Adapters are resolved against the whole, since their names and shapes are those of the whole model; what they change is divided
//! afterwards.

mod cut;
mod network;
mod rules;
mod source;

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::Arc;

use super::quantised::{Format, Packed, Siblings};
use super::{Alike, Checkpoint, Inner, Layout, ModuleId, Pattern, Per, TensorId, TensorInfo, by_name, stored_in};
use crate::error::{Error, Packing, Result, ShardFault};
use crate::transfer::Source;
pub(crate) use cut::{Cut, Stretches};
pub(super) use network::Network;
pub use rules::ShardRules;
use rules::{How, Rule};
use source::{CutSource, Span};

/// One of several workers that share a model. It prints, and is read, as `1/4`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(clippy::exhaustive_structs, reason = "a number among so many, and nothing else")]
pub struct Rank {
    /// The number of the worker, from 0.
    pub rank: u32,
    /// The number of workers.
    pub of: u32,
}

/// What a checkpoint that is a part is a part of.
#[derive(Clone, Debug)]
pub(crate) struct Part {
    whole: Checkpoint,
    divided: Divided,
    /// For each tensor of the part, the whole tensor and what is kept of it; `None` if all is.
    tensors: Vec<(TensorId, Option<Cut>)>,
}

/// Files as a part reads them, and its tensors there.
type Files = (Vec<Arc<dyn Source>>, Vec<TensorInfo>);

/// How a whole was divided.
#[derive(Clone, Debug, Default)]
struct Divided {
    ranks: Option<(Arc<ShardRules>, Rank)>,
    stage: Option<Stage>,
}

/// Some layers that follow each other.
#[derive(Clone, Debug)]
struct Stage {
    layers: Range<usize>,
    /// The layers that there were.
    of: usize,
}

impl Rank {
    fn checked(self) -> Result<Rank> {
        let Rank { rank, of } = self;
        if rank < of { Ok(self) } else { Err(Error::shard(None, ShardFault::Rank { rank, of })) }
    }
}

impl Checkpoint {
    /// The part of this model that `rank` has by `rules`: a checkpoint with the same modules and layers, in which tensors that are divided
    /// have their smaller shapes. It is planned, patched, loaded, streamed and cached as any other. Only its own part of a tensor is
    /// read: rows are ranges of the file, and columns are read with what is between them where that takes less time than
    /// asking for each.
    ///
    /// Adapters are merged into a part as into the whole ([`Weights::patched`](crate::Weights::patched)): their names and shapes are those of
    /// the whole model, and the bytes those of the merged whole, divided. A product of two factors is divided as the weight: of `up`
    /// the rows, of `down` the columns. Other changes take what they need of the whole weight on the host: whole rows for their
    /// norms, or all of it.
    ///
    /// Codes of [compressed files](super::write_compressed) are decompressed while they are read, and their tensors are planned as
    /// those of any file.
    ///
    /// ```
    /// use tensor_offload::checkpoint::{Rank, ShardRules};
    /// use tensor_offload::{Adapter, Checkpoint, Matching, Weights};
    /// let model = Checkpoint::open("examples/data/tiny-llama")?;
    /// let part = model.shard(&ShardRules::megatron(), Rank { rank: 0, of: 2 })?;
    /// assert!(part.layout().bytes() < model.layout().bytes() * 6 / 10);
    /// let adapter = Adapter::open("examples/data/tiny-llama-lora", 0.5)?;
    /// let weights = Weights::patched(part, vec![adapter], Matching::Strict)?;
    /// # assert!(weights.patches().iter().count() > 0);
    /// # Ok::<(), tensor_offload::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Shard`] with a [`ShardFault`] and the tensor: one that cannot be divided equally, or only within blocks of quantised values;
    /// one that is packed into codes in a way that is not divided (GPTQ, AWQ, bitsandbytes' four bits, and others); a rule that needs
    /// the number of heads, which is not known; rules that divide nothing; a rank that there is not; a checkpoint that is one
    /// rank's already.
    pub fn shard(&self, rules: &ShardRules, rank: Rank) -> Result<Checkpoint> {
        rank.checked()?;
        if let Some(&(_, Rank { rank, of })) = self.part().and_then(|part| part.divided.ranks.as_ref()) {
            return Err(Error::shard(None, ShardFault::Divided { rank, of }));
        }
        let ranks = Some((Arc::new(rules.clone()), rank));
        self.divided(|divided| Divided { ranks, ..divided })
    }

    /// The part of this model with some of its layers, given by their numbers in the order of execution: a stage of a pipeline.
    /// [`Layout::stages`] divides all of them. The stage with the last layer has the embedding too if the head uses its weights.
    ///
    /// Adapters are resolved against the whole model, as those of a [shard](Checkpoint::shard); a stage may be one of a shard, too.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a range that is empty or exceeds the layers, and for a checkpoint that is a stage already.
    pub fn stage(&self, layers: Range<usize>) -> Result<Checkpoint> {
        let of = self.layout().layers().len();
        if layers.is_empty() || layers.end > of {
            return Err(Error::invalid(format!("layers {layers:?} of {of} are no stage")));
        }
        if self.part().is_some_and(|part| part.divided.stage.is_some()) {
            return Err(Error::invalid("the checkpoint is a stage already; make another of the whole"));
        }
        self.divided(|divided| Divided { stage: Some(Stage { layers, of }), ..divided })
    }

    fn divided(&self, divide: impl FnOnce(Divided) -> Divided) -> Result<Checkpoint> {
        let (whole, so_far) = match self.part() {
            Some(part) => (&part.whole, part.divided.clone()),
            None => (self, Divided::default()),
        };
        divide(so_far).of(whole)
    }

    /// What it is a part of, if it is one.
    pub(crate) fn part(&self) -> Option<&Part> {
        self.0.part.as_deref()
    }

    /// What the configuration or the metadata say of the network.
    fn network(&self) -> Network {
        self.gguf().map_or_else(|| self.0.network.clone(), |gguf| Network::of_gguf(&gguf))
    }
}

impl Layout {
    /// The layers in `count` stages that follow each other, of as few bytes as the largest of them can have: ranges for
    /// [`Checkpoint::stage`]. Each has a layer at least.
    ///
    /// ```
    /// use tensor_offload::checkpoint::Layout;
    /// assert_eq!(Layout::blocks([4, 1, 1, 1, 5]).stages(3)?, [0..2, 2..4, 4..5]);
    /// # Ok::<(), tensor_offload::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Invalid`] for no stages, and for more than layers.
    pub fn stages(&self, count: usize) -> Result<Vec<Range<usize>>> {
        let sizes: Vec<u64> = self.layers().iter().map(|layer| layer.bytes).collect();
        if count == 0 || count > sizes.len() {
            let layers = sizes.len();
            return Err(Error::invalid(format!("{layers} layers cannot be divided into {count} stages")));
        }
        // The least limit that as many stages keep.
        let stages = |limit: u64| {
            let (mut stages, mut begin, mut bytes) = (Vec::new(), 0, 0u64);
            for (layer, size) in sizes.iter().enumerate() {
                // The last ones need a layer each.
                let needed = stages.len() + 1 < count && sizes.len() - layer == count - stages.len() - 1;
                if layer > begin && (needed || bytes.saturating_add(*size) > limit) {
                    stages.push(begin..layer);
                    (begin, bytes) = (layer, 0);
                }
                bytes = bytes.saturating_add(*size);
            }
            stages.push(begin..sizes.len());
            stages
        };
        let (mut low, mut high) = (sizes.iter().copied().max().unwrap_or(0), self.bytes());
        while low < high {
            let middle = low + (high - low) / 2;
            if stages(middle).len() <= count { high = middle } else { low = middle + 1 }
        }
        Ok(stages(high.max(low)))
    }
}

impl Part {
    /// The whole.
    pub(crate) fn whole(&self) -> &Checkpoint {
        &self.whole
    }

    /// For each tensor of the part, the whole tensor and what is kept of it; `None` if all is.
    pub(crate) fn tensors(&self) -> &[(TensorId, Option<Cut>)] {
        &self.tensors
    }

    /// What is kept of tensors of the whole that have other shapes, as its layout says.
    pub(crate) fn cuts_of(&self, layout: &Layout) -> Result<Per<TensorId, Option<Cut>>> {
        self.divided.cuts(&self.whole, layout)
    }

    /// The same part of another whole, which has the same tensors and perhaps others after them.
    pub(crate) fn of_other(&self, whole: &Checkpoint) -> Result<Checkpoint> {
        self.divided.clone().of(whole)
    }
}

impl Divided {
    /// The part of a whole.
    fn of(self, whole: &Checkpoint) -> Result<Checkpoint> {
        let (inner, layout) = (&*whole.0, whole.layout());
        let mut cuts = self.cuts(whole, layout)?;
        let mut tensors: Vec<(TensorId, Option<Cut>)> = Vec::new();
        for tensor in layout.tensor_ids().filter(|&tensor| self.has(layout, tensor)) {
            tensors.push((tensor, cuts[tensor].take()));
        }
        let (sources, infos) = self.read(inner, layout, &tensors)?;
        let layout = layout.part(infos)?;
        // Codes of tensors that are kept whole are as they were only if the file is.
        let kept = inner.sources.iter().zip(&sources).map(|(old, new)| Arc::ptr_eq(old, new));
        let stored: Vec<_> = kept.zip(&inner.stored).map(|(same, stored)| stored.clone().filter(|_| same)).collect();
        let files: Vec<bool> = sources.iter().map(|source| source.may_stay()).collect();
        let layout = layout.read_from(&files).stored_as(|info| stored_in(&stored, info));
        let by_name = by_name(&layout);
        let is_code = |name: &String| by_name.get(name).is_some_and(|&tensor| stored[layout.at(tensor).file].is_some());
        let compressed = inner.compressed.iter().filter(|(name, _)| is_code(name));
        let compressed = compressed.map(|(name, bytes)| (name.clone(), *bytes)).collect();
        let part = Some(Arc::new(Part { whole: whole.clone(), divided: self, tensors }));
        Ok(Checkpoint(Arc::new(Inner { sources, layout, by_name, compressed, stored, part, ..inner.clone() })))
    }

    /// Whether the part has any of a tensor: one of the stage's layers, or of those that they use.
    fn has(&self, layout: &Layout, tensor: TensorId) -> bool {
        let Some(Stage { layers, of }) = &self.stage else { return true };
        let layer = layout.layer_with(tensor).index();
        let is_last = layers.end == *of;
        // A head that was made a tensor of its own comes after all layers.
        let is_in = layers.contains(&layer) || (is_last && layer >= *of);
        is_in || (is_last && layout.module_of(tensor).is_some_and(|module| layout.at(module).tied))
    }

    /// The files as the part reads them, and its tensors there.
    fn read(&self, inner: &Inner, layout: &Layout, tensors: &[(TensorId, Option<Cut>)]) -> Result<Files> {
        let mut spans: Vec<Vec<Span>> = inner.sources.iter().map(|_| Vec::new()).collect();
        // Tensors of the same bytes that are divided alike still share them.
        let mut places: HashMap<(usize, u64, u64, &Cut), u64> = HashMap::new();
        let mut infos = Vec::with_capacity(tensors.len());
        for (tensor, cut) in tensors {
            let info = layout.at(*tensor);
            let Some(cut) = cut else {
                infos.push(info.clone());
                continue;
            };
            let stretches = self.stretches(info, cut)?;
            let shape = cut.shape(&info.shape);
            let spans = &mut spans[info.file];
            let end = spans.last().map_or(inner.sources[info.file].stamp().len(), |last| last.begin + last.bytes);
            let mut part = TensorInfo::new(info.name.clone(), info.dtype, &shape, info.file, end)?;
            let begin = *places.entry((info.file, info.offset, info.bytes, cut)).or_insert(end);
            part.offset = begin;
            if begin == end && part.bytes > 0 {
                spans.push(Span { begin, bytes: part.bytes, at: info.offset, stretches });
            }
            infos.push(part);
        }
        let sources = inner.sources.iter().zip(spans).map(|(file, spans)| match spans.last() {
            None => Arc::clone(file),
            Some(last) => {
                let len = last.begin + last.bytes;
                Arc::new(CutSource::new(Arc::clone(file), spans, len)) as Arc<dyn Source>
            }
        });
        Ok((sources.collect(), infos))
    }

    fn stretches(&self, info: &TensorInfo, cut: &Cut) -> Result<Stretches> {
        cut.stretches(&info.shape, info.dtype).ok_or_else(|| {
            let of = self.ranks.as_ref().map_or(1, |(_, rank)| rank.of);
            let (dimension, shape, dtype, block) =
                (cut.dimension(), info.shape.clone(), info.dtype, info.dtype.block().elements);
            Error::shard(Some(&info.name), ShardFault::Blocks { dimension, shape, dtype, block, of })
        })
    }

    /// What is kept of each tensor of a layout of the whole's tensors; `None` for all of it.
    ///
    /// # Errors
    /// As [`Checkpoint::shard`].
    fn cuts(&self, whole: &Checkpoint, layout: &Layout) -> Result<Per<TensorId, Option<Cut>>> {
        let mut cuts = Per::all(layout.tensors().len(), None);
        let Some((rules, rank)) = &self.ranks else { return Ok(cuts) };
        let network = rules.known(whole.network());
        let rules: Vec<&Rule> = rules.of(&network).collect();
        let mut of_tensors: Per<TensorId, Option<usize>> = Per::all(layout.tensors().len(), None);
        let alike = Alike::new(layout);
        for (number, rule) in rules.iter().enumerate() {
            let patterns = rule.patterns.iter().map(|text| Pattern::new(text.clone(), layout));
            for tensor in patterns.flat_map(|pattern| alike.tensors(&pattern, layout)) {
                of_tensors[tensor] = Some(number);
            }
        }
        // Tensors that one rule names in one module are divided as the largest of them.
        let mut together: BTreeMap<(ModuleId, usize), Vec<TensorId>> = BTreeMap::new();
        for tensor in layout.tensor_ids().filter(|&tensor| layout.factors_with(tensor).is_none()) {
            let Some(rule) = of_tensors[tensor].filter(|&rule| rules[rule].how != How::Whole) else { continue };
            if let Some(module) = layout.module_of(tensor) {
                together.entry((module, rule)).or_default().push(tensor);
            }
        }
        if together.is_empty() {
            return Err(Error::shard(None, ShardFault::NothingDivided));
        }
        if rank.of == 1 {
            return Ok(cuts);
        }
        let siblings = Siblings::of_checkpoint(whole);
        for ((_, rule), tensors) in together {
            let How::Divided { dimension, division } = &rules[rule].how else { continue };
            let elements = |tensor: &TensorId| layout.at(*tensor).shape.iter().product::<u64>();
            let Some(&lead) = tensors.iter().max_by_key(|tensor| (elements(tensor), std::cmp::Reverse(**tensor)))
            else {
                continue;
            };
            let info = layout.at(lead);
            let fault = |tensor: &TensorInfo, fault| Error::shard(Some(&tensor.name), fault);
            // A vector is not divided by columns, nor a matrix by its third dimension.
            if info.shape.len() <= *dimension {
                continue;
            }
            if let Some(packing) = undivided(info, &siblings) {
                return Err(fault(info, ShardFault::Packed { packing }));
            }
            let cut = division.cut(*dimension, &info.shape, *rank, &network).map_err(|why| fault(info, why))?;
            let others =
                Others { lead: info, cut: &cut, block: whole.stated().block, in_tiles: has_tiles(info, &siblings) };
            for tensor in tensors {
                let own = layout.at(tensor);
                cuts[tensor] = match tensor == lead {
                    true => Some(cut.clone()),
                    false => {
                        let is_of_codes = siblings.beside(info).iter().any(|sibling| sibling.id == tensor);
                        others.cut(own, is_of_codes).map_err(|why| fault(own, why))?
                    }
                };
            }
        }
        Ok(cuts)
    }
}

/// How a weight is packed, if it is in a way that is not divided: where its dimensions are not those of its values.
fn undivided(weight: &TensorInfo, siblings: &Siblings<'_>) -> Option<Packing> {
    let packing = Packed::of(weight, siblings)?.packing;
    // These have a row of codes for each row of values.
    let by_rows = matches!(packing, Packing::Mxfp4 | Packing::Int8 | Packing::BitsAndBytesInt8);
    (!by_rows).then_some(packing)
}

/// Whether the scales of a weight may be stored in tiles of several rows, as ComfyUI stores those of MXFP8.
fn has_tiles(weight: &TensorInfo, siblings: &Siblings<'_>) -> bool {
    // What a note says that cannot be read, nobody knows.
    siblings.note(weight).map_or(true, |note| note.is_some_and(|note| note.format == Format::Mxfp8))
}

/// The tensors beside a weight.
struct Others<'a> {
    lead: &'a TensorInfo,
    /// What is kept of the weight.
    cut: &'a Cut,
    /// What the configuration says of the sides of blocks.
    block: Option<[u64; 2]>,
    in_tiles: bool,
}

impl Others<'_> {
    /// What is kept of one of them. `is_of_codes` tells whether it says something of the weight's values.
    fn cut(&self, own: &TensorInfo, is_of_codes: bool) -> Result<Option<Cut>, ShardFault> {
        let dimension = self.cut.dimension();
        let of_weight = self.lead.shape[dimension];
        let Some(&len) = own.shape.get(dimension) else { return Ok(None) };
        let misfit = || {
            let (weight, of_weight) = (self.lead.name.clone(), self.lead.shape.clone());
            ShardFault::Beside { shape: own.shape.clone(), weight, of_weight }
        };
        if self.in_tiles && is_of_codes && own.shape.len() > 1 {
            return Err(misfit());
        }
        if len == of_weight {
            return Ok(Some(self.cut.clone()));
        }
        // One number for all, or a vector that says nothing of the weight's values.
        if len == 1 || (own.shape.len() == 1 && !is_of_codes) {
            return Ok(None);
        }
        // Blocks of as many indices as are stated, or of 128, or all alike.
        let stated = self.block.and_then(|sides| sides.get(dimension).copied());
        let fits = |side: &u64| *side > 0 && of_weight.div_ceil(*side) == len;
        let even = (len > 0 && of_weight.is_multiple_of(len)).then(|| of_weight / len);
        let side = stated.filter(fits).or(Some(128).filter(fits)).or(even).ok_or_else(misfit)?;
        let scaled = |range: &Range<u64>| {
            let whole = range.start.is_multiple_of(side) && (range.end.is_multiple_of(side) || range.end == of_weight);
            whole.then(|| range.start / side..range.end.div_ceil(side)).ok_or_else(misfit)
        };
        let ranges = self.cut.ranges().iter().map(scaled).collect::<Result<_, _>>()?;
        Ok(Some(Cut { dimension, ranges }))
    }
}
