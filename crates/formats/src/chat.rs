//! Chat templates: from messages to the text a model was trained on.
//!
//! A template is a program in a Jinja dialect that comes with the model, so it is as hostile as the
//! rest of the file. It runs with a limit on its source, its instructions, its nesting and its
//! output, sees nothing but what it is given, and writes nothing but its result.
//!
//! The dialect is that of `transformers`: `trim_blocks` and `lstrip_blocks`, loop controls, Python's
//! string and dict methods, `raise_exception`, `strftime_now`, `tojson` with Python's spacing,
//! `{% generation %}` blocks (which only matter for training and are run as plain text), and
//! Python's spelling of `True`, `False` and `None`.

mod json;
mod python;
mod source;
mod time;

use crate::checkpoint::Checkpoint;
use crate::error::one_line;
use crate::tokenizer::{Escaped, Escaper};
use crate::{Error, Result, limits};
use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, ErrorKind, Value as Jinja};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::time::SystemTime;

/// A compiled chat template with the special tokens it may name. Immutable and shareable.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    specials: BTreeMap<String, String>,
    /// Whether a second template, for conversations with tools, came with the model.
    has_tool_use: bool,
}

const DEFAULT: &str = "default";
const TOOL_USE: &str = "tool_use";

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
        let mut template = Self { environment: environment(clock), specials, has_tool_use: false };
        template.add(DEFAULT, source)?;
        Ok(template)
    }

    /// The template of an open checkpoint; `None` for a model that was not made to chat.
    pub fn of(checkpoint: &Checkpoint) -> Result<Option<Self>> {
        let found = match checkpoint.gguf() {
            Some(gguf) => source::from_gguf(gguf)?,
            None => source::from_folder(checkpoint.folder())?,
        };
        let Some(default) = found.default else { return Ok(None) };
        let mut template = Self::new(&default, found.specials)?;
        if let Some(tool_use) = found.tool_use {
            template.add(TOOL_USE, &tool_use)?;
            template.has_tool_use = true;
        }
        Ok(Some(template))
    }

    fn add(&mut self, name: &'static str, source: &str) -> Result<()> {
        if source.len() > limits::TEMPLATE_BYTES {
            let (found, cap) = (source.len(), limits::TEMPLATE_BYTES);
            return Err(Error::Template(format!("found {found} bytes, allowed: at most {cap}")));
        }
        let source = source::without_generation_tags(source);
        self.environment.add_template_owned(name, source).map_err(explain)
    }

    /// The conversation as text.
    ///
    /// `messages` is a list of `{"role": …, "content": …}` objects, `tools` a list of tool
    /// schemas, `extra` the caller's own variables (`enable_thinking` and the like), which win
    /// over ours. `add_generation_prompt` asks for the opening of the assistant's turn.
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
        let convert = |value: &Value| convert(value, escape, limits::MESSAGE_DEPTH);
        let mut context: BTreeMap<String, Jinja> = BTreeMap::new();
        context.insert("messages".into(), convert(messages)?);
        context.insert("tools".into(), tools.map_or(Ok(Jinja::from(())), convert)?);
        context.insert("documents".into(), Jinja::from(()));
        context.insert("add_generation_prompt".into(), add_generation_prompt.into());
        for (name, text) in &self.specials {
            context.insert(name.clone(), text.as_str().into());
        }
        for (name, value) in extra {
            context.insert(name.clone(), convert(value)?);
        }
        if let Some((_, marker)) = escape {
            context.insert(json::MARKER.into(), marker.to_string().into());
        }
        let name = if tools.is_some() && self.has_tool_use { TOOL_USE } else { DEFAULT };
        let template = self.environment.get_template(name).map_err(explain)?;
        let mut out = Capped(Vec::new());
        template.render_captured_to(Jinja::from(context), &mut out).map_err(explain)?;
        String::from_utf8(out.0).map_err(|error| Error::Template(error.to_string()))
    }
}

fn environment(clock: fn() -> SystemTime) -> Environment<'static> {
    let mut env = Environment::new();
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    env.set_syntax(syntax.expect("the standard delimiters are valid"));
    env.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    env.set_formatter(python::format);
    env.set_fuel(Some(limits::TEMPLATE_FUEL));
    env.set_recursion_limit(limits::TEMPLATE_DEPTH);
    env.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    // Iterating over none is nothing here but an error in Python, where none is not iterable.
    env.add_test("iterable", |value: &Jinja| !value.is_none() && value.try_iter().is_ok());
    env.add_filter("tojson", json::tojson);
    env.add_function("raise_exception", |message: String| -> std::result::Result<Jinja, _> {
        Err(minijinja::Error::new(ErrorKind::InvalidOperation, format!("{RAISED}{message}")))
    });
    env.add_function("strftime_now", move |format: String| time::strftime(&format, clock()));
    env
}

/// What marks an error as the template's own words.
const RAISED: &str = "raised by the template: ";

fn explain(error: minijinja::Error) -> Error {
    if let Some(words) = error.detail().and_then(|detail| detail.strip_prefix(RAISED)) {
        return Error::Template(one_line(&format!("{RAISED}{words}")));
    }
    Error::Template(one_line(&error.to_string()))
}

/// A buffer that refuses to grow past the cap.
struct Capped(Vec<u8>);

impl std::io::Write for Capped {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if self.0.len() + bytes.len() > limits::RENDERED_BYTES {
            let cap = limits::RENDERED_BYTES;
            return Err(std::io::Error::other(format!("more than {cap} bytes of text")));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// `value` for the template, every string in it escaped.
fn convert(value: &Value, escape: Option<(&Escaper, char)>, depth: usize) -> Result<Jinja> {
    let Some(depth) = depth.checked_sub(1) else {
        let cap = limits::MESSAGE_DEPTH;
        return Err(Error::Template(format!("messages nested deeper than {cap}")));
    };
    let text = |text: &str| match escape {
        Some((escaper, marker)) => escaper.escape(text, marker),
        None => text.to_owned(),
    };
    Ok(match value {
        Value::Null => Jinja::from(()),
        Value::Bool(b) => (*b).into(),
        Value::Number(n) => match (n.as_i64(), n.as_u64()) {
            (Some(n), _) => n.into(),
            (None, Some(n)) => n.into(),
            (None, None) => n.as_f64().unwrap_or(f64::NAN).into(),
        },
        Value::String(string) => text(string).into(),
        Value::Array(items) => items
            .iter()
            .map(|item| convert(item, escape, depth))
            .collect::<Result<Vec<_>>>()?
            .into(),
        Value::Object(fields) => {
            let pair =
                |(key, value): (&String, &Value)| Ok((text(key), convert(value, escape, depth)?));
            Jinja::from_pairs(fields.iter().map(pair).collect::<Result<Vec<_>>>()?)
        }
    })
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
