//! Every setting of a run: its name, what it means, how it is read and written.
//!
//! One list ([`Settings::list`]) says which settings there are. A file and `key=value` arguments set
//! them by name, and the same list writes the commented file. A setting that is not there is left to
//! the program, which chooses it when the run begins ([`resolve`](crate::resolve)) and writes it into
//! the run's `run.toml`; a run that goes on reads it from there.
//!
//! Refused, each with the place and the nearest name or what would be right: keys that are not in
//! the list, values of the wrong kind, files that are no TOML.
//!
//! # Invariants
//! - What is written reads back as the same settings.

mod value;

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

use roundpipe::{Bytes, DType, Grain, MomentType, Pin, Quantization};
use roundpipe_data::{BadRows, Format, Learn, TooLong};
use toml::Value;

use crate::error::{Error, Result};
use value::{Setting, choice, quoted};

/// The longest settings file.
pub(crate) const MOST_BYTES: u64 = 1 << 20;

/// What other programs call a setting.
const ALIASES: [(&str, &str); 10] = [
    ("learning_rate", "lr"),
    ("max_length", "seq"),
    ("max_seq_length", "seq"),
    ("max_seq_len", "seq"),
    ("context_length", "seq"),
    ("gradient_accumulation_steps", "microbatches"),
    ("max_grad_norm", "clip"),
    ("lr_scheduler_type", "schedule"),
    ("output_dir", "out"),
    ("target_modules", "lora_targets"),
];

choice! {
    /// What is trained.
    Method {
        /// Every weight.
        #[default]
        Full = "full",
        /// Low-rank branches beside frozen weights.
        Lora = "lora",
    }
}
choice! {
    /// What is learned from the data.
    Objective {
        /// Tokens: supervised fine-tuning.
        #[default]
        Sft = "sft",
        /// Which of two answers is preferred, compared with the model before training (DPO).
        Dpo = "dpo",
        /// The preferred answer, and that it is likelier than the other (ORPO).
        Orpo = "orpo",
    }
}
choice! {
    /// The loss of DPO.
    DpoLossName {
        /// As in the paper; with label smoothing, cDPO.
        #[default]
        Sigmoid = "sigmoid",
        /// Squared, with means per token (IPO).
        Ipo = "ipo",
    }
}
choice! {
    /// The optimizer's rule.
    RuleName {
        /// AdamW.
        #[default]
        AdamW = "adamw",
        /// Adam.
        Adam = "adam",
        /// SGD with momentum.
        Sgd = "sgd",
        /// Lion.
        Lion = "lion",
        /// Muon for hidden matrices, AdamW for the rest.
        Muon = "muon",
        /// Adafactor.
        Adafactor = "adafactor",
    }
}
choice! {
    /// The learning rate over the run, behind the warm-up.
    Schedule {
        /// Half a cosine wave down to `min_lr`.
        #[default]
        Cosine = "cosine",
        /// A straight line down to `min_lr`.
        Linear = "linear",
        /// The same rate to the end.
        Constant = "constant",
        /// The same rate, then a line down over the last `decay` of the run.
        StableThenDecay = "wsd",
    }
}
choice! {
    /// A type of weights.
    TypeName {
        /// 16 bits with the range of f32.
        #[default]
        Bf16 = "bf16",
        /// IEEE 16 bits; losses are scaled.
        F16 = "f16",
        /// 32 bits.
        F32 = "f32",
    }
}
choice! {
    /// In what the optimizer's moments are kept.
    MomentsName {
        /// 32 bits.
        #[default]
        F32 = "f32",
        /// 16 bits, rounded at random.
        Bf16 = "bf16",
        /// 8 bits, with a scale per 256 elements, as bitsandbytes.
        Bits8 = "8bit",
    }
}
choice! {
    /// How frozen weights are kept.
    QuantizeName {
        /// Four bits, as bitsandbytes' NF4.
        #[default]
        Nf4 = "nf4",
        /// Eight bits, a factor for each row.
        Int8 = "int8",
    }
}
choice! {
    /// What is recomputed together before a backward.
    GrainName {
        /// A stage.
        #[default]
        Stage = "stage",
        /// A layer: less GPU memory, more host memory.
        Layer = "layer",
    }
}
choice! {
    /// Which tokens are learned.
    LearnName {
        /// What the assistant says, and completions.
        #[default]
        Assistant = "assistant",
        /// The assistant's last turn.
        LastTurn = "last_turn",
        /// Everything.
        Everything = "everything",
    }
}
choice! {
    /// What is done with rows that are too long.
    TooLongName {
        /// Their first tokens are kept.
        #[default]
        Cut = "cut",
        /// They are left out.
        Drop = "drop",
        /// They become several documents.
        Split = "split",
    }
}
choice! {
    /// What is done with rows that cannot be read.
    BadRowsName {
        /// The run ends with their place.
        #[default]
        Refuse = "refuse",
        /// They are counted and left out.
        Skip = "skip",
    }
}
choice! {
    /// The format of all rows.
    FormatName {
        /// Conversations: `messages` with `role` and `content`.
        #[default]
        Messages = "messages",
        /// Conversations with `from` and `value`.
        ShareGpt = "sharegpt",
        /// `instruction`, `input`, `output`.
        Alpaca = "alpaca",
        /// `prompt` and `completion`.
        Completion = "completion",
        /// Plain text.
        Text = "text",
        /// `prompt`, `chosen`, `rejected`.
        Preference = "preference",
        /// `chosen` and `rejected`, which begin with the prompt.
        ImplicitPreference = "preference_implicit",
        /// `conversations`, `chosen`, `rejected`.
        ShareGptPreference = "preference_sharegpt",
    }
}
choice! {
    /// How host memory is pinned.
    PinName {
        /// As much as the driver gives.
        #[default]
        Try = "try",
        /// All of it from the driver, or an error.
        Alloc = "alloc",
        /// All of it registered, or an error.
        Register = "register",
        /// None; frozen weights stay in files.
        Off = "off",
    }
}

impl From<TypeName> for DType {
    fn from(name: TypeName) -> Self {
        match name {
            TypeName::Bf16 => Self::BF16,
            TypeName::F16 => Self::F16,
            TypeName::F32 => Self::F32,
        }
    }
}

impl From<MomentsName> for MomentType {
    fn from(name: MomentsName) -> Self {
        match name {
            MomentsName::F32 => Self::F32,
            MomentsName::Bf16 => Self::Bf16,
            MomentsName::Bits8 => Self::Bits8,
        }
    }
}

impl From<QuantizeName> for Quantization {
    fn from(name: QuantizeName) -> Self {
        match name {
            QuantizeName::Nf4 => Self::Nf4,
            QuantizeName::Int8 => Self::Int8,
        }
    }
}

impl From<GrainName> for Grain {
    fn from(name: GrainName) -> Self {
        match name {
            GrainName::Stage => Self::Stage,
            GrainName::Layer => Self::Layer,
        }
    }
}

impl From<LearnName> for Learn {
    fn from(name: LearnName) -> Self {
        match name {
            LearnName::Assistant => Self::Assistant,
            LearnName::LastTurn => Self::LastTurn,
            LearnName::Everything => Self::Everything,
        }
    }
}

impl From<TooLongName> for TooLong {
    fn from(name: TooLongName) -> Self {
        match name {
            TooLongName::Cut => Self::Cut,
            TooLongName::Drop => Self::Drop,
            TooLongName::Split => Self::Split,
        }
    }
}

impl From<BadRowsName> for BadRows {
    fn from(name: BadRowsName) -> Self {
        match name {
            BadRowsName::Refuse => Self::Refuse,
            BadRowsName::Skip => Self::Skip,
        }
    }
}

impl From<PinName> for Pin {
    fn from(name: PinName) -> Self {
        match name {
            PinName::Try => Self::Try,
            PinName::Alloc => Self::Alloc,
            PinName::Register => Self::Register,
            PinName::Off => Self::Off,
        }
    }
}

impl TypeName {
    /// The name of a type, if it is one of a model.
    pub fn of(dtype: DType) -> Option<Self> {
        match dtype {
            DType::BF16 => Some(Self::Bf16),
            DType::F16 => Some(Self::F16),
            DType::F32 => Some(Self::F32),
            _ => None,
        }
    }
}

impl From<FormatName> for Format {
    fn from(name: FormatName) -> Self {
        match name {
            FormatName::Messages => Self::Messages,
            FormatName::ShareGpt => Self::ShareGpt,
            FormatName::Alpaca => Self::Alpaca,
            FormatName::Completion => Self::PromptCompletion,
            FormatName::Text => Self::Text,
            FormatName::Preference => Self::Preference,
            FormatName::ImplicitPreference => Self::ImplicitPreference,
            FormatName::ShareGptPreference => Self::ShareGptPreference,
        }
    }
}

/// Which rows validate.
#[derive(Debug, Clone, PartialEq, Default)]
pub enum ValidationSetting {
    /// None.
    #[default]
    Off,
    /// This share of the rows, below 1.
    Share(f64),
    /// So many rows.
    Rows(u64),
    /// The rows of other files.
    File(String),
}

impl Setting for ValidationSetting {
    fn set(&mut self, value: &Value) -> Result<(), String> {
        let wrong = "must be a share such as 0.02, a number of rows, a file, or \"off\"";
        *self = match value {
            Value::String(text) if text == "off" => Self::Off,
            Value::String(text) if !text.is_empty() => Self::File(text.clone()),
            Value::Float(share) if *share > 0.0 && *share < 1.0 => Self::Share(*share),
            Value::Float(none) if *none == 0.0 => Self::Off,
            Value::Integer(0) => Self::Off,
            Value::Integer(rows) => Self::Rows(u64::try_from(*rows).map_err(|_| wrong)?),
            _ => return Err(wrong.into()),
        };
        Ok(())
    }

    fn show(&self) -> Option<String> {
        Some(match self {
            Self::Off => quoted("off"),
            Self::Share(share) => format!("{share:?}"),
            Self::Rows(rows) => rows.to_string(),
            Self::File(file) => quoted(file),
        })
    }
}

/// Settings of some parameters, by a pattern of their names.
#[derive(Debug, Clone, PartialEq)]
pub struct GroupSetting {
    /// `*` stands for any characters.
    pub matching: String,
    /// Multiplies the learning rate.
    pub lr_factor: Option<f64>,
    /// Instead of the rule's.
    pub weight_decay: Option<f64>,
    /// Whether they stay as they are.
    pub freeze: bool,
}

impl Setting for Vec<GroupSetting> {
    fn set(&mut self, value: &Value) -> Result<(), String> {
        let wrong = "must be a list such as [{ match = \"*embed*\", lr_factor = 0.1 }]; there are match, \
                     lr_factor, weight_decay and freeze";
        let items = value.as_array().ok_or(wrong)?;
        let group = |item: &Value| {
            let table = item.as_table().ok_or(wrong)?;
            let mut group = GroupSetting {
                matching: String::new(),
                lr_factor: None,
                weight_decay: None,
                freeze: false,
            };
            for (key, value) in table {
                let field: &mut dyn Setting = match key.as_str() {
                    "match" => &mut group.matching,
                    "lr_factor" => &mut group.lr_factor,
                    "weight_decay" => &mut group.weight_decay,
                    "freeze" => &mut group.freeze,
                    _ => return Err(format!("`{key}`: {wrong}")),
                };
                field.set(value).map_err(|why| format!("`{key}` {why}"))?;
            }
            if group.matching.is_empty() {
                return Err(format!("a group has no `match`: {wrong}"));
            }
            Ok(group)
        };
        *self = items.iter().map(group).collect::<Result<_, String>>()?;
        Ok(())
    }

    fn show(&self) -> Option<String> {
        let one = |group: &GroupSetting| {
            let mut text = format!("{{ match = {}", quoted(&group.matching));
            if let Some(factor) = group.lr_factor {
                let _ = write!(text, ", lr_factor = {factor:?}");
            }
            if let Some(decay) = group.weight_decay {
                let _ = write!(text, ", weight_decay = {decay:?}");
            }
            if group.freeze {
                text.push_str(", freeze = true");
            }
            text + " }"
        };
        let groups: Vec<String> = self.iter().map(one).collect();
        Some(format!("[{}]", groups.join(", ")))
    }
}

/// Everything that a user can choose. `None` is left to the program.
#[derive(Debug, Clone, PartialEq)]
#[expect(missing_docs, reason = "`list` says what each of them means")]
pub struct Settings {
    pub model: Option<String>,
    pub init: Option<String>,
    pub tokenizer: Option<String>,
    pub data: Vec<String>,
    pub format: Option<FormatName>,
    pub validation: Option<ValidationSetting>,
    pub out: Option<String>,
    pub method: Method,
    pub objective: Objective,
    pub steps: Option<u64>,
    pub epochs: Option<u64>,
    pub seq: Option<usize>,
    pub batch: Option<usize>,
    pub microbatches: Option<usize>,
    pub packing: bool,
    pub shuffle: bool,
    pub learn: LearnName,
    pub too_long: Option<TooLongName>,
    pub bad_rows: BadRowsName,
    pub template: Option<String>,
    pub optimizer: RuleName,
    pub lr: Option<f64>,
    pub schedule: Schedule,
    pub warmup: Option<u64>,
    pub min_lr: f64,
    pub decay: f64,
    pub weight_decay: Option<f64>,
    pub beta1: Option<f64>,
    pub beta2: Option<f64>,
    pub momentum: Option<f64>,
    pub clip: f64,
    pub label_smoothing: f64,
    pub neftune: f64,
    pub groups: Vec<GroupSetting>,
    pub seed: u64,
    pub lora_rank: usize,
    pub lora_alpha: f64,
    pub lora_dropout: f64,
    pub lora_targets: Vec<String>,
    pub lora_rslora: bool,
    pub dpo_beta: f64,
    pub dpo_loss: DpoLossName,
    pub dpo_label_smoothing: f64,
    pub orpo_lambda: f64,
    pub quantize: Option<QuantizeName>,
    pub save_every: Option<u64>,
    pub keep: usize,
    pub eval_every: Option<u64>,
    pub patience: u64,
    pub sample_every: Option<u64>,
    pub prompts: Option<Vec<String>>,
    pub sample_tokens: usize,
    pub sample_temperature: f64,
    pub devices: Option<String>,
    pub gpu_memory: Option<Bytes>,
    pub host_memory: Option<Bytes>,
    pub pin: PinName,
    pub data_threads: usize,
    pub stages: Option<usize>,
    pub dtype: Option<TypeName>,
    pub state_dtype: TypeName,
    pub moments: MomentsName,
    pub lag: u64,
    pub grain: GrainName,
    /// Whether nothing is kept for recomputes.
    pub recompute_all: bool,
    pub fp8: bool,
    pub fast_attention: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            model: None,
            init: None,
            tokenizer: None,
            data: Vec::new(),
            format: None,
            validation: None,
            out: None,
            method: Method::Full,
            objective: Objective::Sft,
            steps: None,
            epochs: None,
            seq: None,
            batch: None,
            microbatches: None,
            packing: true,
            shuffle: true,
            learn: LearnName::Assistant,
            too_long: None,
            bad_rows: BadRowsName::Refuse,
            template: None,
            optimizer: RuleName::AdamW,
            lr: None,
            schedule: Schedule::Cosine,
            warmup: None,
            min_lr: 0.1,
            decay: 0.2,
            weight_decay: None,
            beta1: None,
            beta2: None,
            momentum: None,
            clip: 1.0,
            label_smoothing: 0.0,
            neftune: 0.0,
            groups: Vec::new(),
            seed: 0,
            lora_rank: 16,
            lora_alpha: 32.0,
            lora_dropout: 0.0,
            lora_targets: vec!["all-linear".into()],
            lora_rslora: false,
            dpo_beta: 0.1,
            dpo_loss: DpoLossName::Sigmoid,
            dpo_label_smoothing: 0.0,
            orpo_lambda: 0.1,
            quantize: None,
            save_every: None,
            keep: 2,
            eval_every: None,
            patience: 0,
            sample_every: None,
            prompts: None,
            sample_tokens: 64,
            sample_temperature: 0.0,
            devices: None,
            gpu_memory: None,
            host_memory: None,
            pin: PinName::Try,
            data_threads: 2,
            stages: None,
            dtype: None,
            state_dtype: TypeName::F32,
            moments: MomentsName::F32,
            lag: 0,
            grain: GrainName::Stage,
            recompute_all: false,
            fp8: false,
            fast_attention: false,
        }
    }
}

/// Whether a run that goes on may have another value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Later {
    /// It decides what is learned.
    Fixed,
    /// It decides only how and where.
    Free,
}

/// One of the list.
struct Item<'a> {
    name: &'static str,
    about: &'static str,
    later: Later,
    value: &'a mut dyn Setting,
}

impl Settings {
    /// All settings, in the order of the file: headings (no value) and settings.
    #[rustfmt::skip]
    fn list(&mut self) -> Vec<Result<Item<'_>, &'static str>> {
        use Later::{Fixed, Free};
        let mut list = Vec::new();
        macro_rules! heading { ($text:literal) => { list.push(Err($text)) }; }
        macro_rules! key {
            ($name:ident, $later:ident, $about:literal) => {
                list.push(Ok(Item { name: stringify!($name), about: $about, later: $later, value: &mut self.$name }))
            };
        }
        heading!("What is trained on what");
        key!(model, Fixed, "a folder or a hub id such as \"Qwen/Qwen3-0.6B\"");
        key!(init, Fixed, "instead of a model: random weights of a preset such as \"tiny\" or \"qwen3-0.6b\"");
        key!(tokenizer, Fixed, "a folder with tokenizer.json, for init; without one, bytes are tokens");
        key!(data, Fixed, "files and folders of examples; \"chats.jsonl=0.5\" takes half of its rows in an epoch");
        key!(format, Fixed, "messages, sharegpt, alpaca, completion, text, preference, preference_implicit or preference_sharegpt; found in each file unless given");
        key!(validation, Fixed, "rows kept to validate: a share, a number, a file, or \"off\"; by default 2% of 50 rows or more");
        key!(out, Free, "the run's folder; by default runs/MODEL-DATA");
        key!(method, Fixed, "\"full\": every weight; \"lora\": low-rank branches beside frozen weights, a fraction of the memory");
        key!(objective, Fixed, "\"sft\": the tokens of examples; \"dpo\", \"orpo\": which of two answers is preferred (--method)");
        heading!("How long, and how much at a time");
        key!(epochs, Free, "how often all rows are taken; 3 by default, 1 for plain text and pairs");
        key!(steps, Free, "optimizer steps, instead of epochs");
        key!(seq, Fixed, "tokens of a packed row: the longest document, rounded up, and at most 2048 by default");
        key!(batch, Fixed, "rows or pairs of a step; by default about 200 steps in a run, and at most 16,384 tokens in a step");
        key!(microbatches, Fixed, "parts of a step; devices + 1 by default, more where one does not fit");
        key!(packing, Fixed, "several documents in a row, which do not see each other");
        key!(shuffle, Fixed, "rows in an order of their own in every epoch");
        key!(learn, Fixed, "\"assistant\": what the assistant says; \"last_turn\"; \"everything\"");
        key!(too_long, Fixed, "rows of more than seq tokens: \"cut\", \"drop\" or \"split\"; by default texts are split and chats cut");
        key!(bad_rows, Fixed, "\"refuse\": end with the place of a row that cannot be read; \"skip\": count and leave out");
        key!(template, Fixed, "a chat template file, instead of the model's own");
        heading!("Learning");
        key!(optimizer, Fixed, "adamw, adam, sgd, lion, muon or adafactor");
        key!(lr, Fixed, "peak learning rate; AdamW: 2e-5 for a full fine-tune (more forgets), 2e-4 for LoRA (its branches start at zero), 1e-3 from scratch; for DPO 1e-6 and 1e-5, for ORPO 8e-6 and 8e-5");
        key!(schedule, Fixed, "cosine, linear, constant or wsd (warm-up, stable, decay)");
        key!(warmup, Fixed, "steps from 0 to lr; 3% of the run by default");
        key!(min_lr, Fixed, "what lr ends at, as a share of the peak");
        key!(decay, Fixed, "wsd: the share of the run that goes down");
        key!(weight_decay, Fixed, "of matrices; 0.01 by default, 0 for LoRA, 0.1 from scratch");
        key!(beta1, Fixed, "the optimizer's first decay; the rule's own unless given");
        key!(beta2, Fixed, "the optimizer's second decay");
        key!(momentum, Fixed, "sgd, muon: momentum");
        key!(clip, Fixed, "the most that the gradients' norm may be; 0 is off");
        key!(label_smoothing, Fixed, "share of the target spread over all tokens");
        key!(neftune, Fixed, "noise on embeddings (NEFTune's alpha, 5 is usual)");
        key!(groups, Fixed, "settings by name: [{ match = \"*embed*\", lr_factor = 0.1, weight_decay = 0.0, freeze = true }]");
        key!(seed, Fixed, "of random weights, dropout, and the order of rows");
        heading!("LoRA");
        key!(lora_rank, Fixed, "width of a branch");
        key!(lora_alpha, Fixed, "a branch is multiplied with alpha / rank");
        key!(lora_dropout, Fixed, "share of a branch's inputs that are dropped in training");
        key!(lora_targets, Fixed, "\"all-linear\", or names such as [\"q_proj\", \"v_proj\"]");
        key!(lora_rslora, Fixed, "multiply with alpha / sqrt(rank) instead");
        key!(quantize, Fixed, "frozen weights in 4 or 8 bits, \"nf4\" or \"int8\": a quarter or half of the memory and of what is sent to GPUs; whole unless given");
        heading!("Preference tuning");
        key!(dpo_beta, Fixed, "how close DPO stays to the model before training; less lets it go further");
        key!(dpo_loss, Fixed, "\"sigmoid\", or \"ipo\": squared, with means per token");
        key!(dpo_label_smoothing, Fixed, "share of pairs that are taken to be the wrong way round (cDPO), below 0.5");
        key!(orpo_lambda, Fixed, "ORPO: the weight of the odds beside the chosen answer's own loss");
        heading!("Saving and looking");
        key!(save_every, Free, "steps between checkpoints; a tenth of the run by default, at most 500");
        key!(keep, Free, "checkpoints that stay, besides the best");
        key!(eval_every, Free, "steps between validations; as save_every by default, but no more often than it is worth");
        key!(patience, Free, "stop after so many validations without a better one; 0 is never");
        key!(sample_every, Free, "steps between samples; as save_every by default, 0 is never");
        key!(prompts, Free, "what samples answer or continue; the first row's prompt by default");
        key!(sample_tokens, Free, "tokens of a sample");
        key!(sample_temperature, Free, "0 takes the likeliest token");
        heading!("Where");
        key!(devices, Free, "\"cuda\", \"cuda:0,cuda:1\", \"cpu\", \"cpu:2\"; every GPU by default, or the processor");
        key!(gpu_memory, Free, "the most to take of each GPU, such as \"24GiB\"; what is free by default");
        key!(host_memory, Free, "the most that weights, gradients and optimizer may take of the host");
        key!(pin, Free, "pinned host memory: try, alloc, register or off");
        key!(data_threads, Free, "threads that read and tokenise");
        key!(stages, Free, "so many stages of equally many layers; planned by default");
        key!(dtype, Fixed, "bf16, f16 or f32; the model's own on GPUs, f32 on a processor");
        key!(state_dtype, Fixed, "of the optimizer's masters and moments: f32, or bf16 for half the memory");
        key!(moments, Fixed, "of the optimizer: \"f32\", \"bf16\" (rounded at random) or \"8bit\" (by blocks; embeddings stay f32): 14, 10 or 8 bytes of host memory a bf16 weight in all");
        key!(lag, Fixed, "0: every step sees the newest weights; 1: the update runs beside the next step (2% faster, 2 bytes a weight more)");
        key!(recompute_all, Free, "keep no results of forwards for their recompute (slower, less GPU memory)");
        key!(grain, Free, "recompute by \"stage\" or by \"layer\" (less GPU memory)");
        key!(fp8, Fixed, "multiply projections in 8-bit floats in training: faster on GPUs from Ada on, less exact");
        key!(fast_attention, Fixed, "faster attention on GPUs whose last bits vary from run to run");
        list
    }

    /// Every name.
    pub fn names() -> Vec<&'static str> {
        let mut settings = Self::default();
        let list = settings.list();
        list.into_iter()
            .filter_map(|item| item.ok().map(|item| item.name))
            .collect()
    }

    /// The commented file. What the program would choose is a comment.
    pub fn to_toml(&self) -> String {
        let mut text = String::new();
        let mut copy = self.clone();
        for item in copy.list() {
            match item {
                Err(heading) => {
                    let gap = if text.is_empty() { "" } else { "\n" };
                    let _ = writeln!(text, "{gap}# {heading}");
                }
                Ok(Item {
                    name, about, value, ..
                }) => {
                    let _ = match value.show() {
                        Some(value) => writeln!(text, "{name} = {value}  # {about}"),
                        None => writeln!(text, "# {name} =  # {about}"),
                    };
                }
            }
        }
        text
    }
}

/// Settings that a user wrote, and where each of them stands.
#[derive(Debug, Clone, Default)]
pub struct Given(BTreeMap<&'static str, (Value, String)>);

impl Given {
    /// Reads a file.
    ///
    /// # Errors
    /// [`Error::Usage`] with file, line and what would be right.
    pub fn file(path: &Path) -> Result<Self> {
        let text = read(path)?;
        let mut given = Self::default();
        let table: toml::Table = text
            .parse()
            .map_err(|error| syntax_error(path, &text, &error))?;
        for (key, value) in table {
            let place = format!("{}: line {}", path.display(), line_of(&text, &key));
            given.put(&key, value, place)?;
        }
        Ok(given)
    }

    /// Sets `key=value` from an argument. The value is TOML, or text without quotes.
    ///
    /// # Errors
    /// [`Error::Usage`] as [`Given::file`].
    pub fn argument(&mut self, text: &str) -> Result<()> {
        let Some((key, value)) = text.split_once('=') else {
            return Err(Error::Usage(format!("`{text}` is no key=value")));
        };
        let value = value.trim();
        let as_toml = format!("value = {value}").parse::<toml::Table>().ok();
        let parsed =
            as_toml.and_then(|mut table| (table.len() == 1).then(|| table.remove("value")));
        let parsed = parsed
            .flatten()
            .unwrap_or_else(|| Value::String(value.into()));
        self.put(key.trim(), parsed, text.to_owned())
    }

    /// Sets a key, over what it was before.
    ///
    /// # Errors
    /// [`Error::Usage`] for a key that is not there and a value that it cannot have.
    pub fn put(&mut self, key: &str, value: impl Into<Value>, place: String) -> Result<()> {
        let value = value.into();
        let mut scratch = Settings::default();
        let list = scratch.list();
        let mut items = list.into_iter().filter_map(Result::ok);
        let Some(item) = items.find(|item| item.name == key) else {
            let near = nearest(key, &Settings::names());
            let key = roundpipe_files::text::Line(key);
            return Err(Error::Usage(format!(
                "{place}: there is no setting `{key}`{near}; `roundpipe train --print-config` lists all"
            )));
        };
        item.value.set(&value).map_err(|why| {
            let is_objective = key == "method" && matches!(value.as_str(), Some("dpo" | "orpo"));
            let hint = if is_objective {
                "; write --method dpo, or objective=dpo"
            } else {
                ""
            };
            Error::Usage(format!("{place}: {key} {why}{hint}"))
        })?;
        let value = match item.name {
            "model" | "tokenizer" | "template" | "data" | "validation" => absolute(value),
            _ => value,
        };
        self.0.insert(item.name, (value, place));
        Ok(())
    }

    /// Sets a key by an option of the program, which must not say what an argument says otherwise.
    ///
    /// # Errors
    /// [`Error::Usage`] then, and as [`Given::put`].
    pub fn put_option(&mut self, key: &str, value: impl Into<Value>, option: &str) -> Result<()> {
        let value = value.into();
        if let Some((other, place)) = self.0.get(key)
            && *other != value
        {
            return Err(Error::Usage(format!(
                "{option}: `{place}` says something else; leave one of them out"
            )));
        }
        self.put(key, value, option.to_owned())
    }

    /// What `over` says wins.
    #[must_use]
    pub fn under(mut self, over: Self) -> Self {
        // One of them stands for the other too.
        for (key, other) in [("steps", "epochs"), ("epochs", "steps")] {
            if over.has(key) {
                self.0.remove(other);
            }
        }
        self.0.extend(over.0);
        self
    }

    /// Refuses settings that exclude each other.
    ///
    /// # Errors
    /// [`Error::Usage`] with the place of one of them.
    pub fn check(&self) -> Result<()> {
        let is_set = |value: &Value| value.as_str() != Some("auto");
        let set = |key| self.0.get(key).filter(|(value, _)| is_set(value));
        for key in ["steps", "epochs"] {
            if let Some((Value::Integer(0), place)) = set(key) {
                return Err(Error::Usage(format!("{place}: {key} must be at least 1")));
            }
        }
        match (set("steps"), set("epochs")) {
            (Some(_), Some((_, place))) => Err(Error::Usage(format!(
                "{place}: steps and epochs are both given; leave one of them out"
            ))),
            _ => Ok(()),
        }
    }

    /// The error with the file and line of the setting that it is about, where a file has it.
    pub(crate) fn placed(&self, error: Error) -> Error {
        let Error::Usage(line) = &error else {
            return error;
        };
        let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let name = line.split(|c| !is_word(c)).next().unwrap_or_default();
        match self.0.get(name) {
            Some((_, place)) if place.contains(": line ") => {
                Error::Usage(format!("{place}: {line}"))
            }
            _ => error,
        }
    }

    /// Whether a key was given.
    pub fn has(&self, key: &str) -> bool {
        self.0.contains_key(key)
    }

    /// Sets what was given.
    pub fn apply(&self, settings: &mut Settings) {
        for item in settings.list().into_iter().filter_map(Result::ok) {
            if let Some((value, _)) = self.0.get(item.name) {
                // It was checked when it was put in.
                let _ = item.value.set(value);
            }
        }
    }

    /// Sets what was given over the settings of a run that goes on.
    ///
    /// # Errors
    /// [`Error::Usage`] for a setting that would change what the run learns.
    pub fn apply_to_run(&self, settings: &mut Settings, folder: &Path) -> Result<()> {
        for item in settings.list().into_iter().filter_map(Result::ok) {
            let Some((value, place)) = self.0.get(item.name) else {
                continue;
            };
            let before = item.value.show();
            let _ = item.value.set(value);
            if item.later == Later::Fixed && item.value.show() != before {
                let name = item.name;
                let was = before.unwrap_or_else(|| "not set".into());
                return Err(Error::Usage(format!(
                    "{place}: the run in {} has {name} = {was}, and goes on with it; leave {name} out, \
                     or start another run with --out",
                    folder.display()
                )));
            }
        }
        Ok(())
    }
}

/// Paths that lead somewhere, as seen from everywhere: a run may go on from another folder.
fn absolute(value: Value) -> Value {
    match value {
        Value::Array(items) => Value::Array(items.into_iter().map(absolute).collect()),
        Value::String(text) => Value::String(absolute_path(text)),
        other => other,
    }
}

fn absolute_path(text: String) -> String {
    let whole = |path: &str| {
        let path = Path::new(path);
        let path = std::path::absolute(path).ok().filter(|_| path.exists())?;
        Some(path.to_str()?.to_owned())
    };
    if let Some(path) = whole(&text) {
        return path;
    }
    // With a weight.
    let weighted = text.rsplit_once('=');
    match weighted.and_then(|(path, weight)| Some((whole(path)?, weight))) {
        Some((path, weight)) => format!("{path}={weight}"),
        None => text,
    }
}

fn read(path: &Path) -> Result<String> {
    let limits = roundpipe_files::FileLimits {
        bytes: MOST_BYTES,
        json_values: 0,
    };
    let usage = |what: String| Error::Usage(what);
    let length = std::fs::metadata(path).map_or(0, |meta| meta.len());
    if length > MOST_BYTES {
        return Err(usage(format!(
            "{}: has {length} bytes, and no file of settings has more than {MOST_BYTES}; name another",
            path.display()
        )));
    }
    let bytes = roundpipe_files::small::read(path, limits).map_err(|e| usage(e.to_string()))?;
    String::from_utf8(bytes)
        .map_err(|_| usage(format!("{}: is no text; write UTF-8", path.display())))
}

fn syntax_error(path: &Path, text: &str, error: &toml::de::Error) -> Error {
    let at = error.span().map_or(0, |span| span.start);
    let line = text.as_bytes()[..at.min(text.len())]
        .iter()
        .filter(|byte| **byte == b'\n')
        .count();
    let what = roundpipe_files::text::Line(error.message()).to_string();
    Error::Usage(format!(
        "{}: line {}: {what}; write key = value, texts in quotes",
        path.display(),
        line + 1
    ))
}

/// The line that a key stands on, from 1.
fn line_of(text: &str, key: &str) -> usize {
    let has = |line: &str| {
        let line = line.trim_start().trim_start_matches(['[', '"', '\'']);
        line.strip_prefix(key)
            .is_some_and(|rest| !rest.starts_with(|c: char| c.is_alphanumeric() || c == '_'))
    };
    text.lines().position(has).map_or(1, |at| at + 1)
}

/// The name that was probably meant, in words.
fn nearest(key: &str, names: &[&str]) -> String {
    let key = key.replace('-', "_").to_ascii_lowercase();
    if key.len() > 64 {
        return String::new();
    }
    let is_alias = |alias: &&(&str, &str)| alias.0 == key;
    if let Some((_, name)) = ALIASES.iter().find(is_alias) {
        return format!("; do you mean `{name}`?");
    }
    let contains = |name: &str| key.len() >= 3 && (name.contains(&key) || key.contains(name));
    let score = |name: &str| {
        let far = distance(&key, name);
        if contains(name) { far.min(2) } else { far }
    };
    let best = names
        .iter()
        .min_by_key(|name| (score(name), distance(&key, name)));
    match best {
        Some(name) if score(name) <= 2.max(key.len() / 3) => format!("; do you mean `{name}`?"),
        _ => String::new(),
    }
}

/// Letters to insert, remove or replace.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, from) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, to) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(from != *to);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn given(arguments: &[&str]) -> Result<Given> {
        let mut given = Given::default();
        arguments
            .iter()
            .try_for_each(|text| given.argument(text))
            .map(|()| given)
    }

    #[test]
    fn what_is_written_reads_back() {
        let all = [
            "model=a/b",
            "data=[\"x\", \"y \\\"z\\n\"]",
            "validation=0.25",
            "method=lora",
            "epochs=2",
            "lr=1e-4",
            "gpu_memory=24GiB",
            "prompts=[\"hi\"]",
            "groups=[{match=\"*a\", lr_factor=0.5}, {match=\"b\", freeze=true}]",
            "dtype=f16",
            "min_lr=0",
        ];
        let mut settings = Settings::default();
        given(&all).unwrap().apply(&mut settings);
        assert_eq!(settings.lr, Some(1e-4));
        assert_eq!(settings.groups.len(), 2);
        let text = settings.to_toml();
        let path = std::env::temp_dir().join(format!("settings-{}.toml", std::process::id()));
        std::fs::write(&path, &text).unwrap();
        let mut again = Settings::default();
        Given::file(&path).unwrap().apply(&mut again);
        std::fs::remove_file(&path).unwrap();
        assert_eq!(again, settings);
        // Every setting stands in the file, set or not.
        for name in Settings::names() {
            assert!(text.contains(&format!("{name} =")), "{name}");
        }
    }

    #[test]
    fn wrong_settings_are_named_with_what_would_be_right() {
        for (argument, says) in [
            ("learning_rate=1", "there is no setting `learning_rate`"),
            ("epoch=1", "do you mean `epochs`?"),
            ("batch_size=1", "do you mean `batch`?"),
            ("warm-up=1", "do you mean `warmup`?"),
            ("rank=8", "do you mean `lora_rank`?"),
            ("lr=fast", "lr must be a number"),
            ("lr=nan", "lr must be a finite number"),
            ("steps=-1", "steps must be a whole number"),
            ("method=dpo", "method must be one of full, lora"),
            ("packing=1", "packing must be true or false"),
            ("gpu_memory=lots", "`lots` is no size"),
            ("validation=1.5", "validation must be a share"),
            ("groups=[{lr_factor=1}]", "a group has no `match`"),
            ("groups=[{match=\"a\", decay=1}]", "`decay`"),
            ("nothing", "is no key=value"),
        ] {
            let error = given(&[argument]).unwrap_err();
            assert_eq!(error.exit_code(), 2);
            assert!(error.to_string().contains(says), "{argument}: {error}");
        }
    }

    #[test]
    fn steps_and_epochs_exclude_each_other() {
        let file = given(&["epochs=2", "seed=3"]).unwrap();
        let all = file.under(given(&["steps=5"]).unwrap());
        all.check().unwrap();
        assert!(all.has("steps") && all.has("seed") && !all.has("epochs"));
        given(&["steps=auto", "epochs=2"]).unwrap().check().unwrap();
        for (wrong, says) in [
            (&["steps=5", "epochs=2"][..], "both given"),
            (&["epochs=0"], "at least 1"),
        ] {
            let line = given(wrong).unwrap().check().unwrap_err().to_string();
            assert!(line.contains(says), "{line}");
        }
    }

    #[test]
    fn late_refusals_name_the_line_of_a_file() {
        let mut given = Given::default();
        given.put("warmup", 9, "c.toml: line 4".into()).unwrap();
        given.put("lag", 2, "lag=2".into()).unwrap();
        let placed = |line: &str| given.placed(Error::Usage(line.into())).to_string();
        assert_eq!(
            placed("warmup 9 is long"),
            "c.toml: line 4: warmup 9 is long"
        );
        assert_eq!(placed("lag 2 is neither"), "lag 2 is neither");
        assert_eq!(placed("keep 0"), "keep 0");
    }

    #[test]
    fn a_run_that_goes_on_keeps_what_it_learns() {
        let mut run = Settings::default();
        let folder = Path::new("runs/a");
        given(&["devices=cpu:2", "save_every=5", "lr=auto"])
            .unwrap()
            .apply_to_run(&mut run, folder)
            .unwrap();
        assert_eq!(run.save_every, Some(5));
        let error = given(&["seed=3"]).unwrap().apply_to_run(&mut run, folder);
        let line = error.unwrap_err().to_string();
        assert!(
            line.contains("has seed = 0") && line.contains("--out"),
            "{line}"
        );
    }
}
