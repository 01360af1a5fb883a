//! Reads of files straight into a device's memory.

use std::any::Any;
use std::fmt;
use std::fs::File;
use std::ops::Range;
use std::str::FromStr;
use std::sync::Arc;

use super::{BufMut, MemoryBlock};
use crate::error::Error;

/// A device that reads files into its own memory, without host memory in between (NVIDIA GPUDirect Storage).
pub trait FileReads: Send + Sync + fmt::Debug {
    /// Whether files can be read at all. The first call may prepare it, which takes as long as opening a device.
    ///
    /// # Errors
    /// The reason why not.
    fn ready(&self) -> Result<(), NoFileReads>;

    /// Whether the caller wants bytes read so that are in the system's page cache, too. Copying them from there is faster.
    fn takes_cached(&self) -> bool {
        false
    }

    /// Why bytes that are read so pass host memory all the same, or may do so, where the caller wants the reads even then.
    fn bounces(&self) -> Option<NoFileReads> {
        None
    }

    /// Prepares reads of an open file. The descriptor is for direct reads (`O_DIRECT`) and the value's own.
    ///
    /// # Errors
    /// The reason why this file, or every file, is not read so.
    fn register(&self, file: File) -> Result<Box<dyn DeviceFile>, NoFileReads>;

    /// Prepares memory that is read into again and again, until the returned value is dropped, which keeps the memory alive.
    /// Reads into other memory are legal, but may pass another buffer of the device.
    ///
    /// # Errors
    /// The reason why reads of this memory stay as they are, such as a device with too little address space to map it.
    fn register_memory(&self, memory: &Arc<MemoryBlock>) -> Result<Box<dyn Any + Send + Sync>, NoFileReads>;
}

/// A file that a device reads, until it is dropped.
pub trait DeviceFile: Send + Sync + fmt::Debug {
    /// The open file.
    fn file(&self) -> &File;

    /// Reads bytes of the file from `at` on into the bytes `to` of `dst`, which has no [pending](BufMut::pending) use. Returns how
    /// many it read: fewer than asked for at the end of the file or wherever the device stopped, none beyond the end. When this
    /// returns, nothing writes to `dst` any more, and work that is queued from then on finds the bytes.
    ///
    /// # Errors
    /// The reason why not. `dst[to]` then holds unspecified bytes.
    fn read(&self, at: u64, dst: &mut BufMut, to: Range<usize>) -> Result<usize, NoFileReads>;
}

/// When files are read straight into a CUDA device's memory (`Cuda::gds`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Gds {
    /// Never. The library is not opened.
    Off,
    /// Where NVIDIA's kernel module nvidia-fs is loaded, and for the files of which the library says that it reads them
    /// directly. Elsewhere the library is not opened.
    #[default]
    Auto,
    /// As `Auto`, but the library is opened without nvidia-fs too: it may have peer-to-peer DMA of the kernel's.
    Direct,
    /// Every file that the library takes, in its compatibility mode too, in which the bytes pass host memory; and also bytes that
    /// are in the page cache. For measurements.
    Always,
}

/// The names of the settings.
const NAMES: [(&str, Gds); 4] =
    [("off", Gds::Off), ("auto", Gds::Auto), ("direct", Gds::Direct), ("always", Gds::Always)];

impl FromStr for Gds {
    type Err = Error;

    fn from_str(text: &str) -> Result<Gds, Error> {
        let named = NAMES.iter().find(|(name, _)| *name == text).map(|&(_, gds)| gds);
        named.ok_or_else(|| Error::invalid(format!("`{text}` is none of off, auto, direct and always")))
    }
}

impl fmt::Display for Gds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = NAMES.iter().find(|(_, gds)| gds == self).map_or("", |&(name, _)| name);
        f.write_str(name)
    }
}

/// Why a file is not read straight into a device's memory. It is read through host memory then.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum NoFileReads {
    /// The caller does not want it.
    Off,
    /// The library, or what it needs, is not there.
    Absent {
        /// What is not there.
        why: String,
    },
    /// The bytes would pass host memory all the same.
    Bounced {
        /// The reason.
        why: String,
    },
    /// The library refused.
    Refused {
        /// The library's call.
        call: &'static str,
        /// The library's status, a positive number.
        status: i32,
        /// The driver's result, where the status is that of a call of the driver.
        driver: Option<i32>,
    },
    /// The system refused.
    System {
        /// The call.
        call: &'static str,
        /// The system's error.
        error: String,
    },
    /// The file cannot be opened for direct reads, or ends too early.
    File {
        /// The reason.
        why: String,
    },
    /// The memory is not this device's, or is in use.
    Memory {
        /// The reason.
        why: String,
    },
}

impl NoFileReads {
    /// The refusal of a call of the system.
    #[cfg(any(test, feature = "cuda"))]
    pub(crate) fn system(call: &'static str, error: &std::io::Error) -> NoFileReads {
        NoFileReads::System { call, error: error.to_string() }
    }

    /// Whether it concerns all files, and not one alone.
    pub fn is_general(&self) -> bool {
        match self {
            NoFileReads::Off | NoFileReads::Absent { .. } => true,
            NoFileReads::Bounced { .. } | NoFileReads::System { .. } => false,
            NoFileReads::File { .. } | NoFileReads::Memory { .. } => false,
            NoFileReads::Refused { status, .. } => !STATUSES.iter().any(|of| of.number == *status && of.file),
        }
    }
}

/// A status of the library.
struct Status {
    number: i32,
    name: &'static str,
    text: &'static str,
    /// Whether it concerns one file alone.
    file: bool,
}

const fn general(number: i32, name: &'static str, text: &'static str) -> Status {
    Status { number, name, text, file: false }
}

const fn of_file(number: i32, name: &'static str, text: &'static str) -> Status {
    Status { number, name, text, file: true }
}

/// The library's statuses by its header, `cufile.h`. A newer library may have others.
const STATUSES: [Status; 33] = [
    general(5001, "DRIVER_NOT_INITIALIZED", "nvidia-fs is not loaded, and compatibility mode is not allowed"),
    general(5002, "DRIVER_INVALID_PROPS", "a property is invalid"),
    general(5003, "DRIVER_UNSUPPORTED_LIMIT", "a property is out of its range"),
    general(5004, "DRIVER_VERSION_MISMATCH", "nvidia-fs is of another version"),
    general(5005, "DRIVER_VERSION_READ_ERROR", "the version of nvidia-fs cannot be read"),
    general(5006, "DRIVER_CLOSING", "the library is closing"),
    general(5007, "PLATFORM_NOT_SUPPORTED", "this platform has no GPUDirect Storage"),
    of_file(5008, "IO_NOT_SUPPORTED", "this file has no GPUDirect Storage"),
    general(5009, "DEVICE_NOT_SUPPORTED", "this device has no GPUDirect Storage"),
    general(5010, "NVFS_DRIVER_ERROR", "nvidia-fs refused"),
    general(5011, "CUDA_DRIVER_ERROR", "the CUDA driver refused"),
    general(5012, "CUDA_POINTER_INVALID", "the device address is invalid"),
    general(5013, "CUDA_MEMORY_TYPE_INVALID", "the memory is of a kind that it does not read into"),
    general(5014, "CUDA_POINTER_RANGE_ERROR", "the range exceeds the allocation"),
    general(5015, "CUDA_CONTEXT_MISMATCH", "the CUDA context is another"),
    general(5016, "INVALID_MAPPING_SIZE", "more memory than can be mapped for it"),
    general(5017, "INVALID_MAPPING_RANGE", "the range exceeds what is mapped"),
    of_file(5018, "INVALID_FILE_TYPE", "the file is of a kind that it does not read"),
    of_file(5019, "INVALID_FILE_OPEN_FLAG", "the file is open in a way that it does not read"),
    of_file(5020, "DIO_NOT_SET", "the file is not open for direct reads"),
    general(5022, "INVALID_VALUE", "an argument is invalid"),
    general(5023, "MEMORY_ALREADY_REGISTERED", "the memory is registered already"),
    general(5024, "MEMORY_NOT_REGISTERED", "the memory is not registered"),
    of_file(5025, "PERMISSION_DENIED", "it may not access nvidia-fs or the file"),
    general(5026, "DRIVER_ALREADY_OPEN", "the library is open already"),
    of_file(5027, "HANDLE_NOT_REGISTERED", "the file is not registered"),
    of_file(5028, "HANDLE_ALREADY_REGISTERED", "the file is registered already"),
    general(5029, "DEVICE_NOT_FOUND", "the device is not found"),
    of_file(5030, "INTERNAL_ERROR", "an error within the library"),
    of_file(5031, "GETNEWFD_FAILED", "no new file descriptor"),
    general(5033, "NVFS_SETUP_ERROR", "the library could not be initialised"),
    of_file(5034, "IO_DISABLED", "the library's configuration excludes this file"),
    general(5036, "GPU_MEMORY_PINNING_FAILED", "too little device memory can be mapped for it"),
];

impl fmt::Display for NoFileReads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NoFileReads::Off => f.write_str("it is switched off"),
            NoFileReads::Absent { why }
            | NoFileReads::Bounced { why }
            | NoFileReads::File { why }
            | NoFileReads::Memory { why } => f.write_str(why),
            NoFileReads::Refused { call, status, driver } => {
                match STATUSES.iter().find(|of| of.number == *status) {
                    Some(Status { name, text, .. }) => write!(f, "{call}: CU_FILE_{name} ({text})")?,
                    None => write!(f, "{call}: status {status}")?,
                }
                driver.map_or(Ok(()), |code| write!(f, ", the driver returned {code}"))
            }
            NoFileReads::System { call, error } => write!(f, "{call}: {error}"),
        }
    }
}

impl std::error::Error for NoFileReads {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_read_as_they_are_written() {
        for (name, gds) in NAMES {
            assert_eq!((name.parse::<Gds>().unwrap(), gds.to_string().as_str()), (gds, name));
        }
        assert!("on".parse::<Gds>().unwrap_err().to_string().contains("`on`"));
    }

    #[test]
    fn refusals_name_the_call_and_the_status() {
        let refused = |status, driver| NoFileReads::Refused { call: "cuFileRead", status, driver };
        let shown = refused(5011, Some(700)).to_string();
        assert_eq!(shown, "cuFileRead: CU_FILE_CUDA_DRIVER_ERROR (the CUDA driver refused), the driver returned 700");
        assert_eq!(refused(6001, None).to_string(), "cuFileRead: status 6001");
        assert!(refused(6001, None).is_general() && refused(5001, None).is_general());
        assert!(!refused(5008, None).is_general());
        assert!(STATUSES.windows(2).all(|pair| pair[0].number < pair[1].number));
    }
}
