//! The first touch of fresh memory, in parallel: it is then that the system backs it by pages.

/// The number of threads from which touching memory gets no faster.
const MOST_THREADS: usize = 8;

/// The size of a huge page in bytes. No two threads touch the same page.
pub(super) const HUGE_PAGE: usize = 2 << 20;

/// Makes the system back fresh memory by pages of the nodes on which the touching threads happen to run.
pub(super) fn touch(bytes: &mut [u8]) {
    let processors = std::thread::available_parallelism().map_or(1, |processors| processors.get());
    share(bytes, processors, touch_part);
}

pub(super) fn touch_part(part: &mut [u8]) {
    part.iter_mut().step_by(4096).for_each(|byte| *byte = 0);
}

/// Splits `bytes` between at most `threads` new threads. It uses no pool, since all threads of a pool may be waiting for memory
/// that is pinned here.
pub(super) fn share(bytes: &mut [u8], threads: usize, work: impl Fn(&mut [u8]) + Sync) {
    let part = bytes.len().div_ceil(threads.clamp(1, MOST_THREADS)).next_multiple_of(HUGE_PAGE).max(HUGE_PAGE);
    std::thread::scope(|scope| {
        for part in bytes.chunks_mut(part) {
            // If no thread starts, the first writer touches the part.
            let _ = std::thread::Builder::new().spawn_scoped(scope, || work(part));
        }
    });
}
