//! What the host decides, checked without a GPU.

use super::{
    BatchStep, MatMulCall, ProductMethod, ProductSizes, Steps, Tasks, distinct, packed, scratch,
};
use crate::dtype::DType;
use crate::kernel::{Kernel, View};
use crate::shape::{Layout, Shape};

fn view(first: usize, dims: &[usize], strides: &[isize]) -> View {
    let layout = Layout::strided(Shape::new(dims).unwrap(), strides);
    View {
        ptr: first as u64 * 8,
        dtype: DType::F64,
        layout,
    }
}

fn dense(first: usize, dims: &[usize]) -> View {
    View {
        ptr: first as u64 * 8,
        dtype: DType::F64,
        layout: Layout::contiguous(Shape::new(dims).unwrap()),
    }
}

/// Every element of a view, row-major, as an index into memory.
fn places(view: &View) -> Vec<usize> {
    let mut all = vec![view.ptr as isize / 8];
    for (&size, &stride) in view.shape().dims().iter().zip(view.layout.strides()) {
        all = all
            .iter()
            .flat_map(|at| (0..size as isize).map(move |i| at + i * stride))
            .collect();
    }
    all.into_iter().map(|at| at as usize).collect()
}

const ALPHA: f64 = 0.5;
const BETA: f64 = 3.0;

/// The contract, element by element.
fn expected(memory: &[f64], a: &View, b: &View, c: &View, bias: usize) -> Vec<f64> {
    let ProductSizes { batches, m, n, k } = ProductSizes::of(a, c);
    let (pa, pb, pc) = (places(a), places(b), places(c));
    let element = |x: usize| {
        let (batch, i, j) = (x / (m * n), x / n % m, x % n);
        let term = |l| memory[pa[(batch * m + i) * k + l]] * memory[pb[(batch * k + l) * n + j]];
        ALPHA * (0..k).map(term).sum::<f64>() + memory[bias + j] + BETA * memory[pc[x]]
    };
    (0..batches * m * n).map(element).collect()
}

const C: usize = 4000;
const BIAS: usize = 6000;
const COPY: usize = 7000;

/// Whole numbers, so that no order of sums rounds.
fn check(name: &str, a: &View, b: &View, calls: usize) {
    let mut memory: Vec<f64> = (0..12_000)
        .map(|i| f64::from((i * 37 + 11) % 19 - 9))
        .collect();
    let mut dims = a.shape().dims().to_vec();
    *dims.last_mut().unwrap() = b.shape().dims()[dims.len() - 1];
    let (c, bias) = (dense(C, &dims), dense(BIAS, &dims[dims.len() - 1..]));
    let want = expected(&memory, a, b, &c, BIAS);
    // As the way with copies does it, whether or not it would be worth one here.
    let mut room = COPY;
    let mut settled = |view: &View| {
        if super::Lie::of(&view.layout).is_some() {
            return *view;
        }
        let from = places(&distinct(view));
        from.iter()
            .enumerate()
            .for_each(|(i, at)| memory[room + i] = memory[*at]);
        room += from.len();
        packed(view, (room - from.len()) as u64 * 8)
    };
    let (a, b) = (settled(a), settled(b));
    let product = MatMulCall {
        a: &a,
        b: &b,
        c: &c,
        bias: Some(&bias),
        alpha: ALPHA,
        beta: BETA,
    };
    let mut made = 0;
    let emulate = |task: &super::LtTask| {
        task.emulate(&mut memory);
        made += 1;
        Ok(true)
    };
    assert!(Tasks::of(&product, 0, 1 << 20).all(emulate).unwrap());
    assert_eq!(made, calls, "{name}");
    assert_eq!(&memory[C..C + want.len()], want, "{name}");
}

/// Rows and columns, leading dimensions and batches reach the library so that its columns give our
/// rows.
#[test]
fn the_librarys_columns_are_our_rows() {
    let transposed = |first, [m, k]: [usize; 2]| view(first, &[m, k], &[1, m as isize]);
    check("dense", &dense(0, &[5, 7]), &dense(1000, &[7, 3]), 1);
    check(
        "left transposed",
        &transposed(0, [5, 7]),
        &dense(1000, &[7, 3]),
        1,
    );
    check(
        "right transposed",
        &dense(0, &[5, 7]),
        &transposed(1000, [7, 3]),
        1,
    );
    check(
        "both transposed, cut out",
        &view(3, &[5, 7], &[1, 9]),
        &view(1001, &[7, 3], &[1, 11]),
        1,
    );
    check(
        "neither stride is 1",
        &view(0, &[5, 7], &[30, 2]),
        &view(1000, &[7, 3], &[2, 40]),
        1,
    );
    check(
        "backwards",
        &view(99, &[5, 7], &[8, -1]),
        &view(1200, &[7, 3], &[-4, 1]),
        1,
    );
    check(
        "one row",
        &view(0, &[1, 7], &[0, 1]),
        &dense(1000, &[7, 3]),
        1,
    );
    check(
        "a strided row",
        &view(0, &[1, 7], &[0, 5]),
        &dense(1000, &[7, 3]),
        1,
    );
    check(
        "one column",
        &dense(0, &[5, 7]),
        &view(1000, &[7, 1], &[4, 9]),
        1,
    );
    check(
        "depth 1",
        &view(0, &[5, 1], &[2, 77]),
        &view(1000, &[1, 3], &[77, 1]),
        1,
    );
    check(
        "a repeated row",
        &view(0, &[5, 7], &[0, 1]),
        &dense(1000, &[7, 3]),
        1,
    );
    check("all ones", &dense(0, &[1, 1]), &dense(1000, &[1, 1]), 1);
}

#[test]
fn batches_are_one_call_where_one_stride_serves() {
    check(
        "batch",
        &dense(0, &[2, 3, 5, 4]),
        &dense(1000, &[2, 3, 4, 3]),
        1,
    );
    check(
        "one matrix on the right",
        &dense(0, &[2, 3, 5, 4]),
        &view(1000, &[2, 3, 4, 3], &[0, 0, 3, 1]),
        1,
    );
    check(
        "one matrix on the left",
        &view(0, &[6, 5, 4], &[0, 4, 1]),
        &dense(1000, &[6, 4, 3]),
        1,
    );
    check(
        "rows apart",
        &view(0, &[6, 1, 4], &[9, 0, 1]),
        &view(1000, &[6, 4, 3], &[0, 3, 1]),
        1,
    );
    check(
        "crossed",
        &view(0, &[2, 3, 5, 4], &[20, 0, 4, 1]),
        &view(1000, &[2, 3, 4, 3], &[0, 12, 3, 1]),
        2,
    );
    check(
        "heads",
        &view(0, &[2, 3, 5, 4], &[60, 4, 12, 1]),
        &view(1000, &[2, 3, 4, 5], &[60, 4, 1, 12]),
        2,
    );
    check(
        "repeated and strided",
        &view(0, &[3, 5, 4], &[0, 9, 2]),
        &view(1000, &[3, 4, 2], &[20, 5, 2]),
        1,
    );
    let sizes = ProductSizes {
        batches: 6,
        m: 5,
        n: 3,
        k: 4,
    };
    let merged = Steps::of(
        &dense(0, &[2, 1, 3, 5, 4]),
        &dense(0, &[2, 1, 3, 4, 3]),
        &sizes,
    );
    assert_eq!(
        merged.as_slice(),
        [BatchStep {
            count: 6,
            a: 20,
            b: 12,
            c: 15
        }]
    );
}

/// Sums over nothing still write; empty results ask for nothing.
#[test]
fn ways_and_scratch_follow_from_shapes() {
    let way = |a: &[usize], b: &[usize], c: &[usize]| {
        ProductMethod::of(&dense(0, a), &dense(0, b), &dense(0, c))
    };
    assert_eq!(
        way(&[5, 0], &[0, 3], &[5, 3]),
        ProductMethod::WithoutProduct
    );
    assert_eq!(way(&[0, 4], &[4, 3], &[0, 3]), ProductMethod::Nothing);
    assert_eq!(
        way(&[5, 4], &[4, 3], &[5, 3]),
        ProductMethod::Library { copies: [false; 2] }
    );
    let scratch = |a: View, n: usize| {
        let (m, k) = (a.shape()[0], a.shape()[1]);
        let operands = [Some(a), Some(dense(0, &[k, n])), None];
        scratch(
            &Kernel::MatMul {
                alpha: 1.0,
                beta: 0.0,
            },
            &operands,
            &[Some(dense(0, &[m, n]))],
        )
    };
    assert_eq!(
        scratch(view(0, &[8, 4], &[9, 2]), 8),
        0,
        "too small for a copy"
    );
    assert_eq!(scratch(dense(0, &[8, 4]), 8), 1 << 20);
    assert_eq!(scratch(dense(0, &[4096, 64]), 4096), 32 << 20);
    assert_eq!(
        scratch(view(0, &[512, 512], &[2048, 2]), 512),
        (16 << 20) + 512 * 512 * 8
    );
}

/// Tasks are made for every product that is launched.
#[test]
fn a_products_tasks_allocate_nothing() {
    let (a, b, c) = (
        dense(0, &[2, 3, 5, 4]),
        dense(1000, &[2, 3, 4, 3]),
        dense(C, &[2, 3, 5, 3]),
    );
    let product = MatMulCall {
        a: &a,
        b: &b,
        c: &c,
        bias: None,
        alpha: ALPHA,
        beta: BETA,
    };
    let mut keys = crate::cuda::compile::Table::default();
    let count = crate::cuda::tests::allocations(|| {
        let known = |task: &super::LtTask| Ok(*keys.entry(task.key).or_insert(true));
        assert!(Tasks::of(&product, 0, 1 << 20).all(known).unwrap());
    });
    assert_eq!(count, 0);
}
