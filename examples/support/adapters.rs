//! The options that name adapters and say how they are applied, and what is cast.

use std::ffi::{OsStr, OsString};
use std::path::Path;

use clap::{Args, ValueEnum};
use tensor_offload::adapter::RotaryRows;
use tensor_offload::{Adapter, Checkpoint, DType, Error, Matching, Result, ScalePolicy, Weights};

use super::casts::CastOptions;
use super::places::{Places, is_url};

/// Which adapters are applied, and how.
#[derive(Args, Clone, Debug)]
pub(crate) struct AdapterOptions {
    /// An adapter, as PATH[:STRENGTH]: a safetensors or GGUF file, or a folder of PEFT's or mlx-lm's, or its URL; applied in the order given. What is the path of a
    /// file as a whole is that file
    #[arg(long = "adapter", value_name = "PATH[:STRENGTH]")]
    pub(crate) adapters: Vec<OsString>,
    /// Apply adapters that match only in part, and list what was left out
    #[arg(long)]
    allow_partial: bool,
    /// The alpha of the adapters' modules, whose factors are multiplied by alpha / rank; for adapters whose alpha got lost
    #[arg(long, value_name = "ALPHA", allow_negative_numbers = true)]
    alpha: Option<f64>,
    /// Look up modules that an adapter calls FROM as TO; `{}` stands for a number and a final `*` for the rest of the name
    #[arg(long, value_name = "FROM=TO")]
    rename: Vec<String>,
    /// Use only the keys of adapters that begin so, such as lora_te1_ or unet.
    #[arg(long, value_name = "PREFIX")]
    only: Option<String>,
    /// The order of the checkpoint's query and key rows, where it is not known from the names: as in the adapter, or that of
    /// GGUF and Meta for so many query heads and key-value heads
    #[arg(long, value_name = "same|HEADS/KV_HEADS")]
    rotary_rows: Option<String>,
    /// Whether the scales of fp8 weights that adapters change are kept, or recomputed so that no value saturates
    #[arg(long, value_enum, default_value_t = ScalesOption::Keep)]
    scales: ScalesOption,
    /// Store weights in GGML's blocks, or packed as NF4, FP4 or NVFP4, that adapters change in that form again
    #[arg(long)]
    pub(crate) requantise: bool,
    #[command(flatten)]
    pub(crate) casts: CastOptions,
    /// Patterns of weights whose changes are not merged, and the types of their factors
    #[arg(skip)]
    pub(crate) deferred: Vec<(String, DType)>,
}

/// What becomes of scales, as an option's value.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum ScalesOption {
    Keep,
    Recompute,
}

impl AdapterOptions {
    /// The checkpoint with these adapters, which are in `places`.
    pub(crate) fn apply_to(&self, places: &Places, checkpoint: Checkpoint) -> Result<Weights> {
        let adapters = self.open(places)?;
        self.merge(checkpoint, adapters)
    }

    /// The checkpoint with adapters that are open already.
    pub(crate) fn merge(&self, checkpoint: Checkpoint, adapters: Vec<Adapter>) -> Result<Weights> {
        let matching = if self.allow_partial { Matching::AllowPartial } else { Matching::Strict };
        let adapters = adapters.into_iter().map(|adapter| self.settings(adapter)).collect::<Result<_>>()?;
        let weights = match self.requantise {
            true => self
                .deferred
                .iter()
                .try_fold(Weights::repacked(checkpoint, adapters, matching)?, |weights, (pattern, dtype)| {
                    weights.defer(pattern, *dtype)
                })?,
            false => Weights::deferred(checkpoint, adapters, matching, &self.deferred)?,
        };
        let weights = match self.scales {
            ScalesOption::Keep => weights,
            ScalesOption::Recompute => weights.scales(ScalePolicy::Recompute)?,
        };
        let weights = self.casts.apply(weights)?;
        if self.requantise { weights.requantise() } else { Ok(weights) }
    }

    /// The adapters, read.
    fn open(&self, places: &Places) -> Result<Vec<Adapter>> {
        let open = |text: &OsString| {
            let (path, strength) = split(text)?;
            places.adapter(path, strength)
        };
        self.adapters.iter().map(open).collect()
    }

    fn settings(&self, adapter: Adapter) -> Result<Adapter> {
        let adapter = self.rename.iter().try_fold(adapter, |adapter, rename| {
            let (from, to) = rename.split_once('=').ok_or_else(|| invalid(format!("`{rename}` is not FROM=TO")))?;
            adapter.rename(from.trim(), to.trim())
        })?;
        let adapter = self.only.iter().fold(adapter, Adapter::only);
        let adapter = self.alpha.into_iter().try_fold(adapter, Adapter::alpha)?;
        let rows = self.rotary_rows.as_deref().map(rotary_rows).transpose()?;
        Ok(rows.into_iter().fold(adapter, Adapter::rotary_rows))
    }
}

/// `a.safetensors:0.8` as path and strength; what exists as a whole, or has no number after the last colon, is all path.
fn split(text: &OsStr) -> Result<(OsString, f32)> {
    // A link that leads nowhere exists, and is reported as one.
    if std::fs::symlink_metadata(Path::new(text)).is_ok() {
        return Ok((text.to_owned(), 1.0));
    }
    let Some((path, strength)) = split_at_colon(text) else { return Ok((text.to_owned(), 1.0)) };
    let (whole, shown) = (text.display(), strength.display());
    // The colon of `s3://`, or of a port.
    let in_url = text.to_str().is_some_and(is_url);
    if in_url && strength.to_str().is_some_and(|rest| rest.contains('/')) {
        return Ok((text.to_owned(), 1.0));
    }
    match strength.to_str().and_then(|strength| strength.trim().parse::<f32>().ok()) {
        Some(strength) if strength.is_finite() => Ok((path, strength)),
        Some(strength) => Err(invalid(format!("a strength of {strength} in `{whole}`"))),
        None => Err(invalid(format!("there is no `{whole}`, and `{shown}` is no strength, such as 0.8"))),
    }
}

/// What stands before and after the last colon.
#[cfg(unix)]
fn split_at_colon(text: &OsStr) -> Option<(OsString, OsString)> {
    use std::os::unix::ffi::OsStrExt;
    let bytes = text.as_bytes();
    let colon = bytes.iter().rposition(|&byte| byte == b':')?;
    let part = |bytes| OsStr::from_bytes(bytes).to_owned();
    Some((part(&bytes[..colon]), part(&bytes[colon + 1..])))
}

/// What stands before and after the last colon.
#[cfg(not(unix))]
fn split_at_colon(text: &OsStr) -> Option<(OsString, OsString)> {
    let (path, strength) = text.to_str()?.rsplit_once(':')?;
    Some((path.into(), strength.into()))
}

/// `same`, or `32/8` as 32 query heads and 8 of keys and values.
fn rotary_rows(text: &str) -> Result<RotaryRows> {
    if text.trim().eq_ignore_ascii_case("same") {
        return Ok(RotaryRows::Same);
    }
    let number = |text: &str| text.trim().parse::<usize>().ok().filter(|&number| number > 0);
    let (heads, kv_heads) = text.split_once('/').unwrap_or((text, text));
    match (number(heads), number(kv_heads)) {
        (Some(heads), Some(kv_heads)) => Ok(RotaryRows::Paired { heads, kv_heads }),
        _ => Err(invalid(format!("--rotary-rows takes `same` or HEADS/KV_HEADS, such as 32/8, not `{text}`"))),
    }
}

fn invalid(reason: String) -> Error {
    Error::Invalid { reason }
}
