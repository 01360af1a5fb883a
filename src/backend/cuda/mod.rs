//! CUDA devices, over the driver's own calls.
//!
//! Memory, events, streams and what keeps them alive are this library's own; cudarc supplies the declarations
//! of the calls and finds them in the driver's library. A device's primary context is retained when the device
//! is opened and shared with everything else in the process that uses it; none of its settings are touched.

#![expect(unsafe_code, reason = "the driver's interface is one of raw handles and addresses")]

mod context;
mod device;
mod driver;
mod event;
mod kernels;
mod memory;
mod peers;
mod pinned;
mod reaper;
mod stream;

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use super::{Backend, Device, Found, Host};
use crate::bytes::ByteSize;
use crate::device::{DeviceId, DeviceInfo, DeviceKind};
use crate::error::{Error, Result};
pub(crate) use device::CudaDevice;
use driver::Driver;
pub(crate) use memory::DeviceMemory;
use pinned::{Cap, PinningHost};
pub(crate) use stream::CudaStream;

/// The backend of NVIDIA devices, and of `cpu` with memory that they copy from at full speed.
///
/// Finding devices loads the driver and opens none of them. Where there is no driver, or none that will do,
/// [`discover`](Backend::discover) says why; nothing panics. The driver's library is the system's, or the file
/// that [`library`](Cuda::library) or the environment variable `TENSOR_OFFLOAD_LIBCUDA` names.
///
/// ```
/// use tensor_offload::backend::{Backend, Cuda, Found};
/// for found in Cuda::new().discover() {
///     match found {
///         Found::Here(device) => println!("{}: {}, {} bytes", device.id, device.name, device.total),
///         Found::Absent { kind, why } => println!("no {kind} device: {why}"),
///     }
/// }
/// ```
pub struct Cuda {
    library: Option<PathBuf>,
    pinned_cap: Option<ByteSize>,
    host: Host,
    found: OnceLock<std::result::Result<Shared, String>>,
}

/// What the devices of one backend share.
struct Shared {
    driver: Arc<Driver>,
    devices: Vec<DeviceInfo>,
    cap: Arc<Cap>,
    open: Arc<Opened>,
}

/// The devices that are open, by number.
#[derive(Default)]
struct Opened(Mutex<BTreeMap<u32, Weak<CudaDevice>>>);

impl Opened {
    fn all(&self) -> Vec<Arc<CudaDevice>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).values().filter_map(Weak::upgrade).collect()
    }

    fn get(&self, index: u32) -> Option<Arc<CudaDevice>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get(&index).and_then(Weak::upgrade)
    }
}

impl Default for Cuda {
    fn default() -> Self {
        Cuda::new()
    }
}

impl Cuda {
    /// The CUDA devices of this system.
    pub fn new() -> Cuda {
        Cuda { library: None, pinned_cap: None, host: Host::new(), found: OnceLock::new() }
    }

    /// Names the driver's library file, for containers that keep it in an unusual place. The first driver that a
    /// process opens stays its driver.
    #[must_use]
    pub fn library(mut self, file: impl Into<PathBuf>) -> Cuda {
        self.library = Some(file.into());
        self
    }

    /// Sets how much host memory may be pinned at one time. Without it: 40 % of all on Windows; elsewhere 90 %,
    /// or all but 4 GiB where that is less, and at least 40 %.
    #[must_use]
    pub fn pinned_cap(mut self, cap: ByteSize) -> Cuda {
        self.pinned_cap = Some(cap);
        self
    }

    /// The backend of the host whose memory is pinned.
    #[must_use]
    pub fn host(mut self, host: Host) -> Cuda {
        self.host = host;
        self
    }

    fn shared(&self) -> std::result::Result<&Shared, &str> {
        let find = || {
            let driver = Driver::load(self.library.as_deref())?;
            let devices = driver.devices()?;
            let cap = Arc::new(Cap::new(self.pinned_cap));
            Ok(Shared { driver, devices, cap, open: Arc::default() })
        };
        self.found.get_or_init(find).as_ref().map_err(String::as_str)
    }
}

impl Backend for Cuda {
    fn discover(&self) -> Vec<Found> {
        match self.shared() {
            Err(why) => vec![Found::Absent { kind: DeviceKind::Cuda, why: why.to_owned() }],
            Ok(shared) => {
                let cpu = self
                    .host
                    .discover()
                    .into_iter()
                    .filter(|found| matches!(found, Found::Here(info) if info.id == DeviceId::CPU));
                shared.devices.iter().cloned().map(Found::Here).chain(cpu).collect()
            }
        }
    }

    fn open(&self, id: DeviceId) -> Result<Arc<dyn Device>> {
        let shared = self.shared().map_err(|why| Error::DeviceAbsent { device: id, why: why.to_owned() })?;
        if id == DeviceId::CPU {
            let host = self.host.open(id)?;
            return Ok(Arc::new(PinningHost::new(host, Arc::clone(&shared.open), Arc::clone(&shared.cap))));
        }
        let Some(info) = shared.devices.iter().find(|info| info.id == id) else {
            return Err(Error::UnknownDevice {
                device: id,
                known: shared.devices.iter().map(|info| info.id).collect(),
            });
        };
        let mut open = shared.open.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(device) = open.get(&id.index()).and_then(Weak::upgrade) {
            return Ok(device);
        }
        let device = Arc::new(CudaDevice::open(info.clone(), &shared.driver, Arc::clone(&shared.open))?);
        open.insert(id.index(), Arc::downgrade(&device));
        Ok(device)
    }
}

impl fmt::Debug for Cuda {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cuda")
            .field("library", &self.library)
            .field("pinned_cap", &self.pinned_cap)
            .finish_non_exhaustive()
    }
}
