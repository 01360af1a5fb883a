//! A file with compressed tensors, read as the file without compression that it stands for.

use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, OnceLock};

use super::super::layout::Stored;
use super::dfloat11;
use crate::dtype::DType;
use crate::error::{CodeFault, CompressedFault, Error, FileFault, Result};
use crate::file::read::{Bounce, Kept, read_through, readers};
use crate::lossless::{BLOCK_WEIGHTS, Head, Info, TOGETHER};
use crate::transfer::{ReadPart, ReadWays, Source, Stamp};

/// The weights that are decoded at a time, a whole number of blocks: as many as one thread decodes without the help of others.
const STEP: u64 = (TOGETHER * BLOCK_WEIGHTS) as u64;

/// The bytes of codes that are read in one go, as scattered reads do. While one thread decodes them, others read.
const RUN: u64 = 2 << 20;

/// The bytes of a weight at most.
const WEIGHT: usize = 4;

/// A file in which some tensors are compressed. Its offsets are those of the same tensors without compression.
#[derive(Debug)]
pub(crate) struct CompressedSource {
    file: Arc<dyn Source>,
    stamp: Stamp,
    /// In order; each begins where the one before ends.
    spans: Vec<Span>,
}

/// A tensor, or what is before the first one.
#[derive(Debug)]
pub(super) struct Span {
    /// Where it begins, and the bytes that it is read as.
    pub(super) begin: u64,
    pub(super) bytes: u64,
    /// Where it begins in the file.
    pub(super) at: u64,
    pub(super) form: Form,
}

/// How a file holds a tensor.
#[derive(Debug)]
pub(super) enum Form {
    /// As it is.
    Plain,
    /// As a code.
    Code(Code),
    /// With others as a group in DFloat11's form: the span is that of all its weights.
    Group(Box<dfloat11::Stored>),
}

/// The code of a tensor in a file.
#[derive(Debug)]
pub(super) struct Code {
    dtype: DType,
    bytes: u64,
    /// Header and index, once they have been read.
    head: OnceLock<Vec<u8>>,
}

/// The parts of a read: what is read as it is, what is decoded, and what is of groups, from a byte of their weights on.
#[derive(Default)]
struct Divided<'a> {
    plain: Vec<ReadPart<'a>>,
    jobs: Vec<Job<'a>>,
    of_groups: Vec<(&'a dfloat11::Stored, ReadPart<'a>)>,
}

/// Weights to decode: `weights` of a tensor, to `dst`. If that has fewer bytes, it is part of a single weight, from byte `skip` on.
struct Job<'a> {
    span: &'a Span,
    code: &'a Code,
    weights: Range<u64>,
    skip: usize,
    dst: &'a mut [u8],
}

/// What a job decodes, and the bytes of the code that it needs.
struct Needed<'s, 'a> {
    job: Job<'a>,
    head: Head<'s>,
    code: Range<u64>,
}

impl Form {
    /// The code of a tensor of this type, of so many bytes.
    pub(super) fn code(dtype: DType, bytes: u64) -> Form {
        Form::Code(Code { dtype, bytes, head: OnceLock::new() })
    }
}

impl CompressedSource {
    /// The tensors of `file` in these spans, which end at `len`.
    pub(super) fn new(file: Arc<dyn Source>, spans: Vec<Span>, len: u64) -> CompressedSource {
        let stamp = file.stamp().with_len(len);
        CompressedSource { file, stamp, spans }
    }

    /// Tensors that follow each other, read from where `file` has them, which is memory or a file: for each its type, its bytes, and
    /// the place and form there.
    pub(crate) fn of(
        file: Arc<dyn Source>,
        tensors: impl IntoIterator<Item = (DType, u64, u64, Stored)>,
    ) -> CompressedSource {
        let mut begin = 0;
        let span = |(dtype, bytes, at, stored): (DType, u64, u64, Stored)| {
            let form = if stored.is_code { Form::code(dtype, stored.bytes) } else { Form::Plain };
            let span = Span { begin, bytes, at, form };
            begin += bytes;
            span
        };
        let spans = tensors.into_iter().map(span).collect();
        CompressedSource::new(file, spans, begin)
    }

    /// The file as it is.
    pub(crate) fn file(&self) -> &Arc<dyn Source> {
        &self.file
    }

    /// The place in the file of the tensor that is read from `begin` to `begin + bytes`, and how the file holds it.
    pub(crate) fn place(&self, begin: u64, bytes: u64) -> Option<(u64, Stored)> {
        let span = self.span(begin, bytes)?;
        let stored = match &span.form {
            Form::Plain => Stored { bytes: span.bytes, is_code: false, is_made: false },
            Form::Code(code) => Stored { bytes: code.bytes, is_code: true, is_made: false },
            Form::Group(_) => return None,
        };
        Some((span.at, stored))
    }

    /// What the header says of the code of such a tensor. Header and index are checked.
    ///
    /// # Errors
    /// As [`read_at`](Source::read_at); [`FileFault::Compressed`].
    pub(crate) fn info(&self, begin: u64, bytes: u64) -> Result<Info> {
        match self.span(begin, bytes).map(|span| (span, &span.form)) {
            Some((span, Form::Code(code))) => Ok(*self.head(span, code)?.info()),
            _ => Err(Error::bug("a tensor of which the file has no code")),
        }
    }

    /// Checks that a code with this header is that of such a tensor.
    ///
    /// # Errors
    /// [`FileFault::Compressed`].
    pub(crate) fn check(&self, begin: u64, bytes: u64, info: &Info) -> Result<()> {
        match self.span(begin, bytes).map(|span| (span, &span.form)) {
            Some((span, Form::Code(code))) => code.check(span, info).map_err(|fault| self.fault(fault)),
            _ => Err(Error::bug("a tensor of which the file has no code")),
        }
    }

    fn span(&self, begin: u64, bytes: u64) -> Option<&Span> {
        let first = self.spans.partition_point(|span| span.begin < begin);
        self.spans[first..].iter().take_while(|span| span.begin == begin).find(|span| span.bytes == bytes)
    }

    /// Divides parts into what is read as it is, with offsets in the file, and what is decoded.
    fn divide<'s>(&'s self, parts: &'s mut [ReadPart<'_>]) -> Divided<'s> {
        let Divided { mut plain, mut jobs, mut of_groups } = Divided::default();
        for ReadPart { at, dst } in parts {
            let (mut at, mut rest) = (*at, &mut **dst);
            let mut spans = self.spans[self.spans.partition_point(|span| span.begin + span.bytes <= at)..].iter();
            while !rest.is_empty()
                && let Some(span) = spans.next()
            {
                let within = at - span.begin;
                let (here, after) = rest.split_at_mut((span.bytes - within).min(rest.len() as u64) as usize);
                (at, rest) = (at + here.len() as u64, after);
                match &span.form {
                    Form::Plain => plain.push(ReadPart::new(span.at + within, here)),
                    Form::Code(code) => code.divide(span, within, here, &mut jobs),
                    Form::Group(group) => of_groups.push((group, ReadPart::new(within, here))),
                }
            }
        }
        Divided { plain, jobs, of_groups }
    }

    /// Reads the codes of jobs that lie together, and decodes them.
    fn decode(&self, run: Vec<Needed<'_, '_>>) -> Result<()> {
        let (Some(first), Some(end)) =
            (run.first().map(|first| first.file().start), run.iter().map(|needed| needed.file().end).max())
        else {
            return Ok(());
        };
        let len = (end - first) as usize;
        let mut buffer = Bounce::around(len).map_err(Error::io("map memory to read", self.path()))?;
        let mut found = self.file.read_within(first, len, buffer.bytes())?;
        if found.len() != len || found.end > buffer.bytes().len() {
            // A part of it is in the page cache, say.
            self.file.read_at(first, &mut buffer.bytes()[..len])?;
            found = 0..len;
        }
        let bytes = &buffer.bytes()[found];
        for mut needed in run {
            let within = needed.file();
            let code = &bytes[(within.start - first) as usize..(within.end - first) as usize];
            needed.decode(code).map_err(|fault| self.fault(fault))?;
        }
        Ok(())
    }

    /// The header and the index of a code, which are read if they have not been.
    fn head<'s>(&self, span: &Span, code: &'s Code) -> Result<Head<'s>> {
        let bytes = match code.head.get() {
            Some(bytes) => bytes,
            None => {
                let bytes = self.read_head(span, code)?;
                code.head.get_or_init(|| bytes)
            }
        };
        Head::open(bytes).map_err(|fault| self.fault(fault.into()))
    }

    fn read_head(&self, span: &Span, code: &Code) -> Result<Vec<u8>> {
        let mut head = vec![0; code.bytes.min(Info::BYTES) as usize];
        self.file.read_at(span.at, &mut head)?;
        let info = Info::read(&head).map_err(|fault| self.fault(fault.into()))?;
        code.check(span, &info).map_err(|fault| self.fault(fault))?;
        head = vec![0; info.head_bytes() as usize];
        self.file.read_at(span.at, &mut head)?;
        Ok(head)
    }

    fn fault(&self, fault: CompressedFault) -> Error {
        Error::file(self.path(), None, fault.into())
    }
}

impl Source for CompressedSource {
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
        let Divided { mut plain, jobs, of_groups } = self.divide(parts);
        if !plain.is_empty() {
            self.file.read_parts(&mut plain)?;
        }
        for (group, part) in of_groups {
            group.read(&*self.file, part.at, part.dst)?;
        }
        let (mut needed, mut last) = (Vec::with_capacity(jobs.len()), None);
        for job in jobs {
            // To open one takes as long as its index is.
            let head = match last {
                Some((span, head)) if std::ptr::eq(span, job.span) => head,
                _ => self.head(job.span, job.code)?,
            };
            last = Some((job.span, head));
            let code = head.bytes_of(&job.weights).map_err(|fault| self.fault(fault.into()))?;
            needed.push(Needed { job, head, code });
        }
        let runs = runs(needed);
        // The buffers of this call's first runs are those of its last.
        let _kept = (runs.len() > 1).then(Kept::new);
        let more = readers(runs.len());
        read_through(runs, more, |run| self.decode(run))
    }

    fn may_stay(&self) -> bool {
        self.file.may_stay()
    }

    fn concurrency(&self) -> usize {
        self.file.concurrency()
    }

    fn stored(&self, at: u64, len: u64) -> u64 {
        let (mut stored, end) = (0, at.saturating_add(len));
        let spans = &self.spans[self.spans.partition_point(|span| span.begin + span.bytes <= at)..];
        for span in spans.iter().take_while(|span| span.begin < end) {
            let here = (span.begin + span.bytes).min(end) - span.begin.max(at);
            let bytes = match &span.form {
                Form::Plain => span.bytes,
                Form::Code(code) => code.bytes,
                Form::Group(group) => group.bytes(),
            };
            // A part takes its share.
            stored += (u128::from(bytes) * u128::from(here)).div_ceil(u128::from(span.bytes).max(1)) as u64;
        }
        stored
    }

    fn ways(&self) -> ReadWays {
        self.file.ways()
    }
}

impl Code {
    /// The bytes of a weight.
    fn size(&self) -> u64 {
        self.dtype.block().bytes
    }

    /// Checks that a header is of as many weights of this type, and of as many bytes.
    fn check(&self, span: &Span, info: &Info) -> Result<(), CompressedFault> {
        let (count, dtype) = (span.bytes / self.size(), self.dtype);
        if (info.dtype, info.count) != (dtype, count) {
            let (found, found_dtype) = (info.count, info.dtype);
            return Err(CompressedFault::Other { count, dtype, found, found_dtype });
        }
        let (given, expected) = (self.bytes, info.bytes.max(info.head_bytes()));
        if given != expected {
            return Err(CodeFault::Length { expected, given }.into());
        }
        Ok(())
    }

    /// Adds the jobs for the bytes of a tensor from `at` on.
    fn divide<'s>(&'s self, span: &'s Span, mut at: u64, mut dst: &'s mut [u8], jobs: &mut Vec<Job<'s>>) {
        let size = self.size();
        while !dst.is_empty() {
            let (first, skip) = (at / size, at % size);
            // A part of one weight, or whole ones up to the end of a step.
            let bytes = match skip > 0 || (dst.len() as u64) < size {
                true => (size - skip).min(dst.len() as u64),
                false => ((first / STEP + 1) * STEP - first).min(dst.len() as u64 / size) * size,
            };
            let (here, rest) = dst.split_at_mut(bytes as usize);
            let weights = first..first + bytes.div_ceil(size);
            jobs.push(Job { span, code: self, weights, skip: skip as usize, dst: here });
            (at, dst) = (at + bytes, rest);
        }
    }
}

/// Divides jobs into those whose codes follow each other in the file, up to the bytes of a run.
fn runs<'s, 'a>(mut needed: Vec<Needed<'s, 'a>>) -> Vec<Vec<Needed<'s, 'a>>> {
    needed.sort_by_key(|needed| needed.file().start);
    let (mut runs, mut begin, mut end) = (Vec::<Vec<_>>::new(), 0, 0);
    for needed in needed {
        let file = needed.file();
        match runs.last_mut() {
            Some(run) if file.start <= end && file.end - begin <= RUN => run.push(needed),
            _ => {
                (begin, end) = (file.start, file.end);
                runs.push(vec![needed]);
            }
        }
        end = file.end.max(end);
    }
    runs
}

impl Needed<'_, '_> {
    /// The bytes of the file that it needs.
    fn file(&self) -> Range<u64> {
        self.job.span.at + self.code.start..self.job.span.at + self.code.end
    }

    fn decode(&mut self, code: &[u8]) -> Result<(), CompressedFault> {
        let Job { weights, skip, dst, code: stored, .. } = &mut self.job;
        let code = self.head.part(self.code.start, code);
        let size = stored.size() as usize;
        if dst.len() as u64 == (weights.end - weights.start) * size as u64 {
            return Ok(code.decode_range(weights.clone(), dst)?);
        }
        let mut one = [0; WEIGHT];
        code.decode_range(weights.clone(), &mut one[..size])?;
        dst.copy_from_slice(&one[*skip..][..dst.len()]);
        Ok(())
    }
}
