//! The CUDA backend over the stand-in driver: the conformance suite, the rules of docs/testing.md, and faults.
#![cfg(all(feature = "cuda", target_os = "linux"))]

mod card;

use std::sync::Arc;
use std::time::{Duration, Instant};

use card::{DEADLINE, assert_clean, devices, driver, named, stand_in};
use cuda_standin::{Config, Effect, Fault, FaultPlan, Link, MemoryMode};
use tensor_offload::backend::{
    Backend, Buf, Cuda, Device, Found, Health, MemoryKind, Piece, Role, Route, Transfer, conformance,
};
use tensor_offload::device::DeviceKind;
use tensor_offload::{ByteSize, DeviceId, Error, ErrorKind};

const MIB: usize = 1 << 20;

fn open(backend: &Cuda, id: DeviceId) -> Arc<dyn Device> {
    backend.open(id).unwrap()
}

fn filled(host: &dyn Device, seed: u8, bytes: usize) -> Buf {
    let mut buffer = host.alloc(bytes, MemoryKind::Pinned).unwrap();
    let pattern = (0..bytes).map(|i| (i as u8).wrapping_mul(7) ^ (i >> 8) as u8 ^ seed);
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

/// The machines over which the suite runs: both ways of treating freed memory, work that starts late, and a card
/// without pools.
fn machines() -> Vec<Config> {
    let two = || Config::with_devices(&[64 << 20, 32 << 20]).all_peers();
    let mut without_pools = two();
    without_pools.devices.iter_mut().for_each(|device| device.pools = false);
    vec![
        two().memory(MemoryMode::Quarantine),
        two().memory(MemoryMode::Reuse).seed(11),
        two().memory(MemoryMode::Reuse).late_micros(10_000_000),
        without_pools.memory(MemoryMode::Reuse).seed(12),
    ]
}

#[test]
fn cuda_conforms_on_every_machine() {
    // A driver that is named is one machine, as it is.
    let machines = if named() { machines().split_off(3) } else { machines() };
    for config in machines {
        let cuda = driver(&config);
        {
            let backend = Cuda::new();
            let cpu = open(&backend, DeviceId::CPU);
            let devices = devices();
            assert!(!devices.is_empty(), "{:?}", backend.discover());
            for id in devices {
                conformance::check(&*open(&backend, id), &*cpu);
            }
            conformance::check(&*cpu, &*cpu);
        }
        cuda.assert_clean();
    }
}

#[test]
fn cuda_tells_what_a_device_is() {
    let Some(cuda) = stand_in(&Config::with_devices(&[8 << 30, 4 << 30])) else { return };
    let backend = Cuda::new();
    let found = backend.discover();
    let Found::Here(second) = &found[1] else { panic!("{found:?}") };
    assert_eq!((second.id, second.total, second.free), (DeviceId::cuda(1), 4 << 30, None));
    let gpu = second.gpu.as_ref().unwrap();
    assert_eq!((gpu.compute_capability, gpu.pci_bus_id.as_str()), ((8, 0), "00000000:02:00.0"));
    assert!(gpu.uuid.as_ref().unwrap().starts_with("GPU-"), "{:?}", gpu.uuid);
    assert_eq!(cuda.report().calls_of("cuDevicePrimaryCtxRetain"), 0, "looking opens nothing");
    assert_eq!(backend.open(DeviceId::cuda(7)).unwrap_err().kind(), ErrorKind::UnknownDevice);
}

#[test]
fn cuda_says_why_there_is_no_device() {
    let Some(cuda) = stand_in(&Config::default()) else { return };
    let why = |plan: FaultPlan| {
        cuda.fault(&plan);
        let found = Cuda::new().discover();
        cuda.no_faults();
        match &found[..] {
            [Found::Absent { kind: DeviceKind::Cuda, why }] => why.clone(),
            other => panic!("{other:?}"),
        }
    };
    assert!(why(FaultPlan { no_devices: true, ..FaultPlan::default() }).contains("no CUDA"));
    let old = why(FaultPlan { driver_version: Some(10_020), ..FaultPlan::default() });
    assert!(old.contains("10.2") && old.contains("11.4"), "{old}");
    let broken = why(FaultPlan::one(Fault::nth("cuInit", 1, Effect::Fail(999))));
    assert!(broken.contains("cuInit") && broken.contains("UNKNOWN"), "{broken}");
    let nowhere = Cuda::new().library("/nowhere/libcuda.so.1").discover();
    assert!(
        matches!(&nowhere[..], [Found::Absent { why, .. }] if why.contains("/nowhere/libcuda.so.1")),
        "{nowhere:?}"
    );
}

#[test]
fn cuda_out_of_memory_says_what_was_asked_and_what_is_free() {
    let Some(cuda) = stand_in(&Config::with_devices(&[64 << 20])) else { return };
    {
        let backend = Cuda::new();
        let card = open(&backend, DeviceId::cuda(0));
        let _held = card.alloc(40 * MIB, MemoryKind::Whole).unwrap();
        let others = cuda_standin_other_program(&card);
        let error = card.alloc(20 * MIB, MemoryKind::Arena).unwrap_err();
        let Error::OutOfMemory { device, requested, available, .. } = error else { panic!("{error}") };
        assert_eq!((device, requested, available), (DeviceId::cuda(0), 20 << 20, 8 << 20));
        drop(others);
        card.alloc(20 * MIB, MemoryKind::Arena).unwrap();
    }
    assert_clean(&cuda);
}

/// Memory that someone else holds: charged to nobody's ledger.
fn cuda_standin_other_program(card: &Arc<dyn Device>) -> impl Drop + use<> {
    use tensor_offload::backend::Ledger;
    let elsewhere = Ledger::new(card.id(), u64::MAX);
    struct Held(Option<tensor_offload::backend::BufMut>);
    impl Drop for Held {
        fn drop(&mut self) {
            self.0 = None;
        }
    }
    Held(Some(card.allocate(elsewhere.charge(16 << 20).unwrap(), MemoryKind::Whole).unwrap()))
}

/// Case 24: what cannot be pinned is ordinary memory, and the next call works.
#[test]
fn cuda_pinning_that_fails_falls_back_to_pageable_memory() {
    let Some(cuda) = stand_in(&Config::with_devices(&[64 << 20])) else { return };
    {
        let backend = Cuda::new();
        let (cpu, card) = (open(&backend, DeviceId::CPU), open(&backend, DeviceId::cuda(0)));
        for bytes in [1000, 3 * MIB] {
            cuda.fault(&FaultPlan::one(Fault::pin(1).onwards()));
            let pageable = filled(&*cpu, 1, bytes);
            cuda.no_faults();
            assert_eq!(cuda.report().live_pinned_bytes, 0, "nothing was pinned");
            let pinned = filled(&*cpu, 1, bytes);
            assert_eq!(cuda.report().live_pinned_bytes, bytes as u64, "the next one is");
            let want = pageable.host(DEADLINE).unwrap().unwrap().to_vec();
            assert_eq!(fetch(&*card, &*cpu, &send(&*card, &pageable)), want);
            assert_eq!(fetch(&*card, &*cpu, &send(&*card, &pinned)), want);
            drop((pageable, pinned));
            let until = Instant::now() + DEADLINE;
            while cuda.report().live_pinned > 0 && Instant::now() < until {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }
    assert_clean(&cuda);
}

#[test]
fn cuda_pins_no_more_than_the_cap() {
    let Some(cuda) = stand_in(&Config::with_devices(&[64 << 20])) else { return };
    {
        let backend = Cuda::new().pinned_cap(ByteSize(3 << 20));
        let (cpu, _card) = (open(&backend, DeviceId::CPU), open(&backend, DeviceId::cuda(0)));
        let first = cpu.alloc(2 * MIB, MemoryKind::Pinned).unwrap();
        let _second = cpu.alloc(2 * MIB, MemoryKind::Pinned).unwrap();
        assert_eq!(cuda.report().live_pinned_bytes, 2 << 20);
        drop(first);
        let _third = cpu.alloc(2 * MIB, MemoryKind::Pinned).unwrap();
        assert_eq!(cuda.report().live_pinned_bytes, 2 << 20);
    }
    assert_clean(&cuda);
}

/// Case 28: in the right direction, tried out first, through the host where it does not work.
#[test]
fn cuda_peers_are_asked_for_and_verified() {
    let mut one_way = Config::with_devices(&[64 << 20, 64 << 20]).all_peers();
    // Contexts of device 0 reach the memory of device 1.
    one_way.peers.retain(|peer| peer.from == 0 && peer.to == 1);
    let Some(cuda) = stand_in(&one_way) else { return };
    {
        let backend = Cuda::new();
        let cpu = open(&backend, DeviceId::CPU);
        let (a, b) = (open(&backend, DeviceId::cuda(0)), open(&backend, DeviceId::cuda(1)));
        assert_eq!(a.route_from(&*b), Route::Direct, "device 0 reaches the memory of device 1");
        assert!(matches!(b.route_from(&*a), Route::Staged(_)), "and not the other way");
        let there = send(&*b, &filled(&*cpu, 5, 300_000));
        let here = send(&*a, &there);
        assert_eq!(fetch(&*a, &*cpu, &here), fetch(&*b, &*cpu, &there));
        let refused = b
            .stream(Role::Upload)
            .unwrap()
            .copy(Transfer::whole(&here, b.alloc(300_000, MemoryKind::Arena).unwrap()).unwrap());
        assert!(refused.unwrap_err().error.to_string().contains("through the host"));
    }
    assert_clean(&cuda);
}

#[test]
fn cuda_peers_that_lie_are_not_used() {
    let Some(cuda) = stand_in(&Config::with_devices(&[64 << 20, 64 << 20]).all_peers()) else { return };
    cuda.fault(&FaultPlan { lying_peers: true, ..FaultPlan::default() });
    {
        let backend = Cuda::new();
        let (a, b) = (open(&backend, DeviceId::cuda(0)), open(&backend, DeviceId::cuda(1)));
        let Route::Staged(why) = a.route_from(&*b) else { panic!("a lying peer was believed") };
        assert!(why.contains("wrong bytes"), "{why}");
    }
    assert_clean(&cuda);
}

#[test]
fn cuda_a_lost_device_says_so_at_once_and_leaves_no_charge() {
    let Some(cuda) = stand_in(&Config::with_devices(&[64 << 20])) else { return };
    {
        let backend = Cuda::new();
        let (cpu, card) = (open(&backend, DeviceId::CPU), open(&backend, DeviceId::cuda(0)));
        let host_copy = filled(&*cpu, 3, 5000);
        let on_card = send(&*card, &host_copy);
        cuda.fault(&FaultPlan::one(Fault::nth("cuMemcpyHtoDAsync_v2", 1, Effect::Sticky(700))));
        let stream = card.stream(Role::Upload).unwrap();
        let dst = card.alloc(5000, MemoryKind::Arena).unwrap();
        let error = stream.copy(Transfer::whole(&host_copy, dst).unwrap()).unwrap_err().error;
        assert_eq!(error.kind(), ErrorKind::DeviceLost, "{error}");
        assert!(error.to_string().contains("cuMemcpyHtoDAsync"), "{error}");
        assert!(matches!(card.health(), Health::Lost(_)));
        let calls = cuda.report().own_calls;
        assert_eq!(card.alloc(1, MemoryKind::Arena).unwrap_err().kind(), ErrorKind::DeviceLost);
        assert_eq!(cuda.report().own_calls, calls, "a lost device is not asked again");
        assert!(host_copy.host(DEADLINE).unwrap().is_some(), "the host's copy stays good");
        drop(on_card);
        let until = Instant::now() + DEADLINE;
        while card.ledger().charged() > 0 && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(card.ledger().charged(), 0);
    }
}

/// A device in use by two threads, each with streams of its own.
#[test]
fn cuda_streams_of_two_threads_keep_apart() {
    let cuda = driver(&Config::with_devices(&[64 << 20]).memory(MemoryMode::Reuse).seed(3));
    {
        let backend = Cuda::new();
        let (cpu, card) = (open(&backend, DeviceId::CPU), open(&backend, DeviceId::cuda(0)));
        std::thread::scope(|scope| {
            for thread in 0..2u8 {
                let (cpu, card) = (&*cpu, &*card);
                scope.spawn(move || {
                    for round in 0..40 {
                        let source = filled(cpu, thread * 100 + round, 20_000 + usize::from(round) * 37);
                        let want = source.host(DEADLINE).unwrap().unwrap().to_vec();
                        assert_eq!(fetch(card, cpu, &send(card, &source)), want, "thread {thread}, round {round}");
                    }
                });
            }
        });
    }
    cuda.assert_clean();
}

/// Uploads hide behind compute, on links of 2 GB/s.
#[test]
fn cuda_copies_run_beside_compute() {
    let mut config = Config::with_devices(&[64 << 20]).links(Link::new(2_000_000_000, 0));
    (config.check_sources, config.function_micros) = (false, 100_000);
    let Some(cuda) = stand_in(&config) else { return };
    {
        let backend = Cuda::new();
        let (cpu, card) = (open(&backend, DeviceId::CPU), open(&backend, DeviceId::cuda(0)));
        let source = filled(&*cpu, 1, 10 * MIB);
        let (up, compute) = (card.stream(Role::Upload).unwrap(), card.stream(Role::Compute).unwrap());
        let mut slot = card.alloc(10 * MIB, MemoryKind::Arena).unwrap();
        slot.wait_unused(DEADLINE).unwrap();
        let begin = cuda.mark();
        compute.occupy(Duration::from_millis(1)).unwrap();
        let piece = Piece { src: source.clone(), from: 0..10 * MIB, at: 0 };
        let flight = up.copy(Transfer::new(vec![piece], slot).unwrap()).unwrap();
        flight.wait(DEADLINE).unwrap();
        // In counted time: a copy of 5 ms waits for no compute of 100 ms.
        assert_eq!(cuda.mark() - begin, Duration::from_millis(100));
        compute.record(&[]).unwrap().wait(DEADLINE).unwrap();
    }
    assert_clean(&cuda);
}

/// Events that were let go of are recorded anew, and a trim gives them back.
#[test]
fn cuda_events_are_used_again() {
    let Some(cuda) = stand_in(&Config::with_devices(&[64 << 20]).memory(MemoryMode::Reuse).seed(5)) else { return };
    {
        let backend = Cuda::new();
        let (cpu, card) = (open(&backend, DeviceId::CPU), open(&backend, DeviceId::cuda(0)));
        let (source, stream) = (filled(&*cpu, 2, 3000), card.stream(Role::Upload).unwrap());
        let round = || {
            let mut slots = Vec::new();
            for _ in 0..20 {
                let slot = card.alloc(3000, MemoryKind::Arena).unwrap();
                slots.push(stream.copy(Transfer::whole(&source, slot).unwrap()).unwrap());
            }
            slots.into_iter().for_each(|slot| drop(slot.wait(DEADLINE).unwrap()));
            source.wait_unused(DEADLINE).unwrap();
            // The reaper lets go of the last of them a moment later.
            let until = Instant::now() + DEADLINE;
            while card.ledger().charged() > 0 && Instant::now() < until {
                std::thread::sleep(Duration::from_millis(1));
            }
            assert_eq!(card.ledger().charged(), 0);
            cuda.report().calls_of("cuEventCreate")
        };
        round();
        // Of each copy one event lives on with the source, whose list the next use clears.
        let settled = round();
        assert_eq!((round(), round()), (settled, settled), "no more events are made");
        card.trim().unwrap();
        assert!(cuda.report().live_events <= 1, "{}", cuda.report());
    }
    assert_clean(&cuda);
}
