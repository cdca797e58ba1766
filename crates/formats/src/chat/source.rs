//! Where templates come from, and what is taken out of them.

use crate::checkpoint::read_capped;
use crate::gguf::Gguf;
use crate::safetensors::json_error;
use crate::{Result, limits};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::path::Path;

/// The templates of a model and the tokens they may name.
#[derive(Default)]
pub(super) struct Found {
    pub(super) default: Option<String>,
    pub(super) tool_use: Option<String>,
    pub(super) specials: BTreeMap<String, String>,
}

/// `chat_template.jinja`, or the `chat_template` of `tokenizer_config.json`: one template, or a
/// list of named ones.
pub(super) fn from_folder(folder: &Path) -> Result<Found> {
    let mut found = Found::default();
    let config = folder.join("tokenizer_config.json");
    if config.is_file() {
        let bytes = read_capped(&config, limits::CONFIG_BYTES)?;
        let fields: Map<String, Value> = serde_json::from_slice(&bytes)
            .map_err(|error| json_error(&config, 0, "tokenizer config", &bytes, &error))?;
        found.read_config(&fields);
    }
    let jinja = folder.join("chat_template.jinja");
    if jinja.is_file() {
        let bytes = read_capped(&jinja, limits::TEMPLATE_BYTES as u64)?;
        found.default = Some(String::from_utf8_lossy(&bytes).into_owned());
    }
    Ok(found)
}

impl Found {
    fn read_config(&mut self, fields: &Map<String, Value>) {
        match fields.get("chat_template") {
            Some(Value::String(source)) => self.default = Some(source.clone()),
            Some(Value::Array(named)) => {
                for entry in named {
                    let text = |key| entry.get(key).and_then(Value::as_str);
                    match (text("name"), text("template")) {
                        (Some("default"), Some(source)) => self.default = Some(source.to_owned()),
                        (Some("tool_use"), Some(source)) => self.tool_use = Some(source.to_owned()),
                        _ => {}
                    }
                }
            }
            _ => {}
        }
        for (name, value) in fields {
            // A token is a string, or an object with its text and matching rules.
            let text = value.as_str().or_else(|| value.get("content").and_then(Value::as_str));
            if let (true, Some(text)) = (name.ends_with("_token"), text) {
                self.specials.insert(name.clone(), text.to_owned());
            }
        }
    }
}

/// `tokenizer.chat_template` and the texts behind the special ids.
pub(super) fn from_gguf(gguf: &Gguf) -> Result<Found> {
    let owned = |key| Ok::<_, crate::Error>(gguf.str(key)?.map(str::to_owned));
    let mut found = Found {
        default: owned("tokenizer.chat_template")?,
        tool_use: owned("tokenizer.chat_template.tool_use")?,
        specials: BTreeMap::new(),
    };
    let tokens = gguf.strings("tokenizer.ggml.tokens")?.unwrap_or_default();
    let names = [("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad")];
    for (key, name) in names {
        let id = gguf.uint(&format!("tokenizer.ggml.{key}_token_id"))?;
        if let Some(text) = id.and_then(|id| tokens.get(usize::try_from(id).ok()?)) {
            found.specials.insert(format!("{name}_token"), text.clone());
        }
    }
    Ok(found)
}

/// `source` with `{% generation %}` made a block that is always taken. The tags keep their place
/// and their whitespace control, so the text around them is trimmed as before.
pub(super) fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(open) = rest.find("{%") {
        let (before, tag) = rest.split_at(open + 2);
        out.push_str(before);
        let word_at = tag.len() - tag.trim_start_matches(['-', '+']).trim_start().len();
        let word = &tag[word_at..];
        let replaced = [("endgeneration", "endif"), ("generation", "if true")]
            .into_iter()
            .find_map(|(old, new)| word.strip_prefix(old).map(|after| (after, new)))
            .filter(|(after, _)| {
                after.trim_start().trim_start_matches(['-', '+']).starts_with("%}")
            });
        out.push_str(&tag[..word_at]);
        rest = match replaced {
            Some((after, new)) => {
                out.push_str(new);
                after
            }
            None => word,
        };
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generation_tags_become_a_block_and_nothing_else_changes() {
        let source =
            "{%- generation -%}a{% endgeneration %}{% set generation = 1 %}{{ generation }}";
        let expected = "{%- if true -%}a{% endif %}{% set generation = 1 %}{{ generation }}";
        assert_eq!(without_generation_tags(source), expected);
        assert_eq!(without_generation_tags("{%"), "{%");
        assert_eq!(without_generation_tags("{%generation%}"), "{%if true%}");
    }
}
