//! The factors of weights whose changes are not merged.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use super::model::Model;
use super::read_back::TensorView;
use super::worker::Job;
use crate::adapter::Weights;
use crate::backend::{BufMut, Stream};
use crate::checkpoint::TensorId;
use crate::error::Result;

/// The changes of a weight W that are not merged into it: with them its output is `W x + scale B (A x)`.
/// [`Weights::defer`](crate::Weights::defer) says what that means for weights of other shapes.
///
/// Both factors have the element type that they were deferred with, row by row. Nothing is aligned to more than an element but
/// A, which begins at a multiple of 64 bytes.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Deferred<'a> {
    /// A: [r, in] for a weight of [out, in].
    pub a: TensorView<'a>,
    /// B: [out, r].
    pub b: TensorView<'a>,
    /// The scale s: a strength times alpha / rank. It may be negative.
    pub scale: f32,
}

/// The scales of a model's deferred changes, by their weights.
pub(super) type Scales = Arc<BTreeMap<TensorId, f32>>;

/// The scales of the deferred changes among weights.
pub(super) fn scales_of(weights: &Weights) -> Scales {
    let patches = weights.patches();
    let factors = weights.layout().factors().iter();
    Arc::new(factors.filter_map(|of| Some((of.weight, patches.deferral(of.weight)?.scale()))).collect())
}

impl Model {
    /// The factors of the weight `name` (`model.layers.7.mlp.up_proj.weight`), where they live, and their scale. `None` if its changes
    /// are not [deferred](crate::Weights::defer), or the model is [not filled](Model::unfilled).
    ///
    /// ```
    /// # use tensor_offload::{DType, DeviceId, Model, Registry};
    /// let model = Model::open("examples/data/tiny-llama")?.adapter("examples/data/tiny-llama-lora", 0.5)?;
    /// let model = model.defer("*", DType::F32).compute(DeviceId::CPU).load(&Registry::system())?;
    /// let of = model.deferred("model.layers.0.mlp.down_proj.weight").expect("the adapter changes it");
    /// let (a, b): (&[f32], &[f32]) = (of.a.as_slice()?, of.b.as_slice()?);
    /// let x = vec![1.0; of.a.shape()[1] as usize];
    /// let dot = |row: &[f32], x: &[f32]| row.iter().zip(x).map(|(w, x)| w * x).sum::<f32>();
    /// let ax: Vec<f32> = a.chunks(x.len()).map(|row| dot(row, &x)).collect();
    /// let change: Vec<f32> = b.chunks(ax.len()).map(|row| of.scale * dot(row, &ax)).collect(); // to add to W x
    /// # assert_eq!(change.len() as u64, of.b.shape()[0]);
    /// # Ok::<(), tensor_offload::Error>(())
    /// ```
    pub fn deferred(&self, name: &str) -> Option<Deferred<'_>> {
        self.deferred_of(self.index().find(name)?, |tensor| self.view(tensor))
    }

    /// The factors of a weight, as `view` sees them.
    pub(crate) fn deferred_of<'a>(
        &self,
        weight: TensorId,
        view: impl Fn(TensorId) -> Option<TensorView<'a>>,
    ) -> Option<Deferred<'a>> {
        let (factors, scale) = (self.layout().factors_of(weight)?, *self.scales().get(&weight)?);
        Some(Deferred { a: view(factors.a)?, b: view(factors.b)?, scale })
    }
}

impl Job<'_> {
    /// Sends a factor of a deferred change in pieces through the pool.
    pub(super) fn send_factor(
        &self,
        tensor: TensorId,
        range: Range<usize>,
        memory: BufMut,
        stream: &dyn Stream,
    ) -> Result<BufMut> {
        let mut factor = vec![0; range.len()];
        self.make_factor(tensor, &mut factor)?;
        self.send_parts(range, 0, memory, stream, |at, len, buffer| {
            self.check_cancelled()?;
            buffer[..len].copy_from_slice(&factor[at..][..len]);
            Ok(0..len)
        })
    }

    /// Makes a factor of a deferred change from the adapters' factors.
    pub(super) fn make_factor(&self, tensor: TensorId, dst: &mut [u8]) -> Result<()> {
        self.check_cancelled()?;
        self.files(tensor)?.read(tensor, dst)?;
        self.advance(dst.len() as u64);
        Ok(())
    }
}
