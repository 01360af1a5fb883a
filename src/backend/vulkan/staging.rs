//! The buffer through which a stream copies from and to host memory that its device cannot reach. The thread that queues such
//! a copy moves the bytes itself.

use std::ptr::NonNull;
use std::sync::{Arc, PoisonError};

use ash::vk;

use super::context::{Context, Refusal};
use super::copy::{self, Move, Place};
use super::import::HostBuffer;
use super::semaphore::Point;
use super::timeline::Timeline;
use crate::error::Error;
use crate::limits::WORK;

/// The size of each half in bytes. Smaller copies spend more time on their way than on their bytes.
const HALF: usize = 4 << 20;

/// Host memory of the driver in two halves: one is filled or emptied while the device copies the other.
pub(super) struct Staging {
    memory: HostBuffer,
    address: NonNull<u8>,
    /// The value of the stream's timeline after which each half is free.
    free_after: [u64; 2],
    next: usize,
}

// SAFETY: the memory is this value's alone, whichever thread it is on.
unsafe impl Send for Staging {}

/// A half of the buffer.
struct Half {
    number: usize,
    /// Where the host has it.
    address: *mut u8,
    /// Where the device has it.
    place: Place,
}

/// A part of a download on its way: the half that it arrives in, the value after which it has, and its bytes by offset and count.
struct Arriving {
    half: Half,
    value: u64,
    at: usize,
    bytes: usize,
}

impl Staging {
    fn new(context: &Arc<Context>) -> Result<Staging, Refusal> {
        let (memory, address) = HostBuffer::allocate(context, 2 * HALF)?;
        Ok(Staging { memory, address, free_after: [0; 2], next: 0 })
    }
}

/// A copy that went wrong, and the last value that was submitted for it, if any.
pub(super) struct Broken {
    pub(super) error: Error,
    pub(super) under_way: Option<u64>,
}

impl Broken {
    /// A refused call, before which so much was submitted. Of the refused submission itself the driver took nothing; that of a
    /// lost device cannot be told, and no value will show it.
    pub(super) fn refused(context: &Context, refusal: Refusal, under_way: Option<u64>) -> Broken {
        // A device that was lost before, or a process that is ending, has not been asked.
        let lost = matches!(refusal, Refusal::Code(_, vk::Result::ERROR_DEVICE_LOST));
        Broken { error: context.error(refusal), under_way: if lost { Some(u64::MAX) } else { under_way } }
    }
}

/// Queues moves some of which pass the stream's buffer. The calling thread moves their bytes, and waits for the device where it
/// has to. Returns the value after all of them.
///
/// # Safety
/// The ranges are inside memory that lives until the value is reached. Until this returns, nobody else writes what is read on
/// the host, or uses what is written there.
pub(super) unsafe fn stage(timeline: &Timeline, waits: Vec<Point>, moves: &[Move]) -> Result<u64, Broken> {
    let context = timeline.context();
    let broken = |fault, under_way| match fault {
        Fault::Refused(refusal) => Broken::refused(context, refusal, under_way),
        Fault::Late => {
            Broken { error: Error::TimedOut { what: "a copy through a buffer".to_owned(), after: WORK }, under_way }
        }
    };
    let mut staging = timeline.staging().lock().unwrap_or_else(PoisonError::into_inner);
    let staging = match &mut *staging {
        Some(staging) => staging,
        none => none.insert(Staging::new(context).map_err(|refusal| broken(Fault::Refused(refusal), None))?),
    };
    let mut stager = Stager { timeline, staging, waits, under_way: None };
    for &one in moves {
        // SAFETY: the caller's promise.
        let moved = unsafe {
            match one {
                Move::Direct { src, dst, bytes } => stager.submit(src, dst, bytes as usize).map(drop),
                Move::Up { src, dst, bytes } => stager.up(src, dst, bytes),
                Move::Down { src, dst, bytes } => stager.down(src, dst, bytes),
            }
        };
        moved.map_err(|fault| broken(fault, stager.under_way))?;
    }
    let nothing = || Broken { error: Error::bug("a copy of no bytes was staged"), under_way: None };
    stager.under_way.ok_or_else(nothing)
}

/// The reason why a copy through the buffer stopped.
enum Fault {
    Refused(Refusal),
    Late,
}

impl From<Refusal> for Fault {
    fn from(refusal: Refusal) -> Fault {
        Fault::Refused(refusal)
    }
}

/// A transfer that passes the buffer.
struct Stager<'a> {
    timeline: &'a Timeline,
    staging: &'a mut Staging,
    /// The points that the first submission waits for.
    waits: Vec<Point>,
    /// The last value that was submitted.
    under_way: Option<u64>,
}

impl Stager<'_> {
    /// # Safety
    /// As [`stage`], for this copy.
    unsafe fn submit(&mut self, src: Place, dst: Place, bytes: usize) -> Result<u64, Fault> {
        let moves = [Move::Direct { src, dst, bytes: bytes as u64 }];
        // SAFETY: the caller's promise; the buffer is the timeline's, which lives until the value is reached.
        let record = |device: &ash::Device, commands| unsafe { copy::record(device, commands, &moves) };
        let value = self.timeline.submit(std::mem::take(&mut self.waits), Some(&record))?;
        self.under_way = Some(value);
        Ok(value)
    }

    /// # Safety
    /// As [`stage`], for this copy.
    unsafe fn up(&mut self, src: *const u8, dst: Place, bytes: usize) -> Result<(), Fault> {
        for at in (0..bytes).step_by(HALF) {
            let (half, part) = (self.half()?, HALF.min(bytes - at));
            // SAFETY: the caller's promise; the part is inside the source, and the half is as large and free.
            let value = unsafe {
                std::ptr::copy_nonoverlapping(src.add(at), half.address, part);
                self.submit(half.place, (dst.0, dst.1 + at as u64), part)?
            };
            self.staging.free_after[half.number] = value;
        }
        Ok(())
    }

    /// # Safety
    /// As [`stage`], for this copy.
    unsafe fn down(&mut self, src: Place, dst: *mut u8, bytes: usize) -> Result<(), Fault> {
        let mut arriving: Option<Arriving> = None;
        for at in (0..bytes).step_by(HALF) {
            let (half, part) = (self.half()?, HALF.min(bytes - at));
            // SAFETY: the caller's promise.
            let value = unsafe { self.submit((src.0, src.1 + at as u64), half.place, part)? };
            self.staging.free_after[half.number] = value;
            // SAFETY: as above.
            unsafe { self.arrive(arriving.replace(Arriving { half, value, at, bytes: part }), dst)? };
        }
        // SAFETY: as above.
        unsafe { self.arrive(arriving, dst) }
    }

    /// # Safety
    /// The bytes of the part are inside the destination.
    unsafe fn arrive(&self, arriving: Option<Arriving>, dst: *mut u8) -> Result<(), Fault> {
        let Some(Arriving { half, value, at, bytes }) = arriving else { return Ok(()) };
        self.wait(value)?;
        // SAFETY: the device is done with the half; the rest is the caller's promise.
        unsafe { std::ptr::copy_nonoverlapping(half.address, dst.add(at), bytes) };
        Ok(())
    }

    /// The half to use next, once the device is done with it.
    fn half(&mut self) -> Result<Half, Fault> {
        let number = self.staging.next;
        self.wait(self.staging.free_after[number])?;
        self.staging.next = 1 - number;
        let at = number * HALF;
        // The offset is inside the buffer.
        let address = self.staging.address.as_ptr().wrapping_add(at);
        Ok(Half { number, address, place: (self.staging.memory.buffer(), at as u64) })
    }

    fn wait(&self, value: u64) -> Result<(), Fault> {
        match self.timeline.wait(value, WORK)? {
            true => Ok(()),
            false => Err(Fault::Late),
        }
    }
}
