//! Tensors where they live, and the way of their bytes back to the host.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crate::backend::{Buf, Device, MemoryKind, Piece, Role, Stream, Transfer};
use crate::checkpoint::TensorInfo;
use crate::device::DeviceId;
use crate::error::{Error, Measured, Result};

/// A tensor in some device's memory.
#[derive(Clone, Debug)]
pub struct TensorView<'a> {
    info: &'a TensorInfo,
    buf: &'a Buf,
    place: Range<usize>,
}

impl<'a> TensorView<'a> {
    pub(crate) fn new(info: &'a TensorInfo, buf: &'a Buf, place: Range<usize>) -> TensorView<'a> {
        TensorView { info, buf, place }
    }

    /// Its name, element type and shape.
    pub fn info(&self) -> &'a TensorInfo {
        self.info
    }

    /// The device that holds it.
    pub fn device(&self) -> DeviceId {
        self.buf.device()
    }

    /// The buffer that holds it, beside others of its module or layer.
    pub fn buf(&self) -> &'a Buf {
        self.buf
    }

    /// Its bytes in that buffer. They begin at a multiple of its element's size, the first tensor of a module
    /// at a multiple of 64.
    pub fn place(&self) -> Range<usize> {
        self.place.clone()
    }
}

/// Reads back what is on devices, with a stream for each.
pub(super) struct ReadBack {
    host: Arc<dyn Device>,
    streams: Mutex<BTreeMap<DeviceId, Arc<dyn Stream>>>,
    deadline: Duration,
}

impl ReadBack {
    /// By way of memory of `host`; each copy may take as long as `deadline`.
    pub(super) fn new(host: Arc<dyn Device>, deadline: Duration) -> ReadBack {
        ReadBack { host, streams: Mutex::default(), deadline }
    }

    pub(super) fn host(&self) -> &Arc<dyn Device> {
        &self.host
    }

    /// Copies what a view of `device` shows to `dst`, which has to be as long.
    pub(super) fn read(&self, device: &Arc<dyn Device>, view: &TensorView<'_>, dst: &mut [u8]) -> Result<()> {
        if dst.len() != view.place.len() {
            let what = Measured::Tensor { name: view.info.name.clone() };
            return Err(Error::WrongSize { what, needed: view.place.len() as u64, given: dst.len() as u64 });
        }
        self.gather(device, view.buf, std::slice::from_ref(&view.place), dst)
    }

    /// Copies byte ranges of a buffer on `device` to `dst`, one after the other; together they are as long.
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
        if let Some(bytes) = buf.host(self.deadline)? {
            for range in ranges {
                let at = next(range);
                dst[at..at + range.len()].copy_from_slice(&bytes[range.clone()]);
            }
            return Ok(());
        }
        let staging = self.host.alloc_near(dst.len(), MemoryKind::Pinned, device.id())?;
        let piece = |range: &Range<usize>| Piece { src: buf.clone(), from: range.clone(), at: next(range) };
        let pieces = ranges.iter().map(piece).collect();
        let flight = self.stream(device)?.send(Transfer::new(pieces, staging)?)?;
        let landed = flight.landed(self.deadline)?.freeze();
        let bytes = landed.host(self.deadline)?;
        dst.copy_from_slice(bytes.ok_or_else(|| Error::bug("staging memory the host cannot address"))?);
        Ok(())
    }

    /// The stream that reads back from a device, made when it is first needed.
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
