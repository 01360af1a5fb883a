//! Batches of copies: the batch has its place in the order of its stream, the copies in it have no order.

use std::sync::Arc;

use crate::backing::{Backing, checksum};
use crate::code::{Code, Outcome};
use crate::copy::{HostRange, pinned_place, pinned_source};
use crate::fault::Spoil;
use crate::hazard::Access;
use crate::lane::{Check, Copy, Place, Work};
use crate::memory::{BASE, Found};
use crate::pace::Route;
use crate::report::Rule;
use crate::stream::LEGACY;
use crate::sync::lock;
use crate::world::{Call, State};

/// When the source of a copy is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SourceOrder {
    /// In the order of the stream.
    Stream,
    /// Before the call returns, whatever the stream has yet to do.
    DuringCall,
    /// At any time, whatever the stream has yet to do.
    Any,
}

impl SourceOrder {
    /// By the driver's numbers.
    pub(crate) fn of(number: i32) -> Option<SourceOrder> {
        [SourceOrder::Stream, SourceOrder::DuringCall, SourceOrder::Any]
            .get(usize::try_from(number).ok()?.checked_sub(1)?)
            .copied()
    }
}

/// One copy of a batch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece {
    pub(crate) dst: u64,
    pub(crate) src: u64,
    pub(crate) len: u64,
    pub(crate) order: SourceOrder,
}

/// One end of a copy.
#[derive(Clone, Copy, Debug)]
enum End {
    Device(Found),
    Host(HostRange, *mut u8),
}

impl Call<'_> {
    /// Enqueues all copies, or none and the number of the one that cannot be.
    pub(crate) fn copy_batch(&self, pieces: &[Piece], stream: u64) -> Result<(), (Code, usize)> {
        let of_none = |code| (code, usize::MAX);
        if LEGACY.contains(&stream) {
            return Err(of_none(Code::INVALID_VALUE));
        }
        let mut state = self.state();
        let lane = self.lane(&mut state, stream).map_err(of_none)?;
        let mut ends = Vec::with_capacity(pieces.len());
        for (index, piece) in pieces.iter().enumerate() {
            ends.push(self.ends(&state, piece, lane).map_err(|code| (code, index))?);
        }
        self.independent(pieces);
        let mut waits = false;
        for (index, (piece, (dst, src))) in pieces.iter().zip(ends).enumerate() {
            // What is to go wrong goes wrong with the one in the middle.
            let spoil = if index == pieces.len() / 2 { self.spoil } else { Spoil::default() };
            self.enqueue_piece(&mut state, piece, (dst, src), lane, spoil).map_err(|code| (code, index))?;
            waits |= matches!(dst, End::Host(HostRange::Pageable, _));
        }
        if waits { self.wait_for_lane(state, lane).map_err(of_none) } else { Ok(()) }
    }

    fn ends(&self, state: &State, piece: &Piece, lane: u32) -> Outcome<(End, End)> {
        if piece.len == 0 {
            return Err(Code::INVALID_VALUE);
        }
        let end = |address: u64| {
            if address >= BASE {
                return self.reachable(state, (address, None), piece.len, lane).map(End::Device);
            }
            let at = std::ptr::with_exposed_provenance_mut(address as usize);
            Ok(End::Host(self.host_range(state, at, piece.len, lane)?, at))
        };
        match (end(piece.dst)?, end(piece.src)?) {
            (End::Host(..), End::Host(..)) => Err(Code::NOT_SUPPORTED),
            ends => Ok(ends),
        }
    }

    /// No copy of a batch may write what another one reads or writes.
    fn independent(&self, pieces: &[Piece]) {
        let reads = pieces.iter().map(|piece| (piece.src, piece.src + piece.len, false));
        let mut ranges: Vec<_> =
            reads.chain(pieces.iter().map(|piece| (piece.dst, piece.dst + piece.len, true))).collect();
        ranges.sort_unstable();
        let (mut read_to, mut written_to) = (0, 0);
        for (start, end, writes) in ranges {
            if start < written_to || writes && start < read_to {
                self.violation(Rule::Unordered, || {
                    format!("two copies of one batch share bytes of {start:#x}..{end:#x}, and one writes them")
                });
            }
            let to = if writes { &mut written_to } else { &mut read_to };
            *to = end.max(*to);
        }
    }

    fn enqueue_piece(
        &self,
        state: &mut State,
        piece: &Piece,
        (dst, src): (End, End),
        lane: u32,
        spoil: Spoil,
    ) -> Outcome<()> {
        let len = piece.len as usize;
        let (from, check) = self.source(state, piece, src)?;
        let to = match dst {
            End::Device(found) => self.place(state, &found)?,
            End::Host(HostRange::Pinned { base, offset }, _) => pinned_place(state, base, offset)?,
            End::Host(HostRange::Pageable, at) => Place { backing: Arc::new(Backing::borrowed(at, len)), offset: 0 },
        };
        let route = match (dst, src) {
            (End::Device(to), End::Device(from)) if to.device != from.device => Route::Between(from.device, to.device),
            (End::Device(_), End::Device(_)) => Route::Within,
            (End::Device(to), _) => Route::ToDevice(to.device),
            (_, End::Device(from)) => Route::ToHost(from.device),
            _ => return Err(Code::NOT_SUPPORTED),
        };
        let turn = state.turn(lane, self.name);
        let ordered = state.lanes[turn.lane].clock.clone();
        // Out of the stream's order, the source has to be there when the call is made.
        let read_after = if piece.order == SourceOrder::Stream { ordered.clone() } else { state.host.clone() };
        for (end, access, clock) in [(src, Access::Read, &read_after), (dst, Access::Write, &ordered)] {
            match end {
                End::Device(found) => self.touch_after(state, &found, access, &turn, clock),
                End::Host(host, _) => self.touch_host_after(state, host, piece.len, access, &turn, clock),
            }
        }
        let lie = matches!(route, Route::Between(..)) && lock(&self.world.faults).plan.lying_peers;
        self.submit_spoilt(state, turn, Work::Copy(Copy { src: from, dst: to, len, route, check, lie }), spoil);
        Ok(())
    }

    /// Where the bytes are read: memory that is not pinned is read in place, by the stream, unless the call is to do so.
    fn source(&self, state: &State, piece: &Piece, src: End) -> Outcome<(Place, Check)> {
        let (checked, len) = (self.world.config().check_sources, piece.len as usize);
        match src {
            End::Device(found) => Ok((self.place(state, &found)?, Check::Never)),
            End::Host(HostRange::Pinned { base, offset }, _) => pinned_source(state, base, offset, piece.len, checked),
            End::Host(HostRange::Pageable, at) if piece.order == SourceOrder::DuringCall => {
                Ok((self.stage(at, piece.len)?, Check::Never))
            }
            End::Host(HostRange::Pageable, at) => {
                // SAFETY: the program gave this range as a source that stays until the stream has read it.
                let check = if checked { Check::Taken(unsafe { checksum(at, len) }) } else { Check::Never };
                Ok((Place { backing: Arc::new(Backing::borrowed(at, len)), offset: 0 }, check))
            }
        }
    }
}
