//! Texts that the model writes during a run, so that a person sees what it learns.

use std::ops::ControlFlow;

use roundpipe::RoundPipe;
use roundpipe_models::chat::Message;
use roundpipe_models::tokenizer::Tokenizer;
use roundpipe_models::{GenerateOptions, Generator, Model, Sampler};

use crate::error::Result;
use crate::settings::Settings;

/// One answer to each prompt. The engine that trains shares its workers and goes on afterwards as
/// if nothing had been.
pub(crate) fn write(
    model: &Model,
    tokenizer: &Tokenizer,
    engine: &RoundPipe,
    settings: &Settings,
    as_chat: bool,
) -> Result<Vec<(String, String)>> {
    let prompts = settings.prompts.as_deref().unwrap_or_default();
    if prompts.is_empty() {
        return Ok(Vec::new());
    }
    let generator = Generator::on_ring(model, engine.ring(), settings.pin.into())?;
    let options = GenerateOptions {
        max_tokens: settings.sample_tokens,
        sampler: Sampler {
            temperature: settings.sample_temperature,
            seed: settings.seed,
            ..Sampler::default()
        },
        stop: tokenizer.eos().to_vec(),
    };
    let ids = prompts
        .iter()
        .map(|prompt| tokens(tokenizer, prompt, as_chat))
        .collect::<Result<Vec<_>>>()?;
    let go = |_, _| ControlFlow::Continue(());
    let answers = generator.generate_batch(&ids, &options, go)?;
    let text = |(prompt, (answer, _)): (&String, &(Vec<u32>, _))| {
        Ok((prompt.clone(), tokenizer.decode(answer, true)?))
    };
    prompts.iter().zip(&answers).map(text).collect()
}

/// The prompt as the model wants it: in its chat template where it is trained on conversations.
fn tokens(tokenizer: &Tokenizer, prompt: &str, as_chat: bool) -> Result<Vec<u32>> {
    let chat = if as_chat {
        tokenizer.encode_chat(&[Message::new("user", prompt)])?
    } else {
        None
    };
    Ok(match chat {
        Some(ids) => ids,
        None => tokenizer.encode(prompt, true)?,
    })
}
