//! Ready-made layers under the engine: the bits of a plain loop on cpu and simulated workers.

use roundpipe::kernel::ConvSpec;
use roundpipe::nn::{
    Conv1d, Conv2d, ConvTranspose2d, Flatten, Gru, Init, Linear, Lstm, MultiheadAttention, Relu,
};
use roundpipe::{
    Cx, DType, HostInputs, HostTensor, Layer, ParamVisitor, Params, Sequential, TensorResult, Tree,
};

use crate::host_loss::devices;
use crate::invisible::{self, Way};
use crate::models;

const STEPS: u64 = 2;

type Batch = fn(u64) -> (HostInputs, HostTensor);

/// Seven samples of `dims` and weights of three outputs each.
fn samples(step: u64, dims: &[usize]) -> (HostTensor, HostTensor) {
    let count = 7 * dims.iter().product::<usize>();
    let (values, _) = models::numbers(step, count.div_ceil(5), DType::F32);
    let values = values.to_vec::<f32>().unwrap();
    let dims = [&[7], dims].concat();
    let x = HostTensor::from_slice(&values[..count], &dims).unwrap();
    (x, models::numbers(step, 7, DType::F32).1)
}

fn images(step: u64) -> (HostInputs, HostTensor) {
    let (x, weights) = samples(step, &[2, 6, 6]);
    (x.into(), weights)
}

fn sequences(step: u64) -> (HostInputs, HostTensor) {
    let (x, weights) = samples(step, &[4, 6]);
    (x.into(), weights)
}

/// Sequences beside a mask that hides the end of every other one.
fn padded(step: u64) -> (HostInputs, HostTensor) {
    let (x, weights) = samples(step, &[4, 6]);
    let mask: Vec<bool> = (0..7 * 4).map(|at| at / 4 % 2 == 1 && at % 4 > 1).collect();
    let mask = HostTensor::from_bools(&mask, &[7, 4]).unwrap();
    let inputs = HostInputs::new().named("x", x);
    (inputs.named("key_padding_mask", mask), weights)
}

/// Lets go of the mask.
struct WithoutMask;

impl Params for WithoutMask {
    fn visit(&self, _: &mut ParamVisitor<'_>) {}
}

impl Layer for WithoutMask {
    fn run(&self, _: &mut Cx, mut input: Tree) -> TensorResult<Tree> {
        input.take("x")
    }
}

fn convolutions() -> Sequential {
    let mut init = Init::new(31, DType::F32);
    let padding = [1, 1];
    let depthwise = ConvSpec {
        padding,
        groups: 2,
        ..ConvSpec::default()
    };
    let halved = ConvSpec {
        stride: [2, 2],
        padding,
        ..ConvSpec::default()
    };
    let wide = ConvTranspose2d {
        output_padding: [1, 1],
        ..ConvTranspose2d::new(&mut init, 4, 2, 3, true, halved).unwrap()
    };
    Sequential::new()
        .with(Conv2d::new(&mut init, 2, 2, 3, true, depthwise).unwrap())
        .with(Conv2d::new(&mut init, 2, 4, 3, false, halved).unwrap())
        .with(Relu)
        .with(wide)
        .with(Flatten { first: 2, last: 3 })
        .with(Conv1d::new(&mut init, 2, 3, 5, true, halved).unwrap())
        .with(Flatten::default())
        .with(Linear::new(&mut init, 51, 3, true).unwrap())
}

fn recurrent() -> Sequential {
    let mut init = Init::new(32, DType::F32);
    Sequential::new()
        .with(Lstm::new(&mut init, 6, 5, true).unwrap())
        .with(Gru::new(&mut init, 5, 4, true).unwrap())
        .with(Flatten::default())
        .with(Linear::new(&mut init, 16, 3, true).unwrap())
}

fn attention(masked: bool) -> Sequential {
    let mut init = Init::new(33, DType::F32);
    let mut attend = || MultiheadAttention::new(&mut init, 6, 2, true).unwrap();
    let (first, second) = (attend(), attend().causal());
    let model = Sequential::new().with(first).with(second);
    let model = if masked {
        model.with(WithoutMask)
    } else {
        model
    };
    model
        .with(Flatten::default())
        .with(Linear::new(&mut init, 24, 3, true).unwrap())
}

#[test]
fn ready_made_layers_train_to_the_same_bits_everywhere() {
    let masked = || attention(true);
    let plain = || attention(false);
    let cases: [(&str, &dyn Fn() -> Sequential, Batch); 4] = [
        ("convolutions", &convolutions, images),
        ("recurrent", &recurrent, sequences),
        ("attention", &plain, sequences),
        ("masked attention", &masked, padded),
    ];
    for (name, model, batch) in cases {
        let loss = models::weighted;
        let want = models::plain_loop(&model(), invisible::rule(), 0.01, STEPS, &batch, 3, loss);
        for (sim, workers) in [(false, 1), (false, 3), (true, 2)] {
            let way = Way {
                microbatches: 3,
                ..Way::threaded(devices(sim, workers))
            };
            let found = invisible::run_for(STEPS, &model(), &way, &batch, loss);
            assert!(found == want, "{name}, {workers} workers, sim {sim}");
        }
    }
}
