//! Weights on a disk that stay in the model's own files: nothing changes them while they load, so a second place would hold
//! the same bytes.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use super::Loader;
use super::reuse::Reuse;
use super::worker::Tensors;
use crate::adapter::Weights;
use crate::backend::{Buf, Device, Extent, Extents, HostCache, Readable};
use crate::bytes::ByteSize;
use crate::checkpoint::{Checkpoint, Layout, Read, TensorId};
use crate::device::{DeviceId, DeviceKind};
use crate::error::{Error, Result};
use crate::lossless::Info;
use crate::plan::Plan;
use crate::schedule::Groups;
use crate::transfer::{self, InFile, ReadPart, Source};

/// Bytes that nobody has given yet.
pub(super) struct Unspecified;

impl Readable for Unspecified {
    fn read_parts(&self, parts: &mut [ReadPart<'_>]) -> Result<()> {
        parts.iter_mut().for_each(|part| part.dst.fill(0));
        Ok(())
    }
}

/// The tensors of one file of a checkpoint.
struct OfFile {
    checkpoint: Checkpoint,
    file: usize,
    read: Read,
}

impl transfer::Tensors for OfFile {
    fn read_parts(&self, parts: &mut [ReadPart<'_>]) -> Result<()> {
        self.checkpoint.read_parts(self.file, self.read, parts)
    }

    fn named(&self, error: Error, at: u64) -> Error {
        self.checkpoint.named(error, self.file, self.read, at)
    }
}

/// The files that homes are read from.
pub(super) struct Files {
    /// One for each file of the checkpoint; none for a model without contents.
    files: Vec<Arc<dyn Readable>>,
    /// Those with codes, as they are.
    stored: Vec<Option<Arc<dyn Readable>>>,
    checkpoint: Option<Checkpoint>,
    cache: Option<Arc<HostCache>>,
}

impl Files {
    /// The files of `weights`. `cache` keeps what is read of them.
    pub(super) fn of(weights: &Weights, cache: Option<Arc<HostCache>>) -> Files {
        let checkpoint = weights.checkpoint();
        let readable = |file: usize, source: &Arc<dyn Source>, read: Read| {
            let tensors = OfFile { checkpoint: checkpoint.clone(), file, read };
            Arc::new(InFile::new(Arc::clone(source), tensors)) as Arc<dyn Readable>
        };
        let sources = checkpoint.sources().iter().enumerate();
        Files {
            files: sources.clone().map(|(file, source)| readable(file, source, Read::Weights)).collect(),
            stored: sources
                .map(|(file, _)| Some(readable(file, checkpoint.stored(file)?.file(), Read::Stored)))
                .collect(),
            checkpoint: Some(checkpoint.clone()),
            cache,
        }
    }

    /// Those of a model without contents.
    pub(super) fn unspecified() -> Files {
        Files { files: Vec::new(), stored: Vec::new(), checkpoint: None, cache: None }
    }

    /// What the stored form of a tensor is read from, and its offset there.
    pub(super) fn stored(&self, layout: &Layout, tensor: TensorId) -> Result<(Arc<dyn Readable>, u64)> {
        let info = layout.at(tensor);
        let place = || self.checkpoint.as_ref()?.stored(info.file)?.place(info.offset, info.bytes);
        let found = self.stored.get(info.file).cloned().flatten().zip(place());
        let (of, (at, _)) =
            found.ok_or_else(|| Error::bug(format!("tensor `{}` is not stored as a code", info.name)))?;
        Ok((of, at))
    }

    /// What the header of a tensor's code says.
    pub(super) fn info(&self, layout: &Layout, tensor: TensorId) -> Result<Info> {
        let info = layout.at(tensor);
        let stored = self.checkpoint.as_ref().and_then(|checkpoint| Some((checkpoint, checkpoint.stored(info.file)?)));
        let (checkpoint, stored) = stored.ok_or_else(|| Error::bug("a code of a file without any"))?;
        stored
            .info(info.offset, info.bytes)
            .map_err(|error| checkpoint.named(error, info.file, Read::Weights, info.offset))
    }

    /// `extents`, kept by the cache if there is one.
    pub(super) fn cached(&self, extents: Extents) -> Extents {
        self.cache.iter().cloned().fold(extents, Extents::cached_by)
    }

    /// A home on `device` for these tensors, which follow each other there.
    pub(super) fn home(&self, device: &dyn Device, layout: &Layout, mut tensors: Tensors) -> Result<Buf> {
        tensors.sort_unstable_by_key(|(_, range)| range.start);
        let extent = |(tensor, range): (TensorId, Range<usize>)| {
            let info = layout.at(tensor);
            let of = self.files.get(info.file).cloned().unwrap_or_else(|| Arc::new(Unspecified));
            Extent { of, at: info.offset, bytes: range.len() }
        };
        let extents = self.cached(Extents::new(tensors.into_iter().map(extent).collect()));
        device.only_read(extents)
    }
}

impl Loader<'_> {
    /// What homes are read from that stay in the files of `weights`.
    pub(super) fn files_of(&self, weights: &Weights, host: &Arc<dyn Device>) -> Files {
        let cache = (self.host_cache > ByteSize(0)).then(|| HostCache::new(Arc::clone(host), self.host_cache));
        Files::of(weights, cache)
    }

    /// `reuse` for a model that is read from files, with what stays in them.
    pub(super) fn leaving(&self, reuse: Reuse, layout: &Layout, plan: &Plan) -> Result<Reuse> {
        let in_files = stays_in_files(layout, plan, &reuse.groups, |id| self.registry.device(id))?;
        Ok(reuse.leaving(in_files))
    }
}

/// Whether each group of modules stays in the files that `layout` was read from: it is unchanged, and planned on a disk that has
/// memory which is only read. `device` opens a device.
pub(super) fn stays_in_files(
    layout: &Layout,
    plan: &Plan,
    groups: &Groups,
    device: impl Fn(DeviceId) -> Result<Arc<dyn Device>>,
) -> Result<Vec<bool>> {
    let mut able: BTreeMap<DeviceId, bool> = BTreeMap::new();
    let stays = |group: usize| {
        let members = groups.members(group);
        let home = plan.at(members[0]).device;
        if home.kind() != DeviceKind::Disk || !members.iter().all(|&module| layout.is_in_files(module)) {
            return Ok(false);
        }
        if let Some(&able) = able.get(&home) {
            return Ok(able);
        }
        let has = device(home)?.read_only(Extents::default())?.is_some();
        able.insert(home, has);
        Ok(has)
    };
    (0..groups.len()).map(stays).collect()
}
