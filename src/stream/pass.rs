//! One pass through the network, layer by layer.

use std::iter::FusedIterator;
use std::ops::Range;
use std::sync::Arc;

use super::{LayerGuard, Streamer};
use crate::checkpoint::LayerId;
use crate::error::{Missing, Result};
use crate::load::Model;

impl Model {
    /// Creates a [`Streamer`] with its own compute stream, as [`Streamer::new`] does.
    ///
    /// ```
    /// use tensor_offload::{DeviceId, Model, Registry};
    /// let model = Model::open("examples/data/tiny-llama")?.compute(DeviceId::CPU).load(&Registry::system())?;
    /// for layer in model.stream()?.pass() {
    ///     println!("{}", layer?.name());
    /// }
    /// # Ok::<(), tensor_offload::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Streamer::new`].
    pub fn stream(self: &Arc<Self>) -> Result<Streamer> {
        Streamer::new(self)
    }
}

impl Streamer {
    /// A forward pass: every layer in order of execution, each fetched to the compute device by [`layer`](Streamer::layer).
    /// Drop a layer's guard before asking for the next one, as a `for` loop does, or plan with a greater depth.
    ///
    /// The pass ends after the first error. Where weights are kept [compressed](crate::Planner::compress), ask
    /// [`verify`](Streamer::verify) behind it.
    pub fn pass(&mut self) -> Pass<'_> {
        Pass { left: 0..self.model().layout().layers().len(), streamer: self }
    }

    /// Hands out the layer of this name (`model.layers.7`), on the compute device.
    ///
    /// # Errors
    /// [`Error::Missing`](crate::Error::Missing) when there is no such layer; as [`layer`](Streamer::layer).
    pub fn layer_named(&mut self, name: &str) -> Result<LayerGuard> {
        let missing = || Missing::Layer { name: name.to_owned() };
        let layer = self.model().layout().find_layer(name).ok_or_else(missing)?;
        self.layer(layer)
    }
}

/// An iterator over the layers of a model; see [`Streamer::pass`].
#[derive(Debug)]
#[must_use = "a pass fetches no layer until it is iterated"]
pub struct Pass<'s> {
    /// The layers still to come.
    left: Range<usize>,
    streamer: &'s mut Streamer,
}

impl Iterator for Pass<'_> {
    type Item = Result<LayerGuard>;

    fn next(&mut self) -> Option<Result<LayerGuard>> {
        let layer = self.streamer.layer(LayerId::new(self.left.next()?));
        if layer.is_err() {
            self.left = 0..0;
        }
        Some(layer)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.left.size_hint()
    }
}

impl ExactSizeIterator for Pass<'_> {}
impl FusedIterator for Pass<'_> {}
