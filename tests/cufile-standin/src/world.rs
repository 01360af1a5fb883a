//! The library's state, and the rules of its calls.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::config::{Config, Fault, Report};
use crate::cuda::Cuda;

/// A status and the driver's result beside it.
pub(crate) type Outcome<T = ()> = Result<T, Failure>;

/// What a call returns that does not succeed.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Failure {
    pub(crate) status: i32,
    pub(crate) driver: i32,
    pub(crate) errno: i32,
}

impl Failure {
    pub(crate) const fn status(status: i32) -> Failure {
        Failure { status, driver: 0, errno: 0 }
    }

    /// A call of the driver failed.
    fn driver(driver: i32) -> Failure {
        Failure { driver, ..Failure::status(5011) }
    }
}

const NOT_INITIALIZED: Failure = Failure::status(5001);
const IO_NOT_SUPPORTED: Failure = Failure::status(5008);
const POINTER_INVALID: Failure = Failure::status(5012);
const RANGE_ERROR: Failure = Failure::status(5014);
const DIRECT_NOT_SET: Failure = Failure::status(5020);
const INVALID_VALUE: Failure = Failure::status(5022);
const ALREADY_REGISTERED: Failure = Failure::status(5023);
const NOT_REGISTERED: Failure = Failure::status(5024);
const HANDLE_NOT_REGISTERED: Failure = Failure::status(5027);
const PINNING_FAILED: Failure = Failure::status(5036);
const INVALID_CONTEXT: Failure = Failure::status(5047);

/// A registered file.
struct Registered {
    /// Of a copy of the descriptor.
    file: Arc<File>,
    descriptor: i32,
    reads: u64,
}

#[derive(Default)]
struct State {
    config: Config,
    faults: Vec<(Fault, u64)>,
    report: Report,
    files: BTreeMap<u64, Registered>,
    memory: BTreeMap<u64, usize>,
    next: u64,
}

/// The library.
pub(crate) struct World(Mutex<State>);

pub(crate) static WORLD: World = World(Mutex::new(State {
    config: Config {
        nvidia_fs: (2, 17),
        allow_compat: false,
        peer_to_peer: false,
        supported: 0,
        refused_file_systems: Vec::new(),
        most_bytes: usize::MAX,
        most_registered: usize::MAX,
        read_micros: 0,
        open_millis: 0,
    },
    faults: Vec::new(),
    report: Report { calls: BTreeMap::new(), bytes: 0, open: 0, files: 0, memory: 0, violations: Vec::new() },
    files: BTreeMap::new(),
    memory: BTreeMap::new(),
    next: 0,
}));

impl World {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts over.
    pub(crate) fn configure(&self, config: Config) {
        *self.state() = State { config, ..State::default() };
    }

    pub(crate) fn fault(&self, faults: Vec<Fault>) {
        self.state().faults = faults.into_iter().map(|fault| (fault, 0)).collect();
    }

    pub(crate) fn report(&self) -> Report {
        let state = self.state();
        let memory = state.memory.values().map(|&bytes| bytes as u64).sum();
        Report { files: state.files.len() as u64, memory, ..state.report.clone() }
    }

    /// Counts a call, and fails it if its turn has come.
    fn enter(&self, call: &'static str) -> Outcome<MutexGuard<'_, State>> {
        let mut state = self.state();
        *state.report.calls.entry(call.to_owned()).or_default() += 1;
        let mut failure = None;
        for (fault, seen) in &mut state.faults {
            if fault.call.is_empty() || fault.call == call {
                *seen += 1;
                let strikes = *seen == fault.nth || fault.onwards && *seen > fault.nth;
                let of = Failure { status: fault.status, driver: fault.driver, errno: fault.errno };
                failure = failure.or(strikes.then_some(of));
            }
        }
        failure.map_or(Ok(state), Err)
    }

    pub(crate) fn open(&self) -> Outcome {
        let pause = {
            let mut state = self.enter("cuFileDriverOpen")?;
            if Cuda::get().is_none() {
                return Err(Failure::status(5033));
            }
            state.report.open += 1;
            state.config.open_millis
        };
        std::thread::sleep(Duration::from_millis(pause));
        Ok(())
    }

    pub(crate) fn close(&self) -> Outcome {
        let mut state = self.enter("cuFileDriverClose_v2")?;
        if state.report.open == 0 {
            state.break_rule("closed more often than opened");
            return Err(NOT_INITIALIZED);
        }
        if state.report.open == 1 && !(state.files.is_empty() && state.memory.is_empty()) {
            state.break_rule("closed while files or memory are registered");
        }
        state.report.open -= 1;
        Ok(())
    }

    pub(crate) fn properties(&self) -> Outcome<Config> {
        Ok(self.enter("cuFileDriverGetProperties")?.config.clone())
    }

    pub(crate) fn register(&self, descriptor: i32) -> Outcome<u64> {
        let mut state = self.enter("cuFileHandleRegister")?;
        state.check_open("cuFileHandleRegister")?;
        // SAFETY: the caller's descriptor is open during the call.
        let borrowed = unsafe { BorrowedFd::borrow_raw(descriptor) };
        let file = File::from(borrowed.try_clone_to_owned().map_err(|_| INVALID_VALUE)?);
        if !is_direct(descriptor) {
            state.break_rule("a file that is not open for direct reads was registered");
            return Err(DIRECT_NOT_SET);
        }
        let refused = file_system(descriptor).is_none_or(|number| state.config.refused_file_systems.contains(&number));
        if refused && !state.config.allow_compat {
            return Err(IO_NOT_SUPPORTED);
        }
        if state.files.values().any(|known| known.descriptor == descriptor) {
            state.break_rule("a descriptor was registered twice");
            return Err(Failure::status(5028));
        }
        state.next += 1;
        let handle = state.next;
        state.files.insert(handle, Registered { file: Arc::new(file), descriptor, reads: 0 });
        Ok(handle)
    }

    pub(crate) fn deregister(&self, handle: u64) {
        // Its call has no result, so that none is failed: what is left would be the stand-in's fault.
        let mut state = self.state();
        *state.report.calls.entry("cuFileHandleDeregister".to_owned()).or_default() += 1;
        match state.files.remove(&handle) {
            None => state.break_rule("a handle was deregistered that is not registered"),
            Some(file) if file.reads > 0 => state.break_rule("a handle was deregistered during a read"),
            Some(file) if !is_open(file.descriptor) => {
                state.break_rule("a file was closed before its handle was deregistered");
            }
            Some(_) => {}
        }
    }

    pub(crate) fn register_memory(&self, address: u64, bytes: usize) -> Outcome {
        let mut state = self.enter("cuFileBufRegister")?;
        state.check_open("cuFileBufRegister")?;
        state.check_range("cuFileBufRegister", address, bytes as u64)?;
        if state.memory.contains_key(&address) {
            return Err(ALREADY_REGISTERED);
        }
        if state.memory.values().sum::<usize>().saturating_add(bytes) > state.config.most_registered {
            return Err(PINNING_FAILED);
        }
        state.memory.insert(address, bytes);
        Ok(())
    }

    pub(crate) fn deregister_memory(&self, address: u64) -> Outcome {
        let mut state = self.enter("cuFileBufDeregister")?;
        if Cuda::get().is_some_and(|cuda| cuda.tells() && cuda.device_memory(address) == Ok(None)) {
            state.break_rule("memory was freed before it was deregistered");
        }
        state.memory.remove(&address).map(drop).ok_or(NOT_REGISTERED)
    }

    /// Reads bytes of a file from `at` on to `base + offset`.
    pub(crate) fn read(&self, handle: u64, base: u64, bytes: usize, at: u64, offset: u64) -> Outcome<usize> {
        let (file, bytes, pause) = {
            let mut state = self.enter("cuFileRead")?;
            state.check_open("cuFileRead")?;
            if let Some(&registered) = state.memory.get(&base)
                && offset.saturating_add(bytes as u64) > registered as u64
            {
                state.break_rule("a read beyond registered memory");
                return Err(RANGE_ERROR);
            }
            state.check_range("cuFileRead", base.wrapping_add(offset), bytes as u64)?;
            let (most, pause) = (state.config.most_bytes, state.config.read_micros);
            let Some(file) = state.files.get_mut(&handle) else {
                state.break_rule("a read of a handle that is not registered");
                return Err(HANDLE_NOT_REGISTERED);
            };
            file.reads += 1;
            (Arc::clone(&file.file), bytes.min(most), pause)
        };
        // Without the lock: reads go on at the same time.
        std::thread::sleep(Duration::from_micros(pause));
        let outcome = copy(&file, at, bytes, base + offset);
        let mut state = self.state();
        if let Some(file) = state.files.get_mut(&handle) {
            file.reads -= 1;
        }
        if let Ok(read) = outcome {
            state.report.bytes += read as u64;
        }
        outcome
    }
}

impl State {
    fn break_rule(&mut self, what: &str) {
        self.report.violations.push(what.to_owned());
    }

    fn check_open(&mut self, call: &str) -> Outcome {
        if self.report.open == 0 {
            self.break_rule(&format!("{call} before the driver is open"));
            return Err(NOT_INITIALIZED);
        }
        if !Cuda::get().ok_or(NOT_INITIALIZED)?.has_context().map_err(Failure::driver)? {
            self.break_rule(&format!("{call} without a context"));
            return Err(INVALID_CONTEXT);
        }
        Ok(())
    }

    fn check_range(&mut self, call: &str, address: u64, bytes: u64) -> Outcome {
        let cuda = Cuda::get().ok_or(NOT_INITIALIZED)?;
        if !cuda.tells() {
            return Ok(());
        }
        match cuda.device_memory(address).map_err(Failure::driver)? {
            None => {
                self.break_rule(&format!("{call}: no device memory at {address:#x}"));
                Err(POINTER_INVALID)
            }
            Some((start, size)) if address - start + bytes > size => {
                self.break_rule(&format!("{call}: {bytes} bytes at {address:#x} exceed the allocation"));
                Err(RANGE_ERROR)
            }
            Some(_) => Ok(()),
        }
    }
}

/// What direct reads are aligned to: enough for every disk.
const PAGE: usize = 4096;

/// The most bytes of one direct read.
const PIECE: usize = 1 << 20;

/// Copies bytes of a file to a device, in pieces.
fn copy(file: &File, at: u64, bytes: usize, to: u64) -> Outcome<usize> {
    let cuda = Cuda::get().ok_or(NOT_INITIALIZED)?;
    let (mut buffer, mut done) = (vec![0; bytes.min(PIECE) + 3 * PAGE], 0);
    while done < bytes {
        let read = read_around(file, at + done as u64, PIECE.min(bytes - done), &mut buffer)
            .map_err(|error| Failure { errno: error.raw_os_error().unwrap_or(libc::EIO), ..Failure::status(1) })?;
        if read.is_empty() {
            break;
        }
        match cuda.copy(to + done as u64, read) {
            0 => done += read.len(),
            refused => return Err(Failure::driver(refused)),
        }
    }
    Ok(done)
}

/// Reads up to `len` bytes directly, with what is around them in their pages. Returns those: none beyond the end.
fn read_around<'a>(file: &File, at: u64, len: usize, buffer: &'a mut [u8]) -> std::io::Result<&'a [u8]> {
    let before = (at % PAGE as u64) as usize;
    let start = buffer.as_ptr().addr().next_multiple_of(PAGE) - buffer.as_ptr().addr();
    let pages = &mut buffer[start..start + (before + len).next_multiple_of(PAGE)];
    let read = file.read_at(pages, at - before as u64)?.min(before + len);
    Ok(&pages[before.min(read)..read])
}

fn flags(descriptor: i32) -> i32 {
    // SAFETY: takes a number, and fails for one that is not open.
    unsafe { libc::fcntl(descriptor, libc::F_GETFL) }
}

fn is_direct(descriptor: i32) -> bool {
    flags(descriptor) & libc::O_DIRECT != 0
}

fn is_open(descriptor: i32) -> bool {
    flags(descriptor) >= 0
}

/// The number of the file system of an open file.
fn file_system(descriptor: i32) -> Option<u64> {
    // SAFETY: zeros are a valid value of this structure of integers.
    let mut told: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: the pointer is to a living structure.
    let asked = unsafe { libc::fstatfs(descriptor, &raw mut told) };
    (asked == 0).then_some(told.f_type as u64)
}
