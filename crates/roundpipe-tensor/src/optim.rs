//! Optimizer passes and gradient passes over slabs in host memory.
//!
//! A pass reads and writes each slab once, in blocks of sixteen elements, with the best vector
//! instructions the processor has (module `simd`). The path of an update: gradient slab -> master
//! and moment slabs -> working slab; with bf16 gradients and weights that is 28 bytes of traffic
//! per parameter.
//!
//! Refused, before anything is written: slabs of different lengths, a missing or a superfluous
//! slab, hyperparameters outside their range.
//!
//! # Invariants
//!
//! - Slabs are cut into chunks of a fixed size whatever the number of threads, and sums over
//!   chunks are added in their order: the same bits with any number of threads.
//! - All instruction sets give the same bits (the payload of a NaN aside), except for the products
//!   of Muon.
//! - An update makes no weight and no moment infinite or NaN that was finite (module `finite`).

mod adafactor;
mod adam;
mod finite;
mod grads;
mod lion;
mod matrices;
mod moments;
mod muon;
mod sgd;
mod simd;
mod split;
mod split_adam;

use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use half::{bf16, f16};

pub use adafactor::{Adafactor, AdafactorSlabs, SecondMoment};
pub use adam::{Adam, AdamSlabs, AdamW};
pub use grads::{
    accumulate, all_finite, cast, chunk_squares, chunk_squares_of_sum, clip_factor, follow, narrow,
    scale, squared_norm,
};
pub use lion::{Lion, LionSlabs};
pub use matrices::Matrices;
pub use moments::{
    BLOCK, DynamicMap, MomentType, dequantize, quantize, round_randomly, scale_count,
};
pub use muon::{AdjustLr, Muon, MuonSlabs};
pub use sgd::{Sgd, SgdSlabs};
pub use split::{Remainders, RemaindersMut, follow_split, join, remainder_bytes, split};
pub use split_adam::{
    RandomMoment, SplitAdamMoments, SplitAdamSlabs, SplitMomentSlabs, WeightsStep,
};

use simd::GradFactors;

use crate::cpu::threads::Threads;
use crate::error::{Error, Result};
use crate::sync::lock;

/// Elements of a task: large enough for the hardware's prefetchers, small enough to share out
/// evenly.
pub const CHUNK: usize = 1 << 16;

/// What one step asks of every pass, beside the rule's own settings.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepSettings {
    /// Number of the step, the first being 1.
    pub step: u64,
    /// Learning rate, at least 0.
    pub lr: f64,
    /// Gradients are clipped to between minus this and this first; infinities too, not NaN.
    pub clip_value: Option<f32>,
    /// What gradients are multiplied with then: 1, or what clipping by the norm and loss scaling
    /// ask for.
    pub grad_scale: f32,
}

impl StepSettings {
    /// Gradients as they are.
    pub fn new(step: u64, lr: f64) -> Self {
        Self {
            step,
            lr,
            clip_value: None,
            grad_scale: 1.0,
        }
    }

    /// How a pass reads gradients.
    fn grad_factors(&self, maximize: bool) -> GradFactors {
        GradFactors {
            bound: self.clip_value,
            factor: if maximize {
                -self.grad_scale
            } else {
                self.grad_scale
            },
        }
    }

    fn check(&self, op: &'static str) -> Result<()> {
        check_at_least_zero(op, "lr", self.lr)?;
        if self.step == 0 {
            return Err(Error::invalid(op, "steps count from 1, this is step 0"));
        }
        Ok(())
    }
}

/// A slab of floats to read.
#[derive(Debug, Clone, Copy)]
pub enum Floats<'a> {
    /// 32-bit.
    F32(&'a [f32]),
    /// 16-bit with f32's range.
    BF16(&'a [bf16]),
    /// IEEE 16-bit.
    F16(&'a [f16]),
}

/// A slab of floats to write.
#[derive(Debug)]
pub enum FloatsMut<'a> {
    /// 32-bit.
    F32(&'a mut [f32]),
    /// 16-bit with f32's range.
    BF16(&'a mut [bf16]),
    /// IEEE 16-bit.
    F16(&'a mut [f16]),
}

/// Evaluates `$body` with `$slice` bound to the slice inside, whatever its element type.
macro_rules! with_slice {
    ($kind:ident, $floats:expr, $slice:ident => $body:expr) => {
        match $floats {
            $kind::F32($slice) => $body,
            $kind::BF16($slice) => $body,
            $kind::F16($slice) => $body,
        }
    };
}
use with_slice;

impl Floats<'_> {
    /// Elements.
    pub fn len(&self) -> usize {
        with_slice!(Self, self, slice => slice.len())
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A copy as f32.
    pub fn to_vec_f32(&self) -> Vec<f32> {
        match self {
            Self::F32(slab) => slab.to_vec(),
            Self::BF16(slab) => slab.iter().map(|x| x.to_f32()).collect(),
            Self::F16(slab) => slab.iter().map(|x| x.to_f32()).collect(),
        }
    }

    /// Part of the slab. Panics when it is out of bounds.
    #[must_use]
    pub fn range(&self, range: Range<usize>) -> Self {
        match *self {
            Self::F32(slab) => Self::F32(&slab[range]),
            Self::BF16(slab) => Self::BF16(&slab[range]),
            Self::F16(slab) => Self::F16(&slab[range]),
        }
    }
}

impl FloatsMut<'_> {
    /// Elements.
    pub fn len(&self) -> usize {
        with_slice!(Self, self, slice => slice.len())
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// To read.
    pub fn as_floats(&self) -> Floats<'_> {
        match self {
            Self::F32(slab) => Floats::F32(slab),
            Self::BF16(slab) => Floats::BF16(slab),
            Self::F16(slab) => Floats::F16(slab),
        }
    }

    /// Part of the slab, borrowed. Panics when it is out of bounds.
    pub fn range(&mut self, range: Range<usize>) -> FloatsMut<'_> {
        match self {
            Self::F32(slab) => FloatsMut::F32(&mut slab[range]),
            Self::BF16(slab) => FloatsMut::BF16(&mut slab[range]),
            Self::F16(slab) => FloatsMut::F16(&mut slab[range]),
        }
    }

    /// The first `len` elements, and those behind them. Panics when there are fewer.
    #[must_use]
    pub fn split_at(self, len: usize) -> (Self, Self) {
        match self {
            Self::F32(slab) => {
                let (front, back) = slab.split_at_mut(len);
                (Self::F32(front), Self::F32(back))
            }
            Self::BF16(slab) => {
                let (front, back) = slab.split_at_mut(len);
                (Self::BF16(front), Self::BF16(back))
            }
            Self::F16(slab) => {
                let (front, back) = slab.split_at_mut(len);
                (Self::F16(front), Self::F16(back))
            }
        }
    }

    /// Copies a slab of the same type and length. Panics for another.
    pub fn copy_from(&mut self, src: Floats<'_>) {
        match (self, src) {
            (Self::F32(dst), Floats::F32(src)) => dst.copy_from_slice(src),
            (Self::BF16(dst), Floats::BF16(src)) => dst.copy_from_slice(src),
            (Self::F16(dst), Floats::F16(src)) => dst.copy_from_slice(src),
            (dst, src) => panic!("{src:?} is copied to {dst:?}"),
        }
    }

    /// The slab in pieces of `len` elements, the last one shorter.
    pub fn chunks(&mut self, len: usize) -> Box<dyn Iterator<Item = FloatsMut<'_>> + '_> {
        match self {
            Self::F32(slab) => Box::new(slab.chunks_mut(len).map(FloatsMut::F32)),
            Self::BF16(slab) => Box::new(slab.chunks_mut(len).map(FloatsMut::BF16)),
            Self::F16(slab) => Box::new(slab.chunks_mut(len).map(FloatsMut::F16)),
        }
    }
}

macro_rules! from_slices {
    ($($element:ty => $variant:ident),*) => {$(
        impl<'a> From<&'a [$element]> for Floats<'a> {
            fn from(slab: &'a [$element]) -> Self {
                Self::$variant(slab)
            }
        }
        impl<'a> From<&'a mut [$element]> for FloatsMut<'a> {
            fn from(slab: &'a mut [$element]) -> Self {
                Self::$variant(slab)
            }
        }
    )*};
}
from_slices!(f32 => F32, bf16 => BF16, f16 => F16);

/// Runs `task` on every part, each exactly once, on `threads`.
fn for_each<T: Send>(
    threads: &Threads,
    parts: impl Iterator<Item = T>,
    task: impl Fn(T) + Sync + Send,
) {
    let parts: Vec<Mutex<Option<T>>> = parts.map(|part| Mutex::new(Some(part))).collect();
    threads.run(parts.len(), |i| {
        let part = lock(&parts[i]).take();
        if let Some(part) = part {
            task(part);
        }
    });
}

/// Runs `task` on every part as [`for_each`] does; whether any returned true.
fn any<T: Send>(
    threads: &Threads,
    parts: impl Iterator<Item = T>,
    task: impl Fn(T) -> bool + Sync + Send,
) -> bool {
    let found = AtomicBool::new(false);
    for_each(threads, parts, |part| {
        if task(part) {
            found.store(true, Ordering::Relaxed);
        }
    });
    found.into_inner()
}

/// The chunks of an optional slab: as many `None` as one likes where there is none.
fn optional_chunks<T>(slab: Option<&mut [T]>) -> impl Iterator<Item = Option<&mut [T]>> {
    let mut chunks = slab.map(|slab| slab.chunks_mut(CHUNK));
    std::iter::from_fn(move || {
        Some(
            chunks
                .as_mut()
                .map(|chunks| chunks.next().unwrap_or_default()),
        )
    })
}

fn check_len(op: &'static str, name: &str, len: usize, expected: usize) -> Result<()> {
    if len == expected {
        return Ok(());
    }
    Err(Error::invalid(
        op,
        format!("the {name} slab has {len} elements, the others have {expected}"),
    ))
}

fn check_at_least_zero(op: &'static str, name: &str, value: f64) -> Result<()> {
    check_setting(op, name, value, value >= 0.0, "finite and at least 0")
}

/// For shares: 1 itself would forget nothing, or everything.
fn check_below_one(op: &'static str, name: &str, value: f64) -> Result<()> {
    let range = "from 0 up to, but not including, 1";
    check_setting(op, name, value, (0.0..1.0).contains(&value), range)
}

fn check_finite(op: &'static str, name: &str, value: f64) -> Result<()> {
    check_setting(op, name, value, true, "finite")
}

fn check_setting(
    op: &'static str,
    name: &str,
    value: f64,
    in_range: bool,
    range: &str,
) -> Result<()> {
    if value.is_finite() && in_range {
        return Ok(());
    }
    let what = format!("{name} is {value}, it must be {range}");
    Err(Error::invalid(op, what))
}

#[cfg(test)]
mod matrix_tests;
#[cfg(test)]
mod tests;
