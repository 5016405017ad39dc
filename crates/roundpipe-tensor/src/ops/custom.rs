//! Kernels that users write for host memory.

use std::sync::Arc;

use crate::cx::Cx;
use crate::dtype::DType;
use crate::error::Result;
use crate::kernel::{HostKernel, Kernel};
use crate::shape::Shape;
use crate::tensor::Tensor;

impl Cx {
    /// Runs a kernel that a user wrote for host memory; `outputs` are the types and shapes of its
    /// results. Nothing is recorded: call it from a [`CustomOp`](crate::cx::CustomOp), which brings
    /// the gradient.
    ///
    /// # Errors
    /// What the kernel reports, or when memory runs out.
    pub fn host_kernel(
        &mut self,
        kernel: Arc<dyn HostKernel>,
        inputs: &[&Tensor],
        outputs: &[(DType, Shape)],
    ) -> Result<Vec<Tensor>> {
        let name = kernel.name();
        let worker = self.worker();
        let dense = inputs
            .iter()
            .map(|t| worker.contiguous(&t.detach()))
            .collect::<Result<Vec<_>>>()?;
        let results = outputs
            .iter()
            .map(|(dtype, shape)| worker.alloc(name, *dtype, *shape))
            .collect::<Result<Vec<_>>>()?;
        let (src, dst): (Vec<_>, Vec<_>) = (
            dense.iter().map(Some).collect(),
            results.iter().map(Some).collect(),
        );
        worker.launch(&Kernel::Host(kernel), &src, &dst)?;
        Ok(results)
    }
}
