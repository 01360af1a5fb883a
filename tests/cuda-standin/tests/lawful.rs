//! Programs that keep the rules, over the real cudarc: their bytes arrive and nothing is reported.

mod common;

use std::ffi::c_void;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use common::{Cuda, MIB, pattern};
use cuda_standin::{Config, Link, MemoryMode, session};
use cudarc::driver::result;
use cudarc::driver::sys::{self, CUresult};

#[test]
fn a_round_trip_through_pinned_memory_keeps_its_bytes() {
    let standin = session(&Config::with_devices(&[64 * MIB]));
    let cuda = Cuda::open(0);
    let stream = cuda.stream();
    let bytes = pattern(3 * MIB as usize + 17, 1);
    let source = cuda.pin(&bytes);
    let target = cuda.pin(&vec![0; bytes.len()]);
    let device = cuda.alloc(bytes.len());
    cuda.upload(device, source, bytes.len(), stream);
    cuda.download(target, device, bytes.len(), stream);
    cuda.synchronize(stream);
    assert!(cuda.host(target, bytes.len()) == bytes);
    cuda.free(device);
    cuda.unpin(source);
    cuda.unpin(target);
    cuda.destroy(stream);
    cuda.close();
    standin.report().assert_clean();
}

/// The last release waits for the work in the context. Whoever retains the context meanwhile keeps it.
#[test]
fn a_context_that_is_retained_while_the_last_one_releases_it_stays() {
    unsafe extern "C" fn wait(gate: *mut c_void) {
        // SAFETY: the test gives a barrier that outlives the work.
        unsafe { &*gate.cast::<Barrier>() }.wait();
    }
    let standin = session(&Config::with_devices(&[64 * MIB]));
    let (cuda, gate) = (Cuda::open(0), Barrier::new(2));
    let stream = cuda.stream();
    // SAFETY: the barrier outlives the function, which ends before the release does.
    unsafe { sys::cuLaunchHostFunc(stream, Some(wait), (&raw const gate).cast_mut().cast()) }.result().unwrap();
    cuda.destroy(stream);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // Time for the other thread to be in the release.
            std::thread::sleep(Duration::from_millis(100));
            let later = Cuda::open(0);
            gate.wait();
            std::thread::sleep(Duration::from_millis(100));
            later.destroy(later.stream());
            later.close();
        });
        cuda.close();
    });
    standin.report().assert_clean();
}

#[test]
fn an_event_orders_two_streams() {
    for seed in 0..8 {
        let config = Config { piece_bytes: 4096, ..Config::with_devices(&[64 * MIB]).seed(seed) };
        let standin = session(&config.late_micros(200));
        let cuda = Cuda::open(0);
        let (copies, computes) = (cuda.stream(), cuda.stream());
        let bytes = pattern(MIB as usize, seed as u8);
        let source = cuda.pin(&bytes);
        let (a, b) = (cuda.alloc(bytes.len()), cuda.alloc(bytes.len()));
        let target = cuda.pin(&vec![0; bytes.len()]);
        cuda.upload(a, source, bytes.len(), copies);
        let landed = cuda.record(copies);
        cuda.wait(computes, landed);
        cuda.copy(b, a, bytes.len(), computes);
        cuda.download(target, b, bytes.len(), computes);
        cuda.synchronize(computes);
        assert!(cuda.host(target, bytes.len()) == bytes);
        // The host has seen the second stream, and by it the first one: all may go.
        cuda.free(a);
        cuda.free(b);
        cuda.unpin(source);
        cuda.unpin(target);
        cuda.forget(landed);
        cuda.destroy(copies);
        cuda.destroy(computes);
        standin.report().assert_clean();
    }
}

#[test]
fn memory_that_is_not_pinned_is_staged_and_downloads_to_it_wait() {
    let standin = session(&Config::with_devices(&[64 * MIB]).late_micros(1000));
    let cuda = Cuda::open(0);
    let stream = cuda.stream();
    let mut bytes = pattern(MIB as usize, 3);
    let expected = bytes.clone();
    let device = cuda.alloc(bytes.len());
    // SAFETY: the slices live during the calls, and the copy of the first is made by the call.
    unsafe {
        result::memcpy_htod_async(device, &bytes, stream).unwrap();
        bytes.fill(0);
        result::memcpy_dtoh_async(&mut bytes, device, stream).unwrap();
    }
    assert!(bytes == expected);
    cuda.free(device);
    cuda.destroy(stream);
    standin.report().assert_clean();
}

#[test]
fn the_default_streams_take_turns() {
    let standin = session(&Config { piece_bytes: 4096, ..Config::with_devices(&[64 * MIB]).seed(7).late_micros(300) });
    let cuda = Cuda::open(0);
    let blocking = cuda.blocking_stream();
    let bytes = pattern(MIB as usize, 4);
    let source = cuda.pin(&bytes);
    let device = cuda.alloc(bytes.len());
    let per_thread = std::ptr::without_provenance_mut(2);
    cuda.upload(device, source, bytes.len(), blocking);
    cuda.fill(device, 9, 1000, result::stream::null());
    cuda.fill(device + 500, 8, 1000, per_thread);
    let mut back = vec![0_u8; bytes.len()];
    // SAFETY: the slice lives during the call, which is synchronous.
    unsafe { result::memcpy_dtoh_sync(&mut back, device).unwrap() };
    assert_eq!((back[499], back[500], back[1499]), (9, 8, 8));
    assert!(back[1500..] == bytes[1500..]);
    cuda.free(device);
    cuda.unpin(source);
    cuda.destroy(blocking);
    standin.report().assert_clean();
}

#[test]
fn a_pool_hands_memory_out_again_in_the_order_of_the_stream() {
    for memory in [MemoryMode::Quarantine, MemoryMode::Reuse] {
        let standin = session(&Config::with_devices(&[4 * MIB]).memory(memory).late_micros(200));
        let cuda = Cuda::open(0);
        let stream = cuda.stream();
        for round in 0..20 {
            // Three of these would not fit at once.
            // SAFETY: the stream is alive.
            let device = unsafe { result::malloc_async(stream, 2 * MIB as usize).unwrap() };
            cuda.fill(device, round, 2 * MIB as usize, stream);
            // SAFETY: allocated just above.
            unsafe { result::free_async(device, stream).unwrap() };
        }
        cuda.synchronize(stream);
        let (free, total) = result::mem_get_info().unwrap();
        assert_eq!(free, total, "a pool without a threshold keeps nothing once the host has waited");
        cuda.destroy(stream);
        let report = standin.report();
        report.assert_clean();
        assert_eq!(report.peak_bytes, vec![2 * MIB]);
    }
}

#[test]
fn a_link_takes_its_time_and_the_calls_do_not_wait_for_it() {
    let standin = session(&Config::with_devices(&[64 * MIB]).links(Link::new(64 << 20, 10_000)));
    let cuda = Cuda::open(0);
    let stream = cuda.stream();
    let source = cuda.pin(&pattern(4 * MIB as usize, 5));
    let device = cuda.alloc(4 * MIB as usize);
    let began = Instant::now();
    for _ in 0..2 {
        cuda.upload(device, source, 4 * MIB as usize, stream);
    }
    cuda.synchronize(stream);
    // 8 MiB at 64 MiB/s. How much longer it took is the processors' affair; what events measure is in `counted.rs`.
    assert!(began.elapsed().as_millis() >= 125);
    cuda.free(device);
    cuda.unpin(source);
    cuda.destroy(stream);
    standin.report().assert_clean();
    // A byte a second: whoever waited for this copy would not come back for weeks.
    standin.configure(&Config::with_devices(&[64 * MIB]).links(Link::new(1, 0)));
    let cuda = Cuda::open(0);
    let stream = cuda.stream();
    cuda.upload(cuda.alloc(4 * MIB as usize), cuda.pin(&pattern(4 * MIB as usize, 5)), 4 * MIB as usize, stream);
    let end = cuda.record(stream);
    // SAFETY: the event is alive.
    assert_eq!(unsafe { sys::cuEventQuery(end) }, CUresult::CUDA_ERROR_NOT_READY);
}

#[test]
fn peers_reach_each_other_once_they_are_let() {
    let standin = session(&Config::with_devices(&[64 * MIB, 32 * MIB]).all_peers());
    let (one, two) = (Cuda::open(0), Cuda::open(1));
    let bytes = pattern(MIB as usize, 6);
    let there = two.alloc(bytes.len());
    let remote = two.stream();
    let source = two.pin(&bytes);
    two.upload(there, source, bytes.len(), remote);
    let landed = two.record(remote);
    one.bind();
    let (stream, here) = (one.stream(), one.alloc(bytes.len()));
    one.enable_peer(&two);
    one.wait(stream, landed);
    // SAFETY: contexts, memory and stream are alive.
    unsafe { result::memcpy_peer_async(one.context, here, two.context, there, bytes.len(), stream).unwrap() };
    let target = one.pin(&vec![0; bytes.len()]);
    one.download(target, here, bytes.len(), stream);
    one.synchronize(stream);
    assert!(one.host(target, bytes.len()) == bytes);
    one.free(here);
    one.unpin(target);
    one.destroy(stream);
    two.bind();
    two.free(there);
    two.unpin(source);
    two.forget(landed);
    two.destroy(remote);
    standin.report().assert_clean();
}

#[test]
fn what_the_host_was_told_by_its_own_function_orders_its_calls() {
    unsafe extern "C" fn tell(flag: *mut std::ffi::c_void) {
        // SAFETY: the flag below outlives the stream's work.
        unsafe { &*flag.cast::<std::sync::atomic::AtomicBool>() }.store(true, std::sync::atomic::Ordering::SeqCst);
    }
    let standin = session(&Config::with_devices(&[64 * MIB]));
    let cuda = Cuda::open(0);
    let stream = cuda.stream();
    let device = cuda.alloc(MIB as usize);
    let flag = std::sync::atomic::AtomicBool::new(false);
    cuda.fill(device, 1, MIB as usize, stream);
    // SAFETY: the flag outlives the work, which the loop waits for.
    unsafe { result::stream::launch_host_function(stream, tell, (&raw const flag).cast_mut().cast()).unwrap() };
    while !flag.load(std::sync::atomic::Ordering::SeqCst) {
        std::thread::yield_now();
    }
    cuda.free(device);
    cuda.destroy(stream);
    standin.report().assert_clean();
}

#[test]
fn cudarcs_own_types_run_over_it() {
    let standin = session(&Config::with_devices(&[64 * MIB]));
    {
        let context = cudarc::driver::CudaContext::new(0).unwrap();
        assert_eq!(context.name().unwrap(), "Stand-in 0");
        assert_eq!(context.compute_capability().unwrap(), (8, 0));
        let stream = context.new_stream().unwrap();
        let bytes = pattern(100_000, 8);
        let slice = stream.clone_htod(&bytes).unwrap();
        let copy = stream.clone_dtod(&slice).unwrap();
        assert!(stream.clone_dtoh(&copy).unwrap() == bytes);
        assert!(cudarc::driver::CudaContext::new(1).is_err());
    }
    standin.report().assert_clean();
}
