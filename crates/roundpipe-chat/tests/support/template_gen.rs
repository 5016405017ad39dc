//! Chat templates by chance: a grammar that is driven by bytes, and a mutator of texts.
//!
//! The bytes come from a seed (`tests/limits.rs`) or from a fuzzer, which then learns which of
//! them lead where. When they are used up, every choice is the first one, so that generation ends.
//! The grammar keeps to types most of the time, since a template that fails at its first expression
//! tests nothing behind it, and it likes what is dangerous: numbers at the edges, long texts and
//! lists, things that hold themselves, filters with arguments far beyond what they are for.

use std::fmt::Write as _;

/// How deep the grammar nests.
const MAX_DEPTH: usize = 5;
/// How long a generated template may become before it is closed.
const MAX_LEN: usize = 6000;

/// Bytes that decide.
#[derive(Debug)]
pub struct Choices<'b> {
    bytes: &'b [u8],
}

impl<'b> Choices<'b> {
    /// Decisions by `bytes`, in order.
    pub fn new(bytes: &'b [u8]) -> Self {
        Self { bytes }
    }

    /// A number below `n`, which is at most 256; zero when the bytes are used up.
    fn below(&mut self, n: usize) -> usize {
        let Some((first, rest)) = self.bytes.split_first() else {
            return 0;
        };
        self.bytes = rest;
        usize::from(*first) % n
    }

    fn chance(&mut self, of: usize) -> bool {
        self.below(of) == 1
    }

    fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }

    /// One of several words.
    fn word(&mut self, of: &'static str) -> &'static str {
        let count = of.split_whitespace().count();
        of.split_whitespace()
            .nth(self.below(count))
            .unwrap_or_default()
    }

    /// One of several words with a number behind it.
    fn call(&mut self, of: &'static str) -> (&'static str, usize) {
        let word = self.word(of);
        let known = word
            .split_once('/')
            .and_then(|(name, args)| Some((name, args.parse().ok()?)));
        known.unwrap_or((word, 0))
    }
}

/// A template.
pub fn template(bytes: &[u8]) -> String {
    let mut generator = Generator {
        choices: Choices::new(bytes),
        out: String::new(),
        loops: 0,
    };
    generator.prelude();
    let count = 1 + generator.choices.below(6);
    for _ in 0..count {
        generator.statement(0);
    }
    generator.out
}

/// `text` with some of its bytes removed, repeated, replaced or moved, as text.
pub fn mutate(text: &str, bytes: &[u8]) -> String {
    const PIECES: [&str; 24] = [
        "{{",
        "}}",
        "{%",
        "%}",
        "{#",
        "#}",
        "-%}",
        "{%-",
        "'",
        "\"",
        "(",
        ")",
        "[",
        "]",
        "|",
        ".",
        ",",
        " if ",
        " else ",
        " not ",
        "~",
        "*",
        "999999999",
        "\u{0}",
    ];
    let mut choices = Choices::new(bytes);
    let mut out = text.as_bytes().to_vec();
    for _ in 0..=choices.below(8) {
        let place = |choices: &mut Choices<'_>| {
            let word = choices.below(256) * 256 + choices.below(256);
            word * (out.len() + 1) / 65536
        };
        let (a, b) = (place(&mut choices), place(&mut choices));
        let (from, to) = (a.min(b), a.max(b).min(a.min(b) + 64));
        match choices.below(6) {
            0 => drop(out.drain(from..to)),
            1 => {
                let piece = out[from..to].to_vec();
                let times = 1 + choices.below(60);
                let at = place_in(&mut choices, out.len());
                drop(out.splice(at..at, piece.repeat(times)));
            }
            2 => drop(out.splice(from..from, choices.pick(&PIECES).bytes())),
            3 => {
                if let Some(byte) = out.get_mut(from) {
                    *byte ^= 1 << choices.below(8);
                }
            }
            4 => {
                let piece = out[from..to].to_vec();
                let at = place_in(&mut choices, out.len());
                drop(out.splice(at..at, piece));
            }
            _ => {
                let piece = choices.pick(&PIECES).repeat(1 + choices.below(200));
                drop(out.splice(from..from, piece.bytes()));
            }
        }
    }
    String::from_utf8_lossy(&out).into_owned()
}

fn place_in(choices: &mut Choices<'_>, len: usize) -> usize {
    (choices.below(256) * 256 + choices.below(256)) * (len + 1) / 65536
}

const NAMES: &str = "a b c x i messages";
const FIELDS: &str = "s l d m n";
const WORDS: [&str; 16] = [
    "''",
    "'a'",
    "'role'",
    "'Content of it'",
    "' x  y '",
    "'a b c'",
    "'\\n\\nline\\n'",
    "'ΑΣ ς ΟΔΥΣΣΕΥΣ.Σ'",
    "'straße ŉ İ ﬃ'",
    "'日本語'",
    "'%s and %5.2f %(k)r'",
    "'{} {0!r:>9} {k:^20}'",
    "'<&\\'\">'",
    "'%Y-%m-%d %c'",
    "'😀\u{301}'",
    "'true'",
];
const INTS: &str = "0 1 2 3 7 -1 -3 10 100 999 65537 10**6 10**10 2**62 9223372036854775807 18446744073709551615 \
                    -170141183460469231731687303715884105727 10**38";
// Filters and methods with how many arguments they like.
const TEXT_FILTERS: &str = "upper lower title capitalize trim/1 replace/3 indent/3 truncate/4 center/1 wordcount \
                            escape e forceescape safe format/2 int/2 float/1";
const INT_FILTERS: &str = "abs round/2 int float string";
const LIST_FILTERS: &str = "first last sort/3 unique/2 min/2 max/2 sum/2 join/2 batch/2 slice/2 groupby/2 map/2 \
                            select/2 reject/2 selectattr/3 rejectattr/3 map('upper') map(attribute='role') \
                            sort(attribute='content',reverse=true) sort(case_sensitive=true) select('in','abc') \
                            groupby('role') batch(3) batch(99999,0)";
const DICT_FILTERS: &str = "dictsort/3 items dictsort(by='value') list length";
const ANY_FILTERS: &str = "string list length count reverse tojson/2 pprint default/2 d/1 attr/1 tojson(indent=4) \
                           tojson(indent=10**9) tojson(sort_keys=true,separators=(',',':')) \
                           map('map','map','list') safe";
const SEQUENCES: &str = "sort unique reverse map('string') list select reject('none') batch(2) slice(3) \
                         groupby('role') map(attribute='content') selectattr('role') batch(99999,0) slice(99999) \
                         rejectattr('role','eq','user') map('length')";
const TESTS: [&str; 22] = [
    "defined",
    "undefined",
    "none",
    "string",
    "mapping",
    "sequence",
    "iterable",
    "callable",
    "number",
    "odd",
    "even",
    "lower",
    "upper",
    "escaped",
    "filter",
    "divisibleby(3)",
    "sameas(none)",
    "eq(1)",
    "in('abc')",
    "gt(2)",
    "not none",
    "not string",
];
const METHODS: &str = "upper lower title capitalize swapcase casefold strip/1 lstrip/1 rstrip/1 split/2 rsplit/2 \
                       splitlines/1 partition/1 rpartition/1 startswith/1 endswith/1 removeprefix/1 \
                       removesuffix/1 replace/3 find/3 rfind/3 index/1 rindex/3 count/3 join/1 format/2 isdigit \
                       isalpha isupper islower isspace zfill/1 ljust/2 rjust/2 center/2 isalnum isnumeric isascii";
const LOOP: &str = "loop.index loop.previtem loop.cycle('a',b) loop.changed(x) loop.changed(loop) loop loop.depth \
                    loop.length loop.last loop.revindex0";
const ODD: &str =
    "none 1.5e300 'nan'|float -0.0 true missing ns f range dict messages caller varargs";
const KEYS: &str =
    "attribute reverse case_sensitive width default indent x y first start by fill_with";

/// What an expression should give.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Text,
    Int,
    List,
    Dict,
    Any,
}

struct Generator<'b> {
    choices: Choices<'b>,
    out: String,
    loops: usize,
}

impl Generator<'_> {
    /// Names that later expressions find.
    fn prelude(&mut self) {
        self.out.push_str(
            "{%- set ns = namespace(s='seed', l=[1, 'two', [3]], d={'k': 'v'}, m=none, n=3) -%}\
             {%- set a, b, c = 'alpha', [3, 1, 2], {'k': 1, 'z': [2]} -%}{%- set x, i, g = 'x', 1, range -%}\
             {%- macro f(x='', y=1) -%}<{{ x }}{{ varargs }}{{ kwargs }}{{ caller() if caller }}>{%- endmacro -%}",
        );
    }

    fn full(&self, depth: usize) -> bool {
        depth >= MAX_DEPTH || self.out.len() > MAX_LEN
    }

    fn statements(&mut self, depth: usize) {
        for _ in 0..=self.choices.below(3) {
            self.statement(depth);
        }
    }

    fn statement(&mut self, depth: usize) {
        if self.full(depth) {
            self.out.push_str("{{ a }}");
            return;
        }
        match self.choices.below(20) {
            0 => self.out.push_str("text\n "),
            1..=4 => {
                self.out.push_str("{{ ");
                self.expr(Kind::Any, depth);
                self.out.push_str(" }}");
            }
            5 | 6 => self.set_field(depth),
            7 => self.set_name(depth),
            8 => self.set_block(depth),
            9 => self.branches(depth),
            10..=12 => self.for_loop(depth),
            13 => self.macro_def(depth),
            14 => self.call_block(depth),
            15 => {
                self.out.push_str("{% filter ");
                self.filter(Kind::Text, depth);
                self.out.push_str(" %}");
                self.statements(depth + 1);
                self.out.push_str("{% endfilter %}");
            }
            16 => {
                self.out.push_str("{% with x = ");
                self.expr(Kind::Any, depth + 1);
                self.out.push_str(" %}");
                self.statements(depth + 1);
                self.out.push_str("{% endwith %}");
            }
            17 => self.grower(),
            18 => self.keeper(),
            _ => {
                self.out.push_str("{% generation %}");
                self.statements(depth + 1);
                self.out.push_str("{% endgeneration %}");
            }
        }
    }

    fn set_field(&mut self, depth: usize) {
        let (field, kind) = self.choices.pick(&[
            ("s", Kind::Text),
            ("l", Kind::List),
            ("d", Kind::Dict),
            ("m", Kind::Any),
            ("n", Kind::Int),
        ]);
        _ = write!(self.out, "{{%- set ns.{field} = ");
        self.expr(kind, depth);
        self.out.push_str(" -%}");
    }

    fn set_name(&mut self, depth: usize) {
        let name = self
            .choices
            .pick(&["a", "b", "c", "x", "x, i", "(a, b)", "loop", "ns"]);
        _ = write!(self.out, "{{% set {name} = ");
        self.expr(Kind::Any, depth);
        self.out.push_str(" %}");
    }

    fn set_block(&mut self, depth: usize) {
        self.out.push_str("{% set x");
        if self.choices.chance(2) {
            self.out.push_str(" | ");
            self.filter(Kind::Text, depth);
        }
        self.out.push_str(" %}");
        self.statements(depth + 1);
        self.out.push_str("{% endset %}");
    }

    fn branches(&mut self, depth: usize) {
        self.out.push_str("{% if ");
        self.nested(Kind::Any, depth);
        self.out.push_str(" %}");
        self.statements(depth + 1);
        for _ in 0..self.choices.below(3) {
            self.out.push_str("{% elif ");
            self.nested(Kind::Any, depth);
            self.out.push_str(" %}");
            self.statement(depth + 1);
        }
        if self.choices.chance(2) {
            self.out.push_str("{% else %}");
            self.statement(depth + 1);
        }
        self.out.push_str("{% endif %}");
    }

    fn for_loop(&mut self, depth: usize) {
        let target = self.choices.pick(&["i", "x", "a", "i, x"]);
        _ = write!(self.out, "{{% for {target} in ");
        if target == "i, x" {
            self.nested(Kind::Dict, depth);
            self.out.push_str(".items()");
        } else if self.choices.chance(3) {
            let count = self.choices.word("2 2 5 5 60 60 999 99999");
            _ = write!(self.out, "range({count})");
        } else {
            self.nested(Kind::List, depth);
        }
        if self.choices.chance(5) {
            self.out.push_str(" if ");
            self.nested(Kind::Any, depth);
        }
        self.out.push_str(if self.choices.chance(4) {
            " recursive %}"
        } else {
            " %}"
        });
        self.loops += 1;
        self.statements(depth + 1);
        if self.choices.chance(6) {
            let flow = self.choices.pick(&["break", "continue"]);
            _ = write!(self.out, "{{% if loop.last %}}{{% {flow} %}}{{% endif %}}");
        }
        self.loops -= 1;
        if self.choices.chance(5) {
            self.out.push_str("{% else %}");
            self.statement(depth + 1);
        }
        self.out.push_str("{% endfor %}");
    }

    fn macro_def(&mut self, depth: usize) {
        let name = self.choices.pick(&["f", "g", "a"]);
        _ = write!(self.out, "{{% macro {name}(x, y=");
        self.expr(Kind::Any, depth + 1);
        self.out.push_str(") %}");
        let loops = std::mem::take(&mut self.loops);
        self.statements(depth + 1);
        self.loops = loops;
        self.out.push_str("{% endmacro %}");
    }

    fn call_block(&mut self, depth: usize) {
        self.out.push_str("{% call ");
        self.out
            .push_str(self.choices.pick(&["", "(x) ", "(x=1, y=2) "]));
        self.out.push_str("f(");
        self.expr(Kind::Any, depth + 1);
        self.out.push_str(") %}");
        let loops = std::mem::take(&mut self.loops);
        self.statements(depth + 1);
        self.loops = loops;
        self.out.push_str("{% endcall %}");
    }

    /// Loops that make something larger with every turn.
    fn grower(&mut self) {
        let times = self.choices.word("5 20 60 60 999 99999");
        let body = self.choices.pick(&[
            "{% set ns.s = ns.s ~ ns.s %}",
            "{% set ns.s = ns.s + 'é' %}",
            "{% set ns.s = ns.s.replace('s', 'ss') %}",
            "{% set ns.s = [ns.s, ns.s]|string %}",
            "{% set ns.s = [ns.s, ns.s]|tojson %}",
            "{% set ns.s = ns.s|center(ns.s|length * 2) %}",
            "{% set ns.s = (ns.s ~ 'ß')|upper %}",
            "{% set ns.l = ns.l + ns.l %}",
            "{% set ns.l = [ns.l] %}",
            "{% set ns.l = [ns.l, ns.l] %}",
            "{% set ns.l = (ns.l, ns.l)|list|reverse|list %}",
            "{% set ns.l = ns.l|map('string')|list %}",
            "{% set ns.d = {'k': ns.d} %}",
            "{% set ns.d = dict(ns.d, **{'k' ~ i: i}) %}",
            "{% set ns.m = namespace(m=ns.m) %}",
            "{% set ns.m = ns.m, loop %}",
            "{% set ns.m %}{{ ns.m }}{{ loop.index }}{% endset %}",
            "{{ ns.l }}{{ ns.s }}",
            "{% macro g() %}{% set p = ns.m %}{% macro h() %}{{ p }}{% endmacro %}{% set ns.m = h %}{% endmacro %}{{ g() }}",
        ]);
        _ = write!(
            self.out,
            "{{%- for i in range({times}) %}}{body}{{% endfor -%}}"
        );
    }

    /// Things that hold themselves, or are used when their place is gone.
    fn keeper(&mut self) {
        self.out.push_str(self.choices.pick(&[
            "{% set ns.m = ns %}",
            "{% for i in [1] %}{{ loop.changed([loop, 'x' * 1000]) }}{% endfor %}",
            "{% for i in [1, 2] %}{{ loop.changed(i, ns, [ns.l]) }}{% set ns.m = loop %}{% endfor %}{{ ns.m.changed(ns.m) }}",
            "{% for i in b recursive %}{% set ns.m = loop %}{% set big = 'x' * 999 %}{% endfor %}{{ ns.m([4, 5]) }}",
            "{% for i in [[1, [2]], 3] recursive %}{% if i is sequence %}{{ loop(i) }}{% else %}{{ loop.depth }}{% endif %}{% endfor %}",
            "{% for i in [[1]] recursive %}{{ loop([i]) }}{% endfor %}",
            "{% macro g(x) %}{{ g(x ~ x) }}{% endmacro %}{{ g('ab') }}",
            "{% macro g(n) %}{% if n > 0 %}{{ n }}{{ g(n - 1) }}{% endif %}{% endmacro %}{{ g(9) }}",
            "{% macro g() %}{% set ns.m = caller %}{{ caller() }}{% endmacro %}{% call g() %}{{ ns.m() if ns.n }}{% set ns.n = 0 %}{% endcall %}{{ ns.m() }}",
            "{% for i in range(9) %}{% set p = ns.m %}{% for x in [1] recursive %}{% set ns.m = loop %}{% endfor %}{% endfor %}",
            "{% set ns.l = b|map('string') %}{{ ns.l|first }}{{ ns.l|list }}{{ ns.l|list }}",
            "{% set ns.m = 'abc'.upper %}{{ ns.m() }}{% set ns.m = [ns.m, ns.l.index] %}",
            "{{ f(*range(5), **{'k': 1, 'z': ns}) }}",
            "{{ 'a'|map(*(['map'] * 700))|list }}",
        ]));
    }

    fn expr(&mut self, kind: Kind, depth: usize) {
        if self.full(depth) {
            self.out.push_str(match kind {
                Kind::Text => "a",
                Kind::Int => "2",
                Kind::List => "b",
                Kind::Dict => "c",
                Kind::Any => "ns.s",
            });
            return;
        }
        // One in thirty is of another kind than asked for.
        match if self.choices.chance(30) {
            Kind::Any
        } else {
            kind
        } {
            Kind::Text => self.text(depth),
            Kind::Int => self.int(depth),
            Kind::List => self.list(depth),
            Kind::Dict => self.dict(depth),
            Kind::Any => self.any(depth),
        }
    }

    fn any(&mut self, depth: usize) {
        match self.choices.below(16) {
            0 | 1 => self.text(depth),
            2 => self.int(depth),
            3 | 4 => self.list(depth),
            5 => self.dict(depth),
            6 => {
                let name = self.choices.word(NAMES);
                self.out.push_str(name);
            }
            7 => {
                let field = self.choices.word(FIELDS);
                _ = write!(self.out, "ns.{field}");
            }
            8 | 9 => {
                let of = self.choices.pick(&[
                    Kind::Any,
                    Kind::Text,
                    Kind::List,
                    Kind::List,
                    Kind::Dict,
                    Kind::Int,
                ]);
                self.nested(of, depth);
                self.out.push('|');
                self.filter(of, depth);
            }
            10 => {
                self.nested(Kind::Any, depth);
                let test = self.choices.pick(&TESTS);
                _ = write!(self.out, " is {test}");
            }
            11 => self.operator(depth),
            12 => {
                self.nested(Kind::Any, depth);
                self.out.push_str(" if ");
                self.nested(Kind::Any, depth);
                if self.choices.chance(2) {
                    self.out.push_str(" else ");
                    self.nested(Kind::Any, depth);
                }
            }
            13 => {
                let inside = self.loops > 0 && self.choices.chance(2);
                let what = self.choices.word(if inside { LOOP } else { ODD });
                self.out.push_str(what);
            }
            14 => {
                let of = if self.loops > 0 && self.choices.chance(4) {
                    "loop"
                } else {
                    "f"
                };
                self.out.push_str(of);
                self.args(2, depth);
            }
            _ => {
                let (sign, kind) = self.choices.pick(&[
                    ("not ", Kind::Any),
                    ("-", Kind::Int),
                    ("+", Kind::Int),
                    ("not not ", Kind::Any),
                ]);
                self.out.push_str(sign);
                self.nested(kind, depth);
            }
        }
    }

    fn operator(&mut self, depth: usize) {
        let (left, op, right) = self.choices.pick(&[
            (Kind::Any, "==", Kind::Any),
            (Kind::Any, "!=", Kind::Any),
            (Kind::Any, "~", Kind::Any),
            (Kind::Any, "and", Kind::Any),
            (Kind::Any, "or", Kind::Any),
            (Kind::Any, "in", Kind::List),
            (Kind::Text, "not in", Kind::Text),
            (Kind::Any, "in", Kind::Dict),
            (Kind::Text, "<", Kind::Text),
            (Kind::List, ">=", Kind::List),
            (Kind::Text, "+", Kind::Text),
            (Kind::Int, "/", Kind::Int),
            (Kind::Int, "//", Kind::Int),
            (Kind::Int, "**", Kind::Int),
            (Kind::Any, "+", Kind::Any),
            (Kind::Any, "%", Kind::Any),
        ]);
        self.nested(left, depth);
        _ = write!(self.out, " {op} ");
        self.nested(right, depth);
    }

    fn text(&mut self, depth: usize) {
        match self.choices.below(12) {
            0 | 1 => self.out.push_str("ns.s"),
            2..=4 => {
                let word = self.choices.pick(&WORDS);
                self.out.push_str(word);
            }
            5 | 6 => {
                let (name, count) = self.choices.call(METHODS);
                self.nested(Kind::Text, depth);
                _ = write!(self.out, ".{name}");
                self.args(count, depth);
            }
            7 => {
                self.nested(Kind::Text, depth);
                self.out.push_str(" ~ ");
                self.nested(Kind::Any, depth);
            }
            8 => {
                self.nested(Kind::Text, depth);
                self.out.push_str(" * ");
                self.nested(Kind::Int, depth);
            }
            9 => {
                let (format, args) = self.choices.pick(&[
                    ("'%s'", Kind::Any),
                    ("'%5.2f|%-8x'", Kind::Int),
                    ("'%(k)r and %(k)30s'", Kind::Dict),
                    ("ns.s", Kind::Any),
                ]);
                _ = write!(self.out, "{format} % ");
                self.nested(args, depth);
            }
            10 => {
                self.nested(Kind::Text, depth);
                self.slice(depth);
            }
            _ => {
                self.out.push_str("strftime_now(");
                self.expr(Kind::Text, depth + 1);
                self.out.push(')');
            }
        }
    }

    fn int(&mut self, depth: usize) {
        match self.choices.below(6) {
            0..=2 => {
                let int = self.choices.word(INTS);
                self.out.push_str(int);
            }
            3 => {
                self.nested(Kind::Any, depth);
                self.out.push_str("|length");
            }
            4 => {
                self.nested(Kind::Int, depth);
                let op = self.choices.word("+ - * // % **");
                _ = write!(self.out, " {op} ");
                self.nested(Kind::Int, depth);
            }
            _ => self
                .out
                .push_str("(-170141183460469231731687303715884105727 - 1)"),
        }
    }

    fn list(&mut self, depth: usize) {
        match self.choices.below(12) {
            0 => self.out.push_str("ns.l"),
            1 => self.out.push_str("messages"),
            2 | 3 => {
                let (open, close) = self.choices.pick(&[("[", "]"), ("(", ",)")]);
                self.out.push_str(open);
                for i in 0..=self.choices.below(3) {
                    self.out.push_str(if i > 0 { ", " } else { "" });
                    self.expr(Kind::Any, depth + 1);
                }
                self.out.push_str(close);
            }
            4 => {
                self.out.push_str("range");
                self.int_args(depth);
            }
            5 => {
                self.nested(Kind::Text, depth);
                self.out.push_str(".split(");
                self.out.push_str(self.choices.pick(&[
                    "",
                    "' '",
                    "'a'",
                    "none, 2",
                    "' ', 18446744073709551615",
                ]));
                self.out.push(')');
            }
            6 => {
                self.nested(Kind::List, depth);
                self.slice(depth);
            }
            7 => {
                self.nested(Kind::List, depth);
                self.out.push_str(" + ");
                self.nested(Kind::List, depth);
            }
            8 => {
                self.nested(Kind::List, depth);
                self.out.push_str(" * ");
                self.nested(Kind::Int, depth);
            }
            9 => {
                self.nested(Kind::Dict, depth);
                self.out.push_str(self.choices.pick(&[
                    ".items()",
                    ".keys()",
                    ".values()",
                    "|items",
                    "|dictsort",
                ]));
            }
            _ => {
                self.nested(Kind::List, depth);
                let filter = self.choices.word(SEQUENCES);
                _ = write!(self.out, "|{filter}");
                if self.choices.chance(2) {
                    self.out.push_str("|list");
                }
            }
        }
    }

    fn dict(&mut self, depth: usize) {
        match self.choices.below(6) {
            0 | 1 => self.out.push_str("ns.d"),
            2 => self.out.push_str("messages[0]"),
            3 => {
                self.out.push('{');
                for i in 0..self.choices.below(3) {
                    self.out.push_str(if i > 0 { ", " } else { "" });
                    self.expr(Kind::Any, depth + 1);
                    self.out.push_str(": ");
                    self.expr(Kind::Any, depth + 1);
                }
                self.out.push('}');
            }
            4 => {
                self.out.push_str("dict.fromkeys(");
                self.expr(Kind::List, depth + 1);
                self.out.push_str(", 1)");
            }
            _ => {
                self.out.push_str("dict(");
                self.expr(Kind::Dict, depth + 1);
                self.out.push_str(", k=");
                self.expr(Kind::Any, depth + 1);
                self.out.push(')');
            }
        }
    }

    fn nested(&mut self, kind: Kind, depth: usize) {
        self.out.push('(');
        self.expr(kind, depth + 1);
        self.out.push(')');
    }

    fn slice(&mut self, depth: usize) {
        self.out.push('[');
        for i in 0..=self.choices.below(3) {
            self.out.push_str(if i > 0 { ":" } else { "" });
            if self.choices.chance(2) {
                self.expr(Kind::Int, depth + 1);
            } else if i == 0 {
                self.out.push(':');
                break;
            }
        }
        self.out.push(']');
    }

    fn int_args(&mut self, depth: usize) {
        self.out.push('(');
        for i in 0..=self.choices.below(3) {
            self.out.push_str(if i > 0 { ", " } else { "" });
            self.expr(Kind::Int, depth + 1);
        }
        self.out.push(')');
    }

    /// A filter of values of a kind, with its arguments.
    fn filter(&mut self, of: Kind, depth: usize) {
        let (name, args) = self.choices.call(match of {
            Kind::Text => TEXT_FILTERS,
            Kind::Int => INT_FILTERS,
            Kind::List => LIST_FILTERS,
            Kind::Dict => DICT_FILTERS,
            Kind::Any => ANY_FILTERS,
        });
        self.out.push_str(name);
        if args > 0 {
            self.args(args, depth);
        }
    }

    fn args(&mut self, most: usize, depth: usize) {
        self.out.push('(');
        let count = if most == 0 {
            0
        } else {
            self.choices.below(most + 1)
        };
        for i in 0..count {
            self.out.push_str(if i > 0 { ", " } else { "" });
            if i + 1 == count && self.choices.chance(6) {
                let key = self.choices.word(KEYS);
                _ = write!(self.out, "{key}=");
            }
            let kind = self
                .choices
                .pick(&[Kind::Text, Kind::Int, Kind::Any, Kind::Text]);
            self.expr(kind, depth + 1);
        }
        if self.choices.chance(24) {
            self.out
                .push_str(if count > 0 { ", *b, **c" } else { "*b" });
        }
        self.out.push(')');
    }
}
