//! The vendors whose drivers the library stands in for. All calls go the same way into one world, which speaks in CUDA's
//! results; what a vendor calls them, and where its rules are other ones, is in a file of its own.

use crate::code::Code;
use crate::hip;

/// Whose call it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Vendor {
    Cuda,
    Hip,
}

/// Marks a result that came as a vendor's number, which is no number of CUDA's.
const OWN: u32 = 1 << 31;

impl Vendor {
    /// By the exported name of a call.
    pub(crate) fn of(call: &str) -> Vendor {
        if call.starts_with("hip") { Vendor::Hip } else { Vendor::Cuda }
    }

    /// What a call returns for a result.
    pub(crate) fn number(self, code: Code) -> u32 {
        if code.0 & OWN != 0 {
            return code.0 & !OWN;
        }
        match self {
            Vendor::Cuda => code.0,
            Vendor::Hip => hip::number(code),
        }
    }

    /// The result that a number stands for which a fault gives a call; that of a broken device for success.
    pub(crate) fn code(self, number: u32) -> Code {
        match self {
            Vendor::Cuda => Code::from_number(number),
            _ if number == 0 => Code::UNKNOWN,
            _ => Code(number | OWN),
        }
    }

    /// Whether a call may be made before the vendor's library was initialised.
    pub(crate) fn needs_no_init(self, call: &str) -> bool {
        match self {
            Vendor::Cuda => matches!(call, "cuInit" | "cuDriverGetVersion") || call.starts_with("nvml"),
            // The first call initialises it, whichever that is.
            Vendor::Hip => true,
        }
    }

    /// The result for a stream that there is not.
    pub(crate) fn no_stream(self) -> Code {
        match self {
            Vendor::Cuda => Code::INVALID_HANDLE,
            Vendor::Hip => Code::CONTEXT_IS_DESTROYED,
        }
    }

    /// The least and the greatest priority of streams.
    pub(crate) fn priorities(self) -> (i32, i32) {
        match self {
            Vendor::Cuda => (0, -5),
            Vendor::Hip => (1, -1),
        }
    }
}

/// Declares exported calls of a vendor, each a shim over the world.
macro_rules! exported {
    ($vendor:ident: $(fn $name:ident($($arg:ident: $type:ty),* $(,)?) |$call:ident| $body:expr;)*) => {$(
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($arg: $type),*) -> u32 {
            // SAFETY: the pointers are the caller's, who promises what the vendor's own documentation asks.
            $crate::world::enter($crate::vendor::Vendor::$vendor, stringify!($name), |$call| unsafe { $body })
        }
    )*};
}
pub(crate) use exported;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_of_a_fault_comes_back_as_it_was_given() {
        for vendor in [Vendor::Cuda, Vendor::Hip] {
            for number in [1, 2, 600, 719, 4242] {
                assert_eq!(vendor.number(vendor.code(number)), number, "{vendor:?}");
            }
        }
        assert_eq!(Vendor::of("hipMalloc"), Vendor::Hip);
        assert_eq!(Vendor::of("nvmlInit_v2"), Vendor::Cuda);
    }
}
