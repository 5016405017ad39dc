//! Rows with two answers to one prompt, of which one is preferred: what DPO and ORPO learn from.
//!
//! | format | keys | becomes |
//! |---|---|---|
//! | preference | `prompt`, `chosen`, `rejected`: texts | two texts behind one prompt, without a chat template |
//! | | `prompt`, `chosen`, `rejected`: lists of messages | two conversations |
//! | | `instruction`, `input` (or `question`), `system`, `chosen`, `rejected` | two conversations |
//! | with the prompt inside | `chosen`, `rejected` alone, texts or conversations | what both begin with is the prompt |
//! | ShareGPT | `conversations`, `chosen`, `rejected` | two conversations |
//!
//! Only the answers are learned from. A row is refused where it is not clear which turns they are.
//!
//! # Invariants
//! - Both sides of a pair have the same prompt, and each has an answer.

use roundpipe_models::chat::mask::TrainOn;
use serde_json::{Map, Value as Json};

use crate::format::{
    self, Chat, Example, Format, Refusal, history, kind, list, optional_list, optional_text,
    read_messages, share_gpt_turn, speech, text, variables,
};

/// Two answers to one prompt.
#[derive(Debug, Clone, PartialEq)]
pub struct Pair {
    /// With the answer that is preferred.
    pub chosen: Example,
    /// With the other.
    pub rejected: Example,
}

/// The format of a row that has `chosen` and `rejected`.
pub(crate) fn detect(row: &Map<String, Json>) -> Format {
    let has = |key: &str| row.get(key).is_some_and(|value| !value.is_null());
    if has("conversations") {
        Format::ShareGptPreference
    } else if ["prompt", "instruction", "question"].into_iter().any(has) {
        Format::Preference
    } else {
        Format::ImplicitPreference
    }
}

/// Reads a row of one of the three formats.
pub(crate) fn read(format: Format, mut row: Map<String, Json>) -> Result<Example, Refusal> {
    let around = Around {
        tools: optional_list(&mut row, "tools")?,
        variables: variables(&mut row)?,
    };
    let chosen = answer(&mut row, "chosen")?;
    let rejected = answer(&mut row, "rejected")?;
    let pair = match format {
        Format::ShareGptPreference => {
            let prompt = share_gpt_prompt(&mut row)?;
            around.conversations(prompt, chosen.turns(), rejected.turns())
        }
        Format::ImplicitPreference => shared_prompt(chosen, rejected, around),
        _ => with_prompt(&mut row, chosen, rejected, around),
    }?;
    Ok(Example::Preference(Box::new(pair)))
}

/// What stands under `chosen` or `rejected`.
enum Answer {
    Text(String),
    /// Messages with `role` and `content`.
    Turns(Vec<Json>),
}

impl Answer {
    /// As messages: a text is what the assistant says.
    fn turns(self) -> Vec<Json> {
        match self {
            Self::Text(text) => vec![speech("assistant", Json::String(text))],
            Self::Turns(turns) => turns,
        }
    }
}

fn answer(row: &mut Map<String, Json>, key: &str) -> Result<Answer, Refusal> {
    match row.get(key) {
        // In CSV and some parquet files a list stands as JSON in a text.
        Some(Json::String(text)) if !text.trim_start().starts_with("[{") => {
            if text.is_empty() {
                return Err(format!("its `{key}` is empty; remove the row"));
            }
            Ok(Answer::Text(text.clone()))
        }
        Some(Json::Object(_)) => {
            let turn = row.remove(key).unwrap_or_default();
            Ok(Answer::Turns(turns(vec![turn], key)?))
        }
        Some(Json::Array(_) | Json::String(_)) | None => {
            Ok(Answer::Turns(turns(list(row, key)?, key)?))
        }
        Some(other) => Err(format!(
            "its `{key}` is {}; write a text or a list of messages",
            kind(other)
        )),
    }
}

/// Messages in either of the two ways to write them.
fn turns(items: Vec<Json>, key: &str) -> Result<Vec<Json>, Refusal> {
    let numbered = (1..).zip(items);
    numbered
        .map(|(number, item)| {
            share_gpt_turn(item).map_err(|why| format!("its `{key}`: message {number} {why}"))
        })
        .collect()
}

fn share_gpt_prompt(row: &mut Map<String, Json>) -> Result<Vec<Json>, Refusal> {
    let mut prompt = Vec::new();
    let system = optional_text(row, "system")?;
    if !system.is_empty() {
        prompt.push(speech("system", Json::String(system)));
    }
    prompt.extend(turns(list(row, "conversations")?, "conversations")?);
    Ok(prompt)
}

/// A prompt that stands under a key of its own.
fn with_prompt(
    row: &mut Map<String, Json>,
    chosen: Answer,
    rejected: Answer,
    around: Around,
) -> Result<Pair, Refusal> {
    if matches!(row.get("prompt"), None | Some(Json::Null)) {
        let prompt = instruction(row)?;
        return around.conversations(prompt, chosen.turns(), rejected.turns());
    }
    if matches!(row.get("prompt"), Some(Json::Array(_))) {
        let prompt = turns(list(row, "prompt")?, "prompt")?;
        let answer = |answer: Answer| {
            let turns = answer.turns();
            // Some files repeat the prompt in each conversation.
            let repeats = turns.len() > prompt.len() && turns.starts_with(&prompt);
            let from = if repeats { prompt.len() } else { 0 };
            turns[from..].to_vec()
        };
        let (chosen, rejected) = (answer(chosen), answer(rejected));
        return around.conversations(prompt, chosen, rejected);
    }
    let prompt = text(row, "prompt")?;
    match (chosen, rejected) {
        (Answer::Text(chosen), Answer::Text(rejected)) => Ok(texts(&prompt, chosen, rejected)),
        (chosen, rejected) => {
            let (chosen, rejected) = (chosen.turns(), rejected.turns());
            if chosen.first() == rejected.first() {
                // The whole conversation stands on both sides, and `prompt` repeats a part of it.
                return around.split(chosen, rejected);
            }
            let prompt = vec![speech("user", Json::String(prompt))];
            around.conversations(prompt, chosen, rejected)
        }
    }
}

/// The turns before the answers, from keys like Alpaca's.
fn instruction(row: &Map<String, Json>) -> Result<Vec<Json>, Refusal> {
    let key = if row.contains_key("instruction") {
        "instruction"
    } else {
        "question"
    };
    let asked = text(row, key)?;
    let input = optional_text(row, "input")?;
    let system = optional_text(row, "system")?;
    let mut turns = Vec::new();
    if !system.is_empty() {
        turns.push(speech("system", Json::String(system)));
    }
    for (user, assistant) in history(row)? {
        turns.push(speech("user", Json::String(user)));
        turns.push(speech("assistant", Json::String(assistant)));
    }
    turns.push(speech("user", Json::String(format::asked(asked, input))));
    Ok(turns)
}

/// A prompt that is what both sides begin with.
fn shared_prompt(chosen: Answer, rejected: Answer, around: Around) -> Result<Pair, Refusal> {
    match (chosen, rejected) {
        (Answer::Text(chosen), Answer::Text(rejected)) => {
            let mut end = common(&chosen, &rejected);
            // A space belongs to the word behind it, as tokens have it.
            if chosen[..end].ends_with(' ') {
                end -= 1;
            }
            let prompt = chosen[..end].to_owned();
            let (chosen, rejected) = (chosen[end..].to_owned(), rejected[end..].to_owned());
            Ok(texts(&prompt, chosen, rejected))
        }
        (Answer::Turns(chosen), Answer::Turns(rejected)) => around.split(chosen, rejected),
        _ => Err("has a text on one side and messages on the other; write both alike".into()),
    }
}

/// Bytes that two texts begin with alike, up to a character.
fn common(a: &str, b: &str) -> usize {
    let pairs = a.char_indices().zip(b.chars());
    let same = pairs.take_while(|((_, a), b)| a == b).last();
    same.map_or(0, |((at, last), _)| at + last.len_utf8())
}

fn texts(prompt: &str, chosen: String, rejected: String) -> Pair {
    let side = |completion: String| Example::Completion {
        prompt: prompt.to_owned(),
        completion,
    };
    Pair {
        chosen: side(chosen),
        rejected: side(rejected),
    }
}

/// What a chat template is given beside the messages.
struct Around {
    tools: Option<Vec<Json>>,
    variables: Map<String, Json>,
}

impl Around {
    /// Two conversations of which the turns that both begin with are the prompt.
    fn split(self, chosen: Vec<Json>, rejected: Vec<Json>) -> Result<Pair, Refusal> {
        let pairs = chosen.iter().zip(&rejected);
        let same = pairs.take_while(|(a, b)| a == b).count();
        // An answer is left on both sides, also where they are the same.
        let same = same.min(chosen.len().min(rejected.len()).saturating_sub(1));
        let prompt = chosen[..same].to_vec();
        let (chosen, rejected) = (chosen[same..].to_vec(), rejected[same..].to_vec());
        self.conversations(prompt, chosen, rejected)
    }

    fn conversations(
        self,
        prompt: Vec<Json>,
        chosen: Vec<Json>,
        rejected: Vec<Json>,
    ) -> Result<Pair, Refusal> {
        Ok(Pair {
            chosen: self.conversation(&prompt, chosen, "chosen")?,
            rejected: self.conversation(&prompt, rejected, "rejected")?,
        })
    }

    fn conversation(
        &self,
        prompt: &[Json],
        answer: Vec<Json>,
        key: &str,
    ) -> Result<Example, Refusal> {
        let is_assistant = |item: &&Json| item["role"] == "assistant";
        let asked = prompt.iter().filter(is_assistant).count();
        let answers = answer.iter().filter(is_assistant).count();
        if answers == 0 {
            return Err(format!(
                "its `{key}` has no turn of the assistant behind the prompt; add one"
            ));
        }
        if asked > 0 && answers > 1 {
            return Err(format!(
                "its `{key}` has more than one turn of the assistant behind a prompt that has some too; \
                 keep the first"
            ));
        }
        let mut turns = prompt.to_vec();
        turns.extend(answer);
        Ok(Example::Chat(Chat {
            messages: read_messages(turns)?,
            tools: self.tools.clone(),
            variables: self.variables.clone(),
            train_on: if asked > 0 {
                TrainOn::Last
            } else {
                TrainOn::All
            },
        }))
    }
}
