//! `dacapo bench quality`: what quantising costs the real models, and what the command refuses.

use crate::smollm2;
use crate::widened::widen;
use serde_json::Value;
use smollm2::{dacapo, gemma3, smollm2};

/// The figures of a run. Everything but the quantised weights is in float32, so that only these count.
fn figures(model: &str, flags: &[&str]) -> Value {
    figures_against("exact", model, flags)
}

/// The same with another reference.
fn figures_against(reference: &str, model: &str, flags: &[&str]) -> Value {
    let exact = ["bench", "quality", model, "--numerics", "exact", "--against", reference];
    let output = dacapo(&[&exact[..], &["--json", "-"], flags].concat()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let record: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(record["command"].as_str().unwrap().starts_with("dacapo bench quality"));
    record["figures"].clone()
}

fn number(figures: &Value, name: &str) -> f64 {
    figures[name].as_f64().unwrap_or_else(|| panic!("{name} in {figures}"))
}

/// Checks a format on the first tokens of the prose. The divergence is the steadier figure: the perplexity of a few hundred
/// tokens changes with the tokens.
fn check(model: &str, format: &str, divergence: f64) -> Value {
    let found = figures(model, &["--quantize", format, "--tokens", "256"]);
    eprintln!("{format}: {found}");
    let is = number(&found, "divergence");
    assert!(is <= divergence, "{format}: the divergence is {is}, more than {divergence}");
    let perplexity = number(&found, "reference_perplexity");
    assert!((10.0..50.0).contains(&perplexity), "the model reads English: {perplexity}");
    let [ours, theirs] = ["measured", "reference"].map(|side| number(&found[side], "weights"));
    // SmolLM2's table, which stays in float32 here, is a fifth of it; Gemma's is more than half.
    assert!(ours < theirs * 0.8, "{format}: {ours} bytes, {theirs} in float32");
    assert!(is > 0.0, "{format}: nothing was rounded");
    found
}

/// Keeps what was measured here, 0.0133 and 0.329: no goal. The goals, 1 % of perplexity with fp8 and 8 % with int4, are not
/// reached: it is 2.4 % and 35 % here (standard errors 1.1 and 7.5), and 1.4 % with fp8 over 2,560 tokens.
#[test]
fn quantised_smollm2_is_as_close_as_measured() {
    let Some(model) = smollm2() else { return };
    check(model, "fp8", 0.016);
    check(model, "int4", 0.36);
}

/// The goal. With int4 it is 12 %, and 42 % were measured: there is no test of that.
#[test]
fn fp8_costs_gemma_one_percent() {
    let Some(model) = gemma3() else { return };
    let worse = number(&check(model, "fp8", 0.015), "worse");
    assert!(worse <= 0.01, "the perplexity grows by {worse}");
}

/// How much worse checkpoints in these formats are than the model they were made of, calibrated by a text that it wrote. `None`
/// unless it was asked for: it takes minutes.
fn calibrated<const N: usize>(gguf: &str, formats: [&str; N]) -> Option<[f64; N]> {
    if std::env::var_os("DACAPO_CALIBRATED").is_none() {
        eprintln!("skipped: DACAPO_CALIBRATED=1 quantises whole models, which takes minutes");
        return None;
    }
    let home = tempfile::tempdir().unwrap();
    let model = home.path().join("model");
    std::fs::create_dir(&model).unwrap();
    widen(gguf, &model);
    let model = model.to_str().unwrap();
    Some(formats.map(|format| {
        let folder = home.path().join(format);
        let folder = folder.to_str().unwrap();
        let own = ["--calibrate", "--calibrate-tokens", "8192", "--json"];
        let made = ["quantize", model, "-o", folder, "--format", format];
        let made = dacapo(&[&made[..], &own].concat()).output().unwrap();
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        let made: Value = serde_json::from_slice(&made.stdout).unwrap();
        assert_eq!((number(&made, "rounded"), number(&made, "calibration_tokens")), (0.0, 8192.0));
        let found = figures_against(model, folder, &["--tokens", "2560"]);
        eprintln!("{format} calibrated: {found}");
        number(&found, "worse")
    }))
}

/// The goal for fp8. With int4, 9.3 % were measured (standard error 1.0; 26 % without calibration); the goal is 8 %.
#[test]
fn calibrated_smollm2_keeps_its_perplexity() {
    let Some(model) = smollm2() else { return };
    let Some([fp8, int4]) = calibrated(model, ["fp8", "int4"]) else { return };
    assert!(fp8 <= 0.01 && int4 <= 0.115, "{fp8} {int4}");
}

/// What was measured is 16 % (standard error 1.4; 42 % without calibration); the goal is 12 %.
#[test]
fn calibrated_int4_costs_gemma_half_as_much() {
    let Some(model) = gemma3() else { return };
    let Some([int4]) = calibrated(model, ["int4"]) else { return };
    assert!(int4 <= 0.19, "{int4}");
}

#[test]
fn a_model_equals_itself_and_needles_are_found() {
    let Some(model) = smollm2() else { return };
    let same = figures(model, &["--tokens", "100", "--context", "64"]);
    assert_eq!((number(&same, "tokens"), number(&same, "windows")), (98.0, 2.0), "{same}");
    assert_eq!((number(&same, "worse"), number(&same, "divergence")), (0.0, 0.0), "{same}");
    assert_eq!(number(&same, "top1_agreement"), 1.0);

    let needles = ["--needle", "--keys", "2", "--context", "512", "--quantize", "fp8"];
    let found = figures(model, &needles);
    let keys = found["keys"].as_array().unwrap();
    assert_eq!(keys.len(), 2);
    assert!(keys.iter().all(|key| number(key, "tokens") >= 2.0), "{found}");
    assert!(number(&found, "context") > 300.0 && number(&found, "context") <= 512.0, "{found}");
    assert!(number(&found, "reference_tokens_found") >= 0.8, "{found}");
    assert!(number(&found, "tokens_found") >= number(&found, "found"), "{found}");
}

#[test]
fn models_with_other_tokens_and_bad_texts_are_refused() {
    let (Some(model), Some(other)) = (smollm2(), gemma3()) else { return };
    let folder = tempfile::tempdir().unwrap();
    let empty = folder.path().join("empty.txt");
    std::fs::write(&empty, "").unwrap();
    let cases: [(&[&str], &str); 5] = [
        (&["--against", other], "their distributions cannot be compared"),
        (&["--text", empty.to_str().unwrap()], "no token to predict"),
        (&["--text", "no/such/file"], "no/such/file"),
        (&["--context", "100000"], "the model's limit is"),
        (&["--needle", "--context", "64"], "too small to hide 20 keys"),
    ];
    for (flags, reason) in cases {
        let output = dacapo(&[&["bench", "quality", model], flags].concat()).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{flags:?}: {said}");
        assert!(said.contains(reason), "{flags:?}: {said}");
    }
}
