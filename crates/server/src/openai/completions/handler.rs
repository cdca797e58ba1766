//! Handles completion requests.

use super::convert::{Prepared, convert};
use super::stream::CompletionEvents;
use super::types::{CompletionChoice, CompletionLogprobs, CompletionRequest, CompletionResponse};
use super::validate::validate;
use crate::answer::{Delta, Piece, Run};
use crate::app::App;
use crate::error::ApiError;
use crate::http::auth::Caller;
use crate::http::{read_json, sse, write_json};
use crate::link::Consumer;
use crate::openai::chat::handler::finite;
use crate::openai::prompt_logprobs::prompt_logprobs;
use crate::openai::whole::ResponseSize;
use crate::openai::{new_id, unix_time};
use axum::extract::{Request, State};
use axum::response::Response;
use engine::request::{Token, TokenLogprob};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::sync::Arc;
use text::TextModel;

/// Answers one completion request, as one response or as a stream.
pub(crate) async fn handle(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    let caller = Caller::of(&request);
    let work = move |app: &App, request: CompletionRequest| {
        validate(&request, &app.model, &app.limits)?;
        let usage = request.stream_options.as_ref().is_some_and(|o| o.include_usage == Some(true));
        let streamed = (request.stream == Some(true)).then_some(usage);
        let (echo, logprobs) = (request.echo == Some(true), request.logprobs.is_some());
        let prompt_logprobs = request.prompt_logprobs;
        let top = request.logprobs.unwrap_or(0);
        let Prepared { requests, setup, prompts, grammar } =
            convert(&app.model, &app.limits, request, caller)?;
        let text = app.model.text.clone();
        let (firsts, token_ids) = (starts(&setup.choices), setup.token_ids);
        let offsets = vec![0; prompts.len()];
        let shared = Shared::new(setup.per_prompt);
        let writer = Writer {
            text,
            prompts,
            firsts,
            echo,
            logprobs,
            top,
            prompt_logprobs,
            token_ids,
            offsets,
            shared,
        };
        Ok((requests, setup, writer, streamed, grammar))
    };
    let (requests, setup, mut writer, streamed, grammar) = read_json(&app, request, work).await?;
    let consumer = if streamed.is_some() { Consumer::Client } else { Consumer::Server };
    let call = app.submit(requests, grammar, consumer).await?;
    let mut run = Run::new(call, &*app.model.text, setup);
    if let Some(usage) = streamed {
        let events = CompletionEvents::new(&app, writer, usage);
        return sse::respond(run, events, &app.limits).await;
    }
    let mut size = ResponseSize::new(&app);
    let mut choices: Vec<CompletionChoice> =
        (0..writer.prompts.len()).map(|index| writer.empty(index)).collect();
    while !run.is_over() {
        run.next(&mut |piece| {
            (0..writer.copies(&piece)).for_each(|_| size.add(0, piece.logprobs()));
            writer.write(piece, &mut |more| {
                size.add(more.text.len(), &[]);
                let choice = &mut choices[more.index as usize];
                choice.text.push_str(&more.text);
                if let (Some(into), Some(more)) = (&mut choice.logprobs, more.logprobs) {
                    into.append(more);
                }
                choice.finish_reason = more.finish_reason;
                choice.prompt_logprobs = choice.prompt_logprobs.take().or(more.prompt_logprobs);
                choice.prompt_token_ids = choice.prompt_token_ids.take().or(more.prompt_token_ids);
                if let (Some(into), Some(more)) = (&mut choice.token_ids, more.token_ids) {
                    into.extend(more);
                }
            });
        })
        .await?;
        size.check()?;
    }
    let response = CompletionResponse {
        id: new_id("cmpl"),
        object: "text_completion".into(),
        created: unix_time(),
        model: app.model.name.clone(),
        choices,
        usage: Some(run.usage.into()),
    };
    write_json(&app, size.bytes(), response).await
}

fn starts(choices: &[u32]) -> Vec<std::ops::Range<usize>> {
    let mut next = 0;
    let range = |count: &u32| {
        let first = next;
        next += *count as usize;
        first..next
    };
    choices.iter().map(range).collect()
}

/// Converts the pieces of a run to choices, complete or partial.
pub(super) struct Writer {
    text: Arc<dyn TextModel>,
    /// Per choice, its prompt.
    prompts: Vec<Arc<[Token]>>,
    /// Per request, its choices.
    firsts: Vec<std::ops::Range<usize>>,
    echo: bool,
    logprobs: bool,
    /// Alternatives per token.
    top: u32,
    /// Alternatives per token of the prompt, if its log-probabilities were requested.
    prompt_logprobs: Option<u32>,
    /// Whether token ids are returned.
    token_ids: bool,
    /// Per choice, characters so far.
    offsets: Vec<u64>,
    shared: Shared,
}

/// Prompt log-probabilities that several requests of a call share: only the first request computes
/// them.
struct Shared {
    /// Requests in a row with the same prompt.
    per_prompt: usize,
    /// Per prompt, once they are known.
    scores: BTreeMap<usize, Vec<TokenLogprob>>,
    /// Per prompt, pieces that arrived before them.
    held: BTreeMap<usize, Vec<Piece>>,
}

impl Shared {
    fn new(per_prompt: usize) -> Self {
        Self { per_prompt: per_prompt.max(1), scores: BTreeMap::new(), held: BTreeMap::new() }
    }
}

impl Writer {
    /// How many choices get the log-probabilities of a piece.
    fn copies(&self, piece: &Piece) -> usize {
        match piece {
            Piece::Prompt { .. } if self.echo || self.prompt_logprobs.is_some() => {
                self.shared.per_prompt
            }
            Piece::Prompt { .. } | Piece::Delta { .. } | Piece::End { .. } => 1,
        }
    }

    fn empty(&self, index: usize) -> CompletionChoice {
        CompletionChoice {
            index: index as u32,
            text: String::new(),
            logprobs: self.logprobs.then(CompletionLogprobs::empty),
            finish_reason: None,
            prompt_logprobs: None,
            prompt_token_ids: None,
            token_ids: self.token_ids.then(Vec::new),
        }
    }

    /// Emits what a piece adds to choices.
    pub(super) fn write(&mut self, piece: Piece, sink: &mut impl FnMut(CompletionChoice)) {
        let per_prompt = self.shared.per_prompt;
        let needed = self.echo && self.logprobs || self.prompt_logprobs.is_some();
        if per_prompt == 1 || !needed {
            return self.emit(piece, sink);
        }
        // Separate requests have one choice each: its index is the position of the request.
        let (Piece::Prompt { position: at, .. }
        | Piece::Delta { index: at, .. }
        | Piece::End { index: at, .. }) = &piece;
        let (prompt, first) = (*at / per_prompt, at.is_multiple_of(per_prompt));
        let Shared { scores, held, .. } = &mut self.shared;
        match piece {
            Piece::Prompt { position, tokens, cached, logprobs } if first => {
                scores.insert(prompt, logprobs.clone());
                let waiting = held.remove(&prompt).unwrap_or_default();
                self.emit(Piece::Prompt { position, tokens, cached, logprobs }, sink);
                waiting.into_iter().for_each(|piece| self.write(piece, sink));
            }
            piece => match (piece, scores.get(&prompt)) {
                (piece, None) => held.entry(prompt).or_default().push(piece),
                (Piece::Prompt { position, tokens, cached, .. }, Some(scores)) => {
                    let logprobs = scores.clone();
                    self.emit(Piece::Prompt { position, tokens, cached, logprobs }, sink);
                }
                (piece, Some(_)) => self.emit(piece, sink),
            },
        }
    }

    fn emit(&mut self, piece: Piece, sink: &mut impl FnMut(CompletionChoice)) {
        match piece {
            Piece::Prompt { position, logprobs, .. }
                if self.echo || self.token_ids || self.prompt_logprobs.is_some() =>
            {
                self.emit_prompt(position, &logprobs, sink);
            }
            Piece::Prompt { .. } => {}
            Piece::Delta { index, delta, logprobs, token_ids } => {
                let mut choice = self.empty(index);
                choice.token_ids = self.token_ids.then_some(token_ids);
                if let Some(into) = &mut choice.logprobs {
                    self.push_logprobs(into, index, &logprobs);
                }
                if let Delta::Text(text) = delta {
                    choice.text = text;
                }
                sink(choice);
            }
            Piece::End { index, reason, logprobs, token_ids, .. } => {
                let mut choice = self.empty(index);
                choice.token_ids = self.token_ids.then_some(token_ids);
                if let Some(into) = &mut choice.logprobs {
                    self.push_logprobs(into, index, &logprobs);
                }
                choice.finish_reason = Some(reason.into());
                sink(choice);
            }
        }
    }

    /// Emits an echoed prompt and the log-probabilities of its tokens.
    fn emit_prompt(
        &mut self,
        position: usize,
        logprobs: &[TokenLogprob],
        sink: &mut impl FnMut(CompletionChoice),
    ) {
        // The choices of one request have the same prompt.
        let Some(prompt) = self.prompts.get(self.firsts[position].start).cloned() else {
            return;
        };
        let text = if self.echo { self.text.decode(&prompt) } else { String::new() };
        for index in self.firsts[position].clone() {
            let mut choice = self.empty(index);
            choice.prompt_logprobs =
                self.prompt_logprobs.map(|top| prompt_logprobs(logprobs, top, &*self.text));
            choice.prompt_token_ids = self.token_ids.then(|| prompt.to_vec());
            choice.text = text.clone();
            if let Some(into) = choice.logprobs.as_mut().filter(|_| self.echo) {
                let first = prompt.first().copied().unwrap_or(0);
                self.offsets[index] += into.push_first(first, &*self.text);
                self.push_logprobs(into, index, logprobs);
            }
            self.offsets[index] = choice.text.chars().count() as u64;
            sink(choice);
        }
    }

    fn push_logprobs(
        &mut self,
        into: &mut CompletionLogprobs,
        index: usize,
        list: &[TokenLogprob],
    ) {
        for entry in list {
            let text = shown(entry.token, &*self.text);
            into.text_offset.push(self.offsets[index]);
            self.offsets[index] += text.chars().count() as u64;
            into.tokens.push(text);
            into.token_logprobs.push(Some(finite(entry.logprob)));
            let top: Map<String, Value> = entry
                .top
                .iter()
                .take(self.top as usize)
                .map(|(token, p)| (shown(*token, &*self.text), finite(*p).into()))
                .collect();
            into.top_logprobs.push(Some(top));
        }
    }
}

fn shown(token: Token, text: &dyn TextModel) -> String {
    String::from_utf8_lossy(&text.token_bytes(token).unwrap_or_default()).into_owned()
}

impl CompletionLogprobs {
    fn empty() -> Self {
        let (tokens, token_logprobs) = (Vec::new(), Vec::new());
        Self { tokens, token_logprobs, top_logprobs: Vec::new(), text_offset: Vec::new() }
    }

    fn append(&mut self, mut more: Self) {
        self.tokens.append(&mut more.tokens);
        self.token_logprobs.append(&mut more.token_logprobs);
        self.top_logprobs.append(&mut more.top_logprobs);
        self.text_offset.append(&mut more.text_offset);
    }

    /// Adds the first token of a prompt, which has no log-probability; returns its length in
    /// characters.
    fn push_first(&mut self, token: Token, text: &dyn TextModel) -> u64 {
        let text = shown(token, text);
        let chars = text.chars().count() as u64;
        self.tokens.push(text);
        self.token_logprobs.push(None);
        self.top_logprobs.push(None);
        self.text_offset.push(0);
        chars
    }
}
