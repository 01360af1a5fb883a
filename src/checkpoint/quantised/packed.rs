//! Weights that are packed into codes, recognised by the tensors beside them.
//!
//! Sources of the names: bitsandbytes' `QuantState.as_dict`, GPTQModel, AutoAWQ, compressed-tensors' compressors, ModelOpt and
//! ComfyUI for NVFP4, transformers' gpt-oss for MXFP4, torchao's `flatten_tensor_state_dict`, optimum-quanto's `QTensor`,
//! Nunchaku, HQQ, EETQ, AQLM, MLX, ExLlama 2 and 3, VPTQ, QuIP#, Marlin.

use std::collections::{HashMap, HashSet};

use super::siblings::{Role, Siblings, speaks_of_codes};
use crate::checkpoint::{Layout, TensorId, TensorInfo};
use crate::dtype::DType;
use crate::error::Packing;
use crate::float::Float;

/// A weight that is packed into codes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Packed {
    pub(crate) packing: Packing,
    /// The tensor beside it that shows this.
    pub(crate) sign: Option<String>,
}

/// The endings of tensors that hold a module's codes, and those of which at least one has to be beside them.
const CODES: [(&str, &[&str]); 14] = [
    (".qweight", &[".qzeros", ".scales", ".wscales", ".weight_scales", ".scale", ".dqweight"]),
    (".weight_packed", &[".weight_scale", ".weight_shape", ".weight_global_scale"]),
    ("._weight_qdata", &["._weight_scale", "._weight_zero_point", "._weight_scale_and_zero"]),
    (".weight._data", &[".weight._scale", ".weight._shift"]),
    (".W_q", &[".meta", ".scale", ".zero", ".nbits", ".group_size"]),
    (".q_weight", &[".q_scale", ".q_groups", ".q_invperm"]),
    (".trellis", &[".suh", ".svh", ".su", ".sv"]),
    (".Qidxs", &[".SU", ".SV", ".Wscale", ".codebook_id"]),
    (".codes", &[".codebooks"]),
    (".indices", &[".centroids", ".centroids.weight"]),
    (".B", &[".s"]),
    (".packed_weight", &[".scales", ".scale", ".zeros"]),
    ("_blocks", &["_scales"]),
    ("_packed", &["_scale", "_scales", "_shape"]),
];

/// The modules whose weights are under other names than `X.weight`, by the tensor that holds the codes.
pub(crate) fn packed_modules(layout: &Layout) -> HashMap<TensorId, &str> {
    let may_be = |info: &TensorInfo| is_of_codes(info) || CODES.iter().any(|(ending, _)| info.name.ends_with(ending));
    if !layout.tensors().iter().any(|info| !info.name.ends_with(".weight") && may_be(info)) {
        return HashMap::new();
    }
    let siblings = Siblings::of(layout);
    let mut found: HashMap<TensorId, &str> = HashMap::new();
    let mut named: HashSet<&str> = HashSet::new();
    for (id, info) in layout.tensor_ids().zip(layout.tensors()) {
        if let Some((module, _)) = split(info, &siblings).filter(|(module, _)| named.insert(module)) {
            found.insert(id, module);
        }
    }
    // A module without a weight, with a matrix of codes and something that speaks of them.
    for (id, info) in layout.tensor_ids().zip(layout.tensors()) {
        let Some((module, own)) = info.name.rsplit_once('.') else { continue };
        let free = !found.contains_key(&id) && !named.contains(module) && siblings.ending(module, ".weight").is_none();
        if free && info.shape.len() > 1 && is_of_codes(info) && !speaks_of_codes(own) && own != "bias" {
            let prefix = format!("{module}.");
            let told = siblings.under(&prefix).any(|(rest, _, _)| !rest.contains('.') && speaks_of_codes(rest));
            if told {
                named.insert(module);
                found.insert(id, module);
            }
        }
    }
    found
}

/// The module of a tensor that holds codes, and the ending of its name.
fn split<'a>(info: &'a TensorInfo, siblings: &Siblings<'_>) -> Option<(&'a str, &'static str)> {
    CODES.iter().find_map(|(ending, beside)| {
        let module = info.name.strip_suffix(ending).filter(|module| !module.is_empty())?;
        beside.iter().any(|other| siblings.ending(module, other).is_some()).then_some((module, *ending))
    })
}

/// Whether a tensor is of a type that codes are stored in.
fn is_of_codes(info: &TensorInfo) -> bool {
    use DType::{F4, F6E2M3, F6E3M2, I8, I16, I32, U8, U16, U32};
    matches!(info.dtype, F4 | F6E2M3 | F6E3M2 | I8 | I16 | I32 | U8 | U16 | U32)
}

impl Packed {
    /// How the tensor of a module's weight is packed; none if its elements are values.
    pub(crate) fn of(weight: &TensorInfo, siblings: &Siblings<'_>) -> Option<Packed> {
        // Blocks of GGML say what all of their values are.
        if weight.dtype.is_ggml_block() {
            return None;
        }
        match split(weight, siblings) {
            Some((module, ending)) => Some(under_own_name(weight, Around { module, siblings }, ending)),
            None => under_its_name(weight, siblings),
        }
    }

    fn new(packing: Packing, sign: &TensorInfo) -> Packed {
        Packed { packing, sign: Some(sign.name.clone()) }
    }
}

/// The tensors around a module.
#[derive(Clone, Copy)]
struct Around<'s, 'a> {
    module: &'s str,
    siblings: &'s Siblings<'a>,
}

impl<'a> Around<'_, 'a> {
    fn has(self, ending: &str) -> Option<&'a TensorInfo> {
        self.siblings.ending(self.module, ending)
    }

    fn any(self, endings: &[&str]) -> Option<&'a TensorInfo> {
        endings.iter().find_map(|ending| self.has(ending))
    }

    /// The first of these that is there, with its packing.
    fn first(self, signs: &[(&str, Packing)]) -> Option<Packed> {
        signs.iter().find_map(|&(ending, packing)| Some(Packed::new(packing, self.has(ending)?)))
    }
}

/// The packing of codes that have a name of their own.
fn under_own_name(weight: &TensorInfo, around: Around<'_, '_>, ending: &str) -> Packed {
    let sure = |packing| Packed { packing, sign: Some(weight.name.clone()) };
    match ending {
        ".qweight" => of_qweight(weight, around),
        ".weight_packed" | "_packed" => around
            .first(&[(".weight_global_scale", Packing::Nvfp4), ("_global_scale", Packing::Nvfp4)])
            .or_else(|| {
                let scale = around.any(&[".weight_scale", "_scale"]).filter(|scale| is_exponent(scale.dtype));
                scale.map(|scale| Packed::new(Packing::Mxfp4, scale))
            })
            .unwrap_or_else(|| sure(Packing::CompressedTensors)),
        "._weight_qdata" => sure(Packing::TorchAo),
        ".weight._data" => sure(Packing::Quanto),
        ".W_q" => sure(Packing::Hqq),
        ".q_weight" => sure(Packing::Exl2),
        ".trellis" => sure(Packing::Exl3),
        ".Qidxs" => sure(Packing::QuipSharp),
        ".codes" => sure(Packing::Aqlm),
        ".indices" => sure(Packing::Vptq),
        ".B" => sure(Packing::Marlin),
        "_blocks" => around.first(&[("_scales", Packing::Mxfp4)]).unwrap_or_else(|| sure(Packing::Mxfp4)),
        _ => sure(Packing::Unknown),
    }
}

/// GPTQ packs along the inputs and AWQ along the outputs, which the scales [groups, out] tell apart.
fn of_qweight(weight: &TensorInfo, around: Around<'_, '_>) -> Packed {
    let others = [
        ("wscales", Packing::SvdQuant),
        ("proj_down", Packing::SvdQuant),
        ("smooth_factor", Packing::SvdQuant),
        ("weight_scales", Packing::Eetq),
        ("g_idx", Packing::Gptq),
    ];
    let named = others.iter().find_map(|(own, packing)| {
        let sign = around.has(&format!(".{own}"))?;
        Some(Packed::new(*packing, sign))
    });
    named.unwrap_or_else(|| {
        let Some(scales) = around.has(".scales") else {
            return Packed { packing: Packing::Unknown, sign: Some(weight.name.clone()) };
        };
        let packing = match (&weight.shape[..], &scales.shape[..]) {
            ([_, cols], [_, outputs]) if cols == outputs => Packing::Gptq,
            ([_, cols], [_, outputs]) if cols < outputs => Packing::Awq,
            _ if around.has(".qzeros").is_some() => Packing::Awq,
            _ => Packing::Unknown,
        };
        Packed::new(packing, around.has(".qzeros").unwrap_or(scales))
    })
}

/// The packing of a weight called `X.weight`, or of one with a name of its own.
fn under_its_name(weight: &TensorInfo, siblings: &Siblings<'_>) -> Option<Packed> {
    let own = Around { module: &weight.name, siblings };
    let module = Around { module: weight.name.strip_suffix(".weight").unwrap_or(&weight.name), siblings };
    // bitsandbytes stores four-bit codes in any type.
    let state = format!("{}.quant_state.", weight.name);
    if let Some((kind, _, sign)) = siblings.under(&state).next() {
        let packing = match kind {
            _ if kind.ends_with("nf4") => Packing::BitsAndBytesNf4,
            _ if kind.ends_with("fp4") => Packing::BitsAndBytesFp4,
            _ => Packing::BitsAndBytes4Bit,
        };
        return Some(Packed::new(packing, sign));
    }
    if let Some(sign) = own.any(&[".absmax", ".quant_map", ".nested_absmax"]) {
        return Some(Packed::new(Packing::BitsAndBytes4Bit, sign));
    }
    is_of_codes(weight).then(|| of_integers(weight, own, module))
}

/// The packing of a weight called `X.weight`, or of one with a name of its own, whose type holds codes.
fn of_integers(weight: &TensorInfo, own: Around<'_, '_>, module: Around<'_, '_>) -> Packed {
    let eight = weight.dtype == DType::I8;
    let signs = [(".SCB", Packing::BitsAndBytesInt8), (".weight_format", Packing::BitsAndBytesInt8)];
    if let Some(packed) = module.first(&signs).or_else(|| own.first(&signs)) {
        return packed;
    }
    let signs = [
        (".weight_scale_2", Packing::Nvfp4),
        (".weight_global_scale", Packing::Nvfp4),
        ("_weight_scale_2", Packing::Nvfp4),
        ("_scale_2", Packing::Nvfp4),
        ("_global_scale", Packing::Nvfp4),
        // ComfyUI's four-bit integers, two in a byte.
        (".weight_zeros", Packing::Unknown),
        (".weight_s_rel", Packing::Unknown),
    ];
    if let Some(packed) = module.first(&signs) {
        return packed;
    }
    if let Some(packed) = module.first(&[(".weight_scales", Packing::Eetq)]).filter(|_| eight) {
        return packed;
    }
    if let Some(scale) = module.any(&[".weight_scale", ".scale", "_scale", "_weight_scale", ".scales"]) {
        let packing = match (weight.dtype, scale.dtype) {
            (DType::U8 | DType::F4, DType::F8E4M3) => Packing::Nvfp4,
            (DType::U8 | DType::I8 | DType::F4, other) if is_exponent(other) => Packing::Mxfp4,
            (DType::U32, _) if module.has(".scales").is_some() => Packing::Mlx,
            (DType::I8, other) if Float::of(other).is_some() => Packing::Int8,
            _ => Packing::Unknown,
        };
        return Packed::new(packing, scale);
    }
    let other = own.siblings.beside(weight).into_iter().next();
    let is_scale = other.is_some_and(|sibling| sibling.role == Role::Scale);
    let packing = if eight && is_scale { Packing::Int8 } else { Packing::Unknown };
    Packed { packing, sign: other.map(|sibling| sibling.info.name.clone()) }
}

/// Whether scales of this type may be exponents.
fn is_exponent(dtype: DType) -> bool {
    matches!(dtype, DType::F8E8M0 | DType::U8)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The packing of the module `a.q` with these tensors, under `a.q` each.
    fn packing(tensors: &[(&str, DType, &[u64])]) -> Option<Packing> {
        let named = |(ending, dtype, shape): &(&str, DType, &[u64])| {
            TensorInfo::new(format!("a.q{ending}"), *dtype, shape, 0, 0).unwrap()
        };
        let layout = Layout::new(tensors.iter().map(named).collect());
        let modules = packed_modules(&layout);
        let main = modules.iter().find(|(_, module)| **module == "a.q").map(|(id, _)| *id);
        let main = main.or_else(|| layout.find("a.q.weight")).or_else(|| layout.find("a.q"))?;
        Packed::of(layout.at(main), &Siblings::of(&layout)).map(|packed| packed.packing)
    }

    #[test]
    fn packings_are_recognised_by_what_stands_beside_the_codes() {
        use DType::{BF16, F8E4M3, F8E8M0, F16, F32, I8, I16, I32, U8, U32};
        let state = ".weight.quant_state.bitsandbytes__";
        let (nf4, fp4) = (format!("{state}nf4"), format!("{state}fp4"));
        type Case<'a> = (Packing, Vec<(&'a str, DType, &'a [u64])>);
        let cases: Vec<Case<'_>> = vec![
            (Packing::BitsAndBytesNf4, vec![(".weight", U8, &[64, 1]), (".weight.absmax", U8, &[2]), (&nf4, U8, &[9])]),
            (
                Packing::BitsAndBytesFp4,
                vec![(".weight", BF16, &[32, 1]), (".weight.absmax", U8, &[2]), (&fp4, U8, &[9])],
            ),
            (Packing::BitsAndBytes4Bit, vec![(".weight", U8, &[64, 1]), (".weight.quant_map", F32, &[16])]),
            (Packing::BitsAndBytesInt8, vec![(".weight", I8, &[4, 8]), (".SCB", F32, &[4])]),
            (Packing::BitsAndBytesInt8, vec![(".weight", I8, &[4, 8]), (".weight_format", U8, &[])]),
            (
                Packing::Gptq,
                vec![
                    (".qweight", I32, &[2, 16]),
                    (".qzeros", I32, &[1, 2]),
                    (".scales", F16, &[1, 16]),
                    (".g_idx", I32, &[16]),
                ],
            ),
            (Packing::Gptq, vec![(".qweight", I32, &[2, 16]), (".qzeros", I32, &[1, 2]), (".scales", F16, &[1, 16])]),
            (Packing::Awq, vec![(".qweight", I32, &[16, 2]), (".qzeros", I32, &[1, 2]), (".scales", F16, &[1, 16])]),
            (Packing::Eetq, vec![(".qweight", I8, &[16, 16]), (".weight_scales", F16, &[16])]),
            (Packing::Eetq, vec![(".weight", I8, &[16, 16]), (".weight_scales", F16, &[16])]),
            (
                Packing::SvdQuant,
                vec![(".qweight", I8, &[16, 8]), (".wscales", BF16, &[1, 16]), (".proj_down", BF16, &[16, 2])],
            ),
            (
                Packing::CompressedTensors,
                vec![
                    (".weight_packed", I32, &[16, 2]),
                    (".weight_scale", BF16, &[16, 1]),
                    (".weight_shape", DType::I64, &[2]),
                ],
            ),
            (
                Packing::Nvfp4,
                vec![
                    (".weight_packed", U8, &[16, 8]),
                    (".weight_scale", F8E4M3, &[16, 1]),
                    (".weight_global_scale", F32, &[1]),
                ],
            ),
            (Packing::Mxfp4, vec![(".weight_packed", U8, &[16, 16]), (".weight_scale", U8, &[16, 1])]),
            (
                Packing::Nvfp4,
                vec![(".weight", U8, &[16, 8]), (".weight_scale", F8E4M3, &[16, 1]), (".weight_scale_2", F32, &[])],
            ),
            (
                Packing::Nvfp4,
                vec![("", U8, &[2, 16, 8]), ("_weight_scale", F8E4M3, &[2, 2, 8]), ("_weight_scale_2", F32, &[])],
            ),
            (Packing::Nvfp4, vec![(".weight", DType::F4, &[16, 16]), (".weight_scale", F8E4M3, &[16, 1])]),
            (Packing::Mxfp4, vec![(".weight", I8, &[16, 16]), (".scale", F8E8M0, &[16, 1])]),
            (Packing::Mxfp4, vec![("_blocks", U8, &[2, 8, 1, 16]), ("_scales", U8, &[2, 8, 1])]),
            (Packing::Int8, vec![(".weight", I8, &[16, 16]), (".weight_scale", F32, &[16, 1])]),
            (Packing::Int8, vec![(".weight", I8, &[16, 16]), (".scale_weight", F32, &[])]),
            (Packing::TorchAo, vec![("._weight_qdata", I8, &[16, 16]), ("._weight_scale", F32, &[16, 1])]),
            (Packing::TorchAo, vec![("._weight_qdata", F8E4M3, &[16, 16]), ("._weight_scale", F32, &[16, 1])]),
            (Packing::Quanto, vec![(".weight._data", I8, &[16, 16]), (".weight._scale", F32, &[16, 1])]),
            (Packing::Hqq, vec![(".W_q", U8, &[16, 8]), (".meta", U8, &[4])]),
            (Packing::Aqlm, vec![(".codes", I16, &[16, 2, 1]), (".codebooks", F16, &[1, 256, 1, 8])]),
            (Packing::Mlx, vec![(".weight", U32, &[16, 2]), (".scales", F16, &[16, 1]), (".biases", F16, &[16, 1])]),
            (Packing::Marlin, vec![(".B", I32, &[1, 32]), (".s", F16, &[1, 16])]),
            (Packing::Exl2, vec![(".q_weight", I32, &[4, 16]), (".q_scale", I32, &[1, 2])]),
            (Packing::Exl3, vec![(".trellis", I16, &[1, 1, 64]), (".suh", F16, &[16])]),
            (Packing::QuipSharp, vec![(".Qidxs", DType::I64, &[16, 2]), (".SU", F16, &[16])]),
            (
                Packing::Vptq,
                vec![
                    (".indices", I32, &[1, 16, 2]),
                    (".centroids.weight", F16, &[1, 64]),
                    (".weight_scale", F16, &[16]),
                ],
            ),
            (Packing::Unknown, vec![(".weight", U8, &[16, 18])]),
            (Packing::Unknown, vec![(".blob", U8, &[16, 18]), (".blob_scale", F16, &[16])]),
            (Packing::Unknown, vec![(".weight", U8, &[4, 16]), (".weight_scale", BF16, &[1])]),
        ];
        for (wanted, tensors) in cases {
            assert_eq!(packing(&tensors), Some(wanted), "{tensors:?}");
        }
    }

    #[test]
    fn values_are_not_taken_for_codes() {
        use DType::{BF16, F8E4M3, F32, I64};
        let plain: [&[(&str, DType, &[u64])]; 6] = [
            &[(".weight", BF16, &[4, 4]), (".weight_scale", F32, &[1])],
            &[(".weight", F8E4M3, &[4, 4]), (".weight_scale", F32, &[1])],
            &[(".weight", F8E4M3, &[4, 4]), (".weight._scale", F32, &[1])],
            &[(".weight", I64, &[4, 4])],
            &[(".codes", BF16, &[4, 4])],
            &[("_blocks", BF16, &[4, 4])],
        ];
        for tensors in plain {
            assert_eq!(packing(tensors), None, "{tensors:?}");
        }
    }
}
