//! The option that keeps what LoRA changes beside the weights.

use clap::Args;
use tensor_offload::{DType, Error, Result};

/// Which weights' changes are not merged, and the type of their factors.
#[derive(Args, Clone, Debug)]
pub(crate) struct DeferOptions {
    /// Leave weights as they are in the file, in blocks and packed ones too, and keep what LoRA changes of them as factors beside
    /// them, for a network that computes W x + s B (A x): PATTERN=TYPE those that a pattern names (`*.mlp.*=F16`), TYPE alone all
    /// that adapters change; F32, F16 or BF16. Of several the last that names a weight counts
    #[arg(long = "defer", value_name = "[PATTERN=]TYPE")]
    deferred: Vec<String>,
}

impl DeferOptions {
    /// The patterns, with the types.
    pub(crate) fn patterns(&self) -> Result<Vec<(String, DType)>> {
        let parse = |text: &String| {
            let (pattern, name) = text.rsplit_once('=').unwrap_or(("*", text));
            let dtype = name.trim().to_ascii_uppercase().parse::<DType>();
            let dtype = dtype.map_err(|_| Error::Invalid {
                reason: format!("--defer takes [PATTERN=]TYPE, such as BF16 or *.mlp.*=F16; `{text}` names no type"),
            })?;
            Ok((pattern.trim().to_owned(), dtype))
        };
        self.deferred.iter().map(parse).collect()
    }
}
