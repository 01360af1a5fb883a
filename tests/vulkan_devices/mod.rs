//! The Vulkan devices that a test runs over: those that the machine has, software drivers included, through the probe.
#![allow(dead_code, reason = "each test file uses its part")]

pub(crate) mod caller;

use std::sync::Arc;
use std::time::{Duration, Instant};

use tensor_offload::backend::{Backend, Device, Found, Host, Vulkan};
use tensor_offload::device::DeviceKind;
use tensor_offload::{ByteSize, DeviceId, Registry};
use vulkan_probe::Session;

/// How long a test waits for anything.
pub(crate) const DEADLINE: Duration = Duration::from_secs(20);

/// The drivers, for one test at a time.
pub(crate) struct Drivers(Session);

impl std::ops::Deref for Drivers {
    type Target = Session;

    fn deref(&self) -> &Session {
        &self.0
    }
}

/// Begins a test. At its end the validation layer, where there is one, must have said nothing, and nothing must be left.
pub(crate) fn drivers() -> Drivers {
    Drivers(vulkan_probe::session())
}

impl Drop for Drivers {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        self.assert_silent();
        self.assert_nothing_left();
    }
}

impl Drivers {
    /// The backend, software drivers included.
    pub(crate) fn vulkan(&self) -> Vulkan {
        Vulkan::new().library(self.library()).software(true)
    }

    /// Backends by the kind of host memory that devices copy from and to.
    pub(crate) fn hosts(&self) -> [(&'static str, Vulkan); 3] {
        [
            ("imported pages", self.vulkan()),
            ("memory of a driver", self.vulkan().host_imports(false)),
            ("memory that is not pinned", self.vulkan().pinned_cap(ByteSize(0))),
        ]
    }

    /// The devices and this host.
    pub(crate) fn registry(&self) -> Registry {
        registry(self.vulkan())
    }

    /// Fails with the layer's messages, if it gave any.
    pub(crate) fn assert_silent(&self) {
        assert!(self.messages().is_empty(), "the validation layer says: {:#?}", self.messages());
    }

    /// Waits until no object is alive. The last handle of a device goes a moment after the device.
    pub(crate) fn assert_nothing_left(&self) {
        let until = Instant::now() + DEADLINE;
        while !self.alive().is_empty() {
            assert!(Instant::now() < until, "left alive: {:?}", self.alive());
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// The devices of `backend` and this host.
pub(crate) fn registry(backend: Vulkan) -> Registry {
    Registry::new([Arc::new(backend) as Arc<dyn Backend>, Arc::new(Host::new())])
}

/// The devices that there are, open.
pub(crate) fn open(backend: &Vulkan) -> Vec<Arc<dyn Device>> {
    let found = backend.discover();
    let ids: Vec<DeviceId> = found
        .iter()
        .filter_map(|found| match found {
            Found::Here(info) if info.id.kind() == DeviceKind::Vulkan => Some(info.id),
            _ => None,
        })
        .collect();
    assert!(!ids.is_empty(), "{found:?}");
    ids.into_iter().map(|id| backend.open(id).unwrap()).collect()
}

/// Waits until nothing is taken of any device: memory is let go of when the last event of its use has been seen, a moment after
/// the last handle.
pub(crate) fn assert_given_back(devices: &Registry, what: &str) {
    devices.opened().iter().for_each(|device| assert_comes_to_nothing(&**device, what));
}

pub(crate) fn assert_comes_to_nothing(device: &dyn Device, what: &str) {
    let until = Instant::now() + DEADLINE;
    while device.ledger().charged() > 0 {
        let (taken, id) = (device.ledger().charged(), device.id());
        assert!(Instant::now() < until, "{what}: {taken} bytes of {id} are taken");
        std::thread::sleep(Duration::from_millis(1));
    }
}
