//! Folders of files that appear whole or not at all.
//!
//! The path of a folder: temporary name beside the target -> files, each flushed by its writer ->
//! flush of the folder -> rename -> flush of the parent. A folder that is replaced is first set
//! aside, since no system renames a folder over another that has files.
//!
//! | name | what it is | what the next save of the target does with it |
//! |---|---|---|
//! | `NAME` | complete | sets it aside |
//! | `.NAME.partial` | being written, or left by a crash | removes it |
//! | `.NAME.previous` | set aside by a save that was cut off | gives it its name back, unless `NAME` is there |
//! | `.NAME.removed` | being removed | removes the rest |
//!
//! Refused: a target without a name (`/`, `..`), and one that is a link. What is inside an existing target is its caller's
//! business to know before it replaces it.
//!
//! # Invariants
//! - Under the target's name, or where that is missing under the name that [`complete`] gives, there
//!   is always a complete folder, once there was one.
//! - A folder that is under its name is on the disk, its files and its name, as far as flushes help.
//! - An unfinished folder that is dropped disappears.

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::disk::{Disk, DiskFile};
use crate::error::{Error, Result, unreadable, unwritten};

const PARTIAL: &str = ".partial";
const PREVIOUS: &str = ".previous";
const REMOVED: &str = ".removed";

/// A folder being written beside the one that it will replace; dropped unfinished, it disappears.
#[derive(Debug)]
pub struct AtomicFolder {
    disk: Arc<dyn Disk>,
    target: PathBuf,
    partial: PathBuf,
    finished: bool,
}

impl AtomicFolder {
    /// Makes the empty folder under its temporary name, after tidying up what a crash left there.
    /// Missing folders above it are made.
    ///
    /// # Errors
    /// [`Error::File`] when they cannot be written.
    pub fn create(disk: Arc<dyn Disk>, target: &Path) -> Result<Self> {
        let partial = beside(target, PARTIAL)?;
        refuse_link(target)?;
        create_above(&*disk, target)?;
        tidy(&*disk, target)?;
        let this = Self {
            disk,
            target: target.to_path_buf(),
            partial,
            finished: false,
        };
        this.check(this.disk.create_folder(&this.partial))?;
        Ok(this)
    }

    /// The name that it will have.
    pub fn target(&self) -> &Path {
        &self.target
    }

    /// Where its files are until it has its name.
    pub fn path(&self) -> &Path {
        &self.partial
    }

    /// Makes an empty file in it. Its writer flushes it before [`AtomicFolder::finish`].
    ///
    /// # Errors
    /// [`Error::File`] when it cannot be written.
    pub fn create_file(&self, name: &str) -> Result<Box<dyn DiskFile>> {
        self.check(self.disk.create(&self.partial.join(name)))
    }

    /// The result of an operation on one of its files, its error with what it means for the user.
    ///
    /// # Errors
    /// [`Error::File`] for an operation that failed.
    pub fn check<T>(&self, result: io::Result<T>) -> Result<T> {
        result.map_err(|error| unwritten(&self.target, &error))
    }

    /// Gives the folder its name, in the place of a folder that has it now. The files must be
    /// flushed.
    ///
    /// # Errors
    /// [`Error::File`] when that fails; whatever had the name still has it, or is what [`complete`]
    /// gives.
    pub fn finish(mut self) -> Result<()> {
        let disk = &*self.disk;
        let above = parent(&self.target);
        let previous = beside(&self.target, PREVIOUS)?;
        self.check(disk.flush_folder(&self.partial))?;
        let replaces = self.target.symlink_metadata().is_ok();
        if replaces {
            self.check(disk.rename(&self.target, &previous))?;
        }
        let renamed = disk.rename(&self.partial, &self.target);
        if let (Err(_), true) = (&renamed, replaces) {
            // If this fails as well, the next save does it, and readers find the folder as it is.
            let _ = disk.rename(&previous, &self.target);
        }
        self.check(renamed)?;
        self.finished = true;
        self.check(disk.flush_folder(above))?;
        if replaces {
            // Of no use any more; what is left of it is removed by the next save.
            let _ = remove_all(disk, &previous);
        }
        Ok(())
    }
}

impl Drop for AtomicFolder {
    fn drop(&mut self) {
        if !self.finished {
            // The next save removes what cannot be removed now.
            let _ = remove_all(&*self.disk, &self.partial);
        }
    }
}

/// The complete folder of a target: itself, or the one that a save had set aside when it was cut
/// off; `None` when there is neither.
pub fn complete(target: &Path) -> Option<PathBuf> {
    if target.symlink_metadata().is_ok() {
        return Some(target.to_path_buf());
    }
    let previous = beside(target, PREVIOUS).ok()?;
    previous.is_dir().then_some(previous)
}

/// Removes a folder of files: it loses its name first, so that a crash leaves no part of it there.
///
/// # Errors
/// [`Error::File`] when it cannot be removed.
pub fn remove(disk: &dyn Disk, target: &Path) -> Result<()> {
    let removed = beside(target, REMOVED)?;
    refuse_link(target)?;
    let gone = remove_all(disk, &removed).and_then(|()| {
        disk.rename(target, &removed)?;
        disk.flush_folder(parent(target))?;
        remove_all(disk, &removed)
    });
    gone.map_err(|error| {
        let what = format!("could not be removed ({error}); remove it by hand");
        Error::file(target, what)
    })
}

/// Finishes or takes back what a crash left of a target.
///
/// # Errors
/// [`Error::File`] when it cannot be removed.
pub fn tidy(disk: &dyn Disk, target: &Path) -> Result<()> {
    let previous = beside(target, PREVIOUS)?;
    let tidied = || -> io::Result<()> {
        if previous.is_dir() && target.symlink_metadata().is_err() {
            disk.rename(&previous, target)?;
            disk.flush_folder(parent(target))?;
        }
        for name in [PREVIOUS, PARTIAL, REMOVED] {
            remove_all(disk, &beside(target, name).map_err(io::Error::other)?)?;
        }
        Ok(())
    };
    tidied().map_err(|error| unwritten(target, &error))
}

/// The name of the target that a file name is a leftover of.
pub fn target_of_leftover(name: &str) -> Option<&str> {
    let inner = name.strip_prefix('.')?;
    [PARTIAL, PREVIOUS, REMOVED]
        .iter()
        .find_map(|ending| inner.strip_suffix(ending))
        .filter(|target| !target.is_empty())
}

/// The names of what is in a folder, those that are not UTF-8 left out.
///
/// # Errors
/// [`Error::File`] when it cannot be read.
pub fn names(dir: &Path) -> Result<Vec<String>> {
    let fail = |error: io::Error| Error::file(dir, unreadable(dir, &error));
    let mut names = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(fail)? {
        names.extend(entry.map_err(fail)?.file_name().into_string().ok());
    }
    names.sort();
    Ok(names)
}

/// Removes a folder and the files in it, if it is there.
fn remove_all(disk: &dyn Disk, path: &Path) -> io::Result<()> {
    let entries = match std::fs::read_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries?,
    };
    for entry in entries {
        disk.remove_file(&entry?.path())?;
    }
    disk.remove_folder(path)
}

/// A link cannot be set aside without losing where it leads, and what it leads to is not removed.
fn refuse_link(target: &Path) -> Result<()> {
    if !target.is_symlink() {
        return Ok(());
    }
    let what = "is a link, and only folders are replaced; remove it, or name the folder itself";
    Err(Error::file(target, what))
}

/// Makes the folders above `target` that are missing, each flushed into its own parent.
fn create_above(disk: &dyn Disk, target: &Path) -> Result<()> {
    let above = parent(target);
    let mut missing = Vec::new();
    let mut at = above;
    while !at.exists() {
        missing.push(at);
        at = parent(at);
    }
    for folder in missing.into_iter().rev() {
        disk.create_folder(folder)
            .and_then(|()| disk.flush_folder(parent(folder)))
            .map_err(|error| unwritten(folder, &error))?;
    }
    Ok(())
}

fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// The temporary name beside a target.
fn beside(target: &Path, ending: &str) -> Result<PathBuf> {
    let Some(name) = target.file_name() else {
        let what = "is no name for a new folder; add one";
        return Err(Error::file(target, what));
    };
    let mut temporary = OsString::from(".");
    temporary.push(name);
    temporary.push(ending);
    Ok(target.with_file_name(temporary))
}
