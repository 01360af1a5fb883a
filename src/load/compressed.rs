//! Homes of compressed modules: the stored form of their tensors, in host memory or where a file has it. Lanes copy that; all else
//! reads the weights that it stands for, from memory that is only read.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::Reservation;
use super::in_files::{Files, Unspecified};
use super::model::home_kind;
use super::read_back::ReadBack;
use super::store::Home;
use super::worker::{Job, Tensors, lock};
use crate::backend::{Buf, Charge, Device, Extent, Extents, MemoryKind, Readable};
use crate::checkpoint::{CompressedSource, Layout, Read, Stored, TensorId};
use crate::error::{CompressedFault, Error, Result};
use crate::lossless::{BLOCK_WEIGHTS, Code, CodeFault, Info, TOGETHER};
use crate::plan::Assignment;
use crate::schedule::{Compressed, Groups, Place};
use crate::threads;
use crate::transfer::{ReadPart, Source, Stamp};

/// The weights of a code that a thread checks before it takes others, and that it decodes at a time, which its cache holds.
const CHECKED: u64 = 256 * BLOCK_WEIGHTS as u64;
const STEP: u64 = (TOGETHER * BLOCK_WEIGHTS) as u64;

/// The compressed form of a home.
#[derive(Clone, Debug)]
pub(super) struct CompressedForm {
    pub(super) buf: Buf,
    /// What the header of each code says, by the byte at which it begins. Empty in a model without contents.
    infos: Arc<Vec<(usize, Info)>>,
    /// The device that reads it back, if the host cannot.
    away: Option<Away>,
}

/// A device whose memory the host reads by copies.
#[derive(Clone, Debug)]
struct Away {
    device: Arc<dyn Device>,
    read_back: Arc<ReadBack>,
}

/// Memory as a source: the compressed form of a home.
#[derive(Debug)]
struct Held {
    buf: Buf,
    away: Option<Away>,
    /// The file of its weights.
    path: PathBuf,
    stamp: Stamp,
}

/// The weights of a compressed form.
struct Decoded(CompressedSource);

impl Source for Held {
    fn path(&self) -> &Path {
        &self.path
    }

    fn stamp(&self) -> Stamp {
        self.stamp
    }

    fn read_at(&self, at: u64, dst: &mut [u8]) -> Result<()> {
        read(&self.buf, self.away.as_ref(), at as usize, dst, Duration::ZERO)
    }
}

/// Reads bytes of a compressed form from byte `at` on.
fn read(buf: &Buf, away: Option<&Away>, at: usize, dst: &mut [u8], deadline: Duration) -> Result<()> {
    let range = at..at + dst.len();
    if let Some(Away { device, read_back }) = away {
        return read_back.gather(device, buf, &[range], dst);
    }
    match buf.read_into(range, dst, deadline)? {
        true => Ok(()),
        false => Err(Error::bug("compressed weights that the host cannot read")),
    }
}

impl Readable for Decoded {
    fn read_parts(&self, parts: &mut [ReadPart<'_>]) -> Result<()> {
        self.0.read_parts(parts)
    }
}

impl CompressedForm {
    /// What the header of the code that begins at a byte says.
    pub(super) fn info(&self, begin: usize) -> Option<Info> {
        let found = self.infos.binary_search_by_key(&begin, |(at, _)| *at).ok()?;
        Some(self.infos[found].1)
    }

    /// Reads its bytes from byte `at` on.
    ///
    /// # Errors
    /// Any error of the copy, which may take as long as `deadline`.
    fn read(&self, at: usize, dst: &mut [u8], deadline: Duration) -> Result<()> {
        read(&self.buf, self.away.as_ref(), at, dst, deadline)
    }
}

/// A tensor of a compressed group: its range in the weights' form of the group, and its place in the stored one.
#[derive(Clone)]
pub(super) struct Placed {
    pub(super) tensor: TensorId,
    pub(super) range: Range<usize>,
    pub(super) place: Place,
}

impl Placed {
    /// The tensors of a compressed group, in order.
    fn all(compressed: &Compressed, mut tensors: Tensors) -> Vec<Placed> {
        tensors.sort_unstable_by_key(|(_, range)| (range.start, range.end));
        let placed = |(tensor, range)| compressed.place(tensor).cloned().map(|place| Placed { tensor, range, place });
        tensors.into_iter().filter_map(placed).collect()
    }
}

/// Memory of `device`, which the host reads, with the weights of a group.
fn decoded(device: &dyn Device, layout: &Layout, tensors: &[Placed], stored: Held) -> Result<Buf> {
    let bytes = tensors.iter().map(|placed| placed.range.len()).sum();
    let tensor = |Placed { tensor, range, place }: &Placed| {
        let (at, bytes) = (place.range.start as u64, place.range.len() as u64);
        (layout.at(*tensor).dtype, range.len() as u64, at, Stored { bytes, is_code: place.is_code, is_made: false })
    };
    let source = CompressedSource::of(Arc::new(stored), tensors.iter().map(tensor));
    device.only_read(Extents::new(vec![Extent { of: Arc::new(Decoded(source)), at: 0, bytes }]))
}

/// The home of a compressed group in a model without contents. `host` reads the weights of other devices.
pub(super) fn unfilled(
    (device, host): (&dyn Device, &dyn Device),
    reservation: &mut Reservation,
    (compressed, groups, group): (&Compressed, &Groups, usize),
    (assignment, in_files): (&Assignment, bool),
) -> Result<Arc<Home>> {
    let unspecified = |device: &dyn Device, bytes| {
        let of: Arc<dyn Readable> = Arc::new(Unspecified);
        device.only_read(Extents::new(vec![Extent { of, at: 0, bytes }]))
    };
    let (bytes, kind) = (compressed.bytes(group).unwrap_or(0), home_kind(assignment));
    let buf = match in_files {
        true => unspecified(device, bytes as usize)?,
        false => reservation.alloc(assignment.device, bytes, kind)?.freeze(),
    };
    let reads = if in_files || assignment.device.is_host() { device } else { host };
    let values = unspecified(reads, groups.bytes(group) as usize)?;
    Ok(Arc::new(Home::compressed(values, kind, in_files, CompressedForm { buf, infos: Arc::default(), away: None })))
}

impl Job<'_> {
    /// The home of a compressed group: what the files have of it, read and checked.
    pub(super) fn load_compressed(&self, group: usize, reservation: &Mutex<&mut Reservation>) -> Result<Arc<Home>> {
        let (compressed, assignment) = (&self.reuse.compressed, self.plan.at(self.reuse.groups.members(group)[0]));
        let (bytes, kind) = (compressed.bytes(group).unwrap_or(0), home_kind(assignment));
        let (device, charge) = lock(reservation).split(assignment.device, bytes)?;
        let tensors = Placed::all(compressed, self.tensors_of(group, None));
        let (buf, infos) = self.filled(&device, charge, kind, |all| {
            let (mut rest, mut begin, mut parts) = (all, 0, Vec::new());
            for Placed { tensor, range: values, place: Place { range, is_code } } in &tensors {
                let (part, after) = std::mem::take(&mut rest).split_at_mut(range.end - begin);
                parts.push((*tensor, values.len(), *is_code, &mut part[range.start - begin..]));
                (rest, begin) = (after, range.end);
            }
            self.fill_compressed(&mut parts)?;
            let mut infos = Vec::new();
            for (tensor, values, is_code, bytes) in parts {
                self.check_cancelled()?;
                if is_code {
                    let info = self.check_code(tensor, values, bytes)?;
                    infos.extend(compressed.place(tensor).map(|place| (place.range.start, info)));
                }
                self.advance(values as u64);
            }
            Ok(infos)
        })?;
        self.compressed_home(&device, &tensors, (buf, infos), kind)
    }

    /// Memory of a charge on `device`, with the bytes that `fill` writes, and what this returns.
    pub(super) fn filled<T>(
        &self,
        device: &Arc<dyn Device>,
        charge: Charge,
        kind: MemoryKind,
        fill: impl FnOnce(&mut [u8]) -> Result<T>,
    ) -> Result<(Buf, T)> {
        let bytes = charge.bytes() as usize;
        let mut memory = device.back(charge, kind, Some(self.plan.compute()))?;
        if device.id().is_host() {
            let all = memory.host_mut().ok_or_else(|| Error::bug("host memory that the host cannot address"))?;
            let told = fill(all)?;
            return Ok((memory.freeze(), told));
        }
        let mut all = vec![0; bytes];
        let told = fill(&mut all)?;
        let memory = self.send_parts(0..bytes, 0, memory, &**self.upload(device.id())?, |at, len, buffer| {
            buffer[..len].copy_from_slice(&all[at..at + len]);
            Ok(0..len)
        })?;
        Ok((memory.freeze(), told))
    }

    /// The home on `device` of a group whose stored form is in a buffer, with what the header of each code says, by the byte at which it
    /// begins.
    pub(super) fn compressed_home(
        &self,
        device: &Arc<dyn Device>,
        tensors: &[Placed],
        (buf, infos): (Buf, Vec<(usize, Info)>),
        kind: MemoryKind,
    ) -> Result<Arc<Home>> {
        let path = tensors.first().map_or(Path::new(""), |placed| self.path_of(placed.tensor)).to_owned();
        let away = Away { device: Arc::clone(device), read_back: Arc::clone(&self.read_back) };
        let away = Some(away).filter(|away| !away.device.id().is_host());
        let held = Held { buf: buf.clone(), away: away.clone(), path, stamp: Stamp::unique(buf.bytes() as u64) };
        let reads = if away.is_some() { &self.host } else { device };
        let values = decoded(&**reads, self.layout, tensors, held)?;
        Ok(Arc::new(Home::compressed(values, kind, false, CompressedForm { buf, infos: Arc::new(infos), away })))
    }

    /// Fills the compressed form of tensors, each with the bytes of its weights, from the base or from the files.
    fn fill_compressed(&self, parts: &mut [(TensorId, usize, bool, &mut [u8])]) -> Result<()> {
        let mut from_files = Vec::new();
        for (tensor, values, _, dst) in parts.iter_mut() {
            match self.reuse.compressed_in_base(*tensor) {
                Some((form, range)) => {
                    form.read(range.start, dst, self.loader.deadline)?;
                    self.count_weights_copied(*values);
                }
                None => from_files.push((*tensor, *values, &mut **dst)),
            }
        }
        if from_files.is_empty() {
            return Ok(());
        }
        let weights = self.weights().ok_or_else(|| Error::bug("codes of files, and no files"))?;
        let checkpoint = weights.checkpoint();
        let part = |(tensor, values, dst)| {
            self.count_weights_read(values);
            checkpoint.stored_part(tensor, dst)
        };
        let parts = from_files.into_iter().map(part).collect::<Result<_>>()?;
        self.read_pieces(parts, |file, parts| checkpoint.read_parts(file, Read::Stored, parts))
    }

    /// Checks a tensor's code, of so many bytes of weights: that it is the tensor's, and every block. Workers that have nothing to do
    /// help.
    fn check_code(&self, tensor: TensorId, values: usize, bytes: &[u8]) -> Result<Info> {
        let damaged = |fault: CodeFault| {
            let fault = CompressedFault::Code(fault);
            Error::file(self.path_of(tensor), Some(&self.layout.at(tensor).name), fault.into())
        };
        let code = Code::open(bytes).map_err(damaged)?;
        let info = *code.info();
        let is_made = self.layout.stored(tensor).is_some_and(|stored| stored.is_made);
        if let Some(weights) = self.weights().filter(|_| !is_made) {
            weights.checkpoint().check_code(tensor, &info)?;
        } else if info.decoded_bytes != values as u64 {
            return Err(Error::bug("a model with a code of other weights than its own"));
        }
        let size = info.decoded_bytes / info.count.max(1);
        let pieces = (0..info.count).step_by(CHECKED as usize).map(|begin| begin..info.count.min(begin + CHECKED));
        let check = |piece: Range<u64>| -> Result<()> {
            self.check_cancelled()?;
            let mut weights = vec![0; (piece.end - piece.start).min(STEP) as usize * size as usize];
            for begin in piece.clone().step_by(STEP as usize) {
                let end = piece.end.min(begin + STEP);
                let weights = &mut weights[..(end - begin) as usize * size as usize];
                code.decode_range(begin..end, weights).map_err(damaged)?;
            }
            Ok(())
        };
        threads::work_through(pieces.collect(), || self.places.free(), check)?;
        Ok(info)
    }
}

impl Files {
    /// The home on `device` of a compressed group that stays in the files.
    pub(super) fn compressed_home(
        &self,
        device: &dyn Device,
        layout: &Layout,
        compressed: &Compressed,
        tensors: Tensors,
        kind: MemoryKind,
    ) -> Result<Arc<Home>> {
        let (mut extents, mut infos, mut end) = (Vec::new(), Vec::new(), 0);
        for Placed { tensor, place: Place { range, is_code }, .. } in Placed::all(compressed, tensors.clone()) {
            if end < range.start {
                let of: Arc<dyn Readable> = Arc::new(Unspecified);
                extents.push(Extent { of, at: 0, bytes: range.start - end });
            }
            let (of, at) = self.stored(layout, tensor)?;
            extents.push(Extent { of, at, bytes: range.len() });
            if is_code {
                infos.push((range.start, self.info(layout, tensor)?));
            }
            end = range.end;
        }
        let values = self.home(device, layout, tensors)?;
        let buf = device.only_read(self.cached(Extents::new(extents)))?;
        Ok(Arc::new(Home::compressed(values, kind, true, CompressedForm { buf, infos: Arc::new(infos), away: None })))
    }
}
