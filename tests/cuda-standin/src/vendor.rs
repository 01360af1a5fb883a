//! The vendors whose drivers the library stands in for. All calls go the same way into one world, which speaks in CUDA's
//! results; what a vendor calls them, and where its rules are other ones, is in a file of its own.

use crate::code::Code;
use crate::{acl, cndrv, hip};

/// Whose call it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Vendor {
    Cuda,
    Hip,
    Acl,
    CnDrv,
}

/// Marks a result that came as a vendor's number, which is no number of CUDA's.
const OWN: u32 = 1 << 31;

/// A vendor's result that CUDA has no like of.
pub(crate) const fn own(number: u32) -> Code {
    Code(number | OWN)
}

impl Vendor {
    /// By the exported name of a call.
    pub(crate) fn of(call: &str) -> Vendor {
        match call {
            _ if call.starts_with("hip") => Vendor::Hip,
            _ if call.starts_with("acl") => Vendor::Acl,
            _ if call.starts_with("cn") => Vendor::CnDrv,
            _ => Vendor::Cuda,
        }
    }

    /// What a call returns for a result.
    pub(crate) fn number(self, code: Code) -> u32 {
        if code.0 & OWN != 0 {
            return code.0 & !OWN;
        }
        match (self, code) {
            (Vendor::Cuda | Vendor::Hip, Code::NO_STREAM | Code::NO_EVENT) => Code::OUT_OF_MEMORY.0,
            (Vendor::Cuda, code) => code.0,
            (Vendor::Hip, code) => hip::number(code),
            (Vendor::Acl, code) => acl::number(code),
            (Vendor::CnDrv, code) => cndrv::number(code),
        }
    }

    /// The result that a number stands for which a fault gives a call; that of a broken device for success.
    pub(crate) fn code(self, number: u32) -> Code {
        match self {
            Vendor::Cuda => Code::from_number(number),
            _ if number == 0 => Code::UNKNOWN,
            _ => own(number),
        }
    }

    /// The result of a device that fell off the bus.
    pub(crate) fn device_lost(self) -> Code {
        match self {
            Vendor::Cuda | Vendor::Hip => Code::UNKNOWN,
            Vendor::Acl => acl::LOST_HEARTBEAT,
            Vendor::CnDrv => Code::DEINITIALIZED,
        }
    }

    /// Whether a call may be made before the vendor's library was initialised.
    pub(crate) fn needs_no_init(self, call: &str) -> bool {
        match self {
            Vendor::Cuda => matches!(call, "cuInit" | "cuDriverGetVersion") || call.starts_with("nvml"),
            // The first call initialises it, whichever that is.
            Vendor::Hip => true,
            Vendor::Acl => matches!(call, "aclInit" | "aclFinalize" | "aclFinalizeReference" | "aclrtGetVersion"),
            Vendor::CnDrv => matches!(call, "cnInit" | "cnGetLibVersion"),
        }
    }

    /// The result for a stream that there is not.
    pub(crate) fn no_stream(self) -> Code {
        match self {
            Vendor::Hip => Code::CONTEXT_IS_DESTROYED,
            Vendor::CnDrv => cndrv::QUEUE_INVALID,
            _ => Code::INVALID_HANDLE,
        }
    }

    /// The result for an event that there is not.
    pub(crate) fn no_event(self) -> Code {
        if self == Vendor::CnDrv { cndrv::NOTIFIER_INVALID } else { Code::INVALID_HANDLE }
    }

    /// The result of a call that wants more memory than there is.
    pub(crate) fn out_of_memory(self, call: &str) -> Code {
        if call == "cnMallocHost" { cndrv::HOST_OUT_OF_MEMORY } else { Code::OUT_OF_MEMORY }
    }

    /// The result for a stream of another context than the current one.
    pub(crate) fn foreign_stream(self) -> Code {
        match self {
            Vendor::Acl => acl::STREAM_CONTEXT,
            Vendor::CnDrv => cndrv::QUEUE_INVALID,
            _ => Code::INVALID_HANDLE,
        }
    }

    /// The least and the greatest priority of streams.
    pub(crate) fn priorities(self) -> (i32, i32) {
        match self {
            Vendor::Cuda => (0, -5),
            Vendor::Hip => (1, -1),
            Vendor::Acl | Vendor::CnDrv => (7, 0),
        }
    }

    /// The flags that an event can be made with.
    pub(crate) fn event_flags(self) -> u32 {
        match self {
            Vendor::Cuda | Vendor::Hip => 0b111,
            Vendor::Acl => acl::EVENT_FLAGS,
            Vendor::CnDrv => cndrv::NOTIFIER_FLAGS,
        }
    }

    /// Whether a copy from host memory that is not pinned is over when its call returns.
    pub(crate) fn waits_for_pageable(self) -> bool {
        matches!(self, Vendor::Acl | Vendor::CnDrv)
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
        for vendor in [Vendor::Cuda, Vendor::Hip, Vendor::Acl, Vendor::CnDrv] {
            for number in [1, 2, 600, 719, 4242, 507_010] {
                assert_eq!(vendor.number(vendor.code(number)), number, "{vendor:?}");
            }
        }
        assert_eq!(["hipMalloc", "aclrtMalloc", "cnMalloc"].map(Vendor::of), [Vendor::Hip, Vendor::Acl, Vendor::CnDrv]);
        assert_eq!(["cuMemAlloc_v2", "nvmlInit_v2"].map(Vendor::of), [Vendor::Cuda; 2]);
    }
}
