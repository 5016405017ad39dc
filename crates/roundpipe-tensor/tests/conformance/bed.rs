//! What every operation has to show, for any case a family brings:
//!
//! 1. gradients agree with central differences in f64;
//! 2. f32, bf16 and f16 agree with f64 within the type's tolerance, values and gradients;
//! 3. 1 and 2 threads, and a second run, give the same bits;
//! 4. a run without a tape gives the same bits as one with;
//! 5. a sim worker gives the same bits (where undefined memory holds NaN), and finds no race;
//! 6. a GPU, where there is one, agrees with f64 within the type's tolerance, repeats its bits, and
//!    makes the allocations that meta states for it;
//! 7. a meta worker makes the same allocations: shapes, number and peak are known without data.
//!
//! A case is a function of its inputs; it must not keep state.

use std::io::Write as _;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use roundpipe_tensor::{
    Bytes, Cpu, Cuda, Cx, DType, DeviceKind, Meta, Result, RngSite, SimWorld, Tensor, Worker, bf16,
    f16,
};

use crate::skip;

/// How an input lies in memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Lie {
    /// Row-major.
    Dense,
    /// The transpose of a dense tensor (last two dimensions exchanged); needs two dimensions.
    Transposed,
    /// Every dimension is a cut-out of a larger one.
    CutOut,
}

/// One input of a case.
#[derive(Clone, Debug)]
pub struct Input {
    values: Vec<f64>,
    dims: Vec<usize>,
    /// `None`: takes the float type under test, and a gradient.
    dtype: Option<DType>,
    grad: bool,
    lie: Lie,
}

/// A differentiable float input, values spread over about [-2, 2], fixed by `seed`.
pub fn randn(seed: u64, dims: &[usize]) -> Input {
    let count = dims.iter().product();
    Input {
        values: noise(seed, count),
        dims: dims.to_vec(),
        dtype: None,
        grad: true,
        lie: Lie::Dense,
    }
}

/// A differentiable float input with given values.
pub fn values(values: &[f64], dims: &[usize]) -> Input {
    Input {
        values: values.to_vec(),
        dims: dims.to_vec(),
        dtype: None,
        grad: true,
        lie: Lie::Dense,
    }
}

/// Integer (or other fixed-type) input without gradient.
pub fn fixed(dtype: DType, values: &[i64], dims: &[usize]) -> Input {
    let values = values.iter().map(|v| *v as f64).collect();
    Input {
        values,
        dims: dims.to_vec(),
        dtype: Some(dtype),
        grad: false,
        lie: Lie::Dense,
    }
}

impl Input {
    /// The same input without a gradient.
    pub fn constant(mut self) -> Self {
        self.grad = false;
        self
    }

    /// The sizes.
    pub fn dims(&self) -> &[usize] {
        &self.dims
    }

    /// The same values mapped, e.g. to make them positive.
    pub fn map(mut self, f: impl Fn(f64) -> f64) -> Self {
        self.values.iter_mut().for_each(|v| *v = f(*v));
        self
    }

    /// The same values lying differently in memory.
    pub fn lying(mut self, lie: Lie) -> Self {
        self.lie = lie;
        self
    }

    /// The accumulator type instead of the type under test (tables of cosines and the like), no
    /// gradient. Under bf16 and f16 it is f32, under f64 it is f64.
    pub fn accumulator(mut self) -> Self {
        self.dtype = Some(DType::F64);
        self.grad = false;
        self
    }
}

/// How strictly to check.
#[derive(Clone, Copy, Debug)]
pub struct Strict {
    /// Factor on the tolerance table, for operations that amplify rounding.
    pub slack: f64,
    /// Whether central differences make sense (no kinks, no integers).
    pub differences: bool,
    /// Types beside f64 to check.
    pub dtypes: &'static [DType],
}

impl Default for Strict {
    fn default() -> Self {
        Self {
            slack: 1.0,
            differences: true,
            dtypes: &[DType::F32, DType::BF16, DType::F16],
        }
    }
}

/// Relative tolerance of values and gradients against f64, by type.
fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F32 => 2e-5,
        DType::F16 => 6e-3,
        DType::BF16 => 4e-2,
        _ => 1e-12,
    }
}

/// Runs a case with default strictness.
pub fn check(name: &str, inputs: &[Input], f: impl Fn(&mut Cx, &[Tensor]) -> Result<Vec<Tensor>>) {
    check_with(name, inputs, Strict::default(), f);
}

/// Runs a case.
pub fn check_with(
    name: &str,
    inputs: &[Input],
    strict: Strict,
    f: impl Fn(&mut Cx, &[Tensor]) -> Result<Vec<Tensor>>,
) {
    let oracle =
        run(&worker(1), inputs, DType::F64, &f, true).unwrap_or_else(|e| panic!("{name} f64: {e}"));
    let limit = |dtype| if dtype == DType::F64 { 1e-11 } else { tolerance(dtype) } * strict.slack;
    if gpu_alone_is_asked() {
        let all = strict.dtypes.iter().chain(&[DType::F64]);
        for &dtype in all.take(if brief() { 1 } else { usize::MAX }) {
            on_gpu(name, inputs, dtype, &oracle, limit(dtype), &f);
        }
        return;
    }
    if strict.differences {
        differences(name, inputs, &oracle, &f);
    }
    for &dtype in std::iter::once(&DType::F64).chain(strict.dtypes) {
        let one = run(&worker(1), inputs, dtype, &f, true)
            .unwrap_or_else(|e| panic!("{name} {dtype}: {e}"));
        let two = run(&worker(2), inputs, dtype, &f, true)
            .unwrap_or_else(|e| panic!("{name} {dtype}: {e}"));
        assert_eq!(
            one.bits(),
            two.bits(),
            "{name} {dtype}: 1 and 2 threads differ"
        );
        let plain = run(&worker(2), inputs, dtype, &f, false)
            .unwrap_or_else(|e| panic!("{name} {dtype}: {e}"));
        assert_eq!(
            one.outputs, plain.outputs,
            "{name} {dtype}: with and without a tape differ"
        );
        if dtype == DType::F32 {
            simulated(name, inputs, &one, &f);
            predicted(name, inputs, &f);
        }
        let limit = limit(dtype);
        if dtype != DType::F64 {
            close(
                &format!("{name} {dtype} output"),
                &one.outputs,
                &oracle.outputs,
                limit,
            );
            close(
                &format!("{name} {dtype} gradient"),
                &one.grads,
                &oracle.grads,
                limit,
            );
        }
        on_gpu(name, inputs, dtype, &oracle, limit, &f);
    }
}

/// Whether `ROUNDPIPE_GPU=only` leaves out all checks but number 6: under a sanitizer the others
/// take hours.
fn gpu_alone_is_asked() -> bool {
    static ASKED: OnceLock<bool> = OnceLock::new();
    *ASKED.get_or_init(|| brief() || std::env::var("ROUNDPIPE_GPU").as_deref() == Ok("only"))
}

/// Whether `ROUNDPIPE_GPU=brief` leaves out all but one type and a few sizes of every kind as well:
/// a sanitizer that looks for races takes seconds for every kernel that it meets.
pub fn brief() -> bool {
    static ASKED: OnceLock<bool> = OnceLock::new();
    *ASKED.get_or_init(|| std::env::var("ROUNDPIPE_GPU").as_deref() == Ok("brief"))
}

/// A worker on the first GPU, where there is one that can be used. `ROUNDPIPE_GPU=off` leaves it
/// out.
pub fn gpu() -> Option<&'static Worker> {
    static GPU: OnceLock<Option<Worker>> = OnceLock::new();
    let open = || {
        if std::env::var("ROUNDPIPE_GPU").as_deref() == Ok("off") {
            return Err("ROUNDPIPE_GPU is off".to_owned());
        }
        let device = Cuda::new(0).map_err(|e| e.to_string())?;
        Worker::new(device, Bytes::gib(2)).map_err(|e| e.to_string())
    };
    let found = GPU.get_or_init(|| open().inspect_err(|why| tell_at_the_end(why)).ok());
    found.as_ref()
}

/// Cases that were not run on a GPU, and why.
static SKIPPED: AtomicUsize = AtomicUsize::new(0);
static WHY: OnceLock<String> = OnceLock::new();

/// Without a GPU every case runs on the others alone; how many is known when the process ends.
fn tell_at_the_end(why: &str) {
    extern "C" fn tell() {
        let (count, why) = (
            SKIPPED.load(Ordering::Relaxed),
            WHY.get().map_or("", String::as_str),
        );
        let line = format!("skipped on a GPU: {count} cases of the conformance tests: {why}\n");
        // Not through the runner, which hides what passing tests print.
        let _ = std::io::stderr().write_all(line.as_bytes());
    }
    let _ = WHY.set(why.to_owned());
    // SAFETY: the function is there as long as the process, touches statics alone and does not
    // unwind.
    #[cfg(unix)]
    let _ = unsafe { libc::atexit(tell) };
    #[cfg(not(unix))]
    tell();
}

pub fn left_out(name: &str, dtype: DType) {
    SKIPPED.fetch_add(1, Ordering::Relaxed);
    skip::counted(
        &format!("{name} {dtype}"),
        WHY.get().map_or("", String::as_str),
    );
}

/// The GPU, with no other test at it: one arena for the whole binary, whose counts one case at a
/// time may read.
pub fn gpu_alone() -> Option<(&'static Worker, MutexGuard<'static, ()>)> {
    static TURN: Mutex<()> = Mutex::new(());
    Some((gpu()?, TURN.lock().unwrap_or_else(PoisonError::into_inner)))
}

/// Check 6.
fn on_gpu(
    name: &str,
    inputs: &[Input],
    dtype: DType,
    oracle: &Outcome,
    limit: f64,
    f: &impl Fn(&mut Cx, &[Tensor]) -> Result<Vec<Tensor>>,
) {
    let Some((worker, _turn)) = gpu_alone() else {
        return left_out(name, dtype);
    };
    let go = || run(worker, inputs, dtype, f, true);
    let one = match go() {
        Err(error) if error.to_string().contains("written for host memory") => return,
        one => one.unwrap_or_else(|e| panic!("{name} {dtype} on a GPU: {e}")),
    };
    let again = go().unwrap_or_else(|e| panic!("{name} {dtype} on a GPU, again: {e}"));
    close(
        &format!("{name} {dtype} output on a GPU"),
        &one.outputs,
        &oracle.outputs,
        limit,
    );
    close(
        &format!("{name} {dtype} gradient on a GPU"),
        &one.grads,
        &oracle.grads,
        limit,
    );
    assert_eq!(
        one.bits(),
        again.bits(),
        "{name} {dtype}: a GPU does not repeat itself"
    );
    if dtype == DType::F32 {
        let before = worker.usage();
        let meta = Worker::new(Meta::like(DeviceKind::Cuda), Bytes(1 << 60)).unwrap();
        let real = walk(worker, inputs, f).unwrap_or_else(|e| panic!("{name} on a GPU: {e}"));
        let stated = walk(&meta, inputs, f).unwrap_or_else(|e| panic!("{name} on meta: {e}"));
        assert_eq!(stated, real, "{name}: meta and the GPU disagree on shapes");
        let made = worker.usage().allocations - before.allocations;
        assert_eq!(
            meta.usage().allocations,
            made,
            "{name}: meta and the GPU disagree on allocations"
        );
    }
}

/// Memory for the tensors of one case. Every run reserves it anew: emulators keep books on each
/// page.
const ROOM: Bytes = Bytes::mib(64);

/// A cpu worker with room for test tensors.
pub fn worker(threads: usize) -> Worker {
    Worker::new(Cpu::new(Some(threads)).unwrap(), ROOM).unwrap()
}

/// What came out: values of every output and of every differentiable input's gradient.
#[derive(Debug, PartialEq)]
pub struct Outcome {
    pub outputs: Vec<Vec<f64>>,
    pub grads: Vec<Vec<f64>>,
}

impl Outcome {
    pub fn bits(&self) -> Vec<u64> {
        self.outputs
            .iter()
            .chain(&self.grads)
            .flatten()
            .map(|x| x.to_bits())
            .collect()
    }
}

/// Runs forward and, with `record`, backward from fixed random output gradients.
pub fn run(
    worker: &Worker,
    inputs: &[Input],
    dtype: DType,
    f: &impl Fn(&mut Cx, &[Tensor]) -> Result<Vec<Tensor>>,
    record: bool,
) -> Result<Outcome> {
    let site = RngSite {
        seed: 11,
        ..RngSite::default()
    };
    let mut cx = Cx::new(worker, record, true).at(site);
    let tensors = inputs
        .iter()
        .map(|i| place(&mut cx, i, dtype))
        .collect::<Result<Vec<_>>>()?;
    let outputs = f(
        &mut cx,
        &tensors.iter().map(|(_, t)| t.clone()).collect::<Vec<_>>(),
    )?;
    let outcome = outputs
        .iter()
        .map(Tensor::to_f64_vec)
        .collect::<Result<Vec<_>>>()?;
    let mut grads = Vec::new();
    let seeds: Vec<(Tensor, Tensor)> = outputs
        .iter()
        .enumerate()
        .filter(|(_, y)| y.requires_grad())
        .map(|(i, y)| {
            Ok((
                y.clone(),
                upload(
                    &mut cx,
                    &noise(900 + i as u64, y.numel()),
                    y.dims(),
                    y.dtype(),
                )?,
            ))
        })
        .collect::<Result<_>>()?;
    if record && !seeds.is_empty() {
        let all = cx.backward_from(&seeds)?;
        for (leaf, _) in tensors.iter().filter(|(leaf, _)| leaf.requires_grad()) {
            let zero = vec![0.0; leaf.numel()];
            grads.push(all.of(leaf).map_or(Ok(zero), Tensor::to_f64_vec)?);
        }
    }
    Ok(Outcome {
        outputs: outcome,
        grads,
    })
}

/// Puts an input on the worker: the leaf (dense) and the tensor the case sees (lying as asked).
fn place(cx: &mut Cx, input: &Input, dtype: DType) -> Result<(Tensor, Tensor)> {
    let dtype = match input.dtype {
        Some(DType::F64) => dtype.accumulator(),
        Some(fixed) => fixed,
        None => dtype,
    };
    let rank = input.dims.len();
    let leaf = upload(cx, &input.values, &input.dims, dtype)?;
    let leaf = if input.grad { cx.input(&leaf)? } else { leaf };
    let seen = match input.lie {
        Lie::Dense => leaf.clone(),
        Lie::Transposed => {
            assert!(rank >= 2, "a transposed input needs two dimensions");
            let flipped = cx.transpose(&leaf, -1, -2)?;
            let dense = cx.contiguous(&flipped)?;
            cx.transpose(&dense, -1, -2)?
        }
        Lie::CutOut => {
            // Spread into a tensor with a border of one in every dimension, then cut the border off
            // again.
            let mut wide = leaf.clone();
            for dim in 0..rank as isize {
                let mut border = wide.dims().to_vec();
                border[dim as usize] = 1;
                let pad = cx.zeros(dtype, &border)?;
                wide = cx.cat(&[&pad, &wide, &pad], dim)?;
            }
            for (dim, size) in input.dims.iter().enumerate() {
                wide = cx.narrow(&wide, dim as isize, 1, *size)?;
            }
            wide
        }
    };
    Ok((leaf, seen))
}

/// Host values as a tensor of any type.
pub fn upload(cx: &mut Cx, values: &[f64], dims: &[usize], dtype: DType) -> Result<Tensor> {
    match dtype {
        DType::F64 => cx.tensor(values, dims),
        DType::F32 => cx.tensor(&values.iter().map(|v| *v as f32).collect::<Vec<_>>(), dims),
        DType::BF16 => cx.tensor(
            &values
                .iter()
                .map(|v| bf16::from_f64(*v))
                .collect::<Vec<_>>(),
            dims,
        ),
        DType::F16 => cx.tensor(
            &values.iter().map(|v| f16::from_f64(*v)).collect::<Vec<_>>(),
            dims,
        ),
        DType::I64 => cx.tensor(&values.iter().map(|v| *v as i64).collect::<Vec<_>>(), dims),
        DType::I32 => cx.tensor(&values.iter().map(|v| *v as i32).collect::<Vec<_>>(), dims),
        DType::U32 => cx.tensor(&values.iter().map(|v| *v as u32).collect::<Vec<_>>(), dims),
        DType::U8 => cx.tensor(&values.iter().map(|v| *v as u8).collect::<Vec<_>>(), dims),
        DType::Bool => cx.tensor_bool(&values.iter().map(|v| *v != 0.0).collect::<Vec<_>>(), dims),
        other => panic!("no values of type {other}"),
    }
}

/// Pseudo-random values in about [-2, 2], representable in every float type so that rounding the
/// inputs plays no part.
pub fn noise(seed: u64, count: usize) -> Vec<f64> {
    let key = RngSite {
        seed,
        ..RngSite::default()
    }
    .key();
    (0..count as u64)
        .map(|i| {
            let word = key.word(i);
            // Sixteenths from -2 to 2, never 0, so that kinks at 0 are not hit.
            let step = f64::from(word % 32) + 1.0;
            if word & 0x100 == 0 {
                step / 16.0
            } else {
                -step / 16.0
            }
        })
        .collect()
}

/// Check 5: virtual lanes, poisoned memory and the ledger of accesses change nothing and find
/// nothing.
pub fn simulated(
    name: &str,
    inputs: &[Input],
    cpu: &Outcome,
    f: &impl Fn(&mut Cx, &[Tensor]) -> Result<Vec<Tensor>>,
) {
    let world = SimWorld::seeded(inputs.len() as u64).unwrap();
    let worker = Worker::new(world.worker(), ROOM).unwrap();
    let sim =
        run(&worker, inputs, DType::F32, f, true).unwrap_or_else(|e| panic!("{name} on sim: {e}"));
    assert_eq!(sim.bits(), cpu.bits(), "{name}: sim and cpu differ");
    drop(worker);
    world
        .fence_all()
        .unwrap_or_else(|e| panic!("{name} on sim: {e}"));
}

/// Forward and backward without reading a value.
fn walk(
    worker: &Worker,
    inputs: &[Input],
    f: &impl Fn(&mut Cx, &[Tensor]) -> Result<Vec<Tensor>>,
) -> Result<Vec<(DType, Vec<usize>)>> {
    let mut cx = Cx::new(worker, true, true);
    let tensors = inputs
        .iter()
        .map(|i| Ok(place(&mut cx, i, DType::F32)?.1))
        .collect::<Result<Vec<_>>>()?;
    let outputs = f(&mut cx, &tensors)?;
    let tracked = outputs.iter().filter(|y| y.requires_grad());
    let seeds = tracked.map(|y| Ok((y.clone(), cx.worker().full(y.dtype(), *y.shape(), 1.0)?)));
    let seeds = seeds.collect::<Result<Vec<_>>>()?;
    if !seeds.is_empty() {
        drop(cx.backward_from(&seeds)?);
    }
    Ok(outputs
        .iter()
        .map(|y| (y.dtype(), y.dims().to_vec()))
        .collect())
}

/// Check 7: the same on cpu and on meta.
pub fn predicted(
    name: &str,
    inputs: &[Input],
    f: &impl Fn(&mut Cx, &[Tensor]) -> Result<Vec<Tensor>>,
) {
    let cpu = worker(2);
    let meta = Worker::new(Meta::like(DeviceKind::Cpu), Bytes(1 << 60)).unwrap();
    let real = walk(&cpu, inputs, f).unwrap_or_else(|e| panic!("{name}: {e}"));
    let stated = walk(&meta, inputs, f).unwrap_or_else(|e| panic!("{name} on meta: {e}"));
    assert_eq!(stated, real, "{name}: meta and cpu disagree on shapes");
    assert_eq!(
        meta.usage(),
        cpu.usage(),
        "{name}: meta and cpu disagree on memory"
    );
}

/// Check 1: analytic gradients against central differences of the same function in f64.
fn differences(
    name: &str,
    inputs: &[Input],
    oracle: &Outcome,
    f: &impl Fn(&mut Cx, &[Tensor]) -> Result<Vec<Tensor>>,
) {
    let worker = worker(1);
    let score = |inputs: &[Input]| -> f64 {
        let outcome =
            run(&worker, inputs, DType::F64, f, false).unwrap_or_else(|e| panic!("{name}: {e}"));
        let weigh = |(i, y): (usize, &Vec<f64>)| -> f64 {
            noise(900 + i as u64, y.len())
                .iter()
                .zip(y)
                .map(|(w, y)| w * y)
                .sum()
        };
        outcome.outputs.iter().enumerate().map(weigh).sum()
    };
    let mut leaf = 0;
    for at in 0..inputs.len() {
        if !inputs[at].grad {
            continue;
        }
        let grad = &oracle.grads[leaf];
        leaf += 1;
        // At most 40 elements per input: enough to catch an indexing error, few enough to stay
        // quick.
        let stride = inputs[at].values.len().div_ceil(40).max(1);
        for i in (0..inputs[at].values.len()).step_by(stride) {
            let mut moved = inputs.to_vec();
            let h = 1e-5;
            moved[at].values[i] = inputs[at].values[i] + h;
            let up = score(&moved);
            moved[at].values[i] = inputs[at].values[i] - h;
            let down = score(&moved);
            let slope = (up - down) / (2.0 * h);
            let error = (slope - grad[i]).abs() / (1.0 + slope.abs().max(grad[i].abs()));
            assert!(
                error < 1e-6,
                "{name}: input {at} element {i}: difference {slope}, gradient {}",
                grad[i]
            );
        }
    }
}

/// Norm-wise comparison, tensor by tensor; NaN never passes unless the oracle has it in the same
/// place.
pub fn close(what: &str, have: &[Vec<f64>], want: &[Vec<f64>], limit: f64) {
    assert_eq!(have.len(), want.len(), "{what}: number of tensors");
    for (t, (have, want)) in have.iter().zip(want).enumerate() {
        assert_eq!(have.len(), want.len(), "{what} {t}: number of elements");
        let mut error = 0.0f64;
        let mut norm = 0.0f64;
        for (i, (h, w)) in have.iter().zip(want).enumerate() {
            if w.is_finite() {
                assert!(h.is_finite(), "{what} {t}: element {i} is {h}, not {w}");
                error += (h - w).powi(2);
                norm += w * w;
            } else {
                assert!(
                    h.to_bits() == w.to_bits() || (h.is_nan() && w.is_nan()),
                    "{what} {t}: {i} is {h}, not {w}"
                );
            }
        }
        let relative = error.sqrt() / norm.sqrt().max(1e-3 * (have.len().max(1) as f64).sqrt());
        assert!(
            relative <= limit,
            "{what} {t}: relative error {relative:e} above {limit:e}"
        );
    }
}
