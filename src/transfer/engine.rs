//! The staging engine of one device, shared by all its streamers: pinned buffers, and a lane for each device whose bytes
//! must pass through them.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use rayon::{ThreadPool, ThreadPoolBuilder};

use super::lane::StagingLane;
use crate::backend::process::Process;
use crate::backend::{Device, Role};
use crate::device::DeviceId;
use crate::error::{Error, Result};
use crate::limits::{STAGING_BUFFERS, STAGING_BYTES};
use crate::staging::Pool;

/// The most threads that fill one pinned buffer. A few reach the speed of the host's memory.
const THREADS: usize = 4;

/// The staging engine of one open device. It lives as long as a streamer uses it.
pub(crate) struct Engine {
    device: Arc<dyn Device>,
    shared: Shared,
    lanes: Mutex<BTreeMap<DeviceId, Arc<StagingLane>>>,
    clients: AtomicU64,
    process: Process,
}

/// The resources that the lanes share.
#[derive(Clone)]
pub(super) struct Shared {
    pub(super) pool: Arc<Pool>,
    pub(super) threads: Arc<ThreadPool>,
}

/// All live engines. They are kept here and not in the devices, since a device belongs to its backend, perhaps in another
/// crate, and knows nothing of streamers.
static ENGINES: Mutex<Vec<Weak<Engine>>> = Mutex::new(Vec::new());

impl Engine {
    /// The engine of `device`. The first call creates it, with pinned buffers of `host` near the device.
    ///
    /// # Errors
    /// When the system gives no threads.
    pub(crate) fn of(device: &Arc<dyn Device>, host: &Arc<dyn Device>) -> Result<Arc<Engine>> {
        let mut engines = ENGINES.lock().unwrap_or_else(PoisonError::into_inner);
        engines.retain(|engine| engine.strong_count() > 0);
        let same = |engine: &Arc<Engine>| {
            // A fork's copy of an engine has no threads.
            engine.process.is_current() && std::ptr::addr_eq(Arc::as_ptr(&engine.device), Arc::as_ptr(device))
        };
        if let Some(engine) = engines.iter().filter_map(Weak::upgrade).find(same) {
            return Ok(engine);
        }
        let id = device.id();
        let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
        let threads = ThreadPoolBuilder::new().num_threads(cores.min(THREADS));
        let threads = threads.thread_name(move |thread| format!("{id} staging {thread}")).build();
        let threads = threads.map_err(std::io::Error::other).map_err(Error::io("start threads for", id.to_string()))?;
        let pool = Arc::new(Pool::new(Arc::clone(host), id, STAGING_BYTES, STAGING_BUFFERS));
        let engine = Arc::new(Engine {
            device: Arc::clone(device),
            shared: Shared { pool, threads: Arc::new(threads) },
            lanes: Mutex::default(),
            clients: AtomicU64::new(0),
            process: Process::current(),
        });
        engines.push(Arc::downgrade(&engine));
        Ok(engine)
    }

    /// A new client number, which identifies one streamer.
    pub(crate) fn client(&self) -> u64 {
        self.clients.fetch_add(1, Ordering::Relaxed)
    }

    /// The lane for bytes from `source`.
    ///
    /// # Errors
    /// When there is no stream or no thread for it.
    pub(crate) fn lane(&self, source: &Arc<dyn Device>) -> Result<Arc<StagingLane>> {
        let mut lanes = self.lanes.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(lane) = lanes.get(&source.id()) {
            return Ok(Arc::clone(lane));
        }
        let (up, down) = (self.device.stream(Role::Upload)?, source.stream(Role::Download)?);
        let lane = Arc::new(StagingLane::start(Arc::clone(&self.device), up, down, source.id(), self.shared.clone())?);
        lanes.insert(source.id(), Arc::clone(&lane));
        Ok(lane)
    }
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine").field("device", &self.device.id()).finish_non_exhaustive()
    }
}
