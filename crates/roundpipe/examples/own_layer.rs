//! The program of the README: a layer of one's own learns exclusive or.

use roundpipe::nn::{Init, Linear};
use roundpipe::optim::AdamW;
use roundpipe::{Bytes, Cpu, Cx, DType, Module, Optimizer, Params, Tensor, TensorResult, Visit, Worker};

struct Mlp {
    up: Linear,
    down: Linear,
}

impl Params for Mlp {
    fn visit(&self, visit: &mut Visit<'_>) {
        visit.child("up", &self.up);
        visit.child("down", &self.down);
    }
}

impl Module for Mlp {
    fn forward(&self, cx: &mut Cx, x: &Tensor) -> TensorResult<Tensor> {
        let h = self.up.forward(cx, x)?;
        let h = cx.gelu(&h)?;
        self.down.forward(cx, &h)
    }
}

fn main() -> roundpipe::Result<()> {
    let mut init = Init::new(1, DType::F32);
    let model = Mlp { up: Linear::new(&mut init, 2, 32, true)?, down: Linear::new(&mut init, 32, 1, true)? };
    let worker = Worker::new(Cpu::new(None)?, Bytes::mib(64))?;
    let mut optimizer = Optimizer::adamw(model.trainable_params(), AdamW::default())?;
    for _ in 0..300 {
        let mut cx = Cx::train(&worker);
        let x = cx.tensor(&[0.0f32, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0], &[4, 2])?;
        let xor = cx.tensor(&[0.0f32, 1.0, 1.0, 0.0], &[4, 1])?;
        let y = model.forward(&mut cx, &x)?;
        let loss = cx.mse_loss(&y, &xor, Default::default())?;
        let grads = cx.backward(&loss)?;
        optimizer.add(&grads)?;
        optimizer.step(1e-2)?;
    }
    let mut cx = Cx::infer(&worker);
    let x = cx.tensor(&[0.0f32, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0], &[4, 2])?;
    let y = model.forward(&mut cx, &x)?.to_vec::<f32>()?;
    for (want, have) in [0.0, 1.0, 1.0, 0.0].iter().zip(&y) {
        assert!((want - have).abs() < 0.2, "{y:?}");
    }
    Ok(())
}
