//! Networks over streamed weights compute, bit for bit, what they compute over candle's own loading: for any allocation, donor,
//! depth and order, with an adapter, and after its strength was changed.

mod support;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use candle_core::{CpuStorage, DType, Device, InplaceOp1, Module, Result, Tensor};
use candle_nn::{Linear, VarBuilder};
use proptest::prelude::*;
use support::{Network, Part, at_strength, candles_own, data, tiny_llama};
use tensor_offload::backend::{Clock, Storage};
use tensor_offload::checkpoint::Layer;
use tensor_offload::load::{TensorAllocator, TensorRequest};
use tensor_offload::plan::{TensorGrouping, Unit};
use tensor_offload::{
    Checkpoint, DeviceId, Loader, Machine, Model, ModelCache, Order, Planner, Registry, Retention, Weights,
};
use tensor_offload_candle::{Error, Streamed, cpu_memory};

const CPU: DeviceId = DeviceId::CPU;

/// A machine whose host computes, with a disk and a card that only keep weights.
fn devices() -> Registry {
    let texts = ["cpu=1gb", "disk=1gb", "cuda:0=64mb"];
    let devices: Vec<_> = texts.iter().map(|text| text.parse().unwrap()).collect();
    Registry::described(Machine::described(&devices), Clock::Wall)
}

#[derive(Clone, Debug)]
struct Setting {
    allocation: String,
    depth: usize,
    order: Order,
    unit: Unit,
    fixed: bool,
}

fn settings() -> impl Strategy<Value = Setting> {
    let allocation = (0u32..=100, 0u32..=100).prop_map(|(cpu, card)| {
        let cuda = (100 - cpu) * card / 100;
        format!("cpu,{cpu}%;cuda:0,{cuda}%;disk,*")
    });
    let order = prop_oneof![Just(Order::Sequential), Just(Order::Interleaved)];
    let unit = prop_oneof![Just(Unit::Module), Just(Unit::Uniform)];
    (allocation, 0usize..4, order, unit, any::<bool>()).prop_map(|(allocation, depth, order, unit, fixed)| Setting {
        allocation,
        depth,
        order,
        unit,
        fixed,
    })
}

impl Setting {
    fn plan(&self, weights: &Weights, devices: &Registry) -> tensor_offload::Plan {
        let planner = Planner::new(weights.layout(), devices.machine())
            .compute(CPU)
            .allocation(self.allocation.parse().unwrap())
            .order(self.order)
            .unit(self.unit)
            .depth(self.depth)
            .fixed_slots(self.fixed)
            .grouping(TensorGrouping::PerTensor);
        planner.plan().unwrap()
    }
}

/// One drawn setting for one network: equal, and the ledger holds what the plan says.
fn check(network: &Network, weights: &Weights, setting: &Setting) {
    let devices = devices();
    let plan = setting.plan(weights, &devices);
    let model = Arc::new(Loader::new(&devices).allocator(cpu_memory()).load(weights, &plan).unwrap());
    let host = devices.device(CPU).unwrap();
    let planned = plan.device(CPU).map_or(0, |share| share.weights.bytes + share.beside.slots);
    assert_eq!(host.ledger().charged(), planned);
    let equal = network.streamed(&model) == network.resident(&candles_own(weights, &Device::Cpu));
    assert!(equal, "{setting:?}");
    drop(model);
    assert_eq!(host.ledger().charged(), 0);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_llama_is_equal_for_all_settings(setting in settings(), tied in any::<bool>()) {
        let folder = if tied { data("llama/tied") } else { tiny_llama() };
        let weights = Weights::new(Checkpoint::open(folder.join("model.safetensors")).unwrap());
        check(&Network::llama(&folder, &Device::Cpu), &weights, &setting);
    }

    #[test]
    fn a_flux_is_equal_for_all_settings(setting in settings(), guided in any::<bool>()) {
        let folder = data(if guided { "flux/guided" } else { "flux/plain" });
        let weights = Weights::new(Checkpoint::open(folder.join("model.safetensors")).unwrap());
        check(&Network::flux(&folder, &Device::Cpu), &weights, &setting);
    }

    /// A strength that is changed gives another model, which shares what did not change.
    #[test]
    fn an_adapter_is_merged_and_its_strength_changed(setting in settings()) {
        let (network, devices) = (Network::llama(&tiny_llama(), &Device::Cpu), devices());
        let checkpoint = Checkpoint::open(tiny_llama()).unwrap();
        let (weak, strong) = (at_strength(&checkpoint, 0.5), at_strength(&checkpoint, -1.25));
        let plan = setting.plan(&weak, &devices);
        let loader = Loader::new(&devices).allocator(cpu_memory());
        let first = Arc::new(loader.load(&weak, &plan).unwrap());
        let (one, other) = (network.streamed(&first), network.resident(&candles_own(&weak, &Device::Cpu)));
        prop_assert!(one == other);
        let second = Arc::new(loader.derive(&first, &strong, &plan).unwrap());
        drop(first);
        let (changed, wanted) = (network.streamed(&second), network.resident(&candles_own(&strong, &Device::Cpu)));
        prop_assert!(changed == wanted && changed != one);
    }
}

/// A strength that is changed in place takes no more memory, unless someone else holds the model.
#[test]
fn a_changed_strength_is_written_over_the_old_weights() {
    let network = Network::llama(&tiny_llama(), &Device::Cpu);
    let checkpoint = Checkpoint::open(tiny_llama()).unwrap();
    let (weak, strong) = (at_strength(&checkpoint, 0.5), at_strength(&checkpoint, -1.25));
    for (allocation, held) in [("cpu,50%;disk,*", false), ("cpu,*", false), ("disk,*", false), ("cpu,50%;disk,*", true)]
    {
        let (devices, counting) = (devices(), Arc::new(Counting(cpu_memory(), AtomicUsize::new(0))));
        let planner = Planner::new(weak.layout(), devices.machine()).compute(CPU).depth(1);
        let planner = planner.allocation(allocation.parse().unwrap()).grouping(TensorGrouping::PerTensor);
        let plan = planner.plan().unwrap();
        let loader = Loader::new(&devices).allocator(Arc::clone(&counting) as Arc<dyn TensorAllocator>);
        let model = Arc::new(loader.load(&weak, &plan).unwrap());
        let build = |layer: &Layer, vb: VarBuilder<'static>| network.part(&layer.name, vb);
        let mut blocks = Streamed::new(&model, build).unwrap();
        let other = held.then_some(model);
        let run = |blocks: &mut Streamed<Part>| {
            network.run(|layer, forward| Ok(blocks.layer_named(layer)?.run(|part| forward(part))?))
        };
        let level = || devices.device(CPU).unwrap().ledger().charged();
        let (taken, allocated) = (level(), counting.1.load(Ordering::Relaxed));
        assert!(run(&mut blocks) == network.resident(&candles_own(&weak, &Device::Cpu)), "{allocation}");
        let mut blocks = blocks.refill(&loader, &strong, &plan, build).unwrap();
        assert!(run(&mut blocks) == network.resident(&candles_own(&strong, &Device::Cpu)), "{allocation}");
        assert_eq!((level() > taken, counting.1.load(Ordering::Relaxed) > allocated), (held, held), "{allocation}");
        drop((blocks, other));
        assert_eq!(level(), 0);
    }
}

/// A network of two equal layers and a larger one, in a file.
fn linears() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let tensor =
        |name: &str, shape: (usize, usize)| (name.to_owned(), Tensor::randn(0f32, 1.0, shape, &Device::Cpu).unwrap());
    let tensors = [
        tensor("layers.0.weight", (8, 8)),
        tensor("layers.1.weight", (8, 8)),
        tensor("layers.2.weight", (8, 8)),
        tensor("head.weight", (64, 8)),
    ];
    candle_core::safetensors::save(&tensors.into_iter().collect(), &path).unwrap();
    (folder, path)
}

fn load(path: &Path, allocation: &str, allocator: Arc<dyn TensorAllocator>) -> Arc<Model> {
    let model = Model::open(path).unwrap().allocator(allocator).compute(CPU).depth(1);
    model.allocation(allocation).unwrap().load(&devices()).unwrap()
}

/// A block that multiplies with its weight as the caller makes it.
fn linear(vb: &VarBuilder<'_>, name: &str, of: impl Fn(Tensor) -> Result<Tensor>) -> Result<Linear> {
    let outputs = if name == "head" { 64 } else { 8 };
    Ok(Linear::new(of(vb.get((outputs, 8), &format!("{name}.weight"))?)?, None))
}

#[test]
fn a_block_that_copies_its_weights_is_found_in_its_first_turn() {
    let (_folder, path) = linears();
    let model = load(&path, "cpu,30%;disk,*", cpu_memory());
    let x = Tensor::ones((1, 8), DType::F32, &Device::Cpu).unwrap();
    let copies: [fn(Tensor) -> Result<Tensor>; 3] = [
        |weight| weight.copy(),
        |weight| weight.t()?.contiguous()?.t(),
        |weight| weight.to_dtype(DType::BF16)?.to_dtype(DType::F32),
    ];
    for of in copies {
        let mut blocks = Streamed::new(&model, |layer, vb| {
            linear(&vb, &layer.name, |weight| if layer.name == "layers.1" { of(weight) } else { Ok(weight) })
        })
        .unwrap();
        blocks.layer_named("layers.0").unwrap().run(|block| block.forward(&x)).unwrap();
        for _ in 0..2 {
            let error = blocks.layer_named("layers.1").unwrap().run(|block| block.forward(&x)).unwrap_err();
            assert!(matches!(&error, Error::Copied { layer, .. } if layer == "layers.1"), "{error}");
        }
        // The others go on.
        blocks.layer_named("layers.2").unwrap().run(|block| block.forward(&x)).unwrap();
    }
    // A second look is not taken: NaN may come later from inputs.
    let mut blocks = Streamed::new(&model, |layer, vb| linear(&vb, &layer.name, Ok)).unwrap();
    blocks.layer_named("layers.0").unwrap().run(|block| block.forward(&x)).unwrap();
    let nan = (&x * f64::NAN).unwrap();
    while blocks.layer_named("layers.1").unwrap().run(|block| block.forward(&x)).is_err() {}
    blocks.layer_named("layers.0").unwrap().run(|block| block.forward(&nan)).unwrap();
}

#[test]
fn weights_that_are_nan_are_no_copies() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let tensors = ["layers.0.weight", "layers.1.weight"].map(|name| {
        let weight = Tensor::full(f32::NAN, (8, 8), &Device::Cpu).unwrap();
        (name.to_owned(), weight)
    });
    candle_core::safetensors::save(&tensors.into_iter().collect(), &path).unwrap();
    let model = load(&path, "disk,*", cpu_memory());
    let mut blocks = Streamed::new(&model, |layer, vb| linear(&vb, &layer.name, Ok)).unwrap();
    let x = Tensor::ones((1, 8), DType::F32, &Device::Cpu).unwrap();
    assert!(blocks.layer_named("layers.0").unwrap().run(|block| block.forward(&x)).is_ok());
}

#[test]
fn what_a_block_asks_for_in_vain_is_named() {
    let (_folder, path) = linears();
    let model = load(&path, "cpu,30%;disk,*", cpu_memory());
    let refused = |ask: fn(&VarBuilder<'_>) -> Result<Tensor>, told: &str| {
        let built = Streamed::new(&model, |layer, vb| {
            if layer.name == "layers.1" { ask(&vb) } else { vb.get((), "x").or(Tensor::new(0f32, &Device::Cpu)) }
        });
        let error = built.unwrap_err().to_string();
        assert!(error.contains(told), "{error}");
    };
    refused(|vb| vb.get((8, 4), "layers.1.weight"), "has the shape [8, 8], not [8, 4]");
    refused(|vb| vb.get((8, 8), "layers.1.bias"), "the model has no tensor `layers.1.bias`");
    refused(|vb| vb.get((8, 8), "layers.2.weight"), "is of layer `layers.2`; the block is of `layers.1`");
    refused(
        |vb| vb.get_with_hints_dtype((8, 8), "layers.1.weight", Default::default(), DType::BF16),
        "holds f32, not bf16",
    );
}

#[test]
fn a_model_in_the_librarys_own_memory_is_refused() {
    let (_folder, path) = linears();
    let model = Model::open(&path).unwrap().compute(CPU).allocation("cpu,30%;disk,*").unwrap();
    let model = model.load(&devices()).unwrap();
    let error = Streamed::new(&model, |layer, vb| linear(&vb, &layer.name, Ok)).unwrap_err();
    assert!(matches!(error, Error::NotOfCandle { .. }), "{error}");
}

/// An allocator that counts what it is asked for.
struct Counting(Arc<dyn TensorAllocator>, AtomicUsize);

impl TensorAllocator for Counting {
    fn device(&self) -> DeviceId {
        self.0.device()
    }

    fn grouping(&self) -> TensorGrouping {
        self.0.grouping()
    }

    fn supports(&self, dtype: tensor_offload::DType) -> bool {
        self.0.supports(dtype)
    }

    fn allocate(&self, request: &TensorRequest<'_>) -> tensor_offload::Result<Box<dyn Storage>> {
        self.1.fetch_add(1, Ordering::Relaxed);
        self.0.allocate(request)
    }
}

#[test]
fn nothing_is_allocated_after_the_load() {
    let counting = Arc::new(Counting(cpu_memory(), AtomicUsize::new(0)));
    let network = Network::llama(&tiny_llama(), &Device::Cpu);
    let model = load(&tiny_llama(), "cpu,40%;disk,*", Arc::clone(&counting) as Arc<dyn TensorAllocator>);
    let loaded = counting.1.load(Ordering::Relaxed);
    let mut blocks = Streamed::new(&model, |layer, vb| network.part(&layer.name, vb)).unwrap();
    for _ in 0..3 {
        network.run(|layer, forward| Ok(blocks.layer_named(layer)?.run(|part| forward(part))?));
    }
    assert_eq!(counting.1.load(Ordering::Relaxed), loaded);
    assert!(loaded > 0 && blocks.streamer().report().misses < blocks.streamer().report().hits);
}

/// Puts another storage in a tensor's place, as candle lets anyone do.
struct Replace(CpuStorage);

impl InplaceOp1 for Replace {
    fn name(&self) -> &'static str {
        "replace"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, _: &candle_core::Layout) -> Result<()> {
        *storage = self.0.clone();
        Ok(())
    }
}

/// Compute on the host begins as soon as a layer is there, so a copy that failed must be known before, whether it failed while
/// it was waited for or at once.
#[test]
fn weights_that_did_not_arrive_are_an_error() {
    let (_folder, path) = linears();
    for clock in [Clock::Wall, Clock::Virtual] {
        let machine = Machine::described(&["cpu=1gb", "disk=1gb"].map(|text| text.parse().unwrap()));
        let devices = Registry::described(machine, clock);
        let model = Model::open(&path).unwrap().allocator(cpu_memory()).compute(CPU).depth(0);
        let model = model.allocation("disk,*").unwrap().load(&devices).unwrap();
        let mut blocks = Streamed::new(&model, |layer, vb| linear(&vb, &layer.name, Ok)).unwrap();
        let block = blocks.layer_named("layers.0").unwrap();
        block.weight().inplace_op1(&Replace(CpuStorage::F32(vec![1.0; 4]))).unwrap();
        drop(block);
        // All layers share one slot.
        for name in ["layers.1", "layers.2", "head", "layers.0"].into_iter().cycle().take(1000) {
            let error = blocks.layer_named(name).map(drop).expect_err("a layer whose memory is gone");
            assert!(error.to_string().contains("was replaced"), "{clock:?}, {name}: {error}");
        }
    }
}

/// Unloading says what blocks that live still hold.
#[test]
fn a_model_that_is_unloaded_is_freed_with_its_last_block() {
    let (_folder, path) = linears();
    let devices = devices();
    let cache = ModelCache::new();
    let model = Model::open(&path).unwrap().allocator(cpu_memory()).compute(CPU).depth(1);
    let model = model.allocation("cpu,50%;disk,*").unwrap().load(&devices).unwrap();
    cache.insert("linears", Arc::clone(&model), Retention::Keep);
    let held = model.bytes();
    let blocks = Streamed::new(&model, |layer, vb| linear(&vb, &layer.name, Ok)).unwrap();
    drop(model);
    let report = cache.unload("linears").unwrap();
    assert_eq!(report.deferred.iter().map(|model| &model.bytes).collect::<Vec<_>>(), [&held], "{report}");
    assert!(report.unloaded.is_empty());
    let host = devices.device(CPU).unwrap();
    assert_eq!(host.ledger().charged(), held[&CPU]);
    drop(blocks);
    assert_eq!(host.ledger().charged(), 0);
}

/// The memory of a model is there for as long as its blocks are.
#[test]
fn living_blocks_keep_a_model_in_memory() {
    let (_folder, path) = linears();
    let devices = devices();
    let model = Model::open(&path).unwrap().allocator(cpu_memory()).compute(CPU).depth(1);
    let model = model.allocation("cpu,50%;disk,*").unwrap().load(&devices).unwrap();
    let host = devices.device(CPU).unwrap();
    let charged = host.ledger().charged();
    let blocks = Streamed::new(&model, |layer, vb| linear(&vb, &layer.name, Ok)).unwrap();
    drop(model);
    assert_eq!(host.ledger().charged(), charged);
    let model = Arc::clone(blocks.model());
    // One set of blocks at a time.
    assert!(Streamed::new(&model, |layer, vb| linear(&vb, &layer.name, Ok)).is_err());
    drop((blocks, model));
    assert_eq!(host.ledger().charged(), 0);
}
