//! Rows of tensors, wherever these live: of a table that is used in place, those that are looked up.

use std::ops::Range;

use super::model::Model;
use super::read_back::TensorView;
use crate::error::{Error, Measured, Missing, NoRows, Result, TensorShape};

impl TensorView<'_> {
    /// The bytes of one of its rows, of which its first dimension is the number.
    ///
    /// # Errors
    /// [`Error::Missing`] for a scalar, and where a row is no whole number of bytes.
    pub fn row_bytes(&self) -> Result<u64> {
        let info = self.info();
        let none = |why| {
            let (name, dtype, shape) = (info.name.clone(), info.dtype, info.shape.clone());
            Missing::Rows { tensor: TensorShape { name, dtype, shape }, why }.into()
        };
        let Some((_, row)) = info.shape.split_first() else { return Err(none(NoRows::Scalar)) };
        info.dtype.bytes_of(row).ok_or_else(|| none(NoRows::PartOfAByte))
    }

    /// Where these rows are in its buffer, in their order; those that follow each other in one.
    pub(crate) fn rows(&self, rows: &[u64]) -> Result<Vec<Range<usize>>> {
        let (bytes, info) = (self.row_bytes()? as usize, self.info());
        let count = info.shape.first().copied().unwrap_or(0);
        let mut ranges: Vec<Range<usize>> = Vec::new();
        for &row in rows {
            if row >= count {
                return Err(Missing::Row { tensor: info.name.clone(), row, count }.into());
            }
            let begin = self.byte_range().start + row as usize * bytes;
            match ranges.last_mut() {
                Some(last) if last.end == begin => last.end += bytes,
                _ => ranges.push(begin..begin + bytes),
            }
        }
        Ok(ranges)
    }
}

impl Model {
    /// Copies rows of the tensor `name` to host memory, wherever it lives: of its first dimension those at `rows`, in this
    /// order, any of them more than once. `dst` has to be as long as they are together. Of a table that is used in place on
    /// the host nothing else is read.
    ///
    /// ```
    /// # use tensor_offload::backend::Clock;
    /// # use tensor_offload::{Checkpoint, Loader, Machine, Planner, Registry, Weights};
    /// # let path = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/data/tiny-llama");
    /// # let machine = Machine::described(&["cuda:0=256kb".parse()?, "cpu=64mb".parse()?]);
    /// # let devices = Registry::described(machine, Clock::Virtual);
    /// # let weights = Weights::new(Checkpoint::open(path)?);
    /// let planner = Planner::new(weights.layout(), devices.machine()).allocation("cpu,*".parse()?);
    /// let plan = planner.gather_embeddings(true).plan()?;
    /// let model = Loader::new(&devices).load(&weights, &plan)?;
    /// let table = model.tensor("model.embed_tokens.weight").expect("every Llama has one");
    /// let tokens = [3, 1, 4, 1];
    /// let mut rows = vec![0; tokens.len() * table.row_bytes()? as usize];
    /// model.read_rows("model.embed_tokens.weight", &tokens, &mut rows)?;
    /// # Ok::<(), tensor_offload::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Missing`] when there is no such tensor, when it has fewer rows, and as [`TensorView::row_bytes`];
    /// [`Error::WrongSize`] when `dst` is of another length; whatever the copy meets.
    pub fn read_rows(&self, name: &str, rows: &[u64], dst: &mut [u8]) -> Result<()> {
        let view = self.tensor(name).ok_or_else(|| Missing::Tensor { name: name.to_owned(), layer: None })?;
        let ranges = view.rows(rows)?;
        let needed = ranges.iter().fold(0u64, |sum, range| sum.saturating_add(range.len() as u64));
        if needed != dst.len() as u64 {
            let what = Measured::Rows { name: name.to_owned(), rows: rows.len() };
            return Err(Error::WrongSize { what, needed, given: dst.len() as u64 });
        }
        self.gather(&view, &ranges, dst)
    }
}
