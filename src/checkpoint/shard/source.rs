//! A file of which a rank has a part: its tensors are read as if the file had the rank's parts of them.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use super::cut::Stretches;
use crate::error::{Error, FileFault, Result};
use crate::file::read::{Bounce, Kept, read_through, readers};
use crate::transfer::{ReadPart, ReadWays, Source, Stamp};

/// Stretches of fewer bytes are not asked for one by one of a source that may be far away: it takes longer to ask than to read what is
/// between them.
const APART: u64 = 1 << 20;

/// The bytes that are read at a time with the gaps between stretches.
const RUN: u64 = 4 << 20;

/// A file of which some tensors are read in part. Offsets up to its length are its own; parts of tensors follow, in their order.
#[derive(Debug)]
pub(crate) struct CutSource {
    file: Arc<dyn Source>,
    stamp: Stamp,
    /// In order; each begins where the one before ends.
    spans: Vec<Span>,
}

/// The part of a tensor.
#[derive(Debug, Hash)]
pub(super) struct Span {
    /// Where it begins here, and its bytes.
    pub(super) begin: u64,
    pub(super) bytes: u64,
    /// Where the whole tensor begins in the file.
    pub(super) at: u64,
    pub(super) stretches: Stretches,
}

/// Bytes of a part that are read with what is between them: the range of the file that they lie in.
struct Gathered<'a> {
    span: &'a Span,
    file: Range<u64>,
    /// The first byte in the part.
    first: u64,
    dst: &'a mut [u8],
}

impl CutSource {
    /// Parts of tensors of `file`, which follow its own bytes up to `len`.
    pub(super) fn new(file: Arc<dyn Source>, spans: Vec<Span>, len: u64) -> CutSource {
        // Other parts of the same file are others.
        let stamp = Stamp::of_version(len, &(file.stamp(), &spans));
        CutSource { file, stamp, spans }
    }

    /// Divides parts into what is read as it is and what is gathered.
    fn divide<'s>(&'s self, parts: &'s mut [ReadPart<'_>]) -> (Vec<ReadPart<'s>>, Vec<Gathered<'s>>) {
        let (mut plain, mut gathered) = (Vec::new(), Vec::new());
        let own = self.spans.first().map_or(u64::MAX, |first| first.begin);
        for ReadPart { at, dst } in parts {
            let (mut at, mut rest) = (*at, &mut **dst);
            if at < own {
                let (here, after) = rest.split_at_mut((own - at).min(rest.len() as u64) as usize);
                at += here.len() as u64;
                plain.push(ReadPart::new(at - here.len() as u64, here));
                rest = after;
            }
            let mut spans = self.spans[self.spans.partition_point(|span| span.begin + span.bytes <= at)..].iter();
            while !rest.is_empty()
                && let Some(span) = spans.next()
            {
                let within = at - span.begin;
                let (here, after) = rest.split_at_mut((span.bytes - within).min(rest.len() as u64) as usize);
                (at, rest) = (at + here.len() as u64, after);
                // The system's own files are read in order, with what is between two parts where that is faster.
                if self.file.file().is_some() || span.stretches.longest() >= APART {
                    span.asked(within, here, &mut plain);
                } else {
                    span.gathered(within, here, &mut plain, &mut gathered);
                }
            }
        }
        (plain, gathered)
    }

    fn gather(&self, Gathered { span, file, first, dst }: Gathered<'_>) -> Result<()> {
        let len = (file.end - file.start) as usize;
        let mut buffer = Bounce::around(len).map_err(Error::io("map memory to read", self.path()))?;
        let mut found = self.file.read_within(file.start, len, buffer.bytes())?;
        if found.len() != len || found.end > buffer.bytes().len() {
            // A part of it is in the page cache, say.
            self.file.read_at(file.start, &mut buffer.bytes()[..len])?;
            found = 0..len;
        }
        let bytes = &buffer.bytes()[found];
        let mut at = 0;
        span.stretches.each(first..first + dst.len() as u64, |from, len| {
            let (from, len) = ((span.at + from - file.start) as usize, len as usize);
            dst[at..at + len].copy_from_slice(&bytes[from..from + len]);
            at += len;
        });
        Ok(())
    }
}

impl Span {
    /// Adds a read of each stretch of the bytes from `within` on.
    fn asked<'a>(&self, within: u64, dst: &'a mut [u8], plain: &mut Vec<ReadPart<'a>>) {
        let mut rest = dst;
        self.stretches.each(within..within + rest.len() as u64, |from, len| {
            let (here, after) = std::mem::take(&mut rest).split_at_mut(len as usize);
            plain.push(ReadPart::new(self.at + from, here));
            rest = after;
        });
    }

    /// Adds reads of the bytes from `within` on with what is between them, each of few enough bytes of the file.
    fn gathered<'a>(
        &'a self,
        within: u64,
        dst: &'a mut [u8],
        plain: &mut Vec<ReadPart<'a>>,
        gathered: &mut Vec<Gathered<'a>>,
    ) {
        let mut runs: Vec<(Range<u64>, Range<u64>)> = Vec::new();
        let mut at = within;
        self.stretches.each(within..within + dst.len() as u64, |from, len| {
            let (file, part) = (self.at + from..self.at + from + len, at..at + len);
            at += len;
            match runs.last_mut() {
                Some((run, of_run)) if file.end - run.start <= RUN => (run.end, of_run.end) = (file.end, part.end),
                _ => runs.push((file, part)),
            }
        });
        let mut rest = dst;
        for (file, part) in runs {
            let (here, after) = std::mem::take(&mut rest).split_at_mut((part.end - part.start) as usize);
            match file.end - file.start == here.len() as u64 {
                true => plain.push(ReadPart::new(file.start, here)),
                false => gathered.push(Gathered { span: self, file, first: part.start, dst: here }),
            }
            rest = after;
        }
    }
}

impl Source for CutSource {
    fn path(&self) -> &Path {
        self.file.path()
    }

    fn stamp(&self) -> Stamp {
        self.stamp
    }

    fn read_at(&self, at: u64, dst: &mut [u8]) -> Result<()> {
        self.read_parts(&mut [ReadPart::new(at, dst)])
    }

    fn read_parts(&self, parts: &mut [ReadPart<'_>]) -> Result<()> {
        for part in parts.iter() {
            let (end, actual) = (part.at.checked_add(part.dst.len() as u64), self.stamp.len());
            if end.is_none_or(|end| end > actual) {
                let expected = end.unwrap_or(u64::MAX);
                return Err(Error::file(self.path(), None, FileFault::Truncated { expected, actual }));
            }
        }
        let (mut plain, gathered) = self.divide(parts);
        if !plain.is_empty() {
            self.file.read_parts(&mut plain)?;
        }
        // The buffers of this call's first reads are those of its last.
        let _kept = (gathered.len() > 1).then(Kept::new);
        let more = readers(gathered.len());
        read_through(gathered, more, |gathered| self.gather(gathered))
    }

    fn may_stay(&self) -> bool {
        self.file.may_stay()
    }

    fn concurrency(&self) -> usize {
        self.file.concurrency()
    }

    fn stored(&self, at: u64, len: u64) -> u64 {
        let Some(span) = self.spans.iter().rfind(|span| span.begin <= at) else { return self.file.stored(at, len) };
        let (mut first, mut end) = (u64::MAX, 0);
        let within = at - span.begin;
        span.stretches.each(within..within.saturating_add(len).min(span.bytes), |from, len| {
            (first, end) = (first.min(from), end.max(from + len));
        });
        self.file.stored(span.at + first.min(end), end.saturating_sub(first))
    }

    fn ways(&self) -> ReadWays {
        self.file.ways()
    }
}
