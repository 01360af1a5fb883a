//! The weights of a tensor from its lossless code, from one buffer of a device into another.

use std::collections::HashSet;

use super::{Buf, BufMut, Event, Flight};
use crate::dtype::DType;
use crate::error::{Error, Measured, Result};
use crate::lossless::{CODE_ALIGN, CodePart, Info};

/// The code of a tensor, or a part of it, the memory for its weights, and the memory for a verdict on the code. All three are inside of
/// their buffers.
///
/// A verdict is [`VERDICT`](Decompress::VERDICT) bytes, zero before the first code. Several codes may share one: once all are
/// decoded it [is sound](Decompress::is_sound) if all of them were. Until that is known, the weights are not to be used.
#[derive(Debug)]
pub struct Decompress {
    src: Buf,
    offset: usize,
    info: Info,
    part: CodePart,
    /// Where the part begins in the source.
    from: usize,
    dst: BufMut,
    at: usize,
    verdict: BufMut,
    place: usize,
}

/// The weights of a code in flight, with their buffer and that of the verdict.
#[derive(Debug)]
pub struct DecompressFlight {
    /// The buffer for the weights.
    pub weights: Flight,
    /// The buffer of the verdict, for the next code or for reading it.
    pub verdict: Flight,
}

/// A code that was not decoded: why, and both buffers.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
#[non_exhaustive]
pub struct Undecoded {
    /// The reason.
    #[source]
    pub error: Error,
    /// The buffer for the weights.
    pub dst: BufMut,
    /// The buffer of the verdict.
    pub verdict: BufMut,
}

impl From<Box<Undecoded>> for Error {
    fn from(undecoded: Box<Undecoded>) -> Error {
        undecoded.error
    }
}

impl Decompress {
    /// The bytes of a verdict, little-endian: a u64 for the sum of all blocks less those of the codes' headers, and a u32 that is
    /// not zero if a block is damaged; then four that stay as they are.
    pub const VERDICT: usize = 16;

    /// The code at byte `offset` of `src`, which begins at a multiple of 16 bytes; the weights from byte `at` of `dst` on, which
    /// is aligned to them; the verdict at byte `place` of `verdict`, a multiple of 16 too. `info` is that of the code, whose
    /// header and index [were checked](crate::lossless::Code::open); the blocks need not be.
    ///
    /// # Errors
    /// [`Undecoded`] with [`Error::Invalid`] for what is not aligned and for an info that no code has; with
    /// [`Error::WrongSize`] when the code exceeds `src`, the weights `dst`, or the verdict its buffer.
    pub fn new(
        (src, offset): (Buf, usize),
        info: Info,
        (dst, at): (BufMut, usize),
        (verdict, place): (BufMut, usize),
    ) -> Result<Decompress, Box<Undecoded>> {
        Decompress::part((src, offset), info, (CodePart::whole(&info), offset), (dst, at), (verdict, place))
    }

    /// As [`new`](Decompress::new), for the blocks of a part of the code. Its header and index are at byte `offset` of `src`, and the part
    /// begins at byte `from` there. `at` is where the weights of the whole code begin. The parts of a code share a verdict.
    ///
    /// # Errors
    /// As [`new`](Decompress::new); [`Undecoded`] with [`Error::Invalid`] for a part that has less of the code than its blocks may take.
    pub fn part(
        (src, offset): (Buf, usize),
        info: Info,
        (part, from): (CodePart, usize),
        (dst, at): (BufMut, usize),
        (verdict, place): (BufMut, usize),
    ) -> Result<Decompress, Box<Undecoded>> {
        match Decompress::check((&src, offset), &info, (&part, from), (&dst, at), (&verdict, place)) {
            Ok(()) => Ok(Decompress { src, offset, info, part, from, dst, at, verdict, place }),
            Err(error) => Err(Box::new(Undecoded { error, dst, verdict })),
        }
    }

    fn check(
        (src, offset): (&Buf, usize),
        info: &Info,
        (part, from): (&CodePart, usize),
        (dst, at): (&BufMut, usize),
        (verdict, place): (&BufMut, usize),
    ) -> Result<()> {
        let fits = |what, at: usize, needed: u64, given: usize| {
            let needed = needed.saturating_add(at as u64);
            if needed <= given as u64 { Ok(()) } else { Err(Error::WrongSize { what, needed, given: given as u64 }) }
        };
        fits(Measured::Source, offset, info.head_bytes().min(info.bytes), src.bytes())?;
        fits(Measured::Source, from, part.end.saturating_sub(part.begin), src.bytes())?;
        fits(Measured::Destination, at, info.decoded_bytes, dst.bytes())?;
        fits(Measured::Verdict, place, Self::VERDICT as u64, verdict.bytes())?;
        if !info.is_consistent() {
            return Err(Error::invalid(format!("no code of {} weights has {} bytes", info.count, info.bytes)));
        }
        if !part.is_of(info) {
            let CodePart { begin, after, end } = part;
            let what =
                format!("bytes {begin}..{end} of a code of {} do not hold what ends from {after} on", info.bytes);
            return Err(Error::invalid(what));
        }
        let size = info.dtype.element_bytes().unwrap_or(1);
        // Memory without an address is aligned as all allocations are.
        let begins = [
            ("the code", src.address().unwrap_or(src.start() as u64), offset, CODE_ALIGN),
            ("the part of the code", src.address().unwrap_or(src.start() as u64), from, CODE_ALIGN),
            ("the weights", dst.address().unwrap_or(dst.start() as u64), at, size),
            ("the verdict", verdict.address().unwrap_or(verdict.start() as u64), place, Self::VERDICT),
        ];
        match begins.into_iter().find(|(_, begin, at, align)| !(begin + *at as u64).is_multiple_of(*align as u64)) {
            Some((what, _, at, align)) => {
                Err(Error::invalid(format!("{what} at byte {at} of a buffer is not aligned to {align} bytes")))
            }
            None => Ok(()),
        }
    }

    /// Whether all codes of a verdict were sound, by its bytes.
    pub fn is_sound(verdict: &[u8; Self::VERDICT]) -> bool {
        *verdict == [0; Self::VERDICT]
    }

    /// The element type of the weights.
    pub fn dtype(&self) -> DType {
        self.info.dtype
    }

    /// What the code's header says.
    pub fn info(&self) -> &Info {
        &self.info
    }

    /// The buffer of the code.
    pub fn source(&self) -> &Buf {
        &self.src
    }

    /// The part of the code to decode. Of the code no more than header, index and this part need be in the source.
    pub fn code_part(&self) -> CodePart {
        self.part
    }

    /// The byte of the source at which the part begins; that of the code, if it is decoded as a whole.
    pub fn part_offset(&self) -> usize {
        self.from
    }

    /// The bytes of weights that the part stands for, by its share of the code.
    pub fn weights(&self) -> u64 {
        self.part.share(self.info.decoded_bytes, self.info.bytes)
    }

    /// The byte of the source at which the code's header and index are.
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// The buffer for the weights.
    pub fn dst(&self) -> &BufMut {
        &self.dst
    }

    /// The byte of the destination at which the weights begin.
    pub fn at(&self) -> usize {
        self.at
    }

    /// The buffer of the verdict.
    pub fn verdict(&self) -> &BufMut {
        &self.verdict
    }

    /// The byte of its buffer at which the verdict begins.
    pub fn place(&self) -> usize {
        self.place
    }

    /// The events that the work must wait for: those of the code's arrival, and of the last uses of the other two, each once.
    pub fn waits(&self) -> Vec<Event> {
        let mut known = HashSet::new();
        let uses = self.dst.uses().into_iter().chain(self.verdict.uses());
        uses.chain(self.src.filled_by().iter().cloned()).filter(|event| known.insert(event.key())).collect()
    }

    /// Turns the work into a flight, once it is queued and `done` completes after it. All three buffers carry this event then.
    pub fn launched(self, done: Event) -> DecompressFlight {
        self.src.used_until(done.clone());
        DecompressFlight { weights: Flight::of(self.dst, done.clone()), verdict: Flight::of(self.verdict, done) }
    }

    /// As [`launched`](Decompress::launched), for a stream whose event completes after all events that the work
    /// [waits](Decompress::waits) for, and fails if they fail: it replaces the other events of both buffers.
    pub(super) fn launched_in_order(self, done: Event) -> DecompressFlight {
        self.src.used_until(done.clone());
        let (weights, verdict) = (Flight::in_order(self.dst, done.clone()), Flight::in_order(self.verdict, done));
        DecompressFlight { weights, verdict }
    }

    /// Gives the buffers back, if queueing the work failed and some of it may be under way until an event.
    #[cfg(any(feature = "cuda", feature = "vulkan"))]
    pub(super) fn refused(mut self, error: Error, under_way: Option<Event>) -> Box<Undecoded> {
        if let Some(event) = under_way {
            self.src.used_until(event.clone());
            self.dst.after(event.clone());
            self.verdict.after(event);
        }
        self.rejected(error)
    }

    /// Gives the buffers back, if the work was not queued.
    pub fn rejected(self, error: Error) -> Box<Undecoded> {
        Box::new(Undecoded { error, dst: self.dst, verdict: self.verdict })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::{Backend, Host, MemoryKind};
    use crate::device::DeviceId;
    use crate::lossless::compress;

    #[test]
    fn what_does_not_fit_is_refused_and_the_buffers_come_back() {
        let host = Host::new().open(DeviceId::CPU).unwrap();
        let buffer = |bytes| host.alloc(bytes, MemoryKind::Whole).unwrap();
        let code = compress(DType::BF16, &[7; 20_000]).unwrap();
        let info = Info::read(&code).unwrap();
        let bytes = code.len();
        let work = |info, offset, at, place| {
            let (src, dst, verdict) = (buffer(bytes + 16), buffer(20_002), buffer(32));
            Decompress::new((src.freeze(), offset), info, (dst, at), (verdict, place))
        };
        let fits = work(info, 16, 2, 16).unwrap();
        assert_eq!((fits.dtype(), fits.offset(), fits.at(), fits.place()), (DType::BF16, 16, 2, 16));
        let changed = |change: fn(&mut Info)| {
            let mut info = info;
            change(&mut info);
            info
        };
        for (refused, wanted) in [
            (work(info, 32, 2, 16), format!("reads up to byte {} of a buffer of {}", bytes + 32, bytes + 16)),
            (work(info, 16, 4, 16), "writes up to byte 20004 of a buffer of 20002".to_owned()),
            (work(info, 16, 2, 32), "a verdict up to byte 48 of a buffer of 32".to_owned()),
            (work(info, usize::MAX, 2, 16), "reads up to byte".to_owned()),
            (work(info, 8, 2, 16), "the code at byte 8".to_owned()),
            (work(info, 16, 1, 16), "the weights at byte 1 of a buffer is not aligned to 2".to_owned()),
            (work(info, 16, 2, 8), "the verdict at byte 8".to_owned()),
            (work(changed(|info| info.bytes = 64), 0, 0, 0), "no code of 10000 weights has 64 bytes".to_owned()),
            (work(changed(|info| info.bytes -= 1), 0, 0, 0), "no code of 10000 weights".to_owned()),
            (work(changed(|info| info.in_blocks = false), 0, 0, 0), "no code of 10000 weights".to_owned()),
            (work(changed(|info| info.decoded_bytes = 4), 0, 0, 0), "no code of 10000 weights".to_owned()),
            (work(changed(|info| info.dtype = DType::U8), 0, 0, 0), "no code of 10000 weights".to_owned()),
            (work(changed(|info| info.count = u64::MAX), 0, 0, 0), "no code of".to_owned()),
        ] {
            let refused = refused.unwrap_err();
            assert!(refused.error.to_string().contains(&wanted), "{}", refused.error);
            assert_eq!((refused.dst.bytes(), refused.verdict.bytes()), (20_002, 32));
        }
    }

    /// What is launched for a part reads no further than the part, so none may say more than is there.
    #[test]
    fn a_part_has_all_that_its_blocks_may_take() {
        let host = Host::new().open(DeviceId::CPU).unwrap();
        let buffer = |bytes| host.alloc(bytes, MemoryKind::Whole).unwrap();
        let weights: Vec<u8> =
            (0..6 * 16384u32).map(|at| (at.wrapping_mul(0x9e37_79b1) >> 24) as u8 & 0x87 | 0x38).collect();
        let code = compress(DType::BF16, &weights).unwrap();
        let info = Info::read(&code).unwrap();
        let (bytes, head, longest) = (info.bytes, info.head_bytes() as usize, 32 + 16384);
        let part = |begin: u64, after: u64, end: u64, (source, from, offset): (usize, usize, usize)| {
            let (src, dst, verdict) = (buffer(source).freeze(), buffer(weights.len()), buffer(16));
            let part = (CodePart { begin, after, end }, from);
            Decompress::part((src, offset), info, part, (dst, 0), (verdict, 0)).map(|work| work.weights())
        };
        let room = |begin: u64, end: u64| (head + (end - begin) as usize, head, 0);
        let (first, second) = (longest + 48, longest + 4096);
        assert!(bytes > second && bytes % 16 == 0, "{info:?}");
        let whole = [(0, 0, first), (first - longest, first, second), (second - longest, second, bytes)];
        let all = whole.map(|(begin, after, end)| part(begin, after, end, room(begin, end)).unwrap());
        assert_eq!(all.iter().sum::<u64>(), info.decoded_bytes);
        for (begin, after, end, given) in [
            (16, 0, first, room(16, first)),
            (0, first, first, room(0, first)),
            (0, second, first, room(0, second)),
            (0, first, bytes + 16, room(0, bytes + 16)),
            (first - longest + 16, first, second, room(first - longest + 16, second)),
            (0, 8, first, room(0, first)),
            (0, 0, first - 8, room(0, first)),
            (8, first, second, room(8, second)),
            (0, 0, first, (head + first as usize - 1, head, 0)),
            (0, 0, first, (first as usize, 0, first as usize - head + 16)),
            (0, 0, first, (8 + head + first as usize, head + 8, 0)),
            (0, 0, first, (8 + head + first as usize, head, 8)),
            (u64::MAX - 15, u64::MAX - 15, u64::MAX, room(0, bytes)),
        ] {
            let refused = part(begin, after, end, given).unwrap_err();
            assert!(matches!(refused.error, Error::Invalid { .. } | Error::WrongSize { .. }), "{}", refused.error);
        }
    }
}
