//! Tensors as buffers of wgpu.

use std::num::NonZeroU64;
use std::sync::Arc;

use ash::vk;
use wgpu::hal::{api, vulkan::Buffer};

use crate::error::{Error, Mismatch, Result};
use crate::load::TensorView;
use crate::vulkan::{Place, place};

/// Bindings of storage buffers have whole words.
const WORD: u64 = 4;

/// A tensor as a range of a buffer of wgpu, made by [`SharedDevice::buffer`](super::SharedDevice::buffer).
#[derive(Clone, Debug)]
pub struct TensorBuffer {
    buffer: wgpu::Buffer,
    offset: u64,
    ahead: u64,
    bytes: u64,
}

impl TensorBuffer {
    /// The buffer, with the usages `STORAGE` and `COPY_SRC`. It holds other memory before the tensor.
    pub fn buffer(&self) -> &wgpu::Buffer {
        &self.buffer
    }

    /// The tensor's range, for a bind group: from a multiple of the device's `min_storage_buffer_offset_alignment` on, in whole words
    /// of 4 bytes. [`ahead`](TensorBuffer::ahead) says how many bytes precede the tensor there; fewer than 4 may follow it.
    pub fn binding(&self) -> wgpu::BufferBinding<'_> {
        wgpu::BufferBinding { buffer: &self.buffer, offset: self.offset, size: NonZeroU64::new(self.size()) }
    }

    /// The bytes of the binding before the tensor's first: 0 for most.
    pub fn ahead(&self) -> u64 {
        self.ahead
    }

    /// The size of the tensor in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The offset of the tensor's first byte in the buffer.
    pub fn start(&self) -> u64 {
        self.offset + self.ahead
    }

    /// The size of the binding in bytes.
    fn size(&self) -> u64 {
        (self.ahead + self.bytes).next_multiple_of(WORD)
    }
}

/// # Safety
/// As [`SharedDevice::buffer`](super::SharedDevice::buffer); `handle` is the device's.
pub(super) unsafe fn buffer(
    device: &wgpu::Device,
    handle: vk::Device,
    tensor: &TensorView<'_>,
) -> Result<TensorBuffer> {
    let what = || format!("tensor `{}`", tensor.name());
    if tensor.size() == 0 {
        return Err(Error::invalid(format!("{} has no bytes", what())));
    }
    let elsewhere = || Mismatch::Memory { what: what(), memory: tensor.device(), device: crate::DeviceId::vulkan(0) };
    let Place { buffer, offset, size, .. } =
        place(tensor).filter(|place| place.device == handle).ok_or_else(elsewhere)?;
    let limits = device.limits();
    let ahead = offset % u64::from(limits.min_storage_buffer_offset_alignment.max(1));
    let most = limits.max_storage_buffer_binding_size;
    let whole = (ahead + size).next_multiple_of(WORD);
    if whole > most {
        return Err(Error::invalid(format!(
            "{} has {size} bytes, a binding of {whole}; max_storage_buffer_binding_size is {most}",
            what()
        )));
    }
    let begin = offset - ahead;
    let memory = Arc::clone(tensor.buf().block());
    // SAFETY: the buffer is of this device, has these usages, is as long, since memory is in units of 256 bytes, and lives until the
    // memory is dropped, after wgpu's last use. Its bytes are initialised: the work comes after the copies into it.
    let buffer = unsafe {
        let raw = Buffer::from_raw_externally_owned(buffer, Box::new(move || drop(memory)));
        let descriptor = wgpu::BufferDescriptor {
            label: Some(tensor.name()),
            size: begin + whole,
            usage: wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC,
            mapped_at_creation: false,
        };
        device.create_buffer_from_hal::<api::Vulkan>(raw, &descriptor)
    };
    Ok(TensorBuffer { buffer, offset: begin, ahead, bytes: size })
}
