//! The queues of a device, and which of them each kind of stream submits to.

use std::convert::Infallible;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use ash::vk;

use super::context::Outcome;
use crate::backend::Role;

/// The lock of a queue that both the library and its caller submit to.
pub trait QueueLock: Send + Sync {
    /// Runs `submit` once, while no other thread uses the queue.
    fn locked(&self, submit: &mut dyn FnMut());
}

impl QueueLock for Mutex<()> {
    fn locked(&self, submit: &mut dyn FnMut()) {
        let _held = self.lock().unwrap_or_else(PoisonError::into_inner);
        submit();
    }
}

/// A queue of an open device.
pub(super) struct Queue {
    raw: vk::Queue,
    family: u32,
    /// The driver lets one thread at a time submit.
    lock: Arc<dyn QueueLock>,
    /// The streams that submit to it.
    streams: AtomicUsize,
}

impl Queue {
    pub(super) fn new(raw: vk::Queue, family: u32, lock: Arc<dyn QueueLock>) -> Queue {
        Queue { raw, family, lock, streams: AtomicUsize::new(0) }
    }

    pub(super) fn raw(&self) -> vk::Queue {
        self.raw
    }

    pub(super) fn family(&self) -> u32 {
        self.family
    }

    /// Whether no more than one stream submits to it.
    pub(super) fn has_one_stream(&self) -> bool {
        self.streams.load(Ordering::Relaxed) < 2
    }

    /// Runs a submission while no other thread uses the queue. A lock of the caller that does not run it makes it fail.
    pub(super) fn submit<T>(&self, call: impl FnOnce(vk::Queue) -> Outcome<T>) -> Outcome<T> {
        let (mut call, mut outcome) = (Some(call), None);
        let mut submit = || outcome = call.take().map(|call| call(self.raw)).or(outcome.take());
        // A lock that panics may have run it before: the outcome tells.
        let _ = catch_unwind(AssertUnwindSafe(|| self.lock.locked(&mut submit)));
        outcome.unwrap_or(Err(("the lock of a queue", vk::Result::ERROR_UNKNOWN)))
    }
}

/// A stream's use of a queue.
pub(super) struct QueueUse(Arc<Queue>);

impl QueueUse {
    pub(super) fn of(queue: &Arc<Queue>) -> QueueUse {
        queue.streams.fetch_add(1, Ordering::Relaxed);
        QueueUse(Arc::clone(queue))
    }
}

impl std::ops::Deref for QueueUse {
    type Target = Queue;

    fn deref(&self) -> &Queue {
        &self.0
    }
}

impl Drop for QueueUse {
    fn drop(&mut self) {
        self.0.streams.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The queues by role.
pub(super) struct Queues {
    compute: Arc<Queue>,
    upload: Arc<Queue>,
    download: Arc<Queue>,
    /// The families in use, each once.
    families: Vec<u32>,
}

impl Queues {
    pub(super) fn of(&self, role: Role) -> &Arc<Queue> {
        match role {
            Role::Compute => &self.compute,
            Role::Upload => &self.upload,
            Role::Download => &self.download,
        }
    }

    /// Whether a queue of these runs kernels.
    pub(super) fn computes(&self, queue: &Queue) -> bool {
        queue.family == self.compute.family
    }

    /// The families whose queues use a buffer, if they are several: it then belongs to all of them, so that none has to hand it
    /// over to another.
    pub(super) fn sharing(&self) -> (vk::SharingMode, &[u32]) {
        match self.families.len() {
            1 => (vk::SharingMode::EXCLUSIVE, &[]),
            _ => (vk::SharingMode::CONCURRENT, &self.families),
        }
    }
}

/// The queues to open a device with: a family and a number of its queue for each role.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Choice {
    compute: (u32, u32),
    upload: (u32, u32),
    download: (u32, u32),
}

impl Choice {
    /// Chooses among a device's families. Copies get queues of their own where the device has them: of a family for transfers
    /// alone, else further queues of the family that computes. A device without memory of its own has nothing to copy beside
    /// its compute, where a second queue only costs. `None` if no family computes.
    pub(super) fn among(families: &[vk::QueueFamilyProperties], unified: bool) -> Option<Choice> {
        let of = |kinds: vk::QueueFlags| families.iter().position(move |family| family.queue_flags.contains(kinds));
        let compute = of(vk::QueueFlags::COMPUTE)?;
        let computes = vk::QueueFlags::GRAPHICS | vk::QueueFlags::COMPUTE;
        let transfers = |family: &vk::QueueFamilyProperties| {
            let kinds = family.queue_flags;
            // What decodes or encodes video can copy too, with other limits.
            let video = vk::QueueFlags::VIDEO_DECODE_KHR | vk::QueueFlags::VIDEO_ENCODE_KHR;
            kinds.contains(vk::QueueFlags::TRANSFER) && !kinds.intersects(computes | video) && family.queue_count > 0
        };
        let (family, first) = match families.iter().position(transfers).filter(|_| !unified) {
            Some(family) => (family, 0),
            None => (compute, u32::from(!unified)),
        };
        let last = families[family].queue_count.saturating_sub(1);
        let copies = |number: u32| (family as u32, number.min(last));
        Some(Choice {
            compute: (compute as u32, 0),
            upload: copies(first),
            download: copies(if unified { first } else { first + 1 }),
        })
    }

    /// Each family in use, with the number of its queues in use.
    pub(super) fn families(&self) -> Vec<(u32, usize)> {
        let mut families: Vec<(u32, usize)> = Vec::new();
        for (family, number) in [self.compute, self.upload, self.download] {
            let count = number as usize + 1;
            match families.iter_mut().find(|known| known.0 == family) {
                Some(known) => known.1 = known.1.max(count),
                None => families.push((family, count)),
            }
        }
        families
    }

    /// The queues of a device that was opened with them.
    pub(super) fn queues(&self, device: &ash::Device) -> Queues {
        let queue = |(family, number)| {
            // SAFETY: the device was created with this queue.
            let raw = unsafe { device.get_device_queue(family, number) };
            Ok(Queue::new(raw, family, Arc::new(Mutex::new(()))))
        };
        let Ok(queues) = self.queues_from::<Infallible>(queue, &[]);
        queues
    }

    /// The queues by role, from those that `queue` makes by family and number. Buffers are for `others`, too, families of the
    /// caller's queues.
    pub(super) fn queues_from<E>(
        &self,
        queue: impl Fn((u32, u32)) -> Result<Queue, E>,
        others: &[u32],
    ) -> Result<Queues, E> {
        let mut known: Vec<((u32, u32), Arc<Queue>)> = Vec::new();
        let mut once = |of: (u32, u32)| {
            if let Some((_, queue)) = known.iter().find(|known| known.0 == of) {
                return Ok(Arc::clone(queue));
            }
            let queue = Arc::new(queue(of)?);
            known.push((of, Arc::clone(&queue)));
            Ok(queue)
        };
        let (compute, upload, download) = (once(self.compute)?, once(self.upload)?, once(self.download)?);
        let mut families: Vec<u32> = self.families().into_iter().map(|(family, _)| family).collect();
        families.extend(others);
        families.sort_unstable();
        families.dedup();
        Ok(Queues { compute, upload, download, families })
    }

    /// What a device is created with to have them.
    pub(super) fn create_infos(&self) -> Vec<vk::DeviceQueueCreateInfo<'static>> {
        // Copies have priority over the compute that waits for them.
        const PRIORITIES: &[f32; 3] = &[0.5, 1.0, 1.0];
        let families = self.families();
        let info = |&(family, count): &(u32, usize)| {
            let computes = family == self.compute.0;
            let own = if computes { &PRIORITIES[..count] } else { &PRIORITIES[3 - count..] };
            vk::DeviceQueueCreateInfo::default().queue_family_index(family).queue_priorities(own)
        };
        families.iter().map(info).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn families(list: &[(vk::QueueFlags, u32)]) -> Vec<vk::QueueFamilyProperties> {
        let family = |&(kinds, count)| vk::QueueFamilyProperties::default().queue_flags(kinds).queue_count(count);
        list.iter().map(family).collect()
    }

    /// The lists are those that drivers of 2026 report.
    #[test]
    fn copies_have_queues_of_their_own_where_there_are_some() {
        const ALL: vk::QueueFlags = vk::QueueFlags::from_raw(0b111);
        const COMPUTE: vk::QueueFlags = vk::QueueFlags::from_raw(0b110);
        const TRANSFER: vk::QueueFlags = vk::QueueFlags::TRANSFER;
        const VIDEO: vk::QueueFlags = vk::QueueFlags::from_raw(0b100 | 0x20);
        for (list, unified, wanted) in [
            // NVIDIA: sixteen of all kinds, two for transfers, then video.
            (vec![(ALL, 16), (TRANSFER, 2), (COMPUTE, 8), (VIDEO, 1)], false, [(0, 0), (1, 0), (1, 1)]),
            // AMD with the transfer queue hidden, and with it shown.
            (vec![(ALL, 1), (COMPUTE, 4)], false, [(0, 0), (0, 0), (0, 0)]),
            (vec![(ALL, 1), (COMPUTE, 4), (TRANSFER, 1)], false, [(0, 0), (2, 0), (2, 0)]),
            // Two of one kind, and three.
            (vec![(ALL, 2)], false, [(0, 0), (0, 1), (0, 1)]),
            (vec![(ALL, 3)], false, [(0, 0), (0, 1), (0, 2)]),
            // An integrated device, and a software driver.
            (vec![(ALL, 1), (TRANSFER, 2)], true, [(0, 0), (0, 0), (0, 0)]),
            (vec![(ALL, 1)], true, [(0, 0), (0, 0), (0, 0)]),
            // Video alone can transfer.
            (vec![(ALL, 1), (VIDEO, 1)], false, [(0, 0), (0, 0), (0, 0)]),
        ] {
            let choice = Choice::among(&families(&list), unified).unwrap();
            assert_eq!([choice.compute, choice.upload, choice.download], wanted, "family {}", list.len());
        }
        assert_eq!(Choice::among(&families(&[(TRANSFER, 1)]), false), None);
    }

    #[test]
    fn each_family_is_opened_once() {
        let choice = Choice { compute: (0, 0), upload: (1, 0), download: (1, 1) };
        assert_eq!(choice.families(), [(0, 1), (1, 2)]);
        let choice = Choice { compute: (0, 0), upload: (0, 1), download: (0, 1) };
        assert_eq!(choice.families(), [(0, 2)]);
    }
}
