//! `roundpipe generate`: text from a model, as it comes.

use std::io::Write;
use std::ops::ControlFlow;
use std::path::PathBuf;

use anyhow::ensure;
use roundpipe_models::chat::Message;
use roundpipe_models::tokenizer::Tokenizer;
use roundpipe_models::{GenerateOptions, Generator, Model, Sampler, preset};

use crate::open::{self, Found};
use crate::place::Place;
use crate::terminal::Output;

/// Tokens of the prompts that `--bench` continues.
const BENCH_PROMPT: usize = 32;

/// Continue a prompt, or answer it where the model has a chat template
///
/// On a terminal, control characters of the model's text are shown as � and do nothing; a file or a
/// pipe gets the text as it is.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct GenerateCmd {
    /// A folder, a run's folder, or a hub id such as Qwen/Qwen3-0.6B
    model: String,
    /// What to say to the model
    #[arg(long, required_unless_present = "bench", default_value = "")]
    prompt: String,
    /// Tokens at most
    #[arg(long, default_value_t = 256)]
    max_tokens: usize,
    /// Take the prompt as it is, without the model's chat template
    #[arg(long)]
    raw: bool,
    /// A system message before the prompt
    #[arg(long, conflicts_with = "raw")]
    system: Option<String>,
    /// Flattens (above 1) or sharpens (below 1) the choice; 0 takes the likeliest token
    #[arg(long, default_value_t = 0.0)]
    temperature: f64,
    /// Choose among so many of the likeliest tokens
    #[arg(long)]
    top_k: Option<usize>,
    /// Choose among the likeliest tokens that reach this probability together
    #[arg(long)]
    top_p: Option<f64>,
    /// Seed of the choices
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// A folder with adapters to apply
    #[arg(long)]
    adapter: Option<PathBuf>,
    /// Type of weights and activations [default: the model's]
    #[arg(long, value_enum)]
    dtype: Option<open::TypeArg>,
    /// Keep linear layers in 4 or 8 bits: less memory, more noise
    #[arg(long, value_enum)]
    quantize: Option<open::QuantizeArg>,
    /// Time --max-tokens tokens instead, also of a preset with random weights; prints a line of JSON
    #[arg(long, conflicts_with_all = ["prompt", "system", "raw", "adapter"])]
    bench: bool,
    /// Texts that --bench writes at once
    #[arg(long, default_value_t = 1, requires = "bench")]
    batch: usize,
    #[command(flatten)]
    place: Place,
}

const EXAMPLES: &str = "Examples:
  roundpipe generate Qwen/Qwen3-0.6B --prompt 'What is the capital of France?'
  roundpipe generate runs/mine --prompt 'Who are you?' --temperature 0.7 --seed 1";

impl GenerateCmd {
    pub fn run(self, out: &mut impl Write) -> anyhow::Result<()> {
        ensure!(
            self.temperature.is_finite() && self.temperature >= 0.0,
            "--temperature must be 0 or more"
        );
        ensure!(self.top_k != Some(0), "--top-k must be at least 1");
        ensure!(
            self.top_p.is_none_or(|p| p > 0.0 && p <= 1.0),
            "--top-p must be above 0 and at most 1"
        );
        if self.bench {
            return self.time(out);
        }
        // Notes go beside the answer, which goes to `out`.
        let devices = self.place.open(&mut std::io::stderr())?;
        let found = Found::find(&self.model, self.adapter.as_deref(), self.quantize)?;
        let opened = found.open(self.dtype.map(Into::into), &self.place)?;
        let mut model = opened.model;
        if let Some(adapter) = &found.adapter {
            model.load_adapter(adapter)?;
        }
        let tokenizer = Tokenizer::open(&opened.path)?;
        let prompt = self.tokens(&tokenizer)?;
        let generator = Generator::new(&model, &devices.workers, &self.place.ring())?;
        // What is pinned is decided: weights have moved, and activations follow suit.
        if let Some(note) = generator.engine().ring().pins().note() {
            writeln!(std::io::stderr(), "{note}")?;
        }
        let sampler = Sampler {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            seed: self.seed,
        };
        let stop = tokenizer.eos().to_vec();
        let options = GenerateOptions {
            max_tokens: self.max_tokens,
            sampler,
            stop,
        };
        let mut stream = tokenizer.stream(true);
        let shown_on = Output::stdout();
        let mut show = |text: &str| -> anyhow::Result<()> {
            out.write_all(shown_on.text(text).as_bytes())?;
            Ok(out.flush()?)
        };
        let mut failed = None;
        generator.generate(&prompt, &options, |token| {
            let shown = stream.push(token).map_err(anyhow::Error::from);
            match shown.and_then(|text| text.map_or(Ok(()), |text| show(&text))) {
                Ok(()) => ControlFlow::Continue(()),
                Err(error) => {
                    failed = Some(error);
                    ControlFlow::Break(())
                }
            }
        })?;
        if let Some(error) = failed {
            return Err(error);
        }
        show(&(stream.finish()? + "\n"))
    }

    /// Times decoding beside the bandwidth of the device's memory.
    fn time(&self, out: &mut impl Write) -> anyhow::Result<()> {
        let devices = self.place.open(&mut std::io::stderr())?;
        let model = if open::looks_like_a_model(&self.model) {
            open::model(&self.model, self.dtype.map(Into::into), &self.place)?.model
        } else {
            let dtype = self.dtype.unwrap_or(open::TypeArg::Bf16);
            Model::random(preset(&self.model)?, dtype.into(), self.seed)?
        };
        let generator = Generator::new(&model, &devices.workers, &self.place.ring())?;
        let speed = generator.speed(&model, self.batch, BENCH_PROMPT, self.max_tokens)?;
        let figures = serde_json::json!({
            "model": self.model,
            "dtype": model.config.dtype.map(|dtype| dtype.to_string()),
            "device": devices.workers[0].id().to_string(),
            "resident": generator.is_resident(),
            "batch": self.batch,
            "prompt_tokens": BENCH_PROMPT,
            "new_tokens": self.max_tokens,
            "prompt_ms": 1e3 * speed.prompt_seconds,
            "ms_per_token": 1e3 * speed.step_seconds,
            "tokens_per_s": self.batch as f64 / speed.step_seconds,
            "bytes_per_step": speed.bytes_per_step,
            "bandwidth_gb_per_s": speed.bandwidth / 1e9,
            "bandwidth_share": speed.share(),
        });
        Ok(writeln!(out, "{figures}")?)
    }

    /// The prompt as the model wants it.
    fn tokens(&self, tokenizer: &Tokenizer) -> anyhow::Result<Vec<u32>> {
        if self.raw {
            return Ok(tokenizer.encode(&self.prompt, true)?);
        }
        let system = self
            .system
            .iter()
            .map(|text| Message::new("system", text.as_str()));
        let messages: Vec<Message> = system
            .chain([Message::new("user", self.prompt.as_str())])
            .collect();
        if let Some(ids) = tokenizer.encode_chat(&messages)? {
            return Ok(ids);
        }
        ensure!(
            self.system.is_none(),
            "--system: the model has no chat template to put it into"
        );
        Ok(tokenizer.encode(&self.prompt, true)?)
    }
}
