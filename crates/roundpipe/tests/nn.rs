//! Ready-made layers against their formulas in f64, and their gradients against differences.

use roundpipe::kernel::ConvSpec;
use roundpipe::nn::{
    Conv1d, Conv2d, ConvTranspose2d, Gru, GruCell, Init, Lstm, LstmCell, MultiheadAttention,
    RecurrentWeights,
};
use roundpipe::{
    Bytes, Cpu, Cx, DType, Layer, Param, Params, RngSite, Sequential, Tensor, TensorResult, Tree,
    Worker,
};

fn worker() -> Worker {
    Worker::new(Cpu::new(Some(1)).unwrap(), Bytes::mib(32)).unwrap()
}

/// Numbers from -1 to 1.
fn noise(seed: u64, count: usize) -> Vec<f64> {
    let site = RngSite {
        seed,
        ..RngSite::default()
    };
    let key = site.key();
    let value = |i: usize| f64::from(key.word(i as u64)) / f64::from(u32::MAX) * 2.0 - 1.0;
    (0..count).map(value).collect()
}

fn read(param: &Param) -> Vec<f64> {
    param.data().read_all().unwrap().as_slice::<f64>().to_vec()
}

fn write(param: &Param, at: usize, value: f64) {
    let data = param.data();
    data.write(0..param.bytes()).unwrap().as_mut_slice::<f64>()[at] = value;
}

fn close(what: &str, found: &[f64], want: &[f64], within: f64) {
    assert_eq!(found.len(), want.len(), "{what}");
    for (i, (found, want)) in found.iter().zip(want).enumerate() {
        let off = (found - want).abs();
        assert!(
            off <= within * (1.0 + want.abs()),
            "{what}, {i}: {found}, not {want}"
        );
    }
}

type Forward<'a> = &'a dyn Fn(&mut Cx, &Tensor) -> TensorResult<Tensor>;

/// The outputs, weighted and summed.
fn weighed(cx: &mut Cx, y: &Tensor) -> TensorResult<Tensor> {
    let weights = cx.tensor(&noise(77, y.numel()), y.dims())?;
    let product = cx.mul(y, &weights)?;
    cx.sum_all(&product)
}

/// Runs a layer on noise; checks the gradients of its input and parameters by differences.
fn check(what: &str, params: &dyn Params, dims: &[usize], forward: Forward<'_>) -> Vec<f64> {
    let worker = worker();
    let mut x = noise(5, dims.iter().product());
    let loss = |x: &[f64]| {
        let mut cx = Cx::infer(&worker);
        let x = cx.tensor(x, dims).unwrap();
        let y = forward(&mut cx, &x).unwrap();
        weighed(&mut cx, &y).unwrap().item().unwrap()
    };
    let mut cx = Cx::train(&worker);
    let given = cx.tensor(&x, dims).unwrap();
    let given = cx.input(&given).unwrap();
    let y = forward(&mut cx, &given).unwrap();
    let total = weighed(&mut cx, &y).unwrap();
    let mut grads = cx.backward(&total).unwrap();
    let outputs = y.to_f64_vec().unwrap();
    let found = grads.take(&given).unwrap().to_f64_vec().unwrap();
    let named = params.named_params();
    let of_params: Vec<Vec<f64>> = named
        .iter()
        .map(|(_, param)| grads.take_param(param).unwrap().to_f64_vec().unwrap())
        .collect();
    // Parameters are lent to the context until here.
    drop((y, total, grads, given));
    drop(cx);
    const STEP: f64 = 1e-5;
    let differences = |values: Vec<f64>, change: &mut dyn FnMut(usize, f64) -> f64| {
        let difference = |(i, value): (usize, f64)| {
            let up = change(i, value + STEP);
            let down = change(i, value - STEP);
            change(i, value);
            (up - down) / (2.0 * STEP)
        };
        values
            .into_iter()
            .enumerate()
            .map(difference)
            .collect::<Vec<f64>>()
    };
    let want = differences(x.clone(), &mut |i, value| {
        x[i] = value;
        loss(&x)
    });
    close(&format!("{what}: input"), &found, &want, 1e-7);
    for ((name, param), found) in named.iter().zip(of_params) {
        let want = differences(read(param), &mut |i, value| {
            write(param, i, value);
            loss(&x)
        });
        close(&format!("{what}: {name}"), &found, &want, 1e-7);
    }
    outputs
}

/// y = x Wᵀ + b for one row.
fn linear(x: &[f64], weight: &[f64], bias: Option<&[f64]>) -> Vec<f64> {
    let rows = weight.chunks(x.len()).enumerate();
    let row = |(i, row): (usize, &[f64])| {
        let dot: f64 = row.iter().zip(x).map(|(a, b)| a * b).sum();
        dot + bias.map_or(0.0, |bias| bias[i])
    };
    rows.map(row).collect()
}

fn f64s() -> Init {
    Init::new(9, DType::F64)
}

/// Biases are zero at first, which would hide that they are left out.
fn fill(params: &dyn Params) {
    for (number, (_, param)) in params.named_params().iter().enumerate() {
        for (at, value) in noise(100 + number as u64, param.shape().numel())
            .iter()
            .enumerate()
        {
            write(param, at, value * 0.7);
        }
    }
}

/// The formula of attention, one query at a time.
fn attention(
    layer: &MultiheadAttention,
    [query, key, value]: [&[f64]; 3],
    [batch, queries, keys, width]: [usize; 4],
    hidden: &dyn Fn(usize, usize, usize) -> bool,
) -> Vec<f64> {
    let weight = read(&layer.in_proj_weight);
    let bias = layer.in_proj_bias.as_ref().map(read);
    let project = |x: &[f64], part: usize| -> Vec<Vec<f64>> {
        let weight = &weight[part * width * width..][..width * width];
        let bias = bias.as_ref().map(|bias| &bias[part * width..][..width]);
        x.chunks(width)
            .map(|row| linear(row, weight, bias))
            .collect()
    };
    let (q, k, v) = (project(query, 0), project(key, 1), project(value, 2));
    let each = width / layer.heads;
    let out = (
        read(&layer.out_proj.weight),
        layer.out_proj.bias.as_ref().map(read),
    );
    let mut y = Vec::new();
    for b in 0..batch {
        for i in 0..queries {
            let mut row = vec![0.0; width];
            for head in 0..layer.heads {
                let part = head * each..(head + 1) * each;
                let seen: Vec<usize> = (0..keys).filter(|j| !hidden(b, i, *j)).collect();
                let score = |j: &usize| {
                    let (q, k) = (
                        &q[b * queries + i][part.clone()],
                        &k[b * keys + j][part.clone()],
                    );
                    let dot: f64 = q.iter().zip(k).map(|(a, b)| a * b).sum();
                    (dot / (each as f64).sqrt()).exp()
                };
                let weights: Vec<f64> = seen.iter().map(score).collect();
                let total: f64 = weights.iter().sum();
                for (j, weight) in seen.iter().zip(&weights) {
                    for d in part.clone() {
                        row[d] += weight / total * v[b * keys + j][d];
                    }
                }
            }
            y.extend(linear(&row, &out.0, out.1.as_deref()));
        }
    }
    y
}

#[test]
fn attention_of_several_heads_is_its_formula() {
    let (batch, seq, width) = (2, 4, 6);
    let x = noise(5, batch * seq * width);
    // The last key of the first sample, all but the first of the second.
    let padded = |b: usize, j: usize| (b == 0 && j == 3) || (b == 1 && j > 0);
    let places = (0..batch * seq).map(|at| padded(at / seq, at % seq));
    let mask: Vec<bool> = places.collect();
    for (causal, masked, bias) in [
        (false, false, true),
        (true, false, true),
        (false, true, true),
        (true, true, false),
    ] {
        let what = format!("causal {causal}, masked {masked}");
        let mut layer = MultiheadAttention::new(&mut f64s(), width, 2, bias).unwrap();
        if causal {
            layer = layer.causal();
        }
        fill(&layer);
        let found = check(&what, &layer, &[batch, seq, width], &|cx, x| {
            let mask = cx.tensor_bool(&mask, &[batch, seq])?;
            layer.attend(cx, x, x, x, masked.then_some(&mask))
        });
        let hidden = |b: usize, i: usize, j: usize| (causal && j > i) || (masked && padded(b, j));
        let sizes = [batch, seq, seq, width];
        close(
            &what,
            &found,
            &attention(&layer, [&x; 3], sizes, &hidden),
            1e-12,
        );
    }
}

/// Queries of one sequence, keys and values of another; a query that sees no key gets no value.
#[test]
fn attention_goes_across_sequences() {
    let layer = MultiheadAttention::new(&mut f64s(), 4, 2, true).unwrap();
    fill(&layer);
    let (key, value) = (noise(6, 5 * 4), noise(7, 5 * 4));
    for masked in [false, true] {
        let what = format!("masked {masked}");
        let found = check(&what, &layer, &[1, 3, 4], &|cx, query| {
            let [key, value] = [cx.tensor(&key, &[1, 5, 4])?, cx.tensor(&value, &[1, 5, 4])?];
            let mask = cx.tensor_bool(&[true; 5], &[1, 5])?;
            layer.attend(cx, query, &key, &value, masked.then_some(&mask))
        });
        let hidden = |_: usize, _: usize, _: usize| masked;
        let given = [&noise(5, 12)[..], &key, &value];
        close(
            &what,
            &found,
            &attention(&layer, given, [1, 3, 5, 4], &hidden),
            1e-12,
        );
    }
}

#[test]
fn attention_refuses_in_one_line() {
    let refused = MultiheadAttention::new(&mut f64s(), 6, 4, true).unwrap_err();
    assert!(
        refused
            .to_string()
            .contains("4 heads do not divide a width of 6")
    );
    let layer = MultiheadAttention::new(&mut f64s(), 6, 2, true).unwrap();
    let worker = worker();
    let mut cx = Cx::infer(&worker);
    let x = cx.zeros(DType::F64, &[2, 3, 6]).unwrap();
    let flat = cx.zeros(DType::F64, &[2, 6]).unwrap();
    let mask = cx.tensor_bool(&[false; 4], &[2, 2]).unwrap();
    let mut text = |x: &Tensor, mask: Option<&Tensor>| {
        layer
            .attend(&mut cx, x, x, x, mask)
            .unwrap_err()
            .to_string()
    };
    let found = text(&flat, None);
    assert!(found.contains("[2, 6] is no [batch, seq, 6]"), "{found}");
    let found = text(&x, Some(&mask));
    assert!(
        found.contains("key_padding_mask is bool [2, 2]; it is bool [2, 3]"),
        "{found}"
    );
}

/// As a layer it takes a tensor, or a map whose mask goes on to the next layer.
#[test]
fn attention_is_a_layer_with_or_without_a_mask() {
    let layer = MultiheadAttention::new(&mut f64s(), 4, 2, true).unwrap();
    let worker = worker();
    let mut cx = Cx::infer(&worker);
    let x = cx.tensor(&noise(5, 24), &[2, 3, 4]).unwrap();
    let mask = cx.tensor_bool(&[false; 6], &[2, 3]).unwrap();
    let plain = layer
        .run(&mut cx, x.clone().into())
        .unwrap()
        .tensor()
        .unwrap();
    let input = Tree::map([("x", x.into()), ("key_padding_mask", mask.into())]);
    let output = layer.run(&mut cx, input).unwrap();
    assert!(output.get("key_padding_mask").is_ok());
    let masked = output.get("x").unwrap().clone().tensor().unwrap();
    let (plain, masked) = (plain.to_f64_vec().unwrap(), masked.to_f64_vec().unwrap());
    close("a mask that hides nothing", &masked, &plain, 1e-12);
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// What both shares give to the gates.
fn gates(weights: &RecurrentWeights, x: &[f64], hidden: &[f64]) -> [Vec<f64>; 2] {
    let bias_ih = weights.bias_ih.as_ref().map(read);
    let bias_hh = weights.bias_hh.as_ref().map(read);
    [
        linear(x, &read(&weights.weight_ih), bias_ih.as_deref()),
        linear(hidden, &read(&weights.weight_hh), bias_hh.as_deref()),
    ]
}

fn lstm_step(cell: &LstmCell, x: &[f64], h: &mut [f64], c: &mut [f64]) {
    let [a, b] = gates(&cell.0, x, h);
    let size = h.len();
    let gate = |number: usize, i: usize| a[number * size + i] + b[number * size + i];
    for i in 0..size {
        let kept = sigmoid(gate(1, i)) * c[i];
        c[i] = kept + sigmoid(gate(0, i)) * gate(2, i).tanh();
        h[i] = sigmoid(gate(3, i)) * c[i].tanh();
    }
}

fn gru_step(cell: &GruCell, x: &[f64], h: &mut [f64]) {
    let [a, b] = gates(&cell.0, x, h);
    let size = h.len();
    for i in 0..size {
        let reset = sigmoid(a[i] + b[i]);
        let update = sigmoid(a[size + i] + b[size + i]);
        let new = (a[2 * size + i] + reset * b[2 * size + i]).tanh();
        h[i] = (1.0 - update) * new + update * h[i];
    }
}

#[test]
fn recurrent_layers_are_their_formulas() {
    let (batch, steps, inputs, size) = (2, 3, 4, 3);
    let x = noise(5, batch * steps * inputs);
    for bias in [true, false] {
        let lstm = Lstm::new(&mut f64s(), inputs, size, bias).unwrap();
        let gru = Gru::new(&mut f64s(), inputs, size, bias).unwrap();
        fill(&lstm);
        fill(&gru);
        let (mut of_lstm, mut of_gru) = (Vec::new(), Vec::new());
        for sample in x.chunks(steps * inputs) {
            let [mut h, mut c, mut g] = [vec![0.0; size], vec![0.0; size], vec![0.0; size]];
            for x in sample.chunks(inputs) {
                lstm_step(&lstm.cell, x, &mut h, &mut c);
                gru_step(&gru.cell, x, &mut g);
                of_lstm.extend_from_slice(&h);
                of_gru.extend_from_slice(&g);
            }
        }
        let dims = [batch, steps, inputs];
        let run =
            |cx: &mut Cx, layer: &dyn Layer, x: &Tensor| layer.run(cx, x.clone().into())?.tensor();
        let found = check("lstm", &lstm, &dims, &|cx, x| run(cx, &lstm, x));
        close("lstm", &found, &of_lstm, 1e-12);
        let found = check("gru", &gru, &dims, &|cx, x| run(cx, &gru, x));
        close("gru", &found, &of_gru, 1e-12);
        let names = |params: &dyn Params| -> Vec<String> {
            params
                .named_params()
                .into_iter()
                .map(|(name, _)| name)
                .collect()
        };
        let want = ["weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"];
        assert_eq!(names(&lstm), want[..if bias { 4 } else { 2 }]);
        assert_eq!(names(&gru.cell).len(), names(&gru).len());
    }
}

/// A cell by itself continues from any state.
#[test]
fn cells_go_on_from_a_state() {
    let (lstm, gru) = (
        LstmCell::new(&mut f64s(), 4, 3, true).unwrap(),
        GruCell::new(&mut f64s(), 4, 3, true).unwrap(),
    );
    let (x, mut h, mut c) = (noise(1, 4), noise(2, 3), noise(3, 3));
    let worker = worker();
    let mut cx = Cx::infer(&worker);
    let mut row = |values: &[f64]| cx.tensor(values, &[1, values.len()]).unwrap();
    let (given, before, cell) = (row(&x), row(&h), row(&c));
    let [hidden, state] = lstm.step(&mut cx, &given, [before.clone(), cell]).unwrap();
    let next = gru.step(&mut cx, &given, before).unwrap();
    let mut g = h.clone();
    lstm_step(&lstm, &x, &mut h, &mut c);
    gru_step(&gru, &x, &mut g);
    close("hidden", &hidden.to_f64_vec().unwrap(), &h, 1e-12);
    close("cell", &state.to_f64_vec().unwrap(), &c, 1e-12);
    close("gru", &next.to_f64_vec().unwrap(), &g, 1e-12);
}

/// Depthwise, grouped, transposed and one-dimensional, each by the sum over its taps.
#[test]
fn convolutions_are_their_formulas() {
    let spec = ConvSpec {
        stride: [2, 2],
        padding: [1, 1],
        dilation: [1, 1],
        groups: 2,
    };
    let run =
        |cx: &mut Cx, layer: &dyn Layer, x: &Tensor| layer.run(cx, x.clone().into())?.tensor();
    let depthwise = ConvSpec {
        groups: 4,
        ..ConvSpec::default()
    };
    let layer = Conv2d::new(&mut f64s(), 4, 4, 3, true, depthwise).unwrap();
    assert_eq!(layer.weight.shape().dims(), [4, 1, 3, 3]);
    let found = check("depthwise", &layer, &[1, 4, 3, 3], &|cx, x| {
        run(cx, &layer, x)
    });
    // One window per channel.
    let (x, taps, bias) = (
        noise(5, 36),
        read(&layer.weight),
        read(layer.bias.as_ref().unwrap()),
    );
    let want: Vec<f64> = (0..4)
        .map(|c| linear(&x[c * 9..][..9], &taps[c * 9..][..9], None)[0] + bias[c])
        .collect();
    close("depthwise", &found, &want, 1e-12);

    let layer = Conv1d::new(&mut f64s(), 4, 6, 3, true, spec).unwrap();
    let found = check("conv1d", &layer, &[1, 4, 5], &|cx, x| run(cx, &layer, x));
    let (x, taps, bias) = (
        noise(5, 20),
        read(&layer.weight),
        read(layer.bias.as_ref().unwrap()),
    );
    let mut want = Vec::new();
    for out in 0..6 {
        for place in 0..3_usize {
            let mut sum = bias[out];
            for (channel, tap) in (0..2).flat_map(|c| (0..3).map(move |t| (c, t))) {
                let at = (2 * place + tap).wrapping_sub(1);
                if at < 5 {
                    sum +=
                        taps[(out * 2 + channel) * 3 + tap] * x[(out / 3 * 2 + channel) * 5 + at];
                }
            }
            want.push(sum);
        }
    }
    close("conv1d", &found, &want, 1e-12);

    let mut layer = ConvTranspose2d::new(&mut f64s(), 4, 6, 3, true, spec).unwrap();
    layer.output_padding = [1, 0];
    assert_eq!(layer.weight.shape().dims(), [4, 3, 3, 3]);
    let found = check("transposed", &layer, &[1, 4, 2, 3], &|cx, x| {
        run(cx, &layer, x)
    });
    let (x, taps, bias) = (
        noise(5, 24),
        read(&layer.weight),
        read(layer.bias.as_ref().unwrap()),
    );
    let (height, width) = (4, 5);
    let mut want: Vec<f64> = bias.iter().flat_map(|b| vec![*b; height * width]).collect();
    for (from, (i, j)) in (0..4).flat_map(|c| (0..6_usize).map(move |at| (c, (at / 3, at % 3)))) {
        for (to, (k, l)) in (0..3).flat_map(|o| (0..9_usize).map(move |at| (o, (at / 3, at % 3)))) {
            let row = (2 * i + k).wrapping_sub(1);
            let column = (2 * j + l).wrapping_sub(1);
            if row < height && column < width {
                let out = from / 2 * 3 + to;
                let tap = taps[((from * 3 + to) * 3 + k) * 3 + l];
                want[(out * height + row) * width + column] += x[(from * 2 + i) * 3 + j] * tap;
            }
        }
    }
    close("transposed", &found, &want, 1e-12);
}

/// New layers print like the others.
#[test]
fn layers_print_their_kind_and_parameters() {
    let mut init = Init::new(1, DType::F32);
    let model = Sequential::new()
        .named(
            "attend",
            MultiheadAttention::new(&mut init, 4, 2, true).unwrap(),
        )
        .named("walk", Lstm::new(&mut init, 4, 3, false).unwrap());
    let text = model.to_string();
    for want in [
        "(attend) MultiheadAttention, 80 parameters\n    in_proj_weight: [12, 4] f32",
        "\n    out_proj.bias: [4] f32",
        "(walk) Lstm, 84 parameters\n    weight_ih_l0: [12, 4] f32",
    ] {
        assert!(text.contains(want), "{text}");
    }
}
