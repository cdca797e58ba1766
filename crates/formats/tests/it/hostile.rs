//! Malicious files: every one is refused with one line, quickly and with little memory.
//!
//! Each case names the class of published vulnerability it stands for; `fuzz/README.md` lists them.

use crate::make;
use crate::refusal;
use formats::checkpoint::Checkpoint;
use formats::gguf::Gguf;
use formats::safetensors::SafeTensors;
use formats::tokenizer::Tokenizer;
use make::{ARRAY, GgufFile, STRING, safetensors, string};
use proptest::prelude::*;
use refusal::refused;
use std::path::Path;

fn gguf(bytes: &[u8]) -> formats::Result<Gguf> {
    Gguf::read(Path::new("hostile.gguf"), bytes, bytes.len() as u64)
}

fn tensors(bytes: &[u8]) -> formats::Result<SafeTensors> {
    SafeTensors::read(Path::new("hostile.safetensors"), bytes, bytes.len() as u64)
}

fn good() -> GgufFile {
    GgufFile::new()
        .str("general.architecture", "llama")
        .tensor("a", &[32, 2], 2, 0) // Q4_0
        .tensor("b", &[8], 0, 64)
        .data(96)
}

#[test]
fn the_file_the_others_are_made_from_is_good() {
    let found = gguf(&good().bytes()).unwrap();
    assert_eq!(found.tensors()[0].shape, [2, 32]);
    assert_eq!(found.tensors()[0].bytes, 36);
    assert_eq!(found.str("general.architecture").unwrap(), Some("llama"));
}

#[test]
fn gguf_counts_and_lengths_are_checked_before_they_are_believed() {
    // Counts that overflow when multiplied by an entry's size.
    let file = GgufFile { key_count: Some(u64::MAX), ..good() };
    refused(gguf(&file.bytes()), "metadata key count");
    let file = GgufFile { tensor_count: Some(1 << 61), ..good() };
    refused(gguf(&file.bytes()), "tensor count");
    // A string of 10 GB in a file of a few hundred bytes; one whose end wraps around.
    for length in [10_000_000_000, u64::MAX, u64::MAX - 7] {
        let file = good().raw("k", STRING, &length.to_le_bytes());
        refused(gguf(&file.bytes()), "allowed: at most");
        let mut file = good();
        file.keys.push(length.to_le_bytes().to_vec());
        refused(gguf(&file.bytes()), "metadata key");
    }
    // Arrays: too long, of an unknown type, nested, all arrays together too long.
    for count in [10_000_000_000u64, u64::MAX, u64::MAX / 8 + 1] {
        let head = [&STRING.to_le_bytes()[..], &count.to_le_bytes()].concat();
        refused(gguf(&good().raw("k", ARRAY, &head).bytes()), "length of k");
    }
    let head = |kind: u32| [&kind.to_le_bytes()[..], &1u64.to_le_bytes(), &[0; 64]].concat();
    refused(gguf(&good().raw("k", ARRAY, &head(13)).bytes()), "element type of k");
    refused(gguf(&good().raw("k", ARRAY, &head(ARRAY)).bytes()), "no nested arrays");
    refused(gguf(&good().raw("k", 99, &[]).bytes()), "type of k");
    let many = [&0u32.to_le_bytes()[..], &(3u64 << 20).to_le_bytes(), &vec![0; 3 << 20]].concat();
    refused(gguf(&good().raw("k", ARRAY, &many).raw("l", ARRAY, &many).bytes()), "length of l");
    // Names and text.
    refused(
        gguf(&good().raw("k", STRING, &[&2u64.to_le_bytes()[..], &[0xff, 0xfe]].concat()).bytes()),
        "UTF-8",
    );
    refused(gguf(&good().u32("k", 1).u32("k", 2).bytes()), "k twice");
    refused(gguf(&good().raw("k", 7, &[2]).bytes()), "0 or 1");
    refused(gguf(&good().str(&"k".repeat(5_000), "").bytes()), "metadata key");
}

#[test]
fn gguf_tensors_lie_within_the_file_and_apart() {
    let with =
        |name: &str, shape: &[u64], kind, offset| good().tensor(name, shape, kind, offset).bytes();
    refused(gguf(&with("c", &[], 0, 96)), "dimensions of tensor c");
    refused(gguf(&with("c", &[1; 5], 0, 96)), "dimensions of tensor c");
    // The number of elements overflows, or only the size in bytes does.
    refused(gguf(&with("c", &[1 << 32, 1 << 32], 0, 96)), "shape of tensor c");
    refused(gguf(&with("c", &[1 << 62], 0, 96)), "shape of tensor c");
    refused(gguf(&with("c", &[u64::MAX, 2], 0, 96)), "shape of tensor c");
    refused(gguf(&with("c", &[0, 1 << 40, 1 << 40], 0, 96)), "shape of tensor c");
    refused(gguf(&with("c", &[33], 2, 96)), "whole blocks of 32");
    // Offsets: beyond the end, wrapping, not aligned, inside another tensor.
    refused(gguf(&with("c", &[8], 0, 96)), "offset of tensor c");
    refused(gguf(&with("c", &[8], 0, u64::MAX - 31)), "offset of tensor c");
    refused(gguf(&with("c", &[8], 0, 33)), "multiple of 32");
    refused(gguf(&with("c", &[8], 0, 32)), "inside tensor a");
    refused(gguf(&with("a", &[8], 0, 64)), "a twice");
    // Types: known but not supported, and unknown.
    refused(gguf(&with("c", &[256], 23, 96)), "IQ4_XS (23)");
    refused(gguf(&with("c", &[256], 1_000, 96)), "unknown ggml type (1000)");
    // Alignment: zero divides, others break the arithmetic.
    for alignment in [0, 3, 1 << 30] {
        refused(gguf(&good().u32("general.alignment", alignment).bytes()), "general.alignment");
    }
    refused(gguf(&good().str("general.alignment", "32").bytes()), "general.alignment");
}

#[test]
fn gguf_versions_and_magic_are_named() {
    refused(gguf(b"GGML\x03\0\0\0"), "magic");
    refused(gguf(&GgufFile { version: 1, ..good() }.bytes()), "GGUF version: 1");
    refused(gguf(&GgufFile { version: 4, ..good() }.bytes()), "GGUF version: 4");
    refused(gguf(&GgufFile { version: 3 << 24, ..good() }.bytes()), "big-endian");
    refused(gguf(b""), "is empty");
}

#[test]
fn a_cut_gguf_says_so() {
    let whole = good().bytes();
    // In the header and in the data.
    for length in [3, 40, whole.len() / 2, whole.len() - 1] {
        refused(gguf(&whole[..length]), "is cut short; download it again");
    }
    // In the data, when one tensor alone is larger than what is left of the file.
    let large = good().tensor("c", &[1 << 20], 0, 96).bytes();
    refused(gguf(&large), "is cut short; download it again (tensor c has 4194304 bytes");
}

#[test]
fn every_truncation_is_refused() {
    let bytes = good().bytes();
    for length in 0..bytes.len() {
        assert!(gguf(&bytes[..length]).is_err(), "{length} of {} bytes", bytes.len());
    }
    let bytes = safetensors(r#"{"a":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]}}"#, 16);
    assert!(tensors(&bytes).is_ok());
    for length in 0..bytes.len() {
        assert!(tensors(&bytes[..length]).is_err(), "{length} of {} bytes", bytes.len());
    }
}

#[test]
fn safetensors_headers_must_tile_the_file() {
    let entry = |dtype: &str, shape: &str, offsets: &str| {
        format!(r#"{{"a":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}}}"#)
    };
    let file = |header: &str, data| tensors(&safetensors(header, data));
    refused(tensors(&10_000_000_000u64.to_le_bytes()), "header length");
    refused(tensors(&u64::MAX.to_le_bytes()), "header length");
    refused(file(&entry("F32", "[2]", "[0,10000000000]"), 8), "data_offsets");
    refused(file(&entry("F32", "[2]", "[8,0]"), 8), "data_offsets");
    refused(file(&entry("F32", "[4294967296,4294967296]", "[0,8]"), 8), "shape");
    refused(file(&entry("F32", "[0,4294967296,4294967296]", "[0,0]"), 0), "shape");
    refused(file(&entry("F32", "[3]", "[0,8]"), 8), "shape");
    refused(file(&entry("F32", "[1,1,1,1,1,1,1,1,1]", "[0,4]"), 4), "dimensions");
    refused(file(&entry("F8_E5M2", "[8]", "[0,8]"), 8), "F8_E5M2 is not supported");
    refused(file(&entry("F32", "[-1]", "[0,8]"), 8), "header");
    refused(file(&entry("F32", "[1]", "[4,8]"), 8), "where the tensor before it ends");
    refused(file(&entry("F32", "[1]", "[0,4]"), 8), "the tensors' sum");
    refused(file(&"[".repeat(100_000), 0), "header");
    refused(
        file(
            r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#,
            4,
        ),
        "a twice",
    );
    refused(
        file(
            r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#,
            4,
        ),
        "data_offsets of tensor b",
    );
    refused(file(&format!(r#"{{"{}":1}}"#, "x".repeat(600)), 0), "longer than");
}

#[test]
fn an_index_stays_in_its_folder_and_tells_the_truth() {
    let folder = tempfile::tempdir().unwrap();
    let index = |shard: &str| {
        let json = format!(r#"{{"weight_map":{{"a":"{shard}"}}}}"#);
        std::fs::write(folder.path().join("model.safetensors.index.json"), json).unwrap();
        Checkpoint::open(folder.path())
    };
    refused(index("../secret.safetensors"), "shard of tensor a");
    refused(index("/etc/passwd"), "shard of tensor a");
    // An index that names itself.
    refused(index("model.safetensors.index.json"), "shard of tensor a");
    refused(index("absent.safetensors"), "cannot open");
    let header = r#"{"b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#;
    std::fs::write(folder.path().join("x.safetensors"), safetensors(header, 4)).unwrap();
    refused(index("x.safetensors"), "tensor a");
    // A link to itself is an error of the system's, not a hang.
    std::os::unix::fs::symlink("loop.safetensors", folder.path().join("loop.safetensors")).unwrap();
    refused(index("loop.safetensors"), "cannot open");
    std::fs::create_dir(folder.path().join("d.safetensors")).unwrap();
    refused(index("d.safetensors"), "regular file");
}

#[test]
fn a_file_that_shrinks_is_an_error_and_not_a_signal() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.gguf");
    std::fs::write(&path, good().bytes()).unwrap();
    let checkpoint = Checkpoint::open(&path).unwrap();
    std::fs::File::options().write(true).open(&path).unwrap().set_len(100).unwrap();
    refused(checkpoint.read_into("a", &mut [0; 36]), "cannot read tensor data");
    refused(checkpoint.read_into("a", &mut [0; 35]), "36 bytes");
    refused(checkpoint.read_into("z", &mut [0; 36]), "tensor z");
}

#[test]
fn vocabularies_must_fit_together() {
    let base = || {
        GgufFile::new()
            .str("tokenizer.ggml.model", "gpt2")
            .strings("tokenizer.ggml.tokens", &["a".into(), "b".into(), "ab".into()])
    };
    let read = |file: GgufFile| Tokenizer::from_gguf(&gguf(&file.bytes())?);
    assert_eq!(
        read(base().strings("tokenizer.ggml.merges", &["a b".into()]))
            .unwrap()
            .encode("ab", false)
            .unwrap(),
        [2]
    );
    // The library would index out of its buffer here.
    refused(read(base().strings("tokenizer.ggml.merges", &["ab ab".into()])), "merge 0");
    refused(read(base().strings("tokenizer.ggml.merges", &["a".into()])), "a space between");
    refused(read(base().strings("tokenizer.ggml.merges", &["".into()])), "a space between");
    refused(read(base().str("tokenizer.ggml.pre", "kimi-k2")), "kimi-k2 is not supported");
    refused(read(GgufFile::new().str("tokenizer.ggml.model", "bert")), "bert is not supported");
    refused(read(GgufFile::new().str("tokenizer.ggml.model", "gpt2")), "tokenizer.ggml.tokens");
    refused(
        read(base().array("tokenizer.ggml.token_type", 5, &[vec![3, 0, 0, 0]])),
        "one for each token",
    );
    let long = GgufFile::new()
        .str("tokenizer.ggml.model", "gpt2")
        .strings("tokenizer.ggml.tokens", &["x".repeat(5_000)]);
    refused(read(long), "token 0");

    // SentencePiece: a long token takes time with the square of its length.
    let piece = GgufFile::new()
        .str("tokenizer.ggml.model", "llama")
        .strings("tokenizer.ggml.tokens", &["x".repeat(300)])
        .array("tokenizer.ggml.scores", 6, &[vec![0; 4]]);
    refused(read(piece), "at most 256 bytes");

    let json = |text: &str| Tokenizer::from_json(Path::new("tokenizer.json"), text.as_bytes());
    refused(
        json(r#"{"model":{"type":"Unigram","vocab":[["a",0.0]]}}"#),
        "model.unk_id: found none",
    );
    refused(json(r#"{"model":{"type":"Forest","vocab":{"a":0}}}"#), "Forest is not supported");
    refused(json(r#"{"model":{"vocab":{"a":4294967295}}}"#), "token id");
    refused(json(r#"{"model":{"vocab":{"a":0},"merges":[["a","a"]]}}"#), "merge 0");
    refused(json(r#"{"model":{"vocab":{"a":0},"merges":["a"]}}"#), "tokenizer");
    refused(json(r#"{"model":{"vocab":{"a":0},"continuing_subword_prefix":"aaaa"}}"#), "prefix");
    refused(
        json(
            r#"{"normalizer":{"type":"Precompiled","precompiled_charsmap":"AAAA"},"model":{"vocab":{"a":0}}}"#,
        ),
        "precompiled_charsmap",
    );
    let added = r#"{"added_tokens":[{"id":7,"content":"b","single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":true}],"model":{"vocab":{"a":0}}}"#;
    refused(json(added), "id of added token b");
    refused(json(&"{\"a\":".repeat(10_000)), "tokenizer");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn no_bytes_panic_a_parser(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let path = Path::new("any");
        let _ = gguf(&bytes);
        let _ = gguf(&[b"GGUF\x03\0\0\0", &bytes[..]].concat());
        let _ = tensors(&bytes);
        let _ = Tokenizer::from_json(path, &bytes);
        let _ = formats::safetensors::read_index(path, &bytes);
    }

    #[test]
    fn no_damage_panics_a_parser(at in any::<prop::sample::Index>(), to in any::<u8>(), cut in any::<prop::sample::Index>()) {
        let whole = good()
            .str("tokenizer.ggml.model", "gpt2")
            .strings("tokenizer.ggml.tokens", &["a".into(), "b".into(), "ab".into()])
            .strings("tokenizer.ggml.merges", &["a b".into()])
            .raw("x", STRING, &string("text"))
            .bytes();
        let cut = cut.index(whole.len());
        prop_assert!(gguf(&whole[..cut]).is_err());
        let mut damaged = whole;
        let at = at.index(damaged.len());
        damaged[at] = to;
        // A changed byte may leave a valid file that needs fewer bytes, for instance one without tensors. So a
        // truncated file is not always refused.
        for bytes in [&damaged[..], &damaged[..cut]] {
            if let Ok(gguf) = gguf(bytes) {
                let _ = Tokenizer::from_gguf(&gguf).map(|tokenizer| tokenizer.encode("abba", true));
            }
        }
    }

    /// Well-formed headers with arbitrary contents.
    #[test]
    fn no_header_panics_safetensors(
        shape in prop::collection::vec(any::<u64>(), 0..4),
        begin in any::<u64>(),
        end in any::<u64>(),
        dtype in prop_oneof![Just("F32"), Just("BF16"), Just("I64"), Just("Q4_0")],
    ) {
        let header = format!(r#"{{"a":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{begin},{end}]}}}}"#);
        let bytes = safetensors(&header, 16);
        // Whatever is accepted lies in the file; the reference refuses whatever we refuse.
        let reference = ::safetensors::SafeTensors::deserialize(&bytes).is_ok();
        match tensors(&bytes) {
            Ok(found) => {
                prop_assert!(reference);
                prop_assert_eq!(found.tensors[0].bytes, 16);
            }
            Err(_) => prop_assert!(!reference),
        }
    }
}
