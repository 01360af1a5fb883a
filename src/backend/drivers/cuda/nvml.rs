//! NVIDIA's management library, for information about devices that are not open. If it is missing, old or refuses, less is
//! known, but nothing fails.

use std::ffi::{CString, OsStr, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::path::Path;

use libloading::{Library, Symbol};

use crate::device::{NvLink, NvLinkEnd, PcieLink};

/// The library's name, as the driver installs it.
const NAME: &str = if cfg!(windows) { "nvml.dll" } else { "libnvidia-ml.so.1" };

/// More NVLinks than any device has; the library reports where they end.
const MOST_NVLINKS: c_uint = 64;

type Handle = *mut c_void;
type Get<T> = unsafe extern "C" fn(Handle, *mut T) -> c_int;
type GetOfLink<T> = unsafe extern "C" fn(Handle, c_uint, *mut T) -> c_int;

/// `nvmlMemory_t`.
#[repr(C)]
#[derive(Default)]
struct Memory {
    total: c_ulonglong,
    free: c_ulonglong,
    used: c_ulonglong,
}

/// `nvmlPciInfo_t`.
#[repr(C)]
#[derive(Default)]
struct PciInfo {
    legacy_bus_id: [u8; 16],
    domain: c_uint,
    bus: c_uint,
    device: c_uint,
    ids: [c_uint; 2],
    bus_id: [u8; 32],
}

/// The library, loaded and initialised.
pub(in crate::backend::drivers) struct Nvml(Library);

impl Nvml {
    /// Loads the library from `file`, or by its name.
    ///
    /// # Errors
    /// The reason, for the log.
    pub(in crate::backend::drivers) fn load(file: Option<&Path>) -> Result<Nvml, String> {
        let name = file.map_or(OsStr::new(NAME), Path::as_os_str);
        // SAFETY: loading the library runs its initialisers, which is what opening it means.
        let library = unsafe { Library::new(name) }.map_err(|error| error.to_string())?;
        // SAFETY: the documented type of this call.
        let init = unsafe { library.get::<unsafe extern "C" fn() -> c_int>(b"nvmlInit_v2") };
        let init = init.map_err(|error| format!("it has no nvmlInit_v2: {error}"))?;
        // SAFETY: takes nothing; each success is paired with a shutdown by `drop`.
        match unsafe { init() } {
            0 => Ok(Nvml(library)),
            refused => Err(format!("nvmlInit_v2 returned {refused}")),
        }
    }

    /// The free bytes of the device with this UUID and `total` bytes, without opening it.
    ///
    /// `None` if the library reports a different total: a CUDA device may be a part of a card.
    pub(in crate::backend::drivers) fn free(&self, uuid: &str, total: u64) -> Option<u64> {
        let memory: Memory = self.get(self.device(uuid)?, "nvmlDeviceGetMemoryInfo")?;
        let kept_back = memory.total.checked_sub(total)?;
        (kept_back <= memory.total / 8).then(|| memory.free.min(total))
    }

    /// The PCIe link of the device.
    pub(in crate::backend::drivers) fn pcie(&self, uuid: &str) -> Option<PcieLink> {
        let device = self.device(uuid)?;
        let get = |call| self.get::<c_uint>(device, call);
        Some(PcieLink {
            max_generation: get("nvmlDeviceGetMaxPcieLinkGeneration")?,
            max_width: get("nvmlDeviceGetMaxPcieLinkWidth")?,
            generation: get("nvmlDeviceGetCurrPcieLinkGeneration")?,
            width: get("nvmlDeviceGetCurrPcieLinkWidth")?,
        })
    }

    /// The NVLinks of the device that are up.
    pub(in crate::backend::drivers) fn nvlinks(&self, uuid: &str) -> Vec<NvLink> {
        let Some(device) = self.device(uuid) else { return Vec::new() };
        let states = (0..MOST_NVLINKS).map_while(|link| {
            let up = self.get_of_link::<c_uint>(device, link, "nvmlDeviceGetNvLinkState")?;
            Some((link, up != 0))
        });
        let end = |link| {
            let kind = self.get_of_link::<c_uint>(device, link, "nvmlDeviceGetNvLinkRemoteDeviceType");
            let end = match kind {
                Some(0) => NvLinkEnd::Gpu,
                Some(2) => NvLinkEnd::Switch,
                _ => NvLinkEnd::Other,
            };
            let pci: PciInfo = self.get_of_link(device, link, "nvmlDeviceGetNvLinkRemotePciInfo_v2")?;
            Some(NvLink::new(end, format!("{:08x}:{:02x}:{:02x}.0", pci.domain, pci.bus, pci.device)))
        };
        states.filter(|&(_, up)| up).filter_map(|(link, _)| end(link)).collect()
    }

    fn device(&self, uuid: &str) -> Option<Handle> {
        let uuid = CString::new(uuid).ok()?;
        let call: Symbol<'_, unsafe extern "C" fn(*const c_char, *mut Handle) -> c_int> =
            // SAFETY: the documented type of this call.
            unsafe { self.0.get(b"nvmlDeviceGetHandleByUUID") }.ok()?;
        let mut device = std::ptr::null_mut();
        // SAFETY: a text that ends in zero, and a pointer to a living handle.
        (unsafe { call(uuid.as_ptr(), &raw mut device) } == 0).then_some(device)
    }

    /// Queries one value of a device. `T` must be the type that the call of this name writes.
    fn get<T: Default>(&self, device: Handle, call: &str) -> Option<T> {
        // SAFETY: all calls used with this function have this type, by their documentation.
        let call: Symbol<'_, Get<T>> = unsafe { self.0.get(call.as_bytes()) }.ok()?;
        let mut value = T::default();
        // SAFETY: a handle of this library, and a pointer to a living value of the call's type.
        (unsafe { call(device, &raw mut value) } == 0).then_some(value)
    }

    /// As [`get`](Nvml::get), for one NVLink of the device.
    fn get_of_link<T: Default>(&self, device: Handle, link: c_uint, call: &str) -> Option<T> {
        // SAFETY: as in `get`.
        let call: Symbol<'_, GetOfLink<T>> = unsafe { self.0.get(call.as_bytes()) }.ok()?;
        let mut value = T::default();
        // SAFETY: as in `get`.
        (unsafe { call(device, link, &raw mut value) } == 0).then_some(value)
    }
}

impl Drop for Nvml {
    fn drop(&mut self) {
        // SAFETY: the documented type of this call.
        if let Ok(shutdown) = unsafe { self.0.get::<unsafe extern "C" fn() -> c_int>(b"nvmlShutdown") } {
            // SAFETY: takes nothing; pairs with the `nvmlInit_v2` of `load`.
            unsafe { shutdown() };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structures_are_as_large_as_the_header_says() {
        assert_eq!((size_of::<Memory>(), size_of::<PciInfo>()), (24, 68));
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn a_library_that_lacks_the_calls_is_no_management_library() {
        assert!(Nvml::load(Some(Path::new("libm.so.6"))).is_err());
        assert!(Nvml::load(Some(Path::new("/nowhere/libnvidia-ml.so.1"))).is_err());
    }
}
