//! The cache and the hub, against a small server in this process.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use roundpipe_models::HubConfig;

use crate::made::Scratch;

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
const INDEX: &str = r#"{"weight_map":{"w":"model-1.safetensors","v":"model-2.safetensors"}}"#;

/// What the server does, and what it was asked.
#[derive(Default)]
struct World {
    files: HashMap<String, Vec<u8>>,
    /// Status for everything, when not 0.
    status: u16,
    /// Bytes after which the connection breaks, once for each entry.
    breaks: Vec<usize>,
    ranges: bool,
    /// Replaces the listing.
    listing: Option<String>,
    /// Where shards are sent from instead.
    elsewhere: Option<String>,
    /// Wrong contents for files whose names end so.
    damaged: Option<&'static str>,
    /// Whether the listing names no sizes.
    unsized_files: bool,
    /// Names a file whose answers end in the middle, without a length.
    halved: Option<&'static str>,
    asked: Vec<String>,
}

struct Server {
    world: Arc<Mutex<World>>,
    endpoint: String,
}

impl Server {
    fn start(world: World) -> Self {
        let world = Arc::new(Mutex::new(world));
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let shared = world.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                // A client that goes away is not this server's failure.
                let _ = answer(stream, &shared);
            }
        });
        Self { world, endpoint }
    }

    fn config(&self, cache: &Scratch) -> HubConfig {
        let endpoint = self.endpoint.clone();
        HubConfig {
            cache: cache.0.clone(),
            endpoint,
            token: None,
            offline: false,
        }
    }

    fn asked(&self) -> Vec<String> {
        std::mem::take(&mut self.world.lock().unwrap().asked)
    }
}

fn answer(stream: TcpStream, world: &Mutex<World>) -> std::io::Result<()> {
    let mut lines = BufReader::new(stream.try_clone()?).lines();
    let request = lines.next().unwrap_or(Ok(String::new()))?;
    let (mut range, mut token) = (0, String::new());
    for line in lines {
        let line = line?.to_lowercase();
        if line.is_empty() {
            break;
        }
        if let Some(from) = line.strip_prefix("range: bytes=") {
            range = from.trim_end_matches('-').parse().unwrap();
        }
        if let Some(value) = line.strip_prefix("authorization: ") {
            token = format!(" ({value})");
        }
    }
    let path = request.split(' ').nth(1).unwrap_or_default().to_owned();
    let mut world = world.lock().unwrap();
    world.asked.push(format!("{path}{token} {range}"));
    if let Some(name) = world.halved.filter(|name| path.ends_with(name)) {
        let bytes = world.contents(name).unwrap_or_default();
        let mut stream = stream;
        write!(stream, "HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")?;
        return stream.write_all(&bytes[..bytes.len() / 2]);
    }
    if let Some(host) = world
        .elsewhere
        .as_ref()
        .filter(|_| path.ends_with(".safetensors"))
    {
        let name = path.rsplit('/').next().unwrap_or_default();
        let mut stream = stream;
        let head = "HTTP/1.1 302 Found\r\nContent-Length: 0\r\nConnection: close";
        return write!(
            stream,
            "{head}\r\nLocation: {host}/store/{name}?signed=1\r\n\r\n"
        );
    }
    let body = match (world.status, path.starts_with("/api/")) {
        (0, true) => Some(world.listing()),
        (0, false) => world.contents(
            path.split('?')
                .next()
                .and_then(|p| p.rsplit('/').next())
                .unwrap_or_default(),
        ),
        _ => None,
    };
    reply(stream, &mut world, body, range)
}

fn reply(
    mut stream: TcpStream,
    world: &mut World,
    body: Option<Vec<u8>>,
    range: usize,
) -> std::io::Result<()> {
    let Some(body) = body else {
        let status = if world.status == 0 { 404 } else { world.status };
        return write!(
            stream,
            "HTTP/1.1 {status} No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        );
    };
    let from = if world.ranges { range } else { 0 };
    let head = if from > 0 {
        "206 Partial Content"
    } else {
        "200 OK"
    };
    let rest = &body[from.min(body.len())..];
    write!(
        stream,
        "HTTP/1.1 {head}\r\nContent-Length: {}\r\nConnection: close\r\n",
        rest.len()
    )?;
    if from > 0 {
        write!(
            stream,
            "Content-Range: bytes {from}-{}/{}\r\n",
            body.len() - 1,
            body.len()
        )?;
    }
    write!(stream, "\r\n")?;
    let cut = if rest.len() > 10_000 {
        world.breaks.pop().unwrap_or(rest.len())
    } else {
        rest.len()
    };
    stream.write_all(&rest[..cut.min(rest.len())])
}

impl World {
    /// A small model in two shards, and things beside it that nobody asked for.
    fn model() -> Self {
        let shard = |seed: usize| {
            (0..50_000)
                .map(|i| ((i * 7 + seed * 13 + i / 251) % 256) as u8)
                .collect()
        };
        let files = HashMap::from([
            ("config.json".to_owned(), b"{}".to_vec()),
            ("tokenizer.json".to_owned(), b"{\"t\":1}".to_vec()),
            ("chat_template.jinja".to_owned(), b"{{ x }}".to_vec()),
            (
                "model.safetensors.index.json".to_owned(),
                INDEX.as_bytes().to_vec(),
            ),
            ("model-1.safetensors".to_owned(), shard(1)),
            ("model-2.safetensors".to_owned(), shard(2)),
            ("consolidated.safetensors".to_owned(), vec![1; 10]),
            ("README.md".to_owned(), b"read me".to_vec()),
            ("original/model.safetensors".to_owned(), vec![2; 10]),
        ]);
        Self {
            files,
            ranges: true,
            ..Default::default()
        }
    }

    fn contents(&self, name: &str) -> Option<Vec<u8>> {
        let mut bytes = self.files.get(name)?.clone();
        if self.damaged.is_some_and(|end| name.ends_with(end)) {
            bytes[1] ^= 1;
        }
        Some(bytes)
    }

    fn listing(&self) -> Vec<u8> {
        if let Some(text) = &self.listing {
            return text.clone().into_bytes();
        }
        let mut names: Vec<_> = self.files.keys().collect();
        names.sort();
        let files: Vec<_> = names
            .iter()
            .map(|name| {
                let bytes = &self.files[*name];
                let mut file = serde_json::json!({ "rfilename": name, "blobId": git_hash(bytes) });
                if !self.unsized_files {
                    file["size"] = bytes.len().into();
                }
                if name.ends_with(".safetensors") {
                    file["lfs"] =
                        serde_json::json!({ "sha256": sha256(bytes), "size": bytes.len() });
                }
                file
            })
            .collect();
        serde_json::json!({ "sha": COMMIT, "siblings": files })
            .to_string()
            .into_bytes()
    }
}

fn sha256(bytes: &[u8]) -> String {
    hex(ring::digest::digest(&ring::digest::SHA256, bytes))
}

/// What git calls a file of these bytes.
fn git_hash(bytes: &[u8]) -> String {
    let object = [format!("blob {}\0", bytes.len()).as_bytes(), bytes].concat();
    hex(ring::digest::digest(
        &ring::digest::SHA1_FOR_LEGACY_USE_ONLY,
        &object,
    ))
}

fn hex(hash: ring::digest::Digest) -> String {
    hash.as_ref().iter().map(|b| format!("{b:02x}")).collect()
}

fn names(folder: &PathBuf) -> Vec<String> {
    let mut names: Vec<_> = std::fs::read_dir(folder)
        .unwrap()
        .flatten()
        .map(|e| e.file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[track_caller]
fn refused(config: &HubConfig, model: &str, words: &[&str]) {
    let text = config.resolve(model).unwrap_err().to_string();
    assert_eq!(text.lines().count(), 1, "{text}");
    for word in words {
        assert!(text.contains(word), "no `{word}` in: {text}");
    }
}

/// A first download brings what the model needs and nothing else, in the layout that other tools
/// read; the second time only the listing is asked for, and offline nothing.
#[test]
fn a_fresh_download_fills_the_cache() {
    let (server, cache) = (Server::start(World::model()), Scratch::new("hub"));
    let mut config = server.config(&cache);
    let mut last = HashMap::new();
    let folder = config
        .resolve_with("me/tiny", &mut |p| {
            last.insert(p.file.to_owned(), (p.done_bytes, p.total_bytes));
        })
        .unwrap();
    assert_eq!(
        folder,
        cache.join(&format!("models--me--tiny/snapshots/{COMMIT}"))
    );
    let want = [
        "chat_template.jinja",
        "config.json",
        "model-1.safetensors",
        "model-2.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    ];
    assert_eq!(names(&folder), want);
    assert_eq!(last["model-1.safetensors"], (50_000, Some(50_000)));
    let expected = World::model().files;
    for name in want {
        assert_eq!(
            std::fs::read(folder.join(name)).unwrap(),
            expected[name],
            "{name}"
        );
        #[cfg(unix)]
        assert!(
            std::fs::read_link(folder.join(name))
                .unwrap()
                .starts_with("../../blobs")
        );
    }
    let store = cache.join("models--me--tiny");
    assert_eq!(
        std::fs::read_to_string(store.join("refs/main")).unwrap(),
        COMMIT
    );
    assert!(
        store
            .join("blobs")
            .join(sha256(&expected["model-1.safetensors"]))
            .is_file()
    );
    assert_eq!(server.asked().len(), 1 + want.len());
    assert_eq!(config.resolve("me/tiny").unwrap(), folder);
    assert_eq!(
        server.asked(),
        ["/api/models/me/tiny/revision/main?blobs=true 0"]
    );
    config.offline = true;
    for model in ["me/tiny".to_owned(), format!("me/tiny@{COMMIT}")] {
        assert_eq!(config.resolve(&model).unwrap(), folder);
    }
    assert!(server.asked().is_empty(), "offline must not ask");
    refused(
        &config,
        "me/other",
        &["`me/other`", "not in the cache", "HF_HUB_OFFLINE"],
    );
    refused(&config, "me/tiny@v2", &["`me/tiny@v2`", "HF_HUB_OFFLINE"]);
    assert!(server.asked().is_empty(), "offline must not ask");
}

/// A connection that breaks is taken up where it stopped, within a call and between calls.
#[test]
fn downloads_go_on_where_they_stopped() {
    let world = World {
        breaks: vec![7_000, 20_000],
        ..World::model()
    };
    let (server, cache) = (Server::start(world), Scratch::new("hub"));
    let expected = World::model().files;
    // Left by an earlier run.
    let blobs = cache.join("models--me--tiny/blobs");
    std::fs::create_dir_all(&blobs).unwrap();
    let second = &expected["model-2.safetensors"];
    std::fs::write(
        blobs.join(format!("{}.incomplete", sha256(second))),
        &second[..12_345],
    )
    .unwrap();
    let folder = server.config(&cache).resolve("me/tiny@v1").unwrap();
    for name in ["model-1.safetensors", "model-2.safetensors"] {
        assert_eq!(
            std::fs::read(folder.join(name)).unwrap(),
            expected[name],
            "{name}"
        );
    }
    let asked = server.asked();
    let shard =
        |i: u32, from: u32| format!("/me/tiny/resolve/{COMMIT}/model-{i}.safetensors {from}");
    for line in [
        shard(1, 0),
        shard(1, 20_000),
        shard(1, 27_000),
        shard(2, 12_345),
    ] {
        assert!(asked.contains(&line), "no {line} in {asked:?}");
    }
    assert_eq!(
        std::fs::read_to_string(cache.join("models--me--tiny/refs/v1")).unwrap(),
        COMMIT
    );
    assert!(names(&blobs).iter().all(|n| !n.ends_with("incomplete")));
}

/// Weights come from another host: ranges are asked for there, too, and the token stays with the
/// hub.
#[test]
fn the_token_does_not_follow_to_another_host() {
    let store = Server::start(World::model());
    let other = store.endpoint.replace("127.0.0.1", "localhost");
    let (server, cache) = (
        Server::start(World {
            elsewhere: Some(other),
            ..World::model()
        }),
        Scratch::new("hub"),
    );
    let config = HubConfig {
        token: Some("hf_secret".into()),
        ..server.config(&cache)
    };
    let second = &World::model().files["model-2.safetensors"];
    let blobs = cache.join("models--me--tiny/blobs");
    std::fs::create_dir_all(&blobs).unwrap();
    std::fs::write(
        blobs.join(format!("{}.incomplete", sha256(second))),
        &second[..12_345],
    )
    .unwrap();
    let folder = config.resolve("me/tiny").unwrap();
    assert_eq!(
        &std::fs::read(folder.join("model-2.safetensors")).unwrap(),
        second
    );
    assert!(server.asked().iter().all(|line| line.contains("hf_secret")));
    let asked = store.asked();
    assert_eq!(
        asked,
        [
            "/store/model-1.safetensors?signed=1 0",
            "/store/model-2.safetensors?signed=1 12345"
        ]
    );
}

/// Another port of the same machine is another server, and another scheme is another listener:
/// neither gets the token.
#[test]
fn the_token_does_not_follow_to_another_port() {
    let store = Server::start(World::model());
    let elsewhere = Some(store.endpoint.clone());
    let (server, cache) = (
        Server::start(World {
            elsewhere,
            ..World::model()
        }),
        Scratch::new("hub"),
    );
    let config = HubConfig {
        token: Some("hf_secret".into()),
        ..server.config(&cache)
    };
    config.resolve("me/tiny").unwrap();
    assert!(server.asked().iter().all(|line| line.contains("hf_secret")));
    let asked = store.asked();
    assert!(
        asked.len() == 2 && asked.iter().all(|line| !line.contains("hf_secret")),
        "{asked:?}"
    );
}

/// A redirect may name a path alone: it leads to the same server, which then sees the token again.
#[test]
fn a_redirect_may_stay_on_the_server() {
    let (server, cache) = (Server::start(World::model()), Scratch::new("hub"));
    server.world.lock().unwrap().elsewhere = Some(String::new());
    let config = HubConfig {
        token: Some("hf_secret".into()),
        ..server.config(&cache)
    };
    config.resolve("me/tiny").unwrap();
    let asked = server.asked();
    assert!(
        asked.contains(&"/store/model-1.safetensors?signed=1 (bearer hf_secret) 0".to_owned()),
        "{asked:?}"
    );
}

/// A server that ignores ranges sends everything again: the file must not be both parts.
#[test]
fn a_server_without_ranges_starts_anew() {
    let world = World {
        ranges: false,
        breaks: vec![20_000],
        ..World::model()
    };
    let (server, cache) = (Server::start(world), Scratch::new("hub"));
    let folder = server.config(&cache).resolve("me/tiny").unwrap();
    let got = std::fs::read(folder.join("model-1.safetensors")).unwrap();
    assert_eq!(got, World::model().files["model-1.safetensors"]);
}

/// Contents that are not what the server promised never get a name in the cache.
#[test]
fn damaged_files_are_refused() {
    for (end, hash) in [
        (".safetensors", "SHA-256"),
        ("config.json", "git hash"),
        (".jinja", "git hash"),
    ] {
        let world = World {
            damaged: Some(end),
            ..World::model()
        };
        let (server, cache) = (Server::start(world), Scratch::new("hub"));
        let config = server.config(&cache);
        refused(
            &config,
            "me/tiny",
            &["`me/tiny`", end, hash, "damaged", "run again"],
        );
        let blobs = cache.join("models--me--tiny/blobs");
        for name in names(&blobs)
            .iter()
            .filter(|name| name.ends_with("incomplete"))
        {
            assert_eq!(
                std::fs::metadata(blobs.join(name)).unwrap().len(),
                0,
                "{name} keeps wrong bytes"
            );
        }
        let expected = World::model().files;
        let whole: Vec<String> = expected
            .values()
            .flat_map(|bytes| [sha256(bytes), git_hash(bytes)])
            .collect();
        for name in names(&blobs)
            .iter()
            .filter(|name| !name.ends_with("incomplete"))
        {
            assert!(whole.contains(name), "{name} is no hash of a file");
            let bytes = std::fs::read(blobs.join(name)).unwrap();
            assert!(
                [sha256(&bytes), git_hash(&bytes)].contains(name),
                "{name} has other contents"
            );
        }
        server.world.lock().unwrap().damaged = None;
        let folder = config.resolve("me/tiny").unwrap();
        assert_eq!(
            std::fs::read(folder.join("config.json")).unwrap(),
            expected["config.json"]
        );
    }
}

/// Where the server names no size, a connection that ends early must not make half a file a whole
/// one, and no file is endless.
#[test]
fn files_without_a_size_are_not_believed() {
    let mut world = World {
        unsized_files: true,
        halved: Some("config.json"),
        ..World::model()
    };
    world
        .files
        .insert("config.json".into(), b"{\"a\": 1, \"b\": 2}".to_vec());
    let (server, cache) = (Server::start(world), Scratch::new("hub"));
    let config = server.config(&cache);
    refused(&config, "me/tiny", &["`config.json`", "damaged"]);
    assert!(
        !cache
            .join(&format!("models--me--tiny/snapshots/{COMMIT}/config.json"))
            .exists()
    );
    server.world.lock().unwrap().halved = None;
    let folder = config.resolve("me/tiny").unwrap();
    assert_eq!(std::fs::read(folder.join("config.json")).unwrap().len(), 16);
    let hash = "a".repeat(40);
    let listed = |file: String| format!(r#"{{"sha":"{COMMIT}","siblings":[{file}]}}"#);
    let huge = listed(format!(
        r#"{{"rfilename":"config.json","size":{},"blobId":"{hash}"}}"#,
        1u64 << 40
    ));
    let unsized_weights = listed(format!(
        r#"{{"rfilename":"model.safetensors","lfs":{{"sha256":"{}"}}}}"#,
        "b".repeat(64)
    ));
    for (listing, words) in [
        (huge, "1099511627776 bytes"),
        (unsized_weights, "names no size"),
    ] {
        let (server, cache) = (Server::start(World::model()), Scratch::new("hub"));
        server.world.lock().unwrap().listing = Some(listing);
        refused(
            &server.config(&cache),
            "me/tiny",
            &["`me/tiny`", words, "HF_ENDPOINT"],
        );
    }
}

/// Refusals say what to do; the token is sent, and never shown.
#[test]
fn refusals_name_the_fix() {
    let (server, cache) = (
        Server::start(World {
            status: 401,
            ..World::model()
        }),
        Scratch::new("hub"),
    );
    let mut config = server.config(&cache);
    refused(
        &config,
        "me/gated",
        &["`me/gated`", "401", "HF_TOKEN", "licence"],
    );
    config.token = Some("hf_secret".into());
    refused(&config, "me/gated", &["HF_TOKEN", "licence"]);
    assert!(server.asked()[1].contains("(bearer hf_secret)"));
    assert!(!format!("{config:?}").contains("hf_secret"));
    for (status, words) in [
        (403, "licence"),
        (404, "check the name"),
        (429, "wait"),
        (500, "try again"),
    ] {
        server.world.lock().unwrap().status = status;
        refused(&config, "me/nothing", &["`me/nothing`", words]);
    }
    assert!(
        !cache.join("models--me--nothing").exists(),
        "nothing is made for a model that is not there"
    );
}

/// A server that cannot be reached does no harm to a model that is here.
#[test]
fn the_cache_serves_while_the_server_is_away() {
    let (server, cache) = (Server::start(World::model()), Scratch::new("hub"));
    let config = server.config(&cache);
    let folder = config.resolve("me/tiny").unwrap();
    server.world.lock().unwrap().status = 503;
    assert_eq!(config.resolve("me/tiny").unwrap(), folder);
    let gone = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    let away = HubConfig {
        endpoint: format!("http://{gone}"),
        ..config
    };
    assert_eq!(away.resolve("me/tiny").unwrap(), folder);
    refused(
        &away,
        "me/other",
        &["`me/other`", "cannot be reached", "network"],
    );
}

/// No word of a server becomes a path that leads anywhere else.
#[test]
fn hostile_listings_are_refused() {
    let hash = "a".repeat(40);
    let with = |file: &str| format!(r#"{{"sha":"{COMMIT}","siblings":[{file}]}}"#);
    let named = |name: &str| {
        with(&format!(
            r#"{{"rfilename":"{name}","size":3,"blobId":"{hash}"}}"#
        ))
    };
    let cases = [
        named("../config.json"),
        named("../../../.bashrc"),
        named("a/../../config.json"),
        named("/etc/passwd"),
        named("..\\\\config.json"),
        named("C:config.json"),
        named(""),
        named("a//b"),
        with(r#"{"rfilename":"config.json","size":3,"blobId":"../../x"}"#),
        with(r#"{"rfilename":"config.json","size":3}"#),
        with(r#"{"rfilename":"model.safetensors","size":3,"lfs":{"sha256":"/tmp/x"}}"#),
        with(&format!(
            r#"{{"rfilename":"model.safetensors","size":3,"lfs":{{"sha256":"{hash}"}}}}"#
        )),
        with(&format!(
            r#"{{"rfilename":"config.json","size":3,"blobId":"{hash}{}"}}"#,
            &hash[..24]
        )),
        r#"{"sha":"../../evil","siblings":[]}"#.to_owned(),
        r#"{"siblings":[]}"#.to_owned(),
        "<html>".to_owned(),
        "[]".to_owned(),
    ];
    for listing in cases {
        let (server, cache) = (Server::start(World::model()), Scratch::new("hub"));
        server.world.lock().unwrap().listing = Some(listing.clone());
        refused(
            &server.config(&cache),
            "me/tiny",
            &["`me/tiny`", "HF_ENDPOINT"],
        );
        assert!(names(&cache.0).is_empty(), "{listing}");
    }
    let (server, cache) = (Server::start(World::model()), Scratch::new("hub"));
    let pickled = with(&format!(
        r#"{{"rfilename":"pytorch_model.bin","size":3,"blobId":"{hash}"}}"#
    ));
    server.world.lock().unwrap().listing = Some(pickled);
    refused(
        &server.config(&cache),
        "me/tiny",
        &["`me/tiny`", "pickled", "convert"],
    );
    server.world.lock().unwrap().listing = None;
    server
        .world
        .lock()
        .unwrap()
        .files
        .remove("model-2.safetensors");
    refused(
        &server.config(&cache),
        "me/tiny",
        &["`me/tiny`", "model-2.safetensors"],
    );
}

/// A folder is itself; anything else that is no name is told so, whatever it tries.
#[test]
fn names_and_folders() {
    let dir = Scratch::new("names");
    let mut config = HubConfig::from_vars(|_| None);
    config.offline = true;
    assert_eq!(config.resolve(dir.0.to_str().unwrap()).unwrap(), dir.0);
    for model in [
        "tiny",
        "./none",
        "/none/here",
        "a/b/c",
        "../x/y",
        "a/..",
        "a/b@../../x",
        "a/b@",
        "",
        "a /b",
        "@",
    ] {
        refused(&config, model, &["neither a folder", "owner/name", "check"]);
    }
    // Both would be kept in `models--a--b--c`; the hub gives no such names.
    for model in ["a--b/c", "a/b--c", "a/b..c"] {
        refused(&config, model, &["neither a folder", "owner/name", "check"]);
    }
    // Without a home there is no cache: nothing is put into whatever folder the program runs in.
    assert_eq!(config.cache, PathBuf::new());
    refused(&config, "a/b", &["`a/b`", "HOME", "HF_HOME"]);
}

/// The variables mean what they mean to other tools.
#[test]
fn variables() {
    let dir = Scratch::new("vars");
    dir.put("token", " hf_file \n");
    let home = dir.0.to_str().unwrap().to_owned();
    let with = |pairs: &[(&str, &str)]| {
        HubConfig::from_vars(|name| {
            pairs
                .iter()
                .find(|(n, _)| *n == name)
                .map(|(_, v)| (*v).to_owned())
        })
    };
    let plain = with(&[("HOME", "/home/me")]);
    assert_eq!(
        plain.cache,
        PathBuf::from("/home/me/.cache/huggingface/hub")
    );
    assert_eq!(
        (plain.endpoint.as_str(), plain.token, plain.offline),
        ("https://huggingface.co", None, false)
    );
    let set = with(&[
        ("HOME", "/home/me"),
        ("HF_HOME", &home),
        ("HF_ENDPOINT", "http://x/"),
        ("HF_HUB_OFFLINE", "1"),
    ]);
    assert_eq!(
        (set.cache, set.endpoint.as_str(), set.offline),
        (dir.join("hub"), "http://x", true)
    );
    assert_eq!(set.token.as_deref(), Some("hf_file"));
    let over = with(&[
        ("HF_HOME", &home),
        ("HF_HUB_CACHE", "/c"),
        ("HF_TOKEN", "hf_env"),
        ("HF_HUB_OFFLINE", "0"),
    ]);
    assert_eq!(
        (over.cache, over.token.as_deref(), over.offline),
        (PathBuf::from("/c"), Some("hf_env"), false)
    );
    assert_eq!(
        with(&[("HOME", "/h"), ("XDG_CACHE_HOME", "/x")]).cache,
        PathBuf::from("/x/huggingface/hub")
    );
    assert_eq!(
        with(&[("HOME", "/h"), ("HF_HOME", "~/hf")]).cache,
        PathBuf::from("/h/hf/hub")
    );
    assert_eq!(with(&[("HF_HOME", "~/hf")]).cache, PathBuf::new());
    assert_eq!(with(&[("HF_HOME", "/hf")]).cache, PathBuf::from("/hf/hub"));
}
