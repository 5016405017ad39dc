//! What a person should know before the first step, in words: model, data, stages, memory, time.

use roundpipe::{Bytes, ExecutePlan, Params};
use roundpipe_models::TrainMode;
use roundpipe_report::{Memory, Place};

use crate::machine;
use crate::model::host_budget;
use crate::settings::{Method, Objective};
use crate::start::Ready;

/// Parameters that are trained.
pub(crate) fn trained_parameters(ready: &Ready) -> usize {
    let params = ready.trained.model.trainable_params();
    params.iter().map(|(_, param)| param.shape().numel()).sum()
}

/// All parameters; tables that are computed are not counted.
pub(crate) fn parameters(ready: &Ready) -> u64 {
    let base = ready.trained.model.config.num_params();
    match ready.settings.method {
        Method::Full => base,
        Method::Lora => base + trained_parameters(ready) as u64,
    }
}

/// The model's name, as the user gave it.
pub(crate) fn model_name(ready: &Ready) -> &str {
    let settings = &ready.settings;
    let name = settings.model.as_ref().or(settings.init.as_ref());
    name.map_or("", String::as_str)
}

/// What is trained and how: `full`, `lora`, `dpo, lora`.
pub(crate) fn method(ready: &Ready) -> String {
    let settings = &ready.settings;
    let method = settings.method.name();
    match settings.objective {
        Objective::Sft => method.to_owned(),
        objective => format!("{}, {method}", objective.name()),
    }
}

/// Files and rows.
pub(crate) fn data_lines(ready: &Ready) -> Vec<String> {
    let data = &ready.data;
    let kept = data.validation.as_ref().map_or(0, |rows| rows.len());
    let mut lines = data.report.clone();
    lines.push(format!("{} rows train, {kept} validate", data.rows.len()));
    lines
}

/// Model, method and sizes.
pub(crate) fn model_lines(ready: &Ready) -> Vec<String> {
    let settings = &ready.settings;
    let model = &ready.trained.model;
    vec![
        format!(
            "{}: {} parameters, {} of them trained ({}), {}{}",
            model_name(ready),
            parameters(ready),
            trained_parameters(ready),
            method(ready),
            model.dtype(),
            if settings.fp8 {
                ", projections in fp8"
            } else {
                ""
            },
        ),
        format!(
            "{} steps of {} {} {} tokens; {} at {:e}, {}",
            settings.steps.unwrap_or(0),
            settings.batch.unwrap_or(0),
            if ready.pair_loss.is_some() {
                "pairs of answers of up to"
            } else {
                "rows of"
            },
            settings.seq.unwrap_or(0),
            settings.optimizer.name(),
            settings.lr.unwrap_or(0.0),
            settings.schedule.name(),
        ),
    ]
}

/// Stages, memory by name, and the least time that is left.
pub(crate) fn plan_lines(
    ready: &Ready,
    plan: &ExecutePlan,
    microbatches: usize,
    steps_left: u64,
) -> Vec<String> {
    let devices = ready.devices.iter().map(|device| device.id().to_string());
    let devices: Vec<String> = devices.collect();
    let mut lines = vec![format!(
        "on {}: stages of layers {plan} (forward | backward), {microbatches} microbatches",
        devices.join(", "),
    )];
    let memory = memory(ready);
    for (place, name) in [(Place::Host, "host"), (Place::Gpu, "each GPU")] {
        let parts: Vec<String> = memory
            .iter()
            .filter(|part| part.place == place && part.bytes > 0)
            .map(|part| format!("{} {}", part.name, Bytes(part.bytes)))
            .collect();
        if !parts.is_empty() {
            lines.push(format!("{name}: {}", parts.join(", ")));
        }
    }
    if let Some(limit) = limit(ready) {
        let settings = &ready.settings;
        let row_tokens = ready.data.pair_tokens.or(settings.seq).unwrap_or(1);
        let tokens = (row_tokens * settings.batch.unwrap_or(1)) as f64;
        let seconds = steps_left as f64 * tokens / limit;
        lines.push(format!(
            "the hardware's limit is {limit:.0} tokens/s, so it takes {} at least",
            duration(seconds)
        ));
    }
    lines
}

/// Tokens per second that the products of a step allow at most.
pub(crate) fn limit(ready: &Ready) -> Option<f64> {
    let trains = match ready.settings.method {
        Method::Full => TrainMode::All,
        Method::Lora => TrainMode::Adapters,
    };
    let config = &ready.trained.model.config;
    let work = config.flops_per_token(ready.data.context, trains);
    Some(ready.product_rate? * machine::processors(&ready.engine) as f64 / work)
}

/// Memory by place and name.
pub(crate) fn memory(ready: &Ready) -> Vec<Memory> {
    let held = host_budget(&ready.trained.model, &ready.settings);
    let ring = ready.engine.ring();
    let mut parts = vec![
        (Place::Host, "weights", held.weights),
        (Place::Host, "gradients", held.gradients),
        (Place::Host, "masters", held.masters),
        (Place::Host, "moments", held.moments),
        (Place::Host, "activations", ring.host_use().peak.0),
    ];
    let is_gpu = ready.devices.iter().any(|device| device.id().kind.is_gpu());
    if let Some(budget) = ring.budgets().first().filter(|_| is_gpu) {
        let rest = budget.arena.saturating_sub(budget.weights + budget.task);
        parts.extend([
            (Place::Gpu, "weights", budget.weights),
            (Place::Gpu, "work", budget.task),
            (Place::Gpu, "copies and kept values", rest),
        ]);
    }
    let named = |(place, name, bytes): (Place, &str, u64)| Memory {
        place,
        name: name.to_owned(),
        bytes,
    };
    parts.into_iter().map(named).collect()
}

/// Seconds in words: `42 s`, `7 min`, `3.5 h`.
fn duration(seconds: f64) -> String {
    match seconds {
        s if s < 90.0 => format!("{s:.0} s"),
        s if s < 5400.0 => format!("{:.0} min", s / 60.0),
        s => format!("{:.1} h", s / 3600.0),
    }
}
