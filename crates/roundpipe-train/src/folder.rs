//! The folder of a run: who may write into it, and what is where.
//!
//! ```text
//! run.toml         every setting, as resolved when the run began
//! checkpoints/     what a run goes on from
//! metrics.jsonl    a line for each step, validation, sample, save
//! events/          the same for TensorBoard
//! model/           the finished model or adapter
//! report.html      curves, samples and a timeline, for a browser
//! reference.safetensors   what the model said before training, for DPO
//! ```
//!
//! # Invariants
//! - One process at a time: the lock is the system's, so a process that is killed leaves none.
//! - A file is complete under its name, or it is what it was before.

use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};

use roundpipe::Quantization;
use roundpipe_files::AtomicFile;

use crate::error::{Error, Result};
use crate::settings::{Given, Settings};

/// What the model said before training.
pub(crate) const REFERENCE: &str = "reference.safetensors";

/// What a run writes into its folder, beside the lock and its settings.
const WRITTEN: [&str; 9] = [
    "checkpoints",
    "metrics.jsonl",
    "events",
    "model",
    "model.partial",
    "model.old",
    "report.html",
    REFERENCE,
    "tokenizer",
];

/// What `run.toml` always has: what the program chooses where the user does not, and the last line.
const RESOLVED: [&str; 9] = [
    "data",
    "steps",
    "seq",
    "batch",
    "microbatches",
    "lr",
    "warmup",
    "dtype",
    "fast_attention",
];

/// A run's folder, locked.
#[derive(Debug)]
pub struct RunFolder {
    path: PathBuf,
    /// Whether it was made for this start.
    is_new: bool,
    /// Unlocked when it is closed.
    _lock: File,
}

impl RunFolder {
    /// Makes the folder where it is not there, and locks it.
    ///
    /// # Errors
    /// [`Error::Failed`] while another process has it, and when it cannot be written.
    pub fn open(path: &Path) -> Result<Self> {
        let is_new = !path.exists();
        let name = path.join("lock");
        loop {
            std::fs::create_dir_all(path).map_err(|e| unusable(path, &e))?;
            let lock = File::options()
                .create(true)
                .truncate(false)
                .write(true)
                .open(&name)
                .map_err(|e| unusable(path, &e))?;
            match lock.try_lock() {
                // The one who had it may have abandoned the folder, and the name is another file's.
                Ok(()) if !is_the_file(&lock, &name) => {}
                Ok(()) => {
                    return Ok(Self {
                        path: path.to_path_buf(),
                        is_new,
                        _lock: lock,
                    });
                }
                Err(TryLockError::WouldBlock) => {
                    return Err(Error::Failed(format!(
                        "{}: another process trains here; wait for it, or choose another folder with --out",
                        path.display()
                    )));
                }
                Err(TryLockError::Error(e)) => return Err(Error::io("lock", &name, &e)),
            }
        }
    }

    /// Refuses a folder that is no run's and has files that a run would write over.
    ///
    /// # Errors
    /// [`Error::Usage`] with the first of them.
    pub fn refuse_foreign(path: &Path) -> Result<()> {
        let has = |name: &str| path.join(name).symlink_metadata().is_ok();
        // A start that was killed before it wrote run.toml leaves this.
        let is_ours = |name: &str| name == "tokenizer" && has("lock");
        let found = WRITTEN.iter().find(|name| has(name) && !is_ours(name));
        let Some(found) = found.filter(|_| !has("run.toml")) else {
            return Ok(());
        };
        Err(Error::Usage(format!(
            "{}: has `{found}` and no run.toml, so it is no run's folder; choose another with --out",
            path.display()
        )))
    }

    /// Removes the folder, where it was made for a start that failed before the first step.
    pub(crate) fn abandon(&self) {
        if !self.is_new {
            return;
        }
        // What cannot be removed stays, and does no harm.
        for name in ["tokenizer", "events"] {
            let _ = std::fs::remove_dir_all(self.file(name));
        }
        for name in ["metrics.jsonl", REFERENCE, "run.toml", "lock"] {
            let _ = std::fs::remove_file(self.file(name));
        }
        let _ = std::fs::remove_dir(&self.path);
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The settings that the run began with, if it has begun.
    ///
    /// # Errors
    /// [`Error::Usage`] when the file was damaged.
    pub fn settings(&self) -> Result<Option<Settings>> {
        let path = self.file("run.toml");
        if !path.exists() {
            return Ok(None);
        }
        let given = Given::file(&path)?;
        if let Some(name) = RESOLVED.iter().find(|name| !given.has(name)) {
            return Err(Error::Usage(format!(
                "{}: has no `{name}`, so it was cut or edited; put it back as it was, or start another run \
                 with --out",
                path.display()
            )));
        }
        let mut settings = Settings::default();
        given.apply(&mut settings);
        Ok(Some(settings))
    }

    /// Writes the settings.
    ///
    /// # Errors
    /// [`Error::Failed`] when the disk is full, for example; the old file stays. [`Error::Usage`] for
    /// settings so long that they could not be read again.
    pub fn write_settings(&self, settings: &Settings) -> Result<()> {
        let text = settings.to_toml();
        if text.len() as u64 > crate::settings::MOST_BYTES {
            return Err(Error::Usage(format!(
                "the settings have {} bytes, and run.toml at most {}; give fewer or shorter prompts, groups \
                 or data",
                text.len(),
                crate::settings::MOST_BYTES
            )));
        }
        self.write("run.toml", text.as_bytes())
    }

    /// Writes a small file, complete or not at all.
    pub(crate) fn write(&self, name: &str, bytes: &[u8]) -> Result<()> {
        let path = self.file(name);
        let file = AtomicFile::of_bytes(&path, bytes).and_then(AtomicFile::finish);
        file.map_err(|e| Error::Failed(e.to_string()))
    }

    /// A path in it.
    pub fn file(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }
}

/// Whether a name still leads to an open file.
fn is_the_file(file: &File, name: &Path) -> bool {
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        let place = |meta: std::fs::Metadata| (meta.dev(), meta.ino());
        let named = std::fs::metadata(name).ok().map(place);
        named.is_some() && named == file.metadata().ok().map(place)
    }
    #[cfg(not(unix))]
    {
        let _ = file;
        name.exists()
    }
}

/// A folder that a run cannot have.
fn unusable(path: &Path, error: &std::io::Error) -> Error {
    let line = format!(
        "out: cannot write into {} ({error}); choose another folder with --out",
        path.display()
    );
    match error.kind() {
        std::io::ErrorKind::StorageFull => Error::Failed(line),
        _ => Error::Usage(line),
    }
}

/// Where a run's folder has a model: the folder of weights, and that of an adapter on them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunModel {
    /// A folder or a hub id.
    pub base: String,
    /// An adapter on it.
    pub adapter: Option<PathBuf>,
    /// How the weights beside the adapter were quantised.
    pub quantize: Option<Quantization>,
}

/// The result in a run's folder; nothing where the folder is no run's.
///
/// # Errors
/// [`Error::Failed`] for a run that has not finished.
pub fn run_model(path: &Path) -> Result<Option<RunModel>> {
    let config = path.join("run.toml");
    if !config.is_file() {
        return Ok(None);
    }
    let mut settings = Settings::default();
    Given::file(&config)?.apply(&mut settings);
    let result = path.join("model");
    if !result.is_dir() {
        return Err(Error::Failed(format!(
            "{}: the run has not finished, so it has no model yet; go on with `roundpipe train --out {}`",
            path.display(),
            path.display()
        )));
    }
    let is_adapter = result.join("adapter_config.json").is_file();
    let base = match settings.model {
        Some(model) if is_adapter => model,
        _ => result.display().to_string(),
    };
    let quantize = settings.quantize.filter(|_| is_adapter);
    Ok(Some(RunModel {
        base,
        quantize: quantize.map(Into::into),
        adapter: is_adapter.then_some(result),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_one_process_and_leaves_nothing() {
        let path = std::env::temp_dir().join(format!("run-folder-{}", std::process::id()));
        let folder = RunFolder::open(&path).unwrap();
        let line = RunFolder::open(&path).unwrap_err().to_string();
        assert!(line.contains("another process trains here"), "{line}");
        folder.abandon();
        drop(folder);
        assert!(!path.exists());
        std::fs::create_dir(&path).unwrap();
        std::fs::write(path.join("notes.txt"), "mine").unwrap();
        RunFolder::refuse_foreign(&path).unwrap();
        let folder = RunFolder::open(&path).unwrap();
        folder.abandon();
        drop(folder);
        assert!(path.join("lock").exists(), "it was not made for this start");
        std::fs::create_dir(path.join("tokenizer")).unwrap();
        RunFolder::refuse_foreign(&path).unwrap();
        std::fs::create_dir(path.join("model")).unwrap();
        let line = RunFolder::refuse_foreign(&path).unwrap_err().to_string();
        assert!(line.contains("`model`"), "{line}");
        std::fs::write(path.join("run.toml"), "").unwrap();
        RunFolder::refuse_foreign(&path).unwrap();
        let line = RunFolder::open(&path).unwrap().settings().unwrap_err();
        assert!(line.to_string().contains("has no `data`"), "{line}");
        std::fs::remove_dir_all(&path).unwrap();
    }
}
