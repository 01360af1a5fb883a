//! What a caller sets of a backend, whichever vendor's it is.

use std::path::PathBuf;

use crate::backend::Host;
use crate::backend::sysfs::Sysfs;
use crate::bytes::ByteSize;

/// The settings of a backend.
pub(super) struct Settings {
    pub(super) library: Option<PathBuf>,
    pub(super) sysfs: Sysfs,
    pub(super) pinned_cap: Option<ByteSize>,
    pub(super) context: Option<ByteSize>,
    pub(super) peers: bool,
    pub(super) numa_node: Option<u32>,
    pub(super) host: Host,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            library: None,
            sysfs: Sysfs::default(),
            pinned_cap: None,
            context: None,
            peers: true,
            numa_node: None,
            host: Host::new(),
        }
    }
}

/// Makes a type that wraps `cards: Cards<_>` a backend, and gives it the settings that all vendors have.
macro_rules! backend {
    ($backend:ident) => {
        impl $backend {
            /// Sets the driver's library file, for containers that keep it in an unusual location.
            #[must_use]
            pub fn library(mut self, file: impl Into<std::path::PathBuf>) -> $backend {
                self.cards.settings.library = Some(file.into());
                self
            }

            /// Sets the folder in which the system describes its hardware. Default: `/sys`.
            #[must_use]
            pub fn sysfs(mut self, folder: impl Into<std::path::PathBuf>) -> $backend {
                self.cards.settings.sysfs = crate::backend::sysfs::Sysfs::at(folder.into());
                self
            }

            /// Sets the memory that plans count for the context of a device that is not open yet. Default: 0.4 GiB, which is
            /// near what CUDA's take, or an eighth of the device's memory if that is less.
            #[must_use]
            pub fn context_size(mut self, size: crate::bytes::ByteSize) -> $backend {
                self.cards.settings.context = Some(size);
                self
            }

            /// Sets whether devices may copy directly from each other's memory, if they can. Default: yes. Otherwise the driver
            /// is not asked about peer access, and copies between devices go through the host.
            #[must_use]
            pub fn peers(mut self, allowed: bool) -> $backend {
                self.cards.settings.peers = allowed;
                self
            }

            /// Sets the NUMA node of the host on which memory of 1 MiB or more is pinned. Default: the node of the device that
            /// the memory is for ([`allocate_near`](crate::backend::Device::allocate_near)). If no device is named, it is the
            /// node of the open devices, if the system reports the same for all; otherwise the node on which the threads run
            /// that touch the memory first.
            #[must_use]
            pub fn numa_node(mut self, node: u32) -> $backend {
                self.cards.settings.numa_node = Some(node);
                self
            }

            /// Sets the most host memory that may be pinned at one time. Plans for this machine respect it too. Default: the
            /// share of the host's memory that [`DeviceInfo::pinned_cap`](crate::device::DeviceInfo::pinned_cap) returns.
            #[must_use]
            pub fn pinned_cap(mut self, cap: crate::bytes::ByteSize) -> $backend {
                self.cards.settings.pinned_cap = Some(cap);
                self
            }

            /// Sets the backend of the host whose memory is pinned.
            #[must_use]
            pub fn host(mut self, host: crate::backend::Host) -> $backend {
                self.cards.settings.host = host;
                self
            }
        }

        impl Default for $backend {
            fn default() -> Self {
                $backend::new()
            }
        }

        impl crate::backend::Backend for $backend {
            fn discover(&self) -> Vec<crate::backend::Found> {
                self.cards.discover()
            }

            fn open(
                &self,
                id: crate::device::DeviceId,
            ) -> crate::error::Result<std::sync::Arc<dyn crate::backend::Device>> {
                self.cards.open(id)
            }

            fn topology(&self) -> crate::device::Topology {
                self.cards.topology()
            }
        }

        impl std::fmt::Debug for $backend {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                let settings = &self.cards.settings;
                f.debug_struct(stringify!($backend))
                    .field("library", &settings.library)
                    .field("pinned_cap", &settings.pinned_cap)
                    .field("peers", &settings.peers)
                    .finish_non_exhaustive()
            }
        }
    };
}
