//! Answers from a device that plays back a script.

use super::*;
use engine::EngineConfig;
use engine::exec::{Coverage, ExecError, Geometry, Kept, RowResult, Sampled, Step, StepResult};
use std::collections::VecDeque;
use std::path::Path;

/// The end-of-answer token.
const END: Token = 4;

/// Returns the tokens of the script, then always `END`.
struct Scripted {
    script: VecDeque<Token>,
    done: VecDeque<StepResult>,
    stops: Vec<Token>,
}

impl Executor for Scripted {
    fn geometry(&self) -> Geometry {
        Geometry {
            seats: 1,
            pages: 16,
            page_size: 16,
            pages_per_seat: 8,
            vocab: 5,
            kept: Kept::ALL,
        }
    }

    fn coverage(&self) -> Coverage {
        Coverage { decode_rows: 1, prefill_tokens: 64, prefill_rows: 1 }
    }

    fn launch(&mut self, step: &Step) -> Result<(), ExecError> {
        for join in &step.joins {
            self.stops.clone_from(&join.params.stop_tokens);
        }
        let rows = step.rows.iter().map(|row| {
            let token = row.sample.then(|| self.script.pop_front().unwrap_or(END));
            let stopped = token.is_some_and(|token| self.stops.contains(&token));
            let sampled = token.map(|token| Sampled { token, stopped, logprob: None });
            RowResult { tokens: sampled.into_iter().collect(), ..RowResult::default() }
        });
        let rows = rows.collect();
        self.done.push_back(StepResult {
            number: step.number,
            more_follow: false,
            rows,
            took: None,
        });
        Ok(())
    }

    fn poll(&mut self, _block: bool) -> Result<Option<StepResult>, ExecError> {
        Ok(self.done.pop_front())
    }
}

/// Five tokens: `a`, `b`, a space, the first byte of `é`, and the rest of it is missing.
fn tokenizer() -> Arc<Tokenizer> {
    let json = r#"{
        "added_tokens": [{"id": 4, "content": "<end>", "special": true, "single_word": false,
                          "lstrip": false, "rstrip": false, "normalized": false}],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
                          "use_regex": false},
        "decoder": {"type": "ByteLevel"},
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "Ġ": 2, "Ã": 3}, "merges": []}
    }"#;
    Arc::new(Tokenizer::from_json(Path::new("tokenizer.json"), json.as_bytes()).unwrap())
}

fn speaker(script: &[Token]) -> Speaker<Scripted> {
    let script = script.iter().copied().collect();
    let device = Scripted { script, done: VecDeque::new(), stops: Vec::new() };
    let config = EngineConfig { eos: vec![END], ..EngineConfig::default() };
    Speaker::new(Engine::new(device, config), tokenizer())
}

fn ask(stop: &[&str], max_tokens: u32) -> Ask {
    let sampling = Sampling { max_tokens, ..Sampling::default() };
    let setup = ChoiceSetup::plain(stop.iter().map(|s| (*s).into()).collect());
    Ask { prompt: vec![0, 1], sampling, setup, prompt_logprobs: None }
}

/// The answer, and the text that was shown.
fn answer(speaker: &mut Speaker<Scripted>, ask: Ask) -> (Answer, String) {
    let mut shown = String::new();
    let mut show = |piece: &Delta| {
        if let Delta::Text(text) = piece {
            shown.push_str(text);
        }
        Ok(())
    };
    let answer = speaker.answer(ask, &Interrupt::unarmed(), &mut show).unwrap();
    (answer, shown)
}

#[test]
fn the_shown_text_is_the_answer() {
    let (answer, shown) = answer(&mut speaker(&[0, 2, 1, END]), ask(&[], 100));
    assert_eq!((answer.text.as_str(), shown.as_str()), ("a b", "a b"));
    assert_eq!(answer.ending, Ending::Stop);
    assert_eq!((answer.prompt_tokens, answer.answer_tokens), (2, 3));
}

#[test]
fn limits_end_an_answer_and_incomplete_characters_are_replaced() {
    let (answer, shown) = answer(&mut speaker(&[0, 3, 3, 3]), ask(&[], 2));
    assert_eq!((answer.text.as_str(), shown.as_str()), ("a\u{fffd}", "a\u{fffd}"));
    assert_eq!(answer.ending, Ending::Length);
}

#[test]
fn stop_strings_are_never_shown() {
    let mut speaker = speaker(&[0, 1, 2, 1, 0, 0, 0, END, 1, END]);
    let (first, shown) = answer(&mut speaker, ask(&[" ba"], 100));
    assert_eq!((first.text.as_str(), shown.as_str()), ("ab", "ab"));
    assert_eq!(first.ending, Ending::Stop);
    // Tokens after the stop string are dropped and do not appear in the next answer.
    let (second, _) = answer(&mut speaker, ask(&[], 100));
    assert_eq!(second.ending, Ending::Stop);
}

#[test]
fn a_refusal_is_an_error() {
    let refused = Ask { prompt: vec![99], ..ask(&[], 1) };
    let error = speaker(&[]).answer(refused, &Interrupt::unarmed(), &mut |_| Ok(())).unwrap_err();
    assert_eq!(error.to_string(), "the request was refused: token 99 is not in the vocabulary");
}

#[test]
fn rates_exclude_cached_tokens() {
    let answer = Answer {
        text: String::new(),
        reasoning: String::new(),
        ending: Ending::Stop,
        prompt_tokens: 30,
        cached_tokens: 10,
        answer_tokens: 11,
        drafts: Drafts::default(),
        prompt_time: Duration::from_secs(2),
        answer_time: Duration::from_secs(1),
        prompt_logprobs: None,
    };
    let line = "prompt 30 tokens (10 cached), 10.0 tok/s; answer 11 tokens, 10.0 tok/s";
    assert_eq!(answer.summary(), line);
}
