//! Slots that hold the values of GGML's blocks: blocks live on the devices and cross the links, and a layer's turn finds values.

mod support;

use std::sync::Arc;
use std::time::Duration;

use half::f16;
use proptest::prelude::*;
use support::framework::{Framework, Memory};
use support::gguf::Gguf;
use support::machines::steady_pass;
use support::*;
use tensor_offload::backend::{Backend, Clock, Host, MemoryKind, Operation, Role, Simulated};
use tensor_offload::cache::Evict;
use tensor_offload::checkpoint::TensorSpec;
use tensor_offload::plan::{TensorGrouping, Use};
use tensor_offload::{
    Adapter, ByteSize, Checkpoint, DType, DeviceId, ErrorKind, LayerGuard, Loader, Machine, Matching, ModelCache, Plan,
    Planner, Registry, Result, Retention, Streamer, Weights,
};

const VALUES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// Five layers of weights in blocks of several types with a bias beside one, a norm, a table and a head.
fn file() -> Gguf {
    let types = [DType::Q4_K, DType::Q8_0, DType::Q6_K, DType::IQ2_XXS, DType::Q2_K];
    let file = Gguf::new("llama").some("token_embd.weight", DType::Q8_0, &[96, 256]);
    let file = types.into_iter().enumerate().fold(file, |file, (layer, dtype)| {
        let name = |role: &str| format!("blk.{layer}.{role}");
        file.some(&name("attn_q.weight"), dtype, &[40, 256])
            .some(&name("attn_q.bias"), DType::F32, &[40])
            .some(&name("attn_norm.weight"), DType::F32, &[256])
            .some(&name("attn_v.weight"), DType::BF16, &[8, 256])
            .some(&name("ffn_up.weight"), DType::Q5_1, &[72, 256])
    });
    file.some("output_norm.weight", DType::F32, &[256]).some("output.weight", DType::Q6_K, &[96, 256])
}

/// The checkpoint, and its values as another type.
struct Quantised {
    weights: Weights,
    cast: Weights,
    to: DType,
}

impl Quantised {
    fn new(to: DType) -> Quantised {
        let weights = || Weights::new(Checkpoint::from_bytes("model.gguf", file().build()).unwrap());
        Quantised { weights: weights(), cast: weights().cast_floats(to).unwrap(), to }
    }

    fn planner<'a>(&'a self, machine: &'a Machine, allocation: &str) -> Planner<'a> {
        Planner::new(self.weights.layout(), machine).allocation(allocation.parse().unwrap()).unpack(self.to)
    }

    /// What a layer's turn must find of a tensor: its type and bytes.
    fn wanted(&self, name: &str) -> (DType, Vec<u8>) {
        let dtype = self.weights.layout().tensor(self.weights.layout().find(name).unwrap()).unwrap().dtype;
        let source = if dtype.is_ggml_block() { &self.cast } else { &self.weights };
        let tensor = source.layout().find(name).unwrap();
        let info = source.layout().tensor(tensor).unwrap();
        let mut bytes = vec![0; info.bytes as usize];
        source.read(tensor, &mut bytes).unwrap();
        (info.dtype, bytes)
    }

    fn check(&self, guard: &LayerGuard) -> Result<()> {
        for view in guard.tensors() {
            let (dtype, wanted) = self.wanted(view.name());
            assert_eq!((view.dtype(), view.size()), (dtype, wanted.len()), "{}", view.name());
            assert_eq!(view.info().bytes as usize, wanted.len());
            let mut bytes = vec![0; wanted.len()];
            guard.read(view.name(), &mut bytes)?;
            assert!(bytes == wanted, "{} as {dtype}", view.name());
        }
        Ok(())
    }

    fn pass(&self, streamer: &mut Streamer) -> Result<()> {
        layers(streamer).try_for_each(|layer| self.check(&streamer.layer(layer)?))
    }
}

/// The bytes that the plan says are streamed, and no others, crossed the links in these passes, at the end of which layers of the
/// next are fetched.
fn assert_crossed(streamer: &Streamer, plan: &Plan, passes: u64) {
    let crossed: u64 = streamer.report().bytes.values().sum();
    assert!(crossed <= (passes + 1) * plan.streamed_bytes(), "{crossed} bytes in {passes} passes\n{plan}");
    assert!(crossed >= plan.streamed_bytes(), "{crossed} bytes\n{plan}");
}

/// Blocks and a code of one module land in one buffer, which the larger of them needs.
#[test]
fn blocks_land_beside_codes() {
    let file = (0..4).fold(Gguf::new("llama").some("token_embd.weight", DType::Q8_0, &[96, 256]), |file, layer| {
        file.some(&format!("blk.{layer}.ffn_up.weight"), DType::Q8_0, &[64, 256]).some(
            &format!("blk.{layer}.ffn_up.bias"),
            DType::BF16,
            &[6000],
        )
    });
    let weights = || Weights::new(Checkpoint::from_bytes("model.gguf", file.build()).unwrap());
    let to = DType::F16;
    let quantised = Quantised { weights: weights().compress().unwrap(), cast: weights().cast_floats(to).unwrap(), to };
    for allocation in ["cpu,*", "cuda:1,*", "cpu,50%;xpu:0,50%"] {
        let devices = Registry::described(machine(), Clock::Wall);
        let planner = quantised.planner(devices.machine(), allocation).compute(GPU0).compress(true);
        for planner in [planner.clone().depth(1), planner.grouping(TensorGrouping::PerType).depth(0)] {
            let plan = planner.plan().unwrap();
            let compressed = plan.assignments().iter().filter(|a| a.is_compressed());
            assert_eq!(compressed.filter(|a| a.module.ends_with("ffn_up")).count(), 4, "{plan}");
            assert!(plan.slots().landing_bytes >= 64 * 256 / 32 * 34, "{plan}");
            let model = Arc::new(Loader::new(&devices).load(&quantised.weights, &plan).unwrap());
            let mut streamer = Streamer::new(&model).unwrap();
            (0..2).for_each(|_| quantised.pass(&mut streamer).unwrap());
            streamer.verify().unwrap();
        }
    }
}

#[test]
fn a_turn_finds_values_wherever_the_blocks_live() {
    let allocations = [
        "cuda:0,*",
        "cpu,*",
        "cuda:0,20%;cuda:1,20%;xpu:0,20%;disk,20%;cpu,20%",
        "xpu:0,50%;cpu,50%",
        "disk,*",
        "cuda:1,60%;cuda:0,40%",
    ];
    for (number, allocation) in allocations.into_iter().enumerate() {
        for compute in ["cuda:0", "cpu", "xpu:0"] {
            let quantised = Quantised::new(VALUES[number % 3]);
            let devices = Registry::described(machine(), Clock::Wall);
            let planner = quantised.planner(devices.machine(), allocation).compute(compute.parse().unwrap());
            for depth in [0, 2] {
                let cap = ByteSize(if depth == 0 { 10 << 10 } else { 1 << 20 });
                let planner = planner.clone().depth(depth).fixed_slots(number % 2 == 1);
                let plan = planner.landing_cap(cap).plan().unwrap();
                let model = Arc::new(Loader::new(&devices).load(&quantised.weights, &plan).unwrap());
                for share in plan.devices() {
                    let held = devices.device(share.id).unwrap().ledger().charged();
                    assert_eq!(held, share.weights.bytes + share.beside.slots, "{} in\n{plan}", share.id);
                }
                let mut streamer = Streamer::new(&model).unwrap();
                (0..3).for_each(|_| quantised.pass(&mut streamer).unwrap());
                assert_crossed(&streamer, &plan, 3);
                drop((streamer, model));
                comes_back(&devices);
            }
        }
    }
}

/// Blocks of a tensor that is larger than half a landing buffer arrive in parts.
#[test]
fn large_tensors_in_blocks_arrive_in_parts() {
    let file = Gguf::new("llama").some("blk.0.ffn_up.weight", DType::Q8_0, &[512, 40_000]);
    let file = file.some("blk.0.ffn_gate.weight", DType::Q6_K, &[90, 256]);
    let file = file.some("blk.1.ffn_down.weight", DType::Q5_1, &[4096, 5600]);
    let weights = || Weights::new(Checkpoint::from_bytes("model.gguf", file.clone().build()).unwrap());
    let to = DType::F16;
    let quantised = Quantised { weights: weights(), cast: weights().cast_floats(to).unwrap(), to };
    let machine = described(&["cpu=1gb", "disk=1gb,link=7", "xpu:0=128mb,link=55", "cuda:0=256mb,link=55"]);
    for allocation in ["cpu,*", "disk,50%;xpu:0,50%"] {
        let devices = Registry::described(machine.clone(), Clock::Wall);
        let plan = quantised.planner(&machine, allocation).compute(GPU0).depth(1).plan().unwrap();
        assert_eq!(plan.slots().landing_bytes, 32 << 20, "{plan}");
        let model = Arc::new(Loader::new(&devices).load(&quantised.weights, &plan).unwrap());
        let mut streamer = Streamer::new(&model).unwrap();
        (0..2).for_each(|_| quantised.pass(&mut streamer).unwrap());
        assert_crossed(&streamer, &plan, 2);
    }
}

/// A forecast of unpacked slots is the time on the virtual clock, in parts, through the host, and of what lives on the compute device.
#[test]
fn a_forecast_of_unpacked_slots_is_exact() {
    let quantised = Quantised::new(DType::F16);
    let machine = described(&["cpu=64mb", "disk=64mb,link=3", "xpu:0=24mb,link=2", "cuda:0=24mb,link=1"]);
    let compute = vec![Duration::from_micros(2); quantised.weights.layout().layers().len()];
    for allocation in ["cpu,*", "cuda:0,40%;cpu,60%", "xpu:0,50%;cpu,50%", "cuda:0,30%;disk,40%;cpu,30%"] {
        for (depth, cap) in [(0, 0), (1, 0), (2, 20_000), (1, 32 << 20)] {
            let planner = quantised.planner(&machine, allocation).compute(GPU0).depth(depth).landing_cap(ByteSize(cap));
            let plan = planner.plan().unwrap();
            let simulated = Arc::new(Simulated::new(machine.clone(), Clock::Virtual));
            let devices = Registry::new([Arc::clone(&simulated) as Arc<dyn Backend>]);
            let model = Arc::new(Loader::new(&devices).load(&quantised.weights, &plan).unwrap());
            let pass = steady_pass(&simulated, &model, &compute).unwrap();
            let forecast = plan.forecast(model.layout(), machine.topology(), &compute.clone().into()).unwrap();
            assert_eq!(pass, forecast, "{allocation}, depth {depth}, {cap}\n{plan}");
            let read: Plan = serde_json::from_value(serde_json::to_value(&plan).unwrap()).unwrap();
            read.verify(model.layout()).unwrap();
            assert_eq!(read, plan, "a plan that was written has its cap");
        }
    }
}

#[test]
fn what_lives_on_the_compute_device_in_blocks_takes_their_bytes_there_and_a_slot() {
    let (quantised, machine) = (Quantised::new(DType::BF16), machine());
    let plan = quantised.planner(&machine, "cuda:0,*").depth(1).plan().unwrap();
    let usage = |module: &str| plan.assignments().iter().find(|a| &*a.module == module).unwrap().usage;
    assert_eq!((usage("blk.0.attn_q"), usage("blk.0.attn_norm")), (Use::Unpacked, Use::Resident));
    assert_eq!((usage("blk.0.attn_v"), usage("output")), (Use::Resident, Use::Unpacked));
    assert_eq!((plan.streamed_bytes(), plan.slots().landings, plan.slots().landing_bytes), (0, 0, 0));
    assert_eq!(plan.bytes(), quantised.weights.layout().bytes());
    // A slot holds a layer's values and the bias that is part of the module; table and head have large ones.
    let values = |rows: u64| rows * 256 * 2;
    assert_eq!(plan.slots().bytes_each, values(40) + 256 + values(72));
    assert_eq!((plan.slots().large, plan.slots().large_bytes), (0, 0), "{plan}");
    assert!(plan.to_string().contains("slots hold the values of blocks as BF16"), "{plan}");
    // What the caller gathers rows of stays in blocks, and so does what is used in place.
    let gathered = quantised.planner(&machine, "cuda:0,*").gather_embeddings(true).in_place("output").plan().unwrap();
    let usage = |module: &str| gathered.assignments().iter().find(|a| &*a.module == module).unwrap().usage;
    assert_eq!([usage("token_embd"), usage("output")], [Use::Resident; 2]);
    let devices = Registry::described(machine.clone(), Clock::Virtual);
    let model = Arc::new(Loader::new(&devices).load(&quantised.weights, &gathered).unwrap());
    let mut streamer = Streamer::new(&model).unwrap();
    for name in ["token_embd", "output"] {
        let guard = streamer.layer(model.layout().find_layer(name).unwrap()).unwrap();
        assert_eq!(guard.tensor("weight").unwrap().dtype(), model.tensor(&format!("{name}.weight")).unwrap().dtype());
    }
}

#[test]
fn blocks_land_one_tensor_after_the_other_in_a_buffer_that_the_plan_counts() {
    let (quantised, machine) = (Quantised::new(DType::F16), machine());
    let plan = quantised.planner(&machine, "cpu,60%;cuda:1,40%").compute(GPU0).plan().unwrap();
    let slots = plan.slots();
    assert_eq!(slots.landings, 2, "{plan}");
    // Small ones arrive together: those of a layer.
    assert!(slots.landing_bytes > 0 && slots.landing_bytes < 72 << 10, "{plan}");
    let all = slots.count as u64 * slots.bytes_each + slots.large as u64 * slots.large_bytes;
    assert_eq!(slots.bytes(), all + 2 * slots.landing_bytes);
    assert_eq!(plan.device(GPU0).unwrap().beside.slots, slots.bytes());
    assert!(plan.to_string().contains("to unpack from"), "{plan}");
    let written = serde_json::to_value(&plan).unwrap();
    assert_eq!((&written["unpacked"], &written["slots"]["landings"]), (&"F16".into(), &2.into()));
    assert_eq!(serde_json::from_value::<Plan>(written).unwrap(), plan);
    let packed =
        Planner::new(quantised.weights.layout(), &machine).allocation("cpu,*".parse().unwrap()).plan().unwrap();
    let written = serde_json::to_value(&packed).unwrap();
    assert!(written["unpacked"].is_null() && written["slots"]["landings"].is_null(), "{written}");
    assert_eq!(packed.unpacked(), None);
}

#[test]
fn only_floats_of_more_than_a_byte_are_unpacked_to() {
    let (quantised, machine) = (Quantised::new(DType::F16), machine());
    for dtype in [DType::Q8_0, DType::F8E4M3, DType::I32, DType::F64] {
        let refused = quantised.planner(&machine, "cpu,*").unpack(dtype).plan().unwrap_err();
        assert!(refused.to_string().contains(&format!("F32, F16 or BF16, not {dtype}")), "{refused}");
        assert_eq!(refused.kind(), ErrorKind::Invalid);
    }
}

#[test]
fn a_model_without_blocks_is_planned_as_without() {
    let (subject, machine) = (Subject::plain(&mixed(4), 3), machine());
    let planner = subject.planner(&machine, "cuda:0,30%;cpu,*");
    let (with, without) = (planner.clone().unpack(DType::F16).plan().unwrap(), planner.plan().unwrap());
    assert_eq!((with.slots(), with.assignments()), (without.slots(), without.assignments()));
    let devices = Registry::described(machine, Clock::Virtual);
    check_streamed(&load(&devices, &subject, &with), &subject);
}

#[test]
fn slots_of_the_callers_own_hold_values_at_the_same_place_in_every_pass() {
    let quantised = Quantised::new(DType::BF16);
    let devices = Registry::described(machine(), Clock::Wall);
    let planner = quantised.planner(devices.machine(), "cuda:0,30%;cpu,*").external_slots(true);
    let plan = planner.plan().unwrap();
    assert!(plan.slots().count == 0 && plan.slots().landings == 1, "{plan}");
    let model = Arc::new(Loader::new(&devices).load(&quantised.weights, &plan).unwrap());
    let device = model.residency().device();
    let slots = (0..3).map(|_| device.alloc(plan.slots().largest() as usize, MemoryKind::Whole));
    let slots = slots.collect::<Result<_>>().unwrap();
    let mut streamer = Streamer::with_slots(&model, device.stream(Role::Compute).unwrap(), slots).unwrap();
    for layer in layers(&streamer).chain(layers(&streamer)) {
        let guard = streamer.layer(layer).unwrap();
        quantised.check(&guard).unwrap();
        for view in guard.tensors().filter(|view| view.dtype() == DType::BF16) {
            let Some(range) = streamer.range_in_slot(view.name()) else { continue };
            let here = streamer.in_slot(guard.slot().unwrap(), view.name()).unwrap();
            assert_eq!((here.byte_range(), here.info().dtype), (range.clone(), DType::BF16), "{}", view.name());
            assert_eq!(range.len(), view.size());
            assert!(view.name().contains("attn_q") || range.start.is_multiple_of(256), "{}", view.name());
        }
    }
    drop(quantised);
    assert_eq!(streamer.into_slots().unwrap().len(), 3);
    // The landing buffer went back to the model: another streamer can have it.
    let plan_streams_again = Streamer::with_slots(&model, device.stream(Role::Compute).unwrap(), {
        vec![device.alloc(plan.slots().largest() as usize, MemoryKind::Whole).unwrap()]
    });
    plan_streams_again.unwrap();
}

#[test]
fn divided_slots_hold_values_in_allocations_of_their_type() {
    for grouping in [TensorGrouping::PerType, TensorGrouping::PerTensor] {
        for to in VALUES {
            let quantised = Quantised::new(to);
            let devices = Registry::described(machine(), Clock::Wall);
            for compute in [GPU0, CPU] {
                let framework = Framework::new(compute, grouping, Memory::Locked);
                let planner = quantised.planner(devices.machine(), "cuda:0,30%;disk,20%;cpu,50%").compute(compute);
                let plan = planner.grouping(grouping).plan().unwrap();
                let loader = Loader::new(&devices).allocator(Arc::clone(&framework) as _);
                let model = Arc::new(loader.load(&quantised.weights, &plan).unwrap());
                let types: Vec<DType> = framework.live().iter().map(|tensor| tensor.dtype).collect();
                assert!(types.contains(&to) && types.iter().all(|dtype| !dtype.is_ggml_block()), "{types:?}");
                let mut streamer = Streamer::new(&model).unwrap();
                (0..2).for_each(|_| quantised.pass(&mut streamer).unwrap());
            }
        }
    }
}

/// Models that are derived, moved and demoted go on unpacking, and share the landing buffers where they share slots.
#[test]
fn models_made_of_others_unpack_too() {
    let quantised = Quantised::new(DType::F16);
    let devices = Registry::described(machine(), Clock::Wall);
    let planner = quantised.planner(devices.machine(), "cuda:0,40%;cpu,*");
    let plan = planner.plan().unwrap();
    let loader = Loader::new(&devices);
    let model = Arc::new(loader.load(&quantised.weights, &plan).unwrap());
    let again = Arc::new(loader.derive(&model, &quantised.weights, &plan).unwrap());
    let level = devices.device(GPU0).unwrap().ledger().charged();
    assert_eq!(level, plan.device(GPU0).unwrap().needed(), "both have the same memory");
    quantised.pass(&mut Streamer::new(&again).unwrap()).unwrap();
    drop(again);
    let moved = quantised.planner(devices.machine(), "cuda:1,50%;disk,*").compute(GPU1).plan().unwrap();
    let moved = Arc::new(loader.relocate(&model, &moved).unwrap());
    quantised.pass(&mut Streamer::new(&moved).unwrap()).unwrap();
    drop(moved);
    let cache = ModelCache::new();
    cache.insert("model", Arc::clone(&model), Retention::Keep);
    drop(model);
    let demoted = plan.demoted(quantised.weights.layout(), devices.machine()).unwrap();
    let room = (24 << 20) - demoted.device(GPU0).unwrap().needed();
    cache.make_room(&devices, GPU0, room, Evict::Demote).unwrap();
    let model = cache.get("model").unwrap();
    assert_eq!(model.plan(), &demoted);
    let usage = |plan: &Plan| plan.assignments().iter().filter(|a| a.usage == Use::Unpacked).count();
    assert_eq!((usage(model.plan()), usage(&plan) > 0), (0, true));
    quantised.pass(&mut Streamer::new(&model).unwrap()).unwrap();
}

/// Whatever operation fails, the error is told, all memory comes back, and the next attempt is right.
#[test]
fn nothing_is_lost_whatever_operation_fails() {
    let quantised = Quantised::new(DType::BF16);
    let path = |devices: &Registry| -> Result<()> {
        let planner = quantised.planner(devices.machine(), "cuda:0,25%;xpu:0,25%;disk,25%;cpu,*").depth(1);
        // The larger ones arrive in parts.
        let plan = planner.landing_cap(ByteSize(0)).plan()?;
        assert_eq!(plan.slots().landing_bytes, 8 << 10, "{plan}");
        let model = Arc::new(Loader::new(devices).workers(1).load(&quantised.weights, &plan)?);
        let mut streamer = Streamer::new(&model)?;
        let mut failed = None;
        for layer in layers(&streamer) {
            let turn = streamer.layer(layer).and_then(|guard| quantised.check(&guard));
            if let Err(error) = turn {
                failed = Some(error);
                // The streamer stays usable.
                quantised.check(&streamer.layer(layer)?)?;
            }
        }
        failed.map_or(Ok(()), Err)
    };
    let [unpacked, calls, told] = whatever_operation_fails(Operation::Dequantise, path);
    assert!(unpacked >= 12, "{unpacked} tensors");
    // What fails ahead of its turn is fetched again then.
    assert!(told > calls / 2, "{told} of {calls} failures");
}

#[test]
fn a_host_that_computes_unpacks_into_its_own_memory() {
    let quantised = Quantised::new(DType::F32);
    let devices = Registry::new([Arc::new(Host::new()) as Arc<dyn Backend>]);
    for allocation in ["cpu,*", "cpu,50%;disk,50%", "disk,*"] {
        let plan = quantised.planner(devices.machine(), allocation).compute(CPU).depth(1).plan().unwrap();
        let model = Arc::new(Loader::new(&devices).load(&quantised.weights, &plan).unwrap());
        let mut streamer = Streamer::new(&model).unwrap();
        for layer in layers(&streamer) {
            let guard = streamer.layer(layer).unwrap();
            // Compute on the host begins at once.
            for view in guard.tensors() {
                assert!(view.bytes().unwrap().unwrap() == quantised.wanted(view.name()).1, "{}", view.name());
            }
        }
    }
}

/// A change that is deferred stays beside the values: the weight's are those of the file.
#[test]
fn factors_of_deferred_changes_are_in_the_slot_beside_values() {
    let open = || Checkpoint::from_bytes("model.gguf", file().build()).unwrap();
    let factors = [
        spec("blk.3.ffn_up.lora_A.weight", DType::F32, &[4, 256]),
        spec("blk.3.ffn_up.lora_B.weight", DType::F32, &[72, 4]),
    ];
    let lora = safetensors(&factors, 9);
    let lora = || Checkpoint::from_bytes("lora.safetensors", lora.clone()).unwrap();
    let adapter = Adapter::from_checkpoint(lora(), 0.5).unwrap();
    let weights = Weights::patched(open(), vec![adapter], Matching::Strict).unwrap().defer("*", DType::F32).unwrap();
    let plain = Quantised::new(DType::BF16);
    let devices = Registry::described(machine(), Clock::Virtual);
    for allocation in ["cpu,*", "cuda:0,*"] {
        let planner = Planner::new(weights.layout(), devices.machine()).allocation(allocation.parse().unwrap());
        let plan = planner.unpack(DType::BF16).plan().unwrap();
        let model = Arc::new(Loader::new(&devices).load(&weights, &plan).unwrap());
        let mut streamer = Streamer::new(&model).unwrap();
        let guard = streamer.layer(model.layout().find_layer("blk.3").unwrap()).unwrap();
        let (dtype, wanted) = plain.wanted("blk.3.ffn_up.weight");
        let mut values = vec![0; wanted.len()];
        guard.read("blk.3.ffn_up.weight", &mut values).unwrap();
        assert!(values == wanted && guard.tensor("ffn_up.weight").unwrap().dtype() == dtype, "{allocation}");
        let deferred = guard.deferred("ffn_up.weight").unwrap();
        assert_eq!((deferred.a.shape(), deferred.b.shape(), deferred.scale), (&[4, 256][..], &[72, 4][..], 0.5));
        for (factor, name) in [(&deferred.a, "lora_A"), (&deferred.b, "lora_B")] {
            let name = format!("blk.3.ffn_up.{name}.weight");
            let mut wanted = vec![0; factor.size()];
            lora().read(lora().find(&name).unwrap(), &mut wanted).unwrap();
            let mut got = vec![0; factor.size()];
            guard.read(factor.name(), &mut got).unwrap();
            assert!(got == wanted, "{name}, {allocation}");
        }
    }
}

/// An adapter's changes are made to blocks where a policy allows it, and what is unpacked are the changed ones.
#[test]
fn changed_blocks_are_unpacked_as_they_were_changed() {
    let open = || Checkpoint::from_bytes("model.gguf", file().build()).unwrap();
    let tensors = ["blk.0.ffn_up", "blk.1.ffn_up"].map(|name| spec(format!("{name}.weight"), DType::F32, &[72, 256]));
    let factors = |tensor: &TensorSpec| {
        let module = tensor.name.trim_end_matches(".weight");
        let factor = |name: &str, shape: &[u64]| spec(format!("{module}.{name}.weight"), DType::F32, shape);
        [factor("lora_A", &[4, 256]), factor("lora_B", &[72, 4])]
    };
    let factors: Vec<TensorSpec> = tensors.iter().flat_map(factors).collect();
    let file = safetensors(&factors, 5);
    let adapter =
        || Adapter::from_checkpoint(Checkpoint::from_bytes("lora.safetensors", file.clone()).unwrap(), 0.5).unwrap();
    let weights = || Weights::patched(open(), vec![adapter()], Matching::Strict).unwrap().requantise().unwrap();
    let quantised = Quantised { weights: weights(), cast: weights(), to: DType::F16 };
    let devices = Registry::described(machine(), Clock::Virtual);
    let plan = quantised.planner(devices.machine(), "cuda:0,30%;cpu,*").plan().unwrap();
    let model = Arc::new(Loader::new(&devices).load(&quantised.weights, &plan).unwrap());
    let mut streamer = Streamer::new(&model).unwrap();
    for tensor in &tensors {
        let (layer, _) = tensor.name.split_at("blk.0".len());
        let mut blocks = vec![0; DType::Q5_1.bytes_of(&tensor.shape).unwrap() as usize];
        model.read(&tensor.name, &mut blocks).unwrap();
        let mut values = vec![0.0; 72 * 256];
        tensor_offload::patch::dequantise(DType::Q5_1, &blocks, &mut values).unwrap();
        let guard = streamer.layer(model.layout().find_layer(layer).unwrap()).unwrap();
        let wanted: Vec<f32> = values.into_iter().map(|value| f16::from_f32(value).to_f32()).collect();
        let got = guard.to_vec::<f16>(&tensor.name).unwrap();
        let same = |(got, wanted): (&f16, &f32)| got.to_f32() == *wanted || (got.is_nan() && wanted.is_nan());
        assert!(got.len() == wanted.len() && got.iter().zip(&wanted).all(same), "{}", tensor.name);
        assert!(model.to_vec::<f16>(&tensor.name).is_err(), "at home it is in blocks");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Any small model of blocks and other tensors, over any division of a machine.
    #[test]
    fn any_model_is_unpacked_as_it_is_cast(
        tensors in prop::collection::vec((0u64..6, 0usize..4, 1u64..40, prop::sample::select(vec![
            DType::Q4_0, DType::Q8_0, DType::Q3_K, DType::IQ4_XS, DType::MXFP4, DType::F32, DType::BF16, DType::I32,
        ])), 1..24),
        shares in prop::collection::vec(0u64..4, 5),
        (depth, fixed, to) in (0usize..4, any::<bool>(), prop::sample::select(VALUES.to_vec())),
        sequential in any::<bool>(),
        cap in prop::option::of(0u64..20_000),
    ) {
        prop_assume!(shares.iter().sum::<u64>() > 0);
        let mut names = std::collections::BTreeSet::new();
        let file = tensors.iter().fold(Gguf::new("llama"), |file, &(layer, module, rows, dtype)| {
            let role = ["weight", "bias", "inner", "outer"][rows as usize % 4];
            let name = format!("blk.{layer}.m{module}.{role}");
            if names.insert(name.clone()) { file.some(&name, dtype, &[rows, 256]) } else { file }
        });
        let open = || Weights::new(Checkpoint::from_bytes("model.gguf", file.build()).unwrap());
        let patterns: Vec<String> = open().layout().tensors().iter()
            .filter(|tensor| tensor.dtype.is_ggml_block()).map(|tensor| tensor.name.clone()).collect();
        let cast = patterns.iter().try_fold(open(), |weights, name| weights.cast(name, to)).unwrap();
        let quantised = Quantised { weights: open(), cast, to };
        let devices = Registry::described(machine(), Clock::Virtual);
        let names = ["cuda:0", "cuda:1", "xpu:0", "disk", "cpu"];
        let quotas: Vec<String> = names.iter().zip(&shares).map(|(device, share)| format!("{device},{share}%")).collect();
        let order = if sequential { tensor_offload::Order::Sequential } else { tensor_offload::Order::Interleaved };
        let planner = quantised.planner(devices.machine(), &quotas.join(";")).compute(DeviceId::cuda(0)).order(order);
        let planner = planner.depth(depth).fixed_slots(fixed).landing_cap(cap.map_or(ByteSize(1 << 20), ByteSize));
        let plan = planner.plan().unwrap();
        plan.verify(quantised.weights.layout()).unwrap();
        let model = Arc::new(Loader::new(&devices).load(&quantised.weights, &plan).unwrap());
        let mut streamer = Streamer::new(&model).unwrap().deadline(Duration::from_secs(20));
        for _ in 0..2 {
            quantised.pass(&mut streamer).unwrap();
        }
    }
}
