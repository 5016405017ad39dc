//! The reference's `test_optim.py`: every choice of Adam over tensors of many sizes, against its
//! formula in f64.

use roundpipe::optim::{Adam, AdamW};
use roundpipe::{DType, Optimizer, Param, Rule, Update};
use roundpipe_tensor::optim::Floats;

const EPS: f64 = 1e-4;

/// What one run chooses.
#[derive(Debug, Clone, Copy)]
struct Choice {
    lr: f64,
    betas: [f64; 2],
    decay: f64,
    amsgrad: bool,
    maximize: bool,
    decoupled: bool,
}

impl Choice {
    fn all() -> Vec<Self> {
        let mut all = Vec::new();
        for (lr, betas) in [(0.01, [0.9, 0.999]), (0.001, [0.8, 0.95])] {
            for bits in 0..16u32 {
                let is = |bit: u32| bits >> bit & 1 == 1;
                all.push(Self {
                    lr,
                    betas,
                    decay: if is(0) { 0.01 } else { 0.0 },
                    amsgrad: is(1),
                    maximize: is(2),
                    decoupled: is(3),
                });
            }
        }
        all
    }

    fn rule(self) -> Rule {
        let [beta1, beta2] = self.betas;
        let (amsgrad, maximize) = (self.amsgrad, self.maximize);
        if self.decoupled {
            Rule::AdamW(AdamW {
                beta1,
                beta2,
                eps: EPS,
                weight_decay: self.decay,
                amsgrad,
                maximize,
            })
        } else {
            Rule::Adam(Adam {
                beta1,
                beta2,
                eps: EPS,
                weight_decay: self.decay,
                amsgrad,
                maximize,
            })
        }
    }

    /// One step of one element: value, two moments, and the largest second moment.
    fn step(self, t: i32, [value, first, second, largest]: &mut [f64; 4], grad: f64) {
        let [beta1, beta2] = self.betas;
        let mut grad = if self.maximize { -grad } else { grad };
        if self.decoupled {
            *value -= self.lr * self.decay * *value;
        } else {
            grad += self.decay * *value;
        }
        *first = beta1 * *first + (1.0 - beta1) * grad;
        *second = beta2 * *second + (1.0 - beta2) * grad * grad;
        *largest = largest.max(*second);
        let used = if self.amsgrad { *largest } else { *second };
        let root = (used / (1.0 - beta2.powi(t))).sqrt();
        *value -= self.lr * *first / (1.0 - beta1.powi(t)) / (root + EPS);
    }
}

/// About normal, the same every time.
fn noise(seed: usize, count: usize) -> Vec<f32> {
    let mut state = (seed as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let mut uniform = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
    };
    (0..count)
        .map(|_| 2.0 * (uniform() + uniform() + uniform()))
        .collect()
}

/// Sizes around every width that a pass may cut at, none included, and some with three dimensions.
fn shapes() -> Vec<Vec<usize>> {
    let mut shapes: Vec<Vec<usize>> = (0..=33).map(|n| vec![n]).collect();
    for power in [64, 128, 256, 512, 1024] {
        shapes.extend([power - 1, power].map(|n| vec![n]));
    }
    shapes.extend((1..=6).map(|n| vec![n, n + 1, n + 2]));
    shapes
}

#[test]
fn every_choice_of_adam_is_its_formula() {
    let shapes = shapes();
    let choices = Choice::all();
    assert_eq!(choices.len(), 32);
    for choice in choices {
        let mut params = Vec::new();
        let mut want: Vec<Vec<[f64; 4]>> = Vec::new();
        for (i, dims) in shapes.iter().enumerate() {
            let start = noise(i, dims.iter().product());
            want.push(
                start
                    .iter()
                    .map(|v| [f64::from(*v), 0.0, 0.0, 0.0])
                    .collect(),
            );
            let param = Param::zeros(DType::F32, dims).unwrap();
            let data = param.data();
            let mut write = data.write(0..data.len()).unwrap();
            write.as_mut_slice::<f32>().copy_from_slice(&start);
            drop(write);
            params.push((format!("p{i}"), param));
        }
        let mut optimizer = Optimizer::new(params.clone(), choice.rule()).unwrap();
        for t in 1..=10 {
            for (i, (_, param)) in params.iter().enumerate() {
                let grad = noise(1000 * t + i, want[i].len());
                optimizer.add_grad(param, Floats::F32(&grad)).unwrap();
                for (element, grad) in want[i].iter_mut().zip(grad) {
                    choice.step(t as i32, element, f64::from(grad));
                }
            }
            optimizer.step(&Update::new(choice.lr)).unwrap();
            for ((name, param), want) in params.iter().zip(&want) {
                let have = param.to_vec::<f32>().unwrap();
                for (have, [want, ..]) in have.iter().zip(want) {
                    // As `torch.allclose` with `atol` 1e-6.
                    let near = 1e-6 + 1e-5 * want.abs();
                    let off = (f64::from(*have) - want).abs();
                    assert!(
                        off <= near,
                        "{choice:?}, step {t}, {name}: {have}, not {want}"
                    );
                }
            }
        }
    }
}
