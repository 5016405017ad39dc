//! The engine: the same bits as a plain loop, whatever runs where; failures that leave no trace.

mod api;
mod chains;
mod checkpoint_files;
mod checkpoints;
mod data;
mod early;
mod early_rows;
mod faults;
mod finite;
mod gpu;
mod groups;
mod held;
mod hooks;
mod host_loss;
mod invisible;
mod kept;
mod mean_loss;
mod memory;
mod misuse;
mod models;
mod modules;
mod repeats;
mod scaled;
mod simulation;
mod state;
mod written;
