//! A model whose modules are kept compressed, and which kernels of the compute device decode.

use std::sync::Arc;

use tensor_offload::checkpoint::TensorSpec;
use tensor_offload::{ByteSize, DType, DeviceId, Loader, Model, Planner, Registry, Result, Streamer, Weights};

use super::compressed::Compressed;
use super::{DEADLINE, spec};

/// Four layers of weights that have codes, two types among them, with a bias and a norm that have none.
pub(crate) fn tensors() -> Vec<TensorSpec> {
    let layer = |layer: u64| {
        let dtype = if layer == 2 { DType::F16 } else { DType::BF16 };
        let name = |role: &str| format!("model.layers.{layer}.{role}");
        [
            spec(name("q.weight"), dtype, &[24, 256]),
            spec(name("q.bias"), dtype, &[24]),
            spec(name("up.weight"), DType::BF16, &[40, 256]),
            spec(name("norm.weight"), DType::F32, &[64]),
        ]
    };
    (0..4).flat_map(layer).collect()
}

pub(crate) fn load(
    (devices, compute): (&Registry, DeviceId),
    weights: &Weights,
    allocation: &str,
    pinned: Option<u64>,
) -> Result<Arc<Model>> {
    let planner = Planner::new(weights.layout(), devices.machine()).allocation(allocation.parse()?).compute(compute);
    let planner = pinned.iter().fold(planner, |planner, &cap| planner.pinned_cap(Some(ByteSize(cap))));
    let plan = planner.depth(1).compress(true).compress_resident(true).landing_cap(ByteSize(0)).plan()?;
    assert!(plan.assignments().iter().any(|a| a.is_compressed()), "{plan}");
    Ok(Arc::new(Loader::new(devices).deadline(DEADLINE).load(weights, &plan)?))
}

/// Whose codes are kept.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Codes {
    OfTheFile,
    /// The file is plain, and the load makes them.
    OfTheLoad,
}

/// So many passes, each layer compared with the plain file.
pub(crate) fn passes(
    (devices, compute): (&Registry, DeviceId),
    (file, codes): (&Compressed, Codes),
    allocation: &str,
    pinned: Option<u64>,
    count: usize,
) -> Result<()> {
    let weights = match codes {
        Codes::OfTheFile => file.open().into(),
        Codes::OfTheLoad => file.plain.weights.clone().compress()?,
    };
    let model = load((devices, compute), &weights, allocation, pinned)?;
    for info in model.layout().tensors() {
        let mut got = vec![0; info.bytes as usize];
        model.read(&info.name, &mut got)?;
        assert!(got == file.plain.bytes_of(&info.name), "{}, {allocation}", info.name);
    }
    let mut streamer = Streamer::new(&model)?.deadline(DEADLINE);
    for layer in (0..count).flat_map(|_| model.layout().layer_ids()) {
        let guard = streamer.layer(layer)?;
        for view in guard.tensors() {
            let mut got = vec![0; view.size()];
            guard.read(view.name(), &mut got)?;
            assert!(got == file.plain.bytes_of(view.name()), "{}, {allocation}", view.name());
        }
    }
    streamer.verify()?;
    let (crossed, plan) = (streamer.report().bytes.values().sum::<u64>(), model.plan());
    // A layer that has a slot to itself comes once.
    let each = plan.streamed_bytes();
    assert!((each..=each * (count as u64 + 1)).contains(&crossed), "{crossed} in {count} passes\n{plan}");
    Ok(())
}
