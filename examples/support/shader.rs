//! A shader that sums the words of tensors where the library has them, and the same sums on the host.

use tensor_offload::wgpu::wgpu::{self, util::DeviceExt as _};
use tensor_offload::wgpu::{SharedDevice, TensorBuffer};
use tensor_offload::{Error, Result};

/// The sum of the words, and that of each word times an odd number that its place gives; both of 32 bits, wrapping. Bytes of the
/// binding that are not the tensor's count as zero.
const SHADER: &str = "
struct Tensor { ahead: u32, bytes: u32 }
@group(0) @binding(0) var<storage, read> words: array<u32>;
@group(0) @binding(1) var<uniform> tensor: Tensor;
@group(0) @binding(2) var<storage, read_write> sums: array<atomic<u32>, 2>;

/// The bits of the bytes from `at` on, of those of one word.
fn from_byte(at: i32) -> u32 {
    if at <= 0 { return 0xffffffffu; }
    if at >= 4 { return 0u; }
    return 0xffffffffu << (8u * u32(at));
}

@compute @workgroup_size(64)
fn sum(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>) {
    let end = tensor.ahead + tensor.bytes;
    let count = (end + 3u) / 4u;
    var plain = 0u;
    var placed = 0u;
    for (var k = id.x; k < count; k += groups.x * 64u) {
        let first = i32(4u * k);
        let word = words[k] & from_byte(i32(tensor.ahead) - first) & ~from_byte(i32(end) - first);
        plain += word;
        placed += word * (2u * k + 1u);
    }
    atomicAdd(&sums[0], plain);
    atomicAdd(&sums[1], placed);
}
";

/// The bytes of a tensor's place in the buffers of sums and parameters: the largest alignment that devices ask for.
const PLACE: u64 = 256;

/// The most workgroups that sum one tensor.
const MOST_GROUPS: u64 = 1024;

/// Sums of up to a number of tensors.
pub(crate) struct Sums {
    pipeline: wgpu::ComputePipeline,
    tensors: wgpu::Buffer,
    sums: wgpu::Buffer,
    most: u64,
    count: u64,
}

impl Sums {
    pub(crate) fn new(shared: &SharedDevice, most: usize) -> Sums {
        let device = shared.device();
        let source = wgpu::ShaderSource::Wgsl(SHADER.into());
        let module = device.create_shader_module(wgpu::ShaderModuleDescriptor { label: Some("sums"), source });
        let pipeline = device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
            label: Some("sums"),
            layout: None,
            module: &module,
            entry_point: Some("sum"),
            compilation_options: Default::default(),
            cache: None,
        });
        let most = most.max(1) as u64;
        let buffer = |usage| {
            let size = most * PLACE;
            device.create_buffer(&wgpu::BufferDescriptor { label: None, size, usage, mapped_at_creation: false })
        };
        let tensors = buffer(wgpu::BufferUsages::UNIFORM | wgpu::BufferUsages::COPY_DST);
        let sums = buffer(wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC);
        Sums { pipeline, tensors, sums, most, count: 0 }
    }

    /// Records the sums of one more tensor.
    pub(crate) fn record(&mut self, shared: &SharedDevice, tensor: &TensorBuffer, encoder: &mut wgpu::CommandEncoder) {
        assert!(self.count < self.most, "more than {} tensors", self.most);
        let place = self.count * PLACE;
        self.count += 1;
        let (ahead, bytes) = (tensor.ahead() as u32, tensor.bytes() as u32);
        shared.queue().write_buffer(&self.tensors, place, &[ahead.to_le_bytes(), bytes.to_le_bytes()].concat());
        let own = |buffer| wgpu::BufferBinding { buffer, offset: place, size: std::num::NonZeroU64::new(8) };
        let entry = |binding, buffer| wgpu::BindGroupEntry { binding, resource: wgpu::BindingResource::Buffer(buffer) };
        let group = shared.device().create_bind_group(&wgpu::BindGroupDescriptor {
            label: None,
            layout: &self.pipeline.get_bind_group_layout(0),
            entries: &[entry(0, tensor.binding()), entry(1, own(&self.tensors)), entry(2, own(&self.sums))],
        });
        let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
        pass.set_pipeline(&self.pipeline);
        pass.set_bind_group(0, &group, &[]);
        let words = (tensor.ahead() + tensor.bytes()).div_ceil(4);
        pass.dispatch_workgroups(words.div_ceil(64).min(MOST_GROUPS) as u32, 1, 1);
    }

    /// Waits for all sums.
    pub(crate) fn finish(&self, shared: &SharedDevice) -> Result<Vec<[u32; 2]>> {
        let device = shared.device();
        let back = device.create_buffer_init(&wgpu::util::BufferInitDescriptor {
            label: None,
            contents: &vec![0; (self.most * PLACE) as usize],
            usage: wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST,
        });
        let mut encoder = device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        encoder.copy_buffer_to_buffer(&self.sums, 0, &back, 0, self.most * PLACE);
        shared.queue().submit([encoder.finish()]);
        back.map_async(wgpu::MapMode::Read, .., |_| ());
        let failed = |error: &dyn std::fmt::Display| Error::Invalid { reason: format!("wgpu: {error}") };
        device.poll(wgpu::PollType::wait_indefinitely()).map_err(|error| failed(&error))?;
        let bytes = back.get_mapped_range(..).map_err(|error| failed(&error))?;
        let word = |at: u64| {
            let at = at as usize;
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        Ok((0..self.count).map(|tensor| [word(tensor * PLACE), word(tensor * PLACE + 4)]).collect())
    }
}

/// The sums of a tensor's bytes, which follow `ahead` others.
pub(crate) fn sums_of(ahead: u64, bytes: &[u8]) -> [u32; 2] {
    let all: Vec<u8> = std::iter::repeat_n(0, ahead as usize).chain(bytes.iter().copied()).collect();
    let word = |part: &[u8]| {
        let mut word = [0; 4];
        word[..part.len()].copy_from_slice(part);
        u32::from_le_bytes(word)
    };
    all.chunks(4).zip((1_u32..).step_by(2)).fold([0, 0], |[plain, placed]: [u32; 2], (part, odd)| {
        let word = word(part);
        [plain.wrapping_add(word), placed.wrapping_add(word.wrapping_mul(odd))]
    })
}
