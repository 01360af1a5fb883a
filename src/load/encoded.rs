//! Homes of modules whose compressed form a load makes: those that no file has compressed, or that adapters change. How long their
//! codes are is known once they are made.
//!
//! Weights are read and compressed a piece at a time, by the worker that began with the group, by those that have nothing else to do,
//! and by as many threads again as there are workers, since half of them wait for the disk. The pieces' codes are kept until all of a
//! group's are there and it is known how long they are, and then written into its home.
//!
//! A worker that waits until it may begin gives up its place meanwhile, and then waits for a place. Nobody who has a place waits to
//! begin, so these waits end.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use super::Reservation;
use super::compressed::Placed;
use super::model::home_kind;
use super::store::Home;
use super::worker::{Block, Job, Tensors, lock};
use crate::backend::{Buf, BufMut, MemoryKind};
use crate::checkpoint::{ModuleId, Read, Stored, TensorId};
use crate::error::{CodeFault, Error, Result};
use crate::lossless::{Blocks, Encoder, Info, WholeCode};
use crate::schedule::Place;
use crate::threads::{self, Permit, Permits};

/// The most bytes of weights that are read and compressed as one piece.
const PIECE: usize = 4 << 20;

/// How a load holds the tensors of groups that it compressed, or tried to.
pub(super) type Encoded = BTreeMap<TensorId, Stored>;

/// What groups are compressed with.
pub(super) struct Encoding {
    /// Two groups at a time: one is written into its home while another is compressed.
    groups: Permits,
    /// Threads that help beside those in the workers' places.
    helpers: Permits,
    /// Memory to be used again: for weights that are in no file as they are, for those of pieces, and for their codes.
    changed: Mutex<Vec<BufMut>>,
    weights: Mutex<Vec<Vec<u8>>>,
    codes: Mutex<Vec<Vec<u8>>>,
    encoded: Mutex<Encoded>,
}

/// A tensor of a group, and its range in the group's weights.
struct Tensor {
    id: TensorId,
    range: Range<usize>,
    /// `None` if it has no code.
    encoder: Option<Encoder>,
}

/// Some bytes of a tensor, given by its number in the group.
struct Part {
    tensor: usize,
    range: Range<usize>,
}

/// Parts in the order of the tensors that are read and compressed together, and what was made of each: blocks, unless the tensor has no
/// code, and the range that has their bytes, or the weights.
#[derive(Default)]
struct Piece {
    parts: Vec<Part>,
    made: Vec<(Option<Blocks>, Range<usize>)>,
    bytes: Vec<u8>,
}

/// The parts of a tensor: their blocks, unless it has no code, and the bytes of these, or of the weights.
type Parts<'a> = Vec<(Option<&'a Blocks>, &'a [u8])>;

/// What there is of a tensor once all pieces are made.
enum Contents<'a> {
    Coded(WholeCode<'a>),
    Weights(Vec<&'a [u8]>),
}

impl Encoding {
    pub(super) fn new(workers: usize) -> Encoding {
        let (groups, helpers) = (Permits::new(2), Permits::new(workers));
        let (changed, weights, codes) = Default::default();
        Encoding { groups, helpers, changed, weights, codes, encoded: Mutex::default() }
    }

    pub(super) fn into_encoded(self) -> Encoded {
        self.encoded.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Job<'_> {
    /// Whether the compressed form of a group is made here: neither the files nor the base have all of it.
    pub(super) fn is_encoded(&self, group: usize) -> bool {
        let is_made = |tensor: TensorId| {
            self.weights().is_none() || self.layout.stored(tensor).is_some_and(|stored| stored.is_made)
        };
        let tensors = self.tensors_of(group, None);
        tensors.iter().any(|(tensor, _)| is_made(*tensor) && self.reuse.compressed_in_base(*tensor).is_none())
    }

    /// The home of a group whose compressed form is made here. If that saves nothing for one of its modules, all stay as they are.
    /// The caller gives up its place, `worker`, while it waits until it may begin.
    pub(super) fn encode<'p>(
        &'p self,
        group: usize,
        reservation: &Mutex<&mut Reservation>,
        worker: &mut Option<Permit<'p>>,
    ) -> Result<Arc<Home>> {
        let at_once = &self.encoding.groups;
        let _one = at_once.free().unwrap_or_else(|| {
            drop(worker.take());
            let one = at_once.wait();
            *worker = Some(self.places.wait());
            one
        });
        let groups = &self.reuse.groups;
        let assignment = self.plan.at(groups.members(group)[0]);
        let tensors = self.tensors_of(group, None).into_iter().map(|(id, range)| self.to_encode(id, range));
        let tensors = tensors.collect::<Result<Vec<_>>>()?;
        let pieces = self.make_pieces(&tensors, groups.bytes(group) as usize)?;
        let contents = contents(&tensors, &pieces);
        let stored = tensors.iter().zip(&contents).map(|(tensor, contents)| (tensor.id, contents.stored(tensor)));
        let stored: BTreeMap<TensorId, Stored> = stored.collect();
        let saves =
            |&module: &ModuleId| self.layout.bytes_stored(module, |tensor| stored.get(&tensor).copied()).is_some();
        let compresses = groups.members(group).iter().filter(|&&module| self.layout.at(module).bytes > 0).all(saves);
        let (places, bytes) = match compresses {
            true => Place::all(tensors.iter().map(|tensor| stored[&tensor.id])),
            false => (tensors.iter().map(Tensor::as_it_is).collect(), groups.bytes(group)),
        };
        let held = |(tensor, place): (&Tensor, &Place)| {
            (tensor.id, Stored { bytes: place.range.len() as u64, is_code: place.is_code, is_made: true })
        };
        lock(&self.encoding.encoded).extend(tensors.iter().zip(&places).map(held));
        let planned = groups.members(group).iter().map(|&module| self.plan.at(module).taken()).sum();
        let (device, charge) = lock(reservation).split_planned(assignment.device, planned, bytes)?;
        let kind = home_kind(assignment);
        let filled = self.filled(&device, charge, kind, |all| {
            let mut infos = Vec::new();
            for ((tensor, contents), place) in tensors.iter().zip(&contents).zip(&places) {
                self.check_cancelled()?;
                let info = contents.write(place.is_code, &mut all[place.range.clone()]);
                let info = info.map_err(|fault| self.unencodable(tensor.id, &fault))?;
                infos.extend(info.map(|info| (place.range.start, info)));
            }
            Ok(infos)
        })?;
        lock(&self.encoding.codes).extend(pieces.into_iter().map(|piece| piece.bytes));
        if !compresses {
            return Ok(Arc::new(Home::new(vec![filled.0], kind, false)));
        }
        let placed = tensors.into_iter().zip(places);
        let placed: Vec<Placed> = placed.map(|(of, place)| Placed { tensor: of.id, range: of.range, place }).collect();
        self.compressed_home(&device, &placed, filled, kind)
    }

    fn to_encode(&self, id: TensorId, range: Range<usize>) -> Result<Tensor> {
        let encoder = match Encoder::new(self.layout.at(id).dtype, range.len()) {
            Ok(encoder) => Some(encoder),
            Err(CodeFault::NoCode { .. } | CodeFault::TooLarge { .. }) => None,
            Err(fault) => return Err(self.unencodable(id, &fault)),
        };
        Ok(Tensor { id, range, encoder })
    }

    /// Compresses the tensors of a group, which has so many `bytes`, a piece at a time. Workers that have nothing to do help.
    fn make_pieces(&self, tensors: &[Tensor], bytes: usize) -> Result<Vec<Piece>> {
        let changed = self.make_changed(tensors, bytes)?;
        let weights = match &changed {
            Some(changed) => changed.host(self.loader.deadline)?.ok_or_else(not_addressed)?,
            None => &[],
        };
        let mut pieces = divided(tensors);
        threads::work_through(
            pieces.iter_mut().collect(),
            || self.places.free().or_else(|| self.encoding.helpers.free()),
            |piece: &mut Piece| -> Result<()> {
                self.check_cancelled()?;
                let mut buffer = lock(&self.encoding.weights).pop().unwrap_or_default();
                buffer.resize(PIECE, 0);
                self.read_piece(tensors, piece, weights, &mut buffer)?;
                piece.bytes = lock(&self.encoding.codes).pop().unwrap_or_default();
                piece.encode(tensors, &buffer);
                lock(&self.encoding.weights).push(buffer);
                Ok(())
            },
        )?;
        // Nobody else has it.
        lock(&self.encoding.changed).extend(changed.and_then(|changed| changed.try_reclaim().ok()));
        Ok(pieces)
    }

    /// Those weights of a group, which has so many `bytes`, that no file has as they are, in host memory at their places in the group;
    /// `None` if there are none.
    fn make_changed(&self, tensors: &[Tensor], bytes: usize) -> Result<Option<Buf>> {
        let changed = tensors.iter().filter(|tensor| !self.is_plain(tensor.id));
        let tensors: Tensors = changed.map(|tensor| (tensor.id, tensor.range.clone())).collect();
        if tensors.is_empty() {
            return Ok(None);
        }
        let used = lock(&self.encoding.changed).pop().filter(|memory| memory.bytes() >= bytes);
        let memory = match used {
            Some(memory) => memory,
            None => self.host.alloc_near(bytes, MemoryKind::Arena, self.plan.compute())?,
        };
        let filled = self.fill_host(vec![Block { tensors, memory }])?.into_iter().next();
        filled.map(Some).ok_or_else(|| Error::bug("a block of host memory that was not filled"))
    }

    /// Brings the weights of a piece together, from their files or from where changed ones are.
    fn read_piece(&self, tensors: &[Tensor], piece: &Piece, changed: &[u8], mut to: &mut [u8]) -> Result<()> {
        let mut from_files = BTreeMap::<usize, Vec<_>>::new();
        for Part { tensor, range } in &piece.parts {
            let tensor = &tensors[*tensor];
            let (part, rest) = std::mem::take(&mut to).split_at_mut(range.len());
            to = rest;
            if self.is_plain(tensor.id) {
                let checkpoint = self.files(tensor.id)?.checkpoint();
                let (file, part) = checkpoint.part_at(tensor.id, range.start as u64, part)?;
                from_files.entry(file).or_default().push(part);
            } else {
                part.copy_from_slice(&changed[tensor.range.start..][range.clone()]);
            }
        }
        for (file, mut parts) in from_files {
            let Some(weights) = self.weights() else { break };
            weights.checkpoint().read_parts(file, Read::Weights, &mut parts)?;
            parts.iter().for_each(|part| self.count_read(part.dst.len()));
        }
        Ok(())
    }

    fn unencodable(&self, tensor: TensorId, fault: &CodeFault) -> Error {
        Error::bug(format!("tensor `{}` cannot be compressed: {fault}", self.layout.at(tensor).name))
    }
}

impl Tensor {
    /// Its place among weights that stay as they are.
    fn as_it_is(&self) -> Place {
        Place { range: self.range.clone(), is_code: false }
    }
}

/// Tensors in pieces, which begin and end where blocks do.
fn divided(tensors: &[Tensor]) -> Vec<Piece> {
    let (mut pieces, mut room) = (Vec::<Piece>::new(), 0);
    for (tensor, Tensor { range, encoder, .. }) in tensors.iter().enumerate() {
        let block = encoder.as_ref().map_or(1, Encoder::block_bytes);
        let mut at = 0;
        while at < range.len() {
            let left = range.len() - at;
            if room < left.min(block) {
                pieces.push(Piece::default());
                room = PIECE;
            }
            let bytes = if left <= room { left } else { room - room % block };
            if let Some(piece) = pieces.last_mut() {
                piece.parts.push(Part { tensor, range: at..at + bytes });
            }
            (at, room) = (at + bytes, room - bytes);
        }
    }
    pieces
}

impl Piece {
    /// Compresses its weights, which are one after the other.
    fn encode(&mut self, tensors: &[Tensor], mut weights: &[u8]) {
        self.bytes.clear();
        for Part { tensor, range } in &self.parts {
            let (of_part, rest) = weights.split_at(range.len());
            weights = rest;
            let begin = self.bytes.len();
            let blocks = match &tensors[*tensor].encoder {
                Some(encoder) => {
                    self.bytes.reserve(encoder.capacity(of_part.len()));
                    Some(encoder.encode(range.start, of_part, &mut self.bytes))
                }
                None => {
                    self.bytes.extend_from_slice(of_part);
                    None
                }
            };
            self.made.push((blocks, begin..self.bytes.len()));
        }
    }
}

/// What the pieces of a group have of each tensor.
fn contents<'a>(tensors: &[Tensor], pieces: &'a [Piece]) -> Vec<Contents<'a>> {
    let mut of_tensors: Vec<Parts<'_>> = tensors.iter().map(|_| Vec::new()).collect();
    for Piece { parts, made, bytes } in pieces {
        for (part, (blocks, range)) in parts.iter().zip(made) {
            of_tensors[part.tensor].push((blocks.as_ref(), &bytes[range.clone()]));
        }
    }
    let contents = |(tensor, parts): (&Tensor, Parts<'a>)| match tensor.encoder {
        Some(encoder) => Contents::Coded(encoder.whole(parts.into_iter().filter_map(|(b, bytes)| Some((b?, bytes))))),
        None => Contents::Weights(parts.into_iter().map(|(_, bytes)| bytes).collect()),
    };
    tensors.iter().zip(of_tensors).map(contents).collect()
}

impl Contents<'_> {
    /// How the tensor is held if its group is compressed.
    fn stored(&self, tensor: &Tensor) -> Stored {
        let code = match self {
            Contents::Coded(whole) => whole.bytes(),
            Contents::Weights(_) => None,
        };
        Stored { bytes: code.unwrap_or(tensor.range.len()) as u64, is_code: code.is_some(), is_made: true }
    }

    /// Writes the code, and returns what its header says, or writes the weights.
    fn write(&self, as_code: bool, to: &mut [u8]) -> Result<Option<Info>, CodeFault> {
        match self {
            Contents::Coded(whole) if as_code => whole.write(to).map(Some),
            Contents::Coded(whole) => whole.write_weights(to).map(|()| None),
            Contents::Weights(parts) => {
                let mut at = 0;
                for part in parts {
                    to[at..at + part.len()].copy_from_slice(part);
                    at += part.len();
                }
                Ok(None)
            }
        }
    }
}

fn not_addressed() -> Error {
    Error::bug("host memory that the host cannot address")
}
