//! A folder with the tokenizer of a model, for routers that tokenize themselves: the model's own, or one that is written
//! for a model that is one GGUF file.

use crate::models::HubEnv;
use anyhow::{Context, Result};
use formats::checkpoint::Checkpoint;
use formats::tokenizer::Tokenizer;
use model::ModelConfig;
use serde_json::{Value, json};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};

/// The folder of the model at this path. What is written lies in Dacapo's cache, under a name of its content, so that
/// several servers use the same.
pub(super) fn of(path: &Path, config: &ModelConfig) -> Result<PathBuf> {
    let checkpoint = Checkpoint::open(path)?;
    let Some(gguf) = checkpoint.gguf() else {
        let folder = checkpoint.folder();
        return folder.canonicalize().with_context(|| folder.display().to_string());
    };
    let [tokenizer, names] = Tokenizer::files_of(gguf)?;
    let model = model_config(config);
    let generation = json!({"bos_token_id": config.bos, "eos_token_id": config.eos});
    let files = [tokenizer, names, ("config.json", model), ("generation_config.json", generation)];
    let root = HubEnv::read().own_cache()?.join("tokenizers");
    write(&root, path, &files)
}

/// As much of `config.json` as readers of tokenizers look at.
fn model_config(config: &ModelConfig) -> Value {
    json!({
        "model_type": config.family,
        "architectures": [config.family],
        "bos_token_id": config.bos,
        "eos_token_id": config.eos,
        "pad_token_id": config.pad,
        "vocab_size": config.vocab,
        "max_position_embeddings": config.max_position,
        "hidden_size": config.hidden,
        "intermediate_size": config.intermediate,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.q_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "tie_word_embeddings": config.tied,
    })
}

/// Writes the files into a folder of this root, unless they are there.
fn write(root: &Path, path: &Path, files: &[(&str, Value)]) -> Result<PathBuf> {
    let mut hasher = DefaultHasher::new();
    let texts = files.iter().map(|(name, value)| (*name, value.to_string()));
    let texts: Vec<(&str, String)> = texts.collect();
    texts.hash(&mut hasher);
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    let folder = root.join(format!("{stem}-{:016x}", hasher.finish()));
    device::private::make(&folder)?;
    for (name, text) in &texts {
        let to = folder.join(name);
        if std::fs::read(&to).is_ok_and(|found| found == text.as_bytes()) {
            continue;
        }
        // Another server may read it at this moment.
        let beside = folder.join(format!("{name}.{}", std::process::id()));
        let written = std::fs::write(&beside, text).and_then(|()| std::fs::rename(&beside, &to));
        written.with_context(|| to.display().to_string())?;
    }
    Ok(folder)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_written_once_and_repaired() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path().join("tokenizers");
        let files = [("a.json", json!({"a": 1})), ("b.json", json!([]))];
        let folder = write(&root, Path::new("/x/some.gguf"), &files).unwrap();
        assert!(folder.file_name().unwrap().to_string_lossy().starts_with("some-"));
        std::fs::write(folder.join("b.json"), "damaged").unwrap();
        assert_eq!(write(&root, Path::new("/y/some.gguf"), &files).unwrap(), folder);
        assert_eq!(std::fs::read_to_string(folder.join("b.json")).unwrap(), "[]");
        let names = std::fs::read_dir(&folder).unwrap().count();
        assert_eq!(names, 2, "nothing else is left behind");
        let other = write(&root, Path::new("some.gguf"), &[("a.json", json!(2))]).unwrap();
        assert_ne!(other, folder);
    }
}
