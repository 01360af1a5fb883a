//! What a layer costs in calls of the driver, whose number does not depend on how busy the machine is. `--nocapture` shows
//! them all.
#![cfg(all(feature = "cuda", target_os = "linux"))]

mod card;
mod support;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use card::stand_in;
use cuda_standin::{Config, Effect, Fault, FaultPlan, Session};
use support::{Subject, llama, spec};
use tensor_offload::backend::{Backend, Cuda, Host, MemoryKind, Role};
use tensor_offload::{ByteSize, DType, Loader, Model, Registry, Streamer};

const DEADLINE: Duration = Duration::from_secs(60);
const PASSES: usize = 10;

fn model(subject: &Subject, allocation: &str, own_slots: bool) -> Arc<Model> {
    let cuda = Cuda::new().context_size(ByteSize(0));
    let devices = Registry::new([Arc::new(cuda) as Arc<dyn Backend>, Arc::new(Host::new())]);
    let planner = subject.planner(devices.machine(), allocation).depth(1).external_slots(own_slots);
    let plan = planner.plan().unwrap();
    Arc::new(Loader::new(&devices).load(&subject.weights, &plan).unwrap())
}

fn streamer(model: &Arc<Model>, own_slots: bool) -> Streamer {
    if !own_slots {
        return Streamer::new(model).unwrap();
    }
    let device = model.residency().device();
    let buffer = || device.alloc(model.plan().slots().bytes_each as usize, MemoryKind::Whole).unwrap();
    let slots = (0..2).map(|_| buffer()).collect();
    Streamer::with_slots(model, device.stream(Role::Compute).unwrap(), slots).unwrap()
}

/// The calls of a few passes, for each layer of them, without those of threads of the library's own where they can be told:
/// events are asked for by its reaper, too, as often as it happens to look.
fn calls(cuda: &Session, subject: &Subject, allocation: &str, own_slots: bool) -> BTreeMap<String, f64> {
    let model = model(subject, allocation, own_slots);
    let mut streamer = streamer(&model, own_slots);
    let pass = |streamer: &mut Streamer| {
        model.layout().layer_ids().for_each(|layer| drop(streamer.layer(layer).unwrap()));
        streamer.compute().record(&[]).unwrap().wait(DEADLINE).unwrap();
    };
    (0..2).for_each(|_| pass(&mut streamer));
    let before = cuda.report().calls;
    (0..PASSES).for_each(|_| pass(&mut streamer));
    let after = cuda.report().calls;
    let each = |(call, count): (String, u64)| {
        let new = count - before.get(&call).copied().unwrap_or(0);
        (new > 0).then(|| (call, new as f64 / (model.layout().layers().len() * PASSES) as f64))
    };
    after.into_iter().filter_map(each).collect()
}

#[test]
fn cuda_a_layer_takes_few_calls() {
    let experts = |layer: u64| {
        (0..400).map(move |e| spec(format!("model.layers.{layer}.experts.{e}.w.weight"), DType::F32, &[16, 16]))
    };
    let experts = Subject::plain(&(0..4).flat_map(experts).collect::<Vec<_>>(), 60);
    let llama = Subject::plain(&llama(4, 32), 61);
    // Copies, events and waits for each layer, at most: for slots of the caller's own as few events as for the library's.
    for (name, subject, allocation, own_slots, most) in [
        ("llama, slots of the library's", &llama, "cpu,*", false, [5.0, 2.3, 3.5]),
        ("llama, slots of the caller's", &llama, "cpu,*", true, [5.0, 2.3, 3.5]),
        ("400 experts", &experts, "cpu,*", false, [1.0, 2.3, 3.5]),
        ("400 experts through the host", &experts, "cuda:1,*", false, [2.0, 3.3, 5.5]),
    ] {
        let config = Config { check_sources: false, ..Config::with_devices(&[64 << 20, 64 << 20]) };
        let Some(cuda) = stand_in(&config) else { return };
        let calls = calls(&cuda, subject, allocation, own_slots);
        println!("{name}:");
        calls.iter().for_each(|(call, each)| println!("  {call} {each:.1} a layer"));
        let of = |names: &[&str]| -> f64 { names.iter().filter_map(|name| calls.get(*name)).sum() };
        let copies = of(&["cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2", "cuMemcpyBatchAsync"]);
        let found = [copies, of(&["cuEventRecord"]), of(&["cuStreamWaitEvent"])];
        assert!(found.iter().zip(most).all(|(found, most)| *found <= most), "{name}: {found:?}, at most {most:?}");
        card::wait_until_closed(&cuda, DEADLINE);
    }
}

/// A driver that takes batches of copies gets one for a layer, in the interface of its version; one that has the call and
/// refuses it gets the copies one by one. The bytes are the same.
#[test]
fn cuda_the_copies_of_a_layer_are_one_batch_where_there_are_batches() {
    let subject = Subject::plain(&llama(4, 32), 62);
    for (version, call) in [(12_080, "cuMemcpyBatchAsync"), (13_000, "cuMemcpyBatchAsync_v2")] {
        for refused in [false, true] {
            let config = Config { driver_version: version, ..Config::with_devices(&[64 << 20]).late_micros(500) };
            let Some(cuda) = stand_in(&config) else { return };
            if refused {
                cuda.fault(&FaultPlan::one(Fault::nth(call, 1, Effect::Fail(801)).onwards()));
            }
            let model = model(&subject, "cpu,*", false);
            let mut streamer = Streamer::new(&model).unwrap();
            for layer in model.layout().layer_ids().chain(model.layout().layer_ids()) {
                let guard = streamer.layer(layer).unwrap();
                for tensor in guard.tensors() {
                    let mut bytes = vec![0; tensor.info().bytes as usize];
                    guard.read(&tensor.info().name, &mut bytes).unwrap();
                    assert!(bytes == subject.bytes_of(&tensor.info().name), "{}", tensor.info().name);
                }
            }
            let fills = streamer.report().lanes.iter().map(|lane| lane.fills).sum::<u64>();
            let report = cuda.report();
            let (batches, singles) = (report.calls_of(call), report.calls_of("cuMemcpyHtoDAsync_v2"));
            if refused {
                assert!(batches == 1 && singles > fills, "{batches} batches, {singles} copies, {fills} fills");
            } else {
                assert!(
                    batches > 0 && batches + singles <= fills,
                    "{batches} batches, {singles} copies, {fills} fills"
                );
            }
            drop((streamer, model));
            card::assert_clean(&cuda);
        }
    }
}
