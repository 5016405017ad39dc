//! What a run would learn from files, without a run: formats, lengths, rows as they are trained, and
//! those that would be cut, left out or refused.
//!
//! It takes the settings of a run and opens data and tokenizer as a run does, so that what it shows
//! is what `train` would do. No weights are read, no device is opened, no file is written.

use roundpipe_data::{FileReport, Source, SourceOptions, Survey, SurveyOptions};
use roundpipe_files::text::Line;
use roundpipe_models::tokenizer::Tokenizer;
use roundpipe_models::{hub, read_config};

use crate::error::{Error, Result};
use crate::progress::ShownRow;
use crate::resolve::{self, Lengths};
use crate::settings::{Given, Settings};
use crate::start;

/// The longest sequence of a model whose folder does not say.
const MAX_POSITIONS: usize = 1 << 20;

/// What was found in files of examples.
#[derive(Debug, Clone)]
pub struct DataShown {
    /// Each file.
    pub files: Vec<FileReport>,
    /// Rows that would validate.
    pub validation_rows: u64,
    /// Whether rows are pairs of answers, for preference tuning.
    pub is_preference: bool,
    /// Tokens of a row, where there is a tokenizer: as given, or as a run would choose.
    pub seq: Option<usize>,
    /// Whether `seq` was given.
    pub seq_is_given: bool,
    /// Every row: counts, lengths, those of which there is something to say.
    pub survey: Survey,
}

impl DataShown {
    /// The first rows as they would be trained.
    pub fn shown(&self) -> Vec<ShownRow> {
        let mut rows = Vec::new();
        for row in &self.survey.shown {
            let place = format!("{}: row {}", row.path.display(), row.row);
            let sides: &[&str] = match row.sides.len() {
                2 => &[", chosen", ", rejected"],
                _ => &[""],
            };
            for (pieces, side) in row.sides.iter().zip(sides) {
                rows.push(ShownRow {
                    title: format!("{place}{side}"),
                    pieces: pieces.clone(),
                });
            }
        }
        rows
    }
}

/// Looks at the data that settings name, and shows `rows` of them.
///
/// # Errors
/// One line with the place and the fix, as [`run`](crate::run()): for files that cannot be read, not
/// for single rows.
pub fn show(given: &Given, rows: usize) -> Result<DataShown> {
    let mut settings = Settings::default();
    given.apply(&mut settings);
    if settings.data.is_empty() {
        let what = "no data are given; name one or more files or folders of examples";
        return Err(Error::Usage(what.into()));
    }
    if settings.seq == Some(0) {
        return Err(Error::Usage("seq must be at least 1".into()));
    }
    let options = SourceOptions {
        format: settings.format.map(Into::into),
        ..SourceOptions::default()
    };
    let source = Source::open(&start::inputs(&settings)?, &options)?;
    let files = source.report();
    let validation = resolve::validation(&settings, source.rows().len());
    let source = source.with_validation(validation)?;
    let all = source.rows().all();
    let model = match open_tokenizer(&settings)? {
        Some((tokenizer, positions)) => Some((start::encoder(&settings, &tokenizer)?, positions)),
        None => None,
    };
    let seq = match (&model, settings.seq) {
        (None, _) => None,
        (Some(_), Some(seq)) => Some(seq),
        // The rows that a run would choose by.
        (Some((encoder, positions)), None) => {
            Some(Lengths::look(&source.rows(), encoder, true)?.seq(*positions))
        }
    };
    let options = SurveyOptions {
        seq,
        too_long: settings.too_long.map(Into::into),
        shown: rows,
        threads: settings.data_threads,
        ..SurveyOptions::default()
    };
    let encoder = model.as_ref().map(|(encoder, _)| encoder.as_ref());
    Ok(DataShown {
        is_preference: files.iter().any(|file| file.format.is_preference()),
        files,
        validation_rows: source.validation().len(),
        seq,
        seq_is_given: settings.seq.is_some(),
        survey: Survey::take(&all, encoder, &options),
    })
}

/// The tokenizer of the model that was named, and the model's longest sequence.
fn open_tokenizer(settings: &Settings) -> Result<Option<(Tokenizer, usize)>> {
    if settings.init.is_some() {
        let what = "init is for training; name the model whose tokenizer counts with --model";
        return Err(Error::Usage(what.into()));
    }
    let Some(name) = settings.model.as_ref().or(settings.tokenizer.as_ref()) else {
        if let Some(template) = &settings.template {
            let template = Line(template);
            return Err(Error::Usage(format!(
                "template {template}: needs a tokenizer; name a model with --model"
            )));
        }
        return Ok(None);
    };
    let path = hub::resolve(name)?;
    let tokenizer = Tokenizer::open(&path)?;
    let config = path.join("config.json");
    let positions = if config.is_file() {
        read_config(&path)?.max_positions
    } else {
        MAX_POSITIONS
    };
    Ok(Some((tokenizer, positions)))
}
