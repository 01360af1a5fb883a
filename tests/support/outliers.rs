//! Models of which one table is larger than all else: the names and shapes of all-MiniLM, and a Llama of many tokens.

use tensor_offload::DType;
use tensor_offload::checkpoint::{Layout, TensorInfo, TensorSpec};

use super::spec;

/// A BERT of these dimensions, in the names of all-MiniLM's checkpoint.
pub(crate) fn bert(dtype: DType, vocabulary: u64, hidden: u64, layers: u64, intermediate: u64) -> Vec<TensorSpec> {
    let mut tensors = Vec::new();
    let mut add = |name: String, shape: &[u64]| tensors.push(spec(name, dtype, shape));
    add("embeddings.word_embeddings.weight".into(), &[vocabulary, hidden]);
    add("embeddings.position_embeddings.weight".into(), &[512, hidden]);
    add("embeddings.token_type_embeddings.weight".into(), &[2, hidden]);
    let norm = |name: &str| [format!("{name}.LayerNorm.weight"), format!("{name}.LayerNorm.bias")];
    norm("embeddings").into_iter().for_each(|name| add(name, &[hidden]));
    for layer in 0..layers {
        let name = |name: &str| format!("encoder.layer.{layer}.{name}");
        for (role, out, from) in [
            ("attention.self.query", hidden, hidden),
            ("attention.self.key", hidden, hidden),
            ("attention.self.value", hidden, hidden),
            ("attention.output.dense", hidden, hidden),
            ("intermediate.dense", intermediate, hidden),
            ("output.dense", hidden, intermediate),
        ] {
            add(name(&format!("{role}.weight")), &[out, from]);
            add(name(&format!("{role}.bias")), &[out]);
        }
        for place in ["attention.output", "output"] {
            norm(&name(place)).into_iter().for_each(|name| add(name, &[hidden]));
        }
    }
    add("pooler.dense.weight".into(), &[hidden, hidden]);
    add("pooler.dense.bias".into(), &[hidden]);
    tensors
}

/// all-MiniLM-L6: 86 MiB, of which the embedding of its tokens is 44.7, and a layer 6.8.
pub(crate) fn mini_lm() -> Vec<TensorSpec> {
    bert(DType::F32, 30_522, 384, 6, 1_536)
}

/// A Llama with many tokens for its size, and a head of its own.
pub(crate) fn many_tokens(vocabulary: u64, hidden: u64, layers: u64) -> Vec<TensorSpec> {
    let bf16 = |name: String, shape: &[u64]| spec(name, DType::BF16, shape);
    let mut tensors = vec![bf16("model.embed_tokens.weight".into(), &[vocabulary, hidden])];
    for layer in 0..layers {
        let name = |name: &str| format!("model.layers.{layer}.{name}.weight");
        for role in ["q_proj", "k_proj", "v_proj", "o_proj"] {
            tensors.push(bf16(name(&format!("self_attn.{role}")), &[hidden, hidden]));
        }
        for role in ["gate_proj", "up_proj"] {
            tensors.push(bf16(name(&format!("mlp.{role}")), &[2 * hidden, hidden]));
        }
        tensors.push(bf16(name("mlp.down_proj"), &[hidden, 2 * hidden]));
        for role in ["input_layernorm", "post_attention_layernorm"] {
            tensors.push(bf16(name(role), &[hidden]));
        }
    }
    tensors.push(bf16("model.norm.weight".into(), &[hidden]));
    tensors.push(bf16("lm_head.weight".into(), &[vocabulary, hidden]));
    tensors
}

/// The layout of a file of these tensors, one after the other, without the file.
pub(crate) fn layout(tensors: &[TensorSpec]) -> Layout {
    let mut offset = 0;
    let place = |tensor: &TensorSpec| {
        let info = TensorInfo::new(tensor.name.clone(), tensor.dtype, &tensor.shape, 0, offset).unwrap();
        offset += info.bytes;
        info
    };
    Layout::new(tensors.iter().map(place).collect())
}
