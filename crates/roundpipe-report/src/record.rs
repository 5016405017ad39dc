//! What happens in a run, as values: each is one line of `metrics.jsonl`.
//!
//! JSON has no NaN and no infinity: a number that is not finite is written as `null` and read back
//! as NaN. What may be absent is left out of the line, so that `null` never means absent. Fields that
//! a file does not know are ignored; lists, options and flags that it lacks are empty.

use serde::{Deserialize, Deserializer, Serialize};

/// Bytes of one text in a record; a longer one is cut when it is kept or written.
pub(crate) const TEXT_BYTES: usize = 1 << 18;

/// Something that happened in a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Record {
    /// The run began, or goes on from a checkpoint.
    Start(Start),
    /// The weights made a step.
    Step(Step),
    /// The loss of data that is not trained on.
    Eval(Eval),
    /// Text that the model wrote.
    Sample(Sample),
    /// A checkpoint was written.
    Save(Save),
    /// Something worth a line.
    Note(Note),
    /// The run is over.
    End(End),
}

/// The names of [`Record`]'s variants in a file.
pub(crate) const KINDS: [&str; 7] = ["start", "step", "eval", "sample", "save", "note", "end"];

impl Record {
    /// The step it belongs to; nothing for the start of a new run.
    pub fn step(&self) -> Option<u64> {
        match self {
            Self::Start(start) => start.resumed_at,
            Self::Step(step) => Some(step.step),
            Self::Eval(eval) => Some(eval.step),
            Self::Sample(sample) => Some(sample.step),
            Self::Save(save) => Some(save.step),
            Self::Note(note) => Some(note.step),
            Self::End(end) => Some(end.step),
        }
    }

    /// Whether a run that resumes from the checkpoint of `step` has made it already. The end is over
    /// again, and an earlier resume from the same checkpoint never happened.
    pub(crate) fn precedes(&self, step: u64) -> bool {
        match self {
            Self::Start(start) => start.resumed_at.is_none_or(|at| at < step),
            Self::End(_) => false,
            other => other.step().is_none_or(|at| at <= step),
        }
    }

    /// Cuts its texts to [`TEXT_BYTES`].
    pub(crate) fn cut_texts(&mut self) {
        let texts: Vec<&mut String> = match self {
            Self::Start(start) => vec![
                &mut start.name,
                &mut start.model,
                &mut start.method,
                &mut start.data,
                &mut start.plan,
                &mut start.settings,
            ],
            Self::Step(_) | Self::Eval(_) => vec![],
            Self::Sample(sample) => vec![&mut sample.prompt, &mut sample.text],
            Self::Save(save) => vec![&mut save.path],
            Self::Note(note) => vec![&mut note.text],
            Self::End(end) => vec![&mut end.reason, &mut end.result, &mut end.command],
        };
        for text in texts {
            cut(text, TEXT_BYTES);
        }
    }
}

/// Shortens a text to about so many bytes, with a sign that there was more.
pub(crate) fn cut(text: &mut String, bytes: usize) {
    if text.len() > bytes {
        text.truncate(text.floor_char_boundary(bytes));
        text.push_str(" […]");
    }
}

/// The run began, or goes on from a checkpoint.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Start {
    /// The run's name.
    #[serde(default)]
    pub name: String,
    /// The model, as a person calls it.
    pub model: String,
    /// What is trained: `full`, `lora`, or with the objective before it, `dpo, lora`.
    pub method: String,
    /// Parameters of the model.
    pub parameters: u64,
    /// Those of them, or of the adapter, that are trained.
    pub trained_parameters: u64,
    /// Steps of the whole run, those before a resume included.
    pub steps: u64,
    /// Names of the devices, in the order of their numbers.
    #[serde(default)]
    pub devices: Vec<String>,
    /// When, in seconds since 1970.
    #[serde(with = "number")]
    pub time: f64,
    /// The data, in one line.
    #[serde(default)]
    pub data: String,
    /// The plan, as text of several lines.
    #[serde(default)]
    pub plan: String,
    /// The settings, as TOML.
    #[serde(default)]
    pub settings: String,
    /// What memory is used for.
    #[serde(default)]
    pub memory: Vec<Memory>,
    /// What the hardware could do at most.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "optional")]
    pub limit_tokens_per_s: Option<f64>,
    /// The step of the checkpoint that the run goes on from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resumed_at: Option<u64>,
}

/// A use of memory.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Memory {
    /// Where: on each GPU, or on the host.
    pub place: Place,
    /// What for.
    pub name: String,
    /// How much.
    pub bytes: u64,
}

/// Where memory is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Place {
    /// On each GPU.
    #[default]
    Gpu,
    /// On the host.
    Host,
}

/// The weights made a step.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Step {
    /// Its number, from 1.
    pub step: u64,
    /// Passes over the data so far.
    #[serde(with = "number")]
    pub epoch: f64,
    /// The mean loss per token.
    #[serde(with = "number")]
    pub loss: f64,
    /// The learning rate.
    #[serde(with = "number")]
    pub lr: f64,
    /// The norm of all gradients, before clipping.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "optional")]
    pub grad_norm: Option<f64>,
    /// Tokens of this step.
    pub tokens: u64,
    /// Tokens of the run so far.
    pub tokens_trained: u64,
    /// How fast it was.
    #[serde(with = "number")]
    pub tokens_per_s: f64,
    /// That as a share of what the hardware could do, 0 to 1.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "optional")]
    pub limit_share: Option<f64>,
    /// The high water of each device.
    #[serde(default)]
    pub gpu_bytes: Vec<u64>,
    /// Host memory in use.
    #[serde(default)]
    pub host_bytes: u64,
    /// Since the run began, in seconds, the parts before a resume included.
    #[serde(with = "number")]
    pub elapsed_s: f64,
    /// Whether the update was skipped because a gradient was not finite.
    #[serde(default)]
    pub skipped: bool,
    /// By how much the chosen answers' reward is larger, in the mean: of preference tuning.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "optional")]
    pub reward_margin: Option<f64>,
    /// The share of pairs whose chosen answer has the larger reward, 0 to 1.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "optional")]
    pub reward_accuracy: Option<f64>,
}

/// The loss of data that is not trained on.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Eval {
    /// Behind which step.
    pub step: u64,
    /// The mean loss per token.
    #[serde(with = "number")]
    pub loss: f64,
    /// e to the loss; not a number for a loss over pairs.
    #[serde(with = "number")]
    pub perplexity: f64,
    /// Tokens that were evaluated.
    #[serde(default)]
    pub tokens: u64,
    /// Whether it is the lowest loss so far.
    #[serde(default)]
    pub best: bool,
    /// By how much the chosen answers' reward is larger, in the mean: of preference tuning.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "optional")]
    pub reward_margin: Option<f64>,
    /// The share of pairs whose chosen answer has the larger reward, 0 to 1.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "optional")]
    pub reward_accuracy: Option<f64>,
}

/// Text that the model wrote.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sample {
    /// Behind which step; 0 is before training.
    pub step: u64,
    /// What it was asked.
    pub prompt: String,
    /// What it wrote.
    pub text: String,
}

/// A checkpoint was written.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Save {
    /// Of which step.
    pub step: u64,
    /// Its size.
    pub bytes: u64,
    /// How long it took.
    #[serde(with = "number")]
    pub seconds: f64,
    /// Where it is.
    pub path: String,
}

/// Something worth a line.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Note {
    /// Behind which step.
    pub step: u64,
    /// The line.
    pub text: String,
}

/// The run is over.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct End {
    /// The last step that was made.
    pub step: u64,
    /// Why: all steps were made, the user stopped it, an error.
    pub reason: String,
    /// Since the run began, in seconds.
    #[serde(with = "number")]
    pub elapsed_s: f64,
    /// Where the result is.
    #[serde(default)]
    pub result: String,
    /// What to run next.
    #[serde(default)]
    pub command: String,
}

macro_rules! records {
    ($($kind:ident),*) => {
        $(impl From<$kind> for Record {
            fn from(record: $kind) -> Self {
                Self::$kind(record)
            }
        })*
    };
}
records!(Start, Step, Eval, Sample, Save, Note, End);

/// A number that may not be finite.
mod number {
    use super::*;
    use serde::Serializer;

    pub(super) fn serialize<S: Serializer>(number: &f64, to: S) -> Result<S::Ok, S::Error> {
        number.is_finite().then_some(number).serialize(to)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
        Ok(Option::deserialize(from)?.unwrap_or(f64::NAN))
    }
}

/// The same where there may be none; then the field is left out.
mod optional {
    use super::*;
    use serde::Serializer;

    pub(super) fn serialize<S: Serializer>(number: &Option<f64>, to: S) -> Result<S::Ok, S::Error> {
        number.filter(|number| number.is_finite()).serialize(to)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<f64>, D::Error> {
        number::deserialize(from).map(Some)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(record: impl Into<Record>) -> String {
        serde_json::to_string(&record.into()).expect("a record is JSON")
    }

    fn parsed(line: &str) -> Record {
        serde_json::from_str(line).expect("a record")
    }

    /// One of each kind, with nothing left at its default.
    fn all() -> Vec<Record> {
        let memory = |place, name: &str, bytes| Memory {
            place,
            name: name.to_owned(),
            bytes,
        };
        vec![
            Start {
                name: "first".into(),
                model: "Qwen3 \"1.7B\"\n".into(),
                method: "lora".into(),
                parameters: u64::MAX,
                trained_parameters: 7,
                steps: 100,
                devices: vec!["cuda:0".into(), "cuda:1".into()],
                time: 1.75e9,
                data: "a.jsonl, 10 rows".into(),
                plan: "stage 0\nstage 1".into(),
                settings: "lr = 1e-4".into(),
                memory: vec![
                    memory(Place::Gpu, "weights", 3),
                    memory(Place::Host, "moments", 4),
                ],
                limit_tokens_per_s: Some(1234.5),
                resumed_at: Some(50),
            }
            .into(),
            Step {
                step: 51,
                epoch: 0.5,
                loss: 0.1 + 0.2,
                lr: 1e-300,
                grad_norm: Some(1.0 / 3.0),
                tokens: 4096,
                tokens_trained: 1 << 60,
                tokens_per_s: 99.5,
                limit_share: Some(0.61),
                gpu_bytes: vec![1, 2],
                host_bytes: 5,
                elapsed_s: 6.5,
                skipped: true,
                reward_margin: Some(0.25),
                reward_accuracy: Some(0.75),
            }
            .into(),
            Eval {
                step: 51,
                loss: 2.0,
                perplexity: 7.4,
                tokens: 10,
                best: true,
                reward_margin: Some(-0.5),
                reward_accuracy: Some(0.5),
            }
            .into(),
            Sample {
                step: 51,
                prompt: "</script>".into(),
                text: "\u{1f680}\u{0}".into(),
            }
            .into(),
            Save {
                step: 51,
                bytes: 9,
                seconds: 0.25,
                path: "out/step-51".into(),
            }
            .into(),
            Note {
                step: 51,
                text: "ok".into(),
            }
            .into(),
            End {
                step: 52,
                reason: "done".into(),
                elapsed_s: 7.0,
                result: "out".into(),
                command: "roundpipe chat out".into(),
            }
            .into(),
        ]
    }

    /// A number that was written is read as it was, to the last bit: a run that goes on from a
    /// checkpoint compares with losses of before.
    #[test]
    fn numbers_come_back_bit_for_bit() {
        let losses = [
            10.692427635192871,
            0.1 + 0.2,
            5e-324,
            1.7976931348623157e308,
            2.0 / 3.0,
        ];
        for loss in losses {
            let eval = Eval {
                step: 1,
                loss,
                perplexity: loss.sqrt(),
                ..Eval::default()
            };
            let Record::Eval(read) = parsed(&line(eval)) else {
                panic!("another kind");
            };
            assert_eq!(read.loss.to_bits(), loss.to_bits());
            assert_eq!(read.perplexity.to_bits(), loss.sqrt().to_bits());
        }
    }

    /// What is written is read back to the bit, under the names that tools rely on.
    #[test]
    fn records_are_read_back() {
        for (record, kind) in all().into_iter().zip(KINDS) {
            let line = serde_json::to_string(&record).expect("a record is JSON");
            assert!(
                line.starts_with(&format!("{{\"type\":\"{kind}\",")),
                "{line}"
            );
            assert!(!line.contains('\n'), "{line}");
            assert_eq!(parsed(&line), record, "{line}");
        }
    }

    /// NaN and infinities are `null`, and NaN again; absent stays absent.
    #[test]
    fn numbers_that_are_not_finite_are_null() {
        for odd in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            let line = line(Step {
                loss: odd,
                grad_norm: Some(odd),
                ..Step::default()
            });
            assert!(line.contains("\"loss\":null"), "{line}");
            assert!(line.contains("\"grad_norm\":null"), "{line}");
            assert!(!line.contains("limit_share"), "{line}");
            let Record::Step(step) = parsed(&line) else {
                panic!("{line}")
            };
            assert!(step.loss.is_nan() && step.grad_norm.expect("present").is_nan());
            assert_eq!(step.limit_share, None);
        }
    }

    /// Fields that came or went between versions do not make a file unreadable.
    #[test]
    fn fields_may_come_and_go() {
        let line = r#"{"type":"eval","step":3,"loss":1.5,"perplexity":4.5,"later":{"a":[1]}}"#;
        let wanted = Eval {
            step: 3,
            loss: 1.5,
            perplexity: 4.5,
            ..Eval::default()
        };
        assert_eq!(parsed(line), wanted.into());
        let error = serde_json::from_str::<Record>(r#"{"type":"eval","loss":1}"#)
            .expect_err("no step")
            .to_string();
        assert!(error.contains("step"), "{error}");
    }

    /// A resume keeps what its checkpoint knew, and nothing else.
    #[test]
    fn records_before_a_checkpoint_are_kept() {
        let note = |step| {
            Record::from(Note {
                step,
                text: String::new(),
            })
        };
        let start = |resumed_at| {
            Record::from(Start {
                resumed_at,
                ..Start::default()
            })
        };
        let cases = [
            (note(9), true),
            (note(10), true),
            (note(11), false),
            (start(None), true),
            (start(Some(9)), true),
            (start(Some(10)), false),
            (
                End {
                    step: 3,
                    ..End::default()
                }
                .into(),
                false,
            ),
        ];
        for (record, kept) in cases {
            assert_eq!(record.precedes(10), kept, "{record:?}");
        }
    }

    /// Texts are cut between letters, and say so.
    #[test]
    fn long_texts_are_cut() {
        let mut record = Record::from(Sample {
            text: "\u{e9}".repeat(TEXT_BYTES),
            ..Sample::default()
        });
        record.cut_texts();
        let Record::Sample(sample) = record else {
            panic!("{record:?}")
        };
        assert_eq!(sample.text, "\u{e9}".repeat(TEXT_BYTES / 2) + " […]");
    }
}
