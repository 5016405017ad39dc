//! Walks a template's tree and writes its text.
//!
//! Scopes are Jinja2's: loops, macros, `with`, block sets and `generation` open one, `if` does not;
//! what is set inside is gone after it, and macros see the scope they were defined in.
//!
//! # Invariants
//! - Every expression and statement takes a step of [`Budget`] before it does anything.
//! - No more than [`MAX_DEPTH`] of them are nested, through macros too. Scopes lie in each other as
//!   blocks do in the text, so the parser bounds them.
//! - The interpreter owns all that can change: namespaces, scopes that macros and recursive loops
//!   go back to, and what loops saw last. Values refer to these weakly, so nothing is left when the
//!   interpreter is dropped.

use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::rc::{Rc, Weak};

use crate::budget::{Budget, Buffer, Paid, Shared, Vector};
use crate::error::Fault;
use crate::parse::{
    Args, Body, Chain, Cmp, Expr, ExprKind, For, Literal, MacroDef, Node, Op, Stmt, StmtKind,
    Target,
};
use crate::value::{Dict, Items, Missing, Name, Namespace, Value, items};
use crate::{filters, methods, ops, predicates};

/// How deep expressions and statements may be nested while rendering.
const MAX_DEPTH: usize = 600;

/// Variables, and where to look on.
#[derive(Debug)]
pub(crate) struct Scope<'r> {
    vars: RefCell<Vector<'r, (&'r str, Value<'r>)>>,
    parent: Option<Shared<'r, Scope<'r>>>,
    /// Whether the interpreter keeps it for macros or loops.
    kept: Cell<bool>,
}

impl<'r> Scope<'r> {
    pub(crate) fn root(vars: Vector<'r, (&'r str, Value<'r>)>) -> Result<Shared<'r, Self>, Fault> {
        let budget = vars.budget();
        budget.share(Self {
            vars: RefCell::new(vars),
            parent: None,
            kept: Cell::new(false),
        })
    }

    /// A new scope within `parent`.
    fn inside(parent: &Shared<'r, Self>) -> Result<Shared<'r, Self>, Fault> {
        let budget = parent.budget();
        let vars = RefCell::new(Vector::new(budget));
        budget.share(Self {
            vars,
            parent: Some(parent.clone()),
            kept: Cell::new(false),
        })
    }

    fn find(&self, name: &str) -> Result<Option<Value<'r>>, Fault> {
        let mut scope = self;
        loop {
            let vars = scope.vars.borrow();
            let budget = vars.budget();
            budget.ticks(2 + vars.len())?;
            for (n, value) in vars.iter() {
                if budget.same(n, name)? {
                    return Ok(Some(value.clone()));
                }
            }
            match &scope.parent {
                Some(parent) => scope = parent,
                None => return Ok(None),
            }
        }
    }

    fn set(&self, name: &'r str, value: Value<'r>) -> Result<(), Fault> {
        let mut vars = self.vars.borrow_mut();
        let budget = vars.budget();
        budget.ticks(2 + vars.len())?;
        for var in vars.iter_mut() {
            if budget.same(var.0, name)? {
                var.1 = value;
                return Ok(());
            }
        }
        vars.push((name, value))
    }
}

/// A macro with the scope it was defined in.
#[derive(Debug, Clone)]
pub(crate) struct Macro<'r> {
    def: &'r MacroDef,
    scope: Weak<Paid<'r, Scope<'r>>>,
    /// Differs between macros.
    pub(crate) serial: u32,
}

/// What `loop` refers to.
#[derive(Debug)]
pub(crate) struct LoopState<'r> {
    pub(crate) items: Shared<'r, Items<'r>>,
    pub(crate) index: Cell<usize>,
    pub(crate) depth: usize,
    /// Which entry of [`Interp::seen`] is its own.
    seen: Cell<Option<usize>>,
    recursive: Option<(&'r For, Weak<Paid<'r, Scope<'r>>>)>,
}

/// Arguments of a call, evaluated.
#[derive(Debug)]
pub(crate) struct Given<'r> {
    pub(crate) positional: Vector<'r, Value<'r>>,
    pub(crate) named: Vector<'r, (Name<'r>, Value<'r>)>,
}

impl<'r> Given<'r> {
    pub(crate) fn new(budget: &'r Budget) -> Self {
        Self {
            positional: Vector::new(budget),
            named: Vector::new(budget),
        }
    }

    /// The argument of that name.
    pub(crate) fn find(&self, budget: &Budget, name: &str) -> Result<Option<Value<'r>>, Fault> {
        for (n, value) in self.named.iter() {
            budget.ticks(2)?;
            if budget.same(n.as_str(), name)? {
                return Ok(Some(value.clone()));
            }
        }
        Ok(None)
    }

    /// The arguments in the order of `names`; more than those are refused.
    pub(crate) fn bind<const N: usize>(
        &self,
        what: &str,
        names: [&str; N],
    ) -> Result<[Option<Value<'r>>; N], Fault> {
        if self.positional.len() > N {
            return Err(Fault::new(format_args!(
                "{what} takes at most {N} arguments"
            )));
        }
        let mut bound = std::array::from_fn(|i| self.positional.get(i).cloned());
        for (name, value) in self.named.iter() {
            match names.iter().position(|n| *n == name.as_str()) {
                Some(i) if bound[i].is_none() => bound[i] = Some(value.clone()),
                _ => {
                    let name = name.as_str();
                    return Err(Fault::new(format_args!(
                        "{what} has no argument '{name}' left"
                    )));
                }
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
pub(crate) struct Interp<'r> {
    pub(crate) budget: &'r Budget,
    line: u32,
    depth: usize,
    /// The text so far; captures stand behind it.
    out: Vector<'r, Buffer<'r>>,
    /// Bytes of text of generation blocks in the main output.
    spans: Vector<'r, Range<usize>>,
    /// A generation block was captured (in a macro, for instance), so its place is unknown.
    span_lost: bool,
    /// Seconds since 1970 for `strftime_now`.
    now_s: i64,
    macros: u32,
    kept: Vector<'r, Shared<'r, Scope<'r>>>,
    namespaces: Vector<'r, Shared<'r, Namespace<'r>>>,
    /// The arguments of the last `loop.changed`, by loop.
    seen: Vector<'r, Vector<'r, Value<'r>>>,
}

type ScopeRef<'s, 'r> = &'s Shared<'r, Scope<'r>>;

impl<'r> Interp<'r> {
    pub(crate) fn new(budget: &'r Budget, now_s: i64) -> Result<Self, Fault> {
        Ok(Self {
            budget,
            line: 1,
            depth: 0,
            out: Vector::of(budget, [Buffer::new(budget)])?,
            spans: Vector::new(budget),
            span_lost: false,
            now_s,
            macros: 0,
            kept: Vector::new(budget),
            namespaces: Vector::new(budget),
            seen: Vector::new(budget),
        })
    }

    /// Renders a template; errors carry the line they happened in.
    pub(crate) fn run(&mut self, body: &'r Body, root: ScopeRef<'_, 'r>) -> Result<(), Fault> {
        match self.body(body, root) {
            Ok(_) => Ok(()),
            Err(fault) => Err(fault.or_at(self.line)),
        }
    }

    /// The text, and where its generation blocks are if that is known.
    pub(crate) fn finish(mut self) -> (Option<Buffer<'r>>, Option<Vector<'r, Range<usize>>>) {
        (self.out.pop(), (!self.span_lost).then_some(self.spans))
    }

    fn emit(&mut self, text: &str) -> Result<(), Fault> {
        match self.out.last_mut() {
            Some(out) => out.push_str(text),
            None => Ok(()),
        }
    }

    fn emit_value(&mut self, value: &Value<'r>) -> Result<(), Fault> {
        match self.out.last_mut() {
            Some(out) => value.print(out),
            None => Ok(()),
        }
    }

    /// The text that `inner` writes.
    fn capture(
        &mut self,
        inner: impl FnOnce(&mut Self) -> Result<(), Fault>,
    ) -> Result<Buffer<'r>, Fault> {
        self.out.push(Buffer::new(self.budget))?;
        inner(self)?;
        self.out
            .pop()
            .ok_or_else(|| Fault::new("a capture has no text"))
    }

    /// Runs `inner` one level deeper, for one step.
    pub(crate) fn deeper<T>(
        &mut self,
        inner: impl FnOnce(&mut Self) -> Result<T, Fault>,
    ) -> Result<T, Fault> {
        self.budget.step()?;
        if self.depth >= MAX_DEPTH {
            return Err(Fault::new(format_args!(
                "nested deeper than {MAX_DEPTH} levels (a macro that calls itself?)"
            )));
        }
        self.depth += 1;
        let result = inner(self);
        self.depth -= 1;
        result
    }

    /// A link to a scope that outlives it: the interpreter keeps the scope to the end.
    fn keep(&mut self, scope: ScopeRef<'_, 'r>) -> Result<Weak<Paid<'r, Scope<'r>>>, Fault> {
        if !scope.kept.get() {
            self.kept.push(scope.clone())?;
            scope.kept.set(true);
        }
        Ok(Rc::downgrade(scope))
    }

    fn body(&mut self, body: &'r [Stmt], scope: ScopeRef<'_, 'r>) -> Result<Flow, Fault> {
        for stmt in body {
            self.line = stmt.line;
            let flow = self.deeper(|i| i.statement(&stmt.kind, scope))?;
            if flow != Flow::Next {
                return Ok(flow);
            }
        }
        Ok(Flow::Next)
    }

    fn statement(&mut self, kind: &'r StmtKind, scope: ScopeRef<'_, 'r>) -> Result<Flow, Fault> {
        match kind {
            StmtKind::Data(text) => self.emit(text)?,
            StmtKind::Print(expr) => {
                let value = self.eval(expr, scope)?;
                self.emit_value(&value)?;
            }
            StmtKind::Set(target, expr) => {
                let value = self.eval(expr, scope)?;
                self.assign(target, value, scope)?;
            }
            StmtKind::SetBlock(target, chain, body) => {
                let value = self.filtered(body, chain, scope)?;
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
                let value = self.new_macro(def, scope)?;
                scope.set(&def.name, value)?;
            }
            StmtKind::CallBlock(def, call) => self.call_block(def, call, scope)?,
            StmtKind::FilterBlock(chain, body) => {
                let value = self.filtered(body, chain, scope)?;
                self.emit_value(&value)?;
            }
            StmtKind::With(bindings, body) => return self.with(bindings, body, scope),
            StmtKind::Generation(body) => self.generation(body, scope)?,
            StmtKind::Block(body) => _ = self.body(body, &Scope::inside(scope)?)?,
            StmtKind::Break => return Ok(Flow::Break),
            StmtKind::Continue => return Ok(Flow::Continue),
        }
        Ok(Flow::Next)
    }

    fn with(
        &mut self,
        bindings: &'r [(Target, Node)],
        body: &'r [Stmt],
        scope: ScopeRef<'_, 'r>,
    ) -> Result<Flow, Fault> {
        let inner = Scope::inside(scope)?;
        for (target, expr) in bindings {
            let value = self.eval(expr, scope)?;
            self.assign(target, value, &inner)?;
        }
        self.body(body, &inner)
    }

    fn captured(&mut self, body: &'r [Stmt], scope: ScopeRef<'_, 'r>) -> Result<Buffer<'r>, Fault> {
        self.capture(|i| i.body(body, scope).map(|_| ()))
    }

    /// The text of a block, through filters.
    fn filtered(
        &mut self,
        body: &'r [Stmt],
        chain: &'r Chain,
        scope: ScopeRef<'_, 'r>,
    ) -> Result<Value<'r>, Fault> {
        let text = self.captured(body, &Scope::inside(scope)?)?;
        let mut value = Value::text(text)?;
        for (name, args) in chain {
            let given = self.args(args, scope)?;
            value = filters::apply(self, name, &value, &given)?;
        }
        Ok(value)
    }

    fn generation(&mut self, body: &'r [Stmt], scope: ScopeRef<'_, 'r>) -> Result<(), Fault> {
        let text = self.captured(body, &Scope::inside(scope)?)?;
        if self.out.len() > 1 {
            self.span_lost = true;
        } else {
            let start = self.out[0].len();
            self.spans.push(start..start + text.len())?;
        }
        self.emit(text.as_str())
    }

    fn new_macro(
        &mut self,
        def: &'r MacroDef,
        scope: ScopeRef<'_, 'r>,
    ) -> Result<Value<'r>, Fault> {
        let scope = self.keep(scope)?;
        self.macros = self.macros.wrapping_add(1);
        Ok(Value::Macro(Macro {
            def,
            scope,
            serial: self.macros,
        }))
    }

    fn call_block(
        &mut self,
        def: &'r MacroDef,
        call: &'r Expr,
        scope: ScopeRef<'_, 'r>,
    ) -> Result<(), Fault> {
        let ExprKind::Call(function, args) = &call.kind else {
            return Err(Fault::new("'call' needs a call"));
        };
        let caller = self.new_macro(def, scope)?;
        let function = self.eval(function, scope)?;
        let mut given = self.args(args, scope)?;
        given.named.push((Name::Written("caller"), caller))?;
        let value = self.call(&function, &given)?;
        self.emit_value(&value)
    }

    fn for_loop(
        &mut self,
        def: &'r For,
        iter: Value<'r>,
        scope: ScopeRef<'_, 'r>,
        depth: usize,
    ) -> Result<(), Fault> {
        let mut items = iter.walk(self.budget)?;
        if let Some(filter) = &def.filter {
            items = self.kept_items(def, filter, &items, scope)?;
        }
        if items.len() == 0 {
            self.body(&def.otherwise, &Scope::inside(scope)?)?;
            return Ok(());
        }
        let recursive = if def.recursive {
            Some((def, self.keep(scope)?))
        } else {
            None
        };
        let (index, seen) = (Cell::new(0), Cell::new(None));
        let state = self.budget.share(LoopState {
            items,
            index,
            depth,
            seen,
            recursive,
        })?;
        for at in 0..state.items.len() {
            self.budget.step()?;
            state.index.set(at);
            let Some(item) = state.items.get(at).cloned() else {
                break;
            };
            let inner = Scope::inside(scope)?;
            inner.set("loop", Value::Loop(state.clone()))?;
            self.assign(&def.target, item, &inner)?;
            if self.body(&def.body, &inner)? == Flow::Break {
                break;
            }
        }
        Ok(())
    }

    /// The items for which the condition of a loop holds.
    fn kept_items(
        &mut self,
        def: &'r For,
        filter: &'r Expr,
        all: &Items<'r>,
        scope: ScopeRef<'_, 'r>,
    ) -> Result<Shared<'r, Items<'r>>, Fault> {
        let mut kept = Vector::new(self.budget);
        for item in all.read()? {
            let inner = Scope::inside(scope)?;
            self.assign(&def.target, item.clone(), &inner)?;
            if self.eval(filter, &inner)?.truthy() {
                kept.push(item.clone())?;
            }
        }
        items(kept)
    }

    fn assign(
        &mut self,
        target: &'r Target,
        value: Value<'r>,
        scope: ScopeRef<'_, 'r>,
    ) -> Result<(), Fault> {
        match target {
            Target::Name(name) => scope.set(name, value),
            Target::Field(name, field) => {
                let fields = match scope.find(name)? {
                    Some(Value::Namespace(fields)) => fields.upgrade(),
                    _ => None,
                };
                let Some(fields) = fields else {
                    return Err(Fault::new(format_args!(
                        "cannot assign '{name}.{field}': '{name}' is no namespace"
                    )));
                };
                if field.starts_with('_') {
                    return Err(Fault::new(format_args!(
                        "a namespace cannot have '{field}'; rename it"
                    )));
                }
                fields.set(self.budget, Name::Written(field), value)
            }
            Target::Many(targets) => {
                let values = value.walk(self.budget)?;
                if values.len() != targets.len() {
                    let (have, need) = (values.len(), targets.len());
                    return Err(Fault::new(format_args!(
                        "{have} values cannot be unpacked into {need} names"
                    )));
                }
                for (target, value) in targets.iter().zip(values.read()?) {
                    self.assign(target, value.clone(), scope)?;
                }
                Ok(())
            }
        }
    }

    /// The value of an expression.
    fn eval(&mut self, expr: &'r Expr, scope: ScopeRef<'_, 'r>) -> Result<Value<'r>, Fault> {
        self.deeper(|i| i.eval_inner(&expr.kind, scope))
    }

    fn eval_inner(
        &mut self,
        expr: &'r ExprKind,
        scope: ScopeRef<'_, 'r>,
    ) -> Result<Value<'r>, Fault> {
        let budget = self.budget;
        match expr {
            ExprKind::Const(literal) => match literal {
                Literal::None => Ok(Value::None),
                Literal::Bool(b) => Ok(Value::Bool(*b)),
                Literal::Int(i) => Ok(Value::Int(*i)),
                Literal::Float(f) => Ok(Value::Float(*f)),
                Literal::Str(s) => Value::str(budget, s),
            },
            ExprKind::Name(name) => Ok(match scope.find(name)? {
                Some(value) => value,
                None => filters::global(name).unwrap_or(Value::Undefined(Missing::Variable(name))),
            }),
            ExprKind::List(items) => Value::list(self.eval_all(items, scope)?),
            ExprKind::Tuple(items) => Value::tuple(self.eval_all(items, scope)?),
            ExprKind::Dict(pairs) => self.eval_dict(pairs, scope),
            ExprKind::Attr(of, name) => {
                methods::written_attribute(budget, &self.eval(of, scope)?, name)
            }
            ExprKind::Item(of, index) => {
                let of = self.eval(of, scope)?;
                methods::item(budget, &of, &self.eval(index, scope)?)
            }
            ExprKind::Slice(of, parts) => self.eval_slice(of, parts, scope),
            ExprKind::Call(function, args) => {
                let function = self.eval(function, scope)?;
                let given = self.args(args, scope)?;
                self.call(&function, &given)
            }
            ExprKind::Filter(of, name, args) => {
                let of = self.eval(of, scope)?;
                let given = self.args(args, scope)?;
                filters::apply(self, name, &of, &given)
            }
            ExprKind::Test {
                of,
                name,
                args,
                negated,
            } => {
                let of = self.eval(of, scope)?;
                let given = self.args(args, scope)?;
                Ok(Value::Bool(
                    predicates::check(budget, name, &of, &given.positional)? != *negated,
                ))
            }
            _ => self.eval_operator(expr, scope),
        }
    }

    fn eval_operator(
        &mut self,
        expr: &'r ExprKind,
        scope: ScopeRef<'_, 'r>,
    ) -> Result<Value<'r>, Fault> {
        match expr {
            ExprKind::Binary(op, left, right) => {
                let left = self.eval(left, scope)?;
                ops::binary(self.budget, *op, &left, &self.eval(right, scope)?)
            }
            ExprKind::Compare(left, rest) => Ok(Value::Bool(self.compare(left, rest, scope)?)),
            ExprKind::And(left, right) => {
                let left = self.eval(left, scope)?;
                if left.truthy() {
                    self.eval(right, scope)
                } else {
                    Ok(left)
                }
            }
            ExprKind::Or(left, right) => {
                let left = self.eval(left, scope)?;
                if left.truthy() {
                    Ok(left)
                } else {
                    self.eval(right, scope)
                }
            }
            ExprKind::Not(of) => Ok(Value::Bool(!self.eval(of, scope)?.truthy())),
            ExprKind::Neg(of) => match self.eval(of, scope)? {
                // Zero minus zero would lose the sign.
                Value::Float(f) => Ok(Value::Float(-f)),
                value => ops::binary(self.budget, Op::Sub, &Value::Int(0), &value),
            },
            ExprKind::Pos(of) => {
                ops::binary(self.budget, Op::Add, &Value::Int(0), &self.eval(of, scope)?)
            }
            ExprKind::Concat(parts) => {
                let parts = self.eval_all(parts, scope)?;
                let mut text = Buffer::new(self.budget);
                for part in parts.iter() {
                    part.print(&mut text)?;
                }
                Value::text(text)
            }
            ExprKind::If { test, then, other } => {
                if self.eval(test, scope)?.truthy() {
                    return self.eval(then, scope);
                }
                match other {
                    Some(other) => self.eval(other, scope),
                    None => Ok(Value::undefined("the result of an 'if' without 'else'")),
                }
            }
            _ => Ok(Value::None),
        }
    }

    fn eval_dict(
        &mut self,
        pairs: &'r [(Node, Node)],
        scope: ScopeRef<'_, 'r>,
    ) -> Result<Value<'r>, Fault> {
        let mut dict = Dict::new(self.budget);
        for (key, value) in pairs {
            let key = self.eval(key, scope)?;
            dict.insert(key, self.eval(value, scope)?)?;
        }
        Value::dict(dict)
    }

    fn eval_slice(
        &mut self,
        of: &'r Expr,
        parts: &'r [Option<Node>; 3],
        scope: ScopeRef<'_, 'r>,
    ) -> Result<Value<'r>, Fault> {
        let of = self.eval(of, scope)?;
        let mut bounds = [Value::None, Value::None, Value::None];
        for (bound, part) in bounds.iter_mut().zip(parts) {
            if let Some(part) = part {
                *bound = self.eval(part, scope)?;
            }
        }
        ops::slice(self.budget, &of, bounds)
    }

    fn compare(
        &mut self,
        left: &'r Expr,
        rest: &'r [(Cmp, Node)],
        scope: ScopeRef<'_, 'r>,
    ) -> Result<bool, Fault> {
        let mut left = self.eval(left, scope)?;
        for (cmp, right) in rest {
            let right = self.eval(right, scope)?;
            if !predicates::compare(self.budget, *cmp, &left, &right)? {
                return Ok(false);
            }
            left = right;
        }
        Ok(true)
    }

    fn eval_all(
        &mut self,
        exprs: &'r [Node],
        scope: ScopeRef<'_, 'r>,
    ) -> Result<Vector<'r, Value<'r>>, Fault> {
        let mut values = Vector::new(self.budget);
        for expr in exprs {
            values.push(self.eval(expr, scope)?)?;
        }
        Ok(values)
    }

    fn args(&mut self, args: &'r Args, scope: ScopeRef<'_, 'r>) -> Result<Given<'r>, Fault> {
        let mut given = Given::new(self.budget);
        given.positional = self.eval_all(&args.positional, scope)?;
        for (name, value) in &args.named {
            given
                .named
                .push((Name::Written(name), self.eval(value, scope)?))?;
        }
        if let Some(star) = &args.star {
            let more = self.eval(star, scope)?.walk(self.budget)?;
            given.positional.extend_from_slice(more.read()?)?;
        }
        if let Some(star) = &args.star_star {
            let Value::Dict(dict) = self.eval(star, scope)? else {
                return Err(Fault::new("'**' needs a mapping"));
            };
            for (key, value) in dict.read()? {
                given
                    .named
                    .push((Name::Made(key.printed(self.budget)?), value.clone()))?;
            }
        }
        Ok(given)
    }

    /// Calls a macro, a method or a function.
    fn call(&mut self, function: &Value<'r>, given: &Given<'r>) -> Result<Value<'r>, Fault> {
        match function {
            Value::Macro(of) => self.call_macro(of, given),
            Value::Method(bound) => match &***bound {
                (Value::Loop(state), "changed") => self.loop_changed(state, given),
                (of, name) => methods::call(self.budget, of, name, given),
            },
            Value::Function("namespace") => self.new_namespace(given),
            Value::Function(name) => filters::call_global(self.budget, self.now_s, name, given),
            Value::Loop(state) => self.call_loop(state, given),
            Value::Undefined(what) => Err(Fault::new(format_args!("{what} is undefined"))),
            other => Err(Fault::new(format_args!(
                "'{}' object is not callable",
                other.kind()
            ))),
        }
    }

    fn new_namespace(&mut self, given: &Given<'r>) -> Result<Value<'r>, Fault> {
        let budget = self.budget;
        let namespace = budget.share(Namespace::new(budget))?;
        filters::each_pair(budget, "namespace", given, |name, value| {
            if name.as_str().starts_with('_') {
                return Err(Fault::new(
                    "a namespace cannot have names that begin with '_'; rename them",
                ));
            }
            namespace.set(budget, name, value)
        })?;
        let link = Rc::downgrade(&namespace);
        self.namespaces.push(namespace)?;
        Ok(Value::Namespace(link))
    }

    /// `loop(items)`: the loop again, over other items.
    fn call_loop(&mut self, state: &LoopState<'r>, given: &Given<'r>) -> Result<Value<'r>, Fault> {
        let Some((def, scope)) = &state.recursive else {
            return Err(Fault::new(
                "this loop is not recursive; write 'recursive' in its 'for'",
            ));
        };
        let scope = scope.upgrade().ok_or_else(gone)?;
        let [items] = given.bind("loop", ["iterable"])?;
        let items = items.unwrap_or_else(|| Value::undefined("the loop's argument"));
        let depth = state.depth + 1;
        let text = self.deeper(|i| i.capture(|i| i.for_loop(def, items, &scope, depth)))?;
        Value::text(text)
    }

    /// Whether the arguments differ from those of the last call.
    fn loop_changed(
        &mut self,
        state: &LoopState<'r>,
        given: &Given<'r>,
    ) -> Result<Value<'r>, Fault> {
        let mut now = Vector::new(self.budget);
        now.extend_from_slice(&given.positional)?;
        let Some(at) = state.seen.get() else {
            state.seen.set(Some(self.seen.len()));
            self.seen.push(now)?;
            return Ok(Value::Bool(true));
        };
        let last = &mut self.seen[at];
        let mut same = last.len() == now.len();
        for (last, now) in last.iter().zip(now.iter()) {
            same = same && last.equals(now)?;
        }
        *last = now;
        Ok(Value::Bool(!same))
    }

    fn call_macro(&mut self, of: &Macro<'r>, given: &Given<'r>) -> Result<Value<'r>, Fault> {
        let def = of.def;
        let inner = Scope::inside(&of.scope.upgrade().ok_or_else(gone)?)?;
        // Deeper too, since a default may call the macro again.
        self.deeper(|i| i.bind_macro(def, given, &inner))?;
        let line = self.line;
        let text = self.deeper(|i| i.captured(&def.body, &inner))?;
        self.line = line;
        Value::text(text)
    }

    /// Sets the parameters of a macro, `caller`, `varargs` and `kwargs`.
    fn bind_macro(
        &mut self,
        def: &'r MacroDef,
        given: &Given<'r>,
        inner: ScopeRef<'_, 'r>,
    ) -> Result<(), Fault> {
        let budget = self.budget;
        let mut named = Vector::new(budget);
        for (name, value) in given.named.iter() {
            named.push(Some((name, value)))?;
        }
        let mut by_name = |wanted: &str| {
            for slot in named.iter_mut() {
                budget.ticks(2)?;
                if let Some((name, value)) = slot
                    && budget.same(name.as_str(), wanted)?
                {
                    let value = value.clone();
                    *slot = None;
                    return Ok(Some(value));
                }
            }
            Ok(None)
        };
        for (i, (name, default)) in def.params.iter().enumerate() {
            let value = match (given.positional.get(i), by_name(name)?) {
                (Some(_), Some(_)) => {
                    return Err(Fault::new(format_args!(
                        "macro '{}' got '{name}' twice",
                        def.name
                    )));
                }
                (Some(value), None) => value.clone(),
                (None, Some(value)) => value,
                (None, None) => match default {
                    Some(default) => self.eval(default, inner)?,
                    None => Value::Undefined(Missing::Parameter(name)),
                },
            };
            inner.set(name, value)?;
        }
        let caller = by_name("caller")?;
        inner.set(
            "caller",
            caller.unwrap_or_else(|| Value::undefined("No caller defined: 'caller'")),
        )?;
        let extra = given.positional.get(def.params.len()..).unwrap_or_default();
        if !extra.is_empty() && !def.varargs {
            let most = def.params.len();
            return Err(Fault::new(format_args!(
                "macro '{}' takes at most {most} arguments",
                def.name
            )));
        }
        if let Some((name, _)) = named.iter().flatten().next().filter(|_| !def.kwargs) {
            let name = name.as_str();
            return Err(Fault::new(format_args!(
                "macro '{}' has no parameter '{name}'",
                def.name
            )));
        }
        // Only a body that reads these gets them.
        if def.varargs {
            let mut varargs = Vector::new(budget);
            varargs.extend_from_slice(extra)?;
            inner.set("varargs", Value::tuple(varargs)?)?;
        }
        if def.kwargs {
            let mut kwargs = Dict::new(budget);
            for (name, value) in named.iter().flatten() {
                kwargs.insert(name.value(budget)?, (*value).clone())?;
            }
            inner.set("kwargs", Value::dict(kwargs)?)?;
        }
        Ok(())
    }
}

/// The interpreter keeps every scope that a value links to, so this says that it is at fault, not
/// the template.
fn gone() -> Fault {
    Fault::new("the scope of a macro or loop is gone; please report this template")
}
