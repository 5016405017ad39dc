//! Attention: softmax(q kᵀ) v in blocks, forward and backward, without ever holding the matrix of
//! scores.
//!
//! The ways, chosen by the operands and by what is installed: cuDNN where it takes the case
//! ([`fused`]), but for the exact backward of causal rows on Hopper ([`one_pass`]), our kernels on
//! tensor cores for other bf16 and f16, on Hopper with its own instructions ([`hopper`]), and a
//! kernel that is right for every type, width and stride ([`native`]). The variable `ROUNDPIPE_ATTENTION` forces the first
//! (`cudnn`: what it takes and cannot plan is an error) or forbids it (`own`). All ways save the
//! same statistics, so forward and backward may go different ones.
//!
//! # Invariants
//! - Every way repeats bit for bit: sums have one order; cuDNN's backward is its deterministic one, unless
//!   the call says that any order of its sums will do.
//! - With our own kernels a row's bits depend on its own sequence alone: neither batch nor
//!   neighbours in a packed batch change them.
//! - Cumulative lengths that make no sense raise the alarm and reach no memory outside the
//!   operands.

mod cut;
mod fused;
mod graph;
mod hopper;
mod native;
mod one_pass;
mod sums;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock};

use super::call::Call;
use super::compile::Unit;
use super::library;
use crate::error::{Error, Result};
use crate::kernel::{Kernel, View};
use crate::sync::lock;
use fused::{AttentionCase, FusedAttention};
use graph::{CudnnHandle, GraphPlan, Refused, Stream, TargetGpu};
use one_pass::PassScratch;

/// Runs one kernel of this family.
///
/// # Safety
/// As [`Ops::launch`](crate::device::Ops::launch).
pub(super) unsafe fn run(call: &Call<'_>) -> Result<()> {
    // SAFETY: the caller's promise is passed on unchanged.
    unsafe {
        match call.kernel {
            Kernel::Attention(spec) => {
                match wanted(call, FusedAttention::forward(spec, call.src, call.dst))? {
                    Some(fused) if by_cudnn(call, &fused)? => match call.maybe_src(3) {
                        Some(_) => native::add_sinks(call, spec),
                        None => Ok(()),
                    },
                    _ => native::forward(call, spec),
                }
            }
            Kernel::AttentionGrad(spec) => {
                match wanted(call, FusedAttention::backward(spec, call.src, call.dst))? {
                    Some(fused)
                        if way() == AttentionChoice::Best && one_pass::run(call, spec, &fused)? =>
                    {
                        Ok(())
                    }
                    // With o and the statistics as they are with sinks, the gradients of the others
                    // are what they are.
                    Some(fused) if by_cudnn(call, &fused)? => native::sink_gradient(call, spec),
                    _ => native::backward(call, spec),
                }
            }
            _ => Err(Error::invalid(call.kernel.name(), "is no attention")),
        }
    }
}

/// Scratch bytes: enough for every way that may be gone. Of the backward, cuDNN's is the one that
/// wants much.
pub(super) fn scratch(
    kernel: &Kernel,
    src: &[Option<View>],
    dst: &[Option<View>],
    library_backward: bool,
) -> usize {
    let bytes = |fused: Option<FusedAttention>| fused.map_or(0, |fused| fused.scratch());
    match kernel {
        Kernel::Attention(spec) => bytes(FusedAttention::forward(spec, src, dst)),
        Kernel::AttentionGrad(spec) => {
            let q = src[0].as_ref().expect("q is always there");
            let fused = match library_backward {
                true => FusedAttention::backward(spec, src, dst),
                false => None,
            };
            let pass = fused
                .as_ref()
                .and_then(|fused| PassScratch::of(fused, spec, q))
                .map_or(0, |scratch| scratch.bytes);
            native::delta_bytes(q).max(pass).max(bytes(fused))
        }
        _ => 0,
    }
}

/// Every variant that models use.
pub(super) fn units() -> Vec<Unit> {
    let own = native::units().into_iter().chain(hopper::units());
    let own = own.chain(one_pass::units());
    own.chain(sums::units()).collect()
}

/// What the user wants of the ways.
#[derive(Clone, Copy, PartialEq)]
enum AttentionChoice {
    Best,
    Native,
    Cudnn,
}

fn way() -> AttentionChoice {
    static WAY: OnceLock<AttentionChoice> = OnceLock::new();
    *WAY.get_or_init(|| match std::env::var("ROUNDPIPE_ATTENTION").as_deref() {
        Ok("own") => AttentionChoice::Native,
        Ok("cudnn") => AttentionChoice::Cudnn,
        _ => AttentionChoice::Best,
    })
}

/// A case that cuDNN takes, where cuDNN is here and wanted.
fn wanted(call: &Call<'_>, fused: Option<FusedAttention>) -> Result<Option<FusedAttention>> {
    let Some(fused) = fused.filter(|fused| fused.aligned && way() != AttentionChoice::Native)
    else {
        return Ok(None);
    };
    let taken =
        matches!(call.kernel, Kernel::Attention(_)) || is_backward_known(call.gpu.capability);
    match usable() {
        Err(why) if way() == AttentionChoice::Cudnn => Err(Error::invalid(call.kernel.name(), why)),
        usable => Ok((taken && usable.is_ok()).then_some(fused)),
    }
}

/// Whether cuDNN's backward may be taken on such a card.
pub(super) fn may_take_backward(capability: (i32, i32)) -> bool {
    way() != AttentionChoice::Native && is_backward_known(capability) && usable().is_ok()
}

/// Of the newest cards only one engine's backward repeats bit for bit, which the heuristics do not
/// propose first.
fn is_backward_known((major, _): (i32, i32)) -> bool {
    matches!(major, 8 | 9)
}

/// Whether cuDNN is here and new enough, or why not.
fn usable() -> &'static std::result::Result<(), Refused> {
    static USABLE: OnceLock<std::result::Result<(), Refused>> = OnceLock::new();
    USABLE.get_or_init(|| {
        // The plans' kernels are compiled by NVRTC, which has to be found first.
        let found = library::nvrtc().and_then(|_| library::cudnn()).map_err(|why| why.to_string())?;
        let words = library::cudnn_version;
        if found.number() >= library::OLDEST_CUDNN {
            return Ok(());
        }
        let (found, file, package) = (words(found.number()), found.path().display(), library::cudnn_package());
        let oldest = words(library::OLDEST_CUDNN);
        Err(format!(
            "cuDNN {found} ({file}) is older than {oldest}, the oldest that is used: `pip install -U {package}`"
        ))
    })
}

/// Why attention is not computed by cuDNN where it could be; `None` where it is, or where the user
/// wants it so.
pub(super) fn note() -> Option<String> {
    let why = usable()
        .as_ref()
        .err()
        .filter(|_| way() != AttentionChoice::Native)?;
    Some(format!(
        "attention by our own kernels, which are slower than cuDNN's: {why}"
    ))
}

/// Plans of cuDNN by case, and a handle per stream.
#[derive(Default)]
pub(crate) struct AttentionPlans(Mutex<PlansState>);

#[derive(Default)]
struct PlansState {
    /// By the stream's address.
    handles: HashMap<usize, CudnnHandle>,
    /// Refusals are remembered, for making a plan takes up to a second.
    plans: HashMap<AttentionCase, std::result::Result<Arc<GraphPlan>, Refused>>,
}

impl AttentionPlans {
    /// Gives back what belongs to the context, before the context goes.
    pub(crate) fn close(&self) {
        let state = std::mem::take(&mut *lock(&self.0));
        drop(state.plans);
        drop(state.handles);
    }

    /// Uses the library's handle for a stream, alone.
    pub(crate) fn with_handle<R>(
        &self,
        stream: Stream,
        f: impl FnOnce(cudarc::cudnn::sys::cudnnHandle_t) -> R,
    ) -> std::result::Result<R, Refused> {
        let mut state = lock(&self.0);
        state.attach(stream)?;
        Ok(f(state.handles[&(stream as usize)].raw()))
    }
}

impl PlansState {
    /// Sees to a handle that queues on the stream.
    fn attach(&mut self, stream: Stream) -> std::result::Result<(), Refused> {
        // An address may be that of a newer stream than the handle was made for.
        if let Some(handle) = self.handles.get(&(stream as usize)) {
            return handle.queue_on(stream);
        }
        let handle = CudnnHandle::new(stream)?;
        self.handles.insert(stream as usize, handle);
        Ok(())
    }

    fn plan(
        &mut self,
        stream: usize,
        fused: &FusedAttention,
        case: AttentionCase,
    ) -> std::result::Result<Arc<GraphPlan>, Refused> {
        if let Some(known) = self.plans.get(&case) {
            return known.clone();
        }
        let handle = &self.handles[&stream];
        let made = fused.plan(&case, &TargetGpu::Handle(handle)).map(Arc::new);
        self.plans.insert(case, made.clone());
        made
    }
}

/// Computes by cuDNN; false when it refuses and our kernels are to be used.
///
/// # Safety
/// As [`run`].
unsafe fn by_cudnn(call: &Call<'_>, fused: &FusedAttention) -> Result<bool> {
    let stream = call.stream as usize;
    let refuse = |why: Refused| Err(Error::invalid(call.kernel.name(), format!("cuDNN: {why}")));
    let mut state = lock(&call.gpu.attention.0);
    if let Err(why) = state.attach(call.stream.cast()) {
        return if way() == AttentionChoice::Cudnn {
            refuse(why)
        } else {
            Ok(false)
        };
    }
    let pieces = fused.pieces();
    // All plans before the first piece runs: a refusal must not leave half a result.
    let plans = pieces
        .iter()
        .map(|piece| state.plan(stream, fused, fused.case(piece)));
    let plans = match plans.collect::<std::result::Result<Vec<_>, _>>() {
        Ok(plans) => plans,
        Err(why) if way() == AttentionChoice::Cudnn => return refuse(why),
        Err(_) => return Ok(false),
    };
    let scratch = call.scratch_ptr();
    for (piece, plan) in pieces.iter().zip(plans) {
        debug_assert!(
            plan.workspace <= fused.workspace(),
            "plans that want more are refused"
        );
        let (operands, workspace) = (fused.addresses(piece, scratch), fused.workspace_at(scratch));
        // Hopper's kernels were seen to need no zeros; of others that is not known.
        if let Some((sum, bytes)) = fused.sum(scratch).filter(|_| call.gpu.capability.0 != 9) {
            // SAFETY: the sum lies in scratch, behind whatever used that before on this stream.
            let zeroed =
                unsafe { cudarc::driver::result::memset_d8_async(sum, 0, bytes, call.stream) };
            zeroed.map_err(|e| call.gpu.failed("zero a sum", e))?;
        }
        // SAFETY: the operands are the caller's promise, cut as the case says; scratch holds what
        // `scratch` asked for, and a plan that wants more was refused.
        let queued = unsafe { plan.run(&state.handles[&stream], &operands, workspace) };
        if let Err(why) = queued {
            return Err(call.failed(&format!("compute attention by cuDNN: {why}")));
        }
        for addition in fused.additions(piece, scratch) {
            // SAFETY: the piece before it on this stream has written the part; sums lie in scratch.
            unsafe { addition.launch(call)? };
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests;
