//! Whether the checks would notice: a wait or a barrier is left out of the calls of a right program, and the validation layer has
//! to say so. What is left out is what `VULKAN_OMISSION` names; `scripts/vulkan-check` runs each in a process of its own, which
//! may well end badly.
#![cfg(feature = "vulkan")]

mod support;
mod vulkan_devices;

use std::time::Duration;

use support::whole_path::{source, whole_path};
use tensor_offload::backend::{Backend, Buf, Dequantise, Device, MemoryKind, Piece, Role, Stream, Transfer};
use tensor_offload::{DType, DeviceId, Result};
use vulkan_devices::open;
use vulkan_probe::Omission;

fn upload(device: &dyn Device, src: &Buf) -> Result<Buf> {
    upload_on(&*device.stream(Role::Upload)?, device, src)
}

fn upload_on(stream: &dyn Stream, device: &dyn Device, src: &Buf) -> Result<Buf> {
    let dst = device.alloc(src.bytes(), MemoryKind::Arena)?;
    Ok(stream.copy(Transfer::whole(src, dst)?)?.chain().freeze())
}

/// Kernels that wait for copies, one after the other to one place, in several parts each; and copies that wait for them.
fn run_kernels(device: &dyn Device, source: &Buf) -> Result<()> {
    let (upload, stream) = (device.stream(Role::Upload)?, device.stream(Role::Compute)?);
    let kernels = device.kernels().expect("kernels");
    let (from, to, values) = (DType::Q8_0, DType::BF16, 1 << 14);
    kernels.dequantises(&*stream, from, to).expect("a kernel");
    upload.occupy(Duration::from_millis(100))?;
    let mut dst = device.alloc(1 << 16, MemoryKind::Arena)?;
    for _ in 0..4 {
        let blocks = upload_on(&*upload, device, source)?;
        // In the middle of a word, so that two parts have one in common.
        let work = Dequantise::new((blocks, 0, from), values, (dst, 2, to))?;
        let values = kernels.dequantise(&*stream, work)?.chain().freeze();
        upload_on(&*upload, device, &values)?;
        dst = values.try_reclaim().expect("the last clone");
    }
    Ok(())
}

/// What is let go of while the device is to use it: memory of copies and of kernels, a semaphore, and streams.
fn let_go(device: &dyn Device, source: &Buf) -> Result<()> {
    let (other, stream) = (device.stream(Role::Download)?, device.stream(Role::Compute)?);
    let done = other.record(&[])?;
    done.wait(Duration::from_secs(20))?;
    let whole = |bytes| device.alloc(bytes, MemoryKind::Whole);
    let blocks = upload(device, source)?;
    stream.occupy(Duration::from_millis(50))?;
    stream.wait(&done)?;
    drop((other, done));
    drop(stream.copy(Transfer::whole(source, whole(source.bytes())?)?)?.chain());
    let work = Dequantise::new((blocks, 0, DType::Q8_0), 1024, (whole(2048)?, 0, DType::BF16))?;
    drop(device.kernels().expect("kernels").dequantise(&*stream, work)?.chain());
    Ok(())
}

/// Copies that wait for each other in every way, then kernels.
fn work(backend: &impl Backend, device: &dyn Device) -> Result<()> {
    let cpu = backend.open(DeviceId::CPU)?;
    let source = cpu.alloc(1 << 20, MemoryKind::Pinned)?.freeze();
    let (up, compute, down) =
        (device.stream(Role::Upload)?, device.stream(Role::Compute)?, device.stream(Role::Download)?);
    let mut slot = device.alloc(source.bytes(), MemoryKind::Arena)?;
    // All is queued before anything is done, so that the host's waits do not take the place of those of the device.
    up.occupy(Duration::from_millis(100))?;
    for _ in 0..8 {
        let filled = up.copy(Transfer::whole(&source, slot)?)?.order(&*compute, Duration::from_secs(20))?;
        let copy = compute.copy(Transfer::whole(&filled, device.alloc(source.bytes(), MemoryKind::Arena)?)?)?;
        let copy =
            compute.copy(Transfer::whole(&copy.chain().freeze(), device.alloc(source.bytes(), MemoryKind::Arena)?)?)?;
        let back =
            down.copy(Transfer::whole(&copy.chain().freeze(), cpu.alloc(source.bytes(), MemoryKind::Pinned)?)?)?;
        drop(back);
        compute.record(std::slice::from_ref(&filled))?;
        slot = filled.try_reclaim().expect("the last clone");
        // Twice to one place.
        let piece = |at| Piece { src: source.clone(), from: 0..1000, at };
        slot = up.copy(Transfer::new(vec![piece(0), piece(500)], slot)?)?.chain();
        slot = up.copy(Transfer::whole(&source, slot)?)?.chain();
    }
    drop(slot);
    // From two copies of one stream.
    let (first, second) = (upload_on(&*up, device, &source)?, upload_on(&*up, device, &source)?);
    let pieces = [first, second].map(|src| Piece { src, from: 0..1000, at: 0 });
    drop(compute.copy(Transfer::new(pieces.into(), device.alloc(source.bytes(), MemoryKind::Arena)?)?)?.chain());
    // Twice to one place through a buffer.
    let plain = cpu.alloc(1000, MemoryKind::Whole)?.freeze();
    let pieces = [0, 500].map(|at| Piece { src: plain.clone(), from: 0..1000, at });
    drop(compute.copy(Transfer::new(pieces.into(), device.alloc(source.bytes(), MemoryKind::Arena)?)?)?.chain());
    for _ in 0..8 {
        drop(upload(device, &source)?);
    }
    run_kernels(device, &source)?;
    let_go(device, &source)
}

#[test]
#[ignore = "a process for each, by scripts/vulkan-check"]
fn vulkan_what_is_left_out_is_noticed() {
    let name = std::env::var("VULKAN_OMISSION").unwrap();
    let omission = Omission::ALL.into_iter().find(|(known, _)| *known == name).map(|(_, omission)| omission);
    assert!(omission.is_some() || name == "nothing", "{name} is not known");
    let probe = vulkan_probe::session();
    probe.limit_bindings(10_000);
    let backend = tensor_offload::backend::Vulkan::new().library(probe.library()).software(true);
    let opened = open(&backend);
    omission.iter().for_each(|omission| probe.omit(*omission));
    // A wait of the host, such as that of the thread that frees memory, may happen to order what was not.
    for _ in 0..50 {
        for device in &opened {
            let outcome = work(&backend, &**device);
            eprintln!("{}: {outcome:?}", device.id());
        }
        if !probe.messages().is_empty() {
            break;
        }
    }
    let outcome =
        whole_path(&vulkan_devices::registry(backend), &source(), DeviceId::vulkan(0), "vulkan:0,60kb;cpu,*", 1);
    eprintln!("a model: {outcome:?}");
    if omission.is_none() {
        return assert!(probe.messages().is_empty() && outcome.is_ok(), "{outcome:?}, {:#?}", probe.messages());
    }
    assert!(probe.omissions() > 0, "there was nothing to leave out");
    assert!(!probe.messages().is_empty(), "{name} left out {} times, and nobody noticed", probe.omissions());
}
