//! The first and the last layer: tokens to vectors, vectors to logits or a loss.

use roundpipe::nn::RmsNorm;
use roundpipe::ops::{CrossEntropy, Reduction};
use roundpipe::{
    Cx, DType, HostTensor, Layer, Module, Param, ParamVisitor, Params, Tensor, TensorResult, Tree,
};

use super::{Flow, Maker, fields, get, inputs, optional, padding, take};
use crate::config::ModelConfig;

/// Logits that a chunk of scores has at most.
const SCORED_LOGITS: usize = 1 << 24;

/// Token embedding.
#[derive(Debug, Clone)]
pub(crate) struct Embed {
    /// [vocab, H].
    pub(crate) weight: Param,
    /// NEFTune's alpha: the size of the noise that training adds; 0 is off.
    pub(crate) noise: f64,
}

impl Params for Embed {
    fn visit(&self, visit: &mut ParamVisitor<'_>) {
        visit.param("weight", &self.weight);
    }
}

impl Layer for Embed {
    fn run(&self, cx: &mut Cx, input: Tree) -> TensorResult<Tree> {
        let mut flow = inputs::read(cx, fields(input)?)?;
        let ids = take(&mut flow, "ids")?;
        let weight = cx.get(&self.weight)?;
        let mut hidden = cx.embedding(&weight, &ids)?;
        if self.noise > 0.0 && cx.is_training() {
            hidden = self.noisy(cx, &hidden, &flow)?;
        }
        flow.insert("hidden".into(), hidden.into());
        Ok(Tree::Map(flow))
    }

    fn rows_read(&self, input: &Tree<HostTensor>) -> Option<HostTensor> {
        let Tree::Map(fields) = input else {
            return None;
        };
        // A padded batch is packed before its tokens are looked up.
        if fields.contains_key("attention_mask") {
            return None;
        }
        match fields.get("ids").or_else(|| fields.get("input_ids")) {
            Some(Tree::Tensor(ids)) => Some(ids.clone()),
            _ => None,
        }
    }
}

impl Embed {
    /// Uniform noise of at most alpha / sqrt(L · H), where L is the length of a sequence, or the mean
    /// length of those in a packed row.
    fn noisy(&self, cx: &mut Cx, hidden: &Tensor, flow: &Flow) -> TensorResult<Tensor> {
        let dims = hidden.dims().to_vec();
        let noise = cx.uniform(hidden.dtype(), &dims, -1.0, 1.0)?;
        let Some(lens) = optional(flow, "lens")? else {
            let elements: usize = dims[1..].iter().product();
            let noise = cx.mul_scalar(&noise, self.noise / (elements as f64).sqrt())?;
            return cx.add(hidden, &noise);
        };
        // Sequences at the end of `lens` may be empty.
        let ends = cx.cast(&lens, DType::F32)?;
        let count = ends.numel() - 1;
        let last = cx.narrow(&ends, 0, 1, count)?;
        let first = cx.narrow(&ends, 0, 0, count)?;
        let lengths = cx.sub(&last, &first)?;
        let is_real = cx.ne_scalar(&lengths, 0.0)?;
        let is_real = cx.cast(&is_real, DType::F32)?;
        let sequences = cx.sum_all(&is_real)?;
        let scale = cx.sqrt(&sequences)?;
        let scale = cx.mul_scalar(&scale, self.noise / (hidden.numel() as f64).sqrt())?;
        let scale = cx.cast(&scale, hidden.dtype())?;
        let noise = cx.mul(&noise, &scale)?;
        cx.add(hidden, &noise)
    }
}

/// Last norm and the projection to tokens, with the loss where labels are given.
#[derive(Debug, Clone)]
pub(crate) struct Head {
    pub(crate) norm: RmsNorm,
    /// [vocab, H].
    pub(crate) weight: Param,
    /// Share of the target that is spread over all tokens, in training.
    pub(crate) smoothing: f64,
    /// Share of the load-balancing loss.
    aux_coef: f64,
    /// Blocks with experts.
    sparse: usize,
}

impl Head {
    pub(crate) fn new(config: &ModelConfig, make: &mut Maker, weight: Param) -> TensorResult<Self> {
        let moe = config.moe.as_ref();
        Ok(Self {
            norm: RmsNorm {
                weight: make.full(&[config.hidden], 1.0)?,
                eps: config.eps,
            },
            weight,
            smoothing: 0.0,
            aux_coef: moe.map_or(0.0, |moe| moe.aux_coef),
            sparse: moe.map_or(0, |moe| moe.sparse.iter().filter(|sparse| **sparse).count()),
        })
    }

    fn loss(&self, cx: &mut Cx, x: &Tensor, mut flow: Flow) -> TensorResult<Tensor> {
        let labels = take(&mut flow, "labels")?;
        let weight = cx.get(&self.weight)?;
        let options = CrossEntropy {
            label_smoothing: if cx.is_training() {
                self.smoothing
            } else {
                0.0
            },
            ..CrossEntropy::default()
        };
        // A mean times its number of labels is the sum, and the balance counts by the same share.
        let share = match optional(&flow, "weight")? {
            Some(divisor) => Some(share_of(cx, &labels, &divisor)?),
            None => None,
        };
        let mut loss = match cx.output_gradient() {
            Some(gradient) => {
                let mut gradient = cx.full(DType::F32, &[], gradient)?;
                if let Some(share) = &share {
                    gradient = cx.mul(&gradient, share)?;
                }
                cx.linear_cross_entropy_at_once(x, &weight, &labels, options, &gradient)?
            }
            None => cx.linear_cross_entropy(x, &weight, &labels, options)?,
        };
        // Outside training the balance is there only to be shown.
        if cx.is_training() && flow.contains_key("aux.shares") {
            let aux = self.balance(cx, &flow, labels.numel(), self.aux_coef)?;
            loss = cx.add(&loss, &aux)?;
        }
        match share {
            Some(share) => cx.mul(&loss, &share),
            None => Ok(loss),
        }
    }

    /// For each packed document the sum of its labels' log-probabilities [n] (f32). In training the
    /// balance of experts comes beside it, times its coefficient.
    fn log_probs(&self, cx: &mut Cx, x: &Tensor, mut flow: Flow) -> TensorResult<Tree> {
        let labels = take(&mut flow, "labels")?;
        let documents = take(&mut flow, "documents")?;
        let count = get(&flow, "lens")?.numel().saturating_sub(1);
        let weight = cx.get(&self.weight)?;
        let options = CrossEntropy {
            reduction: Reduction::None,
            ..CrossEntropy::default()
        };
        let losses = cx.linear_cross_entropy(x, &weight, &labels, options)?;
        let losses = cx.reshape(&losses, &[-1])?;
        let documents = cx.reshape(&documents, &[-1])?;
        let zeros = cx.zeros(losses.dtype(), &[count])?;
        let sums = cx.index_add(&zeros, 0, &documents, &losses)?;
        let mut outputs = vec![("log_probs", cx.neg(&sums)?.into())];
        if cx.is_training() && flow.contains_key("aux.shares") {
            let balance = self.balance(cx, &flow, labels.numel(), self.aux_coef)?;
            outputs.push(("balance", balance.into()));
        }
        Ok(Tree::map(outputs))
    }

    /// Loss, logits and, of models with experts that are balanced, the balance without its
    /// coefficient: what transformers gives.
    fn outputs(&self, cx: &mut Cx, x: &Tensor, flow: Flow) -> TensorResult<Tree> {
        let mut outputs = vec![("logits", self.logits(cx, x, &flow)?.into())];
        if flow.contains_key("aux.shares") {
            let tokens = get(&flow, "labels")?.numel();
            let aux = self.balance(cx, &flow, tokens, 1.0)?;
            outputs.push(("aux_loss", aux.into()));
        }
        outputs.push(("loss", self.loss(cx, x, flow)?.into()));
        Ok(Tree::map(outputs))
    }

    /// For every token its loss and whether its label is the likeliest token. Logits are there a
    /// chunk at a time.
    fn scores(&self, cx: &mut Cx, x: &Tensor, flow: &Flow) -> TensorResult<Tree> {
        let labels = get(flow, "labels")?;
        let weight = cx.get(&self.weight)?;
        let options = CrossEntropy {
            reduction: Reduction::None,
            ..CrossEntropy::default()
        };
        let losses = cx.linear_cross_entropy(x, &weight, &labels, options)?;
        let (tokens, vocab) = (labels.numel(), weight.dims()[0]);
        let rows = cx.reshape(x, &[tokens as isize, -1])?;
        let chunk = (SCORED_LOGITS / vocab).max(1);
        let mut best = Vec::new();
        for start in (0..tokens).step_by(chunk) {
            let part = cx.narrow(&rows, 0, start, chunk.min(tokens - start))?;
            let logits = cx.linear(&part, &weight, None)?;
            best.push(cx.argmax(&logits, -1, false)?);
        }
        let best = cx.cat(&best.iter().collect::<Vec<_>>(), 0)?;
        let dims: Vec<isize> = labels.dims().iter().map(|dim| *dim as isize).collect();
        let best = cx.reshape(&best, &dims)?;
        let labels = cx.cast(&labels, DType::I64)?;
        let hits = cx.eq(&best, &labels)?;
        Ok(Tree::map([
            ("losses", losses.into()),
            ("hits", hits.into()),
        ]))
    }

    /// `coef` · experts · Σ (choices per token) · (mean probability) over all blocks at once, as
    /// transformers has it. Padding does not count.
    fn balance(&self, cx: &mut Cx, flow: &Flow, tokens: usize, coef: f64) -> TensorResult<Tensor> {
        let (counts, shares) = (get(flow, "aux.counts")?, get(flow, "aux.shares")?);
        let product = cx.mul(&counts, &shares)?;
        let sum = cx.sum_all(&product)?;
        let experts = counts.numel() as f64;
        let Some(real) = optional(flow, padding::REAL)? else {
            let rows = (self.sparse * tokens) as f64;
            return cx.affine(&sum, coef * experts / (rows * rows), 0.0);
        };
        let rows = cx.sum_all(&real)?;
        let rows = cx.mul_scalar(&rows, self.sparse as f64)?;
        let sum = cx.mul_scalar(&sum, coef * experts)?;
        let sum = cx.div(&sum, &rows)?;
        cx.div(&sum, &rows)
    }

    /// Logits, of the last `keep` positions where asked.
    fn logits(&self, cx: &mut Cx, x: &Tensor, flow: &Flow) -> TensorResult<Tensor> {
        let weight = cx.get(&self.weight)?;
        let x = padding::last_positions(cx, x, flow, keep(flow))?;
        cx.linear(&x, &weight, None)
    }

    /// Logits of a step of decoding on a device with kernels for such.
    fn few_logits(&self, cx: &mut Cx, hidden: &Tensor) -> TensorResult<Option<Tensor>> {
        let width = hidden.dims().last().copied().unwrap_or(0);
        let rows = hidden.numel() / width.max(1);
        let whole = (width * hidden.dtype().size()).is_multiple_of(16);
        if rows == 0 || rows > cx.few_rows() || !whole {
            return Ok(None);
        }
        let (norm, weight) = (cx.get(&self.norm.weight)?, cx.get(&self.weight)?);
        let norm = Some((&norm, self.norm.eps));
        Ok(cx.few_linears(hidden, norm, &[(&weight, None)])?.pop())
    }
}

/// The labels that count, divided by a number that the caller gave.
fn share_of(cx: &mut Cx, labels: &Tensor, divisor: &Tensor) -> TensorResult<Tensor> {
    let labelled = cx.ne_scalar(labels, CrossEntropy::default().ignore_index as f64)?;
    let labelled = cx.cast(&labelled, DType::F32)?;
    let count = cx.sum_all(&labelled)?;
    let divisor = cx.cast(divisor, DType::F32)?;
    let divisor = cx.reshape(&divisor, &[])?;
    cx.div(&count, &divisor)
}

impl Params for Head {
    fn visit(&self, visit: &mut ParamVisitor<'_>) {
        visit.child("norm", &self.norm);
        visit.param("weight", &self.weight);
    }
}

impl Layer for Head {
    fn run(&self, cx: &mut Cx, input: Tree) -> TensorResult<Tree> {
        let mut flow = fields(input)?;
        let mut hidden = take(&mut flow, "hidden")?;
        if flow.contains_key("cache.at") || flow.contains_key("cache") {
            hidden = padding::last_positions(cx, &hidden, &flow, keep(&flow))?;
            if let Some(logits) = self.few_logits(cx, &hidden)? {
                return Ok(with_past(logits, flow));
            }
        }
        let normed = self.norm.forward(cx, &hidden)?;
        drop(hidden);
        if flow.contains_key("documents") {
            return self.log_probs(cx, &normed, flow);
        }
        if flow.contains_key("labels") {
            if inputs::wants_scores(&flow) {
                return self.scores(cx, &normed, &flow);
            }
            if inputs::wants_logits(&flow) {
                return self.outputs(cx, &normed, flow);
            }
            return Ok(self.loss(cx, &normed, flow)?.into());
        }
        let logits = self.logits(cx, &normed, &flow)?;
        Ok(with_past(logits, flow))
    }
}

/// Logits, beside the keys and values that blocks saw where those are kept.
fn with_past(logits: Tensor, mut flow: Flow) -> Tree {
    flow.retain(|name, _| name.starts_with("past."));
    if flow.is_empty() {
        return logits.into();
    }
    flow.insert("logits".into(), logits.into());
    Tree::Map(flow)
}

/// How many of the last positions are asked for.
fn keep(flow: &Flow) -> Option<usize> {
    match flow.get("keep") {
        Some(Tree::Int(keep)) => Some(usize::try_from(*keep).unwrap_or(1)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An embedding reads the rows of its tokens, under either name; a padded batch is packed first.
    #[test]
    fn an_embedding_says_which_rows_it_reads() {
        let embed = Embed {
            weight: Param::zeros(DType::BF16, &[4, 16]).unwrap(),
            noise: 0.0,
        };
        let ids = HostTensor::from_slice(&[3i64, 1], &[1, 2]).unwrap();
        let input = |names: &[&str]| {
            let fields = names.iter().map(|name| (*name, Tree::Tensor(ids.clone())));
            Tree::map(fields)
        };
        for name in ["ids", "input_ids"] {
            let rows = embed.rows_read(&input(&[name, "labels"])).unwrap();
            assert_eq!(rows.to_vec::<i64>().unwrap(), [3, 1], "{name}");
        }
        let padded = embed.rows_read(&input(&["input_ids", "attention_mask"]));
        assert!(padded.is_none(), "tokens of a padded batch");
        assert!(embed.rows_read(&input(&["labels"])).is_none(), "no tokens");
    }
}
