//! The host home of a model's state: weights, gradients, masters and moments, a slab per layer and
//! kind.
//!
//! A slab is flat, page-aligned and exactly as large as what lies in it: 2 bytes per bf16 weight,
//! as many per gradient, 2 1/8 for what the weight lacks of its f32 master and 4 for each moment
//! (or, where [`StoreConfig::optim_dtype`] asks for it, no master and 2 for each moment). f16 weights
//! have an f32 master of 4 bytes, and [`StoreConfig::moments`] makes moments 2 bytes or one. Parameters move into the slabs
//! when the store is made, one by one, so that the peak is the model plus one layer. What only
//! training needs (gradients, masters, moments, the second version of weights) is made when first
//! asked for, or by [`Store::prepare`].
//!
//! The device block of a layer mirrors the host: `[trainable slab][frozen slab][parameters that
//! live elsewhere]`, so that a whole layer is uploaded in one or two copies.
//!
//! Refused: trainable parameters that are not f32, bf16 or f16, gradients in a type other than f32
//! or the parameter's own, and a trainable parameter that a living store trains already.
//!
//! # Invariants
//! - A parameter has one home: the first layer that names it. Other layers refer to it.
//! - Every (layer, trainable parameter) pair has its own gradient range: what one layer writes
//!   depends on no other layer.
//! - The remainders of a layer belong to its newest version: at lag 1 an update reads the weights of
//!   the version before, and writes the next with the remainders that belong to that.
//! - A parameter's [`Param::data`] is the newest published version. The store sees what the
//!   user writes there: the next update starts from it, and a write to an older version is refused by the
//!   next update.
//! - The store writes slabs under [`Versions`](crate::version::Versions) and the guards of
//!   [`HostBuf`], nowhere else.

mod config;
mod groups;
mod keeper;
mod layer;
mod layout;
mod writes;

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use roundpipe_tensor::cpu::threads::Threads;
use roundpipe_tensor::{HostBuf, Param};

pub use self::config::StoreConfig;
use self::keeper::{StoreKeeper, claimable};
pub use self::layer::StoreLayer;
use self::layout::ALIGN;
pub use self::layout::StoredParam;
pub(crate) use self::writes::{Overwritten, Writes};
use crate::error::Result;
use crate::groups::ResolvedGroups;
use crate::layer::Layer;
use crate::optim::Rule;
use crate::sync::lock;
use crate::version::{Abort, Aborted, Gate};

/// A layer's name and its parameters by full name.
pub(crate) type LayerParams = (String, Vec<(String, Param)>);

/// The state of a model.
pub struct Store {
    layers: Vec<StoreLayer>,
    gate: Arc<Gate>,
    pub(crate) shared: Arc<StoreShared>,
    steps: AtomicU64,
}

/// What all layers of a store use.
pub(crate) struct StoreShared {
    config: StoreConfig,
    pub(crate) threads: Threads,
    keeper: Arc<StoreKeeper>,
    /// What the next step takes along; moments are laid out by the rules in it.
    groups: Mutex<ResolvedGroups>,
}

/// Bytes to copy into a layer's device block.
#[derive(Debug, Clone)]
pub struct Segment {
    /// The bytes.
    pub data: HostBuf,
    /// Where they go.
    pub block_offset: usize,
}

/// The frozen weights of a layer, where they can be sent apart from its trained ones.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct FrozenPart {
    /// Where they begin in the layer's device block.
    pub block_offset: usize,
    pub bytes: usize,
    /// Changes whenever they may have changed.
    pub writes: Writes,
}

/// Bytes of host memory by kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StoreBytes {
    /// Trainable working weights, all versions.
    pub weights: usize,
    /// Frozen parameters and buffers.
    pub frozen: usize,
    /// Of `frozen`, what stays in files and takes memory only while it is used.
    pub in_files: usize,
    /// Gradients.
    pub gradients: usize,
    /// Masters of narrower weights: what bf16 weights lack of them, f32 copies of f16 weights; none
    /// where the state has the weights' own type.
    pub masters: usize,
    /// State of the rule.
    pub moments: usize,
}

impl StoreBytes {
    /// All of it that takes memory.
    pub fn total(&self) -> usize {
        let frozen = self.frozen - self.in_files;
        self.weights + frozen + self.gradients + self.masters + self.moments
    }
}

impl Store {
    /// Moves the parameters of `layers` into slabs.
    ///
    /// # Errors
    /// [`Error::Config`] for a type that cannot be trained; otherwise when the system has no memory
    /// or a parameter is being written. Parameters keep their values in any case.
    pub fn new(layers: &[(String, Arc<dyn Layer>)], config: StoreConfig) -> Result<Self> {
        let layers = layers.iter().map(|(name, layer)| {
            let full_name = |(param, value)| (format!("{name}.{param}"), value);
            let params = layer.named_params().into_iter().map(full_name);
            (name.clone(), params.collect())
        });
        Self::of_params(layers.collect(), config)
    }

    /// Those that update.
    pub(crate) fn threads(&self) -> &Threads {
        &self.shared.threads
    }

    /// Moves parameters into slabs: for each layer its name, and its parameters by full name.
    pub(crate) fn of_params(layers: Vec<LayerParams>, config: StoreConfig) -> Result<Self> {
        let threads = Threads::new(config.threads)?;
        let gate = Gate::new(layers.len());
        let trained = if config.inference {
            HashSet::new()
        } else {
            claimable(&layers)?
        };
        let keeper = Arc::new(StoreKeeper::new(&config.name, &gate, trained));
        let shared = Arc::new(StoreShared {
            config,
            threads,
            keeper,
            groups: Mutex::default(),
        });
        let mut homes = HashMap::new();
        let mut users: HashMap<(usize, usize), Vec<(usize, usize)>> = HashMap::new();
        let mut stored = Vec::new();
        for (index, layer) in layers.into_iter().enumerate() {
            let layer = StoreLayer::new(index, layer, &mut homes, &gate, &shared)?;
            for (at, param) in layer.params.iter().enumerate() {
                // The last layer first: the order in which a shared parameter's gradients are
                // summed.
                users.entry(param.home).or_default().insert(0, (index, at));
            }
            stored.push(layer);
        }
        for ((layer, index), users) in users {
            stored[layer].params[index].users = users;
        }
        let store = Self {
            layers: stored,
            gate,
            shared,
            steps: AtomicU64::new(0),
        };
        let rules = store.resolve(&[])?;
        *lock(&store.shared.groups) = rules;
        Ok(store)
    }

    /// The layers in order.
    pub fn layers(&self) -> &[StoreLayer] {
        &self.layers
    }

    /// The parameters as every layer sees them, in the order of the layers.
    pub(crate) fn params(&self) -> impl Iterator<Item = &StoredParam> + Clone {
        self.layers.iter().flat_map(|layer| layer.params())
    }

    /// One layer.
    pub fn layer(&self, index: usize) -> &StoreLayer {
        &self.layers[index]
    }

    /// One parameter of one layer at one version, to be read in place. The caller holds a readable
    /// ticket, as for [`Store::segments`].
    ///
    /// # Errors
    /// When the system has no memory for the second version.
    pub fn data(&self, layer: usize, index: usize, version: u64) -> Result<HostBuf> {
        self.param_data(&self.layers[layer].params[index], version)
    }

    fn param_data(&self, param: &StoredParam, version: u64) -> Result<HostBuf> {
        if param.trainable {
            self.layers[param.home.0].working(param.home.1, version)
        } else {
            Ok(param.param.data())
        }
    }

    /// Whether weights and gradients have contents: not those of workers that only count.
    pub(crate) fn has_values(&self) -> bool {
        self.shared.config.device.moves_bytes()
    }

    /// The seed of what rounds moments.
    pub(crate) fn moment_seed(&self) -> u64 {
        self.shared.config.seed
    }

    /// Whether a gradient was written since the last update.
    pub(crate) fn has_gradients(&self) -> bool {
        self.layers
            .iter()
            .any(|layer| (0..layer.params.len()).any(|index| layer.filled(index)))
    }

    /// Forgets all gradients.
    pub fn clear_gradients(&self) {
        for layer in &self.layers {
            (0..layer.params.len()).for_each(|index| layer.set_filled(index, false));
        }
    }

    /// What all versions of this store wait at.
    pub fn gate(&self) -> &Arc<Gate> {
        &self.gate
    }

    /// A new abort for waits on this store.
    pub fn abort(&self) -> Abort {
        Abort::new(&self.gate)
    }

    /// The optimizer's rule, if there is one.
    pub fn rule(&self) -> Option<Rule> {
        self.shared.config.rule
    }

    /// Updates done so far, skipped ones left out.
    pub fn steps(&self) -> u64 {
        self.steps.load(Ordering::Acquire)
    }

    /// Says how many updates were done, after a resume or when layers are updated one by one.
    pub fn set_steps(&self, steps: u64) {
        self.steps.store(steps, Ordering::Release);
    }

    /// Makes what training needs now instead of at its first use, so that memory runs out early or
    /// never.
    ///
    /// # Errors
    /// When the system has no memory.
    pub fn prepare(&self) -> Result<()> {
        self.layers
            .iter()
            .try_for_each(|layer| layer.training().map(drop))
    }

    /// What to upload for one layer at one version, in as few pieces as the slabs allow. The caller
    /// holds a readable ticket for `version` of every layer in [`StoreLayer::homes`].
    ///
    /// # Errors
    /// When the system has no memory for the second version.
    pub fn segments(&self, layer: usize, version: u64) -> Result<Vec<Segment>> {
        let here = &self.layers[layer];
        let mut segments = Vec::new();
        segments.push(Segment {
            data: here.weights(version)?,
            block_offset: 0,
        });
        let frozen = here.frozen.as_ref().filter(|slab| here.is_at_home(slab));
        if let Some(frozen) = frozen {
            segments.push(Segment {
                data: frozen.clone(),
                block_offset: here.sizes.weights.next_multiple_of(ALIGN),
            });
        }
        for param in &here.params {
            let own = param.home.0 == layer;
            if own && (param.trainable || frozen.is_some()) {
                continue;
            }
            let data = self.param_data(param, version)?;
            data.expect_soon();
            segments.push(Segment {
                data,
                block_offset: param.block_offset,
            });
        }
        segments.retain(|segment| !segment.data.is_empty());
        Ok(segments)
    }

    /// The frozen weights of a layer, those that it shares with other layers among them; `None` where
    /// there are none of its own, where some lie in files or with another store, and where it shares
    /// trained ones.
    pub(crate) fn frozen_part(&self, layer: usize) -> Option<FrozenPart> {
        let here = &self.layers[layer];
        let is_home = |layer: usize| {
            let home = &self.layers[layer];
            let slab = home.frozen.as_ref().filter(|slab| !slab.is_empty());
            slab.is_some_and(|slab| home.is_at_home(slab))
        };
        if !is_home(layer) {
            return None;
        }
        let mut writes = Writes::default();
        for param in &here.params {
            let is_own = param.home.0 == layer;
            if param.trainable && is_own {
                continue;
            }
            if param.trainable || !(is_own || is_home(param.home.0)) {
                return None;
            }
            writes.add(&param.param.data());
        }
        // Shared ones stand at the end of the block.
        let block_offset = here.sizes.weights.next_multiple_of(ALIGN);
        Some(FrozenPart {
            block_offset,
            bytes: here.sizes.block - block_offset,
            writes,
        })
    }

    /// Waits until all of a layer's gradients may be written for step `s`, from 1 on: the update
    /// before has read them, also where it is another layer's.
    ///
    /// # Errors
    /// [`Aborted`].
    pub fn wait_grad_free(&self, layer: usize, s: u64, abort: &Abort) -> Result<(), Aborted> {
        let homes = &self.layers[layer].homes;
        homes
            .iter()
            .try_for_each(|home| self.layers[*home].versions.wait_grad_free(s, abort))
    }

    /// The layers whose gradients an update of `layer` reads, in ascending order: itself and those
    /// that share its parameters. All must have landed before.
    pub fn grad_layers(&self, layer: usize) -> Vec<usize> {
        let own = self.layers[layer].own_trainable();
        let mut all: Vec<usize> = own
            .flat_map(|(_, p)| p.users.iter().map(|(layer, _)| *layer))
            .collect();
        all.sort_unstable();
        all.dedup();
        all
    }

    /// Host memory that training takes beside what is there, by kind; all 0 once it has begun.
    pub(crate) fn training_bytes(&self) -> StoreBytes {
        let mut sum = StoreBytes::default();
        for layer in self
            .layers
            .iter()
            .filter(|layer| layer.training.get().is_none())
        {
            let bytes = layer.training_bytes();
            sum.weights += bytes.weights;
            sum.gradients += bytes.gradients;
            sum.masters += bytes.masters;
            sum.moments += bytes.moments;
        }
        sum
    }

    /// Host memory in use, by kind.
    pub fn host_bytes(&self) -> StoreBytes {
        let mut sum = StoreBytes::default();
        for layer in &self.layers {
            sum.weights += layer.weights.len();
            match &layer.frozen {
                Some(frozen) => sum.frozen += frozen.len(),
                None => {
                    for (_, param) in layer.own().filter(|(_, p)| !p.trainable) {
                        let data = param.param.data();
                        sum.frozen += data.len();
                        sum.in_files += if data.stays_in_file() { data.len() } else { 0 };
                    }
                }
            }
            if let Some(training) = layer.training.get() {
                sum.weights += training.second.as_ref().map_or(0, HostBuf::len);
                sum.gradients += training.gradients.len();
                sum.masters += training.masters.len();
                sum.moments += training.moments.iter().map(HostBuf::len).sum::<usize>();
            }
        }
        sum
    }
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Store")
            .field("layers", &self.layers.len())
            .field("bytes", &self.host_bytes())
            .finish()
    }
}
