//! Memory near a device: threads on the processors of the device's NUMA node touch its pages first, and the system then
//! places them on that node.

use crate::backend::first_touch::{share, touch_part};
use crate::backend::sysfs::Sysfs;

/// A NUMA node with its processors.
pub(super) struct Node {
    number: u32,
    processors: Vec<usize>,
}

impl Node {
    /// The node of this number. `None` if the system reports no processors for it.
    pub(super) fn find(sysfs: &Sysfs, number: u32) -> Option<Node> {
        let processors = sysfs.processors(number);
        (!processors.is_empty()).then_some(Node { number, processors })
    }

    /// Makes the system back fresh memory by pages of this node.
    pub(super) fn touch(&self, bytes: &mut [u8]) {
        tracing::debug!(node = self.number, bytes = bytes.len(), "host memory is touched on a NUMA node");
        self.share(bytes, touch_part);
    }

    /// Splits `bytes` between several threads on the node.
    fn share(&self, bytes: &mut [u8], work: impl Fn(&mut [u8]) + Sync) {
        share(bytes, self.processors.len(), |part| {
            self.bind();
            work(part);
        });
    }

    /// Binds the calling thread to the node. If that is refused, the memory comes from the node where the thread runs.
    #[cfg(target_os = "linux")]
    pub(super) fn bind(&self) {
        use rustix::thread::{CpuSet, sched_setaffinity};
        let mut set = CpuSet::new();
        let known = self.processors.iter().filter(|&&processor| processor < CpuSet::MAX_CPU);
        known.for_each(|&processor| set.set(processor));
        if let Err(error) = sched_setaffinity(None, &set) {
            tracing::debug!(%error, "a thread cannot run on the device's NUMA node");
        }
    }

    #[cfg(not(target_os = "linux"))]
    pub(super) fn bind(&self) {}
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use rustix::thread::sched_getaffinity;

    use super::*;
    use crate::backend::first_touch::HUGE_PAGE;

    #[test]
    fn every_byte_is_shared_out_to_threads_of_the_node_alone() {
        let here = sched_getaffinity(None).unwrap();
        let processor = (0..here.count() as usize * 64).find(|&processor| here.is_set(processor)).unwrap();
        // Listed three times it is three threads, all of them on the one processor that is surely allowed.
        let node = Node { number: 0, processors: vec![processor; 3] };
        let mut bytes = vec![0; 3 * HUGE_PAGE + 17];
        let threads = AtomicUsize::new(0);
        node.share(&mut bytes, |part| {
            let set = sched_getaffinity(None).unwrap();
            assert!(set.count() == 1 && set.is_set(processor));
            threads.fetch_add(1, Ordering::Relaxed);
            part.fill(1);
        });
        assert!(bytes.iter().all(|&byte| byte == 1));
        assert_eq!(threads.into_inner(), 2, "huge pages are not split");
        assert!(sched_getaffinity(None).unwrap().count() == here.count(), "the caller stays where it was");
    }
}
