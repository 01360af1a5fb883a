//! The total and available host memory: the system's figures, lowered to the limits of the control groups that the process
//! runs in.
#![cfg_attr(
    not(target_os = "linux"),
    allow(dead_code, reason = "other systems have no control groups; their tests read made-up ones")
)]

use std::fs;
use std::path::{Path, PathBuf};

/// What stands for a figure that the system does not tell.
const UNKNOWN: u64 = u64::MAX / 2;

/// Host memory in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HostMemory {
    /// The most that this process may ever use.
    pub(crate) total: u64,
    /// The memory that the process can still take.
    pub(crate) available: u64,
}

impl HostMemory {
    /// Reads the current figures. If the system does not tell them, both are the largest size that a plan can hold, so that nothing
    /// is refused for lack of a figure.
    #[cfg(target_os = "linux")]
    pub(crate) fn read() -> HostMemory {
        HostMemory::below(Path::new("/"))
    }

    /// Reads the current figures, as on Linux.
    #[cfg(not(target_os = "linux"))]
    pub(crate) fn read() -> HostMemory {
        let mut system = sysinfo::System::new();
        system.refresh_memory();
        let known = |bytes: u64| if bytes == 0 { UNKNOWN } else { bytes };
        HostMemory { total: known(system.total_memory()), available: known(system.available_memory()) }
    }

    /// Reads the figures from the file system under `root`.
    fn below(root: &Path) -> HostMemory {
        let meminfo = fs::read_to_string(root.join("proc/meminfo")).unwrap_or_default();
        let figure = |key: &str| {
            let line = meminfo.lines().find_map(|line| line.strip_prefix(key))?;
            line.trim().trim_end_matches("kB").trim_end().parse::<u64>().ok()?.checked_mul(1024)
        };
        let mut memory = HostMemory {
            total: figure("MemTotal:").unwrap_or(UNKNOWN),
            available: figure("MemAvailable:").or(figure("MemFree:")).unwrap_or(UNKNOWN),
        };
        let groups = fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
        for limit in groups.lines().flat_map(|line| group_limits(root, line)) {
            memory.total = memory.total.min(limit.bytes);
            memory.available = memory.available.min(limit.bytes.saturating_sub(limit.used));
        }
        memory
    }
}

/// Makes the process's allocator return the memory that it caches for reuse to the system, where it supports that.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
#[expect(unsafe_code, reason = "the C library's function is not in any of the crates used here")]
pub(crate) fn trim_allocator() {
    unsafe extern "C" {
        fn malloc_trim(pad: usize) -> std::ffi::c_int;
    }
    // SAFETY: any thread may call it at any time; it touches only memory that nobody has allocated.
    unsafe { malloc_trim(0) };
}

/// Makes the process's allocator return the memory that it caches for reuse to the system, where it supports that.
#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
pub(crate) fn trim_allocator() {}

/// The limit of one control group and the memory that its members use, without page cache that can be dropped.
struct Limit {
    bytes: u64,
    used: u64,
}

/// The limits of the group that a line of `/proc/self/cgroup` names, and of the groups above it.
fn group_limits(root: &Path, line: &str) -> Vec<Limit> {
    let mut fields = line.splitn(3, ':').skip(1);
    let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { return Vec::new() };
    let (mount, limit, usage, inactive) = if controllers.is_empty() {
        ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")
    } else if controllers.split(',').any(|c| c == "memory") {
        ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    } else {
        return Vec::new();
    };
    let mount = root.join(mount);
    // Inside a container the path can be the host's: the group is then mounted at the top.
    let groups = Path::new(path.trim_start_matches('/')).ancestors().map(|group| mount.join(group));
    groups.filter_map(|group| read_limit(&group, limit, usage, inactive)).collect()
}

fn read_limit(group: &Path, limit: &str, usage: &str, inactive: &str) -> Option<Limit> {
    let number = |file: PathBuf| fs::read_to_string(file).ok()?.trim().parse::<u64>().ok();
    // "max" in version 2 is no limit and no number; version 1 writes a number near 2^63.
    let bytes = number(group.join(limit)).filter(|&bytes| bytes < 1 << 62)?;
    let used = number(group.join(usage)).unwrap_or(0);
    let stat = fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
    let cache = stat.lines().find_map(|line| line.strip_prefix(inactive)?.trim().parse::<u64>().ok());
    Some(Limit { bytes, used: used.saturating_sub(cache.unwrap_or(0)) })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn system(files: &[(&str, &str)]) -> HostMemory {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        HostMemory::below(root.path())
    }

    const MEMINFO: (&str, &str) =
        ("proc/meminfo", "MemTotal:       16384 kB\nMemFree:         1024 kB\nMemAvailable:    8192 kB\n");

    #[test]
    fn without_groups_the_system_decides() {
        assert_eq!(system(&[MEMINFO]), HostMemory { total: 16 << 20, available: 8 << 20 });
    }

    #[test]
    fn the_lowest_limit_of_version_2_counts_up_to_the_top() {
        let memory = system(&[
            MEMINFO,
            ("proc/self/cgroup", "0::/app/worker\n"),
            ("sys/fs/cgroup/app/worker/memory.max", "max\n"),
            ("sys/fs/cgroup/app/memory.max", "4194304\n"),
            ("sys/fs/cgroup/app/memory.current", "3145728\n"),
            ("sys/fs/cgroup/app/memory.stat", "anon 1\ninactive_file 1048576\n"),
        ]);
        assert_eq!(memory, HostMemory { total: 4 << 20, available: 2 << 20 });
    }

    #[test]
    fn version_1_and_a_container_that_sees_its_group_at_the_top() {
        let memory = system(&[
            MEMINFO,
            ("proc/self/cgroup", "12:cpu,cpuacct:/x\n4:memory:/docker/abc\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "2097152\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "1048576\n"),
        ]);
        assert_eq!(memory, HostMemory { total: 2 << 20, available: 1 << 20 });
        let unlimited = system(&[
            MEMINFO,
            ("proc/self/cgroup", "4:memory:/\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
        ]);
        assert_eq!(unlimited.total, 16 << 20);
    }
}
