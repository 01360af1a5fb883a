//! Modules whose function is called `store`, and its launches.

use std::ffi::{CString, c_void};

use cuda_standin::{Config, Driver, Rule, session};
use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::{CUfunction, CUmodule, CUresult, CUstream};

use super::Cuda;

pub(crate) fn load(text: &str) -> Result<CUmodule, DriverError> {
    let text = CString::new(text).unwrap();
    // SAFETY: a text with its closing zero.
    unsafe { result::module::load_data(text.as_ptr().cast::<c_void>()) }
}

pub(crate) fn function(module: CUmodule) -> CUfunction {
    // SAFETY: handles are checked by the stand-in.
    unsafe { result::module::get_function(module, c"store".to_owned()) }.unwrap()
}

pub(crate) fn unload(module: CUmodule) {
    // SAFETY: handles are checked by the stand-in.
    unsafe { result::module::unload(module) }.unwrap();
}

/// Launches blocks of 32 threads.
pub(crate) fn store(function: CUfunction, blocks: u32, to: u64, sum: u64, stream: CUstream) -> Result<(), DriverError> {
    let (mut to, mut sum, mut value) = (to, sum, 5u32);
    let mut arguments: [*mut c_void; 3] = [(&raw mut to).cast(), (&raw mut sum).cast(), (&raw mut value).cast()];
    // SAFETY: the arguments are those of the function.
    unsafe { result::launch_kernel(function, (blocks, 1, 1), (32, 1, 1), 0, stream, &mut arguments) }
}

#[track_caller]
pub(crate) fn assert_only(driver: &Driver, rule: Rule, call: &str) {
    let report = driver.report();
    assert!(report.violations.iter().any(|v| v.rule == rule && v.call == call), "no {} in:\n{report}", rule.name());
    assert!(report.violations.iter().all(|v| v.rule == rule), "more than {}:\n{report}", rule.name());
}

/// What two blocks of a function store, 512 bytes each.
pub(crate) fn stored(cuda: &Cuda, text: &str) -> Result<Vec<u32>, CUresult> {
    let (stream, to, sum, back) = (cuda.stream(), cuda.alloc(1024), cuda.alloc(8), cuda.pin(&[0; 1024]));
    let module = load(text).unwrap();
    store(function(module), 2, to, sum, stream).unwrap();
    // SAFETY: the stream is alive.
    unsafe { result::stream::synchronize(stream) }.map_err(|error| error.0)?;
    cuda.download(back, to, 1024, stream);
    cuda.synchronize(stream);
    let got = cuda.host(back, 1024).chunks(4).map(|raw| u32::from_le_bytes(raw.try_into().unwrap())).collect();
    unload(module);
    cuda.free(to);
    cuda.free(sum);
    cuda.unpin(back);
    cuda.destroy(stream);
    Ok(got)
}

/// Why a machine's driver does not take a text.
pub(crate) fn refused(config: &Config, text: &str) -> CUresult {
    let standin = session(config);
    let cuda = Cuda::open(0);
    let code = load(text).unwrap_err().0;
    cuda.close();
    standin.report().assert_clean();
    code
}
