//! Our kernels: which of them fits, and how they are launched.

use super::hopper::{self, HopperHeads};
use crate::cuda::call::{Args, Call, c_type, holds_two};
use crate::cuda::compile::Unit;
use crate::dtype::DType;
use crate::error::Result;
use crate::kernel::{AttentionSpec, View};

const GENERAL: &str = concat!(
    include_str!("../kernels/attention.cuh"),
    include_str!("../kernels/attention.cu")
);
const TENSOR: &str = concat!(
    include_str!("../kernels/attention.cuh"),
    include_str!("../kernels/attention_half.cuh"),
    include_str!("../kernels/attention_mma.cu")
);

/// Rows of a general block, and columns of its result.
const TILE: usize = 64;
/// Windows shorter than this get small tiles.
const NARROW: usize = 512;
/// The widest head that the tensor cores' kernels hold in registers.
const WIDEST: usize = 128;

/// The kernels of attention.cu.
#[derive(Clone, Copy, PartialEq)]
enum General {
    Forward,
    Delta,
    Dq,
    Dkv,
    Dsinks,
    Sinks,
}

/// The kernels of attention_mma.cu.
#[derive(Clone, Copy, PartialEq)]
enum TensorCores {
    Forward,
    Dq,
    Dkv,
}

/// What a kernel of attention_mma.cu is made for.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Tiles {
    /// Rows of a block, and rows of the other side that come together.
    rows: usize,
    columns: usize,
    /// Of queries and keys, and of values; multiples of 32.
    widths: (usize, usize),
}

impl General {
    const ALL: [Self; 6] = [
        Self::Forward,
        Self::Delta,
        Self::Dq,
        Self::Dkv,
        Self::Dsinks,
        Self::Sinks,
    ];

    fn unit(self, dtype: DType) -> Unit {
        let entry = match self {
            Self::Forward => "attention_forward",
            Self::Delta => "attention_delta",
            Self::Dq => "attention_dq",
            Self::Dkv => "attention_dkv",
            Self::Dsinks => "attention_dsinks",
            Self::Sinks => "attention_sinks",
        };
        Unit::new("attention", GENERAL, entry)
            .with("TYPE", c_type(dtype))
            .with("PART", self as u32)
    }

    /// Shared memory: two staged slices of 64 by 16, and one or two tiles of weights.
    fn shared(self, dtype: DType) -> u32 {
        let tiles = if self == Self::Dkv { 2 } else { 1 };
        ((2 * TILE * 17 + tiles * TILE * (TILE + 1)) * dtype.accumulator().size()) as u32
    }
}

impl TensorCores {
    const ALL: [Self; 3] = [Self::Forward, Self::Dq, Self::Dkv];

    fn unit(self, dtype: DType, tiles: &Tiles) -> Unit {
        let entry = match self {
            Self::Forward => "attention_mma_forward",
            Self::Dq => "attention_mma_dq",
            Self::Dkv => "attention_mma_dkv",
        };
        Unit::new("attention_mma", TENSOR, entry)
            .with("TYPE", c_type(dtype))
            .with("PART", self as u32)
            .with("D", tiles.widths.0)
            .with("DV", tiles.widths.1)
            .with("ROWS", tiles.rows)
            .with("COLS", tiles.columns)
    }

    /// The sizes of its tiles: large ones, smaller ones for cards with less shared memory, and
    /// small ones for narrow windows.
    fn choices(self, widths: (usize, usize)) -> [Tiles; 3] {
        let narrow = widths.0.max(widths.1) <= TILE;
        let sizes = match (self, narrow) {
            (Self::Forward, true) => [(128, 128), (64, 64), (64, 64)],
            (Self::Forward, false) => [(128, 64), (64, 64), (64, 64)],
            (Self::Dq, true) => [(128, 64), (128, 32), (64, 32)],
            (Self::Dq, false) => [(128, 32), (64, 32), (64, 32)],
            (Self::Dkv, _) => [(64, 64), (64, 32), (64, 32)],
        };
        sizes.map(|(rows, columns)| Tiles {
            rows,
            columns,
            widths,
        })
    }

    /// The first choice of which a processor holds two blocks, so that one multiplies while the
    /// other waits; the first of all where it holds two of none. Of a narrow window a large tile
    /// would mostly compute what is hidden.
    fn tiles(self, widths: (usize, usize), window: Option<usize>, shared_memory: usize) -> Tiles {
        let choices = self.choices(widths);
        if window.is_some_and(|window| window < NARROW) {
            return choices[2];
        }
        let twice = |tiles: &&Tiles| holds_two(shared_memory, self.shared(tiles));
        *choices.iter().find(twice).unwrap_or(&choices[0])
    }

    /// Shared memory: what stays, what passes by (twice, in the backward), and in dk, dv the
    /// statistics of that.
    fn shared(self, tiles: &Tiles) -> u32 {
        let (d, dv) = tiles.widths;
        let (stays, passes) = match self {
            Self::Forward => (tiles.rows * d.max(dv), tiles.columns * (d + dv)),
            _ => (tiles.rows * (d + dv), 2 * tiles.columns * (d + dv)),
        };
        let stats = if self == Self::Dkv {
            4 * tiles.columns * 4
        } else {
            0
        };
        ((stays + passes) * 2 + stats) as u32
    }
}

/// Every variant that models use.
pub(super) fn units() -> Vec<Unit> {
    let mut units = Vec::new();
    for dtype in [DType::F64, DType::F32, DType::BF16, DType::F16] {
        units.extend(General::ALL.map(|kernel| kernel.unit(dtype)));
    }
    for (dtype, widths) in [
        (
            DType::BF16,
            [(64, 64), (96, 96), (128, 128), (32, 32), (128, 64)].as_slice(),
        ),
        (DType::F16, &[(64, 64), (128, 128)]),
    ] {
        for (kernel, widths) in TensorCores::ALL
            .iter()
            .flat_map(|kernel| widths.iter().map(move |w| (kernel, w)))
        {
            let mut choices = kernel.choices(*widths).to_vec();
            choices.dedup();
            units.extend(choices.iter().map(|tiles| kernel.unit(dtype, tiles)));
        }
    }
    units
}

/// The sizes and operands that all kernels share.
pub(super) struct KernelProblem {
    batch: usize,
    pub queries: usize,
    pub keys: usize,
    pub heads: usize,
    pub key_heads: usize,
    pub width: usize,
    pub value_width: usize,
    /// Addresses of the cumulative lengths, and how many sequences they tell apart.
    lens: Option<(u64, u64, usize)>,
    spec: AttentionSpec,
}

impl KernelProblem {
    /// From `[q, k, v]` and the lengths at `lens`, `lens + 1`.
    pub fn new(call: &Call<'_>, spec: &AttentionSpec, lens: usize) -> Self {
        let (q, k, v) = (
            call.src(0).shape(),
            call.src(1).shape(),
            call.src(2).shape(),
        );
        let pair = call.maybe_src(lens).zip(call.maybe_src(lens + 1));
        Self {
            batch: q[0],
            queries: q[1],
            keys: k[1],
            heads: q[2],
            key_heads: k[2],
            width: q[3],
            value_width: v[3],
            lens: pair.map(|(q, k)| (q.ptr, k.ptr, q.numel() - 1)),
            spec: *spec,
        }
    }

    /// `Shape` of attention.cuh.
    pub fn words(&self) -> [u64; 13] {
        let (lens_q, lens_k, sequences) = self.lens.unwrap_or((0, 0, 0));
        // A window longer than any sequence hides nothing; the bound keeps sums small.
        let window = self.spec.window.map_or(1 << 40, |w| w.min(1 << 40));
        [
            self.batch as u64,
            self.queries as u64,
            self.keys as u64,
            self.heads as u64,
            self.key_heads as u64,
            self.width as u64,
            self.value_width as u64,
            lens_q,
            lens_k,
            sequences as u64,
            u64::from(self.spec.causal),
            window as u64,
            // Heads of no width have scores of 0, whatever 1/√0 is.
            (if self.width == 0 {
                0.0
            } else {
                self.spec.scale
            })
            .to_bits(),
        ]
    }

    fn tiles(&self, part: TensorCores, widths: (usize, usize), call: &Call<'_>) -> Tiles {
        part.tiles(widths, self.spec.window, call.gpu.shared_memory)
    }

    /// Tiles of `rows` that may have something to do; attention.cuh says why these are enough.
    pub fn slots(&self, rows: usize, tile: usize) -> usize {
        match self.lens {
            Some((_, _, sequences)) => rows / tile + sequences + 2,
            None => rows.div_ceil(tile),
        }
    }

    /// Blocks over slots, heads and batches, by `columns` pieces of the result.
    pub fn grid(&self, slots: usize, heads: usize, columns: usize) -> [u32; 3] {
        [(slots * heads * self.batch) as u32, columns as u32, 1]
    }

    /// The widths that the tensor cores' kernels are made for, where they fit all of these
    /// operands.
    fn tensor_widths(&self, operands: &[&View]) -> Option<(usize, usize)> {
        let half = matches!(operands[0].dtype, DType::BF16 | DType::F16);
        let fits = |width: usize| width > 0 && width <= WIDEST && width.is_multiple_of(8);
        let small = self.queries < 1 << 30 && self.keys < 1 << 30;
        let all = half
            && small
            && fits(self.width)
            && fits(self.value_width)
            && operands.iter().all(|v| aligned(v));
        all.then(|| {
            (
                self.width.next_multiple_of(32),
                self.value_width.next_multiple_of(32),
            )
        })
    }
}

/// Whether every row of every head starts at a multiple of 16 bytes.
pub(super) fn aligned(view: &View) -> bool {
    let rows = view.shape().iter().zip(view.layout.strides()).take(3);
    view.ptr.is_multiple_of(16)
        && rows
            .into_iter()
            .all(|(n, stride)| *n <= 1 || stride % 8 == 0)
}

/// Bytes of the row sums of do · o.
pub(super) fn delta_bytes(q: &View) -> usize {
    let dims = q.shape();
    dims[0] * dims[1] * dims[2] * q.dtype.accumulator().size()
}

/// # Safety
/// As [`super::run`].
pub(super) unsafe fn forward(call: &Call<'_>, spec: &AttentionSpec) -> Result<()> {
    let p = KernelProblem::new(call, spec, 4);
    let (q, k, v, o) = (call.src(0), call.src(1), call.src(2), call.dst(0));
    if let Some(heads) = HopperHeads::of(call.gpu.capability, &p, &[q, k, v], &[o]) {
        // SAFETY: the caller's promise.
        return unsafe { hopper::forward(call, &p, heads) };
    }
    let tiles = p
        .tensor_widths(&[q, k, v, o])
        .map(|widths| p.tiles(TensorCores::Forward, widths, call));
    let (unit, block, shared, columns) = match &tiles {
        Some(tiles) => (
            TensorCores::Forward.unit(q.dtype, tiles),
            128,
            TensorCores::Forward.shared(tiles),
            1,
        ),
        None => {
            let columns = p.value_width.div_ceil(TILE).max(1);
            (
                General::Forward.unit(q.dtype),
                256,
                General::Forward.shared(q.dtype),
                columns,
            )
        }
    };
    let slots = p.slots(p.queries, tiles.map_or(TILE, |tiles| tiles.rows));
    let mut args = Args::new()
        .words(&p.words())
        .view(q)
        .view(k)
        .view(v)
        .maybe(call.maybe_src(3))
        .view(o);
    args = args.ptr(call.dst(1).ptr).size(slots);
    args = args
        .ptr(call.alarm.device)
        .u32(call.alarm.code(call.kernel.name()));
    let grid = p.grid(slots, p.heads, columns);
    // SAFETY: the arguments are those of both kernels' parameters; the operands are the caller's
    // promise.
    unsafe { call.launch(&unit, grid, [block, 1, 1], shared, &mut args) }
}

/// # Safety
/// As [`super::run`].
pub(super) unsafe fn backward(call: &Call<'_>, spec: &AttentionSpec) -> Result<()> {
    let p = KernelProblem::new(call, spec, 7);
    // SAFETY: the caller's promise.
    unsafe {
        row_sums(call, &p)?;
        products(call, &p, call.scratch_ptr())
    }
}

/// Adds the sinks to a result that was computed without.
///
/// # Safety
/// As [`super::run`]; result and statistics are there.
pub(super) unsafe fn add_sinks(call: &Call<'_>, spec: &AttentionSpec) -> Result<()> {
    let p = KernelProblem::new(call, spec, 4);
    let (sinks, o, lse) = (call.src(3), call.dst(0), call.dst(1));
    let mut args = Args::new()
        .words(&p.words())
        .view(o)
        .ptr(sinks.ptr)
        .ptr(lse.ptr);
    let grid = [(p.batch * p.heads * p.queries).div_ceil(8) as u32, 1, 1];
    // SAFETY: the arguments are the kernel's parameters; the operands are the caller's promise.
    unsafe {
        call.launch(
            &General::Sinks.unit(o.dtype),
            grid,
            [256, 1, 1],
            0,
            &mut args,
        )
    }
}

/// The gradient of the sinks alone, where it is wanted; scratch is free again behind it.
///
/// # Safety
/// As [`super::run`].
pub(super) unsafe fn sink_gradient(call: &Call<'_>, spec: &AttentionSpec) -> Result<()> {
    match call.maybe_dst(3) {
        // SAFETY: the caller's promise.
        Some(_) => unsafe { row_sums(call, &KernelProblem::new(call, spec, 7)) },
        None => Ok(()),
    }
}

/// The row sums of do · o, into scratch, and the gradient of the sinks.
///
/// # Safety
/// As [`super::run`].
pub(super) unsafe fn row_sums(call: &Call<'_>, p: &KernelProblem) -> Result<()> {
    let dtype = call.src(0).dtype;
    let (o, lse, d_o, delta) = (call.src(3), call.src(4), call.src(5), call.scratch_ptr());
    let rows = p.batch * p.heads * p.queries;
    let mut args = Args::new().words(&p.words()).view(o).view(d_o).ptr(delta);
    let grid = [rows.div_ceil(8) as u32, 1, 1];
    // SAFETY: the arguments are the kernel's parameters; scratch holds one value per row.
    unsafe { call.launch(&General::Delta.unit(dtype), grid, [256, 1, 1], 0, &mut args)? };
    if let (Some(sinks), Some(to)) = (call.maybe_src(6), call.maybe_dst(3)) {
        let mut args = Args::new()
            .words(&p.words())
            .ptr(sinks.ptr)
            .ptr(lse.ptr)
            .ptr(delta)
            .ptr(to.ptr);
        let grid = [p.heads as u32, 1, 1];
        // SAFETY: as above; the row sums are written by the kernel before.
        unsafe {
            call.launch(
                &General::Dsinks.unit(dtype),
                grid,
                [256, 1, 1],
                0,
                &mut args,
            )?
        };
    }
    Ok(())
}

/// dq, then dk and dv.
///
/// # Safety
/// As [`super::run`]; `delta` holds the row sums.
unsafe fn products(call: &Call<'_>, p: &KernelProblem, delta: u64) -> Result<()> {
    let (q, k, v, lse, d_o) = (
        call.src(0),
        call.src(1),
        call.src(2),
        call.src(4),
        call.src(5),
    );
    let (dq, dk, dv) = (call.dst(0), call.dst(1), call.dst(2));
    let capability = call.gpu.capability;
    if let Some(heads) = HopperHeads::of(capability, p, &[q, k, v, d_o], &[dq, dk, dv]) {
        // SAFETY: the caller's promise.
        return unsafe { hopper::products(call, p, heads, delta) };
    }
    let args = || {
        Args::new()
            .words(&p.words())
            .view(q)
            .view(k)
            .view(v)
            .view(d_o)
            .ptr(lse.ptr)
            .ptr(delta)
    };
    let tensor = p.tensor_widths(&[q, k, v, d_o, dq, dk, dv]);
    let [by_query, by_key] = [TensorCores::Dq, TensorCores::Dkv]
        .map(|part| tensor.map(|widths| p.tiles(part, widths, call)));
    let rows = |tiles: Option<Tiles>| tiles.map_or(TILE, |tiles| tiles.rows);
    let dq_slots = p.slots(p.queries, rows(by_query));
    let dkv_slots = p.slots(p.keys, rows(by_key));
    let mut dq_args = args().view(dq).size(dq_slots);
    let mut dkv_args = args().view(dk).view(dv).size(dkv_slots);
    if let Some((by_query, by_key)) = by_query.zip(by_key) {
        let (dq, dkv) = (
            TensorCores::Dq.unit(q.dtype, &by_query),
            TensorCores::Dkv.unit(q.dtype, &by_key),
        );
        let (dq_shared, dkv_shared) = (
            TensorCores::Dq.shared(&by_query),
            TensorCores::Dkv.shared(&by_key),
        );
        let (dq_grid, dkv_grid) = (
            p.grid(dq_slots, p.heads, 1),
            p.grid(dkv_slots, p.key_heads, 1),
        );
        // SAFETY: the arguments are the kernels' parameters; the operands are the caller's promise.
        return unsafe {
            call.launch(&dq, dq_grid, [128, 1, 1], dq_shared, &mut dq_args)?;
            call.launch(&dkv, dkv_grid, [128, 1, 1], dkv_shared, &mut dkv_args)
        };
    }
    let dq_grid = p.grid(dq_slots, p.heads, p.width.div_ceil(TILE));
    let dkv_grid = p.grid(
        dkv_slots,
        p.key_heads,
        p.width.max(p.value_width).div_ceil(TILE),
    );
    let (dq, dkv) = (General::Dq.unit(q.dtype), General::Dkv.unit(q.dtype));
    // SAFETY: as above.
    unsafe {
        call.launch(
            &dq,
            dq_grid,
            [256, 1, 1],
            General::Dq.shared(q.dtype),
            &mut dq_args,
        )?;
        call.launch(
            &dkv,
            dkv_grid,
            [256, 1, 1],
            General::Dkv.shared(q.dtype),
            &mut dkv_args,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Which tiles cards get, by their shared memory per processor: no block asks for more than the
    /// card gives one.
    #[test]
    fn tiles_fit_every_card() {
        for (kib, rows) in [
            (228, [128, 128, 64]),
            (164, [128, 64, 64]),
            (100, [64, 128, 64]),
        ] {
            let wide = TensorCores::ALL.map(|part| part.tiles((128, 128), None, kib << 10).rows);
            assert_eq!(wide, rows, "{kib} KiB");
        }
        for widths in [
            (32, 32),
            (64, 64),
            (96, 96),
            (128, 64),
            (64, 128),
            (128, 128),
        ] {
            for (part, kib) in TensorCores::ALL
                .iter()
                .flat_map(|part| [100, 128, 164, 228].map(|kib| (part, kib)))
            {
                for window in [None, Some(1), Some(1 << 20)] {
                    let tiles = part.tiles(widths, window, kib << 10);
                    // All but 1 KiB of it is a block's.
                    assert!(
                        part.shared(&tiles) as usize <= (kib - 1) << 10,
                        "{tiles:?}, {kib} KiB"
                    );
                    assert!(window != Some(1) || tiles.rows == 64);
                }
            }
        }
    }
}
