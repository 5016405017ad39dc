//! `roundpipe train`: from a model and files of examples to a fine-tuned model.

use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use roundpipe_train::settings::Settings;
use roundpipe_train::{Error, Given, Outcome, Request};

use crate::Failure;
use crate::screen::Screen;

/// Fine-tune a model on your examples, fully or with LoRA
///
/// Files may be JSON lines, JSON, CSV, parquet or text, plain, gzip or zstd, with conversations
/// (messages, ShareGPT), Alpaca rows, prompts with completions, texts, or pairs of answers of which
/// one is preferred. Everything else has a default. Interrupted, the same command goes on where it was; the result is in RUN/model.
#[derive(Debug, Default, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct TrainCmd {
    #[command(flatten)]
    run: RunArgs,
    /// Print all settings with what they mean, and train nothing
    #[arg(long)]
    print_config: bool,
    /// Serve a live page on this machine
    #[arg(long)]
    watch: bool,
    /// The page's port [default: one that is free]
    #[arg(long, requires = "watch")]
    port: Option<u16>,
}

/// What a run is asked to be, for commands that train or plan one.
#[derive(Debug, Default, clap::Args)]
pub struct RunArgs {
    /// MODEL DATA… key=value…: a folder or hub id, then files or folders, and settings by name
    args: Vec<String>,
    /// Train low-rank adapters: a fraction of the memory
    #[arg(long)]
    lora: bool,
    /// What is learned: sft (tokens), or from rows with `chosen` and `rejected` dpo or orpo
    #[arg(long, value_name = "METHOD", value_parser = ["sft", "dpo", "orpo", "full", "lora"], hide_possible_values = true)]
    method: Option<String>,
    /// Multiply projections in 8-bit floats: faster on GPUs from Ada (RTX 40) on, less exact
    #[arg(long)]
    fp8: bool,
    /// The run's folder [default: runs/MODEL-DATA]
    #[arg(long)]
    out: Option<PathBuf>,
    /// How often all rows are taken [default: 3, texts 1]
    #[arg(long, conflicts_with = "steps")]
    epochs: Option<u64>,
    /// Optimizer steps, instead of epochs
    #[arg(long)]
    steps: Option<u64>,
    /// Steps between checkpoints [default: a tenth of the run]
    #[arg(long)]
    save_every: Option<u64>,
    /// Start from random weights of a preset instead of a model
    #[arg(long, value_name = "PRESET")]
    init: Option<String>,
    /// Devices: cuda, cuda:0,cuda:1, cpu or cpu:2 [default: every GPU, or the processor]
    #[arg(long)]
    devices: Option<String>,
    /// The most to take of each GPU, for example 24GiB
    #[arg(long)]
    gpu_memory: Option<String>,
    /// The most that training may take of the host's memory
    #[arg(long)]
    host_memory: Option<String>,
    /// A file of settings; arguments win
    #[arg(long)]
    config: Option<PathBuf>,
}

const EXAMPLES: &str = "Examples:
  roundpipe train Qwen/Qwen3-0.6B chats.jsonl
  roundpipe train ./model chats.jsonl books=0.5 --lora lora_rank=32 lr=1e-4
  roundpipe train ./model pairs.jsonl --method dpo --lora dpo_beta=0.1
  roundpipe train --init tiny story.txt --steps 300
  roundpipe train --out runs/mine            go on with a run";

impl TrainCmd {
    pub fn run(self, out: &mut dyn Write, stop: &Arc<AtomicBool>) -> Result<(), Failure> {
        let given = self.run.given()?;
        if self.print_config {
            let mut settings = Settings::default();
            given.apply(&mut settings);
            write!(out, "{}", settings.to_toml())?;
            return Ok(());
        }
        let request = Request {
            given,
            watch: self.watch.then_some(self.port.filter(|port| *port != 0)),
        };
        train(&request, out, stop)
    }
}

impl RunArgs {
    /// A model with settings by name, without further options.
    pub fn of_model(args: Vec<String>, lora: bool) -> Self {
        Self {
            args,
            lora,
            ..Self::default()
        }
    }

    /// All settings that were given: the file's, then arguments, then options.
    pub fn given(&self) -> Result<Given, Failure> {
        let file = match &self.config {
            Some(path) => Given::file(path)?,
            None => Given::default(),
        };
        let mut given = Given::default();
        let mut names = Vec::new();
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
                names.push(argument.clone());
            }
        }
        let mut names = names.into_iter();
        let has_model = ["model", "init"]
            .iter()
            .any(|key| given.has(key) || file.has(key));
        if self.init.is_none()
            && !has_model
            && let Some(model) = names.next()
        {
            given.put("model", model, "MODEL".into())?;
        }
        let data: Vec<String> = names.collect();
        if !data.is_empty() {
            given.put("data", data, "DATA".into())?;
        }
        self.options(&mut given)?;
        Ok(file.under(given))
    }

    fn options(&self, given: &mut Given) -> Result<(), Failure> {
        if let Some(method) = &self.method {
            let key = match method.as_str() {
                "full" | "lora" => "method",
                _ => "objective",
            };
            given.put_option(key, method.as_str(), "--method")?;
        }
        if self.lora {
            given.put_option("method", "lora", "--lora")?;
        }
        if self.fp8 {
            given.put_option("fp8", true, "--fp8")?;
        }
        let as_text = |path: &PathBuf| {
            let what = "--out is no UTF-8 text; choose another folder";
            path.to_str()
                .map(str::to_owned)
                .ok_or_else(|| Failure::usage(what.into()))
        };
        let out = self.out.as_ref().map(as_text).transpose()?;
        let texts = [
            ("out", out.as_ref(), "--out"),
            ("init", self.init.as_ref(), "--init"),
            ("devices", self.devices.as_ref(), "--devices"),
            ("gpu_memory", self.gpu_memory.as_ref(), "--gpu-memory"),
            ("host_memory", self.host_memory.as_ref(), "--host-memory"),
        ];
        for (key, value, option) in texts {
            if let Some(value) = value {
                given.put_option(key, value.as_str(), option)?;
            }
        }
        let numbers = [
            ("epochs", self.epochs, "--epochs"),
            ("steps", self.steps, "--steps"),
            ("save_every", self.save_every, "--save-every"),
        ];
        for (key, value, option) in numbers {
            if let Some(value) = value {
                let value = i64::try_from(value).unwrap_or(i64::MAX);
                given.put_option(key, value, option)?;
            }
        }
        Ok(())
    }
}

/// Whether an argument is `key=value` rather than a file with a weight.
pub fn is_setting(argument: &str) -> bool {
    let Some((key, _)) = argument.split_once('=') else {
        return false;
    };
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    let is_key = !key.is_empty() && key.chars().all(is_word);
    is_key && !Path::new(key).exists() && !Path::new(argument).exists()
}

/// Trains, and says where the result is.
pub fn train(
    request: &Request,
    out: &mut dyn Write,
    stop: &Arc<AtomicBool>,
) -> Result<(), Failure> {
    let mut screen = Screen::new(out, std::io::stdout().is_terminal());
    let outcome = roundpipe_train::run(request, &mut screen, stop);
    let lost = screen.finish();
    match outcome? {
        Outcome::Finished { model, folder } => {
            lost?;
            writeln!(out, "the result is in {}", model.display())?;
            let folder = folder.display();
            writeln!(
                out,
                "try it: roundpipe generate {folder} --prompt \"Who are you?\""
            )?;
            Ok(())
        }
        Outcome::Interrupted { step, folder } => Err(Failure::Interrupted(format!(
            "interrupted; step {step} is saved, and `roundpipe train --out {}` goes on",
            folder.display()
        ))),
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Coded(error.exit_code(), error.to_string())
    }
}
