//! `dacapo run --batch FILE -o FILE`: answers a file of prompts. It may be killed and started again
//! at any time; answered lines are skipped.

use super::{RunArgs, failures};
use crate::cli::Global;
use crate::exit::bad_input;
use crate::generate::{Reading, scores_to_json};
use crate::loading::{self, Loaded, ModelText};
use crate::output::note;
use crate::{progress, prompt, steps};
use anyhow::{Result, bail};
use engine::Engine;
use engine::batch::{Batch, Item};
use engine::offline::Completion;
use engine::request::{Finish, Request, RequestId, Sampling};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;

/// One line of the input: a prompt or messages, and its own parameters.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    /// Repeated in the answer.
    id: Option<Value>,
    prompt: Option<String>,
    messages: Option<Value>,
    system: Option<String>,
    max_tokens: Option<u32>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    top_k: Option<u32>,
    seed: Option<u64>,
}

pub(super) fn run(args: &RunArgs, global: &Global, input: &Path, output: &Path) -> Result<()> {
    let retried = failures::remove(output)?;
    if retried > 0 {
        note!("[{retried} lines failed before and are tried again]");
    }
    // Opened first, so that an invalid file fails before the model is loaded.
    let batch = Batch::open(input, output).map_err(|error| bad_input(error.to_string()))?;
    if batch.done() == batch.total() {
        note!("[{} of {} answered]", batch.done(), batch.total());
        return Ok(());
    }
    let loaded = loading::load(&args.load, global, args.max_batch)?;
    note!("[memory: {}]", loaded.memory());
    let sampling = loaded.sampling(&args.sampling)?;
    let config = loaded.engine_config();
    let Loaded { executor, text, .. } = loaded;
    let text = text.ok_or_else(|| bad_input("dummy weights have no tokenizer"))?;
    let mut engine = Engine::builder(executor).config(config).build();
    let bar = progress::count(batch.total(), "answers");
    let total = batch.total();
    let (start, tokens) = (Instant::now(), Cell::new(0_u64));
    // Answers in progress, by line.
    let readings: RefCell<BTreeMap<u64, Reading>> = RefCell::default();
    batch.run(
        &mut engine,
        |item| {
            let (request, reading) =
                request(item, args, &text, &sampling).map_err(|error| format!("{error:#}"))?;
            readings.borrow_mut().insert(item.line, reading);
            Ok(request)
        },
        |line, token| {
            tokens.set(tokens.get() + 1);
            let mut readings = readings.borrow_mut();
            readings.get_mut(&line).is_none_or(|reading| reading.push(token))
        },
        |item, completion| {
            let mut fields = answer(item, readings.borrow_mut().remove(&item.line), completion);
            if args.prompt_logprobs.is_some() && !completion.choices.is_empty() {
                let scores = scores_to_json(&completion.prompt_logprobs, &text.tokenizer);
                fields.insert("prompt_logprobs".into(), scores);
            }
            fields
        },
        |done, _| bar.set_position(done),
    )?;
    bar.finish_and_clear();
    steps::warn(engine.executor());
    let (tokens, seconds) = (tokens.get(), start.elapsed().as_secs_f64());
    let rate = tokens as f64 / seconds.max(1e-9);
    let (answered, failed) = failures::count(output)?;
    note!("[{answered} of {total} answered; {tokens} tokens in {seconds:.1} s, {rate:.1} tok/s]");
    if failed > 0 {
        let file = output.display();
        bail!(
            "{failed} of {total} lines failed; {file} has the reasons, and the same command tries them again"
        );
    }
    Ok(())
}

/// A line is an object with a prompt or messages, or a string.
fn parse(text: &str) -> Result<Line> {
    let value: Value =
        serde_json::from_str(text).map_err(|error| bad_input(format!("not JSON: {error}")))?;
    match value {
        Value::String(prompt) => Ok(Line { prompt: Some(prompt), ..Line::default() }),
        value => Line::deserialize(value).map_err(|error| bad_input(error.to_string())),
    }
}

fn request(
    item: &Item,
    args: &RunArgs,
    text: &ModelText,
    common: &Sampling,
) -> Result<(Request, Reading)> {
    let line = parse(&item.text)?;
    let system = line.system.as_deref().or(args.system.as_deref());
    let messages = match (&line.messages, &line.prompt) {
        (Some(messages), None) => messages.clone(),
        (None, Some(words)) => prompt::messages(system, words),
        _ => return Err(bad_input("a line needs either `prompt` or `messages`")),
    };
    let prompt = match (&text.template, &line.prompt) {
        (Some(template), _) if !args.raw => prompt::chat(&text.tokenizer, template, &messages)?,
        (_, Some(words)) => prompt::raw(&text.tokenizer, words)?,
        (_, None) => return Err(bad_input("`messages` need a model with a chat template")),
    };
    let sampling = Sampling {
        max_tokens: line.max_tokens.unwrap_or(common.max_tokens),
        temperature: line.temperature.unwrap_or(common.temperature),
        top_p: line.top_p.unwrap_or(common.top_p),
        top_k: line.top_k.unwrap_or(common.top_k),
        // The line number is part of the seed, so that equal prompts get different answers that do
        // not depend on other lines.
        seed: line.seed.unwrap_or_else(|| common.seed.wrapping_add(item.line)),
        ..common.clone()
    };
    let prompt_logprobs = args.prompt_logprobs;
    let setup = prompt.setup(&text.tokenizer, &sampling, args.sampling.stop.clone());
    let reading = Reading::new(&text.tokenizer, setup);
    let request = Request::new(RequestId(0), prompt.tokens, sampling);
    Ok((Request { prompt_logprobs, ..request }, reading))
}

fn answer(item: &Item, reading: Option<Reading>, completion: &Completion) -> Map<String, Value> {
    let mut fields = Map::new();
    if let Some(id) = parse(&item.text).ok().and_then(|line| line.id) {
        fields.insert("id".into(), id);
    }
    let (Some(choice), Some(mut reading)) = (completion.choices.first(), reading) else {
        return fields;
    };
    reading.finish(choice.finish == Some(Finish::Length));
    let finish = match &choice.finish {
        Some(Finish::Stop(_)) => "stop",
        Some(Finish::Length) => "length",
        failed => {
            let reason = match failed {
                Some(Finish::Failed(why)) => format!("the request failed on the device: {why}"),
                Some(Finish::Grammar(why)) => why.clone(),
                Some(Finish::Deadline) => "the request timed out".into(),
                _ => "the request was cancelled".into(),
            };
            fields.insert("error".into(), reason.into());
            "failed"
        }
    };
    if !reading.reasoning.is_empty() {
        fields.insert("reasoning".into(), reading.reasoning.into());
    }
    fields.insert("text".into(), reading.text.into());
    fields.insert("finish".into(), finish.into());
    fields.insert("prompt_tokens".into(), json!(completion.prompt_tokens));
    fields.insert("answer_tokens".into(), json!(choice.tokens.len()));
    fields
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_a_text_or_an_object() {
        assert_eq!(parse("\"hi\"").unwrap().prompt.as_deref(), Some("hi"));
        let line = parse(r#"{"prompt": "hi", "id": 7, "max_tokens": 3}"#).unwrap();
        assert_eq!((line.id, line.max_tokens), (Some(json!(7)), Some(3)));
        assert!(parse("{").unwrap_err().to_string().starts_with("not JSON"));
        assert!(parse(r#"{"promt": "hi"}"#).unwrap_err().to_string().contains("promt"));
    }
}
