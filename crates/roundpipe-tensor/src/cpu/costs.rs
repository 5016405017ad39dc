//! What planning knows about a processor: scratch of its kernels, and rough rates.

use super::scratch;
use crate::device::{BackendCosts, DeviceKind};
use crate::kernel::{Kernel, View};

/// Rows from which on a product that is added to a large f32 matrix is bound by arithmetic.
pub(crate) const MIN_GEMM_ROWS: usize = 256;

/// Any processor.
#[derive(Debug)]
pub(crate) struct CpuCosts;

impl BackendCosts for CpuCosts {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Cpu
    }

    fn scratch(&self, kernel: &Kernel, src: &[Option<View>], dst: &[Option<View>]) -> usize {
        scratch(kernel, src, dst)
    }

    fn min_gemm_rows(&self) -> usize {
        MIN_GEMM_ROWS
    }

    fn flops_per_ms(&self) -> f64 {
        1e8
    }

    fn bytes_per_ms(&self) -> f64 {
        2e7
    }

    fn aliases_host(&self) -> bool {
        true
    }
}
