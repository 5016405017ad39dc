//! `roundpipe data show`: what a run would learn from files, before there is one.

use std::io::{IsTerminal, Write};
use std::path::PathBuf;

use roundpipe_train::Given;
use roundpipe_train::data::{Found, Histogram, Unit};
use roundpipe_train::show::{DataShown, show};
use serde_json::{Value, json};

use crate::Failure;
use crate::screen::{Marks, row_text};
use crate::terminal::one_line;
use crate::train::is_setting;

/// Characters of the longest bar.
const BAR: f64 = 40.0;

/// Look at files of examples
#[derive(Debug, clap::Args)]
pub struct DataCmd {
    #[command(subcommand)]
    command: DataCommand,
}

#[derive(Debug, clap::Subcommand)]
enum DataCommand {
    Show(ShowCmd),
}

/// Show what is in files of examples, and what training would make of them
///
/// Says what was detected, counts rows, draws their lengths, names the rows that would be cut, left
/// out or refused, and prints the first ones with the learned tokens marked. With --model, lengths
/// are tokens and rows go through the model's chat template; without, lengths are characters.
/// Settings of `train` (seq, template, too_long, learn, format, …) are given as key=value.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
struct ShowCmd {
    /// DATA… key=value…: files or folders, and settings of `train` by name
    #[arg(required = true)]
    args: Vec<String>,
    /// A folder or hub id whose tokenizer and chat template are used
    #[arg(long)]
    model: Option<String>,
    /// Rows to print
    #[arg(long, default_value_t = 2)]
    rows: usize,
    /// A file of settings; arguments win
    #[arg(long)]
    config: Option<PathBuf>,
    /// Print one JSON value
    #[arg(long)]
    json: bool,
}

const EXAMPLES: &str = "Examples:
  roundpipe data show chats.jsonl
  roundpipe data show chats.jsonl books --model Qwen/Qwen3-0.6B seq=4096
  roundpipe data show pairs.jsonl --model ./model --json";

/// The most rows that can be printed.
const MOST_ROWS: usize = 1000;

impl DataCmd {
    pub fn run(self, out: &mut dyn Write) -> Result<(), Failure> {
        let DataCommand::Show(show) = self.command;
        show.run(out)
    }
}

impl ShowCmd {
    fn run(self, out: &mut dyn Write) -> Result<(), Failure> {
        if self.rows > MOST_ROWS {
            let what = format!(
                "--rows {} is more than {MOST_ROWS}; choose fewer",
                self.rows
            );
            return Err(Failure::usage(what));
        }
        let found = show(&self.given()?, self.rows)?;
        if self.json {
            writeln!(out, "{}", as_json(&found))?;
            return Ok(());
        }
        let marks = Marks::new(std::io::stdout().is_terminal());
        for line in lines(&found) {
            writeln!(out, "{}", one_line(&line))?;
        }
        let rows = found.shown();
        if rows.is_empty() {
            return Ok(());
        }
        match found.survey.unit {
            Unit::Tokens => writeln!(out, "{}", marks.heading())?,
            Unit::Characters => writeln!(
                out,
                "rows as they stand in the files (--model shows them as they are trained):"
            )?,
        }
        for row in &rows {
            writeln!(out, "{}", row_text(row, marks))?;
        }
        Ok(())
    }

    fn given(&self) -> Result<Given, Failure> {
        let file = match &self.config {
            Some(path) => Given::file(path)?,
            None => Given::default(),
        };
        let mut given = Given::default();
        let mut data = Vec::new();
        for argument in &self.args {
            if argument.is_empty() || argument.starts_with('=') {
                let what = format!(
                    "`{argument}` is neither a file nor key=value; correct or leave it out"
                );
                return Err(Failure::usage(what));
            }
            if is_setting(argument) {
                given.argument(argument)?;
            } else {
                data.push(argument.clone());
            }
        }
        if !data.is_empty() {
            given.put("data", data, "DATA".into())?;
        }
        if let Some(model) = &self.model {
            given.put("model", model.as_str(), "--model".into())?;
        }
        Ok(file.under(given))
    }
}

/// All that is said, but for the rows.
fn lines(found: &DataShown) -> Vec<String> {
    let survey = &found.survey;
    let mut lines: Vec<String> = found.files.iter().map(ToString::to_string).collect();
    let kept = found.validation_rows;
    lines.push(format!(
        "{} rows: {} train, {kept} validate",
        survey.rows,
        survey.rows - kept
    ));
    if found.is_preference {
        lines.push(
            "pairs of answers: `roundpipe train … --method dpo` or orpo learns from them".into(),
        );
    }
    if survey.is_sample() {
        lines.push(format!(
            "{} rows were read, and lengths are those of {} of them, evenly spread",
            survey.read, survey.measured
        ));
    }
    lines.extend(length_lines(found));
    lines.extend(fates(found));
    lines
}

fn unit_name(unit: Unit) -> &'static str {
    match unit {
        Unit::Tokens => "tokens",
        Unit::Characters => "characters",
    }
}

/// Lengths in numbers and as bars.
fn length_lines(found: &DataShown) -> Vec<String> {
    let survey = &found.survey;
    let lengths: &Histogram = &survey.lengths;
    let Some((least, most)) = lengths.range() else {
        return Vec::new();
    };
    let unit = unit_name(survey.unit);
    let mut lines = vec![format!(
        "{unit} of a row: {least} to {most}, mean {:.0}, median {}, 90% up to {}, 99% up to {}",
        lengths.mean(),
        lengths.quantile(0.5),
        lengths.quantile(0.9),
        lengths.quantile(0.99),
    )];
    let powers = lengths.powers();
    let largest = powers.iter().map(|(.., count)| *count).max().unwrap_or(1);
    let width = most.to_string().len();
    for (first, last, count) in powers {
        let bar = (BAR * count as f64 / largest.max(1) as f64).ceil() as usize;
        let last = last.min(most);
        lines.push(format!(
            "  {first:>width$}-{last:<width$} {:<40} {count}",
            "#".repeat(bar)
        ));
    }
    if survey.unit == Unit::Tokens {
        let share = 100.0 * survey.learned as f64 / survey.total.max(1) as f64;
        lines.push(format!(
            "{} tokens, of which {} are learned ({share:.0}%)",
            survey.total, survey.learned
        ));
    }
    lines
}

/// Rows that are not trained as they are.
fn fates(found: &DataShown) -> Vec<String> {
    let survey = &found.survey;
    let mut lines = Vec::new();
    let measured = survey.measured;
    if let Some(seq) = found.seq {
        let chosen = if found.seq_is_given {
            "as given"
        } else {
            "as training would choose"
        };
        let long = survey.cut.count + survey.split.count + survey.too_long.count;
        lines.push(format!(
            "seq {seq}, {chosen}: {long} of {measured} rows have more tokens"
        ));
    }
    let kinds: [(&Found, &str); 5] = [
        (&survey.cut, "would be cut"),
        (&survey.split, "would be split"),
        (&survey.too_long, "would be left out as too long"),
        (
            &survey.empty,
            "would be left out: nothing of them is learned",
        ),
        (&survey.bad, "cannot be used"),
    ];
    for (rows, what) in kinds {
        if rows.count == 0 {
            continue;
        }
        lines.push(format!("{} rows {what}:", rows.count));
        for row in &rows.first {
            let path = row.path.display();
            lines.push(format!("  {path}: row {}: {}", row.row, row.what));
        }
        if rows.count > rows.first.len() as u64 {
            lines.push("  …".into());
        }
    }
    lines
}

fn as_json(found: &DataShown) -> Value {
    let survey = &found.survey;
    let files = found.files.iter().map(|file| {
        json!({
            "path": file.path.display().to_string(), "kind": file.kind.to_string(),
            "format": file.format.to_string(), "rows": file.rows, "bytes": file.bytes,
            "compressed": file.compression.is_some(), "weight": file.weight,
        })
    });
    let lengths = &survey.lengths;
    let (least, most) = lengths.range().unwrap_or((0, 0));
    let histogram = lengths
        .powers()
        .into_iter()
        .map(|(first, last, rows)| json!({ "first": first, "last": last, "rows": rows }));
    let rows = found.survey.shown.iter().map(|row| {
        let sides = row.sides.iter().map(|side| {
            let pieces = side.iter();
            let piece =
                |(text, learned): &(String, bool)| json!({ "text": text, "learned": learned });
            pieces.map(piece).collect::<Value>()
        });
        json!({
            "path": row.path.display().to_string(), "row": row.row,
            "documents": sides.collect::<Value>(),
        })
    });
    json!({
        "files": files.collect::<Value>(),
        "rows": survey.rows, "validation_rows": found.validation_rows,
        "preference": found.is_preference,
        "rows_read": survey.read, "rows_measured": survey.measured,
        "unit": unit_name(survey.unit), "seq": found.seq,
        "lengths": {
            "least": least, "most": most, "mean": lengths.mean(), "median": lengths.quantile(0.5),
            "p90": lengths.quantile(0.9), "p99": lengths.quantile(0.99),
            "histogram": histogram.collect::<Value>(),
        },
        "total": survey.total, "learned": survey.learned,
        "cut": named(&survey.cut), "split": named(&survey.split),
        "too_long": named(&survey.too_long), "empty": named(&survey.empty),
        "bad": named(&survey.bad),
        "shown": rows.collect::<Value>(),
    })
}

fn named(rows: &Found) -> Value {
    let first = rows.first.iter().map(
        |row| json!({ "path": row.path.display().to_string(), "row": row.row, "what": row.what }),
    );
    json!({ "rows": rows.count, "first": first.collect::<Value>() })
}
