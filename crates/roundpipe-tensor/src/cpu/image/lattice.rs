//! Which source elements meet which destination positions, and how positions are cut into blocks.

use std::ops::Range;

/// One tap of a filter along one axis.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Tap {
    /// Its place in the filter.
    pub at: usize,
    /// The source coordinate it meets at position 0; outside the source means nothing.
    pub offset: isize,
}

/// The positions along one axis: position i is destination `first + i · stride` and meets source
/// coordinate `offset + i · step` of every tap.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Axis {
    /// Positions.
    pub count: usize,
    /// Size of the source.
    pub size: usize,
    pub step: usize,
    pub first: usize,
    pub stride: usize,
    pub taps: Vec<Tap>,
}

/// Geometry of a window along one axis.
#[derive(Debug, Clone, Copy)]
pub(super) struct WindowAxis {
    pub kernel: usize,
    pub stride: usize,
    pub padding: usize,
    pub dilation: usize,
}

impl Axis {
    /// From `size` elements to `count` windows.
    pub fn forward(size: usize, count: usize, window: WindowAxis) -> Self {
        let WindowAxis {
            kernel,
            stride,
            padding,
            dilation,
        } = window;
        let offset = |k: usize| (k * dilation) as isize - padding as isize;
        let taps = (0..kernel)
            .map(|at| Tap {
                at,
                offset: offset(at),
            })
            .collect();
        Self {
            count,
            size,
            step: stride,
            first: 0,
            stride: 1,
            taps,
        }
    }

    /// From `count` windows back to the elements `residue`, `residue + stride`, … of `size`: the
    /// taps that reach such elements meet neighbouring windows, the other taps none.
    pub fn backward(size: usize, count: usize, window: WindowAxis, residue: usize) -> Self {
        let WindowAxis {
            kernel,
            stride,
            padding,
            dilation,
        } = window;
        let place = |k: usize| (residue + padding) as isize - (k * dilation) as isize;
        let taps = (0..kernel)
            .filter(|&k| place(k).rem_euclid(stride as isize) == 0)
            .map(|at| Tap {
                at,
                offset: place(at).div_euclid(stride as isize),
            })
            .collect();
        let positions = size.saturating_sub(residue).div_ceil(stride);
        Self {
            count: positions,
            size: count,
            step: 1,
            first: residue,
            stride,
            taps,
        }
    }

    /// Every element is its own window.
    pub fn identity(size: usize) -> Self {
        Self::forward(
            size,
            size,
            WindowAxis {
                kernel: 1,
                stride: 1,
                padding: 0,
                dilation: 1,
            },
        )
    }

    /// Whether columns would be the source itself.
    pub fn is_identity(&self) -> bool {
        *self == Self::identity(self.size)
    }

    /// The positions where `tap` meets an element.
    pub fn valid(&self, tap: Tap) -> Range<usize> {
        let low = tap.offset.min(0).unsigned_abs().div_ceil(self.step);
        let reach = (self.size as isize - tap.offset).max(0) as usize;
        let high = reach.div_ceil(self.step).min(self.count);
        low.min(high)..high
    }

    /// The source coordinate that `tap` meets at position `i`, if there is one.
    pub fn meets(&self, tap: Tap, i: usize) -> Option<usize> {
        let at = tap.offset + (i * self.step) as isize;
        usize::try_from(at).ok().filter(|at| *at < self.size)
    }
}

/// Positions whose columns are laid out at one time: of one image a range, or of some images all.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct PositionBlock {
    pub images: Range<usize>,
    pub positions: Range<usize>,
}

impl PositionBlock {
    /// Number of columns.
    pub fn columns(&self) -> usize {
        self.images.len() * self.positions.len()
    }
}

/// How the positions of a batch are cut; a function of sizes alone.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct PositionSplit {
    images: usize,
    positions: usize,
    /// Images, and positions of each, per block.
    images_each: usize,
    positions_each: usize,
}

/// Columns of a block: enough that laying out the filter for the product does not count, …
const FEW_COLUMNS: usize = 512;
/// … not more than the product's own blocks, and few enough that they stay in cache …
const MANY_COLUMNS: usize = 2048;
const CACHE_BYTES: usize = 4 << 20;
/// … and, for filters with very many channels, that they stay within this.
const MOST_BYTES: usize = 64 << 20;

impl PositionSplit {
    /// For `images` of `positions`, where a column takes `column_bytes`.
    pub fn new(images: usize, positions: usize, column_bytes: usize) -> Self {
        let bytes = column_bytes.max(1);
        let few = FEW_COLUMNS.min(MOST_BYTES / bytes).max(16);
        let most = (CACHE_BYTES / bytes).clamp(few, MANY_COLUMNS);
        let (images_each, positions_each) = match positions {
            0 => (1, 1),
            p if p >= most => (1, p.div_ceil(p.div_ceil(most))),
            p => ((most / p).min(images.max(1)), p),
        };
        Self {
            images,
            positions,
            images_each,
            positions_each,
        }
    }

    /// Most columns of a block.
    pub fn columns(&self) -> usize {
        self.images_each * self.positions_each
    }

    /// The blocks, in order.
    pub fn blocks(self) -> impl Iterator<Item = PositionBlock> {
        let images = (0..self.images).step_by(self.images_each);
        images.flat_map(move |image| {
            let images = image..(image + self.images_each).min(self.images);
            (0..self.positions)
                .step_by(self.positions_each)
                .map(move |start| PositionBlock {
                    images: images.clone(),
                    positions: start..(start + self.positions_each).min(self.positions),
                })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::{Axis, PositionSplit, WindowAxis};

    /// Forward and backward name the same pairs (element, window, tap).
    #[test]
    fn both_directions_meet_the_same_pairs() {
        for (size, kernel, stride, padding, dilation) in [
            (9, 3, 1, 1, 1),
            (8, 3, 2, 1, 1),
            (10, 2, 3, 0, 2),
            (7, 5, 2, 4, 2),
            (5, 1, 2, 0, 1),
            (1, 3, 1, 1, 1),
        ] {
            let window = WindowAxis {
                kernel,
                stride,
                padding,
                dilation,
            };
            let count = (size + 2 * padding - dilation * (kernel - 1) - 1) / stride + 1;
            let mut there = Vec::new();
            let forward = Axis::forward(size, count, window);
            for &tap in &forward.taps {
                let valid = forward.valid(tap);
                for i in 0..count {
                    let element = forward.meets(tap, i);
                    assert_eq!(element.is_some(), valid.contains(&i), "{window:?}");
                    there.extend(element.map(|element| (element, i, tap.at)));
                }
            }
            let mut back = Vec::new();
            for residue in 0..stride {
                let axis = Axis::backward(size, count, window, residue);
                for &tap in &axis.taps {
                    let met = (0..axis.count).filter_map(|i| Some((i, axis.meets(tap, i)?)));
                    back.extend(met.map(|(i, at)| (axis.first + i * axis.stride, at, tap.at)));
                }
            }
            there.sort_unstable();
            back.sort_unstable();
            assert_eq!(there, back, "{window:?} over {size}");
        }
    }

    #[test]
    fn blocks_cover_every_position_once() {
        for (images, positions, bytes) in [
            (3, 49, 400),
            (2, 5000, 40_000),
            (1, 1, 1),
            (0, 9, 9),
            (4, 0, 9),
        ] {
            let cut = PositionSplit::new(images, positions, bytes);
            let mut hits = vec![0; images * positions];
            for block in cut.blocks() {
                assert!(block.columns() <= cut.columns());
                for image in block.images {
                    block
                        .positions
                        .clone()
                        .for_each(|p| hits[image * positions + p] += 1);
                }
            }
            assert!(
                hits.iter().all(|h| *h == 1),
                "{images} images of {positions}"
            );
        }
    }
}
