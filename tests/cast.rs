//! Weights that are cast to another element type while they load: the bytes, the plan, and what is refused.

mod support;

use std::sync::Arc;

use half::{bf16, f16};
use support::watched::Watched;
use support::*;
use tensor_offload::backend::Clock;
use tensor_offload::cache::Identity;
use tensor_offload::checkpoint::{TensorInfo, TensorSpec};
use tensor_offload::error::{CastFault, Mismatch, Missing, Packing};
use tensor_offload::{
    Checkpoint, DType, DeviceId, Error, ErrorKind, Loader, Matching, Model, Plan, Registry, Rounding, ScalePolicy,
    TensorId, Weights,
};

const SPLIT: &str = "cuda:0,40kb;cuda:1,40kb;xpu:0,30kb;disk,30kb;cpu,*";

/// All that stands for real numbers, without the eight-bit types.
const WIDE: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

fn checkpoint(tensors: &[TensorSpec], seed: u64) -> Checkpoint {
    Checkpoint::from_bytes(format!("model-{seed}"), safetensors(tensors, seed)).unwrap()
}

fn weights(tensors: &[TensorSpec]) -> Weights {
    checkpoint(tensors, 1).into()
}

/// One element of a type that `half` or Rust has, as f32.
fn lifted(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    let pairs = || bytes.as_chunks::<2>().0.iter();
    match dtype {
        DType::F32 => bytes.as_chunks::<4>().0.iter().map(|raw| f32::from_le_bytes(*raw)).collect(),
        DType::F16 => pairs().map(|raw| f16::from_le_bytes(*raw).to_f32()).collect(),
        DType::BF16 => pairs().map(|raw| bf16::from_le_bytes(*raw).to_f32()).collect(),
        DType::F8E4M3 => bytes.iter().map(|&code| eight_bits::<4, 3>(code)).collect(),
        DType::F8E5M2 => bytes.iter().map(|&code| eight_bits::<5, 2>(code)).collect(),
        other => panic!("{other}"),
    }
}

/// A code of eight bits by the definition of the OCP formats: E4M3 has one NaN and no infinity.
fn eight_bits<const EXPONENT: u32, const MANTISSA: u32>(code: u8) -> f32 {
    let (exponent, mantissa) =
        (u32::from(code) >> MANTISSA & ((1 << EXPONENT) - 1), u32::from(code) & ((1 << MANTISSA) - 1));
    let bias = (1 << (EXPONENT - 1)) - 1;
    let fraction = mantissa as f32 / (1u32 << MANTISSA) as f32;
    let magnitude = match (exponent, mantissa) {
        (15, 7) if EXPONENT == 4 => f32::NAN,
        (31, 0) if EXPONENT == 5 => f32::INFINITY,
        (31, _) if EXPONENT == 5 => f32::NAN,
        (0, _) => fraction * 2f32.powi(1 - bias),
        _ => (1.0 + fraction) * 2f32.powi(exponent as i32 - bias),
    };
    if code & 0x80 != 0 { -magnitude } else { magnitude }
}

/// Values as a type stores them, to the nearest: by `half`, and by trying all codes for eight bits.
fn stored(dtype: DType, values: &[f32]) -> Vec<u8> {
    match dtype {
        DType::F32 => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
        DType::F16 => values.iter().flat_map(|&value| f16::from_f32(value).to_le_bytes()).collect(),
        DType::BF16 => values.iter().flat_map(|&value| bf16::from_f32(value).to_le_bytes()).collect(),
        DType::F8E4M3 | DType::F8E5M2 => values.iter().map(|&value| nearest(dtype, value)).collect(),
        other => panic!("{other}"),
    }
}

fn nearest(dtype: DType, value: f32) -> u8 {
    if value.is_nan() {
        return 0x7f;
    }
    if value.is_infinite() && dtype == DType::F8E5M2 {
        return if value > 0.0 { 0x7c } else { 0xfc };
    }
    let of = |code: u8| lifted(dtype, &[code])[0];
    let codes = (0..=255u8).filter(|&code| of(code).is_finite() && (code & 0x80 != 0) == value.is_sign_negative());
    let clamped = f64::from(value).clamp(-1e6, 1e6);
    let distance = |code: u8| (f64::from(of(code)) - clamped).abs();
    codes.min_by(|&a, &b| distance(a).total_cmp(&distance(b)).then((a & 1).cmp(&(b & 1)))).unwrap()
}

/// The bytes that a NaN is stored as, whichever it was.
fn one_nan(dtype: DType, bytes: Vec<u8>) -> Vec<u8> {
    let nan: &[u8] = match dtype {
        DType::F32 => &[0, 0, 0xc0, 0x7f],
        DType::F16 => &[0, 0x7e],
        DType::BF16 => &[0xc0, 0x7f],
        _ => &[0x7f],
    };
    let each = bytes.chunks(nan.len());
    each.flat_map(|raw| if lifted(dtype, raw)[0].is_nan() { nan } else { raw }).copied().collect()
}

fn raw(checkpoint: &Checkpoint, tensor: TensorId) -> Vec<u8> {
    let mut bytes = vec![0; checkpoint.layout().tensor(tensor).unwrap().bytes as usize];
    checkpoint.read(tensor, &mut bytes).unwrap();
    bytes
}

fn read_one(weights: &Weights, tensor: TensorId) -> Vec<u8> {
    let mut bytes = vec![0; weights.layout().tensor(tensor).unwrap().bytes as usize];
    weights.read(tensor, &mut bytes).unwrap();
    bytes
}

/// Every tensor as it has to be once it is cast and nothing else: the oracle.
fn oracle(weights: &Weights) -> Vec<Vec<u8>> {
    let (from, to) = (weights.checkpoint().layout(), weights.layout());
    let cast = |tensor: TensorId| {
        let (old, new) = (from.tensor(tensor).unwrap().dtype, to.tensor(tensor).unwrap().dtype);
        let bytes = raw(weights.checkpoint(), tensor);
        if old == new { bytes } else { one_nan(new, stored(new, &lifted(old, &bytes))) }
    };
    to.tensor_ids().map(cast).collect()
}

/// Every tensor of a model has the type of the weights' layout, and these bytes.
fn check(model: &Model, weights: &Weights, wanted: &[Vec<u8>]) {
    for (info, wanted) in weights.layout().tensors().iter().zip(wanted) {
        let view = model.tensor(&info.name).expect("a tensor of the model");
        assert_eq!((view.dtype(), view.shape()), (info.dtype, &*info.shape), "{}", info.name);
        assert_eq!(view.size() as u64, info.bytes, "{}", info.name);
        assert!(read(model, &info.name).unwrap() == *wanted, "{} on {}", info.name, view.device());
    }
}

fn plan(weights: &Weights, allocation: &str) -> Plan {
    let machine = machine();
    let planner = tensor_offload::Planner::new(weights.layout(), &machine).compute(GPU0);
    planner.allocation(allocation.parse().unwrap()).depth(1).plan().unwrap()
}

fn load(registry: &Registry, weights: &Weights, plan: &Plan) -> Arc<Model> {
    Arc::new(Loader::new(registry).workers(2).load(weights, plan).unwrap())
}

fn dtype_of(weights: &Weights, name: &str) -> DType {
    info(weights, name).dtype
}

fn info<'a>(weights: &'a Weights, name: &str) -> &'a TensorInfo {
    let layout = weights.layout();
    layout.tensor(layout.find(name).expect(name)).unwrap()
}

/// One tensor of every value that sixteen bits have, or of f32 values all over the range.
fn every_value(dtype: DType) -> Checkpoint {
    let bytes: Vec<u8> = match dtype {
        DType::F8E4M3 | DType::F8E5M2 => (0..=u8::MAX).collect(),
        DType::F16 | DType::BF16 => (0..=u16::MAX).flat_map(u16::to_le_bytes).collect(),
        _ => (0..=u32::MAX).step_by(65_521).flat_map(u32::to_le_bytes).collect(),
    };
    let count = (bytes.len() / dtype.element_bytes().unwrap()) as u64;
    let mut file = safetensors(&[spec("w.weight", dtype, &[count])], 1);
    let begin = file.len() - bytes.len();
    file[begin..].copy_from_slice(&bytes);
    Checkpoint::from_bytes(format!("every {dtype}"), file).unwrap()
}

#[test]
fn every_value_is_cast_as_half_casts_it() {
    let eight = [DType::F8E4M3, DType::F8E5M2];
    for from in WIDE.into_iter().chain(eight) {
        for to in WIDE.into_iter().chain(eight).filter(|to| *to != from) {
            let weights = Weights::new(every_value(from)).cast("w", to).unwrap();
            assert_eq!(dtype_of(&weights, "w.weight"), to);
            let wanted = &oracle(&weights)[0];
            let got = read_one(&weights, TensorId::new(0));
            let size = to.element_bytes().unwrap();
            let other = got.chunks(size).zip(wanted.chunks(size)).position(|(got, wanted)| got != wanted);
            assert_eq!(other, None, "{from} to {to}: {got:?}", got = other.map(|at| &got[at * size..][..size]));
        }
    }
}

#[test]
fn values_beyond_the_range_are_counted() {
    let mut file = safetensors(&[spec("w.weight", DType::F32, &[5])], 1);
    let begin = file.len() - 20;
    let values = [449.0f32, 1e9, f32::NEG_INFINITY, f32::NAN, 1.0];
    file[begin..].copy_from_slice(&values.map(f32::to_le_bytes).concat());
    let weights = Weights::new(Checkpoint::from_bytes("m", file).unwrap()).cast("w", DType::F8E4M3).unwrap();
    let mut bytes = [0; 5];
    let outcome = weights.read(TensorId::new(0), &mut bytes).unwrap();
    // 449 is nearest to 448, which is no loss of range.
    assert_eq!((outcome.saturated, bytes), (2, [0x7e, 0x7e, 0xfe, 0x7f, 0x38]));
    let registry = Registry::described(machine(), Clock::Virtual);
    assert_eq!(load(&registry, &weights, &plan(&weights, "cpu,*")).report().saturated, 2);
}

#[test]
fn every_placement_gives_the_same_bytes() {
    let mut tensors = mixed(4);
    tensors.retain(|tensor| !tensor.name.contains("down_proj"));
    for to in [DType::F32, DType::F16, DType::BF16, DType::F8E5M2] {
        let cast = weights(&tensors).cast_floats(to).unwrap();
        let wanted = oracle(&cast);
        for (index, allocation) in ["cpu,*", "cuda:0,*", "disk,*", "xpu:0,*", SPLIT].into_iter().enumerate() {
            let watched = Watched::new(machine(), if index % 2 == 0 { Clock::Virtual } else { Clock::Wall });
            let plan = plan(&cast, allocation);
            assert_eq!(plan.bytes(), cast.layout().bytes());
            let model = load(&watched.registry, &cast, &plan);
            check(&model, &cast, &wanted);
            let report = model.report();
            assert_eq!(report.bytes, cast.layout().bytes());
            assert_eq!(report.read, cast.checkpoint().layout().bytes(), "every tensor is read once");
            assert_eq!(report.patched, cast.patches().iter().count());
            let mut streamer = tensor_offload::Streamer::new(&model).unwrap();
            let subject = Subject::new(cast.clone());
            assert!(subject.merged == wanted);
            check_pass(&mut streamer, &subject).unwrap();
            drop((streamer, model));
            comes_back(&watched.registry);
        }
    }
}

/// Tensors of more than two staging buffers, before and after: every part lies where it belongs.
#[test]
fn a_large_tensor_is_cast_in_parts() {
    let rows = (9 << 20) + 5;
    for (from, to) in [(DType::BF16, DType::F32), (DType::F32, DType::F8E4M3)] {
        let cast = weights(&[spec("w.weight", from, &[rows])]).cast_floats(to).unwrap();
        let machine = described(&["cpu=256mb", "cuda:0=128mb"]);
        let mut homes = Vec::new();
        for allocation in ["cuda:0,*", "cpu,*"] {
            let registry = Registry::described(machine.clone(), Clock::Virtual);
            let planner = tensor_offload::Planner::new(cast.layout(), &machine).compute(GPU0).depth(0);
            let plan = planner.allocation(allocation.parse().unwrap()).plan().unwrap();
            let model = Loader::new(&registry).workers(1).load(&cast, &plan).unwrap();
            homes.push(read(&model, "w.weight").unwrap());
        }
        let file = raw(cast.checkpoint(), TensorId::new(0));
        assert!(homes[0] == homes[1] && homes[0] == read_one(&cast, TensorId::new(0)));
        let places = (0..rows as usize).step_by(65_537).chain([rows as usize - 1]);
        let (old, new) = (from.element_bytes().unwrap(), to.element_bytes().unwrap());
        for at in places {
            let wanted = stored(to, &lifted(from, &file[at * old..][..old]));
            assert_eq!(homes[0][at * new..][..new], wanted, "{from} to {to} at {at}");
        }
    }
}

/// What a cast takes on the host beyond the plan is a bounded part of the tensor, not a copy in f32.
#[test]
fn a_load_that_casts_takes_little_beside_the_plan() {
    let cast = weights(&[spec("w.weight", DType::BF16, &[40 << 20])]).cast_floats(DType::F32).unwrap();
    let machine = described(&["cpu=512mb", "cuda:0=256mb"]);
    let watched = Watched::new(machine.clone(), Clock::Virtual);
    let planner = tensor_offload::Planner::new(cast.layout(), &machine).compute(GPU0).depth(0);
    let plan = planner.allocation("cuda:0,*".parse().unwrap()).plan().unwrap();
    let model = Loader::new(&watched.registry).workers(1).load(&cast, &plan).unwrap();
    assert_eq!(model.bytes()[&GPU0], 160 << 20);
    assert!(watched.peak(CPU) <= 2 * (16 << 20), "{} on the host", watched.peak(CPU));
}

/// Adapters change the values before the one rounding, and cast or not the change is the same.
#[test]
fn an_adapter_is_merged_at_full_precision_and_rounded_once() {
    let tensors = llama(2, 40);
    let adapters = || two_loras(&tensors, 5);
    let patched = Weights::patched(checkpoint(&tensors, 5), adapters(), Matching::Strict).unwrap();
    let whole = patched.clone().cast_floats(DType::F32).unwrap();
    let reference = merged_in_f64(whole.checkpoint(), &tensors, 5);
    let layout = whole.layout().clone();
    for tensor in layout.tensor_ids() {
        let name = &layout.tensor(tensor).unwrap().name;
        let values = lifted(DType::F32, &read_one(&whole, tensor));
        for (value, wanted) in values.iter().zip(&reference[tensor.index()]) {
            assert!((f64::from(*value) - wanted).abs() < 2e-5 * wanted.abs().max(1.0), "{name}: {value} for {wanted}");
        }
        // Rounded once: what each type has is the rounding of what f32 has.
        for to in [DType::F16, DType::BF16, DType::F8E4M3, DType::F8E5M2] {
            let cast = patched.clone().cast("*", to).unwrap();
            assert!(read_one(&cast, tensor) == stored(to, &values), "{name} as {to}");
        }
    }
    let registry = Registry::described(machine(), Clock::Virtual);
    for to in [DType::F32, DType::F16] {
        let cast = patched.clone().cast_floats(to).unwrap();
        let wanted: Vec<Vec<u8>> = cast.layout().tensor_ids().map(|tensor| read_one(&cast, tensor)).collect();
        for allocation in ["cpu,*", "cuda:0,*", "disk,*", SPLIT] {
            check(&load(&registry, &cast, &plan(&cast, allocation)), &cast, &wanted);
        }
    }
}

/// `W + sum of scale up down`, in f64.
fn merged_in_f64(checkpoint: &Checkpoint, tensors: &[TensorSpec], seed: u64) -> Vec<Vec<f64>> {
    let wide = |checkpoint: &Checkpoint, name: &str| -> Option<(Vec<u64>, Vec<f64>)> {
        let tensor = checkpoint.find(name)?;
        let info = checkpoint.layout().tensor(tensor).unwrap();
        let values = lifted(info.dtype, &raw(checkpoint, tensor)).into_iter().map(f64::from);
        Some((info.shape.clone(), values.collect()))
    };
    let merge = |spec: &TensorSpec| {
        let (shape, mut values) = wide(checkpoint, &spec.name).unwrap();
        for (factors, strength) in factors_of_two_loras(tensors, seed) {
            let module = spec.name.strip_suffix(".weight").unwrap();
            let Some((_, up)) = wide(&factors, &format!("{module}.lora_B.weight")) else { continue };
            let (down_shape, down) = wide(&factors, &format!("{module}.lora_A.weight")).unwrap();
            let alpha = wide(&factors, &format!("{module}.alpha")).unwrap().1[0];
            let (rank, cols) = (down_shape[0] as usize, shape[1] as usize);
            for (index, value) in values.iter_mut().enumerate() {
                let (row, col) = (index / cols, index % cols);
                let sum: f64 = (0..rank).map(|k| up[row * rank + k] * down[k * cols + col]).sum();
                *value += f64::from(strength) * alpha / rank as f64 * sum;
            }
        }
        values
    };
    tensors.iter().map(merge).collect()
}

/// Every kind of step, those among them that work on whole rows or on the whole weight, and on experts in a stack.
#[test]
fn all_kinds_of_adapters_are_rounded_once() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/peft_kinds");
    let mut changed = 0;
    for (base, adapter) in [
        ("base", "boft"),
        ("base", "boft_butterfly"),
        ("base", "loha"),
        ("base", "lokr"),
        ("base", "oft"),
        ("base", "ia3"),
        ("base_experts", "experts"),
        ("base_dora_embedding", "dora_embedding"),
    ] {
        let base = Checkpoint::open(format!("{folder}/{base}.safetensors")).unwrap();
        let adapter = tensor_offload::Adapter::open(format!("{folder}/adapter_{adapter}"), 0.7).unwrap();
        let patched = Weights::patched(base, vec![adapter], Matching::Strict).unwrap();
        let (wide, narrow) = (patched.clone().cast_floats(DType::F32), patched.clone().cast_floats(DType::BF16));
        let (wide, narrow) = (wide.unwrap(), narrow.unwrap());
        for (tensor, patch) in patched.patches().iter() {
            let values = lifted(DType::F32, &read_one(&wide, tensor));
            assert!(read_one(&narrow, tensor) == stored(DType::BF16, &values));
            let own = patched.layout().tensor(tensor).unwrap().dtype;
            assert!(read_one(&patched, tensor) == stored(own, &values));
            let (file, mut out) = (raw(patched.checkpoint(), tensor), vec![0; values.len() * 2]);
            let cast = narrow.patches().tensor(tensor).unwrap();
            cast.apply_from(&file, &[], &mut out).unwrap();
            assert!(out == read_one(&narrow, tensor) && patch.dtype() == own);
            changed += 1;
        }
    }
    assert!(changed >= 8);
}

#[test]
fn stochastic_rounding_holds_for_casts() {
    let tensors = llama(1, 64);
    let (seeded, other) = (Rounding::Stochastic { seed: 3 }, Rounding::Stochastic { seed: 4 });
    let base = || Weights::new(checkpoint(&tensors, 1)).cast_floats(DType::F8E4M3).unwrap();
    let before = Weights::new(checkpoint(&tensors, 1)).rounding(seeded).cast_floats(DType::F8E4M3).unwrap();
    let (cast, nearest) = (base().rounding(seeded), base());
    let tensor = TensorId::new(0);
    assert!(read_one(&cast, tensor) == read_one(&before, tensor), "in whichever order it is said");
    assert!(read_one(&cast, tensor) != read_one(&nearest, tensor));
    assert!(read_one(&cast, tensor) != read_one(&base().rounding(other), tensor));
    let wanted: Vec<Vec<u8>> = cast.layout().tensor_ids().map(|tensor| read_one(&cast, tensor)).collect();
    let registry = Registry::described(machine(), Clock::Virtual);
    for allocation in ["cpu,*", "cuda:0,*", SPLIT] {
        check(&load(&registry, &cast, &plan(&cast, allocation)), &cast, &wanted);
    }
}

#[test]
fn later_casts_decide_and_the_own_type_undoes_them() {
    let tensors = llama(2, 32);
    let cast = weights(&tensors).cast_floats(DType::F32).unwrap();
    let cast = cast.cast("mlp", DType::F16).unwrap().cast("model.norm.weight", DType::BF16).unwrap();
    assert_eq!(dtype_of(&cast, "model.layers.1.mlp.up_proj.weight"), DType::F16);
    assert_eq!(dtype_of(&cast, "model.layers.1.self_attn.q_proj.weight"), DType::F32);
    assert_eq!(dtype_of(&cast, "model.norm.weight"), DType::BF16);
    assert!(cast.patches().tensor(cast.layout().find("model.norm.weight").unwrap()).is_none());
    let back = cast.cast("*", DType::BF16).unwrap();
    assert_eq!((back.layout(), back.patches().iter().count()), (back.checkpoint().layout(), 0));
    // An adapter's change stays when its cast is undone.
    let patched = Weights::patched(checkpoint(&tensors, 1), two_loras(&tensors, 1), Matching::Strict).unwrap();
    let back = patched.clone().cast("*", DType::F32).unwrap().cast("*", DType::BF16).unwrap();
    assert_eq!(back.layout(), patched.layout());
    let tensor = back.layout().find("model.layers.1.mlp.up_proj.weight").unwrap();
    assert!(read_one(&back, tensor) == read_one(&patched, tensor));
}

#[test]
fn a_cast_to_the_own_type_changes_nothing() {
    let plain = weights(&llama(1, 32));
    let (plain, cast) = (plain.clone(), plain.cast_floats(DType::BF16).unwrap());
    assert_eq!((cast.layout(), cast.patches().iter().count()), (plain.layout(), 0));
    let plan = plan(&plain, SPLIT);
    assert_eq!(Identity::of(&plain, &plan), Identity::of(&cast, &plan));
}

#[test]
fn plans_count_the_new_sizes() {
    // Modules of multiples of 256 bytes, so that slots have no gaps.
    let tensors = llama(3, 128);
    let (plain, cast) = (weights(&tensors), weights(&tensors).cast_floats(DType::F32).unwrap());
    assert_eq!(cast.layout().bytes(), 2 * plain.layout().bytes());
    let (old, new) = (plan(&plain, "cpu,*"), plan(&cast, "cpu,*"));
    assert_eq!((new.bytes(), new.slots().bytes()), (2 * old.bytes(), 2 * old.slots().bytes()));
    // A plan of the one is none for the other.
    let registry = Registry::described(machine(), Clock::Virtual);
    assert_eq!(Loader::new(&registry).load(&cast, &old).unwrap_err().kind(), ErrorKind::Plan);
}

#[test]
fn integers_stay_and_are_refused_alone() {
    let tensors = mixed(2);
    let plain = weights(&tensors);
    let cast = plain.clone().cast("model.layers.1.self_attn", DType::F32).unwrap();
    assert_eq!(dtype_of(&cast, "model.layers.1.self_attn.q_proj.bias"), DType::F32);
    assert_eq!(dtype_of(&cast, "model.layers.0.self_attn.q_proj.bias"), DType::BF16);
    // A pattern of all names what cannot be cast as well; a layer's integers stay.
    let mut plainer = tensors.clone();
    plainer.retain(|tensor| !tensor.name.contains("down_proj"));
    let cast = weights(&plainer).cast("*", DType::F16).unwrap();
    for (name, dtype) in [("model.layers.0.steps", DType::I64), ("model.layers.1.table.codes", DType::U8)] {
        assert_eq!(dtype_of(&cast, name), dtype);
    }
    for (pattern, named, dtype) in [
        ("model.layers.0.steps", "model.layers.0.steps", DType::I64),
        ("mask", "model.layers.0.mask.table", DType::Bool),
    ] {
        let error = plain.clone().cast(pattern, DType::F16).unwrap_err();
        let Error::Uncastable { tensor, to: DType::F16, fault } = &error else { panic!("{error}") };
        assert_eq!((tensor.as_str(), &**fault), (named, &CastFault::Source { dtype }), "{error}");
    }
}

#[test]
fn a_pattern_of_nothing_and_other_types_are_refused() {
    let plain = weights(&llama(1, 32));
    let error = plain.clone().cast("experts", DType::F16).unwrap_err();
    assert!(matches!(&error, Error::Missing(Missing::Named { pattern }) if pattern == "experts"), "{error}");
    for to in [DType::F64, DType::I8, DType::F8E8M0, DType::F4, DType::F8E4M3Fnuz] {
        let error = plain.clone().cast_floats(to).unwrap_err();
        let Error::Uncastable { fault, .. } = &error else { panic!("{error}") };
        assert_eq!(**fault, CastFault::Target, "{error}");
    }
    let wide = weights(&[spec("a.weight", DType::F64, &[4]), spec("b.weight", DType::F32, &[4])]);
    for error in [wide.clone().cast_floats(DType::F32), wide.clone().cast("a", DType::BF16)].map(Result::unwrap_err) {
        let Error::Uncastable { tensor, fault, .. } = &error else { panic!("{error}") };
        assert_eq!((tensor.as_str(), &**fault), ("a.weight", &CastFault::Source { dtype: DType::F64 }), "{error}");
    }
    wide.cast("b", DType::BF16).unwrap();
}

#[test]
fn scaled_weights_and_their_scales_are_refused() {
    let tensors = mixed(1);
    let (weight, scale) = ("model.layers.0.mlp.down_proj.weight", "model.layers.0.mlp.down_proj.weight_scale");
    let plain = weights(&tensors);
    for pattern in ["model.layers.0.mlp.down_proj", weight, "*"] {
        let error = plain.clone().cast(pattern, DType::BF16).unwrap_err();
        let Error::Uncastable { tensor, fault, .. } = &error else { panic!("{error}") };
        assert_eq!((tensor.as_str(), &**fault), (weight, &CastFault::Scaled { scale: scale.to_owned() }));
        assert!(error.to_string().contains(weight) && error.to_string().contains(scale), "{error}");
    }
    assert_eq!(plain.clone().cast_floats(DType::BF16).unwrap_err().kind(), ErrorKind::Uncastable);
    let error = plain.clone().cast(scale, DType::BF16).unwrap_err();
    let Error::Uncastable { tensor, fault, .. } = &error else { panic!("{error}") };
    assert_eq!((tensor.as_str(), &**fault), (scale, &CastFault::OfCodes { weight: weight.to_owned() }));
    // Neither is changed by a cast to the type that it has, and the rest can be cast.
    let cast = plain.cast(scale, DType::F32).unwrap().cast("self_attn", DType::F32).unwrap();
    assert!(cast.patches().iter().count() > 0);
    cast.scales(ScalePolicy::Recompute).unwrap();
}

#[test]
fn packed_weights_and_what_is_beside_them_are_refused() {
    let gptq = [
        spec("a.q.qweight", DType::I32, &[1, 8]),
        spec("a.q.qzeros", DType::I32, &[1, 1]),
        spec("a.q.scales", DType::F16, &[1, 8]),
        spec("a.norm.weight", DType::F16, &[8]),
    ];
    let nf4 = [
        spec("a.q.weight", DType::BF16, &[16, 1]),
        spec("a.q.weight.absmax", DType::F32, &[1]),
        spec("a.q.weight.quant_state.bitsandbytes__nf4", DType::U8, &[8]),
        spec("a.norm.weight", DType::F32, &[8]),
    ];
    let refused = |tensors: &[TensorSpec], pattern: &str, to| {
        let error = weights(tensors).cast(pattern, to).unwrap_err();
        let Error::Uncastable { tensor, fault, .. } = error else { panic!("{error}") };
        (tensor, *fault)
    };
    let of = |weight: &str| CastFault::OfCodes { weight: weight.to_owned() };
    assert_eq!(refused(&gptq, "a.q", DType::F32), ("a.q.scales".to_owned(), of("a.q.qweight")));
    assert_eq!(refused(&gptq, "a.q.qweight", DType::F32).1, CastFault::Source { dtype: DType::I32 });
    let (tensor, fault) = refused(&nf4, "a.q.weight", DType::F32);
    assert!(tensor == "a.q.weight" && matches!(fault, CastFault::Packed { packing: Packing::BitsAndBytesNf4, .. }));
    assert_eq!(refused(&nf4, "a.q.weight.absmax", DType::BF16).1, of("a.q.weight"));
    for tensors in [&gptq, &nf4] {
        assert!(weights(tensors).cast_floats(DType::F8E5M2).is_err());
        weights(tensors).cast("a.norm", DType::BF16).unwrap();
    }
}

/// An fp8 weight without a scale has its codes for values.
#[test]
fn plain_fp8_is_cast() {
    let cast = weights(&[spec("w.weight", DType::F8E4M3, &[16, 16])]).cast("w", DType::BF16).unwrap();
    assert!(read_one(&cast, TensorId::new(0)) == oracle(&cast)[0]);
}

/// A checkpoint whose head has the embedding's bytes.
fn tied(seed: u64) -> Checkpoint {
    let tensors = [
        spec("model.embed_tokens.weight", DType::BF16, &[64, 32]),
        spec("model.layers.0.mlp.up_proj.weight", DType::BF16, &[48, 32]),
    ];
    let plain = checkpoint(&tensors, seed);
    let mut infos = plain.layout().tensors().to_vec();
    let embedding = infos[0].clone();
    infos.push(
        TensorInfo::new("lm_head.weight", DType::BF16, &embedding.shape, embedding.file, embedding.offset).unwrap(),
    );
    plain.with_layout(tensor_offload::checkpoint::Layout::new(infos)).unwrap()
}

#[test]
fn tensors_that_share_bytes_are_cast_once_and_together() {
    for pattern in ["lm_head", "embed_tokens", "*"] {
        let cast = Weights::new(tied(1)).cast(pattern, DType::F32).unwrap().rounding(Rounding::Stochastic { seed: 1 });
        let narrow = Weights::new(tied(1)).cast(pattern, DType::F8E4M3).unwrap();
        let narrow = narrow.rounding(Rounding::Stochastic { seed: 1 });
        for cast in [cast, narrow] {
            let (embedding, head) = (TensorId::new(0), TensorId::new(2));
            let layout = cast.layout();
            assert_eq!(layout.tensor(embedding).unwrap().dtype, layout.tensor(head).unwrap().dtype);
            assert_eq!(layout.storage_of(head), Some(embedding), "{pattern}");
            assert!(read_one(&cast, embedding) == read_one(&cast, head), "{pattern}");
            let wanted: Vec<Vec<u8>> = layout.tensor_ids().map(|tensor| read_one(&cast, tensor)).collect();
            let registry = Registry::described(machine(), Clock::Virtual);
            for allocation in ["cpu,*", "cuda:0,*"] {
                let model = load(&registry, &cast, &plan(&cast, allocation));
                check(&model, &cast, &wanted);
                assert_eq!(model.report().bytes, cast.layout().bytes(), "counted once");
            }
            // Scales recomputed afterwards do not take it apart.
            assert_eq!(cast.clone().scales(ScalePolicy::Recompute).unwrap().layout(), cast.layout());
        }
    }
}

#[test]
fn a_model_of_another_type_shares_what_is_not_cast() {
    let tensors = llama(3, 32);
    let registry = Registry::described(machine(), Clock::Virtual);
    let plain = weights(&tensors);
    let cast = plain.clone().cast("mlp", DType::F32).unwrap();
    let sizes = |weights: &Weights, mlp: bool| -> u64 {
        let tensors = weights.checkpoint().layout().tensors().iter();
        tensors.filter(|tensor| tensor.name.contains("mlp") == mlp).map(|tensor| tensor.bytes).sum()
    };
    for allocation in ["cpu,*", "cuda:0,*", "disk,*"] {
        let base = load(&registry, &plain, &plan(&plain, allocation));
        let loader = Loader::new(&registry);
        let derived = Arc::new(loader.derive(&base, &cast, &plan(&cast, allocation)).unwrap());
        let report = derived.report();
        assert_eq!(report.read, sizes(&plain, true), "{allocation}");
        assert_eq!(report.shared + report.copied, sizes(&plain, false), "{allocation}");
        check(&derived, &cast, &oracle(&cast));
        // And back, and once more the same.
        let back = loader.derive(&derived, &plain, &plan(&plain, allocation)).unwrap();
        assert_eq!(back.report().read, sizes(&plain, true), "{allocation}");
        check(&back, &plain, &oracle(&plain));
        let same = loader.derive(&derived, &cast, &plan(&cast, allocation)).unwrap();
        assert_eq!((same.report().read, same.report().shared), (0, cast.layout().bytes()), "{allocation}");
        // Sixteen bits of another kind are other bytes of the same size.
        let other = plain.clone().cast("mlp", DType::F16).unwrap();
        let other_plan = plan(&other, allocation);
        let half = loader.derive(&base, &other, &other_plan).unwrap();
        check(&half, &other, &oracle(&other));
        assert_ne!(Identity::of(&plain, &other_plan), Identity::of(&other, &other_plan));
    }
}

#[test]
fn another_strength_is_merged_from_the_files_and_cast() {
    let tensors = llama(2, 32);
    let base = checkpoint(&tensors, 7);
    let factors = lora(&tensors, DType::F32, 3, 7);
    let at = |strength| {
        let adapter = tensor_offload::Adapter::from_checkpoint(factors.clone(), strength).unwrap();
        Weights::patched(base.clone(), vec![adapter], Matching::Strict).unwrap().cast_floats(DType::F32).unwrap()
    };
    let registry = Registry::described(machine(), Clock::Virtual);
    let (weak, strong) = (at(0.5), at(1.5));
    let plan = plan(&weak, SPLIT);
    let first = load(&registry, &weak, &plan);
    let second = Loader::new(&registry).derive(&first, &strong, &plan).unwrap();
    let wanted: Vec<Vec<u8>> = strong.layout().tensor_ids().map(|tensor| read_one(&strong, tensor)).collect();
    check(&second, &strong, &wanted);
    // The tables, the norm and the head are cast alike in both, and not read again.
    assert!(second.report().read < strong.checkpoint().layout().bytes());
    assert!(second.report().shared + second.report().copied > 0);
}

#[test]
fn a_patch_that_casts_is_applied_from_other_bytes() {
    let cast = weights(&[spec("w.weight", DType::BF16, &[9, 33])]).cast("w", DType::F32).unwrap();
    let tensor = TensorId::new(0);
    let patch = cast.patches().tensor(tensor).unwrap();
    assert_eq!(patch.dtype(), DType::F32);
    let (file, mut out) = (raw(cast.checkpoint(), tensor), vec![0; 9 * 33 * 4]);
    patch.apply_from(&file, &[], &mut out).unwrap();
    assert!(out == oracle(&cast)[0]);
    let error = patch.apply(&mut out, &[]).unwrap_err();
    assert!(matches!(&error, Error::Mismatch(mismatch) if matches!(**mismatch, Mismatch::InPlace { .. })), "{error}");
    assert_eq!(patch.apply_from(&file[1..], &[], &mut out).unwrap_err().kind(), ErrorKind::WrongSize);
    assert_eq!(patch.apply_from(&file, &[], &mut out[1..]).unwrap_err().kind(), ErrorKind::WrongSize);
    assert_eq!(cast.read(tensor, &mut out[1..]).unwrap_err().kind(), ErrorKind::WrongSize);
}

#[test]
fn the_builder_casts_as_the_weights_do() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/data/tiny-llama");
    let model = Model::open(path).unwrap().cast("mlp", DType::F16);
    let first = model.weights().unwrap().layout().clone();
    let model = model.cast_floats(DType::F32).compute(DeviceId::CPU);
    let by_hand = Weights::new(Checkpoint::open(path).unwrap()).cast("mlp", DType::F16).unwrap();
    assert_eq!(first, *by_hand.layout());
    let by_hand = by_hand.cast_floats(DType::F32).unwrap();
    assert_eq!(model.weights().unwrap().layout(), by_hand.layout());
    let loaded = model.load(&Registry::described(machine(), Clock::Virtual)).unwrap();
    check(&loaded, &by_hand, &oracle(&by_hand));
    assert!(Model::open(path).unwrap().cast("nothing", DType::F16).weights().is_err());
}
