//! The backends by kind, a line each.
//!
//! A backend states its costs in its own folder ([`BackendCosts`]); a plan for a machine whose
//! devices are not there starts from this list. Opening a device is the business of its backend.

use crate::cpu;
use crate::cuda;
use crate::device::{BackendCosts, CostModel, DeviceKind};
use crate::sim;

/// The costs of any device of a kind.
fn costs(kind: DeviceKind) -> &'static dyn BackendCosts {
    match kind {
        DeviceKind::Cpu | DeviceKind::Meta => &cpu::CpuCosts,
        DeviceKind::Cuda => &cuda::WITH_CUDNN,
        DeviceKind::Sim => &sim::SimCosts,
    }
}

impl From<DeviceKind> for CostModel {
    /// Any device of a kind: the one that wants the most memory.
    fn from(kind: DeviceKind) -> Self {
        Self::new(costs(kind))
    }
}
