//! LoKr: the Kronecker product of two matrices, each given whole or as a product.

use super::{Building, Pending};
use crate::adapter::Factor;
use crate::adapter::config::{FactorSource, ScaleFactor};
use crate::adapter::names::keys::Part;
use crate::adapter::names::rows::RowOrder;
use crate::error::Result;
use crate::patch::{Delta, Kronecker, Matrix};

impl Building<'_, '_> {
    /// `D = kron(w1, w2)`, each given whole or as a product, w2 also with a core t2. Where both are given whole, an alpha says
    /// nothing, but a configuration of PEFT's does.
    pub(super) fn lokr(&mut self) -> Result<()> {
        let need = |part, beside: &[Part]| self.parts.need(part, self.parts.any_of(beside));
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
        let (w1, w2) = match self.parts.target.order {
            RowOrder::Transposed => (w1.transposed(), w2.transposed()),
            _ => (w1, w2),
        };
        let all = w1.rows.saturating_mul(w2.rows);
        let source = self.parts.source_rows(&w1_factor, all)?;
        let rows = self.parts.rows_of(&w1_factor, source.as_ref().map_or(all, Vec::len), &self.weight)?;
        if w1.cols.checked_mul(w2.cols) != Some(self.weight.cols) {
            return Err(self.shape_mismatch(&w2_factor));
        }
        let delta = Delta::Kronecker(Box::new(Kronecker { left: w1, right: w2, source }));
        let ratio = match rank {
            None if self.parts.adapter.config.is_none() => ScaleFactor { value: 1.0, source: FactorSource::Nothing },
            rank => self.parts.ratio(rank.unwrap_or(1) as usize)?,
        };
        self.place(Pending { kind: "LoKr", rows, delta, ratio, transposed: false })
    }

    fn multiplied(&self, a: &Factor, b: &Factor) -> Result<Matrix> {
        let (left, right) = (a.flat(), b.flat());
        if left.cols != right.rows {
            return Err(self.parts.shape_fault(a, format!("`{}`", b.key), &b.shape));
        }
        let most = self.parts.target.slice.map_or(self.weight.rows, |slice| slice.of as usize);
        let (most, wide) = match self.parts.target.order {
            RowOrder::Transposed => (self.weight.cols, self.weight.rows),
            _ => (most, self.weight.cols),
        };
        if left.rows > most || right.cols > wide {
            return Err(self.shape_mismatch(a));
        }
        Ok(left.times(&right))
    }
}
