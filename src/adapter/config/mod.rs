//! What is said of an adapter beside its factors: in `adapter_config.json`, in the header of its file, or by the caller.
//!
//! The factors of a module are multiplied by alpha / rank (alpha / sqrt(rank) for rsLoRA). The first of these that says an
//! alpha decides: the caller, the module's own `alpha` tensor, the configuration, the header. Without any the factor is 1,
//! as the programs that write such files read them; only PEFT's names never mean that.

pub(super) mod metadata;
mod mlx;
pub(super) mod peft;

use serde::Serialize;
use serde_json::Value;

use crate::error::AdapterFault;
pub(super) use metadata::Metadata;
pub(super) use mlx::MlxConfig;
pub(super) use peft::PeftConfig;

/// The configuration of an adapter's folder.
#[derive(Debug)]
pub(super) enum Config {
    Peft(PeftConfig),
    Mlx(MlxConfig),
}

impl Config {
    /// Reads the text of an `adapter_config.json`, by PEFT or by mlx-lm.
    ///
    /// # Errors
    /// [`AdapterFault::Config`] and [`AdapterFault::Unsupported`], as [`PeftConfig::parse`].
    pub(super) fn parse(text: &str) -> Result<Config, AdapterFault> {
        // A text that the caller read may begin with the byte order mark.
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        let value: Value = serde_json::from_str(text).map_err(|e| fault(e.to_string()))?;
        let has = |key: &str| value.get(key).is_some();
        if !has("peft_type") && (has("lora_parameters") || has("fine_tune_type")) {
            return MlxConfig::parse(&value).map(Config::Mlx);
        }
        PeftConfig::parse(text).map(Config::Peft)
    }

    pub(super) fn peft(&self) -> Option<&PeftConfig> {
        match self {
            Config::Peft(config) => Some(config),
            Config::Mlx(_) => None,
        }
    }
}

fn fault(reason: impl Into<String>) -> AdapterFault {
    AdapterFault::Config { reason: reason.into() }
}

/// What the change of a module is multiplied by, besides the strength.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct ScaleFactor {
    /// alpha / rank, alpha / sqrt(rank), or the scale itself where the program stores that.
    pub value: f64,
    /// Where it comes from.
    pub source: FactorSource,
}

/// Where a [`ScaleFactor`] comes from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum FactorSource {
    /// [`Adapter::alpha`](super::Adapter::alpha).
    Caller,
    /// `adapter_config.json`.
    Config,
    /// The module's `alpha` tensor.
    Tensor,
    /// This key of the metadata in the file's header.
    Metadata(String),
    /// Nothing says an alpha, which means 1.
    Nothing,
}

impl std::fmt::Display for FactorSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            FactorSource::Caller => f.write_str("the given alpha"),
            FactorSource::Config => f.write_str("adapter_config.json"),
            FactorSource::Tensor => f.write_str("its alpha tensor"),
            FactorSource::Metadata(key) => write!(f, "{key} in the header"),
            FactorSource::Nothing => f.write_str("no alpha"),
        }
    }
}
