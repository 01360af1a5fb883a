//! Another library resets the primary context: all that was in it is gone, and nobody who had it broke a rule.

mod common;

use common::{Cuda, MIB, pattern};
use cuda_standin::{Config, Link, MemoryMode, session};
use cudarc::driver::result;
use cudarc::driver::sys::{self, CUresult};

const LEN: usize = MIB as usize;

fn reset(cuda: &Cuda) {
    // SAFETY: the device was got from the driver.
    unsafe { sys::cuDevicePrimaryCtxReset_v2(cuda.device) }.result().unwrap();
}

/// Everything that a context had, asked for after a reset.
#[test]
fn after_a_reset_every_handle_is_gone_and_a_retain_gives_a_new_context() {
    for anew in [false, true] {
        let standin = session(&Config::with_devices(&[64 * MIB, 64 * MIB]).all_peers());
        let (other, cuda) = (Cuda::open(1), Cuda::open(0));
        cuda.enable_peer(&other);
        let (stream, device, pinned) = (cuda.stream(), cuda.alloc(LEN), cuda.pin(&pattern(LEN, 1)));
        cuda.upload(device, pinned, LEN, stream);
        let event = cuda.record(stream);
        cuda.synchronize(stream);
        // SAFETY: the context is current.
        let pooled = unsafe { result::malloc_async(stream, LEN).unwrap() };
        reset(&cuda);
        let (gone, handle) = (CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED, CUresult::CUDA_ERROR_INVALID_HANDLE);
        // Another library goes on with the device, in a context of its own; this thread has it current, or the old one.
        let theirs = anew.then(|| Cuda::open(0));
        assert!(theirs.as_ref().is_none_or(|theirs| theirs.context != cuda.context));
        let (of_handle, of_memory) = if anew { (handle, CUresult::CUDA_ERROR_INVALID_VALUE) } else { (gone, gone) };
        // SAFETY: the stand-in checks all handles and addresses.
        unsafe {
            assert_eq!(result::ctx::set_current(cuda.context).unwrap_err().0, gone);
            assert_eq!(sys::cuStreamQuery(stream), of_handle);
            assert_eq!(result::stream::synchronize(stream).unwrap_err().0, of_handle);
            assert_eq!(result::event::query(event).unwrap_err().0, of_handle);
            assert_eq!(result::event::synchronize(event).unwrap_err().0, of_handle);
            assert_eq!(result::event::record(event, stream).unwrap_err().0, of_handle);
            assert_eq!(result::event::destroy(event).unwrap_err().0, of_handle);
            assert_eq!(result::stream::destroy(stream).unwrap_err().0, of_handle);
            assert_eq!(result::free_sync(device).unwrap_err().0, of_memory);
            assert_eq!(result::free_sync(pooled).unwrap_err().0, of_memory);
            assert_eq!(sys::cuMemFreeHost(pinned), of_memory);
            assert_eq!(cuda.try_upload(device, pinned, LEN, stream), of_handle);
        }
        if let Some(theirs) = &theirs {
            let (stream, fresh) = (theirs.stream(), theirs.alloc(LEN));
            assert_eq!(theirs.try_upload(fresh, pinned, LEN, stream), CUresult::CUDA_ERROR_INVALID_VALUE);
            assert_eq!(theirs.try_upload(device, pinned, LEN, stream), CUresult::CUDA_ERROR_INVALID_VALUE);
            theirs.free(fresh);
            theirs.destroy(stream);
        }
        // A reset does not release: each who retained it still has to.
        other.bind();
        theirs.into_iter().for_each(Cuda::close);
        cuda.close();
        other.close();
        let report = standin.report();
        report.assert_clean();
        assert_eq!(report.live_contexts, 0);
    }
}

/// Work that runs is cut short, what waits for it on another device goes on, and registered memory is let go of.
#[test]
fn a_reset_cuts_work_short_and_leaves_no_worker_in_the_programs_memory() {
    let config = Config { piece_bytes: 4096, ..Config::with_devices(&[64 * MIB, 64 * MIB]) };
    let standin = session(&config.memory(MemoryMode::Reuse).links(Link::new(1_000_000, 0)));
    let (other, cuda) = (Cuda::open(1), Cuda::open(0));
    let (stream, device) = (cuda.stream(), cuda.alloc(LEN));
    let mut memory = memmap2::MmapOptions::new().len(LEN).map_anon().unwrap();
    let at = memory.as_mut_ptr();
    // SAFETY: mapped until the end.
    unsafe { sys::cuMemHostRegister_v2(at.cast(), LEN, sys::CU_MEMHOSTREGISTER_PORTABLE) }.result().unwrap();
    // A second at this pace.
    cuda.upload(device, at.cast(), LEN, stream);
    let landed = cuda.record(stream);
    other.bind();
    let theirs = other.stream();
    other.wait(theirs, landed);
    reset(&cuda);
    drop(memory);
    other.synchronize(theirs);
    other.destroy(theirs);
    // SAFETY: the stand-in looks the address up, and does not use it.
    unsafe {
        assert_eq!(sys::cuMemHostUnregister(at.cast()), CUresult::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
    }
    let report = standin.report();
    report.assert_clean();
    assert_eq!(report.pending, 0);
}
