//! What a header says of the tensors.

use std::collections::HashMap;

use super::cursor::Cursor;
use super::of_tensor;
use crate::checkpoint::TensorInfo;
use crate::checkpoint::json::repeated;
use crate::dtype::DType;
use crate::error::{Error, FileFault, GgufFault, Result};

/// The fewest bytes that say what a tensor is: the length of its name, the number of its dimensions, its type and offset.
pub(super) const LEAST: u64 = 8 + 4 + 4 + 8;

/// The most dimensions (ggml, `include/ggml.h`, `GGML_MAX_DIMS`).
pub(super) const DIMENSIONS: u32 = 4;

/// The tensors that have another shape than the one that they are stored in, by name.
pub(super) type StoredShapes = HashMap<String, Reshaped>;

/// The shapes of such a tensor, outermost first.
#[derive(Clone, Debug)]
pub(super) struct Reshaped {
    /// In the file.
    pub(super) stored: Vec<u64>,
    /// In the layout.
    pub(super) shape: Vec<u64>,
}

/// Reads what follows the metadata: `count` tensors of file number `number`. `shape` is the shape that a tensor had before it was
/// stored in another one. The tensors come in order of offset, with the shapes in the file of those that got another one.
pub(super) fn read(
    cursor: &mut Cursor<'_>,
    count: u64,
    alignment: u64,
    shape: impl Fn(&str) -> Result<Option<Vec<u64>>>,
    number: usize,
) -> Result<(Vec<TensorInfo>, StoredShapes)> {
    cursor.check_count(|| "tensors".to_owned(), count, LEAST)?;
    let mut tensors = Vec::new();
    for _ in 0..count {
        let name = cursor.name()?;
        let info = tensor(cursor, &name, alignment, number).map_err(|error| of_tensor(cursor, &name, error))?;
        tensors.push(info);
    }
    if let Some(name) = repeated(tensors.iter().map(|tensor| tensor.name.as_str())) {
        return Err(Error::file(cursor.path(), Some(name), FileFault::DuplicateKey));
    }
    let mut stored = StoredShapes::new();
    for tensor in &mut tensors {
        if let Some(shape) = shape(&tensor.name)? {
            restore(tensor, shape, &mut stored);
        }
    }
    place(cursor, &mut tensors, alignment)?;
    Ok((tensors, stored))
}

/// Reads one tensor, whose offset counts from the beginning of the tensors' bytes.
fn tensor(cursor: &mut Cursor<'_>, name: &str, alignment: u64, file: usize) -> Result<TensorInfo> {
    let count = cursor.u32()?;
    if count > DIMENSIONS {
        return Err(cursor.error(GgufFault::Dimensions { count }));
    }
    // The innermost dimension comes first.
    let mut shape = (0..count).map(|_| cursor.u64()).collect::<Result<Vec<_>>>()?;
    shape.reverse();
    let number = cursor.u32()?;
    let dtype = DType::from_ggml_number(number).ok_or_else(|| cursor.error(GgufFault::Type { number }))?;
    let offset = cursor.u64()?;
    let (row, block) = (shape.last().copied().unwrap_or(1), dtype.block().elements);
    let Some(bytes) = dtype.bytes_of(&shape) else {
        return Err(cursor.error(match row.is_multiple_of(block) {
            true => GgufFault::Uncountable { dtype, shape },
            false => GgufFault::PartOfABlock { dtype, row, block },
        }));
    };
    if !offset.is_multiple_of(alignment) {
        return Err(cursor.error(GgufFault::Unaligned { offset, alignment }));
    }
    Ok(TensorInfo { name: name.to_owned(), dtype, shape, bytes, file, offset })
}

/// Gives a tensor another shape of as many elements, if its rows are whole numbers of blocks, and notes the one that it had.
/// Programs that store a tensor in other rows, of 256 elements, do so because its own are not.
pub(super) fn restore(tensor: &mut TensorInfo, shape: Vec<u64>, stored: &mut StoredShapes) {
    let elements = |shape: &[u64]| shape.iter().try_fold(1u64, |count, &side| count.checked_mul(side));
    let same = elements(&shape) == elements(&tensor.shape);
    if same && shape != tensor.shape && tensor.dtype.bytes_of(&shape) == Some(tensor.bytes) {
        let own = std::mem::replace(&mut tensor.shape, shape.clone());
        stored.insert(tensor.name.clone(), Reshaped { stored: own, shape });
    }
}

/// Sorts tensors with offsets from the beginning of their bytes, which follow here; refuses overlaps, holes and what lies beyond
/// the file's end; and makes the offsets relative to the start of the file.
fn place(cursor: &Cursor<'_>, tensors: &mut [TensorInfo], alignment: u64) -> Result<()> {
    let (path, len) = (cursor.path(), cursor.len());
    let fault = |tensor: &TensorInfo, fault| Err(Error::file(path, Some(&tensor.name), fault));
    // Neither overflows: a header ends within 1 GiB, and an alignment is of 32 bits.
    let start = cursor.at().next_multiple_of(alignment);
    // A tensor without elements begins where the one after it does.
    tensors.sort_by_key(|tensor| (tensor.offset, tensor.bytes));
    let mut end = 0u64;
    for index in 0..tensors.len() {
        let tensor = &tensors[index];
        let own_end = tensor.offset.checked_add(tensor.bytes).and_then(|end| end.checked_add(start));
        let Some(own_end) = own_end.filter(|own_end| *own_end <= len) else {
            let expected = own_end.unwrap_or(u64::MAX);
            return fault(tensor, FileFault::Truncated { expected, actual: len });
        };
        let padded = end.next_multiple_of(alignment);
        if tensor.offset < end {
            let (range, other) = (tensor.offset + start..own_end, tensors[index - 1].name.clone());
            return fault(tensor, FileFault::Overlap { range, other });
        }
        if tensor.offset > padded {
            return fault(tensor, FileFault::Hole { hole: start + padded..start + tensor.offset });
        }
        end = own_end - start;
    }
    // Some programs pad the last tensor, and some do not pad a header without tensors.
    let most = start + end.next_multiple_of(alignment);
    if len > most {
        return Err(Error::file(path, None, FileFault::TrailingBytes { extra: len - most }));
    }
    tensors.iter_mut().for_each(|tensor| tensor.offset += start);
    Ok(())
}
