//! The rules that look at whole matrices: against f64, with every instruction set and number of
//! threads, with gradients that are not finite; refusals.

use half::bf16;

use super::simd::PassIsa;
use super::tests::noise;
use super::*;

/// Around the borders of blocks, tiles of columns, tasks of rows and chunks; `[count, rows, cols]`.
const SIZES: [[usize; 3]; 9] = [
    [1, 1, 1],
    [3, 5, 7],
    [1, 2, 16],
    [2, 33, 17],
    [1, 40, 64],
    [1, 9, 65],
    [1, 200, 1000],
    [2, 1, 70_000],
    [1, 70_000, 1],
];

fn matrices([count, rows, cols]: [usize; 3]) -> Matrices {
    Matrices { count, rows, cols }
}

fn threads(count: usize) -> Threads {
    Threads::new(Some(count)).unwrap()
}

/// A parameter with its state, by `matrices` or as a vector.
#[derive(Clone, PartialEq, Debug)]
struct Adafactored {
    matrices: Option<Matrices>,
    master: Vec<f32>,
    working: Vec<bf16>,
    first: Vec<f32>,
    by_col: Vec<f32>,
}

impl Adafactored {
    fn new(matrices: Option<Matrices>, len: usize) -> Self {
        let first = matrices.map_or(len, |m| m.count * m.rows);
        Self {
            matrices,
            master: noise(len, 3),
            working: vec![bf16::ZERO; len],
            first: vec![0.0; first],
            by_col: vec![0.0; matrices.map_or(0, |m| m.count * m.cols)],
        }
    }

    fn step(
        &mut self,
        rule: Adafactor,
        isa: PassIsa,
        threads: &Threads,
        settings: StepSettings,
        grad: Floats<'_>,
    ) -> bool {
        let second = match self.matrices {
            Some(matrices) => SecondMoment::Factored {
                matrices,
                by_row: &mut self.first,
                by_col: &mut self.by_col,
            },
            None => SecondMoment::Full(&mut self.first),
        };
        let slabs = AdafactorSlabs {
            grad,
            master: &mut self.master,
            second,
            working: Some(FloatsMut::BF16(&mut self.working)),
        };
        rule.step_with(isa, threads, settings, slabs).unwrap()
    }
}

/// `torch.optim.Adafactor` in f64, element by element.
struct Reference {
    dims: [usize; 3],
    is_vector: bool,
    p: Vec<f64>,
    by_row: Vec<f64>,
    by_col: Vec<f64>,
    full: Vec<f64>,
}

impl Reference {
    fn step(&mut self, rule: Adafactor, step: f64, lr: f64, g: &[f64]) {
        let [count, rows, cols] = self.dims;
        let len = self.p.len() as f64;
        let eps1 = rule.eps1.unwrap_or(f64::from(f32::EPSILON));
        let weight = step.powf(rule.beta2_decay);
        let rms = |x: &[f64]| (x.iter().map(|x| x * x).sum::<f64>() / len).sqrt();
        let alpha = rule.eps2.max(rms(&self.p)) * lr.min(1.0 / step.sqrt());
        let lerp = |old: f64, new: f64| old + weight * (new - old);
        let mut v = vec![0.0; self.p.len()];
        if self.is_vector {
            for (full, g) in self.full.iter_mut().zip(g) {
                *full = lerp(*full, g * g);
            }
            v.clone_from(&self.full);
        } else {
            for m in 0..count {
                let at = |i: usize, j: usize| (m * rows + i) * cols + j;
                for i in 0..rows {
                    let mean = (0..cols).map(|j| g[at(i, j)].powi(2)).sum::<f64>() / cols as f64;
                    self.by_row[m * rows + i] = lerp(self.by_row[m * rows + i], mean);
                }
                for j in 0..cols {
                    let mean = (0..rows).map(|i| g[at(i, j)].powi(2)).sum::<f64>() / rows as f64;
                    self.by_col[m * cols + j] = lerp(self.by_col[m * cols + j], mean);
                }
                let of_rows = &self.by_row[m * rows..(m + 1) * rows];
                let mean = (of_rows.iter().sum::<f64>() / rows as f64).max(eps1);
                for i in 0..rows {
                    for j in 0..cols {
                        v[at(i, j)] = of_rows[i] * self.by_col[m * cols + j] / mean;
                    }
                }
            }
        }
        let u: Vec<f64> = g
            .iter()
            .zip(&v)
            .map(|(g, v)| g / v.max(eps1 * eps1).sqrt())
            .collect();
        let scale = alpha / (rms(&u) / rule.d).max(1.0);
        for (p, u) in self.p.iter_mut().zip(&u) {
            *p = *p * (1.0 - lr * rule.weight_decay) - scale * u;
        }
    }
}

fn widen(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&x| f64::from(x)).collect()
}

/// Relative to the value, or to the largest near zero.
fn assert_close(what: &str, ours: &[f32], exact: &[f64], tolerance: f64) {
    let size = exact.iter().fold(0.0f64, |most, x| most.max(x.abs()));
    for (i, (a, b)) in ours.iter().zip(exact).enumerate() {
        let allowed = tolerance * b.abs().max(1e-2 * size);
        let off = (f64::from(*a) - b).abs();
        assert!(off <= allowed, "{what}, element {i}: {a}, not {b}");
    }
}

/// Five steps of every size, as matrices and as a vector, against the formulas in f64.
#[test]
fn adafactor_follows_its_formulas() {
    let rule = Adafactor {
        weight_decay: 0.1,
        d: 1.1,
        ..Adafactor::default()
    };
    for dims in SIZES {
        for is_vector in [false, true] {
            let of = matrices(dims);
            let mut ours = Adafactored::new((!is_vector).then_some(of), of.numel());
            let mut exact = Reference {
                dims,
                is_vector,
                p: widen(&ours.master),
                by_row: vec![0.0; dims[0] * dims[1]],
                by_col: vec![0.0; dims[0] * dims[2]],
                full: vec![0.0; of.numel()],
            };
            for step in 1..=5 {
                let grad = noise(of.numel(), 10 + step);
                let settings = StepSettings::new(step, 0.3);
                let grads = Floats::F32(&grad);
                let kept = ours.step(rule, PassIsa::best(), &threads(1), settings, grads);
                assert!(!kept);
                exact.step(rule, step as f64, 0.3, &widen(&grad));
            }
            let what = format!("{dims:?}, vector: {is_vector}");
            assert_close(&what, &ours.master, &exact.p, 1e-4);
            let first = if is_vector {
                &exact.full
            } else {
                &exact.by_row
            };
            assert_close(&what, &ours.first, first, 1e-5);
            if !is_vector {
                assert_close(&what, &ours.by_col, &exact.by_col, 1e-5);
            }
            let rounded: Vec<bf16> = ours.master.iter().map(|&x| bf16::from_f32(x)).collect();
            assert_eq!(ours.working, rounded, "{what}");
        }
    }
}

/// Neither threads nor instructions change a bit, with any type of gradients.
#[test]
fn adafactor_has_the_same_bits_everywhere() {
    let rule = Adafactor::default();
    for dims in SIZES {
        let of = matrices(dims);
        let grad = noise(of.numel(), 5);
        let narrow: Vec<bf16> = grad.iter().map(|&x| bf16::from_f32(x)).collect();
        let settings = StepSettings {
            clip_value: Some(0.3),
            grad_scale: 0.5,
            ..StepSettings::new(3, 0.1)
        };
        for grad in [Floats::F32(&grad), Floats::BF16(&narrow)] {
            for matrices in [Some(of), None] {
                let start = Adafactored::new(matrices, of.numel());
                let mut first = start.clone();
                first.step(rule, PassIsa::Portable, &threads(1), settings, grad);
                assert_ne!(first.master, start.master, "{dims:?}");
                for isa in PassIsa::available() {
                    for count in [1, 3] {
                        let mut again = start.clone();
                        again.step(rule, isa, &threads(count), settings, grad);
                        assert_eq!(again, first, "{dims:?}, {isa:?}, {count} threads");
                    }
                }
            }
        }
    }
}

/// Every element depends on all others, so one that is not finite stops them all.
#[test]
fn a_gradient_that_is_not_finite_leaves_a_matrix_as_it_is() {
    let of = matrices([2, 20, 30]);
    for bad in [f32::NAN, f32::INFINITY, 2e38] {
        let mut grad = noise(of.numel(), 5);
        grad[77] = bad;
        let grad = Floats::F32(&grad);
        let settings = StepSettings::new(1, 0.1);
        let start = Adafactored::new(Some(of), of.numel());
        let mut after = start.clone();
        let rule = Adafactor::default();
        let kept = after.step(rule, PassIsa::best(), &threads(1), settings, grad);
        assert!(kept && after == start, "{bad}");
        if bad != 2e38 {
            let mut after = Orthogonal::new(of);
            let start = after.clone();
            assert!(after.step(Muon::default(), 1, settings, grad), "{bad}");
            let size = of.rows * of.cols;
            assert_eq!(after.master[..size], start.master[..size], "{bad}");
            assert_eq!(after.momentum[..size], start.momentum[..size], "{bad}");
            assert_ne!(after.master[size..], start.master[size..], "{bad}");
        }
    }
}

/// A parameter that Muon updates.
#[derive(Clone, PartialEq, Debug)]
struct Orthogonal {
    matrices: Matrices,
    master: Vec<f32>,
    momentum: Vec<f32>,
    working: Vec<bf16>,
}

impl Orthogonal {
    fn new(matrices: Matrices) -> Self {
        let len = matrices.numel();
        Self {
            matrices,
            master: noise(len, 3),
            momentum: noise(len, 4),
            working: vec![bf16::ZERO; len],
        }
    }

    fn step(&mut self, rule: Muon, count: usize, settings: StepSettings, grad: Floats<'_>) -> bool {
        let slabs = MuonSlabs {
            matrices: self.matrices,
            grad,
            master: &mut self.master,
            momentum: &mut self.momentum,
            working: Some(FloatsMut::BF16(&mut self.working)),
        };
        rule.step(&threads(count), settings, slabs).unwrap()
    }
}

/// `a b` with a `[m, k]` and b `[k, n]`.
fn product(a: &[f64], b: &[f64], [m, k, n]: [usize; 3]) -> Vec<f64> {
    let mut c = vec![0.0; m * n];
    for i in 0..m {
        for l in 0..k {
            for j in 0..n {
                c[i * n + j] += a[i * k + l] * b[l * n + j];
            }
        }
    }
    c
}

fn transpose(a: &[f64], rows: usize, cols: usize) -> Vec<f64> {
    (0..cols * rows)
        .map(|at| a[at % rows * cols + at / rows])
        .collect()
}

/// What `torch.optim.Muon` makes of one matrix, in f64.
fn orthogonal(rule: Muon, x: &[f64], rows: usize, cols: usize) -> Vec<f64> {
    if rows > cols {
        let turned = orthogonal(rule, &transpose(x, rows, cols), cols, rows);
        return transpose(&turned, cols, rows);
    }
    let norm = x.iter().map(|x| x * x).sum::<f64>().sqrt().max(rule.eps);
    let mut x: Vec<f64> = x.iter().map(|x| x / norm).collect();
    let (a, b, c) = rule.ns_coefficients;
    for _ in 0..rule.ns_steps {
        let square = product(&x, &transpose(&x, rows, cols), [rows, cols, rows]);
        let fourth = product(&square, &square, [rows, rows, rows]);
        let update: Vec<f64> = square
            .iter()
            .zip(&fourth)
            .map(|(s, f)| b * s + c * f)
            .collect();
        let change = product(&update, &x, [rows, rows, cols]);
        x = x
            .iter()
            .zip(&change)
            .map(|(x, change)| a * x + change)
            .collect();
    }
    x
}

const MUON_SIZES: [[usize; 3]; 6] = [
    [1, 1, 1],
    [1, 8, 20],
    [1, 31, 8],
    [3, 5, 7],
    [1, 64, 64],
    [1, 90, 130],
];

/// A step of matrices of every form against the formulas in f64.
#[test]
fn muon_follows_its_formulas() {
    for dims in MUON_SIZES {
        let matched = Muon {
            adjust_lr: AdjustLr::MatchRmsAdamW,
            nesterov: false,
            ..Muon::default()
        };
        for rule in [Muon::default(), matched] {
            let [count, rows, cols] = dims;
            let mut ours = Orthogonal::new(matrices(dims));
            let (before, momentum) = (widen(&ours.master), widen(&ours.momentum));
            let grad = noise(ours.master.len(), 9);
            let lr = 0.2;
            let settings = StepSettings::new(1, lr);
            assert!(!ours.step(rule, 1, settings, Floats::F32(&grad)));
            let mix = |m: f64, g: f64| rule.momentum * m + (1.0 - rule.momentum) * g;
            let grad = widen(&grad);
            let new: Vec<f64> = momentum
                .iter()
                .zip(&grad)
                .map(|(m, g)| mix(*m, *g))
                .collect();
            let ratio = match rule.adjust_lr {
                AdjustLr::Original => (rows as f64 / cols as f64).max(1.0).sqrt(),
                AdjustLr::MatchRmsAdamW => 0.2 * (rows.max(cols) as f64).sqrt(),
            };
            let mut exact = Vec::new();
            for m in 0..count {
                let here = m * rows * cols..(m + 1) * rows * cols;
                let x: Vec<f64> = here
                    .clone()
                    .map(|i| {
                        if rule.nesterov {
                            mix(new[i], grad[i])
                        } else {
                            new[i]
                        }
                    })
                    .collect();
                let x = orthogonal(rule, &x, rows, cols);
                let keep = 1.0 - lr * rule.weight_decay;
                exact.extend(here.zip(x).map(|(i, x)| before[i] * keep - lr * ratio * x));
            }
            assert_close(&format!("{dims:?}"), &ours.momentum, &new, 1e-5);
            assert_close(&format!("{dims:?}"), &ours.master, &exact, 2e-3);
            let rounded: Vec<bf16> = ours.master.iter().map(|&x| bf16::from_f32(x)).collect();
            assert_eq!(ours.working, rounded, "{dims:?}");
        }
    }
}

/// Threads change no bit, also where products are cut among them.
#[test]
fn muon_has_the_same_bits_with_any_number_of_threads() {
    for dims in [[2, 20, 33], [1, 300, 130], [1, 150, 400]] {
        let start = Orthogonal::new(matrices(dims));
        let grad = noise(start.master.len(), 5);
        let settings = StepSettings {
            clip_value: Some(0.3),
            grad_scale: 0.5,
            ..StepSettings::new(1, 0.1)
        };
        let step = |count: usize| {
            let mut after = start.clone();
            after.step(Muon::default(), count, settings, Floats::F32(&grad));
            after
        };
        let first = step(1);
        assert_ne!(first.master, start.master);
        for count in [2, 3, 5] {
            assert_eq!(step(count), first, "{dims:?}, {count} threads");
        }
    }
}

/// The size of a gradient does not matter, only its direction; a gradient of zeros changes nothing.
#[test]
fn muon_forgets_the_size_of_a_gradient() {
    let rule = Muon {
        momentum: 0.0,
        weight_decay: 0.0,
        ..Muon::default()
    };
    let of = matrices([1, 12, 10]);
    let grad = noise(of.numel(), 5);
    let step = |grad: &[f32], factor: f32| {
        let grad: Vec<f32> = grad.iter().map(|x| x * factor).collect();
        let mut after = Orthogonal::new(of);
        after.step(rule, 1, StepSettings::new(1, 0.1), Floats::F32(&grad));
        widen(&after.master)
    };
    let plain = step(&grad, 1.0);
    for factor in [1e-3, 64.0, 1e20] {
        let other: Vec<f32> = step(&grad, factor).iter().map(|x| *x as f32).collect();
        assert_close(&format!("times {factor}"), &other, &plain, 1e-4);
    }
    assert_eq!(
        step(&vec![0.0; of.numel()], 1.0),
        widen(&noise(of.numel(), 3))
    );
}

/// Errors name the setting or the slab.
#[test]
fn what_cannot_be_is_refused() {
    let adafactors = [
        (
            "beta2_decay",
            Adafactor {
                beta2_decay: 0.1,
                ..Adafactor::default()
            },
        ),
        (
            "eps1",
            Adafactor {
                eps1: Some(0.0),
                ..Adafactor::default()
            },
        ),
        (
            "eps2",
            Adafactor {
                eps2: -1.0,
                ..Adafactor::default()
            },
        ),
        (
            "d is",
            Adafactor {
                d: 0.9,
                ..Adafactor::default()
            },
        ),
        (
            "weight_decay",
            Adafactor {
                weight_decay: f64::NAN,
                ..Adafactor::default()
            },
        ),
    ];
    for (name, rule) in adafactors {
        let error = rule.check().unwrap_err().to_string();
        assert!(error.contains(name), "{error}");
    }
    let muons = [
        (
            "momentum",
            Muon {
                momentum: 1.0,
                ..Muon::default()
            },
        ),
        (
            "eps",
            Muon {
                eps: 0.0,
                ..Muon::default()
            },
        ),
        (
            "ns_steps",
            Muon {
                ns_steps: 100,
                ..Muon::default()
            },
        ),
        (
            "ns_steps",
            Muon {
                ns_steps: 0,
                ..Muon::default()
            },
        ),
        (
            "weight_decay",
            Muon {
                weight_decay: -0.1,
                ..Muon::default()
            },
        ),
        (
            "ns_coefficients",
            Muon {
                ns_coefficients: (1.0, f64::INFINITY, 0.0),
                ..Muon::default()
            },
        ),
    ];
    for (name, rule) in muons {
        let error = rule.check().unwrap_err().to_string();
        assert!(error.contains(name), "{error}");
    }
    let (mut master, mut by_row, mut by_col) = ([0.0; 6], [0.0; 3], [0.0; 2]);
    let slabs = AdafactorSlabs {
        grad: Floats::F32(&[0.0; 6]),
        master: &mut master,
        second: SecondMoment::Factored {
            matrices: matrices([1, 2, 3]),
            by_row: &mut by_row,
            by_col: &mut by_col,
        },
        working: None,
    };
    let error = Adafactor::default().step(&threads(1), StepSettings::new(1, 0.1), slabs);
    assert!(error.unwrap_err().to_string().contains("row"));
    let mut momentum = [0.0; 5];
    let slabs = MuonSlabs {
        matrices: matrices([1, 2, 3]),
        grad: Floats::F32(&[0.0; 6]),
        master: &mut master,
        momentum: &mut momentum,
        working: None,
    };
    let error = Muon::default().step(&threads(1), StepSettings::new(1, 0.1), slabs);
    assert!(error.unwrap_err().to_string().contains("momentum"));
}

/// A value that fits f32 and not the slab's type keeps what was there; all others are rounded.
#[test]
fn narrowing_keeps_what_would_be_infinite() {
    for isa in PassIsa::available() {
        let mut src = noise(100, 7);
        (src[3], src[70], src[98]) = (f32::MAX, -f32::MAX, f32::NAN);
        let mut dst = vec![bf16::ONE; 100];
        let kept = super::grads::narrow_with(isa, &threads(1), &src, FloatsMut::BF16(&mut dst));
        assert!(kept.unwrap(), "{isa:?}");
        for (i, (src, dst)) in src.iter().zip(&dst).enumerate() {
            let expected = match i {
                3 | 70 | 98 => bf16::ONE,
                _ => bf16::from_f32(*src),
            };
            assert_eq!(*dst, expected, "{isa:?}, element {i}");
        }
    }
}
