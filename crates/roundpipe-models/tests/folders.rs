//! Folders and files of weights: what is refused and how, and that what is written is what is read.

#[path = "folders/bounds.rs"]
mod bounds;
#[path = "../../roundpipe-files/tests/support/cases.rs"]
mod cases;
#[path = "folders/hub.rs"]
mod hub;
#[path = "folders/kit.rs"]
mod kit;
#[path = "../../roundpipe-files/tests/support/made.rs"]
mod made;
#[path = "folders/malformed.rs"]
mod malformed;
#[path = "folders/mxfp4.rs"]
mod mxfp4;
#[path = "folders/round_trip.rs"]
mod round_trip;
#[cfg(unix)]
#[path = "folders/special.rs"]
mod special;
