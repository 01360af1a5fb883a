//! Gathers rows of a table where it lives and sends them to the compute device, for lookups in an embedding that is used
//! in place.

use std::ops::Range;
use std::sync::Arc;

use super::Streamer;
use crate::backend::{Buf, BufMut, MemoryKind, Piece, Transfer};
use crate::error::{Error, Missing, Result};
use crate::limits::{STAGING_BUFFERS, STAGING_BYTES};
use crate::load::{Model, TensorView};
use crate::schedule::split;
use crate::staging::Pool;

/// The size of the smallest staging buffers, in bytes.
const SMALLEST: usize = 64 << 10;

impl Streamer {
    /// Sends rows of the tensor `name` to the compute device, wherever the tensor lives. `rows` are indices into its first
    /// dimension; the result has the rows in this order, and a row may appear more than once. The result is available to
    /// work queued on [`compute`](Streamer::compute) from here on.
    ///
    /// Rows of a tensor on another device are gathered on the host, in pinned buffers of the streamer that are used in
    /// turn (four, of at most 16 MiB each), and sent on the compute stream. The memory of the result is not part of the
    /// plan; leave room for it in the plan's [reserve](crate::Planner::reserve). Once the result is dropped, its memory is
    /// freed after the copies: register your own work that uses it with [`record`](crate::backend::Stream::record) first.
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use tensor_offload::backend::Clock;
    /// # use tensor_offload::{Checkpoint, Loader, Machine, Planner, Registry, Streamer, Weights};
    /// # let path = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/data/tiny-llama");
    /// # let machine = Machine::described(&["cuda:0=256kb".parse()?, "cpu=64mb".parse()?]);
    /// # let devices = Registry::described(machine, Clock::Virtual);
    /// # let weights = Weights::new(Checkpoint::open(path)?);
    /// let planner = Planner::new(weights.layout(), devices.machine()).allocation("cpu,*".parse()?).depth(0);
    /// let plan = planner.gather_embeddings(true).plan()?;
    /// let model = Arc::new(Loader::new(&devices).load(&weights, &plan)?);
    /// let mut streamer = Streamer::new(&model)?;
    /// let hidden = streamer.send_rows("model.embed_tokens.weight", &[3, 1, 4, 1])?;
    /// // Queue work that reads `hidden` on `streamer.compute()` here.
    /// streamer.compute().record(&[hidden])?;
    /// # Ok::<(), tensor_offload::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Missing`] when there is no such tensor, when it has fewer rows, and as
    /// [`TensorView::row_bytes`]; [`Error::OutOfMemory`] when the rows or the buffers do not fit;
    /// [`Error::TimedOut`] when no buffer is returned before the deadline; any error of the
    /// copies.
    pub fn send_rows(&mut self, name: &str, rows: &[u64]) -> Result<Buf> {
        self.process.check()?;
        let model = Arc::clone(&self.model);
        let view = model.tensor(name).ok_or_else(|| Missing::Tensor { name: name.to_owned(), layer: None })?;
        let ranges = view.rows(rows)?;
        let device = model.residency().device();
        let bytes = ranges.iter().fold(0usize, |sum, range| sum.saturating_add(range.len()));
        let dst = device.alloc(bytes, MemoryKind::Arena)?;
        if bytes == 0 {
            return Ok(dst.freeze());
        }
        if view.device() != device.id() {
            return self.gather(&model, &view, &ranges, dst);
        }
        let mut at = 0;
        let piece = |from: Range<usize>| {
            at += from.len();
            Piece { src: view.buf().clone(), at: at - from.len(), from }
        };
        let pieces = ranges.into_iter().map(piece).collect();
        Ok(self.compute.send(Transfer::new(pieces, dst)?)?.chain().freeze())
    }

    /// Gathers byte ranges of a view in staging buffers, and sends them to `dst`.
    fn gather(
        &mut self,
        model: &Model,
        view: &TensorView<'_>,
        ranges: &[Range<usize>],
        mut dst: BufMut,
    ) -> Result<Buf> {
        let compute = Arc::clone(&self.compute);
        let (deadline, pool) = (self.deadline, self.rows_pool(dst.bytes()));
        let mut at = 0;
        for part in split(ranges.iter().cloned(), pool.bytes_each()) {
            let part: Vec<_> = part.into_iter().map(|(_, range)| range).collect();
            let bytes = part.iter().map(Range::len).sum::<usize>();
            let (mut buffer, lease) = pool.acquire(deadline)?;
            // A buffer that was just acquired has no other user.
            let staging = buffer.host_mut().ok_or_else(|| Error::bug("staging memory that the host cannot address"))?;
            model.gather(view, &part, &mut staging[..bytes])?;
            let filled = buffer.freeze();
            let piece = Piece { src: filled.clone(), from: 0..bytes, at };
            let flight = compute.send(Transfer::new(vec![piece], dst)?)?;
            lease.give_back(flight.done().clone(), filled);
            (dst, at) = (flight.chain(), at + bytes);
        }
        Ok(dst.freeze())
    }

    /// The staging buffers for rows of `bytes` in total, replaced by larger ones if the present ones are too small.
    fn rows_pool(&mut self, bytes: usize) -> &Pool {
        let each = bytes.min(STAGING_BYTES).next_power_of_two().clamp(SMALLEST, STAGING_BYTES);
        let pool = self.rows.take().filter(|pool| pool.bytes_each() >= each);
        let make = || Pool::new(Arc::clone(self.model.host()), self.compute.device(), each, STAGING_BUFFERS);
        self.rows.insert(pool.unwrap_or_else(make))
    }
}
