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

use roundpipe::{
    Cx, DType, Element, Keeper, Param, ParamId, Params, Recording, Sequential, Tensor,
    TensorResult, Tree, Worker,
};

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
        Ok(self.context_on(&self.worker)?)
    }

    /// The same for kernels that are launched through another handle of the worker.
    fn context_on(&self, worker: &Worker) -> TensorResult<Cx> {
        let mut cx = Cx::infer(worker);
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
        // Weights that are sent with the first text need their room too.
        let weights = if self.worker.device().aliases_host() {
            0
        } else {
            self.params.iter().map(|param| param.bytes() as u64).sum()
        };
        let used = self.worker.usage().used.0.max(weights);
        let free = self.worker.pool().capacity().0.saturating_sub(used) / 2;
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
    steps: StepKernels,
}

/// How the kernels of a step are launched.
enum StepKernels {
    /// One by one: the first step also compiles and chooses them.
    First,
    /// One by one, always: the device gains nothing by another way.
    Single,
    /// All at once.
    Recorded(Box<Recorded>),
}

/// A step that is launched as a whole. It ends by writing the likeliest tokens and the next places
/// over those it began with.
struct Recorded {
    recording: Recording,
    /// [rows, 1], i64.
    ids: Tensor,
    /// Places that rows have filled, and what a step adds to them: [rows], i32.
    at: Tensor,
    advance: Tensor,
    /// [rows, 1, V].
    logits: Tensor,
    /// What the tensors hold, as far as the host knows.
    known: Known,
}

#[derive(Default)]
struct Known {
    ids: Option<Vec<i64>>,
    at: Option<Vec<i32>>,
    advance: Option<Vec<i32>>,
}

impl Recorded {
    /// Launches a step for these tokens at these places.
    fn launch(
        &mut self,
        worker: &Worker,
        ids: Vec<i64>,
        at: Vec<i32>,
        advance: Vec<i32>,
    ) -> Result<()> {
        set(worker, &self.ids, &mut self.known.ids, &ids)?;
        set(worker, &self.at, &mut self.known.at, &at)?;
        set(worker, &self.advance, &mut self.known.advance, &advance)?;
        self.recording.replay()?;
        self.known.ids = None;
        let next = at.iter().zip(&advance).map(|(at, more)| at + more);
        self.known.at = Some(next.collect());
        Ok(())
    }
}

/// Writes values where they are not there already.
fn set<T: Element + PartialEq>(
    worker: &Worker,
    tensor: &Tensor,
    known: &mut Option<Vec<T>>,
    values: &[T],
) -> Result<()> {
    if known.as_deref() == Some(values) {
        return Ok(());
    }
    worker.overwrite(tensor, &worker.upload(values, *tensor.shape())?)?;
    *known = Some(values.to_vec());
    Ok(())
}

/// What a step gives.
pub(super) enum Outcome {
    /// Logits, row after row.
    Logits(Vec<f32>),
    /// The likeliest token of each row.
    Likeliest(Vec<u32>),
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
            steps: StepKernels::First,
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

    /// Feeds one token to every row and gives their logits, or the likeliest tokens where these will
    /// do and the device finds them. Rows without a token are computed and change nothing.
    pub(super) fn step(&mut self, tokens: &[Option<u32>], likeliest: bool) -> Result<Outcome> {
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
        let advance: Vec<i32> = tokens
            .iter()
            .map(|token| i32::from(token.is_some()))
            .collect();
        if let StepKernels::Recorded(recorded) = &mut self.steps {
            recorded.launch(&self.resident.worker, ids, at, advance)?;
            let outcome = if likeliest {
                let ids: Vec<i64> = recorded.ids.to_vec()?;
                let tokens = ids.iter().map(|id| *id as u32).collect();
                recorded.known.ids = Some(ids);
                Outcome::Likeliest(tokens)
            } else {
                Outcome::Logits(to_f32(&recorded.logits)?)
            };
            self.advance(tokens);
            return Ok(outcome);
        }
        let mut flow = vec![
            ("ids".to_owned(), self.cx.tensor(&ids, &[rows, 1])?.into()),
            ("cache.at".to_owned(), self.cx.tensor(&at, &[rows])?.into()),
        ];
        for (name, cache) in cache_names(&self.caches) {
            flow.push((name, cache.clone().into()));
        }
        let logits = self.run(flow)?;
        self.advance(tokens);
        let logits = to_f32(&logits)?;
        if let StepKernels::First = self.steps {
            self.steps = self.record()?;
        }
        Ok(Outcome::Logits(logits))
    }

    fn advance(&mut self, tokens: &[Option<u32>]) {
        for (seen, token) in self.seen.iter_mut().zip(tokens) {
            *seen += usize::from(token.is_some());
        }
    }

    /// Records a step with these caches.
    fn record(&mut self) -> Result<StepKernels> {
        let resident = self.resident;
        let worker = &resident.worker;
        if worker.device().aliases_host() {
            return Ok(StepKernels::Single);
        }
        let rows = self.len();
        let ids = self.cx.zeros(DType::I64, &[rows, 1])?;
        let at = self.cx.zeros(DType::I32, &[rows])?;
        let advance = self.cx.zeros(DType::I32, &[rows])?;
        let caches = &self.caches;
        let recorded = worker.record(|worker| {
            let mut cx = resident.context_on(worker)?;
            let mut flow = vec![
                ("ids".to_owned(), ids.clone().into()),
                ("cache.at".to_owned(), at.clone().into()),
            ];
            let caches = cache_names(caches).map(|(name, cache)| (name, cache.clone().into()));
            flow.extend(caches);
            let mut value = Tree::map(flow);
            for (_, layer) in resident.layers.layers() {
                value = layer.run(&mut cx, value)?;
            }
            let logits = value.tensor()?;
            let next = cx.argmax(&logits, -1, false)?;
            worker.overwrite(&ids, &next)?;
            let filled = cx.add(&at, &advance)?;
            worker.overwrite(&at, &filled)?;
            Ok(logits)
        })?;
        Ok(match recorded {
            None => StepKernels::Single,
            Some((recording, logits)) => StepKernels::Recorded(Box::new(Recorded {
                recording,
                ids,
                at,
                advance,
                logits,
                known: Known::default(),
            })),
        })
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
        // What was recorded holds the old caches.
        self.steps = StepKernels::First;
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
