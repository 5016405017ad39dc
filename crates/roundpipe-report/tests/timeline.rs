//! The timeline of a real step: an engine with several workers, traced.

use std::collections::{BTreeMap, BTreeSet};

use roundpipe::nn::{Init, Linear};
use roundpipe::optim::AdamW;
use roundpipe::{
    DType, Devices, ExecutePlan, HostTensor, Lag, PlanKind, RoundPipe, RunConfig, Sequential,
    Update,
};
use roundpipe_report::Timeline;

/// Every stage of a step is on one device, the stages go round-robin, and the host's updates belong
/// to the stages that made their gradients.
#[test]
fn stages_of_a_real_step_go_round_robin() -> Result<(), Box<dyn std::error::Error>> {
    let workers = 3;
    let mut init = Init::new(1, DType::F32);
    let mut model = Sequential::new();
    for layer in 0..8 {
        model = model.named(
            format!("layer {layer}"),
            Linear::new(&mut init, 16, 16, true)?,
        );
    }
    // The last layer is fused: 3 forward stages, it, and 4 backward stages.
    let plan = ExecutePlan::from_sizes(PlanKind::Fused, &[3, 2, 2], &[1, 2, 2, 2, 1]);
    let engine = RoundPipe::builder(model)
        .optimizer(AdamW::default())
        .run_config(RunConfig::new().num_microbatch(4).execute_plan(plan))
        .devices(Devices::parse(&format!("cpu:{workers}"))?.workers)
        .build()?;
    let x = HostTensor::full(DType::F32, &[8, 16], 0.5)?;
    let y = HostTensor::full(DType::F32, &[8, 16], 1.0)?;
    engine.trace().on();
    engine.forward_backward(x, y, |cx, output, label| {
        cx.mse_loss(&output.tensor()?, &label.tensor()?, Default::default())
    })?;
    engine.update(&Update::new(1e-2), Lag::Zero)?;
    engine.synchronize()?;
    engine.trace().off();
    let spans = engine.trace().spans();
    let timeline = Timeline::from_spans(&spans).at_step(1);

    let mut devices: BTreeMap<u64, BTreeSet<&str>> = BTreeMap::new();
    let mut microbatches = BTreeSet::new();
    for lane in timeline.lanes.iter().filter(|lane| lane.kind == "compute") {
        for span in &lane.spans {
            let stage = span.stage.expect("what is computed has a stage");
            devices.entry(stage).or_default().insert(&lane.device);
            microbatches.extend(span.microbatch);
            assert!(span.start_us >= 0.0 && span.start_us + span.us <= timeline.us + 1e-3);
        }
    }
    assert_eq!(microbatches, BTreeSet::from([0, 1, 2, 3]));
    assert!(devices.len() > workers, "{devices:?}");
    for (stage, on) in &devices {
        assert_eq!(on.len(), 1, "stage {stage} is on {on:?}");
        if let Some(later) = devices.get(&(stage + workers as u64)) {
            assert_eq!(later, on, "a round later than stage {stage}");
        }
    }
    let host = timeline.lanes.last().expect("lanes");
    assert_eq!(
        (host.device.as_str(), host.kind.as_str()),
        ("host", "optimizer")
    );
    let updated: BTreeSet<_> = host.spans.iter().filter_map(|span| span.stage).collect();
    let covered = host.spans.iter().flat_map(|span| {
        let first = span.layer.expect("an update has a layer");
        first..=span.last_layer.unwrap_or(first)
    });
    assert_eq!(covered.collect::<BTreeSet<_>>(), (0..8).collect());
    assert!(
        updated.iter().all(|stage| devices.contains_key(stage)),
        "{updated:?}"
    );
    Ok(())
}
