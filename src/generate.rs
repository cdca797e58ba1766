//! One answer at a time from an engine: feed a prompt, hand out text as it comes, count and time.

use crate::interrupt::Interrupt;
use anyhow::{Result, bail};
use engine::Engine;
use engine::exec::Executor;
use engine::request::{Event, Finish, Output, Request, RequestId, Sampling, Token, TokenLogprob};
use formats::tokenizer::{Detokenizer, Tokenizer};
use serde_json::{Value, json};
use server::answer::StopFinder;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// An engine that serves one caller.
pub(crate) struct Speaker<X: Executor> {
    engine: Engine<X>,
    tokenizer: Arc<Tokenizer>,
    start: Instant,
    last_id: u64,
}

/// What to continue, and how.
pub(crate) struct Ask {
    pub(crate) prompt: Vec<Token>,
    pub(crate) sampling: Sampling,
    /// Texts that end the answer.
    pub(crate) stop: Vec<String>,
    /// Log-probabilities of the prompt's tokens, with this many alternatives each.
    pub(crate) prompt_logprobs: Option<u32>,
}

/// How an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// The model, its grammar or a stop text ended it.
    Stop,
    /// The token limit or the context ended it.
    Length,
    /// Ctrl-C ended it.
    Interrupted,
}

/// A whole answer, counted and timed.
#[derive(Clone, Debug)]
pub(crate) struct Answer {
    pub(crate) text: String,
    pub(crate) ending: Ending,
    pub(crate) prompt_tokens: u32,
    /// Prompt tokens that were still known from an earlier answer.
    pub(crate) cached_tokens: u32,
    pub(crate) answer_tokens: u32,
    /// Until the prompt was processed.
    pub(crate) prompt_time: Duration,
    /// From then to the end.
    pub(crate) answer_time: Duration,
    /// One per prompt token after the first, when asked for.
    pub(crate) prompt_logprobs: Option<Vec<TokenLogprob>>,
}

impl Answer {
    /// Prompt tokens processed per second; those known from before cost nothing and count nothing.
    pub(crate) fn prompt_rate(&self) -> f64 {
        rate(self.prompt_tokens.saturating_sub(self.cached_tokens), self.prompt_time)
    }

    /// Answer tokens per second, after the one that the prompt's pass gave.
    pub(crate) fn answer_rate(&self) -> f64 {
        rate(self.answer_tokens.saturating_sub(1), self.answer_time)
    }

    /// The line under an answer.
    pub(crate) fn summary(&self) -> String {
        let cached = match self.cached_tokens {
            0 => String::new(),
            known => format!(" ({known} known)"),
        };
        format!(
            "prompt {} tokens{cached}, {:.1} tok/s; answer {} tokens, {:.1} tok/s{}",
            self.prompt_tokens,
            self.prompt_rate(),
            self.answer_tokens,
            self.answer_rate(),
            match self.ending {
                Ending::Stop => "",
                Ending::Length => "; ended by the token limit",
                Ending::Interrupted => "; interrupted",
            }
        )
    }

    /// The answer as one JSON object.
    pub(crate) fn to_json(&self, tokenizer: &Tokenizer) -> Value {
        let mut json = json!({
            "text": self.text,
            "finish": match self.ending {
                Ending::Stop => "stop",
                Ending::Length => "length",
                Ending::Interrupted => "interrupted",
            },
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "answer_tokens": self.answer_tokens,
            "prompt_seconds": self.prompt_time.as_secs_f64(),
            "answer_seconds": self.answer_time.as_secs_f64(),
            "prompt_tokens_per_second": self.prompt_rate(),
            "answer_tokens_per_second": self.answer_rate(),
        });
        if let Some(scores) = &self.prompt_logprobs {
            json["prompt_logprobs"] = scores_to_json(scores, tokenizer);
        }
        json
    }
}

/// What the model thought of each token of a prompt, and what it would rather have seen.
pub(crate) fn scores_to_json(scores: &[TokenLogprob], tokenizer: &Tokenizer) -> Value {
    let entry = |token: Token, logprob: f32| json!({"token": token, "text": tokenizer.decode(&[token]), "logprob": logprob});
    let score = |score: &TokenLogprob| {
        let mut value = entry(score.token, score.logprob);
        value["top"] = score.top.iter().map(|(t, l)| entry(*t, *l)).collect();
        value
    };
    scores.iter().map(score).collect()
}

fn rate(tokens: u32, time: Duration) -> f64 {
    match time.is_zero() || tokens == 0 {
        true => 0.0,
        false => f64::from(tokens) / time.as_secs_f64(),
    }
}

impl<X: Executor> Speaker<X> {
    /// Speaks for an engine.
    pub(crate) fn new(engine: Engine<X>, tokenizer: Arc<Tokenizer>) -> Self {
        Self { engine, tokenizer, start: Instant::now(), last_id: 0 }
    }

    /// Answers; `show` gets every piece of text as soon as it is certain. Ctrl-C ends the answer
    /// early, and what was said so far comes back.
    pub(crate) fn answer(
        &mut self,
        ask: Ask,
        interrupt: &Interrupt,
        show: &mut dyn FnMut(&str) -> std::io::Result<()>,
    ) -> Result<Answer> {
        self.last_id += 1;
        let id = RequestId(self.last_id);
        let answering = interrupt.guard();
        let mut text = Text::new(&self.tokenizer, ask.stop);
        let mut answer = Answer {
            text: String::new(),
            ending: Ending::Stop,
            prompt_tokens: ask.prompt.len() as u32,
            cached_tokens: 0,
            answer_tokens: 0,
            prompt_time: Duration::ZERO,
            answer_time: Duration::ZERO,
            prompt_logprobs: None,
        };
        let request = Request {
            prompt_logprobs: ask.prompt_logprobs,
            ..Request::new(id, ask.prompt, ask.sampling)
        };
        let begin = Instant::now();
        let mut events = vec![Event::Submit(Box::new(request))];
        let mut cancelled = false;
        loop {
            let now = self.start.elapsed().as_micros() as u64;
            for output in self.engine.step_wait(now, std::mem::take(&mut events)) {
                match output {
                    Output::Rejected { reason, .. } => bail!("the request was refused: {reason}"),
                    Output::Prefilled { cached_tokens, prompt_logprobs, .. } => {
                        answer.cached_tokens = cached_tokens;
                        answer.prompt_logprobs = ask.prompt_logprobs.map(|_| prompt_logprobs);
                        answer.prompt_time = begin.elapsed();
                    }
                    Output::Embedded { .. } => bail!("a vector nobody asked for"),
                    // What was under way when the answer was cut off.
                    Output::Token { .. } if cancelled => {}
                    Output::Token { token, .. } => {
                        answer.answer_tokens += 1;
                        let stopped = text.push(token);
                        show(text.fresh())?;
                        if stopped {
                            cancelled = true;
                            events.push(Event::Cancel(id));
                        }
                    }
                    Output::Finished { finish, .. } => {
                        answer.answer_time = begin.elapsed().saturating_sub(answer.prompt_time);
                        match finish {
                            Finish::Stop(_) => {}
                            Finish::Length => answer.ending = Ending::Length,
                            Finish::Cancelled if cancelled => {}
                            Finish::Cancelled | Finish::Deadline => bail!("the engine gave up"),
                            Finish::Failed(why) => bail!("the device failed: {why}"),
                            Finish::Grammar(why) => bail!("{why}"),
                        }
                        if !cancelled {
                            text.finish();
                            show(text.fresh())?;
                        }
                        answer.text = text.whole;
                        return Ok(answer);
                    }
                }
            }
            if answering.interrupted() && !cancelled {
                cancelled = true;
                answer.ending = Ending::Interrupted;
                events.push(Event::Cancel(id));
            }
        }
    }
}

/// Tokens become text here: whole characters only, and nothing of a stop text.
pub(crate) struct Text {
    characters: Detokenizer,
    stops: StopFinder,
    pub(crate) whole: String,
    shown: usize,
    /// A stop text was found: nothing comes after it.
    stopped: bool,
}

impl Text {
    pub(crate) fn new(tokenizer: &Arc<Tokenizer>, stop: Vec<String>) -> Self {
        Self {
            characters: Detokenizer::new(tokenizer.clone()),
            stops: StopFinder::new(stop),
            whole: String::new(),
            shown: 0,
            stopped: false,
        }
    }

    /// Takes a token; true when a stop text is complete.
    pub(crate) fn push(&mut self, token: Token) -> bool {
        self.stopped |= self.stops.push(self.characters.push(token), &mut self.whole);
        self.stopped
    }

    /// Lets out what was held back.
    pub(crate) fn finish(&mut self) {
        if !self.stopped && !self.stops.push(self.characters.finish(), &mut self.whole) {
            self.stops.flush(&mut self.whole);
        }
    }

    /// What was not asked for before.
    fn fresh(&mut self) -> &str {
        let from = std::mem::replace(&mut self.shown, self.whole.len());
        &self.whole[from..]
    }
}

#[cfg(test)]
mod tests;
