//! The calls of Linux on an open file.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::sync::OnceLock;

use rustix::fs::{AtFlags, OFlags, StatxFlags, statx};
use rustix::io::{Errno, ReadWriteFlags, preadv2};

use super::page_cache;
use super::{Alignment, Calls, NotDirect, Way};

/// `RWF_DONTCACHE`, since Linux 6.14.
const DONTCACHE: u32 = 0x80;

/// `STATX_DIO_READ_ALIGN`, since Linux 6.14: reads may have another alignment than writes.
const READ_ALIGN: u32 = 0x0002_0000;

/// What direct reads are aligned to where the system does not say: a page, which is enough for every disk of its time.
const USUAL: u32 = 4096;

/// The descriptor for direct reads and their alignment, once it is open.
pub(crate) type DirectFile = OnceLock<(File, Alignment)>;

/// An open file, with the descriptor for direct reads once it is needed.
#[derive(Debug)]
pub(crate) struct OpenCalls<'a, F> {
    file: &'a F,
    /// The file's length when it was opened.
    len: u64,
    direct: &'a DirectFile,
}

impl<'a, F: AsFd> OpenCalls<'a, F> {
    pub(crate) fn new(file: &'a F, len: u64, direct: &'a DirectFile) -> Self {
        OpenCalls { file, len, direct }
    }

    /// The file once more, open for direct reads; or why it cannot be.
    pub(crate) fn open_once_more(&self) -> Result<File, String> {
        self.open_direct().map(|(file, _)| file).map_err(|why| match why {
            NotDirect::Refused(why) => why,
            NotDirect::NotNow => "no descriptor is left".to_owned(),
        })
    }

    /// Opens the file once more, whatever has become of its name.
    fn open_direct(&self) -> Result<(File, Alignment), NotDirect> {
        let alignment = self.alignment()?;
        let path = format!("/proc/self/fd/{}", self.file.as_fd().as_raw_fd());
        // Open flags are small positive numbers.
        let opened = File::options().read(true).custom_flags(OFlags::DIRECT.bits() as i32).open(path);
        let file = opened.map_err(|error| match Errno::from_io_error(&error) {
            Some(Errno::MFILE | Errno::NFILE) => NotDirect::NotNow,
            Some(Errno::NOENT) => NotDirect::Refused("/proc is not there".to_owned()),
            _ => NotDirect::Refused(format!("it cannot be opened for direct reads: {error}")),
        })?;
        Ok((file, alignment))
    }

    fn alignment(&self) -> Result<Alignment, NotDirect> {
        let asked = StatxFlags::DIOALIGN | StatxFlags::from_bits_retain(READ_ALIGN);
        let told = statx(self.file, "", AtFlags::EMPTY_PATH, asked).ok();
        let (mut offset, mut memory) = (USUAL, USUAL);
        if let Some(told) = told.filter(|told| told.stx_mask & StatxFlags::DIOALIGN.bits() != 0) {
            (offset, memory) = (told.stx_dio_offset_align, told.stx_dio_mem_align);
            if told.stx_mask & READ_ALIGN != 0 && told.stx_dio_read_offset_align != 0 {
                offset = told.stx_dio_read_offset_align;
            }
        }
        if offset == 0 || memory == 0 {
            return Err(NotDirect::Refused("its file system has no direct reads".to_owned()));
        }
        let unusual = || NotDirect::Refused(format!("direct reads would be aligned to {offset} and {memory} bytes"));
        Alignment::new(offset, memory).ok_or_else(unusual)
    }
}

impl<F: AsFd> Calls for OpenCalls<'_, F> {
    fn cached(&self, range: Range<u64>) -> Option<u64> {
        page_cache::cached(self.file.as_fd(), range, self.len)
    }

    fn direct(&self) -> Result<Alignment, NotDirect> {
        if let Some((_, alignment)) = self.direct.get() {
            return Ok(*alignment);
        }
        let opened = self.open_direct()?;
        // Of several threads that open it, the first one's descriptor stays.
        Ok(self.direct.get_or_init(|| opened).1)
    }

    fn read(&self, way: Way, at: u64, dst: &mut [u8]) -> io::Result<usize> {
        let flags = match way {
            Way::Cached | Way::Direct => ReadWriteFlags::empty(),
            Way::Dropped => ReadWriteFlags::from_bits_retain(DONTCACHE),
        };
        let file = match (way, self.direct.get()) {
            (Way::Direct, Some((direct, _))) => direct.as_fd(),
            (Way::Direct, None) => return Err(io::ErrorKind::Unsupported.into()),
            _ => self.file.as_fd(),
        };
        if way == Way::Cached {
            return Ok(rustix::io::pread(file, dst, at)?);
        }
        Ok(preadv2(file, &mut [io::IoSliceMut::new(dst)], at, flags)?)
    }
}
