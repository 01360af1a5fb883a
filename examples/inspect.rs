//! Shows what a checkpoint is made of: its layers in order of execution, their classes, and every tensor.
//!
//! ```text
//! cargo run --example inspect -- examples/data/tiny-llama
//! ```

mod support;

use std::path::PathBuf;

use clap::Parser;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use support::part::PartOptions;
use support::places::Places;
use tensor_offload::checkpoint::{Checkpoint, Layer, Layout};
use tensor_offload::{ByteSize, Result, TensorId};

/// Show a checkpoint's tensors, modules and layers.
#[derive(Parser)]
struct Inspect {
    /// A .safetensors or .gguf file, the index of a sharded checkpoint, or a folder that holds any of these; or its URL in an object
    /// store (s3://…, with the feature `store`).
    model: PathBuf,
    #[command(flatten)]
    part: PartOptions,
    /// Read every tensor and report its SHA-256.
    #[arg(long)]
    hash: bool,
    /// List every tensor in the text report.
    #[arg(long)]
    tensors: bool,
    /// Print one JSON value instead of text.
    #[arg(long)]
    json: bool,
}

fn main() {
    support::main::<Inspect>()
}

impl support::Example for Inspect {
    fn json(&self) -> bool {
        self.json
    }

    fn run(self) -> Result<Value> {
        let checkpoint = self.part.of(Places::default().checkpoint(&self.model)?)?;
        let layout = checkpoint.layout();
        let tensors = layout.tensor_ids().zip(layout.tensors());
        let hashes: Vec<Option<String>> = tensors
            .map(|(id, tensor)| self.hash.then(|| sha256(&checkpoint, id, tensor.bytes)).transpose())
            .collect::<Result<_>>()?;
        if !self.json {
            print_layers(&checkpoint);
            if self.tensors || self.hash {
                print_tensors(layout, &hashes);
            }
        }
        let mut report = report(&checkpoint, &hashes);
        if !self.part.is_all() {
            report["part"] = self.part.report();
        }
        Ok(report)
    }
}

/// A tensor's hash, read in pieces.
fn sha256(checkpoint: &Checkpoint, tensor: TensorId, bytes: u64) -> Result<String> {
    const PIECE: u64 = 4 << 20;
    let mut buffer = vec![0; bytes.min(PIECE) as usize];
    let mut hash = Sha256::new();
    for at in (0..bytes).step_by(PIECE as usize) {
        let piece = &mut buffer[..(bytes - at).min(PIECE) as usize];
        checkpoint.read_at(tensor, at, piece)?;
        hash.update(&*piece);
    }
    Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

fn report(checkpoint: &Checkpoint, hashes: &[Option<String>]) -> Value {
    let layout = checkpoint.layout();
    let tensors = layout.tensor_ids().zip(layout.tensors()).zip(hashes).map(|((id, tensor), hash)| {
        let module = layout.module_of(id).and_then(|module| layout.module(module));
        let layer = module.and_then(|module| layout.layer(module.layer));
        json!({
            "name": tensor.name,
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "bytes": tensor.bytes,
            "compressed": checkpoint.compressed(id),
            "module": module.map(|module| &module.name),
            "layer": layer.map(|layer| &layer.name),
            "sha256": hash,
        })
    });
    let layers = layout.layers().iter().map(|layer| {
        let modules: Vec<&str> = layout.modules_in(layer.id).map(|module| module.name.as_str()).collect();
        json!({ "name": layer.name, "modules": modules, "bytes": layer.bytes, "class": layer.class })
    });
    json!({
        "tensors": tensors.collect::<Vec<_>>(),
        "layers": layers.collect::<Vec<_>>(),
        "order": layout.order(),
        "total_bytes": layout.bytes(),
        "gguf": checkpoint.gguf().map(|gguf| json!({ "version": gguf.version(), "architecture": gguf.architecture() })),
    })
}

/// The layers in order of execution, neighbours of one class in one line.
fn print_layers(checkpoint: &Checkpoint) {
    let layout = checkpoint.layout();
    println!("{}", checkpoint.path().display());
    let same_class = |a: &Layer, b: &Layer| a.class == b.class && stack(a) == stack(b);
    let rows: Vec<[String; 4]> = layout.layers().chunk_by(same_class).map(|run| row(layout, run)).collect();
    let widths = [0, 1, 2].map(|column| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0));
    for [layers, count, each, kinds] in &rows {
        let [name, number, size] = widths;
        println!("  {layers:<name$}  {count:>number$} x {each:>size$}  {kinds}");
    }
    let (tensors, layers) = (count(layout.tensors().len(), "tensor"), count(layout.layers().len(), "layer"));
    let (total, files) = (ByteSize(layout.bytes()).human(), count(checkpoint.sources().len(), "file"));
    println!("{total} in {tensors}, {layers}, {files}");
    let compressed = layout.tensor_ids().filter_map(|id| Some((layout.tensor(id)?.bytes, checkpoint.compressed(id)?)));
    let (number, from, to) =
        compressed.fold((0, 0, 0), |(number, from, to), (bytes, stored)| (number + 1, from + bytes, to + stored));
    if number > 0 {
        let (before, ratio) = (ByteSize(from).human(), to as f64 / from as f64);
        println!(
            "{} compressed without loss, {before} to {} ({ratio:.3})",
            count(number, "tensor"),
            ByteSize(to).human()
        );
    }
    println!("order of execution: {}", layout.order());
    if let Some(gguf) = checkpoint.gguf() {
        println!("GGUF of version {}, architecture {}", gguf.version(), gguf.architecture().unwrap_or("not stated"));
    }
}

/// One line of the table: the layers' names, how many they are, the bytes of each, and what each is made of.
fn row(layout: &Layout, run: &[Layer]) -> [String; 4] {
    let (first, last) = (&run[0], &run[run.len() - 1]);
    let names = match run.len() {
        1 => first.name.clone(),
        _ => format!("{} … {}", first.name, last.name),
    };
    let tensors = || layout.modules_in(first.id).flat_map(|module| layout.tensors_in(module.id));
    let mut dtypes: Vec<&str> = tensors().map(|t| t.dtype.name()).collect();
    dtypes.sort_unstable();
    dtypes.dedup();
    let tied = match layout.modules_in(first.id).any(|module| module.tied) {
        true => ", used at both ends",
        false => "",
    };
    let kinds = format!("{}, {}{tied}", count(first.modules.len(), "module"), dtypes.join(" "));
    [names, run.len().to_string(), ByteSize(first.bytes).human().to_string(), kinds]
}

fn count(number: usize, what: &str) -> String {
    format!("{number} {what}{}", if number == 1 { "" } else { "s" })
}

/// What stands before a layer's number; the whole name where there is none.
fn stack(layer: &Layer) -> &str {
    layer.name.trim_end_matches(|c: char| c.is_ascii_digit())
}

fn print_tensors(layout: &Layout, hashes: &[Option<String>]) {
    let width = layout.tensors().iter().map(|t| t.name.chars().count()).max().unwrap_or(0);
    for (tensor, hash) in layout.tensors().iter().zip(hashes) {
        let (size, shape) = (ByteSize(tensor.bytes).human(), format!("{:?}", tensor.shape));
        let hash = hash.as_deref().unwrap_or("");
        let line = format!("  {:<width$}  {:<11} {shape:<16} {size:>11}  {hash}", tensor.name, tensor.dtype);
        println!("{}", line.trim_end());
    }
}
