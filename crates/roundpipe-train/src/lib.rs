//! A training run from settings to a finished model.
//!
//! ```text
//! Given -> Settings -> RunFolder -> model, data -> engine -> steps -> model/
//!          resolved    locked       looked at      restored   saved, validated, sampled
//! ```
//! [`run`] does all of it and tells a [`Watcher`] what a person should see; the `roundpipe` program
//! is one. A run that was interrupted goes on where its last checkpoint is, with the same bits.
//!
//! This crate has no layers, kernels or formats of its own: data, models, checkpoints and reports
//! come from the crates beside it.
#![forbid(unsafe_code)]

pub mod error;
pub mod settings;

mod bytes;
pub mod cards;
pub mod folder;
pub mod machine;
pub mod profile;

pub mod doctor;
pub mod eval;

pub mod batches;
mod host_limit;
mod model;
mod preference;
mod resolve;
mod samples;

mod progress;
mod start;

pub mod show;
pub mod verify;

mod reference;

mod overview;
pub mod predict;
mod run;
pub mod schedules;

/// What files of examples hold, as [`show`](crate::show::show()) finds it.
pub mod data {
    pub use roundpipe_data::{FileReport, Found, Histogram, NamedRow, SeenRow, Survey, Unit};
}

pub use error::{Error, Result};
pub use folder::{RunFolder, run_model};
pub use progress::{Overview, ShownRow, Watcher};
pub use run::{Outcome, Request, run};
pub use settings::{Given, Settings};
