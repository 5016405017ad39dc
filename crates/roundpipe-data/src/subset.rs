//! Some of the rows of a file, found by their rank: one bit per row.

/// Rows between two entries of the directory.
const SPAN: usize = 4096;
const WORDS: usize = SPAN / 64;

/// A set of row numbers.
#[derive(Debug, Clone)]
pub(crate) struct Subset {
    words: Vec<u64>,
    /// Members before each span.
    before: Vec<u32>,
    count: usize,
}

impl Subset {
    /// The rows of `0..rows` that `is_member` names.
    pub fn new(rows: usize, mut is_member: impl FnMut(usize) -> bool) -> Self {
        let mut words = vec![0u64; rows.div_ceil(64)];
        for row in (0..rows).filter(|row| is_member(*row)) {
            words[row / 64] |= 1 << (row % 64);
        }
        let mut before = Vec::new();
        let mut count = 0;
        for span in words.chunks(WORDS) {
            before.push(count as u32);
            count += span
                .iter()
                .map(|word| word.count_ones() as usize)
                .sum::<usize>();
        }
        Self {
            words,
            before,
            count,
        }
    }

    pub fn len(&self) -> usize {
        self.count
    }

    pub fn has(&self, row: usize) -> bool {
        self.words[row / 64] >> (row % 64) & 1 == 1
    }

    /// The member with `rank` members before it.
    pub fn nth(&self, rank: usize) -> usize {
        let span = self
            .before
            .partition_point(|before| *before as usize <= rank)
            - 1;
        let mut left = rank - self.before[span] as usize;
        let mut word = span * WORDS;
        while self.words[word].count_ones() as usize <= left {
            left -= self.words[word].count_ones() as usize;
            word += 1;
        }
        let mut bits = self.words[word];
        for _ in 0..left {
            bits &= bits - 1;
        }
        word * 64 + bits.trailing_zeros() as usize
    }
}

#[cfg(test)]
mod tests {
    use super::Subset;

    #[test]
    fn ranks_find_members() {
        for (rows, step) in [(1, 1), (64, 1), (10_000, 7), (20_000, 5000), (9000, 1)] {
            let set = Subset::new(rows, |row| row % step == 0);
            let want: Vec<usize> = (0..rows).step_by(step).collect();
            let found: Vec<usize> = (0..set.len()).map(|rank| set.nth(rank)).collect();
            assert_eq!(found, want);
            assert!(set.has(0) && (step == 1 || !set.has(1)));
        }
    }
}
