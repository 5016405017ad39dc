//! Kernels as values: what to compute, over which memory.
//!
//! A [`Kernel`] is a plain description, a [`View`] is a typed, strided piece of device memory. A
//! backend receives both through one call ([`Ops::launch`](crate::device::Ops::launch)), so that a
//! backend which only counts (`meta`) or only checks (`sim`) needs no arm per operation.
//!
//! Each variant names its operands: `[sources] -> [destinations]`. Operands marked `?` may be
//! `None`. Unless said otherwise destinations are contiguous and overlap no source. `T` is the
//! value's float type, `Acc` its accumulator ([`DType::accumulator`]): sums, statistics and
//! parameter gradients are kept in `Acc`. A flag `accumulate` means the destination is added to
//! instead of overwritten.
//!
//! This module launches nothing and checks nothing: [`worker`](crate::worker) does.

use std::fmt;
use std::sync::Arc;

use crate::dtype::DType;
use crate::error::Result;
use crate::fp8::Fp8;
use crate::quant::Quantization;
use crate::rng::RngKey;
use crate::shape::{Layout, Shape};

/// A typed, strided piece of device memory.
#[derive(Debug, Clone, Copy)]
pub struct View {
    /// Device address of the element at index 0.
    pub ptr: u64,
    /// Element type.
    pub dtype: DType,
    /// Shape and strides, in elements.
    pub layout: Layout,
}

impl View {
    /// The sizes.
    pub fn shape(&self) -> &Shape {
        self.layout.shape()
    }

    /// Number of elements.
    pub fn numel(&self) -> usize {
        self.layout.shape().numel()
    }

    /// The bytes reached: first address and one past the last; `None` when empty.
    pub fn extent(&self) -> Option<(u64, u64)> {
        let (low, high) = self.layout.extent()?;
        let size = self.dtype.size() as i64;
        let at = |offset: isize| self.ptr.wrapping_add_signed(offset as i64 * size);
        Some((at(low), at(high) + size as u64))
    }
}

/// Functions of one value.
#[derive(Debug, Clone, Copy, PartialEq)]
#[allow(missing_docs, reason = "the names are the functions")]
pub enum Unary {
    Neg,
    Abs,
    Sign,
    Exp,
    Log,
    Sqrt,
    Rsqrt,
    Recip,
    Square,
    Sin,
    Cos,
    Tanh,
    Sigmoid,
    Erf,
    Relu,
    Silu,
    /// Exact GELU, by erf.
    Gelu,
    /// GELU by tanh.
    GeluTanh,
    Softplus,
    LeakyRelu(f64),
    Elu(f64),
    Floor,
    Ceil,
    /// Half to even.
    Round,
    /// x · mul + add.
    Affine {
        mul: f64,
        add: f64,
    },
    Powf(f64),
    Clamp {
        min: f64,
        max: f64,
    },
    /// Logical not; bool only.
    Not,
}

/// Functions of two values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are the functions")]
pub enum Binary {
    Add,
    Sub,
    Mul,
    Div,
    Pow,
    Max,
    Min,
    And,
    Or,
    Xor,
}

/// Comparisons; the result is bool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are the functions")]
pub enum Compare {
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
}

/// Ways to reduce many values to one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are the functions")]
pub enum Reduce {
    Sum,
    Mean,
    Max,
    Min,
    Prod,
    Any,
    All,
}

/// Random distributions.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Dist {
    /// Uniform in [low, high).
    Uniform {
        /// Lower bound, included.
        low: f64,
        /// Upper bound, excluded.
        high: f64,
    },
    /// Normal.
    Normal {
        /// Mean.
        mean: f64,
        /// Standard deviation.
        std: f64,
    },
    /// 1 with probability p, else 0.
    Bernoulli {
        /// Probability of 1.
        p: f64,
    },
}

/// Which pairs of a head rotary embedding turns together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RopeStyle {
    /// Element i with element i + R/2 (Hugging Face).
    Half,
    /// Element 2i with element 2i + 1 (the original).
    Interleaved,
}

/// The gate function of a gated linear unit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Glu {
    /// silu(gate) · up.
    Silu,
    /// gelu(gate) · up, by tanh.
    GeluTanh,
    /// GPT-OSS: gate and up clamped to `limit` (gate from above only), g · sigmoid(alpha · g) · (up
    /// + 1).
    Clamped {
        /// Steepness of the sigmoid.
        alpha: f64,
        /// Bound of the clamp.
        limit: f64,
    },
}

/// What an attention computes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionSpec {
    /// Factor of the scores before softmax.
    pub scale: f64,
    /// A query sees keys up to its own position; with fewer queries than keys the last query sees
    /// all.
    pub causal: bool,
    /// A query at position p sees keys at positions greater than p - window.
    pub window: Option<usize>,
    /// The backward may add in an order that is not the same every time, where that is faster.
    pub any_order: bool,
}

/// Geometry of a 2-d convolution; [height, width].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConvSpec {
    /// Step between output positions.
    pub stride: [usize; 2],
    /// Zeros added on each side.
    pub padding: [usize; 2],
    /// Step between the taps of the filter.
    pub dilation: [usize; 2],
    /// Channel groups that do not mix.
    pub groups: usize,
}

impl Default for ConvSpec {
    /// Every position, no border, adjacent taps, one group.
    fn default() -> Self {
        Self {
            stride: [1, 1],
            padding: [0, 0],
            dilation: [1, 1],
            groups: 1,
        }
    }
}

/// Geometry of a 2-d pooling; [height, width].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolSpec {
    /// Window.
    pub kernel: [usize; 2],
    /// Step between windows.
    pub stride: [usize; 2],
    /// Border added on each side.
    pub padding: [usize; 2],
    /// Maximum pooling only: step between the elements of a window.
    pub dilation: [usize; 2],
    /// Whether a last window that reaches over the border's end counts (kernels read it from the
    /// sizes).
    pub ceil_mode: bool,
    /// Average pooling only: whether the border counts in the divisor.
    pub count_include_pad: bool,
}

impl PoolSpec {
    /// Windows side by side, no border.
    pub fn window(kernel: [usize; 2]) -> Self {
        let (padding, dilation) = ([0, 0], [1, 1]);
        Self {
            kernel,
            stride: kernel,
            padding,
            dilation,
            ceil_mode: false,
            count_include_pad: true,
        }
    }
}

/// A kernel that a user wrote for host memory. It runs on cpu and sim; meta only counts it.
pub trait HostKernel: Send + Sync {
    /// Name for errors and traces.
    fn name(&self) -> &'static str;

    /// Floating-point operations for these shapes, for the planner.
    fn flops(&self, _src: &[Shape], _dst: &[Shape]) -> u64 {
        0
    }

    /// Computes every element of `dst`. Slices are contiguous, row-major.
    ///
    /// # Errors
    /// Whatever the kernel wants to report.
    fn run(&self, src: &[HostView<'_>], dst: &mut [HostViewMut<'_>]) -> Result<()>;
}

/// What a [`HostKernel`] reads.
#[derive(Debug)]
pub struct HostView<'a> {
    /// Raw bytes, contiguous.
    pub bytes: &'a [u8],
    /// Element type.
    pub dtype: DType,
    /// Sizes.
    pub shape: Shape,
}

/// What a [`HostKernel`] writes.
#[derive(Debug)]
pub struct HostViewMut<'a> {
    /// Raw bytes, contiguous.
    pub bytes: &'a mut [u8],
    /// Element type.
    pub dtype: DType,
    /// Sizes.
    pub shape: Shape,
}

/// One operation on device memory; see the module header for the notation.
#[derive(Clone)]
#[non_exhaustive]
pub enum Kernel {
    // ---- elementwise; sources may have any strides, 0 included ----
    /// `[] -> [y]`: every element is `value`; y may have any strides.
    Fill {
        /// The value.
        value: f64,
    },
    /// `[] -> [y]`: y\[i\] = start + i · step.
    Arange {
        /// First value.
        start: f64,
        /// Difference.
        step: f64,
    },
    /// `[] -> [y]`: element i drawn from word i of the key (normal: pairs of words, see `rng`).
    Random {
        /// From what.
        dist: Dist,
        /// Which stream.
        key: RngKey,
    },
    /// `[x] -> [y]`: same shape, any types (float to int truncates, to bool is x ≠ 0); y may have
    /// any strides.
    Copy,
    /// `[x] -> [y]`: y += alpha · x, computed in the wider accumulator; y is read; y may have any
    /// strides.
    Accumulate {
        /// Factor.
        alpha: f64,
    },
    /// `[x] -> [y]`.
    Unary(Unary),
    /// `[x, dy] -> [dx]`: dx = dy · f'(x).
    UnaryGrad(Unary),
    /// `[a, b] -> [y]`, same types; sources already broadcast to y's shape.
    Binary(Binary),
    /// `[a, b] -> [y: bool]`.
    Compare(Compare),
    /// `[cond: bool, a, b] -> [y]`.
    Select,
    /// `[x] -> [y]`: each element kept with probability 1 - p and divided by it, else 0; element i
    /// (row-major index) decided by word i of the key. Its own gradient: apply it to dy.
    Dropout {
        /// Probability of zero.
        p: f64,
        /// Which stream.
        key: RngKey,
    },

    // ---- along dimensions ----
    /// `[x any strides] -> [y]`: y has x's rank; dimensions where y has size 1 and x has not are
    /// reduced (and those of size 1 in both). Sum, Mean and Prod of floats: computed in Acc; y is T
    /// or Acc. Any, All: bool. Empty Sum, Mean, Prod, Any, All give 0, NaN, 1, 0, 1; empty Max, Min
    /// are refused earlier.
    Reduce {
        /// How.
        op: Reduce,
        /// Sum only: y += the sum.
        accumulate: bool,
    },
    /// `[x any strides] -> [y: i64]`: index of the first largest (smallest) along `dim`; y lacks
    /// that dimension.
    ArgReduce {
        /// Largest or smallest.
        largest: bool,
        /// Along which dimension of x.
        dim: usize,
    },
    /// `[x any strides] -> [y]`: running sum along `dim`.
    CumSum {
        /// Along which dimension.
        dim: usize,
        /// From the end.
        reverse: bool,
    },
    /// `[x contiguous] -> [y]`: softmax or its logarithm along the last dimension.
    Softmax {
        /// Logarithm.
        log: bool,
    },
    /// `[y, dy contiguous] -> [dx]`.
    SoftmaxGrad {
        /// Logarithm.
        log: bool,
    },
    /// `[x contiguous] -> [values, indices: i64]`: the k largest (smallest) along the last
    /// dimension in order; equal values in order of their index; NaN counts as largest.
    TopK {
        /// Largest or smallest first.
        largest: bool,
    },

    // ---- indexing; indices are i64, i32 or u32, checked, negative ones refused ----
    /// `[x any strides, index 1-d] -> [y]`: y's `dim` has the index's length.
    IndexSelect {
        /// Along which dimension.
        dim: usize,
    },
    /// `[src any strides, index 1-d] -> [y]`: y\[.., index\[i\], ..\] += src\[.., i, ..\], in order
    /// of i; y is read. src is T, y is T or Acc.
    IndexAdd {
        /// Along which dimension.
        dim: usize,
    },
    /// `[x any strides, index same rank] -> [y: index's shape]`.
    Gather {
        /// Along which dimension.
        dim: usize,
    },
    /// `[src any strides, index: src's shape] -> [y]`: y += at the indexed places, in order; y is
    /// read. src is T, y is T or Acc.
    ScatterAdd {
        /// Along which dimension.
        dim: usize,
    },

    // ---- products ----
    /// `[a: [.., m, k], b: [.., k, n], bias?: [n]] -> [c: [.., m, n]]`: c = alpha · a b + bias +
    /// beta · c, accumulated in Acc, rounded once. a and b share a type T; c is T or Acc. a and b
    /// may have any strides (0 in batch dimensions broadcasts); c is contiguous; all have c's rank.
    /// bias is T and contiguous. With beta = 0, c is not read.
    MatMul {
        /// Factor of the product.
        alpha: f64,
        /// Factor of what is there.
        beta: f64,
    },
    /// `[x: [t, k], w: [e, k, n] any strides, offsets: i32 [e + 1], low?: [t, r], narrow?: [e, r, n]
    /// any strides] -> [y: [t, n]]`: rows offsets\[i\]..offsets\[i+1\] of x times w\[i\], plus those of
    /// low times narrow\[i\] where both are given, in Acc, rounded once, or once for each product; rows
    /// past the last offset become 0, or stay as they are.
    GroupedMatMul {
        /// Add to y.
        accumulate: bool,
    },
    /// `[x: [t, k], dy: [t, n], offsets: i32 [e + 1]] -> [dw: Acc or T [e, k, n] any strides]`: per
    /// group xᵀ dy.
    GroupedMatMulGrad {
        /// Add to dw.
        accumulate: bool,
    },

    /// `[a: u8 [m, k], a's scales: f32 [m], b: u8 [n, k], b's scales: f32 [n], bias?: T [n]] -> [c: T
    /// [m, n]]`: c = (sum over k of decode(a) · decode(b)ᵀ) · scale of a's row · scale of b's row +
    /// bias, in f32, rounded once to T (f32, bf16 or f16). Both sides lie with k side by side, which
    /// is what tensor cores take. All contiguous; k and n are multiples of 16. Sums of the library
    /// on a GPU may be less exact than f32's where the left side is E4M3 (fast accumulation).
    Fp8MatMul {
        /// The format of a.
        left: Fp8,
        /// The format of b.
        right: Fp8,
        /// Add to c before rounding.
        accumulate: bool,
    },

    // ---- quantised rows; see `fp8` ----
    /// `[x: T [r, c], dense or the transpose of a dense matrix] -> [codes: u8 [r, c], scales: f32
    /// [r]]`: a scale per row by [`Fp8::scale`], and x divided by it, rounded once. T is f32, bf16 or
    /// f16; r and c are multiples of 16 where x is transposed, c where it is not.
    QuantizeRows(Fp8),

    // ---- quantised weights; see `quant` ----
    /// Int8: `[codes: u8 [.., n, k], factors: f32 [.., n]] -> [w: [.., n, k]]`; Nf4, a stack of p
    /// matrices with b blocks each: `[codes: u8 [.., n, k/2], magnitudes: u8 [p, b] (or f32: as they
    /// are), nested?: f32 [p, 1 + ceil(b/256)] (with u8), books: f32 [272]] -> [w: [.., n, k]]`. All
    /// contiguous; computed in f32, rounded once to w's float type.
    Dequantize(Quantization),

    // ---- normalisation; w, b: T; statistics and dw, db: Acc ----
    /// `[x: [.., c], w?: [c], residual?: [.., c]] -> [y, rstd: Acc [rows], sum?: [.., c]]`: with a
    /// residual, sum = x + residual (rounded to T) and y = norm(sum); all contiguous.
    RmsNorm {
        /// Added to the mean square.
        eps: f64,
    },
    /// `[x (or sum), w?, rstd, dy, dsum?] -> [dx?, dw?: Acc [c]]`: dsum, if there, is added to dx.
    RmsNormGrad {
        /// Add to dw.
        accumulate: bool,
    },
    /// `[x: [.., c], w?, b?] -> [y, mean: Acc [rows], rstd: Acc [rows]]`; contiguous.
    LayerNorm {
        /// Added to the variance.
        eps: f64,
    },
    /// `[x, w?, mean, rstd, dy] -> [dx?, dw?: Acc [c], db?: Acc [c]]`.
    LayerNormGrad {
        /// Add to dw and db.
        accumulate: bool,
    },
    /// `[x: [n, c, ..], w?: [c], b?: [c]] -> [y, mean: Acc [n, groups], rstd: Acc [n, groups]]`;
    /// contiguous.
    GroupNorm {
        /// Channel groups.
        groups: usize,
        /// Added to the variance.
        eps: f64,
    },
    /// `[x, w?, mean, rstd, dy] -> [dx?, dw?: Acc [c], db?: Acc [c]]`.
    GroupNormGrad {
        /// Channel groups.
        groups: usize,
        /// Add to dw and db.
        accumulate: bool,
    },
    /// `[x: [n, c, ..], w?: [c], b?: [c], mean?: Acc [c], var?: Acc [c]] -> [y, mean: Acc [c],
    /// rstd: Acc [c], var: Acc [c]]`; contiguous. Without mean and var among the sources,
    /// statistics of the batch are used; the destinations mean and rstd are those used, var is the
    /// biased variance used.
    BatchNorm {
        /// Added to the variance.
        eps: f64,
    },
    /// `[x, w?, mean, rstd, dy] -> [dx?, dw?: Acc [c], db?: Acc [c]]`.
    BatchNormGrad {
        /// Whether mean and rstd came from this batch (else they are constants).
        batch_stats: bool,
        /// Add to dw and db.
        accumulate: bool,
    },

    // ---- transformers ----
    /// `[x: [b, s, h, d], cos: Acc [p, r/2], sin: Acc [p, r/2], positions?: i32 [b, s]] -> [y]`:
    /// turns the first r elements of each head by the angle of its position (default: s), the rest
    /// passes. x has a contiguous last dimension, other strides free; y is contiguous.
    Rope {
        /// Pairing.
        style: RopeStyle,
        /// By minus the angle: the gradient.
        inverse: bool,
    },
    /// `[x: [b, s, h, d], w: [d], cos, sin, positions?] -> [y, rstd: Acc [b, s, h]]`: RMS norm over
    /// d, then Rope.
    RopeNorm {
        /// Pairing.
        style: RopeStyle,
        /// Added to the mean square.
        eps: f64,
    },
    /// `[x, w, rstd, cos, sin, dy, positions?] -> [dx?, dw?: Acc [d]]`; dy has a contiguous last
    /// dimension, dx is contiguous.
    RopeNormGrad {
        /// Pairing.
        style: RopeStyle,
        /// Add to dw.
        accumulate: bool,
    },
    /// `[gate: [rows.., c], up: [rows.., c]] -> [y]`; sources have a contiguous last dimension.
    Glu(Glu),
    /// `[gate, up, dy contiguous] -> [dgate, dup]`; destinations have a contiguous last dimension,
    /// other strides free (they may be halves of one tensor).
    GluGrad(Glu),
    /// `[q: [b, sq, hq, d], k: [b, sk, hk, d], v: [b, sk, hk, dv], sinks?: T [hq], lens_q?: i32 [n+1],
    /// lens_k?: i32 [n+1]] -> [o: [b, sq, hq, dv], lse: Acc [b, hq, sq]]`: hq is a multiple
    /// of hk. q, k, v have a contiguous last dimension, other strides free. A sink is one more
    /// score that gives no value. With lens, b = 1 and rows lens\[i\]..lens\[i+1\] form sequence i.
    /// A row that sees nothing gives 0 and lse -inf.
    Attention(AttentionSpec),
    /// `[q, k, v, o, lse, do, sinks?, lens_q?, lens_k?] -> [dq, dk, dv, dsinks?: Acc [hq]]`; dq,
    /// dk, dv are contiguous, dsinks is overwritten.
    AttentionGrad(AttentionSpec),
    /// `[x: [b, s, h, d] contiguous, at: i32 [b]] -> [cache: [b, n, h, d] contiguous]`: cache\[i,
    /// at\[i\] + j\] = x\[i, j\]; other places stay. A row that passes n is refused. A cache of one row
    /// is the cache of all rows of x, whose places are then apart.
    CacheWrite,
    /// `[q: [b, s, hq, d], k: [b, n, hk, d], v: [b, n, hk, dv], sinks?: T [hq], at: i32 [b]] ->
    /// [o: [b, s, hq, dv], lse: Acc [b, hq, s]]`: [`Kernel::Attention`] of row i to its first
    /// at\[i\] + s places, the last query at the last of them. A row that passes n is refused.
    CachedAttention(AttentionSpec),
    /// `[x: [m, k], norm?: [k], residual?: [m, n], w0: [n, k], w1?, w2?, b0?: [n], b1?, b2?] -> [y0:
    /// [m, n], y1?, y2?]`: linear maps of x, or of its RMS norm, m at most
    /// [`Ops::few_rows`](crate::device::Ops::few_rows); all contiguous. Values are rounded to T where
    /// separate kernels would round them. Only for devices that take such rows.
    FewLinear(FewLinear),
    /// `[q: [b, s, hq, d], k: [b, s, hk, d], v, qw?: [d], kw?: [d], cos, sin, positions: i32 [b, s], at:
    /// i32 [b]] -> [q', cache of k, cache of v]`: [`Kernel::RopeNorm`] (or Rope) of q and k, pairs half
    /// of the turned width apart; k and v are written as by [`Kernel::CacheWrite`]; all contiguous.
    /// Only for devices that have [`Kernel::FewLinear`].
    DecodeHeads {
        /// Added to the mean square.
        eps: f64,
    },
    /// `[x: [b, 1, c], norm: [c], wq: [hq·d, c], wk: [hk·d, c], wv, bq?, bk?, bv?, qw?: [d], kw?, cos,
    /// sin, positions: i32 [b, 1], at: i32 [b], sinks?: [hq], wo: [c, hq·d], bo?, norm: [c], gate: [n,
    /// c], up, down: [c, n], bg?, bu?, bd?] -> [y: [b, 1, c], cache of k: [b, capacity, hk, d], cache of
    /// v]`: a dense decoder block for one new token of each row, with the bits of the kernels that it
    /// is made of ([`Kernel::FewLinear`], [`Kernel::DecodeHeads`], [`Kernel::CachedAttention`]); all
    /// contiguous. Only for devices that take such a block
    /// ([`Ops::takes_block`](crate::device::Ops::takes_block)).
    DecodeBlock(DecodeBlockSpec),
    /// `[logits: [t, v] T or Acc contiguous, labels: i64 [t]] -> [loss: Acc [t], lse: Acc [t]]`:
    /// loss is 0 where the label is `ignore`.
    CrossEntropy {
        /// Label to leave out.
        ignore: i64,
        /// Label smoothing, 0 to 1.
        smoothing: f64,
    },
    /// `[logits, labels, lse, dloss: Acc [t]] -> [dlogits]`: dlogits is T or Acc and may be the
    /// logits' own memory.
    CrossEntropyGrad {
        /// Label to leave out.
        ignore: i64,
        /// Label smoothing, 0 to 1.
        smoothing: f64,
    },

    // ---- mixture of experts ----
    /// `[choice: i64 [t, k]] -> [rows: i32 [t·k], inverse: i32 [t·k], offsets: i32 [e + 1]]`:
    /// stable sort of the t·k choices by expert. rows\[j\] is the token of sorted place j;
    /// inverse\[token·k + c\] is the place of choice c of that token.
    MoeSort {
        /// Number of experts.
        experts: usize,
    },
    /// `[y: [t·k, c] sorted, inverse: i32 [t·k], weight?: [t, k]] -> [out: [t, c]]`: sum over a
    /// token's choices, weighted, in order of the choice.
    MoeCombine,
    /// `[y?, inverse, weight, dout] -> [dy?, dweight?: [t, k]]`: y is needed for dweight only.
    MoeCombineGrad,

    // ---- images; contiguous ----
    /// `[x: [n, c, h, w], f: [o, c/g, kh, kw], bias?: [o]] -> [y: [n, o, h', w']]`.
    Conv2d(ConvSpec),
    /// `[dy, f] -> [dx]`.
    Conv2dGradInput(ConvSpec),
    /// `[x, dy] -> [df: Acc]`.
    Conv2dGradFilter {
        /// Geometry.
        spec: ConvSpec,
        /// Add to df.
        accumulate: bool,
    },
    /// `[x: [n, c, h, w]] -> [y, at: i32]`: at = position in the plane of the first maximum (or
    /// first NaN); -1, and y -inf, for a window without elements.
    MaxPool2d(PoolSpec),
    /// `[dy, at] -> [dx: [n, c, h, w]]`.
    MaxPool2dGrad(PoolSpec),
    /// `[x] -> [y]`.
    AvgPool2d(PoolSpec),
    /// `[dy] -> [dx]`.
    AvgPool2dGrad(PoolSpec),
    /// `[x: [n, c, h, w]] -> [y: [n, c, h', w']]`: cell i averages floor(i·h/h')..ceil((i+1)·h/h').
    AdaptiveAvgPool2d,
    /// `[dy] -> [dx]`.
    AdaptiveAvgPool2dGrad,

    /// `[any contiguous] -> [any]`: a user's kernel.
    Host(Arc<dyn HostKernel>),
}

impl fmt::Debug for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What [`Kernel::FewLinear`] does beside its products.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FewLinear {
    /// Norm x first; added to the mean square.
    pub eps: Option<f64>,
    /// y0 = silu(w0 x) · (w1 x).
    pub glu: bool,
}

/// The numbers of [`Kernel::DecodeBlock`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DecodeBlockSpec {
    /// Added to the mean square of x.
    pub attn_eps: f64,
    /// The same of queries and keys, where they are normed.
    pub head_eps: f64,
    /// The same of what the gated unit takes.
    pub mlp_eps: f64,
    /// Factor of the scores before softmax.
    pub scale: f64,
    /// As [`AttentionSpec::window`].
    pub window: Option<usize>,
}

/// The sizes of a dense decoder block that decodes one token per row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DecodeBlockSizes {
    /// Of all values and weights.
    pub dtype: DType,
    /// New tokens, one per row.
    pub rows: usize,
    /// Width of the stream between blocks.
    pub hidden: usize,
    /// Width of the gated unit.
    pub units: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Places of a cache.
    pub capacity: usize,
}

/// Kernels that a backend writes together.
pub(crate) enum Family<'a> {
    Elementwise,
    Reduce,
    Index,
    Product,
    Quantized,
    Norm,
    Rope,
    Attention,
    Loss,
    Moe,
    Image,
    Decode,
    Host(&'a Arc<dyn HostKernel>),
}

impl Kernel {
    /// Which backends' module knows it.
    pub(crate) fn family(&self) -> Family<'_> {
        match self {
            Self::Fill { .. }
            | Self::Arange { .. }
            | Self::Random { .. }
            | Self::Copy
            | Self::Accumulate { .. }
            | Self::Unary(_)
            | Self::UnaryGrad(_)
            | Self::Binary(_)
            | Self::Compare(_)
            | Self::Select
            | Self::Dropout { .. } => Family::Elementwise,
            Self::Reduce { .. }
            | Self::ArgReduce { .. }
            | Self::CumSum { .. }
            | Self::Softmax { .. }
            | Self::SoftmaxGrad { .. }
            | Self::TopK { .. } => Family::Reduce,
            Self::IndexSelect { .. }
            | Self::IndexAdd { .. }
            | Self::Gather { .. }
            | Self::ScatterAdd { .. }
            | Self::CacheWrite => Family::Index,
            Self::MatMul { .. }
            | Self::GroupedMatMul { .. }
            | Self::GroupedMatMulGrad { .. }
            | Self::Fp8MatMul { .. } => Family::Product,
            Self::Dequantize(_) | Self::QuantizeRows(_) => Family::Quantized,
            Self::RmsNorm { .. }
            | Self::RmsNormGrad { .. }
            | Self::LayerNorm { .. }
            | Self::LayerNormGrad { .. }
            | Self::GroupNorm { .. }
            | Self::GroupNormGrad { .. }
            | Self::BatchNorm { .. }
            | Self::BatchNormGrad { .. } => Family::Norm,
            Self::Rope { .. }
            | Self::RopeNorm { .. }
            | Self::RopeNormGrad { .. }
            | Self::Glu(_)
            | Self::GluGrad(_) => Family::Rope,
            Self::Attention(_) | Self::AttentionGrad(_) | Self::CachedAttention(_) => {
                Family::Attention
            }
            Self::CrossEntropy { .. } | Self::CrossEntropyGrad { .. } => Family::Loss,
            Self::MoeSort { .. } | Self::MoeCombine | Self::MoeCombineGrad => Family::Moe,
            Self::Conv2d(_)
            | Self::Conv2dGradInput(_)
            | Self::Conv2dGradFilter { .. }
            | Self::MaxPool2d(_)
            | Self::MaxPool2dGrad(_)
            | Self::AvgPool2d(_)
            | Self::AvgPool2dGrad(_)
            | Self::AdaptiveAvgPool2d
            | Self::AdaptiveAvgPool2dGrad => Family::Image,
            Self::Host(host) => Family::Host(host),
            Self::FewLinear(_) | Self::DecodeHeads { .. } | Self::DecodeBlock(_) => Family::Decode,
        }
    }

    /// Name for errors and traces.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Fill { .. } => "fill",
            Self::Arange { .. } => "arange",
            Self::Random { .. } => "random",
            Self::Copy => "copy",
            Self::Accumulate { .. } => "accumulate",
            Self::Unary(_) => "unary",
            Self::UnaryGrad(_) => "unary_grad",
            Self::Binary(_) => "binary",
            Self::Compare(_) => "compare",
            Self::Select => "select",
            Self::Dropout { .. } => "dropout",
            Self::Reduce { .. } => "reduce",
            Self::ArgReduce { .. } => "arg_reduce",
            Self::CumSum { .. } => "cumsum",
            Self::Softmax { .. } => "softmax",
            Self::SoftmaxGrad { .. } => "softmax_grad",
            Self::TopK { .. } => "topk",
            Self::IndexSelect { .. } => "index_select",
            Self::IndexAdd { .. } => "index_add",
            Self::Gather { .. } => "gather",
            Self::ScatterAdd { .. } => "scatter_add",
            Self::MatMul { .. } => "matmul",
            Self::GroupedMatMul { .. } => "grouped_matmul",
            Self::GroupedMatMulGrad { .. } => "grouped_matmul_grad",
            Self::Fp8MatMul { .. } => "fp8_matmul",
            Self::QuantizeRows(_) => "quantize_rows",
            Self::Dequantize(_) => "dequantize",
            Self::RmsNorm { .. } => "rms_norm",
            Self::RmsNormGrad { .. } => "rms_norm_grad",
            Self::LayerNorm { .. } => "layer_norm",
            Self::LayerNormGrad { .. } => "layer_norm_grad",
            Self::GroupNorm { .. } => "group_norm",
            Self::GroupNormGrad { .. } => "group_norm_grad",
            Self::BatchNorm { .. } => "batch_norm",
            Self::BatchNormGrad { .. } => "batch_norm_grad",
            Self::Rope { .. } => "rope",
            Self::RopeNorm { .. } => "rope_norm",
            Self::RopeNormGrad { .. } => "rope_norm_grad",
            Self::Glu(_) => "glu",
            Self::GluGrad(_) => "glu_grad",
            Self::Attention(_) => "attention",
            Self::AttentionGrad(_) => "attention_grad",
            Self::CacheWrite => "cache_write",
            Self::CachedAttention(_) => "cached_attention",
            Self::FewLinear(_) => "few_linear",
            Self::DecodeHeads { .. } => "decode_heads",
            Self::DecodeBlock(_) => "decode_block",
            Self::CrossEntropy { .. } => "cross_entropy",
            Self::CrossEntropyGrad { .. } => "cross_entropy_grad",
            Self::MoeSort { .. } => "moe_sort",
            Self::MoeCombine => "moe_combine",
            Self::MoeCombineGrad => "moe_combine_grad",
            Self::Conv2d(_) => "conv2d",
            Self::Conv2dGradInput(_) => "conv2d_grad_input",
            Self::Conv2dGradFilter { .. } => "conv2d_grad_filter",
            Self::MaxPool2d(_) => "max_pool2d",
            Self::MaxPool2dGrad(_) => "max_pool2d_grad",
            Self::AvgPool2d(_) => "avg_pool2d",
            Self::AvgPool2dGrad(_) => "avg_pool2d_grad",
            Self::AdaptiveAvgPool2d => "adaptive_avg_pool2d",
            Self::AdaptiveAvgPool2dGrad => "adaptive_avg_pool2d_grad",
            Self::Host(kernel) => kernel.name(),
        }
    }
}
