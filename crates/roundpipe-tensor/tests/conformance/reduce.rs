//! Reductions, softmax, running sums and selection.

use roundpipe_tensor::{Cx, DType, Error, Shape};

use crate::bed::{Lie, Strict, check, check_with, fixed, randn, values, worker};
use crate::golden;

/// Every kind of layout that a reduction cuts differently: rows, columns, both sides, strided,
/// empty.
#[test]
fn sums_and_means_over_any_dimensions() {
    for lie in [Lie::Dense, Lie::Transposed, Lie::CutOut] {
        for dims in [&[][..], &[0], &[1], &[-1], &[0, 2], &[1, 2], &[0, 1]] {
            let name = format!("{dims:?} {lie:?}");
            check(
                &format!("sum {name}"),
                &[randn(1, &[3, 5, 7]).lying(lie)],
                |cx, x| {
                    Ok(vec![
                        cx.sum(&x[0], dims, false)?,
                        cx.sum(&x[0], dims, true)?,
                    ])
                },
            );
            check(
                &format!("mean {name}"),
                &[randn(2, &[3, 5, 7]).lying(lie)],
                |cx, x| Ok(vec![cx.mean(&x[0], dims, true)?]),
            );
        }
    }
    check("sum of nothing", &[randn(3, &[0, 4])], |cx, x| {
        Ok(vec![
            cx.sum(&x[0], &[0], false)?,
            cx.sum(&x[0], &[1], false)?,
            cx.sum_all(&x[0])?,
        ])
    });
    check("sum of one", &[randn(4, &[])], |cx, x| {
        Ok(vec![cx.sum_all(&x[0])?, cx.mean_all(&x[0])?])
    });
}

/// Sizes at which work is cut into parts, so that the order of joining shows in the bits.
#[test]
fn large_sums_have_one_order() {
    let strict = Strict {
        differences: false,
        ..Strict::default()
    };
    for (dims, over) in [
        (&[700, 513][..], &[0][..]),
        (&[300_001], &[]),
        (&[3, 50_000], &[1]),
        (&[2, 400, 300], &[1]),
    ] {
        check_with(&format!("{dims:?}"), &[randn(5, dims)], strict, |cx, x| {
            Ok(vec![
                cx.sum(&x[0], over, false)?,
                cx.mean(&x[0], over, false)?,
            ])
        });
    }
}

#[test]
fn extremes_and_products() {
    // Distinct values: central differences have no slope at a tie.
    let distinct = |n: usize| {
        (0..n)
            .map(|i| ((i * 37) % n) as f64 / 8.0 - 2.0)
            .collect::<Vec<_>>()
    };
    for lie in [Lie::Dense, Lie::Transposed, Lie::CutOut] {
        let x = values(&distinct(30), &[5, 6]).lying(lie);
        check(&format!("max min {lie:?}"), &[x], |cx, x| {
            Ok(vec![
                cx.max(&x[0], &[0], false)?,
                cx.max(&x[0], &[1], true)?,
                cx.min(&x[0], &[-1], false)?,
                cx.min(&x[0], &[], false)?,
            ])
        });
        check(
            &format!("prod {lie:?}"),
            &[randn(6, &[3, 4]).lying(lie)],
            |cx, x| {
                Ok(vec![
                    cx.prod(&x[0], &[0], false)?,
                    cx.prod(&x[0], &[1], true)?,
                    cx.prod(&x[0], &[], false)?,
                ])
            },
        );
    }
    let zeros = values(&[2.0, 0.0, 3.0, 0.0, 0.0, 1.5, 1.0, -2.0, 0.5], &[3, 3]);
    check("prod with zeros", &[zeros], |cx, x| {
        Ok(vec![cx.prod(&x[0], &[1], false)?])
    });
}

/// PyTorch's `amax` shares the gradient evenly among equal largest values.
#[test]
fn ties_share_the_gradient() {
    let mut cx = Cx::train(&worker(1));
    let x = cx.tensor(&[1.0f32, 3.0, 3.0, 2.0], &[4]).unwrap();
    let x = cx.input(&x).unwrap();
    let y = cx.max(&x, &[], false).unwrap();
    let grads = cx.backward(&y).unwrap();
    assert_eq!(
        grads.of(&x).unwrap().to_vec::<f32>().unwrap(),
        [0.0, 0.5, 0.5, 0.0]
    );
}

#[test]
fn spread_and_length() {
    for lie in [Lie::Dense, Lie::Transposed, Lie::CutOut] {
        for dims in [&[][..], &[0], &[-1]] {
            check(
                &format!("var {dims:?} {lie:?}"),
                &[randn(7, &[5, 4]).lying(lie)],
                |cx, x| {
                    Ok(vec![
                        cx.var(&x[0], dims, true, false)?,
                        cx.var(&x[0], dims, false, true)?,
                    ])
                },
            );
            check(
                &format!("std {dims:?} {lie:?}"),
                &[randn(8, &[5, 4]).lying(lie)],
                |cx, x| {
                    Ok(vec![
                        cx.std(&x[0], dims, true, true)?,
                        cx.std(&x[0], dims, false, false)?,
                    ])
                },
            );
            check(
                &format!("norm {dims:?} {lie:?}"),
                &[randn(9, &[5, 4]).lying(lie)],
                |cx, x| Ok(vec![cx.norm(&x[0], dims, false)?]),
            );
            check(
                &format!("logsumexp {dims:?} {lie:?}"),
                &[randn(10, &[5, 4]).lying(lie)],
                |cx, x| {
                    Ok(vec![
                        cx.logsumexp(&x[0], dims, false)?,
                        cx.logsumexp(&x[0], dims, true)?,
                    ])
                },
            );
        }
    }
}

/// A zero vector has length 0, and its gradient is 0, not NaN.
#[test]
fn length_of_zero_has_no_slope() {
    let mut cx = Cx::train(&worker(1));
    let x = cx.zeros(DType::F32, &[3]).unwrap();
    let x = cx.input(&x).unwrap();
    let y = cx.norm(&x, &[], false).unwrap();
    assert_eq!(y.item().unwrap(), 0.0);
    let grads = cx.backward(&y).unwrap();
    assert_eq!(grads.of(&x).unwrap().to_vec::<f32>().unwrap(), [0.0; 3]);
}

#[test]
fn softmax_along_any_dimension() {
    for lie in [Lie::Dense, Lie::Transposed, Lie::CutOut] {
        for dim in [0, 1, -1] {
            check(
                &format!("softmax {dim} {lie:?}"),
                &[randn(11, &[3, 5, 7]).lying(lie)],
                |cx, x| Ok(vec![cx.softmax(&x[0], dim)?]),
            );
            check(
                &format!("log_softmax {dim} {lie:?}"),
                &[randn(12, &[3, 5, 7]).lying(lie)],
                |cx, x| Ok(vec![cx.log_softmax(&x[0], dim)?]),
            );
        }
    }
    check("softmax empty", &[randn(13, &[0, 5])], |cx, x| {
        Ok(vec![cx.softmax(&x[0], -1)?])
    });
    let strict = Strict {
        differences: false,
        ..Strict::default()
    };
    check_with(
        "softmax wide",
        &[randn(14, &[67, 1031])],
        strict,
        |cx, x| Ok(vec![cx.softmax(&x[0], -1)?, cx.log_softmax(&x[0], -1)?]),
    );
}

/// Masked scores are -inf: they get weight 0, and a line of nothing else is NaN, as in PyTorch.
#[test]
fn softmax_at_the_ends() {
    let mut cx = Cx::infer(&worker(1));
    let low = f32::NEG_INFINITY;
    let x = cx.tensor(&[low, 0.0, 1e4, low, low, low], &[2, 3]).unwrap();
    let y = cx.softmax(&x, -1).unwrap().to_vec::<f32>().unwrap();
    assert_eq!(y[..3], [0.0, 0.0, 1.0]);
    assert!(y[3..].iter().all(|v| v.is_nan()));
    let lse = cx
        .logsumexp(&x, &[-1], false)
        .unwrap()
        .to_vec::<f32>()
        .unwrap();
    assert_eq!(lse, [1e4, low]);
}

#[test]
fn running_sums() {
    for lie in [Lie::Dense, Lie::Transposed, Lie::CutOut] {
        for dim in [0, 1, -1] {
            check(
                &format!("cumsum {dim} {lie:?}"),
                &[randn(15, &[3, 5, 7]).lying(lie)],
                |cx, x| Ok(vec![cx.cumsum(&x[0], dim)?]),
            );
        }
    }
    check("cumsum empty", &[randn(16, &[0, 2])], |cx, x| {
        Ok(vec![cx.cumsum(&x[0], 0)?, cx.cumsum(&x[0], 1)?])
    });
    let strict = Strict {
        differences: false,
        ..Strict::default()
    };
    check_with("cumsum long", &[randn(17, &[130, 700])], strict, |cx, x| {
        Ok(vec![cx.cumsum(&x[0], 1)?])
    });
}

#[test]
fn selection_and_order() {
    let distinct: Vec<f64> = (0..60)
        .map(|i| f64::from((i * 37) % 60) / 16.0 - 2.0)
        .collect();
    for lie in [Lie::Dense, Lie::Transposed, Lie::CutOut] {
        for (k, dim, largest) in [
            (1, -1, true),
            (3, -1, true),
            (2, 0, false),
            (4, 1, true),
            (0, 1, true),
        ] {
            let x = values(&distinct, &[3, 4, 5]).lying(lie);
            check(&format!("topk {k} {dim} {lie:?}"), &[x], |cx, x| {
                let (top, places) = cx.topk(&x[0], k, dim, largest)?;
                Ok(vec![top, places])
            });
        }
        check(
            &format!("sort {lie:?}"),
            &[values(&distinct, &[6, 10]).lying(lie)],
            |cx, x| {
                let (up, _) = cx.sort(&x[0], -1, false)?;
                let (down, places) = cx.sort(&x[0], 0, true)?;
                Ok(vec![up, down, places])
            },
        );
    }
}

/// Ties come in order of their index and NaN counts as largest; a full sort agrees with a
/// selection.
#[test]
fn order_of_ties_and_nan() {
    let mut cx = Cx::infer(&worker(2));
    let x = cx
        .tensor(&[1.0f32, f32::NAN, 3.0, 1.0, 3.0, f32::NEG_INFINITY], &[6])
        .unwrap();
    let (_, down) = cx.sort(&x, 0, true).unwrap();
    assert_eq!(down.to_vec::<i64>().unwrap(), [1, 2, 4, 0, 3, 5]);
    let (_, up) = cx.sort(&x, 0, false).unwrap();
    assert_eq!(up.to_vec::<i64>().unwrap(), [5, 0, 3, 2, 4, 1]);
    assert_eq!(
        cx.argmax(&x, 0, false).unwrap().to_vec::<i64>().unwrap(),
        [1]
    );
    let many: Vec<i32> = (0..5000).map(|i| (i * 7919) % 1000).collect();
    let many = cx.tensor(&many, &[5000]).unwrap();
    let (_, all) = cx.sort(&many, 0, true).unwrap();
    let (_, some) = cx.topk(&many, 777, 0, true).unwrap();
    assert_eq!(
        some.to_vec::<i64>().unwrap(),
        all.to_vec::<i64>().unwrap()[..777]
    );
}

#[test]
fn whole_numbers_and_truth_values() {
    check(
        "integers",
        &[fixed(DType::I32, &[3, -1, 4, 1, -5, 9], &[2, 3])],
        |cx, x| {
            let truth = cx.cast(&x[0], DType::Bool)?;
            Ok(vec![
                cx.sum(&x[0], &[1], false)?,
                cx.prod(&x[0], &[0], false)?,
                cx.max(&x[0], &[1], false)?,
                cx.argmin(&x[0], 1, true)?,
                cx.argmax(&x[0], 0, false)?,
                cx.cumsum(&x[0], 1)?,
                cx.sum_all(&truth)?,
            ])
        },
    );
    let mut cx = Cx::infer(&worker(1));
    let x = cx.tensor(&[0i64, 2, 0, 0, 5, -7], &[3, 2]).unwrap();
    let read = |t: roundpipe_tensor::Tensor| t.to_vec::<u8>().unwrap();
    assert_eq!(read(cx.any(&x, &[1], false).unwrap()), [1, 0, 1]);
    assert_eq!(read(cx.all(&x, &[1], false).unwrap()), [0, 0, 1]);
    let none = cx.zeros(DType::F32, &[2, 0]).unwrap();
    assert_eq!(read(cx.any(&none, &[1], false).unwrap()), [0, 0]);
    assert_eq!(read(cx.all(&none, &[1], true).unwrap()), [1, 1]);
    assert!(
        cx.mean(&none, &[1], false)
            .unwrap()
            .to_vec::<f32>()
            .unwrap()[0]
            .is_nan()
    );
}

/// What cannot work says which operation and which shape.
#[test]
fn mistakes_are_named() {
    let mut cx = Cx::infer(&worker(1));
    let x = cx.zeros(DType::F32, &[2, 0]).unwrap();
    let whole = cx.zeros(DType::I64, &[2, 3]).unwrap();
    let text = |e: Result<_, Error>| {
        e.map(|_: roundpipe_tensor::Tensor| ())
            .unwrap_err()
            .to_string()
    };
    assert_eq!(
        text(cx.sum(&x, &[2], false)),
        "sum: no dimension 2 in [2, 0]"
    );
    assert_eq!(
        text(cx.sum(&x, &[0, -2], false)),
        "sum: dimension -2 of [2, 0] is named twice"
    );
    assert_eq!(
        text(cx.max(&x, &[1], false)),
        "max: [2, 0] has no elements to choose from"
    );
    assert_eq!(
        text(cx.argmax(&x, 1, false)),
        "argmax: [2, 0] has no elements to choose from"
    );
    assert_eq!(
        text(cx.mean(&whole, &[], false)),
        "mean: i64 [2, 3] is not supported; it takes floats"
    );
    assert_eq!(
        text(cx.softmax(&whole, -1)),
        "softmax: i64 [2, 3] is not supported; it takes floats"
    );
    let short = cx.topk(&whole, 4, -1, true).unwrap_err().to_string();
    assert_eq!(
        short,
        "topk: asked for 4 of 3 values along dimension 1 of [2, 3]"
    );
    assert_eq!(
        cx.max(&x, &[0], false).unwrap().shape(),
        &Shape::new(&[0]).unwrap()
    );
}

#[test]
fn golden_reductions() {
    let file = golden::open("general_ops");
    let check =
        |case: &str, f: &dyn Fn(&mut Cx, &golden::Inputs) -> roundpipe_tensor::Result<_>| {
            file.case(case).check(f);
        };
    check("sum_all", &|cx, x| cx.sum_all(x.of("in.x")));
    check("sum_dims", &|cx, x| cx.sum(x.of("in.x"), &[0, 2], false));
    check("mean_dim1", &|cx, x| cx.mean(x.of("in.x"), &[1], false));
    check("max_all", &|cx, x| cx.max(x.of("in.x"), &[], false));
    check("max_dim1", &|cx, x| cx.max(x.of("in.x"), &[1], false));
    check("min_last", &|cx, x| cx.min(x.of("in.x"), &[-1], false));
    check("prod_dim1", &|cx, x| cx.prod(x.of("in.x"), &[1], false));
    check("prod_zero", &|cx, x| cx.prod(x.of("in.x"), &[-1], false));
    check("var", &|cx, x| cx.var(x.of("in.x"), &[-1], true, false));
    check("var_biased_dim1", &|cx, x| {
        cx.var(x.of("in.x"), &[1], false, false)
    });
    check("std", &|cx, x| cx.std(x.of("in.x"), &[-1], true, false));
    check("norm", &|cx, x| cx.norm(x.of("in.x"), &[-1], false));
    check("logsumexp", &|cx, x| {
        cx.logsumexp(x.of("in.x"), &[-1], false)
    });
    check("logsumexp_dim1", &|cx, x| {
        cx.logsumexp(x.of("in.x"), &[1], false)
    });
    check("softmax", &|cx, x| cx.softmax(x.of("in.x"), -1));
    check("softmax_dim1", &|cx, x| cx.softmax(x.of("in.x"), 1));
    check("softmax_large", &|cx, x| cx.softmax(x.of("in.x"), -1));
    check("log_softmax", &|cx, x| cx.log_softmax(x.of("in.x"), -1));
    check("log_softmax_dim1", &|cx, x| cx.log_softmax(x.of("in.x"), 1));
    check("cumsum_last", &|cx, x| cx.cumsum(x.of("in.x"), -1));
    check("cumsum_dim1", &|cx, x| cx.cumsum(x.of("in.x"), 1));
    check("topk", &|cx, x| Ok(cx.topk(x.of("in.x"), 3, -1, true)?.0));
    check("topk_dim1", &|cx, x| {
        Ok(cx.topk(x.of("in.x"), 2, 1, true)?.0)
    });
    check("sort", &|cx, x| Ok(cx.sort(x.of("in.x"), -1, false)?.0));
}

/// The places that PyTorch names, too.
#[test]
fn golden_places() {
    let file = golden::open("general_ops");
    let mut cx = Cx::infer(&worker(1));
    for case in ["max_dim1", "min_last", "topk", "topk_dim1", "sort"] {
        let golden = file.case(case);
        let (x, dims) = golden.f64("in.x");
        let x = cx.tensor(&x, &dims).unwrap();
        let places = match case {
            "max_dim1" => cx.argmax(&x, 1, false),
            "min_last" => cx.argmin(&x, -1, false),
            "topk" => cx.topk(&x, 3, -1, true).map(|t| t.1),
            "topk_dim1" => cx.topk(&x, 2, 1, true).map(|t| t.1),
            _ => cx.sort(&x, -1, false).map(|t| t.1),
        };
        assert_eq!(
            places.unwrap().to_f64_vec().unwrap(),
            golden.f64("indices").0,
            "{case}"
        );
    }
}
