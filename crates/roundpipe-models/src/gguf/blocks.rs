//! Elements of a GGUF file: floats, and ggml's blocks of 32 values with one scale.
//!
//! | type | a block of 32 values |
//! |---|---|
//! | q8_0 | the scale d (f16), then 32 signed bytes; a value is d · q |
//! | q4_0 | the scale d (f16), then 16 bytes; byte i has value i in its low half and value i + 16 in its high half; a value is d · (q - 8) |
//!
//! The arithmetic is in f32, in the order of ggml's reference, so that files are the same byte for
//! byte; `fixtures/gguf_blocks.safetensors` has what the `gguf` package makes of the same values.

use roundpipe::{bf16, f16};

/// Values that share a scale.
pub(super) const BLOCK: usize = 32;

/// The type of one tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    F32,
    F16,
    Bf16,
    Q8_0,
    Q4_0,
}

impl Kind {
    /// ggml's number.
    pub fn number(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::Q4_0 => 2,
            Self::Q8_0 => 8,
            Self::Bf16 => 30,
        }
    }

    /// Bytes of `elements` values, whole blocks of them.
    pub fn bytes(self, elements: usize) -> usize {
        match self {
            Self::F32 => elements * 4,
            Self::F16 | Self::Bf16 => elements * 2,
            Self::Q8_0 => elements / BLOCK * (2 + BLOCK),
            Self::Q4_0 => elements / BLOCK * (2 + BLOCK / 2),
        }
    }

    pub fn is_blocks(self) -> bool {
        matches!(self, Self::Q8_0 | Self::Q4_0)
    }

    /// Writes `values` into `out`, which has exactly their bytes.
    ///
    /// # Errors
    /// What is wrong with a value that the type cannot hold, and what to choose instead.
    pub fn write(self, values: &[f32], out: &mut [u8]) -> Result<(), &'static str> {
        match self {
            Self::F32 => {
                for (out, value) in out.chunks_exact_mut(4).zip(values) {
                    out.copy_from_slice(&value.to_le_bytes());
                }
            }
            Self::Bf16 => {
                for (out, value) in out.chunks_exact_mut(2).zip(values) {
                    out.copy_from_slice(&bf16::from_f32(*value).to_le_bytes());
                }
            }
            Self::F16 => {
                for (out, value) in out.chunks_exact_mut(2).zip(values) {
                    let half = f16::from_f32(*value);
                    if half.is_infinite() && value.is_finite() {
                        return Err("has a value that is too large for f16; choose bf16 or f32");
                    }
                    out.copy_from_slice(&half.to_le_bytes());
                }
            }
            Self::Q8_0 | Self::Q4_0 => return self.write_blocks(values, out),
        }
        Ok(())
    }

    fn write_blocks(self, values: &[f32], out: &mut [u8]) -> Result<(), &'static str> {
        if !values.iter().all(|value| value.is_finite()) {
            return Err("has a value that is not finite, which blocks cannot hold; choose f32");
        }
        let size = self.bytes(BLOCK);
        for (out, values) in out.chunks_exact_mut(size).zip(values.chunks_exact(BLOCK)) {
            let scale = match self {
                Self::Q8_0 => write_q8_0(values, &mut out[2..]),
                _ => write_q4_0(values, &mut out[2..]),
            };
            let half = f16::from_f32(scale);
            if half.is_infinite() {
                return Err("has a value that is too large for a scale in f16; choose bf16 or f32");
            }
            out[..2].copy_from_slice(&half.to_le_bytes());
        }
        Ok(())
    }
}

/// Writes 32 bytes; gives the scale.
fn write_q8_0(values: &[f32], out: &mut [u8]) -> f32 {
    let most = values
        .iter()
        .fold(0f32, |most, value| most.max(value.abs()));
    let scale = most / 127.0;
    let inverse = inverse(scale);
    for (out, value) in out.iter_mut().zip(values) {
        // Halves go away from zero, as in C's roundf.
        *out = (value * inverse).round() as i8 as u8;
    }
    scale
}

/// Writes 16 bytes; gives the scale. The largest value, with its sign, becomes -8.
fn write_q4_0(values: &[f32], out: &mut [u8]) -> f32 {
    let mut largest = 0f32;
    for value in values {
        if value.abs() > largest.abs() {
            largest = *value;
        }
    }
    let scale = largest / -8.0;
    let inverse = inverse(scale);
    let quant = |value: f32| ((value * inverse + 8.5) as i8).min(15) as u8;
    let (low, high) = values.split_at(BLOCK / 2);
    for (out, (low, high)) in out.iter_mut().zip(low.iter().zip(high)) {
        *out = quant(*low) | quant(*high) << 4;
    }
    scale
}

/// 1 / `scale`; 0 where that is no number, since the scale is 0 in f16 as well then.
fn inverse(scale: f32) -> f32 {
    let inverse = 1.0 / scale;
    if inverse.is_finite() { inverse } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use safetensors::SafeTensors;

    use super::{BLOCK, Kind};

    fn written(kind: Kind, values: &[f32]) -> Result<Vec<u8>, &'static str> {
        let mut out = vec![0xaa; kind.bytes(values.len())];
        kind.write(values, &mut out)?;
        Ok(out)
    }

    /// What the `gguf` package makes of the same values, byte for byte.
    #[test]
    fn blocks_are_those_of_ggml() {
        let path = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../../fixtures/gguf_blocks.safetensors"
        );
        let bytes = std::fs::read(path).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let values = file.tensor("values").unwrap();
        let values: Vec<f32> = values
            .data()
            .chunks_exact(4)
            .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
            .collect();
        assert!(values.len() > 200 * BLOCK);
        for (name, kind) in [("q8_0", Kind::Q8_0), ("q4_0", Kind::Q4_0)] {
            let want = file.tensor(name).unwrap().data().to_vec();
            let got = written(kind, &values).unwrap();
            let size = kind.bytes(BLOCK);
            for (row, (got, want)) in got.chunks(size).zip(want.chunks(size)).enumerate() {
                assert_eq!(got, want, "{name}, block {row}");
            }
            assert_eq!(got.len(), want.len());
        }
    }

    /// A value that a type cannot hold is an error, not an infinity in the file.
    #[test]
    fn what_does_not_fit_is_refused() {
        let mut values = [0.5f32; BLOCK];
        for kind in [Kind::F16, Kind::Bf16, Kind::Q8_0, Kind::Q4_0] {
            written(kind, &values).unwrap();
        }
        values[3] = 7e4;
        assert!(written(Kind::F16, &values).unwrap_err().contains("bf16"));
        written(Kind::Q8_0, &values).unwrap();
        values[3] = 1e9;
        assert!(written(Kind::Q8_0, &values).is_err() && written(Kind::Q4_0, &values).is_err());
        values[3] = f32::NAN;
        assert!(written(Kind::Q8_0, &values).is_err() && written(Kind::Q4_0, &values).is_err());
        // So small that the scale is 0 in f16 and has no inverse in f32.
        let values = [1e-44f32; BLOCK];
        assert_eq!(written(Kind::Q8_0, &values).unwrap(), [0; 34]);
    }
}
