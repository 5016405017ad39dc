//! Every instruction set against the portable one, bit for bit; both against f64; refusals.

use half::{bf16, f16};

use super::adam::AdamRule;
use super::grads::{
    accumulate_with, all_finite_with, cast_with, chunk_squares_of_sum_with, chunk_squares_with,
    scale_with, squared_norm_with,
};
use super::simd::PassIsa;
use super::*;

/// Around the block's and the chunk's borders.
const LENGTHS: [usize; 10] = [
    0,
    1,
    15,
    16,
    17,
    31,
    100,
    CHUNK - 1,
    CHUNK + 17,
    2 * CHUNK + 16,
];

fn one_thread() -> Threads {
    Threads::new(Some(1)).unwrap()
}

/// Numbers of all magnitudes, the same for the same seed.
pub(super) fn noise(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    (0..len)
        .map(|_| {
            let unit = (next() >> 40) as f32 / (1 << 24) as f32 - 0.5;
            unit * [1.0, 1e-3, 1e-6, 30.0][(next() >> 60) as usize % 4]
        })
        .collect()
}

/// `noise` with every kind of special number in it.
fn wild(len: usize, seed: u64) -> Vec<f32> {
    let special = [
        0.0,
        -0.0,
        1e-40,
        -1e-45,
        6e-8,
        1e38,
        -3e38,
        65504.0,
        65520.0,
        f32::INFINITY,
        f32::NAN,
    ];
    let mut values = noise(len, seed);
    for (i, value) in values
        .iter_mut()
        .enumerate()
        .skip(seed as usize % 5)
        .step_by(7)
    {
        *value = special[i / 7 % special.len()];
    }
    values
}

fn to_bf16(values: &[f32]) -> Vec<bf16> {
    values.iter().map(|&x| bf16::from_f32(x)).collect()
}

fn to_f16(values: &[f32]) -> Vec<f16> {
    values.iter().map(|&x| f16::from_f32(x)).collect()
}

/// The bits, with one NaN for all: payloads are not promised.
fn bits(values: &[f32]) -> Vec<u32> {
    values
        .iter()
        .map(|x| if x.is_nan() { u32::MAX } else { x.to_bits() })
        .collect()
}

/// Slabs of all types with the same numbers, each starting `offset` elements into its memory.
struct Case {
    offset: usize,
    grad: (Vec<f32>, Vec<bf16>, Vec<f16>),
    state: Vec<Vec<f32>>,
    working: (Vec<f32>, Vec<bf16>, Vec<f16>),
}

impl Case {
    fn new(len: usize, offset: usize) -> Self {
        let all = len + offset;
        let grad = wild(all, 1);
        let positive = |seed| wild(all, seed).iter().map(|x| x.abs()).collect();
        Self {
            offset,
            grad: (grad.clone(), to_bf16(&grad), to_f16(&grad)),
            state: vec![wild(all, 2), wild(all, 3), positive(4), positive(5)],
            working: (vec![0.0; all], vec![bf16::ZERO; all], vec![f16::ZERO; all]),
        }
    }

    fn grad(&self, kind: usize) -> Floats<'_> {
        grad_of(&self.grad, kind, self.offset)
    }

    /// All that a pass may have written.
    fn written(&self) -> Vec<Vec<u32>> {
        let wide = |x: &[u16]| x.iter().map(|&x| u32::from(x)).collect();
        let b: Vec<u16> = self
            .working
            .1
            .iter()
            .map(|x| if x.is_nan() { 0x7fff } else { x.to_bits() })
            .collect();
        let h: Vec<u16> = self
            .working
            .2
            .iter()
            .map(|x| if x.is_nan() { 0x7fff } else { x.to_bits() })
            .collect();
        let state = self.state.iter().map(|s| bits(s));
        state
            .chain([bits(&self.working.0), wide(&b), wide(&h)])
            .collect()
    }
}

fn grad_of(grad: &(Vec<f32>, Vec<bf16>, Vec<f16>), kind: usize, offset: usize) -> Floats<'_> {
    match kind {
        0 => grad.0[offset..].into(),
        1 => grad.1[offset..].into(),
        _ => grad.2[offset..].into(),
    }
}

fn working_of(
    working: &mut (Vec<f32>, Vec<bf16>, Vec<f16>),
    kind: usize,
    offset: usize,
) -> Option<FloatsMut<'_>> {
    match kind {
        0 => Some((&mut working.0[offset..]).into()),
        1 => Some((&mut working.1[offset..]).into()),
        2 => Some((&mut working.2[offset..]).into()),
        _ => None,
    }
}

fn adam_run(
    isa: PassIsa,
    threads: &Threads,
    adam: AdamRule,
    mut case: Case,
    kinds: (usize, usize),
) -> Vec<Vec<u32>> {
    for t in 1..=2 {
        let offset = case.offset;
        let [master, first, second, largest] = &mut case.state[..] else {
            unreachable!()
        };
        let slabs = AdamSlabs {
            grad: grad_of(&case.grad, kinds.0, offset),
            master: &mut master[offset..],
            exp_avg: &mut first[offset..],
            exp_avg_sq: &mut second[offset..],
            max_exp_avg_sq: adam.settings.amsgrad.then(|| &mut largest[offset..]),
            working: working_of(&mut case.working, kinds.1, offset),
        };
        adam.step_with(isa, threads, at_scale(t, 1e-2, 0.7), slabs)
            .unwrap();
    }
    case.written()
}

fn sgd_run(
    isa: PassIsa,
    threads: &Threads,
    sgd: Sgd,
    mut case: Case,
    kinds: (usize, usize),
) -> Vec<Vec<u32>> {
    for t in 1..=2 {
        let offset = case.offset;
        let [master, momentum, ..] = &mut case.state[..] else {
            unreachable!()
        };
        let slabs = SgdSlabs {
            grad: grad_of(&case.grad, kinds.0, offset),
            master: &mut master[offset..],
            momentum: (sgd.momentum != 0.0).then(|| &mut momentum[offset..]),
            working: working_of(&mut case.working, kinds.1, offset),
        };
        sgd.step_with(isa, threads, at_scale(t, 0.1, 0.7), slabs)
            .unwrap();
    }
    case.written()
}

fn lion_run(
    isa: PassIsa,
    threads: &Threads,
    lion: Lion,
    mut case: Case,
    kinds: (usize, usize),
) -> Vec<Vec<u32>> {
    for t in 1..=2 {
        let offset = case.offset;
        let [master, moment, ..] = &mut case.state[..] else {
            unreachable!()
        };
        let slabs = LionSlabs {
            grad: grad_of(&case.grad, kinds.0, offset),
            master: &mut master[offset..],
            exp_avg: &mut moment[offset..],
            working: working_of(&mut case.working, kinds.1, offset),
        };
        lion.step_with(isa, threads, at_scale(t, 1e-2, 0.7), slabs)
            .unwrap();
    }
    case.written()
}

fn at_scale(step: u64, lr: f64, grad_scale: f32) -> StepSettings {
    StepSettings {
        grad_scale,
        ..StepSettings::new(step, lr)
    }
}

fn adams() -> [AdamRule; 3] {
    let base = AdamW::default();
    [
        base.into(),
        AdamW {
            amsgrad: true,
            maximize: true,
            ..base
        }
        .into(),
        Adam {
            amsgrad: true,
            weight_decay: 0.1,
            ..Adam::default()
        }
        .into(),
    ]
}

fn sgds() -> [Sgd; 3] {
    let base = Sgd {
        weight_decay: 0.01,
        maximize: true,
        ..Sgd::default()
    };
    let momentum = Sgd {
        momentum: 0.9,
        ..base
    };
    [
        base,
        Sgd {
            dampening: 0.2,
            ..momentum
        },
        Sgd {
            nesterov: true,
            ..momentum
        },
    ]
}

fn lions() -> [Lion; 2] {
    let decayed = Lion {
        weight_decay: 0.1,
        maximize: true,
        ..Lion::default()
    };
    [Lion::default(), decayed]
}

/// Which instructions a processor has must not show in the weights.
#[test]
#[cfg_attr(miri, ignore = "slabs of several chunks")]
fn every_isa_gives_the_bits_of_the_portable_one() {
    let threads = one_thread();
    for isa in PassIsa::available() {
        for len in LENGTHS {
            // The large lengths differ in their borders only; the types are covered by the small
            // ones.
            let kinds = if len < CHUNK / 2 { 0..12 } else { 5..6 };
            for kinds in kinds.map(|k| (k / 4, k % 4)) {
                let offset = (len + kinds.1) % 4;
                for adam in adams() {
                    let run = |isa| adam_run(isa, &threads, adam, Case::new(len, offset), kinds);
                    assert!(
                        run(isa) == run(PassIsa::Portable),
                        "{isa:?}, {len} elements, {kinds:?}, {adam:?}"
                    );
                }
                for sgd in sgds() {
                    let run = |isa| sgd_run(isa, &threads, sgd, Case::new(len, offset), kinds);
                    assert!(
                        run(isa) == run(PassIsa::Portable),
                        "{isa:?}, {len} elements, {kinds:?}, {sgd:?}"
                    );
                }
                for lion in lions() {
                    let run = |isa| lion_run(isa, &threads, lion, Case::new(len, offset), kinds);
                    assert!(
                        run(isa) == run(PassIsa::Portable),
                        "{isa:?}, {len} elements, {kinds:?}, {lion:?}"
                    );
                }
            }
        }
    }
}

/// The cut into chunks depends on sizes alone, so the number of threads must not show either.
#[test]
#[cfg_attr(miri, ignore = "slabs of several chunks")]
fn any_number_of_threads_gives_the_same_bits() {
    let len = 5 * CHUNK + 123;
    let runs: Vec<_> = [1, 2, 5]
        .map(|count| {
            let threads = Threads::new(Some(count)).unwrap();
            let adam = adam_run(
                PassIsa::best(),
                &threads,
                adams()[1],
                Case::new(len, 1),
                (1, 1),
            );
            let sgd = sgd_run(
                PassIsa::best(),
                &threads,
                sgds()[1],
                Case::new(len, 1),
                (1, 1),
            );
            let lion = lion_run(
                PassIsa::best(),
                &threads,
                lions()[1],
                Case::new(len, 1),
                (1, 1),
            );
            (
                adam,
                sgd,
                lion,
                squared_norm(&threads, noise(len, 6).as_slice().into()).to_bits(),
            )
        })
        .into();
    assert!(runs[0] == runs[1] && runs[1] == runs[2]);
}

/// Clipping by value inside a pass gives the bits of a pass over clipped gradients; an infinity is
/// clipped and a NaN stays. The norm is that of the clipped ones, and does not hide an infinity.
#[test]
fn clipping_by_value_is_a_clamp() {
    let threads = one_thread();
    let bound = 0.1f32;
    let grad = wild(100, 1);
    let clamped: Vec<f32> = grad.iter().map(|x| x.clamp(-bound, bound)).collect();
    for isa in PassIsa::available() {
        let clip = |clip_value| StepSettings {
            clip_value,
            ..at_scale(2, 1e-2, 0.7)
        };
        let adam = |grad: &[f32], settings| {
            let (mut p, mut m, mut v) = (noise(100, 2), noise(100, 3), vec![0.5; 100]);
            let slabs = AdamSlabs {
                grad: grad.into(),
                master: &mut p,
                exp_avg: &mut m,
                exp_avg_sq: &mut v,
                max_exp_avg_sq: None,
                working: None,
            };
            let kept = adams()[0].step_with(isa, &threads, settings, slabs);
            (kept.unwrap(), bits(&p), bits(&m), bits(&v))
        };
        let sgd = |grad: &[f32], settings| {
            let (mut p, mut b) = (noise(100, 2), noise(100, 3));
            let slabs = SgdSlabs {
                grad: grad.into(),
                master: &mut p,
                momentum: Some(&mut b),
                working: None,
            };
            let kept = sgds()[1].step_with(isa, &threads, settings, slabs);
            (kept.unwrap(), bits(&p), bits(&b))
        };
        let lion = |grad: &[f32], settings| {
            let (mut p, mut m) = (noise(100, 2), noise(100, 3));
            let slabs = LionSlabs {
                grad: grad.into(),
                master: &mut p,
                exp_avg: &mut m,
                working: None,
            };
            let kept = lions()[1].step_with(isa, &threads, settings, slabs);
            (kept.unwrap(), bits(&p), bits(&m))
        };
        let (with, without) = (clip(Some(bound)), clip(None));
        assert_eq!(adam(&grad, with), adam(&clamped, without), "{isa:?}");
        assert_eq!(sgd(&grad, with), sgd(&clamped, without), "{isa:?}");
        assert_eq!(lion(&grad, with), lion(&clamped, without), "{isa:?}");
        assert_ne!(sgd(&grad, with), sgd(&grad, without), "{isa:?}");

        let squares = |values: &[f32], clip_value| {
            chunk_squares_with(isa, &threads, values.into(), clip_value)[0]
        };
        let finite = noise(100, 1);
        let clamped: Vec<f32> = finite.iter().map(|x| x.clamp(-bound, bound)).collect();
        let clipped = squares(&finite, Some(bound));
        assert_eq!(clipped.to_bits(), squares(&clamped, None).to_bits());
        for bad in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
            for at in [0, 99] {
                let mut values = finite.clone();
                values[at] = bad;
                assert!(!squares(&values, Some(bound)).is_finite(), "{isa:?} {bad}");
            }
        }
    }
}

/// The squares of a sum in one pass are those of a sum that was written down.
#[test]
#[cfg_attr(miri, ignore = "slabs of several chunks")]
fn squares_of_a_sum_are_those_of_the_written_sum() {
    let threads = one_thread();
    for isa in PassIsa::available() {
        for len in LENGTHS {
            let wide = noise(len, 1);
            let narrow: Vec<bf16> = noise(len, 2).into_iter().map(bf16::from_f32).collect();
            let mut sum = vec![0.0; len];
            cast_with(
                isa,
                &threads,
                (&narrow[..]).into(),
                FloatsMut::F32(&mut sum),
            )
            .unwrap();
            accumulate_with(isa, &threads, (&wide[..]).into(), &mut sum).unwrap();
            for bound in [None, Some(0.5)] {
                let (first, second) = ((&narrow[..]).into(), (&wide[..]).into());
                let fused = chunk_squares_of_sum_with(isa, &threads, first, second, bound);
                let written = chunk_squares_with(isa, &threads, (&sum[..]).into(), bound);
                let bits = |all: &[f64]| all.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                assert_eq!(
                    bits(&fused.unwrap()),
                    bits(&written),
                    "{isa:?} {len} {bound:?}"
                );
            }
        }
    }
    let (short, long) = (noise(15, 1), noise(16, 1));
    let refused = chunk_squares_of_sum(&threads, (&short[..]).into(), (&long[..]).into(), None);
    assert!(refused.is_err(), "two lengths");
}

/// The formulas, against the same ones in f64 over twenty steps.
#[test]
#[cfg_attr(miri, ignore = "slabs of several chunks")]
fn adam_agrees_with_f64() {
    const LR: f64 = 1e-2;
    let len = 77;
    for adam in adams() {
        let start = noise(len, 2);
        let (mut p, mut m, mut v, mut x) = (
            start.clone(),
            vec![0.0; len],
            vec![0.0; len],
            vec![0.0; len],
        );
        let mut reference: Vec<[f64; 4]> = start
            .iter()
            .map(|&p| [f64::from(p), 0.0, 0.0, 0.0])
            .collect();
        for t in 1..=20 {
            let grad = noise(len, 100 + t);
            let slabs = AdamSlabs {
                grad: grad.as_slice().into(),
                master: &mut p,
                exp_avg: &mut m,
                exp_avg_sq: &mut v,
                max_exp_avg_sq: adam.settings.amsgrad.then_some(x.as_mut_slice()),
                working: None,
            };
            adam.step_with(PassIsa::best(), &one_thread(), at_scale(t, LR, 0.5), slabs)
                .unwrap();
            for (state, &g) in reference.iter_mut().zip(&grad) {
                adam_f64(&adam, LR, t as i32, state, f64::from(g) * 0.5);
            }
        }
        for (i, [want, ..]) in reference.iter().enumerate() {
            let diff = (f64::from(p[i]) - want).abs();
            assert!(
                diff <= 3e-6 * want.abs().max(0.1),
                "element {i}: {} and {want}, {adam:?}",
                p[i]
            );
        }
    }
}

fn adam_f64(rule: &AdamRule, lr: f64, t: i32, [p, m, v, x]: &mut [f64; 4], grad: f64) {
    let adam = rule.settings;
    let mut g = if adam.maximize { -grad } else { grad };
    if rule.decoupled {
        *p *= 1.0 - lr * adam.weight_decay;
    } else {
        g += adam.weight_decay * *p;
    }
    *m = adam.beta1 * *m + (1.0 - adam.beta1) * g;
    *v = adam.beta2 * *v + (1.0 - adam.beta2) * g * g;
    *x = x.max(*v);
    let second = if adam.amsgrad { *x } else { *v };
    let denominator = second.sqrt() / (1.0 - adam.beta2.powi(t)).sqrt() + adam.eps;
    *p -= lr / (1.0 - adam.beta1.powi(t)) * *m / denominator;
}

/// The formulas, against the same ones in f64 over twenty steps. The direction of a step is a sign,
/// so an element whose sum is about zero may go either way.
#[test]
fn lion_agrees_with_f64() {
    const LR: f64 = 1e-2;
    let len = 77;
    for lion in lions() {
        let start = noise(len, 2);
        let (mut p, mut m) = (start.clone(), vec![0.0; len]);
        let mut reference: Vec<[f64; 2]> = start.iter().map(|&p| [f64::from(p), 0.0]).collect();
        let mut unsure = vec![false; len];
        for t in 1..=20 {
            let mut grad = noise(len, 100 + t);
            grad[5] = 0.0;
            let slabs = LionSlabs {
                grad: grad.as_slice().into(),
                master: &mut p,
                exp_avg: &mut m,
                working: None,
            };
            lion.step(&one_thread(), at_scale(t, LR, 0.5), slabs)
                .unwrap();
            for (i, [p, m]) in reference.iter_mut().enumerate() {
                let sign = if lion.maximize { -0.5 } else { 0.5 };
                let g = sign * f64::from(grad[i]);
                let sum = lion.beta1 * *m + (1.0 - lion.beta1) * g;
                unsure[i] |= sum != 0.0 && sum.abs() < 1e-5 * g.abs();
                let direction = if sum == 0.0 { 0.0 } else { sum.signum() };
                *p -= LR * (direction + lion.weight_decay * *p);
                *m = lion.beta2 * *m + (1.0 - lion.beta2) * g;
            }
        }
        assert!(unsure.iter().filter(|unsure| **unsure).count() < 3);
        for i in (0..len).filter(|&i| !unsure[i]) {
            let [want, moment] = reference[i];
            let near =
                |have: f32, want: f64| (f64::from(have) - want).abs() <= 3e-6 * want.abs().max(0.1);
            assert!(near(p[i], want), "element {i}: {} and {want}", p[i]);
            assert!(near(m[i], moment), "element {i}: {} and {moment}", m[i]);
        }
        // Without a gradient there is no direction; only decay moves the weight.
        let decay = (1.0 - LR * lion.weight_decay).powi(20);
        assert!((f64::from(p[5]) - f64::from(start[5]) * decay).abs() < 1e-6);
    }
}

/// A step is as long for the smallest gradient as for the largest, and none for zero.
#[test]
fn lion_takes_the_sign_of_every_size() {
    let sizes = [
        1.0,
        -3e38,
        f32::from_bits(1),
        -f32::from_bits(1),
        f32::MIN_POSITIVE,
        0.0,
        -0.0,
    ];
    // All of the direction is the gradient.
    let lion = Lion {
        beta1: 0.0,
        ..Lion::default()
    };
    for isa in PassIsa::available() {
        let (mut p, mut m) = ([1.0f32; 7], [0.0; 7]);
        let slabs = LionSlabs {
            grad: sizes.as_slice().into(),
            master: &mut p,
            exp_avg: &mut m,
            working: None,
        };
        let settings = StepSettings::new(1, 0.25);
        let kept = lion.step_with(isa, &one_thread(), settings, slabs).unwrap();
        assert!(!kept, "{isa:?}");
        assert_eq!(p, [0.75, 1.25, 0.75, 1.25, 0.75, 1.0, 1.0], "{isa:?}");
    }
}

/// All f32 around every bf16 and every f16, rounded as the `half` crate rounds.
#[test]
fn rounding_is_to_nearest_even() {
    let threads = one_thread();
    let halves = (0..=u16::MAX)
        .step_by(if cfg!(miri) { 997 } else { 1 })
        .flat_map(|high| {
            let around_bf16 =
                [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff].map(|low| u32::from(high) << 16 | low);
            let exact = f16::from_bits(high).to_f32_const().to_bits();
            let around_f16 = [0, 0xfff, 0x1000, 0x1001].map(|low| exact.wrapping_add(low));
            around_bf16.into_iter().chain(around_f16)
        });
    let values: Vec<f32> = halves.map(f32::from_bits).collect();
    let (want_b, want_h) = (to_bf16(&values), to_f16(&values));
    let (mut b, mut h) = (
        vec![bf16::ZERO; values.len()],
        vec![f16::ZERO; values.len()],
    );
    let mut wide = vec![0.0; values.len()];
    for isa in PassIsa::available() {
        cast_with(
            isa,
            &threads,
            values.as_slice().into(),
            b.as_mut_slice().into(),
        )
        .unwrap();
        cast_with(
            isa,
            &threads,
            values.as_slice().into(),
            h.as_mut_slice().into(),
        )
        .unwrap();
        let differ = (0..values.len()).find(|&i| {
            b[i].to_bits() != want_b[i].to_bits() || h[i].to_bits() != want_h[i].to_bits()
        });
        assert!(
            differ.is_none(),
            "{isa:?}: {:08x}",
            values[differ.unwrap_or(0)].to_bits()
        );
        cast_with(
            isa,
            &threads,
            h.as_slice().into(),
            wide.as_mut_slice().into(),
        )
        .unwrap();
        let want: Vec<f32> = h.iter().map(|x| x.to_f32_const()).collect();
        assert!(bits(&wide) == bits(&want), "{isa:?}: f16 to f32");
        cast_with(
            isa,
            &threads,
            b.as_slice().into(),
            wide.as_mut_slice().into(),
        )
        .unwrap();
        let want: Vec<f32> = b.iter().map(|x| x.to_f32()).collect();
        assert!(bits(&wide) == bits(&want), "{isa:?}: bf16 to f32");
    }
}

/// The passes over gradients: same bits on every instruction set, and the right numbers.
#[test]
#[cfg_attr(miri, ignore = "slabs of several chunks")]
fn gradient_passes_agree_on_every_isa() {
    let threads = one_thread();
    for (isa, len, kind) in PassIsa::available().flat_map(|isa| {
        LENGTHS
            .into_iter()
            .flat_map(move |len| (0..3).map(move |kind| (isa, len, kind)))
    }) {
        let run = |isa| {
            let mut case = Case::new(len, len % 3);
            let start = case.offset;
            case.grad = {
                let grad = noise(len + start, 8);
                (grad.clone(), to_bf16(&grad), to_f16(&grad))
            };
            let norm = squared_norm_with(isa, &threads, case.grad(kind));
            let mut acc = case.state[0][start..].to_vec();
            accumulate_with(isa, &threads, case.grad(kind), &mut acc).unwrap();
            let src = case.grad.0.clone();
            let dst = working_of(&mut case.working, kind, start).unwrap();
            cast_with(isa, &threads, src[start..].into(), dst).unwrap();
            scale_with(
                isa,
                &threads,
                working_of(&mut case.working, kind, start).unwrap(),
                0.3,
            );
            assert!(all_finite_with(isa, &threads, case.grad(kind)));
            (norm.to_bits(), bits(&acc), case.written())
        };
        assert!(
            run(isa) == run(PassIsa::Portable),
            "{isa:?}, {len} elements, type {kind}"
        );
    }
}

/// A sum in f64 is exact to the eye, and cannot overflow where f32 would.
#[test]
#[cfg_attr(miri, ignore = "slabs of several chunks")]
fn squared_norm_is_accurate() {
    let threads = one_thread();
    let values = noise(CHUNK + 321, 9);
    let want: f64 = values.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
    let norm = squared_norm(&threads, values.as_slice().into());
    assert!((norm - want).abs() <= 1e-13 * want, "{norm} and {want}");
    assert_eq!(
        squared_norm(&threads, [1e30f32, 1e30].as_slice().into()),
        2.0 * f64::from(1e30f32).powi(2)
    );
    assert_eq!(squared_norm(&threads, Floats::F32(&[])), 0.0);
}

/// One bad element anywhere is found.
#[test]
fn all_finite_finds_each_bad_element() {
    let threads = one_thread();
    for isa in PassIsa::available() {
        for at in [0, 15, 16, 99, 100] {
            for bad in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
                let mut values = vec![3e38; 101];
                assert!(all_finite_with(isa, &threads, values.as_slice().into()));
                values[at] = bad;
                assert!(
                    !all_finite_with(isa, &threads, values.as_slice().into()),
                    "{isa:?}: {bad} at {at}"
                );
                assert!(!all_finite_with(
                    isa,
                    &threads,
                    to_f16(&values).as_slice().into()
                ));
                assert!(!all_finite_with(
                    isa,
                    &threads,
                    to_bf16(&values).as_slice().into()
                ));
            }
        }
    }
}

/// Long gradients are shortened, short ones left alone, and a NaN is not hidden.
#[test]
fn clip_factor_bounds_the_norm() {
    assert_eq!(clip_factor(0.25, 1.0), 1.0);
    assert!((clip_factor(16.0, 1.0) - 0.25).abs() < 1e-6);
    assert_eq!(clip_factor(f64::INFINITY, 1.0), 0.0);
    assert!(clip_factor(f64::NAN, 1.0).is_nan());
}

/// Refusals say what is wrong and leave the slabs alone.
#[test]
fn wrong_arguments_are_refused() {
    let refuse = |adam: AdamW, t, lens: [usize; 3], largest: bool, words: &str| {
        let settings = StepSettings::new(t, 1e-3);
        let [mut p, mut m, mut x] = lens.map(|len| vec![0.5; len]);
        let mut v = vec![0.5; 4];
        let slabs = AdamSlabs {
            grad: [1.0; 4].as_slice().into(),
            master: &mut p,
            exp_avg: &mut m,
            exp_avg_sq: &mut v,
            max_exp_avg_sq: largest.then_some(x.as_mut_slice()),
            working: None,
        };
        let error = adam
            .step(&one_thread(), settings, slabs)
            .unwrap_err()
            .to_string();
        assert!(error.contains(words), "{error}");
        assert!(p.iter().chain(&m).chain(&v).all(|&x| x == 0.5));
    };
    let adam = AdamW::default();
    let ams = AdamW {
        amsgrad: true,
        ..adam
    };
    refuse(adam, 0, [4, 4, 4], false, "step 0");
    refuse(adam, 1, [5, 4, 4], false, "gradient slab has 4 elements");
    refuse(
        adam,
        1,
        [4, 3, 4],
        false,
        "first moment slab has 3 elements",
    );
    refuse(adam, 1, [4, 4, 4], true, "amsgrad only");
    refuse(ams, 1, [4, 4, 4], false, "amsgrad needs");
    refuse(ams, 1, [4, 4, 5], true, "largest second moment slab has 5");
    refuse(
        AdamW { beta2: 1.0, ..adam },
        1,
        [4, 4, 4],
        false,
        "beta2 is 1, it must be from 0 up to, but not including, 1",
    );
    refuse(
        AdamW { eps: -1.0, ..adam },
        1,
        [4, 4, 4],
        false,
        "eps is -1",
    );

    let refuse = |sgd: Sgd, momentum: Option<&mut [f32]>, words: &str| {
        let slabs = SgdSlabs {
            grad: [1.0; 4].as_slice().into(),
            master: &mut [0.5; 4],
            momentum,
            working: None,
        };
        let error = sgd
            .step(&one_thread(), StepSettings::new(1, 1e-3), slabs)
            .unwrap_err()
            .to_string();
        assert!(error.contains(words), "{error}");
    };
    let sgd = Sgd {
        momentum: 0.9,
        ..Sgd::default()
    };
    refuse(sgd, None, "momentum needs a slab");
    refuse(sgd, Some(&mut [0.0; 3]), "momentum slab has 3 elements");
    refuse(Sgd::default(), Some(&mut [0.0; 4]), "no use");
    refuse(
        Sgd {
            nesterov: true,
            ..Sgd::default()
        },
        None,
        "nesterov needs momentum",
    );
    refuse(
        Sgd {
            dampening: f64::INFINITY,
            ..sgd
        },
        Some(&mut [0.0; 4]),
        "dampening is inf, it must be finite",
    );
    let slabs = SgdSlabs {
        grad: [1.0; 4].as_slice().into(),
        master: &mut [0.5; 4],
        momentum: None,
        working: None,
    };
    let nowhere = StepSettings::new(1, f64::NAN);
    let error = Sgd::default().step(&one_thread(), nowhere, slabs);
    let error = error.unwrap_err().to_string();
    assert!(error.contains("lr is NaN"), "{error}");
    let refuse = |lion: Lion, len: usize, words: &str| {
        let mut moment = vec![0.0; len];
        let slabs = LionSlabs {
            grad: [1.0; 4].as_slice().into(),
            master: &mut [0.5; 4],
            exp_avg: &mut moment,
            working: None,
        };
        let error = lion.step(&one_thread(), StepSettings::new(1, 1e-3), slabs);
        let error = error.unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    };
    let lion = Lion::default();
    refuse(lion, 3, "moment slab has 3 elements");
    refuse(Lion { beta2: 1.0, ..lion }, 4, "beta2 is 1");
    assert!(accumulate(&one_thread(), [1.0f32; 2].as_slice().into(), &mut [0.0; 3]).is_err());
}

/// What is finite stays finite, element by element, on every instruction set and in every type of
/// working weights: an element whose new values are not keeps all of its old ones, its neighbours
/// are updated, and the pass says so.
#[test]
fn elements_that_would_not_be_finite_keep_their_values() {
    let threads = one_thread();
    for isa in PassIsa::available() {
        for len in [1, 16, 21, 40] {
            for at in [0, len / 2, len - 1] {
                for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e30] {
                    let mut grad = noise(len, 1);
                    grad[at] = bad;
                    let (start, moments) = (noise(len, 2), vec![0.25; len]);
                    let (mut p, mut m, mut v) = (start.clone(), moments.clone(), moments.clone());
                    let mut w = vec![bf16::ZERO; len];
                    let slabs = AdamSlabs {
                        grad: grad.as_slice().into(),
                        master: &mut p,
                        exp_avg: &mut m,
                        exp_avg_sq: &mut v,
                        max_exp_avg_sq: None,
                        working: Some(w.as_mut_slice().into()),
                    };
                    assert!(
                        AdamRule::from(AdamW::default())
                            .step_with(isa, &threads, StepSettings::new(1, 1e-3), slabs)
                            .unwrap()
                    );
                    for i in 0..len {
                        assert_eq!(
                            (p[i] == start[i], m[i] == 0.25, v[i] == 0.25),
                            (i == at, i == at, i == at)
                        );
                        assert_eq!(
                            w[i],
                            bf16::from_f32(p[i]),
                            "{isa:?}, {len} elements, {bad} at {at}"
                        );
                    }
                }
            }
        }
        // Lion forgets how large a gradient is, but not that it is no number.
        let (mut p, mut m, mut w) = ([1.0f32; 4], [0.25; 4], [bf16::ZERO; 4]);
        let slabs = LionSlabs {
            grad: [f32::NAN, f32::NEG_INFINITY, 1e30, 1.0].as_slice().into(),
            master: &mut p,
            exp_avg: &mut m,
            working: Some(w.as_mut_slice().into()),
        };
        let settings = StepSettings::new(1, 0.5);
        let lion = Lion::default();
        assert!(lion.step_with(isa, &threads, settings, slabs).unwrap());
        assert_eq!(p, [1.0, 1.0, 0.5, 0.5], "{isa:?}");
        assert!(m[..2] == [0.25; 2] && m[2] > 1e27 && m[3] > 0.25, "{m:?}");
        assert_eq!(w.map(bf16::to_f32), p, "{isa:?}");
        // 0 / 0, and weights that f16 cannot hold.
        let none = AdamRule::from(AdamW {
            eps: 0.0,
            ..AdamW::default()
        });
        let (mut p, mut m, mut v) = ([1.0f32; 3], [0.0; 3], [0.0; 3]);
        let slabs = AdamSlabs {
            grad: [0.0f32, 0.0, 1.0].as_slice().into(),
            master: &mut p,
            exp_avg: &mut m,
            exp_avg_sq: &mut v,
            max_exp_avg_sq: None,
            working: None,
        };
        assert!(
            none.step_with(isa, &threads, StepSettings::new(1, 1e-3), slabs)
                .unwrap()
        );
        assert!(p[0] == 1.0 && p[1] == 1.0 && p[2] < 1.0, "{p:?}");
        let sgd = Sgd {
            momentum: 0.9,
            ..Sgd::default()
        };
        let (mut p, mut momentum, mut w) = ([1.0f32; 3], [f32::NAN; 3], [f16::ONE; 3]);
        let slabs = SgdSlabs {
            grad: [0.5f32, 1.0, 0.0].as_slice().into(),
            master: &mut p,
            momentum: Some(&mut momentum),
            working: Some(w.as_mut_slice().into()),
        };
        assert!(
            sgd.step_with(isa, &threads, StepSettings::new(1, 1e5), slabs)
                .unwrap()
        );
        assert_eq!((p[1], p[2], momentum[1], momentum[2]), (1.0, 1.0, 0.0, 0.0));
        assert!(
            p[0] < -40_000.0 && momentum[0] == 0.5 && w.iter().all(|w| w.is_finite()),
            "{p:?} {w:?}"
        );
        // An element that was not finite before is left alone and is nothing new.
        let (mut p, mut w) = ([f32::NEG_INFINITY, 1.0], [bf16::ONE; 2]);
        let slabs = SgdSlabs {
            grad: [0.0f32, 0.5].as_slice().into(),
            master: &mut p,
            momentum: None,
            working: Some(w.as_mut_slice().into()),
        };
        assert!(
            !Sgd::default()
                .step_with(isa, &threads, StepSettings::new(1, 1e-3), slabs)
                .unwrap()
        );
        assert!(p[0] == f32::NEG_INFINITY && p[1] < 1.0 && w[0] == bf16::NEG_INFINITY);
    }
}

/// A master follows weights that the user wrote, and keeps its low bits for the others.
#[test]
fn a_master_follows_written_weights_only() {
    for len in [1, 16, 37] {
        let fine = noise(len, 3);
        let mut weights: Vec<bf16> = fine.iter().map(|x| bf16::from_f32(*x)).collect();
        let mut master = fine.clone();
        follow(&one_thread(), weights.as_slice().into(), &mut master).unwrap();
        assert_eq!(master, fine, "nothing was written");
        let at = len - 1;
        weights[at] = bf16::from_f32(3.5);
        follow(&one_thread(), weights.as_slice().into(), &mut master).unwrap();
        assert!(master[..at] == fine[..at] && master[at] == 3.5);
        assert!(follow(&one_thread(), weights.as_slice().into(), &mut master[..at]).is_err());
    }
}
