//! What can go wrong between a folder and a running model. Bugs panic; these do not.

use std::fmt;
use std::path::{Path, PathBuf};

use roundpipe_files::text::Line;

/// One line that names the place and the fix. Messages quote files of others, so what would move a
/// terminal's cursor is shown as an escape, and of a long message the middle is left out.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file cannot be used; says which, why, and what helps.
    #[error("{}: {}", path.display(), Line(what))]
    File {
        /// The file or folder.
        path: PathBuf,
        /// Why, and the fix.
        what: String,
    },
    /// A chat template cannot be rendered.
    #[error(transparent)]
    Template(#[from] roundpipe_chat::Error),
    /// An argument cannot work.
    #[error("{}: {}", Line(what), Line(why))]
    Argument {
        /// The argument or field.
        what: String,
        /// Why not, and the fix.
        why: String,
    },
    /// The engine's error.
    #[error(transparent)]
    Engine(#[from] roundpipe::Error),
    /// An operation's error.
    #[error(transparent)]
    Tensor(#[from] roundpipe::TensorError),
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

impl From<roundpipe_files::Error> for Error {
    fn from(error: roundpipe_files::Error) -> Self {
        match error {
            roundpipe_files::Error::File { path, what } => Self::File { path, what },
            roundpipe_files::Error::Argument { what, why } => Self::Argument { what, why },
            roundpipe_files::Error::Tensor(error) => Self::Tensor(error),
        }
    }
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
