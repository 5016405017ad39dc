//! A dense decoder block for one new token of each row, in one launch; see `kernels/decode_block.cu`.
//!
//! Its blocks of threads stay on the card and wait for each other between phases, so the launch is a
//! cooperative one. Which blocks it takes depends on sizes alone, not on the card: a plan without a
//! GPU knows what will be launched. Others go by the launches of [`decode`](super::decode), to the
//! same bits.

use super::call::{Args, Call, FLOATS, c_type};
use super::compile::Unit;
use super::decode::{self, KEYS, MAX_ROWS, ROW_BYTES};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernel::{DecodeBlockSizes, DecodeBlockSpec, Kernel, View};

const TEXT: &str = concat!(
    include_str!("kernels/rows.cuh"),
    include_str!("kernels/decode.cuh"),
    include_str!("kernels/decode_block.cu")
);

/// Query heads that share a key head, at most: their sums lie in registers.
const MOST_GROUP: usize = 8;
/// The widest head.
const MOST_WIDTH: usize = 256;

/// Whether the kernel takes such a block.
pub(super) fn takes(sizes: &DecodeBlockSizes) -> bool {
    let DecodeBlockSizes {
        dtype,
        rows,
        hidden,
        units,
        heads,
        kv_heads,
        head_dim,
        capacity,
    } = *sizes;
    let whole = |width: usize| width > 0 && (width * dtype.size()).is_multiple_of(16);
    let widest = hidden.max(units).max(heads * head_dim);
    FLOATS.contains(&dtype)
        && dtype != DType::F64
        && (1..=MAX_ROWS).contains(&rows)
        && [hidden, units, head_dim].into_iter().all(whole)
        && head_dim <= MOST_WIDTH
        && kv_heads > 0
        && heads.is_multiple_of(kv_heads)
        && (1..=MOST_GROUP).contains(&(heads / kv_heads))
        && rows * widest * dtype.size() <= ROW_BYTES
        && teams(sizes) > 0
        && [widest, heads * capacity]
            .into_iter()
            .all(|size| i32::try_from(size).is_ok())
}

/// Rows that a kernel is compiled for.
fn compiled_rows(rows: usize) -> usize {
    rows.next_power_of_two()
}

/// Threads of a block, as in the kernel: with more rows they need more registers.
fn threads(rows: usize) -> usize {
    if compiled_rows(rows) == 1 { 512 } else { 256 }
}

/// Among how many threads the places of a piece of a value are shared.
fn shares(sizes: &DecodeBlockSizes) -> usize {
    let group = sizes.heads / sizes.kv_heads;
    decode::wide_shares(sizes.dtype, sizes.head_dim, group)
}

/// Shared memory of a team, as `TeamRoom` in the kernel cuts it.
fn team_bytes(sizes: &DecodeBlockSizes) -> usize {
    let group = sizes.heads / sizes.kv_heads;
    let sums = group * sizes.head_dim * (1 + shares(sizes)) + group * (KEYS + 2);
    let new = 2 * sizes.head_dim * sizes.dtype.size();
    (new + sums * sizes.dtype.accumulator().size()).next_multiple_of(16)
}

/// Teams of a block that attend: as many as it has threads and shared memory for.
fn teams(sizes: &DecodeBlockSizes) -> usize {
    (threads(sizes.rows) / decode::THREADS).min(ROW_BYTES / team_bytes(sizes))
}

/// What phases leave for later ones, as bytes behind the start of the scratch.
struct Scratch {
    /// q, k, v, mixed, middle, inner, parts.
    starts: [usize; 7],
    bytes: usize,
}

impl Scratch {
    fn of(sizes: &DecodeBlockSizes) -> Self {
        let (wide, narrow) = (
            sizes.heads * sizes.head_dim,
            sizes.kv_heads * sizes.head_dim,
        );
        let size = sizes.dtype.size();
        let parts = sizes.heads * sizes.capacity.div_ceil(KEYS) * (sizes.head_dim + 2);
        let row_bytes = [
            wide * size,
            narrow * size,
            narrow * size,
            wide * size,
            sizes.hidden * size,
            sizes.units * size,
            parts * sizes.dtype.accumulator().size(),
        ];
        let mut bytes = 0;
        let starts = row_bytes.map(|row| {
            let start = bytes;
            bytes += (sizes.rows * row).next_multiple_of(256);
            start
        });
        Self { starts, bytes }
    }
}

/// The sizes of a call, from its operands.
fn sizes(src: &[Option<View>], dst: &[Option<View>]) -> Option<DecodeBlockSizes> {
    let (x, out, gate) = (
        src.first()?.as_ref()?,
        src.get(15)?.as_ref()?,
        src.get(18)?.as_ref()?,
    );
    let cache = dst.get(1)?.as_ref()?.shape();
    Some(DecodeBlockSizes {
        dtype: x.dtype,
        rows: x.shape()[0],
        hidden: x.shape()[2],
        units: gate.shape()[0],
        heads: out.shape()[1] / cache[3].max(1),
        kv_heads: cache[2],
        head_dim: cache[3],
        capacity: cache[1],
    })
}

pub(super) fn scratch(src: &[Option<View>], dst: &[Option<View>]) -> usize {
    sizes(src, dst).map_or(0, |sizes| Scratch::of(&sizes).bytes)
}

pub(super) fn units() -> Vec<Unit> {
    let block = |dtype, rows: usize, group: usize, head_dim| {
        unit(&DecodeBlockSizes {
            dtype,
            rows,
            hidden: 2048,
            units: 6144,
            heads: 8 * group,
            kv_heads: 8,
            head_dim,
            capacity: 256,
        })
    };
    let mut all = Vec::new();
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        all.extend([1, 2, 4, 8, 16].map(|rows| block(dtype, rows, 2, 128)));
        all.extend([1, 4, 7, 8].map(|group| block(dtype, 1, group, 128)));
        all.extend([1, 8].map(|group| block(dtype, 1, group, 64)));
    }
    all
}

fn unit(sizes: &DecodeBlockSizes) -> Unit {
    Unit::new("decode_block", TEXT, "decode_block")
        .with("ELEMENT", c_type(sizes.dtype))
        .with("WIDE", true)
        .with("ROWS", compiled_rows(sizes.rows))
        .with("GROUP", sizes.heads / sizes.kv_heads)
        .with("WIDTH", sizes.head_dim)
        .with("SHARES", shares(sizes))
        .with("TEAMS", teams(sizes))
}

/// # Safety
/// As [`Ops::launch`](crate::device::Ops::launch).
pub(super) unsafe fn run(call: &Call<'_>) -> Result<()> {
    let (Kernel::DecodeBlock(spec), Some(sizes)) = (call.kernel, sizes(call.src, call.dst)) else {
        return Err(Error::invalid(call.kernel.name(), "is no decoder block"));
    };
    if !takes(&sizes) {
        let what = format!("{sizes:?} are not sizes that one launch takes");
        return Err(Error::invalid(call.kernel.name(), what));
    }
    let mut args = Args::new().words(&words(call, spec, &sizes));
    let row_bytes = sizes
        .hidden
        .max(sizes.units)
        .max(sizes.heads * sizes.head_dim);
    let staged = sizes.rows * row_bytes * sizes.dtype.size();
    let shared = staged.max(teams(&sizes) * team_bytes(&sizes)) as u32;
    let blocks = call.gpu.processors()? as u32;
    let threads = threads(sizes.rows) as u32;
    // SAFETY: the argument is the kernel's `Block`; the operation checked that operands are dense and
    // fit each other, `takes` that rows are whole pieces of 16 bytes; the scratch holds what `scratch`
    // asked for, by the same sizes; places are checked there. The barrier is the lane's, whose
    // launches run one after another.
    unsafe { call.launch_cooperative(&unit(&sizes), blocks, threads, shared, &mut args) }
}

/// `Block` of the kernel: sources, destinations, scratch, sizes, numbers, barrier and alarm.
fn words(call: &Call<'_>, spec: &DecodeBlockSpec, sizes: &DecodeBlockSizes) -> Vec<u64> {
    let address = |view: Option<&View>| view.map_or(0, |view| view.ptr);
    let scratch = Scratch::of(sizes);
    let (cos, window) = (
        call.src(10),
        spec.window.map_or(0, |w| w.min(i32::MAX as usize).max(1)),
    );
    let counts = [
        sizes.rows,
        sizes.hidden,
        sizes.units,
        sizes.heads,
        sizes.kv_heads,
        cos.shape()[1],
        cos.shape()[0],
        sizes.capacity,
        window,
        team_bytes(sizes),
    ];
    let numbers = [spec.attn_eps, spec.head_eps, spec.mlp_eps, spec.scale];
    let mut words: Vec<u64> = (0..24).map(|i| address(call.maybe_src(i))).collect();
    words.extend((0..3).map(|i| address(call.maybe_dst(i))));
    words.extend(
        scratch
            .starts
            .map(|start| call.scratch_ptr() + start as u64),
    );
    words.extend(counts.map(|count| count as u64));
    words.extend(numbers.map(f64::to_bits));
    words.extend([call.barrier, call.alarm.device]);
    words.push(u64::from(call.alarm.code(call.kernel.name())));
    words
}
