//! Happens-before: who accessed which bytes last, and whether the next access is ordered after
//! that.
//!
//! Every lane counts its items. A [`VectorClock`] says, per lane, up to which item everything has
//! happened before the owner of the clock. An access is ordered after another exactly when its
//! clock has reached the other's item. Per byte range the last write is kept, and those reads since
//! that no later read is ordered after.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use crate::kernel::View;

/// Per lane, the number of the last item that has happened before.
#[derive(Debug, Clone, Default)]
pub(super) struct VectorClock(Vec<u64>);

impl VectorClock {
    pub fn has(&self, lane: usize, seq: u64) -> bool {
        self.0.get(lane).is_some_and(|at| *at >= seq)
    }

    pub fn reach(&mut self, lane: usize, seq: u64) {
        if self.0.len() <= lane {
            self.0.resize(lane + 1, 0);
        }
        self.0[lane] = self.0[lane].max(seq);
    }

    pub fn join(&mut self, other: &Self) {
        for (lane, seq) in other.0.iter().enumerate() {
            self.reach(lane, *seq);
        }
    }

    /// Whether joining `other` would change nothing.
    pub fn covers(&self, other: &Self) -> bool {
        other
            .0
            .iter()
            .enumerate()
            .all(|(lane, seq)| *seq == 0 || self.has(lane, *seq))
    }
}

/// One item that touched some bytes.
#[derive(Debug, Clone)]
pub(super) struct Access {
    pub lane: usize,
    pub seq: u64,
    /// What it was, for reports.
    pub name: Arc<str>,
    /// It gave the bytes back to the pool.
    pub free: bool,
}

/// Two accesses without order; the one that ran first stands first.
#[derive(Debug)]
pub(super) struct Clash {
    pub range: Range<u64>,
    pub first: Access,
    pub first_wrote: bool,
}

#[derive(Debug, Clone, Default)]
struct ByteHistory {
    end: u64,
    write: Option<Access>,
    reads: Vec<Access>,
}

/// The history of every byte, as disjoint ranges by address.
#[derive(Debug, Default)]
pub(super) struct AccessHistory {
    cells: BTreeMap<u64, ByteHistory>,
}

impl AccessHistory {
    /// Notes a read; gives the writes it is not ordered after.
    pub fn read(
        &mut self,
        range: Range<u64>,
        access: &Access,
        clock: &VectorClock,
        clashes: &mut Vec<Clash>,
    ) {
        self.cut(&range);
        let mut gaps = Vec::new();
        let mut at = range.start;
        for (&start, cell) in self.cells.range_mut(range.clone()) {
            if start > at {
                gaps.push(at..start);
            }
            at = cell.end;
            if let Some(write) = cell.write.as_ref().filter(|w| !clock.has(w.lane, w.seq)) {
                clashes.push(Clash {
                    range: start..cell.end,
                    first: write.clone(),
                    first_wrote: true,
                });
            }
            // A write ordered after this read is ordered after all that this read is ordered after.
            cell.reads.retain(|r| !clock.has(r.lane, r.seq));
            cell.reads.push(access.clone());
        }
        gaps.push(at..range.end);
        for gap in gaps.into_iter().filter(|g| !g.is_empty()) {
            self.cells.insert(
                gap.start,
                ByteHistory {
                    end: gap.end,
                    write: None,
                    reads: vec![access.clone()],
                },
            );
        }
    }

    /// Notes a write; gives the writes and reads it is not ordered after.
    pub fn write(
        &mut self,
        range: Range<u64>,
        access: &Access,
        clock: &VectorClock,
        clashes: &mut Vec<Clash>,
    ) {
        let cells = self.forget(range.clone());
        for (start, cell) in cells {
            let reads = cell.reads.into_iter().map(|r| (r, false));
            for (first, first_wrote) in cell.write.into_iter().map(|w| (w, true)).chain(reads) {
                if !clock.has(first.lane, first.seq) {
                    clashes.push(Clash {
                        range: start..cell.end,
                        first,
                        first_wrote,
                    });
                }
            }
        }
        if !range.is_empty() {
            let cell = ByteHistory {
                end: range.end,
                write: Some(access.clone()),
                reads: Vec::new(),
            };
            self.cells.insert(range.start, cell);
        }
    }

    /// Takes the history of a range out.
    fn forget(&mut self, range: Range<u64>) -> Vec<(u64, ByteHistory)> {
        self.cut(&range);
        let starts: Vec<u64> = self.cells.range(range).map(|(start, _)| *start).collect();
        starts
            .into_iter()
            .filter_map(|start| Some((start, self.cells.remove(&start)?)))
            .collect()
    }

    /// Forgets a range that is no memory any more.
    pub fn clear(&mut self, range: Range<u64>) {
        self.forget(range);
    }

    /// Lets cells begin and end at the ends of `range`.
    fn cut(&mut self, range: &Range<u64>) {
        for at in [range.start, range.end] {
            if let Some((_, cell)) = self.cells.range_mut(..at).next_back()
                && cell.end > at
            {
                let tail = cell.clone();
                cell.end = at;
                self.cells.insert(at, tail);
            }
        }
    }
}

/// Ranges of one view are at most this many in the ledger; beyond, neighbouring rows count as one.
pub(super) const MOST_RANGES: usize = 4096;

/// The byte ranges a view touches: dense runs, at most `most` of them.
pub(super) fn ranges(view: &View, most: usize) -> Vec<Range<u64>> {
    let Some((low, _)) = view.extent() else {
        return Vec::new();
    };
    let size = view.dtype.size() as u64;
    let dims = view.shape().dims().iter().zip(view.layout.strides());
    let mut dims: Vec<(u64, u64)> = dims
        .filter(|(n, s)| **n > 1 && **s != 0)
        .map(|(n, s)| (*n as u64, s.unsigned_abs() as u64))
        .collect();
    dims.sort_by_key(|(_, stride)| *stride);
    let count = |rest: &[(u64, u64)]| rest.iter().fold(1u64, |all, (n, _)| all.saturating_mul(*n));
    let (mut run, mut rest) = (1, &dims[..]);
    while let Some(((n, stride), tail)) = rest.split_first()
        && (*stride <= run || count(rest) > most as u64)
    {
        run += (n - 1) * stride;
        rest = tail;
    }
    let mut starts = vec![low];
    for (n, stride) in rest.iter().rev() {
        starts = starts
            .iter()
            .flat_map(|s| (0..*n).map(move |i| s + i * stride * size))
            .collect();
    }
    starts
        .into_iter()
        .map(|start| start..start + run * size)
        .collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::{Access, AccessHistory, Clash, MOST_RANGES, VectorClock, ranges};
    use crate::dtype::DType;
    use crate::kernel::View;
    use crate::shape::{Layout, Shape};

    fn access(lane: usize, seq: u64) -> (Access, VectorClock) {
        let mut clock = VectorClock::default();
        clock.reach(lane, seq);
        (
            Access {
                lane,
                seq,
                name: Arc::from("x"),
                free: false,
            },
            clock,
        )
    }

    fn view(shape: &[usize], strides: &[isize]) -> View {
        let layout = Layout::strided(Shape::new(shape).unwrap(), strides);
        View {
            ptr: 1000,
            dtype: DType::F32,
            layout,
        }
    }

    /// Two halves of one tensor must not seem to touch each other's bytes.
    #[test]
    fn strided_views_are_cut_into_rows() {
        let rows = |shape: &[usize], strides: &[isize], most: usize| -> Vec<(u64, u64)> {
            ranges(&view(shape, strides), most)
                .into_iter()
                .map(|r| (r.start, r.end))
                .collect()
        };
        assert_eq!(
            rows(&[3, 2], &[4, 1], MOST_RANGES),
            [(1000, 1008), (1016, 1024), (1032, 1040)]
        );
        assert_eq!(
            rows(&[2, 3], &[1, 2], MOST_RANGES),
            [(1000, 1024)],
            "a transposed dense view"
        );
        assert_eq!(
            rows(&[5, 2], &[0, 1], MOST_RANGES),
            [(1000, 1008)],
            "broadcast"
        );
        assert_eq!(
            rows(&[3, 2], &[-4, 1], MOST_RANGES),
            [(968, 976), (984, 992), (1000, 1008)]
        );
        assert_eq!(rows(&[0, 2], &[2, 1], MOST_RANGES), []);
        assert_eq!(
            rows(&[2, 9, 2], &[100, 4, 1], 8),
            [(1000, 1136), (1400, 1536)],
            "too many rows"
        );
    }

    /// Reads share; a write must come after the last write and after every read since.
    #[test]
    fn unordered_accesses_are_found_by_range() {
        let mut ledger = AccessHistory::default();
        let mut clashes: Vec<Clash> = Vec::new();
        let (writer, clock) = access(0, 1);
        ledger.write(0..100, &writer, &clock, &mut clashes);
        let (reader, mut clock) = access(1, 1);
        ledger.read(100..120, &reader, &clock, &mut clashes);
        assert!(
            clashes.is_empty(),
            "bytes beside the written ones are free to read"
        );
        ledger.read(40..60, &reader, &clock, &mut clashes);
        assert_eq!(clashes.len(), 1);
        assert_eq!(
            (clashes[0].range.clone(), clashes[0].first.lane),
            (40..60, 0)
        );
        clock.join(&access(0, 1).1);
        clashes.clear();
        ledger.read(40..60, &reader, &clock, &mut clashes);
        assert!(clashes.is_empty(), "ordered by the joined clock");
        let (writer, clock) = access(0, 2);
        ledger.write(0..50, &writer, &clock, &mut clashes);
        assert_eq!(clashes.len(), 1, "the read of 40..50 is not ordered before");
        assert!(!clashes[0].first_wrote);
        clashes.clear();
        ledger.write(0..50, &writer, &clock, &mut clashes);
        assert!(clashes.is_empty(), "a write supersedes what was before");
    }
}
