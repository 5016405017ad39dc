//! Rotary embedding and gated linear units.

use roundpipe_tensor::kernel::RopeStyle;
use roundpipe_tensor::ops::rope_tables;
use roundpipe_tensor::{Cx, DType, Result, Tensor};

use crate::bed::{Input, Lie, check, close, fixed, noise, randn, upload, values, worker};
use crate::golden;

const STYLES: [RopeStyle; 2] = [RopeStyle::Half, RopeStyle::Interleaved];

/// Inputs cos and sin for `positions` and `turned` elements.
fn tables(positions: usize, turned: usize) -> [Input; 2] {
    let (cos, sin) = rope_tables(positions, turned, 100.0);
    let dims = [positions, turned / 2];
    // Rounded to f32 first, so that every type sees the same angles.
    [cos, sin].map(|t| values(&t, &dims).map(|v| f64::from(v as f32)).accumulator())
}

#[test]
fn rope_turns_heads_of_every_lie() {
    let cases: [(&[usize], usize); 6] = [
        (&[2, 5, 3, 8], 8),
        (&[2, 5, 3, 11], 6),
        (&[1, 1, 1, 2], 2),
        (&[2, 0, 3, 4], 4),
        (&[2, 3, 2, 4], 0),
        (&[3, 40, 6, 64], 64),
    ];
    for style in STYLES {
        for (dims, turned) in cases {
            let [cos, sin] = tables(dims[1].max(1) + 2, turned);
            let name = format!("rope {style:?} {dims:?}");
            check(&name, &[randn(1, dims), cos, sin], |cx, t| {
                Ok(vec![cx.rope(&t[0], &t[1], &t[2], None, style)?])
            });
        }
        for lie in [Lie::Transposed, Lie::CutOut] {
            let [cos, sin] = tables(5, 6);
            let inputs = [randn(1, &[2, 4, 3, 7]).lying(lie), cos, sin];
            check("rope strided", &inputs, |cx, t| {
                let y = cx.rope(&t[0], &t[1], &t[2], None, style)?;
                // The gradient arrives transposed.
                Ok(vec![cx.transpose(&y, 1, 2)?, cx.transpose(&y, 2, 3)?])
            });
        }
    }
}

#[test]
fn rope_at_given_positions() {
    for style in STYLES {
        for dtype in [DType::I32, DType::I64, DType::U32] {
            let [cos, sin] = tables(9, 4);
            let at = fixed(dtype, &[8, 0, 3, 3, 1, 7], &[2, 3]);
            let inputs = [randn(1, &[2, 3, 2, 5]), cos, sin, at];
            check("rope at [b, s]", &inputs, |cx, t| {
                Ok(vec![cx.rope(&t[0], &t[1], &t[2], Some(&t[3]), style)?])
            });
            let mut inputs = inputs;
            inputs[3] = fixed(dtype, &[8, 0, 3], &[3]);
            check("rope at [s]", &inputs, |cx, t| {
                Ok(vec![cx.rope(&t[0], &t[1], &t[2], Some(&t[3]), style)?])
            });
        }
    }
}

/// The fused norm and rotation, and the two in sequence, are one function.
#[test]
fn rope_norm_is_a_norm_and_a_rope() {
    let cases: [(&[usize], usize); 5] = [
        (&[2, 5, 3, 8], 8),
        (&[2, 4, 3, 11], 6),
        (&[1, 1, 1, 2], 2),
        (&[0, 2, 2, 4], 4),
        (&[3, 40, 6, 64], 64),
    ];
    for style in STYLES {
        for (dims, turned) in cases {
            let [cos, sin] = tables(dims[1], turned);
            let inputs = [randn(1, dims), randn(2, &[dims[3]]), cos, sin];
            let name = format!("rope_norm {style:?} {dims:?}");
            check(&name, &inputs, |cx, t| {
                Ok(vec![cx.rope_norm(
                    &t[0], &t[1], &t[2], &t[3], None, style, 1e-5,
                )?])
            });
            let worker = worker(2);
            let mut cx = Cx::infer(&worker);
            let count = dims.iter().product();
            let x = upload(&mut cx, &noise(1, count), dims, DType::F64).unwrap();
            let w = upload(&mut cx, &noise(2, dims[3]), &dims[3..], DType::F64).unwrap();
            let (cos, sin) = rope_tables(dims[1], turned, 10.0);
            let table = [cos, sin].map(|v| cx.tensor(&v, &[dims[1], turned / 2]).unwrap());
            let fused = cx
                .rope_norm(&x, &w, &table[0], &table[1], None, style, 1e-5)
                .unwrap();
            let normed = cx.rms_norm(&x, Some(&w), 1e-5).unwrap();
            let apart = cx.rope(&normed, &table[0], &table[1], None, style).unwrap();
            close(
                &name,
                &[fused.to_f64_vec().unwrap()],
                &[apart.to_f64_vec().unwrap()],
                1e-14,
            );
        }
        let [cos, sin] = tables(9, 4);
        let at = fixed(DType::I64, &[8, 0, 3, 3, 1, 7], &[2, 3]);
        let inputs = [
            randn(1, &[2, 3, 2, 5]).lying(Lie::CutOut),
            randn(2, &[5]),
            cos,
            sin,
            at,
        ];
        check("rope_norm at positions", &inputs, |cx, t| {
            let y = cx.rope_norm(&t[0], &t[1], &t[2], &t[3], Some(&t[4]), style, 1e-5)?;
            Ok(vec![cx.transpose(&y, 1, 2)?])
        });
    }
}

#[test]
fn gated_units_on_every_lie() {
    type Unit = fn(&mut Cx, &Tensor, &Tensor) -> Result<Tensor>;
    let units: [(&str, Unit); 3] = [
        ("swiglu", |cx, g, u| cx.swiglu(g, u)),
        ("geglu", |cx, g, u| cx.geglu(g, u)),
        ("swiglu_clamped", |cx, g, u| {
            cx.swiglu_clamped(g, u, 1.702, 1.7)
        }),
    ];
    let shapes: [&[usize]; 6] = [&[3, 5], &[2, 3, 33], &[1], &[0, 4], &[4, 0], &[70, 1000]];
    for (name, unit) in units {
        for dims in shapes {
            // Clamped values are kinks only at the limit itself, which no input has.
            check(name, &[randn(1, dims), randn(2, dims)], |cx, t| {
                Ok(vec![unit(cx, &t[0], &t[1])?])
            });
        }
        for lie in [Lie::Transposed, Lie::CutOut] {
            let inputs = [randn(1, &[2, 4, 9]).lying(lie), randn(2, &[2, 4, 9])];
            check(name, &inputs, |cx, t| {
                Ok(vec![unit(cx, &t[0], &t[1])?, unit(cx, &t[1], &t[0])?])
            });
        }
    }
}

#[test]
fn packed_gated_units() {
    type Unit = fn(&mut Cx, &Tensor) -> Result<Tensor>;
    let units: [(&str, Unit); 3] = [
        ("swiglu_packed", |cx, x| cx.swiglu_packed(x)),
        ("geglu_packed", |cx, x| cx.geglu_packed(x)),
        ("swiglu_clamped_interleaved", |cx, x| {
            cx.swiglu_clamped_interleaved(x, 1.702, 1.7)
        }),
    ];
    let shapes: [&[usize]; 6] = [&[3, 10], &[2, 3, 2], &[8], &[0, 4], &[4, 0], &[70, 1000]];
    for (name, unit) in units {
        for dims in shapes {
            check(name, &[randn(1, dims)], |cx, t| Ok(vec![unit(cx, &t[0])?]));
        }
        for lie in [Lie::Transposed, Lie::CutOut] {
            check(name, &[randn(1, &[2, 4, 6]).lying(lie)], |cx, t| {
                Ok(vec![unit(cx, &t[0])?])
            });
        }
    }
}

/// Gates far out neither overflow nor give NaN.
#[test]
fn units_are_finite_far_out() {
    let worker = worker(1);
    let mut cx = Cx::train(&worker);
    let far = [-3e4f32, -100.0, -89.0, 89.0, 100.0, 3e4];
    let far = cx.tensor(&far, &[6]).unwrap();
    let up = cx.full(DType::F32, &[6], 1.0).unwrap();
    for unit in [Cx::swiglu, Cx::geglu] {
        let gate = cx.input(&far).unwrap();
        let y = unit(&mut cx, &gate, &up).unwrap();
        let have = y.to_vec::<f32>().unwrap();
        close(
            "far out",
            &[have.into_iter().map(f64::from).collect()],
            &[vec![0.0, 0.0, 0.0, 89.0, 100.0, 3e4]],
            1e-6,
        );
        let dy = cx.full(DType::F32, &[6], 1.0).unwrap();
        let grads = cx.backward_from(&[(y, dy)]).unwrap();
        let have = grads.of(&gate).unwrap().to_f64_vec().unwrap();
        close(
            "far out, gradient",
            &[have],
            &[vec![0.0, 0.0, 0.0, 1.0, 1.0, 1.0]],
            1e-6,
        );
    }
}

#[test]
fn what_does_not_fit_is_refused_in_words() {
    let worker = worker(1);
    let mut cx = Cx::train(&worker);
    let x = cx.zeros(DType::BF16, &[2, 5, 3, 4]).unwrap();
    let (table, wide) = (
        cx.zeros(DType::F32, &[5, 2]).unwrap(),
        cx.zeros(DType::F32, &[5, 3]).unwrap(),
    );
    let (short, half) = (
        cx.zeros(DType::F32, &[4, 2]).unwrap(),
        cx.zeros(DType::BF16, &[5, 2]).unwrap(),
    );
    let (flat, odd) = (
        cx.zeros(DType::BF16, &[5, 4]).unwrap(),
        cx.zeros(DType::BF16, &[5, 3]).unwrap(),
    );
    let out = cx.tensor(&[0i32, 1, 2, 3, 5], &[5]).unwrap();
    let negative = cx.tensor(&[0i64, 1, 2, 3, -1], &[5]).unwrap();
    let few = cx.tensor(&[0i32, 1], &[2]).unwrap();
    let style = RopeStyle::Half;
    let refused: [(Result<Tensor>, &[&str]); 12] = [
        (
            cx.rope(&flat, &table, &table, None, style),
            &["rope", "[5, 4]"],
        ),
        (
            cx.rope(&x, &wide, &wide, None, style),
            &["rope", "[2, 5, 3, 4]", "[5, 3]"],
        ),
        (
            cx.rope(&x, &half, &half, None, style),
            &["rope", "bf16", "f32"],
        ),
        (
            cx.rope(&x, &short, &short, None, style),
            &["rope", "5 steps", "4 positions"],
        ),
        (
            cx.rope(&x, &table, &table, Some(&out), style),
            &["rope", "index 5", "0..5"],
        ),
        (
            cx.rope(&x, &table, &table, Some(&negative), style),
            &["rope", "index -1"],
        ),
        (
            cx.rope(&x, &table, &table, Some(&few), style),
            &["rope", "[2, 5, 3, 4]", "[2]"],
        ),
        (
            cx.rope(&x, &table, &table, Some(&table), style),
            &["rope", "positions are"],
        ),
        (
            cx.rope_norm(&x, &flat, &table, &table, None, style, 0.0),
            &["rope_norm", "[5, 4]"],
        ),
        (cx.swiglu(&flat, &odd), &["swiglu", "[5, 4]", "[5, 3]"]),
        (cx.swiglu_packed(&odd), &["swiglu", "[5, 3]"]),
        (cx.geglu(&flat, &table), &["geglu", "bf16", "f32"]),
    ];
    for (result, words) in refused {
        let text = result.unwrap_err().to_string();
        assert!(
            words.iter().all(|w| text.contains(w)),
            "{text} should name {words:?}"
        );
    }
}

#[test]
fn ropes_agree_with_pytorch() {
    let file = golden::open("fused_ops");
    let cases = [
        ("rope_half", 12, 1e4),
        ("rope_half_positions", 12, 1e6),
        ("rope_interleaved", 12, 1e4),
        ("rope_interleaved_positions", 12, 1e4),
        ("rope_partial_half", 8, 1e4),
        ("rope_partial_interleaved", 4, 1e4),
    ];
    for (name, turned, theta) in cases {
        let case = file.case(name);
        let size = case
            .f64("in.positions")
            .0
            .iter()
            .fold(0.0f64, |a, b| a.max(*b)) as usize
            + 1;
        let (cos, sin) = rope_tables(size, turned, theta);
        let style = STYLES[usize::from(name.contains("interleaved"))];
        case.check(|cx, t| {
            let x = t.of("in.x");
            let mut table = |v| upload(cx, v, &[size, turned / 2], x.dtype());
            let (cos, sin) = (table(&cos)?, table(&sin)?);
            cx.rope(x, &cos, &sin, t.get("in.positions"), style)
        });
    }
}

#[test]
fn clamped_units_agree_with_pytorch() {
    let file = golden::open("fused_ops");
    file.case("clamped_swiglu")
        .check(|cx, t| cx.swiglu_clamped_interleaved(t.of("in.gate_up"), 1.702, 7.0));
    file.case("clamped_swiglu_apart")
        .check(|cx, t| cx.swiglu_clamped(t.of("in.gate"), t.of("in.up"), 1.702, 7.0));
}
