//! How much memory there is.
//!
//! Numbers in a file become sizes of memory, so they are compared with this before anything is made
//! of them. Nothing else depends on it: code that checks takes the limit as an argument.

use roundpipe::Bytes;

pub use roundpipe::host_memory::total as host_memory;

/// Compares the sum of some parts with a limit; the error names the largest.
pub(crate) fn fits(parts: &[(&str, u128)], limit: Bytes) -> Result<(), String> {
    let need =
        u64::try_from(parts.iter().map(|(_, bytes)| bytes).sum::<u128>()).unwrap_or(u64::MAX);
    if need <= limit.0 {
        return Ok(());
    }
    let keys = parts
        .iter()
        .max_by_key(|(_, bytes)| *bytes)
        .map_or("", |(keys, _)| keys);
    Err(format!(
        "asks for {} of memory, most of it by {keys}; there are {limit}",
        Bytes(need)
    ))
}
