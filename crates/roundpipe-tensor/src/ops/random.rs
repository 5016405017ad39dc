//! Tensors made from nothing: random, counted, filled like another; and dropout.
//!
//! Every random operation takes the next key of its context ([`Cx::next_key`]), so that the same
//! place of the same run draws the same numbers again.

use crate::cx::{Cx, float};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernel::{Compare, Dist, Kernel};
use crate::shape::Shape;
use crate::tensor::Tensor;

use super::arith::raw_compare;

impl Cx {
    /// Uniform in [0, 1).
    ///
    /// # Errors
    /// When `dtype` is not a float or memory runs out.
    pub fn rand(&mut self, dtype: DType, dims: &[usize]) -> Result<Tensor> {
        self.draw(
            "rand",
            Dist::Uniform {
                low: 0.0,
                high: 1.0,
            },
            dtype,
            dims,
        )
    }

    /// Uniform in [low, high).
    ///
    /// # Errors
    /// When the bounds are not finite and in order, `dtype` is not a float, or memory runs out.
    pub fn uniform(&mut self, dtype: DType, dims: &[usize], low: f64, high: f64) -> Result<Tensor> {
        if !(low < high && (high - low).is_finite()) {
            return Err(Error::invalid(
                "uniform",
                format!("no numbers from {low} up to below {high}"),
            ));
        }
        self.draw("uniform", Dist::Uniform { low, high }, dtype, dims)
    }

    /// Standard normal.
    ///
    /// # Errors
    /// When `dtype` is not a float or memory runs out.
    pub fn randn(&mut self, dtype: DType, dims: &[usize]) -> Result<Tensor> {
        self.draw(
            "randn",
            Dist::Normal {
                mean: 0.0,
                std: 1.0,
            },
            dtype,
            dims,
        )
    }

    /// Normal with a mean and a standard deviation.
    ///
    /// # Errors
    /// When `dtype` is not a float or memory runs out.
    pub fn normal(&mut self, dtype: DType, dims: &[usize], mean: f64, std: f64) -> Result<Tensor> {
        self.draw("normal", Dist::Normal { mean, std }, dtype, dims)
    }

    /// 1 with probability p, else 0; any type, bool included.
    ///
    /// # Errors
    /// When p is not in 0..=1 or memory runs out.
    pub fn bernoulli(&mut self, dtype: DType, dims: &[usize], p: f64) -> Result<Tensor> {
        probability("bernoulli", p)?;
        self.draw("bernoulli", Dist::Bernoulli { p }, dtype, dims)
    }

    fn draw(
        &mut self,
        op: &'static str,
        dist: Dist,
        dtype: DType,
        dims: &[usize],
    ) -> Result<Tensor> {
        let shape = Shape::new(dims)?;
        if !dtype.is_float() && !matches!(dist, Dist::Bernoulli { .. }) {
            return Err(Error::DType {
                op,
                dtype,
                shape,
                expected: "it makes floats",
            });
        }
        let key = self.next_key();
        let y = self.worker().alloc(op, dtype, shape)?;
        self.worker()
            .launch(&Kernel::Random { dist, key }, &[], &[Some(&y)])?;
        Ok(y)
    }

    /// In training, zeroes each element with probability p and divides the others by 1 - p; else
    /// passes x on.
    ///
    /// # Errors
    /// When p is not in 0..=1 or `x` is not a float.
    pub fn dropout(&mut self, x: &Tensor, p: f64) -> Result<Tensor> {
        const OP: &str = "dropout";
        float(OP, x)?;
        probability(OP, p)?;
        if !self.is_training() || p == 0.0 {
            return Ok(x.clone());
        }
        let kernel = Kernel::Dropout {
            p,
            key: self.next_key(),
        };
        let y = self.worker().alloc(OP, x.dtype(), *x.shape())?;
        self.worker().launch(&kernel, &[Some(x)], &[Some(&y)])?;
        self.record_one(OP, &[x], y, move |bx| {
            let dy = bx
                .grad_strided(0)
                .expect("a node runs only with a gradient");
            let dx = bx.worker().alloc(OP, dy.dtype(), *dy.shape())?;
            bx.worker().launch(&kernel, &[Some(&dy)], &[Some(&dx)])?;
            drop(dy);
            bx.give(0, dx)
        })
    }

    /// start, start + step, … below `end` (above it, for a negative step).
    ///
    /// # Errors
    /// When step is 0, a number is not finite, an integer type is given fractions, or memory runs
    /// out.
    pub fn arange(&mut self, dtype: DType, start: f64, end: f64, step: f64) -> Result<Tensor> {
        const OP: &str = "arange";
        let finite = [start, end, step].iter().all(|number| number.is_finite());
        let count = ((end - start) / step).ceil().max(0.0);
        let fractions = start.fract() != 0.0 || step.fract() != 0.0;
        if !finite
            || step == 0.0
            || !count.is_finite()
            || count > 9e15
            || (fractions && !dtype.is_float())
        {
            return Err(Error::invalid(
                OP,
                format!("from {start} to {end} by {step} in {dtype}"),
            ));
        }
        let y = self
            .worker()
            .alloc(OP, dtype, Shape::new(&[count as usize])?)?;
        self.worker()
            .launch(&Kernel::Arange { start, step }, &[], &[Some(&y)])?;
        Ok(y)
    }

    /// A tensor of x's type and shape filled with one value.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn full_like(&mut self, x: &Tensor, value: f64) -> Result<Tensor> {
        self.worker().full(x.dtype(), *x.shape(), value)
    }

    /// A tensor of x's type and shape filled with 0.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn zeros_like(&mut self, x: &Tensor) -> Result<Tensor> {
        self.full_like(x, 0.0)
    }

    /// A tensor of x's type and shape filled with 1.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn ones_like(&mut self, x: &Tensor) -> Result<Tensor> {
        self.full_like(x, 1.0)
    }

    /// A tensor filled with 1.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn ones(&mut self, dtype: DType, dims: &[usize]) -> Result<Tensor> {
        self.full(dtype, dims, 1.0)
    }

    /// For each index a row of `classes` elements, 1 at the index and 0 elsewhere; an index outside
    /// gives a row of 0.
    ///
    /// # Errors
    /// When `index` does not hold integers or memory runs out.
    pub fn one_hot(&mut self, index: &Tensor, classes: usize, dtype: DType) -> Result<Tensor> {
        const OP: &str = "one_hot";
        if index.dtype().is_float() || index.dtype() == DType::Bool {
            let (dtype, shape) = (index.dtype(), *index.shape());
            return Err(Error::DType {
                op: OP,
                dtype,
                shape,
                expected: "it takes integers",
            });
        }
        // Counted in a type that holds every class, whatever the indices' own does.
        let index = self.worker().cast(index, DType::I64)?;
        let classes = self.arange(DType::I64, 0.0, classes as f64, 1.0)?;
        let index = self.unsqueeze(&index, -1)?;
        let hit = raw_compare(self.worker(), OP, Compare::Eq, &index, &classes)?;
        self.worker().cast(&hit, dtype)
    }
}

fn probability(op: &'static str, p: f64) -> Result<()> {
    if (0.0..=1.0).contains(&p) {
        return Ok(());
    }
    Err(Error::invalid(op, format!("{p} is not a probability")))
}
