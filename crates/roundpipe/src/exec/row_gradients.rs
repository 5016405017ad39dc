//! Gradients of a table of which a call has read some rows: only these rows leave the worker.
//!
//! The gradient of a table of embeddings is the last one of a step to be final, and an update at lag 0
//! waits for it. It is zero but for the rows that the call's tokens name. So the worker gathers these
//! rows, they land in memory of their own, block by block, and threads write them to their places in
//! the gradient's memory, where all others are zero.
//!
//! The path of a row: sum on the worker -> gathered and rounded ([`Launcher::rounded_beside`]) ->
//! staging memory -> its place in the gradient ([`RowLanding`]).
//!
//! The whole gradient leaves where a call cannot name its rows, adds to the gradients of an earlier
//! one, reads more than half of the table, or finds no room for the rows on the worker.
//!
//! # Invariants
//! - The gradient in host memory has the bits that it would have had if it had left whole.
//! - Rows count as zero only until something else writes to that memory.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use roundpipe_tensor::cpu::threads::Threads;
use roundpipe_tensor::device::{Event, Flight};
use roundpipe_tensor::host::HostMut;
use roundpipe_tensor::transfer::{HostValue, Port};
use roundpipe_tensor::{DType, HostBuf, HostMark, Shape, Tensor};

use super::call::Call;
use super::copy_threads::{CHUNK, Gradient};
use super::early_rows::{CallRows, TABLE, write_places};
use super::launcher::Launcher;
use super::task::Task;
use crate::error::Result;
use crate::sync::lock;
use crate::update::each_part;

/// Blocks of a gradient whose rows are on their way at a time.
const MOST_STAGED: usize = 4;
/// What one thread writes at a time.
const PART_BYTES: usize = 256 << 10;

/// A sum that is final, in the type in which it is stored.
pub(crate) struct Rounded {
    pub tensor: Tensor,
    /// The rows that it consists of, if it is not the whole gradient.
    pub rows: Option<Arc<CallRows>>,
}

impl Launcher {
    /// A sum, rounded, or what there is of it in rows, where tasks do not need the room; `None` where
    /// they do.
    pub(super) fn rounded_beside(
        &self,
        task: &Task<'_>,
        layer: usize,
        sum: &Tensor,
        dtype: DType,
    ) -> roundpipe_tensor::Result<Option<Rounded>> {
        if let Some(rows) = self.rows_of_sum(task, layer, sum)
            && let Some(tensor) = self.gathered_beside(&rows, sum, dtype)?
        {
            let rows = Some(rows);
            return Ok(Some(Rounded { tensor, rows }));
        }
        let working = self.next_working();
        let whole = self.worker().copied_beside(sum, dtype, working)?;
        Ok(whole.map(|tensor| Rounded { tensor, rows: None }))
    }

    /// The rows of a sum that may be other than zero, where it is worth while to send only these.
    fn rows_of_sum(&self, task: &Task<'_>, layer: usize, sum: &Tensor) -> Option<Arc<CallRows>> {
        if layer != TABLE || self.worker().device().aliases_host() {
            return None;
        }
        let rows = task.spec().table_rows.clone()?;
        // A sum that starts from an earlier call's gradients has theirs in all rows.
        let is_own = task.call.adds_to().is_none();
        let is_part = !rows.all.is_empty() && 2 * rows.all.len() <= sum.dims()[0];
        (is_own && is_part && sum.numel() > 0).then_some(rows)
    }

    fn gathered_beside(
        &self,
        rows: &CallRows,
        sum: &Tensor,
        dtype: DType,
    ) -> roundpipe_tensor::Result<Option<Tensor>> {
        let working = self.next_working();
        let shape = Shape::new(&[rows.all.len()])?;
        let pool = self.port.host_pool();
        let places = HostValue::written_by_host(pool, DType::I32, shape, |memory| {
            let mut places = memory.write(0..memory.len())?;
            write_places(&rows.all, places.as_mut_slice());
            Ok::<_, roundpipe_tensor::Error>(())
        })?;
        let places = self
            .port
            .receive_beside("rows of a gradient", &places, working)?;
        let Some(places) = places else {
            return Ok(None);
        };
        self.worker()
            .rows_beside(sum, &places.land()?, dtype, working)
    }
}

/// What is known of a table's gradient in host memory: which rows may be other than zero.
#[derive(Default)]
pub(crate) struct LandedRows(Mutex<Option<KnownRows>>);

struct KnownRows {
    rows: Arc<CallRows>,
    /// The memory when they had landed.
    mark: HostMark,
}

impl LandedRows {
    /// The rows of `gradient` that may be other than zero; `None` when all may. Until
    /// [`LandedRows::set`] nothing is known, since the caller is about to write there.
    fn take(&self, gradient: &HostBuf) -> Option<Arc<CallRows>> {
        let known = lock(&self.0).take();
        if gradient.is_untouched() {
            return Some(Arc::default());
        }
        let known = known.filter(|known| known.mark == gradient.mark());
        known.map(|known| known.rows)
    }

    /// These rows are there, and all others are zero.
    fn set(&self, gradient: &HostBuf, rows: Arc<CallRows>) {
        let mark = gradient.mark();
        *lock(&self.0) = Some(KnownRows { rows, mark });
    }
}

/// Rows of a gradient on their way to their places.
pub(super) struct RowLanding {
    layer: usize,
    param: usize,
    tensor: Tensor,
    rows: Arc<CallRows>,
    /// The memory of the whole gradient.
    gradient: HostBuf,
    row_bytes: usize,
}

/// Neighbouring rows of the gradient that land together.
struct Block {
    places: Range<usize>,
    /// Which of the call's rows are among them.
    rows: Range<usize>,
}

/// A block whose rows are being copied, if it has any.
type StagedBlock = (Block, Option<Flight<(Tensor, HostMut)>>);

impl RowLanding {
    /// `gradient` is the memory of the whole gradient.
    pub fn new(gradient: Gradient, rows: Arc<CallRows>, memory: HostBuf) -> Self {
        let row_bytes = gradient.tensor.size_bytes() / rows.all.len();
        Self {
            layer: gradient.layer,
            param: gradient.param,
            tensor: gradient.tensor,
            rows,
            gradient: memory,
            row_bytes,
        }
    }

    /// Copies the rows to the host behind `after`, and writes them to their places.
    ///
    /// # Errors
    /// When the system has no memory or the device fails.
    pub fn land(&self, port: &Port, call: &Call, after: &Event) -> Result<()> {
        if !port.worker().device().moves_bytes() {
            // Nothing comes, and memory of the host that is only counted is not touched.
            after.fence()?;
            call.mark_part_landed(self.layer, self.param, self.gradient.len());
            return Ok(());
        }
        let landed_rows = &call.spec.model.landed_rows;
        let before = landed_rows.take(&self.gradient);
        let blocks = self.blocks();
        let block_bytes = blocks.first().map_or(0, |block| block.places.len()) * self.row_bytes;
        let bytes = MOST_STAGED.min(blocks.len()) * block_bytes;
        let landed = port.host_pool().lend(bytes, |staging| {
            let mut under_way = VecDeque::with_capacity(MOST_STAGED);
            for (i, block) in blocks.into_iter().enumerate() {
                if under_way.len() == MOST_STAGED {
                    let first = under_way.pop_front();
                    first.map_or(Ok(()), |staged| self.place(call, staged, before.as_deref()))?;
                }
                let at = i % MOST_STAGED * block_bytes;
                let flight = self.start(port, &block, (staging, at), after)?;
                under_way.push_back((block, flight));
            }
            let mut left = under_way.into_iter();
            left.try_for_each(|staged| self.place(call, staged, before.as_deref()))
        })?;
        landed?;
        landed_rows.set(&self.gradient, self.rows.clone());
        Ok(())
    }

    /// All rows of the gradient, cut where its parts would be if it landed whole.
    fn blocks(&self) -> Vec<Block> {
        let all = &self.rows.all;
        let count = self.gradient.len() / self.row_bytes;
        let most = (CHUNK as usize / self.row_bytes).clamp(1, count);
        let starts = (0..count).step_by(most);
        let blocks = starts.map(|start| {
            let places = start..count.min(start + most);
            Block {
                rows: rows_at(all, &places),
                places,
            }
        });
        blocks.collect()
    }

    /// Starts copying the rows of a block to `staging`, from byte `at` on.
    fn start(
        &self,
        port: &Port,
        block: &Block,
        (staging, at): (&HostBuf, usize),
        after: &Event,
    ) -> Result<Option<Flight<(Tensor, HostMut)>>> {
        if block.rows.is_empty() {
            return Ok(None);
        }
        let rows = self.tensor.rows(block.rows.clone());
        let memory = staging.write(at..at + rows.size_bytes())?;
        let flights = port.unload("rows of a gradient", &rows, after, vec![memory])?;
        Ok(flights.into_iter().next())
    }

    /// Writes the rows of a block that have landed, and zeros where `before` has rows.
    fn place(
        &self,
        call: &Call,
        (block, flight): StagedBlock,
        before: Option<&CallRows>,
    ) -> Result<()> {
        let mut staged = flight.map(Flight::land).transpose()?;
        let values = match &mut staged {
            Some((_, memory)) => memory.bytes(),
            None => &mut [],
        };
        let rows = RowsOfBlock {
            rows: &self.rows.all[block.rows.clone()],
            values,
            before: before.map(|before| &before.all[rows_at(&before.all, &block.places)]),
            row_bytes: self.row_bytes,
        };
        if !rows.changes_nothing() {
            self.write(call.spec.model.store.threads(), &block.places, &rows)?;
        }
        let end = block.places.end * self.row_bytes;
        call.mark_part_landed(self.layer, self.param, end);
        Ok(())
    }

    fn write(
        &self,
        threads: &Threads,
        places: &Range<usize>,
        rows: &RowsOfBlock<'_>,
    ) -> Result<()> {
        let bytes = places.start * self.row_bytes..places.end * self.row_bytes;
        let mut memory = self.gradient.write(bytes)?;
        let part_rows = (PART_BYTES / self.row_bytes).max(1);
        let parts = memory.bytes().chunks_mut(part_rows * self.row_bytes);
        each_part(threads, parts, |_, i, part| {
            rows.write(places.start + i * part_rows, part);
            Ok(())
        })?;
        Ok(())
    }
}

/// Which of `rows`, in ascending order, lie at `places`.
fn rows_at(rows: &[u32], places: &Range<usize>) -> Range<usize> {
    let first = |place: usize| rows.partition_point(|row| (*row as usize) < place);
    first(places.start)..first(places.end)
}

/// What a block of a gradient becomes.
struct RowsOfBlock<'a> {
    /// In ascending order.
    rows: &'a [u32],
    /// Theirs, one after another.
    values: &'a [u8],
    /// Rows that may be other than zero; `None` when all may.
    before: Option<&'a [u32]>,
    row_bytes: usize,
}

impl RowsOfBlock<'_> {
    fn changes_nothing(&self) -> bool {
        self.rows.is_empty() && self.before.is_some_and(<[u32]>::is_empty)
    }

    /// Writes a part of it whose first row is `first`.
    fn write(&self, first: usize, part: &mut [u8]) {
        let size = self.row_bytes;
        let places = first..first + part.len() / size;
        let here = rows_at(self.rows, &places);
        let rows = &self.rows[here.clone()];
        let place = |row: &u32| (*row as usize - first) * size;
        match self.before {
            None => part.fill(0),
            Some(before) => {
                let gone = before[rows_at(before, &places)].iter();
                for row in gone.filter(|row| rows.binary_search(row).is_err()) {
                    part[place(row)..][..size].fill(0);
                }
            }
        }
        let values = self.values[here.start * size..].chunks_exact(size);
        for (row, value) in rows.iter().zip(values) {
            part[place(row)..][..size].copy_from_slice(value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows that are gone become zero, also where nothing is known of what was there.
    #[test]
    fn a_part_has_its_rows_and_zeros() {
        let write = |before: Option<&[u32]>, rows: &[u32], values: &[u8]| {
            let mut part = [9u8, 9, 9, 9, 9, 9];
            let block = RowsOfBlock {
                rows,
                values,
                before,
                row_bytes: 2,
            };
            block.write(4, &mut part);
            part
        };
        let rows = [2, 5, 7];
        let values = [20, 21, 50, 51, 70, 71];
        assert_eq!(write(None, &rows, &values), [0, 0, 50, 51, 0, 0]);
        assert_eq!(write(Some(&[4, 5]), &rows, &values), [0, 0, 50, 51, 9, 9]);
        assert_eq!(write(Some(&[]), &[], &[]), [9; 6]);
        assert_eq!(write(Some(&[1, 6, 7]), &[], &[]), [9, 9, 9, 9, 0, 0]);
    }

    /// What another has written is not taken for zero, nor is what lands just now.
    #[test]
    fn rows_are_known_until_another_writes() {
        let gradient = HostBuf::zeroed("gradient", 64).unwrap();
        let landed = LandedRows::default();
        assert_eq!(landed.take(&gradient), Some(Arc::default()), "zeros");
        drop(gradient.write(0..8).unwrap());
        assert_eq!(landed.take(&gradient), None, "written by another");
        let rows = Arc::new(CallRows {
            new: vec![vec![3]],
            all: vec![3],
        });
        landed.set(&gradient, rows.clone());
        assert_eq!(landed.take(&gradient), Some(rows.clone()));
        assert_eq!(landed.take(&gradient), None, "while new rows land");
        landed.set(&gradient, rows);
        drop(gradient.write(32..40).unwrap());
        assert_eq!(landed.take(&gradient), None, "written since");
    }
}
