//! What is known of CUDA devices before and after they are opened, and what plans make of it.
#![cfg(all(feature = "cuda", target_os = "linux"))]

mod card;

use card::{Driver, assert_clean, driver, registry_of, stand_in};
use cuda_standin::{Config, Effect, Fault, FaultPlan, Pcie, Session, library_path};
use tensor_offload::backend::{Backend, Cuda, Found, MemoryKind, Route};
use tensor_offload::checkpoint::Layout;
use tensor_offload::device::{DeviceInfo, PcieLink};
use tensor_offload::error::Shortfall;
use tensor_offload::error::Term;
use tensor_offload::{ByteSize, DeviceId, Error, Machine, Planner};

const MIB: u64 = 1 << 20;
const A: DeviceId = DeviceId::cuda(0);
const B: DeviceId = DeviceId::cuda(1);

/// What plans count for a context: 0.4 GiB.
const CONTEXT: u64 = (4 << 30) / 10;

/// Two cards of 8 and 4 GiB, of which others have taken 2 GiB and nothing, and whose contexts take 100 MiB.
fn two() -> Config {
    let mut config = Config::with_devices(&[8 << 30, 4 << 30]).all_peers();
    config.devices[0].others_bytes = 2 << 30;
    config.devices.iter_mut().for_each(|device| device.context_bytes = 100 * MIB);
    config
}

/// The backend with the stand-in as the management library, too.
fn managed() -> Cuda {
    Cuda::new().nvml(library_path().unwrap())
}

fn found(backend: &Cuda, id: DeviceId) -> DeviceInfo {
    let here = backend.discover().into_iter().filter_map(|found| match found {
        Found::Here(info) => Some(info),
        _ => None,
    });
    here.into_iter().find(|info| info.id == id).unwrap()
}

fn opened_nothing(cuda: &Session) {
    assert_eq!(cuda.report().calls_of("cuDevicePrimaryCtxRetain"), 0);
}

#[test]
fn cuda_free_memory_is_known_before_opening() {
    let Some(cuda) = stand_in(&two()) else { return };
    {
        let backend = managed();
        let (a, b) = (found(&backend, A), found(&backend, B));
        assert_eq!((a.free, a.opening), (Some(6 << 30), CONTEXT));
        assert_eq!((b.free, b.opening), (Some(4 << 30), CONTEXT));
        opened_nothing(&cuda);
        // Open, the driver tells; the context has taken its part and is not charged again.
        let card = backend.open(A).unwrap();
        assert_eq!((card.info().free, card.info().opening), (Some((6 << 30) - 100 * MIB), 0));
        let (a, b) = (found(&backend, A), found(&backend, B));
        assert_eq!((a.free, a.opening), (Some((6 << 30) - 100 * MIB), 0));
        assert_eq!((b.free, b.opening), (Some(4 << 30), CONTEXT));
    }
    assert_clean(&cuda);
}

/// On whatever driver there is: what opening really takes, said beside what plans count for it.
#[test]
fn cuda_opening_takes_about_what_plans_count() {
    let driver = driver(&two());
    {
        let stand_in = matches!(driver, Driver::StandIn(_));
        let backend = if stand_in { managed() } else { Cuda::new() };
        let before = found(&backend, A);
        let card = backend.open(A).unwrap();
        let (after, now) = (card.info().free.unwrap(), found(&backend, A));
        assert_eq!((card.info().opening, now.opening), (0, 0));
        match before.free {
            None => eprintln!("opening {A}: the free memory before it is not told"),
            Some(free) => {
                let (took, counted) = (free.saturating_sub(after) / MIB, before.opening / MIB);
                eprintln!("opening {A}: took {took} MiB, plans count {counted} MiB");
                assert!(took < 4096, "{took}");
            }
        }
        let links = before.gpu.map(|gpu| gpu.to_string()).unwrap_or_default();
        eprintln!("links of {A}: {}", if links.is_empty() { "not told" } else { &links });
    }
    driver.assert_clean();
}

#[test]
fn cuda_without_a_management_library_free_memory_is_unknown() {
    let Some(cuda) = stand_in(&two()) else { return };
    let unknown = |backend: Cuda, why: &str| {
        let a = found(&backend, A);
        assert_eq!((a.total, a.free, a.opening), (8 << 30, None, CONTEXT), "{why}");
    };
    unknown(Cuda::new().nvml("/nowhere/libnvidia-ml.so.1"), "absent");
    unknown(Cuda::new().nvml("libm.so.6"), "a library without its calls");
    for call in ["nvmlInit_v2", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetMemoryInfo"] {
        cuda.fault(&FaultPlan::one(Fault::nth(call, 1, Effect::Fail(999)).onwards()));
        unknown(managed(), call);
        cuda.no_faults();
    }
    assert_clean(&cuda);
}

/// Whichever call of the management library fails, once or for good: less is known, and nothing else happens.
#[test]
fn cuda_a_management_library_that_refuses_costs_no_more_than_what_it_tells() {
    let mut config = two();
    config.devices.iter_mut().for_each(|device| device.nvlinks = vec![7, 7]);
    let Some(cuda) = stand_in(&config) else { return };
    let all = found(&managed(), A);
    let calls = cuda.report().calls.iter().filter(|(call, _)| call.starts_with("nvml")).map(|(_, n)| n).sum::<u64>();
    let names: Vec<String> = cuda.report().calls.into_keys().filter(|call| call.starts_with("nvml")).collect();
    let mut less = 0;
    for nth in 1..=calls {
        let fault = Fault { calls: names.clone(), nth, onwards: false, effect: Effect::Fail(999) };
        cuda.fault(&FaultPlan::one(fault));
        let some = found(&managed(), A);
        cuda.no_faults();
        assert_eq!((some.total, &some.name, some.opening), (all.total, &all.name, all.opening), "call {nth}");
        less += u32::from(some != all);
    }
    assert!(less >= 8, "{less} of {calls}");
    opened_nothing(&cuda);
}

/// A part of a card that CUDA shows as a device of its own: what the card has free is not the part's.
#[test]
fn cuda_the_free_memory_of_a_whole_card_is_not_that_of_its_part() {
    let mut config = two();
    config.devices[0].others_bytes = 0;
    let Some(cuda) = stand_in(&config) else { return };
    let mut part = Config::with_devices(&[1 << 30]);
    part.devices[0].uuid = config.devices[0].uuid;
    // The management library of the whole card, and the driver of the part, are this one library at two times.
    let nvml = managed();
    assert_eq!(found(&nvml, A).free, Some(8 << 30));
    cuda.configure(&part);
    assert_eq!(found(&managed(), A).free, Some(1 << 30));
    cuda.configure(&config);
    // `nvml` listed a device of 8 GiB; the library now tells of one of 1 GiB.
    cuda.configure(&part);
    assert_eq!(found(&nvml, A).free, None);
}

#[test]
fn cuda_links_are_told_and_estimated_until_they_are_measured() {
    let mut config = two();
    config.devices[0].pcie = Pcie { max_generation: 5, max_width: 16, generation: 1, width: 16 };
    config.devices[1].pcie = Pcie { max_generation: 3, max_width: 16, generation: 3, width: 8 };
    config.devices.iter_mut().for_each(|device| device.nvlinks = vec![9; 12]);
    let Some(cuda) = stand_in(&config) else { return };
    let registry = registry_of(managed());
    let gpu = registry.machine().device(A).unwrap().gpu.clone().unwrap();
    let mut idle = PcieLink::new(5, 16);
    idle.generation = 1;
    assert_eq!(gpu.pcie, Some(idle));
    assert_eq!(gpu.to_string(), "PCIe 5 x16 (now 1 x16), 12 NVLinks");
    let topology = registry.machine().topology();
    let speed = |from, to| {
        let route = topology.route(from, to);
        let segments = route.iter().map(|&segment| &topology.segments()[segment]);
        segments.inspect(|segment| assert!(segment.estimated)).map(|s| s.bandwidth.to_string()).collect::<Vec<_>>()
    };
    assert_eq!((speed(DeviceId::CPU, A), speed(B, DeviceId::CPU)), (vec!["57".into()], vec!["6.05".into()]));
    assert_eq!(speed(A, B), ["276"]);
    let layout = Layout::blocks([1 << 30; 4]);
    let plan = Planner::new(&layout, registry.machine()).allocation("cuda:0,0b;cpu,*".parse().unwrap()).plan().unwrap();
    let estimate = plan.estimate(topology, std::time::Duration::ZERO);
    assert!(estimate.to_string().contains("cuda:0 in (4.29 GB at an estimated 57 GB/s"), "{estimate}");
    opened_nothing(&cuda);
    assert!(registry.measured_topology().unwrap().segments().iter().all(|segment| !segment.estimated));
    drop(registry);
    assert_clean(&cuda);
}

fn shortfall(machine: &Machine, blocks: &[u64], alloc: &str) -> Shortfall {
    let layout = Layout::blocks(blocks.iter().copied());
    match Planner::new(&layout, machine).allocation(alloc.parse().unwrap()).plan() {
        Err(Error::DoesNotFit(shortfall)) => *shortfall,
        other => panic!("{other:?}"),
    }
}

/// A plan that would just fit an empty card does not fit one that has yet to be opened.
#[test]
fn cuda_a_plan_counts_the_context_of_a_device_that_is_not_open() {
    let Some(cuda) = stand_in(&two()) else { return };
    {
        let registry = registry_of(managed());
        let whole = [6 << 30];
        let short = shortfall(registry.machine(), &whole, "cuda:0,*");
        assert_eq!((short.device, short.term, short.limit, short.short), (A, Term::Weights, 6 << 30, CONTEXT));
        // A device that gets nothing is not opened and charged nothing.
        let layout = Layout::blocks([1 << 30]);
        let plan =
            Planner::new(&layout, registry.machine()).allocation("cuda:0,*;cuda:1,0b".parse().unwrap()).plan().unwrap();
        let charged = |id| plan.device(id).map_or(0, |device| device.beside.opening);
        assert_eq!((charged(A), charged(B)), (CONTEXT, 0));
        assert!(plan.to_string().contains("cuda:0 is not open yet: opening it takes about 409.60 MiB"), "{plan}");
        // Once it is open, what is free is without its context.
        let card = registry.device(A).unwrap();
        let held = card.alloc((1 << 30) as usize, MemoryKind::Whole).unwrap();
        let now = registry.machine_now();
        assert_eq!(now.device(A).unwrap().free, Some((5 << 30) - 100 * MIB));
        let short = shortfall(&now, &[5 << 30], "cuda:0,*");
        assert_eq!((short.term, short.short), (Term::Weights, 100 * MIB));
        assert_eq!(now.device(B).unwrap().opening, CONTEXT);
        drop(held);
    }
    assert_clean(&cuda);
    let mut full = two();
    full.devices[0].others_bytes = (8 << 30) - 300 * MIB;
    cuda.configure(&full);
    let short = shortfall(registry_of(managed()).machine(), &[1], "cuda:0,*");
    assert_eq!((short.term, &short.module), (Term::Opening, &None), "{short}");
    let told = registry_of(managed().context_size(ByteSize(200 * MIB)));
    assert_eq!(told.machine().device(A).unwrap().opening, 200 * MIB);
    let layout = Layout::blocks([MIB]);
    assert!(Planner::new(&layout, told.machine()).allocation("cuda:0,*".parse().unwrap()).plan().is_ok());
}

#[test]
fn cuda_peers_that_the_caller_forbids_are_asked_nothing() {
    let Some(cuda) = stand_in(&two()) else { return };
    {
        let registry = registry_of(managed().peers(false));
        assert!(!registry.machine().topology().reaches(A, B) && !registry.machine().topology().reaches(B, A));
        let (a, b) = (registry.device(A).unwrap(), registry.device(B).unwrap());
        for (to, from) in [(&a, &b), (&b, &a)] {
            assert_eq!(to.route_from(&**from), Route::Staged("the caller forbids it".to_owned()));
        }
        let links = registry.links().unwrap();
        assert!(links.to_string().contains("straight: the caller forbids it"), "{links}");
        let peer = |call: &&String| call.contains("Peer");
        assert_eq!(cuda.report().calls.keys().filter(peer).collect::<Vec<_>>(), Vec::<&String>::new());
    }
    assert_clean(&cuda);
}

/// What the driver says of peers is known to a plan before anything is opened.
#[test]
fn cuda_peers_that_cannot_reach_each_other_are_staged_in_the_plan() {
    let Some(cuda) = stand_in(&Config { peers: Vec::new(), ..two() }) else { return };
    let registry = registry_of(managed());
    let layout = Layout::blocks([MIB; 4]);
    let planner = Planner::new(&layout, registry.machine()).compute(A);
    let plan = planner.allocation("cuda:0,1mib;cuda:1,*".parse().unwrap()).plan().unwrap();
    let donor = plan.device(B).unwrap();
    assert!(donor.weights.streamed > 0 && donor.weights.staged == donor.weights.streamed, "{plan}");
    opened_nothing(&cuda);
}

/// An integrated device has no memory but the host's: one figure for both, and a warning where a copy gains nothing.
#[test]
fn cuda_an_integrated_device_shares_the_hosts_memory() {
    let mut config = Config::with_devices(&[64 << 40]);
    config.devices[0].integrated = true;
    let Some(_cuda) = stand_in(&config) else { return };
    let registry = registry_of(managed());
    let machine = registry.machine();
    assert_eq!(machine.device(A).unwrap().domain, DeviceId::CPU);
    assert_eq!(machine.topology().memory_of(A), DeviceId::CPU);
    assert!(machine.topology().segments().is_empty(), "its link is none to the host's memory");
    let free = machine.device(DeviceId::CPU).unwrap().usable();
    let short = shortfall(machine, &[free / 2 + 1, free / 2 + 1], &format!("cuda:0,{}b;cpu,*", free / 2 + 1));
    assert_eq!(short.limit, free, "{short}");
}
