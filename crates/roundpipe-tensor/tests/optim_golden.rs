//! Ten steps of each optimizer against PyTorch, of Lion against optax, moments of 8 bits against
//! bitsandbytes; `fixtures/make_optim.py`, `fixtures/make_matrix_optim.py`, `fixtures/make_lion.py` and
//! `fixtures/make_moments.py` make the files.

use roundpipe_tensor::cpu::threads::Threads;
use roundpipe_tensor::optim::{
    Adafactor, AdafactorSlabs, Adam, AdamSlabs, AdamW, AdjustLr, BLOCK, DynamicMap, Floats, Lion,
    LionSlabs, Matrices, Muon, MuonSlabs, SecondMoment, Sgd, SgdSlabs, StepSettings, dequantize,
    quantize, scale_count,
};
use roundpipe_tensor::{Shape, bf16};
use safetensors::SafeTensors;

const STEPS: u64 = 10;

/// The steps after which the files have the state.
const KEPT: [u64; 3] = [1, 2, 10];

/// Where the two may differ: PyTorch fuses some operations and we fuse none.
const TOLERANCE: f32 = 1e-6;

struct Golden {
    bytes: Vec<u8>,
}

impl Golden {
    fn open() -> Self {
        Self::named("optim")
    }

    fn named(name: &str) -> Self {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures");
        Self {
            bytes: std::fs::read(format!("{folder}/{name}.safetensors")).unwrap(),
        }
    }

    fn tensor(&self, name: &str) -> Vec<f32> {
        self.elements(name, f32::from_le_bytes)
    }

    fn bytes(&self, name: &str) -> Vec<u8> {
        self.elements(name, |[byte]| byte)
    }

    fn elements<T, const N: usize>(&self, name: &str, read: impl Fn([u8; N]) -> T) -> Vec<T> {
        let file = SafeTensors::deserialize(&self.bytes).unwrap();
        let data = file.tensor(name).unwrap();
        let (elements, _) = data.data().as_chunks::<N>();
        elements.iter().map(|&bytes| read(bytes)).collect()
    }

    /// Row `row` of a tensor of `rows`.
    fn row(&self, name: &str, row: usize, rows: usize) -> Vec<f32> {
        let values = self.tensor(name);
        values
            .chunks(values.len() / rows)
            .nth(row)
            .unwrap()
            .to_vec()
    }

    fn grad(&self, step: u64) -> Vec<f32> {
        self.row("grads", step as usize - 1, STEPS as usize)
    }

    fn shape(&self, name: &str) -> Shape {
        let file = SafeTensors::deserialize(&self.bytes).unwrap();
        Shape::new(file.tensor(name).unwrap().shape()).unwrap()
    }

    /// Compares with `name` after `step`: relative to the value, or to the tensor's size near zero.
    fn check(&self, name: &str, step: u64, ours: &[f32]) {
        self.check_within(TOLERANCE, name, step, ours);
    }

    fn check_within(&self, tolerance: f32, name: &str, step: u64, ours: &[f32]) {
        let Some(row) = KEPT.iter().position(|&kept| kept == step) else {
            return;
        };
        let theirs = self.row(name, row, KEPT.len());
        assert_eq!(ours.len(), theirs.len());
        let size = (theirs.iter().map(|x| x * x).sum::<f32>() / theirs.len() as f32).sqrt();
        for (i, (a, b)) in ours.iter().zip(&theirs).enumerate() {
            let allowed = tolerance * b.abs().max(size);
            assert!(
                (a - b).abs() <= allowed,
                "{name}, step {step}, element {i}: {a}, the file has {b}"
            );
        }
    }
}

/// Checks one case; `step_fn` is the step of `Adam` or `AdamW`.
fn check_adam(
    golden: &Golden,
    name: &str,
    amsgrad: bool,
    step_fn: impl Fn(&Threads, u64, AdamSlabs<'_>),
) {
    let threads = Threads::new(Some(1)).unwrap();
    let mut param = golden.tensor("param");
    let (mut first, mut second) = (vec![0.0; param.len()], vec![0.0; param.len()]);
    let mut largest = amsgrad.then(|| vec![0.0; param.len()]);
    for step in 1..=STEPS {
        let grad = golden.grad(step);
        let slabs = AdamSlabs {
            grad: grad.as_slice().into(),
            master: &mut param,
            exp_avg: &mut first,
            exp_avg_sq: &mut second,
            max_exp_avg_sq: largest.as_deref_mut(),
            working: None,
        };
        step_fn(&threads, step, slabs);
        golden.check(&format!("{name}.param"), step, &param);
        golden.check(&format!("{name}.exp_avg"), step, &first);
        golden.check(&format!("{name}.exp_avg_sq"), step, &second);
        if let Some(largest) = &largest {
            golden.check(&format!("{name}.max_exp_avg_sq"), step, largest);
        }
    }
}

fn check_sgd(golden: &Golden, name: &str, lr: f64, sgd: Sgd) {
    let threads = Threads::new(Some(1)).unwrap();
    let mut param = golden.tensor("param");
    // Not zeros: the first step must not read it.
    let mut momentum = (sgd.momentum != 0.0).then(|| vec![f32::NAN; param.len()]);
    for step in 1..=STEPS {
        let grad = golden.grad(step);
        let slabs = SgdSlabs {
            grad: grad.as_slice().into(),
            master: &mut param,
            momentum: momentum.as_deref_mut(),
            working: None,
        };
        sgd.step(&threads, StepSettings::new(step, lr), slabs)
            .unwrap();
        golden.check(&format!("{name}.param"), step, &param);
        if let Some(momentum) = &momentum {
            golden.check(&format!("{name}.momentum_buffer"), step, momentum);
        }
    }
}

/// Parameters and moments follow `torch.optim.AdamW` and `Adam` through every option.
#[test]
fn adam_follows_pytorch() {
    let golden = Golden::open();
    let base = AdamW::default();
    let cases = [
        ("adamw", 1e-3, base),
        (
            "adamw_betas",
            3e-2,
            AdamW {
                beta1: 0.8,
                beta2: 0.95,
                eps: 1e-6,
                weight_decay: 0.1,
                ..base
            },
        ),
        (
            "adamw_amsgrad",
            1e-2,
            AdamW {
                amsgrad: true,
                ..base
            },
        ),
        (
            "adamw_maximize",
            1e-2,
            AdamW {
                maximize: true,
                ..base
            },
        ),
    ];
    for (name, lr, adam) in cases {
        check_adam(&golden, name, adam.amsgrad, |threads, step, slabs| {
            let settings = StepSettings::new(step, lr);
            adam.step(threads, settings, slabs).unwrap();
        });
    }
    let l2 = Adam {
        weight_decay: 0.1,
        amsgrad: true,
        ..Adam::default()
    };
    for (name, adam) in [("adam", Adam::default()), ("adam_l2", l2)] {
        check_adam(&golden, name, adam.amsgrad, |threads, step, slabs| {
            let settings = StepSettings::new(step, 1e-2);
            adam.step(threads, settings, slabs).unwrap();
        });
    }
}

/// Parameters and momentum follow `torch.optim.SGD` through every option.
#[test]
fn sgd_follows_pytorch() {
    let golden = Golden::open();
    let base = Sgd::default();
    let momentum = Sgd {
        momentum: 0.9,
        weight_decay: 0.01,
        ..base
    };
    let cases = [
        ("sgd", base),
        (
            "sgd_decay",
            Sgd {
                weight_decay: 0.05,
                maximize: true,
                ..base
            },
        ),
        (
            "sgd_momentum",
            Sgd {
                dampening: 0.3,
                ..momentum
            },
        ),
        (
            "sgd_nesterov",
            Sgd {
                nesterov: true,
                ..momentum
            },
        ),
    ];
    for (name, sgd) in cases {
        check_sgd(&golden, name, 0.1, sgd);
    }
}

/// Parameters and the moment follow `optax.lion`, from the parameters and gradients of the other
/// file.
#[test]
fn lion_follows_optax() {
    let (given, golden) = (Golden::open(), Golden::named("lion"));
    let threads = Threads::new(Some(1)).unwrap();
    let other = Lion {
        beta1: 0.8,
        beta2: 0.95,
        weight_decay: 0.1,
        ..Lion::default()
    };
    for (name, lr, lion) in [("lion", 1e-3, Lion::default()), ("lion_betas", 1e-2, other)] {
        let mut param = given.tensor("param");
        let mut moment = vec![0.0; param.len()];
        for step in 1..=STEPS {
            let grad = given.grad(step);
            let slabs = LionSlabs {
                grad: grad.as_slice().into(),
                master: &mut param,
                exp_avg: &mut moment,
                working: None,
            };
            lion.step(&threads, StepSettings::new(step, lr), slabs)
                .unwrap();
            golden.check(&format!("{name}.param"), step, &param);
            golden.check(&format!("{name}.exp_avg"), step, &moment);
        }
    }
}

fn check_adafactor(golden: &Golden, case: &str, param: &str, lr: f64, rule: Adafactor) {
    let threads = Threads::new(Some(1)).unwrap();
    let name = |what: &str| format!("{case}.{param}.{what}");
    let mut master = golden.tensor(param);
    let matrices = Matrices::of(&golden.shape(param));
    let (rows, cols) = matrices.map_or((master.len(), 0), |m| (m.count * m.rows, m.count * m.cols));
    let (mut first, mut by_col) = (vec![0.0; rows], vec![0.0; cols]);
    for step in 1..=STEPS {
        let grad = golden.row(&format!("{param}.grads"), step as usize - 1, STEPS as usize);
        let second = match matrices {
            Some(matrices) => SecondMoment::Factored {
                matrices,
                by_row: &mut first,
                by_col: &mut by_col,
            },
            None => SecondMoment::Full(&mut first),
        };
        let slabs = AdafactorSlabs {
            grad: grad.as_slice().into(),
            master: &mut master,
            second,
            working: None,
        };
        rule.step(&threads, StepSettings::new(step, lr), slabs)
            .unwrap();
        // PyTorch sums norms in f32.
        golden.check_within(1e-5, &name("param"), step, &master);
        match matrices {
            Some(_) => {
                golden.check_within(1e-5, &name("row_var"), step, &first);
                golden.check_within(1e-5, &name("col_var"), step, &by_col);
            }
            None => golden.check(&name("variance"), step, &first),
        }
    }
}

/// Parameters and second moments follow `torch.optim.Adafactor` on matrices, several of them, and
/// vectors.
#[test]
fn adafactor_follows_pytorch() {
    let golden = Golden::named("matrix_optim");
    let base = Adafactor::default();
    let decay = Adafactor {
        beta2_decay: -0.5,
        eps1: Some(1e-4),
        eps2: 1e-2,
        d: 1.1,
        weight_decay: 0.1,
        ..base
    };
    let maximize = Adafactor {
        maximize: true,
        d: 1e9,
        ..base
    };
    for param in ["wide", "tall", "experts", "vector"] {
        check_adafactor(&golden, "adafactor", param, 1e-2, base);
        check_adafactor(&golden, "adafactor_decay", param, 0.3, decay);
        check_adafactor(&golden, "adafactor_maximize", param, 3e-2, maximize);
    }
}

fn check_muon(golden: &Golden, case: &str, tolerance: f32, lr: f64, rule: Muon) {
    let threads = Threads::new(Some(1)).unwrap();
    for param in ["wide", "tall", "experts"] {
        let name = |what: &str| format!("{case}.{param}.{what}");
        let mut master = golden.tensor(param);
        let matrices = Matrices::of(&golden.shape(param)).unwrap();
        let mut momentum = vec![0.0; master.len()];
        for step in 1..=STEPS {
            let grad = golden.row(&format!("{param}.grads"), step as usize - 1, STEPS as usize);
            let slabs = MuonSlabs {
                matrices,
                grad: grad.as_slice().into(),
                master: &mut master,
                momentum: &mut momentum,
                working: None,
            };
            rule.step(&threads, StepSettings::new(step, lr), slabs)
                .unwrap();
            golden.check_within(tolerance, &name("param"), step, &master);
            golden.check(&name("momentum_buffer"), step, &momentum);
        }
    }
}

/// Parameters and momentum follow `torch.optim.Muon`: closely with its iteration in f32, and within
/// the noise of bf16 as it is.
#[test]
fn muon_follows_pytorch() {
    let golden = Golden::named("matrix_optim");
    let base = Muon::default();
    let matched = Muon {
        momentum: 0.8,
        weight_decay: 0.3,
        adjust_lr: AdjustLr::MatchRmsAdamW,
        ..base
    };
    let plain = Muon {
        nesterov: false,
        ns_steps: 3,
        weight_decay: 0.0,
        ..base
    };
    check_muon(&golden, "muon", 1e-5, 1e-2, base);
    check_muon(&golden, "muon_match", 1e-5, 1e-2, matched);
    check_muon(&golden, "muon_plain", 1e-5, 5e-2, plain);
    check_muon(&golden, "bf16_muon", 2e-2, 1e-2, base);
}

/// The values of both maps, codes and scales are those of bitsandbytes; what they stand for, too.
#[test]
fn blocks_of_8_bits_are_those_of_bitsandbytes() {
    let golden = Golden::named("moments");
    let one = Threads::new(Some(1)).unwrap();
    for (name, map) in [
        ("signed", DynamicMap::Signed),
        ("unsigned", DynamicMap::Unsigned),
    ] {
        let of = |what: &str| golden.tensor(&format!("{name}.{what}"));
        let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(map.values()), bits(&of("map")), "{name}");
        let x = of("x");
        let mut codes = vec![0; x.len()];
        let mut scales = vec![0.0; scale_count(x.len())];
        quantize(&one, map, &x, &mut codes, &mut scales).unwrap();
        assert_eq!(bits(&scales), bits(&of("scales")), "{name}");
        let mut back = vec![f32::NAN; x.len()];
        dequantize(&one, map, &codes, &scales, &mut back).unwrap();
        // A block of zeros has a scale of 0, and any code.
        let expected = golden.bytes(&format!("{name}.codes"));
        let is_zero = |i: usize| scales[i / BLOCK] == 0.0;
        let differ = (0..x.len()).find(|&i| codes[i] != expected[i] && !is_zero(i));
        assert_eq!(differ, None, "{name}");
        let same = |(a, b): (&f32, &f32)| a == b;
        assert!(back.iter().zip(&of("back")).all(same), "{name}");
    }
}

/// Five steps of AdamW with moments of 8 bits. PyTorch fuses some operations, so that a code may be
/// the next one where a moment lies between two.
#[test]
fn adamw_with_8_bits_is_that_of_bitsandbytes() {
    let golden = Golden::named("moments");
    let one = Threads::new(Some(1)).unwrap();
    let mut param = golden.tensor("adamw.start");
    let numel = param.len();
    let grads: Vec<bf16> = golden.elements("adamw.grads", bf16::from_le_bytes);
    let maps = [DynamicMap::Signed, DynamicMap::Unsigned];
    let mut moments = maps.map(|_| vec![0.0; numel]);
    let mut codes = maps.map(|_| vec![0; numel]);
    let mut scales = maps.map(|_| vec![0.0; scale_count(numel)]);
    for step in 1..=5 {
        let grad = &grads[(step - 1) * numel..step * numel];
        let [exp_avg, exp_avg_sq] = &mut moments;
        let slabs = AdamSlabs {
            grad: Floats::BF16(grad),
            master: &mut param,
            exp_avg,
            exp_avg_sq,
            max_exp_avg_sq: None,
            working: None,
        };
        let settings = StepSettings::new(step as u64, 1e-2);
        AdamW::default().step(&one, settings, slabs).unwrap();
        for i in [0, 1] {
            quantize(&one, maps[i], &moments[i], &mut codes[i], &mut scales[i]).unwrap();
            dequantize(&one, maps[i], &codes[i], &scales[i], &mut moments[i]).unwrap();
        }
        let row = match step {
            1 => 0,
            5 => 1,
            _ => continue,
        };
        let expected = golden.row("adamw.param", row, 2);
        let differ = |(a, b): (&f32, &f32)| (a - b).abs() > 1e-6 + 1e-6 * b.abs();
        let count = param.iter().zip(&expected).filter(|x| differ(*x)).count();
        assert!(count <= numel / 200, "step {step}: {count} of {numel}");
    }
    for (i, codes) in codes.iter().enumerate() {
        let expected = golden.bytes(&format!("adamw.codes{}", i + 1));
        let off = codes.iter().zip(&expected).map(|(a, b)| a.abs_diff(*b));
        assert!(off.clone().all(|off| off <= 1), "moment {i}");
        let count = off.filter(|off| *off > 0).count();
        assert!(count <= numel / 200, "moment {i}: {count} of {numel}");
    }
}
