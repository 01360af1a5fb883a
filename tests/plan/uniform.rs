//! Interleaving by roles and whole layers.

use tensor_offload::checkpoint::Layout;
use tensor_offload::plan::{Unit, Warning};
use tensor_offload::{Plan, Planner};

use super::{GIB, GPU0, MIB, bytes, machine, named};

fn uniform(layout: &Layout, allocation: &str, resident: &str) -> Plan {
    let machine = machine(&["cuda:0=64gib", "cuda:1=64gib", "cpu=64gib"]);
    let planner = Planner::new(layout, &machine).allocation(allocation.parse().unwrap()).unit(Unit::Uniform);
    planner.keep_resident(resident).plan().unwrap()
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
