//! The state of a store as the tensors of a checkpoint, and back.
//!
//! [`HeldState::take`] runs on the thread that updates, between two steps. It copies nothing: every
//! tensor is a guard on the memory where it lives, behind a hold on its layer. [`load`] runs while
//! nothing moves.
//!
//! # Invariants
//! - Memory that cannot be had is an error before the first byte of it is written.
//! - Weights that are rounded from an f32 master are not saved: loading rounds them again.
//! - An f32 master is saved as f32, however the store holds it.

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::Arc;

use roundpipe_files::text::shown;
use roundpipe_tensor::host::HostMut;
use roundpipe_tensor::optim::{self, Floats};
use roundpipe_tensor::{DType, HostBuf, Shape};

use super::Checkpoint;
use super::manifest::{
    Counters, FORMAT, FrozenParam, Manifest, Role, SavedParam, SavedScaler, tensor_name,
};
use super::read::FillTarget;
use super::write::{Snapshot, SourceBytes, SplitGuards, TensorSource};
use crate::error::{Error, Result};
use crate::optim::{MomentPart, MomentType, floats_mut};
use crate::planted;
use crate::store::{Store, StoreLayer, StoredParam};
use crate::version::Hold;

/// What a checkpoint holds beside the store's own state.
#[derive(Debug, Default)]
pub(crate) struct RunState {
    /// Without `updates`, which the store knows.
    pub counters: Counters,
    pub scaler: Option<SavedScaler>,
    pub buffers: Vec<BufferCopy>,
    pub notes: String,
}

/// A copy of a buffer that layers set.
#[derive(Debug)]
pub(crate) struct BufferCopy {
    pub name: String,
    pub dtype: DType,
    pub shape: Shape,
    pub bytes: Vec<u8>,
}

/// The trained parameters of a store and guards on all of their state, behind holds on their layers.
pub(crate) struct HeldState {
    params: Vec<SavedParam>,
    tensors: Vec<TensorSource>,
}

impl HeldState {
    /// Holds the store as it is between two steps; `counters` say which version that is.
    ///
    /// # Errors
    /// While the user writes a parameter; nothing is held then.
    pub fn take(store: &Store, counters: &Counters) -> Result<Self> {
        let groups = store.groups();
        let mut held = Self {
            params: Vec::new(),
            tensors: Vec::new(),
        };
        for layer in store.layers() {
            let hold = Arc::new(layer.versions().hold());
            for (index, param) in layer.own_trainable() {
                held.add(layer, index, counters, &hold)?;
                let rule = groups.of(param.home).rule;
                held.params.push(SavedParam {
                    name: param.name.clone(),
                    dtype: param.dtype.to_string(),
                    shape: param.shape.dims().to_vec(),
                    rule: rule.map(|rule| rule.to_string()),
                    moments: layer.moment_parts(index)?.len(),
                    frozen_steps: param.frozen_steps(),
                });
            }
        }
        Ok(held)
    }

    /// Adds the tensors of one parameter.
    fn add(
        &mut self,
        layer: &StoreLayer,
        index: usize,
        counters: &Counters,
        hold: &Arc<Hold>,
    ) -> Result<()> {
        let param = &layer.params()[index];
        match layer.remainder(index)? {
            Some(remainder) => self.tensors.push(TensorSource {
                name: tensor_name(&param.name, Role::Value),
                dtype: param.state_dtype,
                shape: param.shape,
                bytes: SourceBytes::Split {
                    value: SplitGuards {
                        weights: layer.working(index, counters.steps)?.read_all()?,
                        remainder: remainder.read_all()?,
                    },
                    _hold: hold.clone(),
                },
            }),
            None => {
                let value = value(layer, index, counters.steps)?;
                let part = MomentPart {
                    dtype: param.state_dtype,
                    shape: param.shape,
                };
                self.add_held(param, Role::Value, part, value, hold)?;
            }
        }
        let moments = layer.moments(index)?.into_iter();
        for (at, (memory, part)) in moments.zip(layer.moment_parts(index)?).enumerate() {
            self.add_held(param, Role::Moment(at), *part, memory, hold)?;
        }
        if counters.lag > 0 {
            let previous = layer.working(index, counters.steps - counters.lag)?;
            let part = MomentPart {
                dtype: param.dtype,
                shape: param.shape,
            };
            self.add_held(param, Role::Previous, part, previous, hold)?;
        }
        Ok(())
    }

    /// Adds a tensor that lies in one piece.
    fn add_held(
        &mut self,
        param: &StoredParam,
        role: Role,
        part: MomentPart,
        memory: HostBuf,
        hold: &Arc<Hold>,
    ) -> Result<()> {
        let is_lost = matches!(role, Role::Moment(_)) && planted::drops_moments();
        let bytes = if is_lost {
            SourceBytes::Copied(vec![0; memory.len()])
        } else {
            SourceBytes::Held {
                guard: memory.read_all()?,
                _hold: hold.clone(),
            }
        };
        self.tensors.push(TensorSource {
            name: tensor_name(&param.name, role),
            dtype: part.dtype,
            shape: part.shape,
            bytes,
        });
        Ok(())
    }
}

impl Snapshot {
    /// All that a checkpoint holds.
    pub fn new(store: &Store, held: HeldState, run: RunState) -> Self {
        let HeldState {
            params,
            mut tensors,
        } = held;
        let buffers = run.buffers.iter().map(|buffer| buffer.name.clone());
        let manifest = Manifest {
            format: FORMAT,
            writer: concat!("roundpipe ", env!("CARGO_PKG_VERSION")).to_owned(),
            counters: Counters {
                updates: store.steps(),
                ..run.counters
            },
            scaler: run.scaler,
            params,
            frozen: frozen(store).map(frozen_param).collect(),
            buffers: buffers.collect(),
            files: Vec::new(),
            tensors: Vec::new(),
            notes: run.notes,
            hash: String::new(),
        };
        tensors.extend(run.buffers.into_iter().map(|buffer| TensorSource {
            name: tensor_name(&buffer.name, Role::Value),
            dtype: buffer.dtype,
            shape: buffer.shape,
            bytes: SourceBytes::Copied(buffer.bytes),
        }));
        Self { manifest, tensors }
    }
}

/// Parameters that are not trained, each once.
fn frozen(store: &Store) -> impl Iterator<Item = &StoredParam> {
    let own = store.layers().iter().flat_map(|layer| layer.own());
    own.map(|(_, param)| param).filter(|param| !param.trainable)
}

fn frozen_param(param: &StoredParam) -> FrozenParam {
    FrozenParam {
        name: param.name.clone(),
        dtype: param.dtype.to_string(),
        shape: param.shape.dims().to_vec(),
    }
}

/// Where the optimizer holds a parameter's value that lies in one piece.
fn value(layer: &StoreLayer, index: usize, version: u64) -> Result<HostBuf> {
    match layer.master(index)? {
        Some(master) => Ok(master),
        None => layer.working(index, version),
    }
}

/// Refuses a checkpoint of another model or rule; names the first difference.
pub(crate) fn check_fits(store: &Store, checkpoint: &Checkpoint) -> Result<()> {
    let path = checkpoint.path();
    let manifest = checkpoint.manifest();
    let saved: HashMap<&str, &SavedParam> = manifest
        .params
        .iter()
        .map(|param| (param.name.as_str(), param))
        .collect();
    let groups = store.groups();
    let mut known = HashSet::new();
    for layer in store.layers() {
        for (index, param) in layer.own_trainable() {
            let name = param.name.as_str();
            known.insert(name);
            let saved = saved.get(name).ok_or_else(|| {
                let what = "has no value of it, and this engine trains it; freeze it, or use the \
                            model that the checkpoint is of";
                differs(path, name, what)
            })?;
            compare(path, name, "type", &saved.dtype, &param.dtype.to_string())?;
            compare_shapes(path, name, &saved.shape, &param.shape)?;
            let rule = groups.of(param.home).rule;
            let rule = rule.map_or("no rule".to_owned(), |rule| rule.to_string());
            let saved_rule = saved.rule.as_deref().unwrap_or("no rule");
            compare(path, name, "rule", saved_rule, &rule)?;
            check_tensors(store, checkpoint, layer, index)?;
        }
    }
    let mut names = manifest.params.iter().map(|param| &param.name);
    if let Some(name) = names.find(|name| !known.contains(name.as_str())) {
        let what = "has a value of it, and this engine does not train it; use the model that the \
                    checkpoint is of";
        return Err(differs(path, name, what));
    }
    check_frozen(store, checkpoint)
}

/// Compares the tensors of a parameter with the memory that they go to.
fn check_tensors(
    store: &Store,
    checkpoint: &Checkpoint,
    layer: &StoreLayer,
    index: usize,
) -> Result<()> {
    let path = checkpoint.path();
    let param = &layer.params()[index];
    let parts = layer.moment_parts(index)?.iter().enumerate();
    let mut wanted = vec![(Role::Value, param.state_dtype, &param.shape)];
    wanted.extend(parts.map(|(at, part)| (Role::Moment(at), part.dtype, &part.shape)));
    if checkpoint.manifest().counters.lag > 0 {
        wanted.push((Role::Previous, param.dtype, &param.shape));
    }
    for (role, dtype, shape) in wanted {
        let name = tensor_name(&param.name, role);
        let Some(at) = checkpoint.index(&name) else {
            let what = "has none of it; use the rule and model that the checkpoint is of";
            return Err(differs(path, &name, what));
        };
        let tensor = checkpoint.tensor(at);
        let (setting, found, dtype) = match role {
            Role::Moment(_) if param.state_dtype == DType::F32 => {
                ("`moments`", moment_name(tensor.dtype), moment_name(dtype))
            }
            _ => (
                "type (`optim_dtype`)",
                tensor.dtype.to_string(),
                dtype.to_string(),
            ),
        };
        compare(path, &name, setting, &found, &dtype)?;
        compare_shapes(path, &name, tensor.shape.dims(), shape)?;
    }
    let more = tensor_name(&param.name, Role::Moment(layer.moment_parts(index)?.len()));
    match (checkpoint.index(&more), store.rule()) {
        (Some(_), Some(rule)) => {
            let what = format!("is more than {rule} has; use the rule of the checkpoint");
            Err(differs(path, &more, &what))
        }
        _ => Ok(()),
    }
}

/// What the setting is called that makes moments of this type.
fn moment_name(dtype: DType) -> String {
    match dtype {
        DType::U8 => MomentType::Bits8.to_string(),
        other => other.to_string(),
    }
}

fn check_frozen(store: &Store, checkpoint: &Checkpoint) -> Result<()> {
    let path = checkpoint.path();
    let manifest = checkpoint.manifest();
    let here: HashMap<&str, &StoredParam> = frozen(store)
        .map(|param| (param.name.as_str(), param))
        .collect();
    for saved in &manifest.frozen {
        let Some(param) = here.get(saved.name.as_str()) else {
            let what = "is a frozen parameter of it, and this model has none of that name; use the \
                        model that the checkpoint is of";
            return Err(differs(path, &saved.name, what));
        };
        compare(
            path,
            &saved.name,
            "type",
            &saved.dtype,
            &param.dtype.to_string(),
        )?;
        compare_shapes(path, &saved.name, &saved.shape, &param.shape)?;
    }
    if here.len() != manifest.frozen.len() {
        let saved: HashSet<&str> = manifest.frozen.iter().map(|p| p.name.as_str()).collect();
        let unknown = here.keys().filter(|name| !saved.contains(**name)).min();
        let what = "is a frozen parameter of this model that the checkpoint's model did not have; \
                    use the model that the checkpoint is of";
        return Err(differs(path, unknown.unwrap_or(&""), what));
    }
    for name in &manifest.buffers {
        let tensor = checkpoint.index(&tensor_name(name, Role::Value));
        let tensor = tensor.map(|at| checkpoint.tensor(at));
        let fits = |param: &&&StoredParam| {
            tensor.is_some_and(|t| t.dtype == param.dtype && t.shape == param.shape)
        };
        if here.get(name.as_str()).filter(fits).is_none() {
            return Err(differs(
                path,
                name,
                "is a buffer that does not fit this model",
            ));
        }
    }
    Ok(())
}

fn compare(path: &Path, name: &str, of: &str, saved: &str, here: &str) -> Result<()> {
    if saved == here {
        return Ok(());
    }
    let what =
        format!("has {of} {saved} in it, and {here} in this engine; build it with the former");
    Err(differs(path, name, &what))
}

fn compare_shapes(path: &Path, name: &str, saved: &[usize], here: &Shape) -> Result<()> {
    if saved == here.dims() {
        return Ok(());
    }
    let what = format!("is {saved:?} in it, and {here} in this model; use the model that it is of");
    Err(differs(path, name, &what))
}

fn differs(path: &Path, name: &str, what: &str) -> Error {
    Error::checkpoint(
        path,
        format!("does not fit this engine: {} {what}", shown(name)),
    )
}

/// Weights that are to be rounded from their master.
struct Rounding<'a> {
    param: &'a StoredParam,
    master: HostBuf,
    working: HostMut,
}

/// Writes a checkpoint that fits over the store, as `version`: later than the newest. Nothing moves
/// meanwhile.
pub(crate) fn load(store: &Store, checkpoint: &Checkpoint, version: u64) -> Result<()> {
    let manifest = checkpoint.manifest();
    let mut jobs = Vec::new();
    let mut roundings = Vec::new();
    let all = |buf: HostBuf| buf.write_unwatched(0..buf.len());
    for layer in store.layers() {
        for (index, param) in layer.own_trainable() {
            let mut add = |role, target| -> Result<()> {
                let at = checkpoint.index(&tensor_name(&param.name, role));
                let at = at.ok_or_else(|| {
                    let what = "lacks a tensor of it";
                    differs(checkpoint.path(), &param.name, what)
                })?;
                jobs.push((at, target));
                Ok(())
            };
            let target = match layer.remainder(index)? {
                Some(remainder) => FillTarget::Split {
                    weights: all(layer.working(index, version)?)?,
                    remainder: all(remainder)?,
                },
                None => FillTarget::Memory(all(value(layer, index, version)?)?),
            };
            add(Role::Value, target)?;
            for (at, memory) in layer.moments(index)?.into_iter().enumerate() {
                add(Role::Moment(at), FillTarget::Memory(all(memory)?))?;
            }
            if manifest.counters.lag > 0 {
                let previous = layer.working(index, version - manifest.counters.lag)?;
                add(Role::Previous, FillTarget::Memory(all(previous)?))?;
            }
            if let Some(master) = layer.master(index)? {
                let working = all(layer.working(index, version)?)?;
                roundings.push(Rounding {
                    param,
                    master,
                    working,
                });
            }
        }
    }
    let frozen: HashMap<&str, &StoredParam> = frozen(store)
        .map(|param| (param.name.as_str(), param))
        .collect();
    for name in &manifest.buffers {
        let at = checkpoint.index(&tensor_name(name, Role::Value));
        if let (Some(at), Some(param)) = (at, frozen.get(name.as_str())) {
            jobs.push((at, FillTarget::Memory(all(param.param.data())?)));
        }
    }
    // From here on memory is overwritten.
    checkpoint.fill_all(jobs).map_err(mixed)?;
    for mut rounding in roundings {
        let master = rounding.master.read_all()?;
        let working = floats_mut(rounding.param.dtype, &mut rounding.working);
        let master = Floats::F32(master.as_slice());
        optim::cast(&store.shared.threads, master, working)?;
    }
    publish(store, manifest, version)
}

/// A read that failed although all hashes were right a moment ago.
fn mixed(error: Error) -> Error {
    match error {
        Error::Checkpoint { path, what } => {
            let what = format!(
                "{what}; the engine's state is mixed now, so restore a checkpoint before training \
                 goes on"
            );
            Error::Checkpoint { path, what }
        }
        other => other,
    }
}

/// Makes what was loaded the newest version of every layer.
fn publish(store: &Store, manifest: &Manifest, version: u64) -> Result<()> {
    let frozen_steps: HashMap<&str, u64> = manifest
        .params
        .iter()
        .map(|param| (param.name.as_str(), param.frozen_steps))
        .collect();
    // No call is under way and no one else writes, so nothing calls this wait off.
    let never = store.abort();
    for layer in store.layers() {
        let next = layer.versions().current() + 1;
        let ticket = layer.versions().wait_writable(next, &never)?;
        for (index, param) in layer.own_trainable() {
            param.param.rehome(layer.working(index, version)?)?;
            param.set_frozen_steps(frozen_steps.get(param.name.as_str()).copied().unwrap_or(0));
        }
        layer.forget_writes();
        ticket.publish_as(version);
    }
    store.clear_gradients();
    store.set_steps(manifest.counters.updates);
    store.set_asked(version);
    Ok(())
}
