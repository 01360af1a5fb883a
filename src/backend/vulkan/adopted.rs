//! Devices that the caller has opened, and works with too.

use std::any::Any;
use std::ffi::{CStr, CString};
use std::fmt;
use std::sync::{Arc, Mutex};

use ash::vk;
use ash::vk::Handle;

use super::instance::{Instance, Physical};
use super::queues::{Choice, Queue, QueueLock, Queues};
use super::{Candidate, exit};
use crate::device::DeviceId;
use crate::error::{Error, Result};

/// The calls of Vulkan 1.2 and 1.3 that the library makes.
const CALLS: [&CStr; 4] = [c"vkQueueSubmit2", c"vkCmdPipelineBarrier2", c"vkWaitSemaphores", c"vkSignalSemaphore"];

/// A device of the caller, for [`Vulkan::adopt`](crate::backend::Vulkan::adopt): handles, what was enabled, and the queues that
/// the library may submit to. By itself it does nothing.
pub struct AdoptedDevice {
    instance: ash::Instance,
    physical: vk::PhysicalDevice,
    device: ash::Device,
    features: EnabledFeatures,
    extensions: Vec<CString>,
    queues: Vec<AdoptedQueue>,
    families: Vec<u32>,
    keep: Arc<dyn Any + Send + Sync>,
}

/// The features that a device was created with, of those that the library needs. Both are needed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "Vulkan 1.3 is what the library needs")]
pub struct EnabledFeatures {
    /// `timelineSemaphore`, of Vulkan 1.2.
    pub timeline_semaphore: bool,
    /// `synchronization2`, of Vulkan 1.3.
    pub synchronization2: bool,
}

/// A queue that the library may submit to.
#[derive(Clone)]
pub struct AdoptedQueue {
    raw: vk::Queue,
    family: u32,
    /// `None` if only the library uses it.
    lock: Option<Arc<dyn QueueLock>>,
}

impl AdoptedQueue {
    /// A queue of this family that only the library submits to.
    pub fn own(queue: vk::Queue, family: u32) -> AdoptedQueue {
        AdoptedQueue { raw: queue, family, lock: None }
    }

    /// A queue of this family that others submit to as well, under this lock: an `Arc<Mutex<()>>` will do.
    pub fn shared(queue: vk::Queue, family: u32, lock: Arc<dyn QueueLock>) -> AdoptedQueue {
        AdoptedQueue { raw: queue, family, lock: Some(lock) }
    }
}

impl AdoptedDevice {
    /// A device without queues. `keep` is dropped after the library's last use of the device and of the instance.
    pub fn new(
        instance: ash::Instance,
        physical_device: vk::PhysicalDevice,
        device: ash::Device,
        features: EnabledFeatures,
        keep: impl Any + Send + Sync,
    ) -> AdoptedDevice {
        let (extensions, queues, families) = Default::default();
        let (physical, keep) = (physical_device, Arc::new(keep));
        AdoptedDevice { instance, physical, device, features, extensions, queues, families, keep }
    }

    /// Adds a queue that the library may submit to. One serves for all. Of several the library takes the first of the first family
    /// that computes for the compute streams, and for copies what it would take of a device that it opens: queues of a family for
    /// transfers alone, else further ones of the family that computes.
    #[must_use]
    pub fn queue(mut self, queue: AdoptedQueue) -> AdoptedDevice {
        self.queues.push(queue);
        self
    }

    /// Adds families of other queues of the caller that use the library's buffers.
    #[must_use]
    pub fn families(mut self, families: impl IntoIterator<Item = u32>) -> AdoptedDevice {
        self.families.extend(families);
        self
    }

    /// Adds extensions that were enabled. `VK_EXT_external_memory_host` and `VK_EXT_memory_budget` are used if they are among them.
    #[must_use]
    pub fn extensions<'a>(mut self, names: impl IntoIterator<Item = &'a CStr>) -> AdoptedDevice {
        self.extensions.extend(names.into_iter().map(CStr::to_owned));
        self
    }
}

/// What a device has for the library, before it is opened by another's code.
#[cfg(feature = "wgpu")]
pub(crate) struct Suited(Choice, Vec<vk::DeviceQueueCreateInfo<'static>>);

#[cfg(feature = "wgpu")]
impl Suited {
    /// The queues to create it with: the first of family 0, for compute, and those that copies have for themselves.
    pub(crate) fn queues(&self) -> &[vk::DeviceQueueCreateInfo<'static>] {
        &self.1
    }

    /// Each of them by family and number.
    pub(crate) fn numbers(&self) -> impl Iterator<Item = (u32, u32)> {
        self.0.families().into_iter().flat_map(|(family, count)| (0..count as u32).map(move |number| (family, number)))
    }
}

/// Whether the library can use a device that is yet to be opened, with the first queue of family 0 for compute.
///
/// # Errors
/// The reason why not.
///
/// # Safety
/// The instance is alive while `keep` lives, was made for Vulkan 1.3, and the physical device is its.
#[cfg(feature = "wgpu")]
pub(crate) unsafe fn suits(
    instance: ash::Instance,
    physical: vk::PhysicalDevice,
    keep: impl Any + Send + Sync,
    software: bool,
) -> std::result::Result<Suited, String> {
    let instance = Instance::of_caller(instance, Arc::new(keep));
    let (_, found) = instance.device(physical, DeviceId::vulkan(0), software, None)?;
    // SAFETY: the handle is the instance's.
    let families = unsafe { instance.raw().get_physical_device_queue_family_properties(physical) };
    let choice = Choice::among(&families, found.unified).filter(|choice| choice.families()[0].0 == 0);
    let choice = choice.ok_or_else(|| format!("the first queues of {} do not compute", found.info.name))?;
    Ok(Suited(choice, choice.create_infos()))
}

/// A device of the caller, checked.
pub(super) struct Adopted {
    id: DeviceId,
    device: ash::Device,
    choice: Choice,
    queues: Vec<AdoptedQueue>,
    families: Vec<u32>,
}

/// Checks a device of the caller.
///
/// # Safety
/// As [`Vulkan::adopt`](crate::backend::Vulkan::adopt).
pub(super) unsafe fn candidate(id: DeviceId, given: AdoptedDevice) -> Result<Candidate> {
    let AdoptedDevice { instance, physical, device, features, extensions, queues, families, keep } = given;
    let nulls = [
        ("instance", instance.handle().is_null()),
        ("physical device", physical.is_null()),
        ("device", device.handle().is_null()),
        ("queue", queues.iter().any(|queue| queue.raw.is_null())),
    ];
    if let Some((what, _)) = nulls.iter().find(|(_, is_null)| *is_null) {
        return Err(Error::invalid(format!("the {what} of {id} is null")));
    }
    let absent = |why: String| Error::DeviceAbsent { device: id, why };
    let needed = [("timelineSemaphore", features.timeline_semaphore), ("synchronization2", features.synchronization2)];
    if let Some((name, _)) = needed.iter().find(|(_, enabled)| !enabled) {
        return Err(absent(format!("it was created without the feature {name}")));
    }
    // SAFETY: the handles are valid.
    let missing =
        CALLS.iter().find(|call| unsafe { instance.get_device_proc_addr(device.handle(), call.as_ptr()) }.is_none());
    if let Some(call) = missing {
        return Err(absent(format!("it has no {}; is its instance for Vulkan 1.3?", call.to_string_lossy())));
    }
    let instance = Instance::of_caller(instance, keep);
    exit::watch();
    let (_, found) = instance.device(physical, id, true, Some(&extensions)).map_err(absent)?;
    // SAFETY: the handle is the instance's.
    let known = unsafe { instance.raw().get_physical_device_queue_family_properties(physical) };
    let choice = choose(&known, &queues, &families, found.unified)?;
    let choice = choice.ok_or_else(|| absent("none of its queues computes".to_owned()))?;
    let adopted = Some(Arc::new(Adopted { id, device, choice, queues, families }));
    Ok(Candidate { instance, physical: found, adopted })
}

/// Chooses among the queues that were given, by their order within each family.
fn choose(
    known: &[vk::QueueFamilyProperties],
    queues: &[AdoptedQueue],
    others: &[u32],
    unified: bool,
) -> Result<Option<Choice>> {
    if queues.is_empty() {
        return Err(Error::invalid("a device needs a queue that the library may submit to"));
    }
    let named = queues.iter().map(|queue| queue.family).chain(others.iter().copied());
    if let Some(family) = named.into_iter().find(|&family| family as usize >= known.len()) {
        return Err(Error::invalid(format!("there is no queue family {family}, the device has {}", known.len())));
    }
    for (number, queue) in queues.iter().enumerate() {
        if queues[..number].iter().any(|before| before.raw == queue.raw) {
            return Err(Error::invalid(format!("a queue of family {} is named twice", queue.family)));
        }
    }
    let given = |(family, known): (usize, &vk::QueueFamilyProperties)| {
        let count = queues.iter().filter(|queue| queue.family as usize == family).count() as u32;
        let flags = if count == 0 { vk::QueueFlags::empty() } else { known.queue_flags };
        vk::QueueFamilyProperties::default().queue_flags(flags).queue_count(count)
    };
    let given: Vec<_> = known.iter().enumerate().map(given).collect();
    Ok(Choice::among(&given, unified))
}

impl Adopted {
    /// The device, and its queues by role.
    pub(super) fn device_and_queues(&self, physical: &Physical) -> Result<(ash::Device, Queues)> {
        debug_assert_eq!(self.id, physical.info.id);
        let queue = |(family, number): (u32, u32)| {
            let mut of_family = self.queues.iter().filter(|queue| queue.family == family);
            let queue = of_family.nth(number as usize).ok_or_else(|| Error::bug("a queue that was not given"))?;
            let own = || Arc::new(Mutex::new(())) as Arc<dyn QueueLock>;
            Ok::<_, Error>(Queue::new(queue.raw, family, queue.lock.clone().unwrap_or_else(own)))
        };
        Ok((self.device.clone(), self.choice.queues_from(queue, &self.families)?))
    }
}

impl fmt::Debug for AdoptedDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AdoptedDevice")
            .field("device", &self.device.handle())
            .field("features", &self.features)
            .field("extensions", &self.extensions)
            .field("queues", &self.queues)
            .field("families", &self.families)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for AdoptedQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shared = self.lock.is_some();
        f.debug_struct("AdoptedQueue")
            .field("raw", &self.raw)
            .field("family", &self.family)
            .field("shared", &shared)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn family(kinds: vk::QueueFlags, count: u32) -> vk::QueueFamilyProperties {
        vk::QueueFamilyProperties::default().queue_flags(kinds).queue_count(count)
    }

    fn queue(handle: u64, family: u32) -> AdoptedQueue {
        AdoptedQueue::own(vk::Queue::from_raw(handle), family)
    }

    #[test]
    fn roles_are_shared_out_among_the_queues_that_were_given() {
        let all = vk::QueueFlags::GRAPHICS | vk::QueueFlags::COMPUTE | vk::QueueFlags::TRANSFER;
        let known = [family(all, 16), family(vk::QueueFlags::TRANSFER, 2), family(vk::QueueFlags::COMPUTE, 8)];
        let chosen =
            |queues: &[AdoptedQueue]| choose(&known, queues, &[], false).unwrap().map(|choice| choice.families());
        assert_eq!(chosen(&[queue(1, 0)]), Some(vec![(0, 1)]));
        assert_eq!(chosen(&[queue(1, 0), queue(2, 0)]), Some(vec![(0, 2)]));
        assert_eq!(chosen(&[queue(1, 1), queue(2, 0)]), Some(vec![(0, 1), (1, 1)]));
        assert_eq!(chosen(&[queue(1, 2), queue(2, 1), queue(3, 1)]), Some(vec![(2, 1), (1, 2)]));
        assert_eq!(chosen(&[queue(1, 1)]), None, "it only transfers");
    }

    #[test]
    fn queues_that_cannot_be_are_refused() {
        let known = [family(vk::QueueFlags::COMPUTE, 4)];
        let refused =
            |queues: &[AdoptedQueue], others: &[u32]| choose(&known, queues, others, false).unwrap_err().to_string();
        assert!(refused(&[], &[]).contains("needs a queue"));
        assert!(refused(&[queue(1, 7)], &[]).contains("no queue family 7, the device has 1"));
        assert!(refused(&[queue(1, 0)], &[3]).contains("no queue family 3"));
        assert!(refused(&[queue(1, 0), queue(1, 0)], &[]).contains("named twice"));
    }

    #[test]
    fn a_lock_that_runs_nothing_fails_the_submission() {
        struct Idle;
        impl QueueLock for Idle {
            fn locked(&self, _submit: &mut dyn FnMut()) {}
        }
        struct Twice;
        impl QueueLock for Twice {
            fn locked(&self, submit: &mut dyn FnMut()) {
                submit();
                submit();
                panic!("after it");
            }
        }
        let queue = |lock| Queue::new(vk::Queue::null(), 0, lock);
        assert!(queue(Arc::new(Idle)).submit(|_| Ok(1)).is_err());
        let mut times = 0;
        let outcome = queue(Arc::new(Twice)).submit(|_| {
            times += 1;
            Ok(times)
        });
        assert_eq!(outcome, Ok(1), "once, and its outcome is known");
    }
}
