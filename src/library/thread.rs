//! The engine's thread: loads the model, steps the engine and turns its outputs into replies.

use super::graphs::LiveGraphs;
use super::options::Options;
use super::said::Text;
use super::wake::Wake;
use super::{Loaded, Problem, suggested};
use crate::loading;
use crate::serve::{Serving, about};
use engine::EngineConfig;
use engine::exec::Executor;
use engine::request::{Event, Finish, Output, Request, RequestId, Token, TokenLogprob};
use serde_json::json;
use server::link::Backend;
use std::collections::HashMap;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, mpsc};
use std::time::Instant;
use text::{TextModel, WordText};

/// What the thread is asked to do.
pub(super) enum Message {
    Submit { ready: Vec<Ready>, stream: bool, replies: Replies },
    Cancel(Range<u64>),
    Stats(mpsc::Sender<String>),
    Stop,
}

/// A request for the engine, and what happens to its text.
pub(super) struct Ready {
    pub(super) index: usize,
    pub(super) request: Request,
    pub(super) stop: Vec<String>,
    /// Whether the text ends with the stop string that was found.
    pub(super) include_stop: bool,
}

/// Where the replies of a call go.
#[derive(Clone)]
pub(super) struct Replies {
    pub(super) sender: mpsc::Sender<Reply>,
    /// Told of each reply, with the call's number.
    pub(super) waking: Option<(Arc<Wake>, u64)>,
}

impl Replies {
    fn send(&self, reply: Reply) {
        // The call may have been dropped; its cancellation is on its way.
        let _ = self.sender.send(reply);
        if let Some((wake, call)) = &self.waking {
            wake.add(*call);
        }
    }
}

/// More of a request's answers.
#[derive(Clone, Debug)]
pub struct Reply {
    /// Which request of the call.
    pub index: usize,
    /// What is new, at most one piece per answer.
    pub pieces: Vec<Piece>,
    /// Set in the last reply of the request.
    pub end: Option<End>,
}

/// More of one answer.
#[derive(Clone, Debug)]
pub struct Piece {
    /// Which answer, from 0.
    pub choice: u32,
    /// The text since the last piece.
    pub text: String,
    /// The tokens since the last piece, without a stop token.
    pub tokens: Vec<Token>,
    /// Their log-probabilities, if asked for.
    pub logprobs: Vec<TokenLogprob>,
    /// `stop`, `length` or `abort` in the last piece.
    pub finish: Option<&'static str>,
    /// What it stopped at, if that was asked for.
    pub stop: Option<Stop>,
}

/// What an answer stopped at.
#[derive(Clone, Debug)]
pub enum Stop {
    /// A stop string.
    Text(String),
    /// A stop token of the request.
    Token(Token),
}

/// The end of a request.
#[derive(Clone, Debug, Default)]
pub struct End {
    /// Prompt tokens that were found in the prefix cache.
    pub cached_tokens: u32,
    /// Log-probabilities of the prompt's tokens after the first, if asked for.
    pub prompt_logprobs: Vec<TokenLogprob>,
    /// The prompt's vector, if asked for.
    pub embedding: Vec<f32>,
    /// Why there is no answer, or none that is complete.
    pub problem: Option<Problem>,
}

/// Loads the model, says so, and answers until it is stopped.
pub(super) fn run(
    options: Options,
    inbox: mpsc::Receiver<Message>,
    done: &mpsc::Sender<Result<Loaded, Problem>>,
) {
    let (loaded, backend) = match load(options) {
        Ok(made) => made,
        // The one who waits may have given up.
        Err(problem) => return drop(done.send(Err(problem))),
    };
    let text = loaded.text.clone();
    if done.send(Ok(loaded)).is_ok() {
        let start = Instant::now();
        let (live, events) = (HashMap::new(), Vec::new());
        let told = Vec::new();
        let mut worker = Worker { backend, text, inbox, start, live, events, told };
        let ended = catch_unwind(AssertUnwindSafe(|| worker.run()));
        // The message of a panic was printed where it happened.
        let problem = ended.unwrap_or_else(|_| Problem {
            invalid: false,
            text: "the engine failed; its message is on standard error".into(),
        });
        for (_, live) in worker.live.drain() {
            live.fail(problem.clone());
        }
    }
}

type Engine = Serving<model::GraphExecutor>;

fn load(options: Options) -> Result<(Loaded, Engine), Problem> {
    let max_batch = |kind| options.max_batch(kind);
    let mut loaded = loading::load_suited(&options.load, &options.global, max_batch)?;
    let info = about(&loaded);
    let config = EngineConfig { max_waiting: u32::MAX, ..loaded.engine_config() };
    let geometry = loaded.executor.geometry();
    let context = geometry.pages_per_seat.saturating_mul(geometry.page_size);
    let about = json!({
        "model": loaded.name,
        "family": loaded.config.family,
        "layers": loaded.config.layers,
        "vocab": loaded.config.vocab,
        "hidden": loaded.executor.hidden(),
        "eos": loaded.config.eos,
        "device": loaded.device,
        "context": context,
        "max_batch": geometry.seats,
        "memory": loaded.memory(),
        "sampling": suggested(&loaded.config.sampling),
        "graphs": info.config,
    });
    let text: Arc<dyn TextModel> = match loaded.take_text() {
        Some(text) => Arc::new(text),
        None => Arc::new(WordText::new(loaded.config.vocab as u32, loaded.config.eos.clone())),
    };
    let defaults = loaded.config.sampling;
    let graphs = LiveGraphs::of(&loaded);
    let backend = Serving::new(loaded.executor, config, info);
    Ok((Loaded { text, context, defaults, about, graphs, options }, backend))
}

struct Worker {
    backend: Engine,
    text: Arc<dyn TextModel>,
    inbox: mpsc::Receiver<Message>,
    start: Instant,
    live: HashMap<RequestId, Live>,
    events: Vec<Event>,
    /// Requests with pieces to send.
    told: Vec<RequestId>,
}

/// A request that has not ended.
struct Live {
    index: usize,
    stream: bool,
    replies: Replies,
    answers: Vec<Answer>,
    include_stop: bool,
    stop_tokens: Vec<Token>,
    end: End,
}

/// One answer, as far as it was not sent.
struct Answer {
    text: Text,
    tokens: Vec<Token>,
    logprobs: Vec<TokenLogprob>,
    finish: Option<&'static str>,
    stop: Option<Stop>,
    sent: bool,
}

impl Worker {
    /// Answers until it is stopped or the device fails; returns why requests that are left have no answer.
    fn run(&mut self) -> Problem {
        loop {
            let idle = self.events.is_empty() && self.backend.is_idle();
            if idle {
                let Ok(message) = self.inbox.recv() else { return Problem::stopped() };
                if !self.take(message) {
                    return Problem::stopped();
                }
            }
            while let Ok(message) = self.inbox.try_recv() {
                if !self.take(message) {
                    return Problem::stopped();
                }
            }
            let now = self.start.elapsed().as_micros() as u64;
            let events = std::mem::take(&mut self.events);
            for output in self.backend.step(now, events, true) {
                self.hear(output);
            }
            // After all outputs of the step, so that the last token of an answer comes with its end.
            for id in self.told.drain(..) {
                if let Some(live) = self.live.get_mut(&id) {
                    live.send(None);
                }
            }
            if let Some(why) = self.backend.gone() {
                return Problem { invalid: false, text: format!("the device failed: {why}") };
            }
        }
    }

    /// Does what a message says; false to stop.
    fn take(&mut self, message: Message) -> bool {
        match message {
            Message::Submit { ready, stream, replies } => {
                for ready in ready {
                    self.submit(ready, stream, &replies);
                }
            }
            Message::Cancel(ids) => {
                for id in ids.map(RequestId) {
                    if self.live.remove(&id).is_some() {
                        self.events.push(Event::Cancel(id));
                    }
                }
            }
            Message::Stats(sender) => {
                let snapshot = self.backend.snapshot();
                let mut stats = json!(snapshot);
                stats["steps"] = json!(snapshot.steps);
                // The caller may have given up.
                let _ = sender.send(stats.to_string());
            }
            Message::Stop => return false,
        }
        true
    }

    fn submit(&mut self, ready: Ready, stream: bool, replies: &Replies) {
        let Ready { index, request, stop, include_stop } = ready;
        let answer = || Answer {
            text: Text::new(self.text.detokenizer(), stop.clone()),
            tokens: Vec::new(),
            logprobs: Vec::new(),
            finish: None,
            stop: None,
            sent: false,
        };
        let live = Live {
            index,
            stream,
            replies: replies.clone(),
            answers: (0..request.choices).map(|_| answer()).collect(),
            include_stop,
            stop_tokens: request.sampling.stop_tokens.clone(),
            end: End::default(),
        };
        self.live.insert(request.id, live);
        self.events.push(Event::Submit(Box::new(request)));
    }

    fn hear(&mut self, output: Output) {
        let id = output.id();
        // Ended or cancelled.
        let Some(live) = self.live.get_mut(&id) else { return };
        let more = match output {
            Output::Rejected { reason, .. } => {
                if let Some(live) = self.live.remove(&id) {
                    live.fail(Problem::invalid(reason.to_string()));
                }
                return;
            }
            Output::Prefilled { cached_tokens, prompt_logprobs, .. } => {
                live.end.cached_tokens = cached_tokens;
                live.end.prompt_logprobs = prompt_logprobs;
                return;
            }
            Output::Embedded { vector, .. } => {
                live.end.embedding = vector;
                return;
            }
            Output::Token { choice, token, logprob, .. } => live.push(choice, token, logprob),
            Output::Finished { choice, finish, .. } => live.finish(choice, finish),
        };
        if more {
            if live.stream {
                self.told.push(id);
            }
        } else if let Some(mut live) = self.live.remove(&id) {
            // Unless it ended by itself, the engine still works on it.
            self.events.push(Event::Cancel(id));
            let end = std::mem::take(&mut live.end);
            live.send(Some(end));
        }
    }
}

impl Live {
    /// Adds a token; false if every answer has ended.
    fn push(&mut self, choice: u32, token: Token, logprob: Option<TokenLogprob>) -> bool {
        let include = self.include_stop;
        if let Some(answer) = self.open(choice) {
            answer.tokens.push(token);
            answer.logprobs.extend(logprob);
            if answer.text.push(token) {
                let found = answer.text.found().unwrap_or_default().to_owned();
                if include {
                    answer.text.whole.push_str(&found);
                }
                answer.finish = Some("stop");
                answer.stop = Some(Stop::Text(found));
            }
        }
        self.is_open()
    }

    /// Ends an answer; false if every answer has ended.
    fn finish(&mut self, choice: u32, finish: Finish) -> bool {
        let failed = |what: &str| Some(Problem { invalid: false, text: what.to_owned() });
        let (name, problem) = match &finish {
            Finish::Stop(_) => ("stop", None),
            Finish::Length => ("length", None),
            Finish::Cancelled => ("abort", None),
            Finish::Deadline => ("abort", failed("the request timed out")),
            Finish::Failed(why) => {
                ("abort", failed(&format!("the request failed on the device: {why}")))
            }
            Finish::Grammar(why) => ("abort", failed(why)),
        };
        let asked = match finish {
            Finish::Stop(Some(token)) if self.stop_tokens.contains(&token) => Some(token),
            _ => None,
        };
        if let Some(answer) = self.open(choice) {
            answer.text.finish();
            answer.finish = Some(name);
            answer.stop = asked.map(Stop::Token);
        }
        self.end.problem = problem.or(self.end.problem.take());
        self.is_open()
    }

    fn open(&mut self, choice: u32) -> Option<&mut Answer> {
        self.answers.get_mut(choice as usize).filter(|answer| answer.finish.is_none())
    }

    /// Whether an answer has not ended.
    fn is_open(&self) -> bool {
        self.answers.iter().any(|answer| answer.finish.is_none())
    }

    /// Sends what is new.
    fn send(&mut self, end: Option<End>) {
        let pieces = self.answers.iter_mut().enumerate();
        let pieces: Vec<Piece> = pieces.filter_map(|(at, answer)| answer.piece(at)).collect();
        if end.is_some() || !pieces.is_empty() {
            self.replies.send(Reply { index: self.index, pieces, end });
        }
    }

    fn fail(self, problem: Problem) {
        let end = End { problem: Some(problem), ..self.end };
        self.replies.send(Reply { index: self.index, pieces: Vec::new(), end: Some(end) });
    }
}

impl Answer {
    /// What was not sent, if anything.
    fn piece(&mut self, at: usize) -> Option<Piece> {
        let nothing = self.tokens.is_empty() && self.finish.is_none();
        if nothing || self.sent {
            return None;
        }
        self.sent = self.finish.is_some();
        Some(Piece {
            choice: at as u32,
            text: self.text.fresh().to_owned(),
            tokens: std::mem::take(&mut self.tokens),
            logprobs: std::mem::take(&mut self.logprobs),
            finish: self.finish,
            stop: self.stop.take(),
        })
    }
}
