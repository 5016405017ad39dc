//! One setting: how it is read from TOML and how it is written.

use std::fmt::Write;

use roundpipe::Bytes;
use toml::Value;

/// A value that a file or an argument can set.
pub(super) trait Setting {
    /// Takes a value, or says what would be right.
    fn set(&mut self, value: &Value) -> Result<(), String>;
    /// As TOML; nothing where it is left to the program.
    fn show(&self) -> Option<String>;
}

macro_rules! unsigned {
    ($($kind:ty),*) => {$(
        impl Setting for $kind {
            fn set(&mut self, value: &Value) -> Result<(), String> {
                let number = value.as_integer().and_then(|n| Self::try_from(n).ok());
                *self = number.ok_or("must be a whole number, 0 or more")?;
                Ok(())
            }

            fn show(&self) -> Option<String> {
                Some(self.to_string())
            }
        }
    )*};
}

unsigned!(u64, usize, u16);

impl Setting for f64 {
    fn set(&mut self, value: &Value) -> Result<(), String> {
        let number = match value {
            Value::Float(number) => *number,
            Value::Integer(number) => *number as f64,
            _ => return Err("must be a number".into()),
        };
        if !number.is_finite() {
            return Err("must be a finite number".into());
        }
        *self = number;
        Ok(())
    }

    fn show(&self) -> Option<String> {
        // TOML tells 1 from 1.0.
        let text = format!("{self:?}");
        Some(text)
    }
}

impl Setting for bool {
    fn set(&mut self, value: &Value) -> Result<(), String> {
        *self = value.as_bool().ok_or("must be true or false")?;
        Ok(())
    }

    fn show(&self) -> Option<String> {
        Some(self.to_string())
    }
}

impl Setting for String {
    fn set(&mut self, value: &Value) -> Result<(), String> {
        let text = value.as_str().filter(|text| !text.is_empty());
        text.ok_or("must be text in quotes, and not empty")?
            .clone_into(self);
        Ok(())
    }

    fn show(&self) -> Option<String> {
        Some(quoted(self))
    }
}

/// One text, or a list of them.
impl Setting for Vec<String> {
    fn set(&mut self, value: &Value) -> Result<(), String> {
        let text = |value: &Value| value.as_str().map(str::to_owned);
        let list = match value {
            Value::Array(items) => items.iter().map(text).collect(),
            one => text(one).map(|one| vec![one]),
        };
        *self = list.ok_or("must be text in quotes, or a list of texts")?;
        Ok(())
    }

    fn show(&self) -> Option<String> {
        let items: Vec<String> = self.iter().map(|item| quoted(item)).collect();
        Some(format!("[{}]", items.join(", ")))
    }
}

impl Setting for Bytes {
    fn set(&mut self, value: &Value) -> Result<(), String> {
        let text = value.as_str().ok_or("must be a size such as \"24GiB\"")?;
        *self = text.parse()?;
        Ok(())
    }

    fn show(&self) -> Option<String> {
        // Exact, so that a size survives a round trip.
        Some(quoted(&format!("{}B", self.0)))
    }
}

impl<T: Setting + Default> Setting for Option<T> {
    fn set(&mut self, value: &Value) -> Result<(), String> {
        if value.as_str() == Some("auto") {
            *self = None;
            return Ok(());
        }
        let mut inner = T::default();
        inner.set(value)?;
        *self = Some(inner);
        Ok(())
    }

    fn show(&self) -> Option<String> {
        self.as_ref().and_then(Setting::show)
    }
}

/// An enum whose variants have names in files.
macro_rules! choice {
    ($(#[$doc:meta])* $name:ident { $($(#[$item_doc:meta])* $item:ident = $text:literal,)* }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
        pub enum $name {
            $($(#[$item_doc])* $item,)*
        }

        impl $name {
            /// As files and arguments have it.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$item => $text,)*
                }
            }
        }

        impl $crate::settings::value::Setting for $name {
            fn set(&mut self, value: &toml::Value) -> Result<(), String> {
                *self = match value.as_str() {
                    $(Some($text) => Self::$item,)*
                    _ => return Err(format!("must be one of {}", [$($text),*].join(", "))),
                };
                Ok(())
            }

            fn show(&self) -> Option<String> {
                Some($crate::settings::value::quoted(self.name()))
            }
        }
    };
}
pub(super) use choice;

/// A TOML string.
pub(super) fn quoted(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 2);
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\t' => out.push_str("\\t"),
            c if c.is_control() => {
                let _ = write!(out, "\\u{:04X}", u32::from(c));
            }
            c => out.push(c),
        }
    }
    out.push('"');
    out
}
