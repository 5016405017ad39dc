//! A stable sort of keys on the device, with the places they came from.
//!
//! Who adds at indexed places needs the indices in order of their destination, and equal ones in
//! their own order; who sends tokens to experts needs the same. Keys are u32, sorted by digits of
//! up to [`DIGIT_BITS`] bits, all in scratch memory: two lists of keys and two of items, which take
//! turns, and the counters.
//!
//! # Invariants
//! - The order is a function of the keys alone.
//! - Sizes are functions of the number and bound of the keys, so that meta knows them.

use crate::cuda::call::{Args, Call};
use crate::cuda::compile::Unit;
use crate::error::{Error, Result};

/// Keys whose order one warp keeps.
const TILE: usize = 1024;

/// Most bits of a digit: one warp holds a counter per digit in shared memory.
const DIGIT_BITS: u32 = 10;

/// Least bits of a digit: the counters are shared out to the 32 lanes of a warp.
const LEAST_BITS: u32 = 5;

/// A sort of `count` keys from 0 to `largest`.
#[derive(Debug, Clone, Copy)]
pub(in crate::cuda) struct Sort {
    count: usize,
    passes: u32,
    bits: u32,
}

/// Where a list lies in the scratch memory.
#[derive(Debug, Clone, Copy)]
pub(in crate::cuda) struct Sorted {
    /// u32, in order.
    pub keys: u64,
    /// u32: where each key was before.
    pub items: u64,
}

impl Sort {
    pub fn new(count: usize, largest: usize) -> Self {
        let width = (usize::BITS - largest.leading_zeros()).max(1);
        let passes = width.div_ceil(DIGIT_BITS);
        Self {
            count,
            passes,
            bits: width.div_ceil(passes).max(LEAST_BITS),
        }
    }

    /// Whether keys and places fit into 32 bits.
    pub fn fits(count: usize, largest: usize) -> bool {
        u32::try_from(count).is_ok() && u32::try_from(largest).is_ok()
    }

    /// Refuses what does not fit.
    pub fn checked(op: &'static str, count: usize, largest: usize) -> Result<Self> {
        match Self::fits(count, largest) {
            true => Ok(Self::new(count, largest)),
            false => Err(Error::invalid(
                op,
                format!("{count} indices up to {largest} are too many for a GPU"),
            )),
        }
    }

    fn digits(&self) -> usize {
        1 << self.bits
    }

    fn tiles(&self) -> usize {
        self.count.div_ceil(TILE)
    }

    /// Bytes of one list.
    fn list(&self) -> usize {
        (self.count * 4).next_multiple_of(256)
    }

    /// Bytes of scratch memory.
    pub fn bytes(&self) -> usize {
        4 * self.list() + (self.digits() * (self.tiles() + 1)) * 4
    }

    /// Where the unsorted keys go.
    pub fn keys(&self, scratch: u64) -> u64 {
        scratch
    }

    /// Queues the sort of the keys at [`Sort::keys`].
    ///
    /// # Safety
    /// `scratch` has [`Sort::bytes`], and nothing else uses it until the queued kernels have run.
    pub unsafe fn run(&self, call: &Call<'_>, scratch: u64) -> Result<Sorted> {
        let at = |list: usize| scratch + (list * self.list()) as u64;
        let sides = [
            Sorted {
                keys: at(0),
                items: at(1),
            },
            Sorted {
                keys: at(2),
                items: at(3),
            },
        ];
        let totals = at(4);
        let counts = totals + (self.digits() * 4) as u64;
        let (tiles, digits) = (self.tiles(), self.digits());
        let shared = (digits * 4) as u32;
        for pass in 0..self.passes {
            let (from, to) = (sides[pass as usize % 2], sides[(pass as usize + 1) % 2]);
            let items = if pass == 0 { 0 } else { from.items };
            let shift = (pass * self.bits) as i32;
            let count = || {
                Args::new()
                    .ptr(from.keys)
                    .size(self.count)
                    .i32(shift)
                    .i32(digits as i32)
                    .size(tiles)
            };
            let place = || {
                let args = Args::new()
                    .ptr(from.keys)
                    .ptr(items)
                    .size(self.count)
                    .i32(shift)
                    .i32(digits as i32);
                args.size(tiles)
                    .ptr(counts)
                    .ptr(totals)
                    .ptr(to.keys)
                    .ptr(to.items)
            };
            let scan = || {
                Args::new()
                    .ptr(counts)
                    .size(tiles)
                    .i32(digits as i32)
                    .ptr(totals)
            };
            let warps = digits.div_ceil(8) as u32;
            // SAFETY: the arguments are the kernels' parameters; lists and counters are parts of
            // the scratch memory that do not overlap; every kernel reads what the one before it in
            // the same lane has written.
            unsafe {
                let grid = [tiles as u32, 1, 1];
                call.launch(
                    &unit("sort_count"),
                    grid,
                    [256, 1, 1],
                    shared,
                    &mut count().ptr(counts),
                )?;
                call.launch(
                    &unit("sort_scan"),
                    [warps, 1, 1],
                    [256, 1, 1],
                    0,
                    &mut scan(),
                )?;
                call.launch(&unit("sort_place"), grid, [32, 1, 1], shared, &mut place())?;
            }
        }
        Ok(sides[self.passes as usize % 2])
    }
}

/// A kernel of the file.
pub(in crate::cuda) fn unit(entry: &'static str) -> Unit {
    Unit::new(
        "index_sort",
        include_str!("../kernels/index_sort.cu"),
        entry,
    )
    .with("TILE", TILE)
}

pub(super) fn units() -> Vec<Unit> {
    [
        "index_keys",
        "scatter_keys",
        "sort_count",
        "sort_scan",
        "sort_place",
    ]
    .map(unit)
    .to_vec()
}

#[cfg(test)]
mod tests {
    use super::{LEAST_BITS, Sort, TILE};

    /// The kernels' arithmetic on the host, tile by tile and 32 keys at a time.
    fn sorted(sort: Sort, keys: &[u32]) -> (Vec<u32>, Vec<u32>) {
        let mut now: (Vec<u32>, Vec<u32>) = (keys.to_vec(), (0..keys.len() as u32).collect());
        let (digits, tiles) = (sort.digits(), sort.tiles());
        for pass in 0..sort.passes {
            let digit = |key: u32| (key >> (pass * sort.bits)) as usize & (digits - 1);
            let mut counts = vec![0u32; digits * tiles];
            now.0
                .iter()
                .enumerate()
                .for_each(|(i, key)| counts[digit(*key) * tiles + i / TILE] += 1);
            let mut totals = vec![0u32; digits];
            for (d, total) in totals.iter_mut().enumerate() {
                for count in &mut counts[d * tiles..(d + 1) * tiles] {
                    let here = *count;
                    *count = *total;
                    *total += here;
                }
            }
            let mut next = (vec![0; keys.len()], vec![0; keys.len()]);
            for tile in 0..tiles {
                let mut smaller = 0;
                let mut places: Vec<u32> = (0..digits)
                    .map(|d| {
                        smaller += totals[d];
                        smaller - totals[d] + counts[d * tiles + tile]
                    })
                    .collect();
                for i in tile * TILE..((tile + 1) * TILE).min(keys.len()) {
                    let place = &mut places[digit(now.0[i])];
                    next.0[*place as usize] = now.0[i];
                    next.1[*place as usize] = now.1[i];
                    *place += 1;
                }
            }
            now = next;
        }
        now
    }

    /// Any number of keys and any bound, with the largest key among them.
    #[test]
    fn sorts_stably() {
        for (count, largest) in [
            (0, 3),
            (1, 0),
            (5, 1),
            (3000, 31),
            (5000, 1023),
            (2500, 1024),
            (4100, 150_000),
        ] {
            let sort = Sort::new(count, largest);
            assert!(
                sort.bits >= LEAST_BITS && sort.bits <= super::DIGIT_BITS,
                "{sort:?}"
            );
            let keys: Vec<u32> = (0..count)
                .map(|i| ((largest + i * i * 7919) % (largest + 1)) as u32)
                .collect();
            let mut want: Vec<u32> = (0..count as u32).collect();
            want.sort_by_key(|i| keys[*i as usize]);
            let (have_keys, have) = sorted(sort, &keys);
            assert_eq!(have, want, "{count} keys up to {largest}");
            assert!(have_keys.is_sorted());
        }
    }

    #[test]
    fn passes_cover_the_largest_key() {
        for largest in [0usize, 1, 31, 32, 1023, 1024, 1 << 20, u32::MAX as usize] {
            let sort = Sort::new(9, largest);
            assert!(
                u64::from(sort.passes * sort.bits) >= 64 - (largest as u64).leading_zeros() as u64
            );
            assert!(
                (sort.passes - 1) * sort.bits < 32,
                "a shift of {sort:?} is too far"
            );
        }
    }
}
