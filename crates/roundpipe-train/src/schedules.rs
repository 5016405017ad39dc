//! Schedules beside each other: RoundPipe, GPipe, 1F1B, interleaved 1F1B and looped BFS, for a model
//! on described cards and for the published figures.
//!
//! All of it is simulated ([`roundpipe::simulate`]). RoundPipe uploads weights for every visit of a
//! stage and has the host's optimizer behind it; the other schedules bind stages to cards, weights
//! included, and are played as if those fitted and nothing had to be copied but activations: what
//! they show is the best that they could do.

use roundpipe::timeline::EarlyWork;
use roundpipe::timeline::published::{DEVICES, MICROBATCHES, MODELS, Model};
use roundpipe::{AutoOptions, ExecutePlan, Lag, LayerCosts, PlanKind, Schedule, Setting, simulate};
use serde::Serialize;

use crate::error::Result;
use crate::predict::machine::Machine;
use crate::predict::{Prediction, Subject, predict_speed};
use crate::settings::Settings;

/// Stages that interleaved schedules give each card, where there are layers enough.
const STAGES_PER_CARD: usize = 3;

/// The schedules in the order of tables, with their names.
pub const SCHEDULES: [(&str, Schedule); 6] = [
    ("RoundPipe", Schedule::RoundPipe),
    ("RoundPipe async", Schedule::RoundPipeAsync),
    ("GPipe", Schedule::GPipe),
    ("1F1B", Schedule::OneForwardOneBackward),
    ("interleaved 1F1B", Schedule::Interleaved),
    ("looped BFS", Schedule::LoopedBfs),
];

/// How one schedule does.
#[derive(Debug, Clone, Serialize)]
pub struct Outcome {
    /// Its name.
    pub schedule: &'static str,
    /// Share of the cards' time in which nothing runs.
    pub bubble: f64,
    /// Tokens of all cards.
    pub tokens_per_s: f64,
}

/// All schedules on one machine, or why there are none.
#[derive(Debug, Clone, Serialize)]
pub struct Comparison {
    /// Cards.
    pub cards: usize,
    /// Parts of a step.
    pub microbatches: usize,
    /// Bytes per second between host and a card.
    pub pcie_bytes_per_s: f64,
    /// By schedule; those that cannot be played are left out.
    pub outcomes: Vec<Outcome>,
    /// Why there are none.
    pub refused: Option<String>,
}

/// Plays all schedules.
///
/// # Errors
/// As [`predict`](crate::predict::predict), except that what does not fit is said in the result.
pub fn compare(subject: &Subject, settings: &Settings, machine: &Machine) -> Result<Comparison> {
    let mut comparison = Comparison {
        cards: machine.workers,
        microbatches: settings.microbatches.unwrap_or(machine.workers + 1),
        pcie_bytes_per_s: machine.upload,
        outcomes: Vec::new(),
        refused: None,
    };
    for (name, schedule) in SCHEDULES {
        let mut settings = settings.clone();
        settings.lag = u64::from(schedule == Schedule::RoundPipeAsync);
        let played = match predict_speed(subject, &settings, machine) {
            Ok(prediction) => {
                comparison.microbatches = prediction.microbatches;
                play(schedule, &prediction, machine)
            }
            Err(crate::Error::DoesNotFit(why)) => {
                comparison.refused = Some(why);
                return Ok(comparison);
            }
            Err(error) => return Err(error),
        };
        if let Some((bubble, step_s, tokens)) = played {
            comparison.outcomes.push(Outcome {
                schedule: name,
                bubble,
                tokens_per_s: tokens / step_s,
            });
        }
    }
    Ok(comparison)
}

/// Bubble, seconds of a step and its tokens; nothing for a schedule that these layers and
/// microbatches do not suit.
fn play(schedule: Schedule, prediction: &Prediction, machine: &Machine) -> Option<(f64, f64, f64)> {
    let tokens = (prediction.batch * prediction.seq) as f64;
    let speed = &prediction.speed;
    let per_card = match schedule {
        Schedule::RoundPipe | Schedule::RoundPipeAsync => {
            return Some((speed.bubble, speed.step_s, tokens));
        }
        Schedule::Interleaved | Schedule::LoopedBfs => {
            STAGES_PER_CARD.min(prediction.costs.len() / machine.workers)
        }
        _ => 1,
    };
    let stages = machine.workers * per_card;
    if stages == 0 || stages > prediction.costs.len() {
        return None;
    }
    let mut setting = Setting::new(machine.workers, prediction.microbatches);
    let both = 1.0 / (1.0 / machine.upload + 1.0 / machine.download);
    setting.hop_bytes_per_ms = Some(both / 1e3);
    let sizes = even_sizes(&prediction.costs, stages);
    let plan = ExecutePlan::from_sizes(PlanKind::Infer, &sizes, &[]);
    let played = simulate(
        schedule,
        PlanKind::Train,
        &plan,
        &prediction.costs,
        &setting,
    )
    .ok()?;
    Some((played.bubble, played.step_ms / 1e3, tokens))
}

/// Consecutive layers in `stages` parts whose slowest is as fast as can be.
fn even_sizes(costs: &LayerCosts, stages: usize) -> Vec<usize> {
    let times: Vec<f64> = costs
        .layers
        .iter()
        .map(|layer| layer.forward_ms + layer.recompute_ms + layer.backward_ms)
        .collect();
    let fits = |limit: f64| {
        let mut sizes = vec![0];
        let mut sum = 0.0;
        for time in &times {
            if sum + time > limit && sizes[sizes.len() - 1] > 0 {
                sizes.push(0);
                sum = 0.0;
            }
            sum += time;
            if let Some(last) = sizes.last_mut() {
                *last += 1;
            }
        }
        sizes
    };
    let most = times.iter().copied().fold(0.0, f64::max);
    let (mut low, mut high) = (most, times.iter().sum::<f64>().max(most));
    for _ in 0..60 {
        let middle = 0.5 * (low + high);
        if fits(middle).len() <= stages {
            high = middle;
        } else {
            low = middle;
        }
    }
    let mut sizes = fits(high);
    // Where the last stages would be empty, the longest ones are halved.
    while sizes.len() < stages {
        let Some(place) = (0..sizes.len()).max_by_key(|place| sizes[*place]) else {
            break;
        };
        let half = sizes[place] / 2;
        sizes[place] -= half;
        sizes.insert(place + 1, half);
    }
    sizes
}

/// A line of the published table, in percent.
#[derive(Debug, Clone, Serialize)]
pub struct PublishedRow {
    /// Model.
    pub model: &'static str,
    /// Schedule.
    pub schedule: &'static str,
    /// The authors' figure.
    pub published: f64,
    /// Ours by their rules, for their plan.
    pub repeated: f64,
    /// By the engine's rules, for their plan.
    pub own_rules: Option<f64>,
    /// By the engine's rules, for the plan that the search finds.
    pub own_plan: Option<f64>,
    /// The same if recompute may start before the gradient arrives.
    pub early: Option<f64>,
    /// The same if moreover a visit takes only as many microbatches as there are devices.
    pub rounds: Option<f64>,
}

/// Simulated bubbles beside the published ones, for 8 cards and 16 microbatches.
///
/// # Errors
/// None is expected: the plans and costs are constants.
pub fn published() -> Result<Vec<PublishedRow>> {
    let mut rows = Vec::new();
    for model in &MODELS {
        for (name, schedule) in SCHEDULES {
            rows.push(published_row(model, name, schedule)?);
        }
    }
    Ok(rows)
}

fn published_row(model: &Model, name: &'static str, schedule: Schedule) -> Result<PublishedRow> {
    let costs = model.costs();
    let ours = Setting::new(DEVICES, MICROBATCHES);
    let mut row = PublishedRow {
        model: model.name,
        schedule: name,
        published: match schedule {
            Schedule::RoundPipeAsync => model.overlapped,
            Schedule::GPipe => model.gpipe,
            Schedule::OneForwardOneBackward => model.one_f_one_b,
            Schedule::Interleaved => model.interleaved,
            Schedule::LoopedBfs => model.looped_bfs,
            _ => model.sync,
        },
        repeated: 0.0,
        own_rules: None,
        own_plan: None,
        early: None,
        rounds: None,
    };
    if !matches!(schedule, Schedule::RoundPipe | Schedule::RoundPipeAsync) {
        let is_looped = matches!(schedule, Schedule::Interleaved | Schedule::LoopedBfs);
        let plan = if is_looped {
            model.looped()
        } else {
            model.single()
        };
        let played = simulate(schedule, PlanKind::Train, &plan, &costs, &ours)?;
        row.repeated = 100.0 * played.bubble;
        return Ok(row);
    }
    let is_async = schedule == Schedule::RoundPipeAsync;
    let theirs = Setting::published(DEVICES, MICROBATCHES);
    let fused = |schedule, plan: &ExecutePlan, setting: &Setting| {
        simulate(schedule, PlanKind::Fused, plan, &costs, setting)
    };
    let repeated = fused(Schedule::RoundPipe, &model.plan(), &theirs)?;
    row.repeated = 100.0
        * if is_async {
            repeated.inner_bubble()
        } else {
            repeated.bubble
        };
    let early = Setting {
        ahead: EarlyWork::Recompute,
        ..ours.clone()
    };
    let rounds = Setting {
        visit: DEVICES,
        ..early.clone()
    };
    let found = |setting: &Setting| -> Result<Option<f64>> {
        let plan = search(&costs, is_async, setting)?;
        Ok(Some(100.0 * fused(schedule, &plan, setting)?.bubble))
    };
    row.own_rules = Some(100.0 * fused(schedule, &model.plan(), &ours)?.bubble);
    row.own_plan = found(&ours)?;
    row.early = found(&early)?;
    row.rounds = found(&rounds)?;
    Ok(row)
}

fn search(costs: &LayerCosts, is_async: bool, setting: &Setting) -> Result<ExecutePlan> {
    let options = AutoOptions {
        setting: setting.clone(),
        lag: if is_async { Lag::One } else { Lag::Zero },
        ..AutoOptions::new(DEVICES, MICROBATCHES)
    };
    let mut plans = ExecutePlan::auto(PlanKind::Fused, &[costs], &options)?;
    Ok(plans.swap_remove(0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use roundpipe::LayerCost;

    #[test]
    fn stages_are_as_even_as_can_be() {
        let layer = |ms: f64| LayerCost {
            forward_ms: ms,
            ..LayerCost::default()
        };
        let sizes = |times: &[f64], stages| {
            let layers = times.iter().map(|ms| layer(*ms)).collect();
            even_sizes(&LayerCosts { layers }, stages)
        };
        assert_eq!(sizes(&[1.0; 8], 4), [2, 2, 2, 2]);
        assert_eq!(sizes(&[1.0, 1.0, 1.0, 5.0], 2), [3, 1]);
        assert_eq!(sizes(&[1.0; 9], 4).iter().sum::<usize>(), 9);
        assert_eq!(sizes(&[5.0, 1.0, 1.0, 1.0], 4), [1, 1, 1, 1]);
    }
}
