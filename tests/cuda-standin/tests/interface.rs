//! What is exported, how it is found, and how quick it is.

mod common;

use common::{Cuda, MIB, pattern};
use cuda_standin::{Config, DeviceConfig, Driver, library_path, session};
use cudarc::driver::result;
use cudarc::driver::sys::{self, CUdevice_attribute, CUpointer_attribute, CUresult};

/// All the calls that the library's backend may make.
const CALLS: &str = "cuCtxDisablePeerAccess cuCtxEnablePeerAccess cuCtxGetCurrent cuCtxGetDevice \
    cuCtxGetStreamPriorityRange cuCtxSetCurrent cuCtxSetFlags cuCtxSynchronize cuDeviceCanAccessPeer cuDeviceGet \
    cuDeviceGetAttribute cuDeviceGetCount cuDeviceGetDefaultMemPool cuDeviceGetMemPool cuDeviceGetName \
    cuDeviceGetP2PAttribute cuDeviceGetPCIBusId cuDeviceGetUuid cuDeviceGetUuid_v2 cuDevicePrimaryCtxRelease_v2 \
    cuDevicePrimaryCtxRetain cuDeviceTotalMem_v2 cuDriverGetVersion cuEventCreate cuEventDestroy_v2 \
    cuEventElapsedTime cuEventElapsedTime_v2 cuEventQuery cuEventRecord cuEventSynchronize cuGetErrorName \
    cuGetErrorString cuInit cuLaunchHostFunc cuLaunchKernel cuMemAllocAsync cuMemAllocFromPoolAsync cuMemAlloc_v2 \
    cuMemFreeAsync cuMemFreeHost cuMemFree_v2 cuMemGetInfo_v2 cuMemHostAlloc cuMemHostGetDevicePointer_v2 \
    cuMemHostGetFlags cuMemHostRegister_v2 cuMemHostUnregister cuMemPoolCreate cuMemPoolDestroy \
    cuMemPoolGetAttribute cuMemPoolSetAccess cuMemPoolSetAttribute cuMemPoolTrimTo cuMemcpyDtoDAsync_v2 \
    cuMemcpyDtoHAsync_v2 cuMemcpyDtoH_v2 cuMemcpyHtoDAsync_v2 cuMemcpyHtoD_v2 cuMemcpyPeerAsync cuMemcpyBatchAsync \
    cuMemcpyBatchAsync_v2 cuDevicePrimaryCtxReset_v2 cuMemsetD8Async \
    cuModuleGetFunction cuModuleLoadData cuModuleUnload cuPointerGetAttribute cuStreamBeginCapture_v2 cuStreamCreate \
    cuStreamCreateWithPriority cuStreamDestroy_v2 cuStreamGetCtx cuStreamGetPriority cuStreamIsCapturing \
    cuStreamQuery cuStreamSynchronize cuStreamWaitEvent cuStreamEndCapture cuThreadExchangeStreamCaptureMode \
    cuGraphGetNodes cuGraphDestroy cuGraphInstantiateWithFlags cuGraphInstantiate_v2 cuGraphUpload cuGraphLaunch \
    cuGraphExecDestroy cuDevicePrimaryCtxGetState nvmlInit_v2 nvmlShutdown nvmlDeviceGetHandleByUUID \
    nvmlDeviceGetMemoryInfo nvmlDeviceGetMaxPcieLinkGeneration nvmlDeviceGetMaxPcieLinkWidth \
    nvmlDeviceGetCurrPcieLinkGeneration nvmlDeviceGetCurrPcieLinkWidth nvmlDeviceGetNvLinkState \
    nvmlDeviceGetNvLinkRemoteDeviceType nvmlDeviceGetNvLinkRemotePciInfo_v2";

#[test]
fn every_call_is_exported() {
    let driver = Driver::load().unwrap();
    let missing: Vec<&str> = CALLS.split_whitespace().filter(|name| driver.call(name).is_none()).collect();
    assert!(missing.is_empty(), "{missing:?}");
    assert!(driver.call("cuGetProcAddress_v2").is_none());
    assert!(library_path().unwrap().is_absolute());
}

#[test]
fn a_device_is_what_the_configuration_says() {
    let mut device = DeviceConfig::numbered(3, 24 << 30);
    device.name = "A card".to_owned();
    device.compute = (9, 0);
    device.copy_engines = 3;
    device.integrated = true;
    device.pci_bus_id = "0001:C1:02.0".to_owned();
    let standin = session(&Config { devices: vec![device], driver_version: 12_080, ..Config::default() });
    let cuda = Cuda::open(0);
    let attribute = |which| {
        // SAFETY: the device was got from the driver.
        unsafe { result::device::get_attribute(cuda.device, which).unwrap() }
    };
    assert_eq!(result::device::get_name(cuda.device).unwrap(), "A card");
    assert_eq!(attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR), 9);
    assert_eq!(attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT), 3);
    assert_eq!(attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_INTEGRATED), 1);
    assert_eq!(attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_PCI_BUS_ID), 0xC1);
    assert_eq!(attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID), 1);
    let mut id = [0_u8; 16];
    // SAFETY: the buffer is as long as said.
    unsafe { sys::cuDeviceGetPCIBusId(id.as_mut_ptr().cast(), 16, cuda.device) }.result().unwrap();
    assert_eq!(&id[..13], b"0001:C1:02.0\0");
    let uuid = result::device::get_uuid(cuda.device).unwrap();
    assert_eq!(uuid.bytes[15] as u8, b'3');
    standin.report().assert_lawful();
}

#[test]
fn addresses_tell_what_they_are() {
    let standin = session(&Config::with_devices(&[64 * MIB]));
    let cuda = Cuda::open(0);
    let (device, pinned, local) = (cuda.alloc(1000), cuda.pin(&[0; 100]), [0_u8; 4]);
    let kind = |address: u64| {
        let mut kind = 0_u32;
        let which = CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE;
        // SAFETY: the value has the attribute's size.
        let asked = unsafe { sys::cuPointerGetAttribute((&raw mut kind).cast(), which, address) };
        asked.result().map(|()| kind).map_err(|e| e.0)
    };
    assert_eq!(kind(device + 999), Ok(2));
    assert_eq!(kind(pinned.addr() as u64 + 1), Ok(1));
    assert_eq!(kind(local.as_ptr().addr() as u64), Err(CUresult::CUDA_ERROR_INVALID_VALUE));
    standin.report().assert_lawful();
}

/// A test counts its own calls, whatever other threads do meanwhile.
#[test]
fn calls_are_counted_for_all_threads_and_for_the_one_that_asks() {
    let standin = session(&Config::with_devices(&[64 * MIB]));
    let cuda = Cuda::open(0);
    let context = cuda.context as usize;
    (0..2).for_each(|_| cuda.forget(cuda.record(std::ptr::null_mut())));
    let theirs = std::thread::scope(|scope| {
        let others = || {
            // SAFETY: the context is retained.
            unsafe { result::ctx::set_current(context as sys::CUcontext).unwrap() };
            let cuda = Cuda { device: 0, context: context as sys::CUcontext };
            (0..3).for_each(|_| cuda.forget(cuda.record(std::ptr::null_mut())));
            standin.report().own_calls_of("cuEventRecord")
        };
        scope.spawn(others).join().unwrap()
    });
    let report = standin.report();
    assert_eq!((report.own_calls_of("cuEventRecord"), theirs, report.calls_of("cuEventRecord")), (2, 3, 5));
    standin.reset();
    assert!(standin.report().own_calls.is_empty());
}

#[test]
fn what_cannot_be_done_is_refused_by_name() {
    let standin = session(&Config::with_devices(&[64 * MIB]));
    let cuda = Cuda::open(0);
    let stream = cuda.stream();
    // SAFETY: the image is a text with its closing zero.
    let loaded = unsafe { result::module::load_data(c".version 7.0".as_ptr().cast()) };
    assert_eq!(loaded.unwrap_err().0, CUresult::CUDA_ERROR_INVALID_PTX);
    assert_eq!(loaded.unwrap_err().error_name().unwrap(), c"CUDA_ERROR_INVALID_PTX");
    cuda.destroy(stream);
    standin.report().assert_clean();
}

#[test]
fn pools_are_made_limited_and_given_back() {
    let standin = session(&Config::with_devices(&[64 * MIB]));
    let cuda = Cuda::open(0);
    let stream = cuda.stream();
    let properties = sys::CUmemPoolProps_st {
        allocType: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        handleTypes: sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE,
        location: sys::CUmemLocation_st { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: 0 },
        win32SecurityAttributes: std::ptr::null_mut(),
        reserved: [0; 64],
    };
    let attribute = |pool, which| {
        let mut value = 0_u64;
        // SAFETY: the value has the attribute's size.
        unsafe { sys::cuMemPoolGetAttribute(pool, which, (&raw mut value).cast()) }.result().unwrap();
        value
    };
    let used = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT;
    let reserved = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT;
    let mut threshold = 8 * MIB;
    let mut pool = std::ptr::null_mut();
    // SAFETY: handles come from the driver, values have the attributes' sizes.
    unsafe {
        sys::cuMemPoolCreate(&raw mut pool, &raw const properties).result().unwrap();
        let limit = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
        sys::cuMemPoolSetAttribute(pool, limit, (&raw mut threshold).cast()).result().unwrap();
        let mut memory = [0; 3];
        for address in &mut memory {
            sys::cuMemAllocFromPoolAsync(address, 4 * MIB as usize, pool, stream).result().unwrap();
        }
        assert_eq!((attribute(pool, used), attribute(pool, reserved)), (12 * MIB, 12 * MIB));
        for address in memory {
            result::free_async(address, stream).unwrap();
        }
        cuda.synchronize(stream);
        assert_eq!((attribute(pool, used), attribute(pool, reserved)), (0, 8 * MIB));
        assert_eq!(result::mem_get_info().unwrap().0 as u64, 56 * MIB);
        sys::cuMemPoolTrimTo(pool, MIB as usize).result().unwrap();
        assert_eq!(attribute(pool, reserved), MIB);
        sys::cuMemPoolDestroy(pool).result().unwrap();
    }
    assert_eq!(result::mem_get_info().unwrap().0 as u64, 64 * MIB);
    cuda.destroy(stream);
    standin.report().assert_clean();
}

#[test]
fn many_threads_and_streams_keep_their_order() {
    let standin = session(&Config { piece_bytes: 8192, ..Config::with_devices(&[256 * MIB]).seed(11) });
    let cuda = Cuda::open(0);
    let context = cuda.context as usize;
    std::thread::scope(|scope| {
        for thread in 0..4_u8 {
            scope.spawn(move || {
                // SAFETY: the context outlives the threads.
                unsafe { result::ctx::set_current(context as sys::CUcontext).unwrap() };
                let cuda = Cuda { device: 0, context: context as sys::CUcontext };
                let (up, down, len) = (cuda.stream(), cuda.stream(), 64 << 10);
                let (device, target) = (cuda.alloc(len), cuda.pin(&vec![0; len]));
                for round in 0..40 {
                    let bytes = pattern(len, thread.wrapping_mul(50).wrapping_add(round));
                    let source = cuda.pin(&bytes);
                    cuda.upload(device, source, len, up);
                    let landed = cuda.record(up);
                    cuda.wait(down, landed);
                    cuda.download(target, device, len, down);
                    cuda.synchronize(down);
                    assert!(cuda.host(target, len) == bytes);
                    cuda.unpin(source);
                    cuda.forget(landed);
                }
                cuda.free(device);
                cuda.unpin(target);
                cuda.destroy(up);
                cuda.destroy(down);
            });
        }
    });
    standin.report().assert_clean();
}

#[test]
fn ten_thousand_calls_take_no_time_to_speak_of() {
    let standin = session(&Config::with_devices(&[64 * MIB]));
    let cuda = Cuda::open(0);
    let (stream, other) = (cuda.stream(), cuda.stream());
    // Of this thread's own time with a processor, since others may have all of them.
    let began = ticks();
    for _ in 0..2500 {
        let event = cuda.record(stream);
        cuda.wait(other, event);
        cuda.forget(event);
    }
    let took = ticks() - began;
    println!("{took} ms for 10,000 calls");
    assert!(took < 1000, "{took} ms");
    standin.report().assert_lawful();
}

/// Milliseconds that this thread has run, to about ten.
fn ticks() -> u64 {
    let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
    // Behind the name in parentheses the state comes first, the times in hundredths of a second as 12th and 13th.
    let fields = stat[stat.rfind(')').unwrap() + 1..].split_whitespace();
    10 * fields.skip(11).take(2).map(|time| time.parse::<u64>().unwrap()).sum::<u64>()
}
