//! Streaming on candle's CUDA devices: networks compute, bit for bit, what they compute with all weights in candle's own
//! memory.
//!
//! `scripts/candle-cuda` builds these tests without a card and runs them over the stand-in for the driver, where candle's own
//! kernels cannot run: there the networks are products of matrices, and the tests that need kernels say that they were left
//! out. On a card all run.
#![cfg(feature = "cuda")]

mod support;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::{DType, Device, Module, Result, Tensor};
use candle_nn::{Linear, VarBuilder};
use support::{Network, at_strength, candles_own, data, tiny_llama};
use tensor_offload::checkpoint::{GgufMetadata, GgufValue, Layer, TensorSpec, write_gguf};
use tensor_offload::load::TensorAllocator;
use tensor_offload::plan::TensorGrouping;
use tensor_offload::{Checkpoint, DType as Stored, DeviceId, Loader, Model, Planner, Registry, Streamer, Weights};
use tensor_offload_candle::{Error, Streamed, cpu_memory, cuda_memory};

const ALLOCATIONS: [&str; 4] = ["cpu,*", "cuda:0,30%;cpu,*", "cuda:0,75%;disk,*", "cuda:0,*"];
const LAYERS: usize = 6;

fn card() -> (Device, DeviceId) {
    (Device::new_cuda_with_stream(0).unwrap(), DeviceId::cuda(0))
}

/// Candle's memory on a device; no test replaces a storage.
#[expect(unsafe_code, reason = "the promise of `cuda_memory`")]
fn memory(device: &Device) -> Arc<dyn TensorAllocator> {
    // SAFETY: no in-place operation of these tests replaces a storage.
    unsafe { cuda_memory(device) }.unwrap()
}

/// Whether candle's kernels run here; says so if they do not.
fn has_kernels(device: &Device) -> bool {
    let added = Tensor::zeros(4, DType::F32, device).unwrap().affine(1.0, 1.0).and_then(|ones| ones.to_vec1::<f32>());
    match added {
        Ok(ones) => assert_eq!(ones, [1.0; 4]),
        Err(error) => {
            eprintln!("left out: candle's kernels do not run over this driver ({error})");
            return false;
        }
    }
    true
}

/// A stack of equal layers and a larger head, in a file.
fn linears() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let shapes = (0..LAYERS).map(|k| (format!("layers.{k}"), (16, 16))).chain([("head".to_owned(), (40, 16))]);
    let tensor = |(name, shape): (String, (usize, usize))| {
        (format!("{name}.weight"), Tensor::randn(0f32, 0.5, shape, &Device::Cpu).unwrap())
    };
    candle_core::safetensors::save(&shapes.map(tensor).collect(), &path).unwrap();
    (folder, path)
}

fn names() -> impl Iterator<Item = String> {
    (0..LAYERS).map(|k| format!("layers.{k}")).chain(["head".to_owned()])
}

fn linear(name: &str, vb: &VarBuilder<'_>) -> Result<Linear> {
    let outputs = if name == "head" { 40 } else { 16 };
    Ok(Linear::new(vb.pp(name).get((outputs, 16), "weight")?, None))
}

/// The outputs of a few passes.
fn passes(device: &Device, mut turn: impl FnMut(&str, &Tensor) -> Result<Tensor>) -> Vec<Vec<Vec<f32>>> {
    let pass = |k: usize| {
        let input: Vec<f32> = (0..3 * 16).map(|i| ((i * 7 + k * 5) % 11) as f32 - 5.0).collect();
        let mut x = Tensor::from_vec(input, (3, 16), device).unwrap();
        for name in names() {
            x = turn(&name, &x).unwrap();
        }
        x.to_vec2().unwrap()
    };
    (0..3).map(pass).collect()
}

fn load(path: &Path, allocation: &str, depth: usize, device: &Device, registry: &Registry) -> Arc<Model> {
    let model = Model::open(path).unwrap().allocator(memory(device)).compute(DeviceId::cuda(0)).depth(depth);
    model.allocation(allocation).unwrap().load(registry).unwrap()
}

#[test]
fn products_are_those_of_weights_that_stay() {
    let ((device, id), (_folder, path)) = (card(), linears());
    let own = VarBuilder::from_tensors(candle_core::safetensors::load(&path, &device).unwrap(), DType::F32, &device);
    let expected = passes(&device, |name, x| linear(name, &own)?.forward(x));
    for (allocation, depth) in ALLOCATIONS.into_iter().flat_map(|allocation| [0, 1, 3].map(|depth| (allocation, depth)))
    {
        let registry = Registry::system();
        let model = load(&path, allocation, depth, &device, &registry);
        let planned = model.plan().device(id).map_or(0, |share| share.weights.bytes + share.beside.slots);
        let level = || registry.device(id).unwrap().ledger().charged();
        assert_eq!(level(), planned, "{allocation}");
        let build = |layer: &Layer, vb: VarBuilder<'static>| {
            assert!(vb.device().same_device(&device));
            linear(&layer.name, &vb)
        };
        // The search for NaN needs kernels.
        let mut blocks = Streamed::on(&model, &device, build).unwrap().unchecked();
        let outputs = passes(&device, |name, x| Ok(blocks.layer_named(name)?.run(|block| block.forward(x))?));
        assert!(outputs == expected, "{allocation}, depth {depth}");
        assert_eq!(level(), planned, "{allocation}: something was allocated in a pass");
        drop((blocks, model));
        let until = std::time::Instant::now() + std::time::Duration::from_secs(60);
        while level() > 0 {
            assert!(std::time::Instant::now() < until, "{} bytes stay", level());
            std::thread::yield_now();
        }
    }
}

/// Blocks cross the link and live on the card, and what candle multiplies with are their values.
#[test]
fn products_of_unpacked_slots_are_those_of_values_that_stay() {
    let (device, id) = card();
    let types = [Stored::Q8_0, Stored::Q4_0, Stored::Q5_1];
    let spec = |(k, name): (usize, String)| {
        TensorSpec::new(format!("{name}.weight"), types[k % 3], &[if name == "head" { 40 } else { 32 }, 32])
    };
    let specs: Vec<TensorSpec> = names().enumerate().map(spec).collect();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let mut metadata = GgufMetadata::new();
    metadata.set("general.architecture", GgufValue::Text("llama".to_owned())).unwrap();
    let written = write_gguf(&path, &specs, &metadata, |index, out| {
        // Codes of any value, and scales of 2^-6.
        let mut bytes: Vec<u8> = (0..out.left() as usize).map(|at| (at * 37 + index * 11) as u8).collect();
        for block in bytes.chunks_mut(specs[index].dtype.block().bytes as usize) {
            block[..2].copy_from_slice(&0x2400_u16.to_le_bytes());
            if specs[index].dtype == Stored::Q5_1 {
                block[2..4].copy_from_slice(&0xa400_u16.to_le_bytes());
            }
        }
        out.put(&bytes)
    });
    written.unwrap();
    let wide = |name: &str, vb: &VarBuilder<'_>| {
        let outputs = if name == "head" { 40 } else { 32 };
        Ok(Linear::new(vb.pp(name).get((outputs, 32), "weight")?, None))
    };
    let passes = |turn: &mut dyn FnMut(&str, &Tensor) -> Result<Tensor>| -> Vec<Vec<Vec<f32>>> {
        let pass = |k: usize| {
            let input: Vec<f32> = (0..3 * 32).map(|i| ((i * 7 + k * 5) % 11) as f32 - 5.0).collect();
            let mut x = Tensor::from_vec(input, (3, 32), &device).unwrap();
            for name in names() {
                x = turn(&name, &x).unwrap();
            }
            x.to_vec2().unwrap()
        };
        (0..3).map(pass).collect()
    };
    let values = Model::open(&path).unwrap().cast_floats(Stored::F32).allocator(memory(&device)).compute(id);
    let values = values.load(&Registry::system()).unwrap();
    let mut stay = Streamed::on(&values, &device, |layer, vb| wide(&layer.name, &vb)).unwrap().unchecked();
    let expected = passes(&mut |name, x| Ok(stay.layer_named(name)?.run(|block| block.forward(x))?));
    drop((stay, values));
    for allocation in ALLOCATIONS {
        let model = Model::open(&path).unwrap().allocator(memory(&device)).compute(id).depth(1).unpack(Stored::F32);
        let model = model.allocation(allocation).unwrap().load(&Registry::system()).unwrap();
        let mut blocks = Streamed::on(&model, &device, |layer, vb| wide(&layer.name, &vb)).unwrap().unchecked();
        let outputs = passes(&mut |name, x| Ok(blocks.layer_named(name)?.run(|block| block.forward(x))?));
        assert!(outputs == expected && outputs[0][0][0].is_finite(), "{allocation}");
        let crossed: u64 = blocks.streamer().report().bytes.values().sum();
        assert!(crossed <= 4 * model.plan().streamed_bytes(), "{allocation}: {crossed} bytes");
        drop(blocks);
        let unpacked = Streamed::quantized_on(&model, &device, |layer, weights| {
            let weight = weights.quantized(&format!("{}.weight", layer.name))?;
            assert_eq!(weight.dtype(), candle_core::quantized::GgmlDType::F32);
            Ok(weight)
        });
        let mut unpacked = unpacked.unwrap().unchecked();
        let outputs = passes(&mut |name, x| Ok(unpacked.layer_named(name)?.run(|weight| weight.forward(x))?));
        assert!(outputs == expected, "{allocation}");
    }
}

#[test]
fn a_device_on_the_per_thread_stream_is_refused() {
    let ((device, _), (_folder, path)) = (card(), linears());
    let per_thread = Device::new_cuda(0).unwrap();
    #[expect(unsafe_code, reason = "it is refused")]
    // SAFETY: no memory of it is used.
    let refused = unsafe { cuda_memory(&per_thread) }.err();
    assert!(matches!(refused, Some(Error::PerThreadStream { device }) if device == DeviceId::cuda(0)));
    let registry = Registry::system();
    let model = load(&path, "cuda:0,30%;cpu,*", 1, &device, &registry);
    let refused = Streamed::on(&model, &per_thread, |layer, vb| linear(&layer.name, &vb)).err();
    assert!(matches!(refused, Some(Error::PerThreadStream { .. })), "{refused:?}");
}

#[test]
fn compute_on_another_stream_or_device_than_candles_is_refused() {
    let ((device, _), (_folder, path)) = (card(), linears());
    let registry = Registry::system();
    for allocation in ["cuda:0,30%;cpu,*", "cuda:0,*"] {
        let model = load(&path, allocation, 1, &device, &registry);
        let build = |layer: &Layer, vb: VarBuilder<'static>| linear(&layer.name, &vb);
        let refused = Streamed::from_streamer(Streamer::new(&model).unwrap(), build).err();
        assert!(matches!(refused, Some(Error::OtherStream { .. })), "{refused:?}");
        let another = Device::new_cuda_with_stream(0).unwrap();
        let refused = Streamed::on(&model, &another, build).err();
        assert!(matches!(refused, Some(Error::OtherStream { .. })), "{refused:?}");
        let refused = Streamed::new(&model, build).err();
        assert!(matches!(refused, Some(Error::OtherDevice { .. })), "{refused:?}");
    }
    #[expect(unsafe_code, reason = "it is refused")]
    // SAFETY: there is no memory.
    let refused = unsafe { cuda_memory(&Device::Cpu) }.err();
    assert!(matches!(refused, Some(Error::NotCuda)));
}

#[test]
fn a_tensor_that_is_kept_outlives_the_model() {
    let ((device, _), (_folder, path)) = (card(), linears());
    let registry = Registry::system();
    let model = load(&path, "cuda:0,*", 1, &device, &registry);
    let kept = std::cell::RefCell::new(None);
    let blocks = Streamed::on(&model, &device, |layer, vb| {
        let linear = linear(&layer.name, &vb)?;
        kept.replace(Some(linear.weight().clone()));
        Ok(linear)
    });
    drop((blocks.unwrap(), model, registry));
    let kept = kept.into_inner().unwrap().to_vec2::<f32>().unwrap();
    let own = candle_core::safetensors::load(&path, &Device::Cpu).unwrap();
    assert!(own.values().any(|tensor| tensor.to_vec2::<f32>().unwrap() == kept));
}

/// A layer that is used in place on the host is a block on the CPU.
#[test]
fn weights_used_in_place_are_candles_on_the_cpu() {
    let ((device, id), (_folder, path)) = (card(), linears());
    let registry = Registry::system();
    let model = Model::open(&path).unwrap().allocator(memory(&device)).allocator(cpu_memory()).compute(id).depth(1);
    let model = model.planner(|planner| planner.in_place("head")).allocation("cpu,*").unwrap();
    let model = model.load(&registry).unwrap();
    let on_cpu = std::cell::Cell::new(0);
    let built = Streamed::on(&model, &device, |layer, vb| {
        let linear = linear(&layer.name, &vb)?;
        assert_eq!(linear.weight().device().is_cpu(), layer.name == "head");
        on_cpu.set(on_cpu.get() + usize::from(linear.weight().device().is_cpu()));
        Ok(linear)
    });
    built.unwrap();
    assert_eq!(on_cpu.get(), 1);
}

#[test]
fn both_families_are_equal_for_all_allocations() {
    let (device, id) = card();
    if !has_kernels(&device) {
        return;
    }
    let flux = |name: &str| (Network::flux(&data(name), &device), data(name));
    let networks = [(Network::llama(&tiny_llama(), &device), tiny_llama()), flux("flux/guided"), flux("flux/plain")];
    for (network, folder) in networks {
        let weights = Weights::new(Checkpoint::open(folder.join("model.safetensors")).unwrap());
        let expected = network.resident(&candles_own(&weights, &device));
        for allocation in ALLOCATIONS {
            let registry = Registry::system();
            let planner = Planner::new(weights.layout(), registry.machine()).compute(id).depth(2);
            let plan =
                planner.grouping(TensorGrouping::PerType).allocation(allocation.parse().unwrap()).plan().unwrap();
            let loader = Loader::new(&registry).allocator(memory(&device));
            let model = Arc::new(loader.load(&weights, &plan).unwrap());
            assert!(network.streamed(&model) == expected, "{}, {allocation}", folder.display());
        }
    }
}

#[test]
fn a_changed_strength_is_written_over_the_old_weights() {
    let (device, id) = card();
    if !has_kernels(&device) {
        return;
    }
    let network = Network::llama(&tiny_llama(), &device);
    let checkpoint = Checkpoint::open(tiny_llama()).unwrap();
    let (weak, strong) = (at_strength(&checkpoint, 0.5), at_strength(&checkpoint, -1.25));
    for allocation in ALLOCATIONS {
        let registry = Registry::system();
        let planner = Planner::new(weak.layout(), registry.machine()).compute(id).depth(1);
        let plan = planner.grouping(TensorGrouping::PerType).allocation(allocation.parse().unwrap()).plan().unwrap();
        let loader = Loader::new(&registry).allocator(memory(&device));
        let model = Arc::new(loader.load(&weak, &plan).unwrap());
        let build = |layer: &Layer, vb: VarBuilder<'static>| network.part(&layer.name, vb);
        let mut blocks = Streamed::on(&model, &device, build).unwrap();
        drop(model);
        let run = |blocks: &mut Streamed<support::Part>| {
            network.run(|layer, forward| Ok(blocks.layer_named(layer)?.run(|part| forward(part))?))
        };
        assert!(run(&mut blocks) == network.resident(&candles_own(&weak, &device)), "{allocation}");
        let mut blocks = blocks.refill(&loader, &strong, &plan, build).unwrap();
        assert!(run(&mut blocks) == network.resident(&candles_own(&strong, &device)), "{allocation}");
    }
}

#[test]
fn a_block_that_copies_its_weights_is_found_in_its_first_turn() {
    let ((device, _), (_folder, path)) = (card(), linears());
    if !has_kernels(&device) {
        return;
    }
    let registry = Registry::system();
    let model = load(&path, "cpu,*", 1, &device, &registry);
    let mut blocks = Streamed::on(&model, &device, |layer, vb| {
        let weight = linear(&layer.name, &vb)?.weight().clone();
        let copied = if layer.name == "layers.2" { (weight * 1.0)? } else { weight };
        Ok(Linear::new(copied, None))
    })
    .unwrap();
    let mut x = Tensor::ones((1, 16), DType::F32, &device).unwrap();
    for name in ["layers.0", "layers.1"] {
        x = blocks.layer_named(name).unwrap().run(|block| block.forward(&x)).unwrap();
    }
    let found = blocks.layer_named("layers.2").unwrap().run(|block| block.forward(&x));
    assert!(matches!(found, Err(Error::Copied { layer, .. }) if layer == "layers.2"));
}
