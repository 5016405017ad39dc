//! `roundpipe chat`: a conversation with a model, or with two side by side.
//!
//! Answers go to standard output, as they come; notes and replies to commands to standard error.

use std::io::{self, BufRead, IsTerminal, Write};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, ensure};
use roundpipe_models::conversation::Conversation;
use roundpipe_models::tokenizer::Tokenizer;
use roundpipe_models::{Finish, GenerateOptions, Generator, Model, Sampler};
use signal_hook::consts::SIGINT;

use crate::open::{self, Found};
use crate::place::Place;
use crate::terminal::{Output, one_line};

const EXAMPLES: &str = "\
Examples:
  roundpipe chat Qwen/Qwen3-0.6B
  roundpipe chat runs/my-run --against base        before and after training
  echo 'Who are you?' | roundpipe chat MODEL       one line per turn

In the conversation: /reset, /system TEXT, /save FILE, /help, /quit. Ctrl+C stops an answer, a
second one or Ctrl+D ends.";

const HELP: &str = "\
/reset        forget the conversation; the system message stays
/system TEXT  begin again with this system message (without TEXT: with none)
/save FILE    append the conversation to FILE, as a row that `roundpipe train` reads
/help         this
/quit         end (also Ctrl+D)
Ctrl+C stops an answer; a second one ends the program.";

/// The name that `--against` has for the model without its adapter.
const BASE: &str = "base";

/// Talk to a model, or to two models at once
///
/// The model answers through its chat template and remembers the conversation. When its longest
/// sequence is full, the oldest turns are dropped, and a line says so.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct ChatCmd {
    /// A folder, a run's folder, or a hub id such as Qwen/Qwen3-0.6B
    model: String,
    /// A folder with adapters to apply
    #[arg(long)]
    adapter: Option<PathBuf>,
    /// A second model that answers every turn too: as MODEL, or `base` for MODEL without its adapter
    #[arg(long)]
    against: Option<String>,
    /// A system message before the conversation
    #[arg(long)]
    system: Option<String>,
    /// Tokens of an answer at most
    #[arg(long, default_value_t = 1024)]
    max_tokens: usize,
    /// Flattens (above 1) or sharpens (below 1) the choice; 0 takes the likeliest token
    #[arg(long, default_value_t = 0.7)]
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
    /// Type of weights and activations [default: the model's]
    #[arg(long, value_enum)]
    dtype: Option<open::TypeArg>,
    /// Weights of linear layers in 4 or 8 bits [default: as a run trained beside them]
    #[arg(long, value_enum)]
    quantize: Option<open::QuantizeArg>,
    #[command(flatten)]
    place: Place,
}

/// A model that answers, and what it is called.
struct Speaker {
    name: String,
    model: Model,
    tokenizer: Tokenizer,
}

impl ChatCmd {
    pub fn run(self, out: &mut impl Write) -> anyhow::Result<()> {
        let options = self.options()?;
        let devices = self.place.open(&mut io::stderr())?;
        let speakers = self.speakers()?;
        let models: Vec<&Model> = speakers.iter().map(|speaker| &speaker.model).collect();
        let generators = Generator::several(&models, &devices.workers, &self.place.ring())?;
        if let Some(note) = generators[0].engine().ring().pins().note() {
            writeln!(io::stderr(), "{note}")?;
        }
        let mut talks = Vec::new();
        for (speaker, generator) in speakers.iter().zip(&generators) {
            let talk = Conversation::new(generator, &speaker.tokenizer, self.system.clone())
                .with_context(|| speaker.name.clone())?;
            let mut options = options.clone();
            options.stop = speaker.tokenizer.eos().to_vec();
            talks.push(Talk {
                name: &speaker.name,
                talk,
                options,
            });
        }
        Room {
            talks,
            stop: interrupts()?,
            shown: Shown::new(),
        }
        .run(&mut io::stdin().lock(), out)
    }

    /// How tokens are chosen, checked.
    fn options(&self) -> anyhow::Result<GenerateOptions> {
        ensure!(
            self.temperature.is_finite() && self.temperature >= 0.0,
            "--temperature must be 0 or more"
        );
        ensure!(self.top_k != Some(0), "--top-k must be at least 1");
        ensure!(
            self.top_p.is_none_or(|p| p > 0.0 && p <= 1.0),
            "--top-p must be above 0 and at most 1"
        );
        ensure!(self.max_tokens > 0, "--max-tokens must be at least 1");
        Ok(GenerateOptions {
            max_tokens: self.max_tokens,
            sampler: Sampler {
                temperature: self.temperature,
                top_k: self.top_k,
                top_p: self.top_p,
                seed: self.seed,
            },
            stop: Vec::new(),
        })
    }

    /// The model, and the one to compare it with.
    fn speakers(&self) -> anyhow::Result<Vec<Speaker>> {
        let (first, base) = self.speaker(&self.model, self.adapter.as_deref())?;
        let mut all = vec![first];
        match self.against.as_deref() {
            None => {}
            Some(BASE) if !Path::new(BASE).exists() => {
                let base = base.context(
                    "--against base: MODEL has no adapter to leave out; name another model, or an \
                     adapter with --adapter",
                )?;
                all.push(base);
            }
            Some(name) => {
                let (second, _) = self.speaker(name, None).context("--against")?;
                all.push(second);
            }
        }
        Ok(all)
    }

    /// A model by name, with its adapter, and the same without where it has one.
    fn speaker(
        &self,
        name: &str,
        adapter: Option<&Path>,
    ) -> anyhow::Result<(Speaker, Option<Speaker>)> {
        let found = Found::find(name, adapter, self.quantize)?;
        let opened = found.open(self.dtype.map(Into::into), &self.place)?;
        let mut model = opened.model;
        let mut without = None;
        if let Some(adapter) = &found.adapter {
            without = Some(Speaker {
                name: BASE.to_owned(),
                // It shares all weights; the adapter joins the other one only.
                model: model.clone(),
                tokenizer: Tokenizer::open(&opened.path)?,
            });
            model.load_adapter(adapter)?;
        }
        let speaker = Speaker {
            name: name.to_owned(),
            model,
            tokenizer: Tokenizer::open(&opened.path)?,
        };
        Ok((speaker, without))
    }
}

/// A conversation with one model.
struct Talk<'g> {
    name: &'g str,
    talk: Conversation<'g>,
    options: GenerateOptions,
}

/// How answers are shown.
struct Shown {
    output: Output,
    colours: bool,
    /// Whether a person types at a terminal and wants to be asked.
    asks: bool,
}

impl Shown {
    fn new() -> Self {
        let output = Output::stdout();
        let no_color = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        Self {
            output,
            colours: output == Output::Terminal && !no_color,
            asks: output == Output::Terminal && io::stdin().is_terminal(),
        }
    }

    fn label(&self, name: &str) -> String {
        let name = one_line(name);
        if self.colours {
            format!("\u{1b}[1m[{name}]\u{1b}[0m")
        } else {
            format!("[{name}]")
        }
    }
}

/// What a line of the user asks for.
enum Line<'l> {
    Say(&'l str),
    Reset,
    System(&'l str),
    Save(&'l str),
    Help,
    Quit,
    Unknown(&'l str),
    Nothing,
}

impl<'l> Line<'l> {
    fn parse(line: &'l str) -> Self {
        let line = line.trim();
        if line.is_empty() {
            return Self::Nothing;
        }
        if !line.starts_with('/') {
            return Self::Say(line);
        }
        let (command, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        match command {
            "/reset" => Self::Reset,
            "/system" => Self::System(rest.trim()),
            "/save" => Self::Save(rest.trim()),
            "/help" => Self::Help,
            "/quit" | "/exit" => Self::Quit,
            _ => Self::Unknown(command),
        }
    }
}

/// All conversations, which hear the same words.
struct Room<'g> {
    talks: Vec<Talk<'g>>,
    stop: Arc<AtomicBool>,
    shown: Shown,
}

impl Room<'_> {
    fn run(mut self, lines: &mut impl BufRead, out: &mut impl Write) -> anyhow::Result<()> {
        let mut bytes = Vec::new();
        loop {
            self.stop.store(false, Ordering::SeqCst);
            if self.shown.asks {
                write!(out, "> ")?;
                out.flush()?;
            }
            bytes.clear();
            if lines.read_until(b'\n', &mut bytes)? == 0 {
                if self.shown.asks {
                    writeln!(out)?;
                }
                return Ok(());
            }
            let line = String::from_utf8_lossy(&bytes);
            match Line::parse(&line) {
                Line::Nothing => {}
                Line::Quit => return Ok(()),
                Line::Say(words) => self.answer(words, out)?,
                command => self.obey(command)?,
            }
        }
    }

    fn obey(&mut self, command: Line<'_>) -> anyhow::Result<()> {
        let mut notes = io::stderr();
        match command {
            Line::Reset => {
                self.talks.iter_mut().for_each(|talk| talk.talk.reset());
                writeln!(notes, "the conversation is forgotten")?;
            }
            Line::System(text) => {
                let system = (!text.is_empty()).then(|| text.to_owned());
                for talk in &mut self.talks {
                    talk.talk.set_system(system.clone());
                }
                writeln!(notes, "the conversation begins again")?;
            }
            Line::Save(file) => match self.save(file) {
                Ok(line) => writeln!(notes, "{line}")?,
                Err(error) => writeln!(notes, "{}", one_line(&format!("/save: {error:#}")))?,
            },
            Line::Unknown(name) => {
                let name = one_line(name);
                writeln!(
                    notes,
                    "there is no command {name}; /help lists those that are"
                )?;
            }
            _ => writeln!(notes, "{HELP}")?,
        }
        Ok(())
    }

    /// Appends the first model's conversation to a file.
    fn save(&self, file: &str) -> anyhow::Result<String> {
        ensure!(!file.is_empty(), "name a file: /save chat.jsonl");
        let messages = self.talks[0].talk.messages();
        ensure!(
            messages.iter().any(|message| message.role() == "assistant"),
            "nothing was said yet"
        );
        let count = messages.len();
        let messages: Vec<_> = messages.into_iter().map(|message| message.0).collect();
        let mut row = serde_json::to_string(&serde_json::json!({ "messages": messages }))?;
        row.push('\n');
        let opened = std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(file);
        let written = opened.and_then(|mut file| file.write_all(row.as_bytes()));
        written.with_context(|| file.to_owned())?;
        Ok(format!("{count} messages appended to {}", one_line(file)))
    }

    /// All models answer, one after another.
    fn answer(&mut self, words: &str, out: &mut impl Write) -> anyhow::Result<()> {
        let several = self.talks.len() > 1;
        for talk in &mut self.talks {
            if several {
                writeln!(out, "{}", self.shown.label(talk.name))?;
            }
            let mut failed = None;
            let said = talk.talk.ask(words, &talk.options, |piece| {
                let shown = self.shown.output.text(piece);
                let written = out.write_all(shown.as_bytes()).and_then(|()| out.flush());
                match written {
                    Err(error) => {
                        failed = Some(error);
                        ControlFlow::Break(())
                    }
                    Ok(()) if self.stop.load(Ordering::SeqCst) => ControlFlow::Break(()),
                    Ok(()) => ControlFlow::Continue(()),
                }
            });
            if let Some(error) = failed {
                return Err(error.into());
            }
            writeln!(out)?;
            out.flush()?;
            let mut notes = io::stderr();
            match said {
                // Words that are too long for the model leave the conversation as it was.
                Err(error @ roundpipe_models::Error::Argument { .. }) => {
                    writeln!(notes, "{}", one_line(&error.to_string()))?;
                }
                Err(error) => return Err(error.into()),
                Ok(answer) => {
                    let dropped = match answer.dropped {
                        0 => None,
                        1 => Some("the oldest turn was".to_owned()),
                        turns => Some(format!("the oldest {turns} turns were")),
                    };
                    if let Some(dropped) = dropped {
                        let why = "the model's longest sequence is full";
                        writeln!(notes, "{why}: {dropped} dropped")?;
                    }
                    match answer.finish {
                        Finish::Length => writeln!(notes, "(cut at --max-tokens)")?,
                        Finish::Context => {
                            writeln!(notes, "(cut: the model's longest sequence is full)")?;
                        }
                        Finish::Caller => writeln!(notes, "(stopped)")?,
                        Finish::Stop => {}
                    }
                }
            }
        }
        Ok(())
    }
}

/// A flag that Ctrl+C sets; the second one ends the program.
fn interrupts() -> anyhow::Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    // In this order: the first one finds the flag unset, sets it and goes on.
    signal_hook::flag::register_conditional_shutdown(SIGINT, 0, stop.clone())?;
    signal_hook::flag::register(SIGINT, stop.clone())?;
    Ok(stop)
}

#[cfg(test)]
mod tests {
    use super::Line;

    #[test]
    fn lines_that_begin_with_a_slash_are_commands() {
        assert!(matches!(Line::parse("hi /reset\n"), Line::Say("hi /reset")));
        assert!(matches!(Line::parse(" /reset\r\n"), Line::Reset));
        assert!(matches!(
            Line::parse("/system  be brief\n"),
            Line::System("be brief")
        ));
        assert!(matches!(Line::parse("/system"), Line::System("")));
        assert!(matches!(
            Line::parse("/save a b.jsonl"),
            Line::Save("a b.jsonl")
        ));
        assert!(matches!(Line::parse("/nope x"), Line::Unknown("/nope")));
        assert!(matches!(Line::parse("  \n"), Line::Nothing));
        assert!(matches!(Line::parse("/quit"), Line::Quit));
        assert!(matches!(Line::parse("/help"), Line::Help));
    }
}
