//! Sixteen f32 lanes, the same on every instruction set.
//!
//! A pass is written once, over [`Simd`], and [`PassIsa::run`] compiles it for each instruction
//! set. The operations are those IEEE 754 defines to the last bit (add, subtract, multiply, divide,
//! square root, conversions to nearest even), and nothing is fused: so every instruction set gives
//! the same bits, the payload of a NaN aside.
//!
//! # Invariants
//!
//! - A value of a type that implements [`Simd`] exists only on a processor that has its
//!   instructions; it is the permit to use them.
//! - Element `i` of a block is lane `i`, also of the sixteen f64 sums.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;

use half::{bf16, f16};

/// Lanes of a vector; slabs are read and written in blocks of this many elements.
pub(super) const LANES: usize = 16;

/// The operations of one instruction set on vectors of [`LANES`] f32.
pub(super) trait Simd: Copy {
    /// Sixteen f32.
    type V: Copy;
    /// Sixteen f64.
    type Sums: Copy;

    fn splat(self, x: f32) -> Self::V;
    fn load(self, src: &[f32; LANES]) -> Self::V;
    fn load_bf16(self, src: &[bf16; LANES]) -> Self::V;
    fn load_f16(self, src: &[f16; LANES]) -> Self::V;
    fn store(self, v: Self::V, dst: &mut [f32; LANES]);
    /// To nearest even; a NaN stays one (quiet).
    fn store_bf16(self, v: Self::V, dst: &mut [bf16; LANES]);
    /// To the bf16 above or below by 16 random bits per lane, as `round_with` in module `moments`.
    fn store_bf16_random(self, v: Self::V, random: &[u16; LANES], dst: &mut [bf16; LANES]);
    /// `(weight << 16) + low` by patterns, with `low` as a signed number: the masters of weights
    /// that are no NaN and have no tie bit (module `split`). A NaN stays one.
    fn load_split(self, weights: &[bf16; LANES], low: &[u16; LANES]) -> Self::V;
    /// Whether all lanes are finite in bf16 too, and none lies midway between two bf16 with an even
    /// upper half: then [`Simd::store_split`] is all there is to a master.
    fn splits_simply(self, v: Self::V) -> bool;
    /// The weights and the low halves of masters. The low halves are right in any case, the weights
    /// where [`Simd::splits_simply`].
    fn store_split(self, v: Self::V, weights: &mut [bf16; LANES], low: &mut [u16; LANES]);
    /// To nearest even; a NaN stays one (quiet).
    fn store_f16(self, v: Self::V, dst: &mut [f16; LANES]);
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    fn sqrt(self, a: Self::V) -> Self::V;
    /// `a` where `a > b`, else `b`; so a NaN in `b` stays.
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    /// Whether no lane is NaN.
    fn is_ordered(self, a: Self::V) -> bool;

    fn no_sums(self) -> Self::Sums;
    /// Adds the squares of `v` to `sums`; in f64, where a square of an f32 is exact.
    fn add_squares(self, sums: Self::Sums, v: Self::V) -> Self::Sums;
    fn read_sums(self, sums: Self::Sums) -> [f64; LANES];
}

/// An element type of slabs: how a block of it becomes f32 lanes and back.
pub(super) trait SlabElement: Copy + Default + Send + Sync + 'static {
    /// Whether a finite f32 may be an infinity here.
    const NARROW: bool;
    fn load<S: Simd>(s: S, src: &[Self; LANES]) -> S::V;
    fn store<S: Simd>(s: S, v: S::V, dst: &mut [Self; LANES]);
}

impl SlabElement for f32 {
    const NARROW: bool = false;

    #[inline(always)]
    fn load<S: Simd>(s: S, src: &[Self; LANES]) -> S::V {
        s.load(src)
    }
    #[inline(always)]
    fn store<S: Simd>(s: S, v: S::V, dst: &mut [Self; LANES]) {
        s.store(v, dst);
    }
}

impl SlabElement for bf16 {
    const NARROW: bool = true;

    #[inline(always)]
    fn load<S: Simd>(s: S, src: &[Self; LANES]) -> S::V {
        s.load_bf16(src)
    }
    #[inline(always)]
    fn store<S: Simd>(s: S, v: S::V, dst: &mut [Self; LANES]) {
        s.store_bf16(v, dst);
    }
}

impl SlabElement for f16 {
    const NARROW: bool = true;

    #[inline(always)]
    fn load<S: Simd>(s: S, src: &[Self; LANES]) -> S::V {
        s.load_f16(src)
    }
    #[inline(always)]
    fn store<S: Simd>(s: S, v: S::V, dst: &mut [Self; LANES]) {
        s.store_f16(v, dst);
    }
}

/// Work that is written over any instruction set.
pub(super) trait SlabPass {
    type Output;
    /// Must be `#[inline(always)]`, as all it calls: only then is it compiled for the instructions
    /// of `S`.
    fn run<S: Simd>(self, s: S) -> Self::Output;
}

/// An instruction set a pass can be run with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PassIsa {
    /// Whatever the build targets.
    Portable,
    /// AVX2 and F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX-512 F and BW.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// Part of every aarch64 processor Rust supports.
    #[cfg(target_arch = "aarch64")]
    Neon,
}

impl PassIsa {
    /// All that this processor has, the best one last.
    pub(super) fn available() -> impl Iterator<Item = Self> {
        let all = [
            Self::Portable,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2,
            #[cfg(target_arch = "x86_64")]
            Self::Avx512,
            #[cfg(target_arch = "aarch64")]
            Self::Neon,
        ];
        all.into_iter().filter(|isa| isa.is_available())
    }

    /// The best one that this processor has.
    pub(super) fn best() -> Self {
        Self::available().last().unwrap_or(Self::Portable)
    }

    fn is_available(self) -> bool {
        match self {
            Self::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => avx2::Avx2::detect().is_some(),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => avx512::Avx512::detect().is_some(),
            #[cfg(target_arch = "aarch64")]
            Self::Neon => neon::Neon::detect().is_some(),
        }
    }

    /// Runs `pass` with this instruction set, or portably where the processor lacks it.
    pub(super) fn run<P: SlabPass>(self, pass: P) -> P::Output {
        #[cfg(target_arch = "x86_64")]
        match self {
            Self::Portable => {}
            Self::Avx2 => {
                if let Some(s) = avx2::Avx2::detect() {
                    return s.run(pass);
                }
            }
            Self::Avx512 => {
                if let Some(s) = avx512::Avx512::detect() {
                    return s.run(pass);
                }
            }
        }
        #[cfg(target_arch = "aarch64")]
        if self == Self::Neon
            && let Some(s) = neon::Neon::detect()
        {
            return s.run(pass);
        }
        pass.run(portable::Portable)
    }
}

/// `x` between `-bound` and `bound`; a NaN stays one.
#[inline(always)]
pub(super) fn clamp<S: Simd>(s: S, x: S::V, bound: S::V) -> S::V {
    let minus_one = s.splat(-1.0);
    let low = s.mul(bound, minus_one);
    // Two negations instead of a minimum: `max` alone is written for every instruction set.
    let from_below = s.max(low, x);
    let negated = s.max(low, s.mul(from_below, minus_one));
    s.mul(negated, minus_one)
}

/// What a pass does with a gradient before it uses it.
#[derive(Debug, Clone, Copy)]
pub(super) struct GradFactors {
    /// Clips it to between minus this and this.
    pub(super) bound: Option<f32>,
    /// Then multiplies it.
    pub(super) factor: f32,
}

/// [`GradFactors`] in every lane.
#[derive(Clone, Copy)]
pub(super) struct GradReader<S: Simd> {
    s: S,
    bound: Option<S::V>,
    factor: S::V,
}

impl<S: Simd> GradReader<S> {
    #[inline(always)]
    pub(super) fn new(s: S, factors: GradFactors) -> Self {
        Self {
            s,
            bound: factors.bound.map(|bound| s.splat(bound)),
            factor: s.splat(factors.factor),
        }
    }

    #[inline(always)]
    pub(super) fn read<G: SlabElement>(&self, grad: &[G; LANES]) -> S::V {
        let grad = G::load(self.s, grad);
        let grad = match self.bound {
            Some(bound) => clamp(self.s, grad, bound),
            None => grad,
        };
        self.s.mul(grad, self.factor)
    }
}

/// Reads up to [`LANES`] elements, zeros after them.
#[inline(always)]
pub(super) fn padded<T: Copy + Default>(src: &[T]) -> [T; LANES] {
    let mut block = [T::default(); LANES];
    block[..src.len()].copy_from_slice(src);
    block
}
