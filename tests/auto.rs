//! Mode auto, and the forecasts that it goes by, against the streamer on the virtual clock.

mod support;

use std::time::Duration;

use proptest::prelude::*;
use rayon::prelude::*;
use serde::Deserialize;
use support::machines::{MachineData, clocked};
use support::*;
use tensor_offload::checkpoint::{Layout, TensorInfo};
use tensor_offload::device::{Bandwidth, Described, DeviceInfo, Topology};
use tensor_offload::plan::{ComputeTime, TensorGrouping, Unit};
use tensor_offload::{ByteSize, DType, DeviceId, Machine, Order, Planner};

/// Layers of modules of these bytes or a few less, one after the other in one file, of three types in turn: the first of them
/// blocks, if `blocks` says so.
fn layers(sizes: &[Vec<u64>], blocks: bool) -> Layout {
    let mut offset = 0;
    let mut tensors = Vec::new();
    for (layer, modules) in sizes.iter().enumerate() {
        for (module, &bytes) in modules.iter().enumerate() {
            let name = format!("layers.{layer}.{module}.weight");
            let dtype = [DType::U8, DType::F8E4M3, DType::Bool][module % 3];
            let tensor = match blocks && module % 3 == 0 {
                true => TensorInfo::new(name, DType::Q8_0, &[bytes.div_ceil(34) * 32], 0, offset),
                false => TensorInfo::new(name, dtype, &[bytes], 0, offset),
            };
            tensors.push(tensor.unwrap());
            offset += bytes.next_multiple_of(34);
        }
    }
    Layout::new(tensors)
}

fn gbps(tenths: u64) -> Bandwidth {
    Bandwidth::bytes_per_second(tenths * 100_000_000)
}

/// Large ones, small ones that share memory, and small ones that do not.
fn module_bytes() -> impl Strategy<Value = u64> {
    prop_oneof![2 => 1_000_000u64..500_000_000, 2 => (1u64..1_100).prop_map(|n| n * 256), 1 => 1u64..300_000]
}

fn storages() -> impl Strategy<Value = TensorGrouping> {
    prop::sample::select(vec![TensorGrouping::Joined, TensorGrouping::PerType, TensorGrouping::PerTensor])
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
        sizes in prop::collection::vec(prop::collection::vec(module_bytes(), 1..6), 1..30),
        speeds in prop::collection::vec(5u64..600, 8),
        shares in prop::collection::vec(0u64..100, 6),
        compute in prop::collection::vec(0u64..40_000, 30),
        (order, unit) in prop::sample::select(vec![
            (Order::Sequential, Unit::Module), (Order::Interleaved, Unit::Module), (Order::Interleaved, Unit::Uniform),
        ]),
        depth in 0usize..5,
        fixed in any::<bool>(),
        far_larger in prop::collection::vec(any::<prop::sample::Index>(), 0..3),
        (grouping, on_host) in (storages(), prop::bool::weighted(0.25)),
        unpacked in prop::option::of(prop::sample::select(vec![DType::F32, DType::BF16])),
    ) {
        prop_assume!(shares.iter().sum::<u64>() > 0);
        let mut sizes = sizes;
        // A few that have slots of their own.
        for layer in far_larger {
            let layer = layer.index(sizes.len());
            sizes[layer].push(6_000_000_000);
        }
        let (layout, machine) = (layers(&sizes, unpacked.is_some()), mixed_machine(&speeds));
        let devices = ["cuda:0", "cuda:1", "cuda:2", "cpu", "disk", "xpu:0"];
        let quotas: Vec<String> = devices.iter().zip(&shares).map(|(device, share)| format!("{device},{share}%")).collect();
        let planner = Planner::new(&layout, &machine).order(order).unit(unit).depth(depth).fixed_slots(fixed);
        let planner = planner.compute(if on_host { CPU } else { GPU0 }).grouping(grouping);
        let planner = unpacked.into_iter().fold(planner, Planner::unpack);
        let plan = planner.allocation(quotas.join(";").parse().unwrap()).plan().unwrap();
        let times: Vec<Duration> = compute[..sizes.len()].iter().map(|&micros| Duration::from_micros(micros)).collect();
        let clock = clocked(&machine, &layout, &plan, &times).unwrap();
        let forecast = plan.forecast(&layout, machine.topology(), &ComputeTime::Layers(times)).unwrap();
        prop_assert_eq!(forecast, clock, "{}", plan);
    }
}

/// The grid of `data/auto_grid.json`; the file says what its fields are.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Grid {
    #[expect(dead_code, reason = "for readers of the file")]
    about: String,
    machines: Vec<GridMachine>,
    models: Vec<GridModel>,
    compute_ms_per_gb: Vec<u64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct GridMachine {
    name: String,
    on: MachineData,
    #[serde(default)]
    reserve: Option<String>,
    #[serde(default)]
    depth: Option<usize>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct GridModel {
    name: String,
    #[serde(default)]
    embedding: Option<String>,
    stacks: Vec<(usize, Vec<String>)>,
    #[serde(default)]
    head: Option<String>,
}

impl GridMachine {
    fn machine(&self) -> Machine {
        self.on.machine()
    }

    fn donors(&self) -> Vec<DeviceId> {
        self.on.devices.iter().map(|text| text.parse::<Described>().unwrap().id).filter(|&id| id != GPU0).collect()
    }

    fn reserve(&self) -> ByteSize {
        self.reserve.as_ref().map_or(ByteSize(0), |size| size.parse().unwrap())
    }

    fn planner<'a>(&self, layout: &'a Layout, machine: &'a Machine) -> Planner<'a> {
        Planner::new(layout, machine).compute(GPU0).depth(self.depth.unwrap_or(2)).reserve(self.reserve())
    }
}

impl GridModel {
    fn layout(&self) -> Layout {
        let (mut tensors, mut offset) = (Vec::new(), 0);
        let bytes = |size: &str| size.parse::<ByteSize>().unwrap().get();
        let mut add = |name: String, bytes: u64, at: Option<u64>| {
            tensors.push(TensorInfo::new(name, DType::U8, &[bytes], 0, at.unwrap_or(offset)).unwrap());
            offset += if at.is_none() { bytes } else { 0 };
        };
        let embedding = self.embedding.as_deref().map_or(0, bytes);
        if embedding > 0 {
            add("model.embed_tokens.weight".to_owned(), embedding, None);
        }
        for (stack, (layers, modules)) in self.stacks.iter().enumerate() {
            for layer in 0..*layers {
                for (role, size) in modules.iter().enumerate() {
                    add(format!("model.stack{stack}.{layer}.role{role}.weight"), bytes(size), None);
                }
            }
        }
        match self.head.as_deref() {
            Some("tied") => add("lm_head.weight".to_owned(), embedding, Some(0)),
            Some(size) => add("lm_head.weight".to_owned(), bytes(size), None),
            None => (),
        }
        Layout::new(tensors)
    }
}

/// What two cards hold that the third cannot read goes through buffers on the host. Auto leaves room for these there, though
/// the host's link is the fastest, so that the plan runs.
#[test]
fn auto_leaves_the_host_room_for_staging_buffers() {
    let machine = described(&["cuda:0=1gib,link=20", "cpu=1gib,link=20", "cuda:1=2gib,link=5", "cuda:2=2gib,link=5"]);
    let [gpu1, gpu2] = [1, 2].map(DeviceId::cuda);
    let topology = machine.topology().clone().no_peer_access(GPU0, gpu1).no_peer_access(GPU0, gpu2);
    let machine = machine.with_topology(topology);
    let layout = layers(&vec![vec![16 << 20]; 240], false);
    let times = vec![Duration::ZERO; 240];
    let plan = Planner::new(&layout, &machine).allocation("auto".parse().unwrap()).plan().unwrap();
    assert!([gpu1, gpu2].iter().all(|&card| plan.device(card).unwrap().weights.bytes > 0), "{plan}");
    // Eight buffers of 16 MiB.
    let host = plan.device(CPU).unwrap();
    assert_eq!(host.weights.bytes, (1 << 30) - (128 << 20), "{plan}");
    let pass = clocked(&machine, &layout, &plan, &times).unwrap();
    assert!(pass <= plan.explanation().unwrap().pass, "{pass:?}\n{plan}");
}

const ORDERS: [(&str, Order, Unit); 3] = [
    ("sequential", Order::Sequential, Unit::Module),
    ("interleaved", Order::Interleaved, Unit::Module),
    ("uniform", Order::Interleaved, Unit::Uniform),
];

/// What a careful user would write: on the compute device the most that fits (`quota`), and the rest to the donors in turn
/// or alike.
fn by_hand(machine: &Machine, donors: &[DeviceId], total: u64, quota: u64) -> [String; 2] {
    let room = |device: DeviceId| machine.device(device).unwrap().usable();
    let last = donors[donors.len() - 1];
    let each = (total - quota.min(total)) / donors.len() as u64;
    let text = |share: &dyn Fn(DeviceId) -> u64, rest: DeviceId| {
        let entries: Vec<String> =
            donors.iter().filter(|&&donor| donor != rest).map(|&donor| format!("{donor},{}b;", share(donor))).collect();
        format!("cuda:0,{quota}b;{}{rest},*", entries.concat())
    };
    let roomiest = donors.iter().copied().max_by_key(|&donor| room(donor)).unwrap();
    [text(&room, last), text(&|donor| each.min(room(donor)), roomiest)]
}

/// The times of the best plans by hand, each with a word for it.
fn rivals(case: &GridMachine, machine: &Machine, layout: &Layout, times: &[Duration]) -> Vec<(String, Duration)> {
    let (mut found, donors) = (Vec::new(), case.donors());
    let largest = layout.layers().iter().map(|layer| layout.slot_of(layer.id).unwrap()).max().unwrap();
    let room = machine.device(GPU0).unwrap().usable() - case.reserve().get();
    let beside_slots = room.saturating_sub(largest * (case.depth.unwrap_or(2) as u64 + 1));
    for (name, order, unit) in ORDERS {
        let planner = case.planner(layout, machine).order(order).unit(unit);
        for way in 0..2 {
            let plan = |quota: u64| {
                let text = &by_hand(machine, &donors, layout.bytes(), quota)[way];
                planner.clone().allocation(text.parse().unwrap()).plan().ok()
            };
            // The largest quota that fits, as trying would find it.
            let (mut low, mut high) = (beside_slots, room.min(layout.bytes()));
            for _ in 0..8 {
                let middle = low.midpoint(high);
                if plan(middle).is_some() { low = middle } else { high = middle }
            }
            for (quota, plan) in [beside_slots, low].into_iter().filter_map(|quota| Some((quota, plan(quota)?))) {
                let text = &by_hand(machine, &donors, layout.bytes(), quota)[way];
                let time = clocked(machine, layout, &plan, times);
                found.extend(time.ok().map(|time| (format!("{name} {text}"), time)));
            }
        }
    }
    found
}

/// On machines of the grid, for models and compute times, `auto` is no slower than what a careful user would have written, by
/// more than one part in a hundred. This takes one case of seven, each machine, model and time among them.
#[test]
fn auto_is_never_worse_than_a_careful_user() {
    never_worse(7);
}

#[test]
#[ignore = "all cases take half a minute, and come out the same whenever they are run"]
fn auto_is_never_worse_than_a_careful_user_on_the_whole_grid() {
    never_worse(1);
}

/// Judges one case of so many.
fn never_worse(of: usize) {
    let grid: Grid = serde_json::from_str(include_str!("data/auto_grid.json")).unwrap();
    let layouts: Vec<Layout> = grid.models.iter().map(GridModel::layout).collect();
    let mut cases = Vec::new();
    for machine in &grid.machines {
        for (model, layout) in grid.models.iter().zip(&layouts) {
            cases.extend(grid.compute_ms_per_gb.iter().map(|&ms| (machine, model, layout, ms)));
        }
    }
    let cases: Vec<_> = cases.into_iter().step_by(of).collect();
    let judged: Vec<Option<String>> = cases
        .par_iter()
        .map(|&(case, model, layout, ms)| {
            let machine = case.machine();
            let compute = ComputeTime::Pass(Duration::from_micros(ms * layout.bytes() / 1_000_000));
            let times = compute.of_layers(layout).unwrap();
            let planner = case.planner(layout, &machine).compute_time(compute);
            let rivals = rivals(case, &machine, layout, &times);
            let best = rivals.iter().min_by_key(|rival| rival.1);
            let plan = planner.allocation("auto".parse().unwrap()).plan();
            let name = format!("{}, {}, {ms} ms/GB", case.name, model.name);
            match (plan, best) {
                (Err(error), Some((rival, _))) => Some(format!("{name}: {error}, but {rival}")),
                (Err(_), None) => None,
                (Ok(plan), best) => {
                    let time = clocked(&machine, layout, &plan, &times).unwrap();
                    let best = best.filter(|(_, best)| time > *best + *best / 100);
                    best.map(|(rival, best)| format!("{name}: {time:?} in place of {best:?} by {rival}\n{plan}"))
                }
            }
        })
        .collect();
    let failures: Vec<String> = judged.into_iter().flatten().collect();
    assert!(
        failures.is_empty(),
        "{} of {} cases\n{}",
        failures.len(),
        cases.len(),
        failures[..failures.len().min(40)].join("\n")
    );
}
