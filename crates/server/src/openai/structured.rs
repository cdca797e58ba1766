//! Structured output: the request fields that restrict an answer, as OpenAI (`response_format`),
//! vLLM (`guided_…`, `structured_outputs`) and SGLang (`regex`) name them.

use super::chat::schema::closed;
use crate::config::Limits;
use crate::describe::api_type;
use crate::error::ApiError;
use grammar::Grammar;
use serde_json::{Map, Value};

api_type! {
    /// The format of the answer.
    pub struct ResponseFormat {
        /// Free text, any JSON object, or JSON that satisfies a schema.
        #[serde(rename = "type")]
        pub kind: String = {"enum": ["text", "json_object", "json_schema"]},
        /// The schema, for `json_schema`.
        pub json_schema: Option<JsonSchema>,
    }
}

api_type! {
    /// A schema with a name.
    pub struct JsonSchema {
        /// Its name.
        pub name: Option<String>,
        /// What it is for.
        pub description: Option<String>,
        /// The schema.
        pub schema: Map<String, Value>,
        /// Accepted and ignored: the schema is always enforced.
        pub strict: Option<bool>,
    }
}

api_type! {
    /// vLLM's restriction of an answer; one of the first five.
    pub struct StructuredOutputs {
        /// A JSON schema, as an object or as text.
        pub json: Option<Value> = {"type": ["object", "string"]},
        /// A regular expression for the whole answer.
        pub regex: Option<String>,
        /// The possible answers.
        pub choice: Option<Vec<String>> = {"minItems": 1},
        /// A Lark grammar.
        pub grammar: Option<String>,
        /// Any JSON object.
        pub json_object: Option<bool>,
        /// Not supported.
        pub structural_tag: Option<Value> = {"type": "null"},
        /// Not supported.
        pub whitespace_pattern: Option<Value> = {"type": "null"},
    }
}

impl StructuredOutputs {
    /// The grammar of the answer, for callers without a request; the error names the field.
    pub fn grammar(&self) -> Result<Option<Grammar>, String> {
        let structured = Structured {
            response_format: None,
            guided_json: None,
            guided_regex: None,
            guided_choice: None,
            guided_grammar: None,
            structured_outputs: Some(self),
            regex: None,
        };
        let found = structured.grammar(&Limits::default());
        found.map(|found| found.map(|(_, grammar)| grammar)).map_err(|error| error.message)
    }
}

/// The fields of a request that restrict its answer.
pub(crate) struct Structured<'a> {
    pub(crate) response_format: Option<&'a ResponseFormat>,
    pub(crate) guided_json: Option<&'a Value>,
    pub(crate) guided_regex: Option<&'a str>,
    pub(crate) guided_choice: Option<&'a [String]>,
    pub(crate) guided_grammar: Option<&'a str>,
    pub(crate) structured_outputs: Option<&'a StructuredOutputs>,
    pub(crate) regex: Option<&'a str>,
}

/// A grammar with the request field it came from.
pub(crate) type Sourced = (&'static str, Grammar);

impl Structured<'_> {
    /// The grammar of the answer, if a field restricts it; an error if several do or if one is
    /// invalid.
    pub(crate) fn grammar(&self, limits: &Limits) -> Result<Option<Sourced>, ApiError> {
        let mut found: Vec<Sourced> = Vec::new();
        if let Some(grammar) =
            self.response_format.map(|f| response_format(f, limits)).transpose()?
        {
            found.extend(grammar.map(|grammar| ("response_format", grammar)));
        }
        let outputs = self.structured_outputs;
        if let Some(outputs) = outputs {
            let refused = [
                ("structured_outputs.structural_tag", &outputs.structural_tag),
                ("structured_outputs.whitespace_pattern", &outputs.whitespace_pattern),
            ];
            if let Some((name, _)) = refused.iter().find(|(_, value)| value.is_some()) {
                return Err(ApiError::invalid(*name, format!("{name} is not supported")));
            }
            if outputs.json_object == Some(true) {
                found.push(("structured_outputs.json_object", Grammar::JsonObject));
            }
        }
        for (name, schema) in [
            ("guided_json", self.guided_json),
            ("structured_outputs.json", outputs.and_then(|o| o.json.as_ref())),
        ] {
            if let Some(schema) = schema {
                found.push((name, json_schema(name, schema, limits)?));
            }
        }
        for (name, regex) in [
            ("guided_regex", self.guided_regex),
            ("structured_outputs.regex", outputs.and_then(|o| o.regex.as_deref())),
            ("regex", self.regex),
        ] {
            found.extend(regex.map(|regex| (name, Grammar::Regex(regex.into()))));
        }
        for (name, choices) in [
            ("guided_choice", self.guided_choice),
            ("structured_outputs.choice", outputs.and_then(|o| o.choice.as_deref())),
        ] {
            if let Some(choices) = choices {
                found.push((name, one_of(name, choices)?));
            }
        }
        for (name, text) in [
            ("guided_grammar", self.guided_grammar),
            ("structured_outputs.grammar", outputs.and_then(|o| o.grammar.as_deref())),
        ] {
            if let Some(text) = text {
                found.push((name, lark(name, text)?));
            }
        }
        if let [(first, _), (second, _), ..] = found.as_slice() {
            let text = format!("{first} and {second} restrict the answer in two ways; send one");
            return Err(ApiError::invalid(*second, text));
        }
        Ok(found.pop())
    }
}

fn response_format(format: &ResponseFormat, limits: &Limits) -> Result<Option<Grammar>, ApiError> {
    match format.kind.as_str() {
        "text" => Ok(None),
        "json_object" => Ok(Some(Grammar::JsonObject)),
        "json_schema" => {
            let Some(named) = &format.json_schema else {
                let text = "json_schema needs a schema: {\"name\": …, \"schema\": {…}}";
                return Err(ApiError::invalid("response_format.json_schema", text));
            };
            schema_size("response_format.json_schema.schema", &named.schema, limits)?;
            Ok(Some(enforced(&named.schema)))
        }
        other => {
            let text = format!("{other:?} is not text, json_object or json_schema");
            Err(ApiError::invalid("response_format.type", text))
        }
    }
}

fn enforced(schema: &Map<String, Value>) -> Grammar {
    Grammar::JsonSchema(closed(Value::Object(schema.clone())).to_string())
}

/// A schema given as an object or as text.
fn json_schema(name: &str, schema: &Value, limits: &Limits) -> Result<Grammar, ApiError> {
    let parsed = match schema {
        Value::String(text) => serde_json::from_str(text).ok(),
        Value::Object(fields) => Some(fields.clone()),
        _ => None,
    };
    let Some(fields) = parsed else {
        let text = format!("{name} must be a JSON schema: an object, or an object as text");
        return Err(ApiError::invalid(name, text));
    };
    schema_size(name, &fields, limits)?;
    Ok(enforced(&fields))
}

/// The grammar of several possible answers.
fn one_of(name: &str, choices: &[String]) -> Result<Grammar, ApiError> {
    if choices.is_empty() {
        return Err(ApiError::invalid(name, format!("{name} must not be empty")));
    }
    let mut regex = String::new();
    for choice in choices {
        regex.push(if regex.is_empty() { '(' } else { '|' });
        for c in choice.chars() {
            if c.is_ascii_punctuation() {
                regex.push('\\');
            }
            regex.push(c);
        }
    }
    regex.push(')');
    Ok(Grammar::Regex(regex))
}

fn lark(name: &str, text: &str) -> Result<Grammar, ApiError> {
    if text.contains("::=") {
        let text =
            format!("{name} must be a Lark grammar (start: …); EBNF (root ::= …) is not supported");
        return Err(ApiError::invalid(name, text));
    }
    Ok(Grammar::Lark(text.into()))
}

/// An error if a schema is too large.
pub(crate) fn schema_size(
    name: &str,
    schema: &Map<String, Value>,
    limits: &Limits,
) -> Result<(), ApiError> {
    let size = serde_json::to_vec(schema).map_or(0, |text| text.len() as u64);
    if size > limits.schema_bytes {
        let text =
            format!("the schema has {size} bytes; at most {} are allowed", limits.schema_bytes);
        return Err(ApiError::invalid(name, text));
    }
    Ok(())
}
