//! Where a layer's tensors are, as a key for what was made for these addresses.

use super::location;
use crate::device::DeviceId;
use crate::dtype::DType;
use crate::stream::LayerGuard;

/// The addresses of a layer's tensors at one of its turns, made by [`addresses`]: the key of CUDA graphs, and of anything else
/// that contains addresses.
///
/// Two keys are equal exactly when they are of layers with the same name, whose tensors have the same names, types, shapes
/// and device addresses. So work that was captured while a guard with one key lived finds the same tensors while a guard
/// with an equal key lives. The key of a layer changes when the layer comes in another slot, which it may unless the plan
/// has [fixed slots](crate::Planner::fixed_slots), and when a [derived](crate::Loader::derive) model has moved its resident
/// tensors. The number of the slot alone does not show the latter.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct LayerAddresses {
    layer: Box<str>,
    tensors: Box<[Place]>,
}

/// A tensor of the layer, and where it is; without bytes it is nowhere.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Place {
    name: Box<str>,
    dtype: DType,
    shape: Box<[u64]>,
    at: Option<(DeviceId, u64)>,
}

impl LayerAddresses {
    /// The layer's name: `model.layers.7`.
    pub fn layer(&self) -> &str {
        &self.layer
    }
}

/// The addresses of all tensors of a layer, as a key for the graph that was captured over them. `None` if a tensor of it is not
/// in a CUDA device's memory.
///
/// ```no_run
/// use std::collections::HashMap;
/// use tensor_offload::{LayerGuard, cuda};
/// # fn example<Graph>(guard: &LayerGuard, capture: impl Fn(&LayerGuard) -> Graph) {
/// let mut graphs: HashMap<cuda::LayerAddresses, Graph> = HashMap::new();
/// // In each turn of a layer:
/// let key = cuda::addresses(guard).expect("a CUDA device");
/// let graph = graphs.entry(key).or_insert_with(|| capture(guard));
/// // Launch the graph, then drop the guard.
/// # let _ = graph;
/// # }
/// ```
pub fn addresses(guard: &LayerGuard) -> Option<LayerAddresses> {
    let place = |tensor: crate::load::TensorView<'_>| {
        let (info, at) = (tensor.info(), location(&tensor));
        let known = at.is_some() || info.bytes == 0;
        known.then(|| Place {
            name: info.name.as_str().into(),
            dtype: info.dtype,
            shape: info.shape.as_slice().into(),
            at,
        })
    };
    let tensors = guard.tensors().map(place).collect::<Option<_>>()?;
    Some(LayerAddresses { layer: guard.name().into(), tensors })
}
