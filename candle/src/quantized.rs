//! Weights in GGML's blocks, for candle's quantised products.

#![expect(unsafe_code, reason = "candle's quantised products read the bytes of a slot, under candle's own lock")]

use std::ptr::NonNull;

use candle_core::quantized::k_quants::{self, GgmlType};
use candle_core::quantized::{GgmlDType, QMatMul, QStorage, QTensor, QuantizedType};
use candle_core::{CpuStorage, DType, Module, Result, Shape, Storage, Tensor, bail};
use half::f16;
use tensor_offload::checkpoint::TensorInfo;

use crate::error::Error;
use crate::views;

/// A weight of GGML's blocks, or of floats, as a factor of candle's products: what candle's `QMatMul` is to weights that stay.
///
/// Products are, bit for bit, those of a `QMatMul` over the same weight. Candle's `QTensor` keeps a second copy of its blocks in
/// another order after its first product: another layer's, once the slot has been filled again, and memory that nothing
/// counts. So each product makes a `QTensor` over the slot's bytes, which it does not copy, and reads them under candle's
/// lock. Weights of F16 and BF16 are widened to f32 in each product, as `QMatMul` does once.
///
/// [`LayerWeights::quantized`](crate::LayerWeights::quantized) gives it. Candle takes the environment's `CANDLE_DEQUANTIZE_ALL`
/// into account for a `QMatMul`, and this does not.
#[derive(Clone, Debug)]
pub struct QuantizedWeight {
    name: String,
    shape: Shape,
    held: Held,
}

#[derive(Clone, Debug)]
enum Held {
    /// Bytes, of one dimension, and the type of the blocks that they are.
    Blocks(Tensor, GgmlDType),
    Floats(Tensor),
}

impl QuantizedWeight {
    /// A weight whose blocks are the bytes of `tensor`.
    pub(crate) fn blocks(info: &TensorInfo, tensor: Tensor, dtype: GgmlDType) -> QuantizedWeight {
        let shape = Shape::from(views::dims(info));
        QuantizedWeight { name: info.name.clone(), shape, held: Held::Blocks(tensor, dtype) }
    }

    /// A weight of floating-point numbers.
    pub(crate) fn floats(info: &TensorInfo, tensor: Tensor) -> crate::error::Result<QuantizedWeight> {
        let (name, stored) = (info.name.clone(), tensor.dtype());
        match stored {
            DType::F32 | DType::F16 | DType::BF16 => {
                Ok(QuantizedWeight { name, shape: tensor.shape().clone(), held: Held::Floats(tensor) })
            }
            _ => Err(Error::Type { tensor: name, stored, asked: DType::F32 }),
        }
    }

    /// Its shape in values, `[outputs, inputs]` for a linear layer.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// The type that it is stored in.
    pub fn dtype(&self) -> GgmlDType {
        match &self.held {
            Held::Blocks(_, dtype) => *dtype,
            Held::Floats(tensor) => match tensor.dtype() {
                DType::F16 => GgmlDType::F16,
                DType::BF16 => GgmlDType::BF16,
                _ => GgmlDType::F32,
            },
        }
    }

    /// The rows that `ids` name, in f32: of a weight `[rows, width]` and ids of any shape, `[…ids, width]`. It reads these rows
    /// alone.
    ///
    /// # Errors
    /// Candle's for an id that has no row, and a weight that has not two dimensions.
    pub fn embedding(&self, ids: &Tensor) -> Result<Tensor> {
        match &self.held {
            Held::Blocks(..) => self.with(|weight| weight.embedding(ids)),
            Held::Floats(tensor) => QMatMul::Tensor(tensor.clone()).embedding(ids)?.to_dtype(DType::F32),
        }
    }

    /// All its values, in f32.
    ///
    /// # Errors
    /// Candle's.
    pub fn dequantize(&self) -> Result<Tensor> {
        match &self.held {
            Held::Blocks(bytes, _) => self.with(|weight| weight.dequantize(bytes.device())),
            Held::Floats(tensor) => tensor.to_dtype(DType::F32),
        }
    }

    /// Runs `work` with candle's quantised tensor over the bytes as they are now, which are locked meanwhile.
    fn with<T>(&self, work: impl FnOnce(&QTensor) -> Result<T>) -> Result<T> {
        let Held::Blocks(bytes, dtype) = &self.held else { bail!("tensor `{}` is not in blocks", self.name) };
        let (storage, layout) = bytes.storage_and_layout();
        let held = match (&*storage, layout.contiguous_offsets()) {
            (Storage::Cpu(CpuStorage::U8(all)), Some((start, end))) => all.get(start..end),
            _ => None,
        };
        let Some(held) = held else { bail!("the storage of tensor `{}` was replaced", self.name) };
        let whole = self.shape.elem_count() / dtype.block_size() * dtype.type_size();
        let Some(blocks) = typed(*dtype, held).filter(|_| held.len() == whole) else {
            bail!("tensor `{}` is no {dtype:?} of the shape {:?}, or is not aligned", self.name, self.shape)
        };
        // The blocks point into `storage`. They end with this tensor, which `work` cannot keep, before the lock does.
        let weight = QTensor::new(QStorage::Cpu(blocks), self.shape.clone())?;
        work(&weight)
    }
}

/// The product with the transposed weight: `[…, inputs]` becomes `[…, outputs]`.
impl Module for QuantizedWeight {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match &self.held {
            Held::Blocks(..) => self.with(|weight| x.apply_op1_no_bwd(weight)),
            Held::Floats(tensor) => QMatMul::Tensor(tensor.to_dtype(DType::F32)?).forward(x),
        }
    }
}

/// Blocks somewhere in memory, as a storage of candle's. Their memory must be readable, and not be written, while this exists.
struct Blocks<T> {
    start: NonNull<T>,
    count: usize,
}

// SAFETY: it is a shared slice of blocks, which all threads may read.
unsafe impl<T: Sync> Send for Blocks<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Blocks<T> {}

impl<T: GgmlType> Blocks<T> {
    fn as_slice(&self) -> &[T] {
        // SAFETY: `of` took both from a slice that was long enough and aligned. Where it is used, the slice is locked against
        // writing for longer than this exists.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.count) }
    }

    /// The blocks that these bytes are; `None` if they are not aligned as blocks or are no whole number of them.
    ///
    /// `T` is one of candle's block structures: numbers in the order of the file, for which any bits are a value.
    fn of(bytes: &[u8]) -> Option<Box<dyn QuantizedType>>
    where
        T: 'static,
    {
        let start = NonNull::from(bytes).cast::<T>();
        let whole = start.is_aligned() && bytes.len().is_multiple_of(size_of::<T>());
        whole.then(|| Box::new(Blocks { start, count: bytes.len() / size_of::<T>() }) as Box<dyn QuantizedType>)
    }
}

/// Bytes as blocks of a type; `None` for floats, Q8_1, and bytes that are not aligned as blocks or no whole number of them.
fn typed(dtype: GgmlDType, bytes: &[u8]) -> Option<Box<dyn QuantizedType>> {
    match dtype {
        GgmlDType::Q4_0 => Blocks::<k_quants::BlockQ4_0>::of(bytes),
        GgmlDType::Q4_1 => Blocks::<k_quants::BlockQ4_1>::of(bytes),
        GgmlDType::Q5_0 => Blocks::<k_quants::BlockQ5_0>::of(bytes),
        GgmlDType::Q5_1 => Blocks::<k_quants::BlockQ5_1>::of(bytes),
        GgmlDType::Q8_0 => Blocks::<k_quants::BlockQ8_0>::of(bytes),
        GgmlDType::Q2K => Blocks::<k_quants::BlockQ2K>::of(bytes),
        GgmlDType::Q3K => Blocks::<k_quants::BlockQ3K>::of(bytes),
        GgmlDType::Q4K => Blocks::<k_quants::BlockQ4K>::of(bytes),
        GgmlDType::Q5K => Blocks::<k_quants::BlockQ5K>::of(bytes),
        GgmlDType::Q6K => Blocks::<k_quants::BlockQ6K>::of(bytes),
        GgmlDType::Q8K => Blocks::<k_quants::BlockQ8K>::of(bytes),
        GgmlDType::F32 | GgmlDType::F16 | GgmlDType::BF16 | GgmlDType::Q8_1 => None,
    }
}

impl<T: GgmlType> QuantizedType for Blocks<T> {
    fn dtype(&self) -> GgmlDType {
        T::DTYPE
    }

    fn matmul_t(&self, mkn: (usize, usize, usize), lhs: &[f32], dst: &mut [f32]) -> Result<()> {
        k_quants::matmul(mkn, lhs, self.as_slice(), dst)
    }

    fn matmul_t_f16(&self, mkn: (usize, usize, usize), lhs: &[f16], dst: &mut [f16]) -> Result<()> {
        k_quants::matmul_f16(mkn, lhs, self.as_slice(), dst)
    }

    fn embedding(&self, ids: &[u32], rows: usize, hidden: usize) -> Result<CpuStorage> {
        let row_blocks = hidden / T::BLCK_SIZE;
        let mut values = vec![0.0; ids.len() * hidden];
        for (row, values) in ids.iter().zip(values.chunks_exact_mut(hidden.max(1))) {
            let start = (*row as usize).checked_mul(row_blocks).filter(|_| (*row as usize) < rows);
            let Some(blocks) = start.and_then(|start| self.as_slice().get(start..start + row_blocks)) else {
                bail!("id {row} has no row in an embedding of {rows}")
            };
            T::to_float(blocks, values);
        }
        Ok(CpuStorage::F32(values))
    }

    fn dequantize(&self, elem_count: usize) -> Result<CpuStorage> {
        let mut values = vec![0.0; elem_count];
        T::to_float(self.as_slice(), &mut values);
        Ok(CpuStorage::F32(values))
    }

    fn storage_size_in_bytes(&self) -> usize {
        size_of_val(self.as_slice())
    }

    fn as_ptr(&self) -> *const u8 {
        self.start.as_ptr().cast_const().cast()
    }

    fn block_size(&self) -> usize {
        T::BLCK_SIZE
    }

    fn from_float(&mut self, _: &[f32]) {
        unreachable!("the tensor over these blocks is shared, and candle writes blocks of its own alone");
    }

    fn from_float_imatrix(&mut self, _: &[f32], _: &[f32], _: usize) {
        unreachable!("as `from_float`");
    }

    fn size(&self) -> usize {
        self.storage_size_in_bytes()
    }
}
