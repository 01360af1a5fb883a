//! Kernels as a stream submits them: their buffers, arguments and numbers of groups.

use ash::vk;

use super::context::{Context, Named, Outcome, Refusal};
use super::copy::Place;
use super::pipelines::{BINDINGS, Layouts, Pipeline};
use crate::error::Error;

/// The most groups in a row, which every driver takes.
pub(super) const ROW: u32 = 32_768;

/// The sets of a pool.
const SETS: u32 = 16;

/// A part of a buffer that a kernel reads or writes as words of 32 bits.
#[derive(Clone, Copy)]
pub(super) struct Binding {
    buffer: vk::Buffer,
    offset: u64,
    range: u64,
    /// The byte of the part at which what was bound begins.
    pub(super) at: u32,
}

impl Binding {
    /// The most bytes that a kernel of this device can have in one binding, wherever they begin.
    pub(super) fn most(context: &Context) -> u64 {
        let limits = context.limits();
        u64::from(limits.storage_range).saturating_sub(limits.storage_alignment) / 4 * 4
    }

    /// The error of a driver whose bindings are too small for any part of the work: far below what Vulkan guarantees.
    pub(super) fn too_small(context: &Context) -> Error {
        let (id, bytes) = (context.id(), context.limits().storage_range);
        Error::invalid(format!("{id} has bindings of {bytes} bytes, which no part of the work fits into"))
    }

    /// `bytes` bytes at a place of a buffer. The binding begins where the driver lets one begin, and is whole words; both are inside
    /// of the allocation.
    pub(super) fn new(context: &Context, place: Place, bytes: u64) -> Binding {
        let (buffer, begin) = place;
        let at = begin % context.limits().storage_alignment;
        Binding { buffer, offset: begin - at, range: (at + bytes).next_multiple_of(4).max(4), at: at as u32 }
    }
}

/// A kernel to run.
pub(super) struct Dispatch {
    pub(super) pipeline: Pipeline,
    /// The buffers by their numbers in the kernel.
    pub(super) bindings: Vec<Binding>,
    pub(super) arguments: Vec<u32>,
    /// The number of groups. The kernel may see more.
    pub(super) groups: u32,
}

/// Records kernels, each after the one before: two may write parts of one word.
///
/// # Safety
/// The ranges of the buffers are inside of memory that lives until the command buffer has run. With these arguments the kernels
/// access nothing outside of them. Each has a set of its own, which nothing else uses meanwhile.
pub(super) unsafe fn record(
    device: &ash::Device,
    commands: vk::CommandBuffer,
    sets: &[vk::DescriptorSet],
    dispatches: &[Dispatch],
) {
    for (number, (dispatch, &set)) in dispatches.iter().zip(sets).enumerate() {
        let Dispatch { pipeline, bindings, arguments, groups } = dispatch;
        if number > 0 {
            barrier(device, commands);
        }
        let buffers: Vec<_> = bindings
            .iter()
            .map(|binding| {
                [vk::DescriptorBufferInfo { buffer: binding.buffer, offset: binding.offset, range: binding.range }]
            })
            .collect();
        let writes: Vec<_> = buffers
            .iter()
            .enumerate()
            .map(|(number, buffer)| {
                vk::WriteDescriptorSet::default()
                    .dst_set(set)
                    .dst_binding(number as u32)
                    .descriptor_type(vk::DescriptorType::STORAGE_BUFFER)
                    .buffer_info(buffer)
            })
            .collect();
        let bytes: Vec<u8> = arguments.iter().flat_map(|argument| argument.to_ne_bytes()).collect();
        let (columns, rows) = ((*groups).min(ROW), groups.div_ceil(ROW));
        let layout = pipeline.layouts.pipeline;
        // SAFETY: the caller's promise; the command buffer is being recorded, and the sets have the pipeline's layout.
        unsafe {
            device.update_descriptor_sets(&writes, &[]);
            device.cmd_bind_pipeline(commands, vk::PipelineBindPoint::COMPUTE, pipeline.raw);
            device.cmd_bind_descriptor_sets(commands, vk::PipelineBindPoint::COMPUTE, layout, 0, &[set], &[]);
            device.cmd_push_constants(commands, layout, vk::ShaderStageFlags::COMPUTE, 0, &bytes);
            device.cmd_dispatch(commands, columns, rows, 1);
        }
    }
}

/// Makes what a kernel wrote visible to the next one.
fn barrier(device: &ash::Device, commands: vk::CommandBuffer) {
    let barriers = [vk::MemoryBarrier2::default()
        .src_stage_mask(vk::PipelineStageFlags2::COMPUTE_SHADER)
        .src_access_mask(vk::AccessFlags2::SHADER_STORAGE_WRITE)
        .dst_stage_mask(vk::PipelineStageFlags2::COMPUTE_SHADER)
        .dst_access_mask(vk::AccessFlags2::SHADER_STORAGE_READ | vk::AccessFlags2::SHADER_STORAGE_WRITE)];
    let dependency = vk::DependencyInfo::default().memory_barriers(&barriers);
    // SAFETY: the command buffer is being recorded, for a queue that computes.
    unsafe { device.cmd_pipeline_barrier2(commands, &dependency) };
}

/// The descriptor sets of a stream, with their pools.
#[derive(Default)]
pub(super) struct Sets {
    pools: Vec<vk::DescriptorPool>,
    unused: Vec<vk::DescriptorSet>,
}

impl Sets {
    /// Takes as many sets as `count`, which nothing uses.
    pub(super) fn take(
        &mut self,
        context: &Context,
        layouts: Layouts,
        count: usize,
    ) -> Result<Vec<vk::DescriptorSet>, Refusal> {
        while self.unused.len() < count {
            let (pool, sets) = context.raw(|device| new_pool(device, layouts))?;
            self.pools.push(pool);
            self.unused.extend(sets);
        }
        Ok(self.unused.split_off(self.unused.len() - count))
    }

    /// Takes sets back that nothing uses any more.
    pub(super) fn give_back(&mut self, sets: Vec<vk::DescriptorSet>) {
        self.unused.extend(sets);
    }

    /// Destroys all of them.
    ///
    /// # Safety
    /// They are the device's, and no submission that uses them is pending.
    pub(super) unsafe fn destroy(&mut self, device: &ash::Device) {
        self.unused.clear();
        // SAFETY: the caller's promise.
        self.pools.drain(..).for_each(|pool| unsafe { device.destroy_descriptor_pool(pool, None) });
    }
}

fn new_pool(device: &ash::Device, layouts: Layouts) -> Outcome<(vk::DescriptorPool, Vec<vk::DescriptorSet>)> {
    let sizes =
        [vk::DescriptorPoolSize { ty: vk::DescriptorType::STORAGE_BUFFER, descriptor_count: SETS * BINDINGS as u32 }];
    let create = vk::DescriptorPoolCreateInfo::default().max_sets(SETS).pool_sizes(&sizes);
    // SAFETY: what the structures point to outlives the call, here and below.
    let pool = unsafe { device.create_descriptor_pool(&create, None) }.of("vkCreateDescriptorPool")?;
    let of_sets = [layouts.set; SETS as usize];
    let allocate = vk::DescriptorSetAllocateInfo::default().descriptor_pool(pool).set_layouts(&of_sets);
    // SAFETY: as above; the pool is nobody else's yet.
    match unsafe { device.allocate_descriptor_sets(&allocate) }.of("vkAllocateDescriptorSets") {
        Ok(sets) => Ok((pool, sets)),
        Err(refusal) => {
            // SAFETY: as above.
            unsafe { device.destroy_descriptor_pool(pool, None) };
            Err(refusal)
        }
    }
}
