//! `roundpipe simulate`: schedules beside each other, and what other machines and batches would
//! change.

use std::io::Write;

use roundpipe_train::predict::{Machine, Subject};
use roundpipe_train::schedules::{self, Comparison, PublishedRow, SCHEDULES};
use roundpipe_train::settings::Settings;

use crate::Failure;
use crate::plan::{Cards, rate};
use crate::train::RunArgs;

/// Lines of the table: each plans a model anew.
const MOST_LINES: usize = 256;

/// Compare schedules for a model and cards, RoundPipe among them
///
/// RoundPipe, GPipe, 1F1B, interleaved 1F1B and looped BFS, all of it simulated from the times that
/// layers are expected to take on the cards. Lists such
/// as `--microbatches 8,16,32` give a line each. The other schedules are played as if the weights
/// fitted on their cards. Without a model, prints the published bubbles of RoundPipe beside ours.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct SimulateCmd {
    /// MODEL key=value…: a preset, folder or hub id, and settings of train such as seq=4096
    args: Vec<String>,
    /// Train low-rank adapters
    #[arg(long)]
    lora: bool,
    #[command(flatten)]
    cards: Cards,
    /// Other numbers of cards to try, for example 1,2,4,8
    #[arg(long, value_delimiter = ',', value_name = "LIST")]
    count: Vec<usize>,
    /// Numbers of microbatches to try
    #[arg(long, value_delimiter = ',', value_name = "LIST")]
    microbatches: Vec<usize>,
    /// Rates between host and each card to try, in GB/s one way
    #[arg(long, value_delimiter = ',', value_name = "LIST", value_parser = rate)]
    pcie: Vec<f64>,
    /// The published bubbles beside ours
    #[arg(long)]
    published: bool,
    /// One JSON value instead of text
    #[arg(long)]
    json: bool,
}

const EXAMPLES: &str = "Examples:
  roundpipe simulate --published
  roundpipe simulate qwen3-8b --gpus 8xrtx4090 batch=64 seq=2048 --microbatches 8,16,32
  roundpipe simulate qwen3-1.7b --gpus 8xrtx4090 batch=64 --count 1,2,4,8 --pcie 12,25";

impl SimulateCmd {
    pub fn run(self, out: &mut dyn Write) -> Result<(), Failure> {
        if self.published || self.args.is_empty() {
            let rows = schedules::published()?;
            return self.tell_published(out, &rows);
        }
        let given = RunArgs::of_model(self.args.clone(), self.lora).given()?;
        given.check()?;
        let mut settings = Settings::default();
        given.apply(&mut settings);
        let subject = Subject::open(&settings)?;
        let described = self.cards.described(None);
        let found = Machine::find(
            &described,
            settings.devices.as_deref(),
            settings.host_memory,
            "runs".as_ref(),
        )?;
        let comparisons = self.compare(&subject, &settings, &found)?;
        self.tell(out, &comparisons)
    }

    /// One line for each card count, rate and number of microbatches.
    fn compare(
        &self,
        subject: &Subject,
        settings: &Settings,
        found: &Machine,
    ) -> Result<Vec<Comparison>, Failure> {
        let counts = or_one(&self.count, found.workers);
        let rates = or_one(&self.pcie, found.upload / 1e9);
        let microbatches: Vec<Option<usize>> = match self.microbatches.as_slice() {
            [] => vec![settings.microbatches],
            list => list.iter().copied().map(Some).collect(),
        };
        let is_wrong = |count: &usize| !(1..=64).contains(count);
        if counts.iter().any(is_wrong) || microbatches.contains(&Some(0)) {
            let what = "--count is from 1 to 64 and --microbatches at least 1";
            return Err(Failure::usage(what.into()));
        }
        if counts.len() * rates.len() * microbatches.len() > MOST_LINES {
            let what = format!("the lists give more than {MOST_LINES} lines; shorten them");
            return Err(Failure::usage(what));
        }
        let mut comparisons = Vec::new();
        for count in counts {
            for rate in &rates {
                for parts in &microbatches {
                    let mut machine = found.clone();
                    machine.workers = count;
                    if !self.pcie.is_empty() {
                        machine.set_link(1e9 * rate, 1e9 * rate, 1.7e9 * rate);
                    }
                    let mut settings = settings.clone();
                    settings.microbatches = *parts;
                    comparisons.push(schedules::compare(subject, &settings, &machine)?);
                }
            }
        }
        Ok(comparisons)
    }

    fn tell(&self, out: &mut dyn Write, comparisons: &[Comparison]) -> Result<(), Failure> {
        if self.json {
            let value = serde_json::json!({ "simulated": true, "lines": comparisons });
            writeln!(out, "{value}")?;
            return Ok(out.flush()?);
        }
        writeln!(out, "simulated: tokens/s, and the bubble in percent")?;
        write!(out, "{:>5} {:>6} {:>12}", "cards", "PCIe", "microbatches")?;
        for (name, _) in SCHEDULES {
            write!(out, " {name:>17}")?;
        }
        writeln!(out)?;
        for line in comparisons {
            let pcie = line.pcie_bytes_per_s / 1e9;
            write!(
                out,
                "{:>5} {pcie:>6.0} {:>12}",
                line.cards, line.microbatches
            )?;
            if let Some(why) = &line.refused {
                writeln!(out, "  does not fit: {why}")?;
                continue;
            }
            for (name, _) in SCHEDULES {
                let mut of = line.outcomes.iter();
                let cell = match of.find(|outcome| outcome.schedule == name) {
                    Some(found) => {
                        format!("{:.0} {:5.1}", found.tokens_per_s, 100.0 * found.bubble)
                    }
                    None => "-".to_owned(),
                };
                write!(out, " {cell:>17}")?;
            }
            writeln!(out)?;
        }
        Ok(out.flush()?)
    }

    fn tell_published(&self, out: &mut dyn Write, rows: &[PublishedRow]) -> Result<(), Failure> {
        if self.json {
            writeln!(out, "{}", serde_json::json!({ "published": rows }))?;
            return Ok(out.flush()?);
        }
        writeln!(
            out,
            "bubbles in percent, 8 cards and 16 microbatches, from published times of layers on RTX 4090\n\
             published: the authors' figure; repeated: ours by their rules and plan; own rules: the engine's,\n\
             their plan; own plan: the engine's rules and search; early: recompute may start before the\n\
             gradient arrives; rounds: moreover a visit takes only as many microbatches as there are cards\n"
        )?;
        write!(out, "{:<12} {:<17}", "model", "schedule")?;
        for head in [
            "published",
            "repeated",
            "own rules",
            "own plan",
            "early",
            "rounds",
        ] {
            write!(out, " {head:>9}")?;
        }
        writeln!(out)?;
        for row in rows {
            write!(out, "{:<12} {:<17}", row.model, row.schedule)?;
            write!(out, " {:>9.2} {:>9.2}", row.published, row.repeated)?;
            for figure in [row.own_rules, row.own_plan, row.early, row.rounds] {
                let cell = figure.map_or(String::new(), |figure| format!("{figure:.2}"));
                write!(out, " {cell:>9}")?;
            }
            writeln!(out)?;
        }
        Ok(out.flush()?)
    }
}

fn or_one<T: Clone>(list: &[T], one: T) -> Vec<T> {
    if list.is_empty() {
        vec![one]
    } else {
        list.to_vec()
    }
}
