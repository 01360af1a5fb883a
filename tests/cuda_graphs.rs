//! CUDA graphs of a caller's over streamed layers: captured once, launched in later passes between a layer's guard and its drop.
#![cfg(all(feature = "cuda", target_os = "linux"))]

mod card;

use std::collections::{BTreeSet, HashMap};
use std::path::Path;
use std::sync::Arc;

use card::{adopted, driver, has_calls, registry};
use cuda_standin::{Config, MemoryMode};
use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode as Mode};
use cudarc::driver::{CudaContext, CudaGraph, CudaSlice, CudaStream, DevicePtr, result};
use tensor_offload::cuda::{self, LayerAddresses};
use tensor_offload::{
    Checkpoint, DeviceId, LayerGuard, LayerId, Loader, Model, Planner, Registry, Streamer, TensorView, Weights,
};

/// What graphs take, beyond what the library calls itself.
const GRAPHS: [&str; 5] = [
    "cuStreamBeginCapture_v2",
    "cuStreamEndCapture",
    "cuGraphInstantiateWithFlags",
    "cuGraphLaunch",
    "cuGraphExecDestroy",
];

const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/data/tiny-llama");

fn machine() -> Config {
    Config::with_devices(&[64 << 20]).memory(MemoryMode::Reuse).late_micros(10_000)
}

/// The model at `path`, on the compute device as far as the allocation says, with two slots.
fn planner<'a>(weights: &'a Weights, devices: &'a Registry, allocation: &str) -> Planner<'a> {
    let planner = Planner::new(weights.layout(), devices.machine()).allocation(allocation.parse().unwrap());
    planner.compute(DeviceId::cuda(0)).depth(1)
}

fn weights(path: impl AsRef<Path>) -> Weights {
    Weights::new(Checkpoint::open(path).unwrap())
}

/// The bytes of a layer's tensors, one after the other.
fn bytes_of(weights: &Weights, guard: &LayerGuard) -> Vec<u8> {
    let checkpoint = weights.checkpoint();
    let read = |tensor: TensorView<'_>| {
        let mut bytes = vec![0; tensor.info().bytes as usize];
        checkpoint.read(checkpoint.find(tensor.name()).unwrap(), &mut bytes).unwrap();
        bytes
    };
    guard.tensors().flat_map(read).collect()
}

/// The caller: a stream, and memory that its kernels write to.
struct Caller {
    stream: Arc<CudaStream>,
    output: CudaSlice<u8>,
}

impl Caller {
    fn new(model: &Model) -> Caller {
        let stream = CudaContext::new(0).unwrap().new_stream().unwrap();
        let most = model.layout().layers().iter().map(|layer| layer.bytes).max().unwrap();
        let output = stream.alloc_zeros::<u8>(most as usize).unwrap();
        stream.synchronize().unwrap();
        Caller { stream, output }
    }

    fn streamer(&self, model: &Arc<Model>) -> Streamer {
        Streamer::on(model, adopted(model.residency().device(), &self.stream)).unwrap()
    }

    /// Captures the layer's "kernels": its tensors are copied to the output, one behind the other.
    fn capture(&self, guard: &LayerGuard) -> CudaGraph {
        #![expect(unsafe_code, reason = "addresses of the library's")]
        let mut at = self.output.device_ptr(&self.stream).0;
        self.stream.begin_capture(Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
        for tensor in guard.tensors() {
            let (weights, bytes) = (cuda::address(&tensor).unwrap(), tensor.info().bytes as usize);
            // SAFETY: the tensor has this many bytes there, and the output has room for all tensors of any layer.
            unsafe { result::memcpy_dtod_async(at, weights, bytes, self.stream.cu_stream()) }.unwrap();
            at += bytes as u64;
        }
        self.stream.end_capture(CUgraphInstantiate_flags(0)).unwrap().expect("a graph with nodes")
    }

    /// Launches a graph; the first bytes of what it wrote.
    fn launched(&self, graph: &CudaGraph, bytes: usize) -> Vec<u8> {
        graph.launch().unwrap();
        self.stream.clone_dtoh(&self.output.slice(..bytes)).unwrap()
    }
}

/// With fixed slots one graph for each layer serves all passes, although the slots are filled with other layers between.
#[test]
fn cuda_a_graph_of_each_layer_serves_all_passes_with_fixed_slots() {
    let driver = driver(&machine());
    if !has_calls(&GRAPHS) {
        return;
    }
    {
        let (devices, weights) = (registry(), weights(MODEL));
        let plan = planner(&weights, &devices, "cpu,*").fixed_slots(true).plan().unwrap();
        let model = Arc::new(Loader::new(&devices).load(&weights, &plan).unwrap());
        let caller = Caller::new(&model);
        let mut streamer = caller.streamer(&model);
        let mut graphs: HashMap<LayerAddresses, CudaGraph> = HashMap::new();
        let (mut captured, mut slots) = (0, BTreeSet::new());
        for pass in 0..3 {
            for layer in model.layout().layer_ids() {
                let guard = streamer.layer(layer).unwrap();
                let graph = graphs.entry(cuda::addresses(&guard).unwrap()).or_insert_with(|| {
                    captured += 1;
                    caller.capture(&guard)
                });
                let want = bytes_of(&weights, &guard);
                assert!(caller.launched(graph, want.len()) == want, "pass {pass}, {}", guard.name());
                slots.insert(guard.slot());
            }
            // So that what a graph reads can only be what was fetched since.
            streamer.overwrite_slots(0xff).unwrap();
        }
        let layers = model.layout().layers().len();
        assert_eq!((captured, slots.len()), (layers, 2), "{layers} layers share two slots");
    }
    driver.assert_clean();
}

/// Without fixed slots a layer may come in another slot. The graph of the first one then reads the layer that is there now;
/// its key does not fit the guard, so it is not found, and a graph of the new addresses reads the right bytes.
#[test]
fn cuda_a_graph_of_another_slot_is_not_found() {
    let driver = driver(&machine());
    if !has_calls(&GRAPHS) {
        return;
    }
    {
        let (devices, weights) = (registry(), weights(MODEL));
        let plan = planner(&weights, &devices, "cpu,*").plan().unwrap();
        let model = Arc::new(Loader::new(&devices).load(&weights, &plan).unwrap());
        let caller = Caller::new(&model);
        let mut streamer = caller.streamer(&model);
        let blocks = model.layout().layers().iter().filter(|layer| layer.name.starts_with("model.layers."));
        let [first, second, third] = Vec::from_iter(blocks.map(|layer| layer.id))[..] else {
            panic!("the model has three blocks")
        };
        let guard = streamer.layer(first).unwrap();
        let (slot, key) = (guard.slot(), cuda::addresses(&guard).unwrap());
        let graphs = HashMap::from([(key.clone(), caller.capture(&guard))]);
        let want = bytes_of(&weights, &guard);
        assert!(caller.launched(&graphs[&key], want.len()) == want);
        drop(guard);
        drop(streamer.layer(second).unwrap());
        // The third takes the first one's slot and keeps it, so the first has to come in the other.
        let third = streamer.layer(third).unwrap();
        let again = streamer.layer(first).unwrap();
        assert!(third.slot() == slot && again.slot() != slot, "{slot:?}, {:?}, {:?}", third.slot(), again.slot());
        let stale = caller.launched(&graphs[&key], want.len());
        assert!(stale == bytes_of(&weights, &third) && stale != want, "it reads what is in the slot now");
        let now = cuda::addresses(&again).unwrap();
        assert_eq!((graphs.contains_key(&now), now.layer()), (false, key.layer()));
        assert!(caller.launched(&caller.capture(&again), want.len()) == want);
        // Layers of one shape in one slot have the same addresses, and are not taken for each other.
        let other = cuda::addresses(&third).unwrap();
        let first_of = |guard: &LayerGuard| cuda::address(&guard.tensors().next().unwrap());
        assert!(!graphs.contains_key(&other) && first_of(&third) != first_of(&again));
    }
    driver.assert_clean();
}

/// A derived model shares the resident tensors that are the same, so its layer has the same key; where it has read them
/// anew, or streams them, the key is another one, although no slot tells.
#[test]
fn cuda_a_derived_models_layer_has_the_key_of_its_own_addresses() {
    let driver = driver(&machine());
    {
        let context = CudaContext::new(0).unwrap();
        let stream = context.new_stream().unwrap();
        let (devices, own) = (registry(), weights(MODEL));
        let folder = tempfile::tempdir().unwrap();
        for file in std::fs::read_dir(MODEL).unwrap().map(|file| file.unwrap().path()).filter(|path| path.is_file()) {
            std::fs::copy(&file, folder.path().join(file.file_name().unwrap())).unwrap();
        }
        let other = weights(folder.path());
        let resident = planner(&own, &devices, "cuda:0,100%").plan().unwrap();
        let streamed = planner(&own, &devices, "cpu,*").plan().unwrap();
        let key_of = |model: &Arc<Model>| {
            let compute = adopted(model.residency().device(), &stream);
            let guard = Streamer::on(model, compute).unwrap().layer(LayerId::new(1)).unwrap();
            (guard.slot(), cuda::addresses(&guard).unwrap())
        };
        let loader = Loader::new(&devices);
        let base = Arc::new(loader.load(&own, &resident).unwrap());
        let shared = Arc::new(loader.derive(&base, &own, &resident).unwrap());
        let (slot, key) = key_of(&base);
        assert_eq!((slot, key_of(&shared)), (None, (None, key.clone())));
        let moved = Arc::new(loader.derive(&base, &other, &resident).unwrap());
        let (slot, at) = key_of(&moved);
        assert_eq!((slot, at.layer(), at == key), (None, key.layer(), false), "the same layer, in another home");
        let fetched = Arc::new(loader.derive(&base, &own, &streamed).unwrap());
        let (slot, at) = key_of(&fetched);
        assert!(slot.is_some() && at != key);
    }
    driver.assert_clean();
}

/// Addresses are a CUDA device's: elsewhere there is no key, rather than one that fits everything.
#[test]
fn layers_of_other_devices_have_no_addresses() {
    let devices = Registry::simulated(["cuda:0=1mb", "cpu=64mb"]).unwrap();
    let model = Model::open(MODEL).unwrap().allocation("cuda:0,25%;cpu,*").unwrap().load(&devices).unwrap();
    let mut streamer = model.stream().unwrap();
    for layer in streamer.pass() {
        assert_eq!(cuda::addresses(&layer.unwrap()), None);
    }
}
