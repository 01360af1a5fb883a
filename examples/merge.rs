//! Applies adapters to a checkpoint, casts it if asked to, and writes the result as one safetensors file.
//!
//! `cargo run --release --example merge -- BASE --adapter LORA.safetensors:0.8 --out MERGED.safetensors`

mod support;

use std::path::PathBuf;

use clap::Parser;
use serde_json::{Value, json};
use support::adapters::AdapterOptions;
use support::options::{DeviceOptions, PlanOptions};
use tensor_offload::backend::Clock;
use tensor_offload::checkpoint::{Layout, TensorSpec, TensorWriter, write_safetensors};
use tensor_offload::{Checkpoint, DType, Error, Loader, Model, Planner, Result, TensorId, Weights};

/// Bytes of an unpatched tensor that are copied at a time.
const CHUNK: usize = 16 << 20;

/// Applies adapters to a checkpoint and writes it as one safetensors file, with the names of the checkpoint, and with its element
/// types but for what is cast; without an adapter or a cast that is a copy.
#[derive(Parser)]
#[command(name = "merge")]
struct Args {
    /// The checkpoint: a safetensors or GGUF file, or a folder with one or with an index
    base: PathBuf,
    #[command(flatten)]
    adapters: AdapterOptions,
    /// Store all values as this type, those of GGML's blocks among them: F32, F16 or BF16
    #[arg(long, value_name = "TYPE", value_parser = promoted)]
    promote: Option<DType>,
    /// The file to write; one that is there is replaced once the new one is whole
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
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
        let weights = self.adapters.apply_to(Checkpoint::open(&self.base)?)?;
        check_types(weights.layout())?;
        let tensors = weights.layout().tensors();
        let specs: Vec<_> = tensors.iter().map(|t| TensorSpec::new(&*t.name, t.dtype, &*t.shape)).collect();
        let placed = self.alloc.as_deref().map(|alloc| self.place(alloc, &weights)).transpose()?;
        let mut saturated = placed.as_ref().map_or(0, |model| model.report().saturated);
        write_safetensors(&self.out, &specs, weights.checkpoint().metadata(), |tensor, out| match &placed {
            Some(model) => read_back(model, tensor, out),
            None => patch(&weights, tensor, out).map(|here| saturated += here),
        })?;
        let report = weights.report();
        if !self.json {
            // A copy without adapters has nothing to tell of them.
            if !(report.applied.is_empty() && report.skipped.is_empty() && report.unmatched.is_empty()) {
                print!("{report}");
            }
            println!("{} tensors written to {}", specs.len(), self.out.display());
            if saturated > 0 {
                println!(
                    "{saturated} values saturated: they are beyond the range of their type, and became its largest"
                );
            }
        }
        Ok(json!({
            "applied": report.applied, "skipped": report.skipped, "unmatched": report.unmatched, "saturated": saturated,
        }))
    }
}

impl Args {
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

/// Fails if a safetensors file cannot hold what is to be written.
fn check_types(layout: &Layout) -> Result<()> {
    let blocks: Vec<_> = layout.tensors().iter().filter(|tensor| tensor.dtype.is_ggml_block()).collect();
    if blocks.is_empty() {
        return Ok(());
    }
    let named: Vec<_> = blocks.iter().take(3).map(|tensor| format!("`{}` ({})", tensor.name, tensor.dtype)).collect();
    let reason = format!(
        "{} of {} tensors are in GGML's blocks, which a safetensors file cannot hold: {}{}; --promote F32, F16 or BF16 \
         stores their values",
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

/// Writes a tensor from the checkpoint's file, patched where an adapter changes it or it is cast; how many of its values
/// saturated.
fn patch(weights: &Weights, tensor: usize, out: &mut TensorWriter<'_>) -> Result<u64> {
    let (bytes, tensor) = (weights.layout().tensors()[tensor].bytes as usize, TensorId::new(tensor));
    if weights.patches().tensor(tensor).is_some() {
        let mut patched = vec![0; bytes];
        let outcome = weights.read(tensor, &mut patched)?;
        out.put(&patched)?;
        return Ok(outcome.saturated);
    }
    let mut chunk = vec![0; bytes.min(CHUNK)];
    for at in (0..bytes).step_by(CHUNK) {
        let part = &mut chunk[..CHUNK.min(bytes - at)];
        weights.checkpoint().read_at(tensor, at as u64, part)?;
        out.put(part)?;
    }
    Ok(0)
}

fn main() {
    support::main::<Args>()
}
