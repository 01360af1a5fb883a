//! What a model's configuration says of its network, as far as the division among ranks needs it.

use serde_json::Value;

use crate::checkpoint::{Gguf, GgufValue};

/// The names of a network, and the numbers of its heads.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Network {
    /// `model_type` of transformers, that of the text model in it, `_class_name` of diffusers, or `general.architecture` of a GGUF file.
    pub(super) names: Vec<String>,
    pub(super) heads: Option<u64>,
    pub(super) kv_heads: Option<u64>,
}

impl Network {
    /// What `config.json` says.
    pub(in crate::checkpoint) fn of(config: &Value) -> Network {
        const INNER: [&str; 3] = ["text_config", "llm_config", "language_config"];
        let inner: Vec<&Value> = INNER.iter().filter_map(|name| config.get(name)).collect();
        let all = || inner.iter().copied().chain([config]);
        let number = |keys: &[&str]| {
            all().find_map(|config| keys.iter().find_map(|key| config.get(key)?.as_u64())).filter(|number| *number > 0)
        };
        let word =
            |key: &str| all().filter_map(|config| config.get(key)?.as_str()).map(str::to_owned).collect::<Vec<_>>();
        let heads = number(&["num_attention_heads", "n_head", "n_heads", "num_heads"]);
        let grouped = all().all(|config| config.get("multi_query_attention").is_none_or(|value| value != false));
        let kv_heads = number(&["num_key_value_heads", "num_kv_heads", "n_head_kv"])
            .or_else(|| number(&["multi_query_group_num"]).filter(|_| grouped));
        let names = [word("model_type"), word("_class_name")].concat();
        Network { names, heads, kv_heads: kv_heads.or(heads) }
    }

    /// What the metadata of a GGUF file say.
    pub(super) fn of_gguf(gguf: &Gguf<'_>) -> Network {
        let Some(name) = gguf.architecture() else { return Network::default() };
        let number = |key: &str| gguf.of_architecture(key).and_then(GgufValue::as_u64).filter(|number| *number > 0);
        // Some networks have a number for each layer.
        let of_layers = |key: &str| {
            let array = gguf.array(&format!("{name}.{key}"))?.ok()?;
            let numbers: Vec<i128> = array.integers()?.collect();
            let first = *numbers.first()?;
            u64::try_from(first).ok().filter(|number| *number > 0 && numbers.iter().all(|other| *other == first))
        };
        let either = |key: &str| number(key).or_else(|| of_layers(key));
        let (heads, kv_heads) = (either("attention.head_count"), either("attention.head_count_kv"));
        // Without a number there are as many as heads; with one for each layer that differ, none is that of all.
        let same = gguf.array(&format!("{name}.attention.head_count_kv")).is_none();
        Network { names: vec![name.to_owned()], heads, kv_heads: kv_heads.or(heads.filter(|_| same)) }
    }
}
