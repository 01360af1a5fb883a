//! `adapter_config.json`, as PEFT writes it.

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;

use regex::Regex;
use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::Value;

use crate::error::AdapterFault;

/// The settings of a PEFT adapter that decide its arithmetic.
#[derive(Debug)]
pub(crate) struct PeftConfig {
    rank: u64,
    alpha: f64,
    ranks: Patterns<u64>,
    alphas: Patterns<f64>,
    root_scale: bool,
    pub(crate) dora: bool,
    /// The weights are stored [in, out].
    pub(crate) transposed: bool,
}

/// Values that override a setting for modules whose names match, in order of the file.
type Patterns<T> = Vec<(Regex, T)>;

/// Keys whose values do not change what the stored factors mean.
const INERT: &[&str] = &[
    "auto_mapping",
    "base_model_name_or_path",
    "bias",
    "exclude_modules",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "lora_bias",
    "lora_dropout",
    "megatron_core",
    "modules_to_save",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
];

/// Initialisations that leave the base model's weights as they are.
const PLAIN_INITS: &[&str] = &["gaussian", "orthogonal"];

#[derive(Deserialize)]
struct Raw {
    peft_type: Option<String>,
    r: Option<u64>,
    lora_alpha: Option<f64>,
    use_rslora: Option<bool>,
    use_dora: Option<bool>,
    fan_in_fan_out: Option<bool>,
    rank_pattern: Option<Ordered<u64>>,
    alpha_pattern: Option<Ordered<f64>>,
    init_lora_weights: Option<Value>,
    #[serde(flatten)]
    rest: BTreeMap<String, Value>,
}

impl PeftConfig {
    /// Reads the text of an `adapter_config.json`.
    ///
    /// # Errors
    /// [`AdapterFault::Config`] naming the setting, [`AdapterFault::Unsupported`] naming the kind of adapter or the
    /// initialisation that changed the base model's weights.
    pub(crate) fn parse(text: &str) -> Result<PeftConfig, AdapterFault> {
        // A text that the caller read may begin with the byte order mark.
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        let raw: Raw = serde_json::from_str(text).map_err(|e| config(e.to_string()))?;
        match raw.peft_type.as_deref() {
            Some("LORA") => {}
            Some(kind) => return Err(AdapterFault::Unsupported { kind: format!("PEFT's {kind}") }),
            None => return Err(config("peft_type is missing")),
        }
        check_init(raw.init_lora_weights.as_ref())?;
        for (key, value) in &raw.rest {
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
        let rank = raw.r.filter(|&r| r > 0).ok_or_else(|| config("r is missing or zero"))?;
        let alpha = raw.lora_alpha.ok_or_else(|| config("lora_alpha is missing"))?;
        Ok(PeftConfig {
            rank,
            alpha,
            ranks: patterns(raw.rank_pattern)?,
            alphas: patterns(raw.alpha_pattern)?,
            root_scale: raw.use_rslora == Some(true),
            dora: raw.use_dora == Some(true),
            transposed: raw.fan_in_fan_out == Some(true),
        })
    }

    /// The rank that the factors of `module` have to have.
    pub(crate) fn rank(&self, module: &str) -> u64 {
        pattern(&self.ranks, module).unwrap_or(self.rank)
    }

    /// What the product of the factors of `module` is multiplied by: alpha / r, or alpha / sqrt(r) for rsLoRA.
    pub(crate) fn scale(&self, module: &str) -> f64 {
        let alpha = pattern(&self.alphas, module).unwrap_or(self.alpha);
        let rank = self.rank(module) as f64;
        alpha / if self.root_scale { rank.sqrt() } else { rank }
    }
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

fn config(reason: impl Into<String>) -> AdapterFault {
    AdapterFault::Config { reason: reason.into() }
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
    fn unknown_settings_are_errors_unless_they_say_nothing() {
        assert!(parse(r#", "new_a": null, "new_b": false, "new_c": [], "new_d": {}, "new_e": """#).is_ok());
        assert!(parse(r#", "megatron_core": "megatron.core", "qalora_group_size": 16"#).is_ok());
        for settings in [r#", "new_a": 1"#, r#", "use_qalora": true"#, r#", "target_parameters": ["w"]"#] {
            assert!(matches!(parse(settings), Err(AdapterFault::Config { .. })), "{settings}");
        }
        assert!(matches!(parse(r#", "rank_pattern": {"(?=x)": 1}"#), Err(AdapterFault::Config { .. })));
    }

    #[test]
    fn other_kinds_and_changed_bases_are_refused_by_name() {
        for init in ["pissa", "pissa_niter_16", "olora", "corda", "eva", "loftq"] {
            let Err(AdapterFault::Unsupported { kind }) = parse(&format!(r#", "init_lora_weights": "{init}""#)) else {
                panic!("{init}")
            };
            assert!(kind.contains(init));
        }
        assert!(parse(r#", "init_lora_weights": "gaussian""#).is_ok());
        let boft = PeftConfig::parse(r#"{"peft_type": "BOFT"}"#);
        assert_eq!(boft.unwrap_err(), AdapterFault::Unsupported { kind: "PEFT's BOFT".to_owned() });
        assert!(PeftConfig::parse("{}").is_err() && PeftConfig::parse("[").is_err());
        assert!(parse(r#", "r": 4"#).is_err());
    }
}
