//! Weights and optimizer state in and out of a living engine, by name.
//!
//! Every function here waits until nothing moves, and holds the caller's turn while it reads or
//! writes. What does not fit is refused before anything is written.
//!
//! # Invariants
//! - A state that is read and loaded again, into this engine or another over the same model, gives
//!   the same bits from then on.
//! - The optimizer's copies follow: values that round to a copy's weight leave the copy as it is.

use std::collections::BTreeMap;

use roundpipe_tensor::{DType, HostBuf, HostTensor, Param, Shape};

use super::RoundPipe;
use super::core::Core;
use super::parameters::copy_of;
use crate::error::{Error, Result};
use crate::store::{Store, StoredParam};
use crate::update::OptimHandle;

/// What training changes, by name: with the model's frozen parameters and buffers, all that a later
/// run needs to go on with the same bits.
#[derive(Debug, Clone)]
pub struct TrainingState {
    /// Updates made so far, skipped ones left out.
    pub updates: u64,
    /// Calls in training mode so far: the place in the random stream.
    pub calls: u64,
    /// The trained parameters, each once.
    pub params: BTreeMap<String, ParamState>,
}

/// A trained parameter and its optimizer state.
#[derive(Debug, Clone)]
pub struct ParamState {
    /// Its value as the optimizer holds it: in f32, or as
    /// [`Builder::optim_dtype`](super::Builder::optim_dtype) says.
    pub value: HostTensor,
    /// The moments of the rule, in the rule's order and with the rule's sizes: those of the
    /// parameter, but `[.., rows, 1]` and `[.., 1, cols]` of an Adafactor's matrix. Moments of 8 bits
    /// are two tensors each, codes and scales.
    pub moments: Vec<HostTensor>,
    /// Updates in which a [`ParamGroup`](crate::ParamGroup) froze it.
    pub frozen_steps: u64,
}

impl<M> RoundPipe<M> {
    /// A copy of what training has changed.
    ///
    /// # Errors
    /// What failed in calls and steps before; when memory runs out.
    pub fn training_state(&self) -> Result<TrainingState> {
        self.check_whole("training_state")?;
        self.core.at_rest("training_state", |core, calls| {
            let mut params = BTreeMap::new();
            for handle in core.model.store.optim_params()? {
                let parts = handle.moment_dtypes().zip(handle.moment_shapes());
                let moments = handle.moments().iter().zip(parts);
                let state = ParamState {
                    value: copy_of(&handle.value(), handle.dtype, &handle.shape)?,
                    moments: moments
                        .map(|(buf, (dtype, shape))| copy_of(buf, dtype, shape))
                        .collect::<Result<_>>()?,
                    frozen_steps: stored(&core.model.store, &handle).frozen_steps(),
                };
                params.insert(handle.name, state);
            }
            Ok(TrainingState {
                updates: core.model.store.steps(),
                calls: *calls,
                params,
            })
        })
    }

    /// Goes on from a state. Gradients since the last step are as they were; drop them with
    /// [`RoundPipe::skip_step`].
    ///
    /// # Errors
    /// [`Error::Config`] for a state of another model or rule, and then nothing is changed; what
    /// failed in calls and steps before.
    pub fn load_training_state(&self, state: &TrainingState) -> Result<()> {
        self.check_whole("load_training_state")?;
        self.core.at_rest("load_training_state", |core, calls| {
            let store = &core.model.store;
            let handles = store.optim_params()?;
            check_state(&handles, state)?;
            for handle in &handles {
                handle.check_free()?;
                handle.moments().iter().try_for_each(check_free)?;
                check_free(&stored(store, handle).param.data())?;
            }
            for handle in &handles {
                let loaded = &state.params[&handle.name];
                store.set_value(handle, &loaded.value.read()?)?;
                for (moment, value) in handle.moments().iter().zip(&loaded.moments) {
                    write(moment, value)?;
                }
                stored(store, handle).set_frozen_steps(loaded.frozen_steps);
            }
            store.weights_from_copies()?;
            store.set_steps(state.updates);
            *calls = state.calls;
            Ok(())
        })
    }

    /// Writes parameters and buffers by name, cast to their type where both are floats. The
    /// optimizer's copies follow; its moments and step count stay.
    ///
    /// # Errors
    /// [`Error::Config`] for names that the model does not have and values that do not fit, and then
    /// nothing is changed; what failed in calls and steps before.
    pub fn load_params<N: AsRef<str>>(
        &self,
        values: impl IntoIterator<Item = (N, HostTensor)>,
    ) -> Result<()> {
        let values: Vec<(N, HostTensor)> = values.into_iter().collect();
        self.core.at_rest("load_params", |core, _| {
            let params = core.model.store.params();
            let known: BTreeMap<&str, &Param> = params
                .map(|stored| (stored.name.as_str(), &stored.param))
                .collect();
            let mut casts = Vec::with_capacity(values.len());
            for (name, value) in &values {
                let name = name.as_ref();
                let param = known.get(name).ok_or_else(|| {
                    let what = format!("the model has no parameter `{name}`");
                    Error::config("load_params", what)
                })?;
                check_shape("load_params", name, param.shape(), value)?;
                param.leave_file()?;
                check_free(&param.data())?;
                casts.push((*param, cast(name, value, param.dtype())?));
            }
            for (param, value) in casts {
                write(&param.data(), &value)?;
            }
            Ok(())
        })
    }
}

impl Core {
    /// Runs `work` while nothing moves, with the place in the random stream.
    fn at_rest<R>(
        &self,
        what: &'static str,
        work: impl FnOnce(&Self, &mut u64) -> Result<R>,
    ) -> Result<R> {
        self.enter(what)?;
        // Updates of other engines that write these weights, as for a call.
        self.model.store.wait_for_other_keepers();
        let mut sequence = self.turn();
        self.come_to_rest(&mut sequence)?;
        let before = sequence.number;
        let done = work(self, &mut sequence.number);
        if sequence.number != before {
            // Failures go back no further than the loaded place; the steps that this engine made
            // before belong to another run.
            sequence.earliest_number = sequence.number;
        }
        done
    }
}

/// The parameter that a handle is of.
fn stored<'a>(store: &'a Store, handle: &OptimHandle) -> &'a StoredParam {
    let mut params = store.layer(handle.layer).params().iter();
    params
        .find(|stored| stored.name == handle.name)
        .expect("handles are made from the store's parameters")
}

fn check_state(handles: &[OptimHandle], state: &TrainingState) -> Result<()> {
    let refuse = |what: String| Err(Error::config("load_training_state", what));
    for handle in handles {
        let name = &handle.name;
        let Some(loaded) = state.params.get(name) else {
            return refuse(format!("the state has no parameter `{name}`"));
        };
        check_shape("load_training_state", name, &handle.shape, &loaded.value)?;
        let have_types = loaded.moments.iter().map(HostTensor::dtype);
        if loaded.value.dtype() == handle.dtype && !have_types.eq(handle.moment_dtypes()) {
            let of = |dtypes: Vec<DType>| match dtypes.first() {
                Some(DType::U8) => "8bit".to_owned(),
                Some(dtype) => dtype.to_string(),
                None => "none".to_owned(),
            };
            let have = of(loaded.moments.iter().map(HostTensor::dtype).collect());
            let want = of(handle.moment_dtypes().collect());
            if have != want && have != "none" && want != "none" {
                return refuse(format!(
                    "the moments of `{name}` are {have} in the state and {want} in the engine; build \
                     the engine with the `moments` that the state comes from"
                ));
            }
        }
        let (have, want) = (loaded.moments.len(), handle.moments().len());
        if have != want {
            return refuse(format!(
                "`{name}` has {have} moments in the state, and the engine's rule has {want}; use \
                 the rule that the state comes from"
            ));
        }
        for (moment, shape) in loaded.moments.iter().zip(handle.moment_shapes()) {
            if moment.shape() != shape {
                return refuse(format!(
                    "a moment of `{name}` is {} in the state and {shape} in the engine's rule; use \
                     the rule that the state comes from",
                    moment.shape()
                ));
            }
        }
        let dtypes = std::iter::once(handle.dtype).chain(handle.moment_dtypes());
        let tensors = std::iter::once(&loaded.value).chain(&loaded.moments);
        let wrong = tensors
            .zip(dtypes)
            .find(|(tensor, dtype)| tensor.dtype() != *dtype);
        if let Some((wrong, _)) = wrong {
            return refuse(format!(
                "`{name}` is {} in the state, not {}; build the engine with the `optim_dtype` that the \
                 state comes from",
                wrong.dtype(),
                handle.dtype
            ));
        }
    }
    let is_unknown = |name: &&String| !handles.iter().any(|handle| handle.name == **name);
    match state.params.keys().find(is_unknown) {
        Some(name) => refuse(format!("the model trains no parameter `{name}`")),
        None => Ok(()),
    }
}

fn check_shape(what: &'static str, name: &str, shape: &Shape, value: &HostTensor) -> Result<()> {
    if value.shape() == shape {
        return Ok(());
    }
    let text = format!(
        "`{name}` is {shape} in the model and {} here",
        value.shape()
    );
    Err(Error::config(what, text))
}

fn cast(name: &str, value: &HostTensor, dtype: DType) -> Result<HostTensor> {
    if value.dtype() == dtype {
        return Ok(value.clone());
    }
    if !(value.dtype().is_float() && dtype.is_float()) {
        let text = format!(
            "`{name}` is {dtype} in the model and {} here",
            value.dtype()
        );
        return Err(Error::config("load_params", text));
    }
    let values = value.to_f64_vec()?;
    Ok(HostTensor::from_f64s(&values, dtype, value.shape().dims())?)
}

/// Refuses a buffer that the user reads or writes just now: a write would fail half way.
fn check_free(buf: &HostBuf) -> Result<()> {
    buf.write(0..buf.len())?;
    Ok(())
}

/// Writes the values of a tensor over a buffer of the same size and type.
fn write(buf: &HostBuf, value: &HostTensor) -> Result<()> {
    let read = value.read()?;
    buf.write(0..buf.len())?
        .bytes()
        .copy_from_slice(read.bytes());
    Ok(())
}
