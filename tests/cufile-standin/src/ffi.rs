//! The exported calls: the library's, and the stand-in's own, which carry JSON.
#![allow(non_snake_case, reason = "the names are the library's")]
#![allow(unreachable_pub, reason = "exported by name")]
#![allow(clippy::missing_safety_doc, reason = "the contracts are the library's own")]

use std::ffi::{c_int, c_uint, c_void};

use serde::de::DeserializeOwned;

use crate::world::{Outcome, WORLD};

/// `CUfileError_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Status {
    status: c_int,
    driver: c_int,
}

/// `CUfileDescr_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Description {
    kind: c_int,
    /// The descriptor, in the lower half of the union.
    file: u64,
    operations: *const c_void,
}

/// `CUfileDrvProps_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Properties {
    major: c_uint,
    minor: c_uint,
    poll_threshold: usize,
    most_direct: usize,
    supported: c_uint,
    control: c_uint,
    features: c_uint,
    rest: [c_uint; 5],
}

fn status(outcome: Outcome) -> Status {
    match outcome {
        Ok(()) => Status { status: 0, driver: 0 },
        Err(failure) => Status { status: failure.status, driver: failure.driver },
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuFileDriverOpen() -> Status {
    status(WORLD.open())
}

#[unsafe(no_mangle)]
pub extern "C" fn cuFileDriverClose_v2() -> Status {
    status(WORLD.close())
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileGetVersion(version: *mut c_int) -> Status {
    // SAFETY: the caller's promise.
    unsafe { version.write(1140) };
    status(Ok(()))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileDriverGetProperties(properties: *mut Properties) -> Status {
    status(WORLD.properties().map(|config| {
        let (major, minor) = config.nvidia_fs;
        let told = Properties {
            major,
            minor,
            poll_threshold: 4,
            most_direct: 16384,
            supported: config.supported,
            control: u32::from(config.allow_compat) << 1,
            features: u32::from(config.peer_to_peer) << 4,
            rest: [0; 5],
        };
        // SAFETY: the caller's promise.
        unsafe { properties.write(told) };
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileHandleRegister(handle: *mut *mut c_void, description: *mut Description) -> Status {
    // SAFETY: the caller's promise.
    let Description { kind, file, .. } = unsafe { *description };
    if kind != 1 {
        return Status { status: 5022, driver: 0 };
    }
    // SAFETY: the caller's promise.
    status(WORLD.register(file as u32 as i32).map(|number| unsafe { handle.write(number as usize as *mut c_void) }))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuFileHandleDeregister(handle: *mut c_void) {
    WORLD.deregister(handle.addr() as u64);
}

#[unsafe(no_mangle)]
pub extern "C" fn cuFileBufRegister(address: *const c_void, bytes: usize, _flags: c_int) -> Status {
    status(WORLD.register_memory(address.addr() as u64, bytes))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuFileBufDeregister(address: *const c_void) -> Status {
    status(WORLD.deregister_memory(address.addr() as u64))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuFileRead(handle: *mut c_void, base: *mut c_void, bytes: usize, at: i64, offset: i64) -> isize {
    let (Ok(at), Ok(offset)) = (u64::try_from(at), u64::try_from(offset)) else { return -5022 };
    match WORLD.read(handle.addr() as u64, base.addr() as u64, bytes, at, offset) {
        Ok(read) => read.cast_signed(),
        Err(failure) => {
            // SAFETY: the place of this thread's error.
            unsafe { *libc::__errno_location() = failure.errno };
            -(failure.status as isize)
        }
    }
}

/// # Safety
/// The pointer must be good for `len` bytes.
unsafe fn parse<T: DeserializeOwned>(json: *const u8, len: usize) -> Option<T> {
    // SAFETY: the caller's promise.
    serde_json::from_slice(unsafe { std::slice::from_raw_parts(json, len) }).ok()
}

/// Starts over as the JSON says. 0: done; 1: it could not be read.
///
/// # Safety
/// The pointer must be good for `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn standin_cufile_configure(json: *const u8, len: usize) -> u32 {
    // SAFETY: the caller's promise.
    unsafe { parse(json, len) }.map(|config| WORLD.configure(config)).map_or(1, |()| 0)
}

/// Sets what goes wrong from now on. 0: done; 1: it could not be read.
///
/// # Safety
/// The pointer must be good for `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn standin_cufile_fault(json: *const u8, len: usize) -> u32 {
    // SAFETY: the caller's promise.
    unsafe { parse(json, len) }.map(|faults| WORLD.fault(faults)).map_or(1, |()| 0)
}

/// Hands the report to a function, as JSON.
///
/// # Safety
/// The function must be callable with the context that is passed on to it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn standin_cufile_report(
    context: *mut c_void,
    take: unsafe extern "C" fn(*mut c_void, *const u8, usize),
) {
    let json = serde_json::to_vec(&WORLD.report()).unwrap_or_default();
    // SAFETY: the caller's promise.
    unsafe { take(context, json.as_ptr(), json.len()) };
}
