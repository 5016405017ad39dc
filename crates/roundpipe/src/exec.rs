//! Executors: a call's tasks on the workers of a ring.
//!
//! The flow of one microbatch: a slot's [`launcher`] receives what the slot before sent, runs its
//! layers ([`visit`]), and sends what the next one needs; all values of a call meet in [`call`].
//! Weights come in and gradients go out beside it ([`copier`]); the optimizer follows when all
//! gradients have landed ([`stepper`]). [`ring`] holds the threads, or none: the serial executor
//! runs the same tasks one after another on the caller's thread, and is the oracle of the threaded
//! one.
//!
//! # Rules
//! 1. Slot `i` of a call runs on worker `(g0 + i) mod N`, all microbatches in order; `g0` carries
//!    over.
//! 2. All tasks of a call read one version of the weights.
//! 3. Gradients of a layer are summed in the order of microbatches, in the accumulator type, on the
//!    worker that runs its backward, and rounded once when they leave it. Every layer has sums of
//!    its own.
//! 4. A random number depends on (seed, call, microbatch, layer, site) only.
//! 5. A failure is kept by its call, which then ends as if it had not begun: no buffer is written,
//!    no version published. Calls of its engine that were submitted after it fail as well; those
//!    before it do not. Only what a device itself reports fails all calls on the ring.
//!
//! The order of copies against kernels is `roundpipe_tensor::transfer`'s; that of weights against
//! updates is [`crate::version`]'s.

pub(crate) mod call;
pub(crate) mod copy_threads;
pub(crate) mod launcher;
pub(crate) mod optimizer_thread;
pub mod ring;
pub(crate) mod run_layer;
