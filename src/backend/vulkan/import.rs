//! Host memory as a device sees it: pages of this process that its driver imports, or memory that it allocates itself.

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;

use ash::vk;

use super::arena::{bound, buffer};
use super::context::{Context, Named, Outcome, Refusal};

/// What buffers of host memory are for.
pub(super) const USAGE: vk::BufferUsageFlags = vk::BufferUsageFlags::from_raw(
    vk::BufferUsageFlags::TRANSFER_SRC.as_raw() | vk::BufferUsageFlags::TRANSFER_DST.as_raw(),
);

/// Pages of this process as memory of a device.
pub(super) const PAGES: vk::ExternalMemoryHandleTypeFlags = vk::ExternalMemoryHandleTypeFlags::HOST_ALLOCATION_EXT;

/// The properties of host memory, the best first. All are coherent: the host's writes are seen by what is submitted after
/// them, and the device's by the host after a barrier.
const PROPERTIES: [vk::MemoryPropertyFlags; 2] = [
    vk::MemoryPropertyFlags::from_raw(
        vk::MemoryPropertyFlags::HOST_VISIBLE.as_raw()
            | vk::MemoryPropertyFlags::HOST_COHERENT.as_raw()
            | vk::MemoryPropertyFlags::HOST_CACHED.as_raw(),
    ),
    vk::MemoryPropertyFlags::from_raw(
        vk::MemoryPropertyFlags::HOST_VISIBLE.as_raw() | vk::MemoryPropertyFlags::HOST_COHERENT.as_raw(),
    ),
];

/// A buffer of one device over host memory.
pub(super) struct HostBuffer {
    context: Arc<Context>,
    memory: vk::DeviceMemory,
    buffer: vk::Buffer,
    bytes: u64,
    /// The type of memory.
    kind: u32,
}

impl HostBuffer {
    /// Imports pages of this process. Returns `None` if the device imports none, or none like these.
    ///
    /// # Safety
    /// The pages are this process's until the buffer is dropped.
    pub(super) unsafe fn import(context: &Arc<Context>, pages: NonNull<u8>, bytes: usize) -> Option<HostBuffer> {
        let (calls, alignment) = context.imports().zip(context.limits().import)?;
        let aligned = (pages.addr().get() as u64).is_multiple_of(alignment) && (bytes as u64).is_multiple_of(alignment);
        if !aligned || bytes as u64 > context.limits().allocation {
            return None;
        }
        let import = |device: &ash::Device| {
            let address = pages.as_ptr().cast::<c_void>();
            let mut pages = vk::MemoryHostPointerPropertiesEXT::default();
            let ask = calls.fp().get_memory_host_pointer_properties_ext;
            // SAFETY: the device has the extension, and the pages are mapped.
            unsafe { ask(device.handle(), PAGES, address, &raw mut pages) }
                .result()
                .of("vkGetMemoryHostPointerPropertiesEXT")?;
            let mut import = vk::ImportMemoryHostPointerInfoEXT::default().handle_type(PAGES).host_pointer(address);
            let allocate = vk::MemoryAllocateInfo::default().allocation_size(bytes as u64).push_next(&mut import);
            HostBuffer::create(context, device, bytes as u64, Some(PAGES), pages.memory_type_bits, allocate)
        };
        match context.raw(import) {
            Ok(host) => Some(host),
            Err(refusal) => {
                let error = context.error(refusal);
                tracing::debug!(device = %context.id(), bytes, %error, "host memory was not imported");
                None
            }
        }
    }

    /// Allocates host memory of the driver, and returns where it is. Its bytes are zero.
    pub(super) fn allocate(context: &Arc<Context>, bytes: usize) -> Result<(HostBuffer, NonNull<u8>), Refusal> {
        let host = context.raw(|device| {
            let allocate = vk::MemoryAllocateInfo::default();
            HostBuffer::create(context, device, bytes as u64, None, u32::MAX, allocate)
        })?;
        let address = context.raw(|device| {
            // SAFETY: the memory can be mapped, and is mapped once, until it is freed.
            unsafe { device.map_memory(host.memory, 0, vk::WHOLE_SIZE, vk::MemoryMapFlags::empty()) }.of("vkMapMemory")
        })?;
        let none = Refusal::Code("vkMapMemory", vk::Result::ERROR_MEMORY_MAP_FAILED);
        let address = NonNull::new(address.cast::<u8>()).ok_or(none)?;
        // SAFETY: at least so many bytes are mapped, and nobody else has them.
        unsafe { address.write_bytes(0, bytes) };
        Ok((host, address))
    }

    fn create(
        context: &Arc<Context>,
        device: &ash::Device,
        bytes: u64,
        external: Option<vk::ExternalMemoryHandleTypeFlags>,
        types: u32,
        allocate: vk::MemoryAllocateInfo<'_>,
    ) -> Outcome<HostBuffer> {
        let full = ("vkAllocateMemory", vk::Result::ERROR_OUT_OF_DEVICE_MEMORY);
        if bytes > context.limits().allocation {
            return Err(full);
        }
        let (buffer, needs) = buffer(context, device, bytes, USAGE, external)?;
        let destroy = |refusal| {
            // SAFETY: made above, and nobody else has it.
            unsafe { device.destroy_buffer(buffer, None) };
            refusal
        };
        let unfit = ("vkGetBufferMemoryRequirements", vk::Result::ERROR_FEATURE_NOT_PRESENT);
        let kind = context.physical.memory_type(needs.memory_type_bits & types, &PROPERTIES, false);
        let kind = kind.ok_or(unfit).map_err(destroy)?;
        // What is imported is as large as it is.
        if external.is_some() && needs.size > bytes {
            return Err(destroy(unfit));
        }
        if !context.count_host_bytes(bytes, kind) {
            return Err(destroy(full));
        }
        let allocate = allocate.allocation_size(needs.size.max(bytes)).memory_type_index(kind);
        let memory = bound(context, device, &allocate, buffer).map_err(|refusal| {
            context.forget_host_bytes(bytes, kind);
            destroy(refusal)
        })?;
        Ok(HostBuffer { context: Arc::clone(context), memory, buffer, bytes, kind })
    }

    pub(super) fn buffer(&self) -> vk::Buffer {
        self.buffer
    }
}

impl Drop for HostBuffer {
    fn drop(&mut self) {
        // SAFETY: host memory is freed after its last use was observed to be complete. Freeing unmaps it.
        self.context.destroy(|device| unsafe {
            device.destroy_buffer(self.buffer, None);
            self.context.free_memory(device, self.memory);
        });
        self.context.forget_host_bytes(self.bytes, self.kind);
    }
}
