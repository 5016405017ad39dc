//! Products with quantised weights, which are frozen: codes and scales have no gradient.
//!
//! A weight is widened into working memory right before its product and given back behind it. The
//! backward, which needs it again, widens it again: what a tape keeps of a weight are its codes.
//! Values and gradients are those of the same operation on the widened weight, bit for bit.

use super::moe::{
    GroupedBranch, add_bias, check_grouped, grouped_gradient, multiply_groups_beside, transposed,
};
use super::product::{Branch, Lora, affine, bias_grad, check_linear, check_lora, multiply_into};
use crate::cx::{Cx, same_shape};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernel::Kernel;
use crate::quant::{NF4_BLOCK, NF4_BOOKS, Quantization, nf4_nested};
use crate::shape::{Layout, Shape};
use crate::tensor::Tensor;
use crate::worker::Worker;

/// A weight [.., out, in] as codes and scales; [`quant`](crate::quant) says what they mean.
#[derive(Debug, Clone, Copy)]
pub enum Quantized<'a> {
    /// A byte per value.
    Int8 {
        /// Two's complement, u8 [.., out, in].
        codes: &'a Tensor,
        /// Of each row, f32 [.., out].
        factors: &'a Tensor,
    },
    /// Four bits per value; a stack of p matrices with b blocks each. A matrix of the stack need not
    /// be one of the weight: experts' gate and up are two of each.
    Nf4 {
        /// The earlier value in the high half, u8 [.., out, in / 2].
        codes: &'a Tensor,
        /// Of each block: codes, u8 [p, b], or values, f32 [p, b].
        magnitudes: &'a Tensor,
        /// Offset and factors of coded magnitudes, f32 [p, 1 + ceil(b / 256)].
        nested: Option<&'a Tensor>,
        /// What codes of values stand for, then those of magnitudes, f32 \[272\].
        books: &'a Tensor,
    },
}

impl Quantized<'_> {
    /// The parts, checked, with the shape they widen to.
    fn parts(self, op: &'static str) -> Result<Parts> {
        let (how, codes) = match self {
            Self::Int8 { codes, .. } => (Quantization::Int8, codes),
            Self::Nf4 { codes, .. } => (Quantization::Nf4, codes),
        };
        typed(op, codes, DType::U8)?;
        let rank = codes.rank();
        if rank < 2 {
            let what = format!("codes {} are no matrix; give [.., out, in]", codes.shape());
            return Err(Error::invalid(op, what));
        }
        let mut dims = codes.dims().to_vec();
        let tensors = match self {
            Self::Int8 { factors, .. } => {
                typed(op, factors, DType::F32)?;
                same_shape(op, factors, Shape::new(&dims[..rank - 1])?)?;
                vec![Some(codes), Some(factors)]
            }
            Self::Nf4 {
                magnitudes,
                nested,
                books,
                ..
            } => {
                dims[rank - 1] *= 2;
                check_blocks(op, &dims, magnitudes, nested)?;
                typed(op, books, DType::F32)?;
                same_shape(op, books, Shape::new(&[NF4_BOOKS])?)?;
                vec![Some(codes), Some(magnitudes), nested, Some(books)]
            }
        };
        let dense = |t: &Tensor| match t.is_contiguous() {
            true => Ok(t.detach()),
            false => Err(Error::invalid(
                op,
                format!(
                    "parts of a quantised weight lie densely, {} does not",
                    t.shape()
                ),
            )),
        };
        Ok(Parts {
            how,
            tensors: tensors
                .into_iter()
                .map(|t| t.map(dense).transpose())
                .collect::<Result<_>>()?,
            shape: Shape::new(&dims)?,
        })
    }
}

/// Whether there is a magnitude for every block of NF4, and what coded ones need.
fn check_blocks(
    op: &'static str,
    dims: &[usize],
    magnitudes: &Tensor,
    nested: Option<&Tensor>,
) -> Result<()> {
    let values: usize = dims.iter().product();
    let blocks = match magnitudes.dims() {
        [p, b] if p * b * NF4_BLOCK == values => [*p, *b],
        _ => {
            let what = format!(
                "magnitudes {} for {values} values; there is one per {NF4_BLOCK}, as [matrices, blocks]",
                magnitudes.shape()
            );
            return Err(Error::invalid(op, what));
        }
    };
    match (magnitudes.dtype(), nested) {
        (DType::F32, None) => Ok(()),
        (DType::U8, Some(nested)) => {
            typed(op, nested, DType::F32)?;
            same_shape(op, nested, Shape::new(&[blocks[0], nf4_nested(blocks[1])])?)
        }
        _ => Err(Error::invalid(
            op,
            "magnitudes are u8 with their factors, or f32 without",
        )),
    }
}

fn typed(op: &'static str, tensor: &Tensor, dtype: DType) -> Result<()> {
    if tensor.dtype() == dtype {
        return Ok(());
    }
    let expected = match dtype {
        DType::U8 => "codes are u8",
        _ => "scales and books are f32",
    };
    Err(Error::DType {
        op,
        dtype: tensor.dtype(),
        shape: *tensor.shape(),
        expected,
    })
}

/// A checked weight, kept for the backward.
struct Parts {
    how: Quantization,
    tensors: Vec<Option<Tensor>>,
    shape: Shape,
}

impl Parts {
    fn widen(&self, worker: &Worker, op: &'static str, dtype: DType) -> Result<Tensor> {
        let wide = worker.alloc(op, dtype, self.shape)?;
        let src: Vec<Option<&Tensor>> = self.tensors.iter().map(Option::as_ref).collect();
        worker.launch(&Kernel::Dequantize(self.how), &src, &[Some(&wide)])?;
        Ok(wide)
    }
}

impl Cx {
    /// The values of a quantised weight in a float type. No gradient flows to its codes.
    ///
    /// # Errors
    /// When its parts do not fit each other, or `dtype` is no float type.
    pub fn dequantize(&mut self, weight: Quantized<'_>, dtype: DType) -> Result<Tensor> {
        const OP: &str = "dequantize";
        let parts = weight.parts(OP)?;
        if !dtype.is_float() {
            let expected = "weights widen to a float type";
            return Err(Error::DType {
                op: OP,
                dtype,
                shape: parts.shape,
                expected,
            });
        }
        parts.widen(self.worker(), OP, dtype)
    }

    /// [`Cx::linear`] with a quantised weight [out, in], widened to the type of `x`.
    ///
    /// # Errors
    /// When sizes or types do not fit.
    pub fn linear_quantized(
        &mut self,
        x: &Tensor,
        weight: Quantized<'_>,
        bias: Option<&Tensor>,
    ) -> Result<Tensor> {
        self.linear_quantized_beside(x, weight, bias, None)
    }

    fn linear_quantized_beside(
        &mut self,
        x: &Tensor,
        weight: Quantized<'_>,
        bias: Option<&Tensor>,
        branch: Option<&Branch>,
    ) -> Result<Tensor> {
        const OP: &str = "linear_quantized";
        let parts = weight.parts(OP)?;
        let (rows, out) = check_linear(OP, x, &parts.shape, bias)?;
        let width = parts.shape[0];
        let dense = self.contiguous(x)?;
        let flat = dense.relaid(Layout::contiguous(rows)).detach();
        let (worker, dtype) = (self.worker(), x.dtype());
        let y = worker.alloc(OP, dtype, Shape::new(&[rows[0], width])?)?;
        let wide = parts.widen(worker, OP, dtype)?;
        affine(worker, &flat, &wide, bias, &y)?;
        drop((wide, flat));
        let branch_back = Branch::add(self, branch, &y)?;
        let y = y.relaid(Layout::contiguous(out));
        let kept = self.tracks(&[x]).then_some(parts);
        let has_bias = bias.is_some();
        let inputs = std::iter::once(&dense).chain(bias);
        let inputs: Vec<&Tensor> = inputs.chain(Branch::tensors(branch)).collect();
        self.record_one(OP, &inputs, y, move |bx| {
            let dy = bx.dy()?;
            let dy = dy.relaid(Layout::contiguous(Shape::new(&[rows[0], width])?));
            if has_bias && bx.needs(1) {
                bias_grad(bx, 1, &dy)?;
            }
            if let Some(branch) = branch_back {
                branch.run(bx, 1 + usize::from(has_bias), &dy)?;
            }
            let Some(parts) = kept else {
                return Ok(());
            };
            bx.give_into(0, |worker, dx, adds| {
                let wide = parts.widen(worker, OP, dtype)?;
                let dx = dx.relaid(Layout::contiguous(rows));
                multiply_into(worker, &dy, &wide, &dx, 1.0, f64::from(u8::from(adds)))
            })
        })
    }

    /// [`Cx::linear_quantized`] with a LoRA branch beside it.
    ///
    /// # Errors
    /// When sizes or types do not fit.
    pub fn linear_lora_quantized(
        &mut self,
        x: &Tensor,
        weight: Quantized<'_>,
        bias: Option<&Tensor>,
        lora: Lora<'_>,
    ) -> Result<Tensor> {
        const OP: &str = "linear_lora_quantized";
        let shape = weight.parts(OP)?.shape;
        check_linear(OP, x, &shape, bias)?;
        check_lora(OP, &shape, lora)?;
        let branch = Branch::new(self, x, lora)?;
        self.linear_quantized_beside(x, weight, bias, Some(&branch))
    }

    /// [`Cx::grouped_linear`] with quantised weights [e, n, c], widened to the type of `x`.
    ///
    /// # Errors
    /// When sizes or types do not fit.
    pub fn grouped_linear_quantized(
        &mut self,
        x: &Tensor,
        weight: Quantized<'_>,
        offsets: &Tensor,
        bias: Option<&Tensor>,
    ) -> Result<Tensor> {
        self.grouped_linear_quantized_beside(x, weight, offsets, bias, None)
    }

    /// [`Cx::grouped_linear_lora`] with quantised weights [e, n, c].
    ///
    /// # Errors
    /// When sizes or types do not fit.
    pub fn grouped_linear_lora_quantized(
        &mut self,
        x: &Tensor,
        weight: Quantized<'_>,
        offsets: &Tensor,
        bias: Option<&Tensor>,
        lora: Lora<'_>,
    ) -> Result<Tensor> {
        const OP: &str = "grouped_linear_lora_quantized";
        let shape = weight.parts(OP)?.shape;
        check_grouped(OP, x, &shape, offsets, bias)?;
        let branch = GroupedBranch::new(self, OP, x, &shape, offsets, lora)?;
        self.grouped_linear_quantized_beside(x, weight, offsets, bias, Some(&branch))
    }

    fn grouped_linear_quantized_beside(
        &mut self,
        x: &Tensor,
        weight: Quantized<'_>,
        offsets: &Tensor,
        bias: Option<&Tensor>,
        branch: Option<&GroupedBranch>,
    ) -> Result<Tensor> {
        const OP: &str = "grouped_linear_quantized";
        let parts = weight.parts(OP)?;
        check_grouped(OP, x, &parts.shape, offsets, bias)?;
        let (rows, out) = (x.dims()[0], parts.shape[1]);
        let (worker, dtype) = (self.worker(), x.dtype());
        let dense = worker.contiguous(x)?.detach();
        let offsets = worker.contiguous(offsets)?.detach();
        let y = worker.alloc(OP, dtype, Shape::new(&[rows, out])?)?;
        let wide = parts.widen(worker, OP, dtype)?;
        let low = GroupedBranch::pair(branch);
        multiply_groups_beside(
            worker,
            [&dense, &transposed(&wide)],
            low.as_ref().map(|pair| pair.each_ref()),
            &offsets,
            &y,
            false,
        )?;
        drop((wide, dense, low));
        if let Some(bias) = bias {
            add_bias(worker, &y, bias, &offsets)?;
        }
        let branch_back = GroupedBranch::back(self, branch);
        let kept = self.tracks(&[x]).then_some(parts);
        let has_bias = bias.is_some();
        let inputs = std::iter::once(x).chain(bias);
        let inputs: Vec<&Tensor> = inputs.chain(GroupedBranch::tensors(branch)).collect();
        self.record_one(OP, &inputs, y, move |bx| {
            let dy = bx.dy()?;
            if has_bias && bx.needs(1) {
                let ones = bx.worker().full(dtype, Shape::new(&[rows, 1])?, 1.0)?;
                grouped_gradient(bx, 1, &ones, &dy, &offsets)?;
            }
            let low = match branch_back {
                Some(branch) => branch.run(bx, 1 + usize::from(has_bias), &dy, &offsets)?,
                None => None,
            };
            let Some(parts) = kept else {
                return Ok(());
            };
            bx.give_into(0, |worker, dx, adds| {
                let wide = parts.widen(worker, OP, dtype)?;
                let low = low.as_ref().map(|pair| pair.each_ref());
                multiply_groups_beside(worker, [&dy, &wide], low, &offsets, dx, adds)
            })
        })
    }
}
