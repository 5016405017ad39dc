//! Conformance: one body per case, run on every backend, in every float type.
//!
//! `bed` holds the checks that every case passes; the other files hold the cases, one per family of
//! operations.

mod arith;
mod bed;
mod golden;
mod image;
mod index;
mod loss;
mod moe;
mod random;
mod reduce;
mod views;
