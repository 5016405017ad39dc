//! Decoder-only transformers of all supported families as a [`Sequential`]: embedding, one layer
//! per block, head with loss.
//!
//! What a caller gives is documented at [`Model`]; the first layer checks it and brings it into the
//! names of the map that flows between layers:
//!
//! - `ids` [B, S] at first, then `hidden` [B, S, H].
//! - `labels`, `weight`, `positions`, `lens`, `documents`, `cache`, `keep`, `return_logits` and
//!   `return_scores`, as given. Labels stand where they are predicted, whichever convention the caller
//!   uses.
//! - `past.{i}.k` and `past.{i}.v` [B, T, kv heads, D]: what block i saw, before it and after it.
//! - `pad.place`, `pad.real`: where the tokens of a padded batch are, which flows as one packed row.
//! - `aux.counts`, `aux.shares` \[experts\] (f32): sums over blocks for the load-balancing loss,
//!   which the head adds to a training loss.
//!
//! Parameters have transformers' names, except that the last norm is `lm_head.norm`;
//! [`Model::entries`] has the names of folders.

mod block;
mod ends;
mod experts;
mod inputs;
mod names;
mod padding;
mod projection;
mod weight;

use std::collections::BTreeMap;

use roundpipe::nn::Init;
use roundpipe::wrap::{Run, Value, Values};
use roundpipe::{
    Composite, Cx, DType, Node, Param, ParamVisitor, Params, Quantization, Result as EngineResult,
    Sequential, Tensor, TensorError, TensorResult, Tree,
};

use crate::config::ModelConfig;
use crate::entry::{Entry, Piece};
use crate::error::{Error, Result};
use crate::folder::QuantizedEntry;
use crate::memory::host_memory;
use crate::rope::RopeTables;
pub(crate) use block::{Block, DOWN, GATE_UP, Unit, is_router, own_form};
use ends::{Embed, Head};
pub(crate) use experts::Experts;
pub(crate) use projection::{Adapter, Projection};
pub(crate) use weight::{Form, QuantizedWeight, Weight};

/// A model and its layers.
///
/// # Inputs
/// Layers take named inputs: `Inputs::new().named("ids", ids)`. There are our own names and Hugging
/// Face's; the name of the ids decides what the others mean. Other names, and names of both in one
/// call, are refused. B rows of S tokens:
///
/// | ours | Hugging Face's | what |
/// |---|---|---|
/// | `ids` | `input_ids` | tokens [B, S] |
/// | `labels` | | [B, S], the token that should come *next* at each position, -100 for none |
/// | | `labels` | [B, S], the token *at* each position, -100 for none: the model shifts them |
/// | `positions` | `position_ids` | [B, S], or one row for all; 0, 1, 2, … unless given |
/// | | `attention_mask` | [B, S] of any type, 0 for padding |
/// | `lens` | | [n + 1] (i32), cumulative lengths of n sequences packed into one row |
/// | `documents` | | as `ids`, beside `labels` and `lens`: the number of each token's sequence, 0 to n - 1 |
///
/// | beside either | what |
/// |---|---|
/// | `weight` | a number (f32): the loss is the sum over labels divided by it, not their mean |
/// | `return_logits` | `Tree::Bool(true)`: with labels, logits beside the loss |
/// | `return_scores` | `Tree::Bool(true)`: with labels, figures of every token instead of the loss |
/// | `keep` | `Tree::Int(n)`: logits of the last n positions only |
/// | `cache` | any value: give the keys and values that blocks saw |
/// | `past` | what the call before gave with `cache`: tokens come behind those |
/// | `cache.{i}.k`, `cache.{i}.v` | caches of block i ([`Cx::cache`]), [B, places, kv heads, D], which are written in place |
/// | `cache.at` | places that each row of the caches has filled, i32 [B] |
/// | `cache.filled` | `Tree::Int(n)`: all rows have filled n; needed for several new tokens per row |
///
/// Microbatches of unequally many labels add up to the mean over a batch with `weight`, the number
/// of its labels (Hugging Face's without the first column, which no token predicts), and
/// [`LossReduction::Sum`](roundpipe::LossReduction). Without it, the mean of each goes with
/// `LossReduction::Mean`, which counts rows.
///
/// # Padding
/// With `attention_mask`, padding may stand left, right or between: a real token sees the real tokens
/// of its row and no others, and its logits are those of the row without padding. Logits of padding
/// mean nothing. The rest is as in transformers: positions count columns unless given, padding does
/// not count in the balance of experts, and only labels of -100 keep it out of the loss. Padding on
/// the left also predicts the first real token, so that label is -100 too. Windows count real tokens,
/// as in transformers' flash attention. A batch padded on the right alone needs no mask, since no
/// token looks ahead; without one, GPUs can use their fastest attention. A mask and `cache` do not go
/// together.
///
/// # Outputs
/// - Without labels: logits [B, S, vocabulary].
/// - With labels: the loss. In training it includes the balance of experts, times its coefficient.
/// - With labels and `return_logits`: a map of `loss`, `logits` and, where experts are balanced,
///   `aux_loss`, the balance before its coefficient. Tell a training call which of them is the
///   loss: `.loss(|_, mut outputs, _| outputs.take("loss")?.tensor())`. Merged over microbatches,
///   the two losses of the map are means.
/// - With labels and `return_scores`: a map of `losses` [B, S] (f32; 0 where the label is -100) and
///   `hits` [B, S]: whether the label is the likeliest token.
/// - With labels and `documents`: a map of `log_probs` [n] (f32), for each sequence the sum over its
///   labels of their log-probabilities, and in training of models whose experts are balanced
///   `balance`, times its coefficient.
/// - With `cache`: a map of `logits` and `past.{i}.k`, `past.{i}.v` [B, T, kv heads, D].
///
/// # Wrapping
/// [`roundpipe::wrap()`] takes a model as it is and finds its preset, one engine over all layers:
///
/// ```
/// use roundpipe::{DType, WrapConfig, Wrapped, wrap};
/// use roundpipe_models::{Model, ModelConfig};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let config = r#"{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64,
///     "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
///     "num_key_value_heads": 1, "max_position_embeddings": 32, "rms_norm_eps": 1e-5,
///     "tie_word_embeddings": true}"#;
/// let model = Model::random(ModelConfig::from_bytes(config.as_bytes(), "config.json")?, DType::F32, 7)?;
/// let Wrapped::Engine(engine) = wrap(model, &WrapConfig::default())? else { unreachable!() };
/// assert!(engine.take_warnings()[0].starts_with("wrap: a preset for llama was found;"));
/// let model: &Model = engine.downcast_ref().expect("the model that was wrapped");
/// assert_eq!(model.config.vocab, 64);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Model {
    /// Sizes and options.
    pub config: ModelConfig,
    /// Embedding, blocks, head: what an engine runs.
    pub layers: Sequential,
    pub(crate) lora: Option<crate::lora::LoraConfig>,
    embed: Embed,
    pub(crate) blocks: Vec<Block>,
    head: Head,
}

impl Model {
    /// Random weights: normal with deviation 0.02, projections back into the stream scaled down by
    /// the number of blocks; biases 0, norms 1. The same seed gives the same weights on any
    /// machine.
    ///
    /// # Errors
    /// When this machine has less memory than the config asks for.
    pub fn random(config: ModelConfig, dtype: DType, seed: u64) -> Result<Self> {
        config
            .fits(dtype, host_memory())
            .map_err(|what| Error::argument("config", what))?;
        Self::random_of(config, dtype, seed, (Contents::Random, None))
    }

    /// [`Model::random`] with the linear maps of blocks, experts included, in 8 or 4 bits, as
    /// [`Model::load_quantized`] has them. A block is whole while it is made, and no longer.
    ///
    /// # Errors
    /// As [`Model::random`].
    pub fn random_quantized(
        config: ModelConfig,
        dtype: DType,
        seed: u64,
        how: Quantization,
    ) -> Result<Self> {
        Self::checked_quantized(config, dtype, seed, (Contents::Random, how))
    }

    /// As [`Model::random_quantized`], but what is random are the codes themselves: any code is as
    /// likely as another, and all scales of a weight are one. No value is rounded, so a model of
    /// billions of parameters is there in seconds: for benches, which care for sizes.
    ///
    /// # Errors
    /// As [`Model::random`].
    pub fn random_codes(
        config: ModelConfig,
        dtype: DType,
        seed: u64,
        how: Quantization,
    ) -> Result<Self> {
        Self::checked_quantized(config, dtype, seed, (Contents::RandomCodes, how))
    }

    /// A quantised model, if this machine has the memory for it.
    fn checked_quantized(
        config: ModelConfig,
        dtype: DType,
        seed: u64,
        (contents, how): (Contents, Quantization),
    ) -> Result<Self> {
        Self::empty_quantized(config.clone(), dtype, how)?
            .fits(host_memory())
            .map_err(|what| Error::argument("config", what))?;
        Self::random_of(config, dtype, seed, (contents, Some(how)))
    }

    fn random_of(
        config: ModelConfig,
        dtype: DType,
        seed: u64,
        (contents, quantize): (Contents, Option<Quantization>),
    ) -> Result<Self> {
        let mut make = Maker {
            init: Init::new(seed, dtype),
            contents,
            quantize,
        };
        let model = Self::build(config, &mut make)?;
        model.fill_rope()?;
        Ok(model)
    }

    /// Zeros that no page of memory stands behind yet, to be filled by a load.
    ///
    /// # Errors
    /// When the system has no memory.
    pub fn empty(config: ModelConfig, dtype: DType) -> Result<Self> {
        config
            .tables_fit(host_memory())
            .map_err(|what| Error::argument("config", what))?;
        let model = Self::without_tables(config, dtype, Contents::Zero)?;
        model.fill_rope()?;
        Ok(model)
    }

    /// [`Model::empty`] with quantised linear maps, to learn what they will take.
    ///
    /// # Errors
    /// As [`Model::empty`].
    pub fn empty_quantized(config: ModelConfig, dtype: DType, how: Quantization) -> Result<Self> {
        config
            .tables_fit(host_memory())
            .map_err(|what| Error::argument("config", what))?;
        let mut make = Maker {
            init: Init::new(0, dtype),
            contents: Contents::Zero,
            quantize: Some(how),
        };
        let model = Self::build(config, &mut make)?;
        model.fill_rope()?;
        Ok(model)
    }

    /// Whether the parameters fit into so much memory; names the sizes that do not.
    pub(crate) fn fits(&self, limit: roundpipe::Bytes) -> Result<(), String> {
        let params = self.named_params();
        let bytes: u128 = params.iter().map(|(_, p)| p.bytes() as u128).sum();
        crate::memory::fits(&[("the quantised weights", bytes)], limit)
    }

    /// A model to be loaded, whose rotary tables are zeros until [`Model::fill_rope`].
    pub(crate) fn without_tables(
        config: ModelConfig,
        dtype: DType,
        contents: Contents,
    ) -> Result<Self> {
        Self::build(
            config,
            &mut Maker {
                init: Init::new(0, dtype),
                contents,
                quantize: None,
            },
        )
    }

    /// Computes the rotary tables, which all blocks share.
    pub(crate) fn fill_rope(&self) -> Result<()> {
        match self.blocks.first() {
            Some(block) => Ok(block.rope.fill(&self.config.rope)?),
            None => Ok(()),
        }
    }

    fn build(mut config: ModelConfig, make: &mut Maker) -> Result<Self> {
        let dtype = make.init.dtype();
        if !matches!(dtype, DType::F32 | DType::BF16 | DType::F16) {
            return Err(Error::argument(
                "dtype",
                format!("{dtype} is no type of a model; use f32, bf16 or f16"),
            ));
        }
        config.dtype = Some(dtype);
        let c = &config;
        let rope = RopeTables::zeros(c.max_positions, c.head_dim)?;
        let embed = Embed {
            weight: make.normal(&[c.vocab, c.hidden], 0.02)?.embedding(),
            noise: 0.0,
        };
        let blocks: TensorResult<Vec<_>> = (0..c.layers)
            .map(|i| {
                let mut block = Block::new(c, i, make, &rope)?;
                if let Some(how) = make.quantize {
                    block.quantize(c, how, make)?;
                }
                Ok(block)
            })
            .collect();
        let weight = match c.tied {
            true => embed.weight.clone(),
            false => make.normal(&[c.vocab, c.hidden], 0.02)?,
        };
        let head = Head::new(c, make, weight)?;
        let mut model = Self {
            layers: Sequential::new(),
            lora: None,
            embed,
            blocks: blocks?,
            head,
            config,
        };
        model.assemble();
        Ok(model)
    }

    /// Makes the sequence anew after a part has changed. Parameters are shared, so engines built
    /// before keep working on the same memory.
    pub(crate) fn assemble(&mut self) {
        let mut layers = Sequential::new().named("model.embed_tokens", self.embed.clone());
        for (i, block) in self.blocks.iter().enumerate() {
            layers = layers.named(format!("model.layers.{i}"), block.clone());
        }
        self.layers = layers.named("lm_head", self.head.clone());
    }

    /// Lets GPUs add the gradients of attention in the order in which they come: a faster backward
    /// of long sequences, whose last bits are not the same every time. Off unless said. Engines
    /// made before do not see it.
    pub fn fast_attention(&mut self, fast: bool) {
        self.blocks
            .iter_mut()
            .for_each(|block| block.any_order = fast);
        self.assemble();
    }

    /// Spreads a share of each target evenly over all tokens, in training. Engines made before do
    /// not see it.
    ///
    /// # Errors
    /// [`Error::Argument`] for a share that is not from 0 to 1.
    pub fn label_smoothing(&mut self, share: f64) -> Result<()> {
        if !(0.0..=1.0).contains(&share) {
            return Err(Error::argument(
                "label_smoothing",
                format!("{share} is not from 0 to 1"),
            ));
        }
        self.head.smoothing = share;
        self.assemble();
        Ok(())
    }

    /// Adds noise to the embeddings in training, as NEFTune does: uniform, of at most
    /// alpha / sqrt(length · hidden). 5 is usual, 0 is off. Engines made before do not see it.
    ///
    /// # Errors
    /// [`Error::Argument`] for an alpha that is negative or not finite.
    pub fn neftune(&mut self, alpha: f64) -> Result<()> {
        if !(alpha.is_finite() && alpha >= 0.0) {
            return Err(Error::argument(
                "neftune",
                format!("{alpha} is no alpha; use a number from 0 on, such as 5"),
            ));
        }
        self.embed.noise = alpha;
        self.assemble();
        Ok(())
    }

    /// The type of the parameters.
    pub fn dtype(&self) -> DType {
        self.embed.weight.dtype()
    }

    /// Which tensors of a folder the parameters are made of. Adapters are not among them.
    pub fn entries(&self) -> Vec<Entry> {
        names::entries(self)
    }

    /// The same for quantised weights.
    pub(crate) fn quantized_entries(&self) -> Vec<QuantizedEntry> {
        names::quantized_entries(self)
    }

    /// The tensors of a folder that a linear map of a block is made of.
    pub(crate) fn pieces_of(
        &self,
        block: usize,
        (name, projection): (&str, &Projection),
    ) -> Vec<Piece> {
        names::pieces_of(self, block, (name, projection))
    }

    /// How linear maps are quantised, where they are.
    pub fn quantization(&self) -> Option<Quantization> {
        let all = self.blocks.iter().flat_map(Block::projections);
        all.into_iter()
            .find_map(|(_, projection)| match &projection.weight {
                Weight::Quantized(weight) => Some(weight.form.how),
                Weight::Whole(_) => None,
            })
    }

    /// Turns quantised weights into whole ones, of the values that their codes stand for, in
    /// memory. Engines made before keep the codes.
    ///
    /// # Errors
    /// When the system has no memory, or while weights are written.
    pub fn dequantize(&mut self) -> Result<()> {
        self.dequantize_each(QuantizedWeight::widened)
    }

    /// The same for a model that is only read from now on: values are made whenever a weight is
    /// read, and take no memory of their own.
    ///
    /// # Errors
    /// When a weight cannot be replaced.
    pub fn dequantize_on_read(&mut self) -> Result<()> {
        self.dequantize_each(QuantizedWeight::widened_on_read)
    }

    fn dequantize_each(
        &mut self,
        widened: impl Fn(&QuantizedWeight) -> TensorResult<Param>,
    ) -> Result<()> {
        for block in &mut self.blocks {
            for (_, projection) in block.projections_mut() {
                if let Weight::Quantized(weight) = &projection.weight {
                    projection.weight = Weight::Whole(widened(weight)?);
                }
            }
        }
        self.assemble();
        Ok(())
    }

    /// Mean loss over the labels that are not -100; `ids` and `labels` are [B, S].
    ///
    /// # Errors
    /// What a layer reports.
    pub fn loss(&self, cx: &mut Cx, ids: &Tensor, labels: &Tensor) -> EngineResult<Tensor> {
        let input = Tree::map([
            ("ids", ids.clone().into()),
            ("labels", labels.clone().into()),
        ]);
        Ok(self.layers.forward(cx, input)?.tensor()?)
    }

    /// Logits [B, S, V].
    ///
    /// # Errors
    /// What a layer reports.
    pub fn logits(&self, cx: &mut Cx, ids: &Tensor) -> EngineResult<Tensor> {
        Ok(self
            .layers
            .forward(cx, Tree::map([("ids", ids.clone().into())]))?
            .tensor()?)
    }
}

impl Params for Model {
    fn visit(&self, visit: &mut ParamVisitor<'_>) {
        self.layers.visit(visit);
    }
}

/// What [`wrap`](roundpipe::wrap()) sees: its preset is [`Model::layers`], one engine; by the rules,
/// `model.embed_tokens`, each of `model.layers` and `lm_head` are engines of their own.
impl Composite for Model {
    fn children(&self) -> Vec<(String, Node)> {
        let blocks = self.blocks.iter().map(|block| Node::layer(block.clone()));
        let body = vec![
            ("embed_tokens".to_owned(), Node::layer(self.embed.clone())),
            ("layers".to_owned(), Node::list(blocks)),
        ];
        vec![
            ("model".to_owned(), Node::Group(body)),
            ("lm_head".to_owned(), Node::layer(self.head.clone())),
        ]
    }

    fn forward(&self, run: &mut Run<'_>, input: Values) -> EngineResult<Value> {
        let flow = run.child("model.embed_tokens", input)?;
        let flow = run.child("model.layers", flow)?;
        run.child("lm_head", flow)
    }

    fn is_chain(&self) -> bool {
        true
    }

    fn preset(&self) -> Option<Sequential> {
        Some(self.layers.clone())
    }

    fn kind(&self) -> String {
        self.config.family.model_type().to_owned()
    }
}

impl From<Model> for Node {
    fn from(model: Model) -> Self {
        Self::composite(model)
    }
}

/// What new parameters hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Contents {
    /// What training starts from.
    Random,
    /// The same, but weights that are quantised are random codes.
    RandomCodes,
    /// Zeros, which take memory when they are written.
    Zero,
    /// Nothing: a load gives them a home.
    Absent,
}

/// Makes parameters.
pub(crate) struct Maker {
    init: Init,
    contents: Contents,
    /// How linear maps of blocks are kept, if not whole.
    quantize: Option<Quantization>,
}

impl Maker {
    fn normal(&mut self, dims: &[usize], std: f64) -> TensorResult<Param> {
        match self.contents {
            Contents::Random | Contents::RandomCodes => self.init.normal(dims, std),
            Contents::Zero => Param::zeros(self.init.dtype(), dims),
            Contents::Absent => Param::absent(self.init.dtype(), dims),
        }
    }

    /// The weight of a linear map, which is not made where codes will take its place.
    fn linear(&mut self, dims: &[usize], std: f64) -> TensorResult<Param> {
        match self.contents {
            Contents::RandomCodes => Param::absent(self.init.dtype(), dims),
            _ => self.normal(dims, std),
        }
    }

    fn full(&mut self, dims: &[usize], value: f64) -> TensorResult<Param> {
        match self.contents {
            Contents::Random | Contents::RandomCodes if value != 0.0 => self.init.full(dims, value),
            Contents::Random | Contents::RandomCodes | Contents::Zero => {
                Param::zeros(self.init.dtype(), dims)
            }
            Contents::Absent => Param::absent(self.init.dtype(), dims),
        }
    }
}

/// The map between layers.
pub(crate) type Flow = BTreeMap<String, Tree>;

/// Takes the map apart.
pub(crate) fn fields(input: Tree) -> TensorResult<Flow> {
    match input {
        Tree::Map(map) => Ok(map),
        _ => Err(TensorError::invalid(
            "model",
            "a model takes its inputs by name: `Inputs::new().named(\"ids\", ..)`",
        )),
    }
}

/// Takes one tensor out of the map.
pub(crate) fn take(map: &mut Flow, name: &str) -> TensorResult<Tensor> {
    let value = map.remove(name).ok_or_else(|| missing(map, name))?;
    value.tensor()
}

fn missing(map: &Flow, name: &str) -> TensorError {
    let names: Vec<&str> = map.keys().map(String::as_str).collect();
    let what = format!(
        "the map between layers lacks `{name}`; it has {}",
        names.join(", ")
    );
    TensorError::invalid("model", what)
}

/// A tensor of the map, left there.
pub(crate) fn get(map: &Flow, name: &str) -> TensorResult<Tensor> {
    optional(map, name)?.ok_or_else(|| missing(map, name))
}

/// A tensor of the map that may be absent, left there.
pub(crate) fn optional(map: &Flow, name: &str) -> TensorResult<Option<Tensor>> {
    map.get(name).cloned().map(Tree::tensor).transpose()
}
