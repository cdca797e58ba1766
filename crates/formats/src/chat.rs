//! Chat templates: from messages to the text a model was trained on.
//!
//! A template is a program in a Jinja dialect that comes with the model, so it is as untrusted as the
//! rest of the file, and messages come from untrusted clients. The grammar is minijinja's; the
//! interpreter is our own, so that every step it takes, every byte it reads and every value it makes
//! is charged to a budget. It is compiled and run on threads with a stack of known size, sees
//! nothing but what it is given, and writes nothing but its result.
//!
//! The dialect is that of `transformers`: `trim_blocks` and `lstrip_blocks`, loop controls, Python's
//! string and dict methods, `raise_exception`, `strftime_now`, `tojson` with Python's spacing,
//! `{% generation %}` blocks (which only matter for training and are run as plain text), and
//! Python's spelling of `True`, `False` and `None`.

mod args;
mod budget;
mod checks;
mod fault;
mod filters;
mod format;
mod functions;
mod json;
mod methods;
mod operators;
mod python;
mod run;
mod sorting;
mod source;
mod syntax;
mod texts;
mod time;
mod tree;
mod value;

use crate::checkpoint::Checkpoint;
use crate::gguf::Gguf;
use crate::tokenizer::{Escaped, Escaper};
use crate::{Error, Result, limits};
use ahash::AHashMap;
use budget::Budget;
use fault::{Fault, Outcome};
use run::Run;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::time::SystemTime;
use tree::{Name, Stmt};
use value::Value as Made;

/// A compiled chat template with the special tokens it may name. Immutable and shareable.
#[derive(Debug)]
pub struct ChatTemplate {
    source: Box<str>,
    default: Vec<Stmt>,
    /// A second template, for conversations with tools.
    tool_use: Option<Vec<Stmt>>,
    specials: Vec<(Name, Made)>,
    clock: fn() -> SystemTime,
}

/// The templates and special tokens of a GGUF file as fields of `tokenizer_config.json`.
pub(crate) fn template_fields(gguf: &Gguf) -> Result<Map<String, Value>> {
    let source::Found { default, tool_use, specials } = source::from_gguf(gguf)?;
    let mut fields: Map<String, Value> =
        specials.into_iter().map(|(name, text)| (name, text.into())).collect();
    match (default, tool_use) {
        (Some(default), Some(tool_use)) => {
            let named = [("default", default), ("tool_use", tool_use)];
            let named = named.map(|(name, template)| json!({"name": name, "template": template}));
            fields.insert("chat_template".into(), named.into_iter().collect());
        }
        (Some(default), None) => drop(fields.insert("chat_template".into(), default.into())),
        (None, _) => {}
    }
    Ok(fields)
}

impl ChatTemplate {
    /// Compiles `source`. `specials` are variables such as `bos_token`.
    pub fn new(source: &str, specials: BTreeMap<String, String>) -> Result<Self> {
        Self::with_clock(source, specials, SystemTime::now)
    }

    /// As [`ChatTemplate::new`], with `strftime_now` reading `clock` instead of the system's time.
    pub fn with_clock(
        source: &str,
        specials: BTreeMap<String, String>,
        clock: fn() -> SystemTime,
    ) -> Result<Self> {
        let special =
            |(name, text): (&String, &String)| (name.as_str().into(), text.as_str().into());
        let specials = specials.iter().map(special).collect();
        let default = compile(source)?;
        Ok(Self { source: source.into(), default, tool_use: None, specials, clock })
    }

    /// The template of an open checkpoint; `None` for a model that was not made to chat.
    pub fn of(checkpoint: &Checkpoint) -> Result<Option<Self>> {
        let found = match checkpoint.gguf() {
            Some(gguf) => source::from_gguf(gguf)?,
            None => source::from_folder(checkpoint.folder())?,
        };
        let Some(default) = found.default else { return Ok(None) };
        let mut template = Self::new(&default, found.specials)?;
        template.tool_use = found.tool_use.as_deref().map(compile).transpose()?;
        Ok(Some(template))
    }

    /// The text that it was compiled from.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// The conversation as text.
    ///
    /// `messages` is a list of `{"role": …, "content": …}` objects, `tools` a list of tool
    /// schemas, `extra` the caller's own variables (`enable_thinking` and the like), which win
    /// over ours but may not be called `messages`. `add_generation_prompt` asks for the opening of
    /// the assistant's turn.
    pub fn render(
        &self,
        messages: &Value,
        tools: Option<&Value>,
        add_generation_prompt: bool,
        extra: &Map<String, Value>,
    ) -> Result<String> {
        self.run(messages, tools, add_generation_prompt, extra, None)
    }

    /// As [`ChatTemplate::render`], with control tokens inside messages, tools and extra variables
    /// marked as text for [`crate::tokenizer::Tokenizer::encode_chat`].
    pub fn render_escaped(
        &self,
        messages: &Value,
        tools: Option<&Value>,
        add_generation_prompt: bool,
        extra: &Map<String, Value>,
        escaper: &Escaper,
    ) -> Result<Escaped> {
        let mut strings = Vec::new();
        for value in [Some(messages), tools].into_iter().flatten().chain(extra.values()) {
            collect_strings(value, &mut strings);
        }
        let marker = Escaper::marker(strings.iter().copied());
        let escape = Some((escaper, marker));
        let text = self.run(messages, tools, add_generation_prompt, extra, escape)?;
        Ok(Escaped { text, marker })
    }

    fn run(
        &self,
        messages: &Value,
        tools: Option<&Value>,
        add_generation_prompt: bool,
        extra: &Map<String, Value>,
        escape: Option<(&Escaper, char)>,
    ) -> Result<String> {
        if extra.contains_key("messages") {
            let words = "messages cannot be given a second time, as an extra variable";
            return Err(Error::Template(words.to_owned()));
        }
        let template = match (&self.tool_use, tools) {
            (Some(tool_use), Some(_)) => tool_use,
            _ => &self.default,
        };
        on_own_stack(limits::TEMPLATE_RENDER_STACK, || {
            let budget = Budget::new();
            let convert = |value: &Value| convert(&budget, value, escape, limits::MESSAGE_DEPTH);
            let mut root: AHashMap<Name, Made> = AHashMap::new();
            root.insert("messages".into(), convert(messages)?);
            root.insert("tools".into(), tools.map_or(Ok(Made::None), convert)?);
            root.insert("documents".into(), Made::None);
            root.insert("add_generation_prompt".into(), Made::Bool(add_generation_prompt));
            root.extend(self.specials.iter().cloned());
            for (name, value) in extra {
                root.insert(name.as_str().into(), convert(value)?);
            }
            Run::new(&budget, root, self.clock, escape.map(|(_, marker)| marker)).render(template)
        })
    }
}

fn compile(source: &str) -> Result<Vec<Stmt>> {
    if source.len() > limits::TEMPLATE_BYTES {
        let (found, cap) = (source.len(), limits::TEMPLATE_BYTES);
        return Err(Error::Template(format!("found {found} bytes, allowed: at most {cap}")));
    }
    let source = source::without_generation_tags(source);
    on_own_stack(limits::TEMPLATE_COMPILE_STACK, || syntax::compile(&source))
}

/// Runs `inner` on a thread with a stack of `bytes`: those of servers are small.
fn on_own_stack<T: Send>(bytes: usize, inner: impl FnOnce() -> Outcome<T> + Send) -> Result<T> {
    let made = std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("chat template".into()).stack_size(bytes);
        let thread = thread
            .spawn_scoped(scope, inner)
            .map_err(|error| Fault::new(format!("no thread to render on: {error}")))?;
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    });
    made.map_err(Fault::explain)
}

/// `value` for the template, every string in it escaped.
fn convert(
    budget: &Budget,
    value: &Value,
    escape: Option<(&Escaper, char)>,
    depth: usize,
) -> Outcome<Made> {
    let Some(depth) = depth.checked_sub(1) else {
        let cap = limits::MESSAGE_DEPTH;
        return Err(Fault::new(format!("messages nested deeper than {cap}")));
    };
    let text = |text: &str| match escape {
        Some((escaper, marker)) => Made::text(budget, &escaper.escape(text, marker)),
        None => Made::text(budget, text),
    };
    match value {
        Value::Null => Ok(Made::None),
        Value::Bool(b) => Ok(Made::Bool(*b)),
        Value::Number(n) => Ok(match (n.as_i128(), n.as_f64()) {
            (Some(n), _) => Made::Int(n),
            (None, x) => Made::Float(x.unwrap_or(f64::NAN)),
        }),
        Value::String(string) => text(string),
        Value::Array(items) => {
            let items = items.iter().map(|item| convert(budget, item, escape, depth));
            Made::list(budget, items.collect::<Outcome<_>>()?)
        }
        Value::Object(fields) => {
            let pair = |(key, value): (&String, &Value)| {
                Ok((text(key)?, convert(budget, value, escape, depth)?))
            };
            Made::map(budget, fields.iter().map(pair).collect::<Outcome<_>>()?)
        }
    }
}

/// Every string in `value`, keys included.
fn collect_strings<'a>(value: &'a Value, out: &mut Vec<&'a str>) {
    let mut open = vec![value];
    while let Some(value) = open.pop() {
        match value {
            Value::String(text) => out.push(text),
            Value::Array(items) => open.extend(items),
            Value::Object(fields) => {
                out.extend(fields.keys().map(String::as_str));
                open.extend(fields.values());
            }
            _ => {}
        }
    }
}
