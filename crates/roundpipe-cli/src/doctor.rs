//! `roundpipe doctor`: what this machine can do, and what holds it back.

use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

use roundpipe_train::doctor::{self, Check, Diagnosis, DoctorOptions, Verdict};

use crate::Failure;
use crate::terminal::one_line;

/// Look at this machine and measure it: GPUs, PCIe, memory, processor, disk, caches
///
/// Every line is pass, warn or fail, with a hint where something can be done. What was measured is
/// kept and used by `roundpipe plan`. Takes less than a minute; status 1 when something fails.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct DoctorCmd {
    /// Print one JSON value instead of lines
    #[arg(long)]
    json: bool,
    /// The folder whose disk is measured, where runs go [default: runs]
    #[arg(long, value_name = "DIR")]
    disk: Option<PathBuf>,
    /// Look only; measure nothing, and show the rates that are saved
    #[arg(long)]
    quick: bool,
}

const EXAMPLES: &str = "Examples:
  roundpipe doctor
  roundpipe doctor --disk /mnt/fast --json";

impl DoctorCmd {
    pub fn run(self, out: &mut dyn Write, stop: &AtomicBool) -> Result<(), Failure> {
        if let Some(folder) = &self.disk
            && !folder.is_dir()
        {
            let folder = folder.display();
            let what = format!("--disk {folder}: is no folder; name one that exists");
            return Err(Failure::usage(what));
        }
        let options = DoctorOptions {
            disk: self.disk.clone().unwrap_or_else(|| "runs".into()),
            quick: self.quick,
        };
        let shows_progress = !self.json && std::io::stderr().is_terminal();
        let mut progress = |what: &str| {
            if shows_progress {
                // A terminal that is gone shows nothing; the diagnosis itself is what matters.
                let _ = writeln!(std::io::stderr(), "{what} …");
            }
        };
        let found = doctor::examine(&options, &mut progress, stop);
        if stop.load(Ordering::Relaxed) {
            let what = "interrupted; nothing was saved";
            return Err(Failure::Interrupted(what.into()));
        }
        let found = found?;
        if self.json {
            let text = serde_json::to_string_pretty(&found).map_err(anyhow::Error::from)?;
            writeln!(out, "{text}")?;
        } else {
            tell(&found, out)?;
        }
        if found.verdict == Verdict::Fail {
            let failed = found.checks.iter().filter(|c| c.verdict == Verdict::Fail);
            let names: Vec<&str> = failed.map(|check| check.name.as_str()).collect();
            let what = format!("{} failed; see the hints", names.join(", "));
            return Err(Failure::Coded(1, what));
        }
        Ok(())
    }
}

fn tell(found: &Diagnosis, out: &mut dyn Write) -> std::io::Result<()> {
    let no_color = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let colours = std::io::stdout().is_terminal() && !no_color;
    let widest = found.checks.iter().map(|check| check.name.len()).max();
    let width = widest.unwrap_or(0);
    for check in &found.checks {
        let Check { name, found, .. } = check;
        let verdict = painted(check.verdict, colours);
        writeln!(out, "{verdict}  {name:width$}  {}", one_line(found))?;
        if let Some(hint) = &check.hint {
            writeln!(out, "      {:width$}  hint: {}", "", one_line(hint))?;
        }
    }
    match &found.saved {
        Some(path) => writeln!(out, "measurements are in {}", path.display()),
        None => Ok(()),
    }
}

fn painted(verdict: Verdict, colours: bool) -> String {
    let (word, colour) = match verdict {
        Verdict::Pass => ("pass", 32),
        Verdict::Warn => ("warn", 33),
        Verdict::Fail => ("fail", 31),
    };
    if colours {
        format!("\u{1b}[{colour}m{word}\u{1b}[0m")
    } else {
        word.to_owned()
    }
}
