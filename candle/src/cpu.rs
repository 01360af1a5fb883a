//! Candle's memory on the CPU.

#![expect(unsafe_code, reason = "the library copies into candle's memory, under candle's own lock")]

use std::cell::{Cell, RefCell};
use std::ptr::NonNull;
use std::sync::{Arc, LazyLock};

use candle_core::{CpuStorage, Device, InplaceOp1, Layout, Storage as CandleStorage, Tensor, WithDType};
use tensor_offload::backend::{SharedMemory, Storage};
use tensor_offload::load::{TensorAllocator, TensorRequest};
use tensor_offload::plan::TensorGrouping;
use tensor_offload::{DType, DeviceId, Error, Result};

use crate::dtype;
use crate::error::invalid;

/// The alignment of a tensor's first byte. A large `Vec` begins 16 bytes into a page, and reading a file there takes
/// several times as long as reading it to an aligned address.
const ALIGNMENT: usize = 64;

/// An allocator of candle tensors on the CPU, for [`ModelBuilder::allocator`](tensor_offload::ModelBuilder::allocator) and
/// [`Loader::allocator`](tensor_offload::Loader::allocator): the tensors that stay in host memory, and, where the CPU computes,
/// the slots.
///
/// Each tensor has a storage of its own, and so has each tensor of a layer in a slot. For candle's product on the CPU widens
/// the whole storage of a bf16 or f16 weight to f32, not only the part that it multiplies with. Where layers of other shapes
/// share slots, that is the storage of the larger tensor.
///
/// The memory is written under the lock that candle itself takes. So a program that reads a weight at the wrong time gets
/// another layer's values, and no data race. GGML's blocks are held as single bytes
/// ([`QuantizedWeight`](crate::QuantizedWeight)). A storage takes 64 bytes beyond what the plan counts. All calls return the same
/// allocator, so models derived from each other share memory.
pub fn cpu_memory() -> Arc<dyn TensorAllocator> {
    static MEMORY: LazyLock<Arc<CpuMemory>> = LazyLock::new(|| Arc::new(CpuMemory));
    Arc::clone(&*MEMORY) as Arc<dyn TensorAllocator>
}

/// The allocator.
struct CpuMemory;

impl TensorAllocator for CpuMemory {
    fn device(&self) -> DeviceId {
        DeviceId::CPU
    }

    fn grouping(&self) -> TensorGrouping {
        TensorGrouping::PerTensor
    }

    fn supports(&self, dtype: DType) -> bool {
        dtype::held(dtype).is_some()
    }

    fn allocate(&self, request: &TensorRequest<'_>) -> Result<Box<dyn Storage>> {
        // Slots hold NaN until they are filled.
        let byte = if request.tensor.is_none() { 0xff } else { 0 };
        Ok(Box::new(CpuTensor::new(request.dtype, request.bytes, byte)?))
    }
}

/// A storage of candle's.
pub(crate) struct CpuTensor {
    /// Its aligned part, of one dimension.
    tensor: Tensor,
    bytes: usize,
}

impl CpuTensor {
    fn new(dtype: DType, bytes: usize, byte: u8) -> Result<CpuTensor> {
        let bits = u64::from_ne_bytes([byte; 8]);
        let half = bits as u16;
        let tensor = match dtype {
            DType::U8 => aligned(bytes, byte),
            blocks if dtype::blocks(blocks).is_some() => aligned(bytes, byte),
            DType::U32 => aligned(bytes, bits as u32),
            DType::I16 => aligned(bytes, bits as i16),
            DType::I32 => aligned(bytes, bits as i32),
            DType::I64 => aligned(bytes, bits as i64),
            DType::BF16 => aligned(bytes, half::bf16::from_bits(half)),
            DType::F16 => aligned(bytes, half::f16::from_bits(half)),
            DType::F32 => aligned(bytes, f32::from_bits(bits as u32)),
            DType::F64 => aligned(bytes, f64::from_bits(bits)),
            DType::F8E4M3 => aligned(bytes, float8::F8E4M3::from_bits(byte)),
            other => return Err(Error::Invalid { reason: format!("candle has no tensors of {other} on the CPU") }),
        };
        Ok(CpuTensor { tensor: tensor.map_err(|error| invalid(&error))?, bytes })
    }

    /// The memory as a tensor of one dimension.
    pub(crate) fn tensor(&self) -> &Tensor {
        &self.tensor
    }
}

/// A tensor of one dimension that takes so many bytes and begins at an aligned address.
fn aligned<T: WithDType>(bytes: usize, element: T) -> candle_core::Result<Tensor> {
    let (size, count) = (size_of::<T>(), bytes / size_of::<T>());
    let (mut elements, all) = (Vec::new(), count + ALIGNMENT / size);
    // Without memory this is an error, and not the end of the process.
    elements.try_reserve_exact(all).map_err(candle_core::Error::wrap)?;
    elements.resize(all, element);
    // An element's size divides the address and the alignment.
    let skipped = (elements.as_ptr().addr().wrapping_neg() % ALIGNMENT) / size;
    Tensor::from_vec(elements, all, &Device::Cpu)?.narrow(0, skipped, count)
}

// SAFETY: it has no lasting address.
unsafe impl Storage for CpuTensor {
    fn bytes(&self) -> usize {
        self.bytes
    }

    fn shared(&self) -> Option<&dyn SharedMemory> {
        Some(self)
    }
}

// SAFETY: both hold candle's lock of the storage while `work` runs, for reading and for writing; everything that candle does
// with a storage is done under this lock. The memory is that of a vector of numbers, whose length is checked at each access.
unsafe impl SharedMemory for CpuTensor {
    fn read(&self, work: &mut dyn FnMut(NonNull<u8>)) -> Result<()> {
        let (storage, layout) = self.tensor.storage_and_layout();
        let start = match &*storage {
            CandleStorage::Cpu(storage) => address(storage, layout, self.bytes),
            _ => None,
        };
        work(start.ok_or_else(gone)?);
        Ok(())
    }

    fn write(&self, work: &mut dyn FnMut(NonNull<u8>)) -> Result<()> {
        let write = Write { bytes: self.bytes, work: RefCell::new(work), done: Cell::new(false) };
        self.tensor.inplace_op1(&write).map_err(|error| invalid(&error))?;
        if write.done.get() { Ok(()) } else { Err(gone()) }
    }
}

fn gone() -> Error {
    let reason = "the storage of a tensor was replaced, so that the memory of its weights is gone".to_owned();
    Error::Invalid { reason }
}

/// An operation that hands the memory of a tensor to the library while candle has it locked for writing.
struct Write<'a> {
    bytes: usize,
    work: RefCell<&'a mut dyn FnMut(NonNull<u8>)>,
    /// Whether the memory was there.
    done: Cell<bool>,
}

impl InplaceOp1 for Write<'_> {
    fn name(&self) -> &'static str {
        "tensor-offload"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
        if let Some(start) = address_mut(storage, layout, self.bytes) {
            (self.work.borrow_mut())(start);
            self.done.set(true);
        }
        Ok(())
    }
}

/// Does the same with the elements of a storage, whatever their type.
macro_rules! with_elements {
    ($storage:expr, $elements:ident => $work:expr) => {
        match $storage {
            CpuStorage::U8($elements) => $work,
            CpuStorage::U32($elements) => $work,
            CpuStorage::I16($elements) => $work,
            CpuStorage::I32($elements) => $work,
            CpuStorage::I64($elements) => $work,
            CpuStorage::BF16($elements) => $work,
            CpuStorage::F16($elements) => $work,
            CpuStorage::F32($elements) => $work,
            CpuStorage::F64($elements) => $work,
            CpuStorage::F8E4M3($elements) => $work,
            CpuStorage::F6E2M3($elements) => $work,
            CpuStorage::F6E3M2($elements) => $work,
            CpuStorage::F4($elements) => $work,
            CpuStorage::F8E8M0($elements) => $work,
        }
    };
}

/// The address of a storage from `layout`'s offset on; `None` if fewer bytes follow.
fn address(storage: &CpuStorage, layout: &Layout, bytes: usize) -> Option<NonNull<u8>> {
    let first = layout.start_offset();
    with_elements!(storage, elements => {
        let rest = elements.get(first..)?;
        (size_of_val(rest) >= bytes).then(|| NonNull::from(rest).cast())
    })
}

/// As [`address`], for writing.
fn address_mut(storage: &mut CpuStorage, layout: &Layout, bytes: usize) -> Option<NonNull<u8>> {
    let first = layout.start_offset();
    with_elements!(storage, elements => {
        let rest = elements.get_mut(first..)?;
        (size_of_val(rest) >= bytes).then(|| NonNull::from(rest).cast())
    })
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;

    fn read(tensor: &CpuTensor) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        tensor.read(&mut |start| {
            // SAFETY: so many bytes are there, and locked.
            bytes = unsafe { std::slice::from_raw_parts(start.as_ptr(), tensor.bytes) }.to_vec();
        })?;
        Ok(bytes)
    }

    #[test]
    fn every_type_has_aligned_memory_of_its_size() {
        let types = [
            DType::U8,
            DType::U32,
            DType::I16,
            DType::I32,
            DType::I64,
            DType::BF16,
            DType::F16,
            DType::F32,
            DType::F64,
            DType::F8E4M3,
        ];
        for (dtype, count) in types.into_iter().flat_map(|dtype| [1, 3, 1000, 100_000].map(|count| (dtype, count))) {
            let bytes = count * dtype.element_bytes().unwrap();
            let tensor = CpuTensor::new(dtype, bytes, 0xff).unwrap();
            assert_eq!((tensor.tensor().elem_count(), tensor.tensor().dtype()), (count, dtype::of(dtype).unwrap()));
            assert_eq!(read(&tensor).unwrap(), vec![0xff; bytes]);
            tensor.write(&mut |start| assert_eq!(start.addr().get() % ALIGNMENT, 0)).unwrap();
        }
        assert!(CpuTensor::new(DType::F8E5M2, 8, 0).is_err());
    }

    #[test]
    fn what_is_written_is_what_candle_reads() {
        let tensor = CpuTensor::new(DType::F32, 12, 0).unwrap();
        let view = tensor.tensor().narrow(0, 1, 2).unwrap();
        let values = [1.0_f32, 2.0, 3.0];
        tensor
            .write(&mut |start| {
                // SAFETY: there are twelve bytes, which nobody else has now.
                unsafe { start.cast::<[f32; 3]>().write_unaligned(values) }
            })
            .unwrap();
        assert_eq!(view.to_vec1::<f32>().unwrap(), [2.0, 3.0]);
    }

    /// Candle lets anyone put another storage in a tensor's place.
    #[test]
    fn a_storage_that_was_replaced_is_an_error() {
        struct Replace(CpuStorage);
        impl InplaceOp1 for Replace {
            fn name(&self) -> &'static str {
                "replace"
            }
            fn cpu_fwd(&self, storage: &mut CpuStorage, _layout: &Layout) -> candle_core::Result<()> {
                *storage = self.0.clone();
                Ok(())
            }
        }
        let tensor = CpuTensor::new(DType::F32, 4096, 0).unwrap();
        tensor.tensor().inplace_op1(&Replace(CpuStorage::F32(vec![1.0; 8]))).unwrap();
        assert!(read(&tensor).unwrap_err().to_string().contains("was replaced"));
        assert!(tensor.write(&mut |_| panic!("there is nothing to write")).is_err());
        // As many bytes, in another vector, are still the tensor's.
        tensor.tensor().inplace_op1(&Replace(CpuStorage::F32(vec![1.0; 2048]))).unwrap();
        assert_eq!(read(&tensor).unwrap().len(), 4096);
    }

    #[test]
    fn a_panic_of_the_work_leaves_no_lock() {
        let tensor = CpuTensor::new(DType::U8, 8, 0).unwrap();
        let panicked = catch_unwind(AssertUnwindSafe(|| tensor.write(&mut |_| panic!("the work's own"))));
        assert_eq!(panicked.unwrap_err().downcast_ref::<&str>(), Some(&"the work's own"));
        tensor.write(&mut |_| ()).unwrap();
    }
}
