//! Measuring the links of CUDA devices over the stand-in driver, at paces that it keeps.
#![cfg(all(feature = "cuda", target_os = "linux"))]

mod card;

use std::time::{Duration, Instant};

use card::stand_in;
use cuda_standin::{Config, Effect, Fault, FaultPlan, Link, Peer, Session};
use tensor_offload::backend::MemoryKind;
use tensor_offload::device::{LinkKind, LinkMatrix};
use tensor_offload::registry::{LinkTiming, measure_links};
use tensor_offload::{ByteSize, DeviceId, Registry};

const DEADLINE: Duration = Duration::from_secs(20);
const HOST: DeviceId = DeviceId::CPU;
const A: DeviceId = DeviceId::cuda(0);
const B: DeviceId = DeviceId::cuda(1);

/// The backend lets go of memory a moment after the last handle.
fn assert_clean(cuda: &Session) {
    let until = Instant::now() + DEADLINE;
    while !cuda.report().is_clean() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(2));
    }
    cuda.report().assert_clean();
}

/// Two cards of 64 MiB, 0.5 GB/s in and 0.25 GB/s out: the stand-in moves the bytes with this machine's processors, and
/// keeps such a pace with a part of one.
fn paced() -> Config {
    let mut config = Config::with_devices(&[64 << 20, 64 << 20]);
    for device in &mut config.devices {
        device.to_device = Link::new(500_000_000, 0);
        device.to_host = Link::new(250_000_000, 0);
    }
    Config { check_sources: false, ..config }
}

fn measure(registry: &Registry) -> LinkMatrix {
    measure_links(registry, &LinkTiming::quick().bytes(ByteSize(8 << 20))).unwrap()
}

/// A way, and the pace in GB/s that the stand-in keeps on it.
type Paced = (DeviceId, DeviceId, LinkKind, f64);

/// Measures, and looks at what no machine can change however busy it is: all of these ways are there, and none is faster than
/// its pace, but for the 20/17 that the host's clock lets pass, nor so slow that one copy took longer than everything did.
/// How near a figure comes to its pace depends on who has the processors that move the bytes: `benches/transfer.rs` tells it.
fn measured(measure: impl Fn() -> LinkMatrix, ways: &[Paced]) -> LinkMatrix {
    let begin = Instant::now();
    let matrix = measure();
    let took = begin.elapsed().as_secs_f64();
    for &(from, to, kind, pace) in ways {
        let link = matrix.find(from, to, kind).unwrap_or_else(|| panic!("{from} to {to} {kind}\n{matrix}"));
        let figure = link.bandwidth.get() as f64 / 1e9;
        assert!(figure < pace * 20.0 / 17.0 * 1.001, "{from} to {to} {kind}: faster than the link\n{matrix}");
        assert!(figure >= link.bytes as f64 / 1e9 / took, "{from} to {to} {kind}: {took} s for one copy\n{matrix}");
    }
    matrix
}

/// The time that the links have been used for so far, in counted time, by their names in the stand-in's report.
fn used(cuda: &Session, links: &[&str]) -> Vec<Duration> {
    let counted = cuda.report().counted;
    links.iter().map(|link| counted.busy(link)).collect()
}

/// A buffer keeps its address when it may no longer be written; memory of the host has none on a device.
#[test]
fn buffers_of_a_card_have_an_address() {
    let Some(cuda) = stand_in(&paced()) else { return };
    {
        let registry = Registry::system();
        let card = registry.device(A).unwrap();
        let memory = card.alloc(4096, MemoryKind::Arena).unwrap();
        let address = memory.address().unwrap();
        assert!(address > 1);
        let (mut memory, rest) = (memory, 256);
        let tail = memory.split_off(rest).unwrap();
        assert_eq!((memory.freeze().address(), tail.freeze().address()), (Some(address), Some(address + 256)));
        let host = registry.device(HOST).unwrap();
        assert_eq!(host.alloc(4096, MemoryKind::Pinned).unwrap().freeze().address(), None);
    }
    assert_clean(&cuda);
}

#[test]
fn cuda_links_are_measured_and_no_faster_than_they_are() {
    let mut config = paced();
    let peer = |from, to, speed| Peer { link: Link::new(speed, 0), ..Peer::new(from, to) };
    config.peers = vec![peer(0, 1, 1_000_000_000), peer(1, 0, 750_000_000)];
    let Some(cuda) = stand_in(&config) else { return };
    {
        let registry = Registry::system();
        let ways = [
            (HOST, A, LinkKind::Pinned, 0.5),
            (A, HOST, LinkKind::Pinned, 0.25),
            (HOST, B, LinkKind::Pinned, 0.5),
            (B, HOST, LinkKind::Pinned, 0.25),
            (A, B, LinkKind::Peer, 1.0),
            (B, A, LinkKind::Peer, 0.75),
        ];
        let matrix = measured(|| measure(&registry), &ways);
        assert!(!matrix.left_out.iter().any(|left_out| left_out.what.starts_with("cuda")), "{matrix}");
        let links = ["to device 0", "from device 0", "to device 1", "from device 1"];
        let peers = ["device 0 to device 1", "device 1 to device 0"];
        let used = used(&cuda, &[&links[..], &peers].concat());
        for (&(from, to, kind, pace), used) in ways.iter().zip(used) {
            // One copy to warm up at least, and those that were timed: over this link and no other.
            let link = matrix.find(from, to, kind).unwrap();
            let least = f64::from(link.median_of + 1) * link.bytes as f64 / 1e9 / pace;
            assert!(used.as_secs_f64() > least - 1e-6, "{from} to {to} took {used:?}, not {least} s\n{matrix}");
        }
        assert!(registry.measured_topology().unwrap().reaches(A, B));
    }
    assert_clean(&cuda);
}

#[test]
fn cuda_peers_that_cannot_reach_each_other_are_measured_through_the_host() {
    let Some(cuda) = stand_in(&paced()) else { return };
    {
        let registry = Registry::system();
        // Down at 0.25 GB/s and then up at 0.5, in one part or in several at one time.
        let ways = [(A, B), (B, A)].map(|(from, to)| (from, to, LinkKind::PeerStaged, 0.25));
        let matrix = measured(|| measure(&registry), &ways);
        for (from, to) in [(A, B), (B, A)] {
            assert!(matrix.find(from, to, LinkKind::Peer).is_none());
            let staged = matrix.find(from, to, LinkKind::PeerStaged).unwrap();
            // Each copy was timed by itself, so that no host's clock makes it faster than the slower half of its way.
            assert!(staged.bandwidth.get() <= 250_100_000, "{matrix}");
            let why = format!("left out: {from} to {to}, straight: the driver says that {to} cannot reach");
            assert!(matrix.to_string().contains(&why), "{matrix}");
            assert!(!matrix.topology().reaches(to, from));
        }
    }
    assert_clean(&cuda);
}

#[test]
fn cuda_every_way_is_measured_and_what_arrives_is_looked_at() {
    let mut config = paced();
    config.devices.truncate(1);
    let Some(cuda) = stand_in(&config) else { return };
    {
        let timing = LinkTiming::thorough().bytes(ByteSize(8 << 20)).budget(Duration::from_millis(60));
        let kinds = [LinkKind::Pageable, LinkKind::Pinned, LinkKind::Staged, LinkKind::BothWays];
        let ways: Vec<Paced> =
            kinds.into_iter().flat_map(|kind| [(HOST, A, kind, 0.5), (A, HOST, kind, 0.25)]).collect();
        let registry = Registry::system();
        let matrix = measured(|| measure_links(&registry, &timing).unwrap(), &ways);
        assert!(!matrix.left_out.iter().any(|left_out| left_out.what.starts_with("cuda")), "{matrix}");
    }
    assert_clean(&cuda);
}

#[test]
fn cuda_what_cannot_be_measured_says_why() {
    let Some(cuda) = stand_in(&paced()) else { return };
    let left_out = |plan: FaultPlan, what: &str, why: &str| {
        let registry = Registry::system();
        cuda.fault(&plan);
        let matrix = measure(&registry);
        cuda.no_faults();
        let told = matrix.left_out.iter().any(|left| left.what.contains(what) && left.why.contains(why));
        assert!(told, "{what}: {why}\n{matrix}");
        matrix
    };
    // Both ways to pinned memory, the registration and then the driver's own.
    let pins = FaultPlan { faults: vec![Fault::pin(1), Fault::pin(2)], ..FaultPlan::default() };
    let matrix = left_out(pins, "cpu to cuda:0, pinned", "pinned");
    assert!(matrix.find(A, HOST, LinkKind::Pinned).is_some(), "the next one is\n{matrix}");
    cuda.report().assert_lawful();
    let lost = FaultPlan::one(Fault::nth("cuMemcpyHtoDAsync_v2", 1, Effect::Sticky(700)));
    let matrix = left_out(lost, "cuda:0", "cuMemcpyHtoDAsync");
    assert!(matrix.find(HOST, A, LinkKind::Pinned).is_none() && matrix.find(HOST, B, LinkKind::Pinned).is_some());
    cuda.report().assert_lawful();
}
