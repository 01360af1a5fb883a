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
use crate::checkpoint::{Checkpoint, Layout, TensorId};
use crate::device::{DeviceId, DeviceKind};
use crate::error::{Error, Result};
use crate::plan::Plan;
use crate::schedule::Groups;
use crate::transfer::{self, InFile, ReadPart, Source};

/// Bytes that nobody has given yet.
struct Unspecified;

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
}

impl transfer::Tensors for OfFile {
    fn read_parts(&self, parts: &mut [ReadPart<'_>]) -> Result<()> {
        self.checkpoint.read_parts(self.file, parts)
    }

    fn named(&self, error: Error, at: u64) -> Error {
        self.checkpoint.named(error, self.file, at)
    }
}

/// The files that homes are read from.
pub(super) struct Files {
    /// One for each file of the checkpoint; none for a model without contents.
    files: Vec<Arc<dyn Readable>>,
    cache: Option<Arc<HostCache>>,
}

impl Files {
    /// The files of `weights`. `cache` keeps what is read of them.
    pub(super) fn of(weights: &Weights, cache: Option<Arc<HostCache>>) -> Files {
        let file = |(file, source): (usize, &Arc<dyn Source>)| {
            let checkpoint = weights.checkpoint().clone();
            Arc::new(InFile::new(Arc::clone(source), OfFile { checkpoint, file })) as Arc<dyn Readable>
        };
        Files { files: weights.checkpoint().sources().iter().enumerate().map(file).collect(), cache }
    }

    /// Those of a model without contents.
    pub(super) fn unspecified() -> Files {
        Files { files: Vec::new(), cache: None }
    }

    /// A home on `device` for these tensors, which follow each other there.
    pub(super) fn home(&self, device: &dyn Device, layout: &Layout, mut tensors: Tensors) -> Result<Buf> {
        tensors.sort_unstable_by_key(|(_, range)| range.start);
        let extent = |(tensor, range): (TensorId, Range<usize>)| {
            let info = layout.at(tensor);
            let of = self.files.get(info.file).cloned().unwrap_or_else(|| Arc::new(Unspecified));
            Extent { of, at: info.offset, bytes: range.len() }
        };
        let extents = Extents::new(tensors.into_iter().map(extent).collect());
        let extents = self.cache.iter().cloned().fold(extents, Extents::cached_by);
        let none = || Error::bug(format!("{} has no memory that is only read, which it had", device.id()));
        device.read_only(extents)?.ok_or_else(none)
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
