//! What the library says of itself, what goes wrong, and what it has seen.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// What the library says of itself and takes. Starts as one over nvidia-fs 2.17 that refuses what it cannot read directly.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// The version of nvidia-fs; zeros: it is not loaded.
    pub nvidia_fs: (u32, u32),
    /// Whether compatibility mode is allowed.
    pub allow_compat: bool,
    /// Whether peer-to-peer DMA of the kernel's is said to be there.
    pub peer_to_peer: bool,
    /// The kinds of storage that are said to be read directly, as bits.
    pub supported: u32,
    /// The numbers of file systems whose files are refused where compatibility mode is not allowed.
    pub refused_file_systems: Vec<u64>,
    /// The most bytes that one read returns.
    pub most_bytes: usize,
    /// The most bytes of memory that can be registered at one time.
    pub most_registered: usize,
    /// Each read takes so long at least.
    pub read_micros: u64,
    /// Opening takes so long.
    pub open_millis: u64,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            nvidia_fs: (2, 17),
            allow_compat: false,
            peer_to_peer: false,
            supported: 1 << 4,
            refused_file_systems: Vec::new(),
            most_bytes: usize::MAX,
            most_registered: usize::MAX,
            read_micros: 0,
            open_millis: 0,
        }
    }
}

/// A call that fails, or all from one on. It does nothing then.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    /// The exported name of the calls that count; empty: all count.
    pub call: String,
    /// The first call counts as 1.
    pub nth: u64,
    /// Whether all later ones fail too.
    pub onwards: bool,
    /// The status. A read returns its negative; with -1 for [`Fault::errno`] it sets that.
    pub status: i32,
    /// The driver's result beside it.
    pub driver: i32,
    /// The system's error of a read that returns -1.
    pub errno: i32,
}

impl Fault {
    /// The `nth` call of one kind has this status.
    pub fn nth(call: &str, nth: u64, status: i32) -> Fault {
        Fault { call: call.to_owned(), nth, onwards: false, status, driver: 0, errno: 0 }
    }

    /// The `nth` call of any kind has this status.
    pub fn any(nth: u64, status: i32) -> Fault {
        Fault::nth("", nth, status)
    }

    /// The `nth` read fails with an error of the system.
    pub fn errno(nth: u64, errno: i32) -> Fault {
        Fault { errno, ..Fault::nth("cuFileRead", nth, 1) }
    }

    /// And all later ones.
    #[must_use]
    pub fn onwards(self) -> Fault {
        Fault { onwards: true, ..self }
    }
}

/// What the library has seen since the session began.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// The calls, by name.
    pub calls: BTreeMap<String, u64>,
    /// Bytes read to devices.
    pub bytes: u64,
    /// Opens that were not taken back.
    pub open: u64,
    /// Files that are registered.
    pub files: u64,
    /// The bytes of memory that is registered.
    pub memory: u64,
    /// Rules that were broken, in words.
    pub violations: Vec<String>,
}

impl Report {
    /// How often a call was made.
    pub fn count(&self, call: &str) -> u64 {
        self.calls.get(call).copied().unwrap_or(0)
    }

    /// No rule was broken, and nothing is registered or open.
    pub fn assert_clean(&self) {
        let left = (self.open, self.files, self.memory);
        assert!(self.violations.is_empty() && left == (0, 0, 0), "{self:#?}");
    }
}
