//! What the number of microbatches costs: idle workers where there are few, memory where there are
//! few too.

use std::sync::Arc;

use roundpipe::nn::{Func, Init, Linear};
use roundpipe::{
    Bytes, Cx, DType, Device, DeviceKind, ExecutePlan, LayerCost, LayerCosts, Meta, PlanKind,
    RingOptions, RoundPipe, RunConfig, Schedule, Sequential, Setting, Tensor, Tree, simulate,
};

use crate::kit::{rows, sum};

/// With fewer microbatches than one more than workers, some workers wait; more than that change
/// little.
#[test]
fn few_microbatches_leave_workers_idle() {
    const WORKERS: usize = 4;
    let layer = |index: usize| LayerCost {
        name: index.to_string(),
        forward_ms: 1.0,
        recompute_ms: 1.0,
        backward_ms: 2.0,
        ..LayerCost::default()
    };
    let costs = LayerCosts {
        layers: (0..24).map(layer).collect(),
    };
    let plan = ExecutePlan::from_sizes(PlanKind::Fused, &[4, 4, 4, 4, 4, 3], &[1; 24]);
    let bubble = |microbatches: usize| {
        let setting = Setting::new(WORKERS, microbatches);
        let kind = PlanKind::Fused;
        let timeline = simulate(Schedule::RoundPipeAsync, kind, &plan, &costs, &setting);
        timeline.unwrap().bubble
    };
    let [one, two, enough] = [1, 2, WORKERS + 1].map(bubble);
    assert!(one > 0.7 && two > 0.4, "{one} {two}");
    assert!(enough < 0.1, "{enough}");
}

/// The same batch in more microbatches takes less of a worker's memory.
#[test]
fn more_microbatches_take_less_memory() {
    let used = |microbatches: usize| {
        let mut init = Init::new(1, DType::F32);
        let model = Sequential::new()
            .with(Linear::new(&mut init, 8, 64, true).unwrap())
            .with(Func(|cx: &mut Cx, x: &Tensor| cx.relu(x)))
            .with(Linear::new(&mut init, 64, 4, true).unwrap());
        let device = Meta::like(DeviceKind::Sim) as Arc<dyn Device>;
        let engine = RoundPipe::builder(model)
            .devices([device])
            .ring_options(RingOptions {
                memory: Some(Bytes::mib(64)),
                serial: true,
                ..RingOptions::default()
            })
            .build()
            .unwrap();
        let config = RunConfig::new().num_microbatch(microbatches);
        let call = engine.train(rows(4096, 8)).labels(Tree::None).loss(sum);
        call.config(config).run().unwrap();
        engine.synchronize().unwrap();
        engine.ring().workers()[0].usage().high_water.0
    };
    let [one, four, sixteen] = [1, 4, 16].map(used);
    assert!(four * 2 < one && sixteen < four, "{one} {four} {sixteen}");
}
