//! What an update of AdamW takes by what masters and moments are kept in, beside the plain pass over
//! f32 copies of the weights and f32 moments: parameters per second, the best of alternating rounds,
//! and the ratio of times to the plain pass: the median over rounds of the ratio within each. Where
//! weights come first, both passes by themselves.
//!
//! Goal: masters as weights and remainders take no longer than f32 copies. `cargo bench -p roundpipe
//! --bench update -- ROUNDS THREADS`.

use std::io::Write;
use std::sync::Arc;
use std::time::Instant;

use roundpipe::optim::AdamW;
use roundpipe::testing::{Apply, Store, StoreConfig};
use roundpipe::{
    Cpu, Cx, DType, HostBuf, Lag, Layer, MomentType, Param, ParamVisitor, Params, Pin, RngSite,
    Rule, TensorResult, Tree,
};
use roundpipe_tensor::cpu::threads::Threads;
use roundpipe_tensor::optim::{AdamSlabs, Floats, FloatsMut, StepSettings};

type Failure = Box<dyn std::error::Error>;

/// Parameters: more than any cache holds.
const COUNT: usize = 16 << 20;

struct One(Param);

impl Params for One {
    fn visit(&self, visit: &mut ParamVisitor<'_>) {
        visit.param("weight", &self.0);
    }
}

impl Layer for One {
    fn run(&self, _: &mut Cx, input: Tree) -> TensorResult<Tree> {
        Ok(input)
    }
}

/// The pass itself: f32 copies, f32 moments.
struct Plain {
    threads: Threads,
    grad: HostBuf,
    working: HostBuf,
    state: [HostBuf; 3],
    steps: u64,
}

impl Plain {
    fn new(threads: usize) -> Result<Self, Failure> {
        let narrow = |std| Ok::<_, Failure>(noise(std)?.data());
        let state = ["master", "first", "second"].map(|name| HostBuf::zeroed(name, 4 * COUNT));
        let [master, first, second] = state;
        let state = [master?, first?, second?];
        // Touched once, so that no round pays for pages.
        for slab in &state {
            slab.write(0..slab.len())?.as_mut_slice::<f32>().fill(1e-3);
        }
        Ok(Self {
            threads: Threads::new(Some(threads))?,
            grad: narrow(1e-2)?,
            working: narrow(0.5)?,
            state,
            steps: 0,
        })
    }

    fn step(&mut self) -> Result<(), Failure> {
        self.steps += 1;
        let all = |buf: &HostBuf| buf.write(0..buf.len());
        let [master, first, second] = &self.state;
        let (mut master, mut first, mut second) = (all(master)?, all(first)?, all(second)?);
        let mut working = all(&self.working)?;
        let grad = self.grad.read_all()?;
        let slabs = AdamSlabs {
            grad: Floats::BF16(grad.as_slice()),
            master: master.as_mut_slice(),
            exp_avg: first.as_mut_slice(),
            exp_avg_sq: second.as_mut_slice(),
            max_exp_avg_sq: None,
            working: Some(FloatsMut::BF16(working.as_mut_slice())),
        };
        let settings = StepSettings::new(self.steps, 1e-4);
        AdamW::default().step(&self.threads, settings, slabs)?;
        Ok(())
    }
}

/// A store with one parameter.
struct Kept {
    store: Store,
    steps: u64,
}

impl Kept {
    fn new(threads: usize, lag: Lag, moments: MomentType) -> Result<Self, Failure> {
        let layer: Arc<dyn Layer> = Arc::new(One(noise(0.5)?));
        let config = StoreConfig {
            pin: Pin::Off,
            rule: Some(Rule::AdamW(AdamW::default())),
            max_lag: lag,
            moments,
            threads: Some(threads),
            ..StoreConfig::new(Cpu::new(Some(1))?)
        };
        let store = Store::new(&[("l".to_owned(), layer)], config)?;
        let grad = store.layer(0).grad_range(0)?.ok_or("no gradient")?;
        let from = noise(1e-2)?.data();
        grad.write(0..grad.len())?
            .bytes()
            .copy_from_slice(from.read_all()?.bytes());
        Ok(Self { store, steps: 0 })
    }

    fn next(&mut self) -> Apply {
        self.steps += 1;
        self.store.layer(0).set_filled(0, true);
        Apply {
            step: self.steps,
            lr: 1e-4,
            factor: 1.0,
            clip_value: None,
            groups: self.store.groups(),
            next_version: self.steps,
        }
    }

    /// The seconds of an update.
    fn step(&mut self) -> Result<f64, Failure> {
        let apply = self.next();
        timed(|| {
            self.store.apply(0, &apply, &self.store.abort())?;
            Ok(())
        })
    }

    /// The seconds of an update that writes weights first: of those, and of the moments behind them.
    fn step_apart(&mut self) -> Result<[f64; 2], Failure> {
        let apply = self.next();
        let mut late = None;
        let weights = timed(|| {
            late = self.store.apply_weights(0, &apply, &self.store.abort())?.1;
            Ok(())
        })?;
        let late = late.ok_or("the moments were written as well")?;
        Ok([weights, timed(|| Ok(late.write()?))?])
    }
}

fn noise(std: f64) -> Result<Param, Failure> {
    let key = RngSite::default().key();
    Ok(Param::normal(DType::BF16, &[COUNT], std, key)?)
}

/// Seconds that `work` takes. Not those of the processor: its clock may tick in steps as long as a
/// pass.
fn timed(work: impl FnOnce() -> Result<(), Failure>) -> Result<f64, Failure> {
    let start = Instant::now();
    work()?;
    Ok(start.elapsed().as_secs_f64())
}

fn main() -> Result<(), Failure> {
    let mut numbers = std::env::args()
        .skip(1)
        .filter_map(|word| word.parse().ok());
    let rounds = numbers.next().unwrap_or(9);
    let threads = numbers.next().unwrap_or(1);
    let ways = [
        ("remainders, lag 0", Lag::Zero, MomentType::F32),
        ("remainders, lag 1", Lag::One, MomentType::F32),
        ("bf16 moments, lag 0", Lag::Zero, MomentType::Bf16),
        ("8-bit moments, lag 0", Lag::Zero, MomentType::Bits8),
    ];
    let apart = [
        ("weights first", "moments later", MomentType::F32),
        (
            "weights first, bf16 moments",
            "bf16 moments later",
            MomentType::Bf16,
        ),
        (
            "weights first, 8-bit moments",
            "8-bit moments later",
            MomentType::Bits8,
        ),
    ];
    let mut plain = Plain::new(threads)?;
    let mut kept = Vec::new();
    for (_, lag, moments) in ways {
        kept.push(Kept::new(threads, lag, moments)?);
    }
    let mut kept_apart = Vec::new();
    for (_, _, moments) in apart {
        kept_apart.push(Kept::new(threads, Lag::Zero, moments)?);
    }
    let mut times: Vec<Vec<f64>> = vec![Vec::new(); 1 + ways.len() + 2 * apart.len()];
    for round in 0..=rounds {
        let mut here = vec![timed(|| plain.step())?];
        for way in &mut kept {
            here.push(way.step()?);
        }
        for way in &mut kept_apart {
            here.extend(way.step_apart()?);
        }
        // The first warms up.
        if round > 0 {
            for (all, time) in times.iter_mut().zip(here) {
                all.push(time);
            }
        }
    }
    let mut out = std::io::stdout().lock();
    writeln!(
        out,
        "{COUNT} parameters, {threads} threads, {rounds} rounds"
    )?;
    let names = std::iter::once("f32 copies").chain(ways.map(|way| way.0));
    let names = names.chain(apart.iter().flat_map(|way| [way.0, way.1]));
    for (name, all) in names.zip(&times) {
        let mut ratios: Vec<f64> = all.iter().zip(&times[0]).map(|(a, b)| a / b).collect();
        ratios.sort_by(f64::total_cmp);
        let best = all.iter().copied().fold(f64::INFINITY, f64::min);
        let rate = COUNT as f64 / best / 1e6;
        let ratio = ratios[ratios.len() / 2];
        writeln!(out, "{name:<28} {rate:8.0} M/s  {ratio:5.2} of the time")?;
    }
    Ok(())
}
