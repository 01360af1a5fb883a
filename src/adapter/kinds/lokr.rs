//! LoKr: the Kronecker product of two matrices, each given whole or as a product.

use super::{Building, Pending};
use crate::adapter::Factor;
use crate::adapter::names::keys::Part;
use crate::error::Result;
use crate::patch::{Delta, Matrix};

impl Building<'_, '_> {
    /// `D = kron(w1, w2)`, each given whole or as a product, w2 also with a core t2.
    pub(super) fn lokr(&mut self) -> Result<()> {
        let need = |part, beside: &[Part]| self.parts.need(part, self.parts.any_of(beside));
        let part = self.parts.any_of(&[Part::LokrW1, Part::LokrW1A, Part::LokrW1B, Part::LokrW2, Part::LokrW2A]);
        self.parts.needs_rows_as_they_are(part, "LoKr")?;
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
        let rows = self.parts.rows_of(&w1_factor, rows, &self.weight)?;
        if w1.cols.checked_mul(w2.cols) != Some(self.weight.cols) {
            return Err(self.shape_mismatch(&w2_factor));
        }
        let delta = Delta::Kronecker(w1, w2);
        let ratio = rank.map_or(Ok(1.0), |rank| self.parts.ratio(rank as usize))?;
        self.place(Pending { kind: "LoKr", rows, delta, ratio, transposed: false })
    }

    fn multiplied(&self, a: &Factor, b: &Factor) -> Result<Matrix> {
        let (left, right) = (a.flat(), b.flat());
        if left.cols != right.rows {
            return Err(self.parts.shape_fault(a, format!("`{}`", b.key), &b.shape));
        }
        if left.rows > self.weight.rows || right.cols > self.weight.cols {
            return Err(self.shape_mismatch(a));
        }
        Ok(left.times(&right))
    }
}
