//! Asking a server for the files of a model.
//!
//! A listing comes first, then one file at a time into `{blob}.incomplete`, which is locked, so that two
//! programs do not write it together, and grows only by bytes that follow the ones it has.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::time::Duration;

use ring::digest;
use ureq::config::RedirectAuthHeaders;

use super::{HubConfig, ModelName, Progress};
use crate::error::{Error, Result};
use crate::folder::is_plain_name;
use crate::weights::{one_line, shown, unreadable, unwritten};

/// A listing of more bytes is no listing.
const LISTING_CAP: u64 = 32 << 20;
/// Tries in a row that bring nothing before a download is given up.
const TRIES: u32 = 3;

/// A model on a server.
pub(super) struct Repo<'a> {
    config: &'a HubConfig,
    name: &'a ModelName,
    agent: ureq::Agent,
}

/// The files of one commit.
#[derive(Debug)]
pub(super) struct Listing {
    pub commit: String,
    /// Those beside each other at the top; folders within are other forms of the model.
    pub files: Vec<Wanted>,
    /// Whether there are weights that only pickle can read.
    pub pickled: bool,
}

/// One file and its contents' name.
#[derive(Debug)]
pub(super) struct Wanted {
    pub name: String,
    pub blob: String,
    pub bytes: Option<u64>,
    /// Whether `blob` is the SHA-256 of the contents (else it is git's own hash).
    pub sha256: bool,
}

/// Why there is no listing.
pub(super) struct NoListing {
    pub error: Error,
    /// Whether the server was not there to answer.
    pub unreachable: bool,
}

/// Whether a server's word can be the name of a commit or a blob.
pub(super) fn is_hash(word: &str) -> bool {
    matches!(word.len(), 40 | 64) && word.chars().all(|c| matches!(c, '0'..='9' | 'a'..='f'))
}

impl<'a> Repo<'a> {
    pub fn new(config: &'a HubConfig, name: &'a ModelName) -> Self {
        let agent = ureq::Agent::config_builder()
            .http_status_as_error(false)
            // Large files come from another host, which must not see the token.
            .redirect_auth_headers(RedirectAuthHeaders::SameHost)
            .user_agent(concat!("roundpipe/", env!("CARGO_PKG_VERSION")))
            .timeout_resolve(Some(Duration::from_secs(10)))
            .timeout_connect(Some(Duration::from_secs(10)))
            .timeout_recv_response(Some(Duration::from_secs(60)))
            .timeout_per_read(Some(Duration::from_secs(60)))
            .build()
            .into();
        Self { config, name, agent }
    }

    fn id(&self) -> String {
        format!("{}/{}", self.name.owner, self.name.name)
    }

    /// An error that names the model.
    pub fn refused(&self, why: impl Into<String>) -> Error {
        Error::argument(shown(&self.id()), why)
    }

    /// Which files the revision has.
    pub fn listing(&self) -> Result<Listing, NoListing> {
        let revision = self.name.revision.replace('/', "%2F");
        let url = format!("{}/api/models/{}/revision/{revision}?blobs=true", self.config.endpoint, self.id());
        let failed = |error| NoListing { error, unreachable: false };
        let mut response = self.get(&url, None).map_err(|e| NoListing {
            error: self.unreached(&e),
            unreachable: !matches!(e, ureq::Error::BadUri(_)),
        })?;
        let status = response.status().as_u16();
        if status != 200 {
            return Err(NoListing {
                error: self.status(status),
                unreachable: status >= 500 || status == 429,
            });
        }
        let json = response.body_mut().with_config().limit(LISTING_CAP).read_to_vec();
        let json = json.map_err(|e| failed(self.unreached(&e)))?;
        self.parse(&json).map_err(failed)
    }

    fn parse(&self, json: &[u8]) -> Result<Listing> {
        let raw: RawListing = serde_json::from_slice(json).map_err(|e| {
            let e = one_line(&e.to_string());
            self.refused(format!("{} sent no list of files ({e}); check HF_ENDPOINT", self.config.endpoint))
        })?;
        let odd = |what: &str, word: &str| {
            let server = &self.config.endpoint;
            let word = shown(word);
            self.refused(format!("{server} sent {what} {word}, which is not safe to use; check HF_ENDPOINT"))
        };
        if !is_hash(&raw.sha) {
            return Err(odd("a commit", &raw.sha));
        }
        let mut listing = Listing { commit: raw.sha, files: Vec::new(), pickled: false };
        for file in raw.siblings {
            let name = file.rfilename;
            if !name.split('/').all(is_plain_name) {
                return Err(odd("a file name", &name));
            }
            listing.pickled |= name.ends_with(".bin") || name.ends_with(".pth");
            if name.contains('/') {
                continue;
            }
            let sha256 = file.lfs.is_some();
            let Some(blob) = file.lfs.map(|l| l.sha256).or(file.blob_id).filter(|b| is_hash(b)) else {
                return Err(odd("no usable hash for", &name));
            };
            listing.files.push(Wanted { name, blob, bytes: file.size, sha256 });
        }
        Ok(listing)
    }

    fn get(&self, url: &str, from: Option<u64>) -> Result<ureq::http::Response<ureq::Body>, ureq::Error> {
        let mut request = self.agent.get(url);
        if let Some(token) = &self.config.token {
            request = request.header("Authorization", format!("Bearer {token}"));
        }
        if let Some(from) = from {
            request = request.header("Range", format!("bytes={from}-"));
        }
        request.call()
    }

    fn unreached(&self, e: &ureq::Error) -> Error {
        let e = one_line(&e.to_string());
        let server = &self.config.endpoint;
        self.refused(format!("{server} cannot be reached ({e}); check the network, or pass a folder"))
    }

    /// What an answer other than success means for the user.
    fn status(&self, status: u16) -> Error {
        let (server, id) = (&self.config.endpoint, self.id());
        self.refused(match status {
            401 | 403 => format!(
                "{server} does not give it to you ({status}); accept its licence at {server}/{id} and set \
                 HF_TOKEN, or check the name"
            ),
            404 => {
                format!(
                    "{server} has no such model with revision {} (404); check the name",
                    self.name.revision
                )
            }
            429 => format!("{server} asks to wait (429); try again later, or set HF_TOKEN"),
            _ => format!("{server} answered with status {status}; try again later"),
        })
    }

    /// Makes sure that `blob` is there and whole.
    pub fn fetch(
        &self,
        commit: &str,
        file: &Wanted,
        blob: &Path,
        progress: &mut dyn FnMut(Progress<'_>),
    ) -> Result<()> {
        let whole = |meta: std::fs::Metadata| file.bytes.is_none_or(|bytes| meta.len() == bytes);
        if blob.metadata().is_ok_and(whole) {
            return Ok(());
        }
        let partial = blob.with_extension("incomplete");
        let fail = |e: std::io::Error| unwritten(&partial, &e);
        let mut out = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&partial)
            .map_err(fail)?;
        out.lock().map_err(fail)?;
        // Whoever held the lock may have finished the file meanwhile.
        if blob.metadata().is_ok_and(whole) {
            return Ok(());
        }
        let url = format!("{}/{}/resolve/{commit}/{}", self.config.endpoint, self.id(), encoded(&file.name));
        self.fill(&url, file, &mut out, &partial, progress)?;
        if let Err(e) = self.verify(file, &mut out, &partial) {
            // Going on from wrong bytes could never succeed.
            let _ = std::fs::remove_file(&partial);
            return Err(e);
        }
        out.sync_all().map_err(fail)?;
        std::fs::rename(&partial, blob).map_err(fail)
    }

    /// Appends to `out` until the file is whole; a connection that breaks is made anew while it brings bytes.
    fn fill(
        &self,
        url: &str,
        file: &Wanted,
        out: &mut File,
        path: &Path,
        progress: &mut dyn FnMut(Progress<'_>),
    ) -> Result<()> {
        let fail = |e: std::io::Error| unwritten(path, &e);
        let mut idle = 0;
        loop {
            let have = out.metadata().map_err(fail)?.len();
            if file.bytes.is_some_and(|bytes| have > bytes) {
                out.set_len(0).map_err(fail)?;
                continue;
            }
            if file.bytes == Some(have) {
                return Ok(());
            }
            let why = match self.attempt(url, have, file, out, path, progress)? {
                Attempt::Whole => return Ok(()),
                Attempt::Broken(why) => why,
            };
            let grown = out.metadata().map_err(fail)?.len() > have;
            idle = if grown { 0 } else { idle + 1 };
            if idle == TRIES {
                return Err(
                    self.refused(format!("{} did not arrive ({why}); run again to go on", shown(&file.name)))
                );
            }
            if idle > 0 {
                std::thread::sleep(Duration::from_millis(200) * idle);
            }
        }
    }

    /// One request, from byte `have` on.
    fn attempt(
        &self,
        url: &str,
        have: u64,
        file: &Wanted,
        out: &mut File,
        path: &Path,
        progress: &mut dyn FnMut(Progress<'_>),
    ) -> Result<Attempt> {
        let fail = |e: std::io::Error| unwritten(path, &e);
        let mut response = match self.get(url, (have > 0).then_some(have)) {
            Ok(response) => response,
            Err(e) => return Ok(Attempt::Broken(one_line(&e.to_string()))),
        };
        let mut done = match response.status().as_u16() {
            206 if goes_on_from(&response, have) => have,
            200 => 0,
            // The server cannot go on from here: start anew.
            206 | 416 => {
                out.set_len(0).map_err(fail)?;
                return Ok(Attempt::Broken("the server could not go on".into()));
            }
            status @ (429 | 500..) => return Ok(Attempt::Broken(format!("status {status}"))),
            status => return Err(self.status(status)),
        };
        out.set_len(done).map_err(fail)?;
        out.seek(SeekFrom::Start(done)).map_err(fail)?;
        let mut body = response.body_mut().as_reader();
        let mut buffer = vec![0; 1 << 20];
        loop {
            let read = match body.read(&mut buffer) {
                Ok(0) => break,
                Ok(read) => read,
                Err(e) => return Ok(Attempt::Broken(one_line(&e.to_string()))),
            };
            done += read as u64;
            if file.bytes.is_some_and(|bytes| done > bytes) {
                return Err(
                    self.refused(format!("{} is longer than the server said; run again", shown(&file.name)))
                );
            }
            out.write_all(&buffer[..read]).map_err(fail)?;
            progress(Progress { file: &file.name, done_bytes: done, total_bytes: file.bytes });
        }
        let whole = file.bytes.is_none_or(|bytes| done == bytes);
        Ok(if whole { Attempt::Whole } else { Attempt::Broken("the connection ended early".into()) })
    }

    /// Compares the contents with the hash that the server gave, where it is one of the contents alone.
    fn verify(&self, file: &Wanted, out: &mut File, path: &Path) -> Result<()> {
        if !file.sha256 {
            return Ok(());
        }
        let fail = |e: std::io::Error| Error::file(path, unreadable(path, &e));
        out.seek(SeekFrom::Start(0)).map_err(fail)?;
        let mut hash = digest::Context::new(&digest::SHA256);
        let mut buffer = vec![0; 1 << 20];
        loop {
            match out.read(&mut buffer).map_err(fail)? {
                0 => break,
                read => hash.update(&buffer[..read]),
            }
        }
        let found: String = hash.finish().as_ref().iter().map(|b| format!("{b:02x}")).collect();
        if found == file.blob {
            return Ok(());
        }
        let why = format!("{} arrived damaged (its SHA-256 is {found}); run again", shown(&file.name));
        Err(self.refused(why))
    }
}

/// How a request ended.
enum Attempt {
    Whole,
    Broken(String),
}

/// Whether a partial answer starts at the byte that was asked for.
fn goes_on_from(response: &ureq::http::Response<ureq::Body>, have: u64) -> bool {
    let range = response.headers().get("content-range").and_then(|v| v.to_str().ok());
    range.is_some_and(|r| r.trim().strip_prefix("bytes ").is_some_and(|r| r.starts_with(&format!("{have}-"))))
}

/// A file name as part of a URL.
fn encoded(name: &str) -> String {
    let mut out = String::new();
    for byte in name.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'.' | b'-' | b'_' => out.push(char::from(byte)),
            _ => out.push_str(&format!("%{byte:02X}")),
        }
    }
    out
}

#[derive(serde::Deserialize)]
struct RawListing {
    sha: String,
    siblings: Vec<RawFile>,
}

#[derive(serde::Deserialize)]
struct RawFile {
    rfilename: String,
    #[serde(rename = "blobId")]
    blob_id: Option<String>,
    size: Option<u64>,
    lfs: Option<RawLfs>,
}

#[derive(serde::Deserialize)]
struct RawLfs {
    sha256: String,
}
