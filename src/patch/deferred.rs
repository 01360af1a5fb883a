//! Changes that are not merged: products of two factors, given to the caller beside a weight whose bytes stay.
//!
//! A weight's steps `W += s_i up_i down_i` become one product: `B A`, where A holds the rows of all `down_i` one after another and
//! B the columns of all `up_i`, and one scale s, the `s_i` of the largest magnitude. B's columns are multiplied by `s_i / s`. So
//! the merged weight is `W + s B A`, and for a single adapter both factors are the adapter's own whatever its strength.
//! Steps that change some rows have zeros in B's others. Steps of separate rows with equal `down` share their place in A.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use super::steps::{Change, Packed, Step, TILE_COLS, matrix_of};
use super::{Delta, Maker, TensorPatch};
use crate::checkpoint::Cut;
use crate::error::AdapterFault;
use crate::float::Float;
use crate::transfer::Stamp;

/// One of the two factors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    A,
    B,
}

/// The changes of a weight as one product of low rank. A clone shares the factors.
#[derive(Clone, Debug)]
pub(crate) struct Deferral {
    /// The weight's name.
    name: String,
    float: Float,
    scale: f32,
    form: Form,
    steps: Arc<Vec<Step>>,
    places: Vec<Place>,
    makers: Vec<Maker>,
    /// What is kept of the weight, if it is a part of one.
    cut: Option<Cut>,
}

/// The sizes of a weight and of its factors.
#[derive(Clone, Debug)]
struct Form {
    /// How many matrices the weight is a stack of; `None` if it is one.
    experts: Option<usize>,
    /// Those of each matrix.
    rows: usize,
    cols: usize,
    /// The weight's dimensions after the rows.
    inner: Vec<u64>,
    rank: usize,
}

/// The place of a step's factors.
#[derive(Clone, Debug, PartialEq)]
struct Place {
    expert: usize,
    /// Its first row in the expert's A, and column in its B.
    first: usize,
    rank: usize,
    /// What its part of B is multiplied by.
    ratio: f32,
    /// Whether it shares its part of A with an earlier step.
    shares: bool,
}

/// The inputs of a factor, without its values. Factors of one checkpoint with equal recipes have the same bytes.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct FactorRecipe {
    weight: String,
    side: Side,
    float: Float,
    shape: Vec<u64>,
    /// The places of B's columns; A does not depend on the strengths.
    places: Vec<Place>,
    makers: Vec<(PathBuf, Vec<Stamp>, String, String)>,
}

impl Deferral {
    /// The changes that `patch` makes.
    ///
    /// # Errors
    /// [`AdapterFault::NotDeferred`] for a change that is no product of two factors, or of something that is no matrix;
    /// [`AdapterFault::FactorRange`] for a factor beyond the range of `float`.
    pub(crate) fn of(patch: &TensorPatch, float: Float) -> Result<Deferral, AdapterFault> {
        let refused = |kind: &str| AdapterFault::NotDeferred { kind: kind.to_owned() };
        if patch.is_bias {
            return Err(refused("a change of a bias"));
        }
        let products: Vec<&Packed> = patch.steps.iter().map(product).collect::<Result<_, _>>().map_err(refused)?;
        let form = Form::of(patch).map_err(refused)?;
        let fits = |(step, product): (&Step, &&Packed)| {
            product.factors().1.len() == form.cols.div_ceil(TILE_COLS) * TILE_COLS * product.rank
                && step.rows.end <= form.rows * form.experts.unwrap_or(1)
                && (step.rows.is_empty() || step.rows.start / form.rows == (step.rows.end - 1) / form.rows)
        };
        if !patch.steps.iter().zip(&products).all(fits) {
            return Err(refused("products for rows that are counted in two ways"));
        }
        let scales: Vec<f32> = patch.steps.iter().map(scale_of).collect();
        let scale = scales.iter().fold(0.0f32, |most, &scale| if scale.abs() > most.abs() { scale } else { most });
        let ratio = |own: f32| if scale == 0.0 { 1.0 } else { own / scale };
        let (mut places, mut rank) = (Vec::<Place>::new(), 0);
        let mut ends = vec![0; form.experts.unwrap_or(1)];
        for (index, step) in patch.steps.iter().enumerate() {
            let (expert, own) = (step.rows.start.checked_div(form.rows).unwrap_or(0), products[index]);
            let sharing = shared_with(index, &patch.steps, &products, &places, expert);
            let first = sharing.unwrap_or(ends[expert]);
            if sharing.is_none() {
                ends[expert] += own.rank;
                rank = rank.max(ends[expert]);
            }
            let (ratio, shares) = (ratio(scales[index]), sharing.is_some());
            places.push(Place { expert, first, rank: own.rank, ratio, shares });
        }
        let (name, form) = (patch.name.clone(), Form { rank, ..form });
        let (steps, makers) = (Arc::clone(&patch.steps), patch.makers.clone());
        let deferral = Deferral { name, float, scale, form, steps, places, makers, cut: None };
        deferral.check_range()?;
        Ok(deferral)
    }

    /// The same for the part of the weight that `cut` keeps: of the rows B has its own, of the columns A.
    pub(crate) fn part(&self, cut: Option<&Cut>) -> Deferral {
        Deferral { cut: cut.cloned(), ..self.clone() }
    }

    /// What is kept of a factor.
    fn cut_of(&self, side: Side) -> Option<Cut> {
        let cut = self.cut.as_ref()?;
        // A stack's experts, then their rows.
        let (stacked, dimension) = (usize::from(self.form.experts.is_some()), cut.dimension());
        let is_of = match side {
            Side::A => dimension != stacked,
            Side::B => dimension <= stacked,
        };
        is_of.then(|| cut.clone())
    }

    /// The same in another element type.
    ///
    /// # Errors
    /// [`AdapterFault::FactorRange`] for a factor beyond the range of `float`.
    pub(crate) fn stored_as(&self, float: Float) -> Result<Deferral, AdapterFault> {
        let deferral = Deferral { float, ..self.clone() };
        deferral.check_range()?;
        Ok(deferral)
    }

    /// The element type of its factors.
    pub(crate) fn float(&self) -> Float {
        self.float
    }

    /// What the product of its factors is multiplied by.
    pub(crate) fn scale(&self) -> f32 {
        self.scale
    }

    /// The bytes of the adapters' factors in memory, as f32.
    pub(crate) fn factor_bytes(&self) -> u64 {
        self.steps.iter().map(|step| step.change.values() as u64 * 4).sum()
    }

    /// The shape of a factor: A is [r, columns] and B [rows, r]. A has all of the weight's dimensions after the first, and both have
    /// the number of experts before these if the weight is a stack of them.
    pub(crate) fn shape(&self, side: Side) -> Vec<u64> {
        let whole = self.whole_shape(side);
        self.cut_of(side).map_or_else(|| whole.clone(), |cut| cut.shape(&whole))
    }

    fn whole_shape(&self, side: Side) -> Vec<u64> {
        let Form { experts, rows, rank, inner, .. } = &self.form;
        let own = match side {
            Side::A => [&[*rank as u64], &inner[..]].concat(),
            Side::B => vec![*rows as u64, *rank as u64],
        };
        experts.iter().map(|&experts| experts as u64).chain(own).collect()
    }

    /// The bytes of a factor, each value rounded to the nearest.
    pub(crate) fn bytes(&self, side: Side) -> Vec<u8> {
        let values = match side {
            Side::A => self.a(),
            Side::B => self.b(),
        };
        let mut bytes = vec![0; values.len() * self.float.size()];
        self.float.round(&values, &mut bytes);
        let kept = self.cut_of(side).and_then(|cut| cut.stretches(&self.whole_shape(side), self.float.dtype()));
        let Some(kept) = kept else { return bytes };
        let mut part = vec![0; self.shape(side).iter().product::<u64>() as usize * self.float.size()];
        kept.gather(&bytes, &mut part);
        part
    }

    /// The inputs of a factor.
    pub(crate) fn recipe(&self, side: Side) -> FactorRecipe {
        let unscaled = |place: &Place| Place { ratio: 1.0, ..place.clone() };
        let places = match side {
            Side::A => self.places.iter().map(unscaled).collect(),
            Side::B => self.places.clone(),
        };
        let maker = |Maker { adapter, module }: &Maker| {
            (adapter.path.clone(), adapter.stamps.clone(), adapter.settings.clone(), module.clone())
        };
        let (weight, shape) = (self.name.clone(), self.shape(side));
        FactorRecipe { weight, side, float: self.float, shape, places, makers: self.makers.iter().map(maker).collect() }
    }

    fn products(&self) -> impl Iterator<Item = (&Place, &Range<usize>, &Packed)> {
        let steps = self.places.iter().zip(self.steps.iter());
        steps.filter_map(|(place, step)| Some((place, &step.rows, product(step).ok()?)))
    }

    fn a(&self) -> Vec<f32> {
        let Form { cols, rank, .. } = self.form;
        let mut values = vec![0.0; self.form.experts.unwrap_or(1) * rank * cols];
        for (place, _, product) in self.products().filter(|(place, ..)| !place.shares) {
            for k in 0..place.rank {
                let row = &mut values[(place.expert * rank + place.first + k) * cols..][..cols];
                for (tile, part) in row.chunks_mut(TILE_COLS).enumerate() {
                    part.copy_from_slice(&product.down(tile)[k * TILE_COLS..][..part.len()]);
                }
            }
        }
        values
    }

    fn b(&self) -> Vec<f32> {
        let rank = self.form.rank;
        let mut values = vec![0.0; self.form.experts.unwrap_or(1) * self.form.rows * rank];
        for (place, rows, product) in self.products() {
            let up = product.panels(rows, 1);
            for (row, up) in rows.clone().zip(up.chunks_exact(place.rank.max(1))) {
                let own = &mut values[row * rank + place.first..][..place.rank];
                own.iter_mut().zip(up).for_each(|(value, up)| *value = up * place.ratio);
            }
        }
        values
    }

    /// Fails if a finite element of a factor is none in its element type.
    fn check_range(&self) -> Result<(), AdapterFault> {
        if self.float == Float::F32 {
            return Ok(());
        }
        // Ratios are at most one.
        let largest = |values: &[f32]| values.iter().fold(0.0f32, |most, value| most.max(value.abs()));
        let ours = self.products().map(|(place, _, product)| {
            let (up, down) = product.factors();
            largest(down).max(largest(up) * place.ratio.abs())
        });
        let value = ours.fold(0.0, f32::max);
        let mut bytes = vec![0; self.float.size()];
        let mut rounded = [0.0];
        self.float.round(&[value], &mut bytes);
        self.float.lift(&bytes, &mut rounded);
        match rounded[0].is_finite() {
            true => Ok(()),
            false => Err(AdapterFault::FactorRange { value: value.to_string(), dtype: self.float.dtype() }),
        }
    }
}

impl Form {
    /// The sizes of a patched weight, or what it is instead of matrices.
    fn of(patch: &TensorPatch) -> Result<Form, &'static str> {
        let shape = &patch.shape;
        let [first, inner @ ..] = &shape[..] else { return Err("a change of a single number") };
        if inner.is_empty() {
            return Err("a change of a vector");
        }
        let (rows, cols) = matrix_of(shape).ok_or("a change of a weight of too many elements")?;
        match (patch.view, inner) {
            (None, _) => Ok(Form { experts: None, rows, cols, inner: inner.to_vec(), rank: 0 }),
            (Some(view), &[own, width]) if view == (rows * own as usize, width as usize) => {
                let experts = Some(*first as usize);
                Ok(Form { experts, rows: own as usize, cols: width as usize, inner: vec![width], rank: 0 })
            }
            _ => Err("a change of a weight that is seen in another shape"),
        }
    }
}

/// The product that a step adds, or what the step does instead.
fn product(step: &Step) -> Result<&Packed, &'static str> {
    match &step.change {
        Change::Add { delta, .. } => match &**delta {
            Delta::Product(product) => Ok(product),
            Delta::Dense(_) => Err("a whole difference"),
            Delta::Hadamard(_) => Err("LoHa"),
            Delta::Kronecker(_) => Err("LoKr"),
            Delta::Linear(_) => Err("GLoRA"),
        },
        Change::Set(_) => Err("a whole replacement"),
        Change::Decompose { .. } => Err("DoRA"),
        Change::Rotate { .. } => Err("OFT"),
        Change::Transform(columns) if columns.transforms.iter().all(|transform| transform.size == 1) => Err("(IA)^3"),
        Change::Transform(columns) => Err(if columns.by_rows.is_some() { "BOFT" } else { "OFT" }),
        Change::Pad { .. } => Err("padding to a larger shape"),
    }
}

fn scale_of(step: &Step) -> f32 {
    match step.change {
        Change::Add { scale, .. } => scale,
        _ => 0.0,
    }
}

/// Where A has the `down` of step number `index` already, from steps that change other rows of the expert.
fn shared_with(index: usize, steps: &[Step], products: &[&Packed], places: &[Place], expert: usize) -> Option<usize> {
    let (own, rows) = (products[index], &steps[index].rows);
    let here = |place: &Place| place.expert == expert;
    let equal = |earlier: &usize| products[*earlier].factors().1 == own.factors().1;
    let earlier = (0..index).filter(|&earlier| here(&places[earlier]) && !places[earlier].shares);
    let mut candidates = earlier.filter(equal).map(|earlier| places[earlier].first);
    candidates.find(|&first| {
        let mut users = (0..index).filter(|&user| here(&places[user]) && places[user].first == first);
        users.all(|user| steps[user].rows.end <= rows.start || rows.end <= steps[user].rows.start)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::{Siblings, TensorInfo};
    use crate::dtype::DType;
    use crate::patch::{Changes, Matrix, Product};

    fn matrix(rows: usize, cols: usize, from: f32) -> Matrix {
        let values = (0..rows * cols).map(|index| from + (index % 13) as f32 * 0.25 - 1.0).collect();
        Matrix { rows, cols, values }
    }

    fn add(rows: Range<usize>, cols: usize, rank: usize, seed: f32, scale: f32) -> Step {
        let (up, down) = (matrix(rows.len(), rank, seed), matrix(rank, cols, seed * 0.5));
        Step::add(rows, Delta::Product(Product { up, down }), scale)
    }

    fn patch(shape: &[u64], view: Option<(usize, usize)>, steps: Vec<Step>) -> TensorPatch {
        let info = TensorInfo::new("X.weight", DType::F32, shape, 0, 0).unwrap();
        let changes = Changes { steps, shape: shape.to_vec(), view, ..Changes::default() };
        TensorPatch::new(&info, changes, &Siblings::default()).unwrap()
    }

    /// `scale B A`, expert after expert.
    fn product_of(deferral: &Deferral) -> Vec<f32> {
        let Form { experts, rows, cols, rank, .. } = deferral.form;
        let (a, b) = (deferral.a(), deferral.b());
        let experts = 0..experts.unwrap_or(1);
        let of = |expert: usize| {
            let a = Matrix { rows: rank, cols, values: a[expert * rank * cols..][..rank * cols].to_vec() };
            let b = Matrix { rows, cols: rank, values: b[expert * rows * rank..][..rows * rank].to_vec() };
            b.times(&a).values.into_iter().map(|value| value * deferral.scale).collect::<Vec<f32>>()
        };
        experts.flat_map(of).collect()
    }

    fn merged(patch: &TensorPatch) -> Vec<f32> {
        let count: u64 = patch.shape.iter().product();
        let mut bytes = vec![0; count as usize * 4];
        patch.apply(&mut bytes, &[]).unwrap();
        bytes.as_chunks().0.iter().map(|raw| f32::from_le_bytes(*raw)).collect()
    }

    fn check(patch: &TensorPatch) -> Deferral {
        let deferral = Deferral::of(patch, Float::F32).unwrap();
        for (got, wanted) in product_of(&deferral).iter().zip(merged(patch)) {
            assert!((got - wanted).abs() <= 1e-4 * wanted.abs().max(1.0), "{got} {wanted}");
        }
        deferral
    }

    /// Rows and columns that do not fill tiles, rows of some steps, and other scales for each.
    #[test]
    fn steps_become_one_product_with_one_scale() {
        let steps = vec![add(0..21, 45, 3, 1.0, 0.5), add(5..18, 45, 2, 2.0, -2.0), add(18..21, 45, 4, 3.0, 1.5)];
        let deferral = check(&patch(&[21, 45], None, steps));
        assert_eq!(
            (deferral.shape(Side::A), deferral.shape(Side::B), deferral.scale),
            (vec![9, 45], vec![21, 9], -2.0)
        );
        let ratios: Vec<f32> = deferral.places.iter().map(|place| place.ratio).collect();
        assert_eq!(ratios, [-0.25, 1.0, -0.75]);
        let kernel = check(&patch(&[6, 5, 3, 3], None, vec![add(0..6, 45, 2, 1.0, 1.0)]));
        assert_eq!((kernel.shape(Side::A), kernel.shape(Side::B)), (vec![2, 5, 3, 3], vec![6, 2]));
    }

    #[test]
    fn parts_of_a_fused_weight_with_one_down_share_it() {
        let part = |rows: Range<usize>, scale: f32| {
            let (up, down) = (matrix(rows.len(), 2, rows.start as f32), matrix(2, 40, 7.0));
            Step::add(rows, Delta::Product(Product { up, down }), scale)
        };
        let deferral = check(&patch(&[24, 40], None, vec![part(0..8, 1.0), part(8..16, 0.5), part(16..24, 1.0)]));
        assert_eq!((deferral.shape(Side::A), deferral.shape(Side::B)), (vec![2, 40], vec![24, 2]));
        // The same rows twice cannot share columns of B.
        let deferral = check(&patch(&[24, 40], None, vec![part(0..8, 1.0), part(4..16, 0.5), part(16..24, 1.0)]));
        assert_eq!(deferral.shape(Side::A), [4, 40]);
    }

    #[test]
    fn experts_have_factors_of_their_own() {
        let steps = vec![add(0..5, 9, 2, 1.0, 1.0), add(10..15, 9, 3, 2.0, 2.0), add(11..13, 9, 1, 3.0, 0.5)];
        let deferral = check(&patch(&[4, 5, 9], Some((20, 9)), steps));
        assert_eq!((deferral.shape(Side::A), deferral.shape(Side::B)), (vec![4, 4, 9], vec![4, 5, 4]));
    }

    #[test]
    fn what_is_no_product_is_named() {
        let kind = |patch: &TensorPatch| match Deferral::of(patch, Float::F16) {
            Err(AdapterFault::NotDeferred { kind }) => kind,
            other => panic!("{other:?}"),
        };
        assert_eq!(kind(&patch(&[4], None, vec![add(0..1, 4, 1, 1.0, 1.0)])), "a change of a vector");
        assert_eq!(kind(&patch(&[2, 2], None, vec![Step::set(0..2, vec![0.0; 4])])), "a whole replacement");
        let crossing = patch(&[4, 5, 9], Some((20, 9)), vec![add(3..7, 9, 1, 1.0, 1.0)]);
        assert_eq!(kind(&crossing), "products for rows that are counted in two ways");
        let huge = Matrix { rows: 1, cols: 2, values: vec![1.0, 70_000.0] };
        let step = Step::add(0..2, Delta::Product(Product { up: matrix(2, 1, 0.0), down: huge }), 1.0);
        let error = Deferral::of(&patch(&[2, 2], None, vec![step]), Float::F16).unwrap_err();
        assert_eq!(error, AdapterFault::FactorRange { value: "70000".to_owned(), dtype: DType::F16 });
    }

    #[test]
    fn a_strength_changes_neither_factor_of_a_single_adapter() {
        let at = |scale: f32, second: f32| {
            let steps = vec![add(0..8, 32, 2, 1.0, scale), add(0..8, 32, 2, 2.0, second)];
            Deferral::of(&patch(&[8, 32], None, steps), Float::F32).unwrap()
        };
        let (one, other, both) = (at(1.0, 2.0), at(1.0, 4.0), at(2.0, 4.0));
        assert!(one.recipe(Side::A) == other.recipe(Side::A) && one.recipe(Side::B) != other.recipe(Side::B));
        assert!(one.recipe(Side::B) == both.recipe(Side::B) && one.scale != both.scale);
        assert_eq!(at(0.0, 0.0).b(), at(1.0, 1.0).b());
    }
}
