//! The shapes of weights, which DFloat11's form does not have.
//!
//! A linear module's bias has an element for each row of its weight, and is in the file. Transformers' language models rarely have
//! biases; the configuration has their dimensions, and the names of their modules tell which are theirs. All that is known of a
//! weight has to fit the number of its elements. Of others nothing is known, and they are refused.

use serde_json::{Map, Value};

use crate::error::DFloat11Fault;

/// Where transformers keeps the dimensions of a language model that is part of a larger one.
const NESTED: [&str; 3] = ["text_config", "llm_config", "language_config"];

/// The dimensions of a language model, as far as its configuration says them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Dimensions {
    hidden: Option<u64>,
    /// Between the projections of a feed-forward layer.
    inner: Option<u64>,
    vocabulary: Option<u64>,
    queries: Option<u64>,
    /// As many as there are values.
    keys: Option<u64>,
}

impl Dimensions {
    pub(super) fn of(config: &Map<String, Value>) -> Dimensions {
        let nested = NESTED.iter().filter_map(|name| config.get(*name)?.as_object());
        let config = std::iter::once(config).chain(nested).find(|config| config.contains_key("hidden_size"));
        let number = |key: &str| config?.get(key)?.as_u64().filter(|number| *number > 0);
        let (hidden, heads) = (number("hidden_size"), number("num_attention_heads"));
        let of_a_head = number("head_dim").or_else(|| Some(hidden? / heads?));
        let of_heads = |heads: Option<u64>| heads?.checked_mul(of_a_head?).filter(|number| *number > 0);
        Dimensions {
            hidden,
            inner: number("intermediate_size"),
            vocabulary: number("vocab_size"),
            queries: of_heads(heads),
            keys: of_heads(number("num_key_value_heads").or(heads)),
        }
    }

    /// The rows and columns of a module's weight, as far as its name tells them.
    fn of_module(&self, module: &str) -> (Option<u64>, Option<u64>) {
        let Dimensions { hidden, inner, vocabulary, queries, keys } = *self;
        // Experts have dimensions of their own.
        let inner = if module.contains("expert") { None } else { inner };
        match module.rsplit('.').next().unwrap_or(module) {
            "q_proj" => (queries, hidden),
            "k_proj" | "v_proj" => (keys, hidden),
            "qkv_proj" => {
                (keys.zip(queries).and_then(|(keys, queries)| queries.checked_add(keys.checked_mul(2)?)), hidden)
            }
            "o_proj" => (hidden, queries),
            "gate_proj" | "up_proj" => (inner, hidden),
            "gate_up_proj" => (inner.and_then(|inner| inner.checked_mul(2)), hidden),
            "down_proj" => (hidden, inner),
            "embed_tokens" | "lm_head" => (vocabulary, hidden),
            _ => (None, None),
        }
    }

    /// The shape of a module's weight, which has so many elements. `bias` is the number of its bias's.
    ///
    /// # Errors
    /// [`DFloat11Fault::NoShape`] when nothing says it; [`DFloat11Fault::OtherShape`] when what says it does not fit.
    pub(super) fn shape(&self, module: &str, weights: u64, bias: Option<u64>) -> Result<[u64; 2], DFloat11Fault> {
        let known = bias.filter(|rows| *rows > 0).map_or_else(|| self.of_module(module), |rows| (Some(rows), None));
        let shape = match known {
            (_, Some(columns)) => [weights / columns, columns],
            (Some(rows), None) => [rows, weights / rows],
            (None, None) => return Err(DFloat11Fault::NoShape { weights }),
        };
        let (rows, columns) = known;
        if shape[0].checked_mul(shape[1]) != Some(weights) || rows.is_some_and(|rows| rows != shape[0]) {
            return Err(DFloat11Fault::OtherShape { weights, rows, columns });
        }
        Ok(shape)
    }
}
