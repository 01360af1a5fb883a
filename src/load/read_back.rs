//! Views of tensors where they live, and copies of their bytes back to the host.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crate::backend::{Buf, Device, MemoryKind, Piece, Role, Stream, Transfer};
use crate::checkpoint::TensorInfo;
use crate::device::DeviceId;
use crate::dtype::{DType, Element};
use crate::error::{Error, Measured, Mismatch, Result};

/// A tensor in some device's memory.
#[derive(Clone, Debug)]
pub struct TensorView<'a> {
    info: &'a TensorInfo,
    buf: &'a Buf,
    range: Range<usize>,
    /// The deadline of a wait for its bytes on the host.
    deadline: Duration,
}

impl<'a> TensorView<'a> {
    pub(crate) fn new(info: &'a TensorInfo, buf: &'a Buf, range: Range<usize>, deadline: Duration) -> TensorView<'a> {
        TensorView { info, buf, range, deadline }
    }

    /// The tensor's name.
    pub fn name(&self) -> &'a str {
        &self.info.name
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.info.dtype
    }

    /// The dimensions, outermost first; empty for a scalar.
    pub fn shape(&self) -> &'a [u64] {
        &self.info.shape
    }

    /// The size in bytes.
    pub fn size(&self) -> usize {
        self.range.len()
    }

    /// The tensor's description in the checkpoint, with its file and its offset there.
    pub fn info(&self) -> &'a TensorInfo {
        self.info
    }

    /// The device that holds it.
    pub fn device(&self) -> DeviceId {
        self.buf.device()
    }

    /// The buffer that holds the tensor, along with others of its module or layer.
    pub fn buf(&self) -> &'a Buf {
        self.buf
    }

    /// The byte range of the tensor in that buffer. It begins at a multiple of the element's size, that of the first tensor of a
    /// module at a multiple of 64.
    pub fn byte_range(&self) -> Range<usize> {
        self.range.clone()
    }

    /// The tensor's bytes in host memory, without a copy; `None` if the host cannot address them, or if they are in memory that
    /// the library shares with a framework ([`Buf::read_with`] locks it meanwhile). Waits until they have arrived.
    /// [`LayerGuard::to_vec`](crate::LayerGuard::to_vec) and [`Model::to_vec`](crate::Model::to_vec) copy from any device.
    ///
    /// # Errors
    /// [`Error::TimedOut`] when they do not arrive in time; [`Error::Failed`] when their copy failed.
    pub fn bytes(&self) -> Result<Option<&'a [u8]>> {
        Ok(self.buf.host(self.deadline)?.map(|bytes| &bytes[self.range.clone()]))
    }

    /// The tensor's elements in host memory, without a copy, in the order of the file: the last dimension changes fastest.
    ///
    /// ```
    /// # use tensor_offload::{DeviceId, Model, Registry};
    /// let model = Model::open("examples/data/tiny-llama")?.compute(DeviceId::CPU).load(&Registry::system())?;
    /// let norm = model.tensor("model.norm.weight").expect("every Llama has one");
    /// let scales: &[half::bf16] = norm.as_slice()?;
    /// assert_eq!(norm.shape(), [scales.len() as u64]);
    /// # Ok::<(), tensor_offload::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`bytes`](TensorView::bytes); [`Error::Mismatch`] when the elements are of another type than `T`, the host
    /// cannot address the memory, or a framework may write it, behind its lock.
    pub fn as_slice<T: Element>(&self) -> Result<&'a [T]> {
        self.check_element::<T>()?;
        let block = self.buf.block();
        let not_here = || match (block.is_locked(), block.is_elsewhere()) {
            (true, _) => Mismatch::Shared { tensor: self.info.name.clone() },
            (_, true) => Mismatch::ReadForEachUse { tensor: self.info.name.clone() },
            _ => Mismatch::Memory {
                what: format!("tensor `{}`", self.info.name),
                memory: self.device(),
                device: DeviceId::CPU,
            },
        };
        let bytes = self.bytes()?.ok_or_else(not_here)?;
        bytemuck::try_cast_slice(bytes).map_err(|why| Error::bug(format!("tensor `{}`: {why}", self.info.name)))
    }

    /// Fails unless the elements are of type `T`.
    pub(crate) fn check_element<T: Element>(&self) -> Result<()> {
        if self.info.dtype == T::DTYPE {
            return Ok(());
        }
        let (tensor, dtype, asked) = (self.info.name.clone(), self.info.dtype, T::DTYPE);
        Err(Mismatch::Element { tensor, dtype, asked }.into())
    }
}

/// Copies bytes from devices to the host, with one stream for each device.
#[derive(Debug)]
pub(super) struct ReadBack {
    host: Arc<dyn Device>,
    streams: Mutex<BTreeMap<DeviceId, Arc<dyn Stream>>>,
    deadline: Duration,
}

impl ReadBack {
    /// Copies through memory of `host`. Each copy may take as long as `deadline`.
    pub(super) fn new(host: Arc<dyn Device>, deadline: Duration) -> ReadBack {
        ReadBack { host, streams: Mutex::default(), deadline }
    }

    pub(super) fn host(&self) -> &Arc<dyn Device> {
        &self.host
    }

    /// Copies a view of `device` to `dst`, which must be as long.
    pub(super) fn read(&self, device: &Arc<dyn Device>, view: &TensorView<'_>, dst: &mut [u8]) -> Result<()> {
        if dst.len() != view.range.len() {
            let what = Measured::Tensor { name: view.info.name.clone() };
            return Err(Error::WrongSize { what, needed: view.range.len() as u64, given: dst.len() as u64 });
        }
        self.gather(device, view.buf, std::slice::from_ref(&view.range), dst)
    }

    /// Copies byte ranges of a buffer on `device` to `dst`, one after the other. Their total length must be that of `dst`.
    pub(super) fn gather(
        &self,
        device: &Arc<dyn Device>,
        buf: &Buf,
        ranges: &[Range<usize>],
        dst: &mut [u8],
    ) -> Result<()> {
        let mut at = 0;
        let mut next = |range: &Range<usize>| {
            at += range.len();
            at - range.len()
        };
        let copied = buf.read_with(self.deadline, |bytes| {
            for range in ranges {
                let at = next(range);
                dst[at..at + range.len()].copy_from_slice(&bytes[range.clone()]);
            }
        })?;
        if copied.is_some() {
            return Ok(());
        }
        let staging = self.host.alloc_near(dst.len(), MemoryKind::Pinned, device.id())?;
        let piece = |range: &Range<usize>| Piece { src: buf.clone(), from: range.clone(), at: next(range) };
        let pieces = ranges.iter().map(piece).collect();
        let flight = self.stream(device)?.send(Transfer::new(pieces, staging)?)?;
        let landed = flight.wait(self.deadline)?.freeze();
        let bytes = landed.host(self.deadline)?;
        dst.copy_from_slice(bytes.ok_or_else(|| Error::bug("staging memory the host cannot address"))?);
        Ok(())
    }

    /// The download stream of a device, created at first use.
    fn stream(&self, device: &Arc<dyn Device>) -> Result<Arc<dyn Stream>> {
        let mut streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(stream) = streams.get(&device.id()) {
            return Ok(Arc::clone(stream));
        }
        let stream = device.stream(Role::Download)?;
        streams.insert(device.id(), Arc::clone(&stream));
        Ok(stream)
    }
}
