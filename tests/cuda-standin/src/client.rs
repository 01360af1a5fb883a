//! The tests' side: loads the driver and talks to it.

use std::ffi::c_void;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use libloading::Library;
use serde::Serialize;

use crate::config::Config;
use crate::control::INTERFACE;
use crate::fault::FaultPlan;
use crate::report::Report;

/// The file name that Cargo gives the library.
const FILE: &str = if cfg!(windows) {
    "cuda_standin.dll"
} else if cfg!(target_os = "macos") {
    "libcuda_standin.dylib"
} else {
    "libcuda_standin.so"
};
/// Next to the library: the folder in its own search path.
#[cfg(unix)]
const NAMES: &str = "cuda-standin-names";

static LOADED: OnceLock<Driver> = OnceLock::new();
static SESSION: Mutex<()> = Mutex::new(());

/// Why the stand-in could not be loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LoadError {
    /// The library was built nowhere near the running program.
    Missing(Vec<PathBuf>),
    /// The loader refused it.
    Refused(PathBuf, String),
    /// It is another version than this side of it.
    Version(PathBuf),
    /// Another driver was opened first under the name that programs look for.
    Taken(String),
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LoadError::Missing(tried) => write!(f, "{FILE} is in none of {tried:?}"),
            LoadError::Refused(path, why) => write!(f, "{} does not load: {why}", path.display()),
            LoadError::Version(path) => write!(f, "{} is of another version", path.display()),
            LoadError::Taken(name) => write!(f, "{name} leads to another driver in this process"),
        }
    }
}

impl std::error::Error for LoadError {}

/// Where Cargo put the library: beside the running program, one folder up, or in that folder's `deps`.
///
/// # Errors
/// `Missing`, with the places that were tried.
pub fn library_path() -> Result<PathBuf, LoadError> {
    let program = std::env::current_exe().unwrap_or_default();
    let near = program.ancestors().skip(1).take(2).flat_map(|folder| [folder.to_owned(), folder.join("deps")]);
    let built = Path::new(env!("OUT_DIR")).ancestors().nth(3).map(|folder| folder.join("deps"));
    let places: Vec<PathBuf> = near.chain(built).map(|folder| folder.join(FILE)).collect();
    places.iter().find(|path| path.is_file()).cloned().ok_or(LoadError::Missing(places))
}

/// The loaded stand-in. There is one per process; every value of this type is the same one.
#[derive(Clone, Copy, Debug)]
pub struct Driver {
    library: &'static Library,
}

type TakeReport = unsafe extern "C" fn(*mut c_void, *const u8, usize);

impl Driver {
    /// Loads the stand-in that was built with this program, before anything opens a driver by name.
    ///
    /// # Errors
    /// When it is not there or does not load, and when another driver was loaded before.
    pub fn load() -> Result<Driver, LoadError> {
        Driver::load_from(&library_path()?)
    }

    /// Loads the stand-in from a path; the first load of a process decides.
    ///
    /// # Errors
    /// When it is not there or does not load, and when another driver was loaded before.
    pub fn load_from(path: &Path) -> Result<Driver, LoadError> {
        if let Some(driver) = LOADED.get() {
            return Ok(*driver);
        }
        let path = path.canonicalize().map_err(|_| LoadError::Missing(vec![path.to_owned()]))?;
        #[cfg(unix)]
        lead_names_to(&path);
        // SAFETY: the library's initialisers are those of Rust's standard library.
        let library = unsafe { Library::new(&path) }.map_err(|e| LoadError::Refused(path.clone(), e.to_string()))?;
        let driver = Driver { library: Box::leak(Box::new(library)) };
        // SAFETY: the symbol has this type in every version.
        let interface = unsafe { driver.library.get::<extern "C" fn() -> u32>(b"standin_interface\0") };
        if interface.ok().map(|interface| interface()) != Some(INTERFACE) {
            return Err(LoadError::Version(path));
        }
        driver.check_names()?;
        Ok(*LOADED.get_or_init(|| driver))
    }

    /// Both names that programs look for must lead here.
    fn check_names(&self) -> Result<(), LoadError> {
        // SAFETY: the symbol has this type in this version.
        unsafe { self.symbol::<extern "C" fn() -> u32>("standin_take_names")() };
        for name in ["libcuda.so.1", "libcuda.so"] {
            // SAFETY: a library that is already open, or one that the program under test would open itself.
            if let Ok(found) = unsafe { Library::new(name) } {
                // SAFETY: the type does not matter, the symbol is not used.
                let ours = unsafe { found.get::<*const c_void>(b"standin_interface\0") }.is_ok();
                std::mem::forget(found);
                if !ours {
                    return Err(LoadError::Taken(name.to_owned()));
                }
            } else if name == "libcuda.so.1" {
                return Err(LoadError::Taken(name.to_owned()));
            }
        }
        Ok(())
    }

    /// # Safety
    /// The symbol must have this type.
    unsafe fn symbol<T: Copy>(&self, name: &str) -> T {
        // SAFETY: the caller's promise.
        let found = unsafe { self.library.get::<T>(name.as_bytes()) };
        *found.unwrap_or_else(|e| panic!("the stand-in lacks {name}: {e}"))
    }

    /// The address of an exported call, for tests that call the driver without a wrapper.
    pub fn call(&self, name: &str) -> Option<*const c_void> {
        // SAFETY: the address is only handed out.
        unsafe { self.library.get::<*const c_void>(name.as_bytes()) }.ok().map(|symbol| *symbol)
    }

    fn send(&self, name: &str, value: &impl Serialize) {
        let json = serde_json::to_vec(value).expect("plain values become JSON");
        // SAFETY: all the calls that take JSON have this type.
        let call = unsafe { self.symbol::<unsafe extern "C" fn(*const u8, usize) -> u32>(name) };
        // SAFETY: the bytes are alive during the call.
        let result = unsafe { call(json.as_ptr(), json.len()) };
        assert_eq!(result, 0, "{name} failed");
    }

    /// Starts over as another machine: all handles, memory, faults and counts of before are gone.
    pub fn configure(&self, config: &Config) {
        self.send("standin_configure", config);
    }

    /// Starts over as the same machine.
    pub fn reset(&self) {
        // SAFETY: the symbol has this type in this version.
        let result = unsafe { self.symbol::<extern "C" fn() -> u32>("standin_reset")() };
        assert_eq!(result, 0, "standin_reset failed");
    }

    /// Sets what goes wrong from now on, in place of what was set before.
    pub fn fault(&self, plan: &FaultPlan) {
        self.send("standin_fault", plan);
    }

    /// Nothing goes wrong any more; what is broken stays broken.
    pub fn no_faults(&self) {
        self.fault(&FaultPlan::default());
    }

    /// The end of the last piece of work so far, in counted time. What is enqueued from now on begins no earlier, whichever
    /// thread does that: so a stretch of the program can be looked at by itself.
    pub fn mark(&self) -> Duration {
        // SAFETY: the symbol has this type in this version.
        Duration::from_nanos(unsafe { self.symbol::<extern "C" fn() -> u64>("standin_mark")() })
    }

    /// What was seen since the last reset, and what is alive. Waits up to two seconds for the work that is enqueued.
    pub fn report(&self) -> Report {
        unsafe extern "C" fn take(into: *mut c_void, json: *const u8, len: usize) {
            // SAFETY: `into` is the vector below, `json` is good for `len` bytes during this call.
            unsafe { (*into.cast::<Vec<u8>>()).extend_from_slice(std::slice::from_raw_parts(json, len)) };
        }
        let mut json: Vec<u8> = Vec::new();
        // SAFETY: the symbol has this type in this version.
        let call = unsafe { self.symbol::<unsafe extern "C" fn(*mut c_void, TakeReport) -> u32>("standin_report") };
        // SAFETY: the vector lives during the call.
        let result = unsafe { call((&raw mut json).cast(), take) };
        assert_eq!(result, 0, "standin_report failed");
        serde_json::from_slice(&json).expect("both sides are of one version")
    }
}

/// Makes the folder in which the library looks up the driver's name, with the name in it.
#[cfg(unix)]
fn lead_names_to(library: &Path) {
    if let (Some(folder), Some(file)) = (library.parent(), library.file_name()) {
        let names = folder.join(NAMES);
        let _ = std::fs::create_dir_all(&names);
        for name in ["libcuda.so", "libcuda.so.1", "libnvidia-ml.so.1"] {
            let _ = std::os::unix::fs::symlink(Path::new("..").join(file), names.join(name));
        }
    }
}

/// The stand-in for one test: no other test of this process has it at the same time.
#[derive(Debug)]
pub struct Session {
    driver: Driver,
    _alone: MutexGuard<'static, ()>,
}

impl std::ops::Deref for Session {
    type Target = Driver;

    fn deref(&self) -> &Driver {
        &self.driver
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.driver.reset();
    }
}

/// Loads the stand-in if need be, waits for the test that has it, and starts it over as this machine.
///
/// # Panics
/// When the stand-in cannot be loaded.
pub fn session(config: &Config) -> Session {
    let alone = SESSION.lock().unwrap_or_else(PoisonError::into_inner);
    let driver = Driver::load().unwrap_or_else(|error| panic!("{error}"));
    driver.configure(config);
    Session { driver, _alone: alone }
}
