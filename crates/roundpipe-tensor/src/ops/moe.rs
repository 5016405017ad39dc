//! Mixture of experts: routing, sorting tokens by expert, grouped products, adding up.
//!
//! The path of a token: [`Cx::moe_route`] chooses its experts and weighs them, [`Cx::moe_dispatch`]
//! puts one copy of it into the rows of each, [`Cx::grouped_linear`] multiplies every expert's rows
//! by its matrix, [`Cx::moe_combine`] adds the results up. How many tokens an expert got stays on
//! the device: nothing here waits for it.

use super::arith::raw_unary;
use super::product::Lora;
use crate::cx::{Cx, float, same_dtype, same_shape};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernel::{Glu, Kernel, Unary};
use crate::shape::{Layout, Shape};
use crate::tape::Back;
use crate::tensor::Tensor;
use crate::worker::Worker;

/// How the weights of the chosen experts come from the router's logits; computed in the accumulator
/// type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum RouteWeights {
    /// Softmax over all experts, the chosen ones divided by their sum (Qwen3-MoE with
    /// `norm_topk_prob`).
    #[default]
    Renormalized,
    /// Softmax over all experts as it is (Qwen3-MoE without, OLMoE).
    Plain,
    /// Softmax over the logits of the chosen ones (GPT-OSS, Mixtral).
    Chosen,
}

/// Which experts each token goes to, and where its copies lie when they are sorted by expert.
#[derive(Debug, Clone)]
pub struct Routing {
    weights: Tensor,
    choice: Tensor,
    /// Token of every sorted row.
    rows: Tensor,
    /// Sorted row of every choice; a permutation, which the kernels rely on.
    inverse: Tensor,
    offsets: Tensor,
}

impl Routing {
    /// Weights of a token's experts, best first, `[t, k]`; gradients flow to the logits.
    pub fn weights(&self) -> &Tensor {
        &self.weights
    }

    /// A token's experts, best first, i64 `[t, k]`.
    pub fn choice(&self) -> &Tensor {
        &self.choice
    }

    /// Expert e has the sorted rows `offsets[e]..offsets[e + 1]`; i32 `[e + 1]`.
    pub fn offsets(&self) -> &Tensor {
        &self.offsets
    }

    /// Number of tokens.
    pub fn tokens(&self) -> usize {
        self.choice.dims()[0]
    }

    /// Experts per token.
    pub fn top_k(&self) -> usize {
        self.choice.dims()[1]
    }

    /// Number of experts.
    pub fn experts(&self) -> usize {
        self.offsets.dims()[0] - 1
    }
}

/// The parameters of a block of experts; matrices are `[.., out, in]` as those of `linear`.
#[derive(Debug, Clone, Copy)]
pub struct Experts<'a> {
    /// `[e, c]`.
    pub router: &'a Tensor,
    /// `[e]`.
    pub router_bias: Option<&'a Tensor>,
    /// `[e, 2i, c]`: the gate's rows, then up's; for [`Glu::Clamped`] they alternate (GPT-OSS),
    /// gate first.
    pub gate_up: &'a Tensor,
    /// `[e, 2i]`.
    pub gate_up_bias: Option<&'a Tensor>,
    /// `[e, c, i]`.
    pub down: &'a Tensor,
    /// `[e, c]`.
    pub down_bias: Option<&'a Tensor>,
}

/// What a block of experts computes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MoeOptions {
    /// Experts per token.
    pub top_k: usize,
    /// How they are weighed.
    pub weights: RouteWeights,
    /// What stands between their two products.
    pub glu: Glu,
}

impl Cx {
    /// Chooses the `k` best experts of every token by `logits: [t, e]` and sorts the choices.
    ///
    /// # Errors
    /// When `logits` is not a float matrix, or has fewer than `k` experts.
    pub fn moe_route(
        &mut self,
        logits: &Tensor,
        k: usize,
        weights: RouteWeights,
    ) -> Result<Routing> {
        const OP: &str = "moe_route";
        float(OP, logits)?;
        if logits.rank() != 2 || k == 0 || k > logits.dims()[1] {
            let what = format!(
                "{k} experts per token by logits {}; they must be [tokens, experts]",
                logits.shape()
            );
            return Err(Error::invalid(OP, what));
        }
        let wide = self.cast(logits, logits.dtype().accumulator())?;
        let (shares, choice) = match weights {
            RouteWeights::Chosen => {
                let (best, choice) = self.topk(&wide, k, -1, true)?;
                (self.softmax(&best, -1)?, choice)
            }
            RouteWeights::Plain | RouteWeights::Renormalized => {
                let all = self.softmax(&wide, -1)?;
                self.topk(&all, k, -1, true)?
            }
        };
        let shares = match weights {
            RouteWeights::Renormalized => {
                let sum = self.sum(&shares, &[-1], true)?;
                self.div(&shares, &sum)?
            }
            _ => shares,
        };
        let weights = self.cast(&shares, logits.dtype())?;
        let [rows, inverse, offsets] = sort(self.worker(), OP, &choice, logits.dims()[1])?;
        Ok(Routing {
            weights,
            choice,
            rows,
            inverse,
            offsets,
        })
    }

    /// The rows of `x: [t, c]` sorted by expert, `[t · k, c]`: each token once per choice.
    ///
    /// # Errors
    /// When `x` has not the routing's tokens.
    pub fn moe_dispatch(&mut self, x: &Tensor, routing: &Routing) -> Result<Tensor> {
        const OP: &str = "moe_dispatch";
        float(OP, x)?;
        if x.rank() != 2 || x.dims()[0] != routing.tokens() {
            return Err(Error::Shape {
                op: OP,
                left: *x.shape(),
                right: *routing.choice.shape(),
            });
        }
        let shape = Shape::new(&[routing.choice.numel(), x.dims()[1]])?;
        let y = self.worker().alloc(OP, x.dtype(), shape)?;
        let kernel = Kernel::IndexSelect { dim: 0 };
        self.worker()
            .launch(&kernel, &[Some(x), Some(&routing.rows)], &[Some(&y)])?;
        let (inverse, from) = (routing.inverse.clone(), *x.shape());
        self.record_one(OP, &[x], y, move |bx| {
            let dy = bx.dy()?;
            let dx = bx.worker().alloc(OP, dy.dtype(), from)?;
            bx.worker().launch(
                &Kernel::MoeCombine,
                &[Some(&dy), Some(&inverse), None],
                &[Some(&dx)],
            )?;
            drop((dy, inverse));
            bx.give(0, dx)
        })
    }

    /// Rows `offsets[i]..offsets[i + 1]` of `x: [t, c]` times the transpose of `weight[i]`,
    /// `weight: [e, n, c]`, plus `bias[i]`, `bias: [e, n]`. `offsets` is i32 `[e + 1]` from 0 on;
    /// rows past its end become 0.
    ///
    /// # Errors
    /// When sizes or types do not fit.
    pub fn grouped_linear(
        &mut self,
        x: &Tensor,
        weight: &Tensor,
        offsets: &Tensor,
        bias: Option<&Tensor>,
    ) -> Result<Tensor> {
        self.grouped_linear_beside(x, weight, offsets, bias, None)
    }

    /// [`Cx::grouped_linear`] with a LoRA branch of each group beside it: `a: [e, rank, c]`, `b: [e, n,
    /// rank]`.
    ///
    /// # Errors
    /// When sizes or types do not fit.
    pub fn grouped_linear_lora(
        &mut self,
        x: &Tensor,
        weight: &Tensor,
        offsets: &Tensor,
        bias: Option<&Tensor>,
        lora: Lora<'_>,
    ) -> Result<Tensor> {
        const OP: &str = "grouped_linear_lora";
        check_grouped(OP, x, weight.shape(), offsets, bias)?;
        let branch = GroupedBranch::new(self, OP, x, weight.shape(), offsets, lora)?;
        self.grouped_linear_beside(x, weight, offsets, bias, Some(&branch))
    }

    /// Products of groups, and their branches on top.
    fn grouped_linear_beside(
        &mut self,
        x: &Tensor,
        weight: &Tensor,
        offsets: &Tensor,
        bias: Option<&Tensor>,
        branch: Option<&GroupedBranch>,
    ) -> Result<Tensor> {
        const OP: &str = "grouped_linear";
        same_dtype(OP, x, weight)?;
        check_grouped(OP, x, weight.shape(), offsets, bias)?;
        let (rows, out) = (x.dims()[0], weight.dims()[1]);
        let dense = self.worker().contiguous(x)?.detach();
        let offsets = self.worker().contiguous(offsets)?.detach();
        let y = self
            .worker()
            .alloc(OP, x.dtype(), Shape::new(&[rows, out])?)?;
        let low = GroupedBranch::pair(branch);
        multiply_groups_beside(
            self.worker(),
            [&dense, &transposed(weight)],
            low.as_ref().map(|pair| pair.each_ref()),
            &offsets,
            &y,
            false,
        )?;
        drop(low);
        if let Some(bias) = bias {
            add_bias(self.worker(), &y, bias, &offsets)?;
        }
        let branch_back = GroupedBranch::back(self, branch);
        // Each side is kept only for the other side's gradient.
        let kept_x = self.tracks(&[weight]).then_some(dense);
        let kept_weight = self.tracks(&[x]).then(|| weight.detach());
        let has_bias = bias.is_some();
        let inputs = [x, weight].into_iter().chain(bias);
        let inputs: Vec<&Tensor> = inputs.chain(GroupedBranch::tensors(branch)).collect();
        self.record_one(OP, &inputs, y, move |bx| {
            let dy = bx.dy()?;
            if let Some(x) = kept_x {
                grouped_gradient(bx, 1, &x, &dy, &offsets)?;
            }
            if has_bias && bx.needs(2) {
                let ones = bx.worker().full(dy.dtype(), Shape::new(&[rows, 1])?, 1.0)?;
                grouped_gradient(bx, 2, &ones, &dy, &offsets)?;
            }
            let low = match branch_back {
                Some(branch) => branch.run(bx, 2 + usize::from(has_bias), &dy, &offsets)?,
                None => None,
            };
            let Some(weight) = kept_weight else {
                return Ok(());
            };
            bx.give_into(0, |worker, dx, adds| {
                let low = low.as_ref().map(|pair| pair.each_ref());
                multiply_groups_beside(worker, [&dy, &weight], low, &offsets, dx, adds)
            })
        })
    }

    /// The experts' results `y: [t · k, c]`, sorted as [`Cx::moe_dispatch`] gave them, weighed and
    /// added up per token: `[t, c]`.
    ///
    /// # Errors
    /// When `y` has not the routing's rows or type.
    pub fn moe_combine(&mut self, y: &Tensor, routing: &Routing) -> Result<Tensor> {
        const OP: &str = "moe_combine";
        float(OP, y)?;
        same_dtype(OP, y, &routing.weights)?;
        if y.rank() != 2 || y.dims()[0] != routing.choice.numel() {
            return Err(Error::Shape {
                op: OP,
                left: *y.shape(),
                right: *routing.choice.shape(),
            });
        }
        let dense = self.worker().contiguous(y)?.detach();
        let weights = self.worker().contiguous(&routing.weights)?.detach();
        let inverse = routing.inverse.clone();
        let shape = Shape::new(&[routing.tokens(), y.dims()[1]])?;
        let out = self.worker().alloc(OP, y.dtype(), shape)?;
        let src = [Some(&dense), Some(&inverse), Some(&weights)];
        self.worker()
            .launch(&Kernel::MoeCombine, &src, &[Some(&out)])?;
        let kept = self.tracks(&[&routing.weights]).then_some(dense);
        let from = *y.shape();
        self.record_one(OP, &[y, &routing.weights], out, move |bx| {
            let dout = bx.dy()?;
            let fresh = |shape: Shape| bx.worker().alloc(OP, dout.dtype(), shape);
            let dy = bx.needs(0).then(|| fresh(from)).transpose()?;
            let dweights = kept.as_ref().map(|_| fresh(*weights.shape())).transpose()?;
            let src = [kept.as_ref(), Some(&inverse), Some(&weights), Some(&dout)];
            bx.worker().launch(
                &Kernel::MoeCombineGrad,
                &src,
                &[dy.as_ref(), dweights.as_ref()],
            )?;
            drop((kept, inverse, weights, dout));
            dy.map_or(Ok(()), |dy| bx.give(0, dy))?;
            dweights.map_or(Ok(()), |dweights| bx.give(1, dweights))
        })
    }

    /// A whole block of gated experts over `x: [.., c]`: the result, the router's logits `[tokens,
    /// e]` (for [`Cx::load_balancing_loss`]) and the routing.
    ///
    /// # Errors
    /// When sizes or types do not fit.
    pub fn moe(
        &mut self,
        x: &Tensor,
        experts: Experts<'_>,
        options: MoeOptions,
    ) -> Result<(Tensor, Tensor, Routing)> {
        let flat = self.reshape(x, &[-1, x.dims().last().map_or(1, |c| *c as isize)])?;
        let logits = self.linear(&flat, experts.router, experts.router_bias)?;
        let routing = self.moe_route(&logits, options.top_k, options.weights)?;
        let rows = self.moe_dispatch(&flat, &routing)?;
        drop(flat);
        let both = self.grouped_linear(
            &rows,
            experts.gate_up,
            &routing.offsets,
            experts.gate_up_bias,
        )?;
        drop(rows);
        let inner = match options.glu {
            Glu::Silu => self.swiglu_packed(&both)?,
            Glu::GeluTanh => self.geglu_packed(&both)?,
            Glu::Clamped { alpha, limit } => {
                self.swiglu_clamped_interleaved(&both, alpha, limit)?
            }
        };
        drop(both);
        let down =
            self.grouped_linear(&inner, experts.down, &routing.offsets, experts.down_bias)?;
        drop(inner);
        let out = self.moe_combine(&down, &routing)?;
        let dims: Vec<isize> = x.dims().iter().map(|d| *d as isize).collect();
        Ok((self.reshape(&out, &dims)?, logits, routing))
    }

    /// The number of experts times the sum over experts of (choices per token) · (mean
    /// probability); 1 · k when all experts are used alike. `logits: [t, e]` are the router's,
    /// `choice: [t, k]` the chosen experts; several layers are given one after the other along t.
    /// The result has the accumulator type. No gradient flows through the choices.
    ///
    /// # Errors
    /// When the shapes do not fit or a choice is no expert.
    pub fn load_balancing_loss(&mut self, logits: &Tensor, choice: &Tensor) -> Result<Tensor> {
        const OP: &str = "load_balancing_loss";
        float(OP, logits)?;
        if logits.rank() != 2 || choice.rank() != 2 || logits.dims()[0] != choice.dims()[0] {
            return Err(Error::Shape {
                op: OP,
                left: *logits.shape(),
                right: *choice.shape(),
            });
        }
        let (tokens, experts) = (logits.dims()[0], logits.dims()[1]);
        let acc = logits.dtype().accumulator();
        let choice = self.worker().contiguous(choice)?.detach();
        let [_, _, offsets] = sort(self.worker(), OP, &choice, experts)?;
        let bounds = self.worker().cast(&offsets, acc)?;
        let counts = self.sub(
            &bounds.narrowed(0, 1, experts),
            &bounds.narrowed(0, 0, experts),
        )?;
        let wide = self.cast(logits, acc)?;
        let probabilities = self.softmax(&wide, -1)?;
        let mean = self.mean(&probabilities, &[0], false)?;
        let product = self.mul(&counts, &mean)?;
        let sum = self.sum_all(&product)?;
        self.affine(&sum, experts as f64 / tokens as f64, 0.0)
    }
}

/// Sorts choices by expert: rows, inverse, offsets.
fn sort(worker: &Worker, op: &'static str, choice: &Tensor, experts: usize) -> Result<[Tensor; 3]> {
    if choice.dtype() != DType::I64 {
        let expected = "choices of experts are i64";
        return Err(Error::DType {
            op,
            dtype: choice.dtype(),
            shape: *choice.shape(),
            expected,
        });
    }
    if i32::try_from(choice.numel()).is_err() {
        return Err(Error::invalid(
            op,
            format!("{} has more than 2^31 - 1 choices", choice.shape()),
        ));
    }
    let line = |len: usize| worker.alloc(op, DType::I32, Shape::new(&[len])?);
    let [rows, inverse, offsets] = [
        line(choice.numel())?,
        line(choice.numel())?,
        line(experts + 1)?,
    ];
    let into = [Some(&rows), Some(&inverse), Some(&offsets)];
    worker.launch(&Kernel::MoeSort { experts }, &[Some(choice)], &into)?;
    Ok([rows, inverse, offsets])
}

/// `[e, n, c]` seen as `[e, c, n]`.
pub(super) fn transposed(weight: &Tensor) -> Tensor {
    weight.relaid(weight.layout().permuted(&[0, 2, 1]))
}

/// Adds each group's row of `bias` to the group's rows of `y`: as a product with a column of ones,
/// so that the host need not know which rows those are.
pub(super) fn add_bias(worker: &Worker, y: &Tensor, bias: &Tensor, offsets: &Tensor) -> Result<()> {
    let bias = worker.contiguous(bias)?;
    let bias = bias.relaid(Layout::contiguous(Shape::new(&[
        bias.dims()[0],
        1,
        bias.dims()[1],
    ])?));
    let ones = worker.full(y.dtype(), Shape::new(&[y.dims()[0], 1])?, 1.0)?;
    multiply_groups(worker, &ones, &bias, offsets, y, true)
}

/// The rows of every group of x [t, k] times its matrix of w [e, k, n], into y or added to it.
pub(super) fn multiply_groups(
    worker: &Worker,
    x: &Tensor,
    w: &Tensor,
    offsets: &Tensor,
    y: &Tensor,
    accumulate: bool,
) -> Result<()> {
    multiply_groups_beside(worker, [x, w], None, offsets, y, accumulate)
}

/// [`multiply_groups`] of two pairs of x and w at once: their sum.
pub(super) fn multiply_groups_beside(
    worker: &Worker,
    [x, w]: [&Tensor; 2],
    beside: Option<[&Tensor; 2]>,
    offsets: &Tensor,
    y: &Tensor,
    accumulate: bool,
) -> Result<()> {
    let kernel = Kernel::GroupedMatMul { accumulate };
    let [low, narrow] = beside.map_or([None, None], |pair| pair.map(Some));
    let src = [Some(x), Some(w), Some(offsets), low, narrow];
    worker.launch(&kernel, &src, &[Some(y)])
}

/// The LoRA branches of groups up to their last product, which is computed together with the
/// product beside it.
pub(super) struct GroupedBranch {
    /// scale · dropout(x) Aᵀ: the narrow side is the cheap one to scale.
    low: Tensor,
    b: Tensor,
    /// Where nothing is dropped, the first product is part of the node as well: the gradient of x
    /// is then one product for weight and branch.
    first: Option<FirstProduct>,
}

/// scale · x Aᵀ, and what its backward needs.
struct FirstProduct {
    x: Tensor,
    a: Tensor,
    scale: f64,
}

impl GroupedBranch {
    pub fn new(
        cx: &mut Cx,
        op: &'static str,
        x: &Tensor,
        weight: &Shape,
        offsets: &Tensor,
        lora: Lora<'_>,
    ) -> Result<Self> {
        let rank = lora.a.dims().get(1).copied().unwrap_or(0);
        same_shape(op, lora.a, Shape::new(&[weight[0], rank, weight[2]])?)?;
        same_shape(op, lora.b, Shape::new(&[weight[0], weight[1], rank])?)?;
        let b = lora.b.clone();
        if cx.is_training() && lora.dropout != 0.0 {
            let input = cx.dropout(x, lora.dropout)?;
            let low = cx.grouped_linear(&input, lora.a, offsets, None)?;
            drop(input);
            let low = cx.affine(&low, lora.scale, 0.0)?;
            return Ok(Self {
                low,
                b,
                first: None,
            });
        }
        same_dtype(op, x, lora.a)?;
        let worker = cx.worker();
        let (dense, offsets) = (worker.contiguous(x)?, worker.contiguous(offsets)?);
        let low = scaled_groups(
            worker,
            op,
            &dense,
            &transposed(lora.a),
            &offsets,
            lora.scale,
        )?;
        let first = FirstProduct {
            x: dense.detach(),
            a: lora.a.clone(),
            scale: lora.scale,
        };
        Ok(Self {
            low,
            b,
            first: Some(first),
        })
    }

    /// What a node that adds the branches has among its inputs, behind its own.
    pub fn tensors(branch: Option<&Self>) -> impl Iterator<Item = &Tensor> {
        branch.into_iter().flat_map(|branch| {
            let first = branch.first.as_ref().map_or(&branch.low, |first| &first.a);
            [first, &branch.b]
        })
    }

    /// The pair that a product of groups takes along: low [t, rank] and Bᵀ [e, rank, n].
    pub fn pair(branch: Option<&Self>) -> Option<[Tensor; 2]> {
        branch.map(|branch| [branch.low.detach(), transposed(&branch.b)])
    }

    /// How gradients go back.
    pub fn back(cx: &Cx, branch: Option<&Self>) -> Option<GroupedBranchBack> {
        let Self { low, b, first } = branch?;
        let first = first.as_ref().map(|first| FirstProductBack {
            x: cx.tracks(&[&first.a]).then(|| first.x.clone()),
            a: first.a.detach(),
            scale: first.scale,
        });
        Some(GroupedBranchBack {
            low: cx.tracks(&[b]).then(|| low.detach()),
            b: b.detach(),
            first,
        })
    }
}

/// scale · x w of every group.
fn scaled_groups(
    worker: &Worker,
    op: &'static str,
    x: &Tensor,
    w: &Tensor,
    offsets: &Tensor,
    scale: f64,
) -> Result<Tensor> {
    let y = worker.alloc(op, x.dtype(), Shape::new(&[x.dims()[0], w.dims()[2]])?)?;
    multiply_groups(worker, x, w, offsets, &y, false)?;
    raw_unary(
        worker,
        op,
        Unary::Affine {
            mul: scale,
            add: 0.0,
        },
        &y,
    )
}

/// What the backward of a [`GroupedBranch`] needs.
pub(super) struct GroupedBranchBack {
    low: Option<Tensor>,
    b: Tensor,
    first: Option<FirstProductBack>,
}

struct FirstProductBack {
    /// For the gradient of `a`.
    x: Option<Tensor>,
    a: Tensor,
    scale: f64,
}

impl GroupedBranchBack {
    /// Gradients of the branch's inputs, `first` and `first + 1` of the node, and the pair that the
    /// gradient of x takes along.
    pub fn run(
        self,
        bx: &mut Back<'_>,
        first: usize,
        dy: &Tensor,
        offsets: &Tensor,
    ) -> Result<Option<[Tensor; 2]>> {
        let Self { low, b, first: own } = self;
        if let Some(low) = low {
            grouped_gradient(bx, first + 1, &low, dy, offsets)?;
        }
        let Some(FirstProductBack { x, a, scale }) = own else {
            bx.give_into(first, |worker, grad, adds| {
                multiply_groups(worker, dy, &b, offsets, grad, adds)
            })?;
            return Ok(None);
        };
        let dlow = scaled_groups(bx.worker(), "lora", dy, &b, offsets, scale)?;
        if let Some(x) = x {
            grouped_gradient(bx, first, &x, &dlow, offsets)?;
        }
        Ok(Some([dlow, a]))
    }
}

/// The gradient of input `i`, a weight `[e, n, c]` or a bias `[e, n]` that met a column of ones.
pub(super) fn grouped_gradient(
    bx: &mut Back<'_>,
    i: usize,
    x: &Tensor,
    dy: &Tensor,
    offsets: &Tensor,
) -> Result<()> {
    let sink = bx.sink(i)?;
    let (groups, out) = (sink.tensor.dims()[0], sink.tensor.dims()[1]);
    let full = Layout::contiguous(Shape::new(&[groups, out, x.dims()[1]])?);
    let into = transposed(&sink.tensor.relaid(full));
    let kernel = Kernel::GroupedMatMulGrad {
        accumulate: sink.accumulate,
    };
    bx.worker()
        .launch(&kernel, &[Some(x), Some(dy), Some(offsets)], &[Some(&into)])?;
    drop(into);
    bx.give_back(i, sink)
}

pub(super) fn check_grouped(
    op: &'static str,
    x: &Tensor,
    weight: &Shape,
    offsets: &Tensor,
    bias: Option<&Tensor>,
) -> Result<()> {
    float(op, x)?;
    if x.rank() != 2 || weight.rank() != 3 || weight[2] != x.dims()[1] {
        return Err(Error::Shape {
            op,
            left: *x.shape(),
            right: *weight,
        });
    }
    if let Some(bias) = bias {
        same_dtype(op, x, bias)?;
        same_shape(op, bias, Shape::new(&weight[..2])?)?;
    }
    same_shape(op, offsets, Shape::new(&[weight[0] + 1])?)?;
    if offsets.dtype() == DType::I32 {
        return Ok(());
    }
    Err(Error::DType {
        op,
        dtype: offsets.dtype(),
        shape: *offsets.shape(),
        expected: "offsets are i32",
    })
}
