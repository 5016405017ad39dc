//! How much memory there is.
//!
//! Numbers in a file become sizes of memory, so they are compared with this before anything is made
//! of them. Nothing else depends on it: code that checks takes the limit as an argument.

use std::path::Path;

use roundpipe::Bytes;

/// Host memory that this process could have at most: the machine's with its swap, or less where a
/// cgroup (version 2) allows less. All there can be where the system does not tell.
pub fn host_memory() -> Bytes {
    let text = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let group = group_limit(Path::new("/sys/fs/cgroup"), &text("/proc/self/cgroup"));
    let all = total(&text("/proc/meminfo")).into_iter().chain(group).min();
    Bytes(all.unwrap_or(u64::MAX))
}

/// Compares the sum of some parts with a limit; the error names the largest.
pub(crate) fn fits(parts: &[(&str, u128)], limit: Bytes) -> Result<(), String> {
    let need =
        u64::try_from(parts.iter().map(|(_, bytes)| bytes).sum::<u128>()).unwrap_or(u64::MAX);
    if need <= limit.0 {
        return Ok(());
    }
    let keys = parts
        .iter()
        .max_by_key(|(_, bytes)| *bytes)
        .map_or("", |(keys, _)| keys);
    Err(format!(
        "asks for {} of memory, most of it by {keys}; there are {limit}",
        Bytes(need)
    ))
}

/// Memory and swap, as `/proc/meminfo` has them.
fn total(meminfo: &str) -> Option<u64> {
    let kib = |name: &str| -> Option<u64> {
        let line = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim().strip_suffix("kB")?.trim().parse().ok()
    };
    let kib = kib("MemTotal:")?.saturating_add(kib("SwapTotal:").unwrap_or(0));
    Some(kib.saturating_mul(1024))
}

/// The least limit of the cgroups under `root` that a process is in, as `/proc/self/cgroup` lists
/// them.
fn group_limit(root: &Path, own: &str) -> Option<u64> {
    let group = own.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let groups = Path::new(group)
        .ancestors()
        .map(|group| root.join(group).join("memory.max"));
    groups
        .filter_map(|path| std::fs::read_to_string(path).ok()?.trim().parse().ok())
        .min()
}

#[cfg(test)]
mod tests {
    use super::{group_limit, host_memory, total};

    #[test]
    fn memory_is_what_the_system_says() {
        assert_eq!(
            total("MemTotal:     20 kB\nMemFree: 1 kB\nSwapTotal:  4 kB\n"),
            Some(24 << 10)
        );
        assert_eq!(total("MemTotal: 20 kB\n"), Some(20 << 10));
        assert_eq!(total("MemFree: 20 kB\n"), None);
        assert!(host_memory().0 > 0);
    }

    #[test]
    fn the_narrowest_cgroup_counts() {
        let root = std::env::temp_dir().join(format!("roundpipe-cgroup-{}", std::process::id()));
        std::fs::create_dir_all(root.join("a/b")).unwrap();
        std::fs::write(root.join("a/memory.max"), "5000\n").unwrap();
        std::fs::write(root.join("a/b/memory.max"), "max\n").unwrap();
        assert_eq!(group_limit(&root, "0::/a/b\n"), Some(5000));
        assert_eq!(group_limit(&root, "0::/\n"), None);
        assert_eq!(group_limit(&root, ""), None);
        std::fs::remove_dir_all(root).unwrap();
    }
}
