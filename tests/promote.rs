//! Weights in GGML's blocks: cast to floats, merged with adapters on the way, or made blocks again.

mod support;

use half::{bf16, f16};
use support::gguf::{Gguf, Value};
use support::*;
use tensor_offload::backend::Clock;
use tensor_offload::cache::Identity;
use tensor_offload::checkpoint::TensorSpec;
use tensor_offload::error::{AdapterFault, CastFault};
use tensor_offload::patch::{dequantise, quantise};
use tensor_offload::{
    Adapter, Checkpoint, DType, DeviceId, Error, Loader, Matching, ModelBuilder, ModelCache, Planner, Registry,
    Retention, Rounding, TensorId, Weights,
};

const SPLIT: &str = "cuda:0,40kb;cuda:1,40kb;xpu:0,30kb;disk,30kb;cpu,*";

/// The types of the matrices of a model below; the first ones can be written.
const TYPES: [DType; 6] = [DType::Q8_0, DType::Q4_0, DType::Q4_K, DType::Q6_K, DType::IQ2_XXS, DType::TQ2_0];

const WRITTEN: usize = 4;

/// A model of two layers with a matrix of each type, and norms of F32.
fn tensors() -> Vec<TensorSpec> {
    let mut tensors = Vec::new();
    for layer in 0..2 {
        for (number, dtype) in TYPES.into_iter().enumerate() {
            tensors.push(spec(format!("model.layers.{layer}.mlp.part{number}.weight"), dtype, &[24, 512]));
        }
        tensors.push(spec(format!("model.layers.{layer}.norm.weight"), DType::F32, &[512]));
    }
    tensors
}

/// Blocks of values of a usual size.
fn blocks(dtype: DType, count: usize, name: &str) -> Vec<u8> {
    let seed = name.bytes().fold(3u64, |seed, byte| (seed * 31 + u64::from(byte)) % 1_000_003);
    let mut random = Random::new(seed);
    let block = dtype.block();
    let mut bytes = vec![0; count / block.elements as usize * block.bytes as usize];
    let values: Vec<f32> = (0..count).map(|_| (random.next() >> 40) as f32 / (1 << 24) as f32 - 0.5).collect();
    if quantise(dtype, &values, &mut bytes).is_err() {
        bytes.iter_mut().for_each(|byte| *byte = random.next() as u8);
        let scale = if dtype == DType::TQ2_0 { 64..66 } else { 0..2 };
        for block in bytes.chunks_mut(block.bytes as usize) {
            block[scale.clone()].copy_from_slice(&f16::from_f32(0.013).to_le_bytes());
        }
    }
    bytes
}

fn model(tensors: &[TensorSpec]) -> Checkpoint {
    let file = tensors.iter().fold(Gguf::new("llama"), |file, TensorSpec { name, dtype, shape, .. }| {
        if !dtype.is_ggml_block() {
            return file.some(name, *dtype, shape);
        }
        let bytes = blocks(*dtype, shape.iter().product::<u64>() as usize, name);
        file.tensor(name.clone(), *dtype, shape, bytes)
    });
    Checkpoint::from_bytes("model.gguf", file.build()).unwrap()
}

/// The same model, with every block as its values in f32.
fn as_f32(model: &Checkpoint) -> Checkpoint {
    let layout = model.layout();
    let specs: Vec<_> = layout.tensors().iter().map(|t| spec(t.name.clone(), DType::F32, &t.shape)).collect();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("f32.safetensors");
    tensor_offload::checkpoint::write_safetensors(&path, &specs, model.metadata(), |tensor, out| {
        out.put(&values_of(model, TensorId::new(tensor)).iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>())
    })
    .unwrap();
    Checkpoint::from_bytes("model.f32", std::fs::read(path).unwrap()).unwrap()
}

fn values_of(model: &Checkpoint, tensor: TensorId) -> Vec<f32> {
    let info = model.layout().tensor(tensor).unwrap();
    let mut bytes = vec![0; info.bytes as usize];
    model.read(tensor, &mut bytes).unwrap();
    match info.dtype {
        DType::F32 => floats(&bytes),
        DType::F16 => bytes.as_chunks().0.iter().map(|raw| f16::from_le_bytes(*raw).to_f32()).collect(),
        DType::BF16 => bytes.as_chunks().0.iter().map(|raw| bf16::from_le_bytes(*raw).to_f32()).collect(),
        dtype => {
            let mut values = vec![0.0; info.shape.iter().product::<u64>() as usize];
            dequantise(dtype, &bytes, &mut values).unwrap();
            values
        }
    }
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|raw| f32::from_le_bytes(*raw)).collect()
}

fn rounded(values: &[f32], dtype: DType) -> Vec<u8> {
    match dtype {
        DType::F32 => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
        DType::F16 => values.iter().flat_map(|value| f16::from_f32(*value).to_le_bytes()).collect(),
        DType::BF16 => values.iter().flat_map(|value| bf16::from_f32(*value).to_le_bytes()).collect(),
        dtype => panic!("{dtype}"),
    }
}

fn read_one(weights: &Weights, tensor: TensorId) -> Vec<u8> {
    let mut bytes = vec![0; weights.layout().tensor(tensor).unwrap().bytes as usize];
    weights.read(tensor, &mut bytes).unwrap();
    bytes
}

fn adapters() -> Vec<Adapter> {
    two_loras(&tensors(), 5)
}

/// A file of another program, with eighteen types.
#[test]
fn every_tensor_of_a_gguf_file_becomes_its_values_rounded_once() {
    let path = format!("{}/tests/data/gguf/mixed.gguf", env!("CARGO_MANIFEST_DIR"));
    let model = Checkpoint::open(path).unwrap();
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let weights = Weights::new(model.clone()).cast_floats(dtype).unwrap();
        assert_eq!(weights.layout().bytes(), 18 * 4 * 512 * dtype.block().bytes);
        for (tensor, info) in weights.layout().tensor_ids().zip(weights.layout().tensors()) {
            assert_eq!((info.dtype, &info.shape[..]), (dtype, &[4, 512][..]), "{}", info.name);
            let wanted = rounded(&values_of(&model, tensor), dtype);
            assert!(read_one(&weights, tensor) == wanted, "{} as {dtype}", info.name);
        }
    }
}

/// The adapter is applied to the values in f32, and these are rounded once.
#[test]
fn adapters_change_the_values_that_blocks_stand_for() {
    let model = model(&tensors());
    let wide = Weights::patched(as_f32(&model), adapters(), Matching::Strict).unwrap();
    let blocks = Weights::patched(model, adapters(), Matching::Strict).unwrap();
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let (wide, promoted) = (wide.clone().cast_floats(dtype).unwrap(), blocks.clone().cast_floats(dtype).unwrap());
        assert_eq!(promoted.layout().bytes(), wide.layout().bytes());
        for tensor in wide.layout().tensor_ids() {
            let name = &wide.layout().tensor(tensor).unwrap().name;
            let tensor_of_blocks = promoted.layout().find(name).unwrap();
            assert!(read_one(&promoted, tensor_of_blocks) == read_one(&wide, tensor), "{name} as {dtype}");
        }
    }
    let noisy = |weights: &Weights| {
        let weights = weights.clone().rounding(Rounding::Stochastic { seed: 4 }).cast_floats(DType::BF16).unwrap();
        read_one(&weights, weights.layout().find("model.layers.0.mlp.part4.weight").unwrap())
    };
    assert!(noisy(&wide) == noisy(&blocks));
}

#[test]
fn a_patch_takes_blocks_from_memory_and_checks_their_size() {
    let model = model(&tensors());
    let weights = Weights::patched(model.clone(), adapters(), Matching::Strict).unwrap();
    let weights = weights.cast_floats(DType::BF16).unwrap();
    for (tensor, patch) in weights.patches().iter() {
        let info = model.layout().tensor(tensor).unwrap();
        let mut bytes = vec![0; info.bytes as usize];
        model.read(tensor, &mut bytes).unwrap();
        let mut patched = vec![0; weights.layout().tensor(tensor).unwrap().bytes as usize];
        patch.apply_from(&bytes, &[], &mut patched).unwrap();
        assert!(patched == read_one(&weights, tensor), "{}", info.name);
        for length in [0, bytes.len() - 1, bytes.len() + 1] {
            let refused = patch.apply_from(&vec![0; length], &[], &mut patched).unwrap_err();
            assert!(matches!(refused, Error::WrongSize { .. }), "{refused}");
        }
    }
}

#[test]
fn models_of_blocks_load_cast_on_every_device_and_stream() {
    for adapters in [Vec::new(), adapters()] {
        let weights = Weights::patched(model(&tensors()), adapters, Matching::Strict).unwrap();
        let subject = Subject::new(weights.cast_floats(DType::BF16).unwrap());
        let registry = Registry::described(machine(), Clock::Virtual);
        for allocation in [SPLIT, "cpu,*", "cuda:0,50%;cpu,*"] {
            let plan = subject.planner(&machine(), allocation).plan().unwrap();
            assert_eq!(plan.bytes(), subject.layout().bytes());
            let model = load(&registry, &subject, &plan);
            assert_eq!(hash(&model), subject.hash(), "{allocation}");
            check_streamed(&model, &subject);
        }
    }
}

/// Blocks are moved as they are, and only some are cast.
#[test]
fn blocks_that_nothing_changes_are_loaded_as_they_are() {
    let weights = Weights::new(model(&tensors())).cast("part2", DType::F16).unwrap();
    let types: Vec<DType> = weights.layout().tensors().iter().map(|tensor| tensor.dtype).collect();
    assert_eq!(types.iter().filter(|dtype| **dtype == DType::F16).count(), 2);
    assert_eq!(types.iter().filter(|dtype| **dtype == DType::Q8_0).count(), 2);
    let subject = Subject::new(weights);
    let registry = Registry::described(machine(), Clock::Virtual);
    let plan = subject.planner(&machine(), SPLIT).plan().unwrap();
    let model = load(&registry, &subject, &plan);
    assert_eq!(hash(&model), subject.hash());
}

#[test]
fn a_builder_casts_and_requantises() {
    let registry = Registry::described(machine(), Clock::Virtual);
    let build = || adapters().into_iter().fold(ModelBuilder::new(model(&tensors())), |b, a| b.with_adapter(a));
    let cast = build().cast_floats(DType::BF16).compute(DeviceId::CPU).load(&registry).unwrap();
    assert!(cast.layout().tensors().iter().all(|tensor| tensor.dtype == DType::BF16));
    let refused = build().compute(DeviceId::CPU).load(&registry).unwrap_err();
    assert!(matches!(refused, Error::Unpatchable { .. }), "{refused}");
    let unwritten = ["part4", "part5"].into_iter().fold(build(), |build, part| build.cast(part, DType::F16));
    let mixed = unwritten.requantise().compute(DeviceId::CPU).load(&registry).unwrap();
    let of = |dtype| mixed.layout().tensors().iter().filter(|tensor| tensor.dtype == dtype).count();
    assert_eq!([DType::Q8_0, DType::Q4_K, DType::F16].map(of), [2, 2, 4]);
}

#[test]
fn changed_blocks_without_a_type_to_become_are_refused_by_name_before_memory_is_taken() {
    let weights = Weights::patched(model(&tensors()), adapters(), Matching::Strict).unwrap();
    let check = |error: Error| {
        let Error::Unpatchable { tensor, fault } = &error else { panic!("{error}") };
        assert_eq!(tensor, "model.layers.0.mlp.part0.weight");
        assert_eq!(**fault, AdapterFault::Blocks { dtype: DType::Q8_0 });
        for part in ["part0", "Q8_0", "Weights::cast", "Weights::requantise"] {
            assert!(error.to_string().contains(part), "{error}");
        }
    };
    let tensor = weights.layout().find("model.layers.0.mlp.part0.weight").unwrap();
    let mut bytes = vec![0; weights.layout().tensor(tensor).unwrap().bytes as usize];
    check(weights.read(tensor, &mut bytes).unwrap_err());
    check(weights.patches().tensor(tensor).unwrap().apply(&mut bytes, &[]).unwrap_err());
    let registry = Registry::described(machine(), Clock::Virtual);
    let machine = machine();
    let plan = Planner::new(weights.layout(), &machine).compute(GPU0).allocation("cpu,*".parse().unwrap()).plan();
    check(Loader::new(&registry).load(&weights, &plan.unwrap()).unwrap_err());
    assert!(levels(&registry).iter().all(|(_, bytes)| *bytes == 0));
    // Half of it cast is not enough.
    let some = weights.cast("model.layers.0", DType::F16).unwrap();
    let plan = Planner::new(some.layout(), &machine).compute(GPU0).allocation("cpu,*".parse().unwrap()).plan();
    let error = Loader::new(&registry).load(&some, &plan.unwrap()).unwrap_err();
    assert!(error.to_string().contains("model.layers.1.mlp.part0.weight"), "{error}");
}

/// Each weight is what `quantise` makes of its changed values.
#[test]
fn changed_blocks_become_blocks_again_if_that_is_asked_for() {
    let tensors: Vec<_> =
        tensors().into_iter().filter(|tensor| !["part4", "part5"].iter().any(|p| tensor.name.contains(p))).collect();
    assert_eq!(tensors.len(), 2 * (WRITTEN + 1));
    let model = model(&tensors);
    let wide = Weights::patched(as_f32(&model), two_loras(&tensors, 5), Matching::Strict).unwrap();
    let weights = Weights::patched(model.clone(), two_loras(&tensors, 5), Matching::Strict).unwrap();
    let weights = weights.requantise().unwrap();
    assert_eq!(weights.layout().bytes(), model.layout().bytes());
    for (tensor, info) in weights.layout().tensor_ids().zip(weights.layout().tensors()) {
        let changed = read_one(&wide, wide.layout().find(&info.name).unwrap());
        let wanted = match info.dtype.is_ggml_block() {
            true => {
                let mut blocks = vec![0; info.bytes as usize];
                quantise(info.dtype, &floats(&changed), &mut blocks).unwrap();
                blocks
            }
            false => changed,
        };
        let got = read_one(&weights, tensor);
        assert!(got == wanted, "{}", info.name);
        let mut before = vec![0; info.bytes as usize];
        model.read(tensor, &mut before).unwrap();
        assert_eq!(got == before, !info.dtype.is_ggml_block(), "{}", info.name);
    }
    let subject = Subject::new(weights);
    let registry = Registry::described(machine(), Clock::Virtual);
    let plan = subject.planner(&machine(), SPLIT).plan().unwrap();
    check_streamed(&load(&registry, &subject, &plan), &subject);
}

/// In its own order, so that the number of threads does not show in the last digit.
#[test]
fn a_load_tells_how_near_blocks_come_to_the_changed_values() {
    let tensors: Vec<_> =
        tensors().into_iter().filter(|tensor| !["part4", "part5"].iter().any(|p| tensor.name.contains(p))).collect();
    let model = model(&tensors);
    let wide = Weights::patched(as_f32(&model), two_loras(&tensors, 5), Matching::Strict).unwrap();
    let weights = Weights::patched(model, two_loras(&tensors, 5), Matching::Strict).unwrap().requantise().unwrap();
    let (mut count, mut errors, mut squares, mut worst) = (0, 0.0, 0.0, (0.0, String::new()));
    for (tensor, info) in weights.layout().tensor_ids().zip(weights.layout().tensors()) {
        if !info.dtype.is_ggml_block() {
            continue;
        }
        let wanted = floats(&read_one(&wide, wide.layout().find(&info.name).unwrap()));
        let mut stored = vec![0.0; wanted.len()];
        dequantise(info.dtype, &read_one(&weights, tensor), &mut stored).unwrap();
        let error: f64 = stored.iter().zip(&wanted).map(|(s, w)| (f64::from(*s) - f64::from(*w)).powi(2)).sum();
        let square: f64 = wanted.iter().map(|value| f64::from(*value).powi(2)).sum();
        (count, errors, squares) = (count + wanted.len(), errors + error, squares + square);
        if error / square > worst.0 {
            worst = (error / square, info.name.clone());
        }
    }
    let registry = Registry::described(machine(), Clock::Virtual);
    let subject = Subject::new(weights);
    let plan = subject.planner(&machine(), SPLIT).plan().unwrap();
    let mut reports = Vec::new();
    for workers in [1, 4] {
        let model = Loader::new(&registry).workers(workers).load(&subject.weights, &plan).unwrap();
        let requantised = model.report().requantised;
        assert_eq!((requantised.values, requantised.inexpressible), (count as u64, 0));
        let (error, rms) = ((errors / count as f64).sqrt(), (squares / count as f64).sqrt());
        assert!((requantised.rms_error() / error - 1.0).abs() < 1e-9, "{requantised:?} {error}");
        assert!((requantised.rms() / rms - 1.0).abs() < 1e-9, "{requantised:?} {rms}");
        assert_eq!(model.report().worst_requantised.as_ref(), Some(&worst.1));
        assert!(model.report().to_string().contains("values requantised with an RMS error of"));
        reports.push(requantised);
    }
    assert_eq!(reports[0], reports[1]);
    let json = serde_json::to_value(reports[0]).unwrap();
    assert_eq!(json["rms_error"], reports[0].rms_error());
}

/// A scale that is NaN in the file makes NaN values, and these a block of NaN; a scale that overflows makes infinities.
#[test]
fn a_load_counts_blocks_that_are_not_finite() {
    let tensors = [spec("model.layers.0.mlp.up_proj.weight", DType::Q8_0, &[24, 512])];
    let mut bytes = blocks(DType::Q8_0, 24 * 512, "up");
    bytes[34 * 5..][..2].copy_from_slice(&f16::NAN.to_le_bytes());
    bytes[34 * 9..][..2].copy_from_slice(&f16::INFINITY.to_le_bytes());
    let file = Gguf::new("llama").tensor(tensors[0].name.clone(), DType::Q8_0, &[24, 512], bytes);
    let model = Checkpoint::from_bytes("model.gguf", file.build()).unwrap();
    let weights = Weights::patched(model, two_loras(&tensors, 5), Matching::Strict).unwrap().requantise().unwrap();
    let mut bytes = vec![0; weights.layout().bytes() as usize];
    let requantised = weights.read(TensorId::new(0), &mut bytes).unwrap().requantised;
    assert_eq!((requantised.values, requantised.inexpressible), (24 * 512, 2));
    assert!(requantised.rms_error() > 0.0 && requantised.rms_error() < 0.01 * requantised.rms(), "{requantised:?}");
    let registry = Registry::described(machine(), Clock::Virtual);
    let plan = Planner::new(weights.layout(), &machine()).compute(DeviceId::CPU).plan().unwrap();
    let model = Loader::new(&registry).load(&weights, &plan).unwrap();
    assert_eq!(model.report().requantised, requantised);
    assert!(model.report().to_string().contains("2 blocks not finite"), "{}", model.report());
}

/// As `convert_lora_to_gguf.py --outtype q8_0` writes them.
#[test]
fn factors_of_an_adapter_may_be_in_blocks() {
    let factors = [("lora_a", [32, 64]), ("lora_b", [64, 32])];
    let adapter = |dtype: DType| {
        let file = Gguf::new("llama").entry("general.type", "adapter").entry("adapter.type", "lora");
        let file = factors.iter().fold(file.entry("adapter.lora.alpha", Value::F32(32.0)), |file, (end, shape)| {
            let (name, of) = (format!("blk.0.ffn_up.weight.{end}"), shape.iter().product::<u64>() as usize);
            let mut bytes = blocks(DType::Q8_0, of, end);
            if dtype == DType::F32 {
                let mut values = vec![0.0; of];
                dequantise(DType::Q8_0, &bytes, &mut values).unwrap();
                bytes = rounded(&values, DType::F32);
            }
            file.tensor(name, dtype, shape, bytes)
        });
        Adapter::from_checkpoint(Checkpoint::from_bytes("adapter.gguf", file.build()).unwrap(), 1.0).unwrap()
    };
    let model = Gguf::new("llama").some("blk.0.ffn_up.weight", DType::F32, &[64, 64]).build();
    let model = Checkpoint::from_bytes("model.gguf", model).unwrap();
    let merged = |dtype| {
        let weights = Weights::patched(model.clone(), vec![adapter(dtype)], Matching::Strict).unwrap();
        read_one(&weights, TensorId::new(0))
    };
    assert!(merged(DType::Q8_0) == merged(DType::F32));
    assert!(merged(DType::Q8_0) != read_one(&Weights::new(model.clone()), TensorId::new(0)));
}

/// A program that did not ask for it gets the error, whatever another one has in the cache.
#[test]
fn a_cache_gives_requantised_weights_only_to_those_who_ask_for_them() {
    let folder = tempfile::tempdir().unwrap();
    let tensors = [spec("model.layers.0.mlp.up_proj.weight", DType::Q8_0, &[24, 512])];
    let path = folder.path().join("model.gguf");
    let bytes = blocks(DType::Q8_0, 24 * 512, "up");
    let file = Gguf::new("llama").tensor(tensors[0].name.clone(), DType::Q8_0, &[24, 512], bytes);
    std::fs::write(&path, file.build()).unwrap();
    // Opened once, as an adapter in memory is another each time.
    let strict = Weights::patched(Checkpoint::open(&path).unwrap(), two_loras(&tensors, 5), Matching::Strict).unwrap();
    let asked = strict.clone().requantise().unwrap();
    let registry = Registry::described(machine(), Clock::Virtual);
    let plan = Planner::new(strict.layout(), &machine()).compute(DeviceId::CPU).plan().unwrap();
    let (cache, loader) = (ModelCache::new(), Loader::new(&registry));
    let get = |weights: &Weights| {
        let load = |base: Option<&_>| loader.derive(base, weights, &plan);
        cache.get_or_load("model", &Identity::of(weights, &plan), Retention::Keep, load)
    };
    let model = get(&asked).unwrap();
    assert!(std::sync::Arc::ptr_eq(&model, &get(&asked).unwrap()));
    let refused = get(&strict).unwrap_err();
    assert!(std::error::Error::source(&refused).unwrap().to_string().contains("Weights::requantise"), "{refused}");
    // Where all is cast it makes no difference.
    let [strict, asked] = [strict, asked].map(|weights| weights.cast_floats(DType::F16).unwrap());
    let plan = Planner::new(strict.layout(), &machine()).compute(DeviceId::CPU).plan().unwrap();
    assert_eq!(Identity::of(&strict, &plan), Identity::of(&asked, &plan));
}

#[test]
fn types_that_values_cannot_become_are_refused_by_name() {
    let weights = Weights::patched(model(&tensors()), adapters(), Matching::Strict).unwrap();
    let error = weights.clone().requantise().unwrap_err();
    let Error::Unpatchable { tensor, fault } = &error else { panic!("{error}") };
    assert_eq!(tensor, "model.layers.0.mlp.part4.weight");
    assert!(matches!(**fault, AdapterFault::NotWritten { dtype: DType::IQ2_XXS, .. }));
    for part in ["IQ2_XXS", "Q4_K", "Weights::cast"] {
        assert!(error.to_string().contains(part), "{error}");
    }
    // Those that no adapter changes may be of any type.
    Weights::new(model(&tensors())).requantise().unwrap();
    let to_blocks = weights.cast_floats(DType::Q8_0).unwrap_err();
    assert!(matches!(to_blocks, Error::Uncastable { ref fault, .. } if **fault == CastFault::Target), "{to_blocks}");
}
