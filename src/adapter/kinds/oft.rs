//! OFT: blocks of output rows, each turned by an orthogonal matrix.

use super::Building;
use crate::adapter::Factor;
use crate::adapter::names::keys::Part;
use crate::adapter::names::rows::RowOrder;
use crate::error::{AdapterFault, Result};
use crate::patch::Step;

impl Building<'_, '_> {
    /// From blocks B: `Q = B - B^T`, shrunk to a norm of alpha over all blocks where there is an alpha;
    /// `R = (I + Q) (I - Q)^-1`; per block `W += s (s (R - I))^T W` (the strength lands twice, as in ComfyUI).
    pub(super) fn oft(&mut self) -> Result<()> {
        let Some(blocks) = self.parts.read(Part::OftBlocks)? else { return Ok(()) };
        let unsupported = |kind: &str| {
            let fault = AdapterFault::Unsupported { kind: kind.to_owned() };
            Err(self.parts.fault(Part::OftBlocks, fault))
        };
        let [count, size, width] = match blocks.shape[..] {
            [count, size, width] => [count, size, width].map(|n| n as usize),
            [_, _, _, _] => return unsupported("BOFT"),
            _ => return Err(self.shape_mismatch(&blocks)),
        };
        if self.parts.has(Part::DoraScale) {
            return unsupported("OFT with DoRA");
        }
        if self.parts.target.order == RowOrder::Transposed {
            self.parts.needs_rows_as_they_are(Part::OftBlocks, "OFT")?;
        }
        if size != width {
            return Err(self.parts.shape_fault(&blocks, "square blocks", &[count as u64, size as u64, size as u64]));
        }
        let own = self.own_blocks(&blocks, count, size)?;
        let own_rows = own.as_ref().map_or(count, Vec::len) * size;
        let rows = self.parts.rows_of(&blocks, own_rows, &self.weight)?;
        let mut skew = blocks.values.clone();
        for (block, values) in skew.chunks_exact_mut(size * size).zip(blocks.values.chunks_exact(size * size)) {
            for (index, value) in block.iter_mut().enumerate() {
                *value -= values[index % size * size + index / size];
            }
        }
        let alpha = self.parts.alpha()?.unwrap_or(0.0) as f32;
        let norm = skew.iter().map(|&q| f64::from(q) * f64::from(q)).sum::<f64>().sqrt() as f32 + 1e-8;
        if alpha > 0.0 && norm > alpha {
            skew.iter_mut().for_each(|q| *q = *q * alpha / norm);
        }
        let strength = self.parts.adapter.strength;
        let area = size * size;
        let own = own.unwrap_or_else(|| (0..count).collect());
        let turns: Vec<f32> =
            own.iter().flat_map(|&block| turn(&skew[block * area..][..area], size, strength)).collect();
        if let Some(index) = turns.iter().position(|turn| !turn.is_finite()) {
            let fault = AdapterFault::NotFinite { index: index as u64, value: "not finite once inverted".to_owned() };
            return Err(self.parts.fault(Part::OftBlocks, fault));
        }
        self.push("OFT", Step::rotate(rows, size, turns, strength));
        Ok(())
    }

    /// The blocks that the target's rows are made of, if it holds only a part of them, or in another order.
    fn own_blocks(&self, blocks: &Factor, count: usize, size: usize) -> Result<Option<Vec<usize>>> {
        let Some(rows) = self.parts.source_rows(blocks, count * size)? else { return Ok(None) };
        let of_block = |rows: &[usize]| {
            let whole = rows.len() == size && rows[0].is_multiple_of(size);
            (whole && rows.iter().zip(rows[0]..).all(|(row, wanted)| *row == wanted)).then_some(rows[0] / size)
        };
        let own: Option<Vec<usize>> = rows.chunks(size).map(of_block).collect();
        own.map(Some).ok_or_else(|| {
            let kind = format!("OFT whose blocks reach beyond the rows of `{}`: such", self.parts.target.module);
            self.parts.fault(Part::OftBlocks, AdapterFault::Unsupported { kind })
        })
    }
}

/// `s R - s I` for one skew block.
fn turn(skew: &[f32], size: usize, strength: f32) -> Vec<f32> {
    let unit = |index: usize| if index / size == index % size { 1.0 } else { 0.0 };
    let plus: Vec<f64> = skew.iter().enumerate().map(|(index, &q)| unit(index) + f64::from(q)).collect();
    let minus: Vec<f64> = skew.iter().enumerate().map(|(index, &q)| unit(index) - f64::from(q)).collect();
    let inverse = inverted(minus, size);
    (0..size * size)
        .map(|index| {
            let (row, col) = (index / size, index % size);
            let r: f64 = (0..size).map(|k| plus[row * size + k] * inverse[k * size + col]).sum();
            r as f32 * strength - strength * unit(index) as f32
        })
        .collect()
}

/// The inverse by elimination with the largest pivot of each column; `I - Q` of a skew Q always has one.
pub(super) fn inverted(mut matrix: Vec<f64>, size: usize) -> Vec<f64> {
    let mut inverse = vec![0.0; size * size];
    (0..size).for_each(|i| inverse[i * size + i] = 1.0);
    for pivot in 0..size {
        let at = |row: &usize| matrix[row * size + pivot].abs();
        let best = (pivot..size).max_by(|a, b| at(a).total_cmp(&at(b))).unwrap_or(pivot);
        for col in 0..size {
            matrix.swap(pivot * size + col, best * size + col);
            inverse.swap(pivot * size + col, best * size + col);
        }
        let scale = matrix[pivot * size + pivot];
        for col in 0..size {
            matrix[pivot * size + col] /= scale;
            inverse[pivot * size + col] /= scale;
        }
        for row in (0..size).filter(|&row| row != pivot) {
            let factor = matrix[row * size + pivot];
            for col in 0..size {
                matrix[row * size + col] -= factor * matrix[pivot * size + col];
                inverse[row * size + col] -= factor * inverse[pivot * size + col];
            }
        }
    }
    inverse
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_inverse_times_its_matrix_is_one() {
        let matrix = vec![0.0, 2.0, 1.0, 1.0, 0.0, 3.0, 4.0, 1.0, 0.5];
        let inverse = inverted(matrix.clone(), 3);
        for row in 0..3 {
            for col in 0..3 {
                let sum: f64 = (0..3).map(|k| matrix[row * 3 + k] * inverse[k * 3 + col]).sum();
                assert!((sum - f64::from(u8::from(row == col))).abs() < 1e-12);
            }
        }
    }

    #[test]
    fn a_turn_is_a_rotation() {
        let skew = [0.0, 0.5, -0.5, 0.0];
        let turn: Vec<f32> = turn(&skew, 2, 1.0).iter().zip([1.0, 0.0, 0.0, 1.0]).map(|(t, i)| t + i).collect();
        assert!((turn[0] * turn[0] + turn[1] * turn[1] - 1.0).abs() < 1e-6);
        assert!((turn[0] * turn[2] + turn[1] * turn[3]).abs() < 1e-6);
    }
}
