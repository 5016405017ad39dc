//! `roundpipe eval`: losses of examples and accuracy on tasks.

use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, ensure};
use clap::ValueEnum;
use roundpipe_models::Generator;
use roundpipe_models::tokenizer::Tokenizer;
use roundpipe_train::eval::{self, Compare, Detail, Estimate, EvalOptions, Finding, Scorer};
use serde_json::{Value, json};

use crate::Failure;
use crate::open::{self, Found};
use crate::place::Place;

/// The longest row unless the model's is shorter or --seq says otherwise.
const SEQ: usize = 2048;

/// Measure a model: loss and perplexity of examples, accuracy on tasks
///
/// Files of examples are those that `train` reads. A file of tasks has one JSON object per line:
/// `question`, `choices` and `answer` (the likeliest choice counts), or `question` and `answer`
/// (the model writes, and the texts are compared). Figures come with their standard error.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct EvalCmd {
    /// A folder, a run's folder, or a hub id
    model: String,
    /// Files of examples or tasks
    #[arg(required = true)]
    data: Vec<String>,
    /// Rows of each file at most
    #[arg(long)]
    limit: Option<u64>,
    /// Tokens of a row at most; longer texts are split, conversations cut [default: 2048]
    #[arg(long)]
    seq: Option<usize>,
    /// Prompts as they are, without the chat template
    #[arg(long)]
    raw: bool,
    /// Tokens of a written answer at most
    #[arg(long, default_value_t = 128)]
    max_tokens: usize,
    /// How written answers are compared, where a row has no `match`
    #[arg(long = "match", value_enum, default_value_t = MatchArg::Exact)]
    compare: MatchArg,
    /// Questions that are answered together
    #[arg(long, default_value_t = 16)]
    batch: usize,
    /// A folder with adapters to apply
    #[arg(long)]
    adapter: Option<PathBuf>,
    /// Type of weights and activations [default: the model's]
    #[arg(long, value_enum)]
    dtype: Option<open::TypeArg>,
    /// Weights of linear layers in 4 or 8 bits [default: as a run trained beside them]
    #[arg(long, value_enum)]
    quantize: Option<open::QuantizeArg>,
    /// Write one line of JSON per row into this file
    #[arg(long)]
    details: Option<PathBuf>,
    /// Print JSON instead of a table
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    place: Place,
}

const EXAMPLES: &str = "Examples:
  roundpipe eval runs/mine held-out.jsonl
  roundpipe eval Qwen/Qwen3-0.6B arc.jsonl gsm8k.jsonl --match number --limit 200";

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum MatchArg {
    /// Equal, but for case, spaces and a full stop
    Exact,
    /// The right answer stands somewhere in it
    Contains,
    /// Its last number is the right one
    Number,
}

impl From<MatchArg> for Compare {
    fn from(arg: MatchArg) -> Self {
        match arg {
            MatchArg::Exact => Self::Exact,
            MatchArg::Contains => Self::Contains,
            MatchArg::Number => Self::Number,
        }
    }
}

impl EvalCmd {
    pub fn run(self, out: &mut dyn Write) -> Result<(), Failure> {
        let usage = |what: &str| Err(Failure::usage(what.to_owned()));
        if self.limit == Some(0) || self.seq == Some(0) || self.batch == 0 || self.max_tokens == 0 {
            return usage("--limit, --seq, --batch and --max-tokens must be at least 1");
        }
        let devices = self.place.open(&mut std::io::stderr())?;
        let found = Found::find(&self.model, self.adapter.as_deref(), self.quantize)?;
        let opened = found.open(self.dtype.map(Into::into), &self.place)?;
        let mut model = opened.model;
        if let Some(adapter) = &found.adapter {
            model.load_adapter(adapter).map_err(anyhow::Error::from)?;
        }
        let tokenizer = Tokenizer::open(&opened.path).map_err(anyhow::Error::from)?;
        let most = model.config.max_positions;
        let seq = self.seq.unwrap_or(SEQ.min(most));
        if seq > most {
            return usage(&format!(
                "--seq {seq}: the model's longest sequence is {most}"
            ));
        }
        let (examples, tasks): (Vec<_>, Vec<_>) = self
            .data
            .iter()
            .partition(|name| !eval::is_task_file(Path::new(name)));
        let encoder = eval::encoder(tokenizer)?;
        let scorer = Scorer::new(&model, &devices.workers, &self.place.ring(), seq)?;
        let mut generator: Option<Arc<Generator>> = None;
        let mut writer = || -> roundpipe_train::Result<Arc<Generator>> {
            if let Some(generator) = &generator {
                return Ok(generator.clone());
            }
            let made = Arc::new(Generator::new(
                &model,
                &devices.workers,
                &self.place.ring(),
            )?);
            Ok(generator.insert(made).clone())
        };
        let options = EvalOptions {
            limit: self.limit,
            raw: self.raw,
            max_tokens: self.max_tokens,
            compare: self.compare.into(),
            batch: self.batch,
        };
        let mut details = DetailFile::create(self.details.as_deref())?;
        let mut found: Vec<(String, Finding)> = Vec::new();
        for name in examples {
            let finding = eval::examples(&scorer, &encoder, name, &options, &mut |row| {
                details.push(row)
            })?;
            found.push((name.clone(), finding));
        }
        for name in tasks {
            let path = Path::new(name);
            let findings =
                eval::tasks(&scorer, &encoder, &mut writer, path, &options, &mut |row| {
                    details.push(row)
                })?;
            found.extend(findings.into_iter().map(|finding| (name.clone(), finding)));
        }
        details.finish()?;
        if self.json {
            let results: Vec<Value> = found.iter().map(|(data, f)| as_json(data, f)).collect();
            writeln!(
                out,
                "{}",
                json!({ "model": self.model, "seq": seq, "results": results })
            )?;
        } else {
            found
                .iter()
                .try_for_each(|(data, finding)| tell(out, data, finding))?;
        }
        Ok(out.flush()?)
    }
}

fn as_json(data: &str, finding: &Finding) -> Value {
    let mut value = json!({ "data": data });
    if let (Some(value), Ok(Value::Object(found))) =
        (value.as_object_mut(), serde_json::to_value(finding))
    {
        value.extend(found);
    }
    value
}

fn tell(out: &mut dyn Write, data: &str, finding: &Finding) -> std::io::Result<()> {
    let row = |out: &mut dyn Write, name: &str, value: String| writeln!(out, "  {name:<28}{value}");
    match finding {
        Finding::Examples {
            rows,
            too_long,
            tokens,
            loss,
            perplexity,
            token_accuracy,
        } => {
            writeln!(out, "{data}: {rows} rows, {tokens} learned tokens")?;
            if *too_long > 0 {
                row(out, "longer than a row", format!("{too_long}"))?;
            }
            row(out, "loss", number(loss))?;
            row(out, "perplexity", number(perplexity))?;
            row(out, "token accuracy", share(token_accuracy))
        }
        Finding::Choices {
            rows,
            accuracy,
            accuracy_by_length,
        } => {
            writeln!(out, "{data}: {rows} questions with choices")?;
            row(out, "accuracy", share(accuracy))?;
            row(out, "accuracy, by length", share(accuracy_by_length))
        }
        Finding::Answers { rows, accuracy } => {
            writeln!(out, "{data}: {rows} questions with written answers")?;
            row(out, "accuracy", share(accuracy))
        }
    }
}

fn number(estimate: &Estimate) -> String {
    match estimate.error {
        Some(error) => format!("{:.4} ± {error:.4}", estimate.value),
        None => format!("{:.4}", estimate.value),
    }
}

fn share(estimate: &Estimate) -> String {
    let percent = 100.0 * estimate.value;
    match estimate.error {
        Some(error) => format!("{percent:.1}% ± {:.1}", 100.0 * error),
        None => format!("{percent:.1}%"),
    }
}

/// A file with one line per row, where it is asked for.
struct DetailFile(Option<(PathBuf, BufWriter<std::fs::File>)>);

impl DetailFile {
    fn create(path: Option<&Path>) -> anyhow::Result<Self> {
        let Some(path) = path else {
            return Ok(Self(None));
        };
        ensure!(
            !path.exists(),
            "--details {}: is there already; name another file",
            path.display()
        );
        let file =
            std::fs::File::create(path).with_context(|| format!("--details {}", path.display()))?;
        Ok(Self(Some((path.to_path_buf(), BufWriter::new(file)))))
    }

    fn push(&mut self, detail: &Detail) -> roundpipe_train::Result<()> {
        let Some((path, file)) = &mut self.0 else {
            return Ok(());
        };
        serde_json::to_writer(&mut *file, detail)
            .map_err(std::io::Error::from)
            .and_then(|()| file.write_all(b"\n"))
            .map_err(|e| unwritten(path, &e))
    }

    fn finish(self) -> roundpipe_train::Result<()> {
        match self.0 {
            None => Ok(()),
            Some((path, mut file)) => file.flush().map_err(|e| unwritten(&path, &e)),
        }
    }
}

fn unwritten(path: &Path, e: &std::io::Error) -> roundpipe_train::Error {
    roundpipe_train::Error::Failed(format!("--details {}: {e}", path.display()))
}
