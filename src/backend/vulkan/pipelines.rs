//! The kernels of an open device: texts in SPIR-V, which the driver compiles for each format at its first use.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use ash::vk;

use super::context::{Context, Named, Outcome, Refusal};

/// The storage buffers of a kernel. All kernels have the same layout.
pub(super) const BINDINGS: usize = 4;
/// The bytes of a kernel's arguments: the most that every driver takes.
pub(super) const ARGUMENT_BYTES: u32 = 128;

/// A text with its constants.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Program {
    /// What the kernel does; no other of the device has this name.
    pub(super) name: String,
    /// The SPIR-V that `scripts/kernels/vulkan` makes.
    pub(super) text: &'static [u8],
    /// The specialisation constants, numbered from 0.
    pub(super) constants: Vec<u32>,
}

/// A kernel that the driver compiled, with the layouts of all kernels.
#[derive(Clone, Copy)]
pub(super) struct Pipeline {
    pub(super) raw: vk::Pipeline,
    pub(super) layouts: Layouts,
}

/// The layouts that all kernels have.
#[derive(Clone, Copy)]
pub(super) struct Layouts {
    pub(super) set: vk::DescriptorSetLayout,
    pub(super) pipeline: vk::PipelineLayout,
}

/// The kernels that were asked for so far.
#[derive(Default)]
pub(super) struct Pipelines {
    known: Mutex<Known>,
}

#[derive(Default)]
struct Known {
    layouts: Option<Layouts>,
    /// The kernels by name, or the reasons why the driver refused them for good.
    pipelines: HashMap<String, Result<vk::Pipeline, String>>,
}

impl Pipelines {
    /// The kernel of a program. What the driver refuses once it refuses always, unless it had no memory; then a later call tries
    /// again.
    ///
    /// # Errors
    /// The reason why the driver refuses it.
    pub(super) fn get(&self, context: &Context, program: &Program) -> Result<Pipeline, String> {
        let mut known = self.known();
        if let Some(Err(why)) = known.pipelines.get(&program.name) {
            return Err(why.clone());
        }
        let compiled = known.compiled(context, program);
        compiled.map_err(|refusal| {
            let why = context.error(refusal).to_string();
            if !refusal.is_out_of_memory() && matches!(refusal, Refusal::Code(..)) {
                tracing::warn!(device = %context.id(), kernel = program.name, why, "a kernel is not to be had");
                known.pipelines.insert(program.name.clone(), Err(why.clone()));
            }
            why
        })
    }

    /// Destroys all of them.
    ///
    /// # Safety
    /// They are the device's, and no submission that uses them is pending.
    pub(super) unsafe fn destroy(&self, device: &ash::Device) {
        let Known { layouts, pipelines } = std::mem::take(&mut *self.known());
        // SAFETY: the caller's promise; they were created with the device and are destroyed once.
        unsafe {
            pipelines.into_values().flatten().for_each(|pipeline| device.destroy_pipeline(pipeline, None));
            if let Some(layouts) = layouts {
                device.destroy_pipeline_layout(layouts.pipeline, None);
                device.destroy_descriptor_set_layout(layouts.set, None);
            }
        }
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        // Every change is one insertion, so a poisoned lock still guards a consistent state.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Known {
    fn compiled(&mut self, context: &Context, program: &Program) -> Result<Pipeline, Refusal> {
        let layouts = match self.layouts {
            Some(layouts) => layouts,
            None => *self.layouts.insert(context.raw(Layouts::create)?),
        };
        let raw = match self.pipelines.get(&program.name) {
            Some(Ok(raw)) => *raw,
            _ => {
                let raw = context.raw(|device| compile(device, layouts.pipeline, program))?;
                self.pipelines.insert(program.name.clone(), Ok(raw));
                raw
            }
        };
        Ok(Pipeline { raw, layouts })
    }
}

impl Layouts {
    fn create(device: &ash::Device) -> Outcome<Layouts> {
        let binding = |number: usize| {
            vk::DescriptorSetLayoutBinding::default()
                .binding(number as u32)
                .descriptor_type(vk::DescriptorType::STORAGE_BUFFER)
                .descriptor_count(1)
                .stage_flags(vk::ShaderStageFlags::COMPUTE)
        };
        let bindings: [_; BINDINGS] = std::array::from_fn(binding);
        let create = vk::DescriptorSetLayoutCreateInfo::default().bindings(&bindings);
        // SAFETY: what the structures point to outlives the call, here and below.
        let set = unsafe { device.create_descriptor_set_layout(&create, None) }.of("vkCreateDescriptorSetLayout")?;
        let arguments =
            [vk::PushConstantRange::default().stage_flags(vk::ShaderStageFlags::COMPUTE).size(ARGUMENT_BYTES)];
        let sets = [set];
        let create = vk::PipelineLayoutCreateInfo::default().set_layouts(&sets).push_constant_ranges(&arguments);
        // SAFETY: as above.
        match unsafe { device.create_pipeline_layout(&create, None) }.of("vkCreatePipelineLayout") {
            Ok(pipeline) => Ok(Layouts { set, pipeline }),
            Err(refusal) => {
                // SAFETY: made above, and nobody else has it.
                unsafe { device.destroy_descriptor_set_layout(set, None) };
                Err(refusal)
            }
        }
    }
}

fn compile(device: &ash::Device, layout: vk::PipelineLayout, program: &Program) -> Outcome<vk::Pipeline> {
    let words: Vec<u32> = program.text.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect();
    let create = vk::ShaderModuleCreateInfo::default().code(&words);
    // SAFETY: the text is SPIR-V of the device's version, with no capability beyond those that all devices have.
    let text = unsafe { device.create_shader_module(&create, None) }.of("vkCreateShaderModule")?;
    let bytes: Vec<u8> = program.constants.iter().flat_map(|constant| constant.to_ne_bytes()).collect();
    let entry =
        |number: usize| vk::SpecializationMapEntry { constant_id: number as u32, offset: 4 * number as u32, size: 4 };
    let entries: Vec<_> = (0..program.constants.len()).map(entry).collect();
    let constants = vk::SpecializationInfo::default().map_entries(&entries).data(&bytes);
    let stage = vk::PipelineShaderStageCreateInfo::default()
        .stage(vk::ShaderStageFlags::COMPUTE)
        .module(text)
        .name(c"main")
        .specialization_info(&constants);
    let create = [vk::ComputePipelineCreateInfo::default().stage(stage).layout(layout)];
    // SAFETY: the module has this function, whose bindings and arguments are inside of the layout; what the structures point to
    // outlives the call.
    let compiled = unsafe { device.create_compute_pipelines(vk::PipelineCache::null(), &create, None) };
    // SAFETY: made above; a pipeline does not need it any more.
    unsafe { device.destroy_shader_module(text, None) };
    let compiled = compiled.map_err(|(_, code)| code).of("vkCreateComputePipelines")?;
    compiled.first().copied().ok_or(("vkCreateComputePipelines", vk::Result::ERROR_UNKNOWN))
}
