//! What goes wrong with a template: inside as a [`Fault`], outside as an [`Error`].

use std::fmt::{self, Display, Write};

/// Longest message of a fault, in characters.
const FAULT_CHARS: usize = 400;

/// A template that cannot be parsed or rendered: one line of bounded length that names the line of
/// the template, if there is one. It quotes the template, so what would move a terminal's cursor is
/// shown as an escape.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[error("chat template: {}", Escaped(.0))]
pub struct Error(Box<str>);

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Error {
    /// The message as the template caused it, without escapes and without the words before it.
    pub fn message(&self) -> &str {
        &self.0
    }
}

impl From<Fault> for Error {
    fn from(fault: Fault) -> Self {
        let Report { line, what } = *fault.0;
        let message = match line {
            Some(line) => format!("line {line}: {what}"),
            None => what,
        };
        Self(message.into())
    }
}

/// The crate's result.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Text without control characters.
struct Escaped<'a>(&'a str);

impl Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for c in self.0.chars() {
            if c.is_control() {
                write!(f, "{}", c.escape_default())?;
            } else {
                f.write_char(c)?;
            }
        }
        Ok(())
    }
}

/// What a template did wrong, and where: one line of bounded length, whatever it quotes.
#[derive(Debug)]
pub(crate) struct Fault(Box<Report>);

#[derive(Debug)]
struct Report {
    line: Option<u32>,
    what: String,
}

impl Fault {
    pub(crate) fn new(what: impl Display) -> Self {
        let mut short = Short {
            text: String::new(),
            chars: 0,
            gap: false,
        };
        // The only error is that it is long enough.
        _ = write!(short, "{what}");
        Self(Box::new(Report {
            line: None,
            what: short.text,
        }))
    }

    pub(crate) fn at(line: u32, what: impl Display) -> Self {
        Self::new(what).or_at(line)
    }

    /// The same fault, in `line` unless it knows better.
    pub(crate) fn or_at(mut self, line: u32) -> Self {
        self.0.line.get_or_insert(line);
        self
    }
}

/// Takes the first characters of a message, every gap as one space.
struct Short {
    text: String,
    chars: usize,
    gap: bool,
}

impl fmt::Write for Short {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for c in text.chars() {
            if c.is_whitespace() {
                self.gap = !self.text.is_empty();
                continue;
            }
            if self.gap {
                self.text.push(' ');
                self.chars += 1;
                self.gap = false;
            }
            if self.chars >= FAULT_CHARS {
                return Err(fmt::Error);
            }
            self.text.push(c);
            self.chars += 1;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::{Error, Fault};

    /// Whatever a message quotes, it is one short line that no terminal obeys.
    #[test]
    fn messages_are_one_short_line() {
        let quoted = format!("no filter\n 'a\u{1b}[2J\u{7}' {}", "é".repeat(100_000));
        let text = Error::from(Fault::at(7, quoted)).to_string();
        assert!(
            text.starts_with(r"chat template: line 7: no filter 'a\u{1b}[2J\u{7}' é"),
            "{text}"
        );
        assert!(
            text.chars().count() < 450 && !text.chars().any(char::is_control),
            "{text}"
        );
    }
}
