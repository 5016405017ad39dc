//! Functions of one value and their derivatives.

use super::super::access::Call;
use super::super::simd::{Math, vectorize};
use super::blocks;
use super::stage::{StageElement, for_stage};
use super::walk::{ReadOperand, WriteOperand};
use crate::dtype::Element;
use crate::error::Result;
use crate::kernel::Unary;

/// `[x] -> [y]`, same types.
///
/// # Safety
/// As [`super::run`].
pub(super) unsafe fn unary(call: &Call<'_>, op: Unary) -> Result<()> {
    // SAFETY: promised by the caller.
    let (x, y) = unsafe { (ReadOperand::new(call, 0), WriteOperand::new(call, 0)) };
    if x.dtype() != y.dtype() {
        return Err(call.unsupported());
    }
    for_stage!(y.dtype(), S => {
        let [p, q] = constants(op).map(S::from_f64);
        let f = S::function(op).ok_or_else(|| call.unsupported())?;
        blocks(call, y.numel(), |[buf, out, _], start, len| {
            let values = S::read(&x, start, &mut buf[..len]);
            S::write(&y, start, &mut out[..len], |out| f(p, q, values, out));
        });
    });
    Ok(())
}

/// `[x, dy] -> [dx]`, same types.
///
/// # Safety
/// As [`super::run`].
pub(super) unsafe fn unary_grad(call: &Call<'_>, op: Unary) -> Result<()> {
    // SAFETY: promised by the caller.
    let (x, dy, dx) = unsafe {
        (
            ReadOperand::new(call, 0),
            ReadOperand::new(call, 1),
            WriteOperand::new(call, 0),
        )
    };
    if x.dtype() != dx.dtype() || dy.dtype() != dx.dtype() {
        return Err(call.unsupported());
    }
    for_stage!(dx.dtype(), S => {
        let [p, q] = constants(op).map(S::from_f64);
        let f = S::derivative(op).ok_or_else(|| call.unsupported())?;
        blocks(call, dx.numel(), |[buf, grad, out], start, len| {
            let values = S::read(&x, start, &mut buf[..len]);
            let grad = S::read(&dy, start, &mut grad[..len]);
            S::write(&dx, start, &mut out[..len], |out| f(p, q, values, grad, out));
        });
    });
    Ok(())
}

/// A function of one value and two constants, over blocks.
type Map<S> = fn(S, S, &[S], &mut [S]);

/// The derivative of such a function times a gradient.
type Chain<S> = fn(S, S, &[S], &[S], &mut [S]);

/// The numbers a function carries.
fn constants(op: Unary) -> [f64; 2] {
    match op {
        Unary::LeakyRelu(p) | Unary::Elu(p) | Unary::Powf(p) => [p, 0.0],
        Unary::Neg => [-1.0, 0.0],
        Unary::Affine { mul: p, add: q } | Unary::Clamp { min: p, max: q } => [p, q],
        _ => [0.0; 2],
    }
}

/// Stages with functions of one value.
trait Functions: StageElement {
    /// The function, if this stage has it.
    fn function(op: Unary) -> Option<Map<Self>>;
    /// Its derivative.
    fn derivative(op: Unary) -> Option<Chain<Self>>;
}

/// One vector loop per function of `x`, `p` and `q`.
macro_rules! maps {
    ($t:ty, $op:expr, $x:ident, $p:ident, $q:ident, { $($name:pat => $e:expr,)* }) => {
        match $op {
            $($name => {
                vectorize! {
                    #[allow(unused_variables, reason = "few functions have constants")]
                    fn run($p: $t, $q: $t, x: &[$t], y: &mut [$t]) {
                        for (y, &$x) in y.iter_mut().zip(x) {
                            *y = $e;
                        }
                    }
                }
                Some(run as Map<$t>)
            })*
            #[allow(unreachable_patterns, reason = "not every stage has every function")]
            _ => None,
        }
    };
}

/// One vector loop per derivative.
macro_rules! chains {
    ($t:ty, $op:expr, $x:ident, $p:ident, $q:ident, { $($name:pat => $e:expr,)* }) => {
        match $op {
            $($name => {
                vectorize! {
                    #[allow(unused_variables, reason = "few derivatives need all of these")]
                    fn run($p: $t, $q: $t, x: &[$t], dy: &[$t], dx: &mut [$t]) {
                        for ((dx, &$x), &dy) in dx.iter_mut().zip(x).zip(dy) {
                            *dx = dy * $e;
                        }
                    }
                }
                Some(run as Chain<$t>)
            })*
            _ => None,
        }
    };
}

/// √(2/π) · (x + 0.044715 x³).
macro_rules! gelu_argument {
    ($t:ident, $x:expr) => {{
        const ROOT: $t = std::$t::consts::FRAC_1_SQRT_2 * std::$t::consts::FRAC_2_SQRT_PI;
        ROOT * ($x + 0.044_715 * $x * $x * $x)
    }};
}

macro_rules! float {
    ($t:ident) => {
        impl Functions for $t {
            fn function(op: Unary) -> Option<Map<$t>> {
                use std::$t::consts::FRAC_1_SQRT_2;
                maps!($t, op, x, p, q, {
                    Unary::Neg => -x,
                    Unary::Abs => x.abs(),
                    Unary::Sign => if x > 0.0 { 1.0 } else if x < 0.0 { -1.0 } else { x },
                    Unary::Exp => Math::exp(x),
                    Unary::Log => Math::ln(x),
                    Unary::Sqrt => x.sqrt(),
                    Unary::Rsqrt => 1.0 / x.sqrt(),
                    Unary::Recip => 1.0 / x,
                    Unary::Square => x * x,
                    Unary::Sin => Math::sin(x),
                    Unary::Cos => Math::cos(x),
                    Unary::Tanh => Math::tanh(x),
                    Unary::Sigmoid => 1.0 / (1.0 + Math::exp(-x)),
                    Unary::Erf => Math::erf(x),
                    Unary::Relu => if x <= 0.0 { 0.0 } else { x },
                    Unary::Silu => x / (1.0 + Math::exp(-x)),
                    Unary::Gelu => 0.5 * x * Math::erfc(-x * FRAC_1_SQRT_2),
                    // ½x(1 + tanh u) = x / (1 + e^-2u).
                    Unary::GeluTanh => x / (1.0 + Math::exp(-2.0 * gelu_argument!($t, x))),
                    Unary::Softplus => Math::softplus(x),
                    Unary::LeakyRelu(_) => if x > 0.0 { x } else { p * x },
                    Unary::Elu(_) => if x > 0.0 { x } else { p * Math::exp_m1(x) },
                    Unary::Floor => x.floor(),
                    Unary::Ceil => x.ceil(),
                    Unary::Round => x.round_ties_even(),
                    Unary::Affine { .. } => x * p + q,
                    Unary::Powf(_) => x.powf(p),
                    Unary::Clamp { .. } => {
                        let y = if x < p { p } else { x };
                        if y > q { q } else { y }
                    },
                })
            }

            fn derivative(op: Unary) -> Option<Chain<$t>> {
                use std::$t::consts::{FRAC_1_SQRT_2, FRAC_2_SQRT_PI};
                chains!($t, op, x, p, q, {
                    Unary::Abs => if x > 0.0 { 1.0 } else if x < 0.0 { -1.0 } else { 0.0 },
                    Unary::Sign | Unary::Floor | Unary::Ceil | Unary::Round => 0.0,
                    Unary::Exp => Math::exp(x),
                    Unary::Log => 1.0 / x,
                    Unary::Sqrt => 0.5 / x.sqrt(),
                    Unary::Rsqrt => -0.5 / (x * x.sqrt()),
                    Unary::Recip => -1.0 / (x * x),
                    Unary::Square => 2.0 * x,
                    Unary::Sin => Math::cos(x),
                    Unary::Cos => -Math::sin(x),
                    // 1 - tanh² = 4e / (1 + e)² with e = e^-2|x|, which does not cancel.
                    Unary::Tanh => {
                        let e = Math::exp(-2.0 * x.abs());
                        4.0 * e / ((1.0 + e) * (1.0 + e))
                    },
                    Unary::Sigmoid => {
                        let e = Math::exp(-x.abs());
                        e / ((1.0 + e) * (1.0 + e))
                    },
                    Unary::Erf => FRAC_2_SQRT_PI * Math::exp(-x * x),
                    Unary::Relu => if x <= 0.0 { 0.0 } else { 1.0 },
                    Unary::Silu => {
                        let s = 1.0 / (1.0 + Math::exp(-x));
                        s * (1.0 + x * (1.0 - s))
                    },
                    // Φ(x) + x · φ(x).
                    Unary::Gelu => {
                        let density = 0.5 * FRAC_1_SQRT_2 * FRAC_2_SQRT_PI * Math::exp(-0.5 * x * x);
                        0.5 * Math::erfc(-x * FRAC_1_SQRT_2) + x * density
                    },
                    // With s = 1 / (1 + e^-2u): s + x · s · (1 - s) · 2u'.
                    Unary::GeluTanh => {
                        let s = 1.0 / (1.0 + Math::exp(-2.0 * gelu_argument!($t, x)));
                        let slope = FRAC_1_SQRT_2 * FRAC_2_SQRT_PI * (1.0 + 3.0 * 0.044_715 * x * x);
                        s + x * s * (1.0 - s) * 2.0 * slope
                    },
                    Unary::Softplus => 1.0 / (1.0 + Math::exp(-x)),
                    Unary::LeakyRelu(_) => if x > 0.0 { 1.0 } else { p },
                    Unary::Elu(_) => if x > 0.0 { 1.0 } else { p * Math::exp(x) },
                    Unary::Neg | Unary::Affine { .. } => p,
                    Unary::Powf(_) => if p == 0.0 { 0.0 } else { p * x.powf(p - 1.0) },
                    Unary::Clamp { .. } => if x >= p && x <= q { 1.0 } else { 0.0 },
                })
            }
        }
    };
}

float!(f32);
float!(f64);

impl Functions for i64 {
    fn function(op: Unary) -> Option<Map<i64>> {
        maps!(i64, op, x, p, q, {
            Unary::Neg => x.wrapping_neg(),
            Unary::Abs => x.wrapping_abs(),
            Unary::Sign => x.signum(),
            Unary::Square => x.wrapping_mul(x),
            Unary::Relu => x.max(0),
            Unary::Floor | Unary::Ceil | Unary::Round => x,
            Unary::Affine { .. } => x.wrapping_mul(p).wrapping_add(q),
            Unary::Clamp { .. } => x.max(p).min(q),
            Unary::Not => i64::from(x == 0),
        })
    }

    fn derivative(_op: Unary) -> Option<Chain<i64>> {
        None
    }
}
