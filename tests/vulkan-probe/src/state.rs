//! What the probe knows, and what a test has asked of it. There is one in a process: that of the loaded library.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

use ash::vk;

/// How a call fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Failure {
    /// The device has no memory left.
    DeviceMemory = 1,
    /// The host has no memory left.
    HostMemory = 2,
    /// The device is lost.
    Lost = 3,
    /// Any other reason.
    Other = 4,
}

impl Failure {
    /// All of them.
    pub const ALL: [Failure; 4] = [Failure::DeviceMemory, Failure::HostMemory, Failure::Lost, Failure::Other];

    fn code(self) -> vk::Result {
        match self {
            Failure::DeviceMemory => vk::Result::ERROR_OUT_OF_DEVICE_MEMORY,
            Failure::HostMemory => vk::Result::ERROR_OUT_OF_HOST_MEMORY,
            Failure::Lost => vk::Result::ERROR_DEVICE_LOST,
            Failure::Other => vk::Result::ERROR_INITIALIZATION_FAILED,
        }
    }
}

/// What is left out of the program's calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Omission {
    /// Waits of a submission for the semaphore that it raises itself.
    OwnWaits = 1,
    /// Waits of a submission for those of other streams.
    OtherWaits = 2,
    /// The last step of those: each waits for the value before.
    LastStep = 3,
    /// Barriers between copies.
    Barriers = 4,
    /// Waits of the host: all work is reported as done.
    HostWaits = 5,
    /// Barriers between kernels.
    KernelBarriers = 6,
}

impl Omission {
    /// All of them, by name.
    pub const ALL: [(&'static str, Omission); 6] = [
        ("own-waits", Omission::OwnWaits),
        ("other-waits", Omission::OtherWaits),
        ("last-step", Omission::LastStep),
        ("barriers", Omission::Barriers),
        ("host-waits", Omission::HostWaits),
        ("kernel-barriers", Omission::KernelBarriers),
    ];
}

/// The state of the probe.
#[derive(Default)]
pub(crate) struct State {
    pub(crate) calls: u64,
    /// The number of the call to fail, and how.
    pub(crate) fail: Option<(u64, Failure)>,
    /// The name of the call to fail, and how.
    pub(crate) fail_next: Option<(String, Failure)>,
    /// The call that failed.
    pub(crate) failed: Option<&'static str>,
    pub(crate) omitted: Option<Omission>,
    pub(crate) omissions: u64,
    /// The living objects of each kind.
    pub(crate) alive: BTreeMap<&'static str, BTreeSet<u64>>,
    pub(crate) messages: Vec<String>,
    /// The most bytes of a kernel's binding that drivers are to report.
    pub(crate) binding: Option<u32>,
    /// The layers that are enabled by the environment.
    pub(crate) layers: u64,
    /// Command buffers with copies, and those of them whose last command makes the copies visible to the host.
    pub(crate) copying: u64,
    pub(crate) shown: u64,
    /// What is recorded in each command buffer: whether it copies, and whether the host sees all of that.
    pub(crate) recorded: BTreeMap<u64, (bool, bool)>,
    /// The command buffers with a kernel after which no barrier is recorded yet.
    pub(crate) dispatched: BTreeSet<u64>,
    /// The semaphores that submissions have raised.
    pub(crate) raised: BTreeSet<u64>,
    /// The queues that a thread is submitting to.
    pub(crate) submitting: BTreeSet<u64>,
}

static STATE: Mutex<Option<State>> = Mutex::new(None);

/// The state, for a moment.
pub(crate) fn with<T>(work: impl FnOnce(&mut State) -> T) -> T {
    let mut state: MutexGuard<'_, Option<State>> = STATE.lock().unwrap_or_else(PoisonError::into_inner);
    work(state.get_or_insert_with(State::default))
}

/// Counts a call. Returns the result that it is to fail with, if it is.
pub(crate) fn fails(call: &'static str) -> Option<vk::Result> {
    with(|state| {
        state.calls += 1;
        if let Some((_, how)) = state.fail_next.take_if(|(name, _)| name == call) {
            state.failed = Some(call);
            return Some(how.code());
        }
        let (nth, how) = state.fail?;
        (state.calls == nth).then(|| {
            state.failed = Some(call);
            how.code()
        })
    })
}

/// Notes an object that was made.
pub(crate) fn made(kind: &'static str, handle: u64) {
    with(|state| state.alive.entry(kind).or_default().insert(handle));
}

/// Notes that an object is gone. One that nobody counts any more is not missed.
pub(crate) fn gone(kind: &'static str, handle: u64) {
    with(|state| {
        state.alive.entry(kind).or_default().remove(&handle);
        // The next one may have the same handle.
        state.raised.remove(&handle);
    });
}
