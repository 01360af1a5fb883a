//! Of which files libcufile says that it reads them directly.
//!
//! Where it allows compatibility mode, it takes other files too, reads them through host memory, and does not tell.

use std::path::{Component, Path};

/// Kinds of storage: the bits of `CUfileDriverStatusFlags`.
const LUSTRE: u32 = 1 << 0;
const NFS: u32 = 1 << 2;
const GPFS: u32 = 1 << 3;
const NVME: u32 = 1 << 4;
const NVME_OVER_FABRICS: u32 = 1 << 5;
const BEEGFS: u32 = 1 << 9;

/// The numbers of file systems, by `statfs(2)` and Linux's `magic.h`; of the last three, by their own sources.
const EXT4_MAGIC: u64 = 0xef53;
const XFS_MAGIC: u64 = 0x5846_5342;
const NFS_MAGIC: u64 = 0x6969;
const LUSTRE_MAGIC: u64 = 0x0bd0_0bd0;
const GPFS_MAGIC: u64 = 0x4750_4653;
const BEEGFS_MAGIC: u64 = 0x1983_0326;

/// Whether a file is on storage that is among the `supported` kinds: its file system has the number `magic` and is on the block
/// device at `device`, as the system's folder of devices has it.
pub(super) fn is_direct(supported: u32, magic: u64, device: Option<&Path>) -> bool {
    let kinds = match magic {
        EXT4_MAGIC | XFS_MAGIC => device.map_or(0, nvme_kinds),
        NFS_MAGIC => NFS,
        LUSTRE_MAGIC => LUSTRE,
        GPFS_MAGIC => GPFS,
        BEEGFS_MAGIC => BEEGFS,
        _ => 0,
    };
    supported & kinds != 0
}

/// The kinds that an NVMe namespace may be of. None for other block devices, such as those of the device mapper, under which
/// anything may be.
fn nvme_kinds(device: &Path) -> u32 {
    let has = |wanted: &str| device.components().any(|part| matches!(part, Component::Normal(name) if name == wanted));
    match () {
        () if has("nvme-fabrics") => NVME_OVER_FABRICS,
        () if has("nvme-subsystem") => NVME | NVME_OVER_FABRICS,
        () if has("nvme") => NVME,
        () => 0,
    }
}

/// The number of a file's file system, and the device number of its storage.
#[cfg(target_os = "linux")]
pub(super) fn storage(file: &std::fs::File) -> std::io::Result<(u64, u64)> {
    use std::os::unix::fs::MetadataExt;

    // The system's type of the number differs among processors; its bits are the number's.
    #[allow(clippy::cast_sign_loss, clippy::unnecessary_cast, reason = "the type differs among processors")]
    let magic = rustix::fs::fstatfs(file)?.f_type as u64 & u64::from(u32::MAX);
    Ok((magic, file.metadata()?.dev()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_the_library_names_is_direct() {
        let pci = Path::new("/sys/devices/pci0000:00/0000:00:1d.0/0000:01:00.0/nvme/nvme0/nvme0n1/nvme0n1p2");
        let fabrics = Path::new("/sys/devices/virtual/nvme-fabrics/ctl/nvme1/nvme1n1");
        let multipath = Path::new("/sys/devices/virtual/nvme-subsystem/nvme-subsys0/nvme0n1");
        let mapper = Path::new("/sys/devices/virtual/block/dm-0");
        let virtio = Path::new("/sys/devices/pci0000:00/0000:00:02.0/virtio1/block/vda");
        let cases = [
            (NVME, EXT4_MAGIC, Some(pci), true),
            (NVME, XFS_MAGIC, Some(pci), true),
            (NVME_OVER_FABRICS, XFS_MAGIC, Some(pci), false),
            (NVME_OVER_FABRICS, EXT4_MAGIC, Some(fabrics), true),
            (NVME, EXT4_MAGIC, Some(fabrics), false),
            (NVME, EXT4_MAGIC, Some(multipath), true),
            (u32::MAX, EXT4_MAGIC, Some(mapper), false),
            (u32::MAX, EXT4_MAGIC, Some(virtio), false),
            (u32::MAX, EXT4_MAGIC, None, false),
            (NFS, NFS_MAGIC, None, true),
            (LUSTRE | NVME, NFS_MAGIC, Some(pci), false),
            // tmpfs
            (u32::MAX, 0x0102_1994, Some(pci), false),
        ];
        for (supported, magic, device, expected) in cases {
            assert_eq!(is_direct(supported, magic, device), expected, "{supported:#x} {magic:#x} {device:?}");
        }
    }
}
