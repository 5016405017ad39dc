//! Tokens to a tree, with Jinja2's grammar and precedences.
//!
//! Refuses tags that would read other templates (`include`, `import`, `extends`): a chat template
//! is one file.
//!
//! # Invariants
//! - The parser calls itself no deeper than [`MAX_DEPTH`], and expressions are no higher than
//!   [`MAX_HEIGHT`], however they are written: [`Expr::new`] is the only way to make one. So
//!   neither parsing, walking nor dropping a tree can exhaust a stack.
//! - A template has at most [`crate::lex::MAX_TOKENS`] tokens, and every node takes one, so the
//!   tree is bounded.

use std::fmt::Display;

use crate::error::Fault;
use crate::lex::{Token, lex};

/// How deep expressions and blocks may be nested.
const MAX_DEPTH: usize = 100;
/// How high an expression may be; a chain of operators is as high as it is long.
const MAX_HEIGHT: u16 = 500;

/// A value written in the template.
#[derive(Debug)]
pub(crate) enum Literal {
    None,
    Bool(bool),
    Int(i128),
    Float(f64),
    Str(String),
}

/// Operators on two values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Op {
    Add,
    Sub,
    Mul,
    Div,
    FloorDiv,
    Rem,
    Pow,
}

/// Comparisons.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cmp {
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
    In,
    NotIn,
}

/// An expression where it stands in the tree.
pub(crate) type Node = Box<Expr>;

/// An expression, and how many more are below it at most.
#[derive(Debug)]
pub(crate) struct Expr {
    pub(crate) kind: ExprKind,
    height: u16,
}

#[derive(Debug)]
pub(crate) enum ExprKind {
    Const(Literal),
    Name(String),
    List(Vec<Node>),
    Tuple(Vec<Node>),
    Dict(Vec<(Node, Node)>),
    Attr(Node, String),
    Item(Node, Node),
    Slice(Node, Box<[Option<Node>; 3]>),
    Call(Node, Args),
    Filter(Node, String, Args),
    Test {
        of: Node,
        name: String,
        args: Args,
        negated: bool,
    },
    Binary(Op, Node, Node),
    Compare(Node, Vec<(Cmp, Node)>),
    And(Node, Node),
    Or(Node, Node),
    Not(Node),
    Neg(Node),
    Pos(Node),
    Concat(Vec<Node>),
    If {
        test: Node,
        then: Node,
        other: Option<Node>,
    },
}

impl Expr {
    /// The one place where expressions are made: it refuses those that are too high.
    fn new(kind: ExprKind) -> Result<Box<Self>, Fault> {
        let height = kind.height_below() + 1;
        if height > MAX_HEIGHT {
            return Err(Fault::new(format_args!(
                "more than {MAX_HEIGHT} operators within each other; split the expression"
            )));
        }
        Ok(Box::new(Self { kind, height }))
    }
}

impl ExprKind {
    fn height_below(&self) -> u16 {
        fn highest<'e>(of: impl IntoIterator<Item = &'e Node>) -> u16 {
            of.into_iter().map(|e| e.height).max().unwrap_or(0)
        }
        match self {
            Self::Const(_) | Self::Name(_) => 0,
            Self::List(items) | Self::Tuple(items) | Self::Concat(items) => highest(items),
            Self::Dict(pairs) => highest(pairs.iter().flat_map(|(key, value)| [key, value])),
            Self::Attr(of, _) | Self::Not(of) | Self::Neg(of) | Self::Pos(of) => of.height,
            Self::Item(a, b) | Self::Binary(_, a, b) | Self::And(a, b) | Self::Or(a, b) => {
                highest([a, b])
            }
            Self::Slice(of, parts) => of.height.max(highest(parts.iter().flatten())),
            Self::Call(of, args) | Self::Filter(of, _, args) | Self::Test { of, args, .. } => {
                let named = args.named.iter().map(|(_, value)| value);
                let stars = args.star.iter().chain(&args.star_star);
                of.height
                    .max(highest(args.positional.iter().chain(named).chain(stars)))
            }
            Self::Compare(of, rest) => of.height.max(highest(rest.iter().map(|(_, right)| right))),
            Self::If { test, then, other } => highest([test, then].into_iter().chain(other)),
        }
    }
}

/// Arguments of a call.
#[derive(Debug, Default)]
pub(crate) struct Args {
    pub(crate) positional: Vec<Node>,
    pub(crate) named: Vec<(String, Node)>,
    pub(crate) star: Option<Node>,
    pub(crate) star_star: Option<Node>,
}

/// What a value is assigned to.
#[derive(Debug)]
pub(crate) enum Target {
    Name(String),
    Field(String, String),
    Many(Vec<Target>),
}

#[derive(Debug)]
pub(crate) struct Stmt {
    pub(crate) line: u32,
    pub(crate) kind: StmtKind,
}

pub(crate) type Body = Vec<Stmt>;

/// Parameters of a macro, with their defaults.
pub(crate) type Params = Vec<(String, Option<Node>)>;

/// Filters, one after another.
pub(crate) type Chain = Vec<(String, Args)>;

#[derive(Debug)]
pub(crate) enum StmtKind {
    Data(String),
    Print(Node),
    Set(Target, Node),
    SetBlock(Target, Chain, Body),
    If(Vec<(Node, Body)>, Body),
    For(Box<For>),
    Macro(Box<MacroDef>),
    CallBlock(Box<MacroDef>, Node),
    FilterBlock(Chain, Body),
    With(Vec<(Target, Node)>, Body),
    Generation(Body),
    Block(Body),
    Break,
    Continue,
}

#[derive(Debug)]
pub(crate) struct For {
    pub(crate) target: Target,
    pub(crate) iter: Node,
    pub(crate) filter: Option<Node>,
    pub(crate) recursive: bool,
    pub(crate) body: Body,
    pub(crate) otherwise: Body,
}

#[derive(Debug)]
pub(crate) struct MacroDef {
    pub(crate) name: String,
    pub(crate) params: Params,
    pub(crate) body: Body,
    /// Whether the body reads `varargs`; only then the macro takes more than its parameters.
    pub(crate) varargs: bool,
    /// The same for `kwargs`.
    pub(crate) kwargs: bool,
}

/// Parses a whole template.
pub(crate) fn parse(source: &str) -> Result<Body, Fault> {
    let mut parser = Parser {
        tokens: lex(source)?,
        at: 0,
        depth: 0,
        loops: 0,
    };
    let (body, _) = parser.body(&[])?;
    Ok(body)
}

struct Parser {
    tokens: Vec<(Token, u32)>,
    at: usize,
    depth: usize,
    loops: usize,
}

impl Parser {
    fn line(&self) -> u32 {
        let last = self.tokens.len().saturating_sub(1);
        self.tokens.get(self.at.min(last)).map_or(1, |t| t.1)
    }

    fn fault<T>(&self, what: impl Display) -> Result<T, Fault> {
        Err(Fault::at(self.line(), what))
    }

    fn peek(&self) -> Option<&Token> {
        self.tokens.get(self.at).map(|t| &t.0)
    }

    fn is_op(&self, op: &str) -> bool {
        matches!(self.peek(), Some(Token::Op(o)) if *o == op)
    }

    fn is_name(&self, name: &str) -> bool {
        matches!(self.peek(), Some(Token::Name(n)) if n == name)
    }

    fn take_op(&mut self, op: &str) -> bool {
        let found = self.is_op(op);
        self.at += usize::from(found);
        found
    }

    fn take_name(&mut self, name: &str) -> bool {
        let found = self.is_name(name);
        self.at += usize::from(found);
        found
    }

    fn expect_op(&mut self, op: &str) -> Result<(), Fault> {
        if self.take_op(op) {
            Ok(())
        } else {
            self.fault(format_args!("expected '{op}' here"))
        }
    }

    fn expect(&mut self, token: Token, text: &str) -> Result<(), Fault> {
        if self.peek() == Some(&token) {
            self.at += 1;
            return Ok(());
        }
        self.fault(format_args!("expected '{text}' here"))
    }

    fn name(&mut self) -> Result<String, Fault> {
        if let Some(Token::Name(name)) = self.peek() {
            let name = name.clone();
            self.at += 1;
            return Ok(name);
        }
        self.fault("expected a name here")
    }

    /// A node of the tree.
    fn node(&self, kind: ExprKind) -> Result<Node, Fault> {
        Expr::new(kind).map_err(|fault| fault.or_at(self.line()))
    }

    /// Runs `inner` one level deeper.
    fn deeper<T>(&mut self, inner: impl FnOnce(&mut Self) -> Result<T, Fault>) -> Result<T, Fault> {
        if self.depth >= MAX_DEPTH {
            return self.fault(format_args!(
                "nested deeper than {MAX_DEPTH} levels; write it flatter"
            ));
        }
        self.depth += 1;
        let result = inner(self);
        self.depth -= 1;
        result
    }

    /// Statements up to a tag named in `ends` (or the end of the template when there are none); the
    /// tag's name is consumed, the rest of the tag is not.
    fn body(&mut self, ends: &[&str]) -> Result<(Body, String), Fault> {
        self.deeper(|p| p.body_inner(ends))
    }

    fn body_inner(&mut self, ends: &[&str]) -> Result<(Body, String), Fault> {
        let mut body = Vec::new();
        while let Some((token, line)) = self.tokens.get_mut(self.at) {
            self.at += 1;
            let line = *line;
            let kind = match token {
                Token::Data(text) => StmtKind::Data(std::mem::take(text)),
                Token::PrintBegin => {
                    let expr = self.tuple(true)?;
                    self.expect(Token::PrintEnd, "}}")?;
                    StmtKind::Print(expr)
                }
                Token::BlockBegin => {
                    let name = self.name()?;
                    if ends.contains(&name.as_str()) {
                        return Ok((body, name));
                    }
                    self.statement(&name)?
                }
                _ => return self.fault("unexpected token"),
            };
            body.push(Stmt { line, kind });
        }
        match ends.last() {
            None => Ok((body, String::new())),
            Some(end) => self.fault(format_args!(
                "the template ends inside a block; add '{{% {end} %}}'"
            )),
        }
    }

    /// A body that ends with `end` and the tag's close.
    fn body_until(&mut self, end: &str) -> Result<Body, Fault> {
        self.expect(Token::BlockEnd, "%}")?;
        let (body, _) = self.body(&[end])?;
        self.expect(Token::BlockEnd, "%}")?;
        Ok(body)
    }

    fn statement(&mut self, name: &str) -> Result<StmtKind, Fault> {
        match name {
            "set" => self.set(),
            "if" => self.branches(),
            "for" => self.for_loop(),
            "macro" => {
                let name = self.name()?;
                let params = self.params()?;
                Ok(StmtKind::Macro(Box::new(self.macro_def(name, params, "endmacro")?)))
            }
            "call" => {
                let params = if self.is_op("(") { self.params()? } else { Vec::new() };
                let call = self.expr()?;
                if !matches!(call.kind, ExprKind::Call(..)) {
                    return self.fault("'call' needs a call of a macro");
                }
                let def = self.macro_def("caller".into(), params, "endcall")?;
                Ok(StmtKind::CallBlock(Box::new(def), call))
            }
            "filter" => {
                let first = self.filter_name_args()?;
                let chain = self.filter_chain(vec![first])?;
                Ok(StmtKind::FilterBlock(chain, self.body_until("endfilter")?))
            }
            "with" => self.with(),
            "generation" => Ok(StmtKind::Generation(self.body_until("endgeneration")?)),
            "block" => {
                self.name()?;
                Ok(StmtKind::Block(self.block_body()?))
            }
            "break" | "continue" => {
                if self.loops == 0 {
                    return self.fault(format_args!("'{name}' outside of a loop; remove it"));
                }
                self.expect(Token::BlockEnd, "%}")?;
                Ok(if name == "break" { StmtKind::Break } else { StmtKind::Continue })
            }
            "include" | "import" | "from" | "extends" => self.fault(format_args!(
                "'{name}' needs another template, and a chat template is one file; paste its text here"
            )),
            other => {
                self.fault(format_args!("'{other}' is no tag that can stand here; check the block's end"))
            }
        }
    }

    fn macro_def(&mut self, name: String, params: Params, end: &str) -> Result<MacroDef, Fault> {
        let start = self.at;
        let outer = std::mem::take(&mut self.loops);
        let body = self.body_until(end);
        self.loops = outer;
        let body = body?;
        let reads = |name: &str| {
            self.tokens[start..self.at]
                .iter()
                .any(|(t, _)| matches!(t, Token::Name(n) if n == name))
        };
        Ok(MacroDef {
            name,
            params,
            body,
            varargs: reads("varargs"),
            kwargs: reads("kwargs"),
        })
    }

    fn block_body(&mut self) -> Result<Body, Fault> {
        self.expect(Token::BlockEnd, "%}")?;
        let (body, _) = self.body(&["endblock"])?;
        if matches!(self.peek(), Some(Token::Name(_))) {
            self.at += 1;
        }
        self.expect(Token::BlockEnd, "%}")?;
        Ok(body)
    }

    fn set(&mut self) -> Result<StmtKind, Fault> {
        let target = self.target(true)?;
        if self.take_op("=") {
            let value = self.tuple(true)?;
            self.expect(Token::BlockEnd, "%}")?;
            return Ok(StmtKind::Set(target, value));
        }
        let chain = self.filter_chain(Vec::new())?;
        Ok(StmtKind::SetBlock(
            target,
            chain,
            self.body_until("endset")?,
        ))
    }

    fn branches(&mut self) -> Result<StmtKind, Fault> {
        let mut arms = Vec::new();
        loop {
            let test = self.tuple(false)?;
            self.expect(Token::BlockEnd, "%}")?;
            let (body, end) = self.body(&["elif", "else", "endif"])?;
            arms.push((test, body));
            match end.as_str() {
                "elif" => continue,
                "else" => return Ok(StmtKind::If(arms, self.body_until("endif")?)),
                _ => {
                    self.expect(Token::BlockEnd, "%}")?;
                    return Ok(StmtKind::If(arms, Vec::new()));
                }
            }
        }
    }

    fn for_loop(&mut self) -> Result<StmtKind, Fault> {
        let target = self.target(false)?;
        if !self.take_name("in") {
            return self.fault("expected 'in' here");
        }
        let iter = self.tuple(false)?;
        let filter = if self.take_name("if") {
            Some(self.expr()?)
        } else {
            None
        };
        let recursive = self.take_name("recursive");
        self.expect(Token::BlockEnd, "%}")?;
        self.loops += 1;
        let parsed = self.body(&["else", "endfor"]);
        self.loops -= 1;
        let (body, end) = parsed?;
        let otherwise = if end == "else" {
            self.body_until("endfor")?
        } else {
            self.expect(Token::BlockEnd, "%}")?;
            Vec::new()
        };
        Ok(StmtKind::For(Box::new(For {
            target,
            iter,
            filter,
            recursive,
            body,
            otherwise,
        })))
    }

    fn with(&mut self) -> Result<StmtKind, Fault> {
        let mut bindings = Vec::new();
        while self.peek() != Some(&Token::BlockEnd) {
            if !bindings.is_empty() {
                self.expect_op(",")?;
            }
            let target = self.target(false)?;
            self.expect_op("=")?;
            bindings.push((target, self.expr()?));
        }
        Ok(StmtKind::With(bindings, self.body_until("endwith")?))
    }

    fn params(&mut self) -> Result<Params, Fault> {
        self.expect_op("(")?;
        let mut params: Params = Vec::new();
        while !self.take_op(")") {
            if !params.is_empty() {
                self.expect_op(",")?;
            }
            let name = self.name()?;
            let default = if self.take_op("=") {
                Some(self.expr()?)
            } else {
                None
            };
            if default.is_none() && params.last().is_some_and(|p| p.1.is_some()) {
                return self.fault("a parameter without default follows one with a default");
            }
            params.push((name, default));
        }
        Ok(params)
    }

    fn target(&mut self, fields: bool) -> Result<Target, Fault> {
        let mut targets = Vec::new();
        let mut many = false;
        loop {
            if self.take_op("(") {
                let inner = self.deeper(|p| p.target(fields))?;
                self.expect_op(")")?;
                targets.push(inner);
            } else {
                let name = self.name()?;
                if matches!(
                    name.as_str(),
                    "true" | "false" | "none" | "True" | "False" | "None"
                ) {
                    return self.fault(format_args!(
                        "'{name}' cannot be assigned; choose another name"
                    ));
                }
                if fields && self.take_op(".") {
                    targets.push(Target::Field(name, self.name()?));
                } else {
                    targets.push(Target::Name(name));
                }
            }
            if !self.take_op(",") {
                break;
            }
            many = true;
            if self.is_name("in") || self.is_op("=") || self.is_op(")") {
                break;
            }
        }
        Ok(if many {
            Target::Many(targets)
        } else {
            targets.remove(0)
        })
    }

    /// An expression, or several with commas between them as a tuple.
    fn tuple(&mut self, conditional: bool) -> Result<Node, Fault> {
        let one = |p: &mut Self| {
            if conditional {
                p.expr()
            } else {
                p.deeper(Self::or)
            }
        };
        let first = one(self)?;
        if !self.is_op(",") {
            return Ok(first);
        }
        let mut items = vec![first];
        while self.take_op(",") {
            let ends = matches!(
                self.peek(),
                None | Some(Token::BlockEnd | Token::PrintEnd | Token::Op(")"))
            );
            if ends {
                break;
            }
            items.push(one(self)?);
        }
        self.node(ExprKind::Tuple(items))
    }

    /// `a if b else c` and everything that binds tighter.
    fn expr(&mut self) -> Result<Node, Fault> {
        self.deeper(|p| {
            let mut value = p.or()?;
            while p.take_name("if") {
                let test = p.or()?;
                let other = if p.take_name("else") {
                    Some(p.expr()?)
                } else {
                    None
                };
                value = p.node(ExprKind::If {
                    test,
                    then: value,
                    other,
                })?;
            }
            Ok(value)
        })
    }

    fn or(&mut self) -> Result<Node, Fault> {
        let mut left = self.and()?;
        while self.take_name("or") {
            let right = self.and()?;
            left = self.node(ExprKind::Or(left, right))?;
        }
        Ok(left)
    }

    fn and(&mut self) -> Result<Node, Fault> {
        let mut left = self.not()?;
        while self.take_name("and") {
            let right = self.not()?;
            left = self.node(ExprKind::And(left, right))?;
        }
        Ok(left)
    }

    fn not(&mut self) -> Result<Node, Fault> {
        if self.take_name("not") {
            let of = self.deeper(Self::not)?;
            return self.node(ExprKind::Not(of));
        }
        self.compare()
    }

    fn compare(&mut self) -> Result<Node, Fault> {
        let left = self.sum()?;
        let mut rest = Vec::new();
        loop {
            let next_in =
                matches!(self.tokens.get(self.at + 1), Some((Token::Name(n), _)) if n == "in");
            let cmp = match self.peek() {
                Some(Token::Op("==")) => Cmp::Eq,
                Some(Token::Op("!=")) => Cmp::Ne,
                Some(Token::Op("<")) => Cmp::Lt,
                Some(Token::Op("<=")) => Cmp::Le,
                Some(Token::Op(">")) => Cmp::Gt,
                Some(Token::Op(">=")) => Cmp::Ge,
                Some(Token::Name(n)) if n == "in" => Cmp::In,
                Some(Token::Name(n)) if n == "not" && next_in => {
                    self.at += 1;
                    Cmp::NotIn
                }
                _ => break,
            };
            self.at += 1;
            rest.push((cmp, self.sum()?));
        }
        if rest.is_empty() {
            Ok(left)
        } else {
            self.node(ExprKind::Compare(left, rest))
        }
    }

    fn sum(&mut self) -> Result<Node, Fault> {
        let mut left = self.concat()?;
        loop {
            let op = match self.peek() {
                Some(Token::Op("+")) => Op::Add,
                Some(Token::Op("-")) => Op::Sub,
                _ => return Ok(left),
            };
            self.at += 1;
            let right = self.concat()?;
            left = self.node(ExprKind::Binary(op, left, right))?;
        }
    }

    fn concat(&mut self) -> Result<Node, Fault> {
        let first = self.product()?;
        if !self.is_op("~") {
            return Ok(first);
        }
        let mut parts = vec![first];
        while self.take_op("~") {
            parts.push(self.product()?);
        }
        self.node(ExprKind::Concat(parts))
    }

    fn product(&mut self) -> Result<Node, Fault> {
        let mut left = self.power()?;
        loop {
            let op = match self.peek() {
                Some(Token::Op("*")) => Op::Mul,
                Some(Token::Op("/")) => Op::Div,
                Some(Token::Op("//")) => Op::FloorDiv,
                Some(Token::Op("%")) => Op::Rem,
                _ => return Ok(left),
            };
            self.at += 1;
            let right = self.power()?;
            left = self.node(ExprKind::Binary(op, left, right))?;
        }
    }

    fn power(&mut self) -> Result<Node, Fault> {
        let mut left = self.unary(true)?;
        while self.take_op("**") {
            let right = self.unary(true)?;
            left = self.node(ExprKind::Binary(Op::Pow, left, right))?;
        }
        Ok(left)
    }

    fn unary(&mut self, filters: bool) -> Result<Node, Fault> {
        let node = if self.take_op("-") {
            let of = self.deeper(|p| p.unary(false))?;
            self.node(ExprKind::Neg(of))?
        } else if self.take_op("+") {
            let of = self.deeper(|p| p.unary(false))?;
            self.node(ExprKind::Pos(of))?
        } else {
            self.primary()?
        };
        let node = self.postfix(node)?;
        if filters {
            self.filters(node)
        } else {
            Ok(node)
        }
    }

    fn primary(&mut self) -> Result<Node, Fault> {
        let Some((token, _)) = self.tokens.get_mut(self.at) else {
            return self.fault("the template ends inside an expression");
        };
        let kind = match token {
            Token::Name(name) => match name.as_str() {
                "true" | "True" => ExprKind::Const(Literal::Bool(true)),
                "false" | "False" => ExprKind::Const(Literal::Bool(false)),
                "none" | "None" => ExprKind::Const(Literal::None),
                _ => ExprKind::Name(name.clone()),
            },
            Token::Str(text) => ExprKind::Const(Literal::Str(std::mem::take(text))),
            Token::Int(value) => ExprKind::Const(Literal::Int(*value)),
            Token::Float(value) => ExprKind::Const(Literal::Float(*value)),
            Token::Op("(" | "[" | "{") => return self.bracketed(),
            _ => return self.fault("expected a value here"),
        };
        self.at += 1;
        if let ExprKind::Const(Literal::Str(mut text)) = kind {
            while let Some(Token::Str(more)) = self.peek() {
                text.push_str(more);
                self.at += 1;
            }
            return self.node(ExprKind::Const(Literal::Str(text)));
        }
        self.node(kind)
    }

    fn bracketed(&mut self) -> Result<Node, Fault> {
        if self.take_op("[") {
            let items = self.items("]")?;
            return self.node(ExprKind::List(items));
        }
        if self.take_op("{") {
            return self.dict();
        }
        self.expect_op("(")?;
        if self.take_op(")") {
            return self.node(ExprKind::Tuple(Vec::new()));
        }
        let inner = self.tuple(true)?;
        self.expect_op(")")?;
        Ok(inner)
    }

    /// Expressions with commas between them, up to `close`.
    fn items(&mut self, close: &str) -> Result<Vec<Node>, Fault> {
        let mut items = Vec::new();
        while !self.take_op(close) {
            if !items.is_empty() {
                self.expect_op(",")?;
                if self.take_op(close) {
                    break;
                }
            }
            items.push(self.expr()?);
        }
        Ok(items)
    }

    fn dict(&mut self) -> Result<Node, Fault> {
        let mut items = Vec::new();
        while !self.take_op("}") {
            if !items.is_empty() {
                self.expect_op(",")?;
                if self.take_op("}") {
                    break;
                }
            }
            let key = self.expr()?;
            self.expect_op(":")?;
            items.push((key, self.expr()?));
        }
        self.node(ExprKind::Dict(items))
    }

    fn postfix(&mut self, mut node: Node) -> Result<Node, Fault> {
        loop {
            node = match self.peek() {
                Some(Token::Op(".")) => {
                    self.at += 1;
                    self.field(node)?
                }
                Some(Token::Op("[")) => {
                    self.at += 1;
                    self.subscript(node)?
                }
                Some(Token::Op("(")) => {
                    let args = self.args()?;
                    self.node(ExprKind::Call(node, args))?
                }
                _ => return Ok(node),
            };
        }
    }

    /// What stands behind a '.'.
    fn field(&mut self, node: Node) -> Result<Node, Fault> {
        let kind = match self.peek() {
            Some(Token::Name(name)) => ExprKind::Attr(node, name.clone()),
            Some(Token::Int(index)) => {
                let index = Expr::new(ExprKind::Const(Literal::Int(*index)))?;
                ExprKind::Item(node, index)
            }
            _ => return self.fault("expected a name after '.'"),
        };
        self.at += 1;
        self.node(kind)
    }

    fn subscript(&mut self, node: Node) -> Result<Node, Fault> {
        let mut parts = [None, None, None];
        let mut colons = 0;
        loop {
            if self.take_op("]") {
                break;
            }
            if self.take_op(":") {
                colons += 1;
                if colons > 2 {
                    return self.fault("a slice has at most two ':'");
                }
                continue;
            }
            if parts[colons].is_some() {
                return self.fault("expected ']' here");
            }
            parts[colons] = Some(self.expr()?);
        }
        if colons > 0 {
            return self.node(ExprKind::Slice(node, Box::new(parts)));
        }
        match parts {
            [Some(index), None, None] => self.node(ExprKind::Item(node, index)),
            _ => self.fault("expected an index between '[' and ']'"),
        }
    }

    fn args(&mut self) -> Result<Args, Fault> {
        self.expect_op("(")?;
        let mut args = Args::default();
        let mut first = true;
        while !self.take_op(")") {
            if !first {
                self.expect_op(",")?;
                if self.take_op(")") {
                    break;
                }
            }
            first = false;
            let named = matches!(self.tokens.get(self.at + 1), Some((Token::Op("="), _)));
            if self.take_op("**") {
                args.star_star = Some(self.expr()?);
            } else if self.take_op("*") {
                args.star = Some(self.expr()?);
            } else if named && let Some(Token::Name(name)) = self.peek().cloned() {
                self.at += 2;
                args.named.push((name, self.expr()?));
            } else if args.named.is_empty() && args.star_star.is_none() {
                args.positional.push(self.expr()?);
            } else {
                return self.fault("a positional argument follows a named one");
            }
        }
        Ok(args)
    }

    /// Filters, tests and calls behind a value.
    fn filters(&mut self, mut node: Node) -> Result<Node, Fault> {
        loop {
            node = if self.take_op("|") {
                let (name, args) = self.filter_name_args()?;
                self.node(ExprKind::Filter(node, name, args))?
            } else if self.take_name("is") {
                self.test(node)?
            } else if self.is_op("(") {
                let args = self.args()?;
                self.node(ExprKind::Call(node, args))?
            } else {
                return Ok(node);
            };
        }
    }

    fn filter_name_args(&mut self) -> Result<(String, Args), Fault> {
        let mut name = self.name()?;
        while self.take_op(".") {
            name.push('.');
            name.push_str(&self.name()?);
        }
        let args = if self.is_op("(") {
            self.args()?
        } else {
            Args::default()
        };
        Ok((name, args))
    }

    fn filter_chain(&mut self, mut chain: Chain) -> Result<Chain, Fault> {
        while self.take_op("|") {
            chain.push(self.filter_name_args()?);
        }
        Ok(chain)
    }

    fn test(&mut self, node: Node) -> Result<Node, Fault> {
        let negated = self.take_name("not");
        let name = self.name()?;
        let mut args = Args::default();
        let follows = match self.peek() {
            Some(Token::Op("(")) => {
                args = self.args()?;
                false
            }
            Some(Token::Name(n)) if n == "is" => {
                return self.fault("tests cannot be chained with 'is'");
            }
            Some(Token::Name(n)) => !matches!(n.as_str(), "else" | "or" | "and"),
            Some(Token::Str(_) | Token::Int(_) | Token::Float(_) | Token::Op("[" | "{")) => true,
            _ => false,
        };
        if follows {
            let arg = self.primary()?;
            args.positional = vec![self.postfix(arg)?];
        }
        self.node(ExprKind::Test {
            of: node,
            name,
            args,
            negated,
        })
    }
}
