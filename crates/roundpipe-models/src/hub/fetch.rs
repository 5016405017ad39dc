//! Asking a server for the files of a model.
//!
//! A listing comes first, then one file at a time into `{blob}.incomplete`, and grows only by bytes
//! that follow the ones it has. Programs that want the same file take turns:
//!
//! 1. A program that writes, empties or renames an incomplete file holds its lock, and has made sure
//!    since that the name still leads to the file it has locked.
//! 2. A damaged file is emptied, not removed, so that a program waiting for the lock waits for the
//!    file that has the name.
//! 3. A file gets its final name only after its hash was found to be the listing's: SHA-256 for
//!    large files, git's own hash (SHA-1) for the others.
//!
//! The token goes to the endpoint's own scheme, host and port, and nowhere else.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::time::Duration;

use ring::digest;
use roundpipe_files::error::{unreadable, unwritten};
use roundpipe_files::text::{one_line, shown};
use ureq::http::Uri;

use super::{HubConfig, ModelName, Progress};
use crate::error::{Error, Result};
use crate::folder::is_plain_name;
use crate::limits;

/// A listing of more bytes is no listing.
const LISTING_CAP: u64 = 32 << 20;
/// Tries in a row that bring nothing before a download is given up.
const TRIES: u32 = 3;
/// Redirects that are followed for one request.
const REDIRECTS: usize = 10;

type Response = ureq::http::Response<ureq::Body>;

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
    pub hash: Hash,
}

/// What the name of a blob is the hash of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Hash {
    /// SHA-256 of the contents.
    Sha256,
    /// Git's: SHA-1 of `blob`, the length and the contents.
    Git,
}

/// Why a server gave no answer.
struct NoAnswer {
    why: String,
    /// Whether it may give one later.
    unreachable: bool,
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
            // Large files come from another host, which must not see the token: see `get`.
            .max_redirects(0)
            .user_agent(concat!("roundpipe/", env!("CARGO_PKG_VERSION")))
            .timeout_resolve(Some(Duration::from_secs(10)))
            .timeout_connect(Some(Duration::from_secs(10)))
            .timeout_recv_response(Some(Duration::from_secs(60)))
            .timeout_per_read(Some(Duration::from_secs(60)))
            .build()
            .into();
        Self {
            config,
            name,
            agent,
        }
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
        let url = format!(
            "{}/api/models/{}/revision/{revision}?blobs=true",
            self.config.endpoint,
            self.id()
        );
        let failed = |error| NoListing {
            error,
            unreachable: false,
        };
        let mut response = self.get(&url, None).map_err(|e| NoListing {
            error: self.unreached(&e.why),
            unreachable: e.unreachable,
        })?;
        let status = response.status().as_u16();
        if status != 200 {
            return Err(NoListing {
                error: self.status(status),
                unreachable: status >= 500 || status == 429,
            });
        }
        let json = response
            .body_mut()
            .with_config()
            .limit(LISTING_CAP)
            .read_to_vec();
        let json = json.map_err(|e| failed(self.unreached(&e.to_string())))?;
        self.parse(&json).map_err(failed)
    }

    fn parse(&self, json: &[u8]) -> Result<Listing> {
        let raw: RawListing = serde_json::from_slice(json).map_err(|e| {
            let e = one_line(&e.to_string());
            self.refused(format!(
                "{} sent no list of files ({e}); check HF_ENDPOINT",
                self.config.endpoint
            ))
        })?;
        let odd = |what: &str, word: &str| {
            let server = &self.config.endpoint;
            let word = shown(word);
            self.refused(format!(
                "{server} sent {what} {word}, which is not safe to use; check HF_ENDPOINT"
            ))
        };
        if !is_hash(&raw.sha) {
            return Err(odd("a commit", &raw.sha));
        }
        let mut listing = Listing {
            commit: raw.sha,
            files: Vec::new(),
            pickled: false,
        };
        for file in raw.siblings {
            let name = file.rfilename;
            if !name.split('/').all(is_plain_name) {
                return Err(odd("a file name", &name));
            }
            listing.pickled |= name.ends_with(".bin") || name.ends_with(".pth");
            if name.contains('/') {
                continue;
            }
            let (blob, hash, bytes) = match file.lfs {
                Some(large) => (Some(large.sha256), Hash::Sha256, file.size.or(large.size)),
                None => (file.blob_id, Hash::Git, file.size),
            };
            let Some(blob) = blob.filter(|b| is_hash(b) && b.len() == hash.digits()) else {
                return Err(odd("no usable hash for", &name));
            };
            listing.files.push(Wanted {
                name,
                blob,
                bytes,
                hash,
            });
        }
        Ok(listing)
    }

    /// Asks for a URL and follows where it leads. Only requests to the endpoint itself carry the
    /// token.
    fn get(&self, url: &str, from: Option<u64>) -> Result<Response, NoAnswer> {
        let stop = |why: String| NoAnswer {
            why,
            unreachable: false,
        };
        let parse = |url: &str| url.parse::<Uri>().map_err(|e| stop(e.to_string()));
        let home = origin(&parse(&self.config.endpoint)?);
        let mut at = parse(url)?;
        for _ in 0..=REDIRECTS {
            let mut request = self.agent.get(&at);
            if let Some(token) = self.config.token.as_ref().filter(|_| origin(&at) == home) {
                request = request.header("Authorization", format!("Bearer {token}"));
            }
            if let Some(from) = from {
                request = request.header("Range", format!("bytes={from}-"));
            }
            let response = request.call().map_err(|e| NoAnswer {
                unreachable: !matches!(e, ureq::Error::BadUri(_)),
                why: e.to_string(),
            })?;
            if !matches!(response.status().as_u16(), 301 | 302 | 303 | 307 | 308) {
                return Ok(response);
            }
            let target = response
                .headers()
                .get("location")
                .and_then(|value| value.to_str().ok());
            let Some(target) = target else {
                return Err(stop("it redirects to nowhere".into()));
            };
            at = parse(&joined(&at, target))?;
        }
        Err(stop(format!("it redirects more than {REDIRECTS} times")))
    }

    fn unreached(&self, why: &str) -> Error {
        let server = &self.config.endpoint;
        let why = one_line(why);
        self.refused(format!(
            "{server} cannot be reached ({why}); check the network, or pass a folder"
        ))
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
        let whole = || {
            blob.metadata()
                .is_ok_and(|meta| file.bytes.is_none_or(|bytes| meta.len() == bytes))
        };
        if whole() {
            return Ok(());
        }
        let most = self.most_bytes(file)?;
        let partial = blob.with_extension("incomplete");
        let fail = |e: std::io::Error| Error::from(unwritten(&partial, &e));
        let Some(mut out) = lock(&partial, whole).map_err(fail)? else {
            return Ok(());
        };
        let url = format!(
            "{}/{}/resolve/{commit}/{}",
            self.config.endpoint,
            self.id(),
            encoded(&file.name)
        );
        let mut download = Download {
            repo: self,
            url,
            file,
            most,
            out: &mut out,
            path: &partial,
        };
        download.fill(progress)?;
        if let Err(e) = download.verify() {
            // Going on from wrong bytes could never succeed.
            out.set_len(0).map_err(fail)?;
            return Err(e);
        }
        out.sync_all().map_err(fail)?;
        std::fs::rename(&partial, blob).map_err(fail)
    }

    /// The most bytes that are taken for a file.
    fn most_bytes(&self, file: &Wanted) -> Result<u64> {
        let name = shown(&file.name);
        if file.name.ends_with(".safetensors") {
            let unsized_file = || {
                self.refused(format!(
                    "the server names no size for {name}; check HF_ENDPOINT"
                ))
            };
            return file.bytes.ok_or_else(unsized_file);
        }
        let most = limits::VOCABULARY.bytes;
        match file.bytes {
            Some(bytes) if bytes > most => Err(self.refused(format!(
                "{name} has {bytes} bytes, the most for such a file is {most}; check HF_ENDPOINT"
            ))),
            Some(bytes) => Ok(bytes),
            None => Ok(most),
        }
    }
}

/// One file on its way into the cache.
struct Download<'a> {
    repo: &'a Repo<'a>,
    url: String,
    file: &'a Wanted,
    most: u64,
    /// The incomplete file, locked.
    out: &'a mut File,
    path: &'a Path,
}

impl Download<'_> {
    fn fail(&self, e: &std::io::Error) -> Error {
        unwritten(self.path, e).into()
    }

    fn have(&self) -> Result<u64> {
        Ok(self.out.metadata().map_err(|e| self.fail(&e))?.len())
    }

    fn cut(&self, bytes: u64) -> Result<()> {
        self.out.set_len(bytes).map_err(|e| self.fail(&e))
    }

    /// Appends until the file is whole; a connection that breaks is made anew while it brings
    /// bytes.
    fn fill(&mut self, progress: &mut dyn FnMut(Progress<'_>)) -> Result<()> {
        let mut idle = 0;
        loop {
            let have = self.have()?;
            if have > self.most {
                self.cut(0)?;
                continue;
            }
            if self.file.bytes == Some(have) {
                return Ok(());
            }
            let why = match self.attempt(have, progress)? {
                Attempt::Whole => return Ok(()),
                Attempt::Broken(why) => why,
            };
            idle = if self.have()? > have { 0 } else { idle + 1 };
            if idle == TRIES {
                let name = shown(&self.file.name);
                return Err(self
                    .repo
                    .refused(format!("{name} did not arrive ({why}); run again to go on")));
            }
            if idle > 0 {
                std::thread::sleep(Duration::from_millis(200) * idle);
            }
        }
    }

    /// One request, from byte `have` on.
    fn attempt(&mut self, have: u64, progress: &mut dyn FnMut(Progress<'_>)) -> Result<Attempt> {
        let mut response = match self.repo.get(&self.url, (have > 0).then_some(have)) {
            Ok(response) => response,
            Err(e) => return Ok(Attempt::Broken(one_line(&e.why))),
        };
        let mut done = match response.status().as_u16() {
            206 if goes_on_from(&response, have) => have,
            200 => 0,
            // The server cannot go on from here: start anew.
            206 | 416 => {
                self.cut(0)?;
                return Ok(Attempt::Broken("the server could not go on".into()));
            }
            status @ (429 | 500..) => return Ok(Attempt::Broken(format!("status {status}"))),
            status => return Err(self.repo.status(status)),
        };
        self.cut(done)?;
        self.out
            .seek(SeekFrom::Start(done))
            .map_err(|e| self.fail(&e))?;
        let mut body = response.body_mut().as_reader();
        let mut buffer = vec![0; 1 << 20];
        loop {
            let read = match body.read(&mut buffer) {
                Ok(0) => break,
                Ok(read) => read,
                Err(e) => return Ok(Attempt::Broken(one_line(&e.to_string()))),
            };
            done += read as u64;
            if done > self.most {
                let name = shown(&self.file.name);
                return Err(self.repo.refused(format!(
                    "{name} is longer than the server may send; run again"
                )));
            }
            self.out
                .write_all(&buffer[..read])
                .map_err(|e| self.fail(&e))?;
            progress(Progress {
                file: &self.file.name,
                done_bytes: done,
                total_bytes: self.file.bytes,
            });
        }
        let whole = self.file.bytes.is_none_or(|bytes| done == bytes);
        Ok(if whole {
            Attempt::Whole
        } else {
            Attempt::Broken("the connection ended early".into())
        })
    }

    /// Compares the contents with the hash that the server gave.
    fn verify(&mut self) -> Result<()> {
        let path = self.path;
        let fail = |e: std::io::Error| Error::file(path, unreadable(path, &e));
        let mut hash = self.file.hash.begin(self.have()?);
        self.out.seek(SeekFrom::Start(0)).map_err(fail)?;
        let mut buffer = vec![0; 1 << 20];
        loop {
            match self.out.read(&mut buffer).map_err(fail)? {
                0 => break,
                read => hash.update(&buffer[..read]),
            }
        }
        let found: String = hash
            .finish()
            .as_ref()
            .iter()
            .map(|b| format!("{b:02x}"))
            .collect();
        if found == self.file.blob {
            return Ok(());
        }
        let (name, kind) = (shown(&self.file.name), self.file.hash.name());
        Err(self.repo.refused(format!(
            "{name} arrived damaged (its {kind} is {found}); run again"
        )))
    }
}

impl Hash {
    fn name(self) -> &'static str {
        match self {
            Self::Sha256 => "SHA-256",
            Self::Git => "git hash",
        }
    }

    /// Length of a hash in hexadecimal digits.
    fn digits(self) -> usize {
        match self {
            Self::Sha256 => 64,
            Self::Git => 40,
        }
    }

    /// The hash before the first of `bytes` bytes of contents.
    fn begin(self, bytes: u64) -> digest::Context {
        match self {
            Self::Sha256 => digest::Context::new(&digest::SHA256),
            Self::Git => {
                let mut hash = digest::Context::new(&digest::SHA1_FOR_LEGACY_USE_ONLY);
                hash.update(format!("blob {bytes}\0").as_bytes());
                hash
            }
        }
    }
}

/// The incomplete file at `path`, locked; none when the whole one is there, which the program that
/// held the lock may have finished.
fn lock(path: &Path, whole: impl Fn() -> bool) -> std::io::Result<Option<File>> {
    loop {
        let file = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)?;
        if !file.metadata()?.is_file() {
            return Err(std::io::Error::other("it is no regular file"));
        }
        file.lock()?;
        if whole() {
            return Ok(None);
        }
        if has_name(&file, path)? {
            return Ok(Some(file));
        }
    }
}

/// Whether a name still leads to an open file.
#[cfg(unix)]
fn has_name(file: &File, path: &Path) -> std::io::Result<bool> {
    use std::os::unix::fs::MetadataExt;
    let place = |meta: std::fs::Metadata| (meta.dev(), meta.ino());
    match path.metadata() {
        Ok(meta) => Ok(place(meta) == place(file.metadata()?)),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(false),
        Err(e) => Err(e),
    }
}

/// Elsewhere a file that is open keeps its name.
#[cfg(not(unix))]
fn has_name(_: &File, _: &Path) -> std::io::Result<bool> {
    Ok(true)
}

/// Scheme, host and port of a URL: who answers there.
fn origin(url: &Uri) -> (String, String, u16) {
    let scheme = url.scheme_str().unwrap_or_default().to_ascii_lowercase();
    let port = url
        .port_u16()
        .unwrap_or(if scheme == "https" { 443 } else { 80 });
    (
        scheme,
        url.host().unwrap_or_default().to_ascii_lowercase(),
        port,
    )
}

/// Where a `Location` leads from a URL.
fn joined(base: &Uri, target: &str) -> String {
    let scheme = base.scheme_str().unwrap_or("https");
    let host = base.authority().map_or("", |authority| authority.as_str());
    if target.starts_with("http://") || target.starts_with("https://") {
        target.to_owned()
    } else if target.starts_with("//") {
        format!("{scheme}:{target}")
    } else if target.starts_with('/') {
        format!("{scheme}://{host}{target}")
    } else {
        let folder = base
            .path()
            .rsplit_once('/')
            .map_or("", |(folder, _)| folder);
        format!("{scheme}://{host}{folder}/{target}")
    }
}

/// How a request ended.
enum Attempt {
    Whole,
    Broken(String),
}

/// Whether a partial answer starts at the byte that was asked for.
fn goes_on_from(response: &Response, have: u64) -> bool {
    let range = response
        .headers()
        .get("content-range")
        .and_then(|v| v.to_str().ok());
    range.is_some_and(|r| {
        r.trim()
            .strip_prefix("bytes ")
            .is_some_and(|r| r.starts_with(&format!("{have}-")))
    })
}

/// A file name as part of a URL.
fn encoded(name: &str) -> String {
    let mut out = String::new();
    for byte in name.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'.' | b'-' | b'_' => {
                out.push(char::from(byte))
            }
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
    size: Option<u64>,
}

#[cfg(all(test, unix))]
mod tests {
    use std::fs::File;
    use std::time::Duration;

    use super::{has_name, joined, lock, origin};

    /// A program that waits for a file which then loses its name gets the one that has the name, not
    /// the one it waited for.
    #[test]
    fn the_lock_is_that_of_the_file_with_the_name() {
        let path =
            std::env::temp_dir().join(format!("roundpipe-lock-{}.incomplete", std::process::id()));
        let first = lock(&path, || false).unwrap().unwrap();
        let waiting = {
            let path = path.clone();
            std::thread::spawn(move || lock(&path, || false).unwrap().unwrap())
        };
        // Time for the other thread to open the file; without it the test proves less, and still
        // passes.
        std::thread::sleep(Duration::from_millis(200));
        std::fs::remove_file(&path).unwrap();
        let second = File::create(&path).unwrap();
        assert!(!has_name(&first, &path).unwrap() && has_name(&second, &path).unwrap());
        drop(first);
        let got = waiting.join().unwrap();
        assert!(
            has_name(&got, &path).unwrap(),
            "the lock is on a file without a name"
        );
        drop(got);
        assert!(
            lock(&path, || true).unwrap().is_none(),
            "a whole file needs no lock"
        );
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn who_answers_is_scheme_host_and_port() {
        let of = |url: &str| origin(&url.parse().unwrap());
        assert_eq!(of("https://Hub.co/x"), of("https://hub.co:443/y?z"));
        assert_eq!(of("http://hub.co"), of("http://hub.co:80/"));
        for other in [
            "http://hub.co",
            "https://hub.co:8443",
            "https://cdn.hub.co",
            "https://hub.com",
        ] {
            assert_ne!(of("https://hub.co"), of(other), "{other}");
        }
        let base = "https://hub.co:8/a/b?q".parse().unwrap();
        for (target, want) in [
            ("http://x/y", "http://x/y"),
            ("//x/y", "https://x/y"),
            ("/y?z", "https://hub.co:8/y?z"),
            ("y", "https://hub.co:8/a/y"),
        ] {
            assert_eq!(joined(&base, target), want);
        }
    }
}
