//! Stand-in for `cpu::gemm` with its signatures.
use crate::cpu::access::Float;
use crate::cpu::threads::Threads;

pub(super) trait Element: Float {
    type Sum;
}
impl<T: Float> Element for T {
    type Sum = T::Acc;
}
#[derive(Clone, Copy)]
pub(super) struct Mat<T> {
    pub ptr: *const T,
    pub row: isize,
    pub col: isize,
}
pub(super) struct MatMut<O> {
    pub ptr: *mut O,
    pub row: isize,
}
pub(super) struct Product<T, O> {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub a: Mat<T>,
    pub b: Mat<T>,
    pub c: MatMut<O>,
    pub bias: Option<*const T>,
    pub alpha: f64,
    pub beta: f64,
}
pub(super) unsafe fn gemm_batch<T: Float>(
    threads: &Threads,
    count: usize,
    product: impl Fn(usize) -> Product<T, T::Acc> + Sync + Send,
) {
    use crate::cpu::access::Real;
    threads.run(count, |g| {
        let p = product(g);
        let _ = (p.bias, p.alpha);
        for i in 0..p.m {
            for j in 0..p.n {
                let mut s = T::Acc::ZERO;
                for l in 0..p.k {
                    // SAFETY: stand-in.
                    unsafe {
                        s += (*p.a.ptr.offset(i as isize * p.a.row + l as isize * p.a.col)).up()
                            * (*p.b.ptr.offset(l as isize * p.b.row + j as isize * p.b.col)).up();
                    }
                }
                // SAFETY: stand-in.
                unsafe {
                    let c = p.c.ptr.offset(i as isize * p.c.row + j as isize);
                    *c = if p.beta == 0.0 { s } else { *c + s };
                }
            }
        }
    });
}
