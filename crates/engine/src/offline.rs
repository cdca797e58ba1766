//! Answers without a server: prompts in, completions out.
//!
//! ```
//! use engine::{Engine, exec::Executor, request::Sampling};
//!
//! fn print_answers(device: impl Executor) {
//!     let mut engine = Engine::builder(device).eos(vec![2]).build();
//!     let sampling = Sampling { max_tokens: 64, ..Sampling::default() };
//!     for answer in engine.generate(&[vec![1, 5, 9], vec![1, 7]], &sampling) {
//!         match answer {
//!             Ok(completion) => println!("{:?}", completion.choices[0].tokens),
//!             Err(reason) => println!("refused: {reason}"),
//!         }
//!     }
//! }
//! ```

use crate::engine::Engine;
use crate::exec::Executor;
use crate::request::{
    Event, Finish, Output, Reject, Request, RequestId, Sampling, Token, TokenLogprob,
};
use crate::sched::{EngineConfig, EngineStats};
use std::collections::BTreeMap;

/// Chooses how an [`Offline`] engine runs.
pub struct Builder<X: Executor> {
    executor: X,
    config: EngineConfig,
}

impl<X: Executor> Engine<X> {
    /// Starts an engine for programs that only need answers.
    pub fn builder(executor: X) -> Builder<X> {
        Builder { executor, config: EngineConfig::default() }
    }
}

impl<X: Executor> Builder<X> {
    /// Everything at once; later calls change single fields.
    pub fn config(mut self, config: EngineConfig) -> Self {
        self.config = config;
        self
    }

    /// The model's own stop tokens.
    pub fn eos(mut self, eos: Vec<Token>) -> Self {
        self.config.eos = eos;
        self
    }

    /// Whether prompts with equal beginnings share pages.
    pub fn prefix_cache(mut self, on: bool) -> Self {
        self.config.prefix_cache = on;
        self
    }

    /// Most tokens of a step that feeds prompts.
    pub fn step_tokens(mut self, tokens: u32) -> Self {
        self.config.step_tokens = tokens;
        self
    }

    /// The engine.
    pub fn build(self) -> Offline<X> {
        let window = self.config.max_waiting.clamp(1, 1024) as usize;
        Offline { engine: Engine::new(self.executor, self.config), window, submitted: 0 }
    }
}

/// One prompt's answers.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Completion {
    /// One per choice asked for.
    pub choices: Vec<Answer>,
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Of these, found in the prefix tree.
    pub cached_tokens: u32,
    /// One per prompt token after the first, when asked for.
    pub prompt_logprobs: Vec<TokenLogprob>,
    /// The prompt's vector, when asked for.
    pub embedding: Vec<f32>,
}

/// One continuation of a prompt.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Answer {
    /// Its tokens, without a stop token.
    pub tokens: Vec<Token>,
    /// One per token, when asked for.
    pub logprobs: Vec<TokenLogprob>,
    /// How it ended; nothing while it runs.
    pub finish: Option<Finish>,
    /// The caller ended it.
    cut: bool,
}

/// An engine that runs on the thread that waits for its answers.
pub struct Offline<X: Executor> {
    engine: Engine<X>,
    /// Most requests submitted and unanswered.
    window: usize,
    submitted: u64,
}

impl<X: Executor> Offline<X> {
    /// What runs its steps.
    pub fn executor(&self) -> &X {
        self.engine.executor()
    }

    /// Continues every prompt in the same way; answers come in the order of the prompts. Prompt `i`
    /// draws with seed `sampling.seed + i`, so that equal prompts get different answers.
    pub fn generate(
        &mut self,
        prompts: &[Vec<Token>],
        sampling: &Sampling,
    ) -> Vec<Result<Completion, Reject>> {
        let request = |(index, prompt): (usize, &Vec<Token>)| {
            let seed = sampling.seed.wrapping_add(index as u64);
            let sampling = Sampling { seed, ..sampling.clone() };
            Request::new(RequestId(0), prompt.as_slice(), sampling)
        };
        self.answer(prompts.iter().enumerate().map(request))
    }

    /// Answers requests in the order given; their ids are chosen here.
    pub fn answer(
        &mut self,
        requests: impl IntoIterator<Item = Request>,
    ) -> Vec<Result<Completion, Reject>> {
        let mut answers = BTreeMap::new();
        self.stream(requests, |index, answer| {
            answers.insert(index, answer);
            true
        });
        answers.into_values().collect()
    }

    /// Answers requests as they finish: `done` gets the request's index in the order given and its answer,
    /// and returns whether to go on. Requests are taken from the iterator only when there is room.
    pub fn stream(
        &mut self,
        requests: impl IntoIterator<Item = Request>,
        done: impl FnMut(u64, Result<Completion, Reject>) -> bool,
    ) {
        self.stream_until(requests, |_, _, _| false, done);
    }

    /// As [`Offline::stream`]; `enough` gets every token with the request's index and the choice, and
    /// returns true to end that choice there with [`Finish::Stop`]. Computing stops once all choices of
    /// the request have ended.
    pub fn stream_until(
        &mut self,
        requests: impl IntoIterator<Item = Request>,
        mut enough: impl FnMut(u64, u32, Token) -> bool,
        mut done: impl FnMut(u64, Result<Completion, Reject>) -> bool,
    ) {
        let mut requests = requests.into_iter();
        let mut open: BTreeMap<RequestId, (u64, Completion)> = BTreeMap::new();
        let (mut taken, mut exhausted, mut go_on) = (0, false, true);
        let mut events = Vec::new();
        loop {
            while go_on && open.len() < self.window {
                let Some(mut request) = requests.next() else {
                    exhausted = true;
                    break;
                };
                request.id = RequestId(self.submitted);
                self.submitted += 1;
                let choices = vec![Answer::default(); request.choices as usize];
                open.insert(request.id, (taken, Completion { choices, ..Completion::default() }));
                taken += 1;
                events.push(Event::Submit(Box::new(request)));
            }
            if !go_on {
                events.extend(open.keys().map(|&id| Event::Cancel(id)));
            }
            // No clock: nothing here has a deadline.
            for output in self.engine.step_wait(0, std::mem::take(&mut events)) {
                if let Output::Token { id, choice, token, .. } = &output
                    && let Some((index, completion)) = open.get_mut(id)
                    && completion.is_open(*choice)
                    && enough(*index, *choice, *token)
                {
                    completion.choices[*choice as usize].cut = true;
                }
                let id = output.id();
                if let Some((index, answer)) = hear(&mut open, output) {
                    // Unless it ended by itself, the engine still works on it.
                    events.push(Event::Cancel(id));
                    go_on = go_on && done(index, answer);
                }
            }
            if open.is_empty() && self.engine.is_idle() && (exhausted || !go_on) {
                return;
            }
        }
    }

    /// Counters and current state of the engine.
    pub fn stats(&self) -> EngineStats {
        self.engine.stats()
    }

    /// The engine itself.
    pub fn engine(&self) -> &Engine<X> {
        &self.engine
    }
}

impl Completion {
    /// Whether a choice has not ended.
    fn is_open(&self, choice: u32) -> bool {
        self.choices.get(choice as usize).is_some_and(|answer| answer.finish.is_none())
    }
}

/// Adds an output to the answer it belongs to; returns that answer with its index once it is complete.
fn hear(
    open: &mut BTreeMap<RequestId, (u64, Completion)>,
    output: Output,
) -> Option<(u64, Result<Completion, Reject>)> {
    match output {
        Output::Rejected { id, reason } => open.remove(&id).map(|(index, _)| (index, Err(reason))),
        Output::Prefilled { id, prompt_tokens, cached_tokens, prompt_logprobs } => {
            let (_, completion) = open.get_mut(&id)?;
            completion.prompt_tokens = prompt_tokens;
            completion.cached_tokens = cached_tokens;
            completion.prompt_logprobs = prompt_logprobs;
            None
        }
        Output::Embedded { id, vector } => {
            open.get_mut(&id)?.1.embedding = vector;
            None
        }
        Output::Token { id, choice, token, logprob } => {
            let (_, completion) = open.get_mut(&id)?;
            if !completion.is_open(choice) {
                return None;
            }
            let answer = &mut completion.choices[choice as usize];
            answer.tokens.push(token);
            answer.logprobs.extend(logprob);
            if !answer.cut {
                return None;
            }
            finish(open, id, choice, Finish::Stop(None))
        }
        Output::Finished { id, choice, finish: how, .. } => finish(open, id, choice, how),
    }
}

/// Ends a choice that has not ended; returns the request's answer with its index once it is complete.
fn finish(
    open: &mut BTreeMap<RequestId, (u64, Completion)>,
    id: RequestId,
    choice: u32,
    how: Finish,
) -> Option<(u64, Result<Completion, Reject>)> {
    let choices = &mut open.get_mut(&id)?.1.choices;
    choices.get_mut(choice as usize)?.finish.get_or_insert(how);
    if choices.iter().any(|answer| answer.finish.is_none()) {
        return None;
    }
    open.remove(&id).map(|(index, completion)| (index, Ok(completion)))
}
