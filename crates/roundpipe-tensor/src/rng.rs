//! Counter-based random numbers: a value depends on its key and position, never on who drew before.
//!
//! The generator is Philox 4x32 with ten rounds (Salmon et al., 2011). A key names one random
//! operation of one visit: (seed, step, microbatch, layer, site). The same key gives the same
//! numbers on any device, in recompute, and after a resume.

/// Where in a training run a random operation stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct RngSite {
    /// The run's seed.
    pub seed: u64,
    /// Which forward: a plain loop counts its steps, the engine its training calls, of which a step
    /// may have several.
    pub step: u64,
    /// Microbatch within the step.
    pub microbatch: u32,
    /// Layer within the model.
    pub layer: u32,
    /// Random operation within the layer.
    pub site: u32,
}

impl RngSite {
    /// The stream of numbers of this site.
    pub fn key(&self) -> RngKey {
        let a = mix(self.seed ^ 0x9e37_79b9_7f4a_7c15);
        let b = mix(a ^ self.step.wrapping_mul(0xd1b5_4a32_d192_ed03));
        let place = (u64::from(self.microbatch) << 32) | u64::from(self.layer);
        let c = mix(b ^ place.wrapping_add(0x8cb9_2ba7_2f3d_8dd7));
        let d = mix(c ^ u64::from(self.site).wrapping_mul(0xaef1_7502_108e_f2d9));
        RngKey {
            key: c ^ d.rotate_left(29),
            high: d,
        }
    }
}

/// SplitMix64's finaliser.
fn mix(mut z: u64) -> u64 {
    z = z.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// One stream of random numbers; element `i` is a pure function of the key and `i`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RngKey {
    key: u64,
    high: u64,
}

/// Blocks that are computed side by side.
const SIDE: usize = 64;

impl RngKey {
    /// The two halves, for kernels on other devices: Philox key and high half of the counter.
    pub fn parts(&self) -> (u64, u64) {
        (self.key, self.high)
    }

    /// The four words of counter block `block`: elements `4 * block` to `4 * block + 3`.
    #[inline(always)]
    pub fn block(&self, block: u64) -> [u32; 4] {
        let counter = [
            block as u32,
            (block >> 32) as u32,
            self.high as u32,
            (self.high >> 32) as u32,
        ];
        philox(counter, [self.key as u32, (self.key >> 32) as u32])
    }

    /// Writes the halves of the words of blocks from `first` on, lower halves first. Up to 64 blocks
    /// are computed side by side: a loop that long becomes vectors of the caller's instruction set.
    #[inline(always)]
    pub(crate) fn fill_halves(&self, first: u64, blocks: &mut [[u16; 8]]) {
        for (i, blocks) in blocks.chunks_mut(SIDE).enumerate() {
            let words = self.side_by_side(first + (i * SIDE) as u64);
            for (j, halves) in blocks.iter_mut().enumerate() {
                for k in 0..4 {
                    halves[2 * k] = words[k][j] as u16;
                    halves[2 * k + 1] = (words[k][j] >> 16) as u16;
                }
            }
        }
    }

    /// [`SIDE`] blocks: all first words, all second ones, and so on.
    #[inline(always)]
    fn side_by_side(&self, first: u64) -> [[u32; SIDE]; 4] {
        let [mut a, mut b] = [[0; SIDE]; 2];
        for i in 0..SIDE {
            let block = first + i as u64;
            a[i] = block as u32;
            b[i] = (block >> 32) as u32;
        }
        let mut c = [self.high as u32; SIDE];
        let mut d = [(self.high >> 32) as u32; SIDE];
        let mut key = [self.key as u32, (self.key >> 32) as u32];
        for _ in 0..10 {
            for i in 0..SIDE {
                [a[i], b[i], c[i], d[i]] = philox_round([a[i], b[i], c[i], d[i]], key);
            }
            key = next_key(key);
        }
        [a, b, c, d]
    }

    /// Word of element `i`.
    #[inline(always)]
    pub fn word(&self, i: u64) -> u32 {
        self.block(i / 4)[(i % 4) as usize]
    }
}

/// Uniform in [0, 1) with 24 random bits: exact in f32.
#[inline(always)]
pub fn unit(word: u32) -> f32 {
    (word >> 8) as f32 * (1.0 / 16_777_216.0)
}

/// Two standard normal values from two words (Box–Muller, computed in f64, rounded once).
#[inline]
pub fn normal_pair(a: u32, b: u32) -> [f32; 2] {
    let radius = (-2.0 * ((f64::from(a) + 1.0) / 4_294_967_297.0).ln()).sqrt();
    let (sin, cos) = (f64::from(b) * (std::f64::consts::TAU / 4_294_967_296.0)).sin_cos();
    [(radius * cos) as f32, (radius * sin) as f32]
}

#[inline(always)]
fn philox(mut ctr: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for round in 0..10 {
        if round > 0 {
            key = next_key(key);
        }
        ctr = philox_round(ctr, key);
    }
    ctr
}

#[inline(always)]
fn next_key(key: [u32; 2]) -> [u32; 2] {
    [
        key[0].wrapping_add(0x9E37_79B9),
        key[1].wrapping_add(0xBB67_AE85),
    ]
}

#[inline(always)]
fn philox_round(ctr: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let p0 = u64::from(ctr[0]) * 0xD251_1F53;
    let p1 = u64::from(ctr[2]) * 0xCD9E_8D57;
    [
        (p1 >> 32) as u32 ^ ctr[1] ^ key[0],
        p1 as u32,
        (p0 >> 32) as u32 ^ ctr[3] ^ key[1],
        p0 as u32,
    ]
}

#[cfg(test)]
mod tests {
    use super::{RngSite, normal_pair, philox, unit};

    /// Known answers of Philox 4x32-10 (Random123's test vectors).
    #[test]
    fn philox_known_answers() {
        assert_eq!(
            philox([0; 4], [0; 2]),
            [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]
        );
        assert_eq!(
            philox([u32::MAX; 4], [u32::MAX; 2]),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
    }

    #[test]
    fn blocks_side_by_side_are_those_one_by_one() {
        let key = RngSite::default().key();
        for first in [0, 7, u64::from(u32::MAX) - 3] {
            for len in [1, 64, 150] {
                let mut blocks = vec![[0; 8]; len];
                key.fill_halves(first, &mut blocks);
                for (i, halves) in blocks.iter().enumerate() {
                    let words = key.block(first + i as u64);
                    let expected = words.map(|word| [word as u16, (word >> 16) as u16]);
                    assert_eq!(halves[..], *expected.as_flattened());
                }
            }
        }
    }

    #[test]
    fn every_part_of_the_site_changes_the_stream() {
        let base = RngSite {
            seed: 1,
            step: 2,
            microbatch: 3,
            layer: 4,
            site: 5,
        };
        let others = [
            RngSite { seed: 2, ..base },
            RngSite { step: 3, ..base },
            RngSite {
                microbatch: 4,
                ..base
            },
            RngSite { layer: 3, ..base },
            RngSite { site: 6, ..base },
            RngSite {
                microbatch: 4,
                layer: 3,
                ..base
            },
        ];
        for other in others {
            assert_ne!(base.key().block(0), other.key().block(0), "{other:?}");
        }
        assert_eq!(base.key(), base.key());
    }

    #[test]
    #[cfg_attr(miri, ignore = "arithmetic without memory")]
    fn moments_are_right() {
        let key = RngSite {
            seed: 9,
            ..Default::default()
        }
        .key();
        let n = 40_000u64;
        let (mut mean, mut normal_sum, mut normal_sq) = (0.0, 0.0, 0.0);
        for i in 0..n {
            let w = key.block(i);
            mean += f64::from(unit(w[0])) / n as f64;
            for x in normal_pair(w[2], w[3]) {
                normal_sum += f64::from(x) / (2 * n) as f64;
                normal_sq += f64::from(x * x) / (2 * n) as f64;
            }
        }
        assert!(
            (mean - 0.5).abs() < 0.01 && normal_sum.abs() < 0.015,
            "{mean} {normal_sum}"
        );
        assert!((normal_sq - 1.0).abs() < 0.02, "{normal_sq}");
    }
}
