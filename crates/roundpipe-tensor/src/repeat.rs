//! A forward that is run twice: what its first run may keep, and what the second need not compute.
//!
//! A layer whose backward comes much later runs forward twice: first for its output, then again,
//! recorded, right before its backward. Both runs take memory and launch kernels in the same order,
//! so a piece of memory has the same number in both. That is all this module needs to know of a
//! layer:
//!
//! ```text
//! a second run, watched  -> PassSteps: who reads and writes what, and what the tape holds at the end
//! PassSteps              -> KeepChoice list: what to keep, by seconds saved per byte
//! a first run, watched   -> the pieces chosen, which stay
//! a second run with them -> launches whose results are there, or that nothing needs, are left out
//! ```
//!
//! The result of a last product, say, is neither read by the backward nor by the next layer, which
//! starts from its own saved input; it is never computed again. What is left out changes no bit:
//! what is read is either computed as before or was kept by the first run.
//!
//! Refused: passes that differ. A second run that does anything else than the one that was studied
//! fails with [`Error::Diverged`] before it gives a result, and has to be run anew without any of
//! this. So does one that looks at values on the host, or launches through another handle of the
//! worker, where nothing is watched.
//!
//! # Invariants
//! - A launch is left out only if every piece that it writes is kept, or read by no launch that
//!   runs, by no tape and by no one else.
//! - A piece that is kept is not written again.
//! - Kernels of the user ([`Kernel::Host`]) and launches that write memory from outside always run.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak};

use crate::device::Device;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernel::Kernel;
use crate::pool::Pool;
use crate::shape::Shape;
use crate::sync::lock;
use crate::tensor::{Storage, Tensor};
use crate::work;

/// A piece of memory that a pass took.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Piece {
    op: &'static str,
    dtype: DType,
    shape: Shape,
    /// Whether the tape holds it when the pass ends.
    is_saved: bool,
    /// Whether the pass gave it, or a part of it, as its output.
    is_output: bool,
}

impl Piece {
    fn bytes(&self) -> u64 {
        (self.shape.numel() * self.dtype.size()) as u64
    }
}

/// A kernel that a pass launched.
#[derive(Debug, Clone)]
struct Launch {
    kernel: &'static str,
    /// Pieces that were taken before it.
    after: usize,
    reads: Vec<usize>,
    writes: Vec<usize>,
    /// Whether it has an effect beside the pieces it writes.
    always: bool,
    seconds: f64,
}

/// What a recorded forward did: pieces of memory and kernels, each in order.
#[derive(Debug)]
pub struct PassSteps {
    pieces: Vec<Piece>,
    launches: Vec<Launch>,
    signature: u64,
}

/// Pieces that are worth keeping together, because one kernel writes them.
#[derive(Debug, Clone, PartialEq)]
pub struct KeepChoice {
    /// Their numbers.
    pub pieces: Vec<usize>,
    /// What they take.
    pub bytes: u64,
    /// What the second run saves by them, when those chosen before are kept too.
    pub seconds: f64,
}

impl KeepChoice {
    /// What a byte saves.
    pub fn seconds_per_byte(&self) -> f64 {
        self.seconds / self.bytes.max(1) as f64
    }
}

/// Which launches of a second run are run, and which kept pieces are used.
#[derive(Debug)]
struct Selection {
    runs: Vec<bool>,
    uses: Vec<bool>,
}

impl PassSteps {
    /// Tells passes that take other memory apart.
    pub fn signature(&self) -> u64 {
        self.signature
    }

    /// What the pass takes when nothing is left out, as far as that is known before it runs.
    pub fn whole_seconds(&self) -> f64 {
        self.launches.iter().map(|launch| launch.seconds).sum()
    }

    /// What is worth keeping, the best first: each with what it saves if all before it are kept.
    /// Where a second run has to give its output, that is one of them.
    pub fn choices(&self, needs_output: bool) -> Vec<KeepChoice> {
        let mut kept = vec![false; self.pieces.len()];
        let mut left = self.seconds(&kept, needs_output);
        let mut choices = Vec::new();
        loop {
            let tried = self.launches.iter().filter_map(|launch| {
                let new = |piece: &&usize| !kept[**piece];
                let pieces: Vec<usize> = launch.writes.iter().filter(new).copied().collect();
                let bytes: u64 = pieces.iter().map(|piece| self.pieces[*piece].bytes()).sum();
                if bytes == 0 {
                    return None;
                }
                let mut with = kept.clone();
                pieces.iter().for_each(|piece| with[*piece] = true);
                let seconds = left - self.seconds(&with, needs_output);
                Some(KeepChoice {
                    pieces,
                    bytes,
                    seconds,
                })
            });
            let worth = tried.filter(|choice| choice.seconds > 0.0);
            // The first of equals, so that the same layer always gives the same list.
            let best = worth.reduce(|best, next| {
                let is_better = next.seconds_per_byte() > best.seconds_per_byte();
                if is_better { next } else { best }
            });
            let Some(best) = best else {
                return choices;
            };
            best.pieces.iter().for_each(|piece| kept[*piece] = true);
            left = self.seconds(&kept, needs_output);
            choices.push(best);
        }
    }

    /// The share of [`PassSteps::whole_seconds`] that a second run takes with these kept.
    pub fn share_left(&self, kept: &[KeepChoice], needs_output: bool) -> f64 {
        let mut is_kept = vec![false; self.pieces.len()];
        for piece in kept.iter().flat_map(|choice| &choice.pieces) {
            is_kept[*piece] = true;
        }
        match self.whole_seconds() {
            whole if whole > 0.0 => self.seconds(&is_kept, needs_output) / whole,
            _ => 1.0,
        }
    }

    /// What the second run takes if these pieces are kept.
    fn seconds(&self, kept: &[bool], needs_output: bool) -> f64 {
        let runs = self.select(kept, needs_output).runs;
        let launches = self.launches.iter().zip(runs);
        launches
            .filter(|(_, runs)| *runs)
            .map(|(launch, _)| launch.seconds)
            .sum()
    }

    /// What is run, given what was kept and whether the output is needed.
    fn select(&self, kept: &[bool], needs_output: bool) -> Selection {
        let mut uses = kept.to_vec();
        loop {
            let needed = |piece: &Piece| piece.is_saved || needs_output && piece.is_output;
            let mut needed: Vec<bool> = self.pieces.iter().map(needed).collect();
            let mut runs = vec![false; self.launches.len()];
            // From the end, so that all readers of a piece are known before its writers.
            for (launch, runs) in self.launches.iter().zip(&mut runs).rev() {
                let is_wanted = |piece: &usize| needed[*piece] && !uses[*piece];
                *runs = launch.always || launch.writes.iter().any(is_wanted);
                if *runs {
                    launch.reads.iter().for_each(|piece| needed[*piece] = true);
                }
            }
            // A launch that runs writes all its pieces, so none of them can be a kept one.
            let mut is_settled = true;
            for (launch, _) in self.launches.iter().zip(&runs).filter(|(_, runs)| **runs) {
                for piece in launch.writes.iter().filter(|piece| kept[**piece]) {
                    is_settled &= !std::mem::replace(&mut uses[*piece], false);
                }
            }
            if is_settled {
                return Selection { runs, uses };
            }
        }
    }
}

/// What is asked of a watched pass.
#[derive(Debug)]
enum Purpose {
    /// A first run: some pieces stay, beside working memory of so many bytes, others leave.
    Keep {
        stay: Vec<usize>,
        leave: Vec<usize>,
        working: Option<u64>,
    },
    /// A second run that is noted.
    Study,
    /// A second run that leaves out what it can.
    Repeat {
        steps: Arc<PassSteps>,
        kept: HashMap<usize, Tensor>,
        selection: Selection,
    },
}

/// What a worker notes and leaves out while a layer runs; see the module's header.
#[derive(Debug)]
pub struct Watch(WatchState);

#[derive(Debug)]
struct WatchState {
    purpose: Purpose,
    pieces: Vec<Piece>,
    memory: Vec<Weak<Storage>>,
    launches: Vec<Launch>,
    kept: Vec<(usize, Tensor)>,
    leaving: Vec<(usize, Tensor)>,
    /// Launches and reads that bypassed the watch, before it began.
    unseen_before: u64,
    has_diverged: bool,
}

/// What a watch leaves.
#[derive(Debug)]
pub struct Watched {
    /// The number of memory that the pass took, its types and shapes.
    pub signature: u64,
    /// What a first run keeps.
    pub kept: Vec<(usize, Tensor)>,
    /// What is to leave for host memory.
    pub leaving: Vec<(usize, Tensor)>,
    /// Whether values went ways that were not watched.
    pub has_unseen: bool,
    /// Whether a second run differed from the one that was studied.
    pub has_diverged: bool,
    /// Whether it came to the end of what was studied.
    is_complete: bool,
    study: Option<Study>,
    repeated: Option<Repeated>,
}

/// What was noted of a second run.
#[derive(Debug)]
struct Study {
    pieces: Vec<Piece>,
    memory: Vec<Weak<Storage>>,
    launches: Vec<Launch>,
}

/// What a second run left out, and the memory that it took.
#[derive(Debug)]
struct Repeated {
    steps: Arc<PassSteps>,
    selection: Selection,
    memory: Vec<Weak<Storage>>,
}

impl Watch {
    /// Of a first run, of which some pieces stay. On a device with memory of its own they go beside
    /// the working memory of tasks, for which `working` bytes or more stay; a piece that finds no
    /// room there is not kept. Pieces that `leave` are where they are, for the caller to send.
    pub fn keep(stay: Vec<usize>, leave: Vec<usize>, working: Option<u64>) -> Self {
        Self::of(Purpose::Keep {
            stay,
            leave,
            working,
        })
    }

    /// Of a second run, which is noted: see [`Watched::steps`].
    pub fn study() -> Self {
        Self::of(Purpose::Study)
    }

    /// Of a second run that leaves out what these pieces, kept by the first, make superfluous.
    pub fn repeat(
        steps: &Arc<PassSteps>,
        kept: impl IntoIterator<Item = (usize, Tensor)>,
        needs_output: bool,
    ) -> Self {
        let kept: HashMap<usize, Tensor> = kept.into_iter().collect();
        let is_kept: Vec<bool> = (0..steps.pieces.len())
            .map(|piece| kept.contains_key(&piece))
            .collect();
        let selection = steps.select(&is_kept, needs_output);
        Self::of(Purpose::Repeat {
            steps: steps.clone(),
            kept,
            selection,
        })
    }

    fn of(purpose: Purpose) -> Self {
        Self(WatchState {
            purpose,
            pieces: Vec::new(),
            memory: Vec::new(),
            launches: Vec::new(),
            kept: Vec::new(),
            leaving: Vec::new(),
            unseen_before: 0,
            has_diverged: false,
        })
    }
}

/// A watch under way, shared by the handles of a worker.
#[derive(Debug, Clone)]
pub(crate) struct ActiveWatch(Arc<Mutex<WatchState>>);

impl ActiveWatch {
    pub fn begin(watch: Watch, pool: &Pool) -> Self {
        let mut state = watch.0;
        state.unseen_before = pool.unseen();
        Self(Arc::new(Mutex::new(state)))
    }

    /// Memory for a piece: fresh from `alloc`, from where values stay, or the one that was kept.
    pub fn take(
        &self,
        pool: &Arc<Pool>,
        op: &'static str,
        dtype: DType,
        shape: Shape,
        alloc: impl FnOnce() -> Result<Tensor>,
    ) -> Result<Tensor> {
        let mut state = lock(&self.0);
        let number = state.pieces.len();
        let piece = Piece {
            op,
            dtype,
            shape,
            is_saved: false,
            is_output: false,
        };
        let tensor = match &mut state.purpose {
            Purpose::Study => alloc()?,
            Purpose::Keep {
                stay,
                leave,
                working,
            } => {
                if stay.contains(&number) {
                    let (tensor, stays) = place(pool, &piece, *working, alloc)?;
                    if stays {
                        state.kept.push((number, tensor.clone()));
                    }
                    tensor
                } else if leave.contains(&number) {
                    let tensor = alloc()?;
                    state.leaving.push((number, tensor.clone()));
                    tensor
                } else {
                    alloc()?
                }
            }
            Purpose::Repeat {
                steps,
                kept,
                selection,
            } => {
                let known = steps.pieces.get(number);
                let is_known = known.is_some_and(|known| known.is_like(&piece));
                if !is_known {
                    state.has_diverged = true;
                    return Err(Error::Diverged { op });
                }
                match kept.remove(&number).filter(|_| selection.uses[number]) {
                    Some(tensor) => tensor,
                    None => alloc()?,
                }
            }
        };
        state.memory.push(Arc::downgrade(tensor.storage()));
        state.pieces.push(piece);
        Ok(tensor)
    }

    /// Notes a launch; whether it is to be run.
    pub fn launch(
        &self,
        device: &dyn Device,
        kernel: &Kernel,
        src: &[Option<&Tensor>],
        dst: &[Option<&Tensor>],
    ) -> Result<bool> {
        let mut state = lock(&self.0);
        if matches!(state.purpose, Purpose::Keep { .. }) {
            return Ok(true);
        }
        let number = state.launches.len();
        let launch = state.describe(device, kernel, src, dst);
        let runs = match &state.purpose {
            Purpose::Repeat {
                steps, selection, ..
            } => {
                let known = steps.launches.get(number);
                known
                    .filter(|known| known.is_like(&launch))
                    .map(|_| selection.runs[number])
            }
            Purpose::Study | Purpose::Keep { .. } => Some(true),
        };
        state.launches.push(launch);
        let Some(runs) = runs else {
            state.has_diverged = true;
            return Err(Error::Diverged { op: kernel.name() });
        };
        Ok(runs)
    }

    /// What it saw. The pass is over.
    pub fn end(&self, pool: &Pool) -> Watched {
        let mut state = lock(&self.0);
        let (pieces, memory) = (
            std::mem::take(&mut state.pieces),
            std::mem::take(&mut state.memory),
        );
        let launches = std::mem::take(&mut state.launches);
        let mut watched = Watched {
            signature: signature(&pieces),
            kept: std::mem::take(&mut state.kept),
            leaving: std::mem::take(&mut state.leaving),
            has_unseen: pool.unseen() != state.unseen_before,
            has_diverged: state.has_diverged,
            is_complete: true,
            study: None,
            repeated: None,
        };
        match std::mem::replace(&mut state.purpose, Purpose::Study) {
            Purpose::Study => {
                watched.study = Some(Study {
                    pieces,
                    memory,
                    launches,
                });
            }
            Purpose::Repeat {
                steps, selection, ..
            } => {
                watched.is_complete =
                    (pieces.len(), launches.len()) == (steps.pieces.len(), steps.launches.len());
                watched.repeated = Some(Repeated {
                    steps,
                    selection,
                    memory,
                });
            }
            Purpose::Keep { .. } => {}
        }
        watched
    }
}

impl Watched {
    /// Whether a second run did what the one that was studied did, and its tape holds nothing that
    /// was left out. `outputs` is what it gave; `None` if it failed: then it is sound if the failure
    /// is its own, and not one of this module's.
    pub fn is_sound(&self, outputs: Option<&[&Tensor]>) -> bool {
        let Some(Repeated {
            steps,
            selection,
            memory,
        }) = &self.repeated
        else {
            return true;
        };
        if self.has_diverged || self.has_unseen {
            return false;
        }
        let Some(outputs) = outputs else {
            return true;
        };
        let mut is_computed = selection.uses.clone();
        is_computed.resize(memory.len(), true);
        for (launch, runs) in steps.launches.iter().zip(&selection.runs) {
            for piece in launch.writes.iter().filter(|piece| **piece < memory.len()) {
                is_computed[*piece] |= *runs;
            }
        }
        let is_written = |piece: usize| {
            let mut launches = steps.launches.iter();
            launches.any(|launch| launch.writes.contains(&piece))
        };
        let holds = |memory: &Weak<Storage>| is_saved(memory, outputs).0;
        let mut left_out =
            (0..memory.len()).filter(|piece| !is_computed[*piece] && is_written(*piece));
        self.is_complete && !left_out.any(|piece| holds(&memory[piece]))
    }

    /// What a second run did, while the tape holds what its backward needs. `None` where it was not
    /// studied, or went ways that were not watched.
    pub fn steps(&mut self, outputs: &[&Tensor]) -> Option<PassSteps> {
        let Study {
            mut pieces,
            memory,
            launches,
        } = self.study.take()?;
        if self.has_unseen {
            return None;
        }
        for (piece, memory) in pieces.iter_mut().zip(&memory) {
            (piece.is_saved, piece.is_output) = is_saved(memory, outputs);
        }
        Some(PassSteps {
            signature: self.signature,
            pieces,
            launches,
        })
    }
}

/// Whether a tape holds memory that a pass took, and whether the pass gave it as output.
fn is_saved(memory: &Weak<Storage>, outputs: &[&Tensor]) -> (bool, bool) {
    let Some(memory) = memory.upgrade() else {
        return (false, false);
    };
    let shares = |output: &&&Tensor| Arc::ptr_eq(output.storage(), &memory);
    let handles = outputs.iter().filter(shares).count();
    // One is `memory` itself.
    (Arc::strong_count(&memory) > handles + 1, handles > 0)
}

impl Piece {
    fn is_like(&self, other: &Self) -> bool {
        (self.op, self.dtype, &self.shape) == (other.op, other.dtype, &other.shape)
    }
}

impl Launch {
    fn is_like(&self, other: &Self) -> bool {
        let key = |launch: &Self| (launch.kernel, launch.after, launch.always);
        key(self) == key(other) && self.reads == other.reads && self.writes == other.writes
    }
}

impl WatchState {
    fn describe(
        &self,
        device: &dyn Device,
        kernel: &Kernel,
        src: &[Option<&Tensor>],
        dst: &[Option<&Tensor>],
    ) -> Launch {
        let number = |tensor: &&Tensor| {
            let address = Arc::as_ptr(tensor.storage());
            // From the end: what was taken last is used most.
            self.memory
                .iter()
                .rposition(|memory| std::ptr::eq(memory.as_ptr(), address))
        };
        let mut writes: Vec<usize> = dst.iter().flatten().filter_map(number).collect();
        let is_outside = |tensor: &&Tensor| number(tensor).is_none();
        let always = matches!(kernel, Kernel::Host(_)) || dst.iter().flatten().any(is_outside);
        let mut reads: Vec<usize> = src.iter().flatten().filter_map(number).collect();
        writes.sort_unstable();
        writes.dedup();
        reads.sort_unstable();
        reads.dedup();
        Launch {
            kernel: kernel.name(),
            after: self.pieces.len(),
            reads,
            writes,
            always,
            seconds: match self.purpose {
                Purpose::Study => seconds(device, kernel, src, dst),
                _ => 0.0,
            },
        }
    }
}

/// Memory for a piece that is to stay, and whether it does.
fn place(
    pool: &Arc<Pool>,
    piece: &Piece,
    working: Option<u64>,
    alloc: impl FnOnce() -> Result<Tensor>,
) -> Result<(Tensor, bool)> {
    let Some(working) = working else {
        return Ok((alloc()?, true));
    };
    match pool.alloc_beside(piece.op, piece.bytes(), working) {
        Ok(block) => Ok((Tensor::from_block(block, piece.dtype, piece.shape), true)),
        Err(Error::DeviceMemory { .. }) => Ok((alloc()?, false)),
        Err(error) => Err(error),
    }
}

/// What a launch takes, as far as that is known before it runs.
fn seconds(
    device: &dyn Device,
    kernel: &Kernel,
    src: &[Option<&Tensor>],
    dst: &[Option<&Tensor>],
) -> f64 {
    let views = |all: &[Option<&Tensor>]| -> Vec<_> {
        all.iter().map(|tensor| tensor.map(Tensor::view)).collect()
    };
    let (src, dst) = (views(src), views(dst));
    let traffic: u64 = src.iter().chain(&dst).flatten().map(work::bytes).sum();
    let model = device.cost_model();
    if let Some(rates) = model.rates() {
        let known = rates.packed_pairs(kernel, &src);
        let flops = work::flops(kernel, &src, &dst, known);
        return rates.seconds(kernel, &src, flops, traffic);
    }
    let flops = work::flops(kernel, &src, &dst, None);
    let of_arithmetic = flops as f64 / model.flops_per_ms();
    let of_memory = traffic as f64 / model.bytes_per_ms();
    1e-3 * of_arithmetic.max(of_memory)
}

/// FNV-1a over names, types and shapes.
fn signature(pieces: &[Piece]) -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    let mut add = |byte: u8| {
        hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    };
    for piece in pieces {
        piece.op.bytes().for_each(&mut add);
        add(piece.dtype as u8);
        for size in piece.shape.dims() {
            size.to_le_bytes().into_iter().for_each(&mut add);
        }
        add(0xff);
    }
    hash
}
