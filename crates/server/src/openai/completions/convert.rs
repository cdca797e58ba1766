//! Converts a completion request to engine requests.

use super::types::{CompletionRequest, Prompt};
use crate::answer::{ChoiceSetup, RunSetup};
use crate::app::Model;
use crate::config::Limits;
use crate::error::ApiError;
use crate::http::auth::Caller;
use crate::openai::chat::convert::{check_prompt_logprobs, spread};
use crate::openai::structured::Sourced;
use engine::request::{Request, RequestId, Token};
use std::sync::Arc;

/// OpenAI's default for `max_tokens`.
const DEFAULT_TOKENS: u32 = 16;

/// A converted request, ready to be submitted.
pub(crate) struct Prepared {
    /// The engine requests.
    pub requests: Vec<Request>,
    /// How the replies become choices.
    pub setup: RunSetup,
    /// The prompt of each choice.
    pub prompts: Vec<Arc<[Token]>>,
    /// The grammar of the answers, not yet compiled.
    pub grammar: Option<Sourced>,
}

/// Tokenizes and converts a validated request.
pub(crate) fn convert(
    model: &Model,
    limits: &Limits,
    request: CompletionRequest,
    caller: Caller,
) -> Result<Prepared, ApiError> {
    let shared = request.shared();
    let stops = shared.stops();
    let echo = request.echo == Some(true);
    let (mut requests, mut prompts, mut per_prompt) = (Vec::new(), Vec::new(), 1);
    let most = shared.truncation.most_prompt(model, limits);
    for mut prompt in tokenize(model, "prompt", request.prompt.clone(), most)? {
        shared.truncation.apply(model, &mut prompt);
        let room = model.room("prompt", prompt.len())?;
        let mut sampling = shared.convert(model);
        sampling.max_tokens = request.max_tokens.unwrap_or(DEFAULT_TOKENS).min(room);
        sampling.logprobs = request.logprobs;
        let base = Request {
            choices: request.n.unwrap_or(1),
            priority: shared.priority.unwrap_or(0) as i32,
            tenant: caller.tenant(shared.cache_salt),
            adapter: model.adapter(request.model.as_deref()),
            prompt_logprobs: request.logprobs.filter(|_| echo).max(request.prompt_logprobs),
            ..Request::new(RequestId(0), prompt, sampling)
        };
        prompts.extend((0..base.choices).map(|_| base.prompt.clone()));
        let mut apart = spread(base, !stops.is_empty(), model);
        // The log-probabilities of a prompt are computed once for all its choices.
        apart.iter_mut().skip(1).for_each(|request| request.prompt_logprobs = None);
        per_prompt = apart.len();
        requests.extend(apart);
    }
    if let Some(top) = request.prompt_logprobs {
        let tokens = prompts.iter().map(|prompt| prompt.len()).sum();
        check_prompt_logprobs("prompt_logprobs", tokens, top, limits)?;
    }
    if echo {
        check_echo(model, limits, &prompts, request.logprobs)?;
    }
    let choices = requests.iter().map(|r| r.choices).collect();
    let token_ids = request.return_token_ids == Some(true);
    let setup = RunSetup { choices, per_prompt, choice: ChoiceSetup::plain(stops), token_ids };
    let grammar = request.structured().grammar(limits)?;
    Ok(Prepared { requests, setup, prompts, grammar })
}

/// Bounds the size of echoed prompts, as answers are bounded.
fn check_echo(
    model: &Model,
    limits: &Limits,
    prompts: &[Arc<[Token]>],
    logprobs: Option<u32>,
) -> Result<(), ApiError> {
    let tokens: u64 = prompts.iter().map(|prompt| prompt.len() as u64).sum();
    let entries = logprobs.map_or(0, |top| tokens.saturating_mul(u64::from(top) + 1));
    let length = |token: &Token| model.text.token_bytes(*token).map_or(0, |b| b.len() as u64);
    let bytes: u64 = prompts.iter().flat_map(|prompt| prompt.iter()).map(length).sum();
    for (found, most, what) in [
        (entries, limits.echo_logprobs, "log-probabilities of prompts"),
        (bytes, limits.echo_bytes, "bytes of prompts"),
    ] {
        if found > most {
            let text = format!("echo would return {found} {what}; at most {most} are allowed");
            return Err(ApiError::invalid("echo", text));
        }
    }
    Ok(())
}

/// Tokenizes prompts that are text; each may have at most `most` tokens.
pub(crate) fn tokenize(
    model: &Model,
    param: &str,
    prompt: Prompt,
    most: usize,
) -> Result<Vec<Vec<Token>>, ApiError> {
    let texts = match prompt {
        Prompt::Text(text) => vec![text],
        Prompt::Texts(texts) => texts,
        Prompt::Tokens(tokens) => return Ok(vec![tokens]),
        Prompt::TokenLists(lists) => return Ok(lists),
    };
    let encode =
        |text: String| model.text.encode(&text, true, most).map_err(|e| ApiError::text(e, param));
    texts.into_iter().map(encode).collect()
}
