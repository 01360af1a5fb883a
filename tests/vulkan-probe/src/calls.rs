//! The calls that the probe passes on, and its own interface.

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_void};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use ash::vk;
use ash::vk::Handle;
use libloading::Library;

use crate::state::{Failure, Omission, State, fails, gone, made, with};

/// The loader's call that finds all others.
fn loader() -> vk::PFN_vkGetInstanceProcAddr {
    static LOADER: OnceLock<vk::PFN_vkGetInstanceProcAddr> = OnceLock::new();
    *LOADER.get_or_init(|| {
        // SAFETY: loading it is what the program under test asked for.
        let library = unsafe { Library::new("libvulkan.so.1") }.expect("Vulkan's loader");
        let library: &'static Library = Box::leak(Box::new(library));
        // SAFETY: the symbol has this type.
        *unsafe { library.get::<vk::PFN_vkGetInstanceProcAddr>(b"vkGetInstanceProcAddr\0") }.expect("its first call")
    })
}

/// The loader's functions by name. Those of devices are its own, which find the driver by the handle.
static REAL: Mutex<BTreeMap<&'static str, usize>> = Mutex::new(BTreeMap::new());

fn real(name: &'static str) -> usize {
    let real = REAL.lock().unwrap_or_else(PoisonError::into_inner);
    *real.get(name).unwrap_or_else(|| panic!("{name} was not asked for"))
}

/// Defines functions that are counted, can fail, and make or destroy objects.
macro_rules! passed_on {
    ($(fn $name:ident($($arg:ident: $type:ty),*) -> vk::Result $(, makes $made:literal at $out:ident)?;)*) => {
        $(
            #[expect(non_snake_case, reason = "Vulkan's name")]
            unsafe extern "system" fn $name($($arg: $type),*) -> vk::Result {
                if let Some(code) = fails(stringify!($name)) {
                    return code;
                }
                let real = real(stringify!($name));
                // SAFETY: the loader's function of this name, which has this type.
                let call = unsafe {
                    std::mem::transmute::<usize, unsafe extern "system" fn($($type),*) -> vk::Result>(real)
                };
                // SAFETY: the arguments are the program's.
                let result = unsafe { call($($arg),*) };
                $(if result == vk::Result::SUCCESS {
                    // SAFETY: the loader has written the handle.
                    made($made, unsafe { (*$out).as_raw() });
                })?
                result
            }
        )*
        const PASSED_ON: &[(&str, *const c_void)] = &[$((stringify!($name), $name as *const c_void)),*];
    };
}

/// Functions that destroy an object.
macro_rules! destroys {
    ($(fn $name:ident($parent:ty, $handle:ty) of $kind:literal;)*) => {
        $(
            #[expect(non_snake_case, reason = "Vulkan's name")]
            unsafe extern "system" fn $name(parent: $parent, handle: $handle, allocator: *const c_void) {
                let real = real(stringify!($name));
                // SAFETY: the loader's function of this name, which has this type.
                let call = unsafe {
                    std::mem::transmute::<usize, unsafe extern "system" fn($parent, $handle, *const c_void)>(real)
                };
                // SAFETY: the arguments are the program's.
                unsafe { call(parent, handle, allocator) };
                gone($kind, handle.as_raw());
            }
        )*
        const DESTROYS: &[(&str, *const c_void)] = &[$((stringify!($name), $name as *const c_void)),*];
    };
}

passed_on! {
    fn vkEnumeratePhysicalDevices(instance: vk::Instance, count: *mut u32, devices: *mut c_void) -> vk::Result;
    fn vkEnumerateDeviceExtensionProperties(device: vk::PhysicalDevice, layer: *const c_char, count: *mut u32, list: *mut c_void) -> vk::Result;
    fn vkCreateDevice(physical: vk::PhysicalDevice, info: *const c_void, allocator: *const c_void, device: *mut vk::Device) -> vk::Result, makes "device" at device;
    fn vkCreateBuffer(device: vk::Device, info: *const c_void, allocator: *const c_void, buffer: *mut vk::Buffer) -> vk::Result, makes "buffer" at buffer;
    fn vkAllocateMemory(device: vk::Device, info: *const c_void, allocator: *const c_void, memory: *mut vk::DeviceMemory) -> vk::Result, makes "memory" at memory;
    fn vkBindBufferMemory(device: vk::Device, buffer: vk::Buffer, memory: vk::DeviceMemory, offset: u64) -> vk::Result;
    fn vkMapMemory(device: vk::Device, memory: vk::DeviceMemory, offset: u64, size: u64, flags: u32, data: *mut *mut c_void) -> vk::Result;
    fn vkGetMemoryHostPointerPropertiesEXT(device: vk::Device, kind: u32, address: *const c_void, properties: *mut c_void) -> vk::Result;
    fn vkCreateSemaphore(device: vk::Device, info: *const c_void, allocator: *const c_void, semaphore: *mut vk::Semaphore) -> vk::Result, makes "semaphore" at semaphore;
    fn vkCreateCommandPool(device: vk::Device, info: *const c_void, allocator: *const c_void, pool: *mut vk::CommandPool) -> vk::Result, makes "command pool" at pool;
    fn vkAllocateCommandBuffers(device: vk::Device, info: *const c_void, buffers: *mut vk::CommandBuffer) -> vk::Result;
    fn vkEndCommandBuffer(buffer: vk::CommandBuffer) -> vk::Result;
    fn vkCreateShaderModule(device: vk::Device, info: *const c_void, allocator: *const c_void, text: *mut vk::ShaderModule) -> vk::Result, makes "shader module" at text;
    fn vkCreateDescriptorSetLayout(device: vk::Device, info: *const c_void, allocator: *const c_void, layout: *mut vk::DescriptorSetLayout) -> vk::Result, makes "set layout" at layout;
    fn vkCreatePipelineLayout(device: vk::Device, info: *const c_void, allocator: *const c_void, layout: *mut vk::PipelineLayout) -> vk::Result, makes "pipeline layout" at layout;
    fn vkCreateComputePipelines(device: vk::Device, cache: vk::PipelineCache, count: u32, infos: *const c_void, allocator: *const c_void, pipeline: *mut vk::Pipeline) -> vk::Result, makes "pipeline" at pipeline;
    fn vkCreateDescriptorPool(device: vk::Device, info: *const c_void, allocator: *const c_void, pool: *mut vk::DescriptorPool) -> vk::Result, makes "descriptor pool" at pool;
    fn vkAllocateDescriptorSets(device: vk::Device, info: *const c_void, sets: *mut c_void) -> vk::Result;
}

destroys! {
    fn vkDestroyBuffer(vk::Device, vk::Buffer) of "buffer";
    fn vkFreeMemory(vk::Device, vk::DeviceMemory) of "memory";
    fn vkDestroyCommandPool(vk::Device, vk::CommandPool) of "command pool";
    fn vkDestroyShaderModule(vk::Device, vk::ShaderModule) of "shader module";
    fn vkDestroyDescriptorSetLayout(vk::Device, vk::DescriptorSetLayout) of "set layout";
    fn vkDestroyPipelineLayout(vk::Device, vk::PipelineLayout) of "pipeline layout";
    fn vkDestroyPipeline(vk::Device, vk::Pipeline) of "pipeline";
    fn vkDestroyDescriptorPool(vk::Device, vk::DescriptorPool) of "descriptor pool";
}

/// Functions with a body of their own.
const OWN: &[(&str, *const c_void)] = &[
    ("vkGetInstanceProcAddr", vkGetInstanceProcAddr as *const c_void),
    ("vkGetDeviceProcAddr", device_function as *const c_void),
    ("vkCreateInstance", create_instance as *const c_void),
    ("vkDestroyInstance", destroy_instance as *const c_void),
    ("vkDestroyDevice", destroy_device as *const c_void),
    ("vkGetPhysicalDeviceProperties", properties as *const c_void),
    ("vkBeginCommandBuffer", begin as *const c_void),
    ("vkCmdCopyBuffer", copy as *const c_void),
    ("vkCmdDispatch", dispatch as *const c_void),
    ("vkCmdPipelineBarrier2", barrier as *const c_void),
    ("vkDestroySemaphore", destroy_semaphore as *const c_void),
    ("vkQueueSubmit2", submit as *const c_void),
    ("vkSignalSemaphore", signal as *const c_void),
    ("vkWaitSemaphores", wait as *const c_void),
];

/// The probe's function of this name, if the loader has one.
fn found(instance: vk::Instance, name: &CStr) -> Option<*const c_void> {
    let all = OWN.iter().chain(PASSED_ON).chain(DESTROYS);
    let &(name, own) = all.clone().find(|(known, _)| known.as_bytes() == name.to_bytes())?;
    let text = std::ffi::CString::new(name).ok()?;
    // SAFETY: the instance is the program's, or none.
    let real = unsafe { loader()(instance, text.as_ptr()) }? as usize;
    REAL.lock().unwrap_or_else(PoisonError::into_inner).insert(name, real);
    Some(own)
}

static INSTANCE: Mutex<vk::Instance> = Mutex::new(vk::Instance::null());

/// The first call of a program.
///
/// # Safety
/// As the loader's.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "system" fn vkGetInstanceProcAddr(
    instance: vk::Instance,
    name: *const c_char,
) -> vk::PFN_vkVoidFunction {
    // SAFETY: the program gives a text.
    match found(instance, unsafe { CStr::from_ptr(name) }) {
        // SAFETY: a function's address.
        Some(own) => Some(unsafe { std::mem::transmute::<*const c_void, unsafe extern "system" fn()>(own) }),
        // SAFETY: the program's arguments.
        None => unsafe { loader()(instance, name) },
    }
}

unsafe extern "system" fn device_function(device: vk::Device, name: *const c_char) -> vk::PFN_vkVoidFunction {
    let instance = *INSTANCE.lock().unwrap_or_else(PoisonError::into_inner);
    // SAFETY: the program gives a text.
    if let Some(own) = found(instance, unsafe { CStr::from_ptr(name) }) {
        // SAFETY: a function's address.
        return Some(unsafe { std::mem::transmute::<*const c_void, unsafe extern "system" fn()>(own) });
    }
    // SAFETY: the loader's function of this name.
    let call: vk::PFN_vkGetDeviceProcAddr = unsafe { std::mem::transmute(real("vkGetDeviceProcAddr")) };
    // SAFETY: the program's arguments.
    unsafe { call(device, name) }
}

/// How many of the layers that the environment asks for there are. The loader passes over those that it cannot find.
fn enabled_layers() -> u64 {
    let asked = std::env::var("VK_INSTANCE_LAYERS").unwrap_or_default();
    // SAFETY: the loader's function of this name; the list is as long as the loader said.
    let found = unsafe {
        let list = loader()(vk::Instance::null(), c"vkEnumerateInstanceLayerProperties".as_ptr()).expect("layers");
        let list: vk::PFN_vkEnumerateInstanceLayerProperties = std::mem::transmute(list);
        let mut count = 0;
        let _ = list(&raw mut count, std::ptr::null_mut());
        let mut found = vec![vk::LayerProperties::default(); count as usize];
        let _ = list(&raw mut count, found.as_mut_ptr());
        found
    };
    let is_asked = |layer: &&vk::LayerProperties| {
        let name = layer.layer_name_as_c_str().unwrap_or_default().to_string_lossy();
        asked.split(':').any(|asked| asked == name)
    };
    found.iter().filter(is_asked).count() as u64
}

/// Messengers by their instances.
static MESSENGERS: Mutex<BTreeMap<u64, vk::DebugUtilsMessengerEXT>> = Mutex::new(BTreeMap::new());

unsafe extern "system" fn create_instance(
    info: *const vk::InstanceCreateInfo<'_>,
    allocator: *const vk::AllocationCallbacks<'_>,
    instance: *mut vk::Instance,
) -> vk::Result {
    if let Some(code) = fails("vkCreateInstance") {
        return code;
    }
    // SAFETY: the program's structure; the one passed on points to what outlives the call.
    let (mut info, names) = unsafe {
        let info = *info;
        let given = match info.enabled_extension_count {
            0 => &[],
            count => std::slice::from_raw_parts(info.pp_enabled_extension_names, count as usize),
        };
        (info, [given, &[ash::ext::debug_utils::NAME.as_ptr()]].concat())
    };
    info.enabled_extension_count = names.len() as u32;
    info.pp_enabled_extension_names = names.as_ptr();
    let layers = enabled_layers();
    with(|state| state.layers = layers);
    // SAFETY: the loader's function.
    let call: vk::PFN_vkCreateInstance = unsafe { std::mem::transmute(real("vkCreateInstance")) };
    // SAFETY: as above.
    let result = unsafe { call(&raw const info, allocator, instance) };
    if result == vk::Result::SUCCESS {
        // SAFETY: the loader has written the handle.
        let instance = unsafe { *instance };
        made("instance", instance.as_raw());
        *INSTANCE.lock().unwrap_or_else(PoisonError::into_inner) = instance;
        let info = vk::DebugUtilsMessengerCreateInfoEXT::default()
            .message_severity(
                vk::DebugUtilsMessageSeverityFlagsEXT::ERROR | vk::DebugUtilsMessageSeverityFlagsEXT::WARNING,
            )
            .message_type(vk::DebugUtilsMessageTypeFlagsEXT::VALIDATION)
            .pfn_user_callback(Some(message));
        let mut messenger = vk::DebugUtilsMessengerEXT::null();
        // SAFETY: the extension is enabled, so the loader has the function, which has this type.
        unsafe {
            let create = loader()(instance, c"vkCreateDebugUtilsMessengerEXT".as_ptr()).expect("messages");
            let create: vk::PFN_vkCreateDebugUtilsMessengerEXT = std::mem::transmute(create);
            assert_eq!(create(instance, &raw const info, std::ptr::null(), &raw mut messenger), vk::Result::SUCCESS);
        }
        MESSENGERS.lock().unwrap_or_else(PoisonError::into_inner).insert(instance.as_raw(), messenger);
    }
    result
}

unsafe extern "system" fn destroy_instance(instance: vk::Instance, allocator: *const vk::AllocationCallbacks<'_>) {
    let messenger = MESSENGERS.lock().unwrap_or_else(PoisonError::into_inner).remove(&instance.as_raw());
    // SAFETY: the loader's functions; the messenger is this instance's.
    unsafe {
        if let Some(messenger) = messenger {
            let destroy = loader()(instance, c"vkDestroyDebugUtilsMessengerEXT".as_ptr()).expect("messages");
            let destroy: vk::PFN_vkDestroyDebugUtilsMessengerEXT = std::mem::transmute(destroy);
            destroy(instance, messenger, std::ptr::null());
        }
        let call: vk::PFN_vkDestroyInstance = std::mem::transmute(real("vkDestroyInstance"));
        call(instance, allocator);
    }
    gone("instance", instance.as_raw());
}

unsafe extern "system" fn destroy_device(device: vk::Device, allocator: *const vk::AllocationCallbacks<'_>) {
    // SAFETY: the loader's function; the program's arguments.
    unsafe {
        let call: vk::PFN_vkDestroyDevice = std::mem::transmute(real("vkDestroyDevice"));
        call(device, allocator);
    }
    gone("device", device.as_raw());
}

/// Lavapipe's thread takes its own records of a submission back after the host may have seen the value that it raises, and looks at the
/// semaphore then.
const AFTER_VALUE: Duration = Duration::from_millis(1);

unsafe extern "system" fn destroy_semaphore(
    device: vk::Device,
    semaphore: vk::Semaphore,
    allocator: *const vk::AllocationCallbacks<'_>,
) {
    std::thread::sleep(AFTER_VALUE);
    // SAFETY: the loader's function; the program's arguments.
    unsafe {
        let call: vk::PFN_vkDestroySemaphore = std::mem::transmute(real("vkDestroySemaphore"));
        call(device, semaphore, allocator);
    }
    gone("semaphore", semaphore.as_raw());
}

/// A message of the validation layer. It is printed at once too, since what it tells of may end the process.
unsafe extern "system" fn message(
    _severity: vk::DebugUtilsMessageSeverityFlagsEXT,
    _types: vk::DebugUtilsMessageTypeFlagsEXT,
    data: *const vk::DebugUtilsMessengerCallbackDataEXT<'_>,
    _user: *mut c_void,
) -> vk::Bool32 {
    let text = |text: *const c_char| match text.is_null() {
        true => String::new(),
        // SAFETY: the layer gives texts.
        false => unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned(),
    };
    // SAFETY: the layer gives a structure.
    let (id, words) = unsafe { (text((*data).p_message_id_name), text((*data).p_message)) };
    with(|state| tell(state, format!("{id}: {words}")));
    vk::FALSE
}

fn tell(state: &mut State, message: String) {
    eprintln!("validation: {message}");
    state.messages.push(message);
}

unsafe extern "system" fn properties(device: vk::PhysicalDevice, found: *mut vk::PhysicalDeviceProperties) {
    // SAFETY: the loader's function; the program's arguments, of which it has written the last.
    unsafe {
        let call: vk::PFN_vkGetPhysicalDeviceProperties = std::mem::transmute(real("vkGetPhysicalDeviceProperties"));
        call(device, found);
        let most = &mut (*found).limits.max_storage_buffer_range;
        *most = with(|state| state.binding).map_or(*most, |binding| binding.min(*most));
    }
}

unsafe extern "system" fn begin(buffer: vk::CommandBuffer, info: *const vk::CommandBufferBeginInfo<'_>) -> vk::Result {
    if let Some(code) = fails("vkBeginCommandBuffer") {
        return code;
    }
    with(|state| {
        state.recorded.insert(buffer.as_raw(), (false, true));
        state.dispatched.remove(&buffer.as_raw());
    });
    // SAFETY: the loader's function; the program's arguments.
    unsafe {
        let call: vk::PFN_vkBeginCommandBuffer = std::mem::transmute(real("vkBeginCommandBuffer"));
        call(buffer, info)
    }
}

unsafe extern "system" fn copy(
    buffer: vk::CommandBuffer,
    src: vk::Buffer,
    dst: vk::Buffer,
    count: u32,
    regions: *const vk::BufferCopy,
) {
    with(|state| state.recorded.insert(buffer.as_raw(), (true, false)));
    // SAFETY: the loader's function; the program's arguments.
    unsafe {
        let call: vk::PFN_vkCmdCopyBuffer = std::mem::transmute(real("vkCmdCopyBuffer"));
        call(buffer, src, dst, count, regions);
    }
}

/// The layer does not tell of two kernels that write to one place, so the probe does: they may share a word.
unsafe extern "system" fn dispatch(buffer: vk::CommandBuffer, x: u32, y: u32, z: u32) {
    with(|state| match state.dispatched.insert(buffer.as_raw()) {
        true => {}
        false => tell(state, "the probe: a kernel follows another with no barrier between".to_owned()),
    });
    // SAFETY: the loader's function; the program's arguments.
    unsafe {
        let call: vk::PFN_vkCmdDispatch = std::mem::transmute(real("vkCmdDispatch"));
        call(buffer, x, y, z);
    }
}

unsafe extern "system" fn barrier(buffer: vk::CommandBuffer, info: *const vk::DependencyInfo<'_>) {
    // SAFETY: the program's structures.
    let barriers = unsafe {
        let info = &*info;
        std::slice::from_raw_parts(info.p_memory_barriers, info.memory_barrier_count as usize)
    };
    let to_host = barriers.iter().any(|barrier| {
        barrier.dst_stage_mask.contains(vk::PipelineStageFlags2::HOST)
            && barrier.dst_access_mask.contains(vk::AccessFlags2::HOST_READ)
            && barrier.src_access_mask.contains(vk::AccessFlags2::TRANSFER_WRITE)
    });
    let of_kernels =
        barriers.iter().any(|barrier| barrier.src_stage_mask.contains(vk::PipelineStageFlags2::COMPUTE_SHADER));
    let omitted = with(|state| {
        if to_host && let Some((_, shown)) = state.recorded.get_mut(&buffer.as_raw()) {
            *shown = true;
        }
        let kind = if of_kernels { Omission::KernelBarriers } else { Omission::Barriers };
        let omitted = !to_host && state.omitted == Some(kind);
        if of_kernels && !omitted {
            state.dispatched.remove(&buffer.as_raw());
        }
        state.omissions += u64::from(omitted);
        omitted
    });
    if !omitted {
        // SAFETY: the loader's function; the program's arguments.
        unsafe {
            let call: vk::PFN_vkCmdPipelineBarrier2 = std::mem::transmute(real("vkCmdPipelineBarrier2"));
            call(buffer, info);
        }
    }
}

unsafe extern "system" fn submit(
    queue: vk::Queue,
    count: u32,
    submissions: *const vk::SubmitInfo2<'_>,
    fence: vk::Fence,
) -> vk::Result {
    if let Some(code) = fails("vkQueueSubmit2") {
        return code;
    }
    // SAFETY: the program's structures, here and below.
    let mut submissions = unsafe { std::slice::from_raw_parts(submissions, count as usize) }.to_vec();
    let mut kept = Vec::new();
    for submission in &mut submissions {
        let raised = list_of(submission.p_signal_semaphore_infos, submission.signal_semaphore_info_count);
        let mut waits = list_of(submission.p_wait_semaphore_infos, submission.wait_semaphore_info_count);
        with(|state| omit(state, &raised, &mut waits));
        let commands = match submission.command_buffer_info_count {
            0 => &[],
            // SAFETY: as above.
            count => unsafe { std::slice::from_raw_parts(submission.p_command_buffer_infos, count as usize) },
        };
        for commands in commands {
            with(|state| {
                let (copies, shown) =
                    state.recorded.get(&commands.command_buffer.as_raw()).copied().unwrap_or_default();
                state.copying += u64::from(copies);
                state.shown += u64::from(copies && shown);
            });
        }
        submission.wait_semaphore_info_count = waits.len() as u32;
        submission.p_wait_semaphore_infos = waits.as_ptr();
        kept.push(waits);
    }
    // The lock below would hide from the layer that two threads use one queue.
    with(|state| match state.submitting.insert(queue.as_raw()) {
        true => {}
        false => tell(state, "the probe: two threads submit to one queue at the same time".to_owned()),
    });
    let result = {
        let _alone = one_at_a_time();
        // SAFETY: the loader's function; what is passed on points to what outlives the call.
        unsafe {
            let call: vk::PFN_vkQueueSubmit2 = std::mem::transmute(real("vkQueueSubmit2"));
            call(queue, count, submissions.as_ptr(), fence)
        }
    };
    with(|state| state.submitting.remove(&queue.as_raw()));
    result
}

fn list_of<'a>(list: *const vk::SemaphoreSubmitInfo<'a>, count: u32) -> Vec<vk::SemaphoreSubmitInfo<'a>> {
    match count {
        0 => Vec::new(),
        // SAFETY: the program's structures.
        count => unsafe { std::slice::from_raw_parts(list, count as usize) }.to_vec(),
    }
}

/// Leaves waits out as a test asked: only those for submissions, since those for the host are what lets work queue up, so that the
/// layer sees what was left out.
fn omit(state: &mut State, raised: &[vk::SemaphoreSubmitInfo<'_>], waits: &mut Vec<vk::SemaphoreSubmitInfo<'_>>) {
    state.raised.extend(raised.iter().map(|signal| signal.semaphore.as_raw()));
    let is_own = |wait: &vk::SemaphoreSubmitInfo<'_>| raised.iter().any(|signal| signal.semaphore == wait.semaphore);
    let of_host = |wait: &vk::SemaphoreSubmitInfo<'_>| !state.raised.contains(&wait.semaphore.as_raw());
    let before = waits.len();
    match state.omitted {
        Some(Omission::OwnWaits) => waits.retain(|wait| !is_own(wait)),
        Some(Omission::OtherWaits) => waits.retain(|wait| is_own(wait) || of_host(wait)),
        Some(Omission::LastStep) => {
            for wait in waits.iter_mut().filter(|wait| !is_own(wait) && !of_host(wait) && wait.value > 0) {
                wait.value -= 1;
                state.omissions += 1;
            }
        }
        _ => {}
    }
    state.omissions += (before - waits.len()) as u64;
}

/// Held by submissions, and by signals and waits of the host, until the layer has seen them. It takes some of them in two steps, one
/// before the call and one after; another thread's step between those makes it free what it still uses, and see hazards that there
/// are not.
fn one_at_a_time() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

unsafe extern "system" fn signal(device: vk::Device, info: *const vk::SemaphoreSignalInfo<'_>) -> vk::Result {
    if let Some(code) = fails("vkSignalSemaphore") {
        return code;
    }
    let _alone = one_at_a_time();
    // SAFETY: the loader's function; the program's arguments.
    unsafe {
        let call: vk::PFN_vkSignalSemaphore = std::mem::transmute(real("vkSignalSemaphore"));
        call(device, info)
    }
}

unsafe extern "system" fn wait(device: vk::Device, info: *const vk::SemaphoreWaitInfo<'_>, timeout: u64) -> vk::Result {
    if let Some(code) = fails("vkWaitSemaphores") {
        return code;
    }
    let omitted = with(|state| {
        let omitted = state.omitted == Some(Omission::HostWaits);
        state.omissions += u64::from(omitted);
        omitted
    });
    if omitted {
        return vk::Result::SUCCESS;
    }
    let until = Instant::now().checked_add(Duration::from_nanos(timeout));
    loop {
        let result = {
            let _alone = one_at_a_time();
            // SAFETY: the loader's function; the program's arguments.
            unsafe {
                let call: vk::PFN_vkWaitSemaphores = std::mem::transmute(real("vkWaitSemaphores"));
                call(device, info, 0)
            }
        };
        if result != vk::Result::TIMEOUT || until.is_some_and(|until| Instant::now() >= until) {
            return result;
        }
        std::thread::sleep(Duration::from_micros(50));
    }
}

/// Forgets what was asked and counted; objects that are alive still count.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn vulkan_probe_reset() {
    with(|state| {
        let alive = std::mem::take(&mut state.alive);
        let recorded = std::mem::take(&mut state.recorded);
        *state = State { alive, recorded, ..State::default() };
    });
}

/// Forgets which call failed.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn vulkan_probe_forget_failed() {
    with(|state| state.failed = None);
}

/// Counts what is alive no more: what a lost device leaves.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn vulkan_probe_forget() {
    with(|state| state.alive.clear());
}

/// Makes the n-th call from now on fail; 0 for none.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn vulkan_probe_fail(nth: u64, how: u32) {
    let how = Failure::ALL.into_iter().find(|known| *known as u32 == how);
    with(|state| state.fail = how.filter(|_| nth > 0).map(|how| (state.calls + nth, how)));
}

/// Makes the next call of this name fail.
///
/// # Safety
/// `name` is the address of so many bytes.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn vulkan_probe_fail_next(name: *const u8, bytes: usize, how: u32) {
    // SAFETY: the caller's promise.
    let name = String::from_utf8_lossy(unsafe { std::slice::from_raw_parts(name, bytes) }).into_owned();
    let how = Failure::ALL.into_iter().find(|known| *known as u32 == how);
    with(|state| state.fail_next = how.map(|how| (name, how)));
}

/// Has drivers report bindings of at most so many bytes from now on.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn vulkan_probe_binding(bytes: u32) {
    with(|state| state.binding = Some(bytes));
}

/// Leaves something out from now on; 0 for nothing.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn vulkan_probe_omit(what: u32) {
    with(|state| state.omitted = Omission::ALL.into_iter().map(|(_, what)| what).find(|known| *known as u32 == what));
}

/// Writes what is known, as lines `name number` and `message text`, through `take`.
///
/// # Safety
/// `take` is given `to` and a text by its address and length.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn vulkan_probe_report(
    take: unsafe extern "C" fn(*mut c_void, *const u8, usize),
    to: *mut c_void,
) {
    let text = with(|state| {
        let mut text = format!("calls {}\nomissions {}\n", state.calls, state.omissions);
        text += &format!("copying {}\nshown {}\n", state.copying, state.shown);
        text += &format!("layers {}\n", state.layers);
        state.failed.iter().for_each(|call| text += &format!("failed {call}\n"));
        state.alive.iter().filter(|(_, handles)| !handles.is_empty()).for_each(|(kind, handles)| {
            text += &format!("alive {} {kind}\n", handles.len());
        });
        state.messages.iter().for_each(|message| text += &format!("message {}\n", message.replace('\n', " ")));
        text
    });
    // SAFETY: the caller's promise.
    unsafe { take(to, text.as_ptr(), text.len()) };
}
