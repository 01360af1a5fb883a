//! The guard that keeps a layer on the compute device.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Streamed;
use super::verdict::{Verdict, wait_for};
use crate::backend::{Buf, Event, Stream};
use crate::checkpoint::{Layer, LayerId, TensorId};
use crate::dtype::Element;
use crate::error::{Error, Missing, Result};
use crate::limits::LONGEST;
use crate::load::{Deferred, Model, TensorView};

/// The tensors of one layer, on the compute device.
///
/// They are available to work queued on the streamer's compute stream. Dropping the guard marks the end of the work
/// queued so far as their last use.
pub struct LayerGuard {
    pub(super) model: Arc<Model>,
    pub(super) compute: Arc<dyn Stream>,
    pub(super) streamed: Arc<Streamed>,
    pub(super) layer: LayerId,
    /// The slot's number and its parts. `None` if no tensor of the layer is streamed.
    pub(super) slot: Option<(usize, Vec<Buf>)>,
    /// The verdicts on its codes.
    pub(super) verdicts: Vec<Arc<Verdict>>,
}

impl LayerGuard {
    /// The layer.
    pub fn layer(&self) -> &Layer {
        self.model.layout().at(self.layer)
    }

    /// The layer's name: `model.layers.7`.
    pub fn name(&self) -> &str {
        &self.layer().name
    }

    /// The number, from 0, of the slot that holds the layer: one of the model's slots, or of the caller's. In a given slot
    /// each tensor of the layer always has the same address. `None` if no tensor of the layer is streamed.
    pub fn slot(&self) -> Option<usize> {
        self.slot.as_ref().map(|(number, _)| *number)
    }

    /// The layer's tensors, module after module. If the plan [unpacks](crate::Planner::unpack) them, those that files have in
    /// blocks are values here, and have the type of these.
    pub fn tensors(&self) -> impl Iterator<Item = TensorView<'_>> {
        let modules = self.layer().modules.iter().map(|&module| self.model.layout().at(module));
        modules.flat_map(|module| module.tensors.iter().filter_map(|&tensor| self.view(tensor)))
    }

    /// The layer's tensor `name`, by its full name (`model.layers.7.mlp.up_proj.weight`) or its name within the layer
    /// (`mlp.up_proj.weight`). `None` if the layer has no such tensor.
    pub fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        self.view(self.find(name)?)
    }

    /// The factors of the layer's weight `name`, and their scale, if its changes are [deferred](crate::Weights::defer): the layer
    /// computes `W x + s B (A x)`. Names are those of [`tensor`](LayerGuard::tensor). `None` if the layer has no such weight, or all
    /// of its changes are merged.
    ///
    /// For a weight of shape [out, in], A is [r, in] and B [out, r]. Like the weight, both are available to work queued on the
    /// compute stream, and are held by the guard.
    ///
    /// ```
    /// # use tensor_offload::prelude::*;
    /// # use tensor_offload::DType;
    /// # let machine = Machine::described(&["cuda:0=256kb,link=1".parse()?, "cpu=64mb".parse()?]);
    /// # let devices = Registry::described(machine, tensor_offload::backend::Clock::Virtual);
    /// let model = Model::open("examples/data/tiny-llama")?
    ///     .adapter("examples/data/tiny-llama-lora", 0.8)?
    ///     .defer("*", DType::BF16)
    ///     .allocation("cuda:0,25%;cpu,*")?
    ///     .depth(1)
    ///     .load(&devices)?;
    /// let mut stream = model.stream()?;
    /// for layer in stream.pass() {
    ///     let layer = layer?;
    ///     let weight = layer.tensor("mlp.down_proj.weight");
    ///     if let (Some(weight), Some(of)) = (weight, layer.deferred("mlp.down_proj.weight")) {
    ///         assert_eq!((of.b.shape()[0], of.a.shape()[1]), (weight.shape()[0], weight.shape()[1]));
    ///         // Queue `y = W x`, `z = A x` and `y += of.scale * B z` here.
    ///     }
    /// }
    /// # Ok::<(), Error>(())
    /// ```
    pub fn deferred(&self, name: &str) -> Option<Deferred<'_>> {
        self.model.deferred_of(self.find(name)?, |tensor| self.view(tensor))
    }

    fn find(&self, name: &str) -> Option<TensorId> {
        let (layout, index) = (self.model.layout(), self.model.index());
        let here = |tensor: &TensorId| layout.layer_with(*tensor) == self.layer;
        let in_layer = || index.find(&format!("{}.{name}", self.name())).filter(here);
        index.find(name).filter(here).or_else(in_layer)
    }

    /// Blocks the host until the layer has arrived. The deadline is capped at a century.
    ///
    /// # Errors
    /// [`Error::TimedOut`] after `deadline`; [`Error::Failed`] when a copy failed; [`Error::Corrupted`] when weights were damaged that
    /// arrived [compressed](crate::Planner::compress).
    pub fn wait(&self, deadline: Duration) -> Result<()> {
        let deadline = deadline.min(LONGEST);
        let until = Instant::now() + deadline;
        self.parts().try_for_each(|part| match part.wait(until.saturating_duration_since(Instant::now())) {
            Err(Error::TimedOut { what, .. }) => Err(Error::TimedOut { what, after: deadline }),
            other => other,
        })?;
        wait_for(&self.verdicts, self.name(), until.saturating_duration_since(Instant::now()))
    }

    /// The events of the layer's copies that are pending or failed.
    pub fn arriving(&self) -> impl Iterator<Item = &Event> {
        self.parts().flat_map(Buf::ready)
    }

    /// Completes once the layer has arrived. Runs on any executor, and is not polled while it waits.
    ///
    /// # Errors
    /// As [`wait`](LayerGuard::wait), without a deadline.
    pub async fn arrived(&self) -> Result<()> {
        for event in self.arriving() {
            event.completed().await?;
        }
        for event in self.verdicts.iter().flat_map(|verdict| verdict.pending()) {
            event.completed().await?;
        }
        wait_for(&self.verdicts, self.name(), Duration::ZERO)
    }

    /// Copies the tensor `name` back to host memory. `dst` must be as long as the tensor.
    ///
    /// # Errors
    /// [`Error::Missing`] when the layer has no such tensor; [`Error::WrongSize`] when `dst` has another length; any error
    /// of the copy.
    pub fn read(&self, name: &str, dst: &mut [u8]) -> Result<()> {
        self.model.download(&self.known(name)?, dst)?;
        wait_for(&self.verdicts, self.name(), self.model.limits().work)
    }

    /// The elements of the tensor `name`, copied back to host memory.
    ///
    /// # Errors
    /// [`Error::Missing`] when the layer has no such tensor; [`Error::Mismatch`] when its elements have another type than
    /// `T`; any error of the copy.
    pub fn to_vec<T: Element>(&self, name: &str) -> Result<Vec<T>> {
        let elements = self.model.elements(&self.known(name)?)?;
        wait_for(&self.verdicts, self.name(), self.model.limits().work)?;
        Ok(elements)
    }

    pub(super) fn known(&self, name: &str) -> Result<TensorView<'_>> {
        let missing = || Missing::Tensor { name: name.to_owned(), layer: Some(self.name().to_owned()) };
        Ok(self.tensor(name).ok_or_else(missing)?)
    }

    fn parts(&self) -> impl Iterator<Item = &Buf> {
        self.slot.iter().flat_map(|(_, parts)| parts)
    }

    /// A view of a tensor in the slot, or in its home if the tensor is not streamed.
    fn view(&self, tensor: TensorId) -> Option<TensorView<'_>> {
        let owner = self.model.index().owner(tensor);
        let range: Range<usize> = self.model.index().place(tensor);
        let deadline = self.model.limits().work;
        let fetched = self.streamed.contents.of(self.layer).find(owner, &range);
        if let (Some((_, parts)), Some((part, range))) = (&self.slot, fetched) {
            let info = self.streamed.unpacked.as_ref().unwrap_or(self.model.layout()).at(tensor);
            return Some(TensorView::new(info, &parts[part], range, deadline));
        }
        self.model.view(tensor)
    }
}

impl Drop for LayerGuard {
    fn drop(&mut self) {
        let resident = self.streamed.resident[self.layer].iter().flat_map(|&module| self.model.bufs(module));
        let mut uses: Vec<Buf> = resident.chain(self.parts()).cloned().collect();
        if let Err(error) = self.compute.record(&uses) {
            // It is unknown when the compute will be done with the slot, so the slot is never filled again. It is freed
            // with the model.
            tracing::error!(%error, layer = self.layer().name, "a slot is lost: its last use could not be marked");
            let slot = self.slot.take().map(|(_, parts)| parts).unwrap_or_default();
            uses.truncate(uses.len() - slot.len());
            self.model.residency().withdraw(Arc::clone(&self.compute), slot, uses);
        }
    }
}

impl fmt::Debug for LayerGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LayerGuard").field("layer", &self.layer().name).finish_non_exhaustive()
    }
}
