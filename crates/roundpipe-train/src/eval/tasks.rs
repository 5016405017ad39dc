//! Files of tasks: JSON lines, each a question with choices or with an answer.
//!
//! | keys | what |
//! |---|---|
//! | `question` or `prompt` (a text, or a list of messages), `choices` (texts), `answer` (a number from 0, a letter or the text) | the likeliest choice counts |
//! | `question`, `choices` with `text` and `label`, `answerKey` | the same, as ARC has it |
//! | `ctx`, `endings`, `label` | the same, as HellaSwag has it |
//! | `question` or `prompt`, `answer` (a text or several), `match` if wanted | the answer is written and compared |
//!
//! Of an answer with `####`, as GSM8K has it, what stands behind counts.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use roundpipe_files::text::{Line, shown};
use roundpipe_models::chat::Message;
use roundpipe_models::tokenizer::Tokenizer;
use serde::Deserialize;
use serde_json::{Map, Value as Json};

use crate::error::{Error, Result};

/// The longest line.
const MOST_LINE_BYTES: u64 = 4 << 20;
/// The most choices of a question.
const MOST_CHOICES: usize = 64;

/// How a written answer is compared with the right one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Compare {
    /// Equal, but for case, spaces and a full stop at the end.
    #[default]
    Exact,
    /// The right one stands somewhere in it.
    Contains,
    /// Its last number is the right one's.
    Number,
}

impl Compare {
    /// Whether a written answer is right.
    pub fn agrees(self, written: &str, right: &str) -> bool {
        match self {
            Self::Exact => plain(written) == plain(right),
            Self::Contains => !plain(right).is_empty() && plain(written).contains(&plain(right)),
            Self::Number => match (last_number(written), last_number(right)) {
                (Some(written), Some(right)) => written == right,
                _ => false,
            },
        }
    }
}

/// Lower case, single spaces, no full stop at the end.
fn plain(text: &str) -> String {
    let words: Vec<String> = text.split_whitespace().map(str::to_lowercase).collect();
    let text = words.join(" ");
    text.strip_suffix('.')
        .unwrap_or(&text)
        .trim_end()
        .to_owned()
}

/// The last number of a text: `1,234.50` is 1234.5.
fn last_number(text: &str) -> Option<f64> {
    let is_part = |c: char| c.is_ascii_digit() || c == '.' || c == ',';
    let mut found = None;
    let mut start = None;
    for (at, c) in text.char_indices().chain([(text.len(), ' ')]) {
        match (is_part(c), start) {
            (true, None) => start = Some(at),
            (false, Some(from)) => {
                let digits: String = text[from..at].replace(',', "");
                let digits = digits.trim_end_matches('.');
                let sign = if text[..from].ends_with('-') {
                    -1.0
                } else {
                    1.0
                };
                if let Ok(number) = digits.parse::<f64>() {
                    found = Some(sign * number);
                }
                start = None;
            }
            _ => {}
        }
    }
    found
}

/// What is asked.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Question {
    /// A question: in the chat template, else within `Question: … Answer:`.
    Asked(String),
    /// A prompt: in the chat template, else as it is.
    Prompt(String),
    /// A text that goes on, as it is.
    Begun(String),
    /// A conversation.
    Messages(Vec<Message>),
}

/// One row.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Task {
    Choice(Choice),
    Answer(Asked),
}

#[derive(Debug, Clone, PartialEq)]
pub(super) struct Choice {
    pub question: Question,
    pub choices: Vec<String>,
    pub right: usize,
}

#[derive(Debug, Clone, PartialEq)]
pub(super) struct Asked {
    pub question: Question,
    /// Any of them is right.
    pub answers: Vec<String>,
    pub compare: Option<Compare>,
}

/// The prompt as tokens: in the chat template where the model has one.
pub(super) fn prompt_ids(
    tokenizer: &Tokenizer,
    question: &Question,
    raw: bool,
) -> Result<Vec<u32>, String> {
    let text = match question {
        Question::Messages(messages) => {
            let ids = tokenizer.encode_chat(messages).map_err(|e| e.to_string())?;
            return ids.ok_or_else(|| {
                "is a list of messages, and the model has no chat template; write the prompt as a text"
                    .into()
            });
        }
        Question::Asked(text) | Question::Prompt(text) | Question::Begun(text) => text,
    };
    if !raw && !matches!(question, Question::Begun(_)) {
        let messages = [Message::new("user", text.as_str())];
        if let Some(ids) = tokenizer
            .encode_chat(&messages)
            .map_err(|e| e.to_string())?
        {
            return Ok(ids);
        }
    }
    let text = match question {
        Question::Asked(text) => format!("Question: {text}\nAnswer:"),
        _ => text.clone(),
    };
    tokenizer.encode(&text, true).map_err(|e| e.to_string())
}

/// Whether the first row of a file is a task rather than an example to train on.
pub fn is_task_file(path: &Path) -> bool {
    let Ok(mut file) = File::open(path).map(BufReader::new) else {
        return false;
    };
    let is_text = path
        .extension()
        .is_some_and(|end| end == "jsonl" || end == "json");
    if !is_text || !path.is_file() {
        return false;
    }
    let mut line = Vec::new();
    loop {
        line.clear();
        let read = file
            .by_ref()
            .take(MOST_LINE_BYTES)
            .read_until(b'\n', &mut line);
        match read {
            Ok(0) | Err(_) => return false,
            Ok(_) if line.trim_ascii().is_empty() => {}
            Ok(_) => break,
        }
    }
    let Ok(Json::Object(row)) = serde_json::from_slice(&line) else {
        return false;
    };
    let has = |key: &str| row.contains_key(key);
    let is_example = has("messages") && !has("choices") || has("completion") || has("output");
    !is_example && (has("choices") || has("endings") || has("answer") || has("answerKey"))
}

/// The rows of a file, one after another.
pub(super) struct TaskFile {
    path: PathBuf,
    file: BufReader<File>,
    line: u64,
    left: u64,
}

impl TaskFile {
    pub fn open(path: &Path, limit: Option<u64>) -> Result<Self> {
        let file = File::open(path).map_err(|e| Error::io("read", path, &e))?;
        Ok(Self {
            path: path.to_path_buf(),
            file: BufReader::new(file),
            line: 0,
            left: limit.unwrap_or(u64::MAX),
        })
    }

    fn refuse(&self, what: &str) -> Error {
        Error::Failed(format!(
            "{}:{}: {}",
            self.path.display(),
            self.line,
            Line(what)
        ))
    }
}

impl Iterator for TaskFile {
    type Item = Result<(u64, Task)>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.left == 0 {
            return None;
        }
        let mut line = Vec::new();
        loop {
            line.clear();
            self.line += 1;
            let read = self
                .file
                .by_ref()
                .take(MOST_LINE_BYTES)
                .read_until(b'\n', &mut line);
            match read {
                Ok(0) => return None,
                Ok(_) if line.trim_ascii().is_empty() => {}
                Ok(count) if count as u64 == MOST_LINE_BYTES && !line.ends_with(b"\n") => {
                    self.left = 0;
                    let what = "is longer than 4 MiB; a task is one short line";
                    return Some(Err(self.refuse(what)));
                }
                Ok(_) => break,
                Err(e) => {
                    self.left = 0;
                    return Some(Err(Error::io("read", &self.path, &e)));
                }
            }
        }
        self.left -= 1;
        Some(match read_task(&line) {
            Ok(task) => Ok((self.line, task)),
            Err(what) => {
                self.left = 0;
                Err(self.refuse(&what))
            }
        })
    }
}

fn read_task(line: &[u8]) -> Result<Task, String> {
    let row: Json = serde_json::from_slice(line)
        .map_err(|e| format!("is no JSON ({e}); write one object per line"))?;
    let Json::Object(row) = row else {
        return Err("is no object {…}; write one object per line".into());
    };
    let question = question(&row)?;
    let choices = row.get("choices").or_else(|| row.get("endings"));
    let Some(choices) = choices else {
        return answer(&row, question).map(Task::Answer);
    };
    let (texts, labels) = texts(choices)?;
    if texts.len() < 2 || texts.len() > MOST_CHOICES {
        return Err(format!(
            "has {} choices; a question has from 2 to {MOST_CHOICES}",
            texts.len()
        ));
    }
    if texts.iter().any(|text| text.trim().is_empty()) {
        return Err("has an empty choice; write something or remove it".into());
    }
    let keys = ["answer", "answerKey", "label"];
    let key = keys.into_iter().find(|key| row.contains_key(*key));
    let Some(key) = key else {
        return Err("has choices and no `answer`; name the right one".into());
    };
    let right = place(&row[key], &texts, &labels)
        .ok_or_else(|| format!("`{key}` {} is none of its choices", brief(&row[key])))?;
    Ok(Task::Choice(Choice {
        question,
        choices: texts,
        right,
    }))
}

fn question(row: &Map<String, Json>) -> Result<Question, String> {
    for key in ["question", "prompt", "ctx", "messages"] {
        match row.get(key) {
            None | Some(Json::Null) => {}
            Some(Json::String(text)) if text.trim().is_empty() => {
                return Err(format!("`{key}` is empty; ask something"));
            }
            Some(Json::String(text)) if key == "question" => {
                return Ok(Question::Asked(text.clone()));
            }
            Some(Json::String(text)) if key == "ctx" => {
                return Ok(Question::Begun(text.clone()));
            }
            Some(Json::String(text)) => return Ok(Question::Prompt(text.clone())),
            Some(Json::Array(messages)) => return conversation(key, messages),
            Some(other) => {
                return Err(format!(
                    "`{key}` {} is neither a text nor a list of messages",
                    brief(other)
                ));
            }
        }
    }
    let keys: Vec<String> = row.keys().take(8).map(|key| shown(key)).collect();
    Err(format!(
        "has the keys {}, and no `question` or `prompt`",
        keys.join(", ")
    ))
}

fn conversation(key: &str, messages: &[Json]) -> Result<Question, String> {
    let read = |message: &Json| {
        let text = |field: &str| message.get(field).and_then(Json::as_str);
        Some(Message::new(text("role")?, text("content")?))
    };
    let messages: Option<Vec<Message>> = messages.iter().map(read).collect();
    match messages {
        Some(messages) if !messages.is_empty() => Ok(Question::Messages(messages)),
        _ => Err(format!(
            "`{key}` is a list, and not of messages with `role` and `content`"
        )),
    }
}

/// Choices and, where they have names, those.
fn texts(choices: &Json) -> Result<(Vec<String>, Vec<String>), String> {
    let list = |value: &Json| -> Option<Vec<String>> {
        let items = value.as_array()?.iter();
        items.map(|item| item.as_str().map(str::to_owned)).collect()
    };
    let wrong = || "`choices` is no list of texts".to_owned();
    if choices.is_object() {
        let texts = choices.get("text").and_then(list).ok_or_else(wrong)?;
        let labels = choices.get("label").and_then(list).ok_or_else(wrong)?;
        if labels.len() != texts.len() {
            return Err("`choices` has not as many `label` as `text`".into());
        }
        return Ok((texts, labels));
    }
    Ok((list(choices).ok_or_else(wrong)?, Vec::new()))
}

/// Which choice is the right one.
fn place(answer: &Json, texts: &[String], labels: &[String]) -> Option<usize> {
    if let Some(number) = answer.as_u64() {
        return usize::try_from(number).ok().filter(|n| *n < texts.len());
    }
    let answer = answer.as_str()?.trim();
    let find = |among: &[String]| among.iter().position(|text| text.trim() == answer);
    find(labels).or_else(|| find(texts)).or_else(|| {
        let place = match answer.as_bytes() {
            [letter @ b'A'..=b'Z'] => usize::from(letter - b'A'),
            [letter @ b'a'..=b'z'] => usize::from(letter - b'a'),
            _ => answer.parse().ok()?,
        };
        Some(place).filter(|place| *place < texts.len())
    })
}

fn answer(row: &Map<String, Json>, question: Question) -> Result<Asked, String> {
    let Some(answer) = row.get("answer") else {
        return Err("has neither `choices` nor `answer`, so nothing says what is right".into());
    };
    let text = |value: &Json| match value {
        Json::String(text) => Some(text.clone()),
        Json::Number(number) => Some(number.to_string()),
        _ => None,
    };
    let answers: Option<Vec<String>> = match answer {
        Json::Array(answers) => answers.iter().map(text).collect(),
        other => text(other).map(|text| vec![text]),
    };
    let answers = answers.filter(|answers| !answers.is_empty());
    let Some(answers) = answers else {
        return Err(format!(
            "`answer` {} is neither a text nor a list of texts",
            brief(answer)
        ));
    };
    let last = |text: String| match text.rsplit_once("####") {
        Some((_, last)) => last.trim().to_owned(),
        None => text,
    };
    let answers: Vec<String> = answers.into_iter().map(last).collect();
    if answers.iter().any(|answer| answer.trim().is_empty()) {
        return Err(
            "has an empty `answer`; every text would have to be compared with nothing".into(),
        );
    }
    let compare =
        match row.get("match") {
            None | Some(Json::Null) => None,
            Some(value) => Some(serde_json::from_value(value.clone()).map_err(|_| {
                format!("`match` {} is not exact, contains or number", brief(value))
            })?),
        };
    Ok(Asked {
        question,
        answers,
        compare,
    })
}

/// The beginning of a value, for an error.
fn brief(value: &Json) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn task(line: &str) -> Result<Task, String> {
        read_task(line.as_bytes())
    }

    fn right(line: &str) -> usize {
        match task(line).unwrap() {
            Task::Choice(choice) => choice.right,
            Task::Answer(_) => panic!("no choice: {line}"),
        }
    }

    #[test]
    fn usual_forms_of_choices_are_read() {
        assert_eq!(
            right(r#"{"question": "q", "choices": ["x", "y"], "answer": 1}"#),
            1
        );
        assert_eq!(
            right(r#"{"question": "q", "choices": ["x", "y"], "answer": "B"}"#),
            1
        );
        assert_eq!(
            right(r#"{"question": "q", "choices": ["x", "y"], "answer": "x"}"#),
            0
        );
        let arc = r#"{"question": "q", "choices": {"text": ["x", "y", "z"], "label": ["1", "2", "3"]}, "answerKey": "3"}"#;
        assert_eq!(right(arc), 2);
        let swag = r#"{"ctx": "A man", "endings": ["x", "y"], "label": "1"}"#;
        assert_eq!(right(swag), 1);
    }

    #[test]
    fn what_is_wrong_with_a_row_is_said() {
        let cases = [
            ("{", "is no JSON"),
            ("[1]", "is no object"),
            (r#"{"a": 1}"#, "no `question` or `prompt`"),
            (r#"{"question": "q"}"#, "neither `choices` nor `answer`"),
            (r#"{"question": " ", "answer": "x"}"#, "`question` is empty"),
            (
                r#"{"question": 3, "answer": "x"}"#,
                "neither a text nor a list",
            ),
            (
                r#"{"question": [{"role": 1}], "answer": "x"}"#,
                "not of messages",
            ),
            (
                r#"{"question": "q", "choices": ["x"], "answer": 0}"#,
                "from 2 to",
            ),
            (
                r#"{"question": "q", "choices": "x", "answer": 0}"#,
                "no list of texts",
            ),
            (
                r#"{"question": "q", "choices": ["x", ""], "answer": 0}"#,
                "empty choice",
            ),
            (r#"{"question": "q", "choices": ["x", "y"]}"#, "no `answer`"),
            (
                r#"{"question": "q", "choices": ["x", "y"], "answer": 2}"#,
                "none of its choices",
            ),
            (
                r#"{"question": "q", "choices": ["x", "y"], "answer": "C"}"#,
                "none of its choices",
            ),
            (
                r#"{"question": "q", "answer": []}"#,
                "neither a text nor a list of texts",
            ),
            (
                r#"{"question": "q", "answer": "why ####"}"#,
                "empty `answer`",
            ),
            (
                r#"{"question": "q", "answer": "x", "match": "fuzzy"}"#,
                "not exact, contains or number",
            ),
        ];
        for (line, words) in cases {
            let error = task(line).unwrap_err();
            assert!(error.contains(words), "{line}: {error}");
        }
    }

    #[test]
    fn answers_are_compared_as_said() {
        assert!(Compare::Exact.agrees(" The  Harbour.\n", "the harbour"));
        assert!(!Compare::Exact.agrees("the harbour wall", "the harbour"));
        assert!(Compare::Contains.agrees("It is Paris, I think.", "paris"));
        assert!(!Compare::Contains.agrees("anything", "."));
        assert!(Compare::Number.agrees("so 3 + 4 = 1,207.0.", "1207"));
        assert!(Compare::Number.agrees("-5", "that is -5"));
        assert!(!Compare::Number.agrees("5", "-5"));
        assert!(!Compare::Number.agrees("none", "5"));
        let Ok(Task::Answer(asked)) = task(r#"{"question": "q", "answer": "2+2 #### 4"}"#) else {
            panic!("an answer");
        };
        assert_eq!(asked.answers, ["4"]);
    }
}
