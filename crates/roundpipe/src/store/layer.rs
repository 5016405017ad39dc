//! The memory of one layer: slabs of weights, gradients, masters and moments.
//!
//! # Invariants
//! - A parameter's own memory is given back as soon as it has moved, so the peak of making a store is
//!   the model plus one layer.
//! - What only training needs is made at its first use, whole or not at all.

use std::collections::HashMap;
use std::fmt;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, OnceLock};

use roundpipe_tensor::{DType, HostBuf, Keeper, ParamId};

use super::layout::{MomentLayout, Sizes, StoredParam, lay_out};
use super::writes::{Overwritten, Seen};
use super::{LayerParams, StoreBytes, StoreShared};
use crate::config::Lag;
use crate::error::Result;
use crate::optim::{MomentPart, MomentType, fill_master};
use crate::sync::lock;
use crate::version::{Gate, Versions};

/// The state of one layer.
pub struct StoreLayer {
    index: usize,
    pub(super) name: String,
    pub(super) params: Vec<StoredParam>,
    pub(super) sizes: Sizes,
    pub(super) homes: Vec<usize>,
    pub(super) versions: Versions,
    pub(super) shared: Arc<StoreShared>,
    /// The slab of even versions, or the only one.
    pub(super) weights: HostBuf,
    /// `None` where frozen parameters stay in their own buffers.
    pub(super) frozen: Option<HostBuf>,
    pub(super) training: OnceLock<Training>,
    pub(super) seen: Mutex<Seen>,
    /// What the user wrote over, in each slab.
    pub(super) overwritten: [Arc<Overwritten>; 2],
}

/// What only training needs.
pub(super) struct Training {
    pub(super) gradients: HostBuf,
    /// The slab of odd versions.
    pub(super) second: Option<HostBuf>,
    pub(super) masters: HostBuf,
    pub(super) moments: Vec<HostBuf>,
    pub(super) moment_layout: MomentLayout,
}

impl StoreLayer {
    pub(super) fn new(
        index: usize,
        (name, named_params): LayerParams,
        homes: &mut HashMap<ParamId, (usize, usize)>,
        gate: &Arc<Gate>,
        shared: &Arc<StoreShared>,
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
        let frozen = if params.iter().any(kept) {
            None
        } else {
            config.frozen(&format!("{name} frozen weights"), sizes.frozen)?
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
            index,
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
            overwritten: Default::default(),
        };
        layer.watch_writes();
        layer.move_in(index)?;
        let writes = |param: &StoredParam| {
            if param.trainable && param.home.0 == index {
                [param.param.data().writes(), 0]
            } else {
                [0, 0]
            }
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
    pub(super) fn move_in(&self, index: usize) -> Result<()> {
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
                home.write_unwatched(0..home.len())?
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
    pub(super) fn is_at_home(&self, slab: &HostBuf) -> bool {
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
        if !param.trainable {
            return Ok(None);
        }
        let range = param.grad_bytes.clone();
        Ok(Some(self.training()?.gradients.slice(range)?))
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

    /// Where the weights lie whose masters have a remainder.
    pub(super) fn remainder_ranges(&self) -> Vec<Range<usize>> {
        let own = self.params.iter().filter(|p| p.home.0 == self.index);
        own.filter(|param| param.has_remainder())
            .map(StoredParam::weight_bytes)
            .collect()
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

    /// The f32 copy of one of the layer's own parameters, where it has one.
    pub(crate) fn master(&self, index: usize) -> Result<Option<HostBuf>> {
        let in_slab = self.in_masters(index)?;
        Ok(in_slab.filter(|_| !self.params[index].has_remainder()))
    }

    /// What the newest weights of one of the layer's own parameters lack of its master, where that
    /// is no copy. Who holds it keeps updates away, so that `Param::data` belongs to it.
    pub(crate) fn remainder(&self, index: usize) -> Result<Option<HostBuf>> {
        let in_slab = self.in_masters(index)?;
        Ok(in_slab.filter(|_| self.params[index].has_remainder()))
    }

    fn in_masters(&self, index: usize) -> Result<Option<HostBuf>> {
        let param = &self.params[index];
        let slice = |at| {
            let bytes = at..at + param.master_bytes();
            Ok(self.training()?.masters.slice(bytes)?)
        };
        param.master.map(slice).transpose()
    }

    /// The moments of one of the layer's own parameters, in parts.
    pub(crate) fn moments(&self, index: usize) -> Result<Vec<HostBuf>> {
        let training = self.training()?;
        let ranges = training.moment_layout.ranges[index].iter();
        let places = training.moments.iter().zip(ranges);
        places
            .map(|(slab, range)| Ok(slab.slice(range.clone())?))
            .collect()
    }

    /// The type and sizes of each of them.
    pub(crate) fn moment_parts(&self, index: usize) -> Result<&[MomentPart]> {
        Ok(&self.training()?.moment_layout.parts[index])
    }

    /// In what they are kept, where the parameter's state is f32.
    pub(crate) fn moment_type(&self, index: usize) -> Result<MomentType> {
        let first = self.moment_parts(index)?.first();
        Ok(match first.map(|part| part.dtype) {
            Some(DType::U8) => MomentType::Bits8,
            Some(DType::BF16) => MomentType::Bf16,
            _ => MomentType::F32,
        })
    }

    /// Whether training has begun, so that the layout of moments is fixed.
    pub(super) fn has_moments(&self) -> bool {
        self.training.get().is_some()
    }

    /// Where moments will lie, by the rules that parameters have now.
    fn moment_layout(&self) -> MomentLayout {
        let groups = lock(&self.shared.groups).clone();
        MomentLayout::new(self.params.iter().map(|param| {
            let is_own = param.trainable && !param.users.is_empty();
            let settings = groups.of(param.home);
            let rule = settings.rule.filter(|_| is_own);
            rule.map_or_else(Vec::new, |rule| {
                let asked = settings.moments.unwrap_or_default();
                rule.moment_parts(&param.shape, param.state_dtype, asked)
            })
        }))
    }

    /// What [`Training`] takes.
    pub(super) fn training_bytes(&self) -> StoreBytes {
        let config = &self.shared.config;
        StoreBytes {
            weights: match config.max_lag {
                Lag::One => self.sizes.weights,
                Lag::Zero => 0,
            },
            frozen: 0,
            in_files: 0,
            gradients: self.sizes.gradients,
            masters: self.sizes.masters,
            moments: self.moment_layout().slabs.iter().sum(),
        }
    }

    pub(super) fn training(&self) -> Result<&Training> {
        match self.training.get() {
            Some(training) => Ok(training),
            // Two threads may both make one; the first wins, and nothing is written before.
            None => {
                let made = Training::new(self)?;
                // Before anyone can update: then a weight alone is no longer the whole value.
                self.overwritten.iter().for_each(|slab| slab.record());
                Ok(self.training.get_or_init(|| made))
            }
        }
    }
}

impl Training {
    fn new(layer: &StoreLayer) -> Result<Self> {
        let name = &layer.name;
        let sizes = layer.sizes;
        let config = &layer.shared.config;
        let gradients = config.buffer(&format!("{name} gradients"), sizes.gradients)?;
        let second = match config.max_lag {
            Lag::One => {
                let slab =
                    config.buffer(&format!("{name} weights, odd versions"), sizes.weights)?;
                Overwritten::watch(&layer.overwritten[1], &slab, layer.remainder_ranges());
                Some(slab)
            }
            Lag::Zero => None,
        };
        let masters = HostBuf::zeroed(format!("{name} masters"), sizes.masters)?;
        for (_, param) in layer.own_trainable() {
            if let Some(at) = param.master {
                // A remainder of zeros is the weight itself.
                if param.has_remainder() || param.param.data().is_untouched() {
                    continue;
                }
                let master = masters.slice(at..at + param.copy_bytes())?;
                fill_master(&layer.shared.threads, &param.param, &master)?;
            }
        }
        let moment_layout = layer.moment_layout();
        let slabs = moment_layout.slabs.iter();
        let moments = slabs
            .map(|bytes| HostBuf::zeroed(format!("{name} moments"), *bytes))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            gradients,
            second,
            masters,
            moments,
            moment_layout,
        })
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
