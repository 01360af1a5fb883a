//! Rows of tensors on any device, such as the looked-up rows of an embedding used in place.

use std::ops::Range;

use super::model::Model;
use super::read_back::TensorView;
use crate::error::{Error, Measured, Missing, NoRows, Result, TensorShape};

impl TensorView<'_> {
    /// The bytes of one row. The first dimension is the number of rows.
    ///
    /// # Errors
    /// [`Error::Missing`] for a scalar, and when a row is not a whole number of bytes, or of blocks.
    pub fn row_bytes(&self) -> Result<u64> {
        let info = self.info();
        let none = |why| {
            let (name, dtype, shape) = (info.name.clone(), info.dtype, info.shape.clone());
            Missing::Rows { tensor: TensorShape { name, dtype, shape }, why }.into()
        };
        let Some((_, row)) = info.shape.split_first() else { return Err(none(NoRows::Scalar)) };
        info.dtype
            .bytes_of(row)
            .ok_or_else(|| none(if info.dtype.is_ggml_block() { NoRows::PartOfABlock } else { NoRows::PartOfAByte }))
    }

    /// The byte ranges of these rows in the buffer, in their order. Adjacent rows share one range.
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
    /// Copies rows of the tensor `name` to host memory, wherever it lives: those at the indices `rows` of the first dimension,
    /// in this order; an index may occur more than once. `dst` must be as long as the rows together. Nothing else of the
    /// tensor is read.
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
    /// [`Error::WrongSize`] when `dst` is of another length; any error of the copy.
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
