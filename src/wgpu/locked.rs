//! The calls by which wgpu uses its queue, made one at a time with those of the library: wgpu submits by itself, too, and has no
//! lock for others.

use std::ffi::{CStr, c_void};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use ash::vk;

/// A queue that wgpu and the library share: its lock, and the driver's calls.
struct Shared {
    device: vk::Device,
    queue: vk::Queue,
    lock: Arc<Mutex<()>>,
    submit: vk::PFN_vkQueueSubmit,
    submit2: vk::PFN_vkQueueSubmit2,
    wait_idle: vk::PFN_vkQueueWaitIdle,
}

/// The shared queues of devices that are open.
static SHARED: RwLock<Vec<Arc<Shared>>> = RwLock::new(Vec::new());

/// The calls of a device for wgpu, whose queue `queue` is used under `lock`. [`forget`] it when it is closed.
///
/// # Safety
/// The device, of this instance, is open, and the queue is its.
pub(super) unsafe fn device(
    instance: &ash::Instance,
    device: &ash::Device,
    queue: vk::Queue,
    lock: &Arc<Mutex<()>>,
) -> ash::Device {
    let (one, three) = (device.fp_v1_0(), device.fp_v1_3());
    let shared = Shared {
        device: device.handle(),
        queue,
        lock: Arc::clone(lock),
        submit: one.queue_submit,
        submit2: three.queue_submit2,
        wait_idle: one.queue_wait_idle,
    };
    SHARED.write().unwrap_or_else(PoisonError::into_inner).push(Arc::new(shared));
    let own = |name: &CStr| match name.to_bytes() {
        b"vkQueueSubmit" => Some(queue_submit as vk::PFN_vkQueueSubmit as *const c_void),
        b"vkQueueSubmit2" => Some(queue_submit2 as vk::PFN_vkQueueSubmit2 as *const c_void),
        b"vkQueueWaitIdle" => Some(queue_wait_idle as vk::PFN_vkQueueWaitIdle as *const c_void),
        b"vkDeviceWaitIdle" => Some(device_wait_idle as vk::PFN_vkDeviceWaitIdle as *const c_void),
        _ => None,
    };
    let handle = device.handle();
    let find = |name: &CStr| {
        own(name).unwrap_or_else(|| {
            // SAFETY: the caller's promise.
            let found = unsafe { instance.get_device_proc_addr(handle, name.as_ptr()) };
            found.map_or(std::ptr::null(), |call| call as *const c_void)
        })
    };
    // SAFETY: each function has the type of its name.
    unsafe { ash::Device::load_with(find, handle) }
}

/// Forgets the queue of a device that is closed.
pub(super) fn forget(device: vk::Device) {
    SHARED.write().unwrap_or_else(PoisonError::into_inner).retain(|shared| shared.device != device);
}

/// Runs a call of the shared queue that `is` it.
fn with(is: impl Fn(&Shared) -> bool, call: impl FnOnce(&Shared) -> vk::Result) -> vk::Result {
    // The list is let go of first: whoever holds the queue may open another device.
    let found = SHARED.read().unwrap_or_else(PoisonError::into_inner).iter().find(|shared| is(shared)).cloned();
    let Some(shared) = found else { return vk::Result::ERROR_DEVICE_LOST };
    let _held = shared.lock.lock().unwrap_or_else(PoisonError::into_inner);
    call(&shared)
}

unsafe extern "system" fn queue_submit(
    queue: vk::Queue,
    count: u32,
    infos: *const vk::SubmitInfo<'_>,
    fence: vk::Fence,
) -> vk::Result {
    // SAFETY: the driver's call, with wgpu's arguments; the lock is held.
    with(|shared| shared.queue == queue, |shared| unsafe { (shared.submit)(queue, count, infos, fence) })
}

unsafe extern "system" fn queue_submit2(
    queue: vk::Queue,
    count: u32,
    infos: *const vk::SubmitInfo2<'_>,
    fence: vk::Fence,
) -> vk::Result {
    // SAFETY: as above.
    with(|shared| shared.queue == queue, |shared| unsafe { (shared.submit2)(queue, count, infos, fence) })
}

unsafe extern "system" fn queue_wait_idle(queue: vk::Queue) -> vk::Result {
    // SAFETY: as above.
    with(|shared| shared.queue == queue, |shared| unsafe { (shared.wait_idle)(queue) })
}

/// Waits for wgpu's queue alone: the others are the library's, which uses them meanwhile.
unsafe extern "system" fn device_wait_idle(device: vk::Device) -> vk::Result {
    // SAFETY: as above.
    with(|shared| shared.device == device, |shared| unsafe { (shared.wait_idle)(shared.queue) })
}
