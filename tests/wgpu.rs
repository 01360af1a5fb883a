//! Devices that wgpu and the library share, over the drivers that the machine has, through the probe: the conformance suite, models,
//! and a shader over every tensor that is streamed. `scripts/vulkan-check` runs it over software drivers, under the validation layer.
#![cfg(feature = "wgpu")]
#![expect(unsafe_code, reason = "the library's buffers are lent to wgpu")]

#[path = "../examples/support/shader.rs"]
mod shader;
mod support;
mod vulkan_devices;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use shader::{Sums, sums_of};
use support::whole_path::{Source, load, source, whole_path};
use tensor_offload::backend::{Host, MemoryKind, Role, conformance};
use tensor_offload::vulkan::ash::{self, vk};
use tensor_offload::wgpu::{self, SharedDevice, wgpu as gpu};
use tensor_offload::{DeviceId, ErrorKind, Model, Registry, Streamer};
use vulkan_devices::{Drivers, assert_given_back, drivers};

const COMPUTE: DeviceId = DeviceId::vulkan(0);

/// wgpu, over the probe.
fn instance(drivers: &Drivers) -> gpu::Instance {
    let flags = gpu::InstanceFlags::empty();
    // SAFETY: the library is Vulkan's, and what the structures point to outlives the calls. wgpu destroys the instance.
    unsafe {
        let entry = ash::Entry::load_from(drivers.library()).unwrap();
        let version = vk::API_VERSION_1_3;
        let extensions = gpu::hal::vulkan::Instance::desired_extensions(&entry, version, flags).unwrap();
        let names: Vec<_> = extensions.iter().map(|name| name.as_ptr()).collect();
        let application = vk::ApplicationInfo::default().api_version(version);
        let create = vk::InstanceCreateInfo::default().application_info(&application).enabled_extension_names(&names);
        let raw = entry.create_instance(&create, None).unwrap();
        let thresholds = gpu::MemoryBudgetThresholds::default();
        let instance = gpu::hal::vulkan::Instance::from_raw(
            entry, raw, version, 0, None, extensions, flags, thresholds, false, None,
        );
        gpu::Instance::from_hal::<gpu::hal::api::Vulkan>(instance.unwrap())
    }
}

/// Every adapter, open for both.
fn opened(drivers: &Drivers) -> Vec<SharedDevice> {
    let adapters = wgpu::adapters(&instance(drivers));
    assert!(!adapters.is_empty(), "TENSOR_OFFLOAD_VULKAN_SOFTWARE=1 admits software drivers");
    adapters.iter().map(open).collect()
}

fn open(adapter: &gpu::Adapter) -> SharedDevice {
    let descriptor = gpu::DeviceDescriptor { required_limits: adapter.limits(), ..Default::default() };
    // SAFETY: nothing is presented.
    unsafe { wgpu::request_device(adapter, &descriptor).unwrap() }
}

fn registry(shared: &SharedDevice) -> Registry {
    Registry::new([shared.backend(), Arc::new(Host::new())])
}

#[test]
fn vulkan_a_device_shared_with_wgpu_conforms() {
    let drivers = drivers();
    for shared in opened(&drivers) {
        let backend = shared.backend();
        let (device, cpu) = (backend.open(COMPUTE).unwrap(), backend.open(DeviceId::CPU).unwrap());
        conformance::check(&*device, &*cpu);
    }
}

#[test]
fn vulkan_models_arrive_whole_on_a_device_shared_with_wgpu() {
    let (source, drivers) = (source(), drivers());
    for shared in opened(&drivers) {
        let devices = registry(&shared);
        for allocation in ["vulkan:0,60kb;cpu,*", "vulkan:0,40kb;disk,100kb;cpu,*", "vulkan:0,100%"] {
            whole_path(&devices, &source, COMPUTE, allocation, 1).unwrap();
            assert_given_back(&devices, allocation);
        }
    }
}

/// Streams two passes, with a shader over every tensor, and compares its sums with those of the merge on the host.
fn summed(shared: &SharedDevice, model: &Arc<Model>, source: &Source) {
    let mut sums = Sums::new(shared, 2 * model.layout().tensors().len());
    let mut streamer = Streamer::new(model).unwrap();
    let mut wanted = Vec::new();
    for _ in 0..2 {
        for layer in model.layout().layer_ids() {
            let guard = streamer.layer(layer).unwrap();
            let mut encoder = shared.device().create_command_encoder(&gpu::CommandEncoderDescriptor::default());
            for tensor in guard.tensors() {
                // SAFETY: the shader only reads, and is submitted while the guard lives.
                let buffer = unsafe { shared.buffer(&tensor) }.unwrap();
                assert_eq!(
                    (buffer.bytes(), buffer.start() - buffer.ahead()),
                    (tensor.size() as u64, buffer.binding().offset)
                );
                sums.record(shared, &buffer, &mut encoder);
                let stored = source.weights.checkpoint().find(tensor.name()).unwrap();
                wanted.push((tensor.name().to_owned(), sums_of(buffer.ahead(), &source.merged[stored.index()])));
            }
            shared.submit(&**streamer.compute(), [encoder.finish()]).unwrap();
        }
    }
    for (found, (name, want)) in sums.finish(shared).unwrap().iter().zip(&wanted) {
        assert_eq!(found, want, "{name}");
    }
}

/// The second time another thread submits by itself meanwhile: the layer checks that no two use the queue at one time.
#[test]
fn vulkan_shaders_of_wgpu_see_every_layer() {
    let (source, drivers) = (source(), drivers());
    for shared in opened(&drivers) {
        let devices = registry(&shared);
        for (allocation, depth) in [("vulkan:0,60kb;cpu,*", 0), ("vulkan:0,20kb;cpu,*", 2), ("vulkan:0,100%", 1)] {
            let model = Arc::new(load(&devices, &source, COMPUTE, allocation, depth).unwrap());
            summed(&shared, &model, &source);
            let done = AtomicBool::new(false);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    let usage = gpu::BufferUsages::COPY_DST;
                    let own = gpu::BufferDescriptor { label: None, size: 64, usage, mapped_at_creation: false };
                    let own = shared.device().create_buffer(&own);
                    while !done.load(Ordering::SeqCst) {
                        shared.queue().write_buffer(&own, 0, &[1; 64]);
                        shared.queue().submit([]);
                        shared.device().poll(gpu::PollType::Poll).unwrap();
                    }
                });
                summed(&shared, &model, &source);
                done.store(true, Ordering::SeqCst);
            });
            drop(model);
            shared.device().poll(gpu::PollType::wait_indefinitely()).unwrap();
            assert_given_back(&devices, allocation);
        }
    }
}

/// Whichever side goes first, the other works on, and the last closes the device.
#[test]
fn vulkan_either_side_of_a_shared_device_outlives_the_other() {
    let (source, drivers) = (source(), drivers());
    for adapter in wgpu::adapters(&instance(&drivers)) {
        let shared = open(&adapter);
        let devices = registry(&shared);
        drop((shared, adapter));
        whole_path(&devices, &source, COMPUTE, "vulkan:0,60kb;cpu,*", 1).unwrap();
        assert!(drivers.alive().contains(&"1 device".to_owned()), "{:?}", drivers.alive());
    }
    drivers.assert_nothing_left();
    for adapter in wgpu::adapters(&instance(&drivers)) {
        let shared = open(&adapter);
        let devices = registry(&shared);
        let model = Arc::new(load(&devices, &source, COMPUTE, "vulkan:0,100%", 1).unwrap());
        let tensor = model.tensor("model.norm.weight").unwrap();
        // SAFETY: the shader only reads, and what it reads is kept by the buffer.
        let buffer = unsafe { shared.buffer(&tensor) }.unwrap();
        let want = sums_of(buffer.ahead(), &model.to_bytes("model.norm.weight"));
        drop((model, devices));
        let mut sums = Sums::new(&shared, 1);
        let mut encoder = shared.device().create_command_encoder(&gpu::CommandEncoderDescriptor::default());
        sums.record(&shared, &buffer, &mut encoder);
        shared.queue().submit([encoder.finish()]);
        assert_eq!(sums.finish(&shared).unwrap(), [want]);
    }
}

trait Bytes {
    fn to_bytes(&self, name: &str) -> Vec<u8>;
}

impl Bytes for Model {
    fn to_bytes(&self, name: &str) -> Vec<u8> {
        let mut bytes = vec![0; self.tensor(name).unwrap().size()];
        self.read(name, &mut bytes).unwrap();
        bytes
    }
}

#[test]
fn vulkan_what_wgpu_cannot_share_is_refused() {
    let (source, drivers) = (source(), drivers());
    let adapters = wgpu::adapters(&instance(&drivers));
    let adapter = &adapters[0];
    let required_features = gpu::Features::all() - adapter.features();
    let descriptor = gpu::DeviceDescriptor { required_features, ..Default::default() };
    // SAFETY: nothing is presented.
    let error = unsafe { wgpu::request_device(adapter, &descriptor) }.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DeviceAbsent, "{error}");
    // More than the adapter has, which wgpu does not check of a device that it is given.
    let allowed = adapter.limits();
    let beyond = allowed.max_compute_workgroup_size_x + 1;
    let required_limits = gpu::Limits { max_compute_workgroup_size_x: beyond, ..allowed };
    let descriptor = gpu::DeviceDescriptor { required_limits, ..Default::default() };
    // SAFETY: nothing is presented.
    let error = unsafe { wgpu::request_device(adapter, &descriptor) }.unwrap_err();
    assert!(error.to_string().contains(&format!("max_compute_workgroup_size_x {beyond}")), "{error}");
    // Limits of bindings that some tensors exceed.
    let required_limits = gpu::Limits { max_storage_buffer_binding_size: 1024, ..adapter.limits() };
    let descriptor = gpu::DeviceDescriptor { required_limits, ..Default::default() };
    // SAFETY: nothing is presented.
    let (shared, other) = unsafe { (wgpu::request_device(adapter, &descriptor).unwrap(), open(adapter)) };
    let devices = registry(&shared);
    let model = Arc::new(load(&devices, &source, COMPUTE, "vulkan:0,50%;cpu,*", 1).unwrap());
    let tensors: Vec<_> = model.layout().tensors().iter().filter_map(|info| model.tensor(&info.name)).collect();
    // SAFETY: nothing is submitted.
    let here = |tensor| unsafe { shared.buffer(tensor) };
    // SAFETY: as above.
    let there = |tensor| unsafe { other.buffer(tensor) };
    let kinds: Vec<_> = tensors.iter().map(|tensor| here(tensor).err().map(|error| error.kind())).collect();
    for (tensor, kind) in tensors.iter().zip(&kinds) {
        let want = match (tensor.device() == COMPUTE, tensor.size() > 1024) {
            (false, _) => Some(ErrorKind::Mismatch),
            (true, true) => Some(ErrorKind::Invalid),
            (true, false) => None,
        };
        assert_eq!(*kind, want, "{} of {} bytes", tensor.name(), tensor.size());
        assert_eq!(there(tensor).unwrap_err().kind(), ErrorKind::Mismatch, "of another device");
    }
    for want in [None, Some(ErrorKind::Mismatch), Some(ErrorKind::Invalid)] {
        assert!(kinds.contains(&want), "{want:?} was not tried");
    }
    let cpu = devices.device(DeviceId::CPU).unwrap();
    let strange =
        [cpu.stream(Role::Compute).unwrap(), other.backend().open(COMPUTE).unwrap().stream(Role::Compute).unwrap()];
    for stream in strange {
        let error = shared.submit(&*stream, []).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    }
    drop(cpu.alloc(8, MemoryKind::Pinned).unwrap());
}
