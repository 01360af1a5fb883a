//! Patching fp8 weights, with and without a kept scale, against values computed with PyTorch.

mod reference;

use reference::{Tensor, f32s, file, merged, named, tensor};
use tensor_offload::adapter::{Adapter, Matching, SkipReason, Weights};
use tensor_offload::error::AdapterFault;
use tensor_offload::{Checkpoint, DType, Error, Rounding, ScalePolicy, TensorId};

fn open(name: &str) -> Checkpoint {
    Checkpoint::open(format!("{}/tests/data/fp8/{name}.safetensors", env!("CARGO_MANIFEST_DIR"))).unwrap()
}

#[test]
fn stored_codes_are_those_of_the_reference() {
    for case in ["e4m3_plain", "e5m2_plain", "e4m3_scale_weight", "e4m3_weight_scale", "e4m3_block_scale_inv"] {
        let (base, factors) = (open(&format!("{case}.base")), open(&format!("{case}.adapter")));
        let strength = factors.metadata()["strength"].parse().unwrap();
        let adapter = Adapter::from_checkpoint(factors, strength).unwrap();
        let (got, weights) = merged(&base, vec![adapter], Matching::Strict);
        let wanted = named(&open(&format!("{case}.expected")), "blocks.0.proj.weight");
        for (got, was) in got.iter().zip(reference::tensors(&base)) {
            if got.0 == wanted.0 {
                assert_eq!((got.1, &got.2), (wanted.1, &wanted.2), "{case}");
                let off = got.3.iter().zip(&wanted.3).filter(|(a, b)| a != b).count();
                assert!(off <= (wanted.3.len() / 1000).max(1), "{case}: {off} of {} codes differ", wanted.3.len());
            } else {
                assert_eq!(*got, was, "{case}: a scale or marker changed");
            }
        }
        assert_eq!(weights.patches().iter().next().unwrap().1.needs().len(), usize::from(!case.contains("plain")));
    }
}

/// E4M3 codes: 16, 20, 448 and -448.
const SIXTEEN: u8 = 0x58;
const TWENTY: u8 = 0x5a;
const LARGEST: u8 = 0x7e;

fn model(codes: &[u8], scale: Tensor) -> Checkpoint {
    let columns = codes.len() as u64;
    file("model", &[tensor("a.weight", DType::F8E4M3, &[1, columns], codes.to_vec()), scale])
}

fn adding(delta: f32, columns: usize) -> Adapter {
    let factors = [
        f32s("a.lora_up.weight", &[1, 1], &[delta]),
        f32s("a.lora_down.weight", &[1, columns as u64], &vec![1.0; columns]),
    ];
    Adapter::from_checkpoint(file("adapter", &factors), 1.0).unwrap()
}

#[test]
fn a_scaled_weight_is_patched_in_its_real_value() {
    for scale in [
        f32s("a.scale_weight", &[], &[0.01]),
        f32s("a.weight_scale", &[1], &[0.01]),
        f32s("a.weight_scale_inv", &[1, 1], &[0.01]),
    ] {
        let (got, _) = merged(&model(&[SIXTEEN], scale.clone()), vec![adding(0.04, 1)], Matching::Strict);
        assert_eq!(got[0].3, [TWENTY], "{}", scale.0);
        assert_eq!(got[1], scale);
    }
}

#[test]
fn saturation_is_counted_and_never_gives_nan() {
    let base = model(&[SIXTEEN, LARGEST, LARGEST | 0x80, 0x7f], f32s("a.weight_scale", &[], &[0.5]));
    let (got, weights) = merged(&base, vec![adding(1e6, 4)], Matching::Strict);
    assert_eq!(got[0].3, [LARGEST, LARGEST, LARGEST, 0x7f]);
    let mut codes = vec![SIXTEEN, LARGEST, LARGEST | 0x80, 0x7f];
    let patch = weights.patches().tensor(TensorId::new(0)).unwrap();
    assert_eq!(patch.apply(&mut codes, &[&0.5f32.to_le_bytes()]).unwrap().saturated, 3);
    let mut untouched = vec![SIXTEEN; 4];
    for scale in [0.0f32, f32::NAN, f32::INFINITY] {
        assert!(patch.apply(&mut untouched, &[&scale.to_le_bytes()]).is_err());
    }
    assert!(patch.apply(&mut untouched, &[]).is_err() && patch.apply(&mut untouched, &[&[0; 3]]).is_err());
    assert_eq!(untouched, [SIXTEEN; 4]);
}

#[test]
fn rows_may_have_scales_of_their_own_and_grids_have_to_fit() {
    let weight = tensor("a.weight", DType::F8E4M3, &[2, 1], vec![SIXTEEN; 2]);
    let rows = file("model", &[weight.clone(), f32s("a.weight_scale", &[2, 1], &[0.01, 0.02])]);
    let factors = [f32s("a.lora_B", &[2, 1], &[0.04, 0.08]), f32s("a.lora_A", &[1, 1], &[1.0])];
    let adapter = || vec![Adapter::from_checkpoint(file("adapter", &factors), 1.0).unwrap()];
    assert_eq!(merged(&rows, adapter(), Matching::Strict).0[0].3, [TWENTY; 2]);
    for scale in [f32s("a.weight_scale_inv", &[2, 2], &[1.0; 4]), tensor("a.weight_scale", DType::U8, &[1], vec![1])] {
        let odd = file("model", &[weight.clone(), scale]);
        let error = Weights::patched(odd.clone(), adapter(), Matching::Strict).unwrap_err().to_string();
        assert!(error.contains("a.weight_scale"), "{error}");
    }
}

/// The values of scales in F32, BF16, F16, F8_E8M0 or (as E8M0) U8.
fn scale_values(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    match dtype {
        DType::F8E8M0 | DType::U8 => bytes.iter().map(|&code| 2f64.powi(i32::from(code) - 127) as f32).collect(),
        _ => reference::floats(dtype, bytes),
    }
}

/// A scale of this shape, whose numbers all differ as far as its type allows.
fn scale(name: &str, dtype: DType, shape: &[u64]) -> Tensor {
    let count = shape.iter().product::<u64>() as usize;
    let bytes = match dtype {
        DType::F8E8M0 | DType::U8 => (0..count).map(|at| 118 + (at * 5 % 9) as u8).collect(),
        DType::F8E4M3 | DType::F64 => vec![0x3f; count * dtype.element_bytes().unwrap()],
        _ => {
            let values: Vec<f32> = (0..count).map(|at| (1 + at * 7 % 31) as f32 / 512.0).collect();
            reference::stored(dtype, &values)
        }
    };
    tensor(name, dtype, shape, bytes)
}

/// A note of ComfyUI.
fn note(name: &str, text: &str) -> Tensor {
    tensor(name, DType::U8, &[text.len() as u64], text.as_bytes().to_vec())
}

/// Which scale is for which element of a weight.
type Of = Box<dyn Fn(usize) -> usize>;

/// A weight's name, shape and siblings, the first of which is its scale.
struct Form {
    weight: &'static str,
    shape: Vec<u64>,
    beside: Vec<Tensor>,
    of: Of,
}

fn form(weight: &'static str, shape: &[u64], scale: Tensor, of: impl Fn(usize) -> usize + 'static) -> Form {
    Form { weight, shape: shape.to_vec(), beside: vec![scale], of: Box::new(of) }
}

/// A grid of blocks over rows of `cols` elements.
fn grid(cols: usize, high: usize, wide: usize) -> impl Fn(usize) -> usize {
    move |at| at / cols / high * cols.div_ceil(wide) + at % cols / wide
}

/// Where cuBLAS keeps the scale of a row's block, of which there are `across`.
fn tiled(row: usize, block: usize, across: usize) -> usize {
    (row / 128 * across.div_ceil(4) + block / 4) * 512 + row % 32 * 16 + row % 128 / 32 * 4 + block % 4
}

/// Every form of a scale that is understood, from every program.
fn forms() -> Vec<Form> {
    use DType::{BF16, F8E8M0, F16, F32, U8};
    let one = |_| 0;
    let mut forms = vec![
        // ComfyUI, with its marker; DeepSeek's inference; Mistral; quanto's names.
        form("a.weight", &[6, 8], scale("a.scale_weight", F32, &[]), one),
        form("a.weight", &[6, 8], scale("a.scale", F32, &[]), one),
        form("a.weight", &[6, 8], scale("a.scales", F32, &[1]), one),
        form("a.weight", &[6, 8], scale("a.qscale_weight", BF16, &[1]), one),
        form("a.weight", &[6, 8], scale("a.weight.scale", F16, &[1, 1]), one),
        form("a.weight", &[6, 8], scale("a.weight._scale", F32, &[1]), one),
        form("a.weight", &[6, 2, 2, 2], scale("a.scale_weight", F32, &[]), one),
        form("a.weight", &[6, 2, 2, 2], scale("a.scale_weight", F32, &[6, 1, 1, 1]), |at| at / 8),
        // compressed-tensors, ModelOpt, transformers by channel.
        form("a.weight", &[6, 8], scale("a.weight_scale", BF16, &[6, 1]), |at| at / 8),
        form("a.weight", &[6, 8], scale("a.weight_scale", F32, &[6]), |at| at / 8),
        form("a.weight", &[6, 64], scale("a.weight_scale", F32, &[6, 2]), grid(64, 1, 32)),
        form("a.weight", &[256, 256], scale("a.weight_scale", BF16, &[2, 2]), grid(256, 128, 128)),
        form("a.weight", &[192, 320], scale("a.weight_scale", F16, &[3, 5]), grid(320, 64, 64)),
        // DeepSeek and transformers by blocks, with F8_E8M0 in later models.
        form("a.weight", &[130, 200], scale("a.weight_scale_inv", F32, &[2, 2]), grid(200, 128, 128)),
        form("a.weight", &[130, 200], scale("a.scale", F8E8M0, &[2, 2]), grid(200, 128, 128)),
        form("a.weight", &[16, 384], scale("a.scale", F32, &[1, 3]), grid(384, 128, 128)),
        // musubi-tuner.
        form("a.weight", &[16, 128], scale("a.scale_weight", F32, &[16, 2, 1]), grid(128, 1, 64)),
        form("a.weight", &[16, 96], scale("a.scale_weight", BF16, &[16, 2, 1]), grid(96, 1, 48)),
        // Stacked experts.
        form("experts.down_proj", &[3, 6, 8], scale("experts.down_proj_scale_inv", F32, &[3, 1, 1]), |at| at / 48),
        form("experts.down_proj", &[3, 6, 8], scale("experts.down_proj_scale", F32, &[3]), |at| at / 48),
        form("experts.down_proj", &[3, 6, 8], scale("experts.down_proj_scale", F32, &[3, 6, 1]), |at| at / 8),
        form("experts.down_proj", &[3, 6, 8], scale("experts.down_proj_scale", F32, &[3, 1, 8]), |at| {
            at / 48 * 8 + at % 8
        }),
        form("experts.w", &[2, 130, 200], scale("experts.w_scales_inv", F32, &[2, 2, 2]), |at| {
            at / 26_000 * 4 + grid(200, 128, 128)(at % 26_000)
        }),
        form("experts.w", &[2, 256, 128], scale("experts.w_scale_inv", F8E8M0, &[2, 2, 1]), |at| at / (128 * 128)),
        // MXFP8 without a note.
        form("a.weight", &[16, 128], scale("a.weight_scale", F8E8M0, &[16, 4]), grid(128, 1, 32)),
    ];
    let mx = r#"{"format": "mxfp8"}"#;
    for (dtype, shape) in [(F8E8M0, [16, 4]), (U8, [16, 4])] {
        forms.push(form("a.weight", &[16, 128], scale("a.weight_scale", dtype, &shape), grid(128, 1, 32)));
        forms.last_mut().unwrap().beside.push(note("a.comfy_quant", mx));
    }
    // In tiles, as ComfyUI and convert_to_quant write it.
    for (rows, cols, stored) in [(160usize, 192usize, [256, 8]), (128, 128, [128, 4])] {
        let shape = [rows as u64, cols as u64];
        let of = move |at: usize| tiled(at / cols, at % cols / 32, cols / 32);
        forms.push(form("a.weight", &shape, scale("a.weight_scale", U8, &stored), of));
        forms.last_mut().unwrap().beside.push(note("a.comfy_quant", mx));
    }
    let blocks = r#"{"format": "float8_e4m3fn_blockwise", "group_size": 96, "full_precision_matrix_mult": true}"#;
    forms.push(form("a.weight", &[192, 192], scale("a.weight_scale", F32, &[2, 2]), grid(192, 96, 96)));
    forms.last_mut().unwrap().beside.push(note("a.comfy_quant", blocks));
    forms
}

impl Form {
    fn cols(&self) -> usize {
        self.shape[1..].iter().product::<u64>() as usize
    }

    fn rows(&self) -> usize {
        self.shape[0] as usize
    }

    /// The code of an element: any but NaN.
    fn code(at: usize) -> u8 {
        (at * 37 % 0x7e) as u8 | (at as u8 & 1) << 7
    }

    /// The checkpoint, with scales of activations beside the weight.
    fn base(&self) -> Checkpoint {
        let module = self.weight.strip_suffix(".weight").unwrap_or("experts");
        let codes = (0..self.rows() * self.cols()).map(Form::code).collect();
        let mut tensors = vec![tensor(self.weight, DType::F8E4M3, &self.shape, codes)];
        tensors.extend(self.beside.iter().cloned());
        for other in
            ["input_scale", "scale_input", "input_scale_inv", "k_scale", "q_scale", "output_scale", "qscale_act"]
        {
            tensors.push(f32s(&format!("{module}.{other}"), &[], &[0.7]));
        }
        file("model", &tensors)
    }

    fn scales(&self) -> Vec<f32> {
        scale_values(self.beside[0].1, &self.beside[0].3)
    }

    fn change(at: usize) -> f32 {
        ((at * 13 % 101) as f32 - 50.0) / 640.0
    }

    /// An adapter that adds a number to each value, or puts it in its place.
    fn adapter(&self, ending: &str) -> Vec<Adapter> {
        let module = self.weight.strip_suffix(".weight").unwrap_or(self.weight);
        let values: Vec<f32> = (0..self.rows() * self.cols()).map(Form::change).collect();
        let change = f32s(&format!("{module}.{ending}"), &self.shape, &values);
        vec![Adapter::from_checkpoint(file("adapter", &[change]), 1.0).unwrap()]
    }

    fn name(&self) -> String {
        let (name, dtype, shape, _) = &self.beside[0];
        format!("{:?} with {name} {dtype} {shape:?}", self.shape)
    }
}

/// The code whose value is nearest, by trying them all; of two, the even one.
fn nearest(value: f32) -> u8 {
    let magnitude = f64::from(value.abs());
    let off = |code: &u8| (f64::from(lifted(*code)) - magnitude).abs();
    let best = (0..0x7f).min_by(|a, b| off(a).total_cmp(&off(b)).then((a & 1).cmp(&(b & 1)))).unwrap();
    best | if value.is_sign_negative() { 0x80 } else { 0 }
}

#[test]
fn every_form_of_a_scale_is_dequantised_changed_and_divided_again() {
    for form in forms() {
        let base = form.base();
        let scales = form.scales();
        for (ending, kept) in [("diff", 1.0), ("set_weight", 0.0)] {
            let (got, weights) = merged(&base, form.adapter(ending), Matching::Strict);
            for (at, &code) in got[0].3.iter().enumerate() {
                let scale = scales[(form.of)(at)];
                let real = kept * lifted(Form::code(at)) * scale + Form::change(at);
                assert_eq!(code, nearest(real / scale), "{} {ending}: {at}", form.name());
            }
            assert_eq!(got[1..], reference::tensors(&base)[1..], "{}", form.name());
            assert_eq!(weights.patches().iter().count(), 1);
        }
    }
}

#[test]
fn every_form_of_a_scale_can_be_recomputed() {
    for form in forms() {
        let base = form.base();
        let old = form.scales();
        let dtype = form.beside[0].1;
        let weights = Weights::patched(base.clone(), form.adapter("diff"), Matching::Strict).unwrap();
        let got = read(&weights.scales(ScalePolicy::Recompute).unwrap(), 0);
        let new = scale_values(dtype, &got[1]);
        let real = |at: usize| lifted(Form::code(at)) * old[(form.of)(at)] + Form::change(at);
        let mut largest = vec![0.0f32; old.len()];
        let count = form.rows() * form.cols();
        (0..count).for_each(|at| largest[(form.of)(at)] = largest[(form.of)(at)].max(real(at).abs()));
        for (place, (&new, &largest)) in new.iter().zip(&largest).enumerate() {
            let quotient = largest / 448.0;
            let wanted = match dtype {
                // What fills tiles stays.
                _ if largest == 0.0 => old[place],
                DType::F8E8M0 | DType::U8 => f64::from(quotient).log2().ceil().exp2() as f32,
                _ => reference::floats(dtype, &reference::stored(dtype, &[quotient]))[0],
            };
            assert_eq!(new, wanted, "{} at {place}", form.name());
        }
        for (at, &code) in got[0].iter().enumerate() {
            assert_eq!(code, nearest(real(at) / new[(form.of)(at)]), "{}: {at}", form.name());
        }
    }
}

#[test]
fn a_scale_that_is_not_understood_is_named() {
    let weight = || tensor("a.weight", DType::F8E4M3, &[4, 64], vec![SIXTEEN; 256]);
    let odd = |name: &str, dtype, shape: &[u64]| vec![scale(name, dtype, shape)];
    let cases: Vec<(Vec<Tensor>, &str)> = vec![
        // Names that nobody has used yet, and parts of other formats.
        (odd("a.weight_scale_3", DType::F32, &[]), "a.weight_scale_3"),
        (odd("a.wscale", DType::F32, &[]), "a.wscale"),
        (odd("a.amax", DType::F32, &[]), "a.amax"),
        (odd("a.weight_quantizer._amax", DType::F32, &[4, 1]), "a.weight_quantizer._amax"),
        (odd("a.weight_scalar", DType::F32, &[]), "a.weight_scalar"),
        (odd("a.pre_quant_scale", DType::F32, &[64]), "a.pre_quant_scale"),
        (odd("a_absmax", DType::F32, &[4]), "a_absmax"),
        (odd("a.weight.zero", DType::F32, &[4]), "a.weight.zero"),
        (
            [odd("a.weight_scale", DType::F32, &[]), odd("a.weight_scale_2", DType::F32, &[])].concat(),
            "a.weight_scale_2",
        ),
        (
            [odd("a.weight_scale", DType::F32, &[]), odd("a.weight_zero_point", DType::F32, &[])].concat(),
            "a.weight_zero_point",
        ),
        ([odd("a.weight_scale", DType::F32, &[]), odd("a.scale", DType::F32, &[])].concat(), "a.scale"),
        // Types and shapes that say nothing.
        (odd("a.weight_scale", DType::U8, &[4, 2]), "a.weight_scale"),
        (odd("a.weight_scale", DType::F64, &[]), "a.weight_scale"),
        (odd("a.weight_scale", DType::F8E4M3, &[4, 4]), "a.weight_scale"),
        (odd("a.weight_scale", DType::F32, &[3]), "a.weight_scale"),
        (odd("a.weight_scale", DType::F32, &[3, 5]), "a.weight_scale"),
        (odd("a.weight_scale", DType::F32, &[64]), "a.weight_scale"),
        (odd("a.weight_scale", DType::F8E8M0, &[128, 4]), "a.weight_scale"),
        // Notes.
        (vec![note("a.comfy_quant", r#"{"format": "float8_e4m3fn", "convrot": true}"#)], "convrot"),
        (vec![note("a.comfy_quant", r#"{"format": "hybrid_mxfp8"}"#)], "hybrid_mxfp8"),
        (vec![note("a.comfy_quant", r#"{"format": "mxfp8"}"#)], "MXFP8"),
        (vec![note("a.comfy_quant", "not JSON")], "a.comfy_quant"),
        (
            vec![scale("a.weight_scale", DType::F32, &[]), note("a.comfy_quant", r#"{"format": "mxfp8"}"#)],
            "a.weight_scale",
        ),
    ];
    for (beside, word) in cases {
        let base = file("model", &[vec![weight()], beside, vec![f32s("b.weight", &[1, 1], &[1.0])]].concat());
        let a = [f32s("a.lora_B", &[4, 1], &[0.5; 4]), f32s("a.lora_A", &[1, 64], &[1.0; 64])];
        let b = [f32s("b.lora_B", &[1, 1], &[0.5]), f32s("b.lora_A", &[1, 1], &[1.0])];
        let adapter = |tensors: &[Tensor]| vec![Adapter::from_checkpoint(file("adapter", tensors), 1.0).unwrap()];
        let error = Weights::patched(base.clone(), adapter(&a), Matching::Strict).unwrap_err();
        assert!(matches!(error, Error::Adapter { .. }) && error.to_string().contains(word), "{word}: {error}");
        // Other modules are patched, and a partial match lists this one.
        assert!(Weights::patched(base.clone(), adapter(&b), Matching::Strict).is_ok());
        let (got, weights) = merged(&base, adapter(&[a, b].concat()), Matching::AllowPartial);
        assert_eq!(got[0].3, [SIXTEEN; 256]);
        assert!(weights.report().skipped.iter().all(|skipped| skipped.why == SkipReason::UnknownScale));
        assert_eq!((weights.report().skipped.len(), weights.report().applied.len()), (2, 1));
    }
}

#[test]
fn a_scale_with_the_name_of_one_of_attention_is_refused_unless_there_is_another() {
    let tensors = [tensor("attn.k.weight", DType::F8E4M3, &[1, 1], vec![SIXTEEN]), f32s("attn.k_scale", &[], &[0.5])];
    let adapter = || {
        let factors = [f32s("attn.k.lora_B", &[1, 1], &[0.04]), f32s("attn.k.lora_A", &[1, 1], &[1.0])];
        vec![Adapter::from_checkpoint(file("adapter", &factors), 1.0).unwrap()]
    };
    let error = Weights::patched(file("model", &tensors), adapter(), Matching::Strict).unwrap_err();
    assert!(error.to_string().contains("attn.k_scale"), "{error}");
    let [weight, of_attention] = tensors;
    let base = file("model", &[weight, of_attention, f32s("attn.k.weight_scale", &[], &[0.01])]);
    assert_eq!(merged(&base, adapter(), Matching::Strict).0[0].3, [TWENTY]);
}

#[test]
fn exponents_that_are_not_numbers_are_refused() {
    let base = model(&[SIXTEEN; 64], tensor("a.weight_scale", DType::F8E8M0, &[1, 2], vec![127, 255]));
    let weights = Weights::patched(base, vec![adding(1.0, 64)], Matching::Strict).unwrap();
    let mut bytes = vec![0; 64];
    let error = weights.read(TensorId::new(0), &mut bytes).unwrap_err().to_string();
    assert!(error.contains("a.weight") && error.contains("NaN at 1"), "{error}");
}

#[test]
fn a_replacement_of_codes_does_not_replace_scaled_codes() {
    let whole = |dtype, bytes| vec![tensor("a.set_weight", dtype, &[1, 2], bytes)];
    let adapter = |tensors: &[Tensor]| vec![Adapter::from_checkpoint(file("adapter", tensors), 1.0).unwrap()];
    let scaled = model(&[SIXTEEN; 2], f32s("a.weight_scale", &[], &[0.5]));
    let codes = whole(DType::F8E4M3, vec![TWENTY; 2]);
    let error = Weights::patched(scaled.clone(), adapter(&codes), Matching::Strict).unwrap_err();
    let Error::Adapter { fault, .. } = error else { panic!("{error}") };
    let (dtype, scale) = (DType::F8E4M3, "a.weight_scale".to_owned());
    assert_eq!(*fault, AdapterFault::ScaledReplacement { dtype, scale });
    let values = whole(DType::BF16, reference::stored(DType::BF16, &[10.0; 2]));
    assert_eq!(merged(&scaled, adapter(&values), Matching::Strict).0[0].3, [TWENTY; 2]);
    // Without a scale they are values.
    let plain = file("model", &[tensor("a.weight", DType::F8E4M3, &[1, 2], vec![SIXTEEN; 2])]);
    assert_eq!(merged(&plain, adapter(&codes), Matching::Strict).0[0].3, [TWENTY; 2]);
}

/// Also in a partial match, which lists the scales as tensors of no known kind.
#[test]
fn factors_of_codes_with_a_scale_are_refused() {
    let base = file("model", &[f32s("a.weight", &[1, 1], &[1.0])]);
    let codes = |name: &str| tensor(name, DType::F8E4M3, &[1, 1], vec![SIXTEEN]);
    let factors = [codes("a.lora_B.weight"), codes("a.lora_A.weight")];
    let adapter = |tensors: &[Tensor]| vec![Adapter::from_checkpoint(file("adapter", tensors), 1.0).unwrap()];
    let (got, _) = merged(&base, adapter(&factors), Matching::Strict);
    assert_eq!(got[0], f32s("a.weight", &[1, 1], &[257.0]));
    for scale in ["a.lora_A.scale_weight", "a.lora_A.weight_scale", "a.lora_A.weight_zero_point"] {
        let scaled = [&factors[..], &[f32s(scale, &[], &[0.5])]].concat();
        let error = Weights::patched(base.clone(), adapter(&scaled), Matching::AllowPartial).unwrap_err().to_string();
        assert!(error.contains(scale) && error.contains("a.lora_A.weight"), "{error}");
    }
}

#[test]
fn notes_in_the_header_count_as_those_beside_the_weight() {
    let metadata = r#"{"layers": {"a": {"format": "mxfp8"}}}"#;
    let header = serde_json::json!({
        "__metadata__": {"_quantization_metadata": metadata},
        "model.a.weight": {"dtype": "F8_E4M3", "shape": [1, 32], "data_offsets": [0, 32]},
        "model.a.weight_scale": {"dtype": "U8", "shape": [1, 1], "data_offsets": [32, 33]},
    });
    let header = header.to_string();
    let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[SIXTEEN; 32], &[120]].concat();
    let base = Checkpoint::from_bytes("model", bytes).unwrap();
    // 16 / 128 and 4 / 128.
    let (got, _) = merged(&base, vec![adding(0.03125, 32)], Matching::Strict);
    assert_eq!(got[0].3, [TWENTY; 32]);
    // The same scale without the note could be anything.
    let plain = [
        tensor("a.weight", DType::F8E4M3, &[1, 32], vec![SIXTEEN; 32]),
        tensor("a.weight_scale", DType::U8, &[1, 1], vec![120]),
    ];
    assert!(Weights::patched(file("model", &plain), vec![adding(1.0, 32)], Matching::Strict).is_err());
}

/// A model in a folder, with a configuration.
fn in_folder(config: &str, tensors: &[Tensor]) -> (tempfile::TempDir, Checkpoint) {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("config.json"), config).unwrap();
    let base = file("model", tensors);
    let source = &base.sources()[0];
    let mut bytes = vec![0; source.stamp().len() as usize];
    source.read_at(0, &mut bytes).unwrap();
    std::fs::write(folder.path().join("model.safetensors"), bytes).unwrap();
    let opened = Checkpoint::open(folder.path()).unwrap();
    (folder, opened)
}

#[test]
fn a_configuration_says_how_large_blocks_are_and_what_bytes_of_scales_mean() {
    let weight = |rows: u64, cols: u64| {
        let codes = (0..rows * cols).map(|at| Form::code(at as usize)).collect();
        tensor("a.weight", DType::F8E4M3, &[rows, cols], codes)
    };
    let blocks = r#"{"quantization_config": {"quant_method": "fp8", "weight_block_size": [96, 96]}}"#;
    let exponents = r#"{"quantization_config": {"format": "mxfp8-quantized"}}"#;
    let cases: Vec<(&str, [usize; 2], Tensor, Of)> = vec![
        (blocks, [160, 192], scale("a.weight_scale_inv", DType::F32, &[2, 2]), Box::new(grid(192, 96, 96))),
        ("{}", [160, 192], scale("a.weight_scale_inv", DType::F32, &[2, 2]), Box::new(grid(192, 128, 128))),
        (exponents, [128, 128], scale("a.weight_scale", DType::U8, &[128, 4]), Box::new(grid(128, 1, 32))),
    ];
    for (config, [rows, cols], scale, of) in cases {
        let tensors = [weight(rows as u64, cols as u64), scale.clone()];
        let (_folder, base) = in_folder(config, &tensors);
        let values: Vec<f32> = (0..rows * cols).map(Form::change).collect();
        let change = f32s("a.diff", &[rows as u64, cols as u64], &values);
        let adapter = Adapter::from_checkpoint(file("adapter", &[change]), 1.0).unwrap();
        let (got, _) = merged(&base, vec![adapter], Matching::Strict);
        let got = got.iter().find(|tensor| tensor.0 == "a.weight").unwrap();
        let scales = scale_values(scale.1, &scale.3);
        for (at, &code) in got.3.iter().enumerate() {
            let scale = scales[of(at)];
            assert_eq!(code, nearest((lifted(Form::code(at)) * scale + Form::change(at)) / scale), "{config}: {at}");
        }
    }
    // Of other shapes, and where nobody says so, bytes are no exponents.
    for (config, shape) in [(exponents, [4, 4]), ("{}", [128, 4])] {
        let (_folder, base) = in_folder(config, &[weight(128, 128), scale("a.weight_scale", DType::U8, &shape)]);
        let adapter = Adapter::from_checkpoint(file("adapter", &[f32s("a.diff", &[128, 128], &[0.0; 16_384])]), 1.0);
        let error = Weights::patched(base, vec![adapter.unwrap()], Matching::Strict).unwrap_err().to_string();
        assert!(error.contains("a.weight_scale") && error.contains("U8"), "{error}");
    }
}

/// The tensors as [`Weights::read`] gives them, of which so many values are saturated.
fn read(weights: &Weights, saturated: u64) -> Vec<Vec<u8>> {
    let mut sum = 0;
    let read = |index: TensorId| {
        let mut bytes = vec![0; weights.layout().tensor(index).unwrap().bytes as usize];
        sum += weights.read(index, &mut bytes).unwrap().saturated;
        bytes
    };
    let tensors = weights.layout().tensor_ids().map(read).collect();
    assert_eq!(sum, saturated);
    tensors
}

fn lifted(code: u8) -> f32 {
    let (exponent, fraction) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let magnitude =
        if exponent == 0 { fraction / 8.0 * 2f32.powi(-6) } else { (1.0 + fraction / 8.0) * 2f32.powi(exponent - 7) };
    if code & 0x80 == 0 { magnitude } else { -magnitude }
}

#[test]
fn a_scale_can_be_recomputed() {
    let base = model(&[SIXTEEN, LARGEST, 0, SIXTEEN | 0x80], f32s("a.weight_scale", &[], &[0.5]));
    let resolve = || Weights::patched(base.clone(), vec![adding(672.0, 4)], Matching::Strict).unwrap();
    let weights = resolve().scales(ScalePolicy::Recompute).unwrap();
    let (weight, scale) = (TensorId::new(0), TensorId::new(1));
    assert_eq!(
        weights.patches().iter().map(|(index, patch)| (index, patch.needs().to_vec())).collect::<Vec<_>>(),
        [(weight, vec![scale]), (scale, vec![weight])]
    );
    // 8, 224, 0 and -8, each with 672 more: the largest is 896, twice the type's largest value.
    let got = read(&weights, 0);
    assert_eq!(got[1], 2f32.to_le_bytes());
    assert_eq!(got[0].iter().map(|code| lifted(*code)).collect::<Vec<_>>(), [352.0, 448.0, 320.0, 320.0]);
    let kept = weights.scales(ScalePolicy::Keep).unwrap().rounding(Rounding::NearestEven);
    let kept = read(&kept, 4);
    assert_eq!((kept[0][1], &kept[1]), (LARGEST, &0.5f32.to_le_bytes().to_vec()));
}

/// A derived model would patch a scale again if the order made another recipe of it.
#[test]
fn rounding_and_scales_are_set_in_any_order() {
    use tensor_offload::{Loader, Planner, Registry};
    let base = model(&[SIXTEEN, LARGEST, 0, SIXTEEN | 0x80], f32s("a.weight_scale", &[], &[0.5]));
    let resolved = Weights::patched(base, vec![adding(672.0, 4)], Matching::Strict).unwrap();
    let (rounding, scales) = (Rounding::Stochastic { seed: 7 }, ScalePolicy::Recompute);
    let before = resolved.clone().rounding(rounding).scales(scales).unwrap();
    let after = resolved.scales(scales).unwrap().rounding(rounding);
    assert_eq!(read(&before, 0), read(&after, 0));

    let registry = Registry::system();
    let plan = Planner::new(before.layout(), registry.machine()).allocation("cpu,*".parse().unwrap()).plan().unwrap();
    let loader = Loader::new(&registry);
    let first = std::sync::Arc::new(loader.load(&before, &plan).unwrap());
    assert_eq!(loader.derive(&first, &after, &plan).unwrap().report().read, 0);
    let other = after.rounding(Rounding::Stochastic { seed: 8 });
    // Each of the two is patched with the bytes of the other beside its own.
    assert_eq!(loader.derive(&first, &other, &plan).unwrap().report().read, 2 * plan.bytes());
}

#[test]
fn every_unit_of_a_grid_has_its_own_new_scale() {
    let (rows, cols) = (130usize, 200usize);
    let codes: Vec<u8> = (0..rows * cols).map(|i| (i * 37 % 0x70) as u8 | (i as u8 & 1) << 7).collect();
    let weight = tensor("a.weight", DType::F8E4M3, &[rows as u64, cols as u64], codes.clone());
    let blocks = f32s("a.weight_scale_inv", &[2, 2], &[0.5, 0.25, 2.0, 1.0]);
    let by_rows: Vec<f32> = (0..rows).map(|row| 0.01 * (row + 1) as f32).collect();
    for scale in [blocks, f32s("a.weight_scale", &[rows as u64, 1], &by_rows)] {
        let base = file("model", &[weight.clone(), scale.clone()]);
        let up: Vec<f32> = (0..rows).map(|row| (row as f32 - 60.0) * 0.03).collect();
        let factors = [f32s("a.lora_B", &[rows as u64, 1], &up), f32s("a.lora_A", &[1, cols as u64], &vec![1.0; cols])];
        let adapter = Adapter::from_checkpoint(file("adapter", &factors), 1.0).unwrap();
        let weights = Weights::patched(base.clone(), vec![adapter], Matching::Strict).unwrap();
        let got = read(&weights.scales(ScalePolicy::Recompute).unwrap(), 0);
        let old: Vec<f32> = scale.3.as_chunks().0.iter().map(|raw| f32::from_le_bytes(*raw)).collect();
        let new: Vec<f32> = got[1].as_chunks().0.iter().map(|raw| f32::from_le_bytes(*raw)).collect();
        let unit = |index: usize| {
            let (row, col) = (index / cols, index % cols);
            if old.len() == 4 { row / 128 * 2 + col / 128 } else { row }
        };
        let real = |index: usize| lifted(codes[index]) * old[unit(index)] + up[index / cols];
        let mut largest = vec![0.0f32; old.len()];
        (0..codes.len()).for_each(|index| largest[unit(index)] = largest[unit(index)].max(real(index).abs()));
        for (new, largest) in new.iter().zip(&largest) {
            assert!((new * 448.0 - largest).abs() < largest * 1e-6);
        }
        for (index, code) in got[0].iter().enumerate() {
            let (stored, real, step) = (lifted(*code) * new[unit(index)], real(index), new[unit(index)] * 448.0);
            assert!(
                (stored - real).abs() <= (real.abs() / 16.0).max(step * 2e-6) * 1.001,
                "{index}: {stored} for {real}"
            );
        }
    }
}

#[test]
fn what_gives_no_new_scale_keeps_the_old_one() {
    let base = model(&[SIXTEEN, SIXTEEN], f32s("a.weight_scale", &[], &[0.25]));
    let zero = Weights::patched(base.clone(), vec![adding(-4.0, 2)], Matching::Strict).unwrap();
    let got = read(&zero.scales(ScalePolicy::Recompute).unwrap(), 0);
    assert_eq!((&got[0], &got[1]), (&vec![0, 0], &0.25f32.to_le_bytes().to_vec()));
}

#[test]
fn a_weight_and_its_scale_cannot_both_be_changed() {
    let base = model(&[SIXTEEN], f32s("a.weight_scale", &[1, 1], &[0.25]));
    let both = [
        f32s("a.lora_B", &[1, 1], &[1.0]),
        f32s("a.lora_A", &[1, 1], &[1.0]),
        f32s("a.weight_scale.diff", &[1, 1], &[1.0]),
    ];
    let adapter = Adapter::from_checkpoint(file("adapter", &both), 1.0).unwrap();
    let error = Weights::patched(base, vec![adapter], Matching::Strict).unwrap_err();
    let Error::Unpatchable { tensor, fault } = error else { panic!("{error}") };
    assert_eq!((tensor.as_str(), *fault), ("a.weight", AdapterFault::ChangedScale { scale: "a.weight_scale".into() }));
}

#[test]
fn a_model_loads_with_new_scales() {
    use tensor_offload::{Loader, Planner, Registry};
    let base = model(&[SIXTEEN; 64], f32s("a.weight_scale", &[], &[0.5]));
    let weights = Weights::patched(base.clone(), vec![adding(672.0, 64)], Matching::Strict).unwrap();
    let weights = weights.scales(ScalePolicy::Recompute).unwrap();
    let registry = Registry::system();
    let plan = Planner::new(weights.layout(), registry.machine()).allocation("cpu,*".parse().unwrap()).plan().unwrap();
    let model = Loader::new(&registry).load(&weights, &plan).unwrap();
    for (info, wanted) in base.layout().tensors().iter().zip(read(&weights, 0)) {
        let mut got = vec![0; wanted.len()];
        model.read(&info.name, &mut got).unwrap();
        assert_eq!(got, wanted, "{}", info.name);
    }
}
