//! Recurrent layers: LSTM and GRU, composed of linear layers and gates.
//!
//! A cell is one step; a layer runs it over a sequence `[batch, seq, inputs]`, batch first, from
//! zeros, and gives the hidden state after every step. Several layers, or other directions, are
//! modules in a row. Names and orders of the gates are PyTorch's.

use roundpipe_tensor::{Cx, Error, Param, Result, Tensor};

use super::Init;
use crate::layer::{Module, ParamVisitor, Params};

/// The weights of a cell with so many gates.
#[derive(Debug, Clone)]
pub struct RecurrentWeights {
    /// For inputs, gate after gate: `[gates · hidden, inputs]`.
    pub weight_ih: Param,
    /// For the hidden state: `[gates · hidden, hidden]`.
    pub weight_hh: Param,
    /// `[gates · hidden]`.
    pub bias_ih: Option<Param>,
    /// `[gates · hidden]`.
    pub bias_hh: Option<Param>,
}

impl RecurrentWeights {
    fn new(
        init: &mut Init,
        gates: usize,
        inputs: usize,
        hidden: usize,
        bias: bool,
    ) -> Result<Self> {
        let bound = 1.0 / (hidden.max(1) as f64).sqrt();
        let rows = gates * hidden;
        let weight_ih = init.uniform(&[rows, inputs], bound)?;
        let weight_hh = init.uniform(&[rows, hidden], bound)?;
        let mut drawn = || bias.then(|| init.uniform(&[rows], bound)).transpose();
        let (bias_ih, bias_hh) = (drawn()?, drawn()?);
        Ok(Self {
            weight_ih,
            weight_hh,
            bias_ih,
            bias_hh,
        })
    }

    fn hidden(&self) -> usize {
        self.weight_hh.shape()[1]
    }

    fn visit(&self, suffix: &str, visit: &mut ParamVisitor<'_>) {
        visit.param(&format!("weight_ih{suffix}"), &self.weight_ih);
        visit.param(&format!("weight_hh{suffix}"), &self.weight_hh);
        visit.maybe(&format!("bias_ih{suffix}"), self.bias_ih.as_ref());
        visit.maybe(&format!("bias_hh{suffix}"), self.bias_hh.as_ref());
    }

    /// What inputs give to the gates: of one step, or of all steps at once.
    fn of_input(&self, cx: &mut Cx, x: &Tensor) -> Result<Tensor> {
        let weight = cx.get(&self.weight_ih)?;
        let bias = self.bias_ih.as_ref().map(|b| cx.get(b)).transpose()?;
        cx.linear(x, &weight, bias.as_ref())
    }

    /// What the hidden state gives to the gates.
    fn of_hidden(&self, cx: &mut Cx, hidden: &Tensor) -> Result<Tensor> {
        let weight = cx.get(&self.weight_hh)?;
        let bias = self.bias_hh.as_ref().map(|b| cx.get(b)).transpose()?;
        cx.linear(hidden, &weight, bias.as_ref())
    }
}

/// Runs `step` over a sequence: the share of the inputs in the gates of each step, and the state
/// before it, give the state after it, whose first tensor is the output.
fn over_steps<const N: usize>(
    cx: &mut Cx,
    op: &'static str,
    weights: &RecurrentWeights,
    x: &Tensor,
    step: impl Fn(&mut Cx, &Tensor, [Tensor; N]) -> Result<[Tensor; N]>,
) -> Result<Tensor> {
    let [batch, steps, _] = *x.dims() else {
        let what = format!("{} is no [batch, seq, inputs]", x.shape());
        return Err(Error::invalid(op, what));
    };
    if steps == 0 {
        return cx.zeros(x.dtype(), &[batch, 0, weights.hidden()]);
    }
    let inputs = weights.of_input(cx, x)?;
    let zeros = cx.zeros(x.dtype(), &[batch, weights.hidden()])?;
    let mut state: [Tensor; N] = std::array::from_fn(|_| zeros.clone());
    let mut outputs = Vec::with_capacity(steps);
    for at in 0..steps {
        let input = cx.select(&inputs, 1, at)?;
        state = step(cx, &input, state)?;
        outputs.push(state[0].clone());
    }
    cx.stack(&outputs.iter().collect::<Vec<_>>(), 1)
}

/// One step of an LSTM.
#[derive(Debug, Clone)]
pub struct LstmCell(
    /// Gates: input, forget, cell, output.
    pub RecurrentWeights,
);

impl LstmCell {
    /// Uniform values in ±1/√hidden, as PyTorch does.
    ///
    /// # Errors
    /// When the system has no memory.
    pub fn new(init: &mut Init, inputs: usize, hidden: usize, bias: bool) -> Result<Self> {
        Ok(Self(RecurrentWeights::new(init, 4, inputs, hidden, bias)?))
    }

    /// The hidden state and the cell's state after `x: [batch, inputs]`, from those before it.
    ///
    /// # Errors
    /// When shapes or types do not fit.
    pub fn step(&self, cx: &mut Cx, x: &Tensor, state: [Tensor; 2]) -> Result<[Tensor; 2]> {
        let input = self.0.of_input(cx, x)?;
        self.gated(cx, &input, state)
    }

    fn gated(&self, cx: &mut Cx, input: &Tensor, state: [Tensor; 2]) -> Result<[Tensor; 2]> {
        let [hidden, cell] = state;
        let recurrent = self.0.of_hidden(cx, &hidden)?;
        let gates = cx.add(input, &recurrent)?;
        let size = self.0.hidden();
        let gate = |cx: &mut Cx, i: usize| cx.narrow(&gates, -1, i * size, size);
        let [i, f, g, o] = [gate(cx, 0)?, gate(cx, 1)?, gate(cx, 2)?, gate(cx, 3)?];
        let [i, f, o] = [cx.sigmoid(&i)?, cx.sigmoid(&f)?, cx.sigmoid(&o)?];
        let g = cx.tanh(&g)?;
        let kept = cx.mul(&f, &cell)?;
        let new = cx.mul(&i, &g)?;
        let cell = cx.add(&kept, &new)?;
        let shown = cx.tanh(&cell)?;
        let hidden = cx.mul(&o, &shown)?;
        Ok([hidden, cell])
    }
}

impl Params for LstmCell {
    fn visit(&self, visit: &mut ParamVisitor<'_>) {
        self.0.visit("", visit);
    }
}

/// An LSTM over a sequence: `[batch, seq, inputs]` to `[batch, seq, hidden]`.
#[derive(Debug, Clone)]
pub struct Lstm {
    /// One step of it.
    pub cell: LstmCell,
}

impl Lstm {
    /// As [`LstmCell::new`].
    ///
    /// # Errors
    /// When the system has no memory.
    pub fn new(init: &mut Init, inputs: usize, hidden: usize, bias: bool) -> Result<Self> {
        let cell = LstmCell::new(init, inputs, hidden, bias)?;
        Ok(Self { cell })
    }
}

impl Params for Lstm {
    fn visit(&self, visit: &mut ParamVisitor<'_>) {
        self.cell.0.visit("_l0", visit);
    }
}

impl Module for Lstm {
    fn forward(&self, cx: &mut Cx, x: &Tensor) -> Result<Tensor> {
        over_steps(cx, "lstm", &self.cell.0, x, |cx, input, state| {
            self.cell.gated(cx, input, state)
        })
    }
}

/// One step of a GRU.
#[derive(Debug, Clone)]
pub struct GruCell(
    /// Gates: reset, update, new.
    pub RecurrentWeights,
);

impl GruCell {
    /// Uniform values in ±1/√hidden, as PyTorch does.
    ///
    /// # Errors
    /// When the system has no memory.
    pub fn new(init: &mut Init, inputs: usize, hidden: usize, bias: bool) -> Result<Self> {
        Ok(Self(RecurrentWeights::new(init, 3, inputs, hidden, bias)?))
    }

    /// The hidden state after `x: [batch, inputs]`, from the one before it.
    ///
    /// # Errors
    /// When shapes or types do not fit.
    pub fn step(&self, cx: &mut Cx, x: &Tensor, hidden: Tensor) -> Result<Tensor> {
        let input = self.0.of_input(cx, x)?;
        let [hidden] = self.gated(cx, &input, [hidden])?;
        Ok(hidden)
    }

    fn gated(&self, cx: &mut Cx, input: &Tensor, state: [Tensor; 1]) -> Result<[Tensor; 1]> {
        let [hidden] = state;
        let recurrent = self.0.of_hidden(cx, &hidden)?;
        let size = self.0.hidden();
        let both = 2 * size;
        // Reset and update add both shares; the reset gate comes between those of the new state.
        let from_input = cx.narrow(input, -1, 0, both)?;
        let from_hidden = cx.narrow(&recurrent, -1, 0, both)?;
        let gates = cx.add(&from_input, &from_hidden)?;
        let gates = cx.sigmoid(&gates)?;
        let reset = cx.narrow(&gates, -1, 0, size)?;
        let update = cx.narrow(&gates, -1, size, size)?;
        let new_input = cx.narrow(input, -1, both, size)?;
        let new_hidden = cx.narrow(&recurrent, -1, both, size)?;
        let new_hidden = cx.mul(&reset, &new_hidden)?;
        let new = cx.add(&new_input, &new_hidden)?;
        let new = cx.tanh(&new)?;
        // new + update · (hidden - new).
        let change = cx.sub(&hidden, &new)?;
        let change = cx.mul(&update, &change)?;
        Ok([cx.add(&new, &change)?])
    }
}

impl Params for GruCell {
    fn visit(&self, visit: &mut ParamVisitor<'_>) {
        self.0.visit("", visit);
    }
}

/// A GRU over a sequence: `[batch, seq, inputs]` to `[batch, seq, hidden]`.
#[derive(Debug, Clone)]
pub struct Gru {
    /// One step of it.
    pub cell: GruCell,
}

impl Gru {
    /// As [`GruCell::new`].
    ///
    /// # Errors
    /// When the system has no memory.
    pub fn new(init: &mut Init, inputs: usize, hidden: usize, bias: bool) -> Result<Self> {
        let cell = GruCell::new(init, inputs, hidden, bias)?;
        Ok(Self { cell })
    }
}

impl Params for Gru {
    fn visit(&self, visit: &mut ParamVisitor<'_>) {
        self.cell.0.visit("_l0", visit);
    }
}

impl Module for Gru {
    fn forward(&self, cx: &mut Cx, x: &Tensor) -> Result<Tensor> {
        over_steps(cx, "gru", &self.cell.0, x, |cx, input, state| {
            self.cell.gated(cx, input, state)
        })
    }
}
