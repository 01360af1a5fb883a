//! The Vulkan backend over the drivers that the machine has: the conformance suite, and what its memory, copies and failures
//! promise. `scripts/vulkan-check` runs it over software drivers, under the validation layer.
#![cfg(feature = "vulkan")]

mod vulkan_devices;

use std::sync::Arc;
use std::time::Duration;

use tensor_offload::backend::{
    Backend, Buf, BufMut, Device, Found, Health, MemoryKind, Piece, Role, Route, Transfer, Vulkan, conformance,
};
use tensor_offload::device::DeviceKind;
use tensor_offload::{ByteSize, DeviceId, Error, ErrorKind};
use vulkan_devices::{DEADLINE, assert_comes_to_nothing, drivers, open};
use vulkan_probe::Failure;

const MIB: usize = 1 << 20;

fn host(backend: &Vulkan) -> Arc<dyn Device> {
    backend.open(DeviceId::CPU).unwrap()
}

fn filled(host: &dyn Device, seed: u8, bytes: usize) -> Buf {
    let mut buffer = host.alloc(bytes, MemoryKind::Pinned).unwrap();
    let pattern = (0..bytes).map(|i| (i as u8).wrapping_mul(7) ^ (i >> 8) as u8 ^ (i >> 16) as u8 ^ seed);
    buffer.host_mut().unwrap().iter_mut().zip(pattern).for_each(|(byte, value)| *byte = value);
    buffer.freeze()
}

fn send(device: &dyn Device, src: &Buf) -> Buf {
    let stream = device.stream(Role::Upload).unwrap();
    let dst = device.alloc(src.bytes(), MemoryKind::Arena).unwrap();
    stream.copy(Transfer::whole(src, dst).unwrap()).unwrap().chain().freeze()
}

fn fetch(device: &dyn Device, host: &dyn Device, src: &Buf) -> Vec<u8> {
    let stream = device.stream(Role::Download).unwrap();
    let dst = host.alloc(src.bytes(), MemoryKind::Pinned).unwrap();
    let landed = stream.copy(Transfer::whole(src, dst).unwrap()).unwrap().wait(DEADLINE).unwrap().freeze();
    landed.host(DEADLINE).unwrap().unwrap().to_vec()
}

fn bytes(buffer: &Buf) -> Vec<u8> {
    buffer.host(DEADLINE).unwrap().unwrap().to_vec()
}

#[test]
fn vulkan_conforms_with_every_kind_of_host_memory() {
    let drivers = drivers();
    for (_, backend) in drivers.hosts() {
        let cpu = host(&backend);
        for device in open(&backend) {
            conformance::check(&*device, &*cpu);
        }
        conformance::check(&*cpu, &*cpu);
    }
    // The loader passes over a layer that it cannot find, and nothing would be checked.
    if std::env::var_os("VK_INSTANCE_LAYERS").is_some() {
        assert_eq!(drivers.layers(), 1, "the validation layer is not there");
    }
}

#[test]
fn vulkan_tells_what_a_device_is() {
    let drivers = drivers();
    let backend = drivers.vulkan();
    let found = backend.discover();
    let Found::Here(first) = &found[0] else { panic!("{found:?}") };
    eprintln!("driver: {}", first.name);
    assert_eq!((first.id, first.total > 0), (DeviceId::vulkan(0), true));
    assert!(first.free.is_none_or(|free| free <= first.total) && !first.name.is_empty());
    // Drivers that compute on the processor have no memory but the host's.
    let integrated = first.gpu.as_ref().unwrap().integrated;
    assert_eq!(first.domain, if integrated { DeviceId::CPU } else { first.id });
    assert!(!drivers.alive().iter().any(|alive| alive.ends_with("device")), "looking opens nothing");
    assert_eq!(backend.open(DeviceId::vulkan(99)).unwrap_err().kind(), ErrorKind::UnknownDevice);
    let opened = open(&backend);
    for (a, b) in opened.iter().flat_map(|a| opened.iter().map(move |b| (a, b))) {
        assert_eq!(a.route_from(&**b) == Route::Direct, a.id() == b.id());
    }
    assert_eq!(opened[0].route_from(&*host(&backend)), Route::Direct);
    let again = backend.open(opened[0].id()).unwrap();
    assert!(Arc::ptr_eq(&again, &opened[0]), "one device is opened once");
}

#[test]
fn vulkan_says_why_there_is_no_device() {
    let nowhere = Vulkan::new().library("/nowhere/libvulkan.so.1").discover();
    let told = |found: &[Found], part: &str| match found {
        [Found::Absent { kind: DeviceKind::Vulkan, why }] => assert!(why.contains(part), "{why}"),
        other => panic!("{other:?}"),
    };
    told(&nowhere, "/nowhere/libvulkan.so.1");
    let drivers = drivers();
    let hardware = drivers.vulkan().software(false).discover();
    if let [Found::Absent { why, .. }] = &hardware[..] {
        assert!(why.contains("TENSOR_OFFLOAD_VULKAN_SOFTWARE=1"), "{why}");
    }
    drivers.fail(1, Failure::Other);
    told(&drivers.vulkan().discover(), "vkCreateInstance: ERROR_INITIALIZATION_FAILED");
}

#[test]
fn vulkan_out_of_memory_says_what_was_asked_and_what_is_free() {
    let drivers = drivers();
    let backend = drivers.vulkan();
    for device in open(&backend) {
        // The driver refuses, and once more after a trim.
        drivers.fail(2, Failure::DeviceMemory);
        let held = device.alloc(MIB, MemoryKind::Arena).unwrap();
        assert_eq!(drivers.failed().as_deref(), Some("vkAllocateMemory"), "less than a whole block will do");
        drop(held);
        device.trim().unwrap();
        assert_comes_to_nothing(&*device, "one that was refused at first");
        let all = usize::try_from(device.info().total).unwrap();
        let error = device.alloc(all, MemoryKind::Whole).unwrap_err();
        let Error::OutOfMemory { device: id, requested, available, limit } = error else { panic!("{error}") };
        assert_eq!((id, requested, limit), (device.id(), all as u64, all as u64));
        assert!(available < requested, "{available} of {requested}");
        assert_comes_to_nothing(&*device, "a refused allocation");
    }
}

/// A driver may allow no more than 4096 allocations.
#[test]
fn vulkan_small_memory_shares_blocks() {
    let drivers = drivers();
    let backend = drivers.vulkan();
    let cpu = host(&backend);
    for device in open(&backend) {
        let count = || {
            let alive = drivers.alive();
            alive.iter().find_map(|alive| alive.strip_suffix(" memory")?.parse::<u64>().ok()).unwrap_or(0)
        };
        let before = count();
        let small: Vec<_> = (0..500).map(|_| device.alloc(10_000, MemoryKind::Arena).unwrap()).collect();
        let pinned: Vec<_> = (0..500).map(|_| cpu.alloc(1000, MemoryKind::Pinned).unwrap()).collect();
        assert!(count() - before <= 1 + 1 + open(&backend).len() as u64, "{:?}", drivers.alive());
        drop((small, pinned));
        assert_comes_to_nothing(&*device, "small memory");
        assert!(device.trim().unwrap() > 0, "the last block is kept until a trim");
        assert_eq!(count(), before, "{:?}", drivers.alive());
    }
}

#[test]
fn vulkan_pins_no_more_than_the_cap() {
    let drivers = drivers();
    let backend = drivers.vulkan().pinned_cap(ByteSize(3 << 20));
    let (cpu, _opened) = (host(&backend), open(&backend));
    let is_pinned = |buffer: &BufMut| buffer.block().pinned();
    let first = cpu.alloc(2 * MIB, MemoryKind::Pinned).unwrap();
    let second = cpu.alloc(2 * MIB, MemoryKind::Pinned).unwrap();
    let small = cpu.alloc(1000, MemoryKind::Pinned).unwrap();
    assert_eq!([is_pinned(&first), is_pinned(&second), is_pinned(&small)], [true, false, true]);
    drop(first);
    assert!(is_pinned(&cpu.alloc(2 * MIB, MemoryKind::Pinned).unwrap()));
}

/// What cannot be pinned is ordinary memory, and the next call works.
#[test]
fn vulkan_pinning_that_fails_falls_back() {
    let drivers = drivers();
    let backend = drivers.vulkan();
    let (cpu, opened) = (host(&backend), open(&backend));
    for bytes in [1000, 3 * MIB] {
        for nth in 1..20 {
            drivers.fail(nth, Failure::HostMemory);
            let buffer = filled(&*cpu, 1, bytes);
            drivers.fail(0, Failure::HostMemory);
            assert!(nth > 1 || drivers.failed().is_some(), "a new region is the driver's business");
            drivers.forget_failed();
            let want = self::bytes(&buffer);
            for device in &opened {
                assert_eq!(fetch(&**device, &*cpu, &send(&**device, &buffer)), want, "call {nth}");
            }
        }
    }
}

/// Later pieces of one copy win where they write what earlier ones wrote.
#[test]
fn vulkan_pieces_are_copied_in_order() {
    let drivers = drivers();
    let backend = drivers.vulkan();
    let cpu = host(&backend);
    for device in open(&backend) {
        let (a, b) = (filled(&*cpu, 1, 300_000), filled(&*cpu, 2, 300_000));
        let whole = |src: &Buf, at: usize, bytes: usize| Piece { src: src.clone(), from: 0..bytes, at };
        let pieces = vec![whole(&a, 0, 300_000), whole(&b, 1000, 200_000), whole(&a, 1500, 100_000), whole(&b, 0, 7)];
        let stream = device.stream(Role::Upload).unwrap();
        let dst = device.alloc(300_000, MemoryKind::Arena).unwrap();
        let got = stream.copy(Transfer::new(pieces, dst).unwrap()).unwrap().chain().freeze();
        let (from_a, from_b) = (bytes(&a), bytes(&b));
        let mut want = from_a.clone();
        want[1000..201_000].copy_from_slice(&from_b[..200_000]);
        want[1500..101_500].copy_from_slice(&from_a[..100_000]);
        want[..7].copy_from_slice(&from_b[..7]);
        assert!(fetch(&*device, &*cpu, &got) == want);
    }
}

/// Copies of memory that no device can reach pass a buffer, in parts.
#[test]
fn vulkan_ordinary_memory_of_any_size_is_copied() {
    let drivers = drivers();
    let backend = drivers.vulkan().pinned_cap(ByteSize(0));
    let cpu = host(&backend);
    for device in open(&backend) {
        for size in [1, 4 * MIB, 4 * MIB + 1, 13 * MIB + 123] {
            let source = filled(&*cpu, 3, size);
            assert!(device.copies_block(source.block()));
            assert!(fetch(&*device, &*cpu, &send(&*device, &source)) == bytes(&source), "{size} bytes");
        }
    }
}

/// Neither half of the buffer is filled again, or read, before the device is done with it, however late it is.
#[test]
fn vulkan_copies_through_a_buffer_wait_for_a_late_device() {
    let drivers = drivers();
    let backend = drivers.vulkan().pinned_cap(ByteSize(0));
    let cpu = host(&backend);
    for device in open(&backend) {
        let source = filled(&*cpu, 8, 13 * MIB);
        let (up, down) = (device.stream(Role::Upload).unwrap(), device.stream(Role::Download).unwrap());
        up.occupy(Duration::from_millis(100)).unwrap();
        let dst = device.alloc(source.bytes(), MemoryKind::Arena).unwrap();
        let there = up.copy(Transfer::whole(&source, dst).unwrap()).unwrap().wait(DEADLINE).unwrap().freeze();
        assert!(fetch(&*device, &*cpu, &there) == bytes(&source), "up");
        down.occupy(Duration::from_millis(100)).unwrap();
        let dst = cpu.alloc(source.bytes(), MemoryKind::Whole).unwrap();
        let back = down.copy(Transfer::whole(&there, dst).unwrap()).unwrap().wait(DEADLINE).unwrap().freeze();
        assert!(bytes(&back) == bytes(&source), "down");
    }
}

/// A wait alone does not make a device's writes visible to the host.
#[test]
fn vulkan_every_copy_is_shown_to_the_host() {
    let drivers = drivers();
    for (what, backend) in drivers.hosts() {
        let cpu = host(&backend);
        for device in open(&backend) {
            let source = filled(&*cpu, 4, 5 * MIB);
            assert!(fetch(&*device, &*cpu, &send(&*device, &source)) == bytes(&source));
        }
        let (copying, shown) = drivers.copying_and_shown();
        assert!(copying > 0 && copying == shown, "{what}: {shown} of {copying}");
    }
}

#[test]
fn vulkan_a_stream_copies_no_memory_of_another_device() {
    let drivers = drivers();
    let backend = drivers.vulkan();
    let (cpu, opened) = (host(&backend), open(&backend));
    let a = &opened[0];
    if let Some(b) = opened.get(1) {
        let there = send(&**b, &filled(&*cpu, 5, 3000));
        let dst = a.alloc(3000, MemoryKind::Arena).unwrap();
        let refused = a.stream(Role::Upload).unwrap().copy(Transfer::whole(&there, dst).unwrap()).unwrap_err();
        assert_eq!(refused.error.kind(), ErrorKind::Unreachable, "{}", refused.error);
    }
    let host_to_host = Transfer::whole(&filled(&*cpu, 6, 10), cpu.alloc(10, MemoryKind::Pinned).unwrap()).unwrap();
    let refused = a.stream(Role::Upload).unwrap().copy(host_to_host).unwrap_err();
    assert_eq!(refused.error.kind(), ErrorKind::Unreachable, "{}", refused.error);
}

/// A device in use by two threads, each with streams of its own, and both with one stream.
#[test]
fn vulkan_streams_of_two_threads_keep_apart() {
    let drivers = drivers();
    for (_, backend) in drivers.hosts() {
        let cpu = host(&backend);
        for device in open(&backend) {
            let shared = device.stream(Role::Upload).unwrap();
            std::thread::scope(|scope| {
                for thread in 0..2u8 {
                    let (cpu, device, shared) = (&*cpu, &*device, &*shared);
                    scope.spawn(move || {
                        for round in 0..20 {
                            let source = filled(cpu, thread * 100 + round, 20_000 + usize::from(round) * 37);
                            let dst = device.alloc(source.bytes(), MemoryKind::Arena).unwrap();
                            let there = shared.copy(Transfer::whole(&source, dst).unwrap()).unwrap().chain().freeze();
                            assert_eq!(fetch(device, cpu, &there), bytes(&source), "thread {thread}, round {round}");
                            assert_eq!(fetch(device, cpu, &send(device, &source)), bytes(&source));
                        }
                    });
                }
            });
        }
    }
}

#[test]
fn vulkan_time_passes_on_a_stream_in_its_turn() {
    let drivers = drivers();
    let backend = drivers.vulkan();
    let cpu = host(&backend);
    for device in open(&backend) {
        let (compute, other) = (device.stream(Role::Compute).unwrap(), device.stream(Role::Compute).unwrap());
        let begin = std::time::Instant::now();
        compute.occupy(Duration::from_millis(20)).unwrap();
        compute.occupy(Duration::from_millis(20)).unwrap();
        let event = compute.record(&[]).unwrap();
        other.wait(&event).unwrap();
        other.record(&[]).unwrap().wait(DEADLINE).unwrap();
        assert!(begin.elapsed() >= Duration::from_millis(40));
        assert!(event.is_complete());
        // Work of another stream comes before.
        let begin = std::time::Instant::now();
        other.occupy(Duration::from_millis(20)).unwrap();
        compute.wait(&other.record(&[]).unwrap()).unwrap();
        compute.occupy(Duration::from_millis(20)).unwrap();
        compute.record(&[]).unwrap().wait(DEADLINE).unwrap();
        assert!(begin.elapsed() >= Duration::from_millis(40));
        // A stream that is dropped meanwhile finishes.
        compute.occupy(Duration::from_millis(5)).unwrap();
        let source = filled(&*cpu, 7, 1000);
        let dst = device.alloc(1000, MemoryKind::Arena).unwrap();
        let there = compute.copy(Transfer::whole(&source, dst).unwrap()).unwrap().chain().freeze();
        drop(compute);
        assert_eq!(fetch(&*device, &*cpu, &there), bytes(&source));
    }
}

#[test]
fn vulkan_a_lost_device_says_so_at_once_and_leaves_no_charge() {
    let drivers = drivers();
    {
        let backend = drivers.vulkan();
        let (cpu, opened) = (host(&backend), open(&backend));
        let device = &opened[0];
        let host_copy = filled(&*cpu, 3, 5000);
        let there = send(&**device, &host_copy);
        assert_eq!(fetch(&**device, &*cpu, &there), bytes(&host_copy));
        let (stream, down) = (device.stream(Role::Upload).unwrap(), device.stream(Role::Download).unwrap());
        let dst = device.alloc(5000, MemoryKind::Arena).unwrap();
        drivers.fail_next("vkQueueSubmit2", Failure::Lost);
        let error = stream.copy(Transfer::whole(&host_copy, dst).unwrap()).unwrap_err().error;
        assert_eq!(drivers.failed().as_deref(), Some("vkQueueSubmit2"));
        assert_eq!(error.kind(), ErrorKind::DeviceLost, "{error}");
        assert!(error.to_string().contains("vkQueueSubmit2"), "{error}");
        assert!(matches!(device.health(), Health::Lost(_)));
        let calls = drivers.calls();
        assert_eq!(device.alloc(1, MemoryKind::Arena).unwrap_err().kind(), ErrorKind::DeviceLost);
        assert_eq!(drivers.calls(), calls, "a lost device is not asked again");
        assert_eq!(bytes(&host_copy).len(), 5000, "the host's copy stays good");
        drop((there, stream));
        assert_comes_to_nothing(&**device, "a lost device");
        // What is refused afterwards uses nothing: the host's memory comes back.
        let (stream, before) = (device.stream(Role::Upload), cpu.ledger().charged());
        assert_eq!(stream.unwrap_err().kind(), ErrorKind::DeviceLost);
        let other = filled(&*cpu, 4, 5000);
        assert_eq!(down.record(std::slice::from_ref(&other)).unwrap_err().kind(), ErrorKind::DeviceLost);
        drop(other);
        assert_eq!(cpu.ledger().charged(), before, "a use that was refused keeps nothing");
    }
    let left = drivers.alive();
    for kind in ["device", "command pool", "semaphore"] {
        assert!(left.iter().any(|left| left.ends_with(kind)), "a lost device may be using its {kind}: {left:?}");
    }
    drivers.forget_left();
}

#[cfg(target_os = "linux")]
#[expect(unsafe_code, reason = "forks, which no crate of the tests has")]
mod forks {
    use super::*;

    unsafe extern "C" {
        safe fn fork() -> i32;
        safe fn _exit(status: i32) -> !;
        fn waitpid(process: i32, status: *mut i32, options: i32) -> i32;
    }

    /// A fork of the process has none of the devices and of the pinned pages: everything says so, nothing is freed there, and the
    /// parent goes on.
    #[test]
    fn vulkan_a_fork_of_the_process_gets_errors() {
        let drivers = drivers();
        let backend = drivers.vulkan();
        let (cpu, opened) = (host(&backend), open(&backend));
        let device = &opened[0];
        let (small, large) = (filled(&*cpu, 1, 1000), filled(&*cpu, 2, 2 * MIB));
        let there = send(&**device, &large);
        let down = device.stream(Role::Download).unwrap();
        let transfer = Transfer::whole(&there, cpu.alloc(2 * MIB, MemoryKind::Pinned).unwrap()).unwrap();
        match fork() {
            0 => {
                let kinds = [
                    device.memory().err().map(|error| error.kind()),
                    device.alloc(8, MemoryKind::Arena).err().map(|error| error.kind()),
                    device.stream(Role::Upload).err().map(|error| error.kind()),
                    down.record(&[]).err().map(|error| error.kind()),
                    down.copy(transfer).err().map(|rejected| rejected.error.kind()),
                    small.host(DEADLINE).err().map(|error| error.kind()),
                    cpu.alloc(8, MemoryKind::Pinned).err().map(|error| error.kind()),
                ];
                let right = kinds.iter().all(|kind| *kind == Some(ErrorKind::Forked));
                drop((small, there));
                _exit(if right {
                    0
                } else {
                    1 + kinds.iter().position(|k| *k != Some(ErrorKind::Forked)).unwrap() as i32
                });
            }
            child => {
                let mut status = -1;
                // SAFETY: the pointer is to a living integer.
                let waited = unsafe { waitpid(child, &raw mut status, 0) };
                assert_eq!((waited, status), (child, 0), "the child saw something else (status {status:#x})");
            }
        }
        down.copy(transfer).unwrap().wait(DEADLINE).unwrap();
        assert_eq!(fetch(&**device, &*cpu, &there), bytes(&large));
    }
}
