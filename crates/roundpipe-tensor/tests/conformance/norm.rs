//! Normalisation.

use roundpipe_tensor::kernel::{ConvSpec, PoolSpec};
use roundpipe_tensor::ops::BatchNorm;
use roundpipe_tensor::{Cx, DType, Param, Result, Tensor};

use crate::bed::{Input, Lie, Strict, check, check_with, close, noise, randn, upload, worker};
use crate::golden;

/// Sizes that leave tails in every lane count, single elements, empty ones, many blocks of rows,
/// and the widths of large models.
const ROWS: [&[usize]; 11] = [
    &[7],
    &[1, 1],
    &[3, 5],
    &[2, 3, 33],
    &[0, 4],
    &[4, 100],
    &[3, 1],
    &[90, 800],
    &[5, 4096],
    &[3, 5120],
    &[2, 8192],
];

fn last(dims: &[usize]) -> usize {
    dims[dims.len() - 1]
}

/// Small rows of coarse values come close to a zero variance, which amplifies rounding.
fn strict() -> Strict {
    Strict {
        slack: 2.0,
        ..Strict::default()
    }
}

#[test]
fn rms_norm_over_rows() {
    for dims in ROWS {
        let (x, w) = (randn(1, dims), randn(2, &[last(dims)]));
        // The norm of a single element is its sign; only a large eps leaves a gradient worth
        // comparing.
        let eps = if last(dims) == 1 { 0.5 } else { 1e-5 };
        check_with("rms_norm", &[x.clone(), w], strict(), |cx, t| {
            Ok(vec![cx.rms_norm(&t[0], Some(&t[1]), eps)?])
        });
        check_with("rms_norm plain", &[x], strict(), |cx, t| {
            Ok(vec![cx.rms_norm(&t[0], None, eps)?])
        });
    }
    for lie in [Lie::Transposed, Lie::CutOut] {
        let inputs = [randn(1, &[6, 9]).lying(lie), randn(2, &[9])];
        check("rms_norm strided", &inputs, |cx, t| {
            Ok(vec![cx.rms_norm(&t[0], Some(&t[1]), 1e-6)?])
        });
    }
    let frozen = [
        randn(1, &[6, 9]).constant(),
        randn(2, &[9]).lying(Lie::CutOut),
    ];
    check("rms_norm of a constant", &frozen, |cx, t| {
        Ok(vec![cx.rms_norm(&t[0], Some(&t[1]), 1e-6)?])
    });
}

/// Either output alone, or both, may carry a gradient.
#[test]
fn add_rms_norm_gives_the_sum_and_its_norm() {
    for dims in ROWS {
        let inputs = [randn(1, dims), randn(2, dims), randn(3, &[last(dims)])];
        check_with("add_rms_norm", &inputs, strict(), |cx, t| {
            let (sum, y) = cx.add_rms_norm(&t[0], &t[1], Some(&t[2]), 1e-5)?;
            Ok(vec![sum, y])
        });
    }
    let inputs = [
        randn(1, &[4, 9]),
        randn(2, &[4, 9]).lying(Lie::Transposed),
        randn(3, &[9]),
    ];
    check("add_rms_norm, sum alone", &inputs, |cx, t| {
        Ok(vec![cx.add_rms_norm(&t[0], &t[1], Some(&t[2]), 1e-5)?.0])
    });
    check("add_rms_norm, norm alone", &inputs, |cx, t| {
        Ok(vec![cx.add_rms_norm(&t[0], &t[1], Some(&t[2]), 1e-5)?.1])
    });
    check("add_rms_norm, one tensor twice", &inputs[..1], |cx, t| {
        let (sum, y) = cx.add_rms_norm(&t[0], &t[0], None, 1e-5)?;
        Ok(vec![sum, y])
    });
}

#[test]
fn layer_norm_over_rows() {
    for dims in ROWS {
        let wide = &[last(dims)][..];
        let inputs = [randn(1, dims), randn(2, wide), randn(3, wide)];
        // A single element has variance 0; its gradient is 0 by mathematics and noise in f16.
        let strict = Strict {
            slack: if last(dims) == 1 { 40.0 } else { 2.0 },
            ..Strict::default()
        };
        check_with("layer_norm", &inputs, strict, |cx, t| {
            Ok(vec![cx.layer_norm(
                &t[0],
                Some(&t[1]),
                Some(&t[2]),
                1e-3,
            )?])
        });
        check_with("layer_norm plain", &inputs[..1], strict, |cx, t| {
            Ok(vec![cx.layer_norm(&t[0], None, None, 1e-3)?])
        });
    }
    for lie in [Lie::Transposed, Lie::CutOut] {
        let inputs = [randn(1, &[6, 9]).lying(lie), randn(2, &[9]), randn(3, &[9])];
        check("layer_norm strided", &inputs, |cx, t| {
            Ok(vec![cx.layer_norm(
                &t[0],
                Some(&t[1]),
                Some(&t[2]),
                1e-5,
            )?])
        });
    }
    let inputs = [
        randn(1, &[6, 9]).constant(),
        randn(2, &[9]).constant(),
        randn(3, &[9]),
    ];
    check("layer_norm with a trained bias", &inputs, |cx, t| {
        Ok(vec![cx.layer_norm(
            &t[0],
            Some(&t[1]),
            Some(&t[2]),
            1e-5,
        )?])
    });
    check("layer_norm with a bias alone", &inputs, |cx, t| {
        Ok(vec![cx.layer_norm(&t[0], None, Some(&t[2]), 1e-5)?])
    });
}

#[test]
fn group_and_instance_norm() {
    let cases: [(&[usize], usize); 7] = [
        (&[2, 6, 5, 3], 3),
        (&[2, 6, 5, 3], 1),
        (&[3, 4, 7], 4),
        (&[5, 6], 2),
        (&[0, 4, 3], 2),
        (&[2, 4, 0], 2),
        (&[3, 8, 70, 50], 4),
    ];
    for (dims, groups) in cases {
        let inputs = [randn(1, dims), randn(2, &[dims[1]]), randn(3, &[dims[1]])];
        let name = format!("group_norm {dims:?} by {groups}");
        check_with(&name, &inputs, strict(), |cx, t| {
            Ok(vec![cx.group_norm(
                &t[0],
                groups,
                Some(&t[1]),
                Some(&t[2]),
                1e-3,
            )?])
        });
        check_with(&name, &inputs[..1], strict(), |cx, t| {
            Ok(vec![cx.group_norm(&t[0], groups, None, None, 1e-3)?])
        });
    }
    let inputs = [
        randn(1, &[2, 3, 4, 5]).lying(Lie::CutOut),
        randn(2, &[3]),
        randn(3, &[3]),
    ];
    check("instance_norm", &inputs, |cx, t| {
        Ok(vec![cx.instance_norm(
            &t[0],
            Some(&t[1]),
            Some(&t[2]),
            1e-5,
        )?])
    });
}

#[test]
fn batch_norm_by_the_batch() {
    let cases: [&[usize]; 7] = [
        &[4, 3],
        &[300, 70],
        &[2, 3, 5],
        &[2, 5, 4, 3],
        &[3, 4, 90, 70],
        &[0, 3, 2],
        &[2, 1, 7],
    ];
    for dims in cases {
        let inputs = [randn(1, dims), randn(2, &[dims[1]]), randn(3, &[dims[1]])];
        let options = BatchNorm {
            eps: 1e-3,
            ..BatchNorm::default()
        };
        let name = format!("batch_norm {dims:?}");
        check_with(&name, &inputs, strict(), |cx, t| {
            Ok(vec![cx.batch_norm(
                &t[0],
                Some(&t[1]),
                Some(&t[2]),
                None,
                options,
            )?])
        });
        check_with(&name, &inputs[..1], strict(), |cx, t| {
            Ok(vec![cx.batch_norm(&t[0], None, None, None, options)?])
        });
    }
    let strided = [
        randn(1, &[2, 3, 4, 5]).lying(Lie::Transposed),
        randn(2, &[3]),
    ];
    check("batch_norm strided", &strided, |cx, t| {
        Ok(vec![cx.batch_norm(
            &t[0],
            Some(&t[1]),
            None,
            None,
            BatchNorm::default(),
        )?])
    });
}

/// Outside training the running statistics are constants: y and dx are affine in x and dy.
#[test]
fn batch_norm_by_running_statistics() {
    let worker = worker(2);
    let mean = Param::from_slice(&[0.5f64, -1.0], &[2]).unwrap().frozen();
    let var = Param::from_slice(&[4.0f64, 0.25], &[2]).unwrap().frozen();
    let mut cx = Cx::new(&worker, true, false);
    let x = cx
        .tensor(&[1.0f64, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], &[2, 2, 2])
        .unwrap();
    let x = cx.input(&x).unwrap();
    let options = BatchNorm {
        momentum: 0.1,
        eps: 0.0,
    };
    let y = cx
        .batch_norm(&x, None, None, Some((&mean, &var)), options)
        .unwrap();
    assert_eq!(
        y.to_f64_vec().unwrap(),
        [0.25, 0.75, 8.0, 10.0, 2.25, 2.75, 16.0, 18.0]
    );
    let dy = cx.full(DType::F64, &[2, 2, 2], 1.0).unwrap();
    let grads = cx.backward_from(&[(y, dy)]).unwrap();
    let dx = grads.of(&x).unwrap().to_f64_vec().unwrap();
    assert_eq!(dx, [0.5, 0.5, 2.0, 2.0, 0.5, 0.5, 2.0, 2.0]);
    cx.commit_buffers().unwrap();
    assert_eq!(
        mean.to_vec::<f64>().unwrap(),
        [0.5, -1.0],
        "inference changes no statistics"
    );
}

/// Gradients of a bound weight are added to its accumulator even where the bias has none.
#[test]
fn weight_gradients_go_into_accumulators() {
    let worker = worker(1);
    let weight = Param::full(DType::BF16, &[3], 1.0).unwrap();
    let bias = Param::full(DType::BF16, &[3], 0.0).unwrap();
    let mut cx = Cx::train(&worker);
    let (one, into) = (
        cx.full(DType::BF16, &[3], 1.0).unwrap(),
        cx.full(DType::F32, &[3], 10.0).unwrap(),
    );
    let w = cx.bind(&weight, one, Some(into)).unwrap();
    let b = cx.get(&bias).unwrap();
    let x = upload(&mut cx, &[1.0, 2.0, 3.0], &[1, 3], DType::BF16).unwrap();
    let y = cx.layer_norm(&x, Some(&w), Some(&b), 0.0).unwrap();
    let dy = cx.full(DType::BF16, &[1, 3], 1.0).unwrap();
    let grads = cx.backward_from(&[(y, dy)]).unwrap();
    let step = 1.5f64.sqrt();
    let want = [10.0 - step, 10.0, 10.0 + step];
    close(
        "accumulator",
        &[grads.param(&weight).unwrap().to_f64_vec().unwrap()],
        &[want.to_vec()],
        1e-6,
    );
    assert_eq!(
        grads.param(&bias).unwrap().to_vec::<f32>().unwrap(),
        [1.0; 3]
    );
}

#[test]
fn what_does_not_fit_is_refused_in_words() {
    let worker = worker(1);
    let mut cx = Cx::train(&worker);
    let x = cx.zeros(DType::F32, &[2, 6, 1]).unwrap();
    let short = cx.zeros(DType::F32, &[5]).unwrap();
    let half = cx.zeros(DType::BF16, &[1]).unwrap();
    let scalar = cx.zeros(DType::F32, &[]).unwrap();
    let whole = cx.zeros(DType::I64, &[2, 3]).unwrap();
    let one = cx.zeros(DType::F32, &[1, 4]).unwrap();
    let buffer = Param::zeros(DType::F64, &[6]).unwrap();
    let options = BatchNorm::default();
    let refused: [(Result<Tensor>, &[&str]); 8] = [
        (
            cx.rms_norm(&x, Some(&short), 0.0),
            &["rms_norm", "[2, 6, 1]", "[5]"],
        ),
        (
            cx.rms_norm(&x, Some(&half), 0.0),
            &["rms_norm", "f32", "bf16"],
        ),
        (cx.rms_norm(&scalar, None, 0.0), &["rms_norm", "scalar"]),
        (
            cx.layer_norm(&whole, None, None, 0.0),
            &["layer_norm", "i64"],
        ),
        (
            cx.group_norm(&x, 4, None, None, 0.0),
            &["group_norm", "4 groups", "6 channels"],
        ),
        (
            cx.group_norm(&x, 0, None, None, 0.0),
            &["group_norm", "0 groups"],
        ),
        (
            cx.batch_norm(&one, None, None, None, options),
            &["batch_norm", "one value per channel"],
        ),
        (
            cx.batch_norm(&x, None, None, Some((&buffer, &buffer)), options),
            &["f32 [6]", "f64 [6]"],
        ),
    ];
    for (result, words) in refused {
        let text = result.unwrap_err().to_string();
        assert!(
            words.iter().all(|w| text.contains(w)),
            "{text} should name {words:?}"
        );
    }
    let error = cx
        .add_rms_norm(&x, &one, None, 0.0)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("add_rms_norm") && error.contains("[1, 4]"),
        "{error}"
    );
}

/// PyTorch's answers; `far_mean` has a mean sixty times its deviation.
#[test]
fn norms_agree_with_pytorch() {
    let file = golden::open("fused_ops");
    file.case("rms_norm")
        .check(|cx, t| cx.rms_norm(t.of("in.x"), t.get("p.weight"), 1e-6));
    for name in [
        "layer_norm",
        "layer_norm_far_mean",
        "layer_norm_no_bias",
        "layer_norm_plain",
    ] {
        file.case(name)
            .check(|cx, t| cx.layer_norm(t.of("in.x"), t.get("p.weight"), t.get("p.bias"), 1e-5));
    }
    for (name, groups) in [
        ("group_norm", 3),
        ("group_norm_each", 12),
        ("group_norm_one", 1),
    ] {
        file.case(name).check(|cx, t| {
            cx.group_norm(
                t.of("in.x"),
                groups,
                t.get("p.weight"),
                t.get("p.bias"),
                1e-5,
            )
        });
    }
}

/// The golden convolution block, whose batch norm has the running statistics `running`.
fn conv_block(
    cx: &mut Cx,
    t: &golden::Inputs,
    running: Option<(&Param, &Param)>,
) -> Result<Tensor> {
    let conv = |stride, padding, dilation, groups| ConvSpec {
        stride: [stride; 2],
        padding: [padding; 2],
        dilation: [dilation; 2],
        groups,
    };
    let pool = |kernel, stride, padding| PoolSpec {
        kernel: [kernel; 2],
        stride: [stride; 2],
        padding: [padding; 2],
        dilation: [1; 2],
        ceil_mode: false,
        count_include_pad: true,
    };
    let x = t.of("in.x");
    let y = cx.conv2d(x, t.of("p.conv1.weight"), None, conv(2, 1, 1, 1))?;
    let (w, b) = (t.get("p.bn1.weight"), t.get("p.bn1.bias"));
    let y = cx.batch_norm(&y, w, b, running, BatchNorm::default())?;
    let y = cx.relu(&y)?;
    let short = cx.conv2d(x, t.of("p.shortcut.weight"), None, conv(2, 0, 1, 1))?;
    let y = cx.add(&y, &short)?;
    let y = cx.conv2d(
        &y,
        t.of("p.dilated.weight"),
        t.get("p.dilated.bias"),
        conv(1, 2, 2, 4),
    )?;
    let y = cx.conv2d(&y, t.of("p.depthwise.weight"), None, conv(1, 1, 1, 12))?;
    let y = cx.max_pool2d(&y, pool(3, 2, 1))?;
    let y = cx.avg_pool2d(&y, pool(2, 1, 0))?;
    let y = cx.mean(&y, &[2, 3], false)?;
    cx.linear(&y, t.of("p.fc.weight"), t.get("p.fc.bias"))
}

/// Training agrees with PyTorch through the whole block; the running statistics move as PyTorch's
/// do, only once the pass is committed, and give PyTorch's answer in evaluation.
#[test]
fn batch_norm_agrees_with_pytorch() {
    let case = golden::open("conv_block").case("");
    case.check(|cx, t| conv_block(cx, t, None));
    let param = |name: &str| {
        let values: Vec<f32> = case.f64(name).0.iter().map(|v| *v as f32).collect();
        Param::from_slice(&values, &[8]).unwrap().frozen()
    };
    let (mean, var) = (param("buf.bn1.running_mean"), param("buf.bn1.running_var"));
    let before = mean.to_vec::<f32>().unwrap();
    case.check_in(DType::F32, 4e-6, &|cx, t| {
        conv_block(cx, t, Some((&mean, &var)))?;
        let y = conv_block(cx, t, Some((&mean, &var)))?;
        assert_eq!(
            mean.to_vec::<f32>()?,
            before,
            "a repeated forward does not count twice"
        );
        cx.commit_buffers()?;
        Ok(y)
    });
    for (name, buffer) in [("mean", &mean), ("var", &var)] {
        let have = buffer
            .to_vec::<f32>()
            .unwrap()
            .into_iter()
            .map(f64::from)
            .collect();
        close(
            name,
            &[have],
            &[case.f64(&format!("after.bn1.running_{name}")).0],
            1e-6,
        );
    }
    let mut cx = Cx::infer(&worker(2));
    let inputs = case.inputs(&mut cx, DType::F32);
    let y = conv_block(&mut cx, &inputs, Some((&mean, &var))).unwrap();
    close(
        "evaluation",
        &[y.to_f64_vec().unwrap()],
        &[case.f64("eval.out").0],
        4e-6,
    );
}

/// A mean a thousand deviations away costs the variance no more than the inputs' own rounding.
#[test]
fn far_means_keep_their_variance() {
    let worker = worker(1);
    let mut cx = Cx::infer(&worker);
    let values: Vec<f64> = noise(5, 4 * 96).iter().map(|v| v + 1024.0).collect();
    let exact = upload(&mut cx, &values, &[4, 96], DType::F64).unwrap();
    let rounded = upload(&mut cx, &values, &[4, 96], DType::F32).unwrap();
    let norms: [fn(&mut Cx, &Tensor) -> Result<Tensor>; 3] = [
        |cx, x| cx.layer_norm(x, None, None, 1e-5),
        |cx, x| cx.group_norm(x, 8, None, None, 1e-5),
        |cx, x| cx.batch_norm(x, None, None, None, BatchNorm::default()),
    ];
    for (i, norm) in norms.into_iter().enumerate() {
        let (have, want) = (
            norm(&mut cx, &rounded).unwrap(),
            norm(&mut cx, &exact).unwrap(),
        );
        close(
            &format!("norm {i}"),
            &[have.to_f64_vec().unwrap()],
            &[want.to_f64_vec().unwrap()],
            1e-4,
        );
    }
}

/// Sizes big enough that a weight gradient is summed over many blocks.
#[test]
fn long_weight_gradients_are_exact_sums() {
    let inputs: [Input; 2] = [randn(1, &[3000, 64]), randn(2, &[64])];
    let strict = Strict {
        differences: false,
        ..Strict::default()
    };
    check_with("rms_norm of many rows", &inputs, strict, |cx, t| {
        Ok(vec![cx.rms_norm(&t[0], Some(&t[1]), 1e-5)?])
    });
}
