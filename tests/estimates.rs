//! Estimates against cases worked out by hand (`data/estimates.json`), and against the streamer on the virtual clock.

mod support;

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Deserialize;
use support::machines::{MachineData, clocked};
use support::*;
use tensor_offload::checkpoint::Layout;
use tensor_offload::plan::Warning;
use tensor_offload::{Allocation, ByteSize, Order, Plan, Planner};

const GB: u64 = 1_000_000_000;

/// A model of blocks of 1 GB on a machine, and what a pass has to come to.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Case {
    name: String,
    /// How the figures come about.
    #[expect(dead_code, reason = "for readers of the file")]
    arithmetic: String,
    machine: MachineData,
    blocks: usize,
    alloc: Allocation,
    #[serde(default)]
    order: Option<Order>,
    #[serde(default)]
    pinned_cap: Option<String>,
    #[serde(default)]
    in_place: Vec<String>,
    /// Seconds of compute in a pass, spread evenly.
    #[serde(default)]
    compute: f64,
    /// Segment -> the GB that pass it, and the seconds that they take: of all segments that anything passes.
    segments: BTreeMap<String, (u64, f64)>,
    /// Seconds of a pass.
    pass: f64,
    /// What the clock has to show, within one part in a hundred.
    clock: f64,
}

impl Case {
    fn plan(&self, layout: &Layout) -> Plan {
        let machine = self.machine.machine();
        let mut planner = Planner::new(layout, &machine).allocation(self.alloc.clone()).compute(GPU0);
        planner = planner.order(self.order.unwrap_or(Order::Sequential));
        if let Some(cap) = &self.pinned_cap {
            planner = planner.pinned_cap(Some(cap.parse::<ByteSize>().unwrap()));
        }
        self.in_place.iter().fold(planner, Planner::in_place).plan().unwrap()
    }

    fn judge(&self) {
        let name = &self.name;
        let (layout, machine) = (Layout::blocks(vec![GB; self.blocks]), self.machine.machine());
        let plan = self.plan(&layout);
        let compute = Duration::from_secs_f64(self.compute);
        let estimate = plan.estimate(machine.topology(), compute);
        let found: BTreeMap<String, (u64, f64)> =
            estimate.segments.iter().map(|s| (s.name.clone(), (s.bytes / GB, s.time.as_secs_f64()))).collect();
        assert_eq!(found, self.segments, "{name}");
        assert_eq!((estimate.pass.as_secs_f64(), estimate.compute), (self.pass, compute), "{name}");
        assert!(estimate.segments.is_sorted_by(|a, b| a.time >= b.time), "{name}");
        let times = vec![compute / self.blocks as u32; self.blocks];
        let clock = clocked(&machine, &layout, &plan, &times).unwrap();
        let off = clock.as_secs_f64() / self.clock - 1.0;
        assert!(off.abs() < 0.01, "{name}: {clock:?} on the clock\n{plan}");
        assert_eq!(plan.forecast(&layout, machine.topology(), &times.into()).unwrap(), clock, "{name}");
    }
}

#[test]
fn estimates_are_what_hand_and_clock_say() {
    let cases: Vec<Case> = serde_json::from_str(include_str!("data/estimates.json")).unwrap();
    assert!(cases.len() >= 10);
    cases.iter().for_each(Case::judge);
}

/// What fixed slots cost where they do not divide the layers: 19 layers of 1 GB over 10 GB/s, so a copy takes 100 ms, each
/// computing for 50, 100 or 200 ms. With one layer over, the last layer of a pass and the first one of the next share a
/// slot, so the copy of the first begins when the last has run. `docs/performance.md` has the same figures.
#[test]
fn fixed_slots_that_do_not_divide_the_layers_cost_a_bubble_a_pass() {
    let layout = Layout::blocks(vec![GB; 19]);
    let machine = described(&["cpu=64gb", "cuda:0=24gb,link=10"]);
    let pass = |slots: usize, fixed: bool, compute: u64| {
        let times = vec![Duration::from_millis(compute); 19];
        let planner = Planner::new(&layout, &machine).allocation("cpu,*".parse().unwrap()).compute(GPU0);
        let plan = planner.depth(slots - 1).fixed_slots(fixed).plan().unwrap();
        let uneven = plan.warnings().contains(&Warning::UnevenSlots { slots, layers: 19 });
        assert_eq!(uneven, fixed && slots < 19, "{slots} slots");
        let clock = clocked(&machine, &layout, &plan, &times).unwrap();
        assert_eq!(plan.forecast(&layout, machine.topology(), &times.into()).unwrap(), clock, "{slots} slots");
        clock
    };
    // The milliseconds of a pass by those of a layer's compute; the last ones are of slots that any layer takes.
    let times = [
        (2, [(50, 1950, 1900), (100, 2000, 1900), (200, 3900, 3800)]),
        (3, [(50, 1900, 1900), (100, 2000, 1900), (200, 3900, 3800)]),
        (4, [(50, 1900, 1900), (100, 1900, 1900), (200, 3800, 3800)]),
        (19, [(50, 950, 950), (100, 1900, 1900), (200, 3800, 3800)]),
    ];
    for (slots, passes) in times {
        for (compute, fixed, free) in passes {
            let [fixed, free] = [fixed, free].map(Duration::from_millis);
            assert_eq!(pass(slots, true, compute), fixed, "{slots} fixed slots, {compute} ms");
            assert_eq!(pass(slots, false, compute), free, "{slots} slots, {compute} ms");
        }
    }
}
