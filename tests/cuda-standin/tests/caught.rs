//! Programs with a bug in each: the stand-in names the bug, and nothing else.

mod common;

use std::ffi::c_void;

use common::{Cuda, MIB, pattern};
use cuda_standin::{Config, Driver, MemoryMode, Rule, session};
use cudarc::driver::result;
use cudarc::driver::sys::{self, CUresult};

const LEN: usize = MIB as usize;

/// Late enough that no work starts before the host waits for it.
fn late() -> Config {
    Config::with_devices(&[64 * MIB, 32 * MIB]).late_micros(10_000_000)
}

/// The rule was broken by this call, and no other rule was.
#[track_caller]
fn assert_caught(driver: &Driver, rule: Rule, call: &str) {
    let report = driver.report();
    let by = report.violations.iter().chain(&report.leaks).find(|v| v.rule == rule && v.call == call);
    assert!(by.is_some(), "no {} by {call} in:\n{report}", rule.name());
    assert!(report.violations.iter().all(|v| v.rule == rule), "more than {}:\n{report}", rule.name());
}

#[test]
fn a_skipped_wait() {
    let standin = session(&late());
    let cuda = Cuda::open(0);
    let (copies, computes) = (cuda.stream(), cuda.stream());
    let (source, device, other) = (cuda.pin(&pattern(LEN, 1)), cuda.alloc(LEN), cuda.alloc(LEN));
    cuda.upload(device, source, LEN, copies);
    let _landed = cuda.record(copies);
    cuda.copy(other, device, LEN, computes);
    assert_caught(&standin, Rule::Unordered, "cuMemcpyDtoDAsync_v2");
}

/// A destroyed stream's place in the clocks is given away only once the host has seen the end of its work.
#[test]
fn a_stream_made_after_another_was_destroyed_is_not_ordered_after_it() {
    let standin = session(&late());
    let cuda = Cuda::open(0);
    let (source, device) = (cuda.pin(&pattern(LEN, 1)), cuda.alloc(LEN));
    // One whose work has been seen leaves its place to the next, whose work is new.
    let first = cuda.stream();
    cuda.upload(device, source, LEN, first);
    cuda.synchronize(first);
    cuda.destroy(first);
    let second = cuda.stream();
    cuda.upload(device, source, LEN, second);
    cuda.destroy(second);
    assert_eq!(standin.report().violations.len(), 0);
    let third = cuda.stream();
    cuda.fill(device, 0, LEN, third);
    assert_caught(&standin, Rule::Unordered, "cuMemsetD8Async");
}

#[test]
fn a_wait_for_an_event_that_was_recorded_too_early() {
    let standin = session(&late());
    let cuda = Cuda::open(0);
    let (copies, computes) = (cuda.stream(), cuda.stream());
    let (source, device) = (cuda.pin(&pattern(LEN, 1)), cuda.alloc(LEN));
    let landed = cuda.record(copies);
    cuda.upload(device, source, LEN, copies);
    cuda.wait(computes, landed);
    cuda.fill(device + 100, 0, 1, computes);
    assert_caught(&standin, Rule::Unordered, "cuMemsetD8Async");
}

#[test]
fn a_slot_refilled_while_a_reader_is_not_waited_for() {
    let standin = session(&late());
    let cuda = Cuda::open(0);
    let (copies, one, two) = (cuda.stream(), cuda.stream(), cuda.stream());
    let (source, slot, out) = (cuda.pin(&pattern(LEN, 1)), cuda.alloc(LEN), cuda.alloc(2 * LEN));
    cuda.upload(slot, source, LEN, copies);
    let landed = cuda.record(copies);
    cuda.wait(one, landed);
    cuda.wait(two, landed);
    cuda.copy(out, slot, LEN, one);
    cuda.copy(out + LEN as u64, slot, LEN, two);
    // Of two readers only the last is waited for.
    let read = cuda.record(two);
    cuda.wait(copies, read);
    cuda.upload(slot, source, LEN, copies);
    assert_caught(&standin, Rule::Unordered, "cuMemcpyHtoDAsync_v2");
}

#[test]
fn a_pinned_source_refilled_too_early() {
    let standin = session(&late());
    let cuda = Cuda::open(0);
    let stream = cuda.stream();
    let (source, device) = (cuda.pin(&pattern(LEN, 1)), cuda.alloc(LEN));
    cuda.upload(device, source, LEN, stream);
    // SAFETY: pinned above, and as long.
    unsafe { source.cast::<u8>().add(LEN / 2).write(0) };
    cuda.synchronize(stream);
    assert_caught(&standin, Rule::SourceChanged, "cuMemcpyHtoDAsync_v2");
}

#[test]
fn a_pinned_target_read_by_another_copy_without_an_order() {
    let standin = session(&late());
    let cuda = Cuda::open(0);
    let (down, up) = (cuda.stream(), cuda.stream());
    let (staging, a, b) = (cuda.pin(&pattern(LEN, 1)), cuda.alloc(LEN), cuda.alloc(LEN));
    cuda.download(staging, a, LEN, down);
    cuda.upload(b, staging, LEN, up);
    // The source may be seen to change as well, when the two copies really run at once.
    assert_eq!(standin.report().count(Rule::Unordered), 1);
}

#[test]
fn the_wrong_context_is_current() {
    let standin = session(&late());
    let (one, two) = (Cuda::open(0), Cuda::open(1));
    one.bind();
    let (source, device, stream) = (one.pin(&pattern(LEN, 1)), one.alloc(LEN), one.stream());
    two.bind();
    assert_eq!(one.try_upload(device, source, LEN, stream), CUresult::CUDA_ERROR_INVALID_HANDLE);
    assert_caught(&standin, Rule::WrongContext, "cuMemcpyHtoDAsync_v2");
}

#[test]
fn memory_and_events_of_another_context() {
    let standin = session(&late());
    let (one, two) = (Cuda::open(0), Cuda::open(1));
    one.bind();
    let (device, event) = (one.alloc(LEN), one.record(one.stream()));
    two.bind();
    let stream = two.stream();
    // SAFETY: the stand-in checks what it is given.
    unsafe {
        assert!(result::free_sync(device).is_err());
        assert!(result::memset_d8_async(device, 0, LEN, stream).is_err());
        assert!(result::event::record(event, stream).is_err());
    }
    assert_caught(&standin, Rule::WrongContext, "cuMemFree_v2");
    assert_caught(&standin, Rule::WrongContext, "cuMemsetD8Async");
    assert_caught(&standin, Rule::WrongContext, "cuEventRecord");
}

#[test]
fn a_thread_without_a_context() {
    let standin = session(&late());
    let cuda = Cuda::open(0);
    let device = cuda.alloc(LEN);
    // SAFETY: the stand-in checks what it is given.
    let freed = std::thread::spawn(move || unsafe { result::free_sync(device) }).join().unwrap();
    assert_eq!(freed.unwrap_err().0, CUresult::CUDA_ERROR_INVALID_CONTEXT);
    assert_caught(&standin, Rule::NoContext, "cuMemFree_v2");
}

#[test]
fn leaks_are_named_by_the_calls_that_made_them() {
    let standin = session(&late());
    let cuda = Cuda::open(0);
    let _ = (cuda.alloc(LEN), cuda.alloc(LEN), cuda.pin(&[0; 100]), cuda.record(cuda.stream()));
    assert_caught(&standin, Rule::Leak, "cuMemAlloc_v2");
    let report = standin.report();
    assert!(report.is_lawful() && !report.is_clean());
    assert_eq!((report.live_allocations, report.live_bytes, report.live_pinned), (2, 2 * MIB, 1));
    assert_eq!((report.live_streams, report.live_events), (1, 1));
    assert_eq!(report.count(Rule::Leak), 5);
    // When the context goes, what is alive in it is lost for good.
    cuda.close();
    assert_caught(&standin, Rule::Leak, "cuDevicePrimaryCtxRelease_v2");
}

#[test]
fn memory_used_after_it_was_freed() {
    for memory in [MemoryMode::Quarantine, MemoryMode::Reuse] {
        let standin = session(&late().memory(memory));
        let cuda = Cuda::open(0);
        let (stream, source, device) = (cuda.stream(), cuda.pin(&pattern(LEN, 1)), cuda.alloc(LEN));
        cuda.free(device);
        assert_eq!(cuda.try_upload(device + 10, source, 10, stream), CUresult::CUDA_ERROR_INVALID_VALUE);
        assert_caught(&standin, Rule::UseAfterFree, "cuMemcpyHtoDAsync_v2");
    }
}

#[test]
fn pinned_memory_used_after_it_was_freed_and_freed_twice() {
    let standin = session(&late());
    let cuda = Cuda::open(0);
    let (stream, source, device) = (cuda.stream(), cuda.pin(&pattern(LEN, 1)), cuda.alloc(LEN));
    cuda.unpin(source);
    let inside = source.wrapping_byte_add(10);
    assert_eq!(cuda.try_upload(device, inside, 10, stream), CUresult::CUDA_ERROR_INVALID_VALUE);
    assert_caught(&standin, Rule::UseAfterFree, "cuMemcpyHtoDAsync_v2");
    standin.reset();
    let cuda = Cuda::open(0);
    let source = cuda.pin(&pattern(LEN, 1));
    cuda.unpin(source);
    // SAFETY: the stand-in checks what it is given.
    assert!(unsafe { result::free_host(source) }.is_err());
    assert_caught(&standin, Rule::DoubleFree, "cuMemFreeHost");
}

#[test]
fn memory_freed_twice_or_from_its_middle() {
    let standin = session(&late());
    let cuda = Cuda::open(0);
    let device = cuda.alloc(LEN);
    cuda.free(device);
    // SAFETY: the stand-in checks what it is given.
    assert!(unsafe { result::free_sync(device) }.is_err());
    assert_caught(&standin, Rule::DoubleFree, "cuMemFree_v2");

    standin.reset();
    let cuda = Cuda::open(0);
    let (device, pinned) = (cuda.alloc(LEN), cuda.pin(&[0; 100]));
    // SAFETY: the stand-in checks what it is given.
    assert!(unsafe { result::free_sync(device + 512) }.is_err());
    assert_caught(&standin, Rule::BadFree, "cuMemFree_v2");
    // SAFETY: the stand-in checks what it is given.
    assert!(unsafe { sys::cuMemHostUnregister(pinned) }.result().is_err());
    assert_caught(&standin, Rule::BadFree, "cuMemHostUnregister");
}

#[test]
fn a_copy_past_the_end() {
    let standin = session(&late());
    let cuda = Cuda::open(0);
    let (stream, source) = (cuda.stream(), cuda.pin(&pattern(LEN, 1)));
    let (device, _neighbour) = (cuda.alloc(LEN), cuda.alloc(LEN));
    cuda.upload(device + 1, source, LEN - 1, stream);
    assert_eq!(cuda.try_upload(device + 1, source, LEN, stream), CUresult::CUDA_ERROR_INVALID_VALUE);
    assert_caught(&standin, Rule::OutOfBounds, "cuMemcpyHtoDAsync_v2");
    // SAFETY: the stand-in checks what it is given.
    assert!(unsafe { result::memset_d8_async(device + LEN as u64, 0, 1, stream) }.is_err());
    assert_caught(&standin, Rule::OutOfBounds, "cuMemsetD8Async");
}

#[test]
fn a_copy_onto_itself() {
    let standin = session(&late());
    let cuda = Cuda::open(0);
    let (stream, device) = (cuda.stream(), cuda.alloc(LEN));
    cuda.copy(device + 1024, device, 1024, stream);
    cuda.copy(device + 1023, device, 1024, stream);
    assert_caught(&standin, Rule::Overlap, "cuMemcpyDtoDAsync_v2");
    assert_eq!(standin.report().count(Rule::Overlap), 1);
}

#[test]
fn a_pinned_range_past_the_end() {
    let standin = session(&late());
    let cuda = Cuda::open(0);
    let (stream, source, device) = (cuda.stream(), cuda.pin(&pattern(LEN, 1)), cuda.alloc(LEN));
    let inside = source.wrapping_byte_add(1);
    assert_eq!(cuda.try_upload(device, inside, LEN, stream), CUresult::CUDA_ERROR_INVALID_VALUE);
    assert_caught(&standin, Rule::OutOfBounds, "cuMemcpyHtoDAsync_v2");
}

#[test]
fn a_range_that_is_pinned_in_part() {
    let standin = session(&late());
    let cuda = Cuda::open(0);
    let (stream, device, mut bytes) = (cuda.stream(), cuda.alloc(LEN), pattern(LEN, 1));
    let at = bytes.as_mut_ptr().cast();
    // SAFETY: the vector outlives the registration.
    unsafe { sys::cuMemHostRegister_v2(at, LEN / 2, sys::CU_MEMHOSTREGISTER_PORTABLE) }.result().unwrap();
    assert_eq!(cuda.try_upload(device, at, LEN, stream), CUresult::CUDA_ERROR_INVALID_VALUE);
    assert_caught(&standin, Rule::PartlyPinned, "cuMemcpyHtoDAsync_v2");
    // SAFETY: registered above.
    unsafe { sys::cuMemHostUnregister(at) }.result().unwrap();
}

#[test]
fn pinned_memory_that_is_not_portable() {
    let standin = session(&late());
    let (one, two) = (Cuda::open(0), Cuda::open(1));
    one.bind();
    // SAFETY: the context is current.
    let pinned = unsafe { result::malloc_host(LEN, 0).unwrap() };
    two.bind();
    let (stream, device) = (two.stream(), two.alloc(LEN));
    two.upload(device, pinned, LEN, stream);
    assert_caught(&standin, Rule::NotPortable, "cuMemcpyHtoDAsync_v2");
}

#[test]
fn memory_freed_before_the_host_has_seen_the_end_of_its_uses() {
    let standin = session(&late());
    let cuda = Cuda::open(0);
    let (stream, source, device) = (cuda.stream(), cuda.pin(&pattern(LEN, 1)), cuda.alloc(LEN));
    cuda.upload(device, source, LEN, stream);
    cuda.free(device);
    assert_caught(&standin, Rule::FreeInUse, "cuMemFree_v2");
    standin.reset();
    let cuda = Cuda::open(0);
    let (stream, source, device) = (cuda.stream(), cuda.pin(&pattern(LEN, 1)), cuda.alloc(LEN));
    cuda.upload(device, source, LEN, stream);
    cuda.unpin(source);
    assert_caught(&standin, Rule::FreeInUse, "cuMemFreeHost");
}

#[test]
fn memory_freed_on_a_stream_that_does_not_follow_its_user() {
    let standin = session(&late());
    let cuda = Cuda::open(0);
    let (user, owner) = (cuda.stream(), cuda.stream());
    // SAFETY: the stream is alive.
    let device = unsafe { result::malloc_async(owner, LEN).unwrap() };
    let allocated = cuda.record(owner);
    cuda.wait(user, allocated);
    cuda.fill(device, 1, LEN, user);
    // SAFETY: allocated above.
    unsafe { result::free_async(device, owner).unwrap() };
    assert_caught(&standin, Rule::FreeInUse, "cuMemFreeAsync");
}

#[test]
fn stream_ordered_memory_used_before_it_is_there() {
    let standin = session(&late());
    let cuda = Cuda::open(0);
    let (user, owner) = (cuda.stream(), cuda.stream());
    // SAFETY: the stream is alive.
    let device = unsafe { result::malloc_async(owner, LEN).unwrap() };
    cuda.fill(device, 1, LEN, user);
    assert_caught(&standin, Rule::Unordered, "cuMemsetD8Async");
}

#[test]
fn a_range_handed_out_again_while_its_former_user_runs() {
    let standin = session(&late().memory(MemoryMode::Reuse));
    let cuda = Cuda::open(0);
    let (former, later) = (cuda.stream(), cuda.stream());
    let device = cuda.alloc(LEN);
    cuda.fill(device, 1, LEN, former);
    cuda.free(device);
    let again = cuda.alloc(LEN);
    assert_eq!(again, device, "what was freed last comes first");
    cuda.fill(again, 2, LEN, later);
    let report = standin.report();
    let rules: Vec<(Rule, &str)> = report.violations.iter().map(|v| (v.rule, v.call.as_str())).collect();
    assert_eq!(rules, [(Rule::ReusedUnordered, "cuMemsetD8Async"), (Rule::FreeInUse, "cuMemFree_v2")]);
}

#[test]
fn a_peer_copy_without_access() {
    let standin = session(&late().all_peers());
    let (one, two) = (Cuda::open(0), Cuda::open(1));
    let there = two.alloc(LEN);
    one.bind();
    let (here, stream) = (one.alloc(LEN), one.stream());
    // SAFETY: the stand-in checks what it is given.
    let copied = unsafe { result::memcpy_peer_async(one.context, here, two.context, there, LEN, stream) };
    assert_eq!(copied.unwrap_err().0, CUresult::CUDA_ERROR_PEER_ACCESS_NOT_ENABLED);
    assert_caught(&standin, Rule::NoPeerAccess, "cuMemcpyPeerAsync");
}

#[test]
fn peer_access_to_a_context_is_not_access_to_its_pools() {
    let standin = session(&late().all_peers());
    let (one, two) = (Cuda::open(0), Cuda::open(1));
    let owner = two.stream();
    // SAFETY: the stream is alive.
    let there = unsafe { result::malloc_async(owner, LEN).unwrap() };
    two.synchronize(owner);
    one.bind();
    one.enable_peer(&two);
    let (here, stream) = (one.alloc(LEN), one.stream());
    // SAFETY: the stand-in checks what it is given.
    let copied = unsafe { result::memcpy_dtod_async(here, there, LEN, stream) };
    assert_eq!(copied.unwrap_err().0, CUresult::CUDA_ERROR_PEER_ACCESS_NOT_ENABLED);
    assert_caught(&standin, Rule::NoPeerAccess, "cuMemcpyDtoDAsync_v2");

    let access = sys::CUmemAccessDesc_st {
        location: sys::CUmemLocation_st { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: 0 },
        flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
    };
    // SAFETY: the pool is the device's own.
    unsafe {
        let pool = result::device::get_default_mem_pool(two.device).unwrap();
        sys::cuMemPoolSetAccess(pool, &raw const access, 1).result().unwrap();
    }
    one.copy(here, there, LEN, stream);
    assert_eq!(standin.report().count(Rule::NoPeerAccess), 1);
}

#[test]
fn handles_that_are_gone() {
    let standin = session(&late());
    let cuda = Cuda::open(0);
    let stream = cuda.stream();
    let event = cuda.record(stream);
    cuda.destroy(stream);
    cuda.forget(event);
    // SAFETY: the stand-in checks what it is given.
    unsafe {
        assert!(result::stream::synchronize(stream).is_err());
        assert!(result::event::query(event).is_err());
        assert!(result::event::destroy(event).is_err());
    }
    assert_caught(&standin, Rule::UnknownHandle, "cuStreamSynchronize");
    assert_caught(&standin, Rule::UnknownHandle, "cuEventQuery");
    assert_caught(&standin, Rule::UnknownHandle, "cuEventDestroy_v2");
}

#[test]
fn a_host_function_that_calls_the_driver() {
    unsafe extern "C" fn calls(_argument: *mut std::ffi::c_void) {
        assert!(result::mem_get_info().is_err());
    }
    let standin = session(&late());
    let cuda = Cuda::open(0);
    let stream = cuda.stream();
    // SAFETY: the function needs no argument.
    unsafe { result::stream::launch_host_function(stream, calls, std::ptr::null_mut()).unwrap() };
    cuda.synchronize(stream);
    assert_caught(&standin, Rule::CallInHostFunction, "cuMemGetInfo_v2");
}

/// Memory of a mapping of its own, for the program to register.
fn map(len: usize) -> memmap2::MmapMut {
    memmap2::MmapOptions::new().len(len).map_anon().unwrap()
}

fn register(memory: &memmap2::MmapMut) -> CUresult {
    let at = memory.as_ptr().cast_mut().cast();
    // SAFETY: the memory is mapped; what happens to it later is what is tested.
    unsafe { sys::cuMemHostRegister_v2(at, memory.len(), sys::CU_MEMHOSTREGISTER_PORTABLE) }
}

/// Maps memory again where memory was.
fn map_at(at: *mut u8, len: usize) {
    const ANYWHERE: i32 = -1;
    unsafe extern "C" {
        fn mmap(at: *mut c_void, len: usize, access: i32, flags: i32, file: i32, offset: i64) -> *mut c_void;
    }
    // Readable and writable; private, anonymous, and where it is told.
    let (access, flags) = (1 | 2, 2 | 0x20 | 0x10);
    // SAFETY: the program unmapped this range a moment ago, or has it mapped for nothing else.
    let mapped = unsafe { mmap(at.cast(), len, access, flags, ANYWHERE, 0) };
    assert_eq!(mapped, at.cast());
}

#[test]
fn registered_memory_that_was_unmapped() {
    let standin = session(&Config::with_devices(&[64 * MIB]));
    let cuda = Cuda::open(0);
    let (stream, device, mut memory) = (cuda.stream(), cuda.alloc(LEN), map(LEN));
    assert_eq!(register(&memory), CUresult::CUDA_SUCCESS);
    let at = memory.as_mut_ptr();
    cuda.upload(device, at.cast(), LEN, stream);
    cuda.synchronize(stream);
    assert_eq!(standin.report().violations, []);
    drop(memory);
    // Nobody has to use it: that it is registered still is enough.
    assert_eq!(standin.report().count(Rule::StaleRegistration), 1);
    assert_eq!(cuda.try_upload(device, at.cast(), LEN, stream), CUresult::CUDA_ERROR_INVALID_VALUE);
    assert_caught(&standin, Rule::StaleRegistration, "cuMemHostRegister_v2");
    assert_caught(&standin, Rule::StaleRegistration, "cuMemcpyHtoDAsync_v2");
    // SAFETY: registered above.
    unsafe { sys::cuMemHostUnregister(at.cast()) }.result().unwrap();
    assert_caught(&standin, Rule::StaleRegistration, "cuMemHostUnregister");
}

#[test]
fn addresses_of_registered_memory_that_came_again_as_ordinary_memory() {
    let standin = session(&Config::with_devices(&[64 * MIB]));
    let cuda = Cuda::open(0);
    let (stream, device, mut memory) = (cuda.stream(), cuda.alloc(LEN), map(LEN));
    assert_eq!(register(&memory), CUresult::CUDA_SUCCESS);
    let at = memory.as_mut_ptr();
    std::mem::forget(memory);
    // At once, so that no other thread gets the addresses.
    map_at(at, LEN);
    assert_eq!(cuda.try_upload(device, at.cast(), LEN / 4, stream), CUresult::CUDA_ERROR_INVALID_VALUE);
    assert_caught(&standin, Rule::StaleRegistration, "cuMemcpyHtoDAsync_v2");
    // SAFETY: the memory is mapped, and stays.
    let again = unsafe { sys::cuMemHostRegister_v2(at.cast(), LEN, sys::CU_MEMHOSTREGISTER_PORTABLE) };
    assert_eq!(again, CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
    assert_caught(&standin, Rule::StaleRegistration, "cuMemHostRegister_v2");
}

/// A driver of an older version does not have the call at all.
#[test]
fn a_call_that_is_newer_than_the_driver() {
    for (version, call) in [(12_040, "cuMemcpyBatchAsync"), (12_080, "cuMemcpyBatchAsync_v2")] {
        let standin = session(&Config { driver_version: version, ..late() });
        let _cuda = Cuda::open(0);
        type Batch = unsafe extern "C" fn(
            *const u64,
            *const u64,
            *const usize,
            usize,
            *const u8,
            *const usize,
            usize,
            *mut u8,
            *mut u8,
        ) -> u32;
        let batch = standin.call(call).unwrap();
        // SAFETY: the call has this type, or is given one argument more than it looks at.
        let result = unsafe {
            let batch: Batch = std::mem::transmute(batch);
            let null: *const u8 = std::ptr::null();
            batch(
                null.cast(),
                null.cast(),
                null.cast(),
                0,
                null,
                null.cast(),
                0,
                std::ptr::null_mut(),
                std::ptr::null_mut(),
            )
        };
        assert_eq!(result, CUresult::CUDA_ERROR_NOT_SUPPORTED as u32);
        assert_caught(&standin, Rule::NewerCall, call);
    }
}
