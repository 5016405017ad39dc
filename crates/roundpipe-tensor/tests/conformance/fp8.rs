//! Products of 8-bit floats: the same codes on every device, values and gradients of the codes, and
//! how far they are from the product that was not rounded.

use roundpipe_tensor::fp8::NAN_CODE;
use roundpipe_tensor::{
    Bytes, Cx, DType, DeviceKind, Fp8, Meta, Result, SimWorld, Tensor, Worker, bf16, f16,
};

use crate::bed::{
    Input, Outcome, close, gpu_alone, left_out, noise, predicted, randn, run, simulated, upload,
    values, worker,
};

const TYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

/// Values over many powers of two, so that codes of every size occur.
fn spread(seed: u64, count: usize) -> Vec<f64> {
    let (values, powers) = (noise(seed, count), noise(seed + 1, count));
    let value = |(x, power): (&f64, &f64)| x * (power * 4.0).round().exp2();
    values.iter().zip(&powers).map(value).collect()
}

/// What a type makes of a value.
fn rounded(dtype: DType, x: f64) -> f32 {
    match dtype {
        DType::BF16 => bf16::from_f64(x).to_f32(),
        DType::F16 => f16::from_f64(x).to_f32(),
        _ => x as f32,
    }
}

/// Codes and scales of the rows of [r, c], by the definition.
fn by_definition(format: Fp8, values: &[f32], columns: usize) -> (Vec<u8>, Vec<f32>) {
    let mut codes = vec![0; values.len()];
    let rows = values.chunks(columns).zip(codes.chunks_mut(columns));
    let scales = rows.map(|(row, codes)| format.quantize(row, codes));
    let scales = scales.collect();
    (codes, scales)
}

fn transposed<T: Copy>(values: &[T], columns: usize) -> Vec<T> {
    let rows = values.len() / columns;
    let at = |i: usize| values[i % rows * columns + i / rows];
    (0..values.len()).map(at).collect()
}

/// Codes and scales are those of the definition on every device, in every type and both ways a
/// matrix lies; what is not finite shows.
#[test]
fn devices_quantise_alike() {
    for (rows, columns) in [(16, 16), (48, 272), (144, 80), (80, 2304)] {
        let mut all = spread(3, rows * columns);
        all[5] = f64::NAN;
        all[columns + 1] = f64::INFINITY;
        all[2 * columns..3 * columns].fill(0.0);
        for (dtype, format) in TYPES
            .into_iter()
            .flat_map(|t| [(t, Fp8::E4M3), (t, Fp8::E5M2)])
        {
            let plain: Vec<f32> = all.iter().map(|x| rounded(dtype, *x)).collect();
            let want = by_definition(format, &plain, columns);
            assert_eq!(want.0[5], NAN_CODE);
            let turned = by_definition(format, &transposed(&plain, columns), rows);
            let quantise = |worker: &Worker, turn: bool| -> Result<(Vec<u8>, Vec<f32>)> {
                let mut cx = Cx::infer(worker);
                let mut x = upload(&mut cx, &all, &[rows, columns], dtype)?;
                if turn {
                    x = cx.transpose(&x, 0, 1)?;
                }
                let got = cx.fp8_rows(&x, format)?;
                Ok((got.codes.to_vec()?, got.scales.to_vec()?))
            };
            let world = SimWorld::seeded(7).unwrap();
            let sim = Worker::new(world.worker(), Bytes::mib(16)).unwrap();
            for (turn, want) in [(false, &want), (true, &turned)] {
                let case = format!("{format} of {dtype} [{rows}, {columns}], turned {turn}");
                assert_eq!(&quantise(&worker(1), turn).unwrap(), want, "{case}");
                assert_eq!(
                    &quantise(&worker(2), turn).unwrap(),
                    want,
                    "{case}, two threads"
                );
                assert_eq!(&quantise(&sim, turn).unwrap(), want, "{case}, sim");
                // The transpose is quantised to E4M3 alone.
                if turn && format == Fp8::E5M2 {
                    continue;
                }
                match gpu_alone() {
                    Some((gpu, _turn)) => {
                        assert_eq!(&quantise(gpu, turn).unwrap(), want, "{case}, on a GPU");
                    }
                    None => left_out(&case, dtype),
                }
            }
        }
    }
}

/// A matrix whose rows are rounded to a format, in f64.
fn through(format: Fp8, values: &[f64], columns: usize, dtype: DType) -> Vec<f64> {
    let plain: Vec<f32> = values.iter().map(|x| rounded(dtype, *x)).collect();
    let (codes, scales) = by_definition(format, &plain, columns);
    let value =
        |(i, code): (usize, &u8)| f64::from(format.decode(*code)) * f64::from(scales[i / columns]);
    codes.iter().enumerate().map(value).collect()
}

/// a [m, k] times b [n, k] transposed.
fn product(a: &[f64], b: &[f64], k: usize) -> Vec<f64> {
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(x, y)| x * y).sum();
    let rows = a
        .chunks(k)
        .flat_map(|a| b.chunks(k).map(move |b| dot(a, b)));
    rows.collect()
}

/// A linear map of some size with given values, and what it must give.
struct Case {
    sizes: [usize; 3],
    x: Vec<f64>,
    w: Vec<f64>,
    bias: Vec<f64>,
}

impl Case {
    fn new(sizes: [usize; 3]) -> Self {
        let [m, n, k] = sizes;
        Self {
            sizes,
            x: spread(11, m * k).into_iter().map(|x| x / 64.0).collect(),
            w: spread(21, n * k).into_iter().map(|x| x / 64.0).collect(),
            bias: noise(31, n),
        }
    }

    fn inputs(&self) -> Vec<Input> {
        let [m, n, k] = self.sizes;
        vec![
            values(&self.x, &[1, m, k]),
            values(&self.w, &[n, k]),
            values(&self.bias, &[n]),
        ]
    }

    /// y, dx, dW and db in f64, of the values that fp8 leaves; dW of those that are there.
    fn expected(&self, dtype: DType) -> Outcome {
        let [m, n, k] = self.sizes;
        let keep = |values: &[f64]| -> Vec<f64> {
            values
                .iter()
                .map(|x| f64::from(rounded(dtype, *x)))
                .collect()
        };
        let (x, w, bias) = (keep(&self.x), keep(&self.w), keep(&self.bias));
        let left = through(Fp8::E4M3, &x, k, dtype);
        let mut y = product(&left, &through(Fp8::E4M3, &w, k, dtype), k);
        y.iter_mut()
            .enumerate()
            .for_each(|(i, y)| *y += bias[i % n]);
        // What `run` seeds the backward with.
        let dy = keep(&noise(900, m * n));
        let turned = through(Fp8::E4M3, &transposed(&w, k), n, dtype);
        let dx = product(&through(Fp8::E5M2, &dy, n, dtype), &turned, n);
        let dy_turned = transposed(&dy, n);
        let dw = product(&dy_turned, &transposed(&x, k), m);
        let db = dy_turned.chunks(m).map(|column| column.iter().sum());
        Outcome {
            outputs: vec![y],
            grads: vec![dx, dw, db.collect()],
        }
    }
}

fn linear(cx: &mut Cx, t: &[Tensor]) -> Result<Vec<Tensor>> {
    Ok(vec![cx.linear_fp8(&t[0], &t[1], Some(&t[2]))?])
}

/// Values and gradients are those of the rounded values, rounded once; threads, the tape, the
/// simulated device and the predicted memory as for every operation.
#[test]
fn linear_maps_multiply_the_codes() {
    for sizes in [[1, 16, 16], [37, 48, 80], [300, 96, 64], [64, 272, 144]] {
        let case = Case::new(sizes);
        let inputs = case.inputs();
        for dtype in TYPES {
            let name = format!("linear_fp8 {sizes:?} {dtype}");
            let expected = case.expected(dtype);
            let limit = match dtype {
                DType::F32 => 2e-6,
                DType::F16 => 1e-3,
                _ => 4e-3,
            };
            let one = run(&worker(1), &inputs, dtype, &linear, true).unwrap();
            let two = run(&worker(2), &inputs, dtype, &linear, true).unwrap();
            assert_eq!(one.bits(), two.bits(), "{name}: 1 and 2 threads differ");
            let plain = run(&worker(2), &inputs, dtype, &linear, false).unwrap();
            assert_eq!(
                one.outputs, plain.outputs,
                "{name}: with and without a tape"
            );
            close(
                &format!("{name} output"),
                &one.outputs,
                &expected.outputs,
                limit,
            );
            close(
                &format!("{name} gradient"),
                &one.grads,
                &expected.grads,
                limit,
            );
            if dtype == DType::F32 {
                simulated(&name, &inputs, &one, &linear);
                predicted(&name, &inputs, &linear);
            }
            on_gpu(&name, &inputs, dtype, &expected);
        }
    }
}

/// A GPU may add with fewer bits, repeats itself, and asks for the memory that meta states.
fn on_gpu(name: &str, inputs: &[Input], dtype: DType, expected: &Outcome) {
    let Some((gpu, _turn)) = gpu_alone() else {
        return left_out(name, dtype);
    };
    let go = || run(gpu, inputs, dtype, &linear, true).unwrap_or_else(|e| panic!("{name}: {e}"));
    let (one, again) = (go(), go());
    assert_eq!(
        one.bits(),
        again.bits(),
        "{name}: a GPU does not repeat itself"
    );
    // Tensor cores keep some 13 bits of the largest summand.
    let what = format!("{name} on a GPU");
    close(
        &format!("{what}, output"),
        &one.outputs,
        &expected.outputs,
        6e-3,
    );
    close(
        &format!("{what}, gradient"),
        &one.grads,
        &expected.grads,
        6e-3,
    );
    let before = gpu.usage();
    walk(gpu, inputs, dtype).unwrap();
    let made = gpu.usage().allocations - before.allocations;
    let meta = Worker::new(Meta::like(DeviceKind::Cuda), Bytes(1 << 60)).unwrap();
    walk(&meta, inputs, dtype).unwrap();
    assert_eq!(meta.usage().allocations, made, "{what}: allocations");
}

/// Forward and backward without reading a value.
fn walk(worker: &Worker, inputs: &[Input], dtype: DType) -> Result<()> {
    let mut cx = Cx::new(worker, true, true);
    let tensors = inputs
        .iter()
        .map(|input| {
            let zeros = vec![0.0; input.dims().iter().product()];
            let leaf = upload(&mut cx, &zeros, input.dims(), dtype)?;
            cx.input(&leaf)
        })
        .collect::<Result<Vec<_>>>()?;
    let outputs = linear(&mut cx, &tensors)?;
    let seed = upload(
        &mut cx,
        &vec![0.0; outputs[0].numel()],
        outputs[0].dims(),
        dtype,
    )?;
    drop(cx.backward_from(&[(outputs[0].clone(), seed)])?);
    Ok(())
}

/// Every element is within what rounding each factor can make of the product that was not rounded,
/// and the whole within a few percent.
#[test]
fn the_error_is_bounded_by_the_rounding_of_the_factors() {
    let (m, n, k) = (24, 64, 256);
    let x = spread(41, m * k);
    let w = spread(51, n * k);
    let keep = |v: &[f64]| -> Vec<f64> { v.iter().map(|x| f64::from(*x as f32)).collect() };
    let (x, w) = (keep(&x), keep(&w));
    let inputs = [values(&x, &[m, k]), values(&w, &[n, k])];
    let got = run(
        &worker(2),
        &inputs,
        DType::F32,
        &|cx: &mut Cx, t: &[Tensor]| Ok(vec![cx.linear_fp8(&t[0], &t[1], None)?]),
        true,
    )
    .unwrap();
    let dy = noise(900, m * n);
    let turned = transposed(&w, k);
    for (what, got, left, right, format, depth, whole) in [
        ("forward", &got.outputs[0], &x, &w, Fp8::E4M3, k, 0.05),
        ("gradient", &got.grads[0], &dy, &turned, Fp8::E5M2, n, 0.1),
    ] {
        let exact = product(left, right, depth);
        // The most that rounding moves each value: half a step of its exponent, or of the smallest.
        let moved = |format: Fp8, values: &[f64]| -> Vec<f64> {
            let (half, smallest) = match format {
                Fp8::E4M3 => (1.0 / 16.0, 2f64.powi(-10)),
                Fp8::E5M2 => (1.0 / 8.0, 2f64.powi(-17)),
            };
            let row = |row: &[f64]| {
                let most = row.iter().fold(0.0f64, |most, x| most.max(x.abs()));
                let scale = f64::from(format.scale(most as f32));
                let bound = |x: &f64| (x.abs() * half).max(smallest * scale);
                row.iter().map(bound).collect::<Vec<_>>()
            };
            values.chunks(depth).flat_map(row).collect()
        };
        let abs = |values: &[f64]| -> Vec<f64> { values.iter().map(|x| x.abs()).collect() };
        let (left_moved, right_moved) = (moved(format, left), moved(Fp8::E4M3, right));
        let (left, right) = (abs(left), abs(right));
        let bounds = [
            product(&left_moved, &right, depth),
            product(&left, &right_moved, depth),
            product(&left_moved, &right_moved, depth),
            product(&left, &right, depth),
        ];
        let mut squares = [0.0; 2];
        for i in 0..exact.len() {
            let error = (got[i] - exact[i]).abs();
            let bound = bounds[0][i] + bounds[1][i] + bounds[2][i] + 1e-5 * bounds[3][i];
            assert!(error <= bound, "{what} {i}: {error:e} above {bound:e}");
            squares[0] += error * error;
            squares[1] += exact[i] * exact[i];
        }
        let relative = (squares[0] / squares[1]).sqrt();
        assert!((1e-3..whole).contains(&relative), "{what}: {relative}");
    }
}

/// A row's result and the gradient of its input do not depend on the rows beside it.
#[test]
fn rows_do_not_depend_on_their_neighbours() {
    let (m, n, k) = (21, 32, 48);
    let (x, w, dy) = (spread(61, m * k), spread(71, n * k), spread(81, m * n));
    let some = |from: usize, to: usize| {
        let mut cx = Cx::train(&worker(2));
        let rows = to - from;
        let x = upload(&mut cx, &x[from * k..to * k], &[rows, k], DType::BF16).unwrap();
        let x = cx.input(&x).unwrap();
        let w = upload(&mut cx, &w, &[n, k], DType::BF16).unwrap();
        let y = cx.linear_fp8(&x, &w, None).unwrap();
        let seed = upload(&mut cx, &dy[from * n..to * n], &[rows, n], DType::BF16).unwrap();
        let grads = cx.backward_from(&[(y.clone(), seed)]).unwrap();
        let dx = grads.of(&x).unwrap().to_f64_vec().unwrap();
        (y.to_f64_vec().unwrap(), dx)
    };
    let whole = some(0, m);
    for (from, to) in [(0, 1), (3, 8), (8, 21)] {
        let part = some(from, to);
        assert_eq!(part.0, whole.0[from * n..to * n], "rows {from} to {to}");
        assert_eq!(
            part.1,
            whole.1[from * k..to * k],
            "gradients {from} to {to}"
        );
    }
}

/// Gradients that overflowed must be found, and only rows that have one are spoiled.
#[test]
fn what_is_not_finite_reaches_the_result() {
    for bad in [f64::INFINITY, f64::NEG_INFINITY, f64::NAN] {
        let (m, n, k) = (3, 16, 32);
        let mut dy = noise(5, m * n);
        dy[n + 4] = bad;
        let mut cx = Cx::train(&worker(1));
        let x = upload(&mut cx, &noise(6, m * k), &[m, k], DType::BF16).unwrap();
        let x = cx.input(&x).unwrap();
        let w = upload(&mut cx, &noise(7, n * k), &[n, k], DType::BF16).unwrap();
        let y = cx.linear_fp8(&x, &w, None).unwrap();
        let seed = upload(&mut cx, &dy, &[m, n], DType::BF16).unwrap();
        let grads = cx.backward_from(&[(y, seed)]).unwrap();
        let dx = grads.of(&x).unwrap().to_f64_vec().unwrap();
        for (row, dx) in dx.chunks(k).enumerate() {
            assert_eq!(
                dx.iter().all(|x| x.is_finite()),
                row != 1,
                "{bad}, row {row}"
            );
        }
    }
}

/// Projections take part where it is asked for, in training, and where sizes allow it; else they are
/// the plain product, bit for bit.
#[test]
fn projections_take_part_where_they_can() {
    let worker = worker(1);
    let outputs = |fp8: bool, training: bool, [n, k]: [usize; 2]| {
        let mut cx = Cx::new(&worker, false, training).with_fp8(fp8);
        let x = upload(&mut cx, &noise(1, 5 * k), &[5, k], DType::BF16).unwrap();
        let w = upload(&mut cx, &noise(2, n * k), &[n, k], DType::BF16).unwrap();
        let input = cx.projection_input(&x).unwrap();
        let [projection, plain, fp8] = [
            cx.projection(&input, &w, None),
            cx.linear(&x, &w, None),
            cx.linear_fp8(&x, &w, None),
        ]
        .map(|y| y.map(|y| y.to_f64_vec().unwrap()));
        (projection.unwrap(), plain.unwrap(), fp8)
    };
    let (projection, plain, fp8) = outputs(true, true, [32, 64]);
    assert!(projection == fp8.unwrap() && projection != plain);
    for (fp8, training) in [(false, true), (true, false), (false, false)] {
        let (projection, plain, _) = outputs(fp8, training, [32, 64]);
        assert_eq!(projection, plain, "asked {fp8}, training {training}");
    }
    for sizes in [[24, 64], [32, 40]] {
        let (projection, plain, fp8) = outputs(true, true, sizes);
        assert_eq!(projection, plain, "{sizes:?}");
        let line = fp8.unwrap_err().to_string();
        assert!(line.contains("multiples of 16"), "{line}");
    }
}

/// No rows give no rows, and gradients of zero.
#[test]
fn no_rows_are_fine() {
    let inputs = [values(&[], &[0, 32]), randn(2, &[16, 32])];
    let got = run(
        &worker(1),
        &inputs,
        DType::BF16,
        &|cx: &mut Cx, t: &[Tensor]| Ok(vec![cx.linear_fp8(&t[0], &t[1], None)?]),
        true,
    )
    .unwrap();
    assert!(got.outputs[0].is_empty() && got.grads[1].iter().all(|x| *x == 0.0));
}
