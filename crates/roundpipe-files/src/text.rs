//! Words of others, fit to stand in a message: one line of bounded length.

use std::fmt::{self, Display, Write};

/// A message as one line of bounded length. What would move a terminal's cursor is shown as an escape,
/// and of a long message the middle is left out.
#[derive(Debug, Clone, Copy)]
pub struct Line<'a>(pub &'a str);

impl Line<'_> {
    /// Characters of a long message that are shown of its start, where the place is, and of its
    /// end, where the fix is.
    const SHOWN: (usize, usize) = (500, 200);
}

impl Display for Line<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (start, end) = Self::SHOWN;
        let count = self.0.chars().count();
        for (i, c) in self.0.chars().enumerate() {
            if i == start && count > start + end {
                f.write_str(" … ")?;
            }
            if i < start || i + end >= count {
                if c.is_control() {
                    write!(f, "{}", c.escape_default())?;
                } else {
                    f.write_char(c)?;
                }
            }
        }
        Ok(())
    }
}

/// A name from a file, safe to print in one line.
pub fn shown(name: &str) -> String {
    const LONG: usize = 120;
    let cut: String = name.chars().take(LONG).collect();
    let dots = if cut.len() < name.len() { "…" } else { "" };
    format!("`{}{dots}`", cut.escape_debug())
}

/// Text of others (a parser, a server) in one line of bounded length.
pub fn one_line(text: &str) -> String {
    text.chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .take(200)
        .collect()
}
