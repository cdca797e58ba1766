//! `adapter_config.json` as `peft` writes it. Options that change what an adapter computes and are not there are refused
//! by name.

use super::AdapterError;
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// Bytes of a configuration, at most.
const MOST_BYTES: u64 = 1 << 20;

/// What an adapter computes.
#[derive(Debug, Deserialize)]
pub(super) struct PeftConfig {
    peft_type: Option<String>,
    r: u32,
    #[serde(default = "default_alpha")]
    lora_alpha: f32,
    #[serde(default)]
    use_rslora: bool,
    #[serde(default)]
    alpha_pattern: BTreeMap<String, f32>,
    #[serde(default)]
    bias: Option<String>,
    #[serde(flatten)]
    others: BTreeMap<String, Value>,
}

/// `peft`'s own default.
fn default_alpha() -> f32 {
    8.0
}

/// Options that may be absent, null, false or empty only.
const REFUSED: [(&str, &str); 9] = [
    ("use_dora", "DoRA"),
    ("modules_to_save", "whole modules (modules_to_save)"),
    ("lora_bias", "biases (lora_bias)"),
    ("fan_in_fan_out", "transposed weights (fan_in_fan_out)"),
    ("target_parameters", "parameters such as experts (target_parameters)"),
    ("layer_replication", "replicated layers (layer_replication)"),
    ("use_qalora", "QALoRA"),
    ("use_bdlora", "BD-LoRA"),
    ("trainable_token_indices", "tokens of their own (trainable_token_indices)"),
];

fn is_set(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => false,
        Value::Array(list) => !list.is_empty(),
        Value::Object(fields) => !fields.is_empty(),
        Value::Bool(true) | Value::Number(_) | Value::String(_) => true,
    }
}

impl PeftConfig {
    pub(super) fn read(folder: &Path) -> Result<PeftConfig, AdapterError> {
        let path = folder.join("adapter_config.json");
        let wrong = |problem: String| AdapterError::Config { path: path.clone(), problem };
        let mut text = Vec::new();
        let file = File::open(&path).map_err(|error| wrong(error.to_string()))?;
        let read = file.take(MOST_BYTES + 1).read_to_end(&mut text);
        read.map_err(|error| wrong(error.to_string()))?;
        if text.len() as u64 > MOST_BYTES {
            return Err(wrong(format!("more than {MOST_BYTES} bytes")));
        }
        let config: PeftConfig =
            serde_json::from_slice(&text).map_err(|error| wrong(error.to_string()))?;
        config.problem().map_or(Ok(config), |problem| Err(wrong(problem)))
    }

    fn problem(&self) -> Option<String> {
        let kind = self.peft_type.as_deref().unwrap_or("LORA");
        if kind != "LORA" {
            return Some(format!("an adapter of type {kind:?}, and only LORA can be loaded"));
        }
        if self.bias.as_deref().is_some_and(|bias| bias != "none") {
            return Some("adapters with biases cannot be loaded".into());
        }
        let set = |name: &str| self.others.get(name).is_some_and(is_set);
        if let Some((_, what)) = REFUSED.iter().find(|(name, _)| set(name)) {
            return Some(format!("adapters with {what} cannot be loaded"));
        }
        let odd = |key: &&String| key.contains(['*', '^', '$', '(', '[', '|', '+', '?', '\\']);
        if let Some(key) = self.alpha_pattern.keys().find(odd) {
            return Some(format!("alpha_pattern: {key:?} is an expression, not a name"));
        }
        let positive = |alpha: &f32| alpha.is_finite() && *alpha > 0.0;
        let alphas = self.alpha_pattern.values().chain([&self.lora_alpha]);
        if self.r == 0 || !alphas.into_iter().all(positive) {
            return Some("r and lora_alpha must be more than 0".into());
        }
        None
    }

    /// What the product of a module's matrices of rank `rank` is multiplied by.
    pub(super) fn scale(&self, module: &str, rank: usize) -> f32 {
        let of = |key: &str| module == key || module.ends_with(&format!(".{key}"));
        let own = self.alpha_pattern.iter().find(|(key, _)| of(key));
        let alpha = own.map_or(self.lora_alpha, |(_, alpha)| *alpha);
        let rank = rank as f32;
        alpha / if self.use_rslora { rank.sqrt() } else { rank }
    }
}
