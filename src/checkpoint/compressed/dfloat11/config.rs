//! What `config.json` says of weights in DFloat11's form.

use std::cell::OnceCell;
use std::path::{Path, PathBuf};

use regex::Regex;
use serde::Deserialize;
use serde_json::{Map, Value};

use super::shapes::Dimensions;
use crate::checkpoint::json::Entries;
use crate::checkpoint::looked::Looked;
use crate::checkpoint::text::read_json;
use crate::error::{Error, FileFault, Result};

/// The bytes of the codes that a thread of DFloat11's kernel decodes. It knows no others.
const BYTES_PER_THREAD: u64 = 8;

/// The threads of a block, where no configuration says it: what the package's encoder has.
const THREADS: u32 = 512;

/// The groups of networks in ComfyUI's own names, of which its loaders know what is in them: `pattern_dict.py` of
/// ComfyUI-DFloat11-Extended, for the networks whose weights have biases. How many weights a group has tells which it is.
const KNOWN: [(&str, &[&str]); 6] = [
    // Flux
    (
        r"double_blocks\.\d+",
        &[
            "img_mod.lin",
            "img_attn.qkv",
            "img_attn.proj",
            "img_mlp.0",
            "img_mlp.2",
            "txt_mod.lin",
            "txt_attn.qkv",
            "txt_attn.proj",
            "txt_mlp.0",
            "txt_mlp.2",
        ],
    ),
    (r"single_blocks\.\d+", &["linear1", "linear2", "modulation.lin"]),
    // Chroma, Chroma Radiance
    (r"distilled_guidance_layer\.layers\.\d+", &["in_layer", "out_layer"]),
    (
        r"double_blocks\.\d+",
        &[
            "img_attn.qkv",
            "img_attn.proj",
            "img_mlp.0",
            "img_mlp.2",
            "txt_attn.qkv",
            "txt_attn.proj",
            "txt_mlp.0",
            "txt_mlp.2",
        ],
    ),
    (r"single_blocks\.\d+", &["linear1", "linear2"]),
    (r"nerf_blocks\.\d+", &["param_generator"]),
];

/// Which weights the groups of a checkpoint have.
#[derive(Debug)]
pub(in crate::checkpoint) struct DFloat11 {
    /// The threads of a block of the kernel.
    pub(super) threads: u32,
    /// Patterns of groups, and the modules in them.
    patterns: Vec<(Regex, Vec<String>)>,
    pub(super) dimensions: Dimensions,
    /// Whether this is what is [known], and no configuration says it.
    ///
    /// [known]: KNOWN
    pub(super) is_assumed: bool,
}

impl DFloat11 {
    /// What the `config.json` in a folder says; `None` if there is none, or it says nothing.
    ///
    /// # Errors
    /// [`FileFault::BadConfig`] when it cannot be understood; [`Error::Io`] when it cannot be read.
    pub(in crate::checkpoint) fn of(look: &Looked<'_>, folder: &Path) -> Result<Option<DFloat11>> {
        #[derive(Deserialize)]
        struct Config {
            dfloat11_config: Option<Fields>,
            #[serde(flatten)]
            others: Map<String, Value>,
        }

        let path = folder.join("config.json");
        if !look.exists(&path)? {
            return Ok(None);
        }
        let bad = |reason| FileFault::BadConfig { reason };
        let config: Config = read_json(look, &path, bad)?;
        let Some(fields) = config.dfloat11_config else { return Ok(None) };
        if let Some(pattern) = fields.pattern_dict.repeated() {
            let reason = format!("dfloat11_config: the pattern `{pattern}` occurs twice");
            return Err(Error::file(&path, None, bad(reason)));
        }
        let config = fields.check(Dimensions::of(&config.others));
        config.map(Some).map_err(|reason| Error::file(&path, None, bad(reason)))
    }

    /// What is known without a configuration.
    fn known() -> Result<DFloat11> {
        let pattern_dict =
            KNOWN.map(|(group, modules)| (group.to_owned(), modules.iter().map(|&m| m.to_owned()).collect()));
        let threads_per_block = Threads::One(THREADS);
        let fields = Fields {
            threads_per_block,
            bytes_per_thread: BYTES_PER_THREAD,
            pattern_dict: Entries(pattern_dict.into()),
        };
        let known = fields.check(Dimensions::default()).map_err(|what| Error::Bug { what })?;
        Ok(DFloat11 { is_assumed: true, ..known })
    }

    /// The modules in a group, in order, as many as `found` if there is such a pattern; `None` if no pattern is of the group.
    pub(super) fn modules(&self, group: &str, found: u64) -> Option<Vec<String>> {
        let mut fitting = self.patterns.iter().filter(|(pattern, _)| pattern.is_match(group)).map(|(_, parts)| parts);
        let first = fitting.clone().next()?;
        let parts = fitting.find(|parts| parts.len().max(1) as u64 == found).unwrap_or(first);
        if parts.is_empty() {
            return Some(vec![group.to_owned()]);
        }
        Some(parts.iter().map(|part| format!("{group}.{part}")).collect())
    }
}

/// What is beside a checkpoint's files, read when a file needs it.
#[derive(Debug, Default)]
pub(in crate::checkpoint) struct Beside<'l> {
    folder: Option<(&'l Looked<'l>, PathBuf)>,
    config: OnceCell<DFloat11>,
}

impl<'l> Beside<'l> {
    pub(in crate::checkpoint) fn files_in(look: &'l Looked<'l>, folder: &Path) -> Beside<'l> {
        Beside { folder: Some((look, folder.to_owned())), config: OnceCell::new() }
    }

    /// What the configuration says; without one, what is known.
    ///
    /// # Errors
    /// As [`DFloat11::of`].
    pub(super) fn config(&self) -> Result<&DFloat11> {
        if let Some(config) = self.config.get() {
            return Ok(config);
        }
        let stated = self.folder.as_ref().map_or(Ok(None), |(look, folder)| DFloat11::of(look, folder))?;
        let config = stated.map_or_else(DFloat11::known, Ok)?;
        Ok(self.config.get_or_init(|| config))
    }
}

#[derive(Deserialize)]
struct Fields {
    threads_per_block: Threads,
    bytes_per_thread: u64,
    pattern_dict: Entries<Vec<String>>,
}

/// The threads of a block: one number, or those of its dimensions.
#[derive(Deserialize)]
#[serde(untagged)]
enum Threads {
    One(u32),
    Several(Vec<u32>),
}

impl Fields {
    fn check(self, dimensions: Dimensions) -> Result<DFloat11, String> {
        if self.bytes_per_thread != BYTES_PER_THREAD {
            let given = self.bytes_per_thread;
            return Err(format!("dfloat11_config: bytes_per_thread is {given}, and only {BYTES_PER_THREAD} is known"));
        }
        let threads = match self.threads_per_block {
            Threads::One(threads) => threads,
            Threads::Several(threads) => match threads[..] {
                [threads] | [threads, 1] | [threads, 1, 1] => threads,
                _ => return Err(format!("dfloat11_config: threads_per_block is {threads:?}, not one number")),
            },
        };
        let pattern = |(text, modules): (String, Vec<String>)| match Regex::new(&format!("^(?:{text})$")) {
            Ok(pattern) => Ok((pattern, modules)),
            Err(error) => Err(format!("dfloat11_config: the pattern `{text}`: {error}")),
        };
        let patterns = self.pattern_dict.0.into_iter().map(pattern).collect::<Result<_, _>>()?;
        Ok(DFloat11 { threads, patterns, dimensions, is_assumed: false })
    }
}
