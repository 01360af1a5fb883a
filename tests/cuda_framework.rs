//! Models in memory that a framework allocates on a card, over the stand-in driver: cudarc's slices here. And memory of a
//! framework on the host, behind its locks, which a card's copies know nothing of.
#![cfg(all(feature = "cuda", target_os = "linux"))]

mod card;
mod support;

use std::any::Any;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};

use card::{assert_comes_to, assert_given_back, driver, has_devices, registry_of};
use cuda_standin::{Config, MemoryMode};
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr};
use support::framework::{Framework, Memory};
use support::{CPU, DEADLINE, GPU0, Subject, check_pass, layers, llama, mixed};
use tensor_offload::backend::{Cuda, Storage};
use tensor_offload::load::{TensorAllocator, TensorRequest};
use tensor_offload::plan::TensorGrouping;
use tensor_offload::{
    ByteSize, DType, DeviceId, Error, ErrorKind, LayerId, Loader, Model, Plan, Planner, Registry, Result, Streamer,
    cuda,
};

const DIVIDED: [TensorGrouping; 2] = [TensorGrouping::PerType, TensorGrouping::PerTensor];

fn machine() -> Config {
    Config::with_devices(&[64 << 20, 64 << 20]).memory(MemoryMode::Reuse).late_micros(10_000_000)
}

fn registry() -> Registry {
    // The stand-in's contexts take nothing of its small cards.
    registry_of(Cuda::new().context_size(ByteSize(0)))
}

/// A tensor of the framework on its card.
struct Tensor {
    dtype: DType,
    memory: CudaSlice<u8>,
}

/// A framework that allocates on a card with cudarc.
struct Card {
    stream: Arc<CudaStream>,
    storage: TensorGrouping,
    /// Which request fails, the first being 1.
    fails_at: AtomicU64,
    requests: AtomicU64,
    tensors: Mutex<Vec<Weak<Tensor>>>,
}

impl Card {
    fn new(stream: &Arc<CudaStream>, storage: TensorGrouping) -> Arc<Card> {
        let stream = Arc::clone(stream);
        let (fails_at, requests, tensors) = Default::default();
        Arc::new(Card { stream, storage, fails_at, requests, tensors })
    }

    fn live(&self) -> Vec<Arc<Tensor>> {
        self.tensors.lock().unwrap().iter().filter_map(Weak::upgrade).collect()
    }

    fn assert_gone(&self) {
        let until = std::time::Instant::now() + DEADLINE;
        while !self.live().is_empty() {
            assert!(std::time::Instant::now() < until, "{} tensors are kept", self.live().len());
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }
}

impl TensorAllocator for Card {
    fn device(&self) -> DeviceId {
        GPU0
    }

    fn grouping(&self) -> TensorGrouping {
        self.storage
    }

    fn supports(&self, _: DType) -> bool {
        true
    }

    fn allocate(&self, request: &TensorRequest<'_>) -> Result<Box<dyn Storage>> {
        #![expect(unsafe_code, reason = "an address of the framework's")]
        let number = self.requests.fetch_add(1, Ordering::Relaxed) + 1;
        if number == self.fails_at.load(Ordering::Relaxed) {
            let (device, requested) = (GPU0, request.bytes as u64);
            return Err(Error::OutOfMemory { device, requested, available: 0, limit: 0 });
        }
        let memory = self.stream.alloc_zeros::<u8>(request.bytes).unwrap();
        self.stream.synchronize().unwrap();
        let address = memory.device_ptr(&self.stream).0;
        let tensor = Arc::new(Tensor { dtype: request.dtype, memory });
        self.tensors.lock().unwrap().push(Arc::downgrade(&tensor));
        let keep: Arc<dyn Any + Send + Sync> = tensor;
        // SAFETY: the slice has these bytes at this address as long as the `Arc` lives, and is read only while nothing is
        // written there.
        unsafe { cuda::storage(request.device, address, request.bytes, keep) }
    }
}

/// The framework's tensor that an allocation is.
fn tensor_of(block: &tensor_offload::backend::MemoryBlock) -> Arc<Tensor> {
    let owner = Arc::clone(cuda::owner(block).expect("memory of the framework"));
    owner.downcast().expect("a tensor of the framework")
}

fn plan(devices: &Registry, subject: &Subject, allocation: &str, storage: TensorGrouping, in_place: &str) -> Plan {
    let planner = Planner::new(subject.layout(), devices.machine()).allocation(allocation.parse().unwrap());
    planner.compute(GPU0).depth(1).grouping(storage).in_place(in_place).plan().unwrap()
}

/// Every tensor of every layer is memory of the framework, of its own type, and has its bytes there.
fn check_seen_by_the_framework(streamer: &mut Streamer, card: &Card, subject: &Subject) {
    for layer in layers(streamer).chain([1, 0].map(LayerId::new)) {
        let guard = streamer.layer(layer).unwrap();
        guard.wait(DEADLINE).unwrap();
        for view in guard.tensors().filter(|view| view.size() > 0) {
            let block = view.buf().block();
            let tensor = tensor_of(block);
            let inside = (cuda::address(&view).unwrap() - tensor.memory.device_ptr(&card.stream).0) as usize;
            let bytes = card.stream.clone_dtoh(&tensor.memory).unwrap();
            assert!(&bytes[inside..inside + view.size()] == subject.bytes_of(view.name()), "{}", view.name());
            assert_eq!(tensor.dtype, view.dtype(), "{}", view.name());
            if let Some(place) = guard.slot().and_then(|slot| streamer.in_slot(slot, view.name())) {
                assert!(Arc::ptr_eq(place.block(), block) && place.byte_range().start == inside, "{}", view.name());
            }
        }
    }
}

#[test]
fn cuda_layers_come_into_memory_of_a_framework() {
    let driver = driver(&machine());
    if !has_devices(2) {
        return;
    }
    let models = [Subject::patched(&llama(3, 64), 95), Subject::plain(&mixed(2), 96)];
    for ((subject, storage), allocation) in models
        .iter()
        .flat_map(|subject| DIVIDED.map(|storage| (subject, storage)))
        .zip(["cuda:0,30%;cpu,70%", "cpu,50%;cuda:1,50%", "cuda:0,10kb;cpu,*", "cpu,*"])
    {
        let context = CudaContext::new(0).unwrap();
        let devices = registry();
        let card = Card::new(&context.new_stream().unwrap(), storage);
        let plan = plan(&devices, subject, allocation, storage, "nothing");
        let loader = Loader::new(&devices).workers(2).allocator(Arc::clone(&card) as _);
        let model = Arc::new(loader.load(&subject.weights, &plan).unwrap());
        let share = plan.device(GPU0).unwrap();
        let held = share.weights.bytes + share.beside.slots;
        assert_comes_to(&devices, None, GPU0, held, "loaded");
        assert_eq!(card.live().iter().map(|tensor| tensor.memory.len() as u64).sum::<u64>(), held);
        subject.check(&model);
        let mut streamer = Streamer::new(&model).unwrap();
        check_seen_by_the_framework(&mut streamer, &card, subject);
        streamer.overwrite_slots(0xff).unwrap();
        check_seen_by_the_framework(&mut streamer, &card, subject);
        drop((streamer, model));
        card.assert_gone();
        assert_given_back(&devices, None, "unloaded");
    }
    driver.assert_clean();
}

/// Whichever request of a load fails, no memory of the framework's and none of the library's stays.
#[test]
fn cuda_a_framework_that_fails_leaves_nothing_on_the_card() {
    let driver = driver(&machine());
    {
        let context = CudaContext::new(0).unwrap();
        let (subject, devices) = (Subject::plain(&llama(2, 32), 97), registry());
        let card = Card::new(&context.new_stream().unwrap(), DIVIDED[1]);
        let plan = plan(&devices, &subject, "cuda:0,30%;cpu,70%", DIVIDED[1], "nothing");
        let load = || Loader::new(&devices).workers(2).allocator(Arc::clone(&card) as _).load(&subject.weights, &plan);
        drop(load().unwrap());
        let requests = card.requests.swap(0, Ordering::Relaxed);
        for nth in 1..=requests {
            card.requests.store(0, Ordering::Relaxed);
            card.fails_at.store(nth, Ordering::Relaxed);
            assert_eq!(load().unwrap_err().kind(), ErrorKind::OutOfMemory);
            card.assert_gone();
            assert_given_back(&devices, None, "a load that failed");
        }
    }
    driver.assert_clean();
}

/// From host memory behind a lock to the card and back: the card's copies go through buffers, since they know no locks.
#[test]
fn cuda_memory_behind_a_lock_is_copied_to_and_from_a_card() {
    let driver = driver(&machine());
    {
        let (subject, devices) = (Subject::patched(&mixed(2), 98), registry());
        let host = Framework::new(CPU, DIVIDED[1], Memory::Locked);
        let plans = [
            plan(&devices, &subject, "cpu,*", DIVIDED[1], "*"),
            plan(&devices, &subject, "cuda:0,*", DIVIDED[1], "nothing"),
            plan(&devices, &subject, "cuda:0,30kb;cpu,*", DIVIDED[1], "*.mlp.*"),
            plan(&devices, &subject, "cpu,*", DIVIDED[1], "nothing"),
        ];
        for (from, to) in plans.iter().flat_map(|from| plans.iter().map(move |to| (from, to))) {
            let loader = Loader::new(&devices).workers(2).allocator(Arc::clone(&host) as _);
            let base = Arc::new(loader.load(&subject.weights, from).unwrap());
            let model: Arc<Model> = Arc::new(loader.relocate(&base, to).unwrap());
            drop(base);
            subject.check(&model);
            check_pass(&mut Streamer::new(&model).unwrap(), &subject).unwrap();
        }
        assert_given_back(&devices, None, "unloaded");
        let model = Loader::new(&devices).allocator(Arc::clone(&host) as _).load(&subject.weights, &plans[0]).unwrap();
        let (table, model) = ("model.embed_tokens.weight", Arc::new(model));
        let sent = Streamer::new(&model).unwrap().send_rows(table, &[5, 96]).unwrap();
        assert_eq!((sent.device(), sent.bytes()), (GPU0, 2 * 96));
        let mut rows = vec![0; 2 * 96];
        model.read_rows(table, &[5, 96], &mut rows).unwrap();
        let row = |row: usize| &subject.bytes_of(table)[row * 96..][..96];
        assert!(rows == [row(5), row(96)].concat());
        drop((sent, model));
        assert_given_back(&devices, None, "unloaded");
        assert!(host.live().is_empty());
    }
    driver.assert_clean();
}
