//! The tests' side: loads the library and talks to it.

use std::ffi::c_void;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use libloading::Library;
use serde::Serialize;

use crate::config::{Config, Fault, Report};

/// The file name that Cargo gives the library.
const FILE: &str = "libcufile_standin.so";

static LOADED: OnceLock<Library> = OnceLock::new();
static SESSION: Mutex<()> = Mutex::new(());

/// Where Cargo put the library: beside the running program, one folder up, or in that folder's `deps`.
///
/// # Panics
/// When it is in none of these.
pub fn library_path() -> PathBuf {
    let program = std::env::current_exe().unwrap_or_default();
    let near = program.ancestors().skip(1).take(2).flat_map(|folder| [folder.to_owned(), folder.join("deps")]);
    let built = Path::new(env!("OUT_DIR")).ancestors().nth(3).map(|folder| folder.join("deps"));
    let places: Vec<PathBuf> = near.chain(built).map(|folder| folder.join(FILE)).collect();
    let found = places.iter().find(|path| path.is_file()).cloned();
    found.unwrap_or_else(|| panic!("{FILE} is in none of {places:?}"))
}

/// The stand-in for one test: no other test of this process has it at the same time.
#[derive(Debug)]
pub struct Session {
    library: &'static Library,
    _alone: MutexGuard<'static, ()>,
}

/// Begins a session over a library that says this of itself.
///
/// # Panics
/// When the library is not there, or does not load.
pub fn session(config: &Config) -> Session {
    let alone = SESSION.lock().unwrap_or_else(PoisonError::into_inner);
    // SAFETY: the library's initialisers are those of Rust's standard library.
    let load = || unsafe { Library::new(library_path()) }.expect("the stand-in loads");
    let session = Session { library: LOADED.get_or_init(load), _alone: alone };
    session.send("standin_cufile_configure", config);
    session
}

impl Session {
    fn send(&self, name: &str, value: &(impl Serialize + ?Sized)) {
        let json = serde_json::to_vec(value).expect("plain values become JSON");
        // SAFETY: the calls that take JSON have this type.
        let call = unsafe { self.library.get::<unsafe extern "C" fn(*const u8, usize) -> u32>(name.as_bytes()) };
        // SAFETY: the bytes are alive during the call.
        let result = unsafe { call.expect("the stand-in's own call")(json.as_ptr(), json.len()) };
        assert_eq!(result, 0, "{name}");
    }

    /// The address of an exported call, for tests that make it themselves.
    pub fn call(&self, name: &str) -> Option<*const c_void> {
        // SAFETY: the address is only handed out.
        unsafe { self.library.get::<*const c_void>(name.as_bytes()) }.ok().map(|symbol| *symbol)
    }

    /// Sets what goes wrong from now on, in place of what was set before.
    pub fn fault(&self, faults: &[Fault]) {
        self.send("standin_cufile_fault", faults);
    }

    /// What the library has seen.
    pub fn report(&self) -> Report {
        type Take = unsafe extern "C" fn(*mut c_void, *const u8, usize);

        unsafe extern "C" fn take(context: *mut c_void, json: *const u8, len: usize) {
            // SAFETY: the context is the vector below, the bytes are the library's during the call.
            unsafe { (*context.cast::<Vec<u8>>()).extend_from_slice(std::slice::from_raw_parts(json, len)) };
        }

        let mut json = Vec::<u8>::new();
        // SAFETY: the symbol has this type.
        let call = unsafe { self.library.get::<unsafe extern "C" fn(*mut c_void, Take)>(b"standin_cufile_report") };
        // SAFETY: the function above takes this context.
        unsafe { call.expect("the stand-in's own call")((&raw mut json).cast(), take) };
        serde_json::from_slice(&json).expect("a report")
    }
}
