//! Copies: the pieces that they move, and how their destination is returned.

use std::collections::HashSet;
use std::ops::Range;
use std::time::Duration;

use super::{Buf, BufMut, Event, Joined, Stream};
use crate::device::DeviceId;
use crate::error::{Error, Measured, Result};

/// A byte range of a source and its position in the copy's destination.
#[derive(Clone, Debug)]
pub struct Piece {
    /// The source.
    pub src: Buf,
    /// The byte range in the source.
    pub from: Range<usize>,
    /// The offset in the destination.
    pub at: usize,
}

impl Piece {
    /// Checks that the piece is within its source, and within a destination of `room` bytes.
    fn check(&self, room: usize) -> Result<()> {
        let Range { start, end } = self.from;
        let bytes = end.checked_sub(start).ok_or_else(|| Error::invalid(format!("bytes {start}..{end} of a copy")))?;
        let fits = |what, needed: usize, given: usize| match needed <= given {
            true => Ok(()),
            false => Err(Error::WrongSize { what, needed: needed as u64, given: given as u64 }),
        };
        fits(Measured::Source, end, self.src.bytes())?;
        // No buffer is as large as the largest number, so saturating is enough.
        fits(Measured::Destination, self.at.saturating_add(bytes), room)
    }
}

/// A copy of pieces into one destination, all of them inside their buffers.
#[derive(Debug)]
pub struct Transfer {
    pieces: Vec<Piece>,
    dst: BufMut,
}

impl Transfer {
    /// A copy of `pieces` into `dst`.
    ///
    /// # Errors
    /// [`Rejected`] with [`Error::WrongSize`] when a piece exceeds its source or `dst`, and with [`Error::Invalid`] when a
    /// piece ends before it begins.
    pub fn new(mut pieces: Vec<Piece>, dst: BufMut) -> Result<Transfer, Box<Rejected>> {
        if let Err(error) = pieces.iter().try_for_each(|piece| piece.check(dst.bytes())) {
            return Err(Box::new(Rejected { error, dst }));
        }
        for Piece { src, from, at } in &mut pieces {
            let start = src.start();
            (*from, *at) = (start + from.start..start + from.end, dst.start() + *at);
        }
        Ok(Transfer { pieces, dst })
    }

    /// A copy of all of `src` to the beginning of `dst`.
    ///
    /// # Errors
    /// [`Rejected`] with [`Error::WrongSize`] when `dst` is smaller.
    pub fn whole(src: &Buf, dst: BufMut) -> Result<Transfer, Box<Rejected>> {
        let piece = Piece { src: src.clone(), from: 0..src.bytes(), at: 0 };
        Transfer::new(vec![piece], dst)
    }

    /// The pieces, for a stream. Their ranges and offsets are relative to the allocations of both ends, of which the buffers
    /// may be parts.
    pub fn pieces(&self) -> &[Piece] {
        &self.pieces
    }

    /// The destination.
    pub fn dst(&self) -> &BufMut {
        &self.dst
    }

    /// Abandons the copy and returns the destination.
    pub fn into_dst(self) -> BufMut {
        self.dst
    }

    /// The destination, for adding an event to it.
    pub fn dst_mut(&mut self) -> &mut BufMut {
        &mut self.dst
    }

    /// The events that the copy must wait for: those of the sources' contents and of the destination's last uses, each once.
    /// Some may already be complete.
    pub fn waits(&self) -> Vec<Event> {
        let mut waits = self.dst.uses();
        let mut known: HashSet<usize> = waits.iter().map(Event::key).collect();
        let mut last: Option<&Buf> = None;
        for Piece { src, .. } in &self.pieces {
            if !last.is_some_and(|last| last.is_same(src)) {
                waits.extend(src.filled_by().iter().filter(|event| known.insert(event.key())).cloned());
            }
            last = Some(src);
        }
        waits
    }

    /// Turns the transfer into a flight, once the copy is queued and `done` completes after it. Both ends carry this event
    /// from now on, in addition to the events that they had.
    pub fn launched(mut self, done: Event) -> Flight {
        self.sources_used_until(&done);
        self.dst.after(done.clone());
        Flight { done, dst: self.dst }
    }

    /// As [`launched`](Transfer::launched), for a stream whose event completes after all events that the transfer
    /// [waits](Transfer::waits) for, and fails if they fail: it replaces the destination's other events.
    pub(super) fn launched_in_order(self, done: Event) -> Flight {
        self.sources_used_until(&done);
        Flight::in_order(self.dst, done)
    }

    fn sources_used_until(&self, done: &Event) {
        let mut last: Option<&Buf> = None;
        for piece in &self.pieces {
            // Adjacent pieces of one source count as one use.
            if !last.is_some_and(|last| last.is_same(&piece.src)) {
                piece.src.used_until(done.clone());
            }
            last = Some(&piece.src);
        }
    }

    /// Turns the transfer into a rejection, if the copy was not queued.
    pub fn rejected(self, error: Error) -> Box<Rejected> {
        Box::new(Rejected { error, dst: self.dst })
    }

    /// As [`rejected`](Transfer::rejected), for a copy parts of which may be in flight until the event `under_way`.
    #[cfg(any(feature = "cuda", feature = "vulkan"))]
    pub(super) fn refused(mut self, error: Error, under_way: Option<Event>) -> Box<Rejected> {
        if let Some(event) = under_way {
            self.pieces.iter().for_each(|piece| piece.src.used_until(event.clone()));
            self.dst.after(event);
        }
        self.rejected(error)
    }

    /// The tracing span of the copy, from queueing until it was observed to be done.
    #[cfg(any(feature = "cuda", feature = "vulkan"))]
    pub(super) fn span(&self) -> tracing::Span {
        let (pieces, to) = (&self.pieces, self.dst.device());
        let from = || pieces.first().map_or(to, |piece| piece.src.device());
        let bytes = || pieces.iter().map(|piece| piece.from.len()).sum::<usize>();
        // Without a parent, since it outlives the current span of the thread that queues the copy.
        tracing::debug_span!(parent: None, "copy", from = %from(), to = %to, bytes = bytes())
    }
}

/// A copy that was not queued, with its destination.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
#[non_exhaustive]
pub struct Rejected {
    /// The reason.
    #[source]
    pub error: Error,
    /// The destination, unchanged.
    pub dst: BufMut,
}

impl From<Box<Rejected>> for Error {
    fn from(rejected: Box<Rejected>) -> Error {
        rejected.error
    }
}

/// A copy in flight. Dropping it drops the destination, but does not cancel the copy.
#[derive(Debug)]
#[must_use = "the destination comes back through the flight"]
pub struct Flight {
    done: Event,
    dst: BufMut,
}

impl Flight {
    /// The flight of a buffer that queued work other than a copy writes until `done`.
    pub fn of(mut buffer: BufMut, done: Event) -> Flight {
        buffer.after(done.clone());
        Flight { done, dst: buffer }
    }

    /// As [`of`](Flight::of), if `done` completes after all uses of the buffer, and fails if they fail.
    pub(super) fn in_order(mut buffer: BufMut, done: Event) -> Flight {
        buffer.written_until(done.clone());
        Flight { done, dst: buffer }
    }

    /// The shape of the destination; see `BufMut::shape`.
    pub(crate) fn shape(&self) -> (usize, DeviceId, usize) {
        self.dst.shape()
    }

    /// The event of the copy's completion.
    pub fn done(&self) -> &Event {
        &self.done
    }

    /// Waits for the copy and returns the filled destination.
    ///
    /// # Errors
    /// [`Error::TimedOut`] after `deadline`; [`Error::Failed`] when the copy failed.
    pub fn wait(self, deadline: Duration) -> Result<BufMut> {
        self.done.wait(deadline)?;
        Ok(self.dst)
    }

    /// Makes later work of `stream` wait for the copy, and returns the destination for reading there. If the stream cannot
    /// wait for the copy's event, the caller waits, at most for `deadline`.
    ///
    /// # Errors
    /// When `stream` accepts no more work; as [`Event::wait`].
    pub fn order(self, stream: &dyn Stream, deadline: Duration) -> Result<Buf> {
        if stream.wait(&self.done)? == Joined::HostMustWait {
            self.done.wait(deadline)?;
        }
        Ok(self.dst.freeze())
    }

    /// Returns the destination immediately, for another copy into it. That copy runs after this one.
    pub fn chain(self) -> BufMut {
        self.dst
    }
}
