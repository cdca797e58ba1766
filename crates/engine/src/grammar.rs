//! Structured output: which tokens may come next.
//!
//! A request's [`Grammar`] becomes a matcher over the model's vocabulary. Before each sampled token
//! the matcher yields a mask, one bit per token, that travels with the step; the mask depends on
//! the token before, so a row with a grammar has at most one sampled token in flight.

use crate::request::{Grammar, Reject, Token};
use llguidance::api::TopLevelGrammar;
use llguidance::{JsonCompileOptions, ParserFactory};
use serde_json::{Value, json};
use std::sync::Arc;
use toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};

/// The bytes of every token of a model, ready to build grammars over.
pub struct Vocabulary {
    factory: ParserFactory,
    eos: Vec<Token>,
}

impl Vocabulary {
    /// `bytes[t]` is what token `t` adds to the text; empty for tokens that never appear in it.
    /// Special tokens are named by `special` and match no text, whatever their bytes. `eos` are the
    /// tokens that may follow where a grammar can end.
    pub fn new(
        bytes: &[Vec<u8>],
        special: &[Token],
        eos: &[Token],
    ) -> Result<Vocabulary, GrammarError> {
        let Some(&first) = eos.first() else { return Err(GrammarError::NoEos) };
        if let Some(&out) = eos.iter().chain(special).find(|&&t| t as usize >= bytes.len()) {
            return Err(GrammarError::OutOfRange(out));
        }
        let mut words = bytes.to_vec();
        for &token in special {
            // The trie's marker for tokens that no text matches.
            let name = std::mem::take(&mut words[token as usize]);
            words[token as usize] = [&[TokTrie::SPECIAL_TOKEN_MARKER][..], &name].concat();
        }
        let info = TokRxInfo::new(words.len() as u32, first);
        let trie = TokTrie::from(&info, &words).with_eos_tokens(eos);
        let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let mut factory = ParserFactory::new_simple(&env)
            .map_err(|error| GrammarError::Vocabulary(error.to_string()))?;
        factory.quiet();
        Ok(Vocabulary { factory, eos: eos.to_vec() })
    }

    pub(crate) fn matcher(&self, grammar: &Grammar) -> Result<Matcher, Reject> {
        let bad = |problem: String| Reject::BadParameter { field: "grammar", problem };
        let top = match grammar {
            Grammar::JsonObject => json_grammar(json!({"type": "object"})),
            Grammar::JsonSchema(schema) => {
                json_grammar(serde_json::from_str(schema).map_err(|error| bad(error.to_string()))?)
            }
            Grammar::Regex(regex) => TopLevelGrammar::from_regex(regex),
            Grammar::Lark(lark) => TopLevelGrammar::from_lark(lark.clone()),
        };
        let inner = llguidance::Matcher::new(self.factory.create_parser(top));
        match inner.get_error() {
            Some(error) => Err(bad(error)),
            None => Ok(Matcher { inner, eos: self.eos.clone() }),
        }
    }
}

/// Space between two words of JSON: a blank, or a new line with its indentation. Any amount is JSON
/// too, and a small model that may write blanks for ever will.
const SPACE: &str = r"[\x20\x09]|\x0D?\x0A[\x20\x09]{0,32}";

/// JSON that satisfies a schema, laid out on one line or on indented ones.
fn json_grammar(mut schema: Value) -> TopLevelGrammar {
    if schema.is_object() {
        let space = Some(SPACE.to_owned());
        JsonCompileOptions { whitespace_pattern: space, ..JsonCompileOptions::default() }
            .apply_to(&mut schema);
    }
    TopLevelGrammar::from_json_schema(schema)
}

impl std::fmt::Debug for Vocabulary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Vocabulary").field("eos", &self.eos).finish_non_exhaustive()
    }
}

/// Why a vocabulary cannot carry grammars.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GrammarError {
    /// A grammar that may end needs a token to end with.
    #[error("the vocabulary has no end-of-text token")]
    NoEos,
    /// A token id past the last one.
    #[error("token {0} is not in the vocabulary")]
    OutOfRange(Token),
    /// The trie could not be built.
    #[error("no token trie: {0}")]
    Vocabulary(String),
}

/// Where one answer stands in its grammar.
#[derive(Clone)]
pub(crate) struct Matcher {
    inner: llguidance::Matcher,
    eos: Vec<Token>,
}

impl Matcher {
    /// One bit per token that may come next.
    pub(crate) fn mask(&mut self) -> Result<Vec<u32>, String> {
        let mask = self.inner.compute_mask_or_eos().map_err(|error| error.to_string())?;
        // The set keeps a spare word when the vocabulary fills its last one.
        Ok(mask.as_slice()[..mask.len().div_ceil(32)].to_vec())
    }

    /// Whether this token ends an answer, whatever the request's stop tokens are.
    pub(crate) fn ends_with(&self, token: Token) -> bool {
        self.eos.contains(&token)
    }

    /// Takes the chosen token; says whether the answer is complete.
    pub(crate) fn accept(&mut self, token: Token) -> Result<bool, String> {
        self.inner.consume_token(token).map_err(|error| error.to_string())?;
        Ok(self.inner.is_stopped())
    }
}

impl std::fmt::Debug for Matcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Matcher").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether a grammar over bytes takes a text, byte by byte, and may end after it.
    fn takes(grammar: &Grammar, text: &str) -> bool {
        let mut bytes: Vec<Vec<u8>> = (0..=255u8).map(|byte| vec![byte]).collect();
        bytes.push(b"<end>".to_vec());
        let vocabulary = Vocabulary::new(&bytes, &[256], &[256]).expect("bytes are a vocabulary");
        let mut matcher = vocabulary.matcher(grammar).expect("a grammar");
        let allowed = |matcher: &mut Matcher, token: u32| {
            matcher.mask().expect("a mask")[token as usize / 32] >> (token % 32) & 1 == 1
        };
        for byte in text.bytes() {
            if !allowed(&mut matcher, byte.into()) {
                return false;
            }
            if matcher.accept(byte.into()).expect("it was allowed") {
                return true;
            }
        }
        allowed(&mut matcher, 256)
    }

    #[test]
    fn json_in_any_layout_but_not_blanks_for_ever() {
        let schema = json!({
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"$ref": "#/$defs/list"}},
            "required": ["a", "b"],
            "additionalProperties": false,
            "$defs": {"list": {"type": "array", "items": {"type": "string"}}},
        });
        let schema = Grammar::JsonSchema(schema.to_string());
        for grammar in [schema, Grammar::JsonObject] {
            for text in [
                r#"{"a":1,"b":["x","y"]}"#,
                r#"{"a": 1, "b": ["x", "y"]}"#,
                "{\n  \"a\": 1,\n  \"b\": [\n    \"x\"\n  ]\n}",
                "{\r\n\t\"a\": 1,\r\n\t\"b\": []\r\n}",
            ] {
                assert!(takes(&grammar, text), "{text}");
            }
            for text in ["{  \"a\": 1, \"b\": []}", "{\n\n\"a\": 1, \"b\": []}", "\n\n{"] {
                assert!(!takes(&grammar, text), "{text}");
            }
        }
    }

    #[test]
    fn definitions_inside_definitions() {
        let call = json!({
            "type": "object",
            "properties": {"name": {"const": "f"}, "parameters": {"$ref": "#/$defs/0"}},
            "required": ["name", "parameters"],
            "additionalProperties": false,
        });
        let schema = json!({
            "type": "array", "minItems": 1, "maxItems": 1, "items": {"anyOf": [call]},
            "$defs": {"0": {
                "type": "object",
                "properties": {"to": {"$ref": "#/$defs/0/$defs/Place"}},
                "required": ["to"],
                "additionalProperties": false,
                "$defs": {"Place": {"enum": ["here", "there"]}},
            }},
        });
        let grammar = Grammar::JsonSchema(schema.to_string());
        let call = |to: &str| format!(r#"{{"name": "f", "parameters": {{"to": "{to}"}}}}"#);
        assert!(takes(&grammar, &format!("[{}]", call("there"))));
        assert!(!takes(&grammar, &format!("[{}]", call("away"))));
        assert!(!takes(&grammar, &format!("[{}, {}]", call("here"), call("here"))));
        assert!(!takes(&grammar, "[]"));
    }

    #[test]
    fn a_schema_that_is_none_is_refused() {
        let bytes: Vec<Vec<u8>> = (0..=255u8).map(|byte| vec![byte]).collect();
        let vocabulary = Vocabulary::new(&bytes, &[], &[0]).expect("bytes are a vocabulary");
        for schema in ["", "{", "7", r#"{"type": "pear"}"#, r##"{"$ref": "#/nowhere"}"##] {
            assert!(vocabulary.matcher(&Grammar::JsonSchema(schema.into())).is_err(), "{schema}");
        }
    }
}
