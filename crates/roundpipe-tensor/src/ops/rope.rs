//! Rotary embedding, alone and behind the RMS norm of queries and keys, and gated linear units.
//!
//! Tables of cosines and sines are plain tensors, so the code that makes them may scale the
//! angles in any way; they get no gradient.

use crate::cx::{Cx, float, same_dtype, same_shape};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernel::{Glu, Kernel, RopeStyle, Unary};
use crate::ops::arith::raw_unary;
use crate::ops::norm::{give_back, wanted};
use crate::shape::{Layout, Shape};
use crate::tensor::Tensor;
use crate::worker::Worker;

/// Cosines and sines of a rotary embedding, `[positions, rotary_dim / 2]` each: pair i turns by
/// theta^(-2i / rotary_dim) per position. In f64, to be scaled or rounded by the caller.
pub fn rope_tables(positions: usize, rotary_dim: usize, theta: f64) -> (Vec<f64>, Vec<f64>) {
    let step = |i: usize| theta.powf(-2.0 * i as f64 / rotary_dim as f64);
    let steps: Vec<f64> = (0..rotary_dim / 2).map(step).collect();
    let angles = (0..positions).flat_map(|p| steps.iter().map(move |s| p as f64 * s));
    angles.map(|angle| (angle.cos(), angle.sin())).unzip()
}

/// How heads are rotated: checked, and dense as kernels want it.
struct Rotation {
    cos: Tensor,
    sin: Tensor,
    positions: Option<Tensor>,
    style: RopeStyle,
}

impl Cx {
    /// Rotary embedding of x `[b, s, h, d]`. Tables are `[p, r / 2]` in the accumulator type; the
    /// first r elements of a head turn, the rest passes. Positions (i32, i64 or u32, `[b, s]` or
    /// `[s]`) are rows of the tables; without them a step is its own position.
    ///
    /// # Errors
    /// When sizes or types do not fit, or a position is not in the table.
    pub fn rope(
        &mut self,
        x: &Tensor,
        cos: &Tensor,
        sin: &Tensor,
        positions: Option<&Tensor>,
        style: RopeStyle,
    ) -> Result<Tensor> {
        const OP: &str = "rope";
        let rotation = check_rotary(self.worker(), OP, x, [cos, sin], positions, style)?;
        let x = self.dense_last(x)?;
        let y = rotated(self.worker(), &x, &rotation, false)?;
        self.record_one(OP, &[&x], y, move |bx| {
            let dy = bx
                .grad_strided(0)
                .expect("a node runs only with a gradient");
            let dy = dense_last(bx.worker(), &dy)?;
            let dx = rotated(bx.worker(), &dy, &rotation, true)?;
            drop(dy);
            bx.give(0, dx)
        })
    }

    /// RMS norm of every head of x `[b, s, h, d]` with one weight `[d]`, then rotary embedding.
    ///
    /// # Errors
    /// As [`Cx::rope`], and when the weight is not `[d]` of x's type.
    #[allow(
        clippy::too_many_arguments,
        reason = "the arguments of `rope` and of `rms_norm`"
    )]
    pub fn rope_norm(
        &mut self,
        x: &Tensor,
        weight: &Tensor,
        cos: &Tensor,
        sin: &Tensor,
        positions: Option<&Tensor>,
        style: RopeStyle,
        eps: f64,
    ) -> Result<Tensor> {
        const OP: &str = "rope_norm";
        let Rotation {
            cos,
            sin,
            positions,
            ..
        } = check_rotary(self.worker(), OP, x, [cos, sin], positions, style)?;
        same_dtype(OP, x, weight)?;
        if weight.dims() != [x.dims()[3]] {
            return Err(Error::Shape {
                op: OP,
                left: *x.shape(),
                right: *weight.shape(),
            });
        }
        let (x, weight) = (self.dense_last(x)?, self.contiguous(weight)?);
        let y = self.worker().alloc(OP, x.dtype(), *x.shape())?;
        let rstd = self
            .worker()
            .alloc(OP, x.dtype().accumulator(), Shape::new(&x.dims()[..3])?)?;
        let src = [
            Some(&x),
            Some(&weight),
            Some(&cos),
            Some(&sin),
            positions.as_ref(),
        ];
        self.worker().launch(
            &Kernel::RopeNorm { style, eps },
            &src,
            &[Some(&y), Some(&rstd)],
        )?;
        let (kept, w) = (x.detach(), weight.detach());
        self.record_one(OP, &[&x, &weight], y, move |bx| {
            let dy = bx
                .grad_strided(0)
                .expect("a node runs only with a gradient");
            let dy = dense_last(bx.worker(), &dy)?;
            let sink = wanted(bx, Some(1))?;
            let dx = bx
                .needs(0)
                .then(|| bx.worker().alloc(OP, kept.dtype(), *kept.shape()))
                .transpose()?;
            let accumulate = sink.as_ref().is_some_and(|s| s.accumulate);
            bx.worker().launch(
                &Kernel::RopeNormGrad { style, accumulate },
                &[
                    Some(&kept),
                    Some(&w),
                    Some(&rstd),
                    Some(&cos),
                    Some(&sin),
                    Some(&dy),
                    positions.as_ref(),
                ],
                &[dx.as_ref(), sink.as_ref().map(|s| &s.tensor)],
            )?;
            drop((kept, dy));
            give_back(bx, Some(1), sink)?;
            dx.map_or(Ok(()), |dx| bx.give(0, dx))
        })
    }

    /// silu(gate) · up.
    ///
    /// # Errors
    /// When shapes or types differ.
    pub fn swiglu(&mut self, gate: &Tensor, up: &Tensor) -> Result<Tensor> {
        self.glu("swiglu", Glu::Silu, gate, up)
    }

    /// [`Cx::swiglu`] of x `[.., 2c]`: the gate is the first half.
    ///
    /// # Errors
    /// When the last dimension is odd.
    pub fn swiglu_packed(&mut self, x: &Tensor) -> Result<Tensor> {
        self.glu_packed("swiglu", Glu::Silu, x)
    }

    /// gelu(gate) · up, by tanh.
    ///
    /// # Errors
    /// When shapes or types differ.
    pub fn geglu(&mut self, gate: &Tensor, up: &Tensor) -> Result<Tensor> {
        self.glu("geglu", Glu::GeluTanh, gate, up)
    }

    /// [`Cx::geglu`] of x `[.., 2c]`: the gate is the first half.
    ///
    /// # Errors
    /// When the last dimension is odd.
    pub fn geglu_packed(&mut self, x: &Tensor) -> Result<Tensor> {
        self.glu_packed("geglu", Glu::GeluTanh, x)
    }

    /// GPT-OSS's unit: g · sigmoid(alpha · g) · (u + 1), where g is the gate bounded by `limit`
    /// from above and u is up bounded on both sides.
    ///
    /// # Errors
    /// When shapes or types differ.
    pub fn swiglu_clamped(
        &mut self,
        gate: &Tensor,
        up: &Tensor,
        alpha: f64,
        limit: f64,
    ) -> Result<Tensor> {
        self.glu("swiglu_clamped", Glu::Clamped { alpha, limit }, gate, up)
    }

    /// [`Cx::swiglu_clamped`] of x `[.., 2c]` where gate and up alternate, gate first.
    ///
    /// # Errors
    /// When the last dimension is odd.
    pub fn swiglu_clamped_interleaved(
        &mut self,
        x: &Tensor,
        alpha: f64,
        limit: f64,
    ) -> Result<Tensor> {
        const OP: &str = "swiglu_clamped";
        let kind = Glu::Clamped { alpha, limit };
        let shape = half_shape(OP, x)?;
        let y = self.worker().alloc(OP, x.dtype(), shape)?;
        let kept = x.detach();
        let dense = |worker: &Worker, i| worker.contiguous(&every_second(&kept, i, shape));
        let (gate, up) = (dense(self.worker(), 0)?, dense(self.worker(), 1)?);
        self.worker()
            .launch(&Kernel::Glu(kind), &[Some(&gate), Some(&up)], &[Some(&y)])?;
        drop((gate, up));
        let kept = x.detach();
        self.record_one(OP, &[x], y, move |bx| {
            let dy = bx.dy()?;
            let dense = |i| bx.worker().contiguous(&every_second(&kept, i, shape));
            let (gate, up) = (dense(0)?, dense(1)?);
            let apart = || bx.worker().alloc(OP, kept.dtype(), shape);
            let (dgate, dup) = (apart()?, apart()?);
            let src = [Some(&gate), Some(&up), Some(&dy)];
            bx.worker()
                .launch(&Kernel::GluGrad(kind), &src, &[Some(&dgate), Some(&dup)])?;
            drop((gate, up, dy));
            let dx = bx.worker().alloc(OP, kept.dtype(), *kept.shape())?;
            for (i, grad) in [dgate, dup].into_iter().enumerate() {
                let into = every_second(&dx, i, shape);
                bx.worker()
                    .launch(&Kernel::Copy, &[Some(&grad)], &[Some(&into)])?;
            }
            bx.give(0, dx)
        })
    }

    fn glu(&mut self, op: &'static str, kind: Glu, gate: &Tensor, up: &Tensor) -> Result<Tensor> {
        float(op, gate)?;
        same_dtype(op, gate, up)?;
        same_shape(op, up, *gate.shape())?;
        let (gate, up) = (self.dense_last(gate)?, self.dense_last(up)?);
        let y = self.worker().alloc(op, gate.dtype(), *gate.shape())?;
        self.worker()
            .launch(&Kernel::Glu(kind), &[Some(&gate), Some(&up)], &[Some(&y)])?;
        let (g, u) = (gate.detach(), up.detach());
        self.record_one(op, &[&gate, &up], y, move |bx| {
            let dy = bx.dy()?;
            let dgate = bx.worker().alloc(op, g.dtype(), *g.shape())?;
            let dup = bx.worker().alloc(op, g.dtype(), *g.shape())?;
            let src = [Some(&g), Some(&u), Some(&dy)];
            bx.worker()
                .launch(&Kernel::GluGrad(kind), &src, &[Some(&dgate), Some(&dup)])?;
            drop((g, u, dy));
            bx.give(0, dgate)?;
            bx.give(1, dup)
        })
    }

    fn glu_packed(&mut self, op: &'static str, kind: Glu, x: &Tensor) -> Result<Tensor> {
        let shape = half_shape(op, x)?;
        let (axis, half) = (x.rank() - 1, shape[x.rank() - 1]);
        let x = self.dense_last(x)?;
        let halves = move |t: &Tensor| [t.narrowed(axis, 0, half), t.narrowed(axis, half, half)];
        let y = self.worker().alloc(op, x.dtype(), shape)?;
        let [gate, up] = halves(&x);
        self.worker()
            .launch(&Kernel::Glu(kind), &[Some(&gate), Some(&up)], &[Some(&y)])?;
        self.record_one(op, &[&x], y, move |bx| {
            let dy = bx.dy()?;
            let dx = bx
                .worker()
                .alloc(op, dy.dtype(), shape.with(op, axis, 2 * half)?)?;
            let [dgate, dup] = halves(&dx);
            let src = [Some(&gate), Some(&up), Some(&dy)];
            bx.worker()
                .launch(&Kernel::GluGrad(kind), &src, &[Some(&dgate), Some(&dup)])?;
            drop((gate, up, dy, dgate, dup));
            bx.give(0, dx)
        })
    }

    /// `x` with neighbours along the last dimension side by side; other strides stay.
    fn dense_last(&mut self, x: &Tensor) -> Result<Tensor> {
        if is_dense_last(x) {
            Ok(x.clone())
        } else {
            self.contiguous(x)
        }
    }
}

fn is_dense_last(x: &Tensor) -> bool {
    x.numel() == 0
        || x.dims().last().is_none_or(|d| *d == 1)
        || x.layout().strides()[x.rank() - 1] == 1
}

fn dense_last(worker: &Worker, x: &Tensor) -> Result<Tensor> {
    if is_dense_last(x) {
        Ok(x.clone())
    } else {
        worker.contiguous(x)
    }
}

/// The rotary kernel alone.
fn rotated(worker: &Worker, x: &Tensor, rotation: &Rotation, inverse: bool) -> Result<Tensor> {
    let y = worker.alloc("rope", x.dtype(), *x.shape())?;
    let src = [
        Some(x),
        Some(&rotation.cos),
        Some(&rotation.sin),
        rotation.positions.as_ref(),
    ];
    worker.launch(
        &Kernel::Rope {
            style: rotation.style,
            inverse,
        },
        &src,
        &[Some(&y)],
    )?;
    Ok(y)
}

fn check_rotary(
    worker: &Worker,
    op: &'static str,
    x: &Tensor,
    [cos, sin]: [&Tensor; 2],
    positions: Option<&Tensor>,
    style: RopeStyle,
) -> Result<Rotation> {
    float(op, x)?;
    let &[batch, steps, _, width] = x.dims() else {
        return Err(Error::invalid(
            op,
            format!("{} is not [batch, steps, heads, width]", x.shape()),
        ));
    };
    same_dtype(op, cos, sin)?;
    same_shape(op, sin, *cos.shape())?;
    let acc = x.dtype().accumulator();
    if cos.dtype() != acc {
        let expected = "tables are f64 for f64 and f32 for other floats";
        return Err(Error::DType {
            op,
            dtype: cos.dtype(),
            shape: *cos.shape(),
            expected,
        });
    }
    if cos.rank() != 2 || cos.dims()[1] > width / 2 {
        return Err(Error::Shape {
            op,
            left: *x.shape(),
            right: *cos.shape(),
        });
    }
    let positions = match positions {
        Some(positions) => Some(check_positions(worker, op, positions, x, [batch, steps])?),
        None if steps > cos.dims()[0] => {
            let what = format!(
                "{} has {steps} steps, the table {} positions",
                x.shape(),
                cos.dims()[0]
            );
            return Err(Error::invalid(op, what));
        }
        None => None,
    };
    let dense = |t: &Tensor| worker.contiguous(&t.detach());
    Ok(Rotation {
        cos: dense(cos)?,
        sin: dense(sin)?,
        positions,
        style,
    })
}

/// Positions as dense i32 `[b, s]`.
fn check_positions(
    worker: &Worker,
    op: &'static str,
    positions: &Tensor,
    x: &Tensor,
    dims: [usize; 2],
) -> Result<Tensor> {
    if !matches!(positions.dtype(), DType::I32 | DType::I64 | DType::U32) {
        let expected = "positions are i64, i32 or u32";
        return Err(Error::DType {
            op,
            dtype: positions.dtype(),
            shape: *positions.shape(),
            expected,
        });
    }
    if *positions.dims() != dims && *positions.dims() != dims[1..] {
        return Err(Error::Shape {
            op,
            left: *x.shape(),
            right: *positions.shape(),
        });
    }
    let each = positions.relaid(positions.layout().broadcast_to(Shape::new(&dims)?, op)?);
    if each.dtype() == DType::I32 {
        return worker.contiguous(&each);
    }
    // Held inside what i32 has, or a huge position would come round to a valid one.
    let wide = worker.cast(&each, DType::I64)?;
    let held = Unary::Clamp {
        min: -1.0,
        max: f64::from(i32::MAX),
    };
    worker.cast(&raw_unary(worker, op, held, &wide)?, DType::I32)
}

/// The shape of one half of a packed gate and up.
fn half_shape(op: &'static str, x: &Tensor) -> Result<Shape> {
    float(op, x)?;
    match x.dims().last() {
        Some(last) if last % 2 == 0 => Ok(x.shape().cut(x.rank() - 1, last / 2)),
        _ => Err(Error::invalid(
            op,
            format!("the last dimension of {} has no two halves", x.shape()),
        )),
    }
}

/// Elements `first`, `first + 2`, … of the last dimension, which has an even size.
fn every_second(x: &Tensor, first: usize, shape: Shape) -> Tensor {
    let axis = x.rank() - 1;
    let mut strides = x.layout().strides().to_vec();
    strides[axis] *= 2;
    x.narrowed(axis, first, shape[axis])
        .relaid(Layout::strided(shape, &strides))
}
