//! From the source of a template to a [`tree`](super::tree).
//!
//! The grammar is minijinja's: its parser reads the source. That parser calls itself for every
//! `not`, `elif` or bracket, so the tokens of the source are counted before it is called.

use super::fault::{Fault, Outcome};
use super::tree::{Arg, Comparison, Expr, For, Kind, Macro, Math, Name, Stmt, Target};
use super::value::Value;
use crate::limits;
use minijinja::machinery::{Token, Tokenizer, ast, parse};
use minijinja::syntax::SyntaxConfig;
use std::sync::Arc;

const FILE: &str = "chat template";

/// Compiles `source`. Needs a deep stack.
pub(super) fn compile(source: &str) -> Outcome<Vec<Stmt>> {
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    let syntax = syntax.map_err(|error| Fault::new(error.to_string()))?;
    count_lines(source)?;
    count_words(source, &syntax)?;
    let template = parse(source, FILE, syntax).map_err(syntax_fault)?;
    let ast::Stmt::Template(template) = template else {
        return Err(Fault::new("found no template"));
    };
    Compiler { depth: 0, loops: 0 }.body(&template.children)
}

fn syntax_fault(error: minijinja::Error) -> Fault {
    let words = error.detail().map_or_else(|| error.kind().to_string(), str::to_owned);
    let line = error.line().unwrap_or(0) as u32;
    Fault::new(format!("syntax error: {words}")).at(line)
}

/// Refuses lines longer, or more of them, than the parser can count.
fn count_lines(source: &str) -> Outcome<()> {
    let cap = limits::TEMPLATE_LINES;
    let longest = source.split('\n').map(str::len).max().unwrap_or(0);
    let lines = source.split('\n').count();
    for (found, what) in [(longest, "bytes in one line"), (lines, "lines")] {
        if found > cap {
            return Err(Fault::new(format!("found {found} {what}, allowed: at most {cap}")));
        }
    }
    Ok(())
}

/// Refuses tags and chains so long that parsing them would need too deep a stack.
fn count_words(source: &str, syntax: &SyntaxConfig) -> Outcome<()> {
    let mut tokenizer = Tokenizer::new(source, FILE, false, syntax.clone());
    let (mut words, mut arms) = (0, 0);
    let mut opened = false;
    while let Some((token, span)) = tokenizer.next_token().map_err(syntax_fault)? {
        let starts = matches!(token, Token::VariableStart | Token::BlockStart);
        if opened && matches!(token, Token::Ident("elif")) {
            arms += 1;
        }
        words = if starts { 0 } else { words + 1 };
        opened = starts;
        let counts = [
            (words, limits::TEMPLATE_TAG_WORDS, "words in one tag"),
            (arms, limits::TEMPLATE_ARMS, "elif"),
        ];
        for (found, cap, what) in counts {
            if found > cap {
                let words = format!("found more than {cap} {what}, allowed: at most {cap}");
                return Err(Fault::new(words).at(u32::from(span.start_line)));
            }
        }
    }
    Ok(())
}

struct Compiler {
    depth: usize,
    loops: usize,
}

impl Compiler {
    /// Runs `inner` one level further down.
    fn deeper<T>(&mut self, inner: impl FnOnce(&mut Self) -> Outcome<T>) -> Outcome<T> {
        if self.depth == limits::TEMPLATE_NESTING {
            let cap = limits::TEMPLATE_NESTING;
            return Err(Fault::new(format!(
                "found an expression or block nested deeper than {cap}"
            )));
        }
        self.depth += 1;
        let made = inner(self);
        self.depth -= 1;
        made
    }

    fn body(&mut self, body: &[ast::Stmt]) -> Outcome<Vec<Stmt>> {
        self.deeper(|compiler| body.iter().map(|stmt| compiler.stmt(stmt)).collect())
    }

    fn stmt(&mut self, stmt: &ast::Stmt) -> Outcome<Stmt> {
        let (span, kind) = match stmt {
            ast::Stmt::Template(s) => (s.span(), self.body(&s.children).map(Kind::Block)),
            ast::Stmt::EmitExpr(s) => (s.span(), self.expr(&s.expr).map(Kind::Emit)),
            ast::Stmt::EmitRaw(s) => (s.span(), Ok(Kind::Text(s.raw.into()))),
            ast::Stmt::ForLoop(s) => (s.span(), self.for_loop(s)),
            ast::Stmt::IfCond(s) => (s.span(), self.condition(s)),
            ast::Stmt::WithBlock(s) => (s.span(), self.with(s)),
            ast::Stmt::Set(s) => (s.span(), self.set(s)),
            ast::Stmt::SetBlock(s) => (s.span(), self.capture(s)),
            ast::Stmt::FilterBlock(s) => (s.span(), self.filtered(s)),
            ast::Stmt::AutoEscape(s) => (s.span(), self.body(&s.body).map(Kind::Block)),
            ast::Stmt::Macro(s) => (s.span(), self.declare(s).map(Kind::Macro)),
            ast::Stmt::CallBlock(s) => (s.span(), self.call_block(s)),
            ast::Stmt::Do(s) => (s.span(), self.call(&s.call).map(Kind::Do)),
            ast::Stmt::Continue(s) => (s.span(), Ok(Kind::Continue)),
            ast::Stmt::Break(s) => (s.span(), Ok(Kind::Break)),
            ast::Stmt::Block(s) => (s.span(), refuse("block")),
            ast::Stmt::Import(s) => (s.span(), refuse("import")),
            ast::Stmt::FromImport(s) => (s.span(), refuse("from")),
            ast::Stmt::Extends(s) => (s.span(), refuse("extends")),
            ast::Stmt::Include(s) => (s.span(), refuse("include")),
        };
        let line = u32::from(span.start_line);
        Ok(Stmt { line, kind: kind.map_err(|fault| fault.at(line))? })
    }

    fn for_loop(&mut self, stmt: &ast::ForLoop) -> Outcome<Kind> {
        self.loops += 1;
        let number = self.loops;
        Ok(Kind::For(Arc::new(For {
            target: self.target(&stmt.target)?,
            over: self.expr(&stmt.iter)?,
            filter: stmt.filter_expr.as_ref().map(|filter| self.expr(filter)).transpose()?,
            recursive: stmt.recursive.then_some(number),
            body: self.body(&stmt.body)?,
            otherwise: self.body(&stmt.else_body)?,
        })))
    }

    /// An `if` with its `elif`s, which the parser nests.
    fn condition(&mut self, stmt: &ast::IfCond) -> Outcome<Kind> {
        let mut arms = vec![(self.expr(&stmt.expr)?, self.body(&stmt.true_body)?)];
        let mut rest = &stmt.false_body;
        while let [ast::Stmt::IfCond(next)] = &rest[..] {
            arms.push((self.expr(&next.expr)?, self.body(&next.true_body)?));
            rest = &next.false_body;
        }
        Ok(Kind::If { arms, otherwise: self.body(rest)? })
    }

    fn with(&mut self, stmt: &ast::WithBlock) -> Outcome<Kind> {
        let mut assignments = Vec::new();
        for (target, value) in &stmt.assignments {
            assignments.push((self.target(target)?, self.expr(value)?));
        }
        Ok(Kind::With { assignments, body: self.body(&stmt.body)? })
    }

    fn set(&mut self, stmt: &ast::Set) -> Outcome<Kind> {
        Ok(Kind::Set(self.target(&stmt.target)?, self.expr(&stmt.expr)?))
    }

    fn capture(&mut self, stmt: &ast::SetBlock) -> Outcome<Kind> {
        let filter = stmt.filter.as_ref().map(|filter| self.expr(filter)).transpose()?;
        let target = self.target(&stmt.target)?;
        Ok(Kind::Capture(target, filter.unwrap_or(Expr::Written), self.body(&stmt.body)?))
    }

    fn filtered(&mut self, stmt: &ast::FilterBlock) -> Outcome<Kind> {
        Ok(Kind::Filtered(self.expr(&stmt.filter)?, self.body(&stmt.body)?))
    }

    fn declare(&mut self, stmt: &ast::Macro) -> Outcome<Arc<Macro>> {
        let required = stmt.args.len().saturating_sub(stmt.defaults.len());
        let mut params = Vec::new();
        for (place, param) in stmt.args.iter().enumerate() {
            let ast::Expr::Var(name) = param else {
                return Err(Fault::new("found a parameter that is no name"));
            };
            let default = place.checked_sub(required).and_then(|at| stmt.defaults.get(at));
            let default = default.map(|default| self.expr(default)).transpose()?;
            params.push((Name::from(name.id), default));
        }
        let body = self.body(&stmt.body)?;
        Ok(Arc::new(Macro { name: stmt.name.into(), params, body }))
    }

    fn call_block(&mut self, stmt: &ast::CallBlock) -> Outcome<Kind> {
        let callee = self.expr(&stmt.call.expr)?;
        let args = self.args(&stmt.call.args)?;
        Ok(Kind::CallBlock { callee, args, caller: self.declare(&stmt.macro_decl)? })
    }

    fn target(&mut self, target: &ast::Expr) -> Outcome<Target> {
        match target {
            ast::Expr::Var(name) => Ok(Target::Name(name.id.into())),
            ast::Expr::GetAttr(field) => match &field.expr {
                ast::Expr::Var(name) => Ok(Target::Field(name.id.into(), field.name.into())),
                _ => Err(Fault::new("only a name or a field of a namespace can be set")),
            },
            ast::Expr::List(names) => self.deeper(|compiler| {
                let targets = names.items.iter().map(|target| compiler.target(target));
                Ok(Target::Many(targets.collect::<Outcome<_>>()?))
            }),
            _ => Err(Fault::new("only a name or a field of a namespace can be set")),
        }
    }

    fn boxed(&mut self, expr: &ast::Expr) -> Outcome<Box<Expr>> {
        self.expr(expr).map(Box::new)
    }

    fn expr(&mut self, expr: &ast::Expr) -> Outcome<Expr> {
        self.deeper(|compiler| compiler.expr_here(expr))
    }

    fn expr_here(&mut self, expr: &ast::Expr) -> Outcome<Expr> {
        Ok(match expr {
            ast::Expr::Var(e) => Expr::Var(e.id.into()),
            ast::Expr::Const(e) => Expr::Const(constant(&e.value)?),
            ast::Expr::Slice(e) => {
                let mut part = |part: &Option<ast::Expr>| {
                    part.as_ref().map(|part| self.expr(part)).transpose()
                };
                let (start, stop, step) = (part(&e.start)?, part(&e.stop)?, part(&e.step)?);
                Expr::Slice(Box::new([Some(self.expr(&e.expr)?), start, stop, step]))
            }
            ast::Expr::UnaryOp(e) => match e.op {
                ast::UnaryOpKind::Not => Expr::Not(self.boxed(&e.expr)?),
                ast::UnaryOpKind::Neg => Expr::Negative(self.boxed(&e.expr)?),
            },
            ast::Expr::BinOp(e) => {
                let (left, right) = (self.boxed(&e.left)?, self.boxed(&e.right)?);
                match operator(e.op) {
                    Operator::And => Expr::And(left, right),
                    Operator::Or => Expr::Or(left, right),
                    Operator::Math(op) => Expr::Math(op, left, right),
                    Operator::Compare(op) => Expr::Compare(left, vec![(op, *right)]),
                }
            }
            ast::Expr::Compare(e) => {
                let first = self.boxed(&e.expr)?;
                let rest = e.ops.iter().map(|op| Ok((comparison(op.op), self.expr(&op.expr)?)));
                Expr::Compare(first, rest.collect::<Outcome<_>>()?)
            }
            ast::Expr::IfExpr(e) => Expr::If {
                test: self.boxed(&e.test_expr)?,
                yes: self.boxed(&e.true_expr)?,
                no: e.false_expr.as_ref().map(|no| self.boxed(no)).transpose()?,
            },
            ast::Expr::Filter(e) => Expr::Filter {
                name: e.name.into(),
                value: match &e.expr {
                    Some(value) => self.boxed(value)?,
                    None => Box::new(Expr::Written),
                },
                args: self.args(&e.args)?,
            },
            ast::Expr::Test(e) => Expr::Test {
                name: e.name.into(),
                value: self.boxed(&e.expr)?,
                args: self.args(&e.args)?,
            },
            ast::Expr::GetAttr(e) => Expr::Attribute(self.boxed(&e.expr)?, e.name.into()),
            ast::Expr::GetItem(e) => {
                Expr::Item(self.boxed(&e.expr)?, self.boxed(&e.subscript_expr)?)
            }
            ast::Expr::Call(e) => self.call(e)?,
            ast::Expr::List(e) => Expr::List(self.exprs(&e.items)?),
            ast::Expr::Tuple(e) => Expr::Tuple(self.exprs(&e.items)?),
            ast::Expr::Map(e) => {
                let pairs = e.keys.iter().zip(&e.values);
                let pairs = pairs.map(|(key, value)| Ok((self.expr(key)?, self.expr(value)?)));
                Expr::Map(pairs.collect::<Outcome<_>>()?)
            }
        })
    }

    fn exprs(&mut self, items: &[ast::Expr]) -> Outcome<Vec<Expr>> {
        items.iter().map(|item| self.expr(item)).collect()
    }

    fn call(&mut self, call: &ast::Call) -> Outcome<Expr> {
        Ok(Expr::Call(self.boxed(&call.expr)?, self.args(&call.args)?))
    }

    fn args(&mut self, args: &[ast::CallArg]) -> Outcome<Vec<Arg>> {
        let arg = |arg: &ast::CallArg| {
            Ok(match arg {
                ast::CallArg::Pos(value) => Arg::Plain(self.expr(value)?),
                ast::CallArg::Kwarg(name, value) => Arg::Named((*name).into(), self.expr(value)?),
                ast::CallArg::PosSplat(values) => Arg::Many(self.expr(values)?),
                ast::CallArg::KwargSplat(values) => Arg::ManyNamed(self.expr(values)?),
            })
        };
        args.iter().map(arg).collect()
    }
}

fn refuse(tag: &str) -> Outcome<Kind> {
    Err(Fault::new(format!("{{% {tag} %}} needs other templates, and there are none")))
}

enum Operator {
    And,
    Or,
    Math(Math),
    Compare(Comparison),
}

fn operator(op: ast::BinOpKind) -> Operator {
    use ast::BinOpKind as Op;
    match op {
        Op::ScAnd => Operator::And,
        Op::ScOr => Operator::Or,
        Op::Add => Operator::Math(Math::Add),
        Op::Sub => Operator::Math(Math::Sub),
        Op::Mul => Operator::Math(Math::Mul),
        Op::Div => Operator::Math(Math::Div),
        Op::FloorDiv => Operator::Math(Math::FloorDiv),
        Op::Rem => Operator::Math(Math::Rem),
        Op::Pow => Operator::Math(Math::Pow),
        Op::Concat => Operator::Math(Math::Concat),
        Op::Eq => Operator::Compare(Comparison::Eq),
        Op::Ne => Operator::Compare(Comparison::Ne),
        Op::Lt => Operator::Compare(Comparison::Lt),
        Op::Lte => Operator::Compare(Comparison::Lte),
        Op::Gt => Operator::Compare(Comparison::Gt),
        Op::Gte => Operator::Compare(Comparison::Gte),
        Op::In => Operator::Compare(Comparison::In),
    }
}

fn comparison(op: ast::CompareOpKind) -> Comparison {
    use ast::CompareOpKind as Op;
    match op {
        Op::Eq => Comparison::Eq,
        Op::Ne => Comparison::Ne,
        Op::Lt => Comparison::Lt,
        Op::Lte => Comparison::Lte,
        Op::Gt => Comparison::Gt,
        Op::Gte => Comparison::Gte,
        Op::In => Comparison::In,
        Op::NotIn => Comparison::NotIn,
    }
}

fn constant(value: &minijinja::Value) -> Outcome<Value> {
    use minijinja::value::ValueKind;
    Ok(match value.kind() {
        ValueKind::None => Value::None,
        ValueKind::Bool => Value::Bool(value.is_true()),
        ValueKind::Number if value.is_integer() => match i128::try_from(value.clone()) {
            Ok(n) => Value::Int(n),
            Err(_) => return Err(Fault::new(format!("found {value}, a number too large"))),
        },
        ValueKind::Number => Value::Float(f64::try_from(value.clone()).unwrap_or(f64::NAN)),
        _ => Value::from(value.as_str().unwrap_or_default()),
    })
}
