//! Weights that a file has in the form of DFloat11: [groups](crate::lossless::dfloat11) of them, each with a code.
//!
//! The tensors of a group `G` are `G.encoded_exponent`, `G.sign_mantissa`, `G.luts`, `G.gaps`, `G.output_positions` and
//! `G.split_positions`. Of which modules it has the weights is in `config.json`: the `pattern_dict` of `dfloat11_config` has for a
//! regular expression, of groups' whole names, the names of the modules in them, in order; where it has none, the group is itself
//! the module. A file for ComfyUI has no configuration, since its loader knows the network. All are linear modules or embeddings, so a weight has two dimensions. What these are is in no file; [`shapes`] says how
//! they are found out.

mod config;
mod group;
mod shapes;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, HashSet};
use std::sync::OnceLock;

use super::source::{Form, Span};
use crate::checkpoint::TensorInfo;
use crate::checkpoint::header::Header;
use crate::dtype::DType;
use crate::error::{CompressedFault, DFloat11Fault, Error, FileFault, Result};
use crate::transfer::Source;
use group::Place;

pub(in crate::checkpoint) use config::{Beside, DFloat11};
pub(super) use group::Stored;

/// A group in a file.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) name: String,
    /// The number of the file.
    file: usize,
    /// The tensors that it stands for, in order.
    weights: Vec<Weight>,
    pub(super) stored: Stored,
}

/// A weight of a group.
#[derive(Debug, PartialEq, Eq)]
struct Weight {
    name: String,
    shape: [u64; 2],
    /// The bytes in the file: its share of those of the group.
    bytes: u64,
}

impl Found {
    /// Adds the weights to a header, and what reads them to the spans, from offset `at` on. Returns where they end; `None` if that is
    /// beyond all offsets.
    pub(super) fn add_to(self, header: &mut Header, spans: &mut Vec<Span>, at: u64) -> Option<u64> {
        let (file, mut offset) = (self.file, at);
        for Weight { name, shape, bytes: stored } in self.weights {
            let bytes = 2 * shape[0] * shape[1];
            header.compressed.insert(name.clone(), stored);
            header.tensors.push(TensorInfo { name, dtype: DType::BF16, shape: shape.to_vec(), bytes, file, offset });
            offset = offset.checked_add(bytes)?;
        }
        spans.push(Span { begin: at, bytes: offset - at, at: 0, form: Form::Group(Box::new(self.stored)) });
        Some(offset)
    }
}

const EXPONENTS: &str = "encoded_exponent";
const TABLES: &str = "luts";
const SPLITS: &str = "split_positions";

/// Element types in which others have written positions, which are numbers of 32 bits.
const POSITIONS: [DType; 3] = [DType::U8, DType::U32, DType::I32];

/// The groups of a file. Their tensors are taken out of its header.
///
/// # Errors
/// [`FileFault::DFloat11`] with the group or the tensor that something is wrong with; [`FileFault::Compressed`] when the lengths of a
/// group's tensors do not fit each other; those of the configuration and of the source.
pub(super) fn groups(source: &dyn Source, header: &mut Header, beside: &Beside<'_>) -> Result<Vec<Found>> {
    if !header.tensors.iter().any(|info| group_of(info).is_some()) {
        return Ok(Vec::new());
    }
    let by_name: HashMap<&str, &TensorInfo> = header.tensors.iter().map(|info| (info.name.as_str(), info)).collect();
    let is_group = |name: &&str| by_name.contains_key(format!("{name}.{TABLES}").as_str());
    let names: Vec<&str> = header.tensors.iter().filter_map(group_of).filter(is_group).collect();
    if names.is_empty() {
        return Ok(Vec::new());
    }
    let config = beside.config()?;
    let (mut found, mut taken) = (Vec::with_capacity(names.len()), HashSet::new());
    for name in names {
        found.push(Finder { source, by_name: &by_name, name }.find(config, &mut taken)?);
    }
    header.tensors.retain(|info| !taken.contains(&info.name));
    Ok(found)
}

/// The group whose exponents a tensor has.
fn group_of(info: &TensorInfo) -> Option<&str> {
    info.name.strip_suffix(EXPONENTS)?.strip_suffix('.')
}

/// Looks for what belongs to a group.
struct Finder<'a> {
    source: &'a dyn Source,
    by_name: &'a HashMap<&'a str, &'a TensorInfo>,
    name: &'a str,
}

impl<'a> Finder<'a> {
    fn find(&self, config: &DFloat11, taken: &mut HashSet<String>) -> Result<Found> {
        let flat = |end| self.part(end, "U8 in one dimension", |info| is_flat(info, &[DType::U8]));
        let luts = self
            .part(TABLES, "U8 in rows of 256", |info| info.dtype == DType::U8 && matches!(info.shape[..], [_, 256]))?;
        let output_positions =
            self.part("output_positions", "U8, U32 or I32 in one dimension", |info| is_flat(info, &POSITIONS))?;
        let [exponents, rests, gaps] = [flat(EXPONENTS)?, flat("sign_mantissa")?, flat("gaps")?];
        // What has the weight of one module need not be split.
        let splits = match self.by_name.contains_key(self.tensor(SPLITS).as_str()) {
            true => Some(self.part(SPLITS, "I64 in one dimension", |info| is_flat(info, &[DType::I64]))?),
            false => None,
        };
        let modules = self.modules(config, splits.map_or(0, |info| info.shape[0]).saturating_add(1))?;
        let parts = [luts, output_positions, exponents, rests, gaps].into_iter().chain(splits);
        let bytes = parts.clone().map(|info| info.bytes).sum();
        taken.extend(parts.map(|info| info.name.clone()));
        let counts = self.counts(splits, rests.bytes)?;
        let weights = modules.iter().zip(&counts).map(|(module, &count)| {
            let name = format!("{module}.weight");
            let shape = config.dimensions.shape(module, count, self.bias(module));
            Ok(Weight { shape: shape.map_err(|fault| self.refuse(&name, fault))?, name, bytes: 0 })
        });
        let mut weights = weights.collect::<Result<Vec<_>>>()?;
        share(bytes, &counts, &mut weights);
        let place = |info: &TensorInfo| Place { at: info.offset, bytes: info.bytes };
        let stored = Stored {
            threads: config.threads,
            luts: place(luts),
            output_positions: place(output_positions),
            gaps: place(gaps),
            exponents: place(exponents),
            rests: place(rests),
            group: OnceLock::new(),
        };
        let fault = |fault| Error::file(self.source.path(), Some(self.name), CompressedFault::Code(fault).into());
        // So there are no more weights than 32 bits count.
        stored.check().map_err(fault)?;
        Ok(Found { name: self.name.to_owned(), file: rests.file, weights, stored })
    }

    /// The name of a tensor of the group.
    fn tensor(&self, end: &str) -> String {
        format!("{}.{end}", self.name)
    }

    fn part(&self, end: &str, expected: &'static str, fits: impl Fn(&TensorInfo) -> bool) -> Result<&'a TensorInfo> {
        let name = self.tensor(end);
        let Some(info) = self.by_name.get(name.as_str()) else {
            return Err(self.refuse(self.name, DFloat11Fault::NoPart { name }));
        };
        if !fits(info) {
            let (dtype, shape) = (info.dtype, info.shape.clone());
            return Err(self.refuse(&name, DFloat11Fault::OtherPart { expected, dtype, shape }));
        }
        Ok(info)
    }

    /// The modules of the group, which has the weights of `found`.
    fn modules(&self, config: &DFloat11, found: u64) -> Result<Vec<String>> {
        let refuse = |fault| Err(self.refuse(self.name, fault));
        match config.modules(self.name, found) {
            Some(modules) if modules.len() as u64 == found => Ok(modules),
            Some(modules) => refuse(DFloat11Fault::Modules { named: modules.len() as u64, found }),
            None if config.is_assumed => refuse(DFloat11Fault::NoConfig),
            None => refuse(DFloat11Fault::NoPattern),
        }
    }

    /// The weights of each module, by where all weights are split.
    fn counts(&self, splits: Option<&TensorInfo>, weights: u64) -> Result<Vec<u64>> {
        let mut bytes = vec![0; splits.map_or(0, |info| info.bytes as usize)];
        if let Some(splits) = splits {
            self.source.read_at(splits.offset, &mut bytes)?;
        }
        let positions = bytes.as_chunks().0.iter().map(|position| i64::from_le_bytes(*position));
        let (mut counts, mut least) = (Vec::with_capacity(positions.len() + 1), 0);
        for position in positions {
            match u64::try_from(position) {
                Ok(end) if (least..=weights).contains(&end) => {
                    counts.push(end - least);
                    least = end;
                }
                _ => return Err(self.refuse(self.name, DFloat11Fault::Splits { position, least, weights })),
            }
        }
        counts.push(weights - least);
        Ok(counts)
    }

    /// The elements of a module's bias.
    fn bias(&self, module: &str) -> Option<u64> {
        match self.by_name.get(format!("{module}.bias").as_str())?.shape[..] {
            [elements] => Some(elements),
            _ => None,
        }
    }

    fn refuse(&self, tensor: &str, fault: DFloat11Fault) -> Error {
        Error::file(self.source.path(), Some(tensor), FileFault::DFloat11(fault))
    }
}

fn is_flat(info: &TensorInfo, dtypes: &[DType]) -> bool {
    dtypes.contains(&info.dtype) && info.shape.len() == 1
}

/// Shares the bytes of a group out to its weights, by how many elements they have.
fn share(bytes: u64, counts: &[u64], weights: &mut [Weight]) {
    let all = counts.iter().map(|&count| u128::from(count)).sum::<u128>().max(1);
    let (mut elements, mut given) = (0, 0);
    for (count, weight) in counts.iter().zip(weights) {
        elements += u128::from(*count);
        let so_far = (u128::from(bytes) * elements / all) as u64;
        weight.bytes = so_far - given;
        given = so_far;
    }
}
