//! Which modules are kept compressed.

use std::collections::BTreeSet;

use super::outlier::outliers_of;
use super::place::is_small;
use super::planner::Planner;
use super::value::{Assignment, Use};
use super::warning::Warning;
use crate::bytes::ByteSize;
use crate::checkpoint::{Layout, Module, ModuleId};
use crate::device::{Bandwidth, DeviceId, DeviceKind};
use crate::schedule::Groups;

/// Which modules are kept compressed, of those that have a code.
pub(super) struct KeptCodes {
    /// Those that are streamed.
    pub(super) streamed: bool,
    /// Of those on the compute device these.
    pub(super) resident: BTreeSet<ModuleId>,
}

impl KeptCodes {
    pub(super) fn none() -> KeptCodes {
        KeptCodes { streamed: false, resident: BTreeSet::new() }
    }
}

impl Planner<'_> {
    /// Keeps streamed modules compressed: on the host, on other devices, and on disk, where they take as much less. Only what nothing changes
    /// and a file has plain stays in that file as it is. Codes cross the links, arrive in a landing buffer on the compute
    /// device, and are decoded from there into the slot before the layer's turn: two thirds of the bytes of bf16, and the same bits. A
    /// device that cannot decode is an error when the streamer is made. Default: no, only files are compressed, and they are decoded
    /// when they are read.
    ///
    /// A module is compressed if a [file](crate::checkpoint::write_compressed) has it so, or if the load is to compress it
    /// ([`Weights::compress`](crate::Weights::compress)). Mode auto compresses none if a pass is shorter so, on a device that decodes slowly
    /// ([`DeviceInfo::decoding`](crate::device::DeviceInfo::decoding)), and says so.
    ///
    /// Quotas are in bytes of weights, as always; what a device needs is less ([`DeviceWeights::saved`](super::DeviceWeights::saved)).
    /// Where the host computes, this changes nothing: its weights are used where they live.
    ///
    /// ```
    /// # use tensor_offload::{Checkpoint, DType, Machine, Planner, checkpoint::{TensorSpec, write_compressed}};
    /// # let folder = tempfile::tempdir().unwrap();
    /// # let path = folder.path().join("model.safetensors");
    /// let specs = (0..8).map(|n| TensorSpec::new(format!("layers.{n}.weight"), DType::BF16, [256, 512]));
    /// let weights = [0x80, 0x3f].repeat(256 * 512);
    /// write_compressed(&path, &specs.collect::<Vec<_>>(), &Default::default(), |_, out| out.put(&weights))?;
    /// let checkpoint = Checkpoint::open(&path)?;
    /// let machine = Machine::described(&["cuda:0=24mib".parse()?, "cpu=64mib".parse()?]);
    /// let planner = Planner::new(checkpoint.layout(), &machine).allocation("cpu,*".parse()?);
    /// let (plain, compressed) = (planner.clone().plan()?, planner.compress(true).plan()?);
    /// assert!(compressed.streamed_bytes() < plain.streamed_bytes() * 7 / 10);
    /// # Ok::<(), tensor_offload::Error>(())
    /// ```
    pub fn compress(mut self, compress: bool) -> Self {
        self.compress = compress;
        self
    }

    /// Keeps modules of the compute device compressed there. They take as much less of it, and are decoded into a slot before each turn
    /// of their layer. So a card holds half as much again of bf16, a pass takes longer by what decoding takes, and there are slots even if
    /// nothing is streamed. In a model of few layers these may take more than is saved: the plan has both figures, and a smaller
    /// [depth](Planner::depth) makes them fewer. Default: no.
    ///
    /// Some modules are never compressed there: small ones, those that are used at both ends, [in place](Planner::in_place) or as
    /// [tables](Planner::gather_embeddings), those that [`keep_resident`](Planner::keep_resident) names, and those that are far larger
    /// than a layer ([`Plan::outliers`](super::Plan::outliers)), which slots would have to hold.
    ///
    /// Streamed modules have a setting of [their own](Planner::compress). As there, the file has the codes or the load makes them, and
    /// quotas are in bytes of weights: a quota of `cuda:0,24gb` takes some 16 GB of the card. Mode auto does this only if a pass is
    /// shorter so.
    ///
    /// ```
    /// use tensor_offload::{Machine, Planner, checkpoint::Layout};
    /// let layout = Layout::blocks([1 << 30; 30]).assume_compressed(0.675);
    /// let machine = Machine::described(&["cuda:0=24gib,link=25".parse()?, "cpu=64gib".parse()?]);
    /// let planner = Planner::new(&layout, &machine).compress(true).allocation("auto".parse()?);
    /// let (streamed, resident) = (planner.clone().plan()?, planner.compress_resident(true).plan()?);
    /// assert!(streamed.streamed_bytes() > 6 << 30);
    /// assert_eq!(resident.streamed_bytes(), 0, "30 GiB of weights live in 24 GiB");
    /// # Ok::<(), tensor_offload::Error>(())
    /// ```
    pub fn compress_resident(mut self, compress: bool) -> Self {
        self.compress_resident = compress;
        self
    }

    /// Sets the most bytes of a landing buffer, in which what is [unpacked](Planner::unpack) or kept [compressed](Planner::compress)
    /// arrives on the compute device; there is one for each route. While what is in one half is unpacked, the next tensors arrive in the
    /// other, and what is larger than a half arrives in parts. Less leaves more of the device to weights, and takes more copies, which
    /// below some MiB no longer reach a link's speed. It is exceeded where a half would be less than 4 KiB, than twice what decoding a
    /// part of a code needs of the part before (its index, and a block), or than a 4096th of the largest tensor. Default: 32 MiB.
    pub fn landing_cap(mut self, cap: ByteSize) -> Self {
        self.landing_cap = cap.get();
        self
    }

    /// The modules that these settings are for.
    pub(super) fn kept_codes(&self, compute: DeviceId) -> KeptCodes {
        let mut resident = self.compressible_here(compute);
        resident.retain(|&module| kept_compressed(self.layout, compute, module).is_some());
        KeptCodes { streamed: self.compress, resident }
    }

    /// The speed at which the compute device decodes, if it is known and there may be codes.
    pub(super) fn decoding(&self, compute: DeviceId) -> Option<Bandwidth> {
        let compresses = self.compress || self.compress_resident;
        self.machine.device(compute).ok().and_then(|info| info.decoding).filter(|_| compresses)
    }

    /// The modules that are kept compressed on the compute device, if they live there and have a code.
    fn compressible_here(&self, compute: DeviceId) -> BTreeSet<ModuleId> {
        if !self.compress_resident || compute.is_host() {
            return BTreeSet::new();
        }
        let (layout, wanted, outliers) = (self.layout, self.kept(), outliers_of(self.layout));
        let is_for = |module: &&Module| {
            let (id, bytes) = (module.id, module.bytes);
            let stays = module.tied || is_small(bytes, layout.bytes()) || wanted[id] || outliers.contains(&id);
            !stays && !self.is_in_place(module)
        };
        layout.modules().iter().filter(is_for).map(|module| module.id).collect()
    }

    /// A warning if modules are to be kept compressed, and none is.
    pub(super) fn nothing_compressed(&self, assignments: &[Assignment], compute: DeviceId) -> Option<Warning> {
        let here = self.compressible_here(compute);
        let is_for = |a: &&Assignment| match a.usage {
            Use::Streamed => self.compress,
            Use::Resident | Use::Unpacked => here.contains(&a.index),
            Use::InPlace => false,
        };
        let bytes = assignments.iter().filter(is_for).map(|a| a.bytes).sum();
        let idle = bytes > 0 && !compute.is_host() && !assignments.iter().any(Assignment::is_compressed);
        idle.then_some(Warning::NothingCompressed { bytes })
    }
}

/// The bytes of a module that lives on `device` and is kept compressed there. `None` if it is not kept so.
pub(super) fn kept_compressed(layout: &Layout, device: DeviceId, module: ModuleId) -> Option<u64> {
    // What a file has plain stays there so. What changes is copied to the disk, and a group stays in files or is copied as a whole.
    let kept = || match layout.is_in_files(module) {
        true => !layout.is_made(module),
        false => !Groups::may_join(layout, module),
    };
    (device.kind() != DeviceKind::Disk || kept()).then(|| layout.compressed_bytes(module)).flatten()
}

/// What `saved` bytes of a module count on its device: nothing if it stays in its file, which is all that there is of it then.
pub(super) fn saved_on(layout: &Layout, device: DeviceId, module: ModuleId, saved: u64) -> u64 {
    if device.kind() == DeviceKind::Disk && layout.is_in_files(module) { 0 } else { saved }
}
