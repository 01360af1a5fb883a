//! Landing buffers: memory on a device in which GGML's blocks arrive, and from where their values are computed to where they are
//! used.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::backend::{Buf, BufMut, Dequantise, Device, Kernels, Rejected, Stream};
use crate::dtype::DType;
use crate::error::{Error, Result};

/// A landing buffer, which one lane at a time fills.
#[derive(Debug)]
pub(crate) struct Landing(Mutex<Option<BufMut>>);

/// Values of blocks: `count` of them, of blocks of type `from` that begin at a byte of a source, go to the byte `at` of a
/// destination as elements of type `to`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Values {
    pub(crate) begin: usize,
    pub(crate) from: DType,
    pub(crate) count: usize,
    pub(crate) at: usize,
    pub(crate) to: DType,
}

impl Landing {
    pub(crate) fn new(memory: BufMut) -> Landing {
        Landing(Mutex::new(Some(memory)))
    }

    /// Has `fill` queue copies of blocks into the buffer, and queues the computation of their values into `dst` on `stream`, a
    /// stream of `device`. Returns `dst`.
    ///
    /// # Errors
    /// The first error, with `dst`. Work on both may be in flight then.
    pub(crate) fn unpack(
        &self,
        (device, stream): (&dyn Device, &dyn Stream),
        values: &[Values],
        dst: BufMut,
        fill: impl FnOnce(BufMut) -> Result<BufMut, (Error, Option<BufMut>)>,
    ) -> Result<BufMut, Box<Rejected>> {
        let mut here = self.lock();
        let Some(memory) = here.take() else {
            let error = Error::bug("a landing buffer that an earlier copy did not return");
            return Err(Box::new(Rejected { error, dst }));
        };
        let filled = match fill(memory) {
            Ok(filled) => filled.freeze(),
            Err((error, memory)) => {
                *here = memory;
                return Err(Box::new(Rejected { error, dst }));
            }
        };
        let outcome = dequantise(device, stream, values, dst, |values| Some((filled.clone(), values.begin)));
        // Failed copies into it have failed the values, too, and nothing that follows.
        *here = filled.try_reclaim().ok();
        outcome
    }

    /// The buffer. `None` if it is lost.
    pub(crate) fn into_memory(self) -> Option<BufMut> {
        self.0.into_inner().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock(&self) -> MutexGuard<'_, Option<BufMut>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Queues the computation of values into `dst` on `stream`, a stream of `device`. `source` returns the buffer of the blocks, and
/// the byte of it at which they begin. Returns `dst`.
///
/// # Errors
/// The first error, with `dst`. Work on it may be in flight then.
pub(crate) fn dequantise(
    device: &dyn Device,
    stream: &dyn Stream,
    values: &[Values],
    dst: BufMut,
    source: impl Fn(&Values) -> Option<(Buf, usize)>,
) -> Result<BufMut, Box<Rejected>> {
    let Some(kernels) = device.kernels() else {
        let error = Error::bug(format!("{} has no kernels", device.id()));
        return Err(Box::new(Rejected { error, dst }));
    };
    values.iter().try_fold(dst, |dst, values| {
        let Some((src, begin)) = source(values) else {
            return Err(Box::new(Rejected { error: Error::bug("blocks that live nowhere"), dst }));
        };
        let work = Dequantise::new((src, begin, values.from), values.count, (dst, values.at, values.to))?;
        Ok(<dyn Kernels>::send(kernels, stream, work)?.chain())
    })
}
