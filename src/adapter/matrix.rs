//! An adapter's factors as f32, and the small algebra that prepares them.

use super::Adapter;
use crate::dtype::DType;
use crate::error::{AdapterFault, Error, Result};
use crate::float::Float;

/// A matrix, row by row.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Matrix {
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) values: Vec<f32>,
}

impl Matrix {
    pub(crate) fn row(&self, row: usize) -> &[f32] {
        &self.values[row * self.cols..][..self.cols]
    }

    pub(crate) fn transposed(&self) -> Matrix {
        let at = |index: usize| self.values[index % self.rows * self.cols + index / self.rows];
        let values = (0..self.values.len()).map(at).collect();
        Matrix { rows: self.cols, cols: self.rows, values }
    }

    /// `self other`, each element summed in order; `self.cols` is `other.rows`. Multiply and add are apart, since
    /// this runs without choice of an instruction set, where a fused one may be a call.
    pub(crate) fn times(&self, other: &Matrix) -> Matrix {
        let mut values = vec![0.0f32; self.rows * other.cols];
        if other.cols > 0 {
            for (row, out) in values.chunks_exact_mut(other.cols).enumerate() {
                for (k, &left) in self.row(row).iter().enumerate() {
                    out.iter_mut().zip(other.row(k)).for_each(|(sum, &right)| *sum += left * right);
                }
            }
        }
        Matrix { rows: self.rows, cols: other.cols, values }
    }
}

/// One tensor of an adapter, lifted to f32; it has at least one value, and all are finite.
#[derive(Clone, Debug)]
pub(crate) struct Factor {
    /// Its key in the adapter.
    pub(crate) key: String,
    pub(crate) shape: Vec<u64>,
    pub(crate) values: Vec<f32>,
}

impl Factor {
    /// Reads tensor number `index` of an adapter.
    ///
    /// # Errors
    /// [`AdapterFault::Shape`] when it is empty, [`AdapterFault::BadDType`] for integers, [`AdapterFault::NotFinite`] with the first such element, and what
    /// reading the file returns.
    pub(crate) fn read(adapter: &Adapter, index: usize) -> Result<Factor> {
        let info = &adapter.checkpoint.layout().tensors[index];
        let fault = |fault| Error::adapter(&adapter.path, Some(&info.name), fault);
        let bytes = adapter.bytes(index)?;
        if bytes.is_empty() {
            let what = "a factor, which has elements,".to_owned();
            return Err(fault(AdapterFault::Shape { found: info.shape.clone(), what, wanted: vec![] }));
        }
        let values = match (info.dtype, Float::of(info.dtype)) {
            (_, Some(float)) => {
                let mut values = vec![0.0; bytes.len() / float.size()];
                float.lift(&bytes, &mut values);
                values
            }
            (DType::F64, _) => bytes.as_chunks().0.iter().map(|raw| f64::from_le_bytes(*raw) as f32).collect(),
            (dtype, _) => return Err(fault(AdapterFault::BadDType { what: "it".to_owned(), dtype })),
        };
        if let Some(index) = values.iter().position(|value| !value.is_finite()) {
            let value = values[index].to_string();
            return Err(fault(AdapterFault::NotFinite { index: index as u64, value }));
        }
        Ok(Factor { key: info.name.clone(), shape: info.shape.clone(), values })
    }

    /// The factor as a matrix of its first dimension by all others.
    pub(crate) fn flat(&self) -> Matrix {
        let rows = self.shape.first().map_or(1, |&rows| rows as usize);
        let cols = self.values.len().checked_div(rows).unwrap_or(0);
        Matrix { rows, cols, values: self.values.clone() }
    }

    /// The same with its first two dimensions swapped; a factor of fewer dimensions stays as it is.
    pub(crate) fn swapped(&self) -> Factor {
        let mut shape = self.shape.clone();
        let [a, b, ..] = shape[..] else { return self.clone() };
        shape.swap(0, 1);
        let (a, b) = (a as usize, b as usize);
        let inner = self.values.len().checked_div(a * b).unwrap_or(0);
        let mut values = Vec::with_capacity(self.values.len());
        for place in 0..b {
            for outer in 0..a {
                values.extend_from_slice(&self.values[(outer * b + place) * inner..][..inner]);
            }
        }
        Factor { key: self.key.clone(), shape, values }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_algebra() {
        let a = Matrix { rows: 2, cols: 3, values: vec![1., 2., 3., 4., 5., 6.] };
        assert_eq!(a.transposed().values, [1., 4., 2., 5., 3., 6.]);
        assert_eq!(a.times(&a.transposed()).values, [14., 32., 32., 77.]);
        let factor = Factor { key: String::new(), shape: vec![2, 3, 1], values: a.values.clone() };
        assert_eq!((factor.swapped().shape, factor.swapped().values), (vec![3, 2, 1], a.transposed().values));
        assert_eq!((factor.flat().rows, factor.flat().cols), (2, 3));
    }
}
