//! Chat templates that mean harm: they end with an error or the right text, within the limits that
//! `lib.rs` states, and leave nothing behind.
//!
//! Memory is what this test's own allocator counts, by thread, so that it does not depend on the
//! machine and on the tests beside it. Time is counted in steps, and steps are held against the
//! bytes allocated in all: work that is not paid for shows there.
//!
//! A share of the random templates runs by default; `ROUNDPIPE_SEEDS=0..1000000` runs as many as
//! one likes.
// Long runs report their figures.
#![allow(clippy::print_stderr)]

#[path = "support/template_gen.rs"]
mod template_gen;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use roundpipe_chat::{
    ChatTemplate, Limits, Message, PARSE_BYTES, ROOM_PER_BYTE, RenderOptions, STACK_BYTES,
    STEPS_PER_BYTE, Usage,
};

/// What one thread allocates.
struct Counting;

thread_local! {
    static LIVE: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
    static TOTAL: Cell<u64> = const { Cell::new(0) };
}

fn count(allocated: usize, freed: usize) {
    // Both are live while a block moves.
    let peak = LIVE.get() + allocated as isize;
    PEAK.set(PEAK.get().max(peak));
    LIVE.set(peak - freed as isize);
    TOTAL.set(TOTAL.get() + allocated as u64);
}

// SAFETY: every call is passed on to the system's allocator as it came; the counters are plain
// cells that are initialised at compile time and need no destructor, so counting neither allocates
// nor unwinds.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size(), 0);
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        count(0, layout.size());
        // SAFETY: the caller keeps the contract of `dealloc`, and the block came from `System`.
        unsafe { System.dealloc(block, layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size, layout.size());
        // SAFETY: the caller keeps the contract of `realloc`, and the block came from `System`.
        unsafe { System.realloc(block, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Bytes beside those that a render counts: its error, twice, and the interpreter's own few.
const UNCOUNTED_BYTES: usize = 16 << 10;
/// Most bytes that a step may allocate: a scope with its variables, or room for 64 bytes of text.
const BYTES_PER_STEP: u64 = 512;

/// What running some code took.
struct Taken<T> {
    result: T,
    left: isize,
    peak: usize,
    total: u64,
}

fn measured<T>(run: impl FnOnce() -> T) -> Taken<T> {
    let live = LIVE.get();
    let total = TOTAL.get();
    PEAK.set(live);
    let result = run();
    let peak = usize::try_from(PEAK.get() - live).unwrap();
    Taken {
        result,
        left: LIVE.get() - live,
        peak,
        total: TOTAL.get() - total,
    }
}

fn conversation() -> (Vec<Message>, RenderOptions) {
    let messages = vec![
        Message::new("system", "Be brief."),
        Message::new("user", "Hello, what is 2 + 2?\nΣ Straße <b>"),
        Message::new("assistant", "4"),
    ];
    (
        messages,
        RenderOptions {
            now_s: Some(1_700_000_000),
            ..RenderOptions::default()
        },
    )
}

/// Input of [`conversation`] is less than this.
const INPUT_BYTES: usize = 4096;

/// What became of a template: its text or the error's line, and what a render took if it came to
/// one.
struct Outcome {
    result: Result<String, String>,
    usage: Option<Usage>,
}

/// Parses and renders a template and checks every limit.
fn checked(source: &str) -> Outcome {
    checked_within(source, Limits::default())
}

fn checked_within(source: &str, limits: Limits) -> Outcome {
    let (messages, options) = conversation();
    let short: String = source.chars().take(3000).collect();
    let parse = measured(|| ChatTemplate::parse(source, &BTreeMap::new()));
    assert!(
        parse.peak <= PARSE_BYTES,
        "parsing took {} bytes: {short}",
        parse.peak
    );
    let template = match parse.result {
        Ok(template) => template,
        Err(error) => {
            let error = error.to_string();
            assert!(
                !error.contains('\n') && error.len() < 2000,
                "{error}: {short}"
            );
            return Outcome {
                result: Err(error),
                usage: None,
            };
        }
    };
    let render = measured(|| template.render_limited(&messages, &options, limits));
    let (result, usage) = render.result;
    let held = match &result {
        Ok(rendered) => {
            rendered.text.capacity() + rendered.spans.as_ref().map_or(0, |s| s.capacity() * 16)
        }
        Err(error) => error.message().len(),
    };
    assert_eq!(render.left, held as isize, "bytes left: {short}");
    assert!(
        render.peak <= usage.peak_bytes + UNCOUNTED_BYTES,
        "{} of {usage:?}: {short}",
        render.peak
    );
    assert!(
        usage.peak_bytes <= limits.bytes + ROOM_PER_BYTE * INPUT_BYTES,
        "{usage:?}: {short}"
    );
    assert!(
        usage.steps <= limits.steps + STEPS_PER_BYTE * INPUT_BYTES as u64,
        "{usage:?}: {short}"
    );
    let paid = usage.steps * BYTES_PER_STEP + UNCOUNTED_BYTES as u64;
    assert!(
        render.total <= paid,
        "{} bytes allocated in {} steps: {short}",
        render.total,
        usage.steps
    );
    let result = result
        .map(|rendered| rendered.text)
        .map_err(|error| error.to_string());
    if let Err(error) = &result {
        assert!(
            !error.contains('\n') && error.len() < 2000,
            "{error}: {short}"
        );
    }
    Outcome {
        result,
        usage: Some(usage),
    }
}

/// Runs on a stack of the size that `lib.rs` states.
fn on_small_stack(run: impl FnOnce() + Send + 'static) {
    let thread = std::thread::Builder::new()
        .stack_size(STACK_BYTES)
        .spawn(run)
        .unwrap();
    if let Err(panic) = thread.join() {
        std::panic::resume_unwind(panic);
    }
}

/// What a hostile template must end with.
enum Want {
    Error,
    Text(&'static str),
}
use Want::{Error, Text};

/// Templates that once ended the process, hung it, took its memory, or leaked, and their relatives.
fn hostile() -> Vec<(&'static str, String, Want)> {
    let grow = |body: &str| {
        "{%- set ns = namespace(x='aaaaaaaaaaaaaaaa', l=[1], m=none) -%}{%- for i in range(99999) -%}"
            .to_string()
            + body
            + "{%- endfor -%}"
    };
    let case = |name: &'static str, source: &str, want: Want| (name, source.to_string(), want);
    vec![
        // Numbers at the edge.
        case(
            "abs of the least",
            "{{ (-170141183460469231731687303715884105727 - 1)|abs }}",
            Error,
        ),
        case(
            "minus the least",
            "{{ -(-170141183460469231731687303715884105727 - 1) }}",
            Error,
        ),
        case(
            "least over minus one",
            "{{ (-170141183460469231731687303715884105727 - 1) // -1 }}",
            Error,
        ),
        case(
            "rest of the least",
            "{{ (-170141183460469231731687303715884105727 - 1) % -1 }}",
            Text("0"),
        ),
        case(
            "range by the least",
            "{{ range(7, 0, -170141183460469231731687303715884105727 - 1) }}",
            Text("[7]"),
        ),
        case(
            "range over all",
            "{{ range(-170141183460469231731687303715884105727, 170141183460469231731687303715884105727, \
             85070591730234615865843651857942052863) }}",
            Text(
                "[-170141183460469231731687303715884105727, -85070591730234615865843651857942052864, -1, \
                 85070591730234615865843651857942052862, 170141183460469231731687303715884105725]",
            ),
        ),
        case(
            "split by all",
            "{{ 'x y'.split(' ', 18446744073709551615) }}",
            Text("['x', 'y']"),
        ),
        case(
            "rsplit by all",
            "{{ 'x y'.rsplit(none, 18446744073709551615) }}",
            Text("['x', 'y']"),
        ),
        case(
            "slice by all",
            "{{ 'abc'[::9223372036854775807] }}{{ [1, 2][::-(10**30)] }}",
            Text("a[2]"),
        ),
        case(
            "find far away",
            "{{ 'abc'.find('c', -(10**38), 10**38) }}",
            Text("2"),
        ),
        case(
            "round far",
            "{{ 1.5|round(10**30) }}{{ 1.5|round(-(10**30)) }}",
            Text("1.50.0"),
        ),
        case(
            "nothing often",
            "{{ [] * 10**18 }}{{ '' * 10**18 }}{{ () * 10**38 }}",
            Text("[]()"),
        ),
        case(
            "negative often",
            "{{ [1] * -(10**18) }}{{ 'a' * -(10**38) }}",
            Text("[]"),
        ),
        case(
            "NaN has no order",
            "{{ (['nan'|float, 3, 1, 2] * 40)|sort|length }}",
            Text("160"),
        ),
        // Sizes.
        case("long fill", "{{ 'a'.ljust(10**6, 'b' * 10**6) }}", Error),
        case(
            "long fill on both sides",
            "{{ 'a'.center(8 * 10**6, 'b' * 10**6)|length }}",
            Error,
        ),
        case("wide", "{{ 'a'.rjust(10**10) }}", Error),
        case("wide percent", "{{ '%10000000000d' % 1 }}", Error),
        case(
            "precise percent",
            "{{ ('%.10000000000f' % 1.5)|length }}",
            Text("402"),
        ),
        case("wide format", "{{ '{:>10000000000}'.format(1) }}", Error),
        case("wide indent", "{{ 'a\nb'|indent(10**10) }}", Error),
        case("wide JSON", "{{ [[1]]|tojson(indent=10**10) }}", Error),
        case("many texts", "{{ 'a' * 10**10 }}", Error),
        case("many items", "{{ [0] * 10**12 }}", Error),
        case(
            "many batches",
            "{{ ([1] * 99999)|batch(1)|list|length }}",
            Text("99999"),
        ),
        case(
            "filled batches",
            "{{ ([1] * 999)|batch(1, 0)|map('string')|join|length }}",
            Text("2997"),
        ),
        case(
            "wide batches",
            "{{ ([1] * 99999)|slice(99999)|list|length }}",
            Text("99999"),
        ),
        case(
            "long dates",
            "{{ strftime_now('%A' * 8 * 10**6)|length }}",
            Error,
        ),
        case(
            "long message",
            "{{ raise_exception('a ' * 8 * 10**6) }}",
            Error,
        ),
        case(
            "long name in a message",
            "{{ ('%(' ~ 'k' * 8 * 10**6 ~ ')s') % {} }}",
            Error,
        ),
        case(
            "long attribute",
            "{{ {}['k' * 8 * 10**6] is defined }}{{ none|attr('k' * 10**6) }}",
            Text("False"),
        ),
        // Keys in memory.
        case(
            "keys to sort",
            "{{ (['X' * 10**6] * 20000)|sort|length }}",
            Error,
        ),
        case(
            "keys to group",
            "{{ (['X' * 10**6] * 20000)|groupby(none)|length }}",
            Error,
        ),
        case(
            "keys of a dictionary",
            "{{ {'a': 'X' * 3 * 10**6}|dictsort(by='value')|length }}",
            Text("1"),
        ),
        case(
            "least of long",
            "{{ (['X' * 10**6] * 20000)|min|length }}",
            Error,
        ),
        case(
            "unlike long",
            "{{ (['X' * 10**6] * 20000)|unique|list|length }}",
            Error,
        ),
        // Work.
        case(
            "first of many",
            &grow("{%- set x = (range(90000)|list)|first -%}"),
            Error,
        ),
        case(
            "compared long",
            "{%- set s = 'x' * 4 * 10**6 -%}{{ ([s ~ 'a', s ~ 'b'] * 60000)|sort(case_sensitive=true)|length }}",
            Error,
        ),
        case(
            "keys in a row",
            "{{ dict.fromkeys(range(99999))|length }}",
            Error,
        ),
        case("all unlike", "{{ range(99999)|unique|list|length }}", Error),
        case(
            "looked for",
            &grow("{%- set x = -1 in range(90000) -%}"),
            Error,
        ),
        case(
            "searched",
            "{%- set s = 'a' * 8 * 10**6 -%}{%- for i in range(99999) -%}{%- set x = ('a' * 4000 ~ 'b') in s -%}\
             {%- endfor -%}",
            Error,
        ),
        case(
            "printed",
            &grow("{%- set x = (['x' * 10000] * 900)|string -%}"),
            Error,
        ),
        case(
            "stripped",
            "{{ ('a' * 9 * 10**6).strip('b' * 9 * 10**6 ~ 'a')|length }}",
            Error,
        ),
        case(
            "formatted",
            &grow("{%- set x = '{k}' * 9999 -%}{%- set y = x.format(**{'k': 1}) -%}"),
            Error,
        ),
        case(
            "compared deep",
            &grow("{%- set ns.l = [ns.l, ns.l] -%}{%- if i > 60 and ns.l == ns.l -%}{%- endif -%}"),
            Error,
        ),
        case(
            "nested loops",
            &("{% for a in range(99999) %}".repeat(5) + &"{% endfor %}".repeat(5)),
            Error,
        ),
        ("many variables", many_variables(), Error),
        ("long names", long_names(), Error),
        // Growth.
        case(
            "texts in texts",
            &grow("{%- set ns.x = ns.x ~ ns.x -%}"),
            Error,
        ),
        case(
            "replaced",
            &grow("{%- set ns.x = ns.x.replace('a', 'aaaa') -%}"),
            Error,
        ),
        case(
            "upper",
            &grow("{%- set ns.x = (ns.x ~ 'ŉ' * 99)|upper -%}"),
            Error,
        ),
        case(
            "lower sigma",
            &grow("{%- set ns.x = (ns.x ~ 'ΑΣ' * 9999)|lower -%}"),
            Error,
        ),
        case(
            "joined",
            &grow("{%- set ns.x = ns.x.split('a')|join('aaaa') -%}"),
            Error,
        ),
        case(
            "printed lists",
            &grow("{%- set ns.x = [ns.x, ns.x]|string -%}"),
            Error,
        ),
        case("lists in lists", &grow("{%- set ns.l = [ns.l] -%}"), Error),
        case(
            "dictionaries in dictionaries",
            &grow("{%- set ns.l = {'a': ns.l} -%}"),
            Error,
        ),
        case(
            "iterators in iterators",
            &grow("{%- set ns.l = [ns.l]|reverse -%}"),
            Error,
        ),
        case(
            "loops in loops",
            &grow("{%- for j in [ns.l] -%}{%- set ns.l = loop -%}{%- endfor -%}"),
            Error,
        ),
        case(
            "methods in lists",
            &grow("{%- set ns.l = [ns.l.index] -%}"),
            Error,
        ),
        case(
            "shared lists",
            &grow("{%- set ns.l = [ns.l, ns.l] -%}{{ ns.l }}"),
            Error,
        ),
        case(
            "shared JSON",
            &grow("{%- set ns.l = [ns.l, ns.l] -%}{{ ns.l|tojson }}"),
            Error,
        ),
        case("output", &grow("{{ ns.x * 99 }}"), Error),
        case(
            "namespaces",
            &grow("{%- for j in range(99) -%}{%- set ns.m = namespace(m=ns.m) -%}{%- endfor -%}"),
            Error,
        ),
        // What holds itself, and what is dropped.
        case(
            "loop that saw itself",
            "{%- for i in [1] -%}{{ loop.changed([loop, 'x' * 10**7]) }}{%- endfor -%}",
            Text("True"),
        ),
        case(
            "scope that holds its loop",
            "{%- set ns = namespace(l=none) -%}{%- for i in [1] -%}{%- for x in [1] recursive -%}\
             {%- set ns.l = loop -%}{%- endfor -%}{%- set keep = ns.l -%}{%- set big = 'x' * 10**7 -%}\
             {%- endfor -%}ok",
            Text("ok"),
        ),
        case(
            "namespace that holds itself",
            "{%- set ns = namespace(x='x' * 10**7) -%}{%- set ns.me = [ns] -%}ok",
            Text("ok"),
        ),
        case(
            "macro that holds itself",
            "{%- macro f() -%}{%- endmacro -%}{%- set g = [f, 'x' * 10**7] -%}ok",
            Text("ok"),
        ),
        case(
            "loops in a row",
            &grow(
                "{%- set p = ns.l -%}{%- for x in [1] recursive -%}{%- set ns.l = loop -%}{%- endfor -%}",
            ),
            Error,
        ),
        case(
            "macros that hand out macros",
            "{%- set ns = namespace(m=none) -%}{%- macro f() -%}{%- set p = ns.m -%}{%- macro g() -%}{{ p() }}\
             {%- endmacro -%}{%- set ns.m = g -%}{%- endmacro -%}{%- for i in range(9) -%}\
             {%- for j in range(99999) -%}{{ f() }}{%- endfor -%}{%- endfor -%}",
            Error,
        ),
        case(
            "loop after its end",
            "{%- set ns = namespace(l=none) -%}{%- for i in [1, 2] -%}{%- set ns.l = loop -%}{%- endfor -%}\
             {{ ns.l.index }}{{ ns.l.changed(ns.l) }}{{ ns.l.changed(1) }}{{ ns.l.changed(1) }}",
            Text("2TrueTrueFalse"),
        ),
        // Recursion.
        case(
            "macro in itself",
            "{% macro f(x) %}{{ f(x ~ x) }}{% endmacro %}{{ f('aaaa') }}",
            Error,
        ),
        case(
            "loop in itself",
            "{% for x in [[1]] recursive %}{{ loop([x]) }}{% endfor %}",
            Error,
        ),
        case(
            "macro in itself, deep in brackets",
            "{%- macro f(n) -%}{%- if n > 0 -%}{{ f((((((((((n - 1)))))))))) }}{%- endif -%}{%- endmacro -%}{{ f(10**4) }}",
            Error,
        ),
        case(
            "caller in itself",
            "{% macro f() %}{% call f() %}{{ caller() }}{% endcall %}{% endmacro %}{{ f() }}",
            Error,
        ),
        case(
            "filters of filters",
            "{{ 'a'|map(*(['map'] * 1000))|list }}",
            Error,
        ),
        (
            "brackets",
            format!("{{{{ {}1{} }}}}", "(".repeat(5000), ")".repeat(5000)),
            Error,
        ),
        (
            "lists",
            format!("{{{{ {}{} }}}}", "[".repeat(5000), "]".repeat(5000)),
            Error,
        ),
        (
            "calls",
            format!("{{{{ {}{} }}}}", "a(".repeat(5000), ")".repeat(5000)),
            Error,
        ),
        (
            "targets",
            format!("{{% set {}a{} = 1 %}}", "(".repeat(5000), ")".repeat(5000)),
            Error,
        ),
        ("tags", "{% if 1 %}".repeat(5000), Error),
        ("not", format!("{{{{ {}1 }}}}", "not ".repeat(5000)), Error),
        ("minus", format!("{{{{ {}1 }}}}", "-".repeat(5000)), Error),
        (
            "else",
            format!("{{{{ 1{} }}}}", " if 0 else 1".repeat(5000)),
            Error,
        ),
        ("much text", "x".repeat(3 << 20), Error),
        case(
            "macro that breaks off in a loop",
            "{% for i in [1] %}{% macro f() %}{% if %}",
            Error,
        ),
    ]
}

/// Thousands of variables, and a loop that looks for one that is not there.
fn many_variables() -> String {
    let mut source = String::new();
    for i in 0..12000 {
        source += &format!("{{%- set v{i} = 1 -%}}");
    }
    source
        + "{%- for a in range(99999) -%}{%- for b in range(99) -%}{{ missing }}{%- endfor -%}{%- endfor -%}"
}

/// Names that differ only at their ends, and a loop that looks for the last.
fn long_names() -> String {
    let name = "n".repeat(9000);
    let mut source = String::new();
    for i in 10..99 {
        source += &format!("{{%- set {name}{i} = 1 -%}}");
    }
    let get = format!("{{%- set x = {name}99 -%}}");
    source
        + "{%- for a in range(99999) -%}{%- for b in range(99) -%}"
        + &get
        + "{%- endfor -%}{%- endfor -%}"
}

/// Hostile templates end with one line, or with the right text, within every limit, and leave
/// nothing.
#[test]
fn hostile_templates_keep_to_the_limits() {
    on_small_stack(|| {
        for (name, source, want) in hostile() {
            match (checked(&source).result, want) {
                (Err(_), Error) => {}
                (Ok(text), Text(want)) if text == want => {}
                (result, _) => panic!("{name}: {result:?}"),
            }
        }
    });
}

/// A hundred renders hold no more than one.
#[test]
fn renders_leave_nothing() {
    let (messages, options) = conversation();
    for (name, source, want) in hostile() {
        // Every render of the others is looked at alone; these are the ones that hold themselves.
        if !(matches!(want, Text(_)) && name.contains(" that ")) {
            continue;
        }
        let template = ChatTemplate::parse(&source, &BTreeMap::new()).unwrap();
        let taken = measured(|| {
            for _ in 0..100 {
                drop(template.render(&messages, &options));
            }
        });
        assert_eq!(taken.left, 0, "{name}");
    }
}

/// Special tokens come with the template, so long ones do not raise its limits.
#[test]
fn tokens_must_fit() {
    let (messages, options) = conversation();
    for (bytes, fits) in [(1 << 20, true), (40 << 20, false)] {
        let tokens = BTreeMap::from([("bos_token".to_string(), "x".repeat(bytes))]);
        let template = ChatTemplate::parse("{{ bos_token|length }}", &tokens).unwrap();
        let result = template.render(&messages, &options);
        assert_eq!(result.is_ok(), fits, "{bytes} bytes: {result:?}");
    }
}

/// A chain of operators is as high as it is long, and brackets add to it: trees of every shape are
/// bounded, and parsed, rendered, copied and dropped on a small stack.
#[test]
fn chains_are_bounded() {
    on_small_stack(|| {
        // What to repeat, behind a value or around it.
        let links = [
            " if 1",
            " or 1",
            " and 1",
            " + 1",
            " - 1",
            " * 1",
            " // 1",
            " % 1",
            " ** 1",
            ".a",
            "[0]",
            "[0:1]",
            "()",
            "|d",
            "|d(1)",
            " is defined",
            "|list()",
        ];
        for link in links {
            for (times, fits) in [(300, true), (600, false), (40_000, false)] {
                let chain = format!("{{{{ 1{} }}}}", link.repeat(times));
                let parsed = ChatTemplate::parse(&chain, &BTreeMap::new());
                // Tests cannot follow each other.
                assert!(
                    parsed.is_ok() == fits || link == " is defined",
                    "{times} times '{link}'"
                );
                checked(&chain);
            }
            // Chains in brackets in chains: each short, together high.
            let open = "(".repeat(90);
            let nested = format!(
                "{{{{ {open}1{} }}}}",
                format!("{})", link.repeat(90)).repeat(90)
            );
            assert!(
                ChatTemplate::parse(&nested, &BTreeMap::new()).is_err(),
                "nested '{link}'"
            );
        }
        let deep = format!("{{{{ {}1{} }}}}", "(".repeat(48), " + 1 if 1)".repeat(48));
        let deep = "{% if 1 %}".repeat(48) + &deep + &"{% endif %}".repeat(48);
        let template = ChatTemplate::parse(&deep, &BTreeMap::new()).unwrap();
        drop((template.clone(), template));
        assert_eq!(checked(&deep).result.as_deref(), Ok("49"));
    });
}

/// The deepest recursion that is allowed fits the stack that is stated.
#[test]
fn deepest_recursion_fits_the_stack() {
    on_small_stack(|| {
        let brackets = format!("{}n - 1{}", "(".repeat(90), ")".repeat(90));
        let blocks = [
            "if 1",
            "for x in [1]",
            "with a = 1",
            "filter upper",
            "generation",
            "set x",
            "call f(n)",
        ];
        let mut sources = vec![
            format!("{{% macro f(n) %}}{{{{ f({brackets}) }}}}{{% endmacro %}}{{{{ f(9) }}}}"),
            "{% macro f(n) %}{{ [{'a': [f(n)|list]}] }}{% endmacro %}{{ f(9) }}".to_string(),
            "{% macro f(n, m=f(1)) %}{{ n }}{% endmacro %}{{ f(9) }}".to_string(),
            "{% for x in [1] recursive %}{{ loop([x]) ~ [loop([x])] }}{% endfor %}".to_string(),
            "{% set ns = namespace(l=[]) %}{% for i in range(245) %}{% set ns.l = [{'a': ns.l}] if i % 2 else (ns.l,) %}\
             {% endfor %}{{ ns.l }}{{ ns.l|tojson }}{{ ns.l == ns.l }}{{ ns.l|sort }}"
                .to_string(),
        ];
        for block in blocks {
            let end = block.split(' ').next().unwrap();
            let (open, close) = (format!("{{% {block} %}}"), format!("{{% end{end} %}}"));
            let body = open.repeat(90) + "{{ f(n) }}" + &close.repeat(90);
            sources.push(format!(
                "{{% macro f(n) %}}{body}{{{{ caller }}}}{{% endmacro %}}{{{{ f(9) }}}}"
            ));
        }
        // A deep value, printed and compared at every depth of the interpreter up to the deepest.
        let value = "{% set ns = namespace(l=[], k=[]) %}{% for i in range(245) %}{% set ns.l = [ns.l] %}\
                     {% set ns.k = [ns.k] %}{% endfor %}";
        let last = "{{ ns.l }}{{ ns.l|tojson }}{{ ns.l == ns.k }}{{ [ns.l, ns.k]|sort }}{{ [ns.l]|map('string')|list }}";
        for depth in (0..200).step_by(9) {
            sources.push(format!(
                "{value}{{% macro f(n) %}}{{% if n %}}{{{{ f(n - 1) }}}}{{% else %}}{last}{{% endif %}}{{% endmacro %}}\
                 {{{{ f({depth}) }}}}"
            ));
        }
        for source in sources {
            checked(&source);
        }
    });
}

/// Parsing holds no more than is stated, whatever takes most room for its length.
#[test]
fn parsing_is_bounded() {
    let shapes = [
        "{1:1},",
        "[1],",
        "a(b=c),",
        "a|b(c=d),",
        "a[1:2:3],",
        "1+",
        "-1,",
        "a is b(1),",
        "'a''b',",
        "a,",
        "1<",
        "1 if 1 else 1,",
        "(),",
    ];
    for shape in shapes {
        for head in ["{{ ", "{% set a = ", "{% if "] {
            for body in [
                shape.repeat((1 << 20) / shape.len() - 40),
                shape.repeat(99_000 / shape.len()),
            ] {
                checked(&format!(
                    "{head}[{body}1]{}",
                    if head == "{{ " { " }}" } else { " %}" }
                ));
            }
        }
    }
    let blocks = [
        "{%if a%}{%endif%}",
        "{%set a=1%}",
        "{{1}}",
        "{{a}}x",
        "{%for a in b%}{%endfor%}",
        "{%macro a(b=1)%}{%endmacro%}",
        "{#-#}x",
        "{%raw%}{%endraw%}",
        "{%if a%}{%elif b%}{%else%}{%endif%}",
        "{%with a=1%}{%endwith%}",
    ];
    for block in blocks {
        checked(&block.repeat((1 << 20) / block.len()));
        checked(&block.repeat(12_000));
    }
    let nested = "{%macro a()%}".repeat(98) + &"{{a}}".repeat(30_000) + &"{%endmacro%}".repeat(98);
    checked(&nested);
    checked(&format!("{{{{ a|b{} }}}}", ".c".repeat(49_000)));
}

/// The seeds to run: a share, or what the environment asks for.
fn seeds(share: Range<u64>) -> Range<u64> {
    let asked = std::env::var("ROUNDPIPE_SEEDS").ok();
    let range = asked
        .as_deref()
        .and_then(|text| text.split_once(".."))
        .and_then(|(from, to)| Some(from.parse().ok()?..to.parse().ok()?));
    range.unwrap_or(share)
}

/// Bytes of a seed, by the usual mixing of a counter.
fn random_bytes(seed: u64, count: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let mut word = || {
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    };
    (0..count.div_ceil(8))
        .flat_map(|_| word().to_le_bytes())
        .take(count)
        .collect()
}

/// Limits of a seed: mostly small ones, which are met in the middle of anything, and soon.
fn limits_of(seed: u64) -> Limits {
    let small = [100, 1_000, 10_000, 50_000, 200_000];
    let room = [1 << 10, 16 << 10, 128 << 10, 1 << 20, 4 << 20];
    if seed.is_multiple_of(50) {
        return Limits::default();
    }
    Limits {
        steps: small[(seed % 5) as usize],
        bytes: room[(seed / 5 % 5) as usize],
    }
}

/// Counts of a run over many templates.
#[derive(Default)]
struct Tally {
    refused: usize,
    failed: usize,
    rendered: usize,
    steps: u64,
    most_steps: u64,
    most_bytes: usize,
}

impl Tally {
    fn add(&mut self, outcome: Outcome) {
        let Some(usage) = outcome.usage else {
            self.refused += 1;
            return;
        };
        match outcome.result {
            Ok(_) => self.rendered += 1,
            Err(_) => self.failed += 1,
        }
        self.steps += usage.steps;
        self.most_steps = self.most_steps.max(usage.steps);
        self.most_bytes = self.most_bytes.max(usage.peak_bytes);
    }

    fn report(&self, what: &str) {
        let Self {
            refused,
            failed,
            rendered,
            steps,
            most_steps,
            most_bytes,
        } = self;
        eprintln!(
            "{what}: {refused} refused, {failed} failed, {rendered} rendered; {steps} steps, at most {most_steps} \
             steps and {most_bytes} bytes in one"
        );
    }
}

/// Random templates of the grammar neither panic nor leak nor go beyond a limit.
#[test]
fn random_templates_keep_to_the_limits() {
    on_small_stack(|| {
        let mut tally = Tally::default();
        for seed in seeds(0..3000) {
            let source = template_gen::template(&random_bytes(seed, 400));
            tally.add(checked_within(&source, limits_of(seed)));
        }
        tally.report("grammar");
        let all = tally.refused + tally.failed + tally.rendered;
        assert!(
            tally.refused * 10 <= all,
            "the grammar writes too much that does not parse"
        );
        assert!(
            tally.rendered * 10 >= all,
            "the grammar writes too little that renders"
        );
    });
}

/// The project's own templates with bytes changed neither panic nor leak nor go beyond a limit.
#[test]
fn mutated_templates_keep_to_the_limits() {
    on_small_stack(|| {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/chat/templates");
        let mut files: Vec<_> = std::fs::read_dir(&folder)
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .collect();
        files.sort();
        let mut sources: Vec<String> = files
            .iter()
            .map(|file| std::fs::read_to_string(file).unwrap())
            .collect();
        sources.extend(
            hostile()
                .into_iter()
                .map(|(_, source, _)| source)
                .filter(|source| source.len() < 4096),
        );
        let mut tally = Tally::default();
        for seed in seeds(0..3000) {
            let source = &sources[seed as usize % sources.len()];
            let source = template_gen::mutate(source, &random_bytes(!seed, 100));
            tally.add(checked_within(&source, limits_of(seed)));
        }
        tally.report("mutations");
    });
}
