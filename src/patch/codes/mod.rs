//! Weights that are packed into codes of four bits: their values, and codes of changed values.
//!
//! The scales of the codes are recomputed for the changed values, so a packed weight changes along with the tensors beside it.
//! As for recomputed fp8 scales, each of these has a patch of its own that is given the checkpoint's bytes of all of them, so
//! that the loader may take tensors in any order. A block whose values do not change keeps its codes.

mod bnb;
mod nvfp4;

use std::sync::Arc;

use bnb::BitsAndBytes;
use nvfp4::Nvfp4;

use super::vector::Tier;
use super::whole::F32Weight;
use super::{Changes, PatchOutcome, Requantised, ScalePolicy, TensorPatch};
use crate::checkpoint::{Packed, Siblings, TensorId, TensorInfo};
use crate::dtype::DType;
use crate::encoding::Encoding;
use crate::error::{AdapterFault, Error, Measured, Packing, PackingFault, Result};
use crate::float::Float;
use crate::rounding::Rounding;

/// A packed weight whose values can be computed and packed again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Codes {
    packing: Packing,
    form: Form,
    /// The shape of its values.
    shape: Vec<u64>,
    /// The tensors that it is made of, that of the codes first.
    parts: Vec<Part>,
}

/// How codes become values.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Form {
    BitsAndBytes(BitsAndBytes),
    Nvfp4(Nvfp4),
    /// It is not known, and need not be: the codes stay, and the changes come beside them.
    Unread,
}

/// One of the tensors that a packed weight is made of.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Part {
    tensor: TensorId,
    name: String,
    dtype: DType,
    shape: Vec<u64>,
    bytes: usize,
    /// Whether it changes with the values.
    is_written: bool,
}

/// The codes of changed values, and what is beside them.
struct Repacked {
    /// The bytes of each part that is written, in order.
    parts: Vec<Vec<u8>>,
    requantised: Requantised,
}

impl Part {
    /// # Errors
    /// [`PackingFault::BadDType`] and [`PackingFault::Shape`] unless it has `count` elements of `dtype`.
    fn new(
        (tensor, info): (TensorId, &TensorInfo),
        dtype: DType,
        count: u64,
        is_written: bool,
    ) -> Result<Part, PackingFault> {
        if info.dtype != dtype {
            return Err(PackingFault::BadDType { tensor: info.name.clone(), dtype: info.dtype });
        }
        if info.shape.iter().try_fold(1u64, |all, &side| all.checked_mul(side)) != Some(count) {
            let (tensor, found) = (info.name.clone(), info.shape.clone());
            return Err(PackingFault::Shape { tensor, found, wanted: vec![count] });
        }
        Ok(Part::of(tensor, info, is_written))
    }

    fn of(tensor: TensorId, info: &TensorInfo, is_written: bool) -> Part {
        let (name, shape) = (info.name.clone(), info.shape.clone());
        Part { tensor, name, dtype: info.dtype, shape, bytes: info.bytes as usize, is_written }
    }

    /// The fault of a number that it holds.
    fn value(&self, index: usize, value: f32) -> PackingFault {
        PackingFault::Value { tensor: self.name.clone(), index: index as u64, value: value.to_string() }
    }

    /// Its numbers, which are of F32 or F8_E4M3.
    ///
    /// # Errors
    /// [`PackingFault::Value`] for the first that is not finite.
    fn numbers(&self, bytes: &[u8]) -> Result<Vec<f32>, PackingFault> {
        let float = Float::of(self.dtype).unwrap_or(Float::F32);
        let mut values = vec![0.0; bytes.len() / float.size()];
        float.lift(bytes, &mut values);
        match values.iter().position(|value| !value.is_finite()) {
            Some(index) => Err(self.value(index, values[index])),
            None => Ok(values),
        }
    }
}

/// The tensor `name` beside a packed weight.
fn beside<'a>(siblings: &Siblings<'a>, name: String) -> Result<(TensorId, &'a TensorInfo), PackingFault> {
    siblings.find(&name).ok_or(PackingFault::Missing { tensor: name })
}

impl Codes {
    /// The codes of `weight`, which is `packed`.
    ///
    /// # Errors
    /// [`AdapterFault::Codes`].
    pub(crate) fn of(
        (tensor, weight): (TensorId, &TensorInfo),
        packed: &Packed,
        siblings: &Siblings<'_>,
    ) -> Result<Codes, AdapterFault> {
        let packing = packed.packing;
        let found = match packing {
            Packing::BitsAndBytesNf4 | Packing::BitsAndBytesFp4 => {
                let found = BitsAndBytes::of(tensor, weight, packing, siblings);
                found.map(|(form, shape, parts)| (Form::BitsAndBytes(form), shape, parts))
            }
            Packing::Nvfp4 => {
                let found = Nvfp4::of(tensor, weight, siblings);
                found.map(|(form, shape, parts)| (Form::Nvfp4(form), shape, parts))
            }
            _ => Err(PackingFault::NotWritten),
        };
        let fault = |fault| AdapterFault::Codes { tensor: weight.name.clone(), packing, fault };
        let (form, shape, parts) = found.map_err(fault)?;
        Ok(Codes { packing, form, shape, parts })
    }

    /// Codes that have to stay as they are, of values of this shape.
    pub(crate) fn unread((tensor, weight): (TensorId, &TensorInfo), packing: Packing, shape: Vec<u64>) -> Codes {
        Codes { packing, form: Form::Unread, shape, parts: vec![Part::of(tensor, weight, true)] }
    }

    /// The shape of its values.
    pub(crate) fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// Its values. `parts` are the bytes of its tensors, each as long as the tensor.
    fn lift(&self, parts: &[&[u8]]) -> Result<Vec<f32>, PackingFault> {
        match &self.form {
            Form::BitsAndBytes(form) => form.lift(&self.parts, parts),
            Form::Nvfp4(form) => form.lift(&self.parts, parts),
            Form::Unread => Err(PackingFault::NotWritten),
        }
    }

    /// Packs the values `new`, which were `old`.
    fn pack(&self, parts: &[&[u8]], old: &[f32], new: &[f32]) -> Result<Repacked, PackingFault> {
        if let Some(index) = new.iter().position(|value| !value.is_finite()) {
            return Err(PackingFault::NotFinite { index: index as u64, value: new[index].to_string() });
        }
        match &self.form {
            Form::BitsAndBytes(form) => form.pack(&self.parts, parts, old, new),
            Form::Nvfp4(form) => form.pack(&self.parts, parts, old, new),
            Form::Unread => Err(PackingFault::NotWritten),
        }
    }
}

/// The part of a packed weight that a patch is for.
#[derive(Clone, Debug)]
pub(super) struct OfCodes {
    codes: Arc<Codes>,
    part: usize,
}

impl OfCodes {
    fn part(&self) -> &Part {
        &self.codes.parts[self.part]
    }

    pub(super) fn dtype(&self) -> DType {
        self.part().dtype
    }

    pub(super) fn bytes(&self) -> usize {
        self.part().bytes
    }
}

impl TensorPatch {
    /// Whether it is for a tensor beside the codes of a packed weight.
    pub(crate) fn is_beside_codes(&self) -> bool {
        self.codes.as_ref().is_some_and(|of| of.part > 0)
    }

    /// Whether it and another are for tensors of one packed weight.
    pub(crate) fn is_of_codes_of(&self, other: &TensorPatch) -> bool {
        let both = self.codes.as_ref().zip(other.codes.as_ref());
        both.is_some_and(|(one, other)| Arc::ptr_eq(&one.codes, &other.codes))
    }
}

impl TensorPatch {
    /// The patches that make `changes` to the values of a packed weight: of the tensor of its codes, and of those beside it that
    /// change along with them.
    ///
    /// # Errors
    /// [`AdapterFault::Unsupported`] if the changes give the weight another shape.
    pub(crate) fn of_codes(codes: Codes, changes: Changes) -> Result<Vec<(TensorId, TensorPatch)>, AdapterFault> {
        let Changes { steps, shape, is_bias, view, makers } = changes;
        if shape != codes.shape {
            return Err(AdapterFault::Unsupported { kind: "padding of a packed weight; such".to_owned() });
        }
        let (codes, steps) = (Arc::new(codes), Arc::new(steps));
        let written = (0..codes.parts.len()).filter(|&part| codes.parts[part].is_written);
        let patch = |part: usize| {
            let of = &codes.parts[part];
            let others = codes.parts.iter().enumerate().filter(|(other, _)| *other != part);
            let patch = TensorPatch {
                name: of.name.clone(),
                // Of the values; the codes have none.
                stored: Encoding::Float(Float::F32),
                target: Encoding::Float(Float::F32),
                requantises: true,
                shape: shape.clone(),
                patched_shape: of.shape.clone(),
                scaling: None,
                needs: others.map(|(_, other)| other.tensor).collect(),
                steps: Arc::clone(&steps),
                is_bias,
                view,
                rounding: Rounding::default(),
                scale_policy: ScalePolicy::default(),
                scale_of: None,
                codes: Some(OfCodes { codes: Arc::clone(&codes), part }),
                of_whole: None,
                makers: makers.clone(),
            };
            (of.tensor, patch)
        };
        Ok(written.map(patch).collect())
    }

    /// Packs the changed values again, and writes the part that this patch is for to `bytes`, which holds that of the checkpoint.
    /// `siblings` are the others.
    pub(super) fn repack(
        &self,
        tier: Tier,
        of: &OfCodes,
        bytes: &mut [u8],
        siblings: &[&[u8]],
    ) -> Result<PatchOutcome> {
        let OfCodes { codes, part } = of;
        if siblings.len() + 1 != codes.parts.len() {
            return Err(self.miscounted(codes.parts.len() - 1, siblings.len()));
        }
        let mut parts = siblings.to_vec();
        parts.insert(*part, bytes);
        for (part, bytes) in codes.parts.iter().zip(&parts) {
            if part.bytes != bytes.len() {
                let what = Measured::Sibling { name: self.name.clone() };
                return Err(Error::WrongSize { what, needed: part.bytes as u64, given: bytes.len() as u64 });
            }
        }
        let fault = |fault| {
            let (tensor, packing) = (codes.parts[0].name.clone(), codes.packing);
            let fault = Box::new(AdapterFault::Codes { tensor, packing, fault });
            Error::Unpatchable { tensor: self.name.clone(), fault }
        };
        let old = codes.lift(&parts).map_err(fault)?;
        let new = F32Weight::changed(tier, self.matrix(), old.clone(), &self.steps);
        let mut repacked = codes.pack(&parts, &old, &new).map_err(fault)?;
        let nth = codes.parts[..*part].iter().filter(|part| part.is_written).count();
        bytes.copy_from_slice(&std::mem::take(&mut repacked.parts[nth]));
        // Counted once, with the codes.
        let requantised = if *part == 0 { repacked.requantised } else { Requantised::default() };
        Ok(PatchOutcome { requantised, ..PatchOutcome::default() })
    }
}

/// The code in half a byte; `high` for the upper half.
fn nibble(byte: u8, high: bool) -> usize {
    usize::from(if high { byte >> 4 } else { byte & 15 })
}

/// Puts a code into half a byte.
fn set_nibble(byte: &mut u8, high: bool, code: u8) {
    *byte = if high { *byte & 15 | code << 4 } else { *byte & 0xf0 | code };
}

/// Whether any of the values was changed.
fn differ(old: &[f32], new: &[f32]) -> bool {
    old.iter().zip(new).any(|(old, new)| old != new)
}

/// The largest magnitude.
fn largest(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |largest: f32, value| largest.max(value.abs()))
}

#[cfg(test)]
mod tests;
