//! Shapes: views, and copies that put tensors together or apart.

use roundpipe_tensor::{Cx, DType, Result};

use crate::bed::{Lie, check, randn, worker};
use crate::golden;

#[test]
fn views_and_their_gradients() {
    check("reshape", &[randn(1, &[3, 4, 5])], |cx, x| {
        Ok(vec![cx.reshape(&x[0], &[5, -1])?])
    });
    check("permute then reshape", &[randn(2, &[3, 4, 5])], |cx, x| {
        let y = cx.permute(&x[0], &[2, 0, 1])?;
        Ok(vec![cx.reshape(&y, &[-1, 2])?])
    });
    check("narrow", &[randn(3, &[3, 7])], |cx, x| {
        Ok(vec![
            cx.narrow(&x[0], -1, 2, 3)?,
            cx.narrow(&x[0], 0, 1, 1)?,
        ])
    });
    check("broadcast_to", &[randn(4, &[3, 1])], |cx, x| {
        Ok(vec![cx.broadcast_to(&x[0], &[2, 3, 5])?])
    });
    check("empty", &[randn(5, &[0, 4])], |cx, x| {
        Ok(vec![cx.reshape(&x[0], &[2, 0])?])
    });
}

#[test]
fn dimensions_come_and_go() {
    for lie in [Lie::Dense, Lie::Transposed, Lie::CutOut] {
        check(
            "squeeze, unsqueeze",
            &[randn(6, &[3, 1, 4]).lying(lie)],
            |cx, x| {
                let y = cx.squeeze(&x[0], 1)?;
                let z = cx.unsqueeze(&y, -1)?;
                let w = cx.unsqueeze(&y, 0)?;
                assert_eq!(
                    (y.dims(), z.dims(), w.dims()),
                    (&[3, 4][..], &[3, 4, 1][..], &[1, 3, 4][..])
                );
                Ok(vec![y, z, w])
            },
        );
        check("flatten", &[randn(7, &[2, 3, 4]).lying(lie)], |cx, x| {
            let y = cx.flatten(&x[0], 1, -1)?;
            assert_eq!(y.dims(), [2, 12]);
            Ok(vec![y, cx.flatten(&x[0], 0, -1)?])
        });
        check("select", &[randn(8, &[3, 4, 2]).lying(lie)], |cx, x| {
            Ok(vec![cx.select(&x[0], 1, 3)?, cx.select(&x[0], -1, 0)?])
        });
    }
}

#[test]
fn tensors_come_together() {
    for lie in [Lie::Dense, Lie::Transposed, Lie::CutOut] {
        let inputs = [
            randn(9, &[2, 3, 4]).lying(lie),
            randn(10, &[2, 1, 4]).lying(lie),
        ];
        check("cat", &inputs, |cx, x| {
            let y = cx.cat(&[&x[0], &x[1], &x[0]], 1)?;
            assert_eq!(y.dims(), [2, 7, 4]);
            Ok(vec![y])
        });
        let inputs = [randn(11, &[2, 3]).lying(lie), randn(12, &[2, 3]).lying(lie)];
        for dim in [0, 1, 2, -1] {
            check("stack", &inputs, |cx, x| {
                Ok(vec![cx.stack(&[&x[0], &x[1]], dim)?])
            });
        }
    }
    check(
        "cat of empty",
        &[randn(13, &[0, 3]), randn(14, &[2, 3])],
        |cx, x| Ok(vec![cx.cat(&[&x[0], &x[1]], 0)?]),
    );
}

#[test]
fn tensors_come_apart() {
    check("chunk", &[randn(15, &[3, 7])], |cx, x| {
        cx.chunk(&x[0], 3, 1)
    });
    check(
        "chunk more than there is",
        &[randn(16, &[2, 3])],
        |cx, x| cx.chunk(&x[0], 5, 0),
    );
    check(
        "split",
        &[randn(17, &[3, 7]).lying(Lie::Transposed)],
        |cx, x| cx.split(&x[0], 2, -1),
    );
    check("split, one piece unused", &[randn(18, &[6, 2])], |cx, x| {
        let mut parts = cx.split_sizes(&x[0], &[1, 3, 2], 0)?;
        parts.remove(1);
        Ok(parts)
    });
}

#[test]
fn copies_along_dimensions() {
    for lie in [Lie::Dense, Lie::Transposed, Lie::CutOut] {
        let x = [randn(19, &[2, 3, 4]).lying(lie)];
        check("repeat", &x, |cx, x| {
            Ok(vec![cx.repeat(&x[0], &[2, 1, 3])?])
        });
        check("repeat nothing", &x, |cx, x| {
            Ok(vec![cx.repeat(&x[0], &[1, 0, 1])?])
        });
        check("flip", &x, |cx, x| {
            Ok(vec![cx.flip(&x[0], &[0, -1])?, cx.flip(&x[0], &[])?])
        });
        check("pad", &x, |cx, x| {
            Ok(vec![cx.pad(&x[0], &[(1, 0), (0, 0), (2, 3)], 1.5)?])
        });
        check("tril", &x, |cx, x| {
            Ok(vec![cx.tril(&x[0], 0)?, cx.tril(&x[0], 1)?])
        });
        check("triu", &x, |cx, x| {
            Ok(vec![cx.triu(&x[0], 0)?, cx.triu(&x[0], -1)?])
        });
    }
}

#[test]
fn values_land_where_they_should() -> Result<()> {
    let mut cx = Cx::infer(&worker(1));
    let x = cx.arange(DType::I32, 0.0, 6.0, 1.0)?;
    let x = cx.reshape(&x, &[2, 3])?;
    assert_eq!(cx.flip(&x, &[1])?.to_vec::<i32>()?, [2, 1, 0, 5, 4, 3]);
    assert_eq!(
        cx.repeat(&x, &[2, 2])?.to_vec::<i32>()?[..7],
        [0, 1, 2, 0, 1, 2, 3]
    );
    assert_eq!(
        cx.pad(&x, &[(0, 1), (1, 0)], 9.0)?.to_vec::<i32>()?,
        [9, 0, 1, 2, 9, 3, 4, 5, 9, 9, 9, 9]
    );
    assert_eq!(cx.tril(&x, 0)?.to_vec::<i32>()?, [0, 0, 0, 3, 4, 0]);
    assert_eq!(cx.triu(&x, 1)?.to_vec::<i32>()?, [0, 1, 2, 0, 0, 5]);
    let parts = cx.chunk(&x, 2, 1)?;
    assert_eq!(parts[0].to_vec::<i32>()?, [0, 1, 3, 4]);
    assert_eq!(parts[1].to_vec::<i32>()?, [2, 5]);
    let index = cx.tensor(&[2i64, 0, 7], &[3])?;
    assert_eq!(
        cx.one_hot(&index, 3, DType::F32)?.to_vec::<f32>()?,
        [0., 0., 1., 1., 0., 0., 0., 0., 0.]
    );
    Ok(())
}

/// A large transpose takes more than one task and leaves ragged blocks.
#[test]
fn large_transposes_copy_every_element() -> Result<()> {
    for (rows, columns) in [(301, 517), (2, 40_001), (40_001, 2)] {
        for dtype in [DType::F64, DType::F32, DType::BF16, DType::U8] {
            let mut cx = Cx::infer(&worker(2));
            let x = cx.arange(DType::I32, 0.0, (rows * columns) as f64, 1.0)?;
            let x = cx.cast(&x, DType::F64)?;
            // Remainders are exact in every type.
            let x = cx.affine(&x, 0.618_033_988_749, 0.0)?;
            let whole = cx.floor(&x)?;
            let x = cx.sub(&x, &whole)?;
            let x = cx.affine(&x, 255.0, 0.0)?;
            let x = cx.floor(&x)?;
            let x = cx.cast(&x, dtype)?;
            let x = cx.reshape(&x, &[rows as isize, columns as isize])?;
            let turned = cx.transpose(&x, 0, 1)?;
            let turned = cx.contiguous(&turned)?;
            let (before, after) = (x.to_f64_vec()?, turned.to_f64_vec()?);
            let wrong = (0..rows * columns).find(|i| {
                after[(i % columns) * rows + i / columns].to_bits() != before[*i].to_bits()
            });
            assert_eq!(wrong, None, "{rows} x {columns} {dtype}");
        }
    }
    Ok(())
}

#[test]
fn refusals_name_the_operation_and_what_it_got() -> Result<()> {
    let mut cx = Cx::infer(&worker(1));
    let x = cx.zeros(DType::F32, &[2, 3])?;
    let v = cx.zeros(DType::F32, &[3])?;
    let i = cx.zeros(DType::I32, &[2, 3])?;
    let refusals = [
        (cx.cat(&[], 0), "cat: no tensors given"),
        (
            cx.cat(&[&x, &v], 0),
            "cat: shapes [2, 3] and [3] do not fit together",
        ),
        (
            cx.cat(&[&x, &i], 0),
            "cat: f32 [2, 3] and i32 [2, 3] differ in dtype; convert one with `cast`",
        ),
        (
            cx.stack(&[&x, &v], 0),
            "stack: shapes [3] and [2, 3] do not fit together",
        ),
        (
            cx.squeeze(&x, 0),
            "squeeze: dimension 0 of [2, 3] has size 2, not 1",
        ),
        (
            cx.unsqueeze(&x, 4),
            "unsqueeze: no place 4 among the dimensions of [2, 3]",
        ),
        (cx.flatten(&x, 1, 0), "flatten: dimensions 1 to 0 of [2, 3]"),
        (
            cx.select(&x, 1, 3),
            "select: index 3 along dimension 1 of [2, 3]",
        ),
        (cx.repeat(&x, &[2]), "repeat: 1 counts for [2, 3]"),
        (cx.flip(&x, &[0, -2]), "flip: dimension 0 of [2, 3] twice"),
        (cx.pad(&x, &[], 0.0), "pad: 0 pairs for [2, 3]"),
        (cx.tril(&v, 0), "tril: [3] has fewer than two dimensions"),
    ];
    for (have, want) in refusals {
        assert_eq!(have.unwrap_err().to_string(), want);
    }
    assert!(
        cx.pad(&x, &[(usize::MAX, 0), (0, 1)], 0.0).is_err(),
        "sizes are checked before memory is asked for"
    );
    assert!(cx.repeat(&x, &[usize::MAX, 1]).is_err());
    assert_eq!(
        cx.split(&x, 0, 0).unwrap_err().to_string(),
        "split: pieces of size 0 of [2, 3]"
    );
    let text = cx.split_sizes(&x, &[1, 2], 0).unwrap_err().to_string();
    assert_eq!(text, "split: [1, 2] do not add up to dimension 0 of [2, 3]");
    Ok(())
}

/// Values and gradients of PyTorch.
#[test]
fn golden_shapes() {
    let file = golden::open("general_ops");
    file.case("cat")
        .check(|cx, x| cx.cat(&[x.of("in.x"), x.of("in.y")], 1));
    file.case("flip").check(|cx, x| cx.flip(x.of("in.x"), &[1]));
    file.case("pad")
        .check(|cx, x| cx.pad(x.of("in.x"), &[(0, 0), (0, 3), (2, 1)], 0.0));
    file.case("permute")
        .check(|cx, x| cx.permute(x.of("in.x"), &[2, 0, 1]));
}
