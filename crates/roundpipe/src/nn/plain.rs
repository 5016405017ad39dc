//! Layers without parameters: activations, pooling, shapes.

use roundpipe_tensor::kernel::PoolSpec;
use roundpipe_tensor::{Cx, Result, Tensor};

use crate::layer::{Module, ParamVisitor, Params};

/// Layers that apply one operation, with no settings of their own.
macro_rules! functions {
    ($($(#[doc = $doc:literal])+ $name:ident $op:ident)+) => {$(
        $(#[doc = $doc])+
        #[derive(Debug, Clone, Copy, Default)]
        pub struct $name;

        impl Params for $name {
            fn visit(&self, _: &mut ParamVisitor<'_>) {}
        }

        impl Module for $name {
            fn forward(&self, cx: &mut Cx, x: &Tensor) -> Result<Tensor> {
                cx.$op(x)
            }
        }
    )+};
}

functions! {
    /// max(x, 0).
    Relu relu
    /// x · Φ(x), exactly.
    Gelu gelu
    /// GELU approximated by tanh.
    GeluTanh gelu_tanh
    /// x · sigmoid(x).
    Silu silu
    /// The hyperbolic tangent.
    Tanh tanh
    /// 1 / (1 + e⁻ˣ).
    Sigmoid sigmoid
    /// The mean of each channel of `[n, c, h, w]`: `[n, c, 1, 1]`.
    GlobalAvgPool2d global_avg_pool2d
}

/// Layers with settings: their parameters are none.
macro_rules! without_params {
    ($($name:ident)+) => {$(
        impl Params for $name {
            fn visit(&self, _: &mut ParamVisitor<'_>) {}
        }
    )+};
}

without_params!(Identity Softmax Flatten MaxPool2d AvgPool2d AdaptiveAvgPool2d);

/// Its input.
#[derive(Debug, Clone, Copy, Default)]
pub struct Identity;

impl Module for Identity {
    fn forward(&self, _: &mut Cx, x: &Tensor) -> Result<Tensor> {
        Ok(x.clone())
    }
}

/// The softmax along a dimension.
#[derive(Debug, Clone, Copy)]
pub struct Softmax {
    /// The dimension; negative ones count from the end.
    pub dim: isize,
}

impl Module for Softmax {
    fn forward(&self, cx: &mut Cx, x: &Tensor) -> Result<Tensor> {
        cx.softmax(x, self.dim)
    }
}

/// Dimensions `first` to `last` as one; by default all but the batch.
#[derive(Debug, Clone, Copy)]
pub struct Flatten {
    /// The first of them; negative ones count from the end.
    pub first: isize,
    /// The last of them.
    pub last: isize,
}

impl Default for Flatten {
    fn default() -> Self {
        Self { first: 1, last: -1 }
    }
}

impl Module for Flatten {
    fn forward(&self, cx: &mut Cx, x: &Tensor) -> Result<Tensor> {
        cx.flatten(x, self.first, self.last)
    }
}

/// The largest value of each window of `[n, c, h, w]`.
#[derive(Debug, Clone, Copy)]
pub struct MaxPool2d(pub PoolSpec);

impl Module for MaxPool2d {
    fn forward(&self, cx: &mut Cx, x: &Tensor) -> Result<Tensor> {
        cx.max_pool2d(x, self.0)
    }
}

/// The mean of each window of `[n, c, h, w]`.
#[derive(Debug, Clone, Copy)]
pub struct AvgPool2d(pub PoolSpec);

impl Module for AvgPool2d {
    fn forward(&self, cx: &mut Cx, x: &Tensor) -> Result<Tensor> {
        cx.avg_pool2d(x, self.0)
    }
}

/// Means over as many windows as the output has places.
#[derive(Debug, Clone, Copy)]
pub struct AdaptiveAvgPool2d(pub [usize; 2]);

impl Module for AdaptiveAvgPool2d {
    fn forward(&self, cx: &mut Cx, x: &Tensor) -> Result<Tensor> {
        cx.adaptive_avg_pool2d(x, self.0)
    }
}

#[cfg(test)]
mod tests {
    use roundpipe_tensor::{Bytes, Cpu, DType, Worker};

    use super::*;
    use crate::nn::{GroupNorm, Init};

    /// Each layer is its operation: a wrong one would give other numbers or another shape.
    #[test]
    fn layers_without_settings_are_their_operations() {
        let worker = Worker::new(Cpu::new(Some(1)).unwrap(), Bytes::mib(4)).unwrap();
        let mut cx = Cx::infer(&worker);
        let values: Vec<f32> = (0..32).map(|i| i as f32 / 8.0 - 2.0).collect();
        let x = cx.tensor(&values, &[2, 1, 4, 4]).unwrap();
        let mut run = |module: &dyn Module| {
            let y = module.forward(&mut cx, &x).unwrap();
            (y.shape().dims().to_vec(), y.to_vec::<f32>().unwrap())
        };
        let whole = vec![2, 1, 4, 4];
        let close = |found: f32, want: f64| assert!((f64::from(found) - want).abs() < 1e-6);
        // The last value is 1.875.
        let last = 1.875_f64;
        let sigmoid = 1.0 / (1.0 + (-last).exp());
        for (module, want) in [
            (&Relu as &dyn Module, last),
            (&Silu, last * sigmoid),
            (&Sigmoid, sigmoid),
            (&Tanh, last.tanh()),
            (&Gelu, 1.818006822),
            (&Identity, last),
        ] {
            let (shape, values) = run(module);
            assert_eq!(shape, whole);
            close(values[31], want);
        }
        let near_gelu = run(&GeluTanh).1[31];
        assert!((near_gelu - 1.818).abs() < 1e-3 && near_gelu != run(&Gelu).1[31]);
        assert_eq!(run(&Flatten::default()).0, [2, 16]);
        assert_eq!(run(&Flatten { first: 0, last: -1 }).0, [32]);
        let (shape, values) = run(&MaxPool2d(PoolSpec::window([2, 2])));
        assert_eq!((shape, values[0]), (vec![2, 1, 2, 2], -2.0 + 5.0 / 8.0));
        let (shape, values) = run(&AvgPool2d(PoolSpec::window([2, 2])));
        assert_eq!((shape, values[0]), (vec![2, 1, 2, 2], -2.0 + 2.5 / 8.0));
        let (shape, values) = run(&AdaptiveAvgPool2d([1, 1]));
        assert_eq!(
            (shape, values.clone()),
            (vec![2, 1, 1, 1], run(&GlobalAvgPool2d).1)
        );
        assert_eq!(values[0], -2.0 + 7.5 / 8.0);
        let (_, values) = run(&Softmax { dim: -1 });
        close(values[..4].iter().sum(), 1.0);
        let norm = GroupNorm::new(&mut Init::new(1, DType::F32), 1, 1).unwrap();
        let (_, values) = run(&norm);
        close(values[..16].iter().sum(), 0.0);
    }
}
