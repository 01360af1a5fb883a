//! The values of GGML's blocks by the kernels of CUDA devices, from the slots of streamed layers: the text that ships, interpreted
//! by the stand-in driver or run by a card, gives the bits of the host.
#![cfg(all(feature = "cuda", target_os = "linux"))]

mod card;
mod support;

use std::sync::Arc;

use card::{DEADLINE, assert_given_back, driver, registry, stand_in, whatever_call_fails};
use cuda_standin::{Config, Effect, Fault, FaultPlan, MemoryMode};
use cudarc::driver::CudaContext;
use cudarc::driver::sys::CUgraphInstantiate_flags;
use cudarc::driver::sys::CUstreamCaptureMode as Mode;
use support::blocks::{edged, random_bytes, wanted};
use support::gguf::Gguf;
use tensor_offload::backend::{
    Backend, Buf, BufMut, Countdown, Cuda, Dequantise, Device, Faulty, Host, MemoryKind, Operation, Role, Transfer,
};
use tensor_offload::{Checkpoint, DType, DeviceId, Error, Loader, Model, Planner, Registry, Result, Streamer, Weights};

const VALUES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

fn one_card() -> Config {
    Config::with_devices(&[64 << 20]).memory(MemoryMode::Reuse).late_micros(2000).seed(3)
}

fn sent(device: &Arc<dyn Device>, bytes: &[u8]) -> Buf {
    let host = Host::new().open(DeviceId::CPU).unwrap();
    let mut staged = host.alloc(bytes.len(), MemoryKind::Whole).unwrap();
    staged.host_mut().unwrap().copy_from_slice(bytes);
    let memory = device.alloc(bytes.len(), MemoryKind::Whole).unwrap();
    let stream = device.stream(Role::Upload).unwrap();
    let flight = stream.copy(Transfer::whole(&staged.freeze(), memory).unwrap()).unwrap();
    flight.wait(DEADLINE).unwrap().freeze()
}

/// The first bytes of a buffer on a device.
fn read(device: &Arc<dyn Device>, values: BufMut, count: usize) -> Result<Vec<u8>> {
    let host = Host::new().open(DeviceId::CPU)?;
    let memory = host.alloc(values.bytes(), MemoryKind::Whole)?;
    let stream = device.stream(Role::Download)?;
    let mut back = stream.copy(Transfer::whole(&values.freeze(), memory)?)?.wait(DEADLINE)?;
    Ok(back.host_mut().unwrap()[..count].to_vec())
}

#[track_caller]
fn assert_same(got: &[u8], wanted: &[u8], size: usize, what: &str) {
    let wrong = got.chunks(size).zip(wanted.chunks(size)).position(|(got, wanted)| got != wanted);
    if let Some(at) = wrong {
        panic!("{what}, value {at}: {:02x?}, not {:02x?}", &got[at * size..][..size], &wanted[at * size..][..size]);
    }
    assert_eq!(got.len(), wanted.len(), "{what}");
}

/// All block types. Numbers of blocks that end in the midst of a warp's and of a block of threads, at an odd address, into memory
/// that keeps what is behind the values.
#[test]
fn cuda_kernels_give_the_values_of_the_host() {
    let driver = driver(&one_card());
    let devices = registry();
    let device = devices.device(DeviceId::cuda(0)).unwrap();
    let (kernels, stream) = (device.kernels().unwrap(), device.stream(Role::Compute).unwrap());
    for (seed, dtype) in DType::all().filter(|dtype| dtype.is_ggml_block()).enumerate() {
        if let Err(why) = kernels.dequantises(&*stream, dtype, DType::F32) {
            assert!(card::named(), "{why}");
            eprintln!("skipped: the driver has no kernels for its device: {why}");
            return;
        }
        let block = dtype.block();
        // Four blocks of threads and a part of one.
        let counts = [0, 1, 7, 4 * 2048 / block.elements as usize + 3];
        for (count, to) in counts.into_iter().flat_map(|count| VALUES.iter().map(move |to| (count, to))) {
            let size = to.element_bytes().unwrap();
            let (blocks, values) = (edged(seed as u64, dtype, count), count * block.elements as usize);
            let src = sent(&device, &[&[0xa5; 3], &*blocks].concat());
            let dst = device.alloc((values + 5) * size, MemoryKind::Whole).unwrap();
            let behind = random_bytes(9, dst.bytes());
            let dst = {
                let kept = sent(&device, &behind);
                stream.copy(Transfer::whole(&kept, dst).unwrap()).unwrap().chain()
            };
            let work = Dequantise::new((src, 3, dtype), values, (dst, 0, *to)).unwrap();
            let dst = kernels.dequantise(&*stream, work).unwrap().chain();
            let all = read(&device, dst, (values + 5) * size).unwrap();
            let what = format!("{count} blocks of {dtype} as {to}");
            assert_same(&all[..values * size], &wanted(dtype, &blocks, *to), size, &what);
            assert_eq!(all[values * size..], behind[values * size..], "{what}: behind the values");
        }
    }
    drop((stream, device, devices));
    driver.assert_clean();
}

/// The blocks are still on their way, the memory for the values is being filled by another stream, and as soon as the work is
/// queued the blocks are overwritten. Without an order between any two of these the stand-in reports them.
#[test]
fn cuda_values_come_after_their_blocks_and_before_what_follows() {
    let Some(cuda) = stand_in(&one_card().late_micros(10_000)) else { return };
    let devices = registry();
    let (device, host) = (devices.device(DeviceId::cuda(0)).unwrap(), devices.device(DeviceId::CPU).unwrap());
    let streams = [(); 3].map(|()| device.stream(Role::Upload).unwrap());
    let compute = device.stream(Role::Compute).unwrap();
    let pinned = |bytes: &[u8]| {
        let mut memory = host.alloc(bytes.len(), MemoryKind::Pinned).unwrap();
        memory.host_mut().unwrap().copy_from_slice(bytes);
        memory.freeze()
    };
    let blocks = random_bytes(5, 34 * 1024);
    let there = |stream: usize, bytes: &[u8], dst: BufMut| {
        streams[stream].copy(Transfer::whole(&pinned(bytes), dst).unwrap()).unwrap().chain()
    };
    let memory = |bytes| device.alloc(bytes, MemoryKind::Whole).unwrap();
    let src = there(0, &blocks, memory(blocks.len())).freeze();
    let dst = there(1, &random_bytes(6, 32 * 1024 * 4), memory(32 * 1024 * 4));
    let work = Dequantise::new((src.clone(), 0, DType::Q8_0), 32 * 1024, (dst, 0, DType::F32)).unwrap();
    let flight = device.kernels().unwrap().dequantise(&*compute, work).unwrap();
    let reclaimed = src.try_reclaim().unwrap();
    let overwritten = there(2, &random_bytes(7, blocks.len()), reclaimed);
    let got = read(&device, flight.chain(), 32 * 1024 * 4).unwrap();
    assert_same(&got, &wanted(DType::Q8_0, &blocks, DType::F32), 4, "values");
    drop((overwritten, streams, compute, device, host));
    assert_given_back(&devices, &cuda, "an order of streams");
    drop(devices);
    card::assert_clean(&cuda);
}

/// A launch that the driver refuses returns the memory with the event after whatever may be under way.
#[test]
fn cuda_memory_of_a_refused_launch_is_not_free_before_its_stream() {
    let Some(cuda) = stand_in(&one_card()) else { return };
    let devices = registry();
    let device = devices.device(DeviceId::cuda(0)).unwrap();
    let (kernels, compute) = (device.kernels().unwrap(), device.stream(Role::Compute).unwrap());
    let blocks = sent(&device, &random_bytes(8, 34));
    kernels.dequantises(&*compute, DType::Q8_0, DType::F32).unwrap();
    let (refuses, held) =
        (Fault::nth("cuLaunchKernel", 1, Effect::Fail(701)), Fault::nth("cuLaunchHostFunc", 1, Effect::Hold));
    cuda.fault(&FaultPlan { faults: vec![refuses, held], ..FaultPlan::default() });
    compute.occupy(std::time::Duration::ZERO).unwrap();
    let dst = device.alloc(128, MemoryKind::Whole).unwrap();
    let work = Dequantise::new((blocks.clone(), 0, DType::Q8_0), 32, (dst, 0, DType::F32)).unwrap();
    let rejected = kernels.dequantise(&*compute, work).unwrap_err();
    assert!(rejected.error.to_string().contains("cuLaunchKernel"), "{}", rejected.error);
    assert_eq!(rejected.dst.pending().len(), 1);
    cuda.no_faults();
    drop((rejected, blocks, compute, device));
    assert_given_back(&devices, &cuda, "a refused launch");
    drop(devices);
    card::assert_clean(&cuda);
}

/// Without memory for the kernels the host does the work once, and the next call asks the driver again.
#[test]
fn cuda_kernels_without_memory_are_asked_for_again() {
    let Some(cuda) = stand_in(&one_card()) else { return };
    let devices = registry();
    cuda.fault(&FaultPlan::one(Fault::nth("cuModuleLoadData", 1, Effect::OutOfMemory)));
    passes(&devices, &weights(4), DType::BF16).unwrap();
    // All but one of 24, and the second try to load.
    assert_eq!((cuda.report().calls_of("cuLaunchKernel"), cuda.report().calls_of("cuModuleLoadData")), (23, 2));
    drop(devices);
    card::assert_clean(&cuda);
}

/// While the caller captures the compute stream, neither kernels are loaded nor bytes read back.
#[test]
fn cuda_dequantising_is_refused_while_its_stream_is_captured() {
    let Some(cuda) = stand_in(&one_card()) else { return };
    let devices = registry();
    let weights = weights(4);
    let model = load(&devices, &weights).unwrap();
    let raw = CudaContext::new(0).unwrap().new_stream().unwrap();
    let compute = card::adopted(model.residency().device(), &raw);
    let mut streamer = Streamer::on(&model, Arc::clone(&compute)).unwrap();
    let guard = streamer.layer(model.layout().layer_ids().next().unwrap()).unwrap();
    let mut values = model.residency().device().alloc(40 * 256 * 4, MemoryKind::Whole).unwrap();
    raw.begin_capture(Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    let before = cuda.report().calls_of("cuMemAlloc_v2");
    for name in ["attn_q.weight", "attn_v.weight"] {
        let rejected = guard.dequantise(name, DType::F32, values).unwrap_err();
        assert!(matches!(rejected.error, Error::Capturing { .. }), "{}", rejected.error);
        values = rejected.dst;
    }
    assert_eq!((cuda.report().calls_of("cuModuleLoadData"), cuda.report().calls_of("cuMemAlloc_v2")), (0, before));
    raw.end_capture(CUgraphInstantiate_flags(0)).unwrap();
    values = guard.dequantise("attn_q.weight", DType::F32, values).unwrap().wait(DEADLINE).unwrap();
    assert_eq!(cuda.report().calls_of("cuLaunchKernel"), 1);
    drop((values, guard, streamer, compute, raw, model));
    assert_given_back(&devices, &cuda, "a capture");
}

#[test]
fn cuda_kernels_refuse_what_they_cannot_compute_and_give_the_destination_back() {
    let Some(cuda) = stand_in(&Config::with_devices(&[64 << 20, 64 << 20])) else { return };
    let devices = registry();
    let [device, other] = [0, 1].map(|number| devices.device(DeviceId::cuda(number)).unwrap());
    let (kernels, stream) = (device.kernels().unwrap(), device.stream(Role::Compute).unwrap());
    let memory = |device: &Arc<dyn Device>, bytes| device.alloc(bytes, MemoryKind::Whole).unwrap();
    let refused = |src: BufMut, dtype, dst: BufMut, stream: &dyn tensor_offload::backend::Stream| {
        let work = Dequantise::new((src.freeze(), 0, dtype), 256, (dst, 0, DType::F32)).unwrap();
        let rejected = kernels.dequantise(stream, work).unwrap_err();
        assert!(rejected.dst.bytes() >= 1024);
        rejected.error.to_string()
    };
    assert!(kernels.dequantises(&*stream, DType::F16, DType::F32).unwrap_err().contains("F32 of F16"));
    assert!(kernels.dequantises(&*stream, DType::Q4_0, DType::F64).unwrap_err().contains("F64 of Q4_0"));
    let from_other = refused(memory(&other, 144), DType::Q4_K, memory(&device, 1024), &*stream);
    assert!(from_other.contains("what is to be dequantised") && from_other.contains("cuda:1"), "{from_other}");
    let to_other = refused(memory(&device, 144), DType::Q4_K, memory(&other, 1024), &*stream);
    assert!(to_other.contains("the memory for the values") && to_other.contains("cuda:1"), "{to_other}");
    let elsewhere = other.stream(Role::Compute).unwrap();
    assert!(refused(memory(&device, 144), DType::Q4_K, memory(&device, 1024), &*elsewhere).contains("this stream"));
    let odd = memory(&device, 1026).split_off(2).unwrap();
    let blocks = memory(&device, 144).freeze();
    let rejected = Dequantise::new((blocks, 0, DType::Q4_K), 256, (odd, 0, DType::F32)).unwrap_err();
    assert!(rejected.error.to_string().contains("not aligned to F32"), "{}", rejected.error);
    drop(rejected);
    assert_eq!(cuda.report().calls_of("cuLaunchKernel"), 0);
    drop((stream, elsewhere, device, other));
    assert_given_back(&devices, &cuda, "refusals");
    drop(devices);
    card::assert_clean(&cuda);
}

/// Layers of three quantised tensors and a norm.
fn weights(layers: u64) -> Weights {
    let file = (0..layers).fold(Gguf::new("llama"), |file, layer| {
        let bytes =
            |dtype: DType, rows: u64| random_bytes(layer * 7 + rows, dtype.bytes_of(&[rows, 256]).unwrap() as usize);
        file.tensor(format!("blk.{layer}.attn_q.weight"), DType::Q4_K, &[40, 256], bytes(DType::Q4_K, 40))
            .tensor(format!("blk.{layer}.attn_v.weight"), DType::IQ2_XS, &[8, 256], bytes(DType::IQ2_XS, 8))
            .tensor(format!("blk.{layer}.ffn_up.weight"), DType::Q8_0, &[24, 256], bytes(DType::Q8_0, 24))
            .some(&format!("blk.{layer}.attn_norm.weight"), DType::F32, &[256])
    });
    Weights::new(Checkpoint::from_bytes("model.gguf", file.build()).unwrap())
}

fn load(devices: &Registry, weights: &Weights) -> Result<Arc<Model>> {
    let planner = Planner::new(weights.layout(), devices.machine()).allocation("cuda:0,30%;cpu,*".parse()?);
    let plan = planner.compute(DeviceId::cuda(0)).depth(1).plan()?;
    Ok(Arc::new(Loader::new(devices).deadline(DEADLINE).load(weights, &plan)?))
}

/// Two passes over all layers, with one buffer for all values; each is compared before the next is queued.
fn passes(devices: &Registry, weights: &Weights, to: DType) -> Result<()> {
    let model = load(devices, weights)?;
    let device = model.residency().device();
    let mut streamer = Streamer::new(&model)?.deadline(DEADLINE);
    let mut values = device.alloc(40 * 256 * 4, MemoryKind::Whole)?;
    for layer in model.layout().layer_ids().chain(model.layout().layer_ids()) {
        let guard = streamer.layer(layer)?;
        for name in ["attn_q.weight", "attn_v.weight", "ffn_up.weight"] {
            let view = guard.tensor(name).unwrap();
            let (tensor, dtype) = (weights.layout().find(view.name()).unwrap(), view.dtype());
            let mut blocks = vec![0; view.size()];
            weights.read(tensor, &mut blocks)?;
            let wanted = wanted(dtype, &blocks, to);
            values = guard.dequantise(name, to, values)?.chain();
            let copied = device.alloc(values.bytes(), MemoryKind::Whole)?;
            let now = values.freeze();
            let copied = streamer.compute().copy(Transfer::whole(&now, copied)?)?.chain();
            let got = read(device, copied, wanted.len())?;
            assert_same(&got, &wanted, to.element_bytes().unwrap(), view.name());
            values = now.try_reclaim().unwrap_or_else(|now| panic!("{now:?} is shared"));
        }
    }
    // What crossed the link are the blocks.
    let sizes = |layer| model.layout().layer(layer).unwrap().bytes;
    let whole: u64 = model.layout().layer_ids().map(sizes).sum();
    let streamed: u64 = streamer.report().bytes.values().sum();
    assert!(streamed > 0 && streamed <= 2 * whole, "{streamed} of {whole} bytes");
    Ok(())
}

#[test]
fn cuda_streamed_blocks_have_their_values_on_the_compute_stream() {
    let weights = weights(4);
    for to in VALUES {
        let driver = driver(&one_card());
        let devices = registry();
        passes(&devices, &weights, to).unwrap();
        if let card::Driver::StandIn(cuda) = &driver {
            // Three tensors of each of four layers in two passes.
            assert_eq!(cuda.report().calls_of("cuLaunchKernel"), 24);
        }
        drop(devices);
        driver.assert_clean();
    }
}

#[test]
fn cuda_drivers_that_refuse_the_kernels_leave_the_values_to_the_host() {
    let Some(cuda) = stand_in(&Config { refuse_ptx: true, ..one_card() }) else { return };
    let devices = registry();
    passes(&devices, &weights(4), DType::BF16).unwrap();
    assert_eq!((cuda.report().calls_of("cuLaunchKernel"), cuda.report().calls_of("cuModuleLoadData")), (0, 1));
    drop(devices);
    card::assert_clean(&cuda);
}

/// By the kernels, and by the host.
#[test]
fn cuda_dequantising_keeps_nothing_whatever_call_fails() {
    let weights = weights(2);
    let path = |devices: &Registry| passes(devices, &weights, DType::F16);
    let (by_kernels, by_host) =
        (one_card().late_micros(300), Config { refuse_ptx: true, ..one_card().late_micros(300) });
    whatever_call_fails(&by_kernels, &[Effect::Fail(304), Effect::Sticky(700)], 0, registry, path);
    whatever_call_fails(&by_host, &[Effect::Fail(304)], 0, registry, path);
}

/// Operations of the backend fail one by one. One that fails is told, and the buffer for the values comes back.
#[test]
fn cuda_dequantising_that_fails_is_told() {
    let Some(cuda) = stand_in(&one_card()) else { return };
    let weights = weights(4);
    let countdown = Countdown::new();
    let faulty = Faulty::new(Cuda::new(), countdown.clone());
    let devices = Registry::new([Arc::new(faulty) as Arc<dyn Backend>, Arc::new(Host::new())]);
    let model = load(&devices, &weights).unwrap();
    let mut streamer = Streamer::new(&model).unwrap();
    let guard = streamer.layer(model.layout().layer_ids().next().unwrap()).unwrap();
    let values = model.residency().device().alloc(40 * 256 * 4, MemoryKind::Whole).unwrap();
    countdown.fail_nth(1);
    let rejected = guard.dequantise("attn_q.weight", DType::F32, values).unwrap_err();
    assert!(rejected.error.to_string().contains("Dequantise failed on purpose"), "{}", rejected.error);
    let values = guard.dequantise("attn_q.weight", DType::F32, rejected.dst).unwrap().wait(DEADLINE).unwrap();
    assert_eq!(countdown.calls_of(Operation::Dequantise), 2);
    let refused = |name: &str, to, wanted: &str, values| {
        let rejected = guard.dequantise(name, to, values).unwrap_err();
        assert!(rejected.error.to_string().contains(wanted), "{}", rejected.error);
        rejected.dst
    };
    let values = refused("attn_norm.weight", DType::F32, "F32 is no block type", values);
    let values = refused("attn_k.weight", DType::F32, "attn_k.weight", values);
    let mut values = refused("attn_q.weight", DType::F8E5M2, "not F8_E5M2", values);
    let small = values.split_off(40 * 256 * 4 - 4).unwrap();
    refused("attn_q.weight", DType::BF16, "a buffer of 4", small);
    let elsewhere = devices.device(DeviceId::CPU).unwrap().alloc(40 * 256 * 4, MemoryKind::Whole).unwrap();
    let elsewhere = refused("attn_q.weight", DType::F32, "the memory for the values", elsewhere);
    refused("attn_v.weight", DType::F32, "the memory for the values", elsewhere);
    drop((values, guard, streamer, model));
    assert_given_back(&devices, &cuda, "refusals");
    drop(devices);
    card::assert_clean(&cuda);
}
