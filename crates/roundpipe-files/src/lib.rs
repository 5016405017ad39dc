//! Files of tensors and small files beside them: read with every claim checked, written whole or
//! not at all.
//!
//! A file comes from a stranger or from a run that was cut off. Reading it starts with what it is
//! (a regular file of a stated length) and ends with what it says; writing one starts under a
//! temporary name and ends with a rename.
//!
//! | to | see |
//! |---|---|
//! | map a safetensors file and look at its tensors | [`Weights`] |
//! | read or write a small file of tensors | [`read_tensors`], [`write_tensors`] |
//! | write a file of any contents | [`AtomicFile`] |
//! | write a folder of files | [`AtomicFolder`], [`disk`] |
//! | find damage | [`hash`] |
//! | read settings, an index, a vocabulary | [`small`] |
//! | quote a file in an error message | [`text`] |
//!
//! The crate stands between tensors and the engine. It knows tensors by name, type and shape; which
//! of them a model has, and what they mean, is its callers' business.
//!
//! Refused, each with one line that names the file and the fix: pipes, devices and folders where a
//! file should be; files longer than their reader allows; JSON with too many values; safetensors
//! files whose header contradicts itself or the file ([`weights`] has the list).
//!
//! # Invariants
//! - Nothing of a claimed size is allocated before the claim has been compared with the file.
//! - A read never waits for a writer and never runs code from the file.
//! - Under its own name a file is complete and on the disk, or it is what it was before.
//! - An error is one line; what it quotes is cut to a bounded length and shown without control
//!   characters.
#![forbid(unsafe_code)]

pub mod error;
pub mod text;

pub mod small;

pub mod hash;

pub mod disk;

pub mod atomic;
pub mod folder;

pub mod weights;

pub use atomic::AtomicFile;
pub use disk::{Disk, DiskFile, SystemDisk};
pub use error::{Error, Result};
pub use folder::AtomicFolder;
pub use hash::{Hash128, Hasher128};
pub use small::FileLimits;
pub use weights::{Tensors, View, Weights, read_tensors, write_tensors};
