//! The tests' side of the loaded probe.

use std::ffi::c_void;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use libloading::{Library, Symbol};

use crate::state::{Failure, Omission};

/// The file name that Cargo gives the library.
const FILE: &str = if cfg!(windows) {
    "vulkan_probe.dll"
} else if cfg!(target_os = "macos") {
    "libvulkan_probe.dylib"
} else {
    "libvulkan_probe.so"
};

/// Where Cargo put the library.
///
/// # Panics
/// When it is not there.
pub fn library_path() -> PathBuf {
    // A program that the dynamic linker was asked to run is not the running file, but the first argument.
    let program = std::env::args_os().next().map(PathBuf::from).unwrap_or_default();
    let places: Vec<PathBuf> = program
        .ancestors()
        .skip(1)
        .take(2)
        .flat_map(|folder| [folder.to_owned(), folder.join("deps")])
        .chain([Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/debug/deps")])
        .map(|folder| folder.join(FILE))
        .collect();
    let found = places.iter().find(|path| path.is_file());
    found.unwrap_or_else(|| panic!("{FILE} is in none of {places:?}")).clone()
}

/// The probe for one test at a time.
#[derive(Debug)]
pub struct Session {
    _alone: MutexGuard<'static, ()>,
}

/// Begins a session: nothing fails, and nothing was counted.
///
/// # Panics
/// When the library is not there.
pub fn session() -> Session {
    static ALONE: Mutex<()> = Mutex::new(());
    let session = Session { _alone: ALONE.lock().unwrap_or_else(PoisonError::into_inner) };
    // SAFETY: the function has this type.
    unsafe { symbol::<extern "C" fn()>("vulkan_probe_reset")() };
    session
}

/// # Safety
/// The symbol has this type.
unsafe fn symbol<T>(name: &str) -> Symbol<'static, T> {
    static LIBRARY: OnceLock<Library> = OnceLock::new();
    let library = LIBRARY.get_or_init(|| {
        // SAFETY: the library's initialisers are those of Rust's standard library.
        unsafe { Library::new(library_path()) }.expect("the probe loads")
    });
    // SAFETY: the caller's promise.
    unsafe { library.get(name.as_bytes()) }.expect("a function of the probe")
}

impl Session {
    /// The library to open as Vulkan's.
    pub fn library(&self) -> PathBuf {
        library_path()
    }

    /// Makes the n-th call from now on fail. None for 0.
    pub fn fail(&self, nth: u64, how: Failure) {
        // SAFETY: the function has this type.
        unsafe { symbol::<extern "C" fn(u64, u32)>("vulkan_probe_fail")(nth, how as u32) };
    }

    /// Forgets which call failed.
    pub fn forget_failed(&self) {
        // SAFETY: the function has this type.
        unsafe { symbol::<extern "C" fn()>("vulkan_probe_forget_failed")() };
    }

    /// The layers that the environment asked for and that were there when the last instance was made.
    pub fn layers(&self) -> u64 {
        self.number("layers")
    }

    /// Makes the next call of this name fail.
    pub fn fail_next(&self, call: &str, how: Failure) {
        type FailNext = unsafe extern "C" fn(*const u8, usize, u32);
        // SAFETY: the function has this type, and the name lives as long as the call.
        unsafe { symbol::<FailNext>("vulkan_probe_fail_next")(call.as_ptr(), call.len(), how as u32) };
    }

    /// Counts what is alive no more: a lost device leaves its objects.
    pub fn forget_left(&self) {
        // SAFETY: the function has this type.
        unsafe { symbol::<extern "C" fn()>("vulkan_probe_forget")() };
    }

    /// Has drivers report at most so many bytes as the largest binding of a kernel from now on.
    pub fn limit_bindings(&self, bytes: u32) {
        // SAFETY: the function has this type.
        unsafe { symbol::<extern "C" fn(u32)>("vulkan_probe_binding")(bytes) };
    }

    /// Leaves something out of the program's calls from now on.
    pub fn omit(&self, what: Omission) {
        // SAFETY: the function has this type.
        unsafe { symbol::<extern "C" fn(u32)>("vulkan_probe_omit")(what as u32) };
    }

    /// The calls that can fail, so far.
    pub fn calls(&self) -> u64 {
        self.number("calls")
    }

    /// How often something was left out.
    pub fn omissions(&self) -> u64 {
        self.number("omissions")
    }

    /// The submitted command buffers with copies, and those of them after which the host sees what was copied.
    pub fn copying_and_shown(&self) -> (u64, u64) {
        (self.number("copying"), self.number("shown"))
    }

    /// The call that was made to fail, if it was reached.
    pub fn failed(&self) -> Option<String> {
        self.lines("failed").pop()
    }

    /// The objects that are alive, as `3 buffer`.
    pub fn alive(&self) -> Vec<String> {
        self.lines("alive")
    }

    /// The messages of the validation layer.
    pub fn messages(&self) -> Vec<String> {
        self.lines("message")
    }

    fn number(&self, name: &str) -> u64 {
        self.lines(name).first().and_then(|line| line.parse().ok()).unwrap_or(0)
    }

    fn lines(&self, name: &str) -> Vec<String> {
        unsafe extern "C" fn take(to: *mut c_void, text: *const u8, bytes: usize) {
            // SAFETY: the text that the probe gives, and the string below.
            unsafe {
                *to.cast::<String>() = String::from_utf8_lossy(std::slice::from_raw_parts(text, bytes)).into_owned();
            };
        }
        type Take = unsafe extern "C" fn(*mut c_void, *const u8, usize);
        let mut text = String::new();
        // SAFETY: the function has this type; `take` writes to the string while the call lasts.
        unsafe {
            symbol::<unsafe extern "C" fn(Take, *mut c_void)>("vulkan_probe_report")(take, (&raw mut text).cast());
        }
        text.lines().filter_map(|line| Some(line.strip_prefix(name)?.strip_prefix(' ')?.to_owned())).collect()
    }
}
