//! Documents into rows of equal length.
//!
//! A document goes into the open row where it leaves the least room, the oldest of equals. If none
//! has room, a row is opened; if too many are open, the fullest, the oldest of equals, is closed
//! first. A row without room closes at once.
//!
//! Nothing is cut here: a document fits a row by itself.
//!
//! # Invariants
//! - Rows depend on the documents and their order alone.
//! - Every document comes out exactly once, whole, in one row.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use crate::encode::Document;

/// Where a document is from, so that it can be made again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct DocumentPlace {
    /// The epoch.
    pub epoch: u64,
    /// The place in its order.
    pub row: u64,
    /// Which piece of the row, if it was split.
    pub piece: u32,
}

/// The rows that are not in a batch yet, as places of their documents: what a resumed run has to
/// make again.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Carry {
    /// Rows that take further documents.
    pub open: Vec<Vec<DocumentPlace>>,
    /// Rows that wait for a batch.
    pub closed: Vec<Vec<DocumentPlace>>,
}

/// A row and what is in it.
#[derive(Debug, Default)]
pub(crate) struct PackedRow {
    pub documents: Vec<(DocumentPlace, Document)>,
    pub used: usize,
}

impl PackedRow {
    pub fn push(&mut self, place: DocumentPlace, document: Document) {
        self.used += document.inputs();
        self.documents.push((place, document));
    }

    fn places(&self) -> Vec<DocumentPlace> {
        self.documents.iter().map(|(place, _)| *place).collect()
    }
}

/// Fills rows with documents.
#[derive(Debug)]
pub(crate) struct Packer {
    row_tokens: usize,
    most_open: usize,
    pub open: Vec<PackedRow>,
    pub closed: VecDeque<PackedRow>,
}

impl Packer {
    /// Rows of `row_tokens`; with `most_open` 0 every document gets its own.
    pub fn new(row_tokens: usize, most_open: usize) -> Self {
        Self {
            row_tokens,
            most_open,
            open: Vec::new(),
            closed: VecDeque::new(),
        }
    }

    pub fn push(&mut self, place: DocumentPlace, document: Document) {
        let tokens = document.inputs();
        debug_assert!(tokens <= self.row_tokens);
        let fits = |row: &PackedRow| row.used + tokens <= self.row_tokens;
        let candidates = (0..self.open.len()).filter(|index| fits(&self.open[*index]));
        // Of equals `min_by_key` gives the first, and older rows stand before newer ones.
        let best = candidates.min_by_key(|index| self.row_tokens - self.open[*index].used);
        let index = best.unwrap_or_else(|| self.open_row());
        self.open[index].push(place, document);
        if self.most_open == 0 || self.open[index].used == self.row_tokens {
            self.close(index);
        }
    }

    /// Documents that belong together, in a row of their own.
    pub fn push_together(&mut self, documents: Vec<(DocumentPlace, Document)>) {
        let mut row = PackedRow::default();
        for (place, document) in documents {
            row.push(place, document);
        }
        self.closed.push_back(row);
    }

    fn open_row(&mut self) -> usize {
        if self.most_open > 0 && self.open.len() >= self.most_open {
            let room = |index: &usize| self.row_tokens - self.open[*index].used;
            let fullest = (0..self.open.len()).min_by_key(room);
            self.close(fullest.unwrap_or(0));
        }
        self.open.push(PackedRow::default());
        self.open.len() - 1
    }

    fn close(&mut self, index: usize) {
        let row = self.open.remove(index);
        self.closed.push_back(row);
    }

    /// Closes all rows, the oldest first.
    pub fn flush(&mut self) {
        self.closed.extend(self.open.drain(..));
    }

    pub fn carry(&self) -> Carry {
        Carry {
            open: self.open.iter().map(PackedRow::places).collect(),
            closed: self.closed.iter().map(PackedRow::places).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn document(tokens: usize) -> Document {
        Document {
            ids: vec![1; tokens + 1],
            learned: vec![true; tokens + 1],
        }
    }

    /// The lengths in each row that documents of some lengths make.
    fn packed(row: usize, most_open: usize, lengths: &[usize]) -> Vec<Vec<usize>> {
        let mut packer = Packer::new(row, most_open);
        for (number, tokens) in lengths.iter().enumerate() {
            let place = DocumentPlace {
                epoch: 0,
                row: number as u64,
                piece: 0,
            };
            packer.push(place, document(*tokens));
        }
        packer.flush();
        let lengths = |row: PackedRow| row.documents.iter().map(|(_, d)| d.inputs()).collect();
        packer.closed.into_iter().map(lengths).collect()
    }

    #[test]
    fn documents_go_where_they_leave_least_room() {
        // 4 opens a row of 10; 7 does not fit it and opens the next; 3 fills the second, 6 the first.
        let rows = packed(10, 4, &[4, 7, 3, 6, 10, 9]);
        assert_eq!(rows, [vec![7, 3], vec![4, 6], vec![10], vec![9]]);
        // With one open row, the row that has no room is closed.
        let rows = packed(10, 1, &[4, 7, 3, 6]);
        assert_eq!(rows, [vec![4], vec![7, 3], vec![6]]);
        // Two equal rows: the older takes the document; the fullest makes way.
        let rows = packed(10, 2, &[6, 6, 2, 9, 4]);
        assert_eq!(rows, [vec![6, 2], vec![6, 4], vec![9]]);
        let rows = packed(10, 0, &[4, 7, 3]);
        assert_eq!(rows, [vec![4], vec![7], vec![3]]);
    }

    /// Random documents: none is lost, no row is too long, and most of the room is used.
    #[test]
    fn rows_are_nearly_full() {
        for seed in 0..20 {
            let word = |i: u64| crate::hash::words(&[seed, i]);
            let lengths: Vec<usize> = (0..2000).map(|i| 1 + (word(i) % 700) as usize).collect();
            let rows = packed(2048, 16, &lengths);
            let mut all: Vec<usize> = rows.concat();
            assert!(rows.iter().all(|row| row.iter().sum::<usize>() <= 2048));
            let used = all.iter().sum::<usize>() as f64 / (rows.len() * 2048) as f64;
            assert!(used > 0.97, "seed {seed}: {used}");
            let mut want = lengths;
            all.sort_unstable();
            want.sort_unstable();
            assert_eq!(all, want);
        }
    }
}
