//! MXFP4, the OCP microscaling format: groups of 32 four-bit floats that share a power of two.
//!
//! A group is 16 bytes, the earlier value in the low half of each byte. A value has a sign, two
//! bits of exponent and one of mantissa; the scale is one byte, the exponent of two plus 127.
//! Values are exact in f32, or infinite where they are too large for it, as in transformers (the
//! format itself calls a scale of 255 NaN).

/// Values per group.
pub const GROUP: usize = 32;
/// Bytes per group, without its scale.
pub const GROUP_BYTES: usize = 16;

/// Twice the values: the factor is then half as large and a finite f32 for every scale.
const DOUBLES: [f32; 16] = [
    0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, -0.0, -1.0, -2.0, -3.0, -4.0, -6.0, -8.0, -12.0,
];

/// The two values of a byte, low half first.
#[inline(always)]
pub fn unpack(byte: u8, scale: u8) -> [f32; 2] {
    let half = half_factor(scale);
    [
        DOUBLES[usize::from(byte & 15)] * half,
        DOUBLES[usize::from(byte >> 4)] * half,
    ]
}

/// Two to the power of `scale` - 128.
#[inline(always)]
fn half_factor(scale: u8) -> f32 {
    // The byte less one is f32's own exponent field, except for the two that are not normal
    // numbers.
    match scale {
        0 => f32::from_bits(1 << 21),
        1 => f32::from_bits(1 << 22),
        _ => f32::from_bits((u32::from(scale) - 1) << 23),
    }
}

#[cfg(test)]
mod tests {
    use super::{half_factor, unpack};

    /// Each scale is the power that the format defines, checked without the trick that computes it.
    #[test]
    fn scales_are_powers_of_two() {
        for scale in 0..=255u8 {
            assert_eq!(
                f64::from(half_factor(scale)),
                2f64.powi(i32::from(scale) - 128),
                "{scale}"
            );
        }
    }

    #[test]
    fn the_low_half_comes_first() {
        assert_eq!(unpack(0x27, 127), [6.0, 1.0]);
        assert_eq!(unpack(0xf1, 128), [1.0, -12.0]);
        assert_eq!(unpack(0x20, 255), [0.0, f32::INFINITY]);
    }
}
