//! Mixture of experts: sorting choices by expert, and adding up what the experts gave.

use super::access::{Call, Float, Real, SharedSlice, for_float, slice, slice_mut};
use super::simd::vectorize;
use crate::error::{Error, Result};
use crate::kernel::{Kernel, View};

/// Element operations that make a task worth handing over.
const TASK: usize = 1 << 15;

/// Partial sums of a dot product.
const LANES: usize = 16;

/// Runs one kernel of this family.
///
/// # Safety
/// As [`Ops::launch`](crate::device::Ops::launch).
pub(super) unsafe fn run(call: &Call<'_>) -> Result<()> {
    // SAFETY: the caller's promise is passed on unchanged.
    unsafe {
        match call.kernel {
            Kernel::MoeSort { experts } => sort(call, *experts),
            Kernel::MoeCombine => for_float!(call, call.src(0).dtype, T => combine::<T>(call)),
            Kernel::MoeCombineGrad => {
                for_float!(call, call.src(3).dtype, T => combine_grad::<T>(call))
            }
            _ => Err(call.unsupported()),
        }
    }
}

/// `[choice] -> [rows, inverse, offsets]`: counts, then places, in order.
unsafe fn sort(call: &Call<'_>, experts: usize) -> Result<()> {
    // SAFETY: contiguous operands of these types by the kernel's description; destinations overlap
    // nothing.
    let (choice, rows, inverse, offsets) = unsafe {
        let (rows, inverse) = (slice_mut::<i32>(call.dst(0)), slice_mut::<i32>(call.dst(1)));
        (
            slice::<i64>(call.src(0)),
            rows,
            inverse,
            slice_mut::<i32>(call.dst(2)),
        )
    };
    let per_token = call.src(0).shape()[1];
    offsets.fill(0);
    for (at, &index) in choice.iter().enumerate() {
        match usize::try_from(index) {
            Ok(expert) if expert < experts => offsets[expert + 1] += 1,
            _ => {
                return Err(Error::Index {
                    op: call.kernel.name(),
                    index,
                    at,
                    size: experts,
                });
            }
        }
    }
    for expert in 0..experts {
        offsets[expert + 1] += offsets[expert];
    }
    let mut next = offsets.to_vec();
    for (at, expert) in choice.iter().enumerate() {
        let place = &mut next[*expert as usize];
        rows[*place as usize] = (at / per_token) as i32;
        inverse[at] = *place;
        *place += 1;
    }
    Ok(())
}

/// The places of all choices, checked.
///
/// # Safety
/// The view is dense i32 in live memory that nothing writes.
unsafe fn places<'a>(call: &Call<'_>, view: &View) -> Result<&'a [i32]> {
    // SAFETY: the caller's promise.
    let places = unsafe { slice::<i32>(view) };
    let size = places.len();
    match places
        .iter()
        .position(|place| usize::try_from(*place).map_or(true, |p| p >= size))
    {
        None => Ok(places),
        Some(at) => Err(Error::Index {
            op: call.kernel.name(),
            index: i64::from(places[at]),
            at,
            size,
        }),
    }
}

/// `[y, inverse, weight?] -> [out]`.
unsafe fn combine<T: Float>(call: &Call<'_>) -> Result<()> {
    let out = call.dst(0);
    let (tokens, width) = (out.shape()[0], out.shape()[1]);
    // SAFETY: contiguous operands of these types by the kernel's description; the destination
    // overlaps none.
    let (y, places, weights, out) = unsafe {
        let weights = call.src_opt(2).map(|w| slice::<T>(w));
        (
            slice::<T>(call.src(0)),
            places(call, call.src(1))?,
            weights,
            SharedSlice::new(slice_mut::<T>(out)),
        )
    };
    let choices = places.len() / tokens.max(1);
    call.pieces(tokens, TASK / (width * choices).max(1), |start, end| {
        for token in start..end {
            let mine = token * choices..(token + 1) * choices;
            // SAFETY: each token's row is written by one task.
            let out = unsafe { out.part(token * width, (token + 1) * width) };
            add_rows(y, &places[mine.clone()], weights.map(|w| &w[mine]), out);
        }
    });
    Ok(())
}

vectorize! {
    fn add_rows<T: Float>(y: &[T], places: &[i32], weights: Option<&[T]>, out: &mut [T]) {
        const CHUNK: usize = 256;
        let width = out.len();
        let mut sums = [T::Acc::ZERO; CHUNK];
        for (c, out) in out.chunks_mut(CHUNK).enumerate() {
            let sums = &mut sums[..out.len()];
            sums.fill(T::Acc::ZERO);
            for (i, place) in places.iter().enumerate() {
                let weight = weights.map_or(T::Acc::ONE, |w| w[i].up());
                let row = &y[*place as usize * width + c * CHUNK..][..sums.len()];
                for (sum, y) in sums.iter_mut().zip(row) {
                    *sum += weight * y.up();
                }
            }
            for (out, sum) in out.iter_mut().zip(sums) {
                *out = T::down(*sum);
            }
        }
    }
}

/// `[y?, inverse, weight, dout] -> [dy?, dweight?]`.
unsafe fn combine_grad<T: Float>(call: &Call<'_>) -> Result<()> {
    let dout = call.src(3);
    let (tokens, width) = (dout.shape()[0], dout.shape()[1]);
    // SAFETY: contiguous operands of these types by the kernel's description; destinations overlap
    // nothing.
    let (places, weights, dout, dy, dweights) = unsafe {
        let dy = call.dst_opt(0).map(|v| SharedSlice::new(slice_mut::<T>(v)));
        let dweights = call
            .dst_opt(1)
            .map(|v| (slice::<T>(call.src(0)), SharedSlice::new(slice_mut::<T>(v))));
        (
            places(call, call.src(1))?,
            slice::<T>(call.src(2)),
            slice::<T>(dout),
            dy,
            dweights,
        )
    };
    let choices = places.len() / tokens.max(1);
    call.pieces(tokens, TASK / (2 * width * choices).max(1), |start, end| {
        for at in start * choices..end * choices {
            let place = places[at] as usize;
            let row = place * width..(place + 1) * width;
            let dout = &dout[at / choices * width..][..width];
            if let Some(dy) = &dy {
                // SAFETY: `inverse` is a permutation (`MoeSort` made it), so each place has one
                // choice.
                let dy = unsafe { dy.part(row.start, row.end) };
                scale(weights[at].up(), dout, dy);
            }
            if let Some((y, dweights)) = &dweights {
                // SAFETY: each choice's weight belongs to one task.
                let dweight = unsafe { dweights.part(at, at + 1) };
                dweight[0] = T::down(dot(&y[row], dout));
            }
        }
    });
    Ok(())
}

vectorize! {
    fn scale<T: Float>(weight: T::Acc, x: &[T], out: &mut [T]) {
        for (y, x) in out.iter_mut().zip(x) {
            *y = T::down(weight * x.up());
        }
    }
}

vectorize! {
    fn dot<T: Float>(a: &[T], b: &[T]) -> T::Acc {
        let mut lanes = [T::Acc::ZERO; LANES];
        let (mut left, mut right) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
        for (a, b) in (&mut left).zip(&mut right) {
            (0..LANES).for_each(|l| lanes[l] += a[l].up() * b[l].up());
        }
        for (l, (a, b)) in left.remainder().iter().zip(right.remainder()).enumerate() {
            lanes[l] += a.up() * b.up();
        }
        let mut width = LANES / 2;
        while width > 0 {
            (0..width).for_each(|l| lanes[l] += lanes[l + width]);
            width /= 2;
        }
        lanes[0]
    }
}
