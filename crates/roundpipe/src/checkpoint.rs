//! Checkpoints: a run on the disk, from which it goes on with the same bits.
//!
//! ```no_run
//! # fn example(engine: roundpipe::RoundPipe) -> roundpipe::Result<()> {
//! let saving = engine.save("run/step-100", r#"{"epoch": 2}"#)?; // written beside training
//! // ... more steps ...
//! let report = saving.wait()?;
//! assert!(report.bytes > 0);
//!
//! let restored = engine.restore("run/step-100")?; // here, or in an engine of another process
//! assert_eq!(restored.notes, r#"{"epoch": 2}"#);
//! # Ok(())
//! # }
//! ```
//!
//! A checkpoint is a folder: `manifest.json` and `state-00001.safetensors`, … In it are, for every
//! trained parameter, its value as the optimizer holds it and its moments; after an update at lag 1
//! the older weights that the next call reads; buffers that layers set; counters, the loss scale and
//! the caller's notes. Frozen parameters are not: they are the model's own, and only their names,
//! types and sizes are compared. Nothing in it depends on the number of workers, their memory, the
//! grain or the plan.
//!
//! The path of a tensor: host memory, held by its layer (`Versions::hold`) -> hash
//! and page cache, in `write` -> flush -> rename of the folder. Back: every hash is compared
//! ([`Checkpoint::verify`]), and only then is anything written over.
//!
//! Refused, each with one line that names the file and the fix: a newer format, a file that is
//! missing, longer, shorter or changed in a single bit, a manifest that is not the one that was
//! written, and a checkpoint of another model, rule or seed.
//!
//! # Invariants
//! - A folder under its own name is a complete checkpoint that is on the disk.
//! - Reading allocates nothing larger than the manifest allows and the files are.
//! - A checkpoint says nothing about the machine that it was written on.

mod copy;
pub(crate) mod manifest;
mod read;
mod saving;
mod shards;
pub(crate) mod state;
pub(crate) mod write;

pub use self::read::Checkpoint;
pub(crate) use self::saving::SaveProgress;
pub use self::saving::{SaveReport, Saving};

/// The file that says what the others hold.
pub(crate) const MANIFEST: &str = "manifest.json";
