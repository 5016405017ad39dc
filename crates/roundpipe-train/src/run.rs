//! The steps of a run: what happens in each, what happens now and then, and how a run ends.
//!
//! A step takes a batch from the stream, sends it through the engine, and asks for an update. Its
//! gradient norm is known when the update is done, so a step is reported when the next has its loss.
//! Behind some steps a checkpoint is ordered, which is written beside the steps that follow.
//!
//! # Invariants
//! - Whether and when a run was interrupted leaves no trace in its weights or its losses.
//! - Validation, samples, saves and reports change no bit of the training.
//! - A save that fails ends no run; the checkpoint before it stays.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use roundpipe::engine::StepHandle;
use roundpipe::{Checkpoints, DType, GradScaler, LrSchedule, PlanKind, RoundPipe, Saving, Update};
use roundpipe_data::{Position, Stream, TrainBatch};
use roundpipe_report::{End, Eval, Sample, Save, Server, Start, Step, Timeline};
use serde::{Deserialize, Serialize};

use crate::batches;
use crate::error::{Error, Result};
use crate::folder::RunFolder;
use crate::machine;
use crate::model::write_result;
use crate::overview;
use crate::preference::{self, Figures, PairLoss, Pairs, Side};
use crate::progress::{Overview, Telling, Watcher};
use crate::reference;
use crate::samples;
use crate::settings::{Given, Settings};
use crate::start::{self, Data, Ready, lag, schedule, stream_options};

/// Steps between two timelines of the report.
const TIMELINE_EVERY: u64 = 50;

/// What is asked for.
#[derive(Debug, Clone, Default)]
pub struct Request {
    /// Settings from a file and from arguments.
    pub given: Given,
    /// Serve the live page, on this port or any.
    pub watch: Option<Option<u16>>,
}

/// How a run ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// All steps are done, now or before.
    Finished {
        /// The folder of the model or adapter.
        model: PathBuf,
        /// The run's folder.
        folder: PathBuf,
    },
    /// It was asked to stop, and can go on.
    Interrupted {
        /// Steps done and saved.
        step: u64,
        /// The run's folder.
        folder: PathBuf,
    },
}

/// What a checkpoint keeps beside the engine's state.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Notes {
    step: u64,
    position: Position,
    tokens_trained: u64,
    elapsed_s: f64,
    /// Best validation so far, and how many since were not better.
    best: Option<(u64, f64)>,
    worse: u64,
    /// Parts of a step: more than the settings say where one did not fit.
    microbatches: usize,
    /// The step that the metrics may lack, since its norm was not known yet.
    told_later: Option<Step>,
}

/// Trains. `stop` asks for an end at the next step, with a checkpoint.
///
/// # Errors
/// One line with the place and the fix; [`Error::exit_code`] says of which kind it is.
pub fn run(request: &Request, watcher: &mut dyn Watcher, stop: &AtomicBool) -> Result<Outcome> {
    let (folder, settings, resumes) = start::open_folder(&request.given)?;
    let finished = folder.file("model");
    let checkpoints =
        Checkpoints::open(folder.file("checkpoints"))?.keep_last(settings.keep.max(1));
    let newest = checkpoints.newest()?;
    newest.skipped.iter().for_each(|line| watcher.note(line));
    if newest.checkpoint.is_none() && !newest.skipped.is_empty() {
        watcher.note("no checkpoint can be read, so the run begins again at its first step");
    }
    let notes = match &newest.checkpoint {
        Some(checkpoint) => Some(read_notes(checkpoint.notes())?),
        None => None,
    };
    if let Some(notes) = &notes {
        let is_done = settings.steps.is_some_and(|steps| notes.step >= steps);
        if resumes && is_done && finished.is_dir() {
            return Ok(Outcome::Finished {
                model: finished,
                folder: folder.path().to_path_buf(),
            });
        }
    }
    // A folder that was made for a start that fails before its first step goes away again.
    let mut ready = start::prepare(&folder, settings, watcher)
        .inspect_err(|_| folder.abandon())
        .map_err(|e| request.given.placed(e))?;
    // Before a checkpoint is restored: it is about the weights of step 0.
    if ready.pair_loss.is_some_and(PairLoss::needs_reference) {
        let opened = reference::open(&ready, &folder, notes.is_some(), watcher, stop);
        let opened = opened.inspect_err(|_| folder.abandon())?;
        if opened.is_none() {
            return Ok(Outcome::Interrupted {
                step: notes.as_ref().map_or(0, |notes| notes.step),
                folder: folder.path().to_path_buf(),
            });
        }
        ready.reference = opened;
    }
    let mut scaler = scaler(&ready.settings);
    if let Some(checkpoint) = &newest.checkpoint {
        let restored = ready.engine.restore_from(checkpoint)?;
        scaler = restored.scaler.or(scaler);
    }
    drop(newest);
    let mut session = Session::open(
        &ready,
        &folder,
        notes,
        scaler,
        checkpoints,
        request,
        watcher,
    )
    .inspect_err(|_| folder.abandon())?;
    session.train(stop)
}

fn read_notes(text: &str) -> Result<Notes> {
    serde_json::from_str(text).map_err(|e| {
        Error::Failed(format!(
            "the checkpoint was not written by `roundpipe train` ({e}); start another run with --out"
        ))
    })
}

fn scaler(settings: &Settings) -> Option<GradScaler> {
    let is_f16 = settings.dtype.map(DType::from) == Some(DType::F16);
    is_f16.then(GradScaler::default)
}

/// What a validation found.
struct Evaluated {
    loss: f64,
    tokens: u64,
    /// Of pairs.
    figures: Option<Figures>,
}

/// A step whose update may still be under way.
struct Pending {
    handle: StepHandle,
    record: Step,
}

/// A run under way.
struct Session<'r> {
    ready: &'r Ready,
    folder: &'r RunFolder,
    schedule: LrSchedule,
    stream: Stream,
    scaler: Option<GradScaler>,
    checkpoints: Checkpoints,
    telling: Telling<'r>,
    /// Answers browsers while it lives.
    _server: Option<Server>,
    microbatches: usize,
    step: u64,
    tokens_trained: u64,
    best: Option<(u64, f64)>,
    worse: u64,
    pending: Option<Pending>,
    saving: Option<(u64, Saving)>,
    saved: Option<u64>,
    /// Tokens per second that the hardware allows.
    limit: Option<f64>,
    started: Instant,
    elapsed_before: f64,
    last_told: Instant,
    traced: bool,
    /// Whether any loss was a number.
    was_finite: bool,
}

impl<'r> Session<'r> {
    fn open(
        ready: &'r Ready,
        folder: &'r RunFolder,
        notes: Option<Notes>,
        scaler: Option<GradScaler>,
        checkpoints: Checkpoints,
        request: &Request,
        watcher: &'r mut dyn Watcher,
    ) -> Result<Self> {
        let settings = &ready.settings;
        let Data { rows, encoder, .. } = &ready.data;
        let mut stream = Stream::new(rows.clone(), encoder.clone(), stream_options(settings))?;
        if let Some(notes) = &notes {
            stream.seek(&notes.position)?;
        }
        let step = notes.as_ref().map_or(0, |notes| notes.step);
        let resumed_at = notes.as_ref().map(|notes| notes.step);
        let told_later = notes.as_ref().and_then(|notes| notes.told_later.clone());
        let mut telling = Telling::open(folder, resumed_at, told_later, watcher)?;
        let server = match request.watch {
            Some(port) => {
                let server = Server::start(telling.report().clone(), port)
                    .map_err(|e| Error::Failed(e.to_string()))?;
                telling.say(&format!("watch at {}", server.url()));
                Some(server)
            }
            None => None,
        };
        let microbatches = notes.as_ref().map(|notes| notes.microbatches);
        let now = Instant::now();
        let mut session = Self {
            ready,
            folder,
            schedule: schedule(settings)?,
            stream,
            scaler,
            checkpoints,
            telling,
            _server: server,
            microbatches: microbatches.or(settings.microbatches).unwrap_or(1),
            step,
            tokens_trained: notes.as_ref().map_or(0, |notes| notes.tokens_trained),
            best: notes.as_ref().and_then(|notes| notes.best),
            worse: notes.as_ref().map_or(0, |notes| notes.worse),
            pending: None,
            saving: None,
            saved: resumed_at,
            limit: overview::limit(ready),
            started: now,
            elapsed_before: notes.as_ref().map_or(0.0, |notes| notes.elapsed_s),
            last_told: now,
            traced: false,
            was_finite: false,
        };
        session.begin(resumed_at)?;
        Ok(session)
    }

    /// Plans the first batch and shows everything.
    fn begin(&mut self, resumed_at: Option<u64>) -> Result<()> {
        let plan = self.plan()?;
        let ready = self.ready;
        let steps = ready.settings.steps.unwrap_or(1);
        let overview = Overview {
            data: overview::data_lines(ready),
            rows: ready.data.shown.clone(),
            model: overview::model_lines(ready),
            plan,
            steps: (self.step, steps),
        };
        self.telling.begin(&overview);
        let devices = ready.devices.iter();
        self.telling.record(Start {
            name: self.folder.path().display().to_string(),
            model: overview::model_name(ready).to_owned(),
            method: overview::method(ready),
            parameters: overview::parameters(ready),
            trained_parameters: overview::trained_parameters(ready) as u64,
            steps,
            devices: devices.map(|device| device.id().to_string()).collect(),
            time: unix_time(),
            data: overview.data.join("; "),
            plan: overview.plan.join("\n"),
            settings: ready.settings.to_toml(),
            memory: overview::memory(ready),
            limit_tokens_per_s: self.limit,
            resumed_at,
        });
        Ok(())
    }

    /// The plan of the first batch, with more microbatches where it does not fit.
    fn plan(&mut self) -> Result<Vec<String>> {
        let batch = self.look_at_first_batch()?;
        let engine = &self.ready.engine;
        let plan = loop {
            let (inputs, config) = self.call(&batch)?;
            match engine.auto_plan(PlanKind::Fused, inputs, &config) {
                Ok(plan) => break plan,
                Err(error) => self.more_microbatches(batch.rows, error)?,
            }
        };
        let steps = self.ready.settings.steps.unwrap_or(1);
        let left = steps.saturating_sub(self.step);
        let microbatches = self.microbatches.min(batch.rows);
        Ok(overview::plan_lines(self.ready, &plan, microbatches, left))
    }

    /// The batch that the first step will have; the stream stands where it stood.
    fn look_at_first_batch(&mut self) -> Result<Arc<TrainBatch>> {
        let Data { rows, encoder, .. } = &self.ready.data;
        let mut options = stream_options(&self.ready.settings);
        options.threads = 0;
        let mut stream = Stream::new(rows.clone(), encoder.clone(), options)?;
        stream.seek(self.stream.position())?;
        match stream.next() {
            Some(batch) => Ok(Arc::new(batch.map_err(|e| self.name_data(&e))?)),
            None => Err(Error::Failed("the data have no batch left".into())),
        }
    }

    /// An error of all data together, with the names of the files.
    fn name_data(&self, error: &roundpipe_data::Error) -> Error {
        match error {
            roundpipe_data::Error::Setting {
                setting: "data",
                why,
            } => {
                let files = self.ready.settings.data.join(", ");
                Error::Failed(format!("{files}: {why}"))
            }
            other => other.clone().into(),
        }
    }

    /// The inputs and options of a training call.
    fn call(&self, batch: &Arc<TrainBatch>) -> Result<(roundpipe::Inputs, roundpipe::RunConfig)> {
        let (inputs, config) = match self.ready.pair_loss {
            None => batches::call(batch, self.microbatches)?,
            Some(_) => {
                let pairs = Arc::new(self.pairs(batch.clone(), Side::Train)?);
                let call = preference::call(&pairs, self.microbatches)?;
                (call.inputs, call.config)
            }
        };
        Ok((inputs, self.planned(config)?))
    }

    /// With the plan that was asked for, if one was.
    fn planned(&self, config: roundpipe::RunConfig) -> Result<roundpipe::RunConfig> {
        let layers = self.ready.trained.model.layers.len();
        Ok(match self.ready.settings.stages {
            Some(stages) => config.execute_plan(start::even_plan(layers, stages)?),
            None => config,
        })
    }

    /// A batch of pairs with what the loss compares them with.
    fn pairs(&self, batch: Arc<TrainBatch>, side: Side) -> Result<Pairs> {
        match &self.ready.reference {
            Some(reference) => reference.pairs(batch, side),
            None => preference::without(batch),
        }
    }

    /// Doubles the number of microbatches after one did not fit.
    fn more_microbatches(&mut self, rows: usize, error: roundpipe::Error) -> Result<()> {
        let now = self.microbatches.min(rows);
        if !error.is_out_of_memory() {
            return Err(error.into());
        }
        if now >= rows {
            return Err(Error::DoesNotFit(format!(
                "one {} of {} tokens does not fit: {error}; lower seq, use grain = \"layer\", method = \
                 \"lora\" or a smaller model",
                if self.ready.pair_loss.is_some() {
                    "pair"
                } else {
                    "row"
                },
                self.ready.settings.seq.unwrap_or(0)
            )));
        }
        self.microbatches = (now * 2).min(rows);
        let line = format!(
            "{now} microbatches do not fit, so a step has {} from now on ({error})",
            self.microbatches
        );
        let step = self.step;
        self.telling.note(step, line);
        Ok(())
    }

    fn train(&mut self, stop: &AtomicBool) -> Result<Outcome> {
        let steps = self.ready.settings.steps.unwrap_or(1);
        if self.step == 0 {
            self.sample()?;
        }
        self.last_told = Instant::now();
        let patience = self.ready.settings.patience;
        // It may have been killed between its last save and its end.
        let mut stopped_early = patience > 0 && self.worse >= patience;
        let first = self.step;
        while self.step < steps && !stopped_early {
            if stop.load(Ordering::Relaxed) {
                return self.interrupted();
            }
            self.one_step()?;
            stopped_early = self.look_around(steps)?;
        }
        if self.step > first && !self.was_finite {
            return Err(Error::Failed(format!(
                "no loss of the {} steps was finite, so nothing was learned; look at the model's weights, at \
                 the data, or lower lr",
                self.step - first
            )));
        }
        self.finish(stopped_early)
    }

    fn one_step(&mut self) -> Result<()> {
        let batch = match self.stream.next() {
            Some(batch) => Arc::new(batch?),
            None => return Err(Error::Failed("the data have no batch left".into())),
        };
        let steps = self.ready.settings.steps.unwrap_or(1);
        let next = self.step + 1;
        let wants_trace = next == 2 || next == steps || next.is_multiple_of(TIMELINE_EVERY);
        let trace = self.ready.engine.trace();
        if wants_trace && !self.traced {
            trace.clear();
            trace.on();
            self.traced = true;
        }
        let (loss, figures) = match self.ready.pair_loss {
            Some(kind) => self.pair_step(kind, &batch)?,
            None => (self.forward_backward(&batch)?, None),
        };
        // The step before has ended by now.
        self.tell_pending()?;
        if self.traced && !wants_trace {
            self.take_timeline();
        }
        let lr = self.schedule.at(next);
        let settings = &self.ready.settings;
        let update = Update {
            clip: (settings.clip > 0.0).then_some(settings.clip),
            ..Update::new(lr)
        };
        let engine = &self.ready.engine;
        let handle = match &self.scaler {
            Some(scaler) => engine.update_scaled(&update, scaler, lag(settings))?,
            None => engine.update(&update, lag(settings))?,
        };
        self.step = next;
        self.was_finite |= loss.is_finite();
        self.tokens_trained += batch.tokens_trained;
        let mut record = self.record(&batch, loss, lr);
        record.reward_margin = figures.map(|figures| figures.margin());
        record.reward_accuracy = figures.map(|figures| figures.accuracy());
        self.pending = Some(Pending { handle, record });
        Ok(())
    }

    /// Loss and gradients of a batch, with more microbatches where one does not fit.
    fn forward_backward(&mut self, batch: &Arc<TrainBatch>) -> Result<f64> {
        loop {
            let (inputs, config) = self.call(batch)?;
            let engine = &self.ready.engine;
            let call = engine.train(inputs).config(config);
            let done = match &self.scaler {
                None => call.run().map(|output| output.losses.total()),
                Some(scaler) => {
                    let scale = engine.loss_scale(scaler)?;
                    let loss = engine.scaled_loss(scaler, |_, output: roundpipe::Tree, _| {
                        Ok(output.into_leaves())
                    })?;
                    let done = call.loss(loss).run();
                    done.map(|output| output.losses.total() / scale)
                }
            };
            match done {
                Ok(loss) => return Ok(loss),
                Err(error) => self.more_microbatches(batch.rows, error)?,
            }
        }
    }

    /// The same of a batch of pairs, with rewards.
    fn pair_step(
        &mut self,
        kind: PairLoss,
        batch: &Arc<TrainBatch>,
    ) -> Result<(f64, Option<Figures>)> {
        let pairs = Arc::new(self.pairs(batch.clone(), Side::Train)?);
        loop {
            let preference::PairCall {
                inputs,
                labels,
                config,
            } = preference::call(&pairs, self.microbatches)?;
            let config = self.planned(config)?;
            let engine = &self.ready.engine;
            let call = engine.train(inputs).labels(labels).config(config);
            let call = call.return_outputs();
            let loss = preference::loss(kind, &pairs);
            let (done, scale) = match &self.scaler {
                None => (call.loss(loss).run(), 1.0),
                Some(scaler) => {
                    let scale = engine.loss_scale(scaler)?;
                    let loss = engine.scaled_loss(scaler, loss)?;
                    (call.loss(loss).run(), scale)
                }
            };
            let output = match done {
                Ok(output) => output,
                Err(error) => {
                    self.more_microbatches(batch.rows, error)?;
                    continue;
                }
            };
            let mut figures = Figures::default();
            if let Some(outputs) = &output.outputs {
                figures.add(kind, &preference::sums(outputs)?, &pairs.known);
            }
            return Ok((output.losses.total() / scale, Some(figures)));
        }
    }

    fn record(&mut self, batch: &TrainBatch, loss: f64, lr: f64) -> Step {
        let seconds = self.last_told.elapsed().as_secs_f64().max(1e-9);
        self.last_told = Instant::now();
        let rate = batch.tokens as f64 / seconds;
        let position = self.stream.position();
        let rows = self.ready.data.rows.len().max(1);
        Step {
            step: self.step,
            epoch: position.epoch as f64 + position.row as f64 / rows as f64,
            loss,
            lr,
            grad_norm: None,
            tokens: batch.tokens,
            tokens_trained: self.tokens_trained,
            tokens_per_s: rate,
            limit_share: self.limit.map(|limit| rate / limit),
            gpu_bytes: machine::worker_peaks(&self.ready.engine),
            host_bytes: machine::host_now().unwrap_or(0),
            elapsed_s: self.elapsed(),
            skipped: false,
            reward_margin: None,
            reward_accuracy: None,
        }
    }

    fn elapsed(&self) -> f64 {
        self.elapsed_before + self.started.elapsed().as_secs_f64()
    }

    /// Tells of the last step, whose update is waited for.
    fn tell_pending(&mut self) -> Result<()> {
        let Some(Pending { handle, mut record }) = self.pending.take() else {
            return Ok(());
        };
        let report = handle.wait()?;
        record.grad_norm = Some(report.grad_norm);
        record.skipped = report.skipped;
        let step = record.step;
        self.telling.record(record);
        for warning in self.ready.engine.take_warnings() {
            self.telling.note(step, warning);
        }
        Ok(())
    }

    fn take_timeline(&mut self) {
        let trace = self.ready.engine.trace();
        trace.off();
        let timeline = Timeline::from_spans(&trace.spans()).at_step(self.step);
        trace.clear();
        self.telling.timeline(timeline);
        self.traced = false;
    }

    /// What follows some steps: validation, samples, saves. Says whether the run should end.
    fn look_around(&mut self, steps: u64) -> Result<bool> {
        let settings = &self.ready.settings;
        let due = |every: Option<u64>| every.is_some_and(|n| n > 0 && self.step.is_multiple_of(n));
        let is_last = self.step == steps;
        let wants_eval = due(settings.eval_every) || (is_last && settings.eval_every != Some(0));
        let wants_sample = due(settings.sample_every) && !is_last;
        let wants_save = due(settings.save_every) || is_last;
        let mut is_best = false;
        if wants_eval && self.ready.data.validation.is_some() {
            is_best = self.validate()?;
        }
        if wants_sample {
            self.sample()?;
        }
        let patience = self.ready.settings.patience;
        let stops = patience > 0 && self.worse >= patience;
        if wants_save || is_best || stops {
            self.save(is_best)?;
        }
        self.hear_of_save(false);
        Ok(stops)
    }

    /// Validates; says whether it was the best so far.
    fn validate(&mut self) -> Result<bool> {
        self.tell_pending()?;
        let Evaluated {
            loss,
            tokens,
            figures,
        } = self.evaluate()?;
        // A loss that is no number is not the best, and JSON could not keep it.
        let is_best = loss.is_finite() && self.best.is_none_or(|(_, best)| loss < best);
        if is_best {
            self.best = Some((self.step, loss));
            self.worse = 0;
        } else {
            self.worse += 1;
        }
        self.telling.record(Eval {
            step: self.step,
            loss,
            // Of a loss over pairs it would mean nothing.
            perplexity: figures.map_or_else(|| loss.exp(), |_| f64::NAN),
            tokens,
            best: is_best,
            reward_margin: figures.map(|figures| figures.margin()),
            reward_accuracy: figures.map(|figures| figures.accuracy()),
        });
        self.last_told = Instant::now();
        Ok(is_best)
    }

    /// The mean loss over the tokens, or the pairs, of the validation rows.
    fn evaluate(&self) -> Result<Evaluated> {
        let Some(rows) = &self.ready.data.validation else {
            return Ok(Evaluated {
                loss: f64::NAN,
                tokens: 0,
                figures: None,
            });
        };
        let settings = &self.ready.settings;
        let options = start::validation_options(settings, settings.data_threads);
        let stream = Stream::new(rows.clone(), self.ready.data.encoder.clone(), options)?;
        let engine = &self.ready.engine;
        engine.set_training(false);
        let done = match self.ready.pair_loss {
            Some(kind) => self.judge(kind, stream),
            None => self.sum_losses(engine, stream),
        };
        engine.set_training(true);
        done
    }

    fn sum_losses(&self, engine: &RoundPipe, stream: Stream) -> Result<Evaluated> {
        let (mut sum, mut tokens) = (0.0, 0);
        for batch in stream {
            let batch = Arc::new(batch?);
            let (inputs, config) = batches::call(&batch, self.microbatches)?;
            let forward = engine.forward(inputs, &config.requires_grad(false))?;
            let loss = forward.output()?.clone().tensor()?.item()?;
            sum += loss * batch.tokens_trained as f64;
            tokens += batch.tokens_trained;
        }
        Ok(Evaluated {
            loss: sum / tokens.max(1) as f64,
            tokens,
            figures: None,
        })
    }

    /// The loss and the rewards of pairs.
    fn judge(&self, kind: PairLoss, stream: Stream) -> Result<Evaluated> {
        let mut figures = Figures::default();
        let mut tokens = 0;
        for batch in stream {
            let batch = Arc::new(batch?);
            tokens += batch.tokens_trained;
            let pairs = Arc::new(self.pairs(batch, Side::Validation)?);
            let sums = reference::forward(self.ready, &pairs, self.microbatches)?;
            figures.add(kind, &sums, &pairs.known);
        }
        Ok(Evaluated {
            loss: figures.loss(),
            tokens,
            figures: Some(figures),
        })
    }

    /// Writes samples with the newest weights.
    fn sample(&mut self) -> Result<()> {
        let ready = self.ready;
        if ready.settings.sample_every == Some(0) {
            return Ok(());
        }
        self.tell_pending()?;
        let (model, tokenizer) = (&ready.trained.model, &ready.trained.tokenizer);
        let as_chat = !ready.data.is_text;
        let texts = samples::write(model, tokenizer, &ready.engine, &ready.settings, as_chat);
        let step = self.step;
        match texts {
            Ok(texts) => texts.into_iter().for_each(|(prompt, text)| {
                self.telling.record(Sample { step, prompt, text });
            }),
            // A sample is for looking at; a run goes on without it.
            Err(error) => self.telling.note(step, format!("no sample: {error}")),
        }
        self.last_told = Instant::now();
        Ok(())
    }

    /// Orders a checkpoint of this step, which is written beside the next ones.
    fn save(&mut self, is_best: bool) -> Result<()> {
        self.hear_of_save(true);
        let notes = Notes {
            step: self.step,
            position: self.stream.position().clone(),
            tokens_trained: self.tokens_trained,
            elapsed_s: self.elapsed(),
            best: self.best,
            worse: self.worse,
            microbatches: self.microbatches,
            told_later: self.pending.as_ref().map(|pending| pending.record.clone()),
        };
        let notes = serde_json::to_string(&notes)
            .map_err(|e| Error::Failed(format!("the checkpoint's notes: {e}")))?;
        let engine = &self.ready.engine;
        self.checkpoints.borrow_at_most(self.ready.spare_memory());
        let ordered = if is_best {
            self.checkpoints.save_best(engine, self.step, notes)
        } else {
            self.checkpoints.save(engine, self.step, notes)
        };
        match ordered {
            Ok(saving) => self.saving = Some((self.step, saving)),
            Err(error) => self.save_failed(self.step, &error),
        }
        Ok(())
    }

    /// Tells how the save under way went, once it has ended or when it is waited for.
    fn hear_of_save(&mut self, waits: bool) {
        let is_done = |(_, saving): &(u64, Saving)| waits || saving.is_done();
        let Some((step, saving)) = self.saving.take_if(|saving| is_done(saving)) else {
            return;
        };
        match saving.wait() {
            Ok(report) => {
                self.saved = Some(step);
                self.telling.record(Save {
                    step,
                    bytes: report.bytes,
                    seconds: report.seconds,
                    path: saving.path().display().to_string(),
                });
            }
            Err(error) => {
                // The engine warns of it too.
                self.ready.engine.take_warnings();
                self.save_failed(step, &error);
            }
        }
    }

    fn save_failed(&mut self, step: u64, error: &roundpipe::Error) {
        let stays = match self.saved {
            Some(saved) => format!("the one of step {saved} stays"),
            None => "there is none yet".to_owned(),
        };
        let line = format!("step {step} was not saved, and training goes on; {stays}: {error}");
        self.telling.note(step, line);
    }

    fn interrupted(&mut self) -> Result<Outcome> {
        self.tell_pending()?;
        if self.saved != Some(self.step) || self.saving.is_some() {
            let is_saving = self
                .saving
                .as_ref()
                .is_some_and(|(step, _)| *step == self.step);
            if !is_saving && self.step > 0 {
                self.save(false)?;
            }
            self.hear_of_save(true);
        }
        self.end("interrupted", "")?;
        Ok(Outcome::Interrupted {
            step: self.saved.unwrap_or(0),
            folder: self.folder.path().to_path_buf(),
        })
    }

    /// Writes the model: the last weights, or after an early stop the best.
    fn finish(&mut self, stopped_early: bool) -> Result<Outcome> {
        self.tell_pending()?;
        self.hear_of_save(true);
        if self.traced {
            self.take_timeline();
        }
        let engine = &self.ready.engine;
        if stopped_early && let Some((best, _)) = self.best {
            engine.restore(self.checkpoints.path(best))?;
            let line = format!(
                "{} validations in a row were not better: the model is that of step {best}",
                self.worse
            );
            self.telling.note(self.step, line);
        }
        engine.synchronize()?;
        self.sample()?;
        let settings = &self.ready.settings;
        let model = write_result(&self.ready.trained, settings, self.folder)?;
        if stopped_early {
            // The run is over at this step: the same command finds it finished.
            let settings = Settings {
                steps: Some(self.step),
                ..settings.clone()
            };
            self.folder.write_settings(&settings)?;
        }
        let reason = if stopped_early {
            "stopped early"
        } else {
            "finished"
        };
        self.end(reason, &model.display().to_string())?;
        Ok(Outcome::Finished {
            model,
            folder: self.folder.path().to_path_buf(),
        })
    }

    /// What became of rows that were not learned as they are.
    fn tell_of_rows(&mut self) {
        let counts = *self.stream.counts();
        let parts = [
            (counts.cut, "cut"),
            (counts.split, "split"),
            (counts.too_long, "too long and left out"),
            (counts.empty, "without anything to learn"),
            (counts.bad, "bad and left out"),
        ];
        let parts: Vec<String> = parts
            .iter()
            .filter(|(count, _)| *count > 0)
            .map(|(count, what)| format!("{count} {what}"))
            .collect();
        if parts.is_empty() {
            return;
        }
        let mut line = format!("of {} rows read: {}", counts.rows, parts.join(", "));
        if let Some(bad) = self.stream.first_bad() {
            line += &format!(" (the first: {bad})");
        }
        self.telling.note(self.step, line);
    }

    fn end(&mut self, reason: &str, result: &str) -> Result<()> {
        self.tell_of_rows();
        let folder = self.folder.path().display();
        let command = if result.is_empty() {
            format!("roundpipe train --out {folder}")
        } else {
            format!("roundpipe generate {folder} --prompt \"...\"")
        };
        self.telling.record(End {
            step: self.step,
            reason: reason.to_owned(),
            elapsed_s: self.elapsed(),
            result: result.to_owned(),
            command,
        });
        let path = self.folder.file("report.html");
        if let Err(error) = self.telling.report().write_html(path) {
            self.telling.say(&error.to_string());
        }
        Ok(())
    }
}

fn unix_time() -> f64 {
    std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0.0, |since| since.as_secs_f64())
}
