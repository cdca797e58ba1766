//! The real engine behind the server.

use super::watched::{Traced, Watched};
use engine::exec::Executor;
use engine::request::{
    self, Embed, Event, Finish, Micros, Output, Request, RequestId, Sampling, Token,
};
use engine::{Engine, EngineConfig};
use server::link::{Backend, GraphInfo, Pages, Pooling, PrefixUse, Snapshot};
use std::sync::Arc;

/// An engine over a device, watched.
pub(crate) struct Serving<X: Executor + Traced> {
    engine: Engine<Watched<X>>,
    seats: u32,
    info: Arc<GraphInfo>,
    /// What was heard of others while a vector was made.
    held: Vec<Output>,
}

/// The id of the one request for a vector there is at a time; the server counts from the other end.
const EMBEDDING: RequestId = RequestId(u64::MAX);

impl<X: Executor + Traced> Serving<X> {
    /// Takes a device that is ready.
    pub(crate) fn new(executor: X, config: EngineConfig, info: GraphInfo) -> Self {
        let seats = executor.geometry().seats;
        let engine = Engine::new(Watched::new(executor), config);
        Self { engine, seats, info: Arc::new(info), held: Vec::new() }
    }
}

impl<X: Executor + Traced> Backend for Serving<X> {
    fn step(&mut self, now: Micros, events: Vec<Event>, wait: bool) -> Vec<Output> {
        self.engine.executor_mut().now = now;
        let mut outputs = std::mem::take(&mut self.held);
        outputs.extend(match wait && outputs.is_empty() {
            true => self.engine.step_wait(now, events),
            false => self.engine.step(now, events),
        });
        outputs
    }

    fn is_idle(&self) -> bool {
        self.engine.is_idle() && self.held.is_empty()
    }

    /// A request like any other, in the same steps as the others; they hear theirs afterwards.
    fn embed(&mut self, tokens: &[Token], pooling: Pooling) -> Option<Result<Vec<f32>, String>> {
        self.engine.executor().hidden()?;
        let pooling = match pooling {
            Pooling::Mean => request::Pooling::Mean,
            Pooling::Last => request::Pooling::Last,
        };
        let request = Request {
            id: EMBEDDING,
            prompt: tokens.into(),
            sampling: Sampling::default(),
            choices: 1,
            priority: 0,
            deadline: None,
            tenant: 0,
            prompt_logprobs: None,
            embed: Some(Embed { pooling, unit: true }),
        };
        let mut events = vec![Event::Submit(Box::new(request))];
        let mut made = Err("the engine gave no vector".to_owned());
        let now = self.engine.executor().now;
        loop {
            for output in self.engine.step_wait(now, std::mem::take(&mut events)) {
                match output {
                    Output::Rejected { id: EMBEDDING, reason } => {
                        return Some(Err(reason.to_string()));
                    }
                    Output::Prefilled { id: EMBEDDING, .. } => {}
                    Output::Embedded { id: EMBEDDING, vector } => made = Ok(vector),
                    Output::Finished { id: EMBEDDING, finish: Finish::Failed(why), .. } => {
                        made = Err(why);
                    }
                    Output::Finished { id: EMBEDDING, .. } => {}
                    other => self.held.push(other),
                }
            }
            if !self.engine.holds(EMBEDDING) {
                return Some(made);
            }
        }
    }

    fn snapshot(&self) -> Snapshot {
        let stats = self.engine.stats();
        let pages = stats.pages;
        Snapshot {
            queue: stats.waiting.into(),
            running: stats.running.into(),
            seats: self.seats.into(),
            pages: Pages {
                used: (pages.held + pages.published - pages.unread).into(),
                cached: pages.unread.into(),
                free: pages.free.into(),
            },
            prefix: PrefixUse { looked_up: stats.prompt_tokens, found: stats.cached_tokens },
            preemptions: stats.preemptions,
            steps: self.engine.executor().records(),
            graph: self.info.clone(),
        }
    }
}
