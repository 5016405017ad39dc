//! The tape: what it adds up, what it skips, what it frees, and what it refuses.

use std::sync::Arc;

use roundpipe_tensor::kernel::{HostKernel, HostView, HostViewMut};
use roundpipe_tensor::{
    Bytes, Cpu, CustomOp, Cx, DType, Error, Param, Result, Tensor, Worker, bf16,
};

fn worker() -> Worker {
    Worker::new(Cpu::new(Some(1)).unwrap(), Bytes::mib(256)).unwrap()
}

#[test]
fn a_value_used_many_times_gets_the_sum_of_its_gradients() {
    let worker = worker();
    let mut cx = Cx::train(&worker);
    let x = cx.tensor(&[3.0f32], &[1]).unwrap();
    let x = cx.input(&x).unwrap();
    // y = x + x + x·x, and dy reaches both operands of the first sum through one tensor.
    let twice = cx.add(&x, &x).unwrap();
    let square = cx.mul(&x, &x).unwrap();
    let y = cx.add(&twice, &square).unwrap();
    let grads = cx.backward(&y).unwrap();
    assert_eq!(grads.of(&x).unwrap().to_vec::<f32>().unwrap(), [8.0]);
}

/// A chain this long must neither overflow the stack nor grow memory with its length in backward.
#[test]
fn twenty_thousand_operations_walk_back_iteratively() {
    let long: usize = if cfg!(miri) { 50 } else { 20_000 };
    let worker = worker();
    let mut cx = Cx::train(&worker);
    let x = cx.tensor(&[1.0f32], &[1]).unwrap();
    let leaf = cx.input(&x).unwrap();
    let mut y = leaf.clone();
    for _ in 0..long {
        y = cx.add(&y, &leaf).unwrap();
    }
    assert_eq!(cx.recorded(), long);
    let grads = cx.backward(&y).unwrap();
    assert_eq!(
        grads.of(&leaf).unwrap().to_vec::<f32>().unwrap(),
        [long as f32 + 1.0]
    );
}

/// Gradients of bf16 parameters add up in f32 over microbatches, in the accumulator that was bound.
#[test]
fn bound_accumulators_collect_microbatches_in_f32() {
    let worker = worker();
    let weight = Param::from_slice(&[bf16::from_f32(1.0); 4], &[2, 2]).unwrap();
    let mut into = Some(worker.full(DType::F32, *weight.shape(), 0.0).unwrap());
    // In bf16 the sum would stop growing at 256.
    let microbatches = if cfg!(miri) { 3 } else { 300 };
    for _ in 0..microbatches {
        let mut cx = Cx::train(&worker);
        let tensor = cx.get(&weight).unwrap().detach();
        cx.bind(&weight, tensor, into.take()).unwrap();
        let x = cx.full(DType::BF16, &[1, 2], 1.0).unwrap();
        let w = cx.get(&weight).unwrap();
        let y = cx.linear(&x, &w, None).unwrap();
        let loss = cx.sum_all(&y).unwrap();
        into = cx.backward(&loss).unwrap().take_param(&weight);
    }
    assert_eq!(
        into.unwrap().to_vec::<f32>().unwrap(),
        [microbatches as f32; 4]
    );
}

/// Sums that stay are written there by the product itself, whose bits are the same, and later ones
/// are added to them in place.
#[test]
fn sums_that_stay_leave_the_working_memory() {
    let worker = worker();
    let weight = Param::from_slice(&[1.0f32, 2.0, 3.0, 4.0], &[2, 2]).unwrap();
    let gradient = |stays: bool, into: Option<Tensor>| {
        let mut cx = Cx::train(&worker);
        let tensor = cx.get(&weight).unwrap().detach();
        cx.bind(&weight, tensor, into).unwrap();
        let x = cx.tensor(&[0.5f32, 0.25], &[1, 2]).unwrap();
        let bound = cx.get(&weight).unwrap();
        let y = cx.matmul(&x, &bound).unwrap();
        let loss = cx.sum(&y, &[], false).unwrap();
        if stays {
            cx.keep_sums();
        }
        cx.backward(&loss).unwrap().take_param(&weight).unwrap()
    };
    let short = gradient(false, None);
    let long = gradient(true, None);
    assert!(!short.is_long() && long.is_long());
    let expected = short.to_vec::<f32>().unwrap();
    assert_eq!(long.to_vec::<f32>().unwrap(), expected);
    let both = gradient(true, Some(long));
    assert!(both.is_long());
    let doubled: Vec<f32> = expected.iter().map(|grad| 2.0 * grad).collect();
    assert_eq!(both.to_vec::<f32>().unwrap(), doubled);
}

#[test]
fn frozen_parameters_get_no_gradient_and_keep_no_activations() {
    let worker = worker();
    let (rows, width) = if cfg!(miri) { (128, 4) } else { (512, 64) };
    let weight = Param::full(DType::F32, &[width, width], 0.5).unwrap();
    let kept = |trainable: bool| {
        weight.set_trainable(trainable);
        let mut cx = Cx::train(&worker);
        let constant = cx.full(DType::F32, &[rows, width], 1.0).unwrap();
        let x = cx.input(&constant).unwrap();
        let w = cx.get(&weight).unwrap();
        let y = cx.linear(&x, &w, None).unwrap();
        drop((constant, x));
        let used = worker.usage().used;
        let loss = cx.sum_all(&y).unwrap();
        let grads = cx.backward(&loss).unwrap();
        assert_eq!(grads.param(&weight).is_some(), trainable);
        used
    };
    let (trained, frozen) = (kept(true), kept(false));
    assert_eq!(
        trained.0 - frozen.0,
        (rows * width * 4) as u64,
        "the input is kept only for the weight's gradient"
    );
}

/// One parameter as weight and bias of one operation gets both gradients, also into a bound
/// accumulator.
#[test]
fn a_parameter_in_two_places_of_one_operation_gets_both_gradients() {
    let worker = worker();
    let weight = Param::full(DType::F32, &[3], 0.5).unwrap();
    let into = worker.full(DType::F32, *weight.shape(), 0.0).unwrap();
    for bound in [None, Some(into)] {
        let mut cx = Cx::train(&worker);
        let x = cx
            .tensor(&[1.0f32, 2.0, 4.0, -1.0, 0.0, 3.0], &[2, 3])
            .unwrap();
        let tensor = cx.get(&weight).unwrap().detach();
        let w = cx.bind(&weight, tensor, bound).unwrap();
        let apart = Param::full(DType::F32, &[3], 0.5).unwrap();
        let b = cx.get(&apart).unwrap();
        let twice = cx.layer_norm(&x, Some(&w), Some(&w), 1e-5).unwrap();
        let once = cx.layer_norm(&x, Some(&b), None, 1e-5).unwrap();
        let both = cx.add(&twice, &once).unwrap();
        let loss = cx.sum_all(&both).unwrap();
        let grads = cx.backward(&loss).unwrap();
        let slope = grads.param(&apart).unwrap().to_vec::<f32>().unwrap();
        let shared = grads.param(&weight).unwrap().to_vec::<f32>().unwrap();
        // The bias adds the number of rows to what the weight alone gets.
        assert!(
            shared
                .iter()
                .zip(&slope)
                .all(|(s, w)| (s - (w + 2.0)).abs() < 1e-6),
            "{shared:?} {slope:?}"
        );
    }
}

/// All memory comes back once results are dropped, whether or not backward ran.
#[test]
fn nothing_leaks() {
    let worker = worker();
    for walk in [true, false] {
        let mut cx = Cx::train(&worker);
        let constant = cx
            .full(
                DType::F32,
                if cfg!(miri) { &[8, 8] } else { &[100, 100] },
                1.0,
            )
            .unwrap();
        let x = cx.input(&constant).unwrap();
        let y = cx.mul(&x, &x).unwrap();
        let loss = cx.sum_all(&y).unwrap();
        if walk {
            drop(cx.backward(&loss).unwrap());
        }
        drop((cx, constant, x, y, loss));
        assert_eq!(worker.usage().used, Bytes(0), "walked back: {walk}");
    }
}

/// x³ with a backward of its own.
struct Cube;

impl CustomOp for Cube {
    fn name(&self) -> &'static str {
        "cube"
    }

    fn forward(&self, cx: &mut Cx, inputs: &[Tensor]) -> Result<Vec<Tensor>> {
        let square = cx.mul(&inputs[0], &inputs[0])?;
        Ok(vec![cx.mul(&square, &inputs[0])?])
    }

    fn backward(
        &self,
        cx: &mut Cx,
        inputs: &[Tensor],
        _: &[Tensor],
        grads: &[Option<Tensor>],
    ) -> Result<Vec<Option<Tensor>>> {
        let Some(dy) = &grads[0] else {
            return Ok(vec![None]);
        };
        let three = cx.full(inputs[0].dtype(), &[1], 3.0)?;
        let square = cx.mul(&inputs[0], &inputs[0])?;
        let slope = cx.mul(&square, &three)?;
        Ok(vec![Some(cx.mul(&slope, dy)?)])
    }
}

#[test]
fn a_users_operation_runs_with_its_own_backward() {
    let worker = worker();
    let mut cx = Cx::train(&worker);
    let x = cx.tensor(&[2.0f32, -1.0], &[2]).unwrap();
    let x = cx.input(&x).unwrap();
    let y = cx.custom(Arc::new(Cube), &[&x]).unwrap().remove(0);
    let loss = cx.sum_all(&y).unwrap();
    let grads = cx.backward(&loss).unwrap();
    assert_eq!(y.to_vec::<f32>().unwrap(), [8.0, -1.0]);
    assert_eq!(grads.of(&x).unwrap().to_vec::<f32>().unwrap(), [12.0, 3.0]);
}

/// -x, as a user might write it.
struct Negate;

impl HostKernel for Negate {
    fn name(&self) -> &'static str {
        "negate"
    }

    fn run(&self, src: &[HostView<'_>], dst: &mut [HostViewMut<'_>]) -> Result<()> {
        for (from, to) in src[0]
            .bytes
            .chunks_exact(4)
            .zip(dst[0].bytes.chunks_exact_mut(4))
        {
            let value = f32::from_ne_bytes([from[0], from[1], from[2], from[3]]);
            if value.is_nan() {
                return Err(Error::invalid("negate", "a NaN"));
            }
            to.copy_from_slice(&(-value).to_ne_bytes());
        }
        Ok(())
    }
}

/// Strided inputs reach the kernel densely, and its error comes back as a value.
#[test]
fn a_users_kernel_computes_on_host_memory() {
    let worker = worker();
    let mut cx = Cx::infer(&worker);
    let x = cx
        .tensor(&[1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0], &[2, 3])
        .unwrap();
    let turned = cx.transpose(&x, 0, 1).unwrap();
    let kernel = Arc::new(Negate);
    let out = [(DType::F32, *turned.shape())];
    let y = cx
        .host_kernel(kernel.clone(), &[&turned], &out)
        .unwrap()
        .remove(0);
    assert_eq!(
        y.to_vec::<f32>().unwrap(),
        [-1.0, -4.0, -2.0, -5.0, -3.0, -6.0]
    );
    let bad = cx.full(DType::F32, &[3, 2], f64::NAN).unwrap();
    assert!(
        cx.host_kernel(kernel, &[&bad], &out)
            .unwrap_err()
            .to_string()
            .contains("negate: a NaN")
    );
}

/// Mistakes that a program can make come back as errors that name the operation, never as panics.
#[test]
fn misuse_is_an_error_that_names_the_place() {
    let (here, there) = (worker(), worker());
    let mut cx = Cx::train(&here);
    let a = cx.zeros(DType::F32, &[2, 3]).unwrap();
    let b = cx.zeros(DType::F32, &[4]).unwrap();
    let text = |e: Error| e.to_string();
    assert!(text(cx.backward(&a).unwrap_err()).contains("6 elements"));
    let scalar = cx.zeros(DType::F32, &[]).unwrap();
    assert!(text(cx.backward(&scalar).unwrap_err()).contains("no output depends"));
    assert!(text(Cx::infer(&here).backward(&scalar).unwrap_err()).contains("Cx::train"));
    let shapes = text(cx.add(&a, &b).unwrap_err());
    assert!(
        shapes.contains("add") && shapes.contains("[2, 3]") && shapes.contains("[4]"),
        "{shapes}"
    );
    let ints = cx.zeros(DType::I64, &[3]).unwrap();
    let types = text(cx.mul(&a, &ints).unwrap_err());
    assert!(
        types.contains("mul") && types.contains("f32") && types.contains("i64"),
        "{types}"
    );
    assert!(matches!(cx.input(&ints), Err(Error::DType { .. })));
    // A tensor of another worker, and one of another tape.
    let far = Cx::infer(&there).zeros(DType::F32, &[2, 3]).unwrap();
    assert!(text(cx.add(&a, &far).unwrap_err()).contains("another worker"));
    let recorded = cx.input(&a).unwrap();
    let mut other = Cx::train(&here);
    let ours = other.input(&a).unwrap();
    assert!(text(other.add(&ours, &recorded).unwrap_err()).contains("another tape"));
    assert!(
        cx.zeros(DType::F32, &[usize::MAX, 4]).is_err(),
        "refused before anything is allocated"
    );
    assert!(cx.tensor(&[1.0f32; 3], &[2]).is_err());
}

/// A parameter that a pass still reads cannot be written; afterwards it can.
#[test]
fn parameters_in_use_cannot_be_written() {
    let worker = worker();
    let weight = Param::full(DType::F32, &[2], 1.0).unwrap();
    let mut cx = Cx::train(&worker);
    let w = cx.get(&weight).unwrap();
    let loss = cx.sum_all(&w).unwrap();
    assert!(matches!(weight.data().write(0..8), Err(Error::Busy { .. })));
    drop(w);
    let grads = cx.backward(&loss).unwrap();
    assert!(
        weight.data().write(0..8).is_ok(),
        "gradients alone do not hold the weights"
    );
    assert_eq!(
        grads.param(&weight).unwrap().to_vec::<f32>().unwrap(),
        [1.0, 1.0]
    );
}

/// Two products give a gradient to one value: 256, and then 1 + 2^-8, which bf16 rounds to 1. Rounded
/// and then added they make 257, a tie that goes to 256; joined, 257 and a little, which is 258. Only
/// what is recorded inside is joined.
#[test]
fn gradients_are_joined_where_a_layer_says_so() {
    let worker = worker();
    let gradient = |joins_first: bool, joins_second: bool| {
        let mut cx = Cx::train(&worker);
        let x = cx.tensor(&[bf16::ONE], &[1, 1]).unwrap();
        let x = cx.input(&x).unwrap();
        let small = [1.0, 1.0 / 256.0].map(bf16::from_f32);
        let small = cx.tensor(&small, &[2, 1]).unwrap();
        let large = cx.tensor(&[bf16::from_f32(256.0)], &[1, 1]).unwrap();
        // The walk meets the last product first, so the first one adds to what is there.
        let mut linear = |weight: &Tensor, joins: bool| match joins {
            true => cx.joining_gradients(|cx| cx.linear(&x, weight, None)),
            false => cx.linear(&x, weight, None),
        };
        let first = linear(&small, joins_first).unwrap();
        let second = linear(&large, joins_second).unwrap();
        let first = cx.sum_all(&first).unwrap();
        let second = cx.sum_all(&second).unwrap();
        let loss = cx.add(&first, &second).unwrap();
        let grads = cx.backward(&loss).unwrap();
        grads.of(&x).unwrap().to_vec::<bf16>().unwrap()[0].to_f32()
    };
    assert_eq!(gradient(false, false), 256.0);
    assert_eq!(gradient(true, true), 258.0);
    assert_eq!(gradient(true, false), 258.0);
    assert_eq!(gradient(false, true), 256.0);
}
