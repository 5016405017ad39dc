//! `roundpipe completions`: what a shell needs to complete our commands and options.

use std::io::Write;

use clap::CommandFactory;
use clap_complete::Shell;

use crate::{Cli, Failure};

/// Print completions for a shell
///
/// The shell reads what is printed; where it looks for such files differs from shell to shell.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct CompletionsCmd {
    /// Which shell
    #[arg(value_enum)]
    shell: Shell,
}

const EXAMPLES: &str = "Examples:
  source <(roundpipe completions bash)                                    in ~/.bashrc
  roundpipe completions zsh > ~/.zfunc/_roundpipe                         a folder of $fpath
  roundpipe completions fish > ~/.config/fish/completions/roundpipe.fish";

impl CompletionsCmd {
    pub fn run(self, out: &mut dyn Write) -> Result<(), Failure> {
        // Through memory: the generator takes a failed write, such as a closed pipe, for a bug.
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut Cli::command(), "roundpipe", &mut script);
        out.write_all(&script)?;
        Ok(())
    }
}
