//! A tokenizer for models that start from nothing: every byte is a token, and one more ends a text.
//!
//! It is written as the files that any tokenizer has, so the finished model opens everywhere.

use std::path::Path;

use serde_json::{Map, Value, json};

use crate::error::{Error, Result};

/// Ends a text.
const END: &str = "<|end|>";

/// Writes the files into a folder, which is made.
pub(crate) fn write(folder: &Path) -> Result<()> {
    let failed = |e: std::io::Error| Error::io("write", folder, &e);
    std::fs::create_dir_all(folder).map_err(failed)?;
    let file = |name: &str, value: &Value| {
        std::fs::write(folder.join(name), format!("{value:#}\n")).map_err(failed)
    };
    file("tokenizer.json", &tokenizer())?;
    let config = json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": END,
        "clean_up_tokenization_spaces": false,
    });
    file("tokenizer_config.json", &config)
}

fn tokenizer() -> Value {
    let vocab: Map<String, Value> = (0u8..=255)
        .map(|byte| (letter(byte).to_string(), json!(byte)))
        .collect();
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [{
            "id": 256, "content": END, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true
        }],
        "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false},
        "post_processor": null,
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false},
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": []
        }
    })
}

/// The letter that stands for a byte in byte-level vocabularies: itself where it can be seen, else
/// one from 256 on.
fn letter(byte: u8) -> char {
    let is_seen = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    if is_seen(byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|other| !is_seen(*other)).count();
    char::from_u32(256 + before as u32).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use roundpipe_models::tokenizer::Tokenizer;

    #[test]
    fn every_byte_is_a_token() {
        let folder = std::env::temp_dir().join(format!("bytes-{}", std::process::id()));
        super::write(&folder).unwrap();
        let tokenizer = Tokenizer::open(&folder).unwrap();
        std::fs::remove_dir_all(&folder).unwrap();
        let text = "The cat\n\tsat é \u{1f600}\u{0}\u{ad}\u{7f}!";
        let ids = tokenizer.encode(text, true).unwrap();
        let bytes: Vec<u32> = text.bytes().map(u32::from).collect();
        assert_eq!(ids, bytes);
        assert_eq!(tokenizer.decode(&ids, true).unwrap(), text);
        assert_eq!(tokenizer.eos(), [256]);
        assert_eq!(tokenizer.vocab_size(), 257);
    }
}
