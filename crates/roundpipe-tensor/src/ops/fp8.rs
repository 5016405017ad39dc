//! Products of 8-bit floats, for linear maps that take part in [`Cx::with_fp8`].
//!
//! y = x Wᵀ multiplies x and W rounded to E4M3, with a scale per row of x and per row of W; the
//! gradient dx = dy W multiplies dy in E5M2, a scale per row, and W in E4M3 with a scale per
//! *column*, since those are the rows that the sum leaves. So W is quantised once for each product,
//! the second time transposed, which is also the layout that tensor cores want. The gradient of W is
//! a product of dy and x as they are: its sums run over tokens, whose scales could not be taken out
//! of them.
//!
//! Codes are made in working memory right before their product. A tape keeps x and W as
//! [`Cx::linear`] does, so a recompute and a plain tape give the same bits.
//!
//! # What it costs
//! Beside the products, for m tokens and W of n by k in bf16: x takes 3 m k bytes of traffic, once
//! for the maps that share it ([`ProjectionInput`]); W 3 n k in a forward and 5 n k in a backward,
//! where it is read for its magnitudes first; dy 3 m n. At 4 TB/s and 1,200 TFLOP/s, about what an
//! H200 reaches, quantising takes a quarter as long as the product with 16,384 tokens and k = n =
//! 2,048, and less than a tenth with n = 6,144.

use super::product::{Branch, Lora, bias_grad, check_linear, check_lora, transposed, weight_grad};
use crate::cx::{Cx, same_dtype};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::fp8::Fp8;
use crate::kernel::Kernel;
use crate::shape::{Layout, Shape};
use crate::tensor::Tensor;
use crate::worker::Worker;

/// Sizes of a weight must be multiples of this: 16 bytes, which cuBLASLt asks for.
const SIZE_STEP: usize = 16;

/// Rows as codes with a scale each; [`fp8`](crate::fp8) says what they mean.
#[derive(Debug, Clone)]
pub struct Fp8Rows {
    /// u8 [rows, columns].
    pub codes: Tensor,
    /// f32 [rows].
    pub scales: Tensor,
    /// The format of the codes.
    pub format: Fp8,
}

/// What one or more projections read: a tensor, and its rows in fp8 where they take part.
#[derive(Debug)]
pub struct ProjectionInput {
    x: Tensor,
    rows: Option<Fp8Rows>,
}

impl ProjectionInput {
    /// The tensor as it was given.
    pub fn tensor(&self) -> &Tensor {
        &self.x
    }
}

impl Cx {
    /// The rows of x [r, c] as codes and scales, without a gradient: r and c are multiples of 16. The
    /// transpose of a dense matrix is quantised where it lies.
    ///
    /// # Errors
    /// When sizes or types do not fit.
    pub fn fp8_rows(&mut self, x: &Tensor, format: Fp8) -> Result<Fp8Rows> {
        const OP: &str = "fp8_rows";
        if x.rank() != 2 || !takes_type(x.dtype()) || !x.dims().iter().all(|size| fits(*size)) {
            return Err(refused(OP, x));
        }
        let is_turned = transposed(x).is_contiguous();
        let x = match is_turned {
            true => x.clone(),
            false => self.worker().contiguous(x)?,
        };
        quantize(self.worker(), &x, format)
    }

    /// `x` for projections. Where they are to run in fp8 ([`Cx::with_fp8`]) it is quantised here,
    /// once for all that read it.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn projection_input(&mut self, x: &Tensor) -> Result<ProjectionInput> {
        let columns = x.dims().last().copied().unwrap_or(0);
        let takes_part = self.uses_fp8() && takes_type(x.dtype()) && fits(columns);
        let x = match takes_part {
            true => self.contiguous(x)?,
            false => x.clone(),
        };
        let rows = match takes_part {
            true => Some(quantize(self.worker(), &as_rows(&x)?, Fp8::E4M3)?),
            false => None,
        };
        Ok(ProjectionInput { x, rows })
    }

    /// [`Cx::linear`] for a linear map that takes part in [`Cx::with_fp8`]: in fp8 where that is
    /// asked for and the weight's sizes are multiples of 16, as any other otherwise.
    ///
    /// # Errors
    /// As [`Cx::linear`].
    pub fn projection(
        &mut self,
        input: &ProjectionInput,
        weight: &Tensor,
        bias: Option<&Tensor>,
    ) -> Result<Tensor> {
        match &input.rows {
            Some(rows) if takes_part(weight) => {
                self.linear_of_rows(&input.x, rows, weight, bias, None)
            }
            _ => self.linear(&input.x, weight, bias),
        }
    }

    /// [`Cx::projection`] with a LoRA branch beside it, which stays in the working type.
    ///
    /// # Errors
    /// As [`Cx::linear_lora`].
    pub fn projection_lora(
        &mut self,
        input: &ProjectionInput,
        weight: &Tensor,
        bias: Option<&Tensor>,
        lora: Lora<'_>,
    ) -> Result<Tensor> {
        let rows = input.rows.as_ref().filter(|_| takes_part(weight));
        let Some(rows) = rows else {
            return self.linear_lora(&input.x, weight, bias, lora);
        };
        const OP: &str = "linear_lora";
        check_linear(OP, &input.x, weight.shape(), bias)?;
        check_lora(OP, weight.shape(), lora)?;
        let branch = Branch::new(self, &input.x, lora)?;
        self.linear_of_rows(&input.x, rows, weight, bias, Some(&branch))
    }

    /// x Wᵀ + bias in fp8, whatever [`Cx::with_fp8`] says: x is f32, bf16 or f16, sizes of W are
    /// multiples of 16.
    ///
    /// # Errors
    /// When sizes or types do not fit.
    pub fn linear_fp8(
        &mut self,
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
    ) -> Result<Tensor> {
        const OP: &str = "linear_fp8";
        check_linear(OP, x, weight.shape(), bias)?;
        if !takes_type(x.dtype()) || !weight.dims().iter().all(|size| fits(*size)) {
            return Err(refused(OP, weight));
        }
        let dense = self.contiguous(x)?;
        let rows = quantize(self.worker(), &as_rows(&dense)?, Fp8::E4M3)?;
        self.linear_of_rows(&dense, &rows, weight, bias, None)
    }

    /// x Wᵀ + bias of an x that is dense and quantised already, and a branch on top.
    fn linear_of_rows(
        &mut self,
        x: &Tensor,
        rows: &Fp8Rows,
        weight: &Tensor,
        bias: Option<&Tensor>,
        branch: Option<&Branch>,
    ) -> Result<Tensor> {
        const OP: &str = "linear_fp8";
        same_dtype(OP, x, weight)?;
        let (flat_shape, out) = check_linear(OP, x, weight.shape(), bias)?;
        let dense_weight = self.worker().contiguous(weight)?.detach();
        let codes = quantize(self.worker(), &dense_weight, Fp8::E4M3)?;
        let y = Shape::new(&[flat_shape[0], dense_weight.dims()[0]])?;
        let y = self.worker().alloc(OP, x.dtype(), y)?;
        multiply_into(self.worker(), rows, &codes, bias, &y, false)?;
        drop(codes);
        let branch_back = Branch::add(self, branch, &y)?;
        let y = y.relaid(Layout::contiguous(out));
        // As for `linear`: a frozen weight keeps no activations.
        let flat = x.relaid(Layout::contiguous(flat_shape)).detach();
        let flat = weight.requires_grad().then_some(flat);
        let has_bias = bias.is_some();
        let inputs = [x, weight].into_iter().chain(bias);
        let inputs: Vec<&Tensor> = inputs.chain(Branch::tensors(branch)).collect();
        self.record_one(OP, &inputs, y, move |bx| {
            let dy = bx.dy()?;
            let wide = Shape::new(&[flat_shape[0], dense_weight.dims()[0]])?;
            let dy = dy.relaid(Layout::contiguous(wide));
            if let Some(flat) = flat {
                weight_grad(bx, 1, &dy, &flat)?;
            }
            if has_bias && bx.needs(2) {
                bias_grad(bx, 2, &dy)?;
            }
            if let Some(branch) = branch_back {
                branch.run(bx, 2 + usize::from(has_bias), &dy)?;
            }
            if !bx.needs(0) {
                return Ok(());
            }
            let left = quantize(bx.worker(), &dy, Fp8::E5M2)?;
            drop(dy);
            bx.give_into(0, |worker, dx, adds| {
                let right = quantize(worker, &transposed(&dense_weight), Fp8::E4M3)?;
                let dx = dx.relaid(Layout::contiguous(flat_shape));
                multiply_into(worker, &left, &right, None, &dx, adds)
            })
        })
    }
}

/// Whether a size of a weight is one that fp8 products take.
fn fits(size: usize) -> bool {
    size > 0 && size.is_multiple_of(SIZE_STEP)
}

/// Whether a weight is one that fp8 products take.
fn takes_part(weight: &Tensor) -> bool {
    weight.rank() == 2 && weight.dims().iter().all(|size| fits(*size))
}

fn takes_type(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::BF16 | DType::F16)
}

fn refused(op: &'static str, matrix: &Tensor) -> Error {
    let what = format!(
        "{} {} is no matrix for fp8: sizes are multiples of {SIZE_STEP}, values f32, bf16 or f16",
        matrix.dtype(),
        matrix.shape()
    );
    Error::invalid(op, what)
}

/// A dense x [.., c] as [rows, c].
fn as_rows(x: &Tensor) -> Result<Tensor> {
    let columns = x.dims()[x.rank() - 1];
    let rows = x.dims()[..x.rank() - 1].iter().product();
    Ok(x.relaid(Layout::contiguous(Shape::new(&[rows, columns])?)))
}

/// Codes and scales of the rows of x [r, c], unrecorded.
fn quantize(worker: &Worker, x: &Tensor, format: Fp8) -> Result<Fp8Rows> {
    let kernel = Kernel::QuantizeRows(format);
    let codes = worker.alloc(kernel.name(), DType::U8, *x.shape())?;
    let scales = worker.alloc(kernel.name(), DType::F32, Shape::new(&[x.dims()[0]])?)?;
    worker.launch(&kernel, &[Some(x)], &[Some(&codes), Some(&scales)])?;
    Ok(Fp8Rows {
        codes,
        scales,
        format,
    })
}

/// y = left rightᵀ + bias, or y += it, unrecorded.
fn multiply_into(
    worker: &Worker,
    left: &Fp8Rows,
    right: &Fp8Rows,
    bias: Option<&Tensor>,
    y: &Tensor,
    accumulate: bool,
) -> Result<()> {
    let bias = bias.map(|bias| worker.contiguous(bias)).transpose()?;
    let kernel = Kernel::Fp8MatMul {
        left: left.format,
        right: right.format,
        accumulate,
    };
    let src = [
        Some(&left.codes),
        Some(&left.scales),
        Some(&right.codes),
        Some(&right.scales),
        bias.as_ref(),
    ];
    worker.launch(&kernel, &src, &[Some(y)])
}
