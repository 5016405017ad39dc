//! What this machine can do and what it uses: the figures that a run is set beside.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use roundpipe::{
    Bytes, Cx, DType, Device, HostBudget, MomentType, Params, RoundPipe, Rule, Sequential,
    TensorResult, Worker,
};

/// After so long, what was seen of a slow device is enough.
const MEASURED: Duration = Duration::from_millis(300);

/// Operations per second of a large product on this device: what a floor is computed with.
///
/// # Errors
/// When the device has no memory for it.
pub fn product_rate(device: Arc<dyn Device>, dtype: DType) -> TensorResult<f64> {
    let size: usize = if device.id().kind.is_gpu() {
        8192
    } else {
        1024
    };
    let bytes = 4 * size * size * dtype.size() + (64 << 20);
    let worker = Worker::new(device, Bytes(bytes as u64))?;
    let mut cx = Cx::infer(&worker);
    let a = cx.randn(dtype, &[size, size])?;
    let b = cx.randn(dtype, &[size, size])?;
    let mut best = f64::INFINITY;
    let all = Instant::now();
    for _ in 0..4 {
        worker.fence()?;
        let start = Instant::now();
        let mut count = 0;
        while count < 4 && all.elapsed() < MEASURED {
            drop(cx.matmul(&a, &b)?);
            count += 1;
        }
        worker.fence()?;
        if count > 0 {
            best = best.min(start.elapsed().as_secs_f64() / f64::from(count));
        }
    }
    Ok(2.0 * (size as f64).powi(3) / best)
}

/// Host memory that training a model takes, by name; activations are not known from parameters.
pub fn training_budget(layers: &Sequential, rule: &Rule, second_version: bool) -> HostBudget {
    training_budget_of(layers, rule, second_version, StateTypes::default())
}

/// What masters and moments are kept in.
#[derive(Debug, Clone, Copy)]
pub struct StateTypes {
    /// Of both, where it is the weights' own; f32 elsewhere.
    pub optim_dtype: DType,
    /// Of moments whose state is f32.
    pub moments: MomentType,
}

impl Default for StateTypes {
    fn default() -> Self {
        Self {
            optim_dtype: DType::F32,
            moments: MomentType::F32,
        }
    }
}

/// The same for an optimizer whose state has types of its own: bf16 weights with a state in bf16
/// are their own masters.
pub fn training_budget_of(
    layers: &Sequential,
    rule: &Rule,
    second_version: bool,
    state: StateTypes,
) -> HostBudget {
    let mut params = layers.named_params();
    params.sort_by_key(|(_, param)| param.id());
    params.dedup_by_key(|(_, param)| param.id());
    let params = || params.iter().map(|(_, param)| param);
    let mut budget = HostBudget::training(params(), 0, second_version);
    budget.masters = 0;
    for param in params().filter(|param| param.is_trainable()) {
        let StateTypes {
            optim_dtype,
            moments,
        } = state;
        if optim_dtype != param.dtype() {
            budget.masters += HostBudget::master_bytes(param);
        }
        budget.moments += rule.moment_bytes(param, optim_dtype, moments);
    }
    // Each layer has a gradient of its own for a weight that it shares, as a tied head does.
    let mut seen = BTreeSet::new();
    for (_, layer) in layers.layers() {
        for (_, param) in layer.trainable_params() {
            if !seen.insert(param.id()) {
                budget.gradients += param.bytes() as u64;
            }
        }
    }
    budget
}

/// Devices that compute by themselves: workers on one card, or on the host's cores, share it.
pub fn processors<M>(engine: &RoundPipe<M>) -> usize {
    let id = |worker: &Worker| match worker.device().id() {
        id if id.kind.is_gpu() => id.index,
        _ => 0,
    };
    let workers = engine.ring().workers().iter();
    workers.map(id).collect::<BTreeSet<_>>().len()
}

/// Most memory in use of each worker's arena.
pub fn worker_peaks<M>(engine: &RoundPipe<M>) -> Vec<u64> {
    let workers = engine.ring().workers().iter();
    workers.map(|worker| worker.usage().high_water.0).collect()
}

/// Most memory that the process has had, as the system counts it.
pub fn host_peak() -> Option<u64> {
    process_memory("VmHWM:")
}

/// Memory that the process has now, as the system counts it.
pub fn host_now() -> Option<u64> {
    process_memory("VmRSS:")
}

fn process_memory(field: &str) -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    status.lines().find_map(|line| {
        let kib = line.strip_prefix(field)?.trim().strip_suffix("kB")?;
        kib.trim().parse::<u64>().ok()?.checked_mul(1024)
    })
}
