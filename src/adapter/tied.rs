//! A model whose head uses the embedding's weights, where adapters change one of the two and not the other: the head then needs
//! a tensor of its own. PEFT leaves the head of such a model as it was when it trains the embedding, and the reverse.

use serde::Serialize;

use super::names::keys::Part;
use super::names::{Found, Targets};
use super::{Adapter, AdapterModule};
use crate::checkpoint::{Layout, TensorId, is_language_head};
use crate::error::Result;

/// The head of a language model, untied from the embedding.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Untied {
    /// The embedding's weight, which the checkpoint uses at both ends.
    pub embedding: String,
    /// The head's weight, which the checkpoint does not have.
    pub head: String,
}

/// What the adapters do at both ends.
pub(super) enum Ends {
    /// Nothing, or the same to both.
    Tied,
    /// Different things.
    Apart(Box<Apart>),
}

/// A model whose head is a tensor of its own.
pub(super) struct Apart {
    pub(super) untied: Untied,
    pub(super) embedding: TensorId,
    pub(super) head: TensorId,
    /// It has the head as a last tensor, with the embedding's bytes.
    pub(super) layout: Layout,
}

impl Ends {
    /// The layout with the head, if it is needed.
    pub(super) fn layout(&self) -> Option<&Layout> {
        match self {
            Ends::Tied => None,
            Ends::Apart(apart) => Some(&apart.layout),
        }
    }

    /// # Errors
    /// Never for a layout that a checkpoint has.
    pub(super) fn of(layout: &Layout, adapters: &[Adapter]) -> Result<Ends> {
        let is_tied = |tensor: &TensorId| {
            let module = layout.module_of(*tensor).and_then(|module| layout.module(module));
            module.is_some_and(|module| module.tied && layout.modules().iter().all(|m| m.alias_of != Some(module.id)))
        };
        let weight = layout.tensor_ids().find(|id| is_tied(id) && layout.at(*id).name.ends_with(".weight"));
        let near = |module: &AdapterModule| WORDS.iter().any(|word| module.name.contains(word));
        // A head that the checkpoint has is a tensor of its own already.
        let headless = || !layout.modules().iter().any(|module| is_language_head(&module.name));
        let touched = || adapters.iter().flat_map(|a| &a.modules).any(near);
        let Some(embedding) = weight.filter(|_| touched() && headless()) else { return Ok(Ends::Tied) };
        let name = &layout.at(embedding).name;
        let untied = Untied { embedding: name.clone(), head: head_of(name) };
        let with_head = layout.with_alias(embedding, &untied.head)?;
        let Some(head) = with_head.tensor_ids().next_back() else { return Ok(Ends::Tied) };
        let targets = Targets::new(&with_head);
        let mut needs_head = false;
        for adapter in adapters.iter().filter(|adapter| adapter.strength != 0.0) {
            let touched = |tensor: TensorId| {
                let hits = |module: &&AdapterModule| match targets.find(&adapter.renamed(&module.name)) {
                    Found::One(found) => found.iter().any(|target| target.weight == Some(tensor)),
                    _ => false,
                };
                adapter.modules.iter().filter(|module| near(module) && adapter.wants(&module.name)).find(hits)
            };
            needs_head |= match (touched(embedding), touched(head)) {
                (None, None) => false,
                (_, Some(_)) => true,
                // A head without the new words would be of no use.
                (Some(module), None) => {
                    let keeps = adapter.peft().is_some_and(|config| config.keeps_tied);
                    !keeps && !grows(adapter, module, layout.at(embedding).shape.first())
                }
            };
        }
        let apart = || Ends::Apart(Box::new(Apart { untied, embedding, head, layout: with_head }));
        Ok(if needs_head { apart() } else { Ends::Tied })
    }
}

/// Words in the names of embeddings and heads.
const WORDS: [&str; 7] = ["embed", "embd", "wte", "shared", "head", "output", "embeddings"];

/// The name of the head's weight, beside an embedding's weight of this name.
fn head_of(embedding: &str) -> String {
    let module = embedding.strip_suffix(".weight").unwrap_or(embedding);
    let own = match module.rsplit('.').next() {
        Some("embed_in") => "embed_out",
        Some("tok_embeddings" | "token_embd") => "output",
        _ => "lm_head",
    };
    let outer = if module.starts_with("language_model.model.") { "language_model." } else { "" };
    format!("{outer}{own}.weight")
}

/// Whether a module brings an embedding of more words.
fn grows(adapter: &Adapter, module: &AdapterModule, words: Option<&u64>) -> bool {
    let new = module.parts.get(&Part::NewWeight).and_then(|&new| adapter.checkpoint.layout().at(new).shape.first());
    new.zip(words).is_some_and(|(new, words)| new > words)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_stand_where_their_programs_put_them() {
        for (embedding, head) in [
            ("model.embed_tokens.weight", "lm_head.weight"),
            ("language_model.model.embed_tokens.weight", "language_model.lm_head.weight"),
            ("gpt_neox.embed_in.weight", "embed_out.weight"),
            ("token_embd.weight", "output.weight"),
        ] {
            assert_eq!(head_of(embedding), head);
        }
    }
}
