//! Interleaving by roles and whole layers.

use tensor_offload::checkpoint::Layout;
use tensor_offload::plan::{Unit, Warning};
use tensor_offload::{Plan, Planner};

use super::{GIB, GPU0, MIB, bytes, check_uniform, machine, named, on};

fn uniform(layout: &Layout, allocation: &str, resident: &str) -> Plan {
    let machine = machine(&["cuda:0=64gib", "cuda:1=64gib", "cpu=64gib"]);
    let planner = Planner::new(layout, &machine).allocation(allocation.parse().unwrap()).unit(Unit::Uniform);
    if resident.is_empty() { planner.plan().unwrap() } else { planner.keep_resident(resident).plan().unwrap() }
}

/// Layers of these modules, in MiB.
fn layers(layers: &[&[u64]]) -> Layout {
    let modules = layers.iter().enumerate().flat_map(|(layer, modules)| {
        modules.iter().enumerate().map(move |(role, mib)| (format!("layers.{layer}.role{role}.weight"), mib * MIB))
    });
    let modules: Vec<(String, u64)> = modules.collect();
    named(&modules.iter().map(|(name, bytes)| (name.as_str(), *bytes)).collect::<Vec<_>>())
}

/// The compute device has the role of 6 GiB, and the donors together room for the others, but not for whole modules.
#[test]
fn a_remainder_that_makes_layers_differ_is_told() {
    let layout = layers(&[&[6 << 10, 1 << 10, 1 << 10][..]; 4]);
    let plan = |cpu: &str, gpu: &str| uniform(&layout, &format!("cpu,{cpu}gib;cuda:1,{gpu}gib;cuda:0,*"), "*.role0");
    let alike = plan("4", "4");
    assert_eq!((bytes(&alike, GPU0), alike.warnings()), (24 * GIB, &[][..]));
    let differ = plan("3.5", "4.5");
    assert_eq!((bytes(&differ, GPU0), differ.warnings()), (25 * GIB, &[Warning::NotUniform { device: GPU0 }][..]));
}

/// Of eight layers two are streamed between one resident layer and the next, and as many from the last to the first.
#[test]
fn resident_layers_are_as_far_apart_as_can_be() {
    let on_card =
        |layout: &Layout, quota: u64, kept: &str| on(&uniform(layout, &format!("cuda:0,{quota}mib;cpu,*"), kept), GPU0);
    for quota in [20, 25, 29] {
        assert_eq!(on_card(&layers(&[&[10][..]; 8]), quota, ""), [2, 6], "{quota}");
        // A layer that is resident already does not count.
        assert_eq!(on_card(&layers(&[&[10][..]; 9]), quota + 10, "layers.0.role0"), [0, 3, 7], "{quota}");
    }
}

/// What no donor holds is the compute device's: whole layers, though none of their sizes fills the rest exactly.
#[test]
fn a_remainder_on_the_compute_device_is_of_whole_layers() {
    let layout = layers(&[&[2, 1], &[1, 1], &[2, 1], &[1, 1], &[2, 1], &[1, 1]]);
    for donor in 3..10 {
        let plan = uniform(&layout, &format!("cpu,{donor}mib;cuda:0,*"), "");
        assert_eq!(plan.warnings(), [], "{plan}");
        assert!(bytes(&plan, GPU0) >= layout.bytes() - donor * MIB, "{plan}");
        check_uniform(&layout, &plan);
    }
}

/// A layer that looks like no other is no class, whose roles would come before the layers of the stack.
#[test]
fn a_layer_alone_is_resident_whole_or_not_at_all() {
    let layout = layers(&[&[4], &[4], &[4], &[4], &[5, 1]]);
    assert_eq!(on(&uniform(&layout, "cuda:0,5mib;cpu,*", ""), GPU0), [0usize; 0]);
    assert_eq!(on(&uniform(&layout, "cuda:0,6mib;cpu,*", ""), GPU0), [3]);
}

/// A role is one of a class of layers: those of another class at the same place are another.
#[test]
fn roles_of_two_classes_are_apart() {
    let layout = layers(&[&[6, 1], &[6, 1], &[1, 6], &[1, 6]]);
    assert_eq!(on(&uniform(&layout, "cuda:0,12mib;cpu,*", ""), GPU0), [0, 2]);
}
