//! From a completion request to what the engine is asked.

use super::types::{CompletionRequest, Prompt};
use crate::answer::{ChoiceSetup, RunSetup};
use crate::app::App;
use crate::error::ApiError;
use crate::openai::chat::convert::spread;
use crate::text::TextError;
use engine::request::{Request, RequestId, Token};
use std::sync::Arc;

/// Where OpenAI stops when a request does not say.
const DEFAULT_TOKENS: u32 = 16;

/// A request ready to be submitted.
pub struct Prepared {
    /// For the engine.
    pub requests: Vec<Request>,
    /// For the way back.
    pub setup: RunSetup,
    /// Per choice, the prompt it continues.
    pub prompts: Vec<Arc<[Token]>>,
}

/// Tokenizes and translates a validated request.
pub async fn convert(app: &App, request: &CompletionRequest) -> Result<Prepared, ApiError> {
    let model = &app.model;
    let shared = request.shared();
    let stops = shared.stops();
    let (mut requests, mut prompts, mut per_prompt) = (Vec::new(), Vec::new(), 1);
    for prompt in tokenize(app, "prompt", request.prompt.clone()).await? {
        let room = model.room("prompt", prompt.len())?;
        let mut sampling = shared.convert(model);
        sampling.max_tokens = request.max_tokens.unwrap_or(DEFAULT_TOKENS).min(room);
        sampling.logprobs = request.logprobs;
        let echo = request.echo == Some(true);
        let base = Request {
            choices: request.n.unwrap_or(1),
            priority: shared.priority.unwrap_or(0) as i32,
            tenant: shared.tenant(),
            prompt_logprobs: request.logprobs.filter(|_| echo),
            ..Request::new(RequestId(0), prompt, sampling)
        };
        prompts.extend((0..base.choices).map(|_| base.prompt.clone()));
        let apart = spread(base, !stops.is_empty());
        per_prompt = apart.len();
        requests.extend(apart);
    }
    let choices = requests.iter().map(|r| r.choices).collect();
    let setup = RunSetup { choices, per_prompt, choice: ChoiceSetup::plain(stops) };
    Ok(Prepared { requests, setup, prompts })
}

/// Token lists of prompts given either way.
pub(crate) async fn tokenize(
    app: &App,
    param: &str,
    prompt: Prompt,
) -> Result<Vec<Vec<Token>>, ApiError> {
    let texts = match prompt {
        Prompt::Text(text) => vec![text],
        Prompt::Texts(texts) => texts,
        Prompt::Tokens(tokens) => return Ok(vec![tokens]),
        Prompt::TokenLists(lists) => return Ok(lists),
    };
    let text = app.model.text.clone();
    let size = texts.iter().map(String::len).sum();
    let work = move || -> Result<Vec<_>, TextError> {
        texts.iter().map(|t| text.encode(t, true)).collect()
    };
    app.compute(size, work).await?.map_err(|e| ApiError::invalid(param, e.to_string()))
}
