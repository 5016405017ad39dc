//! Ways to make a run fit: changes of settings, each checked by planning the run again.
//!
//! A way is one change or a few together. Those that change nothing of what is learned come first,
//! then those that keep what is trained but not every bit of the optimizer's state, then those that
//! train something else; of equals the fastest. A way whose part would do by itself is not offered.

use std::time::{Duration, Instant};

use serde::Serialize;

use super::{Prediction, Subject, exceeds_machine, machine::Machine, predict};
use crate::error::{Error, Result};
use crate::settings::{
    GrainName, Method, MomentsName, PinName, QuantizeName, RuleName, Settings, TypeName,
};

/// Ways that are offered.
const OFFERED: usize = 3;
/// Changes that are made together at most.
const TOGETHER: usize = 3;
/// The highest price of a change that leaves what is learned as it is.
const HARMLESS: u32 = 2;
/// Plans that are made in search of them.
const MOST_PLANS: usize = 24;
/// The search begins no plan after so long: those of long rows and many microbatches take seconds each.
const MOST_TIME: Duration = Duration::from_secs(60);

/// What makes a run fit.
#[derive(Debug, Clone, Serialize)]
pub struct Way {
    /// Arguments to add.
    pub arguments: String,
    /// What they give up.
    pub costs: String,
    /// The speed with them.
    pub tokens_per_s: f64,
    /// Of each card.
    pub gpu_peak_bytes: u64,
    /// Of the host.
    pub host_peak_bytes: u64,
}

/// One change of settings.
struct Change {
    arguments: String,
    costs: &'static str,
    /// How much of what was asked for it gives up.
    price: u32,
    /// Changes that exclude each other have the same.
    about: &'static str,
    apply: Box<dyn Fn(&mut Settings)>,
}

/// Looks for the cheapest changes that make a run fit, at most three. `settings` are those that do
/// not fit, as the user gave them.
///
/// # Errors
/// What [`predict`] refuses for another reason than memory.
pub fn ways_to_fit(subject: &Subject, settings: &Settings, machine: &Machine) -> Result<Vec<Way>> {
    let start = Instant::now();
    let changes = changes(subject, settings);
    let mut combinations = combinations(&changes);
    combinations.sort_by_key(|chosen| {
        let price: u32 = chosen.iter().map(|index| changes[*index].price).sum();
        (price, chosen.len())
    });
    let mut ways: Vec<(Vec<usize>, u32, Way)> = Vec::new();
    let mut planned = 0;
    for chosen in combinations {
        let price = chosen.iter().map(|index| changes[*index].price).sum();
        let has_enough = ways.len() >= OFFERED && ways.iter().all(|(_, other, _)| *other < price);
        if has_enough || planned >= MOST_PLANS || start.elapsed() > MOST_TIME {
            break;
        }
        let includes = |part: &Vec<usize>| part.iter().all(|index| chosen.contains(index));
        if ways.iter().any(|(part, _, _)| includes(part)) {
            continue;
        }
        let mut changed = settings.clone();
        for index in &chosen {
            (changes[*index].apply)(&mut changed);
        }
        if exceeds_machine(subject, &changed, machine).unwrap_or(true) {
            continue;
        }
        planned += 1;
        if let Some(prediction) = predict_fitting(subject, &changed, machine)? {
            let way = way(&changes, &chosen, &prediction);
            ways.push((chosen, price, way));
        }
    }
    if ways.is_empty() {
        ways.extend(least_way(subject, settings, machine)?);
    }
    ways.sort_by(|a, b| {
        let faster = b.2.tokens_per_s.total_cmp(&a.2.tokens_per_s);
        a.1.cmp(&b.1).then(faster)
    });
    Ok(ways
        .into_iter()
        .take(OFFERED)
        .map(|(_, _, way)| way)
        .collect())
}

/// One row in a step, and all that changes nothing of what is learned: the last thing to try before a
/// smaller model.
fn least_way(
    subject: &Subject,
    settings: &Settings,
    machine: &Machine,
) -> Result<Option<(Vec<usize>, u32, Way)>> {
    if settings.batch == Some(1) {
        return Ok(None);
    }
    let mut changes = changes(subject, settings);
    changes.retain(|change| change.price <= HARMLESS);
    let apply = Box::new(|s: &mut Settings| {
        s.batch = Some(1);
        s.microbatches = s.microbatches.map(|_| 1);
    });
    changes.push(Change {
        arguments: "batch=1".to_owned(),
        costs: "fewer tokens in a step",
        price: HARMLESS + 1,
        about: "batch",
        apply,
    });
    let mut least = settings.clone();
    changes.iter().for_each(|change| (change.apply)(&mut least));
    if exceeds_machine(subject, &least, machine).unwrap_or(true) {
        return Ok(None);
    }
    let prediction = predict_fitting(subject, &least, machine)?;
    Ok(prediction.map(|prediction| {
        let chosen: Vec<usize> = (0..changes.len()).collect();
        let price = changes.iter().map(|change| change.price).sum();
        let way = way(&changes, &chosen, &prediction);
        (chosen, price, way)
    }))
}

/// The prediction, if the run fits.
fn predict_fitting(
    subject: &Subject,
    settings: &Settings,
    machine: &Machine,
) -> Result<Option<Prediction>> {
    match predict(subject, settings, machine) {
        Ok(prediction) => Ok(Some(prediction).filter(|found| found.lacks.is_empty())),
        Err(Error::DoesNotFit(_) | Error::Usage(_)) => Ok(None),
        Err(error) => Err(error),
    }
}

fn way(changes: &[Change], chosen: &[usize], prediction: &Prediction) -> Way {
    let of = |text: fn(&Change) -> &str| {
        let texts = chosen.iter().map(|index| text(&changes[*index]));
        texts.collect::<Vec<_>>()
    };
    Way {
        arguments: of(|change| change.arguments.as_str()).join(" "),
        costs: of(|change| change.costs).join("; "),
        tokens_per_s: prediction.speed.tokens_per_s,
        gpu_peak_bytes: prediction.gpu.as_ref().map_or(0, |gpu| gpu.peak_bytes),
        host_peak_bytes: prediction.host.peak_bytes,
    }
}

/// Sets of changes that go together, small ones first.
fn combinations(changes: &[Change]) -> Vec<Vec<usize>> {
    let mut all: Vec<Vec<usize>> = vec![Vec::new()];
    let mut from = 0;
    for _ in 0..TOGETHER {
        let until = all.len();
        for at in from..until {
            let next = all[at].last().map_or(0, |last| last + 1);
            for index in next..changes.len() {
                let about = changes[index].about;
                if all[at].iter().all(|other| changes[*other].about != about) {
                    let mut longer = all[at].clone();
                    longer.push(index);
                    all.push(longer);
                }
            }
        }
        from = until;
    }
    all.remove(0);
    all
}

/// Everything that could help and is not so already.
fn changes(subject: &Subject, settings: &Settings) -> Vec<Change> {
    let mut changes = Vec::new();
    let mut add = |about, price, arguments: &str, costs, apply: Box<dyn Fn(&mut Settings)>| {
        changes.push(Change {
            arguments: arguments.to_owned(),
            costs,
            price,
            about,
            apply,
        });
    };
    let is_full = settings.method == Method::Full;
    if settings.lag == 1 {
        let apply = Box::new(|s: &mut Settings| s.lag = 0);
        add(
            "lag",
            1,
            "lag=0",
            "the next step waits for the update",
            apply,
        );
    }
    if settings.grain == GrainName::Stage {
        let apply = Box::new(|s: &mut Settings| s.grain = GrainName::Layer);
        let costs = "more activations in host memory";
        add("grain", 1, "grain=layer", costs, apply);
    }
    if settings.keep > 1 {
        let apply = Box::new(|s: &mut Settings| s.keep = 1);
        add(
            "keep",
            1,
            "keep=1",
            "one checkpoint stays beside the best",
            apply,
        );
    }
    if settings.gpu_memory.is_some() {
        let apply = Box::new(|s: &mut Settings| s.gpu_memory = None);
        let costs = "all of each card instead of a part";
        add("gpu_memory", 2, "gpu_memory=auto", costs, apply);
    }
    if settings.stages.is_some() {
        let apply = Box::new(|s: &mut Settings| s.stages = None);
        let costs = "stages as planned";
        add("stages", 2, "stages=auto", costs, apply);
    }
    if !is_full && subject.has_files() && settings.pin != PinName::Off {
        let apply = Box::new(|s: &mut Settings| s.pin = PinName::Off);
        let costs = "frozen weights are read from the disk at every use";
        add("pin", 4, "pin=off", costs, apply);
    }
    let has_f32_state = settings.state_dtype == TypeName::F32;
    if is_full && has_f32_state && settings.moments != MomentsName::Bits8 {
        let apply = Box::new(|s: &mut Settings| s.moments = MomentsName::Bits8);
        let costs = "moments of all but embeddings have 8 bits and a scale per 256 elements";
        // About the same setting as the next: both at once are refused.
        add("state_dtype", 4, "moments=8bit", costs, apply);
    }
    if is_full && has_f32_state {
        let apply = Box::new(|s: &mut Settings| {
            s.state_dtype = TypeName::Bf16;
            s.moments = MomentsName::F32;
        });
        let costs = "the optimizer's state is rounded to bf16";
        let arguments = match settings.moments {
            MomentsName::F32 => "state_dtype=bf16",
            _ => "state_dtype=bf16 moments=f32",
        };
        add("state_dtype", 5, arguments, costs, apply);
    }
    if is_full && matches!(settings.optimizer, RuleName::AdamW | RuleName::Adam) {
        for (name, rule, price, costs) in [
            (
                "optimizer=lion",
                RuleName::Lion,
                6,
                "another rule, with one moment",
            ),
            (
                "optimizer=adafactor",
                RuleName::Adafactor,
                6,
                "another rule, with factored moments",
            ),
        ] {
            let apply = Box::new(move |s: &mut Settings| s.optimizer = rule);
            add("optimizer", price, name, costs, apply);
        }
    }
    let batch = settings.batch;
    for part in [2, 4] {
        if let Some(rows) = batch.map(|rows| rows / part).filter(|rows| *rows > 0) {
            let apply = Box::new(move |s: &mut Settings| {
                s.batch = Some(rows);
                s.microbatches = s.microbatches.map(|count| count.min(rows));
            });
            let costs = "fewer tokens in a step";
            add(
                "batch",
                4 + part as u32,
                &format!("batch={rows}"),
                costs,
                apply,
            );
        }
    }
    if is_full {
        let apply = Box::new(|s: &mut Settings| s.method = Method::Lora);
        add(
            "method",
            8,
            "--lora",
            "adapters are trained, not every weight",
            apply,
        );
    }
    let is_whole = settings.quantize.is_none() && subject.config().quantization().is_none();
    if is_whole && !settings.fp8 {
        for (how, price) in [(QuantizeName::Int8, 4), (QuantizeName::Nf4, 5)] {
            let apply = Box::new(move |s: &mut Settings| {
                s.method = Method::Lora;
                s.quantize = Some(how);
            });
            let quantize = format!("quantize={}", how.name());
            // Instead of `--lora` alone.
            let (about, price, arguments, costs) = match is_full {
                true => (
                    "method",
                    price + 5,
                    format!("--lora {quantize}"),
                    "adapters are trained, beside weights of fewer bits",
                ),
                false => (
                    "quantize",
                    price,
                    quantize,
                    "frozen weights have fewer bits",
                ),
            };
            add(about, price, &arguments, costs, apply);
        }
    }
    let seq = settings.seq.unwrap_or(2048);
    for part in [2, 4] {
        let shorter = seq / part;
        if shorter >= 128 {
            let apply = Box::new(move |s: &mut Settings| s.seq = Some(shorter));
            let costs = "longer rows are cut";
            add(
                "seq",
                8 + part as u32,
                &format!("seq={shorter}"),
                costs,
                apply,
            );
        }
    }
    changes
}

#[cfg(test)]
mod tests {
    use roundpipe::Bytes;

    use super::*;
    use crate::cards;

    /// Where a quarter of the batch is far too much, one row is offered; where one row is, nothing.
    #[test]
    fn one_row_is_the_last_way() {
        let mut settings = Settings {
            model: Some("qwen3-0.6b".to_owned()),
            method: Method::Lora,
            batch: Some(256),
            seq: Some(8192),
            recompute_all: true,
            ..Settings::default()
        };
        let subject = Subject::open(&settings).unwrap();
        let (count, card) = cards::parse("rtx4090").unwrap();
        let machine = Machine::of_cards(count, card, Some(Bytes::gib(6)));
        let way = least_way(&subject, &settings, &machine).unwrap();
        let (_, _, way) = way.expect("one row fits");
        assert!(way.arguments.ends_with("batch=1"), "{}", way.arguments);
        assert!(way.host_peak_bytes <= Bytes::gib(6).0);
        settings.batch = Some(1);
        assert!(least_way(&subject, &settings, &machine).unwrap().is_none());
    }

    /// A way that leaves the checkpoints larger than the disk is passed over without a plan.
    #[test]
    fn what_the_disk_cannot_hold_is_not_planned() {
        let mut settings = Settings {
            model: Some("qwen3-0.6b".to_owned()),
            ..Settings::default()
        };
        let subject = Subject::open(&settings).unwrap();
        let (count, card) = cards::parse("rtx4090").unwrap();
        let mut machine = Machine::of_cards(count, card, None);
        let exceeds = |settings: &Settings, machine: &Machine| {
            exceeds_machine(&subject, settings, machine).unwrap()
        };
        assert!(
            !exceeds(&settings, &machine),
            "nothing is known of the disk"
        );
        machine.disk_free = Some(Bytes(1 << 30));
        assert!(exceeds(&settings, &machine), "a checkpoint has 7 GB");
        settings.method = Method::Lora;
        assert!(!exceeds(&settings, &machine), "adapters are small");
        settings.method = Method::Full;
        machine.disk_free = Some(Bytes(1 << 40));
        assert!(!exceeds(&settings, &machine));
    }
}
