//! Indexing: reading and adding at named places.

use roundpipe_tensor::{Cx, DType, Param, Shape};

use crate::bed::{Lie, Strict, check, check_with, fixed, randn, worker};
use crate::golden;

#[test]
fn selecting_and_adding_slices() {
    for lie in [Lie::Dense, Lie::Transposed, Lie::CutOut] {
        for (dim, dtype) in [
            (0, DType::I64),
            (1, DType::I32),
            (2, DType::U32),
            (-1, DType::I64),
        ] {
            let index = fixed(dtype, &[2, 0, 2, 1], &[4]);
            let mut dims = [4, 4, 4];
            let name = format!("{dim} {lie:?}");
            check(
                &format!("index_select {name}"),
                &[randn(1, &[3, 4, 5]).lying(lie), index.clone()],
                |cx, x| Ok(vec![cx.index_select(&x[0], dim, &x[1])?]),
            );
            dims[(dim.rem_euclid(3)) as usize] = 3;
            check(
                &format!("index_add {name}"),
                &[
                    randn(2, &dims).lying(lie),
                    index,
                    randn(3, &[4, 4, 4]).lying(lie),
                ],
                |cx, x| Ok(vec![cx.index_add(&x[0], dim, &x[1], &x[2])?]),
            );
        }
    }
    check(
        "select nothing",
        &[randn(4, &[3, 2]), fixed(DType::I64, &[], &[0])],
        |cx, x| Ok(vec![cx.index_select(&x[0], 0, &x[1])?]),
    );
}

#[test]
fn gathering_and_scattering() {
    let index: Vec<i64> = (0..24).map(|i| (i * 7) % 3).collect();
    for lie in [Lie::Dense, Lie::Transposed, Lie::CutOut] {
        for dim in 0..3 {
            let at = fixed(DType::I64, &index, &[2, 3, 4]).lying(lie);
            let x = randn(5, &[3, 3, 4]).lying(lie);
            check(
                &format!("gather {dim} {lie:?}"),
                &[x.clone(), at.clone()],
                |cx, x| Ok(vec![cx.gather(&x[0], dim, &x[1])?]),
            );
            check(
                &format!("scatter_add {dim} {lie:?}"),
                &[x, at, randn(6, &[2, 3, 4]).lying(lie)],
                |cx, x| Ok(vec![cx.scatter_add(&x[0], dim, &x[1], &x[2])?]),
            );
        }
    }
}

/// Few lines of many elements, which a GPU sorts by destination.
#[test]
fn long_lines_scatter_in_order() {
    let index: Vec<i64> = (0..1400).map(|i| (i * i + i / 3) % 11).collect();
    // A narrow sum may be rounded at every addition.
    let strict = Strict {
        differences: false,
        dtypes: &[DType::F32],
        ..Strict::default()
    };
    for lie in [Lie::Dense, Lie::Transposed] {
        let at = fixed(DType::I32, &index, &[2, 700]).lying(lie);
        let inputs = [randn(11, &[3, 11]), at, randn(12, &[2, 700]).lying(lie)];
        check_with("long scatter_add", &inputs, strict, |cx, x| {
            Ok(vec![cx.scatter_add(&x[0], 1, &x[1], &x[2])?])
        });
    }
}

#[test]
fn embedding_of_any_ids() {
    let ids = fixed(DType::I64, &[4, 0, 4, 4, 1, 2], &[2, 3]);
    check("embedding", &[randn(7, &[6, 5]), ids.clone()], |cx, x| {
        Ok(vec![cx.embedding(&x[0], &x[1])?])
    });
    check(
        "embedding turned",
        &[randn(8, &[6, 5]).lying(Lie::Transposed), ids],
        |cx, x| Ok(vec![cx.embedding(&x[0], &x[1])?]),
    );
    check(
        "no ids",
        &[randn(9, &[6, 5]), fixed(DType::I32, &[], &[0, 2])],
        |cx, x| Ok(vec![cx.embedding(&x[0], &x[1])?]),
    );
    // Large enough for several tasks, each adding many rows at one place.
    let many: Vec<i64> = (0..900).map(|i| (i * i) % 17).collect();
    let strict = Strict {
        differences: false,
        ..Strict::default()
    };
    check_with(
        "large",
        &[randn(10, &[40, 257]), fixed(DType::I64, &many, &[900])],
        strict,
        |cx, x| Ok(vec![cx.embedding(&x[0], &x[1])?]),
    );
}

/// A parameter's gradient is added in place to what earlier microbatches left, and not to the
/// padding row.
#[test]
fn embedding_adds_to_the_parameters_accumulator() {
    let worker = worker(2);
    let weight = Param::full(DType::F32, &[4, 2], 0.5).unwrap();
    let mut cx = Cx::train(&worker);
    let into = worker
        .full(DType::F32, Shape::new(&[4, 2]).unwrap(), 1.0)
        .unwrap();
    let here = worker
        .full(DType::F32, Shape::new(&[4, 2]).unwrap(), 0.5)
        .unwrap();
    let place = into.view().ptr;
    let w = cx.bind(&weight, here, Some(into)).unwrap();
    let ids = cx.tensor(&[1i64, 3, 1, 0], &[4]).unwrap();
    let y = cx.embedding_padded(&w, &ids, Some(3)).unwrap();
    let loss = cx.sum_all(&y).unwrap();
    let grads = cx.backward(&loss).unwrap();
    let grad = grads.param(&weight).unwrap();
    assert_eq!(
        grad.to_vec::<f32>().unwrap(),
        [2.0, 2.0, 3.0, 3.0, 1.0, 1.0, 1.0, 1.0]
    );
    assert_eq!(grad.view().ptr, place, "in place");
}

/// An index outside its dimension is refused, saying which one and where.
#[test]
fn wrong_indices_are_named() {
    let mut cx = Cx::infer(&worker(1));
    let x = cx.zeros(DType::F32, &[3, 2]).unwrap();
    let outside = cx.tensor(&[0i64, 3], &[2]).unwrap();
    let negative = cx.tensor(&[-1i32], &[1]).unwrap();
    let text = cx.index_select(&x, 0, &outside).unwrap_err().to_string();
    assert_eq!(text, "index_select: index 3 at position 1 is outside 0..3");
    let text = cx.embedding(&x, &negative).unwrap_err().to_string();
    assert!(
        text.contains("index -1 at position 0 is outside 0..3"),
        "{text}"
    );
    let text = cx.gather(&x, 0, &outside).unwrap_err().to_string();
    assert_eq!(text, "gather: shapes [3, 2] and [2] do not fit together");
    let text = cx.gather(&x, 0, &x.clone()).unwrap_err().to_string();
    assert_eq!(
        text,
        "gather: f32 [3, 2] is not supported; indices are i64, i32 or u32"
    );
    let text = cx
        .index_add(&x, 0, &outside, &x.clone())
        .unwrap_err()
        .to_string();
    assert_eq!(
        text,
        "index_add: shapes [3, 2] and [3, 2] do not fit together"
    );
}

#[test]
fn golden_indexing() {
    let file = golden::open("general_ops");
    file.case("embedding")
        .check(|cx, x| cx.embedding(x.of("in.weight"), x.of("in.ids")));
    file.case("gather")
        .check(|cx, x| cx.gather(x.of("in.x"), 1, x.of("in.index")));
    file.case("index_select")
        .check(|cx, x| cx.index_select(x.of("in.x"), 1, x.of("in.index")));
    let add = |case: &str| {
        file.case(case).check(|cx, x| {
            let (x, index, src) = (x.of("in.x"), x.of("in.index"), x.of("in.src"));
            if case == "index_add" {
                cx.index_add(x, 0, index, src)
            } else {
                cx.scatter_add(x, 1, index, src)
            }
        });
    };
    add("index_add");
    add("scatter_add");
}
