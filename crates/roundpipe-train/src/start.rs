//! Everything before the first step: folder, settings, model, data, engine.
//!
//! # Invariants
//! - Nothing is written into a folder whose run these settings do not belong to.
//! - What is resolved once is read from `run.toml` by every later start.

use std::path::PathBuf;
use std::sync::Arc;

use roundpipe::{
    Bytes, Checkpoints, Device, Devices, ExecutePlan, Lag, LrSchedule, ParamGroup, PlanKind,
    RingOptions, RoundPipe, RunConfig,
    lr::{DecayShape, LrDecay},
};
use roundpipe_data::{
    EncodeOptions, Encoder, FileReport, Input, Rows, Source, SourceOptions, Stream, StreamOptions,
};
use roundpipe_files::text::Line;
use roundpipe_models::Model;
use roundpipe_models::chat::ChatTemplate;
use roundpipe_models::tokenizer::Tokenizer;

use crate::error::{Error, Result};
use crate::folder::RunFolder;
use crate::host_limit::{self, HostLimit};
use crate::machine;
use crate::model::{Origin, Trained, rule};
use crate::preference::{PairLoss, Reference};
use crate::progress::{ShownRow, Watcher};
use crate::resolve::{self, Lengths, Place};
use crate::settings::{BadRowsName, Given, Objective, Schedule, Settings, ValidationSetting};

/// The longest chat template file.
const MOST_TEMPLATE_BYTES: u64 = 1 << 20;

/// A run that is ready to take its first step.
pub(crate) struct Ready {
    pub settings: Settings,
    pub trained: Trained,
    pub devices: Vec<Arc<dyn Device>>,
    pub data: Data,
    /// Operations per second of a large product on the first device, if it could be measured.
    pub product_rate: Option<f64>,
    pub engine: RoundPipe,
    /// Where pairs are learned from, their loss.
    pub pair_loss: Option<PairLoss>,
    /// What the model said of them before training, once it is known.
    pub reference: Option<Reference>,
}

impl Ready {
    /// What a save may borrow of the memory that the user allows.
    pub fn spare_memory(&self) -> Option<Bytes> {
        let is_host = is_host(&self.devices);
        let limit = HostLimit::of(&self.settings, &self.trained.model, is_host)?;
        Some(Bytes(limit.spare(&self.engine)))
    }
}

/// What is learned from.
pub(crate) struct Data {
    pub report: Vec<String>,
    pub rows: Rows,
    /// Rows that validate, if there are any.
    pub validation: Option<Rows>,
    pub encoder: Arc<Encoder>,
    pub shown: Vec<ShownRow>,
    pub is_text: bool,
    /// Tokens of the document that a token is in, on average: what attention goes by.
    pub context: usize,
    /// Tokens of a pair in the mean, where rows are pairs.
    pub pair_tokens: Option<usize>,
}

/// Opens a run's folder, and says which settings hold there.
pub(crate) fn open_folder(given: &Given) -> Result<(RunFolder, Settings, bool)> {
    given.check()?;
    let mut settings = Settings::default();
    given.apply(&mut settings);
    let path = settings
        .out
        .as_ref()
        .map_or_else(|| default_folder(&settings), |out| Ok(PathBuf::from(out)))?;
    let has_run = path.join("run.toml").exists();
    if !has_run {
        // Before a folder is made for it.
        check_given(&settings)?;
        RunFolder::refuse_foreign(&path)?;
    }
    let folder = RunFolder::open(&path)?;
    let has_checkpoint = has_checkpoint(&folder)?;
    if has_run && !has_checkpoint && folder.file("model").exists() {
        return Err(Error::Usage(format!(
            "{}: has a finished model, and no checkpoint to go on from; remove `model` there to train \
             again, or start another run with --out",
            path.display()
        )));
    }
    // Without a checkpoint there is nothing that other settings could spoil.
    let is_anew = check_given(&settings).is_ok() && !has_checkpoint;
    match folder.settings()? {
        Some(_) if is_anew => Ok((folder, settings, false)),
        Some(mut run) => {
            if given.has("steps") || given.has("epochs") {
                // Longer or shorter than before: counted anew.
                (run.steps, run.epochs) = (None, None);
            }
            given.apply_to_run(&mut run, &path)?;
            Ok((folder, run, true))
        }
        None => Ok((folder, settings, false)),
    }
}

/// Whether a run has got so far that it goes on from somewhere.
fn has_checkpoint(folder: &RunFolder) -> Result<bool> {
    let checkpoints = Checkpoints::open(folder.file("checkpoints"))?;
    Ok(!checkpoints.steps()?.is_empty())
}

fn check_given(settings: &Settings) -> Result<()> {
    if settings.data.is_empty() {
        let what = "no data are given; name one or more files of examples behind the model";
        return Err(Error::Usage(what.into()));
    }
    if settings.model.is_none() && settings.init.is_none() {
        let what = "no model is given; name a folder or a hub id, or --init a preset";
        return Err(Error::Usage(what.into()));
    }
    Ok(())
}

/// `runs/MODEL-DATA`, from the last parts of their names.
fn default_folder(settings: &Settings) -> Result<PathBuf> {
    check_given(settings)?;
    let model = settings.model.as_deref().or(settings.init.as_deref());
    let model = last_part(model.unwrap_or_default());
    let data = last_part(&settings.data[0]);
    // Models have dots in their names (Qwen3-0.6B); of a file, what follows one is its kind.
    let data = data.split('.').next().unwrap_or_default();
    Ok(PathBuf::from("runs").join(format!("{model}-{data}")))
}

/// The last part of a path or id, without what is odd in a folder's name.
fn last_part(text: &str) -> String {
    let text = text.trim_end_matches('/');
    let name = text.rsplit('/').next().unwrap_or(text);
    let name = name.split('=').next().unwrap_or(name);
    let keep = |c: &char| c.is_ascii_alphanumeric() || "-_.".contains(*c);
    let name: String = name.chars().filter(keep).take(40).collect();
    name.trim_matches('.').to_owned()
}

/// Opens model and data, resolves what is left open, builds the engine.
pub(crate) fn prepare(
    folder: &RunFolder,
    mut settings: Settings,
    watcher: &mut dyn Watcher,
) -> Result<Ready> {
    let devices = open_devices(&settings, watcher)?;
    let place = Place {
        devices: devices.len(),
        is_host: is_host(&devices),
    };
    let origin = Origin::find(&settings, folder)?;
    let (mut data, lengths) = open_data(&mut settings, &origin)?;
    let kept = data.validation.as_ref().map_or(0, Rows::len);
    resolve::resolve(&mut settings, &origin.config, &lengths, &place, kept)?;
    schedule(&settings)?;
    // Looked at before weights are read, which may take long.
    Stream::new(
        data.rows.clone(),
        data.encoder.clone(),
        stream_options(&settings),
    )?;
    check_batch(&settings)?;
    if let Some(rows) = &data.validation {
        check_validation(rows, &data.encoder, &settings)?;
    }
    let seq = settings.seq.unwrap_or(1);
    data.context = lengths.context(seq);
    data.report.extend(lengths.too_long(&settings));
    let trained = origin.load(&settings, seq)?;
    check_vocabulary(&trained)?;
    if let Some(limit) = HostLimit::of(&settings, &trained.model, place.is_host) {
        limit.check()?;
    }
    // Before the engine takes the memory.
    let product_rate = machine::product_rate(devices[0].clone(), trained.model.dtype()).ok();
    let engine = build(&settings, &trained.model, &devices)?;
    folder.write_settings(&settings)?;
    Ok(Ready {
        pair_loss: PairLoss::of(&settings),
        reference: None,
        settings,
        trained,
        devices,
        data,
        product_rate,
        engine,
    })
}

/// Refuses a step whose tokens alone take more memory than there is.
fn check_batch(settings: &Settings) -> Result<()> {
    let tokens = host_limit::tokens(settings);
    let bytes = Bytes(host_limit::batch_bytes(tokens));
    let left = roundpipe::host_memory::available();
    match settings.host_memory.into_iter().chain(left).min() {
        Some(left) if bytes > left => Err(Error::DoesNotFit(format!(
            "batch: the {tokens} tokens of a step take {bytes} of host memory, and {left} are left; \
             choose fewer rows"
        ))),
        _ => Ok(()),
    }
}

/// Refuses validation rows of which none is left, before hours of training.
fn check_validation(rows: &Rows, encoder: &Arc<Encoder>, settings: &Settings) -> Result<()> {
    let options = validation_options(settings, 0);
    let first = Stream::new(rows.clone(), encoder.clone(), options)?.next();
    let error = match first {
        Some(Ok(_)) => return Ok(()),
        Some(Err(roundpipe_data::Error::Setting { why, .. })) => why,
        Some(Err(error)) => return Err(error.into()),
        None => "no row leaves anything to validate with; raise `seq` or correct them".into(),
    };
    let file = match &settings.validation {
        Some(ValidationSetting::File(file)) => format!(" {file}"),
        _ => String::new(),
    };
    Err(Error::Failed(format!("validation{file}: {error}")))
}

/// Validation rows, once, in their order.
pub(crate) fn validation_options(settings: &Settings, threads: usize) -> StreamOptions {
    StreamOptions {
        shuffle: None,
        epochs: Some(1),
        threads,
        ..stream_options(settings)
    }
}

fn check_vocabulary(trained: &Trained) -> Result<()> {
    let (tokens, rows) = (trained.tokenizer.vocab_size(), trained.model.config.vocab);
    if tokens <= rows {
        return Ok(());
    }
    Err(Error::Failed(format!(
        "the tokenizer has {tokens} tokens and the model {rows}; use the tokenizer of this model"
    )))
}

fn open_devices(settings: &Settings, watcher: &mut dyn Watcher) -> Result<Vec<Arc<dyn Device>>> {
    let devices = match &settings.devices {
        Some(list) => {
            Devices::parse(list).map_err(|e| Error::Usage(format!("devices {list}: {e}")))?
        }
        None => Devices::all()?,
    };
    devices.notes().iter().for_each(|line| watcher.note(line));
    Ok(devices.workers)
}

/// Opens the data, and looks at how long rows are.
pub(crate) fn open_data(settings: &mut Settings, origin: &Origin) -> Result<(Data, Lengths)> {
    let options = SourceOptions {
        format: settings.format.map(Into::into),
        ..SourceOptions::default()
    };
    let inputs = inputs(settings)?;
    let source = Source::open(&inputs, &options)?;
    check_formats(settings, &source)?;
    let validation = resolve::validation(settings, source.rows().len());
    let source = source.with_validation(validation)?;
    let other = match &settings.validation {
        Some(ValidationSetting::File(file)) => {
            let other = Source::open(&[Input::parse(file)?], &options)?;
            check_formats(settings, &other)?;
            Some(other)
        }
        _ => None,
    };
    if settings.validation.is_none() {
        settings.validation = Some(match validation {
            roundpipe_data::Validation::Rows(rows) => ValidationSetting::Rows(rows),
            _ => ValidationSetting::Off,
        });
    }
    let encoder = open_encoder(settings, origin)?;
    let rows = source.rows();
    let skips = settings.bad_rows == BadRowsName::Skip;
    let lengths = Lengths::look(&rows, &encoder, skips)?;
    let kept = other
        .as_ref()
        .map_or_else(|| source.validation(), Source::rows);
    // A row that cannot be read would otherwise end the run at its first validation.
    Lengths::look(&kept, &encoder, skips)?;
    let titles: &[&str] = if lengths.pairs.is_empty() {
        &["", ""]
    } else {
        &["chosen", "rejected"]
    };
    let shown = lengths.shown.iter().zip(titles);
    let shown = shown.map(|(document, title)| ShownRow {
        title: (*title).to_owned(),
        pieces: encoder.pieces(document),
    });
    let data = Data {
        report: source.report().iter().map(ToString::to_string).collect(),
        validation: (!kept.is_empty()).then_some(kept),
        shown: shown.collect(),
        is_text: lengths.is_text,
        context: 1,
        pair_tokens: lengths.pair_tokens(),
        rows,
        encoder,
    };
    Ok((data, lengths))
}

/// Refuses pairs of answers where tokens are learned, and the other way round.
fn check_formats(settings: &Settings, source: &Source) -> Result<()> {
    let wants_pairs = settings.objective != Objective::Sft;
    let is_wrong = |file: &FileReport| file.format.is_preference() != wants_pairs;
    let Some(file) = source.report().into_iter().find(is_wrong) else {
        return Ok(());
    };
    let path = file.path.display();
    let objective = settings.objective.name();
    Err(Error::Usage(if wants_pairs {
        format!(
            "{path}: has rows of {}, and {objective} learns from pairs; give rows with `chosen` and \
             `rejected`, or leave --method out",
            file.format
        )
    } else {
        format!(
            "{path}: has {}, which only preference tuning learns from; add --method dpo or orpo",
            file.format
        )
    }))
}

/// Files and folders with their weights.
pub(crate) fn inputs(settings: &Settings) -> Result<Vec<Input>> {
    let input = |text: &String| {
        Input::parse(text).map_err(|e| Error::Usage(format!("data {}: {e}", Line(text))))
    };
    settings.data.iter().map(input).collect()
}

fn open_encoder(settings: &Settings, origin: &Origin) -> Result<Arc<Encoder>> {
    encoder(settings, &origin.tokenizer)
}

/// What turns rows into tokens, with the user's template if there is one.
pub(crate) fn encoder(settings: &Settings, tokenizer: &Tokenizer) -> Result<Arc<Encoder>> {
    let options = EncodeOptions {
        learn: settings.learn.into(),
        ..EncodeOptions::default()
    };
    let encoder = Encoder::new(tokenizer.clone(), options)?;
    let Some(path) = &settings.template else {
        return Ok(Arc::new(encoder));
    };
    let limits = roundpipe_files::FileLimits {
        bytes: MOST_TEMPLATE_BYTES,
        json_values: 0,
    };
    let usage = |what: String| Error::Usage(format!("template {path}: {what}"));
    let bytes = roundpipe_files::small::read(path.as_ref(), limits)
        .map_err(|e| Error::Usage(format!("template: {e}")))?;
    let text = String::from_utf8(bytes).map_err(|_| usage("is no UTF-8 text".into()))?;
    let template =
        ChatTemplate::parse(&text, tokenizer.special_tokens()).map_err(|e| usage(e.to_string()))?;
    Ok(Arc::new(encoder.template(template)))
}

/// Whether the processor computes, not GPUs.
pub(crate) fn is_host(devices: &[Arc<dyn Device>]) -> bool {
    let mut devices = devices.iter();
    devices.all(|device| !device.cost_model().kind().is_gpu())
}

/// The engine of a run.
pub(crate) fn build(
    settings: &Settings,
    model: &Model,
    devices: &[Arc<dyn Device>],
) -> Result<RoundPipe> {
    if let Some(stages) = settings.stages {
        even_plan(model.layers.len(), stages)?;
    }
    let usage = |e: roundpipe::Error| match Error::from(e) {
        Error::Failed(line) => Error::Usage(line),
        other => other,
    };
    let limit = HostLimit::of(settings, model, is_host(devices));
    let work = limit.and_then(|limit| limit.work(devices.len()));
    let engine = RoundPipe::builder(model.layers.clone())
        .name("train")
        .seed(settings.seed)
        .optimizer(rule(settings))
        .groups(groups(settings))
        .optim_dtype(settings.state_dtype.into())
        .moments(settings.moments.into())
        .max_lag(lag(settings))
        .fp8(settings.fp8)
        .devices(devices.to_vec())
        .ring_options(RingOptions {
            memory: settings.gpu_memory.or(work),
            pin: settings.pin.into(),
            host_activations: limit.and_then(HostLimit::activations),
            ..RingOptions::default()
        })
        .pin(settings.pin.into())
        .run_config(
            RunConfig::new()
                .recompute_grain(settings.grain.into())
                .recompute_all(settings.recompute_all),
        )
        .build()
        .map_err(usage)?;
    if engine.param_rules().iter().all(|rule| rule.frozen) {
        let what = "groups freeze every parameter, so nothing would be learned; freeze fewer";
        return Err(Error::Usage(what.into()));
    }
    Ok(engine)
}

/// The user's groups; behind them, biases and norms are not decayed, as is usual.
fn groups(settings: &Settings) -> Vec<ParamGroup> {
    let mut groups: Vec<ParamGroup> = Vec::new();
    for setting in &settings.groups {
        let mut group = ParamGroup::matching(&setting.matching);
        if let Some(factor) = setting.lr_factor {
            group = group.lr_factor(factor);
        }
        if let Some(decay) = setting.weight_decay {
            group = group.weight_decay(decay);
        }
        groups.push(group.frozen(setting.freeze));
    }
    groups.push(ParamGroup::filter(|_, shape| shape.rank() < 2).weight_decay(0.0));
    groups
}

/// So many stages of equally many layers, give or take one.
pub(crate) fn even_plan(layers: usize, stages: usize) -> Result<ExecutePlan> {
    if stages == 0 || stages > layers {
        return Err(Error::Usage(format!(
            "stages {stages} is not from 1 to {layers}, the model's layers"
        )));
    }
    let sizes: Vec<usize> = (0..stages)
        .map(|stage| layers / stages + usize::from(stage < layers % stages))
        .collect();
    // The last stage goes forward and back at once.
    let forward = &sizes[..stages - 1];
    let backward: Vec<usize> = sizes.iter().rev().copied().collect();
    Ok(ExecutePlan::from_sizes(PlanKind::Fused, forward, &backward))
}

pub(crate) fn lag(settings: &Settings) -> Lag {
    if settings.lag == 1 {
        Lag::One
    } else {
        Lag::Zero
    }
}

/// The learning rate of every step.
pub(crate) fn schedule(settings: &Settings) -> Result<LrSchedule> {
    let steps = settings.steps.unwrap_or(1);
    let warmup = settings.warmup.unwrap_or(0).min(steps);
    let min_ratio = settings.min_lr;
    let decay = match settings.schedule {
        Schedule::Constant => LrDecay::Constant,
        Schedule::Cosine => LrDecay::Cosine {
            total_steps: steps,
            min_ratio,
        },
        Schedule::Linear => LrDecay::Linear {
            total_steps: steps,
            min_ratio,
        },
        Schedule::StableThenDecay => {
            let decay_steps = ((steps as f64 * settings.decay) as u64).min(steps - warmup);
            LrDecay::StableThenDecay {
                stable_steps: steps - warmup - decay_steps,
                decay_steps,
                min_ratio,
                shape: DecayShape::Linear,
            }
        }
    };
    let lr = settings.lr.unwrap_or(0.0);
    LrSchedule::new(lr, warmup, decay).map_err(|e| Error::Usage(e.to_string()))
}

/// How rows become batches of a step.
pub(crate) fn stream_options(settings: &Settings) -> StreamOptions {
    let mut options = StreamOptions::new(settings.seq.unwrap_or(1), settings.batch.unwrap_or(1));
    options.packing = settings.packing;
    options.shuffle = settings.shuffle.then_some(settings.seed);
    options.too_long = settings.too_long.map(Into::into);
    options.bad_rows = settings.bad_rows.into();
    options.pairs = settings.objective != Objective::Sft;
    options.threads = settings.data_threads;
    options
}
