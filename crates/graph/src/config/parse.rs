//! Stage 1: JSON and flags become texts by path.

use super::nearest::nearest;
use super::options::{SETTINGS, flags, setting};
use super::{ConfigError, Decision, Given, Source};
use serde_json::Value;

/// What was given, and the conflicts that precedence settled.
pub(super) fn parse(given: &Given) -> Result<(Vec<Decision>, Vec<String>), ConfigError> {
    let mut draft = match &given.config {
        Some(text) => from_json(text)?,
        None => Vec::new(),
    };
    let mut warnings = Vec::new();
    for (flag, value) in &given.flags {
        let known = flags().find(|setting| setting.flag == Some(flag));
        let Some(setting) = known else {
            let names = flags().filter_map(|setting| setting.flag);
            return Err(unknown("the command line", flag, names));
        };
        let source = Source::Flag(format!("--{flag}"));
        match draft.iter().find(|decision| decision.path == setting.path) {
            Some(json) if json.value != *value => warnings.push(format!(
                "{}: --graph-config says `{}`, --{flag} says `{value}`; --graph-config counts",
                setting.path, json.value
            )),
            Some(_) => {}
            None => {
                let (path, value) = (setting.path, value.clone());
                draft.push(Decision { path, value, source, why: String::new() });
            }
        }
    }
    Ok((draft, warnings))
}

fn from_json(text: &str) -> Result<Vec<Decision>, ConfigError> {
    let owned;
    let text = match text.strip_prefix('@') {
        None => text,
        Some(path) => {
            owned = std::fs::read_to_string(path).map_err(|error| ConfigError::File {
                path: path.to_owned(),
                problem: error.to_string(),
            })?;
            &owned
        }
    };
    let json = |problem: String| ConfigError::Json { problem };
    let value: Value = serde_json::from_str(text).map_err(|error| json(error.to_string()))?;
    let Value::Object(fields) = value else { return Err(json("not a JSON object".into())) };
    let mut draft = Vec::new();
    for (key, value) in fields {
        let groups = SETTINGS.iter().filter_map(|setting| setting.path.split_once('.'));
        let mut names: Vec<&str> = groups.map(|(group, _)| group).collect();
        names.extend(SETTINGS.iter().map(|s| s.path).filter(|path| !path.contains('.')));
        if !names.contains(&key.as_str()) {
            return Err(unknown("--graph-config", &key, names.into_iter()));
        }
        match value {
            Value::Object(_) if setting(&key).is_some() => {
                return Err(json(format!("`{key}` must not be an object")));
            }
            Value::Object(inner) => {
                for (name, value) in inner {
                    let path = format!("{key}.{name}");
                    let Some(setting) = setting(&path) else {
                        let prefix = format!("{key}.");
                        let inside = SETTINGS.iter().filter_map(|s| s.path.strip_prefix(&*prefix));
                        return Err(unknown(&format!("--graph-config `{key}`"), &name, inside));
                    };
                    draft.push(decision(setting.path, &value)?);
                }
            }
            value => match setting(&key) {
                Some(setting) => draft.push(decision(setting.path, &value)?),
                None => return Err(json(format!("`{key}` must be an object"))),
            },
        }
    }
    Ok(draft)
}

fn decision(path: &'static str, value: &Value) -> Result<Decision, ConfigError> {
    let scalar = |value: &Value| match value {
        Value::String(text) => Some(text.clone()),
        Value::Number(number) => Some(number.to_string()),
        Value::Bool(on) => Some(if *on { "on" } else { "off" }.to_owned()),
        Value::Null => Some("none".to_owned()),
        Value::Array(_) | Value::Object(_) => None,
    };
    let text = match value {
        Value::Array(items) => {
            items.iter().map(scalar).collect::<Option<Vec<_>>>().map(|items| items.join(","))
        }
        value => scalar(value),
    };
    let value = text.ok_or_else(|| ConfigError::Json {
        problem: format!("`{path}` must be a text, a number, a truth value or a list of those"),
    })?;
    Ok(Decision { path, value, source: Source::Json, why: String::new() })
}

fn unknown<'a>(place: &str, name: &str, known: impl Iterator<Item = &'a str>) -> ConfigError {
    let nearest = nearest(name, known).to_owned();
    ConfigError::Unknown { place: place.to_owned(), name: name.to_owned(), nearest }
}
