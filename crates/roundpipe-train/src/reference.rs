//! What the model said of every pair before the first step: the reference of DPO.
//!
//! It is computed once, by the engine that trains, with the weights that the run begins with (of
//! LoRA the model without its adapters, which begin at zero), and kept in the run's folder as
//! `reference.safetensors`: `log_probs` [rows, 2] (f32), the sums of the chosen and the rejected answer
//! of each row of the files, NaN for rows that are not learned from; `validation_log_probs` where a
//! file of its own validates. Rows have their numbers in the files, so the order of an epoch does not
//! matter. A run that goes on reads it.
//!
//! Refused: a file that was computed of another model, other data or other settings, where a run goes
//! on. Before the first checkpoint it is computed again; so is one that was cut or changed, which
//! gives the same numbers.
//!
//! # Invariants
//! - The file is complete under its name or not there; a pass that is interrupted begins again.
//! - The pass changes no bit of the training.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use roundpipe::{DType, Param};
use roundpipe_data::{Rows, Stream, TrainBatch};
use roundpipe_files::hash::{Hash128, Hasher128};
use roundpipe_files::{read_tensors, write_tensors};

use crate::error::{Error, Result};
use crate::folder::{REFERENCE, RunFolder};
use crate::preference::{self, Pairs, Reference};
use crate::progress::Watcher;
use crate::settings::{Settings, ValidationSetting};
use crate::start::{self, Ready};

/// Changes when the same inputs would give other numbers.
const VERSION: &str = "1";
/// Bytes of weights that are hashed at once.
const HASHED_BYTES: usize = 64 << 20;
/// Seconds between two lines about a long pass.
const NOTE_SECONDS: f64 = 30.0;

/// The reference of a run, read or computed; nothing when it was asked to stop meanwhile. The
/// engine has the weights of step 0.
pub(crate) fn open(
    ready: &Ready,
    folder: &RunFolder,
    goes_on: bool,
    watcher: &mut dyn Watcher,
    stop: &AtomicBool,
) -> Result<Option<Reference>> {
    let fingerprint = fingerprint(ready)?.to_string();
    let path = folder.file(REFERENCE);
    match read(&path, ready, &fingerprint) {
        Ok(Found::Same(reference)) => return Ok(Some(reference)),
        Ok(Found::Other) if goes_on => {
            return Err(Error::Failed(format!(
                "{}: is of another model, other data or settings than there are now; put them back as they \
                 were, or start another run with --out",
                path.display()
            )));
        }
        Ok(Found::Other | Found::None) => {}
        Err(error) => watcher.note(&format!("{error}; it is computed again")),
    }
    let Some(reference) = compute(ready, watcher, stop)? else {
        return Ok(None);
    };
    write(&path, &reference, &fingerprint)?;
    Ok(Some(reference))
}

enum Found {
    Same(Reference),
    Other,
    None,
}

/// Rows of the files that train, and of the file that validates.
fn tables(ready: &Ready) -> (Rows, Option<Rows>) {
    let is_file = matches!(ready.settings.validation, Some(ValidationSetting::File(_)));
    let validation = ready.data.validation.as_ref().filter(|_| is_file);
    (ready.data.rows.all(), validation.map(Rows::all))
}

fn read(path: &Path, ready: &Ready, fingerprint: &str) -> Result<Found> {
    if !path.exists() {
        return Ok(Found::None);
    }
    let file = read_tensors(path)?;
    if file.metadata.get("fingerprint").map(String::as_str) != Some(fingerprint) {
        return Ok(Found::Other);
    }
    let damaged = || Error::Failed(format!("{}: was cut or changed", path.display()));
    let table = |name: &str, rows: &Rows| {
        let mut tensors = file.tensors.iter();
        let (_, param) = tensors
            .find(|(found, _)| found == name)
            .ok_or_else(damaged)?;
        let is_right =
            param.dtype() == DType::F32 && param.shape().numel() as u64 == 2 * rows.len();
        let home = param.data();
        let bytes = home.read_all()?;
        let hash = Hash128::of(bytes.bytes()).to_string();
        if !is_right || file.metadata.get(&format!("{name}.hash")) != Some(&hash) {
            return Err(damaged());
        }
        let sums = bytes.as_slice::<f32>().chunks_exact(2);
        Ok(sums.map(|pair| [pair[0], pair[1]]).collect::<Vec<_>>())
    };
    let (train, validation) = tables(ready);
    let validation = validation.map(|rows| table("validation_log_probs", &rows));
    Ok(Found::Same(Reference {
        train: table("log_probs", &train)?,
        validation: validation.transpose()?,
    }))
}

fn write(path: &Path, reference: &Reference, fingerprint: &str) -> Result<()> {
    let mut metadata = BTreeMap::from([
        ("format".to_owned(), "pt".to_owned()),
        ("fingerprint".to_owned(), fingerprint.to_owned()),
    ]);
    let mut tensors = Vec::new();
    let tables = [
        ("log_probs", Some(&reference.train)),
        ("validation_log_probs", reference.validation.as_ref()),
    ];
    for (name, sums) in tables {
        let Some(sums) = sums else { continue };
        let param = Param::zeros(DType::F32, &[sums.len(), 2])?;
        let home = param.data();
        let mut bytes = home.write(0..home.len())?;
        bytes
            .as_mut_slice::<f32>()
            .copy_from_slice(sums.as_flattened());
        let hash = Hash128::of(bytes.bytes()).to_string();
        drop(bytes);
        metadata.insert(format!("{name}.hash"), hash);
        tensors.push((name.to_owned(), param));
    }
    Ok(write_tensors(path, &metadata, &tensors)?)
}

fn compute(
    ready: &Ready,
    watcher: &mut dyn Watcher,
    stop: &AtomicBool,
) -> Result<Option<Reference>> {
    let (train, validation) = tables(ready);
    let pairs = train.len() + validation.as_ref().map_or(0, Rows::len);
    watcher.note(&format!(
        "computing what the model says of {pairs} pairs before training (kept in {REFERENCE})"
    ));
    let mut pass = Pass {
        ready,
        microbatches: ready.settings.microbatches.unwrap_or(1),
        pairs,
        done: 0,
        started: Instant::now(),
        last_note: Instant::now(),
    };
    ready.engine.set_training(false);
    let computed = pass.both(&train, validation.as_ref(), watcher, stop);
    ready.engine.set_training(true);
    computed
}

/// A pass over all pairs, without gradients.
struct Pass<'r> {
    ready: &'r Ready,
    microbatches: usize,
    pairs: u64,
    done: u64,
    started: Instant,
    last_note: Instant,
}

impl Pass<'_> {
    fn both(
        &mut self,
        train: &Rows,
        validation: Option<&Rows>,
        watcher: &mut dyn Watcher,
        stop: &AtomicBool,
    ) -> Result<Option<Reference>> {
        let Some(train) = self.table(train, watcher, stop)? else {
            return Ok(None);
        };
        let validation = match validation {
            Some(rows) => match self.table(rows, watcher, stop)? {
                Some(table) => Some(table),
                None => return Ok(None),
            },
            None => None,
        };
        Ok(Some(Reference { train, validation }))
    }

    fn table(
        &mut self,
        rows: &Rows,
        watcher: &mut dyn Watcher,
        stop: &AtomicBool,
    ) -> Result<Option<Vec<[f32; 2]>>> {
        let settings = &self.ready.settings;
        let mut table = vec![[f32::NAN; 2]; rows.len() as usize];
        let options = start::validation_options(settings, settings.data_threads);
        let stream = Stream::new(rows.clone(), self.ready.data.encoder.clone(), options)?;
        for batch in stream {
            if stop.load(Ordering::Relaxed) {
                return Ok(None);
            }
            let batch = Arc::new(batch?);
            let keys = batch.keys.clone();
            let sums = self.sums(batch)?;
            for (key, sums) in keys.iter().zip(sums) {
                table[*key as usize] = sums;
            }
            self.done += keys.len() as u64;
            self.tell(watcher);
        }
        Ok(Some(table))
    }

    /// The sums of a batch, in more parts where one does not fit.
    fn sums(&mut self, batch: Arc<TrainBatch>) -> Result<Vec<[f32; 2]>> {
        let rows = batch.rows;
        let pairs = Arc::new(preference::without(batch)?);
        loop {
            match forward(self.ready, &pairs, self.microbatches) {
                Ok(sums) => return Ok(sums),
                Err(Error::DoesNotFit(_)) if self.microbatches < rows => {
                    self.microbatches = (self.microbatches * 2).min(rows);
                }
                Err(error) => return Err(error),
            }
        }
    }

    fn tell(&mut self, watcher: &mut dyn Watcher) {
        if self.last_note.elapsed().as_secs_f64() < NOTE_SECONDS {
            return;
        }
        self.last_note = Instant::now();
        let rate = self.done as f64 / self.started.elapsed().as_secs_f64();
        let left = self.pairs.saturating_sub(self.done) as f64 / rate;
        watcher.note(&format!(
            "{} of {} pairs, about {left:.0} s left",
            self.done, self.pairs
        ));
    }
}

/// The sums that the model gives of some pairs, as it is now.
pub(crate) fn forward(
    ready: &Ready,
    pairs: &Arc<Pairs>,
    microbatches: usize,
) -> Result<Vec<[f32; 2]>> {
    let call = preference::call(pairs, microbatches)?;
    let config = call.config.requires_grad(false);
    let forward = ready.engine.forward(call.inputs, &config)?;
    preference::sums(forward.output()?)
}

/// Of everything that the numbers depend on: weights, data, tokens.
fn fingerprint(ready: &Ready) -> Result<Hash128> {
    let mut hasher = Hasher128::new();
    let mut text = |text: &str| {
        hasher.update(&(text.len() as u64).to_le_bytes());
        hasher.update(text.as_bytes());
    };
    text(VERSION);
    text(&settings_text(&ready.settings));
    text(&ready.trained.model.dtype().to_string());
    hash_tokenizer(ready, &mut hasher)?;
    let (train, validation) = tables(ready);
    for rows in [Some(train), validation].into_iter().flatten() {
        hasher.update(&rows.content_hash()?.to_le_bytes());
    }
    for entry in ready.trained.model.entries() {
        hasher.update(entry.name.as_bytes());
        let home = entry.param.data();
        for start in (0..home.len()).step_by(HASHED_BYTES) {
            let end = (start + HASHED_BYTES).min(home.len());
            hasher.update(home.read(start..end)?.bytes());
        }
    }
    Ok(hasher.finish())
}

/// Settings that decide the tokens of a row.
fn settings_text(settings: &Settings) -> String {
    let format = settings.format.map_or("auto", |format| format.name());
    let too_long = settings.too_long.map_or("auto", |too_long| too_long.name());
    let seq = settings.seq.unwrap_or(0);
    let learn = settings.learn.name();
    let fast = settings.fast_attention;
    format!("{format} {too_long} {seq} {learn} {fast}")
}

/// The files that turn text into tokens.
fn hash_tokenizer(ready: &Ready, hasher: &mut Hasher128) -> Result<()> {
    let folder = &ready.trained.files;
    let own = [
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    ];
    let own = own.map(|name| folder.join(name));
    let given = ready.settings.template.iter().map(Into::into);
    for path in own.into_iter().chain(given) {
        match std::fs::read(&path) {
            Ok(bytes) => hasher.update(Hash128::of(&bytes).to_string().as_bytes()),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => hasher.update(b"none"),
            Err(e) => return Err(Error::io("read", &path, &e)),
        }
    }
    Ok(())
}
