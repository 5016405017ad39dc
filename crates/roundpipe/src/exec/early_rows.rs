//! Rows of a table that a call reads before the update of the whole table is done.
//!
//! The table of embeddings is the first layer and often the largest; at lag 0 the next call would wait
//! until all of it is updated and sent. But its forward reads only the rows that the call's tokens
//! name. So the optimizer puts the table off, updates the rows of the first microbatches between the
//! layers behind it, and all others at the end. New rows go to the worker in a block of their own,
//! and a kernel writes them to their places in the table's slot.
//!
//! The path of a row: caller ([`EarlyRows::ask`]) -> optimizer ([`TableUpdate::serve`]) -> host value
//! in the call -> launcher ([`Launcher::bring_rows`]) -> slot.
//!
//! # Rules
//! 1. The optimizer opens the queue before its step has begun, and closes it before it updates the
//!    rows that no call asked for. In between a call may ask; outside it reads the published table.
//! 2. Every request that was taken is served before the version is published, or its call fails.
//! 3. A microbatch brings the rows that none before it has brought. Rows that no token names are
//!    never read, so their memory may hold anything.
//! 4. The optimizer waits for no worker here, and a launcher only for rows that its task needs now.

use std::sync::{Arc, Mutex};

use roundpipe_tensor::transfer::{HostPool, HostValue, Slot};
use roundpipe_tensor::{DType, HostTensor, Shape, Tensor};

use super::call::Call;
use super::launcher::Launcher;
use super::model::Model;
use super::queue::StageJob;
use super::stage_value::Source;
use super::task::Task;
use crate::error::Result;
use crate::plan::Pass;
use crate::sync::lock;
use crate::tree::Tree;
use crate::update::{LateMoments, OpenTable};

/// The layer that may be such a table: only the first has host values as its input.
pub(crate) const TABLE: usize = 0;

/// The rows of the table that a call reads, in ascending order.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct CallRows {
    /// Those of each microbatch that none before it reads.
    pub new: Vec<Vec<u32>>,
    /// Those of all of them.
    pub all: Vec<u32>,
}

/// The rows that the table's layer reads for these inputs; `None` where it may read others or an
/// input is still to be computed.
pub(crate) fn rows_of_call(model: &Model, inputs: &[Tree<Source>]) -> Option<Arc<CallRows>> {
    let [table] = model.store.layer(TABLE).params() else {
        return None;
    };
    let [count, _] = *table.shape.dims() else {
        return None;
    };
    let mut seen = vec![false; count];
    let mut new = Vec::with_capacity(inputs.len());
    for input in inputs {
        let input = input
            .clone()
            .try_map(|source| host_tensor(&source).ok_or(()));
        let ids = model.layers[TABLE].1.rows_read(&input.ok()?)?;
        new.push(new_rows(&ids, &mut seen)?);
    }
    let seen = seen.into_iter().enumerate();
    let all = seen.filter(|(_, is_seen)| *is_seen);
    let all = all.map(|(row, _)| row as u32).collect();
    Some(Arc::new(CallRows { new, all }))
}

/// A user's value, as it was given.
fn host_tensor(source: &Source) -> Option<HostTensor> {
    let Source::Value(leaf) = source else {
        return None;
    };
    // The memory of other values is still being written.
    if leaf.resident.is_some() || leaf.host.written().is_some() {
        return None;
    }
    let buf = leaf.host.fence().ok()?;
    HostTensor::new(buf, leaf.host.dtype(), leaf.host.shape()).ok()
}

/// The rows that `ids` name and none before them did. An id without a row is left out: the kernel
/// that looks it up reports it.
fn new_rows(ids: &HostTensor, seen: &mut [bool]) -> Option<Vec<u32>> {
    let ids: Vec<i64> = match ids.dtype() {
        DType::I64 => ids.to_vec().ok()?,
        DType::I32 => ids
            .to_vec::<i32>()
            .ok()?
            .into_iter()
            .map(i64::from)
            .collect(),
        DType::U32 => ids
            .to_vec::<u32>()
            .ok()?
            .into_iter()
            .map(i64::from)
            .collect(),
        _ => return None,
    };
    let mut rows = Vec::new();
    for id in ids {
        let Some(is_seen) = usize::try_from(id).ok().and_then(|id| seen.get_mut(id)) else {
            continue;
        };
        if !std::mem::replace(is_seen, true) {
            rows.push(id as u32);
        }
    }
    rows.sort_unstable();
    Some(rows)
}

/// What calls ask of an update under way.
#[derive(Default)]
pub(crate) struct EarlyRows(Mutex<RowQueue>);

#[derive(Default)]
struct RowQueue {
    /// Whether the last call that trained could say which rows it reads.
    is_expected: bool,
    /// The version whose rows may be asked for.
    pending: Option<u64>,
    requests: Vec<RowRequest>,
    /// Whether a call waits for the whole table.
    wants_all: bool,
}

/// A call's rows.
pub(crate) struct RowRequest {
    pub call: Arc<Call>,
    pub rows: Arc<CallRows>,
    /// Where new rows are put for the worker to read.
    pub memory: Arc<HostPool>,
    /// The microbatch that is served next.
    pub next: usize,
}

impl RowRequest {
    /// Whether the next microbatch is to be served now that all layers before `layer` are updated.
    fn is_due(&self, layer: usize) -> bool {
        let first_stage = &self.call.spec.stages[0].layers;
        // The first microbatch runs through the layers of its stage before the second begins.
        let is_urgent = self.next == 0 || layer >= first_stage.end;
        self.next < self.rows.new.len() && is_urgent
    }
}

impl EarlyRows {
    /// Says whether a call that trains has named its rows: the next probably will, too.
    pub fn expect(&self, named: bool) {
        lock(&self.0).is_expected = named;
    }

    /// Opens the queue for the rows of `version`, if a call is likely to ask.
    pub fn open(&self, version: u64) -> bool {
        let mut queue = lock(&self.0);
        queue.pending = queue.is_expected.then_some(version);
        queue.is_expected
    }

    /// Whether rows of `version` may be asked for.
    pub fn is_pending(&self, version: u64) -> bool {
        lock(&self.0).pending == Some(version)
    }

    /// Asks for rows of the version that a call reads; `false` when the whole table comes as soon.
    pub fn ask(&self, request: RowRequest) -> bool {
        let mut queue = lock(&self.0);
        let is_pending = queue.pending == Some(request.call.spec.version);
        if is_pending {
            queue.requests.push(request);
        }
        is_pending
    }

    /// A call waits for the whole table of `version`.
    pub fn ask_all(&self, version: u64) {
        let mut queue = lock(&self.0);
        queue.wants_all |= queue.pending == Some(version);
    }

    /// What was asked for since the last time, and whether a call waits for the whole table.
    fn take(&self) -> (Vec<RowRequest>, bool) {
        let mut queue = lock(&self.0);
        (std::mem::take(&mut queue.requests), queue.wants_all)
    }

    /// From here on calls wait for the published table. Returns what was asked for since the last
    /// time.
    pub fn close(&self) -> Vec<RowRequest> {
        let mut queue = lock(&self.0);
        queue.pending = None;
        queue.wants_all = false;
        std::mem::take(&mut queue.requests)
    }
}

/// The update of a table that was put off.
pub(crate) struct TableUpdate<'a> {
    table: OpenTable<'a>,
    requests: Vec<RowRequest>,
    /// What the rows took that calls asked for.
    pub rows_ms: f64,
}

/// What a look at the queue led to.
pub(crate) struct Served {
    /// For how many of them rows were updated.
    pub microbatches: usize,
    /// Whether a call waits for the whole table.
    pub wants_all: bool,
}

impl<'a> TableUpdate<'a> {
    pub fn new(table: OpenTable<'a>) -> Self {
        Self {
            table,
            requests: Vec::new(),
            rows_ms: 0.0,
        }
    }

    /// Serves what is due now that all layers before `layer` are updated.
    ///
    /// # Errors
    /// What the rule refuses.
    pub fn serve(&mut self, early: &EarlyRows, layer: usize) -> Result<Served> {
        let (new, wants_all) = early.take();
        self.requests.extend(new);
        Ok(Served {
            microbatches: self.serve_due(layer)?,
            wants_all,
        })
    }

    fn serve_due(&mut self, layer: usize) -> Result<usize> {
        let mut served = 0;
        for request in &mut self.requests {
            while request.is_due(layer) {
                stage_next(&mut self.table, request)?;
                served += 1;
            }
        }
        Ok(served)
    }

    /// Serves all that is left, updates all other rows and publishes the table. Returns whether some
    /// elements kept their value because the rule's was not finite, and the moments that come later.
    ///
    /// # Errors
    /// As [`Store::apply`](crate::Store::apply).
    pub fn finish(mut self, early: &EarlyRows) -> Result<(bool, Option<LateMoments<'a>>)> {
        self.requests.extend(early.close());
        self.serve_due(usize::MAX)?;
        self.table.finish()
    }
}

/// Updates the rows of a request's next microbatch and gives them to its call.
fn stage_next(table: &mut OpenTable<'_>, request: &mut RowRequest) -> Result<()> {
    let microbatch = request.next;
    request.next += 1;
    let rows = &request.rows.new[microbatch];
    if rows.is_empty() || request.call.has_failed() {
        return Ok(());
    }
    let bytes = rows.len() * table.row_bytes();
    let mut updated = Ok(());
    let all = Shape::new(&[bytes + rows.len() * size_of::<i32>()])?;
    let staged =
        HostValue::written_by_host(&request.memory, DType::U8, all, |memory| -> Result<()> {
            let mut values = memory.write(0..bytes)?;
            updated = table.update_rows(rows, Some(&mut values));
            let mut places = memory.write(bytes..memory.len())?;
            write_places(rows, places.as_mut_slice());
            Ok(())
        });
    updated?;
    match staged {
        Ok(staged) => request.call.put_rows(microbatch, staged),
        // The step is made all the same: these rows are updated with the others.
        Err(error) => request.call.fail(error),
    }
    Ok(())
}

/// Rows as kernels read them.
pub(super) fn write_places(rows: &[u32], places: &mut [i32]) {
    for (place, row) in places.iter_mut().zip(rows) {
        *place = *row as i32;
    }
}

/// Where the rows of a job's table arrive.
pub(crate) struct RowSlots {
    table: Slot,
    /// By microbatch; `None` where it brings no row.
    staged: Vec<Option<Slot>>,
}

/// A table of the current job, of which some rows are there.
pub(super) struct ArrivingRows {
    table: Tensor,
    rows: Arc<CallRows>,
    staged: Vec<Option<Slot>>,
}

impl Launcher {
    /// Memory for the table of a job whose call reads rows of it; `None` for all other layers, and
    /// where there is no room for rows beside the table: it comes whole then.
    pub(super) fn reserve_rows(
        &self,
        job: &StageJob,
        layer: usize,
        beside: Option<u64>,
    ) -> Option<RowSlots> {
        let call = &job.call;
        if layer != TABLE || call.spec.stages[job.stage].pass != Pass::Forward {
            return None;
        }
        let rows = call.early_rows()?;
        let stored = call.spec.model.store.layer(layer);
        let width = stored.params()[0].shape.dims()[1];
        let row_bytes = width * stored.params()[0].dtype.size() + size_of::<i32>();
        let slot = |bytes: usize| match beside {
            Some(working) => Slot::reserve_beside(self.worker(), bytes as u64, working),
            None => Slot::reserve(self.worker(), bytes as u64),
        };
        let table = slot(stored.block_bytes()).ok()?;
        let of_rows = |rows: &Vec<u32>| {
            let slot = (!rows.is_empty()).then(|| slot(rows.len() * row_bytes));
            slot.transpose()
        };
        match rows.new.iter().map(of_rows).collect() {
            Ok(staged) => Some(RowSlots { table, staged }),
            Err(_) => {
                call.spec.model.early_rows.ask_all(call.spec.version);
                None
            }
        }
    }

    /// Gets ready for the rows of a job that starts now.
    pub(super) fn await_rows(&mut self, job: &mut StageJob) -> Result<()> {
        let (Some(slots), Some(rows)) = (job.rows.take(), job.call.early_rows()) else {
            return Ok(());
        };
        let stored = job.call.spec.model.store.layer(TABLE);
        let param = &stored.params()[0];
        let place = (param.block_offset as u64, param.dtype, param.shape);
        let tensors = slots.table.unfilled().tensors(&[place]);
        let mut tensors =
            tensors.map_err(|error| job.call.error_at(job.stage, Some(TABLE), None, error))?;
        self.rows = tensors.pop().map(|table| ArrivingRows {
            table,
            rows,
            staged: slots.staged,
        });
        Ok(())
    }

    /// The table of the current job, if its rows come apart.
    pub(super) fn row_table(&self, layer: usize) -> Option<Tensor> {
        let rows = self.rows.as_ref().filter(|_| layer == TABLE)?;
        Some(rows.table.clone())
    }

    /// Brings the rows that a microbatch names and none before it did, before its table is read.
    pub(super) fn bring_rows(&mut self, task: &Task<'_>, layer: usize) -> Result<()> {
        let Some(arriving) = self.rows.as_mut().filter(|_| layer == TABLE) else {
            return Ok(());
        };
        let Some(slot) = arriving.staged[task.microbatch].take() else {
            return Ok(());
        };
        let table = arriving.table.clone();
        let count = arriving.rows.new[task.microbatch].len();
        let staged = task.call.wait_rows(&self.who, task.microbatch)?;
        let name = &task.spec().model.layers[layer].0;
        let written = self.write_rows(&format!("rows of {name}"), slot, &staged, &table, count);
        written.map_err(|error| task.error(Some(layer), error))
    }

    /// Copies new rows to the worker and writes them to their places.
    fn write_rows(
        &self,
        what: &str,
        slot: Slot,
        staged: &HostValue,
        table: &Tensor,
        count: usize,
    ) -> roundpipe_tensor::Result<()> {
        let width = table.dims()[1];
        let values = Shape::new(&[count, width])?;
        let bytes = (count * width * table.dtype().size()) as u64;
        let places = [
            (0, table.dtype(), values),
            (bytes, DType::I32, Shape::new(&[count])?),
        ];
        let filled = slot.fill_with(what, staged, self.port.log())?;
        let tensors = filled.tensors(&places)?;
        self.worker().write_rows(table, &tensors[0], &tensors[1])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each row comes with the first microbatch that names it; ids without a row are left out.
    #[test]
    fn a_microbatch_brings_what_none_before_it_brought() {
        let mut seen = vec![false; 6];
        let ids = HostTensor::from_slice(&[4i64, 1, 4, -1, 6, 0], &[2, 3]).unwrap();
        assert_eq!(new_rows(&ids, &mut seen), Some(vec![0, 1, 4]));
        let ids = HostTensor::from_slice(&[5i32, 1, 2], &[3]).unwrap();
        assert_eq!(new_rows(&ids, &mut seen), Some(vec![2, 5]));
        let ids = HostTensor::from_slice(&[5u32, 1, 2], &[3]).unwrap();
        assert_eq!(new_rows(&ids, &mut seen), Some(Vec::new()));
        let floats = HostTensor::from_slice(&[1.0f32], &[1]).unwrap();
        assert_eq!(new_rows(&floats, &mut seen), None);
    }
}
