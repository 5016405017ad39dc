//! Executors: a call's tasks on the workers of a ring.
//!
//! The path of one microbatch: the [`launcher`] of a stage's worker receives what the previous stage
//! passed on, runs the layers ([`forward`], [`backward`], [`run_layer`]) and hands on what the next
//! stage needs ([`worker_values`]). All values of a call meet in [`call`]. Weights come in and gradients go
//! out beside it ([`weights`], [`copy_threads`]); the optimizer follows when all gradients have
//! landed ([`optimizer_thread`]). [`ring`] owns the threads, or none: the serial executor runs the
//! same jobs one after another on the caller's thread, and is the oracle of the threaded one.
//!
//! # Rules
//! 1. Stages go to workers by [`crate::schedule`]; a worker runs all microbatches of a stage in
//!    order.
//! 2. All tasks of a call read one version of the weights.
//! 3. Gradients of a layer are summed in the order of microbatches, in the accumulator type, on the
//!    worker that runs its backward, and rounded once per call when they leave it. Every layer has
//!    its own sums.
//! 4. A random number depends on (seed, call, microbatch, layer, site) only.
//! 5. A failed call leaves nothing behind: it writes no buffer and publishes no version. Calls of
//!    its engine that were submitted after it fail as well, earlier ones do not. Only a failure of
//!    the device itself fails all calls on the ring.
//!
//! [`roundpipe_tensor::transfer`] orders copies against kernels; [`crate::version`] orders uploads
//! of weights against updates.

mod backward;
pub(crate) mod call;
pub(crate) mod copy_threads;
mod data_check;
pub(crate) mod early_rows;
pub(crate) mod early_weights;
pub mod ending;
mod forward;
pub(crate) mod held_weights;
pub(crate) mod hooks;
mod kept_weights;
pub(crate) mod launcher;
pub(crate) mod model;
pub(crate) mod optimizer_thread;
mod pace;
pub(crate) mod queue;
pub(crate) mod repeats;
pub mod ring;
pub(crate) mod row_gradients;
pub(crate) mod run_layer;
pub(crate) mod stage_value;
mod step_update;
mod task;
mod weights;
mod worker_values;
