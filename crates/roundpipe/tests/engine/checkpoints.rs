//! Checkpoints: a resumed run has the bits of one that was never stopped and never saved.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use roundpipe::optim::{Adafactor, AdamW, Muon, Sgd};
use roundpipe::{
    Bytes, Checkpoint, DType, Error, GradScaler, Grain, Lag, Losses, ParamGroup, Params, Restored,
    RingOptions, RoundPipe, Rule, RunConfig, ScalerState, Sequential, Update,
};

use crate::models;

/// A folder of one test, which is removed with it.
pub struct Folder(PathBuf);

impl Folder {
    pub fn new() -> Self {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("roundpipe-checkpoints-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// What is in it.
    pub fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(&self.0).unwrap();
        let mut names: Vec<String> = entries
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// What is trained.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Trained {
    All,
    /// A few small parameters of a frozen model, as with LoRA.
    Few,
}

/// A run.
#[derive(Debug, Clone, Copy)]
struct Case {
    dtype: DType,
    scaled: bool,
    trained: Trained,
    lag: Lag,
}

const STEPS: u64 = 6;

/// Steps whose losses overflow with a scale.
const BAD: [u64; 2] = [1, 3];

impl Case {
    fn model(&self) -> Sequential {
        let model = models::transformer(self.dtype, true);
        if self.trained == Trained::Few {
            for (name, param) in model.named_params() {
                param.set_trainable(name.contains("norm") || name.contains("block2.up"));
            }
        }
        model
    }

    fn engine(&self, workers: usize) -> RoundPipe {
        let grain = match workers % 2 {
            0 => Grain::Stage,
            _ => Grain::Layer,
        };
        let config = RunConfig::default()
            .num_microbatch(3)
            .recompute_grain(grain);
        build(&self.model(), AdamW::default(), workers, config)
    }

    fn step(&self, engine: &RoundPipe, scaler: &GradScaler, step: u64) -> u64 {
        let (inputs, labels) = models::tokens(step, 6, self.dtype);
        let update = Update::new(0.02);
        if !self.scaled {
            let losses = engine.forward_backward(inputs, labels, models::token_loss);
            engine.update(&update, self.lag).unwrap();
            return models::bits(&losses.unwrap());
        }
        let scaled = engine.scaled_loss(scaler, models::token_loss).unwrap();
        let factor = if BAD.contains(&step) {
            f64::INFINITY
        } else {
            1.0
        };
        let losses = engine.forward_backward(inputs, labels, move |cx, output, labels| {
            let factor = cx.full(DType::F32, &[], factor)?;
            let losses = scaled(cx, output, labels)?;
            losses
                .iter()
                .map(|loss| cx.mul(loss, &factor))
                .collect::<Result<Vec<_>, _>>()
        });
        engine.update_scaled(&update, scaler, self.lag).unwrap();
        models::bits(&losses.unwrap())
    }

    fn scaler(&self) -> GradScaler {
        GradScaler::new(ScalerState {
            scale: 512.0,
            interval: 2,
            ..ScalerState::default()
        })
        .unwrap()
    }
}

fn build(
    model: &Sequential,
    rule: impl Into<Rule>,
    workers: usize,
    config: RunConfig,
) -> RoundPipe {
    RoundPipe::builder(model.clone())
        .optimizer(rule)
        .optimizer_threads(1)
        .seed(models::SEED)
        .run_config(config)
        .devices(models::cpus(workers))
        .ring_options(RingOptions {
            memory: Some(Bytes::mib(16)),
            ..RingOptions::default()
        })
        .build()
        .unwrap()
}

/// All that a run leaves: parameters and buffers, optimizer state, counters, scale.
fn left(engine: &RoundPipe, scaler: &GradScaler) -> impl PartialEq + std::fmt::Debug + use<> {
    let state = engine.training_state().unwrap();
    let params: Vec<_> = state
        .params
        .iter()
        .map(|(name, param)| {
            let values = std::iter::once(&param.value).chain(&param.moments);
            let bits = values.map(|value| models::f64_bits(value.to_f64_vec().unwrap()));
            (name.clone(), bits.collect::<Vec<_>>(), param.frozen_steps)
        })
        .collect();
    let scale = format!("{:?}", scaler.state());
    (
        models::params(engine),
        params,
        state.updates,
        state.calls,
        scale,
    )
}

fn saved(engine: &RoundPipe, path: &Path, notes: &str) {
    let report = engine.save(path, notes).unwrap().wait().unwrap();
    assert!(report.bytes > 0);
}

/// Interrupted behind every step, on 1, 2 and 3 workers, the run goes on with the same bits on
/// another number of workers and at another grain. The saving run has them too.
#[test]
fn a_resumed_run_has_the_bits_of_the_whole_one() {
    let kinds = [
        (DType::F32, false),
        (DType::BF16, false),
        (DType::F16, true),
    ];
    for (dtype, scaled) in kinds {
        for trained in [Trained::All, Trained::Few] {
            for lag in [Lag::Zero, Lag::One] {
                let case = Case {
                    dtype,
                    scaled,
                    trained,
                    lag,
                };
                check(case);
            }
        }
    }
}

fn check(case: Case) {
    let folder = Folder::new();
    let (whole, scaler) = (case.engine(1), case.scaler());
    let steps = |engine: &RoundPipe, scaler: &GradScaler, range: std::ops::Range<u64>| {
        range
            .map(|step| case.step(engine, scaler, step))
            .collect::<Vec<_>>()
    };
    let losses = steps(&whole, &scaler, 0..STEPS);
    let end = left(&whole, &scaler);
    for (workers, at) in [(1, 0), (2, 1), (3, 2), (1, 3), (2, 4), (3, 5)] {
        let path = folder.path(&format!("step-{at}"));
        let place = format!("{case:?}, {workers} workers, saved behind step {at}");
        let (saving, scaler) = (case.engine(workers), case.scaler());
        let mut seen = steps(&saving, &scaler, 0..at);
        // Not waited for: the run goes on beside it.
        let save = saving.save(&path, format!("step {at}")).unwrap();
        seen.extend(steps(&saving, &scaler, at..STEPS));
        assert_eq!(seen, losses, "saving, {place}");
        assert_eq!(left(&saving, &scaler), end, "saving, {place}");
        save.wait().unwrap();
        drop(saving);

        let resumed = case.engine(workers % 3 + 1);
        // What it did before does not matter.
        if at % 2 == 0 {
            case.step(&resumed, &case.scaler(), 77);
        }
        let restored = resumed.restore(&path).unwrap();
        assert_eq!(restored.notes, format!("step {at}"));
        assert_eq!((restored.steps, restored.calls), (at, at), "{place}");
        let scaler = restored.scaler.unwrap_or_else(|| case.scaler());
        let rest = steps(&resumed, &scaler, at..STEPS);
        assert_eq!(rest, losses[at as usize..], "{place}");
        assert_eq!(left(&resumed, &scaler), end, "{place}");
    }
}

/// A save is not a `synchronize`: at lag 1 the call behind it reads the older weights, in the run
/// that saved and in the one that was resumed, also when that one saves again at once.
#[test]
fn older_weights_survive_a_chain_of_resumes() {
    let folder = Folder::new();
    let case = Case {
        dtype: DType::BF16,
        scaled: false,
        trained: Trained::All,
        lag: Lag::One,
    };
    let scaler = case.scaler();
    let whole = case.engine(1);
    let losses: Vec<u64> = (0..STEPS)
        .map(|step| case.step(&whole, &scaler, step))
        .collect();
    let mut seen = Vec::new();
    for step in 0..STEPS {
        let engine = case.engine(step as usize % 3 + 1);
        let path = folder.path("run");
        if step > 0 {
            let restored = engine.restore(&path).unwrap();
            assert_eq!(restored.steps, step);
            assert_eq!(engine.steps(), step, "a fresh engine counts on");
            saved(&engine, &path, "again");
        }
        seen.push(case.step(&engine, &scaler, step));
        // Replaces the one before; the engine is dropped while it is written.
        engine.save(&path, "").unwrap();
    }
    assert_eq!(seen, losses);
    let names: Vec<String> = Checkpoint::open(folder.path("run"))
        .unwrap()
        .names()
        .map(str::to_owned)
        .collect();
    assert!(
        names.contains(&"block0.up.weight@previous".to_owned()),
        "{names:?}"
    );
    assert_eq!(folder.names(), ["run"], "nothing else is left");
}

/// Running statistics are in the checkpoint, and later ones are written over.
#[test]
fn buffers_are_saved_and_restored() {
    for lag in [Lag::Zero, Lag::One] {
        let folder = Folder::new();
        let engine = |workers| {
            let config = RunConfig::default().num_microbatch(2);
            build(&models::resnet(), Sgd::default(), workers, config)
        };
        let step = |engine: &RoundPipe, step| {
            let (images, labels) = models::images(step, 6);
            let losses: Losses = engine
                .forward_backward(images, labels, models::image_loss)
                .unwrap();
            engine.update(&Update::new(0.05), lag).unwrap();
            models::bits(&losses)
        };
        let whole = engine(1);
        let losses: Vec<u64> = (0..STEPS).map(|at| step(&whole, at)).collect();
        let end = left(&whole, &GradScaler::disabled());
        let saving = engine(2);
        saving.save(folder.path("start"), "").unwrap();
        for at in 0..3 {
            step(&saving, at);
        }
        saving.save(folder.path("middle"), "").unwrap();
        for at in 3..5 {
            step(&saving, at);
        }
        let error = saving
            .restore(folder.path("start"))
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("running_mean") && error.contains("no call"),
            "{error}"
        );
        let resumed = engine(3);
        for engine in [&saving, &resumed] {
            engine.restore(folder.path("middle")).unwrap();
            let rest: Vec<u64> = (3..STEPS).map(|at| step(engine, at)).collect();
            assert_eq!(rest, losses[3..]);
            assert_eq!(left(engine, &GradScaler::disabled()), end);
        }
    }
}

/// Every rule, also with its state in bf16 and a group that froze parameters for a while.
#[test]
fn every_rule_goes_on() {
    let rules = [
        Rule::from(Adafactor::default()),
        Rule::Muon {
            matrices: Muon::default(),
            rest: AdamW::default(),
        },
        Rule::from(Sgd::default()),
    ];
    for rule in rules {
        for (dtype, optim_dtype) in [(DType::BF16, DType::BF16), (DType::F16, DType::F32)] {
            let folder = Folder::new();
            let engine = || {
                RoundPipe::builder(models::transformer(dtype, false))
                    .optimizer(rule)
                    .optim_dtype(optim_dtype)
                    .groups([ParamGroup::matching("block1.*").frozen(true)])
                    .seed(models::SEED)
                    .devices(models::cpus(1))
                    .build()
                    .unwrap()
            };
            let step = |engine: &RoundPipe, step| {
                let (inputs, labels) = models::tokens(step, 4, dtype);
                if step == 3 {
                    engine.set_groups([]).unwrap();
                }
                let losses = engine.forward_backward(inputs, labels, models::token_loss);
                engine.update(&Update::new(0.01), Lag::One).unwrap();
                models::bits(&losses.unwrap())
            };
            let whole = engine();
            let losses: Vec<u64> = (0..STEPS).map(|at| step(&whole, at)).collect();
            let saving = engine();
            for at in 0..2 {
                step(&saving, at);
            }
            saved(&saving, &folder.path("c"), "");
            let resumed = engine();
            resumed.restore(folder.path("c")).unwrap();
            let rest: Vec<u64> = (2..STEPS).map(|at| step(&resumed, at)).collect();
            assert_eq!(rest, losses[2..], "{rule} {optim_dtype}");
            let scaler = GradScaler::disabled();
            assert_eq!(
                left(&resumed, &scaler),
                left(&whole, &scaler),
                "{rule} {optim_dtype}"
            );
        }
    }
}

/// Values that the user wrote are in the checkpoint, although no update has seen them.
#[test]
fn written_values_are_saved() {
    let folder = Folder::new();
    let model = models::transformer(DType::BF16, false);
    let engine = build(&model, AdamW::default(), 1, RunConfig::default());
    let (inputs, labels) = models::tokens(0, 4, DType::BF16);
    engine
        .forward_backward(inputs, labels, models::token_loss)
        .unwrap();
    engine.update(&Update::new(0.01), Lag::One).unwrap();
    engine.synchronize().unwrap();
    let (name, param) = model.trainable_params().into_iter().next().unwrap();
    let data = param.data();
    data.write(0..2)
        .unwrap()
        .bytes()
        .copy_from_slice(&[0, 0x40]);
    saved(&engine, &folder.path("c"), "");
    let checkpoint = Checkpoint::open(folder.path("c")).unwrap();
    let value = checkpoint.read(&name).unwrap();
    assert_eq!(value.dtype(), DType::F32);
    assert_eq!(value.to_f64_vec().unwrap()[0], 2.0);
}

/// The files are ordinary safetensors, and what they hold has names.
#[test]
fn a_checkpoint_can_be_read_without_an_engine() {
    let folder = Folder::new();
    let case = Case {
        dtype: DType::BF16,
        scaled: false,
        trained: Trained::Few,
        lag: Lag::Zero,
    };
    let engine = case.engine(1);
    case.step(&engine, &case.scaler(), 0);
    saved(&engine, &folder.path("c"), "{\"epoch\": 1}\n");
    let checkpoint = Checkpoint::open(folder.path("c")).unwrap();
    checkpoint.verify().unwrap();
    assert_eq!(
        (checkpoint.steps(), checkpoint.updates(), checkpoint.calls()),
        (1, 1, 1)
    );
    assert_eq!(checkpoint.notes(), "{\"epoch\": 1}\n");
    assert_eq!(checkpoint.scaler(), None);
    let state = engine.training_state().unwrap();
    assert_eq!(checkpoint.names().count(), 3 * state.params.len());
    for (name, param) in &state.params {
        let value = checkpoint.read(name).unwrap();
        assert!(value.same_bits(&param.value).unwrap(), "{name}");
        for (at, moment) in param.moments.iter().enumerate() {
            let read = checkpoint.read(&format!("{name}@moment.{at}")).unwrap();
            assert!(read.same_bits(moment).unwrap(), "{name}");
        }
    }
    let file = folder.path("c").join("state-00001.safetensors");
    let weights = roundpipe_files::Weights::open(file).unwrap();
    assert_eq!(weights.tensors().len(), 3 * state.params.len());
    let error = checkpoint.read("nothing").unwrap_err().to_string();
    assert!(
        error.contains("`nothing`") && error.contains("names"),
        "{error}"
    );
}

fn refused<T: std::fmt::Debug>(result: Result<T, Error>, parts: &[&str]) {
    let text = result.unwrap_err().to_string();
    assert_eq!(text.lines().count(), 1, "{text}");
    for part in parts {
        assert!(text.contains(part), "{text}: no `{part}`");
    }
}

/// What does not fit is refused by its first difference, and nothing changes.
#[test]
fn a_checkpoint_of_something_else_is_refused() {
    let folder = Folder::new();
    let case = Case {
        dtype: DType::F32,
        scaled: false,
        trained: Trained::All,
        lag: Lag::One,
    };
    let engine = case.engine(1);
    case.step(&engine, &case.scaler(), 0);
    saved(&engine, &folder.path("c"), "");
    let path = folder.path("c");
    let restore = |engine: RoundPipe| -> Result<Restored, Error> {
        let before = models::params(&engine);
        let result = engine.restore(&path);
        if result.is_err() {
            assert_eq!(models::params(&engine), before);
        }
        result
    };
    let few = Case {
        trained: Trained::Few,
        ..case
    };
    refused(
        restore(few.engine(1)),
        &["embed.tokens.weight", "does not train it"],
    );
    let half = Case {
        dtype: DType::BF16,
        ..case
    };
    refused(restore(half.engine(1)), &["type f32", "bf16"]);
    let model = models::transformer(DType::F32, false);
    let config = RunConfig::default();
    refused(
        restore(build(&model, AdamW::default(), 1, config.clone())),
        &["head.weight", "trains it"],
    );
    let model = case.model();
    refused(
        restore(build(&model, Sgd::default(), 1, config.clone())),
        &["rule AdamW", "SGD"],
    );
    let other_seed = RoundPipe::builder(case.model())
        .optimizer(AdamW::default())
        .devices(models::cpus(1))
        .build();
    refused(restore(other_seed.unwrap()), &["seed 5", "seed(5)"]);
    let no_lag = RoundPipe::builder(case.model())
        .optimizer(AdamW::default())
        .seed(models::SEED)
        .max_lag(Lag::Zero)
        .devices(models::cpus(1))
        .build();
    refused(restore(no_lag.unwrap()), &["lag 1", "max_lag(Lag::One)"]);
    let reader = RoundPipe::builder(case.model())
        .inference(true)
        .devices(models::cpus(1))
        .build()
        .unwrap();
    refused(reader.save(folder.path("d"), ""), &["inference(true)"]);
    refused(restore(reader), &["inference(true)"]);
    refused(engine.restore(folder.path("none")), &["none", "not there"]);
}

/// What cannot be saved, or not there, is refused before anything happens.
#[test]
fn saves_that_cannot_be_are_refused() {
    let folder = Folder::new();
    let case = Case {
        dtype: DType::F32,
        scaled: false,
        trained: Trained::All,
        lag: Lag::Zero,
    };
    let engine = case.engine(1);
    let (inputs, labels) = models::tokens(0, 6, DType::F32);
    engine
        .forward_backward(inputs, labels, models::token_loss)
        .unwrap();
    refused(
        engine.save(folder.path("c"), ""),
        &["gradients", "after the update"],
    );
    engine.zero_grad().unwrap();
    std::fs::create_dir(folder.path("photos")).unwrap();
    std::fs::write(folder.path("photos").join("me.jpg"), "x").unwrap();
    refused(
        engine.save(folder.path("photos"), ""),
        &["photos", "no checkpoint"],
    );
    refused(
        engine.save(folder.path("photos").join("me.jpg"), ""),
        &["me.jpg", "no checkpoint"],
    );
    refused(engine.save("/", ""), &["no checkpoint"]);
    refused(
        engine.save(folder.path("c"), "x".repeat((16 << 20) + 1)),
        &["notes", "16777217"],
    );
    assert_eq!(folder.names(), ["photos"]);
    // Folders on the way are made.
    saved(&engine, &folder.path("a/b/c"), "");
    engine.restore(folder.path("a/b/c")).unwrap();
}

/// A step that fails takes the save behind it with it, and nothing is left of that.
#[test]
fn a_save_behind_a_failed_step_fails() {
    let folder = Folder::new();
    let case = Case {
        dtype: DType::F32,
        scaled: false,
        trained: Trained::All,
        lag: Lag::One,
    };
    let engine = case.engine(1);
    case.step(&engine, &case.scaler(), 0);
    let (inputs, labels) = models::tokens(1, 6, DType::F32);
    engine
        .forward_backward(inputs, labels, models::token_loss)
        .unwrap();
    let wait = std::sync::Arc::new(std::sync::Barrier::new(2));
    let inside = wait.clone();
    let fails = move |_: &mut roundpipe::OptimParams<'_>| {
        inside.wait();
        Err(Error::config("step", "it was meant to fail"))
    };
    engine.step(fails, Lag::One).unwrap();
    let save = engine.save(folder.path("c"), "").unwrap();
    wait.wait();
    refused(save.wait(), &["meant to fail"]);
    assert!(save.is_done());
    assert_eq!(folder.names(), [""; 0]);
    assert!(engine.synchronize().is_err());
    // The engine works on.
    case.step(&engine, &case.scaler(), 1);
    saved(&engine, &folder.path("c"), "");
}
