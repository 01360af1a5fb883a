//! A layer that is on the compute device for as long as its guard lives.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Streamed;
use crate::backend::{Buf, Event, Stream};
use crate::checkpoint::{Layer, LayerId, TensorId};
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

    /// Its tensor `name`; none when the layer has no such tensor.
    pub fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        let tensor = self.model.index().find(name)?;
        let layout = self.model.layout();
        (layout.layer_with(tensor) == self.layer).then(|| self.view(tensor)).flatten()
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
            event.fired().await?;
        }
        Ok(())
    }

    /// Copies the tensor `name` back to host memory. `dst` has to be as long as the tensor.
    ///
    /// # Errors
    /// [`Error::Missing`] when the layer has no such tensor; [`Error::WrongSize`] when `dst` is of another length; whatever
    /// the copy meets.
    pub fn read(&self, name: &str, dst: &mut [u8]) -> Result<()> {
        let missing = || Missing::Tensor { name: name.to_owned(), layer: Some(self.layer().name.clone()) };
        self.model.download(&self.tensor(name).ok_or_else(missing)?, dst)
    }

    fn parts(&self) -> impl Iterator<Item = &Buf> {
        self.slot.iter().flat_map(|(_, parts)| parts)
    }

    /// A tensor in the slot, or where it is resident.
    fn view(&self, tensor: TensorId) -> Option<TensorView<'_>> {
        let owner = self.model.index().owner(tensor);
        let info = self.model.layout().at(tensor);
        let place: Range<usize> = self.model.index().place(tensor);
        let brought = self.streamed.contents.of(self.layer).find(owner, &place);
        if let (Some((_, parts)), Some((part, place))) = (&self.slot, brought) {
            return Some(TensorView::new(info, &parts[part], place));
        }
        self.model.home(owner).map(|home| TensorView::new(info, home, place))
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
