//! The codes of a group as a table, with which several are decoded at a time.

use super::super::CodeFault;
use super::header;

/// Entries of a row.
pub(super) const ROW: usize = 256;

/// Entries from here on are numbers of tables.
const MARKS: u8 = 240;

/// The first table, those that can be named, and the lengths.
pub(super) const MOST_ROWS: usize = ROW - MARKS as usize + 2;

/// The most bytes of a code.
const DEPTH: usize = 4;

/// The bits that are looked up at a time.
const BITS: u32 = 11;

/// The most exponents that are found at a time.
const MOST: usize = 6;

/// Lookups in a word of 64 bits, of which 57 are sure to be there.
const LOOKUPS: usize = 5;

/// What has to follow the exponents in the memory for them.
pub(super) const SLACK: usize = 8;

/// A code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Code {
    /// Its bits, from the highest down.
    bits: u32,
    length: u8,
    exponent: u8,
}

impl Code {
    fn begins(&self, next: u32) -> bool {
        (self.bits ^ next) >> (32 - u32::from(self.length)) == 0
    }
}

/// What the next bits stand for: up to six exponents in the lowest bytes, then their number, and the bits of their codes. All zero if
/// the first code is longer than [`BITS`], or there is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Entry(u64);

impl Entry {
    fn of(codes: &[Code]) -> Entry {
        let exponents = codes.iter().rev().fold(0, |exponents, code| exponents << 8 | u64::from(code.exponent));
        let bits: u64 = codes.iter().map(|code| u64::from(code.length)).sum();
        Entry(bits << 56 | (codes.len() as u64) << 48 | exponents)
    }

    fn count(self) -> usize {
        (self.0 >> 48 & 0xff) as usize
    }

    fn bits(self) -> u32 {
        (self.0 >> 56) as u32
    }
}

pub(super) struct Table {
    entries: Box<[Entry; 1 << BITS]>,
    /// In order of their bits.
    codes: Vec<Code>,
    /// The bits of each exponent's code.
    lengths: [u8; ROW],
}

impl Table {
    pub(super) fn new(luts: &[u8]) -> Result<Table, CodeFault> {
        let (codes, lengths) = codes(luts)?;
        let mut entries = vec![Entry::default(); 1 << BITS];
        for (index, entry) in entries.iter_mut().enumerate() {
            let (mut found, mut used) = (Vec::with_capacity(MOST), 0);
            while found.len() < MOST
                && let Some(code) = find(&codes, (index as u32) << (32 - BITS) << used)
                && used + u32::from(code.length) <= BITS
            {
                used += u32::from(code.length);
                found.push(code);
            }
            *entry = Entry::of(&found);
        }
        let entries = entries.try_into().map_err(|_| header("its table has another length"))?;
        Ok(Table { entries, codes, lengths })
    }

    /// Decodes exponents of some runs side by side, since each lookup has to wait for the one before, until one of them is near its
    /// end.
    ///
    /// `None` where there is no code.
    pub(super) fn decode_together<const RUNS: usize>(&self, runs: &mut [Run<'_>; RUNS]) -> Option<()> {
        while runs.iter().all(Run::is_far_from_its_end) {
            let mut words = [0; RUNS];
            for (word, run) in words.iter_mut().zip(&*runs) {
                *word = run.word()?;
            }
            let mut last = [Entry::default(); RUNS];
            for _ in 0..LOOKUPS {
                for ((word, run), last) in words.iter_mut().zip(&mut *runs).zip(&mut last) {
                    let entry = self.entries[(*word >> (64 - BITS)) as usize];
                    run.put(entry);
                    *word <<= entry.bits();
                    *last = entry;
                }
            }
            // Where an entry is of no code, nothing has changed since.
            for (run, last) in runs.iter_mut().zip(last) {
                if last.count() == 0 {
                    run.put_one(find(&self.codes, run.next())?);
                }
            }
        }
        Some(())
    }

    /// Decodes what is left of a run.
    ///
    /// `None` where there is no code, or no more bytes.
    pub(super) fn decode(&self, run: &mut Run<'_>) -> Option<()> {
        self.decode_together(std::array::from_mut(run))?;
        while run.at < run.count {
            let next = run.next();
            let entry = self.entries[(next >> (32 - BITS)) as usize];
            run.put_one(match entry.count() {
                0 => find(&self.codes, next)?,
                _ => Code { bits: next, length: self.lengths[usize::from(entry.0 as u8)], exponent: entry.0 as u8 },
            });
        }
        (run.bit <= 8 * run.bytes.len()).then_some(())
    }
}

/// Exponents whose codes follow each other.
pub(super) struct Run<'a> {
    bytes: &'a [u8],
    /// Where the next code begins.
    bit: usize,
    exponents: &'a mut [u8],
    at: usize,
    count: usize,
}

impl<'a> Run<'a> {
    /// As many as there is room for before the [slack](SLACK), from a bit of `bytes` on.
    pub(super) fn new(bytes: &'a [u8], bit: usize, exponents: &'a mut [u8]) -> Run<'a> {
        let count = exponents.len() - SLACK;
        Run { bytes, bit, exponents, at: 0, count }
    }

    /// The bit at which the last code ends.
    pub(super) fn end(&self) -> usize {
        self.bit
    }

    fn is_far_from_its_end(&self) -> bool {
        self.at + LOOKUPS * MOST <= self.count && self.bit / 8 + 8 <= self.bytes.len()
    }

    /// The next bits, at least 57.
    fn word(&self) -> Option<u64> {
        let bytes = self.bytes.get(self.bit / 8..)?.first_chunk()?;
        Some(u64::from_be_bytes(*bytes) << (self.bit % 8))
    }

    /// The next 32 bits. After the end there are zeros.
    fn next(&self) -> u32 {
        next(self.bytes, self.bit)
    }

    fn put(&mut self, entry: Entry) {
        self.exponents[self.at..self.at + 8].copy_from_slice(&entry.0.to_le_bytes());
        self.at += entry.count();
        self.bit += entry.bits() as usize;
    }

    fn put_one(&mut self, code: Code) {
        self.exponents[self.at] = code.exponent;
        self.at += 1;
        self.bit += usize::from(code.length);
    }
}

/// The 32 bits from `bit` on. After the end there are zeros.
fn next(bytes: &[u8], bit: usize) -> u32 {
    let mut word = [0; 8];
    let rest = bytes.get(bit / 8..).unwrap_or_default();
    let rest = &rest[..rest.len().min(5)];
    word[..rest.len()].copy_from_slice(rest);
    (u64::from_be_bytes(word) << (bit % 8) >> 32) as u32
}

/// The code that these bits begin with.
fn find(codes: &[Code], next: u32) -> Option<Code> {
    let after = codes.partition_point(|code| code.bits <= next);
    codes[..after].last().copied().filter(|code| code.begins(next))
}

/// The codes that rows of bytes say, in order of their bits, and the length of each exponent's.
///
/// An exponent has one code, and a table one code before it: those where they are first found. What the same number stands for elsewhere
/// fills entries that no code leads to.
fn codes(luts: &[u8]) -> Result<(Vec<Code>, [u8; ROW]), CodeFault> {
    let (rows, rest) = luts.as_chunks::<ROW>();
    let (Some((stated, tables @ [_, ..])), []) = (rows.split_last(), rest) else {
        return Err(header("its tables are not rows of 256"));
    };
    // The bits before a table's byte, and how many bytes they are.
    let mut before: Vec<Option<(u32, usize)>> = vec![None; tables.len()];
    before[0] = Some((0, 0));
    let (mut codes, mut lengths) = (Vec::new(), [0; ROW]);
    for (number, table) in tables.iter().enumerate() {
        let Some((prefix, depth)) = before[number] else { continue };
        let with = |byte: usize| prefix | (byte as u32) << (24 - 8 * depth);
        let mut byte = 0;
        while let Some(&value) = table.get(byte) {
            let here = byte;
            byte += 1;
            if value >= MARKS {
                let table = ROW - usize::from(value);
                if table > number && depth + 1 < DEPTH && before.get(table) == Some(&None) {
                    before[table] = Some((with(here), depth + 1));
                }
                continue;
            }
            let exponent = usize::from(value);
            let length = usize::from(stated[exponent]);
            if lengths[exponent] != 0 || !(8 * depth + 1..=8 * depth + 8).contains(&length) {
                continue;
            }
            let entries = 1 << (8 * depth + 8 - length);
            if here.is_multiple_of(entries) && table[here..here + entries].iter().all(|other| *other == value) {
                lengths[exponent] = length as u8;
                codes.push(Code { bits: with(here), length: length as u8, exponent: value });
                byte = here + entries;
            }
        }
    }
    if codes.is_empty() {
        return Err(header("its tables have no codes"));
    }
    codes.sort_unstable_by_key(|code| code.bits);
    Ok((codes, lengths))
}
