//! Plans and simulations against the published figures, and their rules over random models.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::time::Instant;

use proptest::prelude::*;
use roundpipe::timeline::published::{DEVICES, MICROBATCHES, MODELS};
use roundpipe::timeline::{EarlyWork, TimelineTask};
use roundpipe::{
    AutoOptions, ExecutePlan, Lag, LayerCost, LayerCosts, Pass, PlanKind, Schedule, Setting, Stage,
    Timeline, simulate, simulate_models,
};

/// Every published bubble comes out of our simulator when it follows the published rules.
#[test]
fn published_bubbles_are_repeated() {
    for model in &MODELS {
        let costs = model.costs();
        let setting = Setting::published(DEVICES, MICROBATCHES);
        let round = simulate(
            Schedule::RoundPipe,
            PlanKind::Fused,
            &model.plan(),
            &costs,
            &setting,
        )
        .unwrap();
        let bound = |schedule, plan| {
            let setting = Setting::new(DEVICES, MICROBATCHES);
            simulate(schedule, PlanKind::Train, &plan, &costs, &setting)
                .unwrap()
                .bubble
        };
        // RoundPipe's figures were published with two decimals, the others with one.
        let figures = [
            ("synchronous", round.bubble, model.sync, 0.02),
            ("asynchronous", round.inner_bubble(), model.overlapped, 0.02),
            (
                "GPipe",
                bound(Schedule::GPipe, model.single()),
                model.gpipe,
                0.06,
            ),
            (
                "1F1B",
                bound(Schedule::OneForwardOneBackward, model.single()),
                model.one_f_one_b,
                0.06,
            ),
            (
                "interleaved",
                bound(Schedule::Interleaved, model.looped()),
                model.interleaved,
                0.06,
            ),
            (
                "looped BFS",
                bound(Schedule::LoopedBfs, model.looped()),
                model.looped_bfs,
                0.06,
            ),
        ];
        for (name, bubble, published, tolerance) in figures {
            let off = (100.0 * bubble - published).abs();
            assert!(
                off <= tolerance,
                "{} {name}: {:.3}% for {published}%",
                model.name,
                100.0 * bubble
            );
        }
    }
}

/// The search beats the published plans under every reading of the rules.
#[test]
fn found_plans_are_at_least_as_good_as_the_published() {
    for model in &MODELS {
        let costs = model.costs();
        let ours = Setting::new(DEVICES, MICROBATCHES);
        let early = Setting {
            ahead: EarlyWork::Recompute,
            ..ours.clone()
        };
        for setting in [ours, early, Setting::published(DEVICES, MICROBATCHES)] {
            for asynchronous in [false, true] {
                let setting = setting.clone();
                let options = AutoOptions {
                    setting,
                    lag: lag(asynchronous),
                    ..AutoOptions::new(DEVICES, MICROBATCHES)
                };
                let setting = &options.setting;
                let found = ExecutePlan::auto(PlanKind::Fused, &[&costs], &options).unwrap();
                let schedule = if asynchronous {
                    Schedule::RoundPipeAsync
                } else {
                    Schedule::RoundPipe
                };
                let run =
                    |plan| simulate(schedule, PlanKind::Fused, plan, &costs, setting).unwrap();
                let (mine, theirs) = (run(&found[0]), run(&model.plan()));
                let what = format!("{} {schedule:?} {setting:?}: {}", model.name, found[0]);
                assert!(
                    mine.step_ms <= theirs.step_ms,
                    "{} > {} {what}",
                    mine.step_ms,
                    theirs.step_ms
                );
                assert!(
                    mine.bubble <= theirs.bubble + 1e-9,
                    "{} > {} {what}",
                    mine.bubble,
                    theirs.bubble
                );
            }
        }
    }
}

/// Planning is invisible next to a step: 96 layers take some milliseconds. The limit is many times
/// that, since a busy or emulated machine is not the planner's fault; debug builds get more.
#[test]
fn planning_is_quick() {
    let costs = uneven(96);
    for asynchronous in [false, true] {
        let options = AutoOptions {
            lag: lag(asynchronous),
            ..AutoOptions::new(DEVICES, MICROBATCHES)
        };
        let once = || {
            let start = Instant::now();
            ExecutePlan::auto(PlanKind::Fused, &[&costs], &options).unwrap();
            start.elapsed()
        };
        let fastest = (0..5).map(|_| once()).min().unwrap();
        let limit_ms = if cfg!(debug_assertions) { 10_000 } else { 500 };
        assert!(
            fastest.as_millis() < limit_ms,
            "{fastest:?}, asynchronous: {asynchronous}"
        );
    }
}

fn lag(asynchronous: bool) -> Lag {
    if asynchronous { Lag::One } else { Lag::Zero }
}

/// Layers of which no two are equal, and a heavy head.
fn uneven(layers: usize) -> LayerCosts {
    let layer = |index: usize| LayerCost {
        name: format!("layer {index}"),
        forward_ms: 40.0 + (index * 37 % 101) as f64 * 0.1,
        recompute_ms: 40.0 + (index * 37 % 101) as f64 * 0.1,
        backward_ms: if index + 1 == layers {
            200.0
        } else {
            80.0 + (index * 53 % 97) as f64 * 0.2
        },
        bytes: 1 << 20,
        hop_ms: 3.0,
        ..LayerCost::default()
    };
    LayerCosts {
        layers: (0..layers).map(layer).collect(),
    }
}

fn costs_of(layers: std::ops::Range<usize>) -> impl Strategy<Value = LayerCosts> {
    // Whole and zero times provoke ties; the rest are odd.
    let ms = || prop_oneof![Just(0.0), (1..5_u32).prop_map(f64::from), 0.1..20.0];
    let sizes = (0..1000_u64, 0..500_u64, 0..500_u64, 0..200_u64);
    let layer = (ms(), ms(), ms(), sizes, 0.0..2.0, ms()).prop_map(
        |(
            forward_ms,
            recompute_ms,
            backward_ms,
            (bytes, keep_bytes, peak_bytes, grad_bytes),
            hop_ms,
            update_ms,
        )| {
            LayerCost {
                name: "layer".to_string(),
                forward_ms,
                recompute_ms,
                backward_ms,
                bytes,
                hop_ms,
                keep_bytes,
                peak_bytes,
                grad_bytes,
                update_ms,
                ..LayerCost::default()
            }
        },
    );
    prop::collection::vec(layer, layers).prop_map(|layers| LayerCosts { layers })
}

fn kinds() -> impl Strategy<Value = PlanKind> {
    prop_oneof![
        Just(PlanKind::Infer),
        Just(PlanKind::Train),
        Just(PlanKind::Fused)
    ]
}

fn settings() -> impl Strategy<Value = Setting> {
    let ahead = prop_oneof![
        Just(EarlyWork::Nothing),
        Just(EarlyWork::Recompute),
        Just(EarlyWork::RecomputeAndFused)
    ];
    (1..6_usize, 1..8_usize, 1..9_usize, ahead).prop_map(|(devices, microbatches, visit, ahead)| {
        Setting {
            visit,
            ahead,
            ..Setting::new(devices, microbatches)
        }
    })
}

/// Stage sizes over `layers` layers, a cut before layer `i + 1` where `cuts[i]`.
fn sizes(layers: usize, cuts: &[bool]) -> Vec<usize> {
    let mut sizes = Vec::new();
    let mut size = 0;
    for (layer, cut) in cuts.iter().enumerate().take(layers) {
        size += 1;
        if *cut || layer + 1 == layers {
            sizes.push(size);
            size = 0;
        }
    }
    sizes
}

/// A valid plan of any shape.
fn any_plan(
    kind: PlanKind,
    layers: usize,
    fused: usize,
    there: &[bool],
    back: &[bool],
) -> ExecutePlan {
    let fused = 1 + fused % layers;
    match kind {
        PlanKind::Fused => {
            let cut = layers - fused;
            let backward: Vec<usize> = std::iter::once(fused).chain(sizes(cut, back)).collect();
            ExecutePlan::from_sizes(kind, &sizes(cut, there), &backward)
        }
        _ => ExecutePlan::from_sizes(kind, &sizes(layers, there), &sizes(layers, back)),
    }
}

/// Time of one microbatch in each stage of a call.
fn stage_times(kind: PlanKind, plan: &ExecutePlan, costs: &LayerCosts) -> Vec<f64> {
    let time = |stage: &Stage| {
        let layers = || stage.layers.clone();
        match stage.pass {
            Pass::Forward => costs.forward_ms(layers()),
            Pass::Backward => costs.recompute_ms(layers()) + costs.backward_ms(layers()),
            Pass::Fused => costs.forward_ms(layers()) + costs.backward_ms(layers()),
        }
    };
    plan.stages(kind).iter().map(time).collect()
}

/// No task twice, none at the same time as another on its device, none before what it needs.
fn assert_sound(timeline: &Timeline, setting: &Setting) {
    let mut seen = HashSet::new();
    let mut free_ms = vec![0.0; setting.devices];
    for task in &timeline.tasks {
        assert!(
            seen.insert((task.step, task.stage, task.microbatch, task.pass)),
            "twice: {task:?}"
        );
        assert!(
            task.start_ms >= free_ms[task.device] - 1e-6,
            "busy: {task:?}"
        );
        assert!(task.end_ms >= task.start_ms);
        free_ms[task.device] = task.end_ms;
    }
    assert!(
        (0.0..=1.0).contains(&timeline.bubble),
        "bubble {}",
        timeline.bubble
    );
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    /// Every valid plan runs to its end: each task once, in order, and no faster than physics
    /// allows.
    #[test]
    fn any_valid_plan_runs(
        costs in costs_of(1..14),
        kind in kinds(),
        setting in settings(),
        fused in 0..14_usize,
        there in prop::collection::vec(any::<bool>(), 14),
        back in prop::collection::vec(any::<bool>(), 14),
    ) {
        let plan = any_plan(kind, costs.len(), fused, &there, &back);
        plan.check(kind, costs.len()).unwrap();
        let times = stage_times(kind, &plan, &costs);
        let one = simulate(Schedule::RoundPipe, kind, &plan, &costs, &setting).unwrap();
        assert_sound(&one, &setting);
        prop_assert_eq!(one.tasks.len(), times.len() * setting.microbatches);
        let work_ms = times.iter().sum::<f64>() * setting.microbatches as f64;
        let busy_ms: f64 = one.tasks.iter().map(|task| task.end_ms - task.start_ms).sum();
        prop_assert!((busy_ms - work_ms).abs() < 1e-6);
        prop_assert!(one.step_ms >= work_ms / setting.devices as f64 - 1e-6);
        if setting.ahead == EarlyWork::Nothing {
            prop_assert!(one.step_ms >= times.iter().sum::<f64>() - 1e-6, "all stages in turn");
            for (earlier, later) in chains(&one) {
                prop_assert!(later.start_ms >= earlier.end_ms - 1e-6, "{:?} before {:?}", later, earlier);
            }
        }
        let many = simulate(Schedule::RoundPipeAsync, kind, &plan, &costs, &setting).unwrap();
        assert_sound(&many, &setting);
        prop_assert!(many.step_ms <= one.step_ms + 1e-6, "overlap never costs");
        prop_assert!(many.step_ms >= work_ms / setting.devices as f64 - 1e-6);
    }

    /// Bound schedules end too, whatever the stages.
    #[test]
    fn bound_schedules_run(
        costs in costs_of(12..13),
        devices in 1..5_usize,
        rounds in 1..4_usize,
        ahead in prop_oneof![Just(EarlyWork::Nothing), Just(EarlyWork::Recompute)],
    ) {
        let setting = Setting { ahead, ..Setting::new(devices, rounds * devices) };
        let stages = |count: usize| ExecutePlan::from_sizes(PlanKind::Infer, &vec![12 / count; count], &[]);
        let looped = stages(12);
        for (schedule, plan) in [
            (Schedule::GPipe, stages(devices)),
            (Schedule::OneForwardOneBackward, stages(devices)),
            (Schedule::Interleaved, looped.clone()),
            (Schedule::LoopedBfs, looped),
        ] {
            let timeline = simulate(schedule, PlanKind::Train, &plan, &costs, &setting).unwrap();
            assert_sound(&timeline, &setting);
            prop_assert_eq!(timeline.tasks.len(), 2 * plan.forward.len() * setting.microbatches);
        }
    }

    /// Transfers cost time and never save any, and nothing moves faster than its lane.
    #[test]
    fn transfers_only_cost(
        costs in costs_of(1..14),
        kind in kinds(),
        setting in settings(),
        rates in (1.0..1e4_f64, 1.0..1e4_f64),
        fused in 0..14_usize,
        there in prop::collection::vec(any::<bool>(), 14),
        back in prop::collection::vec(any::<bool>(), 14),
    ) {
        let plan = any_plan(kind, costs.len(), fused, &there, &back);
        let run = |setting: &Setting| simulate(Schedule::RoundPipe, kind, &plan, &costs, setting).unwrap();
        let free = run(&setting);
        let moving = Setting {
            upload_bytes_per_ms: Some(rates.0),
            grad_bytes_per_ms: Some(rates.1),
            ..setting.clone()
        };
        let moved = run(&moving);
        assert_sound(&moved, &setting);
        prop_assert!(moved.step_ms >= free.step_ms - 1e-6);
        let rounds = setting.microbatches.div_ceil(setting.visit) as f64;
        let bytes: u64 = plan.stages(kind).iter().map(|stage| costs.bytes(stage.layers.clone())).sum();
        let lanes_ms = rounds * bytes as f64 / rates.0 / setting.devices as f64;
        prop_assert!(moved.step_ms >= lanes_ms - 1e-6);
        for (one, with) in free.tasks.iter().zip(&moved.tasks) {
            prop_assert!(with.start_ms >= one.start_ms - 1e-6, "{:?} before {:?}", with, one);
        }
        let many = simulate(Schedule::RoundPipeAsync, kind, &plan, &costs, &moving).unwrap();
        assert_sound(&many, &setting);
        // Over all steps: an upload may begin in the step before, so the lanes bound no single one.
        let steps = many.tasks.iter().map(|task| task.step + 1).max().unwrap_or(0);
        let end_ms = many.tasks.iter().map(|task| task.end_ms).fold(0.0, f64::max);
        prop_assert!(end_ms >= steps as f64 * lanes_ms - 1e-6);
    }

    /// The search keeps every promise: plans pass their check, the memory limits and the time
    /// limit.
    #[test]
    fn found_plans_keep_their_limits(
        models in prop::collection::vec(costs_of(1..14), 1..4),
        kind in kinds(),
        setting in settings(),
        (asynchronous, shared_compute, layer_grain) in any::<(bool, bool, bool)>(),
        limit in prop::option::of(2000..6000_u64),
        works_in in prop::option::of(1200..3000_u64),
    ) {
        let options = AutoOptions {
            lag: lag(asynchronous),
            shared_compute,
            layer_grain,
            model_memory_limit: limit,
            stage_memory_limit: works_in,
            ..AutoOptions::new(setting.devices, setting.microbatches)
        };
        let options = AutoOptions {
            setting,
            ..options
        };
        let refs: Vec<&LayerCosts> = models.iter().collect();
        let plans = ExecutePlan::auto(kind, &refs, &options).unwrap();
        prop_assert_eq!(plans.len(), models.len());
        for (index, (plan, costs)) in plans.iter().zip(&models).enumerate() {
            let last = index + 1 == models.len();
            let kind = if kind == PlanKind::Fused && !last { PlanKind::Train } else { kind };
            plan.check(kind, costs.len()).unwrap();
            for stage in plan.stages(kind) {
                let layers = || stage.layers.clone();
                prop_assert!(costs.bytes(layers()) <= limit.map_or(u64::MAX, |limit| limit / 2));
                let need = match stage.pass {
                    Pass::Forward => 0,
                    Pass::Backward if layer_grain => costs.layerwise_visit_bytes(layers()),
                    Pass::Backward | Pass::Fused => costs.visit_bytes(layers()),
                };
                prop_assert!(need <= works_in.unwrap_or(u64::MAX), "{need} in {:?}", stage);
            }
        }
        prop_assert_eq!(plans, ExecutePlan::auto(kind, &refs, &options).unwrap(), "equal inputs, equal plans");
    }
}

/// Equal layers whose backward takes two forwards, with twice as many bytes of gradients as of
/// parameters.
fn equal(layers: usize, forward_ms: f64, bytes: u64) -> LayerCosts {
    let layer = |index| LayerCost {
        name: format!("layer {index}"),
        forward_ms,
        recompute_ms: forward_ms,
        backward_ms: 2.0 * forward_ms,
        bytes,
        grad_bytes: 2 * bytes,
        ..LayerCost::default()
    };
    LayerCosts {
        layers: (0..layers).map(layer).collect(),
    }
}

/// One device, one microbatch, a byte per millisecond: what a forward over stages of these sizes
/// takes.
fn uploaded_ms(costs: &LayerCosts, sizes: &[usize]) -> f64 {
    let setting = Setting {
        upload_bytes_per_ms: Some(1.0),
        ..Setting::new(1, 1)
    };
    let plan = ExecutePlan::from_sizes(PlanKind::Infer, sizes, &[]);
    simulate(Schedule::RoundPipe, PlanKind::Infer, &plan, costs, &setting)
        .unwrap()
        .step_ms
}

/// Uploads follow one another, overlap compute, and hold two stages on the device, not three.
#[test]
fn parameters_arrive_before_compute() {
    // Slow uploads: 0-20, 20-40, 40-60, and each stage computes 10 ms after its own.
    assert_eq!(uploaded_ms(&equal(3, 10.0, 20), &[1, 1, 1]), 70.0);
    // Slow compute: 20-50, 50-80, 80-110. The third upload waits for the first stage to end and is
    // hidden.
    assert_eq!(uploaded_ms(&equal(3, 30.0, 20), &[1, 1, 1]), 110.0);
    // The first stage is small and its compute long: the third upload (100 ms) cannot start before
    // it ended.
    let mut costs = equal(3, 0.0, 0);
    (costs.layers[0].forward_ms, costs.layers[2].bytes) = (50.0, 100);
    assert_eq!(uploaded_ms(&costs, &[1, 1, 1]), 150.0);
    // A stage starts with its first layer (5 ms); its second is needed 10 ms later and arrives at
    // 25 ms.
    let mut costs = equal(2, 10.0, 5);
    costs.layers[1].bytes = 20;
    assert_eq!(uploaded_ms(&costs, &[2]), 35.0);
}

/// A step's parameters are uploaded when its weights exist: lag 1 after the step before the last
/// one ended.
#[test]
fn uploads_wait_for_their_weights() {
    // Each device gets every second step: 20 ms upload, 10 ms compute, and no prefetch across the
    // gap.
    let setting = Setting {
        upload_bytes_per_ms: Some(1.0),
        ..Setting::new(2, 1)
    };
    let plan = ExecutePlan::from_sizes(PlanKind::Infer, &[1], &[]);
    let run = |schedule| {
        simulate(
            schedule,
            PlanKind::Infer,
            &plan,
            &equal(1, 10.0, 20),
            &setting,
        )
        .unwrap()
        .step_ms
    };
    assert_eq!(run(Schedule::RoundPipe), 30.0);
    assert_eq!(run(Schedule::RoundPipeAsync), 15.0);
}

/// Gradients travel beside compute; the step ends when the last have arrived.
#[test]
fn gradients_delay_only_the_end() {
    let costs = equal(2, 1.0, 50);
    let plan = ExecutePlan::from_sizes(PlanKind::Train, &[2], &[1, 1]);
    let setting = Setting {
        grad_bytes_per_ms: Some(10.0),
        ..Setting::new(1, 1)
    };
    let run = |setting: &Setting| {
        simulate(Schedule::RoundPipe, PlanKind::Train, &plan, &costs, setting).unwrap()
    };
    let (with, without) = (run(&setting), run(&Setting::new(1, 1)));
    assert_eq!(with.tasks, without.tasks, "no task waits for a gradient");
    assert_eq!(without.step_ms, 8.0);
    assert_eq!(with.step_ms, 25.0, "downloads at 5-15 and 15-25");
}

/// At lag 0 a layer's weights come when the host has updated it, the first layer first; the stage
/// that runs it waits inside its first microbatch.
#[test]
fn weights_wait_for_their_update() {
    let mut costs = equal(3, 10.0, 0);
    for layer in &mut costs.layers {
        layer.update_ms = 20.0;
    }
    let run = |schedule, kind, sizes: &[usize], backward: &[usize]| {
        let plan = ExecutePlan::from_sizes(kind, sizes, backward);
        let setting = Setting::new(1, 2);
        simulate(schedule, kind, &plan, &costs, &setting)
            .unwrap()
            .step_ms
    };
    let backward_ms = 2.0 * 3.0 * 30.0;
    // Layers are there at 20, 40, 60. In one stage the first microbatch runs 40-70 at best, and the
    // second 70-100.
    let one = run(Schedule::RoundPipe, PlanKind::Train, &[3], &[3]);
    assert_eq!(one, 100.0 + backward_ms);
    // In three stages both microbatches of a layer run before the next layer is there.
    let three = run(Schedule::RoundPipe, PlanKind::Train, &[1, 1, 1], &[3]);
    assert_eq!(three, 80.0 + backward_ms);
    // At lag 1 the update of 60 ms ends while the step between computes for 240.
    let hidden = run(Schedule::RoundPipeAsync, PlanKind::Train, &[3], &[3]);
    assert_eq!(hidden, 60.0 + backward_ms);
    // A call that updates nothing waits for nothing.
    let inferred = run(Schedule::RoundPipe, PlanKind::Infer, &[3], &[]);
    assert_eq!(inferred, 60.0);
}

/// Updates follow one another: where they take longer than a step computes, they are the step.
#[test]
fn a_slow_update_is_the_step() {
    let mut costs = equal(2, 1.0, 0);
    costs.layers[0].update_ms = 500.0;
    let plan = ExecutePlan::from_sizes(PlanKind::Train, &[2], &[2]);
    let run = |schedule| {
        let setting = Setting::new(1, 1);
        simulate(schedule, PlanKind::Train, &plan, &costs, &setting)
            .unwrap()
            .step_ms
    };
    assert_eq!(run(Schedule::RoundPipe), 508.0);
    assert_eq!(run(Schedule::RoundPipeAsync), 500.0);
}

/// A device twice as fast takes half the time, and a step's time does not depend on who is first.
#[test]
fn speeds_scale_compute() {
    let costs = uneven(9);
    let plan = ExecutePlan::from_sizes(PlanKind::Train, &[5, 4], &[2, 3, 4]);
    let run = |schedule, speeds: &[f64]| {
        let setting = Setting {
            speeds: speeds.to_vec(),
            ..Setting::new(2, 3)
        };
        let no_hops = LayerCosts {
            layers: costs
                .layers
                .iter()
                .map(|layer| LayerCost {
                    hop_ms: 0.0,
                    ..layer.clone()
                })
                .collect(),
        };
        simulate(schedule, PlanKind::Train, &plan, &no_hops, &setting).unwrap()
    };
    for schedule in [
        Schedule::RoundPipe,
        Schedule::RoundPipeAsync,
        Schedule::GPipe,
    ] {
        let (one, two) = (run(schedule, &[1.0, 1.0]), run(schedule, &[2.0, 2.0]));
        assert_eq!(one, run(schedule, &[]), "{schedule:?}");
        assert_eq!(one.step_ms, 2.0 * two.step_ms, "{schedule:?}");
    }
    let swapped = [
        run(Schedule::RoundPipe, &[1.0, 2.0]),
        run(Schedule::RoundPipe, &[2.0, 1.0]),
    ];
    assert!(
        (swapped[0].step_ms - swapped[1].step_ms).abs() < 1e-9,
        "five slots: both devices are first"
    );
    let equal = [
        run(Schedule::RoundPipe, &[1.0, 1.0]),
        run(Schedule::RoundPipe, &[2.0, 2.0]),
    ];
    assert!(equal[1].step_ms < swapped[0].step_ms && swapped[0].step_ms < equal[0].step_ms);
    assert!(
        swapped[0].bubble > equal[0].bubble,
        "an unequal ring waits for its slower device"
    );
}

/// A known rate derives hops from sizes, and leaves a layer of unknown size its own.
#[test]
fn hops_follow_from_sizes() {
    let plan = ExecutePlan::from_sizes(PlanKind::Infer, &[1, 1, 1], &[]);
    let mut costs = equal(3, 1.0, 0);
    (costs.layers[0].hop_ms, costs.layers[1].hop_ms) = (7.0, 7.0);
    costs.layers[1].activation_bytes = 40;
    let run = |hop_bytes_per_ms| {
        let setting = Setting {
            hop_bytes_per_ms,
            ..Setting::new(3, 1)
        };
        simulate(
            Schedule::RoundPipe,
            PlanKind::Infer,
            &plan,
            &costs,
            &setting,
        )
        .unwrap()
        .step_ms
    };
    assert_eq!(run(None), 3.0 + 14.0);
    assert_eq!(run(Some(20.0)), 3.0 + 7.0 + 2.0);
}

/// Two models in one call are the model that both make, cut between them.
#[test]
fn models_of_one_call_are_one_ring() {
    let (front, back) = (uneven(5), uneven(7));
    let whole = LayerCosts {
        layers: front.layers.iter().chain(&back.layers).cloned().collect(),
    };
    let setting = Setting {
        upload_bytes_per_ms: Some(1e5),
        grad_bytes_per_ms: Some(1e5),
        ..Setting::new(3, 4)
    };
    let sizes = ExecutePlan::from_sizes;
    for (kind, last, joined) in [
        (
            PlanKind::Infer,
            sizes(PlanKind::Infer, &[4, 3], &[]),
            sizes(PlanKind::Infer, &[2, 3, 4, 3], &[]),
        ),
        (
            PlanKind::Train,
            sizes(PlanKind::Train, &[4, 3], &[2, 5]),
            sizes(PlanKind::Train, &[2, 3, 4, 3], &[2, 5, 1, 4]),
        ),
        (
            PlanKind::Fused,
            sizes(PlanKind::Fused, &[4], &[3, 4]),
            sizes(PlanKind::Fused, &[2, 3, 4], &[3, 4, 1, 4]),
        ),
        (
            PlanKind::Fused,
            sizes(PlanKind::Fused, &[], &[7]),
            sizes(PlanKind::Fused, &[2, 3], &[7, 1, 4]),
        ),
    ] {
        let first = ExecutePlan::from_sizes(PlanKind::Train, &[2, 3], &[1, 4]);
        for schedule in [Schedule::RoundPipe, Schedule::RoundPipeAsync] {
            let two = simulate_models(
                schedule,
                kind,
                &[(&first, &front), (&last, &back)],
                &setting,
            )
            .unwrap();
            let one = simulate(schedule, kind, &joined, &whole, &setting).unwrap();
            assert_eq!(two, one, "{kind:?} {schedule:?}");
        }
    }
    let stages = |count| sizes(PlanKind::Infer, &[count], &[]);
    let pair = [(&stages(5), &front), (&stages(7), &back)];
    let setting = Setting::new(2, 4);
    let two = simulate_models(Schedule::GPipe, PlanKind::Train, &pair, &setting).unwrap();
    let joined = sizes(PlanKind::Infer, &[5, 7], &[]);
    assert_eq!(
        two,
        simulate(Schedule::GPipe, PlanKind::Train, &joined, &whole, &setting).unwrap()
    );
    assert!(simulate_models(Schedule::RoundPipe, PlanKind::Train, &[], &setting).is_err());
}

/// What is no machine is refused, with the field's name.
#[test]
fn impossible_machines_are_refused() {
    let plan = ExecutePlan::from_sizes(PlanKind::Infer, &[2], &[]);
    let refusal = |setting: Setting| {
        let run = simulate(
            Schedule::RoundPipe,
            PlanKind::Infer,
            &plan,
            &equal(2, 1.0, 1),
            &setting,
        );
        run.expect_err("refused").to_string()
    };
    let two = || Setting::new(2, 2);
    assert_eq!(
        refusal(Setting {
            speeds: vec![1.0],
            ..two()
        }),
        "speeds: 1 speeds for 2 devices; one each, or none"
    );
    assert_eq!(
        refusal(Setting {
            speeds: vec![1.0, 0.0],
            ..two()
        }),
        "speeds: 0 is no rate; it must be above 0"
    );
    assert!(
        refusal(Setting {
            upload_bytes_per_ms: Some(-1.0),
            ..two()
        })
        .starts_with("upload_bytes_per_ms")
    );
    assert!(
        refusal(Setting {
            grad_bytes_per_ms: Some(f64::NAN),
            ..two()
        })
        .starts_with("grad_bytes")
    );
    assert!(
        refusal(Setting {
            hop_bytes_per_ms: Some(0.0),
            ..two()
        })
        .starts_with("hop_bytes_per_ms")
    );
}

/// Parameters get 60% of the smallest device, half of it a stage.
#[test]
fn memory_limit_follows_from_the_device() {
    let options = AutoOptions::for_memory(4, 5, 24 << 30);
    assert_eq!(options.model_memory_limit, Some((24 << 30) * 3 / 5));
    assert_eq!(
        AutoOptions::for_memory(4, 5, u64::MAX).model_memory_limit,
        Some(u64::MAX / 5 * 3)
    );
    assert_eq!(
        options,
        AutoOptions {
            model_memory_limit: Some((24 << 30) * 3 / 5),
            ..AutoOptions::new(4, 5)
        }
    );
}

/// Workers of one processor gain nothing from more stages: the plan recomputes as little as memory
/// allows.
#[test]
fn shared_compute_wants_the_least_work() {
    let costs = equal(6, 1.0, 100);
    let plan = |kind, limit: Option<u64>, min_stages| {
        let options = AutoOptions {
            shared_compute: true,
            model_memory_limit: limit,
            min_stages,
            ..AutoOptions::new(4, 5)
        };
        let plans = ExecutePlan::auto(kind, &[&costs], &options).unwrap();
        plans[0].check(kind, 6).unwrap();
        plans[0].to_string()
    };
    assert_eq!(plan(PlanKind::Fused, None, None), "| 0..6");
    assert_eq!(plan(PlanKind::Train, None, None), "0..6 | 0..6");
    assert_eq!(plan(PlanKind::Infer, None, None), "0..6");
    // A stage may hold 400 bytes: the fused stage takes all it can.
    assert_eq!(plan(PlanKind::Fused, Some(800), None), "0..2 | 2..6 0..2");
    assert_eq!(
        plan(PlanKind::Fused, Some(400), None),
        "0..2 2..4 | 4..6 2..4 0..2"
    );
    // An explicit wish wins, at the price of the least recompute that grants it.
    assert_eq!(plan(PlanKind::Fused, None, Some(3)), "0..1 | 1..6 0..1");
    assert_eq!(plan(PlanKind::Infer, None, Some(3)), "0..2 2..4 4..6");
    assert_eq!(
        plan(PlanKind::Fused, None, Some(99))
            .split_whitespace()
            .count(),
        5 + 1 + 1 + 5
    );
    let both = AutoOptions {
        shared_compute: true,
        ..AutoOptions::new(4, 5)
    };
    let plans = ExecutePlan::auto(PlanKind::Fused, &[&costs, &costs], &both).unwrap();
    assert_eq!(
        (plans[0].to_string(), plans[1].to_string()),
        ("0..6 | 0..6".into(), "| 0..6".into())
    );
}

/// Tapes, working memory and gradients bound backward and fused stages; grain layer holds one tape
/// at a time.
#[test]
fn stages_fit_their_working_memory() {
    let mut costs = equal(6, 1.0, 1);
    for layer in &mut costs.layers {
        (layer.keep_bytes, layer.peak_bytes, layer.grad_bytes) = (100, 50, 10);
    }
    assert_eq!(
        (costs.visit_bytes(0..3), costs.layerwise_visit_bytes(0..3)),
        (380, 180)
    );
    let plan = |limit, layer_grain| {
        let options = AutoOptions {
            shared_compute: true,
            stage_memory_limit: Some(limit),
            layer_grain,
            ..AutoOptions::new(2, 2)
        };
        ExecutePlan::auto(PlanKind::Fused, &[&costs], &options).map(|plans| plans[0].to_string())
    };
    assert_eq!(plan(710, false).unwrap(), "| 0..6");
    assert_eq!(plan(270, false).unwrap(), "0..4 | 4..6 2..4 0..2");
    assert_eq!(
        plan(270, true).unwrap(),
        "0..4 | 4..6 0..4",
        "the fused stage still keeps every tape"
    );
    assert_eq!(
        plan(160, false).unwrap(),
        "0..5 | 5..6 4..5 3..4 2..3 1..2 0..1"
    );
    assert_eq!(
        plan(159, true).unwrap_err().to_string(),
        "stage_memory_limit: layer 0 (layer 0) needs 160 B for the backward of a microbatch (100 B kept, \
         50 B working, 10 B gradients), a stage may use 159 B; use more microbatches"
    );
    let infer = AutoOptions {
        stage_memory_limit: Some(1),
        ..AutoOptions::new(2, 2)
    };
    assert!(
        ExecutePlan::auto(PlanKind::Infer, &[&costs], &infer).is_ok(),
        "nothing is kept without backward"
    );
}

/// The shortest step of all fused plans whose stages keep the time limit.
fn exhaustive_ms(costs: &LayerCosts, options: &AutoOptions, schedule: Schedule) -> f64 {
    let layers = costs.len();
    let head = &costs.layers[layers - 1];
    let single = |layer: &LayerCost| layer.forward_ms.max(layer.recompute_ms + layer.backward_ms);
    let blocks = costs.layers[..layers - 1]
        .iter()
        .map(single)
        .fold(0.0, f64::max);
    let cap_ms = options.upper_threshold * blocks.max(head.forward_ms + head.backward_ms) + 1e-9;
    let bits = |mask: usize| {
        (0..layers)
            .map(|bit| mask >> bit & 1 == 1)
            .collect::<Vec<_>>()
    };
    let mut best_ms = f64::INFINITY;
    for fused in 0..layers {
        let free = layers.saturating_sub(fused + 2);
        for (there, back) in
            (0..1 << free).flat_map(|there| (0..1 << free).map(move |back| (there, back)))
        {
            let plan = any_plan(PlanKind::Fused, layers, fused, &bits(there), &bits(back));
            let fits = stage_times(PlanKind::Fused, &plan, costs)
                .iter()
                .all(|ms| *ms <= cap_ms);
            if fits && plan.stages(PlanKind::Fused).len() >= options.setting.devices {
                let found =
                    simulate(schedule, PlanKind::Fused, &plan, costs, &options.setting).unwrap();
                best_ms = best_ms.min(found.step_ms);
            }
        }
    }
    best_ms
}

/// The search is no proof, but stays close to the best of all plans where all can be tried.
#[test]
fn found_plans_are_close_to_the_best() {
    for seed in 0..40_usize {
        let ms = |index: usize, salt: usize| {
            1.0 + ((index * 31 + seed * 17 + salt * 7) % 23) as f64 / 10.0
        };
        let layer = |index| LayerCost {
            name: String::new(),
            forward_ms: ms(index, 0),
            recompute_ms: ms(index, 0),
            backward_ms: 2.0 * ms(index, 1) + if index == 5 { (seed % 9) as f64 } else { 0.0 },
            bytes: 1,
            hop_ms: 0.1,
            ..LayerCost::default()
        };
        let costs = LayerCosts {
            layers: (0..6).map(layer).collect(),
        };
        let asynchronous = seed % 2 == 0;
        let schedule = if asynchronous {
            Schedule::RoundPipeAsync
        } else {
            Schedule::RoundPipe
        };
        let devices = 2 + seed % 3;
        let options = AutoOptions {
            lag: lag(asynchronous),
            ..AutoOptions::new(devices, devices + 1)
        };
        let plans = ExecutePlan::auto(PlanKind::Fused, &[&costs], &options).unwrap();
        let found = simulate(
            schedule,
            PlanKind::Fused,
            &plans[0],
            &costs,
            &options.setting,
        )
        .unwrap();
        let ratio = found.step_ms / exhaustive_ms(&costs, &options, schedule);
        assert!(
            ratio <= 1.01,
            "seed {seed}: {ratio} times the best, {}",
            plans[0]
        );
    }
}

/// Tasks of one microbatch in neighbouring stages.
fn chains(timeline: &Timeline) -> Vec<(TimelineTask, TimelineTask)> {
    let tasks: HashMap<_, _> = timeline
        .tasks
        .iter()
        .map(|task| ((task.stage, task.microbatch), *task))
        .collect();
    let next = |(&(stage, microbatch), task): (&(usize, usize), &TimelineTask)| {
        tasks
            .get(&(stage + 1, microbatch))
            .map(|later| (*task, *later))
    };
    tasks.iter().filter_map(next).collect()
}

/// What cannot be planned is refused with the reason.
#[test]
fn impossible_wishes_are_refused() {
    let costs = uneven(4);
    let options = AutoOptions::new(2, 4);
    let refusal = |costs: &LayerCosts, options: &AutoOptions| {
        ExecutePlan::auto(PlanKind::Train, &[costs], options)
            .expect_err("refused")
            .to_string()
    };
    let small = AutoOptions {
        model_memory_limit: Some(1 << 20),
        ..options.clone()
    };
    assert_eq!(
        refusal(&costs, &small),
        "model_memory_limit: layer 0 (layer 0) has 1.0 MiB of parameters, a stage may have 512.0 KiB (half \
         the limit)"
    );
    let tight = AutoOptions {
        upper_threshold: 0.9,
        ..options.clone()
    };
    assert!(refusal(&costs, &tight).starts_with("upper_threshold: 0.9"));
    assert!(refusal(&LayerCosts::default(), &options).contains("without layers"));
    let mut odd = costs.clone();
    odd.layers[2].backward_ms = f64::NAN;
    assert_eq!(
        refusal(&odd, &options),
        "layer costs: layer 2 (layer 2) has a time of NaN ms"
    );
    assert!(ExecutePlan::auto(PlanKind::Train, &[], &options).is_err());
    assert!(ExecutePlan::auto(PlanKind::Train, &[&costs], &AutoOptions::new(0, 4)).is_err());
}

/// Models planned together share one stage time, and only the last is fused.
#[test]
fn several_models_share_a_stage_time() {
    let (short, long) = (uneven(6), uneven(30));
    let plans =
        ExecutePlan::auto(PlanKind::Fused, &[&short, &long], &AutoOptions::new(4, 5)).unwrap();
    plans[0].check(PlanKind::Train, 6).unwrap();
    plans[1].check(PlanKind::Fused, 30).unwrap();
    let longest = |kind, plan: &ExecutePlan, costs: &LayerCosts| {
        stage_times(kind, plan, costs)
            .into_iter()
            .fold(0.0, f64::max)
    };
    let cap_ms = 1.1 * 250.0;
    assert!(longest(PlanKind::Train, &plans[0], &short) <= cap_ms);
    assert!(longest(PlanKind::Fused, &plans[1], &long) <= cap_ms);
}

/// Untimed models are planned by size: equal layers give equal stages.
#[test]
fn sizes_are_enough_to_plan() {
    let costs = LayerCosts::from_bytes((0..12).map(|index| (format!("block {index}"), 1000)));
    let plans = ExecutePlan::auto(PlanKind::Infer, &[&costs], &AutoOptions::new(4, 5)).unwrap();
    assert_eq!(
        plans[0].to_string(),
        "0..1 1..2 2..3 3..4 4..5 5..6 6..7 7..8 8..9 9..10 10..11 11..12"
    );
}

/// In the last stage of a call each layer's gradients leave as soon as they are final; others leave
/// behind their stage.
#[test]
fn the_last_gradients_leave_layer_by_layer() {
    let mut costs = equal(4, 1.0, 1000);
    for layer in &mut costs.layers {
        layer.grad_bytes = 1000;
    }
    // Of backward stages that begin and end at these layers.
    let tail_ms = |cuts: &[usize], rate: f64| {
        let backward = cuts.windows(2).map(|cut| cut[1]..cut[0]);
        let plan = ExecutePlan {
            forward: std::iter::once(0..4).collect(),
            backward: backward.collect(),
        };
        let [with, without] = [Some(rate), None].map(|rate| {
            let mut setting = Setting::new(1, 2);
            setting.grad_bytes_per_ms = rate;
            let kind = PlanKind::Train;
            let timeline = simulate(Schedule::RoundPipe, kind, &plan, &costs, &setting);
            timeline.unwrap().step_ms
        });
        with - without
    };
    // A layer's backward takes 2 ms and its gradients 1: those of the first layer are left.
    assert!((tail_ms(&[4, 0], 1000.0) - 1.0).abs() < 1e-9);
    assert!((tail_ms(&[4, 3, 0], 1000.0) - 1.0).abs() < 1e-9);
    // At half the rate they follow each other: 8 ms, of which 6 hide behind the layers before.
    assert!((tail_ms(&[4, 0], 500.0) - 2.0).abs() < 1e-9);
    // Where copies are what is slow, a stage before takes some of them out of the way.
    assert!(tail_ms(&[4, 2, 0], 250.0) < tail_ms(&[4, 0], 250.0));
}

/// One card, on which weights come and gradients leave by a link: at lag 0 short stages bring the
/// first weights and take the last gradients earlier, the more so the slower the link; at lag 1 the
/// neighbouring steps hide that, and the fewest stages are best.
#[test]
fn short_stages_follow_from_the_copies() {
    let mut costs = equal(24, 1.0, 1000);
    for layer in &mut costs.layers {
        layer.grad_bytes = 1000;
    }
    let stages = |asynchronous: bool, rate: Option<f64>| {
        let mut options = AutoOptions::new(1, 4);
        options.lag = lag(asynchronous);
        options.shared_compute = true;
        options.model_memory_limit = Some(24_000);
        options.setting.upload_bytes_per_ms = rate;
        options.setting.grad_bytes_per_ms = rate;
        let plan = ExecutePlan::auto(PlanKind::Fused, &[&costs], &options).unwrap();
        plan[0].stages(PlanKind::Fused).len()
    };
    let fewest = stages(false, None);
    assert_eq!(stages(true, None), fewest);
    assert_eq!(
        stages(true, Some(5000.0)),
        fewest,
        "hidden by the next step"
    );
    let [fast, slow] = [500.0, 200.0].map(|rate| stages(false, Some(rate)));
    assert!(fewest < fast && fast < slow, "{fewest}, {fast}, {slow}");
}

/// The same card with a host that needs time for the update: at lag 0 shorter forward stages follow
/// behind it; at lag 1 it is hidden.
#[test]
fn short_stages_follow_from_the_update() {
    let stages = |lag: Lag, update_ms: f64| {
        let mut costs = equal(24, 1.0, 1000);
        for layer in &mut costs.layers {
            layer.update_ms = update_ms;
            layer.keep_bytes = 1000;
        }
        let mut options = AutoOptions::new(1, 4);
        options.lag = lag;
        options.shared_compute = true;
        options.stage_memory_limit = Some(12_000);
        options.setting.upload_bytes_per_ms = Some(1e6);
        options.setting.grad_bytes_per_ms = Some(1e6);
        ExecutePlan::auto(PlanKind::Fused, &[&costs], &options)
            .unwrap()
            .remove(0)
    };
    let free = stages(Lag::Zero, 0.0);
    assert_eq!(free.forward.len(), 1);
    assert_eq!(stages(Lag::One, 4.0).forward.len(), 1);
    let behind = stages(Lag::Zero, 4.0);
    assert!(behind.forward.len() >= 4, "{behind}");
    // Nothing waits for an update in the backward, where a stage more saves one more input.
    assert_eq!(behind.backward.len(), free.backward.len(), "{behind}");
    // The update is faster than a layer's four microbatches at first, so later stages are long.
    let catches_up = stages(Lag::Zero, 3.0);
    let lengths: Vec<usize> = catches_up.forward.iter().map(Range::len).collect();
    assert!(lengths[0] < lengths[lengths.len() - 1], "{catches_up}");
}
