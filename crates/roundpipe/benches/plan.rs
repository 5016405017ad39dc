//! Planning must stay invisible next to a step: under 10 ms for 96 layers.

use divan::{Bencher, black_box};
use roundpipe::{
    AutoOptions, ExecutePlan, Lag, LayerCost, LayerCosts, PlanKind, Schedule, Setting, simulate,
};

fn main() {
    divan::main();
}

const LAYERS: [usize; 3] = [24, 48, 96];

/// No two layers equal and a heavy head: the most work for a search.
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
        bytes: 1 << 30,
        hop_ms: 3.0,
        keep_bytes: 100 << 20,
        peak_bytes: 50 << 20,
        grad_bytes: 2 << 30,
        ..LayerCost::default()
    };
    LayerCosts {
        layers: (0..layers).map(layer).collect(),
    }
}

fn plan(bencher: Bencher<'_, '_>, layers: usize, options: &AutoOptions) {
    let costs = uneven(layers);
    bencher.bench_local(|| ExecutePlan::auto(PlanKind::Fused, &[black_box(&costs)], options));
}

/// Overlapping steps on 8 devices, the default.
#[divan::bench(args = LAYERS, sample_count = 20)]
fn asynchronous(bencher: Bencher<'_, '_>, layers: usize) {
    plan(bencher, layers, &AutoOptions::new(8, 16));
}

/// One step at a time.
#[divan::bench(args = LAYERS, sample_count = 20)]
fn synchronous(bencher: Bencher<'_, '_>, layers: usize) {
    plan(
        bencher,
        layers,
        &AutoOptions {
            lag: Lag::Zero,
            ..AutoOptions::new(8, 16)
        },
    );
}

/// With everything the simulator can know: speeds, transfers and memory.
#[divan::bench(args = LAYERS, sample_count = 20)]
fn all_known(bencher: Bencher<'_, '_>, layers: usize) {
    let setting = Setting {
        speeds: vec![1.0, 1.0, 1.0, 1.0, 0.9, 0.9, 0.9, 0.9],
        upload_bytes_per_ms: Some(25e6),
        grad_bytes_per_ms: Some(25e6),
        ..Setting::new(8, 16)
    };
    let options = AutoOptions {
        setting,
        stage_memory_limit: Some(16 << 30),
        ..AutoOptions::for_memory(8, 16, 24 << 30)
    };
    plan(bencher, layers, &options);
}

/// One replay of the plan that was found.
#[divan::bench(args = LAYERS, sample_count = 20)]
fn replay(bencher: Bencher<'_, '_>, layers: usize) {
    let (costs, options) = (uneven(layers), AutoOptions::new(8, 16));
    let plans = ExecutePlan::auto(PlanKind::Fused, &[&costs], &options)
        .expect("these layers can be planned");
    let (plan, setting) = (&plans[0], &options.setting);
    bencher.bench_local(|| {
        simulate(
            Schedule::RoundPipeAsync,
            PlanKind::Fused,
            black_box(plan),
            &costs,
            setting,
        )
    });
}
