//! The whole path: plan a checkpoint over several devices, patch it, distribute it, stream it layer by layer to
//! the compute device, and unload it.
//!
//! `cargo run --release --example offload` does it with a small Llama and a LoRA that come with the crate, on
//! devices described so that the model does not fit the one that computes.

mod support;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::Parser;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use support::adapters::AdapterOptions;
use support::deferred::DeferOptions;
use support::options::{CompressOption, DeviceOptions, PlanOptions};
use support::part::PartOptions;
use support::places::Places;
use support::values::Values;
use tensor_offload::adapter::MatchReport;
use tensor_offload::allocation::Mode;
use tensor_offload::backend::Clock;
use tensor_offload::checkpoint::Factors;
use tensor_offload::device::{Bandwidth, DeviceInfo, DeviceKind, Topology};
use tensor_offload::{
    Adapter, Allocation, ByteSize, Checkpoint, DType, DeviceId, Error, Loader, Machine, Model, ModelCache, Plan,
    Planner, Registry, Result, Retention, Streamer, Weights,
};

/// The model and the adapter that come with the crate.
const TINY_LLAMA: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/data/tiny-llama");
const TINY_LORA: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/data/tiny-llama-lora");

/// How long a step may take before the example gives up.
const DEADLINE: Duration = Duration::from_secs(600);

/// Plans a checkpoint over several devices, patches it, distributes it, streams it layer by layer to the compute device
/// and unloads it. Without a model it takes a small Llama and a LoRA that come with the crate; without devices it
/// takes this machine's accelerators, or describes one that the model does not fit.
#[derive(Parser)]
#[command(name = "offload")]
struct Args {
    /// The checkpoint: a safetensors or GGUF file, or a folder with one or with an index; or its URL in an object store (s3://…, with
    /// the feature `store`)
    model: Option<PathBuf>,
    #[command(flatten)]
    adapters: AdapterOptions,
    #[command(flatten)]
    deferred: DeferOptions,
    /// Which device takes how much: `cuda:0,2.5gb;cpu,*`, `cuda:0,50%;cpu,50%`, `cuda:0,0.8` (of its memory),
    /// `#cuda:0;4.0;cpu` (GiB that leave cuda:0), `auto` or `auto,reserve=2gb` (what makes a step shortest)
    /// [default: a quarter on the compute device, the rest on cpu]
    #[arg(long, value_name = "ALLOCATION")]
    alloc: Option<String>,
    #[command(flatten)]
    devices: DeviceOptions,
    #[command(flatten)]
    part: PartOptions,
    #[command(flatten)]
    plan: PlanOptions,
    #[command(flatten)]
    codes: CompressOption,
    /// How many times to run through the model
    #[arg(long, value_name = "N", default_value_t = 3)]
    steps: usize,
    /// Milliseconds of compute in one step, spread evenly over the layers
    #[arg(long, value_name = "MS", default_value_t = 20.0)]
    compute_ms: f64,
    /// In each layer's turn, compute the values of its weights in GGML's blocks on the compute device, as F32, F16 or BF16,
    /// into memory that all of them share
    #[arg(long, value_name = "TYPE", conflicts_with = "unpack")]
    dequantise: Option<DType>,
    /// Keep up to so much of what is read of the model's own files in host memory, for the next steps (2gb)
    #[arg(long, value_name = "SIZE")]
    host_cache: Option<ByteSize>,
    /// Write a trace of every copy, wait and compute for ui.perfetto.dev or chrome://tracing; a real card's copies from when
    /// they are queued until they were seen to be done
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Print one JSON value
    #[arg(long)]
    json: bool,
}

impl support::Example for Args {
    fn json(&self) -> bool {
        self.json
    }

    fn run(self) -> Result<Value> {
        if !(0.0..=3_600_000.0).contains(&self.compute_ms) {
            return Err(invalid(format!("--compute-ms {} is not between 0 and an hour", self.compute_ms)));
        }
        // Writes the rest of the trace when it is dropped.
        let _trace = self.trace.as_deref().map(support::trace::to_file).transpose()?;
        let places = Places::default();
        let weights = self.codes.apply(self.weights(&places)?)?;
        let devices = self.registry(&weights)?;
        let start = devices.snapshot("start");
        let plan = self.plan(&weights, &self.machine(&devices)?, self.allocation()?)?;
        let machine = support::devices::lines(devices.machine());
        self.say(|| format!("{}\n{machine}{start}\n\n{plan}", describe(&weights)));

        let model = Arc::new(self.load(&devices, &weights, &plan)?);
        let loaded = devices.snapshot("loaded");
        let traffic = places.traffic();
        self.say(|| {
            format!("loaded {}\n{}{loaded}\n", model.report(), traffic.iter().map(traffic_line).collect::<String>())
        });

        let cache = ModelCache::new();
        cache.insert("model", Arc::clone(&model), Retention::Unload);
        let mut streamer = Streamer::new(&model)?;
        let topology = self.topology(&plan, &devices)?;
        let mut values = match (self.dequantise, self.plan.unpack) {
            (Some(dtype), _) => Some(Values::new(&model, dtype)?),
            (None, Some(dtype)) => Some(Values::in_slots(dtype)),
            (None, None) => None,
        };
        let steps = self.steps(&mut streamer, &plan, &topology, values.as_mut())?;
        let segments = streamer.report().segments(&topology);
        let carried = |(name, bytes): (&&str, &u64)| format!("; {} over {name}", ByteSize(*bytes).human());
        self.say(|| format!("streamed {}{}", streamer.report(), segments.iter().map(carried).collect::<String>()));
        let hash = verify(&mut streamer, &weights, &devices, values.as_mut())?;
        self.say(|| format!("every tensor matches a merge on the host: sha256 {hash}"));
        let deferred = deferred(&model);
        if !deferred.is_empty() {
            self.say(|| deferred_lines(&deferred));
        }
        let values = values.map(Values::checked).zip(self.dequantise.or(self.plan.unpack));
        if let Some(((tensors, hash), dtype)) = &values {
            self.say(|| format!("the values of {tensors} tensors, as {dtype}, match the host's: sha256 {hash}"));
        }
        self.say(String::new);
        let stream = streamer.report().clone();
        let load = model.report().clone();
        drop((streamer, model));

        let cleanup = cache.full_cleanup(&devices)?;
        let end = devices.snapshot("unloaded");
        let peaks: Vec<_> = devices.opened().iter().map(|d| (d.id(), d.ledger().peak(), d.ledger().limit())).collect();
        self.say(|| format!("{cleanup}\n{end}\n{}", peaks.iter().map(peak_line).collect::<String>()));
        let peaks: Vec<_> =
            peaks.iter().map(|(id, peak, limit)| json!({ "id": id, "peak": peak, "limit": limit })).collect();
        let mut report = json!({
            "plan": plan, "load": load, "steps": steps, "stream": stream, "segments": segments, "sha256": hash, "unload": cleanup.unload,
            "devices": peaks, "snapshots": [start.to_string(), loaded.to_string(), end.to_string()],
        });
        if !deferred.is_empty() {
            report["deferred"] = json!(deferred);
        }
        if !self.part.is_all() {
            report["part"] = self.part.report();
        }
        if !traffic.is_empty() {
            let of = |(url, requests, bytes): &(String, u64, u64)| json!({ "url": url, "requests": requests, "bytes": bytes });
            report["stores"] = traffic.iter().map(of).collect();
        }
        if let Some(((tensors, hash), dtype)) = values {
            report["values"] = json!({ "dtype": dtype, "tensors": tensors, "sha256": hash });
        }
        Ok(report)
    }
}

impl Args {
    fn weights(&self, places: &Places) -> Result<Weights> {
        let mut adapters = self.adapters.clone();
        adapters.deferred = self.deferred.patterns()?;
        let checkpoint = match &self.model {
            Some(model) => places.checkpoint(model)?,
            None => Checkpoint::open(TINY_LLAMA)?,
        };
        let checkpoint = self.part.of(checkpoint)?;
        match self.model.is_none() && adapters.adapters.is_empty() {
            true => adapters.merge(checkpoint, vec![Adapter::open(TINY_LORA, 1.0)?]),
            false => adapters.apply_to(places, checkpoint),
        }
    }

    /// The devices given, else this machine's where it has an accelerator, else one that the model does not fit.
    fn registry(&self, weights: &Weights) -> Result<Registry> {
        let computes = |id: DeviceId| !matches!(id.kind(), DeviceKind::Cpu | DeviceKind::Disk);
        let system = self.devices.registry(Clock::Wall)?;
        let named: Vec<DeviceId> = self.plan.compute.iter().map(|id| id.parse()).collect::<Result<_>>()?;
        if !self.devices.devices.is_empty()
            || system.machine().ids().any(computes)
            || named.iter().any(|&id| !computes(id))
        {
            return Ok(system);
        }
        let host = [DeviceId::CPU, DeviceId::DISK].map(|id| system.machine().device(id).cloned());
        let [cpu, disk] = host;
        let (cpu, disk) = (cpu?, disk?);
        let card = DeviceId::cuda(0);
        // What the plan needs on a card without limits is what the described one has.
        let link = |seconds: f64, bytes: u64| Bandwidth::bytes_per_second((bytes as f64 / seconds) as u64);
        let room = Machine::new([cpu.clone(), disk.clone(), DeviceInfo::new(card, u64::MAX / 4)], Topology::new());
        // On a card without limits mode auto would have nothing to do.
        let allocation = self.allocation()?.filter(|allocation| allocation.mode() != Mode::Auto);
        let plan = self.plan(weights, &room, allocation).map_err(|error| without(card, error))?;
        let needed = plan.device(card).map_or(0, |share| share.needed()).next_multiple_of(4096);
        // A link that brings the streamed weights in three quarters of the compute, 27.2 GB/s (PCIe 4 x16) at most.
        let streamed = plan.bytes().saturating_sub(plan.device(card).map_or(0, |share| share.weights.bytes));
        let pace = link(self.compute_ms.max(1.0) / 1000.0 * 0.75, streamed.max(1));
        let topology = Topology::new().link(card, pace.min(Bandwidth::bytes_per_second(27_200_000_000)));
        let card = DeviceInfo::new(card, needed).name("described device");
        Ok(Registry::described(Machine::new([cpu, disk, card], topology), Clock::Wall))
    }

    fn allocation(&self) -> Result<Option<Allocation>> {
        self.alloc.as_ref().map(|alloc| alloc.parse()).transpose()
    }

    /// The devices' machine. Nobody described the links of real devices; mode auto needs them, so they are measured.
    fn machine(&self, devices: &Registry) -> Result<Machine> {
        let machine = devices.machine().clone();
        let auto = self.allocation()?.is_some_and(|allocation| allocation.mode() == Mode::Auto);
        if !auto || !self.devices.devices.is_empty() || !machine.topology().is_estimate() {
            return Ok(machine);
        }
        Ok(machine.with_topology(devices.measured_topology()?))
    }

    fn plan(&self, weights: &Weights, machine: &Machine, allocation: Option<Allocation>) -> Result<Plan> {
        let layers = weights.layout().layers().len();
        let compute = Duration::from_secs_f64(self.compute_ms / 1000.0);
        let per_layer = compute / u32::try_from(layers.max(1)).unwrap_or(u32::MAX);
        let planner = self.codes.set(self.plan.apply(Planner::new(weights.layout(), machine))?);
        let mut planner = planner.compute_time(vec![per_layer; layers]);
        if let Some(dtype) = self.dequantise {
            planner = planner.reserve(ByteSize(self.plan.reserve()? + Values::room(weights.layout(), dtype)?));
        }
        if self.model.is_none() && self.plan.depth.is_none() {
            // Three slots would hold all of the small model's three blocks, and there would be nothing to see.
            planner = planner.depth(1);
        }
        let allocation: Allocation = match allocation {
            Some(allocation) => allocation,
            None => {
                let first = machine.ids().find(|id| !matches!(id.kind(), DeviceKind::Cpu | DeviceKind::Disk));
                let compute = self.plan.compute.as_ref().map(|id| id.parse()).transpose()?.or(first);
                let quarter = ByteSize(weights.layout().bytes() / 4);
                match compute {
                    Some(compute) if compute != DeviceId::CPU => format!("{compute},{quarter};cpu,*").parse()?,
                    _ => "cpu,*".parse()?,
                }
            }
        };
        planner.allocation(allocation).plan()
    }

    fn load(&self, devices: &Registry, weights: &Weights, plan: &Plan) -> Result<Model> {
        let bar = ProgressBar::new(plan.bytes());
        if self.json {
            bar.set_draw_target(ProgressDrawTarget::hidden());
        }
        if let Ok(style) = ProgressStyle::with_template("loading [{bar:40}] {bytes} of {total_bytes}, {bytes_per_sec}")
        {
            bar.set_style(style);
        }
        let progress = |done: u64, _: u64| bar.set_position(done);
        let model = Loader::new(devices)
            .progress(&progress)
            .host_cache(self.host_cache.unwrap_or(ByteSize(0)))
            .load(weights, plan);
        bar.finish_and_clear();
        model
    }

    /// Goes through the model, as a caller would that computes for a while in every layer.
    fn steps(
        &self,
        streamer: &mut Streamer,
        plan: &Plan,
        topology: &Topology,
        mut values: Option<&mut Values>,
    ) -> Result<Vec<Value>> {
        let layers = streamer.model().layout().layer_ids();
        let compute = Duration::from_secs_f64(self.compute_ms / 1000.0);
        let per_layer = compute / u32::try_from(layers.len().max(1)).unwrap_or(u32::MAX);
        let estimate = plan.estimate(topology, compute);
        let floor = estimate.pass.as_secs_f64();
        self.say(|| format!("{estimate}"));
        let mut steps = Vec::new();
        for step in 1..=self.steps {
            let (begin, before, read_before) = (Instant::now(), streamed(streamer), streamer.report().read);
            for layer in layers.clone() {
                let guard = streamer.layer(layer)?;
                values.as_mut().map_or(Ok(()), |values| values.compute(&guard))?;
                streamer.compute().occupy(per_layer)?;
            }
            streamer.compute().record(&[])?.wait(DEADLINE)?;
            streamer.verify()?;
            let seconds = begin.elapsed().as_secs_f64();
            let bytes = streamed(streamer) - before;
            let ratio = if floor > 0.0 { format!("{:.2} times ", seconds / floor) } else { String::new() };
            self.say(|| {
                format!("step {step}: {:.2} ms, {ratio}max(compute, transfer) = {:.2} ms", seconds * 1e3, floor * 1e3)
            });
            let read = streamer.report().read - read_before;
            steps.push(json!({ "seconds": seconds, "floor": floor, "bytes": bytes, "read": read }));
        }
        Ok(steps)
    }

    /// The links. Nobody described those of real devices, at best they are estimated; they are measured.
    fn topology(&self, plan: &Plan, devices: &Registry) -> Result<Topology> {
        let real = self.devices.devices.is_empty() && !plan.compute().is_host();
        let described = devices.machine().topology();
        match real && described.is_estimate() {
            true => devices.measured_topology(),
            false => Ok(described.clone()),
        }
    }

    fn say(&self, text: impl FnOnce() -> String) {
        if !self.json {
            support::print_line(&text());
        }
    }
}

/// The bytes fetched so far.
fn streamed(streamer: &Streamer) -> u64 {
    streamer.report().bytes.values().sum()
}

/// Streams the model once more and compares every tensor with what patching on the host alone gives, and the values of
/// blocks with the host's.
fn verify(
    streamer: &mut Streamer,
    weights: &Weights,
    devices: &Registry,
    mut values: Option<&mut Values>,
) -> Result<String> {
    let model = Arc::clone(streamer.model());
    let mut whole = Sha256::new();
    for layer in model.layout().layer_ids() {
        let guard = streamer.layer(layer)?;
        for view in guard.tensors() {
            let name = view.name();
            let stored = model.tensor(name).ok_or_else(|| invalid(format!("the model has no tensor `{name}`")))?;
            let (mut streamed, mut merged) = (vec![0; stored.size()], vec![0; stored.size()]);
            match view.dtype() == stored.dtype() {
                true => guard.read(name, &mut streamed)?,
                // What is unpacked is compared below.
                false => model.read(name, &mut streamed)?,
            }
            let tensor = weights.layout().find(name);
            let tensor = tensor.ok_or_else(|| invalid(format!("the weights have no tensor `{name}`")))?;
            weights.read(tensor, &mut merged)?;
            if streamed != merged {
                return Err(invalid(format!("tensor `{name}` did not arrive as it was patched")));
            }
            values.as_mut().map_or(Ok(()), |values| values.check(devices, &guard, (name, stored.dtype()), &merged))?;
            whole.update(name);
            whole.update(&streamed);
        }
    }
    Ok(whole.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

/// The weights whose changes are not merged, with their factors.
fn deferred(model: &Model) -> Vec<Value> {
    let layout = model.layout();
    let describe = |of: &Factors| {
        let weight = &layout.tensor(of.weight)?.name;
        let factors = model.deferred(weight)?;
        let (a, b) = (&factors.a, &factors.b);
        Some(json!({
            "weight": weight, "a": a.name(), "a_shape": a.shape(), "b": b.name(), "b_shape": b.shape(), "dtype": a.dtype(),
            "scale": factors.scale, "bytes": a.size() + b.size(),
        }))
    };
    layout.factors().iter().filter_map(describe).collect()
}

/// How many weights are deferred, and one of them.
fn deferred_lines(deferred: &[Value]) -> String {
    let (count, first) = (deferred.len(), &deferred[0]);
    format!(
        "{count} weights are as in the file, with factors beside them: the first is W x + s B (A x) with {} {}, {} {}, s {}",
        first["a"], first["a_shape"], first["b"], first["b_shape"], first["scale"]
    )
}

/// The checkpoint, and what became of the adapters where there are any.
fn describe(weights: &Weights) -> String {
    let (checkpoint, report) = (weights.checkpoint(), weights.report());
    let layout = checkpoint.layout();
    let name = checkpoint.path().file_name().map_or(Path::new("model"), Path::new).display();
    let (layers, tensors) = (layout.layers().len(), layout.tensors().len());
    let adapters = if *report == MatchReport::default() { String::new() } else { report.to_string() };
    format!("{name}: {} in {tensors} tensors, {layers} layers\n{adapters}", ByteSize(layout.bytes()).human())
}

/// What was asked of a store until the model was loaded.
fn traffic_line((url, requests, bytes): &(String, u64, u64)) -> String {
    format!("{url}: {requests} requests, {}\n", ByteSize(*bytes).human())
}

fn peak_line((id, peak, limit): &(DeviceId, u64, u64)) -> String {
    format!("{id}: peak {} of {}\n", ByteSize(*peak).human(), ByteSize(*limit).human())
}

/// An error that names the devices there are, without the one that this example made up: a user cannot know of it.
fn without(made_up: DeviceId, mut error: Error) -> Error {
    if let Error::UnknownDevice { known, .. } = &mut error {
        known.retain(|&device| device != made_up);
    }
    error
}

fn invalid(reason: String) -> Error {
    Error::Invalid { reason }
}

fn main() {
    support::main::<Args>()
}
