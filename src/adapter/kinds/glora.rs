//! GLoRA: a change that depends on the weight, and one that does not.

use super::{Building, Pending};
use crate::adapter::Factor;
use crate::adapter::names::keys::Part;
use crate::error::Result;
use crate::patch::{Delta, Linear, Product};

impl Building<'_, '_> {
    /// `D = W a1 a2 + b1 b2`, or in the older layout `b2 b1 + W a2 a1`.
    pub(super) fn glora(&mut self) -> Result<()> {
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
            let inner = if shape.len() > 1 { self.weight.cols.checked_div(channels).unwrap_or(0) } else { 1 };
            (a1m, a2m, b1m, b2m, inner.max(1), &b1)
        } else if older {
            (a2m, a1m, b2m, b1m, 1, &b2)
        } else {
            return Err(self.parts.shape_fault(&a1, format!("`{}` in either layout", a2.key), &a2.shape));
        };
        let left = self.parts.own_rows(out, left)?;
        let rows = self.parts.rows_of(out, left.rows, &self.weight)?;
        let channels = self.weight.cols / inner;
        if [first.rows, second.cols, right.cols / inner] != [channels; 3] || right.cols != self.weight.cols {
            return Err(self.shape_mismatch(&a1));
        }
        let ratio = self.parts.ratio(second.rows)?;
        let base = Product { up: left, down: right };
        let delta = Delta::Linear(Box::new(Linear { first, second, base, inner }));
        self.place(Pending { kind: "GLoRA", rows, delta, ratio, transposed: false })
    }
}
