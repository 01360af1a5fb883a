//! Text from a language model whose weights do not fit: a Llama over candle, its blocks streamed to the device that computes.
//!
//! `cargo run --release -p tensor-offload-candle --example candle_stream` runs a small Llama that comes with the repository;
//! `scripts/fetch-model` gets one that writes sentences. The same text is generated three times, each in a process of its
//! own: over streamed weights, with all weights in memory, and with a copy of each layer that does not fit.

#[path = "../../examples/support/adapters.rs"]
mod adapters;
#[path = "../../examples/support/casts.rs"]
mod casts;
#[path = "support/compute.rs"]
mod compute;
#[path = "support/generate.rs"]
mod generate;
#[path = "support/gguf.rs"]
mod gguf;
#[path = "support/gguf_tokenizer.rs"]
mod gguf_tokenizer;
#[path = "support/llama.rs"]
mod llama;
#[path = "support/peak.rs"]
mod peak;
#[allow(dead_code, reason = "only adapters are opened so here")]
#[path = "../../examples/support/places.rs"]
mod places;
#[path = "support/ways.rs"]
mod ways;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use adapters::AdapterOptions;
use clap::Parser;
use clap::error::ErrorKind;
use compute::Compute;
use generate::Chat;
use places::Places;
use serde_json::{Value, json};
use tensor_offload::{ByteSize, Checkpoint, DType, DeviceId, Registry, Weights};
use ways::{Job, Run, Way};

/// The model that comes with the repository.
const TINY_LLAMA: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../examples/data/tiny-llama");

type Result<T, E = Box<dyn std::error::Error>> = std::result::Result<T, E>;

/// Generates text with a Llama whose weights are streamed to the compute device, and compares speed, memory and logits with the
/// same model all in memory, and with a plain copy of each layer that does not fit. Exits with 1 if the logits differ.
#[derive(Parser)]
#[command(name = "candle_stream")]
struct Args {
    /// A folder with a Llama's safetensors, config.json and tokenizer.json, which scripts/fetch-model makes, or a Llama's GGUF file,
    /// which has all of it and runs on the CPU in its blocks [default: the small Llama of the repository, which has no tokenizer]
    model: Option<PathBuf>,
    /// The question to answer. Without a tokenizer its bytes are taken for tokens
    #[arg(long, value_name = "TEXT", default_value = "Why is the sky blue?")]
    prompt: String,
    #[command(flatten)]
    adapters: AdapterOptions,
    /// Which device keeps how much [default: `cpu,40%;disk,*`, which computes with 40 % of the weights in memory; on a card
    /// `cuda:0,40%;cpu,*`]
    #[arg(long, alias = "allocation", value_name = "ALLOCATION")]
    alloc: Option<String>,
    /// The device that computes: cpu, or a card if the program was built with the feature cuda
    /// [default: the first card, or else cpu]
    #[arg(long, value_name = "DEVICE")]
    compute: Option<DeviceId>,
    /// Of a GGUF file: have slots hold values as F32, F16 or BF16 in place of blocks, which alone cross the link; a card needs it
    #[arg(long, value_name = "TYPE")]
    unpack: Option<DType>,
    /// How many layers are fetched ahead
    #[arg(long, value_name = "LAYERS", default_value_t = 2)]
    depth: usize,
    /// How many tokens to generate
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u16).range(1..))]
    tokens: u16,
    /// Print one JSON value
    #[arg(long)]
    json: bool,
    /// One of the three runs, in a process of its own
    #[arg(long, hide = true)]
    way: Option<Way>,
}

fn main() -> ExitCode {
    let json = std::env::args_os().any(|arg| arg == "--json");
    let args = match Args::try_parse() {
        Ok(args) => args,
        Err(help) if matches!(help.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) => help.exit(),
        Err(usage) => {
            let text = usage.render().to_string();
            return fail("Usage", text.lines().next().unwrap_or_default().trim_start_matches("error: "), json);
        }
    };
    match args.run() {
        Ok(equal) => ExitCode::from(u8::from(!equal)),
        Err(error) => {
            let kind = error.downcast_ref::<tensor_offload::Error>().map(|error| error.kind().to_string());
            let candles = error.downcast_ref::<candle_core::Error>();
            let message = candles.map_or_else(|| error.to_string(), |error| without_backtrace(error).to_string());
            // The process that runs one way has its error relayed on standard error.
            fail(kind.as_deref().unwrap_or("Failed"), &message, json && args.way.is_none())
        }
    }
}

/// An error of candle's whose text is one line.
fn without_backtrace(error: &candle_core::Error) -> &candle_core::Error {
    match error {
        candle_core::Error::WithBacktrace { inner, .. } => without_backtrace(inner),
        other => other,
    }
}

/// Reports an error in one line.
fn fail(kind: &str, message: &str, json: bool) -> ExitCode {
    match json {
        true => println!("{}", json!({ "error": { "kind": kind, "message": message } })),
        false => eprintln!("error: {}", message.replace('\n', " ")),
    }
    ExitCode::from(2)
}

impl Args {
    /// Runs one way, or all of them and compares them; whether the logits are equal.
    fn run(&self) -> Result<bool> {
        let folder = self.model.clone().unwrap_or_else(|| TINY_LLAMA.into());
        let (job, chat) = self.job(&folder)?;
        match self.way {
            Some(way) => {
                println!("{}", serde_json::to_string(&job.run(way)?)?);
                Ok(true)
            }
            None => self.compare(&job, chat.as_ref()),
        }
    }

    fn job(&self, path: &Path) -> Result<(Job, Option<Chat>)> {
        let checkpoint = Checkpoint::open(path)?;
        let in_blocks = checkpoint.gguf().is_some();
        let weights = self.adapters.apply_to(&Places::default(), checkpoint)?;
        let Family { config, chat, mut ends } = if in_blocks { in_file(path, &weights)? } else { in_folder(path)? };
        let bytes = || self.prompt.bytes().map(|byte| u32::from(byte) % config.vocab_size.max(1) as u32).collect();
        let prompt = chat.as_ref().map_or_else(|| Ok(bytes()), |chat| chat.prompt(&self.prompt))?;
        if prompt.is_empty() {
            return Err("the prompt has no token; give a text with --prompt".into());
        }
        if let Some(id) = prompt.iter().find(|id| **id as usize >= config.vocab_size) {
            let tokens = config.vocab_size;
            return Err(format!(
                "the tokenizer gives token {id}, and the model has {tokens}: give it its own tokenizer"
            )
            .into());
        }
        ends.extend(chat.as_ref().and_then(Chat::end));
        let compute = self.compute.or(in_blocks.then_some(DeviceId::CPU));
        if let Some(device) = compute.filter(|device| in_blocks && !device.is_host() && self.unpack.is_none()) {
            return Err(format!(
                "GGUF files compute in their blocks on cpu alone: for {device} add --unpack BF16, or leave --compute out"
            )
            .into());
        }
        let unpacked = self
            .unpack
            .filter(|_| in_blocks)
            .map(|dtype| Ok::<_, tensor_offload::Error>((dtype, values(&weights, dtype)?)));
        let unpacked = unpacked.transpose()?;
        let compute = Compute::open(compute, &Registry::system())?;
        let allocation = self.alloc.clone().unwrap_or_else(|| compute.allocation());
        let (tokens, depth) = (usize::from(self.tokens), self.depth);
        let unchanged =
            path.is_file() && weights.layout().tensor_ids().all(|id| weights.patches().tensor(id).is_none());
        let gguf = (in_blocks && unchanged && gguf::is_alone(&weights)).then(|| path.to_owned());
        Ok((Job { compute, config, weights, unpacked, gguf, allocation, depth, prompt, ends, tokens }, chat))
    }

    /// Runs all ways, and reports.
    fn compare(&self, job: &Job, chat: Option<&Chat>) -> Result<bool> {
        let plan = job.plan(&Registry::system())?;
        if !self.json {
            println!("{plan}");
        }
        if chat.is_none() && job.config.gguf.is_some() {
            eprintln!(
                "note: the file has no tokenizer, so bytes are taken for tokens; put the model's tokenizer.json beside it"
            );
        }
        let runs = [Way::Streamed, Way::Resident, Way::ToDevice].map(child);
        let [streamed, resident, to_device] = runs;
        let (streamed, resident, to_device) = (streamed?, resident?, to_device?);
        let equal = streamed.logits == resident.logits && to_device.logits == resident.logits;
        let text = match chat {
            Some(chat) => chat.text(&streamed.tokens)?,
            None => streamed.tokens.iter().map(u32::to_string).collect::<Vec<_>>().join(" "),
        };
        let planned = plan.device(job.compute.id).map_or(0, |share| share.weights.bytes + share.beside.slots);
        if self.json {
            println!("{}", report(&text, planned, equal, [&streamed, &resident, &to_device]));
        } else {
            println!("{text}\n");
            table(planned, [&streamed, &resident, &to_device]);
            println!("logits: {}", if equal { "equal, bit for bit" } else { "they DIFFER" });
        }
        Ok(equal)
    }
}

/// The weights with values in place of blocks.
fn values(weights: &Weights, dtype: DType) -> tensor_offload::Result<Weights> {
    let blocks = weights.layout().tensors().iter().filter(|tensor| tensor.dtype.is_ggml_block());
    let names: Vec<String> = blocks.map(|tensor| tensor.name.clone()).collect();
    names.into_iter().try_fold(weights.clone(), |weights, name| weights.cast(name, dtype))
}

/// What a model's files say of it beside its weights.
struct Family {
    config: llama::Config,
    chat: Option<Chat>,
    ends: Vec<u32>,
}

/// The family of a folder with `config.json` and, if it has one, `tokenizer.json`.
fn in_folder(folder: &Path) -> Result<Family> {
    if !folder.is_dir() {
        return Err(format!("{}: give the folder, which has the model's config.json too", folder.display()).into());
    }
    let file = folder.join("config.json");
    let text = std::fs::read_to_string(&file)
        .map_err(|error| format!("{}: {error}; put the model's config.json there", file.display()))?;
    let tokenizer = folder.join("tokenizer.json");
    let chat = tokenizer.exists().then(|| Chat::open(&tokenizer)).transpose()?;
    Ok(Family { config: llama::Config::parse(&text)?, chat, ends: generate::ends(&text)? })
}

/// The family of a GGUF file. A `tokenizer.json` beside it comes before the tokenizer in it.
fn in_file(path: &Path, weights: &Weights) -> Result<Family> {
    let file = weights.checkpoint().gguf().ok_or("this is no GGUF file")?;
    let named = |error: candle_core::Error| format!("{}: {}", path.display(), without_backtrace(&error));
    let config = gguf::config(file, weights).and_then(|config| gguf::check(weights).map(|()| config)).map_err(named)?;
    let folder = if path.is_dir() { Some(path) } else { path.parent() };
    let beside = folder.map(|folder| folder.join("tokenizer.json")).filter(|tokenizer| tokenizer.exists());
    let chat = match beside {
        Some(tokenizer) => Some(Chat::open(&tokenizer).map_err(|error| {
            format!("{}; mend it, or remove it to have the file's own tokenizer", without_backtrace(&error))
        })?),
        None => gguf_tokenizer::tokenizer(file).map_err(named)?.map(Chat::of),
    };
    Ok(Family { config, chat, ends: gguf_tokenizer::ends(file).map_err(named)? })
}

/// Runs this program once more, for one of the ways.
fn child(way: Way) -> Result<Run> {
    let name = clap::ValueEnum::to_possible_value(&way).map(|value| value.get_name().to_owned()).unwrap_or_default();
    let mut command = Command::new(std::env::current_exe()?);
    let output = command.args(std::env::args_os().skip(1)).args(["--way", &name]).stderr(Stdio::inherit()).output()?;
    if !output.status.success() {
        return Err(format!("the run with `--way {name}` failed: {}", output.status).into());
    }
    Ok(serde_json::from_slice(&output.stdout)?)
}

impl Run {
    /// The tokens a second after the first one, whose pass reads the prompt; `None` without a second one.
    fn tokens_per_second(&self) -> Option<f64> {
        let passes = self.logits.len().saturating_sub(1);
        (passes > 0 && self.seconds > 0.0).then(|| passes as f64 / self.seconds)
    }
}

fn report(text: &str, planned: u64, equal: bool, [streamed, resident, to_device]: [&Run; 3]) -> Value {
    json!({
        "text": text,
        "tokens": streamed.tokens.len(),
        "token_ids": streamed.tokens,
        "tokens_per_second": streamed.tokens_per_second(),
        "resident_tokens_per_second": resident.tokens_per_second(),
        "to_device_tokens_per_second": to_device.tokens_per_second(),
        "prompt_seconds": streamed.prompt_seconds,
        "compute_seconds": resident.seconds,
        "transfer_seconds": streamed.transfer_seconds,
        "pass_bytes": streamed.pass_bytes,
        "peak_bytes": streamed.peak_bytes,
        "resident_peak_bytes": resident.peak_bytes,
        "to_device_peak_bytes": to_device.peak_bytes,
        "plan_bytes": planned,
        "logits_equal": equal,
    })
}

fn table(planned: u64, [streamed, resident, to_device]: [&Run; 3]) {
    println!("{:<28}{:>10}{:>16}{:>14}", "", "tokens/s", "ms a token", "peak memory");
    let number = |value: Option<f64>| value.map_or("-".to_owned(), |value| format!("{value:.1}"));
    for (name, run) in [("streamed", streamed), ("all in memory", resident), ("a copy of each layer", to_device)] {
        let (rate, peak) = (run.tokens_per_second(), run.peak_bytes.map(|bytes| ByteSize(bytes).human().to_string()));
        let each = rate.map(|rate| 1000.0 / rate);
        println!("{name:<28}{:>10}{:>16}{:>14}", number(rate), number(each), peak.unwrap_or("-".to_owned()));
    }
    let passes = streamed.logits.len().saturating_sub(1).max(1) as f64;
    let transfer = streamed.transfer_seconds.map(|seconds| 1000.0 * seconds / passes);
    println!("{:<28}{:>10}{:>16}", "the copies alone", "", number(transfer));
    if let Some(bytes) = streamed.pass_bytes {
        println!("a pass takes {} to the slots", ByteSize(bytes).human());
    }
    println!("the plan has {} in memory", ByteSize(planned).human());
}
