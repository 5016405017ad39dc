//! Programs as values: what engines there are and what is asked of them, from a seed.

use std::fmt;

use roundpipe::{DType, Lag, RngKey, RngSite};

/// Random choices, a function of their seed.
pub struct Dice(RngKey, u64);

impl Dice {
    pub fn new(seed: u64, stream: u64) -> Self {
        Self(
            RngSite {
                seed,
                step: stream,
                ..RngSite::default()
            }
            .key(),
            0,
        )
    }

    pub fn below(&mut self, n: usize) -> usize {
        self.1 += 1;
        self.0.word(self.1) as usize % n
    }

    pub fn of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }

    /// Whether something happens that does in so many of a hundred cases.
    pub fn percent(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }

    /// From -1 to 1.
    pub fn unit(&mut self) -> f64 {
        self.1 += 1;
        f64::from(self.0.word(self.1) >> 8) / 8_388_608.0 - 1.0
    }
}

/// What programs may contain. `ROUNDPIPE_WITHOUT=labels,chains` leaves classes out, to find the one
/// that fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Class {
    /// Labels and tokens out of range.
    Labels,
    /// Layers that fail or panic.
    Layers,
    /// Loss functions that fail or panic.
    Losses,
    /// Step functions that fail, panic or write what is not finite.
    Steps,
    /// Inputs and labels that are not finite.
    Nonfinite,
    /// Update options that are refused.
    Options,
    /// Parameters written between calls.
    Writes,
    /// Parameters written beside a step.
    Races,
    /// A second engine over the parameters of the first.
    Second,
    /// Engines dropped in flight and built anew.
    Rebuild,
    /// Engines that hand microbatches to each other.
    Chains,
    /// Steps at lag 1.
    LagOne,
    /// Models with buffers.
    Buffers,
    /// Forwards that are kept.
    Kept,
    /// Programs that do not synchronize after each operation.
    Loose,
    /// bf16 and f16.
    Narrow,
    /// More than one engine.
    Several,
}

const CLASSES: [(Class, &str); 17] = [
    (Class::Labels, "labels"),
    (Class::Layers, "layers"),
    (Class::Losses, "losses"),
    (Class::Steps, "steps"),
    (Class::Nonfinite, "nonfinite"),
    (Class::Options, "options"),
    (Class::Writes, "writes"),
    (Class::Races, "races"),
    (Class::Second, "second"),
    (Class::Rebuild, "rebuild"),
    (Class::Chains, "chains"),
    (Class::LagOne, "lag-one"),
    (Class::Buffers, "buffers"),
    (Class::Kept, "kept"),
    (Class::Loose, "loose"),
    (Class::Narrow, "narrow"),
    (Class::Several, "several"),
];

/// The classes that are left out.
#[derive(Debug, Clone, Default)]
pub struct Without(Vec<Class>);

impl Without {
    /// From names with commas between them.
    pub fn parse(text: &str) -> Self {
        let find = |name: &str| {
            let found = CLASSES.iter().find(|(_, known)| *known == name);
            let known = || CLASSES.map(|(_, name)| name).join(", ");
            found
                .unwrap_or_else(|| panic!("there is no class `{name}`; there are {}", known()))
                .0
        };
        Self(
            text.split(',')
                .map(str::trim)
                .filter(|name| !name.is_empty())
                .map(find)
                .collect(),
        )
    }

    fn has(&self, class: Class) -> bool {
        !self.0.contains(&class)
    }
}

/// A program on one ring.
#[derive(Debug, Clone)]
pub struct Program {
    pub seed: u64,
    /// Whether the engines synchronize after each operation.
    pub strict: bool,
    /// Whether they do after an error, where programs are not strict.
    pub after_errors: bool,
    pub engines: Vec<EngineSpec>,
    pub ops: Vec<Op>,
}

/// How an engine is built.
#[derive(Debug, Clone, Copy)]
pub struct EngineSpec {
    pub model: ModelKind,
    pub dtype: DType,
    pub rule: RuleKind,
    pub max_lag: Lag,
    /// Whether gradients are f32 in host memory, whatever the parameters are.
    pub grad_f32: bool,
    /// Whether copies and moments of bf16 parameters are bf16.
    pub optim_bf16: bool,
    pub seed: u64,
    /// Where the layer that can fail stands, counted from the first place it may.
    pub trap: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ModelKind {
    /// Linear layers and dropout.
    Mlp,
    /// One weight in two layers.
    Tied,
    /// Tokens come in.
    Embed,
    /// A running mean in a buffer.
    Running,
    /// Some parameters are frozen.
    Frozen,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RuleKind {
    Adafactor,
    Adam,
    /// With AdamW for what is no hidden matrix.
    Muon,
    Momentum,
    Sgd,
    /// Steps are functions.
    None,
}

/// One operation. Its tag names it, also when others before it are taken out of the program.
#[derive(Debug, Clone, Copy)]
pub struct Op {
    pub tag: usize,
    pub engine: usize,
    pub what: What,
}

#[derive(Debug, Clone, Copy)]
pub enum What {
    /// Forward, loss and backward.
    Train {
        batch: Batch,
        loss: Loss,
        fault: Option<Fault>,
        outputs: bool,
        input_grads: bool,
    },
    /// A forward, kept under its tag or dropped.
    Forward {
        batch: Batch,
        fault: Option<Fault>,
        kind: ForwardKind,
    },
    /// Reads the microbatches of a kept forward.
    Read {
        of: usize,
    },
    /// The backward of a kept forward.
    Backward {
        of: usize,
        odd: Odd,
    },
    /// Drops a kept forward.
    Drop {
        of: usize,
    },
    /// The engine's outputs go to the engine `back`, whose input gradients come back. A fault is in
    /// the front or back.
    Chain {
        back: usize,
        batch: Batch,
        loss: Loss,
        fault: Option<(Side, Fault)>,
        pause: bool,
    },
    /// A step of the rule; `wait` waits for its report.
    Update {
        lag: Lag,
        update: UpdateSpec,
        wait: bool,
    },
    /// A step by a function.
    Step {
        lag: Lag,
        function: Function,
        wait: bool,
    },
    Synchronize,
    /// Synchronizes and reads gradients.
    Gradients,
    /// Synchronizes and reads weights, copies and the number of steps.
    Weights,
    SetTraining(bool),
    /// Synchronizes and writes one parameter.
    Write {
        param: usize,
        data: u64,
    },
    /// Asks for a step and writes one parameter while it is under way.
    Race {
        param: usize,
        data: u64,
        lag: Lag,
        update: UpdateSpec,
    },
    /// Builds a second engine over the same model, which must be refused.
    Second,
    /// Drops the engine, whatever it is doing, and builds it anew. Forwards that are kept go with
    /// it or stay.
    Rebuild {
        holds: bool,
    },
}

#[derive(Debug, Clone, Copy)]
pub struct Batch {
    pub rows: usize,
    /// Microbatches that are asked for; fewer where there are fewer rows.
    pub micro: usize,
    pub data: u64,
    pub odd: Odd,
}

impl Batch {
    pub fn parts(&self) -> usize {
        self.micro.min(self.rows)
    }
}

/// A value among the others that is not finite.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Odd {
    None,
    NanInput,
    InfInput,
    NanLabel,
    InfLabel,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Loss {
    CrossEntropy,
    /// The sum of outputs times labels.
    Weighted,
}

#[derive(Debug, Clone, Copy)]
pub struct ForwardKind {
    pub requires_grad: bool,
    pub merged: bool,
    pub input_grads: bool,
    pub keep: bool,
}

/// Which engine of a chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    Front,
    Back,
}

/// What goes wrong in a call, and in which microbatch or row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    Forward { micro: usize, panics: bool },
    Backward { micro: usize, panics: bool },
    Loss { micro: usize, panics: bool },
    Label { row: usize },
    Token { row: usize },
}

impl Fault {
    /// Whether it shows only after the losses, or the outputs, are known.
    pub fn is_late(self) -> bool {
        matches!(self, Self::Backward { .. })
    }
}

#[derive(Debug, Clone, Copy)]
pub struct UpdateSpec {
    pub lr: f64,
    pub clip: Option<f64>,
    pub grad_scale: f64,
    /// Whether these options must be refused.
    pub refused: bool,
}

/// A step function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Function {
    /// Gradient descent.
    Descend,
    /// Makes all values smaller, without a look at gradients.
    Shrink,
    /// Changes values, all or every second, and fails.
    Fail { panics: bool, half: bool },
    /// Writes a NaN and reports success.
    WriteNan,
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mode = match (self.strict, self.after_errors) {
            (true, _) => "synchronized after each operation",
            (false, true) => "synchronized after errors",
            (false, false) => "not synchronized",
        };
        writeln!(f, "program {}, {mode}", self.seed)?;
        for (at, engine) in self.engines.iter().enumerate() {
            writeln!(f, "  engine {at}: {engine:?}")?;
        }
        for Op { tag, engine, what } in &self.ops {
            writeln!(f, "  #{tag} engine {engine}: {what:?}")?;
        }
        Ok(())
    }
}

/// The program of a seed.
pub fn generate(seed: u64, without: &Without) -> Program {
    let mut maker = Maker {
        dice: Dice::new(seed, 1),
        without,
        kept: Vec::new(),
        engines: Vec::new(),
        next: 1,
    };
    maker.engines = maker.engines();
    let strict = !without.has(Class::Loose) || maker.dice.percent(50);
    let after_errors = maker.dice.percent(50);
    let mut ops = Vec::new();
    for _ in 0..4 + maker.dice.below(12) {
        maker.push(&mut ops);
    }
    Program {
        seed,
        strict,
        after_errors,
        engines: maker.engines,
        ops,
    }
}

/// Makes a program op by op.
struct Maker<'a> {
    dice: Dice,
    without: &'a Without,
    engines: Vec<EngineSpec>,
    /// Forwards that may be alive: tag, engine.
    kept: Vec<(usize, usize)>,
    next: usize,
}

impl Maker<'_> {
    fn has(&self, class: Class) -> bool {
        self.without.has(class)
    }

    fn engines(&mut self) -> Vec<EngineSpec> {
        let count = if self.has(Class::Several) {
            self.dice.of(&[1, 1, 1, 2, 2, 3])
        } else {
            1
        };
        // Engines in a chain pass values on, so all have one type.
        let dtype = match self.has(Class::Narrow) {
            true => self
                .dice
                .of(&[DType::F32, DType::F32, DType::BF16, DType::F16]),
            false => DType::F32,
        };
        (0..count).map(|_| self.engine(dtype)).collect()
    }

    fn engine(&mut self, dtype: DType) -> EngineSpec {
        use ModelKind::{Embed, Frozen, Mlp, Running, Tied};
        let models: &[ModelKind] = match self.has(Class::Buffers) {
            true => &[Mlp, Mlp, Tied, Embed, Running, Frozen],
            false => &[Mlp, Mlp, Tied, Embed, Frozen],
        };
        let rules = [
            RuleKind::Adafactor,
            RuleKind::Adam,
            RuleKind::Adam,
            RuleKind::Muon,
            RuleKind::Momentum,
            RuleKind::Sgd,
            RuleKind::None,
        ];
        EngineSpec {
            model: self.dice.of(models),
            dtype,
            rule: self.dice.of(&rules),
            max_lag: match self.dice.percent(85) {
                true => Lag::One,
                false => Lag::Zero,
            },
            grad_f32: self.dice.percent(20),
            optim_bf16: self.dice.percent(40),
            seed: self.dice.below(1000) as u64,
            trap: self.dice.below(4),
        }
    }

    fn tag(&mut self) -> usize {
        self.next += 1;
        self.next - 1
    }

    fn push(&mut self, ops: &mut Vec<Op>) {
        let engine = self.dice.below(self.engines.len());
        if self.has(Class::Nonfinite) && self.dice.below(300) == 0 {
            return self.nonfinite_run(engine, ops);
        }
        let Some(what) = self.what(engine) else {
            return;
        };
        let tag = self.tag();
        if let What::Forward { kind, .. } = what
            && kind.keep
        {
            self.kept.push((tag, engine));
        }
        ops.push(Op { tag, engine, what });
        // Most gradients are for a step.
        if matches!(what, What::Train { .. } | What::Backward { .. }) && self.dice.percent(40) {
            let what = match self.has(Class::Races) && self.dice.percent(5) {
                true => self.race(engine),
                false => self.step(engine),
            };
            let tag = self.tag();
            ops.push(Op { tag, engine, what });
        }
    }

    fn what(&mut self, engine: usize) -> Option<What> {
        let roll = self.dice.below(100);
        Some(match roll {
            0..30 => self.train(engine),
            30..45 => self.forward(engine),
            45..55 => self.backward(engine)?,
            55..65 => self.chain(engine)?,
            65..75 => self.step(engine),
            75..79 => What::Synchronize,
            79..82 => What::Gradients,
            82..85 => What::Weights,
            85..88 => What::SetTraining(self.dice.percent(60)),
            88..91 => What::Read {
                of: self.some_kept(engine)?,
            },
            91..93 => What::Drop {
                of: self.some_kept(engine)?,
            },
            93..96 if self.has(Class::Writes) => What::Write {
                param: self.dice.below(16),
                data: self.dice.below(1000) as u64,
            },
            96 | 97 if self.has(Class::Rebuild) => What::Rebuild {
                holds: self.dice.percent(40),
            },
            98 if self.has(Class::Second) => What::Second,
            99 if self.has(Class::Races) => self.race(engine),
            _ => return None,
        })
    }

    fn batch(&mut self) -> Batch {
        let (rows, micro, data) = (
            1 + self.dice.below(7),
            1 + self.dice.below(4),
            self.dice.below(50) as u64,
        );
        Batch {
            rows,
            micro,
            data,
            odd: Odd::None,
        }
    }

    /// A fault for a call of `engine`, of the classes that are in.
    fn fault(&mut self, engine: usize, loss: Option<Loss>) -> Option<Fault> {
        if !self.dice.percent(22) {
            return None;
        }
        let (at, panics) = (self.dice.below(8), self.dice.percent(40));
        let mut faults = Vec::new();
        if self.has(Class::Layers) {
            faults.push(Fault::Forward { micro: at, panics });
            faults.push(Fault::Backward { micro: at, panics });
        }
        if self.has(Class::Losses) && loss.is_some() {
            faults.push(Fault::Loss { micro: at, panics });
        }
        if self.has(Class::Labels) && loss == Some(Loss::CrossEntropy) {
            faults.extend([Fault::Label { row: at }; 2]);
        }
        if self.has(Class::Labels) && self.engines[engine].model == ModelKind::Embed {
            faults.extend([Fault::Token { row: at }; 2]);
        }
        if faults.is_empty() {
            None
        } else {
            Some(self.dice.of(&faults))
        }
    }

    /// A loss, and perhaps something not finite in the batch.
    fn loss(&mut self, engine: usize, batch: &mut Batch) -> Loss {
        let loss = self.dice.of(&[Loss::CrossEntropy, Loss::Weighted]);
        if !self.has(Class::Nonfinite) || !self.dice.percent(10) {
            return loss;
        }
        let tokens = self.engines[engine].model == ModelKind::Embed;
        batch.odd = match tokens {
            true => self.dice.of(&[Odd::NanLabel, Odd::InfLabel]),
            false => self
                .dice
                .of(&[Odd::NanInput, Odd::InfInput, Odd::NanLabel, Odd::InfLabel]),
        };
        match batch.odd {
            Odd::NanLabel | Odd::InfLabel => Loss::Weighted,
            _ => loss,
        }
    }

    fn train(&mut self, engine: usize) -> What {
        let mut batch = self.batch();
        let loss = self.loss(engine, &mut batch);
        let fault = self.fault(engine, Some(loss));
        let (outputs, input_grads) = (self.dice.percent(20), self.dice.percent(15));
        What::Train {
            batch,
            loss,
            fault,
            outputs,
            input_grads,
        }
    }

    fn forward(&mut self, engine: usize) -> What {
        let batch = self.batch();
        let fault = self.fault(engine, None);
        let requires_grad = self.dice.percent(65);
        let kind = ForwardKind {
            requires_grad,
            merged: self.dice.percent(60),
            input_grads: requires_grad && self.dice.percent(20),
            keep: self.has(Class::Kept) && self.dice.percent(80),
        };
        What::Forward { batch, fault, kind }
    }

    fn some_kept(&mut self, engine: usize) -> Option<usize> {
        let of: Vec<usize> = self
            .kept
            .iter()
            .filter(|kept| kept.1 == engine)
            .map(|kept| kept.0)
            .collect();
        if of.is_empty() {
            None
        } else {
            Some(self.dice.of(&of))
        }
    }

    fn backward(&mut self, engine: usize) -> Option<What> {
        let of = self.some_kept(engine)?;
        self.kept.retain(|kept| kept.0 != of);
        let odd = match self.has(Class::Nonfinite) && self.dice.percent(5) {
            true => Odd::NanLabel,
            false => Odd::None,
        };
        Some(What::Backward { of, odd })
    }

    fn chain(&mut self, engine: usize) -> Option<What> {
        let others: Vec<usize> = (0..self.engines.len())
            .filter(|other| *other != engine && self.engines[*other].model != ModelKind::Embed)
            .collect();
        if others.is_empty() || !self.has(Class::Chains) {
            return None;
        }
        let back = self.dice.of(&others);
        let mut batch = self.batch();
        let loss = self.loss(engine, &mut batch);
        let fault = match self.dice.of(&[Side::Front, Side::Back]) {
            Side::Front => self.fault(engine, None).map(|fault| (Side::Front, fault)),
            Side::Back => self
                .fault(back, Some(loss))
                .map(|fault| (Side::Back, fault)),
        };
        Some(What::Chain {
            back,
            batch,
            loss,
            fault,
            pause: self.dice.percent(20),
        })
    }

    fn step(&mut self, engine: usize) -> What {
        let lag = match self.has(Class::LagOne) && self.dice.percent(55) {
            true => Lag::One,
            false => Lag::Zero,
        };
        let wait = self.dice.percent(30);
        if self.engines[engine].rule == RuleKind::None || self.dice.percent(25) {
            return What::Step {
                lag,
                function: self.function(),
                wait,
            };
        }
        What::Update {
            lag,
            update: self.update(),
            wait,
        }
    }

    fn race(&mut self, engine: usize) -> What {
        let lag = match self.engines[engine].max_lag == Lag::One && self.has(Class::LagOne) {
            true => Lag::One,
            false => Lag::Zero,
        };
        let update = UpdateSpec {
            lr: 0.05,
            clip: None,
            grad_scale: 1.0,
            refused: false,
        };
        What::Race {
            param: self.dice.below(16),
            data: self.dice.below(1000) as u64,
            lag,
            update,
        }
    }

    fn function(&mut self) -> Function {
        if !self.has(Class::Steps) || self.dice.percent(50) {
            return self.dice.of(&[Function::Descend, Function::Shrink]);
        }
        match self.has(Class::Nonfinite) && self.dice.percent(20) {
            true => Function::WriteNan,
            false => Function::Fail {
                panics: self.dice.percent(40),
                half: self.dice.percent(50),
            },
        }
    }

    fn update(&mut self) -> UpdateSpec {
        let mut update = UpdateSpec {
            lr: self.dice.of(&[0.0, 0.01, 0.05, 0.1]),
            clip: self.dice.of(&[None, None, Some(0.5), Some(10.0)]),
            grad_scale: self.dice.of(&[1.0, 1.0, 0.5]),
            refused: false,
        };
        if self.has(Class::Options) && self.dice.percent(6) {
            update.refused = true;
            match self.dice.below(3) {
                0 => update.lr = self.dice.of(&[-0.1, f64::NAN, f64::INFINITY]),
                1 => update.clip = Some(self.dice.of(&[-1.0, 0.0, f64::NAN])),
                _ => update.grad_scale = self.dice.of(&[-1.0, 0.0, f64::NAN, f64::INFINITY]),
            }
        }
        update
    }

    /// Enough steps in a row without a finite gradient that the last are refused.
    fn nonfinite_run(&mut self, engine: usize, ops: &mut Vec<Op>) {
        for _ in 0..12 {
            let batch = Batch {
                odd: Odd::NanLabel,
                ..self.batch()
            };
            let (outputs, input_grads) = (false, false);
            let train = What::Train {
                batch,
                loss: Loss::Weighted,
                fault: None,
                outputs,
                input_grads,
            };
            let step = self.step(engine);
            for what in [train, step, What::Synchronize] {
                let tag = self.tag();
                ops.push(Op { tag, engine, what });
            }
        }
    }
}
