//! An engine and its calls: layers, memory, settings, losses.

use roundpipe::nn::{BatchNorm2d, Conv2d, Dropout, Func, Init, Linear};
use roundpipe::optim::AdamW;
use roundpipe::{
    Bytes, Cx, DType, GradScaler, Grain, HostTensor, Lag, LossReduction, OutputDevice, Params, Pin,
    RoundPipe, RunConfig, Sequential, Tensor, Tree, Update,
};

use crate::kit::{
    Scale, builder, classes, cpus, cross_entropy, engine, mlp, number, ones, rows, scale, sum,
};

/// A sequence is cut into its layers, and any other model is one layer.
#[test]
fn a_sequence_is_cut_and_another_model_is_one_layer() {
    let text = format!("{:?}", engine(mlp(DType::F32), 2));
    assert_eq!(text, "RoundPipe(net, 4 layers on 2 workers)");
    let linear = Linear::new(&mut Init::new(1, DType::F32), 4, 3, true).unwrap();
    let whole = RoundPipe::builder(linear)
        .name("whole")
        .devices(cpus(1))
        .memory(Bytes::mib(8))
        .build()
        .unwrap();
    assert_eq!(
        format!("{whole:?}"),
        "RoundPipe(whole, 1 layers on 1 workers)"
    );
    let names: Vec<String> = whole.optim_parameters().unwrap().map(|p| p.name).collect();
    assert_eq!(names, ["model.weight", "model.bias"]);
}

/// f32 copies by default, also of narrow weights; bf16 ones where they are asked for. Copies of f32
/// weights are the weights.
#[test]
fn optimizer_copies_have_the_type_that_was_asked_for() {
    let bytes = |weights: DType, copies: Option<DType>| {
        let mut builder = builder(mlp(weights), 1);
        if let Some(dtype) = copies {
            builder = builder.optim_dtype(dtype);
        }
        let engine = builder.build().unwrap();
        let copy = engine.optim_parameters().unwrap().next().unwrap();
        copy.value().len() / copy.shape.numel()
    };
    assert_eq!(bytes(DType::BF16, None), 4);
    assert_eq!(bytes(DType::F16, Some(DType::F32)), 4);
    assert_eq!(bytes(DType::BF16, Some(DType::BF16)), 2);
    let (model, w) = scale(DType::F32, 2.0);
    let engine = engine(model, 1);
    let copy = engine.optim_parameters().unwrap().next().unwrap();
    assert!(copy.value().is_same(&w.data()));
}

/// Every way of pinning builds and trains; off, a frozen weight stays in its own memory.
#[test]
fn every_way_of_pinning_trains() {
    for pin in [Pin::Try, Pin::Alloc, Pin::Register, Pin::Off] {
        let frozen = number(DType::F32, 2.0).frozen();
        let before = frozen.data();
        let model = Sequential::new()
            .with(Scale(frozen.clone()))
            .with(Scale(number(DType::F32, 1.0)));
        let engine = builder(model, 1).pin(pin).build().unwrap();
        let loss = engine.forward_backward(ones(4), Tree::None, sum).unwrap();
        assert_eq!(loss.total(), 8.0, "{pin:?}");
        if pin == Pin::Off {
            assert!(frozen.data().is_same(&before));
        }
    }
}

/// A call's setting wins over the model's, which wins over the default of one more than workers.
#[test]
fn settings_have_two_levels() {
    let usual = engine(mlp(DType::F32), 2);
    let chosen = builder(mlp(DType::F32), 2)
        .run_config(RunConfig::new().num_microbatch(4))
        .build()
        .unwrap();
    let microbatches = |engine: &RoundPipe, config: RunConfig| {
        let call = engine.train(rows(12, 4)).loss(sum).config(config);
        call.run().unwrap().losses.microbatches().len()
    };
    assert_eq!(microbatches(&usual, RunConfig::new()), 3);
    assert_eq!(microbatches(&chosen, RunConfig::new()), 4);
    let two = RunConfig::new().num_microbatch(2);
    assert_eq!(microbatches(&chosen, two), 2);
    let grain = RunConfig::new().recompute_grain(Grain::Layer);
    assert_eq!(microbatches(&chosen, grain), 4);
}

/// Losses of microbatches are added, so a mean counts once for each; `LossReduction::Mean` gives
/// the batch's.
#[test]
fn the_loss_is_the_sum_over_microbatches() {
    let mean = |cx: &mut Cx, output: Tree, _: Tree| cx.mean_all(&output.tensor()?);
    for (reduction, want) in [(LossReduction::Sum, 8.0), (LossReduction::Mean, 2.0)] {
        let engine = engine(scale(DType::F32, 2.0).0, 2);
        let config = RunConfig::new().num_microbatch(4).loss_reduction(reduction);
        let call = engine.train(ones(12)).loss(mean).config(config);
        let losses = call.run().unwrap().losses;
        assert_eq!((losses.total(), losses.microbatches().len()), (want, 4));
    }
}

/// A list of losses has a sum for each.
#[test]
fn several_losses_have_a_sum_each() {
    let engine = engine(scale(DType::F32, 2.0).0, 1);
    let two = |cx: &mut Cx, output: Tree, _: Tree| {
        let output = output.tensor()?;
        Ok(vec![cx.sum_all(&output)?, cx.mean_all(&output)?])
    };
    let config = RunConfig::new().num_microbatch(2);
    let call = engine.train(ones(4)).loss(two).config(config);
    assert_eq!(call.run().unwrap().losses.each(), [8.0, 4.0]);
}

/// Outputs may land on a worker; one that is not there is refused.
#[test]
fn outputs_land_where_they_are_asked_for() {
    let engine = engine(mlp(DType::F32), 2);
    let on = |worker| {
        let config = RunConfig::new().output_device(OutputDevice::Worker(worker));
        engine.forward(rows(4, 4), &config)
    };
    assert_eq!(on(1).unwrap().tensors().unwrap().len(), 3);
    let line = on(5).unwrap_err().to_string();
    assert_eq!(
        line,
        "output_device: no worker 5; there are 2, counted from 0"
    );
}

/// The published loop with f16 weights, plain and with a loss scale: five lines each, and it learns.
#[test]
fn the_shortest_loop_learns() {
    let model = || {
        let mut init = Init::new(7, DType::F16);
        Sequential::new()
            .with(Linear::new(&mut init, 8, 32, true).unwrap())
            .with(Func(|cx: &mut Cx, x: &Tensor| cx.relu(x)))
            .with(Linear::new(&mut init, 32, 3, true).unwrap())
    };
    let batch = |step: usize| {
        let labels: Vec<i64> = (0..36).map(|i| ((i * 5 + step) % 3) as i64).collect();
        let data: Vec<f64> = (0..36 * 8)
            .map(|i| f64::from(u8::from(i % 8 == labels[i / 8] as usize)))
            .collect();
        let data = HostTensor::from_f64s(&data, DType::F16, &[36, 8]).unwrap();
        (data, classes(&labels))
    };
    let loss = |cx: &mut Cx, output: Tree, labels: Tree| {
        let wide = cx.cast(&output.tensor()?, DType::F32)?;
        cross_entropy(cx, wide.into(), labels)
    };
    for scaled in [false, true] {
        let engine = builder(model(), 2)
            .optimizer(AdamW::default())
            .build()
            .unwrap();
        let scaler = if scaled {
            GradScaler::default()
        } else {
            GradScaler::disabled()
        };
        let mut losses = Vec::new();
        for step in 0..40 {
            let (data, labels) = batch(step);
            let scale = engine.loss_scale(&scaler).unwrap();
            let loss = engine.scaled_loss(&scaler, loss).unwrap();
            let total = engine.forward_backward(data, labels, loss).unwrap().total();
            losses.push(total / scale);
            engine
                .update_scaled(&Update::new(1e-2), &scaler, Lag::One)
                .unwrap();
        }
        engine.synchronize().unwrap();
        assert!(losses[39] < 0.2 * losses[0], "{scaled}: {losses:?}");
    }
}

/// In evaluation dropout passes everything and running statistics stay, also after steps at lag 1.
#[test]
fn evaluation_changes_nothing() {
    let dropout = engine(Sequential::new().with(Dropout { p: 0.9 }), 1);
    dropout.set_training(false);
    let config = RunConfig::new().requires_grad(false);
    let output = dropout.forward(rows(4, 4), &config).unwrap();
    let output = output.output().unwrap().clone().tensor().unwrap();
    assert!(output.same_bits(&rows(4, 4)).unwrap());

    let mut init = Init::new(1, DType::F32);
    let model = Sequential::new()
        .with(Conv2d::new(&mut init, 1, 2, 1, false, Default::default()).unwrap())
        .with(BatchNorm2d::new(&mut init, 2).unwrap());
    let engine = engine(model.clone(), 1);
    let image = rows(4, 8).reshape(&[2, 1, 4, 4]).unwrap();
    for _ in 0..3 {
        engine
            .forward_backward(image.clone(), Tree::None, sum)
            .unwrap();
        engine.update(&Update::new(0.0), Lag::One).unwrap();
    }
    engine.synchronize().unwrap();
    let running = || {
        let named = model.named_params().into_iter();
        let mean = named.filter(|(name, _)| name == "1.running_mean");
        let values: Vec<f32> = mean.flat_map(|(_, p)| p.to_vec::<f32>().unwrap()).collect();
        values
    };
    let before = running();
    assert!(before.len() == 2 && before[0] != 0.0, "{before:?}");
    engine.set_training(false);
    engine.forward(image, &config).unwrap();
    assert_eq!(running(), before);
}

/// Types are mixed by a layer that casts.
#[test]
fn a_layer_may_cast() {
    let mut init = Init::new(1, DType::BF16);
    let cast = |to: DType| Func(move |cx: &mut Cx, x: &Tensor| cx.cast(x, to));
    let model = Sequential::new()
        .with(cast(DType::BF16))
        .with(Linear::new(&mut init, 4, 3, true).unwrap())
        .with(cast(DType::F32));
    let engine = engine(model, 2);
    let labels = classes(&[0, 1, 2, 0, 1, 2]);
    let step = || {
        let loss = engine.forward_backward(rows(6, 4), labels.clone(), cross_entropy);
        engine.update(&Update::new(0.5), Lag::Zero).unwrap();
        loss.unwrap().total()
    };
    let first = step();
    let later: Vec<f64> = (0..5).map(|_| step()).collect();
    assert!(later[4] < first, "{first}, then {later:?}");
}
