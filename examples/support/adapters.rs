//! The option that names adapters.

use clap::Args;
use tensor_offload::{Adapter, Error, Result};

/// Which adapters are applied.
#[derive(Args, Clone, Debug)]
pub(crate) struct AdapterOptions {
    /// An adapter, as PATH[:STRENGTH]: a safetensors file or a PEFT folder; applied in the order given
    #[arg(long = "adapter", value_name = "PATH[:STRENGTH]")]
    pub(crate) adapters: Vec<String>,
}

impl AdapterOptions {
    /// The adapters, read.
    pub(crate) fn open(&self) -> Result<Vec<Adapter>> {
        let open = |text: &String| {
            let (path, strength) = split(text)?;
            Adapter::open(path, strength)
        };
        self.adapters.iter().map(open).collect()
    }
}

/// `a.safetensors:0.8` as path and strength; without a number after the last colon, all is the path.
fn split(text: &str) -> Result<(&str, f32)> {
    let Some((path, strength)) = text.rsplit_once(':') else { return Ok((text, 1.0)) };
    match strength.trim().parse::<f32>() {
        Ok(strength) if strength.is_finite() => Ok((path, strength)),
        Ok(strength) => Err(Error::Invalid { reason: format!("a strength of {strength} in `{text}`") }),
        Err(_) if std::path::Path::new(text).exists() => Ok((text, 1.0)),
        Err(_) => Err(Error::Invalid { reason: format!("`{strength}` in `{text}` is no strength, such as 0.8") }),
    }
}
