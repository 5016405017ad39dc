//! `roundpipe merge`: a model and its adapter become one model.

use std::io::Write;
use std::path::PathBuf;

use anyhow::anyhow;

use crate::Failure;
use crate::export::{ShardSize, wrote_folder};
use crate::open::TypeArg;
use crate::source;

/// Add a LoRA adapter into its model, as a folder that transformers opens
///
/// Weights are read from the model's files one after another, so the model may be larger than
/// memory. Sums are made in f32 and rounded once.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct MergeCmd {
    /// A folder or hub id, or the folder of a LoRA run
    model: String,
    /// The adapter's folder; a run has its own
    adapter: Option<PathBuf>,
    /// The folder to make
    #[arg(long)]
    out: PathBuf,
    /// Type of the weights [default: the model's]
    #[arg(long, value_enum)]
    dtype: Option<TypeArg>,
    #[command(flatten)]
    shards: ShardSize,
}

const EXAMPLES: &str = "Examples:
  roundpipe merge runs/mine --out mine-merged
  roundpipe merge Qwen/Qwen3-8B ./my-adapter --out merged --dtype bf16";

impl MergeCmd {
    pub fn run(self, out: &mut dyn Write) -> Result<(), Failure> {
        let found = source::find(&self.model, self.adapter.as_deref())?;
        if found.source.adapter.is_none() {
            let what =
                "has no adapter to merge; name a LoRA run, or give the adapter's folder as well";
            return Err(anyhow!("{}: {what}", self.model).into());
        }
        let dtype = self.dtype.map(Into::into);
        let report = found
            .source
            .write_folder(&self.out, dtype, self.shards.bytes())
            .map_err(anyhow::Error::from)?;
        wrote_folder(out, &self.out, &report)?;
        Ok(())
    }
}
