//! The calls of Ascend's ACL, each a shim, and what is other there than with CUDA. Devices have one default context for all
//! threads, which is counted, and further ones; a failure of work is a context's matter, and by default nobody is told of it.
//! Numbers are those of the header of ACL 1.17; what a call does where the documentation says nothing is what the runtime's
//! source does (hicann/runtime, commit 681ef76).
#![allow(non_snake_case, reason = "the names are the library's")]
#![allow(unreachable_pub, reason = "exported by name")]
#![allow(clippy::missing_safety_doc, reason = "the contracts are the library's own")]

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::capture::exchange_mode;
use crate::code::{Code, Outcome};
use crate::ffi::{Handle, Out, give, give_text, handle, number as address};
use crate::lane::{HostCall, Record};
use crate::memory::BASE;
use crate::pinned::{PORTABLE, UNPINNED};
use crate::vendor::{exported, own};
use crate::world::{Call, World};

/// The first layer's word for a null or a size of 0; the runtime below says [`Code::INVALID_VALUE`].
const PARAM: Code = own(100_000);
const REPEAT_INITIALIZE: Code = own(100_002);
const REPEAT_FINALIZE: Code = own(100_037);
/// A stream of another context than the current one.
pub(crate) const STREAM_CONTEXT: Code = own(107_003);
const UNALIGNED: Code = own(107_008);
pub(crate) const LOST_HEARTBEAT: Code = own(507_010);
const STREAM_SYNC_TIMEOUT: Code = own(507_046);
const EVENT_SYNC_TIMEOUT: Code = own(507_047);

/// A result as the library numbers it.
pub(crate) fn number(code: Code) -> u32 {
    match code {
        Code::INVALID_VALUE | Code::NOT_FOUND => 107_000,
        Code::OUT_OF_MEMORY => 207_001,
        Code::NOT_INITIALIZED => 100_001,
        Code::NO_DEVICE => 207_004,
        Code::INVALID_DEVICE => 107_001,
        Code::INVALID_CONTEXT | Code::CONTEXT_IS_DESTROYED => 107_002,
        Code::INVALID_HANDLE => 107_017,
        Code::NO_EVENT => 207_007,
        Code::NO_STREAM => 207_008,
        // What a host function gets that calls the library is not in its documentation.
        Code::NOT_PERMITTED => 207_006,
        // Neither is what peers get that cannot be reached or were not enabled.
        Code::NOT_SUPPORTED | Code::PEER_ACCESS_UNSUPPORTED | Code::PEER_ACCESS_NOT_ENABLED => 207_000,
        Code::HOST_MEMORY_ALREADY_REGISTERED => 507_910,
        Code::HOST_MEMORY_NOT_REGISTERED => 507_911,
        Code::STREAM_CAPTURE_UNSUPPORTED => 107_030,
        Code::STREAM_CAPTURE_IMPLICIT => 107_031,
        Code::STREAM_CAPTURE_ISOLATION => 107_024,
        Code::CAPTURED_EVENT => 107_028,
        Code::STREAM_CAPTURE_INVALIDATED => 507_903,
        _ => 507_000,
    }
}

/// Whether a failure with this result is the whole device's, and not only its context's.
pub(crate) fn ends_the_device(code: Code) -> bool {
    matches!(crate::vendor::Vendor::Acl.number(code), 107_022 | 507_010 | 507_053..=507_057 | 507_901)
}

const EVENT_SYNC: c_uint = 1;
/// All flags of events, of which one must be given: for waits of streams, for queries, for times, and for uses that are not
/// looked at here.
pub(crate) const EVENT_FLAGS: c_uint = 0x7F;

/// Whether a stream may wait for an event of these flags: one for synchronisation, for another graph or another process.
pub(crate) fn may_be_waited_for(flags: c_uint) -> bool {
    flags & (EVENT_SYNC | 0x4 | 0x20 | 0x40) != 0
}

const COMPLETE: c_int = 1;
const NOT_READY: c_int = 0;
/// Streams have the opposite sense.
const STREAM_COMPLETE: c_int = 0;
const STREAM_NOT_READY: c_int = 1;

const HOST_TO_DEVICE: c_int = 1;
const DEVICE_TO_HOST: c_int = 2;
const DEVICE_TO_DEVICE: c_int = 3;
const BY_ADDRESS: c_int = 4;
/// The host memory may go at once.
const BUFFER_TO_DEVICE: c_int = 5;
const WITHIN_DEVICE: c_int = 6;
const BETWEEN_DEVICES: c_int = 7;

const REGISTER_PINNED: c_uint = 0x1000_0000;
const PAGE: u64 = 4096;

/// How often the library was initialised and not given up.
static USERS: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// The last failure of this thread that it has not asked about, and the text that it was given.
    static MESSAGES: RefCell<(Option<CString>, Option<CString>)> = const { RefCell::new((None, None)) };
}

/// Keeps what a thread may ask about a call that failed.
pub(crate) fn remember(call: &'static str, number: u32) {
    let text = CString::new(format!("{call} failed with {number}")).unwrap_or_default();
    let _ = MESSAGES.try_with(|messages| messages.borrow_mut().0 = Some(text));
}

/// Writes what is made; nowhere is the first layer's matter.
///
/// # Safety
/// A pointer that is not null must be good for a write.
unsafe fn put<T>(at: *mut T, make: impl FnOnce() -> Outcome<T>) -> Outcome<()> {
    // SAFETY: the caller's promise.
    if at.is_null() { Err(PARAM) } else { unsafe { give(at, make) } }
}

impl Call<'_> {
    /// The first call opens the driver; a later one is counted, and says that it was not the first.
    fn init_once(&self) -> Outcome<()> {
        self.init()?;
        if USERS.fetch_add(1, Ordering::AcqRel) == 0 { Ok(()) } else { Err(REPEAT_INITIALIZE) }
    }

    /// Gives the library up, whoever else uses it.
    fn finalize(&self) -> Outcome<()> {
        USERS.store(0, Ordering::Release);
        if self.uninit() { Ok(()) } else { Err(REPEAT_FINALIZE) }
    }

    /// Gives one use of the library up; how many are left.
    fn finalize_one(&self) -> Outcome<u64> {
        let left = USERS.fetch_update(Ordering::AcqRel, Ordering::Acquire, |users| users.checked_sub(1));
        match left.map_err(|_| REPEAT_FINALIZE)? {
            1 => self.finalize().map(|()| 0),
            users => Ok(users - 1),
        }
    }

    /// Makes a device's default context current; each call is one to take back.
    fn set_device(&self, device: c_int) -> Outcome<()> {
        Call::set_current_context(self.retain(device)?);
        Ok(())
    }

    /// Takes one back; with the last one goes the default context.
    fn reset_device(&self, device: c_int) -> Outcome<()> {
        self.release(device)?;
        if !self.state().contexts.contains_key(&Call::current_context()) {
            Call::set_current_context(0);
        }
        Ok(())
    }

    /// The current context and its device; asking is no mistake where there is none.
    fn current(&self) -> Outcome<(u64, usize)> {
        let context = Call::current_context();
        let device = self.state().contexts.get(&context).copied().ok_or(Code::INVALID_CONTEXT)?;
        Ok((context, device))
    }

    fn device_info(&self, device: c_uint, attribute: c_uint) -> Outcome<i64> {
        let device = c_int::try_from(device).map_err(|_| Code::INVALID_DEVICE)?;
        let config = self.described(device)?;
        match attribute {
            101 | 201 => Ok(i64::from(config.multiprocessors)), // cores of the two kinds
            202 => Ok(32),                                      // warp
            301 => Ok(config.total as i64),
            302 => Ok(192 << 20), // L2
            402 => Ok(i64::from(device)),
            408 | 501 => Ok(0), // PCIe; not virtual
            _ => Err(Code::INVALID_VALUE),
        }
    }

    /// Lets the current device reach another one, which then does not reach it. Twice is once.
    fn enable_peer(&self, peer: c_int, flags: c_uint) -> Outcome<()> {
        if flags != 0 {
            return Err(own(200_006));
        }
        let peer = self.device_index(peer)?;
        if self.current()?.1 == peer {
            return Err(PARAM);
        }
        match self.set_reach(peer, true) {
            Err(Code::PEER_ACCESS_ALREADY_ENABLED) => Ok(()),
            reached => reached,
        }
    }

    fn copy_some(
        &self,
        (dst, room): (Handle, usize),
        (src, len): (*const c_void, usize),
        kind: c_int,
        stream: Option<Handle>,
    ) -> Outcome<()> {
        if len == 0 {
            return Ok(());
        }
        if dst.is_null() || src.is_null() {
            return Err(PARAM);
        }
        if len > room {
            return Err(Code::INVALID_VALUE);
        }
        let (to, from, len) = (address(dst), src.addr() as u64, len as u64);
        let kind = match (kind, to >= BASE, from >= BASE) {
            (BY_ADDRESS, true, true) => DEVICE_TO_DEVICE,
            (BY_ADDRESS, true, false) => HOST_TO_DEVICE,
            (BY_ADDRESS, false, true) => DEVICE_TO_HOST,
            _ => kind,
        };
        // A copy without a stream is over when it returns, and is in the order of none.
        let (wait, stream) = (stream.is_none(), stream.map_or(0, address));
        match kind {
            HOST_TO_DEVICE => self.upload(to, src.cast(), len, stream, wait),
            BUFFER_TO_DEVICE => self.upload(to, src.cast(), len, stream, true),
            DEVICE_TO_HOST => self.download(dst.cast(), from, len, stream, wait),
            DEVICE_TO_DEVICE | WITHIN_DEVICE | BETWEEN_DEVICES => {
                self.across((to, None), (from, None), len, stream, wait)
            }
            // Within the host: not on a stream, and nobody needs the other.
            _ => Err(Code::NOT_SUPPORTED),
        }
    }

    /// Registers host memory: for copies if it says so, else for kernels alone.
    fn register(&self, at: Handle, len: u64, flags: c_uint) -> Outcome<()> {
        if at.is_null() || len == 0 {
            return Err(PARAM);
        }
        if !address(at).is_multiple_of(PAGE) {
            return Err(UNALIGNED);
        }
        let flags = if flags & REGISTER_PINNED == 0 { PORTABLE | UNPINNED } else { PORTABLE };
        self.host_register(at.cast::<u8>(), len, flags)
    }

    /// Lets a failure on a stream end all later work of its context. It cannot be taken back.
    fn set_failure_mode(&self, stream: u64, mode: u64) -> Outcome<()> {
        let mut state = self.state();
        let device = self.device(&state)?;
        let found = self.known_stream(&state, stream)?;
        let fate = state.fate_of(self.vendor, found.context).ok_or(Code::INVALID_HANDLE)?;
        match (fate.stops_on_failure(), mode & 1 != 0) {
            (stops, wanted) if stops == wanted => Ok(()),
            (true, _) => Err(Code::NOT_SUPPORTED),
            (false, _) => {
                self.of_current_context(&found, device)?;
                fate.stop_on_failure();
                Ok(())
            }
        }
    }

    /// Destroys a stream once its work has run.
    fn destroy_stream_when_done(&self, stream: u64) -> Outcome<()> {
        let ticket = {
            let state = self.state();
            let device = self.device(&state)?;
            let found = self.known_stream(&state, stream)?;
            self.of_current_context(&found, device)?;
            state.lanes[found.lane as usize].ticket()
        };
        self.world.shared.nudge();
        // The documentation asks for a wait before, so nothing is ordered by this one.
        ticket.wait();
        self.destroy_stream(stream)
    }

    /// Destroys a stream: what runs is cut short, and what is enqueued never runs.
    fn destroy_stream_now(&self, stream: u64) -> Outcome<()> {
        let ticket = {
            let state = self.state();
            let found = self.known_stream(&state, stream)?;
            state.lanes[found.lane as usize].ticket()
        };
        ticket.lane.stop();
        ticket.lane.join(Duration::from_secs(5));
        ticket.lane.abandon(ticket.epoch);
        self.destroy_stream(stream)
    }

    /// Waits no longer than so many milliseconds; -1: for ever.
    fn wait_within(&self, end: &Record, millis: c_int, timed_out: Code) -> Outcome<()> {
        if millis < -1 {
            return Err(Code::INVALID_VALUE);
        }
        self.world.shared.nudge();
        if let Ok(millis) = u64::try_from(millis)
            && !end.ticket.wait_at_most(Duration::from_millis(millis))
        {
            return Err(timed_out);
        }
        self.host_waits(std::slice::from_ref(&end.ticket), &end.clock);
        self.goes_on(&end.ticket.lane)
    }
}

/// What a query says: a value, where CUDA has a result.
fn asked(query: Outcome<()>, complete: c_int, not_ready: c_int) -> Outcome<c_int> {
    match query {
        Ok(()) => Ok(complete),
        Err(Code::NOT_READY) => Ok(not_ready),
        Err(code) => Err(code),
    }
}

#[allow(unused_unsafe, reason = "many calls only pass numbers on")]
mod calls {
    use super::*;

    exported! { Acl:
        fn aclInit(_config: *const c_char) |call| call.init_once();
        fn aclFinalize() |call| call.finalize();
        fn aclFinalizeReference(left: Out<u64>) |call| {
            let users = call.finalize_one()?;
            if !left.is_null() {
                left.write(users);
            }
            Ok(())
        };
        fn aclrtGetVersion(major: Out<c_int>, minor: Out<c_int>, patch: Out<c_int>) |call| {
            let version = call.world.config().acl_version;
            put(major, || Ok(version.0))?;
            put(minor, || Ok(version.1)).and_then(|()| put(patch, || Ok(version.2)))
        };

        fn aclrtGetDeviceCount(count: Out<c_uint>) |call| {
            put(count, || match call.device_count() {
                0 => Err(Code::NO_DEVICE),
                found => Ok(found as c_uint),
            })
        };
        fn aclrtGetDeviceInfo(device: c_uint, attribute: c_uint, value: Out<i64>) |call| {
            put(value, || call.device_info(device, attribute))
        };
        fn aclrtDeviceGetUuid(device: c_int, uuid: Out<[u8; 16]>) |call| put(uuid, || Ok(call.described(device)?.uuid));
        fn aclrtDeviceGetPCIBusId(device: c_int, id: Out<c_char>, len: c_int) |call| {
            give_text(id, len, &call.described(device)?.pci_bus_id)
        };
        fn aclrtQueryDeviceStatus(device: c_int, status: Out<c_int>) |call| {
            put(status, || Ok(c_int::from(call.whole(call.device_index(device)?).is_err())))
        };
        fn aclrtDeviceCanAccessPeer(can: Out<c_int>, device: c_int, peer: c_int) |call| {
            put(can, || if device == peer { Err(PARAM) } else { call.can_reach(device, peer).map(c_int::from) })
        };
        fn aclrtDeviceEnablePeerAccess(peer: c_int, flags: c_uint) |call| call.enable_peer(peer, flags);
        fn aclrtDeviceDisablePeerAccess(peer: c_int) |call| call.set_reach(call.device_index(peer)?, false);
        fn aclrtDevicePeerAccessStatus(device: c_int, peer: c_int, status: Out<c_int>) |call| {
            put(status, || {
                let (device, peer) = (call.device_index(device)?, call.device_index(peer)?);
                Ok(c_int::from(call.state().devices[device].reaches.contains(&peer)))
            })
        };
        fn aclrtDeviceGetStreamPriorityRange(least: Out<c_int>, greatest: Out<c_int>) |call| {
            let (low, high) = call.vendor.priorities();
            put(least, || Ok(low)).and_then(|()| put(greatest, || Ok(high)))
        };

        fn aclrtSetDevice(device: c_int) |call| call.set_device(device);
        fn aclrtResetDevice(device: c_int) |call| call.reset_device(device);
        fn aclrtGetDevice(device: Out<c_int>) |call| put(device, || Ok(call.current()?.1 as c_int));
        fn aclrtGetPrimaryCtxState(device: c_int, flags: Out<c_uint>, active: Out<c_int>) |call| {
            let (set, is_active) = call.primary_state(device)?;
            put(flags, || Ok(set)).and_then(|()| put(active, || Ok(c_int::from(is_active))))
        };
        fn aclrtGetCurrentContext(context: Out<Handle>) |call| put(context, || Ok(handle(call.current()?.0)));
        // None can be current and cannot be made current.
        fn aclrtSetCurrentContext(context: Handle) |call| {
            if context.is_null() { Err(PARAM) } else { call.make_current(address(context)) }
        };
        fn aclrtCreateContext(context: Out<Handle>, device: c_int) |call| {
            put(context, || call.create_context(device).map(handle))
        };
        fn aclrtDestroyContext(context: Handle) |call| {
            if context.is_null() { Err(PARAM) } else { call.destroy_context(address(context)) }
        };

        fn aclrtGetMemInfo(_kind: c_int, free: Out<usize>, total: Out<usize>) |call| {
            let (left, all) = call.memory_info()?;
            put(free, || Ok(left as usize)).and_then(|()| put(total, || Ok(all as usize)))
        };
        fn aclrtMalloc(at: Out<Handle>, bytes: usize, _policy: c_uint) |call| {
            put(at, || if bytes == 0 { Err(PARAM) } else { call.allocate(bytes as u64).map(handle) })
        };
        // At once: it waits for nothing that still uses the memory.
        fn aclrtFree(at: Handle) |call| if at.is_null() { Err(PARAM) } else { call.free(address(at)) };
        fn aclrtMallocHost(at: Out<Handle>, bytes: usize) |call| {
            put(at, || {
                if bytes == 0 {
                    return Err(PARAM);
                }
                let base = call.host_allocate(bytes as u64, PORTABLE)?;
                Ok(std::ptr::with_exposed_provenance_mut(base as usize))
            })
        };
        fn aclrtFreeHost(at: Handle) |call| if at.is_null() { Err(PARAM) } else { call.unpin(address(at), false) };
        fn aclrtHostRegister(at: Handle, bytes: u64, _kind: c_int, device: Out<Handle>) |call| {
            put(device, || call.register(at, bytes, 0).map(|()| at))
        };
        fn aclrtHostRegisterV2(at: Handle, bytes: u64, flags: c_uint) |call| call.register(at, bytes, flags);
        fn aclrtHostUnregister(at: Handle) |call| if at.is_null() { Err(PARAM) } else { call.unpin(address(at), true) };

        fn aclrtMemcpy(dst: Handle, room: usize, src: *const c_void, bytes: usize, kind: c_int) |call| {
            call.copy_some((dst, room), (src, bytes), kind, None)
        };
        fn aclrtMemcpyAsync(
            dst: Handle, room: usize, src: *const c_void, bytes: usize, kind: c_int, stream: Handle,
        ) |call| {
            call.copy_some((dst, room), (src, bytes), kind, Some(stream))
        };
        fn aclrtMemsetAsync(at: Handle, room: usize, value: c_int, bytes: usize, stream: Handle) |call| {
            if bytes > room {
                return Err(Code::INVALID_VALUE);
            }
            call.fill(address(at), value as u8, bytes as u64, address(stream))
        };

        // No stream takes turns with the default one.
        fn aclrtCreateStream(stream: Out<Handle>) |call| put(stream, || call.create_stream(1, 0).map(handle));
        fn aclrtCreateStreamWithConfig(stream: Out<Handle>, priority: c_uint, _flags: c_uint) |call| {
            put(stream, || call.create_stream(1, c_int::try_from(priority).unwrap_or(c_int::MAX)).map(handle))
        };
        fn aclrtDestroyStream(stream: Handle) |call| call.destroy_stream_when_done(address(stream));
        fn aclrtDestroyStreamForce(stream: Handle) |call| call.destroy_stream_now(address(stream));
        fn aclrtSetStreamFailureMode(stream: Handle, mode: u64) |call| call.set_failure_mode(address(stream), mode);
        fn aclrtStreamQuery(stream: Handle, status: Out<c_int>) |call| {
            call.device(&call.state())?;
            put(status, || asked(call.query_stream(address(stream)), STREAM_COMPLETE, STREAM_NOT_READY))
        };
        fn aclrtSynchronizeStream(stream: Handle) |call| call.synchronize_stream(address(stream));
        fn aclrtSynchronizeStreamWithTimeout(stream: Handle, millis: c_int) |call| {
            call.wait_within(&call.end_of_stream(address(stream))?, millis, STREAM_SYNC_TIMEOUT)
        };
        fn aclrtStreamWaitEvent(stream: Handle, event: Handle) |call| call.wait_event(address(stream), address(event));
        fn aclrtLaunchHostFunc(stream: Handle, function: Option<unsafe extern "C" fn(Handle)>, argument: Handle) |call| {
            let function = function.ok_or(PARAM)?;
            call.launch_host_function(address(stream), HostCall { function, argument })
        };

        fn aclrtCreateEventExWithFlag(event: Out<Handle>, flags: c_uint) |call| {
            put(event, || if flags == 0 { Err(Code::INVALID_VALUE) } else { call.create_event(flags).map(handle) })
        };
        fn aclrtDestroyEvent(event: Handle) |call| {
            if event.is_null() { Err(PARAM) } else { call.destroy_event(address(event)) }
        };
        fn aclrtRecordEvent(event: Handle, stream: Handle) |call| call.record(address(event), address(stream));
        fn aclrtQueryEventStatus(event: Handle, status: Out<c_int>) |call| {
            put(status, || asked(call.query_event(address(event)), COMPLETE, NOT_READY))
        };
        fn aclrtSynchronizeEvent(event: Handle) |call| call.synchronize_event(address(event));
        fn aclrtSynchronizeEventWithTimeout(event: Handle, millis: c_int) |call| {
            match call.point_of_event(address(event))? {
                Some(point) => call.wait_within(&point, millis, EVENT_SYNC_TIMEOUT),
                None => Ok(()),
            }
        };

        fn aclmdlRICaptureBegin(stream: Handle, mode: c_int) |call| call.begin_capture(address(stream), mode);
        fn aclmdlRICaptureEnd(stream: Handle, graph: Out<Handle>) |call| {
            put(graph, || call.end_capture(address(stream)).map(handle))
        };
        fn aclmdlRIDestroy(graph: Handle) |call| call.destroy_graph(address(graph));
        fn aclmdlRICaptureGetInfo(stream: Handle, status: Out<c_int>, graph: Out<Handle>) |call| {
            put(status, || call.capture_status(address(stream)))?;
            if !graph.is_null() {
                graph.write(std::ptr::null_mut());
            }
            Ok(())
        };
        fn aclmdlRICaptureThreadExchangeMode(mode: Out<c_int>) |_call| {
            if mode.is_null() {
                return Err(PARAM);
            }
            let before = exchange_mode(mode.read())?;
            put(mode, || Ok(before))
        };
    }
}

/// The message of this thread's last failure, which it forgets; null when there is none. Good until the next such call.
#[unsafe(no_mangle)]
pub extern "C" fn aclGetRecentErrMsg() -> *const c_char {
    let given = MESSAGES.try_with(|messages| {
        let (pending, given) = &mut *messages.borrow_mut();
        *given = pending.take();
        given.as_ref().map_or(std::ptr::null(), |text| text.as_ptr())
    });
    given.unwrap_or(std::ptr::null())
}

/// The name of the machine's chips, which is that of its first device; null when there is none.
#[unsafe(no_mangle)]
pub extern "C" fn aclrtGetSocName() -> *const c_char {
    static NAMES: Mutex<Option<HashMap<String, &'static CStr>>> = Mutex::new(None);
    let Some(name) = World::first_device_name() else { return std::ptr::null() };
    let mut names = NAMES.lock().unwrap_or_else(PoisonError::into_inner);
    // A caller may keep what it was given.
    let known = names.get_or_insert_default();
    let text = known.entry(name).or_insert_with_key(|name| {
        let text: &'static CString = Box::leak(Box::new(CString::new(name.as_str()).unwrap_or_default()));
        text
    });
    text.as_ptr()
}
