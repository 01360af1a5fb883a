//! Computation on a device: adding low-rank products to a matrix in place, and the values of blocks.
//!
//! The operations and their order are the same as on the host (`src/patch`), so the bytes are the same wherever a matrix is
//! patched. Nothing here knows of models or adapters.

use std::any::TypeId;
use std::fmt;
use std::ops::Range;

use super::{
    Buf, BufMut, Decompress, DecompressFlight, Dequantise, Event, Flight, Piece, Rejected, Stream, Transfer, Undecoded,
    faulty,
};
use crate::device::DeviceId;
use crate::dtype::DType;
use crate::error::{Error, InUse, Measured, Mismatch, Result};

/// The kernels of a device.
pub trait Kernels: Send + Sync {
    /// Whether there are kernels that patch. If not, the host patches, and that is nothing to report. The default has them.
    fn patches(&self) -> bool {
        true
    }

    /// At the first call, prepares the kernels that patch. Later calls return the same result, unless what was missing may have
    /// come: a device without memory for them is asked again.
    ///
    /// # Errors
    /// The reason why the device has no usable kernels for that, for the user.
    fn ready(&self) -> Result<(), String>;

    /// Queues a patch that was [sent](MatrixPatch::send) to this device on `stream`, a stream of this device. It applies to
    /// the matrix at offset `at` in `weight`, and runs after the pending events of both buffers. The device adds the number
    /// of values that it saturated to the counter in the [`SATURATED`](MatrixPatch::SATURATED) bytes of the patch's memory.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the kernels are not [`ready`](Kernels::ready), and for a matrix that is not aligned to its
    /// element; [`Error::Mismatch`] for a patch that was sent by another kind of stream, and for a buffer of another device;
    /// [`Error::WrongSize`] for a buffer that is too small; when the stream accepts no more work.
    fn patch<'a>(
        &self,
        stream: &dyn Stream,
        patch: SentPatch<'a>,
        weight: BufMut,
        at: usize,
    ) -> Result<PatchFlight<'a>>;

    /// At the first call, prepares the kernels that compute values from blocks. Returns whether there is one for values of type
    /// `to` and blocks of type `from`, on `stream`. The default has none.
    ///
    /// # Errors
    /// The reason why the device has no such kernel, for the user.
    fn dequantises(&self, stream: &dyn Stream, from: DType, to: DType) -> Result<(), String> {
        let _ = stream;
        Err(format!("the device has no kernel that computes {to} of {from}"))
    }

    /// Queues the computation of values from blocks on `stream`, a stream of this device. Both ends are in the device's memory.
    /// It runs after the pending events of both buffers, and gives the bits that the host does: those of
    /// [`patch::dequantise`](crate::patch::dequantise), rounded once to nearest, with one NaN.
    ///
    /// # Errors
    /// [`Rejected`], which returns the destination: with [`Error::Invalid`] when there is no
    /// [such kernel](Kernels::dequantises), and for a destination that is not aligned to its elements; with
    /// [`Error::Mismatch`] for a buffer of another device; when the stream accepts no more work.
    fn dequantise(&self, stream: &dyn Stream, work: Dequantise) -> Result<Flight, Box<Rejected>> {
        let (from, to) = work.types();
        let why = format!("{} has no kernel that computes {to} of {from}", stream.device());
        Err(work.rejected(Error::invalid(why)))
    }

    /// At the first call, prepares the kernels that decode the [lossless code](crate::lossless). Returns whether there is one for
    /// weights of type `dtype`, on `stream`. The default has none.
    ///
    /// # Errors
    /// The reason why the device has no such kernel, for the user.
    fn decompresses(&self, stream: &dyn Stream, dtype: DType) -> Result<(), String> {
        let _ = stream;
        Err(format!("the device has no kernel that decodes {dtype}"))
    }

    /// Queues the decoding of a tensor's code, or of a [part](Decompress::code_part) of it, on `stream`, a stream of this device. All
    /// ends are in the device's memory. It runs after the pending events of all buffers. Whatever header, index and blocks hold,
    /// nothing is read outside of the code and nothing written outside of the weights and the verdict: if they are not those of
    /// the code's header, the [verdict](Decompress) says so, and the weights are not defined.
    ///
    /// # Errors
    /// [`Undecoded`], which returns both buffers: with [`Error::Invalid`] when there is no
    /// [such kernel](Kernels::decompresses); with [`Error::Mismatch`] for a buffer of another device; when the stream accepts
    /// no more work.
    fn decompress(&self, stream: &dyn Stream, work: Decompress) -> Result<DecompressFlight, Box<Undecoded>> {
        let why = format!("{} has no kernel that decodes {}", stream.device(), work.dtype());
        Err(work.rejected(Error::invalid(why)))
    }
}

impl dyn Kernels + '_ {
    /// Queues the computation of values, and checks that the flight returns its destination: the kernels may be another crate's.
    ///
    /// # Errors
    /// As [`dequantise`](Kernels::dequantise); [`Error::Bug`] with the buffer that came back in place of the destination.
    pub(crate) fn send(&self, stream: &dyn Stream, work: Dequantise) -> Result<Flight, Box<Rejected>> {
        let wanted = work.dst().shape();
        let flight = self.dequantise(stream, work)?;
        if flight.shape() == wanted {
            return Ok(flight);
        }
        Err(Box::new(Rejected { error: mixed_up(stream), dst: flight.chain() }))
    }

    /// Queues the decoding of a code, and checks likewise that the flight returns both buffers.
    ///
    /// # Errors
    /// As [`decompress`](Kernels::decompress); [`Error::Bug`] with the buffers that came back in place of them.
    pub(crate) fn decode(&self, stream: &dyn Stream, work: Decompress) -> Result<DecompressFlight, Box<Undecoded>> {
        let wanted = (work.dst().shape(), work.verdict().shape());
        let flight = self.decompress(stream, work)?;
        if (flight.weights.shape(), flight.verdict.shape()) == wanted {
            return Ok(flight);
        }
        let (dst, verdict) = (flight.weights.chain(), flight.verdict.chain());
        Err(Box::new(Undecoded { error: mixed_up(stream), dst, verdict }))
    }
}

fn mixed_up(stream: &dyn Stream) -> Error {
    Error::bug(format!("the kernels of {} mixed their memory up", stream.device()))
}

/// A patch in flight, with the matrix's buffer.
#[derive(Debug)]
pub struct PatchFlight<'a> {
    /// The matrix's buffer.
    pub weight: Flight,
    /// The patch, for queueing again or for taking its memory, which carries the event.
    pub patch: SentPatch<'a>,
}

/// A patch whose factors are in a device's memory, or in flight to it. Nobody else can write that memory: it contains the
/// offsets at which the device reads.
#[derive(Debug)]
pub struct SentPatch<'a> {
    pub(super) patch: MatrixPatch<'a>,
    pub(super) memory: BufMut,
    /// The type of the stream that sent it. A backend trusts only its own streams.
    pub(super) sent_by: TypeId,
}

impl<'a> SentPatch<'a> {
    /// The patch.
    pub fn patch(&self) -> &MatrixPatch<'a> {
        &self.patch
    }

    /// Whether the patch was sent by a stream of this type. A backend accepts only patches that its own streams sent, since
    /// it cannot know what another crate's stream copied.
    pub fn was_sent_by<S: Stream>(&self) -> bool {
        self.sent_by == TypeId::of::<S>()
    }

    /// Returns the memory that holds the factors.
    pub fn into_memory(self) -> BufMut {
        self.memory
    }
}

/// A factorised matrix to add, `scale (up down)`, packed by tile. Values beyond the matrix are zero.
#[derive(Clone, Debug)]
pub struct PackedProduct<'a> {
    /// For every eight rows of the matrix, beginning with the eight that contain the first of `rows`: rank by eight.
    pub up: &'a [f32],
    /// For every 32 columns: rank by 32.
    pub down: &'a [f32],
    /// The rank.
    pub rank: usize,
    /// The rows of the matrix that the product is added to.
    pub rows: Range<usize>,
    /// The factor of the sum over the rank.
    pub scale: f32,
}

/// The scales of an fp8 matrix, one for each block of a grid. A value is the stored number times its block's scale.
#[derive(Clone, Debug)]
pub struct BlockScales<'a> {
    /// The scales, row by row of the grid. Each is finite and not zero.
    pub values: &'a [f32],
    /// The rows and columns of a block, each at least 1. The last blocks may be smaller.
    pub block: [usize; 2],
    /// The number of blocks in a row of the grid.
    pub grid_cols: usize,
}

/// A matrix of a float type, and the products that are added to it in turn before it is rounded once, to nearest.
#[derive(Clone, Debug)]
pub struct MatrixPatch<'a> {
    dtype: DType,
    rows: usize,
    cols: usize,
    products: Vec<PackedProduct<'a>>,
    scales: Option<BlockScales<'a>>,
}

impl<'a> MatrixPatch<'a> {
    /// The rows and columns of a tile.
    pub const TILE: [usize; 2] = [8, 32];

    /// The byte range of the counter of saturated values in the work memory: 64 bits, little-endian.
    pub const SATURATED: Range<usize> = 0..8;

    /// The most rows, and the most columns.
    pub const MOST: usize = 1 << 30;

    /// Creates a patch of a matrix of `rows` by `cols`.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a type other than f32, f16, bf16 and the two fp8 types, for scales with a type other than fp8,
    /// for sides of zero or over [`MOST`](MatrixPatch::MOST), and for factors or scales whose size does not fit the matrix.
    pub fn new(
        dtype: DType,
        (rows, cols): (usize, usize),
        products: Vec<PackedProduct<'a>>,
        scales: Option<BlockScales<'a>>,
    ) -> Result<MatrixPatch<'a>> {
        let fp8 = matches!(dtype, DType::F8E4M3 | DType::F8E5M2);
        let float = fp8 || matches!(dtype, DType::F32 | DType::F16 | DType::BF16);
        if !float || [rows, cols].iter().any(|side| !(1..=Self::MOST).contains(side)) {
            return Err(Error::invalid(format!("a {dtype} matrix of {rows} by {cols} is not patched on a device")));
        }
        let fits = |product: &&PackedProduct<'_>| {
            let [high, wide] = Self::TILE;
            let (from, to, rank) = (product.rows.start, product.rows.end, product.rank);
            from < to
                && to <= rows
                && (1..=Self::MOST / wide).contains(&rank)
                && (to.div_ceil(high) - from / high).checked_mul(high * rank) == Some(product.up.len())
                && cols.div_ceil(wide).checked_mul(wide * rank) == Some(product.down.len())
        };
        if let Some(product) = products.iter().find(|product| !fits(product)) {
            return Err(Error::invalid(format!("{product} does not fit a matrix of {rows} by {cols}")));
        }
        if let Some(BlockScales { values, block, grid_cols }) = &scales {
            let whole = block.iter().all(|side| *side > 0)
                && *grid_cols == cols.div_ceil(block[1])
                && rows.div_ceil(block[0]).checked_mul(*grid_cols) == Some(values.len());
            if !whole || !fp8 {
                let (count, [high, wide]) = (values.len(), block);
                let grid = format!("{count} scales of blocks of {high} by {wide}");
                return Err(Error::invalid(format!("{grid} do not fit a {dtype} matrix of {rows} by {cols}")));
            }
        }
        Ok(MatrixPatch { dtype, rows, cols, products, scales })
    }

    /// The element type of the matrix.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// The number of columns.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The number of products.
    pub fn products(&self) -> usize {
        self.products.len()
    }

    /// The scales, if the matrix has any.
    pub fn scales(&self) -> Option<&BlockScales<'a>> {
        self.scales.as_ref()
    }

    /// The size of the matrix, in bytes.
    pub fn matrix_bytes(&self) -> usize {
        self.rows.saturating_mul(self.cols).saturating_mul(self.element_bytes())
    }

    /// The size of an element of the matrix, in bytes.
    pub(super) fn element_bytes(&self) -> usize {
        // A patch exists only of types whose elements have a size.
        self.dtype.element_bytes().unwrap_or(1)
    }

    /// The size of the work memory, in bytes. The matrix is not part of it.
    pub fn work_bytes(&self) -> usize {
        self.products.iter().fold(self.products_at(), |at, p| at + (p.up.len() + p.down.len()) * 4)
    }

    /// The offset of the scales in the work memory.
    pub fn scales_at(&self) -> usize {
        LINE * (1 + self.products.len())
    }

    /// The offset of the first factor in the work memory.
    fn products_at(&self) -> usize {
        let scales = self.scales.as_ref().map_or(0, |scales| scales.values.len() * 4);
        self.scales_at() + scales.next_multiple_of(LINE)
    }

    /// Writes the work memory to `staging` on the host, and queues its copy to `memory` on the device of `stream`. With
    /// `counted`, the counter of [`SATURATED`](MatrixPatch::SATURATED) values in `memory` keeps its value, for patches that are
    /// counted together. Returns the patch, the event until which `staging` is read, and `staging`.
    ///
    /// # Errors
    /// [`Error::InUse`] when copies use `staging`, [`Error::Mismatch`] when it is not on the host; [`Error::WrongSize`] when
    /// either buffer has fewer than [`work_bytes`](MatrixPatch::work_bytes); when the stream accepts no more work.
    pub fn send(
        self,
        stream: &dyn Stream,
        mut staging: BufMut,
        memory: BufMut,
        counted: bool,
    ) -> Result<(SentPatch<'a>, Event, Buf)> {
        staging.block().process().check()?;
        let (bytes, device) = (staging.bytes(), staging.device());
        match (staging.pending().is_empty(), staging.host_mut()) {
            (_, Some(staging)) => self.write(staging)?,
            (false, None) => return Err(InUse::Buffer { device, bytes }.into()),
            (true, None) => {
                let what = "staging memory".to_owned();
                return Err(Mismatch::Memory { what, memory: device, device: DeviceId::CPU }.into());
            }
        }
        let staging = staging.freeze();
        let from = if counted { Self::SATURATED.end } else { 0 };
        let piece = Piece { src: staging.clone(), from: from..self.work_bytes(), at: from };
        let flight = stream.copy(Transfer::new(vec![piece], memory)?)?;
        let (done, sent_by) = (flight.done().clone(), faulty::type_of(stream));
        Ok((SentPatch { patch: self, memory: flight.chain(), sent_by }, done, staging))
    }

    /// Writes the work memory, all little-endian: a line of 32 zero bytes, where saturated values are counted; a line for
    /// each product (the offsets of its `up` and its `down` in the work memory, in bytes, as u64; its rank, first row and end
    /// row as u32; its scale); the scales, padded to whole lines; the factors. Scales and factors are f32.
    ///
    /// # Errors
    /// [`Error::WrongSize`] when `dst` has fewer than [`work_bytes`](MatrixPatch::work_bytes).
    pub fn write(&self, dst: &mut [u8]) -> Result<()> {
        let (wanted, room) = (self.work_bytes(), dst.len());
        let Some(dst) = dst.get_mut(..wanted) else {
            return Err(Error::WrongSize { what: Measured::Work, needed: wanted as u64, given: room as u64 });
        };
        let (head, factors) = dst.split_at_mut(self.products_at());
        head.fill(0);
        let mut at = head.len() as u64;
        for (product, line) in self.products.iter().zip(head[LINE..].chunks_exact_mut(LINE)) {
            let down_at = at + product.up.len() as u64 * 4;
            line[..8].copy_from_slice(&at.to_le_bytes());
            line[8..16].copy_from_slice(&down_at.to_le_bytes());
            for (number, at) in [product.rank, product.rows.start, product.rows.end].into_iter().zip([16, 20, 24]) {
                line[at..at + 4].copy_from_slice(&(number as u32).to_le_bytes());
            }
            line[28..].copy_from_slice(&product.scale.to_le_bytes());
            at = down_at + product.down.len() as u64 * 4;
        }
        if let Some(scales) = &self.scales {
            write_values(scales.values, &mut head[LINE * (1 + self.products.len())..]);
        }
        let mut rest = factors;
        for values in self.products.iter().flat_map(|product| [product.up, product.down]) {
            let (now, later) = rest.split_at_mut(values.len() * 4);
            write_values(values, now);
            rest = later;
        }
        Ok(())
    }
}

/// The alignment of the parts of the work memory, in bytes.
const LINE: usize = 32;

fn write_values(values: &[f32], bytes: &mut [u8]) {
    bytes.as_chunks_mut().0.iter_mut().zip(values).for_each(|(raw, value)| *raw = value.to_le_bytes());
}

impl fmt::Display for PackedProduct<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (up, down) = (self.up.len(), self.down.len());
        write!(f, "a product of rank {} for rows {:?} with factors of {up} and {down} values", self.rank, self.rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn product<'a>(up: &'a [f32], down: &'a [f32], rows: Range<usize>) -> PackedProduct<'a> {
        PackedProduct { up, down, rank: 2, rows, scale: 0.5 }
    }

    #[test]
    fn the_work_memory_is_laid_out_in_lines() {
        let (up, down) = (vec![1.0; 2 * 16], vec![2.0; 2 * 64]);
        let scales = BlockScales { values: &[3.0; 9], block: [8, 16], grid_cols: 3 };
        let products = vec![product(&up, &down, 7..17), product(&up[16..], &down, 3..8)];
        let refused = MatrixPatch::new(DType::F8E4M3, (17, 40), products.clone(), Some(scales.clone()));
        assert!(refused.is_err(), "rows 7..17 begin in the first tile and end in the third");
        let products = vec![product(&up, &down, 9..17), products[1].clone()];
        let patch = MatrixPatch::new(DType::F8E4M3, (17, 40), products, Some(scales)).unwrap();
        let at = 3 * 32 + 64;
        assert_eq!((patch.scales_at(), patch.work_bytes()), (96, at + (2 * 16 + 128 + 16 + 128) * 4));
        let mut bytes = vec![9; patch.work_bytes()];
        patch.write(&mut bytes).unwrap();
        assert_eq!(bytes[..32], [0; 32]);
        let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
        assert_eq!([0, 8, 16, 20, 24, 28].map(|i| word(32 + i)), [160, 288, 2, 9, 17, 0.5f32.to_bits()]);
        assert_eq!([0, 8, 20].map(|i| word(64 + i)), [800, 864, 3]);
        assert_eq!([96, 128, 132, 160, 284, 288, 864].map(|at| f32::from_bits(word(at))), [3., 3., 0., 1., 1., 2., 2.]);
        assert!(patch.write(&mut bytes[1..]).is_err());
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let (up, down) = (vec![1.0; 16], vec![2.0; 64]);
        let refused = |dtype, shape, rows, scales| {
            MatrixPatch::new(dtype, shape, vec![product(&up, &down, rows)], scales).unwrap_err().to_string()
        };
        assert!(MatrixPatch::new(DType::BF16, (8, 32), vec![product(&up, &down, 0..8)], None).is_ok());
        assert!(refused(DType::I32, (8, 32), 0..8, None).contains("I32"));
        assert!(refused(DType::BF16, (0, 32), 0..0, None).contains("0 by 32"));
        assert!(refused(DType::BF16, (8, 33), 0..8, None).contains("8 by 33"));
        assert!(refused(DType::BF16, (8, 32), 0..9, None).contains("0..9"));
        let one = BlockScales { values: &[1.0], block: [usize::MAX; 2], grid_cols: 1 };
        assert!(refused(DType::BF16, (8, 32), 0..8, Some(one.clone())).contains("1 scales"));
        let many = BlockScales { values: &[1.0; 2], ..one };
        assert!(refused(DType::F8E5M2, (8, 32), 0..8, Some(many)).contains("2 scales"));
    }
}
