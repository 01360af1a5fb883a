//! A layer that is on the compute device for as long as its guard lives.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Streamed;
use crate::backend::{Buf, Event, Stream};
use crate::checkpoint::{Layer, LayerId, TensorId};
use crate::dtype::Element;
use crate::error::{Error, Missing, Result};
use crate::limits::LONGEST;
use crate::load::{Model, TensorView};

/// The tensors of one layer, on the compute device.
///
/// They are there for work queued on the streamer's compute stream. Dropping the guard marks the end of what was
/// queued so far as their last use.
pub struct LayerGuard {
    pub(super) model: Arc<Model>,
    pub(super) compute: Arc<dyn Stream>,
    pub(super) streamed: Arc<Streamed>,
    pub(super) layer: LayerId,
    /// The number of its slot, and the parts of it.
    pub(super) slot: Option<(usize, Vec<Buf>)>,
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

    /// The number of the slot that it is in, from 0: of those of the model, or of the caller's own. In each slot a tensor
    /// of the layer has one address. None when nothing of it is streamed.
    pub fn slot(&self) -> Option<usize> {
        self.slot.as_ref().map(|(number, _)| *number)
    }

    /// Its tensors, module after module.
    pub fn tensors(&self) -> impl Iterator<Item = TensorView<'_>> {
        let modules = self.layer().modules.iter().map(|&module| self.model.layout().at(module));
        modules.flat_map(|module| module.tensors.iter().filter_map(|&tensor| self.view(tensor)))
    }

    /// Its tensor `name`, by the whole name (`model.layers.7.mlp.up_proj.weight`) or the name in the layer
    /// (`mlp.up_proj.weight`). `None` if the layer has no such tensor.
    pub fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        let (layout, index) = (self.model.layout(), self.model.index());
        let here = |tensor: &TensorId| layout.layer_with(*tensor) == self.layer;
        let in_layer = || index.find(&format!("{}.{name}", self.name())).filter(here);
        index.find(name).filter(here).or_else(in_layer).and_then(|tensor| self.view(tensor))
    }

    /// Waits, on the host, until the layer has arrived, for a century at most.
    ///
    /// # Errors
    /// [`Error::TimedOut`] after `deadline`; [`Error::Failed`] when a copy failed.
    pub fn wait(&self, deadline: Duration) -> Result<()> {
        let deadline = deadline.min(LONGEST);
        let until = Instant::now() + deadline;
        self.parts().try_for_each(|part| match part.wait(until.saturating_duration_since(Instant::now())) {
            Err(Error::TimedOut { what, .. }) => Err(Error::TimedOut { what, after: deadline }),
            other => other,
        })
    }

    /// The events of its arrival that have not fired, or failed.
    pub fn arriving(&self) -> impl Iterator<Item = &Event> {
        self.parts().flat_map(Buf::ready)
    }

    /// Is ready once the layer has arrived, on whatever executor; nothing is polled meanwhile.
    ///
    /// # Errors
    /// [`Error::Failed`] when a copy failed.
    pub async fn arrived(&self) -> Result<()> {
        for event in self.arriving() {
            event.completed().await?;
        }
        Ok(())
    }

    /// Copies the tensor `name` back to host memory. `dst` has to be as long as the tensor.
    ///
    /// # Errors
    /// [`Error::Missing`] when the layer has no such tensor; [`Error::WrongSize`] when `dst` is of another length; whatever
    /// the copy meets.
    pub fn read(&self, name: &str, dst: &mut [u8]) -> Result<()> {
        self.model.download(&self.known(name)?, dst)
    }

    /// The elements of the tensor `name`, copied back to host memory.
    ///
    /// # Errors
    /// [`Error::Missing`] when the layer has no such tensor; [`Error::Mismatch`] when its elements are of another type than
    /// `T`; whatever the copy meets.
    pub fn to_vec<T: Element>(&self, name: &str) -> Result<Vec<T>> {
        self.model.elements(&self.known(name)?)
    }

    fn known(&self, name: &str) -> Result<TensorView<'_>> {
        let missing = || Missing::Tensor { name: name.to_owned(), layer: Some(self.name().to_owned()) };
        Ok(self.tensor(name).ok_or_else(missing)?)
    }

    fn parts(&self) -> impl Iterator<Item = &Buf> {
        self.slot.iter().flat_map(|(_, parts)| parts)
    }

    /// A tensor in the slot, or where it is resident.
    fn view(&self, tensor: TensorId) -> Option<TensorView<'_>> {
        let owner = self.model.index().owner(tensor);
        let info = self.model.layout().at(tensor);
        let place: Range<usize> = self.model.index().place(tensor);
        let deadline = self.model.limits().work;
        let brought = self.streamed.contents.of(self.layer).find(owner, &place);
        if let (Some((_, parts)), Some((part, place))) = (&self.slot, brought) {
            return Some(TensorView::new(info, &parts[part], place, deadline));
        }
        self.model.home(owner).map(|home| TensorView::new(info, home, place, deadline))
    }
}

impl Drop for LayerGuard {
    fn drop(&mut self) {
        let resident = self.streamed.resident[self.layer].iter().filter_map(|&module| self.model.home(module));
        let mut uses: Vec<Buf> = resident.chain(self.parts()).cloned().collect();
        if let Err(error) = self.compute.record(&uses) {
            // Nobody can say when the compute will be done with the slot, so it is never filled again; it goes
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
