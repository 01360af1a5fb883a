//! The option that casts weights.

use clap::Args;
use tensor_offload::{DType, Error, Result, Weights};

/// Which tensors are cast, and to what.
#[derive(Args, Clone, Debug)]
pub(crate) struct CastOptions {
    /// Cast tensors while they load: PATTERN=TYPE those that a pattern names (`*.mlp.*=F16`), TYPE alone all of floating-point
    /// numbers; F32, F16, BF16, F8_E4M3 or F8_E5M2. Of several the last that names a tensor counts
    #[arg(long = "cast", value_name = "[PATTERN=]TYPE")]
    pub(crate) casts: Vec<String>,
}

impl CastOptions {
    /// These weights, cast.
    pub(crate) fn apply(&self, weights: Weights) -> Result<Weights> {
        self.casts.iter().try_fold(weights, |weights, text| match text.rsplit_once('=') {
            Some((pattern, dtype)) => weights.cast(pattern.trim(), parse(dtype)?),
            None => weights.cast_floats(parse(text)?),
        })
    }
}

/// A type by its name in files, in letters of any case.
fn parse(text: &str) -> Result<DType> {
    let parsed = text.trim().to_ascii_uppercase().parse::<DType>();
    parsed.map_err(|_| Error::Invalid {
        reason: format!("--cast takes [PATTERN=]TYPE, such as BF16 or *.mlp.*=F16; `{text}` is no type"),
    })
}
