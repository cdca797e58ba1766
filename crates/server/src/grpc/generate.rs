//! `vllm.Inference`: answers as they are made, token ids and text.

use super::convert::{Wanted, convert};
use super::running::{Entry, Running};
use super::status::status;
use super::{Described, Patience};
use crate::answer::{Choice, ChoiceSetup, Delta, rejected};
use crate::app::App;
use crate::http::auth::Caller;
use crate::link::{Call, Consumer, Reply};
use crate::openai::completions::convert::{Prepared, convert as prepare};
use crate::openai::completions::validate::validate;
use crate::openai::whole::ResponseSize;
use engine::request::{Finish, Output, Token, TokenLogprob};
use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use text::TextModel;
use tonic::codegen::tokio_stream::Stream;
use tonic::{Request, Response, Status};
use vllm_proto::candidate_token_info::TokenInfo;
use vllm_proto::finish_info::{FinishReason, StopReason};
use vllm_proto::{
    CandidateTokenInfo, FinishInfo, GenerateRequest, GenerateResponse, PromptInfo, SequenceOutput,
};

pub(super) struct Inference {
    app: Arc<App>,
    described: Arc<Described>,
    running: Running,
}

impl Inference {
    pub(super) fn new(app: Arc<App>, described: Arc<Described>) -> Self {
        Self { app, described, running: Running::default() }
    }

    /// The calls under way.
    pub(super) fn running(&self) -> Running {
        self.running.clone()
    }

    async fn begin(
        &self,
        request: Request<GenerateRequest>,
        consumer: Consumer,
    ) -> Result<Answer, Status> {
        let app = &self.app;
        app.check_room().map_err(|error| status(&error))?;
        let caller: Caller = request.extensions().get().copied().unwrap_or_default();
        let patience = request.extensions().get().copied().unwrap_or(Patience(None));
        let asked = app.link.now();
        let request = request.into_inner();
        let several = request.sampling.is_some_and(|sampling| sampling.num_sequences > 1);
        if several && consumer == Consumer::Server {
            return Err(Status::invalid_argument(
                "Generate returns one sequence: use GenerateStream",
            ));
        }
        let entry = self.running.enter(caller, request.request_id.clone());
        let entry = entry.ok_or_else(|| Status::already_exists("request_id is in use"))?;
        let (shared, described) = (app.clone(), self.described.clone());
        let length = prost::Message::encoded_len(&request);
        let work = move || {
            let (model, limits) = (&shared.model, &shared.limits);
            let (completion, wanted) = convert(request, model, &described.model_id)?;
            validate(&completion, model, limits)?;
            let stop_ids = completion.stop_token_ids.clone().unwrap_or_default();
            Ok((prepare(model, limits, completion, caller)?, wanted, stop_ids))
        };
        let prepared = app.compute(length, work).await.and_then(|made| made);
        let (prepared, wanted, stop_ids) = prepared.map_err(|error| status(&error))?;
        let Prepared { mut requests, setup, mut prompts, grammar } = prepared;
        let deadline = patience.0.map(|time| asked + time.as_micros() as u64);
        requests.iter_mut().for_each(|request| request.deadline = deadline);
        let call = app.submit(requests, grammar, consumer).await.map_err(|error| status(&error))?;
        entry.set(call.ids());
        let prompt = prompts.swap_remove(0);
        Ok(Answer {
            slots: slots(&setup.choices, &*app.model.text, &setup.choice),
            firsts: firsts(&setup.choices),
            call,
            text: app.model.text.clone(),
            wanted,
            stop_ids,
            prompt,
            cached: 0,
            prompt_info: None,
            inbox: Vec::new(),
            ready: VecDeque::new(),
            failed: None,
            _entry: entry,
        })
    }
}

#[tonic::async_trait]
impl vllm_proto::inference_server::Inference for Inference {
    async fn generate(
        &self,
        request: Request<GenerateRequest>,
    ) -> Result<Response<GenerateResponse>, Status> {
        let mut answer = self.begin(request, Consumer::Server).await?;
        let mut size = ResponseSize::new(&self.app);
        let mut whole = GenerateResponse::default();
        let mut outputs = SequenceOutput::default();
        while let Some(part) = std::future::poll_fn(|cx| answer.poll(cx)).await {
            let GenerateResponse { prompt_info, outputs: part } = part?;
            whole.prompt_info = whole.prompt_info.or(prompt_info);
            let part = part.unwrap_or_default();
            let candidates: usize = part.candidate_tokens.iter().map(|c| c.tokens.len()).sum();
            size.add(part.text.len() + 16 * (part.token_ids.len() + candidates), &[]);
            size.check().map_err(|error| status(&error))?;
            outputs.text.push_str(&part.text);
            outputs.num_tokens += part.num_tokens;
            outputs.token_ids.extend(part.token_ids);
            outputs.logprobs.extend(part.logprobs);
            outputs.ranks.extend(part.ranks);
            outputs.candidate_tokens.extend(part.candidate_tokens);
            outputs.finish_info = outputs.finish_info.or(part.finish_info);
        }
        whole.outputs = Some(outputs);
        Ok(Response::new(whole))
    }

    type GenerateStreamStream = Answer;

    async fn generate_stream(
        &self,
        request: Request<GenerateRequest>,
    ) -> Result<Response<Answer>, Status> {
        self.begin(request, Consumer::Client).await.map(Response::new)
    }
}

/// One sequence of an answer.
struct Slot {
    position: usize,
    choice: Choice,
    /// Not sent yet.
    text: String,
    tokens: Vec<Token>,
    logprobs: Vec<TokenLogprob>,
    /// Tokens so far.
    count: u32,
    over: bool,
}

fn slots(choices: &[u32], text: &dyn TextModel, setup: &ChoiceSetup) -> Vec<Slot> {
    let positions = choices.iter().enumerate();
    let positions = positions.flat_map(|(at, count)| (0..*count).map(move |_| at));
    let slot = |position| Slot {
        position,
        choice: Choice::new(text.detokenizer(), setup.clone()),
        text: String::new(),
        tokens: Vec::new(),
        logprobs: Vec::new(),
        count: 0,
        over: false,
    };
    positions.map(slot).collect()
}

/// Per request of the engine, its first slot.
fn firsts(choices: &[u32]) -> Vec<usize> {
    let next = |next: &mut usize, count: &u32| {
        let first = *next;
        *next += *count as usize;
        Some(first)
    };
    choices.iter().scan(0, next).collect()
}

/// The answer to a request. Dropping it cancels the request, as when the client leaves.
pub(super) struct Answer {
    call: Call,
    text: Arc<dyn TextModel>,
    slots: Vec<Slot>,
    /// Per request of the engine, its first slot.
    firsts: Vec<usize>,
    wanted: Wanted,
    /// The tokens that the client asked to stop at.
    stop_ids: Vec<Token>,
    prompt: Arc<[Token]>,
    cached: u32,
    /// What is sent with the first message.
    prompt_info: Option<PromptInfo>,
    inbox: Vec<Reply>,
    ready: VecDeque<GenerateResponse>,
    failed: Option<Status>,
    _entry: Entry,
}

impl Stream for Answer {
    type Item = Result<GenerateResponse, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.poll(cx)
    }
}

impl Answer {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<GenerateResponse, Status>>> {
        loop {
            if let Some(message) = self.ready.pop_front() {
                return Poll::Ready(Some(Ok(message)));
            }
            if let Some(failed) = self.failed.take() {
                self.slots.iter_mut().for_each(|slot| slot.over = true);
                return Poll::Ready(Some(Err(failed)));
            }
            if self.slots.iter().all(|slot| slot.over) {
                return Poll::Ready(None);
            }
            let mut inbox = std::mem::take(&mut self.inbox);
            let received = self.call.poll_many(cx, &mut inbox);
            match received {
                Poll::Pending => {
                    self.inbox = inbox;
                    return Poll::Pending;
                }
                Poll::Ready(0) => {
                    let why = "the client read too slowly and lost the stream";
                    self.failed = Some(Status::resource_exhausted(why));
                }
                Poll::Ready(_) => {
                    let taken = inbox.drain(..).try_for_each(|reply| self.take(reply));
                    self.failed = taken.err();
                    // Tokens that came together are sent together.
                    (0..self.slots.len()).for_each(|index| self.send(index, None));
                }
            }
            self.inbox = inbox;
            if self.slots.iter().all(|slot| slot.over) {
                self.call.done();
            }
        }
    }

    fn take(&mut self, reply: Reply) -> Result<(), Status> {
        match reply {
            Reply::Lost { why, .. } => Err(Status::unavailable(why)),
            Reply::Output(Output::Rejected { reason, .. }) => Err(status(&rejected(reason))),
            Reply::Output(Output::Prefilled { cached_tokens, prompt_logprobs, .. }) => {
                self.cached = cached_tokens;
                self.prompt_info = Some(self.prompt_info(&prompt_logprobs));
                Ok(())
            }
            // Never asked for here.
            Reply::Output(Output::Embedded { .. }) => Ok(()),
            Reply::Output(Output::Token { id, choice, token, logprob }) => {
                let index = self.firsts[self.call.position(id)] + choice as usize;
                let slot = &mut self.slots[index];
                if slot.over {
                    return Ok(());
                }
                slot.count += 1;
                slot.tokens.push(token);
                slot.logprobs.extend(logprob);
                if slot.push(token) {
                    self.call.cancel(slot.position);
                    self.stopped(index);
                }
                Ok(())
            }
            Reply::Output(Output::Finished { id, choice, finish, .. }) => {
                let index = self.firsts[self.call.position(id)] + choice as usize;
                if self.slots[index].over {
                    return Ok(());
                }
                self.finish(index, finish)
            }
        }
    }

    fn finish(&mut self, index: usize, finish: Finish) -> Result<(), Status> {
        let (reason, stop) = match finish {
            Finish::Stop(token) => {
                let own = |token: &Token| !self.stop_ids.contains(token);
                let ends = |token: &Token| self.text.stop_tokens().contains(token);
                let stop = token.map(|token| match own(&token) && ends(&token) {
                    true => StopReason::EosTokenId(token),
                    false => StopReason::StopTokenId(token),
                });
                (FinishReason::Stop, stop)
            }
            Finish::Length => (FinishReason::Length, None),
            Finish::Cancelled => (FinishReason::Aborted, None),
            Finish::Deadline => return Err(Status::deadline_exceeded("the deadline has passed")),
            Finish::Failed(why) => {
                return Err(Status::internal(format!("the request failed on the device: {why}")));
            }
            Finish::Grammar(why) => return Err(Status::invalid_argument(why)),
        };
        if self.slots[index].finish(reason == FinishReason::Length) {
            self.stopped(index);
        } else {
            self.end(index, reason, stop);
        }
        Ok(())
    }

    /// A stop string ended a sequence.
    fn stopped(&mut self, index: usize) {
        let slot = &mut self.slots[index];
        let stop = slot.choice.stop_string().unwrap_or_default().to_string();
        if self.wanted.stop_string {
            slot.text.push_str(&stop);
        }
        self.end(index, FinishReason::Stop, Some(StopReason::StopString(stop)));
    }

    fn end(&mut self, index: usize, reason: FinishReason, stop_reason: Option<StopReason>) {
        let slot = &mut self.slots[index];
        slot.over = true;
        let info = FinishInfo {
            num_output_tokens: slot.count,
            finish_reason: reason.into(),
            kv_transfer_params: None,
            ec_transfer_params: None,
            num_cached_tokens: Some(self.cached),
            stop_reason,
        };
        self.send(index, Some(info));
    }

    /// Queues a message with what a sequence has got, if it has, or its end.
    fn send(&mut self, index: usize, finish_info: Option<FinishInfo>) {
        let slot = &mut self.slots[index];
        if slot.tokens.is_empty() && finish_info.is_none() {
            return;
        }
        let (tokens, logprobs) =
            (std::mem::take(&mut slot.tokens), std::mem::take(&mut slot.logprobs));
        let text = std::mem::take(&mut slot.text);
        let wanted = self.wanted;
        let logprobs = if wanted.logprobs { logprobs.as_slice() } else { &[] };
        let outputs = SequenceOutput {
            index: index as u32,
            text: if wanted.text { text } else { String::new() },
            num_tokens: tokens.len() as u32,
            token_ids: if wanted.ids { tokens } else { Vec::new() },
            logprobs: logprobs.iter().map(|one| one.logprob).collect(),
            ranks: logprobs.iter().map(rank).collect(),
            candidate_tokens: candidates(logprobs, wanted.candidates),
            finish_info,
            sampling_mask: Vec::new(),
        };
        let prompt_info = self.prompt_info.take();
        self.ready.push_back(GenerateResponse { prompt_info, outputs: Some(outputs) });
    }

    fn prompt_info(&self, scores: &[TokenLogprob]) -> PromptInfo {
        let mut info =
            PromptInfo { num_prompt_tokens: self.prompt.len() as u32, ..PromptInfo::default() };
        if self.wanted.prompt_ids {
            info.token_ids = self.prompt.to_vec();
        }
        if let Some(top) = self.wanted.prompt_logprobs {
            // The first token follows nothing.
            info.logprobs =
                std::iter::once(0.0).chain(scores.iter().map(|one| one.logprob)).collect();
            info.ranks = std::iter::once(0).chain(scores.iter().map(rank)).collect();
            let first = (top > 0).then(CandidateTokenInfo::default);
            info.candidate_tokens = first.into_iter().chain(candidates(scores, top)).collect();
        }
        info
    }
}

impl Slot {
    /// Adds a token; true if it completed a stop string.
    fn push(&mut self, token: Token) -> bool {
        let mut deltas = Vec::new();
        let stopped = self.choice.push(token, &mut deltas);
        self.append(deltas);
        stopped
    }

    /// No more tokens come; true if what was held back has a stop string.
    fn finish(&mut self, cut: bool) -> bool {
        let mut deltas = Vec::new();
        let stopped = self.choice.finish(cut, &mut deltas);
        self.append(deltas);
        stopped
    }

    fn append(&mut self, deltas: Vec<Delta>) {
        for delta in deltas {
            // Plain answers have no other parts.
            if let Delta::Text(text) = delta {
                self.text.push_str(&text);
            }
        }
    }
}

/// The place of a token among the likeliest, from 1; 0 if it is not one of those known.
fn rank(score: &TokenLogprob) -> u32 {
    let place = score.top.iter().position(|(token, _)| *token == score.token);
    place.map_or(0, |place| place as u32 + 1)
}

fn candidates(scores: &[TokenLogprob], top: u32) -> Vec<CandidateTokenInfo> {
    if top == 0 {
        return Vec::new();
    }
    let info = |(rank, (id, logprob)): (u32, &(Token, f32))| TokenInfo {
        id: *id,
        logprob: *logprob,
        rank,
    };
    let one = |score: &TokenLogprob| CandidateTokenInfo {
        tokens: (1..).zip(score.top.iter().take(top as usize)).map(info).collect(),
    };
    scores.iter().map(one).collect()
}
