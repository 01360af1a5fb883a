//! Weights that are packed into codes: none is ever patched, the error says how each is packed, and all else stays as it is.

mod reference;

use reference::{Tensor, f32s, file, merged, tensor, tensors};
use tensor_offload::adapter::{Adapter, Matching, Patches, SkipReason, Weights};
use tensor_offload::error::{AdapterFault, Packing};
use tensor_offload::{Checkpoint, DType, Error, Loader, Planner, Registry};

const ROWS: usize = 16;
const COLS: usize = 64;

/// Bytes that stand for anything.
fn codes(name: &str, dtype: DType, shape: &[u64]) -> Tensor {
    let bytes = dtype.bytes_of(shape).unwrap();
    tensor(name, dtype, shape, (0..bytes).map(|at| (at * 37 + 11) as u8 & 0x3f).collect())
}

/// The tensors of the module `a.q`, packed in every way, with the name of the tensor that holds the codes.
fn packed() -> Vec<(Packing, &'static str, Vec<Tensor>)> {
    use DType::{BF16, F8E4M3, F8E8M0, F16, F32, I8, I16, I32, I64, U8, U32};
    let of = |all: &[(&str, DType, &[u64])]| {
        all.iter().map(|(ending, dtype, shape)| codes(&format!("a.q{ending}"), *dtype, shape)).collect::<Vec<_>>()
    };
    let nf4: &[(&str, DType, &[u64])] = &[
        (".weight", U8, &[512, 1]),
        (".weight.absmax", U8, &[16]),
        (".weight.quant_map", F32, &[16]),
        (".weight.nested_absmax", F32, &[1]),
        (".weight.nested_quant_map", F32, &[256]),
        (".weight.quant_state.bitsandbytes__nf4", U8, &[50]),
    ];
    let gptq: &[(&str, DType, &[u64])] =
        &[(".qweight", I32, &[8, 16]), (".qzeros", I32, &[1, 2]), (".scales", F16, &[1, 16]), (".g_idx", I32, &[64])];
    let awq: &[(&str, DType, &[u64])] =
        &[(".qweight", I32, &[64, 2]), (".qzeros", I32, &[1, 2]), (".scales", F16, &[1, 16])];
    let svdq: &[(&str, DType, &[u64])] = &[
        (".qweight", I8, &[16, 32]),
        (".wscales", BF16, &[1, 16]),
        (".proj_down", BF16, &[64, 2]),
        (".proj_up", BF16, &[16, 2]),
        (".smooth_factor", BF16, &[64]),
    ];
    vec![
        (Packing::BitsAndBytesNf4, "a.q.weight", of(nf4)),
        (
            Packing::BitsAndBytesFp4,
            "a.q.weight",
            of(&[
                (".weight", U8, &[512, 1]),
                (".weight.absmax", F32, &[16]),
                (".weight.quant_state.bitsandbytes__fp4", U8, &[50]),
            ]),
        ),
        // Stored as bfloat16, of the shape that a change of the weight has.
        (
            Packing::BitsAndBytes4Bit,
            "a.q.weight",
            of(&[(".weight", BF16, &[16, 64]), (".weight.absmax", F32, &[16]), (".weight.quant_map", F32, &[16])]),
        ),
        (
            Packing::BitsAndBytesInt8,
            "a.q.weight",
            of(&[(".weight", I8, &[16, 64]), (".SCB", F32, &[16]), (".weight_format", U8, &[])]),
        ),
        (Packing::Gptq, "a.q.qweight", of(gptq)),
        (Packing::Awq, "a.q.qweight", of(awq)),
        (
            Packing::CompressedTensors,
            "a.q.weight_packed",
            of(&[
                (".weight_packed", I32, &[16, 8]),
                (".weight_scale", BF16, &[16, 2]),
                (".weight_shape", I64, &[2]),
                (".weight_zero_point", I32, &[2, 2]),
            ]),
        ),
        (
            Packing::Nvfp4,
            "a.q.weight",
            of(&[(".weight", U8, &[16, 32]), (".weight_scale", F8E4M3, &[16, 4]), (".weight_scale_2", F32, &[])]),
        ),
        (
            Packing::Nvfp4,
            "a.q.weight_packed",
            of(&[
                (".weight_packed", U8, &[16, 32]),
                (".weight_scale", F8E4M3, &[16, 4]),
                (".weight_global_scale", F32, &[1]),
            ]),
        ),
        (Packing::Mxfp4, "a.q_blocks", of(&[("_blocks", U8, &[2, 16, 2, 16]), ("_scales", U8, &[2, 16, 2])])),
        (Packing::Mxfp4, "a.q.weight", of(&[(".weight", I8, &[16, 32]), (".scale", F8E8M0, &[16, 2])])),
        (Packing::Int8, "a.q.weight", of(&[(".weight", I8, &[16, 64]), (".weight_scale", F32, &[16, 1])])),
        (
            Packing::TorchAo,
            "a.q._weight_qdata",
            of(&[("._weight_qdata", I8, &[16, 64]), ("._weight_scale", F32, &[16])]),
        ),
        (
            Packing::Quanto,
            "a.q.weight._data",
            of(&[(".weight._data", I8, &[16, 64]), (".weight._scale", BF16, &[16, 1]), (".input_scale", BF16, &[])]),
        ),
        (Packing::SvdQuant, "a.q.qweight", of(svdq)),
        (Packing::Hqq, "a.q.W_q", of(&[(".W_q", U8, &[16, 32]), (".meta", U8, &[40])])),
        (Packing::Eetq, "a.q.qweight", of(&[(".qweight", I8, &[64, 16]), (".weight_scales", F16, &[16])])),
        (Packing::Aqlm, "a.q.codes", of(&[(".codes", I16, &[16, 8, 1]), (".codebooks", F16, &[1, 16, 1, 8])])),
        (
            Packing::Mlx,
            "a.q.weight",
            of(&[(".weight", U32, &[16, 8]), (".scales", F16, &[16, 1]), (".biases", F16, &[16, 1])]),
        ),
        (Packing::Unknown, "a.q.weight", of(&[(".weight", U8, &[16, 68])])),
    ]
}

/// A plain module beside, and its bias.
fn plain() -> [Tensor; 2] {
    [f32s("b.k.weight", &[2, 3], &[1.0; 6]), f32s("a.q.bias", &[16], &[1.0; 16])]
}

fn base(packed: &[Tensor]) -> Checkpoint {
    file("model", &[packed, &plain()].concat())
}

fn lora(module: &str, rows: usize, cols: usize) -> [Tensor; 2] {
    [
        f32s(&format!("{module}.lora_B.weight"), &[rows as u64, 1], &vec![0.5; rows]),
        f32s(&format!("{module}.lora_A.weight"), &[1, cols as u64], &vec![0.25; cols]),
    ]
}

fn adapter(tensors: &[Tensor]) -> Vec<Adapter> {
    vec![Adapter::from_checkpoint(file("adapter", tensors), 1.0).unwrap()]
}

#[test]
fn a_packed_weight_is_refused_by_the_name_of_its_packing() {
    for (packing, holder, tensors) in packed() {
        let base = base(&tensors);
        // Names in the model's own form and in others; shapes that fit the codes, the values, or nothing.
        for module in ["a.q", "diffusion_model.a.q", "lora_unet_a_q"] {
            for (rows, cols) in [(ROWS, COLS), (512, 1), (3, 5)] {
                let error = Weights::patched(base.clone(), adapter(&lora(module, rows, cols)), Matching::Strict);
                let error = error.err().unwrap_or_else(|| panic!("{packing}: patched"));
                let message = error.to_string();
                let Error::Adapter { key, fault, .. } = error else { panic!("{packing}: {message}") };
                assert_eq!(key.as_deref(), Some(module));
                let AdapterFault::Packed { tensor, packing: found, .. } = &*fault else { panic!("{message}") };
                assert_eq!((*found, tensor.as_str()), (packing, holder));
                for word in [packing.name(), holder, "dequantise"] {
                    assert!(message.contains(word), "{message}");
                }
            }
        }
        // Names and shapes alone tell it too.
        let alone = Patches::resolve(base.layout(), adapter(&lora("a.q", ROWS, COLS)), Matching::Strict).unwrap_err();
        assert!(alone.to_string().contains(packing.name()), "{alone}");
    }
}

#[test]
fn whole_changes_of_packed_weights_are_refused_too() {
    for (packing, _, tensors) in packed() {
        let whole = f32s("a.q.diff", &[16, 64], &[0.5; 1024]);
        let error = Weights::patched(base(&tensors), adapter(&[whole]), Matching::Strict).unwrap_err();
        assert!(error.to_string().contains(packing.name()), "{error}");
    }
}

#[test]
fn plain_weights_beside_packed_ones_are_patched() {
    for (packing, _, tensors) in packed() {
        let base = base(&tensors);
        let [up, down] = lora("b.k", 2, 3);
        let bias = f32s("a.q.diff_b", &[16], &[2.0; 16]);
        let (got, weights) = merged(&base, adapter(&[up, down, bias]), Matching::Strict);
        for (got, was) in got.iter().zip(reference::tensors(&base)) {
            match got.0.as_str() {
                "b.k.weight" => assert_eq!(got.3, f32s("", &[], &[1.125; 6]).3),
                "a.q.bias" => assert_eq!(got.3, f32s("", &[], &[3.0; 16]).3),
                _ => assert_eq!(*got, was, "{packing}"),
            }
        }
        assert_eq!(weights.report().applied.len(), 2);
    }
}

#[test]
fn a_partial_match_lists_packed_modules_and_applies_the_rest() {
    for (packing, _, tensors) in packed() {
        let base = base(&tensors);
        let both = [lora("a.q", ROWS, COLS), lora("b.k", 2, 3)].concat();
        let (got, weights) = merged(&base, adapter(&both), Matching::AllowPartial);
        for (got, was) in got.iter().zip(reference::tensors(&base)) {
            assert_eq!(*got == was, got.0 != "b.k.weight", "{packing}: {}", got.0);
        }
        let skipped = &weights.report().skipped;
        assert_eq!(skipped.len(), 2);
        assert!(skipped.iter().all(|skipped| skipped.why == SkipReason::Packed(packing)));
        assert!(weights.report().to_string().contains(packing.name()));
        // Nothing of the adapter is left.
        let error = Weights::patched(base, adapter(&lora("a.q", ROWS, COLS)), Matching::AllowPartial).unwrap_err();
        assert!(error.to_string().contains(packing.name()), "{error}");
    }
}

#[test]
fn packing_is_told_before_what_else_does_not_fit() {
    for (packing, _, tensors) in packed() {
        // Another module that is nowhere, and two modules for one.
        for other in ["nowhere", "diffusion_model.a.q"] {
            let both = [lora(other, 2, 2), lora("a.q", ROWS, COLS)].concat();
            let error = Weights::patched(base(&tensors), adapter(&both), Matching::Strict).unwrap_err().to_string();
            assert!(error.contains(packing.name()), "{error}");
        }
    }
}

#[test]
fn a_strength_of_zero_leaves_packed_weights_alone() {
    for (_, _, tensors) in packed() {
        let zero = Adapter::from_checkpoint(file("adapter", &lora("a.q", ROWS, COLS)), 0.0).unwrap();
        let weights = Weights::patched(base(&tensors), vec![zero], Matching::Strict).unwrap();
        assert_eq!(weights.patches().iter().count(), 0);
    }
}

#[test]
fn a_packed_model_loads_byte_by_byte() {
    let registry = Registry::system();
    for (packing, _, packed) in packed() {
        let base = base(&packed);
        let weights = Weights::patched(base.clone(), adapter(&lora("b.k", 2, 3)), Matching::Strict).unwrap();
        let machine = registry.machine();
        let plan = Planner::new(weights.layout(), machine).allocation("cpu,*".parse().unwrap()).plan().unwrap();
        let model = Loader::new(&registry).load(&weights, &plan).unwrap();
        for (name, _, _, bytes) in tensors(&base).iter().filter(|tensor| tensor.0 != "b.k.weight") {
            let mut got = vec![0; bytes.len()];
            model.read(name, &mut got).unwrap();
            assert_eq!(got, *bytes, "{packing}: {name}");
        }
    }
}

#[test]
fn rows_of_a_packed_fused_weight_are_refused() {
    let fused: Vec<Tensor> = packed().swap_remove(4).2;
    let renamed =
        fused.into_iter().map(|(name, dtype, shape, bytes)| (name.replace("a.q", "a.qkv"), dtype, shape, bytes));
    let base = file("model", &renamed.collect::<Vec<_>>());
    let error = Weights::patched(base, adapter(&lora("a.to_k", 4, COLS)), Matching::Strict).unwrap_err();
    assert!(error.to_string().contains("GPTQ") && error.to_string().contains("a.qkv.qweight"), "{error}");
}
