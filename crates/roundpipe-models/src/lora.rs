//! LoRA: trainable low-rank branches beside frozen weights, in and out in PEFT's format.
//!
//! [`Model::add_lora`] freezes the base and adds A (uniform in ±1/√in, as PEFT) and B (zeros) to
//! the chosen linear maps, in the model's type; an optimizer keeps an f32 master of narrow types
//! anyway. Experts get one pair each. [`Model::save_adapter`] and [`Model::load_adapter`] write and
//! read `adapter_config.json` and `adapter_model.safetensors`; [`Model::merge_lora`] adds the
//! branches into the base.
//!
//! The base may be quantised ([`Model::load_quantized`]): branches, their files and their gradients
//! are the same. Merging into codes is refused; [`Model::dequantize`] makes whole weights of them.
//!
//! Refused by name: targets that the model does not have, ranks and tensors that do not fit, and
//! PEFT's variants (DoRA, biases, modules saved whole).

mod files;
mod merge;

pub use files::parse_adapter_config;

use roundpipe::nn::Init;
use roundpipe::{Param, Params};

use crate::decoder::{Adapter, DOWN, GATE_UP, Model, Projection, Weight, is_router};
use crate::error::{Error, Result};
use crate::memory;

/// The widest branch.
const MOST_RANK: usize = 1 << 16;

/// Which linear maps get a branch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LoraTargets {
    /// All of the blocks, experts included; not the head and not the routers.
    AllLinear,
    /// Those whose name is this or ends with a dot and this: `q_proj`, `mlp.experts.gate_up_proj`.
    Names(Vec<String>),
}

/// What the branches look like.
#[derive(Debug, Clone, PartialEq)]
pub struct LoraConfig {
    /// Width of a branch.
    pub rank: usize,
    /// The branch is multiplied with alpha / rank.
    pub alpha: f64,
    /// Probability of dropping an element of a branch's input, in training.
    pub dropout: f64,
    /// Which linear maps.
    pub targets: LoraTargets,
    /// Fixes the values of A.
    pub seed: u64,
    /// Multiply with alpha / √rank instead.
    pub rslora: bool,
}

impl Default for LoraConfig {
    fn default() -> Self {
        Self {
            rank: 8,
            alpha: 16.0,
            dropout: 0.0,
            targets: LoraTargets::AllLinear,
            seed: 0,
            rslora: false,
        }
    }
}

impl LoraConfig {
    fn check(&self) -> Result<()> {
        if self.rank == 0 || self.rank > MOST_RANK {
            return Err(Error::argument(
                "rank",
                format!("{} must be from 1 to {MOST_RANK}", self.rank),
            ));
        }
        if !(self.alpha.is_finite() && self.alpha > 0.0) {
            return Err(Error::argument(
                "alpha",
                format!("{} must be a number above 0", self.alpha),
            ));
        }
        if !(0.0..1.0).contains(&self.dropout) {
            return Err(Error::argument(
                "dropout",
                format!("{} must be at least 0 and below 1", self.dropout),
            ));
        }
        Ok(())
    }
}

impl LoraTargets {
    /// Whether a linear map of this name gets a branch.
    fn takes(&self, name: &str) -> bool {
        match self {
            Self::AllLinear => !is_router(name),
            Self::Names(names) => names.iter().any(|wanted| ends_with(name, wanted)),
        }
    }
}

/// Whether `name` is `wanted` or ends with a dot and it.
fn ends_with(name: &str, wanted: &str) -> bool {
    name.strip_suffix(wanted)
        .is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
}

fn is_stacked(name: &str) -> bool {
    name.ends_with(GATE_UP) || name.ends_with(DOWN)
}

/// What a branch is multiplied with.
fn scale(alpha: f64, rank: usize, rslora: bool) -> f64 {
    alpha
        / if rslora {
            (rank as f64).sqrt()
        } else {
            rank as f64
        }
}

impl Model {
    /// Freezes the base and adds branches to the chosen linear maps. Engines made before do not see
    /// them.
    ///
    /// # Errors
    /// [`Error::Argument`] when the config cannot work, a target is not in the model, or there are
    /// branches already.
    pub fn add_lora(&mut self, config: &LoraConfig) -> Result<()> {
        config.check()?;
        if self.lora.is_none() && self.check_targets(&config.targets).is_ok() {
            self.branches_fit(config)?;
        }
        let mut init = Init::new(config.seed, self.dtype());
        self.add_branches(config, |dims, bound| Ok(init.uniform(dims, bound)?))
    }

    /// The same with branches of zeros that no page of memory stands behind, for a model without
    /// weights ([`Model::empty`]): to plan with, not to train.
    ///
    /// # Errors
    /// As [`Model::add_lora`], but this machine's memory does not matter.
    pub fn add_empty_lora(&mut self, config: &LoraConfig) -> Result<()> {
        let dtype = self.dtype();
        self.add_branches(config, |dims, _| Ok(Param::zeros(dtype, dims)?))
    }

    fn add_branches(
        &mut self,
        config: &LoraConfig,
        mut first: impl FnMut(&[usize], f64) -> Result<Param>,
    ) -> Result<()> {
        config.check()?;
        if self.lora.is_some() {
            return Err(Error::argument(
                "lora",
                "the model has adapters already; merge them first",
            ));
        }
        self.check_targets(&config.targets)?;
        let dtype = self.dtype();
        let (rank, scale) = (config.rank, scale(config.alpha, config.rank, config.rslora));
        let mut made = Vec::new();
        for (name, projection) in self.projections() {
            if !config.targets.takes(&name) {
                continue;
            }
            let (a, b) = branch_dims(&projection.weight, rank);
            let bound = 1.0 / (a[a.len() - 1] as f64).sqrt();
            let (a, b) = (first(&a, bound)?, Param::zeros(dtype, &b)?);
            made.push((
                name,
                Adapter {
                    a,
                    b,
                    scale,
                    dropout: config.dropout,
                },
            ));
        }
        self.attach(made, config.clone());
        Ok(())
    }

    /// Whether this machine has the memory for branches of this rank.
    fn branches_fit(&self, config: &LoraConfig) -> Result<()> {
        let of = |projection: &Projection| {
            let (a, b) = branch_dims(&projection.weight, config.rank);
            let elements = |dims: &[usize]| dims.iter().map(|dim| *dim as u128).product::<u128>();
            elements(&a) + elements(&b)
        };
        let taken = self
            .projections()
            .filter(|(name, _)| config.targets.takes(name));
        let elements: u128 = taken.map(|(_, projection)| of(projection)).sum();
        let parts = [("the rank", elements * self.dtype().size() as u128)];
        memory::fits(&parts, memory::host_memory()).map_err(|why| Error::argument("lora", why))
    }

    /// The config of the branches, where there are any.
    pub fn lora(&self) -> Option<&LoraConfig> {
        self.lora.as_ref()
    }

    /// Puts branches in place and freezes everything else.
    fn attach(&mut self, adapters: Vec<(String, Adapter)>, config: LoraConfig) {
        self.set_trainable(false);
        let mut rest = adapters.into_iter().peekable();
        for (name, projection) in self.projections_mut() {
            if let Some((_, adapter)) = rest.next_if(|(next, _)| *next == name) {
                projection.adapter = Some(adapter);
            }
        }
        self.lora = Some(config);
        self.assemble();
    }

    /// All linear maps of the blocks with their names in transformers.
    pub(crate) fn projections(&self) -> impl Iterator<Item = (String, &Projection)> {
        let named =
            |i: usize| move |(name, projection)| (format!("model.layers.{i}.{name}"), projection);
        self.blocks
            .iter()
            .enumerate()
            .flat_map(move |(i, block)| block.projections().into_iter().map(named(i)))
    }

    pub(crate) fn projections_mut(&mut self) -> impl Iterator<Item = (String, &mut Projection)> {
        let named =
            |i: usize| move |(name, projection)| (format!("model.layers.{i}.{name}"), projection);
        let blocks = self.blocks.iter_mut().enumerate();
        blocks.flat_map(move |(i, block)| block.projections_mut().into_iter().map(named(i)))
    }

    /// Refuses a name that no linear map has, and says which there are.
    fn check_targets(&self, targets: &LoraTargets) -> Result<()> {
        let LoraTargets::Names(names) = targets else {
            return Ok(());
        };
        if names.is_empty() {
            return Err(Error::argument(
                "targets",
                "no names; use all-linear or name linear maps",
            ));
        }
        for wanted in names {
            if !self.projections().any(|(name, _)| ends_with(&name, wanted)) {
                let known: std::collections::BTreeSet<&str> = self
                    .blocks
                    .iter()
                    .flat_map(|b| b.projections())
                    .map(|(name, _)| name)
                    .collect();
                let known: Vec<_> = known.into_iter().collect();
                let why = format!(
                    "the model has no linear map `{wanted}`; there are {}",
                    known.join(", ")
                );
                return Err(Error::argument("targets", why));
            }
        }
        Ok(())
    }
}

/// Shapes of A and B for a weight [.., out, in].
fn branch_dims(weight: &Weight, rank: usize) -> (Vec<usize>, Vec<usize>) {
    let dims = weight.shape().dims();
    let (lead, last) = dims.split_at(dims.len() - 2);
    (
        [lead, &[rank, last[1]]].concat(),
        [lead, &[last[0], rank]].concat(),
    )
}
