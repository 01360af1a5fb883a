//! Whether registered host memory is still the mapping that was registered.
//!
//! The system does not tell when a program unmaps memory and maps other memory at the same addresses. But two
//! neighbouring pages with different advice are two entries in its list of mappings. So the first whole page of what is
//! registered is advised not to be in core dumps, unlike the next: an entry ends there for as long as this is the memory.

use std::ops::Range;

/// Registered memory, and the place at which an entry of the list ends.
#[derive(Debug)]
pub(crate) struct Mark {
    /// All pages that have a byte of it.
    pages: Range<u64>,
    /// The first whole page; none where there are not two, or the system does not take the advice.
    page: Option<Range<u64>>,
}

impl Mark {
    pub(crate) fn set(base: u64, len: u64) -> Mark {
        let size = page_size();
        let (end, first) = (base + len, base.next_multiple_of(size));
        let page = (first + 2 * size <= end).then_some(first..first + size);
        let mut mark = Mark { pages: base / size * size..end.next_multiple_of(size), page };
        mark.page = mark.page.take().filter(|page| advise(page, DO_NOT_DUMP));
        if mark.lost().is_some() {
            // The program gave the same advice.
            mark.page = None;
        }
        mark
    }

    /// What is there in place of the memory, if it is gone.
    pub(crate) fn lost(&self) -> Option<&'static str> {
        let (mut at, mut ends) = (self.pages.start, false);
        for mapping in mappings()? {
            if mapping.end <= at {
                continue;
            }
            if mapping.start > at {
                break;
            }
            at = mapping.end;
            ends |= self.page.as_ref().is_some_and(|page| page.end == at);
            if at >= self.pages.end {
                let same = ends || self.page.is_none();
                return (!same).then_some("it was unmapped, and other memory is there now");
            }
        }
        Some("it was unmapped")
    }

    pub(crate) fn lift(&self) {
        if let Some(page) = &self.page {
            advise(page, DUMP);
        }
    }
}

#[cfg(target_os = "linux")]
const DO_NOT_DUMP: i32 = 16;
#[cfg(target_os = "linux")]
const DUMP: i32 = 17;

#[cfg(target_os = "linux")]
unsafe extern "C" {
    fn madvise(at: *mut std::ffi::c_void, len: usize, advice: i32) -> i32;
    fn sysconf(name: i32) -> std::ffi::c_long;
}

#[cfg(target_os = "linux")]
fn advise(page: &Range<u64>, advice: i32) -> bool {
    let len = (page.end - page.start) as usize;
    // SAFETY: this advice changes no byte, and memory that is not mapped is refused.
    unsafe { madvise(std::ptr::with_exposed_provenance_mut(page.start as usize), len, advice) == 0 }
}

#[cfg(target_os = "linux")]
fn page_size() -> u64 {
    const PAGE_SIZE: i32 = 30;
    // SAFETY: asks for a number.
    u64::try_from(unsafe { sysconf(PAGE_SIZE) }).ok().filter(|size| size.is_power_of_two()).unwrap_or(4096)
}

/// The mappings of this process, in the order of their addresses.
#[cfg(target_os = "linux")]
fn mappings() -> Option<Vec<Range<u64>>> {
    let text = std::fs::read_to_string("/proc/self/maps").ok()?;
    let range = |line: &str| {
        let (start, rest) = line.split_once('-')?;
        let end = rest.split(' ').next()?;
        Some(u64::from_str_radix(start, 16).ok()?..u64::from_str_radix(end, 16).ok()?)
    };
    Some(text.lines().filter_map(range).collect())
}

#[cfg(not(target_os = "linux"))]
mod elsewhere {
    use std::ops::Range;

    pub(super) const DO_NOT_DUMP: i32 = 0;
    pub(super) const DUMP: i32 = 0;

    pub(super) fn advise(_: &Range<u64>, _: i32) -> bool {
        false
    }

    pub(super) fn page_size() -> u64 {
        4096
    }

    pub(super) fn mappings() -> Option<Vec<Range<u64>>> {
        None
    }
}
#[cfg(not(target_os = "linux"))]
use elsewhere::*;

#[cfg(test)]
mod tests {
    use memmap2::{MmapMut, MmapOptions};

    use super::*;

    fn map(pages: u64) -> (MmapMut, u64) {
        let mut map = MmapOptions::new().len((pages * page_size()) as usize).map_anon().unwrap();
        let base = map.as_mut_ptr().expose_provenance() as u64;
        (map, base)
    }

    #[test]
    fn memory_that_stays_is_the_same_and_memory_that_goes_is_not() {
        let (map, base) = map(4);
        let mark = Mark::set(base + 8, 3 * page_size());
        assert!(mark.page.is_some());
        assert_eq!(mark.lost(), None);
        drop(map);
        assert!(mark.lost().is_some());
    }

    #[test]
    fn a_page_alone_has_no_mark() {
        let (_map, base) = map(1);
        let mark = Mark::set(base, page_size());
        assert_eq!((mark.page.clone(), mark.lost()), (None, None));
    }
}
