//! Conversations as the tokens that a model learns from.
//!
//! The templates themselves are parsed and rendered by `roundpipe-chat`, which knows text only. A
//! [`Tokenizer`](crate::tokenizer::Tokenizer) finds the one of its folder; [`mask`] says which
//! tokens of a rendered conversation are the assistant's.

pub mod mask;

pub use roundpipe_chat::{
    ChatTemplate, Limits, Message, PARSE_BYTES, ROOM_BYTES, ROOM_PER_BYTE, RenderOptions, Rendered,
    STACK_BYTES, STEPS, STEPS_PER_BYTE, Usage,
};
