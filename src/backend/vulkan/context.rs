//! An open device of the driver: its calls, its queues, and whether it is lost.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use ash::{ext, vk};

use super::adopted::Adopted;
use super::exit;
use super::instance::{Instance, Limits, Physical, words};
use super::pipelines::Pipelines;
use super::queues::{Choice, Queues};
use crate::backend::reaper;
use crate::device::DeviceId;
use crate::error::{Error, Result};

/// A device that was opened. All that belongs to it holds it.
pub(super) struct Context {
    id: DeviceId,
    device: ash::Device,
    queues: Queues,
    pub(super) physical: Physical,
    /// The calls that import host memory.
    imports: Option<ext::external_memory_host::Device>,
    pipelines: Pipelines,
    lost: OnceLock<String>,
    /// The allocations that there are.
    allocations: AtomicU32,
    /// The bytes of host memory that the device knows, for each heap.
    host_bytes: [AtomicU64; vk::MAX_MEMORY_HEAPS],
    instance: Arc<Instance>,
}

/// The result of a call, and the call's name if it failed.
pub(super) type Outcome<T = ()> = std::result::Result<T, (&'static str, vk::Result)>;

/// Names the call of a result.
pub(super) trait Named<T> {
    fn of(self, call: &'static str) -> Outcome<T>;
}

impl<T> Named<T> for std::result::Result<T, vk::Result> {
    fn of(self, call: &'static str) -> Outcome<T> {
        self.map_err(|code| (call, code))
    }
}

impl Context {
    /// Opens a device, or takes the one that the caller has opened.
    pub(super) fn open(
        id: DeviceId,
        physical: &Physical,
        instance: &Arc<Instance>,
        adopted: Option<&Adopted>,
    ) -> Result<Context> {
        instance.process.check()?;
        let (device, queues) = match adopted {
            Some(adopted) => adopted.device_and_queues(physical)?,
            None => Context::create(id, physical, instance)?,
        };
        let imports = physical.limits.import.map(|_| ext::external_memory_host::Device::new(instance.raw(), &device));
        let (physical, lost, instance) = (physical.clone(), OnceLock::new(), Arc::clone(instance));
        let (allocations, host_bytes) = (AtomicU32::new(0), std::array::from_fn(|_| AtomicU64::new(0)));
        let pipelines = Pipelines::default();
        Ok(Context { id, device, queues, physical, imports, pipelines, lost, allocations, host_bytes, instance })
    }

    fn create(id: DeviceId, physical: &Physical, instance: &Instance) -> Result<(ash::Device, Queues)> {
        let absent = |why: String| Error::DeviceAbsent { device: id, why };
        let raw = instance.raw();
        // SAFETY: the handle is the instance's.
        let families = unsafe { raw.get_physical_device_queue_family_properties(physical.handle) };
        let choice = Choice::among(&families, physical.unified);
        let choice = choice.ok_or_else(|| absent("it has no queue that computes".to_owned()))?;
        let queues = choice.create_infos();
        let names: Vec<_> = physical.extensions().into_iter().map(std::ffi::CStr::as_ptr).collect();
        let mut vulkan12 = vk::PhysicalDeviceVulkan12Features::default().timeline_semaphore(true);
        let mut vulkan13 = vk::PhysicalDeviceVulkan13Features::default().synchronization2(true);
        let create = vk::DeviceCreateInfo::default()
            .queue_create_infos(&queues)
            .enabled_extension_names(&names)
            .push_next(&mut vulkan12)
            .push_next(&mut vulkan13);
        let _entered = exit::enter().ok_or_else(|| absent("the process is ending".to_owned()))?;
        // SAFETY: what the structures point to outlives the call; the device has the features and the extensions.
        let device = unsafe { raw.create_device(physical.handle, &create, None) }
            .map_err(|code| absent(format!("vkCreateDevice: {}", words(code))))?;
        // Once more: opening a device may load libraries that were not there before.
        exit::watch();
        let queues = choice.queues(&device);
        Ok((device, queues))
    }

    /// Whether the caller has opened it.
    pub(super) fn is_of_caller(&self) -> bool {
        self.instance.is_of_caller()
    }

    pub(super) fn handle(&self) -> vk::Device {
        self.device.handle()
    }

    pub(super) fn id(&self) -> DeviceId {
        self.id
    }

    pub(super) fn queues(&self) -> &Queues {
        &self.queues
    }

    pub(super) fn limits(&self) -> Limits {
        self.physical.limits
    }

    pub(super) fn imports(&self) -> Option<&ext::external_memory_host::Device> {
        self.imports.as_ref()
    }

    pub(super) fn pipelines(&self) -> &Pipelines {
        &self.pipelines
    }

    /// The bytes that the driver leaves to this process. `None` if it does not tell.
    pub(super) fn free(&self) -> Option<u64> {
        self.instance.free(&self.physical)
    }

    /// Allocates memory, if the driver allows one more allocation and its heap is as large.
    pub(super) fn allocate(
        &self,
        device: &ash::Device,
        allocate: &vk::MemoryAllocateInfo<'_>,
    ) -> Outcome<vk::DeviceMemory> {
        const CALL: &str = "vkAllocateMemory";
        let kind = self.physical.memory.memory_types[allocate.memory_type_index as usize];
        let heap = self.physical.memory.memory_heaps[kind.heap_index as usize];
        if allocate.allocation_size > heap.size {
            return Err((CALL, vk::Result::ERROR_OUT_OF_DEVICE_MEMORY));
        }
        let most = self.physical.limits.allocations;
        let more = |count: u32| (count < most).then_some(count + 1);
        let counted = self.allocations.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
        counted.map_err(|_| (CALL, vk::Result::ERROR_TOO_MANY_OBJECTS))?;
        // SAFETY: what the structures point to outlives the call.
        unsafe { device.allocate_memory(allocate, None) }.of(CALL).inspect_err(|_| {
            self.allocations.fetch_sub(1, Ordering::Relaxed);
        })
    }

    /// Frees memory.
    ///
    /// # Safety
    /// It was allocated by [`allocate`](Context::allocate), is freed once, and nothing uses it any more.
    pub(super) unsafe fn free_memory(&self, device: &ash::Device, memory: vk::DeviceMemory) {
        // SAFETY: the caller's promise.
        unsafe { device.free_memory(memory, None) };
        self.allocations.fetch_sub(1, Ordering::Relaxed);
    }

    /// Counts host memory that the device is to know. Returns false if it is more than the heap of that type of memory: an import
    /// beyond it may succeed, and a submission that uses it then loses the device.
    pub(super) fn count_host_bytes(&self, bytes: u64, kind: u32) -> bool {
        let heap_index = self.physical.memory.memory_types[kind as usize].heap_index;
        let heap = self.physical.memory.memory_heaps[heap_index as usize];
        let more = |known: u64| known.checked_add(bytes).filter(|&sum| sum <= heap.size);
        let known = &self.host_bytes[heap_index as usize];
        known.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok()
    }

    /// Counts host memory that the device does not know any more.
    pub(super) fn forget_host_bytes(&self, bytes: u64, kind: u32) {
        let heap_index = self.physical.memory.memory_types[kind as usize].heap_index;
        self.host_bytes[heap_index as usize].fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Whether this and `other` are the same open device.
    pub(super) fn is(&self, other: &Context) -> bool {
        std::ptr::eq(self, other)
    }

    /// The reason why the device is lost. `None` if it is not.
    pub(super) fn lost(&self) -> Option<&str> {
        self.lost.get().map(String::as_str)
    }

    /// Marks the device as lost: something runs on it that cannot be waited for. All later operations fail with this reason.
    pub(super) fn lose(&self, why: &str) -> Error {
        let _ = self.lost.set(why.to_owned());
        self.error(Refusal::Lost)
    }

    /// Runs calls of the driver.
    ///
    /// # Errors
    /// [`Error::DeviceLost`] immediately when the device is lost, and when the call loses it; [`Error::Forked`] in a fork;
    /// [`Error::Driver`] for any other refusal.
    pub(super) fn call<T>(&self, calls: impl FnOnce(&ash::Device) -> Outcome<T>) -> Result<T> {
        self.raw(calls).map_err(|refusal| self.error(refusal))
    }

    /// As [`call`](Context::call), for callers that react to the driver's result.
    pub(super) fn raw<T>(&self, calls: impl FnOnce(&ash::Device) -> Outcome<T>) -> Result<T, Refusal> {
        if self.lost().is_some() {
            return Err(Refusal::Lost);
        }
        if !self.instance.process.is_current() {
            return Err(Refusal::Forked);
        }
        let _entered = exit::enter().ok_or(Refusal::Ending)?;
        calls(&self.device).map_err(|(call, code)| Refusal::Code(call, code))
    }

    /// Runs calls that destroy what belongs to the device, which is allowed of a lost one too. In a fork, and at the end of the
    /// process, nothing is called.
    pub(super) fn destroy(&self, calls: impl FnOnce(&ash::Device)) {
        if self.instance.process.is_current()
            && let Some(_entered) = exit::enter()
        {
            calls(&self.device);
        }
    }

    /// The error of a refused call. A device that the driver reports as lost is.
    pub(super) fn error(&self, refusal: Refusal) -> Error {
        match refusal {
            Refusal::Lost => {}
            Refusal::Ending => {
                let why = "the process is ending".to_owned();
                return Error::DeviceLost { device: self.id, why };
            }
            Refusal::Forked => {
                if let Err(error) = self.instance.process.check() {
                    return error;
                }
            }
            Refusal::Code(call, code @ vk::Result::ERROR_DEVICE_LOST) => {
                let _ = self.lost.set(format!("{call}: {}", words(code)));
            }
            Refusal::Code(call, code) => {
                let (name, text) = (format!("{code:?}"), code.to_string());
                return Error::Driver { device: self.id, call, code: name, text };
            }
        }
        Error::DeviceLost { device: self.id, why: self.lost().unwrap_or_default().to_owned() }
    }
}

impl reaper::Context for Context {
    fn id(&self) -> DeviceId {
        self.id
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if self.lost().is_some() {
            // Its timelines have not been destroyed, so neither can the device be, nor its instance, nor what the caller keeps.
            std::mem::forget(Arc::clone(&self.instance));
            return;
        }
        // SAFETY: all that belongs to the device holds the context, so nothing is left, and no queue has work of the library.
        self.destroy(|device| unsafe {
            self.pipelines.destroy(device);
            if !self.is_of_caller() {
                device.destroy_device(None);
            }
        });
    }
}

/// The reason why a call was not made or failed.
#[derive(Clone, Copy, Debug)]
pub(super) enum Refusal {
    /// The device was lost before.
    Lost,
    /// The process is a fork of the one that opened the device.
    Forked,
    /// The process is ending.
    Ending,
    /// The call and the driver's result.
    Code(&'static str, vk::Result),
}

impl Refusal {
    /// Whether the driver has no memory for what was asked.
    pub(super) fn is_out_of_memory(self) -> bool {
        let Refusal::Code(_, code) = self else { return false };
        matches!(
            code,
            vk::Result::ERROR_OUT_OF_DEVICE_MEMORY
                | vk::Result::ERROR_OUT_OF_HOST_MEMORY
                | vk::Result::ERROR_TOO_MANY_OBJECTS
        )
    }
}
