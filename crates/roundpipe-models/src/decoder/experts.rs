//! A block's experts: routing, two grouped products, adding up.

use roundpipe::kernel::Glu;
use roundpipe::ops::{RouteWeights, Routing};
use roundpipe::{Cx, DType, Module, Tensor, TensorResult};

use super::inputs::wants_logits;
use super::padding::REAL;
use super::{Flow, Maker, Projection, optional, take};
use crate::config::{Family, ModelConfig, MoeConfig};

/// Router and experts of a block.
#[derive(Debug, Clone)]
pub(crate) struct Experts {
    /// [experts, H].
    pub(crate) router: Projection,
    /// [experts, 2 · inner, H].
    pub(crate) gate_up: Projection,
    /// [experts, H, inner].
    pub(crate) down: Projection,
    /// The router's name in transformers: GPT-OSS has its own.
    pub(crate) router_name: &'static str,
    top_k: usize,
    weights: RouteWeights,
    glu: Glu,
    count: bool,
}

impl Experts {
    pub(crate) fn new(
        config: &ModelConfig,
        moe: &MoeConfig,
        make: &mut Maker,
        [into, back]: [f64; 2],
    ) -> TensorResult<Self> {
        let (e, inner, hidden) = (moe.experts, moe.intermediate, config.hidden);
        Ok(Self {
            router: Projection::new(make, &[e, hidden], moe.bias, into)?,
            gate_up: Projection::new(make, &[e, 2 * inner, hidden], moe.bias, into)?,
            down: Projection::new(make, &[e, hidden, inner], moe.bias, back)?,
            router_name: if config.family == Family::GptOss {
                "mlp.router"
            } else {
                "mlp.gate"
            },
            top_k: moe.top_k,
            weights: moe.weights,
            glu: moe.glu,
            count: moe.aux_coef > 0.0,
        })
    }

    /// The experts' sum for x [B, S, H]; where a training loss or the caller will want them, `aux.*`
    /// are added to the flow.
    pub(crate) fn forward(&self, cx: &mut Cx, x: &Tensor, flow: &mut Flow) -> TensorResult<Tensor> {
        let flat = cx.reshape(x, &[-1, x.dims()[2] as isize])?;
        let logits = self.router.forward(cx, &flat)?;
        let routing = cx.moe_route(&logits, self.top_k, self.weights)?;
        let is_wanted = cx.is_training() || wants_logits(flow);
        if self.count && is_wanted && flow.contains_key("labels") {
            count(cx, &logits, &routing, flow)?;
        }
        drop(logits);
        let rows = cx.moe_dispatch(&flat, &routing)?;
        drop(flat);
        let both = self.gate_up.grouped(cx, &rows, routing.offsets())?;
        drop(rows);
        let inner = match self.glu {
            Glu::Silu => cx.swiglu_packed(&both)?,
            Glu::GeluTanh => cx.geglu_packed(&both)?,
            Glu::Clamped { alpha, limit } => cx.swiglu_clamped_interleaved(&both, alpha, limit)?,
        };
        drop(both);
        let down = self.down.grouped(cx, &inner, routing.offsets())?;
        drop(inner);
        let out = cx.moe_combine(&down, &routing)?;
        let dims: Vec<isize> = x.dims().iter().map(|d| *d as isize).collect();
        cx.reshape(&out, &dims)
    }
}

/// Adds how often each expert was chosen and the sum of its probabilities to the flow.
fn count(cx: &mut Cx, logits: &Tensor, routing: &Routing, flow: &mut Flow) -> TensorResult<()> {
    let real = optional(flow, REAL)?;
    let counts = match &real {
        Some(real) => choices_of_real(cx, routing, real)?,
        None => choices(cx, routing)?,
    };
    let wide = cx.cast(logits, DType::F32)?;
    let mut shares = cx.softmax(&wide, -1)?;
    if let Some(real) = &real {
        let column = cx.unsqueeze(real, 1)?;
        shares = cx.mul(&shares, &column)?;
    }
    let shares = cx.sum(&shares, &[0], false)?;
    for (name, value) in [("aux.counts", counts), ("aux.shares", shares)] {
        let sum = match flow.contains_key(name) {
            true => cx.add(&take(flow, name)?, &value)?,
            false => value,
        };
        flow.insert(name.into(), sum.into());
    }
    Ok(())
}

/// How often each expert was chosen, [experts] (f32).
fn choices(cx: &mut Cx, routing: &Routing) -> TensorResult<Tensor> {
    let experts = routing.experts();
    let bounds = cx.cast(routing.offsets(), DType::F32)?;
    let (ends, starts) = (
        cx.narrow(&bounds, 0, 1, experts)?,
        cx.narrow(&bounds, 0, 0, experts)?,
    );
    cx.sub(&ends, &starts)
}

/// The same by the tokens whose `real` [tokens] is 1.
fn choices_of_real(cx: &mut Cx, routing: &Routing, real: &Tensor) -> TensorResult<Tensor> {
    let (tokens, top_k) = (routing.tokens(), routing.top_k());
    let column = cx.unsqueeze(real, 1)?;
    let each = cx.expand(&column, &[tokens, top_k])?;
    let each = cx.reshape(&each, &[-1])?;
    let chosen = cx.reshape(routing.choice(), &[-1])?;
    let none = cx.zeros(DType::F32, &[routing.experts()])?;
    cx.index_add(&none, 0, &chosen, &each)
}
