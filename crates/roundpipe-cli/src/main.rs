//! The `roundpipe` program: one binary, one command.
#![forbid(unsafe_code)]

mod bench;
mod bounds;
mod demo;
mod generate;
mod open;
mod place;
mod terminal;

use std::io::{self, Write};
use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Train language models on the hardware you have.
///
/// Without a command, trains a small transformer on a story that ships with the program.
#[derive(Debug, Parser)]
#[command(name = "roundpipe", version)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Debug, Subcommand)]
enum Command {
    Demo(demo::DemoCmd),
    Generate(generate::GenerateCmd),
    Bench(bench::BenchCmd),
}

fn main() -> ExitCode {
    // Commands print notes on devices themselves, where they belong; warnings come at any time.
    tracing_subscriber::fmt()
        .with_max_level(tracing_subscriber::filter::LevelFilter::WARN)
        .with_writer(io::stderr)
        .with_target(false)
        .without_time()
        .init();
    let command = Cli::parse()
        .command
        .unwrap_or_else(|| Command::Demo(demo::DemoCmd::default()));
    let mut out = io::stdout().lock();
    let done = match command {
        Command::Demo(demo) => demo.run(&mut out),
        Command::Generate(generate) => generate.run(&mut out),
        Command::Bench(bench) => bench.run(&mut out),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if is_closed_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            let line = error
                .chain()
                .map(ToString::to_string)
                .collect::<Vec<_>>()
                .join(": ");
            // Nothing sensible is left to do when even this cannot be written.
            let _ = writeln!(io::stderr(), "error: {}", terminal::one_line(&line));
            ExitCode::FAILURE
        }
    }
}

/// The reader of our output (`| head`) has closed the pipe: that is no failure.
fn is_closed_pipe(error: &anyhow::Error) -> bool {
    let kind = error.downcast_ref::<io::Error>().map(io::Error::kind);
    kind == Some(io::ErrorKind::BrokenPipe)
}
