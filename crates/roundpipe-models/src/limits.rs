//! How much is read of the small files in a model's folder and in the cache.

use roundpipe_files::FileLimits;
use roundpipe_files::weights::HEADER_CAP;

/// Settings and chat templates: `config.json` and the like.
pub(crate) const SETTINGS: FileLimits = FileLimits {
    bytes: 16 << 20,
    json_values: 1 << 20,
};

/// `tokenizer.json` and other vocabularies; the largest known have 34 MB and 2 million values.
pub(crate) const VOCABULARY: FileLimits = FileLimits {
    bytes: 128 << 20,
    json_values: 8 << 20,
};

/// An index of shards; as long as a header may be, since it names the same tensors.
pub(crate) const INDEX: FileLimits = FileLimits {
    bytes: HEADER_CAP as u64,
    json_values: 1 << 20,
};

/// A commit or a token, alone in its file.
pub(crate) const WORD: FileLimits = FileLimits {
    bytes: 4 << 10,
    json_values: 0,
};
