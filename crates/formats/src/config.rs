//! `config.json` as Python writes it.

use crate::Result;
use crate::safetensors::json_error;
use serde_json::{Map, Value};
use std::path::Path;

/// The fields of a `config.json`, read from `file`. Python writes infinite numbers as `Infinity`, which JSON does not have:
/// they are read as null, so that a limit of infinity is no limit.
pub fn object(file: &Path, json: &[u8]) -> Result<Map<String, Value>> {
    let finite = without_infinity(json);
    serde_json::from_slice(&finite).map_err(|error| json_error(file, 0, "config", json, &error))
}

/// The same text, with nulls as long as the infinities that they replace, so that offsets stay.
fn without_infinity(json: &[u8]) -> Vec<u8> {
    let mut out = json.to_vec();
    let (mut at, mut quoted) = (0, false);
    while at < json.len() {
        match json[at] {
            b'"' => quoted = !quoted,
            // The next one is escaped.
            b'\\' if quoted => at += 1,
            _ if quoted => {}
            _ => {
                let words = [&b"-Infinity"[..], b"Infinity"];
                if let Some(found) = words.into_iter().find(|word| json[at..].starts_with(word)) {
                    out[at..at + found.len()].fill(b' ');
                    out[at..at + 4].copy_from_slice(b"null");
                    at += found.len() - 1;
                }
            }
        }
        at += 1;
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn infinities_are_null_outside_of_strings() {
        let json =
            br#"{"a": [0.0, Infinity], "b\"Infinity": -Infinity, "c": "Infinity\\", "d":Infinity}"#;
        let found = Value::Object(object(Path::new("config.json"), json).unwrap());
        let expected = serde_json::json!({
            "a": [0.0, null], "b\"Infinity": null, "c": "Infinity\\", "d": null
        });
        assert_eq!(found, expected);
        for wrong in [&b"{\"a\": Infinit}"[..], b"{\"a\": -}", b"\"", b"{\"a\\", b"Infinity"] {
            assert!(object(Path::new("config.json"), wrong).is_err());
        }
    }
}
