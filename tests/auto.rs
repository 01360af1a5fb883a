//! Mode auto, and the forecasts that it goes by, against the streamer on the virtual clock.

mod support;

use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;
use support::*;
use tensor_offload::backend::{Backend, Clock, Contents, Simulated};
use tensor_offload::checkpoint::{Layout, TensorInfo};
use tensor_offload::{
    Bandwidth, ComputeTime, DType, DeviceId, DeviceInfo, Machine, Model, Order, Plan, Planner, Registry, Streamer,
    Topology, Unit,
};

/// The time of a pass of a model that runs already, each layer computing for its time.
fn clocked(machine: &Machine, layout: &Layout, plan: &Plan, layers: &[Duration]) -> Duration {
    let simulated = Arc::new(Simulated::new(machine.clone(), Clock::Virtual).contents(Contents::SizesOnly));
    let devices = Registry::new([Arc::clone(&simulated) as Arc<dyn Backend>]);
    let model = Arc::new(Model::unfilled(&devices, layout, plan).unwrap());
    let mut streamer = Streamer::new(&model).unwrap();
    let mut begin = Duration::ZERO;
    for pass in 0..3 {
        if pass == 1 {
            begin = simulated.now();
        }
        for (layer, &time) in layers.iter().enumerate() {
            let _guard = streamer.layer(layer).unwrap();
            streamer.compute().occupy(time).unwrap();
        }
        streamer.compute().record(&[]).unwrap().wait(DEADLINE).unwrap();
    }
    (simulated.now() - begin) / 2
}

/// Layers of modules of these bytes, one after the other in one file.
fn layers(sizes: &[Vec<u64>]) -> Layout {
    let mut offset = 0;
    let mut tensors = Vec::new();
    for (layer, modules) in sizes.iter().enumerate() {
        for (module, &bytes) in modules.iter().enumerate() {
            let name = format!("layers.{layer}.{module}.weight");
            tensors.push(TensorInfo::new(name, DType::U8, &[bytes], 0, offset).unwrap());
            offset += bytes;
        }
    }
    Layout::new(tensors)
}

fn gbps(tenths: u64) -> Bandwidth {
    Bandwidth::bytes_per_second(tenths * 100_000_000)
}

/// A host, a disk, two cards that share a switch, a third on a link of its own, and a device that cannot be reached.
fn mixed_machine(speeds: &[u64]) -> Machine {
    let ids = ["cpu", "disk", "cuda:0", "cuda:1", "cuda:2", "xpu:0"].map(|id| id.parse::<DeviceId>().unwrap());
    let infos = ids.map(|id| DeviceInfo::new(id, 1 << 50));
    let links = ids.iter().zip(speeds).fold(Topology::new(), |topology, (&id, &speed)| topology.link(id, gbps(speed)));
    let topology = links.shared("switch", gbps(speeds[6]), [ids[2], ids[3]]).peer(ids[2], ids[4], gbps(speeds[7]));
    Machine::new(infos, topology)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// What a forecast says is what the streamer takes.
    #[test]
    fn forecasts_are_what_the_clock_shows(
        sizes in prop::collection::vec(prop::collection::vec(1_000_000u64..500_000_000, 1..4), 1..30),
        speeds in prop::collection::vec(5u64..600, 8),
        shares in prop::collection::vec(0u64..100, 6),
        compute in prop::collection::vec(0u64..40_000, 30),
        (order, unit) in prop::sample::select(vec![
            (Order::Sequential, Unit::Module), (Order::Interleaved, Unit::Module), (Order::Interleaved, Unit::Uniform),
        ]),
        depth in 0usize..5,
    ) {
        prop_assume!(shares.iter().sum::<u64>() > 0);
        let (layout, machine) = (layers(&sizes), mixed_machine(&speeds));
        let devices = ["cuda:0", "cuda:1", "cuda:2", "cpu", "disk", "xpu:0"];
        let quotas: Vec<String> = devices.iter().zip(&shares).map(|(device, share)| format!("{device},{share}%")).collect();
        let planner = Planner::new(&layout, &machine).compute(GPU0).order(order).unit(unit).depth(depth);
        let plan = planner.allocation(quotas.join(";").parse().unwrap()).plan().unwrap();
        let times: Vec<Duration> = compute[..sizes.len()].iter().map(|&micros| Duration::from_micros(micros)).collect();
        let clock = clocked(&machine, &layout, &plan, &times);
        let forecast = plan.forecast(&layout, &machine.topology, &ComputeTime::Layers(times)).unwrap();
        prop_assert_eq!(forecast, clock, "{}", plan);
    }
}
