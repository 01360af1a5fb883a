//! The header of a tensor's code, and its index.

use super::block::{self, ALIGN, is_worth_while};
use super::fault::CodeFault;
use super::fields::Fields;
use super::{BLOCK, sum};
use crate::dtype::DType;

/// The bytes of the header.
pub(super) const HEADER: usize = 64;

const MAGIC: [u8; 8] = *b"\x89TOWLC\r\n";
const VERSION: u16 = 1;

/// The starts of the sums of header and index are those of blocks that there cannot be.
const OF_HEADER: u64 = 1 << 40;
const OF_INDEX: u64 = OF_HEADER + 1;

/// The numbers of types in the header.
const TYPES: [(u8, DType); 7] = [
    (1, DType::BF16),
    (2, DType::F16),
    (3, DType::F32),
    (4, DType::F8E4M3),
    (5, DType::F8E5M2),
    (6, DType::F8E4M3Fnuz),
    (7, DType::F8E5M2Fnuz),
];

/// What the header of a tensor's code says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Info {
    /// The element type.
    pub dtype: DType,
    /// The number of weights.
    pub count: u64,
    /// Whether the weights are in blocks; otherwise they are as they were, since blocks would save less than a twentieth.
    pub in_blocks: bool,
    /// The bytes of the code, with header and index.
    pub bytes: u64,
    /// The bytes of the weights.
    pub decoded_bytes: u64,
    /// A sum over all weights in their places: equal for equal tensors.
    pub sum: u64,
}

impl Info {
    /// The bytes of the header.
    pub const BYTES: u64 = HEADER as u64;

    /// Reads the header: the first 64 bytes of a code, which may be followed by any others.
    ///
    /// # Errors
    /// [`CodeFault::NotCode`], [`CodeFault::Version`], [`CodeFault::Length`] with less than 64 bytes, and
    /// [`CodeFault::Header`].
    pub fn read(code: &[u8]) -> Result<Info, CodeFault> {
        let (info, _) = read(code)?;
        Ok(info)
    }

    /// The number of blocks, the last of which may have less than [`BLOCK`](super::BLOCK_WEIGHTS) weights.
    pub fn blocks(&self) -> u64 {
        self.count.div_ceil(BLOCK as u64)
    }

    /// The bytes of header and index, behind which the blocks begin.
    pub fn head_bytes(&self) -> u64 {
        let blocks = usize::try_from(self.blocks()).unwrap_or(usize::MAX);
        (length(self.in_blocks, blocks) as u64).saturating_add(HEADER as u64)
    }

    /// Whether the numbers fit each other, so that the index and, of a tensor that stays as it was, the weights are within the code.
    /// They do in the info of a code that was opened.
    pub(crate) fn is_consistent(&self) -> bool {
        let (Some(fields), Ok(blocks)) = (Fields::of(self.dtype), u32::try_from(self.blocks())) else { return false };
        let index = (HEADER + length(self.in_blocks, blocks as usize)) as u64;
        let body = if self.in_blocks { Some(0) } else { self.decoded_bytes.checked_next_multiple_of(ALIGN as u64) };
        let least = body.and_then(|body| body.checked_add(index));
        self.count.checked_mul(fields.size() as u64) == Some(self.decoded_bytes)
            && least.is_some_and(|least| least <= self.bytes)
            && self.bytes.is_multiple_of(ALIGN as u64)
            && u32::try_from(self.bytes / ALIGN as u64).is_ok()
    }
}

/// The info, and the sum of the index.
fn read(code: &[u8]) -> Result<(Info, u64), CodeFault> {
    let known = code.len().min(MAGIC.len());
    if code[..known] != MAGIC[..known] {
        return Err(CodeFault::NotCode);
    }
    let Some(header) = code.first_chunk::<HEADER>() else {
        return Err(CodeFault::Length { expected: HEADER as u64, given: code.len() as u64 });
    };
    let number = |at: usize| u64::from_le_bytes(std::array::from_fn(|byte| header[at + byte]));
    let version = u16::from_le_bytes([header[8], header[9]]);
    if version != VERSION {
        return Err(CodeFault::Version { found: version, known: VERSION });
    }
    if sum_of_header(header) != number(HEADER - 8) {
        return Err(CodeFault::Header { what: "its header is not that of its sum" });
    }
    let damaged = |what| CodeFault::Header { what };
    let (_, dtype) = TYPES.into_iter().find(|(code, _)| *code == header[10]).ok_or(damaged("its type is unknown"))?;
    let fields = Fields::of(dtype).ok_or(damaged("its type is unknown"))?;
    let in_blocks = match header[11] {
        0 => false,
        1 => true,
        _ => return Err(damaged("its kind is unknown")),
    };
    let count = number(16);
    let decoded_bytes = count.checked_mul(fields.size() as u64).ok_or(damaged("it has too many weights"))?;
    let info = Info { dtype, count, in_blocks, bytes: number(24), decoded_bytes, sum: number(32) };
    if u64::from(u32::from_le_bytes([header[12], header[13], header[14], header[15]])) != info.blocks() {
        return Err(damaged("its number of blocks is not that of its weights"));
    }
    if number(48) != 0 {
        return Err(damaged("a field that is zero is not"));
    }
    Ok((info, number(40)))
}

/// What header and index say of the blocks.
pub(super) enum Index<'a> {
    /// Their lengths, and the sums of their weights.
    Blocks { lengths: &'a [u32], sums: &'a [u64] },
    /// The sums of the weights, which stay as they were.
    Plain { sums: &'a [u64] },
}

impl Index<'_> {
    /// Its bytes, padded.
    fn bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        match self {
            Index::Blocks { lengths, .. } => {
                let mut at = (HEADER + length(true, lengths.len())) / ALIGN;
                bytes.extend_from_slice(&(at as u32).to_le_bytes());
                for length in *lengths {
                    at += *length as usize / ALIGN;
                    bytes.extend_from_slice(&(at as u32).to_le_bytes());
                }
            }
            Index::Plain { sums } => sums.iter().for_each(|sum| bytes.extend_from_slice(&sum.to_le_bytes())),
        }
        bytes.resize(bytes.len().next_multiple_of(ALIGN), 0);
        bytes
    }
}

/// The bytes of an index of as many blocks.
pub(super) fn length(in_blocks: bool, blocks: usize) -> usize {
    let bytes = if in_blocks { blocks.saturating_add(1).saturating_mul(4) } else { blocks.saturating_mul(8) };
    bytes.div_ceil(ALIGN).saturating_mul(ALIGN)
}

/// Header and index, which are followed by `body` bytes.
pub(super) fn write(dtype: DType, count: usize, index: &Index<'_>, body: usize) -> Vec<u8> {
    let number = TYPES.iter().find(|(_, known)| *known == dtype).map_or(0, |(number, _)| *number);
    let (in_blocks, sums) = match index {
        Index::Blocks { sums, .. } => (true, sums),
        Index::Plain { sums } => (false, sums),
    };
    let sum = sums.iter().fold(0u64, |all, sum| all.wrapping_add(*sum));
    let blocks = sums.len();
    let index = index.bytes();
    let mut header = [0; HEADER];
    header[..8].copy_from_slice(&MAGIC);
    header[8..10].copy_from_slice(&VERSION.to_le_bytes());
    header[10] = number;
    header[11] = u8::from(in_blocks);
    header[12..16].copy_from_slice(&(blocks as u32).to_le_bytes());
    header[16..24].copy_from_slice(&(count as u64).to_le_bytes());
    header[24..32].copy_from_slice(&((HEADER + index.len() + body) as u64).to_le_bytes());
    header[32..40].copy_from_slice(&sum.to_le_bytes());
    header[40..48].copy_from_slice(&sum_of_index(&index).to_le_bytes());
    let own = sum_of_header(&header);
    header[HEADER - 8..].copy_from_slice(&own.to_le_bytes());
    [&header[..], &index].concat()
}

/// The sum of a header of 64 bytes or more, without its own.
pub(super) fn sum_of_header(header: &[u8]) -> u64 {
    sum::start(OF_HEADER).wrapping_add(sum::words(&header[..HEADER - 8], 0))
}

pub(super) fn sum_of_index(index: &[u8]) -> u64 {
    // The factors of words repeat after 2^31 of them, and a part's place is in its start.
    let parts = index.chunks(1 << 20).enumerate();
    let sums = parts.map(|(at, part)| sum::start(OF_INDEX + at as u64).wrapping_add(sum::words(part, 0)));
    sums.fold(0, u64::wrapping_add)
}

/// Where the blocks of a code are.
#[derive(Clone, Copy, Debug)]
pub(super) enum Place<'a> {
    /// Their beginnings and the end of the last, in units of 16 bytes from the beginning of the code.
    Blocks(&'a [[u8; 4]]),
    /// The weights follow each other, and these are the sums of the blocks.
    Plain { sums: &'a [[u8; 8]] },
}

/// Reads header and index, which must fit each other.
pub(super) fn open(head: &[u8]) -> Result<(Info, Place<'_>), CodeFault> {
    let (info, sum) = read(head)?;
    let damaged = |what| CodeFault::Header { what };
    if info.head_bytes() != head.len() as u64 {
        return Err(CodeFault::Length { expected: info.head_bytes(), given: head.len() as u64 });
    }
    // As many have an index that is in memory.
    let (blocks, index) = (info.blocks() as usize, &head[HEADER..]);
    if sum_of_index(index) != sum {
        return Err(damaged("its index is not that of its sum"));
    }
    let place = if info.in_blocks {
        let (places, padding) = index.split_at(4 * (blocks + 1));
        check_places(&info, places.as_chunks().0, head.len() as u64, padding)?;
        Place::Blocks(places.as_chunks().0)
    } else {
        let (sums, padding) = index.split_at(8 * blocks);
        let body = info.decoded_bytes.checked_next_multiple_of(ALIGN as u64);
        if info.bytes.checked_sub(head.len() as u64) != body || padding.iter().any(|byte| *byte != 0) {
            return Err(damaged("its weights do not fill it"));
        }
        let sums = sums.as_chunks().0;
        if sums.iter().fold(0u64, |all, sum| all.wrapping_add(u64::from_le_bytes(*sum))) != info.sum {
            return Err(damaged("its sums are not those of its header"));
        }
        Place::Plain { sums }
    };
    Ok((info, place))
}

/// Checks what pads weights that stay as they were.
pub(super) fn check_zeros(padding: &[u8]) -> Result<(), CodeFault> {
    match padding.iter().all(|byte| *byte == 0) {
        true => Ok(()),
        false => Err(CodeFault::Header { what: "what pads it is not" }),
    }
}

/// Checks that the blocks follow each other from the end of the index to that of the code.
fn check_places(info: &Info, places: &[[u8; 4]], begin: u64, padding: &[u8]) -> Result<(), CodeFault> {
    let damaged = |what| CodeFault::Header { what };
    let place = |place: &[u8; 4]| u64::from(u32::from_le_bytes(*place)) * ALIGN as u64;
    let size = info.decoded_bytes / info.count.max(1);
    let longest = block::bound(BLOCK * size as usize) as u64;
    let lengths = places.iter().zip(places.iter().skip(1)).map(|(begin, end)| place(end).wrapping_sub(place(begin)));
    if !lengths.into_iter().all(|length| (block::HEADER as u64..=longest).contains(&length)) {
        return Err(damaged("its blocks do not follow each other"));
    }
    let ends = (places.first().map(place), places.last().map(place));
    if ends != (Some(begin), Some(info.bytes)) || padding.iter().any(|byte| *byte != 0) {
        return Err(damaged("its blocks do not fill it"));
    }
    Ok(())
}

/// Whether a tensor is worth to be in blocks of these lengths.
pub(super) fn in_blocks(blocks: usize, body: usize, plain: usize) -> bool {
    is_worth_while(HEADER + length(true, blocks) + body, plain)
}
