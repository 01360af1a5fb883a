//! Streams a model to a device of the crate wgpu, and runs a WGSL shader over its tensors where the library has them.
//!
//! `cargo run --release --features wgpu --example wgpu` does it with the small Llama that comes with the crate. Drivers that compute
//! on the processor count with `TENSOR_OFFLOAD_VULKAN_SOFTWARE=1`.
#![expect(unsafe_code, reason = "the library's buffers are lent to wgpu")]

mod support;

use std::path::PathBuf;
use std::sync::Arc;

use clap::Parser;
use serde_json::{Value, json};
use support::shader::{Sums, sums_of};
use tensor_offload::wgpu::{self, SharedDevice, wgpu as gpu};
use tensor_offload::{
    ByteSize, Checkpoint, DeviceId, Error, Loader, Model, Planner, Registry, Result, Streamer, Weights,
};

const TINY_LLAMA: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/data/tiny-llama");

/// The device's number in the library.
const DEVICE: DeviceId = DeviceId::vulkan(0);

/// Streams a model to a device of the crate wgpu, which is vulkan:0 here, runs a shader over the bytes of each tensor, without a
/// copy, and compares the sums that it makes with those of the file's bytes. Without a model it takes a small Llama that comes
/// with the crate.
#[derive(Parser)]
#[command(name = "wgpu")]
struct Args {
    /// The checkpoint: a safetensors or GGUF file, or a folder with one or with an index
    model: Option<PathBuf>,
    /// Which device takes how much, as for offload; the device of wgpu is vulkan:0
    #[arg(long, value_name = "ALLOCATION", default_value = "vulkan:0,25%;cpu,*")]
    alloc: String,
    /// The number of wgpu's adapter, of those that the library can use
    #[arg(long, value_name = "N", default_value_t = 0)]
    adapter: usize,
    /// How many layers to prefetch
    #[arg(long, value_name = "N", default_value_t = 1)]
    depth: usize,
    /// Print one JSON value
    #[arg(long)]
    json: bool,
}

/// What a shader made of a layer.
struct Summed {
    layer: String,
    /// Each tensor's name, the bytes before it in its binding, and its size.
    tensors: Vec<(String, u64, u64)>,
}

impl support::Example for Args {
    fn json(&self) -> bool {
        self.json
    }

    fn run(self) -> Result<Value> {
        let instance = gpu::Instance::new(gpu::InstanceDescriptor::new_without_display_handle());
        let adapters = wgpu::adapters(&instance);
        let adapter = adapters.get(self.adapter).ok_or_else(|| Error::DeviceAbsent {
            device: DEVICE,
            why: format!(
                "of wgpu's adapters the library can use {}, so there is no {}; \
                 TENSOR_OFFLOAD_VULKAN_SOFTWARE=1 admits those that compute on the processor",
                adapters.len(),
                self.adapter
            ),
        })?;
        let descriptor = gpu::DeviceDescriptor { required_limits: adapter.limits(), ..Default::default() };
        // SAFETY: nothing is presented.
        let shared = unsafe { wgpu::request_device(adapter, &descriptor)? };
        let devices = Registry::new([shared.backend()]);
        let weights = Weights::new(Checkpoint::open(self.model.as_deref().unwrap_or(TINY_LLAMA.as_ref()))?);
        let planner = Planner::new(weights.layout(), devices.machine()).allocation(self.alloc.parse()?);
        let plan = planner.compute(DEVICE).depth(self.depth).plan()?;
        self.say(|| format!("{}\n{plan}", support::devices::lines(devices.machine())));
        let model = Arc::new(Loader::new(&devices).load(&weights, &plan)?);
        let (layers, sums) = pass(&shared, &model)?;
        let report = self.compare(&weights, &layers, &sums)?;
        Ok(json!({ "adapter": adapter.get_info().name, "device": DEVICE, "plan": plan, "layers": report }))
    }
}

/// Runs the shader over all layers, in one pass. The host waits for nothing but the last sums.
fn pass(shared: &SharedDevice, model: &Arc<Model>) -> Result<(Vec<Summed>, Vec<[u32; 2]>)> {
    let mut sums = Sums::new(shared, model.layout().tensors().len());
    let mut streamer = Streamer::new(model)?;
    let mut layers = Vec::new();
    for layer in model.layout().layer_ids() {
        let guard = streamer.layer(layer)?;
        let mut encoder = shared.device().create_command_encoder(&gpu::CommandEncoderDescriptor::default());
        let mut tensors = Vec::new();
        for tensor in guard.tensors().filter(|tensor| tensor.size() > 0) {
            // SAFETY: the shader only reads, and is submitted below, while the guard lives.
            let buffer = unsafe { shared.buffer(&tensor)? };
            sums.record(shared, &buffer, &mut encoder);
            tensors.push((tensor.name().to_owned(), buffer.ahead(), buffer.bytes()));
        }
        shared.submit(&**streamer.compute(), [encoder.finish()])?;
        layers.push(Summed { layer: guard.name().to_owned(), tensors });
    }
    Ok((layers, sums.finish(shared)?))
}

impl Args {
    /// Compares the sums with those of the files' bytes, and tells of each layer.
    fn compare(&self, weights: &Weights, layers: &[Summed], sums: &[[u32; 2]]) -> Result<Vec<Value>> {
        let (mut sums, mut all) = (sums.iter(), [0_u64; 2]);
        let mut report = Vec::new();
        for Summed { layer, tensors } in layers {
            let (mut bytes, mut total) = (0, [0_u32; 2]);
            for (name, ahead, size) in tensors {
                let tensor = weights.layout().find(name).ok_or_else(|| wrong(format!("`{name}` is in no file")))?;
                let mut file = vec![0; *size as usize];
                weights.read(tensor, &mut file)?;
                let want = sums_of(*ahead, &file);
                let found = *sums.next().ok_or_else(|| wrong(format!("`{name}` was not summed")))?;
                if found != want {
                    return Err(wrong(format!(
                        "`{name}`: the shader's sums are {found:08x?}, the file's are {want:08x?}"
                    )));
                }
                bytes += size;
                total = [total[0].wrapping_add(found[0]), total[1].wrapping_add(found[1])];
            }
            let hex = format!("{:08x}{:08x}", total[0], total[1]);
            self.say(|| {
                format!("{layer}: {} tensors, {}, sum {hex}, as in the file", tensors.len(), ByteSize(bytes).human())
            });
            all = [all[0] + tensors.len() as u64, all[1] + bytes];
            report.push(json!({ "layer": layer, "tensors": tensors.len(), "bytes": bytes, "sum": hex }));
        }
        self.say(|| format!("all {} tensors, {}, are as in the file", all[0], ByteSize(all[1]).human()));
        Ok(report)
    }

    fn say(&self, text: impl FnOnce() -> String) {
        if !self.json {
            support::print_line(&text());
        }
    }
}

fn wrong(reason: String) -> Error {
    Error::Invalid { reason }
}

fn main() {
    support::main::<Args>()
}
