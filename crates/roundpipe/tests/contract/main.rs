//! What the package promises, row by row, and what it says to a user who gets it wrong.
//!
//! `rows.md` has every item of the published pages of RoundPipe, `cases.md` every case of its test
//! suite; `tables` checks that each row names tests that exist or says why there is none. The other
//! modules run what no other test of the workspace does.

mod adam;
mod batches;
mod calls;
mod kit;
mod misuse;
mod plans;
mod steps;
mod tables;
mod trees;
