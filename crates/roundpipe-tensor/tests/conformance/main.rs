//! Conformance: one body per case, run on every backend, in every float type.
//!
//! `bed` holds the checks that every case passes; the other files hold the cases, one per family of
//! operations.

mod arith;
mod attention;
mod bed;
mod blocks;
mod cache;
mod decode;
mod fp8;
mod golden;
mod image;
mod index;
mod loss;
mod moe;
mod norm;
mod product;
mod quantized;
mod random;
mod reduce;
mod rope;
#[path = "../support/skip.rs"]
mod skip;
mod views;
