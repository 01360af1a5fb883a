//! What the page cache has of a file: `cachestat` (since Linux 6.5), else `mincore`, else a try.
#![expect(unsafe_code, reason = "calls of the system that no crate wraps")]

use std::io::IoSliceMut;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use memmap2::MmapOptions;
use rustix::io::{Errno, ReadWriteFlags, preadv2};

/// The number of the call `cachestat`, the same on all architectures that came after it or share the common numbers.
const CACHESTAT: libc::c_long = 451;

/// The distance of the bytes that are tried to read, where nothing else tells.
const STRIDE: u64 = 1 << 20;

/// The number of the file system that lays folders over each other (`linux/magic.h`).
const OVERLAY: u32 = 0x794c_7630;

/// Whether this kernel has no `cachestat`, or a filter hides it.
static NO_CACHESTAT: AtomicBool = AtomicBool::new(false);

/// How many bytes of a range of `file` are in the page cache; `None` if nothing tells. `len` is the file's length.
pub(super) fn cached(file: BorrowedFd<'_>, range: Range<u64>, len: u64) -> Option<u64> {
    let range = range.start.min(len)..range.end.min(len);
    if range.is_empty() {
        return Some(0);
    }
    let page = page_bytes();
    // Whole pages, of which the bytes are a part.
    let pages = range.start / page * page..range.end.next_multiple_of(page);
    let found = by_cachestat(file, &pages).map(|found| found * page);
    let found = found.or_else(|| by_mincore(file, &pages).map(|found| found * page));
    let found = found.or_else(|| by_trying(file, &range));
    // Of a page at either end only a part is asked about.
    found.map(|found| found.min(range.end - range.start))
}

fn page_bytes() -> u64 {
    // SAFETY: the call asks for a number.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    u64::try_from(page).ok().filter(|page| page.is_power_of_two()).unwrap_or(4096)
}

/// The pages of a range that the page cache has, by `cachestat`.
fn by_cachestat(file: BorrowedFd<'_>, range: &Range<u64>) -> Option<u64> {
    let common = cfg!(any(
        target_arch = "x86_64",
        target_arch = "aarch64",
        target_arch = "riscv64",
        target_arch = "loongarch64",
        target_arch = "powerpc64",
        target_arch = "s390x",
        target_arch = "x86",
        target_arch = "arm"
    ));
    // A file of an overlay has pages that its layer's file holds, and that `cachestat` does not see.
    if !common || NO_CACHESTAT.load(Ordering::Relaxed) || is_overlay(file) {
        return None;
    }
    // `struct cachestat_range`: offset and length; `struct cachestat`: pages in the cache, dirty, written back, evicted,
    // recently evicted.
    let (asked, mut counts) = ([range.start, range.end - range.start], [0u64; 5]);
    // SAFETY: the call reads two numbers and writes five.
    let done = unsafe { libc::syscall(CACHESTAT, file.as_raw_fd(), asked.as_ptr(), counts.as_mut_ptr(), 0) };
    if done == 0 {
        return Some(counts[0]);
    }
    // Where the file is another user's, the kernel says EPERM too, which filters also do.
    if std::io::Error::last_os_error().raw_os_error() == Some(libc::ENOSYS) {
        NO_CACHESTAT.store(true, Ordering::Relaxed);
    }
    None
}

fn is_overlay(file: BorrowedFd<'_>) -> bool {
    // The field is wider than the number on some machines, and signed on some.
    rustix::fs::fstatfs(file).is_ok_and(|system| system.f_type as u32 == OVERLAY)
}

/// The pages of a range that the page cache has, by `mincore`. `None` where the kernel calls all pages resident: those of files
/// that the process may not write.
fn by_mincore(file: BorrowedFd<'_>, range: &Range<u64>) -> Option<u64> {
    let user = rustix::process::geteuid();
    let owner = rustix::fs::fstat(file).ok()?.st_uid;
    if !user.is_root() && user.as_raw() != owner {
        return None;
    }
    let bytes = usize::try_from(range.end - range.start).ok()?;
    // SAFETY: no byte of the mapping is read, so it does not matter what becomes of the file.
    let map = unsafe { MmapOptions::new().offset(range.start).len(bytes).map(file.as_raw_fd()) }.ok()?;
    let mut resident = vec![0u8; bytes.div_ceil(page_bytes() as usize)];
    // SAFETY: the range is that of the mapping, and there is a byte for each of its pages.
    let done = unsafe { libc::mincore(map.as_ptr().cast_mut().cast(), bytes, resident.as_mut_ptr().cast()) };
    (done == 0).then(|| resident.iter().map(|page| u64::from(page & 1)).sum())
}

/// The bytes of a range that the page cache has, by reads of one byte here and there that must not wait for the disk.
fn by_trying(file: BorrowedFd<'_>, range: &Range<u64>) -> Option<u64> {
    let mut found = 0;
    let mut at = range.start;
    while at < range.end {
        let next = at.saturating_add(STRIDE).min(range.end);
        let mut byte = [0];
        let middle = at + (next - at) / 2;
        match preadv2(file, &mut [IoSliceMut::new(&mut byte)], middle, ReadWriteFlags::NOWAIT) {
            Ok(1..) => found += next - at,
            Ok(0) | Err(Errno::AGAIN) => {}
            Err(_) => return None,
        }
        at = next;
    }
    Some(found)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsFd;

    use rustix::fs::{Advice, fadvise};

    use super::*;

    /// All ways to ask say the same of a file that is in the page cache, and of one that is not.
    #[test]
    fn all_ways_to_ask_agree() {
        const LEN: u64 = (8 << 20) + 100;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("bytes");
        std::fs::write(&path, vec![7; LEN as usize]).unwrap();
        let file = File::open(&path).unwrap();
        file.sync_all().unwrap();
        let page = page_bytes();
        let pages = 0..LEN.next_multiple_of(page);
        let ask = || {
            [
                by_cachestat(file.as_fd(), &pages).map(|found| found * page),
                by_mincore(file.as_fd(), &pages).map(|found| found * page),
                by_trying(file.as_fd(), &(0..LEN)).map(|found| found.next_multiple_of(page)),
            ]
        };
        for found in ask().into_iter().flatten() {
            assert_eq!(found, pages.end);
        }
        assert_eq!(cached(file.as_fd(), 10..LEN, LEN), Some(LEN - 10));
        assert_eq!(cached(file.as_fd(), LEN..LEN + 9, LEN), Some(0));
        fadvise(&file, 0, None, Advice::DontNeed).unwrap();
        // A file system in memory keeps its pages.
        if !matches!(by_mincore(file.as_fd(), &pages), Some(1..)) {
            assert!(by_cachestat(file.as_fd(), &pages).is_none_or(|found| found == 0));
            assert_eq!(cached(file.as_fd(), 10..LEN, LEN), Some(0));
            // A try may have the system read ahead, so it comes last.
            assert!(by_trying(file.as_fd(), &(0..LEN)).is_none_or(|found| found < LEN / 2));
        }
    }
}
