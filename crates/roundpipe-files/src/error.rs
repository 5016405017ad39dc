//! What can go wrong with a file. Bugs panic; these do not.

use std::fmt;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use crate::text::Line;

/// One line that names the place and the fix.
///
/// Callers with errors of their own turn every variant into one of theirs, so a new variant is a
/// change for them to see: the list is complete.
#[derive(thiserror::Error)]
pub enum Error {
    /// A file cannot be used; says which, why, and what helps.
    #[error("{}: {}", path.display(), Line(what))]
    File {
        /// The file or folder.
        path: PathBuf,
        /// Why, and the fix.
        what: String,
    },
    /// An argument cannot work.
    #[error("{}: {}", Line(what), Line(why))]
    Argument {
        /// The argument or field.
        what: String,
        /// Why not, and the fix.
        why: String,
    },
    /// An error of host memory: no room for what is read, or a tensor that is being written.
    #[error(transparent)]
    Tensor(#[from] roundpipe_tensor::Error),
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Error {
    /// A file that cannot be used.
    pub fn file(path: impl AsRef<Path>, what: impl Into<String>) -> Self {
        Self::File {
            path: path.as_ref().to_path_buf(),
            what: what.into(),
        }
    }

    /// An argument that cannot work.
    pub fn argument(what: impl Into<String>, why: impl Into<String>) -> Self {
        Self::Argument {
            what: what.into(),
            why: why.into(),
        }
    }
}

/// Why a file cannot be read, and the fix.
pub fn unreadable(path: &Path, e: &std::io::Error) -> String {
    match e.kind() {
        ErrorKind::NotFound if path.symlink_metadata().is_ok() => {
            "is a link to a file that is not there; download the model again".into()
        }
        ErrorKind::NotFound => "is missing; check the path or download it again".into(),
        ErrorKind::PermissionDenied => "may not be read; check its permissions".into(),
        _ => format!("cannot be read ({e}); check the disk or download it again"),
    }
}

/// A write that failed: what to do depends on why.
pub fn unwritten(path: &Path, e: &std::io::Error) -> Error {
    let fix = match e.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => {
            "free space on the disk or choose another folder"
        }
        ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem => {
            "choose a folder you may write to"
        }
        ErrorKind::NotFound => "create its folder first",
        _ => "check the disk or choose another folder",
    };
    Error::file(
        path,
        format!("could not be written ({e}), what was there before still is; {fix}"),
    )
}

/// The crate's result.
pub type Result<T, E = Error> = std::result::Result<T, E>;

#[cfg(test)]
mod tests {
    use super::Error;

    /// Whatever a message quotes, it is one line that no terminal obeys, and its end, the fix, is
    /// there.
    #[test]
    fn messages_are_one_short_line() {
        let quoted = format!(
            "bias = \"n\none\u{1b}[2J\u{85}\" {}; use \"none\"",
            "é".repeat(100_000)
        );
        let errors = [
            Error::file("m/x.json", &*quoted),
            Error::argument("bias", quoted),
        ];
        for error in errors {
            let text = error.to_string();
            assert!(
                text.contains(r#"bias = "n\none\u{1b}[2J\u{85}" é"#),
                "{text}"
            );
            assert!(
                text.ends_with("é; use \"none\"") && text.contains(" … "),
                "{text}"
            );
            assert!(
                text.chars().count() < 750 && !text.chars().any(char::is_control),
                "{text}"
            );
        }
        assert_eq!(
            Error::file("m", "ü is missing").to_string(),
            "m: ü is missing"
        );
    }
}
