//! Adapters on packed weights whose new values are packed again, with new scales.

mod reference;

use std::path::Path;

use reference::{Tensor, bytes, f32s, file, named, tensor, tensors};
use tensor_offload::adapter::{Adapter, Matching, SkipReason, Weights};
use tensor_offload::error::{AdapterFault, Packing, PackingFault};
use tensor_offload::{Checkpoint, DType, DeviceId, Error, Loader, Model, Planner, Registry};

const DATA: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/packed");

fn data(name: &str) -> Checkpoint {
    Checkpoint::open(Path::new(DATA).join(name)).unwrap()
}

fn lora() -> Vec<Adapter> {
    vec![Adapter::open(Path::new(DATA).join("lora.safetensors"), 1.0).unwrap()]
}

fn from(tensors: &[Tensor]) -> Vec<Adapter> {
    vec![Adapter::from_checkpoint(file("adapter", tensors), 1.0).unwrap()]
}

/// All tensors of a checkpoint with adapters.
fn merged(base: &Checkpoint, adapters: Vec<Adapter>) -> Vec<Tensor> {
    read(&Weights::repacked(base.clone(), adapters, Matching::Strict).unwrap())
}

fn read(weights: &Weights) -> Vec<Tensor> {
    let read = |(id, mut tensor): (_, Tensor)| {
        weights.read(id, &mut tensor.3).unwrap();
        tensor
    };
    let layout = weights.checkpoint().layout();
    layout.tensor_ids().zip(tensors(weights.checkpoint())).map(read).collect()
}

fn find<'t>(tensors: &'t [Tensor], name: &str) -> &'t Tensor {
    tensors.iter().find(|tensor| tensor.0 == name).unwrap_or_else(|| panic!("no `{name}`"))
}

/// A change of a module by products with one element of B and a row of A.
fn change(module: &str, rows: usize, cols: usize, row: usize, by: f32) -> [Tensor; 2] {
    let mut up = vec![0.0; rows];
    up[row] = by;
    [
        f32s(&format!("{module}.lora_B.weight"), &[rows as u64, 1], &up),
        f32s(&format!("{module}.lora_A.weight"), &[1, cols as u64], &vec![1.0; cols]),
    ]
}

#[test]
fn changed_values_are_packed_as_bitsandbytes_packs_them() {
    let (base, after) = (data("base.safetensors"), data("after.safetensors"));
    let (got, wanted) = (merged(&base, lora()), tensors(&after));
    assert_eq!(got.len(), wanted.len());
    for tensor in &got {
        assert!(tensor == find(&wanted, &tensor.0), "{}", tensor.0);
    }
    let changed = got.iter().filter(|tensor| **tensor != named(&base, &tensor.0));
    let changed: Vec<&str> = changed.map(|tensor| tensor.0.as_str()).collect();
    assert_eq!(changed.len(), 4 + 4 + 2, "{changed:?}");
}

#[test]
fn a_load_gives_the_same_tensors_wherever_they_are_and_reports_the_error() {
    let base = data("base.safetensors");
    let weights = Weights::repacked(base.clone(), lora(), Matching::Strict).unwrap();
    let registry = Registry::system();
    let values = (40 * 96 + 24 * 100 + 16 * 96 + 260 * 64) as u64;
    let after = data("after.safetensors");
    for allocation in ["cpu,*", "cpu,50%;disk,*"] {
        let plan =
            Planner::new(weights.layout(), registry.machine()).allocation(allocation.parse().unwrap()).plan().unwrap();
        let model = Loader::new(&registry).load(&weights, &plan).unwrap();
        for (name, _, _, bytes) in tensors(&after) {
            let mut got = vec![0; bytes.len()];
            model.read(&name, &mut got).unwrap();
            assert!(got == bytes, "{allocation}: {name}");
        }
        let requantised = model.report().requantised;
        assert_eq!((requantised.values, requantised.inexpressible), (values, 0));
        let ratio = requantised.rms_error() / requantised.rms();
        assert!(ratio > 0.05 && ratio < 0.12, "{ratio}");
        assert!(model.report().worst_requantised.as_deref().unwrap().ends_with(".weight"));
    }
    let open = Model::open(Path::new(DATA).join("base.safetensors")).unwrap();
    let open = open.adapter(Path::new(DATA).join("lora.safetensors"), 1.0).unwrap();
    let built = open.requantise().compute(DeviceId::CPU).load(&registry).unwrap();
    assert_eq!(built.report().requantised.values, values);
}

#[test]
fn without_the_option_packed_weights_are_refused_and_the_option_is_named() {
    let error = Weights::patched(data("base.safetensors"), lora(), Matching::Strict).unwrap_err().to_string();
    for word in ["bitsandbytes NF4", "a.q.weight", "ModelBuilder::requantise", "--requantise"] {
        assert!(error.contains(word), "{error}");
    }
    let plain = f32s("e.weight", &[1, 1], &[1.0]);
    let all = [tensors(&data("base.safetensors")), vec![plain]].concat();
    let adapters = || from(&[change("a.q", 40, 96, 0, 1.0), change("e", 1, 1, 0, 1.0)].concat());
    let weights = Weights::patched(file("model", &all), adapters(), Matching::AllowPartial).unwrap();
    assert_eq!((weights.patches().iter().count(), weights.report().skipped.len()), (1, 2));
    assert_eq!(weights.report().skipped[0].why, SkipReason::Packed(Packing::BitsAndBytesNf4));
    let weights = Weights::repacked(file("model", &all), adapters(), Matching::AllowPartial).unwrap();
    assert_eq!((weights.patches().iter().count(), weights.report().skipped.len()), (4, 0));
}

#[test]
fn blocks_whose_values_stay_keep_their_codes() {
    let base = data("base.safetensors");
    // No value changes, though there is a patch.
    let nothing = [("a.q", 40, 96), ("b.k", 24, 100), ("c.v", 16, 96), ("d.o", 260, 64)];
    let nothing = nothing.map(|(module, rows, cols)| change(module, rows, cols, 0, 0.0)).concat();
    let weights = Weights::repacked(base.clone(), from(&nothing), Matching::Strict).unwrap();
    assert_eq!(weights.patches().iter().count(), 3 + 2 + 2 + 3);
    assert!(read(&weights) == tensors(&base));
    // A row of 100 values changes three or fewer blocks of 64.
    let got = merged(&base, from(&change("b.k", 24, 100, 3, 0.5)));
    for tensor in &got {
        let was = named(&base, &tensor.0);
        let unit = match tensor.0.as_str() {
            "b.k.weight" => 32,
            "b.k.weight.absmax" => 4,
            _ => {
                assert!(*tensor == was, "{}", tensor.0);
                continue;
            }
        };
        let blocks = tensor.3.chunks(unit).zip(was.3.chunks(unit)).enumerate();
        let changed: Vec<usize> = blocks.filter(|(_, (now, was))| now != was).map(|(block, _)| block).collect();
        assert_eq!(changed, [4, 5, 6], "{}", tensor.0);
    }
    // Of 260 absmax, the first 256 are a group, and the row is in the second.
    let got = merged(&base, from(&change("d.o", 260, 64, 258, 0.5)));
    let (absmax, was) = (find(&got, "d.o.weight.absmax"), named(&base, "d.o.weight.absmax"));
    assert!(absmax.3[..256] == was.3[..256] && absmax.3[258] != was.3[258]);
    let (scale, was) = (find(&got, "d.o.weight.nested_absmax"), named(&base, "d.o.weight.nested_absmax"));
    assert!(scale.3[..4] == was.3[..4] && scale.3[4..] != was.3[4..]);
}

/// The base with one tensor replaced, or left out.
fn with(name: &str, replaced: Option<Tensor>) -> Checkpoint {
    let mut all = tensors(&data("base.safetensors"));
    all.retain(|tensor| tensor.0 != name);
    all.extend(replaced);
    file("model", &all)
}

fn fault(base: Checkpoint, module: &str, rows: usize, cols: usize) -> PackingFault {
    let read = |weights: Weights| {
        let ids: Vec<_> = weights.patches().iter().map(|(id, _)| id).collect();
        ids.into_iter().try_for_each(|id| {
            let mut dst = vec![0; weights.layout().tensor(id).unwrap().bytes as usize];
            weights.read(id, &mut dst).map(|_| ())
        })
    };
    let adapters = from(&change(module, rows, cols, 0, 1.0));
    let error = Weights::repacked(base, adapters, Matching::Strict).and_then(read).unwrap_err();
    let message = error.to_string();
    let (Error::Adapter { fault, .. } | Error::Unpatchable { fault, .. }) = error else { panic!("{message}") };
    let AdapterFault::Codes { fault, tensor, .. } = *fault else { panic!("{message}") };
    assert_eq!(tensor, format!("{module}.weight"));
    fault
}

#[test]
fn what_is_missing_or_wrong_beside_codes_is_told() {
    let missing = |ending: &str| format!("a.q.weight.{ending}");
    for ending in ["absmax", "quant_map", "nested_absmax", "nested_quant_map"] {
        let tensor = missing(ending);
        assert_eq!(fault(with(&tensor, None), "a.q", 40, 96), PackingFault::Missing { tensor });
    }
    let base = data("base.safetensors");
    let state = missing("quant_state.bitsandbytes__nf4");
    let text = String::from_utf8(named(&base, &state).3).unwrap();
    for (from, to, word) in [
        ("\"quant_type\": \"nf4\"", "\"quant_type\": \"af4\"", "af4"),
        ("\"blocksize\": 64", "\"blocksize\": 0", "blocksize"),
        ("\"shape\": [40, 96]", "\"shape\": null", "shape"),
        ("\"shape\": [40, 96]", "\"shape\": [0, 96]", "shape"),
        ("\"nested_offset\"", "\"offset\"", "nested_offset"),
        ("{", "", "expected"),
    ] {
        assert!(text.contains(from), "{text}");
        let text = text.replacen(from, to, 1);
        let state = tensor(&state, DType::U8, &[text.len() as u64], text.into_bytes());
        let PackingFault::Note { reason, .. } = fault(with(&state.0.clone(), Some(state)), "a.q", 40, 96) else {
            panic!("{from}")
        };
        assert!(reason.contains(word), "{reason}");
    }
    let short = tensor(&missing("absmax"), DType::U8, &[59], vec![0; 59]);
    let found = fault(with(&short.0.clone(), Some(short)), "a.q", 40, 96);
    assert!(matches!(found, PackingFault::Shape { found, wanted, .. } if found == [59] && wanted == [60]));
    let float = tensor(&missing("absmax"), DType::F32, &[60], vec![0; 240]);
    let found = fault(with(&float.0.clone(), Some(float)), "a.q", 40, 96);
    assert!(matches!(found, PackingFault::BadDType { dtype: DType::F32, .. }));
    let odd = tensor(&missing("codebook"), DType::F32, &[1], vec![0; 4]);
    let found = fault(with("", Some(odd)), "a.q", 40, 96);
    assert!(matches!(found, PackingFault::Unknown { tensor } if tensor == missing("codebook")));
    let mut other = named(&base, &missing("quant_map"));
    other.3[..4].copy_from_slice(&(-0.9f32).to_le_bytes());
    let found = fault(with(&other.0.clone(), Some(other)), "a.q", 40, 96);
    assert!(matches!(found, PackingFault::Value { index: 0, value, .. } if value == "-0.9"));
    let mut absmax = named(&base, "b.k.weight.absmax");
    absmax.3[8..12].copy_from_slice(&f32::NAN.to_le_bytes());
    let found = fault(with(&absmax.0.clone(), Some(absmax)), "b.k", 24, 100);
    assert!(matches!(found, PackingFault::Value { index: 2, value, .. } if value == "NaN"));
}

#[test]
fn values_that_no_codes_stand_for_are_told() {
    let mut huge = change("b.k", 24, 100, 1, f32::MAX);
    huge[1] = f32s("b.k.lora_A.weight", &[1, 100], &[4.0; 100]);
    let weights = Weights::repacked(data("base.safetensors"), from(&huge), Matching::Strict).unwrap();
    let id = weights.checkpoint().find("b.k.weight").unwrap();
    let mut dst = bytes(weights.checkpoint(), id);
    let error = weights.read(id, &mut dst).unwrap_err();
    let source = std::error::Error::source(&error).map_or(error.to_string(), ToString::to_string);
    assert!(source.contains("value 100 is inf"), "{source}");
}

#[test]
fn codes_of_other_packings_are_refused_with_the_option_too() {
    let qweight = tensor("f.o.qweight", DType::I32, &[8, 16], vec![0; 512]);
    let scales = tensor("f.o.scales", DType::F16, &[1, 16], vec![0; 32]);
    let adapters = from(&change("f.o", 16, 64, 0, 1.0));
    let error = Weights::repacked(file("model", &[qweight, scales]), adapters, Matching::Strict).unwrap_err();
    assert!(error.to_string().contains("GPTQ") && !error.to_string().contains("requantise"), "{error}");
}
