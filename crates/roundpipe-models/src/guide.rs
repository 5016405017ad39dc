//! The chapters of the user's guide (`docs/src`), so that rustdoc runs their programs as tests.
//!
//! A chapter is a constant of its own: a failing program is named after it. `tests/guide.rs` checks
//! that no chapter is missing here.

macro_rules! chapters {
    ($($name:ident: $file:literal,)*) => {
        $(
            #[doc = include_str!(concat!("../../../docs/src/", $file))]
            pub const $name: () = ();
        )*
    };
}

chapters! {
    INTRODUCTION: "introduction.md",
    FIRST_MODEL: "first-model.md",
    LAYERS: "layers.md",
    LOSSES: "losses.md",
    DATA: "data.md",
    OPTIMIZERS: "optimizers.md",
    SAVING: "saving.md",
    MULTI_GPU: "multi-gpu.md",
    MEMORY: "memory.md",
    WRAPPING: "wrapping.md",
    CHAINING: "chaining.md",
    LANGUAGE_MODELS: "language-models.md",
    LORA: "lora.md",
    OFFLINE: "offline.md",
    PROFILING: "profiling.md",
    PROGRAM: "program.md",
    ENVIRONMENT: "environment.md",
    TROUBLESHOOTING: "troubleshooting.md",
    COMING_FROM_ROUNDPIPE: "coming-from-roundpipe.md",
}
