//! What an engine promises, as a state machine that knows no threads: it follows what was seen on a
//! ring, reply by reply, and objects to the first that cannot be.
//!
//! An engine may tell of a failure when it happens or with its next call. So a failure that was not
//! told yet is [`Pending`]: the machine goes on as if all were well, since a call whose results
//! came before the failure returns them, and keeps the state that the engine goes back to once the
//! failure is told.
//!
//! # Rules
//! 1. A call that fails leaves nothing. If it has gradients, those of all calls since the last step
//!    are gone, and the random stream is at the lowest place it has had since the first of them was
//!    submitted, but not before the last step.
//! 2. It fails the calls of its engine that were submitted after it, until it is told. It is told
//!    once, and not again unless whoever waited for a handle (a report, input gradients) was told
//!    first.
//! 3. A step that fails leaves weights, copies and state as they were; gradients since the step
//!    before are gone.
//! 4. Calls read the newest weights. After a step at lag 1, and until the engine synchronizes or
//!    somebody writes them, calls with gradients read those from before it. A failure changes
//!    nothing about that.
//! 5. A step of the rule whose gradients are not finite changes nothing and counts as a step; the
//!    last of [`MOST_NONFINITE`] in a row fails, and they are counted anew. A function that writes
//!    what is not finite fails.
//! 6. Whoever was told that a step is on its way is told when it is not.

use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;

use roundpipe::{Bytes, Cpu, Lag, Tensor, Worker};

use crate::models;
use crate::plain::{self, Copies, Grads, Plain, Terms, Values};
use crate::program::{
    Batch, EngineSpec, Fault, ForwardKind, Function, Loss, Odd, Op, Program, RuleKind, Side,
    UpdateSpec, What,
};
use crate::run::{Named, Reply, Told, Trace, Value, bits};

/// The last of so many steps in a row that are not finite fails.
const MOST_NONFINITE: u64 = 10;

/// In the error for a step that was asked for and does not happen.
const UNDONE: &str = "did not happen";

/// In the error for a value that was written where nobody reads it.
const LOST: &str = "was written in memory that it has left";

/// What cannot be, in words.
pub type Verdict<T = ()> = Result<T, String>;

/// Judges what was seen on a ring.
pub fn judge(program: &Program, trace: &Trace) -> Verdict {
    let worker = Worker::new(Cpu::new(Some(1)).expect("a cpu"), Bytes::mib(1)).expect("a worker");
    let mut minds: Vec<Mind> = program
        .engines
        .iter()
        .map(|spec| Mind::new(spec, &worker))
        .collect();
    let ops = program.ops.iter().map(Some).chain([None]);
    for (op, replies) in ops.zip(&trace.ops) {
        let place = op.map_or("at the end".to_owned(), |op| format!("#{}", op.tag));
        let mut replies = Replies(replies.iter().collect());
        let judged = op.map_or(Ok(()), |op| follow(&mut minds, op, &mut replies));
        // What is left is the engines coming to rest.
        let judged = judged.and_then(|()| {
            replies
                .0
                .drain(..)
                .try_for_each(|reply| rest(&mut minds, reply))
        });
        judged.map_err(|what| format!("{place}: {what}"))?;
    }
    match trace.races.first() {
        Some(race) => Err(format!("a race: {race}")),
        None => Ok(()),
    }
}

/// The replies of one operation.
struct Replies<'a>(VecDeque<&'a Reply>);

impl<'a> Replies<'a> {
    /// The next reply, if it is of this call.
    fn take(&mut self, call: &str) -> Option<&'a Reply> {
        self.0.pop_front_if(|reply| reply.call == call)
    }

    fn get(&mut self, call: &str) -> Verdict<&'a Reply> {
        self.take(call)
            .ok_or_else(|| format!("there is no reply of `{call}`"))
    }
}

/// A reply outside any operation.
fn rest(minds: &mut [Mind], reply: &Reply) -> Verdict {
    let mind = &mut minds[reply.engine];
    let judged = match reply.call {
        "synchronize" => mind.synchronize(reply),
        "gradients" => mind.gradients(reply),
        "weights" => mind.weights(reply),
        other => Err(format!("nobody asked for `{other}`")),
    };
    judged.map_err(|what| format!("engine {}, {}: {what}", reply.engine, reply.call))
}

fn follow(minds: &mut [Mind], op: &Op, replies: &mut Replies<'_>) -> Verdict {
    let Op { tag, engine, what } = *op;
    let mind = &mut minds[engine];
    let judged = match what {
        What::Train {
            batch,
            loss,
            fault,
            outputs,
            input_grads,
        } => mind.train(
            &Train {
                tag,
                batch,
                loss,
                fault,
                outputs,
                input_grads,
            },
            replies,
        ),
        What::Forward { batch, fault, kind } => mind.forward(tag, batch, fault, kind, replies),
        What::Read { of } => mind.read(of, replies),
        What::Backward { of, odd } => mind.backward(of, odd, replies),
        What::Drop { of } => {
            mind.state.kept.remove(&of);
            Ok(())
        }
        What::Chain {
            back,
            batch,
            loss,
            fault,
            ..
        } => {
            let call = Chain {
                tag,
                batch,
                loss,
                fault,
            };
            let [front, back] = minds
                .get_disjoint_mut([engine, back])
                .map_err(|e| e.to_string())?;
            chain(front, back, &call, replies)
        }
        What::Update { lag, update, .. } => mind.step(Work::Rule(update), lag, replies),
        What::Step { lag, function, .. } => mind.step(Work::Function(function, tag), lag, replies),
        What::SetTraining(training) => {
            mind.state.training = training;
            Ok(())
        }
        What::Write { param, data } => mind.write(param, data, replies),
        What::Second => match replies.get("second engine")?.result {
            Err(_) => Ok(()),
            Ok(_) => Err("a second engine over the same parameters was built".to_owned()),
        },
        What::Race {
            param,
            data,
            lag,
            update,
        } => mind.race(param, data, lag, update, replies),
        What::Rebuild { holds } => {
            while let Some(reply) = replies.take("synchronize") {
                rest(minds, reply)?;
            }
            minds[engine].rebuild(holds, replies)
        }
        What::Synchronize | What::Gradients | What::Weights => Ok(()),
    };
    judged.map_err(|what| format!("engine {engine}: {what}"))
}

/// A forward that is kept.
#[derive(Clone)]
struct Kept {
    /// Its place among the calls of the engine.
    id: u64,
    /// The step that its gradients would be for.
    step: u64,
    terms: Terms,
    /// The lowest place in the random stream since it was submitted.
    first_number: u64,
    life: Life,
    /// Whether its engine is gone.
    orphan: bool,
    tag: usize,
    batch: Batch,
    kind: ForwardKind,
    fault: Option<Fault>,
    /// `None` where it reads weights that will never be.
    outputs: Option<Vec<u64>>,
}

/// Whether a forward has failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Life {
    Alive,
    /// One that no backward follows may have ended before the failure.
    Unsure,
    Dead,
}

impl Kept {
    /// A call that was submitted before it has failed.
    fn fail(&mut self) {
        self.life = match (self.life, self.kind.requires_grad) {
            (Life::Dead, _) | (_, true) => Life::Dead,
            _ => Life::Unsure,
        };
    }
}

/// All that an engine goes back to.
#[derive(Clone)]
struct State {
    /// `None` after a step that will not happen.
    newest: Option<Values>,
    /// What calls read.
    visible: Option<Values>,
    copies: Copies,
    frozen: Values,
    grads: Grads,
    /// For each call since the last step that has gradients the lowest place in the random stream
    /// since it was submitted.
    since: Vec<u64>,
    number: u64,
    /// The place at the last step.
    floor: u64,
    steps: u64,
    /// Steps in a row that were skipped.
    nonfinite: u64,
    /// All that were.
    skipped: u64,
    /// Whether a parameter was written in memory that it had left: the next step fails.
    lost: bool,
    training: bool,
    kept: BTreeMap<usize, Kept>,
}

impl State {
    /// After a failure of call `id`, since which the lowest place was `number`; `with_grads` if it is among the calls
    /// since the step.
    fn after_failure(&self, plain: &Plain, id: u64, number: u64, with_grads: bool) -> Self {
        let mut state = self.clone();
        state.number = state.number.min(number);
        if with_grads {
            state.forget_grads(plain);
        }
        state.number = state.number.max(state.floor);
        state
            .kept
            .values_mut()
            .filter(|kept| kept.id > id)
            .for_each(Kept::fail);
        state
    }

    /// After a failure of the step that was asked for now.
    fn after_failed_step(&self, plain: &Plain) -> Self {
        let mut state = self.clone();
        state.forget_grads(plain);
        state
    }

    /// Gradients since the last step are gone, and the calls can be made again.
    fn forget_grads(&mut self, plain: &Plain) {
        self.number = self
            .since
            .drain(..)
            .fold(self.number, u64::min)
            .max(self.floor);
        self.grads = plain.no_grads();
    }
}

/// A failure that was not told yet.
struct Pending {
    /// One of these is in the text of the error.
    marks: Vec<String>,
    /// Whether a step was asked for since, which will not happen.
    undone: bool,
    restore: State,
}

impl Pending {
    /// Whether an error tells of it, and of the steps that will not happen.
    fn is_told(&self, told: &Told) -> bool {
        names(&self.marks, told) && (!self.undone || told.text.contains(UNDONE))
    }
}

fn names(marks: &[String], told: &Told) -> bool {
    marks.iter().any(|mark| told.text.contains(mark.as_str()))
}

/// What must come of a call.
enum Fate {
    Fine,
    /// It cannot be asked for; nothing changes.
    Refused,
    /// It returns the failure.
    Fails(Vec<String>),
    /// It returns the failure, or its results.
    FailsLate(Vec<String>),
}

/// What a call must return if it returns at all.
enum Want {
    Value(Value),
    /// It cannot return.
    Never(&'static str),
}

/// A call that was followed.
enum Followed {
    /// It returned its results.
    Done,
    /// It returned an error.
    Failed,
}

/// What is expected of one engine.
struct Mind {
    plain: Plain,
    state: State,
    pending: Option<Pending>,
    /// A failure that a handle told; the engine may tell it once more.
    told: Vec<String>,
    next_call: u64,
    /// Weights that an engine dropped now may leave.
    weights: Vec<Values>,
    /// Buffers that it may leave.
    buffers: Vec<Values>,
}

struct Train {
    tag: usize,
    batch: Batch,
    loss: Loss,
    fault: Option<Fault>,
    outputs: bool,
    input_grads: bool,
}

impl Mind {
    fn new(spec: &EngineSpec, worker: &Worker) -> Self {
        let plain = Plain::new(spec, worker);
        let (weights, frozen) = plain.start();
        let state = fresh(&plain, weights.clone(), frozen.clone());
        let (weights, buffers) = (vec![weights], vec![frozen]);
        Self {
            plain,
            state,
            pending: None,
            told: Vec::new(),
            next_call: 0,
            weights,
            buffers,
        }
    }

    // ---- failures ----

    /// Follows the reply of a call that has a fate. `compute` says what it returns and what state
    /// it leaves; `restore` is the state if it fails.
    fn settle(
        &mut self,
        reply: &Reply,
        fate: Fate,
        restore: impl FnOnce(&Self) -> State,
        compute: impl FnOnce(&Self) -> (Want, State),
    ) -> Verdict<Followed> {
        let told = match &reply.result {
            Ok(value) => {
                self.returned(value, fate, restore, compute)
                    .map_err(|what| format!("{}: {what}", reply.call))?;
                return Ok(Followed::Done);
            }
            Err(told) => told,
        };
        if self.is_told(told) {
            return Ok(Followed::Failed);
        }
        match fate {
            Fate::Refused => Ok(Followed::Failed),
            Fate::Fails(marks) | Fate::FailsLate(marks) if names(&marks, told) => {
                match self.pending.take() {
                    Some(pending) if pending.undone && !told.text.contains(UNDONE) => {
                        return Err(format!(
                            "{} does not say that a step was undone: {}",
                            reply.call, told.text
                        ));
                    }
                    Some(pending) => self.restore(pending.restore),
                    None => {
                        let state = restore(self);
                        self.restore(state);
                    }
                }
                Ok(Followed::Failed)
            }
            Fate::Fails(marks) | Fate::FailsLate(marks) => Err(format!(
                "{} must fail with one of {marks:?}, not with: {}",
                reply.call, told.text
            )),
            Fate::Fine => Err(format!("{} failed: {}", reply.call, told.text)),
        }
    }

    fn returned(
        &mut self,
        value: &Value,
        fate: Fate,
        restore: impl FnOnce(&Self) -> State,
        compute: impl FnOnce(&Self) -> (Want, State),
    ) -> Verdict {
        // The engine has looked for failures: what a handle told will not be told again.
        self.told.clear();
        let marks = match fate {
            Fate::Refused => return Err("it was not refused".to_owned()),
            Fate::Fails(marks) => {
                return Err(format!("it succeeded, but must fail with one of {marks:?}"));
            }
            Fate::FailsLate(marks) => Some(marks),
            Fate::Fine => None,
        };
        let (want, after) = compute(self);
        match want {
            Want::Value(want) => same(&want, value)?,
            Want::Never(why) => return Err(format!("it returned {value:?}, but {why}")),
        }
        if let Some(marks) = marks {
            let restore = restore(self);
            self.pend(marks, restore);
        }
        self.state = after;
        if self
            .buffers
            .last()
            .is_none_or(|last| !Rc::ptr_eq(last, &self.state.frozen))
        {
            self.buffers.push(self.state.frozen.clone());
        }
        Ok(())
    }

    fn pend(&mut self, marks: Vec<String>, restore: State) {
        match &mut self.pending {
            // The first failure decides what is left.
            Some(pending) => pending.marks.extend(marks),
            None => {
                self.pending = Some(Pending {
                    marks,
                    undone: false,
                    restore,
                })
            }
        }
    }

    /// Whether an error tells of the failure that is pending, or again of one that a handle told.
    fn is_told(&mut self, told: &Told) -> bool {
        if let Some(pending) = self.pending.take_if(|pending| pending.is_told(told)) {
            self.restore(pending.restore);
            return true;
        }
        let again = names(&self.told, told);
        if again {
            self.told.clear();
        }
        again
    }

    /// A handle told of the failure; the engine goes back by its next call.
    fn told_by_handle(&mut self, told: &Told) -> bool {
        match self
            .pending
            .take_if(|pending| names(&pending.marks, told) || told.echo)
        {
            Some(pending) => {
                self.restore(pending.restore);
                self.told = pending.marks;
                true
            }
            None => names(&self.told, told),
        }
    }

    /// Goes back. What the caller did in between stays: forwards are gone, or dead.
    fn restore(&mut self, state: State) {
        self.told.clear();
        let left = std::mem::replace(&mut self.state, state);
        self.state.training = left.training;
        let restored = std::mem::take(&mut self.state.kept);
        for (tag, mut kept) in left.kept {
            match restored.get(&tag) {
                Some(restored) => kept.life = restored.life,
                None => kept.fail(),
            }
            self.state.kept.insert(tag, kept);
        }
        let State {
            kept,
            since,
            number,
            ..
        } = &mut self.state;
        let firsts = kept.values_mut().map(|kept| &mut kept.first_number);
        for first in firsts.chain(since) {
            *first = (*first).min(*number);
        }
        self.at_rest();
    }

    /// Nothing moves.
    fn at_rest(&mut self) {
        self.weights = self.state.newest.iter().cloned().collect();
        self.buffers = vec![self.state.frozen.clone()];
    }

    // ---- what is read ----

    fn synchronize(&mut self, reply: &Reply) -> Verdict {
        if let Err(told) = &reply.result {
            return if self.is_told(told) {
                Ok(())
            } else {
                Err(format!("it failed: {}", told.text))
            };
        }
        if let Some(pending) = &self.pending {
            return Err(format!("nobody was told of a failure, {:?}", pending.marks));
        }
        self.told.clear();
        // From now on calls read the newest weights.
        self.state.visible = self.state.newest.clone();
        self.at_rest();
        Ok(())
    }

    fn gradients(&self, reply: &Reply) -> Verdict {
        let value = reply.result.as_ref().map_err(|told| told.text.clone())?;
        let named = self.plain.named_grads(&self.state.grads).into_iter();
        let want = named
            .map(|(name, grad)| (name, grad.map(|grad| wide(&grad))))
            .collect();
        same(&Value::Gradients(want), value)
    }

    fn weights(&self, reply: &Reply) -> Verdict {
        let value = reply.result.as_ref().map_err(|told| told.text.clone())?;
        let Value::Left(left) = value else {
            return Err("it gave something else".to_owned());
        };
        let state = &self.state;
        let newest = state
            .newest
            .as_ref()
            .ok_or("a step that failed was not told")?;
        same_count("steps", state.steps, left.steps)?;
        same_count("nonfinite_steps", state.skipped, left.nonfinite)?;
        same_named(
            "weight",
            &self.named_weights(newest, &state.frozen),
            &left.weights,
        )?;
        match &left.copies {
            Some(copies) => self.same_copies(copies),
            None => Ok(()),
        }
    }

    fn named_weights(&self, trained: &Values, frozen: &Values) -> Vec<Named<Vec<u64>>> {
        let params = self.plain.params.iter().enumerate();
        let values = params.map(|(at, (name, param))| match param.is_trainable() {
            true => (name.clone(), wide(&trained[at])),
            false => (name.clone(), wide(&frozen[at])),
        });
        values.collect()
    }

    fn same_copies(&self, left: &[Named<Vec<Vec<u64>>>]) -> Verdict {
        let copies = &self.state.copies;
        let trained = self
            .plain
            .params
            .iter()
            .enumerate()
            .filter(|(_, (_, param))| param.is_trainable());
        for ((at, (name, _)), (_, got)) in trained.zip(left) {
            let values = std::iter::once(&copies.values[at]).chain(&copies.moments[at]);
            for (which, (want, got)) in values.zip(got).enumerate() {
                same_bits(&format!("copy {which} of {name}"), &wide(want), got)?;
            }
        }
        Ok(())
    }

    // ---- calls ----

    fn number_call(&mut self) -> u64 {
        self.next_call += 1;
        self.next_call
    }

    /// The weights that a call reads; `None` if they will never be.
    fn readable(&self, has_gradients: bool) -> &Option<Values> {
        if has_gradients {
            &self.state.visible
        } else {
            &self.state.newest
        }
    }

    /// What a call that is submitted now reads; `None` if those weights will never be.
    fn terms(&self, has_gradients: bool) -> Option<Terms> {
        let State {
            frozen,
            number,
            training,
            ..
        } = &self.state;
        let weights = self.readable(has_gradients).clone()?;
        Some(Terms {
            weights,
            frozen: frozen.clone(),
            number: *number,
            training: *training,
        })
    }

    /// The state after a call was submitted.
    fn after_submission(&self) -> State {
        let mut state = self.state.clone();
        state.number += u64::from(state.training);
        state
    }

    fn train(&mut self, call: &Train, replies: &mut Replies<'_>) -> Verdict {
        let reply = replies.get("train")?;
        let id = self.number_call();
        let x = models::input(&self.plain.spec, &call.batch, call.tag, None);
        let mut grads = None;
        let followed = self.settle(
            reply,
            fate(call.tag, call.fault),
            |mind| {
                mind.state
                    .after_failure(&mind.plain, id, mind.state.number, true)
            },
            |mind| {
                let parts = mind.plain.parts(&x, call.batch.parts(), call.input_grads);
                let (want, after, found) = mind.fused(call, &parts);
                grads = Some(found);
                (want, after)
            },
        )?;
        match (followed, grads) {
            (Followed::Done, Some(grads)) if call.input_grads => self.input_grads(grads, replies),
            _ => Ok(()),
        }
    }

    /// Forward, loss and backward over `parts`.
    fn fused(
        &self,
        call: &Train,
        parts: &[crate::plain::Part],
    ) -> (Want, State, Vec<Option<Tensor>>) {
        let mut state = self.after_submission();
        let Some(terms) = self.terms(true) else {
            return (
                Want::Never("the step whose weights it reads failed"),
                state,
                Vec::new(),
            );
        };
        let labels = models::labels(
            self.plain.spec.dtype,
            &call.batch,
            call.loss,
            call.tag,
            None,
        );
        let mut losses = Vec::new();
        let mut seed = |m: usize, output: &Tensor| {
            let label = self.plain.cut(&labels, parts.len(), m);
            let (loss, grad) = self.plain.loss(call.loss, output, &label);
            losses.push(loss);
            grad
        };
        let passed = self
            .plain
            .call(&terms, parts, &state.grads, Some(&mut seed));
        let total: f64 = losses.iter().fold(0.0, |sum, loss| sum + loss);
        let losses = losses
            .iter()
            .chain([&total])
            .map(|loss| bits(*loss))
            .collect();
        let outputs = call.outputs.then(|| all_rows(&passed.outputs));
        state.frozen = keep_if_same(&terms.frozen, passed.frozen);
        state.grads = passed.grads;
        state.since.push(terms.number);
        (
            Want::Value(Value::Losses(losses, outputs)),
            state,
            passed.input_grads,
        )
    }

    /// Input gradients that are waited for.
    fn input_grads(&mut self, grads: Vec<Option<Tensor>>, replies: &mut Replies<'_>) -> Verdict {
        let reply = replies.get("input gradients")?;
        match &reply.result {
            Ok(value) => {
                let read = |grad: &Option<Tensor>| grad.as_ref().map(tensor_bits);
                let want = Value::InputGrads(grads.iter().map(read).collect());
                same(&want, value).map_err(|what| format!("input gradients: {what}"))
            }
            Err(told) if self.told_by_handle(told) => Ok(()),
            Err(told) => Err(format!("input gradients: {}", told.text)),
        }
    }

    fn forward(
        &mut self,
        tag: usize,
        batch: Batch,
        fault: Option<Fault>,
        kind: ForwardKind,
        replies: &mut Replies<'_>,
    ) -> Verdict {
        let reply = replies.get("forward")?;
        let id = self.number_call();
        // A fault in a backward shows there.
        let fate = match fate(tag, fault.filter(|fault| !fault.is_late())) {
            Fate::Fails(marks) if !kind.merged => Fate::FailsLate(marks),
            other => other,
        };
        self.settle(
            reply,
            fate,
            |mind| {
                mind.state
                    .after_failure(&mind.plain, id, mind.state.number, false)
            },
            |mind| {
                mind.run_forward(Kept {
                    id,
                    step: mind.state.steps + 1,
                    terms: mind.terms_or_stale(kind.requires_grad),
                    first_number: mind.state.number,
                    life: Life::Alive,
                    orphan: false,
                    tag,
                    batch,
                    kind,
                    fault,
                    outputs: None,
                })
            },
        )?;
        Ok(())
    }

    /// Terms whose weights do not matter where they will never be.
    fn terms_or_stale(&self, has_gradients: bool) -> Terms {
        let State {
            frozen,
            number,
            training,
            ..
        } = &self.state;
        let weights = self.state.copies.values.clone();
        self.terms(has_gradients).unwrap_or(Terms {
            weights,
            frozen: frozen.clone(),
            number: *number,
            training: *training,
        })
    }

    fn run_forward(&self, mut kept: Kept) -> (Want, State) {
        let mut state = self.after_submission();
        let readable = self.readable(kept.kind.requires_grad).is_some();
        let x = models::input(&self.plain.spec, &kept.batch, kept.tag, None);
        let parts = self.plain.parts(&x, kept.batch.parts(), false);
        let passed = self
            .plain
            .call(&kept.terms, &parts, &self.plain.no_grads(), None);
        let rows = all_rows(&passed.outputs);
        let want = match (kept.kind.merged, readable) {
            (true, true) => Want::Value(Value::Rows(rows.clone())),
            (true, false) => Want::Never("the step whose weights it reads failed"),
            (false, _) => Want::Value(Value::Done),
        };
        state.frozen = keep_if_same(&kept.terms.frozen, passed.frozen);
        kept.outputs = readable.then_some(rows);
        if kept.kind.keep {
            state.kept.insert(kept.tag, kept);
        }
        (want, state)
    }

    fn read(&mut self, of: usize, replies: &mut Replies<'_>) -> Verdict {
        let Some(kept) = self.state.kept.get(&of) else {
            return Ok(());
        };
        let reply = replies.get("read")?;
        match (&reply.result, &kept.outputs) {
            (Ok(_), _) if kept.life == Life::Dead => {
                Err("a forward that failed gave outputs".to_owned())
            }
            (Ok(_), None) => Err("a forward over weights that never were gave outputs".to_owned()),
            (Ok(value), Some(rows)) => same(&Value::Rows(rows.clone()), value),
            (Err(_), _) if kept.life != Life::Alive || self.pending.is_some() => Ok(()),
            // What it waited for may be gone with the engine.
            (Err(_), _) if kept.orphan && !kept.kind.merged => Ok(()),
            (Err(told), _) => Err(format!(
                "reading a forward that did not fail: {}",
                told.text
            )),
        }
    }

    fn backward(&mut self, of: usize, odd: Odd, replies: &mut Replies<'_>) -> Verdict {
        let kept = self.state.kept.remove(&of).filter(|kept| !kept.orphan);
        let Some(kept) = kept else { return Ok(()) };
        let reply = replies.get("backward")?;
        let stale = kept.step != self.state.steps + 1;
        let fate = match () {
            () if kept.life == Life::Dead || stale || !kept.kind.requires_grad => Fate::Refused,
            () => fate(kept.tag, kept.fault),
        };
        let mut grads = None;
        let (id, number) = (kept.id, kept.first_number);
        let doomed = self.pending.is_some();
        let followed = self.settle(
            reply,
            fate,
            |mind| mind.state.after_failure(&mind.plain, id, number, true),
            |mind| {
                let (after, found) = mind.run_backward(&kept, odd);
                grads = Some(found);
                (Want::Value(Value::Done), after)
            },
        )?;
        if let (Followed::Done, Some(pending), true) = (&followed, &mut self.pending, doomed) {
            // Its gradients will be gone with the others, so it is to be made again as well.
            let state = &mut pending.restore;
            state.number = state.number.min(number).max(state.floor);
        }
        match (followed, grads) {
            (Followed::Done, Some(grads)) if kept.kind.input_grads => {
                self.input_grads(grads, replies)
            }
            _ => Ok(()),
        }
    }

    fn run_backward(&self, kept: &Kept, odd: Odd) -> (State, Vec<Option<Tensor>>) {
        let batch = Batch { odd, ..kept.batch };
        let grads = models::labels(
            self.plain.spec.dtype,
            &batch,
            Loss::Weighted,
            kept.tag,
            None,
        );
        let x = models::input(&self.plain.spec, &kept.batch, kept.tag, None);
        let parts = self
            .plain
            .parts(&x, kept.batch.parts(), kept.kind.input_grads);
        let mut seed = |m: usize, _: &Tensor| self.plain.cut(&grads, parts.len(), m);
        let mut state = self.state.clone();
        let passed = self
            .plain
            .call(&kept.terms, &parts, &state.grads, Some(&mut seed));
        state.grads = passed.grads;
        state.since.push(kept.first_number);
        (state, passed.input_grads)
    }

    // ---- steps ----

    fn step(&mut self, work: Work, lag: Lag, replies: &mut Replies<'_>) -> Verdict {
        let reply = replies.get("step")?;
        let refused = match work {
            Work::Rule(update) => update.refused || self.plain.spec.rule == RuleKind::None,
            Work::Function(..) => false,
        };
        let too_late = lag > self.plain.spec.max_lag;
        // A function may run without gradients.
        let refused = refused || matches!(work, Work::Rule(_)) && self.state.since.is_empty();
        if refused || too_late {
            let same = |mind: &Self| mind.state.clone();
            return self
                .settle(reply, Fate::Refused, same, |mind| {
                    (Want::Never("it"), same(mind))
                })
                .map(drop);
        }
        let planned = self.plan_step(work, lag);
        let fate = match (&planned.fails, lag) {
            (None, _) => Fate::Fine,
            (Some(marks), Lag::Zero) => Fate::Fails(marks.clone()),
            (Some(marks), Lag::One) => Fate::FailsLate(marks.clone()),
        };
        let doomed = self.pending.is_some();
        let want = match (doomed, lag) {
            (true, Lag::Zero) => Want::Never("a call before it failed"),
            _ => Want::Value(Value::Done),
        };
        let streak_ends = planned.after.nonfinite == MOST_NONFINITE;
        let restore = |mind: &Self| {
            let state = mind.state.after_failed_step(&mind.plain);
            // Both are told once.
            State {
                nonfinite: if streak_ends { 0 } else { state.nonfinite },
                lost: false,
                ..state
            }
        };
        let followed = self.settle(reply, fate, restore, |_| (want, planned.after))?;
        if let Followed::Failed = followed {
            return Ok(());
        }
        if let (Some(pending), true) = (&mut self.pending, doomed) {
            pending.undone = true;
        }
        if lag == Lag::Zero {
            self.weights.clear();
        }
        self.weights.extend(self.state.newest.clone());
        match replies.take("report") {
            Some(reply) => self.report(reply, &planned.report),
            None => Ok(()),
        }
    }

    /// What a step does, and whether it fails by itself.
    fn plan_step(&self, work: Work, lag: Lag) -> PlannedStep {
        let mut after = self.state.clone();
        after.since.clear();
        after.grads = self.plain.no_grads();
        after.steps += 1;
        after.floor = after.number;
        let squared = self.plain.squared(&self.state.grads);
        let (newest, fails, report) = match work {
            _ if self.state.lost => (None, Some(vec![LOST.to_owned()]), Value::Done),
            Work::Rule(update) => self.plan_update(&update, squared, &mut after),
            Work::Function(function, tag) => self.plan_function(function, tag, squared, &mut after),
        };
        // A step behind a failed call will not happen.
        let newest = newest.filter(|_| fails.is_none() && self.pending.is_none());
        after.visible = match lag {
            Lag::Zero => newest.clone(),
            Lag::One => self.state.newest.clone(),
        };
        after.newest = newest;
        PlannedStep {
            after,
            fails,
            report,
        }
    }

    fn plan_update(
        &self,
        update: &UpdateSpec,
        squared: f64,
        after: &mut State,
    ) -> (Option<Values>, Option<Vec<String>>, Value) {
        let newest = self.state.newest.clone();
        let squared = squared * update.grad_scale * update.grad_scale;
        let skipped = !squared.is_finite();
        if skipped {
            after.nonfinite += 1;
            after.skipped += 1;
        } else {
            after.nonfinite = 0;
        }
        let updated = newest.as_ref().filter(|_| !skipped);
        let updated = updated.map(|weights| {
            self.plain
                .update(&after.copies, weights, &self.state.grads, update)
        });
        let newest = match updated {
            Some(updated) => {
                after.copies = updated.copies;
                Some(updated.weights)
            }
            None => newest,
        };
        let norm = (!skipped).then(|| bits(squared.sqrt()));
        let report = Value::Report {
            step: after.copies.steps,
            norm,
            skipped,
        };
        let fails = (after.nonfinite == MOST_NONFINITE)
            .then(|| vec!["in a row were not finite".to_owned()]);
        (newest, fails, report)
    }

    fn plan_function(
        &self,
        function: Function,
        tag: usize,
        squared: f64,
        after: &mut State,
    ) -> (Option<Values>, Option<Vec<String>>, Value) {
        let norm = squared.is_finite().then(|| bits(squared.sqrt()));
        let report = |step| Value::Report {
            step,
            norm,
            skipped: false,
        };
        if let Function::Fail { .. } = function {
            return (None, Some(vec![models::planned(tag)]), report(0));
        }
        let Some(newest) = &self.state.newest else {
            return (None, None, report(0));
        };
        let before = after.copies.clone();
        let updated = self
            .plain
            .apply(&before, newest, &self.state.grads, function);
        let values = before
            .values
            .iter()
            .flatten()
            .zip(updated.copies.values.iter().flatten());
        if values
            .into_iter()
            .any(|(old, new)| old.is_finite() && !new.is_finite())
        {
            return (None, Some(vec!["not finite".to_owned()]), report(0));
        }
        after.copies = updated.copies;
        (Some(updated.weights), None, report(after.copies.steps))
    }

    /// The report of a step that was ordered.
    fn report(&mut self, reply: &Reply, want: &Value) -> Verdict {
        match &reply.result {
            Ok(_) if self.pending.is_some() => {
                Err("a step that cannot happen was reported done".to_owned())
            }
            Ok(value) => {
                // It is done, whatever happens to the engine.
                self.weights = self.state.newest.iter().cloned().collect();
                same(want, value).map_err(|what| format!("report: {what}"))
            }
            Err(told) if self.told_by_handle(told) => Ok(()),
            Err(told) => Err(format!("report: {}", told.text)),
        }
    }

    // ---- between calls ----

    fn write(&mut self, param: usize, data: u64, replies: &mut Replies<'_>) -> Verdict {
        self.synchronize(replies.get("synchronize")?)?;
        let reply = replies.get("write")?;
        if let Err(told) = &reply.result {
            return Err(format!("a write between calls was refused: {}", told.text));
        }
        self.state.kept.clear();
        self.set_param(param, data);
        self.at_rest();
        Ok(())
    }

    /// The newest weights with other values of one parameter.
    fn set_param(&mut self, param: usize, data: u64) {
        let state = &mut self.state;
        let at = param % self.plain.params.len();
        let param = &self.plain.params[at].1;
        let values: Vec<f32> = models::written(data, param.shape().numel())
            .into_iter()
            .map(|value| value as f32)
            .collect();
        if !param.is_trainable() {
            Rc::make_mut(&mut state.frozen)[at] = values;
        } else if let Some(newest) = &mut state.newest {
            let copies = &mut Rc::make_mut(&mut state.copies.values)[at];
            // A copy that rounds to the new value is as good as before.
            let rounded = plain::round(copies, param.dtype());
            for ((copy, rounded), value) in copies.iter_mut().zip(rounded).zip(&values) {
                if rounded != *value {
                    *copy = *value;
                }
            }
            Rc::make_mut(newest)[at] = values;
            // Whoever writes the newest weights means the calls that follow to read them.
            state.visible = state.newest.clone();
        }
    }

    /// A write beside a step comes before it or after it, or is refused, or makes the next step
    /// fail.
    fn race(
        &mut self,
        param: usize,
        data: u64,
        lag: Lag,
        update: UpdateSpec,
        replies: &mut Replies<'_>,
    ) -> Verdict {
        self.synchronize(replies.get("synchronize")?)?;
        self.state.kept.clear();
        let before = self.state.clone();
        self.step(Work::Rule(update), lag, replies)?;
        let write = replies.get("write")?;
        self.synchronize(replies.get("synchronize")?)?;
        let weights = replies.get("weights")?;
        let stepped = std::mem::replace(&mut self.state, before);
        if write.result.is_err() {
            self.state = stepped;
            return self
                .weights(weights)
                .map_err(|what| format!("after a write that was refused: {what}"));
        }
        let happened = stepped.steps > self.state.steps;
        // Before the step. One that failed was reported and dropped its gradients, so that only
        // what it left counts.
        if happened {
            self.set_param(param, data);
            self.state = self.plan_step(Work::Rule(update), Lag::Zero).after;
            if self.weights(weights).is_ok() {
                self.state.visible = self.state.newest.clone();
                self.at_rest();
                return Ok(());
            }
        }
        // After it.
        self.state = stepped.clone();
        self.set_param(param, data);
        let found = self.weights(weights);
        if found.is_err() && happened && self.plain.spec.max_lag == Lag::One {
            self.state = State {
                lost: true,
                ..stepped
            };
        }
        self.at_rest();
        found.or_else(|what| {
            self.weights(weights)
                .map_err(|_| format!("after a write beside a step: {what}"))
        })
    }

    /// An engine that was dropped leaves the weights of some step that was asked for, and nothing
    /// in between.
    fn rebuild(&mut self, holds: bool, replies: &mut Replies<'_>) -> Verdict {
        let reply = replies.get("drop")?;
        let Ok(Value::Left(left)) = &reply.result else {
            return Err("nothing was left".to_owned());
        };
        let found = self
            .weights
            .iter()
            .flat_map(|weights| self.buffers.iter().map(move |frozen| (weights, frozen)));
        let mut closest = Err("no weights are known".to_owned());
        for (weights, frozen) in found {
            closest = same_named(
                "weight",
                &self.named_weights(weights, frozen),
                &left.weights,
            );
            if closest.is_ok() {
                let (weights, frozen) = (weights.clone(), frozen.clone());
                let mut kept = std::mem::take(&mut self.state.kept);
                if !holds {
                    kept.clear();
                }
                // Whether a failure that nobody was told of has reached them is not known.
                for kept in kept.values_mut().filter(|kept| !kept.orphan) {
                    kept.orphan = true;
                    if self.pending.is_some() && kept.life == Life::Alive {
                        kept.life = Life::Unsure;
                    }
                }
                self.state = State {
                    kept,
                    ..fresh(&self.plain, weights, frozen)
                };
                (self.pending, self.told) = (None, Vec::new());
                self.at_rest();
                return Ok(());
            }
        }
        closest.map_err(|what| format!("a dropped engine left a mixture of steps: {what}"))
    }
}

/// An engine that was just built.
fn fresh(plain: &Plain, weights: Values, frozen: Values) -> State {
    State {
        newest: Some(weights.clone()),
        visible: Some(weights.clone()),
        copies: plain.fresh_copies(&weights),
        frozen,
        grads: plain.no_grads(),
        since: Vec::new(),
        number: 0,
        floor: 0,
        steps: 0,
        nonfinite: 0,
        skipped: 0,
        lost: false,
        training: true,
        kept: BTreeMap::new(),
    }
}

/// What a step does.
#[derive(Clone, Copy)]
enum Work {
    Rule(UpdateSpec),
    Function(Function, usize),
}

struct PlannedStep {
    after: State,
    fails: Option<Vec<String>>,
    report: Value,
}

/// What a fault makes of a call that meets it.
fn fate(tag: usize, fault: Option<Fault>) -> Fate {
    match fault {
        None => Fate::Fine,
        Some(Fault::Forward { .. } | Fault::Loss { .. }) => Fate::Fails(vec![models::planned(tag)]),
        Some(Fault::Backward { .. }) => Fate::FailsLate(vec![models::planned(tag)]),
        Some(Fault::Label { .. } | Fault::Token { .. }) => {
            Fate::Fails(vec![models::out_of_range(tag)])
        }
    }
}

// ---- chains ----

struct Chain {
    tag: usize,
    batch: Batch,
    loss: Loss,
    fault: Option<(Side, Fault)>,
}

impl Chain {
    fn fault(&self, side: Side) -> Option<Fault> {
        self.fault
            .filter(|(at, _)| *at == side)
            .map(|(_, fault)| fault)
    }
}

/// The front's outputs go to the back, whose input gradients come back.
fn chain(front: &mut Mind, back: &mut Mind, call: &Chain, replies: &mut Replies<'_>) -> Verdict {
    if let Some(reply) = replies.take("synchronize") {
        back.synchronize(reply)?;
    }
    let Some(forward) = chain_forward(front, call, replies)? else {
        return Ok(());
    };
    let Some(grads) = chain_train(front, back, &forward, call, replies)? else {
        return Ok(());
    };
    let mut dead = false;
    if let Some(reply) = replies.take("synchronize") {
        let failed = front.pending.is_some();
        front.synchronize(reply)?;
        dead = failed;
    }
    let reply = replies.get("chain backward")?;
    let late = call
        .fault
        .map(|(_, fault)| fault)
        .filter(|fault| fault.is_late());
    let fate = if dead {
        Fate::Refused
    } else {
        fate(call.tag, late)
    };
    let (id, number) = (forward.id, forward.terms.number);
    let followed = front.settle(
        reply,
        fate,
        |mind| mind.state.after_failure(&mind.plain, id, number, true),
        |mind| {
            let mut state = mind.state.clone();
            let mut seed = |m: usize, _: &Tensor| grads[m].clone().expect("the loss depends on it");
            let passed = mind.plain.call(
                &forward.terms,
                &forward.parts,
                &state.grads,
                Some(&mut seed),
            );
            state.grads = passed.grads;
            state.since.push(number);
            (Want::Value(Value::Done), state)
        },
    );
    followed.map(drop)
}

/// The front's part of a chain.
struct ChainForward {
    id: u64,
    terms: Terms,
    parts: Vec<crate::plain::Part>,
    /// `None` where it reads weights that will never be, or fails.
    outputs: Option<Vec<Tensor>>,
}

fn chain_forward(
    front: &mut Mind,
    call: &Chain,
    replies: &mut Replies<'_>,
) -> Verdict<Option<ChainForward>> {
    let reply = replies.get("chain forward")?;
    let id = front.number_call();
    let fault = call.fault(Side::Front).filter(|fault| !fault.is_late());
    let fate = match fate(call.tag, fault) {
        Fate::Fails(marks) => Fate::FailsLate(marks),
        other => other,
    };
    let terms = front.terms_or_stale(true);
    let x = models::input(&front.plain.spec, &call.batch, call.tag, None);
    let parts = front.plain.parts(&x, call.batch.parts(), false);
    let mut outputs = None;
    let followed = front.settle(
        reply,
        fate,
        |mind| {
            mind.state
                .after_failure(&mind.plain, id, mind.state.number, false)
        },
        |mind| {
            let mut state = mind.after_submission();
            let passed = mind
                .plain
                .call(&terms, &parts, &mind.plain.no_grads(), None);
            outputs = Some(passed.outputs);
            state.frozen = keep_if_same(&terms.frozen, passed.frozen);
            (Want::Value(Value::Done), state)
        },
    )?;
    let readable = front.state.visible.is_some() && fault.is_none();
    Ok(match followed {
        Followed::Done => Some(ChainForward {
            id,
            terms,
            parts,
            outputs: outputs.filter(|_| readable),
        }),
        Followed::Failed => None,
    })
}

/// The back's part; its input gradients, unless it failed.
fn chain_train(
    front: &Mind,
    back: &mut Mind,
    forward: &ChainForward,
    call: &Chain,
    replies: &mut Replies<'_>,
) -> Verdict<Option<Vec<Option<Tensor>>>> {
    let reply = replies.get("chain train")?;
    let id = back.number_call();
    let front_marks = front
        .pending
        .as_ref()
        .map_or(Vec::new(), |pending| pending.marks.clone());
    let fate = match (&forward.outputs, &reply.result) {
        (None, _) => Fate::Fails(front_marks),
        // The front's failure may reach it or not.
        (Some(_), Err(told)) if names(&front_marks, told) => Fate::Fails(front_marks),
        _ => fate(call.tag, call.fault(Side::Back)),
    };
    let train = Train {
        tag: call.tag,
        batch: call.batch,
        loss: call.loss,
        fault: None,
        outputs: false,
        input_grads: true,
    };
    let mut grads = None;
    let followed = back.settle(
        reply,
        fate,
        |mind| {
            mind.state
                .after_failure(&mind.plain, id, mind.state.number, true)
        },
        |mind| {
            let outputs = forward
                .outputs
                .as_ref()
                .expect("a call without its input fails");
            let parts: Vec<_> = outputs
                .iter()
                .map(|x| mind.plain.part(x.clone(), true))
                .collect();
            let (want, after, found) = mind.fused(&train, &parts);
            grads = Some(found);
            (want, after)
        },
    )?;
    Ok(match followed {
        Followed::Done => grads,
        Followed::Failed => None,
    })
}

// ---- comparisons ----

/// The same pointer for the same values, so that a change can be seen.
fn keep_if_same(old: &Values, new: Values) -> Values {
    if *old == new { old.clone() } else { new }
}

fn wide(values: &[f32]) -> Vec<u64> {
    values.iter().map(|value| bits(f64::from(*value))).collect()
}

fn tensor_bits(tensor: &Tensor) -> Vec<u64> {
    tensor
        .to_f64_vec()
        .expect("a tensor of the plain worker")
        .into_iter()
        .map(bits)
        .collect()
}

fn all_rows(outputs: &[Tensor]) -> Vec<u64> {
    outputs.iter().flat_map(tensor_bits).collect()
}

fn same(want: &Value, got: &Value) -> Verdict {
    match (want, got) {
        (Value::Losses(want, want_rows), Value::Losses(got, got_rows)) => {
            same_bits("losses", want, got)?;
            match (want_rows, got_rows) {
                (Some(want), Some(got)) => same_bits("outputs", want, got),
                (None, None) => Ok(()),
                _ => Err("outputs are there, or not".to_owned()),
            }
        }
        (Value::Rows(want), Value::Rows(got)) => same_bits("outputs", want, got),
        (Value::Gradients(want), Value::Gradients(got)) => {
            let some = |all: &[Named<Option<Vec<u64>>>]| -> Vec<Named<Vec<u64>>> {
                all.iter()
                    .map(|(name, grad)| (name.clone(), grad.clone().unwrap_or_default()))
                    .collect()
            };
            same_named("gradient", &some(want), &some(got))
        }
        (
            Value::Report {
                skipped: true,
                step,
                ..
            },
            Value::Report {
                skipped: true,
                step: got,
                ..
            },
        ) => {
            // A norm that is not finite may be any.
            if step == got {
                Ok(())
            } else {
                Err(format!("step {got} instead of {step}"))
            }
        }
        _ if want == got => Ok(()),
        _ => Err(format!("{got:?} instead of {want:?}")),
    }
}

fn same_count(what: &str, want: u64, got: Option<u64>) -> Verdict {
    match got {
        Some(got) if got != want => Err(format!("{what}() is {got} instead of {want}")),
        _ => Ok(()),
    }
}

fn same_named(what: &str, want: &[Named<Vec<u64>>], got: &[Named<Vec<u64>>]) -> Verdict {
    if want.len() != got.len() {
        return Err(format!("{} {what}s instead of {}", got.len(), want.len()));
    }
    for ((name, want), (other, got)) in want.iter().zip(got) {
        if name != other {
            return Err(format!("{what} {other} instead of {name}"));
        }
        same_bits(&format!("{what} {name}"), want, got)?;
    }
    Ok(())
}

fn same_bits(what: &str, want: &[u64], got: &[u64]) -> Verdict {
    if want.len() != got.len() {
        return Err(format!(
            "{what}: {} values instead of {}",
            got.len(),
            want.len()
        ));
    }
    match want.iter().zip(got).position(|(want, got)| want != got) {
        None => Ok(()),
        Some(at) => {
            let number = |bits: &[u64]| f64::from_bits(bits[at]);
            Err(format!(
                "{what}: value {at} is {} instead of {}",
                number(got),
                number(want)
            ))
        }
    }
}
