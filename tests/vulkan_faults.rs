//! Whatever call of a Vulkan driver fails, the outcome is an error or a right result: nothing hangs, panics, keeps memory or
//! delivers a wrong byte.
#![cfg(feature = "vulkan")]

mod support;
mod vulkan_devices;

use support::coded::{self, Codes};
use support::compressed::Compressed;
use support::unpacked;
use support::whole_path::{Source, source, whole_path};
use tensor_offload::backend::{Health, Vulkan};
use tensor_offload::{ByteSize, DType, DeviceId, Error, Registry, Result};
use vulkan_devices::{Drivers, assert_given_back, drivers, registry};
use vulkan_probe::Failure;

const COMPUTE: DeviceId = DeviceId::vulkan(0);

/// Does some work with one call after another failing in this way.
fn whatever_fails(
    drivers: &Drivers,
    backend: impl Fn() -> Vulkan,
    work: impl Fn(&Registry) -> Result<()>,
    how: Failure,
) {
    let path = |nth: u64| {
        // Also the calls that find the devices.
        drivers.fail(nth, how);
        let devices = registry(backend());
        let outcome = match devices.machine().device(COMPUTE) {
            Ok(_) => work(&devices),
            Err(error) => Err(error),
        };
        if let Err(Error::TimedOut { what, .. }) = &outcome {
            panic!("{how:?} at call {nth}: hung on {what}");
        }
        let lost = devices.opened().iter().any(|device| device.health() != Health::Good);
        let what = format!("{how:?} at call {nth} ({:?}), {outcome:?}", drivers.failed());
        // The memory of work that a lost device may still do is never freed.
        if !lost {
            assert_given_back(&devices, &what);
        }
        drop(devices);
        drivers.fail(0, how);
        drivers.assert_silent();
        if !lost {
            drivers.assert_nothing_left();
        }
        (outcome, lost)
    };
    let before = drivers.calls();
    path(0).0.unwrap();
    let calls = drivers.calls() - before;
    // Each of the first calls, where most are others, then about sixty spread over the rest. A lost device is never closed, and
    // keeps what it had, so there are few of these.
    let (first, rest) = if how == Failure::Lost { (1, 24) } else { (120, 60) };
    let step = usize::try_from(calls / rest).unwrap().max(1);
    // One of so many, where time is short.
    let every = std::env::var("VULKAN_FAULTS_EVERY").ok().map_or(1, |every| every.parse().unwrap());
    let mut reached = 0;
    let all = (1..=calls.min(first)).step_by(every).chain((first + 1..=calls).step_by(step * every));
    for nth in all {
        let (outcome, lost) = path(nth);
        // Without a failure that was reached there is none.
        assert!(drivers.failed().is_some() || (outcome.is_ok() && !lost), "call {nth}: {outcome:?}");
        reached += usize::from(drivers.failed().is_some());
        drivers.forget_left();
        drivers.forget_failed();
    }
    assert!(reached > 20 / every, "only {reached} failures were reached");
}

/// The whole path of a model.
fn path(source: &Source) -> impl Fn(&Registry) -> Result<()> {
    |devices| whole_path(devices, source, COMPUTE, "vulkan:0,60kb;disk,20kb;cpu,*", 1)
}

#[test]
fn vulkan_every_failing_call_gives_an_error_or_a_right_result() {
    let (source, drivers) = (source(), drivers());
    for how in Failure::ALL {
        whatever_fails(&drivers, || drivers.vulkan(), path(&source), how);
    }
}

#[test]
fn vulkan_every_failing_call_with_ordinary_host_memory_gives_an_error_or_a_right_result() {
    let (source, drivers) = (source(), drivers());
    for how in [Failure::DeviceMemory, Failure::Lost] {
        whatever_fails(&drivers, || drivers.vulkan().pinned_cap(ByteSize(0)), path(&source), how);
    }
}

/// Blocks are unpacked, and codes decoded, in kernels of small bindings.
#[test]
fn vulkan_every_failing_call_with_kernels_gives_an_error_or_a_right_result() {
    let (file, drivers) = (Compressed::new(&coded::tensors()[..8], 4), drivers());
    drivers.limit_bindings(40_000);
    let work = |devices: &Registry| {
        unpacked::passes(devices, COMPUTE, "vulkan:0,30%;disk,30%;cpu,*", DType::F16, 1)?;
        coded::passes((devices, COMPUTE), (&file, Codes::OfTheFile), "vulkan:0,20%;disk,40%;cpu,*", None, 1)
    };
    for how in Failure::ALL {
        whatever_fails(&drivers, || drivers.vulkan(), work, how);
    }
}
