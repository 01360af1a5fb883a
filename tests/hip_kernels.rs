//! Patching by the kernels of AMD's devices, over the stand-in: it reads the bundle that ships as the runtime does, and runs the
//! PTX text of the same source in place of the code, which no processor here can run.
#![cfg(all(feature = "hip", target_os = "linux"))]

mod card;
mod reference;

use std::sync::Arc;
use std::time::{Duration, Instant};

use card::{DEADLINE, assert_clean, stand_in, whatever_call_fails};
use cuda_standin::{Config, Effect, Fault, FaultPlan, MemoryMode};
use reference::{Tensor, f32s, file, tensor};
use tensor_offload::backend::{Backend, Hip, Host, Role};
use tensor_offload::{Adapter, ByteSize, DType, DeviceId, Loader, Matching, Model, Planner, Registry, Result, Weights};

/// The text that stands for the code.
const TEXT: &str = include_str!("../src/backend/drivers/kernels/patch.ptx");
const ARCHITECTURES: &str = "gfx900 gfx906 gfx908 gfx90a gfx942 gfx1030 gfx1100 gfx1101 gfx1102 gfx1200 gfx1201";
const TYPES: [DType; 5] = [DType::F32, DType::F16, DType::BF16, DType::F8E4M3, DType::F8E5M2];
const HIP: DeviceId = DeviceId::hip(0);

/// The launches of a trial.
const TRIAL: u64 = 12;

/// A card whose code is run.
fn card() -> Config {
    let code_as_ptx = Some(TEXT.to_owned());
    Config { code_as_ptx, ..Config::with_devices(&[64 << 20]).memory(MemoryMode::Reuse).seed(3) }
}

fn registry() -> Registry {
    let hip = Hip::new().library(cuda_standin::library_path().unwrap()).context_size(ByteSize(0));
    Registry::new([Arc::new(hip) as Arc<dyn Backend>, Arc::new(Host::new())])
}

/// A weight of each type that kernels patch, with an adapter for it, and the bytes that the host makes of both.
struct Subject {
    weights: Weights,
    wanted: Vec<Vec<u8>>,
}

impl Subject {
    fn new() -> Subject {
        let (rows, cols, rank) = (70, 132, 5);
        let value = |index: usize| ((index * 37 + index / 11) % 101) as f32 / 50.0 - 1.0;
        let values = |count, from: usize| (0..count).map(|index| value(from + index)).collect::<Vec<_>>();
        let (mut tensors, mut adapter) = (Vec::<Tensor>::new(), Vec::new());
        for (number, dtype) in TYPES.into_iter().enumerate() {
            let module = format!("layer.{number}");
            let bytes = match dtype {
                DType::F8E4M3 | DType::F8E5M2 => (0..rows * cols).map(|index| (index % 251) as u8).collect(),
                _ => reference::stored(dtype, &values(rows * cols, number)),
            };
            tensors.push(tensor(&format!("{module}.weight"), dtype, &[rows as u64, cols as u64], bytes));
            let (up, down) = (values(rows * rank, number + 7), values(rank * cols, number + 13));
            adapter.push(f32s(&format!("{module}.lora_up.weight"), &[rows as u64, rank as u64], &up));
            adapter.push(f32s(&format!("{module}.lora_down.weight"), &[rank as u64, cols as u64], &down));
        }
        let adapter = Adapter::from_checkpoint(file("adapter", &adapter), 0.7).unwrap();
        let weights = Weights::patched(file("model", &tensors), vec![adapter], Matching::Strict).unwrap();
        let wanted = weights.layout().tensor_ids().zip(weights.layout().tensors()).map(|(id, info)| {
            let mut bytes = vec![0; info.bytes as usize];
            weights.read(id, &mut bytes).unwrap();
            bytes
        });
        Subject { wanted: wanted.collect(), weights }
    }

    /// Loads the model to the card and checks its bytes.
    fn load(&self, devices: &Registry) -> Result<Model> {
        let planner = Planner::new(self.weights.layout(), devices.machine()).allocation("hip:0,100%".parse()?);
        let plan = planner.compute(HIP).plan()?;
        let model = Loader::new(devices).workers(2).deadline(DEADLINE).load(&self.weights, &plan)?;
        for (info, wanted) in self.weights.layout().tensors().iter().zip(&self.wanted) {
            let mut bytes = vec![0; wanted.len()];
            model.read(&info.name, &mut bytes)?;
            assert!(bytes == *wanted, "`{}` {}", info.name, info.dtype);
        }
        Ok(model)
    }

    /// Loads the model and checks that the device patched all of it.
    fn load_by_kernels(&self, devices: &Registry) {
        let model = self.load(devices).unwrap();
        let report = model.report();
        assert_eq!((report.patched, report.patched_on_device), (TYPES.len(), TYPES.len()), "{report}");
        assert!(report.host_instead.is_empty(), "{report}");
    }

    /// Loads the model and checks that the host patched all of it, for this reason.
    #[track_caller]
    fn load_by_host(&self, devices: &Registry, why: &str) {
        let model = self.load(devices).unwrap();
        let report = model.report();
        assert_eq!((report.patched, report.patched_on_device), (TYPES.len(), 0), "{report}");
        assert!(report.to_string().contains(&format!("patched on the host instead: hip:0: {why}")), "{report}");
    }
}

#[test]
fn hip_kernels_of_each_architecture_patch_after_a_trial() {
    let subject = Subject::new();
    for architecture in ARCHITECTURES.split(' ') {
        let mut config = card();
        config.devices[0].architecture = architecture.to_owned();
        let Some(hip) = stand_in(&config) else { return };
        let devices = registry();
        subject.load_by_kernels(&devices);
        subject.load_by_kernels(&devices);
        let report = hip.report();
        let calls = ["hipModuleLoadData", "hipModuleLaunchKernel"].map(|call| report.calls_of(call));
        assert_eq!(calls, [1, TRIAL + 2 * TYPES.len() as u64], "there is one trial");
        drop(devices);
        assert_clean(&hip);
    }
}

#[test]
fn hip_kernels_that_the_runtime_refuses_leave_the_host_to_patch() {
    let subject = Subject::new();
    let mut unknown = card();
    unknown.devices[0].architecture = "gfx803".to_owned();
    for (config, why) in [
        (unknown, "hipModuleLoadData: hipErrorNoBinaryForGpu"),
        (Config { code_as_ptx: None, ..card() }, "hipModuleLoadData: hipErrorInvalidImage"),
    ] {
        let Some(hip) = stand_in(&config) else { return };
        let devices = registry();
        subject.load_by_host(&devices, why);
        subject.load_by_host(&devices, why);
        assert_eq!(hip.report().calls_of("hipModuleLoadData"), 1, "a refusal is remembered");
        drop(devices);
        assert_clean(&hip);
    }
}

/// One bit of a matrix is wrong, and the kernels are never used, not even when they are right later.
#[test]
fn hip_kernels_that_give_a_wrong_bit_in_their_trial_are_not_used() {
    let Some(hip) = stand_in(&card()) else { return };
    let (subject, devices) = (Subject::new(), registry());
    hip.fault(&FaultPlan { lying_functions: true, ..FaultPlan::default() });
    let why = "patch_one_f32 gives wrong bytes for a matrix of 67 by 37";
    subject.load_by_host(&devices, why);
    hip.fault(&FaultPlan::default());
    subject.load_by_host(&devices, why);
    let report = hip.report();
    assert_eq!(["hipModuleLoadData", "hipModuleUnload"].map(|call| report.calls_of(call)), [1, 1]);
    assert_eq!(report.calls_of("hipModuleLaunchKernel"), TRIAL);
    drop(devices);
    assert_clean(&hip);
}

#[test]
fn hip_kernels_whose_trial_has_no_memory_are_tried_again() {
    let Some(hip) = stand_in(&card()) else { return };
    let (subject, devices) = (Subject::new(), registry());
    hip.fault(&FaultPlan::one(Fault::nth("hipModuleLoadData", 1, Effect::OutOfMemory).onwards()));
    subject.load_by_host(&devices, "hipModuleLoadData: hipErrorOutOfMemory");
    let device = devices.device(HIP).unwrap();
    for nth in [1, 2] {
        hip.fault(&FaultPlan::one(Fault::nth("hipMalloc", nth, Effect::OutOfMemory)));
        let why = device.kernels().unwrap().ready().unwrap_err();
        assert!(why.contains("hipErrorOutOfMemory"), "{why}");
    }
    subject.load_by_kernels(&devices);
    drop((device, devices));
    assert_clean(&hip);
}

#[test]
fn hip_kernels_whose_trial_fails_are_not_used() {
    let subject = Subject::new();
    for call in ["hipMemcpyHtoDAsync", "hipModuleLaunchKernel", "hipMemcpyDtoHAsync", "hipEventRecord"] {
        let Some(hip) = stand_in(&card()) else { return };
        let devices = registry();
        let device = devices.device(HIP).unwrap();
        hip.fault(&FaultPlan::one(Fault::nth(call, 1, Effect::Fail(304))));
        let why = device.kernels().unwrap().ready().unwrap_err();
        assert!(why.contains(call) && why.contains("hipErrorOperatingSystem"), "{why}");
        hip.fault(&FaultPlan::default());
        subject.load_by_host(&devices, &why);
        drop((device, devices));
        assert_clean(&hip);
    }
}

/// What a kernel may still use stays, and so does the context; the model is loaded all the same.
#[test]
fn hip_kernels_whose_trial_does_not_end_are_not_used() {
    let Some(hip) = stand_in(&card()) else { return };
    let (subject, devices) = (Subject::new(), registry());
    hip.fault(&FaultPlan::one(Fault::nth("hipModuleLaunchKernel", 3, Effect::Hold)));
    subject.load_by_host(&devices, "the trial of the kernels took over 5s");
    let report = hip.report();
    assert_eq!((report.calls_of("hipModuleLaunchKernel"), report.calls_of("hipModuleUnload")), (TRIAL, 0));
    assert!(report.violations.is_empty(), "{:?}", report.violations);
    // It may run at last: its memory is still there.
    hip.fault(&FaultPlan::default());
    drop(devices);
    let until = Instant::now() + DEADLINE;
    while hip.report().live_allocations > 2 && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(1));
    }
    let report = hip.report();
    assert_eq!((report.live_allocations, report.violations), (2, Vec::new()));
}

/// Whatever call of a load fails, the trial's among them, nothing hangs or stays, and the bytes of what is loaded are right.
#[test]
fn hip_kernels_keep_nothing_whatever_call_fails() {
    let subject = Subject::new();
    whatever_call_fails(&card(), &[Effect::Fail(304)], 0, registry, |devices| subject.load(devices).map(drop));
}

/// There are no others for these devices: the host computes the values of blocks and decodes.
#[test]
fn hip_kernels_only_patch() {
    let Some(hip) = stand_in(&card()) else { return };
    let devices = registry();
    let device = devices.device(HIP).unwrap();
    let (kernels, stream) = (device.kernels().unwrap(), device.stream(Role::Compute).unwrap());
    let why = kernels.dequantises(&*stream, DType::Q4_0, DType::F16).unwrap_err();
    assert_eq!(why, "hip:0 has no kernel that computes F16 of Q4_0");
    let why = kernels.decompresses(&*stream, DType::BF16).unwrap_err();
    assert_eq!(why, "hip:0 has no kernel that decodes BF16");
    assert_eq!(kernels.ready(), Ok(()));
    assert_eq!(hip.report().calls_of("hipModuleLoadData"), 1);
    drop((stream, device, devices));
    assert_clean(&hip);
}
