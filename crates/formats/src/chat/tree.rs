//! The syntax tree of a compiled template.

use super::value::Value;
use std::sync::Arc;

pub(super) type Name = Arc<str>;

#[derive(Debug)]
pub(super) enum Expr {
    Const(Value),
    Var(Name),
    Not(Box<Expr>),
    Negative(Box<Expr>),
    And(Box<Expr>, Box<Expr>),
    Or(Box<Expr>, Box<Expr>),
    Math(Math, Box<Expr>, Box<Expr>),
    /// A chain of comparisons, all of which must hold.
    Compare(Box<Expr>, Vec<(Comparison, Expr)>),
    If {
        test: Box<Expr>,
        yes: Box<Expr>,
        no: Option<Box<Expr>>,
    },
    Filter {
        name: Name,
        value: Box<Expr>,
        args: Vec<Arg>,
    },
    Test {
        name: Name,
        value: Box<Expr>,
        args: Vec<Arg>,
    },
    Attribute(Box<Expr>, Name),
    Item(Box<Expr>, Box<Expr>),
    Slice(Box<[Option<Expr>; 4]>),
    Call(Box<Expr>, Vec<Arg>),
    List(Vec<Expr>),
    Tuple(Vec<Expr>),
    Map(Vec<(Expr, Expr)>),
    /// What a block of the template wrote: the value that the filters of the block begin with.
    Written,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Math {
    Add,
    Sub,
    Mul,
    Div,
    FloorDiv,
    Rem,
    Pow,
    Concat,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Comparison {
    Eq,
    Ne,
    Lt,
    Lte,
    Gt,
    Gte,
    In,
    NotIn,
}

#[derive(Debug)]
pub(super) enum Arg {
    Plain(Expr),
    Named(Name, Expr),
    Many(Expr),
    ManyNamed(Expr),
}

/// What is assigned to.
#[derive(Debug)]
pub(super) enum Target {
    Name(Name),
    Field(Name, Name),
    Many(Vec<Target>),
}

/// A statement and the line it begins at.
#[derive(Debug)]
pub(super) struct Stmt {
    pub(super) line: u32,
    pub(super) kind: Kind,
}

#[derive(Debug)]
pub(super) enum Kind {
    Text(Box<str>),
    Emit(Expr),
    For(Arc<For>),
    If {
        arms: Vec<(Expr, Vec<Stmt>)>,
        otherwise: Vec<Stmt>,
    },
    With {
        assignments: Vec<(Target, Expr)>,
        body: Vec<Stmt>,
    },
    Set(Target, Expr),
    /// Sets a variable to what the body writes, after filters.
    Capture(Target, Expr, Vec<Stmt>),
    /// Writes what the body writes, after filters.
    Filtered(Expr, Vec<Stmt>),
    Macro(Arc<Macro>),
    /// Calls a macro with another, made of a body, as its `caller`.
    CallBlock {
        callee: Expr,
        args: Vec<Arg>,
        caller: Arc<Macro>,
    },
    Do(Expr),
    Block(Vec<Stmt>),
    Continue,
    Break,
}

#[derive(Debug)]
pub(super) struct For {
    pub(super) target: Target,
    pub(super) over: Expr,
    pub(super) filter: Option<Expr>,
    /// The number of a loop that may call itself.
    pub(super) recursive: Option<usize>,
    pub(super) body: Vec<Stmt>,
    pub(super) otherwise: Vec<Stmt>,
}

#[derive(Debug)]
pub(super) struct Macro {
    pub(super) name: Name,
    pub(super) params: Vec<(Name, Option<Expr>)>,
    pub(super) body: Vec<Stmt>,
}
