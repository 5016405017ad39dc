//! Comparisons, and choosing by them.

use super::super::access::Call;
use super::super::simd::vectorize;
use super::stage::{StageElement, for_stage};
use super::walk::{ReadOperand, WriteOperand};
use super::{BLOCK, Plain, blocks};
use crate::error::Result;
use crate::kernel::Compare;

/// `[a, b] -> [y: bool]`, same types.
///
/// # Safety
/// As [`super::run`].
pub(super) unsafe fn compare(call: &Call<'_>, op: Compare) -> Result<()> {
    // SAFETY: promised by the caller.
    let (a, b, y) = unsafe {
        (
            ReadOperand::new(call, 0),
            ReadOperand::new(call, 1),
            WriteOperand::new(call, 0),
        )
    };
    if a.dtype() != b.dtype() {
        return Err(call.unsupported());
    }
    for_stage!(a.dtype(), S => {
        let f = S::test(op);
        blocks(call, y.numel(), |[left, right, _], start, len| {
            let left = S::read(&a, start, &mut left[..len]);
            let right = S::read(&b, start, &mut right[..len]);
            y.write(start, &mut [0; BLOCK][..len], |out| f(left, right, out));
        });
    });
    Ok(())
}

/// A comparison over blocks; 1 where it holds.
type Test<S> = fn(&[S], &[S], &mut [u8]);

/// Stages with comparisons.
trait OrderedStage: StageElement {
    fn test(op: Compare) -> Test<Self>;
}

macro_rules! order {
    ($($t:ty),*) => {$(
        impl OrderedStage for $t {
            fn test(op: Compare) -> Test<$t> {
                order!(@loops $t, op, { Eq ==, Ne !=, Lt <, Le <=, Gt >, Ge >= })
            }
        }
    )*};
    (@loops $t:ty, $op:expr, { $($name:ident $sign:tt),* }) => {
        match $op {
            $(Compare::$name => {
                vectorize! {
                    fn run(a: &[$t], b: &[$t], y: &mut [u8]) {
                        for ((y, a), b) in y.iter_mut().zip(a).zip(b) {
                            *y = u8::from(a $sign b);
                        }
                    }
                }
                run
            })*
        }
    };
}

order!(f64, f32, i64);

/// `[cond: bool, a, b] -> [y]`: moves bits, so one loop per element size.
///
/// # Safety
/// As [`super::run`].
pub(super) unsafe fn select(call: &Call<'_>) -> Result<()> {
    // SAFETY: promised by the caller.
    let [cond, a, b] = unsafe { [0, 1, 2].map(|i| ReadOperand::new(call, i)) };
    // SAFETY: as above.
    let y = unsafe { WriteOperand::new(call, 0) };
    if a.dtype() != y.dtype() || b.dtype() != y.dtype() || cond.dtype().size() != 1 {
        return Err(call.unsupported());
    }
    match y.dtype().size() {
        8 => pick::<u64>(call, [cond, a, b], y),
        4 => pick::<u32>(call, [cond, a, b], y),
        2 => pick::<u16>(call, [cond, a, b], y),
        _ => pick::<u8>(call, [cond, a, b], y),
    }
    Ok(())
}

fn pick<T: Plain>(call: &Call<'_>, [cond, a, b]: [ReadOperand; 3], y: WriteOperand) {
    blocks::<T>(call, y.numel(), |[left, right, out], start, len| {
        let mut mask = [0u8; BLOCK];
        let mask = cond.read(start, &mut mask[..len]);
        let left = a.read(start, &mut left[..len]);
        let right = b.read(start, &mut right[..len]);
        y.write(start, &mut out[..len], |out| {
            pick_block(mask, left, right, out)
        });
    });
}

vectorize! {
    fn pick_block<T: Copy>(mask: &[u8], a: &[T], b: &[T], y: &mut [T]) {
        for (((y, mask), a), b) in y.iter_mut().zip(mask).zip(a).zip(b) {
            *y = if *mask != 0 { *a } else { *b };
        }
    }
}
