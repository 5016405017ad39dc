//! Texts that the model writes during a run, so that a person sees what it learns.

use std::ops::ControlFlow;

use roundpipe::RoundPipe;
use roundpipe_models::chat::{Message, RenderOptions};
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
    let generator = Generator::on_ring(model, engine.ring(), pin(settings))?;
    let options = GenerateOptions {
        max_tokens: settings.sample_tokens,
        sampler: Sampler {
            temperature: settings.sample_temperature,
            seed: settings.seed,
            ..Sampler::default()
        },
        stop: tokenizer.eos().to_vec(),
    };
    let mut texts = Vec::new();
    for prompt in prompts {
        let ids = tokens(tokenizer, prompt, as_chat)?;
        let (answer, _) = generator.generate(&ids, &options, |_| ControlFlow::Continue(()))?;
        texts.push((prompt.clone(), tokenizer.decode(&answer, true)?));
    }
    Ok(texts)
}

/// How the run's host memory is pinned.
pub(crate) fn pin(settings: &Settings) -> roundpipe::Pin {
    use crate::settings::PinName;
    match settings.pin {
        PinName::Try => roundpipe::Pin::Try,
        PinName::Alloc => roundpipe::Pin::Alloc,
        PinName::Register => roundpipe::Pin::Register,
        PinName::Off => roundpipe::Pin::Off,
    }
}

/// The prompt as the model wants it: in its chat template where it is trained on conversations.
fn tokens(tokenizer: &Tokenizer, prompt: &str, as_chat: bool) -> Result<Vec<u32>> {
    let template = if as_chat {
        tokenizer.chat_template(false)?
    } else {
        None
    };
    let Some(template) = template else {
        return Ok(tokenizer.encode(prompt, true)?);
    };
    let options = RenderOptions {
        add_generation_prompt: true,
        ..RenderOptions::default()
    };
    let text = template
        .render(&[Message::new("user", prompt)], &options)
        .map_err(roundpipe_models::Error::from)?;
    Ok(tokenizer.encode(&text, false)?)
}
