//! The driver's exported calls, each a shim: null checks and pointer writes, nothing else.
#![allow(non_snake_case, reason = "the names are the driver's")]
#![allow(unreachable_pub, reason = "exported by name")]
#![allow(clippy::missing_safety_doc, reason = "the contracts are the driver's own")]

use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};

use crate::batch::{Piece, SourceOrder};
use crate::capture::exchange_mode;
use crate::code::{Code, Outcome, describe};
use crate::kernel::Shape;
use crate::lane::HostCall;
use crate::pointer::Value;
use crate::vendor::{Vendor, exported};
use crate::world::{Call, World};

/// `CUmemPoolProps`, as far as it is looked at.
#[repr(C)]
pub struct PoolProperties {
    allocation: c_int,
    handles: c_int,
    location: Location,
}

/// `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Location {
    kind: c_int,
    id: c_int,
}

/// `CUmemAccessDesc`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct AccessDescription {
    location: Location,
    flags: c_int,
}

/// `CUmemcpyAttributes`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct CopyAttributes {
    order: c_int,
    source: Location,
    target: Location,
    flags: c_uint,
}

const LOCATION_DEVICE: c_int = 1;
const ACCESS_NONE: c_int = 0;
const ACCESS_READ_WRITE: c_int = 3;

/// Writes what is made to where the caller wants it; makes nothing when that is nowhere.
///
/// # Safety
/// A pointer that is not null must be good for a write.
pub(crate) unsafe fn give<T>(at: *mut T, make: impl FnOnce() -> Outcome<T>) -> Outcome<()> {
    if at.is_null() {
        return Err(Code::INVALID_VALUE);
    }
    let made = make()?;
    // SAFETY: not null, and the caller's promise.
    unsafe { at.write(made) };
    Ok(())
}

/// Writes a text with its closing zero, cut to the room there is.
///
/// # Safety
/// `at` must be null or good for `len` bytes.
pub(crate) unsafe fn give_text(at: *mut c_char, len: c_int, text: &str) -> Outcome<()> {
    let room = usize::try_from(len).unwrap_or(0);
    if at.is_null() || room == 0 {
        return Err(Code::INVALID_VALUE);
    }
    let used = text.len().min(room - 1);
    // SAFETY: `used` + 1 bytes fit in the caller's `room`.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr(), at.cast::<u8>(), used);
        at.add(used).write(0);
    }
    Ok(())
}

/// A handle that came as a pointer.
pub(crate) fn number(handle: *mut c_void) -> u64 {
    handle.addr() as u64
}

pub(crate) fn handle(number: u64) -> *mut c_void {
    std::ptr::without_provenance_mut(number as usize)
}

fn access_devices(call: &Call<'_>, pool: u64, wanted: &[AccessDescription]) -> Outcome<()> {
    for description in wanted {
        if description.location.kind != LOCATION_DEVICE {
            return Err(Code::INVALID_VALUE);
        }
        call.set_pool_access(pool, description.location.id, description.flags == ACCESS_READ_WRITE)?;
    }
    Ok(())
}

/// A batch of copies, as the driver's two interfaces give it; what a reader is told of the one that failed.
///
/// # Safety
/// The arrays must be null or as long as their counts say.
unsafe fn batch(
    call: &Call<'_>,
    (dsts, srcs, sizes, count): (*const Address, *const Address, *const usize, usize),
    (attributes, firsts, kinds): (*const CopyAttributes, *const usize, usize),
    stream: Handle,
) -> Result<(), (Code, usize)> {
    let of_none = |code| (code, usize::MAX);
    let missing = dsts.is_null() || srcs.is_null() || sizes.is_null() || attributes.is_null() || firsts.is_null();
    if missing || count == 0 || kinds == 0 || kinds > count {
        return Err(of_none(Code::INVALID_VALUE));
    }
    // SAFETY: not null, and the caller's promise.
    let (firsts, attributes) =
        unsafe { (std::slice::from_raw_parts(firsts, kinds), std::slice::from_raw_parts(attributes, kinds)) };
    let increasing = firsts.windows(2).all(|pair| pair[0] < pair[1]);
    if firsts[0] != 0 || !increasing || firsts[kinds - 1] >= count {
        return Err(of_none(Code::INVALID_VALUE));
    }
    let mut pieces = Vec::with_capacity(count);
    let mut kind = 0;
    for index in 0..count {
        kind += usize::from(firsts.get(kind + 1) == Some(&index));
        let order = SourceOrder::of(attributes[kind].order).filter(|_| attributes[kind].flags <= 1);
        let order = order.ok_or((Code::INVALID_VALUE, index))?;
        // SAFETY: index < count, and the caller's promise.
        let (dst, src, len) = unsafe { (*dsts.add(index), *srcs.add(index), *sizes.add(index)) };
        pieces.push(Piece { dst, src, len: len as u64, order });
    }
    call.copy_batch(&pieces, number(stream))
}

/// A module's text: it ends with a zero; what is no text, an assembled one for instance, is not taken.
///
/// # Safety
/// The image must be null or end with a zero.
pub(crate) unsafe fn text<'i>(image: *const c_void) -> Outcome<&'i str> {
    if image.is_null() {
        return Err(Code::INVALID_VALUE);
    }
    // SAFETY: not null, and the caller's promise.
    unsafe { CStr::from_ptr(image.cast()) }.to_str().map_err(|_| Code::INVALID_PTX)
}

/// # Safety
/// The name must be null or end with a zero.
pub(crate) unsafe fn named_function(call: &Call<'_>, module: Handle, name: *const c_char) -> Outcome<Handle> {
    if name.is_null() {
        return Err(Code::INVALID_VALUE);
    }
    // SAFETY: not null, and the caller's promise.
    let name = unsafe { CStr::from_ptr(name) }.to_str().map_err(|_| Code::NOT_FOUND)?;
    call.function(number(module), name).map(handle)
}

/// # Safety
/// The parameters must be null or as many as the function has, each good for as many bytes as it has.
pub(crate) unsafe fn launch(
    call: &Call<'_>,
    function: Handle,
    shape: Shape,
    shared: c_uint,
    stream: Handle,
    (params, extra): (Out<Handle>, Out<Handle>),
) -> Outcome<()> {
    if !extra.is_null() || shared != 0 {
        return Err(Code::NOT_SUPPORTED);
    }
    let sizes = call.parameters(number(function))?;
    if params.is_null() && !sizes.is_empty() {
        return Err(Code::INVALID_VALUE);
    }
    let mut values = Vec::new();
    for (index, size) in sizes.into_iter().enumerate() {
        let mut raw = [0; 8];
        // SAFETY: the caller's promise.
        unsafe { std::ptr::copy_nonoverlapping(params.add(index).read().cast::<u8>(), raw.as_mut_ptr(), size) };
        values.push(u64::from_le_bytes(raw));
    }
    call.launch(number(function), shape, number(stream), values)
}

pub(crate) type Out<T> = *mut T;
pub(crate) type Handle = *mut c_void;
pub(crate) type Address = u64;

#[allow(unused_unsafe, reason = "many calls only pass numbers on")]
mod calls {
    use super::*;

    exported! { Cuda:
        fn cuInit(_flags: c_uint) |call| call.init();
        fn cuDriverGetVersion(version: Out<c_int>) |call| give(version, || Ok(call.driver_version()));

        fn cuDeviceGetCount(count: Out<c_int>) |call| give(count, || Ok(call.device_count() as c_int));
        fn cuDeviceGet(device: Out<c_int>, ordinal: c_int) |call| {
            give(device, || call.device_index(ordinal).map(|index| index as c_int))
        };
        fn cuDeviceGetName(name: Out<c_char>, len: c_int, device: c_int) |call| {
            give_text(name, len, &call.described(device)?.name)
        };
        fn cuDeviceGetPCIBusId(id: Out<c_char>, len: c_int, device: c_int) |call| {
            give_text(id, len, &call.described(device)?.pci_bus_id)
        };
        fn cuDeviceGetUuid(uuid: Out<[u8; 16]>, device: c_int) |call| {
            give(uuid, || Ok(call.described(device)?.uuid))
        };
        fn cuDeviceGetUuid_v2(uuid: Out<[u8; 16]>, device: c_int) |call| {
            give(uuid, || Ok(call.described(device)?.uuid))
        };
        fn cuDeviceTotalMem_v2(bytes: Out<usize>, device: c_int) |call| {
            give(bytes, || Ok(call.described(device)?.total as usize))
        };
        fn cuDeviceGetAttribute(value: Out<c_int>, attribute: c_int, device: c_int) |call| {
            give(value, || call.attribute(device, attribute))
        };
        fn cuDeviceCanAccessPeer(can: Out<c_int>, device: c_int, peer: c_int) |call| {
            give(can, || call.can_reach(device, peer).map(c_int::from))
        };
        fn cuDeviceGetP2PAttribute(value: Out<c_int>, attribute: c_int, from: c_int, to: c_int) |call| {
            give(value, || call.peer_attribute(attribute, from, to))
        };

        fn cuDevicePrimaryCtxRetain(context: Out<Handle>, device: c_int) |call| {
            give(context, || call.retain(device).map(handle))
        };
        fn cuDevicePrimaryCtxRelease_v2(device: c_int) |call| call.release(device);
        fn cuDevicePrimaryCtxReset_v2(device: c_int) |call| call.reset_primary(device);
        fn cuDevicePrimaryCtxGetState(device: c_int, flags: Out<c_uint>, active: Out<c_int>) |call| {
            let (set, is_active) = call.primary_state(device)?;
            give(flags, || Ok(set)).and_then(|()| give(active, || Ok(c_int::from(is_active))))
        };
        fn cuCtxGetCurrent(context: Out<Handle>) |call| give(context, || Ok(handle(call.current_context())));
        fn cuCtxSetCurrent(context: Handle) |call| call.make_current(number(context));
        fn cuCtxGetDevice(device: Out<c_int>) |call| {
            give(device, || call.device(&call.state()).map(|index| index as c_int))
        };
        fn cuCtxSetFlags(flags: c_uint) |call| call.set_context_flags(flags);
        fn cuCtxSynchronize() |call| call.synchronize_context();
        fn cuCtxGetStreamPriorityRange(least: Out<c_int>, greatest: Out<c_int>) |call| {
            call.device(&call.state())?;
            let (low, high) = Vendor::Cuda.priorities();
            give(least, || Ok(low)).and_then(|()| give(greatest, || Ok(high)))
        };
        fn cuCtxEnablePeerAccess(peer: Handle, _flags: c_uint) |call| call.set_peer_access(number(peer), true);
        fn cuCtxDisablePeerAccess(peer: Handle) |call| call.set_peer_access(number(peer), false);

        fn cuStreamCreate(stream: Out<Handle>, flags: c_uint) |call| {
            give(stream, || call.create_stream(flags, 0).map(handle))
        };
        fn cuStreamCreateWithPriority(stream: Out<Handle>, flags: c_uint, priority: c_int) |call| {
            give(stream, || call.create_stream(flags, priority).map(handle))
        };
        fn cuStreamDestroy_v2(stream: Handle) |call| call.destroy_stream(number(stream));
        fn cuStreamGetCtx(stream: Handle, context: Out<Handle>) |call| {
            give(context, || call.stream_info(number(stream)).map(|(context, _, _)| handle(context)))
        };
        fn cuStreamGetFlags(stream: Handle, flags: Out<c_uint>) |call| {
            give(flags, || call.stream_info(number(stream)).map(|(_, flags, _)| flags))
        };
        fn cuStreamGetPriority(stream: Handle, priority: Out<c_int>) |call| {
            give(priority, || call.stream_info(number(stream)).map(|(_, _, priority)| priority))
        };
        fn cuStreamQuery(stream: Handle) |call| call.query_stream(number(stream));
        fn cuStreamSynchronize(stream: Handle) |call| call.synchronize_stream(number(stream));
        fn cuStreamWaitEvent(stream: Handle, event: Handle, _flags: c_uint) |call| {
            call.wait_event(number(stream), number(event))
        };
        fn cuStreamIsCapturing(stream: Handle, status: Out<c_int>) |call| {
            give(status, || call.capture_status(number(stream)))
        };
        fn cuStreamBeginCapture_v2(stream: Handle, mode: c_int) |call| call.begin_capture(number(stream), mode);
        fn cuStreamEndCapture(stream: Handle, graph: Out<Handle>) |call| {
            give(graph, || call.end_capture(number(stream)).map(handle))
        };
        fn cuThreadExchangeStreamCaptureMode(mode: Out<c_int>) |call| {
            let _ = call;
            if mode.is_null() {
                return Err(Code::INVALID_VALUE);
            }
            let before = exchange_mode(mode.read())?;
            give(mode, || Ok(before))
        };
        fn cuGraphGetNodes(graph: Handle, _nodes: Out<Handle>, count: Out<usize>) |call| {
            give(count, || call.graph_nodes(number(graph)))
        };
        fn cuGraphDestroy(graph: Handle) |call| call.destroy_graph(number(graph));
        fn cuGraphInstantiateWithFlags(executable: Out<Handle>, graph: Handle, flags: c_ulonglong) |call| {
            give(executable, || call.instantiate(number(graph), flags).map(handle))
        };
        fn cuGraphInstantiate_v2(
            executable: Out<Handle>, graph: Handle, failed: Out<Handle>, log: Out<c_char>, room: usize,
        ) |call| {
            if !failed.is_null() {
                failed.write(std::ptr::null_mut());
            }
            if !log.is_null() && room > 0 {
                log.write(0);
            }
            give(executable, || call.instantiate(number(graph), 0).map(handle))
        };
        fn cuGraphUpload(executable: Handle, stream: Handle) |call| call.upload_graph(number(executable), number(stream));
        fn cuGraphLaunch(executable: Handle, stream: Handle) |call| call.launch_graph(number(executable), number(stream));
        fn cuGraphExecDestroy(executable: Handle) |call| call.destroy_executable(number(executable));
        fn cuLaunchHostFunc(stream: Handle, function: Option<unsafe extern "C" fn(*mut c_void)>, argument: *mut c_void) |call| {
            let function = function.ok_or(Code::INVALID_VALUE)?;
            call.launch_host_function(number(stream), HostCall { function, argument })
        };

        fn cuEventCreate(event: Out<Handle>, flags: c_uint) |call| {
            give(event, || call.create_event(flags).map(handle))
        };
        fn cuEventDestroy_v2(event: Handle) |call| call.destroy_event(number(event));
        fn cuEventRecord(event: Handle, stream: Handle) |call| call.record(number(event), number(stream));
        fn cuEventQuery(event: Handle) |call| call.query_event(number(event));
        fn cuEventSynchronize(event: Handle) |call| call.synchronize_event(number(event));
        fn cuEventElapsedTime(millis: Out<f32>, start: Handle, end: Handle) |call| {
            give(millis, || call.elapsed(number(start), number(end)))
        };
        fn cuEventElapsedTime_v2(millis: Out<f32>, start: Handle, end: Handle) |call| {
            give(millis, || call.elapsed(number(start), number(end)))
        };

        fn cuMemGetInfo_v2(free: Out<usize>, total: Out<usize>) |call| {
            let (left, all) = call.memory_info()?;
            give(free, || Ok(left as usize)).and_then(|()| give(total, || Ok(all as usize)))
        };
        fn cuMemAlloc_v2(address: Out<Address>, bytes: usize) |call| give(address, || call.allocate(bytes as u64));
        fn cuMemFree_v2(address: Address) |call| call.free(address);
        fn cuMemAllocAsync(address: Out<Address>, bytes: usize, stream: Handle) |call| {
            give(address, || call.allocate_async(bytes as u64, None, number(stream)))
        };
        fn cuMemAllocFromPoolAsync(address: Out<Address>, bytes: usize, pool: Handle, stream: Handle) |call| {
            give(address, || call.allocate_async(bytes as u64, Some(number(pool)), number(stream)))
        };
        fn cuMemFreeAsync(address: Address, stream: Handle) |call| call.free_async(address, number(stream));
        fn cuPointerGetAttribute(data: Handle, attribute: c_uint, address: Address) |call| {
            match call.pointer_attribute(attribute, address)? {
                Value::Narrow(value) => give(data.cast::<u32>(), || Ok(value)),
                Value::Wide(value) => give(data.cast::<u64>(), || Ok(value)),
            }
        };

        fn cuDeviceGetDefaultMemPool(pool: Out<Handle>, device: c_int) |call| {
            give(pool, || call.default_pool(device).map(handle))
        };
        fn cuDeviceGetMemPool(pool: Out<Handle>, device: c_int) |call| {
            give(pool, || call.device_pool(device).map(handle))
        };
        fn cuDeviceSetMemPool(device: c_int, pool: Handle) |call| call.set_device_pool(device, number(pool));
        fn cuMemPoolCreate(pool: Out<Handle>, properties: *const PoolProperties) |call| {
            let properties = properties.as_ref().ok_or(Code::INVALID_VALUE)?;
            if properties.location.kind != LOCATION_DEVICE {
                return Err(Code::INVALID_VALUE);
            }
            give(pool, || call.create_pool(properties.location.id).map(handle))
        };
        fn cuMemPoolDestroy(pool: Handle) |call| call.destroy_pool(number(pool));
        fn cuMemPoolTrimTo(pool: Handle, keep: usize) |call| call.trim_pool(number(pool), keep as u64);
        fn cuMemPoolGetAttribute(pool: Handle, attribute: c_uint, value: Handle) |call| {
            let found = call.pool_attribute(number(pool), attribute)?;
            if attribute <= 3 {
                give(value.cast::<c_int>(), || Ok(found as c_int))
            } else {
                give(value.cast::<u64>(), || Ok(found))
            }
        };
        fn cuMemPoolSetAttribute(pool: Handle, attribute: c_uint, value: Handle) |call| {
            if value.is_null() {
                return Err(Code::INVALID_VALUE);
            }
            let wanted = if attribute <= 3 { value.cast::<c_int>().read() as u64 } else { value.cast::<u64>().read() };
            call.set_pool_attribute(number(pool), attribute, wanted)
        };
        fn cuMemPoolSetAccess(pool: Handle, wanted: *const AccessDescription, count: usize) |call| {
            if wanted.is_null() || count == 0 {
                return Err(Code::INVALID_VALUE);
            }
            access_devices(call, number(pool), std::slice::from_raw_parts(wanted, count))
        };
        fn cuMemPoolGetAccess(flags: Out<c_int>, pool: Handle, location: *const Location) |call| {
            let location = location.as_ref().ok_or(Code::INVALID_VALUE)?;
            give(flags, || {
                let access = call.pool_access(number(pool), location.id)?;
                Ok(if access { ACCESS_READ_WRITE } else { ACCESS_NONE })
            })
        };

        fn cuMemHostAlloc(at: Out<Handle>, bytes: usize, flags: c_uint) |call| {
            give(at, || {
                let base = call.host_allocate(bytes as u64, flags)?;
                Ok(std::ptr::with_exposed_provenance_mut(base as usize))
            })
        };
        fn cuMemFreeHost(at: Handle) |call| call.unpin(number(at), false);
        fn cuMemHostRegister_v2(at: Handle, bytes: usize, flags: c_uint) |call| {
            call.host_register(at.cast::<u8>(), bytes as u64, flags)
        };
        fn cuMemHostUnregister(at: Handle) |call| call.unpin(number(at), true);
        fn cuMemHostGetFlags(flags: Out<c_uint>, at: Handle) |call| give(flags, || call.host_flags(number(at)));
        fn cuMemHostGetDevicePointer_v2(address: Out<Address>, at: Handle, _flags: c_uint) |call| {
            give(address, || call.host_device_pointer(number(at)))
        };

        fn cuMemcpyHtoD_v2(dst: Address, src: *const c_void, bytes: usize) |call| {
            call.upload(dst, src.cast(), bytes as u64, 0, true)
        };
        fn cuMemcpyHtoDAsync_v2(dst: Address, src: *const c_void, bytes: usize, stream: Handle) |call| {
            call.upload(dst, src.cast(), bytes as u64, number(stream), false)
        };
        fn cuMemcpyDtoH_v2(dst: Handle, src: Address, bytes: usize) |call| {
            call.download(dst.cast(), src, bytes as u64, 0, true)
        };
        fn cuMemcpyDtoHAsync_v2(dst: Handle, src: Address, bytes: usize, stream: Handle) |call| {
            call.download(dst.cast(), src, bytes as u64, number(stream), false)
        };
        fn cuMemcpyDtoD_v2(dst: Address, src: Address, bytes: usize) |call| {
            call.across((dst, None), (src, None), bytes as u64, 0, false)
        };
        fn cuMemcpyDtoDAsync_v2(dst: Address, src: Address, bytes: usize, stream: Handle) |call| {
            call.across((dst, None), (src, None), bytes as u64, number(stream), false)
        };
        fn cuMemcpyPeerAsync(dst: Address, dst_context: Handle, src: Address, src_context: Handle, bytes: usize, stream: Handle) |call| {
            let (dst, src) = ((dst, Some(number(dst_context))), (src, Some(number(src_context))));
            call.across(dst, src, bytes as u64, number(stream), false)
        };
        fn cuMemcpyBatchAsync(
            dsts: *const Address, srcs: *const Address, sizes: *const usize, count: usize,
            attributes: *const CopyAttributes, firsts: *const usize, kinds: usize, failed: Out<usize>, stream: Handle,
        ) |call| {
            call.since(12_080)?;
            batch(call, (dsts, srcs, sizes, count), (attributes, firsts, kinds), stream).map_err(|(code, index)| {
                if !failed.is_null() && code != Code::CAPTURED {
                    failed.write(index);
                }
                code
            })
        };
        fn cuMemcpyBatchAsync_v2(
            dsts: *const Address, srcs: *const Address, sizes: *const usize, count: usize,
            attributes: *const CopyAttributes, firsts: *const usize, kinds: usize, stream: Handle,
        ) |call| {
            call.since(13_000)?;
            batch(call, (dsts, srcs, sizes, count), (attributes, firsts, kinds), stream).map_err(|(code, _)| code)
        };
        fn cuMemsetD8_v2(dst: Address, byte: u8, count: usize) |call| call.fill(dst, byte, count as u64, 0);
        fn cuMemsetD8Async(dst: Address, byte: u8, count: usize, stream: Handle) |call| {
            call.fill(dst, byte, count as u64, number(stream))
        };

        fn cuModuleLoadData(module: Out<Handle>, image: *const c_void) |call| {
            give(module, || call.load_module(text(image)?).map(handle))
        };
        fn cuModuleUnload(module: Handle) |call| call.unload_module(number(module));
        fn cuModuleGetFunction(function: Out<Handle>, module: Handle, name: *const c_char) |call| {
            give(function, || named_function(call, module, name))
        };
        fn cuLaunchKernel(
            function: Handle, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint,
            block_z: c_uint, shared: c_uint, stream: Handle, params: Out<Handle>, extra: Out<Handle>,
        ) |call| {
            let shape = Shape { blocks: [grid_x, grid_y, grid_z], threads: [block_x, block_y, block_z] };
            launch(call, function, shape, shared, stream, (params, extra))
        };
    }
}

/// The name of a result that the driver's version knows.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorName(error: c_uint, text: *mut *const c_char) -> u32 {
    // SAFETY: the caller's pointer.
    unsafe { give_description(error, text, |(name, _)| name.as_ptr()) }
}

/// The description of a result that the driver's version knows.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorString(error: c_uint, text: *mut *const c_char) -> u32 {
    // SAFETY: the caller's pointer.
    unsafe { give_description(error, text, |(_, text)| text.as_ptr()) }
}

unsafe fn give_description(
    error: c_uint,
    at: *mut *const c_char,
    pick: impl Fn((&'static std::ffi::CStr, &'static std::ffi::CStr)) -> *const c_char,
) -> u32 {
    let picked = describe(error, World::version()).map(pick);
    // SAFETY: the caller's pointer, checked for null.
    let given = unsafe { give(at, || Ok(picked.unwrap_or(std::ptr::null()))) };
    given.err().or(picked.is_none().then_some(Code::INVALID_VALUE)).map_or(0, |code| code.0)
}
