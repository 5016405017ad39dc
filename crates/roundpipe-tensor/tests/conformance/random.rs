//! Random and counted tensors, dropout.

use roundpipe_tensor::{Cx, DType, Result, RngSite, bf16};

use crate::bed::{Lie, check, randn, worker};

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

#[test]
fn moments_and_bounds_in_every_type() -> Result<()> {
    for dtype in [DType::F64, DType::F32, DType::BF16, DType::F16] {
        let mut cx = Cx::infer(&worker(2));
        let x = cx.rand(dtype, &[300, 333])?.to_f64_vec()?;
        assert!(
            (mean(&x) - 0.5).abs() < 5e-3 && x.iter().all(|x| (0.0..1.0).contains(x)),
            "{dtype}"
        );
        let x = cx.uniform(dtype, &[100_000], -3.0, 5.0)?.to_f64_vec()?;
        assert!(
            (mean(&x) - 1.0).abs() < 3e-2 && x.iter().all(|x| (-3.0..5.0).contains(x)),
            "{dtype}"
        );
        let x = cx.normal(dtype, &[100_001], 2.0, 0.5)?.to_f64_vec()?;
        let spread = mean(&x.iter().map(|x| (x - 2.0).powi(2)).collect::<Vec<_>>()).sqrt();
        assert!(
            (mean(&x) - 2.0).abs() < 1e-2 && (spread - 0.5).abs() < 1e-2,
            "{dtype}: {spread}"
        );
    }
    let mut cx = Cx::infer(&worker(1));
    for dtype in [DType::F32, DType::I64, DType::Bool] {
        let x = cx.bernoulli(dtype, &[100_000], 0.3)?.to_f64_vec()?;
        assert!(
            (mean(&x) - 0.3).abs() < 1e-2 && x.iter().all(|x| *x == 0.0 || *x == 1.0),
            "{dtype}"
        );
    }
    assert_eq!(
        mean(&cx.bernoulli(DType::F32, &[999], 1.0)?.to_f64_vec()?),
        1.0
    );
    assert_eq!(
        mean(&cx.bernoulli(DType::F32, &[999], 0.0)?.to_f64_vec()?),
        0.0
    );
    Ok(())
}

/// A site names its numbers: the same site draws them again, with any number of threads, another
/// does not.
#[test]
fn the_same_place_draws_the_same_numbers() -> Result<()> {
    let draw = |threads, site| -> Result<Vec<Vec<f32>>> {
        let mut cx = Cx::train(&worker(threads)).at(RngSite {
            seed: 3,
            layer: site,
            ..RngSite::default()
        });
        let pair = [
            cx.randn(DType::F32, &[70_001])?,
            cx.rand(DType::F32, &[70_001])?,
        ];
        pair.iter().map(|x| x.to_vec::<f32>()).collect()
    };
    let first = draw(1, 1)?;
    assert_eq!(first, draw(2, 1)?);
    assert_ne!(first, draw(1, 2)?);
    // A prefix of a longer draw is the shorter draw: elements depend on their index alone.
    let mut cx = Cx::train(&worker(1)).at(RngSite {
        seed: 3,
        layer: 1,
        ..RngSite::default()
    });
    assert_eq!(cx.randn(DType::F32, &[7])?.to_vec::<f32>()?, first[0][..7]);
    Ok(())
}

#[test]
fn dropout_keeps_the_mean_and_repeats_in_backward() -> Result<()> {
    for lie in [Lie::Dense, Lie::Transposed, Lie::CutOut] {
        check("dropout", &[randn(1, &[7, 9]).lying(lie)], |cx, x| {
            Ok(vec![cx.dropout(&x[0], 0.25)?])
        });
    }
    let mut cx = Cx::train(&worker(2));
    let x = cx.ones(DType::BF16, &[300, 401])?;
    let x = cx.input(&x)?;
    let y = cx.dropout(&x, 0.25)?;
    let kept = y.to_vec::<bf16>()?;
    let scale = bf16::from_f64(4.0 / 3.0);
    assert!(kept.iter().all(|y| *y == scale || y.to_f32() == 0.0));
    let share = kept.iter().filter(|y| **y == scale).count() as f64 / kept.len() as f64;
    assert!((share - 0.75).abs() < 5e-3, "{share}");
    let one = cx.ones_like(&y)?;
    let grads = cx.backward_from(&[(y, one)])?;
    assert_eq!(
        grads.of(&x).unwrap().to_vec::<bf16>()?,
        kept,
        "the gradient passes where the value passed"
    );
    Ok(())
}

#[test]
fn dropout_at_the_ends() -> Result<()> {
    let mut cx = Cx::train(&worker(1));
    let x = cx.randn(DType::F32, &[50])?;
    assert_eq!(cx.dropout(&x, 0.0)?.to_vec::<f32>()?, x.to_vec::<f32>()?);
    assert_eq!(cx.dropout(&x, 1.0)?.to_vec::<f32>()?, [0.0; 50]);
    let mut cx = Cx::infer(&roundpipe_tensor::Worker::of(&x));
    assert_eq!(cx.dropout(&x, 0.5)?.to_vec::<f32>()?, x.to_vec::<f32>()?);
    Ok(())
}

#[test]
fn counting() -> Result<()> {
    let mut cx = Cx::infer(&worker(1));
    assert_eq!(
        cx.arange(DType::I64, 2.0, 9.0, 3.0)?.to_vec::<i64>()?,
        [2, 5, 8]
    );
    assert_eq!(
        cx.arange(DType::I32, 3.0, 0.0, -1.0)?.to_vec::<i32>()?,
        [3, 2, 1]
    );
    assert_eq!(
        cx.arange(DType::F32, 0.0, 1.0, 0.25)?.to_vec::<f32>()?,
        [0.0, 0.25, 0.5, 0.75]
    );
    assert_eq!(cx.arange(DType::U8, 0.0, 0.0, 1.0)?.dims(), [0]);
    let long = cx.arange(DType::F32, 0.0, 70_000.0, 1.0)?.to_vec::<f32>()?;
    assert!(long.iter().enumerate().all(|(i, x)| *x == i as f32));
    Ok(())
}

#[test]
fn refusals_name_the_operation_and_what_it_got() -> Result<()> {
    let mut cx = Cx::train(&worker(1));
    let x = cx.zeros(DType::I32, &[2])?;
    let y = cx.zeros(DType::F32, &[2])?;
    let refusals = [
        (
            cx.rand(DType::I32, &[2]),
            "rand: i32 [2] is not supported; it makes floats",
        ),
        (
            cx.uniform(DType::F32, &[2], 1.0, 1.0),
            "uniform: no numbers from 1 up to below 1",
        ),
        (cx.dropout(&y, 1.5), "dropout: 1.5 is not a probability"),
        (
            cx.dropout(&x, 0.5),
            "dropout: i32 [2] is not supported; it takes floats",
        ),
        (
            cx.arange(DType::F32, 0.0, 1.0, 0.0),
            "arange: from 0 to 1 by 0 in f32",
        ),
        (
            cx.arange(DType::I32, 0.5, 1.0, 1.0),
            "arange: from 0.5 to 1 by 1 in i32",
        ),
        (
            cx.one_hot(&y, 3, DType::F32),
            "one_hot: f32 [2] is not supported; it takes integers",
        ),
    ];
    for (have, want) in refusals {
        assert_eq!(have.unwrap_err().to_string(), want);
    }
    Ok(())
}
