//! Common cards: what their makers state, and what of it training reaches.
//!
//! Memory, memory bandwidth and arithmetic come from the maker's documents, named beside each card;
//! memory is what the driver shows, which is less than the name says. Arithmetic is dense bf16 with
//! f32 sums, because that is what this program computes; the figures on boxes are often for sums in
//! f16 or for sparse matrices, and two or four times as large. Where a maker states no such figure, it
//! is twice the rate of plain f32, as for all GeForce cards that state both.
//!
//! What training reaches of that ([`Reached`]) is measured on an H200 and assumed for others, by
//! architecture. `roundpipe doctor` measures a machine; what it finds is used instead where it is
//! there. Nothing here opens a device or depends on this machine.

use roundpipe::{AttentionRate, Bytes, KernelRates};

use crate::error::{Error, Result};

/// The most cards that one machine is described with.
const MOST_CARDS: usize = 64;
const MIB: u64 = 1 << 20;
const GB_PER_S: f64 = 1e9;
const TERA: f64 = 1e12;

/// Generations of cards, by what changes how fast our kernels are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Architecture {
    /// A100, RTX 30.
    Ampere,
    /// RTX 40, L40S.
    Ada,
    /// H100, H200.
    Hopper,
    /// RTX 50, RTX PRO.
    Blackwell,
}

/// How a card is connected to the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Link {
    /// PCIe 4.0 with 16 lanes.
    Pcie4,
    /// PCIe 4.0 with 8 lanes.
    Pcie4x8,
    /// PCIe 5.0 with 16 lanes.
    Pcie5,
    /// PCIe 5.0 with 8 lanes.
    Pcie5x8,
}

impl Link {
    /// Bytes per second of pinned memory one way. 54.4 GB/s were measured on an H200 (PCIe 5.0);
    /// half as many lanes' worth, less protocol, is what PCIe 4.0 is known for. Cards with 8 lanes get
    /// half.
    pub fn one_way(self) -> f64 {
        match self {
            Self::Pcie4 => 25.0 * GB_PER_S,
            Self::Pcie4x8 => 12.5 * GB_PER_S,
            Self::Pcie5 => 54.0 * GB_PER_S,
            Self::Pcie5x8 => 27.0 * GB_PER_S,
        }
    }

    /// As people call it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Pcie4 => "PCIe 4.0 x16",
            Self::Pcie4x8 => "PCIe 4.0 x8",
            Self::Pcie5 => "PCIe 5.0 x16",
            Self::Pcie5x8 => "PCIe 5.0 x8",
        }
    }
}

/// One kind of card, as its maker describes it.
#[derive(Debug, Clone, PartialEq)]
pub struct Card {
    /// What `--gpus` calls it.
    pub name: &'static str,
    /// Other names, as [`plain`] leaves them: those of the driver among them.
    aliases: &'static [&'static str],
    /// Memory that the driver shows.
    pub memory: Bytes,
    /// Operations per second of dense bf16 products with f32 sums.
    pub flops: f64,
    /// Of that, what a large product reaches over minutes.
    pub product_share: f64,
    /// Bytes per second of its own memory.
    pub memory_rate: f64,
    /// How it is connected.
    pub link: Link,
    /// Generation.
    pub architecture: Architecture,
    /// Where the figures come from.
    pub source: &'static str,
}

/// A large product reaches this much of what is stated. Measured: 697 of 989 TFLOP/s on an H200 at
/// its power limit (benches/results/2026-11-15-h200-limits.md), whose clock falls a little further
/// in training.
const HOPPER_SHARE: f64 = 0.665;
/// Assumed: GeForce cards state half of their tensor cores' rate for f32 sums, and reach most of it.
const GEFORCE_SHARE: f64 = 0.90;
/// Assumed: 250 to 265 of 312 TFLOP/s are usual for cuBLAS on an A100.
const A100_SHARE: f64 = 0.82;
/// Assumed: cards of 300 to 350 W with the full rate fall to lower clocks under load.
const POWER_LIMITED_SHARE: f64 = 0.65;

const fn card(
    (name, aliases): (&'static str, &'static [&'static str]),
    memory_mib: u64,
    (tflops, product_share): (f64, f64),
    memory_gb_per_s: f64,
    (architecture, link): (Architecture, Link),
    source: &'static str,
) -> Card {
    Card {
        name,
        aliases,
        memory: Bytes(memory_mib * MIB),
        flops: tflops * TERA,
        product_share,
        memory_rate: memory_gb_per_s * GB_PER_S,
        link,
        architecture,
        source,
    }
}

use Architecture::{Ada, Ampere, Blackwell, Hopper};
use Link::{Pcie4, Pcie4x8, Pcie5, Pcie5x8};

/// All cards that are known by name.
#[rustfmt::skip]
pub const CARDS: [Card; 30] = [
    card(("rtx3060", &["3060"]), 12_288, (25.5, GEFORCE_SHARE), 360.0, (Ampere, Pcie4),
        "NVIDIA GeForce RTX 3060 specifications"),
    card(("rtx3070", &["3070"]), 8_192, (40.6, GEFORCE_SHARE), 448.0, (Ampere, Pcie4),
        "NVIDIA GeForce RTX 3070 specifications"),
    card(("rtx3080", &["3080"]), 10_240, (59.5, GEFORCE_SHARE), 760.0, (Ampere, Pcie4),
        "NVIDIA Ampere GA102 GPU Architecture whitepaper"),
    card(("rtx3090", &["3090"]), 24_576, (71.0, GEFORCE_SHARE), 936.0, (Ampere, Pcie4),
        "NVIDIA Ampere GA102 GPU Architecture whitepaper"),
    card(("rtx3090ti", &["3090ti"]), 24_564, (80.0, GEFORCE_SHARE), 1008.0, (Ampere, Pcie4),
        "NVIDIA Ampere GA102 GPU Architecture whitepaper, V2.1"),
    card(("rtx4060", &["4060"]), 8_188, (30.2, GEFORCE_SHARE), 272.0, (Ada, Pcie4x8),
        "NVIDIA GeForce RTX 4060 specifications"),
    card(("rtx4060ti", &["4060ti"]), 8_188, (44.1, GEFORCE_SHARE), 288.0, (Ada, Pcie4x8),
        "NVIDIA GeForce RTX 4060 Ti specifications"),
    card(("rtx4060ti-16gb", &["4060ti16gb"]), 16_380, (44.1, GEFORCE_SHARE), 288.0, (Ada, Pcie4x8),
        "NVIDIA GeForce RTX 4060 Ti specifications"),
    card(("rtx4070", &["4070"]), 12_282, (58.3, GEFORCE_SHARE), 504.0, (Ada, Pcie4),
        "NVIDIA GeForce RTX 4070 specifications"),
    card(("rtx4070tisuper", &["4070tisuper"]), 16_376, (88.2, GEFORCE_SHARE), 672.0, (Ada, Pcie4),
        "NVIDIA GeForce RTX 4070 Ti SUPER specifications"),
    card(("rtx4080", &["4080"]), 16_376, (97.5, GEFORCE_SHARE), 716.8, (Ada, Pcie4),
        "NVIDIA Ada GPU Architecture whitepaper"),
    card(("rtx4090", &["4090"]), 24_564, (165.2, GEFORCE_SHARE), 1008.0, (Ada, Pcie4),
        "NVIDIA Ada GPU Architecture whitepaper"),
    card(("rtx5060ti", &["5060ti"]), 8_151, (47.4, GEFORCE_SHARE), 448.0, (Blackwell, Pcie5x8),
        "NVIDIA GeForce RTX 5060 Ti specifications"),
    card(("rtx5060ti-16gb", &["5060ti16gb"]), 16_311, (47.4, GEFORCE_SHARE), 448.0, (Blackwell, Pcie5x8),
        "NVIDIA GeForce RTX 5060 Ti specifications"),
    card(("rtx5070", &["5070"]), 12_227, (61.7, GEFORCE_SHARE), 672.0, (Blackwell, Pcie5),
        "NVIDIA GeForce RTX 5070 specifications"),
    card(("rtx5070ti", &["5070ti"]), 16_303, (87.9, GEFORCE_SHARE), 896.0, (Blackwell, Pcie5),
        "NVIDIA RTX Blackwell GPU Architecture whitepaper"),
    card(("rtx5080", &["5080"]), 16_303, (112.6, GEFORCE_SHARE), 960.0, (Blackwell, Pcie5),
        "NVIDIA RTX Blackwell GPU Architecture whitepaper"),
    card(("rtx5090", &["5090"]), 32_607, (209.5, GEFORCE_SHARE), 1792.0, (Blackwell, Pcie5),
        "NVIDIA RTX Blackwell GPU Architecture whitepaper"),
    card(("a10", &[]), 23_028, (125.0, POWER_LIMITED_SHARE), 600.0, (Ampere, Pcie4),
        "NVIDIA A10 datasheet"),
    card(("a40", &[]), 46_068, (149.7, POWER_LIMITED_SHARE), 696.0, (Ampere, Pcie4),
        "NVIDIA A40 datasheet"),
    card(("a6000", &["rtxa6000"]), 49_140, (154.8, POWER_LIMITED_SHARE), 768.0, (Ampere, Pcie4),
        "NVIDIA RTX A6000 datasheet"),
    card(("rtx6000ada", &["6000ada", "rtx6000adageneration"]), 49_140, (364.2, POWER_LIMITED_SHARE), 960.0, (Ada, Pcie4),
        "NVIDIA RTX 6000 Ada Generation datasheet"),
    card(("l4", &[]), 23_034, (121.0, POWER_LIMITED_SHARE), 300.0, (Ada, Pcie4),
        "NVIDIA L4 datasheet"),
    card(("l40s", &[]), 46_068, (362.05, POWER_LIMITED_SHARE), 864.0, (Ada, Pcie4),
        "NVIDIA L40S datasheet"),
    card(("a100-40gb", &["a100pcie40gb", "a100sxm440gb"]), 40_960, (312.0, A100_SHARE), 1555.0, (Ampere, Pcie4),
        "NVIDIA A100 datasheet"),
    card(("a100", &["a100pcie80gb", "a10080gbpcie", "a100sxm480gb", "a10080gb"]), 81_920, (312.0, A100_SHARE), 1935.0, (Ampere, Pcie4),
        "NVIDIA A100 80GB datasheet"),
    card(("h100-pcie", &["h100pcie80gb"]), 81_559, (756.0, POWER_LIMITED_SHARE), 2000.0, (Hopper, Pcie5),
        "NVIDIA H100 PCIe datasheet"),
    card(("h100", &["h100sxm", "h10080gbhbm3", "h100sxm580gb"]), 81_559, (989.4, HOPPER_SHARE), 3350.0, (Hopper, Pcie5),
        "NVIDIA H100 datasheet, SXM"),
    card(("h200", &["h200sxm"]), 143_771, (989.4, HOPPER_SHARE), 4800.0, (Hopper, Pcie5),
        "NVIDIA H200 datasheet, SXM; products and memory also measured here"),
    card(("rtxpro6000", &["rtxpro6000blackwellworkstationedition", "rtxpro6000blackwellserveredition"]), 97_887, (503.8, POWER_LIMITED_SHARE), 1792.0, (Blackwell, Pcie5),
        "NVIDIA RTX PRO 6000 Blackwell datasheet"),
];

/// A name without what differs between people: capitals, makers, spaces.
fn plain(name: &str) -> String {
    let name = name.to_ascii_lowercase();
    let name = name.replace("nvidia", "").replace("geforce", "");
    name.chars().filter(char::is_ascii_alphanumeric).collect()
}

impl Card {
    /// The card of a name, as a user or a driver writes it.
    pub fn find(name: &str) -> Option<&'static Self> {
        let name = plain(name);
        CARDS
            .iter()
            .find(|card| plain(card.name) == name || card.aliases.contains(&name.as_str()))
    }

    /// Operations per second of a large product, sustained.
    pub fn product_rate(&self) -> f64 {
        self.flops * self.product_share
    }

    /// Whether its tensor cores multiply 8-bit floats.
    pub fn has_fp8(&self) -> bool {
        fp8_gain(self.architecture).is_some()
    }

    /// Bytes per second of a copy in its memory, counted as read and written. Measured on an H200:
    /// 3.95 of 4.8 TB/s.
    pub fn copy_rate(&self) -> f64 {
        0.82 * self.memory_rate
    }
}

/// How much faster products of 8-bit floats are than those of bf16; `None` for cards that have none.
/// The makers' documents named in [`CARDS`] state twice the rate for f32 sums on all others (1,979
/// TFLOP/s for an H100 SXM and an H200, 330 for an RTX 4090, 733 for an L40S, 419 for an RTX 5090).
/// What is reached of it is assumed, not measured: power limits both, and outside Hopper the scales
/// are applied behind the product.
fn fp8_gain(architecture: Architecture) -> Option<f64> {
    match architecture {
        Architecture::Ampere => None,
        Architecture::Hopper => Some(1.7),
        Architecture::Ada | Architecture::Blackwell => Some(1.6),
    }
}

/// Cards of one machine: `8xrtx4090`, or `h200`.
///
/// # Errors
/// [`Error::Usage`] with the names there are.
pub fn parse(text: &str) -> Result<(usize, &'static Card)> {
    let wrong = |why: String| Error::Usage(format!("--gpus {text}: {why}"));
    let text = text.trim();
    let counted = text
        .split_once(['x', 'X', '*'])
        .filter(|(count, _)| !count.is_empty() && count.trim().bytes().all(|b| b.is_ascii_digit()));
    let (count, name) = match counted {
        Some((count, name)) => (count.trim().parse::<usize>().unwrap_or(usize::MAX), name),
        None => (1, text),
    };
    if !(1..=MOST_CARDS).contains(&count) {
        return Err(wrong(format!(
            "a machine has from 1 to {MOST_CARDS} cards; write for example 8xrtx4090"
        )));
    }
    let card = Card::find(name).ok_or_else(|| {
        let names: Vec<&str> = CARDS.iter().map(|card| card.name).collect();
        wrong(format!("no such card; there are {}", names.join(", ")))
    })?;
    Ok((count, card))
}

/// What kinds of kernels reach, as shares of a large product's rate or of a copy's.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Reached {
    /// Products of experts.
    grouped: f64,
    /// Long attention forward, exact backward, backward in any order.
    library: [f64; 3],
    /// Attention by our own kernels, forward and backward.
    own: [f64; 2],
}

impl Reached {
    /// Hopper: from benches/results/2026-11-15-h200-kernels.md and -limits.md, divided by the 697
    /// TFLOP/s of a large product there; experts from 2026-11-18-h200.md, 596 to 690 TFLOP/s; our
    /// own attention from 2026-11-18-h200-goals.md, 348 and 235 TFLOP/s over documents of 700 tokens
    /// beside products of 803. Other cards have neither of its instructions: there our own kernels
    /// reach more of what products do, and cuDNN's attention about what it does on a Hopper.
    fn of(architecture: Architecture) -> Self {
        match architecture {
            Architecture::Hopper => Self {
                grouped: 0.9,
                library: [0.86, 0.65, 0.77],
                own: [0.54, 0.37],
            },
            _ => Self {
                grouped: 0.65,
                library: [0.80, 0.62, 0.70],
                own: [0.70, 0.50],
            },
        }
    }
}

/// Rates of kernels on a card whose large products and copies reach this much.
pub fn kernel_rates(
    architecture: Architecture,
    product_rate: f64,
    copy_rate: f64,
    packed_context: Option<u64>,
) -> KernelRates {
    let reached = Reached::of(architecture);
    // Half is reached at so many keys, and narrow heads reach less: 522 and 601 TFLOP/s forward at
    // 4,096 and 65,536 keys, 388 and 456 backward, 433 and 280 with heads of 64.
    let attention = |share: f64, half_at: f64, narrow: f64| AttentionRate {
        most: share * product_rate,
        half_at,
        narrow,
    };
    let [forward, backward, any_order] = reached.library;
    let [own_forward, own_backward] = reached.own;
    KernelRates {
        products: product_rate,
        fp8_products: fp8_gain(architecture).map(|gain| gain * product_rate),
        grouped_products: reached.grouped * product_rate,
        attention: attention(forward, 600.0, 0.83),
        attention_grad: attention(backward, 700.0, 0.72),
        attention_grad_any_order: attention(any_order, 1200.0, 0.79),
        own_attention: attention(own_forward, 300.0, 0.83),
        own_attention_grad: attention(own_backward, 300.0, 0.72),
        // Norms, sums, rotations and gated units reach 72 to 113% of a copy, most of them 85 to 95.
        bytes: 0.88 * copy_rate,
        launch_s: 5e-6,
        library_attention: architecture != Architecture::Blackwell,
        packed_context,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cards_are_found_as_people_and_drivers_write_them() {
        for (text, count, name) in [
            ("8xrtx4090", 8, "rtx4090"),
            ("RTX 4090", 1, "rtx4090"),
            ("2 x 3090", 2, "rtx3090"),
            ("NVIDIA GeForce RTX 5090", 1, "rtx5090"),
            ("NVIDIA H200", 1, "h200"),
            ("4xNVIDIA H100 80GB HBM3", 4, "h100"),
            ("NVIDIA A100-SXM4-80GB", 1, "a100"),
            ("NVIDIA RTX A6000", 1, "a6000"),
            ("64*l40s", 64, "l40s"),
            ("NVIDIA GeForce RTX 4060 Ti 16GB", 1, "rtx4060ti-16gb"),
        ] {
            let (found, card) = parse(text).unwrap();
            assert_eq!((found, card.name), (count, name), "{text}");
        }
    }

    #[test]
    fn what_is_no_card_is_refused_with_those_there_are() {
        for text in [
            "",
            "8x",
            "0xh200",
            "65xh200",
            "99999999999999999999xh200",
            "h2000",
            "x",
        ] {
            let error = parse(text).unwrap_err();
            assert_eq!(error.exit_code(), 2);
            let line = error.to_string();
            assert!(line.contains("--gpus") && line.len() < 400, "{line}");
        }
    }

    #[test]
    fn every_card_has_its_own_names_and_sane_figures() {
        for card in &CARDS {
            assert_eq!(Card::find(card.name), Some(card), "{}", card.name);
            for alias in card.aliases {
                assert_eq!(plain(alias), *alias, "aliases are written plainly");
                assert_eq!(Card::find(alias), Some(card), "{alias}");
            }
            assert!((7 << 30..1 << 40).contains(&card.memory.0), "{}", card.name);
            assert!((20e12..5e15).contains(&card.flops), "{}", card.name);
            assert!((2e11..1e13).contains(&card.memory_rate), "{}", card.name);
            assert!(card.source.len() > 10);
            let rates = kernel_rates(card.architecture, 1e14, 1e12, None);
            let gains = rates.fp8_products.is_some_and(|rate| rate > rates.products);
            assert_eq!(gains, card.has_fp8(), "{}", card.name);
        }
    }
}
