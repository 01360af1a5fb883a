//! Weights whose changes are not merged: their bytes stay, and the factors of the change come beside them.

mod reference;
#[path = "support/examples.rs"]
mod run;
mod support;

use std::path::Path;
use std::sync::Arc;

use proptest::prelude::*;
use reference::{Tensor, f32s, file};
use support::gguf::Gguf;
use support::*;
use tensor_offload::backend::{Clock, Countdown, Faulty, Operation, Simulated};
use tensor_offload::cache::Identity;
use tensor_offload::checkpoint::TensorSpec;
use tensor_offload::error::{AdapterFault, Missing};
use tensor_offload::patch::{dequantise, quantise};
use tensor_offload::{
    Adapter, Checkpoint, DType, Deferred, Error, ErrorKind, LayerGuard, Loader, Matching, Model, ModelBuilder,
    Registry, Result, ScalePolicy, Streamer, TensorView, Weights,
};

const SPLIT: &str = "cuda:0,20kb;cuda:1,20kb;xpu:0,15kb;disk,15kb;cpu,*";

const TYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// The values of a tensor's bytes.
fn values(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    if !dtype.is_ggml_block() {
        return reference::floats(dtype, bytes);
    }
    let block = dtype.block();
    let mut values = vec![0.0; bytes.len() / block.bytes as usize * block.elements as usize];
    dequantise(dtype, bytes, &mut values).unwrap();
    values
}

/// Numbers in -1..1.
fn numbers(seed: u64, count: usize) -> Vec<f32> {
    let mut random = Random::new(seed);
    (0..count).map(|_| (random.next() >> 40) as f32 / (1 << 23) as f32 - 1.0).collect()
}

/// LoRA on these modules: name, outputs, inputs, rank, alpha.
fn loras(modules: &[(&str, u64, u64, u64, f32)], seed: u64, strength: f32) -> Adapter {
    Adapter::from_checkpoint(loras_file(modules, seed), strength).unwrap()
}

fn loras_file(modules: &[(&str, u64, u64, u64, f32)], seed: u64) -> Checkpoint {
    let factors = modules.iter().zip(seed * 1000..).flat_map(|(&(name, rows, cols, rank, alpha), seed)| {
        let (down, up) = (numbers(seed, (rank * cols) as usize), numbers(seed + 500, (rows * rank) as usize));
        [
            f32s(&format!("{name}.lora_A.weight"), &[rank, cols], &down),
            f32s(&format!("{name}.lora_B.weight"), &[rows, rank], &up),
            f32s(&format!("{name}.alpha"), &[], &[alpha]),
        ]
    });
    let factors: Vec<Tensor> = factors.collect();
    file(&format!("lora-{seed}"), &factors)
}

/// LoRA on every matrix of a checkpoint.
fn on_all(checkpoint: &Checkpoint, rank: u64, seed: u64, strength: f32) -> Adapter {
    Adapter::from_checkpoint(file_on_all(checkpoint, rank, seed), strength).unwrap()
}

/// The file of such an adapter, for adapters that differ in their strengths alone.
fn file_on_all(checkpoint: &Checkpoint, rank: u64, seed: u64) -> Checkpoint {
    let matrices = checkpoint.layout().tensors().iter().filter(|tensor| tensor.shape.len() == 2);
    let modules: Vec<_> = matrices
        .map(|t| (t.name.strip_suffix(".weight").unwrap(), t.shape[0], t.shape[1], rank, rank as f32 * 0.5))
        .collect();
    loras_file(&modules, seed)
}

fn open(tensors: &[TensorSpec], seed: u64) -> Checkpoint {
    Checkpoint::from_bytes(format!("model-{seed}"), safetensors(tensors, seed)).unwrap()
}

fn mixed_gguf() -> Checkpoint {
    Checkpoint::open(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/gguf/mixed.gguf")).unwrap()
}

fn patched(checkpoint: &Checkpoint, adapters: Vec<Adapter>) -> Weights {
    Weights::patched(checkpoint.clone(), adapters, Matching::Strict).unwrap()
}

fn deferred(checkpoint: &Checkpoint, adapters: Vec<Adapter>, dtype: DType) -> Weights {
    patched(checkpoint, adapters).defer("*", dtype).unwrap()
}

fn read_one(weights: &Weights, name: &str) -> Vec<u8> {
    let tensor = weights.layout().find(name).unwrap_or_else(|| panic!("no `{name}`"));
    let mut bytes = vec![0; weights.layout().tensor(tensor).unwrap().bytes as usize];
    weights.read(tensor, &mut bytes).unwrap();
    bytes
}

/// Checks `W x + s B (A x)` against the merged weight's product, of W [out, in] as values, factors of `dtype`, and the merged
/// weight in f32.
fn check_product(name: &str, w: &[f32], (a, b, scale): (&[f32], &[f32], f32), merged: &[f32], dtype: DType) {
    let (cols, rank) = (a.len() / (b.len() * a.len() / w.len()).isqrt(), (b.len() * a.len() / w.len()).isqrt());
    assert_eq!((w.len() * rank * rank, a.len()), (a.len() * b.len(), rank * cols), "{name}");
    let rounding = match dtype {
        DType::F32 => 2f64.powi(-22),
        DType::F16 => 2f64.powi(-10),
        _ => 2f64.powi(-7),
    };
    let x: Vec<f64> = numbers(99, cols).into_iter().map(f64::from).collect();
    let dot = |row: &[f32]| row.iter().zip(&x).map(|(w, x)| f64::from(*w) * x).sum::<f64>();
    let size = |row: &[f32]| row.iter().zip(&x).map(|(w, x)| (f64::from(*w) * x).abs()).sum::<f64>();
    let (ax, of_ax): (Vec<f64>, Vec<f64>) = a.chunks(cols).map(|row| (dot(row), size(row))).unzip();
    for (row, w) in w.chunks(cols).enumerate() {
        let b = &b[row * rank..][..rank];
        let change: f64 = b.iter().zip(&ax).map(|(b, ax)| f64::from(*b) * ax).sum::<f64>() * f64::from(scale);
        let most: f64 = b.iter().zip(&of_ax).map(|(b, ax)| (f64::from(*b) * ax).abs()).sum::<f64>();
        let wanted = &merged[row * cols..][..cols];
        let bound = most * f64::from(scale.abs()) * rounding * 1.01 + (size(wanted) + size(w)) * 2f64.powi(-22) + 1e-9;
        let (got, wanted) = (dot(w) + change, dot(wanted));
        assert!((got - wanted).abs() <= bound, "{name} row {row}: {got} {wanted} +- {bound}");
    }
}

/// Checks all deferred weights of `weights` against the same adapters merged in f32, and that all else is as in the file.
fn check(weights: &Weights, merged: &Weights, dtype: DType) {
    let (layout, checkpoint) = (weights.layout(), weights.checkpoint());
    for (tensor, info) in checkpoint.layout().tensor_ids().zip(checkpoint.layout().tensors()) {
        assert_eq!(layout.tensor(tensor), Some(info));
        assert!(read_one(weights, &info.name) == reference::bytes(checkpoint, tensor), "{}", info.name);
    }
    for of in layout.factors() {
        let [w, a, b] = [of.weight, of.a, of.b].map(|tensor| layout.tensor(tensor).unwrap());
        assert_eq!((a.dtype, b.dtype), (dtype, dtype));
        let base = w.name.strip_suffix(".weight").unwrap();
        assert_eq!([&a.name, &b.name], [&format!("{base}.lora_A.weight"), &format!("{base}.lora_B.weight")]);
        let module = layout.module(layout.module_of(of.a).unwrap()).unwrap();
        assert_eq!((&module.name, module.layer), (&format!("{base}.lora"), layout.layer_of(of.weight).unwrap()));
        assert_eq!((module.factors_of, layout.module_of(of.b)), (layout.module_of(of.weight), Some(module.id)));
    }
    let registry = Registry::described(machine(), Clock::Virtual);
    let plan = tensor_offload::Planner::new(layout, registry.machine()).compute(CPU).plan().unwrap();
    let model = Loader::new(&registry).load(weights, &plan).unwrap();
    for of in layout.factors() {
        let name = &layout.tensor(of.weight).unwrap().name;
        let factors = model.deferred(name).unwrap();
        let [w, a, b] = [model.tensor(name).unwrap(), factors.a, factors.b].map(|view| of_view(&view));
        check_product(name, &w, (&a, &b, factors.scale), &values(DType::F32, &read_one(merged, name)), dtype);
    }
}

fn of_view(view: &TensorView<'_>) -> Vec<f32> {
    values(view.dtype(), view.bytes().unwrap().unwrap())
}

#[test]
fn weights_of_any_type_keep_their_bytes_and_have_the_change_beside_them() {
    for (checkpoint, count) in [(mixed_gguf(), 18), (open(&llama(2, 32), 3), 10)] {
        let adapters = || vec![on_all(&checkpoint, 3, 1, 0.75)];
        let merged = patched(&checkpoint, adapters()).cast_floats(DType::F32).unwrap();
        for dtype in TYPES {
            let weights = deferred(&checkpoint, adapters(), dtype);
            assert_eq!((weights.layout().factors().len(), weights.patches().iter().count()), (count, 0));
            check(&weights, &merged, dtype);
        }
    }
}

/// The scales differ, one is negative, and the ranks add up.
#[test]
fn several_adapters_are_one_product() {
    for checkpoint in [mixed_gguf(), open(&llama(2, 32), 4)] {
        let adapters =
            || vec![on_all(&checkpoint, 2, 1, 0.3), on_all(&checkpoint, 5, 2, -1.5), on_all(&checkpoint, 1, 3, 1.0)];
        let merged = patched(&checkpoint, adapters()).cast_floats(DType::F32).unwrap();
        let weights = deferred(&checkpoint, adapters(), DType::F32);
        let layout = weights.layout();
        assert!(layout.factors().iter().all(|of| layout.tensor(of.a).unwrap().shape[0] == 8));
        check(&weights, &merged, DType::F32);
        check(&deferred(&checkpoint, adapters(), DType::BF16), &merged, DType::BF16);
    }
}

/// For one adapter, the factors are the adapter's, and the strength is in the scale alone.
#[test]
fn a_single_adapters_factors_are_its_own() {
    let checkpoint = open(&[spec("a.weight", DType::BF16, &[6, 40])], 1);
    let weights = deferred(&checkpoint, vec![loras(&[("a", 6, 40, 4, 2.0)], 7, -0.5)], DType::F32);
    let (down, up) = (numbers(7000, 160), numbers(7500, 24));
    assert_eq!(values(DType::F32, &read_one(&weights, "a.lora_A.weight")), down);
    assert_eq!(values(DType::F32, &read_one(&weights, "a.lora_B.weight")), up);
    let model = load_on_cpu(&weights);
    assert_eq!(model.deferred("a.weight").unwrap().scale, -0.5 * 2.0 / 4.0);
    assert!(model.deferred("a").is_none() && model.deferred("a.lora_A.weight").is_none());
}

fn load_on_cpu(weights: &Weights) -> Model {
    let registry = Registry::described(machine(), Clock::Virtual);
    let plan = tensor_offload::Planner::new(weights.layout(), registry.machine()).compute(CPU).plan().unwrap();
    Loader::new(&registry).load(weights, &plan).unwrap()
}

#[test]
fn parts_of_a_fused_weight_change_by_one_product() {
    let checkpoint = open(&[spec("blocks.0.attn.qkv.weight", DType::BF16, &[60, 40])], 2);
    let parts = ["q", "k", "v"].map(|part| format!("blocks.0.attn.to_{part}"));
    let modules: Vec<_> =
        parts.iter().zip([1.0, 2.0, 6.0]).map(|(name, alpha)| (name.as_str(), 20, 40, 2, alpha)).collect();
    let adapters = || vec![loras(&modules, 5, 0.5), loras(&modules[1..2], 6, 1.0)];
    let merged = patched(&checkpoint, adapters()).cast_floats(DType::F32).unwrap();
    let weights = deferred(&checkpoint, adapters(), DType::F16);
    let shapes = ["A", "B"].map(|side| {
        let name = format!("blocks.0.attn.qkv.lora_{side}.weight");
        weights.layout().tensor(weights.layout().find(&name).unwrap()).unwrap().shape.clone()
    });
    assert_eq!(shapes, [[8, 40], [60, 8]]);
    check(&weights, &merged, DType::F16);
}

/// The adapter is a convolution's, [r, in, 3, 3] and [out, r, 1, 1].
#[test]
fn a_convolutions_first_factor_is_a_kernel() {
    let checkpoint = open(&[spec("conv.weight", DType::F16, &[8, 5, 3, 3])], 2);
    let factors = [
        f32s("conv.lora_down.weight", &[2, 5, 3, 3], &numbers(1, 90)),
        f32s("conv.lora_up.weight", &[8, 2, 1, 1], &numbers(2, 16)),
    ];
    let adapters = || vec![Adapter::from_checkpoint(file("lora", &factors), 1.0).unwrap()];
    let weights = deferred(&checkpoint, adapters(), DType::F32);
    let a = weights.layout().find("conv.lora_A.weight").unwrap();
    assert_eq!(weights.layout().tensor(a).unwrap().shape, [2, 5, 3, 3]);
    check(&weights, &patched(&checkpoint, adapters()).cast_floats(DType::F32).unwrap(), DType::F32);
}

/// Experts of a stack have factors of their own, one batch of each.
#[test]
fn experts_of_a_stack_have_their_own_factors() {
    let name = "model.layers.0.mlp.experts.down_proj";
    let checkpoint = open(&[spec(name, DType::BF16, &[4, 24, 16])], 2);
    let modules: Vec<String> = [0, 2].iter().map(|n| format!("model.layers.0.mlp.experts.{n}.down_proj")).collect();
    let modules: Vec<_> = modules.iter().map(|name| (name.as_str(), 24, 16, 3, 3.0)).collect();
    let adapters = || vec![loras(&modules, 5, 0.5), loras(&modules[1..], 6, 1.0)];
    let weights = Weights::patched(checkpoint.clone(), adapters(), Matching::Strict);
    let weights = weights.unwrap().defer("experts", DType::F32).unwrap();
    let of = weights.layout().factors()[0];
    let [a, b] = [of.a, of.b].map(|tensor| weights.layout().tensor(tensor).unwrap());
    assert_eq!((&a.shape[..], &b.shape[..]), (&[4, 6, 16][..], &[4, 24, 6][..]));
    assert_eq!(a.name, format!("{name}.lora_A.weight"));
    let merged = patched(&checkpoint, adapters()).cast_floats(DType::F32).unwrap();
    let model = load_on_cpu(&weights);
    let Deferred { a, b, scale, .. } = model.deferred(name).unwrap();
    let (a, b, w) = (of_view(&a), of_view(&b), of_view(&model.tensor(name).unwrap()));
    let whole = values(DType::F32, &read_one(&merged, name));
    for expert in 0..4 {
        let [a, b] = [(&a, 96), (&b, 144)].map(|(values, each)| &values[expert * each..][..each]);
        let [w, merged] = [&w, &whole].map(|values| &values[expert * 384..][..384]);
        if expert % 2 == 1 {
            assert!(a.iter().chain(b).all(|value| *value == 0.0) && w == merged);
        }
        check_product(&format!("expert {expert}"), w, (a, b, scale), merged, DType::F32);
    }
}

/// Whether a layer's weights have their factors with them: on the compute device, or where they are used.
fn check_guard(guard: &LayerGuard, subject: &Subject, device: tensor_offload::DeviceId) -> Result<usize> {
    let weights = subject.layout().factors().iter();
    let mut found = 0;
    for of in weights.filter(|of| subject.layout().layer_of(of.weight) == Some(guard.layer().id)) {
        let name = &subject.layout().tensor(of.weight).unwrap().name;
        let Deferred { a, b, scale, .. } = guard.deferred(name).expect("the weight is deferred");
        let short = guard.deferred(&name[guard.name().len() + 1..]).expect("by its name in the layer");
        assert_eq!((a.device(), b.device(), short.scale), (device, device, scale));
        for view in [a, b] {
            assert!(view.byte_range().start.is_multiple_of(view.dtype().block().bytes as usize));
            let mut bytes = vec![0; view.size()];
            guard.read(view.name(), &mut bytes)?;
            assert!(bytes == merged_bytes(subject, view.name()), "{}", view.name());
        }
        found += 1;
    }
    assert!(guard.deferred("input_layernorm.weight").is_none());
    Ok(found)
}

fn merged_bytes<'a>(subject: &'a Subject, name: &str) -> &'a [u8] {
    &subject.merged[subject.layout().find(name).unwrap().index()]
}

fn check_everything(model: &Model, subject: &Subject) {
    for (tensor, want) in subject.layout().tensors().iter().zip(&subject.merged) {
        assert!(read(model, &tensor.name).unwrap() == *want, "{}", tensor.name);
    }
}

/// A llama whose layers' matrices have factors, in GGUF's blocks or bf16.
fn blocks_model(layers: u64) -> Checkpoint {
    let mut file = Gguf::new("llama");
    for layer in 0..layers {
        for (name, dtype) in [("up", DType::Q8_0), ("down", DType::Q4_0), ("gate", DType::IQ4_NL)] {
            let mut bytes = vec![0; dtype.bytes_of(&[64, 64]).unwrap() as usize];
            quantise(dtype, &numbers(layer + 1, 64 * 64), &mut bytes).unwrap();
            file = file.tensor(format!("model.layers.{layer}.mlp.{name}.weight"), dtype, &[64, 64], bytes);
        }
        file = file.some(&format!("model.layers.{layer}.input_layernorm.weight"), DType::F32, &[64]);
    }
    Checkpoint::from_bytes("model.gguf", file.build()).unwrap()
}

#[test]
fn factors_are_where_the_layer_computes_whether_streamed_or_resident() {
    for checkpoint in [blocks_model(4), open(&llama(4, 32), 8)] {
        let adapters = || vec![on_all(&checkpoint, 3, 1, 0.75), on_all(&checkpoint, 2, 2, 1.25)];
        let subject = Subject::new(deferred(&checkpoint, adapters(), DType::BF16));
        let plain = Subject::new(patched(&checkpoint, adapters()).cast_floats(DType::F32).unwrap());
        for allocation in ["cuda:0,*", "cpu,*", "disk,*", SPLIT] {
            let registry = Registry::described(machine(), Clock::Virtual);
            let plan = subject.planner(&machine(), allocation).depth(1).plan().unwrap();
            let text = serde_json::to_string(&plan).unwrap();
            serde_json::from_str::<tensor_offload::Plan>(&text).unwrap().verify(subject.layout()).unwrap();
            assert!(plan.verify(plain.layout()).is_err(), "the layout has other modules");
            let model = load(&registry, &subject, &plan);
            let ledger: Vec<_> = levels(&registry).into_iter().filter(|(_, bytes)| *bytes > 0).collect();
            assert_eq!(ledger, model.bytes().into_iter().collect::<Vec<_>>(), "{allocation}");
            assert_eq!(plan.bytes(), subject.layout().bytes());
            let report = model.report();
            let bytes = subject.layout().bytes() - checkpoint.layout().bytes();
            assert_eq!((report.deferred, report.deferred_bytes), (subject.layout().factors().len(), bytes));
            assert_eq!((report.patched, report.bytes, report.read), (0, plan.bytes(), plan.bytes() - bytes));
            assert!(report.to_string().contains("weights deferred with"), "{report}");
            check_everything(&model, &subject);
            let mut streamer = Streamer::new(&model).unwrap();
            for _ in 0..2 {
                let mut found = 0;
                for layer in layers(&streamer) {
                    found += check_guard(&streamer.layer(layer).unwrap(), &subject, GPU0).unwrap();
                }
                assert_eq!(found, report.deferred);
            }
            drop((streamer, model));
            comes_back(&registry);
        }
    }
}

/// The factors of modules that are used where they live are there, too.
#[test]
fn patterns_for_a_weight_are_for_its_factors() {
    let checkpoint = open(&llama(3, 32), 8);
    let subject = Subject::new(deferred(&checkpoint, vec![on_all(&checkpoint, 3, 1, 0.75)], DType::BF16));
    let machine = machine();
    let plan = subject.planner(&machine, "cpu,*").in_place("model.layers.1.mlp.up_proj").plan().unwrap();
    let used = |name: &str| plan.assignments().iter().find(|a| &*a.module == name).unwrap().usage;
    for name in ["model.layers.1.mlp.up_proj", "model.layers.1.mlp.up_proj.lora"] {
        assert_eq!(used(name), tensor_offload::Use::InPlace, "{name}");
    }
    assert_eq!(used("model.layers.0.mlp.up_proj.lora"), tensor_offload::Use::Streamed);
    let plan =
        subject.planner(&machine, "cuda:0,14kb;cpu,*").keep_resident("model.layers.2.mlp.up_proj").plan().unwrap();
    let at = |name: &str| plan.assignments().iter().find(|a| &*a.module == name).unwrap().device;
    assert_eq!([at("model.layers.2.mlp.up_proj"), at("model.layers.2.mlp.up_proj.lora")], [GPU0, GPU0]);
}

/// One adapter's strength is in no tensor.
#[test]
fn another_strength_takes_no_memory_and_no_time() {
    let checkpoint = blocks_model(3);
    let file = file_on_all(&checkpoint, 3, 1);
    let at = |strength| {
        let adapter = Adapter::from_checkpoint(file.clone(), strength).unwrap();
        Subject::new(deferred(&checkpoint, vec![adapter], DType::F16))
    };
    let (weak, strong) = (at(0.5), at(-2.0));
    let registry = Registry::described(machine(), Clock::Virtual);
    let plan = weak.planner(&machine(), SPLIT).depth(1).plan().unwrap();
    let first = load(&registry, &weak, &plan);
    let before = levels(&registry);
    let second = Loader::new(&registry).derive(&first, &strong.weights, &plan).unwrap();
    assert_eq!(levels(&registry), before);
    let report = second.report();
    assert_eq!((report.read, report.copied, report.shared), (0, 0, plan.bytes()));
    let name = "model.layers.1.mlp.up.weight";
    assert_eq!([&*first, &second].map(|model| model.deferred(name).unwrap().scale), [0.25, -1.0]);
    check_everything(&second, &strong);
}

/// Of two adapters one gets another strength, a third comes, and all go. The base's memory is shared all the time.
#[test]
fn other_adapters_change_the_factors_and_share_the_weights() {
    let checkpoint = blocks_model(3);
    let files = [(3, 1), (2, 2)].map(|(rank, seed)| file_on_all(&checkpoint, rank, seed));
    let [one, two] = files.map(|file| move |strength| Adapter::from_checkpoint(file.clone(), strength).unwrap());
    let subjects = [
        vec![one(0.5), two(1.0)],
        vec![one(0.25), two(1.0)],
        vec![one(0.25), two(1.0), on_all(&checkpoint, 1, 3, 1.0)],
        vec![],
        vec![two(0.5)],
    ];
    let subjects = subjects.map(|adapters| Subject::new(deferred(&checkpoint, adapters, DType::F16)));
    for allocation in ["cuda:0,*", "cpu,*", "disk,*"] {
        let registry = Registry::described(machine(), Clock::Virtual);
        let plan = |subject: &Subject| subject.planner(&machine(), allocation).depth(1).plan().unwrap();
        let mut model = load(&registry, &subjects[0], &plan(&subjects[0]));
        let weights = checkpoint.layout().bytes();
        for (number, subject) in subjects.iter().enumerate().skip(1) {
            let plan = plan(subject);
            let derived = Arc::new(Loader::new(&registry).derive(&model, &subject.weights, &plan).unwrap());
            let report = derived.report();
            assert_eq!((report.read, report.shared), (0, weights), "{number} on {allocation}");
            // A is that of the first two adapters again, and lies beside a B that is not.
            let of_a = subject.layout().factors().iter().map(|of| subject.layout().tensor(of.a).unwrap().bytes);
            assert_eq!(report.copied, if number == 1 { of_a.sum() } else { 0 }, "{number} on {allocation}");
            check_everything(&derived, subject);
            model = derived;
        }
        drop(model);
        comes_back(&registry);
    }
}

#[test]
fn merged_and_deferred_models_are_made_out_of_each_other() {
    let checkpoint = open(&llama(3, 32), 8);
    let file = file_on_all(&checkpoint, 3, 1);
    let adapters = || vec![Adapter::from_checkpoint(file.clone(), 0.75).unwrap()];
    let merged = Subject::new(patched(&checkpoint, adapters()));
    let beside = Subject::new(deferred(&checkpoint, adapters(), DType::F16));
    let some = patched(&checkpoint, adapters()).defer("*.mlp.*", DType::F16).unwrap();
    assert_eq!((some.layout().factors().len(), some.patches().iter().count()), (6, 8));
    let some = Subject::new(some);
    for allocation in ["cuda:0,*", SPLIT] {
        let registry = Registry::described(machine(), Clock::Virtual);
        let plan = |subject: &Subject| subject.planner(&machine(), allocation).depth(1).plan().unwrap();
        let mut model = load(&registry, &merged, &plan(&merged));
        for subject in [&beside, &some, &merged, &some, &beside] {
            let loader = Loader::new(&registry);
            model = Arc::new(loader.derive(&model, &subject.weights, &plan(subject)).unwrap());
            check_everything(&model, subject);
            let report = model.report();
            assert_eq!(report.deferred, subject.layout().factors().len());
        }
        let scales = |model: &Model| model.deferred("model.layers.0.mlp.up_proj.weight").unwrap().scale;
        let elsewhere = subject_plan(&beside, "cpu,*");
        let moved = Loader::new(&registry).relocate(&model, &elsewhere).unwrap();
        assert_eq!((moved.report().read, scales(&moved)), (0, scales(&model)));
        check_everything(&moved, &beside);
        drop(model);
        let refilled =
            Loader::new(&registry).refill(Arc::new(moved), &some.weights, &subject_plan(&some, "cpu,*")).unwrap();
        check_everything(&refilled, &some);
        drop(refilled);
        comes_back(&registry);
    }
}

fn subject_plan(subject: &Subject, allocation: &str) -> tensor_offload::Plan {
    subject.planner(&machine(), allocation).depth(1).plan().unwrap()
}

#[test]
fn a_cache_tells_deferred_models_apart_and_demotes_them() {
    let checkpoint = blocks_model(3);
    let file = file_on_all(&checkpoint, 3, 1);
    let adapters = || vec![Adapter::from_checkpoint(file.clone(), 0.75).unwrap()];
    let with = |dtype| Subject::new(deferred(&checkpoint, adapters(), dtype));
    let (half, other) = (with(DType::F16), with(DType::BF16));
    let plan = subject_plan(&half, "cuda:0,*");
    // Both have the same sizes, so one plan is for both.
    let [id, id_of_other] = [&half, &other].map(|subject| Identity::of(&subject.weights, &plan));
    assert!(id != id_of_other && id == Identity::of(&with(DType::F16).weights, &plan));
    let weak = Adapter::from_checkpoint(file.clone(), 0.5).unwrap();
    let strength = deferred(&checkpoint, vec![weak], DType::F16);
    assert_ne!(id, Identity::of(&strength, &plan));
    let registry = Registry::described(machine(), Clock::Virtual);
    let cache = tensor_offload::ModelCache::new();
    cache.insert("model", load(&registry, &half, &plan), tensor_offload::Retention::Keep);
    let slots = plan.demoted(half.layout(), registry.machine()).unwrap().slots().bytes();
    let room = machine().device(GPU0).unwrap().total - slots;
    let report = cache.make_room(&registry, GPU0, room, tensor_offload::cache::Evict::Kept).unwrap();
    assert_eq!(report.demoted.len(), 1, "{report}");
    let model = cache.get("model").unwrap();
    check_everything(&model, &half);
    let mut streamer = Streamer::new(&model).unwrap();
    for layer in layers(&streamer) {
        assert_eq!(check_guard(&streamer.layer(layer).unwrap(), &half, GPU0).unwrap(), 3);
    }
}

#[test]
fn what_is_no_product_is_refused_by_its_kind() {
    let checkpoint = open(
        &[spec("a.weight", DType::F32, &[8, 8]), spec("a.bias", DType::F32, &[8]), spec("n.weight", DType::F32, &[8])],
        1,
    );
    let f = |name: &str, shape: &[u64]| f32s(name, shape, &numbers(1, shape.iter().product::<u64>() as usize));
    let lora = || vec![f("a.lora_A.weight", &[2, 8]), f("a.lora_B.weight", &[8, 2])];
    let with = |more: Tensor| [lora(), vec![more]].concat();
    let loha = ["hada_w1_a", "hada_w2_a"].map(|part| f(&format!("a.{part}"), &[8, 2]));
    let loha_b = ["hada_w1_b", "hada_w2_b"].map(|part| f(&format!("a.{part}"), &[2, 8]));
    let glora = [("a1", [8, 2]), ("a2", [2, 8]), ("b1", [8, 2]), ("b2", [2, 8])];
    for (tensors, tensor, kind) in [
        (with(f("a.dora_scale", &[8, 1])), "a.weight", "DoRA"),
        ([loha, loha_b].concat(), "a.weight", "LoHa"),
        (vec![f("a.lokr_w1", &[2, 2]), f("a.lokr_w2", &[4, 4])], "a.weight", "LoKr"),
        (glora.map(|(part, shape)| f(&format!("a.{part}.weight"), &shape)).to_vec(), "a.weight", "GLoRA"),
        (vec![f("a.oft_blocks", &[2, 4, 4])], "a.weight", "OFT"),
        (with(f("a.diff", &[8, 8])), "a.weight", "a whole difference"),
        (vec![f("a.set_weight", &[8, 8])], "a.weight", "a whole replacement"),
        (with(f("a.diff_b", &[8])), "a.bias", "a change of a bias"),
        (vec![f("n.w_norm", &[8])], "n.weight", "a whole difference"),
        (with(f32s("a.reshape_weight", &[2], &[8.0, 8.0])), "", ""),
        (
            vec![
                f("a.lora_A.weight", &[2, 12]),
                f("a.lora_B.weight", &[8, 2]),
                f32s("a.reshape_weight", &[2], &[8.0, 12.0]),
            ],
            "a.weight",
            "padding to a larger shape",
        ),
    ] {
        let adapters = vec![Adapter::from_checkpoint(file("adapter", &tensors), 1.0).unwrap()];
        let weights = patched(&checkpoint, adapters.clone());
        let outcome = weights.clone().defer("*", DType::F16);
        if kind.is_empty() {
            outcome.unwrap();
            continue;
        }
        let error = outcome.unwrap_err();
        let message = error.to_string();
        let Error::Unpatchable { tensor: named, fault } = error else { panic!("{message}") };
        assert_eq!((&*named, *fault), (tensor, AdapterFault::NotDeferred { kind: kind.to_owned() }), "{message}");
        for word in [tensor, kind, "--cast", "--requantise", "--defer PATTERN"] {
            assert!(message.contains(word), "{message}");
        }
        let open = ModelBuilder::new(checkpoint.clone()).with_adapter(adapters[0].clone());
        assert_eq!(open.defer("*", DType::F16).weights().unwrap_err().to_string(), message);
        // The others can be.
        if tensor != "a.weight" {
            weights.defer("a.weight", DType::F16).unwrap();
        }
    }
}

#[test]
fn wrong_types_names_and_ranges_are_told() {
    let checkpoint = open(&[spec("a.weight", DType::F32, &[4, 4]), spec("b.weight", DType::F32, &[4, 4])], 1);
    let weights = patched(&checkpoint, vec![loras(&[("a", 4, 4, 1, 1.0)], 1, 1.0)]);
    let fault = |outcome: Result<Weights>| match outcome.unwrap_err() {
        Error::Unpatchable { tensor, fault } => (tensor, *fault),
        other => panic!("{other}"),
    };
    for dtype in [DType::F8E4M3, DType::I32, DType::Q8_0, DType::F64] {
        let (tensor, fault) = fault(weights.clone().defer("*", dtype));
        assert_eq!((&*tensor, fault), ("a.weight", AdapterFault::FactorType { dtype }));
    }
    let error = weights.clone().defer("nothing", DType::F16).unwrap_err();
    assert!(matches!(&error, Error::Missing(Missing::Named { pattern }) if pattern == "nothing"), "{error}");
    // What no adapter changes stays.
    assert!(weights.clone().defer("b", DType::F16).unwrap().layout() == weights.layout());
    assert!(Weights::new(checkpoint).defer("*", DType::F16).unwrap().layout().factors().is_empty());

    for name in ["a.lora_B.weight", "a.lora.weight"] {
        let crowded = open(&[spec("a.weight", DType::F32, &[4, 4]), spec(name, DType::F32, &[4, 4])], 1);
        let weights = patched(&crowded, vec![loras(&[("a", 4, 4, 1, 1.0)], 1, 1.0)]);
        let (tensor, fault) = fault(weights.defer("*", DType::F16));
        let name = name.strip_suffix(".weight").filter(|name| name.ends_with("lora")).unwrap_or(name).to_owned();
        assert_eq!((&*tensor, fault), ("a.weight", AdapterFault::FactorName { name }));
    }

    let large = [f32s("b.lora_A.weight", &[1, 4], &[1e5; 4]), f32s("b.lora_B.weight", &[4, 1], &[1e-5; 4])];
    let large = vec![Adapter::from_checkpoint(file("large", &large), 1.0).unwrap()];
    let weights = patched(weights.checkpoint(), large);
    let (tensor, found) = fault(weights.clone().defer("*", DType::F16));
    assert_eq!(
        (&*tensor, found),
        ("b.weight", AdapterFault::FactorRange { value: "100000".to_owned(), dtype: DType::F16 })
    );
    let narrow = weights.defer("*", DType::BF16).unwrap();
    assert!(fault(narrow.defer("*", DType::F16)).1.to_string().contains("F32"));
}

/// A later call decides for the type, and other settings go with it in any order.
#[test]
fn casts_and_other_settings_go_with_deferred_changes() {
    let checkpoint = open(&llama(2, 32), 6);
    let file = file_on_all(&checkpoint, 3, 1);
    let adapters = || vec![Adapter::from_checkpoint(file.clone(), 0.75).unwrap()];
    let weights = || patched(&checkpoint, adapters());
    let twice = weights().defer("*", DType::F32).unwrap().defer("*.mlp.*", DType::F16).unwrap();
    let types =
        |weights: &Weights, name: &str| weights.layout().tensor(weights.layout().find(name).unwrap()).unwrap().dtype;
    assert_eq!(types(&twice, "model.layers.0.mlp.up_proj.lora_A.weight"), DType::F16);
    assert_eq!(types(&twice, "model.layers.0.self_attn.q_proj.lora_B.weight"), DType::F32);
    let cast = |weights: Weights| weights.cast("*", DType::F16).unwrap();
    let (before, after) =
        (cast(weights()).defer("*", DType::F32).unwrap(), cast(weights().defer("*", DType::F32).unwrap()));
    assert!(before.layout() == after.layout() && before.layout().factors().len() == 10);
    let plain = cast(Weights::new(checkpoint.clone()));
    for tensor in plain.layout().tensors() {
        let wanted = read_one(&plain, &tensor.name);
        assert!(
            read_one(&before, &tensor.name) == wanted && read_one(&after, &tensor.name) == wanted,
            "{}",
            tensor.name
        );
    }
    let plans = |weights: &Weights| Identity::of(weights, &subject_plan(&Subject::new(weights.clone()), "cpu,*"));
    assert_eq!(plans(&before), plans(&after));
}

/// Codes of eight bits whose scales are recomputed where they are merged, and stay where the change is deferred.
#[test]
fn scales_stay_with_deferred_weights() {
    let tensors = mixed(2);
    let checkpoint = open(&tensors, 4);
    let weights = || patched(&checkpoint, two_loras(&tensors, 4)).scales(ScalePolicy::Recompute).unwrap();
    let scale = "model.layers.0.mlp.down_proj.weight_scale";
    let changes = |weights: &Weights| {
        let of = |name: &str| weights.patches().tensor(weights.checkpoint().find(name).unwrap()).is_some();
        [of("model.layers.0.mlp.down_proj.weight"), of(scale)]
    };
    assert_eq!(changes(&weights()), [true, true]);
    let one = weights().defer("model.layers.0.mlp.down_proj.weight", DType::F32).unwrap();
    assert_eq!(changes(&one), [false, false]);
    let later = patched(&checkpoint, two_loras(&tensors, 4)).defer("*.down_proj", DType::F32).unwrap();
    let later = later.scales(ScalePolicy::Recompute).unwrap();
    assert_eq!((changes(&later), later.layout().factors().len()), ([false, false], 2));
    assert_eq!(reference::named(&checkpoint, scale).3, read_one(&later, scale));
}

/// A head that shares its bytes with the embedding goes on sharing them, since none changes.
#[test]
fn tied_weights_stay_tied() {
    let tied = tied(9);
    let checkpoint = tied.checkpoint().clone();
    let adapters = || vec![loras(&[("lm_head", 32, 16, 2, 2.0)], 3, 1.0)];
    let merged = patched(&checkpoint, adapters());
    let subject = Subject::new(deferred(&checkpoint, adapters(), DType::BF16));
    let factors = 2 * (2 * 16 + 32 * 2);
    assert_eq!(merged.layout().bytes(), checkpoint.layout().bytes() + 1024);
    assert_eq!(subject.layout().bytes(), checkpoint.layout().bytes() + factors);
    // One that came to differ stays apart if it was cast with the change.
    let cast = merged.cast("lm_head.weight", DType::F32).unwrap().defer("*", DType::BF16).unwrap();
    assert_eq!(cast.layout().bytes(), checkpoint.layout().bytes() + 2048 + factors);
    for subject in [subject, Subject::new(cast)] {
        let registry = Registry::described(machine(), Clock::Virtual);
        for allocation in ["cuda:0,*", "cpu,*"] {
            let model = load(&registry, &subject, &subject_plan(&subject, allocation));
            check_everything(&model, &subject);
            let mut streamer = Streamer::new(&model).unwrap();
            let head = streamer.layer_named("lm_head").unwrap();
            assert_eq!(head.deferred("lm_head.weight").unwrap().scale, 1.0);
            assert!(head.to_vec::<half::bf16>("lm_head.lora_A.weight").unwrap().len() == 32);
        }
    }
    // A model without a head, which the adapter brings.
    let headless = open(&[spec("model.embed_tokens.weight", DType::BF16, &[32, 16])], 2);
    let headless = headless.with_layout(headless.layout().clone().tie_embeddings()).unwrap();
    let subject = Subject::new(deferred(&headless, adapters(), DType::BF16));
    assert_eq!(subject.layout().bytes(), headless.layout().bytes() + factors);
    assert!(subject.weights.report().untied.is_some() && subject.layout().find("lm_head.weight").is_some());
    check_everything(&load_on_cpu(&subject.weights), &subject);
}

/// Codes of bitsandbytes: the tensors beside them stay as well.
#[test]
fn packed_weights_are_deferred_if_they_are_named() {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/packed");
    let base = Checkpoint::open(data.join("base.safetensors")).unwrap();
    let lora = || vec![Adapter::open(data.join("lora.safetensors"), 1.0).unwrap()];
    let weights = Weights::deferred(base.clone(), lora(), Matching::Strict, &[("*", DType::F32)]).unwrap();
    assert_eq!((weights.layout().factors().len(), weights.patches().iter().count()), (4, 0));
    for (tensor, info) in base.layout().tensor_ids().zip(base.layout().tensors()) {
        assert!(read_one(&weights, &info.name) == reference::bytes(&base, tensor), "{}", info.name);
    }
    // a.q is [40, 96], as its note says, and its tensor is of bytes.
    let shape = |name: &str| weights.layout().tensor(weights.layout().find(name).unwrap()).unwrap().shape.clone();
    assert_eq!((shape("a.q.lora_A.weight")[1], shape("a.q.lora_B.weight")[0]), (96, 40));
    let same = Weights::repacked(base.clone(), lora(), Matching::Strict).unwrap().defer("*", DType::F32).unwrap();
    assert!(same.layout() == weights.layout());
    // The one that is not named is refused as ever, and packed again only if that was asked for.
    let only = [("a.q", DType::F16)];
    let error = Weights::deferred(base.clone(), lora(), Matching::Strict, &only).unwrap_err();
    let Error::Adapter { fault, .. } = &error else { panic!("{error}") };
    assert!(matches!(&**fault, AdapterFault::Packed { tensor, .. } if tensor != "a.q.weight"), "{error}");
    assert!(error.to_string().contains("--defer"), "{error}");
    let some = Weights::deferred(base.clone(), lora(), Matching::AllowPartial, &only).unwrap();
    assert_eq!((some.layout().factors().len(), some.patches().iter().count()), (1, 0));
    let open = |deferred: &str| {
        let open = ModelBuilder::new(base.clone()).with_adapter(lora().remove(0)).defer(deferred, DType::F16);
        open.compute(CPU)
    };
    assert!(open("a.q").weights().is_err());
    let built = open("a.q").requantise().load(&Registry::system()).unwrap();
    assert_eq!(
        (built.report().deferred, built.report().requantised.values),
        (1, (24 * 100 + 16 * 96 + 260 * 64) as u64)
    );
    let built = open("*").load(&Registry::system()).unwrap();
    assert_eq!((built.report().deferred, built.report().patched), (4, 0));
}

/// Nothing has to be known of codes that stay but the shape of their values.
#[test]
fn codes_that_cannot_be_written_stay_where_their_shape_is_known() {
    use DType::{F8E4M3, F16, F32, I8, I32, I64, U8};
    let zeros = |name: &str, dtype: DType, shape: &[u64]| {
        reference::tensor(name, dtype, shape, vec![1; dtype.bytes_of(shape).unwrap() as usize])
    };
    let stated = |shape: [i64; 2]| {
        let bytes = shape.into_iter().flat_map(i64::to_le_bytes).collect();
        reference::tensor("a.q.weight_shape", I64, &[2], bytes)
    };
    let compressed = |shape| {
        vec![zeros("a.q.weight_packed", I32, &[24, 8]), zeros("a.q.weight_scale", F16, &[24, 1]), stated(shape)]
    };
    // Each with the name of the codes, and whether the shape is known to be [24, 64].
    let cases = [
        (
            "a.q.qweight",
            true,
            vec![
                zeros("a.q.qweight", I32, &[8, 24]),
                zeros("a.q.qzeros", I32, &[1, 3]),
                zeros("a.q.scales", F16, &[1, 24]),
            ],
        ),
        (
            "a.q.qweight",
            true,
            vec![
                zeros("a.q.qweight", I32, &[64, 3]),
                zeros("a.q.qzeros", I32, &[1, 3]),
                zeros("a.q.scales", F16, &[1, 24]),
            ],
        ),
        ("a.q.weight", true, vec![zeros("a.q.weight", I8, &[24, 64]), zeros("a.q.SCB", F32, &[24])]),
        ("a.q.weight", true, vec![zeros("a.q.weight", U8, &[24, 32]), zeros("a.q.weight_scale", U8, &[24, 2])]),
        ("a.q.weight_packed", true, compressed([24, 64])),
        ("a.q.weight_packed", false, compressed([24, 48])),
        ("a.q.W_q", false, vec![zeros("a.q.W_q", U8, &[24, 32]), zeros("a.q.meta", U8, &[4])]),
        // A scale that is not understood.
        ("a.q.weight", true, vec![zeros("a.q.weight", F8E4M3, &[24, 64]), zeros("a.q.weight_zero_point", F32, &[7])]),
    ];
    let lora = || vec![loras(&[("a.q", 24, 64, 2, 1.0)], 1, 0.5)];
    for (name, known, tensors) in cases {
        let base = file("model", &tensors);
        assert!(Weights::patched(base.clone(), lora(), Matching::Strict).is_err(), "{tensors:?}");
        assert!(Weights::repacked(base.clone(), lora(), Matching::Strict).is_err());
        let outcome = Weights::deferred(base.clone(), lora(), Matching::Strict, &[("a.q", F16)]);
        if !known {
            assert!(
                matches!(outcome, Err(Error::Adapter { fault, .. }) if matches!(*fault, AdapterFault::Packed { .. }))
            );
            continue;
        }
        let weights = outcome.unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!((weights.layout().factors().len(), weights.patches().iter().count()), (1, 0));
        let model = load_on_cpu(&weights);
        for (name, _, _, bytes) in &tensors {
            assert!(read(&model, name).unwrap() == *bytes, "{name}");
        }
        let of = model.deferred(name).unwrap();
        assert_eq!((of.a.shape(), of.b.shape(), of.a.name()), (&[2, 64][..], &[24, 2][..], "a.q.lora_A.weight"));
        // Factors of another shape, and other kinds.
        let wide = vec![loras(&[("a.q", 24, 60, 2, 1.0)], 1, 0.5)];
        assert!(Weights::deferred(base.clone(), wide, Matching::Strict, &[("*", F16)]).is_err());
        let lokr = [f32s("a.q.lokr_w1", &[4, 8], &[0.5; 32]), f32s("a.q.lokr_w2", &[6, 8], &[0.5; 48])];
        let lokr = vec![Adapter::from_checkpoint(file("lokr", &lokr), 1.0).unwrap()];
        let error = Weights::deferred(base, lokr, Matching::Strict, &[("*", F16)]).unwrap_err();
        assert!(error.to_string().contains("LoKr"), "{error}");
    }
    let layout =
        deferred(&open(&llama(1, 32), 1), vec![on_all(&open(&llama(1, 32), 1), 1, 1, 1.0)], F16).layout().clone();
    assert_eq!(open(&llama(1, 32), 1).with_layout(layout).unwrap_err().kind(), ErrorKind::Invalid);
}

#[test]
fn blocks_without_a_policy_are_refused_and_all_policies_are_named() {
    let checkpoint = blocks_model(1);
    let weights = patched(&checkpoint, vec![on_all(&checkpoint, 2, 1, 1.0)]);
    let mut dst = vec![0; 64 * 64 * 4];
    let tensor = weights.patches().iter().next().unwrap().0;
    let error = weights.read(tensor, &mut dst[..weights.layout().tensor(tensor).unwrap().bytes as usize]).unwrap_err();
    for word in ["Weights::cast", "Weights::requantise", "Weights::defer"] {
        assert!(error.to_string().contains(word), "{error}");
    }
    let weights = deferred(&checkpoint, vec![on_all(&checkpoint, 2, 1, 1.0)], DType::F16);
    let factor = weights.layout().factors()[0].a;
    let error = weights.read(factor, &mut dst[..10]).unwrap_err();
    assert_eq!((error.kind(), error.to_string().contains("lora_A")), (ErrorKind::WrongSize, true), "{error}");
}

/// A life of a deferred model: loaded, streamed, derived, relocated.
fn whole_life(registry: &Registry, first: &Subject, second: &Subject) -> Result<()> {
    let machine = machine();
    let plan = |subject: &Subject| subject.planner(&machine, "cuda:0,8kb;xpu:0,8kb;disk,8kb;cpu,*").depth(1).plan();
    let model = Arc::new(Loader::new(registry).workers(1).load(&first.weights, &plan(first)?)?);
    let derived = Arc::new(Loader::new(registry).workers(1).derive(&model, &second.weights, &plan(second)?)?);
    drop(model);
    let mut streamer = Streamer::new(&derived)?;
    for layer in layers(&streamer) {
        check_guard(&streamer.layer(layer)?, second, GPU0)?;
    }
    Ok(())
}

#[test]
fn whatever_operation_fails_nothing_is_kept() {
    let checkpoint = blocks_model(2);
    let subject = |strength| {
        let adapters = vec![on_all(&checkpoint, 3, 1, strength), on_all(&checkpoint, 2, 2, 1.0)];
        Subject::new(deferred(&checkpoint, adapters, DType::F16))
    };
    let subjects = Arc::new((subject(0.5), subject(2.0)));
    let faulty = |countdown: &Countdown| {
        let devices = Simulated::new(machine(), Clock::Virtual);
        Registry::new([Arc::new(Faulty::new(devices, countdown.clone())) as _])
    };
    let countdown = Countdown::new();
    whole_life(&faulty(&countdown), &subjects.0, &subjects.1).unwrap();
    let calls = countdown.calls();
    assert!(calls > 50 && countdown.calls_of(Operation::Copy) > 20, "{calls}");
    for n in 1..=calls {
        let subjects = Arc::clone(&subjects);
        let countdown = Countdown::new();
        let registry = faulty(&countdown);
        without_hanging(format!("operation {n} of {calls} failing"), move || {
            countdown.fail_nth(n);
            if let Err(error) = whole_life(&registry, &subjects.0, &subjects.1) {
                assert_eq!(error.kind(), ErrorKind::DeviceLost, "{error}");
            }
            comes_back(&registry);
        });
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Any sizes, any number of adapters with any strengths, some of which change rows.
    #[test]
    fn any_stack_of_adapters_is_the_merged_weights_product(
        part in 1u64..20,
        cols in 1u64..70,
        stack in prop::collection::vec((1u64..5, -2.0f32..2.0, 0usize..4), 1..5),
        dtype in prop::sample::select(&TYPES[..]),
        base in prop::sample::select(&TYPES[..]),
    ) {
        let checkpoint = open(&[spec("blocks.0.attn.qkv.weight", base, &[3 * part, cols])], part);
        let adapters = || stack.iter().zip(1..).map(|(&(rank, strength, target), seed)| {
            let (name, rows) = [("qkv", 3 * part), ("to_q", part), ("to_k", part), ("to_v", part)][target];
            loras(&[(&format!("blocks.0.attn.{name}"), rows, cols, rank, 1.5)], seed, strength)
        }).collect::<Vec<_>>();
        let merged = patched(&checkpoint, adapters()).cast_floats(DType::F32).unwrap();
        check(&deferred(&checkpoint, adapters(), dtype), &merged, dtype);
    }
}

/// `offload` checks every tensor against what the weights give, factors too.
#[test]
fn the_example_shows_deferred_weights_and_merge_does_not_have_them() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    let model = path("model.gguf");
    let mut file = Gguf::new("llama");
    for layer in 0..3 {
        for (name, dtype) in [("attn_q", DType::Q8_0), ("ffn_up", DType::IQ2_XXS)] {
            file = file.some(&format!("blk.{layer}.{name}.weight"), dtype, &[64, 256]);
        }
    }
    std::fs::write(&model, file.build()).unwrap();
    let factors = (0..3).flat_map(|layer| {
        ["attn_q", "ffn_up"].into_iter().flat_map(move |name| {
            let name = format!("blk.{layer}.{name}");
            [
                f32s(&format!("{name}.lora_A.weight"), &[4, 256], &numbers(layer, 1024)),
                f32s(&format!("{name}.lora_B.weight"), &[64, 4], &numbers(layer + 9, 256)),
            ]
        })
    });
    let factors: Vec<Tensor> = factors.collect();
    let specs: Vec<_> = factors.iter().map(|(name, dtype, shape, _)| spec(name.clone(), *dtype, shape)).collect();
    let lora = path("lora.safetensors");
    tensor_offload::checkpoint::write_safetensors(Path::new(&lora), &specs, &Default::default(), |tensor, out| {
        out.put(&factors[tensor].3)
    })
    .unwrap();
    let adapter = format!("{lora}:0.5");
    let common = [model.as_str(), "--adapter", adapter.as_str(), "--steps", "1", "--compute-ms", "0"];
    let devices = ["--device", "cuda:0=1mb,link=1", "--device", "cpu=64mb"];
    let args = |more: &[&'static str]| [&common[..], &devices[..], more].concat();
    let report = run::json_of("offload", &args(&["--defer", "bf16"]));
    let deferred = report["deferred"].as_array().unwrap();
    assert_eq!((deferred.len(), &report["load"]["deferred"], &report["load"]["patched"]), (6, &6.into(), &0.into()));
    assert_eq!(report["load"]["deferred_bytes"], 6 * 2 * (4 * 256 + 64 * 4));
    let first = &deferred[0];
    assert_eq!((&first["weight"], &first["scale"]), (&"blk.0.attn_q.weight".into(), &0.5.into()));
    assert_eq!((&first["b"], &first["b_shape"]), (&"blk.0.attn_q.lora_B.weight".into(), &serde_json::json!([64, 4])));
    assert_eq!((&first["a_shape"], &first["dtype"]), (&serde_json::json!([4, 256]), &"BF16".into()));
    let text = run::works("offload", &args(&["--defer", "F32"]));
    assert!(text.contains("6 weights deferred with") && text.contains("every tensor matches"), "{text}");
    // Some deferred, the others requantised or refused.
    let (_, message) = run::fails("offload", &args(&["--defer", "*.ffn_up=f16"]));
    assert!(message.contains("attn_q"), "{message}");
    let report = run::json_of("offload", &args(&["--defer", "*.ffn_up=f16", "--requantise"]));
    assert_eq!((&report["load"]["deferred"], &report["load"]["patched"]), (&3.into(), &3.into()));
    for (text, word) in [("nothing=f16", "nothing"), ("*=f15", "f15"), ("q4_0", "F32, F16 or BF16")] {
        let text = ["--defer", text];
        let (_, message) = run::fails("offload", &[&common[..], &devices[..], &text[..]].concat());
        assert!(message.contains(word), "{message}");
    }
    let (kind, message) = run::fails("merge", &[&common[..3], &["--out", "x.gguf", "--defer", "bf16"]].concat());
    assert!(kind == "Usage" && message.contains("--defer"), "{kind}: {message}");
}
