//! How long the library waits, and how much of the host's memory bytes pass through on their way.

use std::time::Duration;

/// How long the library waits for what should come. A [`Registry`](crate::Registry) has them for all that is loaded and
/// streamed on its devices, a [`ModelCache`](crate::ModelCache) for its own waits.
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
    /// How long memory that was let go of may take to come back before it counts as taken: devices free it when the
    /// last work that used it is done. Default: 5 s.
    pub release: Duration,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits { work: WORK, load: Duration::from_secs(3600), release: Duration::from_secs(5) }
    }
}

impl Limits {
    /// Sets the longest wait for one piece of a device's work; a century at most.
    #[must_use]
    pub fn work(mut self, longest: Duration) -> Limits {
        self.work = longest.min(LONGEST);
        self
    }

    /// Sets the longest wait for a load by another thread; a century at most.
    #[must_use]
    pub fn load(mut self, longest: Duration) -> Limits {
        self.load = longest.min(LONGEST);
        self
    }

    /// Sets how long memory that was let go of may take to come back; a century at most.
    #[must_use]
    pub fn release(mut self, longest: Duration) -> Limits {
        self.release = longest.min(LONGEST);
        self
    }
}

/// The longest wait, a century: what is added to the time has to stay within what the system's clock can tell.
pub(crate) const LONGEST: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);

/// The longest wait for a piece of work, where nobody said otherwise. A stream that is told to wait for an event of
/// another backend's, which its device cannot wait for, has no registry to ask.
pub(crate) const WORK: Duration = Duration::from_secs(600);

/// How long a copy between two devices may take that only shows whether they reach each other.
#[cfg(feature = "cuda")]
pub(crate) const TRIAL: Duration = Duration::from_secs(5);

/// The bytes of one staging buffer on the host. 4 to 16 MiB reach the speed of a link; smaller ones would save host memory,
/// larger ones copies. Plans count on it, so it is the same everywhere.
pub(crate) const STAGING_BYTES: usize = 16 << 20;

/// How many staging buffers take turns where the ways of bytes do not ask for more: one is filled while others are on
/// the link.
pub(crate) const STAGING_BUFFERS: usize = 4;
