//! Where each parameter of a layer lies: in the slabs of its home, in the layer's gradient slab and
//! in the layer's device block. Pure arithmetic; no memory is touched.
//!
//! # Invariants
//! - What devices copy starts at a multiple of [`ALIGN`]; what only the processor touches is packed.
//! - The device block mirrors the host: trainable slab, frozen slab, parameters that live elsewhere.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use roundpipe_tensor::optim::remainder_bytes;
use roundpipe_tensor::{DType, Param, Shape};

use super::config::StoreConfig;
use crate::error::{Error, Result};
use crate::optim::{MomentPart, state_dtype};

/// Where a parameter may start in a slab that devices copy from or to, in bytes.
pub(super) const ALIGN: usize = 64;

/// One parameter as one layer sees it.
#[derive(Debug)]
pub struct StoredParam {
    /// Full dotted name, by this layer.
    pub name: String,
    /// The parameter.
    pub param: Param,
    /// Element type of the working weights.
    pub dtype: DType,
    /// Sizes.
    pub shape: Shape,
    /// Whether it is updated.
    pub trainable: bool,
    /// The layer and the index in it where its state lives.
    pub home: (usize, usize),
    /// Where it starts in the layer's device block, in bytes.
    pub block_offset: usize,
    /// Element type of its gradient in host memory.
    pub grad_dtype: DType,
    /// Where its gradient lies in the layer's gradient slab; empty for frozen parameters.
    pub grad_bytes: Range<usize>,
    /// In the trainable or the frozen slab of its home.
    pub(super) offset: usize,
    /// In the slab of masters of its home, where it has an f32 copy or a remainder there.
    pub(super) master: Option<usize>,
    /// Element type of its master and moments.
    pub(crate) state_dtype: DType,
    /// Every (layer, index) that names it, the last layer first. Only at home.
    pub(crate) users: Vec<(usize, usize)>,
    /// Updates that a group froze it in.
    frozen_steps: AtomicU64,
    /// Whether a gradient is there.
    pub(super) filled: AtomicBool,
}

impl StoredParam {
    pub(super) fn new(
        name: String,
        param: Param,
        home: (usize, usize),
        config: &StoreConfig,
    ) -> Result<Self> {
        let dtype = param.dtype();
        let trainable = param.is_trainable() && !config.inference;
        let state_dtype = if trainable {
            state_dtype(&name, dtype, config.optim_dtype)?
        } else {
            dtype
        };
        // The offset comes with the layout.
        let master = (state_dtype != dtype).then_some(0);
        let grad_dtype = config.grad_dtype.unwrap_or(dtype);
        if trainable && grad_dtype != dtype && grad_dtype != DType::F32 {
            let allowed = match dtype {
                DType::F32 => "f32".to_owned(),
                other => format!("{other} or f32"),
            };
            let what = format!("{name} is {dtype}; its gradients are {allowed}, not {grad_dtype}");
            return Err(Error::config("grad_dtype", what));
        }
        Ok(Self {
            dtype,
            shape: *param.shape(),
            trainable,
            home,
            block_offset: 0,
            grad_dtype,
            grad_bytes: 0..0,
            offset: 0,
            master,
            state_dtype,
            users: Vec::new(),
            frozen_steps: AtomicU64::new(0),
            filled: AtomicBool::new(false),
            name,
            param,
        })
    }

    pub(crate) fn add_frozen_step(&self) {
        self.frozen_steps.fetch_add(1, Ordering::Relaxed);
    }

    /// Updates that a group froze it in, so far.
    pub(crate) fn frozen_steps(&self) -> u64 {
        self.frozen_steps.load(Ordering::Relaxed)
    }

    pub(crate) fn set_frozen_steps(&self, steps: u64) {
        self.frozen_steps.store(steps, Ordering::Relaxed);
    }

    /// Which update `step` of the store is for this parameter: those that a group froze it in do
    /// not count, so that moments that begin late are corrected as if they had begun then.
    pub(crate) fn own_step(&self, step: u64) -> u64 {
        step.saturating_sub(self.frozen_steps()).max(1)
    }

    /// Whether its master is its weight and a remainder, not an f32 copy.
    pub(crate) fn has_remainder(&self) -> bool {
        self.master.is_some() && self.dtype == DType::BF16
    }

    /// Size of what the masters' slab has of it, where it has something.
    pub(super) fn master_bytes(&self) -> usize {
        if self.has_remainder() {
            remainder_bytes(self.shape.numel())
        } else {
            self.copy_bytes()
        }
    }

    /// Where its weights lie in the slab of a version of its home.
    pub(crate) fn weight_bytes(&self) -> Range<usize> {
        self.offset..self.offset + self.param.bytes()
    }

    /// Size of an f32 copy.
    pub(crate) fn copy_bytes(&self) -> usize {
        self.shape.numel() * size_of::<f32>()
    }
}

/// Sizes of a layer's slabs and block, in bytes.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Sizes {
    pub(super) weights: usize,
    pub(super) frozen: usize,
    pub(super) gradients: usize,
    pub(super) masters: usize,
    pub(super) block: usize,
}

/// Places the parameters of layer `index` in its slabs and its device block.
pub(super) fn lay_out(index: usize, params: &mut [StoredParam]) -> Sizes {
    let mut sizes = Sizes::default();
    let own = |p: &StoredParam| p.home.0 == index;
    for param in params.iter_mut() {
        if param.trainable {
            let bytes = param.shape.numel() * param.grad_dtype.size();
            let at = append(&mut sizes.gradients, bytes, ALIGN);
            param.grad_bytes = at..at + bytes;
        }
        if !own(param) {
            continue;
        }
        if !param.trainable {
            param.offset = append(&mut sizes.frozen, param.param.bytes(), ALIGN);
            continue;
        }
        param.offset = append(&mut sizes.weights, param.param.bytes(), ALIGN);
        // Only the processor touches copies, whole slabs at a time: no padding.
        if param.master.is_some() {
            let bytes = param.master_bytes();
            param.master = Some(append(&mut sizes.masters, bytes, size_of::<f32>()));
        }
    }
    let frozen_at = sizes.weights.next_multiple_of(ALIGN);
    sizes.block = frozen_at + sizes.frozen;
    for param in params.iter_mut() {
        param.block_offset = match (own(param), param.trainable) {
            (true, true) => param.offset,
            (true, false) => frozen_at + param.offset,
            (false, _) => append(&mut sizes.block, param.param.bytes(), ALIGN),
        };
    }
    sizes
}

/// Puts `bytes` behind what ends at `end`, and says where.
fn append(end: &mut usize, bytes: usize, align: usize) -> usize {
    let start = end.next_multiple_of(align);
    *end = start + bytes;
    start
}

/// Where the moments of a layer's parameters lie: all first moments in one slab, all second ones in
/// the next; with 8 bits all codes of first moments, all their scales, and so on. A pass reads and writes both at once, and slabs of their own keep them apart in the
/// processor's cache, where two halves of one slab would often share their sets.
#[derive(Debug, Default)]
pub(super) struct MomentLayout {
    /// By parameter, then by moment, in bytes of the moment's slab; empty for those that live
    /// elsewhere.
    pub(super) ranges: Vec<Vec<Range<usize>>>,
    /// The type and sizes of each.
    pub(super) parts: Vec<Vec<MomentPart>>,
    /// The size of each slab.
    pub(super) slabs: Vec<usize>,
}

impl MomentLayout {
    /// Those of each parameter are given in its order.
    pub(super) fn new(params: impl Iterator<Item = Vec<MomentPart>>) -> Self {
        let mut layout = Self::default();
        for parts in params {
            if layout.slabs.len() < parts.len() {
                layout.slabs.resize(parts.len(), 0);
            }
            let place = |(part, slab): (&MomentPart, &mut usize)| {
                let bytes = part.bytes();
                // Only the processor touches them: no padding but for the type.
                let at = append(slab, bytes, size_of::<f32>());
                at..at + bytes
            };
            let places = parts.iter().zip(&mut layout.slabs).map(place);
            layout.ranges.push(places.collect());
            layout.parts.push(parts);
        }
        layout
    }
}
