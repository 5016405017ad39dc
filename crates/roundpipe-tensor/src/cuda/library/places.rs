//! Where libraries may lie, in the order of search.
//!
//! 1. the folders of `ROUNDPIPE_CUDA_LIBS`; an entry `only` among them leaves out all that follows,
//!    but not the driver, which is the system's: `ROUNDPIPE_CUDA_DRIVER=off` leaves that out;
//! 2. `CUDA_HOME`, `CUDA_PATH`, `VIRTUAL_ENV`, `CONDA_PREFIX`: what the user has chosen for
//!    this shell;
//! 3. the loader's own places, by name;
//! 4. `/usr/local/cuda`, the environment of the `python3` in `PATH`, and the users' and system's
//!    Python packages.
//!
//! Nothing is loaded here, and nothing is said of what fits what: this only lists.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// A place where a library may be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum LibraryPlace {
    /// A name that the loader may know.
    Named(String),
    /// A file.
    At(PathBuf),
}

/// What a search depends on.
#[derive(Debug, Default)]
pub(super) struct SearchInputs {
    listed: Vec<PathBuf>,
    /// Nothing but the listed folders.
    only: bool,
    /// As on a machine without a driver.
    pub no_driver: bool,
    /// Before the loader's places, and behind them.
    chosen: Vec<PathBuf>,
    usual: Vec<PathBuf>,
}

impl SearchInputs {
    /// Those of this process.
    pub fn here() -> Self {
        Self::of(|name| std::env::var_os(name), Path::new("/"))
    }

    /// Those of an environment and a system's root.
    fn of(variable: impl Fn(&str) -> Option<OsString>, root: &Path) -> Self {
        let variable = |name: &str| variable(name).filter(|value| !value.is_empty());
        let listed = variable("ROUNDPIPE_CUDA_LIBS").unwrap_or_default();
        let listed = std::env::split_paths(&listed).filter(|path| !path.as_os_str().is_empty());
        let (only, listed): (Vec<_>, Vec<_>) = listed.partition(|path| path.as_os_str() == "only");
        let no_driver = variable("ROUNDPIPE_CUDA_DRIVER").is_some_and(|value| value == "off");
        let mut places = Self {
            listed,
            only: !only.is_empty(),
            no_driver,
            ..Self::default()
        };
        if places.only {
            return places;
        }
        for name in ["CUDA_HOME", "CUDA_PATH", "VIRTUAL_ENV", "CONDA_PREFIX"] {
            if let Some(home) = variable(name) {
                places.chosen.extend(environment(Path::new(&home)));
            }
        }
        places
            .usual
            .extend(environment(&root.join("usr/local/cuda")));
        // The environment of the `python3` that a shell would find; links are not followed, for an
        // environment's Python is a link to another's.
        let path = variable("PATH").unwrap_or_default();
        let python = std::env::split_paths(&path)
            .map(|f| f.join("python3"))
            .find(|file| file.exists());
        if let Some(home) = python
            .as_ref()
            .and_then(|file| file.parent())
            .and_then(Path::parent)
        {
            places.usual.extend(environment(home));
        }
        let user = variable("HOME").map(|home| Path::new(&home).join(".local"));
        for home in user
            .into_iter()
            .chain([root.join("usr/local"), root.join("usr")])
        {
            places.usual.extend(packages(&home));
        }
        places
    }

    /// Where the driver's library may be beyond the loader's places.
    pub fn of_driver(&self) -> Vec<PathBuf> {
        let others = ["/usr/lib/wsl/lib", "/run/opengl-driver/lib"].map(PathBuf::from);
        let folders = self.listed.iter().cloned().chain(others);
        folders
            .flat_map(|folder| files(&folder, "libcuda.so"))
            .collect()
    }

    /// The places of a library such as `libnvrtc.so`, in the order of search. The loader is asked
    /// for these majors of it, and then for the name that developers' links have.
    pub fn of_library(&self, file: &str, majors: &[u32]) -> Vec<LibraryPlace> {
        let at = |folders: &[PathBuf]| -> Vec<LibraryPlace> {
            folders
                .iter()
                .flat_map(|folder| files(folder, file))
                .map(LibraryPlace::At)
                .collect()
        };
        let mut places = at(&self.listed);
        places.extend(at(&self.chosen));
        if !self.only {
            let names = majors
                .iter()
                .map(|major| format!("{file}.{major}"))
                .chain([file.to_owned()]);
            places.extend(names.map(LibraryPlace::Named));
        }
        places.extend(at(&self.usual));
        places
    }
}

/// The numbers behind `.so.` in a file's name, or in that of the file it is a link to.
pub(super) fn file_version(path: &Path) -> Vec<u32> {
    let numbers = |path: &Path| -> Vec<u32> {
        let name = path
            .file_name()
            .and_then(|name| name.to_str())
            .unwrap_or_default();
        let behind = name.split_once(".so.").map_or("", |(_, behind)| behind);
        behind
            .split('.')
            .map_while(|number| number.parse().ok())
            .collect()
    };
    let own = numbers(path);
    if own.is_empty() {
        path.canonicalize()
            .map(|real| numbers(&real))
            .unwrap_or_default()
    } else {
        own
    }
}

/// The files of a folder that are this library in some version, the newest first.
pub(super) fn files(folder: &Path, library: &str) -> Vec<PathBuf> {
    let is_it = |path: &PathBuf| {
        let name = path.file_name().and_then(|name| name.to_str());
        let rest = name.and_then(|name| name.strip_prefix(library));
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
    };
    let mut files: Vec<_> = list(folder)
        .into_iter()
        .filter(is_it)
        .map(|p| (file_version(&p), p))
        .collect();
    // Of equals the shorter name, which is the one that other libraries ask for.
    files.sort_by(|(a, p), (b, q)| {
        b.first()
            .cmp(&a.first())
            .then(p.as_os_str().len().cmp(&q.as_os_str().len()))
    });
    files.into_iter().map(|(_, path)| path).collect()
}

/// The folders of an environment: a toolkit's, conda's, or Python's packages.
fn environment(home: &Path) -> Vec<PathBuf> {
    let target = format!("targets/{}-linux/lib", std::env::consts::ARCH);
    // What toolkits call servers with ARM processors.
    let folders =
        ["lib64", "lib", &target, "targets/sbsa-linux/lib"].map(|folder| home.join(folder));
    folders
        .into_iter()
        .filter(|folder| folder.is_dir())
        .chain(packages(home))
        .collect()
}

/// `lib/python*/site-packages/nvidia/*/lib` below a folder, and `dist-packages` likewise; newer
/// Pythons first.
fn packages(home: &Path) -> Vec<PathBuf> {
    let number = |python: &PathBuf| -> Vec<u32> {
        let name = python
            .file_name()
            .and_then(|name| name.to_str())
            .unwrap_or_default();
        name.trim_start_matches("python")
            .split('.')
            .map_while(|part| part.parse().ok())
            .collect()
    };
    let is_python = |path: &PathBuf| {
        path.file_name()
            .and_then(|name| name.to_str())
            .is_some_and(|name| name.starts_with("python"))
    };
    let mut pythons: Vec<_> = list(&home.join("lib"))
        .into_iter()
        .filter(is_python)
        .collect();
    pythons.sort_by_key(|python| std::cmp::Reverse(number(python)));
    let sites = pythons.iter().flat_map(|python| {
        ["site-packages", "dist-packages"].map(|site| python.join(site).join("nvidia"))
    });
    let packages = sites.flat_map(|site| list(&site));
    packages
        .flat_map(|package| [package.join("lib"), package.join("lib64")])
        .filter(|lib| lib.is_dir())
        .collect()
}

/// What a folder holds, by name; nothing of one that cannot be read.
pub(super) fn list(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten();
    let mut paths: Vec<_> = entries
        .filter_map(|entry| entry.ok())
        .map(|entry| entry.path())
        .collect();
    paths.sort();
    paths
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A tree of empty files, gone with the value.
    struct TestFolder(PathBuf);

    impl TestFolder {
        fn new(name: &str, files: &[&str]) -> Self {
            let root = std::env::temp_dir()
                .join(format!("roundpipe-places-{name}-{}", std::process::id()));
            let _ = std::fs::remove_dir_all(&root);
            for file in files {
                let file = root.join(file);
                std::fs::create_dir_all(file.parent().unwrap()).unwrap();
                std::fs::write(file, "").unwrap();
            }
            Self(root)
        }

        /// What is found with these variables, as paths below the root.
        fn found(&self, variables: &[(&str, &str)], library: &str) -> Vec<String> {
            let value = |name: &str| {
                let (_, paths) = variables.iter().find(|(known, _)| *known == name)?;
                let paths = paths.split(':').map(|path| match path {
                    "only" => PathBuf::from(path),
                    _ => self.0.join(path),
                });
                Some(std::env::join_paths(paths).unwrap())
            };
            let below = |place| match place {
                LibraryPlace::Named(name) => name,
                LibraryPlace::At(path) => path
                    .strip_prefix(&self.0)
                    .unwrap()
                    .to_str()
                    .unwrap()
                    .to_owned(),
            };
            SearchInputs::of(value, &self.0)
                .of_library(library, &[13, 12])
                .into_iter()
                .map(below)
                .collect()
        }
    }

    impl Drop for TestFolder {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    /// Every place there is, in the promised order.
    #[test]
    fn places_come_in_the_order_of_the_header() {
        let order = [
            "mine/libnvrtc.so.12",
            "toolkit/lib64/libnvrtc.so.12",
            "toolkit2/targets/sbsa-linux/lib/libnvrtc.so.12",
            "venv/lib/python3.11/site-packages/nvidia/cuda_nvrtc/lib/libnvrtc.so.12",
            "conda/lib/libnvrtc.so.12",
            "libnvrtc.so.13",
            "libnvrtc.so.12",
            "libnvrtc.so",
            "usr/local/cuda/lib64/libnvrtc.so.12",
            "other/lib/python3.12/site-packages/nvidia/cu13/lib/libnvrtc.so.13",
            "home/.local/lib/python3.9/site-packages/nvidia/cu13/lib/libnvrtc.so.13",
            "usr/local/lib/python3.11/dist-packages/nvidia/cu13/lib/libnvrtc.so.13",
        ];
        let files: Vec<&str> = order
            .iter()
            .filter(|path| path.contains('/'))
            .copied()
            .collect();
        let tree = TestFolder::new("order", &[&files[..], &["other/bin/python3"]].concat());
        let variables = [
            ("ROUNDPIPE_CUDA_LIBS", "mine"),
            ("CUDA_HOME", "toolkit"),
            ("CUDA_PATH", "toolkit2"),
            ("VIRTUAL_ENV", "venv"),
            ("CONDA_PREFIX", "conda"),
            ("PATH", "nothing:other/bin"),
            ("HOME", "home"),
        ];
        assert_eq!(tree.found(&variables, "libnvrtc.so"), order);
        let alone = [
            ("ROUNDPIPE_CUDA_LIBS", "only:mine"),
            ("CUDA_HOME", "toolkit"),
            ("HOME", "home"),
        ];
        assert_eq!(tree.found(&alone, "libnvrtc.so"), ["mine/libnvrtc.so.12"]);
    }

    /// The newest first, by number and not by letter; other libraries of similar names are none of
    /// it.
    #[test]
    fn files_of_a_folder_are_sorted_by_version() {
        let names = [
            "l/libnvrtc.so.12",
            "l/libnvrtc.so.13",
            "l/libnvrtc.so.9.1",
            "l/libnvrtc.alt.so.13",
            "l/libnvrtc-builtins.so.13.0",
            "l/libnvrtc.so_old",
        ];
        let tree = TestFolder::new("files", &names);
        let found = files(&tree.0.join("l"), "libnvrtc.so");
        let found: Vec<_> = found
            .iter()
            .map(|path| path.file_name().unwrap().to_str().unwrap())
            .collect();
        assert_eq!(
            found,
            ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so.9.1"]
        );
        assert_eq!(
            file_version(Path::new("/x/libnvrtc.so.12.4.127")),
            [12, 4, 127]
        );
        assert!(file_version(Path::new("/x/libnvrtc.so")).is_empty());
    }

    /// Python 3.12 is newer than 3.9, and a link without a number has the version of what it leads
    /// to.
    #[cfg(unix)]
    #[test]
    fn newer_pythons_come_first_and_links_are_followed_for_versions() {
        let of =
            |python: &str| format!("env/lib/{python}/site-packages/nvidia/cu13/lib/libx.so.13");
        let tree = TestFolder::new(
            "pythons",
            &[&of("python3.9"), &of("python3.12"), "env/lib/real.so.12.4"],
        );
        let link = tree.0.join("env/lib/libx.so");
        std::os::unix::fs::symlink("real.so.12.4", &link).unwrap();
        assert_eq!(file_version(&link), [12, 4]);
        let found = tree.found(&[("VIRTUAL_ENV", "env")], "libx.so");
        assert_eq!(
            found[..3],
            [
                "env/lib/libx.so".to_owned(),
                of("python3.12"),
                of("python3.9")
            ]
        );
    }
}
