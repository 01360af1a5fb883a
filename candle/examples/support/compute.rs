//! The device that a program computes on, as candle's and as the library's.

use std::sync::Arc;

use candle_core::{Device, Result};
use tensor_offload::load::TensorAllocator;
use tensor_offload::plan::TensorGrouping;
use tensor_offload::{DeviceId, Registry};
use tensor_offload_candle::cpu_memory;

use super::peak::Peak;

/// A device of both.
#[derive(Clone, Debug)]
pub(crate) struct Compute {
    pub(crate) device: Device,
    pub(crate) id: DeviceId,
}

impl Compute {
    /// Opens a device; without a wish the first card, if the program was built for cards and there is one, or else the CPU.
    pub(crate) fn open(wish: Option<DeviceId>, devices: &Registry) -> Result<Compute> {
        let first = devices.machine().devices().iter().map(|device| device.id).find(|id| is_cuda(*id));
        let best = first.filter(|_| cfg!(feature = "cuda")).unwrap_or(DeviceId::CPU);
        let id = wish.unwrap_or(best);
        let device = match id {
            DeviceId::CPU => Device::Cpu,
            id if is_cuda(id) && cfg!(feature = "cuda") => Device::new_cuda_with_stream(id.index() as usize)?,
            id if is_cuda(id) => {
                candle_core::bail!("this program was built without candle's CUDA devices: add --features cuda")
            }
            id => candle_core::bail!("candle computes on cpu and on CUDA devices, not on {id}"),
        };
        #[cfg(feature = "cuda")]
        if let Device::Cuda(cuda) = &device {
            #[expect(unsafe_code, reason = "candle's events tell nothing where all its work is on one stream")]
            // SAFETY: this program makes no other stream of candle's.
            unsafe {
                cuda.disable_event_tracking();
            }
        }
        Ok(Compute { device, id })
    }

    /// The allocation without another one: 40 % of the weights stay.
    pub(crate) fn allocation(&self) -> String {
        let rest = if self.id.is_host() { "disk" } else { "cpu" };
        format!("{},40%;{rest},*", self.id)
    }

    /// Candle's memory on the device.
    pub(crate) fn memory(&self) -> Result<Arc<dyn TensorAllocator>> {
        #[cfg(feature = "cuda")]
        if self.device.is_cuda() {
            #[expect(unsafe_code, reason = "the promise of `cuda_memory`")]
            // SAFETY: no in-place operation of this program replaces the storage of a weight.
            return Ok(unsafe { tensor_offload_candle::cuda_memory(&self.device) }?);
        }
        Ok(cpu_memory())
    }

    /// How its tensors share allocations.
    pub(crate) fn grouping(&self) -> TensorGrouping {
        if self.id.is_host() { TensorGrouping::PerTensor } else { TensorGrouping::PerType }
    }

    /// Watches the memory that the program takes on the device.
    pub(crate) fn watch(&self) -> Peak {
        #[cfg(feature = "cuda")]
        if let Device::Cuda(cuda) = &self.device {
            use candle_core::cuda_backend::cudarc::driver::result;
            let context = Arc::clone(cuda.cuda_stream().context());
            return Peak::watch(move || {
                context.bind_to_thread().ok()?;
                let (free, total) = result::mem_get_info().ok()?;
                Some((total - free) as u64)
            });
        }
        Peak::watch(super::peak::anonymous)
    }
}

fn is_cuda(id: DeviceId) -> bool {
    id == DeviceId::cuda(id.index())
}
