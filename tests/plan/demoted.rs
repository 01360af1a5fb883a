//! Plans without resident modules, to make room on their compute device.

use tensor_offload::Planner;
use tensor_offload::plan::Warning;

use super::{CPU, GIB, assignment, blocks, machine, on, sequential, tied, usual};

/// A plan without a host gets one. Its warnings stay; what mode auto said of it holds no more.
#[test]
fn modules_move_to_a_host_that_the_plan_did_not_have() {
    let (layout, machine) = (blocks(4, GIB), usual());
    for allocation in ["cuda:0,*", "auto"] {
        let planner = Planner::new(&layout, &machine).allocation(allocation.parse().unwrap());
        let plan = planner.keep_resident("head").plan().unwrap();
        assert_eq!((plan.device(CPU), plan.warnings().len()), (None, 1), "{allocation}");
        let demoted = plan.demoted(&layout, &machine).unwrap();
        assert_eq!(on(&demoted, CPU), [0, 1, 2, 3]);
        assert_eq!(demoted.warnings(), [Warning::IdlePattern { pattern: "head".to_owned() }]);
        assert!(demoted.explanation().is_none(), "{allocation}");
    }
}

/// Of what is streamed before, the host's modules are pinned already, and those of another card are not.
#[test]
fn only_what_the_host_pins_counts_towards_its_cap() {
    let machine = machine(&["cuda:0=24gib", "cuda:1=24gib", "cpu=64gib,pinned=6gib"]);
    let plan = sequential(&blocks(10, GIB), &machine, "cuda:0,3gb;cuda:1,3gb;cpu,*").unwrap();
    let demoted = plan.demoted(&blocks(10, GIB), &machine).unwrap();
    let host = demoted.device(CPU).unwrap().weights;
    assert_eq!((host.bytes, host.pinned, host.staged), (7 * GIB, 6 * GIB, GIB));
}

/// A head that shares the embedding's memory takes the embedding's way, though it has no bytes that could be pinned.
#[test]
fn a_module_that_owns_no_bytes_is_staged_with_its_owner() {
    for (pinned, staged) in [("1b", true), ("8gib", false)] {
        let machine = machine(&["cuda:0=24gib", &format!("cpu=64gib,pinned={pinned}")]);
        let plan = sequential(&tied(), &machine, "cuda:0,*").unwrap();
        let demoted = plan.demoted(&tied(), &machine).unwrap();
        let of = |module| assignment(&demoted, module).staged;
        assert_eq!((of("model.embed_tokens"), of("lm_head")), (staged, staged), "{pinned} may be pinned");
    }
}
