//! `roundpipe man`: manual pages, made from the same text as `--help`.

use std::io::Write;
use std::path::{Path, PathBuf};

use clap::{Command, CommandFactory};
use clap_mangen::Man;

use crate::{Cli, Failure};

/// Print the manual page, or write those of all commands
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct ManCmd {
    /// A folder for one page per command; pages of these names there are replaced
    #[arg(long)]
    out: Option<PathBuf>,
}

const EXAMPLES: &str = "Examples:
  roundpipe man | man -l -
  roundpipe man --out ~/.local/share/man/man1";

impl ManCmd {
    pub fn run(self, out: &mut dyn Write) -> Result<(), Failure> {
        let mut command = Cli::command();
        // Gives commands below it their full names.
        command.build();
        let Some(folder) = &self.out else {
            out.write_all(&page(&command)?)?;
            return Ok(());
        };
        let fail =
            |e: std::io::Error| anyhow::anyhow!("{}: cannot be made ({e})", folder.display());
        std::fs::create_dir_all(folder).map_err(fail)?;
        let count = write_pages(&command, folder)?;
        writeln!(out, "wrote {count} pages into {}", folder.display())?;
        Ok(())
    }
}

/// Writes the page of a command and those of the commands below it; gives their number.
fn write_pages(command: &Command, folder: &Path) -> Result<usize, Failure> {
    let path = folder.join(format!("{}.1", full_name(command)));
    let fail = |e: std::io::Error| anyhow::anyhow!("{}: cannot be written ({e})", path.display());
    std::fs::write(&path, page(command)?).map_err(fail)?;
    let mut count = 1;
    for below in command.get_subcommands() {
        // `roundpipe help` repeats the others.
        if below.get_name() != "help" && !below.is_hide_set() {
            count += write_pages(below, folder)?;
        }
    }
    Ok(count)
}

fn full_name(command: &Command) -> &str {
    command
        .get_display_name()
        .unwrap_or_else(|| command.get_name())
}

/// A command's page. What clap puts behind the options are our examples, whose lines stay as they
/// are; and a page is ASCII, since what other characters mean there depends on the reader's locale.
fn page(command: &Command) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    Man::new(command.clone()).render(&mut bytes)?;
    let text = String::from_utf8_lossy(&bytes);
    let page = match text.split_once(".SH EXTRA\n") {
        None => text.into_owned(),
        Some((before, rest)) => {
            let (examples, after) = match rest.find("\n.SH ") {
                Some(end) => rest.split_at(end + 1),
                None => (rest, ""),
            };
            let lines: String = examples
                .lines()
                .skip(1)
                .map(|line| format!("{line}\n"))
                .collect();
            format!("{before}.SH EXAMPLES\n.nf\n{lines}.fi\n{after}")
        }
    };
    let escaped = |c: char| match c {
        c if c.is_ascii() => c.to_string(),
        c => format!("\\[u{:04X}]", u32::from(c)),
    };
    Ok(page.chars().map(escaped).collect::<String>().into_bytes())
}
