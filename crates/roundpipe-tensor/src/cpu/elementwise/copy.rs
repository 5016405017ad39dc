//! Fill, copy with conversion, accumulate.

use half::{bf16, f16};

use super::super::access::Call;
use super::super::simd::vectorize;
use super::stage::{StageElement, fetch, for_stage, load};
use super::walk::{ReadOperand, WriteOperand};
use super::{BLOCK, GRAIN, Plain, blocks};
use crate::dtype::{DType, Element};
use crate::error::Result;

/// `[] -> [y]`.
///
/// # Safety
/// As [`super::run`].
pub(super) unsafe fn fill(call: &Call<'_>, value: f64) -> Result<()> {
    // SAFETY: promised by the caller.
    let y = unsafe { WriteOperand::new(call, 0) };
    match y.dtype() {
        DType::F64 => spread(call, y, value),
        DType::F32 => spread(call, y, f32::from_f64(value)),
        DType::BF16 => spread(call, y, bf16::from_f64(value)),
        DType::F16 => spread(call, y, f16::from_f64(value)),
        DType::I64 => spread(call, y, i64::from_f64(value)),
        DType::I32 => spread(call, y, i32::from_f64(value)),
        DType::U32 => spread(call, y, u32::from_f64(value)),
        DType::U8 => spread(call, y, u8::from_f64(value)),
        DType::Bool => spread(call, y, u8::from(value != 0.0)),
    }
    Ok(())
}

fn spread<T: Element>(call: &Call<'_>, y: WriteOperand, value: T) {
    call.pieces(y.numel(), GRAIN, |start, end| {
        match y.lend::<T>(start, end - start) {
            Some(place) => place.fill(value),
            None => {
                let block = [value; BLOCK];
                for at in (start..end).step_by(BLOCK) {
                    y.scatter(at, &block[..BLOCK.min(end - at)]);
                }
            }
        }
    });
}

/// `[x] -> [y]`.
///
/// # Safety
/// As [`super::run`].
pub(super) unsafe fn copy(call: &Call<'_>) -> Result<()> {
    // SAFETY: promised by the caller.
    let (x, y) = unsafe { (ReadOperand::new(call, 0), WriteOperand::new(call, 0)) };
    if x.dtype() == y.dtype() {
        match y.dtype().size() {
            8 => same::<u64>(call, x, y),
            4 => same::<u32>(call, x, y),
            2 => same::<u16>(call, x, y),
            _ => same::<u8>(call, x, y),
        }
        return Ok(());
    }
    match (x.dtype(), y.dtype()) {
        (from, DType::Bool) => for_stage!(from, S => truth::<S>(call, x, y)),
        (from, to) if from.is_float() && !to.is_float() => saturate(call, x, y),
        (_, to) => for_stage!(to, S => convert::<S>(call, x, y)),
    }
    Ok(())
}

/// Moves bits of one size.
fn same<T: Plain>(call: &Call<'_>, x: ReadOperand, y: WriteOperand) {
    if transpose::<T>(call, &x, &y) {
        return;
    }
    blocks::<T>(call, y.numel(), |[buf, ..], start, len| {
        match (y.lend::<T>(start, len), x.lend::<T>(start, len)) {
            (Some(place), _) => x.gather(start, place),
            (None, Some(from)) => y.scatter(start, from),
            (None, None) => {
                x.gather(start, &mut buf[..len]);
                y.scatter(start, &buf[..len]);
            }
        }
    });
}

/// Sides of the squares that a transposed source is copied by.
const TILE: usize = 32;

/// Copies a source whose neighbours in memory are not neighbours in order, if this is one: by
/// squares, so that both sides move whole cache lines. Returns whether it did.
fn transpose<T: Plain>(call: &Call<'_>, x: &ReadOperand, y: &WriteOperand) -> bool {
    let Some(transposed) = x.transposed() else {
        return false;
    };
    if y.lend::<T>(0, y.numel()).is_none() {
        return false;
    }
    let [rows, columns] = transposed.sizes;
    let strips = rows.div_ceil(TILE);
    call.pieces(
        transposed.planes * strips,
        GRAIN / (TILE * columns),
        |start, end| {
            let mut tile = [[T::default(); TILE]; TILE];
            for strip in start..end {
                let (plane, row) = (strip / strips, strip % strips * TILE);
                let height = TILE.min(rows - row);
                for column in (0..columns).step_by(TILE) {
                    let width = TILE.min(columns - column);
                    for i in 0..width {
                        let from = x.run::<T>(&transposed, plane, row, column + i, height);
                        from.iter()
                            .zip(&mut tile)
                            .for_each(|(value, line)| line[i] = *value);
                    }
                    for (r, line) in tile[..height].iter().enumerate() {
                        y.scatter(transposed.index(plane, row + r, column), &line[..width]);
                    }
                }
            }
        },
    );
    true
}

/// By way of the destination's stage.
fn convert<S: StageElement>(call: &Call<'_>, x: ReadOperand, y: WriteOperand) {
    blocks(call, y.numel(), |[buf, ..], start, len| {
        if y.dtype() == S::DTYPE {
            S::write(&y, start, &mut buf[..len], |place| fetch(&x, start, place));
        } else {
            S::put(&y, start, load(&x, start, &mut buf[..len]));
        }
    });
}

/// Anything to bool: whether it is not 0.
fn truth<S: StageElement>(call: &Call<'_>, x: ReadOperand, y: WriteOperand) {
    blocks(call, y.numel(), |[buf, ..], start, len| {
        let values = S::read(&x, start, &mut buf[..len]);
        i64::write(&y, start, &mut [0; BLOCK][..len], |place| {
            place
                .iter_mut()
                .zip(values)
                .for_each(|(y, x)| *y = i64::from(!x.is_zero()));
        });
    });
}

/// Floats to integers: truncated, and held inside the destination's range.
fn saturate(call: &Call<'_>, x: ReadOperand, y: WriteOperand) {
    let (low, high) = match y.dtype() {
        DType::I32 => (i64::from(i32::MIN), i64::from(i32::MAX)),
        DType::U32 => (0, i64::from(u32::MAX)),
        DType::U8 => (0, i64::from(u8::MAX)),
        _ => (i64::MIN, i64::MAX),
    };
    blocks(call, y.numel(), |[buf, ..], start, len| {
        i64::write(&y, start, &mut buf[..len], |place| {
            fetch(&x, start, place);
            place.iter_mut().for_each(|y| *y = (*y).clamp(low, high));
        });
    });
}

/// `[x] -> [y]`: y += alpha · x.
///
/// # Safety
/// As [`super::run`].
pub(super) unsafe fn accumulate(call: &Call<'_>, alpha: f64) -> Result<()> {
    // SAFETY: promised by the caller.
    let (x, y) = unsafe { (ReadOperand::new(call, 0), WriteOperand::new(call, 0)) };
    let wide = if x.dtype() == DType::F64 {
        DType::F64
    } else {
        y.dtype()
    };
    if x.dtype().is_float() && !y.dtype().is_float() {
        return Err(call.unsupported());
    }
    for_stage!(wide, S => add_to::<S>(call, x, y, S::from_f64(alpha)));
    Ok(())
}

fn add_to<S: SummedStage>(call: &Call<'_>, x: ReadOperand, y: WriteOperand, alpha: S) {
    blocks(call, y.numel(), |[buf, sum, _], start, len| {
        let values = load(&x, start, &mut buf[..len]);
        if y.dtype() == S::DTYPE
            && let Some(place) = y.lend::<S>(start, len)
        {
            return S::axpy(alpha, values, place);
        }
        let sum = &mut sum[..len];
        fetch(&y.source(), start, sum);
        S::axpy(alpha, values, sum);
        store(&y, start, sum);
    });
}

/// Writes values of any stage that is at least as wide as the destination's.
fn store<S: SummedStage>(y: &WriteOperand, start: usize, values: &[S]) {
    if S::stands_for(y.dtype()) {
        return S::put(y, start, values);
    }
    let mut buf = [0.0f32; BLOCK];
    buf.iter_mut()
        .zip(values)
        .for_each(|(to, from)| *to = from.to_f32());
    f32::put(y, start, &buf[..values.len()]);
}

/// Stages that sum.
trait SummedStage: StageElement {
    /// y += alpha · x.
    fn axpy(alpha: Self, x: &[Self], y: &mut [Self]);
    fn to_f32(self) -> f32;
}

macro_rules! sums {
    ($($t:ty, $y:ident, $x:ident, $alpha:ident => $e:expr;)*) => {$(
        impl SummedStage for $t {
            fn axpy(alpha: Self, x: &[Self], y: &mut [Self]) {
                vectorize! {
                    fn run($alpha: $t, x: &[$t], y: &mut [$t]) {
                        for ($y, &$x) in y.iter_mut().zip(x) {
                            *$y = $e;
                        }
                    }
                }
                run(alpha, x, y);
            }

            fn to_f32(self) -> f32 {
                self as f32
            }
        }
    )*};
}

sums! {
    f64, y, x, alpha => *y + alpha * x;
    f32, y, x, alpha => *y + alpha * x;
    i64, y, x, alpha => y.wrapping_add(alpha.wrapping_mul(x));
}
