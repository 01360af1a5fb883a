//! The longest waits of the library, and the sizes of its staging buffers.

use std::time::Duration;

/// The longest waits of the library. Those of a [`Registry`](crate::Registry) apply to all loading and streaming on its
/// devices, those of a [`ModelCache`](crate::ModelCache) to the cache's waits.
///
/// ```
/// use std::time::Duration;
/// use tensor_offload::{Limits, Registry};
/// let devices = Registry::system().with_limits(Limits::default().work(Duration::from_secs(60)));
/// assert_eq!(devices.limits().work, Duration::from_secs(60));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limits {
    /// The longest wait for one piece of a device's work, such as a copy. Default: 600 s.
    pub work: Duration,
    /// The longest wait for a load by another thread. Default: an hour.
    pub load: Duration,
    /// The longest wait for released memory to become free before it counts as taken: devices free memory once the last work
    /// that uses it is done. Default: 5 s.
    pub release: Duration,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits { work: WORK, load: Duration::from_secs(3600), release: RELEASE }
    }
}

impl Limits {
    /// Sets the longest wait for one piece of a device's work, capped at a century.
    #[must_use]
    pub fn work(mut self, longest: Duration) -> Limits {
        self.work = longest.min(LONGEST);
        self
    }

    /// Sets the longest wait for a load by another thread, capped at a century.
    #[must_use]
    pub fn load(mut self, longest: Duration) -> Limits {
        self.load = longest.min(LONGEST);
        self
    }

    /// Sets the longest wait for released memory to become free, capped at a century.
    #[must_use]
    pub fn release(mut self, longest: Duration) -> Limits {
        self.release = longest.min(LONGEST);
        self
    }
}

/// The longest wait, a century: the current time plus a wait must stay within the range of the system's clock.
pub(crate) const LONGEST: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);

/// The default longest wait for a piece of work. A stream that must wait for another backend's event on the host, because its
/// device cannot, uses it directly, since it has no registry.
pub(crate) const WORK: Duration = Duration::from_secs(600);

/// The default longest wait for released memory. What a driver does not destroy while it is in use is waited for as long.
pub(crate) const RELEASE: Duration = Duration::from_secs(5);

/// The longest time of the trial copy that checks whether two devices can reach each other.
#[cfg(feature = "cuda")]
pub(crate) const TRIAL: Duration = Duration::from_secs(5);

/// The size of one staging buffer on the host, in bytes. 4 to 16 MiB reach the speed of a link; smaller buffers would save
/// host memory, larger ones copies. Plans depend on it, so it is the same everywhere.
pub(crate) const STAGING_BYTES: usize = 16 << 20;

/// The default number of staging buffers used in turn: one is filled while others are on the link.
pub(crate) const STAGING_BUFFERS: usize = 4;
