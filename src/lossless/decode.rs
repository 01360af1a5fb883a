//! A block's weights from its code, every part of which is checked.

use super::block::{ALIGN, HEADER, Kernels, LADDER, NO_CODES, PLAIN, TILES, present, sum_of_header};
use super::fields::{Fields, RESTS};
use super::ladder::{RANKS, TABLE, TAIL, WINDOW};
use super::{CODES, TILE, Tile, sum};

/// What is wrong with a block.
pub(super) type Damage = &'static str;

/// The parts of a block's code, whose lengths fit each other.
#[derive(Debug)]
pub(super) struct Parts<'a> {
    /// The sum that the weights must have.
    pub(super) sum: u64,
    body: Body<'a>,
}

#[derive(Debug)]
enum Body<'a> {
    Plain(&'a [u8]),
    Ladder {
        table: [u8; 16],
        /// The planes of the rests; empty where all are zero.
        rests: [&'a [u8]; RESTS],
        /// Empty where all exponents are the first of the table.
        codes: &'a [u8],
        escapes: &'a [[u8; 4]],
        /// The tiles' tails, and what pads the block.
        tails: &'a [u8],
    },
}

impl<'a> Parts<'a> {
    /// Finds the parts in the bytes that the index gives a block of `count` weights, one to [`BLOCK`](super::BLOCK).
    pub(super) fn find(fields: Fields, count: usize, code: &'a [u8]) -> Result<Parts<'a>, Damage> {
        let (header, body) = code.split_first_chunk::<HEADER>().ok_or("it ends within its header")?;
        let number = |at: usize| u16::from_le_bytes([header[at], header[at + 1]]);
        let sum = u64::from_le_bytes(std::array::from_fn(|at| header[at])).wrapping_sub(sum_of_header(header));
        let (escapes, length, kind, flags) = (number(8), number(10), header[12], header[13]);
        let table: [u8; 16] = std::array::from_fn(|at| header[16 + at]);
        if usize::from(length) * ALIGN != code.len() {
            return Err("its length is not that of the index");
        }
        let (exponents, others) = table.split_at(TABLE);
        if number(14) != 0 || others.iter().any(|other| *other != 0) {
            return Err("a field that is zero is not");
        }
        if kind == PLAIN {
            if (escapes, flags, table) != (0, 0, [0; 16]) {
                return Err("a field that is zero is not");
            }
            let bytes = count * fields.size();
            let (weights, padding) = body.split_at_checked(bytes).ok_or("it ends within its weights")?;
            check_padding(padding)?;
            return Parts::plain(sum, weights, bytes);
        }
        if kind != LADDER || flags & !NO_CODES >= 1 << fields.planes() || (flags & NO_CODES != 0 && escapes != 0) {
            return Err("its kind is unknown");
        }
        if exponents.iter().any(|exponent| *exponent > fields.largest()) {
            return Err("its table has an exponent that there is not");
        }
        let tiles = count.div_ceil(TILE);
        let mut left = body;
        let mut take = |bytes: usize| left.split_off(..bytes).ok_or("it ends within its planes");
        let mut rests = [&[][..]; RESTS];
        for plane in present(fields, flags) {
            rests[plane] = take(fields.plane(plane) * tiles)?;
        }
        let codes = take(if flags & NO_CODES == 0 { CODES * tiles } else { 0 })?;
        let escapes = take(4 * usize::from(escapes))?.as_chunks().0;
        if left.len() >= tiles * TAIL + ALIGN {
            return Err("it is longer than its tiles");
        }
        Ok(Parts { sum, body: Body::Ladder { table, rests, codes, escapes, tails: left } })
    }

    /// The parts of a block of `bytes` weights that are as they were.
    pub(super) fn plain(sum: u64, weights: &'a [u8], bytes: usize) -> Result<Parts<'a>, Damage> {
        if weights.len() != bytes {
            return Err("it ends within its weights");
        }
        Ok(Parts { sum, body: Body::Plain(weights) })
    }
}

/// Fails unless the bytes may pad a block.
fn check_padding(padding: &[u8]) -> Result<(), Damage> {
    if padding.len() >= ALIGN || padding.iter().any(|byte| *byte != 0) {
        return Err("what pads it is not");
    }
    Ok(())
}

/// Decodes block `number` to `weights`, as many as it has. What they are after a failure is not defined.
#[inline(always)]
pub(super) fn decode<K: Kernels>(
    kernels: K,
    fields: Fields,
    number: u64,
    parts: &Parts<'_>,
    weights: &mut [u8],
) -> Result<(), Damage> {
    let mut sum = sum::start(number);
    match &parts.body {
        Body::Plain(plain) => {
            weights.copy_from_slice(plain);
            sum = sum.wrapping_add(kernels.sum(weights, 0));
        }
        Body::Ladder { table, rests, codes, escapes, tails } => {
            let mut reader = Reader::new(table, codes, escapes, tails);
            let mut tile = Unpacked { exponents: [0; TILE], bits: [0; TILE] };
            for (index, weights) in weights.chunks_mut(TILE * fields.size()).enumerate() {
                reader.exponents(kernels, index, fields.largest(), &mut tile.exponents)?;
                let count = weights.len() / fields.size();
                join(kernels, fields, index, count, rests, &mut tile, weights)?;
                if tile.exponents[count..].iter().any(|exponent| *exponent != table[0]) {
                    return Err("what pads it is not");
                }
                sum = sum.wrapping_add(kernels.sum(weights, index * TILE * fields.size() / 4));
            }
            reader.finish()?;
        }
    }
    if sum == parts.sum { Ok(()) } else { Err("its weights are not those of its sum") }
}

/// What a tile is unpacked to.
struct Unpacked {
    exponents: Tile,
    bits: Tile,
}

/// Puts a tile's `count` weights together.
#[inline(always)]
fn join<K: Kernels>(
    kernels: K,
    fields: Fields,
    index: usize,
    count: usize,
    rests: &[&[u8]; RESTS],
    tile: &mut Unpacked,
    weights: &mut [u8],
) -> Result<(), Damage> {
    static ZEROS: Tile = [0; TILE];
    let Unpacked { exponents, bits } = tile;
    let mut planes = [&ZEROS; RESTS];
    for (plane, rests) in rests.iter().enumerate().take(fields.bytes()) {
        planes[plane] = rests.as_chunks().0.get(index).unwrap_or(&ZEROS);
    }
    if fields.bits() > 0 {
        let plane = fields.bytes();
        let size = fields.plane(plane);
        if let Some(packed) = rests[plane].chunks_exact(size).nth(index) {
            match fields.bits() {
                3 => kernels.unpack::<3>(packed, bits),
                _ => kernels.unpack::<4>(packed, bits),
            }
            planes[plane] = bits;
        }
    }
    if count < TILE && planes.iter().any(|rests| rests[count..].iter().any(|rest| *rest != 0)) {
        return Err("what pads it is not");
    }
    fields.join(exponents, planes, weights);
    Ok(())
}

/// Reads a block's exponents, tile by tile.
struct Reader<'a> {
    table: &'a [u8; 16],
    codes: &'a [u8],
    escapes: &'a [[u8; 4]],
    /// The tails with zeros behind them, so that a tile's window lies within, and where the next one is.
    tails: [u8; TILES * TAIL + ALIGN + WINDOW],
    at: usize,
    end: usize,
    /// The first place that the next escape may have.
    free: usize,
}

impl<'a> Reader<'a> {
    #[inline(always)]
    fn new(table: &'a [u8; 16], codes: &'a [u8], escapes: &'a [[u8; 4]], tails: &[u8]) -> Reader<'a> {
        let room = [0; TILES * TAIL + ALIGN + WINDOW];
        let mut reader = Reader { table, codes, escapes, tails: room, at: 0, end: tails.len(), free: 0 };
        reader.tails[..tails.len()].copy_from_slice(tails);
        reader
    }

    #[inline(always)]
    fn exponents<K: Kernels>(
        &mut self,
        kernels: K,
        tile: usize,
        largest: u8,
        exponents: &mut Tile,
    ) -> Result<(), Damage> {
        let Some(codes) = self.codes.as_chunks::<CODES>().0.get(tile) else {
            exponents.fill(self.table[0]);
            return Ok(());
        };
        // The place is within the tails, or at their end.
        let Some(window) = self.tails[self.at..].first_chunk() else { return Err(SHORT) };
        let levels = kernels.decode(codes, window, self.table, exponents);
        let bytes = levels.bytes().next_multiple_of(4);
        if bytes > self.end - self.at {
            return Err(SHORT);
        }
        if !levels.padded_with_zeros(&window[..bytes]) {
            return Err("what pads it is not");
        }
        self.at += bytes;
        while let Some((escape, others)) = self.escapes.split_first() {
            let escape = u32::from_le_bytes(*escape);
            let (place, exponent) = ((escape >> 8) as usize, escape as u8);
            if place / TILE != tile {
                break;
            }
            let coded = &mut exponents[place % TILE];
            if exponent > largest || place < self.free || *coded != self.table[RANKS] {
                return Err("an escape is not one");
            }
            self.free = place + 1;
            *coded = exponent;
            self.escapes = others;
        }
        Ok(())
    }

    #[inline(always)]
    fn finish(&self) -> Result<(), Damage> {
        if !self.escapes.is_empty() {
            return Err("an escape is not in its place");
        }
        check_padding(&self.tails[self.at..self.end])
    }
}

const SHORT: Damage = "it ends within a tile";
