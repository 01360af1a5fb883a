//! A layer that is on the compute device for as long as its guard lives.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use super::Wanted;
use crate::backend::{Buf, Stream};
use crate::checkpoint::Layer;
use crate::error::{Error, Result};
use crate::load::{Model, TensorView};

/// The tensors of one layer, on the compute device.
///
/// They are there for work queued on the streamer's compute stream. Dropping the guard marks the end of what was
/// queued so far as their last use.
pub struct LayerGuard {
    model: Arc<Model>,
    compute: Arc<dyn Stream>,
    layer: usize,
    slot: Option<Buf>,
    wanted: Arc<Vec<Vec<Wanted>>>,
}

impl LayerGuard {
    pub(super) fn new(
        model: &Arc<Model>,
        compute: &Arc<dyn Stream>,
        layer: usize,
        slot: Option<Buf>,
        wanted: &Arc<Vec<Vec<Wanted>>>,
    ) -> LayerGuard {
        let (model, compute, wanted) = (Arc::clone(model), Arc::clone(compute), Arc::clone(wanted));
        LayerGuard { model, compute, layer, slot, wanted }
    }

    /// The layer.
    pub fn layer(&self) -> &Layer {
        &self.model.layout().layers[self.layer]
    }

    /// Its tensors, module after module.
    pub fn tensors(&self) -> impl Iterator<Item = TensorView<'_>> {
        let modules = self.layer().modules.iter().map(|&m| &self.model.layout().modules[m]);
        modules.flat_map(|module| module.tensors.iter().filter_map(|&tensor| self.view(tensor)))
    }

    /// Its tensor `name`; none when the layer has no such tensor.
    pub fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        let tensor = self.model.find(name)?;
        let layout = self.model.layout();
        (layout.modules[layout.module_of[tensor]].layer == self.layer).then(|| self.view(tensor)).flatten()
    }

    /// Waits, on the host, until the layer has arrived.
    ///
    /// # Errors
    /// [`Error::TimedOut`] after `deadline`; [`Error::Failed`] when a copy failed.
    pub fn wait(&self, deadline: Duration) -> Result<()> {
        self.slot.as_ref().map_or(Ok(()), |slot| slot.wait(deadline))
    }

    /// Copies the tensor `name` back to host memory. `dst` has to be as long as the tensor.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the layer has no such tensor or `dst` is of another length; whatever the copy meets.
    pub fn read(&self, name: &str, dst: &mut [u8]) -> Result<()> {
        let missing = || Error::invalid(format!("layer {} has no tensor `{name}`", self.layer().name));
        self.model.download(&self.tensor(name).ok_or_else(missing)?, dst)
    }

    /// A tensor in the slot, or where it is resident.
    fn view(&self, tensor: usize) -> Option<TensorView<'_>> {
        let owner = self.model.owner(tensor);
        let info = &self.model.layout().tensors[tensor];
        let place = self.model.place(tensor);
        let brought = self.wanted[self.layer].iter().find(|wanted| wanted.module == owner);
        if let (Some(slot), Some(wanted)) = (&self.slot, brought) {
            let place: Range<usize> = wanted.at + place.start..wanted.at + place.end;
            return Some(TensorView::new(info, slot, place));
        }
        self.model.home(owner).map(|home| TensorView::new(info, home, place))
    }
}

impl Drop for LayerGuard {
    fn drop(&mut self) {
        let layout = self.model.layout();
        let resident = layout.needs_of(self.layer()).into_iter().filter_map(|module| self.model.home(module));
        let on_device = resident.filter(|home| home.device() == self.compute.device()).cloned();
        let uses: Vec<Buf> = on_device.chain(self.slot.clone()).collect();
        if let Err(error) = self.compute.record(&uses) {
            // Nobody can say when the compute will be done with the slot, so it is never filled again; it goes
            // with the model.
            tracing::error!(%error, layer = self.layer().name, "a slot is lost: its last use could not be marked");
            self.model.residency().withdraw(self.slot.take());
        }
    }
}

impl fmt::Debug for LayerGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LayerGuard").field("layer", &self.layer().name).finish_non_exhaustive()
    }
}
