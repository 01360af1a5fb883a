//! Plans, behaviour by behaviour, with the cases of `data/cases.json` first; those of `data/plans.json`; and what holds of
//! every plan.

mod auto;
mod cases;
mod demoted;
mod in_place;
mod properties;
mod search;
mod uniform;

use std::collections::BTreeMap;
use std::time::Duration;

use tensor_offload::checkpoint::{Layout, TensorInfo};
use tensor_offload::device::{Bandwidth, Described, Topology};
use tensor_offload::error::PlanFault;
use tensor_offload::error::{Limit, PlannedModule, Term};
use tensor_offload::plan::{Assignment, KeptFor, TensorGrouping, Unit, Warning};
use tensor_offload::{ByteSize, DType, DeviceId, Error, ErrorKind, Machine, Order, Plan, Planner, Result, Use};

const GIB: u64 = 1 << 30;
const MIB: u64 = 1 << 20;
const GPU0: DeviceId = DeviceId::cuda(0);
const GPU1: DeviceId = DeviceId::cuda(1);
const CPU: DeviceId = DeviceId::CPU;

fn machine(devices: &[&str]) -> Machine {
    let described: Vec<Described> = devices.iter().map(|d| d.parse().unwrap()).collect();
    Machine::described(&described)
}

/// Two cards of 24 GiB and a host of 128.
fn usual() -> Machine {
    machine(&["cuda:0=24gib", "cuda:1=24gib", "cpu=128gib"])
}

fn blocks(count: usize, bytes: u64) -> Layout {
    Layout::blocks(vec![bytes; count])
}

fn sequential(layout: &Layout, machine: &Machine, allocation: &str) -> Result<Plan> {
    Planner::new(layout, machine).allocation(allocation.parse()?).compute(GPU0).order(Order::Sequential).plan()
}

/// A model of tensors of these names and bytes, one after the other in one file.
fn named(tensors: &[(&str, u64)]) -> Layout {
    let mut offset = 0;
    let tensor = |(name, bytes): &(&str, u64)| {
        offset += bytes;
        TensorInfo::new(*name, DType::U8, &[*bytes], 0, offset - bytes).unwrap()
    };
    Layout::new(tensors.iter().map(tensor).collect())
}

fn bytes(plan: &Plan, device: DeviceId) -> u64 {
    plan.assignments().iter().filter(|a| a.device == device).map(|a| a.bytes).sum()
}

fn on(plan: &Plan, device: DeviceId) -> Vec<usize> {
    plan.assignments().iter().filter(|a| a.device == device).map(|a| a.index.index()).collect()
}

fn assignment<'a>(plan: &'a Plan, module: &str) -> &'a Assignment {
    plan.assignments().iter().find(|a| &*a.module == module).expect("a module of this name")
}

fn shortfall(result: Result<Plan>) -> tensor_offload::error::Shortfall {
    match result {
        Err(Error::DoesNotFit(shortfall)) => *shortfall,
        other => panic!("{other:?}"),
    }
}

// What users of such tools met, by its number in `data/cases.json`.

#[test]
fn case_1_a_star_completes_a_ratio() {
    let plan = sequential(&blocks(10, GIB), &usual(), "cuda:0,50%;cpu,*").unwrap();
    assert_eq!((on(&plan, GPU0), on(&plan, CPU)), (vec![0, 1, 2, 3, 4], vec![5, 6, 7, 8, 9]));
    assert_eq!(plan.mode().name(), "ratio");
}

#[test]
fn case_2_blanks_capitals_and_a_trailing_hash_make_no_device() {
    let layout = blocks(10, 256 * MIB);
    let plan = sequential(&layout, &usual(), "cuda:0,2.5gb;cpu,*").unwrap();
    assert_eq!(plan.device(GPU0).unwrap().quota, Some(2_684_354_560));
    for same in [" CUDA:0 , 2.5GB ; cpu , * ; ", "cuda:0,2.5gb;cpu,*#"] {
        assert_eq!(sequential(&layout, &usual(), same).unwrap(), plan);
    }
    assert_eq!(plan.devices().iter().map(|d| d.id).collect::<Vec<_>>(), [CPU, GPU0]);
}

#[test]
fn case_3_old_strings_place_what_they_said() {
    let layout = blocks(10, GIB);
    let plan = |text: &str| sequential(&layout, &usual(), text).unwrap();
    assert_eq!(bytes(&plan("{cuda:0,0.15;cpu,0.5}"), GPU0), 3 * GIB);
    assert_eq!(bytes(&plan("cuda:0,.1;cpu,0.7"), GPU0), 2 * GIB);
    let pairs = plan("cuda:0,0.25,cpu,0.5");
    assert_eq!((bytes(&pairs, GPU0), bytes(&pairs, CPU), pairs.mode().name()), (6 * GIB, 4 * GIB, "fraction"));
    assert_eq!(on(&plan("#cuda:0;1.1;cpu"), CPU), [8, 9]);
    let exact = plan("#cuda:0;2;cpu");
    assert_eq!((on(&exact, CPU), exact.warnings()), (vec![8, 9], &[][..]));
    assert_eq!(bytes(&plan("cuda:0,50%;cpu,50%#cuda:0;4.0;cpu"), CPU), 5 * GIB);
    let other = plan("#cuda:1;2.0;cpu");
    assert_eq!((other.compute(), bytes(&other, GPU1)), (GPU1, 8 * GIB));
}

#[test]
fn case_4_units_are_powers_of_1024() {
    let layout = blocks(8, 512 * MIB);
    for (quota, placed) in [(".5gb", 1), ("1gib", 2), ("1024mb", 2), ("1048576k", 2), ("1tb", 8), ("536870911b", 0)] {
        let plan = sequential(&layout, &usual(), &format!("cuda:0,{quota};cpu,*")).unwrap();
        assert_eq!(on(&plan, GPU0).len(), placed, "{quota}");
    }
}

#[test]
fn case_5_indices_are_never_renumbered() {
    let three = machine(&["cuda:0=24gib", "cuda:1=24gib", "cuda:2=24gib", "cpu=64gib"]);
    let error = sequential(&blocks(4, GIB), &three, "cuda:3,1gb;cpu,*").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::UnknownDevice);
    assert_eq!(error.to_string(), "there is no cuda:3 here; there are cpu, cuda:0, cuda:1, cuda:2");
    let four = machine(&["cuda:0=24gib", "cuda:1=24gib", "cuda:2=24gib", "cuda:3=24gib", "cpu=64gib"]);
    let plan = sequential(&blocks(9, GIB), &four, "cuda:0,1gb;cuda:2,4gb;cuda:3,4gb").unwrap();
    assert_eq!([0, 1, 2, 3].map(|n| on(&plan, DeviceId::cuda(n)).len()), [1, 0, 4, 4]);
}

#[test]
fn case_6_the_host_takes_the_rest_or_says_how_short_it_is() {
    let layout = blocks(10, GIB);
    let plan = sequential(&layout, &usual(), "cuda:0,2gb;cuda:1,3gb").unwrap();
    assert_eq!([GPU0, GPU1, CPU].map(|d| on(&plan, d).len()), [2, 3, 5]);
    let small = machine(&["cuda:0=24gib", "cuda:1=24gib", "cpu=64gib,free=4gib"]);
    let short = shortfall(sequential(&layout, &small, "cuda:0,2gb;cuda:1,3gb"));
    assert_eq!((short.device, short.term, short.short), (CPU, Term::Weights, 1_073_741_824));
    assert_eq!(short.module.as_deref(), Some("block.9"));
}

#[test]
fn case_7_quotas_over_the_model_leave_nothing_over() {
    let plan = sequential(&blocks(10, GIB), &usual(), "cuda:0,20gb;cuda:1,3gb").unwrap();
    assert_eq!([GPU0, GPU1, CPU].map(|d| on(&plan, d).len()), [10, 0, 0]);
    assert!(plan.device(CPU).is_none_or(|d| d.weights.bytes == 0));
    assert_eq!(plan.slots().bytes(), 0);
}

#[test]
fn case_8_entries_fill_in_the_order_of_the_string() {
    let plan = sequential(&blocks(10, GIB), &usual(), "cpu,4gb;cuda:1,3gb;cuda:0,*").unwrap();
    assert_eq!((on(&plan, CPU), on(&plan, GPU1), on(&plan, GPU0)), (vec![0, 1, 2, 3], vec![4, 5, 6], vec![7, 8, 9]));
    // As text, 10 stands before 2; and so does the order of the string here, but not below.
    let many = machine(&["cuda:0=24gib", "cuda:2=24gib", "cuda:10=24gib", "cpu=64gib"]);
    let [two, ten] = [2, 10].map(DeviceId::cuda);
    for (allocation, first, second) in
        [("cuda:10,2gb;cuda:2,2gb;cpu,*", ten, two), ("cuda:2,2gb;cuda:10,2gb;cpu,*", two, ten)]
    {
        let plan = sequential(&blocks(6, GIB), &many, allocation).unwrap();
        assert_eq!((on(&plan, first), on(&plan, second), on(&plan, CPU)), (vec![0, 1], vec![2, 3], vec![4, 5]));
    }
}

#[test]
fn case_9_what_fits_no_quota_never_lands_on_the_compute_device() {
    for allocation in ["cuda:0,2gb;cuda:1,2gb;cpu,*", "cuda:0,2gb;cuda:1,2gb"] {
        let plan = sequential(&blocks(2, 3 * GIB), &usual(), allocation).unwrap();
        assert_eq!(on(&plan, CPU), [0, 1]);
    }
    let plan = sequential(&blocks(3, 3 * GIB), &usual(), "cuda:0,50%;cuda:1,50%").unwrap();
    assert_eq!((on(&plan, GPU0), on(&plan, GPU1)), (vec![0], vec![1, 2]));
    // A ratio's `*` takes it while it has anything left, though another has more.
    let plan = sequential(&blocks(1, 10 * GIB), &usual(), "cuda:0,10%;cuda:1,50%;cpu,*").unwrap();
    assert_eq!(on(&plan, CPU), [0]);
}

#[test]
fn case_10_a_fraction_of_the_total_may_pass_what_is_free() {
    let busy = machine(&["cuda:0=24gib,free=20gib", "cpu=64gib"]);
    let short = shortfall(sequential(&blocks(23, GIB), &busy, "cuda:0,0.95"));
    // 22 blocks within 22.8 GiB, and one slot for the block that is streamed.
    assert_eq!((short.device, short.needed, short.limit, short.total), (GPU0, 23 * GIB, 20 * GIB, 24 * GIB));
    let text = short.to_string();
    assert!(text.contains(&(20 * GIB).to_string()) && text.contains(&(24 * GIB).to_string()), "{text}");
    // What is free is no reason to place less than the quota: a model that fits is placed whole.
    assert_eq!(on(&sequential(&blocks(19, GIB), &busy, "cuda:0,0.95").unwrap(), GPU0).len(), 19);
}

#[test]
fn case_11_small_modules_stay_on_the_compute_device() {
    let mut tensors = vec![("embed_tokens.weight".to_owned(), GIB)];
    for layer in 0..4 {
        tensors.push((format!("layers.{layer}.mlp.weight"), GIB));
        tensors.push((format!("layers.{layer}.norm.weight"), 8192));
        // Under one ten-thousandth, but no longer small.
        tensors.push((format!("layers.{layer}.gate.weight"), 64 << 10));
    }
    let layout = named(&tensors.iter().map(|(name, bytes)| (name.as_str(), *bytes)).collect::<Vec<_>>());
    for order in [Order::Sequential, Order::Interleaved] {
        let planner = Planner::new(&layout, &usual())
            .allocation("cuda:0,40kib;cuda:1,0b;cpu,*".parse().unwrap())
            .order(order)
            .plan();
        let plan = planner.unwrap();
        assert_eq!(bytes(&plan, GPU0), 4 * 8192);
        assert!(plan.assignments().iter().all(|a| a.module.ends_with("norm") == (a.device == GPU0)));
        let idle = plan.device(GPU1).unwrap();
        assert_eq!((idle.weights.modules, idle.needed()), (0, 0));
    }
    // Never beyond the quota.
    let plan = sequential(&layout, &usual(), "cuda:0,20kib;cpu,*").unwrap();
    assert_eq!(bytes(&plan, GPU0), 2 * 8192);
    // Small ones come first; the gates of 64 KiB are none, and do not keep the embedding away.
    let plan = sequential(&layout, &usual(), &format!("cuda:0,{}b;cpu,*", GIB + 4 * 8192)).unwrap();
    assert!(
        plan.assignments()
            .iter()
            .all(|a| (a.device == GPU0) == ["embed_tokens", "norm"].iter().any(|end| a.module.ends_with(end)))
    );
    // Under one ten-thousandth of the model is small, and that itself is not.
    for (norm, first) in [(4_999, "norm"), (5_000, "mlp")] {
        let layout = named(&[("layers.0.mlp.weight", 50_000_000 - norm), ("layers.0.norm.weight", norm)]);
        let plan = sequential(&layout, &usual(), &format!("cuda:0,{}b;cpu,*", 50_000_000 - norm)).unwrap();
        let kept: Vec<_> = plan.assignments().iter().filter(|a| a.device == GPU0).map(|a| &*a.module).collect();
        assert_eq!(kept, [format!("layers.0.{first}")]);
    }
}

#[test]
fn case_12_smaller_blocks_fill_behind_a_large_one() {
    let layout = Layout::blocks([GIB, 5 * GIB, GIB, GIB, GIB]);
    let plan = sequential(&layout, &usual(), "cuda:0,4gb;cpu,*").unwrap();
    assert_eq!((on(&plan, GPU0), on(&plan, CPU)), (vec![0, 2, 3, 4], vec![1]));
    assert_eq!(plan.assignments().iter().map(|a| a.index.index()).collect::<Vec<_>>(), [0, 1, 2, 3, 4]);
}

// Memory.

#[test]
fn slots_are_for_the_streamed_part_of_the_largest_layer() {
    let tensors = ["a", "b"].map(|role| [0, 1, 2, 3].map(|layer| (format!("layers.{layer}.{role}.weight"), 3 * MIB)));
    let tensors: Vec<(&str, u64)> = tensors.iter().flatten().map(|(name, bytes)| (name.as_str(), *bytes)).collect();
    let (layout, machine) = (named(&tensors), usual());
    let planner = Planner::new(&layout, &machine).allocation("cuda:0,12mib;cpu,*".parse().unwrap());
    let uniform = planner.clone().unit(Unit::Uniform).depth(1).plan().unwrap();
    assert_eq!((uniform.slots().count, uniform.slots().bytes_each), (2, 3 * MIB));
    assert_eq!(uniform.device(GPU0).unwrap().needed(), 12 * MIB + 2 * 3 * MIB);
    let deep = planner.clone().unit(Unit::Uniform).depth(usize::MAX).plan().unwrap();
    assert_eq!(deep.slots().count, 4);
    let blocking = planner.order(Order::Sequential).depth(0).plan().unwrap();
    assert_eq!((blocking.slots().count, blocking.slots().bytes_each), (1, 6 * MIB));
}

#[test]
fn devices_of_one_memory_share_it() {
    let shared = |info: tensor_offload::device::DeviceInfo| info.domain(CPU);
    let info = |id| shared(tensor_offload::device::DeviceInfo::new(id, 16 * GIB));
    let unified = Machine::new([info(CPU), info(GPU0)], Topology::new());
    assert!(sequential(&blocks(10, GIB), &unified, "cuda:0,8gb").is_ok());
    let short = shortfall(sequential(&blocks(14, GIB), &unified, "cuda:0,8gb"));
    assert_eq!((short.device, short.term, short.needed, short.limit), (GPU0, Term::Slots, 17 * GIB, 16 * GIB));
    // Of two equal limits the device's own is told.
    let busy = |id, total| shared(tensor_offload::device::DeviceInfo::new(id, total).free(Some(8 * GIB)));
    let unified = Machine::new([busy(CPU, 32 * GIB), busy(GPU0, 16 * GIB)], Topology::new());
    let short = shortfall(sequential(&blocks(14, GIB), &unified, "cuda:0,9gb"));
    assert_eq!((short.device, short.limit, short.total), (GPU0, 8 * GIB, 16 * GIB));
    assert_eq!(short.limit_is, Limit::Free);
}

/// What is locked for an integrated device is not there to be pinned; and a copy within the memory passes no link.
#[test]
fn devices_of_one_memory_pin_and_copy_within_it() {
    let described = ["cpu=16gib", "cuda:0=16gib,link=26,domain=cpu"].map(|text| text.parse().unwrap());
    let unified = Machine::described(&described);
    let layout = blocks(10, GIB);
    let planner = Planner::new(&layout, &unified).allocation("cuda:0,6gb;cpu,*".parse().unwrap()).depth(0);
    let plan = planner.clone().pinned_cap(Some(ByteSize(8 * GIB))).plan().unwrap();
    let host = plan.device(CPU).unwrap();
    assert_eq!((host.weights.streamed, host.weights.pinned, host.weights.staged), (4 * GIB, 2 * GIB, 2 * GIB));
    assert_eq!(plan.warnings(), [Warning::OneMemory { device: CPU, compute: GPU0, bytes: 4 * GIB }], "{plan}");
    let estimate = plan.estimate(unified.topology(), Duration::ZERO);
    assert!(estimate.segments.is_empty(), "{estimate}");
    let memory = unified.topology().clone().link(CPU, "40".parse().unwrap());
    assert_eq!(plan.estimate(&memory, Duration::ZERO).bound().unwrap().name, "cpu out");
}

/// A slot that no driver would allocate at once is divided by tensor; where that is not enough, nothing fits.
#[test]
fn no_allocation_is_larger_than_the_driver_makes() {
    let layers = |bytes: [u64; 3]| {
        let names =
            ["a", "b", "c"].map(|name| (0..4).map(|layer| format!("layers.{layer}.{name}.weight")).collect::<Vec<_>>());
        let each = (0..4).flat_map(|layer| (0..3).map(move |part| (part, layer)));
        named(&each.map(|(part, layer)| (names[part][layer].as_str(), bytes[part])).collect::<Vec<_>>())
    };
    let plan = |layout: &Layout, largest: &str, allocation: &str| {
        let machine = machine(&["cpu=64gib", &format!("cuda:0=24gib{largest}")]);
        Planner::new(layout, &machine).allocation(allocation.parse().unwrap()).depth(1).plan()
    };
    let layout = layers([GIB, GIB, GIB / 2]);
    let whole = plan(&layout, "", "cpu,*").unwrap();
    assert_eq!((whole.grouping(), whole.slots().bytes_each), (TensorGrouping::Joined, 5 * GIB / 2));
    assert_eq!(plan(&layout, ",largest=2.5gib", "cpu,*").unwrap(), whole, "as large as a slot is enough");
    let divided = plan(&layout, ",largest=2gib", "cpu,*").unwrap();
    assert_eq!((divided.grouping(), divided.slots().bytes_each), (TensorGrouping::PerTensor, 5 * GIB / 2));
    let short = shortfall(plan(&layout, ",largest=1023mib", "cpu,*"));
    assert_eq!((short.device, short.term, short.limit_is), (GPU0, Term::Slots, Limit::InOneAllocation));
    assert_eq!((short.needed, short.limit, short.total), (5 * GIB / 2, 1023 * MIB, 24 * GIB));
    assert!(short.to_string().contains("bytes in one allocation of"), "{short}");
    // Two tensors of one module are one allocation, unless each is its own; also where the module stays on the card.
    let fused = named(&[("layers.0.mlp.up", 3 * GIB / 2), ("layers.0.mlp.down", GIB), ("layers.1.mlp.up", GIB / 2)]);
    for allocation in ["cpu,*", "cuda:0,100%", "auto"] {
        let plan = plan(&fused, ",largest=1.5gib", allocation).unwrap();
        assert_eq!(plan.grouping(), TensorGrouping::PerTensor, "{allocation}: {plan}");
    }
    assert!(plan(&fused, ",largest=1gib", "cuda:0,100%").is_err() && plan(&fused, ",largest=1gib", "cpu,*").is_err());
    // A model that is moved to the host streams, if slots can be as large as its layers.
    let resident = plan(&layout, ",largest=2gib", "cuda:0,100%").unwrap();
    assert_eq!(resident.grouping(), TensorGrouping::Joined);
    let small = machine(&["cpu=64gib", "cuda:0=24gib,largest=2gib"]);
    assert_eq!(resident.demoted(&layout, &small).unwrap_err().kind(), ErrorKind::DoesNotFit);
    assert!(resident.demoted(&layout, &machine(&["cpu=64gib", "cuda:0=24gib"])).is_ok());
    // Weights that stay there are allocations of their own.
    assert!(plan(&layout, ",largest=1gib", "cuda:0,100%").is_ok());
    let short = shortfall(plan(&layout, ",largest=1023mib", "cuda:0,100%"));
    assert_eq!((short.term, short.module.as_deref(), short.short), (Term::Weights, Some("layers.0.a"), MIB));
    // Mode auto plans within it, too.
    let auto = plan(&layout, ",largest=2gib", "auto").unwrap();
    assert!(auto.grouping() == TensorGrouping::PerTensor || auto.slots().count == 0, "{auto}");
}

/// An unopened device is charged what opening takes: before the weights, if the plan puts anything on it.
#[test]
fn opening_a_device_counts_where_it_is_used() {
    let info = |id, opening| tensor_offload::device::DeviceInfo::new(id, 10 * GIB).opening(opening);
    let machine = Machine::new([info(CPU, 0), info(GPU0, GIB), info(GPU1, 11 * GIB)], Topology::new());
    let plan = sequential(&blocks(9, GIB), &machine, "cuda:0,9gb;cuda:1,0b").unwrap();
    assert_eq!((plan.device(GPU0).unwrap().needed(), plan.device(GPU1).unwrap().needed()), (10 * GIB, 0));
    let short = shortfall(sequential(&blocks(10, GIB), &machine, "cuda:0,10gb"));
    assert_eq!((short.term, short.short), (Term::Weights, GIB));
    let short = shortfall(sequential(&blocks(2, GIB), &machine, "cuda:0,1gb;cuda:1,1gb"));
    assert_eq!((short.device, short.term, &short.module), (GPU1, Term::Opening, &None));
    // Donors give what is left of them once they are open; and a plan that was kept before this was counted is read, which has
    // no checksum either.
    let donated = sequential(&blocks(9, GIB), &machine, "#cuda:0;3;cuda:1");
    assert_eq!(shortfall(donated).limit, 0);
    let mut kept = serde_json::to_value(&plan).unwrap();
    for device in kept["devices"].as_array_mut().unwrap() {
        device.as_object_mut().unwrap().remove("opening");
    }
    kept.as_object_mut().unwrap().remove("checksum");
    assert_eq!(serde_json::from_value::<Plan>(kept).unwrap().device(GPU0).unwrap().beside.opening, 0);
}

#[test]
fn unknown_free_memory_counts_as_all() {
    let info = |id, total| tensor_offload::device::DeviceInfo::new(id, total).free(None);
    let machine = Machine::new([info(CPU, 64 * GIB), info(GPU0, 8 * GIB)], Topology::new());
    let short = shortfall(sequential(&blocks(10, GIB), &machine, "cuda:0,9gb"));
    assert_eq!((short.term, short.limit_is), (Term::Weights, Limit::InAll));
    assert!(short.to_string().contains(&format!("{} bytes in all, the plan needs {}", 8 * GIB, 10 * GIB)), "{short}");
}

// Tied, kept and in-place modules.

/// An embedding that is the head as well, between them layers of 10 MiB.
fn tied() -> Layout {
    let at =
        |name: &str, mib: u64, offset: u64| TensorInfo::new(name, DType::U8, &[mib * MIB], 0, offset * MIB).unwrap();
    Layout::new(vec![
        at("model.embed_tokens.weight", 5, 0),
        at("model.layers.0.mlp.weight", 10, 5),
        at("model.layers.1.mlp.weight", 10, 15),
        at("lm_head.weight", 5, 0),
    ])
}

#[test]
fn tied_weights_are_placed_once_and_kept_first() {
    let plan = sequential(&tied(), &usual(), "cuda:0,15mib;cpu,*").unwrap();
    let (embedding, head) = (assignment(&plan, "model.embed_tokens"), assignment(&plan, "lm_head"));
    assert_eq!((embedding.device, embedding.bytes), (GPU0, 5 * MIB));
    assert_eq!((head.device, head.bytes, head.usage), (GPU0, 0, Use::Resident));
    assert_eq!(plan.bytes(), 25 * MIB);
    // A layer that comes first does not take the embedding's place.
    let plan = sequential(&tied(), &usual(), "cuda:0,10mib;cpu,*").unwrap();
    assert_eq!(on(&plan, GPU0), [0, 3]);
}

#[test]
fn a_streamed_alias_needs_its_owners_bytes() {
    let plan = sequential(&tied(), &usual(), "cpu,*").unwrap();
    let head = assignment(&plan, "lm_head");
    assert_eq!((head.device, head.bytes, head.usage), (CPU, 0, Use::Streamed));
    let host = plan.device(CPU).unwrap();
    assert_eq!((host.weights.bytes, host.weights.streamed), (25 * MIB, 30 * MIB));
    let ends = Layout::new(tied().tensors().iter().filter(|t| !t.name.contains("layers")).cloned().collect());
    assert_eq!(sequential(&ends, &usual(), "cpu,*").unwrap().slots().bytes_each, 5 * MIB);
}

#[test]
fn patterns_keep_modules_resident_within_the_quota() {
    let (layout, machine) = (blocks(10, GIB), usual());
    let planner =
        Planner::new(&layout, &machine).allocation("cuda:0,2gb;cpu,*".parse().unwrap()).order(Order::Sequential);
    let plan = planner.clone().keep_resident("block.7").keep_resident("*.9").plan().unwrap();
    assert_eq!((on(&plan, GPU0), plan.warnings().len()), (vec![7, 9], 0));
    let plan = planner.clone().keep_resident("block.*").keep_resident("nothing").plan().unwrap();
    assert_eq!((on(&plan, GPU0), plan.warnings().len()), (vec![0, 1], 9));
    assert_eq!(plan.warnings()[8], Warning::IdlePattern { pattern: "nothing".to_owned() });
    let kept = Warning::NotKept { module: "block.9".to_owned(), why: KeptFor::Wanted, device: GPU0 };
    assert_eq!(plan.warnings()[7], kept);
    // They are kept with a plan, as they print.
    let mut json = serde_json::to_value(&plan).unwrap();
    assert_eq!(json["warnings"][8], "no module is named like `nothing`");
    assert_eq!(serde_json::from_value::<Plan>(json.clone()).unwrap(), plan);
    json["warnings"][8] = "no module is".into();
    let error = serde_json::from_value::<Plan>(json).unwrap_err();
    assert!(error.to_string().contains("not a valid plan: `no module is` is not a warning"), "{error}");
}

#[test]
fn modules_used_in_place_take_no_slot_and_no_link() {
    let tensors =
        ["layers.0.attn.weight", "layers.0.experts.0.weight", "layers.0.experts.1.weight"].map(|n| (n, 4 * MIB));
    let (layout, machine) = (named(&tensors), usual());
    let planner = Planner::new(&layout, &machine).allocation("cpu,*".parse().unwrap());
    let plan = planner.in_place("*.experts.*").plan().unwrap();
    assert_eq!(assignment(&plan, "layers.0.experts.1").usage, Use::InPlace);
    assert_eq!((plan.slots().bytes_each, plan.device(CPU).unwrap().weights.streamed), (4 * MIB, 4 * MIB));
    assert!(plan.to_string().contains("2 modules used in place, 8.00 MiB"), "{plan}");
}

// Streaming.

#[test]
fn host_weights_are_pinned_up_to_the_cap() {
    let (layout, machine) = (blocks(10, GIB), usual());
    let planner = Planner::new(&layout, &machine).allocation("cuda:0,4gb;cpu,*".parse().unwrap());
    let capped = planner.clone().pinned_cap(Some(ByteSize(5 * GIB / 2))).plan().unwrap();
    let host = capped.device(CPU).unwrap();
    assert_eq!((host.weights.pinned, host.weights.staged, host.weights.streamed), (2 * GIB, 4 * GIB, 6 * GIB));
    let staged = capped.assignments().iter().filter(|a| a.staged);
    assert!(staged.clone().all(|a| a.usage == Use::Streamed && a.device == CPU));
    assert_eq!(staged.count(), 4);
    assert_eq!(planner.plan().unwrap().device(CPU).unwrap().weights.pinned, 6 * GIB);
}

#[test]
fn the_disk_and_unreachable_peers_go_through_staging() {
    let machine = machine(&["cuda:0=24gib", "cuda:1=24gib", "xpu:0=24gib", "disk=1tib", "cpu=64gib"]);
    let layout = blocks(8, GIB);
    let staged = |machine: &Machine| {
        let plan = sequential(&layout, machine, "cuda:0,2gb;cuda:1,2gb;xpu:0,2gb;disk,*").unwrap();
        plan.assignments().iter().map(|a| a.staged).collect::<Vec<_>>()
    };
    assert_eq!(staged(&machine), [false, false, false, false, true, true, true, true]);
    let apart = machine.with_topology(Topology::new().no_peer_access(GPU0, GPU1));
    assert_eq!(staged(&apart), [false, false, true, true, true, true, true, true]);
}

#[test]
fn a_role_is_resident_in_all_layers_of_a_class_or_in_none() {
    let roles = [("attn.qkv", 3), ("attn.out", 1), ("mlp.up", 4), ("mlp.down", 4)];
    let mut tensors = Vec::new();
    for layer in 0..8 {
        tensors.extend(roles.map(|(role, mib)| (format!("blocks.{layer}.{role}.weight"), mib * MIB)));
    }
    let layout = named(&tensors.iter().map(|(name, bytes)| (name.as_str(), *bytes)).collect::<Vec<_>>());
    let machine = usual();
    // 96 MiB in all. 44 hold the roles of 32 and 8 in all layers; of the 4 that are left no layer's 7 fit.
    for (quota, resident) in [(44, 40), (47, 47), (96, 96), (5, 0), (31, 24)] {
        let allocation = format!("cuda:0,{quota}mib;cpu,*").parse().unwrap();
        let plan = Planner::new(&layout, &machine).allocation(allocation).unit(Unit::Uniform).plan().unwrap();
        assert!(bytes(&plan, GPU0) <= quota * MIB);
        assert_eq!(bytes(&plan, GPU0), resident * MIB, "{quota}");
        check_uniform(&layout, &plan);
    }
}

/// Apart from layers that are wholly resident, layers of a class agree in what is.
fn check_uniform(layout: &Layout, plan: &Plan) {
    let mut seen: BTreeMap<usize, Vec<bool>> = BTreeMap::new();
    for layer in layout.layers() {
        let resident: Vec<bool> =
            layer.modules.iter().map(|&m| plan.assignment(m).unwrap().usage == Use::Resident).collect();
        if !resident.iter().all(|r| *r) {
            assert_eq!(seen.entry(layer.class).or_insert_with(|| resident.clone()), &resident, "{}", layer.name);
        }
    }
}

// Estimates.

#[test]
fn an_estimate_is_the_largest_of_compute_and_segments() {
    let (gbps, layout) = (|n: u64| Bandwidth::bytes_per_second(n * 1_000_000_000), Layout::blocks([1_000_000_000; 10]));
    let topology = Topology::new().link(GPU0, gbps(25)).link(GPU1, gbps(25)).link(CPU, gbps(40)).shared(
        "switch",
        gbps(30),
        [GPU0, GPU1],
    );
    let plan = sequential(&layout, &usual(), "cuda:0,4000000000b;cuda:1,1000000000b;cpu,*").unwrap();
    let estimate = plan.estimate(&topology, Duration::from_millis(100));
    // 5 GB from the host and 1 from the other card meet at the card's own link.
    assert_eq!(estimate.bound().unwrap().name, "cuda:0 in");
    assert_eq!((estimate.pass, estimate.bound().unwrap().bytes), (Duration::from_millis(240), 6_000_000_000));
    assert_eq!(
        estimate.to_string(),
        "a pass takes at least 0.240 s, limited by cuda:0 in (6.00 GB at 25 GB/s; compute 0.100 s)"
    );
    let json = serde_json::to_string(&estimate).unwrap();
    assert_eq!(serde_json::from_str::<tensor_offload::plan::Estimate>(&json).unwrap(), estimate);
    // As long as the compute, it bounds nothing.
    assert_eq!(plan.estimate(&topology, Duration::from_millis(240)).bound(), None);
    let slow = plan.estimate(&topology, Duration::from_secs(1));
    assert_eq!((slow.bound(), slow.pass), (None, Duration::from_secs(1)));
    assert_eq!(plan.estimate(&Topology::new(), Duration::ZERO).pass, Duration::ZERO);
}

#[test]
fn bytes_of_an_unreachable_peer_pass_both_ways() {
    let gbps = |n: u64| Bandwidth::bytes_per_second(n * 1_000_000_000);
    let direct = Topology::new().link(GPU0, gbps(25)).link(GPU1, gbps(10)).shared("switch", gbps(20), [GPU0, GPU1]);
    let staged = direct.clone().no_peer_access(GPU0, GPU1);
    let plan = sequential(&Layout::blocks([1_000_000_000; 10]), &usual(), "cuda:1,*").unwrap();
    let switch = |topology: &Topology| {
        let estimate = plan.estimate(topology, Duration::ZERO);
        estimate.segments.iter().find(|s| s.name == "switch").unwrap().bytes
    };
    assert_eq!((switch(&direct), switch(&staged)), (10_000_000_000, 20_000_000_000));
}

// The plan as a value.

#[test]
fn a_plan_prints_as_a_table() {
    let busy = machine(&["cuda:0=24gib,free=20gib", "cuda:1=8gib", "cpu=64gib"]);
    let layout = blocks(10, GIB);
    let planner = Planner::new(&layout, &busy).allocation("cuda:0,2gb;cuda:1,1.5gb;cpu,5gb*".parse().unwrap());
    let plan = planner.order(Order::Sequential).reserve(ByteSize(GIB)).plan().unwrap();
    let expected = "\
mode bytes, sequential, compute on cuda:0, depth 2
device     quota   weights  modules         slots   reserve      total       free
cpu     5.00 GiB  7.00 GiB        7             -         -  64.00 GiB  64.00 GiB
cuda:0  2.00 GiB  2.00 GiB        2  3 x 1.00 GiB  1.00 GiB  24.00 GiB  20.00 GiB
cuda:1  1.50 GiB  1.00 GiB        1             -         -   8.00 GiB   8.00 GiB
8 layers streamed, 8.00 GiB per pass: 7.00 GiB pinned, 0 B staged
warning: cpu takes what no quota holds: 7516192768 bytes, 2147483648 more than its 5368709120";
    assert_eq!(plan.to_string(), expected);
}

/// Plans that are kept must be read by newer versions: a field that is added later has a default, and is not written where
/// it has that one, since it would change the checksum.
#[test]
fn a_plan_that_an_older_version_wrote_is_read_and_written_as_it_was() {
    let written: serde_json::Value = serde_json::from_str(include_str!("../data/plan-0.1.json")).unwrap();
    let plan: Plan = serde_json::from_value(written.clone()).unwrap();
    assert_eq!(serde_json::to_value(&plan).unwrap(), written);
}

/// The lines that only some plans have.
#[test]
fn a_table_tells_what_is_unusual() {
    let layout = blocks(4, GIB);
    let info = |id, opening| tensor_offload::device::DeviceInfo::new(id, 16 * GIB).opening(opening);
    let machine = Machine::new([info(CPU, 0), info(GPU0, 300 * MIB)], Topology::new());
    let planner = Planner::new(&layout, &machine).allocation("cuda:0,2gb;cpu,*".parse().unwrap()).depth(0);
    let table = |planner: &Planner<'_>| planner.plan().unwrap().to_string();
    for (unit, order) in
        [(Unit::Module, "interleaved by module"), (Unit::Uniform, "interleaved by roles and whole layers")]
    {
        let table = table(&planner.clone().order(Order::Interleaved).unit(unit));
        assert!(table.starts_with(&format!("mode bytes, {order}, compute on cuda:0, depth 0\n")), "{table}");
    }
    let table_of = |scratch: u64| table(&planner.clone().scratch(scratch));
    assert_eq!(table_of(0).matches("is not open yet").count(), 1);
    assert!(table_of(0).contains("\ncuda:0 is not open yet: opening it takes about 300.00 MiB"), "{}", table_of(0));
    assert!(table_of(GIB).contains("1 x 1.00 GiB") && table_of(GIB + 1).contains("1.00 GiB for patching"));
    assert!(table_of(0).contains("\n2 layers streamed"));
    let one = planner.clone().allocation("cuda:0,3gb;cpu,*".parse().unwrap());
    assert!(table(&one).contains("\n1 layer streamed"));
    let whole = planner.allocation("cuda:0,*".parse().unwrap());
    assert!(table(&whole).contains("\nnothing is streamed") && !table(&whole).contains("0 x"), "{}", table(&whole));
}

#[test]
fn a_plan_says_what_it_was_made_with() {
    let (layout, machine) = (blocks(7, GIB), usual());
    let planner = Planner::new(&layout, &machine).allocation("cuda:0,0b;cpu,*".parse().unwrap()).depth(1);
    let plan = planner.clone().unit(Unit::Uniform).fixed_slots(true).plan().unwrap();
    assert_eq!((plan.unit(), plan.fixed_slots(), plan.explanation().is_none()), (Unit::Uniform, true, true));
    assert!(!planner.plan().unwrap().fixed_slots());
    assert!(planner.clone().allocation("auto".parse().unwrap()).plan().unwrap().explanation().is_some());
    assert_eq!(
        [Use::Resident, Use::Streamed, Use::InPlace].map(|usage| usage.to_string()),
        ["resident", "streamed", "in_place"]
    );
    // Seven streamed layers over two slots: one is left over.
    for (slots, depth, fixed, told) in
        [(2, 1, true, true), (7, 6, true, false), (9, 8, true, false), (1, 0, true, false), (2, 1, false, false)]
    {
        let plan = planner.clone().depth(depth).fixed_slots(fixed).plan().unwrap();
        let wanted: &[Warning] = if told { &[Warning::UnevenSlots { slots, layers: 7 }] } else { &[] };
        assert_eq!(plan.warnings(), wanted, "{slots} slots");
    }
    let text = Warning::UnevenSlots { slots: 4, layers: 7 }.to_string();
    assert_eq!(text, "4 fixed slots do not divide 7 streamed layers: the last of a pass sees 2 fetched ahead");
}

#[test]
fn auto_says_what_each_device_got_and_why() {
    let layout = blocks(10, GIB);
    let explained = |devices: &[&str], compute: u64, allocation: &str| {
        let machine = machine(devices);
        let planner = Planner::new(&layout, &machine).compute_time(Duration::from_millis(compute));
        planner.allocation(allocation.parse().unwrap()).plan().unwrap().explanation().unwrap().to_string()
    };
    // 5 GiB at 20 GB/s take 0.268 s, and 6 GiB 0.322.
    let plain = "\
auto: cuda:0,5gb;cpu,*; a pass takes 0.268 s
  cuda:0      5.00 GiB  computes: what fits beside 3 slots of 1.00 GiB
  cpu         5.00 GiB  streams 5.00 GiB a pass: 0.268 s on the way
  interleaved: 0.268 s with cuda:0,5gb;cpu,*
  sequential: 0.268 s with cuda:0,5gb;cpu,*";
    assert_eq!(explained(&["cuda:0=8gib,link=20", "cpu=64gib"], 0, "auto"), plain);
    let two = "\
auto: cuda:0,4gb;cpu,*; a pass takes 0.322 s, 0.100 of it compute
  cuda:0      4.00 GiB  computes: what fits beside 3 slots of 1.00 GiB and 1.00 GiB in reserve
  cpu         6.00 GiB  streams 6.00 GiB a pass: 0.322 s on the way
  cuda:1           0 B  the others hold it all, no slower
  interleaved: 0.322 s with cuda:0,4gb;cpu,*
  sequential: 0.322 s with cuda:0,4gb;cpu,*";
    let cards = ["cuda:0=8gib,link=20", "cuda:1=4gib,link=10", "cpu=64gib"];
    assert_eq!(explained(&cards, 100, "auto,reserve=1gb"), two);
    let unknown = explained(&["cuda:0=8gib", "cpu=64gib"], 0, "auto");
    assert!(unknown.contains("streams 5.00 GiB a pass: over a link of unknown speed\n"), "{unknown}");
    let staged = explained(&["cuda:0=8gib,link=20", "cpu=64gib,pinned=1gib"], 0, "auto");
    assert!(staged.contains("0.268 s on the way, 4.00 GiB of them staged\n"), "{staged}");
    let full = explained(&["cuda:0=8gib,link=20", "cpu=5gib,pinned=5gib"], 0, "auto");
    assert!(full.contains("0.268 s on the way, full\n"), "{full}");
    let whole = "\
auto: cuda:0,*; a pass takes 0.050 s, 0.050 of it compute
  cuda:0     10.00 GiB  holds the whole model";
    assert_eq!(explained(&["cuda:0=24gib,link=20", "cpu=64gib"], 50, "auto"), whole);
}

/// The layer that the slots are made for is named where they do not fit, by a plan and by one that is demoted.
#[test]
fn a_shortfall_of_slots_names_the_largest_layer() {
    let layout = Layout::blocks([GIB, 2 * GIB, 5 * GIB, GIB]);
    let tight = machine(&["cuda:0=9gib", "cpu=64gib"]);
    let short = shortfall(sequential(&layout, &tight, "cuda:0,0b;cpu,*"));
    assert_eq!((short.term, short.module.as_deref(), short.short), (Term::Slots, Some("block.2"), 2 * GIB));
    // Resident there, it needs no slot.
    let kept = Planner::new(&layout, &tight).compute(GPU0).allocation("cuda:0,5gib;cpu,*".parse().unwrap());
    let plan = kept.keep_resident("block.2").depth(1).plan().unwrap();
    assert_eq!(plan.slots().bytes_each, 2 * GIB);
    let short = shortfall(plan.demoted(&layout, &machine(&["cuda:0=8gib", "cpu=64gib"])));
    assert_eq!((short.term, short.module.as_deref(), short.short), (Term::Slots, Some("block.2"), GIB));
}

#[test]
fn a_remainder_within_its_amount_is_no_warning() {
    let plan = sequential(&blocks(10, GIB), &usual(), "cuda:0,5gb;cpu,5gb*").unwrap();
    assert_eq!((bytes(&plan, CPU), plan.warnings()), (5 * GIB, &[][..]));
}

#[test]
fn a_plan_that_was_tampered_with_is_refused() {
    let plan = sequential(&blocks(6, GIB), &usual(), "cuda:0,2gb;cpu,*").unwrap();
    let value = serde_json::to_value(&plan).unwrap();
    assert_eq!(serde_json::from_value::<Plan>(value.clone()).unwrap(), plan);
    let mutations: [(&str, serde_json::Value); 10] = [
        ("/assignments/0/index", 1.into()),
        ("/assignments/0/layer", 4.into()),
        ("/assignments/0/device", "cpu".into()),
        ("/assignments/0/device", "cuda:5".into()),
        ("/assignments/0/use", "streamed".into()),
        ("/assignments/5/bytes", u64::MAX.into()),
        ("/devices/0/bytes", 5.into()),
        ("/devices/1/slots", 0.into()),
        ("/slots/bytes_each", 1.into()),
        ("/slots/count", 2.into()),
    ];
    for (place, new) in mutations {
        let mut tampered = value.clone();
        *tampered.pointer_mut(place).unwrap() = new;
        // Without its checksum, too, as plans were written before there was one: by what contradicts itself.
        for _ in 0..2 {
            let error = serde_json::from_value::<Plan>(tampered.clone()).expect_err(place);
            assert!(error.to_string().contains("not a valid plan"), "{place}: {error}");
            tampered.as_object_mut().unwrap().remove("checksum");
        }
    }
    // Figures that fit each other, but not the modules.
    let json = |number: u64| serde_json::Value::from(number);
    let consistent = [
        ("fewer slots", vec![("/slots/count", json(2)), ("/devices/1/slots", json(2 * GIB))]),
        ("smaller slots", vec![("/slots/bytes_each", json(GIB / 2)), ("/devices/1/slots", json(3 * GIB / 2))]),
        ("more pinned than there is", vec![("/devices/0/pinned", json(5 * GIB))]),
        ("more staged than streamed", vec![("/devices/0/staged", json(5 * GIB))]),
        ("slots elsewhere", vec![("/devices/0/slots", json(1))]),
        ("a reserve elsewhere", vec![("/devices/0/reserve", json(1))]),
        ("resident and staged", vec![("/assignments/0/staged", true.into())]),
        ("a layer left out", vec![("/assignments/3/layer", json(5))]),
        ("a layer before the last", vec![("/assignments/3/layer", json(1))]),
    ];
    for (what, changes) in consistent {
        let mut tampered = value.clone();
        tampered.as_object_mut().unwrap().remove("checksum");
        for (place, new) in changes {
            *tampered.pointer_mut(place).unwrap_or_else(|| panic!("{what}: no {place} in {value}")) = new;
        }
        let error = serde_json::from_value::<Plan>(tampered).expect_err(what);
        assert!(error.to_string().contains("not a valid plan"), "{what}: {error}");
    }
    let mut shorter = value;
    shorter["assignments"].as_array_mut().unwrap().pop();
    assert!(serde_json::from_value::<Plan>(shorter).is_err());
}

#[test]
fn a_plan_knows_its_model() {
    let plan = sequential(&blocks(6, GIB), &usual(), "cuda:0,2gb;cpu,*").unwrap();
    plan.verify(&blocks(6, GIB)).unwrap();
    let error = plan.verify(&Layout::blocks([GIB, GIB, GIB, GIB, GIB, 2 * GIB])).unwrap_err();
    assert!(error.to_string().contains("block.5"), "{error}");
    let Error::Plan(fault) = error else { panic!("{error}") };
    let PlanFault::OtherModule { index: 5, planned, module } = *fault else { panic!("{fault:?}") };
    let known = |module: &PlannedModule| (module.name.clone(), module.bytes, module.layer);
    assert_eq!([known(&planned), known(&module)], [GIB, 2 * GIB].map(|bytes| ("block.5".to_owned(), bytes, 5)));
    let Err(Error::Plan(fault)) = plan.verify(&blocks(7, GIB)) else { panic!("a plan of another model") };
    assert_eq!(*fault, PlanFault::OtherModel { planned: 6, modules: 7 });
}

/// A plan may be older than what is known of a network's order: it holds for the layout in the order that it was made for.
#[test]
fn a_plan_of_another_order_of_layers_is_told_from_one_of_another_model() {
    let names = [
        "x_embedder",
        "single_transformer_blocks.0.w",
        "single_transformer_blocks.1.w",
        "transformer_blocks.0.w",
        "transformer_blocks.0.z",
    ];
    let tensor = |(at, name): (u64, &str)| {
        let name = format!("{name}.weight");
        tensor_offload::checkpoint::TensorInfo::new(name, tensor_offload::DType::U8, &[GIB], 0, at * GIB).unwrap()
    };
    let layout = Layout::new((0..).zip(names).map(tensor).collect());
    let by_name = ["x_embedder", "single_transformer_blocks.0", "single_transformer_blocks.1", "transformer_blocks.0"];
    let old = layout.clone().in_order(&by_name).unwrap();
    let plan = sequential(&old, &usual(), "cuda:0,2gb;cpu,*").unwrap();
    plan.verify(&old).unwrap();
    let Err(Error::Plan(fault)) = plan.verify(&layout) else { panic!("another order") };
    assert!(matches!(*fault, PlanFault::OtherOrder { index: 1, .. }), "{fault}");
    assert!(fault.to_string().contains("in_order") && fault.to_string().contains("plan again"), "{fault}");
    // The same layers, one of another size.
    let mut tensors: Vec<_> = layout.tensors().to_vec();
    tensors[0] = tensor_offload::checkpoint::TensorInfo::new(names[0], tensor_offload::DType::U8, &[5], 0, 0).unwrap();
    let Err(Error::Plan(fault)) = plan.verify(&Layout::new(tensors)) else { panic!("another model") };
    assert!(matches!(*fault, PlanFault::OtherModule { .. }), "{fault}");
    // As many layers of the same sizes, one of another name; and a size that differs behind where the order does.
    let mut tensors: Vec<_> = layout.tensors().to_vec();
    tensors[4] = TensorInfo::new(format!("{}.weight", names[4]), DType::U8, &[5], 0, 4 * GIB).unwrap();
    let Err(Error::Plan(fault)) = plan.verify(&Layout::new(tensors)) else { panic!("another model") };
    assert!(matches!(*fault, PlanFault::OtherModule { .. }), "{fault}");
    let mut tensors: Vec<_> = layout.tensors().to_vec();
    tensors[0].name = "y_embedder.weight".to_owned();
    let Err(Error::Plan(fault)) = plan.verify(&Layout::new(tensors)) else { panic!("another model") };
    assert!(matches!(*fault, PlanFault::OtherModule { .. }), "{fault}");
}

#[test]
fn defaults_need_no_allocation_and_no_compute_device() {
    let (layout, machine) = (blocks(6, GIB), usual());
    let plan = Planner::new(&layout, &machine).plan().unwrap();
    assert_eq!((plan.compute(), on(&plan, GPU0).len(), plan.depth()), (GPU0, 6, 2));
    let host_only = self::machine(&["cpu=64gib", "disk=1tib"]);
    assert_eq!(Planner::new(&layout, &host_only).plan().unwrap().compute(), CPU);
}

#[test]
fn more_bytes_than_can_be_counted_are_refused() {
    let error = sequential(&Layout::blocks([u64::MAX, u64::MAX]), &usual(), "cpu,*").unwrap_err();
    let Error::Plan(fault) = error else { panic!("{error}") };
    assert_eq!(*fault, PlanFault::TooManyBytes { bytes: u128::from(u64::MAX) * 2, most: 1 << 63 });
    let huge = machine(&["cuda:0=15000000tb", "cpu=16777215tb"]);
    for (alloc, order) in [("cuda:0,1%;cpu,99%", Order::Interleaved), ("cuda:0,1tb;cpu,*", Order::Interleaved)] {
        let layout = Layout::blocks(vec![(1u64 << 63) / 16; 16]);
        Planner::new(&layout, &huge).allocation(alloc.parse().unwrap()).order(order).depth(0).plan().unwrap();
    }
}

#[test]
fn what_a_demoted_plan_pins_stays_within_the_cap() {
    let layout = blocks(10, GIB);
    // Four fifths of what is left of 10 GiB may be pinned by default: 6.
    let small = machine(&["cuda:0=24gib", "cpu=10gib"]);
    let plan = Planner::new(&layout, &small).allocation("cuda:0,5gib;cpu,*".parse().unwrap());
    let demoted = plan.plan().unwrap().demoted(&layout, &small).unwrap();
    let pinned = |plan: &Plan| {
        plan.device(CPU).map(|host| (host.weights.pinned / GIB, host.weights.staged / GIB, host.weights.bytes / GIB))
    };
    assert_eq!(pinned(&demoted), Some((6, 4, 10)));
    // Where the cap is reached already, nothing more is pinned.
    let capped = plan.clone().pinned_cap(Some(tensor_offload::ByteSize(2 * GIB))).plan().unwrap();
    assert_eq!(pinned(&capped.demoted(&layout, &small).unwrap()), Some((2, 8, 10)));
    // What does not fit, or has nowhere to go, is refused.
    let short = shortfall(plan.plan().unwrap().demoted(&layout, &machine(&["cuda:0=24gib", "cpu=9gib"])));
    assert_eq!((short.device, short.term, short.short), (CPU, Term::Weights, GIB));
    let nowhere = plan.plan().unwrap().demoted(&layout, &machine(&["cuda:0=24gib"])).unwrap_err();
    assert_eq!(nowhere.kind(), ErrorKind::UnknownDevice);
    let host = Planner::new(&layout, &small).compute(CPU).plan().unwrap();
    let refused = host.demoted(&layout, &small).unwrap_err();
    assert!(matches!(&refused, Error::Plan(fault) if **fault == PlanFault::NowhereToDemote), "{refused}");
    // The examples print kinds, and this one stays as it was.
    assert_eq!((refused.kind(), refused.kind().to_string().as_str()), (ErrorKind::Plan, "Invalid"));
}
