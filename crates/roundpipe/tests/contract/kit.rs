//! Small models and engines that the tests share.

use std::sync::Arc;

use roundpipe::engine::Builder;
use roundpipe::nn::{Func, Init, Linear};
use roundpipe::ops::CrossEntropy;
use roundpipe::optim::Sgd;
use roundpipe::{
    Bytes, Cpu, Cx, DType, Device, HostTensor, Module, Param, ParamVisitor, Params, Ring,
    RingOptions, RoundPipe, Sequential, Tensor, TensorResult, Tree,
};

pub fn cpus(count: usize) -> Vec<Arc<dyn Device>> {
    let workers = Cpu::workers(count, Some(1)).unwrap().into_iter();
    workers.map(|cpu| cpu as Arc<dyn Device>).collect()
}

pub fn ring(workers: usize) -> Ring {
    let options = RingOptions {
        memory: Some(Bytes::mib(16)),
        ..RingOptions::default()
    };
    Ring::new(&cpus(workers), &options).unwrap()
}

/// Four layers, from 4 features to 3 classes.
pub fn mlp(dtype: DType) -> Sequential {
    let mut init = Init::new(1, dtype);
    Sequential::new()
        .with(Linear::new(&mut init, 4, 8, true).unwrap())
        .with(Func(|cx: &mut Cx, x: &Tensor| cx.relu(x)))
        .with(Linear::new(&mut init, 8, 8, true).unwrap())
        .with(Linear::new(&mut init, 8, 3, true).unwrap())
}

/// A number to learn, times the input.
pub struct Scale(pub Param);

impl Params for Scale {
    fn visit(&self, visit: &mut ParamVisitor<'_>) {
        visit.param("w", &self.0);
    }
}

impl Module for Scale {
    fn forward(&self, cx: &mut Cx, x: &Tensor) -> TensorResult<Tensor> {
        let w = cx.get(&self.0)?;
        cx.mul(x, &w)
    }
}

pub fn number(dtype: DType, value: f64) -> Param {
    Param::full(dtype, &[1], value).unwrap()
}

/// A model of one number, and the number.
pub fn scale(dtype: DType, value: f64) -> (Sequential, Param) {
    let w = number(dtype, value);
    (Sequential::new().with(Scale(w.clone())), w)
}

/// An engine on `workers` processors, with plain descent.
pub fn builder(model: Sequential, workers: usize) -> Builder<Sequential> {
    RoundPipe::builder(model)
        .name("net")
        .devices(cpus(workers))
        .memory(Bytes::mib(16))
        .optimizer(Sgd::default())
        .optimizer_threads(1)
}

pub fn engine(model: Sequential, workers: usize) -> RoundPipe {
    builder(model, workers).build().unwrap()
}

/// Numbers that differ.
pub fn rows(count: usize, columns: usize) -> HostTensor {
    let values: Vec<f32> = (0..count * columns)
        .map(|i| ((i * 7) % 11) as f32 / 11.0 - 0.4)
        .collect();
    HostTensor::from_slice(&values, &[count, columns]).unwrap()
}

pub fn ones(count: usize) -> HostTensor {
    HostTensor::from_slice(&vec![1.0f32; count], &[count, 1]).unwrap()
}

pub fn classes(labels: &[i64]) -> HostTensor {
    HostTensor::from_slice(labels, &[labels.len()]).unwrap()
}

pub fn sum(cx: &mut Cx, output: Tree, _: Tree) -> TensorResult<Tensor> {
    cx.sum_all(&output.tensor()?)
}

pub fn cross_entropy(cx: &mut Cx, output: Tree, labels: Tree) -> TensorResult<Tensor> {
    cx.cross_entropy(
        &output.tensor()?,
        &labels.tensor()?,
        CrossEntropy::default(),
    )
}

/// The value of a parameter with one element.
pub fn value(param: &Param) -> f64 {
    let tensor = HostTensor::new(param.data(), param.dtype(), param.shape().dims()).unwrap();
    tensor.to_f64_vec().unwrap()[0]
}
