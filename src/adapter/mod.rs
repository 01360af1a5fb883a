//! Adapters (LoRA and its relatives), read and resolved against a checkpoint's names.
//!
//! `config` reads what is said beside the factors, `names` finds the tensor that an adapter's key is for, `kinds` turns an
//! adapter's factors into steps, and [`Patches`] holds the result: a [`TensorPatch`](crate::patch::TensorPatch) for each
//! tensor. This happens before planning, because adapters can change the size of a weight; the arithmetic happens while
//! loading.

mod casts;
mod claims;
mod compressed;
mod config;
mod deferred;
mod experts;
mod gguf;
mod kinds;
mod names;
mod patches;
mod report;
mod resolve;
mod tied;
mod weights;

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::checkpoint::{
    Checkpoint, Gguf, Looked, Siblings, TensorId, TensorInfo, lacks_weights, model_folder, read_text, weights_in,
};
use crate::dtype::DType;
use crate::encoding::Encoding;
use crate::error::{AdapterFault, Error, Result};
use crate::float::Float;
use crate::patch::{Matrix, Origin, Scaling};
use crate::transfer::{LocalFiles, Storage};
use config::{Config, Metadata, PeftConfig};
use names::keys::{self, Key, Part};
use names::pattern::Pattern;

pub use config::{FactorSource, ScaleFactor};
pub use names::rows::RotaryRows;
pub use patches::{Matching, Patches};
pub use report::{Applied, MatchReport, SkipReason, Skipped, Unmatched};
pub use tied::Untied;
pub use weights::Weights;

/// An open adapter: its names and shapes have been read, its factors have not.
#[derive(Clone, Debug)]
pub struct Adapter {
    checkpoint: Checkpoint,
    path: PathBuf,
    strength: f32,
    config: Option<Arc<Config>>,
    metadata: Arc<Metadata>,
    /// The caller's alpha.
    alpha: Option<f64>,
    /// That of a GGUF file.
    gguf_alpha: Option<f64>,
    modules: Vec<AdapterModule>,
    /// Tensors beside factors that take the place of the checkpoint's, if it has any of their names and shapes.
    replacements: Vec<AdapterModule>,
    /// The tensors of no known kind.
    unknown: Vec<TensorId>,
    /// The prefix of the keys to use.
    component: Option<String>,
    /// The caller's replacements for the adapter's names.
    renames: Vec<(Pattern, Pattern)>,
    rotary: Option<RotaryRows>,
}

/// An adapter's tensors for one module.
#[derive(Clone, Debug)]
struct AdapterModule {
    /// The adapter's name of the module.
    name: String,
    /// The tensors in the adapter's file.
    parts: BTreeMap<Part, TensorId>,
}

const CONFIG_FILE: &str = "adapter_config.json";
/// The names that PEFT and mlx-lm give the weights of a folder.
const WEIGHTS_FILES: [&str; 2] = ["adapter_model.safetensors", "adapters.safetensors"];
/// What PEFT begins its names with.
const PEFT_PREFIX: &str = "base_model.model.";

impl Adapter {
    /// Opens a safetensors file, or a folder as PEFT or mlx-lm writes it: `adapter_config.json` and one safetensors file. That
    /// file, named by itself, is read with its configuration; so is any file in the folder with PEFT's names. A GGUF file is read
    /// as llama.cpp's `convert_lora_to_gguf` writes it.
    ///
    /// A module's factors are multiplied by `strength` times a [`ScaleFactor`], which the match report tells. Strength zero
    /// changes nothing.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a strength that is not finite; [`Error::Adapter`] for an unsupported kind of adapter, two tensors
    /// in one role, or a configuration that is not understood; [`Error::File`] and
    /// [`Error::Io`] as [`Checkpoint::open`].
    pub fn open(path: impl AsRef<Path>, strength: f32) -> Result<Adapter> {
        Adapter::open_in(&LocalFiles, path, strength)
    }

    /// As [`open`](Adapter::open), of a path in any [storage](Storage): an object store, for example.
    ///
    /// # Errors
    /// As [`open`](Adapter::open), and those of the storage and of its sources.
    pub fn open_in(storage: &dyn Storage, path: impl AsRef<Path>, strength: f32) -> Result<Adapter> {
        let (look, path) = (&Looked::at(storage), path.as_ref());
        // A store that is busy for a moment must not have a folder opened without its configuration.
        if look.is_known_folder(path)? {
            return Adapter::open_folder(look, &model_folder(look, path)?, strength);
        }
        let folder = match path.parent() {
            Some(folder) if look.is_file(&folder.join(CONFIG_FILE))? => Some(folder),
            _ => None,
        };
        let named = path.file_name().is_some_and(|name| WEIGHTS_FILES.iter().any(|file| name == *file));
        if let Some(folder) = folder.filter(|_| named) {
            return Adapter::open_folder(look, folder, strength);
        }
        let weights = Checkpoint::open_looking(look, path)?;
        let of_peft = weights.layout().tensors().iter().any(|tensor| tensor.name.starts_with(PEFT_PREFIX));
        let belongs = |folder: &&Path| of_peft || is_alone(look, folder);
        let config = folder.filter(belongs).map(|folder| read_config(look, folder)).transpose()?;
        Adapter::assemble(weights, path, config, strength)
    }

    fn open_folder(look: &Looked<'_>, folder: &Path, strength: f32) -> Result<Adapter> {
        if matches!(look.kind(&folder.join(CONFIG_FILE)), Ok(None)) {
            let inside = match weights_in(look, folder) {
                weights if weights.is_empty() => String::new(),
                weights => format!("; what has weights in it is opened by its own path: {}", weights.join(", ")),
            };
            let reason = format!("the folder does not hold it{inside}");
            return Err(Error::adapter(folder, None, AdapterFault::Config { reason }));
        }
        if let Some(error) = lacks_weights(look, folder) {
            return Err(error);
        }
        let mut weights = None;
        for file in WEIGHTS_FILES.map(|file| folder.join(file)) {
            if weights.is_none() && look.is_file(&file)? {
                weights = Some(file);
            }
        }
        let config = read_config(look, folder)?;
        let weights = Checkpoint::open_looking(look, weights.as_deref().unwrap_or(folder))?;
        Adapter::assemble(weights, folder, Some(config), strength)
    }

    /// An adapter from an open file, without configuration.
    ///
    /// # Errors
    /// As [`open`](Adapter::open).
    pub fn from_checkpoint(checkpoint: Checkpoint, strength: f32) -> Result<Adapter> {
        let path = checkpoint.path().to_owned();
        Adapter::assemble(checkpoint, &path, None, strength)
    }

    /// An adapter from open weights and the text of their `adapter_config.json`, as PEFT or mlx-lm writes it.
    ///
    /// # Errors
    /// As [`open`](Adapter::open).
    pub fn from_peft(checkpoint: Checkpoint, config: &str, strength: f32) -> Result<Adapter> {
        let path = checkpoint.path().to_owned();
        let config = Config::parse(config).map_err(|fault| Error::adapter(&path, None, fault))?;
        Adapter::assemble(checkpoint, &path, Some(config), strength)
    }

    /// Uses only the keys that begin with `prefix` (`lora_te1_`, `unet.`), for a file with adapters of several models. The
    /// report lists the others as skipped; a strict match allows that.
    #[must_use]
    pub fn only(mut self, prefix: impl Into<String>) -> Adapter {
        self.component = Some(prefix.into());
        self
    }

    /// Sets the alpha of all modules: their factors are multiplied by `alpha / rank`, whatever the files say. For adapters whose
    /// alpha got lost, as of a PEFT file without its `adapter_config.json`.
    ///
    /// # Errors
    /// [`Error::Invalid`] when it is not finite.
    pub fn alpha(mut self, alpha: f64) -> Result<Adapter> {
        if !alpha.is_finite() {
            return Err(Error::invalid(format!("{}: the alpha is {alpha}, not a finite number", self.path.display())));
        }
        self.alpha = Some(alpha);
        Ok(self)
    }

    /// Looks up modules that the adapter calls `from` as `to`: for names that the library does not know, or would resolve
    /// differently.
    ///
    /// Both are whole module names, without the suffixes of factors. `{}` stands for a number and a final `*` for the rest of
    /// the name; `to` takes the captures of `from`, in order. The first rename that matches a name is applied, once, and the
    /// result is looked up like a name in the adapter. Rows stay in the adapter's order if `to` is a name in the
    /// checkpoint.
    ///
    /// ```
    /// # use tensor_offload::{Adapter, Checkpoint};
    /// # fn main() -> tensor_offload::Result<()> {
    /// # let header = br#"{"enc_0_q.alpha": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}}"#;
    /// # let bytes = [&(header.len() as u64).to_le_bytes()[..], &header[..], &[0; 4]].concat();
    /// # let file = Checkpoint::from_bytes("adapter", bytes)?;
    /// let adapter = Adapter::from_checkpoint(file, 1.0)?
    ///     .rename("enc_{}_q", "encoder.blocks.{}.attention.query")?
    ///     .rename("mid.*", "middle_block.*")?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::Invalid`] when a pattern is ambiguous, or the two differ in their number of placeholders.
    pub fn rename(mut self, from: &str, to: &str) -> Result<Adapter> {
        let pattern = |text| Pattern::parse(text).map_err(|reason| Error::invalid(format!("a rename: {reason}")));
        let (of, into) = (pattern(from)?, pattern(to)?);
        if of.placeholders() != into.placeholders() {
            return Err(Error::invalid(format!("a rename: `{from}` and `{to}` do not have the same placeholders")));
        }
        self.renames.push((of, into));
        Ok(self)
    }

    /// Sets the order of the checkpoint's query and key rows, for an adapter with transformers' names on a checkpoint with the
    /// names of GGUF or Meta, or the reverse. Without it, changes of `q_proj` and `k_proj` between these are an error, unless a GGUF
    /// file's metadata tell the order: names do not.
    #[must_use]
    pub fn rotary_rows(mut self, rows: RotaryRows) -> Adapter {
        self.rotary = Some(rows);
        self
    }

    /// The file or folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The same adapter, with the order of query and key rows that the checkpoint's GGUF file, or the adapter's, is known to have
    /// unless the caller said one.
    fn with_known_rows(&self, checkpoint: Option<Gguf<'_>>) -> Cow<'_, Adapter> {
        let known = || checkpoint.or(self.checkpoint.gguf()).and_then(gguf::rotary_rows);
        match self.rotary.is_none().then(known).flatten() {
            Some(rows) => Cow::Owned(Adapter { rotary: Some(rows), ..self.clone() }),
            None => Cow::Borrowed(self),
        }
    }

    /// The identity of the adapter.
    pub(crate) fn origin(&self) -> Origin {
        let stamps = self.checkpoint.sources().iter().map(|source| source.stamp()).collect();
        let Adapter { config, alpha, component, renames, rotary, .. } = self;
        let settings = format!("{config:?} {alpha:?} {component:?} {renames:?} {rotary:?}");
        Origin { path: self.path.clone(), stamps, strength: self.strength.to_bits(), settings }
    }

    /// The strength that the adapter is applied with.
    pub fn strength(&self) -> f32 {
        self.strength
    }

    fn assemble(checkpoint: Checkpoint, path: &Path, config: Option<Config>, strength: f32) -> Result<Adapter> {
        if !strength.is_finite() {
            return Err(Error::invalid(format!("{}: the strength is {strength}, not a finite number", path.display())));
        }
        let gguf_alpha = checkpoint.gguf().map_or(Ok(None), gguf::alpha);
        let gguf_alpha = gguf_alpha.map_err(|fault| Error::adapter(path, None, fault))?;
        let metadata = Metadata::parse(checkpoint.metadata()).map_err(|fault| Error::adapter(path, None, fault))?;
        let (mut modules, mut unknown) = (Modules::default(), Vec::new());
        for (id, tensor) in checkpoint.layout().tensor_ids().zip(checkpoint.layout().tensors()) {
            let fault = |fault| Error::adapter(path, Some(&tensor.name), fault);
            let key = match &config {
                _ if checkpoint.gguf().is_some() => keys::parse_gguf(&tensor.name),
                None => keys::parse(&tensor.name),
                Some(Config::Peft(_)) => keys::parse_peft(&tensor.name),
                Some(Config::Mlx(_)) => keys::parse_mlx(&tensor.name),
            };
            match key {
                Key::Part(name, part) => modules.add(&checkpoint, &name, part, id)?,
                Key::Unsupported(kind) => return Err(fault(AdapterFault::Unsupported { kind: kind.to_owned() })),
                Key::Unknown => unknown.push(id),
            }
        }
        let mut replacements = Modules::default();
        if !modules.list.is_empty() {
            for &id in &unknown {
                if let Key::Part(name, part) = keys::whole(&checkpoint.layout().at(id).name) {
                    replacements.add(&checkpoint, &name, part, id)?;
                }
            }
            unknown.clear();
        }
        let (modules, replacements) = (modules.list, replacements.list);
        let metadata = metadata.settle(modules.iter().map(|module| module.name.as_str()));
        let (path, config, metadata) = (path.to_owned(), config.map(Arc::new), Arc::new(metadata));
        let (alpha, component, renames, rotary) = Default::default();
        Ok(Adapter {
            checkpoint: checkpoint.clone(),
            path,
            strength,
            config,
            metadata,
            alpha,
            gguf_alpha,
            modules,
            replacements,
            unknown,
            component,
            renames,
            rotary,
        })
    }

    /// The settings of PEFT.
    fn peft(&self) -> Option<&PeftConfig> {
        self.config.as_deref().and_then(Config::peft)
    }

    /// Whether the caller wants a key of this name.
    fn wants(&self, name: &str) -> bool {
        self.component.as_ref().is_none_or(|prefix| name.starts_with(prefix.as_str()))
    }

    /// Fails if the caller wants keys of which there are none.
    fn check_component(&self) -> Result<()> {
        let names = || self.modules.iter().chain(&self.replacements).map(|module| &module.name);
        match &self.component {
            Some(prefix) if !names().any(|name| self.wants(name)) => {
                let (prefix, sample) = (prefix.clone(), names().take(8).cloned().collect());
                Err(Error::adapter(&self.path, None, AdapterFault::NoComponent { prefix, sample }))
            }
            _ => Ok(()),
        }
    }

    /// The name to look up a module by.
    fn renamed<'n>(&self, module: &'n str) -> Cow<'n, str> {
        let renamed = self.renames.iter().find_map(|(from, to)| from.captures(module).map(|found| to.fill(&found)));
        renamed.map_or(Cow::Borrowed(module), Cow::Owned)
    }

    /// The key of a tensor.
    fn key(&self, tensor: TensorId) -> &str {
        &self.checkpoint.layout().at(tensor).name
    }

    /// The bytes of a tensor.
    fn bytes(&self, tensor: TensorId) -> Result<Vec<u8>> {
        let mut bytes = vec![0; self.checkpoint.layout().at(tensor).bytes as usize];
        self.checkpoint.read(tensor, &mut bytes)?;
        Ok(bytes)
    }

    /// Fails if a tensor is made of fp8 codes and something beside it may scale them: codes are not values then.
    fn check_unscaled(&self, info: &TensorInfo) -> Result<(), AdapterFault> {
        if !Float::of(info.dtype).is_some_and(Float::is_fp8) {
            return Ok(());
        }
        let siblings = Siblings::of_checkpoint(&self.checkpoint);
        match Scaling::of(info, &siblings)? {
            None => Ok(()),
            Some(scaling) => {
                let scale = self.checkpoint.layout().at(scaling.tensor()).name.clone();
                Err(AdapterFault::UnknownScale { weight: info.name.clone(), scale })
            }
        }
    }

    /// A tensor, as a factor: floats, or blocks of GGML (`convert_lora_to_gguf.py --outtype q8_0`).
    ///
    /// # Errors
    /// [`AdapterFault::Shape`] when it is empty, [`AdapterFault::BadDType`] for integers, [`AdapterFault::UnknownScale`] and
    /// its like for fp8 codes with a scale, [`AdapterFault::NotFinite`] with the first such element, and what reading the
    /// file returns.
    fn factor(&self, tensor: TensorId) -> Result<Factor> {
        let info = self.checkpoint.layout().at(tensor);
        let fault = |fault| Error::adapter(&self.path, Some(&info.name), fault);
        self.check_unscaled(info).map_err(fault)?;
        let bytes = self.bytes(tensor)?;
        if bytes.is_empty() {
            let what = "a factor, which has elements,".to_owned();
            return Err(fault(AdapterFault::Shape { found: info.shape.clone(), what, wanted: vec![] }));
        }
        let values = match (info.dtype, Encoding::of(info.dtype)) {
            (_, Some(encoding)) => {
                let mut values = vec![0.0; encoding.count(bytes.len())];
                match encoding {
                    Encoding::Float(float) => float.lift(&bytes, &mut values),
                    Encoding::Blocks(format) => format.dequantise(&bytes, &mut values),
                }
                values
            }
            (DType::F64, _) => bytes.as_chunks().0.iter().map(|raw| f64::from_le_bytes(*raw) as f32).collect(),
            (dtype, _) => return Err(fault(AdapterFault::BadDType { what: "it".to_owned(), dtype })),
        };
        if let Some(index) = values.iter().position(|value| !value.is_finite()) {
            let value = values[index].to_string();
            return Err(fault(AdapterFault::NotFinite { index: index as u64, value }));
        }
        Ok(Factor { key: info.name.clone(), shape: info.shape.clone(), values })
    }
}

/// An adapter's modules while they are collected.
#[derive(Default)]
struct Modules {
    list: Vec<AdapterModule>,
    place_of: HashMap<String, usize>,
}

impl Modules {
    fn add(&mut self, checkpoint: &Checkpoint, name: &str, part: Part, tensor: TensorId) -> Result<()> {
        let place = match self.place_of.get(name) {
            Some(&place) => place,
            None => {
                self.list.push(AdapterModule { name: name.to_owned(), parts: BTreeMap::new() });
                self.place_of.insert(name.to_owned(), self.list.len() - 1);
                self.list.len() - 1
            }
        };
        let Some(other) = self.list[place].parts.insert(part, tensor) else { return Ok(()) };
        let name_of = |tensor: TensorId| checkpoint.layout().at(tensor).name.clone();
        let fault = AdapterFault::Collision { other: name_of(other), role: name.to_owned() };
        Err(Error::adapter(checkpoint.path(), Some(&name_of(tensor)), fault))
    }
}

fn read_config(look: &Looked<'_>, folder: &Path) -> Result<Config> {
    let bad = |reason| Error::adapter(folder, None, AdapterFault::Config { reason });
    let text = read_text(look, &folder.join(CONFIG_FILE), bad)?;
    Config::parse(&text).map_err(|fault| Error::adapter(folder, None, fault))
}

/// Whether a folder holds one safetensors file, so that its configuration is for that.
fn is_alone(look: &Looked<'_>, folder: &Path) -> bool {
    let Ok(entries) = look.list(folder) else { return false };
    let weights = |path: &Path| path.extension().is_some_and(|end| end.eq_ignore_ascii_case("safetensors"));
    entries.iter().filter(|entry| weights(&entry.name)).count() == 1
}

/// One tensor of an adapter, converted to f32. It has at least one value, and all values are finite.
#[derive(Clone, Debug)]
struct Factor {
    /// The tensor's key in the adapter.
    key: String,
    shape: Vec<u64>,
    values: Vec<f32>,
}

impl Factor {
    /// The factor as a matrix of its first dimension by all others.
    fn flat(&self) -> Matrix {
        let rows = self.shape.first().map_or(1, |&rows| rows as usize);
        let cols = self.values.len().checked_div(rows).unwrap_or(0);
        Matrix { rows, cols, values: self.values.clone() }
    }

    /// The factor with its first two dimensions swapped; a factor of fewer dimensions is unchanged.
    fn swapped(&self) -> Factor {
        let mut shape = self.shape.clone();
        let [a, b, ..] = shape[..] else { return self.clone() };
        shape.swap(0, 1);
        let (a, b) = (a as usize, b as usize);
        let inner = self.values.len().checked_div(a * b).unwrap_or(0);
        let mut values = Vec::with_capacity(self.values.len());
        for place in 0..b {
            for outer in 0..a {
                values.extend_from_slice(&self.values[(outer * b + place) * inner..][..inner]);
            }
        }
        Factor { key: self.key.clone(), shape, values }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn factors_are_seen_as_matrices() {
        let values = vec![1., 2., 3., 4., 5., 6.];
        let factor = Factor { key: String::new(), shape: vec![2, 3, 1], values };
        assert_eq!(
            (factor.swapped().shape, factor.swapped().values),
            (vec![3, 2, 1], factor.flat().transposed().values)
        );
        assert_eq!((factor.flat().rows, factor.flat().cols), (2, 3));
    }
}
