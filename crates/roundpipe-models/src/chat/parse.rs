//! Tokens to a tree, with Jinja2's grammar and precedences.
//!
//! Refuses tags that would read other templates (`include`, `import`, `extends`): a chat template is one file.
//!
//! # Invariants
//! - Trees are no deeper than [`MAX_DEPTH`], so neither walking nor dropping one can exhaust a stack.

use std::sync::Arc;

use super::Fault;
use super::lex::{Token, lex};

/// How deep expressions and blocks may be nested.
const MAX_DEPTH: usize = 100;

/// A value written in the template.
#[derive(Debug, Clone)]
pub(super) enum Literal {
    None,
    Bool(bool),
    Int(i128),
    Float(f64),
    Str(String),
}

/// Operators on two values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Op {
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
pub(super) enum Cmp {
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
    In,
    NotIn,
}

#[derive(Debug, Clone)]
pub(super) enum Expr {
    Const(Literal),
    Name(String),
    List(Vec<Expr>),
    Tuple(Vec<Expr>),
    Dict(Vec<(Expr, Expr)>),
    Attr(Box<Expr>, String),
    Item(Box<Expr>, Box<Expr>),
    Slice(Box<Expr>, Box<[Option<Expr>; 3]>),
    Call(Box<Expr>, Args),
    Filter(Box<Expr>, String, Args),
    Test { of: Box<Expr>, name: String, args: Args, negated: bool },
    Binary(Op, Box<Expr>, Box<Expr>),
    Compare(Box<Expr>, Vec<(Cmp, Expr)>),
    And(Box<Expr>, Box<Expr>),
    Or(Box<Expr>, Box<Expr>),
    Not(Box<Expr>),
    Neg(Box<Expr>),
    Pos(Box<Expr>),
    Concat(Vec<Expr>),
    If { test: Box<Expr>, then: Box<Expr>, other: Option<Box<Expr>> },
}

/// Arguments of a call.
#[derive(Debug, Clone, Default)]
pub(super) struct Args {
    pub(super) positional: Vec<Expr>,
    pub(super) named: Vec<(String, Expr)>,
    pub(super) star: Option<Box<Expr>>,
    pub(super) star_star: Option<Box<Expr>>,
}

/// What a value is assigned to.
#[derive(Debug, Clone)]
pub(super) enum Target {
    Name(String),
    Field(String, String),
    Many(Vec<Target>),
}

#[derive(Debug, Clone)]
pub(super) struct Stmt {
    pub(super) line: u32,
    pub(super) kind: StmtKind,
}

pub(super) type Body = Vec<Stmt>;

#[derive(Debug, Clone)]
pub(super) enum StmtKind {
    Data(String),
    Print(Expr),
    Set(Target, Expr),
    SetBlock(Target, Vec<(String, Args)>, Body),
    If(Vec<(Expr, Body)>, Body),
    For(Arc<For>),
    Macro(Arc<MacroDef>),
    CallBlock(Arc<MacroDef>, Expr),
    FilterBlock(Vec<(String, Args)>, Body),
    With(Vec<(Target, Expr)>, Body),
    Generation(Body),
    Block(Body),
    Break,
    Continue,
}

#[derive(Debug)]
pub(super) struct For {
    pub(super) target: Target,
    pub(super) iter: Expr,
    pub(super) filter: Option<Expr>,
    pub(super) recursive: bool,
    pub(super) body: Body,
    pub(super) otherwise: Body,
}

#[derive(Debug)]
pub(super) struct MacroDef {
    pub(super) name: String,
    pub(super) params: Vec<(String, Option<Expr>)>,
    pub(super) body: Body,
    /// Whether the body reads `varargs`; only then the macro takes more than its parameters.
    pub(super) varargs: bool,
    /// The same for `kwargs`.
    pub(super) kwargs: bool,
}

/// Parses a whole template.
pub(super) fn parse(source: &str) -> Result<Body, Fault> {
    let mut parser = Parser { tokens: lex(source)?, at: 0, depth: 0, loops: 0 };
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

    fn fault<T>(&self, what: impl Into<String>) -> Result<T, Fault> {
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
        if self.take_op(op) { Ok(()) } else { self.fault(format!("expected '{op}' here")) }
    }

    fn expect(&mut self, token: Token, text: &str) -> Result<(), Fault> {
        if self.peek() == Some(&token) {
            self.at += 1;
            return Ok(());
        }
        self.fault(format!("expected '{text}' here"))
    }

    fn name(&mut self) -> Result<String, Fault> {
        if let Some(Token::Name(name)) = self.peek() {
            let name = name.clone();
            self.at += 1;
            return Ok(name);
        }
        self.fault("expected a name here")
    }

    /// Runs `inner` one level deeper.
    fn deeper<T>(&mut self, inner: impl FnOnce(&mut Self) -> Result<T, Fault>) -> Result<T, Fault> {
        if self.depth >= MAX_DEPTH {
            return self.fault(format!("nested deeper than {MAX_DEPTH} levels; write it flatter"));
        }
        self.depth += 1;
        let result = inner(self);
        self.depth -= 1;
        result
    }

    /// Statements up to a tag named in `ends` (or the end of the template when there are none); the tag's name
    /// is consumed, the rest of the tag is not.
    fn body(&mut self, ends: &[&str]) -> Result<(Body, String), Fault> {
        self.deeper(|p| p.body_inner(ends))
    }

    fn body_inner(&mut self, ends: &[&str]) -> Result<(Body, String), Fault> {
        let mut body = Vec::new();
        while let Some((token, line)) = self.tokens.get(self.at).cloned() {
            self.at += 1;
            let kind = match token {
                Token::Data(text) => StmtKind::Data(text),
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
            Some(end) => self.fault(format!("the template ends inside a block; add '{{% {end} %}}'")),
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
                Ok(StmtKind::Macro(Arc::new(self.macro_def(name, params, "endmacro")?)))
            }
            "call" => {
                let params = if self.is_op("(") { self.params()? } else { Vec::new() };
                let call = self.expr()?;
                if !matches!(call, Expr::Call(..)) {
                    return self.fault("'call' needs a call of a macro");
                }
                let def = self.macro_def("caller".into(), params, "endcall")?;
                Ok(StmtKind::CallBlock(Arc::new(def), call))
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
                    return self.fault(format!("'{name}' outside of a loop; remove it"));
                }
                self.expect(Token::BlockEnd, "%}")?;
                Ok(if name == "break" { StmtKind::Break } else { StmtKind::Continue })
            }
            "include" | "import" | "from" | "extends" => self.fault(format!(
                "'{name}' needs another template, and a chat template is one file; paste its text here"
            )),
            other => self.fault(format!("'{other}' is no tag that can stand here; check the block's end")),
        }
    }

    fn macro_def(
        &mut self,
        name: String,
        params: Vec<(String, Option<Expr>)>,
        end: &str,
    ) -> Result<MacroDef, Fault> {
        let start = self.at;
        let outer = std::mem::take(&mut self.loops);
        let body = self.body_until(end)?;
        self.loops = outer;
        let reads = |name: &str| {
            self.tokens[start..self.at].iter().any(|(t, _)| matches!(t, Token::Name(n) if n == name))
        };
        Ok(MacroDef { name, params, body, varargs: reads("varargs"), kwargs: reads("kwargs") })
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
        Ok(StmtKind::SetBlock(target, chain, self.body_until("endset")?))
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
        let filter = if self.take_name("if") { Some(self.expr()?) } else { None };
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
        Ok(StmtKind::For(Arc::new(For { target, iter, filter, recursive, body, otherwise })))
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

    fn params(&mut self) -> Result<Vec<(String, Option<Expr>)>, Fault> {
        self.expect_op("(")?;
        let mut params: Vec<(String, Option<Expr>)> = Vec::new();
        while !self.take_op(")") {
            if !params.is_empty() {
                self.expect_op(",")?;
            }
            let name = self.name()?;
            let default = if self.take_op("=") { Some(self.expr()?) } else { None };
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
                if matches!(name.as_str(), "true" | "false" | "none" | "True" | "False" | "None") {
                    return self.fault(format!("'{name}' cannot be assigned; choose another name"));
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
        Ok(if many { Target::Many(targets) } else { targets.remove(0) })
    }

    /// An expression, or several with commas between them as a tuple.
    fn tuple(&mut self, conditional: bool) -> Result<Expr, Fault> {
        let one = |p: &mut Self| if conditional { p.expr() } else { p.deeper(Self::or) };
        let first = one(self)?;
        if !self.is_op(",") {
            return Ok(first);
        }
        let mut items = vec![first];
        while self.take_op(",") {
            let ends = matches!(self.peek(), None | Some(Token::BlockEnd | Token::PrintEnd | Token::Op(")")));
            if ends {
                break;
            }
            items.push(one(self)?);
        }
        Ok(Expr::Tuple(items))
    }

    /// `a if b else c` and everything that binds tighter.
    fn expr(&mut self) -> Result<Expr, Fault> {
        self.deeper(|p| {
            let mut value = p.or()?;
            while p.take_name("if") {
                let test = Box::new(p.or()?);
                let other = if p.take_name("else") { Some(Box::new(p.expr()?)) } else { None };
                value = Expr::If { test, then: Box::new(value), other };
            }
            Ok(value)
        })
    }

    fn or(&mut self) -> Result<Expr, Fault> {
        let mut left = self.and()?;
        let mut count = 0;
        while self.take_name("or") {
            self.chain(&mut count)?;
            left = Expr::Or(Box::new(left), Box::new(self.and()?));
        }
        Ok(left)
    }

    fn and(&mut self) -> Result<Expr, Fault> {
        let mut left = self.not()?;
        let mut count = 0;
        while self.take_name("and") {
            self.chain(&mut count)?;
            left = Expr::And(Box::new(left), Box::new(self.not()?));
        }
        Ok(left)
    }

    /// A chain of operators nests the tree to the left; long ones count as depth.
    fn chain(&self, count: &mut usize) -> Result<(), Fault> {
        *count += 1;
        if *count > MAX_DEPTH {
            return self.fault(format!("more than {MAX_DEPTH} operators in a row; split the expression"));
        }
        Ok(())
    }

    fn not(&mut self) -> Result<Expr, Fault> {
        if self.take_name("not") {
            return Ok(Expr::Not(Box::new(self.deeper(Self::not)?)));
        }
        self.compare()
    }

    fn compare(&mut self) -> Result<Expr, Fault> {
        let left = self.sum()?;
        let mut rest = Vec::new();
        loop {
            let next_in = matches!(self.tokens.get(self.at + 1), Some((Token::Name(n), _)) if n == "in");
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
        Ok(if rest.is_empty() { left } else { Expr::Compare(Box::new(left), rest) })
    }

    fn sum(&mut self) -> Result<Expr, Fault> {
        let mut left = self.concat()?;
        let mut count = 0;
        loop {
            let op = match self.peek() {
                Some(Token::Op("+")) => Op::Add,
                Some(Token::Op("-")) => Op::Sub,
                _ => return Ok(left),
            };
            self.at += 1;
            self.chain(&mut count)?;
            left = Expr::Binary(op, Box::new(left), Box::new(self.concat()?));
        }
    }

    fn concat(&mut self) -> Result<Expr, Fault> {
        let first = self.product()?;
        if !self.is_op("~") {
            return Ok(first);
        }
        let mut parts = vec![first];
        while self.take_op("~") {
            parts.push(self.product()?);
        }
        Ok(Expr::Concat(parts))
    }

    fn product(&mut self) -> Result<Expr, Fault> {
        let mut left = self.power()?;
        let mut count = 0;
        loop {
            let op = match self.peek() {
                Some(Token::Op("*")) => Op::Mul,
                Some(Token::Op("/")) => Op::Div,
                Some(Token::Op("//")) => Op::FloorDiv,
                Some(Token::Op("%")) => Op::Rem,
                _ => return Ok(left),
            };
            self.at += 1;
            self.chain(&mut count)?;
            left = Expr::Binary(op, Box::new(left), Box::new(self.power()?));
        }
    }

    fn power(&mut self) -> Result<Expr, Fault> {
        let mut left = self.unary(true)?;
        let mut count = 0;
        while self.take_op("**") {
            self.chain(&mut count)?;
            left = Expr::Binary(Op::Pow, Box::new(left), Box::new(self.unary(true)?));
        }
        Ok(left)
    }

    fn unary(&mut self, filters: bool) -> Result<Expr, Fault> {
        let node = if self.take_op("-") {
            Expr::Neg(Box::new(self.deeper(|p| p.unary(false))?))
        } else if self.take_op("+") {
            Expr::Pos(Box::new(self.deeper(|p| p.unary(false))?))
        } else {
            self.primary()?
        };
        let node = self.postfix(node)?;
        if filters { self.filters(node) } else { Ok(node) }
    }

    fn primary(&mut self) -> Result<Expr, Fault> {
        let token = self.peek().cloned();
        let Some(token) = token else { return self.fault("the template ends inside an expression") };
        self.at += 1;
        Ok(match token {
            Token::Name(name) => match name.as_str() {
                "true" | "True" => Expr::Const(Literal::Bool(true)),
                "false" | "False" => Expr::Const(Literal::Bool(false)),
                "none" | "None" => Expr::Const(Literal::None),
                _ => Expr::Name(name),
            },
            Token::Str(mut text) => {
                while let Some(Token::Str(more)) = self.peek() {
                    text.push_str(more);
                    self.at += 1;
                }
                Expr::Const(Literal::Str(text))
            }
            Token::Int(value) => Expr::Const(Literal::Int(value)),
            Token::Float(value) => Expr::Const(Literal::Float(value)),
            Token::Op("(") => {
                if self.take_op(")") {
                    return Ok(Expr::Tuple(Vec::new()));
                }
                let inner = self.tuple(true)?;
                self.expect_op(")")?;
                inner
            }
            Token::Op("[") => Expr::List(self.items("]")?),
            Token::Op("{") => self.dict()?,
            _ => {
                self.at -= 1;
                return self.fault("expected a value here");
            }
        })
    }

    /// Expressions with commas between them, up to `close`.
    fn items(&mut self, close: &str) -> Result<Vec<Expr>, Fault> {
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

    fn dict(&mut self) -> Result<Expr, Fault> {
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
        Ok(Expr::Dict(items))
    }

    fn postfix(&mut self, mut node: Expr) -> Result<Expr, Fault> {
        let mut count = 0;
        loop {
            self.chain(&mut count)?;
            node = match self.peek() {
                Some(Token::Op(".")) => {
                    self.at += 1;
                    match self.peek().cloned() {
                        Some(Token::Name(name)) => {
                            self.at += 1;
                            Expr::Attr(Box::new(node), name)
                        }
                        Some(Token::Int(index)) => {
                            self.at += 1;
                            Expr::Item(Box::new(node), Box::new(Expr::Const(Literal::Int(index))))
                        }
                        _ => return self.fault("expected a name after '.'"),
                    }
                }
                Some(Token::Op("[")) => {
                    self.at += 1;
                    self.subscript(node)?
                }
                Some(Token::Op("(")) => Expr::Call(Box::new(node), self.args()?),
                _ => return Ok(node),
            };
        }
    }

    fn subscript(&mut self, node: Expr) -> Result<Expr, Fault> {
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
            return Ok(Expr::Slice(Box::new(node), Box::new(parts)));
        }
        match parts {
            [Some(index), None, None] => Ok(Expr::Item(Box::new(node), Box::new(index))),
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
                args.star_star = Some(Box::new(self.expr()?));
            } else if self.take_op("*") {
                args.star = Some(Box::new(self.expr()?));
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
    fn filters(&mut self, mut node: Expr) -> Result<Expr, Fault> {
        let mut count = 0;
        loop {
            self.chain(&mut count)?;
            if self.take_op("|") {
                let (name, args) = self.filter_name_args()?;
                node = Expr::Filter(Box::new(node), name, args);
            } else if self.take_name("is") {
                node = self.test(node)?;
            } else if self.is_op("(") {
                node = Expr::Call(Box::new(node), self.args()?);
            } else {
                return Ok(node);
            }
        }
    }

    fn filter_name_args(&mut self) -> Result<(String, Args), Fault> {
        let mut name = self.name()?;
        while self.take_op(".") {
            name = format!("{name}.{}", self.name()?);
        }
        let args = if self.is_op("(") { self.args()? } else { Args::default() };
        Ok((name, args))
    }

    fn filter_chain(&mut self, mut chain: Vec<(String, Args)>) -> Result<Vec<(String, Args)>, Fault> {
        while self.take_op("|") {
            chain.push(self.filter_name_args()?);
        }
        Ok(chain)
    }

    fn test(&mut self, node: Expr) -> Result<Expr, Fault> {
        let negated = self.take_name("not");
        let name = self.name()?;
        let mut args = Args::default();
        let follows = match self.peek() {
            Some(Token::Op("(")) => {
                args = self.args()?;
                false
            }
            Some(Token::Name(n)) if n == "is" => return self.fault("tests cannot be chained with 'is'"),
            Some(Token::Name(n)) => !matches!(n.as_str(), "else" | "or" | "and"),
            Some(Token::Str(_) | Token::Int(_) | Token::Float(_) | Token::Op("[" | "{")) => true,
            _ => false,
        };
        if follows {
            let arg = self.primary()?;
            args.positional = vec![self.postfix(arg)?];
        }
        Ok(Expr::Test { of: Box::new(node), name, args, negated })
    }
}
