//! Convolutions of sequences, transposed ones of images, and the first values of all convolutions.

use roundpipe_tensor::kernel::ConvSpec;
use roundpipe_tensor::{Cx, Param, Result, Tensor};

use super::Init;
use crate::layer::{Module, ParamVisitor, Params};

/// A weight, and a bias if there is one, uniform in ±1/√`fan`.
pub(super) fn drawn(
    init: &mut Init,
    dims: &[usize],
    outputs: Option<usize>,
    fan: usize,
) -> Result<(Param, Option<Param>)> {
    let bound = 1.0 / (fan.max(1) as f64).sqrt();
    let weight = init.uniform(dims, bound)?;
    let bias = outputs.map(|outputs| init.uniform(&[outputs], bound));
    Ok((weight, bias.transpose()?))
}

/// Convolution of `[n, c, length]`.
#[derive(Debug, Clone)]
pub struct Conv1d {
    /// `[out, in / groups, taps]`.
    pub weight: Param,
    /// `[out]`.
    pub bias: Option<Param>,
    /// Stride, padding and dilation of the second place (the width), and groups.
    pub options: ConvSpec,
}

impl Conv1d {
    /// Uniform values in ±1/√(in · taps), as PyTorch does.
    ///
    /// # Errors
    /// When the system has no memory.
    pub fn new(
        init: &mut Init,
        inputs: usize,
        outputs: usize,
        taps: usize,
        bias: bool,
        options: ConvSpec,
    ) -> Result<Self> {
        let each = inputs / options.groups.max(1);
        let biases = bias.then_some(outputs);
        let (weight, bias) = drawn(init, &[outputs, each, taps], biases, each * taps)?;
        Ok(Self {
            weight,
            bias,
            options,
        })
    }
}

impl Params for Conv1d {
    fn visit(&self, visit: &mut ParamVisitor<'_>) {
        visit.param("weight", &self.weight);
        visit.maybe("bias", self.bias.as_ref());
    }
}

impl Module for Conv1d {
    fn forward(&self, cx: &mut Cx, x: &Tensor) -> Result<Tensor> {
        let weight = cx.get(&self.weight)?;
        let bias = self.bias.as_ref().map(|b| cx.get(b)).transpose()?;
        cx.conv1d(x, &weight, bias.as_ref(), self.options)
    }
}

/// Transposed convolution of `[n, c, h, w]`, which makes images larger.
#[derive(Debug, Clone)]
pub struct ConvTranspose2d {
    /// `[in, out / groups, height, width]`.
    pub weight: Param,
    /// `[out]`.
    pub bias: Option<Param>,
    /// Stride, padding, dilation and groups of the convolution that it transposes.
    pub options: ConvSpec,
    /// Added to one side of the output, where several sizes have this input's.
    pub output_padding: [usize; 2],
}

impl ConvTranspose2d {
    /// A square kernel; uniform values in ±1/√(out / groups · kernel²), as PyTorch does.
    ///
    /// # Errors
    /// When the system has no memory.
    pub fn new(
        init: &mut Init,
        inputs: usize,
        outputs: usize,
        kernel: usize,
        bias: bool,
        options: ConvSpec,
    ) -> Result<Self> {
        let each = outputs / options.groups.max(1);
        let dims = [inputs, each, kernel, kernel];
        let (weight, bias) = drawn(init, &dims, bias.then_some(outputs), each * kernel * kernel)?;
        Ok(Self {
            weight,
            bias,
            options,
            output_padding: [0; 2],
        })
    }
}

impl Params for ConvTranspose2d {
    fn visit(&self, visit: &mut ParamVisitor<'_>) {
        visit.param("weight", &self.weight);
        visit.maybe("bias", self.bias.as_ref());
    }
}

impl Module for ConvTranspose2d {
    fn forward(&self, cx: &mut Cx, x: &Tensor) -> Result<Tensor> {
        let weight = cx.get(&self.weight)?;
        let bias = self.bias.as_ref().map(|b| cx.get(b)).transpose()?;
        let (options, more) = (self.options, self.output_padding);
        cx.conv_transpose2d(x, &weight, bias.as_ref(), options, more)
    }
}
