//! From a model's name to a folder on this machine.
//!
//! A folder is itself. `owner/name`, with `@revision` if wanted, goes through the cache that all
//! Hugging Face tools share: `models--owner--name/` with `refs` (which commit a revision is),
//! `blobs` (contents, named by their hash) and `snapshots` (links to them, by commit). What is
//! missing is downloaded; an interrupted download goes on where it stopped.
//!
//! Settings are a value ([`HubConfig`]), so nothing here depends on the process's environment
//! unless asked to.
//!
//! # Invariants
//! - A file in `blobs` without `.incomplete` is whole: its hash, which is its name, was checked
//!   before it got it.
//! - No name that a server sends becomes a path before it was checked to be one plain file name.
//! - Offline, nothing touches the network.

mod fetch;

use std::fmt;
use std::path::{Path, PathBuf};

use fetch::{Repo, Wanted};
use roundpipe_files::error::unwritten;
use roundpipe_files::small;
use roundpipe_files::text::shown;

use crate::error::{Error, Result};
use crate::limits;

/// Where models come from and where they are kept.
#[derive(Clone)]
pub struct HubConfig {
    /// The cache's folder; an empty path where the environment names none.
    pub cache: PathBuf,
    /// The server, without a slash at the end.
    pub endpoint: String,
    /// Who asks, for gated and private models.
    pub token: Option<String>,
    /// Whether the network must not be used.
    pub offline: bool,
}

/// How far the download of a file has come.
#[derive(Debug, Clone, Copy)]
pub struct Progress<'a> {
    /// Name of the file.
    pub file: &'a str,
    /// Bytes that are here.
    pub done_bytes: u64,
    /// Bytes of the whole file, where the server says.
    pub total_bytes: Option<u64>,
}

/// The folder of a model, with the settings of the environment.
///
/// # Errors
/// As [`HubConfig::resolve`].
pub fn resolve(model: &str) -> Result<PathBuf> {
    HubConfig::from_env().resolve(model)
}

impl HubConfig {
    /// What `HF_HUB_CACHE`, `HF_HOME`, `HF_ENDPOINT`, `HF_TOKEN`, `HF_TOKEN_PATH` and
    /// `HF_HUB_OFFLINE` say.
    pub fn from_env() -> Self {
        Self::from_vars(|name| std::env::var(name).ok())
    }

    /// The same from given variables; the token may be read from its file.
    pub fn from_vars(var: impl Fn(&str) -> Option<String>) -> Self {
        let var = |name| var(name).filter(|v| !v.trim().is_empty());
        let home = var("HOME")
            .or_else(|| var("USERPROFILE"))
            .map(PathBuf::from);
        let path = |name| {
            let value = var(name)?;
            match value.strip_prefix("~/") {
                Some(rest) => home.as_ref().map(|home| home.join(rest)),
                None => Some(PathBuf::from(value)),
            }
        };
        let user_cache = || path("XDG_CACHE_HOME").or_else(|| Some(home.as_ref()?.join(".cache")));
        let hf_home = path("HF_HOME").or_else(|| Some(user_cache()?.join("huggingface")));
        let token_file = path("HF_TOKEN_PATH").or_else(|| Some(hf_home.as_ref()?.join("token")));
        let stored = || {
            small::utf8(
                token_file.as_ref()?,
                small::read(token_file.as_ref()?, limits::WORD).ok()?,
            )
            .ok()
        };
        let token = var("HF_TOKEN").or_else(stored);
        let endpoint = var("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".into());
        let offline = var("HF_HUB_OFFLINE").map(|v| v.trim().to_uppercase());
        Self {
            cache: path("HF_HUB_CACHE")
                .or_else(|| Some(hf_home?.join("hub")))
                .unwrap_or_default(),
            endpoint: endpoint.trim().trim_end_matches('/').to_owned(),
            token: token.map(|t| t.trim().to_owned()).filter(|t| !t.is_empty()),
            offline: offline.is_some_and(|v| matches!(v.as_str(), "1" | "ON" | "YES" | "TRUE")),
        }
    }

    /// The folder of a model: `model` itself when it is one, else that of `owner/name[@revision]`
    /// in the cache, downloaded as far as it is missing.
    ///
    /// # Errors
    /// [`Error::Argument`] naming the model when there is none, when the server refuses or cannot
    /// be reached, or when it would have to be asked while offline; [`Error::File`] when the cache
    /// cannot be written.
    pub fn resolve(&self, model: &str) -> Result<PathBuf> {
        self.resolve_with(model, &mut |_| ())
    }

    /// As [`resolve`](Self::resolve), but without weights: enough to read a config and a tokenizer.
    ///
    /// # Errors
    /// As there.
    pub fn resolve_config(&self, model: &str) -> Result<PathBuf> {
        self.resolve_parts(model, Parts::Companions, &mut |_| ())
    }

    /// [`resolve`](Self::resolve), telling how downloads come along.
    ///
    /// # Errors
    /// As there.
    pub fn resolve_with(
        &self,
        model: &str,
        progress: &mut dyn FnMut(Progress<'_>),
    ) -> Result<PathBuf> {
        self.resolve_parts(model, Parts::All, progress)
    }

    fn resolve_parts(
        &self,
        model: &str,
        parts: Parts,
        progress: &mut dyn FnMut(Progress<'_>),
    ) -> Result<PathBuf> {
        if Path::new(model).is_dir() {
            return Ok(PathBuf::from(model));
        }
        let name = ModelName::parse(model)?;
        if self.cache.as_os_str().is_empty() {
            let why = "there is no place to keep it, since HOME is not set; set HF_HOME to a folder, or pass the model's";
            return Err(Error::argument(shown(model), why));
        }
        let store = self
            .cache
            .join(format!("models--{}--{}", name.owner, name.name));
        let cached = cached(&store, &name.revision);
        if let (Parts::Companions, Some(folder)) = (parts, &cached) {
            return Ok(folder.clone());
        }
        if self.offline {
            return cached.ok_or_else(|| {
                let why = format!(
                    "not in the cache {}; unset HF_HUB_OFFLINE to download it, or pass a folder",
                    self.cache.display()
                );
                Error::argument(shown(model), why)
            });
        }
        let repo = Repo::new(self, &name);
        match repo.listing() {
            Ok(listing) => download(&repo, &store, (&name, parts), &listing, progress),
            // A model that is here can be used while the server cannot be reached.
            Err(e) => match cached {
                Some(folder) if e.unreachable => Ok(folder),
                _ => Err(e.error),
            },
        }
    }
}

impl fmt::Debug for HubConfig {
    /// A token is a secret: only whether there is one is shown.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HubConfig")
            .field("cache", &self.cache)
            .field("endpoint", &self.endpoint)
            .field("token", &self.token.as_ref().map(|_| "…"))
            .field("offline", &self.offline)
            .finish()
    }
}

/// What is wanted of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Parts {
    /// Everything that training reads.
    All,
    /// What stands beside the weights.
    Companions,
}

/// `owner/name@revision`, checked.
#[derive(Debug, Clone)]
struct ModelName {
    owner: String,
    name: String,
    revision: String,
}

impl ModelName {
    fn parse(model: &str) -> Result<Self> {
        let (id, revision) = model.split_once('@').unwrap_or((model, "main"));
        let plain = |part: &str| {
            let known = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
            !part.is_empty()
                && part.chars().all(known)
                && !part.starts_with(['.', '-'])
                && part.len() < 100
        };
        // The hub gives no such names, and in the cache's folder `--` stands between owner and
        // name.
        let single = |part: &str| plain(part) && !part.contains("--") && !part.contains("..");
        match id.split_once('/') {
            Some((owner, name))
                if single(owner) && single(name) && revision.split('/').all(plain) =>
            {
                Ok(Self {
                    owner: owner.into(),
                    name: name.into(),
                    revision: revision.into(),
                })
            }
            _ => {
                let why = "is neither a folder that exists nor a name like owner/name or owner/name@revision; \
                           check the path";
                Err(Error::argument(shown(model), why))
            }
        }
    }
}

/// The snapshot of a revision, when the cache has it.
fn cached(store: &Path, revision: &str) -> Option<PathBuf> {
    let path = store.join("refs").join(revision);
    let written = small::read(&path, limits::WORD).and_then(|bytes| small::utf8(&path, bytes));
    let commit = written.map_or_else(|_| revision.to_owned(), |commit| commit.trim().to_owned());
    let folder = store.join("snapshots").join(&commit);
    (fetch::is_hash(&commit) && folder.join("config.json").is_file()).then_some(folder)
}

/// Brings what is missing of a listing into the cache; gives the snapshot.
fn download(
    repo: &Repo<'_>,
    store: &Path,
    (name, parts): (&ModelName, Parts),
    listing: &fetch::Listing,
    progress: &mut dyn FnMut(Progress<'_>),
) -> Result<PathBuf> {
    let snapshot = store.join("snapshots").join(&listing.commit);
    for dir in [&store.join("blobs"), &snapshot] {
        std::fs::create_dir_all(dir).map_err(|e| unwritten(dir, &e))?;
    }
    let mut bring = |file: &Wanted| -> Result<()> {
        let blob = store.join("blobs").join(&file.blob);
        repo.fetch(&listing.commit, file, &blob, progress)?;
        link(&blob, &snapshot.join(&file.name))
    };
    for file in listing.files.iter().filter(|f| is_companion(&f.name)) {
        bring(file)?;
    }
    if parts == Parts::Companions {
        return Ok(snapshot);
    }
    let weights = weights_of(repo, listing, &snapshot)?;
    for file in weights {
        bring(file)?;
    }
    // Last: a revision that the cache knows is complete.
    if name.revision != listing.commit {
        let path = store.join("refs").join(&name.revision);
        write_ref(&path, &listing.commit).map_err(|e| unwritten(&path, &e))?;
    }
    Ok(snapshot)
}

fn write_ref(path: &Path, commit: &str) -> std::io::Result<()> {
    if let Some(dir) = path.parent() {
        std::fs::create_dir_all(dir)?;
    }
    let partial = path.with_extension(format!("{}.partial", std::process::id()));
    std::fs::write(&partial, commit)?;
    std::fs::rename(partial, path)
}

/// Files beside the weights that a model needs.
fn is_companion(name: &str) -> bool {
    let known = [
        "config.json",
        "generation_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "vocab.txt",
        "merges.txt",
        crate::folder::INDEX,
    ];
    known.contains(&name) || name.starts_with("tokenizer") || name.starts_with("chat_template")
}

/// The weights that opening the folder will read: repositories often hold the same ones twice.
fn weights_of<'a>(
    repo: &Repo<'_>,
    listing: &'a fetch::Listing,
    snapshot: &Path,
) -> Result<Vec<&'a Wanted>> {
    let named = |name: &str| listing.files.iter().find(|f| f.name == name);
    if let Some(single) = named(crate::folder::SINGLE) {
        return Ok(vec![single]);
    }
    if named(crate::folder::INDEX).is_some() {
        let path = snapshot.join(crate::folder::INDEX);
        let mut shards: Vec<String> = crate::folder::read_index(&path)?
            .into_iter()
            .map(|(_, shard)| shard)
            .collect();
        shards.sort();
        shards.dedup();
        let missing = |s: &str| {
            repo.refused(format!(
                "its index names {}, which it does not have",
                shown(s)
            ))
        };
        return shards
            .iter()
            .map(|s| named(s).ok_or_else(|| missing(s)))
            .collect();
    }
    let all: Vec<_> = listing
        .files
        .iter()
        .filter(|f| f.name.ends_with(".safetensors"))
        .collect();
    if all.is_empty() && listing.pickled {
        return Err(repo
            .refused("has only pickled weights; convert them with transformers' save_pretrained"));
    }
    Ok(all)
}

/// Makes `at` show a blob; the link is relative, so that a cache can be moved.
fn link(blob: &Path, at: &Path) -> Result<()> {
    let fail = |e: std::io::Error| Error::from(unwritten(at, &e));
    let same = |a: &Path, b: &Path| {
        a.canonicalize()
            .ok()
            .is_some_and(|a| b.canonicalize().ok() == Some(a))
    };
    if same(at, blob) {
        return Ok(());
    }
    match std::fs::remove_file(at) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(fail(e)),
        _ => {}
    }
    #[cfg(unix)]
    {
        let name = blob.file_name().unwrap_or_default();
        match std::os::unix::fs::symlink(Path::new("../../blobs").join(name), at) {
            // Another program may have made the same link meanwhile.
            Err(_) if same(at, blob) => Ok(()),
            made => made.map_err(fail),
        }
    }
    #[cfg(not(unix))]
    std::fs::hard_link(blob, at)
        .or_else(|_| std::fs::copy(blob, at).map(|_| ()))
        .map_err(fail)
}
