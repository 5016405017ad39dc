//! What a person sees of a run: a bar and a line that changes on a terminal, plain lines elsewhere.

use std::io::Write;
use std::time::Instant;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use roundpipe::Bytes;
use roundpipe_report::{Eval, Record, Sample, Save, Step};
use roundpipe_train::{Overview, ShownRow, Watcher};

use crate::terminal::{Output, one_line};

/// The most characters of a row or a sample that are shown.
const MOST_SHOWN: usize = 600;
/// Lines of steps in a file: at least so many seconds apart, but for the first ten.
const LINE_SECONDS: f64 = 5.0;

/// The watcher that writes to standard output.
pub struct Screen<'o> {
    out: &'o mut dyn Write,
    is_terminal: bool,
    colours: bool,
    bar: ProgressBar,
    steps: u64,
    lines: u64,
    last_line: Instant,
    failed: Option<std::io::Error>,
}

impl<'o> Screen<'o> {
    pub fn new(out: &'o mut dyn Write, is_terminal: bool) -> Self {
        Self {
            out,
            is_terminal,
            colours: Marks::new(is_terminal).colours,
            bar: ProgressBar::hidden(),
            steps: 0,
            lines: 0,
            last_line: Instant::now(),
            failed: None,
        }
    }

    /// Takes the bar away; the first line that could not be written.
    pub fn finish(self) -> std::io::Result<()> {
        self.bar.finish_and_clear();
        self.failed.map_or(Ok(()), Err)
    }

    fn line(&mut self, line: &str) {
        let out = &mut *self.out;
        let written = self
            .bar
            .suspend(|| writeln!(out, "{line}").and_then(|()| out.flush()));
        if let Err(error) = written {
            self.failed.get_or_insert(error);
        }
    }

    /// Text of others: as lines, cut, without commands to the terminal.
    fn quoted(&self, text: &str) -> String {
        let cut: String = text.chars().take(MOST_SHOWN).collect();
        let more = if cut.len() < text.len() { " …" } else { "" };
        let output = if self.is_terminal {
            Output::Terminal
        } else {
            Output::Raw
        };
        let text = output.text(&cut).replace('\n', "\n    ");
        format!("    {text}{more}")
    }

    fn marks(&self) -> Marks {
        Marks {
            is_terminal: self.is_terminal,
            colours: self.colours,
        }
    }

    fn step(&mut self, step: &Step) {
        let line = self.step_line(step);
        self.bar.set_position(step.step);
        self.bar.set_message(line.clone());
        if self.is_terminal {
            return;
        }
        let is_last = step.step == self.steps;
        if self.lines < 10 || is_last || self.last_line.elapsed().as_secs_f64() >= LINE_SECONDS {
            self.lines += 1;
            self.last_line = Instant::now();
            self.line(&line);
        }
    }

    fn step_line(&self, step: &Step) -> String {
        let percent = 100.0 * step.step as f64 / self.steps.max(1) as f64;
        let norm = step
            .grad_norm
            .map_or_else(String::new, |norm| format!("  norm {norm:.3}"));
        let share = step.limit_share.map_or_else(String::new, |share| {
            format!(" ({:.0}% of the limit)", 100.0 * share)
        });
        let gpu = step.gpu_bytes.iter().max().copied().unwrap_or(0);
        let left = (self.steps.saturating_sub(step.step)) as f64 * step.tokens as f64
            / step.tokens_per_s.max(1e-9);
        let rewards = rewards(step.reward_margin, step.reward_accuracy);
        let rewards = rewards.map_or_else(String::new, |text| format!("  {text}"));
        let skipped = if step.skipped {
            "  skipped: gradients are not finite"
        } else {
            ""
        };
        format!(
            "step {}/{} {percent:.0}%  loss {:.4}{rewards}  lr {:.2e}{norm}  {:.0} tok/s{share}  device {} host {}  {} so far, {} left{skipped}",
            step.step,
            self.steps,
            step.loss,
            step.lr,
            step.tokens_per_s,
            Bytes(gpu),
            Bytes(step.host_bytes),
            duration(step.elapsed_s),
            duration(left),
        )
    }
}

impl Watcher for Screen<'_> {
    fn note(&mut self, line: &str) {
        let line = one_line(line).into_owned();
        self.line(&line);
    }

    fn begin(&mut self, overview: &Overview) {
        for line in overview.model.iter().chain(&overview.data) {
            self.note(line);
        }
        if !overview.rows.is_empty() {
            self.line(&self.marks().heading());
            for row in &overview.rows {
                let text = row_text(row, self.marks());
                self.line(&text);
            }
        }
        overview.plan.iter().for_each(|line| self.note(line));
        let (first, steps) = overview.steps;
        if first > 0 {
            self.line(&format!("going on behind step {first}"));
        }
        self.steps = steps;
        if self.is_terminal && std::io::IsTerminal::is_terminal(&std::io::stderr()) {
            let style = ProgressStyle::with_template("{bar:30} {msg}")
                .unwrap_or_else(|_| ProgressStyle::default_bar());
            self.bar = ProgressBar::with_draw_target(Some(steps), ProgressDrawTarget::stderr())
                .with_style(style);
            self.bar.set_position(first);
        }
    }

    fn record(&mut self, record: &Record) {
        match record {
            Record::Step(step) => self.step(step),
            Record::Eval(Eval {
                step,
                loss,
                perplexity,
                best,
                reward_margin,
                reward_accuracy,
                ..
            }) => {
                let best = if *best { ", the best so far" } else { "" };
                let rewards = rewards(*reward_margin, *reward_accuracy);
                let beside = rewards.unwrap_or_else(|| format!("perplexity {perplexity:.2}"));
                self.line(&format!(
                    "step {step}: validation loss {loss:.4}, {beside}{best}"
                ));
            }
            Record::Sample(Sample { step, prompt, text }) => {
                let prompt = one_line(prompt).chars().take(80).collect::<String>();
                let text = self.quoted(text);
                self.line(&format!("step {step}: \"{prompt}\" ->\n{text}"));
            }
            Record::Save(Save {
                step,
                bytes,
                seconds,
                ..
            }) => {
                let size = Bytes(*bytes);
                self.line(&format!("step {step}: saved {size} in {seconds:.1} s"));
            }
            _ => {}
        }
    }
}

/// Rewards of pairs in words: by how much the chosen answer's is larger, and how often.
fn rewards(margin: Option<f64>, accuracy: Option<f64>) -> Option<String> {
    let (margin, accuracy) = (margin?, 100.0 * accuracy?);
    Some(format!("margin {margin:.4} ({accuracy:.0}% right)"))
}

/// How learned text is marked.
#[derive(Debug, Clone, Copy)]
pub struct Marks {
    is_terminal: bool,
    colours: bool,
}

impl Marks {
    /// Colours on a terminal, unless `NO_COLOR` is set; brackets elsewhere.
    pub fn new(is_terminal: bool) -> Self {
        let no_color = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        Self {
            is_terminal,
            colours: is_terminal && !no_color,
        }
    }

    /// The line above rows.
    pub fn heading(self) -> String {
        let mark = if self.colours {
            "green"
        } else {
            "⟦marked⟧"
        };
        format!("rows as they are trained; what is learned is {mark}:")
    }
}

/// A row as it is trained, cut and indented, behind its title.
pub fn row_text(row: &ShownRow, marks: Marks) -> String {
    let mut left = MOST_SHOWN;
    let mut text = String::new();
    for (piece, learned) in &row.pieces {
        let cut: String = piece.chars().take(left).collect();
        left -= cut.chars().count();
        let shown = if marks.is_terminal {
            Output::Terminal.text(&cut).into_owned()
        } else {
            cut
        };
        match (learned, marks.colours) {
            (false, _) => text.push_str(&shown),
            // Colours do not survive line ends in every terminal, so each line has its own.
            (true, true) => {
                let lines: Vec<String> = shown
                    .split('\n')
                    .map(|line| format!("\u{1b}[32m{line}\u{1b}[0m"))
                    .collect();
                text.push_str(&lines.join("\n"));
            }
            (true, false) => text.push_str(&format!("⟦{shown}⟧")),
        }
        if left == 0 {
            text.push_str(" …");
            break;
        }
    }
    let text = text.replace('\n', "\n    ");
    let text = text.trim_end_matches([' ', '\n']);
    if row.title.is_empty() {
        format!("    {text}")
    } else {
        format!("  {}:\n    {text}", one_line(&row.title))
    }
}

/// Seconds as a clock shows them.
fn duration(seconds: f64) -> String {
    let seconds = if seconds.is_finite() {
        seconds.round() as u64
    } else {
        0
    };
    let (hours, minutes, seconds) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    if hours > 0 {
        format!("{hours}:{minutes:02}:{seconds:02}")
    } else {
        format!("{minutes}:{seconds:02}")
    }
}
