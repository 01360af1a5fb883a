//! Modules used in place, tables whose rows are gathered, and modules that need slots of their own.

use std::time::Duration;

use tensor_offload::checkpoint::{Layout, TensorInfo};
use tensor_offload::device::{Bandwidth, Topology};
use tensor_offload::{DType, DeviceId, Order, Planner, Use};

use super::{CPU, GPU0, GPU1, MIB, assignment, named, usual};

/// The modules that are not used in place have the quota first: one that holds them all holds others too, and else none.
#[test]
fn modules_used_in_place_leave_the_quota_to_the_others() {
    let tensors = (0..4).flat_map(|n| ["attn", "experts"].map(|role| (format!("layers.{n}.{role}.weight"), 4 * MIB)));
    let tensors: Vec<(String, u64)> = tensors.collect();
    let layout = named(&tensors.iter().map(|(name, bytes)| (name.as_str(), *bytes)).collect::<Vec<_>>());
    let machine = usual();
    let resident = |quota: u64, order: Order| {
        let planner = Planner::new(&layout, &machine).allocation(format!("cuda:0,{quota}mib;cpu,*").parse().unwrap());
        let plan = planner.in_place("experts").order(order).plan().unwrap();
        let on_card = plan.assignments().iter().filter(|a| a.usage == Use::Resident);
        let (attention, experts): (Vec<_>, Vec<_>) = on_card.partition(|a| a.module.ends_with("attn"));
        (attention.len(), experts.len())
    };
    assert_eq!([12, 16, 24].map(|quota| resident(quota, Order::Interleaved)), [(3, 0), (4, 0), (4, 2)]);
    // In sequence modules go where the string says.
    assert_eq!(resident(16, Order::Sequential), (2, 2));
}

#[test]
fn a_table_whose_rows_are_gathered_lives_where_a_quota_holds_it() {
    let machine = usual();
    let lives = |shape: &[u64], allocation: &str| {
        let tensor = |name: &str, shape: &[u64], at| TensorInfo::new(name, DType::U8, shape, 0, at).unwrap();
        let mut tensors = vec![tensor("model.embed_tokens.weight", shape, 0)];
        tensors.extend((0..4).map(|n| tensor(&format!("model.layers.{n}.mlp.weight"), &[4 * MIB], (40 + n * 4) * MIB)));
        let layout = Layout::new(tensors);
        let planner = Planner::new(&layout, &machine).allocation(allocation.parse().unwrap()).gather_embeddings(true);
        let plan = planner.plan().unwrap();
        let table = assignment(&plan, "model.embed_tokens");
        (table.device, table.usage)
    };
    let rows = [40, MIB];
    assert_eq!(lives(&rows, "cuda:0,50mib;cpu,*"), (GPU0, Use::Resident));
    assert_eq!(lives(&rows, "cuda:0,8mib;cuda:1,1gib;cpu,*"), (CPU, Use::InPlace));
    assert_eq!(lives(&rows, "cuda:0,8mib;cpu,4mib;cuda:1,*"), (GPU1, Use::InPlace));
    // What has no rows is no table.
    assert_eq!(lives(&[40 * MIB], "cuda:0,8mib;cpu,*"), (CPU, Use::Streamed));
}

/// More than twice a layer's slot, in a model that has layers in a stack.
#[test]
fn an_outlier_is_larger_than_two_layers_of_a_stack() {
    let outliers = |tensors: &[(&str, u64)]| {
        let (layout, machine) = (named(tensors), usual());
        Planner::new(&layout, &machine).allocation("cpu,*".parse().unwrap()).plan().unwrap().outliers().len()
    };
    let model = |embedding: u64| [("embed.weight", embedding), ("layers.0.a.weight", MIB), ("layers.1.a.weight", MIB)];
    assert_eq!((outliers(&model(2 * MIB)), outliers(&model(2 * MIB + 1))), (0, 1));
    assert_eq!(outliers(&[("embed.weight", 9 * MIB), ("head.weight", MIB)]), 0);
}

/// With a large slot for each of them, large layers are fetched once. With fewer they are fetched in each pass.
#[test]
fn large_layers_that_keep_their_slots_take_no_time() {
    const MB: u64 = 1_000_000;
    let tensors = |far: bool| {
        let mut tensors = vec![("embed.weight".to_owned(), 900 * MB)];
        tensors.extend((0..8).map(|n| (format!("layers.{n}.a.weight"), 100 * MB)));
        // Apart from the embedding, so that one large slot is enough for both of them in turn.
        if far {
            tensors[4] = ("layers.3.a.weight".to_owned(), 900 * MB);
        }
        tensors
    };
    let speed = Bandwidth::bytes_per_second(1_000 * MB);
    let topology = Topology::new().link(GPU0, speed).link(GPU1, speed).link(CPU, speed);
    for (far, pinned, streamed) in [(false, "8gib", 800), (false, "1b", 800), (true, "8gib", 2_500)] {
        let tensors = tensors(far);
        let layout = named(&tensors.iter().map(|(name, bytes)| (name.as_str(), *bytes)).collect::<Vec<_>>());
        let machine = super::machine(&["cuda:0=24gib", "cuda:1=24gib", &format!("cpu=64gib,pinned={pinned}")]);
        let planner = Planner::new(&layout, &machine).compute(GPU0).order(Order::Sequential);
        // The last two layers come from the other card.
        let plan = planner.allocation(format!("cpu,{}b;cuda:1,*", layout.bytes() - 200 * MB).parse().unwrap()).plan();
        let plan = plan.unwrap();
        assert_eq!((plan.slots().large, plan.device(GPU1).unwrap().weights.streamed), (1, 200 * MB), "{plan}");
        let estimate = plan.estimate(&topology, Duration::ZERO);
        let passing = |name: &str| estimate.segments.iter().find(|segment| segment.name == name).map(|s| s.bytes / MB);
        assert_eq!(passing("cuda:0 in"), Some(streamed), "{estimate:?}");
        assert_eq!(passing("cuda:1 out"), Some(200), "{estimate:?}");
        // Staged bytes are read, written to the buffers and read there.
        let reads = if pinned == "1b" { 2 } else { 1 };
        assert_eq!(passing("cpu out"), Some((streamed - 200) * reads), "{estimate:?}");
    }
}

/// A disk whose folder is in memory takes what it should leave free, if it has anything.
#[test]
fn a_disk_in_memory_is_told_if_it_has_weights() {
    use tensor_offload::plan::Warning;
    let layout = Layout::blocks([MIB; 4]);
    let machine = super::machine(&["cuda:0=24gib", "cpu=64gib", "disk=64gib"]);
    let in_memory = machine.clone().with_topology(Topology::new().within(DeviceId::DISK, CPU));
    let warnings = |machine, disk: u64| {
        let allocation = format!("disk,{disk}mib;cuda:0,1mib;cpu,*");
        Planner::new(&layout, machine).allocation(allocation.parse().unwrap()).plan().unwrap().warnings().to_vec()
    };
    let told = Warning::DiskInMemory { device: DeviceId::DISK, memory: CPU, bytes: 2 * MIB };
    assert_eq!(warnings(&in_memory, 2), [told]);
    assert_eq!((warnings(&in_memory, 0), warnings(&machine, 2)), (vec![], vec![]));
}
