//! Mixture of experts.

use roundpipe_tensor::kernel::Glu;
use roundpipe_tensor::ops::{Experts, Lora, MoeOptions, RouteWeights};
use roundpipe_tensor::{Cx, DType, Result, Tensor, bf16};

use crate::bed::{self, Lie, Strict, check, check_with, fixed, randn, upload, values, worker};
use crate::golden;

const QWEN: MoeOptions = MoeOptions {
    top_k: 2,
    weights: RouteWeights::Renormalized,
    glu: Glu::Silu,
};

/// Logits that differ enough that no type and no small change picks other experts.
fn logits(tokens: usize, experts: usize) -> crate::bed::Input {
    assert!(!experts.is_multiple_of(7), "levels must differ");
    let level = |i: usize| ((i % experts * 7 + i / experts * 3) % experts) as f64 / 4.0 - 0.5;
    let all: Vec<f64> = (0..tokens * experts).map(level).collect();
    values(&all, &[tokens, experts])
}

/// Routing, dispatch and combination, over more and fewer tokens than experts and all ways to
/// weigh.
#[test]
fn tokens_go_to_their_experts_and_back() {
    for (tokens, experts, k) in [(7, 5, 2), (1, 3, 3), (9, 8, 1), (40, 3, 2), (0, 4, 2)] {
        for weights in [
            RouteWeights::Renormalized,
            RouteWeights::Plain,
            RouteWeights::Chosen,
        ] {
            let name = format!("{tokens} tokens, {k} of {experts} experts, {weights:?}");
            let inputs = [randn(1, &[tokens, 37]), logits(tokens, experts)];
            check(&name, &inputs, |cx, x| {
                let routing = cx.moe_route(&x[1], k, weights)?;
                let rows = cx.moe_dispatch(&x[0], &routing)?;
                let twice = cx.mul(&rows, &rows)?;
                Ok(vec![
                    cx.moe_combine(&twice, &routing)?,
                    routing.weights().clone(),
                ])
            });
        }
    }
}

/// Wide rows and many tokens: several tasks and several chunks.
#[test]
fn large_combinations_do_not_depend_on_threads() {
    let inputs = [randn(1, &[150, 300]), logits(150, 6)];
    let strict = Strict {
        differences: false,
        ..Strict::default()
    };
    check_with("large", &inputs, strict, |cx, x| {
        let routing = cx.moe_route(&x[1], 3, RouteWeights::Plain)?;
        let rows = cx.moe_dispatch(&x[0], &routing)?;
        Ok(vec![cx.moe_combine(&rows, &routing)?])
    });
}

#[test]
fn routing_sorts_stably_by_expert() {
    let mut cx = Cx::infer(&worker(1));
    let scores = [
        0.1f32, 0.9, 0.5, 0.9, 0.2, 0.1, 0.3, 0.9, 0.4, 0.0, 0.5, 0.6,
    ];
    let logits = cx.tensor(&scores, &[4, 3]).unwrap();
    let routing = cx.moe_route(&logits, 2, RouteWeights::Chosen).unwrap();
    assert_eq!(
        routing.choice().to_vec::<i64>().unwrap(),
        [1, 2, 0, 1, 1, 2, 2, 1]
    );
    assert_eq!(routing.offsets().to_vec::<i32>().unwrap(), [0, 1, 5, 8]);
    assert_eq!(
        (routing.tokens(), routing.top_k(), routing.experts()),
        (4, 2, 3)
    );
    let tokens = cx.tensor(&[10.0f32, 11.0, 12.0, 13.0], &[4, 1]).unwrap();
    let rows = cx.moe_dispatch(&tokens, &routing).unwrap();
    assert_eq!(
        rows.to_vec::<f32>().unwrap(),
        [11.0, 10.0, 11.0, 12.0, 13.0, 10.0, 12.0, 13.0]
    );
    // Weights of a token sum to 1, so combining its own copies gives it back.
    let back = cx
        .moe_combine(&rows, &routing)
        .unwrap()
        .to_vec::<f32>()
        .unwrap();
    assert!(
        back.iter()
            .zip([10.0, 11.0, 12.0, 13.0])
            .all(|(b, t)| (b - t).abs() < 1e-5),
        "{back:?}"
    );
}

#[test]
fn grouped_linear_and_its_gradients() {
    let offsets = |all: &[i64]| fixed(DType::I32, all, &[all.len()]);
    for (rows, bounds) in [
        (7, &[0, 3, 3, 7][..]),
        (6, &[0, 0, 2, 5]),
        (1, &[0, 1, 1, 1]),
        (0, &[0, 0, 0, 0]),
    ] {
        let name = format!("{bounds:?} of {rows}");
        for lie in [Lie::Dense, Lie::Transposed, Lie::CutOut] {
            let inputs = [
                randn(1, &[rows, 5]).lying(lie),
                randn(2, &[3, 4, 5]).lying(lie),
                randn(3, &[3, 4]),
                offsets(bounds),
            ];
            check(&name, &inputs, |cx, x| {
                Ok(vec![cx.grouped_linear(&x[0], &x[1], &x[3], Some(&x[2]))?])
            });
            check(&name, &inputs, |cx, x| {
                Ok(vec![cx.grouped_linear(&x[0], &x[1], &x[3], None)?])
            });
        }
        let one = [randn(1, &[rows, 1]), randn(2, &[3, 1, 1]), offsets(bounds)];
        check(&name, &one, |cx, x| {
            Ok(vec![cx.grouped_linear(&x[0], &x[1], &x[2], None)?])
        });
    }
}

/// A branch beside grouped products, of which the last product adds to what is there: all of its
/// gradients, with rows of no group and a group without rows.
#[test]
fn grouped_branches_and_their_gradients() {
    let offsets = |all: &[i64]| fixed(DType::I32, all, &[all.len()]);
    for (rows, bounds) in [(7, &[0, 3, 3, 7][..]), (6, &[0, 0, 2, 5])] {
        let inputs = [
            randn(1, &[rows, 5]),
            randn(2, &[3, 4, 5]),
            randn(3, &[3, 2, 5]),
            randn(4, &[3, 4, 2]),
            offsets(bounds),
        ];
        check(&format!("{bounds:?} of {rows}"), &inputs, |cx, x| {
            let lora = Lora {
                a: &x[2],
                b: &x[3],
                scale: 0.5,
                dropout: 0.0,
            };
            Ok(vec![
                cx.grouped_linear_lora(&x[0], &x[1], &x[4], None, lora)?,
            ])
        });
    }
}

/// Sizes of several tiles, the last of them not whole: groups without rows, with fewer and with more
/// than a tile's, rows of no group, and matrices that lie either way.
#[test]
fn grouped_products_of_several_tiles() {
    let offsets = |all: &[i64]| fixed(DType::I32, all, &[all.len()]);
    let strict = Strict {
        differences: false,
        dtypes: &[DType::BF16, DType::F16],
        ..Strict::default()
    };
    for (rows, depth, cols, bounds) in [
        (333, 200, 264, &[0, 0, 130, 330][..]),
        (150, 64, 40, &[0, 1, 149, 149]),
        (90, 328, 128, &[0, 90, 90, 90]),
        (257, 72, 520, &[0, 64, 193, 257]),
    ] {
        for lie in [Lie::Dense, Lie::Transposed] {
            let name = format!("{rows} x {depth} x {cols}, {bounds:?}, {lie:?}");
            let small = |x: f64| x / 8.0;
            let inputs = [
                randn(1, &[rows, depth]),
                randn(2, &[3, cols, depth]).map(small).lying(lie),
                offsets(bounds),
            ];
            check_with(&name, &inputs, strict, |cx, x| {
                Ok(vec![cx.grouped_linear(&x[0], &x[1], &x[2], None)?])
            });
        }
    }
}

/// Branches beside products of several tiles: ranks of less than a step of the depth, of more than one,
/// and one whose rows the copy engine does not take.
#[test]
fn grouped_branches_of_several_tiles() {
    let offsets = |all: &[i64]| fixed(DType::I32, all, &[all.len()]);
    let strict = Strict {
        differences: false,
        dtypes: &[DType::BF16, DType::F16],
        ..Strict::default()
    };
    for (rows, depth, cols, rank, bounds) in [
        (333, 200, 264, 32, &[0, 0, 130, 330][..]),
        (257, 72, 136, 72, &[0, 64, 193, 257]),
        (150, 64, 40, 5, &[0, 1, 149, 149]),
    ] {
        let name = format!("{rows} x {depth} x {cols}, rank {rank}, {bounds:?}");
        let small = |x: f64| x / 8.0;
        let inputs = [
            randn(1, &[rows, depth]),
            randn(2, &[3, cols, depth]).map(small),
            randn(3, &[3, rank, depth]).map(small),
            randn(4, &[3, cols, rank]).map(small),
            offsets(bounds),
        ];
        check_with(&name, &inputs, strict, |cx, x| {
            let lora = Lora {
                a: &x[2],
                b: &x[3],
                scale: 0.5,
                dropout: 0.0,
            };
            Ok(vec![
                cx.grouped_linear_lora(&x[0], &x[1], &x[4], None, lora)?,
            ])
        });
    }
}

/// More tiles than a card has processors, so that each block takes several, of a depth of one step and
/// of many, written and added to: the products of groups are those of their rows by themselves.
#[test]
fn grouped_products_of_many_tiles() {
    let Some((worker, _turn)) = bed::gpu_alone() else {
        return;
    };
    const GROUPS: usize = 16;
    for (rows, depth, cols) in [
        (20_000, 32, 1024),
        (60_000, 32, 32),
        (40_000, 128, 64),
        (20_000, 160, 768),
        // Many steps, with tiles of which half of the warps have no rows.
        (3_000, 1024, 320),
    ] {
        let mut cx = Cx::infer(worker);
        let x = cx.randn(DType::BF16, &[rows, depth]).unwrap();
        let w = cx.randn(DType::BF16, &[GROUPS, cols, depth]).unwrap();
        // From no rows at all to an eighth of them.
        let bound = |group: usize| rows * group * group / (GROUPS * GROUPS);
        let bounds: Vec<i32> = (0..=GROUPS).map(|group| bound(group) as i32).collect();
        let offsets = cx.tensor(&bounds, &[GROUPS + 1]).unwrap();
        let y = cx.grouped_linear(&x, &w, &offsets, None).unwrap();
        let lora = Lora {
            a: &w,
            b: &cx.transpose(&w, 1, 2).unwrap(),
            scale: 0.125,
            dropout: 0.0,
        };
        let square = cx.randn(DType::BF16, &[GROUPS, depth, depth]).unwrap();
        let added = cx
            .grouped_linear_lora(&x, &square, &offsets, None, lora)
            .unwrap();
        for group in (0..GROUPS).filter(|group| bound(*group) < bound(group + 1)) {
            let name = format!("{rows} x {depth} x {cols}, group {group}");
            let count = bound(group + 1) - bound(group);
            let here = |cx: &mut Cx, t: &Tensor, at: usize, count: usize| {
                cx.narrow(t, 0, at, count).unwrap()
            };
            let own = here(&mut cx, &x, bound(group), count);
            let matrix = |cx: &mut Cx, t: &Tensor| {
                let one = here(cx, t, group, 1);
                cx.squeeze(&one, 0).unwrap()
            };
            let (weight, base) = (matrix(&mut cx, &w), matrix(&mut cx, &square));
            let alone = cx.linear(&own, &weight, None).unwrap();
            let both = here(&mut cx, &y, bound(group), count);
            near(&name, &both, &alone, depth);
            let back = Lora {
                a: &weight,
                b: &cx.transpose(&weight, 0, 1).unwrap(),
                scale: 0.125,
                dropout: 0.0,
            };
            let alone = cx.linear_lora(&own, &base, None, back).unwrap();
            let both = here(&mut cx, &added, bound(group), count);
            near(&format!("{name}, added"), &both, &alone, depth * cols);
        }
    }
}

/// Equal but for the rounding of sums over `terms` products of numbers about 1.
fn near(name: &str, have: &Tensor, want: &Tensor, terms: usize) {
    let [have, want] = [have, want].map(|t| t.to_vec::<bf16>().unwrap());
    let slack = 0.02 * (terms as f32).sqrt();
    for (i, (have, want)) in have.iter().zip(&want).enumerate() {
        let (have, want) = (have.to_f32(), want.to_f32());
        let off = (have - want).abs();
        assert!(
            off <= slack + 0.02 * want.abs(),
            "{name}, {i}: {have} for {want}"
        );
    }
}

/// A row's product depends on nothing but the row and its matrix: not on the other rows, on its
/// place among them, or on the groups around it.
#[test]
fn a_row_of_a_group_is_itself() {
    let Some((worker, _turn)) = bed::gpu_alone() else {
        return;
    };
    let (depth, cols) = (264, 320);
    let mut cx = Cx::infer(worker);
    let weights = bed::noise(5, 2 * cols * depth);
    let w = upload(&mut cx, &weights, &[2, cols, depth], DType::BF16).unwrap();
    let row = bed::noise(6, depth);
    let mut product = |before: usize, after: usize| {
        let rows = before + 1 + after;
        let mut x = bed::noise(7, rows * depth);
        x[before * depth..][..depth].copy_from_slice(&row);
        let x = upload(&mut cx, &x, &[rows, depth], DType::BF16).unwrap();
        let bounds = cx
            .tensor(&[0, (before / 2) as i32, rows as i32], &[3])
            .unwrap();
        let y = cx.grouped_linear(&x, &w, &bounds, None).unwrap();
        let all = y.to_vec::<bf16>().unwrap();
        all[before * cols..][..cols].to_vec()
    };
    let alone = product(0, 0);
    for (before, after) in [(2, 0), (127, 3), (200, 300), (513, 1)] {
        assert_eq!(
            product(before, after),
            alone,
            "{before} before, {after} after"
        );
    }
}

/// The whole block with biases and GPT-OSS's unit.
#[test]
fn blocks_of_experts_have_their_gradients() {
    let glu = Glu::Clamped {
        alpha: 1.702,
        limit: 7.0,
    };
    for options in [
        QWEN,
        MoeOptions {
            top_k: 1,
            weights: RouteWeights::Chosen,
            glu,
        },
    ] {
        let small = |x: f64| x / 2.0;
        let inputs = [
            randn(1, &[2, 3, 6]),
            randn(2, &[4, 6]),
            randn(3, &[4, 10, 6]).map(small),
            randn(4, &[4, 6, 5]).map(small),
            randn(5, &[4]),
            randn(6, &[4, 10]).map(small),
            randn(7, &[4, 6]).map(small),
        ];
        // Narrow types may pick other experts, and then nothing agrees.
        let strict = Strict {
            dtypes: &[DType::F32],
            ..Strict::default()
        };
        check_with("moe", &inputs, strict, |cx, x| {
            let experts = Experts {
                router: &x[1],
                router_bias: Some(&x[4]),
                gate_up: &x[2],
                gate_up_bias: Some(&x[5]),
                down: &x[3],
                down_bias: Some(&x[6]),
            };
            let (y, logits, routing) = cx.moe(&x[0], experts, options)?;
            Ok(vec![y, cx.load_balancing_loss(&logits, routing.choice())?])
        });
    }
}

#[test]
fn blocks_agree_with_pytorch() {
    let file = golden::open("moe");
    for name in ["block", "idle_experts"] {
        let case = file.case(name);
        case.check(|cx, t| {
            let (y, _, routing) = cx.moe(t.of("in.x"), experts(t), QWEN)?;
            assert_eq!(
                routing.choice().to_f64_vec()?,
                case.f64("chosen").0,
                "{name}: chosen experts"
            );
            crate::bed::close(
                name,
                &[routing.weights().to_f64_vec()?],
                &[case.f64("weights").0],
                4e-6,
            );
            Ok(y)
        });
    }
    file.case("balance").check(|cx, t| {
        let x = cx.reshape(t.of("in.x"), &[-1, 20])?;
        let logits = cx.linear(&x, t.of("p.gate.weight"), None)?;
        let routing = cx.moe_route(&logits, 2, RouteWeights::Renormalized)?;
        cx.load_balancing_loss(&logits, routing.choice())
    });
}

fn experts(t: &golden::Inputs) -> Experts<'_> {
    Experts {
        router: t.of("p.gate.weight"),
        router_bias: None,
        gate_up: t.of("p.experts.gate_up_proj"),
        gate_up_bias: None,
        down: t.of("p.experts.down_proj"),
        down_bias: None,
    }
}

#[test]
fn what_does_not_fit_is_named() {
    let mut cx = Cx::infer(&worker(1));
    let text = |result: Result<Tensor>| result.unwrap_err().to_string();
    let logits = cx.zeros(DType::F32, &[4, 3]).unwrap();
    for k in [0, 4] {
        let error = cx
            .moe_route(&logits, k, RouteWeights::Plain)
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("moe_route") && error.contains("[4, 3]"),
            "{error}"
        );
    }
    let routing = cx.moe_route(&logits, 2, RouteWeights::Plain).unwrap();
    let x = cx.zeros(DType::F32, &[5, 6]).unwrap();
    let error = text(cx.moe_dispatch(&x, &routing));
    assert!(
        error.contains("[5, 6]") && error.contains("[4, 2]"),
        "{error}"
    );
    assert!(text(cx.moe_combine(&x, &routing)).contains("[5, 6]"));
    let w = cx.zeros(DType::F32, &[3, 2, 7]).unwrap();
    let error = text(cx.grouped_linear(&x, &w, routing.offsets(), None));
    assert!(
        error.contains("[5, 6]") && error.contains("[3, 2, 7]"),
        "{error}"
    );
    let w = cx.zeros(DType::F32, &[3, 2, 6]).unwrap();
    let error = text(cx.grouped_linear(&x, &w, routing.choice(), None));
    assert!(error.contains("[4, 2]"), "{error}");
    let far = cx.tensor(&[0i32, 2, 4, 9], &[4]).unwrap();
    assert!(text(cx.grouped_linear(&x, &w, &far, None)).contains("5 rows"));
    let stray = cx.tensor(&[0i64, 3, 1, 2], &[4, 1]).unwrap();
    let error = text(cx.load_balancing_loss(&logits, &stray));
    assert!(error.contains("index 3 at position 1"), "{error}");
}
