//! Which instructions a product may use, found out once per process.

use std::sync::OnceLock;

/// A set of instructions, from the plainest to the richest of its family.
///
/// A type without a kernel of its own in a set uses the next plainer one of the family.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Isa {
    /// What the target of the build has for certain.
    Portable,
    /// 64-bit Arm.
    #[cfg(target_arch = "aarch64")]
    Neon,
    /// AVX2, FMA and F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX-512 F, BW, DQ and VL besides `Avx2`.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// `vdpbf16ps` besides `Avx512`.
    #[cfg(target_arch = "x86_64")]
    Avx512Bf16,
    /// `tdpbf16ps` on tiles besides `Avx512Bf16`.
    #[cfg(target_arch = "x86_64")]
    Amx,
}

impl Isa {
    /// The richest set that this machine runs.
    pub(crate) fn best() -> Self {
        static BEST: OnceLock<Isa> = OnceLock::new();
        *BEST.get_or_init(|| Self::available().last().copied().unwrap_or(Self::Portable))
    }

    /// Every set that this machine runs, plainest first.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn available() -> Vec<Self> {
        let mut found = vec![Self::Portable];
        if !(is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c"))
        {
            return found;
        }
        found.push(Self::Avx2);
        if !(is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl"))
        {
            return found;
        }
        found.push(Self::Avx512);
        if !is_x86_feature_detected!("avx512bf16") {
            return found;
        }
        found.push(Self::Avx512Bf16);
        if super::amx::works() {
            found.push(Self::Amx);
        }
        found
    }

    /// Every set that this machine runs, plainest first.
    #[cfg(target_arch = "aarch64")]
    pub(crate) fn available() -> Vec<Self> {
        vec![Self::Portable, Self::Neon]
    }

    /// Every set that this machine runs, plainest first.
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    pub(crate) fn available() -> Vec<Self> {
        vec![Self::Portable]
    }
}
