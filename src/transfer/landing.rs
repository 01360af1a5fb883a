//! Landing buffers: memory on a device in which tensors arrive in another form than they are used in, GGML's blocks or the lossless
//! code, and from where their values are computed to where they are used.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::backend::{Buf, BufMut, Decompress, Dequantise, Device, Kernels, Piece, Rejected, Stream, Transfer};
use crate::dtype::DType;
use crate::error::{Error, Missing, Result};
use crate::lossless::{CodePart, Info};
use crate::schedule::{Carried, VERDICT_ROOM};

/// At what multiples the halves of a landing buffer begin.
const ALIGN: usize = 256;

/// A landing buffer, which one lane at a time fills, and the stream that unpacks from it: while one half is unpacked, the other one is
/// filled.
#[derive(Debug)]
pub(crate) struct Landing {
    memory: Mutex<Memory>,
    stream: Arc<dyn Stream>,
}

/// The memory of a landing buffer. What is `None` is in use, or lost.
#[derive(Debug)]
struct Memory {
    /// Where tensors arrive in turns, and whose turn it is.
    halves: [Option<BufMut>; 2],
    next: usize,
    /// Where a device says whether codes are sound, if any land here.
    verdict: Option<BufMut>,
    zeros: Option<Zeros>,
}

/// What a verdict begins with, beside it.
#[derive(Debug)]
enum Zeros {
    /// They have yet to come from this memory of the host.
    Missing(BufMut, Buf),
    Here(Buf),
}

/// A landing buffer while a part of a layer passes it, which nobody else uses meanwhile.
struct Landed<'l> {
    memory: MutexGuard<'l, Memory>,
    device: &'l dyn Device,
    stream: &'l dyn Stream,
    /// What arrived last, and in which half.
    last: Option<(usize, Buf)>,
}

/// What arrives together.
#[derive(Debug)]
pub(crate) struct Arriving<R> {
    /// What is copied, behind what is carried.
    pub(crate) copied: R,
    /// What is needed of what arrived before.
    pub(crate) carried: Option<Carried>,
    pub(crate) values: Vec<Values>,
}

/// A tensor to unpack, or a part of one: it begins at a byte of a source, and its values go to the byte `at` of a destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Values {
    pub(crate) begin: usize,
    pub(crate) at: usize,
    pub(crate) form: Packed,
}

/// The form of a tensor that is to be unpacked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Packed {
    /// Blocks of a type, and the number and type of their values.
    Blocks { from: DType, count: usize, to: DType },
    /// The code of this header, the part of it that is there, which begins at a byte of the source, and the bytes of weights that this
    /// stands for. Without a part, all of it. The header is `None` in a model without contents: then nothing is decoded, and takes as
    /// long.
    Code { info: Option<Info>, part: Option<(CodePart, usize)>, weights: u64 },
}

impl Landing {
    /// Tensors arrive in all of `memory`, and `stream` unpacks them.
    pub(crate) fn new(memory: BufMut, stream: Arc<dyn Stream>) -> Landing {
        Landing { memory: Mutex::new(Memory::new(memory)), stream }
    }

    /// As [`new`](Landing::new), with the end of `memory` for verdicts. `zeros` are those of a verdict, on the host.
    pub(crate) fn with_verdict(memory: BufMut, stream: Arc<dyn Stream>, zeros: &Buf) -> Landing {
        Landing::with_room(VERDICT_ROOM as usize, memory, stream, zeros)
    }

    /// A landing buffer in which nothing lands, for the verdict on what is [decoded where it lives](Landing::decode_here), in memory of
    /// this one that no verdict needs. `None` if there is none. The memory comes back with [`join`](Landing::join).
    pub(crate) fn split_verdict(&self, stream: Arc<dyn Stream>, zeros: &Buf) -> Option<Landing> {
        let mut memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        let spare = memory.verdict.as_mut()?.split_off(VERDICT_ROOM as usize / 2 - Decompress::VERDICT).ok()?;
        Some(Landing::with_room(spare.bytes(), spare, stream, zeros))
    }

    /// Takes back the memory that was [split off](Landing::split_verdict). If that is lost, [`into_memory`](Landing::into_memory)
    /// gives none of this buffer's.
    pub(crate) fn join(&mut self, split: Option<BufMut>) {
        let memory = self.memory.get_mut().unwrap_or_else(PoisonError::into_inner);
        let verdict = memory.verdict.take().zip(split);
        memory.verdict = verdict.and_then(|(mut verdict, split)| verdict.unsplit(split).is_ok().then_some(verdict));
    }

    fn with_room(room: usize, mut memory: BufMut, stream: Arc<dyn Stream>, zeros: &Buf) -> Landing {
        let tail = memory.bytes().checked_sub(room).and_then(|landed| memory.split_off(landed).ok());
        let split = tail.and_then(|mut tail| Some((tail.split_off(Decompress::VERDICT).ok()?, tail)));
        let (verdict, tail) = split.unzip();
        let zeros = tail.map(|tail| Zeros::Missing(tail, zeros.clone()));
        Landing { memory: Mutex::new(Memory { verdict, zeros, ..Memory::new(memory) }), stream }
    }

    /// Passes a part of a layer through the buffer, in rounds: `fill` queues the copies of a round into a half of it, and its values are
    /// computed into `dst` behind that, by `device`. If any are codes, `verdict` is where the host wants the verdict on them, and a
    /// stream of the device that copies it there. Returns `dst` and the verdict, which is `None` if the device's memory has only sizes.
    ///
    /// # Errors
    /// The first error, with `dst`. Work on both may be in flight then.
    pub(crate) fn pass<R>(
        &self,
        device: &dyn Device,
        rounds: &[Arriving<R>],
        dst: BufMut,
        verdict: Option<(BufMut, &dyn Stream)>,
        fill: impl Fn(&R, BufMut) -> Result<BufMut, (Error, Option<BufMut>)>,
    ) -> Result<(BufMut, Option<Buf>), Box<Rejected>> {
        let mut landed = match self.begin(device, verdict.is_some()) {
            Ok(landed) => landed,
            Err(error) => return Err(Box::new(Rejected { error, dst })),
        };
        let dst = rounds.iter().try_fold(dst, |dst, round| landed.unpack(round, dst, &fill))?;
        match verdict.map(|(place, down)| landed.verdict(down, place)).transpose() {
            Ok(verdict) => Ok((dst, verdict.flatten())),
            Err(error) => Err(Box::new(Rejected { error, dst })),
        }
    }

    /// Computes values into `dst` by `device`, where each tensor lives: some of them are codes. The verdict on them, and what is returned,
    /// are as for [`pass`](Landing::pass).
    ///
    /// # Errors
    /// As [`pass`](Landing::pass).
    pub(crate) fn decode_here(
        &self,
        device: &dyn Device,
        tensors: &[(Values, Buf)],
        dst: BufMut,
        (place, down): (BufMut, &dyn Stream),
    ) -> Result<(BufMut, Option<Buf>), Box<Rejected>> {
        let mut landed = match self.begin(device, true) {
            Ok(landed) => landed,
            Err(error) => return Err(Box::new(Rejected { error, dst })),
        };
        let dst = tensors.iter().try_fold(dst, |dst, (values, from)| landed.compute(values, from, dst))?;
        match landed.verdict(down, place) {
            Ok(verdict) => Ok((dst, verdict)),
            Err(error) => Err(Box::new(Rejected { error, dst })),
        }
    }

    /// Begins a part of a layer; `codes` says whether any tensors are codes, on which there is a verdict.
    fn begin<'l>(&'l self, device: &'l dyn Device, codes: bool) -> Result<Landed<'l>> {
        let mut memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        if codes {
            memory.clear_verdict(&*self.stream)?;
        }
        Ok(Landed { memory, device, stream: &*self.stream, last: None })
    }

    /// The buffer. `None` if any of it is lost.
    pub(crate) fn into_memory(self) -> Option<BufMut> {
        let Memory { halves: [first, second], verdict, zeros, .. } =
            self.memory.into_inner().unwrap_or_else(PoisonError::into_inner);
        let mut memory = first?;
        memory.unsplit(second?).ok()?;
        let zeros = match zeros {
            None => return Some(memory),
            Some(Zeros::Missing(zeros, _)) => zeros,
            Some(Zeros::Here(zeros)) => zeros.try_reclaim().ok()?,
        };
        memory.unsplit(zeros).ok()?;
        memory.unsplit(verdict?).ok()?;
        Some(memory)
    }
}

impl Memory {
    fn new(mut memory: BufMut) -> Memory {
        // Within the buffer.
        let second = memory.split_off(memory.bytes() / 2 / ALIGN * ALIGN).ok();
        Memory { halves: [Some(memory), second], next: 0, verdict: None, zeros: None }
    }

    /// Queues the copy of zeros to the verdict.
    fn clear_verdict(&mut self, stream: &dyn Stream) -> Result<()> {
        if let Some(Zeros::Missing(..)) = &self.zeros
            && let Some(Zeros::Missing(here, zeros)) = self.zeros.take()
        {
            let (here, outcome) = copied(stream, &zeros, here);
            self.zeros = Some(match outcome {
                Ok(()) => Zeros::Here(here.freeze()),
                Err(_) => Zeros::Missing(here, zeros),
            });
            outcome?;
        }
        let verdict = self.verdict.take().and_then(again);
        let (Some(Zeros::Here(zeros)), Some(verdict)) = (&self.zeros, verdict) else { return Err(lost()) };
        let (verdict, outcome) = copied(stream, zeros, verdict);
        self.verdict = Some(verdict);
        outcome
    }
}

/// Memory for its next use. Earlier copies into it that have failed by now have failed what they were for, and nothing that follows.
fn again(memory: BufMut) -> Option<BufMut> {
    memory.freeze().try_reclaim().ok()
}

/// Queues the copy of a verdict's bytes. Returns its destination.
fn copied(stream: &dyn Stream, src: &Buf, dst: BufMut) -> (BufMut, Result<()>) {
    let piece = Piece { src: src.clone(), from: 0..Decompress::VERDICT, at: 0 };
    match Transfer::new(vec![piece], dst).and_then(|transfer| stream.send(transfer)) {
        Ok(flight) => (flight.chain(), Ok(())),
        Err(rejected) => (rejected.dst, Err(rejected.error)),
    }
}

impl Landed<'_> {
    /// Has `fill` queue copies into the next half of the buffer, and queues the computation of the values into `dst`. Returns `dst`.
    ///
    /// # Errors
    /// The first error, with `dst`. Work on both may be in flight then.
    fn unpack<R>(
        &mut self,
        round: &Arriving<R>,
        dst: BufMut,
        fill: impl Fn(&R, BufMut) -> Result<BufMut, (Error, Option<BufMut>)>,
    ) -> Result<BufMut, Box<Rejected>> {
        let half = self.memory.next;
        let Some(memory) = self.memory.halves[half].take().and_then(again) else {
            return Err(Box::new(Rejected { error: lost(), dst }));
        };
        let filled = self.filled(round, memory, fill);
        self.give_back();
        let filled = match filled {
            Ok(filled) => filled.freeze(),
            Err((error, memory)) => {
                self.memory.halves[half] = memory;
                return Err(Box::new(Rejected { error, dst }));
            }
        };
        self.memory.next = 1 - half;
        let outcome = round.values.iter().try_fold(dst, |dst, values| self.compute(values, &filled, dst));
        self.last = Some((half, filled));
        outcome
    }

    /// Queues the computation of values from what a buffer has of them into `dst`. Returns `dst`.
    fn compute(&mut self, values: &Values, from: &Buf, dst: BufMut) -> Result<BufMut, Box<Rejected>> {
        match values.form {
            Packed::Blocks { .. } => dequantise((self.device, self.stream), values, from.clone(), dst),
            Packed::Code { info: Some(info), part, .. } => {
                let part = part.unwrap_or((CodePart::whole(&info), values.begin));
                self.decompress((from.clone(), values.begin), (info, part), (dst, values.at))
            }
            Packed::Code { info: None, .. } if from.block().has_bytes() => {
                Err(Box::new(Rejected { error: Error::bug("a code of which nobody knows the header"), dst }))
            }
            Packed::Code { info: None, weights, .. } => self.pass_time(from, weights, dst),
        }
    }

    /// Has `fill` queue copies into a half, behind what is carried there. Returns the half.
    ///
    /// # Errors
    /// The first error, with the half, if it is not lost.
    fn filled<R>(
        &self,
        round: &Arriving<R>,
        half: BufMut,
        fill: impl Fn(&R, BufMut) -> Result<BufMut, (Error, Option<BufMut>)>,
    ) -> Result<BufMut, (Error, Option<BufMut>)> {
        let Some(carried) = &round.carried else { return fill(&round.copied, half) };
        let (mut half, rest) = self.carry(carried, half)?;
        match fill(&round.copied, rest) {
            Ok(rest) => match half.unsplit(rest) {
                Ok(()) => Ok(half),
                Err(_) => Err((lost(), None)),
            },
            Err((error, rest)) => {
                let whole = rest.is_some_and(|rest| half.unsplit(rest).is_ok());
                Err((error, whole.then_some(half)))
            }
        }
    }

    /// Queues copies of what arrived last to the beginning of the other half. Returns that, and the rest of the half.
    ///
    /// # Errors
    /// With the half, if it is not lost.
    fn carry(&self, carried: &Carried, mut half: BufMut) -> Result<(BufMut, BufMut), (Error, Option<BufMut>)> {
        let Some((_, last)) = &self.last else {
            return Err((Error::bug("a part of a code, and nothing before it"), Some(half)));
        };
        let rest = match half.split_off(carried.bytes()) {
            Ok(rest) => rest,
            Err(error) => return Err((error, Some(half))),
        };
        let piece = |from: Range<usize>, at| Piece { src: last.clone(), from, at };
        let pieces = vec![piece(0..carried.head, 0), piece(carried.tail.clone(), carried.head)];
        match Transfer::new(pieces, half).and_then(|transfer| self.stream.send(transfer)) {
            Ok(flight) => Ok((flight.chain(), rest)),
            Err(rejected) => {
                let Rejected { error, mut dst } = *rejected;
                let whole = dst.unsplit(rest).ok().map(|()| dst);
                Err((error, whole))
            }
        }
    }

    /// Gives back the half in which something arrived last.
    fn give_back(&mut self) {
        if let Some((half, last)) = self.last.take() {
            self.memory.halves[half] = last.try_reclaim().ok();
        }
    }

    fn decompress(
        &mut self,
        src: (Buf, usize),
        (info, part): (Info, (CodePart, usize)),
        (dst, at): (BufMut, usize),
    ) -> Result<BufMut, Box<Rejected>> {
        let Some(kernels) = self.device.kernels() else { return Err(without_kernels(self.device, dst)) };
        let Some(verdict) = self.memory.verdict.take() else { return Err(Box::new(Rejected { error: lost(), dst })) };
        let work = Decompress::part(src, info, part, (dst, at), (verdict, 0));
        match work.and_then(|work| <dyn Kernels>::decode(kernels, self.stream, work)) {
            Ok(flight) => {
                self.memory.verdict = Some(flight.verdict.chain());
                Ok(flight.weights.chain())
            }
            Err(undecoded) => {
                self.memory.verdict = Some(undecoded.verdict);
                Err(Box::new(Rejected { error: undecoded.error, dst: undecoded.dst }))
            }
        }
    }

    /// Queues what stands for the decoding of so many bytes of weights from `src`. `dst` is then what has arrived.
    fn pass_time(&self, src: &Buf, weights: u64, dst: BufMut) -> Result<BufMut, Box<Rejected>> {
        // A copy of nothing, before which the source has arrived and after which it is free.
        let nothing = |dst| {
            let piece = Piece { src: src.clone(), from: 0..0, at: 0 };
            Ok::<_, Box<Rejected>>(self.stream.send(Transfer::new(vec![piece], dst)?)?.chain())
        };
        let arrived = nothing(dst)?;
        let Some(speed) = self.device.info().decoding else { return Ok(arrived) };
        match self.stream.occupy(speed.time(weights)) {
            Ok(()) => nothing(arrived),
            Err(error) => Err(Box::new(Rejected { error, dst: arrived })),
        }
    }

    /// Queues the copy of the verdict to `place`, host memory, on `down`, a stream of the device. `None` if the device's memory has only
    /// sizes.
    ///
    /// # Errors
    /// When the stream accepts no more work.
    fn verdict(&mut self, down: &dyn Stream, place: BufMut) -> Result<Option<Buf>> {
        let Some(verdict) = self.memory.verdict.take().map(BufMut::freeze) else { return Err(lost()) };
        let piece = Piece { src: verdict.clone(), from: 0..Decompress::VERDICT, at: 0 };
        let sent = Transfer::new(vec![piece], place).and_then(|transfer| down.send(transfer));
        self.memory.verdict = verdict.try_reclaim().ok();
        match sent {
            Ok(flight) => Ok(Some(flight.chain().freeze())),
            Err(rejected) if matches!(rejected.error, Error::Missing(Missing::Bytes { .. })) => Ok(None),
            Err(rejected) => Err(rejected.error),
        }
    }
}

impl Drop for Landed<'_> {
    fn drop(&mut self) {
        self.give_back();
    }
}

fn lost() -> Error {
    Error::bug("a landing buffer that an earlier copy did not return")
}

fn without_kernels(device: &dyn Device, dst: BufMut) -> Box<Rejected> {
    Box::new(Rejected { error: Error::bug(format!("{} has no kernels", device.id())), dst })
}

/// Queues the computation of the values of blocks, in `src`, into `dst` on a stream of the device. Returns `dst`.
///
/// # Errors
/// The error, with `dst`.
pub(crate) fn dequantise(
    (device, stream): (&dyn Device, &dyn Stream),
    values: &Values,
    src: Buf,
    dst: BufMut,
) -> Result<BufMut, Box<Rejected>> {
    let Packed::Blocks { from, count, to } = values.form else {
        return Err(Box::new(Rejected { error: Error::bug("a code where blocks were to be unpacked"), dst }));
    };
    let Some(kernels) = device.kernels() else { return Err(without_kernels(device, dst)) };
    let work = Dequantise::new((src, values.begin, from), count, (dst, values.at, to))?;
    Ok(<dyn Kernels>::send(kernels, stream, work)?.chain())
}
