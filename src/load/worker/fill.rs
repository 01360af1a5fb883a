//! Blocks that live on the host, filled in place: those of several groups at a time, so that what lies together in a file is read
//! together.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

use super::{Job, Tensors, lock};
use crate::backend::{Buf, BufMut};
use crate::checkpoint::{Read, TensorId};
use crate::error::{Error, Result};
use crate::limits::STAGING_BYTES;
use crate::patch::TensorPatch;
use crate::threads;
use crate::transfer::{ReadPart, divide};

/// A block of memory that is to be filled, with the tensors in it.
pub(in crate::load) struct Block {
    pub(in crate::load) tensors: Tensors,
    pub(in crate::load) memory: BufMut,
}

/// Parts of files, with the number of the file.
pub(in crate::load) type Parts<'a> = Vec<(usize, ReadPart<'a>)>;

impl Job<'_> {
    /// Fills blocks that live on the host, in place.
    pub(in crate::load) fn fill_host(&self, mut blocks: Vec<Block>) -> Result<Vec<Buf>> {
        let no_address = || Error::bug("host memory that the host cannot address");
        blocks.iter_mut().try_for_each(|block| {
            let Block { tensors, memory } = block;
            if tensors.iter().all(|(tensor, _)| self.is_plain(*tensor)) {
                return Ok(());
            }
            memory.write_with(|bytes| self.fill_changed(tensors, bytes))?.ok_or_else(no_address)?
        })?;
        let mut parts = Parts::new();
        for Block { tensors, memory } in &mut blocks {
            if memory.is_locked() {
                // Its owner locks it, so it is not held while other blocks are read.
                let read = memory.write_with(|bytes| self.read_plain(self.plain_parts(tensors, bytes)?))?;
                read.ok_or_else(no_address)??;
            } else {
                parts.extend(self.plain_parts(tensors, memory.host_mut().ok_or_else(no_address)?)?);
            }
        }
        self.read_plain(parts)?;
        let filled = blocks.into_iter();
        filled.map(|Block { tensors, memory }| Ok(self.download_block(&tensors, memory)?.freeze())).collect()
    }

    /// Whether a tensor's bytes are a range of a file.
    pub(in crate::load) fn is_plain(&self, tensor: TensorId) -> bool {
        let is_made = self.patch(tensor).is_some() || self.layout.factors_with(tensor).is_some();
        !is_made && self.reuse.in_base(tensor).is_none()
    }

    /// Fills in the tensors of a block that the base has, or that are not as in the files.
    fn fill_changed(&self, tensors: &Tensors, bytes: &mut [u8]) -> Result<()> {
        for (tensor, range) in tensors.iter().cloned() {
            let dst = &mut bytes[range];
            match (self.reuse.in_base(tensor), self.patch(tensor)) {
                (Some(base), _) => self.copy_on_host(base, dst)?,
                (None, None) if self.layout.factors_with(tensor).is_some() => self.make_factor(tensor, dst)?,
                (None, Some(patch)) if patch.is_read_in_parts() => self.read_cast(patch, tensor, dst)?,
                (None, Some(patch)) => self.read_patched(patch, tensor, dst)?,
                (None, None) => {}
            }
        }
        Ok(())
    }

    /// The parts of files that are the tensors of a block that are as in the files, with the memory that they go to.
    pub(super) fn plain_parts<'b>(&self, tensors: &Tensors, mut bytes: &'b mut [u8]) -> Result<Parts<'b>> {
        let mut plain: Vec<_> = tensors.iter().filter(|(tensor, _)| self.is_plain(*tensor)).collect();
        plain.sort_by_key(|(_, range)| (range.start, range.end));
        let (mut begin, mut parts) = (0, Parts::new());
        for (tensor, range) in plain {
            let (before, rest) = std::mem::take(&mut bytes).split_at_mut(range.end - begin);
            let dst = &mut before[range.start - begin..];
            parts.push(self.files(*tensor)?.checkpoint().part_at(*tensor, 0, dst)?);
            (bytes, begin) = (rest, range.end);
        }
        Ok(parts)
    }

    /// Reads parts of files that are tensors as they are.
    pub(super) fn read_plain(&self, parts: Parts<'_>) -> Result<()> {
        let Some(weights) = self.weights.filter(|_| !parts.is_empty()) else { return Ok(()) };
        self.read_pieces(parts, |file, parts| {
            weights.checkpoint().read_parts(file, Read::Weights, parts)?;
            parts.iter().for_each(|part| self.count_read(part.dst.len()));
            Ok(())
        })
    }

    /// Has `read` read parts of files, in pieces that ignore where one tensor ends and the next begins. Workers that have nothing to do
    /// help.
    pub(in crate::load) fn read_pieces(
        &self,
        parts: Parts<'_>,
        read: impl Fn(usize, &mut [ReadPart<'_>]) -> Result<()> + Sync,
    ) -> Result<()> {
        let mut files: BTreeMap<usize, Vec<ReadPart<'_>>> = BTreeMap::new();
        parts.into_iter().for_each(|(file, part)| files.entry(file).or_default().push(part));
        let pieces = |(file, parts)| divide(parts, STAGING_BYTES as u64).into_iter().map(move |parts| (file, parts));
        let pieces = files.into_iter().flat_map(pieces).collect();
        threads::work_through(
            pieces,
            || self.places.free(),
            |(file, mut parts)| {
                self.check_cancelled()?;
                read(file, &mut parts)
            },
        )
    }

    /// Reads a tensor that is only cast, a part at a time.
    fn read_cast(&self, patch: &TensorPatch, tensor: TensorId, dst: &mut [u8]) -> Result<()> {
        self.patched.fetch_add(1, Ordering::Relaxed);
        let mut at = 0;
        for part in dst.chunks_mut(STAGING_BYTES) {
            self.cast_part(patch, tensor, at, part)?;
            at += part.len();
        }
        Ok(())
    }

    pub(super) fn cast_part(&self, patch: &TensorPatch, tensor: TensorId, at: usize, dst: &mut [u8]) -> Result<()> {
        self.check_cancelled()?;
        let (outcome, read) = patch.read_part(self.files(tensor)?.checkpoint(), tensor, at, dst)?;
        self.read.fetch_add(read, Ordering::Relaxed);
        self.saturated.fetch_add(outcome.saturated, Ordering::Relaxed);
        self.advance(dst.len() as u64);
        Ok(())
    }

    /// Reads a tensor and patches it in place; `dst` has the size of the patched one.
    pub(super) fn read_patched(&self, patch: &TensorPatch, tensor: TensorId, dst: &mut [u8]) -> Result<()> {
        self.check_cancelled()?;
        let checkpoint = self.files(tensor)?.checkpoint();
        let outcome = patch.read(checkpoint, tensor, dst)?;
        self.read.fetch_add(patch.bytes_read(checkpoint, tensor), Ordering::Relaxed);
        self.patched.fetch_add(1, Ordering::Relaxed);
        self.saturated.fetch_add(outcome.saturated, Ordering::Relaxed);
        if outcome.requantised.values > 0 {
            lock(&self.requantised).insert(tensor, outcome.requantised);
        }
        self.advance(dst.len() as u64);
        Ok(())
    }
}
