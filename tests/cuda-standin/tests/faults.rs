//! What goes wrong on purpose goes wrong where it should, and nowhere does the stand-in itself fall over.

mod common;

use std::time::{Duration, Instant};

use common::{Cuda, MIB, pattern, settled};
use cuda_standin::{Config, Driver, Effect, Fault, FaultPlan, Link, Rule, session};
use cudarc::driver::result;
use cudarc::driver::sys::{self, CUresult};

const LEN: usize = MIB as usize;

fn machine() -> Config {
    Config::with_devices(&[64 * MIB, 32 * MIB]).all_peers()
}

#[test]
fn the_nth_allocation_fails() {
    let standin = session(&machine());
    let cuda = Cuda::open(0);
    standin.fault(&FaultPlan::one(Fault::nth("cuMemAlloc_v2", 2, Effect::OutOfMemory)));
    let first = cuda.alloc(LEN);
    // SAFETY: the context is current.
    let second = unsafe { result::malloc_sync(LEN) };
    assert_eq!(second.unwrap_err().0, CUresult::CUDA_ERROR_OUT_OF_MEMORY);
    let third = cuda.alloc(LEN);
    cuda.free(first);
    cuda.free(third);
    standin.report().assert_clean();
}

#[test]
fn memory_runs_out_by_itself() {
    let standin = session(&machine());
    let cuda = Cuda::open(1);
    let most = cuda.alloc(31 * LEN);
    // SAFETY: the context is current.
    assert_eq!(unsafe { result::malloc_sync(2 * LEN) }.unwrap_err().0, CUresult::CUDA_ERROR_OUT_OF_MEMORY);
    // SAFETY: the context is current.
    assert_eq!(unsafe { result::malloc_sync(usize::MAX) }.unwrap_err().0, CUresult::CUDA_ERROR_OUT_OF_MEMORY);
    assert_eq!(result::mem_get_info().unwrap(), (LEN, 32 * LEN));
    cuda.free(most);
    standin.report().assert_clean();
}

#[test]
fn a_sticky_error_takes_every_call_of_its_device_and_the_ledger_goes_to_zero() {
    let standin = session(&machine());
    let (two, one) = (Cuda::open(1), Cuda::open(0));
    let (stream, device, source) = (one.stream(), one.alloc(LEN), one.pin(&pattern(LEN, 1)));
    standin.fault(&FaultPlan::one(Fault::nth("cuMemcpyHtoDAsync_v2", 1, Effect::Sticky(700))));
    let illegal = CUresult::CUDA_ERROR_ILLEGAL_ADDRESS;
    assert_eq!(one.try_upload(device, source, LEN, stream), illegal);
    // SAFETY: the stand-in checks what it is given.
    unsafe {
        assert_eq!(sys::cuMemFree_v2(device), illegal);
        assert_eq!(sys::cuMemFreeHost(source), illegal);
        assert_eq!(sys::cuStreamSynchronize(stream), illegal);
        assert_eq!(sys::cuStreamDestroy_v2(stream), illegal);
        assert_eq!(sys::cuCtxSynchronize(), illegal);
        assert_eq!(sys::cuCtxSetCurrent(one.context), illegal);
    }
    assert_eq!(result::mem_get_info().unwrap_err().0, illegal);
    // The other device goes on.
    two.bind();
    let other = two.alloc(LEN);
    two.free(other);
    standin.report().assert_clean();
}

#[test]
fn a_late_error_breaks_the_device_when_the_work_runs() {
    let standin = session(&machine().late_micros(10_000_000));
    let cuda = Cuda::open(0);
    let (stream, device, source) = (cuda.stream(), cuda.alloc(LEN), cuda.pin(&pattern(LEN, 1)));
    standin.fault(&FaultPlan::one(Fault::nth("cuMemcpyHtoDAsync_v2", 1, Effect::LateSticky(719))));
    cuda.upload(device, source, LEN, stream);
    let event = cuda.record(stream);
    // SAFETY: the handles are alive.
    unsafe {
        assert_eq!(sys::cuEventSynchronize(event), CUresult::CUDA_ERROR_LAUNCH_FAILED);
        assert_eq!(sys::cuMemFree_v2(device), CUresult::CUDA_ERROR_LAUNCH_FAILED);
    }
    standin.report().assert_clean();
}

#[test]
fn a_lost_device() {
    let standin = session(&machine());
    let cuda = Cuda::open(0);
    let device = cuda.alloc(LEN);
    standin.fault(&FaultPlan::one(Fault::any(1, Effect::DeviceLost)));
    assert_eq!(result::mem_get_info().unwrap_err().0, CUresult::CUDA_ERROR_UNKNOWN);
    // SAFETY: the stand-in checks what it is given.
    assert_eq!(unsafe { sys::cuMemFree_v2(device) }, CUresult::CUDA_ERROR_UNKNOWN);
    standin.reset();
    let cuda = Cuda::open(0);
    cuda.free(cuda.alloc(LEN));
}

#[test]
fn pinning_fails() {
    let standin = session(&Config { pinned_limit: Some(3 * MIB), ..machine() });
    let cuda = Cuda::open(0);
    standin.fault(&FaultPlan::one(Fault::pin(2)));
    let mut bytes = vec![0_u8; LEN];
    let at = bytes.as_mut_ptr().cast();
    let first = cuda.pin(&[0; LEN]);
    // SAFETY: the vector outlives the registration.
    unsafe {
        assert!(sys::cuMemHostRegister_v2(at, LEN, 0).result().is_err());
        sys::cuMemHostRegister_v2(at, LEN, 0).result().unwrap();
        assert_eq!(sys::cuMemHostRegister_v2(at, 1, 0), CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
        assert_eq!(result::malloc_host(2 * LEN, 0).unwrap_err().0, CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        sys::cuMemHostUnregister(at).result().unwrap();
    }
    cuda.unpin(first);
    standin.report().assert_clean();
}

#[test]
fn a_stalled_copy_and_a_slow_link() {
    let standin = session(&machine());
    let cuda = Cuda::open(0);
    let (stream, device, source) = (cuda.stream(), cuda.alloc(LEN), cuda.pin(&pattern(LEN, 1)));
    standin.fault(&FaultPlan::one(Fault::nth("cuMemcpyHtoDAsync_v2", 1, Effect::StallMillis(60))));
    let began = Instant::now();
    cuda.upload(device, source, LEN, stream);
    cuda.synchronize(stream);
    assert!(began.elapsed() >= Duration::from_millis(60));
    standin.fault(&FaultPlan::one(Fault::nth("cuMemcpyHtoDAsync_v2", 1, Effect::Hold)));
    cuda.upload(device, source, LEN, stream);
    let event = cuda.record(stream);
    // SAFETY: the handle is alive.
    assert_eq!(unsafe { sys::cuEventQuery(event) }, CUresult::CUDA_ERROR_NOT_READY);
    standin.no_faults();
    cuda.synchronize(stream);

    standin.fault(&FaultPlan { link: Some(Link::new(20 * MIB, 0)), ..FaultPlan::default() });
    let began = Instant::now();
    cuda.upload(device, source, LEN, stream);
    cuda.synchronize(stream);
    assert!(began.elapsed() >= Duration::from_millis(50));
    // A stall without an end holds up nobody but who waits for it.
    standin.fault(&FaultPlan::one(Fault::any(1, Effect::StallMillis(u64::MAX))));
    cuda.upload(device, source, LEN, stream);
}

#[test]
fn no_peers_and_peers_that_lie() {
    let standin = session(&machine());
    let (two, one) = (Cuda::open(1), Cuda::open(0));
    standin.fault(&FaultPlan { no_peers: true, ..FaultPlan::default() });
    let mut can = 1;
    // SAFETY: the contexts are retained.
    unsafe {
        sys::cuDeviceCanAccessPeer(&raw mut can, 0, 1).result().unwrap();
        let refused = sys::cuCtxEnablePeerAccess(two.context, 0);
        assert_eq!((can, refused), (0, CUresult::CUDA_ERROR_PEER_ACCESS_UNSUPPORTED));
    }
    standin.fault(&FaultPlan { lying_peers: true, ..FaultPlan::default() });
    one.enable_peer(&two);
    two.bind();
    let there = two.alloc(LEN);
    let bytes = pattern(LEN, 1);
    let mut back = vec![0_u8; LEN];
    // SAFETY: the slices live during the calls, which wait.
    unsafe {
        result::memcpy_htod_sync(there, &bytes).unwrap();
        one.bind();
        let (here, stream) = (one.alloc(LEN), one.stream());
        one.copy(here, there, LEN, stream);
        result::memcpy_dtoh_async(&mut back, here, stream).unwrap();
    }
    assert!(back != bytes);
    standin.report().assert_lawful();
}

#[test]
fn no_pools_an_old_driver_and_no_devices() {
    let standin = session(&machine());
    let cuda = Cuda::open(0);
    standin.fault(&FaultPlan { no_pools: true, driver_version: Some(11_020), ..FaultPlan::default() });
    let mut version = 0;
    // SAFETY: the stream is alive, the version a local.
    unsafe {
        let refused = result::malloc_async(cuda.stream(), LEN).unwrap_err();
        assert_eq!(refused.0, CUresult::CUDA_ERROR_NOT_SUPPORTED);
        assert!(result::device::get_default_mem_pool(cuda.device).is_err());
        let pools = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED;
        assert_eq!(result::device::get_attribute(cuda.device, pools).unwrap(), 0);
        sys::cuDriverGetVersion(&raw mut version).result().unwrap();
    }
    assert_eq!(version, 11_020);
    standin.fault(&FaultPlan { no_devices: true, ..FaultPlan::default() });
    assert_eq!(result::init().unwrap_err().0, CUresult::CUDA_ERROR_NO_DEVICE);
    assert_eq!(result::device::get_count().unwrap(), 0);
    standin.configure(&Config::with_devices(&[]));
    assert_eq!(result::init().unwrap_err().0, CUresult::CUDA_ERROR_NO_DEVICE);
}

#[test]
fn devices_of_different_sizes() {
    let _standin = session(&machine());
    result::init().unwrap();
    // SAFETY: the devices were just got.
    let totals = [0, 1].map(|i| unsafe { result::device::total_mem(result::device::get(i).unwrap()).unwrap() });
    assert_eq!(totals, [64 * LEN, 32 * LEN]);
    assert!(result::device::get(2).is_err());
}

/// A program that goes on after every error, as far as it can, and frees what it got.
fn stubborn() -> Result<(), result::DriverError> {
    result::init()?;
    let device = result::device::get(0)?;
    // SAFETY: what is passed on was given out by the driver; the memory outlives the work, which is waited for or,
    // when even that fails, was never read by a worker after the reset.
    unsafe {
        let context = result::primary_ctx::retain(device)?;
        result::ctx::set_current(context)?;
        let stream = result::stream::create(result::stream::StreamKind::NonBlocking)?;
        let event = result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT)?;
        let pinned = result::malloc_host(LEN, sys::CU_MEMHOSTALLOC_PORTABLE)?;
        let memory = result::malloc_sync(LEN)?;
        let pooled = result::malloc_async(stream, LEN)?;
        let _ = sys::cuMemcpyHtoDAsync_v2(memory, pinned, LEN, stream);
        let _ = result::memcpy_dtod_async(pooled, memory, LEN, stream);
        let _ = result::event::record(event, stream);
        let _ = sys::cuMemcpyDtoHAsync_v2(pinned, pooled, LEN, stream);
        let _ = result::event::query(event);
        let _ = result::free_async(pooled, stream);
        let waited = result::stream::synchronize(stream);
        if waited.is_ok() {
            let _ = result::free_sync(memory);
            let _ = result::free_host(pinned);
        }
        let _ = result::event::destroy(event);
        let _ = result::stream::destroy(stream);
        let _ = result::primary_ctx::release(device);
    }
    Ok(())
}

#[test]
fn whichever_call_fails_the_stand_in_stands() {
    let standin = session(&machine());
    stubborn().unwrap();
    let calls: u64 = standin.report().calls.values().sum();
    assert!(calls > 20);
    let effects = [
        Effect::OutOfMemory,
        Effect::Fail(304),
        Effect::Sticky(700),
        Effect::DeviceLost,
        Effect::LateSticky(719),
        Effect::Torn(719),
        Effect::StallMillis(1),
    ];
    for effect in effects {
        for nth in 1..=calls {
            standin.reset();
            standin.fault(&FaultPlan::one(Fault::any(nth, effect)));
            let _ = stubborn();
            let report = settled(&standin);
            assert_eq!(report.count(Rule::Panic), 0, "{effect:?} at call {nth}:\n{report}");
            assert_eq!(report.pending, 0, "{effect:?} at call {nth}");
        }
    }
}

/// A driver may give results that the caller's bindings do not know: any number comes through as it is.
#[test]
fn results_that_are_newer_than_the_bindings_come_as_their_numbers() {
    for (version, known) in [(12_040, false), (12_080, true)] {
        let standin = session(&Config { driver_version: version, ..machine() });
        let _cuda = Cuda::open(0);
        let asked = call::<fn_types::Allocate>(&standin, "cuMemAlloc_v2");
        let name_of = call::<fn_types::Name>(&standin, "cuGetErrorName");
        for code in [226, 721, 913, 916, 919, 4242] {
            standin.fault(&FaultPlan::one(Fault::nth("cuMemAlloc_v2", 1, Effect::Fail(code))));
            let mut address = 0;
            // SAFETY: the pointer is to a local.
            assert_eq!(unsafe { asked(&raw mut address, LEN) }, code);
        }
        let name = |code| {
            let mut text = c"untouched".as_ptr();
            // SAFETY: the pointer is to a local, and a name is static.
            unsafe {
                let result = name_of(code, &raw mut text);
                (result, (!text.is_null()).then(|| std::ffi::CStr::from_ptr(text)))
            }
        };
        let unrecognized = (CUresult::CUDA_ERROR_INVALID_VALUE as u32, None);
        assert_eq!(name(226), if known { (0, Some(c"CUDA_ERROR_CONTAINED")) } else { unrecognized });
        assert_eq!((name(4242), name(700)), (unrecognized, (0, Some(c"CUDA_ERROR_ILLEGAL_ADDRESS"))));
        standin.report().assert_clean();
    }
}

#[test]
fn a_sticky_result_may_be_any_number_too() {
    let standin = session(&machine());
    let cuda = Cuda::open(0);
    let (stream, device, source) = (cuda.stream(), cuda.alloc(LEN), cuda.pin(&pattern(LEN, 1)));
    standin.fault(&FaultPlan::one(Fault::nth("cuMemcpyHtoDAsync_v2", 1, Effect::LateSticky(721))));
    cuda.upload(device, source, LEN, stream);
    let synchronize = call::<fn_types::OfHandle>(&standin, "cuStreamSynchronize");
    let unpin = call::<fn_types::OfHandle>(&standin, "cuMemFreeHost");
    // SAFETY: the stream is alive, the memory pinned.
    unsafe {
        assert_eq!(synchronize(stream.cast()), 721);
        assert_eq!(unpin(source), 721);
    }
    standin.report().assert_lawful();
}

/// A donor that breaks in the middle of a copy to the host: another device, whose copy up waits for it, is handed what
/// had come until then, and its own calls all succeed.
#[test]
fn a_donor_that_breaks_in_the_middle_of_a_copy_leaves_half_of_the_bytes() {
    // Nothing runs before all is enqueued.
    let standin = session(&machine().late_micros(10_000_000));
    let (cuda, donor) = (Cuda::open(0), Cuda::open(1));
    let (there, down) = (donor.alloc(LEN), donor.stream());
    let (fresh, between) = (donor.pin(&pattern(LEN, 7)), donor.pin(&vec![1; LEN]));
    donor.upload(there, fresh, LEN, down);
    donor.synchronize(down);
    standin.fault(&FaultPlan::one(Fault::nth("cuMemcpyDtoHAsync_v2", 1, Effect::Torn(719))));
    donor.download(between, there, LEN, down);
    let landed = donor.record(down);
    cuda.bind();
    let (here, up, back) = (cuda.alloc(LEN), cuda.stream(), cuda.pin(&vec![0; LEN]));
    cuda.wait(up, landed);
    cuda.upload(here, between, LEN, up);
    cuda.download(back, here, LEN, up);
    cuda.synchronize(up);
    let want = [&pattern(LEN, 7)[..LEN / 2], &vec![1; LEN / 2]].concat();
    assert!(cuda.host(back, LEN) == want, "half of the bytes");
    // SAFETY: the event is alive.
    let event = unsafe { result::event::query(landed) };
    assert_eq!(event.unwrap_err().0, CUresult::CUDA_ERROR_LAUNCH_FAILED, "who asks the donor's event is told");
    standin.report().assert_lawful();
}

/// The driver's calls with results as numbers.
mod fn_types {
    use std::ffi::{c_char, c_void};

    pub(super) type Allocate = unsafe extern "C" fn(*mut u64, usize) -> u32;
    pub(super) type Name = unsafe extern "C" fn(u32, *mut *const c_char) -> u32;
    pub(super) type OfHandle = unsafe extern "C" fn(*mut c_void) -> u32;
}

fn call<F: Copy>(standin: &Driver, name: &str) -> F {
    let address = standin.call(name).unwrap();
    assert_eq!(size_of::<F>(), size_of_val(&address));
    // SAFETY: `F` is a pointer to a function, of the type that the driver's documentation gives.
    unsafe { std::mem::transmute_copy(&address) }
}
