//! A table that is updated row by row: first the rows that calls wait for, then all others.
//!
//! The guards of the layer are taken once, as for any update, and the version is published at the end.
//! Rows that were updated before are copied out, for readers that cannot wait for that.
//!
//! Refused: layers that have more than the table, rules that look at whole matrices, moments in
//! blocks of 8 bits and rows that do not begin at a word of remainders. They are updated whole.
//!
//! # Invariants
//! - Every row is updated once.
//! - The bits are those of an update of the whole table.

use std::ops::Range;

use roundpipe_tensor::DType;
use roundpipe_tensor::cpu::threads::Threads;
use roundpipe_tensor::host::{HostMut, HostRef};
use roundpipe_tensor::optim::{CHUNK, FloatsMut};

use super::Apply;
use super::late::{LateMoments, LateParam};
use super::open::{OpenLayer, each_part, summed};
use super::pass::{OpenSlabs, RulePass};
use crate::error::Result;
use crate::optim::{MomentType, floats_mut};
use crate::store::Store;
use crate::version::Abort;

/// Elements that share a word of tie bits, where a row must begin.
const WORD: usize = 16;

/// A layer that is one table, with some of its rows updated.
pub(crate) struct OpenTable<'a> {
    store: &'a Store,
    open: OpenLayer<'a>,
    pass: RulePass,
    grads: Vec<(DType, HostRef)>,
    width: usize,
    /// Which rows are updated.
    done: Vec<bool>,
    /// Whether some elements kept their value because the rule's was not finite.
    kept: bool,
    /// Where moments come later, the elements that have theirs all the same.
    written: Option<Vec<Range<usize>>>,
}

/// Rows of a table that one thread updates.
struct TablePart<'a, 'r> {
    slabs: OpenSlabs<'a>,
    /// The row that the slabs begin with.
    first: usize,
    /// In ascending order.
    rows: &'r [u32],
    /// Where their new weights are copied to.
    staged: Option<FloatsMut<'r>>,
    /// Whether their moments come later.
    leaves_moments: bool,
}

impl Store {
    /// Whether a layer is one table whose update can be cut by rows.
    ///
    /// # Errors
    /// When the system has no memory.
    pub(crate) fn updates_by_rows(&self, layer: usize, apply: &Apply) -> Result<bool> {
        let here = self.layer(layer);
        let [table] = here.params() else {
            return Ok(false);
        };
        let [_, width] = table.shape.dims() else {
            return Ok(false);
        };
        if !table.trainable || table.home.0 != layer || !width.is_multiple_of(WORD) {
            return Ok(false);
        }
        let group = apply.groups.of(table.home);
        let rule = group.rule.or(self.rule());
        let is_updated = !group.frozen && rule.is_some_and(|rule| rule.is_elementwise());
        let has_blocks = here.moment_type(table.home.1)? == MomentType::Bits8;
        Ok(is_updated && !has_blocks && !self.grads_of(table)?.is_empty())
    }

    /// Opens a table that [`Store::updates_by_rows`] takes, perhaps to write its moments later. All its
    /// gradients must have landed.
    ///
    /// # Errors
    /// As [`Store::apply`].
    pub(crate) fn open_table(
        &self,
        layer: usize,
        apply: &Apply,
        weights_first: bool,
        abort: &Abort,
    ) -> Result<OpenTable<'_>> {
        let rule = self.rule_or_refuse()?;
        let mut open = self.open(layer, apply.next_version, abort)?;
        let [table] = &mut open.params[..] else {
            unreachable!("`updates_by_rows` looked");
        };
        table.start_copy(&self.shared.threads)?;
        let group = apply.groups.of(table.stored.home);
        let pass = table.rule_pass(rule, apply.settings(), group);
        let leaves_moments = weights_first && table.leaves_moments(rule, group);
        let grads = std::mem::take(&mut table.grads);
        let (rows, width) = match pass.shape.dims() {
            [rows, width] => (*rows, *width),
            _ => unreachable!("`updates_by_rows` looked"),
        };
        Ok(OpenTable {
            store: self,
            open,
            pass,
            grads,
            width,
            done: vec![false; rows],
            kept: false,
            written: leaves_moments.then(Vec::new),
        })
    }
}

impl<'a> OpenTable<'a> {
    /// Bytes of a row of weights.
    pub fn row_bytes(&self) -> usize {
        self.width * self.open.params[0].stored.dtype.size()
    }

    /// Updates those of `rows` that are not yet, and copies the new weights of all to `staged`, one
    /// after another. Rows are in ascending order, each once.
    ///
    /// # Errors
    /// What the rule refuses.
    pub fn update_rows(&mut self, rows: &[u32], staged: Option<&mut HostMut>) -> Result<()> {
        let threads = &self.store.shared.threads;
        let table = &mut self.open.params[0];
        let dtype = table.stored.dtype;
        let mut staged = staged.map(|staged| floats_mut(dtype, staged));
        let mut slabs = table.slabs(&self.pass, self.store.moment_seed())?;
        let block = (CHUNK / self.width).max(1);
        let mut left = rows;
        let mut parts = Vec::new();
        for (i, slabs) in slabs.chunks(block * self.width).enumerate() {
            let first = i * block;
            let count = left.partition_point(|row| (*row as usize) < first + block);
            if count == 0 {
                continue;
            }
            let (rows, behind) = left.split_at(count);
            left = behind;
            let (here, behind) = staged
                .map(|staged| staged.split_at(count * self.width))
                .unzip();
            staged = behind;
            parts.push(TablePart {
                slabs,
                first,
                rows,
                staged: here,
                leaves_moments: self.written.is_some(),
            });
        }
        let (pass, grads, done) = (&self.pass, &self.grads, &self.done);
        let width = self.width;
        let steps = each_part(threads, parts.into_iter(), |one, _, part| {
            part.update(one, pass, grads, done, width)
        });
        for (kept, written) in steps? {
            self.kept |= kept;
            self.written
                .iter_mut()
                .for_each(|all| all.extend_from_slice(&written));
        }
        for row in rows {
            self.done[*row as usize] = true;
        }
        Ok(())
    }

    /// Updates all rows that are left, and publishes the layer. Returns whether some elements kept
    /// their value because the rule's was not finite, and the moments that come later.
    ///
    /// # Errors
    /// As [`Store::apply`].
    pub fn finish(mut self) -> Result<(bool, Option<LateMoments<'a>>)> {
        let rows = self.done.iter().enumerate();
        let left: Vec<u32> = rows
            .filter(|(_, is_done)| !**is_done)
            .map(|(row, _)| row as u32)
            .collect();
        self.update_rows(&left, None)?;
        let Self {
            store,
            mut open,
            pass,
            grads,
            kept,
            written,
            ..
        } = self;
        let Some(written) = written else {
            // The next step's gradients may land once the version is published.
            drop(grads);
            store.finish(open)?;
            return Ok((kept, None));
        };
        let late = LateParam::new(&mut open.params[0], pass, grads).with_written(written);
        Ok((kept, store.finish_weights(open, vec![late])?))
    }
}

impl TablePart<'_, '_> {
    /// Whether some elements kept their value, and those whose moments are written although they may
    /// come later.
    fn update(
        mut self,
        one: &Threads,
        pass: &RulePass,
        grads: &[(DType, HostRef)],
        done: &[bool],
        width: usize,
    ) -> Result<(bool, Vec<Range<usize>>)> {
        let mut kept = false;
        let mut written = Vec::new();
        let mut sum = Vec::new();
        // Neighbours that are not updated yet are one piece.
        let is_next = |a: &u32, b: &u32| b - a == 1 && done[*a as usize] == done[*b as usize];
        for rows in self.rows.chunk_by(is_next) {
            let first = rows[0] as usize;
            if done[first] {
                continue;
            }
            let len = rows.len() * width;
            let at = first * width;
            let grad = summed(one, grads, at..at + len, &mut sum)?;
            let here = at - self.first * width;
            let slabs = self.slabs.range(here..here + len);
            if !self.leaves_moments {
                kept |= pass.run(one, grad, slabs)?;
                continue;
            }
            let step = pass.run_weights(one, grad, slabs)?;
            kept |= step.kept;
            written.extend((!step.moments_left).then_some(at..at + len));
        }
        self.copy_out(width);
        Ok((kept, written))
    }

    fn copy_out(&mut self, width: usize) {
        let Some(staged) = &mut self.staged else {
            return;
        };
        let weights = self.slabs.weights.as_floats();
        for (i, row) in self.rows.iter().enumerate() {
            let at = (*row as usize - self.first) * width;
            let mut place = staged.range(i * width..(i + 1) * width);
            place.copy_from(weights.range(at..at + width));
        }
    }
}
