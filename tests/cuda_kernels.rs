//! Patching by the kernels of CUDA devices: the text that ships, interpreted by the stand-in driver or run by a card,
//! gives the bits of the host.
#![cfg(all(feature = "cuda", target_os = "linux"))]

mod card;
mod reference;

use std::sync::Arc;

use card::{
    DEADLINE, Driver, assert_clean, assert_given_back, driver, named, registry, stand_in, wait_until_closed,
    whatever_call_fails,
};
use cuda_standin::{Config, Effect, Fault, FaultPlan, MemoryMode};
use half::{bf16, f16};
use reference::{Tensor, f32s, file, tensor};
use tensor_offload::backend::{Backend, Countdown, Cuda, Faulty, Host, Operation};
use tensor_offload::{Adapter, DType, DeviceId, Error, Loader, Matching, Model, Planner, Registry, Result, Weights};

const TYPES: [DType; 5] = [DType::F32, DType::F16, DType::BF16, DType::F8E4M3, DType::F8E5M2];
const ON_DEVICE: &str = "cuda:0,100%";

/// The generator splitmix64 (Steele, Lea and Flood 2014).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Evenly in -1..1.
    fn even(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    /// Elements of which most are like weights and every fourth is any code there is: zeros, subnormals, infinities,
    /// NaN, the largest.
    fn weights(&mut self, dtype: DType, count: usize) -> Vec<u8> {
        let element = |random: &mut Random| {
            let (value, any) = (random.even(), random.next() as u32);
            let edge = random.next().is_multiple_of(4);
            match dtype {
                DType::F32 => if edge { any } else { value.to_bits() }.to_le_bytes().to_vec(),
                DType::F16 => if edge { any as u16 } else { f16::from_f32(value).to_bits() }.to_le_bytes().to_vec(),
                DType::BF16 => if edge { any as u16 } else { bf16::from_f32(value).to_bits() }.to_le_bytes().to_vec(),
                _ => vec![any as u8],
            }
        };
        (0..count).flat_map(|_| element(self)).collect()
    }

    /// Finite factors, of which every sixteenth is at an edge: their sums pass the range, and become NaN too.
    fn factors(&mut self, count: usize) -> Vec<f32> {
        const EDGES: [f32; 8] = [0.0, -0.0, f32::MIN_POSITIVE / 8.0, -1e-40, 1e30, -1e30, f32::MAX, 65519.0];
        let value = |random: &mut Random| match random.next() {
            edge if edge.is_multiple_of(16) => EDGES[(edge / 16 % 8) as usize],
            _ => random.even(),
        };
        (0..count).map(|_| value(self)).collect()
    }

    fn lora(&mut self, module: &str, rows: usize, cols: usize, rank: usize) -> Vec<Tensor> {
        let (up, down) = (self.factors(rows * rank), self.factors(rank * cols));
        vec![
            f32s(&format!("{module}.lora_up.weight"), &[rows as u64, rank as u64], &up),
            f32s(&format!("{module}.lora_down.weight"), &[rank as u64, cols as u64], &down),
            f32s(&format!("{module}.alpha"), &[], &[1.5 * rank as f32]),
        ]
    }
}

/// A checkpoint, adapters for it, and what the host makes of both.
struct Subject {
    weights: Weights,
    wanted: Vec<Vec<u8>>,
    saturated: u64,
}

impl Subject {
    fn new(tensors: &[Tensor], adapters: &[Vec<Tensor>]) -> Subject {
        let strengths = [0.7, -1.3, 2.0];
        let open = |(tensors, strength): (&Vec<Tensor>, f32)| {
            Adapter::from_checkpoint(file("adapter", tensors), strength).unwrap()
        };
        let adapters = adapters.iter().filter(|tensors| !tensors.is_empty()).zip(strengths).map(open).collect();
        let weights = Weights::patched(file("model", tensors), adapters, Matching::Strict).unwrap();
        let mut saturated = 0;
        let wanted = weights.layout().tensor_ids().zip(weights.layout().tensors()).map(|(tensor, info)| {
            let mut bytes = vec![0; info.bytes as usize];
            saturated += weights.read(tensor, &mut bytes).unwrap().saturated;
            bytes
        });
        Subject { wanted: wanted.collect(), saturated, weights }
    }

    fn patched(&self) -> usize {
        self.weights.patches().iter().count()
    }

    fn load(&self, devices: &Registry, allocation: &str) -> Result<Model> {
        let planner = Planner::new(self.weights.layout(), devices.machine()).allocation(allocation.parse()?);
        let plan = planner.compute(DeviceId::cuda(0)).plan()?;
        Loader::new(devices).workers(2).deadline(DEADLINE).load(&self.weights, &plan)
    }

    /// Every tensor has the bytes of the host, and as many values were saturated.
    fn check(&self, model: &Model) -> Result<()> {
        for (info, wanted) in self.weights.layout().tensors().iter().zip(&self.wanted) {
            let mut bytes = vec![0; wanted.len()];
            model.read(&info.name, &mut bytes)?;
            let size = info.dtype.element_bytes().unwrap();
            let wrong = bytes.chunks(size).zip(wanted.chunks(size)).position(|(got, wanted)| got != wanted);
            if let Some(at) = wrong {
                let (got, wanted) = (&bytes[at * size..][..size], &wanted[at * size..][..size]);
                panic!("`{}` {} {:?}, element {at}: {got:02x?}, not {wanted:02x?}", info.name, info.dtype, info.shape);
            }
        }
        assert_eq!(model.report().saturated, self.saturated);
        Ok(())
    }
}

/// Whether the driver takes the kernels. The stand-in has to; another may not, and then the host patches.
fn has_kernels(devices: &Registry) -> bool {
    let device = devices.device(DeviceId::cuda(0)).unwrap();
    match device.kernels().unwrap().ready() {
        Ok(()) => true,
        Err(why) => {
            assert!(named(), "{why}");
            eprintln!("skipped: the driver has no kernels for its device: {why}");
            false
        }
    }
}

fn one_card() -> Config {
    Config::with_devices(&[64 << 20]).memory(MemoryMode::Reuse).seed(3)
}

/// Loads the subject to the card, in pieces that a test can look at, and checks the bytes and that kernels made them.
#[track_caller]
fn check_on_device(driver: &Driver, subject: &Subject) {
    let devices = registry();
    let model = subject.load(&devices, ON_DEVICE).unwrap();
    subject.check(&model).unwrap();
    let report = model.report();
    let on_device = if has_kernels(&devices) { subject.patched() } else { 0 };
    assert_eq!((report.patched, report.patched_on_device), (subject.patched(), on_device), "{report}");
    drop((model, devices));
    driver.assert_clean();
}

/// Weights with whatever codes there are, odd shapes, ranks of 1 to 65 and one to three adapters on one weight.
#[test]
fn cuda_kernels_give_the_bits_of_the_host() {
    let shapes = [(1, 1, 1), (8, 32, 2), (13, 37, 3), (7, 200, 16), (65, 129, 5), (9, 31, 65), (130, 300, 17)];
    let mut random = Random(1);
    let (mut tensors, mut adapters) = (Vec::new(), vec![Vec::new(); 3]);
    for dtype in TYPES {
        for (index, (rows, cols, rank)) in shapes.into_iter().enumerate() {
            let module = format!("{dtype}.{index}.w").to_lowercase();
            let bytes = random.weights(dtype, rows * cols);
            tensors.push(tensor(&format!("{module}.weight"), dtype, &[rows as u64, cols as u64], bytes));
            for (adapter, more) in adapters.iter_mut().zip(0..=index % 3) {
                adapter.extend(random.lora(&module, rows, cols, rank + more));
            }
        }
    }
    let subject = Subject::new(&tensors, &adapters);
    assert!(subject.saturated > 100);
    check_on_device(&driver(&one_card()), &subject);
}

/// Sums that fall exactly between two values of the type, and beside that by a little.
#[test]
fn cuda_kernels_round_ties_to_even() {
    let (mut tensors, mut adapter) = (Vec::new(), Vec::new());
    for (dtype, digits) in TYPES.into_iter().zip([23, 10, 7, 3, 2]) {
        let module = format!("{dtype}.w").to_lowercase();
        // Around 1, two units further on and 1/2 below, where the unit is half as large.
        let ones: Vec<f32> = (0..64).map(|col| [1.0, -1.0, 1.25, 0.5][col % 4]).collect();
        let up: Vec<f32> = (0..32).map(|row| row as f32 * 0.25 * 2f32.powi(-digits) + 2f32.powi(-30)).collect();
        let bytes: Vec<u8> = (0..32)
            .flat_map(|_| &ones)
            .flat_map(|value| match dtype {
                DType::F8E4M3 => vec![[0x38, 0xb8, 0x3a, 0x30][ones.iter().position(|v| v == value).unwrap()]],
                DType::F8E5M2 => vec![[0x3c, 0xbc, 0x3d, 0x38][ones.iter().position(|v| v == value).unwrap()]],
                _ => reference::stored(dtype, &[*value]),
            })
            .collect();
        tensors.push(tensor(&format!("{module}.weight"), dtype, &[32, 64], bytes));
        // Every other column without the little that lifts it over the tie.
        let down: Vec<f32> = (0..64).map(|col| if col % 8 < 4 { 1.0 } else { 0.0 }).collect();
        let exact: Vec<f32> = (0..32).map(|row| row as f32 * 0.25 * 2f32.powi(-digits)).collect();
        let both: Vec<f32> = up.iter().zip(&exact).flat_map(|(up, exact)| [*up, *exact]).collect();
        let downs: Vec<f32> = down.iter().copied().chain(down.iter().map(|d| 1.0 - d)).collect();
        adapter.push(f32s(&format!("{module}.lora_up.weight"), &[32, 2], &both));
        adapter.push(f32s(&format!("{module}.lora_down.weight"), &[2, 64], &downs));
    }
    check_on_device(&driver(&one_card()), &Subject::new(&tensors, &[adapter]));
}

/// One scale, one for each row, and one for each block of 128 by 128, of which the last are smaller.
#[test]
fn cuda_kernels_scale_fp8_as_the_host_does() {
    let mut random = Random(2);
    let (mut tensors, mut adapter) = (Vec::new(), Vec::new());
    for dtype in [DType::F8E4M3, DType::F8E5M2] {
        for (ending, grid) in
            [("scale_weight", vec![]), ("weight_scale", vec![130, 1]), ("weight_scale_inv", vec![2, 3])]
        {
            let module = format!("{dtype}.{ending}.w").to_lowercase();
            let count = grid.iter().product::<u64>() as usize;
            let scales: Vec<f32> = (0..count).map(|_| random.even() * 0.03 + 0.05).collect();
            tensors.push(tensor(&format!("{module}.weight"), dtype, &[130, 300], random.weights(dtype, 130 * 300)));
            tensors.push(f32s(&format!("{module}.{ending}"), &grid, &scales));
            adapter.extend(random.lora(&module, 130, 300, 4));
        }
    }
    let subject = Subject::new(&tensors, &[adapter]);
    assert_eq!(subject.patched(), 6);
    check_on_device(&driver(&one_card()), &subject);
}

/// A scale of random numbers near 0.05, or of powers of two below one.
fn scale(random: &mut Random, name: &str, dtype: DType, shape: &[u64]) -> Tensor {
    let count = shape.iter().product::<u64>() as usize;
    let bytes = match dtype {
        DType::F8E8M0 | DType::U8 => (0..count).map(|_| 120 + (random.next() % 6) as u8).collect(),
        _ => reference::stored(dtype, &(0..count).map(|_| random.even() * 0.03 + 0.05).collect::<Vec<_>>()),
    };
    tensor(name, dtype, shape, bytes)
}

/// Blocks of a row, of any width; powers of two as scales, one of them the least there is; scales in tiles.
#[test]
fn cuda_kernels_take_every_grid_of_scales() {
    let mut random = Random(5);
    let note = br#"{"format": "mxfp8"}"#;
    let (mut tensors, mut adapter) = (Vec::new(), Vec::new());
    for (module, ending, dtype, grid) in [
        ("a.w", "scale_weight", DType::BF16, &[130, 5, 1][..]),
        ("b.w", "weight_scale", DType::F32, &[130, 10]),
        ("c.w", "weight_scale", DType::F16, &[1, 320]),
        ("d.w", "weight_scale", DType::F8E8M0, &[130, 10]),
        ("e.w", "weight_scale", DType::U8, &[256, 12]),
        ("f.w", "scale", DType::F8E8M0, &[2, 3]),
    ] {
        tensors.push(tensor(
            &format!("{module}.weight"),
            DType::F8E4M3,
            &[130, 320],
            random.weights(DType::F8E4M3, 41_600),
        ));
        let mut scale = scale(&mut random, &format!("{module}.{ending}"), dtype, grid);
        if dtype == DType::F8E8M0 {
            scale.3[0] = 0;
        }
        tensors.push(scale);
        if dtype == DType::U8 {
            tensors.push(tensor(&format!("{module}.comfy_quant"), DType::U8, &[note.len() as u64], note.to_vec()));
        }
        adapter.extend(random.lora(module, 130, 320, 4));
    }
    let subject = Subject::new(&tensors, &[adapter]);
    assert_eq!(subject.patched(), 6);
    check_on_device(&driver(&one_card()), &subject);
}

/// Of a stack of matrices, those with scales that are the same in each row of the stack are patched on the device, the others
/// on the host.
#[test]
fn cuda_kernels_leave_grids_over_stacks_to_the_host() {
    let mut random = Random(6);
    let (mut tensors, mut adapter) = (Vec::new(), Vec::new());
    for (module, grid) in
        [("a.w", &[4, 1, 1][..]), ("b.w", &[4, 32, 1]), ("c.w", &[4, 32, 2]), ("d.w", &[4, 2, 4]), ("e.w", &[4, 1, 64])]
    {
        tensors.push(tensor(
            &format!("{module}.weight"),
            DType::F8E4M3,
            &[4, 32, 64],
            random.weights(DType::F8E4M3, 8192),
        ));
        tensors.push(scale(&mut random, &format!("{module}.weight_scale"), DType::F32, grid));
        adapter.push(f32s(&format!("{module}.lora_up.weight"), &[4, 2, 1], &random.factors(8)));
        adapter.push(f32s(&format!("{module}.lora_down.weight"), &[2, 32, 64], &random.factors(4096)));
    }
    let (driver, subject) = (driver(&one_card()), Subject::new(&tensors, &[adapter]));
    let devices = registry();
    let model = subject.load(&devices, ON_DEVICE).unwrap();
    subject.check(&model).unwrap();
    let on_device = if has_kernels(&devices) { 3 } else { 0 };
    assert_eq!((model.report().patched, model.report().patched_on_device), (5, on_device));
    drop((model, devices));
    driver.assert_clean();
}

/// A convolution, one with a middle factor, adapters of parts of a fused weight, and beside them what is no product.
fn a_model() -> (Subject, usize) {
    let mut random = Random(3);
    let bf16 = |random: &mut Random, name: &str, shape: &[u64]| {
        let count = shape.iter().product::<u64>() as usize;
        tensor(name, DType::BF16, shape, random.weights(DType::BF16, count))
    };
    let tensors = [
        bf16(&mut random, "conv.weight", &[20, 12, 3, 3]),
        bf16(&mut random, "tucker.weight", &[20, 12, 3, 3]),
        bf16(&mut random, "double_blocks.0.img_attn.qkv.weight", &[60, 20]),
        bf16(&mut random, "plain.weight", &[40, 40]),
        bf16(&mut random, "changed.weight", &[40, 40]),
        bf16(&mut random, "decomposed.weight", &[40, 40]),
    ];
    let mut adapter = vec![
        f32s("conv.lora_up.weight", &[20, 4, 1, 1], &random.factors(80)),
        f32s("conv.lora_down.weight", &[4, 12, 3, 3], &random.factors(4 * 108)),
        f32s("tucker.lora_up.weight", &[20, 4, 1, 1], &random.factors(80)),
        f32s("tucker.lora_mid.weight", &[4, 4, 3, 3], &random.factors(144)),
        f32s("tucker.lora_down.weight", &[4, 12, 1, 1], &random.factors(48)),
        f32s("changed.diff", &[40, 40], &random.factors(1600)),
        f32s("decomposed.dora_scale", &[40, 1], &random.factors(40)),
    ];
    adapter.extend(random.lora("decomposed", 40, 40, 3));
    for part in ["to_q", "to_v"] {
        adapter.extend(random.lora(&format!("transformer.transformer_blocks.0.attn.{part}"), 20, 20, 3));
    }
    (Subject::new(&tensors, &[adapter]), 3)
}

/// LoCon and parts of fused weights are patched on the device; a difference and a DoRA on the host; the bytes are those
/// of any other placement.
#[test]
fn cuda_kernels_patch_a_model_where_it_is() {
    let (subject, on_device) = a_model();
    for (allocation, there) in [(ON_DEVICE, on_device), ("cuda:0,50%;cpu,50%", 1), ("cuda:0,0%;cpu,*", 0)] {
        let driver = driver(&one_card().late_micros(10_000_000));
        let devices = registry();
        let has_kernels = has_kernels(&devices);
        let model = subject.load(&devices, allocation).unwrap();
        subject.check(&model).unwrap();
        let report = model.report();
        assert_eq!((report.patched, report.host_instead.is_empty()), (5, has_kernels || there == 0), "{report}");
        let least = if has_kernels { there } else { 0 };
        assert!((least..=on_device).contains(&report.patched_on_device), "{allocation}: {report}");
        if least == on_device {
            assert_eq!(report.patched_on_device, on_device);
            assert!(report.to_string().contains("3 patched on the device"), "{report}");
        }
        drop((model, devices));
        driver.assert_clean();
    }
}

#[test]
fn cuda_kernels_that_a_driver_refuses_leave_the_host_to_patch() {
    let (subject, _) = a_model();
    let mut older_card = one_card();
    older_card.devices[0].compute = (6, 1);
    for (config, reason) in [
        (Config { refuse_ptx: true, ..one_card() }, "INVALID_PTX"),
        (Config { driver_version: 11_040, ..older_card }, "INVALID_PTX"),
    ] {
        let Some(cuda) = stand_in(&config) else { return };
        let devices = registry();
        let model = subject.load(&devices, ON_DEVICE).unwrap();
        subject.check(&model).unwrap();
        let report = model.report();
        assert_eq!((report.patched, report.patched_on_device, report.host_instead.len()), (5, 0, 1));
        let line = report.to_string();
        let told = ["patched on the host instead: cuda:0: cuModuleLoadData", reason];
        assert!(told.iter().all(|part| line.contains(part)), "{line}");
        drop(subject.load(&devices, ON_DEVICE).unwrap());
        assert_eq!(cuda.report().calls_of("cuModuleLoadData"), 1, "a refusal is remembered");
        drop((model, devices));
        assert_clean(&cuda);
    }
}

/// Where the plan leaves no room for factors, the host patches.
#[test]
fn cuda_kernels_without_room_for_factors_leave_the_host_to_patch() {
    let mut random = Random(4);
    let weight = tensor("w.weight", DType::BF16, &[512, 512], random.weights(DType::BF16, 512 * 512));
    let subject = Subject::new(&[weight], &[random.lora("w", 512, 512, 200)]);
    let Some(cuda) = stand_in(&Config::with_devices(&[1 << 20])) else { return };
    let devices = registry();
    let model = subject.load(&devices, ON_DEVICE).unwrap();
    subject.check(&model).unwrap();
    let report = model.report();
    assert_eq!(report.patched_on_device, 0);
    assert!(report.to_string().contains("instead: cuda:0: no room for"), "{report}");
    drop((model, devices));
    assert_clean(&cuda);
}

/// Loads, reads all back and lets it go.
fn whole_path(devices: &Registry, subject: &Subject) -> Result<()> {
    let model = subject.load(devices, ON_DEVICE)?;
    subject.check(&model)
}

#[test]
fn cuda_kernels_keep_nothing_whatever_call_fails() {
    let (subject, _) = a_model();
    let effects = [Effect::Fail(304), Effect::OutOfMemory, Effect::Sticky(700)];
    whatever_call_fails(&one_card(), &effects, 0, registry, |devices| whole_path(devices, &subject));
}

/// The calls of kernels fail one by one: refusals at loading leave the host to patch, a launch that fails is an error.
#[test]
fn cuda_kernels_calls_that_fail_are_told() {
    let (subject, _) = a_model();
    for (call, effect) in [
        ("cuModuleLoadData", Effect::OutOfMemory),
        ("cuModuleGetFunction", Effect::Fail(500)),
        ("cuLaunchKernel", Effect::Fail(701)),
        ("cuLaunchKernel", Effect::LateSticky(700)),
    ] {
        let Some(cuda) = stand_in(&one_card()) else { return };
        cuda.fault(&FaultPlan::one(Fault::nth(call, 2.min(1 + u64::from(call.ends_with("Kernel"))), effect)));
        let devices = registry();
        let outcome = subject.load(&devices, ON_DEVICE);
        match (call, outcome) {
            ("cuLaunchKernel", Err(error)) => {
                assert!(
                    matches!(error, Error::Driver { .. } | Error::DeviceLost { .. } | Error::Failed { .. }),
                    "{error}"
                );
            }
            ("cuLaunchKernel", Ok(model)) => panic!("a launch that failed went unseen: {}", model.report()),
            (_, Err(error)) => panic!("{call}: {error}"),
            (_, Ok(model)) => {
                subject.check(&model).unwrap();
                assert!(model.report().host_instead[0].contains(call), "{}", model.report());
                // A lack of memory is not for good: the next of the three asks again.
                let there = if effect == Effect::OutOfMemory { 2 } else { 0 };
                assert_eq!(model.report().patched_on_device, there, "{}", model.report());
            }
        }
        assert_given_back(&devices, &cuda, call);
        drop(devices);
        wait_until_closed(&cuda, DEADLINE);
    }
}

/// `Faulty` counts patches as operations, and each of them can fail.
#[test]
fn cuda_kernels_are_operations_that_can_fail() {
    let (subject, on_device) = a_model();
    let cuda = driver(&one_card());
    if !has_kernels(&registry()) {
        return;
    }
    let load = |fail: Option<u64>| {
        let countdown = Countdown::new();
        let faulty: Arc<dyn Backend> = Arc::new(Faulty::new(Cuda::new(), countdown.clone()));
        let devices = Registry::new([faulty, Arc::new(Host::new())]);
        fail.iter().for_each(|nth| countdown.fail_nth(*nth));
        let outcome = whole_path(&devices, &subject);
        assert_given_back(&devices, None, "a load over a faulty backend");
        (outcome, countdown)
    };
    let (outcome, countdown) = load(None);
    outcome.unwrap();
    assert_eq!(countdown.calls_of(Operation::Patch), on_device as u64);
    for nth in 1..=countdown.calls() {
        // Whatever cannot be had for the factors, the host patches; all else is an error.
        drop(load(Some(nth)));
    }
    cuda.assert_clean();
}
