//! The Vulkan devices that a test runs over: those that the machine has, software drivers included.
#![allow(dead_code, reason = "each test file uses its part")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use tensor_offload::backend::{Backend, Found, Host, Vulkan};
use tensor_offload::device::DeviceKind;
use tensor_offload::{ByteSize, DeviceId, Registry};

/// How long a test waits for anything.
pub(crate) const DEADLINE: Duration = Duration::from_secs(20);

/// The backend, software drivers included.
pub(crate) fn vulkan() -> Vulkan {
    Vulkan::new().software(true)
}

/// A name and a way to make a backend.
type Hosts = (&'static str, fn() -> Vulkan);

/// The three kinds of host memory that devices copy from and to.
pub(crate) fn hosts() -> [Hosts; 3] {
    [
        ("imported pages", vulkan),
        ("memory of a driver", || vulkan().host_imports(false)),
        ("memory that is not pinned", || vulkan().pinned_cap(ByteSize(0))),
    ]
}

/// The devices of `backend` and this host.
pub(crate) fn registry(backend: Vulkan) -> Registry {
    let registry = Registry::new([Arc::new(backend) as Arc<dyn Backend>, Arc::new(Host::new())]);
    assert!(registry.absent().is_empty(), "{:?}", registry.absent());
    registry
}

/// The ids of the devices that there are.
pub(crate) fn ids(backend: &Vulkan) -> Vec<DeviceId> {
    let found = backend.discover();
    let ids: Vec<DeviceId> = found
        .iter()
        .filter_map(|found| match found {
            Found::Here(info) if info.id.kind() == DeviceKind::Vulkan => Some(info.id),
            _ => None,
        })
        .collect();
    assert!(!ids.is_empty(), "{found:?}");
    ids
}

/// Waits until nothing is taken of any device: memory is let go of when the last event of its use has been seen, a moment after
/// the last handle.
pub(crate) fn assert_given_back(devices: &Registry, what: &str) {
    let until = Instant::now() + DEADLINE;
    for device in devices.opened() {
        while device.ledger().charged() > 0 {
            let (taken, id) = (device.ledger().charged(), device.id());
            assert!(Instant::now() < until, "{what}: {taken} bytes of {id} are taken");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
