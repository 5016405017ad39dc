//! Walks a template's tree and writes its text.
//!
//! Scopes are Jinja2's: loops, macros, `with`, block sets and `generation` open one, `if` does not; what is set
//! inside is gone after it, and macros see the scope they were defined in.
//!
//! # Invariants
//! - Every expression and statement takes a step of [`super::limits`] before it does anything.
//! - No more than [`MAX_DEPTH`] of them are nested, through macros too.
//! - All scopes that hold a macro, and all namespaces, are emptied at the end: they can refer to themselves.

use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use super::limits::{reserve, spend, step};
use super::parse::{Args, Body, Cmp, Expr, For, Literal, MacroDef, Op, Stmt, StmtKind, Target};
use super::value::{Items, Namespace, Value};
use super::{Fault, filters, methods, ops, predicates};

/// How deep expressions and statements may be nested while rendering.
const MAX_DEPTH: usize = 600;

/// Variables, and where to look on.
#[derive(Debug)]
pub(super) struct Scope {
    vars: RefCell<Vec<(String, Value)>>,
    parent: Option<Rc<Scope>>,
}

impl Scope {
    pub(super) fn root(vars: Vec<(String, Value)>) -> Rc<Self> {
        Rc::new(Self { vars: RefCell::new(vars), parent: None })
    }

    fn inner(self: &Rc<Self>) -> Rc<Self> {
        Rc::new(Self { vars: RefCell::new(Vec::new()), parent: Some(self.clone()) })
    }

    fn find(&self, name: &str) -> Option<Value> {
        let mut scope = self;
        loop {
            if let Some((_, value)) = scope.vars.borrow().iter().find(|(n, _)| n == name) {
                return Some(value.clone());
            }
            scope = scope.parent.as_ref()?;
        }
    }

    fn set(&self, name: &str, value: Value) {
        let mut vars = self.vars.borrow_mut();
        match vars.iter_mut().find(|(n, _)| n == name) {
            Some(var) => var.1 = value,
            None => vars.push((name.to_string(), value)),
        }
    }
}

/// A macro with the scope it was defined in.
#[derive(Debug)]
pub(super) struct Macro {
    def: Arc<MacroDef>,
    scope: Rc<Scope>,
}

/// What `loop` refers to.
#[derive(Debug)]
pub(super) struct LoopState {
    pub(super) items: Rc<Items>,
    pub(super) index: Cell<usize>,
    pub(super) depth: usize,
    pub(super) changed: RefCell<Option<Vec<Value>>>,
    recursive: Option<(Arc<For>, Rc<Scope>)>,
}

/// Arguments of a call, evaluated.
#[derive(Debug, Default)]
pub(super) struct Given {
    pub(super) positional: Vec<Value>,
    pub(super) named: Vec<(String, Value)>,
}

impl Given {
    pub(super) fn of(positional: Vec<Value>) -> Self {
        Self { positional, named: Vec::new() }
    }

    /// The arguments in the order of `names`; more than those are refused.
    pub(super) fn bind<const N: usize>(
        &self,
        what: &str,
        names: [&str; N],
    ) -> Result<[Option<Value>; N], Fault> {
        if self.positional.len() > N {
            return Err(Fault::new(format!("{what} takes at most {N} arguments")));
        }
        let mut bound = std::array::from_fn(|i| self.positional.get(i).cloned());
        for (name, value) in &self.named {
            match names.iter().position(|n| n == name) {
                Some(i) if bound[i].is_none() => bound[i] = Some(value.clone()),
                _ => return Err(Fault::new(format!("{what} has no argument '{name}' left"))),
            }
        }
        Ok(bound)
    }
}

/// What a statement did besides writing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Flow {
    Next,
    Break,
    Continue,
}

/// One render.
#[derive(Debug)]
pub(super) struct Interp {
    line: u32,
    depth: usize,
    loops: usize,
    /// The text so far; captures stand behind it.
    out: Vec<String>,
    /// Bytes of text of generation blocks in the main output.
    pub(super) spans: Vec<Range<usize>>,
    /// A generation block was captured (in a macro, for instance), so its place is unknown.
    pub(super) span_lost: bool,
    /// Seconds since 1970 for `strftime_now`.
    pub(super) now: i64,
    scopes: Vec<Rc<Scope>>,
    namespaces: Vec<Rc<Namespace>>,
}

impl Drop for Interp {
    fn drop(&mut self) {
        for scope in &self.scopes {
            scope.vars.take();
        }
        for namespace in &self.namespaces {
            namespace.take();
        }
    }
}

impl Interp {
    pub(super) fn new(now: i64) -> Self {
        Self {
            line: 1,
            depth: 0,
            loops: 0,
            out: vec![String::new()],
            spans: Vec::new(),
            span_lost: false,
            now,
            scopes: Vec::new(),
            namespaces: Vec::new(),
        }
    }

    /// Renders a template; errors carry the line they happened in.
    pub(super) fn run(&mut self, body: &Body, root: &Rc<Scope>) -> Result<String, Fault> {
        // The last step reports what was counted after the one before it.
        let done = self.body(body, root).and_then(|_| step());
        done.map_err(|fault| fault.or_at(self.line))?;
        Ok(self.out.swap_remove(0))
    }

    fn emit(&mut self, text: &str) -> Result<(), Fault> {
        let held: usize = self.out.iter().map(String::len).sum();
        reserve(held + text.len())?;
        super::limits::spend_bytes(text.len());
        if let Some(out) = self.out.last_mut() {
            out.push_str(text);
        }
        Ok(())
    }

    /// The text that `inner` writes.
    fn capture(&mut self, inner: impl FnOnce(&mut Self) -> Result<(), Fault>) -> Result<String, Fault> {
        self.out.push(String::new());
        let result = inner(self);
        let text = self.out.pop().unwrap_or_default();
        result.map(|()| text)
    }

    fn deeper<T>(&mut self, inner: impl FnOnce(&mut Self) -> Result<T, Fault>) -> Result<T, Fault> {
        step()?;
        if self.depth >= MAX_DEPTH {
            return Err(Fault::new(format!(
                "nested deeper than {MAX_DEPTH} levels (a macro that calls itself?)"
            )));
        }
        self.depth += 1;
        let result = inner(self);
        self.depth -= 1;
        result
    }

    fn body(&mut self, body: &[Stmt], scope: &Rc<Scope>) -> Result<Flow, Fault> {
        for stmt in body {
            self.line = stmt.line;
            let flow = self.deeper(|i| i.statement(&stmt.kind, scope))?;
            if flow != Flow::Next {
                return Ok(flow);
            }
        }
        Ok(Flow::Next)
    }

    fn statement(&mut self, kind: &StmtKind, scope: &Rc<Scope>) -> Result<Flow, Fault> {
        match kind {
            StmtKind::Data(text) => self.emit(text)?,
            StmtKind::Print(expr) => {
                let value = self.eval(expr, scope)?;
                match &value {
                    Value::Str(text) => self.emit(text)?,
                    other => self.emit(&other.print())?,
                }
            }
            StmtKind::Set(target, expr) => {
                let value = self.eval(expr, scope)?;
                self.assign(target, value, scope)?;
            }
            StmtKind::SetBlock(target, chain, body) => {
                let text = self.captured(body, &scope.inner())?;
                let value = self.apply_chain(Value::str(text), chain, scope)?;
                self.assign(target, value, scope)?;
            }
            StmtKind::If(arms, otherwise) => {
                for (test, body) in arms {
                    if self.eval(test, scope)?.truthy() {
                        return self.body(body, scope);
                    }
                }
                return self.body(otherwise, scope);
            }
            StmtKind::For(def) => {
                let items = self.eval(&def.iter, scope)?;
                self.for_loop(def, items, scope, 1)?;
            }
            StmtKind::Macro(def) => {
                spend(100);
                let value = Value::Macro(Rc::new(Macro { def: def.clone(), scope: scope.clone() }));
                self.scopes.push(scope.clone());
                scope.set(&def.name, value);
            }
            StmtKind::CallBlock(def, call) => self.call_block(def, call, scope)?,
            StmtKind::FilterBlock(chain, body) => {
                let text = self.captured(body, &scope.inner())?;
                let value = self.apply_chain(Value::str(text), chain, scope)?;
                self.emit(&value.print())?;
            }
            StmtKind::With(bindings, body) => {
                let inner = scope.inner();
                for (target, expr) in bindings {
                    let value = self.eval(expr, scope)?;
                    self.assign(target, value, &inner)?;
                }
                return self.body(body, &inner);
            }
            StmtKind::Generation(body) => self.generation(body, scope)?,
            StmtKind::Block(body) => _ = self.body(body, &scope.inner())?,
            StmtKind::Break => return Ok(Flow::Break),
            StmtKind::Continue => return Ok(Flow::Continue),
        }
        Ok(Flow::Next)
    }

    fn captured(&mut self, body: &[Stmt], scope: &Rc<Scope>) -> Result<String, Fault> {
        self.capture(|i| i.body(body, scope).map(|_| ()))
    }

    fn generation(&mut self, body: &[Stmt], scope: &Rc<Scope>) -> Result<(), Fault> {
        let text = self.captured(body, &scope.inner())?;
        if self.out.len() > 1 {
            self.span_lost = true;
        } else {
            let start = self.out[0].len();
            self.spans.push(start..start + text.len());
        }
        self.emit(&text)
    }

    fn call_block(&mut self, def: &Arc<MacroDef>, call: &Expr, scope: &Rc<Scope>) -> Result<(), Fault> {
        let Expr::Call(function, args) = call else { return Err(Fault::new("'call' needs a call")) };
        self.scopes.push(scope.clone());
        let caller = Value::Macro(Rc::new(Macro { def: def.clone(), scope: scope.clone() }));
        let function = self.eval(function, scope)?;
        let mut given = self.args(args, scope)?;
        given.named.push(("caller".into(), caller));
        let value = self.call(&function, given)?;
        self.emit(&value.print())
    }

    fn apply_chain(
        &mut self,
        mut value: Value,
        chain: &[(String, Args)],
        scope: &Rc<Scope>,
    ) -> Result<Value, Fault> {
        for (name, args) in chain {
            let given = self.args(args, scope)?;
            value = filters::apply(self, name, &value, &given)?;
        }
        Ok(value)
    }

    fn for_loop(
        &mut self,
        def: &Arc<For>,
        iter: Value,
        scope: &Rc<Scope>,
        depth: usize,
    ) -> Result<(), Fault> {
        let mut items = iter.walk()?;
        if let Some(filter) = &def.filter {
            let mut kept = Vec::new();
            for item in items {
                let inner = scope.inner();
                self.assign(&def.target, item.clone(), &inner)?;
                if self.eval(filter, &inner)?.truthy() {
                    kept.push(item);
                }
            }
            items = kept;
        }
        if items.is_empty() {
            self.body(&def.otherwise, &scope.inner())?;
            return Ok(());
        }
        let items = Value::items(items);
        let recursive = def.recursive.then(|| (def.clone(), scope.clone()));
        let (index, changed) = (Cell::new(0), RefCell::new(None));
        let state = Rc::new(LoopState { items, index, depth, changed, recursive });
        self.loops += 1;
        let mut result = Ok(());
        for at in 0..state.items.len() {
            state.index.set(at);
            let inner = scope.inner();
            inner.set("loop", Value::Loop(state.clone()));
            let flow = step()
                .and_then(|()| self.assign(&def.target, state.items[at].clone(), &inner))
                .and_then(|()| self.body(&def.body, &inner));
            match flow {
                Ok(Flow::Break) => break,
                Ok(_) => {}
                Err(fault) => {
                    result = Err(fault);
                    break;
                }
            }
        }
        self.loops -= 1;
        result
    }

    fn assign(&mut self, target: &Target, value: Value, scope: &Rc<Scope>) -> Result<(), Fault> {
        match target {
            Target::Name(name) => scope.set(name, value),
            Target::Field(name, field) => {
                let Some(Value::Namespace(fields)) = scope.find(name) else {
                    return Err(Fault::new(format!(
                        "cannot assign '{name}.{field}': '{name}' is no namespace"
                    )));
                };
                if field.starts_with('_') {
                    return Err(Fault::new(format!("a namespace cannot have '{field}'; rename it")));
                }
                set_field(&fields, field, value);
            }
            Target::Many(targets) => {
                let values = value.walk()?;
                if values.len() != targets.len() {
                    let (have, need) = (values.len(), targets.len());
                    return Err(Fault::new(format!("{have} values cannot be unpacked into {need} names")));
                }
                for (target, value) in targets.iter().zip(values) {
                    self.assign(target, value, scope)?;
                }
            }
        }
        Ok(())
    }

    /// The value of an expression.
    fn eval(&mut self, expr: &Expr, scope: &Rc<Scope>) -> Result<Value, Fault> {
        self.deeper(|i| i.eval_inner(expr, scope))
    }

    fn eval_inner(&mut self, expr: &Expr, scope: &Rc<Scope>) -> Result<Value, Fault> {
        Ok(match expr {
            Expr::Const(literal) => match literal {
                Literal::None => Value::None,
                Literal::Bool(b) => Value::Bool(*b),
                Literal::Int(i) => Value::Int(*i),
                Literal::Float(f) => Value::Float(*f),
                Literal::Str(s) => Value::str(s.as_str()),
            },
            Expr::Name(name) => match scope.find(name) {
                Some(value) => value,
                None => filters::global(name).unwrap_or_else(|| Value::undefined(format!("'{name}'"))),
            },
            Expr::List(items) => Value::list(self.eval_all(items, scope)?),
            Expr::Tuple(items) => Value::tuple(self.eval_all(items, scope)?),
            Expr::Dict(pairs) => {
                let mut entries = Vec::with_capacity(pairs.len());
                for (key, value) in pairs {
                    entries.push((self.eval(key, scope)?, self.eval(value, scope)?));
                }
                Value::dict(entries)
            }
            Expr::Attr(of, name) => methods::attribute(&self.eval(of, scope)?, name)?,
            Expr::Item(of, index) => {
                let of = self.eval(of, scope)?;
                methods::item(&of, &self.eval(index, scope)?)?
            }
            Expr::Slice(of, parts) => {
                let of = self.eval(of, scope)?;
                let mut bounds = [Value::None, Value::None, Value::None];
                for (bound, part) in bounds.iter_mut().zip(parts.iter()) {
                    if let Some(part) = part {
                        *bound = self.eval(part, scope)?;
                    }
                }
                ops::slice(&of, bounds)?
            }
            Expr::Call(function, args) => {
                let function = self.eval(function, scope)?;
                let given = self.args(args, scope)?;
                self.call(&function, given)?
            }
            Expr::Filter(of, name, args) => {
                let of = self.eval(of, scope)?;
                let given = self.args(args, scope)?;
                filters::apply(self, name, &of, &given)?
            }
            Expr::Test { of, name, args, negated } => {
                let of = self.eval(of, scope)?;
                let given = self.args(args, scope)?;
                Value::Bool(predicates::check(name, &of, &given.positional)? != *negated)
            }
            _ => return self.eval_operator(expr, scope),
        })
    }

    fn eval_operator(&mut self, expr: &Expr, scope: &Rc<Scope>) -> Result<Value, Fault> {
        Ok(match expr {
            Expr::Binary(op, left, right) => {
                let left = self.eval(left, scope)?;
                ops::binary(*op, &left, &self.eval(right, scope)?)?
            }
            Expr::Compare(left, rest) => Value::Bool(self.compare(left, rest, scope)?),
            Expr::And(left, right) => {
                let left = self.eval(left, scope)?;
                if left.truthy() { self.eval(right, scope)? } else { left }
            }
            Expr::Or(left, right) => {
                let left = self.eval(left, scope)?;
                if left.truthy() { left } else { self.eval(right, scope)? }
            }
            Expr::Not(of) => Value::Bool(!self.eval(of, scope)?.truthy()),
            Expr::Neg(of) => match self.eval(of, scope)? {
                // Zero minus zero would lose the sign.
                Value::Float(f) => Value::Float(-f),
                value => ops::binary(Op::Sub, &Value::Int(0), &value)?,
            },
            Expr::Pos(of) => ops::binary(Op::Add, &Value::Int(0), &self.eval(of, scope)?)?,
            Expr::Concat(parts) => {
                let mut text = String::new();
                for part in self.eval_all(parts, scope)? {
                    match &part {
                        Value::Str(part) => {
                            reserve(text.len() + part.len())?;
                            text.push_str(part);
                        }
                        other => text.push_str(&other.print()),
                    }
                    reserve(text.len())?;
                }
                Value::str(text)
            }
            Expr::If { test, then, other } => {
                if self.eval(test, scope)?.truthy() {
                    self.eval(then, scope)?
                } else {
                    match other {
                        Some(other) => self.eval(other, scope)?,
                        None => Value::undefined("the result of an 'if' without 'else'"),
                    }
                }
            }
            _ => Value::None,
        })
    }

    fn compare(&mut self, left: &Expr, rest: &[(Cmp, Expr)], scope: &Rc<Scope>) -> Result<bool, Fault> {
        let mut left = self.eval(left, scope)?;
        for (cmp, right) in rest {
            let right = self.eval(right, scope)?;
            if let (Some(a), Some(b)) = (left.as_str(), right.as_str()) {
                super::limits::spend_bytes(a.len().max(b.len()));
            }
            if !predicates::compare(*cmp, &left, &right)? {
                return Ok(false);
            }
            left = right;
        }
        Ok(true)
    }

    fn eval_all(&mut self, items: &[Expr], scope: &Rc<Scope>) -> Result<Vec<Value>, Fault> {
        items.iter().map(|item| self.eval(item, scope)).collect()
    }

    fn args(&mut self, args: &Args, scope: &Rc<Scope>) -> Result<Given, Fault> {
        let mut given = Given::of(self.eval_all(&args.positional, scope)?);
        for (name, value) in &args.named {
            given.named.push((name.clone(), self.eval(value, scope)?));
        }
        if let Some(star) = &args.star {
            given.positional.extend(self.eval(star, scope)?.walk()?);
        }
        if let Some(star) = &args.star_star {
            let Value::Dict(dict) = self.eval(star, scope)? else {
                return Err(Fault::new("'**' needs a mapping"));
            };
            given.named.extend(dict.entries().iter().map(|(k, v)| (k.print(), v.clone())));
        }
        Ok(given)
    }

    /// Calls a macro, a method or a function.
    pub(super) fn call(&mut self, function: &Value, given: Given) -> Result<Value, Fault> {
        match function {
            Value::Macro(of) => self.call_macro(&of.clone(), given),
            Value::Method(bound) => methods::call(&bound.0, bound.1, &given),
            Value::Function("namespace") => {
                spend(100);
                let fields = filters::pairs_of("namespace", &given)?;
                if fields.iter().any(|(name, _)| name.starts_with('_')) {
                    return Err(Fault::new("a namespace cannot have names that begin with '_'; rename them"));
                }
                let namespace = Rc::new(RefCell::new(fields));
                self.namespaces.push(namespace.clone());
                Ok(Value::Namespace(namespace))
            }
            Value::Function(name) => filters::call_global(self, name, &given),
            Value::Loop(state) => {
                let Some((def, scope)) = &state.recursive else {
                    return Err(Fault::new("this loop is not recursive; write 'recursive' in its 'for'"));
                };
                let [items] = given.bind("loop", ["iterable"])?;
                let items = items.unwrap_or_else(|| Value::undefined("the loop's argument"));
                let depth = state.depth + 1;
                self.deeper(|i| i.capture(|i| i.for_loop(def, items, scope, depth))).map(Value::str)
            }
            Value::Undefined(what) => Err(Fault::new(format!("{what} is undefined"))),
            other => Err(Fault::new(format!("'{}' object is not callable", other.kind()))),
        }
    }

    fn call_macro(&mut self, of: &Macro, given: Given) -> Result<Value, Fault> {
        let def = of.def.clone();
        let inner = of.scope.inner();
        let mut named = given.named;
        let mut positional = given.positional.into_iter();
        for (name, default) in &def.params {
            let by_name = named.iter().position(|(n, _)| n == name).map(|at| named.remove(at).1);
            let value = match (positional.next(), by_name) {
                (Some(_), Some(_)) => {
                    return Err(Fault::new(format!("macro '{}' got '{name}' twice", def.name)));
                }
                (Some(value), None) | (None, Some(value)) => value,
                (None, None) => match default {
                    Some(default) => self.eval(default, &inner)?,
                    None => Value::undefined(format!("parameter '{name}' was not provided and")),
                },
            };
            inner.set(name, value);
        }
        let caller = named.iter().position(|(n, _)| n == "caller").map(|at| named.remove(at).1);
        inner.set("caller", caller.unwrap_or_else(|| Value::undefined("No caller defined: 'caller'")));
        let extra: Vec<Value> = positional.collect();
        if !extra.is_empty() && !def.varargs {
            let most = def.params.len();
            return Err(Fault::new(format!("macro '{}' takes at most {most} arguments", def.name)));
        }
        if let Some((name, _)) = named.first().filter(|_| !def.kwargs) {
            return Err(Fault::new(format!("macro '{}' has no parameter '{name}'", def.name)));
        }
        inner.set("varargs", Value::tuple(extra));
        inner.set("kwargs", Value::dict(named.into_iter().map(|(k, v)| (Value::str(k), v))));
        let line = self.line;
        let text = self.deeper(|i| i.captured(&def.body, &inner))?;
        self.line = line;
        Ok(Value::str(text))
    }
}

pub(super) fn set_field(fields: &Namespace, name: &str, value: Value) {
    let mut fields = fields.borrow_mut();
    match fields.iter_mut().find(|(n, _)| n == name) {
        Some(field) => field.1 = value,
        None => fields.push((name.to_string(), value)),
    }
}
