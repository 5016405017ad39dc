//! Random operations over random shapes, types and layouts, forward and backward.
//!
//! A program is a seed. It makes a few tensors (sizes with 0 and 1 among them, strided and
//! stretched ones, parameters) and applies operations to them, some of which do not fit: every
//! outcome is a tensor or an error, never a panic. The same program gives the same bits and the
//! same errors on one thread, on three, and on a simulated worker, and leaves no memory behind.
//! Single operations are also compared with the same ones in f64.
//!
//! A share of the seeds runs by default; `ROUNDPIPE_SEEDS=0..10000` runs as many as one likes, and
//! says how many operations that were.

mod bench;
mod ops;

use std::io::Write as _;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use bench::{Bench, Dice};
use roundpipe_tensor::{
    Bytes, Cpu, Cx, DType, Device, Error, HostBuf, Result, RngSite, SimWorld, Tensor, Worker,
};

/// Operations tried, and those that gave a result.
static TRIED: AtomicU64 = AtomicU64::new(0);
static DONE: AtomicU64 = AtomicU64::new(0);

const FLOATS: [DType; 4] = [DType::F32, DType::BF16, DType::F16, DType::F64];

/// The seeds to run: a share, or what the environment asks for.
fn seeds(share: Range<u64>) -> (Range<u64>, bool) {
    let asked = std::env::var("ROUNDPIPE_SEEDS").ok();
    let range = asked
        .as_deref()
        .and_then(|text| text.split_once(".."))
        .and_then(|(from, to)| Some(from.parse().ok()?..to.parse().ok()?));
    (range.clone().unwrap_or(share), range.is_some())
}

/// Runs a program per seed, and names the seed that fails or panics.
fn for_seeds(what: &str, share: Range<u64>, program: impl Fn(u64)) {
    let (seeds, asked) = seeds(share);
    for seed in seeds.clone() {
        if let Err(cause) = catch_unwind(AssertUnwindSafe(|| program(seed))) {
            let text = cause.downcast_ref::<String>().map(String::as_str);
            let text = text
                .or(cause.downcast_ref::<&str>().copied())
                .unwrap_or("a panic");
            panic!("{what}, ROUNDPIPE_SEEDS={seed}..{}: {text}", seed + 1);
        }
    }
    if asked {
        let (tried, done) = (TRIED.load(Ordering::Relaxed), DONE.load(Ordering::Relaxed));
        let line =
            format!("{what} {seeds:?}: {tried} operations so far, {done} of them with a result\n");
        // Not through the runner, which hides what passing tests print.
        let _ = std::io::stderr().write_all(line.as_bytes());
    }
}

/// A worker on `threads` threads, which all programs share.
fn cpu(threads: usize) -> Worker {
    static ONE: OnceLock<Arc<Cpu>> = OnceLock::new();
    static THREE: OnceLock<Arc<Cpu>> = OnceLock::new();
    let device = if threads == 1 { &ONE } else { &THREE };
    worker(
        device
            .get_or_init(|| Cpu::new(Some(threads)).unwrap())
            .clone(),
    )
}

fn worker(device: Arc<dyn Device>) -> Worker {
    Worker::new(device, Bytes::mib(64)).unwrap()
}

/// Type, sizes and bytes of each tensor.
type Values = Vec<(DType, Vec<usize>, Vec<u8>)>;

/// What came of one step of a program.
#[derive(Debug, Clone, PartialEq)]
enum Told {
    Values(&'static str, Values),
    Error(&'static str, String),
}

impl std::fmt::Display for Told {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Error(_, error) => write!(f, "error {error:?}"),
            Self::Values(_, values) => values.iter().try_for_each(|(dtype, dims, bytes)| {
                let sum = bytes.iter().fold(7u64, |sum, byte| {
                    sum.wrapping_mul(31).wrapping_add(u64::from(*byte))
                });
                write!(f, "{dtype} {dims:?} with checksum {sum:x} ")
            }),
        }
    }
}

impl Told {
    fn step(&self) -> &'static str {
        match self {
            Self::Values(step, _) | Self::Error(step, _) => step,
        }
    }

    fn new(step: &'static str, outcome: Result<Values>) -> Self {
        match outcome {
            Ok(values) => Self::Values(step, values),
            // The same words on every device.
            Err(error) => Self::Error(step, error.to_string().replace("sim:0", "cpu:0")),
        }
    }
}

/// The bytes of tensors.
fn read(tensors: &[Tensor]) -> Result<Values> {
    let bytes = |tensor: &Tensor| {
        let host = HostBuf::zeroed("read", tensor.size_bytes())?;
        tensor.read_into(&mut host.write(0..host.len())?)?;
        let bytes = host.read_all()?.bytes().to_vec();
        Ok((tensor.dtype(), tensor.dims().to_vec(), bytes))
    };
    tensors.iter().map(bytes).collect()
}

/// Runs the program `seed` and tells what came of every step. Values are read at the end, so that a
/// simulated worker's lanes run behind the host.
fn run(worker: &Worker, seed: u64) -> Vec<Told> {
    let mut dice = Dice::new(seed, 0);
    let dtype = FLOATS[dice.below(4)];
    let budget = match dice.one_in(12) {
        _ if cfg!(miri) => 64,
        true => 60_000,
        false => 800,
    };
    let mut cx = Cx::train(worker).at(RngSite {
        seed,
        ..RngSite::default()
    });
    let mut bench = Bench::new(&mut cx, dice, dtype, budget);
    bench.odd_values = bench.dice.one_in(4);
    bench.odd_indices = bench.dice.one_in(6);
    let mut steps = Vec::new();
    for _ in 0..1 + bench.dice.below(12) {
        let (name, operation) = ops::ALL[bench.dice.below(ops::ALL.len())];
        let outcome = operation(&mut bench);
        TRIED.fetch_add(1, Ordering::Relaxed);
        if let Ok(outputs) = &outcome {
            DONE.fetch_add(1, Ordering::Relaxed);
            bench.keep(outputs);
        }
        steps.push((name, outcome));
    }
    let gradients = bench.backward();
    let mut told: Vec<Told> = steps
        .into_iter()
        .map(|(name, outcome)| Told::new(name, outcome.and_then(|t| read(&t))))
        .collect();
    told.push(Told::new(
        "backward",
        gradients.and_then(|grads| read(&grads)),
    ));
    told
}

/// Whether another kind of device may say so later, or not at all: only a kernel that has run knows
/// of wrong indices, and parameters take memory of a worker that does not read them in place.
fn is_of_the_device(told: &Told) -> bool {
    let words = [
        "index ",
        "offsets must",
        "cumulative length",
        "is not available",
        "reserve more",
    ];
    matches!(told, Told::Error(_, error) if words.iter().any(|words| error.contains(words)))
}

/// Refuses a difference, in a line.
fn same(what: &str, have: &[Told], want: &[Told]) {
    let names: Vec<&str> = want.iter().map(Told::step).collect();
    assert_eq!(
        have.len(),
        want.len(),
        "{what}: number of steps of {names:?}"
    );
    for (at, (have, want)) in have.iter().zip(want).enumerate() {
        assert!(
            have == want,
            "{what}: step {at} of {names:?}: {have} is not {want}"
        );
    }
}

/// The same bits and the same errors on one thread, on three, and on a simulated worker.
#[test]
fn programs_agree_everywhere() {
    for_seeds("programs", 0..if cfg!(miri) { 4 } else { 400 }, |seed| {
        let (one, three) = (cpu(1), cpu(3));
        let plain = run(&one, seed);
        same("3 threads and 1", &run(&three, seed), &plain);
        for worker in [&one, &three] {
            assert_eq!(worker.usage().used, Bytes(0), "memory is left behind");
        }
        let world = SimWorld::seeded(seed).unwrap();
        let worker = worker(world.worker());
        let simulated = run(&worker, seed);
        assert_eq!(worker.usage().used, Bytes(0), "memory is left behind");
        drop(worker);
        let end = world.fence_all();
        assert!(world.races().is_empty(), "{:?}", world.races());
        if plain.iter().chain(&simulated).any(is_of_the_device) {
            let told = simulated.iter().any(|told| matches!(told, Told::Error(..)));
            assert!(
                told || end.is_err(),
                "the simulated worker keeps an error to itself"
            );
            return;
        }
        same("sim and cpu", &simulated, &plain);
        end.unwrap();
    });
}

/// Values and gradients of single operations against f64.
#[test]
#[cfg_attr(miri, ignore = "the same code as the programs', for its numbers")]
fn operations_agree_with_f64() {
    for_seeds("operations", 0..1500, |seed| {
        let (name, operation) = ops::SMOOTH[seed as usize % ops::SMOOTH.len()];
        let dtype = FLOATS[Dice::new(seed, 1).below(3)];
        let once = |dtype: DType| -> Result<[Vec<Vec<f64>>; 2]> {
            let worker = cpu(1);
            let mut cx = Cx::train(&worker).at(RngSite {
                seed,
                ..RngSite::default()
            });
            let mut bench = Bench::new(&mut cx, Dice::new(seed, 2), dtype, 300);
            let outputs = operation(&mut bench)?;
            bench.keep(&outputs);
            let grads = bench.backward()?;
            let all = |tensors: &[Tensor]| {
                tensors
                    .iter()
                    .map(Tensor::to_f64_vec)
                    .collect::<Result<Vec<_>>>()
            };
            Ok([all(&outputs)?, all(&grads)?])
        };
        TRIED.fetch_add(1, Ordering::Relaxed);
        let (have, want) = (once(dtype), once(DType::F64));
        match (have, want) {
            (Ok(have), Ok(want)) => {
                DONE.fetch_add(1, Ordering::Relaxed);
                close(
                    &format!("{name} {dtype} value"),
                    dtype,
                    (1.0, 0.1),
                    &have[0],
                    &want[0],
                );
                // Results that were rounded go into gradients again. The gradient of a stretched
                // value adds up to 300 of them, and may be 0: what is left then is their rounding.
                close(
                    &format!("{name} {dtype} gradient"),
                    dtype,
                    (10.0, 0.3),
                    &have[1],
                    &want[1],
                );
            }
            (Err(_), Err(_)) => {}
            // Twice or four times the memory.
            (Ok(_), Err(Error::DeviceMemory { .. })) => {}
            (have, want) => panic!(
                "{name} {dtype}: {:?}, in f64 {:?}",
                have.map(drop),
                want.map(drop)
            ),
        }
    });
}

/// Norm-wise comparison, tensor by tensor, where the type can hold the values. Elements smaller than
/// `least` count as that.
fn close(
    what: &str,
    dtype: DType,
    (slack, least): (f64, f64),
    have: &[Vec<f64>],
    want: &[Vec<f64>],
) {
    let (limit, most) = match dtype {
        DType::F32 => (1e-4, 1e30),
        DType::F16 => (3e-2, 1e4),
        _ => (1e-1, 1e30),
    };
    assert_eq!(have.len(), want.len(), "{what}: number of tensors");
    for (t, (have, want)) in have.iter().zip(want).enumerate() {
        assert_eq!(have.len(), want.len(), "{what} {t}: number of elements");
        if want.iter().any(|w| w.is_nan() || w.abs() > most) {
            continue;
        }
        let error: f64 = have.iter().zip(want).map(|(h, w)| (h - w).powi(2)).sum();
        let norm: f64 = want.iter().map(|w| w * w).sum();
        let floor = least * (have.len().max(1) as f64).sqrt();
        let relative = error.sqrt() / norm.sqrt().max(floor);
        assert!(
            relative <= limit * slack,
            "{what} {t}: relative error {relative:e} above {limit:e} · {slack}"
        );
    }
}
