//! Everything that can go wrong in a training run. Bugs panic; these do not.

/// What this crate's fallible calls return.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// By what the reader can do about it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An operation, a device or the memory refused.
    #[error(transparent)]
    Tensor(#[from] roundpipe_tensor::Error),
    /// A layer failed; says which.
    #[error("layer {index} ({layer})")]
    Layer {
        /// Its place in the model.
        index: usize,
        /// Its name.
        layer: String,
        /// Why.
        source: roundpipe_tensor::Error,
    },
    /// Another part of the step failed first; that error says why.
    #[error(transparent)]
    Aborted(#[from] crate::version::Aborted),
    /// A setting that can never work.
    #[error("{name}: {what}")]
    Config {
        /// The setting.
        name: &'static str,
        /// What is wrong and what would be right.
        what: String,
    },
}

impl Error {
    /// Shorthand for [`Error::Config`].
    pub fn config(name: &'static str, what: impl Into<String>) -> Self {
        Self::Config { name, what: what.into() }
    }
}
