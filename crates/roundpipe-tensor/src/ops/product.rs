//! Matrix products: matmul, linear, and linear with a LoRA branch.

use crate::cx::{Cx, float, same_dtype, same_shape};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernel::{Kernel, Reduce};
use crate::shape::{Layout, Shape};
use crate::tape::Back;
use crate::tensor::Tensor;
use crate::worker::Worker;

/// The trainable branch beside a frozen weight: y += scale · (dropout(x) Aᵀ) Bᵀ.
#[derive(Debug, Clone, Copy)]
pub struct Lora<'a> {
    /// [rank, in].
    pub a: &'a Tensor,
    /// [out, rank].
    pub b: &'a Tensor,
    /// alpha / rank.
    pub scale: f64,
    /// Probability of dropping an element of the branch's input, in training.
    pub dropout: f64,
}

impl Cx {
    /// Matrix product over the last two dimensions; leading ones broadcast. A vector counts as a
    /// row on the left and as a column on the right, as in PyTorch.
    ///
    /// # Errors
    /// When inner sizes or batches do not fit, or types differ.
    pub fn matmul(&mut self, a: &Tensor, b: &Tensor) -> Result<Tensor> {
        const OP: &str = "matmul";
        float(OP, a)?;
        same_dtype(OP, a, b)?;
        let mismatch = Error::Shape {
            op: OP,
            left: *a.shape(),
            right: *b.shape(),
        };
        if a.rank() == 0 || b.rank() == 0 {
            return Err(mismatch);
        }
        if a.rank() == 1 {
            let row = self.reshape(a, &[1, -1])?;
            let y = self.matmul(&row, b)?;
            let keep: Vec<isize> =
                drop_axis(y.dims(), if b.rank() == 1 { 0 } else { y.rank() - 2 });
            return self.reshape(&y, &keep);
        }
        if b.rank() == 1 {
            let column = self.reshape(b, &[-1, 1])?;
            let y = self.matmul(a, &column)?;
            return self.reshape(&y, &drop_axis(y.dims(), y.rank() - 1));
        }
        if a.dims()[a.rank() - 1] != b.dims()[b.rank() - 2] {
            return Err(mismatch);
        }
        // Many rows against one matrix are one product.
        if b.rank() == 2
            && a.rank() > 2
            && a.numel() > 0
            && a.layout().reshaped(rows_of(a)?).is_some()
        {
            let flat = self.reshape(a, &[-1, a.dims()[a.rank() - 1] as isize])?;
            let y = self.matmul(&flat, b)?;
            let mut dims: Vec<isize> = a.dims().iter().map(|d| *d as isize).collect();
            dims[a.rank() - 1] = b.dims()[1] as isize;
            return self.reshape(&y, &dims);
        }
        self.batched(a, b)
    }

    fn batched(&mut self, a: &Tensor, b: &Tensor) -> Result<Tensor> {
        const OP: &str = "matmul";
        let batch = lead(a)?
            .broadcast(&lead(b)?, OP)
            .map_err(|_| Error::Shape {
                op: OP,
                left: *a.shape(),
                right: *b.shape(),
            })?;
        let y = multiply(
            self.worker(),
            OP,
            &spread(a, &batch)?,
            &spread(b, &batch)?,
            a.dtype(),
        )?;
        // Each side is kept only for the other side's gradient.
        let right = a.requires_grad().then(|| b.detach());
        let left = b.requires_grad().then(|| a.detach());
        let shapes = [*a.shape(), *b.shape()];
        self.record_one(OP, &[a, b], y, move |bx| {
            let dy = bx.dy()?;
            for (i, other) in [right, left].into_iter().enumerate() {
                let (Some(other), this) = (other, shapes[i]) else {
                    continue;
                };
                let other = transposed(&spread(&other, &batch)?);
                let (x, y) = if i == 0 { (&dy, &other) } else { (&other, &dy) };
                if this.rank() == batch.rank() + 2 && this[..batch.rank()] == *batch {
                    let sink = bx.sink(i)?;
                    multiply_into(
                        bx.worker(),
                        x,
                        y,
                        &sink.tensor,
                        1.0,
                        f64::from(u8::from(sink.accumulate)),
                    )?;
                    bx.give_back(i, sink)?;
                } else {
                    let full = multiply(bx.worker(), OP, x, y, dy.dtype().accumulator())?;
                    let grad = bx.worker().sum_to(&full, this)?;
                    drop(full);
                    bx.give(i, grad)?;
                }
            }
            Ok(())
        })
    }

    /// x Wᵀ + bias with W as [out, in].
    ///
    /// # Errors
    /// When sizes or types do not fit.
    pub fn linear(&mut self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        self.linear_beside(x, weight, bias, None)
    }

    /// x Wᵀ + bias, and a branch on top.
    fn linear_beside(
        &mut self,
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        branch: Option<&Branch>,
    ) -> Result<Tensor> {
        const OP: &str = "linear";
        same_dtype(OP, x, weight)?;
        let (rows, out) = check_linear(OP, x, weight.shape(), bias)?;
        let dense = self.contiguous(x)?;
        let flat = dense.relaid(Layout::contiguous(rows)).detach();
        let y = self
            .worker()
            .alloc(OP, x.dtype(), Shape::new(&[rows[0], weight.dims()[0]])?)?;
        affine(self.worker(), &flat, weight, bias, &y)?;
        let branch_back = Branch::add(self, branch, &y)?;
        let y = y.relaid(Layout::contiguous(out));
        // Each side is kept only for the other side's gradient: a frozen weight keeps no
        // activations.
        let flat = weight.requires_grad().then_some(flat);
        let kept = weight.detach();
        let has_bias = bias.is_some();
        let inputs = [&dense, weight].into_iter().chain(bias);
        let inputs: Vec<&Tensor> = inputs.chain(Branch::tensors(branch)).collect();
        self.record_one(OP, &inputs, y, move |bx| {
            let dy = bx.dy()?;
            let dy = dy.relaid(Layout::contiguous(Shape::new(&[rows[0], kept.dims()[0]])?));
            if let Some(flat) = flat {
                weight_grad(bx, 1, &dy, &flat)?;
            }
            if has_bias && bx.needs(2) {
                bias_grad(bx, 2, &dy)?;
            }
            if let Some(branch) = branch_back {
                branch.run(bx, 2 + usize::from(has_bias), &dy)?;
            }
            bx.give_into(0, |worker, dx, adds| {
                let dx = dx.relaid(Layout::contiguous(rows));
                multiply_into(worker, &dy, &kept, &dx, 1.0, f64::from(u8::from(adds)))
            })
        })
    }

    /// [`Cx::linear`] with a LoRA branch beside it; the weight is usually frozen, and then keeps no
    /// activations.
    ///
    /// # Errors
    /// When sizes or types do not fit.
    pub fn linear_lora(
        &mut self,
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        lora: Lora<'_>,
    ) -> Result<Tensor> {
        const OP: &str = "linear_lora";
        same_dtype(OP, x, weight)?;
        check_linear(OP, x, weight.shape(), bias)?;
        check_lora(OP, weight.shape(), lora)?;
        let branch = Branch::new(self, x, lora)?;
        self.linear_beside(x, weight, bias, Some(&branch))
    }
}

/// The branch of [`Lora`] up to its last product, which adds to the result of the product beside it.
pub(super) struct Branch {
    /// dropout(x) Aᵀ.
    low: Tensor,
    b: Tensor,
    scale: f64,
}

impl Branch {
    pub fn new(cx: &mut Cx, x: &Tensor, lora: Lora<'_>) -> Result<Self> {
        let input = cx.dropout(x, lora.dropout)?;
        let low = cx.linear(&input, lora.a, None)?;
        Ok(Self {
            low,
            b: lora.b.clone(),
            scale: lora.scale,
        })
    }

    /// What a node that adds the branch has among its inputs, behind its own.
    pub fn tensors(branch: Option<&Self>) -> impl Iterator<Item = &Tensor> {
        branch
            .into_iter()
            .flat_map(|branch| [&branch.low, &branch.b])
    }

    /// y [rows, out] += scale · low Bᵀ; how gradients go back.
    pub fn add(cx: &Cx, branch: Option<&Self>, y: &Tensor) -> Result<Option<BranchBack>> {
        let Some(Self { low, b, scale }) = branch else {
            return Ok(None);
        };
        let low = low.relaid(Layout::contiguous(rows_of(low)?)).detach();
        multiply_into(cx.worker(), &low, &transposed(b), y, *scale, 1.0)?;
        Ok(Some(BranchBack {
            low: b.requires_grad().then_some(low),
            b: b.detach(),
            scale: *scale,
        }))
    }
}

/// What the backward of a [`Branch`] needs.
pub(super) struct BranchBack {
    low: Option<Tensor>,
    b: Tensor,
    scale: f64,
}

impl BranchBack {
    /// Gradients of `low` and `b`, inputs `first` and `first + 1` of the node, for dy [rows, out].
    pub fn run(self, bx: &mut Back<'_>, first: usize, dy: &Tensor) -> Result<()> {
        let Self { low, b, scale } = self;
        if let Some(low) = low {
            scaled_weight_grad(bx, first + 1, dy, &low, scale)?;
        }
        bx.give_into(first, |worker, grad, adds| {
            let rows = Shape::new(&[dy.dims()[0], b.dims()[1]])?;
            let grad = grad.relaid(Layout::contiguous(rows));
            multiply_into(worker, dy, &b, &grad, scale, f64::from(u8::from(adds)))
        })
    }
}

/// Sizes without `axis`, as reshape takes them.
fn drop_axis(dims: &[usize], axis: usize) -> Vec<isize> {
    dims.iter()
        .enumerate()
        .filter(|(i, _)| *i != axis)
        .map(|(_, d)| *d as isize)
        .collect()
}

/// [rows, last].
fn rows_of(x: &Tensor) -> Result<Shape> {
    let last = *x.dims().last().unwrap_or(&1);
    let rows: usize = x.dims()[..x.rank().saturating_sub(1)].iter().product();
    Shape::new(&[rows, last])
}

/// All dimensions but the last two.
fn lead(x: &Tensor) -> Result<Shape> {
    Shape::new(&x.dims()[..x.rank() - 2])
}

/// The matrices of `x` under the batch dimensions `batch`.
fn spread(x: &Tensor, batch: &Shape) -> Result<Tensor> {
    let dims: Vec<usize> = batch
        .dims()
        .iter()
        .chain(&x.dims()[x.rank() - 2..])
        .copied()
        .collect();
    Ok(x.relaid(x.layout().broadcast_to(Shape::new(&dims)?, "matmul")?))
}

/// The transpose of every matrix.
pub(crate) fn transposed(x: &Tensor) -> Tensor {
    let mut order: Vec<usize> = (0..x.rank()).collect();
    let rank = order.len();
    order.swap(rank - 1, rank - 2);
    x.relaid(x.layout().permuted(&order))
}

/// a b as a new tensor, unrecorded; equal batch dimensions.
pub(crate) fn multiply(
    worker: &Worker,
    op: &'static str,
    a: &Tensor,
    b: &Tensor,
    dtype: DType,
) -> Result<Tensor> {
    let mut dims = a.dims().to_vec();
    let rank = dims.len();
    dims[rank - 1] = b.dims()[rank - 1];
    let out = worker.alloc(op, dtype, Shape::new(&dims)?)?;
    multiply_into(worker, a, b, &out, 1.0, 0.0)?;
    Ok(out)
}

/// out = alpha · a b + beta · out, unrecorded.
pub(crate) fn multiply_into(
    worker: &Worker,
    a: &Tensor,
    b: &Tensor,
    out: &Tensor,
    alpha: f64,
    beta: f64,
) -> Result<()> {
    worker.launch(
        &Kernel::MatMul { alpha, beta },
        &[Some(a), Some(b), None],
        &[Some(out)],
    )
}

/// Shapes of [`Cx::linear`]: x as rows, and the result.
pub(super) fn check_linear(
    op: &'static str,
    x: &Tensor,
    weight: &Shape,
    bias: Option<&Tensor>,
) -> Result<(Shape, Shape)> {
    float(op, x)?;
    if weight.rank() != 2 || x.rank() == 0 || x.dims()[x.rank() - 1] != weight[1] {
        return Err(Error::Shape {
            op,
            left: *x.shape(),
            right: *weight,
        });
    }
    if let Some(bias) = bias {
        same_dtype(op, x, bias)?;
        same_shape(op, bias, Shape::new(&[weight[0]])?)?;
    }
    let mut out = x.dims().to_vec();
    out[x.rank() - 1] = weight[0];
    Ok((rows_of(x)?, Shape::new(&out)?))
}

/// Whether a branch fits a weight [out, in].
pub(super) fn check_lora(op: &'static str, weight: &Shape, lora: Lora<'_>) -> Result<()> {
    let rank = lora.a.dims().first().copied().unwrap_or(0);
    same_shape(op, lora.a, Shape::new(&[rank, weight[1]])?)?;
    same_shape(op, lora.b, Shape::new(&[weight[0], rank])?)
}

/// y = x Wᵀ + bias on rows.
pub(super) fn affine(
    worker: &Worker,
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    y: &Tensor,
) -> Result<()> {
    let kernel = Kernel::MatMul {
        alpha: 1.0,
        beta: 0.0,
    };
    let bias = bias.map(|b| worker.contiguous(b)).transpose()?;
    worker.launch(
        &kernel,
        &[Some(x), Some(&transposed(weight)), bias.as_ref()],
        &[Some(y)],
    )
}

/// dW += dyᵀ x for input `i` of a node.
pub(super) fn weight_grad(bx: &mut Back<'_>, i: usize, dy: &Tensor, x: &Tensor) -> Result<()> {
    scaled_weight_grad(bx, i, dy, x, 1.0)
}

/// dW += scale · dyᵀ x for input `i` of a node.
fn scaled_weight_grad(
    bx: &mut Back<'_>,
    i: usize,
    dy: &Tensor,
    x: &Tensor,
    scale: f64,
) -> Result<()> {
    let sink = bx.sink(i)?;
    let beta = f64::from(u8::from(sink.accumulate));
    multiply_into(bx.worker(), &transposed(dy), x, &sink.tensor, scale, beta)?;
    bx.give_back(i, sink)
}

/// db += column sums of dy [rows, out] for input `i` of a node.
pub(crate) fn bias_grad(bx: &mut Back<'_>, i: usize, dy: &Tensor) -> Result<()> {
    let sink = bx.sink(i)?;
    let row = sink
        .tensor
        .relaid(Layout::contiguous(Shape::new(&[1, dy.dims()[1]])?));
    let kernel = Kernel::Reduce {
        op: Reduce::Sum,
        accumulate: sink.accumulate,
    };
    bx.worker().launch(&kernel, &[Some(dy)], &[Some(&row)])?;
    drop(row);
    bx.give_back(i, sink)
}
