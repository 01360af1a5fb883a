//! On which NUMA node of the host memory is pinned, on machines that are told to have several.
#![cfg(all(feature = "cuda", target_os = "linux"))]

mod card;
mod support;

use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError};

use card::{DEADLINE, assert_clean, registry_of, stand_in};
use cuda_standin::Config;
use support::{CPU, GPU0, GPU1, Subject, comes_back, llama, open_all};
use tempfile::TempDir;
use tensor_offload::backend::{Backend, Countdown, Cuda, Device, Faulty, MemoryKind, Operation, Role, Transfer};
use tensor_offload::stream::Via;
use tensor_offload::{ByteSize, Loader, Registry, Streamer};
use tracing::field::{Field, Visit};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};

const MIB: usize = 1 << 20;

/// The node and the size of memory that was touched on one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Touched {
    node: u64,
    bytes: u64,
}

impl Visit for Touched {
    fn record_u64(&mut self, field: &Field, value: u64) {
        match field.name() {
            "node" => self.node = value,
            "bytes" => self.bytes = value,
            _ => {}
        }
    }
    fn record_debug(&mut self, _: &Field, _: &dyn std::fmt::Debug) {}
}

static TOUCHED: Mutex<Vec<Touched>> = Mutex::new(Vec::new());

fn touched() -> MutexGuard<'static, Vec<Touched>> {
    TOUCHED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Listens to what the backend says of the memory that it touches, whichever thread asks for it, from now on.
fn listen() {
    struct Listener;
    impl<S: tracing::Subscriber> Layer<S> for Listener {
        fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
            if event.metadata().fields().field("node").is_some() {
                let mut seen = Touched::default();
                event.record(&mut seen);
                touched().push(seen);
            }
        }
    }
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        tracing::subscriber::set_global_default(tracing_subscriber::registry().with(Listener)).unwrap();
    });
    touched().clear();
}

/// The nodes on which memory was touched since the last look.
fn nodes() -> Vec<u64> {
    std::mem::take(&mut *touched()).iter().map(|touched| touched.node).collect()
}

/// A host with so many nodes, and two cards on the nodes that are given.
fn host(count: usize, cards: [i32; 2]) -> TempDir {
    let root = tempfile::tempdir().unwrap();
    let write = |file: &str, text: &str| {
        let file = root.path().join(file);
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(file, text).unwrap();
    };
    for (node, processors) in ["0", "0-1"].iter().enumerate().take(count) {
        write(&format!("devices/system/node/node{node}/cpulist"), processors);
    }
    write("bus/pci/devices/0000:01:00.0/numa_node", &cards[0].to_string());
    write("bus/pci/devices/0000:02:00.0/numa_node", &cards[1].to_string());
    root
}

fn registry(root: &TempDir) -> Registry {
    registry_of(Cuda::new().sysfs(root.path()))
}

fn two() -> Config {
    Config::with_devices(&[256 << 20, 256 << 20])
}

/// A card on the second of two nodes: what is pinned for it is touched there, and is as good as any.
#[test]
fn cuda_memory_is_pinned_on_the_node_of_the_device() {
    let Some(cuda) = stand_in(&two()) else { return };
    listen();
    let root = host(2, [1, -1]);
    for (backend, node) in [(Cuda::new().sysfs(root.path()), 1), (Cuda::new().sysfs(root.path()).numa_node(0), 0)] {
        let (card, cpu) = (backend.open(GPU0).unwrap(), backend.open(CPU).unwrap());
        let mut pinned = cpu.alloc(5 * MIB, MemoryKind::Pinned).unwrap();
        assert_eq!(cuda.report().live_pinned_bytes, 5 << 20);
        assert_eq!(nodes(), [node]);
        let bytes = pinned.host_mut().unwrap();
        assert!(bytes.iter().all(|&byte| byte == 0), "touched, not written over");
        bytes.fill(3);
        let stream = card.stream(Role::Upload).unwrap();
        let there = card.alloc(5 * MIB, MemoryKind::Arena).unwrap();
        stream.copy(Transfer::whole(&pinned.freeze(), there).unwrap()).unwrap().wait(DEADLINE).unwrap();
        drop(stream);
        card::assert_pinned_comes_to(&cuda, 0);
    }
    assert_clean(&cuda);
}

/// The nodes on which memory is touched that is asked for near nothing, near each card, and near the host.
fn near_each(cpu: &dyn Device) -> [Option<u64>; 4] {
    [None, Some(GPU0), Some(GPU1), Some(CPU)].map(|near| {
        let memory = match near {
            Some(near) => cpu.alloc_near(MIB, MemoryKind::Pinned, near),
            None => cpu.alloc(MIB, MemoryKind::Pinned),
        };
        assert!(memory.unwrap().block().device() == CPU);
        let nodes = nodes();
        assert!(nodes.len() <= 1, "{nodes:?}");
        nodes.first().copied()
    })
}

/// Two cards on two nodes: the memory for each is touched on its own, unless the caller named one for all.
#[test]
fn cuda_memory_for_a_device_is_pinned_on_its_node() {
    let Some(cuda) = stand_in(&two()) else { return };
    listen();
    let root = host(2, [1, 0]);
    {
        let countdown = Countdown::new();
        let backend = Faulty::new(Cuda::new().sysfs(root.path()), countdown.clone());
        let cpu = backend.open(CPU).unwrap();
        let _first = backend.open(GPU0).unwrap();
        assert_eq!(near_each(&*cpu), [Some(1); 4], "the one card that is open");
        let _second = backend.open(GPU1).unwrap();
        assert_eq!(near_each(&*cpu), [None, Some(1), Some(0), None]);
        assert_eq!(countdown.calls_of(Operation::Allocate), 8);
        drop(cpu.alloc_near(MIB, MemoryKind::Arena, GPU0).unwrap());
        drop(cpu.alloc_near(MIB - 1, MemoryKind::Pinned, GPU0).unwrap());
        assert_eq!(nodes(), Vec::<u64>::new(), "ordinary memory, and pieces that the driver allocates");
        countdown.fail_nth(1);
        assert!(cpu.alloc_near(MIB, MemoryKind::Pinned, GPU0).is_err());
        assert_eq!((nodes().len(), cpu.ledger().charged()), (0, 0));
    }
    for (root, told, want) in [
        (host(2, [1, 0]), Some(1), [Some(1); 4]),
        (host(2, [1, -1]), None, [None, Some(1), None, None]),
        (host(2, [1, 1]), None, [Some(1); 4]),
        (host(1, [0, 0]), None, [None; 4]),
    ] {
        let backend = Cuda::new().sysfs(root.path());
        let backend = told.into_iter().fold(backend, Cuda::numa_node);
        let _cards = [GPU0, GPU1].map(|card| backend.open(card).unwrap());
        assert_eq!(near_each(&*backend.open(CPU).unwrap()), want);
    }
    assert_clean(&cuda);
}

/// Weights on the host, and the buffers that bytes pass on their way, are near the device that computes.
#[test]
fn cuda_models_are_near_the_device_that_computes() {
    // Without kernels the host patches, in a buffer of its own.
    let Some(cuda) = stand_in(&Config { refuse_ptx: true, ..two() }) else { return };
    listen();
    let (root, subject) = (host(2, [1, 0]), Subject::patched(&llama(5, 512), 120));
    for (compute, donor, node) in [(GPU0, GPU1, 1), (GPU1, GPU0, 0)] {
        let devices = registry(&root);
        open_all(&devices);
        let load = |allocation: String, pinned| {
            let planner = subject.planner(devices.machine(), &allocation).compute(compute);
            let plan = planner.pinned_cap(Some(ByteSize(pinned))).plan().unwrap();
            let loader = Loader::new(&devices).workers(2);
            Arc::new(loader.load(&subject.weights, &plan).unwrap())
        };
        let all_near = |what: &str, sizes: &[u64]| {
            let touched = std::mem::take(&mut *touched());
            let has = |size| touched.iter().any(|touched| touched.bytes == size);
            assert!(sizes.iter().all(|&size| has(size)), "{what}: {touched:?}");
            assert!(touched.iter().all(|touched| touched.node == node), "{what}: {touched:?}");
        };
        // The embedding's 2 MiB pass staging buffers, and what has 1.5 MiB is patched in a buffer.
        drop(load(format!("{compute},*"), 0));
        all_near("on their way", &[3 << 19, 2 << 20]);
        // Each of the five layers has two such modules.
        let model = load("cpu,*".to_owned(), u64::MAX);
        assert!(touched().iter().filter(|touched| touched.bytes == 3 << 19).count() >= 10);
        all_near("at home", &[3 << 19, 2 << 20]);
        drop(model);
        // What is not pinned passes the pinned buffers; what the other card has passes the host, since there are no peers.
        let model = load(format!("{donor},12mb;cpu,*"), 0);
        touched().clear();
        let mut streamer = Streamer::new(&model).unwrap();
        model.layout().layer_ids().for_each(|layer| drop(streamer.layer(layer).unwrap()));
        assert!([Via::Staging, Via::Host].iter().all(|&via| bytes_via(&streamer, via) > 1 << 20));
        assert!(touched().iter().any(|touched| touched.bytes != 16 << 20), "both sorts of buffers: {:?}", touched());
        all_near("streamed", &[16 << 20]);
        drop(streamer);
        subject.check(&model);
        let read = nodes();
        assert!(!read.is_empty() && read.iter().all(|&read| read == 1 - node), "near the device that has it: {read:?}");
        drop(model);
        comes_back(&devices);
    }
    assert_clean(&cuda);
}

fn bytes_via(streamer: &Streamer, via: Via) -> u64 {
    streamer.report().lanes.iter().filter(|lane| lane.via == via).map(|lane| lane.bytes).sum()
}

/// A link is measured with memory near its device.
#[test]
fn cuda_links_are_measured_near_their_device() {
    let Some(cuda) = stand_in(&two()) else { return };
    listen();
    let root = host(2, [1, 0]);
    {
        let devices = registry(&root);
        let links = devices.links().unwrap();
        let mut nodes = nodes();
        nodes.dedup();
        // Each card's link, then from the first to the second and back, with the buffers near where the bytes go.
        assert_eq!(nodes, [1, 0, 1], "{links}");
    }
    assert_clean(&cuda);
}
