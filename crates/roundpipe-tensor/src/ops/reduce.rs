//! Reductions.

use crate::cx::Cx;
use crate::error::Result;
use crate::shape::{Layout, Shape};
use crate::tensor::Tensor;

impl Cx {
    /// The sum of all elements, as a scalar.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn sum_all(&mut self, x: &Tensor) -> Result<Tensor> {
        let y = self.worker().sum_to(x, Shape::default())?;
        let shape = *x.shape();
        self.record_one("sum", &[x], y, move |bx| {
            let dy = bx.dy()?;
            let spread = Layout::contiguous(Shape::default()).broadcast_to(shape, "sum")?;
            bx.give(0, dy.relaid(spread))
        })
    }
}
