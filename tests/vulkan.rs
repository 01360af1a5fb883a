//! The Vulkan backend over the drivers that the machine has, software drivers included.
#![cfg(feature = "vulkan")]

use std::sync::Arc;

use tensor_offload::DeviceId;
use tensor_offload::backend::{Backend, Device, Found, Vulkan, conformance};
use tensor_offload::device::DeviceKind;

/// The devices that there are.
fn devices(backend: &Vulkan) -> Vec<Arc<dyn Device>> {
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

#[test]
fn vulkan_conforms() {
    let backend = Vulkan::new().software(true);
    let cpu = backend.open(DeviceId::CPU).unwrap();
    for device in devices(&backend) {
        eprintln!("{:?}", device.info());
        conformance::check(&*device, &*cpu);
    }
}
