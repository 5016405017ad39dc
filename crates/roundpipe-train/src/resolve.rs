//! What the program chooses where the user did not: sizes from the data, rates from the method.
//!
//! Every choice is made once, when a run begins, and written into its `run.toml`. Reasons stand
//! beside the numbers, here and in the comments of that file.

use roundpipe::DType;
use roundpipe_data::{Document, Encoder, Example, Rows, Validation};
use roundpipe_models::ModelConfig;

use crate::error::{Error, Result};
use crate::settings::{
    LearnName, Method, MomentsName, Objective, RuleName, Schedule, Settings, TooLongName, TypeName,
    ValidationSetting,
};

/// Rows that are tokenised to learn how long they are.
const LOOKED_AT: u64 = 512;
/// The longest row unless another is given: most conversations fit, and memory stays small.
const MOST_SEQ: usize = 2048;
/// The shortest row that is chosen: shorter ones waste time on launches.
const LEAST_SEQ: usize = 256;
/// Steps that a run should have where the data allow it: with far fewer, a fine-tune has hardly
/// begun when its learning rate ends.
const GOOD_STEPS: u64 = 200;
/// Tokens of a step at most, on GPUs: what fine-tunes usually take.
const GPU_TOKENS: u64 = 16_384;
/// The same on a processor, where more would only mean fewer steps in the time one has.
const HOST_TOKENS: u64 = 2048;
/// Of a packed row, what documents fill on average.
const FILL: f64 = 0.95;
/// More steps than any run makes.
const MOST_STEPS: u64 = 1 << 40;
/// The fewest rows of which some are kept to validate.
const LEAST_TO_SPLIT: u64 = 50;

/// What was seen of the data.
#[derive(Debug, Clone)]
pub(crate) struct Lengths {
    /// Rows of an epoch.
    pub rows: u64,
    /// Tokens that a model is given of each row that was looked at.
    pub seen: Vec<usize>,
    /// Tokens of both sides of each pair that was looked at.
    pub pairs: Vec<usize>,
    /// Whether rows are plain texts.
    pub is_text: bool,
    /// Some documents, to show; of pairs both sides.
    pub shown: Vec<Document>,
    /// How the first row begins: a prompt for samples.
    pub prompt: Option<String>,
}

impl Lengths {
    /// Tokenises some rows, evenly over all of them.
    ///
    /// # Errors
    /// For a row that cannot be learned, unless bad rows are skipped.
    pub fn look(rows: &Rows, encoder: &Encoder, skip_bad: bool) -> Result<Self> {
        let order = rows.order(0, None);
        let count = rows.len().min(LOOKED_AT);
        let mut this = Self {
            rows: rows.len(),
            seen: Vec::new(),
            pairs: Vec::new(),
            is_text: true,
            shown: Vec::new(),
            prompt: None,
        };
        for index in 0..count {
            // 128 bits: the product of two numbers of rows.
            let place = (u128::from(index) * u128::from(rows.len()) / u128::from(count)) as u64;
            match row(&order, place, encoder) {
                Ok((example, documents)) => this.take(&example, documents),
                Err(_) if skip_bad => {}
                Err(error) => return Err(error),
            }
        }
        Ok(this)
    }

    /// What is assumed where no data are given: rows of one document each, learned as a whole.
    pub fn assumed(seq: usize) -> Self {
        Self {
            rows: 1,
            seen: vec![seq],
            pairs: Vec::new(),
            is_text: false,
            shown: Vec::new(),
            prompt: None,
        }
    }

    /// Tokens of so many rows, about.
    pub fn tokens_of(&self, rows: u64, seq: usize) -> f64 {
        self.tokens(seq) / self.rows.max(1) as f64 * rows as f64
    }

    fn take(&mut self, example: &Example, documents: Vec<Document>) {
        let tokens = documents.iter().map(Document::inputs);
        self.seen.push(tokens.clone().max().unwrap_or(0));
        if documents.len() > 1 {
            self.pairs.push(tokens.sum());
        }
        self.is_text &= matches!(example, Example::Text { .. });
        if self.prompt.is_none() {
            self.prompt = prompt(example);
        }
        if self.shown.len() < 2 {
            self.shown.extend(documents);
        }
    }

    /// Tokens of both sides of a pair in the mean, where rows are pairs.
    pub fn pair_tokens(&self) -> Option<usize> {
        let sum: usize = self.pairs.iter().sum();
        (!self.pairs.is_empty()).then(|| sum.div_ceil(self.pairs.len()))
    }

    /// Tokens of a row: the longest document that was seen, rounded up, within what the model and
    /// memory allow.
    pub fn seq(&self, max_positions: usize) -> usize {
        let longest = self.seen.iter().copied().max().unwrap_or(0);
        let most = MOST_SEQ.min(max_positions);
        longest
            .next_multiple_of(64)
            .clamp(LEAST_SEQ.min(most), most)
    }

    /// Tokens of an epoch in rows of `seq`, about: what is longer is cut.
    fn tokens(&self, seq: usize) -> f64 {
        if self.seen.is_empty() {
            return 0.0;
        }
        let cut = |tokens: &usize| {
            if self.is_text {
                *tokens
            } else {
                (*tokens).min(seq)
            }
        };
        let sum: usize = self.seen.iter().map(cut).sum();
        sum as f64 / self.seen.len() as f64 * self.rows as f64
    }

    /// Tokens of the document that a token is in, on average.
    pub fn context(&self, seq: usize) -> usize {
        let cut = || self.seen.iter().map(|tokens| (*tokens).min(seq) as f64);
        let squares: f64 = cut().map(|tokens| tokens * tokens).sum();
        (squares / cut().sum::<f64>().max(1.0)).ceil().max(1.0) as usize
    }

    /// Steps that take as many tokens as validating so many rows twice: more often would take more
    /// time than it is worth, since a forward is a third of a step.
    fn worth(&self, rows: u64, settings: &Settings) -> u64 {
        let seq = settings.seq.unwrap_or(1);
        let tokens = self.tokens(seq) / self.rows.max(1) as f64 * rows as f64;
        let of_a_step = seq * settings.batch.unwrap_or(1);
        (2.0 * tokens / of_a_step as f64).ceil() as u64
    }

    /// What will be done with rows that are too long, if there are any.
    pub fn too_long(&self, settings: &Settings) -> Option<String> {
        let seq = settings.seq.unwrap_or(1);
        let long = self.seen.iter().filter(|tokens| **tokens > seq).count();
        if long == 0 {
            return None;
        }
        let default = if self.is_text {
            TooLongName::Split
        } else {
            TooLongName::Cut
        };
        let done = match settings.too_long.unwrap_or(default) {
            TooLongName::Cut => "cut",
            TooLongName::Drop => "left out",
            TooLongName::Split => "split",
        };
        let looked_at = self.seen.len();
        Some(format!(
            "{long} of {looked_at} rows that were looked at have more than {seq} tokens and are {done}"
        ))
    }

    /// Rows of `seq` tokens that an epoch makes, about.
    fn packed_rows(&self, seq: usize, packing: bool) -> f64 {
        if packing {
            (self.tokens(seq) / (seq as f64 * FILL)).max(1.0)
        } else {
            self.rows as f64
        }
    }
}

fn row(
    order: &roundpipe_data::Order,
    place: u64,
    encoder: &Encoder,
) -> Result<(Example, Vec<Document>)> {
    let example = order.example(place)?;
    let encoded = match &example {
        Example::Preference(pair) => encoder.encode_pair(pair).map(Vec::from),
        _ => encoder.encode(&example).map(|document| vec![document]),
    };
    let documents = encoded.map_err(|what| Error::from(order.refuse(place, what)))?;
    Ok((example, documents))
}

/// What a sample can answer or continue, taken from a row.
fn prompt(example: &Example) -> Option<String> {
    let text = match example {
        Example::Preference(pair) => return prompt(&pair.chosen),
        Example::Chat(chat) => {
            let mut turns = chat.messages.iter();
            let user = turns.find(|message| message.role() == "user")?;
            user.0.get("content")?.as_str()?.to_owned()
        }
        Example::Completion { prompt, .. } => prompt.clone(),
        Example::Text { text, .. } => {
            let words: Vec<&str> = text.split_whitespace().take(4).collect();
            words.join(" ")
        }
    };
    let is_short = text.len() <= 400 && !text.trim().is_empty();
    is_short.then_some(text)
}

/// What rows validate, before the data are opened; the number of rows is not known then.
pub(crate) fn validation(settings: &Settings, rows: u64) -> Validation {
    match &settings.validation {
        Some(ValidationSetting::Share(share)) => Validation::Fraction(*share),
        Some(ValidationSetting::Rows(rows)) => Validation::Rows(*rows),
        Some(ValidationSetting::Off | ValidationSetting::File(_)) => Validation::None,
        None if rows < LEAST_TO_SPLIT => Validation::None,
        // 2%, but enough to mean something and not so many that validating takes long.
        None => Validation::Rows((rows / 50).clamp(10, 500)),
    }
}

/// Where a run takes place.
pub(crate) struct Place {
    pub devices: usize,
    pub is_host: bool,
}

/// Fills in every setting that learning depends on.
pub(crate) fn resolve(
    settings: &mut Settings,
    config: &ModelConfig,
    lengths: &Lengths,
    place: &Place,
    validation_rows: u64,
) -> Result<()> {
    resolve_sizes(settings, config, lengths, place)?;
    resolve_learning(settings, config, place);
    let steps = settings.steps.unwrap_or(1);
    let every = (steps / 10).clamp(1, 500);
    settings.save_every.get_or_insert(every);
    let save_every = settings.save_every.unwrap_or(every);
    let eval_every = match validation_rows {
        0 => 0,
        rows => save_every.max(lengths.worth(rows, settings)).min(steps),
    };
    settings.eval_every.get_or_insert(eval_every);
    settings.sample_every.get_or_insert(save_every);
    if settings.prompts.is_none() {
        settings.prompts = Some(lengths.prompt.clone().into_iter().collect());
    }
    check(settings, config)
}

fn resolve_sizes(
    settings: &mut Settings,
    config: &ModelConfig,
    lengths: &Lengths,
    place: &Place,
) -> Result<()> {
    let auto = lengths.seq(config.max_positions);
    let seq = *settings.seq.get_or_insert(auto);
    if seq == 0 || (settings.init.is_none() && seq > config.max_positions) {
        return Err(Error::Usage(format!(
            "seq {seq} is not from 1 to {}, the model's longest sequence",
            config.max_positions
        )));
    }
    if settings.steps.is_none() {
        // Text is read once, as in pretraining; examples are few and shown three times.
        // Pairs are soon known by heart.
        let is_pairs = settings.objective != Objective::Sft;
        let default = if is_pairs || (lengths.is_text && settings.init.is_none()) {
            1
        } else {
            3
        };
        settings.epochs.get_or_insert(default);
    }
    let epochs = settings.epochs.unwrap_or(1) as f64;
    let is_pairs = settings.objective != Objective::Sft;
    let packs = settings.packing && !is_pairs;
    let all_rows = lengths.packed_rows(seq, packs) * epochs;
    let most_tokens = if place.is_host {
        HOST_TOKENS
    } else {
        GPU_TOKENS
    };
    let row_tokens = lengths.pair_tokens().unwrap_or(seq).max(1);
    let most_rows = (most_tokens / row_tokens as u64).max(1);
    let batch = match settings.steps {
        Some(_) => most_rows,
        None => ((all_rows / GOOD_STEPS as f64) as u64).clamp(1, most_rows),
    };
    let batch = *settings.batch.get_or_insert(batch as usize);
    if batch == 0 {
        return Err(Error::Usage("batch must be at least 1".into()));
    }
    let steps = (all_rows / batch as f64).ceil().max(1.0) as u64;
    settings.steps.get_or_insert(steps);
    settings
        .microbatches
        .get_or_insert((place.devices + 1).min(batch));
    Ok(())
}

fn resolve_learning(settings: &mut Settings, config: &ModelConfig, place: &Place) {
    let from_scratch = settings.init.is_some();
    let adamw = match (settings.objective, settings.method, from_scratch) {
        (Objective::Dpo, Method::Full, _) => 1e-6,
        (Objective::Dpo, Method::Lora, _) => 1e-5,
        (Objective::Orpo, Method::Full, _) => 8e-6,
        (Objective::Orpo, Method::Lora, _) => 8e-5,
        (Objective::Sft, Method::Lora, _) => 2e-4,
        (Objective::Sft, Method::Full, false) => 2e-5,
        (Objective::Sft, Method::Full, true) => 1e-3,
    };
    let lr = match settings.optimizer {
        RuleName::AdamW | RuleName::Adam | RuleName::Muon => adamw,
        // Steps of one length, which are larger than Adam's.
        RuleName::Lion => adamw / 5.0,
        // Not divided by the gradients' size.
        RuleName::Sgd => 1000.0 * adamw,
        // Relative to the size of the weights.
        RuleName::Adafactor => 50.0 * adamw,
    };
    settings.lr.get_or_insert(lr);
    let decay = match (settings.method, from_scratch) {
        (Method::Lora, _) => 0.0,
        (Method::Full, false) => 0.01,
        (Method::Full, true) => 0.1,
    };
    settings.weight_decay.get_or_insert(decay);
    let steps = settings.steps.unwrap_or(1);
    let warmup = match settings.schedule {
        _ if steps < 10 => 0,
        _ => (steps / 100 * 3 + steps % 100 * 3 / 100).max(2),
    };
    settings.warmup.get_or_insert(warmup);
    if settings.dtype.is_none() {
        let own = config.dtype.and_then(TypeName::of);
        let dtype = match own {
            // Processors compute in f32 as fast, and training takes the same 16 bytes a weight.
            _ if place.is_host => TypeName::F32,
            Some(own) => own,
            None => TypeName::Bf16,
        };
        settings.dtype = Some(dtype);
    }
}

/// Refuses numbers that cannot work.
fn check(settings: &Settings, config: &ModelConfig) -> Result<()> {
    let refuse = |what: String| Err(Error::Usage(what));
    let steps = settings.steps.unwrap_or(0);
    if steps == 0 || steps > MOST_STEPS {
        return refuse(format!(
            "steps {steps} is not from 1 to {MOST_STEPS}; give `steps` or `epochs` that are"
        ));
    }

    let warmup = settings.warmup.unwrap_or(0);
    if settings.method == Method::Full {
        if settings.quantize.is_some() {
            return refuse("quantize: quantized weights are not trained; add --lora".into());
        }
        if let Some(how) = config.quantization() {
            return refuse(format!(
                "model: its weights are quantized ({how}) and are not trained; add --lora"
            ));
        }
    }
    check_fp8(settings, config)?;
    if warmup > steps {
        return refuse(format!(
            "warmup {warmup} is longer than the run of {steps} steps; choose fewer"
        ));
    }
    if settings.lag > 1 {
        return refuse(format!("lag {} is neither 0 nor 1", settings.lag));
    }
    if settings.keep == 0 {
        return refuse("keep must be at least 1".into());
    }
    let shares = [
        ("min_lr", settings.min_lr, 1.0),
        ("decay", settings.decay, 1.0),
        ("label_smoothing", settings.label_smoothing, 1.0),
        ("dpo_label_smoothing", settings.dpo_label_smoothing, 0.499),
        ("orpo_lambda", settings.orpo_lambda, 1e6),
        ("neftune", settings.neftune, 1e6),
        ("clip", settings.clip, 1e9),
        ("sample_temperature", settings.sample_temperature, 100.0),
        ("lr", settings.lr.unwrap_or(0.0), 1e6),
        ("weight_decay", settings.weight_decay.unwrap_or(0.0), 1e6),
    ];
    for (name, value, most) in shares {
        if !(0.0..=most).contains(&value) {
            return refuse(format!("{name} {value:?} is not from 0 to {most:?}"));
        }
    }
    if let Some(momentum) = settings.momentum.filter(|m| !(0.0..1.0).contains(m)) {
        return refuse(format!(
            "momentum {momentum:?} is not from 0 up to, but not including, 1"
        ));
    }
    if settings.microbatches == Some(0) {
        return refuse("microbatches must be at least 1".into());
    }
    if settings.state_dtype == TypeName::F16 {
        return refuse("state_dtype is f32 or bf16; f16 has too few exponents for moments".into());
    }
    if settings.state_dtype == TypeName::Bf16 && settings.moments != MomentsName::F32 {
        return refuse(
            "moments is of no use beside state_dtype=bf16, which makes moments bf16 too; set one of them"
                .into(),
        );
    }
    if settings.sample_tokens > config.max_positions {
        return refuse(format!(
            "sample_tokens {} is more than the model's longest sequence, {}",
            settings.sample_tokens, config.max_positions
        ));
    }
    if settings.patience > 0 && settings.eval_every == Some(0) {
        return refuse(
            "patience needs validation; give `validation` rows, a share or a file".into(),
        );
    }
    check_objective(settings)?;
    let own = config.dtype.unwrap_or(DType::F32);
    if settings.dtype.is_none() && TypeName::of(own).is_none() {
        return refuse(format!(
            "dtype: {own} cannot be trained; choose bf16, f16 or f32"
        ));
    }
    if settings.schedule == Schedule::StableThenDecay && settings.decay == 0.0 {
        return refuse("decay must be above 0 for schedule wsd".into());
    }
    Ok(())
}

/// Refuses fp8 where it would do nothing, or where two things would be compared of which only one
/// has it.
fn check_fp8(settings: &Settings, config: &ModelConfig) -> Result<()> {
    let refuse = |what: &str| Err(Error::Usage(what.into()));
    if !settings.fp8 {
        return Ok(());
    }
    if settings.quantize.is_some() || config.quantization().is_some() {
        return refuse(
            "fp8: quantized weights are multiplied as they widen, without fp8; leave fp8 or the \
             quantized weights out",
        );
    }
    if settings.objective == Objective::Dpo {
        return refuse(
            "fp8: dpo compares with a reference that is computed without fp8; leave fp8 out, or use \
             orpo, which has none",
        );
    }
    Ok(())
}

/// Refuses settings that mean nothing for pairs of answers, or nothing without them.
fn check_objective(settings: &Settings) -> Result<()> {
    let refuse = |what: &str| Err(Error::Usage(what.into()));
    let objective = settings.objective.name();
    if settings.objective == Objective::Sft {
        return Ok(());
    }
    if !(settings.dpo_beta > 0.0 && settings.dpo_beta <= 1e3) {
        let beta = settings.dpo_beta;
        return refuse(&format!(
            "dpo_beta {beta:?} is not above 0 and at most 1000; 0.1 is usual"
        ));
    }
    if settings.label_smoothing > 0.0 {
        return refuse("label_smoothing is of tokens; use dpo_label_smoothing for pairs");
    }
    if settings.learn == LearnName::Everything {
        return refuse(&format!(
            "learn everything is not for {objective}, which learns from answers alone; leave it out"
        ));
    }
    if settings.too_long == Some(TooLongName::Split) {
        return refuse(&format!(
            "too_long split is not for {objective}: an answer cannot be compared in parts; use cut or drop"
        ));
    }
    Ok(())
}
