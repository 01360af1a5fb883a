//! The report of matching: how each adapter tensor was used.

use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde::{Serialize, Serializer};

use super::config::ScaleFactor;
use super::tied::Untied;
use crate::error::Packing;

/// Every tensor of every adapter: applied, skipped with a reason, or unmatched.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct MatchReport {
    /// Modules that change the checkpoint.
    pub applied: Vec<Applied>,
    /// Tensors that change nothing although their module has a target.
    pub skipped: Vec<Skipped>,
    /// Modules that the checkpoint does not have, or has in another shape.
    pub unmatched: Vec<Unmatched>,
    /// The head that became a tensor of its own, if the adapters change the embedding and the head of a model that ties them,
    /// but not in the same way. The model's configuration has to say so.
    pub untied: Option<Untied>,
}

/// A module of an adapter and what it changes.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Applied {
    /// The adapter's file or folder.
    #[serde(serialize_with = "as_text")]
    pub adapter: PathBuf,
    /// The strength that it is applied with.
    pub strength: f32,
    /// The adapter's name of the module.
    pub module: String,
    /// The kind of adapter: `LoRA`, `LoHa`, `diff`, …; several joined by ` + `.
    pub kind: String,
    /// What the factors are multiplied by besides the strength, and where that comes from; `None` if the module has none, as
    /// for whole weights.
    pub factor: Option<ScaleFactor>,
    /// The adapter's keys that take part.
    pub keys: Vec<String>,
    /// The checkpoint's tensors that change.
    pub targets: Vec<String>,
    /// For each target, the rows that change; `None` for the whole tensor, `Some` if it fuses several projections and the
    /// module is one of them, or stacks experts and the module is for one (all experts' rows are then counted one after
    /// another).
    pub rows: Vec<Option<Range<u64>>>,
}

/// A tensor of an adapter that is not applied.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Skipped {
    /// The adapter's file or folder.
    #[serde(serialize_with = "as_text")]
    pub adapter: PathBuf,
    /// The tensor's key.
    pub key: String,
    /// Why it is not applied.
    pub why: SkipReason,
}

/// Why a tensor of an adapter is not applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub enum SkipReason {
    /// The adapter's strength is zero.
    ZeroStrength,
    /// The caller wants another component of the adapter.
    OtherComponent,
    /// The key is of no known kind of adapter.
    NotUnderstood,
    /// The factors that it belongs to are missing, as for an `alpha` without factors.
    NothingToModify,
    /// The module has no weight, or no bias, to change.
    NoParameter,
    /// Another module of the adapter makes the same change of the same rows, so it is made once.
    Repeated,
    /// The module's weight is packed into codes, which cannot be patched.
    Packed(Packing),
    /// The module's weight is made of eight-bit codes with a scale that is not understood.
    UnknownScale,
}

impl SkipReason {
    /// Whether it makes a strict match fail.
    pub(crate) fn is_fault(self) -> bool {
        !matches!(self, SkipReason::ZeroStrength | SkipReason::OtherComponent | SkipReason::Repeated)
    }
}

impl fmt::Display for SkipReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            SkipReason::Packed(packing) => return write!(f, "the weight is packed ({packing})"),
            SkipReason::UnknownScale => "the weight has a scale that is not understood",
            SkipReason::ZeroStrength => "the strength is zero",
            SkipReason::OtherComponent => "it is for another component",
            SkipReason::NotUnderstood => "no kind of adapter has such a key",
            SkipReason::NothingToModify => "the factors that it goes with are not there",
            SkipReason::NoParameter => "the module has no such parameter",
            SkipReason::Repeated => "another module of the adapter makes the same change",
        })
    }
}

/// A module of an adapter without a target.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Unmatched {
    /// The adapter's file or folder.
    #[serde(serialize_with = "as_text")]
    pub adapter: PathBuf,
    /// The adapter's name of the module.
    pub module: String,
    /// The module's keys.
    pub keys: Vec<String>,
    /// Why a module whose name the checkpoint has is not applied: its shape does not fit. `None` if there is no such name.
    pub why: Option<String>,
}

/// Serialises a path as text; characters that are not Unicode are replaced.
fn as_text<S: Serializer>(path: &Path, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&path.display())
}

/// How many of a module's tensors are shown.
const SHOWN: usize = 4;

impl fmt::Display for MatchReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tensors: usize = self.applied.iter().map(|a| a.targets.len()).sum();
        let modules = self.applied.len();
        let plural = |count: usize| if count == 1 { "" } else { "s" };
        writeln!(f, "{modules} module{} applied to {tensors} tensor{}", plural(modules), plural(tensors))?;
        for Applied { module, kind, factor, targets, strength, .. } in &self.applied {
            write!(f, "  {module}: {kind} at strength {strength}")?;
            if let Some(ScaleFactor { value, source }) = factor {
                write!(f, ", factor {value} ({source}),")?;
            }
            let (shown, more) = targets.split_at(targets.len().min(SHOWN));
            write!(f, " on {}", shown.join(", "))?;
            if !more.is_empty() {
                write!(f, " and {} more", more.len())?;
            }
            writeln!(f)?;
        }
        for Skipped { adapter, key, why } in &self.skipped {
            writeln!(f, "  skipped {key} of {}: {why}", adapter.display())?;
        }
        for Unmatched { adapter, module, why, .. } in &self.unmatched {
            let why = why.as_ref().map_or(String::new(), |why| format!(": {why}"));
            writeln!(f, "  unmatched: {module} in {}{why}", adapter.display())?;
        }
        if let Some(Untied { embedding, head }) = &self.untied {
            writeln!(
                f,
                "  {head} is no longer {embedding}: it is a tensor of its own, so config.json has to say \
                 tie_word_embeddings: false"
            )?;
        }
        Ok(())
    }
}
