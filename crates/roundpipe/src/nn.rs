//! Ready-made layers, named and shaped as in PyTorch.

mod attention;
mod conv;
mod plain;
mod recurrent;

use roundpipe_tensor::kernel::ConvSpec;
use roundpipe_tensor::ops::BatchNorm;
use roundpipe_tensor::{Cx, DType, Param, Result, RngKey, RngSite, Tensor};

pub use self::attention::MultiheadAttention;
pub use self::conv::{Conv1d, ConvTranspose2d};
pub use self::plain::{
    AdaptiveAvgPool2d, AvgPool2d, Flatten, Gelu, GeluTanh, GlobalAvgPool2d, Identity, MaxPool2d,
    Relu, Sigmoid, Silu, Softmax, Tanh,
};
pub use self::recurrent::{Gru, GruCell, Lstm, LstmCell, RecurrentWeights};
use crate::layer::{Module, ParamVisitor, Params};

/// Gives each parameter of a model its own random numbers, by the order in which they are made.
#[derive(Debug, Clone)]
pub struct Init {
    site: RngSite,
    dtype: DType,
}

impl Init {
    /// Numbers from `seed`, parameters of type `dtype`.
    pub fn new(seed: u64, dtype: DType) -> Self {
        // Step and microbatch that no training step uses, so that dropout draws other numbers.
        let site = RngSite {
            seed,
            step: u64::MAX,
            microbatch: u32::MAX,
            layer: 0,
            site: 0,
        };
        Self { site, dtype }
    }

    /// The type of the parameters.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Normal values around 0.
    ///
    /// # Errors
    /// When the shape is absurd or the system has no memory.
    pub fn normal(&mut self, dims: &[usize], std: f64) -> Result<Param> {
        self.site.site += 1;
        Param::normal(self.dtype, dims, std, self.site.key())
    }

    /// The key of the next random values, for those that are no parameter of their own.
    pub fn next_key(&mut self) -> RngKey {
        self.site.site += 1;
        self.site.key()
    }

    /// Uniform values in [-bound, bound).
    ///
    /// # Errors
    /// When the shape is absurd or the system has no memory.
    pub fn uniform(&mut self, dims: &[usize], bound: f64) -> Result<Param> {
        self.site.site += 1;
        Param::uniform(self.dtype, dims, bound, self.site.key())
    }

    /// One value everywhere.
    ///
    /// # Errors
    /// When the shape is absurd or the system has no memory.
    pub fn full(&mut self, dims: &[usize], value: f64) -> Result<Param> {
        Param::full(self.dtype, dims, value)
    }
}

/// y = x Wᵀ + b.
#[derive(Debug, Clone)]
pub struct Linear {
    /// `[out, in]`.
    pub weight: Param,
    /// `[out]`.
    pub bias: Option<Param>,
}

impl Linear {
    /// Uniform values in ±1/√in, as PyTorch does.
    ///
    /// # Errors
    /// When the system has no memory.
    pub fn new(init: &mut Init, inputs: usize, outputs: usize, bias: bool) -> Result<Self> {
        let bound = 1.0 / (inputs.max(1) as f64).sqrt();
        let weight = init.uniform(&[outputs, inputs], bound)?;
        let bias = if bias {
            Some(init.uniform(&[outputs], bound)?)
        } else {
            None
        };
        Ok(Self { weight, bias })
    }
}

impl Params for Linear {
    fn visit(&self, visit: &mut ParamVisitor<'_>) {
        visit.param("weight", &self.weight);
        visit.maybe("bias", self.bias.as_ref());
    }
}

impl Module for Linear {
    fn forward(&self, cx: &mut Cx, x: &Tensor) -> Result<Tensor> {
        let weight = cx.get(&self.weight)?;
        let bias = self.bias.as_ref().map(|b| cx.get(b)).transpose()?;
        cx.linear(x, &weight, bias.as_ref())
    }
}

/// Rows of a table by index.
#[derive(Debug, Clone)]
pub struct Embedding {
    /// `[count, width]`.
    pub weight: Param,
}

impl Embedding {
    /// Normal values with the given deviation.
    ///
    /// # Errors
    /// When the system has no memory.
    pub fn new(init: &mut Init, count: usize, width: usize, std: f64) -> Result<Self> {
        Ok(Self {
            weight: init.normal(&[count, width], std)?.embedding(),
        })
    }
}

impl Params for Embedding {
    fn visit(&self, visit: &mut ParamVisitor<'_>) {
        visit.param("weight", &self.weight);
    }
}

impl Module for Embedding {
    fn forward(&self, cx: &mut Cx, ids: &Tensor) -> Result<Tensor> {
        let weight = cx.get(&self.weight)?;
        cx.embedding(&weight, ids)
    }

    fn reads_rows(&self) -> bool {
        true
    }
}

/// Root-mean-square norm over the last dimension.
#[derive(Debug, Clone)]
pub struct RmsNorm {
    /// `[width]`.
    pub weight: Param,
    /// Added to the mean square.
    pub eps: f64,
}

impl RmsNorm {
    /// Ones.
    ///
    /// # Errors
    /// When the system has no memory.
    pub fn new(init: &mut Init, width: usize, eps: f64) -> Result<Self> {
        Ok(Self {
            weight: init.full(&[width], 1.0)?,
            eps,
        })
    }
}

impl Params for RmsNorm {
    fn visit(&self, visit: &mut ParamVisitor<'_>) {
        visit.param("weight", &self.weight);
    }
}

impl Module for RmsNorm {
    fn forward(&self, cx: &mut Cx, x: &Tensor) -> Result<Tensor> {
        let weight = cx.get(&self.weight)?;
        cx.rms_norm(x, Some(&weight), self.eps)
    }
}

/// Layer norm over the last dimension.
#[derive(Debug, Clone)]
pub struct LayerNorm {
    /// `[width]`.
    pub weight: Param,
    /// `[width]`.
    pub bias: Param,
    /// Added to the variance.
    pub eps: f64,
}

impl LayerNorm {
    /// Ones and zeros.
    ///
    /// # Errors
    /// When the system has no memory.
    pub fn new(init: &mut Init, width: usize, eps: f64) -> Result<Self> {
        Ok(Self {
            weight: init.full(&[width], 1.0)?,
            bias: init.full(&[width], 0.0)?,
            eps,
        })
    }
}

impl Params for LayerNorm {
    fn visit(&self, visit: &mut ParamVisitor<'_>) {
        visit.param("weight", &self.weight);
        visit.param("bias", &self.bias);
    }
}

impl Module for LayerNorm {
    fn forward(&self, cx: &mut Cx, x: &Tensor) -> Result<Tensor> {
        let (weight, bias) = (cx.get(&self.weight)?, cx.get(&self.bias)?);
        cx.layer_norm(x, Some(&weight), Some(&bias), self.eps)
    }
}

/// Layer norm over groups of channels of `[n, c, ..]`.
#[derive(Debug, Clone)]
pub struct GroupNorm {
    /// `[channels]`.
    pub weight: Param,
    /// `[channels]`.
    pub bias: Param,
    /// How many groups.
    pub groups: usize,
    /// Added to the variance.
    pub eps: f64,
}

impl GroupNorm {
    /// Ones and zeros, eps 1e-5, as PyTorch does.
    ///
    /// # Errors
    /// When the system has no memory.
    pub fn new(init: &mut Init, groups: usize, channels: usize) -> Result<Self> {
        Ok(Self {
            weight: init.full(&[channels], 1.0)?,
            bias: init.full(&[channels], 0.0)?,
            groups,
            eps: 1e-5,
        })
    }
}

impl Params for GroupNorm {
    fn visit(&self, visit: &mut ParamVisitor<'_>) {
        visit.param("weight", &self.weight);
        visit.param("bias", &self.bias);
    }
}

impl Module for GroupNorm {
    fn forward(&self, cx: &mut Cx, x: &Tensor) -> Result<Tensor> {
        let (weight, bias) = (cx.get(&self.weight)?, cx.get(&self.bias)?);
        cx.group_norm(x, self.groups, Some(&weight), Some(&bias), self.eps)
    }
}

/// 2-d convolution.
#[derive(Debug, Clone)]
pub struct Conv2d {
    /// `[out, in / groups, height, width]`.
    pub weight: Param,
    /// `[out]`.
    pub bias: Option<Param>,
    /// Stride, padding, dilation, groups.
    pub options: ConvSpec,
}

impl Conv2d {
    /// A square kernel; uniform values in ±1/√(in · kernel²), as PyTorch does.
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
        let each = inputs / options.groups.max(1);
        let dims = [outputs, each, kernel, kernel];
        let biases = bias.then_some(outputs);
        let (weight, bias) = conv::drawn(init, &dims, biases, each * kernel * kernel)?;
        Ok(Self {
            weight,
            bias,
            options,
        })
    }
}

impl Params for Conv2d {
    fn visit(&self, visit: &mut ParamVisitor<'_>) {
        visit.param("weight", &self.weight);
        visit.maybe("bias", self.bias.as_ref());
    }
}

impl Module for Conv2d {
    fn forward(&self, cx: &mut Cx, x: &Tensor) -> Result<Tensor> {
        let weight = cx.get(&self.weight)?;
        let bias = self.bias.as_ref().map(|b| cx.get(b)).transpose()?;
        cx.conv2d(x, &weight, bias.as_ref(), self.options)
    }
}

/// Batch norm over all dimensions but the second.
#[derive(Debug, Clone)]
pub struct BatchNorm2d {
    /// `[channels]`.
    pub weight: Param,
    /// `[channels]`.
    pub bias: Param,
    /// Running mean, f32; updated once per training pass.
    pub running_mean: Param,
    /// Running variance, f32; updated once per training pass.
    pub running_var: Param,
    /// Share of the new statistics in the running ones.
    pub momentum: f64,
    /// Added to the variance.
    pub eps: f64,
}

impl BatchNorm2d {
    /// PyTorch's defaults.
    ///
    /// # Errors
    /// When the system has no memory.
    pub fn new(init: &mut Init, channels: usize) -> Result<Self> {
        let acc = init.dtype().accumulator();
        Ok(Self {
            weight: init.full(&[channels], 1.0)?,
            bias: init.full(&[channels], 0.0)?,
            running_mean: Param::zeros(acc, &[channels])?.frozen(),
            running_var: Param::full(acc, &[channels], 1.0)?.frozen(),
            momentum: 0.1,
            eps: 1e-5,
        })
    }
}

impl Params for BatchNorm2d {
    fn visit(&self, visit: &mut ParamVisitor<'_>) {
        visit.param("weight", &self.weight);
        visit.param("bias", &self.bias);
        visit.param("running_mean", &self.running_mean);
        visit.param("running_var", &self.running_var);
    }
}

impl Module for BatchNorm2d {
    fn forward(&self, cx: &mut Cx, x: &Tensor) -> Result<Tensor> {
        let (weight, bias) = (cx.get(&self.weight)?, cx.get(&self.bias)?);
        let options = BatchNorm {
            momentum: self.momentum,
            eps: self.eps,
        };
        let running = Some((&self.running_mean, &self.running_var));
        cx.batch_norm(x, Some(&weight), Some(&bias), running, options)
    }
}

/// Zeroes elements at random while training.
#[derive(Debug, Clone, Copy)]
pub struct Dropout {
    /// Probability of zero.
    pub p: f64,
}

impl Params for Dropout {
    fn visit(&self, _: &mut ParamVisitor<'_>) {}
}

impl Module for Dropout {
    fn forward(&self, cx: &mut Cx, x: &Tensor) -> Result<Tensor> {
        cx.dropout(x, self.p)
    }
}

/// A function as a layer without parameters.
pub struct Func<F>(pub F);

impl<F> Params for Func<F> {
    fn visit(&self, _: &mut ParamVisitor<'_>) {}
}

impl<F: Fn(&mut Cx, &Tensor) -> Result<Tensor> + Send + Sync> Module for Func<F> {
    fn forward(&self, cx: &mut Cx, x: &Tensor) -> Result<Tensor> {
        (self.0)(cx, x)
    }
}
