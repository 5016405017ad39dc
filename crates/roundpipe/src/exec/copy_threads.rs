//! Weights on their way in and gradients on their way out, beside the launcher.
//!
//! Each worker has two threads here, so that a prefetch never waits behind launches, and a gradient
//! never behind a prefetch that waits for a new version of the weights. The serial executor does
//! both on the spot.
//!
//! # StepRequest
//! 1. Weights are read once the version that the call asks for has been published, under a ticket
//!    that keeps the optimizer from writing there until the last chunk has landed.
//! 2. A gradient is written once the update before has read the one that lies there.
//! 3. At most [`MOST_UNLOADS`] jobs' gradients of a worker are on their way; the launcher waits for
//!    room.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;

use roundpipe_tensor::Tensor;
use roundpipe_tensor::device::Event;
use roundpipe_tensor::transfer::{Part, Port, Slot};

use super::call::Call;
use crate::error::{Error, Result};
use crate::version::ReadTicket;

/// Weights and gradients travel in pieces of this size, so that activations can pass between them.
const CHUNK: u64 = 16 << 20;
const MOST_UNLOADS: usize = 2;

/// A layer's weights to bring.
pub(crate) struct WeightUpload {
    pub call: Arc<Call>,
    pub stage: usize,
    pub layer: usize,
    pub memory: Slot,
    pub tickets: Vec<ReadTicket>,
}

/// The gradients of a job to take away.
pub(crate) struct GradientDownload {
    pub call: Arc<Call>,
    pub stage: usize,
    pub gradients: Vec<Gradient>,
    /// Behind the kernels that made them.
    pub after: Event,
}

/// One parameter's gradient, in its final type.
pub(crate) struct Gradient {
    pub layer: usize,
    pub param: usize,
    pub tensor: Tensor,
}

/// Jobs whose gradients are on their way.
type Room = Arc<(Mutex<usize>, Condvar)>;

/// Who moves weights and gradients of a worker.
pub(crate) enum CopyThreads {
    /// Whoever asks.
    Inline(Arc<Port>),
    /// Two threads.
    Threads {
        loads: Sender<WeightUpload>,
        unloads: Sender<GradientDownload>,
        room: Room,
    },
}

impl CopyThreads {
    /// Starts the threads of a worker.
    pub fn start(port: &Arc<Port>, threads: &mut Vec<JoinHandle<()>>) -> Result<Self> {
        let (loads, to_load) = channel::<WeightUpload>();
        let (unloads, to_unload) = channel::<GradientDownload>();
        let room: Room = Arc::default();
        let id = port.worker().device().id();
        let (up, down, freed) = (port.clone(), port.clone(), room.clone());
        let spawn = |name: String, body: Box<dyn FnOnce() + Send>| {
            let fail = |e| Error::config("threads", format!("cannot start the thread {name}: {e}"));
            std::thread::Builder::new()
                .name(name.clone())
                .spawn(body)
                .map_err(fail)
        };
        threads.push(spawn(
            format!("{id} up"),
            Box::new(move || load_all(&up, &to_load)),
        )?);
        threads.push(spawn(
            format!("{id} down"),
            Box::new(move || unload_all(&down, &to_unload, &freed)),
        )?);
        Ok(Self::Threads {
            loads,
            unloads,
            room,
        })
    }

    /// Brings a layer's weights; they appear in the call, and a part of it ends.
    pub fn load(&self, load: WeightUpload) {
        load.call.open_part();
        match self {
            Self::Inline(port) => bring(port, load),
            // The thread ends only after this sender is gone.
            Self::Threads { loads, .. } => drop(loads.send(load)),
        }
    }

    /// Takes a job's gradients away; then a part of the call ends.
    pub fn unload(&self, unload: GradientDownload) {
        unload.call.open_part();
        match self {
            Self::Inline(port) => take_away(port, unload),
            Self::Threads { unloads, room, .. } => {
                let (count, freed) = &**room;
                let mut count = count.lock().unwrap_or_else(PoisonError::into_inner);
                while *count >= MOST_UNLOADS {
                    count = freed.wait(count).unwrap_or_else(PoisonError::into_inner);
                }
                *count += 1;
                drop(count);
                drop(unloads.send(unload));
            }
        }
    }
}

fn load_all(port: &Port, loads: &Receiver<WeightUpload>) {
    for load in loads {
        bring(port, load);
    }
}

fn unload_all(port: &Port, unloads: &Receiver<GradientDownload>, room: &Room) {
    for unload in unloads {
        take_away(port, unload);
        *room.0.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        room.1.notify_all();
    }
}

fn fail(call: &Call, stage: usize, layer: usize, error: Error) {
    match error.is_secondary() {
        true => call.fail(error),
        false => call.fail(call.place(stage, Some(layer), None, error)),
    }
}

fn bring(port: &Port, load: WeightUpload) {
    let (call, stage, layer) = (load.call.clone(), load.stage, load.layer);
    if !call.has_failed()
        && let Err(error) = try_bring(port, load)
    {
        fail(&call, stage, layer, error);
    }
    call.end_part();
}

fn try_bring(port: &Port, load: WeightUpload) -> Result<()> {
    let WeightUpload {
        call,
        stage,
        layer,
        memory,
        tickets,
    } = load;
    let spec = &call.spec;
    let who = || format!("{} up", port.worker().device().id());
    {
        let _watched = spec
            .board
            .wait(&who(), "waiting for a new version of the weights");
        for ticket in &tickets {
            ticket.wait_readable(&call.abort)?;
        }
    }
    let segments = spec.model.store.segments(layer, spec.version)?;
    let part = |s: crate::store::Segment| {
        Ok(Part {
            host: s.data.read_all()?,
            offset: s.block_offset as u64,
        })
    };
    let parts = segments.into_iter().map(part).collect::<Result<Vec<_>>>()?;
    let (loaded, flight) = memory.fill(&spec.model.layers[layer].0, parts, CHUNK, port.log())?;
    call.put(|state| state.loaded.insert((stage, layer), loaded));
    flight.land()?;
    drop(tickets);
    Ok(())
}

fn take_away(port: &Port, unload: GradientDownload) {
    let (call, stage) = (unload.call.clone(), unload.stage);
    let layer = call.spec.stages[stage].layers.start;
    if let Err(error) = try_take_away(port, unload) {
        fail(&call, stage, layer, error);
    }
    call.end_part();
}

fn try_take_away(port: &Port, unload: GradientDownload) -> Result<()> {
    let GradientDownload {
        call,
        gradients,
        after,
        ..
    } = unload;
    if call.has_failed() {
        // The gradients' memory goes back once the kernels that write it have run.
        let _ = after.fence();
        return Ok(());
    }
    let spec = &call.spec;
    let mut flights = Vec::with_capacity(gradients.len());
    for Gradient {
        layer,
        param,
        tensor,
    } in gradients
    {
        let stored = spec.model.store.layer(layer);
        {
            let _watched = spec.board.wait(
                "gradients",
                "waiting for the optimizer to read the last ones",
            );
            spec.model
                .store
                .wait_grad_free(layer, spec.step, &call.abort)?;
        }
        let Some(range) = stored.grad_range(param)? else {
            continue;
        };
        let host = range.write(0..range.len())?;
        flights.push((
            layer,
            param,
            port.unload("gradient", tensor, &after, host, CHUNK)?,
        ));
    }
    if flights.is_empty() {
        // Nothing else says that the kernels of the job have run.
        after.fence()?;
    }
    let mut flights = flights.into_iter().peekable();
    while let Some((layer, param, flight)) = flights.next() {
        flight.land()?;
        spec.model.store.layer(layer).set_filled(param, true);
        if flights.peek().is_none_or(|(next, ..)| *next != layer) {
            call.put(|state| state.landed[layer] = true);
        }
    }
    Ok(())
}
