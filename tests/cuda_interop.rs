//! The caller's own streams and memory, through cudarc, over the stand-in driver.
#![cfg(all(feature = "cuda", target_os = "linux"))]

mod card;

use std::sync::Arc;

use card::{DEADLINE, assert_clean, stand_in};
use cuda_standin::{Config, MemoryMode};
use cudarc::driver::{CudaContext, DevicePtr};
use tensor_offload::backend::{Backend, BufMut, Cuda, Host, MemoryKind, Role, Transfer};
use tensor_offload::{Checkpoint, DeviceId, ErrorKind, Loader, Patches, Planner, Registry, Streamer, cuda};

const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/data/tiny-llama");

fn machine() -> Config {
    Config::with_devices(&[64 << 20, 64 << 20]).memory(MemoryMode::Reuse).late_micros(10_000_000)
}

/// A caller with a context and a stream of cudarc's reads every streamed tensor there, as cudarc's type.
#[test]
fn cuda_a_callers_stream_sees_every_layer() {
    let Some(driver) = stand_in(&machine()) else { return };
    {
        // cudarc leaves its context current in this thread, so it has to outlive all that calls the driver here.
        let contexts = [0, 1].map(|ordinal| CudaContext::new(ordinal).unwrap());
        let devices = Registry::new([Arc::new(Cuda::new()) as Arc<dyn Backend>, Arc::new(Host::new())]);
        let checkpoint = Checkpoint::open(MODEL).unwrap();
        let patches = Patches::none(checkpoint.layout());
        let planner =
            Planner::new(patches.layout(), devices.machine()).allocation("cuda:0,60kb;cpu,*".parse().unwrap());
        let plan = planner.compute(DeviceId::cuda(0)).depth(1).plan().unwrap();
        let model = Arc::new(Loader::new(&devices).load(&checkpoint, &patches, &plan).unwrap());
        let stream = contexts[0].new_stream().unwrap();
        let compute = cuda::adopt_stream(model.residency().device(), &stream).unwrap();
        let mut streamer = Streamer::on(&model, compute).unwrap();
        for layer in (0..model.layout().layers.len()).chain([1, 3]) {
            let guard = streamer.layer(layer).unwrap();
            for tensor in guard.tensors() {
                let seen = cuda::slice(&tensor, &stream).unwrap();
                assert_eq!(Some(seen.device_ptr(&stream).0), cuda::address(&tensor));
                let bytes = stream.clone_dtoh(&*seen).unwrap();
                let mut want = vec![0; tensor.info().bytes as usize];
                checkpoint.read(checkpoint.find(&tensor.info().name).unwrap(), &mut want).unwrap();
                assert!(bytes == want, "{}", tensor.info().name);
            }
        }
        let elsewhere = contexts[1].new_stream().unwrap();
        let wrong = cuda::adopt_stream(model.residency().device(), &elsewhere).unwrap_err();
        assert_eq!(wrong.kind(), ErrorKind::Invalid);
        let guard = streamer.layer(1).unwrap();
        let tensor = guard.tensors().next().unwrap();
        assert!(cuda::slice(&tensor, &elsewhere).unwrap_err().to_string().contains("cuda:1"));
    }
    assert_clean(&driver);
}

/// Memory of the caller's is filled in place, and freed by the caller's owner alone.
#[test]
fn cuda_memory_of_the_caller_is_filled_in_place() {
    #![expect(unsafe_code, reason = "an address of the caller's")]
    let Some(driver) = stand_in(&machine()) else { return };
    {
        let context = CudaContext::new(0).unwrap();
        let backend = Cuda::new();
        let (cpu, card) = (backend.open(DeviceId::CPU).unwrap(), backend.open(DeviceId::cuda(0)).unwrap());
        let stream = context.new_stream().unwrap();
        let theirs = Arc::new(stream.alloc_zeros::<u8>(5000).unwrap());
        stream.synchronize().unwrap();
        let address = theirs.device_ptr(&stream).0;
        // SAFETY: the slice has 5000 bytes at this address as long as the `Arc` lives, and is not used meanwhile.
        let slot = unsafe { BufMut::foreign(&card, address, 5000, Arc::clone(&theirs) as _) }.unwrap();
        assert_eq!(card.ledger().charged(), 0);
        let mut source = cpu.alloc(5000, MemoryKind::Pinned).unwrap();
        source.host_mut().unwrap().fill(7);
        let upload = card.stream(Role::Upload).unwrap();
        let flight = upload.copy(Transfer::whole(&source.freeze(), slot).unwrap()).unwrap();
        flight.landed(DEADLINE).unwrap();
        assert!(stream.clone_dtoh(&*theirs).unwrap().iter().all(|&byte| byte == 7));
    }
    assert_clean(&driver);
}
