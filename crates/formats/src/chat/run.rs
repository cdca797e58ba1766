//! Running a compiled template.

use super::args::Args;
use super::budget::Budget;
use super::fault::{Fault, Outcome};
use super::tree::{Arg, Expr, For, Kind, Macro, Name, Stmt, Target};
use super::value::{Builder, Closure, Items, Loop, Value};
use super::{functions, methods, operators, python};
use crate::limits;
use ahash::AHashMap;
use std::sync::Arc;
use std::time::SystemTime;

/// One rendering.
pub(super) struct Run<'b> {
    pub(super) budget: &'b Budget,
    /// Variables of the whole template.
    root: AHashMap<Name, Value>,
    /// Variables of loops, `with` and macros, innermost last.
    scopes: Vec<Scope>,
    /// What is being written, innermost last.
    out: Vec<Builder<'b>>,
    /// Recursive loops that are running.
    loops: Vec<(usize, Arc<For>)>,
    /// What blocks with filters have written.
    written: Vec<Value>,
    depth: usize,
    pub(super) clock: fn() -> SystemTime,
    /// What marks control tokens in messages.
    pub(super) marker: Option<char>,
}

#[derive(Default)]
struct Scope {
    names: Vec<(Name, Value)>,
    /// Whether only the template's own variables are seen beyond.
    closed: bool,
}

/// What happens after a statement.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Next {
    Go,
    Break,
    Continue,
}

impl<'b> Run<'b> {
    pub(super) fn new(
        budget: &'b Budget,
        root: AHashMap<Name, Value>,
        clock: fn() -> SystemTime,
        marker: Option<char>,
    ) -> Self {
        let (scopes, out, loops, written) = Default::default();
        Self { budget, root, scopes, out, loops, written, depth: 0, clock, marker }
    }

    /// The text that `template` writes.
    pub(super) fn render(mut self, template: &[Stmt]) -> Outcome<String> {
        self.out.push(Builder::new(self.budget)?);
        self.body(template)?;
        Ok(self.out.pop().map(Builder::into_text).unwrap_or_default())
    }

    /// Runs `inner` one level further down.
    fn deeper<T>(&mut self, inner: impl FnOnce(&mut Self) -> Outcome<T>) -> Outcome<T> {
        if self.depth == limits::TEMPLATE_DEPTH {
            let cap = limits::TEMPLATE_DEPTH;
            let words = format!("found recursion deeper than {cap} levels, allowed: at most {cap}");
            return Err(Fault::new(words));
        }
        self.depth += 1;
        let made = inner(self);
        self.depth -= 1;
        made
    }

    fn write(&mut self, value: &Value) -> Outcome<()> {
        match self.out.last_mut() {
            Some(out) => python::write_str(out, value),
            None => Ok(()),
        }
    }

    /// What `inner` writes, as a value.
    fn captured(&mut self, inner: impl FnOnce(&mut Self) -> Outcome<Next>) -> Outcome<Value> {
        self.out.push(Builder::new(self.budget)?);
        let done = inner(self);
        let text = self.out.pop();
        done?;
        Ok(text.map_or(Value::Undefined, Builder::finish))
    }

    fn body(&mut self, body: &[Stmt]) -> Outcome<Next> {
        for stmt in body {
            let next = self.deeper(|run| run.stmt(stmt)).map_err(|fault| fault.at(stmt.line))?;
            if next != Next::Go {
                return Ok(next);
            }
        }
        Ok(Next::Go)
    }

    fn stmt(&mut self, stmt: &Stmt) -> Outcome<Next> {
        self.budget.step()?;
        match &stmt.kind {
            Kind::Text(text) => {
                if let Some(out) = self.out.last_mut() {
                    out.push(text)?;
                }
            }
            Kind::Emit(expr) => {
                let value = self.eval(expr)?;
                self.write(&value)?;
            }
            Kind::For(stmt) => {
                let over = self.eval(&stmt.over)?;
                return self.for_loop(stmt, &over, 0);
            }
            Kind::If { arms, otherwise } => {
                for (test, body) in arms {
                    if self.eval(test)?.is_true() {
                        return self.body(body);
                    }
                }
                return self.body(otherwise);
            }
            Kind::With { assignments, body } => {
                self.scopes.push(Scope::default());
                let done = self.with(assignments, body);
                self.scopes.pop();
                return done;
            }
            Kind::Set(target, expr) => {
                let value = self.eval(expr)?;
                self.assign(target, value)?;
            }
            Kind::Capture(target, filter, body) => {
                let value = self.filtered(filter, body)?;
                self.assign(target, value)?;
            }
            Kind::Filtered(filter, body) => {
                let value = self.filtered(filter, body)?;
                self.write(&value)?;
            }
            Kind::Macro(declared) => {
                let closure = self.closure(declared);
                self.set(declared.name.clone(), closure);
            }
            Kind::CallBlock { callee, args, caller } => {
                let mut args = self.args(args)?;
                args.named.push(("caller".into(), self.closure(caller)));
                let value = self.call(callee, args)?;
                self.write(&value)?;
            }
            Kind::Do(expr) => {
                self.eval(expr)?;
            }
            Kind::Block(body) => return self.body(body),
            Kind::Continue => return Ok(Next::Continue),
            Kind::Break => return Ok(Next::Break),
        }
        Ok(Next::Go)
    }

    fn with(&mut self, assignments: &[(Target, Expr)], body: &[Stmt]) -> Outcome<Next> {
        for (target, expr) in assignments {
            let value = self.eval(expr)?;
            self.assign(target, value)?;
        }
        self.body(body)
    }

    /// What `body` writes, after the filters of its tag.
    fn filtered(&mut self, filter: &Expr, body: &[Stmt]) -> Outcome<Value> {
        let written = self.captured(|run| run.body(body))?;
        self.written.push(written);
        let value = self.eval(filter);
        self.written.pop();
        value
    }

    fn for_loop(&mut self, stmt: &Arc<For>, over: &Value, depth: usize) -> Outcome<Next> {
        let mut items = self.items(over)?;
        if let Some(filter) = &stmt.filter {
            let mut kept = Vec::new();
            for item in items.iter() {
                self.scopes.push(Scope::default());
                let keep = self.assign(&stmt.target, item.clone()).and_then(|()| self.eval(filter));
                self.scopes.pop();
                if keep?.is_true() {
                    kept.push(item.clone());
                }
            }
            items = Arc::new(Items::new(self.budget, kept)?);
        }
        if items.is_empty() {
            return self.body(&stmt.otherwise);
        }
        let recursive = stmt.recursive;
        if let Some(number) = recursive {
            self.loops.push((number, Arc::clone(stmt)));
        }
        let changed = Arc::default();
        let state = Loop { index: 0, items: Arc::clone(&items), depth, recursive, changed };
        self.scopes.push(Scope::default());
        let done = self.iterate(stmt, &items, Arc::new(state));
        self.scopes.pop();
        if recursive.is_some() {
            self.loops.pop();
        }
        done.map(|()| Next::Go)
    }

    /// Runs the body of a loop for each of `items`, in a scope that is there already.
    fn iterate(&mut self, stmt: &For, items: &[Value], mut state: Arc<Loop>) -> Outcome<()> {
        let name: Name = "loop".into();
        for (index, item) in items.iter().enumerate() {
            self.budget.step()?;
            if let Some(scope) = self.scopes.last_mut() {
                scope.names.clear();
                // Usually the only reference, unless the template stored it somewhere.
                match Arc::get_mut(&mut state) {
                    Some(state) => state.index = index,
                    None => state = Arc::new(state.at(index)),
                }
                scope.names.push((name.clone(), Value::Loop(Arc::clone(&state))));
            }
            self.assign(&stmt.target, item.clone())?;
            if self.body(&stmt.body)? == Next::Break {
                break;
            }
        }
        Ok(())
    }

    /// The items to iterate over.
    pub(super) fn items(&mut self, value: &Value) -> Outcome<Arc<Items>> {
        let items = match value {
            Value::List(items) | Value::Tuple(items) => return Ok(Arc::clone(items)),
            Value::Undefined => Vec::new(),
            Value::Map(fields) => {
                drop(self.budget.hold(fields.entries().len() * size_of::<Value>())?);
                fields.entries().iter().map(|(key, _)| key.clone()).collect()
            }
            Value::Str(text) => {
                let mut chars = Vec::new();
                for c in text.chars() {
                    chars.push(Value::text(self.budget, c.encode_utf8(&mut [0; 4]))?);
                }
                chars
            }
            other => return Err(Fault::new(format!("a {} cannot be iterated over", other.kind()))),
        };
        Ok(Arc::new(Items::new(self.budget, items)?))
    }

    fn assign(&mut self, target: &Target, value: Value) -> Outcome<()> {
        match target {
            Target::Name(name) => self.set(name.clone(), value),
            Target::Field(name, field) => match self.lookup(name) {
                Value::Namespace(namespace) => namespace.set(self.budget, field.clone(), value)?,
                other => {
                    let kind = other.kind();
                    let words =
                        format!("{name} is a {kind}; only fields of a namespace can be set");
                    return Err(Fault::new(words));
                }
            },
            Target::Many(targets) => {
                let items = self.items(&value)?;
                if items.len() != targets.len() {
                    let (found, wanted) = (items.len(), targets.len());
                    return Err(Fault::new(format!("found {found} values for {wanted} names")));
                }
                for (target, item) in targets.iter().zip(items.iter()) {
                    self.assign(target, item.clone())?;
                }
            }
        }
        Ok(())
    }

    fn set(&mut self, name: Name, value: Value) {
        match self.scopes.last_mut() {
            None => _ = self.root.insert(name, value),
            Some(scope) => match scope.names.iter_mut().find(|(known, _)| *known == name) {
                Some((_, known)) => *known = value,
                None => scope.names.push((name, value)),
            },
        }
    }

    fn lookup(&self, name: &str) -> Value {
        for scope in self.scopes.iter().rev() {
            if let Some((_, value)) = scope.names.iter().find(|(known, _)| &**known == name) {
                return value.clone();
            }
            if scope.closed {
                break;
            }
        }
        if let Some(value) = self.root.get(name) {
            return value.clone();
        }
        let function = functions::NAMES.iter().find(|&&known| known == name);
        function.map_or(Value::Undefined, |name| Value::Function(name))
    }

    /// A macro with the variables that it sees besides those of the whole template.
    fn closure(&self, declared: &Arc<Macro>) -> Value {
        let mut around: Vec<(Name, Value)> = Vec::new();
        for scope in self.scopes.iter().rev() {
            for (name, value) in scope.names.iter().filter(|(name, _)| &**name != "loop") {
                if !around.iter().any(|(known, _)| known == name) {
                    around.push((name.clone(), value.clone()));
                }
            }
            if scope.closed {
                break;
            }
        }
        Value::Macro(Arc::new(Closure { declared: Arc::clone(declared), around }))
    }

    pub(super) fn eval(&mut self, expr: &Expr) -> Outcome<Value> {
        self.budget.step()?;
        match expr {
            Expr::Const(value) => Ok(value.clone()),
            Expr::Var(name) => Ok(self.lookup(name)),
            _ => self.deeper(|run| run.eval_parts(expr)),
        }
    }

    fn eval_parts(&mut self, expr: &Expr) -> Outcome<Value> {
        match expr {
            Expr::Const(value) => Ok(value.clone()),
            Expr::Var(name) => Ok(self.lookup(name)),
            Expr::Not(value) => Ok(Value::Bool(!self.eval(value)?.is_true())),
            Expr::Negative(value) => operators::negative(&self.eval(value)?),
            Expr::And(left, right) => {
                let left = self.eval(left)?;
                if left.is_true() { self.eval(right) } else { Ok(left) }
            }
            Expr::Or(left, right) => {
                let left = self.eval(left)?;
                if left.is_true() { Ok(left) } else { self.eval(right) }
            }
            Expr::Math(op, left, right) => {
                let (a, b) = (self.eval(left)?, self.eval(right)?);
                operators::math(self.budget, *op, &a, &b)
                    .map_err(|fault| name_undefined(fault, [(left, &a), (right, &b)]))
            }
            Expr::Compare(first, rest) => {
                let (mut left, mut name) = (self.eval(first)?, &**first);
                for (op, expr) in rest {
                    let right = self.eval(expr)?;
                    let holds = operators::compare(self.budget, *op, &left, &right)
                        .map_err(|fault| name_undefined(fault, [(name, &left), (expr, &right)]))?;
                    if !holds {
                        return Ok(Value::Bool(false));
                    }
                    (left, name) = (right, expr);
                }
                Ok(Value::Bool(true))
            }
            Expr::If { test, yes, no } => match (self.eval(test)?.is_true(), no) {
                (true, _) => self.eval(yes),
                (false, Some(no)) => self.eval(no),
                (false, None) => Ok(Value::Undefined),
            },
            Expr::Filter { name, value, args } => {
                let value = self.eval(value)?;
                let args = self.args(args)?;
                self.filter(name, &value, args)
            }
            Expr::Test { name, value, args } => {
                let value = self.eval(value)?;
                let args = self.args(args)?;
                Ok(Value::Bool(self.test(name, &value, args)?))
            }
            Expr::Attribute(of, name) => {
                let value = self.eval(of)?;
                if value.is_undefined() {
                    return Err(undefined(of));
                }
                Ok(methods::named(&value, name).unwrap_or_else(|| attribute(&value, name)))
            }
            Expr::Item(of, key) => {
                let value = self.eval(of)?;
                if value.is_undefined() {
                    return Err(undefined(of));
                }
                let key = self.eval(key)?;
                self.item(&value, &key)
            }
            Expr::Slice(parts) => {
                let [of, start, stop, step] = &**parts;
                let mut part = |part: &Option<Expr>| match part {
                    Some(part) => self.eval(part),
                    None => Ok(Value::None),
                };
                let (value, start) = (part(of)?, part(start)?);
                let (stop, step) = (part(stop)?, part(step)?);
                operators::slice(self.budget, &value, [&start, &stop, &step])
            }
            Expr::Call(callee, args) => {
                let args = self.args(args)?;
                self.call(callee, args)
            }
            Expr::List(items) => {
                let items = self.all(items)?;
                Value::list(self.budget, items)
            }
            Expr::Tuple(items) => {
                let items = self.all(items)?;
                Value::tuple(self.budget, items)
            }
            Expr::Map(pairs) => {
                let mut entries = Vec::new();
                for (key, value) in pairs {
                    entries.push((self.eval(key)?, self.eval(value)?));
                }
                Value::map(self.budget, entries)
            }
            Expr::Written => Ok(self.written.last().cloned().unwrap_or(Value::Undefined)),
        }
    }

    fn all(&mut self, items: &[Expr]) -> Outcome<Vec<Value>> {
        items.iter().map(|item| self.eval(item)).collect()
    }

    fn args(&mut self, args: &[Arg]) -> Outcome<Args> {
        let mut bound = Args::default();
        for arg in args {
            match arg {
                Arg::Plain(value) => bound.plain.push(self.eval(value)?),
                Arg::Named(name, value) => bound.named.push((name.clone(), self.eval(value)?)),
                Arg::Many(values) => {
                    let values = self.eval(values)?;
                    bound.plain.extend(self.items(&values)?.iter().cloned());
                }
                Arg::ManyNamed(values) => match self.eval(values)? {
                    Value::Map(fields) => {
                        for (key, value) in fields.entries() {
                            let Some(key) = key.as_str() else {
                                return Err(Fault::new("an argument has a name that is no str"));
                            };
                            bound.named.push((key.into(), value.clone()));
                        }
                    }
                    other => {
                        let kind = other.kind();
                        return Err(Fault::new(format!("a {kind} names no arguments")));
                    }
                },
            }
            if bound.plain.len().max(bound.named.len()) > limits::TEMPLATE_ARGS {
                let cap = limits::TEMPLATE_ARGS;
                return Err(Fault::new(format!("found more than {cap} arguments of one call")));
            }
        }
        Ok(bound)
    }

    /// What `value[key]` is.
    pub(super) fn item(&mut self, value: &Value, key: &Value) -> Outcome<Value> {
        let place = |length: usize| {
            let at = key.as_int()?;
            let at = if at < 0 { at.checked_add(length as i128)? } else { at };
            usize::try_from(at).ok().filter(|&at| at < length)
        };
        Ok(match value {
            Value::Map(fields) => fields.get(self.budget, key)?.cloned(),
            Value::List(items) | Value::Tuple(items) => {
                place(items.len()).map(|at| items[at].clone())
            }
            Value::Str(text) => {
                self.budget.work(text.len())?;
                let count = if text.is_ascii() { text.len() } else { text.chars().count() };
                let c = place(count).and_then(|at| text.chars().nth(at));
                match c {
                    Some(c) => Some(Value::text(self.budget, c.encode_utf8(&mut [0; 4]))?),
                    None => None,
                }
            }
            other => key.as_str().map(|name| attribute(other, name)),
        }
        .unwrap_or(Value::Undefined))
    }

    fn call(&mut self, callee: &Expr, args: Args) -> Outcome<Value> {
        if let Expr::Attribute(of, name) = callee {
            let value = self.eval(of)?;
            if value.is_undefined() {
                return Err(undefined(of));
            }
            return match attribute(&value, name) {
                function @ (Value::Macro(_) | Value::Function(_)) => {
                    self.call_value(&function, args)
                }
                _ => methods::call(self, &value, name, args),
            };
        }
        let function = self.eval(callee)?;
        if function.is_undefined() {
            return Err(undefined(callee));
        }
        self.call_value(&function, args)
    }

    fn call_value(&mut self, function: &Value, args: Args) -> Outcome<Value> {
        match function {
            Value::Macro(closure) => self.deeper(|run| run.call_macro(closure, args)),
            Value::Loop(state) => {
                let found = self.loops.iter().rev().find(|(n, _)| Some(*n) == state.recursive);
                let Some((_, stmt)) = found.cloned() else {
                    return Err(Fault::new("loop() is called outside of a recursive loop"));
                };
                let [over] = args.bind("loop", ["iterable"])?;
                let over = over.unwrap_or(Value::Undefined);
                let depth = state.depth + 1;
                self.deeper(|run| run.captured(|run| run.for_loop(&stmt, &over, depth)))
            }
            Value::Function(name) => self.function(name, args),
            Value::Method(method) => methods::call(self, &method.of, method.name, args),
            other => Err(Fault::new(format!("a {} cannot be called", other.kind()))),
        }
    }

    fn call_macro(&mut self, closure: &Closure, args: Args) -> Outcome<Value> {
        let declared = &closure.declared;
        let name = &declared.name;
        if args.plain.len() > declared.params.len() {
            let (found, cap) = (args.plain.len(), declared.params.len());
            return Err(Fault::new(format!(
                "{name}: found {found} arguments, allowed: at most {cap}"
            )));
        }
        // The variables around it, then a scope of its own.
        self.scopes.push(Scope { names: closure.around.clone(), closed: true });
        self.scopes.push(Scope::default());
        let done = self.bind(declared, args);
        let done = done.and_then(|()| self.captured(|run| run.body(&declared.body)));
        self.scopes.truncate(self.scopes.len() - 2);
        done
    }

    fn bind(&mut self, declared: &Macro, args: Args) -> Outcome<()> {
        let mut plain = args.plain.into_iter();
        let mut named = args.named;
        for (param, default) in &declared.params {
            let by_name = named.iter().position(|(name, _)| name == param);
            let value = match (plain.next(), by_name, default) {
                (Some(value), None, _) => value,
                (None, Some(at), _) => named.swap_remove(at).1,
                (None, None, Some(default)) => self.eval(default)?,
                (None, None, None) => Value::Undefined,
                (Some(_), Some(_), _) => {
                    return Err(Fault::new(format!("{}: found {param} twice", declared.name)));
                }
            };
            self.set(param.clone(), value);
        }
        for (name, value) in named {
            if &*name != "caller" {
                let words = format!("{}: found an argument {name} too many", declared.name);
                return Err(Fault::new(words));
            }
            self.set(name, value);
        }
        Ok(())
    }
}

/// What `value.name` is.
pub(super) fn attribute(value: &Value, name: &str) -> Value {
    match value {
        Value::Map(fields) => fields.named(name).cloned().unwrap_or(Value::Undefined),
        Value::Namespace(namespace) => namespace.get(name),
        // What `groupby` makes.
        Value::Tuple(pair) if pair.len() == 2 && matches!(name, "grouper" | "list") => {
            pair[usize::from(name == "list")].clone()
        }
        Value::Loop(state) => {
            let (index, length) = (state.index, state.items.len());
            match name {
                "index" => (index + 1).into(),
                "index0" => index.into(),
                "revindex" => (length - index).into(),
                "revindex0" => (length - index - 1).into(),
                "first" => Value::Bool(index == 0),
                "last" => Value::Bool(index + 1 == length),
                "length" => length.into(),
                "depth" => (state.depth + 1).into(),
                "depth0" => state.depth.into(),
                "previtem" if index > 0 => state.items[index - 1].clone(),
                "nextitem" if index + 1 < length => state.items[index + 1].clone(),
                _ => Value::Undefined,
            }
        }
        _ => Value::Undefined,
    }
}

fn undefined(expr: &Expr) -> Fault {
    Fault::new(format!("{} is undefined", describe(expr)))
}

/// Names which of two values was undefined, if that caused the error.
fn name_undefined(fault: Fault, values: [(&Expr, &Value); 2]) -> Fault {
    let undefined = values.into_iter().find(|(_, value)| value.is_undefined());
    undefined.map_or(fault, |(expr, _)| self::undefined(expr))
}

/// A short description of an expression.
fn describe(expr: &Expr) -> String {
    match expr {
        Expr::Var(name) => name.to_string(),
        Expr::Attribute(of, name) if matches!(**of, Expr::Var(_) | Expr::Attribute(..)) => {
            format!("{}.{name}", describe(of))
        }
        Expr::Attribute(_, name) => format!("….{name}"),
        _ => "a value".to_owned(),
    }
}
