//! The calls of NVIDIA's management library, over the same machine: this library stands in for that one, too.
#![allow(non_snake_case, reason = "the names are the library's")]
#![allow(unreachable_pub, reason = "exported by name")]
#![allow(clippy::missing_safety_doc, reason = "the contracts are the library's own")]

use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};

use crate::code::{Code, Outcome};
use crate::config::DeviceConfig;
use crate::ffi::{give, handle, number};
use crate::vendor::exported;
use crate::world::Call;

/// `nvmlMemory_t`.
#[repr(C)]
pub struct Memory {
    total: c_ulonglong,
    free: c_ulonglong,
    used: c_ulonglong,
}

/// `nvmlPciInfo_t`.
#[repr(C)]
pub struct PciInfo {
    legacy_bus_id: [u8; 16],
    domain: c_uint,
    bus: c_uint,
    device: c_uint,
    ids: [c_uint; 2],
    bus_id: [u8; 32],
}

/// The device behind a handle, which is its number and one.
fn device<'w>(call: &Call<'w>, device: *mut c_void) -> Outcome<(usize, &'w DeviceConfig)> {
    let index = number(device).checked_sub(1).ok_or(Code::INVALID_VALUE)? as usize;
    let described = call.world.config().devices.get(index).ok_or(Code::INVALID_VALUE)?;
    Ok((index, described))
}

fn by_uuid(call: &Call<'_>, uuid: &str) -> Outcome<*mut c_void> {
    let text = |device: &DeviceConfig| {
        let hex: String = device.uuid.iter().map(|byte| format!("{byte:02x}")).collect();
        format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
    };
    let index = call.world.config().devices.iter().position(|device| text(device) == uuid);
    index.map(|index| handle(index as u64 + 1)).ok_or(Code::NOT_FOUND)
}

/// The number of the device that an NVLink leads to, or more than there are for a switch.
fn nvlink(call: &Call<'_>, at: *mut c_void, link: c_uint) -> Outcome<usize> {
    device(call, at)?.1.nvlinks.get(link as usize).copied().ok_or(Code::INVALID_VALUE)
}

#[allow(unused_unsafe, reason = "two calls take nothing")]
mod calls {
    use super::*;

    exported! { Cuda:
        fn nvmlInit_v2() |call| { let _ = call; Ok(()) };
        fn nvmlShutdown() |call| { let _ = call; Ok(()) };
        fn nvmlDeviceGetHandleByUUID(uuid: *const c_char, at: *mut *mut c_void) |call| {
            if uuid.is_null() {
                return Err(Code::INVALID_VALUE);
            }
            give(at, || by_uuid(call, &CStr::from_ptr(uuid).to_string_lossy()))
        };
        fn nvmlDeviceGetMemoryInfo(of: *mut c_void, at: *mut Memory) |call| {
            let (index, DeviceConfig { total, .. }) = device(call, of)?;
            let used = call.world.state().devices[index].used.min(*total);
            give(at, || Ok(Memory { total: *total, free: total - used, used }))
        };
        fn nvmlDeviceGetMaxPcieLinkGeneration(of: *mut c_void, at: *mut c_uint) |call| {
            give(at, || Ok(device(call, of)?.1.pcie.max_generation))
        };
        fn nvmlDeviceGetMaxPcieLinkWidth(of: *mut c_void, at: *mut c_uint) |call| {
            give(at, || Ok(device(call, of)?.1.pcie.max_width))
        };
        fn nvmlDeviceGetCurrPcieLinkGeneration(of: *mut c_void, at: *mut c_uint) |call| {
            give(at, || Ok(device(call, of)?.1.pcie.generation))
        };
        fn nvmlDeviceGetCurrPcieLinkWidth(of: *mut c_void, at: *mut c_uint) |call| {
            give(at, || Ok(device(call, of)?.1.pcie.width))
        };
        fn nvmlDeviceGetNvLinkState(of: *mut c_void, link: c_uint, up: *mut c_uint) |call| {
            give(up, || nvlink(call, of, link).map(|_| 1))
        };
        fn nvmlDeviceGetNvLinkRemoteDeviceType(of: *mut c_void, link: c_uint, kind: *mut c_int) |call| {
            give(kind, || nvlink(call, of, link).map(|to| if to < call.world.config().devices.len() { 0 } else { 2 }))
        };
        fn nvmlDeviceGetNvLinkRemotePciInfo_v2(of: *mut c_void, link: c_uint, at: *mut PciInfo) |call| {
            let to = nvlink(call, of, link)?;
            let (domain, bus, device) = call.world.config().devices.get(to).map_or((0, 0xff, 0), DeviceConfig::pci_parts);
            let [domain, bus, device] = [domain, bus, device].map(i32::unsigned_abs);
            give(at, || Ok(PciInfo { legacy_bus_id: [0; 16], domain, bus, device, ids: [0; 2], bus_id: [0; 32] }))
        };
    }
}
