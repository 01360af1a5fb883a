//! Adapters (LoRA and its relatives), read and resolved against a checkpoint's names.
//!
//! `names` finds the tensor that an adapter's key is for, `kinds` turns an adapter's factors into steps, and [`Patches`]
//! holds the result: a [`TensorPatch`](crate::patch::TensorPatch) for each tensor. This happens before planning, because
//! adapters can change the size of a weight; the arithmetic happens while loading.

mod kinds;
mod names;
mod peft;
mod report;
mod resolve;
mod weights;

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::checkpoint::{Checkpoint, Siblings, TensorId, TensorInfo};
use crate::dtype::DType;
use crate::error::{AdapterFault, Error, Result};
use crate::float::Float;
use crate::patch::{Matrix, Origin, Scaling};
use names::keys::{self, Key, Part};
use names::pattern::Pattern;
use peft::PeftConfig;

pub use names::rows::RotaryRows;
pub use report::{Applied, MatchReport, SkipReason, Skipped, Unmatched};
pub use resolve::{Matching, Patches};
pub use weights::Weights;

/// An open adapter: its names and shapes have been read, its factors have not.
#[derive(Clone, Debug)]
pub struct Adapter {
    checkpoint: Checkpoint,
    path: PathBuf,
    strength: f32,
    config: Option<Arc<PeftConfig>>,
    modules: Vec<AdapterModule>,
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
const WEIGHTS_FILE: &str = "adapter_model.safetensors";

impl Adapter {
    /// Opens a safetensors file, or a folder as PEFT writes it (`adapter_config.json` and
    /// `adapter_model.safetensors`; naming that file opens the folder), for use with `strength`.
    ///
    /// A file's factors are multiplied by `strength * alpha / rank` (without an alpha, by `strength`), a folder's as its
    /// configuration says. Strength zero changes nothing.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a strength that is not finite; [`Error::Adapter`] for an unsupported kind of adapter, two tensors
    /// in one role, or a configuration that is not understood; [`Error::File`] and
    /// [`Error::Io`] as [`Checkpoint::open`].
    pub fn open(path: impl AsRef<Path>, strength: f32) -> Result<Adapter> {
        let path = path.as_ref();
        let folder = if path.is_dir() {
            Some(path)
        } else {
            let named = path.file_name().is_some_and(|name| name == WEIGHTS_FILE);
            path.parent().filter(|folder| named && folder.join(CONFIG_FILE).is_file())
        };
        let Some(folder) = folder else {
            return Adapter::assemble(Checkpoint::open(path)?, path, None, strength);
        };
        let config = folder.join(CONFIG_FILE);
        if !config.is_file() {
            let reason = "the folder does not hold it".to_owned();
            return Err(Error::adapter(folder, None, AdapterFault::Config { reason }));
        }
        let text = fs::read_to_string(&config).map_err(Error::io("read", config))?;
        let weights = Checkpoint::open(folder.join(WEIGHTS_FILE))?;
        let config = PeftConfig::parse(&text).map_err(|fault| Error::adapter(folder, None, fault))?;
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

    /// An adapter from open weights and the text of their `adapter_config.json`.
    ///
    /// # Errors
    /// As [`open`](Adapter::open).
    pub fn from_peft(checkpoint: Checkpoint, config: &str, strength: f32) -> Result<Adapter> {
        let path = checkpoint.path().to_owned();
        let config = PeftConfig::parse(config).map_err(|fault| Error::adapter(&path, None, fault))?;
        Adapter::assemble(checkpoint, &path, Some(config), strength)
    }

    /// Uses only the keys that begin with `prefix` (`lora_te1_`, `unet.`), for a file with adapters of several models. The
    /// report lists the others as skipped; a strict match allows that.
    #[must_use]
    pub fn only(mut self, prefix: impl Into<String>) -> Adapter {
        self.component = Some(prefix.into());
        self
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
        if of.holes() != into.holes() {
            return Err(Error::invalid(format!("a rename: `{from}` and `{to}` do not have the same holes")));
        }
        self.renames.push((of, into));
        Ok(self)
    }

    /// Sets the order of the checkpoint's query and key rows, for an adapter with transformers' names on a checkpoint with the
    /// names of GGUF or Meta, or the reverse. Without it, changes of `q_proj` and `k_proj` between these are an error, since
    /// the order cannot be known from the names.
    #[must_use]
    pub fn rotary_rows(mut self, rows: RotaryRows) -> Adapter {
        self.rotary = Some(rows);
        self
    }

    /// The file or folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The identity of the adapter.
    pub(crate) fn origin(&self) -> Origin {
        let stamps = self.checkpoint.sources().iter().map(|source| source.stamp()).collect();
        let settings = format!("{:?} {:?} {:?} {:?}", self.config, self.component, self.renames, self.rotary);
        Origin { path: self.path.clone(), stamps, strength: self.strength.to_bits(), settings }
    }

    /// The strength that the adapter is applied with.
    pub fn strength(&self) -> f32 {
        self.strength
    }

    fn assemble(checkpoint: Checkpoint, path: &Path, config: Option<PeftConfig>, strength: f32) -> Result<Adapter> {
        if !strength.is_finite() {
            return Err(Error::invalid(format!("{}: the strength is {strength}, not a finite number", path.display())));
        }
        let mut modules: Vec<AdapterModule> = Vec::new();
        let (mut place_of, mut unknown) = (HashMap::new(), Vec::new());
        for (id, tensor) in checkpoint.layout().tensor_ids().zip(checkpoint.layout().tensors()) {
            let key = if config.is_some() { keys::parse_peft(&tensor.name) } else { keys::parse(&tensor.name) };
            let fault = |fault| Error::adapter(path, Some(&tensor.name), fault);
            let (name, part) = match key {
                Key::Part(name, part) => (name, part),
                Key::Unsupported(kind) => return Err(fault(AdapterFault::Unsupported { kind: kind.to_owned() })),
                Key::Unknown => {
                    unknown.push(id);
                    continue;
                }
            };
            let place = *place_of.entry(name).or_insert_with(|| {
                modules.push(AdapterModule { name: name.to_owned(), parts: BTreeMap::new() });
                modules.len() - 1
            });
            if let Some(other) = modules[place].parts.insert(part, id) {
                let other = checkpoint.layout().at(other).name.clone();
                return Err(fault(AdapterFault::Collision { other, role: name.to_owned() }));
            }
        }
        let (path, config) = (path.to_owned(), config.map(Arc::new));
        Ok(Adapter {
            checkpoint: checkpoint.clone(),
            path,
            strength,
            config,
            modules,
            unknown,
            component: None,
            renames: Vec::new(),
            rotary: None,
        })
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

    /// A tensor, as a factor.
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
        let values = match (info.dtype, Float::of(info.dtype)) {
            (_, Some(float)) => {
                let mut values = vec![0.0; bytes.len() / float.size()];
                float.lift(&bytes, &mut values);
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

impl Adapter {
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
