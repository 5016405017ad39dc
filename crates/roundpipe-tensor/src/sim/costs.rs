//! What planning knows about a simulated worker: a processor that reads no host memory in place.

use crate::cpu::CpuCosts;
use crate::device::{BackendCosts, DeviceKind};
use crate::kernel::{Kernel, View};

/// Any simulated worker.
#[derive(Debug)]
pub(crate) struct SimCosts;

impl BackendCosts for SimCosts {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Sim
    }

    fn scratch(&self, kernel: &Kernel, src: &[Option<View>], dst: &[Option<View>]) -> usize {
        CpuCosts.scratch(kernel, src, dst)
    }

    fn min_gemm_rows(&self) -> usize {
        CpuCosts.min_gemm_rows()
    }

    fn flops_per_ms(&self) -> f64 {
        CpuCosts.flops_per_ms()
    }

    fn bytes_per_ms(&self) -> f64 {
        CpuCosts.bytes_per_ms()
    }
}
