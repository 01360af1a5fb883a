//! Copies: what they move, and how their destination comes back.

use std::collections::HashSet;
use std::ops::Range;
use std::time::Duration;

use super::{Buf, BufMut, Event, Joined, Stream};
use crate::device::DeviceId;
use crate::error::{Error, Measured, Result};

/// Bytes of one source that go to one place of a copy's destination.
#[derive(Clone, Debug)]
pub struct Piece {
    /// Where they come from.
    pub src: Buf,
    /// Which bytes of it.
    pub from: Range<usize>,
    /// Where they begin in the destination.
    pub at: usize,
}

impl Piece {
    /// Whether it is inside of its source, and of a destination of `room` bytes.
    fn check(&self, room: usize) -> Result<()> {
        let Range { start, end } = self.from;
        let bytes = end.checked_sub(start).ok_or_else(|| Error::invalid(format!("bytes {start}..{end} of a copy")))?;
        let fits = |what, needed: usize, given: usize| match needed <= given {
            true => Ok(()),
            false => Err(Error::WrongSize { what, needed: needed as u64, given: given as u64 }),
        };
        fits(Measured::Source, end, self.src.bytes())?;
        // No buffer ends at the largest number.
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
    /// [`Rejected`] with [`Error::WrongSize`] when a piece passes the end of its source or of `dst`, and with
    /// [`Error::Invalid`] when it ends before it begins.
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

    /// Its pieces, for a stream: their ranges and places count from the beginning of the allocations of both ends, of
    /// which the buffers may be parts.
    pub fn pieces(&self) -> &[Piece] {
        &self.pieces
    }

    /// Where they go.
    pub fn dst(&self) -> &BufMut {
        &self.dst
    }

    /// The destination alone: the copy is given up.
    pub fn into_dst(self) -> BufMut {
        self.dst
    }

    /// Where they go, to add an event to.
    pub fn dst_mut(&mut self) -> &mut BufMut {
        &mut self.dst
    }

    /// The events that the copy has to wait for: those of the sources' contents and of the destination's last uses, each once.
    /// Some may have fired already.
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

    /// The flight of this copy once it is queued and `done` comes after it: both ends carry the event from now on, beside
    /// those that they had.
    pub fn launched(mut self, done: Event) -> Flight {
        self.sources_used_until(&done);
        self.dst.after(done.clone());
        Flight { done, dst: self.dst }
    }

    /// As [`launched`](Transfer::launched), by a stream whose event comes after all that the transfer
    /// [waits](Transfer::waits) for, and fails with it: of the destination's events only this one is left.
    pub(super) fn launched_in_order(mut self, done: Event) -> Flight {
        self.sources_used_until(&done);
        self.dst.written_until(done.clone());
        Flight { done, dst: self.dst }
    }

    fn sources_used_until(&self, done: &Event) {
        let mut last: Option<&Buf> = None;
        for piece in &self.pieces {
            // Neighbouring pieces of one source are one use.
            if !last.is_some_and(|last| last.is_same(&piece.src)) {
                piece.src.used_until(done.clone());
            }
            last = Some(&piece.src);
        }
    }

    /// The rejection of this copy: it was not queued.
    pub fn rejected(self, error: Error) -> Box<Rejected> {
        Box::new(Rejected { error, dst: self.dst })
    }
}

/// A copy that was not queued, with its destination.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
#[non_exhaustive]
pub struct Rejected {
    /// Why not.
    #[source]
    pub error: Error,
    /// The destination, as it was.
    pub dst: BufMut,
}

impl From<Box<Rejected>> for Error {
    fn from(rejected: Box<Rejected>) -> Error {
        rejected.error
    }
}

/// A copy on its way. Dropping it gives up the destination, not the copy.
#[derive(Debug)]
#[must_use = "the destination comes back through the flight"]
pub struct Flight {
    done: Event,
    dst: BufMut,
}

impl Flight {
    /// The flight of a buffer that work other than a copy, which is queued, writes until `done`.
    pub fn of(mut buffer: BufMut, done: Event) -> Flight {
        buffer.after(done.clone());
        Flight { done, dst: buffer }
    }

    /// That of the destination.
    pub(crate) fn shape(&self) -> (usize, DeviceId, usize) {
        self.dst.shape()
    }

    /// The event of its landing.
    pub fn done(&self) -> &Event {
        &self.done
    }

    /// Waits for the copy; the destination, filled.
    ///
    /// # Errors
    /// [`Error::TimedOut`] after `deadline`; [`Error::Failed`] when the copy failed.
    pub fn wait(self, deadline: Duration) -> Result<BufMut> {
        self.done.wait(deadline)?;
        Ok(self.dst)
    }

    /// Makes later work of `stream` wait for the copy; the destination, to be read there. Where the stream cannot
    /// wait for the copy's event, the caller waits, at most for `deadline`.
    ///
    /// # Errors
    /// When `stream` takes no more work; as [`Event::wait`].
    pub fn order(self, stream: &dyn Stream, deadline: Duration) -> Result<Buf> {
        if stream.wait(&self.done)? == Joined::HostMustWait {
            self.done.wait(deadline)?;
        }
        Ok(self.dst.freeze())
    }

    /// The destination at once, for another copy into it; that one comes after this one.
    pub fn chain(self) -> BufMut {
        self.dst
    }
}
