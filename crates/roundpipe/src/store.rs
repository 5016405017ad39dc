//! The host home of a model's state: weights, gradients, masters and moments, a slab per layer and
//! kind.
//!
//! A slab is flat, page-aligned and exactly as large as what lies in it: 2 bytes per bf16 weight,
//! as many per gradient, 4 for the master and 4 for each moment. Parameters move into the slabs
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
//! - A parameter's [`Param::data`] is the newest published version. What somebody else writes there
//!   is seen: the next update starts from it, and a write to an older version is refused by the
//!   next update.
//! - The store writes slabs under [`Versions`] and the guards of [`HostBuf`], nowhere else.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use roundpipe_tensor::cpu::threads::Threads;
use roundpipe_tensor::{DType, Device, HostBuf, Keeper, Param, ParamId, Pin, Shape};

use crate::config::Lag;
use crate::error::{Error, Result};
use crate::layer::Layer;
use crate::optim::{Rule, fill_master, needs_master};
use crate::version::{Abort, Aborted, Gate, Versions};

/// Where a parameter may start in a slab that devices copy from or to, in bytes.
const ALIGN: usize = 64;

/// What a user may choose about a store.
#[derive(Debug, Clone)]
pub struct StoreConfig {
    /// What errors call the store's engine.
    pub name: String,
    /// Whose host memory weights and gradients lie in.
    pub device: Arc<dyn Device>,
    /// How that memory is pinned. Frozen parameters stay where they are, e.g. in a mapped file,
    /// with [`Pin::Off`] and where the driver has no more with [`Pin::Try`]: moved to pageable
    /// memory they would gain nothing.
    pub pin: Pin,
    /// The most that an update may lag; weights have two versions at [`Lag::One`].
    pub max_lag: Lag,
    /// The optimizer; without one there are no moments, and updates are closures.
    pub rule: Option<Rule>,
    /// The type of gradients in host memory; by default each parameter's own.
    pub grad_dtype: Option<DType>,
    /// Threads of updates; by default one per core.
    pub threads: Option<usize>,
    /// Whether parameters are only read, also those that are trainable: another store may train
    /// them meanwhile.
    pub inference: bool,
}

impl StoreConfig {
    /// Pinned memory of `device`, updates between steps, no rule.
    pub fn new(device: Arc<dyn Device>) -> Self {
        Self {
            name: "the store".to_owned(),
            device,
            pin: Pin::default(),
            max_lag: Lag::Zero,
            rule: None,
            grad_dtype: None,
            threads: None,
            inference: false,
        }
    }
}

/// A layer's name and its parameters by full name.
pub(crate) type LayerParams = (String, Vec<(String, Param)>);

/// The state of a model.
pub struct Store {
    layers: Vec<StoreLayer>,
    gate: Arc<Gate>,
    pub(crate) shared: Arc<Shared>,
    steps: AtomicU64,
}

/// What all layers of a store use.
pub(crate) struct Shared {
    config: StoreConfig,
    pub(crate) threads: Threads,
    keeper: Arc<StoreKeeper>,
}

/// A store as its parameters know it.
#[derive(Debug)]
struct StoreKeeper {
    name: String,
    gate: Arc<Gate>,
    trained: OnceLock<HashSet<ParamId>>,
    /// The version that all layers will have once the updates that were asked for are done.
    asked: AtomicU64,
    /// Whether its engine is gone: calls that somebody still holds keep the memory, but nothing is
    /// updated any more.
    retired: AtomicBool,
}

impl Keeper for StoreKeeper {
    fn name(&self) -> &str {
        &self.name
    }

    fn trains(&self, param: ParamId) -> bool {
        let trained = || {
            self.trained
                .get()
                .is_some_and(|trained| trained.contains(&param))
        };
        !self.retired.load(Ordering::SeqCst) && trained()
    }

    fn settle(&self) {
        self.gate
            .wait_all(|version| version >= self.asked.load(Ordering::SeqCst));
    }
}

/// The state of one layer.
pub struct StoreLayer {
    name: String,
    params: Vec<StoredParam>,
    sizes: Sizes,
    homes: Vec<usize>,
    versions: Versions,
    shared: Arc<Shared>,
    /// The slab of even versions, or the only one.
    weights: HostBuf,
    /// `None` where frozen parameters stay in their own buffers.
    frozen: Option<HostBuf>,
    training: OnceLock<Training>,
    seen: Mutex<Seen>,
}

/// Who wrote a layer's weights, in each slab: by the number of claims to write.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    /// Claims that updates made.
    pub own: [u64; 2],
    /// Claims of somebody else that calls know of.
    noticed: [u64; 2],
    /// All claims on each parameter when an update last looked: more since then are somebody
    /// else's.
    pub params: Vec<[u64; 2]>,
}

/// One parameter as one layer sees it.
#[derive(Debug)]
pub struct StoredParam {
    /// Full dotted name, by this layer.
    pub name: String,
    /// The parameter.
    pub param: Param,
    /// Element type of the working weights.
    pub dtype: DType,
    /// Sizes.
    pub shape: Shape,
    /// Whether it is updated.
    pub trainable: bool,
    /// The layer and the index in it where its state lives.
    pub home: (usize, usize),
    /// Where it starts in the layer's device block, in bytes.
    pub block_offset: usize,
    /// Element type of its gradient in host memory.
    pub grad_dtype: DType,
    /// Where its gradient lies in the layer's gradient slab; empty for frozen parameters.
    pub grad_bytes: Range<usize>,
    /// In the trainable or the frozen slab of its home.
    offset: usize,
    /// In the slab of masters of its home, where it has one.
    master: Option<usize>,
    /// In each slab of moments of its home.
    moment: usize,
    /// Every (layer, index) that names it, the last layer first. Only at home.
    pub(crate) users: Vec<(usize, usize)>,
    pub(crate) decays: bool,
    /// Whether a gradient is there.
    filled: AtomicBool,
}

/// Bytes to copy into a layer's device block.
#[derive(Debug, Clone)]
pub struct Segment {
    /// The bytes.
    pub data: HostBuf,
    /// Where they go.
    pub block_offset: usize,
}

/// Bytes of host memory by kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StoreBytes {
    /// Trainable working weights, all versions.
    pub weights: usize,
    /// Frozen parameters and buffers.
    pub frozen: usize,
    /// Gradients.
    pub gradients: usize,
    /// f32 copies of narrower weights.
    pub masters: usize,
    /// State of the rule.
    pub moments: usize,
}

impl StoreBytes {
    /// All of it.
    pub fn total(&self) -> usize {
        self.weights + self.frozen + self.gradients + self.masters + self.moments
    }
}

/// Sizes of a layer's slabs and block, in bytes.
#[derive(Debug, Clone, Copy, Default)]
struct Sizes {
    weights: usize,
    frozen: usize,
    gradients: usize,
    masters: usize,
    moments: usize,
    block: usize,
}

/// What only training needs.
struct Training {
    gradients: HostBuf,
    /// The slab of odd versions.
    second: Option<HostBuf>,
    masters: HostBuf,
    moments: Vec<HostBuf>,
}

impl Store {
    /// Moves the parameters of `layers` into slabs.
    ///
    /// # Errors
    /// [`Error::Config`] for a type that cannot be trained; otherwise when the system has no memory
    /// or somebody is writing a parameter. Parameters keep their values in any case.
    pub fn new(layers: &[(String, Arc<dyn Layer>)], config: StoreConfig) -> Result<Self> {
        let layers = layers.iter().map(|(name, layer)| {
            let full_name = |(param, value)| (format!("{name}.{param}"), value);
            let params = layer.named_params().into_iter().map(full_name);
            (name.clone(), params.collect())
        });
        Self::of_params(layers.collect(), config)
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
        let keeper = Arc::new(StoreKeeper {
            name: config.name.clone(),
            gate: gate.clone(),
            trained: trained.into(),
            asked: AtomicU64::new(0),
            retired: AtomicBool::new(false),
        });
        let shared = Arc::new(Shared {
            config,
            threads,
            keeper,
        });
        let mut homes = HashMap::new();
        let mut users: HashMap<(usize, usize), Vec<(usize, usize)>> = HashMap::new();
        let mut stored = Vec::new();
        for (index, layer) in layers.into_iter().enumerate() {
            let layer = StoreLayer::new(index, layer, &mut homes, &gate, &shared)?;
            for (at, param) in layer.params.iter().enumerate() {
                users.entry(param.home).or_default().insert(0, (index, at));
            }
            stored.push(layer);
        }
        for ((layer, index), users) in users {
            stored[layer].params[index].users = users;
        }
        Ok(Self {
            layers: stored,
            gate,
            shared,
            steps: AtomicU64::new(0),
        })
    }

    /// Applies weight decay only where `decays` says so; by default everywhere.
    #[must_use]
    pub fn decay_where(mut self, decays: impl Fn(&str, &Param) -> bool) -> Self {
        for param in self.layers.iter_mut().flat_map(|layer| &mut layer.params) {
            param.decays = decays(&param.name, &param.param);
        }
        self
    }

    /// Says which version all layers will have once the updates that were asked for are done.
    pub(crate) fn set_asked(&self, version: u64) {
        self.shared.keeper.asked.store(version, Ordering::SeqCst);
    }

    /// Another store may train the parameters from now on; this one makes no update any more.
    pub(crate) fn retire(&self) {
        self.shared.keeper.retired.store(true, Ordering::SeqCst);
    }

    /// What [`Store::set_asked`] said last.
    pub(crate) fn asked(&self) -> u64 {
        self.shared.keeper.asked.load(Ordering::SeqCst)
    }

    /// Waits for the updates of other engines that were asked for and write parameters which this
    /// store only reads.
    pub(crate) fn settle_others(&self) {
        let own: Arc<dyn Keeper> = self.shared.keeper.clone();
        let mut settled: Vec<Arc<dyn Keeper>> = vec![own];
        for param in self
            .layers
            .iter()
            .flat_map(|layer| &layer.params)
            .filter(|param| !param.trainable)
        {
            let Some(keeper) = param.param.keeper() else {
                continue;
            };
            if !settled.iter().any(|known| Arc::ptr_eq(known, &keeper)) {
                keeper.settle();
                settled.push(keeper);
            }
        }
    }

    /// Whether somebody else wrote weights since this was last asked.
    pub(crate) fn notice_writes(&self) -> bool {
        // Every layer is to notice.
        let noticed = self
            .layers
            .iter()
            .filter(|layer| layer.notice_writes())
            .count();
        noticed > 0
    }

    /// A number that changes whenever the weights of a layer may have changed without a new
    /// version: when somebody wrote or moved them.
    pub(crate) fn writes(&self, layer: usize) -> u64 {
        let here = &self.layers[layer];
        let homes = here.params.iter().map(|param| param.param.data());
        homes.fold(0, |sum, home| {
            sum.wrapping_mul(31).wrapping_add(home.writes() ^ home.id())
        })
    }

    /// The layers in order.
    pub fn layers(&self) -> &[StoreLayer] {
        &self.layers
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
        let param = &self.layers[layer].params[index];
        match param.trainable {
            true => self.layers[param.home.0].working(param.home.1, version),
            false => Ok(param.param.data()),
        }
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
            let data = match param.trainable {
                true => self.layers[param.home.0].working(param.home.1, version)?,
                false => param.param.data(),
            };
            segments.push(Segment {
                data,
                block_offset: param.block_offset,
            });
        }
        segments.retain(|segment| !segment.data.is_empty());
        Ok(segments)
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

    /// Host memory in use, by kind.
    pub fn host_bytes(&self) -> StoreBytes {
        let mut sum = StoreBytes::default();
        for layer in &self.layers {
            sum.weights += layer.weights.len();
            sum.frozen += match &layer.frozen {
                Some(frozen) => frozen.len(),
                None => layer
                    .own()
                    .filter(|(_, p)| !p.trainable)
                    .map(|(_, p)| p.param.bytes())
                    .sum(),
            };
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

impl StoreLayer {
    fn new(
        index: usize,
        (name, named_params): LayerParams,
        homes: &mut HashMap<ParamId, (usize, usize)>,
        gate: &Arc<Gate>,
        shared: &Arc<Shared>,
    ) -> Result<Self> {
        let config = &shared.config;
        let mut params = Vec::new();
        for (at, (full_name, param)) in named_params.into_iter().enumerate() {
            let home = *homes.entry(param.id()).or_insert((index, at));
            params.push(StoredParam::new(full_name, param, home, config)?);
        }
        let sizes = lay_out(index, &mut params);
        let weights = config.buffer(&format!("{name} weights"), sizes.weights)?;
        // What another engine keeps stays with it: this one reads it there.
        let kept = |param: &StoredParam| {
            param.home.0 == index && !param.trainable && param.param.keeper().is_some()
        };
        let frozen = match params.iter().any(kept) {
            true => None,
            false => config.frozen(&format!("{name} frozen weights"), sizes.frozen)?,
        };
        let mut seen: Vec<usize> = params
            .iter()
            .filter(|p| p.trainable)
            .map(|p| p.home.0)
            .collect();
        seen.sort_unstable();
        seen.dedup();
        let slabs = if config.max_lag == Lag::One { 2 } else { 1 };
        let layer = Self {
            name,
            params,
            sizes,
            homes: seen,
            versions: Versions::new(gate, index, slabs),
            shared: shared.clone(),
            weights,
            frozen,
            training: OnceLock::new(),
            seen: Mutex::default(),
        };
        layer.move_in(index)?;
        let writes = |param: &StoredParam| match param.trainable && param.home.0 == index {
            true => [param.param.data().writes(), 0],
            false => [0, 0],
        };
        let params = layer.params.iter().map(writes).collect();
        let own = [layer.slab_writes(0), 0];
        *layer.lock_seen() = Seen {
            own,
            params,
            ..Seen::default()
        };
        Ok(layer)
    }

    /// Copies the layer's own parameters into its slabs, one by one; each gives its old memory back
    /// at once.
    fn move_in(&self, index: usize) -> Result<()> {
        for param in self.params.iter().filter(|p| p.home.0 == index) {
            let slab = if param.trainable {
                Some(&self.weights)
            } else {
                self.frozen.as_ref()
            };
            let Some(slab) = slab else { continue };
            let home = slab.slice(param.offset..param.offset + param.param.bytes())?;
            let old = param.param.data();
            // Zeros that were never written need not be copied to zeros, and take no memory.
            if !(old.is_untouched() && home.is_untouched()) {
                let old = old.read_all()?;
                home.write(0..home.len())?
                    .bytes()
                    .copy_from_slice(old.bytes());
            }
            param.param.rehome(home)?;
            let keeper: Arc<dyn Keeper> = self.shared.keeper.clone();
            param.param.set_keeper(Arc::downgrade(&keeper));
        }
        Ok(())
    }

    /// Whether all frozen parameters still lie in their slab: another engine may have taken some
    /// over.
    fn is_at_home(&self, slab: &HostBuf) -> bool {
        let moved = |param: &StoredParam| {
            let range = param.offset..param.offset + param.param.bytes();
            !slab
                .slice(range)
                .is_ok_and(|home| home.is_same(&param.param.data()))
        };
        !self
            .own()
            .any(|(_, param)| !param.trainable && moved(param))
    }

    pub(crate) fn lock_seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether somebody else wrote the newest weights since an update last looked.
    pub(crate) fn was_written(&self) -> bool {
        let seen = self.lock_seen();
        let slab = self.versions.slab(self.versions.current());
        self.own_trainable()
            .any(|(index, _)| self.is_written(index, slab, &seen))
    }

    /// Whether somebody else wrote weights since this was last asked.
    fn notice_writes(&self) -> bool {
        let mut seen = self.lock_seen();
        let now = [0, 1].map(|slab| self.slab_writes(slab) - seen.own[slab]);
        std::mem::replace(&mut seen.noticed, now) != now
    }

    fn slab(&self, slab: usize) -> Option<&HostBuf> {
        match slab {
            0 => Some(&self.weights),
            _ => self
                .training
                .get()
                .and_then(|training| training.second.as_ref()),
        }
    }

    fn slab_writes(&self, slab: usize) -> u64 {
        self.slab(slab).map_or(0, HostBuf::writes)
    }

    /// Whether somebody else wrote a parameter in one of the slabs.
    pub(crate) fn is_written(&self, index: usize, slab: usize, seen: &Seen) -> bool {
        self.writes(index, slab) != seen.params[index][slab]
    }

    /// How often a parameter was lent for writing in one of the slabs.
    pub(crate) fn writes(&self, index: usize, slab: usize) -> u64 {
        let param = &self.params[index];
        let home = self.slab(slab).and_then(|slab| {
            slab.slice(param.offset..param.offset + param.param.bytes())
                .ok()
        });
        home.map_or(0, |home| home.writes())
    }

    /// The layer's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// All parameters and buffers that the layer names, in its order.
    pub fn params(&self) -> &[StoredParam] {
        &self.params
    }

    /// Size of the layer's device block.
    pub fn block_bytes(&self) -> usize {
        self.sizes.block
    }

    /// Size of the layer's gradient slab.
    pub fn grad_bytes(&self) -> usize {
        self.sizes.gradients
    }

    /// The layers whose versions must be readable before this one is uploaded, in ascending order;
    /// those that wait for its gradients as well.
    pub fn homes(&self) -> &[usize] {
        &self.homes
    }

    /// The versions of the layer's own weights.
    pub fn versions(&self) -> &Versions {
        &self.versions
    }

    /// Where the gradient of a parameter is written; `None` for a frozen one.
    ///
    /// # Errors
    /// When the system has no memory.
    pub fn grad_range(&self, index: usize) -> Result<Option<HostBuf>> {
        let param = &self.params[index];
        match param.trainable {
            true => Ok(Some(
                self.training()?.gradients.slice(param.grad_bytes.clone())?,
            )),
            false => Ok(None),
        }
    }

    /// The whole gradient slab, for one download per layer; parameters lie at their
    /// [`StoredParam::grad_bytes`].
    ///
    /// # Errors
    /// When the system has no memory.
    pub fn grad_slab(&self) -> Result<HostBuf> {
        Ok(self.training()?.gradients.clone())
    }

    /// Whether a gradient of this parameter has been written since the last update.
    pub fn filled(&self, index: usize) -> bool {
        self.params[index].filled.load(Ordering::Acquire)
    }

    /// Says that a gradient is there, or that it is not: a parameter without is left out of the
    /// update.
    pub fn set_filled(&self, index: usize, filled: bool) {
        self.params[index].filled.store(filled, Ordering::Release);
    }

    /// The layer's own parameters with their indices.
    pub(crate) fn own(&self) -> impl Iterator<Item = (usize, &StoredParam)> {
        // A parameter that lives elsewhere has no users of its own.
        self.params
            .iter()
            .enumerate()
            .filter(|(_, param)| !param.users.is_empty())
    }

    pub(crate) fn own_trainable(&self) -> impl Iterator<Item = (usize, &StoredParam)> {
        self.own().filter(|(_, param)| param.trainable)
    }

    /// The slab of a version.
    pub(crate) fn weights(&self, version: u64) -> Result<HostBuf> {
        match self.versions.slab(version) {
            0 => Ok(self.weights.clone()),
            _ => Ok(self
                .training()?
                .second
                .clone()
                .expect("two versions have two slabs")),
        }
    }

    /// One of the layer's own trainable parameters at a version.
    pub(crate) fn working(&self, index: usize, version: u64) -> Result<HostBuf> {
        let param = &self.params[index];
        Ok(self
            .weights(version)?
            .slice(param.offset..param.offset + param.param.bytes())?)
    }

    /// The f32 copy of one of the layer's own parameters, where its working weights are narrower.
    pub(crate) fn master(&self, index: usize) -> Result<Option<HostBuf>> {
        let param = &self.params[index];
        let slice = |at| {
            Ok(self
                .training()?
                .masters
                .slice(at..at + param.copy_bytes())?)
        };
        param.master.map(slice).transpose()
    }

    /// The moments of one of the layer's own parameters.
    pub(crate) fn moments(&self, index: usize) -> Result<Vec<HostBuf>> {
        let param = &self.params[index];
        let range = param.moment..param.moment + param.copy_bytes();
        self.training()?
            .moments
            .iter()
            .map(|slab| Ok(slab.slice(range.clone())?))
            .collect()
    }

    fn training(&self) -> Result<&Training> {
        match self.training.get() {
            Some(training) => Ok(training),
            // Two threads may both make one; the first wins, and nothing is written before.
            None => Training::new(self).map(|made| self.training.get_or_init(|| made)),
        }
    }
}

impl StoredParam {
    fn new(name: String, param: Param, home: (usize, usize), config: &StoreConfig) -> Result<Self> {
        let (dtype, trainable) = (param.dtype(), param.is_trainable() && !config.inference);
        // The offset comes with the layout.
        let master = (trainable && needs_master(&name, dtype)?).then_some(0);
        let grad_dtype = config.grad_dtype.unwrap_or(dtype);
        if trainable && grad_dtype != dtype && grad_dtype != DType::F32 {
            let what =
                format!("{name} is {dtype}; its gradients are {dtype} or f32, not {grad_dtype}");
            return Err(Error::config("grad_dtype", what));
        }
        Ok(Self {
            dtype,
            shape: *param.shape(),
            trainable,
            home,
            block_offset: 0,
            grad_dtype,
            grad_bytes: 0..0,
            offset: 0,
            master,
            moment: 0,
            users: Vec::new(),
            decays: true,
            filled: AtomicBool::new(false),
            name,
            param,
        })
    }

    /// Size of an f32 copy.
    pub(crate) fn copy_bytes(&self) -> usize {
        self.shape.numel() * size_of::<f32>()
    }
}

impl Training {
    fn new(layer: &StoreLayer) -> Result<Self> {
        let (name, sizes, config) = (&layer.name, layer.sizes, &layer.shared.config);
        let gradients = config.buffer(&format!("{name} gradients"), sizes.gradients)?;
        let second = match config.max_lag {
            Lag::One => {
                Some(config.buffer(&format!("{name} weights, odd versions"), sizes.weights)?)
            }
            Lag::Zero => None,
        };
        let masters = HostBuf::zeroed(format!("{name} masters"), sizes.masters)?;
        for (_, param) in layer.own_trainable() {
            if let Some(at) = param.master {
                if param.param.data().is_untouched() {
                    continue;
                }
                let master = masters.slice(at..at + param.copy_bytes())?;
                fill_master(&layer.shared.threads, &param.param, &master)?;
            }
        }
        let count = config.rule.map_or(0, |rule| rule.moments());
        let moment = |_| HostBuf::zeroed(format!("{name} moments"), sizes.moments);
        let moments = (0..count).map(moment).collect::<Result<_, _>>()?;
        Ok(Self {
            gradients,
            second,
            masters,
            moments,
        })
    }
}

impl StoreConfig {
    fn buffer(&self, name: &str, bytes: usize) -> Result<HostBuf> {
        match bytes {
            // Drivers refuse to allocate nothing.
            0 => Ok(HostBuf::zeroed(name, 0)?),
            _ => Ok(self.device.host_buffer(name, bytes, self.pin)?),
        }
    }

    /// A slab for frozen parameters; `None` where they stay in their own buffers.
    fn frozen(&self, name: &str, bytes: usize) -> Result<Option<HostBuf>> {
        let refused = || self.pin == Pin::Try && self.device.pins().refused.is_some();
        if self.pin == Pin::Off || refused() {
            return Ok(None);
        }
        match self.buffer(name, bytes) {
            // The first that the driver has no more for.
            Ok(slab) => Ok((slab.is_pinned() || !refused()).then_some(slab)),
            Err(Error::Tensor(roundpipe_tensor::Error::HostRoom { .. })) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

/// The trainable parameters of `layers`.
///
/// # Errors
/// [`Error::Config`] when a living store trains one of them: each would move it to slabs of its
/// own, and train a copy.
fn claimable(layers: &[LayerParams]) -> Result<HashSet<ParamId>> {
    let mut trained = HashSet::new();
    for (name, param) in layers.iter().flat_map(|(_, params)| params) {
        if !param.is_trainable() {
            continue;
        }
        if let Some(keeper) = param.keeper().filter(|keeper| keeper.trains(param.id())) {
            let what = format!(
                "{name} is trained by {}; drop that first, use it for these calls too, or build this engine with \
                 inference(true)",
                keeper.name()
            );
            return Err(Error::config("model", what));
        }
        trained.insert(param.id());
    }
    Ok(trained)
}

/// Places the parameters of layer `index` in its slabs and its device block.
fn lay_out(index: usize, params: &mut [StoredParam]) -> Sizes {
    let mut sizes = Sizes::default();
    let own = |p: &StoredParam| p.home.0 == index;
    for param in params.iter_mut() {
        if param.trainable {
            let bytes = param.shape.numel() * param.grad_dtype.size();
            let at = place(&mut sizes.gradients, bytes, ALIGN);
            param.grad_bytes = at..at + bytes;
        }
        if !own(param) {
            continue;
        }
        if !param.trainable {
            param.offset = place(&mut sizes.frozen, param.param.bytes(), ALIGN);
            continue;
        }
        param.offset = place(&mut sizes.weights, param.param.bytes(), ALIGN);
        // Only the processor touches copies, whole slabs at a time: no padding.
        param.moment = place(&mut sizes.moments, param.copy_bytes(), size_of::<f32>());
        param.master = param
            .master
            .map(|_| place(&mut sizes.masters, param.copy_bytes(), size_of::<f32>()));
    }
    let frozen_at = sizes.weights.next_multiple_of(ALIGN);
    sizes.block = frozen_at + sizes.frozen;
    for param in params.iter_mut() {
        param.block_offset = match (own(param), param.trainable) {
            (true, true) => param.offset,
            (true, false) => frozen_at + param.offset,
            (false, _) => place(&mut sizes.block, param.param.bytes(), ALIGN),
        };
    }
    sizes
}

/// Puts `bytes` behind what ends at `end`, and says where.
fn place(end: &mut usize, bytes: usize, align: usize) -> usize {
    let start = end.next_multiple_of(align);
    *end = start + bytes;
    start
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Store")
            .field("layers", &self.layers.len())
            .field("bytes", &self.host_bytes())
            .finish()
    }
}

impl fmt::Debug for StoreLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            name,
            params,
            versions,
            ..
        } = self;
        f.debug_struct("StoreLayer")
            .field("name", name)
            .field("params", &params.len())
            .field("version", &versions.current())
            .finish_non_exhaustive()
    }
}
