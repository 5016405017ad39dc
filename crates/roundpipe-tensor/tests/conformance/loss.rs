//! Losses.

use roundpipe_tensor::ops::{CrossEntropy, Reduction};
use roundpipe_tensor::{Bytes, Cx, DType, DeviceKind, Meta, Param, Shape, Worker};

use crate::bed::{self, Input, Lie, Strict, check, check_with, close, fixed, noise, randn, worker};
use crate::golden;

/// Every combination that changes the arithmetic.
fn choices() -> Vec<CrossEntropy> {
    let mut all = Vec::new();
    for reduction in [Reduction::Mean, Reduction::Sum, Reduction::None] {
        for label_smoothing in [0.0, 0.1] {
            all.push(CrossEntropy {
                reduction,
                label_smoothing,
                ..CrossEntropy::default()
            });
        }
    }
    all
}

fn labels(dims: &[usize]) -> Input {
    let count: usize = dims.iter().product();
    let one = |i: usize| {
        if i % 4 == 1 {
            -100
        } else {
            ((i * 5) % 7) as i64
        }
    };
    fixed(DType::I64, &(0..count).map(one).collect::<Vec<_>>(), dims)
}

#[test]
fn cross_entropy_and_its_gradient() {
    for options in choices() {
        for lie in [Lie::Dense, Lie::Transposed, Lie::CutOut] {
            let x = randn(1, &[2, 3, 7]).lying(lie);
            check(
                &format!("{options:?} {lie:?}"),
                &[x, labels(&[2, 3])],
                |cx, x| Ok(vec![cx.cross_entropy(&x[0], &x[1], options)?]),
            );
        }
    }
    check(
        "one token",
        &[randn(2, &[7]), fixed(DType::I32, &[3], &[])],
        |cx, x| {
            Ok(vec![cx.cross_entropy(
                &x[0],
                &x[1],
                CrossEntropy::default(),
            )?])
        },
    );
    check("no token", &[randn(3, &[0, 7]), labels(&[0])], |cx, x| {
        Ok(vec![cx.cross_entropy(
            &x[0],
            &x[1],
            CrossEntropy::default(),
        )?])
    });
}

/// Chunks of any size, also ones that do not divide the tokens, give the gradients of the whole.
#[test]
fn linear_cross_entropy_and_its_gradient() {
    for options in choices() {
        for chunk_tokens in [None, Some(1), Some(4), Some(5), Some(100)] {
            let options = CrossEntropy {
                chunk_tokens,
                ..options
            };
            let inputs = [randn(4, &[2, 5, 6]), randn(5, &[7, 6]), labels(&[2, 5])];
            check(&format!("{options:?}"), &inputs, |cx, x| {
                Ok(vec![cx.linear_cross_entropy(&x[0], &x[1], &x[2], options)?])
            });
        }
    }
    let turned = [
        randn(6, &[5, 6]).lying(Lie::Transposed),
        randn(7, &[7, 6]).lying(Lie::Transposed),
        labels(&[5]),
    ];
    let run = |cx: &mut Cx, x: &[roundpipe_tensor::Tensor]| {
        Ok(vec![cx.linear_cross_entropy(
            &x[0],
            &x[1],
            &x[2],
            CrossEntropy::default(),
        )?])
    };
    check("turned", &turned, run);
    check(
        "no token",
        &[randn(8, &[0, 6]), randn(9, &[7, 6]), labels(&[0])],
        run,
    );
    check(
        "frozen weight",
        &[
            randn(8, &[3, 6]),
            randn(9, &[7, 6]).constant(),
            labels(&[3]),
        ],
        run,
    );
    check(
        "frozen input",
        &[
            randn(8, &[3, 6]).constant(),
            randn(9, &[7, 6]),
            labels(&[3]),
        ],
        run,
    );
    let strict = Strict {
        differences: false,
        ..Strict::default()
    };
    check_with(
        "several tasks",
        &[randn(10, &[300, 40]), randn(11, &[999, 40]), labels(&[300])],
        strict,
        run,
    );
}

/// The fused loss agrees with the projection followed by the loss.
#[test]
fn fused_and_plain_agree() {
    let mut cx = Cx::infer(&worker(2));
    let values: Vec<f32> = (0..60 * 16)
        .map(|i| ((i * 7919) % 101) as f32 / 50.0 - 1.0)
        .collect();
    let x = cx.tensor(&values[..20 * 16], &[20, 16]).unwrap();
    let w = cx.tensor(&values[..40 * 16], &[40, 16]).unwrap();
    let labels = cx
        .tensor(&(0..20).map(|i| (i * 3) % 40).collect::<Vec<i64>>(), &[20])
        .unwrap();
    let logits = cx.linear(&x, &w, None).unwrap();
    let plain = cx
        .cross_entropy(&logits, &labels, CrossEntropy::default())
        .unwrap()
        .item()
        .unwrap();
    for chunk_tokens in [None, Some(3)] {
        let options = CrossEntropy {
            chunk_tokens,
            ..CrossEntropy::default()
        };
        let fused = cx
            .linear_cross_entropy(&x, &w, &labels, options)
            .unwrap()
            .item()
            .unwrap();
        assert!((fused - plain).abs() < 1e-5, "{fused} and {plain}");
    }
}

/// The gradients of the rows alone, for every way in which losses become one.
#[test]
fn a_frozen_projection_has_the_rows_gradients() {
    for options in choices() {
        for chunk_tokens in [None, Some(4)] {
            let options = CrossEntropy {
                chunk_tokens,
                ..options
            };
            let inputs = [
                randn(4, &[2, 5, 6]),
                randn(5, &[7, 6]).constant(),
                labels(&[2, 5]),
            ];
            check(&format!("frozen, {options:?}"), &inputs, |cx, x| {
                Ok(vec![cx.linear_cross_entropy(&x[0], &x[1], &x[2], options)?])
            });
        }
    }
    let none = [
        randn(8, &[0, 6]),
        randn(9, &[7, 6]).constant(),
        labels(&[0]),
    ];
    check("frozen, no token", &none, |cx, x| {
        Ok(vec![cx.linear_cross_entropy(
            &x[0],
            &x[1],
            &x[2],
            CrossEntropy::default(),
        )?])
    });
}

/// A frozen projection: the same loss bit for bit, the rows' gradients within rounding, one product
/// less, and no more than one chunk of logits.
#[test]
fn a_frozen_projection_is_multiplied_once() {
    let (tokens, hidden, classes) = (96, 16, 640);
    let run = |trained: bool, dtype: DType| {
        let meta = Meta::like(DeviceKind::Cpu);
        let work = |worker: &Worker| {
            let mut cx = Cx::train(worker);
            let fill = |cx: &mut Cx, seed: u64, dims: [usize; 2]| {
                bed::upload(cx, &noise(seed, dims[0] * dims[1]), &dims, dtype).unwrap()
            };
            let (x, w) = (
                fill(&mut cx, 1, [tokens, hidden]),
                fill(&mut cx, 2, [classes, hidden]),
            );
            let x = cx.input(&x).unwrap();
            let w = if trained { cx.input(&w).unwrap() } else { w };
            let labels: Vec<i64> = (0..tokens as i64)
                .map(|i| if i % 7 == 0 { -100 } else { i * 5 })
                .collect();
            let labels = cx.tensor(&labels, &[tokens]).unwrap();
            let options = CrossEntropy {
                chunk_tokens: Some(32),
                ..CrossEntropy::default()
            };
            let loss = cx.linear_cross_entropy(&x, &w, &labels, options).unwrap();
            let third = cx.affine(&loss, 3.0, 0.0).unwrap();
            (loss, cx.backward(&third).unwrap().take(&x).unwrap())
        };
        drop(work(&Worker::new(meta.clone(), Bytes::gib(1)).unwrap()));
        let worker = worker(2);
        let (loss, grad) = work(&worker);
        let values = (loss.to_f64_vec().unwrap(), grad.to_f64_vec().unwrap());
        (values, meta.cost().flops, worker.usage().peak_used.0)
    };
    for (dtype, limit) in [(DType::F64, 1e-13), (DType::F32, 1e-6), (DType::BF16, 1e-2)] {
        let (trained, frozen) = (run(true, dtype), run(false, dtype));
        assert_eq!(trained.0.0, frozen.0.0, "{dtype}: the loss");
        close(&format!("{dtype}"), &[frozen.0.1], &[trained.0.1], limit);
        let product = 2 * (tokens * hidden * classes) as u64;
        // Logits again, and the weight's gradient.
        assert!(
            trained.1 - frozen.1 > 19 * product / 10,
            "{dtype}: {} and {}",
            trained.1,
            frozen.1
        );
        assert!(
            frozen.2 < trained.2,
            "{dtype}: {} bytes, {} where it is trained",
            frozen.2,
            trained.2
        );
    }
}

/// Where the loss's gradient is known beforehand, logits are multiplied once, and loss and gradients
/// have the same bits as where it is not, beside what the accumulator held before.
#[test]
fn a_known_gradient_saves_a_product_and_changes_no_bit() {
    let (tokens, hidden, classes) = (96, 16, 640);
    let run = |known: bool, dtype: DType, reduction: Reduction, held: bool| {
        let meta = Meta::like(DeviceKind::Cpu);
        let work = |worker: &Worker| {
            let mut cx = Cx::train(worker).with_output_gradient(Some(1.0));
            let shape = Shape::new(&[classes, hidden]).unwrap();
            let weight = Param::zeros(dtype, &[classes, hidden]).unwrap();
            let fill = |cx: &mut Cx, seed: u64, dims: [usize; 2]| {
                bed::upload(cx, &noise(seed, dims[0] * dims[1]), &dims, dtype).unwrap()
            };
            let (x, here) = (
                fill(&mut cx, 1, [tokens, hidden]),
                fill(&mut cx, 2, [classes, hidden]),
            );
            let into = held.then(|| worker.full(dtype.accumulator(), shape, 0.125).unwrap());
            let w = cx.bind(&weight, here, into).unwrap();
            let x = cx.input(&x).unwrap();
            let labels: Vec<i64> = (0..tokens as i64)
                .map(|i| if i % 7 == 0 { -100 } else { i * 5 })
                .collect();
            let labels = cx.tensor(&labels, &[tokens]).unwrap();
            let options = CrossEntropy {
                chunk_tokens: Some(40),
                reduction,
                ..CrossEntropy::default()
            };
            let third = cx.full(DType::F32, &[], 1.0 / 3.0).unwrap();
            let loss = if known {
                cx.linear_cross_entropy_at_once(&x, &w, &labels, options, &third)
            } else {
                cx.linear_cross_entropy(&x, &w, &labels, options)
            };
            let loss = loss.unwrap();
            let third = cx.cast(&third, loss.dtype()).unwrap();
            let share = cx.mul(&loss, &third).unwrap();
            let mut grads = cx.backward(&share).unwrap();
            let dx = grads.take(&x).unwrap();
            (loss, dx, grads.take_param(&weight).unwrap())
        };
        drop(work(&Worker::new(meta.clone(), Bytes::gib(1)).unwrap()));
        let (loss, dx, dw) = work(&worker(2));
        let bits = [loss, dx, dw].map(|t| t.to_f64_vec().unwrap());
        (bits, meta.cost().flops)
    };
    let product = 2 * (tokens * hidden * classes) as u64;
    for dtype in [DType::F64, DType::F32, DType::BF16] {
        for reduction in [Reduction::Mean, Reduction::Sum] {
            for held in [false, true] {
                let (known, plain) = (
                    run(true, dtype, reduction, held),
                    run(false, dtype, reduction, held),
                );
                let what = format!("{dtype} {reduction:?} {held}");
                assert!(known.0 == plain.0, "{what}");
                assert!(
                    known.0[2].iter().any(|g| *g != 0.0 && *g != 0.125),
                    "{what}"
                );
                assert!(plain.1 - known.1 > 9 * product / 10, "{what}");
            }
        }
    }
}

/// A batch without any label must not poison a run: loss 0, gradients 0.
#[test]
fn all_labels_ignored_is_zero() {
    for reduction in [Reduction::Mean, Reduction::Sum] {
        let mut cx = Cx::train(&worker(1));
        let x = cx.full(DType::BF16, &[3, 4], 1.0).unwrap();
        let x = cx.input(&x).unwrap();
        let w = cx.full(DType::BF16, &[5, 4], 1.0).unwrap();
        let w = cx.input(&w).unwrap();
        let labels = cx.full(DType::I64, &[3], -100.0).unwrap();
        let options = CrossEntropy {
            reduction,
            ..CrossEntropy::default()
        };
        let loss = cx.linear_cross_entropy(&x, &w, &labels, options).unwrap();
        assert_eq!((loss.item().unwrap(), loss.dtype()), (0.0, DType::F32));
        let grads = cx.backward(&loss).unwrap();
        for leaf in [&x, &w] {
            assert!(
                grads
                    .of(leaf)
                    .unwrap()
                    .to_f64_vec()
                    .unwrap()
                    .iter()
                    .all(|g| *g == 0.0)
            );
        }
    }
}

/// The fused loss adds its weight gradient to the accumulator it finds, in f32, and holds one chunk
/// of logits.
#[test]
fn fused_loss_accumulates_in_place_and_stays_small() {
    let worker = worker(2);
    let (tokens, hidden, classes) = (512, 8, 1024);
    let weight = Param::full(DType::BF16, &[classes, hidden], 0.01).unwrap();
    let mut cx = Cx::train(&worker);
    let shape = Shape::new(&[classes, hidden]).unwrap();
    let here = worker.full(DType::BF16, shape, 0.01).unwrap();
    let into = worker.full(DType::F32, shape, 3.0).unwrap();
    let place = into.view().ptr;
    let w = cx.bind(&weight, here, Some(into)).unwrap();
    let x = cx.full(DType::BF16, &[tokens, hidden], 0.5).unwrap();
    let labels = cx.full(DType::I64, &[tokens], 7.0).unwrap();
    let before = worker.usage().used.0;
    let options = CrossEntropy {
        chunk_tokens: Some(32),
        ..CrossEntropy::default()
    };
    let loss = cx.linear_cross_entropy(&x, &w, &labels, options).unwrap();
    let grads = cx.backward(&loss).unwrap();
    let grad = grads.param(&weight).unwrap();
    assert_eq!(grad.view().ptr, place, "in place");
    let grad = grad.to_vec::<f32>().unwrap();
    assert!(
        (grad[7 * hidden] - 2.5).abs() < 1e-2,
        "{}",
        grad[7 * hidden]
    );
    assert!((grad[0] - 3.0).abs() < 1e-2, "{}", grad[0]);
    let peak = worker.usage().peak_used.0 - before;
    let chunk = 32 * classes as u64 * (4 + 2);
    assert!(
        peak < 2 * chunk,
        "{peak} bytes at the peak, one chunk is {chunk}"
    );
}

#[test]
fn mistakes_are_named() {
    let mut cx = Cx::infer(&worker(1));
    let x = cx.zeros(DType::F32, &[2, 3]).unwrap();
    let w = cx.zeros(DType::F32, &[5, 3]).unwrap();
    let outside = cx.tensor(&[0i64, 3], &[2]).unwrap();
    let short = cx.tensor(&[0i64], &[1]).unwrap();
    let options = CrossEntropy::default();
    let text = cx
        .cross_entropy(&x, &outside, options)
        .unwrap_err()
        .to_string();
    assert_eq!(text, "cross_entropy: index 3 at position 1 is outside 0..3");
    let text = cx
        .cross_entropy(&x, &short, options)
        .unwrap_err()
        .to_string();
    assert_eq!(
        text,
        "cross_entropy: shapes [2, 3] and [1] do not fit together"
    );
    let text = cx
        .linear_cross_entropy(&x, &x, &outside, options)
        .map(|_| ())
        .unwrap_err()
        .to_string();
    assert!(
        text.contains("index 3 at position 1 is outside 0..2"),
        "{text}"
    );
    let text = cx
        .linear_cross_entropy(&w, &x, &x, options)
        .unwrap_err()
        .to_string();
    assert_eq!(
        text,
        "linear_cross_entropy: f32 [2, 3] is not supported; indices are i64, i32 or u32"
    );
    let wrong = CrossEntropy {
        label_smoothing: 1.5,
        ..options
    };
    let text = cx
        .cross_entropy(&x, &outside, wrong)
        .unwrap_err()
        .to_string();
    assert_eq!(
        text,
        "cross_entropy: label_smoothing 1.5 is not between 0 and 1"
    );
}

#[test]
fn golden_linear_cross_entropy() {
    let file = golden::open("linear_cross_entropy");
    let cases = [
        ("mean", Reduction::Mean, 0.0),
        ("sum", Reduction::Sum, 0.0),
        ("none", Reduction::None, 0.0),
        ("part_ignored", Reduction::Mean, 0.0),
        ("part_ignored_sum", Reduction::Sum, 0.0),
        ("all_ignored_sum", Reduction::Sum, 0.0),
        ("smoothing", Reduction::Mean, 0.1),
        ("smoothing_sum", Reduction::Sum, 0.3),
        ("large_logits", Reduction::Mean, 0.0),
    ];
    for (case, reduction, label_smoothing) in cases {
        for chunk_tokens in [None, Some(7)] {
            let options = CrossEntropy {
                reduction,
                label_smoothing,
                chunk_tokens,
                ..CrossEntropy::default()
            };
            file.case(case).check(|cx, x| {
                cx.linear_cross_entropy(x.of("in.x"), x.of("p.weight"), x.of("in.labels"), options)
            });
            file.case(case).check(|cx, x| {
                let logits = cx.linear(x.of("in.x"), x.of("p.weight"), None)?;
                cx.cross_entropy(&logits, x.of("in.labels"), options)
            });
        }
    }
}

#[test]
fn losses_of_two_tensors() {
    for reduction in [Reduction::Mean, Reduction::Sum, Reduction::None] {
        for lie in [Lie::Dense, Lie::Transposed, Lie::CutOut] {
            // Differences of odd sixty-fourths meet no kink of the absolute value or of the bend at
            // 1.
            let target = randn(12, &[4, 5]).map(|v| v + 1.0 / 64.0).lying(lie);
            let pair = [randn(13, &[4, 5]).lying(lie), target];
            check(&format!("{reduction:?} {lie:?}"), &pair, |cx, x| {
                Ok(vec![
                    cx.mse_loss(&x[0], &x[1], reduction)?,
                    cx.l1_loss(&x[0], &x[1], reduction)?,
                    cx.huber_loss(&x[0], &x[1], 1.0, reduction)?,
                    cx.smooth_l1_loss(&x[0], &x[1], 0.5, reduction)?,
                ])
            });
        }
        let share = randn(14, &[3, 4]).map(|v| (v + 2.0) / 4.0);
        check(
            &format!("bce {reduction:?}"),
            &[randn(15, &[3, 4]), share.clone()],
            |cx, x| {
                Ok(vec![cx.binary_cross_entropy_with_logits(
                    &x[0], &x[1], reduction,
                )?])
            },
        );
        check(
            &format!("kl {reduction:?}"),
            &[randn(16, &[3, 4]), share.map(|v| v + 0.1)],
            |cx, x| {
                let log = cx.log_softmax(&x[0], -1)?;
                Ok(vec![cx.kl_div(&log, &x[1], reduction)?])
            },
        );
    }
}

/// A target of 0 adds nothing to the divergence, although its logarithm is infinite.
#[test]
fn divergence_from_certainty() {
    let mut cx = Cx::infer(&worker(1));
    let target = cx.tensor(&[0.0f32, 1.0], &[2]).unwrap();
    let log = cx.tensor(&[-3.0f32, -0.5], &[2]).unwrap();
    assert_eq!(
        cx.kl_div(&log, &target, Reduction::Sum)
            .unwrap()
            .item()
            .unwrap(),
        0.5
    );
}

/// The logarithm of a softmax followed by `nll_loss` is the cross entropy.
#[test]
fn nll_loss_is_cross_entropy_in_two_steps() {
    for reduction in [Reduction::Mean, Reduction::Sum, Reduction::None] {
        let options = CrossEntropy {
            reduction,
            ..CrossEntropy::default()
        };
        check(
            &format!("nll {reduction:?}"),
            &[randn(17, &[2, 3, 7]), labels(&[2, 3])],
            |cx, x| {
                let log = cx.log_softmax(&x[0], -1)?;
                Ok(vec![cx.nll_loss(&log, &x[1], options)?])
            },
        );
        let exact = Strict {
            dtypes: &[],
            ..Strict::default()
        };
        check_with(
            "difference",
            &[randn(17, &[2, 3, 7]), labels(&[2, 3])],
            exact,
            |cx, x| {
                let log = cx.log_softmax(&x[0], -1)?;
                let (two, one) = (
                    cx.nll_loss(&log, &x[1], options)?,
                    cx.cross_entropy(&x[0], &x[1], options)?,
                );
                let apart = cx.sub(&one, &two)?.to_f64_vec()?;
                assert!(
                    apart.iter().all(|d| d.abs() < 1e-12),
                    "{reduction:?}: {apart:?}"
                );
                Ok(vec![one, two])
            },
        );
    }
    let mut cx = Cx::infer(&worker(1));
    let log = cx.full(DType::F32, &[2, 3], f64::NEG_INFINITY).unwrap();
    let none = cx.full(DType::I64, &[2], -100.0).unwrap();
    assert_eq!(
        cx.nll_loss(&log, &none, CrossEntropy::default())
            .unwrap()
            .item()
            .unwrap(),
        0.0
    );
}
