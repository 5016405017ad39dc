//! Which file a tensor goes to. Pure arithmetic over sizes.
//!
//! Systems let one thread at a time write to a file, so tensors of a large checkpoint are dealt out
//! to four lanes of files, each written by one thread. Tensors come in the order in which they are
//! to be let go, and each goes to the lane with the fewest bytes: so all lanes are at about the same
//! layer at any time.
//!
//! # Invariants
//! - The result depends on sizes alone, never on the machine.
//! - Inside a file, tensors stand in their order.

/// When files are cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShardLimits {
    /// The most bytes of a file with more than one tensor.
    pub file_bytes: u64,
    /// From how many bytes on a checkpoint has several lanes.
    pub lanes_from_bytes: u64,
}

/// How many files of a large checkpoint are written at a time.
pub(super) const LANES: usize = 4;

impl Default for ShardLimits {
    fn default() -> Self {
        Self {
            file_bytes: 1 << 30,
            lanes_from_bytes: 256 << 20,
        }
    }
}

/// Where the tensors go.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Shards {
    /// The file of each tensor.
    pub files: Vec<usize>,
    /// The lane of each file.
    pub lanes: Vec<usize>,
}

/// Deals tensors of these sizes out to files.
pub(super) fn deal(sizes: &[u64], limits: ShardLimits) -> Shards {
    let total: u64 = sizes.iter().sum();
    let lanes = if total < limits.lanes_from_bytes {
        1
    } else {
        LANES
    };
    let mut lane_bytes = vec![0u64; lanes];
    // The last file of each lane and the bytes in it.
    let mut open: Vec<Option<(usize, u64)>> = vec![None; lanes];
    let mut shards = Shards {
        files: Vec::with_capacity(sizes.len()),
        lanes: Vec::new(),
    };
    for &size in sizes {
        let lane = (0..lanes).min_by_key(|lane| lane_bytes[*lane]).unwrap_or(0);
        lane_bytes[lane] += size;
        let file = match open[lane] {
            Some((file, bytes)) if bytes + size <= limits.file_bytes => {
                open[lane] = Some((file, bytes + size));
                file
            }
            _ => {
                shards.lanes.push(lane);
                let file = shards.lanes.len() - 1;
                open[lane] = Some((file, size));
                file
            }
        };
        shards.files.push(file);
    }
    shards
}

/// The name of a file, by its number from 0 on.
pub(super) fn file_name(index: usize) -> String {
    format!("state-{:05}.safetensors", index + 1)
}

#[cfg(test)]
mod tests {
    use super::{ShardLimits, Shards, deal};

    /// Small checkpoints are one file; large ones have lanes of files that grow alike, and a tensor
    /// larger than a file has its own.
    #[test]
    fn tensors_are_dealt_out_to_files() {
        let limits = ShardLimits {
            file_bytes: 10,
            lanes_from_bytes: 40,
        };
        let small = deal(&[3, 3, 3, 3], limits);
        assert_eq!(
            small,
            Shards {
                files: vec![0, 0, 0, 1],
                lanes: vec![0, 0]
            }
        );
        let large = deal(&[25, 4, 4, 4, 4, 4, 4, 4], limits);
        assert_eq!(large.lanes, [0, 1, 2, 3, 1]);
        assert_eq!(large.files, [0, 1, 2, 3, 1, 2, 3, 4]);
        assert_eq!(deal(&[], limits).lanes, [0; 0]);
    }
}
