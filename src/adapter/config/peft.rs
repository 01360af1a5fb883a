//! `adapter_config.json`, as PEFT writes it.

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;

use regex::Regex;
use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::Value;

use super::fault as config;
use crate::error::AdapterFault;

/// The settings of a PEFT adapter that decide its arithmetic.
#[derive(Debug)]
pub(in crate::adapter) struct PeftConfig {
    pub(in crate::adapter) kind: PeftKind,
    rank: u64,
    alpha: f64,
    ranks: Patterns<u64>,
    alphas: Patterns<f64>,
    root_scale: bool,
    pub(in crate::adapter) dora: bool,
    /// The weights are stored [in, out].
    pub(in crate::adapter) transposed: bool,
    /// The parameters, by the end of their names, whose factors stand under their module's name.
    pub(in crate::adapter) parameters: Vec<String>,
    /// The major and minor version that wrote it.
    pub(in crate::adapter) version: Option<(u64, u64)>,
    /// Whether an embedding and the head that uses its weights stay one.
    pub(in crate::adapter) keeps_tied: bool,
    pub(in crate::adapter) rotation: Rotation,
}

/// What a folder of PEFT's holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::adapter) enum PeftKind {
    Lora,
    /// LoHa or LoKr, whose factor is alpha / rank in any case.
    Lycoris,
    /// OFT, BOFT or (IA)^3, which have no factor.
    Multiplied,
}

/// How PEFT's OFT makes a rotation of its parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in crate::adapter) struct Rotation {
    /// The terms of the Neumann series that approximates the Cayley transform; `None` for the transform itself.
    pub(in crate::adapter) terms: Option<u64>,
    /// The bound of constrained OFT on the norm of a block.
    pub(in crate::adapter) bound: Option<f64>,
    /// Whether all blocks share one rotation.
    pub(in crate::adapter) shared: bool,
}

/// Values that override a setting for modules whose names match, in order of the file.
type Patterns<T> = Vec<(Regex, T)>;

/// Keys whose values do not change what the stored factors mean, for one kind or all.
const INERT: &[&str] = &[
    "auto_mapping",
    "base_model_name_or_path",
    "bias",
    "boft_block_num",
    "boft_block_size",
    "boft_dropout",
    "boft_n_butterfly_factor",
    "corda_config",
    "decompose_both",
    "decompose_factor",
    "eva_config",
    "exclude_modules",
    "feedforward_modules",
    "inference_mode",
    "init_ia3_weights",
    "init_weights",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_bias",
    "lora_dropout",
    "lora_ga_config",
    "megatron_core",
    "module_dropout",
    "modules_to_save",
    "oft_block_size",
    "peft_version",
    "qalora_group_size",
    "rank_dropout",
    "rank_dropout_scale",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
    "use_effective_conv2d",
];

/// Initialisations that leave the base model's weights as they are. EVA chooses the ranks and the first factor only.
const PLAIN_INITS: &[&str] = &["gaussian", "orthogonal", "eva"];

/// The most terms of a Neumann series that are added up; PEFT's default is 5.
const MOST_TERMS: u64 = 64;

#[derive(Deserialize)]
struct Raw {
    peft_type: Option<String>,
    peft_version: Option<String>,
    r: Option<u64>,
    lora_alpha: Option<f64>,
    alpha: Option<f64>,
    use_rslora: Option<bool>,
    use_dora: Option<bool>,
    fan_in_fan_out: Option<bool>,
    rank_pattern: Option<Ordered<u64>>,
    alpha_pattern: Option<Ordered<f64>>,
    init_lora_weights: Option<Value>,
    target_parameters: Option<Vec<String>>,
    ensure_weight_tying: Option<bool>,
    trainable_token_indices: Option<Value>,
    use_cayley_neumann: Option<bool>,
    num_cayley_neumann_terms: Option<u64>,
    coft: Option<bool>,
    eps: Option<f64>,
    block_share: Option<bool>,
    #[serde(flatten)]
    rest: BTreeMap<String, Value>,
}

impl PeftConfig {
    /// Reads the text of an `adapter_config.json`.
    ///
    /// # Errors
    /// [`AdapterFault::Config`] naming the setting, [`AdapterFault::Unsupported`] naming the kind of adapter or the
    /// initialisation that changed the base model's weights.
    pub(super) fn parse(text: &str) -> Result<PeftConfig, AdapterFault> {
        PeftConfig::of(serde_json::from_str(text).map_err(|e| config(e.to_string()))?)
    }

    /// Reads settings of LoRA that stand elsewhere, without their kind.
    ///
    /// # Errors
    /// As [`parse`](PeftConfig::parse).
    pub(super) fn of_lora(mut settings: serde_json::Map<String, Value>) -> Result<PeftConfig, AdapterFault> {
        settings.insert("peft_type".to_owned(), "LORA".into());
        PeftConfig::of(serde_json::from_value(settings.into()).map_err(|e| config(e.to_string()))?)
    }

    fn of(raw: Raw) -> Result<PeftConfig, AdapterFault> {
        let kind = match raw.peft_type.as_deref() {
            Some("LORA") => PeftKind::Lora,
            Some("LOHA" | "LOKR") => PeftKind::Lycoris,
            Some("OFT" | "BOFT" | "IA3") => PeftKind::Multiplied,
            Some(kind) => return Err(AdapterFault::Unsupported { kind: format!("PEFT's {kind}") }),
            None => return Err(config("peft_type is missing")),
        };
        check_init(raw.init_lora_weights.as_ref())?;
        if raw.trainable_token_indices.is_some() {
            return Err(AdapterFault::Unsupported { kind: "trainable tokens".to_owned() });
        }
        check_rest(&raw.rest)?;
        let (rank, alpha) = match kind {
            PeftKind::Lora => (raw.r, raw.lora_alpha.ok_or_else(|| config("lora_alpha is missing"))?),
            PeftKind::Lycoris => (raw.r, raw.alpha.ok_or_else(|| config("alpha is missing"))?),
            PeftKind::Multiplied => (Some(1), 1.0),
        };
        if raw.rank_pattern.as_ref().is_some_and(|Ordered(ranks)| ranks.iter().any(|(_, rank)| *rank == 0)) {
            return Err(config("rank_pattern holds a rank of zero"));
        }
        if let Some(terms) = raw.num_cayley_neumann_terms.filter(|terms| *terms > MOST_TERMS) {
            return Err(config(format!("num_cayley_neumann_terms = {terms} is more than {MOST_TERMS}")));
        }
        let rotation = Rotation {
            // 0.16, which brought the series, always writes whether it is used.
            terms: (raw.use_cayley_neumann == Some(true)).then(|| raw.num_cayley_neumann_terms.unwrap_or(5)),
            bound: (raw.coft == Some(true)).then(|| raw.eps.unwrap_or(6e-5)),
            shared: raw.block_share == Some(true),
        };
        Ok(PeftConfig {
            kind,
            rank: rank.filter(|&r| r > 0).ok_or_else(|| config("r is missing or zero"))?,
            alpha,
            ranks: patterns(raw.rank_pattern)?,
            alphas: patterns(raw.alpha_pattern)?,
            root_scale: raw.use_rslora == Some(true),
            dora: raw.use_dora == Some(true),
            transposed: raw.fan_in_fan_out == Some(true),
            parameters: raw.target_parameters.unwrap_or_default(),
            version: raw.peft_version.as_deref().and_then(version),
            keeps_tied: raw.ensure_weight_tying == Some(true),
            rotation,
        })
    }

    /// The rank that the factors of `module` have to have.
    pub(in crate::adapter) fn rank(&self, module: &str) -> u64 {
        pattern(&self.ranks, module).unwrap_or(self.rank)
    }

    /// What the product of the factors of `module` is multiplied by: alpha / r, or alpha / sqrt(r) for rsLoRA.
    pub(in crate::adapter) fn scale(&self, module: &str) -> f64 {
        let alpha = pattern(&self.alphas, module).unwrap_or(self.alpha);
        let rank = self.rank(module) as f64;
        alpha / if self.root_scale { rank.sqrt() } else { rank }
    }
}

/// The first two numbers of a version (`0.18.1.dev0`).
fn version(text: &str) -> Option<(u64, u64)> {
    let mut numbers = text.split('.').map(|part| part.parse().ok());
    Some((numbers.next()??, numbers.next()??))
}

/// Refuses a setting that is not known and says something.
fn check_rest(rest: &BTreeMap<String, Value>) -> Result<(), AdapterFault> {
    for (key, value) in rest {
        let set = match value {
            Value::Null | Value::Bool(false) => false,
            Value::String(text) => !text.is_empty(),
            Value::Array(items) => !items.is_empty(),
            Value::Object(items) => !items.is_empty(),
            _ => true,
        };
        if set && !INERT.contains(&key.as_str()) {
            return Err(config(format!("the setting {key} = {value} is not known")));
        }
    }
    Ok(())
}

/// PEFT's rule: the first pattern, in order of the file, that ends the module's name at a dot.
fn pattern<T: Copy>(patterns: &Patterns<T>, module: &str) -> Option<T> {
    let module = module.strip_prefix("base_model.model.").unwrap_or(module);
    patterns.iter().find(|(regex, _)| regex.is_match(module)).map(|(_, value)| *value)
}

fn patterns<T>(raw: Option<Ordered<T>>) -> Result<Patterns<T>, AdapterFault> {
    let compile = |(text, value): (String, T)| {
        let regex = Regex::new(&format!(r"^(.*\.)?({text})$"));
        regex.map(|regex| (regex, value)).map_err(|e| config(format!("the pattern `{text}`: {e}")))
    };
    raw.map(|Ordered(entries)| entries).unwrap_or_default().into_iter().map(compile).collect()
}

fn check_init(init: Option<&Value>) -> Result<(), AdapterFault> {
    match init {
        None | Some(Value::Null | Value::Bool(_)) => Ok(()),
        Some(Value::String(name)) if PLAIN_INITS.contains(&name.to_ascii_lowercase().as_str()) => Ok(()),
        Some(Value::String(name)) => Err(AdapterFault::Unsupported { kind: format!("{name}-initialised") }),
        Some(other) => Err(config(format!("init_lora_weights = {other} is not known"))),
    }
}

/// A JSON object with its entries in the order of the text.
struct Ordered<T>(Vec<(String, T)>);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Ordered<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for Entries<T> {
            type Value = Ordered<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of patterns")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut entries = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    entries.push(entry);
                }
                Ok(Ordered(entries))
            }
        }
        deserializer.deserialize_map(Entries(PhantomData))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(settings: &str) -> Result<PeftConfig, AdapterFault> {
        PeftConfig::parse(&format!(r#"{{"peft_type": "LORA", "r": 4, "lora_alpha": 8 {settings}}}"#))
    }

    #[test]
    fn patterns_override_by_the_end_of_the_name_in_order() {
        let config = parse(
            r#", "rank_pattern": {"self_attn.v_proj": 2, "v_proj": 16, "layers\\.[01]\\.q": 3, "^k": 5},
               "alpha_pattern": {"q": 12}"#,
        )
        .unwrap();
        assert_eq!(config.rank("base_model.model.layers.0.self_attn.v_proj"), 2);
        assert_eq!(config.rank("layers.0.attn.v_proj"), 16);
        assert_eq!(config.rank("layers.0.attn.my_v_proj"), 4);
        assert_eq!((config.rank("x.layers.1.q"), config.scale("x.layers.1.q")), (3, 4.0));
        assert_eq!((config.rank("k"), config.rank("x.k")), (5, 4));
        assert_eq!(parse(r#", "use_rslora": true"#).unwrap().scale("q"), 4.0);
    }

    #[test]
    fn other_kinds_have_their_own_alpha_or_none() {
        let lokr = PeftConfig::parse(r#"{"peft_type": "LOKR", "r": 8, "alpha": 4, "module_dropout": 0.0}"#).unwrap();
        assert_eq!((lokr.kind, lokr.scale("q")), (PeftKind::Lycoris, 0.5));
        assert!(PeftConfig::parse(r#"{"peft_type": "LOHA", "r": 8, "lora_alpha": 4}"#).is_err());
        let text = r#"{"peft_type": "OFT", "r": 0, "oft_block_size": 32, "coft": true, "eps": 1e-4,
            "use_cayley_neumann": true, "num_cayley_neumann_terms": 6, "peft_version": "0.18.1.dev0"}"#;
        let oft = PeftConfig::parse(text).unwrap();
        assert_eq!(oft.rotation, Rotation { terms: Some(6), bound: Some(1e-4), shared: false });
        assert_eq!((oft.kind, oft.version), (PeftKind::Multiplied, Some((0, 18))));
    }

    #[test]
    fn unknown_settings_are_errors_unless_they_say_nothing() {
        assert!(parse(r#", "new_a": null, "new_b": false, "new_c": [], "new_d": {}, "new_e": """#).is_ok());
        assert!(parse(r#", "megatron_core": "megatron.core", "qalora_group_size": 16"#).is_ok());
        for settings in [r#", "new_a": 1"#, r#", "use_qalora": true"#, r#", "layer_replication": [[0, 4]]"#] {
            assert!(matches!(parse(settings), Err(AdapterFault::Config { .. })), "{settings}");
        }
        assert!(matches!(parse(r#", "rank_pattern": {"(?=x)": 1}"#), Err(AdapterFault::Config { .. })));
        assert!(matches!(parse(r#", "rank_pattern": {"q": 0}"#), Err(AdapterFault::Config { .. })));
        assert!(matches!(parse(r#", "num_cayley_neumann_terms": 65"#), Err(AdapterFault::Config { .. })));
    }

    #[test]
    fn other_kinds_and_changed_bases_are_refused_by_name() {
        for init in ["pissa", "pissa_niter_16", "olora", "corda", "lora_ga", "loftq"] {
            let Err(AdapterFault::Unsupported { kind }) = parse(&format!(r#", "init_lora_weights": "{init}""#)) else {
                panic!("{init}")
            };
            assert!(kind.contains(init));
        }
        for settings in [
            r#", "init_lora_weights": "gaussian""#,
            r#", "init_lora_weights": "eva", "eva_config": {"rho": 2.0}"#,
            r#", "init_lora_weights": true, "loftq_config": {"loftq_bits": 4}"#,
        ] {
            assert!(parse(settings).is_ok(), "{settings}");
        }
        let vera = PeftConfig::parse(r#"{"peft_type": "VERA"}"#);
        assert_eq!(vera.unwrap_err(), AdapterFault::Unsupported { kind: "PEFT's VERA".to_owned() });
        assert!(PeftConfig::parse("{}").is_err() && PeftConfig::parse("[").is_err());
        assert!(parse(r#", "r": 4"#).is_err());
    }
}
