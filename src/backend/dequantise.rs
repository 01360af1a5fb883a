//! The values of a tensor's blocks, from one buffer of a device into another.

use std::collections::HashSet;

use super::{Buf, BufMut, Event, Flight, Rejected};
use crate::dtype::DType;
use crate::error::{Error, Measured, Mismatch, Result};

/// Blocks of a type of GGML, and the memory for their values in another type. The blocks are inside of the source, and the values
/// inside of the destination.
#[derive(Debug)]
pub struct Dequantise {
    src: Buf,
    offset: usize,
    dtype: DType,
    values: usize,
    dst: BufMut,
    at: usize,
    to: DType,
    bytes: usize,
}

impl Dequantise {
    /// `values` values of blocks of `dtype`, which begin at byte `offset` of `src`, as elements of type `to` from byte `at` of
    /// `dst` on, which is aligned to them.
    ///
    /// # Errors
    /// [`Rejected`] with [`Error::Mismatch`] when `dtype` is no block type of GGML; with [`Error::Invalid`] when `to` is not F32,
    /// F16 or BF16, or byte `at` of `dst` is not aligned to its elements; with [`Error::WrongSize`] when the values are not whole blocks, and
    /// when these exceed `src`, or the values `dst`.
    pub fn new(
        (src, offset, dtype): (Buf, usize, DType),
        values: usize,
        (dst, at, to): (BufMut, usize, DType),
    ) -> Result<Dequantise, Box<Rejected>> {
        match Dequantise::sizes((&src, offset, dtype), values, (&dst, at, to)) {
            Ok(bytes) => Ok(Dequantise { src, offset, dtype, values, dst, at, to, bytes }),
            Err(error) => Err(Box::new(Rejected { error, dst })),
        }
    }

    /// The bytes of the values, if they and the blocks fit.
    fn sizes(
        (src, offset, dtype): (&Buf, usize, DType),
        values: usize,
        (dst, at, to): (&BufMut, usize, DType),
    ) -> Result<usize> {
        if !dtype.is_ggml_block() {
            return Err(Mismatch::NoBlocks { dtype }.into());
        }
        if !matches!(to, DType::F32 | DType::F16 | DType::BF16) {
            return Err(Error::invalid(format!("blocks of {dtype} become F32, F16 or BF16, not {to}")));
        }
        let fits = |what, needed: u64, given: usize| match needed <= given as u64 {
            true => Ok(()),
            false => Err(Error::WrongSize { what, needed, given: given as u64 }),
        };
        let block = dtype.block();
        let blocks = (values as u64).div_ceil(block.elements).saturating_mul(block.bytes);
        if !(values as u64).is_multiple_of(block.elements) {
            let (what, given) = (Measured::Blocks { dtype, values }, src.bytes().saturating_sub(offset) as u64);
            return Err(Error::WrongSize { what, needed: blocks, given });
        }
        fits(Measured::Source, blocks.saturating_add(offset as u64), src.bytes())?;
        let bytes = to.bytes_of(&[values as u64]).unwrap_or(u64::MAX);
        fits(Measured::Destination, bytes.saturating_add(at as u64), dst.bytes())?;
        let align = to.element_bytes().unwrap_or(1) as u64;
        // Memory without an address is aligned as all allocations are.
        let begin = dst.address().unwrap_or(dst.start() as u64).saturating_add(at as u64);
        if !begin.is_multiple_of(align) {
            let (all, device) = (dst.bytes(), dst.device());
            return Err(Error::invalid(format!("byte {at} of {all} bytes of {device} is not aligned to {to}")));
        }
        Ok(bytes as usize)
    }

    /// The type of the blocks, and that of the values.
    pub fn types(&self) -> (DType, DType) {
        (self.dtype, self.to)
    }

    /// The number of values.
    pub fn values(&self) -> usize {
        self.values
    }

    /// The bytes of the values.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The buffer of the blocks.
    pub fn source(&self) -> &Buf {
        &self.src
    }

    /// The byte of the source at which the blocks begin.
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// The buffer for the values.
    pub fn dst(&self) -> &BufMut {
        &self.dst
    }

    /// The byte of the destination at which the values begin.
    pub fn at(&self) -> usize {
        self.at
    }

    /// The events that the work must wait for: those of the blocks' arrival and of the destination's last uses, each once.
    pub fn waits(&self) -> Vec<Event> {
        let mut waits = self.dst.uses();
        let mut known: HashSet<usize> = waits.iter().map(Event::key).collect();
        waits.extend(self.src.filled_by().iter().filter(|event| known.insert(event.key())).cloned());
        waits
    }

    /// Turns the work into a flight, once it is queued and `done` completes after it. Both ends carry this event from now on.
    pub fn launched(self, done: Event) -> Flight {
        self.src.used_until(done.clone());
        Flight::of(self.dst, done)
    }

    /// As [`launched`](Dequantise::launched), for a stream whose event completes after all events that the work
    /// [waits](Dequantise::waits) for, and fails if they fail: it replaces the destination's other events.
    pub(super) fn launched_in_order(self, done: Event) -> Flight {
        self.src.used_until(done.clone());
        Flight::in_order(self.dst, done)
    }

    /// Turns the work into a rejection, if queueing it failed and some of it may be under way until an event.
    #[cfg(any(feature = "cuda", feature = "vulkan"))]
    pub(super) fn refused(mut self, error: Error, under_way: Option<Event>) -> Box<Rejected> {
        if let Some(event) = under_way {
            self.src.used_until(event.clone());
            self.dst.after(event);
        }
        self.rejected(error)
    }

    /// Abandons the work and returns the destination.
    pub fn into_dst(self) -> BufMut {
        self.dst
    }

    /// Turns the work into a rejection, if it was not queued.
    pub fn rejected(self, error: Error) -> Box<Rejected> {
        Box::new(Rejected { error, dst: self.dst })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::{Backend, Host, MemoryKind};
    use crate::device::DeviceId;

    #[test]
    fn what_does_not_fit_is_refused_and_the_destination_comes_back() {
        let host = Host::new().open(DeviceId::CPU).unwrap();
        let buffer = |bytes| host.alloc(bytes, MemoryKind::Whole).unwrap();
        let work_at = |dtype, from, values, room, at, to| {
            Dequantise::new((buffer(2 * 34 + 8).freeze(), from, dtype), values, (buffer(room), at, to))
        };
        let work = |dtype, from, values, room, to| work_at(dtype, from, values, room, 0, to);
        let whole = work(DType::Q8_0, 8, 64, 256, DType::F32).unwrap();
        assert_eq!((whole.values(), whole.bytes(), whole.types()), (64, 256, (DType::Q8_0, DType::F32)));
        assert_eq!(work(DType::Q8_0, 0, 0, 1, DType::BF16).unwrap().bytes(), 0);
        for (refused, wanted) in [
            (work(DType::Q8_0, 9, 64, 256, DType::F32), "reads up to byte 77 of a buffer of 76"),
            (work(DType::Q8_0, 8, 64, 255, DType::F32), "writes up to byte 256 of a buffer of 255"),
            (work(DType::Q8_0, 8, 33, 256, DType::F32), "33 values"),
            (work(DType::Q8_0, 8, usize::MAX & !31, 256, DType::F32), "reads up to byte"),
            (work(DType::Q8_0, usize::MAX, 32, 256, DType::F32), "reads up to byte"),
            (work(DType::BF16, 8, 32, 256, DType::F32), "no block type"),
            (work(DType::Q8_0, 8, 32, 256, DType::F8E4M3), "not F8_E4M3"),
            (work_at(DType::Q8_0, 8, 64, 259, 4, DType::F32), "writes up to byte 260 of a buffer of 259"),
            (work_at(DType::Q8_0, 8, 64, 300, 2, DType::F32), "byte 2 of 300 bytes of cpu is not aligned to F32"),
            (work_at(DType::Q8_0, 8, 64, 300, usize::MAX, DType::F32), "writes up to byte"),
        ] {
            let rejected = refused.unwrap_err();
            assert!(rejected.error.to_string().contains(wanted), "{}", rejected.error);
            assert!(rejected.dst.bytes() >= 255);
        }
    }
}
