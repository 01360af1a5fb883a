//! Events of others, for which a Vulkan stream waits on the device where no other stream's work would wait in its queue.
#![cfg(feature = "vulkan")]
#![expect(unsafe_code, reason = "an event that a test completes")]

mod support;
mod vulkan_devices;

use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use tensor_offload::backend::{
    Backend, Buf, Dequantise, Device, Event, Fence, FenceState, Joined, MemoryKind, Role, Stream, Transfer,
};
use tensor_offload::{DType, DeviceId, Error};
use vulkan_devices::{DEADLINE, drivers, open};

/// An event that a test completes.
struct Open {
    state: Mutex<FenceState>,
    changed: Condvar,
}

impl Open {
    fn new() -> (Arc<Open>, Event) {
        let open = Arc::new(Open { state: Mutex::new(FenceState::Pending), changed: Condvar::new() });
        (Arc::clone(&open), Event::new(open))
    }

    fn set(&self, state: FenceState) {
        *self.state.lock().unwrap() = state;
        self.changed.notify_all();
    }
}

// SAFETY: the state changes once, and no memory depends on it that anybody uses before.
unsafe impl Fence for Open {
    fn state(&self) -> FenceState {
        self.state.lock().unwrap().clone()
    }

    fn wait(&self, deadline: Duration) -> FenceState {
        let state = self.state.lock().unwrap();
        let is_pending = |state: &mut FenceState| matches!(state, FenceState::Pending);
        self.changed.wait_timeout_while(state, deadline, is_pending).unwrap().0.clone()
    }
}

fn pinned(host: &dyn Device, bytes: &[u8]) -> Buf {
    let mut memory = host.alloc(bytes.len(), MemoryKind::Pinned).unwrap();
    memory.host_mut().unwrap().copy_from_slice(bytes);
    memory.freeze()
}

/// Bytes in the device's own memory: of two devices the host's memory may be pinned for one alone, and the host waits for what it moves.
fn sent(stream: &dyn Stream, device: &dyn Device, bytes: &Buf) -> Buf {
    let memory = device.alloc(bytes.bytes(), MemoryKind::Arena).unwrap();
    stream.copy(Transfer::whole(bytes, memory).unwrap()).unwrap().wait(DEADLINE).unwrap().freeze()
}

/// The copy is queued at once, and what comes after it waits with it.
#[test]
fn vulkan_a_stream_alone_on_its_queue_waits_for_others_on_the_device() {
    let drivers = drivers();
    let backend = drivers.vulkan();
    let host = backend.open(DeviceId::CPU).unwrap();
    for device in open(&backend) {
        let stream = device.stream(Role::Compute).unwrap();
        let bytes: Vec<u8> = (0..34u32 * 64).map(|at| at as u8 & 0x3f).collect();
        let source = sent(&*stream, &*device, &pinned(&*host, &bytes));
        let (other, event) = Open::new();
        let mut memory = device.alloc(bytes.len(), MemoryKind::Arena).unwrap();
        memory.after(event);
        let arrived = stream.copy(Transfer::whole(&source, memory).unwrap()).unwrap().chain().freeze();
        let kernels = device.kernels().unwrap();
        let values = device.alloc(2 * 32 * 64, MemoryKind::Arena).unwrap();
        let work = Dequantise::new((arrived.clone(), 0, DType::Q8_0), 32 * 64, (values, 0, DType::BF16)).unwrap();
        let values = kernels.dequantise(&*stream, work).unwrap().chain().freeze();
        let copy = device.alloc(bytes.len(), MemoryKind::Arena).unwrap();
        let copy = stream.copy(Transfer::whole(&arrived, copy).unwrap()).unwrap().chain().freeze();
        std::thread::sleep(Duration::from_millis(20));
        let is_pending = |buf: &Buf| buf.ready().any(|event| matches!(event.state(), FenceState::Pending));
        assert!([&arrived, &values, &copy].into_iter().all(is_pending));
        other.set(FenceState::Done);
        copy.wait(DEADLINE).unwrap();
        let back = host.alloc(bytes.len(), MemoryKind::Pinned).unwrap();
        let back = stream.copy(Transfer::whole(&copy, back).unwrap()).unwrap().wait(DEADLINE).unwrap().freeze();
        assert!(back.host(DEADLINE).unwrap().unwrap() == bytes);
        values.wait(DEADLINE).unwrap();
    }
}

/// Semaphores carry no failures; events do, of what waits for them too.
#[test]
fn vulkan_what_fails_fails_all_that_waits_for_it() {
    let drivers = drivers();
    let backend = drivers.vulkan();
    let host = backend.open(DeviceId::CPU).unwrap();
    for device in open(&backend) {
        let stream = device.stream(Role::Compute).unwrap();
        let source = sent(&*stream, &*device, &pinned(&*host, &[7; 4096]));
        let alloc = || device.alloc(4096, MemoryKind::Arena).unwrap();
        let (other, event) = Open::new();
        let mut memory = alloc();
        memory.after(event);
        let first = stream.copy(Transfer::whole(&source, memory).unwrap()).unwrap().chain().freeze();
        let second = stream.copy(Transfer::whole(&first, alloc()).unwrap()).unwrap().chain().freeze();
        // What waits for it on another stream of this device.
        let other_stream = device.stream(Role::Download).unwrap();
        let filling = first.ready().next().unwrap().clone();
        assert!(matches!(other_stream.wait(&filling).unwrap(), Joined::OnDevice));
        let marked = other_stream.record(&[]).unwrap();
        let behind = other_stream.copy(Transfer::whole(&source, alloc()).unwrap()).unwrap().chain().freeze();
        let unconcerned = stream.copy(Transfer::whole(&source, alloc()).unwrap()).unwrap().chain().freeze();
        other
            .set(FenceState::Failed(Arc::new(Error::DeviceLost { device: DeviceId::cuda(3), why: "gone".to_owned() })));
        for failed in [&first, &second] {
            let error = failed.wait(DEADLINE).unwrap_err();
            assert!(error.to_string().contains("cuda:3"), "{error}");
        }
        assert!(marked.wait(DEADLINE).is_err() && behind.wait(DEADLINE).is_err());
        unconcerned.wait(DEADLINE).unwrap();
        // Only what was queued before that was known.
        other_stream.record(&[]).unwrap().wait(DEADLINE).unwrap();
        // What is queued once the failure is known is refused.
        let refused = stream.copy(Transfer::whole(&second, alloc()).unwrap()).unwrap_err();
        assert!(refused.error.to_string().contains("cuda:3"), "{}", refused.error);
    }
}

/// Memory is in use until none of its events is pending, whatever another one has come to; and what a lost device may use stays lost.
#[test]
fn vulkan_a_failure_does_not_end_the_wait_for_others() {
    let drivers = drivers();
    let backend = drivers.vulkan();
    let host = backend.open(DeviceId::CPU).unwrap();
    for device in open(&backend) {
        let stream = device.stream(Role::Compute).unwrap();
        let source = sent(&*stream, &*device, &pinned(&*host, &[5; 4096]));
        let failure = || Arc::new(Error::DeviceLost { device: DeviceId::cuda(3), why: "gone".to_owned() });
        for (first, second, is_lost) in [
            (FenceState::Failed(failure()), FenceState::Done, false),
            (FenceState::Failed(failure()), FenceState::Lost(failure()), true),
        ] {
            let ((failing, failed), (late, pending)) = (Open::new(), Open::new());
            let mut memory = device.alloc(4096, MemoryKind::Whole).unwrap();
            memory.after(failed);
            memory.after(pending);
            let flight = stream.copy(Transfer::whole(&source, memory).unwrap()).unwrap();
            failing.set(first);
            std::thread::sleep(Duration::from_millis(20));
            assert!(matches!(flight.done().state(), FenceState::Pending));
            late.set(second);
            assert!(flight.done().wait(DEADLINE).is_err());
            assert_eq!(matches!(flight.done().state(), FenceState::Lost(_)), is_lost);
        }
    }
    // What a lost device may still use is never given back.
    drop(backend);
    drivers.forget_left();
}

/// Where streams share a queue, one of them does not hold up the other.
#[test]
fn vulkan_streams_that_share_a_queue_wait_for_others_on_the_host() {
    let drivers = drivers();
    let backend = drivers.vulkan();
    let host = backend.open(DeviceId::CPU).unwrap();
    for device in open(&backend) {
        let (waiting, going) = (device.stream(Role::Upload).unwrap(), device.stream(Role::Upload).unwrap());
        let source = pinned(&*host, &[9; 4096]);
        let (other, event) = Open::new();
        assert!(matches!(waiting.wait(&event).unwrap(), Joined::HostMustWait));
        let mut memory = device.alloc(4096, MemoryKind::Arena).unwrap();
        memory.after(event);
        std::thread::scope(|scope| {
            let copied = scope.spawn(|| waiting.copy(Transfer::whole(&source, memory).unwrap()).unwrap());
            let free = device.alloc(4096, MemoryKind::Arena).unwrap();
            going.copy(Transfer::whole(&source, free).unwrap()).unwrap().wait(DEADLINE).unwrap();
            assert!(!copied.is_finished());
            other.set(FenceState::Done);
            copied.join().unwrap().wait(DEADLINE).unwrap();
        });
    }
}
