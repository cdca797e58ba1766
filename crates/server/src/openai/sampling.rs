//! The request fields that chat and completions share: sampling and stop conditions.

use crate::app::Model;
use crate::config::Limits;
use crate::describe::{Describe, Schemas, api_type};
use crate::error::ApiError;
use crate::openai::truncate::Truncation;
use engine::request::{Sampling, Token};
use serde::de::value::SeqAccessDeserializer;
use serde::de::{SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt;

/// One stop string or several.
#[derive(Clone, Debug, Serialize)]
#[serde(untagged)]
pub enum Stop {
    /// One.
    One(String),
    /// Several.
    Many(Vec<String>),
}

impl<'de> Deserialize<'de> for Stop {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        text_or_list(from, "a string or a list of strings", Self::One, Self::Many)
    }
}

/// Deserializes a string or a list directly. An untagged enum would buffer the whole input first,
/// which takes many times its size.
pub(crate) fn text_or_list<'de, D: Deserializer<'de>, T: Deserialize<'de>, E>(
    from: D,
    expected: &'static str,
    text: fn(String) -> E,
    list: fn(Vec<T>) -> E,
) -> Result<E, D::Error> {
    struct TextOrList<T, E>(&'static str, fn(String) -> E, fn(Vec<T>) -> E);

    impl<'de, T: Deserialize<'de>, E> Visitor<'de> for TextOrList<T, E> {
        type Value = E;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str(self.0)
        }

        fn visit_str<X>(self, text: &str) -> Result<E, X> {
            Ok((self.1)(text.into()))
        }

        fn visit_string<X>(self, text: String) -> Result<E, X> {
            Ok((self.1)(text))
        }

        fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<E, A::Error> {
            Vec::deserialize(SeqAccessDeserializer::new(seq)).map(self.2)
        }
    }

    from.deserialize_any(TextOrList(expected, text, list))
}

impl Describe for Stop {
    fn describe(_: &mut Schemas) -> Value {
        json!({"anyOf": [
            {"type": "string", "maxLength": "limit stop_bytes"},
            {"type": "array", "maxItems": "limit stops",
                "items": {"type": "string", "maxLength": "limit stop_bytes"}},
        ]})
    }
}

api_type! {
    /// Options of a stream.
    pub struct StreamOptions {
        /// Whether to send a last chunk with the usage.
        pub include_usage: Option<bool>,
    }
}

/// Defines a request type with the shared fields after its own.
macro_rules! generation_type {
    ($(#[doc = $doc:literal])+ pub struct $name:ident { $($own:tt)* }) => {
        $crate::describe::api_type! {
            $(#[doc = $doc])+
            pub struct $name {
                $($own)*
                /// The most tokens to generate.
                pub max_tokens: Option<u32> = {"minimum": 1},
                /// 0 always picks the likeliest token; larger values are more random.
                pub temperature: Option<f32> = {"minimum": 0, "maximum": 2},
                /// Keep the smallest set of tokens with at least this probability.
                pub top_p: Option<f32> = {"minimum": 0, "maximum": 1},
                /// Keep this many of the likeliest tokens; 0 or -1 keeps all. An extension.
                pub top_k: Option<i64> = {"minimum": -1, "maximum": 1_000_000},
                /// Drop tokens less likely than this share of the likeliest. An extension.
                pub min_p: Option<f32> = {"minimum": 0, "maximum": 1},
                /// Divide the logits of tokens seen before; 1 is off. An extension.
                pub repetition_penalty: Option<f32> = {"minimum": 0.0625, "maximum": 16},
                /// Subtracted for each earlier occurrence in the answer.
                pub frequency_penalty: Option<f32> = {"minimum": -2, "maximum": 2},
                /// Subtracted once for a token that occurred in the answer.
                pub presence_penalty: Option<f32> = {"minimum": -2, "maximum": 2},
                /// Added to the logits of tokens, by token id.
                pub logit_bias: Option<std::collections::BTreeMap<String, f32>> = {
                    "propertyNames": {"pattern": $crate::describe::VOCAB}, "maxProperties": "limit logit_bias",
                    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
                },
                /// The seed for sampling; the same seed gives the same text.
                pub seed: Option<i64>,
                /// The number of answers.
                pub n: Option<u32> = {"minimum": 1, "maximum": "limit choices"},
                /// Strings that end the answer and are not part of it.
                pub stop: Option<$crate::openai::sampling::Stop>,
                /// Token ids that end the answer. An extension.
                pub stop_token_ids: Option<Vec<u32>> = {
                    "maxItems": 64, "items": ($crate::describe::token_id()),
                },
                /// Do not stop before this many tokens. An extension.
                pub min_tokens: Option<u32>,
                /// Continue past the model's end-of-text token. An extension.
                pub ignore_eos: Option<bool>,
                /// false: no drafts are verified for this request, where the server does that. An extension.
                pub speculation: Option<bool>,
                /// Send the answer while it is generated, as server-sent events.
                pub stream: Option<bool>,
                /// Options of the stream; ignored without `stream`.
                pub stream_options: Option<$crate::openai::sampling::StreamOptions>,
                /// Requests with a larger priority run first. An extension.
                pub priority: Option<i64> = {"minimum": -1_000_000, "maximum": 1_000_000},
                /// Requests share cached prefixes only with requests of the same salt, so that
                /// timing reveals nothing about other prompts. An extension.
                pub cache_salt: Option<String> = {"minLength": 1, "maxLength": 256},
                /// The format of the answer.
                pub response_format: Option<$crate::openai::structured::ResponseFormat>,
                /// The JSON schema of the answer, as an object or as text. An extension.
                pub guided_json: Option<serde_json::Value> = {"type": ["object", "string"]},
                /// A regular expression for the whole answer. An extension.
                pub guided_regex: Option<String>,
                /// The possible answers. An extension.
                pub guided_choice: Option<Vec<String>> = {"minItems": 1},
                /// A Lark grammar of the answer. An extension.
                pub guided_grammar: Option<String>,
                /// The same restrictions in one object. An extension.
                pub structured_outputs: Option<$crate::openai::structured::StructuredOutputs>,
                /// Another name of `guided_regex`. An extension.
                pub regex: Option<String>,
                /// Return the log-probability of every prompt token after the first, with this many
                /// alternatives; not in a stream. An extension.
                pub prompt_logprobs: Option<u32> = {"minimum": 0, "maximum": "limit top_logprobs"},
                /// Which log-probabilities of the answer are returned: those of the distribution that
                /// tokens are drawn from, after temperature and filters (`processed_logprobs`), or
                /// those before (`raw_logprobs`, the default). An extension.
                pub logprobs_mode: Option<String> = {"enum": ["raw_logprobs", "processed_logprobs"]},
                /// Return the ids of the prompt's and the answer's tokens, with the token that ended
                /// the answer; log-probabilities are then of the same tokens. An extension.
                pub return_token_ids: Option<bool>,
                /// Keep only this many tokens at the end of the prompt; -1 keeps as many as fit. An
                /// extension.
                pub truncate_prompt_tokens: Option<i64> = {"minimum": -1},
                /// Accepted and ignored.
                pub user: Option<String>,
            }
        }

        impl $name {
            /// The shared fields.
            pub(crate) fn shared(&self) -> $crate::openai::sampling::Shared<'_> {
                $crate::openai::sampling::Shared {
                    max_tokens: self.max_tokens,
                    temperature: self.temperature,
                    top_p: self.top_p,
                    top_k: self.top_k,
                    min_p: self.min_p,
                    repetition_penalty: self.repetition_penalty,
                    frequency_penalty: self.frequency_penalty,
                    presence_penalty: self.presence_penalty,
                    logit_bias: self.logit_bias.as_ref(),
                    seed: self.seed,
                    n: self.n,
                    stop: self.stop.as_ref(),
                    stop_token_ids: self.stop_token_ids.as_deref(),
                    min_tokens: self.min_tokens,
                    ignore_eos: self.ignore_eos,
                    speculation: self.speculation,
                    priority: self.priority,
                    cache_salt: self.cache_salt.as_deref(),
                    streamed: self.stream == Some(true),
                    prompt_logprobs: self.prompt_logprobs,
                    logprobs_mode: self.logprobs_mode.as_deref(),
                    truncation: $crate::openai::truncate::Truncation(self.truncate_prompt_tokens),
                }
            }

            /// The fields that restrict the answer.
            pub(crate) fn structured(&self) -> $crate::openai::structured::Structured<'_> {
                $crate::openai::structured::Structured {
                    response_format: self.response_format.as_ref(),
                    guided_json: self.guided_json.as_ref(),
                    guided_regex: self.guided_regex.as_deref(),
                    guided_choice: self.guided_choice.as_deref(),
                    guided_grammar: self.guided_grammar.as_deref(),
                    structured_outputs: self.structured_outputs.as_ref(),
                    regex: self.regex.as_deref(),
                }
            }
        }
    };
}
pub(crate) use generation_type;

/// The shared fields of a request.
pub(crate) struct Shared<'a> {
    pub(crate) max_tokens: Option<u32>,
    pub(crate) temperature: Option<f32>,
    pub(crate) top_p: Option<f32>,
    pub(crate) top_k: Option<i64>,
    pub(crate) min_p: Option<f32>,
    pub(crate) repetition_penalty: Option<f32>,
    pub(crate) frequency_penalty: Option<f32>,
    pub(crate) presence_penalty: Option<f32>,
    pub(crate) logit_bias: Option<&'a BTreeMap<String, f32>>,
    pub(crate) seed: Option<i64>,
    pub(crate) n: Option<u32>,
    pub(crate) stop: Option<&'a Stop>,
    pub(crate) stop_token_ids: Option<&'a [u32]>,
    pub(crate) min_tokens: Option<u32>,
    pub(crate) ignore_eos: Option<bool>,
    pub(crate) speculation: Option<bool>,
    pub(crate) priority: Option<i64>,
    pub(crate) cache_salt: Option<&'a str>,
    pub(crate) streamed: bool,
    pub(crate) prompt_logprobs: Option<u32>,
    pub(crate) logprobs_mode: Option<&'a str>,
    pub(crate) truncation: Truncation,
}

/// The values of `logprobs_mode`.
const MODES: [&str; 2] = ["raw_logprobs", "processed_logprobs"];

fn between(name: &str, value: Option<f32>, least: f32, most: f32) -> Result<(), ApiError> {
    match value {
        Some(v) if !(v >= least && v <= most) => {
            let text = format!("{name} must be between {least} and {most}, not {v}");
            Err(ApiError::invalid(name, text))
        }
        _ => Ok(()),
    }
}

/// An error if `found` exceeds `limit`.
pub(crate) fn at_most(name: &str, what: &str, found: usize, limit: u64) -> Result<(), ApiError> {
    if found as u64 > limit {
        let text = format!("{name} has {found} {what}; at most {limit} are allowed");
        return Err(ApiError::invalid(name, text));
    }
    Ok(())
}

impl Shared<'_> {
    /// Checks every field; the error names the first invalid one.
    pub(crate) fn validate(&self, limits: &Limits, model: &Model) -> Result<(), ApiError> {
        self.validate_prompt(limits, model)?;
        if let Some(mode) = self.logprobs_mode
            && !MODES.contains(&mode)
        {
            let text = format!("{mode:?} is not one of {}", MODES.join(", "));
            return Err(ApiError::invalid("logprobs_mode", text));
        }
        let vocab = model.text.vocab();
        between("temperature", self.temperature, 0.0, 2.0)?;
        between("top_p", self.top_p, 0.0, 1.0)?;
        between("min_p", self.min_p, 0.0, 1.0)?;
        between("repetition_penalty", self.repetition_penalty, 0.0625, 16.0)?;
        between("frequency_penalty", self.frequency_penalty, -2.0, 2.0)?;
        between("presence_penalty", self.presence_penalty, -2.0, 2.0)?;
        if self.max_tokens == Some(0) {
            return Err(ApiError::invalid("max_tokens", "max_tokens must be at least 1"));
        }
        if self.top_k.is_some_and(|k| !(-1..=1_000_000).contains(&k)) {
            return Err(ApiError::invalid("top_k", "top_k must be between -1 and 1000000"));
        }
        if self.n.is_some_and(|n| n == 0 || u64::from(n) > limits.choices) {
            let text = format!(
                "n must be between 1 and {}; --limit choices=N allows more, --max-batch says how \
                 many run at once",
                limits.choices
            );
            return Err(ApiError::invalid("n", text));
        }
        if self.priority.is_some_and(|p| !(-1_000_000..=1_000_000).contains(&p)) {
            let text = "priority must be between -1000000 and 1000000";
            return Err(ApiError::invalid("priority", text));
        }
        let chars = self.cache_salt.map_or(1, |salt| salt.chars().count() as u64);
        if !(1..=limits.salt_chars).contains(&chars) {
            let text = format!("cache_salt must have 1 to {} characters", limits.salt_chars);
            return Err(ApiError::invalid("cache_salt", text));
        }
        at_most(
            "logit_bias",
            "entries",
            self.logit_bias.map_or(0, BTreeMap::len),
            limits.logit_bias,
        )?;
        for (token, bias) in self.logit_bias.into_iter().flatten() {
            let name = format!("logit_bias.{token}");
            let id = token.parse::<Token>().ok().filter(|id| id.to_string() == *token);
            if id.is_none_or(|id| id >= vocab) {
                let text = format!("{token:?} is not a token id of this model");
                return Err(ApiError::invalid(name, text));
            }
            between(&name, Some(*bias), -100.0, 100.0)?;
        }
        let ids = self.stop_token_ids.map_or(0, <[u32]>::len);
        at_most("stop_token_ids", "entries", ids, limits.stop_token_ids)?;
        if let Some(bad) = self.stop_token_ids.into_iter().flatten().find(|t| **t >= vocab) {
            let text = format!("{bad} is not a token id of this model");
            return Err(ApiError::invalid("stop_token_ids", text));
        }
        let stops = self.stops();
        at_most("stop", "strings", stops.len(), limits.stops)?;
        if stops.iter().any(|stop| stop.len() as u64 > limits.stop_bytes) {
            let text = format!("a stop string may have {} bytes at most", limits.stop_bytes);
            return Err(ApiError::invalid("stop", text));
        }
        Ok(())
    }

    fn validate_prompt(&self, limits: &Limits, model: &Model) -> Result<(), ApiError> {
        if let Some(top) = self.prompt_logprobs {
            if u64::from(top) > limits.top_logprobs {
                let text = format!("prompt_logprobs must be between 0 and {}", limits.top_logprobs);
                return Err(ApiError::invalid("prompt_logprobs", text));
            }
            if self.streamed {
                let text = "prompt_logprobs cannot be streamed";
                return Err(ApiError::invalid("prompt_logprobs", text));
            }
        }
        self.truncation.check(model)
    }

    /// The stop strings.
    pub(crate) fn stops(&self) -> Vec<String> {
        match self.stop {
            None => Vec::new(),
            Some(Stop::One(stop)) => vec![stop.clone()],
            Some(Stop::Many(stops)) => stops.clone(),
        }
    }

    /// The sampling parameters, with the model's defaults for missing fields.
    pub(crate) fn convert(&self, model: &Model) -> Sampling {
        let base = &model.defaults;
        let ignore_eos = self.ignore_eos.unwrap_or(false);
        let mut stop_tokens = self.stop_token_ids.map(<[u32]>::to_vec).unwrap_or_default();
        if !ignore_eos {
            stop_tokens.extend(model.text.stop_tokens());
        }
        Sampling {
            temperature: self.temperature.unwrap_or(base.temperature),
            top_k: self.top_k.map_or(base.top_k, |k| k.max(0) as u32),
            // 0 keeps only the likeliest token, and so does the smallest positive value.
            top_p: self.top_p.unwrap_or(base.top_p).max(f32::MIN_POSITIVE),
            min_p: self.min_p.unwrap_or(base.min_p),
            repetition_penalty: self.repetition_penalty.unwrap_or(base.repetition_penalty),
            frequency_penalty: self.frequency_penalty.unwrap_or(base.frequency_penalty),
            presence_penalty: self.presence_penalty.unwrap_or(base.presence_penalty),
            logit_bias: self
                .logit_bias
                .into_iter()
                .flatten()
                .filter_map(|(token, bias)| Some((token.parse().ok()?, *bias)))
                .collect(),
            seed: self.seed.map_or_else(super::random, |seed| seed as u64),
            sampled_logprobs: self.logprobs_mode == Some(MODES[1]),
            min_tokens: self.min_tokens.unwrap_or(0),
            stop_tokens,
            ignore_eos,
            speculate: self.speculation.unwrap_or(true),
            ..Sampling::default()
        }
    }
}
