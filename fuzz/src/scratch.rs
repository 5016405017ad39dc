//! A folder for the files of one execution after another.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hasher};
use std::io::Write;
use std::path::{Path, PathBuf};

/// A folder that holds exactly the files of the current execution; gone at the end.
pub struct Scratch {
    dir: PathBuf,
    /// Names of the files that are there, and what tells their bytes apart: a file that stays is
    /// not written again.
    present: BTreeMap<String, u64>,
}

impl Scratch {
    /// A folder of its own under `ROUNDPIPE_FUZZ_DIR`, or in memory where the system has such a
    /// place, or under the system's temporary folder.
    pub fn new(name: &str) -> Self {
        let shared = Path::new("/dev/shm");
        let base = match std::env::var_os("ROUNDPIPE_FUZZ_DIR") {
            Some(dir) => PathBuf::from(dir),
            None if shared.is_dir() => shared.to_path_buf(),
            None => std::env::temp_dir(),
        };
        let dir = base.join(format!("roundpipe-fuzz-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&dir).expect("a folder for the fuzzed files");
        Self {
            dir,
            present: BTreeMap::new(),
        }
    }

    /// The folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// A file of the folder.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Writes an input beside the folder, for the case that it is the last one; see
    /// [`Scratch::kept`].
    pub fn keep(&self, input: &[u8]) {
        std::fs::write(self.kept(), input).expect("a fuzzed file");
    }

    /// Where the last input is if a panic or an abort comes after it.
    pub fn kept(&self) -> PathBuf {
        self.dir.with_extension("input")
    }

    /// Makes the folder hold these files and no others.
    pub fn fill<'a>(&mut self, files: impl IntoIterator<Item = (&'a str, &'a [u8])>) {
        let mut left: Vec<String> = self.present.keys().cloned().collect();
        for (name, bytes) in files {
            self.put(name, bytes);
            left.retain(|old| old != name);
        }
        for name in left {
            self.remove(&name);
        }
    }

    /// Writes one more file.
    pub fn put(&mut self, name: &str, bytes: &[u8]) {
        let mut hasher = DefaultHasher::new();
        hasher.write(bytes);
        let hash = hasher.finish();
        if self.present.get(name) == Some(&hash) {
            return;
        }
        let mut file = std::fs::File::create(self.path(name)).expect("a fuzzed file");
        file.write_all(bytes).expect("a fuzzed file");
        match self.present.get_mut(name) {
            Some(present) => *present = hash,
            None => _ = self.present.insert(name.to_owned(), hash),
        }
    }

    /// Removes a file.
    pub fn remove(&mut self, name: &str) {
        self.present.remove(name);
        std::fs::remove_file(self.path(name)).expect("a fuzzed file");
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        _ = std::fs::remove_dir_all(&self.dir);
        if !std::thread::panicking() {
            _ = std::fs::remove_file(self.kept());
        }
    }
}
