//! The live page: a report on 127.0.0.1, for those who have its token.
//!
//! Two requests are answered: `GET /?token=T`, the page, and `GET /data?token=T&since=N`, what is new
//! since change N. Every other gets the same 404, so that a stranger learns nothing: another path or
//! method, a wrong or missing token, a `Host` that is not this machine's loopback (a site that makes
//! its name point here), a request that is no HTTP.
//!
//! Threads: one accepts; each connection has its own while it lasts, [`CONNECTIONS`] at most, further
//! ones are closed at once. None of them holds the report's lock while it makes or sends text, so a
//! slow reader never holds up the run.
//!
//! # Invariants
//! - Only loopback is listened on, and nothing of a request is echoed.
//! - A connection lasts no longer than [`Times`] say, and its request is no longer than
//!   [`REQUEST_BYTES`].
//! - Dropped, the server has no thread left.

use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle, sleep};
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::page::Report;

/// Connections at once; a browser has about six.
const CONNECTIONS: usize = 16;
/// Bytes of a request with its headers.
const REQUEST_BYTES: usize = 16 << 10;
/// How long a connection may take.
const TIMES: Times = Times {
    request: Duration::from_secs(5),
    answer: Duration::from_secs(30),
};

/// What the page may do: nothing but show itself and ask this server.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; \
                      connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// How long a connection may take: its request to come, its answer to leave.
#[derive(Debug, Clone, Copy)]
struct Times {
    request: Duration,
    answer: Duration,
}

/// The live page of a run. Dropping it ends it.
#[derive(Debug)]
pub struct Server {
    url: String,
    address: SocketAddr,
    shared: Arc<Shared>,
    acceptor: Option<JoinHandle<()>>,
}

impl Server {
    /// Shows a report on 127.0.0.1, on a port that the system chooses unless one is given.
    ///
    /// # Errors
    /// When the port is taken, or the system gives no thread or no random numbers.
    pub fn start(report: Report, port: Option<u16>) -> Result<Self> {
        Self::start_with(report, port, TIMES)
    }

    fn start_with(report: Report, port: Option<u16>, times: Times) -> Result<Self> {
        let port = port.unwrap_or(0);
        let bind = |source| Error::Bind { port, source };
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).map_err(bind)?;
        let address = listener.local_addr().map_err(bind)?;
        let token = token()?;
        let url = format!("http://{address}/?token={token}");
        let shared = Arc::new(Shared {
            report,
            token,
            times,
            port: address.port(),
            is_over: AtomicBool::new(false),
            connections: Mutex::default(),
        });
        let accepting = shared.clone();
        let acceptor = Builder::new()
            .name("live page".to_owned())
            .spawn(move || accepting.accept(&listener))
            .map_err(bind)?;
        Ok(Self {
            url,
            address,
            shared,
            acceptor: Some(acceptor),
        })
    }

    /// Where the page is, with its token.
    pub fn url(&self) -> &str {
        &self.url
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.shared.is_over.store(true, Ordering::Release);
        // Wakes the acceptor. If the queue is full, it is awake already.
        let _ = TcpStream::connect_timeout(&self.address, Duration::from_millis(500));
        if let Some(acceptor) = self.acceptor.take() {
            // A panic there has been printed; there is nothing left to stop.
            let _ = acceptor.join();
        }
        for connection in self.shared.connections().drain(..) {
            let _ = connection.stream.shutdown(Shutdown::Both);
            let _ = connection.thread.join();
        }
    }
}

/// 128 bits of the system's random numbers, as text.
fn token() -> Result<String> {
    let source = "/dev/urandom";
    let mut bits = [0; 16];
    let read = File::open(source).and_then(|mut source| source.read_exact(&mut bits));
    read.map_err(Error::io("read", source.as_ref()))?;
    Ok(bits.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// A request that is being answered.
#[derive(Debug)]
struct Connection {
    /// To end it from outside.
    stream: TcpStream,
    thread: JoinHandle<()>,
}

/// What the threads share.
#[derive(Debug)]
struct Shared {
    report: Report,
    token: String,
    times: Times,
    port: u16,
    is_over: AtomicBool,
    connections: Mutex<Vec<Connection>>,
}

impl Shared {
    fn connections(&self) -> MutexGuard<'_, Vec<Connection>> {
        self.connections
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Acquire)
    }

    fn accept(self: &Arc<Self>, listener: &TcpListener) {
        while !self.is_over() {
            let accepted = listener.accept();
            if self.is_over() {
                return;
            }
            match accepted {
                // Without room or without a thread the connection is closed.
                Ok((stream, _)) => drop(self.connect(stream)),
                // No file handles are left, say: do not spin.
                Err(_) => sleep(Duration::from_millis(50)),
            }
        }
    }

    fn connect(self: &Arc<Self>, stream: TcpStream) -> io::Result<()> {
        let mut connections = self.connections();
        connections.retain(|connection| !connection.thread.is_finished());
        if connections.len() >= CONNECTIONS {
            return Ok(());
        }
        let outside = stream.try_clone()?;
        let shared = self.clone();
        let thread = Builder::new()
            .name("live page reader".to_owned())
            .spawn(move || {
                let mut stream = stream;
                // A reader who goes away is not the run's error.
                let _ = shared.serve(&mut stream);
                // Dropping is not enough: `outside` holds the connection too.
                let _ = stream.shutdown(Shutdown::Both);
            })?;
        connections.push(Connection {
            stream: outside,
            thread,
        });
        Ok(())
    }

    fn serve(&self, stream: &mut TcpStream) -> io::Result<()> {
        let head = read_head(stream, Instant::now() + self.times.request)?;
        let answer = self.answer(&head);
        let deadline = Instant::now() + self.times.answer;
        write_all(stream, &answer.head(), deadline)?;
        write_all(stream, answer.body.as_bytes(), deadline)?;
        stream.shutdown(Shutdown::Write)?;
        drain(stream);
        Ok(())
    }

    fn answer(&self, head: &[u8]) -> Answer {
        let request = Request::parse(head).filter(|request| self.admits(request));
        let body = request.and_then(|request| match request.path {
            "/" => Some(("200 OK", "text/html", self.report.live_html())),
            "/data" => {
                let since = request.parameter("since").unwrap_or("0").parse().ok()?;
                let json = self.report.since(since).json();
                Some(("200 OK", "application/json", json))
            }
            _ => None,
        });
        let missing = || ("404 Not Found", "text/plain", "not found\n".to_owned());
        let (status, kind, body) = body.unwrap_or_else(missing);
        Answer { status, kind, body }
    }

    /// Whether a request comes from the page: with the token, to this machine by its own name.
    fn admits(&self, request: &Request<'_>) -> bool {
        let token = request.parameter("token").unwrap_or_default();
        let names = ["127.0.0.1", "localhost"];
        let is_host = |name: &str| request.host == format!("{name}:{}", self.port);
        is_same(token.as_bytes(), self.token.as_bytes()) && names.into_iter().any(is_host)
    }
}

/// Compares in a time that does not depend on where two texts differ.
fn is_same(one: &[u8], other: &[u8]) -> bool {
    let differing = one.iter().zip(other).fold(0, |all, (a, b)| all | (a ^ b));
    one.len() == other.len() && std::hint::black_box(differing) == 0
}

/// A request, as far as it matters.
struct Request<'a> {
    path: &'a str,
    query: &'a str,
    host: &'a str,
}

impl<'a> Request<'a> {
    /// Nothing unless it is a `GET` of HTTP 1 with exactly one `Host`.
    fn parse(head: &'a [u8]) -> Option<Self> {
        let mut lines = std::str::from_utf8(head).ok()?.split("\r\n");
        let mut words = lines.next()?.split(' ');
        let (method, target, version) = (words.next()?, words.next()?, words.next()?);
        if method != "GET" || !version.starts_with("HTTP/1.") || words.next().is_some() {
            return None;
        }
        let headers = lines.filter_map(|line| line.split_once(':'));
        let mut hosts = headers.filter(|(name, _)| name.eq_ignore_ascii_case("host"));
        let (_, host) = hosts.next()?;
        if hosts.next().is_some() {
            return None;
        }
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        Some(Self {
            path,
            query,
            host: host.trim(),
        })
    }

    /// The first of a name. Tokens and numbers need no decoding.
    fn parameter(&self, name: &str) -> Option<&'a str> {
        let mut pairs = self
            .query
            .split('&')
            .filter_map(|pair| pair.split_once('='));
        pairs.find(|(key, _)| *key == name).map(|(_, value)| value)
    }
}

struct Answer {
    status: &'static str,
    kind: &'static str,
    body: String,
}

impl Answer {
    fn head(&self) -> Vec<u8> {
        let lines = [
            format!("HTTP/1.1 {}", self.status),
            format!("Content-Type: {}; charset=utf-8", self.kind),
            format!("Content-Length: {}", self.body.len()),
            format!("Content-Security-Policy: {POLICY}"),
            "Cache-Control: no-store".to_owned(),
            "Connection: close".to_owned(),
            "Cross-Origin-Resource-Policy: same-origin".to_owned(),
            "Referrer-Policy: no-referrer".to_owned(),
            "X-Content-Type-Options: nosniff".to_owned(),
            "X-Frame-Options: DENY".to_owned(),
        ];
        (lines.join("\r\n") + "\r\n\r\n").into_bytes()
    }
}

/// Reads a request up to the empty line behind its headers.
fn read_head(stream: &mut TcpStream, deadline: Instant) -> io::Result<Vec<u8>> {
    let mut head = Vec::new();
    let mut buffer = [0; 2048];
    loop {
        stream.set_read_timeout(Some(left(deadline)?))?;
        let count = match stream.read(&mut buffer) {
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            other => other?,
        };
        if count == 0 {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        // The end may lie across two reads.
        let from = head.len().saturating_sub(3);
        head.extend_from_slice(&buffer[..count]);
        let end = head[from..].windows(4).position(|four| four == b"\r\n\r\n");
        if let Some(end) = end {
            head.truncate(from + end);
            return Ok(head);
        }
        if head.len() > REQUEST_BYTES {
            // No request at all: it gets the answer that strangers get.
            return Ok(Vec::new());
        }
    }
}

fn write_all(stream: &mut TcpStream, mut bytes: &[u8], deadline: Instant) -> io::Result<()> {
    while !bytes.is_empty() {
        stream.set_write_timeout(Some(left(deadline)?))?;
        match stream.write(bytes) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(count) => bytes = &bytes[count..],
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Reads what the other side still sends, for a moment and up to a bound: closing a connection with
/// bytes unread would take the answer away from it.
fn drain(stream: &mut TcpStream) {
    let deadline = Instant::now() + Duration::from_millis(500);
    let mut buffer = [0; 4096];
    for _ in 0..64 {
        let Ok(left) = left(deadline) else { return };
        let waits = stream.set_read_timeout(Some(left)).is_ok();
        if !waits || !matches!(stream.read(&mut buffer), Ok(1..)) {
            return;
        }
    }
}

fn left(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(ErrorKind::TimedOut.into());
    }
    Ok(left)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn brief() -> Times {
        Times {
            request: Duration::from_millis(50),
            answer: Duration::from_millis(50),
        }
    }

    /// A client that sends nothing is left, whatever it waits for.
    #[test]
    fn silent_clients_are_left() {
        let server = Server::start_with(Report::new(), None, brief()).expect("started");
        for sent in ["", "GET / HTTP/1.1\r\n"] {
            let mut silent = TcpStream::connect(server.address).expect("connected");
            silent.write_all(sent.as_bytes()).expect("sent");
            let mut read = Vec::new();
            // It comes back because the server closes the connection.
            let _ = silent.read_to_end(&mut read);
            assert_eq!(read, b"", "after {sent:?}");
        }
    }

    /// A client that does not read is left when the buffers between the two are full.
    #[test]
    fn lazy_readers_are_left() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        let address = listener.local_addr().expect("an address");
        let _lazy = TcpStream::connect(address).expect("connected");
        let (mut stream, _) = listener.accept().expect("accepted");
        let piece = vec![0; 1 << 20];
        let error = loop {
            let deadline = Instant::now() + brief().answer;
            if let Err(error) = write_all(&mut stream, &piece, deadline) {
                break error;
            }
        };
        let kinds = [ErrorKind::TimedOut, ErrorKind::WouldBlock];
        assert!(kinds.contains(&error.kind()), "{error}");
        let error = write_all(&mut stream, b"x", Instant::now()).expect_err("too late");
        assert_eq!(error.kind(), ErrorKind::TimedOut);
    }

    /// Tokens are 128 bits, and no two servers have the same.
    #[test]
    fn tokens_are_random() {
        let (one, other) = (token().expect("random"), token().expect("random"));
        assert_ne!(one, other);
        assert_eq!(one.len(), 32);
        assert!(one.bytes().all(|byte| byte.is_ascii_hexdigit()));
        assert!(is_same(one.as_bytes(), one.as_bytes()));
        for wrong in ["", &one[1..], &other, &format!("{one}0")] {
            assert!(!is_same(wrong.as_bytes(), one.as_bytes()), "{wrong}");
        }
    }

    /// Only a plain `GET` with one host is a request.
    #[test]
    fn odd_requests_are_none() {
        let odd: [&[u8]; 10] = [
            b"",
            b"GET",
            b"GET / HTTP/1.1",
            b"GET  / HTTP/1.1\r\nHost: a",
            b"GET / HTTP/2\r\nHost: a",
            b"POST / HTTP/1.1\r\nHost: a",
            b"get / HTTP/1.1\r\nHost: a",
            b"GET / HTTP/1.1\r\nHost: a\r\nhost: b",
            b"GET / HTTP/1.1 more\r\nHost: a",
            b"GET /\xff HTTP/1.1\r\nHost: a",
        ];
        for head in odd {
            assert!(Request::parse(head).is_none(), "{}", head.escape_ascii());
        }
        let plain = b"GET /data?a=1&token=t&since=5 HTTP/1.1\r\nX: y\r\nHOST:  a:1 ";
        let request = Request::parse(plain).expect("a request");
        assert_eq!((request.path, request.host), ("/data", "a:1"));
        assert_eq!(request.parameter("token"), Some("t"));
        assert_eq!(request.parameter("none"), None);
    }
}
