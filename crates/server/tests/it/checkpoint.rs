//! The server over a real tokenizer and a real chat template.

use crate::bed::{Bed, config};
use formats::chat::ChatTemplate;
use formats::tokenizer::Tokenizer;
use mock::MockConfig;
use serde_json::{Map, Value, json};
use server::Model;
use server::answer::{Reasoning, ToolFormat};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use text::{CheckpointText, TextModel};

const TEMPLATE: &str = "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n\
    {% endfor %}Write <tool_call>{...}</tool_call><|im_end|>\n{% endif %}\
    {% for m in messages %}{% if m.role == 'king' %}{{ raise_exception('no kings') }}{% endif %}\
    <|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
    {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

/// Six added tokens, the first two of them control tokens.
fn tokenizer() -> Tokenizer {
    let added =
        ["<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>"];
    tokenizer_with(&added, 2)
}

/// A byte-level tokenizer without merges: 256 bytes as GPT-2 writes them, and added tokens, the first `control` of them
/// control tokens.
pub(crate) fn tokenizer_with(added: &[&str], control: usize) -> Tokenizer {
    let plain = |b: u32| matches!(b, 33..=126 | 161..=172 | 174..=255);
    let (mut vocab, mut next) = (Map::new(), 256);
    for byte in 0..256u32 {
        let shown = if plain(byte) {
            byte
        } else {
            next += 1;
            next - 1
        };
        vocab.insert(char::from_u32(shown).unwrap().to_string(), byte.into());
    }
    let added: Vec<Value> = added
        .iter()
        .zip(256usize..)
        .map(|(content, id)| {
            json!({"id": id, "content": content, "special": id < 256 + control, "single_word": false,
                   "lstrip": false, "rstrip": false, "normalized": false})
        })
        .collect();
    let level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
                       "use_regex": false});
    let json = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added,
        "normalizer": null, "pre_tokenizer": level, "post_processor": null, "decoder": level,
        "model": {"type": "BPE", "dropout": null, "unk_token": null,
                  "continuing_subword_prefix": null, "end_of_word_suffix": null,
                  "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": []},
    });
    Tokenizer::from_json(Path::new("tokenizer.json"), json.to_string().as_bytes()).unwrap()
}

fn text() -> CheckpointText {
    let template = ChatTemplate::new(TEMPLATE, BTreeMap::new()).unwrap();
    CheckpointText::new(Arc::new(tokenizer()), Some(template), vec![257], 262)
}

/// A model whose template opens the reasoning.
pub(crate) fn thinker() -> Model {
    let template = ChatTemplate::new(&format!("{TEMPLATE}<think>\n"), BTreeMap::new()).unwrap();
    let text = CheckpointText::new(Arc::new(tokenizer()), Some(template), vec![257], 262);
    let reasoning = Reasoning::of(&text);
    Model { reasoning, ..Model::new("thinker", 4096, Arc::new(text)) }
}

#[test]
fn capabilities_are_detected_from_template_and_tokens() {
    let text = text();
    assert_eq!(ToolFormat::of(&text), ToolFormat::Hermes);
    assert!(Reasoning::of(&text).is_some());
    let plain = CheckpointText::new(Arc::new(tokenizer()), None, vec![257], 262);
    assert_eq!(ToolFormat::of(&plain), ToolFormat::Generic { system: false });
}

#[tokio::test]
async fn a_chat_over_a_checkpoint() {
    let text = text();
    let mut model = Model::new("checkpoint", 4096, Arc::new(text));
    model.tools = ToolFormat::Hermes;
    // Repeats the text tokens of the prompt, without the special tokens of the template.
    let oracle = Arc::new(|request: &engine::request::Request, _| {
        request.prompt.iter().copied().filter(|t| *t < 256).collect::<Vec<_>>()
    });
    let mock = MockConfig { oracle, vocab: 262, context: 4096, ..MockConfig::default() };
    let bed = Bed::with(config(), mock, model).await;
    let said = "Grüße <|im_end|> 世界";
    let ask = json!({"messages": [{"role": "user", "content": said}]});
    let answer = bed.ok("/v1/chat/completions", &ask).await;
    let content = answer["choices"][0]["message"]["content"].as_str().unwrap();
    // A control token in a message is plain text and does not end it.
    assert_eq!(content, format!("user\n{said}\nassistant\n"));
    let tokens = bed.ok("/tokenize", &ask).await["tokens"].clone();
    let ends = tokens.as_array().unwrap().iter().filter(|t| **t == 257).count();
    assert_eq!(ends, 1);
    let back = bed.ok("/detokenize", &json!({"tokens": tokens})).await;
    assert_eq!(back["prompt"], content);
}

#[tokio::test]
async fn a_model_without_a_template_refuses_chat() {
    let text = CheckpointText::new(Arc::new(tokenizer()), None, vec![257], 262);
    assert_eq!(text.vocab(), 262);
    let bed = Bed::with(config(), MockConfig::default(), Model::new("m", 64, Arc::new(text))).await;
    let ask = json!({"messages": [{"role": "user", "content": "x"}]});
    let error = bed.error("/v1/chat/completions", &ask, 400).await;
    assert!(error["message"].as_str().unwrap().contains("no chat template"));
    assert_eq!(
        bed.ok("/v1/completions", &json!({"prompt": "ab"})).await["choices"][0]["text"],
        "ab"
    );
}
