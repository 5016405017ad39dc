//! A size in bytes that prints itself the same way everywhere.

use std::fmt;
use std::str::FromStr;

/// A size in bytes. Logs and errors print it in the largest binary unit that keeps it readable.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Bytes(pub u64);

impl Bytes {
    /// `n` binary gigabytes.
    pub const fn gib(n: u64) -> Self {
        Self(n << 30)
    }

    /// `n` binary megabytes.
    pub const fn mib(n: u64) -> Self {
        Self(n << 20)
    }
}

impl FromStr for Bytes {
    type Err = String;

    /// A number and a unit: `24GiB`, `24G`, `1.5 GiB`, `800MiB`, `4096`. Units are powers of 1024,
    /// except `GB` and `MB`, which are powers of 1000.
    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim();
        let wrong = || {
            format!("`{text}` is no size; write a number and a unit, for example 24GiB or 800MiB")
        };
        let split = text
            .find(|c: char| !c.is_ascii_digit() && c != '.')
            .unwrap_or(text.len());
        let (number, unit) = text.split_at(split);
        let scale = match unit.trim().to_ascii_lowercase().as_str() {
            "" | "b" => 1.0,
            "k" | "kib" => 1024.0,
            "m" | "mib" => 1_048_576.0,
            "g" | "gib" => 1_073_741_824.0,
            "t" | "tib" => 1_099_511_627_776.0,
            "mb" => 1e6,
            "gb" => 1e9,
            _ => return Err(wrong()),
        };
        let bytes = number.parse::<f64>().map_err(|_| wrong())? * scale;
        if !(1.0..9e18).contains(&bytes) {
            return Err(wrong());
        }
        Ok(Self(bytes as u64))
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let size = self.0 as f64;
        match self.0 {
            0..1024 => write!(f, "{} B", self.0),
            1024..1_048_576 => write!(f, "{:.1} KiB", size / 1024.0),
            1_048_576..1_073_741_824 => write!(f, "{:.1} MiB", size / 1_048_576.0),
            _ => write!(f, "{:.2} GiB", size / 1_073_741_824.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Bytes;

    #[test]
    fn sizes_print_in_the_largest_readable_unit() {
        for (bytes, text) in [
            (7, "7 B"),
            (1536, "1.5 KiB"),
            (3 << 20, "3.0 MiB"),
            ((1 << 30) + (1 << 29), "1.50 GiB"),
        ] {
            assert_eq!(Bytes(bytes).to_string(), text);
        }
    }

    #[test]
    fn sizes_are_read_with_their_units() {
        for (text, bytes) in [
            ("24GiB", 24 << 30),
            ("24g", 24 << 30),
            (" 1.5 GiB ", 3 << 29),
            ("800MiB", 800 << 20),
            ("4096", 4096),
            ("2GB", 2_000_000_000),
        ] {
            assert_eq!(text.parse(), Ok(Bytes(bytes)), "{text}");
        }
        for text in [
            "",
            "GiB",
            "-1GiB",
            "1e3",
            "24 apples",
            "0",
            "99999999999TiB",
            "1.2.3G",
            "nan",
        ] {
            assert!(
                text.parse::<Bytes>().unwrap_err().contains("is no size"),
                "{text}"
            );
        }
    }
}
