//! The driver's result codes. By itself the stand-in gives only those that every version of its interface since 12.0
//! knows, because a caller may hold them in an enumeration; a fault can give any number.

use std::ffi::CStr;

/// A result of the driver; success is `Ok`, but for [`Code::CAPTURED`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Code(pub(crate) u32);

/// What a call of the driver comes to.
pub(crate) type Outcome<T> = Result<T, Code>;

macro_rules! codes {
    ($($name:ident = $value:literal, $text:literal;)*) => {
        #[allow(dead_code, reason = "some are only for fault plans, which give them by number")]
        impl Code {
            $(pub(crate) const $name: Code = Code($value);)*
        }

        /// Name and description of a code that every version knows.
        fn known(code: u32) -> Option<(&'static CStr, &'static CStr)> {
            match code {
                0 => Some((c"CUDA_SUCCESS", c"no error")),
                $($value => {
                    const NAME: &[u8] = concat!("CUDA_ERROR_", stringify!($name), "\0").as_bytes();
                    const TEXT: &[u8] = concat!($text, "\0").as_bytes();
                    Some((CStr::from_bytes_with_nul(NAME).ok()?, CStr::from_bytes_with_nul(TEXT).ok()?))
                })*
                _ => None,
            }
        }
    };
}

codes! {
    INVALID_VALUE = 1, "invalid argument";
    OUT_OF_MEMORY = 2, "out of memory";
    NOT_INITIALIZED = 3, "initialization error";
    DEINITIALIZED = 4, "driver shutting down";
    NO_DEVICE = 100, "no CUDA-capable device is detected";
    INVALID_DEVICE = 101, "invalid device ordinal";
    INVALID_IMAGE = 200, "device kernel image is invalid";
    INVALID_CONTEXT = 201, "invalid device context";
    NO_BINARY_FOR_GPU = 209, "no kernel image is available for execution on the device";
    ECC_UNCORRECTABLE = 214, "uncorrectable ECC error encountered";
    PEER_ACCESS_UNSUPPORTED = 217, "peer access is not supported between these two devices";
    INVALID_PTX = 218, "a PTX JIT compilation failed";
    UNSUPPORTED_PTX_VERSION = 222, "the provided PTX was compiled with an unsupported toolchain.";
    OPERATING_SYSTEM = 304, "OS call failed or operation not supported on this OS";
    INVALID_HANDLE = 400, "invalid resource handle";
    NOT_FOUND = 500, "named symbol not found";
    NOT_READY = 600, "device not ready";
    ILLEGAL_ADDRESS = 700, "an illegal memory access was encountered";
    LAUNCH_TIMEOUT = 702, "the launch timed out and was terminated";
    PEER_ACCESS_ALREADY_ENABLED = 704, "peer access is already enabled";
    PEER_ACCESS_NOT_ENABLED = 705, "peer access has not been enabled";
    CONTEXT_IS_DESTROYED = 709, "context is destroyed";
    HOST_MEMORY_ALREADY_REGISTERED = 712, "part or all of the requested memory range is already mapped";
    HOST_MEMORY_NOT_REGISTERED = 713, "pointer does not correspond to a registered memory region";
    MISALIGNED_ADDRESS = 716, "misaligned address";
    LAUNCH_FAILED = 719, "unspecified launch failure";
    NOT_PERMITTED = 800, "operation not permitted";
    NOT_SUPPORTED = 801, "operation not supported";
    STREAM_CAPTURE_UNSUPPORTED = 900, "operation not permitted when stream is capturing";
    STREAM_CAPTURE_INVALIDATED = 901, "operation failed due to a previous error during capture";
    STREAM_CAPTURE_ISOLATION = 905, "dependency created on uncaptured work in another stream";
    STREAM_CAPTURE_IMPLICIT = 906, "operation would make the legacy stream depend on a capturing blocking stream";
    CAPTURED_EVENT = 907, "operation not permitted on an event last recorded in a capturing stream";
    UNKNOWN = 999, "unknown error";
}

/// Codes that came later: the version of the driver that has them first, name and description.
const NEWER: [(u32, i32, &CStr, &CStr); 13] = [
    (36, 13_000, c"CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER", c"API call requires newer CUDA driver"),
    (225, 12_010, c"CUDA_ERROR_UNSUPPORTED_DEVSIDE_SYNC", c"device-side synchronization is not supported"),
    (226, 12_080, c"CUDA_ERROR_CONTAINED", c"contained error"),
    (227, 13_040, c"CUDA_ERROR_INSUFFICIENT_LOADER_VERSION", c"insufficient loader version"),
    (402, 12_030, c"CUDA_ERROR_LOSSY_QUERY", c"lossy query"),
    (721, 12_080, c"CUDA_ERROR_TENSOR_MEMORY_LEAK", c"tensor memory not completely freed"),
    (913, 12_040, c"CUDA_ERROR_FUNCTION_NOT_LOADED", c"function not loaded"),
    (914, 12_040, c"CUDA_ERROR_INVALID_RESOURCE_TYPE", c"invalid resource type"),
    (915, 12_040, c"CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION", c"invalid resource configuration"),
    (916, 12_080, c"CUDA_ERROR_KEY_ROTATION", c"key rotation"),
    (917, 13_010, c"CUDA_ERROR_STREAM_DETACHED", c"stream detached"),
    (918, 13_030, c"CUDA_ERROR_GRAPH_RECAPTURE_FAILURE", c"graph recapture failure"),
    (919, 13_040, c"CUDA_ERROR_FABRIC_NOT_READY", c"fabric not ready"),
];

/// Name and description of a code, as a driver of a version knows it.
pub(crate) fn describe(code: u32, version: i32) -> Option<(&'static CStr, &'static CStr)> {
    let newer = || NEWER.iter().find(|(number, since, _, _)| *number == code && *since <= version);
    known(code).or_else(|| newer().map(|(_, _, name, text)| (*name, *text)))
}

impl Code {
    /// What ends a call whose work a capture has taken: to the caller it succeeded.
    pub(crate) const CAPTURED: Code = Code(0);
    /// There are no more streams, or events, than the device has; CUDA calls both out of memory.
    pub(crate) const NO_STREAM: Code = Code(1 << 30);
    pub(crate) const NO_EVENT: Code = Code((1 << 30) + 1);

    /// The code for a number from outside; `UNKNOWN` for success.
    pub(crate) fn from_number(number: u32) -> Code {
        if number == 0 { Code::UNKNOWN } else { Code(number) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_has_a_name_and_a_text() {
        let (name, text) = describe(Code::OUT_OF_MEMORY.0, 12_000).unwrap();
        assert_eq!(name, c"CUDA_ERROR_OUT_OF_MEMORY");
        assert_eq!(text, c"out of memory");
        assert_eq!(Code::from_number(0), Code::UNKNOWN);
        assert_eq!(Code::from_number(700), Code::ILLEGAL_ADDRESS);
        assert_eq!(Code::from_number(4242), Code(4242));
    }

    #[test]
    fn an_older_driver_does_not_know_a_newer_code() {
        assert_eq!(describe(226, 12_070), None);
        assert_eq!(describe(226, 12_080).unwrap().0, c"CUDA_ERROR_CONTAINED");
        assert!(NEWER.iter().all(|(code, ..)| known(*code).is_none()));
    }
}
