//! What `merge` and `export` start from: a folder, a hub id or a run, and perhaps an adapter.

use std::path::{Path, PathBuf};

use anyhow::{anyhow, bail};
use roundpipe_models::export::Source;
use roundpipe_models::hub;

/// A source and how it is called.
pub struct Found {
    pub source: Source,
    /// The base model as the user or the run named it.
    pub base: String,
    /// What a file calls the result.
    pub name: String,
}

/// Finds the model, and the adapter that a run or the user gives.
pub fn find(model: &str, adapter: Option<&Path>) -> anyhow::Result<Found> {
    let run = roundpipe_train::run_model(model.as_ref())?;
    let (base, trained, quantize) = match run {
        Some(run) => (run.base, run.adapter, run.quantize),
        None => (model.to_owned(), None, None),
    };
    if trained.is_some() && adapter.is_some() {
        bail!("{model}: is a run with an adapter of its own; give its base model with another one");
    }
    let adapter = match adapter {
        Some(adapter) => Some(adapter_folder(adapter)?),
        None => trained,
    };
    let folder = hub::resolve(&base)?;
    let has = |name: &str| folder.join(name).is_file();
    if has("adapter_config.json") && !has("config.json") {
        bail!("{model}: is an adapter; name the model that it belongs to first");
    }
    Ok(Found {
        source: Source {
            folder,
            adapter,
            quantize,
        },
        base,
        name: last_part(model),
    })
}

/// The folder of an adapter, or of a run that made one.
fn adapter_folder(path: &Path) -> anyhow::Result<PathBuf> {
    let none = || {
        anyhow!(
            "{}: has no adapter_config.json; name an adapter's folder",
            path.display()
        )
    };
    let found = match roundpipe_train::run_model(path)? {
        Some(run) => run.adapter,
        None => path
            .join("adapter_config.json")
            .is_file()
            .then(|| path.to_path_buf()),
    };
    found.ok_or_else(none)
}

/// The last part of a path or hub id.
fn last_part(model: &str) -> String {
    let path = Path::new(model);
    let path = path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    if name.is_empty() {
        "model".into()
    } else {
        name.into_owned()
    }
}
