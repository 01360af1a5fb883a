//! Devices that are opened for wgpu and the library together.

use std::sync::{Arc, Mutex};

use ash::{ext, vk};
use wgpu::hal::api;

use super::{SharedDevice, locked};
use crate::backend::Vulkan;
use crate::backend::process::Process;
use crate::backend::vulkan::{self, AdoptedDevice, AdoptedQueue, EnabledFeatures};
use crate::device::DeviceId;
use crate::error::{Error, Result};

/// A device that wgpu and the library hold. Whoever is last closes it.
struct Opened {
    device: ash::Device,
    process: Process,
    /// It keeps the instance.
    _adapter: wgpu::Adapter,
}

impl Drop for Opened {
    fn drop(&mut self) {
        locked::forget(self.device.handle());
        if self.process.is_current() {
            vulkan::unless_ending(|| {
                // SAFETY: wgpu and the library have both destroyed what they made, and do not use the device any more.
                unsafe { self.device.destroy_device(None) }
            });
        }
    }
}

/// Whether the library can use an adapter's device.
///
/// # Errors
/// The reason why not.
pub(super) fn suits(adapter: &wgpu::Adapter, software: bool) -> Result<vulkan::Suited, String> {
    // SAFETY: nothing is done to the adapter.
    let raw = unsafe { adapter.as_hal::<api::Vulkan>() };
    let raw = raw.ok_or_else(|| format!("{} is not of wgpu's Vulkan backend", adapter.get_info().name))?;
    let instance = raw.shared_instance();
    if instance.instance_api_version() < vk::API_VERSION_1_1 {
        return Err("Vulkan's library is of version 1.0; at least 1.1 is needed".to_owned());
    }
    let instance = instance.raw_instance().clone();
    // SAFETY: the adapter keeps its instance, which wgpu makes for Vulkan 1.3 with any library that knows later versions than 1.0.
    unsafe { vulkan::suits(instance, raw.raw_physical_device(), adapter.clone(), software) }
}

/// Opens a device. Wants of the caller what [`super::request_device`] does.
pub(super) fn open(adapter: &wgpu::Adapter, descriptor: &wgpu::DeviceDescriptor<'_>) -> Result<SharedDevice> {
    let absent = |why: String| Error::DeviceAbsent { device: DeviceId::vulkan(0), why };
    let suited = suits(adapter, true).map_err(absent)?;
    let refused = |error: &dyn std::fmt::Display| absent(format!("wgpu: {error}"));
    let features = descriptor.required_features;
    let missing = features - adapter.features();
    if !missing.is_empty() {
        return Err(absent(format!("wgpu: the adapter lacks {missing:?}")));
    }
    // wgpu does not check a device that it is given.
    let experimental = features & wgpu::Features::all_experimental_mask();
    if !experimental.is_empty() && !descriptor.experimental_features.is_enabled() {
        return Err(absent(format!("wgpu: {experimental:?} need `experimental_features`")));
    }
    let mut beyond = Vec::new();
    descriptor.required_limits.check_limits_with_fail_fn(&adapter.limits(), false, |name, wanted, allowed| {
        beyond.push(format!("{name} {wanted} where the adapter has {allowed}"));
    });
    if !beyond.is_empty() {
        return Err(absent(format!("wgpu: {}", beyond.join(", "))));
    }
    // SAFETY: nothing is done to the adapter but to open a device of it.
    let raw = unsafe { adapter.as_hal::<api::Vulkan>() };
    let raw = raw.ok_or_else(|| absent("the adapter is not of wgpu's Vulkan backend".to_owned()))?;
    let instance = raw.shared_instance().raw_instance();
    let mut extensions = raw.required_device_extensions(features);
    for wanted in [ext::memory_budget::NAME, ext::external_memory_host::NAME] {
        let has = raw.physical_device_capabilities().supports_extension(wanted);
        if has && !extensions.contains(&wanted) {
            extensions.push(wanted);
        }
    }
    let mut enabled = raw.physical_device_features(&extensions, features);
    // The feature's own structure: wgpu gives others that the one of all features of Vulkan 1.3 has in it.
    let mut synchronization2 = vk::PhysicalDeviceSynchronization2Features::default().synchronization2(true);
    let names: Vec<_> = extensions.iter().map(|name| name.as_ptr()).collect();
    let queues = suited.queues();
    let create = vk::DeviceCreateInfo::default()
        .queue_create_infos(queues)
        .enabled_extension_names(&names)
        .push_next(&mut synchronization2);
    let create = enabled.add_to_device_create(create);
    // SAFETY: what the structures point to outlives the call; the adapter has the features and the extensions.
    let device = unsafe { instance.create_device(raw.raw_physical_device(), &create, None) }
        .map_err(|code| absent(format!("vkCreateDevice: {code:?} ({code})")))?;
    let opened = Arc::new(Opened { device, process: Process::current(), _adapter: adapter.clone() });
    let lock = Arc::new(Mutex::new(()));
    let timeline_semaphore = true;
    let mut ours = AdoptedDevice::new(
        instance.clone(),
        raw.raw_physical_device(),
        opened.device.clone(),
        EnabledFeatures { timeline_semaphore, synchronization2: true },
        Arc::clone(&opened),
    )
    .extensions(extensions.iter().copied());
    for (family, number) in suited.numbers() {
        // SAFETY: the device was created with this queue.
        let queue = unsafe { opened.device.get_device_queue(family, number) };
        let shared = (family, number) == (0, 0);
        ours = ours.queue(match shared {
            true => AdoptedQueue::shared(queue, family, Arc::clone(&lock) as _),
            false => AdoptedQueue::own(queue, family),
        });
    }
    // SAFETY: the device was created with it.
    let queue = unsafe { opened.device.get_device_queue(0, 0) };
    // SAFETY: the device lives as long as `opened`, and was created with these features, extensions and queues. wgpu uses its queue by
    // the calls of `locked`, under the lock.
    let backend = unsafe { Vulkan::adopt([ours])? };
    // SAFETY: the device is open, and the queue is its.
    let calls = unsafe { locked::device(instance, &opened.device, queue, &lock) };
    let keep = Arc::clone(&opened);
    // SAFETY: the device is of this adapter, was created with these extensions and features, and lives until wgpu drops `keep`.
    let (device, queue) = unsafe {
        let open = raw.device_from_raw(
            calls,
            Some(Box::new(move || drop(keep))),
            &extensions,
            features,
            &descriptor.required_limits,
            &descriptor.memory_hints,
            0,
            0,
        );
        let open = open.map_err(|error| refused(&error))?;
        adapter.create_device_from_hal::<api::Vulkan>(open, descriptor).map_err(|error| refused(&error))?
    };
    Ok(SharedDevice { device, queue, backend: Arc::new(backend), lock })
}
