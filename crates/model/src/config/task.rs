//! What a model is for, from the files that sentence-transformers writes beside it.

use super::{Fields, ModelConfig};
use formats::checkpoint::read_capped;
use formats::{Error, Result, limits};
use graph::program::Pooling;
use serde::Deserialize;
use std::path::Path;

/// What a model is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Task {
    /// It generates text, token by token.
    Generate,
    /// It makes one vector of a text.
    Embed(Embedding),
    /// It scores a text, or a pair of texts, for each of some labels.
    Classify(Classes),
    /// It compares the logits of two tokens after a text, such as `no` and `yes`: the score is the second one's share.
    Compare {
        /// The two.
        tokens: [u32; 2],
    },
}

/// The labels of a classifier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Classes {
    /// How many there are.
    pub count: usize,
    /// Whether labels are scored independently of each other; else their scores add up to 1.
    pub apart: bool,
}

/// How the vectors of a text's tokens become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Embedding {
    /// Which tokens count.
    pub pooling: Pooling,
    /// Whether the vector is divided by its length.
    pub unit: bool,
}

/// An entry of `modules.json`.
#[derive(Deserialize)]
struct Module {
    #[serde(default)]
    path: String,
    r#type: String,
}

/// Reads `modules.json` and the files that it names, if the folder has one.
pub(super) fn apply(config: &mut ModelConfig, folder: &Path) -> Result<()> {
    let path = folder.join("modules.json");
    if !path.is_file() {
        return Ok(());
    }
    let bytes = read_capped(&path, limits::CONFIG_BYTES)?;
    let modules: Vec<Module> = serde_json::from_slice(&bytes)
        .map_err(|error| Error::invalid(&path, 0, "modules", error, "a list of modules"))?;
    let mut embedding = Embedding { pooling: Pooling::Mean, unit: false };
    for module in &modules {
        match module.r#type.rsplit('.').next().unwrap_or_default() {
            "Transformer" => longest(config, folder)?,
            "Pooling" => embedding.pooling = pooling(config, &folder.join(name(&path, module)?))?,
            "Normalize" => embedding.unit = true,
            "LogitScore" => {
                let folder = folder.join(name(&path, module)?);
                config.task = compared(config, &folder)?;
                return Ok(());
            }
            _ => {
                let allowed = "Transformer, Pooling, Normalize, LogitScore";
                return Err(Error::unsupported(&path, "type", &module.r#type, allowed));
            }
        }
    }
    config.task = Task::Embed(embedding);
    Ok(())
}

/// The folder of a module: one name, so that it lies inside the model's.
fn name<'m>(path: &Path, module: &'m Module) -> Result<&'m str> {
    let name = module.path.as_str();
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-');
    match !name.is_empty() && name.chars().all(plain) {
        true => Ok(name),
        false => Err(Error::invalid(path, 0, "path", name, "the name of a folder")),
    }
}

/// The longest text, from `sentence_bert_config.json`.
fn longest(config: &mut ModelConfig, folder: &Path) -> Result<()> {
    let path = folder.join("sentence_bert_config.json");
    if !path.is_file() {
        return Ok(());
    }
    let bytes = read_capped(&path, limits::CONFIG_BYTES)?;
    let fields = Fields::json(&path, &bytes)?;
    if let Some(most) = fields.size("max_seq_length", "")?.filter(|&most| most > 0) {
        config.max_position = config.max_position.min(most);
    }
    Ok(())
}

/// The tokens that a reranker compares, from the `config.json` of a folder.
fn compared(config: &ModelConfig, folder: &Path) -> Result<Task> {
    let path = folder.join("config.json");
    let bytes = read_capped(&path, limits::CONFIG_BYTES)?;
    let f = Fields::json(&path, &bytes)?;
    let mut tokens = [0; 2];
    for (token, field) in tokens.iter_mut().zip(["false_token_id", "true_token_id"]) {
        let id = f.required(field, "")?;
        if id >= config.vocab {
            return Err(f.invalid(field, id, format!("below {}", config.vocab)));
        }
        *token = id as u32;
    }
    Ok(Task::Compare { tokens })
}

/// The labels of a configuration whose architecture is a classifier of sequences.
pub(super) fn classes(f: &Fields<'_>) -> Result<Option<(Classes, Vec<String>)>> {
    let kinds = f.texts("architectures")?.unwrap_or_default();
    if !kinds.iter().any(|kind| kind.ends_with("ForSequenceClassification")) {
        return Ok(None);
    }
    let named = f.object("id2label")?;
    let count = match &named {
        Some(named) => named.count(),
        None => f.size("num_labels", "")?.unwrap_or(2),
    };
    if count == 0 || count > limits::LABELS {
        return Err(f.invalid("labels", count, format!("1 to {}", limits::LABELS)));
    }
    let name = |id: usize| {
        let name = named.as_ref().map(|named| named.text(&id.to_string(), "")).transpose()?;
        Ok(name.flatten().map_or_else(|| format!("LABEL_{id}"), str::to_owned))
    };
    let labels = (0..count).map(name).collect::<Result<Vec<String>>>()?;
    let apart = count == 1 || f.text("problem_type", "")? == Some("multi_label_classification");
    Ok(Some((Classes { count, apart }, labels)))
}

/// The pooling in the `config.json` of a folder.
fn pooling(config: &ModelConfig, folder: &Path) -> Result<Pooling> {
    let path = folder.join("config.json");
    let bytes = read_capped(&path, limits::CONFIG_BYTES)?;
    let f = Fields::json(&path, &bytes)?;
    let width = f.size("word_embedding_dimension", "")?.or(f.size("embedding_dimension", "")?);
    if let Some(found) = width.filter(|&width| width != config.hidden) {
        let allowed = format!("{}, the width of the model", config.hidden);
        return Err(f.invalid("word_embedding_dimension", found, allowed));
    }
    let named = match f.text("pooling_mode", "")? {
        Some("mean") => Some(Pooling::Mean),
        Some("cls") => Some(Pooling::First),
        Some("lasttoken") => Some(Pooling::Last),
        Some(other) => return Err(f.unsupported("pooling_mode", other, "mean, cls, lasttoken")),
        None => None,
    };
    let modes = [
        ("pooling_mode_mean_tokens", Some(Pooling::Mean)),
        ("pooling_mode_cls_token", Some(Pooling::First)),
        ("pooling_mode_lasttoken", Some(Pooling::Last)),
        ("pooling_mode_max_tokens", None),
        ("pooling_mode_mean_sqrt_len_tokens", None),
        ("pooling_mode_weightedmean_tokens", None),
    ];
    let mut found = Vec::new();
    for (field, pooling) in modes {
        if f.bool(field, "")? == Some(true) {
            let allowed = "the mean, the first or the last token";
            found.push(pooling.ok_or_else(|| f.unsupported(field, true, allowed))?);
        }
    }
    match (named, found.as_slice()) {
        (named, []) => Ok(named.unwrap_or(Pooling::Mean)),
        (None, [pooling]) => Ok(*pooling),
        (Some(named), [pooling]) if named == *pooling => Ok(named),
        _ => Err(f.unsupported("pooling modes", found.len(), "one")),
    }
}
