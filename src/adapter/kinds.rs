//! The kinds of adapters that are made of factors: their shapes checked, their factors laid out as steps.
//!
//! The formulas are those of ComfyUI's weight adapters (`comfy/weight_adapter`, 2025-10) and, where a configuration
//! stands beside the factors, of PEFT's LoRA layers (0.21).

use std::ops::Range;
use std::sync::Arc;

use super::build::{Building, matrix_of};
use super::families::RowOrder;
use super::keys::Part;
use super::matrix::{Factor, Matrix};
use super::step::{Axis, Change, Delta, Dora, Linear, Product, Step};
use crate::error::{AdapterFault, Result};

/// A change of some rows that waits for its place: given the first row, the factors packed.
struct Pending<'f> {
    kind: &'static str,
    rows: Range<usize>,
    delta: &'f dyn Fn(usize) -> Delta,
    /// alpha / rank.
    ratio: f64,
    /// Whether D applies transposed, so that PEFT's magnitudes belong to columns.
    transposed: bool,
}

impl Building<'_, '_> {
    /// All factors that the module has.
    pub(super) fn factors(&mut self) -> Result<()> {
        let parts = self.parts;
        let any = |of: &[Part]| of.iter().any(|&part| parts.has(part));
        if any(&[Part::Up, Part::Down]) {
            self.lora(Part::Up, Part::Down)?;
        }
        if any(&[Part::EmbeddingUp, Part::EmbeddingDown]) {
            self.lora(Part::EmbeddingUp, Part::EmbeddingDown)?;
        }
        if any(&[Part::HadaW1A, Part::HadaW1B, Part::HadaW2A, Part::HadaW2B]) {
            self.loha()?;
        }
        if any(&[Part::LokrW1, Part::LokrW1A, Part::LokrW1B, Part::LokrW2, Part::LokrW2A, Part::LokrW2B]) {
            self.lokr()?;
        }
        if any(&[Part::GloraA1, Part::GloraA2, Part::GloraB1, Part::GloraB2]) {
            self.glora()?;
        }
        if any(&[Part::OftBlocks]) { self.oft() } else { Ok(()) }
    }

    /// LoRA and LoCon: `D = reshape(flat(up) flat(down))`.
    fn lora(&mut self, up_part: Part, down_part: Part) -> Result<()> {
        let (up, mut down) = (self.parts.need(up_part, down_part)?, self.parts.need(down_part, up_part)?);
        self.pad()?;
        if let Some(wanted) = self.parts.peft_rank().filter(|&rank| down.shape.first() != Some(&(rank as u64))) {
            return Err(self.parts.shape_fault(&down, "the rank in adapter_config.json", &[wanted as u64]));
        }
        if let Some(mid) = self.parts.read(Part::Mid)? {
            down = self.fold_mid(&down, &mid)?;
        }
        let (left, right) = (up.flat(), down.flat());
        let rank = right.rows;
        if left.cols != rank {
            return Err(self.parts.shape_fault(&up, format!("`{}`", down.key), &down.shape));
        }
        let is_embedding = up_part == Part::EmbeddingUp;
        let other_way = self.target.order == RowOrder::Transposed;
        let config = self.parts.adapter.config.as_ref().is_some_and(|config| config.transposed);
        let transposed = (config != other_way) || is_embedding;
        let (left, right, up, down) =
            if transposed { (right.transposed(), left.transposed(), &down, &up) } else { (left, right, &up, &down) };
        if transposed && (!other_way || is_embedding) {
            self.parts.needs_rows_as_they_are(self.target, up_part, "transposed LoRA")?;
        }
        let left = self.parts.own_rows(self.target, up, left)?;
        let rows = self.parts.rows_of(self.target, up, left.rows, &self.weight, self.rows)?;
        if right.cols != self.cols {
            return Err(self.fits_not(down));
        }
        if is_embedding && self.parts.has(Part::Magnitude) {
            let kind = "DoRA of an embedding".to_owned();
            return Err(self.parts.fault(Part::Magnitude, AdapterFault::Unsupported { kind }));
        }
        let delta = |first_row| Delta::Product(Product::pack(&left, &right, first_row));
        let ratio = self.parts.ratio(rank)?;
        self.place(&Pending { kind: "LoRA", rows, delta: &delta, ratio, transposed })
    }

    /// LoCon's third factor: `down' = (flat(down^T) flat(mid^T))` reshaped [in, r, kh, kw], axes 0 and 1 swapped.
    fn fold_mid(&self, down: &Factor, mid: &Factor) -> Result<Factor> {
        let (left, right) = (down.swapped().flat(), mid.swapped().flat());
        let [outer, _, kernel @ ..] = mid.shape.as_slice() else {
            return Err(self.parts.shape_fault(mid, format!("`{}`", down.key), &down.shape));
        };
        if left.cols != right.rows || down.shape.len() < 2 || left.rows > self.cols {
            return Err(self.parts.shape_fault(mid, format!("`{}`", down.key), &down.shape));
        }
        let mut shape = vec![left.rows as u64, *outer];
        shape.extend_from_slice(kernel);
        Ok(Factor { key: down.key.clone(), shape, values: left.times(&right).values }.swapped())
    }

    /// `reshape_weight`: the weight is padded with zeros to that shape first.
    fn pad(&mut self) -> Result<()> {
        let Some((factor, to)) = self.parts.read_shape(Part::ReshapeWeight)? else { return Ok(()) };
        let from = self.weight.shape.clone();
        let grows = to.len() == from.len() && to.iter().zip(&from).all(|(to, from)| to >= from);
        let matrix =
            matrix_of(&to).filter(|_| grows && self.target.share.is_none() && self.target.takes_rows_as_they_are());
        let Some((rows, cols)) = matrix else {
            let what = format!("padding of the target `{}`", self.weight.name);
            let fault = AdapterFault::Shape { found: to, what, wanted: from };
            return Err(self.parts.fault(factor, fault));
        };
        if to != from {
            self.steps.push(Step { rows: 0..0, change: Change::Pad { from, to: to.clone() } });
            (self.weight.shape, self.rows, self.cols) = (to, rows, cols);
        }
        Ok(())
    }

    /// `D = (w1a w1b) o (w2a w2b)`; with t1 and t2 each product is einsum('ijkl,jr,ip->prkl', t, wb, wa).
    fn loha(&mut self) -> Result<()> {
        let need = |part| self.parts.need(part, self.parts.any_of(&[Part::HadaW1A, Part::HadaW1B, Part::HadaW2A]));
        let (w1a, w1b) = (need(Part::HadaW1A)?, need(Part::HadaW1B)?);
        let (w2a, w2b) = (need(Part::HadaW2A)?, need(Part::HadaW2B)?);
        let tuckers = match (self.parts.read(Part::HadaT1)?, self.parts.read(Part::HadaT2)?) {
            (None, None) => [None, None],
            (t1, t2) => {
                [Some(t1.map_or_else(|| need(Part::HadaT1), Ok)?), Some(t2.map_or_else(|| need(Part::HadaT2), Ok)?)]
            }
        };
        let mut factors = Vec::new();
        for ((a, b), t) in [(&w1a, &w1b), (&w2a, &w2b)].into_iter().zip(&tuckers) {
            let (left, right) = match t {
                Some(t) => self.fold_tucker(t, a, b)?,
                None => (a.flat(), b.flat()),
            };
            if left.cols != right.rows {
                return Err(self.parts.shape_fault(a, format!("`{}`", b.key), &b.shape));
            }
            if right.cols != self.cols {
                return Err(self.fits_not(b));
            }
            let left = self.parts.own_rows(self.target, a, left)?;
            self.parts.rows_of(self.target, a, left.rows, &self.weight, self.rows)?;
            factors.push((left, right));
        }
        let rows = self.parts.rows_of(self.target, &w1a, factors[0].0.rows, &self.weight, self.rows)?;
        let pack = |of: usize, first_row| Product::pack(&factors[of].0, &factors[of].1, first_row);
        let delta = |first_row| Delta::Hadamard(Box::new([pack(0, first_row), pack(1, first_row)]));
        let ratio = self.parts.ratio(w1b.shape.first().map_or(1, |&r| r as usize))?;
        self.place(&Pending { kind: "LoHa", rows, delta: &delta, ratio, transposed: false })
    }

    /// einsum('ijkl,jr,ip->prkl', t, b, a) as the product of [p, i] and [i, r k l].
    fn fold_tucker(&self, t: &Factor, a: &Factor, b: &Factor) -> Result<(Matrix, Matrix)> {
        let (left, right) = (a.flat(), b.flat());
        let fits = t.shape.len() > 2 && [t.shape[0], t.shape[1]] == [left.rows as u64, right.rows as u64];
        if !fits {
            return Err(self.parts.shape_fault(t, format!("`{}` and `{}`", a.key, b.key), &a.shape));
        }
        let (count, inner) = (left.rows, t.values.len() / left.rows);
        if left.cols > self.rows || right.cols.saturating_mul(inner / right.rows) > self.cols {
            return Err(self.fits_not(b));
        }
        let across = right.transposed();
        let each = t.values.chunks_exact(inner).map(|values| {
            let core = Matrix { rows: right.rows, cols: inner / right.rows, values: values.to_vec() };
            across.times(&core).values
        });
        let values: Vec<f32> = each.flatten().collect();
        Ok((left.transposed(), Matrix { rows: count, cols: values.len() / count, values }))
    }

    /// `D = kron(w1, w2)`, each given whole or as a product, w2 also with a core t2.
    fn lokr(&mut self) -> Result<()> {
        let need = |part, beside: &[Part]| self.parts.need(part, self.parts.any_of(beside));
        let part = self.parts.any_of(&[Part::LokrW1, Part::LokrW1A, Part::LokrW1B, Part::LokrW2, Part::LokrW2A]);
        self.parts.needs_rows_as_they_are(self.target, part, "LoKr")?;
        let (w1_given, w2_given) = (self.parts.read(Part::LokrW1)?, self.parts.read(Part::LokrW2)?);
        let mut rank = None;
        let (w1, w1_factor) = match w1_given {
            Some(w1) => (w1.flat(), w1),
            None => {
                let a = need(Part::LokrW1A, &[Part::LokrW1B, Part::LokrW2, Part::LokrW2A])?;
                let b = need(Part::LokrW1B, &[Part::LokrW1A])?;
                rank = b.shape.first().copied();
                (self.multiplied(&a, &b)?, a)
            }
        };
        let (w2, w2_factor) = match w2_given {
            Some(w2) => (w2.flat(), w2),
            None => {
                let a = need(Part::LokrW2A, &[Part::LokrW2B, Part::LokrW1, Part::LokrW1A])?;
                let b = need(Part::LokrW2B, &[Part::LokrW2A])?;
                rank = b.shape.first().copied();
                let w2 = match self.parts.read(Part::LokrT2)? {
                    Some(t2) => self.fold_tucker(&t2, &a, &b).map(|(left, right)| left.times(&right))?,
                    None => self.multiplied(&a, &b)?,
                };
                (w2, a)
            }
        };
        let rows = w1.rows.saturating_mul(w2.rows);
        let rows = self.parts.rows_of(self.target, &w1_factor, rows, &self.weight, self.rows)?;
        if w1.cols.checked_mul(w2.cols) != Some(self.cols) {
            return Err(self.fits_not(&w2_factor));
        }
        let delta = |_| Delta::Kronecker(w1.clone(), w2.clone());
        let ratio = rank.map_or(Ok(1.0), |rank| self.parts.ratio(rank as usize))?;
        self.place(&Pending { kind: "LoKr", rows, delta: &delta, ratio, transposed: false })
    }

    fn multiplied(&self, a: &Factor, b: &Factor) -> Result<Matrix> {
        let (left, right) = (a.flat(), b.flat());
        if left.cols != right.rows {
            return Err(self.parts.shape_fault(a, format!("`{}`", b.key), &b.shape));
        }
        if left.rows > self.rows || right.cols > self.cols {
            return Err(self.fits_not(a));
        }
        Ok(left.times(&right))
    }

    /// `D = W a1 a2 + b1 b2`, or in the older layout `b2 b1 + W a2 a1`.
    fn glora(&mut self) -> Result<()> {
        let need = |part| {
            let beside = [Part::GloraA1, Part::GloraA2, Part::GloraB1, Part::GloraB2];
            self.parts.need(part, self.parts.any_of(&beside))
        };
        let [a1, a2] = [need(Part::GloraA1)?, need(Part::GloraA2)?];
        let [b1, b2] = [need(Part::GloraB1)?, need(Part::GloraB2)?];
        let [a1m, a2m, b1m, b2m] = [&a1, &a2, &b1, &b2].map(Factor::flat);
        let all = |sizes: [usize; 4]| sizes.iter().all(|&size| size == sizes[0]);
        let older = all([b2m.cols, b1m.rows, a1m.rows, a2m.cols]);
        let newer = all([b2m.rows, b1m.cols, a1m.cols, a2m.rows]);
        let shape = &self.weight.shape;
        let square = shape.len() > 1 && shape[0] == shape[1] && a2.shape.first() == shape.first();
        let (first, second, left, right, inner, out) = if newer && !(older && square) {
            let channels = shape.get(1).map_or(1, |&channels| channels as usize);
            let inner = if shape.len() > 1 { self.cols.checked_div(channels).unwrap_or(0) } else { 1 };
            (a1m, a2m, b1m, b2m, inner.max(1), &b1)
        } else if older {
            (a2m, a1m, b2m, b1m, 1, &b2)
        } else {
            return Err(self.parts.shape_fault(&a1, format!("`{}` in either layout", a2.key), &a2.shape));
        };
        let left = self.parts.own_rows(self.target, out, left)?;
        let rows = self.parts.rows_of(self.target, out, left.rows, &self.weight, self.rows)?;
        let channels = self.cols / inner;
        if [first.rows, second.cols, right.cols / inner] != [channels; 3] || right.cols != self.cols {
            return Err(self.fits_not(&a1));
        }
        let ratio = self.parts.ratio(second.rows)?;
        let delta = |first_row| {
            let base = Product::pack(&left, &right, first_row);
            Delta::Linear(Box::new(Linear { first: first.clone(), second: second.clone(), base, inner }))
        };
        self.place(&Pending { kind: "GLoRA", rows, delta: &delta, ratio, transposed: false })
    }

    /// Adds D at its scale, or takes it into a decomposition.
    fn place(&mut self, pending: &Pending<'_>) -> Result<()> {
        let dora = match self.parts.read(Part::DoraScale)? {
            Some(magnitude) => Some(self.comfy_dora(magnitude, pending)?),
            None => self.peft_dora(pending)?,
        };
        let scale = self.parts.finite_scale(pending.ratio)?;
        self.push(pending.kind, pending.rows.clone(), |rows| match dora {
            Some(dora) => Change::Decompose(dora),
            None => Change::Add { delta: Arc::new((pending.delta)(rows.start)), scale },
        });
        Ok(())
    }

    /// `dora_scale`: norms of the original rows, or of the changed channels where it does not have one for each row.
    fn comfy_dora(&self, magnitude: Factor, pending: &Pending<'_>) -> Result<Dora> {
        self.parts.needs_rows_as_they_are(self.target, Part::DoraScale, "DoRA")?;
        let rows = pending.rows.len();
        let channels = self.weight.shape.get(1).map_or(0, |&channels| channels as usize);
        let by_rows = magnitude.shape.first() == Some(&(rows as u64)) && magnitude.values.len() == rows;
        if !by_rows && magnitude.values.len() != channels {
            return Err(self.fits_not(&magnitude));
        }
        let axis = if by_rows { Axis::Rows } else { Axis::Columns { inner: self.cols / channels.max(1) } };
        Ok(self.decomposed(magnitude, axis, by_rows, f32::EPSILON, pending))
    }

    /// `lora_magnitude_vector`: norms of the changed rows (columns of a transposed weight).
    fn peft_dora(&self, pending: &Pending<'_>) -> Result<Option<Dora>> {
        let config = self.parts.adapter.config.as_ref();
        let Some(magnitude) = self.parts.read(Part::Magnitude)? else {
            if config.is_some_and(|config| config.dora) && pending.kind == "LoRA" {
                let missing = format!("{}.lora_magnitude_vector", self.parts.module.name);
                return Err(self.parts.fault(Part::Up, AdapterFault::Incomplete { missing }));
            }
            return Ok(None);
        };
        if config.is_some_and(|config| !config.dora) {
            let reason = "use_dora is not set, yet there is a magnitude".to_owned();
            return Err(self.parts.fault(Part::Magnitude, AdapterFault::Config { reason }));
        }
        let magnitude = self.parts.own_part(self.target, magnitude)?;
        let (axis, count) =
            if pending.transposed { (Axis::Columns { inner: 1 }, self.cols) } else { (Axis::Rows, pending.rows.len()) };
        if magnitude.values.len() != count {
            return Err(self.fits_not(&magnitude));
        }
        Ok(Some(self.decomposed(magnitude, axis, false, 0.0, pending)))
    }

    fn decomposed(
        &self,
        magnitude: Factor,
        axis: Axis,
        of_original: bool,
        epsilon: f32,
        pending: &Pending<'_>,
    ) -> Dora {
        let first_row = if axis == Axis::Rows { pending.rows.start } else { 0 };
        Dora {
            delta: Arc::new((pending.delta)(first_row)),
            ratio: pending.ratio as f32,
            magnitude: magnitude.values,
            axis,
            of_original,
            epsilon,
            strength: self.parts.adapter.strength,
        }
    }
}
