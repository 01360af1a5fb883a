//! Decoding the lossless code as work of a CUDA device's streams: its order, and what is refused or fails.
#![cfg(all(feature = "cuda", target_os = "linux"))]

mod card;
mod codes;
mod support;

use std::sync::Arc;

use card::{assert_given_back, registry, stand_in, whatever_call_fails};
use codes::{normal, random_bytes, read, sent, stored, verdict};
use cuda_standin::{Config, Effect, Fault, FaultPlan, MemoryMode};
use cudarc::driver::CudaContext;
use cudarc::driver::sys::CUgraphInstantiate_flags;
use cudarc::driver::sys::CUstreamCaptureMode as Mode;
use tensor_offload::backend::{
    Backend, Buf, BufMut, Countdown, Cuda, Decompress, Device, Faulty, Host, MemoryKind, Operation, Role, Stream,
    Transfer,
};
use tensor_offload::lossless::{BLOCK_WEIGHTS as BLOCK, Code, compress};
use tensor_offload::{DType, DeviceId, Error, Registry, Result};

fn one_card() -> Config {
    Config::with_devices(&[64 << 20]).memory(MemoryMode::Reuse).late_micros(2000).seed(3)
}

/// The code is still on its way, the memory for the weights is being filled by another stream, and as soon as the work is queued the
/// code is overwritten. Without an order between any two of these the stand-in reports them.
#[test]
fn cuda_weights_come_after_their_code_and_before_what_follows() {
    let Some(cuda) = stand_in(&one_card().late_micros(10_000)) else { return };
    let devices = registry();
    let (device, host) = (devices.device(DeviceId::cuda(0)).unwrap(), devices.device(DeviceId::CPU).unwrap());
    let streams = [(); 4].map(|()| device.stream(Role::Upload).unwrap());
    let compute = device.stream(Role::Compute).unwrap();
    let pinned = |bytes: &[u8]| {
        let mut memory = host.alloc(bytes.len(), MemoryKind::Pinned).unwrap();
        memory.host_mut().unwrap().copy_from_slice(bytes);
        memory.freeze()
    };
    let there = |stream: usize, bytes: &[u8], dst: BufMut| {
        streams[stream].copy(Transfer::whole(&pinned(bytes), dst).unwrap()).unwrap().chain()
    };
    let memory = |bytes| device.alloc(bytes, MemoryKind::Whole).unwrap();
    let weights = stored(DType::F16, normal(3, 0.1).take(2 * BLOCK));
    let code = compress(DType::F16, &weights).unwrap();
    let src = there(0, &code, memory(code.len())).freeze();
    let dst = there(1, &random_bytes(6, weights.len()), memory(weights.len()));
    let told = there(3, &[0; 16], memory(16));
    let info = *Code::open(&code).unwrap().info();
    let work = Decompress::new((src.clone(), 0), info, (dst, 0), (told, 0)).unwrap();
    let flight = device.kernels().unwrap().decompress(&*compute, work).unwrap();
    let reclaimed = src.try_reclaim().unwrap();
    let overwritten = there(2, &random_bytes(7, code.len()), reclaimed);
    assert!(read(&device, flight.weights.chain()).unwrap() == weights);
    assert!(verdict(&device, flight.verdict.chain()));
    drop((overwritten, streams, compute, device, host));
    assert_given_back(&devices, &cuda, "an order of streams");
    drop(devices);
    card::assert_clean(&cuda);
}

/// A launch that the driver refuses returns the memory with the event after whatever may be under way.
#[test]
fn cuda_memory_of_a_refused_decoding_is_not_free_before_its_stream() {
    let Some(cuda) = stand_in(&one_card()) else { return };
    let devices = registry();
    let device = devices.device(DeviceId::cuda(0)).unwrap();
    let (kernels, compute) = (device.kernels().unwrap(), device.stream(Role::Compute).unwrap());
    kernels.decompresses(&*compute, DType::BF16).unwrap();
    let code = compress(DType::BF16, &stored(DType::BF16, normal(2, 0.1).take(1000))).unwrap();
    let info = *Code::open(&code).unwrap().info();
    let (src, told) = (sent(&device, &code).freeze(), sent(&device, &[0; 16]));
    let (refuses, held) =
        (Fault::nth("cuLaunchKernel", 1, Effect::Fail(701)), Fault::nth("cuLaunchHostFunc", 1, Effect::Hold));
    cuda.fault(&FaultPlan { faults: vec![refuses, held], ..FaultPlan::default() });
    compute.occupy(std::time::Duration::ZERO).unwrap();
    let dst = device.alloc(2000, MemoryKind::Whole).unwrap();
    let work = Decompress::new((src.clone(), 0), info, (dst, 0), (told, 0)).unwrap();
    let refused = kernels.decompress(&*compute, work).unwrap_err();
    assert!(refused.error.to_string().contains("cuLaunchKernel"), "{}", refused.error);
    assert_eq!((refused.dst.pending().len(), refused.verdict.pending().len()), (1, 1));
    cuda.no_faults();
    drop((refused, src, compute, device));
    assert_given_back(&devices, &cuda, "a refused launch");
    drop(devices);
    card::assert_clean(&cuda);
}

#[test]
fn cuda_kernels_refuse_what_they_cannot_decode_and_give_the_buffers_back() {
    let Some(cuda) = stand_in(&Config::with_devices(&[64 << 20, 64 << 20])) else { return };
    let devices = registry();
    let [device, other] = [0, 1].map(|number| devices.device(DeviceId::cuda(number)).unwrap());
    let (kernels, stream) = (device.kernels().unwrap(), device.stream(Role::Compute).unwrap());
    assert!(kernels.decompresses(&*stream, DType::I8).unwrap_err().contains("no kernel that decodes I8"));
    let code = compress(DType::BF16, &stored(DType::BF16, normal(2, 0.1).take(1000))).unwrap();
    let info = *Code::open(&code).unwrap().info();
    let memory = |device: &Arc<dyn Device>, bytes| device.alloc(bytes, MemoryKind::Whole).unwrap();
    let refused = |src: &Arc<dyn Device>, dst: &Arc<dyn Device>, told: &Arc<dyn Device>, stream: &dyn Stream| {
        let (src, dst, told) = (memory(src, code.len()), memory(dst, 2000), memory(told, 16));
        let work = Decompress::new((src.freeze(), 0), info, (dst, 0), (told, 0)).unwrap();
        let refused = kernels.decompress(stream, work).unwrap_err();
        assert_eq!((refused.dst.bytes(), refused.verdict.bytes()), (2000, 16));
        refused.error.to_string()
    };
    for (places, wanted) in [
        ([&other, &device, &device], "what is to be decompressed"),
        ([&device, &other, &device], "the memory for the weights of a code"),
        ([&device, &device, &other], "the memory for the verdict on a code"),
    ] {
        let told = refused(places[0], places[1], places[2], &*stream);
        assert!(told.contains(wanted) && told.contains("cuda:1"), "{told}");
    }
    let elsewhere = other.stream(Role::Compute).unwrap();
    assert!(refused(&device, &device, &device, &*elsewhere).contains("this stream"));
    assert_eq!(cuda.report().calls_of("cuLaunchKernel"), 0);
    drop((stream, elsewhere, device, other));
    assert_given_back(&devices, &cuda, "refusals");
    drop(devices);
    card::assert_clean(&cuda);
}

/// While the caller captures the stream, the kernels are not loaded.
#[test]
fn cuda_decoding_is_refused_while_its_stream_is_captured() {
    let Some(cuda) = stand_in(&one_card()) else { return };
    let devices = registry();
    let device = devices.device(DeviceId::cuda(0)).unwrap();
    let kernels = device.kernels().unwrap();
    let raw = CudaContext::new(0).unwrap().new_stream().unwrap();
    let compute = card::adopted(&device, &raw);
    let weights = stored(DType::BF16, normal(2, 0.1).take(1000));
    let code = compress(DType::BF16, &weights).unwrap();
    let info = *Code::open(&code).unwrap().info();
    let (src, dst) = (sent(&device, &code).freeze(), device.alloc(2000, MemoryKind::Whole).unwrap());
    let work = Decompress::new((src.clone(), 0), info, (dst, 0), (sent(&device, &[0; 16]), 0)).unwrap();
    raw.begin_capture(Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    kernels.decompresses(&*compute, DType::BF16).unwrap();
    let refused = kernels.decompress(&*compute, work).unwrap_err();
    assert!(matches!(refused.error, Error::Capturing { .. }), "{}", refused.error);
    assert_eq!(cuda.report().calls_of("cuModuleLoadData"), 0);
    raw.end_capture(CUgraphInstantiate_flags(0)).unwrap();
    let work = Decompress::new((src, 0), info, (refused.dst, 0), (refused.verdict, 0)).unwrap();
    let flight = kernels.decompress(&*compute, work).unwrap();
    assert!(read(&device, flight.weights.chain()).unwrap() == weights);
    assert!(verdict(&device, flight.verdict.chain()));
    drop((compute, raw, device));
    assert_given_back(&devices, &cuda, "a capture");
}

/// There is no memory for no weights, and nothing to launch.
#[test]
fn cuda_a_code_of_no_weights_is_sound() {
    let Some(cuda) = stand_in(&one_card()) else { return };
    let devices = registry();
    let device = devices.device(DeviceId::cuda(0)).unwrap();
    let (kernels, compute) = (device.kernels().unwrap(), device.stream(Role::Compute).unwrap());
    let code = compress(DType::F32, &[]).unwrap();
    let info = *Code::open(&code).unwrap().info();
    let (src, dst) = (sent(&device, &code).freeze(), device.alloc(0, MemoryKind::Whole).unwrap());
    let work = Decompress::new((src, 0), info, (dst, 0), (sent(&device, &[0; 16]), 0)).unwrap();
    let flight = kernels.decompress(&*compute, work).unwrap();
    assert!(verdict(&device, flight.verdict.chain()));
    assert_eq!((flight.weights.chain().bytes(), cuda.report().calls_of("cuLaunchKernel")), (0, 0));
    drop((compute, device));
    assert_given_back(&devices, &cuda, "no weights");
    drop(devices);
    card::assert_clean(&cuda);
}

/// Decodes one tensor, as a whole.
fn path(devices: &Registry) -> Result<()> {
    let (device, host) = (devices.device(DeviceId::cuda(0))?, devices.device(DeviceId::CPU)?);
    let (stream, compute) = (device.stream(Role::Upload)?, device.stream(Role::Compute)?);
    let kernels = device.kernels().ok_or_else(|| Error::Invalid { reason: "no kernels".to_owned() })?;
    let weights = stored(DType::BF16, normal(2, 0.1).take(1000));
    let code = compress(DType::BF16, &weights).unwrap();
    let info = *Code::open(&code).unwrap().info();
    let up = |bytes: &[u8]| -> Result<Buf> {
        let mut staged = host.alloc(bytes.len(), MemoryKind::Pinned)?;
        staged.host_mut().unwrap().copy_from_slice(bytes);
        Ok(stream
            .copy(Transfer::whole(&staged.freeze(), device.alloc(bytes.len(), MemoryKind::Whole)?)?)?
            .chain()
            .freeze())
    };
    let (src, told) = (up(&code)?, up(&[0; 16])?.try_reclaim().unwrap());
    let work = Decompress::new((src, 0), info, (device.alloc(2000, MemoryKind::Whole)?, 0), (told, 0))?;
    let flight = kernels.decompress(&*compute, work)?;
    assert!(read(&device, flight.weights.chain())? == weights);
    let told = read(&device, flight.verdict.chain())?;
    assert!(Decompress::is_sound(told[..].try_into().unwrap()));
    Ok(())
}

#[test]
fn cuda_decoding_keeps_nothing_whatever_call_fails() {
    whatever_call_fails(&one_card().late_micros(300), &[Effect::Fail(304), Effect::Sticky(700)], 0, registry, path);
}

/// Operations of the backend fail one by one, and are told.
#[test]
fn cuda_decoding_that_fails_is_told() {
    let Some(cuda) = stand_in(&one_card()) else { return };
    let countdown = Countdown::new();
    let faulty = Faulty::new(Cuda::new(), countdown.clone());
    let devices = Registry::new([Arc::new(faulty) as Arc<dyn Backend>, Arc::new(Host::new())]);
    path(&devices).unwrap();
    let operations = countdown.calls();
    assert_eq!(countdown.calls_of(Operation::Decompress), 1);
    for nth in 1..=operations {
        countdown.fail_nth(nth);
        if let Err(error) = path(&devices) {
            assert!(error.to_string().contains("on purpose"), "{error}");
        }
    }
    drop(devices);
    card::assert_clean(&cuda);
}
