//! An adapter and a checkpoint of names and sizes that the input picks: refused, or applied to the same bytes twice,
//! with every tensor that the report does not name as it was.

#![no_main]

use std::collections::BTreeMap;

use libfuzzer_sys::fuzz_target;
use tensor_offload::adapter::{Adapter, Matching, RotaryRows, Weights};
use tensor_offload::{Checkpoint, DType, Rounding, ScalePolicy, TensorId};

/// Beginnings, middles and ends of names; the input puts them together, or writes names of its own.
const ROOTS: &[&str] = &[
    "",
    "model.diffusion_model.",
    "diffusion_model.",
    "transformer.",
    "unet.",
    "lora_unet_",
    "lycoris_",
    "base_model.model.",
    "lora_te1_",
    "lora_te2_",
    "text_encoder.",
    "conditioner.embedders.0.transformer.",
    "conditioner.embedders.1.model.",
    "model.",
    "text_encoders.t5xxl.transformer.",
];
const MODULES: &[&str] = &[
    "double_blocks.0.img_attn.qkv",
    "transformer_blocks.0.attn.to_q",
    "transformer_blocks.0.attn.to_k",
    "transformer_blocks.0.attn.to_v",
    "single_blocks.1.linear1",
    "single_transformer_blocks.1.proj_mlp",
    "single_transformer_blocks.1.attn.to_q",
    "final_layer.adaLN_modulation.1",
    "norm_out.linear",
    "blk.0.attn_q",
    "layers.0.self_attn.q_proj",
    "layers.0.self_attn.k_proj",
    "layers.0.self_attn.v_proj",
    "layers.0.self_attn.qkv_proj",
    "layers.0.attention.wq",
    "blocks.0.self_attn.q",
    "blocks.0.attn1.to_q",
    "blocks.0.norm2",
    "blocks.0.norm3",
    "down_blocks.0.resnets.0.conv1",
    "input_blocks.1.0.in_layers.2",
    "text_model.encoder.layers.0.self_attn.q_proj",
    "transformer.resblocks.0.attn",
    "a",
    "a.b",
    "a_b",
    "mlp.gate_up_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
];
const PARTS: &[&str] = &[
    ".lora_up.weight",
    ".lora_down.weight",
    ".lora_mid.weight",
    ".lora_A.weight",
    ".lora_B.weight",
    ".alpha",
    ".dora_scale",
    ".reshape_weight",
    ".lora_magnitude_vector",
    ".lora_embedding_A",
    ".lora_embedding_B",
    ".lora_B.bias",
    ".hada_w1_a",
    ".hada_w1_b",
    ".hada_w2_a",
    ".hada_w2_b",
    ".hada_t1",
    ".hada_t2",
    ".lokr_w1",
    ".lokr_w1_a",
    ".lokr_w1_b",
    ".lokr_w2",
    ".lokr_w2_a",
    ".lokr_w2_b",
    ".lokr_t2",
    ".a1.weight",
    ".a2.weight",
    ".b1.weight",
    ".b2.weight",
    ".oft_blocks",
    ".diff",
    ".diff_b",
    ".set_weight",
    ".w_norm",
    ".b_norm",
    ".weight",
    ".bias",
    "",
];
const PARAMETERS: &[&str] =
    &[".weight", ".bias", ".weight_scale", ".scale_weight", ".weight_scale_inv", ".in_proj_weight", ""];
const DTYPES: &[DType] =
    &[DType::F32, DType::BF16, DType::F16, DType::F8E4M3, DType::F8E5M2, DType::I64, DType::I32, DType::F64];

/// The input, taken byte by byte; zeros when it is used up.
struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn byte(&mut self) -> u8 {
        let (first, rest) = self.0.split_first().unwrap_or((&0, &[]));
        self.0 = rest;
        *first
    }

    fn pick<'t>(&mut self, of: &[&'t str]) -> &'t str {
        of[self.byte() as usize % of.len()]
    }

    fn name(&mut self, ends: &[&str]) -> String {
        let root = self.pick(ROOTS);
        let module = match self.byte() {
            own @ 0xf0.. => (0..own - 0xef).map(|_| char::from(self.byte() & 0x7f)).collect(),
            place => MODULES[place as usize % MODULES.len()].to_owned(),
        };
        let module = if self.byte() & 3 == 0 { module.replace('.', "_") } else { module };
        format!("{root}{module}{}", self.pick(ends))
    }

    fn file(&mut self, name: &str, ends: &[&str]) -> Option<Checkpoint> {
        let mut tensors = BTreeMap::new();
        for _ in 0..self.byte() % 8 {
            let name = self.name(ends);
            let dtype = DTYPES[self.byte() as usize % DTYPES.len()];
            let shape: Vec<u64> = (0..self.byte() % 5).map(|_| u64::from(self.byte() % 9)).collect();
            let fill = self.byte();
            tensors.insert(name, (dtype, shape, fill));
        }
        let (mut header, mut data) = (Vec::new(), Vec::new());
        for (name, (dtype, shape, fill)) in tensors {
            let begin = data.len();
            let bytes = dtype.bytes_of(&shape)? as usize;
            data.extend((0..bytes).map(|at| fill.wrapping_add((at * 31) as u8) & 0x4f));
            let name: String = name.chars().map(|c| if c == '"' || c == '\\' || c < ' ' { '?' } else { c }).collect();
            let range = format!("[{begin},{}]", data.len());
            header.push(format!(r#""{name}":{{"dtype":"{}","shape":{shape:?},"data_offsets":{range}}}"#, dtype.name()));
        }
        let header = format!("{{{}}}", header.join(","));
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.bytes().chain(data));
        Checkpoint::from_bytes(name, bytes).ok()
    }
}

fn read(weights: &Weights, tensor: TensorId) -> Option<Vec<u8>> {
    let mut bytes = vec![0xee; weights.layout().tensors()[tensor.index()].bytes as usize];
    weights.read(tensor, &mut bytes).ok().map(|_| bytes)
}

fn adapter(input: &mut Input<'_>) -> Option<Adapter> {
    let strength = f32::from(input.byte() as i8) / 32.0;
    let factors = input.file("adapter", PARTS)?;
    let mut adapter = match input.byte() & 3 {
        0 => {
            Adapter::from_peft(factors, r#"{"peft_type": "LORA", "r": 2, "lora_alpha": 4, "use_dora": true}"#, strength)
        }
        1 => Adapter::from_peft(
            factors,
            r#"{"peft_type": "LORA", "r": 3, "lora_alpha": 4, "fan_in_fan_out": true}"#,
            strength,
        ),
        _ => Adapter::from_checkpoint(factors, strength),
    }
    .ok()?;
    let heads = usize::from(input.byte() % 5);
    if heads > 0 {
        adapter = adapter.rotary_rows(RotaryRows::Paired { heads, kv_heads: heads - 1 });
    }
    if input.byte() & 7 == 0 {
        let (from, to) = (input.name(&["", "*", "{}"]), input.name(&["", "*", "{}"]));
        adapter = adapter.clone().rename(&from, &to).unwrap_or(adapter);
    }
    Some(adapter)
}

fuzz_target!(|data: &[u8]| {
    let mut input = Input(data);
    let Some(base) = input.file("base", PARAMETERS) else { return };
    let matching = if input.byte() & 1 == 0 { Matching::AllowPartial } else { Matching::Strict };
    let (rounding, policy) = (input.byte(), input.byte());
    let adapters: Vec<Adapter> = (0..1 + input.byte() % 2).filter_map(|_| adapter(&mut input)).collect();
    let Ok(mut weights) = Weights::patched(base.clone(), adapters, matching) else { return };
    if rounding & 1 == 1 {
        weights = weights.rounding(Rounding::Stochastic { seed: u64::from(rounding) });
    }
    if policy & 1 == 1 {
        weights = weights.clone().scales(ScalePolicy::Recompute).unwrap_or(weights);
    }
    for (tensor, info) in base.layout().tensor_ids().zip(base.layout().tensors()) {
        let mut before = vec![0; info.bytes as usize];
        base.read(tensor, &mut before).expect("a tensor of an opened file");
        let after = read(&weights, tensor);
        assert_eq!(after, read(&weights, tensor));
        if weights.patches().tensor(tensor).is_none() {
            assert_eq!(after.as_deref(), Some(&before[..]));
        }
    }
});
