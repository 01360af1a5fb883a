//! What holds of every plan.

use proptest::prelude::*;
use tensor_offload::checkpoint::Layout;
use tensor_offload::plan::Unit;
use tensor_offload::{DeviceId, Machine, ModuleId, Order, Plan, Planner};

use super::{CPU, GIB, GPU0, GPU1, MIB, bytes, check_uniform, machine, named, on};

/// Three cards and a host with room for everything.
fn vast() -> Machine {
    machine(&["cuda:0=4096tib", "cuda:1=4096tib", "cuda:2=4096tib", "cpu=4096tib"])
}

/// Layers of up to four modules in two classes.
fn layouts() -> impl Strategy<Value = Layout> {
    let size = || prop_oneof![4 => MIB..64 * MIB, 1 => 0u64..4096, 1 => Just(16 * MIB)];
    let class = prop::collection::vec(size(), 1..5);
    ((class.clone(), class), 1usize..24, prop::collection::vec(any::<bool>(), 24)).prop_map(
        |((a, b), layers, which)| {
            let mut tensors = Vec::new();
            for (layer, first) in which.into_iter().enumerate().take(layers) {
                let class = if first { &a } else { &b };
                tensors.extend(
                    class.iter().enumerate().map(|(role, bytes)| (format!("layers.{layer}.role{role}.weight"), *bytes)),
                );
            }
            named(&tensors.iter().map(|(name, bytes)| (name.as_str(), *bytes)).collect::<Vec<_>>())
        },
    )
}

/// Quotas in MiB for the three cards; the host takes the rest.
fn caps() -> impl Strategy<Value = Vec<u64>> {
    prop::collection::vec(prop_oneof![1 => Just(0u64), 5 => 1u64..1500], 3)
}

fn plan_of(layout: &Layout, allocation: &str, order: Order, unit: Unit) -> Plan {
    let machine = vast();
    Planner::new(layout, &machine)
        .allocation(allocation.parse().unwrap())
        .compute(GPU0)
        .order(order)
        .unit(unit)
        .plan()
        .unwrap()
}

fn arrangements() -> impl Strategy<Value = (Order, Unit)> {
    prop::sample::select(vec![
        (Order::Sequential, Unit::Module),
        (Order::Interleaved, Unit::Module),
        (Order::Interleaved, Unit::Uniform),
    ])
}

proptest! {
    /// What was on the compute device is on the host, in the slots of a model that is streamed whole; all else stays.
    #[test]
    fn a_demoted_plan_has_nothing_resident(layout in layouts(), caps in caps(), (order, unit) in arrangements()) {
        let allocation = format!("cuda:0,{}mib;cuda:1,{}mib;cuda:2,{}mib;cpu,*", caps[0], caps[1], caps[2]);
        let plan = plan_of(&layout, &allocation, order, unit);
        let demoted = plan.demoted(&layout, &vast()).unwrap();
        for (before, after) in plan.assignments().iter().zip(demoted.assignments()) {
            let device = if before.device == GPU0 { CPU } else { before.device };
            prop_assert_eq!((device, before.bytes, tensor_offload::Use::Streamed), (after.device, after.bytes, after.usage));
        }
        let whole = |layer: &tensor_offload::checkpoint::Layer| {
            layout.modules_in(layer.id).map(|module| Layout::slot_bytes(module.bytes)).sum::<u64>()
        };
        let slots = demoted.slots();
        let wholes: Vec<u64> = layout.layers().iter().map(whole).collect();
        let (largest, window) = (wholes.iter().copied().max().unwrap_or(0), wholes.len().min(demoted.depth() + 1));
        prop_assert_eq!(slots.largest(), largest);
        match slots.large {
            0 => prop_assert_eq!((slots.count, slots.large_bytes), (window, 0)),
            large => {
                prop_assert!(slots.bytes() < largest * window as u64 && slots.bytes_each * 2 < largest);
                // Whichever layers follow each other, there is a slot for each.
                for begin in 0..wholes.len() {
                    let at_once = (begin..begin + window).map(|at| wholes[at % wholes.len()]);
                    let of_large = at_once.filter(|bytes| *bytes > slots.bytes_each).count();
                    prop_assert!(of_large <= large && window - of_large <= slots.count);
                }
            }
        }
        prop_assert_eq!(demoted.device(GPU0).unwrap().beside.slots, slots.bytes());
        demoted.verify(&layout).unwrap();
        let host = demoted.device(CPU).unwrap();
        prop_assert_eq!((host.weights.pinned, host.weights.streamed, host.weights.staged), (host.weights.bytes, host.weights.bytes, 0));
        prop_assert_eq!(demoted.demoted(&layout, &vast()).unwrap(), demoted);
    }

    #[test]
    fn every_module_is_placed_once_within_hard_quotas(layout in layouts(), caps in caps(), (order, unit) in arrangements()) {
        let allocation = format!("cuda:0,{}mib;cuda:1,{}mib;cuda:2,{}mib;cpu,*", caps[0], caps[1], caps[2]);
        let plan = plan_of(&layout, &allocation, order, unit);
        let places: Vec<ModuleId> = plan.assignments().iter().map(|a| a.index).collect();
        prop_assert_eq!(places, layout.module_ids().collect::<Vec<_>>());
        prop_assert_eq!(plan.assignments().iter().map(|a| a.bytes).sum::<u64>(), layout.bytes());
        for (device, cap) in [GPU0, GPU1, DeviceId::cuda(2)].into_iter().zip(&caps) {
            prop_assert!(bytes(&plan, device) <= cap * MIB);
        }
        prop_assert_eq!(&plan_of(&layout, &allocation, order, unit), &plan);
        let text = serde_json::to_string(&plan).unwrap();
        prop_assert_eq!(&serde_json::from_str::<Plan>(&text).unwrap(), &plan);
        if unit == Unit::Uniform {
            let small = layout.modules().iter().any(|m| m.bytes < 64 << 10);
            // Small modules may be resident in some layers only, where the quota ends among them.
            if !small { check_uniform(&layout, &plan) }
        }
    }

    #[test]
    fn in_sequence_the_host_gets_only_what_no_card_holds(layout in layouts(), caps in caps()) {
        let allocation = format!("cuda:0,{}mib;cuda:1,{}mib;cpu,*", caps[0], caps[1]);
        let plan = plan_of(&layout, &allocation, Order::Sequential, Unit::Module);
        let rooms = [GPU0, GPU1].map(|d| plan.device(d).map_or(0, |p| p.quota.unwrap() - p.weights.bytes));
        let on_the_host = plan.assignments().iter().filter(|a| a.device == CPU && a.bytes > 0);
        for a in on_the_host {
            prop_assert!(rooms.iter().all(|room| a.bytes > *room));
        }
    }

    #[test]
    fn ratios_end_within_one_module_of_their_shares(
        layout in layouts(),
        weights in prop::collection::vec(0u64..1000, 4),
        order in prop::sample::select(vec![Order::Sequential, Order::Interleaved]),
    ) {
        prop_assume!(weights.iter().sum::<u64>() > 0);
        let allocation = format!("cuda:0,{}%;cuda:1,{}%;cuda:2,{}%;cpu,{}%", weights[0], weights[1], weights[2], weights[3]);
        let plan = plan_of(&layout, &allocation, order, Unit::Module);
        let largest = layout.modules().iter().map(|m| m.bytes).max().unwrap();
        let (total, sum) = (layout.bytes() as f64, weights.iter().sum::<u64>() as f64);
        for (device, weight) in [GPU0, GPU1, DeviceId::cuda(2), CPU].into_iter().zip(&weights) {
            let (held, share) = (bytes(&plan, device), total * *weight as f64 / sum);
            prop_assert!((held as f64 - share).abs() <= largest as f64 + 1.0, "{} holds {} of {}", device, held, share);
            prop_assert!(*weight > 0 || held == 0);
        }
        if order == Order::Sequential {
            let share = total * weights[0] as f64 / sum;
            prop_assert!(bytes(&plan, GPU0) as f64 <= share + 1.0);
        }
    }

    #[test]
    fn running_totals_of_equal_modules_stay_within_one(
        count in 1usize..200,
        caps in prop::collection::vec(0u64..400, 3),
    ) {
        // Quotas in quarters of a module; what they hold of whole modules is each device's share.
        let layout = Layout::blocks(vec![4 * MIB; count]);
        let allocation = format!("cuda:0,{}mib;cuda:1,{}mib;cuda:2,{}mib;cpu,*", caps[0], caps[1], caps[2]);
        let plan = plan_of(&layout, &allocation, Order::Interleaved, Unit::Module);
        for device in [GPU0, GPU1, DeviceId::cuda(2), CPU] {
            let share = on(&plan, device).len();
            let mut taken = 0;
            for (index, a) in plan.assignments().iter().enumerate() {
                taken += usize::from(a.device == device);
                let off = (taken * count).abs_diff(share * (index + 1));
                prop_assert!(off < count, "{} of {} after {} on {}", taken, share, index + 1, device);
            }
        }
    }

    #[test]
    fn running_totals_of_mixed_modules_stay_within_one_of_the_quotas(
        sizes in prop::collection::vec(MIB..64 * MIB, 1..100),
        caps in prop::collection::vec(0u64..1500, 3),
    ) {
        let (largest, total) = (*sizes.iter().max().unwrap(), sizes.iter().sum::<u64>());
        let allocation = format!("cuda:0,{}mib;cuda:1,{}mib;cuda:2,{}mib;cpu,*", caps[0], caps[1], caps[2]);
        let plan = plan_of(&Layout::blocks(sizes), &allocation, Order::Interleaved, Unit::Module);
        let mut left = total;
        for (device, cap) in [GPU0, GPU1, DeviceId::cuda(2)].into_iter().zip(caps) {
            let share = (cap * MIB).min(left);
            left -= share;
            let (mut taken, mut passed) = (0u64, 0u64);
            for a in plan.assignments() {
                taken += if a.device == device { a.bytes } else { 0 };
                passed += a.bytes;
                let off = (i128::from(taken) * i128::from(total) - i128::from(share) * i128::from(passed)).unsigned_abs();
                prop_assert!(off < u128::from(largest) * u128::from(total));
            }
        }
    }

    #[test]
    fn virtual_memory_leaves_at_least_what_is_asked_for(layout in layouts(), mib in 0u64..800) {
        let gib = format!("0.{:06}", mib * 1_000_000 / 1024);
        let plan = plan_of(&layout, &format!("#cuda:0;{gib};cuda:1,cpu"), Order::Sequential, Unit::Module);
        let (left, target) = (bytes(&plan, GPU1) + bytes(&plan, CPU), mib * 1_000_000 / 1024 * GIB / 1_000_000);
        let last = on(&plan, GPU1).first().map_or(0, |&m| layout.modules()[m].bytes);
        prop_assert!(left >= target || !plan.warnings().is_empty());
        prop_assert!(left == 0 || left - last < target);
    }
}
