//! How much host memory there is for this process, as the system and its control groups tell.
//!
//! [`total`] bounds what could ever be used, [`available`] what can be taken now without pushing
//! others out. Both count limits of control groups, version 1 and 2, of the process's group and all
//! above it. Nothing here allocates, and nothing is refused here: callers compare.

use std::path::{Path, PathBuf};

use crate::bytes::Bytes;

/// Host memory that this process could have at most: the machine's with its swap, or less where a
/// control group allows less. All there can be where the system does not tell.
pub fn total() -> Bytes {
    let machine = machine_total(&read("/proc/meminfo"));
    let groups = Groups::of_this_process();
    let all = machine.into_iter().chain(groups.limit()).min();
    Bytes(all.unwrap_or(u64::MAX))
}

/// Host memory that this process can have without taking it from others; `None` where the system
/// does not tell.
pub fn available() -> Option<Bytes> {
    let machine = machine_available(&read("/proc/meminfo"));
    let groups = Groups::of_this_process();
    let least = machine.into_iter().chain(groups.room()).min();
    least.map(Bytes)
}

fn read(path: &str) -> String {
    std::fs::read_to_string(path).unwrap_or_default()
}

/// A line of `/proc/meminfo`, in bytes.
fn meminfo_bytes(meminfo: &str, name: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib.saturating_mul(1024))
}

fn machine_total(meminfo: &str) -> Option<u64> {
    let swap = meminfo_bytes(meminfo, "SwapTotal:").unwrap_or(0);
    Some(meminfo_bytes(meminfo, "MemTotal:")?.saturating_add(swap))
}

fn machine_available(meminfo: &str) -> Option<u64> {
    meminfo_bytes(meminfo, "MemAvailable:")
}

/// The files of a control group's memory, by version.
struct Names {
    limit: &'static str,
    usage: &'static str,
    /// Lines of `memory.stat`: files that are only cached, which can go.
    cached: [&'static str; 2],
}

const VERSION_1: Names = Names {
    limit: "memory.limit_in_bytes",
    usage: "memory.usage_in_bytes",
    cached: ["total_active_file", "total_inactive_file"],
};

const VERSION_2: Names = Names {
    limit: "memory.max",
    usage: "memory.current",
    cached: ["active_file", "inactive_file"],
};

/// The control groups of a process, from its own up to the root.
struct Groups(Vec<(PathBuf, &'static Names)>);

impl Groups {
    fn of_this_process() -> Self {
        Self::new(Path::new("/sys/fs/cgroup"), &read("/proc/self/cgroup"))
    }

    /// The groups under `root` that a process is in, as `/proc/self/cgroup` lists them. In a
    /// container the root is often its own group, whatever the list says, so it is always among
    /// them.
    fn new(root: &Path, listed: &str) -> Self {
        let mut second = "";
        let mut first = None;
        for line in listed.lines() {
            // hierarchy:controllers:/path; version 2 has no controllers.
            let mut fields = line.splitn(3, ':').skip(1);
            let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else {
                continue;
            };
            let path = path.trim_start_matches('/');
            if controllers.is_empty() {
                second = path;
            } else if controllers.split(',').any(|name| name == "memory") {
                first = Some(path);
            }
        }
        let mut groups = Vec::new();
        for group in Path::new(second).ancestors() {
            groups.push((root.join(group), &VERSION_2));
        }
        for group in first
            .into_iter()
            .flat_map(|path| Path::new(path).ancestors())
        {
            groups.push((root.join("memory").join(group), &VERSION_1));
        }
        Self(groups)
    }

    /// The least limit of all groups.
    fn limit(&self) -> Option<u64> {
        let limits = self.0.iter().map(|(group, names)| limit_of(group, names));
        limits.flatten().min()
    }

    /// The least that a group has left.
    fn room(&self) -> Option<u64> {
        let rooms = self.0.iter().map(|(group, names)| room_of(group, names));
        rooms.flatten().min()
    }
}

fn number(group: &Path, file: &str) -> Option<u64> {
    let text = std::fs::read_to_string(group.join(file)).ok()?;
    text.trim().parse().ok()
}

/// A group's limit; version 1 writes a huge number where there is none, version 2 a word.
fn limit_of(group: &Path, names: &Names) -> Option<u64> {
    number(group, names.limit).filter(|limit| *limit < 1 << 60)
}

fn room_of(group: &Path, names: &Names) -> Option<u64> {
    let limit = limit_of(group, names)?;
    let used = number(group, names.usage)?;
    let stat = std::fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
    let cached = |line: &str| {
        let (name, bytes) = line.split_once(' ')?;
        let counts = names.cached.contains(&name);
        counts.then(|| bytes.parse::<u64>().ok()).flatten()
    };
    let cached = stat.lines().filter_map(cached).fold(0, u64::saturating_add);
    Some(limit.saturating_sub(used.saturating_sub(cached)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_what_the_system_says() {
        let meminfo = "MemTotal:     20 kB\nMemAvailable: 7 kB\nSwapTotal:  4 kB\n";
        assert_eq!(machine_total(meminfo), Some(24 << 10));
        assert_eq!(machine_total("MemTotal: 20 kB\n"), Some(20 << 10));
        assert_eq!(machine_total("MemFree: 20 kB\n"), None);
        assert_eq!(machine_available(meminfo), Some(7 << 10));
        assert_eq!(machine_available("MemTotal: 9 kB\n"), None);
        assert!(total().0 > 0);
    }

    /// A folder of groups that is gone at the end.
    struct Tree(PathBuf);

    impl Tree {
        fn new(name: &str) -> Self {
            let name = format!("roundpipe-{name}-{}", std::process::id());
            Self(std::env::temp_dir().join(name))
        }

        fn write(&self, group: &str, files: &[(&str, &str)]) {
            let group = self.0.join(group);
            std::fs::create_dir_all(&group).unwrap();
            for (file, text) in files {
                std::fs::write(group.join(file), format!("{text}\n")).unwrap();
            }
        }

        fn second(&self, group: &str, max: &str, current: &str, stat: &str) {
            let files = [
                ("memory.max", max),
                ("memory.current", current),
                ("memory.stat", stat),
            ];
            self.write(group, &files);
        }

        fn room(&self, listed: &str) -> Option<u64> {
            Groups::new(&self.0, listed).room()
        }

        fn limit(&self, listed: &str) -> Option<u64> {
            Groups::new(&self.0, listed).limit()
        }
    }

    impl Drop for Tree {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    /// A container's limit counts although the machine has more, that of a group above as well;
    /// what is only cached from files is no loss, and a group without a limit has no say.
    #[test]
    fn the_narrowest_group_of_version_2_counts() {
        let tree = Tree::new("cgroup2");
        let both = "4:memory:/job\n0::/\n";
        assert_eq!(tree.room(both), None);
        tree.second("a/b", "max", "5", "");
        assert_eq!(tree.room("0::/a/b\n"), None);
        let stat = "anon 700\nactive_file 50\ninactive_file 100\nfile_mapped 9";
        tree.second("a", "1000", "900", stat);
        assert_eq!(tree.room("0::/a/b\n"), Some(250));
        assert_eq!(tree.limit("0::/a/b\n"), Some(1000));
        tree.second("a/b", "600", "500", "");
        assert_eq!(tree.room("0::/a/b\n"), Some(100));
        assert_eq!(tree.limit("0::/a/b\n"), Some(600));
        assert_eq!(tree.room("0::/elsewhere\n"), None);
        assert_eq!(tree.limit(""), None);
        tree.second("", "80", "90", "");
        assert_eq!(tree.room("0::/elsewhere\n"), Some(0));
        assert_eq!(tree.room("0::/a/b\n"), Some(0));
        assert_eq!(tree.room(both), Some(0));
    }

    #[test]
    fn groups_of_version_1_count_too() {
        let tree = Tree::new("cgroup1");
        let unlimited = "9223372036854771712";
        let files = |limit| {
            [
                ("memory.limit_in_bytes", limit),
                ("memory.usage_in_bytes", "300"),
                ("memory.stat", "inactive_file 7\ntotal_inactive_file 100"),
            ]
        };
        tree.write("memory", &files(unlimited));
        tree.write("memory/job", &files("1000"));
        let listed = "5:cpu,cpuacct:/other\n4:memory:/job/inner\n";
        assert_eq!(tree.limit(listed), Some(1000));
        assert_eq!(tree.room(listed), Some(800));
        assert_eq!(tree.limit("4:memory:/elsewhere\n"), None, "no limit at all");
        assert_eq!(tree.limit("4:cpu:/job\n"), None);
    }
}
