//! Mode auto, as far as single plans show it; `tests/auto.rs` compares what it finds with what a careful user would write.

use std::time::Duration;

use tensor_offload::Planner;
use tensor_offload::checkpoint::Layout;
use tensor_offload::plan::{ComputeTime, Unit};

use super::{GIB, GPU0, GPU1, MIB, blocks, machine, named, on, usual};

/// The device after `#` computes, whatever the planner says; and a plan that auto found says so.
#[test]
fn auto_computes_where_the_allocation_says() {
    let (layout, machine) = (blocks(30, GIB), usual());
    for count in [4, 30] {
        let layout = Layout::blocks(vec![GIB; count]);
        let planner = Planner::new(&layout, &machine).compute(GPU0);
        let plan = planner.allocation("auto#cuda:1;0;cpu".parse().unwrap()).plan().unwrap();
        assert_eq!((plan.compute(), plan.mode().name()), (GPU1, "auto"));
        assert!(on(&plan, GPU1).len() > count / 2, "{plan}");
    }
    // Two of the card's 24 GiB are kept free.
    let reserved = Planner::new(&layout, &machine).allocation("auto,reserve=2gb".parse().unwrap()).plan().unwrap();
    assert_eq!(reserved.device(GPU0).unwrap().beside.reserve, 2 * GIB);
}

/// Each of the other arrangements that the explanation gives takes the time that it says, with the quotas that it says.
#[test]
fn alternatives_take_the_time_that_they_say() {
    let (layout, machine) = (blocks(10, GIB), machine(&["cuda:0=8gib,link=20", "cpu=64gib"]));
    let time = ComputeTime::Pass(Duration::from_millis(250));
    let planner = Planner::new(&layout, &machine).compute_time(time.clone());
    let plan = planner.clone().allocation("auto".parse().unwrap()).plan().unwrap();
    let explanation = plan.explanation().unwrap();
    assert_eq!(plan.forecast(&layout, machine.topology(), &time).unwrap(), explanation.pass);
    assert_eq!(explanation.others.len(), 2);
    for other in &explanation.others {
        assert_ne!((other.order, other.unit), (plan.order(), plan.unit()));
        let planner = planner.clone().allocation(other.allocation.clone()).order(other.order).unit(other.unit);
        let pass = planner.plan().unwrap().forecast(&layout, machine.topology(), &time).unwrap();
        assert_eq!(pass, other.pass, "{} {:?}", other.order, other.unit);
        assert!(pass >= explanation.pass);
    }
    let times: Vec<_> = explanation.others.iter().map(|other| (other.unit, other.pass)).collect();
    assert!(times.iter().any(|(unit, pass)| *unit == Unit::Module && *pass > explanation.pass), "{times:?}");
    assert!(explanation.tried > 3);
}

/// A donor is full when it has less left than one part in fifty.
#[test]
fn a_donor_with_little_left_is_full() {
    let layout = blocks(10, GIB);
    for (mib, full) in [(5120, true), (5180, true), (5300, false)] {
        let host = format!("cpu={mib}mib,pinned={mib}mib");
        let machine = machine(&["cuda:0=8gib,link=20", &host]);
        let plan = Planner::new(&layout, &machine).allocation("auto".parse().unwrap()).plan().unwrap();
        assert_eq!(plan.device(super::CPU).unwrap().weights.bytes, 5 * 1024 * MIB, "{plan}");
        assert_eq!(plan.explanation().unwrap().to_string().contains(", full\n"), full, "{mib} MiB");
    }
}

/// One time for each layer, or none of them is used.
#[test]
fn as_many_compute_times_as_layers() {
    let (layout, machine) = (blocks(3, GIB), usual());
    for (times, fits) in [(2, false), (3, true), (4, false)] {
        let planner = Planner::new(&layout, &machine).compute_time(vec![Duration::from_millis(1); times]);
        assert_eq!(planner.allocation("auto".parse().unwrap()).plan().is_ok(), fits, "{times}");
    }
}

/// The slots of a caller who holds all streamed layers at once are filled once, so a pass takes its compute alone. With a slot
/// less, or with slots of the plan's own, each pass copies.
#[test]
fn layers_that_stay_in_the_callers_slots_take_no_time() {
    let (layout, machine) = (blocks(3, GIB), machine(&["cuda:0=1gib,link=20", "cpu=64gib,link=10"]));
    let compute = Duration::from_millis(10);
    for (depth, stays) in [(0, false), (1, true), (2, true)] {
        let planner = Planner::new(&layout, &machine).external_slots(true).depth(depth).compute_time(compute);
        let plan = planner.allocation("auto".parse().unwrap()).plan().unwrap();
        assert_eq!(plan.streamed_layers(), 2, "{plan}");
        assert_eq!(plan.explanation().unwrap().pass == compute, stays, "{plan}");
    }
}

/// Where the compute hides all copies, no larger quota is tried: no plan is faster. Nor are other splits tried where
/// there is one donor.
#[test]
fn a_hidden_pass_is_not_improved() {
    let (layout, machine) = (blocks(10, GIB), machine(&["cuda:0=8gib,link=20", "cpu=64gib"]));
    let tried = |millis| {
        let planner = Planner::new(&layout, &machine).compute_time(Duration::from_millis(millis));
        let plan = planner.allocation("auto".parse().unwrap()).plan().unwrap();
        let explanation = plan.explanation().unwrap();
        (explanation.pass == Duration::from_millis(millis), explanation.tried)
    };
    let [(true, half), (true, more)] = [tried(500), tried(5_000)] else { panic!("copies that take time") };
    let (hidden, all) = tried(0);
    assert!(!hidden && half == more && half + 100 < all && half < 50, "{half} {more} {all}");
}

/// A module that is far larger than a layer is named once: by the explanation, where it is kept for smaller slots, or else by a
/// line of its own.
#[test]
fn an_outlier_that_the_explanation_names_has_no_line_of_its_own() {
    let uneven: &[&[u64]] = &[&[600], &[220, 440, 520], &[780], &[160, 20], &[360, 780], &[760]];
    for (layers, kept) in [(uneven, true), (&[&[500][..]; 16], false)] {
        let mut tensors = vec![("model.embed_tokens.weight".to_owned(), 3_000 * MIB)];
        for (layer, modules) in layers.iter().enumerate() {
            let tensor = |(n, mib): (usize, &u64)| (format!("model.layers.{layer}.{n}.weight"), mib * MIB);
            tensors.extend(modules.iter().enumerate().map(tensor));
        }
        let layout = named(&tensors.iter().map(|(name, bytes)| (name.as_str(), *bytes)).collect::<Vec<_>>());
        let machine = machine(&["cuda:0=7000mib,link=30", "cpu=100000mib,link=2,pinned=100000mib"]);
        let planner = Planner::new(&layout, &machine).compute_time(Duration::from_secs(1));
        let plan = planner.allocation("auto".parse().unwrap()).plan().unwrap();
        let outliers: Vec<String> = plan.outliers().iter().map(|outlier| outlier.module.to_string()).collect();
        assert_eq!(outliers, ["model.embed_tokens"]);
        assert_eq!(plan.explanation().unwrap().kept.iter().any(|name| name == "model.embed_tokens"), kept, "{plan}");
        assert_eq!(plan.to_string().matches("\nmodel.embed_tokens (").count(), usize::from(!kept), "{plan}");
        assert_eq!(plan.to_string().matches("model.embed_tokens").count(), 1, "{plan}");
    }
}
