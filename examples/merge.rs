//! Applies adapters to a checkpoint, casts it if asked to, and writes the result as one safetensors or GGUF file.
//!
//! `cargo run --release --example merge -- BASE --adapter LORA.safetensors:0.8 --out MERGED.safetensors`
//!
//! `cargo run --release --example merge -- BASE.gguf --adapter LORA.safetensors --requantise --out MERGED.gguf`

mod support;

use std::path::PathBuf;

use clap::Parser;
use serde_json::{Value, json};
use support::adapters::AdapterOptions;
use support::options::{DeviceOptions, PlanOptions};
use support::part::PartOptions;
use support::places::Places;
use tensor_offload::backend::Clock;
use tensor_offload::checkpoint::{
    GgufMetadata, GgufValue, Layout, TensorSpec, TensorWriter, write_compressed, write_gguf, write_safetensors,
};
use tensor_offload::load::LoadReport;
use tensor_offload::patch::{PatchOutcome, Requantised};
use tensor_offload::{DType, Error, Loader, Model, Planner, Result, TensorId, Weights};

/// The entry of a GGUF file's metadata that says of which type most tensors are.
const FILE_TYPE: &str = "general.file_type";

/// Why a checkpoint of another format is not written as GGUF.
const NOT_GGUF: &str = "a GGUF file needs llama.cpp's names and metadata, which only a GGUF checkpoint has: let --out end in \
    .safetensors, and convert the merged file with llama.cpp's convert_hf_to_gguf.py";

/// Why no GGUF file is compressed.
const NO_COMPRESSED_GGUF: &str =
    "a GGUF file has no compressed tensors: leave out --compress, or let --out end in .safetensors";

/// Bytes of an unpatched tensor that are copied at a time.
const CHUNK: usize = 16 << 20;

/// Applies adapters to a checkpoint and writes it as one file, with the names of the checkpoint, and with its element types but
/// for what is cast; without an adapter or a cast that is a copy. A GGUF checkpoint is written as GGUF, with its metadata, if
/// the file's name ends in .gguf, or with --requantise under any name that does not end in .safetensors. All else is written
/// as safetensors.
#[derive(Parser)]
#[command(name = "merge")]
struct Args {
    /// The checkpoint: a safetensors or GGUF file, any file of a GGUF set, or a folder with one or with an index; or its URL in an
    /// object store (s3://…, with the feature `store`)
    base: PathBuf,
    #[command(flatten)]
    part: PartOptions,
    #[command(flatten)]
    adapters: AdapterOptions,
    /// Store all values as this type, those of GGML's blocks among them: F32, F16 or BF16
    #[arg(long, visible_alias = "dtype", value_name = "TYPE", value_parser = promoted)]
    promote: Option<DType>,
    /// The file to write; one that is there is replaced once the new one is whole
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// Compress without loss what that makes smaller: bf16 to two thirds of its bytes. Only this library reads the file, and sees
    /// the same tensors
    #[arg(long)]
    compress: bool,
    /// Place the model by this allocation, and write what is read back from the devices
    #[arg(long, value_name = "ALLOCATION")]
    alloc: Option<String>,
    #[command(flatten)]
    devices: DeviceOptions,
    #[command(flatten)]
    plan: PlanOptions,
    /// Print one JSON value
    #[arg(long)]
    json: bool,
}

impl support::Example for Args {
    fn json(&self) -> bool {
        self.json
    }

    fn run(mut self) -> Result<Value> {
        // A cast of its own comes later, and counts.
        self.adapters.casts.casts.splice(..0, self.promote.map(|dtype| dtype.to_string()));
        let places = Places::default();
        let weights = self.adapters.apply_to(&places, self.part.of(places.checkpoint(&self.base)?)?)?;
        let gguf = self.gguf_metadata(&weights)?;
        if self.compress && gguf.is_some() {
            return Err(Error::Invalid { reason: NO_COMPRESSED_GGUF.to_owned() });
        }
        if gguf.is_none() || !self.keeps_blocks(&weights) {
            check_types(weights.layout(), gguf.is_some())?;
        }
        let tensors = weights.layout().tensors();
        let specs: Vec<_> = tensors.iter().map(|t| TensorSpec::new(&*t.name, t.dtype, &*t.shape)).collect();
        let placed = self.alloc.as_deref().map(|alloc| self.place(alloc, &weights)).transpose()?;
        let mut merged = placed.as_ref().map_or_else(Merged::default, |model| Merged::of(model.report()));
        let fill = |tensor, out: &mut TensorWriter<'_>| match &placed {
            Some(model) => read_back(model, tensor, out),
            None => patch(&weights, tensor, out).map(|outcome| merged.add(&tensors[tensor].name, outcome)),
        };
        let mut compressed = None;
        match &gguf {
            Some(metadata) => write_gguf(&self.out, &specs, metadata, fill)?,
            None if self.compress => {
                compressed = Some(write_compressed(&self.out, &specs, weights.checkpoint().metadata(), fill)?);
            }
            None => write_safetensors(&self.out, &specs, weights.checkpoint().metadata(), fill)?,
        }
        let report = weights.report();
        if !self.json {
            // A copy without adapters has nothing to tell of them.
            if !(report.applied.is_empty() && report.skipped.is_empty() && report.unmatched.is_empty()) {
                print!("{report}");
            }
            println!("{} tensors written to {}", specs.len(), self.out.display());
            compressed.iter().for_each(|report| println!("{report}"));
            merged.print();
        }
        Ok(json!({
            "applied": report.applied, "skipped": report.skipped, "unmatched": report.unmatched,
            "saturated": merged.saturated, "requantised": merged.requantised, "worst_requantised": merged.worst(),
            "compressed": compressed,
        }))
    }
}

/// What storing the changed values came to.
#[derive(Default)]
struct Merged {
    saturated: u64,
    requantised: Requantised,
    worst: Option<(String, Requantised)>,
}

impl Merged {
    /// As a load reports it.
    fn of(report: &LoadReport) -> Merged {
        let worst = report.worst_requantised.clone().map(|name| (name, Requantised::default()));
        Merged { saturated: report.saturated, requantised: report.requantised, worst }
    }

    fn add(&mut self, tensor: &str, outcome: PatchOutcome) {
        let new = outcome.requantised;
        self.saturated += outcome.saturated;
        self.requantised += new;
        if new.values > 0 && self.worst.as_ref().is_none_or(|(_, worst)| new.severity(worst).is_ge()) {
            self.worst = Some((tensor.to_owned(), new));
        }
    }

    fn worst(&self) -> Option<&str> {
        self.worst.as_ref().map(|(name, _)| name.as_str())
    }

    fn print(&self) {
        let Merged { saturated, requantised, .. } = self;
        if *saturated > 0 {
            println!("{saturated} values saturated: they are beyond the range of their type, and became its largest");
        }
        if let Some(worst) = self.worst() {
            let (values, error, rms) = (requantised.values, requantised.rms_error(), requantised.rms());
            println!(
                "{values} values requantised with an RMS error of {error:.3e} (RMS {rms:.3e}), worst in `{worst}`"
            );
        }
        if requantised.inexpressible > 0 {
            println!("{} blocks store no finite values", requantised.inexpressible);
        }
    }
}

impl Args {
    /// The metadata of the GGUF file to write; `None` if it is to be of safetensors.
    fn gguf_metadata(&self, weights: &Weights) -> Result<Option<GgufMetadata>> {
        let named = |end: &str| self.out.extension().is_some_and(|own| own.eq_ignore_ascii_case(end));
        let Some(gguf) = weights.checkpoint().gguf() else {
            return match named("gguf") {
                true => Err(Error::Invalid { reason: NOT_GGUF.to_owned() }),
                false => Ok(None),
            };
        };
        if !named("gguf") && (named("safetensors") || !self.adapters.requantise) {
            return Ok(None);
        }
        let mut metadata = gguf.to_metadata()?;
        // The kind of file (llama.cpp, include/llama.h, `llama_ftype`).
        let kinds = [(DType::F32, 0), (DType::F16, 1), (DType::BF16, 32)];
        let kind = kinds.into_iter().find(|(dtype, _)| Some(*dtype) == self.promote);
        if let Some((_, kind)) = kind.filter(|_| gguf.get(FILE_TYPE).is_some()) {
            metadata.set(FILE_TYPE, GgufValue::U32(kind))?;
        }
        Ok(Some(metadata))
    }

    /// Whether it was said what becomes of blocks that adapters change, so that the others may stay as they are.
    fn keeps_blocks(&self, weights: &Weights) -> bool {
        let mut patches = weights.patches().iter();
        let casts = &self.adapters.casts.casts;
        self.adapters.requantise || (!casts.is_empty() && !patches.any(|(_, patch)| patch.dtype().is_ggml_block()))
    }

    /// The model as the allocation places it.
    fn place(&self, alloc: &str, weights: &Weights) -> Result<Model> {
        // Nobody waits for the links of described devices here.
        let devices = self.devices.registry(Clock::Virtual)?;
        let planner = Planner::new(weights.layout(), devices.machine()).allocation(alloc.parse()?);
        let plan = self.plan.apply(planner)?.plan()?;
        if !self.json {
            println!("{plan}");
        }
        Loader::new(&devices).load(weights, &plan)
    }
}

/// A type that tensors are promoted to.
fn promoted(text: &str) -> std::result::Result<DType, String> {
    let dtype = text.to_uppercase().parse().ok();
    dtype
        .filter(|dtype| matches!(dtype, DType::F32 | DType::F16 | DType::BF16))
        .ok_or_else(|| "tensors are promoted to F32, F16 or BF16".to_owned())
}

/// Fails if there are blocks, which a safetensors file cannot hold, and of which a GGUF file needs to know what becomes of them.
fn check_types(layout: &Layout, gguf: bool) -> Result<()> {
    let blocks: Vec<_> = layout.tensors().iter().filter(|tensor| tensor.dtype.is_ggml_block()).collect();
    if blocks.is_empty() {
        return Ok(());
    }
    let named: Vec<_> = blocks.iter().take(3).map(|tensor| format!("`{}` ({})", tensor.name, tensor.dtype)).collect();
    let (trouble, end) = match gguf {
        true => ("", ""),
        false => (", which a safetensors file cannot hold", " in an --out that ends in .gguf"),
    };
    let reason = format!(
        "{} of {} tensors are in GGML's blocks{trouble}: {}{}; --promote F32, F16 or BF16 stores their values, and \
         --requantise keeps blocks, and makes blocks of the values that adapters change{end}",
        blocks.len(),
        layout.tensors().len(),
        named.join(", "),
        if blocks.len() > named.len() { ", …" } else { "" }
    );
    Err(Error::Invalid { reason })
}

/// Writes a tensor from where it was placed.
fn read_back(model: &Model, tensor: usize, out: &mut TensorWriter<'_>) -> Result<()> {
    let info = &model.layout().tensors()[tensor];
    let mut bytes = vec![0; info.bytes as usize];
    model.read(&info.name, &mut bytes)?;
    out.put(&bytes)
}

/// Writes a tensor from the checkpoint's file, patched where an adapter changes it or it is cast.
fn patch(weights: &Weights, tensor: usize, out: &mut TensorWriter<'_>) -> Result<PatchOutcome> {
    let (bytes, tensor) = (weights.layout().tensors()[tensor].bytes as usize, TensorId::new(tensor));
    if weights.patches().tensor(tensor).is_some() {
        let mut patched = vec![0; bytes];
        let outcome = weights.read(tensor, &mut patched)?;
        out.put(&patched)?;
        return Ok(outcome);
    }
    let mut chunk = vec![0; bytes.min(CHUNK)];
    for at in (0..bytes).step_by(CHUNK) {
        let part = &mut chunk[..CHUNK.min(bytes - at)];
        weights.checkpoint().read_at(tensor, at as u64, part)?;
        out.put(part)?;
    }
    Ok(PatchOutcome::default())
}

fn main() {
    support::main::<Args>()
}
