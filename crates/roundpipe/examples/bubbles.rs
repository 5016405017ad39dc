//! Prints simulated bubbles beside the published ones: one line per model and schedule.
//!
//! `published` is the authors' figure, `repeated` ours by their rules for their plan. `own rules`
//! and `own plan` follow the engine's rules (a visit takes all microbatches, nothing runs before
//! its input arrived): for the published plan, and for the plan that the search finds. `early` is
//! the search's plan if recompute may start before the gradient arrives, `rounds` if moreover a
//! visit takes only as many microbatches as there are devices, which uploads parameters more often.
//! All in percent. The argument `plans` prints the plans that were found, too.

use std::io::Write;

use roundpipe::timeline::EarlyWork;
use roundpipe::{AutoOptions, ExecutePlan, Lag, PlanKind, Schedule, Setting, simulate};

mod published;
use published::{DEVICES, MICROBATCHES, MODELS, Model};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut out = std::io::stdout().lock();
    let head = [
        "model",
        "schedule",
        "published",
        "repeated",
        "own rules",
        "own plan",
        "early",
        "rounds",
    ];
    let [model, schedule, rest @ ..] = head;
    write!(out, "{model:<12} {schedule:<18}")?;
    for word in rest {
        write!(out, " {word:>10}")?;
    }
    writeln!(out)?;
    for model in &MODELS {
        for (name, schedule, published) in schedules(model) {
            write!(out, "{:<12} {name:<18} {published:>10.2}", model.name)?;
            for bubble in bubbles(model, schedule)? {
                write!(out, " {:>10.2}", 100.0 * bubble)?;
            }
            writeln!(out)?;
        }
    }
    if std::env::args().any(|word| word == "plans") {
        print_plans(&mut out)?;
    }
    Ok(())
}

fn print_plans(out: &mut impl Write) -> Result<(), Box<dyn std::error::Error>> {
    for model in &MODELS {
        for asynchronous in [false, true] {
            let when = if asynchronous {
                "asynchronous"
            } else {
                "synchronous"
            };
            let plan = auto(model, asynchronous, &Setting::new(DEVICES, MICROBATCHES))?;
            writeln!(out, "{:<12} {when} plan: {plan}", model.name)?;
        }
    }
    Ok(())
}

fn schedules(model: &Model) -> [(&'static str, Schedule, f64); 6] {
    [
        ("RoundPipe", Schedule::RoundPipe, model.sync),
        (
            "RoundPipe async",
            Schedule::RoundPipeAsync,
            model.overlapped,
        ),
        ("GPipe", Schedule::GPipe, model.gpipe),
        ("1F1B", Schedule::OneForwardOneBackward, model.one_f_one_b),
        ("interleaved 1F1B", Schedule::Interleaved, model.interleaved),
        ("looped BFS", Schedule::LoopedBfs, model.looped_bfs),
    ]
}

/// The columns after `published`; other schedules than RoundPipe have only the first of them.
fn bubbles(model: &Model, schedule: Schedule) -> roundpipe::Result<Vec<f64>> {
    let costs = model.costs();
    let ours = Setting::new(DEVICES, MICROBATCHES);
    let theirs = Setting::published(DEVICES, MICROBATCHES);
    let fused = |schedule, plan: &ExecutePlan, setting: &Setting| {
        simulate(schedule, PlanKind::Fused, plan, &costs, setting)
    };
    Ok(match schedule {
        Schedule::RoundPipe | Schedule::RoundPipeAsync => {
            let asynchronous = schedule == Schedule::RoundPipeAsync;
            let repeated = fused(Schedule::RoundPipe, &model.plan(), &theirs)?;
            let repeated = if asynchronous {
                repeated.inner_bubble()
            } else {
                repeated.bubble
            };
            let mut bubbles = vec![repeated, fused(schedule, &model.plan(), &ours)?.bubble];
            let early = Setting {
                ahead: EarlyWork::Recompute,
                ..ours.clone()
            };
            let rounds = Setting {
                visit: DEVICES,
                ..early.clone()
            };
            for setting in [ours, early, rounds] {
                bubbles
                    .push(fused(schedule, &auto(model, asynchronous, &setting)?, &setting)?.bubble);
            }
            bubbles
        }
        _ => {
            let looped = matches!(schedule, Schedule::Interleaved | Schedule::LoopedBfs);
            let plan = if looped {
                model.looped()
            } else {
                model.single()
            };
            vec![simulate(schedule, PlanKind::Train, &plan, &costs, &ours)?.bubble]
        }
    })
}

fn auto(model: &Model, asynchronous: bool, setting: &Setting) -> roundpipe::Result<ExecutePlan> {
    let setting = setting.clone();
    let options = AutoOptions {
        setting,
        lag: if asynchronous { Lag::One } else { Lag::Zero },
        ..AutoOptions::new(DEVICES, MICROBATCHES)
    };
    let mut plans = ExecutePlan::auto(PlanKind::Fused, &[&model.costs()], &options)?;
    Ok(plans.swap_remove(0))
}
