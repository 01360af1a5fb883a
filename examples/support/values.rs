//! The values of weights in GGML's blocks, computed on the compute device: in each layer's turn, or into its slot.

use std::time::Duration;

use half::{bf16, f16};
use sha2::{Digest, Sha256};
use tensor_offload::backend::{BufMut, MemoryKind, Role, Transfer};
use tensor_offload::checkpoint::Layout;
use tensor_offload::patch::dequantise;
use tensor_offload::{DType, DeviceId, Error, LayerGuard, Model, Registry, Result};

/// How long values may take to come back.
const DEADLINE: Duration = Duration::from_secs(600);

/// The values of a model's tensors, which are compared with the host's.
pub(crate) struct Values {
    dtype: DType,
    /// Memory on the compute device that holds the values of one tensor at a time. Without it slots hold them.
    memory: Option<BufMut>,
    in_slots: bool,
    hash: Sha256,
    tensors: usize,
}

impl Values {
    /// The bytes of the values of any tensor in blocks.
    pub(crate) fn room(layout: &Layout, dtype: DType) -> Result<u64> {
        let blocks = layout.tensors().iter().filter(|tensor| tensor.dtype.is_ggml_block());
        let room = |shape: &[u64]| dtype.bytes_of(shape).filter(|_| is_written(dtype));
        let refused = || Error::Invalid { reason: format!("--dequantise {dtype}: values are F32, F16 or BF16") };
        blocks.map(|tensor| room(&tensor.shape).ok_or_else(refused)).try_fold(0, |most, room| Ok(most.max(room?)))
    }

    pub(crate) fn new(model: &Model, dtype: DType) -> Result<Values> {
        let room = Values::room(model.layout(), dtype)? as usize;
        let memory = model.residency().device().alloc(room, MemoryKind::Whole)?;
        Ok(Values { dtype, memory: Some(memory), in_slots: false, hash: Sha256::new(), tensors: 0 })
    }

    /// Values that slots hold.
    pub(crate) fn in_slots(dtype: DType) -> Values {
        Values { dtype, memory: None, in_slots: true, hash: Sha256::new(), tensors: 0 }
    }

    /// Queues the values of all of a layer's tensors in blocks, one after the other.
    pub(crate) fn compute(&mut self, layer: &LayerGuard) -> Result<()> {
        let blocks = layer.tensors().filter(|tensor| !self.in_slots && tensor.dtype().is_ggml_block());
        let blocks: Vec<_> = blocks.collect();
        blocks.iter().map(|tensor| tensor.name()).try_for_each(|name| self.queue(layer, name))
    }

    fn queue(&mut self, layer: &LayerGuard, name: &str) -> Result<()> {
        let memory = self.memory.take().ok_or_else(lost)?;
        self.memory = Some(layer.dequantise(name, self.dtype, memory)?.chain());
        Ok(())
    }

    /// Compares the values of a tensor on the compute device with what the host makes of its `blocks`, which are of type `stored`.
    pub(crate) fn check(
        &mut self,
        devices: &Registry,
        layer: &LayerGuard,
        (name, stored): (&str, DType),
        blocks: &[u8],
    ) -> Result<()> {
        let here =
            layer.tensor(name).filter(|tensor| stored.is_ggml_block() && (!self.in_slots || tensor.dtype() != stored));
        if here.is_none() {
            return Ok(());
        }
        let wanted = values_of(stored, blocks, self.dtype)?;
        let same = match self.in_slots {
            true => {
                let mut values = vec![0; wanted.len()];
                layer.read(name, &mut values)?;
                values == wanted
            }
            false => self.computed(devices, layer, name, &wanted)?,
        };
        if !same {
            return Err(Error::Invalid { reason: format!("the values of `{name}` are not those of the host") });
        }
        self.hash.update(name);
        self.hash.update(&wanted);
        self.tensors += 1;
        Ok(())
    }

    /// Computes a tensor's values. Returns whether they are these.
    fn computed(&mut self, devices: &Registry, layer: &LayerGuard, name: &str, wanted: &[u8]) -> Result<bool> {
        self.queue(layer, name)?;
        let memory = self.memory.take().ok_or_else(lost)?.freeze();
        let device = devices.device(memory.device())?;
        let back = devices.device(DeviceId::CPU)?.alloc(memory.bytes(), MemoryKind::Pinned)?;
        let flight = device.stream(Role::Download)?.copy(Transfer::whole(&memory, back)?)?;
        let back = flight.wait(DEADLINE)?.freeze();
        let values = back.host(DEADLINE)?.ok_or_else(lost)?;
        let same = values.get(..wanted.len()) == Some(wanted);
        self.memory = memory.try_reclaim().ok();
        Ok(same)
    }

    /// The number of tensors that were checked, and a hash of their names and values.
    pub(crate) fn checked(self) -> (usize, String) {
        (self.tensors, self.hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
    }
}

fn is_written(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::F16 | DType::BF16)
}

fn lost() -> Error {
    Error::Invalid { reason: "the memory for values is gone".to_owned() }
}

/// The values of blocks as elements of type `to`.
fn values_of(dtype: DType, blocks: &[u8], to: DType) -> Result<Vec<u8>> {
    let block = dtype.block();
    let mut values = vec![0.0; blocks.len() / block.bytes as usize * block.elements as usize];
    dequantise(dtype, blocks, &mut values)?;
    let values = values.into_iter().map(|value| if value.is_nan() { f32::NAN } else { value });
    Ok(match to {
        DType::F32 => values.flat_map(f32::to_le_bytes).collect(),
        DType::F16 => values.flat_map(|value| f16::from_f32(value).to_le_bytes()).collect(),
        _ => values.flat_map(|value| bf16::from_f32(value).to_le_bytes()).collect(),
    })
}
