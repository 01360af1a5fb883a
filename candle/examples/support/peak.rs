//! The most memory that a part of a program takes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// How often the system is asked.
const EVERY: Duration = Duration::from_millis(1);

/// Watches how much memory is taken until it is asked for the peak.
pub(crate) struct Peak {
    used: Box<dyn Fn() -> Option<u64>>,
    before: Option<u64>,
    most: Arc<AtomicU64>,
    done: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Peak {
    /// Begins now; what the process has already does not count.
    ///
    /// `used` tells how many bytes are taken now; `None` where the system does not tell.
    pub(crate) fn watch(used: impl Fn() -> Option<u64> + Clone + Send + 'static) -> Peak {
        let (before, most, done) = (used(), Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let (shared, stop) = (Arc::clone(&most), Arc::clone(&done));
        let watched = used.clone();
        let watch = move || {
            while !stop.load(Ordering::Relaxed) {
                shared.fetch_max(watched().unwrap_or(0), Ordering::Relaxed);
                std::thread::sleep(EVERY);
            }
        };
        let thread = before.map(|_| std::thread::spawn(watch));
        Peak { used: Box::new(used), before, most, done, thread }
    }

    /// The most bytes since then; `None` where the system does not tell.
    pub(crate) fn bytes(mut self) -> Option<u64> {
        self.stop();
        let now = (self.used)()?;
        Some(self.most.load(Ordering::Relaxed).max(now).saturating_sub(self.before?))
    }

    fn stop(&mut self) {
        self.done.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // It does not panic.
            let _ = thread.join();
        }
    }
}

impl Drop for Peak {
    fn drop(&mut self) {
        self.stop();
    }
}

/// The process's memory without pages of files, which the system can drop, in bytes: `RssAnon` of Linux.
pub(crate) fn anonymous() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"))?;
    line.trim().trim_end_matches("kB").trim_end().parse::<u64>().ok()?.checked_mul(1024)
}
