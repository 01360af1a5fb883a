//! The caller's own streams and memory, over the stand-in driver: cudarc's here, by handle and address, and with the feature
//! `cudarc` as its types.
#![cfg(all(feature = "cuda", target_os = "linux"))]

mod card;

use std::sync::Arc;
use std::time::{Duration, Instant};

#[cfg(feature = "cudarc")]
use card::has_devices;
use card::{DEADLINE, Driver, adopted, driver, has_calls};
use cuda_standin::{Config, Effect, Fault, FaultPlan, MemoryMode};
use cudarc::driver::{CudaContext, CudaStream, DevicePtr, result};
use tensor_offload::backend::{Backend, BufMut, Cuda, Device, Host, MemoryKind, Role, Stream, Transfer};
use tensor_offload::{
    Checkpoint, DeviceId, ErrorKind, LayerGuard, LayerId, Loader, Planner, Registry, Streamer, TensorView, Weights,
    cuda,
};

/// What captures take, beyond what the library calls itself.
const CAPTURES: [&str; 4] = ["cuStreamBeginCapture_v2", "cuStreamEndCapture", "cuGraphGetNodes", "cuGraphDestroy"];

const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/data/tiny-llama");

fn machine() -> Config {
    Config::with_devices(&[64 << 20, 64 << 20]).memory(MemoryMode::Reuse).late_micros(10_000_000)
}

/// Streams a model on a stream of cudarc's that is adopted in some way, and compares every tensor as it is seen there.
fn streamed(
    stream: &Arc<CudaStream>,
    adopt: impl FnOnce(&Arc<dyn Device>) -> Arc<dyn Stream>,
    bytes_of: impl Fn(&TensorView<'_>) -> Vec<u8>,
) -> (Streamer, LayerGuard) {
    let devices = Registry::new([Arc::new(Cuda::new()) as Arc<dyn Backend>, Arc::new(Host::new())]);
    let checkpoint = Checkpoint::open(MODEL).unwrap();
    let weights = Weights::new(checkpoint.clone());
    let planner = Planner::new(weights.layout(), devices.machine()).allocation("cuda:0,60kb;cpu,*".parse().unwrap());
    let plan = planner.compute(DeviceId::cuda(0)).depth(1).plan().unwrap();
    let model = Arc::new(Loader::new(&devices).load(&weights, &plan).unwrap());
    let compute = adopt(model.residency().device());
    assert_eq!(cuda::stream_handle(&*compute), Some(stream.cu_stream().cast()));
    let mut streamer = Streamer::on(&model, compute).unwrap();
    for layer in model.layout().layer_ids().chain([1, 3].map(LayerId::new)) {
        let guard = streamer.layer(layer).unwrap();
        for tensor in guard.tensors() {
            let mut want = vec![0; tensor.info().bytes as usize];
            checkpoint.read(checkpoint.find(&tensor.info().name).unwrap(), &mut want).unwrap();
            assert!(bytes_of(&tensor) == want, "{}", tensor.info().name);
        }
    }
    let guard = streamer.layer(LayerId::new(1)).unwrap();
    (streamer, guard)
}

/// A caller with a context and a stream of their own reads every streamed tensor there, at its address.
#[test]
fn cuda_a_callers_stream_sees_every_layer() {
    #![expect(unsafe_code, reason = "an address of the library's")]
    let driver = driver(&machine());
    {
        // cudarc leaves its context current in this thread, so it has to outlive all that calls the driver here.
        let context = CudaContext::new(0).unwrap();
        let stream = context.new_stream().unwrap();
        let bytes_of = |tensor: &TensorView<'_>| {
            let mut bytes = vec![0_u8; tensor.info().bytes as usize];
            let address = cuda::address(tensor).unwrap();
            // SAFETY: the tensor has this many bytes there while its guard lives, which is longer than the copy.
            unsafe { result::memcpy_dtoh_async(&mut bytes, address, stream.cu_stream()) }.unwrap();
            stream.synchronize().unwrap();
            bytes
        };
        streamed(&stream, |device| adopted(device, &stream), bytes_of);
    }
    driver.assert_clean();
}

/// The same with cudarc's types, and without a raw handle or address.
#[cfg(feature = "cudarc")]
#[test]
fn cuda_a_callers_stream_sees_every_layer_as_cudarcs_type() {
    let driver = driver(&machine());
    if !has_devices(2) {
        return;
    }
    {
        let contexts = [0, 1].map(|ordinal| CudaContext::new(ordinal).unwrap());
        let [stream, elsewhere] = [0, 1].map(|ordinal: usize| contexts[ordinal].new_stream().unwrap());
        let adopt = |device: &Arc<dyn Device>| {
            assert_eq!(cuda::adopt_stream(device, &elsewhere).unwrap_err().kind(), ErrorKind::Mismatch);
            cuda::adopt_stream(device, &stream).unwrap()
        };
        let bytes_of = |tensor: &TensorView<'_>| {
            let seen = cuda::byte_slice(tensor, &stream).unwrap();
            assert_eq!(Some(seen.device_ptr(&stream).0), cuda::address(tensor));
            let bytes = stream.clone_dtoh(&*seen).unwrap();
            let typed = cuda::slice::<half::bf16>(tensor, &stream).unwrap();
            assert_eq!(bytemuck::cast_slice::<_, u8>(&stream.clone_dtoh(&*typed).unwrap()), bytes);
            let wrong = cuda::slice::<f32>(tensor, &stream).unwrap_err().to_string();
            assert!(wrong.contains("holds BF16, not F32"), "{wrong}");
            bytes
        };
        let (_streamer, guard) = streamed(&stream, adopt, bytes_of);
        let tensor = guard.tensors().next().unwrap();
        assert!(cuda::byte_slice(&tensor, &elsewhere).unwrap_err().to_string().contains("cuda:1"));
    }
    driver.assert_clean();
}

/// Memory of the caller's is filled in place, and freed by the caller's owner alone.
#[test]
fn cuda_memory_of_the_caller_is_filled_in_place() {
    #![expect(unsafe_code, reason = "an address of the caller's")]
    let driver = driver(&machine());
    {
        let context = CudaContext::new(0).unwrap();
        let backend = Cuda::new();
        let (cpu, card) = (backend.open(DeviceId::CPU).unwrap(), backend.open(DeviceId::cuda(0)).unwrap());
        let stream = context.new_stream().unwrap();
        let theirs = Arc::new(stream.alloc_zeros::<u8>(5000).unwrap());
        stream.synchronize().unwrap();
        let address = theirs.device_ptr(&stream).0;
        // SAFETY: the slice has 5000 bytes at this address as long as the `Arc` lives, and is not used meanwhile.
        let slot = unsafe { BufMut::from_raw(&card, address, 5000, Arc::clone(&theirs) as _) }.unwrap();
        assert_eq!(card.ledger().charged(), 0);
        let mut source = cpu.alloc(5000, MemoryKind::Pinned).unwrap();
        source.host_mut().unwrap().fill(7);
        let upload = card.stream(Role::Upload).unwrap();
        let flight = upload.copy(Transfer::whole(&source.freeze(), slot).unwrap()).unwrap();
        flight.wait(DEADLINE).unwrap();
        assert!(stream.clone_dtoh(&*theirs).unwrap().iter().all(|&byte| byte == 7));
    }
    driver.assert_clean();
}

/// While the caller captures a stream, work of the library's on it is refused before anything is queued, the capture
/// stays whole, and afterwards all goes on.
#[test]
fn cuda_work_on_a_stream_that_is_captured_is_refused() {
    #![expect(unsafe_code, reason = "the driver's own calls")]
    use cudarc::driver::sys::{self, CUstreamCaptureMode as Mode};
    let driver = driver(&machine());
    if !has_calls(&CAPTURES) {
        return;
    }
    {
        let context = CudaContext::new(0).unwrap();
        let backend = Cuda::new();
        let (cpu, card) = (backend.open(DeviceId::CPU).unwrap(), backend.open(DeviceId::cuda(0)).unwrap());
        let theirs = context.new_stream().unwrap();
        let stream = adopted(&card, &theirs);
        let upload = card.stream(Role::Upload).unwrap();
        let source = cpu.alloc(5000, MemoryKind::Pinned).unwrap().freeze();
        let dst = card.alloc(5000, MemoryKind::Arena).unwrap();
        let landed = upload.copy(Transfer::whole(&source, dst).unwrap()).unwrap().chain().freeze();
        for mode in [
            Mode::CU_STREAM_CAPTURE_MODE_GLOBAL,
            Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
            Mode::CU_STREAM_CAPTURE_MODE_RELAXED,
        ] {
            let elsewhere = upload.record(&[]).unwrap();
            let slot = card.alloc(5000, MemoryKind::Arena).unwrap();
            // SAFETY: the stream is alive.
            unsafe { sys::cuStreamBeginCapture_v2(theirs.cu_stream(), mode) }.result().unwrap();
            let before = calls(&driver);
            let rejected = stream.copy(Transfer::whole(&source, slot).unwrap()).unwrap_err();
            assert_eq!(rejected.error.kind(), ErrorKind::Capturing);
            assert_eq!(stream.wait(&elsewhere).unwrap_err().kind(), ErrorKind::Capturing);
            let refused = stream.record(std::slice::from_ref(&landed)).unwrap_err();
            assert!(refused.to_string().contains("cuda:0 is being captured"), "{refused}");
            let touched = |(call, count): &(&String, &u64)| {
                let queues = ["cuStreamWaitEvent", "cuEventRecord", "cuMemcpyHtoDAsync_v2", "cuStreamSynchronize"];
                queues.contains(&call.as_str()) && before.get(*call) != Some(*count)
            };
            assert_eq!(calls(&driver).iter().find(touched), None);
            let mut graph = std::ptr::null_mut();
            // SAFETY: the stream is alive and captures; the pointers are to living values.
            unsafe { sys::cuStreamEndCapture(theirs.cu_stream(), &raw mut graph) }.result().unwrap();
            let mut nodes = usize::MAX;
            // SAFETY: as above.
            unsafe { sys::cuGraphGetNodes(graph, std::ptr::null_mut(), &raw mut nodes) }.result().unwrap();
            // SAFETY: the graph was made above, and is destroyed once.
            unsafe { sys::cuGraphDestroy(graph) }.result().unwrap();
            assert_eq!(nodes, 0, "nothing of the library's was captured");
            let flight = stream.copy(Transfer::whole(&source, rejected.dst).unwrap()).unwrap();
            flight.wait(DEADLINE).unwrap();
        }
        stream.record(&[landed]).unwrap().wait(DEADLINE).unwrap();
    }
    driver.assert_clean();
}

/// The library's own threads ask for events all the time, which a capture of another thread would forbid; it is not
/// spoilt by that.
#[test]
fn cuda_a_capture_is_not_spoilt_by_what_the_library_does_meanwhile() {
    #![expect(unsafe_code, reason = "the driver's own calls")]
    use cudarc::driver::sys::{self, CUstreamCaptureMode as Mode};
    let driver = driver(&machine());
    if !has_calls(&CAPTURES) {
        return;
    }
    {
        let context = CudaContext::new(0).unwrap();
        let backend = Cuda::new();
        let (cpu, card) = (backend.open(DeviceId::CPU).unwrap(), backend.open(DeviceId::cuda(0)).unwrap());
        let theirs = context.new_stream().unwrap();
        let upload = card.stream(Role::Upload).unwrap();
        let (source, dst) =
            (cpu.alloc(5000, MemoryKind::Pinned).unwrap(), card.alloc(5000, MemoryKind::Arena).unwrap());
        let begin = |mode| {
            // SAFETY: the stream is alive.
            unsafe { sys::cuStreamBeginCapture_v2(theirs.cu_stream(), mode) }.result().unwrap();
        };
        let asked = |driver: &Driver| match driver {
            Driver::StandIn(cuda) => Some(cuda.report().calls_of("cuEventQuery")),
            Driver::Named(_) => None,
        };
        let before = asked(&driver);
        match &driver {
            Driver::StandIn(cuda) => cuda.fault(&FaultPlan::one(Fault::nth("cuMemcpyHtoDAsync_v2", 1, Effect::Hold))),
            Driver::Named(_) => upload.occupy(Duration::from_millis(200)).unwrap(),
        }
        drop(upload.copy(Transfer::whole(&source.freeze(), dst).unwrap()).unwrap());
        begin(Mode::CU_STREAM_CAPTURE_MODE_GLOBAL);
        // The copy has not ended, so the reaper asks for its end meanwhile, at least every two milliseconds; the report waits
        // for two seconds in vain.
        let until = Instant::now() + DEADLINE;
        while before.is_some() && asked(&driver) == before {
            assert!(Instant::now() < until, "the reaper asked");
            std::thread::sleep(Duration::from_millis(1));
        }
        let mut graph = std::ptr::null_mut();
        // SAFETY: the stream is alive; the pointer is to a living handle.
        unsafe { sys::cuStreamEndCapture(theirs.cu_stream(), &raw mut graph) }.result().unwrap();
        // SAFETY: made above, destroyed once.
        unsafe { sys::cuGraphDestroy(graph) }.result().unwrap();
        if let Driver::StandIn(cuda) = &driver {
            cuda.no_faults();
        }
    }
    driver.assert_clean();
}

/// The calls that were made, where the driver tells: those of the stand-in.
fn calls(driver: &Driver) -> std::collections::BTreeMap<String, u64> {
    match driver {
        Driver::StandIn(cuda) => cuda.report().calls,
        Driver::Named(_) => Default::default(),
    }
}
