//! The angles of rotary positions, and their scalings. After transformers, modeling_rope_utils.py.

use serde::Deserialize;

/// `rope_scaling`, or `rope_parameters`, which has the base as well.
#[derive(Clone, Debug, Default, Deserialize)]
pub(crate) struct Rope {
    pub(crate) rope_theta: Option<f32>,
    #[serde(alias = "type")]
    rope_type: Option<String>,
    partial_rotary_factor: Option<f32>,
    factor: Option<f32>,
    low_freq_factor: Option<f32>,
    high_freq_factor: Option<f32>,
    original_max_position_embeddings: Option<f32>,
    attention_factor: Option<f32>,
    mscale: Option<f32>,
    mscale_all_dim: Option<f32>,
    beta_fast: Option<f32>,
    beta_slow: Option<f32>,
    truncate: Option<bool>,
    /// What sines and cosines are multiplied by beside what the type says: `rope.scaling.attn_factor` of GGUF files.
    scale: Option<f32>,
}

/// How positions turn the pairs of a head.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Rotary {
    /// The angles by which one position turns the pairs, `[head_dim / 2]`.
    pub(crate) angles: Vec<f32>,
    /// What sines and cosines are multiplied by.
    pub(crate) scale: f32,
}

impl Rope {
    /// The angles of heads of `dim` values for a base, after what this says of them.
    ///
    /// # Errors
    /// What is missing, out of range, or not here.
    pub(crate) fn rotary(&self, theta: f32, dim: usize) -> Result<Rotary, String> {
        let plain: Vec<f32> = (0..dim / 2).map(|pair| 1.0 / theta.powf((2 * pair) as f32 / dim as f32)).collect();
        if self.partial_rotary_factor.is_some_and(|part| part != 1.0) {
            return Err("heads of which only a part is turned (`partial_rotary_factor`) are not here".to_owned());
        }
        let (angles, scale) = match self.rope_type.as_deref() {
            None | Some("default") => (plain, 1.0),
            Some("linear") => {
                let factor = needed(self.factor, "factor")?;
                (plain.iter().map(|angle| angle / factor).collect(), 1.0)
            }
            Some("llama3") => (self.llama3(&plain)?, 1.0),
            Some("yarn") => self.yarn(&plain, theta, dim)?,
            Some(other) => return Err(format!("rotary positions of type `{other}` are not here")),
        };
        Ok(Rotary { angles, scale: scale * self.scale.map_or(Ok(1.0), |scale| needed(Some(scale), "scale"))? })
    }

    /// What turns often within the trained length stays, what does not is slowed, and between them is a ramp.
    fn llama3(&self, plain: &[f32]) -> Result<Vec<f32>, String> {
        let factor = needed(self.factor, "factor")?;
        let low = needed(self.low_freq_factor, "low_freq_factor")?;
        let high = needed(self.high_freq_factor, "high_freq_factor")?;
        let trained = needed(self.original_max_position_embeddings, "original_max_position_embeddings")?;
        let scaled = plain.iter().map(|angle| {
            let turns = trained * angle / (2.0 * std::f32::consts::PI);
            let kept = ((turns - low) / (high - low)).clamp(0.0, 1.0);
            angle * (kept + (1.0 - kept) / factor)
        });
        Ok(scaled.collect())
    }

    /// YaRN (arXiv 2309.00071): the same with a ramp over the pairs' numbers, and longer queries and keys.
    fn yarn(&self, plain: &[f32], theta: f32, dim: usize) -> Result<(Vec<f32>, f32), String> {
        let factor = needed(self.factor, "factor")?;
        let trained = needed(self.original_max_position_embeddings, "original_max_position_embeddings")?;
        let fast = self.beta_fast.map_or(Ok(32.0), |beta| needed(Some(beta), "beta_fast"))?;
        let slow = self.beta_slow.map_or(Ok(1.0), |beta| needed(Some(beta), "beta_slow"))?;
        // The number of the pair that turns so often within the trained length.
        let pair = |turns: f32| dim as f32 * (trained / (turns * 2.0 * std::f32::consts::PI)).ln() / (2.0 * theta.ln());
        let (mut first, mut last) = (pair(fast), pair(slow));
        if self.truncate != Some(false) {
            (first, last) = (first.floor(), last.ceil());
        }
        (first, last) = (first.max(0.0), last.min(dim as f32 - 1.0));
        if first == last {
            last += 0.001;
        }
        let scaled = plain.iter().enumerate().map(|(index, angle)| {
            let slowed = ((index as f32 - first) / (last - first)).clamp(0.0, 1.0);
            angle * (1.0 - slowed) + angle / factor * slowed
        });
        let longer = |by: f32| if factor <= 1.0 { 1.0 } else { 0.1 * by * factor.ln() + 1.0 };
        let scale = match (self.attention_factor, self.mscale, self.mscale_all_dim) {
            (Some(given), ..) => needed(Some(given), "attention_factor")?,
            (None, Some(own), Some(all)) if own != 0.0 && all != 0.0 => longer(own) / longer(all),
            _ => longer(1.0),
        };
        Ok((scaled.collect(), scale))
    }
}

/// A number above zero.
fn needed(value: Option<f32>, name: &str) -> Result<f32, String> {
    match value {
        Some(value) if value.is_finite() && value > 0.0 => Ok(value),
        Some(value) => Err(format!("the scaling of rotary positions has the `{name}` {value}")),
        None => Err(format!("the scaling of rotary positions has no `{name}`")),
    }
}
