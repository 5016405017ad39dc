//! Every instruction set of the machine against sums in f64.

use half::{bf16, f16};

use super::element::{GemmElement, PanelKernel, SumTarget};
use super::isa::Isa;
use super::plan::BlockExtents;
use super::{Mat, MatMut, Product, gemm_batch, gemm_by, gemm_serial, gemm_with};
use crate::cpu::threads::Threads;

/// A type whose numbers can be made from and turned into f64.
trait Number: Copy + PartialEq + std::fmt::Debug {
    /// Half a unit in the last place of 1.
    const EPSILON: f64;
    /// Half the distance between the numbers around 0: all that a relative bound leaves out.
    fn tiny() -> f64;
    fn of(x: f64) -> Self;
    fn f64(self) -> f64;
    fn bits(self) -> u64;
}

macro_rules! number {
    ($t:ty, $bits:literal, $of:expr, $to:expr) => {
        impl Number for $t {
            const EPSILON: f64 = 1.0 / (1_u64 << $bits) as f64;
            fn tiny() -> f64 {
                <$t>::from_bits(1).f64() / 2.0
            }
            fn of(x: f64) -> Self {
                $of(x)
            }
            fn f64(self) -> f64 {
                $to(self)
            }
            fn bits(self) -> u64 {
                self.to_bits().into()
            }
        }
    };
}
number!(f32, 24, |x| x as f32, f64::from);
number!(f64, 53, |x| x, |x| x);
number!(bf16, 8, bf16::from_f64, bf16::to_f64);
number!(f16, 11, f16::from_f64, f16::to_f64);

/// A small generator: tests must not depend on anything outside.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }
    fn below(&mut self, n: usize) -> usize {
        self.next() as usize % n
    }
    fn number(&mut self) -> f64 {
        self.next() as f64 / f64::from(1 << 30) - 1.0
    }
}

/// A matrix somewhere inside a larger vector whose other elements are NaN.
#[derive(Clone)]
struct Held<T> {
    data: Vec<T>,
    origin: usize,
    row: isize,
    col: isize,
}

impl<T: Number> Held<T> {
    fn new(random: &mut Random, rows: usize, cols: usize, (row, col): (isize, isize)) -> Self {
        let extent = |n: usize, stride: isize| n.saturating_sub(1) as isize * stride;
        let ends = [
            0,
            extent(rows, row),
            extent(cols, col),
            extent(rows, row) + extent(cols, col),
        ];
        let (low, high) = (ends.iter().min().unwrap(), ends.iter().max().unwrap());
        let guard = 70;
        let origin = guard + low.unsigned_abs();
        let data = vec![T::of(f64::NAN); origin + high.unsigned_abs() + 1 + guard];
        let mut held = Self {
            data,
            origin,
            row,
            col,
        };
        for i in 0..rows {
            for j in 0..cols {
                let at = held.index(i, j);
                held.data[at] = T::of(random.number());
            }
        }
        held
    }
    fn index(&self, i: usize, j: usize) -> usize {
        (self.origin as isize + i as isize * self.row + j as isize * self.col) as usize
    }
    fn at(&self, i: usize, j: usize) -> f64 {
        self.data[self.index(i, j)].f64()
    }
    fn mat(&self) -> Mat<T> {
        Mat {
            ptr: self.data.as_ptr().wrapping_add(self.origin),
            row: self.row,
            col: self.col,
        }
    }
    fn mat_mut(&mut self) -> MatMut<T> {
        MatMut {
            ptr: self.data.as_mut_ptr().wrapping_add(self.origin),
            row: self.row,
        }
    }
}

/// Strides of every kind for a matrix of this size.
fn strides(random: &mut Random, rows: usize, cols: usize) -> (isize, isize) {
    let (r, c) = (rows as isize, cols as isize);
    match random.below(8) {
        0 | 1 => (c, 1),
        2 | 3 => (1, r),
        4 => (c + 3, 1),
        5 => (-c, 1),
        6 => (2, -2 * r - 1),
        _ => [(0, 1), (1, 0), (0, 0)][random.below(3)],
    }
}

/// One product of random sizes, strides and factors against f64.
fn check<T: Number + GemmElement, O: Number + SumTarget<T::Sum>>(
    isa: Isa,
    threads: &Threads,
    seed: u64,
    sizes: [usize; 3],
) {
    check_kernel::<T, O>(isa, T::kernel(isa), threads, seed, sizes);
}

fn check_kernel<T: Number + GemmElement, O: Number + SumTarget<T::Sum>>(
    isa: Isa,
    kernel: &PanelKernel<T>,
    threads: &Threads,
    seed: u64,
    sizes: [usize; 3],
) {
    let random = &mut Random(seed);
    let [m, n, k] = sizes;
    let (sa, sb) = (strides(random, m, k), strides(random, k, n));
    let a = Held::<T>::new(random, m, k, sa);
    let b = Held::<T>::new(random, k, n, sb);
    let pitch = (n + random.below(5)) as isize;
    let mut c = Held::<O>::new(random, m, n, (pitch, 1));
    let bias: Vec<T> = (0..n).map(|_| T::of(random.number())).collect();
    let bias = (random.below(2) == 0).then_some(bias);
    let alpha = [1.0, 1.0, 0.5, -1.75][random.below(4)];
    let beta = [0.0, 0.0, 1.0, 0.25][random.below(4)];
    let before = c.clone();
    if beta == 0.0 {
        c.data.fill(O::of(f64::NAN));
    }
    let product = Product {
        m,
        n,
        k,
        a: a.mat(),
        b: b.mat(),
        c: c.mat_mut(),
        bias: bias.as_ref().map(|b| b.as_ptr()),
        alpha,
        beta,
    };
    // SAFETY: the operands are the vectors above, with all strides inside them.
    unsafe { gemm_by(isa, kernel, Some(threads), &product) };
    let what =
        format!("{isa:?} {sizes:?} strides {sa:?} {sb:?} alpha {alpha} beta {beta} seed {seed}");
    for i in 0..m {
        for j in 0..n {
            let terms = || (0..k).map(|p| alpha * a.at(i, p) * b.at(p, j));
            let bias = bias.as_ref().map_or(0.0, |b| b[j].f64());
            let old = if beta == 0.0 {
                0.0
            } else {
                beta * before.at(i, j)
            };
            let want = terms().sum::<f64>() + bias + old;
            let scale = terms().map(f64::abs).sum::<f64>() + bias.abs() + old.abs();
            let rounded = (want.abs() * O::EPSILON).max(O::tiny());
            let bound = rounded + scale * (8.0 + k as f64 / 4.0) * sum_epsilon::<T>();
            let got = c.at(i, j);
            assert!(
                (got - want).abs() <= bound,
                "({i}, {j}) is {got}, not {want}: {what}"
            );
        }
    }
    let inside: Vec<usize> = (0..m)
        .flat_map(|i| (0..n).map(move |j| (i, j)))
        .map(|(i, j)| c.index(i, j))
        .collect();
    let mut outside = vec![true; c.data.len()];
    inside.iter().for_each(|&x| outside[x] = false);
    for x in (0..c.data.len()).filter(|&x| outside[x]) {
        assert_eq!(
            c.data[x].bits(),
            O::of(f64::NAN).bits(),
            "element {x} outside the output: {what}"
        );
    }
}

/// Half a unit in the last place of what `T` is summed in.
fn sum_epsilon<T: GemmElement>() -> f64 {
    if size_of::<T::Sum>() == 8 {
        f64::EPSILON
    } else {
        f32::EPSILON.into()
    }
}

fn check_all_types(isa: Isa, threads: &Threads, seed: u64, sizes: [usize; 3]) {
    check::<f32, f32>(isa, threads, seed, sizes);
    check::<f64, f64>(isa, threads, seed, sizes);
    check::<bf16, bf16>(isa, threads, seed, sizes);
    check::<bf16, f32>(isa, threads, seed, sizes);
    check::<f16, f16>(isa, threads, seed, sizes);
    check::<f16, f32>(isa, threads, seed, sizes);
}

/// Small sizes meet every edge of every kernel, with strides of every kind; outside the operands
/// lie NaNs that must be neither used nor overwritten.
#[test]
fn small_products_agree_with_f64() {
    let threads = Threads::new(Some(1)).unwrap();
    for isa in Isa::available() {
        // The same cases for every set, so that a machine with more of them meets none that others
        // did not.
        let random = &mut Random(1);
        let (count, most) = if cfg!(miri) { (3, 12) } else { (60, 70) };
        for seed in 0..count {
            let sizes = [
                1 + random.below(most),
                1 + random.below(most),
                random.below(most),
            ];
            check_all_types(isa, &threads, seed, sizes);
        }
    }
}

/// A result between two subnormals of f16 is rounded to one of them, half their distance away at
/// most. (This case once stood above the bound on machines with AMX alone, which had sizes of their
/// own.)
#[test]
fn results_among_the_subnormals_agree_with_f64() {
    let threads = Threads::new(Some(1)).unwrap();
    for isa in Isa::available() {
        check::<f16, f16>(isa, &threads, 31, [36, 49, 1]);
    }
}

/// Sizes beyond one block along each of m, n and k, and beyond one piece of k.
#[test]
#[cfg_attr(miri, ignore = "millions of multiplications")]
fn large_products_agree_with_f64() {
    let threads = Threads::new(Some(2)).unwrap();
    for isa in Isa::available() {
        for (seed, sizes) in [[2500, 33, 9], [5, 2100, 20], [15, 35, 4500], [150, 70, 700]]
            .into_iter()
            .enumerate()
        {
            check_all_types(isa, &threads, seed as u64, sizes);
        }
    }
}

/// Several blocks along m and k at once: right panels are shared by rows, or sums kept per block of
/// rows.
#[test]
#[cfg_attr(miri, ignore = "millions of multiplications")]
fn blocks_of_rows_and_steps_agree_with_f64() {
    let threads = Threads::new(Some(1)).unwrap();
    for isa in Isa::available() {
        check_all_types(isa, &threads, 6, [600, 5, 2100]);
    }
}

/// Packing, edges and carried sums of the AMX kernel, on machines without AMX.
#[cfg(target_arch = "x86_64")]
#[test]
fn amx_kernel_agrees_with_f64_without_its_instructions() {
    if !Isa::available().contains(&Isa::Avx512) {
        return;
    }
    let threads = Threads::new(Some(2)).unwrap();
    let kernel = &super::amx::IMITATED;
    let random = &mut Random(77);
    for seed in 0..40 {
        let sizes = [
            1 + random.below(90),
            1 + random.below(90),
            random.below(150),
        ];
        check_kernel::<bf16, bf16>(Isa::Avx512, kernel, &threads, seed, sizes);
        check_kernel::<bf16, f32>(Isa::Avx512, kernel, &threads, seed, sizes);
    }
    check_kernel::<bf16, bf16>(Isa::Avx512, kernel, &threads, 3, [40, 70, 2500]);
    check_kernel::<bf16, f32>(Isa::Avx512, kernel, &threads, 4, [40, 70, 2500]);
}

/// A contiguous product with `T` as output; gives the bits.
fn bits<T: Number + GemmElement>(
    isa: Isa,
    threads: Option<&Threads>,
    [m, n, k]: [usize; 3],
) -> Vec<u64> {
    let random = &mut Random(9);
    // The rows of `a` come first, so that fewer rows are the same rows.
    let b = Held::<T>::new(random, k, n, (1, k as isize));
    let a = Held::<T>::new(random, m, k, (k as isize, 1));
    let mut c = Held::<T>::new(random, m, n, (n as isize, 1));
    let (mat_a, mat_b, mat_c) = (a.mat(), b.mat(), c.mat_mut());
    let product = Product {
        m,
        n,
        k,
        a: mat_a,
        b: mat_b,
        c: mat_c,
        bias: None,
        alpha: 1.0,
        beta: 0.0,
    };
    // SAFETY: the operands are the vectors above.
    unsafe { gemm_with(isa, threads, &product) };
    (0..m * n)
        .map(|x| T::of(c.at(x / n, x % n)).bits())
        .collect()
}

/// Neither the number of threads nor the number of rows changes a bit.
#[test]
#[cfg_attr(miri, ignore = "millions of multiplications")]
fn bits_depend_on_neither_threads_nor_rows() {
    fn check<T: Number + GemmElement>(isa: Isa) {
        check_sizes::<T>(isa, [130, 90, 1500]);
        // Whole tiles: few rows read the columns where they lie.
        check_sizes::<T>(isa, [20, 96, 1536]);
    }
    fn check_sizes<T: Number + GemmElement>(isa: Isa, sizes: [usize; 3]) {
        let alone = bits::<T>(isa, None, sizes);
        for count in [1, 2, 3, 7] {
            let threads = Threads::new(Some(count)).unwrap();
            assert_eq!(
                bits::<T>(isa, Some(&threads), sizes),
                alone,
                "{isa:?} with {count} threads"
            );
        }
        for m in [1, 2, 3, 4, 5, 16, 17, 57]
            .into_iter()
            .filter(|m| *m < sizes[0])
        {
            let fewer = bits::<T>(isa, None, [m, sizes[1], sizes[2]]);
            assert_eq!(fewer, alone[..fewer.len()], "{isa:?} with {m} rows");
        }
    }
    for isa in Isa::available() {
        check::<f32>(isa);
        check::<f64>(isa);
        check::<bf16>(isa);
        check::<f16>(isa);
    }
}

/// A NaN or an infinity reaches exactly the row and the column it belongs to.
#[test]
fn not_a_number_stays_in_its_row() {
    fn check<T: Number + GemmElement>(isa: Isa) {
        let (m, n, k) = (19, 37, 33);
        let random = &mut Random(4);
        let mut a = Held::<T>::new(random, m, k, (k as isize, 1));
        let b = Held::<T>::new(random, k, n, (n as isize, 1));
        let mut c = Held::<T>::new(random, m, n, (n as isize, 1));
        let (nan, inf) = (a.index(7, k - 1), a.index(15, 3));
        a.data[nan] = T::of(f64::NAN);
        a.data[inf] = T::of(f64::INFINITY);
        let (mat_a, mat_b, mat_c) = (a.mat(), b.mat(), c.mat_mut());
        let product = Product {
            m,
            n,
            k,
            a: mat_a,
            b: mat_b,
            c: mat_c,
            bias: None,
            alpha: 1.0,
            beta: 0.0,
        };
        // SAFETY: the operands are the vectors above.
        unsafe { gemm_with(isa, None, &product) };
        for i in 0..m {
            for j in 0..n {
                let x = c.at(i, j);
                let right = match i {
                    7 => x.is_nan(),
                    15 => x.is_infinite() && x.signum() == b.at(3, j).signum(),
                    _ => x.is_finite(),
                };
                assert!(right, "{isa:?}: ({i}, {j}) is {x}");
            }
        }
    }
    for isa in Isa::available() {
        check::<f32>(isa);
        check::<f64>(isa);
        check::<bf16>(isa);
        check::<f16>(isa);
    }
}

/// A batch equals its products one by one, whether shared out whole or cut.
#[test]
fn batch_equals_single_products() {
    let threads = Threads::new(Some(3)).unwrap();
    for &(count, size) in &[(7, 24), (2, 210)][..if cfg!(miri) { 1 } else { 2 }] {
        let random = &mut Random(5);
        let a = Held::<f32>::new(random, count * size, size, (size as isize, 1));
        let b = Held::<f32>::new(random, count * size, size, (size as isize, 1));
        let mut together = Held::<f32>::new(random, count * size, size, (size as isize, 1));
        let mut single = together.clone();
        let product = |c: usize, i: usize| {
            let shift = i * size * size;
            let at = |m: Mat<f32>| Mat {
                ptr: m.ptr.wrapping_add(shift),
                ..m
            };
            let c = MatMut {
                ptr: (c as *mut f32).wrapping_add(shift),
                row: size as isize,
            };
            let (a, b) = (at(a.mat()), at(b.mat()));
            Product {
                m: size,
                n: size,
                k: size,
                a,
                b,
                c,
                bias: None,
                alpha: 1.0,
                beta: 1.0,
            }
        };
        let out = together.mat_mut().ptr as usize;
        // SAFETY: each product has its own part of every vector.
        unsafe { gemm_batch(&threads, count, |i| product(out, i)) };
        let out = single.mat_mut().ptr as usize;
        for i in 0..count {
            // SAFETY: as above.
            unsafe { gemm_serial(&product(out, i)) };
        }
        for x in 0..count * size * size {
            let (i, j) = (x / size, x % size);
            assert_eq!(
                together.at(i, j),
                single.at(i, j),
                "{count} of {size}: ({i}, {j})"
            );
        }
    }
}

/// Buffers are bounded for any sizes, and pieces follow from k alone.
#[test]
fn plans_are_bounded() {
    for isa in Isa::available() {
        let kernel = <bf16 as GemmElement>::kernel(isa);
        for k in [1, 31, 513, 1025, 100_000] {
            let small = BlockExtents::new(kernel, 1, [1, 1, k]);
            let large = BlockExtents::new(kernel, 64, [70_000, 9_000, k]);
            assert_eq!(small.piece, large.piece, "{isa:?} k {k}");
        }
        let plan = BlockExtents::new(kernel, 1 << 10, [1 << 20; 3]);
        assert!(plan.a_bytes(kernel) <= 11 << 20, "{isa:?} {plan:?}");
        assert!(plan.b_bytes(kernel) <= 11 << 20, "{isa:?} {plan:?}");
    }
}
