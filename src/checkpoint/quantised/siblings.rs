//! The tensors beside a weight, by their names.

use std::collections::BTreeMap;
use std::ops::Bound;

use super::config::Stated;
use super::note::{self, Note};
use crate::checkpoint::{Checkpoint, Gguf, Layout, TensorId, TensorInfo};

/// A checkpoint's tensors by name, to look around a weight in.
#[derive(Default)]
pub(crate) struct Siblings<'a> {
    by_name: BTreeMap<&'a str, (TensorId, &'a TensorInfo)>,
    /// The checkpoint that notes are read from; none if only names and shapes are known.
    checkpoint: Option<&'a Checkpoint>,
}

impl<'a> Siblings<'a> {
    /// Of names and shapes alone.
    pub(crate) fn of(layout: &'a Layout) -> Siblings<'a> {
        let named = layout.tensor_ids().zip(layout.tensors());
        Siblings { by_name: named.map(|(id, info)| (info.name.as_str(), (id, info))).collect(), checkpoint: None }
    }

    /// Of a checkpoint, whose notes can be read.
    pub(crate) fn of_checkpoint(checkpoint: &'a Checkpoint) -> Siblings<'a> {
        Siblings { checkpoint: Some(checkpoint), ..Siblings::of(checkpoint.layout()) }
    }

    /// The tensor `name`.
    pub(crate) fn find(&self, name: &str) -> Option<(TensorId, &'a TensorInfo)> {
        self.by_name.get(name).copied()
    }

    /// The tensor `stem` followed by `ending`.
    pub(super) fn ending(&self, stem: &str, ending: &str) -> Option<&'a TensorInfo> {
        self.find(&format!("{stem}{ending}")).map(|(_, info)| info)
    }

    /// The tensors whose names begin with `stem`, with what follows it.
    pub(crate) fn under<'s>(
        &'s self,
        stem: &'s str,
    ) -> impl Iterator<Item = (&'a str, TensorId, &'a TensorInfo)> + use<'a, 's> {
        let from = (Bound::Included(stem), Bound::Unbounded);
        self.by_name
            .range::<str, _>(from)
            .map_while(move |(name, (id, info))| Some((name.strip_prefix(stem)?, *id, *info)))
    }

    /// The tensors beside `weight` that say something of its values, with their roles.
    pub(crate) fn beside(&self, weight: &TensorInfo) -> Vec<Sibling<'a>> {
        let stem = stem(&weight.name);
        let own = self.under(stem).filter(|(_, _, info)| info.name != weight.name);
        let sibling = |(rest, id, info): (&'a str, TensorId, &'a TensorInfo)| {
            let role = Role::of(rest, &info.name, stem.len() < weight.name.len())?;
            Some(Sibling { id, info, role })
        };
        own.filter_map(sibling).collect()
    }

    /// The bytes of a tensor that holds text.
    ///
    /// # Errors
    /// Why they cannot be read.
    pub(crate) fn text(&self, id: TensorId, info: &TensorInfo) -> Result<Vec<u8>, String> {
        note::text(self.checkpoint, id, info)
    }

    /// The bytes of a tensor; `None` if they cannot be read.
    pub(super) fn bytes(&self, id: TensorId, info: &TensorInfo) -> Option<Vec<u8>> {
        let mut bytes = vec![0; usize::try_from(info.bytes).ok()?];
        self.checkpoint?.read(id, &mut bytes).ok().map(|()| bytes)
    }

    /// The metadata of the model's GGUF file.
    pub(crate) fn gguf(&self) -> Option<Gguf<'a>> {
        self.checkpoint.and_then(Checkpoint::gguf)
    }

    /// The scale of a weight in a GGUF file, of any type: llama.cpp multiplies what the weight gives by it (NVFP4, BitNet;
    /// `src/llama-graph.cpp`, `build_lora_mm`). That beside a router (Gemma 4) is of what it is given.
    pub(crate) fn scale_in_gguf(&self, weight: &TensorInfo) -> Option<&'a TensorInfo> {
        let stem = weight.name.strip_suffix(".weight").filter(|stem| !stem.ends_with(".ffn_gate_inp"));
        self.gguf().and_then(|_| self.ending(stem?, ".scale"))
    }

    /// What the model's configuration says of all weights.
    pub(crate) fn stated(&self) -> Stated {
        self.checkpoint.map(Checkpoint::stated).unwrap_or_default()
    }

    /// What the file notes about the quantisation of `weight`; none if it notes nothing.
    ///
    /// # Errors
    /// The name of a note that is not understood, and why.
    pub(crate) fn note(&self, weight: &TensorInfo) -> Result<Option<Note>, (String, String)> {
        let stem = stem(&weight.name);
        match self.find(&format!("{stem}.{}", note::TENSOR)) {
            Some((id, info)) => note::read(self.checkpoint, id, info).map(Some).map_err(|why| (info.name.clone(), why)),
            None => {
                let metadata = self.checkpoint.and_then(|checkpoint| checkpoint.metadata().get(note::METADATA));
                let found = metadata.map_or(Ok(None), |text| note::of_metadata(text, stem));
                found.map_err(|why| (note::METADATA.to_owned(), why))
            }
        }
    }
}

/// A weight's name without its own word: the module's name for `X.weight`, else the whole.
fn stem(weight: &str) -> &str {
    weight.strip_suffix(".weight").unwrap_or(weight)
}

/// A tensor beside a weight.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sibling<'a> {
    pub(crate) id: TensorId,
    pub(crate) info: &'a TensorInfo,
    pub(crate) role: Role,
}

/// What a tensor beside a weight is by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// What the weight's codes are multiplied by. All programs that write these names multiply, those that call it an
    /// inverse too.
    Scale,
    /// The scale of queries, keys or values, or the scale of a weight that has the name of one of these.
    ScaleOrActivation,
    /// Anything else that speaks of a scale, a zero point or a code.
    Unknown,
}

/// The endings of scales beside `X.weight`.
///
/// | ending | written by |
/// |---|---|
/// | `.scale_weight` | ComfyUI (with the marker `scaled_fp8`), musubi-tuner |
/// | `.weight_scale` | compressed-tensors and llm-compressor, ModelOpt, transformers (FBGEMM), ComfyUI |
/// | `.weight_scale_inv` | DeepSeek, transformers |
/// | `.qscale_weight` | Mistral |
/// | `.scale`, `.scales`, `.weight.scale`, `.weight._scale` | DeepSeek's inference, quanto |
/// | `_scale`, `_scale_inv` | stacked experts that are named as modules |
const OF_MODULE: [&str; 10] = [
    ".scale_weight",
    ".weight_scale",
    ".weight_scale_inv",
    ".qscale_weight",
    ".scale",
    ".scales",
    ".weight.scale",
    ".weight._scale",
    "_scale",
    "_scale_inv",
];

/// The endings of scales beside a weight with a name of its own, as stacked experts have in transformers and, for
/// `_weight_scale`, in ModelOpt.
const OF_PARAMETER: [&str; 6] = ["_scale", "_scale_inv", "_scales_inv", "_weight_scale", ".scale", "._scale"];

impl Role {
    /// The role of the tensor `name`, which is the weight's stem and `rest`; none if it says nothing of the weight's values.
    fn of(rest: &str, name: &str, of_module: bool) -> Option<Role> {
        let known: &[&str] = if of_module { &OF_MODULE } else { &OF_PARAMETER };
        let own = name.rsplit('.').next().unwrap_or(name);
        if is_of_attention(own) {
            // `k_scale` beside `k.weight` could be either.
            return (rest.starts_with('_') && known.contains(&rest)).then_some(Role::ScaleOrActivation);
        }
        if known.contains(&rest) {
            return Some(Role::Scale);
        }
        let tail = match rest.strip_prefix('.') {
            Some(tail) => {
                let first = tail.split('.').next().unwrap_or(tail);
                let nested = first.len() < tail.len();
                if nested && !(of_module && first.starts_with("weight")) && !first.contains("quant") {
                    return None;
                }
                tail
            }
            None if rest.starts_with('_') && !rest.contains('.') => rest,
            None => return None,
        };
        if tail == note::TENSOR || is_of_activations(tail) {
            return None;
        }
        let of_weight = of_module && rest.starts_with(".weight");
        (of_weight || speaks_of_codes(tail)).then_some(Role::Unknown)
    }
}

fn words(name: &str) -> impl Iterator<Item = String> {
    name.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty()).map(str::to_ascii_lowercase)
}

/// Whether it is a scale of the values that a module takes or gives (`input_scale`, `scale_input`, `qscale_act`).
fn is_of_activations(name: &str) -> bool {
    const WORDS: [&str; 9] =
        ["input", "inputs", "output", "outputs", "act", "acts", "activation", "activations", "softmax"];
    words(name).any(|word| WORDS.contains(&word.as_str())) && !name.contains("weight")
}

/// Whether it is a scale of what attention computes (`k_scale`, `kv_cache_scale`, `prob_scale`).
fn is_of_attention(name: &str) -> bool {
    const FIRST: [&str; 9] = ["q", "k", "v", "kv", "qk", "qkv", "p", "prob", "probs"];
    const REST: [&str; 8] = ["scale", "scales", "inv", "zero", "point", "cache", "descale", "amax"];
    let mut words = words(name);
    words.next().is_some_and(|first| FIRST.contains(&first.as_str())) && {
        let rest: Vec<String> = words.collect();
        !rest.is_empty() && rest.iter().all(|word| REST.contains(&word.as_str()))
    }
}

/// Whether a name speaks of what makes values of codes.
pub(super) fn speaks_of_codes(name: &str) -> bool {
    const PARTS: [&str; 17] = [
        "scal", "zero", "quant", "amax", "absmax", "scb", "codebook", "factor", "mult", "exponent", "shift", "offset",
        "smooth", "hadamard", "rot", "perm", "centroid",
    ];
    const WORDS: [&str; 10] = ["max", "min", "inv", "lut", "zp", "exp", "idx", "meta", "su", "sv"];
    let of_codes = |word: String| PARTS.iter().any(|part| word.contains(part)) || WORDS.contains(&word.as_str());
    words(name).any(of_codes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;

    /// The tensors beside `weight` with their roles.
    fn beside(weight: &str, others: &[&str]) -> Vec<(String, Role)> {
        let named = |name: &&str| TensorInfo::new(*name, DType::F32, &[1], 0, 0).unwrap();
        let layout = Layout::new(std::iter::once(&weight).chain(others).map(named).collect());
        let siblings = Siblings::of(&layout);
        let found = siblings.beside(siblings.find(weight).unwrap().1);
        found.iter().map(|sibling| (sibling.info.name.clone(), sibling.role)).collect()
    }

    #[test]
    fn scales_are_known_in_every_spelling() {
        for ending in OF_MODULE {
            let name = format!("a.proj{ending}");
            assert_eq!(beside("a.proj.weight", &[&name]), [(name, Role::Scale)]);
        }
        for ending in OF_PARAMETER {
            let name = format!("experts.gate_up_proj{ending}");
            assert_eq!(beside("experts.gate_up_proj", &[&name]), [(name, Role::Scale)]);
        }
        assert_eq!(beside("experts.output_proj", &["experts.output_proj_scale"])[0].1, Role::Scale);
    }

    #[test]
    fn what_speaks_of_codes_is_never_overlooked() {
        for name in [
            "weight_zero_point",
            "weight_scale_2",
            "weight_global_scale",
            "weight_scalar",
            "weight_xyz",
            "weight_g_idx",
            "weight.absmax",
            "weight_quantizer._amax",
            "pre_quant_scale",
            "smooth_factor",
            "SCB",
            "amax",
            "dequant",
            "wscales",
            "multiplier",
        ] {
            let name = format!("a.proj.{name}");
            assert_eq!(beside("a.proj.weight", &[&name]), [(name, Role::Unknown)]);
        }
        assert_eq!(beside("a.proj.weight", &["a.proj_amax"])[0].1, Role::Unknown);
        assert_eq!(beside("experts.w1", &["experts.w1_zero_point"])[0].1, Role::Unknown);
        assert_eq!(beside("a.k.weight", &["a.k_scale"])[0].1, Role::ScaleOrActivation);
    }

    #[test]
    fn scales_of_activations_and_of_other_modules_say_nothing() {
        let others = [
            "input_scale",
            "input_scale_inv",
            "scale_input",
            "output_scale",
            "qscale_act",
            "activation_scale",
            "k_scale",
            "v_scale",
            "q_scale",
            "kv_scale",
            "prob_scale",
            "kv_cache_scale",
            "input_quantizer._amax",
            "input_zero_point",
            "bias",
            "comfy_quant",
            "norm.scale",
            "lora_A.weight",
        ]
        .map(|name| format!("a.proj.{name}"));
        let others: Vec<&str> = others.iter().map(String::as_str).collect();
        assert_eq!(beside("a.proj.weight", &others), []);
        let far = ["a.q_norm.scale", "a.proj2.weight_scale", "a.scale", "a.proj_out.weight_scale", "a.proj_bias"];
        assert_eq!(beside("a.proj.weight", &far), []);
        assert_eq!(beside("experts.w1", &["experts.w1_bias", "experts.w1_activation_scale", "experts.w10_scale"]), []);
    }
}
