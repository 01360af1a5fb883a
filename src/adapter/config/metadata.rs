//! What the header of an adapter's file says of rank and alpha.

use std::collections::BTreeMap;

use serde_json::Value;

use super::peft::PeftConfig;
use super::{FactorSource, ScaleFactor};
use crate::error::AdapterFault;

/// Where diffusers and its trainers keep the settings of each network: a JSON object of `PREFIX.r`, `PREFIX.lora_alpha`, …
const DIFFUSERS: &str = "lora_adapter_metadata";

/// The keys of one pair of settings. Trainers write them as plain text.
struct PlainKeys {
    alpha: &'static str,
    ranks: &'static [&'static str],
}

const PLAIN: &[PlainKeys] = &[
    PlainKeys { alpha: "lora_alpha", ranks: &["rank", "lora_rank", "r", "lora_r"] },
    PlainKeys { alpha: "alpha", ranks: &["rank", "r"] },
    PlainKeys { alpha: "network_alpha", ranks: &["network_dim", "network_rank", "rank"] },
    // sd-scripts and Musubi Tuner.
    PlainKeys { alpha: "ss_network_alpha", ranks: &["ss_network_dim"] },
];

/// sd-scripts' other settings, a JSON object: convolutions with a kernel have a rank and an alpha of their own.
const KOHYA_ARGUMENTS: &str = "ss_network_args";

/// The settings in a header.
#[derive(Debug, Default)]
pub(in crate::adapter) struct Metadata {
    /// The settings of networks, by the prefix of their modules' names, which may be empty.
    networks: Vec<(String, PeftConfig)>,
    plain: Vec<Plain>,
    /// What convolutions with a kernel have instead.
    convolutions: Option<Plain>,
}

#[derive(Clone, Debug, PartialEq)]
struct Plain {
    key: &'static str,
    alpha: f64,
    rank: Option<u64>,
}

impl Metadata {
    /// Reads a header's metadata. What is not there, or is no number, says nothing.
    ///
    /// # Errors
    /// [`AdapterFault::Metadata`] and [`AdapterFault::Unsupported`] for a [`DIFFUSERS`] entry that is not understood.
    pub(in crate::adapter) fn parse(header: &BTreeMap<String, String>) -> Result<Metadata, AdapterFault> {
        let networks = header.get(DIFFUSERS).map_or(Ok(Vec::new()), |text| networks(text))?;
        let number = |key: &str| header.get(key).and_then(|text| text.trim().parse::<f64>().ok());
        let plain = |keys: &PlainKeys| {
            let alpha = number(keys.alpha).filter(|alpha| alpha.is_finite())?;
            let rank = keys.ranks.iter().find_map(|key| number(key)).filter(|rank| *rank > 0.0);
            Some(Plain { key: keys.alpha, alpha, rank: rank.map(|rank| rank as u64) })
        };
        let arguments: Option<Value> = header.get(KOHYA_ARGUMENTS).and_then(|text| serde_json::from_str(text).ok());
        let argument = |key: &str| match arguments.as_ref()?.get(key)? {
            Value::String(text) => text.trim().parse::<f64>().ok(),
            other => other.as_f64(),
        };
        let convolutions = argument("conv_alpha").map(|alpha| Plain {
            key: KOHYA_ARGUMENTS,
            alpha,
            rank: argument("conv_dim").map(|rank| rank as u64),
        });
        Ok(Metadata { networks, plain: PLAIN.iter().filter_map(plain).collect(), convolutions })
    }

    /// Takes the settings of a single network for all of the file's modules, if none of these has its prefix.
    pub(in crate::adapter) fn settle<'n>(mut self, mut modules: impl Iterator<Item = &'n str>) -> Metadata {
        if let [(prefix, _)] = &mut self.networks[..]
            && !modules.any(|module| has_prefix(module, prefix))
        {
            prefix.clear();
        }
        self
    }

    /// The factor of a module whose factors have this rank; `None` if the header does not say. `kernel` is for a convolution of
    /// more than one element.
    ///
    /// # Errors
    /// [`AdapterFault::Metadata`] when two settings contradict each other, or one contradicts the rank.
    pub(in crate::adapter) fn factor(
        &self,
        module: &str,
        rank: usize,
        kernel: bool,
    ) -> Result<Option<ScaleFactor>, AdapterFault> {
        let mut found: Vec<(&str, f64)> = Vec::new();
        if let Some((prefix, network)) = self.network(module) {
            let own = module[prefix.len()..].trim_start_matches('.');
            check_rank(DIFFUSERS, network.rank(own), rank)?;
            found.push((DIFFUSERS, network.scale(own)));
        }
        let of_kernel = self.convolutions.as_ref().filter(|_| kernel);
        for plain in &self.plain {
            let plain = of_kernel.filter(|_| plain.key.starts_with("ss_")).unwrap_or(plain);
            if let Some(told) = plain.rank {
                check_rank(plain.key, told, rank)?;
            }
            found.push((plain.key, plain.alpha / rank as f64));
        }
        let Some(&(key, value)) = found.first() else { return Ok(None) };
        if let Some((other, that)) = found.iter().find(|(_, that)| (that - value).abs() > 1e-6 * value.abs()) {
            return Err(fault(format!(
                "it contradicts itself: {key} gives `{module}` a factor of {value}, {other} one of {that}"
            )));
        }
        Ok(Some(ScaleFactor { value, source: FactorSource::Metadata(key.to_owned()) }))
    }

    /// The settings of the network that a module belongs to, with its prefix: the longest that fits.
    fn network(&self, module: &str) -> Option<(&str, &PeftConfig)> {
        let all = self.networks.iter().filter(|(prefix, _)| has_prefix(module, prefix));
        all.max_by_key(|(prefix, _)| prefix.len()).map(|(prefix, config)| (prefix.as_str(), config))
    }
}

fn fault(reason: String) -> AdapterFault {
    AdapterFault::Metadata { reason }
}

fn has_prefix(module: &str, prefix: &str) -> bool {
    module.strip_prefix(prefix).is_some_and(|rest| prefix.is_empty() || rest.starts_with('.'))
}

fn check_rank(key: &str, told: u64, rank: usize) -> Result<(), AdapterFault> {
    if told == rank as u64 {
        return Ok(());
    }
    Err(fault(format!("{key} speaks of rank {told}, the factors have rank {rank}")))
}

/// The networks of a [`DIFFUSERS`] entry. The settings of one have its prefix, or none if there is only one.
fn networks(text: &str) -> Result<Vec<(String, PeftConfig)>, AdapterFault> {
    let bad = |reason: String| fault(format!("{DIFFUSERS}: {reason}"));
    let settings: BTreeMap<String, Value> = serde_json::from_str(text).map_err(|e| bad(e.to_string()))?;
    let prefixes = settings.keys().filter_map(|key| Some(key.strip_suffix("lora_alpha")?.trim_end_matches('.')));
    prefixes
        .map(|prefix| {
            let own = settings.iter().filter_map(|(key, value)| {
                let key = if prefix.is_empty() { key } else { key.strip_prefix(prefix)?.strip_prefix('.')? };
                Some((key.to_owned(), value.clone()))
            });
            let config = PeftConfig::of_lora(own.collect()).map_err(|fault| match fault {
                AdapterFault::Config { reason } => bad(reason),
                other => other,
            })?;
            Ok((prefix.to_owned(), config))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metadata(entries: &[(&str, &str)]) -> Result<Metadata, AdapterFault> {
        Metadata::parse(&entries.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect())
    }

    fn factor(entries: &[(&str, &str)], module: &str, rank: usize) -> Result<Option<f64>, AdapterFault> {
        Ok(metadata(entries)?.factor(module, rank, false)?.map(|factor| factor.value))
    }

    #[test]
    fn each_network_has_its_own_settings() {
        let text = r#"{"unet.r": 4, "unet.lora_alpha": 8, "unet.alpha_pattern": {"to_k": 2}, "unet.use_rslora": false,
            "text_encoder.r": 4, "text_encoder.lora_alpha": 4, "text_encoder.use_rslora": true}"#;
        let entries = [(DIFFUSERS, text)];
        assert_eq!(factor(&entries, "unet.down.to_q", 4), Ok(Some(2.0)));
        assert_eq!(factor(&entries, "unet.down.to_k", 4), Ok(Some(0.5)));
        assert_eq!(factor(&entries, "text_encoder.layers.0.q", 4), Ok(Some(2.0)));
        assert_eq!(factor(&entries, "unets.down.to_q", 4), Ok(None));
        assert!(matches!(factor(&entries, "unet.down.to_q", 8), Err(AdapterFault::Metadata { .. })));
        assert_eq!(factor(&[(DIFFUSERS, r#"{"r": 2, "lora_alpha": 1}"#)], "anything", 2), Ok(Some(0.5)));
        let one = || metadata(&[(DIFFUSERS, r#"{"transformer.r": 2, "transformer.lora_alpha": 1}"#)]).unwrap();
        let value = |metadata: Metadata| metadata.factor("blocks.0.q", 2, false).unwrap().map(|factor| factor.value);
        assert_eq!(value(one().settle(["blocks.0.q"].into_iter())), Some(0.5));
        assert_eq!(value(one().settle(["blocks.0.q", "transformer.x"].into_iter())), None);
        assert!(matches!(factor(&[(DIFFUSERS, "{")], "x", 2), Err(AdapterFault::Metadata { .. })));
    }

    #[test]
    fn plain_settings_are_read_and_words_say_nothing() {
        assert_eq!(factor(&[("lora_alpha", "8"), ("rank", "4")], "q", 4), Ok(Some(2.0)));
        assert_eq!(factor(&[("network_alpha", "2.0")], "q", 4), Ok(Some(0.5)));
        assert_eq!(factor(&[("ss_network_alpha", "4"), ("ss_network_dim", "Dynamic")], "q", 4), Ok(Some(1.0)));
        assert_eq!(factor(&[("ss_network_alpha", "None"), ("ss_network_dim", "16")], "q", 4), Ok(None));
        assert_eq!(factor(&[("rank", "4")], "q", 4), Ok(None));
    }

    #[test]
    fn contradictions_are_errors() {
        for entries in [
            &[("lora_alpha", "8"), ("ss_network_alpha", "4")][..],
            &[("lora_alpha", "8"), ("rank", "16")],
            &[(DIFFUSERS, r#"{"r": 4, "lora_alpha": 8}"#), ("lora_alpha", "16")],
        ] {
            assert!(matches!(factor(entries, "q", 4), Err(AdapterFault::Metadata { .. })), "{entries:?}");
        }
        assert_eq!(factor(&[("lora_alpha", "8"), ("alpha", "8")], "q", 4), Ok(Some(2.0)));
    }

    #[test]
    fn convolutions_of_sd_scripts_have_settings_of_their_own() {
        let arguments = r#"{"conv_dim": "2", "conv_alpha": "1"}"#;
        let metadata =
            metadata(&[("ss_network_alpha", "8"), ("ss_network_dim", "4"), (KOHYA_ARGUMENTS, arguments)]).unwrap();
        let value = |rank, kernel| metadata.factor("conv", rank, kernel).map(|factor| factor.unwrap().value);
        assert_eq!((value(4, false), value(2, true)), (Ok(2.0), Ok(0.5)));
    }
}
