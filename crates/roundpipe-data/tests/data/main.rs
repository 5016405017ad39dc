//! Files to batches: formats, hostile files, masks, packing, resuming.

mod files;
mod formats;
mod hostile;
mod kit;
mod masks;
mod model;
mod preference;
mod streams;
