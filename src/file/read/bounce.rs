//! Aligned buffers for direct reads of bytes that stay elsewhere.

use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};

use memmap2::MmapMut;

/// The bytes of a buffer. While one thread copies out of its buffer, another's read keeps the disk busy.
pub(super) const BYTES: usize = 8 << 20;

/// Buffers that wait for the next read, and the number of those who keep them.
struct Idle {
    keepers: usize,
    buffers: Vec<MmapMut>,
}

static IDLE: Mutex<Idle> = Mutex::new(Idle { keepers: 0, buffers: Vec::new() });

fn idle() -> MutexGuard<'static, Idle> {
    IDLE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A buffer, page-aligned. It is kept for others when it is dropped, while a [`Kept`] exists, unless it is smaller than they need: one
/// that was made before there was any.
#[derive(Debug)]
pub(crate) struct Bounce(Option<MmapMut>);

impl Bounce {
    /// A buffer for reads of `len` bytes, which may take several.
    pub(super) fn take(len: usize) -> io::Result<Bounce> {
        let most = {
            let mut idle = idle();
            match idle.buffers.pop() {
                Some(buffer) => return Ok(Bounce(Some(buffer))),
                None => idle.keepers > 0,
            }
        };
        // Two blocks more than the bytes: those that they begin and end in.
        let around = len.saturating_add(2 * super::MOST_ALIGNMENT as usize);
        let buffer = MmapMut::map_anon(if most { BYTES } else { around.min(BYTES) })?;
        #[cfg(target_os = "linux")]
        // Fails on kernels without huge pages; ordinary pages are fine then.
        let _ = buffer.advise(memmap2::Advice::HugePage);
        Ok(Bounce(Some(buffer)))
    }

    /// A buffer in which one direct read of `len` bytes has room.
    pub(crate) fn around(len: usize) -> io::Result<Bounce> {
        let (taken, around) = (Bounce::take(len)?, len + 2 * super::MOST_ALIGNMENT as usize);
        if taken.0.as_ref().is_some_and(|buffer| buffer.len() >= around) {
            return Ok(taken);
        }
        Ok(Bounce(Some(MmapMut::map_anon(around)?)))
    }

    pub(crate) fn bytes(&mut self) -> &mut [u8] {
        self.0.as_deref_mut().unwrap_or_default()
    }
}

impl Drop for Bounce {
    fn drop(&mut self) {
        let mut idle = idle();
        if idle.keepers > 0 {
            idle.buffers.extend(self.0.take().filter(|buffer| buffer.len() >= BYTES));
        }
    }
}

/// Keeps the buffers of reads for the reads that follow, until the last of these values is dropped.
#[derive(Debug)]
pub(crate) struct Kept(());

impl Kept {
    pub(crate) fn new() -> Kept {
        idle().keepers += 1;
        Kept(())
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        let mut idle = idle();
        idle.keepers -= 1;
        if idle.keepers == 0 {
            idle.buffers.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A small buffer from before somebody kept them would make the large reads that follow many.
    #[test]
    fn a_small_buffer_is_not_kept() {
        let small = Bounce(Some(MmapMut::map_anon(4096).unwrap()));
        let _kept = Kept::new();
        drop(small);
        assert!(Bounce::take(BYTES).unwrap().bytes().len() >= BYTES);
    }
}
