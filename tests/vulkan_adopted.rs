//! The library on Vulkan devices that the caller has opened, over the drivers that the machine has, and the caller's own work over
//! tensors that the library streams there. `scripts/vulkan-check` runs it over software drivers, under the validation layer.
#![cfg(feature = "vulkan")]
#![expect(unsafe_code, reason = "raw handles, as callers of the library have them")]

mod support;
mod vulkan_devices;

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use support::whole_path::{load, source, whole_path};
use tensor_offload::backend::{
    Backend, BufMut, Dequantise, Device, Event, Health, MemoryKind, Role, Transfer, Vulkan, conformance,
};
use tensor_offload::vulkan::ash::vk::{self, Handle as _};
use tensor_offload::vulkan::{self, AdoptedDevice, AdoptedQueue, EnabledFeatures, Place};
use tensor_offload::{DType, DeviceId, ErrorKind, Streamer};
use vulkan_devices::caller::{Caller, ENABLED, Work, callers};
use vulkan_devices::{DEADLINE, Drivers, assert_comes_to_nothing, assert_given_back, drivers, open, registry};
use vulkan_probe::Failure;

const COMPUTE: DeviceId = DeviceId::vulkan(0);

fn opened(drivers: &Drivers) -> Vec<Arc<Caller>> {
    callers(&drivers.library()).into_iter().map(Arc::new).collect()
}

/// The library on these devices.
fn adopted(devices: impl IntoIterator<Item = AdoptedDevice>) -> Vulkan {
    // SAFETY: the devices are the callers', who keep them and hold the lock while they submit.
    unsafe { Vulkan::adopt(devices).unwrap() }
}

fn shared(callers: &[Arc<Caller>]) -> Vulkan {
    adopted(callers.iter().map(Caller::shared))
}

/// Counts the drops of what is kept with it.
struct Kept(#[expect(dead_code, reason = "it is only kept")] Arc<Caller>, Arc<AtomicUsize>);

impl Drop for Kept {
    fn drop(&mut self) {
        self.1.fetch_add(1, Ordering::SeqCst);
    }
}

/// A device that is kept so, and the number of drops.
fn counted(caller: &Arc<Caller>) -> (AdoptedDevice, Arc<AtomicUsize>) {
    let drops = Arc::new(AtomicUsize::new(0));
    let (family, queue) = caller.queues[0];
    let device = caller.with(ENABLED, Kept(Arc::clone(caller), Arc::clone(&drops)));
    (device.queue(AdoptedQueue::shared(queue, family, Arc::clone(&caller.lock) as _)), drops)
}

#[test]
fn vulkan_an_adopted_device_conforms() {
    let drivers = drivers();
    let callers = opened(&drivers);
    for backend in [shared(&callers), shared(&callers).host_imports(false)] {
        let cpu = backend.open(DeviceId::CPU).unwrap();
        let devices = open(&backend);
        assert_eq!(devices.len(), callers.len());
        devices.iter().for_each(|device| conformance::check(&**device, &*cpu));
    }
    // With no extension, too: nothing is imported, and the driver's budget is not asked.
    let bare = |caller: &Arc<Caller>| {
        let (instance, device) = (caller.instance.clone(), caller.device.clone());
        let (family, queue) = caller.queues[0];
        AdoptedDevice::new(instance, caller.physical, device, ENABLED, Arc::clone(caller))
            .queue(AdoptedQueue::shared(queue, family, Arc::clone(&caller.lock) as _))
            .families([family])
    };
    let backend = adopted(callers.iter().map(bare));
    let cpu = backend.open(DeviceId::CPU).unwrap();
    for device in open(&backend) {
        assert_eq!(device.info().free, None);
        conformance::check(&*device, &*cpu);
    }
}

#[test]
fn vulkan_models_arrive_whole_on_an_adopted_device() {
    let (source, drivers) = (source(), drivers());
    let callers = opened(&drivers);
    let devices = registry(shared(&callers));
    for allocation in ["vulkan:0,60kb;cpu,*", "vulkan:0,40kb;disk,100kb;cpu,*", "vulkan:0,100%"] {
        for depth in [0, 2] {
            whole_path(&devices, &source, COMPUTE, allocation, depth).unwrap();
            assert_given_back(&devices, allocation);
        }
    }
}

/// Whatever the library does, its last use of a device closes neither that nor the instance.
#[test]
fn vulkan_nothing_of_the_callers_is_destroyed() {
    let drivers = drivers();
    let callers = opened(&drivers);
    let before = drivers.alive();
    for caller in &callers {
        let (device, drops) = counted(caller);
        let backend = adopted([device]);
        for _ in 0..2 {
            let device = backend.open(COMPUTE).unwrap();
            drop(device.alloc(1000, MemoryKind::Arena).unwrap());
            device.stream(Role::Compute).unwrap().record(&[]).unwrap().wait(DEADLINE).unwrap();
            assert_comes_to_nothing(&*device, "an adopted device");
        }
        let device = backend.open(COMPUTE).unwrap();
        drop(backend);
        assert_eq!(drops.load(Ordering::SeqCst), 0, "the device is in use");
        drop(device);
        wait_until(|| drops.load(Ordering::SeqCst) == 1);
        assert_eq!(drivers.alive(), before);
        caller.submit_nothing(1);
    }
}

fn wait_until(done: impl Fn() -> bool) {
    let until = std::time::Instant::now() + DEADLINE;
    while !done() {
        assert!(std::time::Instant::now() < until);
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The layer checks that no two threads use a queue at one time.
#[test]
fn vulkan_submissions_to_a_shared_queue_take_its_lock() {
    let drivers = drivers();
    let callers = opened(&drivers);
    for caller in &callers {
        let backend = shared(std::slice::from_ref(caller));
        let (device, cpu) = (backend.open(COMPUTE).unwrap(), backend.open(DeviceId::CPU).unwrap());
        let before = caller.lock.taken();
        std::thread::scope(|scope| {
            scope.spawn(|| caller.submit_nothing(200));
            for _ in 0..2 {
                scope.spawn(|| {
                    let (up, compute) = (device.stream(Role::Upload).unwrap(), device.stream(Role::Compute).unwrap());
                    let source = cpu.alloc(10_000, MemoryKind::Pinned).unwrap().freeze();
                    for _ in 0..50 {
                        let dst = device.alloc(10_000, MemoryKind::Arena).unwrap();
                        let there = up.copy(Transfer::whole(&source, dst).unwrap()).unwrap().chain().freeze();
                        compute.record(std::slice::from_ref(&there)).unwrap();
                    }
                    compute.record(&[]).unwrap().wait(DEADLINE).unwrap();
                });
            }
        });
        assert!(caller.lock.taken() >= before + 100, "the lock was taken {} times", caller.lock.taken() - before);
        let occupied = device.stream(Role::Compute).unwrap().occupy(Duration::from_millis(1)).unwrap_err();
        assert_eq!(occupied.kind(), ErrorKind::Missing, "the caller's binary semaphores could wait for it: {occupied}");
        assert_eq!(vulkan::stream_queue(&*device.stream(Role::Compute).unwrap()), Some(caller.queues[0].1));
    }
}

#[test]
fn vulkan_what_cannot_be_adopted_is_refused() {
    let drivers = drivers();
    let callers = opened(&drivers);
    let caller = &callers[0];
    let (family, queue) = caller.queues[0];
    let own = || AdoptedQueue::own(queue, family);
    let whole = |enabled| caller.with(enabled, ()).queue(own());
    let handles = || (caller.instance.clone(), caller.device.clone());
    let (instance, device) = handles();
    let no_physical = AdoptedDevice::new(instance, vk::PhysicalDevice::null(), device, ENABLED, ()).queue(own());
    for (device, kind, part) in [
        (no_physical, ErrorKind::Invalid, "the physical device of vulkan:0 is null"),
        (caller.with(ENABLED, ()), ErrorKind::Invalid, "needs a queue"),
        (caller.with(ENABLED, ()).queue(AdoptedQueue::own(vk::Queue::null(), family)), ErrorKind::Invalid, "queue of"),
        (caller.with(ENABLED, ()).queue(own()).queue(own()), ErrorKind::Invalid, "twice"),
        (caller.with(ENABLED, ()).queue(AdoptedQueue::own(queue, 99)), ErrorKind::Invalid, "family 99"),
        (whole(ENABLED).families([77]), ErrorKind::Invalid, "family 77"),
        (whole(EnabledFeatures { timeline_semaphore: false, ..ENABLED }), ErrorKind::DeviceAbsent, "timelineSemaphore"),
        (whole(EnabledFeatures { synchronization2: false, ..ENABLED }), ErrorKind::DeviceAbsent, "synchronization2"),
    ] {
        // SAFETY: as in `adopted`.
        let error = unsafe { Vulkan::adopt([device]) }.unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
        assert!(error.to_string().contains(part), "{error}");
    }
    let backend = shared(&callers);
    assert_eq!(backend.open(DeviceId::vulkan(99)).unwrap_err().kind(), ErrorKind::UnknownDevice);
    let (cpu, device) = (backend.open(DeviceId::CPU).unwrap(), backend.open(COMPUTE).unwrap());
    let mark = vulkan::mark(&*cpu.stream(Role::Compute).unwrap()).unwrap_err();
    assert_eq!(mark.kind(), ErrorKind::Invalid, "{mark}");
    for (device, semaphore) in [(&cpu, vk::Semaphore::from_raw(1)), (&device, vk::Semaphore::null())] {
        // SAFETY: it is refused before it is used.
        let error = unsafe { vulkan::event(device, semaphore, 1, Arc::new(())) }.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    }
}

/// A caller's submissions read streamed layers where they are. On the same queue they need no semaphores.
#[test]
fn vulkan_a_callers_submissions_see_every_layer() {
    let (source, drivers) = (source(), drivers());
    let callers = opened(&drivers);
    for caller in &callers {
        for (same_queue, depth) in [(false, 0), (false, 1), (true, 0), (true, 2)] {
            let devices = registry(shared(std::slice::from_ref(caller)));
            let model = Arc::new(load(&devices, &source, COMPUTE, "vulkan:0,60kb;cpu,*", depth).unwrap());
            let mut streamer = Streamer::new(&model).unwrap();
            let mut work = Work::new(caller);
            let (mut held, mut wanted) = (Vec::new(), Vec::<u8>::new());
            for _ in 0..2 {
                for layer in model.layout().layer_ids() {
                    let guard = streamer.layer(layer).unwrap();
                    let places: Vec<Place> = guard.tensors().map(|tensor| vulkan::place(&tensor).unwrap()).collect();
                    wanted.extend(guard.tensors().flat_map(|tensor| {
                        let tensor = source.weights.checkpoint().find(tensor.name()).unwrap();
                        &source.merged[tensor.index()]
                    }));
                    let after = vulkan::mark(&**streamer.compute()).unwrap();
                    work.submit(&places, Some(&after).filter(|_| !same_queue));
                    if !same_queue {
                        let keep: Arc<dyn Any + Send + Sync> = Arc::clone(caller) as _;
                        let device = model.residency().device();
                        // SAFETY: the semaphore lives until the stream has been waited for; its work has been submitted.
                        let used = unsafe { vulkan::event(device, work.semaphore, work.value, keep) }.unwrap();
                        streamer.compute().wait(&used).unwrap();
                        held.push(used);
                    }
                }
            }
            // Not before: a wait of the host would take the place of those of the device.
            assert!(work.copied() == wanted, "depth {depth}, on the same queue: {same_queue}");
            assert!(held.iter().all(|event| event.wait(DEADLINE).is_ok()));
            streamer.compute().record(&[]).unwrap().wait(DEADLINE).unwrap();
            let elsewhere = model.layout().tensors().iter().filter_map(|info| model.tensor(&info.name));
            let here = elsewhere.filter(|tensor| vulkan::place(tensor).is_some()).count();
            assert!(here > 0 && here < model.layout().tensors().len(), "{here} tensors are on the device all the time");
            drop((streamer, model));
            assert_given_back(&devices, "a caller's work");
            drop((devices, held));
        }
    }
}

/// An event of the caller's work, whose semaphore the host raises: what is to wait for it is not done before.
fn raised_by_host(device: &Arc<dyn Device>, work: &Arc<Work>, value: u64) -> Event {
    // SAFETY: the event keeps the semaphore, which the host raises whatever the device does. No work is before the value.
    unsafe { vulkan::event(device, work.semaphore, value, Arc::clone(work) as _) }.unwrap()
}

/// Memory of 4096 bytes that is in use until an event.
fn used_until(device: &dyn Device, kind: MemoryKind, event: &Event) -> BufMut {
    let memory = device.alloc(4096, kind).unwrap().freeze();
    memory.used_until(event.clone());
    memory.try_reclaim().unwrap()
}

#[test]
fn vulkan_nothing_comes_before_a_callers_point() {
    let drivers = drivers();
    for caller in &opened(&drivers) {
        let backend = shared(std::slice::from_ref(caller));
        let (cpu, device) = (backend.open(DeviceId::CPU).unwrap(), backend.open(COMPUTE).unwrap());
        let (stream, kernels) = (device.stream(Role::Compute).unwrap(), device.kernels().unwrap());
        let (from, to) = (DType::Q8_0, DType::BF16);
        kernels.dequantises(&*stream, from, to).unwrap();
        let source = cpu.alloc(4096, MemoryKind::Pinned).unwrap().freeze();
        let blocks = device.alloc(4096, MemoryKind::Arena).unwrap();
        let blocks = stream.copy(Transfer::whole(&source, blocks).unwrap()).unwrap().chain().freeze();
        let (work, without) = (Arc::new(Work::new(caller)), device.ledger().charged());
        for (value, what) in (1..).zip(["a copy", "a kernel", "a mark"]) {
            let used = raised_by_host(&device, &work, value);
            let memory = used_until(&*device, MemoryKind::Arena, &used);
            let done = match what {
                "a copy" => stream.copy(Transfer::whole(&source, memory).unwrap()).unwrap().done().clone(),
                "a kernel" => {
                    let work = Dequantise::new((blocks.clone(), 0, from), 1024, (memory, 0, to)).unwrap();
                    kernels.dequantise(&*stream, work).unwrap().done().clone()
                }
                _ => {
                    stream.wait(&used).unwrap();
                    stream.record(&[memory.freeze()]).unwrap()
                }
            };
            std::thread::sleep(Duration::from_millis(20));
            let (early, kept) = (done.is_complete(), device.ledger().charged() > without);
            work.raise(value);
            assert!(!early, "{what} does not wait");
            assert!(kept, "{what} does not keep its memory");
            done.wait(DEADLINE).unwrap();
            wait_until(|| device.ledger().charged() == without);
        }
    }
}

/// No device waits for another's semaphore, so the host does.
#[test]
fn vulkan_the_host_waits_for_the_callers_point_on_another_device() {
    let drivers = drivers();
    let callers = [opened(&drivers), opened(&drivers)].concat();
    let backend = shared(&callers);
    let devices = open(&backend);
    let (here, there) = (&devices[0], devices.last().unwrap());
    let cpu = backend.open(DeviceId::CPU).unwrap();
    let (stream, work) = (here.stream(Role::Download).unwrap(), Arc::new(Work::new(callers.last().unwrap())));
    let used = raised_by_host(there, &work, 1);
    let memory = used_until(&*cpu, MemoryKind::Pinned, &used);
    let source = here.alloc(4096, MemoryKind::Arena).unwrap().freeze();
    let raised = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(50));
            raised.store(1, Ordering::SeqCst);
            work.raise(1);
        });
        let flight = stream.copy(Transfer::whole(&source, memory).unwrap()).unwrap();
        assert_eq!(raised.load(Ordering::SeqCst), 1, "it was queued before");
        flight.wait(DEADLINE).unwrap();
    });
}

/// What a caller keeps for an event stays until no submission waits for it.
#[test]
fn vulkan_what_is_kept_for_an_event_outlives_its_waits() {
    let drivers = drivers();
    for caller in &opened(&drivers) {
        let device = shared(std::slice::from_ref(caller)).open(COMPUTE).unwrap();
        let stream = device.stream(Role::Compute).unwrap();
        let (work, drops) = (Work::new(caller), Arc::new(AtomicUsize::new(0)));
        let keep = Arc::new(Kept(Arc::clone(caller), Arc::clone(&drops)));
        // SAFETY: the semaphore lives until nothing waits for it. Below, the host raises it, whatever the device does.
        let event = unsafe { vulkan::event(&device, work.semaphore, 1, keep) }.unwrap();
        assert_eq!(drops.load(Ordering::SeqCst), 0, "there is an event");
        stream.wait(&event).unwrap();
        drop(event);
        assert_eq!(drops.load(Ordering::SeqCst), 0, "the next submission is to wait for it");
        let after = stream.record(&[]).unwrap();
        let early = (drops.load(Ordering::SeqCst), after.is_complete());
        work.raise(1);
        assert_eq!(early, (0, false), "a submission waits for it");
        after.wait(DEADLINE).unwrap();
        drop((stream, after));
        wait_until(|| drops.load(Ordering::SeqCst) == 1);
    }
}

/// What the library made on a device that is lost stays, and so does what the caller keeps for it.
#[test]
fn vulkan_a_lost_device_leaves_the_callers_things() {
    let drivers = drivers();
    {
        let callers = opened(&drivers);
        let (device, drops) = counted(&callers[0]);
        let backend = adopted([device]);
        let device = backend.open(COMPUTE).unwrap();
        let stream = device.stream(Role::Compute).unwrap();
        drivers.fail_next("vkQueueSubmit2", Failure::Lost);
        assert_eq!(stream.record(&[]).unwrap_err().kind(), ErrorKind::DeviceLost);
        assert!(matches!(device.health(), Health::Lost(_)));
        drop((stream, device, backend));
        // The thread that frees memory has the last handle.
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(drops.load(Ordering::SeqCst), 0, "work may be running still");
        callers[0].submit_nothing(1);
    }
    assert!(drivers.alive().iter().any(|left| left.ends_with("device")), "nobody closes it");
    drivers.forget_left();
}

/// A fork drops nothing of the caller's.
#[cfg(target_os = "linux")]
#[test]
fn vulkan_a_fork_leaves_the_callers_things() {
    unsafe extern "C" {
        safe fn fork() -> i32;
        safe fn _exit(status: i32) -> !;
        fn waitpid(process: i32, status: *mut i32, options: i32) -> i32;
    }
    let drivers = drivers();
    let callers = opened(&drivers);
    let (device, drops) = counted(&callers[0]);
    let backend = adopted([device]);
    let device = backend.open(COMPUTE).unwrap();
    match fork() {
        0 => {
            let forked = device.memory().err().map(|error| error.kind()) == Some(ErrorKind::Forked);
            drop((device, backend));
            _exit(if forked && drops.load(Ordering::SeqCst) == 0 { 0 } else { 1 });
        }
        child => {
            let mut status = -1;
            // SAFETY: the pointer is to a living integer.
            let waited = unsafe { waitpid(child, &raw mut status, 0) };
            assert_eq!((waited, status), (child, 0), "the child saw something else (status {status:#x})");
        }
    }
    device.memory().unwrap();
    drop((device, backend));
    wait_until(|| drops.load(Ordering::SeqCst) == 1);
}
