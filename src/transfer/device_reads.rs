//! Reads of files by the device that keeps the bytes, without host memory in between.

use std::collections::BTreeSet;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::file::FileSource;
use super::source::Source;
use super::stamp::Stamp;
use crate::backend::{BufMut, Device, DeviceFile, FileReads, NoFileReads, until};
use crate::device::DeviceId;
use crate::error::Result;
use crate::file::read::{Extent, LEAST};

/// The most bytes of one read: as many as libcufile has under way for one by default. Between two the caller is asked.
const PIECE: usize = 16 << 20;

/// What pieces begin at multiples of in the file, as direct reads do, but for the first.
const PAGE: u64 = 4096;

/// The most files that are registered at one time. Each takes a descriptor.
const MOST_FILES: usize = 16;

/// Bytes of a source, from the byte `from` on, that go to the bytes `to` of a destination.
#[derive(Clone, Debug)]
pub(crate) struct FilePart<'a> {
    pub(crate) source: &'a dyn Source,
    pub(crate) from: u64,
    pub(crate) to: Range<usize>,
}

/// Bytes of a part, and whether its device reads them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Stretch {
    pub(crate) bytes: Range<usize>,
    pub(crate) by_device: bool,
}

/// The reads of one device for one load or one lane: the files that it has registered meanwhile, and what became of them.
#[derive(Debug)]
pub(crate) struct DeviceReads {
    device: Arc<dyn Device>,
    files: Mutex<Files>,
    read: AtomicU64,
}

#[derive(Debug, Default)]
struct Files {
    /// The files that were registered last, the latest first.
    registered: Vec<(FileKey, Arc<dyn DeviceFile>)>,
    /// The files that are not asked again.
    refused: BTreeSet<PathBuf>,
    /// Why the device reads no file.
    refused_all: bool,
    reasons: Vec<String>,
}

/// A file, whatever its name has come to.
type FileKey = (PathBuf, Stamp);

impl DeviceReads {
    /// The reads of a device. `None` if it has none.
    pub(crate) fn of(device: &Arc<dyn Device>) -> Option<DeviceReads> {
        device.file_reads()?;
        Some(DeviceReads { device: Arc::clone(device), files: Mutex::default(), read: AtomicU64::new(0) })
    }

    /// Divides the bytes of a part by who reads them. The device reads those of a file that are not in the page cache, unless the
    /// caller wants it to read all. Host memory is faster for the others, and for few.
    pub(crate) fn divide(&self, part: &FilePart<'_>) -> Vec<Stretch> {
        let through_host = || vec![Stretch { bytes: 0..part.to.len(), by_device: false }];
        if part.to.len() < LEAST {
            return through_host();
        }
        let Some((reads, file)) = self.reads_of(part.source) else { return through_host() };
        let all = |is_cached| vec![Extent { bytes: part.to.len(), is_cached }];
        let extents = match reads.takes_cached() {
            true => all(false),
            // The read through host memory meets the same error, and returns it.
            false => file.extents(part.from, part.to.len()).unwrap_or_else(|_| all(true)),
        };
        let mut at = 0;
        let stretches = extents.into_iter().map(|extent| {
            let bytes = at..at + extent.bytes;
            at = bytes.end;
            Stretch { by_device: !extent.is_cached && bytes.len() >= LEAST, bytes }
        });
        stretches.collect()
    }

    /// Reads parts of files into `dst`, one after the other, whole. Returns how many bytes of them, counted from the beginning of
    /// the first, have arrived: if not all, the rest has to come through host memory, and the [report](Self::report) says why.
    /// `dst` belongs to the reads until this returns. `progress` is told the bytes of each piece, and ends the reads by an error.
    ///
    /// Waits until nothing that was queued before uses `dst` any more, since a device reads beside its streams.
    ///
    /// # Errors
    /// [`Changed`](crate::error::FileFault::Changed) when a file is not the one that was opened;
    /// [`TimedOut`](crate::Error::TimedOut) when a use of `dst` is pending after `deadline`, and [`Failed`](crate::Error::Failed)
    /// when one failed; what `progress` returns.
    pub(crate) fn read(
        &self,
        parts: &[FilePart<'_>],
        dst: &mut BufMut,
        deadline: Duration,
        mut progress: impl FnMut(usize) -> Result<()>,
    ) -> Result<usize> {
        let until = until(deadline);
        dst.pending().iter().try_for_each(|event| event.wait(until.saturating_duration_since(Instant::now())))?;
        let mut done = 0;
        for part in parts {
            let read = self.read_part(part, dst, &mut progress)?;
            done += read;
            if read < part.to.len() {
                break;
            }
        }
        Ok(done)
    }

    /// The bytes that the device has read, and for each file of which it could not read what it should have, or for all, why; also
    /// why those that it has read passed host memory, if they did.
    pub(crate) fn report(&self) -> (u64, Vec<String>) {
        let (read, mut reasons) = (self.read.load(Ordering::Relaxed), self.files().reasons.clone());
        let bounces = self.device.file_reads().filter(|_| read > 0).and_then(FileReads::bounces);
        reasons.extend(bounces.map(|why| format!("{}: {why}", self.id())));
        (read, reasons)
    }

    fn read_part(
        &self,
        part: &FilePart<'_>,
        dst: &mut BufMut,
        progress: &mut impl FnMut(usize) -> Result<()>,
    ) -> Result<usize> {
        let (mut done, wanted) = (0, part.to.len());
        let Some((reads, source)) = self.reads_of(part.source) else { return Ok(0) };
        let registered = match self.registered(reads, source)? {
            Ok(registered) => registered,
            Err(why) => return Ok(self.refuse(source, &why)),
        };
        while done < wanted {
            let at = part.from + done as u64;
            let to_page = (PIECE as u64 - at % PAGE) as usize;
            let piece = part.to.start + done..part.to.start + done + to_page.min(wanted - done);
            let read = match registered.read(at, dst, piece) {
                Ok(read) => read,
                Err(why) => {
                    self.refuse(source, &why);
                    break;
                }
            };
            // Checked after each read, so that a change before or during it is detected.
            source.check(registered.file())?;
            if read == 0 {
                self.refuse(source, &NoFileReads::File { why: format!("the device found its end at byte {at}") });
                break;
            }
            done += read;
            self.read.fetch_add(read as u64, Ordering::Relaxed);
            progress(read)?;
        }
        Ok(done)
    }

    /// The device's reads and the file of a source, unless they are known to be refused.
    fn reads_of<'a>(&self, source: &'a dyn Source) -> Option<(&dyn FileReads, &'a FileSource)> {
        let file = source.file().filter(|file| !file.is_always_cached())?;
        let reads = self.device.file_reads()?;
        {
            let files = self.files();
            if files.refused_all || files.refused.contains(source.path()) {
                return None;
            }
        }
        if let Err(why) = reads.ready() {
            self.refuse_all(&why);
            return None;
        }
        Some((reads, file))
    }

    /// The file as the device has it registered.
    ///
    /// # Errors
    /// [`Changed`](crate::error::FileFault::Changed) when another file is in its place.
    fn registered(
        &self,
        reads: &dyn FileReads,
        source: &FileSource,
    ) -> Result<std::result::Result<Arc<dyn DeviceFile>, NoFileReads>> {
        let key = (source.path().to_owned(), source.stamp());
        let known = |files: &Files| {
            files.registered.iter().find(|(known, _)| *known == key).map(|(_, registered)| Arc::clone(registered))
        };
        if let Some(registered) = known(&self.files()) {
            return Ok(Ok(registered));
        }
        let file = match source.open_direct()? {
            Ok(file) => file,
            Err(why) => return Ok(Err(NoFileReads::File { why })),
        };
        let registered = match reads.register(file) {
            Ok(registered) => Arc::from(registered),
            Err(why) => return Ok(Err(why)),
        };
        let mut files = self.files();
        // Of several threads that register it, the first one's stays.
        if let Some(registered) = known(&files) {
            return Ok(Ok(registered));
        }
        files.registered.insert(0, (key, Arc::clone(&registered)));
        // What another thread reads from at the moment stays registered until it is done.
        let most = MOST_FILES.min(files.registered.len());
        let closed = files.registered.split_off(most);
        drop((files, closed));
        Ok(Ok(registered))
    }

    /// Keeps the reason why a file, or every file, is not read by the device, once. No bytes were read.
    fn refuse(&self, source: &FileSource, why: &NoFileReads) -> usize {
        if why.is_general() {
            self.refuse_all(why);
            return 0;
        }
        let mut files = self.files();
        if files.refused.insert(source.path().to_owned()) {
            tracing::debug!(device = %self.id(), path = %source.path().display(), %why, "read through host memory");
            files.reasons.push(format!("{}: {why}", source.path().display()));
        }
        0
    }

    /// Keeps the reason why the device reads no file, once.
    fn refuse_all(&self, why: &NoFileReads) {
        let mut files = self.files();
        if !std::mem::replace(&mut files.refused_all, true) {
            tracing::debug!(device = %self.id(), %why, "files are read through host memory");
            files.reasons.push(format!("{}: {why}", self.id()));
        }
    }

    fn id(&self) -> DeviceId {
        self.device.id()
    }

    fn files(&self) -> MutexGuard<'_, Files> {
        // Every change is one insertion or removal, so a poisoned lock still guards a consistent value.
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
#[cfg(target_os = "linux")]
mod tests {
    use std::any::Any;
    use std::fs::{self, File};
    use std::os::unix::fs::FileExt;

    use super::*;
    use crate::backend::{Backend, Charge, Health, Host, Ledger, MemoryBlock, MemoryKind, Role, Route, Stream};
    use crate::device::{DeviceInfo, MemoryUsage};
    use crate::error::{Error, FileFault};

    const DEADLINE: Duration = Duration::from_secs(10);

    /// The host, as a device that reads files, at most so many bytes at a time, and refuses the n-th read.
    #[derive(Debug)]
    struct Reading {
        host: Arc<dyn Device>,
        most: usize,
        refuses: u64,
        reads: Arc<AtomicU64>,
    }

    impl FileReads for Reading {
        fn ready(&self) -> std::result::Result<(), NoFileReads> {
            Ok(())
        }

        fn takes_cached(&self) -> bool {
            true
        }

        fn register(&self, file: File) -> std::result::Result<Box<dyn DeviceFile>, NoFileReads> {
            // Read without alignment here.
            let file = File::open(format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file))).unwrap();
            Ok(Box::new(Opened { file, most: self.most, refuses: self.refuses, reads: Arc::clone(&self.reads) }))
        }

        fn register_memory(
            &self,
            _memory: &Arc<MemoryBlock>,
        ) -> std::result::Result<Box<dyn Any + Send + Sync>, NoFileReads> {
            Err(NoFileReads::Off)
        }
    }

    #[derive(Debug)]
    struct Opened {
        file: File,
        most: usize,
        refuses: u64,
        reads: Arc<AtomicU64>,
    }

    impl DeviceFile for Opened {
        fn file(&self) -> &File {
            &self.file
        }

        fn read(&self, at: u64, dst: &mut BufMut, to: Range<usize>) -> std::result::Result<usize, NoFileReads> {
            if self.reads.fetch_add(1, Ordering::Relaxed) + 1 == self.refuses {
                return Err(NoFileReads::System { call: "read", error: "refused".to_owned() });
            }
            let to = to.start..to.end.min(to.start + self.most);
            let read = self.file.read_at(&mut dst.host_mut().unwrap()[to], at);
            read.map_err(|error| NoFileReads::system("read", &error))
        }
    }

    impl Device for Reading {
        fn info(&self) -> &DeviceInfo {
            self.host.info()
        }

        fn ledger(&self) -> &Arc<Ledger> {
            self.host.ledger()
        }

        fn memory(&self) -> Result<MemoryUsage> {
            self.host.memory()
        }

        fn allocate(&self, charge: Charge, kind: MemoryKind) -> Result<BufMut> {
            self.host.allocate(charge, kind)
        }

        fn stream(&self, role: Role) -> Result<Arc<dyn Stream>> {
            self.host.stream(role)
        }

        fn route_from(&self, source: &dyn Device) -> Route {
            self.host.route_from(source)
        }

        fn file_reads(&self) -> Option<&dyn FileReads> {
            Some(self)
        }

        fn trim(&self) -> Result<u64> {
            self.host.trim()
        }

        fn health(&self) -> Health {
            self.host.health()
        }
    }

    struct Case {
        reads: DeviceReads,
        memory: BufMut,
        source: FileSource,
        bytes: Vec<u8>,
        folder: tempfile::TempDir,
    }

    /// `None`, with a word, where files for tests cannot be read directly.
    fn case(most: usize, refuses: u64) -> Option<Case> {
        let folder = tempfile::tempdir().unwrap();
        let (path, bytes) =
            (folder.path().join("bytes"), (0..600_000u32).map(|at| (at % 251) as u8).collect::<Vec<_>>());
        fs::write(&path, &bytes).unwrap();
        let host = Host::new().open(DeviceId::CPU).unwrap();
        let device: Arc<dyn Device> = Arc::new(Reading { host, most, refuses, reads: Arc::default() });
        let memory = device.alloc(700_000, MemoryKind::Arena).unwrap();
        let reads = DeviceReads::of(&device).unwrap();
        let source = FileSource::open(path).unwrap();
        if let Err(why) = source.open_direct().unwrap() {
            eprintln!("skipped: {}: {why}", source.path().display());
            return None;
        }
        Some(Case { reads, memory, source, bytes, folder })
    }

    #[test]
    fn parts_go_to_their_places_in_order() {
        let Some(Case { reads, mut memory, source, bytes, folder: _folder }) = case(10_000, 0) else { return };
        let part = |from, to| FilePart { source: &source, from, to };
        let parts = [part(100, 5..300_005), part(0, 400_000..400_100), part(300_100, 400_100..699_999)];
        let mut told = 0;
        let read = reads.read(&parts, &mut memory, DEADLINE, |bytes| {
            told += bytes;
            Ok(())
        });
        assert_eq!((read.unwrap(), told), (599_999, 599_999));
        let got = memory.host_mut().unwrap();
        assert!(got[5..300_005] == bytes[100..300_100] && got[400_000..400_100] == bytes[..100]);
        assert!(got[400_100..699_999] == bytes[300_100..599_999]);
        assert_eq!(reads.report(), (599_999, Vec::new()));
    }

    /// Who reads the rest knows where it begins, and the file is not tried again.
    #[test]
    fn a_refusal_ends_the_reads_and_is_told_once() {
        let Some(Case { reads, mut memory, source, bytes, folder: _folder }) = case(10_000, 4) else { return };
        let part = |from, to| FilePart { source: &source, from, to };
        let parts = [part(0, 0..25_000), part(50_000, 50_000..60_000)];
        assert_eq!(reads.read(&parts, &mut memory, DEADLINE, |_| Ok(())).unwrap(), 25_000);
        assert!(memory.host_mut().unwrap()[..25_000] == bytes[..25_000]);
        for _ in 0..2 {
            assert_eq!(reads.read(&parts, &mut memory, DEADLINE, |_| Ok(())).unwrap(), 0);
        }
        let stretches = reads.divide(&part(0, 0..500_000));
        assert_eq!(stretches, [Stretch { bytes: 0..500_000, by_device: false }]);
        let (read, why) = reads.report();
        assert_eq!((read, why.len()), (25_000, 1));
        assert!(why[0].starts_with(source.path().to_str().unwrap()) && why[0].ends_with("read: refused"), "{why:?}");
    }

    #[test]
    fn what_stops_the_reads_is_returned() {
        let Some(Case { reads, mut memory, source, folder: _folder, .. }) = case(10_000, 0) else { return };
        let parts = [FilePart { source: &source, from: 0, to: 0..25_000 }];
        let stopped = reads.read(&parts, &mut memory, DEADLINE, |_| Err(Error::invalid("enough")));
        assert!(stopped.unwrap_err().to_string().contains("enough"));
        assert_eq!(reads.report().0, 10_000);
        let file = File::options().write(true).open(source.path()).unwrap();
        file.set_len(10).unwrap();
        match reads.read(&parts, &mut memory, DEADLINE, |_| Ok(())) {
            Err(Error::File { fault, .. }) => assert_eq!(*fault, FileFault::Changed),
            other => panic!("{other:?}"),
        }
    }

    /// Few bytes, and those of a source that is no file, are not the device's to read.
    #[test]
    fn the_host_reads_what_is_faster_so() {
        let Some(Case { reads, source, bytes, folder: _folder, .. }) = case(10_000, 0) else { return };
        let memory = super::super::MemorySource::new("bytes", bytes);
        let cached = FileSource::open(source.path()).unwrap().through_page_cache();
        let by_device = |source: &dyn Source, len| {
            let stretches = reads.divide(&FilePart { source, from: 0, to: 0..len });
            assert_eq!((stretches.len(), &stretches[0].bytes), (1, &(0..len)));
            stretches[0].by_device
        };
        assert!(by_device(&source, LEAST) && !by_device(&source, LEAST - 1));
        assert!(!by_device(&memory, LEAST) && !by_device(&cached, LEAST));
    }
}
