//! From a tree of modules to engines: which module becomes an engine of its own, and how they work
//! together.
//!
//! The path of a model: [`Node`] -> a preset, if one knows it -> [`decide`] (pure, printable) ->
//! [`wrap`] follows the decisions -> one engine, or an [`AutoWrapped`] of several on one ring.
//!
//! # Rules, the first that fits decides
//! 1. A module in `skip` stays as it is and runs on the host.
//! 2. A sequence becomes an engine with a layer for each of its layers.
//! 3. A module with a forward becomes an engine with one layer, when its own parameters take at
//!    least `lower_threshold` or all of them at most `upper_threshold`. So does one with nothing
//!    below it, which no other rule could place. Below `lower_threshold` in total it runs a batch
//!    as one microbatch, unless it is an element of a list or chain.
//! 4. Each element of a list becomes an engine, whatever its size. All but the last leave their
//!    outputs unmerged, so that the next starts with the first microbatch; so do children of a
//!    module that [is a chain](Composite::is_chain).
//! 5. For any other module each child is decided by itself, and the module's own forward runs on
//!    the host.
//! 6. A loss function needs no rule of its own. For one engine it is an argument of
//!    [`forward_backward`](RoundPipe::forward_backward), and runs on the worker of the last layer.
//!    A module that computes its loss itself does so by a child, which the rules above make an
//!    engine of, or by [`Run::apply`], on the host where the module is not wrapped as a whole. A
//!    field that holds a loss function, as models elsewhere have, would say the same a third time.
//!
//! ```
//! use std::sync::Arc;
//! use roundpipe::nn::{Init, Linear};
//! use roundpipe::wrap::{Run, Value, Values};
//! use roundpipe::{Composite, DType, HostTensor, Node, Params, RunConfig, ParamVisitor, WrapConfig, Wrapped, wrap};
//!
//! struct Mlp {
//!     up: Arc<Linear>,
//!     down: Arc<Linear>,
//! }
//!
//! impl Params for Mlp {
//!     fn visit(&self, visit: &mut ParamVisitor<'_>) {
//!         visit.child("up", &*self.up);
//!         visit.child("down", &*self.down);
//!     }
//! }
//!
//! impl Composite for Mlp {
//!     fn children(&self) -> Vec<(String, Node)> {
//!         vec![("up".into(), Node::Layer(self.up.clone())), ("down".into(), Node::Layer(self.down.clone()))]
//!     }
//!
//!     fn forward(&self, run: &mut Run<'_>, input: Values) -> roundpipe::Result<Value> {
//!         let x = run.child("up", input)?;
//!         let x = run.apply(x, |cx, x| Ok(cx.relu(&x.tensor()?)?.into()))?;
//!         run.child("down", x)
//!     }
//! }
//!
//! # fn main() -> roundpipe::Result<()> {
//! let mut init = Init::new(7, DType::F32);
//! let up = Arc::new(Linear::new(&mut init, 4, 8, true)?);
//! let down = Arc::new(Linear::new(&mut init, 8, 4, true)?);
//! let config = WrapConfig { lower_threshold: 64, upper_threshold: Some(200), ..WrapConfig::default() };
//! let Wrapped::Auto(model) = wrap(Node::composite(Mlp { up, down }), &config)? else { unreachable!() };
//! let x = HostTensor::from_slice(&[0.5f32; 24], &[6, 4])?;
//! let forward = model.forward(x.clone(), &RunConfig::default())?;
//! forward.backward(x)?;
//! # Ok(())
//! # }
//! ```
//!
//! # Invariants
//! - [`wrap`] does what [`decide`] says and decides nothing itself.
//! - All engines of a model are parts of one: they have one store, one optimizer and one sequence of
//!   calls and steps. So a parameter that several of them use has one home, one master and one set
//!   of moments; its gradients are kept per use and added by the update, the last use in the tree
//!   first; and all engines read the same version of it at every lag.
//! - A trainable parameter that an engine has is used by no module on the host.
//! - Engines draw the random numbers that one engine over all their layers, in the order of the
//!   tree, would draw.

mod auto;
mod back;
mod record;
mod run;

use std::any::Any;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;
use std::panic::Location;
use std::sync::Arc;

use roundpipe_tensor::{Bytes, Cx, DType, Device, HostTensor, Pin, Result as TensorResult};

pub use self::auto::AutoWrapped;
pub use self::back::{AutoForward, AutoInputGrads};
use self::run::run_inside;
pub use self::run::{Run, Value, Values};
use crate::batch::MergeOutput;
use crate::config::{Lag, RunConfig};
use crate::devices::Devices;
use crate::engine::{Builder, PartSpec, RoundPipe};
use crate::error::{Error, Result};
use crate::exec::ring::{Ring, RingOptions};
use crate::groups::{self, ParamGroup};
use crate::layer::{Layer, ParamVisitor, Params, Sequential};
use crate::optim::{MomentType, Rule};
use crate::tree::Tree;

/// A module with children, which its forward calls by their names.
///
/// The forward is written once. Where the module is wrapped as a whole it runs on a worker,
/// children included; where its children are engines it runs on the host and passes values from one
/// to the next.
pub trait Composite: Params + Any + Send + Sync {
    /// The children that may be wrapped by themselves, by name. [`Params::visit`] shows their
    /// parameters too; what no child has is the module's own.
    fn children(&self) -> Vec<(String, Node)>;

    /// Computes the output, by calls of children ([`Run::child`]) and computations of its own
    /// ([`Run::apply`]).
    ///
    /// # Errors
    /// What these report.
    fn forward(&self, run: &mut Run<'_>, input: Values) -> Result<Value>;

    /// Whether the forward does no more than call the children in their order, those of groups as
    /// well, each with what the one before gave. Outputs then stay unmerged between them, as
    /// between elements of a list.
    fn is_chain(&self) -> bool {
        false
    }

    /// The same model as a sequence, where it can be one: [`wrap`] then makes one engine of it,
    /// unless [`WrapConfig::use_sequential_preset`] says otherwise.
    fn preset(&self) -> Option<Sequential> {
        None
    }

    /// What notes call it: by default the name of its type.
    fn kind(&self) -> String {
        let path = std::any::type_name::<Self>();
        let path = path.split('<').next().unwrap_or(path);
        path.rsplit("::").next().unwrap_or(path).to_owned()
    }
}

/// A module and what is below it; cloning shares the modules.
#[derive(Clone)]
pub enum Node {
    /// A layer, or a [`Sequential`], which is one as well.
    Layer(Arc<dyn Layer>),
    /// Modules that are called one after another, each with the output of the one before.
    List(Vec<(String, Node)>),
    /// Modules without a forward of their own, which the module above calls by `group.name`.
    Group(Vec<(String, Node)>),
    /// A module with children.
    Composite(Arc<dyn Composite>),
}

impl Node {
    /// A layer.
    pub fn layer(layer: impl Layer + 'static) -> Self {
        Self::Layer(Arc::new(layer))
    }

    /// Modules called one after another, under their indices as names.
    pub fn list(nodes: impl IntoIterator<Item = Node>) -> Self {
        Self::List(
            nodes
                .into_iter()
                .enumerate()
                .map(|(i, node)| (i.to_string(), node))
                .collect(),
        )
    }

    /// A module with children.
    pub fn composite(module: impl Composite) -> Self {
        Self::Composite(Arc::new(module))
    }

    /// The module, where it is a composite of this type: the way to the fields of the model that a
    /// wrapped one was made from.
    pub fn downcast_ref<T: Composite>(&self) -> Option<&T> {
        match self {
            Self::Composite(module) => (&**module as &dyn Any).downcast_ref(),
            _ => None,
        }
    }

    /// The children that can be wrapped by themselves.
    fn children(&self) -> Vec<(String, Node)> {
        match self {
            Self::Layer(_) => Vec::new(),
            Self::List(children) | Self::Group(children) => children.clone(),
            Self::Composite(module) => module.children(),
        }
    }

    fn sequence(&self) -> Option<&Sequential> {
        match self {
            Self::Layer(layer) => layer.sequence(),
            _ => None,
        }
    }

    fn has_forward(&self) -> bool {
        matches!(self, Self::Layer(_) | Self::Composite(_))
    }

    /// Bytes of all parameters and buffers, and of those that no child has.
    fn bytes(&self) -> (u64, u64) {
        let below: HashSet<_> = self
            .children()
            .iter()
            .flat_map(|(_, child)| child.named_params())
            .map(|(_, param)| param.id())
            .collect();
        let (mut total, mut own) = (0, 0);
        for (_, param) in self.named_params() {
            total += param.bytes() as u64;
            own += if below.contains(&param.id()) {
                0
            } else {
                param.bytes() as u64
            };
        }
        (total, own)
    }
}

impl From<Sequential> for Node {
    fn from(sequence: Sequential) -> Self {
        Self::layer(sequence)
    }
}

impl Params for Node {
    fn visit(&self, visit: &mut ParamVisitor<'_>) {
        match self {
            Self::Layer(layer) => layer.visit(visit),
            Self::List(children) | Self::Group(children) => {
                children
                    .iter()
                    .for_each(|(name, child)| visit.child(name, child));
            }
            Self::Composite(module) => module.visit(visit),
        }
    }
}

impl fmt::Debug for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self {
            Self::Layer(_) if self.sequence().is_some() => "Sequence",
            Self::Layer(_) => "Layer",
            Self::List(_) => "List",
            Self::Group(_) => "Group",
            Self::Composite(_) => "Composite",
        };
        write!(f, "{kind}({})", Bytes(self.bytes().0))
    }
}

/// A node as the layer of an engine.
struct Whole(Node);

impl Params for Whole {
    fn visit(&self, visit: &mut ParamVisitor<'_>) {
        self.0.visit(visit);
    }
}

impl Layer for Whole {
    fn run(&self, cx: &mut Cx, input: Tree) -> TensorResult<Tree> {
        run_inside(&self.0, cx, input)
    }

    fn sequence(&self) -> Option<&Sequential> {
        self.0.sequence()
    }

    fn rows_read(&self, input: &Tree<HostTensor>) -> Option<HostTensor> {
        match &self.0 {
            Node::Layer(layer) => layer.rows_read(input),
            _ => None,
        }
    }

    fn kind(&self) -> &'static str {
        match &self.0 {
            Node::Layer(layer) => layer.kind(),
            _ => "Composite",
        }
    }
}

/// Makes a sequence of a model that it knows.
pub type Preset = dyn Fn(&Node) -> Option<Sequential> + Send + Sync;

/// How a tree is wrapped. Modules are named by their dotted paths from the root, whose own path is
/// empty.
#[derive(Clone)]
pub struct WrapConfig {
    /// `None` uses a preset where there is one for the model, and notes it among the warnings of the
    /// engine; `Some(true)` insists on it; `Some(false)` wraps by the rules.
    pub use_sequential_preset: Option<bool>,
    /// Makes a sequence of models that it knows. It is asked before [`Composite::preset`], by which
    /// models bring their own.
    pub preset: Option<Arc<Preset>>,
    /// Bytes of own parameters from which a module becomes an engine, and of all parameters below
    /// which an engine runs one microbatch; 16 KiB by default.
    pub lower_threshold: u64,
    /// Bytes of all parameters up to which a module becomes an engine as a whole. By default those
    /// of the model divided by one more than there are workers.
    pub upper_threshold: Option<u64>,
    /// Modules that stay as they are and run on the host.
    pub skip: Vec<String>,
    /// Run configurations of engines, which win over the rules and over `run_config`.
    pub override_config: BTreeMap<String, RunConfig>,
    /// The base of all engines' run configurations.
    pub run_config: RunConfig,
    /// What logs, traces and errors call the model; the place of the call of [`wrap`] by default.
    pub name: Option<String>,
    /// Workers for all engines; made from `devices` by default.
    pub ring: Option<Ring>,
    /// The devices to run on, without a ring; by default every GPU that can be used, or the
    /// processor where there is none.
    pub devices: Vec<Arc<dyn Device>>,
    /// Options of the ring that is made from the devices, but for its `pin`, which is the one
    /// below.
    pub ring_options: RingOptions,
    /// The rule of updates.
    pub optimizer: Option<Rule>,
    /// Parameters with settings of their own, by their names in the tree.
    pub groups: Vec<ParamGroup>,
    /// The most that a step may lag; [`Lag::One`] by default.
    pub max_lag: Lag,
    /// The start of the random stream.
    pub seed: u64,
    /// The type of gradients in host memory; each parameter's own by default.
    pub grad_dtype: Option<DType>,
    /// The type of the optimizer's masters and moments, as
    /// [`Builder::optim_dtype`](crate::engine::Builder::optim_dtype); f32 by default.
    pub optim_dtype: DType,
    /// In what the optimizer's moments are kept, as
    /// [`Builder::moments`](crate::engine::Builder::moments); f32 by default.
    pub moments: MomentType,
    /// How host memory is pinned: of weights, of gradients and, in a ring that is made from the
    /// devices, of activations.
    pub pin: Pin,
    /// Threads of each engine's optimizer; by default one per core.
    pub optimizer_threads: Option<usize>,
}

impl Default for WrapConfig {
    fn default() -> Self {
        Self {
            use_sequential_preset: None,
            preset: None,
            lower_threshold: 16 * 1024,
            upper_threshold: None,
            skip: Vec::new(),
            override_config: BTreeMap::new(),
            run_config: RunConfig::default(),
            name: None,
            ring: None,
            devices: Vec::new(),
            ring_options: RingOptions::default(),
            optimizer: None,
            groups: Vec::new(),
            max_lag: Lag::One,
            seed: 0,
            grad_dtype: None,
            optim_dtype: DType::F32,
            moments: MomentType::F32,
            pin: Pin::default(),
            optimizer_threads: None,
        }
    }
}

/// What becomes of a module.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Rule 1: it runs on the host as it is.
    Skip,
    /// Rule 2: an engine with a layer for each of its layers.
    Sequence,
    /// Rules 3 and 4: an engine with one layer.
    Whole,
    /// Rule 4: an engine for each element; decisions on them follow.
    List,
    /// Rule 5: decisions on its children follow.
    Recurse,
}

/// What is done with one module, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decision {
    /// Its dotted path; empty for the root.
    pub path: String,
    /// What becomes of it.
    pub action: Action,
    /// Bytes of all its parameters and buffers.
    pub total: u64,
    /// Bytes of those that no child has.
    pub own: u64,
    /// Whether its engine runs a batch as one microbatch.
    pub one_microbatch: bool,
    /// Whether its outputs stay unmerged, because the next element of a list takes them.
    pub unmerged: bool,
}

impl Decision {
    /// Whether the module becomes an engine.
    fn is_engine(&self) -> bool {
        matches!(self.action, Action::Sequence | Action::Whole)
    }
}

/// Decides on a model and everything below it, each module before its children. The wrapping
/// follows this to the letter.
///
/// # Errors
/// [`Error::Config`] for names that cannot be told apart, elements of lists that nothing can call,
/// and names in `skip` or `override_config` that are not in the tree.
pub fn decide(model: &Node, config: &WrapConfig, workers: usize) -> Result<Vec<Decision>> {
    let upper = config
        .upper_threshold
        .unwrap_or_else(|| model.bytes().0 / (workers as u64 + 1));
    let mut rules = Rules {
        config,
        upper,
        decisions: Vec::new(),
    };
    rules.visit(model, String::new(), Above::Other)?;
    let known = |name: &String| rules.decisions.iter().any(|d| d.path == *name);
    for (setting, names) in [
        ("skip", config.skip.iter().collect::<Vec<_>>()),
        ("override_config", config.override_config.keys().collect()),
    ] {
        if let Some(name) = names.into_iter().find(|name| !known(name)) {
            let what = format!(
                "no module `{name}` is decided on; there are {}",
                listed(&rules.decisions)
            );
            return Err(Error::config(setting, what));
        }
    }
    Ok(rules.decisions)
}

fn listed(decisions: &[Decision]) -> String {
    let names: Vec<String> = decisions
        .iter()
        .take(24)
        .map(|d| format!("`{}`", d.path))
        .collect();
    let more = if decisions.len() > names.len() {
        ", ..."
    } else {
        ""
    };
    format!("{}{more}", names.join(", "))
}

/// What stands above a module.
#[derive(Clone, Copy, PartialEq)]
enum Above {
    /// A list, whose next element takes the outputs (`true`) or not.
    List(bool),
    /// A module that calls its children in order: the same.
    Chain(bool),
    Other,
}

impl Above {
    fn is_list(self) -> bool {
        matches!(self, Self::List(_))
    }

    /// Whether another module of a chain takes the outputs as they are.
    fn goes_on(self) -> bool {
        matches!(self, Self::List(true) | Self::Chain(true))
    }
}

struct Rules<'a> {
    config: &'a WrapConfig,
    upper: u64,
    decisions: Vec<Decision>,
}

impl Rules<'_> {
    fn visit(&mut self, node: &Node, path: String, above: Above) -> Result<()> {
        let (total, own) = node.bytes();
        let children = node.children();
        let action = self.action(node, &path, (total, own), children.is_empty(), above);
        if above.is_list() && matches!(node, Node::Group(_)) && action != Action::Skip {
            let what = format!(
                "`{path}` stands in a list but has no forward; make it a list or a composite"
            );
            return Err(Error::config("wrap", what));
        }
        let is_engine = matches!(action, Action::Sequence | Action::Whole);
        let unmerged = is_engine && above.goes_on();
        // The first module of a chain decides on the microbatches of all.
        let is_small = total < self.config.lower_threshold;
        let one_microbatch = action == Action::Whole && above == Above::Other && is_small;
        self.decisions.push(Decision {
            path: path.clone(),
            action,
            total,
            own,
            one_microbatch,
            unmerged,
        });
        if !matches!(action, Action::List | Action::Recurse) {
            return Ok(());
        }
        check_names(&path, &children)?;
        let last = children.len().saturating_sub(1);
        let is_chain = match node {
            Node::Composite(module) => module.is_chain(),
            Node::Group(_) => matches!(above, Above::Chain(_)),
            _ => false,
        };
        for (i, (name, child)) in children.iter().enumerate() {
            let goes_on = i < last || above.goes_on();
            let above = match action {
                Action::List => Above::List(goes_on),
                _ if is_chain => Above::Chain(goes_on),
                _ => Above::Other,
            };
            self.visit(child, join(&path, name), above)?;
        }
        Ok(())
    }

    fn action(
        &self,
        node: &Node,
        path: &str,
        bytes: (u64, u64),
        leaf: bool,
        above: Above,
    ) -> Action {
        let (total, own) = bytes;
        if self.config.skip.iter().any(|name| name == path) {
            return Action::Skip;
        }
        if node.sequence().is_some() {
            return Action::Sequence;
        }
        let fits =
            own >= self.config.lower_threshold || total <= self.upper || leaf || above.is_list();
        if node.has_forward() && fits {
            return Action::Whole;
        }
        match node {
            Node::List(_) => Action::List,
            _ => Action::Recurse,
        }
    }
}

fn check_names(path: &str, children: &[(String, Node)]) -> Result<()> {
    let mut seen = HashSet::new();
    for (name, _) in children {
        if name.is_empty() || name.contains('.') || !seen.insert(name) {
            let what = format!(
                "child `{name}` of {}: names must differ, and have no dots",
                shown(path)
            );
            return Err(Error::config("wrap", what));
        }
    }
    Ok(())
}

fn join(path: &str, name: &str) -> String {
    if path.is_empty() {
        name.to_owned()
    } else {
        format!("{path}.{name}")
    }
}

/// A path as an error tells it.
fn shown(path: &str) -> String {
    if path.is_empty() {
        "the model".to_owned()
    } else {
        format!("`{path}`")
    }
}

/// A wrapped model. An engine gives the tree that it was made from when dereferenced.
#[derive(Debug)]
pub enum Wrapped {
    /// The whole model is one engine.
    Engine(Box<RoundPipe<Node>>),
    /// Parts of it are engines; the rest runs on the host.
    Auto(AutoWrapped),
}

/// Wraps a model: by the preset if it knows the model, by the rules of this module otherwise.
///
/// # Errors
/// [`Error::Config`] for `use_sequential_preset` without a preset that knows the model, for a
/// trainable parameter that an engine and a skipped module share, and as [`decide`]; otherwise as
/// building an engine.
#[track_caller]
pub fn wrap(model: impl Into<Node>, config: &WrapConfig) -> Result<Wrapped> {
    let at = Location::caller();
    let file = at.file().rsplit(['/', '\\']).next().unwrap_or(at.file());
    let name = config
        .name
        .clone()
        .unwrap_or_else(|| format!("{file}:{}", at.line()));
    let model = model.into();
    let options = RingOptions {
        pin: config.pin,
        ..config.ring_options.clone()
    };
    let ring = match &config.ring {
        Some(ring) => ring.clone(),
        None if config.devices.is_empty() => Ring::of(&Devices::all()?, &options)?,
        None => Ring::new(&config.devices, &options)?,
    };
    if let Some(sequence) = preset(&model, config)? {
        let own = config.override_config.get("").cloned().unwrap_or_default();
        let run_config = own.over(&config.run_config);
        let engine = one_engine(sequence.into(), config, &ring, &name, run_config)?;
        if config.use_sequential_preset.is_none() {
            engine.warn(format!(
                "wrap: a preset for {} was found; use_sequential_preset: Some(false) wraps by the \
                 rules instead, Some(true) takes it without a note",
                kind(&model)
            ));
        }
        return Ok(Wrapped::Engine(Box::new(engine.set_original_model(model))));
    }
    let decisions = decide(&model, config, ring.len())?;
    if let Some(whole) = decisions.first().filter(|whole| whole.is_engine()) {
        let run_config = run_config(config, whole);
        let engine = one_engine(model, config, &ring, &name, run_config)?;
        return Ok(Wrapped::Engine(Box::new(engine)));
    }
    check_shared(&model, &decisions)?;
    let mut maker = Maker {
        config,
        name,
        layers: Sequential::new(),
        modules: Vec::new(),
        parts: Vec::new(),
    };
    let place = maker.place(&model, &mut decisions.iter())?;
    let Maker {
        name,
        layers,
        modules,
        parts,
        ..
    } = maker;
    let whole = match layers.is_empty() {
        false => {
            let builder = builder(RoundPipe::builder(layers), config, &ring, &name);
            Some(builder.groups(config.groups.clone()).parts(parts).build()?)
        }
        true => {
            groups::check_patterns(&config.groups, std::iter::empty())?;
            None
        }
    };
    let parts = Parts {
        place,
        whole,
        modules,
        decisions,
    };
    Ok(Wrapped::Auto(AutoWrapped::new(model, parts, ring, config)))
}

fn kind(model: &Node) -> String {
    match model {
        Node::Layer(layer) => layer.kind().to_owned(),
        Node::Composite(module) => module.kind(),
        Node::List(_) | Node::Group(_) => "this list".to_owned(),
    }
}

fn preset(model: &Node, config: &WrapConfig) -> Result<Option<Sequential>> {
    if config.use_sequential_preset == Some(false) {
        return Ok(None);
    }
    let given = config.preset.as_ref().and_then(|preset| preset(model));
    let found = given.or_else(|| match model {
        Node::Composite(module) => module.preset(),
        _ => None,
    });
    if found.is_none() && config.use_sequential_preset == Some(true) {
        let what = match config.preset {
            Some(_) => "the preset does not know this model; leave it unset to use the rules",
            None => {
                "there is no preset for this model; set `preset`, or leave it unset to use the rules"
            }
        };
        return Err(Error::config("use_sequential_preset", what));
    }
    Ok(found)
}

/// Refuses a trainable parameter that an engine and a module on the host both use: the host would
/// go on with a copy of its own. Engines may share one: they have one store.
fn check_shared(model: &Node, decisions: &[Decision]) -> Result<()> {
    let mut homes: HashMap<_, (&Decision, String)> = HashMap::new();
    for decision in decisions
        .iter()
        .filter(|d| d.is_engine() || d.action == Action::Skip)
    {
        let Some(node) = at(model, &decision.path) else {
            continue;
        };
        for (name, param) in node.trainable_params() {
            let name = join(&decision.path, &name);
            match homes.get(&param.id()) {
                None => {
                    homes.insert(param.id(), (decision, name));
                }
                Some((other, first)) if other.is_engine() != decision.is_engine() => {
                    let skipped = if decision.is_engine() {
                        other
                    } else {
                        decision
                    };
                    let what = format!(
                        "`{first}` and `{name}` are one parameter, which an engine trains and the \
                         skipped `{}` uses on the host; skip both modules or neither",
                        skipped.path
                    );
                    return Err(Error::config("wrap", what));
                }
                Some(_) => {}
            }
        }
    }
    Ok(())
}

/// The module at a path.
fn at(model: &Node, path: &str) -> Option<Node> {
    let mut node = model.clone();
    for name in path.split('.').filter(|name| !name.is_empty()) {
        node = node
            .children()
            .into_iter()
            .find(|(child, _)| child == name)?
            .1;
    }
    Some(node)
}

/// What became of a module.
enum Place {
    /// The engine of this number.
    Engine(usize),
    Unwrapped(Node),
    List(Vec<(String, Place)>),
    Group(Vec<(String, Place)>),
    Composite(Arc<dyn Composite>, Vec<(String, Place)>),
}

/// What following the decisions gave.
struct Parts {
    place: Place,
    /// The engine whose parts the modules are; `None` where all of the model runs on the host.
    whole: Option<RoundPipe<Sequential>>,
    /// The module of each part, by path.
    modules: Vec<(String, Node)>,
    decisions: Vec<Decision>,
}

/// Follows decisions.
struct Maker<'a> {
    config: &'a WrapConfig,
    name: String,
    /// Of all engines so far, by their paths in the tree.
    layers: Sequential,
    modules: Vec<(String, Node)>,
    parts: Vec<PartSpec>,
}

impl Maker<'_> {
    /// Decisions come in the order of this walk.
    fn place<'d>(
        &mut self,
        node: &Node,
        next: &mut impl Iterator<Item = &'d Decision>,
    ) -> Result<Place> {
        let decision = next
            .next()
            .ok_or_else(|| Error::config("wrap", "a module's children changed"))?;
        match decision.action {
            Action::Skip => Ok(Place::Unwrapped(node.clone())),
            Action::Sequence | Action::Whole => {
                self.part(node, decision)?;
                Ok(Place::Engine(self.parts.len() - 1))
            }
            Action::List | Action::Recurse => {
                let mut places = Vec::new();
                for (name, child) in node.children() {
                    places.push((name, self.place(&child, next)?));
                }
                Ok(match node {
                    Node::Composite(module) => Place::Composite(module.clone(), places),
                    Node::List(_) => Place::List(places),
                    _ => Place::Group(places),
                })
            }
        }
    }

    fn part(&mut self, node: &Node, decision: &Decision) -> Result<()> {
        let path = &decision.path;
        let first = self.layers.len();
        let mut layers = std::mem::take(&mut self.layers);
        match node.sequence() {
            None => layers = layers.named(path, Whole(node.clone())),
            Some(sequence) => {
                for (name, layer) in sequence.layers() {
                    let layer = Whole(Node::Layer(layer.clone()));
                    layers = layers.named(join(path, name), layer);
                }
            }
        }
        self.layers = layers;
        if self.layers.len() == first {
            let what = format!("the sequence `{path}` has no layers");
            return Err(Error::config("wrap", what));
        }
        self.modules.push((path.clone(), node.clone()));
        self.parts.push(PartSpec {
            name: join(&self.name, path),
            layers: first..self.layers.len(),
            config: run_config(self.config, decision),
        });
        Ok(())
    }
}

/// What was overridden wins over what the rules say, and that over what holds for all.
fn run_config(config: &WrapConfig, decision: &Decision) -> RunConfig {
    let mut ruled = RunConfig::default();
    if decision.one_microbatch {
        ruled.num_microbatch = Some(1);
    }
    if decision.unmerged {
        ruled.merge_output = Some(MergeOutput::Off);
    }
    let own = config.override_config.get(&decision.path).cloned();
    let own = own.unwrap_or_default();
    own.over(&ruled).over(&config.run_config)
}

/// An engine over all of a model.
fn one_engine(
    node: Node,
    config: &WrapConfig,
    ring: &Ring,
    name: &str,
    run_config: RunConfig,
) -> Result<RoundPipe<Node>> {
    let single = node.sequence().is_none();
    let builder = builder(RoundPipe::builder(Whole(node.clone())), config, ring, name);
    let engine = builder
        .run_config(run_config)
        .groups(groups_in_tree(&config.groups, single))
        .build()?;
    // Groups were renamed, so only here is it known what a pattern means.
    let names: Vec<String> = engine
        .trained_names()
        .map(|name| name_in_tree(name, single))
        .collect();
    groups::check_patterns(&config.groups, names.iter().map(String::as_str))?;
    Ok(engine.set_original_model(node))
}

/// What holds for every engine.
fn builder<M: Layer + 'static>(
    builder: Builder<M>,
    config: &WrapConfig,
    ring: &Ring,
    name: &str,
) -> Builder<M> {
    let mut builder = builder
        .name(name)
        .ring(ring)
        .max_lag(config.max_lag)
        .seed(config.seed)
        .optim_dtype(config.optim_dtype)
        .moments(config.moments)
        .pin(config.pin);
    if let Some(rule) = config.optimizer {
        builder = builder.optimizer(rule);
    }
    if let Some(dtype) = config.grad_dtype {
        builder = builder.grad_dtype(dtype);
    }
    if let Some(threads) = config.optimizer_threads {
        builder = builder.optimizer_threads(threads);
    }
    builder
}

/// Groups over names in the tree, for an engine that has its own.
fn groups_in_tree(groups: &[ParamGroup], single: bool) -> Vec<ParamGroup> {
    let renamed = |group: &ParamGroup| group.renamed(move |name| name_in_tree(name, single));
    groups.iter().map(renamed).collect()
}

/// The name in the tree of a parameter that an engine over all of it calls `name`: an engine over
/// one layer calls it `model`.
fn name_in_tree(name: &str, single: bool) -> String {
    match name.strip_prefix("model.") {
        Some(name) if single => name.to_owned(),
        _ => name.to_owned(),
    }
}
