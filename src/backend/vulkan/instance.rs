//! Vulkan's library: finding it, and listing the devices of its drivers.

use std::any::Any;
use std::ffi::{CStr, CString};
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ash::{Entry, ext, khr, vk};

use super::arena::ALIGNMENT;
use super::{exit, import};
use crate::backend::process::Process;
use crate::device::{DeviceId, DeviceInfo, DeviceKind, GpuDetails, gpu_uuid};

/// The environment variable that names Vulkan's library.
const LIBRARY_VARIABLE: &str = "TENSOR_OFFLOAD_LIBVULKAN";

/// The oldest supported version: timeline semaphores, second submissions and the size of the largest buffer are part of it.
const OLDEST: u32 = vk::API_VERSION_1_3;

/// An instance of the library in this process.
pub(super) struct Instance {
    raw: ash::Instance,
    origin: Origin,
    /// The process that created it.
    pub(super) process: Process,
}

/// Where an instance is from.
enum Origin {
    /// It was made with the library, whose code all calls are.
    Library { _entry: ManuallyDrop<Entry> },
    /// It is the caller's, who keeps it and its device as long as this.
    Caller(ManuallyDrop<Arc<dyn Any + Send + Sync>>),
}

/// A device of a driver that can be opened.
#[derive(Clone)]
pub(super) struct Physical {
    pub(super) handle: vk::PhysicalDevice,
    pub(super) info: DeviceInfo,
    /// The heap that its memory is taken from.
    pub(super) heap: u32,
    pub(super) memory: vk::PhysicalDeviceMemoryProperties,
    pub(super) limits: Limits,
    /// Whether it has no memory but the host's.
    pub(super) unified: bool,
    has: Extensions,
}

/// The sizes that a driver sets.
#[derive(Clone, Copy)]
pub(super) struct Limits {
    /// The largest buffer that memory can be allocated for, in bytes.
    pub(super) allocation: u64,
    /// The most allocations at one time.
    pub(super) allocations: u32,
    /// The bytes of the largest binding of a kernel, and what a binding's offset is a multiple of: whole words of 32 bits.
    pub(super) storage_range: u32,
    pub(super) storage_alignment: u64,
    /// The alignment, in bytes, of imported host memory and of its size. `None` if the driver imports none.
    pub(super) import: Option<u64>,
}

/// The extensions that are used where a driver has them.
#[derive(Clone, Copy)]
struct Extensions {
    pci_bus_info: bool,
    memory_budget: bool,
    external_memory_host: bool,
    portability_subset: bool,
}

impl Instance {
    /// Loads the library and creates an instance.
    ///
    /// # Errors
    /// The reason why it cannot be used.
    pub(super) fn load(file: Option<&Path>) -> Result<Arc<Instance>, String> {
        // It stays loaded: drivers have threads of their own.
        let entry = ManuallyDrop::new(open(file)?);
        let said = |call: &str, code: vk::Result| format!("{call}: {}", words(code));
        // SAFETY: the entry is loaded.
        let version = unsafe { entry.try_enumerate_instance_version() }
            .map_err(|code| said("vkEnumerateInstanceVersion", code))?
            .unwrap_or(vk::API_VERSION_1_0);
        if version < vk::API_VERSION_1_1 {
            return Err("Vulkan's library is of version 1.0; at least 1.1 is needed".to_owned());
        }
        // SAFETY: as above.
        let extensions = unsafe { entry.enumerate_instance_extension_properties(None) }
            .map_err(|code| said("vkEnumerateInstanceExtensionProperties", code))?;
        // MoltenVK's devices are listed only to those who ask for them.
        let portable = has(&extensions, khr::portability_enumeration::NAME);
        let (names, flags) = match portable {
            true => {
                (vec![khr::portability_enumeration::NAME.as_ptr()], vk::InstanceCreateFlags::ENUMERATE_PORTABILITY_KHR)
            }
            false => (Vec::new(), vk::InstanceCreateFlags::empty()),
        };
        let application =
            vk::ApplicationInfo::default().engine_name(c"tensor-offload").api_version(vk::API_VERSION_1_3);
        let create = vk::InstanceCreateInfo::default()
            .application_info(&application)
            .enabled_extension_names(&names)
            .flags(flags);
        // SAFETY: what the structures point to outlives the call.
        let raw = unsafe { entry.create_instance(&create, None) }.map_err(|code| said("vkCreateInstance", code))?;
        exit::watch();
        Ok(Arc::new(Instance { raw, origin: Origin::Library { _entry: entry }, process: Process::current() }))
    }

    /// An instance of the caller, which is there until `keep` is dropped.
    pub(super) fn of_caller(raw: ash::Instance, keep: Arc<dyn Any + Send + Sync>) -> Arc<Instance> {
        Arc::new(Instance { raw, origin: Origin::Caller(ManuallyDrop::new(keep)), process: Process::current() })
    }

    /// Whether it is the caller's, with its device.
    pub(super) fn is_of_caller(&self) -> bool {
        matches!(self.origin, Origin::Caller(_))
    }

    pub(super) fn raw(&self) -> &ash::Instance {
        &self.raw
    }

    /// The devices that can be opened, numbered in the order of the library's list. Opens none. With `software`, drivers that
    /// compute on the processor count too.
    ///
    /// # Errors
    /// The reason why there is none.
    pub(super) fn devices(&self, software: bool) -> Result<Vec<Physical>, String> {
        // SAFETY: the instance is alive.
        let handles = unsafe { self.raw.enumerate_physical_devices() }
            .map_err(|code| format!("vkEnumeratePhysicalDevices: {}", words(code)))?;
        let (mut devices, mut unfit, mut aliases) = (Vec::new(), Vec::new(), Aliases::default());
        for handle in handles {
            match self.device(handle, DeviceId::vulkan(devices.len() as u32), software, None) {
                Ok((vendor, mut device)) => {
                    device.info.aliases = aliases.of(vendor, &device.info);
                    devices.push(device);
                }
                Err(why) => {
                    tracing::info!(%why, "a Vulkan device is left out");
                    unfit.push(why);
                }
            }
        }
        match (devices.is_empty(), unfit.is_empty()) {
            (false, _) => Ok(devices),
            (true, true) => Err("no Vulkan driver has a device".to_owned()),
            (true, false) => Err(unfit.join("; ")),
        }
    }

    /// A device, with the number of its vendor. Of the extensions only those count that are `enabled`, if it is open already.
    pub(super) fn device(
        &self,
        handle: vk::PhysicalDevice,
        id: DeviceId,
        software: bool,
        enabled: Option<&[CString]>,
    ) -> Result<(u32, Physical), String> {
        // SAFETY: the handle is the instance's, here and below.
        let properties = unsafe { self.raw.get_physical_device_properties(handle) };
        let name =
            properties.device_name_as_c_str().unwrap_or(c"a device without a name").to_string_lossy().into_owned();
        if properties.device_type == vk::PhysicalDeviceType::CPU && !software {
            return Err(format!("{name} computes on the processor, which {}=1 admits", super::SOFTWARE_VARIABLE));
        }
        let version = properties.api_version;
        if version < OLDEST {
            let of = |version| format!("{}.{}", vk::api_version_major(version), vk::api_version_minor(version));
            return Err(format!("{name} has Vulkan {}; at least {} is needed", of(version), of(OLDEST)));
        }
        let mut vulkan12 = vk::PhysicalDeviceVulkan12Features::default();
        let mut vulkan13 = vk::PhysicalDeviceVulkan13Features::default();
        let mut features = vk::PhysicalDeviceFeatures2::default().push_next(&mut vulkan12).push_next(&mut vulkan13);
        // SAFETY: both structures are of a version that the device has.
        unsafe { self.raw.get_physical_device_features2(handle, &mut features) };
        if vulkan12.timeline_semaphore == vk::FALSE || vulkan13.synchronization2 == vk::FALSE {
            return Err(format!("{name} has no timeline semaphores or no second form of submissions"));
        }
        // SAFETY: as above.
        let extensions = unsafe { self.raw.enumerate_device_extension_properties(handle) }
            .map_err(|code| format!("{name}: vkEnumerateDeviceExtensionProperties: {}", words(code)))?;
        let enabled = |name: &CStr| enabled.is_none_or(|enabled| enabled.iter().any(|known| known.as_c_str() == name));
        let has = Extensions {
            pci_bus_info: has(&extensions, ext::pci_bus_info::NAME),
            memory_budget: has(&extensions, ext::memory_budget::NAME) && enabled(ext::memory_budget::NAME),
            external_memory_host: has(&extensions, ext::external_memory_host::NAME)
                && enabled(ext::external_memory_host::NAME),
            portability_subset: has(&extensions, khr::portability_subset::NAME),
        };
        let mut maintenance3 = vk::PhysicalDeviceMaintenance3Properties::default();
        let mut maintenance4 = vk::PhysicalDeviceMaintenance4Properties::default();
        let mut import = vk::PhysicalDeviceExternalMemoryHostPropertiesEXT::default();
        let mut more =
            vk::PhysicalDeviceProperties2::default().push_next(&mut maintenance3).push_next(&mut maintenance4);
        if has.external_memory_host {
            more = more.push_next(&mut import);
        }
        let (mut ids, mut pci) = Default::default();
        more = more.push_next::<vk::PhysicalDeviceIDProperties<'_>>(&mut ids);
        if has.pci_bus_info {
            more = more.push_next::<vk::PhysicalDevicePCIBusInfoPropertiesEXT<'_>>(&mut pci);
        }
        // SAFETY: the structures are of the device's version or of an extension that it has.
        unsafe { self.raw.get_physical_device_properties2(handle, &mut more) };
        // SAFETY: as above.
        let memory = unsafe { self.raw.get_physical_device_memory_properties(handle) };
        let heaps = memory.memory_heaps_as_slice().iter().enumerate();
        let own = heaps.filter(|(_, heap)| heap.flags.contains(vk::MemoryHeapFlags::DEVICE_LOCAL));
        let (heap, size) = own
            .max_by_key(|(_, heap)| heap.size)
            .map(|(number, heap)| (number as u32, heap.size))
            .ok_or_else(|| format!("{name} has no memory of its own"))?;
        let unified = properties.device_type != vk::PhysicalDeviceType::DISCRETE_GPU
            && properties.device_type != vk::PhysicalDeviceType::VIRTUAL_GPU;
        let address = has.pci_bus_info.then(|| {
            let vk::PhysicalDevicePCIBusInfoPropertiesEXT { pci_domain, pci_bus, pci_device, pci_function, .. } = pci;
            format!("{pci_domain:08x}:{pci_bus:02x}:{pci_device:02x}.{pci_function}")
        });
        let gpu = GpuDetails {
            uuid: Some(gpu_uuid(ids.device_uuid)),
            integrated: unified,
            ..GpuDetails::new((0, 0), address.unwrap_or_default())
        };
        let info = DeviceInfo::new(id, size).name(name).free(None).gpu(gpu);
        let limits = Limits {
            allocations: properties.limits.max_memory_allocation_count,
            // Whole ranges of the arena, which rounds sizes up to them.
            allocation: maintenance3.max_memory_allocation_size.min(maintenance4.max_buffer_size) / ALIGNMENT
                * ALIGNMENT,
            storage_range: properties.limits.max_storage_buffer_range,
            storage_alignment: properties.limits.min_storage_buffer_offset_alignment.max(4),
            import: (has.external_memory_host && self.imports(handle))
                .then_some(import.min_imported_host_pointer_alignment.max(1)),
        };
        let info = if unified { info.domain(DeviceId::CPU) } else { info };
        let info = info.largest(Some(limits.allocation).filter(|&largest| largest < size));
        Ok((properties.vendor_id, Physical { handle, info, heap, memory, limits, unified, has }))
    }

    /// Whether buffers of a device can be bound to imported pages: a driver may have the extension for other uses alone.
    fn imports(&self, handle: vk::PhysicalDevice) -> bool {
        let ask = vk::PhysicalDeviceExternalBufferInfo::default().usage(import::USAGE).handle_type(import::PAGES);
        let mut answer = vk::ExternalBufferProperties::default();
        // SAFETY: the handle is the instance's, and the call is part of Vulkan 1.1.
        unsafe { self.raw.get_physical_device_external_buffer_properties(handle, &ask, &mut answer) };
        let features = answer.external_memory_properties.external_memory_features;
        // What has to be dedicated could not be one of the regions that small memory shares.
        features.contains(vk::ExternalMemoryFeatureFlags::IMPORTABLE)
            && !features.contains(vk::ExternalMemoryFeatureFlags::DEDICATED_ONLY)
    }

    /// The bytes of a device's memory that its driver leaves to this process. `None` if it does not tell.
    pub(super) fn free(&self, device: &Physical) -> Option<u64> {
        if !device.has.memory_budget || !self.process.is_current() {
            return None;
        }
        let _entered = exit::enter()?;
        let mut budget = vk::PhysicalDeviceMemoryBudgetPropertiesEXT::default();
        let mut memory = vk::PhysicalDeviceMemoryProperties2::default().push_next(&mut budget);
        // SAFETY: the handle is the instance's, and the device has the extension.
        unsafe { self.raw.get_physical_device_memory_properties2(device.handle, &mut memory) };
        let heap = device.heap as usize;
        Some(budget.heap_budget[heap].saturating_sub(budget.heap_usage[heap]).min(device.info.total))
    }
}

impl Physical {
    /// The first type of memory among `types`, a bit for each, that has one of these sets of properties, tried in turn.
    pub(super) fn memory_type(&self, types: u32, wanted: &[vk::MemoryPropertyFlags], own: bool) -> Option<u32> {
        let all = self.memory.memory_types_as_slice();
        wanted.iter().find_map(|&properties| {
            let fits = |&number: &usize| {
                let kind = &all[number];
                types & (1 << number) != 0
                    && kind.property_flags.contains(properties)
                    && (!own || kind.heap_index == self.heap)
            };
            (0..all.len()).find(fits).map(|number| number as u32)
        })
    }

    /// The extensions to open it with.
    pub(super) fn extensions(&self) -> Vec<&'static CStr> {
        let known = [
            (self.has.memory_budget, ext::memory_budget::NAME),
            (self.has.external_memory_host, ext::external_memory_host::NAME),
            (self.has.portability_subset, khr::portability_subset::NAME),
        ];
        known.into_iter().filter(|(has, _)| *has).map(|(_, name)| name).collect()
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        if self.process.is_current()
            && let Some(_entered) = exit::enter()
        {
            match &mut self.origin {
                // SAFETY: its devices hold the instance, so none is left.
                Origin::Library { .. } => unsafe { self.raw.destroy_instance(None) },
                // SAFETY: dropped once, here.
                Origin::Caller(keep) => unsafe { ManuallyDrop::drop(keep) },
            }
        }
    }
}

/// The names by which other tools know devices that are found one after the other.
#[derive(Default)]
struct Aliases {
    intel: u32,
    amd: u32,
    apple: u32,
}

impl Aliases {
    /// The names of the next device, by the PCI number of its vendor: `xpu` for Intel's, `mps` for Apple's first, `cuda` for
    /// AMD's cards, which ROCm has by that name, and `directml` for all on Windows.
    fn of(&mut self, vendor: u32, info: &DeviceInfo) -> Vec<DeviceId> {
        let (id, has_memory) = (info.id, info.domain == info.id);
        let (kind, count) = match vendor {
            0x8086 => (Some(DeviceKind::Xpu), &mut self.intel),
            0x106b => (Some(DeviceKind::Mps), &mut self.apple),
            0x1002 if has_memory => (Some(DeviceKind::Cuda), &mut self.amd),
            _ => (None, &mut 0),
        };
        let by_vendor = kind.and_then(|kind| DeviceId::new(kind, *count));
        *count += 1;
        let of_system = DeviceId::new(DeviceKind::DirectMl, id.index()).filter(|_| cfg!(windows));
        by_vendor.into_iter().chain(of_system).collect()
    }
}

/// The library: the file of this name, or the system's.
fn open(file: Option<&Path>) -> Result<Entry, String> {
    let named = file.map(Path::to_owned).or_else(|| std::env::var_os(LIBRARY_VARIABLE).map(PathBuf::from));
    match named {
        Some(file) => {
            // SAFETY: loading the library runs its initialisers, which is what opening it means.
            unsafe { Entry::load_from(&file) }.map_err(|error| format!("{} cannot be loaded: {error}", file.display()))
        }
        // SAFETY: as above.
        None => unsafe { Entry::load() }.map_err(|error| format!("no Vulkan: {error}")),
    }
}

fn has(extensions: &[vk::ExtensionProperties], name: &CStr) -> bool {
    extensions.iter().any(|extension| extension.extension_name_as_c_str() == Ok(name))
}

/// A result's name and description.
pub(super) fn words(code: vk::Result) -> String {
    format!("{code:?} ({code})")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_go_by_the_names_of_other_tools() {
        let mut aliases = Aliases::default();
        let vendors = [0x8086, 0x10de, 0x1002, 0x8086, 0x106b, 0x106b, 0x10005];
        let names = vendors.iter().enumerate().map(|(number, &vendor)| {
            let of = aliases.of(vendor, &DeviceInfo::new(DeviceId::vulkan(number as u32), 1));
            of.iter()
                .filter(|id| id.kind() != DeviceKind::DirectMl)
                .map(ToString::to_string)
                .collect::<Vec<_>>()
                .join(" ")
        });
        assert_eq!(names.collect::<Vec<_>>(), ["xpu:0", "", "cuda:0", "xpu:1", "mps", "", ""]);
        let integrated = DeviceInfo::new(DeviceId::vulkan(9), 1).domain(DeviceId::CPU);
        assert!(!aliases.of(0x1002, &integrated).iter().any(|id| id.kind() == DeviceKind::Cuda));
    }
}
