//! The scales of an fp8 weight: finding, reading, applying and recomputing them.

mod grid;

use std::sync::Arc;

use rayon::prelude::*;

use super::vector::Tier;
use super::whole::F32Weight;
use super::{PatchOutcome, TensorPatch, bytes_of};
use crate::backend::BlockScales;
use crate::checkpoint::{Format, Note, Role, Sibling, Siblings, Stated, TensorId, TensorInfo};
use crate::dtype::DType;
use crate::encoding::Encoding;
use crate::error::{AdapterFault, Error, Measured, Result};
use crate::float::Float;
use crate::rounding::Rounding;
pub(super) use grid::Grid;

/// The policy for the scale of an fp8 weight that adapters change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum ScalePolicy {
    /// The scale is kept. Weights beyond its range saturate, and are counted.
    #[default]
    Keep,
    /// The scale becomes the largest magnitude of its changed weights divided by the type's largest value, so that no weight
    /// saturates and no bits are wasted; where scales are powers of two (F8_E8M0), the next of these. The scale is then a
    /// patched tensor too. If that gives no valid scale (weights that are all zero, a quotient below the range of the scale's
    /// type), the scale is kept.
    Recompute,
}

impl TensorPatch {
    /// The scale beside the weight.
    pub(crate) fn scale(&self) -> Option<TensorId> {
        self.scaling.as_ref().map(|scaling| scaling.tensor)
    }

    /// The patch that recomputes `scale`, the scale of the tensor `weight` that this patch is for; `None` if it has none.
    pub(crate) fn of_scale(&self, weight: TensorId, scale: &TensorInfo) -> Option<TensorPatch> {
        let scaling = self.scaling.as_ref()?;
        Some(TensorPatch {
            name: scale.name.clone(),
            stored: Encoding::Float(scaling.float),
            target: Encoding::Float(scaling.float),
            requantises: false,
            shape: scale.shape.clone(),
            patched_shape: scale.shape.clone(),
            scaling: None,
            needs: vec![weight],
            steps: Arc::default(),
            is_bias: false,
            view: None,
            rounding: Rounding::NearestEven,
            scale_policy: self.scale_policy,
            scale_of: Some(Arc::new(self.clone())),
            codes: None,
            of_whole: None,
            makers: Vec::new(),
        })
    }

    /// Recomputes the scale in `bytes`; the only sibling is the weight, as the checkpoint holds it.
    pub(super) fn apply_to_scale(&self, tier: Tier, bytes: &mut [u8], siblings: &[&[u8]]) -> Result<PatchOutcome> {
        let [weight] = siblings else { return Err(self.miscounted(1, siblings.len())) };
        let wanted = bytes_of(&self.shape, self.stored);
        if wanted != Some(weight.len()) {
            let (name, given) = (self.name.clone(), weight.len() as u64);
            let needed = wanted.map_or(u64::MAX, |bytes| bytes as u64);
            return Err(Error::WrongSize { what: Measured::Sibling { name }, needed, given });
        }
        let (Some(scaling), Some(old), Encoding::Float(float)) = (&self.scaling, self.scales(&[bytes])?, self.target)
        else {
            return Ok(PatchOutcome::default());
        };
        let lifted = F32Weight::patched(tier, self.stored(Some(&old)), weight, &self.steps);
        lifted.scales(float, scaling.float, &old).write(scaling.float, bytes);
        Ok(PatchOutcome::default())
    }

    /// The scales beside the weight, from the siblings' bytes.
    pub(crate) fn scales(&self, siblings: &[&[u8]]) -> Result<Option<Scales>> {
        if siblings.len() != self.needs.len() {
            return Err(self.miscounted(self.needs.len(), siblings.len()));
        }
        let Some((scaling, bytes)) = self.scaling.as_ref().zip(siblings.first()) else { return Ok(None) };
        Scales::read(scaling, bytes, &self.name).map(Some)
    }

    pub(super) fn miscounted(&self, needs: usize, given: usize) -> Error {
        let what = Measured::Siblings { name: self.name.clone() };
        Error::WrongSize { what, needed: needs as u64, given: given as u64 }
    }
}

/// A scaled fp8 weight is `stored * scale`, one scale for each block of a grid over it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Scaling {
    tensor: TensorId,
    /// The scale's own type.
    pub(super) float: Float,
    grid: Grid,
}

impl Scaling {
    /// The scale of `weight`, where it is an fp8 weight and has one. `siblings` are the checkpoint's tensors.
    ///
    /// # Errors
    /// [`AdapterFault::UnknownScale`], [`AdapterFault::SeveralScales`], [`AdapterFault::BadDType`],
    /// [`AdapterFault::ScaleShape`] and [`AdapterFault::QuantisationNote`]: whatever leaves open what the codes stand for.
    pub(crate) fn of(weight: &TensorInfo, siblings: &Siblings<'_>) -> Result<Option<Scaling>, AdapterFault> {
        if !Float::of(weight.dtype).is_some_and(Float::is_fp8) {
            return Ok(None);
        }
        let (weight_name, weight_type, beside) = (|| weight.name.clone(), weight.dtype, siblings.beside(weight));
        let note = siblings.note(weight).map_err(|(note, reason)| {
            let weight = weight_name();
            AdapterFault::QuantisationNote { weight, note, reason }
        })?;
        let unknown = |sibling: &Sibling<'_>| {
            Err(AdapterFault::UnknownScale { weight: weight_name(), scale: sibling.info.name.clone() })
        };
        if let Some(Note { format: Format::Nvfp4, .. }) = note {
            let (weight, note) = (weight_name(), "NVFP4".to_owned());
            let reason = format!("the weight has element type {}", weight_type);
            return Err(AdapterFault::QuantisationNote { weight, note, reason });
        }
        if let Some(sibling) = beside.iter().find(|sibling| sibling.role == Role::Unknown) {
            return unknown(sibling);
        }
        let scales: Vec<_> = beside.iter().filter(|sibling| sibling.role == Role::Scale).collect();
        match (&scales[..], beside.first()) {
            ([scale], _) => Scaling::by(weight, scale, note, siblings.stated()).map(Some),
            ([], Some(perhaps)) => unknown(perhaps),
            ([], None) => match note {
                Some(Note { format: Format::Mxfp8, .. }) => {
                    let (weight, note) = (weight_name(), "MXFP8".to_owned());
                    let reason = "there is no scale beside it".to_owned();
                    Err(AdapterFault::QuantisationNote { weight, note, reason })
                }
                _ => Ok(None),
            },
            _ => {
                let scales = scales.iter().map(|sibling| sibling.info.name.clone()).collect();
                Err(AdapterFault::SeveralScales { weight: weight_name(), scales })
            }
        }
    }

    /// The scaling of `weight` by one scale.
    fn by(
        weight: &TensorInfo,
        scale: &Sibling<'_>,
        note: Option<Note>,
        stated: Stated,
    ) -> Result<Scaling, AdapterFault> {
        let info = scale.info;
        let is_mx = note.is_some_and(|note| note.format == Format::Mxfp8);
        let float = match info.dtype {
            DType::F8E8M0 => Some(Float::E8M0),
            // The type had no name in files at first.
            DType::U8 if is_mx || (stated.mxfp8 && note.is_none() && has_mx_rows(weight, info)) => Some(Float::E8M0),
            _ if is_mx => None,
            dtype => Float::of(dtype).filter(|float| !float.is_fp8()),
        };
        let bad_type = || AdapterFault::BadDType { what: format!("the scale `{}`", info.name), dtype: info.dtype };
        let float = float.ok_or_else(bad_type)?;
        let grid =
            Grid::of(&weight.shape, &info.shape, note, stated.block).ok_or_else(|| AdapterFault::ScaleShape {
                weight: weight.name.clone(),
                shape: weight.shape.clone(),
                scale: info.name.clone(),
                found: info.shape.clone(),
            })?;
        Ok(Scaling { tensor: scale.id, float, grid })
    }

    /// The scale.
    pub(crate) fn tensor(&self) -> TensorId {
        self.tensor
    }

    /// The type of the scales, and which values each is for.
    pub(super) fn form(&self) -> (Float, Grid) {
        (self.float, self.grid)
    }

    /// How many scales there are.
    pub(super) fn count(&self) -> usize {
        self.grid.count()
    }

    /// Whether the scales of a weight that is a matrix of `rows` by `cols` have a form that devices take.
    pub(super) fn is_for_devices(&self, rows: usize, cols: usize) -> bool {
        self.grid.over(rows, cols).is_some()
    }
}

/// Whether there is a scale for each 32 columns of a row.
fn has_mx_rows(weight: &TensorInfo, scale: &TensorInfo) -> bool {
    matches!((&weight.shape[..], &scale.shape[..]), ([rows, cols], [a, b]) if a == rows && b.checked_mul(32) == Some(*cols))
}

/// The scales of a weight, one for each block of a grid.
pub(crate) struct Scales {
    values: Vec<f32>,
    grid: Grid,
}

impl Scales {
    /// Lifts the scales of a weight; each has to be finite and not zero.
    ///
    /// # Errors
    /// [`Error::WrongSize`] and [`Error::Unpatchable`], naming the weight.
    pub(crate) fn read(scaling: &Scaling, bytes: &[u8], weight: &str) -> Result<Scales> {
        let (grid, float) = (scaling.grid, scaling.float);
        let (needed, given) = (grid.stored() as u64 * float.size() as u64, bytes.len() as u64);
        if needed != given {
            return Err(Error::WrongSize { what: Measured::Sibling { name: weight.to_owned() }, needed, given });
        }
        let mut stored = vec![0.0; grid.stored()];
        float.lift(bytes, &mut stored);
        let values: Vec<f32> = (0..grid.count()).map(|index| stored[grid.place(index)]).collect();
        match values.iter().position(|scale| !scale.is_finite() || *scale == 0.0) {
            Some(index) => {
                let fault = AdapterFault::BadScale { index: index as u64, value: values[index].to_string() };
                Err(Error::Unpatchable { tensor: weight.to_owned(), fault: Box::new(fault) })
            }
            None => Ok(Scales { values, grid }),
        }
    }

    /// As a device takes them, for the weight seen as a matrix of `rows` by `cols`; none if devices do not take their form.
    pub(crate) fn blocks(&self, rows: usize, cols: usize) -> Option<BlockScales<'_>> {
        let (block, grid_cols) = self.grid.over(rows, cols)?;
        Some(BlockScales { values: &self.values, block, grid_cols })
    }

    /// Combines each of some values, which follow each other in the weight from element `first` on, with its scale.
    pub(crate) fn each(&self, first: usize, values: &mut [f32], combine: impl Fn(f32, f32) -> f32) {
        self.grid.runs(first, values.len(), |scale, range| {
            let scale = self.values[scale];
            values[range].iter_mut().for_each(|value| *value = combine(*value, scale));
        });
    }

    /// The scales for these real weights: for each block the largest finite magnitude divided by the largest value of
    /// `weight`, rounded to the type that the scales are stored in; the old one where that is none.
    pub(crate) fn recomputed(&self, weight: Float, stored: Float, values: &[f32]) -> Scales {
        const TOGETHER: usize = 1 << 16;
        let of_piece = |(piece, values): (usize, &[f32])| {
            let mut found = Vec::new();
            self.grid.runs(piece * TOGETHER, values.len(), |scale, range| {
                let finite = values[range].iter().map(|value| value.abs()).filter(|value| value.is_finite());
                found.push((scale, finite.fold(0.0f32, f32::max)));
            });
            found
        };
        let pieces: Vec<_> = values.par_chunks(TOGETHER).enumerate().map(of_piece).collect();
        let mut largest = vec![0.0f32; self.values.len()];
        for (scale, value) in pieces.into_iter().flatten() {
            largest[scale] = largest[scale].max(value);
        }
        let quotients: Vec<f32> = largest.iter().map(|largest| largest / weight.largest()).collect();
        let mut bytes = vec![0; quotients.len() * stored.size()];
        stored.round(&quotients, &mut bytes);
        let mut values = vec![0.0; quotients.len()];
        stored.lift(&bytes, &mut values);
        for (value, old) in values.iter_mut().zip(&self.values) {
            if !value.is_normal() {
                *value = *old;
            }
        }
        Scales { values, grid: self.grid }
    }

    /// Stores them, exactly. What fills tiles in `bytes` stays as it is.
    pub(crate) fn write(&self, stored: Float, bytes: &mut [u8]) {
        let size = stored.size();
        for (index, value) in self.values.iter().enumerate() {
            let at = self.grid.place(index) * size;
            stored.round(std::slice::from_ref(value), &mut bytes[at..at + size]);
        }
    }
}
