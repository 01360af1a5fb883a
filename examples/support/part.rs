//! The options that say which part of a model a worker has.

use clap::Args;
use serde_json::{Value, json};
use tensor_offload::checkpoint::{Rank, ShardRules};
use tensor_offload::{Checkpoint, Error, Result};

/// Which part of the model is taken.
#[derive(Args, Clone, Debug)]
pub(crate) struct PartOptions {
    /// Only the part of one rank of several, which share the model by tensor parallelism: 1/4 is the second of four
    #[arg(long, value_name = "RANK/RANKS")]
    rank: Option<Rank>,
    /// Rules of what ranks divide, after those for known networks: `up_proj: rows; down_proj: columns; norm: whole`; @FILE reads them
    #[arg(long, value_name = "RULES", requires = "rank")]
    rules: Option<String>,
    /// The numbers of attention heads and of key-value heads, where neither a configuration nor the file says them
    #[arg(long, value_name = "HEADS/KV_HEADS", requires = "rank")]
    heads: Option<String>,
    /// Only one stage of a pipeline, some layers of about equal bytes: 0/2 is the first of two
    #[arg(long, value_name = "STAGE/STAGES")]
    stage: Option<Rank>,
}

impl PartOptions {
    /// The part of a model.
    pub(crate) fn of(&self, checkpoint: Checkpoint) -> Result<Checkpoint> {
        let mut part = checkpoint;
        if let Some(Rank { rank, of }) = self.stage {
            let stages = part.layout().stages(of as usize)?;
            part = part.stage(stages[rank as usize].clone())?;
        }
        match self.rank {
            Some(rank) => part.shard(&self.rules()?, rank),
            None => Ok(part),
        }
    }

    /// Whether all of a model is taken.
    pub(crate) fn is_all(&self) -> bool {
        self.rank.is_none() && self.stage.is_none()
    }

    /// What is taken, for reports.
    pub(crate) fn report(&self) -> Value {
        let text = |part: Option<Rank>| part.map(|part| part.to_string());
        json!({ "rank": text(self.rank), "stage": text(self.stage) })
    }

    fn rules(&self) -> Result<ShardRules> {
        let mut rules = ShardRules::megatron();
        if let Some(text) = &self.rules {
            let read =
                |path| std::fs::read_to_string(path).map_err(|error| invalid(format!("cannot read {path}: {error}")));
            let text = text.strip_prefix('@').map_or_else(|| Ok(text.clone()), read)?;
            rules = rules.and(text.parse()?);
        }
        let Some(text) = &self.heads else { return Ok(rules) };
        let numbers =
            text.split_once('/').and_then(|(heads, kv)| Some((heads.trim().parse().ok()?, kv.trim().parse().ok()?)));
        let (heads, kv_heads) = numbers.ok_or_else(|| invalid(format!("`{text}` in --heads is not HEADS/KV_HEADS")))?;
        Ok(rules.heads(heads, kv_heads))
    }
}

fn invalid(reason: String) -> Error {
    Error::Invalid { reason }
}
