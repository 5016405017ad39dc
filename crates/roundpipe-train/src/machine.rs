//! What this machine can do and what it uses: the figures that a run is set beside.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use roundpipe::{
    Bytes, Cx, DType, Device, HostBudget, MomentType, Param, RoundPipe, Rule, Sequential,
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
    // Each parameter once, with all its names.
    let mut params: BTreeMap<_, (Param, Vec<String>)> = BTreeMap::new();
    for (layer, module) in layers.layers() {
        for (name, param) in module.named_params() {
            let named = params
                .entry(param.id())
                .or_insert_with(|| (param, Vec::new()));
            named.1.push(format!("{layer}.{name}"));
        }
    }
    let each = params.values().map(|(param, _)| param);
    let mut budget = HostBudget::training(each, 0, second_version);
    budget.masters = 0;
    for (param, names) in params.values().filter(|(param, _)| param.is_trainable()) {
        let StateTypes {
            optim_dtype,
            moments,
        } = state;
        if optim_dtype != param.dtype() {
            budget.masters += HostBudget::master_bytes(param);
        }
        let names = names.iter().map(String::as_str);
        budget.moments += rule.moment_bytes(names, param, optim_dtype, moments);
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use roundpipe::nn::{Embedding, Init, Linear};
    use roundpipe::optim::{Adafactor, AdamW, Lion, Muon, Sgd};
    use roundpipe::{Cpu, Device, HostTensor, Lag, Tree, Update};

    use super::*;

    /// What is promised before training begins is what the engine takes, for every rule, with a table
    /// that has two names.
    #[test]
    fn the_budget_is_what_training_takes() {
        let rules: [Rule; 5] = [
            AdamW::default().into(),
            Lion::default().into(),
            Sgd::default().into(),
            Adafactor::default().into(),
            Muon::default().into(),
        ];
        for rule in rules {
            for moments in [MomentType::F32, MomentType::Bf16, MomentType::Bits8] {
                for lag in [Lag::Zero, Lag::One] {
                    let mut init = Init::new(1, DType::BF16);
                    let table = Embedding::new(&mut init, 64, 128, 0.5).unwrap();
                    let mut head = Linear::new(&mut init, 128, 64, false).unwrap();
                    head.weight = table.weight.clone();
                    let model = Sequential::new()
                        .named("first", table)
                        .named("hidden", Linear::new(&mut init, 128, 128, true).unwrap())
                        .named("lm_head", head);
                    let state = StateTypes {
                        moments,
                        ..StateTypes::default()
                    };
                    let budget = training_budget_of(&model, &rule, lag == Lag::One, state);
                    let engine = RoundPipe::builder(model)
                        .optimizer(rule)
                        .moments(moments)
                        .max_lag(lag)
                        .devices([Cpu::new(Some(1)).unwrap() as Arc<dyn Device>])
                        .build()
                        .unwrap();
                    let ids = HostTensor::from_slice(&[0i64, 5, 63, 9], &[4]).unwrap();
                    let loss = |cx: &mut Cx, output: Tree, _: Tree| {
                        let output = output.tensor()?;
                        cx.sum_all(&output)
                    };
                    engine.train(ids).loss(loss).run().unwrap();
                    engine.update(&Update::new(1e-3), lag).unwrap();
                    engine.synchronize().unwrap();
                    let taken = engine.host_bytes();
                    let name = format!("{rule:?} {moments} {lag:?}");
                    assert_eq!(budget.moments, taken.moments as u64, "{name}");
                    assert_eq!(budget.masters, taken.masters as u64, "{name}");
                    assert_eq!(budget.gradients, taken.gradients as u64, "{name}");
                    assert_eq!(budget.weights, taken.weights as u64, "{name}");
                }
            }
        }
    }
}
