//! Matrix products, linear layers and their LoRA branch.

use roundpipe_tensor::ops::Lora;
use roundpipe_tensor::{Cx, DType, Error};

use crate::bed::{Lie, Strict, check, check_with, randn, worker};
use crate::golden;

/// Sums of many products in 16 bits carry more rounding than the elementwise table allows for.
const SUMS: Strict = Strict {
    slack: 2.0,
    differences: true,
    dtypes: &[DType::F32, DType::BF16, DType::F16],
};

#[test]
fn products_of_every_rank_and_lie() {
    let shapes: [(&[usize], &[usize]); 12] = [
        (&[5, 7], &[7, 3]),
        (&[1, 1], &[1, 1]),
        (&[1, 9], &[9, 33]),
        (&[17, 1], &[1, 5]),
        (&[2, 5, 4], &[2, 4, 3]),
        (&[2, 5, 4], &[4, 3]),
        (&[5, 4], &[3, 4, 2]),
        (&[2, 1, 5, 4], &[3, 4, 2]),
        (&[3, 4, 2, 5], &[3, 1, 5, 2]),
        (&[0, 4], &[4, 3]),
        (&[5, 0], &[0, 3]),
        (&[2, 0, 4], &[4, 3]),
    ];
    for (a, b) in shapes {
        for (left, right) in [
            (Lie::Dense, Lie::Dense),
            (Lie::Transposed, Lie::Dense),
            (Lie::Dense, Lie::Transposed),
            (Lie::CutOut, Lie::CutOut),
        ] {
            let inputs = [randn(1, a).lying(left), randn(2, b).lying(right)];
            let name = format!("matmul {a:?} {left:?} {b:?} {right:?}");
            check_with(&name, &inputs, SUMS, |cx, x| {
                Ok(vec![cx.matmul(&x[0], &x[1])?])
            });
        }
    }
}

#[test]
fn vectors_count_as_rows_and_columns() {
    for (a, b, out) in [
        (&[4][..], &[4][..], &[][..]),
        (&[4], &[4, 3], &[3]),
        (&[5, 4], &[4], &[5]),
        (&[4], &[2, 4, 3], &[2, 3]),
        (&[2, 5, 4], &[4], &[2, 5]),
    ] {
        check_with(
            &format!("matmul {a:?} {b:?}"),
            &[randn(3, a), randn(4, b)],
            SUMS,
            |cx, x| {
                let y = cx.matmul(&x[0], &x[1])?;
                assert_eq!(y.dims(), out);
                Ok(vec![y])
            },
        );
    }
}

/// Sizes past one block of rows, columns and sums, where tiles and threads meet.
#[test]
fn large_products_agree_in_every_type() {
    let strict = Strict {
        slack: 2.0,
        differences: false,
        ..Strict::default()
    };
    for (m, k, n) in [(130, 70, 190), (33, 1100, 65), (257, 64, 31)] {
        let inputs = [randn(5, &[m, k]), randn(6, &[k, n]).lying(Lie::Transposed)];
        check_with(&format!("matmul {m} {k} {n}"), &inputs, strict, |cx, x| {
            Ok(vec![cx.matmul(&x[0], &x[1])?])
        });
    }
}

#[test]
fn linear_with_and_without_bias() {
    for rows in [&[6, 5][..], &[2, 3, 5], &[5], &[0, 5], &[1, 5]] {
        let inputs = [randn(7, rows), randn(8, &[4, 5]), randn(9, &[4])];
        let name = format!("linear {rows:?}");
        check(&name, &inputs[..2], |cx, x| {
            Ok(vec![cx.linear(&x[0], &x[1], None)?])
        });
        check(&name, &inputs, |cx, x| {
            Ok(vec![cx.linear(&x[0], &x[1], Some(&x[2]))?])
        });
    }
    let strided = [
        randn(7, &[6, 5]).lying(Lie::CutOut),
        randn(8, &[4, 5]).lying(Lie::Transposed),
    ];
    check("linear strided", &strided, |cx, x| {
        Ok(vec![cx.linear(&x[0], &x[1], None)?])
    });
    // One tensor as input and weight: both of its gradients count.
    check("linear of itself", &[randn(10, &[5, 5])], |cx, x| {
        Ok(vec![cx.linear(&x[0], &x[0], None)?])
    });
}

#[test]
fn a_lora_branch_with_and_without_dropout() {
    let inputs = [
        randn(11, &[3, 6]),
        randn(12, &[4, 6]).constant(),
        randn(13, &[2, 6]),
        randn(14, &[4, 2]),
    ];
    for dropout in [0.0, 0.5] {
        check_with(&format!("lora {dropout}"), &inputs, SUMS, |cx, x| {
            let lora = Lora {
                a: &x[2],
                b: &x[3],
                scale: 0.75,
                dropout,
            };
            Ok(vec![cx.linear_lora(&x[0], &x[1], None, lora)?])
        });
    }
}

#[test]
fn products_agree_with_pytorch() {
    let file = golden::open("general_ops");
    for name in [
        "matmul",
        "matmul_batch",
        "matmul_broadcast",
        "matmul_vector",
    ] {
        file.case(name)
            .check(|cx, t| cx.matmul(t.of("in.x"), t.of("in.y")));
    }
    let file = golden::open("fused_ops");
    for name in ["lora", "lora_bias"] {
        file.case(name).check(|cx, t| {
            let lora = Lora {
                a: t.of("p.lora_a"),
                b: t.of("p.lora_b"),
                scale: 2.0,
                dropout: 0.0,
            };
            cx.linear_lora(t.of("in.x"), t.of("p.weight"), t.get("p.bias"), lora)
        });
    }
}

#[test]
fn sizes_that_do_not_fit_are_named() {
    let mut cx = Cx::infer(&worker(1));
    let [a, b, c] = [&[2, 3][..], &[4, 5], &[3]].map(|d| cx.zeros(DType::F32, d).unwrap());
    let shapes = |error: Error, words: [&str; 3]| {
        let text = error.to_string();
        assert!(words.iter().all(|w| text.contains(w)), "{text}");
    };
    shapes(
        cx.matmul(&a, &b).unwrap_err(),
        ["matmul", "[2, 3]", "[4, 5]"],
    );
    shapes(
        cx.linear(&a, &b, None).unwrap_err(),
        ["linear", "[2, 3]", "[4, 5]"],
    );
    let square = cx.zeros(DType::F32, &[2, 3]).unwrap();
    shapes(
        cx.linear(&a, &square, Some(&c)).unwrap_err(),
        ["linear", "[3]", "[2]"],
    );
    let scalar = cx.zeros(DType::F32, &[]).unwrap();
    shapes(
        cx.matmul(&a, &scalar).unwrap_err(),
        ["matmul", "[2, 3]", "[]"],
    );
    let half = cx.zeros(DType::BF16, &[3, 2]).unwrap();
    shapes(cx.matmul(&a, &half).unwrap_err(), ["matmul", "f32", "bf16"]);
    let whole = cx.zeros(DType::I64, &[3, 2]).unwrap();
    assert!(matches!(
        cx.matmul(&whole, &whole),
        Err(Error::DType { .. })
    ));
}
