//! `adapter_config.json`, as mlx-lm writes it (`mlx_lm/tuner/utils.py`).

use serde_json::Value;

use super::fault;
use crate::error::AdapterFault;

/// The settings of an mlx-lm adapter that decide its arithmetic.
#[derive(Debug)]
pub(in crate::adapter) struct MlxConfig {
    /// What the product of the factors is multiplied by; `None` if the tensors are whole weights.
    pub(in crate::adapter) scale: Option<f64>,
    /// Whether magnitudes belong to the factors.
    pub(in crate::adapter) dora: bool,
}

impl MlxConfig {
    pub(super) fn parse(value: &Value) -> Result<MlxConfig, AdapterFault> {
        let kind = value.get("fine_tune_type").and_then(Value::as_str).unwrap_or("lora");
        if !["lora", "dora", "full"].contains(&kind) {
            return Err(AdapterFault::Unsupported { kind: format!("mlx-lm's {kind}") });
        }
        if kind == "full" {
            return Ok(MlxConfig { scale: None, dora: false });
        }
        let parameters = value.get("lora_parameters").ok_or_else(|| fault("lora_parameters is missing"))?;
        let scale = parameters.get("scale").and_then(Value::as_f64);
        let scale = scale.ok_or_else(|| fault("lora_parameters holds no scale"))?;
        Ok(MlxConfig { scale: Some(scale), dora: kind == "dora" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<MlxConfig, AdapterFault> {
        MlxConfig::parse(&serde_json::from_str(text).unwrap())
    }

    #[test]
    fn the_scale_is_read() {
        let lora = parse(r#"{"fine_tune_type": "lora", "lora_parameters": {"rank": 2, "scale": 20.0}}"#).unwrap();
        assert_eq!((lora.scale, lora.dora), (Some(20.0), false));
        let dora = parse(r#"{"fine_tune_type": "dora", "lora_parameters": {"scale": 2, "alpha": 16}}"#).unwrap();
        assert_eq!((dora.scale, dora.dora), (Some(2.0), true));
        assert_eq!(parse(r#"{"fine_tune_type": "full"}"#).unwrap().scale, None);
        assert!(matches!(parse(r#"{"lora_parameters": {"rank": 2}}"#), Err(AdapterFault::Config { .. })));
        assert!(matches!(parse(r#"{"fine_tune_type": "vera"}"#), Err(AdapterFault::Unsupported { .. })));
    }
}
