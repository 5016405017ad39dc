//! A size in bytes that prints itself the same way everywhere.

use std::fmt;

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
        for (bytes, text) in
            [(7, "7 B"), (1536, "1.5 KiB"), (3 << 20, "3.0 MiB"), ((1 << 30) + (1 << 29), "1.50 GiB")]
        {
            assert_eq!(Bytes(bytes).to_string(), text);
        }
    }
}
