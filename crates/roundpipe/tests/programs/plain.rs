//! A model without an engine: tapes on one worker, one microbatch and one layer after another, and
//! an update over plain vectors. What is computed here is what every ring must compute.

use std::rc::Rc;

use roundpipe::{
    Cx, DType, Element, HostTensor, Layer, Param, Params, RngSite, Rule, Shape, Tensor, Tree,
    Worker, bf16, f16,
};
use roundpipe_tensor::cpu::threads::Threads;
use roundpipe_tensor::optim::{
    AdafactorSlabs, AdamSlabs, Floats, Matrices, MuonSlabs, SecondMoment, SgdSlabs, StepSettings,
    clip_factor, squared_norm,
};

use crate::models::{self, Built};
use crate::program::{EngineSpec, Function, Loss, UpdateSpec};

/// Values of all parameters, as f32, which holds every type's exactly.
pub type Values = Rc<Vec<Vec<f32>>>;

/// Gradients since the last step, by layer and place in it, as they are stored.
pub type Grads = Vec<Vec<Option<Vec<f32>>>>;

/// A model and where its parameters are used.
pub struct Plain {
    pub spec: EngineSpec,
    pub params: Vec<(String, Param)>,
    built: Built,
    /// The parameters of each layer: their index, and their name there.
    layers: Vec<Vec<(usize, String)>>,
    rule: Option<Rule>,
    worker: Worker,
    threads: Threads,
}

/// What a call reads.
#[derive(Clone)]
pub struct Terms {
    pub weights: Values,
    pub frozen: Values,
    /// The place in the random stream.
    pub number: u64,
    pub training: bool,
}

/// One microbatch of a call's input.
pub struct Part {
    pub x: Tensor,
    /// Whether its gradient is wanted.
    pub grad: bool,
    /// Stands for the tag, which nothing reads here.
    pub tag: Tensor,
}

/// Gives the gradient of a microbatch's output.
pub type Seed<'a> = dyn FnMut(usize, &Tensor) -> Tensor + 'a;

/// What a call gives.
pub struct Passed {
    pub outputs: Vec<Tensor>,
    pub input_grads: Vec<Option<Tensor>>,
    /// With the buffers that were set.
    pub frozen: Values,
    pub grads: Grads,
}

/// The optimizer's values and state.
#[derive(Clone)]
pub struct Copies {
    pub values: Values,
    /// By parameter.
    pub moments: Rc<Vec<Vec<Vec<f32>>>>,
    /// Updates so far, those that were skipped left out.
    pub steps: u64,
}

/// What an update says.
pub struct Updated {
    pub weights: Values,
    pub copies: Copies,
}

/// A leaf on the worker, and whether a gradient comes back for it.
#[derive(Clone)]
struct Leaf {
    tensor: Tensor,
    grad: bool,
}

/// A layer's tape.
struct Taped {
    cx: Cx,
    inputs: Vec<Option<Tensor>>,
    outputs: Vec<Tensor>,
}

/// A layer's parameters on the worker, and sums of their gradients.
struct Seated {
    tensors: Vec<Tensor>,
    sums: Vec<Option<Tensor>>,
}

impl Plain {
    /// The model of `spec` on a worker, which the models of a program share.
    pub fn new(spec: &EngineSpec, worker: &Worker) -> Self {
        let built = models::build(spec);
        let params = built.model.named_params();
        let place = |param: &Param| {
            params
                .iter()
                .position(|(_, known)| known.id() == param.id())
        };
        let of = |(name, layer): (&str, &std::sync::Arc<dyn Layer>)| -> Vec<(usize, String)> {
            let own = layer.named_params().into_iter();
            own.map(|(param, at)| {
                (
                    place(&at).expect("it is the model's"),
                    format!("{name}.{param}"),
                )
            })
            .collect()
        };
        let layers = built.model.layers().map(of).collect();
        Self {
            spec: *spec,
            params,
            layers,
            built,
            rule: models::rule(spec.rule),
            worker: worker.clone(),
            threads: Threads::new(Some(1)).expect("a thread"),
        }
    }

    /// The values that parameters have at first: trainable ones, and the others.
    pub fn start(&self) -> (Values, Values) {
        let read = |trainable: bool| {
            let values =
                self.params
                    .iter()
                    .map(|(_, param)| match param.is_trainable() == trainable {
                        true => {
                            let tensor =
                                HostTensor::new(param.data(), param.dtype(), param.shape());
                            narrow(
                                &tensor
                                    .and_then(|tensor| tensor.to_f64_vec())
                                    .expect("a parameter"),
                            )
                        }
                        false => Vec::new(),
                    });
            Rc::new(values.collect())
        };
        (read(true), read(false))
    }

    /// The optimizer's state at first.
    pub fn fresh_copies(&self, weights: &Values) -> Copies {
        let moments = (0..weights.len()).map(|at| {
            let rule = self.rule_of(at).filter(|_| !weights[at].is_empty());
            let shapes = rule.map_or(Vec::new(), |rule| {
                rule.moment_shapes(self.params[at].1.shape())
            });
            shapes
                .iter()
                .map(|shape| vec![0.0; shape.numel()])
                .collect()
        });
        let moments = moments.collect();
        Copies {
            values: weights.clone(),
            moments: Rc::new(moments),
            steps: 0,
        }
    }

    /// The rule of a parameter: Muon is for matrices that are no embedding and no head.
    fn rule_of(&self, at: usize) -> Option<Rule> {
        let names = self
            .layers
            .iter()
            .flatten()
            .filter(|(param, _)| *param == at);
        let is_table = |name: &String| {
            let mut parts = name.split('.');
            parts.any(|part| part.contains("embed") || part == "head")
        };
        let is_table = names.into_iter().any(|(_, name)| is_table(name));
        match self.rule? {
            Rule::Muon { rest, .. } if is_table || self.params[at].1.shape().rank() != 2 => {
                Some(Rule::AdamW(rest))
            }
            other => Some(other),
        }
    }

    /// The type of a parameter's copy and moments.
    fn state_dtype(&self, at: usize) -> DType {
        match self.params[at].1.dtype() {
            DType::BF16 if self.spec.optim_bf16 => DType::BF16,
            _ => DType::F32,
        }
    }

    pub fn no_grads(&self) -> Grads {
        self.layers
            .iter()
            .map(|layer| vec![None; layer.len()])
            .collect()
    }

    /// Names of gradients, in the engine's order: those that can be, by layer and place.
    pub fn named_grads(&self, grads: &Grads) -> Vec<(String, Option<Vec<f32>>)> {
        let mut all = Vec::new();
        for (layer, grads) in self.layers.iter().zip(grads) {
            for ((at, name), grad) in layer.iter().zip(grads) {
                if self.params[*at].1.is_trainable() {
                    all.push((name.clone(), grad.clone()));
                }
            }
        }
        all
    }

    // ---- calls ----

    /// A host tensor's rows of one microbatch: as even as can be, larger ones first.
    pub fn cut(&self, tensor: &HostTensor, parts: usize, part: usize) -> Tensor {
        let rows = tensor.dims()[0];
        let size = |at: usize| rows / parts + usize::from(at < rows % parts);
        let start = (0..part).map(size).sum();
        let piece = tensor
            .narrow(0, start, size(part))
            .expect("rows of a batch");
        upload(
            &self.worker,
            &piece.to_f64_vec().expect("a batch"),
            piece.dtype(),
            *piece.shape(),
        )
    }

    /// The microbatches of an input.
    pub fn parts(&self, x: &HostTensor, parts: usize, grad: bool) -> Vec<Part> {
        let part = |at| self.part(self.cut(x, parts, at), grad && x.dtype().is_float());
        (0..parts).map(part).collect()
    }

    pub fn part(&self, x: Tensor, grad: bool) -> Part {
        let tag = self
            .worker
            .upload(&[0u8], Shape::new(&[1, 1]).expect("a shape"))
            .expect("a tag");
        Part { x, grad, tag }
    }

    /// Runs a call: forward, and backward where `seed` gives gradients of the outputs. `before` are
    /// gradients that its own are added to.
    pub fn call(
        &self,
        terms: &Terms,
        parts: &[Part],
        before: &Grads,
        mut seed: Option<&mut Seed<'_>>,
    ) -> Passed {
        let mut seats: Vec<Seated> = (0..self.layers.len())
            .map(|layer| self.seat(terms, layer, before))
            .collect();
        let mut frozen = (*terms.frozen).clone();
        let (mut outputs, mut input_grads) = (Vec::new(), Vec::new());
        for (m, part) in parts.iter().enumerate() {
            let x = Leaf {
                tensor: part.x.clone(),
                grad: part.grad,
            };
            let tag = Leaf {
                tensor: part.tag.clone(),
                grad: false,
            };
            let mut value = Tree::map([("x", Tree::Tensor(x)), ("tag", Tree::Tensor(tag))]);
            let mut tapes = Vec::new();
            #[expect(
                clippy::needless_range_loop,
                reason = "the layer is more than a place among the seats"
            )]
            for layer in 0..self.layers.len() {
                let (output, tape) = self.run_layer(
                    terms,
                    (layer, m),
                    &mut seats[layer],
                    &value,
                    seed.is_some(),
                    &mut frozen,
                );
                tapes.push(tape);
                value = output;
            }
            let output = value.into_leaves().remove(0).tensor;
            if let Some(seed) = &mut seed {
                let mut grads = vec![Some(seed(m, &output))];
                for (layer, tape) in tapes.into_iter().enumerate().rev() {
                    grads = self.back(layer, &mut seats[layer], tape, grads);
                }
                // Of `tag`, which has none, and `x`.
                input_grads.push(grads.pop().flatten());
            }
            outputs.push(output);
        }
        let grads = if seed.is_some() {
            self.collect(before, seats)
        } else {
            before.clone()
        };
        Passed {
            outputs,
            input_grads,
            frozen: Rc::new(frozen),
            grads,
        }
    }

    fn seat(&self, terms: &Terms, layer: usize, before: &Grads) -> Seated {
        let (mut tensors, mut sums) = (Vec::new(), Vec::new());
        for ((at, _), grad) in self.layers[layer].iter().zip(&before[layer]) {
            let param = &self.params[*at].1;
            let values = if param.is_trainable() {
                &terms.weights[*at]
            } else {
                &terms.frozen[*at]
            };
            tensors.push(upload(
                &self.worker,
                &widen(values),
                param.dtype(),
                *param.shape(),
            ));
            let sum =
                |grad: &Vec<f32>| upload(&self.worker, &widen(grad), DType::F32, *param.shape());
            sums.push(grad.as_ref().map(sum));
        }
        Seated { tensors, sums }
    }

    fn run_layer(
        &self,
        terms: &Terms,
        (layer, m): (usize, usize),
        seated: &mut Seated,
        input: &Tree<Leaf>,
        record: bool,
        frozen: &mut [Vec<f32>],
    ) -> (Tree<Leaf>, Taped) {
        let (seed, step) = (self.spec.seed, terms.number);
        let site = RngSite {
            seed,
            step,
            microbatch: m as u32,
            layer: layer as u32,
            site: 0,
        };
        let mut cx = Cx::new(&self.worker, record, terms.training).at(site);
        for (i, (at, _)) in self.layers[layer].iter().enumerate() {
            let into = if record { seated.sums[i].take() } else { None };
            cx.bind(&self.params[*at].1, seated.tensors[i].clone(), into)
                .expect("a parameter");
        }
        let given = input.map_ref(|leaf| match leaf.grad {
            true => cx.input(&leaf.tensor).expect("an input"),
            false => leaf.tensor.detach(),
        });
        let inputs = given.leaves().into_iter().zip(input.leaves());
        let inputs = inputs
            .map(|(tensor, leaf)| leaf.grad.then(|| tensor.clone()))
            .collect();
        let (_, module) = self
            .built
            .model
            .layers()
            .nth(layer)
            .expect("a layer of the model");
        let output = module
            .run(&mut cx, given)
            .expect("a layer that does not fail");
        for (param, value) in cx.take_buffers() {
            let place = self.layers[layer]
                .iter()
                .position(|(at, _)| self.params[*at].1.id() == param.id());
            let place = place.expect("a buffer of this layer");
            frozen[self.layers[layer][place].0] = narrow(&value.to_f64_vec().expect("a buffer"));
            seated.tensors[place] = value;
        }
        let outputs = output.leaves().into_iter().cloned().collect();
        let leaf = |tensor: &Tensor| Leaf {
            tensor: tensor.detach(),
            grad: tensor.requires_grad(),
        };
        (
            output.map_ref(leaf),
            Taped {
                cx,
                inputs,
                outputs,
            },
        )
    }

    fn back(
        &self,
        layer: usize,
        seated: &mut Seated,
        tape: Taped,
        grads: Vec<Option<Tensor>>,
    ) -> Vec<Option<Tensor>> {
        let Taped {
            mut cx,
            inputs,
            outputs,
        } = tape;
        let seeds: Vec<(Tensor, Tensor)> = outputs
            .into_iter()
            .zip(grads)
            .filter(|(output, _)| output.requires_grad())
            .filter_map(|(output, grad)| Some((output, grad?)))
            .collect();
        let mut found = cx
            .backward_if_any(&seeds)
            .expect("a backward that does not fail");
        drop(seeds);
        for (i, (at, _)) in self.layers[layer].iter().enumerate() {
            if let Some(grad) = found.take_param(&self.params[*at].1) {
                seated.sums[i] = Some(grad);
            }
        }
        inputs
            .into_iter()
            .map(|input| input.and_then(|input| found.take(&input)))
            .collect()
    }

    /// Sums are rounded once, when a call ends.
    fn collect(&self, before: &Grads, seats: Vec<Seated>) -> Grads {
        let mut all = before.clone();
        for (layer, seated) in seats.into_iter().enumerate() {
            for (i, sum) in seated.sums.into_iter().enumerate() {
                let Some(sum) = sum else { continue };
                let dtype = match self.spec.grad_f32 {
                    true => DType::F32,
                    false => self.params[self.layers[layer][i].0].1.dtype(),
                };
                let rounded = self.worker.cast(&sum, dtype).expect("a cast");
                all[layer][i] = Some(narrow(&rounded.to_f64_vec().expect("a gradient")));
            }
        }
        all
    }

    /// The loss of a microbatch and the gradient of its output.
    pub fn loss(&self, kind: Loss, output: &Tensor, label: &Tensor) -> (f64, Tensor) {
        let mut cx = Cx::new(&self.worker, true, true);
        let given = cx.input(output).expect("an output");
        let loss = models::loss(kind, &mut cx, given.clone().into(), label.clone().into())
            .expect("a loss");
        let one = self
            .worker
            .full(loss.dtype(), *loss.shape(), 1.0)
            .expect("a number");
        let mut grads = cx
            .backward_from(&[(loss.clone(), one)])
            .expect("a backward");
        (
            loss.item().expect("a loss"),
            grads.take(&given).expect("the loss depends on the output"),
        )
    }

    // ---- steps ----

    /// The gradient of each parameter, summed over the layers that share it, the last first.
    fn summed(&self, grads: &Grads) -> Vec<Option<Vec<f32>>> {
        let mut all: Vec<Option<Vec<f32>>> = vec![None; self.params.len()];
        for (layer, of) in self.layers.iter().enumerate().rev() {
            for (i, (at, _)) in of.iter().enumerate() {
                let Some(grad) = &grads[layer][i] else {
                    continue;
                };
                match &mut all[*at] {
                    None => all[*at] = Some(grad.clone()),
                    Some(sum) => sum
                        .iter_mut()
                        .zip(grad)
                        .for_each(|(sum, grad)| *sum += grad),
                }
            }
        }
        all
    }

    /// The squared norm of all gradients.
    pub fn squared(&self, grads: &Grads) -> f64 {
        let summed = self.summed(grads);
        let squares = summed
            .iter()
            .flatten()
            .map(|grad| squared_norm(&self.threads, Floats::F32(grad)));
        squares.fold(0.0, |sum, square| sum + square)
    }

    /// One update by the rule.
    pub fn update(
        &self,
        copies: &Copies,
        weights: &Values,
        grads: &Grads,
        spec: &UpdateSpec,
    ) -> Updated {
        let squared = self.squared(grads) * spec.grad_scale * spec.grad_scale;
        let clip = spec.clip.map_or(1.0, |most| clip_factor(squared, most));
        let factor = (f64::from(clip) * spec.grad_scale) as f32;
        let mut copies = copies.clone();
        copies.steps += 1;
        let settings = StepSettings {
            grad_scale: factor,
            ..StepSettings::new(copies.steps, spec.lr)
        };
        let (values, moments) = (
            Rc::make_mut(&mut copies.values),
            Rc::make_mut(&mut copies.moments),
        );
        for (at, grad) in self.summed(grads).iter().enumerate() {
            let Some(grad) = grad else { continue };
            let shape = self.params[at].1.shape();
            let (grad, master, working) = (Floats::F32(grad), &mut values[at][..], None);
            let mut all = moments[at].iter_mut();
            let moments = &mut all;
            match self.rule_of(at).expect("a rule") {
                Rule::Adafactor(rule) => {
                    let first = moments.next().expect("a moment");
                    let second = match Matrices::of(shape) {
                        Some(matrices) => SecondMoment::Factored {
                            matrices,
                            by_row: first,
                            by_col: moments.next().expect("a moment of the columns"),
                        },
                        None => SecondMoment::Full(first),
                    };
                    let slabs = AdafactorSlabs {
                        grad,
                        master,
                        second,
                        working,
                    };
                    rule.step(&self.threads, settings, slabs)
                }
                Rule::Muon { matrices, .. } => {
                    let slabs = MuonSlabs {
                        matrices: Matrices::of(shape).expect("a matrix"),
                        grad,
                        master,
                        momentum: moments.next().expect("a moment"),
                        working,
                    };
                    matrices.step(&self.threads, settings, slabs)
                }
                Rule::AdamW(rule) => {
                    let (exp_avg, exp_avg_sq) = (moments.next().expect("a moment"), moments.next());
                    let exp_avg_sq = exp_avg_sq.expect("a second moment");
                    let slabs = AdamSlabs {
                        grad,
                        master,
                        exp_avg,
                        exp_avg_sq,
                        max_exp_avg_sq: None,
                        working,
                    };
                    rule.step(&self.threads, settings, slabs)
                }
                Rule::Sgd(rule) => {
                    let momentum = moments.next().map(|moment| &mut moment[..]);
                    let slabs = SgdSlabs {
                        grad,
                        master,
                        momentum,
                        working,
                    };
                    rule.step(&self.threads, settings, slabs)
                }
                other => unreachable!("no program has {other:?}"),
            }
            .expect("an update");
        }
        for (at, moments) in moments.iter_mut().enumerate() {
            let dtype = self.state_dtype(at);
            moments
                .iter_mut()
                .for_each(|moment| *moment = round(moment, dtype));
        }
        self.rounded(copies, weights)
    }

    /// One update by a function that does not fail.
    pub fn apply(
        &self,
        copies: &Copies,
        weights: &Values,
        grads: &Grads,
        function: Function,
    ) -> Updated {
        let mut copies = copies.clone();
        copies.steps += 1;
        let grads = self.summed(grads);
        let trained = |at: usize| self.params[at].1.is_trainable();
        let values = Rc::make_mut(&mut copies.values)
            .iter_mut()
            .zip(grads)
            .enumerate();
        let mut views: Vec<(&mut [f32], Option<Vec<f32>>)> = values
            .filter(|(at, _)| trained(*at))
            .map(|(_, (value, grad))| (&mut value[..], grad))
            .collect();
        models::change(function, 0, &mut views).expect("a function that does not fail");
        self.rounded(copies, weights)
    }

    /// Weights are the optimizer's values in their own type, which the values may have too.
    fn rounded(&self, mut copies: Copies, weights: &Values) -> Updated {
        for (at, values) in Rc::make_mut(&mut copies.values).iter_mut().enumerate() {
            *values = round(values, self.state_dtype(at));
        }
        let mut weights = weights.clone();
        for (at, weights) in Rc::make_mut(&mut weights).iter_mut().enumerate() {
            *weights = round(&copies.values[at], self.params[at].1.dtype());
        }
        Updated { weights, copies }
    }
}

fn narrow(values: &[f64]) -> Vec<f32> {
    values.iter().map(|value| *value as f32).collect()
}

fn widen(values: &[f32]) -> Vec<f64> {
    values.iter().map(|value| f64::from(*value)).collect()
}

/// Values in a type.
pub fn round(values: &[f32], dtype: DType) -> Vec<f32> {
    match dtype {
        DType::BF16 => values
            .iter()
            .map(|value| bf16::from_f32(*value).to_f32())
            .collect(),
        DType::F16 => values
            .iter()
            .map(|value| f16::from_f32(*value).to_f32())
            .collect(),
        _ => values.to_vec(),
    }
}

fn upload(worker: &Worker, values: &[f64], dtype: DType, shape: Shape) -> Tensor {
    fn of<T: Element>(worker: &Worker, values: &[f64], shape: Shape) -> Tensor {
        let values: Vec<T> = values.iter().map(|value| T::from_f64(*value)).collect();
        worker.upload(&values, shape).expect("a small tensor")
    }
    match dtype {
        DType::F32 => of::<f32>(worker, values, shape),
        DType::BF16 => of::<bf16>(worker, values, shape),
        DType::F16 => of::<f16>(worker, values, shape),
        DType::I64 => of::<i64>(worker, values, shape),
        other => panic!("{other} is not used here"),
    }
}
