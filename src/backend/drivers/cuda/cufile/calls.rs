//! Declarations of libcufile's calls, and their lookup.
//!
//! They are those of NVIDIA's header `cufile.h`. Results are integers: a library may be newer than any list of statuses. All
//! calls are looked up when the library is loaded.

use std::ffi::{c_char, c_int, c_uint, c_void};

use libloading::Library;

use crate::backend::NoFileReads;

/// `CUfileHandle_t`.
pub(super) type FileHandle = *mut c_void;

/// `CU_FILE_HANDLE_TYPE_OPAQUE_FD`.
pub(super) const OPAQUE_FD: c_int = 1;

/// The bits of `CU_FILE_ALLOW_COMPAT_MODE`, `CU_FILE_VANILLA_POSIX_IO_MODE` and `CU_FILE_FALLBACK_IO_MODE` in
/// [`NvfsProperties::control`].
const ALLOW_COMPAT: c_uint = 1 << 1;
const PLAIN_READS: c_uint = 1 << 2;
const FALLBACK: c_uint = 1 << 4;

/// The bit of `CU_FILE_P2P_SUPPORTED` in [`Properties::features`].
const PEER_TO_PEER: c_uint = 1 << 4;

/// `CUfileError_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Status {
    status: c_int,
    driver: c_int,
}

/// `CUFileOpError` for a failed call of the driver, whose result then stands beside it.
const DRIVER_ERROR: c_int = 5011;

/// `CUfileDescr_t` for a file descriptor.
#[repr(C)]
pub(super) struct Description {
    pub(super) kind: c_int,
    pub(super) file: DescriptorOrHandle,
    pub(super) operations: *const c_void,
}

/// The union in `CUfileDescr_t`.
#[repr(C)]
pub(super) union DescriptorOrHandle {
    pub(super) descriptor: c_int,
    pub(super) handle: *mut c_void,
}

/// The structure `nvfs` in `CUfileDrvProps_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct NvfsProperties {
    major: c_uint,
    minor: c_uint,
    poll_threshold: usize,
    most_direct: usize,
    /// Which kinds of storage are read directly, a bit for each `CUfileDriverStatusFlags`.
    #[cfg_attr(not(target_os = "linux"), allow(dead_code, reason = "the library is on Linux alone"))]
    pub(super) supported: c_uint,
    control: c_uint,
}

/// `CUfileDrvProps_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Properties {
    pub(super) nvfs: NvfsProperties,
    features: c_uint,
    cache: c_uint,
    cache_of_buffer: c_uint,
    most_pinned: c_uint,
    most_in_batch: c_uint,
    batch_timeout: c_uint,
    /// Room for what a newer library may add.
    reserved: [u64; 16],
}

impl Properties {
    /// Whether bytes can reach a device without host memory: by nvidia-fs, or by peer-to-peer DMA of the kernel's.
    pub(super) fn is_direct(&self) -> bool {
        let can = (self.nvfs.major, self.nvfs.minor) != (0, 0) || self.features & PEER_TO_PEER != 0;
        can && self.nvfs.control & PLAIN_READS == 0
    }

    /// Whether a file that cannot be read directly is read through host memory, without a word.
    pub(super) fn allows_compatibility(&self) -> bool {
        self.nvfs.control & (ALLOW_COMPAT | PLAIN_READS | FALLBACK) != 0
    }
}

/// Declares the table of required calls.
macro_rules! table {
    ($($verb:ident = $symbol:literal($($arg:ident: $type:ty),*) -> $result:ty;)*) => {
        /// The required calls, and those that older libraries lack.
        pub(super) struct Calls {
            $($verb: unsafe extern "C" fn($($type),*) -> $result,)*
            close: unsafe extern "C" fn() -> Status,
            version: Option<unsafe extern "C" fn(*mut c_int) -> Status>,
        }

        impl Calls {
            /// Finds the calls.
            ///
            /// # Errors
            /// The name of the first required call that the library does not have.
            pub(super) fn find(library: &Library) -> Result<Calls, &'static str> {
                // SAFETY: the types are those of the header. The library is never closed.
                unsafe {
                    // Libraries before CUDA 12 have the call under its first name alone.
                    let close = library.get(b"cuFileDriverClose_v2").or_else(|_| library.get(b"cuFileDriverClose"));
                    Ok(Calls {
                        $($verb: *library.get($symbol.as_bytes()).map_err(|_| $symbol)?,)*
                        close: *close.map_err(|_| "cuFileDriverClose")?,
                        version: library.get(b"cuFileGetVersion").map(|call| *call).ok(),
                    })
                }
            }
        }
    };
}

table! {
    open = "cuFileDriverOpen"() -> Status;
    properties = "cuFileDriverGetProperties"(properties: *mut Properties) -> Status;
    register = "cuFileHandleRegister"(handle: *mut FileHandle, description: *mut Description) -> Status;
    deregister = "cuFileHandleDeregister"(handle: FileHandle) -> ();
    register_memory = "cuFileBufRegister"(address: *const c_void, bytes: usize, flags: c_int) -> Status;
    deregister_memory = "cuFileBufDeregister"(address: *const c_void) -> Status;
    read = "cuFileRead"(handle: FileHandle, base: *mut c_void, bytes: usize, at: i64, offset: i64) -> isize;
}

fn checked(call: &'static str, Status { status, driver }: Status) -> Result<(), NoFileReads> {
    match status {
        0 => Ok(()),
        _ => Err(NoFileReads::Refused { call, status, driver: (status == DRIVER_ERROR).then_some(driver) }),
    }
}

impl Calls {
    /// Opens the library's driver. Opens are counted by the library.
    pub(super) fn open(&self) -> Result<(), NoFileReads> {
        // SAFETY: takes nothing.
        checked("cuFileDriverOpen", unsafe { (self.open)() })
    }

    /// Takes one open back.
    pub(super) fn close(&self) -> Result<(), NoFileReads> {
        // SAFETY: takes nothing.
        checked("cuFileDriverClose", unsafe { (self.close)() })
    }

    /// The version, 1000 x major + 10 x minor. 0 if the library is too old to tell.
    pub(super) fn version(&self) -> c_int {
        let mut version = 0;
        // SAFETY: the pointer is to a living integer.
        let told = self.version.map(|call| unsafe { call(&raw mut version) });
        if told.is_some_and(|told| told.status == 0) { version } else { 0 }
    }

    pub(super) fn properties(&self) -> Result<Properties, NoFileReads> {
        let mut properties = Properties::default();
        // SAFETY: the pointer is to a living structure, with room for what a newer library may add.
        checked("cuFileDriverGetProperties", unsafe { (self.properties)(&raw mut properties) }).map(|()| properties)
    }

    /// Registers an open file.
    pub(super) fn register(&self, descriptor: c_int) -> Result<FileHandle, NoFileReads> {
        let (mut handle, file) = (std::ptr::null_mut(), DescriptorOrHandle { descriptor });
        let mut description = Description { kind: OPAQUE_FD, file, operations: std::ptr::null() };
        // SAFETY: the pointers are to living values; a file descriptor needs no table of operations.
        let registered = unsafe { (self.register)(&raw mut handle, &raw mut description) };
        checked("cuFileHandleRegister", registered).map(|()| handle)
    }

    /// # Safety
    /// The handle was registered, is deregistered once, and is not read any more.
    pub(super) unsafe fn deregister(&self, handle: FileHandle) {
        // SAFETY: the caller's promise.
        unsafe { (self.deregister)(handle) };
    }

    /// # Safety
    /// `address` is that of `bytes` bytes of device memory, which stays until it is deregistered.
    pub(super) unsafe fn register_memory(&self, address: u64, bytes: usize) -> Result<(), NoFileReads> {
        // SAFETY: the caller's promise; no flags.
        checked("cuFileBufRegister", unsafe { (self.register_memory)(pointer(address), bytes, 0) })
    }

    /// # Safety
    /// `address` was registered, and is deregistered once.
    pub(super) unsafe fn deregister_memory(&self, address: u64) -> Result<(), NoFileReads> {
        // SAFETY: the caller's promise.
        checked("cuFileBufDeregister", unsafe { (self.deregister_memory)(pointer(address)) })
    }

    /// Reads `bytes` bytes of a file from `at` on to `base + offset`. Returns how many it read.
    ///
    /// # Safety
    /// The handle is registered. `base` is the address of device memory with so many bytes from `offset` on, which nothing
    /// else uses until this returns.
    pub(super) unsafe fn read(
        &self,
        handle: FileHandle,
        base: u64,
        bytes: usize,
        (at, offset): (i64, i64),
    ) -> Result<usize, NoFileReads> {
        // SAFETY: the caller's promise.
        let read = unsafe { (self.read)(handle, pointer(base), bytes, at, offset) };
        match usize::try_from(read) {
            Ok(read) => Ok(read),
            Err(_) if read == -1 => Err(NoFileReads::system("cuFileRead", &std::io::Error::last_os_error())),
            Err(_) => {
                let status = read.checked_neg().and_then(|status| c_int::try_from(status).ok()).unwrap_or(c_int::MAX);
                Err(NoFileReads::Refused { call: "cuFileRead", status, driver: None })
            }
        }
    }
}

/// A device address as the pointer that the calls take.
fn pointer(address: u64) -> *mut c_void {
    std::ptr::without_provenance_mut::<c_char>(address as usize).cast()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structures_are_as_large_as_the_header_says() {
        assert_eq!((size_of::<Status>(), size_of::<Description>()), (8, 24));
        assert_eq!((size_of::<NvfsProperties>(), size_of::<Properties>()), (32, 56 + 128));
        assert_eq!(std::mem::offset_of!(Properties, features), 32);
    }

    /// The first four are what versions 1.14 and 1.20 said of themselves without nvidia-fs, in different modes; the others follow
    /// from the header.
    #[test]
    fn properties_tell_whether_reads_are_direct() {
        let properties = |major, features, control| Properties {
            nvfs: NvfsProperties { major, control, ..NvfsProperties::default() },
            features,
            ..Properties::default()
        };
        let cases = [
            ((0, 7, 2), (false, true)),
            ((0, 15, 2), (false, true)),
            ((0, 15, 6), (false, true)),
            ((0, 15, 18), (false, true)),
            ((2, 7, 2), (true, true)),
            ((2, 7, 1), (true, false)),
            ((2, 7, 4), (false, true)),
            ((2, 7, 16), (true, true)),
            ((0, 23, 0), (true, false)),
        ];
        for ((major, features, control), expected) in cases {
            let properties = properties(major, features, control);
            assert_eq!((properties.is_direct(), properties.allows_compatibility()), expected);
        }
    }
}
