//! A linear map, or one per expert, that may carry a trainable low-rank branch.

use roundpipe::ops::{Lora, ProjectionInput};
use roundpipe::{Cx, Module, Param, ParamVisitor, Params, Tensor, TensorResult};

use super::{Maker, Weight};

/// The trainable branch beside a frozen weight: y += scale · (dropout(x) Aᵀ) Bᵀ.
#[derive(Debug, Clone)]
pub(crate) struct Adapter {
    /// [rank, in], or [experts, rank, in].
    pub(crate) a: Param,
    /// [out, rank], or [experts, out, rank].
    pub(crate) b: Param,
    pub(crate) scale: f64,
    pub(crate) dropout: f64,
}

impl Adapter {
    /// The branch with its matrices on a worker.
    fn branch<'t>(&self, a: &'t Tensor, b: &'t Tensor) -> Lora<'t> {
        Lora {
            a,
            b,
            scale: self.scale,
            dropout: self.dropout,
        }
    }
}

/// y = x Wᵀ + b, plus the branch.
#[derive(Debug, Clone)]
pub(crate) struct Projection {
    /// [out, in], or [experts, out, in].
    pub(crate) weight: Weight,
    /// [out], or [experts, out].
    pub(crate) bias: Option<Param>,
    pub(crate) adapter: Option<Adapter>,
}

impl Projection {
    pub(crate) fn new(
        make: &mut Maker,
        dims: &[usize],
        bias: bool,
        std: f64,
    ) -> TensorResult<Self> {
        let weight = Weight::Whole(make.linear(dims, std)?);
        let bias = if bias {
            Some(make.full(&dims[..dims.len() - 1], 0.0)?)
        } else {
            None
        };
        Ok(Self {
            weight,
            bias,
            adapter: None,
        })
    }

    /// Weight and bias on the worker.
    pub(crate) fn tensors(&self, cx: &mut Cx) -> TensorResult<(Tensor, Option<Tensor>)> {
        let bias = self.bias.as_ref().map(|bias| cx.get(bias)).transpose()?;
        let weight = match &self.weight {
            Weight::Whole(weight) => cx.get(weight)?,
            Weight::Quantized(weight) => {
                let parts = weight.get(cx)?;
                cx.dequantize(parts.parts(), self.weight.dtype())?
            }
        };
        Ok((weight, bias))
    }

    /// As [`Projection::forward`], in fp8 where the engine asks for it and the weight is whole.
    pub(crate) fn project(&self, cx: &mut Cx, input: &ProjectionInput) -> TensorResult<Tensor> {
        let Weight::Whole(weight) = &self.weight else {
            return self.forward(cx, input.tensor());
        };
        let bias = self.bias.as_ref().map(|bias| cx.get(bias)).transpose()?;
        let weight = cx.get(weight)?;
        let Some(adapter) = &self.adapter else {
            return cx.projection(input, &weight, bias.as_ref());
        };
        let (a, b) = (cx.get(&adapter.a)?, cx.get(&adapter.b)?);
        cx.projection_lora(input, &weight, bias.as_ref(), adapter.branch(&a, &b))
    }

    /// Rows sorted by expert, `offsets` between them, times each expert's matrix.
    pub(crate) fn grouped(
        &self,
        cx: &mut Cx,
        rows: &Tensor,
        offsets: &Tensor,
    ) -> TensorResult<Tensor> {
        let bias = self.bias.as_ref().map(|bias| cx.get(bias)).transpose()?;
        let bias = bias.as_ref();
        let tensors = match &self.adapter {
            Some(adapter) => Some((adapter, cx.get(&adapter.a)?, cx.get(&adapter.b)?)),
            None => None,
        };
        let lora = tensors.as_ref().map(|(adapter, a, b)| adapter.branch(a, b));
        match (&self.weight, lora) {
            (Weight::Whole(weight), None) => {
                let weight = cx.get(weight)?;
                cx.grouped_linear(rows, &weight, offsets, bias)
            }
            (Weight::Whole(weight), Some(lora)) => {
                let weight = cx.get(weight)?;
                cx.grouped_linear_lora(rows, &weight, offsets, bias, lora)
            }
            (Weight::Quantized(weight), None) => {
                let weight = weight.get(cx)?;
                cx.grouped_linear_quantized(rows, weight.parts(), offsets, bias)
            }
            (Weight::Quantized(weight), Some(lora)) => {
                let weight = weight.get(cx)?;
                cx.grouped_linear_lora_quantized(rows, weight.parts(), offsets, bias, lora)
            }
        }
    }

    /// Shows experts' matrices, which are parameters of one module in transformers: `name` and
    /// `name_bias`.
    pub(crate) fn visit_stacked(&self, visit: &mut ParamVisitor<'_>, name: &str) {
        self.weight.visit(visit, name);
        visit.maybe(&format!("{name}_bias"), self.bias.as_ref());
        self.visit_adapter(visit, &format!("{name}."));
    }

    fn visit_adapter(&self, visit: &mut ParamVisitor<'_>, prefix: &str) {
        if let Some(adapter) = &self.adapter {
            visit.param(&format!("{prefix}lora_A.weight"), &adapter.a);
            visit.param(&format!("{prefix}lora_B.weight"), &adapter.b);
        }
    }
}

impl Params for Projection {
    fn visit(&self, visit: &mut ParamVisitor<'_>) {
        self.weight.visit(visit, "weight");
        visit.maybe("bias", self.bias.as_ref());
        self.visit_adapter(visit, "");
    }
}

impl Module for Projection {
    /// In the working type, for a router; those that take part in fp8 are computed by
    /// [`Projection::project`].
    fn forward(&self, cx: &mut Cx, x: &Tensor) -> TensorResult<Tensor> {
        let bias = self.bias.as_ref().map(|bias| cx.get(bias)).transpose()?;
        let bias = bias.as_ref();
        let weight = match &self.weight {
            Weight::Whole(weight) => Ok(cx.get(weight)?),
            Weight::Quantized(weight) => Err(weight.get(cx)?),
        };
        let Some(adapter) = &self.adapter else {
            return match weight {
                Ok(weight) => cx.linear(x, &weight, bias),
                Err(weight) => cx.linear_quantized(x, weight.parts(), bias),
            };
        };
        let (a, b) = (cx.get(&adapter.a)?, cx.get(&adapter.b)?);
        let lora = adapter.branch(&a, &b);
        match weight {
            Ok(weight) => cx.linear_lora(x, &weight, bias, lora),
            Err(weight) => cx.linear_lora_quantized(x, weight.parts(), bias, lora),
        }
    }
}
