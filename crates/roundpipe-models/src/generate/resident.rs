//! Decoding on a worker that holds all weights.
//!
//! The layers of the model run one after another on the worker's compute lane, for all rows of a
//! batch at once; the host waits once per token, for its logits. Keys and values lie in caches
//! ([`Cx::cache`]) that new ones are written into. A row is a place for one text: a text that ends
//! leaves its row to the next prompt, so a long list of prompts keeps all rows busy.
//!
//! Prompts are fed by themselves, in chunks of [`PROMPT_STEP`] tokens, so that their bits do not
//! depend on the prompts beside them.
//!
//! # Invariants
//! - Row i of every cache holds what `seen[i]` says; what lies behind is never read.
//! - Weights are those of the moment when a text began; a cpu reads them in place and holds them
//!   unchanged until it ends.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use roundpipe::{Cx, DType, Keeper, Param, ParamId, Params, Sequential, Tensor, Tree, Worker};

use super::PROMPT_STEP;
use crate::config::ModelConfig;
use crate::decoder::Model;
use crate::error::{Error, Result};

/// Places that the first caches have at least; later ones have twice as many as before.
const FIRST_PLACES: usize = 256;

/// Weights on a worker and the layers that read them.
pub(super) struct Resident {
    worker: Worker,
    layers: Sequential,
    params: Vec<Param>,
    dtype: DType,
    config: ModelConfig,
    uploaded: UploadedWeights,
}

/// Weights in a worker's memory, for all models that read them; empty where it reads the host's.
pub(super) type UploadedWeights = Arc<Mutex<HashMap<ParamId, Uploaded>>>;

/// A weight on the worker, and which of the host's it is.
pub(super) struct Uploaded {
    tensor: Tensor,
    /// First address and number of writes of the host memory that it was read from.
    from: (usize, u64),
}

impl Resident {
    pub(super) fn new(model: &Model, worker: &Worker, uploaded: &UploadedWeights) -> Self {
        let params: Vec<Param> = model
            .named_params()
            .into_iter()
            .map(|(_, param)| param)
            .collect();
        Self {
            worker: worker.clone(),
            layers: model.layers.clone(),
            dtype: model.config.dtype.unwrap_or(DType::F32),
            params,
            config: model.config.clone(),
            uploaded: uploaded.clone(),
        }
    }

    /// A context with the newest weights.
    fn context(&self) -> Result<Cx> {
        self.wait_for_updates();
        let mut cx = Cx::infer(&self.worker);
        if self.worker.device().aliases_host() {
            return Ok(cx);
        }
        let mut uploaded = self.uploaded.lock().unwrap_or_else(PoisonError::into_inner);
        for param in &self.params {
            let home = param.data();
            let from = (home.read_all()?.bytes().as_ptr() as usize, home.writes());
            let known = uploaded.get(&param.id()).filter(|known| known.from == from);
            if let Some(known) = known {
                cx.bind(param, known.tensor.clone(), None)?;
                continue;
            }
            // The old one's memory first: there may be no room for both.
            uploaded.remove(&param.id());
            let tensor = cx.get(param)?;
            uploaded.insert(param.id(), Uploaded { tensor, from });
        }
        Ok(cx)
    }

    fn wait_for_updates(&self) {
        let mut awaited: Vec<Arc<dyn Keeper>> = Vec::new();
        for keeper in self.params.iter().filter_map(Param::keeper) {
            if !awaited.iter().any(|known| Arc::ptr_eq(known, &keeper)) {
                keeper.wait_for_updates();
                awaited.push(keeper);
            }
        }
    }

    /// Bytes that one place of one row takes in all caches.
    fn place_bytes(&self) -> usize {
        let c = &self.config;
        2 * c.layers * c.kv_heads * c.head_dim * self.dtype.size()
    }

    /// Rows of at most `wanted` whose caches of `places` take no more than half of what is free.
    pub(super) fn rows_that_fit(&self, wanted: usize, places: usize) -> usize {
        let pool = self.worker.pool();
        let free = pool.capacity().0.saturating_sub(self.worker.usage().used.0) / 2;
        let row = (places * self.place_bytes()).max(1) as u64;
        wanted
            .min(usize::try_from(free / row).unwrap_or(wanted))
            .max(1)
    }
}

/// Texts under way on a worker: one row of the caches each.
pub(super) struct Rows<'r> {
    resident: &'r Resident,
    cx: Cx,
    /// Keys and values of every block, [rows, places, kv heads, D].
    caches: Vec<[Tensor; 2]>,
    places: usize,
    /// Tokens of each row that the caches hold.
    seen: Vec<usize>,
}

impl<'r> Rows<'r> {
    /// Empty rows, with the newest weights.
    pub(super) fn new(resident: &'r Resident, rows: usize) -> Result<Self> {
        Ok(Self {
            cx: resident.context()?,
            resident,
            caches: Vec::new(),
            places: 0,
            seen: vec![0; rows],
        })
    }

    pub(super) fn len(&self) -> usize {
        self.seen.len()
    }

    /// Tokens that a row holds.
    pub(super) fn seen(&self, row: usize) -> usize {
        self.seen[row]
    }

    /// Forgets all but the first `seen` tokens of a row.
    pub(super) fn rewind(&mut self, row: usize, seen: usize) {
        self.seen[row] = self.seen[row].min(seen);
    }

    /// Leaves rows out: row i is what row `kept[i]` was.
    pub(super) fn keep(&mut self, kept: &[usize]) -> Result<()> {
        self.rebuild(kept, self.places)
    }

    /// Feeds tokens to one row and gives the logits of the last.
    pub(super) fn feed(&mut self, row: usize, ids: &[u32]) -> Result<Vec<f32>> {
        self.make_room(self.seen[row] + ids.len())?;
        let mut logits = None;
        for part in ids.chunks(PROMPT_STEP) {
            let at = self.seen[row];
            let ids: Vec<i64> = part.iter().map(|id| i64::from(*id)).collect();
            let mut flow = vec![
                (
                    "ids".to_owned(),
                    self.cx.tensor(&ids, &[1, ids.len()])?.into(),
                ),
                ("keep".to_owned(), Tree::Int(1)),
                ("cache.filled".to_owned(), Tree::Int(at as i64)),
                (
                    "cache.at".to_owned(),
                    self.cx.tensor(&[at as i32], &[1])?.into(),
                ),
            ];
            for (name, cache) in cache_names(&self.caches) {
                flow.push((name, self.cx.narrow(cache, 0, row, 1)?.into()));
            }
            logits = Some(self.run(flow)?);
            self.seen[row] += part.len();
        }
        match logits {
            Some(logits) => Ok(to_f32(&logits)?),
            None => Err(Error::argument("prompt", "it has no tokens")),
        }
    }

    /// Feeds one token to every row and gives their logits, row after row. Rows without a token are
    /// computed and change nothing.
    pub(super) fn step(&mut self, tokens: &[Option<u32>]) -> Result<Vec<f32>> {
        let busy = |row: &usize| tokens[*row].is_some();
        let longest = (0..self.len()).filter(busy).map(|row| self.seen[row]).max();
        self.make_room(longest.unwrap_or(0) + 1)?;
        let ids: Vec<i64> = tokens.iter().map(|id| i64::from(id.unwrap_or(0))).collect();
        // An idle row writes to the place behind what it holds, or to its last.
        let at: Vec<i32> = self
            .seen
            .iter()
            .map(|seen| (*seen).min(self.places - 1) as i32)
            .collect();
        let rows = self.len();
        let mut flow = vec![
            ("ids".to_owned(), self.cx.tensor(&ids, &[rows, 1])?.into()),
            ("cache.at".to_owned(), self.cx.tensor(&at, &[rows])?.into()),
        ];
        for (name, cache) in cache_names(&self.caches) {
            flow.push((name, cache.clone().into()));
        }
        let logits = self.run(flow)?;
        for (seen, token) in self.seen.iter_mut().zip(tokens) {
            *seen += usize::from(token.is_some());
        }
        Ok(to_f32(&logits)?)
    }

    fn run(&mut self, flow: Vec<(String, Tree)>) -> Result<Tensor> {
        let logits = self
            .resident
            .layers
            .forward(&mut self.cx, Tree::map(flow))?;
        Ok(logits.tensor()?)
    }

    /// Sees to caches of `places` places at least.
    fn make_room(&mut self, places: usize) -> Result<()> {
        if places <= self.places {
            return Ok(());
        }
        let most = self.resident.config.max_positions;
        let roomy = places.next_power_of_two().max(FIRST_PLACES).min(most);
        let rows: Vec<usize> = (0..self.len()).collect();
        self.rebuild(&rows, roomy.max(places))
    }

    /// New caches of `places` places; row i holds what row `rows[i]` held. Block by block, so that
    /// there are two of one block at most.
    fn rebuild(&mut self, rows: &[usize], places: usize) -> Result<()> {
        let c = &self.resident.config;
        let (dims, dtype) = (
            [rows.len(), places, c.kv_heads, c.head_dim],
            self.resident.dtype,
        );
        let start = self.cx.tensor(&[0_i32], &[1])?;
        for block in 0..c.layers {
            for which in 0..2 {
                let cache = self.cx.cache(dtype, dims)?;
                if let Some(old) = self.caches.get(block) {
                    copy_rows(&mut self.cx, &old[which], &cache, rows, &self.seen, &start)?;
                }
                match self.caches.get_mut(block) {
                    Some(pair) => pair[which] = cache,
                    // The values' place is taken by the keys until theirs is made.
                    None => self.caches.push([cache.clone(), cache]),
                }
            }
        }
        self.seen = rows.iter().map(|row| self.seen[*row]).collect();
        self.places = places;
        Ok(())
    }
}

/// Copies what rows of `old` hold into `new`.
fn copy_rows(
    cx: &mut Cx,
    old: &Tensor,
    new: &Tensor,
    rows: &[usize],
    seen: &[usize],
    start: &Tensor,
) -> Result<()> {
    for (to, from) in rows.iter().enumerate() {
        if seen[*from] == 0 {
            continue;
        }
        let held = cx.narrow(old, 0, *from, 1)?;
        let held = cx.narrow(&held, 1, 0, seen[*from])?;
        let place = cx.narrow(new, 0, to, 1)?;
        cx.cache_write(&place, &held, start)?;
    }
    Ok(())
}

/// Caches by their names in the map between layers.
fn cache_names(caches: &[[Tensor; 2]]) -> impl Iterator<Item = (String, &Tensor)> {
    caches.iter().enumerate().flat_map(|(block, [k, v])| {
        [
            (format!("cache.{block}.k"), k),
            (format!("cache.{block}.v"), v),
        ]
    })
}

fn to_f32(logits: &Tensor) -> Result<Vec<f32>> {
    if logits.dtype() == DType::F32 {
        return Ok(logits.to_vec()?);
    }
    let wide = Worker::of(logits).cast(logits, DType::F32)?;
    Ok(wide.to_vec()?)
}
