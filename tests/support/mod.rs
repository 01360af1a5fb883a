//! What the tests of loading, streaming and the cache share: checkpoints made from a seed, adapters for them, described
//! devices that are watched, and the bytes that every tensor has to have.

#![allow(dead_code, reason = "each test uses its part")]

pub(crate) mod blocks;
pub(crate) mod coded;
pub(crate) mod compressed;
pub(crate) mod fault;
pub(crate) mod framework;
pub(crate) mod gguf;
pub(crate) mod machines;
pub(crate) mod outliers;
pub(crate) mod unpacked;
pub(crate) mod watched;
pub(crate) mod whole_path;

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use half::{bf16, f16};
use proptest::sample::Index;
use serde_json::{Map, json};
use sha2::{Digest, Sha256};
use tensor_offload::backend::{Backend, Clock, Countdown, Event, Faulty, Operation, Simulated};
use tensor_offload::checkpoint::{Layout, TensorInfo, TensorSpec};
use tensor_offload::transfer::{ReadPart, Source};
use tensor_offload::{
    Adapter, Checkpoint, DType, DeviceId, LayerGuard, LayerId, Loader, Machine, Matching, Model, Plan, Planner,
    Registry, Result, Streamer, TensorId, Weights,
};

pub(crate) const CPU: DeviceId = DeviceId::CPU;
pub(crate) const DISK: DeviceId = DeviceId::DISK;
pub(crate) const GPU0: DeviceId = DeviceId::cuda(0);
pub(crate) const GPU1: DeviceId = DeviceId::cuda(1);

/// How long a test waits for anything.
pub(crate) const DEADLINE: Duration = Duration::from_secs(20);

pub(crate) fn xpu() -> DeviceId {
    "xpu:0".parse().unwrap()
}

/// A machine of one device of every kind that is told apart, and a second card.
pub(crate) fn machine() -> Machine {
    described(&[
        "cpu=64mb,link=20",
        "disk=64mb,link=4",
        "cuda:0=24mb,link=10",
        "cuda:1=24mb,link=10",
        "xpu:0=24mb,link=5",
    ])
}

pub(crate) fn described(devices: &[&str]) -> Machine {
    let devices: Vec<_> = devices.iter().map(|text| text.parse().unwrap()).collect();
    Machine::described(&devices)
}

/// Any parts of a source, between these places in turn, are those of `all`, which begin at `begin` and end with the source.
pub(crate) fn check_parts(source: &dyn Source, begin: u64, all: &[u8], parts: &[(Index, Index)]) {
    assert_eq!(source.stamp().len(), begin + all.len() as u64);
    let range = |(one, other): &(Index, Index)| {
        let (one, other) = (one.index(all.len() + 1), other.index(all.len() + 1));
        one.min(other)..one.max(other)
    };
    let ranges: Vec<_> = parts.iter().map(range).collect();
    let mut memory: Vec<Vec<u8>> = ranges.iter().map(|range| vec![0xa5; range.len()]).collect();
    let part = |(range, dst): (&Range<usize>, _)| ReadPart::new(begin + range.start as u64, dst);
    source
        .read_parts(&mut ranges.iter().zip(memory.iter_mut().map(Vec::as_mut_slice)).map(part).collect::<Vec<_>>())
        .unwrap();
    for (range, read) in ranges.into_iter().zip(memory) {
        assert!(read == all[range.clone()], "{range:?} of {}", source.path().display());
    }
    assert!(source.read_at(begin + all.len() as u64, &mut [0]).is_err());
}

/// The generator splitmix64 (Steele, Lea and Flood 2014).
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Random {
        Random(seed)
    }

    /// A sequence of its own for each name.
    fn of(seed: u64, name: &str) -> Random {
        name.bytes().fold(Random(seed), |mut random, byte| Random(random.next() ^ u64::from(byte)))
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Evenly in -1..1.
    fn weight(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    /// `count` elements: finite small numbers of the common types, any bytes of the others.
    fn elements(&mut self, dtype: DType, bytes: usize) -> Vec<u8> {
        match dtype {
            DType::F32 => (0..bytes / 4).flat_map(|_| self.weight().to_le_bytes()).collect(),
            DType::F16 => (0..bytes / 2).flat_map(|_| f16::from_f32(self.weight()).to_le_bytes()).collect(),
            DType::BF16 => (0..bytes / 2).flat_map(|_| bf16::from_f32(self.weight()).to_le_bytes()).collect(),
            _ => (0..bytes).map(|_| self.next() as u8).collect(),
        }
    }
}

/// A safetensors file of these tensors, in their order, with bytes that depend on the seed and each one's name.
pub(crate) fn safetensors(tensors: &[TensorSpec], seed: u64) -> Vec<u8> {
    let (mut header, mut data) = (Map::new(), Vec::new());
    for TensorSpec { name, dtype, shape, .. } in tensors {
        let begin = data.len();
        let bytes = dtype.bytes_of(shape).expect("a whole number of bytes") as usize;
        // A scale has to be finite and not zero.
        match name.ends_with("weight_scale") {
            true => data.extend(0.125f32.to_le_bytes()),
            false => data.extend(Random::of(seed, name).elements(*dtype, bytes)),
        }
        header.insert(name.clone(), json!({ "dtype": dtype, "shape": shape, "data_offsets": [begin, data.len()] }));
    }
    let header = serde_json::to_vec(&header).unwrap();
    [&(header.len() as u64).to_le_bytes()[..], &header, &data].concat()
}

pub(crate) fn spec(name: impl Into<String>, dtype: DType, shape: &[u64]) -> TensorSpec {
    TensorSpec::new(name, dtype, shape)
}

/// The tensors of a Llama, all of one type.
pub(crate) fn llama(layers: u64, hidden: u64) -> Vec<TensorSpec> {
    let bf16 = |name: String, shape: &[u64]| spec(name, DType::BF16, shape);
    let mut tensors = vec![bf16("model.embed_tokens.weight".into(), &[4 * hidden, hidden])];
    for layer in 0..layers {
        let linears = [
            ("self_attn.q_proj", hidden, hidden),
            ("self_attn.o_proj", hidden, hidden),
            ("mlp.up_proj", 3 * hidden, hidden),
            ("mlp.down_proj", hidden, 3 * hidden),
        ];
        for (linear, rows, cols) in linears {
            tensors.push(bf16(format!("model.layers.{layer}.{linear}.weight"), &[rows, cols]));
        }
        tensors.push(bf16(format!("model.layers.{layer}.input_layernorm.weight"), &[hidden]));
    }
    tensors.push(bf16("model.norm.weight".into(), &[hidden]));
    tensors.push(bf16("lm_head.weight".into(), &[4 * hidden, hidden]));
    tensors
}

/// Tensors of many types and odd sizes: biases, scalars, eight-bit weights with their scales, a marker without
/// bytes, one of 1,000,003 bytes.
pub(crate) fn mixed(layers: u64) -> Vec<TensorSpec> {
    let mut tensors =
        vec![spec("scaled_fp8", DType::F8E4M3, &[0]), spec("model.embed_tokens.weight", DType::F16, &[97, 48])];
    for layer in 0..layers {
        let name = |name: &str| format!("model.layers.{layer}.{name}");
        tensors.extend([
            spec(name("self_attn.q_proj.bias"), DType::BF16, &[40]),
            spec(name("self_attn.q_proj.weight"), DType::BF16, &[40, 48]),
            spec(name("self_attn.v_proj.weight"), DType::F16, &[33, 47]),
            spec(name("mlp.up_proj.weight"), DType::F32, &[61, 48]),
            spec(name("mlp.down_proj.weight"), DType::F8E4M3, &[48, 61]),
            spec(name("mlp.down_proj.weight_scale"), DType::F32, &[]),
            spec(name("mask.table"), DType::Bool, &[3]),
            spec(name("steps"), DType::I64, &[5]),
            spec(name("input_layernorm.weight"), DType::F32, &[48]),
        ]);
    }
    tensors.push(spec("model.layers.1.table.codes", DType::U8, &[1_000_003]));
    tensors.push(spec("model.norm.weight", DType::F32, &[48]));
    tensors.push(spec("lm_head.weight", DType::BF16, &[97, 48]));
    tensors
}

/// Layers of ten norms of 256 bytes, that share memory where they are streamed from, a matrix whose name is among theirs,
/// and a norm of another size.
pub(crate) fn norms(layers: u64) -> Vec<TensorSpec> {
    let layer = |layer: u64| {
        let name = move |role: &str| format!("model.layers.{layer}.{role}.weight");
        let norm = move |index: u64| spec(name(&format!("norm_{index}")), DType::F32, &[64]);
        let others = [spec(name("norm_4_proj"), DType::BF16, &[128, 64]), spec(name("norm_odd"), DType::F32, &[75])];
        (0..10).map(norm).chain(others)
    };
    (0..layers).flat_map(layer).collect()
}

/// Layers `block.0`, `block.1`, … of one tensor of this many bytes each.
pub(crate) fn blocks(sizes: &[u64]) -> Vec<TensorSpec> {
    sizes.iter().enumerate().map(|(index, &bytes)| spec(format!("block.{index}.weight"), DType::U8, &[bytes])).collect()
}

/// A LoRA on every floating-point matrix inside the layers of `tensors`.
pub(crate) fn lora(tensors: &[TensorSpec], dtype: DType, rank: u64, seed: u64) -> Checkpoint {
    let mut factors = Vec::new();
    for TensorSpec { name, shape, .. } in tensors {
        let Some(module) = name.strip_suffix(".weight").filter(|m| m.contains("layers") && shape.len() == 2) else {
            continue;
        };
        factors.push(spec(format!("{module}.lora_A.weight"), dtype, &[rank, shape[1]]));
        factors.push(spec(format!("{module}.lora_B.weight"), dtype, &[shape[0], rank]));
        factors.push(spec(format!("{module}.alpha"), DType::F32, &[]));
    }
    Checkpoint::from_bytes(format!("lora-{seed}"), safetensors(&factors, seed)).unwrap()
}

/// A checkpoint, the adapters on it, and what each of its tensors is once merged on the host.
pub(crate) struct Subject {
    pub(crate) weights: Weights,
    pub(crate) merged: Vec<Vec<u8>>,
}

impl Subject {
    pub(crate) fn new(weights: Weights) -> Subject {
        let merge = |tensor: TensorId| {
            let mut bytes = vec![0; weights.layout().tensor(tensor).unwrap().bytes as usize];
            weights.read(tensor, &mut bytes).unwrap();
            bytes
        };
        let merged = weights.layout().tensor_ids().map(merge).collect();
        Subject { weights, merged }
    }

    pub(crate) fn checkpoint(&self) -> &Checkpoint {
        self.weights.checkpoint()
    }

    /// The tensors as they are.
    pub(crate) fn plain(tensors: &[TensorSpec], seed: u64) -> Subject {
        let checkpoint = Checkpoint::from_bytes(format!("model-{seed}"), safetensors(tensors, seed)).unwrap();
        Subject::new(checkpoint.into())
    }

    /// The tensors with two LoRAs, of different types, ranks and strengths.
    pub(crate) fn patched(tensors: &[TensorSpec], seed: u64) -> Subject {
        let plain = Subject::plain(tensors, seed);
        let weights = Weights::patched(plain.checkpoint().clone(), two_loras(tensors, seed), Matching::Strict).unwrap();
        Subject::new(weights)
    }

    pub(crate) fn layout(&self) -> &Layout {
        self.weights.layout()
    }

    /// A planner of this model with cuda:0 as its compute device.
    pub(crate) fn planner<'a>(&'a self, machine: &'a Machine, allocation: &str) -> Planner<'a> {
        Planner::new(self.layout(), machine).compute(GPU0).allocation(allocation.parse().unwrap())
    }

    /// The bytes that the tensor of this name has to have.
    pub(crate) fn bytes_of(&self, name: &str) -> &[u8] {
        &self.merged[self.checkpoint().find(name).expect("a tensor of the model").index()]
    }

    /// A hash of all names and merged bytes, to compare with [`hash`].
    pub(crate) fn hash(&self) -> String {
        let tensors = self.layout().tensors().iter().zip(&self.merged);
        digest(tensors.map(|(tensor, bytes)| (tensor.name.as_str(), bytes.clone())))
    }

    /// Every tensor of the model, wherever it lives, is as merged on the host, and of its storage type.
    pub(crate) fn check(&self, model: &Model) {
        for (tensor, want) in self.layout().tensors().iter().zip(&self.merged) {
            let (name, stored) = (&tensor.name, info(self.checkpoint().layout(), &tensor.name));
            let view = model.tensor(name).expect("a tensor of the model");
            assert_eq!(view.info().dtype, stored.dtype, "{name} changed its type");
            assert!(read(model, name).unwrap() == *want, "{name} on {} is not as merged", view.device());
        }
    }
}

/// A model whose head uses the embedding's bytes: its fourth tensor those of the first.
pub(crate) fn tied(seed: u64) -> Subject {
    let tensors = [
        spec("model.embed_tokens.weight", DType::BF16, &[32, 16]),
        spec("model.layers.0.up.weight", DType::BF16, &[16, 16]),
        spec("model.layers.1.up.weight", DType::BF16, &[16, 16]),
        spec("lm_head.weight", DType::BF16, &[32, 16]),
        spec("lm_head.bias", DType::BF16, &[32]),
    ];
    let stored = Subject::plain(&tensors, seed);
    let mut infos: Vec<TensorInfo> = stored.layout().tensors().to_vec();
    (infos[3].file, infos[3].offset) = (infos[0].file, infos[0].offset);
    let layout = Layout::new(infos);
    assert_eq!(layout.bytes(), stored.layout().bytes() - 1024);
    let mut tied = Subject::new(stored.checkpoint().with_layout(layout).unwrap().into());
    tied.merged[3] = tied.merged[0].clone();
    tied
}

/// A checkpoint, and an adapter for one of its layers.
pub(crate) struct OneLayerPatched {
    pub(crate) checkpoint: Checkpoint,
    factors: Checkpoint,
}

impl OneLayerPatched {
    pub(crate) fn new(seed: u64) -> OneLayerPatched {
        let tensors = llama(3, 32);
        let checkpoint = Checkpoint::from_bytes("model", safetensors(&tensors, seed)).unwrap();
        let layer: Vec<_> = tensors.into_iter().filter(|tensor| tensor.name.contains("layers.1.")).collect();
        OneLayerPatched { checkpoint, factors: lora(&layer, DType::F32, 3, seed + 1) }
    }

    /// The checkpoint with the adapter at a strength; zero for none.
    pub(crate) fn at(&self, strength: f32) -> Subject {
        let adapter = Adapter::from_checkpoint(self.factors.clone(), strength).unwrap();
        let adapters = if strength == 0.0 { vec![] } else { vec![adapter] };
        Subject::new(Weights::patched(self.checkpoint.clone(), adapters, Matching::Strict).unwrap())
    }
}

pub(crate) fn two_loras(tensors: &[TensorSpec], seed: u64) -> Vec<Adapter> {
    let factors = factors_of_two_loras(tensors, seed).into_iter();
    factors.map(|(factors, strength)| Adapter::from_checkpoint(factors, strength).unwrap()).collect()
}

/// The factors of [`two_loras`], with their strengths.
pub(crate) fn factors_of_two_loras(tensors: &[TensorSpec], seed: u64) -> [(Checkpoint, f32); 2] {
    [(lora(tensors, DType::F32, 3, seed + 1), 0.75), (lora(tensors, DType::BF16, 4, seed + 2), -1.25)]
}

/// What is known of the tensor of this name.
fn info<'a>(layout: &'a Layout, name: &str) -> &'a TensorInfo {
    layout.find(name).and_then(|tensor| layout.tensor(tensor)).expect("a tensor of the model")
}

/// A tensor of a model, wherever it lives.
pub(crate) fn read(model: &Model, name: &str) -> Result<Vec<u8>> {
    let mut bytes = vec![0; info(model.layout(), name).bytes as usize];
    model.read(name, &mut bytes).map(|()| bytes)
}

/// A hash of all tensors' names and bytes.
pub(crate) fn hash(model: &Model) -> String {
    digest(model.layout().tensors().iter().map(|t| (t.name.as_str(), read(model, &t.name).unwrap())))
}

fn digest<'a>(tensors: impl Iterator<Item = (&'a str, Vec<u8>)>) -> String {
    let mut sha = Sha256::new();
    for (name, bytes) in tensors {
        sha.update(name);
        sha.update(&bytes);
    }
    sha.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The subject's model as a plan places it.
pub(crate) fn load(registry: &Registry, subject: &Subject, plan: &Plan) -> Arc<Model> {
    Arc::new(Loader::new(registry).load(&subject.weights, plan).unwrap())
}

/// The layers of a streamer's model, which they do not borrow.
pub(crate) fn layers(streamer: &Streamer) -> impl DoubleEndedIterator<Item = LayerId> + ExactSizeIterator + use<> {
    streamer.model().layout().layer_ids()
}

/// Every tensor of a layer is on the device it computes on, or where it is used, with the merged bytes.
pub(crate) fn check_layer(guard: &LayerGuard, subject: &Subject) -> Result<()> {
    let mut seen = 0;
    for view in guard.tensors() {
        let name = &view.info().name;
        let mut bytes = vec![0; view.info().bytes as usize];
        guard.read(name, &mut bytes)?;
        assert!(bytes == subject.bytes_of(name), "wrong bytes of {name} on {}", view.device());
        seen += 1;
    }
    let modules = subject.layout().modules_in(guard.layer().id);
    assert_eq!(seen, modules.map(|module| module.tensors.len()).sum::<usize>());
    Ok(())
}

/// Once through the network, looking at every byte.
pub(crate) fn check_pass(streamer: &mut Streamer, subject: &Subject) -> Result<()> {
    layers(streamer).try_for_each(|layer| check_layer(&streamer.layer(layer)?, subject))
}

/// The same with a streamer of its own.
pub(crate) fn check_streamed(model: &Arc<Model>, subject: &Subject) {
    check_pass(&mut Streamer::new(model).unwrap(), subject).unwrap();
}

/// Once through the network with so much compute in each layer; when the compute ended.
pub(crate) fn pass(streamer: &mut Streamer, compute: Duration) -> Event {
    for layer in layers(streamer) {
        let _guard = streamer.layer(layer).unwrap();
        streamer.compute().occupy(compute).unwrap();
    }
    streamer.compute().record(&[]).unwrap()
}

/// What is taken of every device.
pub(crate) fn levels(registry: &Registry) -> Vec<(DeviceId, u64)> {
    registry.opened().iter().map(|device| (device.id(), device.ledger().charged())).collect()
}

/// Opens every device, so that its ledger can be looked at.
pub(crate) fn open_all(registry: &Registry) {
    registry.machine().ids().for_each(|id| drop(registry.device(id).unwrap()));
}

/// Waits until nothing is taken of any device: streams let go of memory when they are done with it.
pub(crate) fn comes_back(registry: &Registry) {
    let until = Instant::now() + DEADLINE;
    while levels(registry).iter().any(|(_, bytes)| *bytes > 0) {
        assert!(Instant::now() < until, "kept: {:?}", levels(registry));
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Runs `work` on a thread of its own and fails when it takes more than a minute.
pub(crate) fn without_hanging<T: Send + 'static>(what: String, work: impl FnOnce() -> T + Send + 'static) -> T {
    let (sender, receiver) = std::sync::mpsc::channel();
    let thread = std::thread::spawn(move || drop(sender.send(work())));
    match receiver.recv_timeout(Duration::from_secs(60)) {
        Ok(value) => value,
        Err(std::sync::mpsc::RecvTimeoutError::Timeout) => panic!("{what} hangs"),
        Err(_) => panic!("{what} panics: {:?}", thread.join().err().and_then(|e| e.downcast::<String>().ok())),
    }
}

/// Lets every operation of the devices of [`machine`] fail in turn under `path`. Each time all memory comes back. Returns how many
/// operations of the kind `counted` there are, how many in all, and how many failures `path` told.
pub(crate) fn whatever_operation_fails(counted: Operation, path: impl Fn(&Registry) -> Result<()>) -> [u64; 3] {
    let run = |nth: Option<u64>| {
        let (countdown, simulated) = (Countdown::new(), Simulated::new(machine(), Clock::Virtual));
        let devices = Registry::new([Arc::new(Faulty::new(simulated, countdown.clone())) as Arc<dyn Backend>]);
        open_all(&devices);
        let before = countdown.calls();
        nth.into_iter().for_each(|nth| countdown.fail_nth(nth));
        let outcome = path(&devices);
        let calls = countdown.calls() - before;
        comes_back(&devices);
        (outcome, calls, countdown.calls_of(counted))
    };
    let (outcome, calls, of_kind) = run(None);
    outcome.unwrap();
    [of_kind, calls, (1..=calls).filter(|&nth| run(Some(nth)).0.is_err()).count() as u64]
}
