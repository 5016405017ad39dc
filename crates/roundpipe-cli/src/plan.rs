//! `roundpipe plan`: memory, stages, speed and limits of a run, before it begins.

use std::fmt::Write as _;
use std::io::Write;
use std::path::PathBuf;

use roundpipe::Bytes;
use roundpipe_train::predict::{
    self, Described, Machine, MemoryUse, Prediction, Subject, Way, picture, predict, ways_to_fit,
};
use roundpipe_train::settings::Settings;

use crate::Failure;
use crate::train::RunArgs;

/// Does not fit.
const DOES_NOT_FIT: u8 = 3;
/// Columns of the picture of a step: with the card's name it fits a terminal of 90.
const COLUMNS: usize = 78;

/// Say what a run takes before it begins: memory, tokens/s, what limits it
///
/// For this machine, or for one that is described: `--gpus 8xrtx4090 --host-memory 256GiB`. MODEL
/// may also be the bare name of a preset. Data are optional; with them, rows are looked at as
/// `train` does. Nothing is trained and no weight is read. What does not fit ends with status 3 and
/// up to three ways to make it fit, each of them checked.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct PlanCmd {
    #[command(flatten)]
    run: RunArgs,
    #[command(flatten)]
    cards: Cards,
    /// Write the timeline of the steps for Perfetto
    #[arg(long)]
    trace: Option<PathBuf>,
    /// One JSON value instead of text
    #[arg(long)]
    json: bool,
}

/// The machine that is planned for.
#[derive(Debug, Default, clap::Args)]
pub struct Cards {
    /// Cards instead of this machine's, for example 8xrtx4090 or h200
    #[arg(long)]
    pub gpus: Option<String>,
    /// Bandwidth of the host's memory in GB/s, read and written [default: measured or 129]
    #[arg(long, value_name = "GB/S", value_parser = rate)]
    pub host_bandwidth: Option<f64>,
}

/// A rate in GB/s.
pub fn rate(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(rate) if rate.is_finite() && rate > 0.0 && rate <= 1e6 => Ok(rate),
        _ => Err("must be GB/s, above 0".to_owned()),
    }
}

const EXAMPLES: &str = "Examples:
  roundpipe plan Qwen/Qwen3-0.6B chats.jsonl          this machine
  roundpipe plan qwen3-235b-a22b --lora --gpus 8xrtx4090 --host-memory 800GiB
  roundpipe plan llama-3.1-8b --gpus 2xrtx3090 batch=32 seq=4096 grain=layer --json";

impl PlanCmd {
    pub fn run(self, out: &mut dyn Write) -> Result<(), Failure> {
        let given = self.run.given()?;
        given.check()?;
        let mut settings = Settings::default();
        given.apply(&mut settings);
        let subject = Subject::open(&settings)?;
        let described = self.cards.described(None);
        let run = settings.out.clone().unwrap_or_else(|| "runs".into());
        let machine = Machine::find(
            &described,
            settings.devices.as_deref(),
            settings.host_memory,
            run.as_ref(),
        )?;
        let predicted = match predict(&subject, &settings, &machine) {
            Err(roundpipe_train::Error::DoesNotFit(why)) => Err(why),
            other => Ok(other?),
        };
        let fits = predicted.as_ref().is_ok_and(|p| p.lacks.is_empty());
        let ways = if fits {
            Vec::new()
        } else {
            ways_to_fit(&subject, &resolved(&settings, &predicted), &machine)?
        };
        self.tell(out, &predicted, &ways)?;
        if let (Some(path), Ok(prediction)) = (&self.trace, &predicted) {
            predict::trace(&prediction.timeline, path)?;
        }
        match predicted {
            Ok(prediction) if fits => {
                drop(prediction);
                Ok(())
            }
            Ok(prediction) => Err(does_not_fit(&prediction.lacks.join("; "))),
            Err(why) => Err(does_not_fit(&why)),
        }
    }

    fn tell(
        &self,
        out: &mut dyn Write,
        predicted: &Result<Prediction, String>,
        ways: &[Way],
    ) -> Result<(), Failure> {
        if self.json {
            writeln!(out, "{}", as_json(predicted, ways))?;
            return Ok(out.flush()?);
        }
        let mut text = String::new();
        if let Ok(prediction) = predicted {
            text.push_str(&report(prediction));
        }
        let fits = predicted.as_ref().is_ok_and(|p| p.lacks.is_empty());
        if !fits {
            text.push_str(&ways_in_words(ways));
        }
        out.write_all(text.as_bytes())?;
        Ok(out.flush()?)
    }
}

impl Cards {
    /// What is said of the machine; `pcie` in GB/s.
    pub fn described(&self, pcie: Option<f64>) -> Described {
        Described {
            gpus: self.gpus.clone(),
            pcie: pcie.map(|rate| 1e9 * rate),
            host_bandwidth: self.host_bandwidth.map(|rate| 1e9 * rate),
        }
    }
}

/// The settings that did not fit, with the sizes that were chosen for them: changes are relative to
/// those.
fn resolved(settings: &Settings, predicted: &Result<Prediction, String>) -> Settings {
    let mut settings = settings.clone();
    if let Ok(prediction) = predicted {
        settings.batch.get_or_insert(prediction.batch);
        settings.seq.get_or_insert(prediction.seq);
    }
    settings
}

fn does_not_fit(why: &str) -> Failure {
    Failure::Coded(DOES_NOT_FIT, format!("does not fit: {why}"))
}

fn as_json(predicted: &Result<Prediction, String>, ways: &[Way]) -> serde_json::Value {
    let fits = predicted.as_ref().is_ok_and(|p| p.lacks.is_empty());
    let why = predicted.as_ref().err();
    serde_json::json!({
        "fits": fits,
        "why": why,
        "prediction": predicted.as_ref().ok(),
        "ways_to_fit": ways,
    })
}

fn ways_in_words(ways: &[Way]) -> String {
    if ways.is_empty() {
        return "\nno change of settings was found that makes it fit; it needs a smaller model or another \
                machine\n"
            .to_owned();
    }
    let mut text = "\nto make it fit, add one of these (each was planned):\n".to_owned();
    for way in ways {
        let _ = writeln!(
            text,
            "  {:<30} {:>8.0} tokens/s, {} of each GPU, {} of the host; {}",
            way.arguments,
            way.tokens_per_s,
            Bytes(way.gpu_peak_bytes),
            Bytes(way.host_peak_bytes),
            way.costs
        );
    }
    text
}

/// Everything, for people.
fn report(p: &Prediction) -> String {
    let mut text = String::new();
    let _ = writeln!(
        text,
        "{}: {} parameters, {} of them trained ({}), {}, {}",
        p.model, p.parameters, p.trained_parameters, p.method, p.dtype, p.optimizer
    );
    let _ = writeln!(
        text,
        "{} steps of {} rows of {} tokens in {} microbatches; lag {}, grain {}",
        p.steps, p.batch, p.seq, p.microbatches, p.lag, p.grain
    );
    let _ = writeln!(text, "on {}", p.machine);
    p.sources.iter().for_each(|line| {
        let _ = writeln!(text, "  {line}");
    });
    text.push('\n');
    if let Some(gpu) = &p.gpu {
        memory(&mut text, "each GPU", gpu);
        let context = Bytes(p.gpu_context_bytes).to_string();
        let _ = writeln!(
            text,
            "  {:<38} {context:>12}  (beside it)",
            "context and libraries"
        );
    }
    memory(&mut text, "host", &p.host);
    memory(&mut text, "disk", &p.disk);
    let _ = writeln!(
        text,
        "\nstages     {} forward, {} backward: {}",
        p.stages.forward.len(),
        p.stages.backward.len(),
        p.plan
    );
    let speed = &p.speed;
    let _ = writeln!(
        text,
        "speed      {:.0} tokens/s, {} a step, bubble {:.1}% (predicted)",
        speed.tokens_per_s,
        duration(speed.step_s),
        100.0 * speed.bubble
    );
    let _ = writeln!(
        text,
        "time       {} for {} steps{}",
        duration(p.run_s),
        p.steps,
        match p.validation_s {
            s if s > 0.0 => format!(", {} of it validation", duration(s)),
            _ => String::new(),
        }
    );
    let busy: Vec<String> = speed
        .busy
        .iter()
        .map(|busy| format!("{} {:.0}%", busy.resource.name(), 100.0 * busy.share))
        .collect();
    let _ = writeln!(
        text,
        "limited by {}; busy: {}",
        speed.limited_by.name(),
        busy.join(", ")
    );
    for note in &p.notes {
        let _ = writeln!(text, "note       {note}");
    }
    if p.timeline.devices > 1 {
        let _ = writeln!(
            text,
            "\none step (- forward, + forward and back, = backward; numbers are stages)"
        );
        for line in picture(&p.timeline, COLUMNS) {
            let _ = writeln!(text, "{line}");
        }
    }
    text
}

fn memory(text: &mut String, name: &str, used: &MemoryUse) {
    let peak = Bytes(used.peak_bytes).to_string();
    let limit = used.limit_bytes;
    let limit = limit.map_or(String::new(), |limit| format!("  of {}", Bytes(limit)));
    let _ = writeln!(text, "{name:<40} {peak:>12}{limit}");
    for part in &used.parts {
        let bytes = Bytes(part.bytes).to_string();
        let _ = writeln!(text, "  {:<38} {bytes:>12}", part.name);
    }
}

/// Seconds in words.
fn duration(seconds: f64) -> String {
    match seconds {
        s if s < 1.0 => format!("{:.0} ms", 1e3 * s),
        s if s < 90.0 => format!("{s:.2} s"),
        s if s < 5400.0 => format!("{:.0} min", s / 60.0),
        s if s < 172_800.0 => format!("{:.1} h", s / 3600.0),
        s => format!("{:.1} days", s / 86_400.0),
    }
}
