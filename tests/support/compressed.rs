//! Models whose files have tensors in compressed form.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use proptest::prelude::*;
use tensor_offload::checkpoint::{CompressedReport, TensorSpec, write_compressed, write_safetensors};
use tensor_offload::{
    ByteSize, Checkpoint, DType, DeviceId, Machine, Model, Order, Plan, Planner, Registry, Result, Streamer,
};

use super::{Subject, check_layer, check_pass, layers, spec};

/// The tensors of a checkpoint in a compressed file.
pub(crate) fn compress(checkpoint: &Checkpoint, path: &Path) -> CompressedReport {
    let tensors = checkpoint.layout().tensors();
    let specs: Vec<_> = tensors.iter().map(|t| TensorSpec::new(&*t.name, t.dtype, &*t.shape)).collect();
    let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
    write_compressed(path, &specs, &metadata, |tensor, out| {
        let id = checkpoint.find(&specs[tensor].name).unwrap();
        let mut bytes = vec![0; checkpoint.layout().tensor(id).unwrap().bytes as usize];
        checkpoint.read(id, &mut bytes)?;
        out.put(&bytes)
    })
    .unwrap()
}

/// A model, and a folder with its compressed file.
pub(crate) struct Compressed {
    pub(crate) folder: tempfile::TempDir,
    pub(crate) plain: Subject,
    pub(crate) report: CompressedReport,
}

impl Compressed {
    pub(crate) fn new(tensors: &[TensorSpec], seed: u64) -> Compressed {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let plain = Subject::plain(tensors, seed);
        let report = compress(plain.checkpoint(), &folder.path().join("model.safetensors"));
        Compressed { folder, plain, report }
    }

    pub(crate) fn file(&self) -> PathBuf {
        self.folder.path().join("model.safetensors")
    }

    pub(crate) fn open(&self) -> Checkpoint {
        Checkpoint::open(self.file()).unwrap()
    }

    /// The same weights in a file that is not compressed, which is written for this.
    pub(crate) fn open_plain(&self) -> Checkpoint {
        let (path, tensors) =
            (self.folder.path().join("plain.safetensors"), self.plain.checkpoint().layout().tensors());
        let specs: Vec<_> = tensors.iter().map(|t| TensorSpec::new(&*t.name, t.dtype, &*t.shape)).collect();
        let bytes = |tensor: usize| self.plain.bytes_of(&tensors[tensor].name);
        write_safetensors(&path, &specs, &BTreeMap::new(), |tensor, out| out.put(bytes(tensor))).unwrap();
        Checkpoint::open(path).unwrap()
    }
}

/// A model in a compressed file, as it is opened.
pub(crate) struct Packed {
    pub(crate) file: Compressed,
    pub(crate) subject: Subject,
}

impl Packed {
    pub(crate) fn new(tensors: &[TensorSpec], seed: u64) -> Packed {
        let file = Compressed::new(tensors, seed);
        let subject = Subject::new(file.open().into());
        Packed { file, subject }
    }

    pub(crate) fn planner<'a>(&'a self, machine: &'a Machine, allocation: &str) -> Planner<'a> {
        self.subject.planner(machine, allocation).compress(true)
    }

    pub(crate) fn check_pass(&self, streamer: &mut Streamer) -> Result<()> {
        check_pass(streamer, &self.file.plain)?;
        streamer.verify()
    }
}

/// The weights of modules that the plan keeps compressed, and what they take.
pub(crate) fn kept(plan: &Plan) -> (u64, u64) {
    let compressed = plan.assignments().iter().filter(|a| a.is_compressed());
    compressed.fold((0, 0), |(bytes, taken), a| (bytes + a.bytes, taken + a.bytes - a.saved))
}

/// The bytes that are taken of a device.
pub(crate) fn held(devices: &Registry, id: DeviceId) -> u64 {
    devices.device(id).unwrap().ledger().charged()
}

/// A model has what its own plan says, and every layer is as the subject's tensors are.
pub(crate) fn check(devices: &Registry, model: &Arc<Model>, subject: &Subject) {
    let plan = model.plan();
    plan.verify(model.layout()).unwrap();
    for share in plan.devices() {
        let needed = share.weights.taken() + share.beside.slots;
        assert_eq!(held(devices, share.id), needed, "{} in\n{plan}", share.id);
        assert_eq!(model.bytes().get(&share.id).copied().unwrap_or(0), needed, "{} in\n{plan}", share.id);
    }
    assert_eq!(model.report().saved, plan.devices().iter().map(|share| share.weights.saved).sum::<u64>());
    assert_eq!(serde_json::from_value::<Plan>(serde_json::to_value(plan).unwrap()).unwrap(), *plan);
    check_values(model, subject);
}

/// Every tensor that is read back, and every layer of three passes, is as the subject's.
pub(crate) fn check_values(model: &Arc<Model>, subject: &Subject) {
    subject.check(model);
    let mut streamer = Streamer::new(model).unwrap();
    for _ in 0..3 {
        check_pass(&mut streamer, subject).unwrap();
        streamer.verify().unwrap();
    }
}

/// A pass in which a layer that fails is asked for once more, which has to succeed: the streamer stays usable.
///
/// # Errors
/// The last failure, after the pass.
pub(crate) fn check_turns(streamer: &mut Streamer, subject: &Subject) -> Result<()> {
    let mut failed = None;
    for layer in layers(streamer) {
        let turn = streamer.layer(layer).and_then(|guard| check_layer(&guard, subject));
        if let Err(error) = turn {
            failed = Some(error);
            check_layer(&streamer.layer(layer)?, subject)?;
        }
    }
    streamer.verify()?;
    failed.map_or(Ok(()), Err)
}

/// A small model over some division of a machine.
#[derive(Clone, Debug)]
pub(crate) struct AnyModel {
    pub(crate) tensors: Vec<TensorSpec>,
    pub(crate) seed: u64,
    pub(crate) allocation: String,
    order: Order,
    depth: usize,
    fixed: bool,
    pinned: Option<ByteSize>,
    resident: bool,
}

impl AnyModel {
    /// Any, with types that have codes and types that have none.
    pub(crate) fn strategy() -> impl Strategy<Value = AnyModel> {
        let dtypes = [DType::BF16, DType::F16, DType::F32, DType::F8E4M3, DType::U8, DType::I64];
        let tensor = (0u64..5, 0usize..4, 1u64..9000, prop::sample::select(dtypes.to_vec()));
        let shares = prop::collection::vec(0u64..4, 5)
            .prop_filter("all devices get nothing", |shares| shares.iter().any(|s| *s > 0));
        let settings = (0usize..4, any::<bool>(), any::<bool>(), prop::option::of(0u64..40_000), any::<bool>());
        let model = (prop::collection::vec(tensor, 1..24), shares, settings, any::<u64>());
        model.prop_map(|(tensors, shares, (depth, fixed, sequential, pinned, resident), seed)| {
            let named = tensors.into_iter().map(|(layer, module, count, dtype)| {
                let role = ["weight", "bias", "inner", "outer"][count as usize % 4];
                (format!("model.layers.{layer}.m{module}.{role}"), (dtype, count))
            });
            // Of equal names the last stays.
            let named: BTreeMap<String, (DType, u64)> = named.collect();
            let devices = ["cuda:0", "cuda:1", "xpu:0", "disk", "cpu"].iter().zip(shares);
            let quotas: Vec<String> = devices.map(|(device, share)| format!("{device},{share}%")).collect();
            AnyModel {
                tensors: named.into_iter().map(|(name, (dtype, count))| spec(name, dtype, &[count])).collect(),
                seed,
                allocation: quotas.join(";"),
                order: if sequential { Order::Sequential } else { Order::Interleaved },
                depth,
                fixed,
                pinned: pinned.map(ByteSize),
                resident,
            }
        })
    }

    /// The other settings.
    pub(crate) fn apply<'a>(&self, planner: Planner<'a>) -> Planner<'a> {
        let planner = planner.order(self.order).depth(self.depth).fixed_slots(self.fixed).pinned_cap(self.pinned);
        planner.compress_resident(self.resident)
    }
}
