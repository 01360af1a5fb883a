//! A program with a Vulkan device of its own: the instance, the device and its queues, and work that it submits itself.
#![expect(unsafe_code, reason = "raw handles, as callers of the library have them")]

use std::ffi::CStr;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tensor_offload::vulkan::ash::{self, ext, vk};
use tensor_offload::vulkan::{AdoptedDevice, AdoptedQueue, EnabledFeatures, Place, QueueLock, SemaphorePoint};

/// The bytes of the caller's own buffer.
const BYTES: u64 = 1 << 20;

/// An open device of the caller. Dropping it closes it.
pub(crate) struct Caller {
    pub(crate) instance: ash::Instance,
    pub(crate) physical: vk::PhysicalDevice,
    pub(crate) device: ash::Device,
    /// The queues by family and handle, the first of which the caller submits to.
    pub(crate) queues: Vec<(u32, vk::Queue)>,
    /// The extensions that the library uses, as far as the device has them.
    pub(crate) extensions: Vec<&'static CStr>,
    pub(crate) lock: Arc<Counted>,
    _entry: ash::Entry,
}

/// A lock that counts how often the library takes it.
#[derive(Default)]
pub(crate) struct Counted {
    lock: Mutex<()>,
    taken: AtomicU64,
}

impl Counted {
    pub(crate) fn taken(&self) -> u64 {
        self.taken.load(Ordering::SeqCst)
    }

    pub(crate) fn hold(&self) -> MutexGuard<'_, ()> {
        self.lock.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl QueueLock for Counted {
    fn locked(&self, submit: &mut dyn FnMut()) {
        let _held = self.hold();
        self.taken.fetch_add(1, Ordering::SeqCst);
        submit();
    }
}

pub(crate) const ENABLED: EnabledFeatures = EnabledFeatures { timeline_semaphore: true, synchronization2: true };

/// A device of each driver, with all queues of the first family that computes.
pub(crate) fn callers(library: &Path) -> Vec<Caller> {
    let count = {
        let (_entry, instance) = instance(library);
        // SAFETY: the instance is alive, and has no devices.
        unsafe {
            let count = instance.enumerate_physical_devices().unwrap().len();
            instance.destroy_instance(None);
            count
        }
    };
    (0..count).map(|number| Caller::open(library, number)).collect()
}

fn instance(library: &Path) -> (ash::Entry, ash::Instance) {
    // SAFETY: the library is Vulkan's, and what the structures point to outlives the calls.
    unsafe {
        let entry = ash::Entry::load_from(library).unwrap();
        let application = vk::ApplicationInfo::default().api_version(vk::API_VERSION_1_3);
        let create = vk::InstanceCreateInfo::default().application_info(&application);
        let instance = entry.create_instance(&create, None).unwrap();
        (entry, instance)
    }
}

impl Caller {
    fn open(library: &Path, number: usize) -> Caller {
        let (entry, instance) = instance(library);
        // SAFETY: the handles are the instance's; the device has the features, the extensions and the queues.
        unsafe {
            let physical = instance.enumerate_physical_devices().unwrap()[number];
            let known = instance.enumerate_device_extension_properties(physical).unwrap();
            let has = |name: &&CStr| known.iter().any(|known| known.extension_name_as_c_str() == Ok(name));
            let wanted = [ext::memory_budget::NAME, ext::external_memory_host::NAME];
            let extensions: Vec<_> = wanted.into_iter().filter(has).collect();
            let families = instance.get_physical_device_queue_family_properties(physical);
            let family =
                families.iter().position(|family| family.queue_flags.contains(vk::QueueFlags::COMPUTE)).unwrap();
            let count = families[family].queue_count;
            let priorities = vec![1.0; count as usize];
            let queues =
                [vk::DeviceQueueCreateInfo::default().queue_family_index(family as u32).queue_priorities(&priorities)];
            let names: Vec<_> = extensions.iter().map(|name| name.as_ptr()).collect();
            let mut timelines = vk::PhysicalDeviceTimelineSemaphoreFeatures::default().timeline_semaphore(true);
            let mut second = vk::PhysicalDeviceSynchronization2Features::default().synchronization2(true);
            let create = vk::DeviceCreateInfo::default()
                .queue_create_infos(&queues)
                .enabled_extension_names(&names)
                .push_next(&mut timelines)
                .push_next(&mut second);
            let device = instance.create_device(physical, &create, None).unwrap();
            let queues =
                (0..count).map(|number| (family as u32, device.get_device_queue(family as u32, number))).collect();
            Caller { instance, physical, device, queues, extensions, lock: Arc::default(), _entry: entry }
        }
    }

    /// The device for the library, with the caller's first queue, which both use, and further ones for the library alone.
    pub(crate) fn shared(self: &Arc<Self>) -> AdoptedDevice {
        let (family, queue) = self.queues[0];
        let lock = Arc::clone(&self.lock) as Arc<dyn QueueLock>;
        let device = self.with(ENABLED, Arc::clone(self)).queue(AdoptedQueue::shared(queue, family, lock));
        self.queues[1..].iter().fold(device, |device, &(family, queue)| device.queue(AdoptedQueue::own(queue, family)))
    }

    /// The device without queues, kept by `keep`.
    pub(crate) fn with(&self, enabled: EnabledFeatures, keep: impl std::any::Any + Send + Sync) -> AdoptedDevice {
        let handles = (self.instance.clone(), self.device.clone());
        AdoptedDevice::new(handles.0, self.physical, handles.1, enabled, keep)
            .extensions(self.extensions.iter().copied())
    }

    /// Submits nothing, many times.
    pub(crate) fn submit_nothing(&self, times: usize) {
        for _ in 0..times {
            let _held = self.lock.hold();
            // SAFETY: the lock is held.
            unsafe {
                self.device.queue_submit2(self.queues[0].1, &[vk::SubmitInfo2::default()], vk::Fence::null()).unwrap();
            };
        }
    }
}

impl Drop for Caller {
    fn drop(&mut self) {
        // SAFETY: what was made on the device is gone, and the last use was before.
        unsafe {
            self.device.destroy_device(None);
            self.instance.destroy_instance(None);
        }
    }
}

/// Work of the caller's: copies of what is in the library's memory into a buffer of its own.
pub(crate) struct Work {
    caller: Arc<Caller>,
    buffer: vk::Buffer,
    memory: vk::DeviceMemory,
    mapped: *const u8,
    pool: vk::CommandPool,
    pub(crate) semaphore: vk::Semaphore,
    pub(crate) value: u64,
    /// The bytes that were copied.
    at: u64,
}

// SAFETY: the memory is read by its owner alone.
unsafe impl Send for Work {}
// SAFETY: as above; nothing is changed through a shared reference.
unsafe impl Sync for Work {}

impl Work {
    pub(crate) fn new(caller: &Arc<Caller>) -> Work {
        let device = &caller.device;
        // SAFETY: the device is open; the memory is as large as the buffer needs, and can be mapped.
        unsafe {
            let create = vk::BufferCreateInfo::default().size(BYTES).usage(vk::BufferUsageFlags::TRANSFER_DST);
            let buffer = device.create_buffer(&create, None).unwrap();
            let needs = device.get_buffer_memory_requirements(buffer);
            let kinds = caller.instance.get_physical_device_memory_properties(caller.physical);
            let wanted = vk::MemoryPropertyFlags::HOST_VISIBLE | vk::MemoryPropertyFlags::HOST_COHERENT;
            let kind = (0..kinds.memory_type_count).find(|&kind| {
                needs.memory_type_bits & (1 << kind) != 0
                    && kinds.memory_types[kind as usize].property_flags.contains(wanted)
            });
            let allocate =
                vk::MemoryAllocateInfo::default().allocation_size(needs.size).memory_type_index(kind.unwrap());
            let memory = device.allocate_memory(&allocate, None).unwrap();
            device.bind_buffer_memory(buffer, memory, 0).unwrap();
            let mapped = device.map_memory(memory, 0, vk::WHOLE_SIZE, vk::MemoryMapFlags::empty()).unwrap();
            let create = vk::CommandPoolCreateInfo::default().queue_family_index(caller.queues[0].0);
            let pool = device.create_command_pool(&create, None).unwrap();
            let mut kind = vk::SemaphoreTypeCreateInfo::default().semaphore_type(vk::SemaphoreType::TIMELINE);
            let semaphore =
                device.create_semaphore(&vk::SemaphoreCreateInfo::default().push_next(&mut kind), None).unwrap();
            Work { caller: Arc::clone(caller), buffer, memory, mapped: mapped.cast(), pool, semaphore, value: 0, at: 0 }
        }
    }

    /// Submits copies of these places to the buffer, behind all before, after the point `after`, if there is one. Raises the
    /// semaphore.
    pub(crate) fn submit(&mut self, places: &[Place], after: Option<&SemaphorePoint>) {
        let device = &self.caller.device;
        self.value += 1;
        let point = |semaphore, value| {
            vk::SemaphoreSubmitInfo::default()
                .semaphore(semaphore)
                .value(value)
                .stage_mask(vk::PipelineStageFlags2::ALL_COMMANDS)
        };
        let before: Vec<_> = after.into_iter().map(|after| point(after.semaphore(), after.value())).collect();
        let raised = [point(self.semaphore, self.value)];
        // SAFETY: the places are in buffers that live until the value is reached; the queue's lock is held.
        unsafe {
            let allocate = vk::CommandBufferAllocateInfo::default().command_pool(self.pool).command_buffer_count(1);
            let commands = device.allocate_command_buffers(&allocate).unwrap()[0];
            device.begin_command_buffer(commands, &vk::CommandBufferBeginInfo::default()).unwrap();
            for place in places {
                assert_eq!(place.device, device.handle());
                let copy = vk::BufferCopy { src_offset: place.offset, dst_offset: self.at, size: place.size };
                device.cmd_copy_buffer(commands, place.buffer, self.buffer, &[copy]);
                self.at += place.size;
            }
            assert!(self.at <= BYTES);
            let barriers = [vk::MemoryBarrier2::default()
                .src_stage_mask(vk::PipelineStageFlags2::ALL_TRANSFER)
                .src_access_mask(vk::AccessFlags2::TRANSFER_WRITE)
                .dst_stage_mask(vk::PipelineStageFlags2::HOST)
                .dst_access_mask(vk::AccessFlags2::HOST_READ)];
            device.cmd_pipeline_barrier2(commands, &vk::DependencyInfo::default().memory_barriers(&barriers));
            device.end_command_buffer(commands).unwrap();
            let commands = [vk::CommandBufferSubmitInfo::default().command_buffer(commands)];
            let submission = vk::SubmitInfo2::default()
                .wait_semaphore_infos(&before)
                .command_buffer_infos(&commands)
                .signal_semaphore_infos(&raised);
            let _held = self.caller.lock.hold();
            device.queue_submit2(self.caller.queues[0].1, &[submission], vk::Fence::null()).unwrap();
        }
    }

    /// Raises the semaphore from the host, in place of a submission.
    pub(crate) fn raise(&self, value: u64) {
        let raise = vk::SemaphoreSignalInfo::default().semaphore(self.semaphore).value(value);
        // SAFETY: the semaphore is alive, and values grow.
        unsafe { self.caller.device.signal_semaphore(&raise).unwrap() };
    }

    /// Waits for the last submission, and returns all that was copied.
    pub(crate) fn copied(&self) -> Vec<u8> {
        let (semaphores, values) = ([self.semaphore], [self.value]);
        let wait = vk::SemaphoreWaitInfo::default().semaphores(&semaphores).values(&values);
        // SAFETY: the semaphore is alive; the copies are done, and so many bytes are mapped.
        unsafe {
            self.caller.device.wait_semaphores(&wait, 20_000_000_000).unwrap();
            std::slice::from_raw_parts(self.mapped, self.at as usize).to_vec()
        }
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        let device = &self.caller.device;
        // SAFETY: the last submission was waited for.
        unsafe {
            device.destroy_command_pool(self.pool, None);
            device.destroy_semaphore(self.semaphore, None);
            device.destroy_buffer(self.buffer, None);
            device.free_memory(self.memory, None);
        }
    }
}
