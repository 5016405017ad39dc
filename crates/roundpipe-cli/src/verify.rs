//! `roundpipe verify`: proof on this machine that how a model is run changes no bit.

use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

use roundpipe_train::verify::{self, Comparison, Outcome, VerifyOptions, VerifyWatcher};

use crate::Failure;
use crate::terminal::one_line;

/// Prove on this machine that workers, plans, offloading and resuming change no bit
///
/// Trains small models, or the first layers of MODEL, in many ways and compares losses, gradients,
/// weights and moments. Takes a few minutes at most; status 1 when anything differs.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct VerifyCmd {
    /// A folder, hub id or preset [default: small models that are built in]
    model: Option<String>,
    /// Devices: cuda, cuda:0,cuda:1, cpu or cpu:2 [default: every GPU, or the processor]
    #[arg(long)]
    devices: Option<String>,
    /// Smaller models and batches: some seconds
    #[arg(long)]
    quick: bool,
    /// Print one JSON value instead of lines
    #[arg(long)]
    json: bool,
    /// A file to write the report to, as JSON
    #[arg(long)]
    report: Option<PathBuf>,
}

const EXAMPLES: &str = "Examples:
  roundpipe verify
  roundpipe verify Qwen/Qwen3-0.6B --report verify.json
  roundpipe verify --devices cuda:0,cuda:0 --quick";

impl VerifyCmd {
    pub fn run(self, out: &mut dyn Write, stop: &AtomicBool) -> Result<(), Failure> {
        let options = VerifyOptions {
            model: self.model,
            devices: self.devices,
            quick: self.quick,
        };
        let mut table = Table::new(out, !self.json);
        let report = verify::verify(&options, &mut table, stop);
        if stop.load(Ordering::Relaxed) {
            return Err(Failure::Interrupted(
                "interrupted; nothing was written".into(),
            ));
        }
        let report = report?;
        table.finish()?;
        if let Some(path) = &self.report {
            report.save(path)?;
        }
        if self.json {
            let text = serde_json::to_string_pretty(&report).map_err(anyhow::Error::from)?;
            writeln!(out, "{text}")?;
        }
        let differs = report
            .comparisons
            .iter()
            .filter(|comparison| comparison.outcome == Outcome::Differs)
            .count();
        let count = report.comparisons.len();
        if differs > 0 {
            let what = format!("{differs} of {count} claims do not hold on this machine");
            return Err(Failure::Coded(1, what));
        }
        if !self.json {
            let (values, seconds) = (grouped(report.values), report.seconds);
            writeln!(
                out,
                "every claim holds; {values} values were compared in {seconds:.0} s"
            )?;
        }
        Ok(())
    }
}

/// Lines as comparisons end.
struct Table<'o> {
    out: &'o mut dyn Write,
    shows: bool,
    colours: bool,
    failed: Option<std::io::Error>,
}

impl<'o> Table<'o> {
    fn new(out: &'o mut dyn Write, shows: bool) -> Self {
        let no_color = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        Self {
            out,
            shows,
            colours: std::io::stdout().is_terminal() && !no_color,
            failed: None,
        }
    }

    fn line(&mut self, line: &str) {
        if !self.shows {
            return;
        }
        let written = writeln!(self.out, "{line}").and_then(|()| self.out.flush());
        if let Err(error) = written {
            self.failed.get_or_insert(error);
        }
    }

    /// The first line that could not be written.
    fn finish(self) -> std::io::Result<()> {
        self.failed.map_or(Ok(()), Err)
    }

    fn painted(&self, outcome: Outcome) -> String {
        let (word, colour) = match outcome {
            Outcome::Holds => ("holds  ", 32),
            Outcome::Differs => ("differs", 31),
            Outcome::Skipped => ("skipped", 33),
        };
        if self.colours {
            format!("\u{1b}[{colour}m{word}\u{1b}[0m")
        } else {
            word.to_owned()
        }
    }
}

impl VerifyWatcher for Table<'_> {
    fn note(&mut self, line: &str) {
        let line = one_line(line).into_owned();
        self.line(&line);
    }

    fn compared(&mut self, comparison: &Comparison) {
        let Comparison {
            claim,
            subject,
            place,
            seconds,
            ..
        } = comparison;
        let outcome = self.painted(comparison.outcome);
        let result = result(comparison);
        let result = one_line(&result);
        let line =
            format!("{outcome}  {subject:8} {claim:37} {place:10} {seconds:6.1} s  {result}");
        self.line(&line);
    }
}

/// What was found, in one line.
fn result(comparison: &Comparison) -> String {
    let counted = comparison.counted.iter();
    let kinds = counted.map(|counted| {
        let values = grouped(counted.values);
        format!("{values} {}", counted.kind.name())
    });
    let kinds: Vec<String> = kinds.collect();
    let note = comparison.note.iter().map(|note| format!("; {note}"));
    let note: String = note.collect();
    match (comparison.largest, comparison.bound) {
        (Some(largest), Some(bound)) => {
            format!(
                "{largest:.1e} of at most {bound:.1e} {}, over {}",
                note.trim_start_matches("; "),
                kinds.join(", ")
            )
        }
        _ if kinds.is_empty() => note.trim_start_matches("; ").to_owned(),
        _ => {
            let (differ, values) = (grouped(comparison.differ()), grouped(comparison.values()));
            format!("{differ} of {values} differ ({}){note}", kinds.join(", "))
        }
    }
}

/// A number with commas between thousands.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::grouped;

    #[test]
    fn thousands_are_grouped() {
        for (number, text) in [
            (0, "0"),
            (999, "999"),
            (1000, "1,000"),
            (1_234_567, "1,234,567"),
        ] {
            assert_eq!(grouped(number), text);
        }
    }
}
