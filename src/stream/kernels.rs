//! The kernels that a streamer needs of its compute device.

use std::collections::HashSet;

use crate::backend::Stream;
use crate::checkpoint::TensorId;
use crate::error::{Missing, Result};
use crate::load::Model;

/// Checks that the compute device unpacks and decodes all that the plan has it unpack and decode.
///
/// # Errors
/// [`Missing::Unpacking`] and [`Missing::Decoding`], naming the first tensor of a type that it does not.
pub(super) fn check(model: &Model, compute: &dyn Stream) -> Result<()> {
    check_unpacking(model, compute)?;
    check_decoding(model, compute)
}

/// Checks that the compute device unpacks all types that the plan has it unpack.
fn check_unpacking(model: &Model, compute: &dyn Stream) -> Result<()> {
    let (layout, plan, device) = (model.layout(), model.plan(), model.residency().device());
    let Some(to) = plan.unpacked() else { return Ok(()) };
    let fetched = layout.module_ids().filter(|&module| plan.origin(module).is_some());
    let tensors = fetched.flat_map(|module| layout.own_tensors(module)).map(|tensor| layout.at(tensor));
    let mut known = HashSet::new();
    for tensor in tensors.filter(|tensor| tensor.dtype.is_ggml_block() && known.insert(tensor.dtype)) {
        let none = || Err(format!("{} has no kernels", device.id()));
        if let Err(why) = device.kernels().map_or_else(none, |kernels| kernels.dequantises(compute, tensor.dtype, to)) {
            return Err(Missing::Unpacking { tensor: tensor.name.clone(), why }.into());
        }
    }
    Ok(())
}

/// Checks that the compute device decodes all types that the plan keeps compressed.
fn check_decoding(model: &Model, compute: &dyn Stream) -> Result<()> {
    let (layout, compressed, device) = (model.layout(), model.index().compressed(), model.residency().device());
    let mut known = HashSet::new();
    // In a model without contents nothing is decoded.
    let is_code = |tensor: &TensorId| {
        let place = compressed.place(*tensor);
        place.is_some_and(|place| model.code_info(layout.owner(*tensor), place.range.start).is_some())
    };
    for tensor in layout.tensor_ids().filter(is_code).map(|tensor| layout.at(tensor)) {
        let none = || Err(format!("{} has no kernels", device.id()));
        let decodes = || device.kernels().map_or_else(none, |kernels| kernels.decompresses(compute, tensor.dtype));
        if known.insert(tensor.dtype)
            && let Err(why) = decodes()
        {
            return Err(Missing::Decoding { tensor: tensor.name.clone(), why }.into());
        }
    }
    Ok(())
}
