//! The CUDA driver that is loaded, as far as reads need it.

use std::ffi::{c_int, c_uint, c_void};
use std::sync::OnceLock;

use libloading::os::unix::Library;

/// `CU_POINTER_ATTRIBUTE_MEMORY_TYPE`, and the value of device memory.
const MEMORY_TYPE: c_uint = 2;
const DEVICE: u32 = 2;

/// `CU_POINTER_ATTRIBUTE_RANGE_START_ADDR` and `CU_POINTER_ATTRIBUTE_RANGE_SIZE`.
const RANGE_START: c_uint = 11;
const RANGE_SIZE: c_uint = 12;

/// `CUDA_ERROR_INVALID_VALUE`: the driver knows no such address.
const INVALID_VALUE: c_int = 1;

/// The driver's calls.
pub(crate) struct Cuda {
    context_current: unsafe extern "C" fn(*mut *mut c_void) -> c_int,
    /// None if the driver has no such call: then nothing is known of an address.
    pointer_attribute: Option<unsafe extern "C" fn(*mut c_void, c_uint, u64) -> c_int>,
    copy_to_device: unsafe extern "C" fn(u64, *const c_void, usize) -> c_int,
}

static CUDA: OnceLock<Option<Cuda>> = OnceLock::new();

impl Cuda {
    /// The driver that is open in this process.
    pub(crate) fn get() -> Option<&'static Cuda> {
        CUDA.get_or_init(Cuda::find).as_ref()
    }

    fn find() -> Option<Cuda> {
        // SAFETY: the name leads to the driver that the process has open already; its initialisers have run.
        let library = std::mem::ManuallyDrop::new(unsafe { Library::new("libcuda.so.1") }.ok()?);
        // SAFETY: the types are those of the driver's header; the library is never closed.
        unsafe {
            Some(Cuda {
                context_current: *library.get(b"cuCtxGetCurrent").ok()?,
                pointer_attribute: library.get(b"cuPointerGetAttribute").map(|call| *call).ok(),
                copy_to_device: *library.get(b"cuMemcpyHtoD_v2").ok()?,
            })
        }
    }

    /// Whether the calling thread has a context; the driver's result if it does not tell.
    pub(crate) fn has_context(&self) -> Result<bool, c_int> {
        let mut context = std::ptr::null_mut();
        // SAFETY: the pointer is to a living handle.
        match unsafe { (self.context_current)(&raw mut context) } {
            0 => Ok(!context.is_null()),
            refused => Err(refused),
        }
    }

    /// Whether the driver tells what is at an address.
    pub(crate) fn tells(&self) -> bool {
        self.pointer_attribute.is_some()
    }

    /// The address and size of the allocation of device memory that holds an address, if one does; the driver's result if it does
    /// not tell.
    pub(crate) fn device_memory(&self, address: u64) -> Result<Option<(u64, u64)>, c_int> {
        let ask = || {
            let kind: u32 = self.attribute(MEMORY_TYPE, address)?;
            let (start, size) = (self.attribute(RANGE_START, address)?, self.attribute(RANGE_SIZE, address)?);
            Ok((kind == DEVICE).then_some((start, size)))
        };
        match ask() {
            Err(INVALID_VALUE) => Ok(None),
            told => told,
        }
    }

    fn attribute<T: Default>(&self, attribute: c_uint, address: u64) -> Result<T, c_int> {
        let (call, mut value) = (self.pointer_attribute.ok_or(INVALID_VALUE)?, T::default());
        // SAFETY: the caller takes a type of the attribute's size.
        match unsafe { call((&raw mut value).cast(), attribute, address) } {
            0 => Ok(value),
            refused => Err(refused),
        }
    }

    /// Copies to device memory and waits. Returns the driver's result.
    pub(crate) fn copy(&self, to: u64, from: &[u8]) -> c_int {
        // SAFETY: the bytes are alive during the call; the driver checks the address.
        unsafe { (self.copy_to_device)(to, from.as_ptr().cast(), from.len()) }
    }
}
