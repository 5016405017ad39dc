//! Text of others on a terminal.
//!
//! A model writes whatever it likes, and so may a file whose words stand in an error. On a
//! terminal, control characters would move the cursor, change colours, set the clipboard; there
//! each is shown as `�`. What goes into a file or a pipe is left as it is.

use std::borrow::Cow;
use std::io::IsTerminal;

/// How a text is written to standard output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Output {
    /// Control characters are shown, not obeyed.
    Terminal,
    /// All characters are written as they are.
    Raw,
}

impl Output {
    /// What standard output is.
    pub fn stdout() -> Self {
        if std::io::stdout().is_terminal() {
            Self::Terminal
        } else {
            Self::Raw
        }
    }

    /// The text as it is written there.
    pub fn text(self, text: &str) -> Cow<'_, str> {
        match self {
            Self::Raw => text.into(),
            Self::Terminal => visible(text, &['\n', '\t']),
        }
    }
}

/// A line without control characters, line breaks included.
pub fn one_line(text: &str) -> Cow<'_, str> {
    visible(text, &[])
}

fn visible<'t>(text: &'t str, kept: &[char]) -> Cow<'t, str> {
    let hidden = |c: char| c.is_control() && !kept.contains(&c);
    if text.contains(hidden) {
        text.replace(hidden, "\u{fffd}").into()
    } else {
        text.into()
    }
}

#[cfg(test)]
mod tests {
    use super::{Output, one_line};

    #[test]
    fn a_terminal_gets_no_commands_and_a_pipe_gets_everything() {
        let text = "a\u{1b}[31mb\u{7}\r\u{9b}2J\u{7f}\tc\né\u{1f600}";
        assert_eq!(Output::Raw.text(text), text);
        let shown = "a\u{fffd}[31mb\u{fffd}\u{fffd}\u{fffd}2J\u{fffd}\tc\né\u{1f600}";
        assert_eq!(Output::Terminal.text(text), shown);
        assert_eq!(one_line("a\nb\u{1b}"), "a\u{fffd}b\u{fffd}");
        assert_eq!(one_line("plain"), "plain");
    }
}
