//! The host memory behind device memory and behind pinned allocations.

use std::ops::Range;

use memmap2::{MmapMut, MmapOptions};

/// What fresh and freed memory is filled with.
pub(crate) const RUBBISH: u8 = 0xA5;

/// Bytes that workers copy from and to by address. Alive as long as a piece of work that uses them.
#[derive(Debug)]
pub(crate) struct Backing {
    // Never read or written through the map itself after `base` was taken from it.
    #[cfg_attr(not(unix), allow(dead_code, reason = "kept alive only"))]
    map: Option<MmapMut>,
    base: *mut u8,
    len: usize,
}

// SAFETY: `base` points into a mapping that this value owns (or, when borrowed, into memory that the program
// under test promised to keep), and all access goes through raw pointers whose order the hazard checks watch.
unsafe impl Send for Backing {}
// SAFETY: as for `Send`; nothing in here changes after construction.
unsafe impl Sync for Backing {}

impl Backing {
    /// Takes address space for so many bytes; pages come when they are touched. None when the system has no more.
    pub(crate) fn new(len: usize) -> Option<Backing> {
        let mut map = MmapOptions::new().len(len.max(1)).no_reserve_swap().map_anon().ok()?;
        let base = map.as_mut_ptr();
        Some(Backing { map: Some(map), base, len })
    }

    /// The program's own memory, for as long as it is registered.
    pub(crate) fn borrowed(base: *mut u8, len: usize) -> Backing {
        Backing { map: None, base, len }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The address of a byte.
    pub(crate) fn at(&self, offset: usize) -> *mut u8 {
        debug_assert!(offset <= self.len);
        // SAFETY: callers pass offsets inside the backing, which was checked when the work was enqueued.
        unsafe { self.base.add(offset) }
    }

    /// Gives the pages back and keeps the addresses.
    pub(crate) fn empty(&self) {
        #[cfg(unix)]
        if let Some(map) = &self.map {
            // SAFETY: nobody reads this memory any more but a program that uses it after it was freed.
            let _ = unsafe { map.unchecked_advise(memmap2::UncheckedAdvice::DontNeed) };
        }
    }

    pub(crate) fn fill(&self, range: Range<usize>, byte: u8) {
        let range = range.start.min(self.len)..range.end.min(self.len);
        // SAFETY: the range was clamped to the backing.
        unsafe { std::ptr::write_bytes(self.at(range.start), byte, range.len()) };
    }
}

/// Copies between two backed ranges; they may overlap.
///
/// # Safety
/// Both ranges must lie in memory that stays mapped during the call. A program under test that races with the copy
/// gets torn bytes, as with a card; the hazard checks name the race.
pub(crate) unsafe fn copy(src: *const u8, dst: *mut u8, len: usize) {
    // SAFETY: the caller's promise.
    unsafe { std::ptr::copy(src, dst, len) };
}

/// A fingerprint of a range, at about the speed of memory.
///
/// # Safety
/// The range must be mapped during the call.
pub(crate) unsafe fn checksum(at: *const u8, len: usize) -> u64 {
    const ODD: u64 = 0x9E37_79B1_85EB_CA87;
    const BLOCK: usize = 64;
    let mut lanes: [u64; 8] = std::array::from_fn(|i| ODD.rotate_left(7 * i as u32));
    let blocks = len / BLOCK;
    for i in 0..blocks {
        // SAFETY: i * BLOCK + BLOCK <= len.
        let words = unsafe { at.add(i * BLOCK).cast::<[u64; 8]>().read_unaligned() };
        for (lane, word) in lanes.iter_mut().zip(words) {
            *lane = (lane.rotate_left(23) ^ word).wrapping_mul(ODD);
        }
    }
    let mut sum = len as u64;
    for i in blocks * BLOCK..len {
        // SAFETY: i < len.
        sum = (sum ^ u64::from(unsafe { at.add(i).read() })).wrapping_mul(ODD);
    }
    lanes.iter().fold(sum, |sum, lane| (sum.rotate_left(17) ^ lane).wrapping_mul(ODD))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_checksum_sees_every_byte() {
        let mut bytes = vec![7_u8; 200];
        // SAFETY: the range is the vector's.
        let sum = |bytes: &[u8]| unsafe { checksum(bytes.as_ptr(), bytes.len()) };
        let whole = sum(&bytes);
        for i in 0..bytes.len() {
            bytes[i] ^= 1;
            assert_ne!(sum(&bytes), whole, "byte {i}");
            bytes[i] ^= 1;
        }
        assert_eq!(sum(&bytes), whole);
    }
}
