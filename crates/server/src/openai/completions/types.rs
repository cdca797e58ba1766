//! JSON types of completions.

use crate::describe::{Describe, Schemas, api_type, token_id};
use crate::openai::prompt_logprobs::PromptLogprobs;
use crate::openai::sampling::generation_type;
use crate::openai::usage::UsageBody;
use serde::de::value::SeqAccessDeserializer;
use serde::de::{self, SeqAccess, Unexpected, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value, json};
use std::fmt;

generation_type! {
    /// A text to continue.
    pub struct CompletionRequest {
        /// The text: a string, token ids, or a list of either.
        pub prompt: Prompt,
        /// The model; optional, must be the served one.
        pub model: Option<String>,
        /// Return log-probabilities of the tokens, with this many alternatives each.
        pub logprobs: Option<u32> = {"minimum": 0, "maximum": "limit top_logprobs"},
        /// Whether to return the prompt before the answer.
        pub echo: Option<bool>,
        /// Text after the insertion point; not supported.
        pub suffix: Option<String> = {"maxLength": 0},
        /// Must be equal to `n`: candidates that are not returned are not generated.
        pub best_of: Option<u32> = {"minimum": 1, "maximum": "limit choices"},
    }
}

/// One prompt or several, as text or as token ids.
#[derive(Clone, Debug, Serialize)]
#[serde(untagged)]
pub enum Prompt {
    /// Text.
    Text(String),
    /// Several texts.
    Texts(Vec<String>),
    /// Token ids.
    Tokens(Vec<u32>),
    /// Several lists of token ids.
    TokenLists(Vec<Vec<u32>>),
}

/// One entry of a list of prompts.
enum Entry {
    Text(String),
    Token(u32),
    Tokens(Vec<u32>),
}

impl<'de> Deserialize<'de> for Entry {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct EntryVisitor;

        impl<'de> Visitor<'de> for EntryVisitor {
            type Value = Entry;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string, a token id or a list of token ids")
            }

            fn visit_str<E>(self, text: &str) -> Result<Entry, E> {
                Ok(Entry::Text(text.into()))
            }

            fn visit_u64<E: de::Error>(self, id: u64) -> Result<Entry, E> {
                let wrong = || E::invalid_value(Unexpected::Unsigned(id), &"a token id");
                u32::try_from(id).map(Entry::Token).map_err(|_| wrong())
            }

            fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<Entry, A::Error> {
                Vec::deserialize(SeqAccessDeserializer::new(seq)).map(Entry::Tokens)
            }
        }

        from.deserialize_any(EntryVisitor)
    }
}

/// The first entry of a list decides its type; the others are read as that type, without a copy.
impl<'de> Deserialize<'de> for Prompt {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct PromptVisitor;

        fn rest<'de, A: SeqAccess<'de>, T: Deserialize<'de>>(
            first: T,
            mut seq: A,
        ) -> Result<Vec<T>, A::Error> {
            let mut list = vec![first];
            while let Some(next) = seq.next_element()? {
                list.push(next);
            }
            Ok(list)
        }

        impl<'de> Visitor<'de> for PromptVisitor {
            type Value = Prompt;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string, a list of token ids, or a list of either")
            }

            fn visit_str<E>(self, text: &str) -> Result<Prompt, E> {
                Ok(Prompt::Text(text.into()))
            }

            fn visit_string<E>(self, text: String) -> Result<Prompt, E> {
                Ok(Prompt::Text(text))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Prompt, A::Error> {
                match seq.next_element()? {
                    None => Ok(Prompt::Texts(Vec::new())),
                    Some(Entry::Text(text)) => rest(text, seq).map(Prompt::Texts),
                    Some(Entry::Token(id)) => rest(id, seq).map(Prompt::Tokens),
                    Some(Entry::Tokens(ids)) => rest(ids, seq).map(Prompt::TokenLists),
                }
            }
        }

        from.deserialize_any(PromptVisitor)
    }
}

impl Prompt {
    /// The number of prompts.
    pub(crate) fn count(&self) -> usize {
        match self {
            Self::Text(_) | Self::Tokens(_) => 1,
            Self::Texts(list) => list.len(),
            Self::TokenLists(list) => list.len(),
        }
    }
}

impl Describe for Prompt {
    fn describe(_: &mut Schemas) -> Value {
        json!({"anyOf": prompts("limit batch")})
    }
}

/// The forms of one prompt or several, at most as many as the limit says.
pub(crate) fn prompts(most: &str) -> Value {
    let text = json!({"type": "string", "minLength": 1});
    let tokens = json!({"type": "array", "items": token_id(), "minItems": 1});
    json!([
        text,
        {"type": "array", "items": text, "minItems": 1, "maxItems": most},
        tokens,
        {"type": "array", "items": tokens, "minItems": 1, "maxItems": most},
    ])
}

api_type! {
    /// The answers.
    pub struct CompletionResponse {
        /// The id of this response.
        pub id: String,
        /// Always `text_completion`.
        pub object: String,
        /// The creation time, in seconds since 1970.
        pub created: u64,
        /// The model.
        pub model: String,
        /// `n` for each prompt, in the order of the prompts.
        pub choices: Vec<CompletionChoice>,
        /// Token counts; in a stream only in the last chunk, if requested.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub usage: Option<UsageBody>,
    }
}

api_type! {
    /// One answer; in a stream, a part of it.
    pub struct CompletionChoice {
        /// Its position among all answers.
        pub index: u32,
        /// The text.
        pub text: String,
        /// Log-probabilities, if requested.
        pub logprobs: Option<CompletionLogprobs>,
        /// `stop` or `length`; null before the end of a stream.
        pub finish_reason: Option<String>,
        /// One entry per prompt token, null for the first, if requested.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub prompt_logprobs: Option<PromptLogprobs>,
        /// The prompt's tokens, if requested; in a stream only in the first part.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub prompt_token_ids: Option<Vec<u32>>,
        /// The answer's tokens, if requested, with the one that ended it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub token_ids: Option<Vec<u32>>,
    }
}

api_type! {
    /// Log-probabilities, as four lists of equal length.
    pub struct CompletionLogprobs {
        /// The tokens as text.
        pub tokens: Vec<String>,
        /// Their natural-log probabilities; null for the first token of a prompt.
        pub token_logprobs: Vec<Option<f32>>,
        /// The likeliest tokens at each position.
        pub top_logprobs: Vec<Option<Map<String, Value>>>,
        /// Where in the text each token begins, in characters.
        pub text_offset: Vec<u64>,
    }
}
