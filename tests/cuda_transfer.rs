//! Measuring the links of CUDA devices over the stand-in driver, at paces that it keeps.
#![cfg(all(feature = "cuda", target_os = "linux"))]

mod card;

use std::time::{Duration, Instant};

use card::stand_in;
use cuda_standin::{Config, Effect, Fault, FaultPlan, Link, Peer, Session};
use tensor_offload::device::{LinkKind, LinkMatrix};
use tensor_offload::transfer::{LinkTiming, measure_links};
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

/// Two cards of 64 MiB, 2 GB/s in and 1 GB/s out.
fn paced() -> Config {
    let mut config = Config::with_devices(&[64 << 20, 64 << 20]);
    for device in &mut config.devices {
        device.to_device = Link::new(2_000_000_000, 0);
        device.to_host = Link::new(1_000_000_000, 0);
    }
    Config { check_sources: false, ..config }
}

fn measure(registry: &Registry) -> LinkMatrix {
    measure_links(registry, &LinkTiming::quick().bytes(ByteSize(8 << 20))).unwrap()
}

/// A way, and the pace that the stand-in was told to keep on it, in GB/s.
type Paced = (DeviceId, DeviceId, LinkKind, f64);

/// Measures until all figures are within 15 % of the pace. The stand-in moves the bytes with this machine's
/// processors; while others have them it falls behind, so there are several attempts.
fn within_fifteen_per_cent(measure: impl Fn() -> LinkMatrix, ways: &[Paced]) -> LinkMatrix {
    let far = |matrix: &LinkMatrix, &&(from, to, kind, paced): &&Paced| {
        let link = matrix.find(from, to, kind).unwrap_or_else(|| panic!("{from} to {to} {kind}\n{matrix}"));
        (link.bandwidth.get() as f64 / 1e9 / paced - 1.0).abs() > 0.15
    };
    let mut matrix = measure();
    for _ in 0..8 {
        if !ways.iter().any(|way| far(&matrix, &way)) {
            return matrix;
        }
        matrix = measure();
    }
    panic!("{:?}\n{matrix}", ways.iter().filter(|way| far(&matrix, way)).collect::<Vec<_>>());
}

#[test]
fn cuda_links_are_measured_at_their_pace() {
    let mut config = paced();
    let peer = |from, to, speed| Peer { link: Link::new(speed, 0), ..Peer::new(from, to) };
    config.peers = vec![peer(0, 1, 4_000_000_000), peer(1, 0, 3_000_000_000)];
    let Some(cuda) = stand_in(&config) else { return };
    {
        let registry = Registry::system();
        let ways = [
            (HOST, A, LinkKind::Pinned, 2.0),
            (A, HOST, LinkKind::Pinned, 1.0),
            (HOST, B, LinkKind::Pinned, 2.0),
            (B, HOST, LinkKind::Pinned, 1.0),
            (A, B, LinkKind::Peer, 4.0),
            (B, A, LinkKind::Peer, 3.0),
        ];
        let matrix = within_fifteen_per_cent(|| measure(&registry), &ways);
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
        let matrix = measure(&registry);
        for (from, to) in [(A, B), (B, A)] {
            assert!(matrix.find(from, to, LinkKind::Peer).is_none());
            let staged = matrix.find(from, to, LinkKind::PeerStaged).unwrap_or_else(|| panic!("{matrix}"));
            // One part: down at 1 GB/s, then up at 2.
            assert!((500_000_000..1_050_000_000).contains(&staged.bandwidth.get()), "{matrix}");
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
        let ways = [(HOST, A, LinkKind::BothWays, 2.0), (A, HOST, LinkKind::BothWays, 1.0)];
        let registry = Registry::system();
        let matrix = within_fifteen_per_cent(|| measure_links(&registry, &timing).unwrap(), &ways);
        for kind in [LinkKind::Pageable, LinkKind::Pinned, LinkKind::Staged, LinkKind::BothWays] {
            let up = matrix.find(HOST, A, kind).unwrap_or_else(|| panic!("{matrix}"));
            let down = matrix.find(A, HOST, kind).unwrap_or_else(|| panic!("{matrix}"));
            assert!(up.bandwidth.get() < 2_300_000_000 && down.bandwidth.get() < 1_150_000_000, "{matrix}");
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
