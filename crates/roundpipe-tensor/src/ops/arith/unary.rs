//! Functions of one tensor.

use super::{incoming, no_bool, raw_unary};
use crate::cx::{Cx, float};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernel::{Kernel, Unary};
use crate::tensor::Tensor;

/// Methods that only name a function. The second list takes integers too.
macro_rules! functions {
    ($($name:ident $kind:ident $check:ident $doc:literal)*) => {
        impl Cx {$(
            #[doc = $doc]
            ///
            /// # Errors
            /// When the type has no such function.
            pub fn $name(&mut self, x: &Tensor) -> Result<Tensor> {
                $check(stringify!($name), x)?;
                self.unary(stringify!($name), Unary::$kind, x)
            }
        )*}
    };
}

functions! {
    neg Neg number "-x."
    abs Abs number "|x|; the slope at 0 is 0."
    sign Sign number "-1, 0 or 1 by the sign of x; NaN stays. The gradient is 0."
    square Square number "x²."
    relu Relu number "max(x, 0); the slope at 0 is 0."
    floor Floor number "The next whole number downwards. The gradient is 0."
    ceil Ceil number "The next whole number upwards. The gradient is 0."
    round Round number "The nearest whole number, halves to the even one. The gradient is 0."
    exp Exp float "e^x."
    log Log float "The natural logarithm."
    sqrt Sqrt float "The square root."
    rsqrt Rsqrt float "1 / √x."
    recip Recip float "1 / x."
    sin Sin float "Sine."
    cos Cos float "Cosine."
    tanh Tanh float "Hyperbolic tangent."
    sigmoid Sigmoid float "1 / (1 + e^-x)."
    erf Erf float "The error function."
    silu Silu float "x · sigmoid(x)."
    gelu Gelu float "Exact GELU: x · Φ(x), Φ the normal distribution."
    gelu_tanh GeluTanh float "GELU approximated by tanh."
    softplus Softplus float "ln(1 + e^x)."
}

impl Cx {
    /// x where positive, else `slope` · x.
    ///
    /// # Errors
    /// When `x` is not a float.
    pub fn leaky_relu(&mut self, x: &Tensor, slope: f64) -> Result<Tensor> {
        float("leaky_relu", x)?;
        self.unary("leaky_relu", Unary::LeakyRelu(slope), x)
    }

    /// x where positive, else `alpha` · (e^x - 1).
    ///
    /// # Errors
    /// When `x` is not a float.
    pub fn elu(&mut self, x: &Tensor, alpha: f64) -> Result<Tensor> {
        float("elu", x)?;
        self.unary("elu", Unary::Elu(alpha), x)
    }

    /// x to a fixed power.
    ///
    /// # Errors
    /// When `x` is not a float.
    pub fn powf(&mut self, x: &Tensor, exponent: f64) -> Result<Tensor> {
        float("powf", x)?;
        let kind = match exponent {
            2.0 => Unary::Square,
            0.5 => Unary::Sqrt,
            -0.5 => Unary::Rsqrt,
            -1.0 => Unary::Recip,
            _ => Unary::Powf(exponent),
        };
        self.unary("powf", kind, x)
    }

    /// x held between `min` and `max` (infinities leave a side open); `max` wins if they cross. NaN
    /// stays.
    ///
    /// # Errors
    /// When a bound is NaN, or `x` holds integers and a finite bound is not whole.
    pub fn clamp(&mut self, x: &Tensor, min: f64, max: f64) -> Result<Tensor> {
        const OP: &str = "clamp";
        number(OP, x)?;
        if min.is_nan() || max.is_nan() {
            return Err(Error::invalid(OP, format!("bounds {min} and {max}")));
        }
        for bound in [min, max].into_iter().filter(|b| b.is_finite()) {
            whole(OP, x, bound)?;
        }
        self.unary(OP, Unary::Clamp { min, max }, x)
    }

    /// x · mul + add. Integer tensors take whole numbers.
    ///
    /// # Errors
    /// When `x` is bool, or holds integers and a number is not whole.
    pub fn affine(&mut self, x: &Tensor, mul: f64, add: f64) -> Result<Tensor> {
        self.scaled("affine", x, mul, add)
    }

    /// x + number.
    ///
    /// # Errors
    /// As [`Cx::affine`].
    pub fn add_scalar(&mut self, x: &Tensor, number: f64) -> Result<Tensor> {
        self.scaled("add_scalar", x, 1.0, number)
    }

    /// x · number.
    ///
    /// # Errors
    /// As [`Cx::affine`].
    pub fn mul_scalar(&mut self, x: &Tensor, number: f64) -> Result<Tensor> {
        self.scaled("mul_scalar", x, number, 0.0)
    }

    fn scaled(&mut self, op: &'static str, x: &Tensor, mul: f64, add: f64) -> Result<Tensor> {
        number(op, x)?;
        whole(op, x, mul)?;
        whole(op, x, add)?;
        let y = raw_unary(self.worker(), op, Unary::Affine { mul, add }, x)?;
        // The slope is constant: no need to keep x.
        self.record_one(op, &[x], y, move |bx| {
            let dy = incoming(bx);
            if mul == 1.0 {
                return bx.give(0, dy);
            }
            let dx = raw_unary(bx.worker(), op, Unary::Affine { mul, add: 0.0 }, &dy)?;
            drop(dy);
            bx.give(0, dx)
        })
    }

    fn unary(&mut self, op: &'static str, kind: Unary, x: &Tensor) -> Result<Tensor> {
        let y = raw_unary(self.worker(), op, kind, x)?;
        let kept = x.detach();
        self.record_one(op, &[x], y, move |bx| {
            let dy = incoming(bx);
            let dx = bx.worker().alloc(op, kept.dtype(), *kept.shape())?;
            bx.worker().launch(
                &Kernel::UnaryGrad(kind),
                &[Some(&kept), Some(&dy)],
                &[Some(&dx)],
            )?;
            drop((kept, dy));
            bx.give(0, dx)
        })
    }
}

/// Refuses truth values.
fn number(op: &'static str, x: &Tensor) -> Result<()> {
    if x.dtype() == DType::Bool {
        Err(no_bool(op, x))
    } else {
        Ok(())
    }
}

/// Refuses a number that an integer tensor cannot hold.
pub(super) fn held(op: &'static str, x: &Tensor, number: f64) -> Result<()> {
    whole(op, x, number)?;
    let inside = match x.dtype() {
        DType::I32 => (f64::from(i32::MIN)..=f64::from(i32::MAX)).contains(&number),
        DType::U32 => (0.0..=f64::from(u32::MAX)).contains(&number),
        DType::U8 => (0.0..=255.0).contains(&number),
        DType::Bool => (0.0..=1.0).contains(&number),
        _ => true,
    };
    if inside {
        return Ok(());
    }
    Err(Error::invalid(
        op,
        format!(
            "{number} is outside the range of {} {}",
            x.dtype(),
            x.shape()
        ),
    ))
}

/// Refuses a number that an integer tensor cannot be combined with.
pub(super) fn whole(op: &'static str, x: &Tensor, number: f64) -> Result<()> {
    if x.dtype().is_float() || (number.fract() == 0.0 && number.abs() < 9.3e18) {
        return Ok(());
    }
    let what = format!(
        "{number} is not a whole number, but {} {} holds those",
        x.dtype(),
        x.shape()
    );
    Err(Error::invalid(op, what))
}
