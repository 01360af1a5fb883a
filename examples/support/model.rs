//! The options that say which model: one from a file, or blocks of given sizes.

use std::path::{Path, PathBuf};

use clap::Args;
use tensor_offload::checkpoint::Layout;
use tensor_offload::{ByteSize, Checkpoint, Error, Result, Weights};

use super::casts::CastOptions;
use super::options::CompressOption;
use super::part::PartOptions;
use super::places::Places;

/// The most blocks that `--blocks` makes.
const MOST_BLOCKS: usize = 10_000_000;

/// What bf16 weights of a language model have of their bytes in the lossless code.
const BF16_RATIO: f64 = 0.675;

/// A model of which only the layout matters.
#[derive(Args, Clone, Debug)]
pub(crate) struct ModelOptions {
    /// The model: a safetensors or GGUF file, or a folder with one or with an index
    #[arg(required_unless_present = "blocks", conflicts_with = "blocks")]
    model: Option<PathBuf>,
    /// A model of blocks instead of a file, as COUNTxSIZE[,COUNTxSIZE…]: 10x1gib, or 1x5gib,3x1gib
    #[arg(long)]
    blocks: Option<String>,
    #[command(flatten)]
    part: PartOptions,
}

impl ModelOptions {
    pub(crate) fn layout(&self) -> Result<Layout> {
        match (&self.blocks, &self.model) {
            (Some(_), _) if !self.part.is_all() => {
                Err(invalid("--rank and --stage take a model of tensors, and --blocks makes none"))
            }
            (Some(blocks), _) => Ok(Layout::blocks(sizes(blocks)?)),
            (None, Some(model)) => Ok(self.open(model)?.layout().clone()),
            (None, None) => Err(invalid("name a model or give --blocks")),
        }
    }

    fn open(&self, model: &Path) -> Result<Checkpoint> {
        self.part.of(Places::default().checkpoint(model)?)
    }

    /// The layout of the model's weights as a load may compress them, and a name for it: estimated from the weights. Blocks have none,
    /// and are taken for bf16.
    pub(crate) fn compressed(&self) -> Result<(Layout, String)> {
        match &self.model {
            Some(model) => {
                let weights = Weights::new(self.open(model)?).compress()?;
                Ok((weights.layout().clone(), "compressed".to_owned()))
            }
            None => Ok((self.layout()?.assume_compressed(BF16_RATIO), format!("compressed to {BF16_RATIO} (bf16)"))),
        }
    }

    /// The layout once the model's tensors are cast, and compressed if they are to be.
    pub(crate) fn layout_of(&self, casts: &CastOptions, codes: CompressOption) -> Result<Layout> {
        match &self.model {
            _ if casts.casts.is_empty() && codes.any() => Ok(self.compressed()?.0),
            _ if casts.casts.is_empty() => self.layout(),
            Some(model) => {
                let weights = casts.apply(self.open(model)?.into())?;
                Ok(codes.apply(weights)?.layout().clone())
            }
            None => Err(invalid("--cast takes a model of tensors, and --blocks makes none")),
        }
    }
}

/// `10x1gib,1x5gib` as the sizes of eleven blocks.
fn sizes(blocks: &str) -> Result<Vec<u64>> {
    let mut sizes = Vec::new();
    for part in blocks.split(',') {
        let form = || invalid(format!("`{part}` in --blocks is not COUNTxSIZE, as in 10x1gib"));
        let (count, size) = part.split_once(['x', 'X']).ok_or_else(form)?;
        let (count, size): (usize, ByteSize) = (count.trim().parse().map_err(|_| form())?, size.parse()?);
        if count > MOST_BLOCKS - sizes.len() {
            return Err(invalid(format!("--blocks makes at most {MOST_BLOCKS} blocks")));
        }
        sizes.resize(sizes.len() + count, size.get());
    }
    Ok(sizes)
}

fn invalid(reason: impl Into<String>) -> Error {
    Error::Invalid { reason: reason.into() }
}
