//! The `roundpipe` program: one binary, one command.
#![forbid(unsafe_code)]

mod bench;
mod bounds;
mod chat;
mod completions;
mod data;
mod demo;
mod doctor;
mod eval;
mod export;
mod generate;
mod man;
mod merge;
mod open;
mod place;
mod plan;
mod screen;
mod simulate;
mod source;
mod terminal;
mod train;
mod verify;

use std::io::{self, Write};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use clap::{Parser, Subcommand};
use signal_hook::consts::{SIGINT, SIGTERM};
use tracing_subscriber::filter::LevelFilter;

/// Interrupted, and the same command goes on.
const INTERRUPTED: u8 = 4;

/// Train language models on the hardware you have.
///
/// Without a command, trains a small transformer on stories that ship with the program.
///
/// Exit codes: 0 done, 1 failed, 2 wrong usage, 3 does not fit, 4 interrupted and resumable.
#[derive(Debug, Parser)]
#[command(name = "roundpipe", version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Debug, Subcommand)]
enum Command {
    Train(train::TrainCmd),
    Generate(generate::GenerateCmd),
    Chat(chat::ChatCmd),
    Eval(eval::EvalCmd),
    Merge(merge::MergeCmd),
    Export(export::ExportCmd),
    Bench(bench::BenchCmd),
    Plan(Box<plan::PlanCmd>),
    Simulate(simulate::SimulateCmd),
    Data(data::DataCmd),
    Doctor(doctor::DoctorCmd),
    Verify(verify::VerifyCmd),
    Demo(demo::DemoCmd),
    Completions(completions::CompletionsCmd),
    Man(man::ManCmd),
}

/// Why the program ends without having done all it was asked for.
pub enum Failure {
    /// With this code and line.
    Coded(u8, String),
    /// Asked to stop; what was done is saved.
    Interrupted(String),
    /// Anything else.
    Other(anyhow::Error),
}

impl Failure {
    /// Arguments that cannot work.
    fn usage(what: String) -> Self {
        Self::Coded(2, what)
    }
}

impl From<anyhow::Error> for Failure {
    fn from(error: anyhow::Error) -> Self {
        Self::Other(error)
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Other(error.into())
    }
}

fn main() -> ExitCode {
    let command = Cli::parse()
        .command
        .unwrap_or_else(|| Command::Demo(demo::DemoCmd::default()));
    // Commands print notes on devices themselves, where they belong; warnings come at any time. Plans
    // take steps that change nothing, which is nothing to warn of.
    let level = match command {
        Command::Plan(_) | Command::Simulate(_) => LevelFilter::ERROR,
        _ => LevelFilter::WARN,
    };
    tracing_subscriber::fmt()
        .with_max_level(level)
        .with_writer(io::stderr)
        .with_target(false)
        .without_time()
        .init();
    let mut out = io::stdout().lock();
    let done = match command {
        Command::Train(train) => signals().and_then(|stop| train.run(&mut out, &stop)),
        Command::Demo(demo) => signals().and_then(|stop| demo.run(&mut out, &stop)),
        Command::Eval(eval) => eval.run(&mut out),
        Command::Doctor(doctor) => signals().and_then(|stop| doctor.run(&mut out, &stop)),
        Command::Verify(verify) => signals().and_then(|stop| verify.run(&mut out, &stop)),
        Command::Generate(generate) => generate.run(&mut out).map_err(Failure::from),
        Command::Chat(chat) => chat.run(&mut out).map_err(Failure::from),
        Command::Data(data) => data.run(&mut out),
        Command::Merge(merge) => merge.run(&mut out),
        Command::Export(export) => export.run(&mut out),
        Command::Completions(completions) => completions.run(&mut out),
        Command::Man(man) => man.run(&mut out),
        Command::Bench(bench) => bench.run(&mut out).map_err(Failure::from),
        Command::Plan(plan) => plan.run(&mut out),
        Command::Simulate(simulate) => simulate.run(&mut out),
    };
    let (code, line) = match done {
        Ok(()) => return ExitCode::SUCCESS,
        Err(Failure::Other(error)) if is_closed_pipe(&error) => return ExitCode::SUCCESS,
        Err(Failure::Other(error)) => {
            let causes = error.chain().map(ToString::to_string);
            let line = format!("error: {}", causes.collect::<Vec<_>>().join(": "));
            (if does_not_fit(&error) { 3 } else { 1 }, line)
        }
        Err(Failure::Coded(code, line)) => (code, format!("error: {line}")),
        Err(Failure::Interrupted(line)) => (INTERRUPTED, line),
    };
    // Nothing sensible is left to do when even this cannot be written.
    let _ = writeln!(io::stderr(), "{}", terminal::one_line(&line));
    ExitCode::from(code)
}

/// A flag that Ctrl+C and SIGTERM set; the second one ends the program at once.
fn signals() -> Result<Arc<AtomicBool>, Failure> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        // In this order: the first one finds the flag unset, sets it and goes on.
        signal_hook::flag::register_conditional_shutdown(
            signal,
            i32::from(INTERRUPTED),
            stop.clone(),
        )?;
        signal_hook::flag::register(signal, stop.clone())?;
    }
    Ok(stop)
}

/// Whether less would do: fewer samples at a time, a smaller model, or more memory.
fn does_not_fit(error: &anyhow::Error) -> bool {
    let mut causes = error.chain();
    causes.any(|cause| {
        let cause = cause.downcast_ref::<roundpipe::Error>();
        cause.is_some_and(roundpipe::Error::is_out_of_memory)
    })
}

/// The reader of our output (`| head`) has closed the pipe: that is no failure.
fn is_closed_pipe(error: &anyhow::Error) -> bool {
    let kind = error.downcast_ref::<io::Error>().map(io::Error::kind);
    kind == Some(io::ErrorKind::BrokenPipe)
}
