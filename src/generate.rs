//! Generates one answer at a time with an engine: submits a prompt, emits text, counts and times.

use crate::interrupt::Interrupt;
use anyhow::{Result, bail};
use engine::Engine;
use engine::exec::Executor;
use engine::request::{
    Drafts, Event, Finish, Output, Request, RequestId, Sampling, Token, TokenLogprob,
};
use formats::tokenizer::Tokenizer;
use serde_json::{Value, json};
use server::answer::{Choice, ChoiceSetup, Delta};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// An engine with one user.
pub(crate) struct Speaker<X: Executor> {
    engine: Engine<X>,
    tokenizer: Arc<Tokenizer>,
    start: Instant,
    last_id: u64,
}

/// A prompt with its parameters.
pub(crate) struct Ask {
    pub(crate) prompt: Vec<Token>,
    pub(crate) sampling: Sampling,
    /// How the answer is read.
    pub(crate) setup: ChoiceSetup,
    /// Log-probabilities of the prompt's tokens, with this many alternatives each.
    pub(crate) prompt_logprobs: Option<u32>,
}

/// How an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// By the model, its grammar or a stop string.
    Stop,
    /// By the token limit or the context.
    Length,
    /// By Ctrl-C.
    Interrupted,
}

/// A complete answer, with counts and times.
#[derive(Clone, Debug)]
pub(crate) struct Answer {
    pub(crate) text: String,
    /// What the model wrote before it.
    pub(crate) reasoning: String,
    pub(crate) ending: Ending,
    pub(crate) prompt_tokens: u32,
    /// Prompt tokens found in the prefix cache.
    pub(crate) cached_tokens: u32,
    pub(crate) answer_tokens: u32,
    /// What drafts did.
    pub(crate) drafts: Drafts,
    /// Time until the prompt was processed.
    pub(crate) prompt_time: Duration,
    /// Time from then to the end.
    pub(crate) answer_time: Duration,
    /// One per prompt token after the first, if requested.
    pub(crate) prompt_logprobs: Option<Vec<TokenLogprob>>,
}

/// The shortest answer whose rate is meaningful.
const LEAST_TOKENS: u32 = 4;
const LEAST_TIME: Duration = Duration::from_millis(5);

impl Answer {
    /// Prompt tokens processed per second, without cached ones.
    pub(crate) fn prompt_rate(&self) -> f64 {
        rate(self.prompt_tokens.saturating_sub(self.cached_tokens), self.prompt_time)
    }

    /// Answer tokens per second, without the first, which the prompt's step generates. `None` for
    /// an answer that is too short to be measured: the tokens of one launch arrive together.
    pub(crate) fn answer_rate(&self) -> Option<f64> {
        let tokens = self.answer_tokens.saturating_sub(1);
        let measured = tokens >= LEAST_TOKENS && self.answer_time >= LEAST_TIME;
        measured.then(|| rate(tokens, self.answer_time))
    }

    /// The line under an answer.
    pub(crate) fn summary(&self) -> String {
        let cached = match self.cached_tokens {
            0 => String::new(),
            cached => format!(" ({cached} cached)"),
        };
        let drafts = match self.drafts {
            Drafts { drafted: 0, .. } => String::new(),
            Drafts { drafted, accepted } => format!("; {accepted} of {drafted} drafts accepted"),
        };
        format!(
            "prompt {} tokens{cached}, {:.1} tok/s; answer {} tokens{}{drafts}{}",
            self.prompt_tokens,
            self.prompt_rate(),
            self.answer_tokens,
            self.answer_rate().map_or(String::new(), |rate| format!(", {rate:.1} tok/s")),
            match self.ending {
                Ending::Stop => "",
                Ending::Length => "; stopped by the token limit",
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
            "drafted_tokens": self.drafts.drafted,
            "accepted_tokens": self.drafts.accepted,
            "prompt_seconds": self.prompt_time.as_secs_f64(),
            "answer_seconds": self.answer_time.as_secs_f64(),
            "prompt_tokens_per_second": self.prompt_rate(),
            "answer_tokens_per_second": self.answer_rate(),
        });
        if !self.reasoning.is_empty() {
            json["reasoning"] = self.reasoning.as_str().into();
        }
        if let Some(scores) = &self.prompt_logprobs {
            json["prompt_logprobs"] = scores_to_json(scores, tokenizer);
        }
        json
    }
}

/// The log-probability of each prompt token, with alternatives.
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
    /// What runs its steps.
    pub(crate) fn executor(&self) -> &X {
        self.engine.executor()
    }

    /// Its model's tokenizer.
    pub(crate) fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Takes an engine.
    pub(crate) fn new(engine: Engine<X>, tokenizer: Arc<Tokenizer>) -> Self {
        Self { engine, tokenizer, start: Instant::now(), last_id: 0 }
    }

    /// Generates an answer; `show` gets every piece of it as soon as it is certain. After Ctrl-C
    /// it returns the answer so far.
    pub(crate) fn answer(
        &mut self,
        ask: Ask,
        interrupt: &Interrupt,
        show: &mut dyn FnMut(&Delta) -> std::io::Result<()>,
    ) -> Result<Answer> {
        self.last_id += 1;
        let id = RequestId(self.last_id);
        let answering = interrupt.guard();
        let mut reading = Reading::new(&self.tokenizer, ask.setup);
        let mut answer = Answer {
            text: String::new(),
            reasoning: String::new(),
            ending: Ending::Stop,
            prompt_tokens: ask.prompt.len() as u32,
            cached_tokens: 0,
            answer_tokens: 0,
            drafts: Drafts::default(),
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
                    Output::Embedded { .. } => bail!("internal error: unexpected embedding"),
                    // Tokens in flight when the answer was cancelled.
                    Output::Token { .. } if cancelled => {}
                    Output::Token { token, .. } => {
                        answer.answer_tokens += 1;
                        let ended = reading.push(token);
                        reading.pieces.iter().try_for_each(&mut *show)?;
                        if ended {
                            cancelled = true;
                            events.push(Event::Cancel(id));
                        }
                    }
                    Output::Finished { finish, drafts, .. } => {
                        answer.drafts = drafts;
                        answer.answer_time = begin.elapsed().saturating_sub(answer.prompt_time);
                        match finish {
                            Finish::Stop(_) => {}
                            Finish::Length => answer.ending = Ending::Length,
                            Finish::Cancelled if cancelled => {}
                            Finish::Cancelled | Finish::Deadline => {
                                bail!("request cancelled or timed out")
                            }
                            Finish::Failed(why) => bail!("the request failed on the device: {why}"),
                            Finish::Grammar(why) => bail!("{why}"),
                        }
                        if !cancelled {
                            reading.finish(answer.ending == Ending::Length);
                            reading.pieces.iter().try_for_each(&mut *show)?;
                        }
                        (answer.text, answer.reasoning) = (reading.text, reading.reasoning);
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

/// An answer, read token by token: complete characters, without stop strings, reasoning apart.
pub(crate) struct Reading {
    choice: Choice,
    /// A stop string or the end of the last message was found, so nothing is held back.
    ended: bool,
    /// What the last call added.
    pub(crate) pieces: Vec<Delta>,
    pub(crate) text: String,
    pub(crate) reasoning: String,
}

impl Reading {
    pub(crate) fn new(tokenizer: &Arc<Tokenizer>, setup: ChoiceSetup) -> Self {
        let choice = Choice::new(text::detokenizer(tokenizer), setup);
        let (text, reasoning) = (String::new(), String::new());
        Self { choice, ended: false, pieces: Vec::new(), text, reasoning }
    }

    /// Adds a token; true if it ended the answer.
    pub(crate) fn push(&mut self, token: Token) -> bool {
        self.pieces.clear();
        if !self.ended {
            self.ended = self.choice.push(token, &mut self.pieces);
            self.add();
        }
        self.ended
    }

    /// Adds the text held back; `cut`: the token limit ended the answer.
    pub(crate) fn finish(&mut self, cut: bool) {
        self.pieces.clear();
        if !self.ended {
            self.choice.finish(cut, &mut self.pieces);
            self.add();
        }
    }

    fn add(&mut self) {
        for piece in &self.pieces {
            match piece {
                Delta::Text(text) => self.text.push_str(text),
                Delta::Reasoning(text) => self.reasoning.push_str(text),
                // No tool is offered.
                Delta::ToolStart { .. } | Delta::ToolArguments(_) | Delta::ToolEnd => {}
            }
        }
    }
}

#[cfg(test)]
mod tests;
