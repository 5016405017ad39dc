//! What this machine reaches: correctness against f64 and rates for every instruction set.

use std::io::{Result, Write};
use std::time::Instant;

use half::{bf16, f16};

use super::element::{Element, Store};
use super::isa::Isa;
use super::{Mat, MatMut, Product, gemm_with};
use crate::cpu::threads::Threads;

/// A type with numbers to fill operands with.
trait Number: Element + Store<<Self as Element>::Sum> {
    fn of(x: f64) -> Self;
    fn f64(self) -> f64;
}
macro_rules! number {
    ($($t:ty, $of:expr, $to:expr;)*) => { $(impl Number for $t {
        fn of(x: f64) -> Self { $of(x) }
        fn f64(self) -> f64 { $to(self) }
    })* };
}
number! {
    f32, |x| x as f32, f64::from;
    f64, |x| x, |x| x;
    bf16, bf16::from_f64, bf16::to_f64;
    f16, f16::from_f64, f16::to_f64;
}

fn numbers<T: Number>(n: usize, seed: u64) -> Vec<T> {
    let mut state = seed;
    (0..n)
        .map(|_| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            T::of((state >> 40) as f64 / f64::from(1 << 24) * 2.0 - 1.0)
        })
        .collect()
}

/// Operands in memory order: `n` as is, `t` transposed.
struct Case<T> {
    m: usize,
    n: usize,
    k: usize,
    a: Vec<T>,
    b: Vec<T>,
    c: Vec<T>,
    ta: bool,
    tb: bool,
}

impl<T: Number> Case<T> {
    fn new(m: usize, n: usize, k: usize, ta: bool, tb: bool) -> Self {
        Self { m, n, k, a: numbers(m * k, 1), b: numbers(k * n, 2), c: numbers(m * n, 3), ta, tb }
    }

    fn product(&mut self) -> Product<T, T> {
        let (m, n, k) = (self.m, self.n, self.k);
        let (ar, ac) = if self.ta { (1, m as isize) } else { (k as isize, 1) };
        let (br, bc) = if self.tb { (1, k as isize) } else { (n as isize, 1) };
        let a = Mat { ptr: self.a.as_ptr(), row: ar, col: ac };
        let b = Mat { ptr: self.b.as_ptr(), row: br, col: bc };
        let c = MatMut { ptr: self.c.as_mut_ptr(), row: n as isize };
        Product { m, n, k, a, b, c, bias: None, alpha: 1.0, beta: 0.0 }
    }

    /// Largest error relative to the sum of magnitudes, over a sample of elements.
    fn error(&mut self, isa: Isa, threads: &Threads) -> f64 {
        let p = self.product();
        // SAFETY: the product describes the case's own vectors; `isa` is available.
        unsafe { gemm_with(isa, Some(threads), &p) };
        let (m, n, k) = (self.m, self.n, self.k);
        let a = |i: usize, q: usize| self.a[if self.ta { q * m + i } else { i * k + q }].f64();
        let b = |q: usize, j: usize| self.b[if self.tb { j * k + q } else { q * n + j }].f64();
        let mut worst = 0.0_f64;
        for x in 0..500 {
            let (i, j) = (x * 7919 % m, x * 104_729 % n);
            let exact: f64 = (0..k).map(|q| a(i, q) * b(q, j)).sum();
            let scale: f64 = (0..k).map(|q| (a(i, q) * b(q, j)).abs()).sum();
            worst = worst.max((self.c[i * n + j].f64() - exact).abs() / scale);
        }
        worst
    }

    fn rate(&mut self, isa: Isa, threads: &Threads, runs: usize) -> f64 {
        let p = self.product();
        // SAFETY: as above.
        let once = || unsafe { gemm_with(isa, Some(threads), &p) };
        once();
        let mut times: Vec<f64> = (0..runs)
            .map(|_| {
                let start = Instant::now();
                once();
                start.elapsed().as_secs_f64()
            })
            .collect();
        times.sort_by(f64::total_cmp);
        2.0 * (self.m * self.n * self.k) as f64 / times[runs / 2] / 1e9
    }
}

fn line<T: Number>(out: &mut dyn Write, name: &str, isa: Isa, all: &Threads, n: usize) -> Result<()> {
    let one = Threads::new(Some(1)).map_err(std::io::Error::other)?;
    let odd = Case::<T>::new(131, 197, 1333, true, false).error(isa, all);
    let mut case = Case::<T>::new(n, n, n, false, true);
    let error = case.error(isa, all).max(odd);
    let serial = case.rate(isa, &one, 5);
    let parallel = case.rate(isa, all, 7);
    writeln!(
        out,
        "{name:5} {:11} error {error:.1e}  {n}^3: {serial:8.1} GFLOP/s on 1 thread, {parallel:8.1} on {}",
        format!("{isa:?}"),
        all.count()
    )
}

/// Every type on every instruction set.
pub fn report(out: &mut dyn Write) -> Result<()> {
    let all = Threads::new(None).map_err(std::io::Error::other)?;
    writeln!(out, "instruction sets: {:?}", Isa::available())?;
    for isa in Isa::available() {
        let n = if isa == Isa::Portable { 512 } else { 2048 };
        line::<f32>(out, "f32", isa, &all, n)?;
        line::<bf16>(out, "bf16", isa, &all, n)?;
        line::<f16>(out, "f16", isa, &all, n.min(1024))?;
        line::<f64>(out, "f64", isa, &all, n.min(1024))?;
    }
    Ok(())
}

/// The shapes of a transformer, best instruction set, 1 and all threads.
pub fn shapes(out: &mut dyn Write) -> Result<()> {
    let all = Threads::new(None).map_err(std::io::Error::other)?;
    let one = Threads::new(Some(1)).map_err(std::io::Error::other)?;
    let isa = Isa::best();
    let sizes = [
        (1024, 1024, 1024),
        (2048, 2048, 2048),
        (2048, 512, 512),
        (2048, 1536, 512),
        (2048, 2048, 512),
        (2048, 512, 2048),
        (64, 64, 64),
        (128, 512, 64),
        (1, 4096, 4096),
    ];
    for (m, n, k) in sizes {
        write!(out, "{m}x{n}x{k}")?;
        for (name, ta, tb) in [("nn", false, false), ("nt", false, true), ("tn", true, false)] {
            let mut case = Case::<f32>::new(m, n, k, ta, tb);
            write!(out, "  f32 {name} {:.0} {:.0}", case.rate(isa, &one, 7), case.rate(isa, &all, 7))?;
            let mut case = Case::<bf16>::new(m, n, k, ta, tb);
            write!(out, "  bf16 {name} {:.0} {:.0}", case.rate(isa, &one, 7), case.rate(isa, &all, 7))?;
        }
        writeln!(out)?;
    }
    Ok(())
}

/// One f32 product with plain types, for comparisons.
pub fn f32_once(
    threads: &Threads,
    [m, n, k]: [usize; 3],
    a: &[f32],
    b: &[f32],
    c: &mut [f32],
    ta: bool,
    tb: bool,
) {
    let (ar, ac) = if ta { (1, m as isize) } else { (k as isize, 1) };
    let (br, bc) = if tb { (1, k as isize) } else { (n as isize, 1) };
    let a = Mat { ptr: a.as_ptr(), row: ar, col: ac };
    let b = Mat { ptr: b.as_ptr(), row: br, col: bc };
    let c = MatMut { ptr: c.as_mut_ptr(), row: n as isize };
    let p = Product { m, n, k, a, b, c, bias: None, alpha: 1.0, beta: 0.0 };
    // SAFETY: only called by comparisons with vectors of the right sizes.
    unsafe { gemm_with(Isa::best(), Some(threads), &p) };
}
/// One bf16 product.
pub fn bf16_once(
    threads: &Threads,
    [m, n, k]: [usize; 3],
    a: &[bf16],
    b: &[bf16],
    c: &mut [bf16],
    ta: bool,
    tb: bool,
) {
    let (ar, ac) = if ta { (1, m as isize) } else { (k as isize, 1) };
    let (br, bc) = if tb { (1, k as isize) } else { (n as isize, 1) };
    let a = Mat { ptr: a.as_ptr(), row: ar, col: ac };
    let b = Mat { ptr: b.as_ptr(), row: br, col: bc };
    let c = MatMut { ptr: c.as_mut_ptr(), row: n as isize };
    let p = Product { m, n, k, a, b, c, bias: None, alpha: 1.0, beta: 0.0 };
    // SAFETY: only called by comparisons with vectors of the right sizes.
    unsafe { gemm_with(Isa::best(), Some(threads), &p) };
}
