//! Decoding by the engine that trains, which sends the weights to the worker for every token.
//!
//! Keys and values are outputs of one call and inputs of the next; they stay on the worker.

use roundpipe::engine::{Inputs, MicrobatchOutputs};
use roundpipe::{
    HostTensor, Lag, MergeOutput, OutputDevice, Pin, Ring, RoundPipe, RunConfig, Sequential, Tree,
};

use super::PROMPT_STEP;
use crate::decoder::Model;
use crate::error::{Error, Result};

/// An engine that reads the weights of a model.
pub(super) struct Streamed {
    engine: RoundPipe<Sequential>,
    config: RunConfig,
}

impl Streamed {
    pub(super) fn new(model: &Model, ring: &Ring, pin: Pin) -> Result<Self> {
        let engine = RoundPipe::builder(model.layers.clone())
            .name("generate")
            .max_lag(Lag::Zero)
            .inference(true)
            .ring(ring)
            .pin(pin)
            .build()?;
        engine.set_training(false);
        let config = RunConfig::new()
            .num_microbatch(1)
            .requires_grad(false)
            .merge_output(MergeOutput::Off)
            .output_device(OutputDevice::Worker(0));
        Ok(Self { engine, config })
    }

    pub(super) fn engine(&self) -> &RoundPipe<Sequential> {
        &self.engine
    }

    /// Logits [1, S, V] of every position.
    pub(super) fn logits(&self, ids: &[u32]) -> Result<HostTensor> {
        let args = Inputs::new().named("ids", tensor(ids)?);
        let outputs = self.engine.forward(args, &self.config)?.unmerged();
        Ok(outputs.wait(0)?.tensor()?)
    }

    /// A text without tokens.
    pub(super) fn start(&self) -> Past<'_> {
        Past {
            streamed: self,
            outputs: None,
        }
    }
}

/// What the blocks have seen of one text.
pub(super) struct Past<'s> {
    streamed: &'s Streamed,
    outputs: Option<MicrobatchOutputs>,
}

impl Past<'_> {
    /// Runs some tokens behind the past and gives the logits of the last.
    pub(super) fn feed(&mut self, ids: &[u32]) -> Result<Vec<f32>> {
        let Streamed { engine, config } = self.streamed;
        for part in ids.chunks(PROMPT_STEP) {
            let mut args = Inputs::new()
                .named("ids", tensor(part)?)
                .named("keep", Tree::Int(1))
                .named("cache", Tree::Bool(true));
            if let Some(past) = self.outputs.take() {
                args = args.named("past", past);
            }
            self.outputs = Some(engine.forward(args, config)?.unmerged());
        }
        let Some(outputs) = &self.outputs else {
            return Err(Error::argument("prompt", "it has no tokens"));
        };
        let logits = outputs.get("logits").wait(0)?.tensor()?;
        Ok(logits.to_f64_vec()?.into_iter().map(|x| x as f32).collect())
    }
}

fn tensor(ids: &[u32]) -> Result<HostTensor> {
    let ids: Vec<i64> = ids.iter().map(|id| i64::from(*id)).collect();
    Ok(HostTensor::from_slice(&ids, &[1, ids.len()])?)
}
