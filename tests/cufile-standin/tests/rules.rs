//! What the stand-in takes, and what it names when a program breaks the library's rules.
#![cfg(target_os = "linux")]

use std::ffi::{c_int, c_void};
use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use cufile_standin::{Config, Fault, Session, session};

/// `O_DIRECT` on x86-64 and others with the generic number.
const DIRECT: i32 = libc::O_DIRECT;

#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Status {
    status: c_int,
    driver: c_int,
}

#[repr(C)]
struct Description {
    kind: c_int,
    file: u64,
    operations: *const c_void,
}

/// The library's calls, as a program makes them.
struct Calls<'a>(&'a Session);

impl Calls<'_> {
    fn get(&self, name: &str) -> *const c_void {
        self.0.call(name).unwrap_or_else(|| panic!("the stand-in has no {name}"))
    }

    fn plain(&self, name: &str) -> c_int {
        // SAFETY: these calls take nothing and return a status.
        unsafe { std::mem::transmute::<*const c_void, extern "C" fn() -> Status>(self.get(name))() }.status
    }

    fn open(&self) -> c_int {
        self.plain("cuFileDriverOpen")
    }

    fn close(&self) -> c_int {
        self.plain("cuFileDriverClose_v2")
    }

    fn register(&self, file: &File) -> Result<*mut c_void, c_int> {
        type Register = unsafe extern "C" fn(*mut *mut c_void, *mut Description) -> Status;
        let (mut handle, file) = (std::ptr::null_mut(), file.as_raw_fd() as u64);
        let mut description = Description { kind: 1, file, operations: std::ptr::null() };
        // SAFETY: the call's type; the pointers are to living values.
        let registered = unsafe {
            std::mem::transmute::<*const c_void, Register>(self.get("cuFileHandleRegister"))(
                &raw mut handle,
                &raw mut description,
            )
        };
        if registered.status == 0 { Ok(handle) } else { Err(registered.status) }
    }

    fn deregister(&self, handle: *mut c_void) {
        type Deregister = extern "C" fn(*mut c_void);
        // SAFETY: the call's type.
        unsafe { std::mem::transmute::<*const c_void, Deregister>(self.get("cuFileHandleDeregister"))(handle) };
    }

    fn memory(&self, call: &str, address: u64, bytes: usize) -> c_int {
        type Memory = extern "C" fn(u64, usize, c_int) -> Status;
        // SAFETY: the type of the call that registers; the other one takes the first argument of these.
        unsafe { std::mem::transmute::<*const c_void, Memory>(self.get(call))(address, bytes, 0) }.status
    }

    fn read(&self, handle: *mut c_void, base: u64, bytes: usize, at: i64, offset: i64) -> isize {
        type Read = extern "C" fn(*mut c_void, u64, usize, i64, i64) -> isize;
        // SAFETY: the call's type.
        unsafe { std::mem::transmute::<*const c_void, Read>(self.get("cuFileRead"))(handle, base, bytes, at, offset) }
    }
}

/// The driver's calls that the tests make.
struct Cuda<'a>(&'a cuda_standin::Session);

impl Cuda<'_> {
    fn get(&self, name: &str) -> *const c_void {
        self.0.call(name).unwrap_or_else(|| panic!("the driver has no {name}"))
    }

    /// A context for this thread.
    fn enter(&self) {
        type Retain = unsafe extern "C" fn(*mut *mut c_void, c_int) -> c_int;
        let mut context = std::ptr::null_mut();
        // SAFETY: the calls' types; the pointer is to a living handle.
        unsafe {
            assert_eq!(std::mem::transmute::<*const c_void, extern "C" fn(u32) -> c_int>(self.get("cuInit"))(0), 0);
            let retain = std::mem::transmute::<*const c_void, Retain>(self.get("cuDevicePrimaryCtxRetain"));
            assert_eq!(retain(&raw mut context, 0), 0);
            let make = std::mem::transmute::<*const c_void, extern "C" fn(*mut c_void) -> c_int>;
            assert_eq!(make(self.get("cuCtxSetCurrent"))(context), 0);
        }
    }

    fn leave(&self) {
        // SAFETY: the calls' types.
        unsafe {
            let make = std::mem::transmute::<*const c_void, extern "C" fn(*mut c_void) -> c_int>;
            assert_eq!(make(self.get("cuCtxSetCurrent"))(std::ptr::null_mut()), 0);
            let release = std::mem::transmute::<*const c_void, extern "C" fn(c_int) -> c_int>;
            assert_eq!(release(self.get("cuDevicePrimaryCtxRelease_v2"))(0), 0);
        }
    }

    fn allocate(&self, bytes: usize) -> u64 {
        let mut address = 0;
        // SAFETY: the call's type; the pointer is to a living number.
        let allocate = unsafe {
            std::mem::transmute::<*const c_void, unsafe extern "C" fn(*mut u64, usize) -> c_int>(
                self.get("cuMemAlloc_v2"),
            )
        };
        // SAFETY: as above.
        assert_eq!(unsafe { allocate(&raw mut address, bytes) }, 0);
        address
    }

    fn free(&self, address: u64) {
        // SAFETY: the call's type.
        let free =
            unsafe { std::mem::transmute::<*const c_void, extern "C" fn(u64) -> c_int>(self.get("cuMemFree_v2")) };
        assert_eq!(free(address), 0);
    }

    fn contents(&self, address: u64, bytes: usize) -> Vec<u8> {
        let mut host = vec![0u8; bytes];
        type Copy = unsafe extern "C" fn(*mut c_void, u64, usize) -> c_int;
        // SAFETY: the call's type; the memory is alive.
        let copy = unsafe { std::mem::transmute::<*const c_void, Copy>(self.get("cuMemcpyDtoH_v2")) };
        // SAFETY: as above.
        assert_eq!(unsafe { copy(host.as_mut_ptr().cast(), address, bytes) }, 0);
        host
    }
}

fn file(path: &Path, flags: i32) -> File {
    File::options().read(true).custom_flags(flags).open(path).unwrap()
}

#[test]
fn rules_are_kept_and_named() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("bytes");
    let bytes: Vec<u8> = (0..10_000u32).map(|at| (at % 251) as u8).collect();
    fs::write(&path, &bytes).unwrap();
    let driver = cuda_standin::session(&cuda_standin::Config::default());
    let (cuda, library) = (Cuda(&driver), session(&Config { most_bytes: 6000, ..Config::default() }));
    let calls = Calls(&library);
    let direct = file(&path, DIRECT);

    // Before it is open.
    assert_eq!(calls.register(&direct), Err(5001));
    assert_eq!((calls.close(), calls.open(), calls.open()), (5001, 0, 0));
    // Without a context.
    assert_eq!(calls.register(&direct), Err(5047));
    cuda.enter();
    assert_eq!(calls.register(&file(&path, 0)), Err(5020));
    let handle = calls.register(&direct).unwrap();
    assert_eq!(calls.register(&direct), Err(5028));

    // What is lawful: parts, short reads, the end of the file.
    let memory = cuda.allocate(8192);
    assert_eq!(calls.read(handle, memory, 5000, 7, 3), 5000);
    assert!(cuda.contents(memory, 5003)[3..] == bytes[7..5007]);
    assert_eq!((calls.read(handle, memory, 8192, 0, 0), calls.read(handle, memory, 500, 9900, 0)), (6000, 100));
    assert_eq!(calls.read(handle, memory, 500, 10_000, 0), 0);

    // What is not.
    assert_eq!(calls.read(handle, memory, 8192, 0, 1), -5014);
    assert_eq!(calls.read(handle, bytes.as_ptr().addr() as u64, 10, 0, 0), -5012);
    assert_eq!(calls.read(std::ptr::without_provenance_mut(99), memory, 10, 0, 0), -5027);
    assert_eq!(
        (calls.memory("cuFileBufRegister", memory, 4096), calls.memory("cuFileBufRegister", memory, 1)),
        (0, 5023)
    );
    assert_eq!(calls.read(handle, memory, 4097, 0, 0), -5014);
    assert_eq!(calls.memory("cuFileBufDeregister", memory, 0), 0);
    assert_eq!(calls.memory("cuFileBufDeregister", memory, 0), 5024);
    cuda.free(memory);
    assert_eq!(calls.read(handle, memory, 10, 0, 0), -5012);
    calls.close();
    calls.close();
    calls.deregister(handle);
    calls.deregister(handle);
    cuda.leave();

    let report = library.report();
    for rule in [
        "before the driver is open",
        "closed more often than opened",
        "without a context",
        "not open for direct reads",
        "registered twice",
        "exceed the allocation",
        "no device memory at",
        "not registered",
        "beyond registered memory",
        "closed while files or memory are registered",
        "deregistered that is not registered",
    ] {
        assert!(report.violations.iter().any(|violation| violation.contains(rule)), "{rule}: {report:#?}");
    }
    assert_eq!((report.open, report.files, report.memory), (0, 0, 0));
}

#[test]
fn a_handle_is_not_given_back_during_a_read_nor_after_its_file() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("bytes");
    fs::write(&path, [1; 4096]).unwrap();
    let driver = cuda_standin::session(&cuda_standin::Config::default());
    let (cuda, library) = (Cuda(&driver), session(&Config::default()));
    let calls = Calls(&library);
    cuda.enter();
    calls.open();
    let (first, second) = (file(&path, DIRECT), file(&path, DIRECT));
    let (during, after) = (calls.register(&first).unwrap(), calls.register(&second).unwrap());
    let (memory, handle) = (cuda.allocate(4096), during.addr());
    // The read is at its copy to the device until the handle was given back.
    let copy = cuda_standin::Fault::nth("cuMemcpyHtoD_v2", 1, cuda_standin::Effect::Hold);
    driver.fault(&cuda_standin::FaultPlan::one(copy));
    std::thread::scope(|scope| {
        let reads = scope.spawn(|| {
            cuda.enter();
            Calls(&library).read(std::ptr::without_provenance_mut(handle), memory, 4096, 0, 0)
        });
        while library.report().count("cuFileRead") == 0 {
            std::thread::yield_now();
        }
        calls.deregister(during);
        driver.no_faults();
        assert_eq!(reads.join().unwrap(), 4096);
    });
    drop(second);
    calls.deregister(after);
    cuda.free(memory);
    calls.close();
    cuda.leave();
    let violations = library.report().violations;
    assert!(violations.iter().any(|rule| rule.contains("during a read")), "{violations:?}");
    assert!(violations.iter().any(|rule| rule.contains("closed before its handle")), "{violations:?}");
}

#[test]
fn calls_fail_when_they_are_told_to() {
    let driver = cuda_standin::session(&cuda_standin::Config::default());
    let (cuda, library) = (Cuda(&driver), session(&Config::default()));
    let calls = Calls(&library);
    cuda.enter();
    library.fault(&[Fault::nth("cuFileDriverOpen", 2, 5033).onwards()]);
    assert_eq!((calls.open(), calls.open(), calls.open()), (0, 5033, 5033));
    library.fault(&[Fault::any(1, 5006)]);
    assert_eq!((calls.close(), calls.close()), (5006, 0));
    cuda.leave();
    library.report().assert_clean();
}
