//! GGUF files of hybrids and of DeepSeek whose fields are wrong: the golden files with one field changed where it stands.

use crate::{make, models};
use device::cpu::Numerics;
use device::target::CpuTarget;
use formats::checkpoint::Checkpoint;
use formats::gguf::{Array, Gguf, Value};
use model::{ModelConfig, ModelSource, OpenModel, precision};
use std::path::{Path, PathBuf};

const CASES: [&str; 9] = [
    "deepseek-v2",
    "deepseek-v3",
    "granite-hybrid",
    "granite-hybrid-dense",
    "nemotron-h",
    "nemotron-h-latent",
    "qwen3-next",
    "qwen3-5",
    "qwen3-5-moe-text",
];

struct Golden {
    bytes: Vec<u8>,
    architecture: String,
    fields: Vec<(String, Value)>,
}

fn golden(case: &str) -> Golden {
    let path = models::folder().join(case).join("model.gguf");
    let gguf = Checkpoint::open(&path).unwrap();
    let gguf: &Gguf = gguf.gguf().unwrap();
    let architecture = gguf.str("general.architecture").unwrap().unwrap().to_owned();
    let own = format!("{architecture}.");
    let fields = gguf.metadata().filter(|(key, _)| key.starts_with(&own));
    let mut fields: Vec<_> = fields.map(|(key, value)| (key.to_owned(), value.clone())).collect();
    fields.sort_by(|a, b| a.0.cmp(&b.0));
    Golden { bytes: std::fs::read(&path).unwrap(), architecture, fields }
}

impl Golden {
    /// Where the value of a field begins, behind its type.
    fn value_at(&self, key: &str) -> usize {
        let name = make::string(key);
        let found = self.bytes.windows(name.len()).position(|bytes| bytes == name);
        found.unwrap_or_else(|| panic!("{key} is in the file")) + name.len() + 4
    }

    /// The file with four bytes of a field replaced; in a list those of an element.
    fn with(&self, key: &str, element: Option<usize>, bits: [u8; 4]) -> Vec<u8> {
        // Before the elements of a list are their type and number.
        let at = self.value_at(key) + element.map_or(0, |element| 12 + 4 * element);
        let mut bytes = self.bytes.clone();
        bytes[at..at + 4].copy_from_slice(&bits);
        bytes
    }

    /// The file without a field: its name is another one.
    fn without(&self, key: &str) -> Vec<u8> {
        let mut bytes = self.bytes.clone();
        bytes[self.value_at(key) - 5] = b'~';
        bytes
    }
}

fn read(path: &Path, bytes: &[u8]) -> formats::Result<ModelConfig> {
    std::fs::write(path, bytes).unwrap();
    ModelConfig::of(&Checkpoint::open(path).unwrap())
}

fn place() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.gguf");
    (folder, path)
}

/// One clear error for each: what is wrong, and in which field.
#[test]
fn fields_of_hybrids_and_of_latent_attention_must_make_sense() {
    let (_folder, path) = place();
    let wrong: [(&str, &str, Option<usize>, u32, &str); 25] = [
        ("granite-hybrid", "ssm.time_step_rank", None, 0, "ssm.time_step_rank"),
        ("granite-hybrid", "ssm.time_step_rank", None, 3, "ssm.inner_size"),
        ("granite-hybrid", "ssm.group_count", None, 3, "a part of 8"),
        ("granite-hybrid", "ssm.inner_size", None, 65, "a multiple of 8"),
        ("granite-hybrid", "ssm.state_size", None, 7, "ssm.state_size"),
        ("granite-hybrid", "ssm.conv_kernel", None, 1, "2 to 8"),
        ("granite-hybrid", "attention.head_count_kv", Some(1), 0, "key-value heads"),
        ("granite-hybrid", "attention.head_count_kv", Some(0), 4, "as in other layers"),
        ("granite-hybrid", "block_count", None, 4, "a list of 4"),
        ("granite-hybrid-dense", "expert_shared_feed_forward_length", None, 0, "shared"),
        ("nemotron-h", "feed_forward_length", Some(4), 40, "as in other layers"),
        ("nemotron-h", "block_count", None, 6, "a list of 6"),
        ("nemotron-h-latent", "expert_feed_forward_length", None, 24, "a multiple of 16"),
        ("nemotron-h-latent", "moe_latent_size", None, 7, "moe_latent_size"),
        ("nemotron-h-latent", "expert_group_count", None, 6, "two experts or more"),
        ("nemotron-h-latent", "expert_used_count", None, 7, "1 to 6"),
        ("qwen3-next", "ssm.state_size", None, 12, "ssm.state_size"),
        ("qwen3-next", "ssm.group_count", None, 3, "a part of 4"),
        ("qwen3-next", "rope.dimension_count", None, 18, "rotated elements"),
        ("qwen3-5", "ssm.inner_size", None, 0, "ssm.inner_size"),
        ("deepseek-v2", "attention.kv_lora_rank", None, 12, "attention.kv_lora_rank"),
        ("deepseek-v2", "attention.key_length_mla", None, 8, "attention.key_length_mla"),
        ("deepseek-v2", "expert_gating_func", None, 3, "softmax"),
        ("deepseek-v3", "expert_group_count", None, 3, "expert_group_count"),
        ("deepseek-v3", "expert_group_used_count", None, 5, "expert_group_count"),
    ];
    for (case, key, element, value, word) in wrong {
        let file = golden(case);
        let key = format!("{}.{key}", file.architecture);
        let result = read(&path, &file.with(&key, element, value.to_le_bytes()));
        let error = result.map(|_| ()).unwrap_err().to_string();
        assert!(error.contains(word) && !error.contains('\n'), "{case}, {key} = {value}: {error}");
    }
    for (case, key) in [
        ("granite-hybrid", "ssm.inner_size"),
        ("granite-hybrid", "attention.head_count_kv"),
        ("nemotron-h", "ssm.state_size"),
        ("nemotron-h-latent", "expert_shared_feed_forward_length"),
        ("qwen3-next", "ssm.time_step_rank"),
        ("qwen3-5-moe-text", "expert_feed_forward_length"),
        ("deepseek-v2", "rope.dimension_count"),
        ("deepseek-v3", "attention.kv_lora_rank"),
        ("deepseek-v3", "rope.scaling.original_context_length"),
    ] {
        let file = golden(case);
        let key = format!("{}.{key}", file.architecture);
        let error = read(&path, &file.without(&key)).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains(&key) && !error.contains('\n'), "{case} without {key}: {error}");
    }
}

/// Any number in any field, and any field left out: an error or a model, never a panic.
#[test]
fn no_field_of_these_architectures_panics_the_reader() {
    let (_folder, path) = place();
    for case in CASES {
        let file = golden(case);
        let mut files = Vec::new();
        for (key, value) in &file.fields {
            files.push((key, file.without(key)));
            let elements = match value {
                Value::Uint(_) | Value::Int(_) | Value::Float(_) => None,
                Value::Array(Array::Uint(list)) => Some(list.len()),
                Value::Array(Array::Int(list)) => Some(list.len()),
                _ => continue,
            };
            let numbers = [0, 1, 8, 1 << 20, u32::MAX];
            for bits in numbers.map(u32::to_le_bytes) {
                let elements = elements.map_or(vec![None], |len| (0..len).map(Some).collect());
                files.extend(elements.into_iter().map(|at| (key, file.with(key, at, bits))));
            }
        }
        for (key, bytes) in files {
            match read(&path, &bytes) {
                Err(error) => assert!(!error.to_string().contains('\n'), "{case}, {key}: {error}"),
                Ok(_) => {
                    let model = OpenModel::open(&ModelSource::Checkpoint(path.clone()));
                    let _ = model.map(|model| {
                        model.write(&CpuTarget, Numerics::Fast, precision(&CpuTarget), 64)
                    });
                }
            }
        }
    }
}
