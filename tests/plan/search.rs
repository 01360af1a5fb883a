//! Machines on which one step of mode auto's search finds the best plan, and the others do not.

use std::time::Duration;

use tensor_offload::checkpoint::Layout;
use tensor_offload::plan::{ComputeTime, Unit};
use tensor_offload::{Machine, Order, Plan, Planner};

use super::{GPU0, GPU1, MIB, machine, named};

/// A model, a machine and its best known plan, as a user could have written it.
struct Case<'a> {
    devices: &'a [&'a str],
    /// The mebibytes of the modules of each layer.
    layers: &'a [&'a [u64]],
    compute: Duration,
    depth: usize,
    by_hand: &'a str,
    order: Order,
    unit: Unit,
    kept: &'a [&'a str],
}

impl Case<'_> {
    fn layout(&self) -> Layout {
        let mut tensors = Vec::new();
        for (layer, modules) in self.layers.iter().enumerate() {
            let module = |(module, mib): (usize, &u64)| (format!("layers.{layer}.{module}.weight"), mib * MIB);
            tensors.extend(modules.iter().enumerate().map(module));
        }
        named(&tensors.iter().map(|(name, bytes)| (name.as_str(), *bytes)).collect::<Vec<_>>())
    }

    /// Checks that auto is as fast as the plan by hand, whose pass takes so many milliseconds.
    fn check(&self, machine: &Machine, millis: u128) {
        let layout = self.layout();
        let planner = Planner::new(&layout, machine).compute(GPU0).depth(self.depth).compute_time(self.compute);
        let pass = |plan: &Plan| {
            let forecast = plan.forecast(&layout, machine.topology(), &ComputeTime::Pass(self.compute)).unwrap();
            forecast.max(plan.estimate(machine.topology(), self.compute).pass)
        };
        let by_hand = planner.clone().allocation(self.by_hand.parse().unwrap()).order(self.order).unit(self.unit);
        let by_hand = self.kept.iter().fold(by_hand, |planner, kept| planner.keep_resident(*kept)).plan().unwrap();
        assert_eq!(pass(&by_hand).as_millis(), millis, "{by_hand}");
        let found = planner.allocation("auto".parse().unwrap()).plan().unwrap();
        assert_eq!(pass(&found), found.explanation().unwrap().pass, "{found}");
        assert!(pass(&found) <= pass(&by_hand) + pass(&by_hand) / 500, "{found}\nby hand\n{by_hand}");
    }
}

/// Two modules make two layers larger than the others. With these resident, slots are smaller, and more stays.
#[test]
fn large_modules_are_kept_for_smaller_slots() {
    let case = Case {
        devices: &["cuda:0=4000mib,link=30", "cpu=100000mib,link=2,pinned=100000mib"],
        layers: &[&[600], &[220, 440, 520], &[780], &[160, 20], &[360, 780], &[760]],
        compute: Duration::from_secs(1),
        depth: 2,
        by_hand: "cuda:0,1660mib;cpu,*",
        order: Order::Sequential,
        unit: Unit::Module,
        kept: &["layers.1.1", "layers.4.0"],
    };
    case.check(&machine(case.devices), 1_572);
}

/// The best slots are of 780 MiB, 1/70 of the largest layer below the next step.
#[test]
fn slots_are_no_larger_than_they_need_be() {
    let case = Case {
        devices: &["cuda:0=4500mib,link=30", "cpu=5000mib,link=5,pinned=5000mib", "cuda:1=1000mib,link=20"],
        layers: &[&[340, 760], &[20], &[320], &[800, 380, 660], &[340, 120, 380], &[20, 420, 780], &[480]],
        compute: Duration::from_millis(500),
        depth: 2,
        by_hand: "cuda:0,2420mib;cuda:1,1000mib;cpu,*",
        order: Order::Interleaved,
        unit: Unit::Uniform,
        kept: &["layers.0.0", "layers.3.0", "layers.3.1", "layers.4.1", "layers.5.0", "layers.5.1"],
    };
    case.check(&machine(case.devices), 608);
}

/// The faster donor takes all that it holds. In proportion to the links, whole modules divide worse.
#[test]
fn a_fast_donor_is_filled() {
    let case = Case {
        devices: &["cuda:0=1500mib,link=20", "cpu=100000mib,link=2,pinned=50000mib", "cuda:1=5000mib,link=5"],
        layers: &[&[80u64, 460][..]; 11],
        compute: Duration::ZERO,
        depth: 1,
        by_hand: "cuda:0,420mib;cuda:1,5000mib;cpu,*",
        order: Order::Interleaved,
        unit: Unit::Module,
        kept: &[],
    };
    case.check(&machine(case.devices), 1_037);
}

/// The compute device takes more than the quota that was found first, though not all that it could.
#[test]
fn larger_quotas_are_tried() {
    let case = Case {
        devices: &["cuda:0=5000mib,link=10", "cpu=100000mib,link=5,pinned=50000mib", "cuda:1=2000mib,link=2"],
        layers: &[&[100u64, 460, 280][..]; 10],
        compute: Duration::ZERO,
        depth: 1,
        by_hand: "cuda:0,3675mib;cuda:1,1379700kib;cpu,*",
        order: Order::Interleaved,
        unit: Unit::Module,
        kept: &[],
    };
    case.check(&machine(case.devices), 843);
}

/// The host gets a sixteenth of the streamed bytes less than it holds, and the disk these.
#[test]
fn large_pieces_are_moved_between_donors() {
    let case = Case {
        devices: &[
            "cuda:0=5000mib,link=10",
            "cpu=1000mib,link=2,pinned=1000mib",
            "cuda:1=3000mib,link=20",
            "disk=3000mib,link=10",
        ],
        layers: &[&[340], &[1020], &[680], &[340], &[1020], &[340], &[1020], &[680], &[340], &[340], &[680], &[340]],
        compute: Duration::from_secs(1),
        depth: 2,
        by_hand: "cuda:0,2068mib;cpu,604mib;cuda:1,3000mib;disk,*",
        order: Order::Interleaved,
        unit: Unit::Module,
        kept: &[],
    };
    case.check(&machine(case.devices), 1_295);
}

/// The second card gets a 64th of the streamed bytes less than it holds.
#[test]
fn small_pieces_are_moved_between_donors() {
    let case = Case {
        devices: &[
            "cuda:0=4500mib,link=20",
            "cpu=100000mib,link=2,pinned=100000mib",
            "cuda:1=2000mib,link=5",
            "disk=100000mib,link=20",
        ],
        layers: &[&[400, 800, 640], &[140, 160], &[520], &[320, 100], &[780, 360], &[440, 500, 460]],
        compute: Duration::from_millis(500),
        depth: 1,
        by_hand: "cuda:0,3500mib;cpu,120mib;cuda:1,1966.875mib;disk,*",
        order: Order::Sequential,
        unit: Unit::Module,
        kept: &["layers.0.1", "layers.0.2", "layers.4.0", "layers.5.0", "layers.5.2"],
    };
    case.check(&machine(case.devices), 660);
}

/// What a card gives that the other cannot read passes the host's memory twice, which is counted.
#[test]
fn staging_counts_in_the_time_of_a_pass() {
    let case = Case {
        devices: &["cuda:0=3500mib,link=30", "cpu=5000mib,link=2,pinned=2500mib", "cuda:1=3000mib,link=10"],
        layers: &[&[320, 800], &[100, 600], &[700, 640], &[320], &[320, 60], &[360], &[720, 540], &[120, 20], &[680]],
        compute: Duration::from_millis(500),
        depth: 1,
        by_hand: "cuda:0,2060mib;cuda:1,2120mib;cpu,*",
        order: Order::Sequential,
        unit: Unit::Module,
        kept: &["layers.0.1", "layers.2.1", "layers.6.1"],
    };
    let machine = machine(case.devices);
    let topology = machine.topology().clone().no_peer_access(GPU0, GPU1);
    case.check(&machine.with_topology(topology), 2_260);
}
