//! Tensors that are stored in another element type than the checkpoint's.
//!
//! A cast is a patch: the values are lifted to f32, changed by the adapters' steps if there are any, and rounded once. What is
//! here decides which tensors that may be done to: not to codes, nor to what says what codes stand for.

use std::collections::{BTreeMap, BTreeSet};

use super::patches::Patches;
use crate::checkpoint::{Checkpoint, Coded, Layout, Pattern, Siblings, TensorId, TensorInfo};
use crate::dtype::DType;
use crate::encoding::Encoding;
use crate::error::{CastFault, Error, Missing, Result};
use crate::float::Float;
use crate::patch::{Scaling, TensorPatch};

/// The tensors to cast.
pub(super) enum Which {
    /// All that hold floating-point numbers.
    Floats,
    /// Those that a pattern names. What holds no floating-point numbers stays if the pattern names anything that does.
    Named(String),
}

impl Patches {
    /// Casts tensors of the checkpoint that these patches are for.
    ///
    /// # Errors
    /// As [`Weights::cast`](super::Weights::cast).
    pub(super) fn cast(self, checkpoint: &Checkpoint, which: Which, to: DType) -> Result<Patches> {
        let chosen = chosen(checkpoint.layout(), which)?;
        let Some(float) = Float::of(to) else {
            let tensor = chosen.first().map(|&tensor| checkpoint.layout().at(tensor).name.clone());
            return tensor.map_or(Ok(self), |tensor| Err(uncastable(tensor, to, CastFault::Target)));
        };
        let casts = Casting { checkpoint, patches: &self, to: float }.tensors(&chosen)?;
        self.with_casts(checkpoint.layout(), &casts, float)
    }
}

/// The tensors that are named and hold floating-point numbers.
fn chosen(layout: &Layout, which: Which) -> Result<Vec<TensorId>> {
    let of_floats = |tensor: &TensorId| is_float(layout.at(*tensor).dtype);
    match which {
        Which::Floats => Ok(layout.tensor_ids().filter(of_floats).collect()),
        Which::Named(pattern) => {
            let named = Pattern::new(pattern.clone(), layout).tensors(layout);
            // A pattern that names nothing of floats is a mistake; the tensor that is refused below says so.
            let floats: Vec<TensorId> = named.iter().copied().filter(of_floats).collect();
            match named.is_empty() {
                true => Err(Missing::Named { pattern }.into()),
                false => Ok(if floats.is_empty() { named } else { floats }),
            }
        }
    }
}

/// Whether the elements of a type are floating-point numbers, each a value of its own or in blocks that say what all their
/// values are. Those of the others are integers, codes whose scales are elsewhere, or exponents that scale these.
fn is_float(dtype: DType) -> bool {
    let other = matches!(dtype, DType::F64 | DType::F8E4M3Fnuz | DType::F8E5M2Fnuz);
    other || Encoding::of(dtype).is_some()
}

fn uncastable(tensor: String, to: DType, fault: CastFault) -> Error {
    Error::Uncastable { tensor, to, fault: Box::new(fault) }
}

/// One cast, before anything is changed.
struct Casting<'a> {
    checkpoint: &'a Checkpoint,
    patches: &'a Patches,
    to: Float,
}

impl Casting<'_> {
    /// The tensors whose type changes: those chosen that have another type so far, and all that share bytes with them, since one
    /// type holds for all of these.
    fn tensors(&self, chosen: &[TensorId]) -> Result<Vec<TensorId>> {
        let (now, stored) = (self.patches.layout(), self.checkpoint.layout());
        let mut sharing: BTreeMap<TensorId, Vec<TensorId>> = BTreeMap::new();
        for tensor in now.tensor_ids() {
            sharing.entry(now.storage(tensor)).or_default().push(tensor);
        }
        let owners: BTreeSet<TensorId> = chosen.iter().map(|&tensor| now.storage(tensor)).collect();
        let other = |owner: &TensorId| now.at(*owner).dtype != self.to.dtype();
        let casts: Vec<TensorId> =
            owners.iter().filter(|owner| other(owner)).flat_map(|o| &sharing[o]).copied().collect();
        let mut codes = None;
        for &tensor in &casts {
            let info = stored.at(tensor);
            let fault = |fault| uncastable(info.name.clone(), self.to.dtype(), fault);
            if Encoding::of(info.dtype).is_none() {
                return Err(fault(CastFault::Source { dtype: info.dtype }));
            }
            let owner = stored.at(now.storage(tensor));
            if owner.dtype != info.dtype {
                let (other, dtype) = (owner.name.clone(), owner.dtype);
                return Err(fault(CastFault::SharedBytes { other, dtype }));
            }
            // One that comes back to the checkpoint's type was no code when it was cast.
            if info.dtype != self.to.dtype() {
                codes.get_or_insert_with(|| Codes::of(self.checkpoint)).check(tensor).map_err(fault)?;
            }
        }
        Ok(casts)
    }
}

/// The tensors of a checkpoint that are codes, or say what codes stand for.
struct Codes<'a> {
    siblings: Siblings<'a>,
    faults: BTreeMap<TensorId, CastFault>,
}

impl<'a> Codes<'a> {
    fn of(checkpoint: &'a Checkpoint) -> Codes<'a> {
        let (layout, siblings) = (checkpoint.layout(), Siblings::of_checkpoint(checkpoint));
        let mut codes = Codes { siblings, faults: BTreeMap::new() };
        for Coded { weight, packed, beside } in Coded::all(layout, &codes.siblings) {
            codes.add(weight, layout.at(weight), beside);
            codes.faults.insert(weight, CastFault::Packed { packing: packed.packing, sign: packed.sign });
        }
        for (weight, info) in layout.tensor_ids().zip(layout.tensors()) {
            let scaled = match Scaling::of(info, &codes.siblings) {
                Ok(None) => continue,
                Ok(Some(scaling)) => CastFault::Scaled { scale: layout.at(scaling.tensor()).name.clone() },
                Err(fault) => CastFault::Codes(fault),
            };
            let beside = Coded::beside(info, None, &codes.siblings);
            codes.add(weight, info, beside);
            codes.faults.entry(weight).or_insert(scaled);
        }
        codes
    }

    fn add(&mut self, weight: TensorId, info: &TensorInfo, beside: Vec<TensorId>) {
        for tensor in beside.into_iter().filter(|&tensor| tensor != weight) {
            self.faults.entry(tensor).or_insert_with(|| CastFault::OfCodes { weight: info.name.clone() });
        }
    }

    fn check(&self, tensor: TensorId) -> Result<(), CastFault> {
        self.faults.get(&tensor).map_or(Ok(()), |fault| Err(fault.clone()))
    }
}

impl Patches {
    /// These patches with some tensors stored as `to`. Tensors of the same bytes are among them together.
    fn with_casts(mut self, stored: &Layout, casts: &[TensorId], to: Float) -> Result<Patches> {
        for &tensor in casts {
            let info = stored.at(tensor);
            match self.patch_mut(tensor) {
                Some(patch) => patch.set_type(to),
                None => {
                    // What shares bytes is rounded as its owner is.
                    let owner = stored.at(self.layout().storage(tensor));
                    let patch = TensorPatch::of_cast(owner, to);
                    let unpatchable =
                        |_| uncastable(info.name.clone(), to.dtype(), CastFault::Source { dtype: info.dtype });
                    self.add_cast(tensor, patch.map_err(unpatchable)?);
                }
            }
        }
        let types: Vec<(TensorId, DType)> = casts.iter().map(|&tensor| (tensor, to.dtype())).collect();
        self.recast(&types)
    }
}
