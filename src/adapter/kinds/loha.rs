//! LoHa: two products of factors, multiplied element by element.

use super::{Building, Pending};
use crate::adapter::Factor;
use crate::adapter::names::keys::Part;
use crate::error::Result;
use crate::patch::{Delta, Matrix, Product};

impl Building<'_, '_> {
    /// `D = (w1a w1b) o (w2a w2b)`; with t1 and t2 each product is einsum('ijkl,jr,ip->prkl', t, wb, wa).
    pub(super) fn loha(&mut self) -> Result<()> {
        let need = |part| self.parts.need(part, self.parts.any_of(&[Part::HadaW1A, Part::HadaW1B, Part::HadaW2A]));
        let (w1a, w1b) = (need(Part::HadaW1A)?, need(Part::HadaW1B)?);
        let (w2a, w2b) = (need(Part::HadaW2A)?, need(Part::HadaW2B)?);
        let cores = match (self.parts.read(Part::HadaT1)?, self.parts.read(Part::HadaT2)?) {
            (None, None) => [None, None],
            (t1, t2) => {
                [Some(t1.map_or_else(|| need(Part::HadaT1), Ok)?), Some(t2.map_or_else(|| need(Part::HadaT2), Ok)?)]
            }
        };
        let [core1, core2] = &cores;
        let first = self.product(&w1a, &w1b, core1.as_ref())?;
        let second = self.product(&w2a, &w2b, core2.as_ref())?;
        let rows = self.parts.rows_of(&w1a, first.up.rows, &self.weight)?;
        let ratio = self.parts.ratio(w1b.shape.first().map_or(1, |&r| r as usize))?;
        let delta = Delta::Hadamard(Box::new([first, second]));
        self.place(Pending { kind: "LoHa", rows, delta, ratio, transposed: false })
    }

    /// One of the two products.
    fn product(&self, a: &Factor, b: &Factor, core: Option<&Factor>) -> Result<Product> {
        let (left, right) = match core {
            Some(core) => self.fold_tucker(core, a, b)?,
            None => (a.flat(), b.flat()),
        };
        if left.cols != right.rows {
            return Err(self.parts.shape_fault(a, format!("`{}`", b.key), &b.shape));
        }
        if right.cols != self.weight.cols {
            return Err(self.shape_mismatch(b));
        }
        let left = self.parts.own_rows(a, left)?;
        self.parts.rows_of(a, left.rows, &self.weight)?;
        Ok(Product { up: left, down: right })
    }

    /// einsum('ijkl,jr,ip->prkl', t, b, a) as the product of [p, i] and [i, r k l].
    pub(super) fn fold_tucker(&self, t: &Factor, a: &Factor, b: &Factor) -> Result<(Matrix, Matrix)> {
        let (left, right) = (a.flat(), b.flat());
        let fits = t.shape.len() > 2 && [t.shape[0], t.shape[1]] == [left.rows as u64, right.rows as u64];
        if !fits {
            return Err(self.parts.shape_fault(t, format!("`{}` and `{}`", a.key, b.key), &a.shape));
        }
        let (count, inner) = (left.rows, t.values.len() / left.rows);
        if left.cols > self.weight.rows || right.cols.saturating_mul(inner / right.rows) > self.weight.cols {
            return Err(self.shape_mismatch(b));
        }
        let across = right.transposed();
        let each = t.values.chunks_exact(inner).map(|values| {
            let core = Matrix { rows: right.rows, cols: inner / right.rows, values: values.to_vec() };
            across.times(&core).values
        });
        let values: Vec<f32> = each.flatten().collect();
        Ok((left.transposed(), Matrix { rows: count, cols: values.len() / count, values }))
    }
}
