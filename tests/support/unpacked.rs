//! A model in blocks that slots unpack, with kernels of the compute device.

use std::sync::Arc;

use tensor_offload::{
    ByteSize, Checkpoint, DType, DeviceId, Loader, Model, Planner, Registry, Result, Streamer, Weights,
};

use super::DEADLINE;
use super::gguf::Gguf;

/// Five layers of two weights in blocks, one with a bias, and a norm; and the same with values in place of blocks.
pub(crate) fn weights(to: DType) -> (Weights, Weights) {
    let types = [DType::Q4_K, DType::Q8_0, DType::Q6_K, DType::Q4_0, DType::MXFP4];
    let file = types.into_iter().enumerate().fold(Gguf::new("llama"), |file, (layer, dtype)| {
        file.some(&format!("blk.{layer}.attn_q.weight"), dtype, &[24, 256])
            .some(&format!("blk.{layer}.attn_q.bias"), DType::F32, &[24])
            .some(&format!("blk.{layer}.ffn_up.weight"), DType::Q5_1, &[40, 256])
            .some(&format!("blk.{layer}.ffn_norm.weight"), DType::F32, &[256])
    });
    let open = || Weights::new(Checkpoint::from_bytes("model.gguf", file.build()).unwrap());
    (open(), open().cast("attn_q.weight", to).and_then(|weights| weights.cast("ffn_up.weight", to)).unwrap())
}

pub(crate) fn load(
    devices: &Registry,
    compute: DeviceId,
    weights: &Weights,
    allocation: &str,
    to: DType,
) -> Result<Arc<Model>> {
    let planner = Planner::new(weights.layout(), devices.machine()).allocation(allocation.parse()?);
    // So small a landing buffer that the larger tensors arrive in parts.
    let plan = planner.compute(compute).depth(1).unpack(to).landing_cap(ByteSize(0)).plan()?;
    Ok(Arc::new(Loader::new(devices).deadline(DEADLINE).load(weights, &plan)?))
}

/// So many passes, each layer compared with the values.
pub(crate) fn passes(devices: &Registry, compute: DeviceId, allocation: &str, to: DType, count: usize) -> Result<()> {
    let (weights, values) = weights(to);
    let model = load(devices, compute, &weights, allocation, to)?;
    let mut streamer = Streamer::new(&model)?.deadline(DEADLINE);
    for layer in (0..count).flat_map(|_| model.layout().layer_ids()) {
        let guard = streamer.layer(layer)?;
        for view in guard.tensors() {
            let tensor = values.layout().find(view.name()).unwrap();
            assert_eq!(view.dtype(), values.layout().tensor(tensor).unwrap().dtype, "{}", view.name());
            let (mut got, mut wanted) = (vec![0; view.size()], vec![0; view.size()]);
            values.read(tensor, &mut wanted)?;
            guard.read(view.name(), &mut got)?;
            assert!(got == wanted, "{} as {to}, {allocation}", view.name());
        }
    }
    let (crossed, plan) = (streamer.report().bytes.values().sum::<u64>(), model.plan());
    assert!(crossed <= (count as u64 + 1) * plan.streamed_bytes(), "{crossed} bytes in {count} passes\n{plan}");
    Ok(())
}
