//! Source of a template to tokens, with Jinja2's rules for whitespace (`trim_blocks` and
//! `lstrip_blocks` on).
//!
//! Refuses unbalanced brackets, unclosed tags and characters that Jinja2 has no token for.

use std::fmt::Display;

use crate::error::Fault;

/// How many tokens a template may have. The largest that models come with have about ten thousand.
pub(crate) const MAX_TOKENS: usize = 100_000;

/// What the parser reads.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Token {
    /// Text outside of tags.
    Data(String),
    /// `{%`
    BlockBegin,
    /// `%}`
    BlockEnd,
    /// `{{`
    PrintBegin,
    /// `}}`
    PrintEnd,
    Name(String),
    Str(String),
    Int(i128),
    Float(f64),
    Op(&'static str),
}

/// Longest first, so that the first match is the right one.
const OPERATORS: [&str; 26] = [
    "//", "**", "==", "!=", ">=", "<=", "+", "-", "/", "*", "%", "~", "[", "]", "(", ")", "{", "}",
    ">", "<", "=", ".", ":", "|", ",", ";",
];

/// Splits a template; each token with its line.
pub(crate) fn lex(source: &str) -> Result<Vec<(Token, u32)>, Fault> {
    let mut text = source.replace("\r\n", "\n").replace('\r', "\n");
    if text.ends_with('\n') {
        text.pop();
    }
    let mut lexer = Lexer {
        text: &text,
        at: 0,
        line: 1,
        line_start: true,
        tokens: Vec::new(),
    };
    while lexer.at < text.len() {
        lexer.data()?;
    }
    Ok(lexer.tokens)
}

struct Lexer<'s> {
    text: &'s str,
    at: usize,
    line: u32,
    /// Whether the last match ended with a newline (or nothing was matched yet).
    line_start: bool,
    tokens: Vec<(Token, u32)>,
}

impl<'s> Lexer<'s> {
    fn rest(&self) -> &'s str {
        &self.text[self.at..]
    }

    /// The one place where tokens are made: it refuses too many.
    fn push(&mut self, token: Token) -> Result<(), Fault> {
        if self.tokens.len() >= MAX_TOKENS {
            return self.fault(format_args!(
                "the template has more than {MAX_TOKENS} tokens; shorten it"
            ));
        }
        self.tokens.push((token, self.line));
        Ok(())
    }

    /// Moves on by `bytes`, counting lines.
    fn advance(&mut self, bytes: usize) {
        let passed = &self.text[self.at..self.at + bytes];
        self.line += passed.bytes().filter(|b| *b == b'\n').count() as u32;
        self.line_start = passed.ends_with('\n');
        self.at += bytes;
    }

    fn fault<T>(&self, what: impl Display) -> Result<T, Fault> {
        Err(Fault::at(self.line, what))
    }

    /// Text up to the next tag, and that tag.
    fn data(&mut self) -> Result<(), Fault> {
        let rest = self.rest();
        let Some(open) = find_tag(rest) else {
            self.push(Token::Data(rest.to_string()))?;
            self.advance(rest.len());
            return Ok(());
        };
        let kind = rest.as_bytes()[open + 1];
        let sign = rest
            .as_bytes()
            .get(open + 2)
            .copied()
            .filter(|b| matches!(b, b'-' | b'+'));
        let kept = kept_before_tag(&rest[..open], sign, kind != b'{', self.line_start);
        if !kept.is_empty() {
            self.push(Token::Data(kept.to_string()))?;
        }
        let tag = open + 2 + usize::from(sign.is_some());
        if kind == b'%'
            && let Some(body) = raw_begin(&rest[tag..])
        {
            self.advance(tag + body);
            return self.raw();
        }
        self.advance(tag);
        match kind {
            b'#' => self.comment(),
            b'%' => self.tag(Token::BlockBegin, Token::BlockEnd),
            _ => self.tag(Token::PrintBegin, Token::PrintEnd),
        }
    }

    fn comment(&mut self) -> Result<(), Fault> {
        let rest = self.rest();
        let Some(close) = rest.find("#}") else {
            return self.fault("a comment is not closed; add '#}'");
        };
        let end = after_close(rest, close + 2, rest[..close].ends_with('-'), true);
        self.advance(end);
        Ok(())
    }

    /// Everything up to `{% endraw %}`, as it stands.
    fn raw(&mut self) -> Result<(), Fault> {
        let rest = self.rest();
        let mut from = 0;
        while let Some(open) = rest[from..].find("{%").map(|i| from + i) {
            let sign = rest
                .as_bytes()
                .get(open + 2)
                .copied()
                .filter(|b| matches!(b, b'-' | b'+'));
            let inner = &rest[open + 2 + usize::from(sign.is_some())..];
            if let Some(tail) = inner.trim_start().strip_prefix("endraw") {
                let tail = tail.trim_start();
                let dash = tail.starts_with('-');
                if let Some(after) = tail
                    .strip_prefix(['-', '+'])
                    .unwrap_or(tail)
                    .strip_prefix("%}")
                {
                    let kept = kept_before_tag(&rest[..open], sign, true, self.line_start);
                    self.push(Token::Data(kept.to_string()))?;
                    let close = rest.len() - after.len();
                    let plus = tail.starts_with('+');
                    self.advance(after_close(rest, close, dash, !plus));
                    return Ok(());
                }
            }
            from = open + 2;
        }
        self.fault("'raw' is not closed; add '{% endraw %}'")
    }

    /// The inside of `{% %}` or `{{ }}`.
    fn tag(&mut self, begin: Token, end: Token) -> Result<(), Fault> {
        let block = begin == Token::BlockBegin;
        let close = if block { "%}" } else { "}}" };
        self.push(begin)?;
        let mut open: Vec<char> = Vec::new();
        loop {
            let rest = self.rest();
            let Some(first) = rest.chars().next() else {
                return self.fault(format_args!("a tag is not closed; add '{close}'"));
            };
            if first.is_whitespace() {
                self.advance(rest.len() - rest.trim_start().len());
                continue;
            }
            if open.is_empty() {
                let sign = matches!(first, '-') || (block && first == '+');
                let at = usize::from(sign);
                if rest[at..].starts_with(close) {
                    self.push(end)?;
                    self.advance(after_close(
                        rest,
                        at + 2,
                        first == '-',
                        block && first != '+',
                    ));
                    return Ok(());
                }
            }
            self.token(first, &mut open)?;
        }
    }

    fn token(&mut self, first: char, open: &mut Vec<char>) -> Result<(), Fault> {
        let rest = self.rest();
        if first == '_' || first.is_alphabetic() {
            let end = rest
                .find(|c: char| c != '_' && !c.is_alphanumeric())
                .unwrap_or(rest.len());
            self.push(Token::Name(rest[..end].to_string()))?;
            self.advance(end);
            return Ok(());
        }
        if first.is_ascii_digit() {
            return self.number();
        }
        if first == '\'' || first == '"' {
            return self.string(first);
        }
        let Some(operator) = OPERATORS.iter().find(|o| rest.starts_with(**o)) else {
            return self.fault(format_args!("unexpected character {first:?}; remove it"));
        };
        match *operator {
            "(" => open.push(')'),
            "[" => open.push(']'),
            "{" => open.push('}'),
            ")" | "]" | "}" if open.pop() != Some(first) => {
                return self.fault(format_args!(
                    "'{first}' closes nothing; balance the brackets"
                ));
            }
            _ => {}
        }
        self.push(Token::Op(operator))?;
        self.advance(operator.len());
        Ok(())
    }

    fn string(&mut self, quote: char) -> Result<(), Fault> {
        let rest = self.rest();
        let mut escaped = false;
        for (i, c) in rest.char_indices().skip(1) {
            match c {
                _ if escaped => escaped = false,
                '\\' => escaped = true,
                c if c == quote => {
                    let Some(text) = unescape(&rest[1..i]) else {
                        return self
                            .fault("a string has a broken escape; write it as \\\\ or \\uXXXX");
                    };
                    self.push(Token::Str(text))?;
                    self.advance(i + 1);
                    return Ok(());
                }
                _ => {}
            }
        }
        self.fault(format_args!("a string is not closed; add {quote}"))
    }

    fn number(&mut self) -> Result<(), Fault> {
        let rest = self.rest();
        let lower = rest.get(..2).unwrap_or("").to_ascii_lowercase();
        let radix = match lower.as_str() {
            "0x" => 16,
            "0o" => 8,
            "0b" => 2,
            _ => 10,
        };
        let digits = |from: usize| {
            let tail = &rest[from..];
            from + tail
                .find(|c: char| !(c.is_digit(radix) || c == '_'))
                .unwrap_or(tail.len())
        };
        let start = if radix == 10 { 0 } else { 2 };
        let mut end = digits(start);
        let mut float = false;
        let tail = rest.as_bytes();
        if radix == 10 {
            if tail.get(end) == Some(&b'.') && tail.get(end + 1).is_some_and(u8::is_ascii_digit) {
                end = digits(end + 1);
                float = true;
            }
            let sign = usize::from(matches!(tail.get(end + 1), Some(b'+' | b'-')));
            let exponent = matches!(tail.get(end), Some(b'e' | b'E'));
            if exponent && tail.get(end + 1 + sign).is_some_and(u8::is_ascii_digit) {
                end = digits(end + 1 + sign);
                float = true;
            }
        }
        let plain = rest[start..end].replace('_', "");
        let token = if float {
            plain.parse().ok().map(Token::Float)
        } else {
            i128::from_str_radix(&plain, radix).ok().map(Token::Int)
        };
        let Some(token) = token else {
            return self.fault(format_args!(
                "the number {} is too large",
                &rest[..end.min(40)]
            ));
        };
        self.push(token)?;
        self.advance(end);
        Ok(())
    }
}

/// Where the next `{{`, `{%` or `{#` begins.
fn find_tag(text: &str) -> Option<usize> {
    text.as_bytes()
        .windows(2)
        .position(|w| w[0] == b'{' && matches!(w[1], b'{' | b'%' | b'#'))
}

/// The text before a tag, less what its sign or `lstrip_blocks` takes away.
fn kept_before_tag(text: &str, sign: Option<u8>, lstrip: bool, line_start: bool) -> &str {
    match sign {
        Some(b'-') => text.trim_end(),
        Some(_) => text,
        None if lstrip => {
            let line = text.rfind('\n').map_or(0, |i| i + 1);
            let blank = text[line..].chars().all(char::is_whitespace);
            if (line > 0 || line_start) && blank {
                &text[..line]
            } else {
                text
            }
        }
        None => text,
    }
}

/// The end of a closing tag that ends at `close`: with the whitespace or the newline it takes
/// along.
fn after_close(text: &str, close: usize, dash: bool, trim: bool) -> usize {
    let tail = &text[close..];
    if dash {
        close + tail.len() - tail.trim_start().len()
    } else {
        close + usize::from(trim && tail.starts_with('\n'))
    }
}

/// Length of ` raw %}` after `{%`, if that is what follows.
fn raw_begin(text: &str) -> Option<usize> {
    let tail = text.trim_start().strip_prefix("raw")?.trim_start();
    let dash = tail.starts_with('-');
    let after = tail.strip_prefix('-').unwrap_or(tail).strip_prefix("%}")?;
    Some(after_close(text, text.len() - after.len(), dash, false))
}

/// Python's escapes in a string; an unknown one stays as it stands.
fn unescape(text: &str) -> Option<String> {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(slash) = rest.find('\\') {
        out.push_str(&rest[..slash]);
        rest = &rest[slash + 1..];
        let c = rest.chars().next()?;
        rest = &rest[c.len_utf8()..];
        let hex = match c {
            'x' => 2,
            'u' => 4,
            'U' => 8,
            _ => 0,
        };
        match c {
            '\n' => {}
            '\\' | '\'' | '"' => out.push(c),
            'n' => out.push('\n'),
            't' => out.push('\t'),
            'r' => out.push('\r'),
            'a' => out.push('\x07'),
            'b' => out.push('\x08'),
            'f' => out.push('\x0c'),
            'v' => out.push('\x0b'),
            '0'..='7' => {
                let more = rest
                    .bytes()
                    .take(2)
                    .take_while(|b| (b'0'..=b'7').contains(b))
                    .count();
                let code = format!("{c}{}", &rest[..more]);
                out.push(char::from_u32(u32::from_str_radix(&code, 8).ok()?)?);
                rest = &rest[more..];
            }
            _ if hex > 0 => {
                out.push(char::from_u32(
                    u32::from_str_radix(rest.get(..hex)?, 16).ok()?,
                )?);
                rest = &rest[hex..];
            }
            other => out.extend(['\\', other]),
        }
    }
    out.push_str(rest);
    Some(out)
}
