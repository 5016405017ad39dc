//! Elementwise arithmetic, comparisons and choices.

use roundpipe_tensor::{Cx, DType, Result, Tensor, bf16, f16};

use crate::bed::{
    Input, Lie, Strict, check, check_with, fixed, noise, randn, run, upload, values, worker,
};
use crate::golden;

type Two = fn(&mut Cx, &Tensor, &Tensor) -> Result<Tensor>;
type One = fn(&mut Cx, &Tensor) -> Result<Tensor>;

const LIES: [Lie; 3] = [Lie::Dense, Lie::Transposed, Lie::CutOut];

/// Away from 0, where many functions have kinks or poles.
fn off_zero(x: f64) -> f64 {
    x + 0.03125f64.copysign(x)
}

fn positive(seed: u64, dims: &[usize]) -> Input {
    randn(seed, dims).map(|x| x.abs() + 0.5)
}

const PAIRS: [(&str, Two); 7] = [
    ("add", Cx::add),
    ("sub", Cx::sub),
    ("mul", Cx::mul),
    ("div", Cx::div),
    ("pow", Cx::pow),
    ("maximum", Cx::maximum),
    ("minimum", Cx::minimum),
];

#[test]
fn functions_of_two_on_every_lie() {
    for (name, f) in PAIRS {
        for lie in LIES {
            // The offset keeps the two from being equal, where the extrema have kinks.
            let a = positive(1, &[3, 5, 7]).map(|x| x + 0.0078125).lying(lie);
            let b = positive(2, &[3, 5, 7]).lying(lie);
            check(&format!("{name} {lie:?}"), &[a, b], |cx, x| {
                Ok(vec![f(cx, &x[0], &x[1])?])
            });
        }
    }
}

#[test]
fn functions_of_two_broadcast_both_ways() {
    let shapes: [[&[usize]; 2]; 8] = [
        [&[4, 6], &[6]],
        [&[6], &[4, 6]],
        [&[4, 6], &[4, 1]],
        [&[4, 1, 3], &[5, 1]],
        [&[], &[2, 3]],
        [&[2, 3], &[1, 1]],
        [&[0, 3], &[3]],
        [&[1], &[1]],
    ];
    for (name, f) in PAIRS {
        for [left, right] in shapes {
            let inputs = [positive(3, left).map(|x| x + 0.0078125), positive(4, right)];
            check(&format!("{name} {left:?} {right:?}"), &inputs, |cx, x| {
                Ok(vec![f(cx, &x[0], &x[1])?])
            });
        }
    }
}

const FUNCTIONS: [(&str, One); 22] = [
    ("neg", Cx::neg),
    ("abs", Cx::abs),
    ("sign", Cx::sign),
    ("exp", Cx::exp),
    ("sin", Cx::sin),
    ("cos", Cx::cos),
    ("tanh", Cx::tanh),
    ("sigmoid", Cx::sigmoid),
    ("erf", Cx::erf),
    ("relu", Cx::relu),
    ("silu", Cx::silu),
    ("gelu", Cx::gelu),
    ("gelu_tanh", Cx::gelu_tanh),
    ("softplus", Cx::softplus),
    ("square", Cx::square),
    ("recip", Cx::recip),
    ("leaky_relu", |cx, x| cx.leaky_relu(x, 0.1)),
    ("elu", |cx, x| cx.elu(x, 1.5)),
    ("affine", |cx, x| cx.affine(x, -1.5, 0.25)),
    ("add_scalar", |cx, x| cx.add_scalar(x, 0.25)),
    ("mul_scalar", |cx, x| cx.mul_scalar(x, -3.0)),
    ("clamp", |cx, x| cx.clamp(x, -1.01, 0.51)),
];

#[test]
fn functions_of_one() {
    for (name, f) in FUNCTIONS {
        for lie in LIES {
            let x = randn(5, &[3, 9, 5]).map(off_zero).lying(lie);
            check(&format!("{name} {lie:?}"), &[x], |cx, x| {
                Ok(vec![f(cx, &x[0])?])
            });
        }
        for dims in [&[][..], &[0], &[1, 1], &[33]] {
            let x = randn(6, dims).map(off_zero);
            check(&format!("{name} {dims:?}"), &[x], |cx, x| {
                Ok(vec![f(cx, &x[0])?])
            });
        }
    }
}

#[test]
fn functions_of_positive_numbers() {
    let functions: [(&str, One); 7] = [
        ("log", Cx::log),
        ("sqrt", Cx::sqrt),
        ("rsqrt", Cx::rsqrt),
        ("powf 2.5", |cx, x| cx.powf(x, 2.5)),
        ("powf -1.5", |cx, x| cx.powf(x, -1.5)),
        ("powf 2", |cx, x| cx.powf(x, 2.0)),
        ("powf 0", |cx, x| cx.powf(x, 0.0)),
    ];
    for (name, f) in functions {
        check(name, &[positive(7, &[5, 13])], |cx, x| {
            Ok(vec![f(cx, &x[0])?])
        });
    }
}

/// Whole numbers from floats have no slope, so differences say nothing near the steps.
#[test]
fn rounding() {
    let strict = Strict {
        differences: false,
        ..Strict::default()
    };
    let x = values(&[-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 0.25, -0.75], &[8]);
    let all =
        |cx: &mut Cx, x: &[Tensor]| Ok(vec![cx.round(&x[0])?, cx.floor(&x[0])?, cx.ceil(&x[0])?]);
    let outputs = run(
        &worker(1),
        std::slice::from_ref(&x),
        DType::F32,
        &all,
        false,
    )
    .unwrap()
    .outputs;
    assert_eq!(outputs[0], [-2.0, -2.0, 0.0, 0.0, 2.0, 2.0, 0.0, -1.0]);
    assert_eq!(outputs[1], [-3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 0.0, -1.0]);
    assert_eq!(outputs[2], [-2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 1.0, 0.0]);
    check_with("round", &[x], strict, all);
}

/// More than one task of more than one block, with a ragged end.
#[test]
fn large_tensors_in_every_broadcast_pattern() {
    // The scalar's gradient is a sum of 70,000 rounded numbers of either sign.
    let strict = Strict {
        differences: false,
        slack: 4.0,
        ..Strict::default()
    };
    for (rows, columns) in [(70, 1031), (1031, 70), (40_000, 2)] {
        let inputs = [
            randn(8, &[rows, columns]),
            randn(9, &[columns]),
            randn(10, &[rows, 1]),
            randn(11, &[]),
        ];
        check_with(
            &format!("large {rows} {columns}"),
            &inputs,
            strict,
            |cx, x| {
                let y = cx.mul(&x[0], &x[1])?;
                let y = cx.add(&y, &x[2])?;
                let y = cx.sub(&y, &x[3])?;
                Ok(vec![cx.silu(&y)?])
            },
        );
    }
}

/// The gradient of a tie goes half to each side, as in PyTorch.
#[test]
fn ties_share_their_gradient() -> Result<()> {
    for f in [Cx::maximum, Cx::minimum] as [Two; 2] {
        let mut cx = Cx::train(&worker(1));
        let a = cx.tensor(&[1.0f32, 2.0], &[2])?;
        let (a, b) = (cx.input(&a)?, cx.input(&a)?);
        let y = f(&mut cx, &a, &b)?;
        let one = cx.ones_like(&y)?;
        let grads = cx.backward_from(&[(y, one)])?;
        assert_eq!(grads.of(&a).unwrap().to_vec::<f32>()?, [0.5, 0.5]);
        assert_eq!(grads.of(&b).unwrap().to_vec::<f32>()?, [0.5, 0.5]);
    }
    Ok(())
}

#[test]
fn extremes_and_clamps_keep_nan() -> Result<()> {
    let mut cx = Cx::infer(&worker(1));
    let a = cx.tensor(&[f32::NAN, 1.0, f32::NAN, 3.0], &[4])?;
    let b = cx.tensor(&[1.0, f32::NAN, f32::NAN, 2.0], &[4])?;
    let bits = |t: Tensor| -> Result<Vec<bool>> {
        Ok(t.to_vec::<f32>()?.iter().map(|x| x.is_nan()).collect())
    };
    assert_eq!(bits(cx.maximum(&a, &b)?)?, [true, true, true, false]);
    assert_eq!(bits(cx.minimum(&a, &b)?)?, [true, true, true, false]);
    assert_eq!(bits(cx.clamp(&a, 0.0, 2.0)?)?, [true, false, true, false]);
    assert_eq!(bits(cx.relu(&a)?)?, [true, false, true, false]);
    let clamped = cx.clamp(&b, 5.0, 4.0)?.to_vec::<f32>()?;
    assert_eq!([clamped[0], clamped[3]], [4.0, 4.0], "the upper bound wins");
    Ok(())
}

/// A power whose base is 0 has a finite gradient wherever the power itself is smooth.
#[test]
fn powers_of_zero() -> Result<()> {
    let mut cx = Cx::train(&worker(1));
    let (a, b) = (
        cx.tensor(&[0.0f64, 0.0, 2.0], &[3])?,
        cx.tensor(&[2.0f64, 0.0, 0.0], &[3])?,
    );
    let (a, b) = (cx.input(&a)?, cx.input(&b)?);
    let y = cx.pow(&a, &b)?;
    assert_eq!(y.to_vec::<f64>()?, [0.0, 1.0, 1.0]);
    let one = cx.ones_like(&y)?;
    let grads = cx.backward_from(&[(y, one)])?;
    assert_eq!(grads.of(&a).unwrap().to_vec::<f64>()?, [0.0, 0.0, 0.0]);
    assert_eq!(
        grads.of(&b).unwrap().to_vec::<f64>()?,
        [0.0, 0.0, 2.0f64.ln()]
    );
    Ok(())
}

#[test]
fn integers_wrap_and_never_fault() -> Result<()> {
    let mut cx = Cx::infer(&worker(1));
    let a = cx.tensor(&[i32::MAX, i32::MIN, 7, -7], &[4])?;
    let b = cx.tensor(&[1, -1, 0, 2], &[4])?;
    let vec = |t: Tensor| t.to_vec::<i32>();
    assert_eq!(vec(cx.add(&a, &b)?)?, [i32::MIN, i32::MAX, 7, -5]);
    assert_eq!(vec(cx.sub(&a, &b)?)?, [i32::MAX - 1, i32::MIN + 1, 7, -9]);
    assert_eq!(vec(cx.mul(&a, &b)?)?, [i32::MAX, i32::MIN, 0, -14]);
    assert_eq!(vec(cx.div(&a, &b)?)?, [i32::MAX, i32::MIN, 0, -3]);
    assert_eq!(vec(cx.maximum(&a, &b)?)?, [i32::MAX, -1, 7, 2]);
    assert_eq!(vec(cx.pow(&b, &a)?)?, [1, 1, 0, 0]);
    assert_eq!(vec(cx.affine(&b, 3.0, -1.0)?)?, [2, -4, -1, 5]);
    assert_eq!(vec(cx.clamp(&b, f64::NEG_INFINITY, 1.0)?)?, [1, -1, 0, 1]);
    assert_eq!(vec(cx.abs(&b)?)?, [1, 1, 0, 2]);
    let wide = cx.tensor(&[i64::MIN, 3, i64::MAX], &[3])?;
    let by = cx.tensor(&[-1i64, 0, 2], &[3])?;
    assert_eq!(
        cx.div(&wide, &by)?.to_vec::<i64>()?,
        [i64::MIN, 0, i64::MAX / 2]
    );
    let small = cx.tensor(&[200u8, 5], &[2])?;
    assert_eq!(cx.add(&small, &small)?.to_vec::<u8>()?, [144, 10]);
    let unsigned = cx.tensor(&[1u32, 5], &[2])?;
    let other = cx.tensor(&[2u32, 4], &[2])?;
    assert_eq!(cx.sub(&unsigned, &other)?.to_vec::<u32>()?, [u32::MAX, 1]);
    Ok(())
}

/// Every type to every type, from dense and from strided memory, against Rust's own conversions.
#[test]
fn casts_between_all_types() -> Result<()> {
    let mut cx = Cx::infer(&worker(2));
    let whole = [0.0, 1.0, 2.0, 7.0, 100.0, 255.0];
    for from in DType::ALL {
        for to in DType::ALL {
            let x = upload(&mut cx, &whole, &[2, 3], from)?;
            let held = x.to_f64_vec()?;
            let flag = |v: &f64| {
                if to == DType::Bool {
                    f64::from(u8::from(*v != 0.0))
                } else {
                    *v
                }
            };
            let want: Vec<f64> = held.iter().map(flag).collect();
            assert_eq!(cx.cast(&x, to)?.to_f64_vec()?, want, "{from} to {to}");
            let turned = cx.transpose(&x, 0, 1)?;
            let turned = cx.cast(&turned, to)?;
            let back = cx.transpose(&turned, 0, 1)?;
            assert_eq!(back.to_f64_vec()?, want, "strided {from} to {to}");
        }
    }
    let x = cx.tensor(&[-1.5f32, 1e20, f32::NAN, 0.5, 300.0, -0.0], &[6])?;
    assert_eq!(
        cx.cast(&x, DType::I32)?.to_vec::<i32>()?,
        [-1, i32::MAX, 0, 0, 300, 0]
    );
    assert_eq!(
        cx.cast(&x, DType::U8)?.to_vec::<u8>()?,
        [0, 255, 0, 0, 255, 0]
    );
    assert_eq!(
        cx.cast(&x, DType::Bool)?.to_vec::<u8>()?,
        [1, 1, 1, 1, 1, 0]
    );
    let exact = cx.tensor(&[i64::MAX, -1], &[2])?;
    assert_eq!(
        cx.cast(&exact, DType::U32)?.to_vec::<u32>()?,
        [u32::MAX, u32::MAX]
    );
    Ok(())
}

#[test]
fn narrow_floats_round_once_to_nearest_even() -> Result<()> {
    let mut cx = Cx::infer(&worker(1));
    let numbers: Vec<f32> = noise(12, 3000)
        .iter()
        .map(|x| (x * 1.234567).exp() as f32)
        .collect();
    let x = cx.tensor(&numbers, &[3000])?;
    let want: Vec<bf16> = numbers.iter().map(|v| bf16::from_f32(*v)).collect();
    assert_eq!(cx.cast(&x, DType::BF16)?.to_vec::<bf16>()?, want);
    let want: Vec<f16> = numbers.iter().map(|v| f16::from_f32(*v)).collect();
    assert_eq!(cx.cast(&x, DType::F16)?.to_vec::<f16>()?, want);
    Ok(())
}

#[test]
fn comparisons_in_every_type() -> Result<()> {
    let mut cx = Cx::infer(&worker(1));
    let tests: [(&str, Two, [u8; 3]); 6] = [
        ("eq", Cx::eq, [0, 1, 0]),
        ("ne", Cx::ne, [1, 0, 1]),
        ("lt", Cx::lt, [1, 0, 0]),
        ("le", Cx::le, [1, 1, 0]),
        ("gt", Cx::gt, [0, 0, 1]),
        ("ge", Cx::ge, [0, 1, 1]),
    ];
    for dtype in DType::ALL {
        let (a, b) = match dtype {
            DType::Bool => ([0.0, 1.0, 1.0], [1.0, 1.0, 0.0]),
            _ => ([1.0, 2.0, 3.0], [2.0, 2.0, 2.0]),
        };
        let (a, b) = (
            upload(&mut cx, &a, &[3], dtype)?,
            upload(&mut cx, &b, &[3], dtype)?,
        );
        for (name, f, want) in tests {
            assert_eq!(f(&mut cx, &a, &b)?.to_vec::<u8>()?, want, "{name} {dtype}");
        }
    }
    let x = cx.tensor(&[1i64, 2, 3], &[3])?;
    assert_eq!(cx.gt_scalar(&x, 1.0)?.to_vec::<u8>()?, [0, 1, 1]);
    let nan = cx.tensor(&[f32::NAN], &[1])?;
    assert_eq!(
        cx.ne(&nan, &nan)?.to_vec::<u8>()?,
        [1],
        "NaN differs from itself"
    );
    Ok(())
}

#[test]
fn logic() -> Result<()> {
    let mut cx = Cx::infer(&worker(1));
    let a = cx.tensor_bool(&[false, false, true, true], &[4])?;
    let b = cx.tensor_bool(&[false, true, false, true], &[4])?;
    assert_eq!(cx.logical_and(&a, &b)?.to_vec::<u8>()?, [0, 0, 0, 1]);
    assert_eq!(cx.logical_or(&a, &b)?.to_vec::<u8>()?, [0, 1, 1, 1]);
    assert_eq!(cx.logical_xor(&a, &b)?.to_vec::<u8>()?, [0, 1, 1, 0]);
    assert_eq!(cx.logical_not(&a)?.to_vec::<u8>()?, [1, 1, 0, 0]);
    Ok(())
}

#[test]
fn choices_and_their_gradients() {
    let cond = fixed(DType::Bool, &[1, 0, 0, 1, 1, 0], &[2, 3]);
    for lie in LIES {
        let inputs = [
            cond.clone().lying(lie),
            randn(13, &[4, 2, 3]).lying(lie),
            randn(14, &[3]),
        ];
        check("where_cond", &inputs, |cx, x| {
            Ok(vec![cx.where_cond(&x[0], &x[1], &x[2])?])
        });
        check("where_cond, broadcast condition", &inputs, |cx, x| {
            let cond = cx.narrow(&x[0], 0, 0, 1)?;
            Ok(vec![cx.where_cond(&cond, &x[2], &x[1])?])
        });
        check("masked_fill", &inputs, |cx, x| {
            Ok(vec![cx.masked_fill(&x[1], &x[0], -3.0)?])
        });
    }
}

#[test]
fn refusals_name_the_operation_and_what_it_got() -> Result<()> {
    let mut cx = Cx::infer(&worker(1));
    let a = cx.zeros(DType::F32, &[2, 3])?;
    let b = cx.zeros(DType::F32, &[4])?;
    let i = cx.zeros(DType::I32, &[2, 3])?;
    let t = cx.zeros(DType::Bool, &[2, 3])?;
    let refusals = [
        (
            cx.sub(&a, &b),
            "sub: shapes [2, 3] and [4] do not fit together",
        ),
        (
            cx.mul(&a, &i),
            "mul: f32 [2, 3] and i32 [2, 3] differ in dtype; convert one with `cast`",
        ),
        (
            cx.add(&t, &t),
            "add: bool [2, 3] is not supported; convert it with `cast`",
        ),
        (
            cx.exp(&i),
            "exp: i32 [2, 3] is not supported; it takes floats",
        ),
        (
            cx.logical_not(&a),
            "logical_not: f32 [2, 3] is not supported; it takes bool",
        ),
        (
            cx.affine(&i, 0.5, 0.0),
            "affine: 0.5 is not a whole number, but i32 [2, 3] holds those",
        ),
        (cx.clamp(&a, f64::NAN, 1.0), "clamp: bounds NaN and 1"),
        (
            cx.where_cond(&a, &a, &a),
            "where_cond: f32 [2, 3] is not supported; it takes bool",
        ),
        (
            cx.masked_fill(&b, &t, 0.0),
            "masked_fill: shapes [4] and [2, 3] do not fit together",
        ),
    ];
    for (have, want) in refusals {
        assert_eq!(have.unwrap_err().to_string(), want);
    }
    Ok(())
}

/// Values and gradients of PyTorch, broadcasting included.
#[test]
fn golden_arithmetic() {
    let file = golden::open("general_ops");
    let one: [(&str, One); 22] = [
        ("abs", Cx::abs),
        ("clamp", |cx, x| cx.clamp(x, -0.6, 0.9)),
        ("cos", Cx::cos),
        ("elu", |cx, x| cx.elu(x, 1.0)),
        ("elu_alpha", |cx, x| cx.elu(x, 0.7)),
        ("erf", Cx::erf),
        ("exp", Cx::exp),
        ("gelu", Cx::gelu),
        ("gelu_tanh", Cx::gelu_tanh),
        ("leaky_relu", |cx, x| cx.leaky_relu(x, 0.01)),
        ("log", Cx::log),
        ("pow_2_5", |cx, x| cx.powf(x, 2.5)),
        ("pow_3", |cx, x| cx.powf(x, 3.0)),
        ("pow_neg_1_5", |cx, x| cx.powf(x, -1.5)),
        ("reciprocal", Cx::recip),
        ("relu", Cx::relu),
        ("rsqrt", Cx::rsqrt),
        ("sigmoid", Cx::sigmoid),
        ("silu", Cx::silu),
        ("sin", Cx::sin),
        ("softplus", Cx::softplus),
        ("sqrt", Cx::sqrt),
    ];
    for (case, f) in one {
        file.case(case).check(|cx, x| f(cx, x.of("in.x")));
    }
    let two: [(&str, Two); 8] = [
        ("add_row", Cx::add),
        ("sub_col", Cx::sub),
        ("mul_col", Cx::mul),
        ("mul_outer", Cx::mul),
        ("div_row", Cx::div),
        ("pow_tensor", Cx::pow),
        ("maximum", Cx::maximum),
        ("minimum_row", Cx::minimum),
    ];
    for (case, f) in two {
        file.case(case)
            .check(|cx, x| f(cx, x.of("in.x"), x.of("in.y")));
    }
    file.case("tanh").check(|cx, x| cx.tanh(x.of("in.x")));
    file.case("where").check(|cx, x| {
        let cond = cx.cast(x.of("in.mask"), DType::Bool)?;
        cx.where_cond(&cond, x.of("in.x"), x.of("in.y"))
    });
}
