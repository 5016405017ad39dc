//! Failures anywhere are errors that say where, and leave no trace.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use roundpipe::nn::{Func, Init, Linear};
use roundpipe::optim::AdamW;
use roundpipe::{
    Bytes, Cx, DType, Device, Error, ExecutePlan, HostTensor, Lag, MergeOutput, PlanKind,
    RingOptions, RoundPipe, Rule, RunConfig, Sequential, Tensor, TensorError, TensorResult, Tree,
    Update,
};
use roundpipe_tensor::SimWorld;
use roundpipe_tensor::sim::{Fault, FaultKind, SimConfig};

use crate::api::gated;
use crate::models;
use crate::simulation::chain;

type Bits = Vec<(String, Vec<u64>)>;

/// Longer than anything takes that ends at all, on a busy machine too.
const PATIENCE: Duration = Duration::from_secs(60);

/// Fails at the given call of the layer, counted from 1, by an error or a panic; 0 never.
struct Trap {
    at: AtomicUsize,
    panics: bool,
}

impl Trap {
    fn new(panics: bool) -> Arc<Self> {
        Arc::new(Self {
            at: AtomicUsize::new(0),
            panics,
        })
    }

    fn arm(&self, at: usize) {
        self.at.store(at, Ordering::SeqCst);
    }

    fn step(&self, op: &'static str) -> TensorResult<()> {
        let left = self
            .at
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |at| at.checked_sub(1));
        match left {
            Ok(1) if self.panics => panic!("the trap snapped"),
            Ok(1) => Err(TensorError::invalid(op, "the trap snapped")),
            _ => Ok(()),
        }
    }
}

/// [`models::perceptron`] with a trap between its layers: five layers.
fn trapped(trap: &Arc<Trap>) -> Sequential {
    let mut init = Init::new(21, DType::BF16);
    let mut linear = |inputs, outputs| Linear::new(&mut init, inputs, outputs, true).unwrap();
    let (a, b, c) = (linear(5, 8), linear(8, 8), linear(8, 3));
    let trap = trap.clone();
    let check = move |cx: &mut Cx, x: &Tensor| {
        trap.step("trap")?;
        cx.relu(x)
    };
    Sequential::new()
        .named("first", a)
        .named("trap", Func(check))
        .named("second", b)
        .named("third", c)
}

fn plan() -> RunConfig {
    let plan = ExecutePlan::from_sizes(PlanKind::Fused, &[1, 2], &[1, 2, 1]);
    plan_config(plan)
}

fn plan_config(plan: ExecutePlan) -> RunConfig {
    RunConfig::default().num_microbatch(3).execute_plan(plan)
}

fn engine(model: &Sequential, devices: Vec<Arc<dyn Device>>) -> RoundPipe {
    RoundPipe::builder(model.clone())
        .name("net")
        .optimizer(Rule::AdamW(AdamW::default()))
        .optimizer_threads(1)
        .run_config(plan())
        .on_stall(Duration::from_secs(20), models::show_stall)
        .devices(devices)
        .ring_options(RingOptions {
            memory: Some(Bytes::mib(4)),
            ..RingOptions::default()
        })
        .build()
        .unwrap()
}

fn train(engine: &RoundPipe, step: u64) -> Result<u64, Error> {
    let (x, weights) = models::numbers(step, 6, DType::BF16);
    Ok(models::bits(&engine.forward_backward(
        x,
        weights,
        models::weighted,
    )?))
}

/// Weights, the optimizer's copies and its state.
fn state(engine: &RoundPipe, model: &Sequential) -> (Bits, Vec<Vec<u32>>) {
    engine.synchronize().unwrap();
    let mut copies = Vec::new();
    for param in engine.optim_parameters().unwrap() {
        for buf in std::iter::once(param.value()).chain(param.moments().iter().cloned()) {
            copies.push(
                buf.read_all()
                    .unwrap()
                    .as_slice::<f32>()
                    .iter()
                    .map(|v| v.to_bits())
                    .collect(),
            );
        }
    }
    (models::params(model), copies)
}

/// Three steps without any failure: losses and what they leave. The first is waited for, as most
/// troubled runs do: at lag 1 the second call reads its weights then.
fn untroubled(lag: Lag) -> (Vec<u64>, (Bits, Vec<Vec<u32>>)) {
    untroubled_with(lag, true)
}

fn untroubled_with(lag: Lag, waits: bool) -> (Vec<u64>, (Bits, Vec<Vec<u32>>)) {
    let model = trapped(&Trap::new(false));
    let engine = engine(&model, models::cpus(1));
    let mut losses = vec![train_and_step(&engine, 0, lag).unwrap()];
    if waits {
        engine.synchronize().unwrap();
    }
    losses.extend((1..3).map(|step| train_and_step(&engine, step, lag).unwrap()));
    (losses, state(&engine, &model))
}

fn train_and_step(engine: &RoundPipe, step: u64, lag: Lag) -> Result<u64, Error> {
    let loss = train(engine, step)?;
    engine.update(&Update::new(0.01), lag)?;
    Ok(loss)
}

/// A layer that fails, in its forward or its recompute, by an error or a panic: the error says
/// where, and the step can be repeated as if nothing had been.
#[test]
fn a_failing_layer_is_named_and_the_step_can_be_repeated() {
    for lag in [Lag::Zero, Lag::One] {
        let (losses, end) = untroubled(lag);
        for (panics, at) in [(false, 1), (false, 3), (false, 5), (true, 2), (true, 6)] {
            let trap = Trap::new(panics);
            let model = trapped(&trap);
            let engine = engine(&model, models::cpus(2));
            assert_eq!(train_and_step(&engine, 0, lag).unwrap(), losses[0]);
            engine.synchronize().unwrap();
            let before = state(&engine, &model);
            trap.arm(at);
            let failed = train_and_step(&engine, 1, lag).and_then(|_| engine.synchronize());
            let text = chain(&failed.expect_err("the trap was armed"));
            let pass = if at <= 3 {
                "forward stage 1"
            } else {
                "backward stage 3"
            };
            let place = format!(
                "net: {pass} (layers 1..3), layer 1 (trap), microbatch {}",
                (at - 1) % 3
            );
            assert!(
                text.contains(&place) && text.contains("on cpu") && text.contains("trap snapped"),
                "{text}"
            );
            assert_eq!(state(&engine, &model), before, "{text}");
            assert_eq!(engine.steps(), 1);
            let rest: Vec<u64> = (1..3)
                .map(|step| train_and_step(&engine, step, lag).unwrap())
                .collect();
            assert_eq!(rest, losses[1..], "{text}");
            assert_eq!(state(&engine, &model), end, "{text}");
        }
    }
}

/// A panic while the planner asks a layer for its sizes is no panic of the caller.
#[test]
fn a_layer_that_panics_fails_its_call_under_an_automatic_plan_too() {
    let model = Sequential::new().named("bad", Func(|_: &mut Cx, _: &Tensor| panic!("always")));
    let engine = RoundPipe::builder(model)
        .devices(models::cpus(1))
        .build()
        .unwrap();
    let (x, _) = models::numbers(0, 4, DType::F32);
    let text = chain(&engine.forward(x, &RunConfig::default()).unwrap_err());
    assert!(
        text.contains("layer 0 (bad), microbatch 0") && text.contains("it panicked: always"),
        "{text}"
    );
}

/// A loss function that fails, panics or gives no number fails the call, and says so.
#[test]
fn a_failing_loss_function_fails_the_call() {
    let model = trapped(&Trap::new(false));
    let engine = engine(&model, models::cpus(2));
    let (losses, _) = untroubled(Lag::Zero);
    for (panics, at) in [(false, 1), (true, 2), (false, 3)] {
        let trap = Trap::new(panics);
        trap.arm(at);
        let (x, weights) = models::numbers(0, 6, DType::BF16);
        let loss = move |cx: &mut Cx, output: Tree, weights: Tree| {
            trap.step("loss")?;
            models::weighted(cx, output, weights)
        };
        let text = chain(&engine.forward_backward(x, weights, loss).unwrap_err());
        let place = format!("fused stage 2 (layers 3..4), microbatch {}", at - 1);
        assert!(
            text.contains(&place) && text.contains("trap snapped"),
            "{text}"
        );
    }
    let (x, weights) = models::numbers(0, 6, DType::BF16);
    let wrong =
        |cx: &mut Cx, output: Tree, weights: Tree| cx.mul(&output.tensor()?, &weights.tensor()?);
    let text = chain(&engine.forward_backward(x, weights, wrong).unwrap_err());
    assert!(
        text.contains("[2, 3]") && text.contains("reduce it to one number"),
        "{text}"
    );
    assert!(
        models::grads(&engine)
            .iter()
            .all(|(_, grad)| grad.is_empty())
    );
    assert_eq!(train(&engine, 0).unwrap(), losses[0]);
}

/// A step function that fails or panics leaves weights, copies and state as they were, at either
/// lag.
#[test]
fn a_failing_step_function_changes_nothing() {
    for lag in [Lag::Zero, Lag::One] {
        let (losses, end) = untroubled(lag);
        for panics in [false, true] {
            let model = trapped(&Trap::new(false));
            let engine = engine(&model, models::cpus(2));
            train_and_step(&engine, 0, lag).unwrap();
            let before = state(&engine, &model);
            train(&engine, 1).unwrap();
            let step = move |params: &mut roundpipe::OptimParams<'_>| {
                params.iter_mut().for_each(|param| param.value.fill(7.0));
                assert!(!panics, "no step");
                Err(Error::Config {
                    name: "step",
                    what: "no step".to_owned(),
                })
            };
            let failed = engine.step(step, lag).and_then(|_| engine.synchronize());
            let text = failed.expect_err("the function failed").to_string();
            assert!(text.contains("no step"), "{text}");
            assert_eq!(state(&engine, &model), before, "{lag:?}, panics {panics}");
            let rest: Vec<u64> = (1..3)
                .map(|step| train_and_step(&engine, step, lag).unwrap())
                .collect();
            assert_eq!(rest, losses[1..], "{lag:?}, panics {panics}");
            assert_eq!(state(&engine, &model), end);
        }
    }
}

/// A failed step is told once: by its handle, or by the next call.
#[test]
fn a_failed_step_is_told_once() {
    let model = trapped(&Trap::new(false));
    let engine = engine(&model, models::cpus(1));
    train(&engine, 0).unwrap();
    let stepping = engine
        .step(
            |_| {
                Err(Error::Config {
                    name: "step",
                    what: "no".to_owned(),
                })
            },
            Lag::One,
        )
        .unwrap();
    assert!(stepping.wait().unwrap_err().to_string().contains("no"));
    train_and_step(&engine, 0, Lag::One).unwrap();
    engine.synchronize().unwrap();
    assert_eq!(engine.steps(), 1);
}

/// A forward is kept while a failed step puts the random stream back. When it fails later, by its
/// backward or with its step, the stream goes back as far again, whatever was run in between.
#[test]
fn a_kept_forward_that_fails_later_puts_the_random_stream_back_as_far() {
    let no_step = |engine: &RoundPipe| {
        let step = |_: &mut roundpipe::OptimParams<'_>| {
            Err(Error::Config {
                name: "step",
                what: "not made".to_owned(),
            })
        };
        let told = chain(&engine.step(step, Lag::Zero).unwrap_err());
        assert!(told.contains("not made"), "{told}");
    };
    let (x, grads) = models::numbers(0, 6, DType::BF16);
    for late in ["backward", "step"] {
        for (requires_grad, keep) in [(true, true), (true, false), (false, true), (false, false)] {
            let case = format!("{late}, requires_grad {requires_grad}, keep {keep}");
            let trap = Trap::new(false);
            let model = trapped(&trap);
            let engine = engine(&model, models::cpus(2));
            let place = || engine.training_state().unwrap().calls;
            let forward = |requires_grad: bool| {
                let plan = if requires_grad {
                    ExecutePlan::from_sizes(PlanKind::Train, &[4], &[4])
                } else {
                    ExecutePlan::from_sizes(PlanKind::Infer, &[4], &[])
                };
                let config = plan_config(plan).requires_grad(requires_grad);
                engine.forward(x.clone(), &config).unwrap()
            };
            train(&engine, 0).unwrap();
            let kept = forward(true);
            assert_eq!(place(), 2, "{case}");
            no_step(&engine);
            assert_eq!(place(), 0, "{case}");
            let between = forward(requires_grad);
            let between = keep.then_some(between);
            assert_eq!(place(), 1, "{case}");
            if late == "backward" {
                trap.arm(1);
                let failed = kept.backward(grads.clone());
                let failed = failed.and_then(|_| engine.synchronize());
                let told = chain(&failed.expect_err("the trap was armed"));
                assert!(told.contains("trap snapped"), "{case}: {told}");
            } else {
                kept.backward(grads.clone()).unwrap();
                no_step(&engine);
            }
            assert_eq!(place(), 0, "{case}");
            drop(between);
        }
    }
}

/// A learning rate that the rule refuses is no step, not even for layers in front without weights.
#[test]
fn a_refused_rate_is_no_step() {
    let mut init = Init::new(2, DType::F32);
    let model = Sequential::new()
        .with(Func(|cx: &mut Cx, x: &Tensor| cx.relu(x)))
        .with(Linear::new(&mut init, 5, 3, true).unwrap());
    let config = RunConfig::default().num_microbatch(2);
    let engine = RoundPipe::builder(model.clone())
        .optimizer(Rule::AdamW(AdamW::default()))
        .run_config(config);
    let engine = engine.devices(models::cpus(2)).build().unwrap();
    for lag in [Lag::Zero, Lag::One] {
        let before = state(&engine, &model);
        let (x, weights) = models::numbers(0, 4, DType::F32);
        engine
            .forward_backward(x.clone(), weights.clone(), models::weighted)
            .unwrap();
        let failed = engine
            .update(&Update::new(f64::NAN), lag)
            .and_then(|_| engine.synchronize());
        assert!(chain(&failed.unwrap_err()).contains("lr"), "{lag:?}");
        assert_eq!(state(&engine, &model), before);
        engine
            .forward_backward(x, weights, models::weighted)
            .unwrap();
        engine.update(&Update::new(0.1), lag).unwrap();
        engine.synchronize().unwrap();
        assert_ne!(state(&engine, &model), before);
    }
}

/// Out of device memory: the error names the stage, nothing hangs, and a smaller batch works. That
/// is found when the call is planned or, for layers that look at values, when it runs.
#[test]
fn out_of_memory_is_an_error_and_a_smaller_batch_works() {
    let looks = Func(|_: &mut Cx, x: &Tensor| x.to_vec::<f32>().map(|_| x.clone()));
    let known = models::perceptron(DType::F32);
    let unknown = models::perceptron(DType::F32).named("looks", looks);
    out_of_memory(&known, [&[&[], &[4]], &[&[2, 1], &[1, 2, 1]]]);
    out_of_memory(&unknown, [&[&[], &[5]], &[&[2, 1], &[2, 2, 1]]]);
}

fn out_of_memory(model: &Sequential, plans: [&[&[usize]; 2]; 2]) {
    let world = SimWorld::seeded(3).unwrap();
    let simulated = world
        .workers(2)
        .into_iter()
        .map(|worker| worker as Arc<dyn Device>)
        .collect();
    for devices in [models::cpus(2), simulated] {
        let options = RingOptions {
            memory: Some(Bytes(48 << 10)),
            ..RingOptions::default()
        };
        let config = RunConfig::default().num_microbatch(2);
        let engine = RoundPipe::builder(model.clone())
            .run_config(config)
            .devices(devices)
            .ring_options(options);
        let engine = engine.build().unwrap();
        let run = |batch: usize, plan: &[&[usize]; 2]| {
            let (x, weights) = models::numbers(0, batch, DType::F32);
            let plan = RunConfig::default().execute_plan(ExecutePlan::from_sizes(
                PlanKind::Fused,
                plan[0],
                plan[1],
            ));
            let trained = engine
                .train(x)
                .labels(weights)
                .loss(models::weighted)
                .config(plan)
                .run()?;
            engine.synchronize()?;
            Ok::<_, Error>(trained.losses.total())
        };
        for plan in plans {
            let error = run(4000, plan).unwrap_err();
            let text = chain(&error);
            assert!(
                text.contains("stage") && text.contains("microbatch"),
                "{text}"
            );
            assert!(text.contains("MiB") || text.contains("KiB"), "{text}");
            assert!(run(8, plan).unwrap().is_finite());
        }
    }
}

fn sim(memory: Bytes) -> (SimWorld, Vec<Arc<dyn Device>>) {
    let world = SimWorld::new(SimConfig {
        seed: 1,
        memory,
        ..SimConfig::default()
    })
    .unwrap();
    let devices = world
        .workers(2)
        .into_iter()
        .map(|worker| worker as Arc<dyn Device>)
        .collect();
    (world, devices)
}

const KINDS: [FaultKind; 6] = [
    FaultKind::Alloc,
    FaultKind::Launch,
    FaultKind::Kernel,
    FaultKind::Copy,
    FaultKind::Record,
    FaultKind::Wait,
];

/// Trains steps `0..to` without waits in between, going back to wherever a failure left the engine.
fn train_through(engine: &RoundPipe, to: u64, lag: Lag, failures: &mut Vec<String>) -> Vec<u64> {
    let mut losses = vec![0; to as usize];
    loop {
        let step = engine.steps();
        let done = match step == to {
            true => engine.synchronize().map(|()| None),
            false => train_and_step(engine, step, lag).map(Some),
        };
        match done {
            Ok(None) => return losses,
            Ok(Some(loss)) => losses[step as usize] = loss,
            Err(error) => failures.push(chain(&error)),
        }
        assert!(
            failures.len() < 5,
            "one fault, told again and again: {failures:#?}"
        );
    }
}

/// One fault of each kind at every place of a training with two calls under way: training goes on
/// from where the engine says it is, to the same end.
#[test]
fn a_fault_at_every_place_is_an_error_and_leaves_no_trace() {
    let (losses, end) = untroubled_with(Lag::One, false);
    for kind in KINDS {
        // Faults at places farther apart as they go: all of the first, and a share of the rest.
        let places = (1..12).chain((12..).step_by(17));
        for n in places {
            let model = trapped(&Trap::new(false));
            let (world, devices) = sim(Bytes::mib(16));
            let engine = engine(&model, devices);
            world.inject(Fault::nth(kind, n));
            let mut failures = Vec::new();
            let got = train_through(&engine, 3, Lag::One, &mut failures);
            // What strikes while the engine is dropped has nobody to be told to.
            let faults = world.faults();
            let what = format!("{kind:?} {n}: {faults:?}, told {failures:?}");
            assert_eq!(got, losses, "{what}");
            assert_eq!(state(&engine, &model), end, "{what}");
            drop(engine);
            assert_eq!(world.races(), [], "{what}");
            let Some(fault) = faults.first() else { break };
            if failures.is_empty() {
                assert!(harmless(fault), "nobody was told: {what}");
            } else {
                let place = failures
                    .iter()
                    .any(|text| text.contains("stage") && text.contains("injected"));
                assert!(place, "{what}");
            }
        }
    }
}

/// Whether nobody need be told of a fault: weights that are fetched ahead are asked for again, and
/// memory whose last use could not be marked was waited for.
pub fn harmless(fault: &str) -> bool {
    let ahead = fault.contains("alloc") && fault.contains("for weights");
    ahead || (fault.contains("record fault") && fault.contains("compute"))
}

/// An engine that is dropped in the middle of anything ends its threads and hangs nowhere.
#[test]
fn an_engine_may_be_dropped_at_any_time() {
    let witness = Arc::new(());
    for (case, lag) in [
        ("call", None),
        ("step", Some(Lag::One)),
        ("forward", None),
        ("unmerged", None),
    ] {
        let seen = witness.clone();
        let model = trapped(&Trap::new(false)).named(
            "witness",
            Func(move |_: &mut Cx, x: &Tensor| {
                let _seen = &seen;
                Ok(x.clone())
            }),
        );
        let engine = RoundPipe::builder(model)
            .devices(models::cpus(2))
            .optimizer(Rule::AdamW(AdamW::default()));
        let engine = engine.build().unwrap();
        let (x, _) = models::numbers(0, 6, DType::BF16);
        let start = Instant::now();
        match case {
            "forward" => drop(engine.forward(x, &RunConfig::default()).unwrap()),
            "unmerged" => {
                let off = RunConfig::default().merge_output(MergeOutput::Off);
                let forward = engine.forward(x, &off).unwrap();
                drop(engine);
                drop(forward);
                assert!(start.elapsed() < PATIENCE, "{case}");
                assert_eq!(
                    Arc::strong_count(&witness),
                    1,
                    "{case}: somebody still holds the model"
                );
                continue;
            }
            _ => {
                train(&engine, 0).unwrap();
                if let Some(lag) = lag {
                    engine.update(&Update::new(0.01), lag).unwrap();
                }
            }
        }
        drop(engine);
        assert!(start.elapsed() < PATIENCE, "{case}");
        assert_eq!(
            Arc::strong_count(&witness),
            1,
            "{case}: somebody still holds the model"
        );
    }
}

/// A step that has begun is done before the engine is gone: no model is left half updated.
#[test]
fn a_dropped_engine_leaves_a_whole_step() {
    let (before, after) = {
        let model = trapped(&Trap::new(false));
        let first = models::params(&model);
        let engine = engine(&model, models::cpus(1));
        train_and_step(&engine, 0, Lag::Zero).unwrap();
        engine.synchronize().unwrap();
        (first, models::params(&model))
    };
    for _ in 0..10 {
        let model = trapped(&Trap::new(false));
        let engine = engine(&model, models::cpus(2));
        train_and_step(&engine, 0, Lag::One).unwrap();
        drop(engine);
        let left = models::params(&model);
        assert!(left == before || left == after, "half a step");
    }
}

/// An engine that is dropped while a layer is busy waits for this layer alone.
#[test]
fn a_busy_layer_is_all_that_a_drop_waits_for() {
    let (open, gate) = channel();
    let (enter, entered) = channel();
    let enter = Func(move |_: &mut Cx, x: &Tensor| {
        enter.send(()).unwrap();
        Ok(x.clone())
    });
    let model = models::perceptron(DType::F32)
        .named("enter", enter)
        .named("gate", gated(gate));
    let engine = RoundPipe::builder(model)
        .devices(models::cpus(2))
        .build()
        .unwrap();
    let (x, _) = models::numbers(0, 6, DType::F32);
    let plan = ExecutePlan::from_sizes(PlanKind::Infer, &[2, 4], &[]);
    let config = RunConfig::default()
        .requires_grad(false)
        .merge_output(MergeOutput::Off)
        .execute_plan(plan);
    let forward = engine.forward(x, &config).unwrap();
    entered.recv().unwrap();
    std::thread::sleep(Duration::from_millis(20));
    std::thread::scope(|scope| {
        let ended = scope.spawn(move || {
            drop(engine);
            drop(forward);
            Instant::now()
        });
        std::thread::sleep(Duration::from_millis(20));
        let opened = Instant::now();
        open.send(()).unwrap();
        // The next layer would wait 20 s for its turn.
        assert!(ended.join().unwrap().saturating_duration_since(opened) < Duration::from_secs(15));
    });
}

/// When a layer blocks, the watchdog says who waits for what.
#[test]
fn a_stall_is_reported_with_who_waits_for_what() {
    let (open, gate) = channel();
    let model = models::perceptron(DType::F32).named("gate", gated(gate));
    let lines = Arc::new(Mutex::new(Vec::new()));
    let told = lines.clone();
    let engine = RoundPipe::builder(model)
        .devices(models::cpus(2))
        .on_stall(Duration::from_millis(150), move |report| {
            told.lock().unwrap().push(report.to_string())
        })
        .build()
        .unwrap();
    let (x, _) = models::numbers(0, 6, DType::F32);
    let plan = ExecutePlan::from_sizes(PlanKind::Infer, &[4, 1], &[]);
    let config = RunConfig::default().requires_grad(false).execute_plan(plan);
    std::thread::scope(|scope| {
        let run = scope.spawn(|| engine.forward(x, &config).map(drop));
        let start = Instant::now();
        while lines.lock().unwrap().is_empty() && start.elapsed() < PATIENCE {
            std::thread::sleep(Duration::from_millis(20));
        }
        (0..3).for_each(|_| open.send(()).unwrap());
        run.join().unwrap().unwrap();
    });
    let lines = lines.lock().unwrap();
    let text = lines.first().expect("a stall was reported");
    assert!(
        text.contains("caller: waiting for the outputs of microbatch 0"),
        "{text}"
    );
    assert!(
        text.contains("launcher") && text.contains("layer 4 (gate), microbatch 0"),
        "{text}"
    );
}

/// An engine whose input fails in another engine says so, and both work on.
#[test]
fn a_failure_of_a_chained_engine_reaches_the_other() {
    let trap = Trap::new(false);
    let ring = roundpipe::Ring::new(
        &models::cpus(2),
        &RingOptions {
            memory: Some(Bytes::mib(4)),
            ..RingOptions::default()
        },
    )
    .unwrap();
    let build = |model: Sequential| RoundPipe::builder(model).ring(&ring).build().unwrap();
    let front = build(trapped(&trap));
    let mut init = Init::new(2, DType::BF16);
    let back = build(Sequential::new().named("end", Linear::new(&mut init, 3, 3, true).unwrap()));
    let (x, weights) = models::numbers(0, 6, DType::BF16);
    let off = RunConfig::default().merge_output(MergeOutput::Off);
    let run = |fails: bool| -> Result<Vec<HostTensor>, Error> {
        let plan = ExecutePlan::from_sizes(PlanKind::Train, &[4], &[4]);
        trap.arm(if fails { 2 } else { 0 });
        let forward = front.forward(x.clone(), &off.clone().execute_plan(plan))?;
        let call = back.train(forward.unmerged()).labels(weights.clone());
        let trained = call
            .loss(models::weighted)
            .config(RunConfig::default().input_grads(true))
            .run()?;
        let grads = trained.input_grads.unwrap();
        forward.backward_from(&grads)?;
        front.synchronize()?;
        (0..grads.len())
            .map(|m| Ok(grads.wait(m)?.remove(0).unwrap()))
            .collect()
    };
    let whole = run(false).unwrap();
    let text = chain(&run(true).unwrap_err());
    assert!(text.contains("trap snapped"), "{text}");
    let own = chain(&front.synchronize().unwrap_err());
    assert!(own.contains("layer 1 (trap), microbatch 1"), "{own}");
    let again = run(false).unwrap();
    assert!(
        whole
            .iter()
            .zip(&again)
            .all(|(a, b)| a.same_bits(b).unwrap())
    );
}
