//! The stand-in's own exported calls, by which a test configures the loaded driver and asks what it saw. They carry
//! JSON, because the test and the driver are two copies of this crate in one process.
#![allow(unreachable_pub, reason = "exported by name")]

use std::panic::catch_unwind;

use serde::de::DeserializeOwned;

use crate::config::Config;
use crate::fault::FaultPlan;
use crate::world::World;

/// What `standin_interface` returns: both sides must mean the same by the calls below.
pub(crate) const INTERFACE: u32 = 4;

/// # Safety
/// The pointer must be good for `len` bytes.
unsafe fn parse<T: DeserializeOwned>(json: *const u8, len: usize) -> Option<T> {
    if json.is_null() {
        return None;
    }
    // SAFETY: the caller's promise.
    serde_json::from_slice(unsafe { std::slice::from_raw_parts(json, len) }).ok()
}

/// The number of this interface.
#[unsafe(no_mangle)]
pub extern "C" fn standin_interface() -> u32 {
    INTERFACE
}

/// Starts over as the machine that the JSON describes. 0: done; 1: it could not be read; 2: the stand-in failed.
///
/// # Safety
/// The pointer must be good for `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn standin_configure(json: *const u8, len: usize) -> u32 {
    let done = catch_unwind(|| {
        // SAFETY: the caller's promise.
        let config = unsafe { parse::<Config>(json, len) }?;
        World::replace(Some(config));
        Some(())
    });
    done.map_or(2, |done| u32::from(done.is_none()))
}

/// Starts over as the same machine. 0: done; 2: the stand-in failed.
#[unsafe(no_mangle)]
pub extern "C" fn standin_reset() -> u32 {
    catch_unwind(|| World::replace(None)).map_or(2, |()| 0)
}

/// Sets what goes wrong from now on. 0: done; 1: the JSON could not be read; 2: the stand-in failed.
///
/// # Safety
/// The pointer must be good for `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn standin_fault(json: *const u8, len: usize) -> u32 {
    let done = catch_unwind(|| {
        // SAFETY: the caller's promise.
        let plan = unsafe { parse::<FaultPlan>(json, len) }?;
        World::plan(plan);
        Some(())
    });
    done.map_or(2, |done| u32::from(done.is_none()))
}

/// The end of the last piece of work in counted nanoseconds; later work begins no earlier. 0 when the stand-in failed.
#[unsafe(no_mangle)]
pub extern "C" fn standin_mark() -> u64 {
    catch_unwind(World::mark).unwrap_or(0)
}

/// Hands the report to a function, as JSON. 0: done; 2: the stand-in failed.
///
/// # Safety
/// The function must be callable with the context that is passed on to it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn standin_report(
    context: *mut std::ffi::c_void,
    take: unsafe extern "C" fn(*mut std::ffi::c_void, *const u8, usize),
) -> u32 {
    let Ok(json) = catch_unwind(|| serde_json::to_vec(&World::report()).unwrap_or_default()) else { return 2 };
    // SAFETY: the caller's promise.
    unsafe { take(context, json.as_ptr(), json.len()) };
    0
}

/// Lets the driver's unversioned name lead here too: the loader finds it first in the folder that this library's own
/// search path names. 0: done; 1: it leads elsewhere.
#[unsafe(no_mangle)]
pub extern "C" fn standin_take_names() -> u32 {
    catch_unwind(|| {
        // SAFETY: opening this library again runs nothing; another one is what the program would open anyway.
        let Ok(library) = (unsafe { libloading::Library::new("libcuda.so") }) else { return 1 };
        // SAFETY: the type is the symbol's own.
        let ours = unsafe { library.get::<extern "C" fn() -> u32>(b"standin_interface\0") }.is_ok();
        std::mem::forget(library);
        u32::from(!ours)
    })
    .unwrap_or(2)
}
