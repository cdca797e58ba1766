//! Handles chat requests.

use super::convert::{Prepared, convert};
use super::stream::ChatEvents;
use super::types::{
    AnswerMessage, ChatChoice, ChatLogprob, ChatLogprobs, ChatRequest, ChatResponse, FunctionCall,
    ToolCall, TopLogprob,
};
use super::validate::validate;
use crate::answer::{Delta, Piece, Run};
use crate::app::App;
use crate::error::ApiError;
use crate::http::auth::Caller;
use crate::http::{read_json, sse, write_json};
use crate::link::Consumer;
use crate::openai::prompt_logprobs::prompt_logprobs;
use crate::openai::whole::ResponseSize;
use crate::openai::{new_id, unix_time};
use axum::extract::{Request, State};
use axum::response::Response;
use engine::request::{Token, TokenLogprob};
use std::sync::Arc;
use text::TextModel;

/// Answers one chat request, as one response or as a stream.
pub(crate) async fn handle(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    let caller = Caller::of(&request);
    let work = move |app: &App, request: ChatRequest| {
        validate(&request, &app.model, &app.limits)?;
        let usage = request.stream_options.as_ref().is_some_and(|o| o.include_usage == Some(true));
        let streamed = (request.stream == Some(true)).then_some(usage);
        let prepared = convert(&app.model, &app.limits, &request, caller)?;
        Ok((prepared, streamed, request.wants_logprobs(), request.prompt_logprobs))
    };
    let (prepared, streamed, logprobs, prompt) = read_json(&app, request, work).await?;
    let count: usize = prepared.setup.choices.iter().map(|n| *n as usize).sum();
    let asked = prepared.setup.token_ids.then(|| prepared.requests[0].prompt.clone());
    let run = begin(&app, prepared, streamed.is_some()).await?;
    if let Some(usage) = streamed {
        let events = ChatEvents::new(&app, count, usage, logprobs, asked);
        return sse::respond(run, events, &app.limits).await;
    }
    whole(&app, run, count, logprobs, prompt, asked).await
}

/// Submits a converted conversation, of this API or another.
pub(crate) async fn begin(app: &App, prepared: Prepared, streamed: bool) -> Result<Run, ApiError> {
    let Prepared { requests, setup, grammar } = prepared;
    let consumer = if streamed { Consumer::Client } else { Consumer::Server };
    let call = app.submit(requests, grammar, consumer).await?;
    Ok(Run::new(call, &*app.model.text, setup))
}

async fn whole(
    app: &App,
    mut run: Run,
    count: usize,
    logprobs: bool,
    prompt: Option<u32>,
    asked: Option<Arc<[Token]>>,
) -> Result<Response, ApiError> {
    let empty = || ChatChoice {
        index: 0,
        message: AnswerMessage {
            role: "assistant".into(),
            content: None,
            reasoning_content: None,
            refusal: None,
            tool_calls: None,
        },
        logprobs: logprobs.then(|| ChatLogprobs { content: Vec::new() }),
        finish_reason: None,
        token_ids: asked.is_some().then(Vec::new),
    };
    let mut choices: Vec<ChatChoice> = (0..count).map(|_| empty()).collect();
    let text = &*app.model.text;
    let mut size = ResponseSize::new(app);
    let mut scores = None;
    while !run.is_over() {
        run.next(&mut |piece| match piece {
            Piece::Prompt { position: 0, logprobs, .. } => {
                size.add(0, &logprobs);
                scores = prompt.map(|top| prompt_logprobs(&logprobs, top, text));
            }
            Piece::Prompt { .. } => {}
            Piece::Delta { index, delta, logprobs, token_ids } => {
                size.add(delta.len(), &logprobs);
                choices[index].token_ids.iter_mut().for_each(|all| all.extend(&token_ids));
                push_logprobs(&mut choices[index], logprobs, text);
                append(&mut choices[index].message, delta);
            }
            Piece::End { index, reason, logprobs, token_ids, .. } => {
                choices[index].token_ids.iter_mut().for_each(|all| all.extend(&token_ids));
                push_logprobs(&mut choices[index], logprobs, text);
                choices[index].finish_reason = Some(reason.into());
            }
        })
        .await?;
        size.check()?;
    }
    for (choice, index) in choices.iter_mut().zip(0..) {
        choice.index = index;
        if choice.message.tool_calls.is_none() {
            choice.message.content.get_or_insert_default();
        }
    }
    let response = ChatResponse {
        id: new_id("chatcmpl"),
        object: "chat.completion".into(),
        created: unix_time(),
        model: app.model.name.clone(),
        choices,
        usage: run.usage.into(),
        prompt_logprobs: scores,
        prompt_token_ids: asked.map(|prompt| prompt.to_vec()),
    };
    write_json(app, size.bytes(), response).await
}

fn append(message: &mut AnswerMessage, delta: Delta) {
    match delta {
        Delta::Text(text) => message.content.get_or_insert_default().push_str(&text),
        Delta::Reasoning(text) => {
            message.reasoning_content.get_or_insert_default().push_str(&text);
        }
        Delta::ToolStart { name } => {
            message.tool_calls.get_or_insert_default().push(ToolCall {
                id: new_id("call"),
                kind: "function".into(),
                function: FunctionCall { name, arguments: String::new() },
            });
        }
        Delta::ToolArguments(text) => {
            if let Some(call) = message.tool_calls.get_or_insert_default().last_mut() {
                call.function.arguments.push_str(&text);
            }
        }
        Delta::ToolEnd => {}
    }
}

fn push_logprobs(choice: &mut ChatChoice, list: Vec<TokenLogprob>, text: &dyn TextModel) {
    if let Some(logprobs) = &mut choice.logprobs {
        logprobs.content.extend(list.iter().map(|l| chat_logprob(l, text)));
    }
}

/// A log-probability in the format of the chat API.
pub(crate) fn chat_logprob(entry: &TokenLogprob, text: &dyn TextModel) -> ChatLogprob {
    let (token, bytes) = shown(entry.token, text);
    let top = |(token, logprob): &(Token, f32)| {
        let (token, bytes) = shown(*token, text);
        TopLogprob { token, logprob: finite(*logprob), bytes }
    };
    ChatLogprob {
        token,
        logprob: finite(entry.logprob),
        bytes,
        top_logprobs: entry.top.iter().map(top).collect(),
    }
}

fn shown(token: Token, text: &dyn TextModel) -> (String, Vec<u32>) {
    let bytes = text.token_bytes(token).unwrap_or_default();
    (String::from_utf8_lossy(&bytes).into_owned(), bytes.into_iter().map(u32::from).collect())
}

/// JSON has no infinities; OpenAI reports -9999 for an impossible token.
pub(crate) fn finite(logprob: f32) -> f32 {
    if logprob.is_finite() { logprob } else { -9999.0 }
}
