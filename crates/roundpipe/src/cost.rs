//! What planning and simulation know about a model: times and bytes of each layer, as plain data.
//!
//! Times are milliseconds for one microbatch on one device. They come from timers, from the meta
//! device or, before anything was measured, from sizes alone ([`LayerCosts::from_bytes`]). Nothing
//! here measures. Unknown sizes are 0 and count for nothing.

mod from_shapes;
mod measured;

use std::ops::Range;

use crate::error::{Error, Result};
use crate::plan::{Pass, Stage};

pub use from_shapes::profile;
pub(crate) use from_shapes::{CostMode, Spec, model_costs};
pub use measured::{CopyRates, LayerTime, LayerTimes, Phase, WorkerSpeeds};

/// What a loss works in, in sizes of the model's output: its gradient, and two values in single
/// precision. The function is the user's, so it is not run before it has to be.
const LOSS: u64 = 5;

/// What is known of a machine before anything ran on it, beside its devices' kernels.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MachineRates {
    /// From host memory to one device.
    pub upload_bytes_per_s: f64,
    /// From one device to host memory.
    pub download_bytes_per_s: f64,
    /// Parameters that the optimizer updates.
    pub updated_params_per_s: f64,
    /// Rows of a table in front of the model that a batch names, where these are updated before all
    /// others; `None` where a forward waits for the whole table.
    pub first_rows: Option<usize>,
}

impl MachineRates {
    /// Refuses rates that are not above 0.
    ///
    /// # Errors
    /// [`Error::Config`], with the rate's name.
    pub fn check(&self) -> Result<()> {
        let rates = [
            ("upload_bytes_per_s", self.upload_bytes_per_s),
            ("download_bytes_per_s", self.download_bytes_per_s),
            ("updated_params_per_s", self.updated_params_per_s),
        ];
        match rates
            .iter()
            .find(|(_, rate)| !(rate.is_finite() && *rate > 0.0))
        {
            Some((name, rate)) => Err(Error::config(
                name,
                format!("{rate} is no rate; it must be above 0"),
            )),
            None => Ok(()),
        }
    }
}

/// One layer, for one microbatch.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct LayerCost {
    /// What errors call it.
    pub name: String,
    /// Its forward.
    pub forward_ms: f64,
    /// Its forward again, before its backward; 0 for a layer that keeps what its backward needs.
    pub recompute_ms: f64,
    /// Its backward alone.
    pub backward_ms: f64,
    /// Its parameters.
    pub bytes: u64,
    /// Its output, or that output's gradient, on the way from one device to the next.
    pub hop_ms: f64,
    /// Its output's size, from which a known transfer rate derives the hop.
    pub activation_bytes: u64,
    /// Working memory of its forward alone, its input and output included.
    pub forward_bytes: u64,
    /// What its tape keeps between forward and backward.
    pub keep_bytes: u64,
    /// Working memory while it alone runs, without what it keeps.
    pub peak_bytes: u64,
    /// Its gradients on the device: 4 bytes per trainable element.
    pub grad_bytes: u64,
    /// The host's update of its parameters.
    pub update_ms: f64,
}

/// The layers of one model, in order.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct LayerCosts {
    /// From the input to the loss.
    pub layers: Vec<LayerCost>,
}

impl LayerCosts {
    /// Guesses for a model that was never timed: a forward costs a layer's bytes, a backward twice
    /// that.
    pub fn from_bytes<S: Into<String>>(layers: impl IntoIterator<Item = (S, u64)>) -> Self {
        let guess = |(name, bytes): (S, u64)| LayerCost {
            name: name.into(),
            forward_ms: bytes as f64,
            recompute_ms: bytes as f64,
            backward_ms: 2.0 * bytes as f64,
            bytes,
            ..LayerCost::default()
        };
        Self {
            layers: layers.into_iter().map(guess).collect(),
        }
    }

    /// How many layers.
    pub fn len(&self) -> usize {
        self.layers.len()
    }

    /// Whether there is no layer at all.
    pub fn is_empty(&self) -> bool {
        self.layers.is_empty()
    }

    /// Forward of consecutive layers.
    pub fn forward_ms(&self, range: Range<usize>) -> f64 {
        self.layers[range]
            .iter()
            .map(|layer| layer.forward_ms)
            .sum()
    }

    /// Recompute of consecutive layers.
    pub fn recompute_ms(&self, range: Range<usize>) -> f64 {
        self.layers[range]
            .iter()
            .map(|layer| layer.recompute_ms)
            .sum()
    }

    /// Backward of consecutive layers, without recompute.
    pub fn backward_ms(&self, range: Range<usize>) -> f64 {
        self.layers[range]
            .iter()
            .map(|layer| layer.backward_ms)
            .sum()
    }

    /// Updates of consecutive layers.
    pub fn update_ms(&self, range: Range<usize>) -> f64 {
        self.layers[range].iter().map(|layer| layer.update_ms).sum()
    }

    /// Parameters of consecutive layers.
    pub fn bytes(&self, range: Range<usize>) -> u64 {
        self.layers[range]
            .iter()
            .fold(0, |sum, layer| layer.bytes.saturating_add(sum))
    }

    /// Gradients of consecutive layers.
    pub fn grad_bytes(&self, range: Range<usize>) -> u64 {
        self.layers[range]
            .iter()
            .fold(0, |sum, layer| layer.grad_bytes.saturating_add(sum))
    }

    /// Memory that a backward or fused visit of these layers works in, beside their parameters:
    /// every tape, the hungriest layer at work, all gradients.
    pub fn visit_bytes(&self, range: Range<usize>) -> u64 {
        let layers = &self.layers[range.clone()];
        let kept = layers
            .iter()
            .fold(0_u64, |sum, layer| sum.saturating_add(layer.keep_bytes));
        let peak = layers
            .iter()
            .map(|layer| layer.peak_bytes)
            .max()
            .unwrap_or(0);
        kept.saturating_add(peak)
            .saturating_add(self.grad_bytes(range))
    }

    /// The same for a backward visit that recomputes layer by layer: one tape at a time.
    pub fn layerwise_visit_bytes(&self, range: Range<usize>) -> u64 {
        let alone = |layer: &LayerCost| layer.keep_bytes.saturating_add(layer.peak_bytes);
        let most = self.layers[range.clone()]
            .iter()
            .map(alone)
            .max()
            .unwrap_or(0);
        most.saturating_add(self.grad_bytes(range))
    }

    /// What a task of a stage works in beside weights and outgoing copies: its input, the next
    /// microbatch's, and for a backward the gradient that comes in.
    pub fn task_bytes(&self, stage: &Stage, layer_grain: bool) -> u64 {
        let layers = stage.layers.clone();
        let Some(last) = layers.clone().last() else {
            return 0;
        };
        let output = |layer: usize| self.layers[layer].activation_bytes;
        let input = layers.start.checked_sub(1).map_or(0, output);
        match stage.pass {
            Pass::Forward => {
                let works_in = |layer: &LayerCost| layer.forward_bytes.max(layer.peak_bytes);
                let most = self.layers[layers].iter().map(works_in).max();
                most.unwrap_or(0).saturating_add(input)
            }
            Pass::Backward if layer_grain => {
                // Each layer has an input of its own, and the next one's is on its way.
                let inputs = layers.clone().map(output).max().unwrap_or(0).max(input);
                self.layerwise_visit_bytes(layers)
                    .saturating_add(2 * inputs + output(last))
            }
            Pass::Backward => self
                .visit_bytes(layers)
                .saturating_add(2 * input + output(last)),
            Pass::Fused => self
                .visit_bytes(layers)
                .saturating_add(2 * input + LOSS * output(last)),
        }
    }

    /// Whether it is known what the layers work in, not only how large they are.
    pub fn know_memory(&self) -> bool {
        self.layers.iter().any(|layer| layer.peak_bytes > 0)
    }

    /// Refuses no layers at all, and times that are negative or not finite.
    ///
    /// # Errors
    /// [`Error::Config`], with the layer's name.
    pub fn check(&self) -> Result<()> {
        if self.is_empty() {
            return Err(Error::config(
                "layer costs",
                "a model without layers cannot be planned",
            ));
        }
        for (index, layer) in self.layers.iter().enumerate() {
            let times = [
                layer.forward_ms,
                layer.recompute_ms,
                layer.backward_ms,
                layer.hop_ms,
                layer.update_ms,
            ];
            if let Some(wrong) = times.iter().find(|ms| !(ms.is_finite() && **ms >= 0.0)) {
                let what = format!("layer {index} ({}) has a time of {wrong} ms", layer.name);
                return Err(Error::config("layer costs", what));
            }
        }
        Ok(())
    }
}
