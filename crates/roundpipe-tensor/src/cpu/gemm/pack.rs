//! Copies an operand into panels: `W` lanes (rows of the left or columns of the right operand) side
//! by side for each step along k, so that a kernel reads both operands front to back.
//!
//! Lanes beyond the operand and steps beyond k are written as zeros. A type that the kernel does
//! not multiply directly is converted on the way.

#[cfg(target_arch = "x86_64")]
use half::bf16;

/// Up to `W` lanes of an operand, `k` steps long.
#[derive(Clone, Copy)]
pub(crate) struct Lines<T> {
    pub ptr: *const T,
    /// Elements from a lane to the next.
    pub lane: isize,
    /// Elements from a step along k to the next.
    pub step: isize,
    pub lanes: usize,
    pub k: usize,
}

impl<T: Copy> Lines<T> {
    /// Where an element lies.
    ///
    /// # Safety
    /// `lane < lanes`, `p < k`, and the described elements exist.
    #[inline(always)]
    pub(super) unsafe fn at(&self, lane: usize, p: usize) -> *const T {
        // SAFETY: the caller vouches that this element exists.
        unsafe {
            self.ptr
                .offset(lane as isize * self.lane + p as isize * self.step)
        }
    }
}

/// Steps that are converted at a time before they are spread over the panel.
const CHUNK: usize = 64;

/// Packs into `[k][W]`. `widen(src, dst, n)` converts `n` elements that lie side by side.
///
/// # Safety
/// The elements of `lines` exist, `lines.lanes <= W`, and `dst` holds `k * W` elements.
#[inline(always)]
pub(super) unsafe fn panel<T: Copy, P: Copy + Default, const W: usize>(
    lines: &Lines<T>,
    dst: *mut P,
    widen: impl Fn(*const T, *mut P, usize),
) {
    let Lines { lanes, k, .. } = *lines;
    // SAFETY: every `at` has lane < lanes and p < k; every write is below k * W.
    unsafe {
        if lanes < W {
            for p in 0..k {
                for lane in lanes..W {
                    *dst.add(p * W + lane) = P::default();
                }
            }
        }
        if lines.lane == 1 && lanes == W {
            for p in 0..k {
                widen(lines.at(0, p), dst.add(p * W), W);
            }
        } else if lines.lane == 1 {
            for p in 0..k {
                widen(lines.at(0, p), dst.add(p * W), lanes);
            }
        } else if lines.step == 1 {
            let mut wide = [P::default(); CHUNK];
            for p0 in (0..k).step_by(CHUNK) {
                let n = CHUNK.min(k - p0);
                for lane in 0..lanes {
                    widen(lines.at(lane, p0), wide.as_mut_ptr(), n);
                    for (p, &x) in wide[..n].iter().enumerate() {
                        *dst.add((p0 + p) * W + lane) = x;
                    }
                }
            }
        } else {
            for p in 0..k {
                for lane in 0..lanes {
                    widen(lines.at(lane, p), dst.add(p * W + lane), 1);
                }
            }
        }
    }
}

/// Packs into `[k / 2][W][2]`, k rounded up to even: what `vdpbf16ps` multiplies.
///
/// # Safety
/// As for [`panel`], with `dst` holding `2 * W` elements for every two steps begun.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(super) unsafe fn pairs<const W: usize>(lines: &Lines<bf16>, dst: *mut bf16) {
    let Lines { lanes, k, .. } = *lines;
    for pair in 0..k.div_ceil(2) {
        for lane in 0..W {
            for half in 0..2 {
                let p = 2 * pair + half;
                // SAFETY: the element is read only if lane < lanes and p < k; the write is below
                // the end of the last pair.
                unsafe {
                    let x = if lane < lanes && p < k {
                        *lines.at(lane, p)
                    } else {
                        bf16::ZERO
                    };
                    *dst.add((pair * W + lane) * 2 + half) = x;
                }
            }
        }
    }
}
