//! Tiny models whose layers fail when they are told to, and their data.
//!
//! Every model takes a map: `x`, and `tag`, whose width is the tag of the operation. A layer that
//! is to fail in one call knows the call by it, whenever the call runs. All models but
//! [`ModelKind::Embed`] turn [rows, WIDTH] into [rows, WIDTH], so that any of them may stand behind
//! another.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use roundpipe::nn::{Dropout, Embedding, Func, Init, Linear};
use roundpipe::optim::{Adafactor, AdamW, AdjustLr, Muon, Sgd};
use roundpipe::{
    CustomOp, Cx, DType, DeviceKind, HostTensor, Layer, Module, Param, ParamVisitor, Params, Rule,
    Sequential, Tensor, TensorError, TensorResult, Tree,
};

use crate::program::{Batch, Dice, EngineSpec, Fault, Function, Loss, ModelKind, Odd, RuleKind};

/// Numbers of a row, and classes.
pub const WIDTH: usize = 4;
const INNER: usize = 6;
const VOCABULARY: usize = 9;
/// Indices out of range start here, so that an error names the operation it belongs to.
const OUT_OF_RANGE: usize = 7000;

/// What the failure of an operation says.
pub fn planned(tag: usize) -> String {
    format!("planned failure of #{tag};")
}

/// What the error for an index out of range says.
pub fn out_of_range(tag: usize) -> String {
    format!("index {} ", OUT_OF_RANGE + tag)
}

/// The faults of a model's layers, by tag.
#[derive(Clone, Default)]
pub struct Traps(Arc<Mutex<HashMap<usize, Armed>>>);

#[derive(Clone, Copy)]
struct Armed {
    fault: Fault,
    forwards: usize,
    backwards: usize,
}

impl Traps {
    pub fn arm(&self, tag: usize, fault: Fault, parts: usize) {
        let fault = match fault {
            Fault::Forward { micro, panics } => Fault::Forward {
                micro: micro % parts,
                panics,
            },
            Fault::Backward { micro, panics } => Fault::Backward {
                micro: micro % parts,
                panics,
            },
            other => other,
        };
        let armed = Armed {
            fault,
            forwards: 0,
            backwards: 0,
        };
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(tag, armed);
    }

    /// Counts a forward, or a backward, of the microbatches of a call. Forwards before recomputes,
    /// each in order.
    fn pass(&self, tag: usize, backward: bool) -> TensorResult<()> {
        let panics = {
            let mut traps = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            let Some(armed) = traps.get_mut(&tag) else {
                return Ok(());
            };
            let count = if backward {
                &mut armed.backwards
            } else {
                &mut armed.forwards
            };
            *count += 1;
            let at = *count - 1;
            match armed.fault {
                Fault::Forward { micro, panics } if !backward && micro == at => panics,
                Fault::Backward { micro, panics } if backward && micro == at => panics,
                _ => return Ok(()),
            }
        };
        assert!(!panics, "{}", planned(tag));
        Err(TensorError::invalid("trap", planned(tag)))
    }
}

/// Passes a value on, and fails where the call says so.
struct Trap(Traps);

impl Params for Trap {
    fn visit(&self, _: &mut ParamVisitor<'_>) {}
}

impl Layer for Trap {
    fn run(&self, cx: &mut Cx, mut input: Tree) -> TensorResult<Tree> {
        let tag = input.get("tag")?.clone().tensor()?.dims()[1];
        let x = input.take("x")?.tensor()?;
        let op = TrapOp {
            traps: self.0.clone(),
            tag,
        };
        let y = cx.custom(Arc::new(op), &[&x])?.remove(0);
        put(input, y)
    }
}

struct TrapOp {
    traps: Traps,
    tag: usize,
}

impl CustomOp for TrapOp {
    fn name(&self) -> &'static str {
        "trap"
    }

    fn forward(&self, cx: &mut Cx, inputs: &[Tensor]) -> TensorResult<Vec<Tensor>> {
        // The planner's look at shapes is no forward of a call.
        if cx.worker().device().id().kind != DeviceKind::Meta {
            self.traps.pass(self.tag, false)?;
        }
        Ok(vec![cx.mul_scalar(&inputs[0], 1.0)?])
    }

    fn backward(
        &self,
        cx: &mut Cx,
        _: &[Tensor],
        _: &[Tensor],
        grads: &[Option<Tensor>],
    ) -> TensorResult<Vec<Option<Tensor>>> {
        if cx.worker().device().id().kind != DeviceKind::Meta {
            self.traps.pass(self.tag, true)?;
        }
        Ok(grads.to_vec())
    }
}

/// Puts `x` back into the map it was taken from.
fn put(rest: Tree, x: Tensor) -> TensorResult<Tree> {
    let Tree::Map(mut map) = rest else {
        return Err(TensorError::invalid("model", "a map is expected"));
    };
    map.insert("x".to_owned(), x.into());
    Ok(Tree::Map(map))
}

/// A module over `x`.
struct On<M>(M);

impl<M: Params> Params for On<M> {
    fn visit(&self, visit: &mut ParamVisitor<'_>) {
        self.0.visit(visit);
    }
}

impl<M: Module> Layer for On<M> {
    fn run(&self, cx: &mut Cx, mut input: Tree) -> TensorResult<Tree> {
        let x = input.take("x")?.tensor()?;
        let y = self.0.forward(cx, &x)?;
        put(input, y)
    }
}

/// Leaves the tag behind.
struct Out;

impl Params for Out {
    fn visit(&self, _: &mut ParamVisitor<'_>) {}
}

impl Layer for Out {
    fn run(&self, _: &mut Cx, mut input: Tree) -> TensorResult<Tree> {
        input.take("x")
    }
}

/// A product with a weight that other layers may have too.
struct Shared(Param);

impl Params for Shared {
    fn visit(&self, visit: &mut ParamVisitor<'_>) {
        visit.param("weight", &self.0);
    }
}

impl Module for Shared {
    fn forward(&self, cx: &mut Cx, x: &Tensor) -> TensorResult<Tensor> {
        let weight = cx.get(&self.0)?;
        cx.linear(x, &weight, None)
    }
}

/// Takes a running mean of its inputs off: a buffer that every training forward moves.
struct Centre {
    mean: Param,
}

impl Params for Centre {
    fn visit(&self, visit: &mut ParamVisitor<'_>) {
        visit.param("mean", &self.mean);
    }
}

impl Module for Centre {
    fn forward(&self, cx: &mut Cx, x: &Tensor) -> TensorResult<Tensor> {
        let mean = cx.get(&self.mean)?;
        let mean = match cx.is_training() {
            true => cx.no_grad(|cx| {
                let wide = cx.cast(x, DType::F32)?;
                let batch = cx.mean(&wide, &[0], false)?;
                let (old, new) = (cx.mul_scalar(&mean, 0.75)?, cx.mul_scalar(&batch, 0.25)?);
                cx.add(&old, &new)
            })?,
            false => mean,
        };
        if cx.is_training() {
            cx.set_buffer(&self.mean, &mean)?;
        }
        let mean = cx.cast(&mean, x.dtype())?;
        cx.sub(x, &mean)
    }
}

/// A model and its faults.
pub struct Built {
    pub model: Sequential,
    pub traps: Traps,
}

/// A model without its faults.
struct Parts {
    layers: Vec<Arc<dyn Layer>>,
    /// The first place behind a trained layer: a fault in a backward needs a gradient that comes
    /// by.
    first_trap: usize,
}

/// The model of an engine.
pub fn build(spec: &EngineSpec) -> Built {
    let mut init = Init::new(spec.seed, spec.dtype);
    let Parts {
        mut layers,
        first_trap,
    } = parts(spec.model, &mut init);
    let traps = Traps::default();
    let at = (first_trap + spec.trap).min(layers.len());
    layers.insert(at, Arc::new(Trap(traps.clone())));
    layers.push(Arc::new(Out));
    let model = layers
        .into_iter()
        .fold(Sequential::new(), |model, layer| model.with(Held(layer)));
    Built { model, traps }
}

fn parts(kind: ModelKind, init: &mut Init) -> Parts {
    let mut linear =
        |inputs, outputs| Linear::new(init, inputs, outputs, true).expect("a small layer");
    let (first, last) = (linear(WIDTH, INNER), linear(INNER, WIDTH));
    let bend = || -> Arc<dyn Layer> { Arc::new(On(Func(|cx: &mut Cx, x: &Tensor| cx.gelu(x)))) };
    let dropout = || -> Arc<dyn Layer> { Arc::new(On(Dropout { p: 0.25 })) };
    match kind {
        ModelKind::Mlp => {
            let layers: Vec<Arc<dyn Layer>> =
                vec![Arc::new(On(first)), bend(), dropout(), Arc::new(On(last))];
            Parts {
                layers,
                first_trap: 1,
            }
        }
        ModelKind::Tied => {
            let weight = init.normal(&[INNER, INNER], 0.4).expect("a small weight");
            let layers: Vec<Arc<dyn Layer>> = vec![
                Arc::new(On(first)),
                Arc::new(On(Shared(weight.clone()))),
                dropout(),
                Arc::new(On(Shared(weight))),
                Arc::new(On(last)),
            ];
            Parts {
                layers,
                first_trap: 1,
            }
        }
        ModelKind::Embed => {
            let table = Embedding::new(init, VOCABULARY, INNER, 0.5).expect("a small table");
            let layers: Vec<Arc<dyn Layer>> =
                vec![Arc::new(On(table)), dropout(), Arc::new(On(last))];
            Parts {
                layers,
                first_trap: 1,
            }
        }
        ModelKind::Running => {
            let mean = Param::zeros(DType::F32, &[INNER])
                .expect("a small buffer")
                .frozen();
            let layers: Vec<Arc<dyn Layer>> = vec![
                Arc::new(On(first)),
                Arc::new(On(Centre { mean })),
                bend(),
                Arc::new(On(last)),
            ];
            Parts {
                layers,
                first_trap: 1,
            }
        }
        ModelKind::Frozen => {
            first.set_trainable(false);
            let inner = linear_with_frozen_bias(init);
            let layers: Vec<Arc<dyn Layer>> = vec![
                Arc::new(On(first)),
                Arc::new(On(inner)),
                dropout(),
                Arc::new(On(last)),
            ];
            Parts {
                layers,
                first_trap: 2,
            }
        }
    }
}

fn linear_with_frozen_bias(init: &mut Init) -> Linear {
    let linear = Linear::new(init, INNER, INNER, true).expect("a small layer");
    linear
        .bias
        .iter()
        .for_each(|bias| bias.set_trainable(false));
    linear
}

/// A layer behind a pointer.
struct Held(Arc<dyn Layer>);

impl Params for Held {
    fn visit(&self, visit: &mut ParamVisitor<'_>) {
        self.0.visit(visit);
    }
}

impl Layer for Held {
    fn run(&self, cx: &mut Cx, input: Tree) -> TensorResult<Tree> {
        self.0.run(cx, input)
    }
}

/// The rule of an engine.
pub fn rule(kind: RuleKind) -> Option<Rule> {
    match kind {
        RuleKind::Adafactor => Some(Rule::Adafactor(Adafactor {
            weight_decay: 0.05,
            ..Adafactor::default()
        })),
        RuleKind::Muon => Some(Rule::Muon {
            matrices: Muon {
                adjust_lr: AdjustLr::MatchRmsAdamW,
                ..Muon::default()
            },
            rest: AdamW::default(),
        }),
        RuleKind::Adam => Some(Rule::AdamW(AdamW {
            weight_decay: 0.05,
            ..AdamW::default()
        })),
        RuleKind::Momentum => Some(Rule::Sgd(Sgd {
            momentum: 0.9,
            ..Sgd::default()
        })),
        RuleKind::Sgd => Some(Rule::Sgd(Sgd::default())),
        RuleKind::None => None,
    }
}

/// The input `x` of a batch. A fault of the tokens puts one out of range.
pub fn input(spec: &EngineSpec, batch: &Batch, tag: usize, fault: Option<Fault>) -> HostTensor {
    let mut dice = Dice::new(batch.data, 2);
    if spec.model == ModelKind::Embed {
        let mut ids: Vec<i64> = (0..batch.rows)
            .map(|_| dice.below(VOCABULARY) as i64)
            .collect();
        if let Some(Fault::Token { row }) = fault {
            ids[row % batch.rows] = (OUT_OF_RANGE + tag) as i64;
        }
        return HostTensor::from_slice(&ids, &[batch.rows]).expect("tokens");
    }
    let mut values: Vec<f64> = (0..batch.rows * WIDTH).map(|_| dice.unit()).collect();
    let odd = dice.below(values.len());
    match batch.odd {
        Odd::NanInput => values[odd] = f64::NAN,
        Odd::InfInput => values[odd] = f64::INFINITY,
        _ => {}
    }
    HostTensor::from_f64s(&values, spec.dtype, &[batch.rows, WIDTH]).expect("inputs")
}

/// The tag of an operation, for so many rows.
pub fn tag_rows(rows: usize, tag: usize) -> HostTensor {
    HostTensor::zeros(DType::U8, &[rows, tag]).expect("a tag")
}

/// The labels of a batch, or the gradients of its outputs.
pub fn labels(
    dtype: DType,
    batch: &Batch,
    loss: Loss,
    tag: usize,
    fault: Option<Fault>,
) -> HostTensor {
    let mut dice = Dice::new(batch.data, 3);
    if loss == Loss::CrossEntropy {
        let mut classes: Vec<i64> = (0..batch.rows).map(|_| dice.below(WIDTH) as i64).collect();
        if let Some(Fault::Label { row }) = fault {
            classes[row % batch.rows] = (OUT_OF_RANGE + tag) as i64;
        }
        return HostTensor::from_slice(&classes, &[batch.rows]).expect("labels");
    }
    let mut values: Vec<f64> = (0..batch.rows * WIDTH).map(|_| dice.unit()).collect();
    let odd = dice.below(values.len());
    match batch.odd {
        Odd::NanLabel => values[odd] = f64::NAN,
        Odd::InfLabel => values[odd] = f64::INFINITY,
        _ => {}
    }
    HostTensor::from_f64s(&values, dtype, &[batch.rows, WIDTH]).expect("labels")
}

/// The loss without a fault.
pub fn loss(kind: Loss, cx: &mut Cx, output: Tree, label: Tree) -> TensorResult<Tensor> {
    let (output, label) = (output.tensor()?, label.tensor()?);
    match kind {
        Loss::CrossEntropy => cx.cross_entropy(&output, &label, Default::default()),
        Loss::Weighted => {
            let product = cx.mul(&output, &label)?;
            cx.sum_all(&product)
        }
    }
}

/// The loss of a call with its fault.
pub fn loss_with(
    kind: Loss,
    tag: usize,
    fault: Option<Fault>,
    parts: usize,
) -> impl Fn(&mut Cx, Tree, Tree) -> TensorResult<Tensor> + Send + Sync + 'static {
    let count = AtomicUsize::new(0);
    move |cx, output, label| {
        let at = count.fetch_add(1, Ordering::SeqCst);
        if let Some(Fault::Loss { micro, panics }) = fault
            && micro % parts == at
        {
            assert!(!panics, "{}", planned(tag));
            return Err(TensorError::invalid("loss", planned(tag)));
        }
        loss(kind, cx, output, label)
    }
}

/// Does what a step function does to one value; `at` counts them.
///
/// # Errors
/// At the last value, for a function that fails.
pub fn change(
    function: Function,
    tag: usize,
    params: &mut [(&mut [f32], Option<Vec<f32>>)],
) -> Result<(), String> {
    for (at, (value, grad)) in params.iter_mut().enumerate() {
        match (function, grad) {
            (Function::Descend, Some(grad)) => {
                value
                    .iter_mut()
                    .zip(grad.iter())
                    .for_each(|(v, g)| *v -= 0.05 * g);
            }
            (Function::Descend, None) => {}
            (Function::Fail { half: true, .. }, _) if at % 2 == 1 => {}
            (Function::Shrink | Function::Fail { .. }, _) => {
                value.iter_mut().for_each(|v| *v *= 0.875)
            }
            (Function::WriteNan, _) if at == 0 => value[0] = f32::NAN,
            (Function::WriteNan, _) => {}
        }
    }
    match function {
        Function::Fail { panics, .. } => {
            assert!(!panics, "{}", planned(tag));
            Err(planned(tag))
        }
        _ => Ok(()),
    }
}

/// New values for a parameter.
pub fn written(data: u64, count: usize) -> Vec<f64> {
    let mut dice = Dice::new(data, 4);
    // A quarter of an integer is the same in every type.
    (0..count)
        .map(|_| (dice.below(9) as f64 - 4.0) / 4.0)
        .collect()
}
