//! Attention: every variant against finite differences and PyTorch, and what packing must not
//! change.

use roundpipe_tensor::ops::Attention;
use roundpipe_tensor::{Bytes, Cpu, Cx, DType, Result, Tensor, Worker, bf16};

use crate::bed::{
    self, Input, Lie, Strict, check, check_with, close, fixed, noise, run, values, worker,
};
use crate::golden;

const FULL: Attention<'_> = Attention {
    scale: None,
    causal: false,
    window: None,
    sinks: None,
    lens: None,
    any_order: false,
};
const CAUSAL: Attention<'_> = Attention {
    causal: true,
    ..FULL
};

/// Inputs q, k, v of these sizes, quiet enough that softmax does not saturate.
fn qkv(
    batch: usize,
    sq: usize,
    sk: usize,
    heads: (usize, usize),
    d: usize,
    dv: usize,
) -> Vec<Input> {
    let input = |seed, dims: [usize; 4]| values(&quiet(seed, dims.iter().product()), &dims);
    vec![
        input(1, [batch, sq, heads.0, d]),
        input(2, [batch, sk, heads.1, d]),
        input(3, [batch, sk, heads.1, dv]),
    ]
}

fn quiet(seed: u64, count: usize) -> Vec<f64> {
    noise(seed, count).into_iter().map(|x| x / 2.0).collect()
}

/// Attention over the inputs q, k, v and, if there, sinks, then cumulative lengths.
fn attend(how: Attention<'static>) -> impl Fn(&mut Cx, &[Tensor]) -> Result<Vec<Tensor>> {
    move |cx, x| {
        let (sinks, lens) = match x.len() {
            4 | 6 => (Some(&x[3]), x.get(4).zip(x.get(5))),
            _ => (None, x.get(3).zip(x.get(4))),
        };
        Ok(vec![cx.attention(
            &x[0],
            &x[1],
            &x[2],
            &Attention { sinks, lens, ..how },
        )?])
    }
}

#[test]
fn variants() {
    check("full", &qkv(2, 5, 7, (2, 2), 8, 8), attend(FULL));
    check("causal", &qkv(2, 9, 9, (4, 2), 8, 8), attend(CAUSAL));
    check(
        "scale",
        &qkv(1, 6, 6, (3, 1), 4, 4),
        attend(Attention {
            scale: Some(0.3),
            ..CAUSAL
        }),
    );
    check(
        "window",
        &qkv(1, 9, 9, (2, 1), 4, 5),
        attend(Attention {
            window: Some(3),
            ..CAUSAL
        }),
    );
    check(
        "window alone",
        &qkv(1, 9, 9, (2, 1), 4, 5),
        attend(Attention {
            window: Some(3),
            ..FULL
        }),
    );
    check(
        "wide window",
        &qkv(1, 4, 4, (2, 1), 4, 5),
        attend(Attention {
            window: Some(usize::MAX),
            ..CAUSAL
        }),
    );
    check("causal end", &qkv(2, 3, 8, (2, 2), 5, 3), attend(CAUSAL));
}

#[test]
fn odd_sizes() {
    check("one of all", &qkv(1, 1, 1, (1, 1), 1, 1), attend(CAUSAL));
    check("one query", &qkv(2, 1, 9, (2, 1), 3, 2), attend(CAUSAL));
    check("one key", &qkv(2, 5, 1, (2, 2), 3, 4), attend(FULL));
    check("wide heads", &qkv(1, 3, 4, (2, 1), 33, 17), attend(CAUSAL));
    check("no queries", &qkv(1, 0, 4, (2, 1), 4, 4), attend(CAUSAL));
    check("no keys", &qkv(1, 4, 0, (2, 1), 4, 4), attend(FULL));
    check("no batch", &qkv(0, 4, 4, (2, 1), 4, 4), attend(FULL));
    check("no heads", &qkv(1, 4, 4, (0, 0), 4, 4), attend(FULL));
    check("no width", &qkv(1, 4, 4, (1, 1), 0, 3), attend(FULL));
    check("no value", &qkv(1, 4, 4, (1, 1), 3, 0), attend(FULL));
}

/// Blocks are 64 queries by 128 keys: sizes around their borders, with all masks.
#[test]
fn block_borders() {
    let step = if bed::brief() { 2 } else { 1 };
    for (sq, sk) in [
        (65, 129),
        (63, 127),
        (200, 70),
        (64, 128),
        (130, 260),
        (1, 300),
    ]
    .into_iter()
    .step_by(step)
    {
        for causal in [false, true] {
            for window in [None, Some(1), Some(40), Some(150)]
                .into_iter()
                .step_by(step)
            {
                let how = Attention {
                    causal,
                    window,
                    ..FULL
                };
                let name = format!("{sq} by {sk}, causal {causal}, window {window:?}");
                let mut inputs = qkv(1, sq, sk, (2, 1), 5, 3);
                inputs.push(values(&quiet(4, 2), &[2]));
                let strict = Strict {
                    differences: causal && window == Some(40),
                    ..Strict::default()
                };
                check_with(&name, &inputs, strict, attend(how));
                let have = run(&worker(2), &inputs, DType::F64, &attend(how), true).unwrap();
                close(&name, &have.outputs, &[naive(sq, sk, &how)], 1e-13);
            }
        }
    }
}

/// Half precision at the widths of tensor cores, around the borders of their tiles: all masks,
/// scores that are turned around or do not count, sequences in a row.
#[test]
fn tensor_core_tiles() {
    let strict = Strict {
        differences: false,
        dtypes: &[DType::BF16, DType::F16],
        ..Strict::default()
    };
    let sizes = [
        (63, 63),
        (64, 64),
        (65, 129),
        (127, 128),
        (129, 129),
        (200, 70),
        (1, 300),
        (260, 260),
    ];
    let widths = [
        (64, 64),
        (128, 128),
        (96, 96),
        (40, 24),
        (128, 64),
        (32, 32),
    ];
    let hows = [
        CAUSAL,
        FULL,
        Attention {
            window: Some(40),
            ..CAUSAL
        },
        Attention {
            window: Some(150),
            ..FULL
        },
        Attention {
            scale: Some(-0.2),
            ..CAUSAL
        },
        Attention {
            scale: Some(0.0),
            ..CAUSAL
        },
    ];
    let widths = if bed::brief() { &widths[..2] } else { &widths };
    let step = if bed::brief() { 3 } else { 1 };
    for (i, (sq, sk)) in sizes.into_iter().enumerate().step_by(step) {
        for (j, how) in hows.into_iter().enumerate() {
            let (d, dv) = widths[(i + j) % widths.len()];
            let mut inputs = qkv(1, sq, sk, (4, 2), d, dv);
            if (i + j) % 2 == 0 {
                inputs.push(values(&quiet(4, 4), &[4]));
            }
            check_with(
                &format!("{sq} by {sk}, {d} and {dv} wide, {how:?}"),
                &inputs,
                strict,
                attend(how),
            );
        }
    }
    // Windows that are wide enough for large tiles.
    let wide = Attention {
        window: Some(520),
        ..CAUSAL
    };
    check_with(
        "a wide window",
        &qkv(1, 700, 900, (2, 1), 128, 128),
        strict,
        attend(wide),
    );
    check_with(
        "a wide window alone",
        &qkv(1, 900, 700, (2, 1), 64, 64),
        strict,
        attend(Attention {
            causal: false,
            ..wide
        }),
    );
    let mut inputs = qkv(1, 1000, 1000, (2, 1), 64, 64);
    inputs.extend([lens(&[0, 800, 1000]), lens(&[0, 800, 1000])]);
    check_with("wide windows in a row", &inputs, strict, attend(wide));
    for (d, how) in [(64, hows[0]), (128, hows[2]), (128, hows[1])] {
        let mut inputs = qkv(1, 330, 400, (4, 2), d, d);
        inputs.extend([
            lens(&[2, 2, 65, 194, 195, 320]),
            lens(&[0, 7, 71, 199, 199, 390]),
        ]);
        check_with(
            &format!("in a row, {d} wide, {how:?}"),
            &inputs,
            strict,
            attend(how),
        );
    }
}

/// softmax(q kᵀ) v with a sink, written as its definition, for the inputs of [`block_borders`].
fn naive(sq: usize, sk: usize, how: &Attention<'_>) -> Vec<f64> {
    let (heads, d, dv) = (2, 5, 3);
    let (q, k, v) = (
        quiet(1, sq * heads * d),
        quiet(2, sk * d),
        quiet(3, sk * dv),
    );
    let sinks = quiet(4, heads);
    let mut out = Vec::new();
    for (i, h) in (0..sq).flat_map(|i| (0..heads).map(move |h| (i, h))) {
        let at = i as isize + sk as isize - sq as isize;
        let seen =
            |j: isize| (!how.causal || j <= at) && how.window.is_none_or(|w| j > at - w as isize);
        let score = |j: usize| -> f64 {
            let q = &q[(i * heads + h) * d..][..d];
            q.iter().zip(&k[j * d..]).map(|(q, k)| q * k).sum::<f64>() / (d as f64).sqrt()
        };
        let weights: Vec<f64> = (0..sk)
            .map(|j| {
                if seen(j as isize) {
                    score(j).exp()
                } else {
                    0.0
                }
            })
            .collect();
        let sum = weights.iter().sum::<f64>() + sinks[h].exp();
        out.extend((0..dv).map(|c| (0..sk).map(|j| weights[j] * v[j * dv + c]).sum::<f64>() / sum));
    }
    out
}

#[test]
fn strided_operands() {
    for lie in [Lie::Transposed, Lie::CutOut] {
        let inputs: Vec<Input> = qkv(2, 4, 5, (2, 2), 4, 3)
            .into_iter()
            .map(|i| i.lying(lie))
            .collect();
        check(&format!("{lie:?}"), &inputs, attend(CAUSAL));
    }
    // Heads before rows, as other systems keep them.
    check("heads first", &qkv(2, 4, 2, (5, 5), 4, 4), |cx, x| {
        let turned = x
            .iter()
            .map(|t| cx.transpose(t, 1, 2))
            .collect::<Result<Vec<_>>>()?;
        Ok(vec![
            cx.attention(&turned[0], &turned[1], &turned[2], &FULL)?,
        ])
    });
}

#[test]
fn sinks() {
    let mut inputs = qkv(2, 7, 9, (4, 2), 4, 4);
    inputs.push(values(&quiet(4, 4), &[4]));
    check("sinks", &inputs, attend(CAUSAL));
    check(
        "sinks, window",
        &inputs,
        attend(Attention {
            window: Some(2),
            ..CAUSAL
        }),
    );
    inputs[0] = inputs[0].clone().constant();
    check("only some gradients", &inputs, attend(CAUSAL));
}

/// The first queries of a causal attention with more queries than keys see nothing.
#[test]
fn queries_that_see_nothing_give_zero() {
    let inputs = qkv(1, 7, 3, (2, 2), 4, 4);
    check("sees nothing", &inputs, attend(CAUSAL));
    let out = run(&worker(1), &inputs, DType::F32, &attend(CAUSAL), true).unwrap();
    let row = 2 * 4;
    assert!(
        out.outputs[0][..4 * row].iter().all(|x| *x == 0.0),
        "{:?}",
        out.outputs[0]
    );
    assert!(
        out.grads[0][..4 * row].iter().all(|x| *x == 0.0),
        "{:?}",
        out.grads[0]
    );
    assert!(
        out.outputs
            .iter()
            .chain(&out.grads)
            .flatten()
            .all(|x| x.is_finite())
    );
    let none = run(
        &worker(1),
        &inputs,
        DType::F32,
        &attend(Attention {
            window: Some(0),
            ..CAUSAL
        }),
        true,
    );
    assert!(none.unwrap().grads.iter().flatten().all(|x| *x == 0.0));
}

/// Scores far apart neither overflow nor turn into NaN.
#[test]
fn large_scores() {
    let mut inputs = qkv(1, 5, 5, (1, 1), 4, 4);
    inputs[0] = inputs[0].clone().map(|x| x * 100.0);
    let strict = Strict {
        differences: false,
        slack: 20.0,
        dtypes: &[DType::F32],
    };
    check_with("large", &inputs, strict, attend(CAUSAL));
}

fn lens(values: &[i64]) -> Input {
    fixed(DType::I32, values, &[values.len()])
}

#[test]
fn packed_sequences() {
    let mut inputs = qkv(1, 10, 13, (4, 2), 4, 3);
    inputs.push(values(&quiet(4, 4), &[4]));
    inputs.extend([lens(&[0, 3, 3, 4, 10]), lens(&[0, 2, 5, 6, 13])]);
    check("packed", &inputs, attend(CAUSAL));
    check(
        "packed, window",
        &inputs,
        attend(Attention {
            window: Some(2),
            ..CAUSAL
        }),
    );
    check("packed, full", &inputs, attend(FULL));
    // Rows before the first and after the last sequence attend to nothing.
    inputs[4] = lens(&[1, 4, 8]);
    inputs[5] = lens(&[2, 5, 9]);
    check("padded", &inputs, attend(CAUSAL));
    inputs[4] = lens(&[0]);
    inputs[5] = lens(&[0]);
    check("nothing packed", &inputs, attend(CAUSAL));
}

/// A row's bits depend on its own sequence alone: packed, alone and in a batch they are the same.
#[test]
fn packing_and_batching_change_no_bits() {
    for (dtype, width) in [(DType::F32, 9), (DType::BF16, 9), (DType::BF16, 64)] {
        packing_changes_no_bits(&worker(2), &worker(1), dtype, width);
    }
    // Widths of every kind of kernel, which are no sizes of a library.
    let Some((worker, _turn)) = bed::gpu_alone() else {
        return;
    };
    for (dtype, width) in [
        (DType::F32, 9),
        (DType::BF16, 9),
        (DType::BF16, 64),
        (DType::F16, 128),
    ] {
        packing_changes_no_bits(worker, worker, dtype, width);
    }
}

fn packing_changes_no_bits(worker: &Worker, other: &Worker, dtype: DType, d: usize) {
    let heads = 2;
    let sizes = [(1, 1), (70, 70), (64, 200), (130, 129)];
    let ends = |f: fn(&(usize, usize)) -> usize| -> Vec<i64> {
        std::iter::once(0)
            .chain(sizes.iter().scan(0, |at, s| {
                *at += f(s) as i64;
                Some(*at)
            }))
            .collect()
    };
    let (lens_q, lens_k) = (ends(|s| s.0), ends(|s| s.1));
    let total = |lens: &[i64]| *lens.last().unwrap() as usize;
    let mut all = qkv(1, total(&lens_q), total(&lens_k), (heads, heads), d, d);
    all.extend([lens(&lens_q), lens(&lens_k)]);
    let packed = run(worker, &all, dtype, &forward_only, true).unwrap();
    for (i, (sq, sk)) in sizes.into_iter().enumerate() {
        let part = |seed: u64, lens: &[i64], rows: usize, copies: usize| {
            let width = heads * d;
            let all = quiet(seed, total(lens) * width);
            let one = &all[lens[i] as usize * width..][..rows * width];
            values(&one.repeat(copies), &[copies, rows, heads, d])
        };
        for copies in [1, 3] {
            let alone = [
                part(1, &lens_q, sq, copies),
                part(2, &lens_k, sk, copies),
                part(3, &lens_k, sk, copies),
            ];
            let out = run(other, &alone, dtype, &forward_only, true).unwrap();
            for (t, lens, rows) in [(0, &lens_q, sq), (1, &lens_k, sk), (2, &lens_k, sk)] {
                let (at, len) = (lens[i] as usize * heads * d, rows * heads * d);
                let name =
                    format!("{dtype}, {d} wide, sequence {i}, {copies} copies, gradient {t}");
                assert!(
                    out.grads[t][..len] == packed.grads[t][at..at + len],
                    "{name}"
                );
            }
            let (at, len) = (lens_q[i] as usize * heads * d, sq * heads * d);
            let same = out.outputs[0][..len] == packed.outputs[0][at..at + len];
            assert!(same, "{dtype}, {d} wide, sequence {i}");
        }
    }
}

/// Lengths around the borders of tiles.
const LENGTHS: [usize; 9] = [1, 63, 64, 65, 127, 128, 129, 200, 300];

/// Ends of sequences of these lengths, one after the other.
fn ends(lengths: &[usize]) -> Vec<i64> {
    let sums = lengths.iter().scan(0, |at, length| {
        *at += *length as i64;
        Some(*at)
    });
    std::iter::once(0).chain(sums).collect()
}

/// Every result and gradient of packed sequences by itself, simple cases first: where a kernel is
/// wrong, the list of errors says which and from what size on.
#[test]
fn errors_of_packed_sequences() {
    let windowed = |window, causal| Attention {
        window: Some(window),
        causal,
        ..FULL
    };
    let cases: [(&[usize], &[usize], Attention<'_>); 10] = [
        (&[128], &[128], FULL),
        (&[128], &[128], CAUSAL),
        (&[512], &[512], CAUSAL),
        (&[700], &[700], CAUSAL),
        (&[300], &[200], CAUSAL),
        (&[60], &[333], FULL),
        (&[600], &[600], windowed(150, true)),
        (&LENGTHS, &LENGTHS, CAUSAL),
        (&LENGTHS, &LENGTHS, FULL),
        (&LENGTHS, &LENGTHS, windowed(40, true)),
    ];
    let gpu = bed::gpu_alone();
    let cpu = worker(2);
    let device = gpu.as_ref().map_or(&cpu, |(worker, _)| *worker);
    let step = if bed::brief() { 7 } else { 1 };
    let mut wrong = Vec::new();
    for (d, (queries, keys, how)) in [128, 64]
        .into_iter()
        .flat_map(|d| cases.map(|case| (d, case)))
        .step_by(step)
    {
        let (q_ends, k_ends) = (ends(queries), ends(keys));
        let (sq, sk) = (q_ends[queries.len()] as usize, k_ends[keys.len()] as usize);
        let mut inputs = qkv(1, sq, sk, (4, 2), d, d);
        inputs.extend([lens(&q_ends), lens(&k_ends)]);
        let want = run(&cpu, &inputs, DType::F64, &attend(how), true).unwrap();
        for (dtype, limit) in [(DType::BF16, 1e-2), (DType::F16, 1.5e-3)] {
            let have = run(device, &inputs, dtype, &attend(how), true).unwrap();
            let errors: Vec<f64> = (have.outputs.iter().chain(&have.grads))
                .zip(want.outputs.iter().chain(&want.grads))
                .map(|(have, want)| relative_error(have, want))
                .collect();
            if errors.iter().any(|error| error.is_nan() || *error > limit) {
                let (causal, window) = (how.causal, how.window);
                wrong.push(format!(
                    "{dtype}, {d} wide, {queries:?} by {keys:?}, causal {causal}, window {window:?}: \
                     errors of o, dq, dk, dv {errors:.5?}"
                ));
            }
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

fn relative_error(have: &[f64], want: &[f64]) -> f64 {
    let squares = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>();
    let error = squares(&mut have.iter().zip(want).map(|(have, want)| have - want));
    (error / squares(&mut want.iter().copied())).sqrt()
}

/// Sequences around the borders of tiles, packed and each alone in a row: the same bits. And a
/// sequence of nothing but NaN changes none of its neighbours, in either direction.
#[test]
fn neighbours_change_no_bits() {
    let gpu = bed::gpu_alone();
    let cpu = worker(2);
    let device = gpu.as_ref().map_or(&cpu, |(worker, _)| *worker);
    for (dtype, d) in [(DType::BF16, 128), (DType::F16, 64)] {
        neighbours_are_nothing(device, dtype, d);
    }
}

fn neighbours_are_nothing(worker: &Worker, dtype: DType, d: usize) {
    let all_ends = ends(&LENGTHS);
    let rows = all_ends[LENGTHS.len()] as usize;
    let whole = qkv(1, rows, rows, (2, 1), d, d);
    let with_lens = |mut inputs: Vec<Input>, ends: &[i64]| {
        inputs.extend([lens(ends), lens(ends)]);
        run(worker, &inputs, dtype, &forward_only, true).unwrap()
    };
    let packed = with_lens(whole.clone(), &all_ends);
    // Rows of a sequence in o, dq, dk, dv; queries have two heads and the others one.
    let part = |outcome: &bed::Outcome, first: usize, rows: usize| {
        let tensors = std::iter::once(&outcome.outputs[0]).chain(&outcome.grads);
        let parts = tensors.zip([2, 2, 1, 1]).map(|(values, heads)| {
            let width = heads * d;
            let values = &values[first * width..][..rows * width];
            values.iter().map(|x| x.to_bits()).collect::<Vec<_>>()
        });
        parts.collect::<Vec<_>>()
    };
    for (i, length) in LENGTHS.into_iter().enumerate() {
        let first = all_ends[i] as usize;
        let cut = |seed: u64, heads: usize| {
            let all = quiet(seed, rows * heads * d);
            let values_of = &all[first * heads * d..][..length * heads * d];
            values(values_of, &[1, length, heads, d])
        };
        let alone = with_lens(vec![cut(1, 2), cut(2, 1), cut(3, 1)], &[0, length as i64]);
        let same = part(&alone, 0, length) == part(&packed, first, length);
        assert!(same, "{dtype}, {d} wide: {length} rows alone and packed");
    }
    for poisoned in [0, 2, 5, 8] {
        let is_bad = |row: usize| {
            (all_ends[poisoned] as usize..all_ends[poisoned + 1] as usize).contains(&row)
        };
        let spoil = |seed: u64, heads: usize| {
            let mut all = quiet(seed, rows * heads * d);
            let width = heads * d;
            for (row, values) in all.chunks_mut(width).enumerate() {
                if is_bad(row) {
                    values.fill(f64::NAN);
                }
            }
            values(&all, &[1, rows, heads, d])
        };
        let spoiled = with_lens(vec![spoil(1, 2), spoil(2, 1), spoil(3, 1)], &all_ends);
        for (i, length) in LENGTHS.into_iter().enumerate() {
            let first = all_ends[i] as usize;
            let same = part(&spoiled, first, length) == part(&packed, first, length);
            let neighbour = LENGTHS[poisoned];
            assert!(
                same || i == poisoned,
                "{dtype}, {d} wide: {length} rows beside {neighbour} rows of NaN"
            );
        }
    }
}

/// Causal attention whose output's gradient is a function of the output, so that it is the same
/// however sequences are arranged.
fn forward_only(cx: &mut Cx, x: &[Tensor]) -> Result<Vec<Tensor>> {
    let lens = x.get(3).zip(x.get(4));
    let o = cx.attention(&x[0], &x[1], &x[2], &Attention { lens, ..CAUSAL })?;
    let twice = cx.mul(&o, &o)?;
    let loss = cx.sum_all(&twice)?;
    Ok(vec![o.detach(), loss])
}

#[test]
fn errors_name_the_operation_and_both_shapes() {
    let worker = worker(1);
    let mut cx = Cx::train(&worker);
    let mut zeros = |dims: &[usize]| cx.zeros(DType::F32, dims).unwrap();
    let (q, k, v) = (
        zeros(&[1, 4, 4, 8]),
        zeros(&[1, 6, 2, 8]),
        zeros(&[1, 6, 2, 8]),
    );
    let (odd, flat, two) = (zeros(&[1, 6, 3, 8]), zeros(&[6, 8]), zeros(&[2]));
    let wide = zeros(&[2, 4, 4, 8]);
    let text = |r: Result<Tensor>| r.unwrap_err().to_string();
    let error = text(cx.attention(&q, &odd, &odd, &FULL));
    assert_eq!(
        error,
        "attention: shapes [1, 4, 4, 8] and [1, 6, 3, 8] do not fit together"
    );
    assert!(text(cx.attention(&q, &flat, &v, &FULL)).contains("[6, 8]"));
    assert!(text(cx.attention(&q, &k, &odd, &FULL)).contains("[1, 6, 3, 8]"));
    assert!(text(cx.attention(&wide, &k, &v, &FULL)).contains("[2, 4, 4, 8]"));
    let sinks = Some(&two);
    assert!(text(cx.attention(&q, &k, &v, &Attention { sinks, ..FULL })).contains("[2]"));
    let half = cx.tensor(&[bf16::ONE; 96], &[1, 6, 2, 8]).unwrap();
    assert!(text(cx.attention(&q, &half, &v, &FULL)).contains("bf16"));
    let long = cx.tensor(&[0i64, 4], &[2]).unwrap();
    let lens = Some((&long, &long));
    assert!(text(cx.attention(&q, &k, &v, &Attention { lens, ..FULL })).contains("i32"));
    // Values are checked where they are read.
    for (q_ends, k_ends) in [
        ([0, 5], [0, 6]),
        ([0, 4], [0, 7]),
        ([3, 1], [0, 6]),
        ([-1, 4], [0, 6]),
    ] {
        let lens = (
            cx.tensor::<i32>(&q_ends, &[2]).unwrap(),
            cx.tensor::<i32>(&k_ends, &[2]).unwrap(),
        );
        let lens = Some((&lens.0, &lens.1));
        let error = text(cx.attention(&q, &k, &v, &Attention { lens, ..FULL }));
        assert!(error.contains("cumulative length"), "{error}");
    }
}

/// The scores of 4,096 rows would take 64 MiB; forward and backward together stay far below.
#[test]
fn memory_is_linear_in_the_sequence() {
    let peak = |rows: usize, dtype: DType| {
        let worker = Worker::new(Cpu::new(Some(2)).unwrap(), Bytes::mib(64)).unwrap();
        let mut cx = Cx::train(&worker);
        let dims = [1, rows, 1, 16];
        let x = bed::upload(&mut cx, &noise(1, rows * 16), &dims, dtype).unwrap();
        let inputs = [0; 3].map(|_| cx.input(&x).unwrap());
        let o = cx
            .attention(&inputs[0], &inputs[1], &inputs[2], &CAUSAL)
            .unwrap();
        cx.backward_from(&[(o, x)]).unwrap();
        worker.usage().high_water.0
    };
    for dtype in [DType::F32, DType::BF16] {
        let (short, long) = (peak(1024, dtype), peak(4096, dtype));
        assert!(
            long <= 4 * short + 4096,
            "{dtype}: {short} bytes for 1,024 rows, {long} for 4,096"
        );
        assert!(long < 8 << 20, "{dtype}: {long} bytes");
    }
}

/// All cases that PyTorch computed.
#[test]
fn golden() {
    let end = Attention {
        window: Some(4),
        ..CAUSAL
    };
    let cases = [
        ("causal", CAUSAL),
        (
            "causal_scale",
            Attention {
                scale: Some(0.3),
                ..CAUSAL
            },
        ),
        ("window", end),
        (
            "window_one",
            Attention {
                window: Some(1),
                ..CAUSAL
            },
        ),
        ("sinks", CAUSAL),
        ("window_sinks", end),
        ("full_cross", FULL),
        ("full_cross_long", FULL),
        ("causal_end", CAUSAL),
        ("causal_end_window_sinks", end),
        ("varlen", CAUSAL),
        (
            "varlen_window",
            Attention {
                window: Some(3),
                ..CAUSAL
            },
        ),
        ("varlen_full", FULL),
    ];
    let file = golden::open("attention");
    for (name, how) in cases {
        let case = file.case(name);
        let attend = |cx: &mut Cx, inputs: &golden::Inputs| golden_case(cx, inputs, &how);
        case.check_in(DType::F64, 1e-7, &attend);
        // With one key the gradients of queries and keys are zero by mathematics, compared
        // absolutely.
        case.check_in(
            DType::F32,
            if name == "window_one" { 1e-4 } else { 2e-6 },
            &attend,
        );
    }
}

/// Packed sequences lie as `[rows, heads, width]` in the file.
fn golden_case(cx: &mut Cx, inputs: &golden::Inputs, how: &Attention<'_>) -> Result<Tensor> {
    let [q, k, v] = ["in.q", "in.k", "in.v"].map(|name| inputs.of(name));
    let Some(lens) = inputs.get("in.cu_seqlens") else {
        return cx.attention(
            q,
            k,
            v,
            &Attention {
                sinks: inputs.get("in.sinks"),
                ..*how
            },
        );
    };
    let mut batch =
        |t: &Tensor| cx.reshape(t, &[1, -1, t.dims()[1] as isize, t.dims()[2] as isize]);
    let (q, k, v) = (batch(q)?, batch(k)?, batch(v)?);
    let lens = cx.cast(lens, DType::I32)?;
    let o = cx.attention(
        &q,
        &k,
        &v,
        &Attention {
            lens: Some((&lens, &lens)),
            ..*how
        },
    )?;
    cx.reshape(&o, &[-1, o.dims()[2] as isize, o.dims()[3] as isize])
}

/// Sizes that the libraries of GPUs take: whole blocks of the usual widths, with grouped heads.
#[test]
fn library_sizes() {
    let strict = Strict {
        differences: false,
        dtypes: &[DType::BF16, DType::F16],
        ..Strict::default()
    };
    for d in [64, 128] {
        for causal in [false, true] {
            let how = Attention { causal, ..FULL };
            check_with(
                &format!("256 by 256, {d} wide, causal {causal}"),
                &qkv(2, 256, 256, (4, 2), d, d),
                strict,
                attend(how),
            );
            let mut inputs = qkv(2, 256, 256, (4, 2), d, d);
            inputs.push(values(&[0.5, -1.0, 2.0, 3.5], &[4]));
            let name = format!("256 by 256, {d} wide, causal {causal}, sinks");
            check_with(&name, &inputs, strict, attend(how));
        }
    }
}

/// Sequences so long that a GPU's library takes them in blocks of queries and keys, the last of
/// them shorter: the same gradients as from kernels that go over them whole, which packed sequences
/// have.
#[test]
fn long_sequences_in_blocks() {
    let Some((worker, _turn)) = bed::gpu_alone() else {
        return;
    };
    let long = if bed::brief() { 640 } else { 16768 };
    for (queries, causal, d) in [(long, true, 64), (long, true, 128), (256, false, 64)] {
        let name = format!("{queries} by {long}, {d} wide, causal {causal}");
        let attend = attend(Attention { causal, ..FULL });
        let mut inputs = qkv(1, queries, long, (4, 2), d, d);
        let one = run(worker, &inputs, DType::BF16, &attend, true).unwrap();
        let again = run(worker, &inputs, DType::BF16, &attend, true).unwrap();
        assert!(one == again, "{name}: a GPU does not repeat itself");
        inputs.extend([lens(&[0, queries as i64]), lens(&[0, long as i64])]);
        let whole = run(worker, &inputs, DType::BF16, &attend, true).unwrap();
        close(
            &format!("{name}, output"),
            &one.outputs,
            &whole.outputs,
            1e-2,
        );
        close(&format!("{name}, gradient"), &one.grads, &whole.grads, 1e-2);
    }
}

/// Blocks of a GPU that add to the same gradients do so in one order: the same bits every time, with
/// one block of keys and with many, for groups of one head and of several; and close to what packed
/// sequences get, which have kernels without such sums.
#[test]
fn exact_gradients_repeat() {
    let Some((worker, _turn)) = bed::gpu_alone() else {
        return;
    };
    let sizes = [
        (128, (1, 1)),
        (256, (6, 2)),
        (384, (8, 1)),
        (1024, (16, 8)),
        (4096, (32, 4)),
    ];
    let count = if bed::brief() { 2 } else { sizes.len() };
    for (rows, heads) in sizes.into_iter().take(count) {
        for dtype in [DType::BF16, DType::F16] {
            let name = format!("{rows} rows, {heads:?} heads, {dtype}");
            let mut inputs = qkv(1, rows, rows, heads, 128, 128);
            let once = || run(worker, &inputs, dtype, &attend(CAUSAL), true).unwrap();
            let first = once();
            for _ in 0..4 {
                assert!(once() == first, "{name}: a GPU does not repeat itself");
            }
            let all = lens(&[0, rows as i64]);
            inputs.extend([all.clone(), all]);
            let packed = run(worker, &inputs, dtype, &attend(CAUSAL), true).unwrap();
            close(&name, &first.grads, &packed.grads, 1e-2);
        }
    }
}

/// Where any order of additions will do, gradients are the same but for rounding.
#[test]
fn any_order_is_as_close() {
    let Some((worker, _turn)) = bed::gpu_alone() else {
        return;
    };
    let count = if bed::brief() { 1 } else { 3 };
    let sizes = [
        (256, 3, (4, 2), 64),
        (1024, 2, (4, 4), 128),
        (4096, 1, (4, 1), 128),
    ];
    for (rows, batch, heads, d) in sizes.into_iter().take(count) {
        for causal in [false, true] {
            let how = Attention { causal, ..FULL };
            let inputs = qkv(batch, rows, rows, heads, d, d);
            let exact = run(worker, &inputs, DType::BF16, &attend(how), true).unwrap();
            let any = run(
                worker,
                &inputs,
                DType::BF16,
                &attend(Attention {
                    any_order: true,
                    ..how
                }),
                true,
            )
            .unwrap();
            assert_eq!(
                exact.outputs, any.outputs,
                "{rows} rows: a forward has one order"
            );
            close(
                &format!("{rows} rows, {d} wide, causal {causal}"),
                &any.grads,
                &exact.grads,
                5e-3,
            );
        }
    }
}

/// What a forward gave can be given to its repetition: the same results and gradients, and no
/// forward.
#[test]
fn known_results_are_not_computed_again() {
    let worker = worker(2);
    let tensor = |cx: &mut Cx, seed: u64, dims: [usize; 4]| {
        bed::upload(cx, &quiet(seed, dims.iter().product()), &dims, DType::F32).unwrap()
    };
    let run = |known: bool| {
        let mut cx = Cx::train(&worker);
        let made = [(1, [2, 9, 4, 8]), (2, [2, 9, 2, 8]), (3, [2, 9, 2, 8])];
        let [q, k, v] = made.map(|(seed, dims)| {
            let tensor = tensor(&mut cx, seed, dims);
            cx.input(&tensor).unwrap()
        });
        let given = known.then(|| {
            let (o, lse) = Cx::infer(&worker)
                .attention_known(&q, &k, &v, &CAUSAL, None)
                .unwrap();
            (o.detach(), lse.detach())
        });
        let (o, lse) = cx.attention_known(&q, &k, &v, &CAUSAL, given).unwrap();
        let squares = cx.mul(&o, &o).unwrap();
        let loss = cx.sum_all(&squares).unwrap();
        let mut grads = cx.backward(&loss).unwrap();
        let mut all = vec![o.to_f64_vec().unwrap(), lse.to_f64_vec().unwrap()];
        all.extend([&q, &k, &v].map(|t| grads.take(t).unwrap().to_f64_vec().unwrap()));
        all
    };
    assert_eq!(run(true), run(false));
    let mut cx = Cx::infer(&worker);
    let (q, k) = (
        tensor(&mut cx, 1, [1, 3, 2, 8]),
        tensor(&mut cx, 2, [1, 3, 2, 8]),
    );
    let wrong = cx.attention_known(&q, &k, &k, &CAUSAL, Some((q.clone(), k.clone())));
    assert!(wrong.unwrap_err().to_string().contains("known results"));
}
