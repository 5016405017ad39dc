//! The live page from outside: what is answered, what is not, and that nothing holds it up.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};

use roundpipe_report::{Error, Report, Sample, Server, Step};

/// A server, its address and its token.
fn server(report: &Report) -> (Server, String, String) {
    let server = Server::start(report.clone(), None).expect("started");
    let rest = server.url().strip_prefix("http://").expect("an address");
    let (address, token) = rest.split_once("/?token=").expect("a token");
    let (address, token) = (address.to_owned(), token.to_owned());
    (server, address, token)
}

/// What comes back for some bytes.
fn exchange(address: &str, bytes: &[u8]) -> String {
    let mut stream = TcpStream::connect(address).expect("connected");
    // The server may close before all has been sent.
    let _ = stream.write_all(bytes);
    let _ = stream.shutdown(Shutdown::Write);
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    String::from_utf8(answer).expect("text")
}

fn get(address: &str, target: &str) -> String {
    exchange(
        address,
        format!("GET {target} HTTP/1.1\r\nHost: {address}\r\n\r\n").as_bytes(),
    )
}

fn body(answer: &str) -> &str {
    answer.split_once("\r\n\r\n").expect("a body").1
}

fn step(step: u64) -> Step {
    Step {
        step,
        loss: 1.5,
        ..Step::default()
    }
}

/// The page and its data, with the headers that keep others out.
#[test]
fn the_page_is_served() {
    let report = Report::new();
    report.push(step(1));
    let (_server, address, token) = server(&report);
    assert!(address.starts_with("127.0.0.1:"), "{address}");
    let page = get(&address, &format!("/?token={token}"));
    let headers = [
        "HTTP/1.1 200 OK\r\n",
        "Content-Type: text/html; charset=utf-8\r\n",
        "Cache-Control: no-store\r\n",
        "Connection: close\r\n",
        "Referrer-Policy: no-referrer\r\n",
        "X-Content-Type-Options: nosniff\r\n",
        "Content-Security-Policy: default-src 'none'; style-src 'unsafe-inline'; \
         script-src 'unsafe-inline'; connect-src 'self';",
    ];
    for header in headers {
        assert!(page.contains(header), "{header}");
    }
    let length = format!("Content-Length: {}\r\n", body(&page).len());
    assert!(page.contains(&length));
    assert!(body(&page).contains("\"live\":true"));
    let data = get(&address, &format!("/data?token={token}&since=0"));
    let data: serde_json::Value = serde_json::from_str(body(&data)).expect("JSON");
    assert_eq!(data["steps"]["step"], serde_json::json!([1]));
    report.push(step(2));
    let since = &data["order"];
    let news = get(&address, &format!("/data?since={since}&token={token}"));
    let news: serde_json::Value = serde_json::from_str(body(&news)).expect("JSON");
    assert_eq!(news["steps"]["step"], serde_json::json!([2]));
    let port = address.strip_prefix("127.0.0.1:").expect("a port");
    let local = format!("GET /?token={token} HTTP/1.1\r\nHost: localhost:{port}\r\n\r\n");
    assert!(exchange(&address, local.as_bytes()).starts_with("HTTP/1.1 200"));
}

/// All that is not the page's own request gets the same answer, byte for byte.
#[test]
fn strangers_learn_nothing() {
    let report = Report::new();
    report.push(Sample {
        step: 0,
        prompt: "secret".to_owned(),
        text: "secret".to_owned(),
    });
    let (_server, address, token) = server(&report);
    let missing = get(&address, "/nothing");
    assert!(missing.starts_with("HTTP/1.1 404"), "{missing}");
    let port = address.strip_prefix("127.0.0.1:").expect("a port");
    let mut wrong = token.clone().into_bytes();
    wrong[31] ^= 1;
    let wrong = String::from_utf8(wrong).expect("text");
    let targets = [
        "/".to_owned(),
        "/data".to_owned(),
        "/?token=".to_owned(),
        format!("/?token={wrong}"),
        format!("/?token={}", &token[..31]),
        format!("/?token={token}0"),
        format!("/?token={wrong}&token={token}"),
        format!("/data?token={wrong}&since=0"),
        format!("/data?token={token}&since=-1"),
        format!("/data?token={token}&since=99999999999999999999"),
        format!("/report.html?token={token}"),
        format!("//?token={token}"),
        format!("/../?token={token}"),
        format!("http://{address}/?token={token}"),
        "/favicon.ico".to_owned(),
        "*".to_owned(),
    ];
    for target in &targets {
        assert_eq!(get(&address, target), missing, "{target}");
    }
    let hosts = [
        "evil.example".to_owned(),
        format!("evil.example:{port}"),
        "127.0.0.1".to_owned(),
        "127.0.0.1:1".to_owned(),
        format!("127.0.0.1:{port}.evil.example"),
        format!("127.0.0.2:{port}"),
        String::new(),
    ];
    for host in hosts {
        let request = format!("GET /?token={token} HTTP/1.1\r\nHost: {host}\r\n\r\n");
        assert_eq!(exchange(&address, request.as_bytes()), missing, "{host}");
    }
    for method in [
        "POST", "HEAD", "PUT", "OPTIONS", "CONNECT", "TRACE", "get", "",
    ] {
        let request = format!("{method} /?token={token} HTTP/1.1\r\nHost: {address}\r\n\r\n");
        assert_eq!(exchange(&address, request.as_bytes()), missing, "{method}");
    }
    let bare = format!("GET /?token={token} HTTP/1.1\r\n\r\n");
    assert_eq!(exchange(&address, bare.as_bytes()), missing, "no host");
    let twice =
        format!("GET /?token={token} HTTP/1.1\r\nHost: {address}\r\nHost: {address}\r\n\r\n");
    assert_eq!(exchange(&address, twice.as_bytes()), missing, "two hosts");
}

/// Bytes that are no request end their own connection and nothing else.
#[test]
fn garbage_is_survived() {
    let report = Report::new();
    report.push(step(1));
    let (_server, address, token) = server(&report);
    let mut random = 12345_u64;
    for length in [0, 1, 3, 4, 100, 5_000, 100_000] {
        let mut bytes = Vec::with_capacity(length);
        for _ in 0..length {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            bytes.push((random >> 56) as u8);
        }
        let answer = exchange(&address, &bytes);
        assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 404"));
    }
    exchange(&address, b"\r\n\r\n");
    exchange(&address, &[b'\n'; 20_000]);
    let mut long = format!("GET /?token={token} HTTP/1.1\r\nHost: {address}\r\nX: ").into_bytes();
    long.resize(200_000, b'x');
    let answer = exchange(&address, &long);
    assert!(!answer.starts_with("HTTP/1.1 200"), "too long a request");
    let page = get(&address, &format!("/?token={token}"));
    assert!(page.starts_with("HTTP/1.1 200"));
}

/// A request that comes byte by byte is answered like any other.
#[test]
fn pieces_are_put_together() {
    let (_server, address, token) = server(&Report::new());
    let mut stream = TcpStream::connect(&address).expect("connected");
    stream.set_nodelay(true).expect("a socket");
    let request = format!("GET /?token={token} HTTP/1.1\r\nHost: {address}\r\n\r\n");
    for byte in request.bytes() {
        stream.write_all(&[byte]).expect("sent");
    }
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
}

/// Connections that ask nothing take the places there are and no more; when they go, others come.
#[test]
fn many_connections_are_bounded() {
    let report = Report::new();
    let (server, address, token) = server(&report);
    let mut idle: Vec<TcpStream> = (0..200)
        .map(|_| TcpStream::connect(&address).expect("connected"))
        .collect();
    // All but a few are closed at once: reading from them ends.
    let mut closed = 0;
    for stream in &mut idle[100..] {
        let mut byte = [0];
        closed += usize::from(matches!(stream.read(&mut byte), Ok(0) | Err(_)));
    }
    assert_eq!(closed, 100);
    // The run goes on meanwhile.
    report.push(step(1));
    drop(idle);
    let target = format!("/?token={token}");
    while !get(&address, &target).starts_with("HTTP/1.1 200") {
        std::thread::yield_now();
    }
    let held = TcpStream::connect(&address).expect("connected");
    drop(server);
    // Another server may have got the port meanwhile; its token is another.
    let gone = TcpStream::connect(&address).is_err();
    assert!(gone || !get(&address, &target).starts_with("HTTP/1.1 200"));
    drop(held);
}

/// Readers and a run side by side: all readers see whole pages.
#[test]
fn readers_and_the_run_go_side_by_side() {
    let report = Report::new();
    let (_server, address, token) = server(&report);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..20 {
                    let data = get(&address, &format!("/data?token={token}&since=0"));
                    let data: serde_json::Value = serde_json::from_str(body(&data)).expect("JSON");
                    let columns = data["steps"].as_object().expect("columns");
                    let lengths: Vec<usize> = columns
                        .values()
                        .map(|column| column.as_array().expect("a column").len())
                        .collect();
                    assert!(lengths.iter().all(|length| *length == lengths[0]));
                }
            });
        }
        for at in 1..=5_000 {
            report.push(step(at));
        }
    });
}

/// A port that is taken is named.
#[test]
fn taken_ports_are_named() {
    let (_server, address, _) = server(&Report::new());
    let port: u16 = address
        .rsplit(':')
        .next()
        .expect("a port")
        .parse()
        .expect("a number");
    let error = Server::start(Report::new(), Some(port)).expect_err("taken");
    assert!(matches!(error, Error::Bind { .. }), "{error}");
    let error = error.to_string();
    assert!(
        error.contains(&address) && error.contains("another port"),
        "{error}"
    );
}
