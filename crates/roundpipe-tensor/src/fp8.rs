//! Floats of 8 bits, and the scales that rows of them have.
//!
//! [`Fp8::E4M3`] (4 bits of exponent, 3 of fraction, largest value 448) holds activations and
//! weights; [`Fp8::E5M2`] (largest value 57344) holds gradients, whose values lie further apart. A
//! row of values is stored as codes and one f32 scale: value = decode(code) · scale.
//!
//! # Scales are powers of two
//! The scale of a row is the smallest power of two at which its largest finite magnitude is not
//! above the format's largest value. It depends on its own row alone (no history, no other row), so
//! how a batch is cut into microbatches, stages and workers changes nothing. A power of two instead
//! of magnitude / 448 costs no accuracy, since the codes are floats themselves: only the range
//! below the largest value is up to one bit shorter, of 17 (E4M3) or 31 (E5M2). It buys exactness:
//! - dividing by the scale rounds nothing, so a value is rounded once, on every device alike;
//! - products with the scales round nothing, so where they are applied (in the library, behind it,
//!   row first or column first) does not show in the result.
//!
//! # Rounding
//! To nearest, ties to even; magnitudes above the largest value become the largest (which scales of
//! this module never let happen). What is not finite becomes NaN, code 0x7f: a format without
//! infinities must not hide that a gradient overflowed.
//!
//! This module computes on single values; kernels use it and must give the same bits.

use std::fmt;

/// Exponents of scales. Below, rows are so small that products with anything vanish in f32; above,
/// the largest f32 still fits.
const SCALE_EXPONENTS: (i32, i32) = (-100, 120);

/// The code of what is not finite, in both formats.
pub const NAN_CODE: u8 = 0x7f;

/// An 8-bit float format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Fp8 {
    /// 4 bits of exponent, 3 of fraction, no infinities: activations and weights.
    E4M3,
    /// 5 bits of exponent, 2 of fraction: gradients.
    E5M2,
}

impl Fp8 {
    /// The largest value: 1.75 times a power of two in both formats.
    pub const fn largest(self) -> f32 {
        match self {
            Self::E4M3 => 448.0,
            Self::E5M2 => 57344.0,
        }
    }

    /// The name that hardware and papers use.
    pub const fn name(self) -> &'static str {
        match self {
            Self::E4M3 => "e4m3",
            Self::E5M2 => "e5m2",
        }
    }

    /// Bits of the fraction.
    const fn fraction_bits(self) -> u32 {
        match self {
            Self::E4M3 => 3,
            Self::E5M2 => 2,
        }
    }

    /// What is added to exponents.
    const fn bias(self) -> u32 {
        match self {
            Self::E4M3 => 7,
            Self::E5M2 => 15,
        }
    }

    /// The code of the largest value.
    const fn largest_code(self) -> u32 {
        match self {
            Self::E4M3 => 0x7e,
            Self::E5M2 => 0x7b,
        }
    }

    /// The scale of a row whose largest finite magnitude is `most`: a power of two from 2^-100 to
    /// 2^120.
    #[inline]
    pub fn scale(self, most: f32) -> f32 {
        // Exponents of 448 and 57344; fractions above .75 need one more.
        let top = match self {
            Self::E4M3 => 8,
            Self::E5M2 => 15,
        };
        let bits = most.to_bits() & 0x7fff_ffff;
        let exponent =
            (bits >> 23) as i32 - 127 - top + i32::from(bits & 0x007f_ffff > 0x0060_0000);
        power_of_two(exponent.clamp(SCALE_EXPONENTS.0, SCALE_EXPONENTS.1))
    }

    /// The code of a value that was divided by its scale.
    #[inline(always)]
    pub fn encode(self, x: f32) -> u8 {
        let sign = (x.to_bits() >> 24) as u8 & 0x80;
        let magnitude = x.to_bits() & 0x7fff_ffff;
        if magnitude >= 0x7f80_0000 {
            return NAN_CODE;
        }
        // Bits of f32's fraction that are rounded away, and by how much its exponents are larger.
        let dropped = 23 - self.fraction_bits();
        let rebias = (127 - self.bias()) << 23;
        let code = if magnitude < rebias + (1 << 23) {
            // Below the smallest normal value: the adder rounds to multiples of the smallest step,
            // which is the last bit of a float of this exponent.
            let anchor = power_of_two(24 - self.bias() as i32 - self.fraction_bits() as i32);
            (f32::from_bits(magnitude) + anchor).to_bits() - anchor.to_bits()
        } else {
            let half = (1 << (dropped - 1)) - 1 + (magnitude >> dropped & 1);
            ((magnitude + half - rebias) >> dropped).min(self.largest_code())
        };
        sign | code as u8
    }

    /// The value of a code, without its row's scale.
    #[inline]
    pub const fn decode(self, code: u8) -> f32 {
        let magnitude = code as u32 & 0x7f;
        let value = if magnitude > self.largest_code() {
            // E5M2 has a code for infinity, which nothing here writes.
            match (self, magnitude) {
                (Self::E5M2, 0x7c) => f32::INFINITY,
                _ => f32::NAN,
            }
        } else {
            // The same fields in an f32 that is too small by the difference of the biases; exact,
            // for codes below the normal values too.
            let small = f32::from_bits(magnitude << (23 - self.fraction_bits()));
            small * power_of_two(127 - self.bias() as i32)
        };
        if code & 0x80 == 0 { value } else { -value }
    }

    /// The values of all codes.
    pub const fn values(self) -> [f32; 256] {
        let mut all = [0.0; 256];
        let mut code = 0;
        while code < 256 {
            all[code] = self.decode(code as u8);
            code += 1;
        }
        all
    }

    /// The scale of a row, and its codes.
    ///
    /// # Panics
    /// If there are not as many codes as values.
    pub fn quantize(self, row: &[f32], codes: &mut [u8]) -> f32 {
        assert_eq!(row.len(), codes.len(), "a code for every value");
        let scale = self.scale(row.iter().fold(0.0, |most, x| larger(most, *x)));
        let inverse = 1.0 / scale;
        for (code, x) in codes.iter_mut().zip(row) {
            *code = self.encode(x * inverse);
        }
        scale
    }
}

impl fmt::Display for Fp8 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The larger of a magnitude and that of `x`, which does not count where it is not finite.
#[inline(always)]
pub(crate) fn larger(most: f32, x: f32) -> f32 {
    let x = x.abs();
    if x > most && x < f32::INFINITY {
        x
    } else {
        most
    }
}

/// 2^exponent, of a normal f32.
const fn power_of_two(exponent: i32) -> f32 {
    f32::from_bits(((exponent + 127) as u32) << 23)
}

#[cfg(test)]
mod tests {
    use super::{Fp8, NAN_CODE, power_of_two};

    const BOTH: [Fp8; 2] = [Fp8::E4M3, Fp8::E5M2];

    /// The definition of the formats, written out with powers.
    fn by_definition(format: Fp8, code: u8) -> f64 {
        let (bits, bias) = match format {
            Fp8::E4M3 => (3, 7),
            Fp8::E5M2 => (2, 15),
        };
        let (exponent, fraction) = (
            i32::from(code & 0x7f) >> bits,
            f64::from(code & ((1 << bits) - 1)) / f64::from(1 << bits),
        );
        let value = match exponent {
            0 => fraction * 2f64.powi(1 - bias),
            _ => (1.0 + fraction) * 2f64.powi(exponent - bias),
        };
        if code & 0x80 == 0 { value } else { -value }
    }

    #[test]
    fn every_code_has_the_value_of_the_definition() {
        for format in BOTH {
            let largest = format.largest_code() as u8;
            for code in 0..=255u8 {
                let value = format.decode(code);
                if code & 0x7f > largest {
                    assert!(!value.is_finite(), "{format} {code:#x}");
                } else {
                    assert_eq!(
                        f64::from(value),
                        by_definition(format, code),
                        "{format} {code:#x}"
                    );
                    assert_eq!(format.encode(value), code, "{format} {code:#x}");
                }
            }
            assert_eq!(format.decode(largest), format.largest());
            assert!(format.decode(NAN_CODE).is_nan());
        }
    }

    /// Every bf16 value and its neighbours in f32: no other code is nearer, and ties are even.
    #[test]
    fn values_are_rounded_to_the_nearest_code_and_ties_to_even() {
        for format in BOTH {
            let largest = format.largest_code() as u8;
            for high in 0..=u16::MAX {
                for low in [0u32, 1, 0x8000, 0xffff] {
                    let x = f32::from_bits(u32::from(high) << 16 | low);
                    let code = format.encode(x);
                    if !x.is_finite() {
                        assert_eq!(code, NAN_CODE);
                        continue;
                    }
                    assert_eq!(code & 0x80 != 0, x.is_sign_negative(), "{x}");
                    if x.abs() > format.largest() {
                        assert_eq!(code & 0x7f, largest, "{format} {x}");
                        continue;
                    }
                    let distance = |code: u8| (f64::from(format.decode(code)) - f64::from(x)).abs();
                    let here = distance(code);
                    let magnitude = code & 0x7f;
                    if magnitude > 0 {
                        let below = distance(code - 1);
                        let tie = here == below && code & 1 == 0;
                        assert!(here < below || tie, "{format} {x}: {code:#x}");
                    }
                    if magnitude < largest {
                        let above = distance(code + 1);
                        let tie = here == above && code & 1 == 0;
                        assert!(here < above || tie, "{format} {x}: {code:#x}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_scale_is_the_smallest_power_of_two_that_fits() {
        for format in BOTH {
            for bits in (0x0080_0000..0x7f80_0000u32).step_by(4099) {
                let most = f32::from_bits(bits);
                let scale = format.scale(most);
                assert_eq!(scale.to_bits() & 0x007f_ffff, 0, "{most}: a power of two");
                let limit = |scale: f32| f64::from(format.largest()) * f64::from(scale);
                assert!(f64::from(most) <= limit(scale), "{format} {most}");
                let smallest = scale == power_of_two(-100);
                assert!(
                    smallest || f64::from(most) > limit(scale / 2.0),
                    "{format} {most}"
                );
            }
            assert_eq!(format.scale(0.0), power_of_two(-100));
            assert_eq!(format.scale(format.largest()), 1.0);
            assert_eq!(format.scale(format.largest() * 1.01), 2.0);
        }
    }

    /// Infinities and NaN show as NaN and leave the rest of their row alone.
    #[test]
    fn what_is_not_finite_stays_visible() {
        for format in BOTH {
            let row = [1.0, f32::INFINITY, -3.0, f32::NAN, f32::NEG_INFINITY, 0.0];
            let mut codes = [0; 6];
            let scale = format.quantize(&row, &mut codes);
            assert_eq!(scale, format.scale(3.0));
            for (x, code) in row.into_iter().zip(codes) {
                let value = format.decode(code) * scale;
                assert!(
                    value == x || (!x.is_finite() && value.is_nan()),
                    "{format} {x}"
                );
            }
        }
    }
}
