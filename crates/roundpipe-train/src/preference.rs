//! What preference tuning computes: the losses of DPO and ORPO over pairs of answers.
//!
//! The model gives, for each answer, the sum of its tokens' log-probabilities. Of a pair's two sums
//! and the two of the reference (the model as it was before the first step), with β:
//!
//! ```text
//! dpo, sigmoid   z = β · ((chosen − rejected) − (reference chosen − reference rejected))
//!                (1 − s) · softplus(−z) + s · softplus(z)                     s: label smoothing
//! dpo, ipo       (z − 1/2β)², where z has means per token and no β
//! orpo           λ · softplus(−(odds(chosen) − odds(rejected))) − chosen / (all chosen tokens)
//!                odds(x) = x − ln(1 − e^x) of means per token
//! ```
//! These are TRL's formulas, except that ORPO's second part is over the answer alone, as all learning
//! here is, and not over the prompt too. They are computed twice: on the workers, for gradients, and
//! here in f64, for what a person sees and for validation.
//!
//! # Invariants
//! - Both sides of a pair are in one microbatch. The loss of a step is one mean over its pairs (and,
//!   for ORPO's second part, its tokens), so neither the number of microbatches nor which pairs share
//!   one changes more than rounding.

use std::ops::Range;
use std::sync::Arc;

use roundpipe::{
    Cx, HostInputs, HostTensor, Inputs, LossReduction, MergeOutput, RunConfig, SplitInput,
    SplitLabel, Tensor, TensorResult, Tree,
};
use roundpipe_data::TrainBatch;

use crate::batches::sizes;
use crate::error::{Error, Result};
use crate::folder::REFERENCE;
use crate::settings::{DpoLossName, Objective, Settings};

/// The largest probability of a token, in the mean, whose odds are computed.
const MOST_PROBABLE: f64 = 1.0 - 1e-6;

/// The loss of a pair.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum PairLoss {
    Sigmoid { beta: f64, smoothing: f64 },
    Ipo { beta: f64 },
    Orpo { lambda: f64 },
}

impl PairLoss {
    /// The loss that settings ask for; nothing where tokens are learned.
    pub fn of(settings: &Settings) -> Option<Self> {
        let beta = settings.dpo_beta;
        match (settings.objective, settings.dpo_loss) {
            (Objective::Sft, _) => None,
            (Objective::Dpo, DpoLossName::Sigmoid) => Some(Self::Sigmoid {
                beta,
                smoothing: settings.dpo_label_smoothing,
            }),
            (Objective::Dpo, DpoLossName::Ipo) => Some(Self::Ipo { beta }),
            (Objective::Orpo, _) => Some(Self::Orpo {
                lambda: settings.orpo_lambda,
            }),
        }
    }

    /// Whether it compares with the model as it was before training.
    pub fn needs_reference(self) -> bool {
        !matches!(self, Self::Orpo { .. })
    }
}

/// What is known of a pair beside what the model says: of each side the reference's sum, and how
/// many tokens are learned.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Known {
    pub reference: [f32; 2],
    pub tokens: [u64; 2],
}

/// A batch of pairs.
#[derive(Debug)]
pub(crate) struct Pairs {
    pub batch: Arc<TrainBatch>,
    pub known: Vec<Known>,
}

impl Pairs {
    fn chosen_tokens(&self) -> u64 {
        self.known.iter().map(|known| known.tokens[0]).sum()
    }
}

/// What the model said of every row before training: the sums of both sides, NaN where nothing is
/// learned.
#[derive(Debug, Default)]
pub(crate) struct Reference {
    /// Of the files that train, by [`Order::key`](roundpipe_data::Order::key).
    pub train: Vec<[f32; 2]>,
    /// Of a file that validates.
    pub validation: Option<Vec<[f32; 2]>>,
}

/// Which rows are meant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    Train,
    Validation,
}

impl Reference {
    /// A batch with what is known of its pairs.
    pub fn pairs(&self, batch: Arc<TrainBatch>, side: Side) -> Result<Pairs> {
        let table = match (side, &self.validation) {
            (Side::Validation, Some(validation)) => validation,
            _ => &self.train,
        };
        let tokens = batch.pair_labels(0..batch.rows)?;
        let known = batch.keys.iter().zip(tokens).map(|(key, tokens)| {
            let reference = table.get(*key as usize).copied();
            let reference = reference.filter(|sums| sums.iter().all(|sum| !sum.is_nan()));
            let reference = reference.ok_or_else(|| {
                Error::Failed(format!(
                    "{REFERENCE}: has nothing on pair {key}; remove the file, and it is computed again"
                ))
            })?;
            Ok(Known { reference, tokens })
        });
        let known = known.collect::<Result<Vec<_>>>()?;
        Ok(Pairs { batch, known })
    }
}

/// A batch of pairs where nothing is compared with.
pub(crate) fn without(batch: Arc<TrainBatch>) -> Result<Pairs> {
    let tokens = batch.pair_labels(0..batch.rows)?;
    let known = tokens.into_iter().map(|tokens| Known {
        reference: [0.0; 2],
        tokens,
    });
    Ok(Pairs {
        known: known.collect(),
        batch,
    })
}

/// A training call: what goes in, how it is split, and what the loss compares with.
pub(crate) struct PairCall {
    pub inputs: Inputs,
    pub labels: Tree<HostTensor>,
    pub config: RunConfig,
}

/// The call over some pairs, in at most `microbatches` parts. Its output is [pairs, 2]: the sums of
/// both sides.
pub(crate) fn call(pairs: &Arc<Pairs>, microbatches: usize) -> Result<PairCall> {
    let rows = pairs.batch.rows;
    let count = microbatches.min(rows);
    // One microbatch gets these as they are.
    let whole = inputs(&pairs.batch, 0..rows)?;
    let named = whole.named.into_iter();
    let whole = named.fold(Inputs::new(), |inputs, (name, value)| {
        inputs.named(name, value)
    });
    let (of_inputs, of_labels) = (pairs.clone(), pairs.clone());
    let config = RunConfig::new()
        .num_microbatch(count)
        .loss_reduction(LossReduction::Sum)
        .split_input(SplitInput::function(move |_, count| {
            let parts = sizes(rows, count).into_iter();
            parts.map(|part| inputs(&of_inputs.batch, part)).collect()
        }))
        .split_label(SplitLabel::function(move |_, count| {
            let parts = sizes(rows, count).into_iter();
            parts.map(|part| labels(&of_labels.known[part])).collect()
        }))
        .merge_output(MergeOutput::function(move |parts| {
            merge(parts, &sizes(rows, count))
        }));
    Ok(PairCall {
        inputs: whole,
        labels: labels(&pairs.known)?,
        config,
    })
}

/// What the model takes for some pairs.
fn inputs(batch: &TrainBatch, rows: Range<usize>) -> roundpipe::Result<HostInputs> {
    let refused = |e: roundpipe_data::Error| roundpipe::Error::config("batch", e.to_string());
    let microbatch = batch.microbatch(rows).map_err(refused)?;
    let inputs = HostInputs::new()
        .named("ids", microbatch.ids)
        .named("labels", microbatch.labels)
        .named("positions", microbatch.positions);
    let more = [
        ("lens", microbatch.lens),
        ("documents", microbatch.documents),
    ];
    Ok(more
        .into_iter()
        .fold(inputs, |inputs, (name, value)| match value {
            Some(value) => inputs.named(name, value),
            None => inputs,
        }))
}

/// What the loss takes for some pairs: `reference` and `tokens`, [n, 2] (f32).
fn labels(known: &[Known]) -> roundpipe::Result<Tree<HostTensor>> {
    let dims = [known.len(), 2];
    let reference: Vec<f32> = known.iter().flat_map(|known| known.reference).collect();
    let tokens = known.iter().flat_map(|known| known.tokens);
    let tokens: Vec<f32> = tokens.map(|tokens| tokens as f32).collect();
    let reference = HostTensor::from_slice(&reference, &dims)?;
    let tokens = HostTensor::from_slice(&tokens, &dims)?;
    Ok(Tree::map([
        ("reference", reference.into()),
        ("tokens", tokens.into()),
    ]))
}

/// The sums of all pairs, [pairs, 2], from those of the microbatches; sums behind them are of padding.
fn merge(
    parts: Vec<Tree<HostTensor>>,
    sizes: &[Range<usize>],
) -> roundpipe::Result<Tree<HostTensor>> {
    let mut sums: Vec<f32> = Vec::new();
    for (part, rows) in parts.into_iter().zip(sizes) {
        let Tree::Map(mut part) = part else {
            return Err(no_sums());
        };
        let found = part.remove("log_probs").ok_or_else(no_sums)?;
        let found = found.tensor()?.to_vec::<f32>()?;
        let wanted = found.get(..2 * rows.len()).ok_or_else(no_sums)?;
        sums.extend(wanted);
    }
    Ok(HostTensor::from_slice(&sums, &[sums.len() / 2, 2])?.into())
}

fn no_sums() -> roundpipe::Error {
    roundpipe::Error::config("model", "gave no log-probabilities of the pairs")
}

/// The sums of a merged output, pair by pair.
pub(crate) fn sums(output: &Tree<HostTensor>) -> Result<Vec<[f32; 2]>> {
    let values = output.clone().tensor()?.to_vec::<f32>()?;
    Ok(values
        .chunks_exact(2)
        .map(|pair| [pair[0], pair[1]])
        .collect())
}

/// The loss of a microbatch, as its part of the loss of `pairs`: what [`call`] is run with.
pub(crate) fn loss(
    kind: PairLoss,
    pairs: &Pairs,
) -> impl Fn(&mut Cx, Tree, Tree) -> TensorResult<Tensor> + Send + Sync + Clone + 'static {
    let chosen_tokens = pairs.chosen_tokens().max(1);
    loss_of(kind, pairs.batch.rows as f64, chosen_tokens as f64)
}

/// The same by the numbers of all pairs and of all chosen tokens.
fn loss_of(
    kind: PairLoss,
    all: f64,
    chosen_tokens: f64,
) -> impl Fn(&mut Cx, Tree, Tree) -> TensorResult<Tensor> + Send + Sync + Clone + 'static {
    move |cx, mut outputs, mut labels| {
        let reference = labels.take("reference")?.tensor()?;
        let tokens = labels.take("tokens")?.tensor()?;
        let here = reference.dims()[0];
        let sums = outputs.take("log_probs")?.tensor()?;
        let sums = cx.narrow(&sums, 0, 0, 2 * here)?;
        let sums = cx.reshape(&sums, &[here as isize, 2])?;
        let losses = match kind {
            PairLoss::Sigmoid { beta, smoothing } => {
                let z = difference(cx, &sums, &reference)?;
                sigmoid(cx, &z, beta, smoothing)?
            }
            PairLoss::Ipo { beta } => {
                let sums = cx.div(&sums, &tokens)?;
                let reference = cx.div(&reference, &tokens)?;
                let z = difference(cx, &sums, &reference)?;
                let far = cx.add_scalar(&z, -0.5 / beta)?;
                cx.square(&far)?
            }
            PairLoss::Orpo { lambda } => orpo(cx, &sums, &tokens, lambda)?,
        };
        let total = cx.sum_all(&losses)?;
        let mut total = cx.mul_scalar(&total, 1.0 / all)?;
        if matches!(kind, PairLoss::Orpo { .. }) {
            let chosen = cx.select(&sums, 1, 0)?;
            let chosen = cx.sum_all(&chosen)?;
            let learned = cx.mul_scalar(&chosen, -1.0 / chosen_tokens)?;
            total = cx.add(&total, &learned)?;
        }
        if let Ok(balance) = outputs.take("balance") {
            let balance = cx.mul_scalar(&balance.tensor()?, here as f64 / all)?;
            total = cx.add(&total, &balance)?;
        }
        Ok(total)
    }
}

/// (chosen − rejected) of the model less that of the reference, [n].
fn difference(cx: &mut Cx, sums: &Tensor, reference: &Tensor) -> TensorResult<Tensor> {
    let ratios = cx.sub(sums, reference)?;
    let chosen = cx.select(&ratios, 1, 0)?;
    let rejected = cx.select(&ratios, 1, 1)?;
    cx.sub(&chosen, &rejected)
}

fn sigmoid(cx: &mut Cx, z: &Tensor, beta: f64, smoothing: f64) -> TensorResult<Tensor> {
    let against = cx.mul_scalar(z, -beta)?;
    let against = cx.softplus(&against)?;
    if smoothing == 0.0 {
        return Ok(against);
    }
    let against = cx.mul_scalar(&against, 1.0 - smoothing)?;
    let in_favour = cx.mul_scalar(z, beta)?;
    let in_favour = cx.softplus(&in_favour)?;
    let in_favour = cx.mul_scalar(&in_favour, smoothing)?;
    cx.add(&against, &in_favour)
}

fn orpo(cx: &mut Cx, sums: &Tensor, tokens: &Tensor, lambda: f64) -> TensorResult<Tensor> {
    let means = cx.div(sums, tokens)?;
    let probability = cx.exp(&means)?;
    let probability = cx.clamp(&probability, 0.0, MOST_PROBABLE)?;
    let other = cx.affine(&probability, -1.0, 1.0)?;
    let other = cx.log(&other)?;
    let odds = cx.sub(&means, &other)?;
    let chosen = cx.select(&odds, 1, 0)?;
    let rejected = cx.select(&odds, 1, 1)?;
    let against = cx.sub(&rejected, &chosen)?;
    let against = cx.softplus(&against)?;
    cx.mul_scalar(&against, lambda)
}

/// Losses, rewards and how often the chosen answer has the larger one, added up over pairs.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Figures {
    pairs: u64,
    loss: f64,
    margin: f64,
    right: u64,
    chosen: f64,
    chosen_tokens: u64,
}

impl Figures {
    /// Adds pairs, whose sums the model gave.
    pub fn add(&mut self, kind: PairLoss, sums: &[[f32; 2]], known: &[Known]) {
        for (sums, known) in sums.iter().zip(known) {
            let sums = sums.map(f64::from);
            let reference = known.reference.map(f64::from);
            let tokens = known.tokens.map(|tokens| tokens.max(1) as f64);
            let means = [sums[0] / tokens[0], sums[1] / tokens[1]];
            let (loss, margin) = match kind {
                PairLoss::Sigmoid { beta, smoothing } => {
                    let z = beta * ((sums[0] - reference[0]) - (sums[1] - reference[1]));
                    let loss = (1.0 - smoothing) * softplus(-z) + smoothing * softplus(z);
                    (loss, z)
                }
                PairLoss::Ipo { beta } => {
                    let reference = [reference[0] / tokens[0], reference[1] / tokens[1]];
                    let z = (means[0] - reference[0]) - (means[1] - reference[1]);
                    ((z - 0.5 / beta).powi(2), beta * z)
                }
                PairLoss::Orpo { lambda } => {
                    let odds = |mean: f64| mean - (1.0 - mean.exp().min(MOST_PROBABLE)).ln();
                    let z = odds(means[0]) - odds(means[1]);
                    (lambda * softplus(-z), lambda * (means[0] - means[1]))
                }
            };
            self.pairs += 1;
            self.loss += loss;
            self.margin += margin;
            self.right += u64::from(margin > 0.0);
            if matches!(kind, PairLoss::Orpo { .. }) {
                self.chosen -= sums[0];
                self.chosen_tokens += known.tokens[0];
            }
        }
    }

    /// The loss over all pairs.
    pub fn loss(&self) -> f64 {
        self.loss / self.pairs.max(1) as f64 + self.chosen / self.chosen_tokens.max(1) as f64
    }

    /// By how much the reward of the chosen answer is larger, in the mean.
    pub fn margin(&self) -> f64 {
        self.margin / self.pairs.max(1) as f64
    }

    /// The share of pairs whose chosen answer has the larger reward.
    pub fn accuracy(&self) -> f64 {
        self.right as f64 / self.pairs.max(1) as f64
    }
}

fn softplus(x: f64) -> f64 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

#[cfg(test)]
mod tests {
    use super::*;
    use roundpipe::{Bytes, Cpu, Worker};

    const KINDS: [PairLoss; 4] = [
        PairLoss::Sigmoid {
            beta: 0.3,
            smoothing: 0.0,
        },
        PairLoss::Sigmoid {
            beta: 0.1,
            smoothing: 0.2,
        },
        PairLoss::Ipo { beta: 0.4 },
        PairLoss::Orpo { lambda: 0.7 },
    ];

    fn known() -> Vec<Known> {
        let known = |reference, tokens| Known { reference, tokens };
        vec![
            known([-10.0, -12.5], [5, 7]),
            known([-3.25, -3.0], [2, 2]),
            known([-80.0, -40.0], [31, 20]),
        ]
    }

    const SUMS: [[f32; 2]; 3] = [[-9.0, -13.0], [-4.0, -2.0], [-70.0, -44.0]];

    /// The loss on a worker, in parts of a batch of three pairs.
    fn on_worker(kind: PairLoss, count: usize) -> f64 {
        let worker = Worker::new(Cpu::new(None).unwrap(), Bytes::mib(16)).unwrap();
        let known = known();
        let chosen_tokens: u64 = known.iter().map(|known| known.tokens[0]).sum();
        let loss = loss_of(kind, 3.0, chosen_tokens as f64);
        let mut total = 0.0;
        for part in sizes(3, count) {
            let mut cx = Cx::train(&worker);
            let mut sums: Vec<f32> = SUMS[part.clone()].concat();
            // A sum of padding.
            sums.push(7.0);
            let log_probs = cx.tensor(&sums, &[sums.len()]).unwrap();
            let rows = &known[part.clone()];
            let reference: Vec<f32> = rows.iter().flat_map(|known| known.reference).collect();
            let tokens = rows.iter().flat_map(|known| known.tokens);
            let tokens: Vec<f32> = tokens.map(|tokens| tokens as f32).collect();
            let labels = Tree::map([
                (
                    "reference",
                    cx.tensor(&reference, &[rows.len(), 2]).unwrap().into(),
                ),
                (
                    "tokens",
                    cx.tensor(&tokens, &[rows.len(), 2]).unwrap().into(),
                ),
            ]);
            let outputs = Tree::map([("log_probs", log_probs.into())]);
            let found = loss(&mut cx, outputs, labels).unwrap();
            total += f64::from(found.to_vec::<f32>().unwrap()[0]);
        }
        total
    }

    /// What the workers compute is what is shown, however the pairs are split.
    #[test]
    fn the_two_computations_agree() {
        for kind in KINDS {
            let mut figures = Figures::default();
            figures.add(kind, &SUMS, &known());
            let whole = on_worker(kind, 1);
            let parts = on_worker(kind, 2);
            for found in [whole, parts] {
                assert!((found - figures.loss()).abs() < 1e-5, "{kind:?}: {found}");
            }
        }
    }

    /// Numbers worked out by hand.
    #[test]
    fn the_formulas_are_those_of_the_papers() {
        let mut one = Figures::default();
        let kind = PairLoss::Sigmoid {
            beta: 0.1,
            smoothing: 0.0,
        };
        // The model is the reference: ln 2, no margin, and a tie is not right.
        one.add(
            kind,
            &[[-5.0, -6.0]],
            &[Known {
                reference: [-5.0, -6.0],
                tokens: [3, 3],
            }],
        );
        assert!((one.loss() - std::f64::consts::LN_2).abs() < 1e-12);
        assert_eq!((one.margin(), one.accuracy()), (0.0, 0.0));
        let mut three = Figures::default();
        three.add(kind, &SUMS, &known());
        // z: 0.1 · (1 − (−0.5)), 0.1 · (−0.75 − 1), 0.1 · (10 − (−4)).
        let z = [0.15, -0.175, 1.4];
        assert!((three.margin() - z.iter().sum::<f64>() / 3.0).abs() < 1e-6);
        assert!((three.accuracy() - 2.0 / 3.0).abs() < 1e-12);
        let mut orpo = Figures::default();
        let kind = PairLoss::Orpo { lambda: 1.0 };
        // Probabilities of 1/2 and 1/3: the odds are 1 and 1/2.
        let sums = [[2.0 * 0.5f32.ln(), 3.0 * (1.0f32 / 3.0).ln()]];
        let known = [Known {
            reference: [f32::NAN; 2],
            tokens: [2, 3],
        }];
        orpo.add(kind, &sums, &known);
        let want = (1.0f64 + 0.5).ln() + std::f64::consts::LN_2;
        assert!((orpo.loss() - want).abs() < 1e-6, "{}", orpo.loss());
        assert!((softplus(800.0) - 800.0).abs() < 1e-9 && softplus(-800.0) == 0.0);
    }
}
