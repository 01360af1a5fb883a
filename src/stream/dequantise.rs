//! The values of a layer's quantised tensors, on the compute device.

use super::LayerGuard;
use crate::backend::{BufMut, Dequantise, Flight, Kernels, MemoryKind, Piece, Rejected, Transfer};
use crate::dtype::DType;
use crate::error::{Error, Mismatch, Result};
use crate::float::Float;
use crate::load::TensorView;
use crate::patch::TensorPatch;

impl LayerGuard {
    /// Queues, on the compute stream, the computation of the values of the tensor `name`, which is in blocks of a type of GGML.
    /// They are rounded to `dtype` (F32, F16 or BF16) and written to the beginning of `dst`, memory on the compute device, in
    /// the tensor's order. The bits are those of [`patch::dequantise`](crate::patch::dequantise), rounded once to nearest.
    ///
    /// So a quantised layer crosses the link and stays in its slot as it is, and one buffer for the values serves all layers: work
    /// that is queued on the compute stream from here on finds them there, and the next values can be queued into it after
    /// that ([`Flight::chain`]). The memory of `dst` is not part of the plan; leave room for it in the plan's
    /// [reserve](crate::Planner::reserve). Register your own work that uses it with
    /// [`record`](crate::backend::Stream::record) before you drop it.
    ///
    /// The first call loads the kernels, which takes the driver a moment. CUDA devices have kernels for all block types. On
    /// devices without kernels, and where a driver refuses them, the host reads the blocks back, computes the values and sends
    /// them; it then waits for the layer and for the copies, which takes far longer.
    ///
    /// ```no_run
    /// # use std::sync::Arc;
    /// # use tensor_offload::backend::MemoryKind;
    /// # use tensor_offload::prelude::*;
    /// # use tensor_offload::DType;
    /// # fn main() -> Result<()> {
    /// let model = Model::open("model-Q4_K_M.gguf")?.allocation("cuda:0,50%;cpu,*")?.load(&Registry::system())?;
    /// let mut values = model.residency().device().alloc(64 << 20, MemoryKind::Whole)?;
    /// let mut stream = model.stream()?;
    /// for layer in stream.pass() {
    ///     let layer = layer?;
    ///     values = layer.dequantise("attn_q.weight", DType::BF16, values)?.chain();
    ///     // Queue the product that reads `values` here.
    /// }
    /// stream.compute().record(&[values.freeze()])?; // keeps it until the products are done
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Rejected`], which returns `dst`: with [`Error::Missing`] when the layer has no such tensor; with [`Error::Mismatch`] when it
    /// is not in blocks, or `dst` is on another device; with [`Error::Invalid`] for another `dtype`, or when `dst` is not
    /// aligned to its elements; with
    /// [`Error::WrongSize`] when the values do not fit into `dst`; when the stream accepts no more work; any error of the
    /// copies.
    pub fn dequantise(&self, name: &str, dtype: DType, dst: BufMut) -> Result<Flight, Box<Rejected>> {
        let view = match self.known(name) {
            Ok(view) => view,
            Err(error) => return Err(Box::new(Rejected { error, dst })),
        };
        let device = self.compute.device();
        if dst.device() != device {
            let (what, memory) = (format!("the memory for the values of `{}`", view.name()), dst.device());
            return Err(Box::new(Rejected { error: Mismatch::Memory { what, memory, device }.into(), dst }));
        }
        let count = view.shape().iter().product::<u64>();
        let blocks = (view.buf().clone(), view.byte_range().start, view.dtype());
        // More values than there are addresses do not fit into any memory.
        let work = Dequantise::new(blocks, usize::try_from(count).unwrap_or(usize::MAX), (dst, 0, dtype))?;
        match self.kernels_for(view.dtype(), dtype) {
            Some(kernels) => kernels.send(&*self.compute, work),
            None => self.dequantise_on_host(&view, work),
        }
    }

    /// The device's kernels, if they compute these values.
    fn kernels_for(&self, from: DType, to: DType) -> Option<&dyn Kernels> {
        let kernels = self.model.residency().device().kernels()?;
        match kernels.dequantises(&*self.compute, from, to) {
            Ok(()) => Some(kernels),
            Err(why) => {
                tracing::debug!(why, "the host dequantises in the place of the device");
                None
            }
        }
    }

    fn dequantise_on_host(&self, view: &TensorView<'_>, work: Dequantise) -> Result<Flight, Box<Rejected>> {
        let bytes = work.bytes();
        // A stream that accepts no work says so before anything is read.
        if let Err(error) = self.compute.record(&[]) {
            return Err(work.rejected(error));
        }
        let staged = match self.values_on_host(view, &work) {
            Ok(staged) => staged.freeze(),
            Err(error) => return Err(work.rejected(error)),
        };
        let piece = Piece { src: staged, from: 0..bytes, at: 0 };
        self.compute.send(Transfer::new(vec![piece], work.into_dst())?)
    }

    /// The values in memory that the compute stream copies from.
    fn values_on_host(&self, view: &TensorView<'_>, work: &Dequantise) -> Result<BufMut> {
        let (_, to) = work.types();
        let float = Float::of(to).ok_or_else(|| Error::bug(format!("{to} is a type of values")))?;
        let patch = TensorPatch::of_cast(view.info(), float)
            .map_err(|fault| Error::Unpatchable { tensor: view.name().to_owned(), fault: Box::new(fault) })?;
        let mut blocks = vec![0; view.size()];
        self.model.download(view, &mut blocks)?;
        let mut staged = self.model.host().alloc_near(work.bytes(), MemoryKind::Pinned, self.compute.device())?;
        let room = staged.host_mut().ok_or_else(|| Error::bug("memory that was just made is in use"))?;
        patch.apply_from(&blocks, &[], room)?;
        Ok(staged)
    }
}
