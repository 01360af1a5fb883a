//! Files that are read and written by position, and [reads](read) of them that suit what the page cache has.

pub(crate) mod read;

use std::fs::{File, Metadata};
use std::io;

#[cfg(target_os = "linux")]
use read::{DirectFile, OpenCalls};

/// Fails if a file of so many bytes is longer than this process may write (`RLIMIT_FSIZE`, `ulimit -f`). The system would kill
/// a process that tries, with the signal SIGXFSZ.
#[cfg(unix)]
pub(crate) fn within_limit(bytes: u64) -> io::Result<()> {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Fsize).current;
    match limit {
        Some(limit) if bytes > limit => Err(rustix::io::Errno::FBIG.into()),
        _ => Ok(()),
    }
}

#[cfg(not(unix))]
pub(crate) fn within_limit(_bytes: u64) -> io::Result<()> {
    Ok(())
}

/// A file that is open.
#[derive(Debug)]
pub(crate) struct OpenFile {
    file: PositionalFile,
    /// The descriptor for direct reads, opened when it is first needed. A file may take two descriptors so.
    #[cfg(target_os = "linux")]
    direct: DirectFile,
}

impl OpenFile {
    pub(crate) fn new(file: File) -> OpenFile {
        OpenFile {
            file: PositionalFile::new(file),
            #[cfg(target_os = "linux")]
            direct: DirectFile::default(),
        }
    }

    /// The file, for what needs no choice of ways.
    pub(crate) fn positional(&self) -> &PositionalFile {
        &self.file
    }

    /// The system's calls on the file, of `len` bytes.
    #[cfg(target_os = "linux")]
    pub(crate) fn calls(&self, len: u64) -> OpenCalls<'_, PositionalFile> {
        OpenCalls::new(&self.file, len, &self.direct)
    }

    /// The file once more, open for direct reads; or why it cannot be.
    pub(crate) fn open_direct(&self, len: u64) -> Result<File, String> {
        #[cfg(target_os = "linux")]
        return self.calls(len).open_once_more();
        #[cfg(not(target_os = "linux"))]
        return Err(format!("files of {len} bytes are read directly on Linux alone"));
    }

    /// The system's calls on the file.
    #[cfg(not(target_os = "linux"))]
    pub(crate) fn calls(&self, _len: u64) -> &PositionalFile {
        &self.file
    }
}

/// A file that several threads can read and write by position at once.
#[cfg(any(unix, windows))]
#[derive(Debug)]
pub(crate) struct PositionalFile(File);

#[cfg(any(unix, windows))]
impl PositionalFile {
    pub(crate) fn new(file: File) -> PositionalFile {
        PositionalFile(file)
    }

    pub(crate) fn metadata(&self) -> io::Result<Metadata> {
        self.0.metadata()
    }

    pub(crate) fn set_len(&self, bytes: u64) -> io::Result<()> {
        self.0.set_len(bytes)
    }

    /// Makes the file at least so long that it has the range, and takes room for the range on the file system, where that can be
    /// done in advance: a full disk is an error now, and not when the range is written.
    pub(crate) fn reserve(&self, at: u64, bytes: u64) -> io::Result<()> {
        let end = at + bytes;
        #[cfg(target_os = "linux")]
        {
            use rustix::fs::{FallocateFlags, fallocate};
            use rustix::io::Errno;
            loop {
                match fallocate(&self.0, FallocateFlags::empty(), at, bytes) {
                    Err(Errno::INTR) => {}
                    // A file system that cannot do it.
                    Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => break,
                    reserved => return reserved.map_err(io::Error::from),
                }
            }
        }
        if self.metadata()?.len() < end { self.set_len(end) } else { Ok(()) }
    }

    /// Gives the bytes of a range back to the file system, where it can do that; the range then reads as zeros.
    pub(crate) fn punch(&self, at: u64, bytes: u64) {
        #[cfg(target_os = "linux")]
        {
            use rustix::fs::{FallocateFlags, fallocate};
            // The range is overwritten before it is read, so nothing depends on this.
            let _ = fallocate(&self.0, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, at, bytes);
        }
        #[cfg(not(target_os = "linux"))]
        let _ = (at, bytes);
    }

    #[cfg(all(unix, not(target_os = "linux")))]
    pub(crate) fn read_exact_at(&self, dst: &mut [u8], at: u64) -> io::Result<()> {
        std::os::unix::fs::FileExt::read_exact_at(&self.0, dst, at)
    }

    #[cfg(unix)]
    pub(crate) fn write_all_at(&self, src: &[u8], at: u64) -> io::Result<()> {
        std::os::unix::fs::FileExt::write_all_at(&self.0, src, at)
    }

    #[cfg(windows)]
    pub(crate) fn read_exact_at(&self, mut dst: &mut [u8], mut at: u64) -> io::Result<()> {
        while !dst.is_empty() {
            match std::os::windows::fs::FileExt::seek_read(&self.0, dst, at) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(n) => (dst, at) = (&mut dst[n..], at + n as u64),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    #[cfg(windows)]
    pub(crate) fn write_all_at(&self, mut src: &[u8], mut at: u64) -> io::Result<()> {
        while !src.is_empty() {
            match std::os::windows::fs::FileExt::seek_write(&self.0, src, at) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(n) => (src, at) = (&src[n..], at + n as u64),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

#[cfg(unix)]
impl std::os::fd::AsFd for PositionalFile {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Without positional reads in the system, the threads take turns with the file's single cursor.
#[cfg(not(any(unix, windows)))]
#[derive(Debug)]
pub(crate) struct PositionalFile(std::sync::Mutex<File>);

#[cfg(not(any(unix, windows)))]
impl PositionalFile {
    pub(crate) fn new(file: File) -> PositionalFile {
        PositionalFile(std::sync::Mutex::new(file))
    }

    fn at(&self, at: u64) -> io::Result<std::sync::MutexGuard<'_, File>> {
        use std::io::{Seek, SeekFrom};
        let mut file = self.lock();
        file.seek(SeekFrom::Start(at))?;
        Ok(file)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, File> {
        // Every use sets the cursor first, so it does not matter where a panic left it.
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    pub(crate) fn metadata(&self) -> io::Result<Metadata> {
        self.lock().metadata()
    }

    pub(crate) fn set_len(&self, bytes: u64) -> io::Result<()> {
        self.lock().set_len(bytes)
    }

    pub(crate) fn reserve(&self, at: u64, bytes: u64) -> io::Result<()> {
        if self.metadata()?.len() < at + bytes { self.set_len(at + bytes) } else { Ok(()) }
    }

    pub(crate) fn punch(&self, _at: u64, _bytes: u64) {}

    pub(crate) fn read_exact_at(&self, dst: &mut [u8], at: u64) -> io::Result<()> {
        io::Read::read_exact(&mut *self.at(at)?, dst)
    }

    pub(crate) fn write_all_at(&self, src: &[u8], at: u64) -> io::Result<()> {
        io::Write::write_all(&mut *self.at(at)?, src)
    }
}
