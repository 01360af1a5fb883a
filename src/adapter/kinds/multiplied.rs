//! Kinds of PEFT's that multiply the weight: OFT and BOFT rotate its columns, (IA)^3 scales its rows or columns.
//!
//! The formulas are those of PEFT 0.20 (`tuners/oft/layer.py`, `tuners/boft/layer.py`, `tuners/ia3/layer.py`). PEFT has no
//! strength for them; here `W += s (W' - W)`.

use std::ops::Range;

use super::oft::inverted;
use super::{Building, Parts, Weight};
use crate::adapter::Factor;
use crate::adapter::config::peft::Rotation;
use crate::adapter::names::keys::Part;
use crate::adapter::names::rows::{Projection, RowOrder};
use crate::error::{AdapterFault, Result};
use crate::patch::{BlockTransform, Columns, Step};

impl Building<'_, '_> {
    /// OFT as of PEFT 0.16, from the upper triangles of skew blocks Q: `W' = W R^T`, where R has the blocks
    /// `(I - Q)(I + Q)^-1`, or the first terms of their Neumann series.
    pub(super) fn peft_oft(&mut self) -> Result<()> {
        let Some(factor) = self.parts.read(Part::OftRotation)? else { return Ok(()) };
        let Some(rotation) = self.parts.adapter.peft().map(|config| config.rotation) else {
            let reason = "it is missing, and says how OFT makes its rotations".to_owned();
            return Err(self.parts.fault(Part::OftRotation, AdapterFault::Config { reason }));
        };
        let [count, elements] = factor.shape[..] else { return Err(self.shape_mismatch(&factor)) };
        let size = (1..).take_while(|size| size * (size - 1) / 2 <= elements).last().unwrap_or(1) as usize;
        let columns = self.weight.cols;
        let fits = size * (size - 1) / 2 == elements as usize
            && columns.is_multiple_of(size)
            && (count as usize == columns / size || (rotation.shared && count == 1));
        if !fits || size < 2 {
            return Err(self.shape_mismatch(&factor));
        }
        let mut blocks = Vec::with_capacity(columns * size);
        for triangle in factor.values.chunks_exact(elements as usize) {
            blocks.extend(rotated(skew_of(triangle, size, &rotation, count), size, rotation.terms));
        }
        if rotation.shared {
            blocks = blocks.repeat(columns / size);
        }
        let transform = BlockTransform::new(size, blocks, None);
        self.multiply(Part::OftRotation, "OFT", &factor, vec![transform], None)
    }

    /// BOFT: `W' = (M_n .. M_1 W^T)^T` times s by rows, where each `M = P B P^T` has the blocks `(I - S)(I + S)^-1` of
    /// `S = (D - D^T) / 2`, and a permutation P.
    pub(super) fn boft(&mut self) -> Result<()> {
        let factor = self.parts.need(Part::BoftRotation, Part::BoftScale)?;
        let scale = self.parts.need(Part::BoftScale, Part::BoftRotation)?;
        let [factors, count, size, width] = factor.shape[..] else { return Err(self.shape_mismatch(&factor)) };
        let [factors, count, size, width] = [factors, count, size, width].map(|n| n as usize);
        if size != width || count.checked_mul(size) != Some(self.weight.cols) {
            return Err(self.shape_mismatch(&factor));
        }
        let mut transforms = Vec::new();
        for (number, values) in factor.values.chunks_exact(count * size * size).enumerate() {
            let mut blocks = Vec::with_capacity(values.len());
            for block in values.chunks_exact(size * size) {
                let at = |row: usize, col: usize| f64::from(block[row * size + col]);
                let skew = (0..size * size).map(|i| 0.5 * (at(i / size, i % size) - at(i % size, i / size)));
                blocks.extend(rotated(skew.collect(), size, None));
            }
            let order = butterfly(count, size, number).filter(|_| factors > 1);
            if factors > 1 && order.is_none() {
                return Err(self.shape_mismatch(&factor));
            }
            transforms.push(BlockTransform::new(size, blocks, order));
        }
        self.multiply(Part::BoftRotation, "BOFT", &factor, transforms, Some(scale))
    }

    /// (IA)^3: `W' = W` with each row, or of a feed-forward module each column, times a number.
    pub(super) fn ia3(&mut self) -> Result<()> {
        let Some(factor) = self.parts.read(Part::Ia3)? else { return Ok(()) };
        let Some(by_rows) = self.parts.scales_rows(&factor, &self.weight) else {
            let kind = "(IA)^3 of a convolution with as many inputs as outputs: such".to_owned();
            return Err(self.parts.fault(Part::Ia3, AdapterFault::Unsupported { kind }));
        };
        if by_rows {
            let rows = Factor { shape: vec![factor.values.len() as u64], ..factor.clone() };
            return self.multiply(Part::Ia3, "(IA)^3", &factor, Vec::new(), Some(rows));
        }
        let channels = self.weight.shape.get(1).map_or(1, |&channels| channels as usize);
        if factor.values.len() != channels {
            return Err(self.shape_mismatch(&factor));
        }
        let inner = self.weight.cols / channels.max(1);
        let each = factor.values.iter().flat_map(|&value| std::iter::repeat_n(value, inner)).collect();
        self.multiply(Part::Ia3, "(IA)^3", &factor, vec![BlockTransform::new(1, each, None)], None)
    }

    /// Adds the step that transforms the columns of the target's rows, and multiplies these.
    fn multiply(
        &mut self,
        part: Part,
        kind: &'static str,
        factor: &Factor,
        transforms: Vec<BlockTransform>,
        by_rows: Option<Factor>,
    ) -> Result<()> {
        if self.parts.target.order == RowOrder::Transposed {
            self.parts.needs_rows_as_they_are(part, kind)?;
        }
        let by_rows = by_rows.map(|rows| self.parts.own_part(rows)).transpose()?;
        let rows = match &by_rows {
            Some(by_rows) => self.parts.rows_of(by_rows, by_rows.values.len(), &self.weight)?,
            None => self.all_rows(part, kind)?,
        };
        let finite = transforms.iter().all(BlockTransform::is_finite);
        if !finite {
            let value = "not finite once inverted".to_owned();
            return Err(self.parts.fault(part, AdapterFault::NotFinite { index: 0, value }));
        }
        if self.weight.shape.len() < 2 {
            return Err(self.shape_mismatch(factor));
        }
        let strength = self.parts.adapter.strength;
        let columns = Columns { transforms, by_rows: by_rows.map(|rows| rows.values), strength };
        self.push(kind, Step::transform(rows, columns));
        Ok(())
    }

    /// The rows of the target, whose number the factors do not say.
    fn all_rows(&self, part: Part, kind: &str) -> Result<Range<usize>> {
        let all = self.weight.rows;
        match self.parts.target.projection {
            None => Ok(0..all),
            Some(Projection::Gate) if all.is_multiple_of(2) => Ok(0..all / 2),
            Some(Projection::Up) if all.is_multiple_of(2) => Ok(all / 2..all),
            Some(Projection::Parts { first, count, of }) if all.is_multiple_of(of as usize) => {
                let each = all / of as usize;
                Ok(each * first as usize..each * (first + count) as usize)
            }
            Some(_) => {
                let kind = format!("{kind} for one of the projections that `{}` fuses: such", self.weight.name);
                Err(self.parts.fault(part, AdapterFault::Unsupported { kind }))
            }
        }
    }
}

impl Parts<'_> {
    /// Whether the numbers of (IA)^3 are for the rows of a weight; `None` if that cannot be told.
    fn scales_rows(&self, factor: &Factor, weight: &Weight<'_>) -> Option<bool> {
        let transposed = self.adapter.peft().is_some_and(|config| config.transposed);
        self.scales_outputs(factor, weight).map(|outputs| outputs != transposed)
    }

    /// Whether they are for the outputs, and so for the bias, too.
    pub(super) fn scales_outputs(&self, factor: &Factor, weight: &Weight<'_>) -> Option<bool> {
        let channels = weight.shape.get(1).copied().unwrap_or(1);
        match factor.shape[..] {
            [_, 1] => Some(true),
            [1, _] => Some(false),
            // A convolution's numbers are [1, n, 1, 1] either way.
            [1, n, ..] if n != channels => Some(true),
            [1, n, ..] if n != weight.rows as u64 => Some(false),
            _ => None,
        }
    }
}

/// The skew matrix with this upper triangle, row by row; of constrained OFT with its norm bounded.
fn skew_of(triangle: &[f32], size: usize, rotation: &Rotation, count: u64) -> Vec<f64> {
    let mut skew = vec![0.0; size * size];
    let places = (0..size).flat_map(|row| (row + 1..size).map(move |col| (row, col)));
    for ((row, col), &value) in places.zip(triangle) {
        skew[row * size + col] = f64::from(value);
        skew[col * size + row] = -f64::from(value);
    }
    let norm = skew.iter().map(|q| q * q).sum::<f64>().sqrt();
    if let Some(bound) = rotation.bound.map(|bound| bound / (count as f64).sqrt()).filter(|bound| norm > *bound) {
        skew.iter_mut().for_each(|q| *q *= bound / norm);
    }
    skew
}

/// `(I - Q)(I + Q)^-1` of a skew Q; with `terms`, PEFT's sum `I + 2 Q + 2 Q^2 + .. + Q^(terms - 1)` in its place.
fn rotated(skew: Vec<f64>, size: usize, terms: Option<u64>) -> Vec<f32> {
    let unit = |index: usize| if index / size == index % size { 1.0 } else { 0.0 };
    let mut sum: Vec<f64> = (0..size * size).map(unit).collect();
    let add = |sum: &mut Vec<f64>, power: &[f64], times: f64| {
        sum.iter_mut().zip(power).for_each(|(sum, value)| *sum += times * value);
    };
    let Some(terms) = terms else {
        let minus: Vec<f64> = skew.iter().enumerate().map(|(index, q)| unit(index) - q).collect();
        let plus = skew.iter().enumerate().map(|(index, q)| unit(index) + q).collect();
        return times(&minus, &inverted(plus, size), size).iter().map(|&value| value as f32).collect();
    };
    if terms > 1 {
        add(&mut sum, &skew, 2.0);
    }
    if terms > 2 {
        let mut power = times(&skew, &skew, size);
        add(&mut sum, &power, 2.0);
        for _ in 3..terms - 1 {
            power = times(&power, &skew, size);
            add(&mut sum, &power, 2.0);
        }
        power = times(&power, &skew, size);
        add(&mut sum, &power, 1.0);
    }
    sum.iter().map(|&value| value as f32).collect()
}

/// The product of two square matrices.
fn times(left: &[f64], right: &[f64], size: usize) -> Vec<f64> {
    let at = |index: usize| (0..size).map(|k| left[index / size * size + k] * right[k * size + index % size]).sum();
    (0..size * size).map(at).collect()
}

/// BOFT's permutation before factor `number`, of `count` blocks of `size` columns: in each group of `2^number` blocks, the even
/// halves of blocks come first. `None` if the blocks cannot be grouped so.
fn butterfly(count: usize, size: usize, number: usize) -> Option<Vec<u32>> {
    let together = 1usize.checked_shl(number as u32)?;
    if !size.is_multiple_of(2) || !count.is_multiple_of(together) {
        return None;
    }
    let (half, group) = (size / 2, size * together);
    let of_group = |first: usize| {
        let halves = group / half;
        let sorted = (0..halves).step_by(2).chain((1..halves).step_by(2));
        sorted.flat_map(move |place| (0..half).map(move |inner| (first + place * half + inner) as u32))
    };
    Some((0..count * size).step_by(group).flat_map(of_group).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: Rotation = Rotation { terms: None, bound: None, shared: false };

    #[test]
    fn a_cayley_transform_is_a_rotation_and_its_series_is_close() {
        let skew = skew_of(&[0.1], 2, &PLAIN, 1);
        let exact = rotated(skew.clone(), 2, None);
        assert!((exact[0] * exact[0] + exact[1] * exact[1] - 1.0).abs() < 1e-6);
        // PEFT's series approximates the inverse rotation.
        let series = rotated(skew, 2, Some(5));
        assert!((exact[0] - series[0]).abs() < 1e-3 && (exact[1] + series[1]).abs() < 1e-3, "{exact:?} {series:?}");
    }

    #[test]
    fn a_bound_is_on_the_norm_of_a_block() {
        let skew = skew_of(&[3.0], 2, &Rotation { bound: Some(1.0), ..PLAIN }, 4);
        assert!((skew.iter().map(|q| q * q).sum::<f64>().sqrt() - 0.5).abs() < 1e-12);
    }

    #[test]
    fn the_butterfly_sorts_half_blocks() {
        assert_eq!(butterfly(2, 4, 0).unwrap(), [0, 1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(butterfly(2, 4, 1).unwrap(), [0, 1, 4, 5, 2, 3, 6, 7]);
        assert_eq!(butterfly(3, 4, 1), None);
        assert_eq!(butterfly(2, 3, 1), None);
    }
}
