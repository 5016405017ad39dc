//! Chat templates against the texts that transformers' own environment renders.
// Tests that need fetched files say that they are skipped.
#![allow(clippy::print_stderr)]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use roundpipe_chat::{ChatTemplate, Message, RenderOptions};
use serde_json::{Map, Value};

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/chat")
}

fn json(path: &Path) -> Value {
    let text = std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_str(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn list(value: Option<Value>) -> Option<Vec<Value>> {
    value.map(|v| v.as_array().unwrap().clone())
}

/// Options of a conversation as the script writes them: four named ones, the rest are variables.
fn options(case: &Value, now_s: i64) -> RenderOptions {
    let mut variables: Map<String, Value> = case["options"].as_object().unwrap().clone();
    RenderOptions {
        add_generation_prompt: variables
            .remove("add_generation_prompt")
            .is_some_and(|v| v == true),
        tools: list(variables.remove("tools")),
        documents: list(variables.remove("documents")),
        variables,
        now_s: Some(now_s),
    }
}

fn messages(case: &Value) -> Vec<Message> {
    serde_json::from_value(case["messages"].clone()).unwrap()
}

/// Byte ranges of a text as the character ranges that Python counts.
fn char_spans(text: &str, spans: &[std::ops::Range<usize>]) -> Value {
    let chars = |byte: usize| text[..byte].chars().count();
    spans
        .iter()
        .map(|s| Value::from(vec![chars(s.start), chars(s.end)]))
        .collect()
}

struct Outcome {
    templates: usize,
    same: usize,
    raised: usize,
    wrong: Vec<String>,
}

/// Renders every conversation with every template of a folder and compares.
fn compare(folder: &Path) -> Outcome {
    let expected = json(&folder.join("expected.json"));
    let tokens: BTreeMap<String, String> =
        serde_json::from_value(expected["tokens"].clone()).unwrap();
    let now_s = expected["now_s"].as_i64().unwrap();
    let cases = expected["conversations"].as_array().unwrap();
    let mut outcome = Outcome {
        templates: 0,
        same: 0,
        raised: 0,
        wrong: Vec::new(),
    };
    for template in expected["templates"].as_array().unwrap() {
        let name = template["name"].as_str().unwrap();
        let source =
            std::fs::read_to_string(folder.join(format!("templates/{name}.jinja"))).unwrap();
        let parsed = ChatTemplate::parse(&source, &tokens);
        outcome.templates += 1;
        for (case, want) in cases.iter().zip(template["results"].as_array().unwrap()) {
            let label = format!("{name} / {}", case["name"].as_str().unwrap());
            let got = match &parsed {
                Ok(parsed) => parsed.render_spans(&messages(case), &options(case, now_s)),
                Err(error) => Err(error.clone()),
            };
            match (got, want["text"].as_str()) {
                (Err(_), None) => outcome.raised += 1,
                (Ok(got), None) => {
                    outcome.wrong.push(format!(
                        "{label}: Python raises {}, we render {:?}",
                        want["error"], got.text
                    ));
                }
                (Err(error), Some(_)) => outcome.wrong.push(format!("{label}: {error}")),
                (Ok(got), Some(text)) if got.text != text => {
                    let at = got
                        .text
                        .bytes()
                        .zip(text.bytes())
                        .take_while(|(a, b)| a == b)
                        .count();
                    let tail = |s: &str| {
                        String::from_utf8_lossy(&s.as_bytes()[at.saturating_sub(20)..])
                            .chars()
                            .take(90)
                            .collect::<String>()
                    };
                    outcome.wrong.push(format!(
                        "{label}: at byte {at}\n  got  {:?}\n  want {:?}",
                        tail(&got.text),
                        tail(text)
                    ));
                }
                (Ok(got), Some(text)) => {
                    let spans = got.spans.as_deref().map(|spans| char_spans(text, spans));
                    if spans.is_some_and(|spans| spans != want["spans"]) {
                        outcome
                            .wrong
                            .push(format!("{label}: generation spans differ"));
                    }
                    outcome.same += 1;
                }
            }
        }
    }
    outcome
}

/// Templates of real models, fetched by `fixtures/make_chat.py real DIR`, render byte for byte as
/// in Python.
#[test]
fn real_templates_render_as_in_python() {
    let Some(folder) = std::env::var_os("ROUNDPIPE_CHAT_DIR") else {
        eprintln!(
            "skipped: set ROUNDPIPE_CHAT_DIR to a folder made by fixtures/make_chat.py real DIR"
        );
        return;
    };
    let outcome = compare(Path::new(&folder));
    let Outcome {
        templates,
        same,
        raised,
        wrong,
    } = outcome;
    let count = wrong.len();
    eprintln!(
        "{templates} templates: {same} texts equal, {raised} raise on both sides, {count} differ"
    );
    assert!(templates >= 20, "{templates} templates are too few");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Templates written for this project in the styles of the families render byte for byte as in
/// Python.
#[test]
fn own_templates_render_as_in_python() {
    let Outcome {
        templates,
        same,
        wrong,
        ..
    } = compare(&fixtures());
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(
        templates >= 20 && same >= 400,
        "{templates} templates with {same} texts are too few"
    );
}

fn render(source: &str) -> Result<String, String> {
    let messages = [Message::new("user", "hello")];
    let template = ChatTemplate::parse(source, &BTreeMap::new()).map_err(|e| e.to_string())?;
    template
        .render(&messages, &RenderOptions::default())
        .map_err(|e| e.to_string())
}

/// Templates that loop, recurse or collect without end stop soon, with one line, before they hold
/// much.
#[test]
fn hostile_templates_stop() {
    let big = "{% set ns = namespace(x='aaaaaaaaaaaaaaaa', l=[1]) %}";
    let nested = "{% for a in range(99999) %}".repeat(5) + &"{% endfor %}".repeat(5);
    let loops = [
        "{{ 'a' * 10**10 }}".to_string(),
        "{{ 10**10 * 'a' }}".to_string(),
        "{{ [0] * 10**12 }}".to_string(),
        "{{ 'a'.ljust(10**10) }}{{ 'a'|indent(10**10, true) }}".to_string(),
        "{{ '%10000000000d' % 1 }}".to_string(),
        "{{ '{:>10000000000}'.format(1) }}".to_string(),
        "{{ {'a': [1]}|tojson(indent=10**10) }}".to_string(),
        "{{ range(10**9) }}".to_string(),
        nested,
        "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}".to_string(),
        big.to_string() + "{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        big.to_string() + "{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        big.to_string() + "{% for i in range(60) %}{% set ns.x = ns.x.replace('a', 'aaaa') %}{% endfor %}",
        big.to_string() + "{% for i in range(60) %}{% set ns.x = ns.x.split('a')|join('aaaa') %}{% endfor %}",
        big.to_string() + "{% for i in range(60) %}{% set ns.x = [ns.x, ns.x]|string %}{% endfor %}",
        big.to_string() + "{% for i in range(60) %}{% set ns.l = ns.l + ns.l %}{% endfor %}",
        big.to_string() + "{% for i in range(60) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l }}",
        big.to_string() + "{% for i in range(60) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l|tojson }}",
        big.to_string() + "{% set ns.x = [1] %}{% for i in range(60) %}{% set ns.l = [ns.l, ns.l] %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.l == ns.x }}",
        big.to_string() + "{% for i in range(99999) %}{% set ns.l = [ns.l] %}{% endfor %}",
        big.to_string() + "{% for i in range(99999) %}{% set ns.l = {'a': ns.l} %}{% endfor %}",
        big.to_string() + "{% for i in range(99999) %}{% set ns.l = [ns.l]|reverse %}{% endfor %}",
        big.to_string() + "{% for i in range(99999) %}{% for j in [ns.l] %}{% set ns.l = loop %}{% endfor %}{% endfor %}",
        big.to_string() + "{% for i in range(99999) %}{% for j in range(99) %}{% set ns.l = namespace(a=ns.l) %}{% endfor %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}".to_string(),
        "{% macro f(x) %}{{ f(x ~ x) }}{% endmacro %}{{ f('aaaa') }}".to_string(),
        "{% for x in [[1]] recursive %}{{ loop([x]) }}{% endfor %}".to_string(),
        "{% set x %}{% for a in range(99999) %}{% for b in range(999) %}xxxxxxxxxxxxxxxx{% endfor %}{% endfor %}{% endset %}".to_string(),
        "{{ ".to_string() + &"(".repeat(5000) + "1" + &")".repeat(5000) + " }}",
        "{{ ".to_string() + &"not ".repeat(5000) + "1 }}",
        "{{ ".to_string() + &"1+".repeat(5000) + "1 }}",
        "{% if 1 %}".repeat(5000),
        "x".repeat(3 << 20),
    ];
    for source in loops {
        let start = std::time::Instant::now();
        let short: String = source.chars().take(150).collect();
        let error = render(&source).expect_err(&short);
        let taken = start.elapsed().as_secs_f64();
        assert!(
            !error.contains('\n') && error.len() < 500,
            "{short}: {error}"
        );
        assert!(taken < 20.0, "{short}: {taken} s until {error}");
    }
    // The other tests of this file need little beside it.
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let peak = status.lines().find_map(|line| {
        line.strip_prefix("VmHWM:")?
            .trim()
            .strip_suffix(" kB")?
            .parse()
            .ok()
    });
    let peak_mib = peak.unwrap_or(0u64) >> 10;
    assert!(peak_mib < 400, "hostile templates took {peak_mib} MiB");
    eprintln!("hostile templates: {peak_mib} MiB at most");
}

/// Nothing outside of the conversation can be reached, and broken templates name their line.
#[test]
fn broken_templates_name_their_line() {
    let cases = [
        ("\n\n{% if %}", "line 3"),
        ("{% include 'x' %}", "one file"),
        ("{% import 'x' as y %}", "one file"),
        ("{{ open('/etc/passwd') }}", "undefined"),
        (
            "{{ messages.__class__ }}{{ messages.__class__.x }}",
            "undefined",
        ),
        ("{{ messages.append(1) }}", "undefined"),
        ("{{ messages[0].content.nothing.more }}", "undefined"),
        ("{{ missing.field }}", "'missing' is undefined"),
        ("a\n{{ 1 + 'a' }}", "line 2"),
        ("{{ raise_exception('no\nnewline') }}", "no newline"),
        ("{{ 1|nofilter }}", "nofilter"),
        ("{{ 1 is notest }}", "notest"),
        ("{{ 'a", "not closed"),
        ("{% for x in y %}", "endfor"),
        ("{{ 1 // 0 }}", "division by zero"),
        ("{{ none|length }}", "len"),
    ];
    for (source, want) in cases {
        let error = render(source).expect_err(source);
        assert!(
            error.contains(want) && !error.contains('\n'),
            "{source}: {error}"
        );
    }
}

/// The time of day comes from the options, so that a render can be repeated.
#[test]
fn time_comes_from_the_options() {
    let template = ChatTemplate::parse(
        "{{ strftime_now('%Y-%m-%d %H:%M:%S %a %b %j') }}",
        &BTreeMap::new(),
    )
    .unwrap();
    for (now_s, want) in [
        (0, "1970-01-01 00:00:00 Thu Jan 001"),
        (951_827_696, "2000-02-29 12:34:56 Tue Feb 060"),
        (4_102_444_799, "2099-12-31 23:59:59 Thu Dec 365"),
        (-1, "1969-12-31 23:59:59 Wed Dec 365"),
    ] {
        let options = RenderOptions {
            now_s: Some(now_s),
            ..RenderOptions::default()
        };
        assert_eq!(template.render(&[], &options).unwrap(), want);
    }
}

/// Templates are parsed once and used by many threads.
#[test]
fn templates_are_shared_between_threads() {
    fn shared<T: Send + Sync>(_: &T) {}
    shared(&ChatTemplate::parse("{{ messages }}", &BTreeMap::new()).unwrap());
}
