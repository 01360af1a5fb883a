//! Measuring the links of CUDA devices over the stand-in driver, at paces that it keeps.
#![cfg(all(feature = "cuda", target_os = "linux"))]

mod card;

use std::time::{Duration, Instant};

use card::stand_in;
use cuda_standin::{Config, Effect, Fault, FaultPlan, Link, Peer, Session};
use tensor_offload::device::{LinkKind, LinkMatrix};
use tensor_offload::{ByteSize, DeviceId, Registry};
use tensor_offload::{LinkTiming, measure_links};

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

/// A way, and between which figures in GB/s it has to be.
type Paced = (DeviceId, DeviceId, LinkKind, [f64; 2]);

/// A way on which the stand-in keeps a pace.
fn at(from: DeviceId, to: DeviceId, kind: LinkKind, pace: f64) -> Paced {
    (from, to, kind, [0.85 * pace, 1.15 * pace])
}

/// Measures until each figure has been what it has to be. None may ever be above that. Below it they fall while other
/// programs have the processors that move the bytes, one in this attempt and another in the next.
fn measured(measure: impl Fn() -> LinkMatrix, ways: &[Paced]) -> LinkMatrix {
    let (mut left, until) = (ways.to_vec(), Instant::now() + 3 * DEADLINE);
    loop {
        let matrix = measure();
        let figure = |&(from, to, kind, _): &Paced| {
            let link = matrix.find(from, to, kind).unwrap_or_else(|| panic!("{from} to {to} {kind}\n{matrix}"));
            link.bandwidth.get() as f64 / 1e9
        };
        assert!(ways.iter().all(|way| figure(way) < way.3[1]), "faster than the link\n{matrix}");
        left.retain(|way| figure(way) < way.3[0]);
        if left.is_empty() {
            return matrix;
        }
        assert!(Instant::now() < until, "never at its pace: {left:?}\n{matrix}");
    }
}

#[test]
fn cuda_links_are_measured_at_their_pace() {
    let mut config = paced();
    let peer = |from, to, speed| Peer { link: Link::new(speed, 0), ..Peer::new(from, to) };
    config.peers = vec![peer(0, 1, 1_000_000_000), peer(1, 0, 750_000_000)];
    let Some(cuda) = stand_in(&config) else { return };
    {
        let registry = Registry::system();
        let ways = [
            at(HOST, A, LinkKind::Pinned, 0.5),
            at(A, HOST, LinkKind::Pinned, 0.25),
            at(HOST, B, LinkKind::Pinned, 0.5),
            at(B, HOST, LinkKind::Pinned, 0.25),
            at(A, B, LinkKind::Peer, 1.0),
            at(B, A, LinkKind::Peer, 0.75),
        ];
        let matrix = measured(|| measure(&registry), &ways);
        assert!(matrix.left_out.is_empty(), "{matrix}");
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
        let ways = [(A, B), (B, A)].map(|(from, to)| (from, to, LinkKind::PeerStaged, [0.125, 0.262]));
        let matrix = measured(|| measure(&registry), &ways);
        for (from, to) in [(A, B), (B, A)] {
            assert!(matrix.find(from, to, LinkKind::Peer).is_none());
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
        let ways = [at(HOST, A, LinkKind::BothWays, 0.5), at(A, HOST, LinkKind::BothWays, 0.25)];
        let registry = Registry::system();
        let matrix = measured(|| measure_links(&registry, &timing).unwrap(), &ways);
        for kind in [LinkKind::Pageable, LinkKind::Pinned, LinkKind::Staged, LinkKind::BothWays] {
            let up = matrix.find(HOST, A, kind).unwrap_or_else(|| panic!("{matrix}"));
            let down = matrix.find(A, HOST, kind).unwrap_or_else(|| panic!("{matrix}"));
            assert!(up.bandwidth.get() < 575_000_000 && down.bandwidth.get() < 287_500_000, "{matrix}");
        }
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
