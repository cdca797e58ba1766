//! `dacapo run` and `dacapo chat` with a real model on the CPU. If the model cannot be downloaded,
//! the tests that need it print a note and pass.

use crate::process;
use crate::smollm2;
use process::fails;
use smollm2::{dacapo, gemma3, smollm2};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

#[track_caller]
fn succeeds(output: Output) -> (String, String) {
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(0), "{error}");
    (String::from_utf8(output.stdout).unwrap(), error)
}

const QUESTION: &str = "What is the capital of France? Answer in one sentence.";

#[test]
fn a_question_is_answered() {
    let Some(model) = smollm2() else { return };
    let (text, error) = succeeds(dacapo(&["run", model, "-p", QUESTION]).output().unwrap());
    assert!(text.contains("Paris"), "{text}");
    let lines: Vec<&str> = error.lines().collect();
    assert_eq!(lines.len(), 2, "{error}");
    assert!(lines[0].starts_with("[memory: weights ") && lines[0].contains(" tokens)"), "{error}");
    assert!(lines[1].starts_with("[prompt ") && lines[1].ends_with(" tok/s]"), "{error}");

    // The same through standard input and as JSON.
    let mut child = dacapo(&["run", model, "--json"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(format!("{QUESTION}\n").as_bytes()).unwrap();
    let (json, error) = succeeds(child.wait_with_output().unwrap());
    assert_eq!(error, "");
    let report: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(report["text"].as_str().unwrap(), text.trim_end_matches('\n'));
    assert_eq!(report["finish"], "stop");
    assert!(report["prompt_tokens"].as_u64().unwrap() > 10);
    // One context of 8192 tokens: 30 layers, keys and values, 3 heads of 64, two bytes each.
    let memory = &report["memory"];
    assert_eq!(memory["kv_tokens"], 8192, "{memory}");
    let kv = memory["kv_cache"].as_u64().unwrap();
    assert!((8192 * 23_040..8400 * 23_040).contains(&kv), "{memory}");
    assert!(memory["weights"].as_u64().unwrap() > 90 << 20, "{memory}");
}

#[test]
fn flags_take_effect() {
    let Some(model) = smollm2() else { return };
    let json = |flags: &[&str]| -> serde_json::Value {
        let args = [&["run", model, "--json"], flags].concat();
        serde_json::from_str(&succeeds(dacapo(&args).output().unwrap()).0).unwrap()
    };
    let raw = json(&["-p", "The capital of France is", "--raw", "-n", "4"]);
    assert!(raw["text"].as_str().unwrap().contains("Paris"), "{raw}");
    assert_eq!((&raw["finish"], &raw["answer_tokens"]), (&"length".into(), &4.into()));
    let stop = json(&["-p", QUESTION, "--stop", "Par"]);
    assert!(!stop["text"].as_str().unwrap().contains("Par"), "{stop}");
    let hot = ["-p", "Tell me a story.", "-t", "1.2", "--seed", "7", "-n", "12"];
    assert_eq!(json(&hot)["text"], json(&hot)["text"], "same seed, same answer");
    let other = ["-p", "Tell me a story.", "-t", "1.2", "--seed", "8", "-n", "12"];
    assert_ne!(json(&hot)["text"], json(&other)["text"]);
    let digits = json(&["-p", "How many legs has a dog?", "--regex", "[0-9]", "-n", "8"]);
    assert_eq!(digits["text"].as_str().unwrap().len(), 1, "{digits}");
}

#[test]
fn a_conversation_through_a_pipe() {
    let Some(model) = smollm2() else { return };
    let home = tempfile::tempdir().unwrap();
    let mut child = dacapo(&["chat", model, "-n", "40"])
        .env("DACAPO_CACHE", home.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = format!("/help\n/nonsense\n\n{QUESTION}\nAnd of Italy?\n/reset\n/exit\n");
    child.stdin.take().unwrap().write_all(lines.as_bytes()).unwrap();
    let (text, error) = succeeds(child.wait_with_output().unwrap());
    assert!(text.contains("/reset") && text.contains("Paris"), "{text}");
    assert!(error.contains("/nonsense: no such command"), "{error}");
    assert_eq!(error.matches("tok/s]").count(), 2, "{error}");
    assert!(error.contains(" cached)"), "the second turn reuses the first: {error}");
}

#[test]
fn a_batch_resumes_and_answers_each_line_once() {
    let Some(model) = smollm2() else { return };
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("answers.jsonl");
    let input = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/questions.jsonl");
    let run = || {
        let files = [input.to_str().unwrap(), output.to_str().unwrap()];
        dacapo(&["run", model, "-n", "16", "--batch", files[0], "-o", files[1]]).output().unwrap()
    };
    let (_, error) = succeeds(run());
    let tokens: u64 =
        answers(&output).iter().map(|answer| answer["answer_tokens"].as_u64().unwrap()).sum();
    assert!(error.contains(&format!("\n[3 of 3 answered; {tokens} tokens in ")), "{error}");
    let whole = std::fs::read_to_string(&output).unwrap();
    for city in ["Paris", "Rome", "Madrid"] {
        assert!(whole.contains(city), "{whole}");
    }
    // Killed in the middle of a line: that line is answered again, and no line twice.
    std::fs::write(&output, &whole[..whole.len() - 20]).unwrap();
    succeeds(run());
    let sorted = |text: &str| {
        let mut lines: Vec<String> = text.lines().map(Into::into).collect();
        lines.sort();
        lines
    };
    assert_eq!(sorted(&std::fs::read_to_string(&output).unwrap()), sorted(&whole));
}

#[test]
fn failed_lines_of_a_batch_are_counted_and_tried_again() {
    let Some(model) = smollm2() else { return };
    let folder = tempfile::tempdir().unwrap();
    let [input, output] = ["in.jsonl", "out.jsonl"].map(|name| folder.path().join(name));
    std::fs::write(&input, "\"one\"\n{\"prompt\": 5}\n\"two\"\n").unwrap();
    let files = [input.to_str().unwrap(), output.to_str().unwrap()];
    for _ in 0..2 {
        let made = dacapo(&["run", model, "-n", "4", "--batch", files[0], "-o", files[1]]).output();
        let made = made.unwrap();
        let error = String::from_utf8(made.stderr).unwrap();
        assert_eq!(made.status.code(), Some(1), "{error}");
        assert!(error.contains("[2 of 3 answered; "), "{error}");
        assert!(error.contains("error: 1 of 3 lines failed; "), "{error}");
        let reasons: Vec<bool> =
            answers(&output).iter().map(|answer| answer["error"].is_string()).collect();
        assert_eq!(reasons, [false, true, false]);
    }
}

#[test]
fn a_question_in_place_of_the_model_is_explained() {
    let mut command = dacapo(&["run", "What is the capital of France?"]);
    let made = command.stdin(Stdio::null()).output().unwrap();
    let error = String::from_utf8(made.stderr).unwrap();
    assert_eq!(made.status.code(), Some(2), "{error}");
    assert!(error.contains("was taken as MODEL"), "{error}");
}

/// Sixteen questions, one per line, with answers long enough to be interrupted.
fn sixteen(folder: &Path) -> PathBuf {
    let path = folder.join("sixteen.jsonl");
    let line = |n: u32| format!("{{\"prompt\": \"Write {n} words about rivers.\", \"id\": {n}}}\n");
    std::fs::write(&path, (1..=16).map(line).collect::<String>()).unwrap();
    path
}

fn answers(path: &Path) -> Vec<serde_json::Value> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let mut answers: Vec<serde_json::Value> =
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    answers.sort_by_key(|answer| answer["line"].as_u64());
    answers
}

#[test]
fn a_batch_killed_repeatedly_loses_and_repeats_nothing() {
    let Some(model) = smollm2() else { return };
    let folder = tempfile::tempdir().unwrap();
    let input = sixteen(folder.path());
    let batch = |output: &Path| {
        let files = [input.to_str().unwrap(), output.to_str().unwrap()];
        let flags = ["-n", "12", "--ignore-eos", "--max-batch", "3", "--deterministic"];
        let mut command = dacapo(&["run", model, "--batch", files[0], "-o", files[1]]);
        command.args(flags).stderr(Stdio::null());
        command
    };
    let whole = folder.path().join("whole.jsonl");
    assert!(batch(&whole).status().unwrap().success());
    let expected = answers(&whole);
    assert_eq!(expected.len(), 16);

    let output = folder.path().join("killed.jsonl");
    let (mut kills, mut seed) = (0, 12345u64);
    loop {
        // Killed after a few more bytes, at an arbitrary point of an answer.
        seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let size = || std::fs::metadata(&output).map_or(0, |data| data.len());
        let goal = size() + 1 + (seed >> 33) % 400;
        let mut child = batch(&output).spawn().unwrap();
        let ended = loop {
            match child.try_wait().unwrap() {
                Some(status) => break Some(status),
                None if size() >= goal => break None,
                None => std::thread::sleep(std::time::Duration::from_millis(2)),
            }
        };
        let Some(status) = ended else {
            child.kill().unwrap();
            child.wait().unwrap();
            kills += 1;
            continue;
        };
        assert!(status.success());
        break;
    }
    assert!(kills >= 3, "only {kills} kills");
    assert_eq!(answers(&output), expected, "after {kills} kills");
}

/// Greedy answers equal those of llama.cpp (`tools/ggml_goldens.py`) token by token; batched here,
/// one by one there.
#[test]
fn ggml_numerics_give_the_answers_of_llama_cpp() {
    let Some(model) = smollm2() else { return };
    let golden = include_str!("../goldens/llama_cpp/SmolLM2-135M-Instruct.Q4_1.json");
    answers_of_llama_cpp(model, golden, &["--max-batch", "8"]);
}

/// Four of the prompts are longer than the window of its attention. One request at a time: the order of additions in
/// Q4_K and Q6_K weights depends on the rows that come together.
#[test]
fn ggml_numerics_give_the_answers_of_llama_cpp_on_gemma3() {
    let Some(model) = gemma3() else { return };
    let golden = include_str!("../goldens/llama_cpp/gemma-3-270m-q4_k_m.json");
    answers_of_llama_cpp(model, golden, &["--max-batch", "1", "--no-prefix-cache"]);
}

/// The text of `golden` for each of its prompts.
fn answers_of_llama_cpp(model: &str, golden: &str, how: &[&str]) {
    if !device::cpu::describe_features().contains("avx2") {
        eprintln!("skipped: this CPU has no AVX2 and FMA");
        return;
    }
    let golden: serde_json::Value = serde_json::from_str(golden).unwrap();
    let expected = golden["answers"].as_array().unwrap();
    assert!(
        model.ends_with(golden["model"].as_str().unwrap()),
        "the goldens are from another file"
    );
    let folder = tempfile::tempdir().unwrap();
    let (input, output) = (folder.path().join("in.jsonl"), folder.path().join("out.jsonl"));
    let line = |answer: &serde_json::Value| {
        serde_json::json!({ "prompt": answer["prompt"] }).to_string() + "\n"
    };
    std::fs::write(&input, expected.iter().map(line).collect::<String>()).unwrap();
    let files = [input.to_str().unwrap(), output.to_str().unwrap()];
    let flags = ["--batch", files[0], "-o", files[1], "-n", "32", "--temperature", "0"];
    let numerics = ["--raw", "--numerics", "ggml"];
    succeeds(dacapo(&["run", model]).args(flags).args(numerics).args(how).output().unwrap());
    let answers = answers(&output);
    assert_eq!(answers.len(), expected.len());
    for (answer, expected) in answers.iter().zip(expected) {
        assert_eq!(answer["text"], expected["text"], "after {}", expected["prompt"]);
    }
}

#[test]
fn stop_strings_end_answers_of_a_batch() {
    let Some(model) = smollm2() else { return };
    let folder = tempfile::tempdir().unwrap();
    let (input, output) = (sixteen(folder.path()), folder.path().join("out.jsonl"));
    let files = [input.to_str().unwrap(), output.to_str().unwrap()];
    let flags = ["--batch", files[0], "-o", files[1], "-n", "200", "--ignore-eos", "--stop", "e"];
    succeeds(dacapo(&["run", model]).args(flags).output().unwrap());
    for answer in answers(&output) {
        assert_eq!(answer["finish"], "stop", "{answer}");
        assert!(!answer["text"].as_str().unwrap().contains('e'), "{answer}");
        // Generation ended at the stop string; the text was not truncated afterwards.
        assert!(answer["answer_tokens"].as_u64().unwrap() < 60, "{answer}");
    }
}

#[test]
fn batched_answers_equal_single_answers() {
    let Some(model) = smollm2() else { return };
    let folder = tempfile::tempdir().unwrap();
    let input = sixteen(folder.path());
    let run = |batch: &str, flag: &[&str]| {
        let output = folder.path().join(format!("{batch}{}.jsonl", flag.len()));
        let files = [input.to_str().unwrap(), output.to_str().unwrap()];
        let flags = ["--batch", files[0], "-o", files[1], "-n", "24", "--max-batch", batch];
        succeeds(dacapo(&["run", model]).args(flags).args(flag).output().unwrap());
        answers(&output)
    };
    assert_eq!(run("16", &["--deterministic"]), run("1", &["--deterministic"]));
}

#[test]
fn prompt_log_probabilities() {
    let Some(model) = smollm2() else { return };
    let args = ["run", model, "--raw", "-p", "The capital of France is Paris", "-n", "1", "--json"];
    let mut command = dacapo(&args);
    let (json, _) = succeeds(command.args(["--prompt-logprobs", "2"]).output().unwrap());
    let report: serde_json::Value = serde_json::from_str(&json).unwrap();
    let scores = report["prompt_logprobs"].as_array().unwrap();
    assert_eq!(scores.len() as u64, report["prompt_tokens"].as_u64().unwrap() - 1);
    let paris = scores.last().unwrap();
    assert_eq!(paris["text"], " Paris");
    assert!(paris["logprob"].as_f64().unwrap() > -2.0, "{paris}");
    assert_eq!(paris["top"].as_array().unwrap().len(), 2);
    assert_eq!(paris["top"][0]["text"], " Paris", "{paris}");
    // A line of a batch has the same log-probabilities.
    let folder = tempfile::tempdir().unwrap();
    let (input, output) = (folder.path().join("in.jsonl"), folder.path().join("out.jsonl"));
    std::fs::write(&input, "\"The capital of France is Paris\"\n").unwrap();
    let files = [input.to_str().unwrap(), output.to_str().unwrap()];
    let flags = ["--raw", "--batch", files[0], "-o", files[1], "-n", "1", "--prompt-logprobs", "2"];
    succeeds(dacapo(&["run", model]).args(flags).output().unwrap());
    assert_eq!(answers(&output)[0]["prompt_logprobs"].as_array().unwrap(), scores);
}

#[test]
fn exact_numerics_rank_generated_tokens_first() {
    let Some(model) = smollm2() else { return };
    let run = |prompt: &str, flags: &[&str]| -> serde_json::Value {
        let mut command = dacapo(&["run", model, "--raw", "--json", "--numerics", "exact"]);
        let command = command.args(["--temperature", "0", "-p", prompt]).args(flags);
        serde_json::from_str(&succeeds(command.output().unwrap()).0).unwrap()
    };
    let prompt = "Photosynthesis is the process";
    let said = run(prompt, &["-n", "16"]);
    let whole = format!("{prompt}{}", said["text"].as_str().unwrap());
    let judged = run(&whole, &["-n", "1", "--prompt-logprobs", "1"]);
    let scores = judged["prompt_logprobs"].as_array().unwrap();
    assert!(scores.len() >= 16);
    for score in &scores[scores.len() - 16..] {
        // All tokens at once or one by one give the same choice, except for ties.
        let [found, best] = [score, &score["top"][0]].map(|of| of["logprob"].as_f64().unwrap());
        assert!(best - found < 1e-3, "{score}");
    }
}

#[test]
fn graphs_are_explained_without_weights() {
    let args = ["graph", "explain", "qwen3-0.6b", "--load-format", "dummy"];
    let (one, _) = succeeds(dacapo(&args).output().unwrap());
    assert!(one.contains("layers: 140 ops as one") && one.contains("sample"), "{one}");
    let (text, _) = succeeds(dacapo(&args).args(["--graph-layers", "nodes"]).output().unwrap());
    assert!(text.contains("attention") && text.contains("sample"), "{text}");
    let (fixed, _) = succeeds(dacapo(&args).arg("--deterministic").output().unwrap());
    assert!(fixed.contains("decode/1/fixed") && !text.contains("/fixed"), "{fixed}");
}

#[test]
fn ctrl_c_ends_the_answer_with_130() {
    let Some(model) = smollm2() else { return };
    let mut child = dacapo(&["run", model, "-p", "Count.", "--ignore-eos", "-n", "4000"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut first = [0];
    child.stdout.as_mut().unwrap().read_exact(&mut first).unwrap();
    let pid = child.id().to_string();
    assert!(Command::new("kill").args(["-INT", &pid]).status().unwrap().success());
    let output = child.wait_with_output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(130), "{error}");
    assert!(error.contains("; interrupted]"), "{error}");
}

/// In a chat, the first Ctrl-C ends the answer and the second the program.
#[test]
fn ctrl_c_in_a_chat_ends_the_answer_and_then_the_chat() {
    let Some(model) = smollm2() else { return };
    let home = tempfile::tempdir().unwrap();
    let mut child = dacapo(&["chat", model, "--ignore-eos", "-n", "4000"])
        .env("DACAPO_CACHE", home.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let interrupt = |pid: u32| {
        let kill = Command::new("kill").args(["-INT", &pid.to_string()]).status();
        assert!(kill.unwrap().success());
    };
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(b"Count.\n").unwrap();
    let mut stdout = child.stdout.take().unwrap();
    stdout.read_exact(&mut [0]).unwrap();
    interrupt(child.id());
    let mut stderr = child.stderr.take().unwrap();
    let mut said = Vec::new();
    while !String::from_utf8_lossy(&said).contains("; interrupted]") {
        let mut byte = [0];
        let count = stderr.read(&mut byte).unwrap();
        assert!(count > 0, "the chat ended: {}", String::from_utf8_lossy(&said));
        said.extend(byte);
    }
    // The chat continues.
    stdin.write_all(b"/system You are a poet.\n/system\n").unwrap();
    let mut text = Vec::new();
    while !String::from_utf8_lossy(&text).contains("You are a poet.") {
        let mut byte = [0];
        assert_eq!(stdout.read(&mut byte).unwrap(), 1, "it ended");
        text.extend(byte);
    }
    interrupt(child.id());
    assert_eq!(child.wait().unwrap().code(), Some(130));
}

/// With --deterministic, batched answers equal single ones.
#[test]
fn deterministic_batches_equal_single_answers() {
    let Some(model) = smollm2() else { return };
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (input, alone, together) = (file("in"), file("alone"), file("together"));
    let line = |i: u32| format!("{{\"id\": {i}, \"prompt\": \"What comes after {}?\"}}\n", 7 * i);
    std::fs::write(&input, (0..32).map(line).collect::<String>()).unwrap();
    let answers = |output: &str, at_once: &str| {
        let args = ["run", model, "-n", "8", "--temperature", "0", "--deterministic"];
        let more = ["--max-batch", at_once, "--batch", &input, "-o", output];
        let run = dacapo(&args).args(more).output().unwrap();
        succeeds(run);
        let mut lines: Vec<serde_json::Value> = std::fs::read_to_string(output)
            .unwrap()
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        lines.sort_by_key(|line| line["id"].as_u64());
        lines
    };
    let (alone, together) = (answers(&alone, "1"), answers(&together, "32"));
    assert_eq!(alone.len(), 32);
    for (alone, together) in alone.iter().zip(&together) {
        assert_eq!(alone["text"], together["text"]);
    }
}

#[test]
fn invalid_input_gives_one_line_and_code_2() {
    let folder = tempfile::tempdir().unwrap();
    let put = |name: &str, bytes: &[u8]| -> PathBuf {
        let path = folder.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        path
    };
    let huge =
        [b"GGUF".as_slice(), &3u32.to_le_bytes(), &u64::MAX.to_le_bytes(), &[0; 64]].concat();
    for path in [put("a.gguf", b""), put("b.gguf", b"GGUF\x03\0\0\0"), put("c.gguf", &huge)] {
        let error = fails(dacapo(&["run", path.to_str().unwrap(), "-p", "x"]).output().unwrap(), 2);
        assert!(error.contains(".gguf"), "{error}");
    }
    let empty = folder.path().to_str().unwrap();
    fails(dacapo(&["run", empty, "-p", "x"]).output().unwrap(), 2);
    for (args, word) in [
        (["run", "nothing-here", "-p", "x"], "not a hub id"),
        (["run", "qwen3-0.6b", "-p", "x"], "--load-format dummy"),
        (["run", "./missing.gguf", "-p", "x"], "no such file"),
        (["run", "smollm2", "-p", ""], "the prompt is empty"),
    ] {
        let error = fails(dacapo(&args).output().unwrap(), 2);
        assert!(error.contains(word), "{args:?}: {error}");
    }
}

#[test]
fn invalid_usage_gives_code_2_and_help_code_0() {
    for args in [&["nothing"][..], &["run", "--nothing"], &["run", "--threads", "0"]] {
        assert_eq!(dacapo(args).output().unwrap().status.code(), Some(2), "{args:?}");
    }
    for args in [&["--help"][..], &["run", "--help"], &["chat", "--help"], &["pull", "--help"]] {
        let (help, _) = succeeds(dacapo(args).output().unwrap());
        assert!(help.contains("--device"), "{help}");
    }
}

/// A text that repeats part of its prompt: with drafts it is the same, in fewer steps.
#[test]
fn drafts_change_no_answer() {
    let Some(model) = smollm2() else { return };
    let prompt = "Repeat the following text exactly, word for word. Text: The quick brown fox jumps over the \
                  lazy dog. A journey of a thousand miles begins with a single step.";
    let text = |flags: &[&str]| {
        let how = ["run", model, "--numerics", "exact", "--temperature", "0", "-n", "40"];
        let args = [&how, &["-p", prompt][..], flags].concat();
        succeeds(dacapo(&args).output().unwrap()).0
    };
    let wanted = text(&[]);
    assert!(wanted.len() > 40, "{wanted}");
    assert_eq!(text(&["--spec", "ngram:4"]), wanted);
    for wrong in ["medusa", "ngram:0", "ngram:9", "ngram:x"] {
        let output = dacapo(&["run", model, "--spec", wrong, "-p", "a"]).output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(2) && error.contains("--spec"), "{error}");
    }
}
