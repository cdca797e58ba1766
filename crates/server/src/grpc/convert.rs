//! From vLLM's `GenerateRequest` to a completion.

use crate::app::Model;
use crate::error::ApiError;
use crate::openai::completions::types::{CompletionRequest, Prompt};
use crate::openai::new_id;
use serde_json::{Map, Value, json};
use vllm_proto::candidate_tokens::Select;
use vllm_proto::decoding_parameters::StructuredOutput;
use vllm_proto::generate_request::Prompt as Given;
use vllm_proto::{CandidateTokens, DecodingParameters, GenerateRequest, StoppingCriteria};

/// Tokens of an answer if the request does not say.
const DEFAULT_TOKENS: u32 = 20;

/// What is returned, apart from the answer itself.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wanted {
    /// The text.
    pub(super) text: bool,
    /// The ids of its tokens.
    pub(super) ids: bool,
    /// Their log-probabilities.
    pub(super) logprobs: bool,
    /// Alternatives of each.
    pub(super) candidates: u32,
    /// The stop string that ended it, at its end.
    pub(super) stop_string: bool,
    /// The ids of the prompt's tokens.
    pub(super) prompt_ids: bool,
    /// Log-probabilities of the prompt's tokens, with this many alternatives.
    pub(super) prompt_logprobs: Option<u32>,
}

/// The completion that a request asks for. Fields that would change the answer and are not supported are refused;
/// hints for caches and the state of reasoning parsers, which this server has not, have no effect.
pub(super) fn convert(
    request: GenerateRequest,
    model: &Model,
    model_id: &str,
) -> Result<(CompletionRequest, Wanted), ApiError> {
    refuse_unsupported(&request)?;
    let response = request.response.clone().unwrap_or_default();
    let stopping = request.stopping.unwrap_or_default();
    let candidates = top("output_candidates", response.output_candidates.as_ref())?;
    let prompt_candidates = top("prompt_candidates", response.prompt_candidates.as_ref())?;
    let wanted = Wanted {
        text: response.output_text.unwrap_or(true),
        ids: response.output_token_ids,
        logprobs: response.output_logprobs || candidates.is_some(),
        candidates: candidates.unwrap_or(0),
        stop_string: stopping.include_stop_strings,
        prompt_ids: response.prompt_token_ids,
        prompt_logprobs: prompt_candidates.or(response.prompt_logprobs.then_some(0)),
    };
    let mut body = Map::new();
    body.insert("prompt".into(), "".into());
    // The folder of the tokenizer is a name of the model too.
    if !request.model.is_empty() && request.model != model_id {
        body.insert("model".into(), request.model.into());
    }
    put(&mut body, "temperature", finite("temperature", request.temperature)?);
    if let Some(sampling) = request.sampling {
        put(&mut body, "n", Some(sampling.num_sequences).filter(|n| *n > 0));
        put(&mut body, "top_k", sampling.top_k);
        put(&mut body, "top_p", finite("top_p", sampling.top_p)?);
        put(&mut body, "min_p", finite("min_p", sampling.min_p)?);
        put(&mut body, "seed", sampling.seed);
    }
    decoding(&mut body, request.decoding.unwrap_or_default())?;
    stops(&mut body, stopping);
    // The rank of a greedy choice is known only beside an alternative.
    put(&mut body, "logprobs", wanted.logprobs.then_some(wanted.candidates.max(1)));
    put(&mut body, "prompt_logprobs", wanted.prompt_logprobs.map(|top| top.max(1)));
    let kv = request.kv.unwrap_or_default();
    let salt = match kv.bypass_prefix_cache {
        // Nothing was cached under a new name.
        true => Some(new_id("once")),
        false => Some(kv.cache_salt).filter(|salt| !salt.is_empty()),
    };
    put(&mut body, "cache_salt", salt);
    let keep = request.truncate_prompt_tokens;
    put(&mut body, "truncate_prompt_tokens", (keep > 0).then_some(keep));
    // vLLM runs smaller numbers first.
    put(&mut body, "priority", Some(-i64::from(request.priority)));
    let mut completion: CompletionRequest = serde_json::from_value(body.into())
        .map_err(|error| ApiError::invalid("", error.to_string()))?;
    completion.prompt = match request.prompt {
        Some(Given::Text(text)) => Prompt::Text(text),
        Some(Given::TokenIds(tokens)) => Prompt::Tokens(tokens.ids),
        None => return Err(ApiError::invalid("prompt", "the prompt is missing")),
    };
    if !model.generates {
        return Err(ApiError::no_generation());
    }
    Ok((completion, wanted))
}

fn put(body: &mut Map<String, Value>, name: &str, value: Option<impl Into<Value>>) {
    if let Some(value) = value {
        body.insert(name.into(), value.into());
    }
}

/// JSON has no other numbers: they would be left out in silence.
fn finite(name: &str, value: Option<f32>) -> Result<Option<f32>, ApiError> {
    match value {
        Some(value) if !value.is_finite() => {
            Err(ApiError::invalid(name, format!("{name} must be a number, not {value}")))
        }
        value => Ok(value),
    }
}

fn decoding(body: &mut Map<String, Value>, decoding: DecodingParameters) -> Result<(), ApiError> {
    for (name, value) in [
        ("presence_penalty", decoding.presence_penalty),
        ("frequency_penalty", decoding.frequency_penalty),
        ("repetition_penalty", decoding.repetition_penalty),
    ] {
        put(body, name, finite(name, Some(value).filter(|value| *value != 0.0))?);
    }
    for bias in decoding.logit_bias.values() {
        finite("logit_bias", Some(*bias))?;
    }
    let biases = decoding.logit_bias.into_iter();
    let biases: Map<_, _> = biases.map(|(token, bias)| (token.to_string(), bias.into())).collect();
    put(body, "logit_bias", (!biases.is_empty()).then_some(biases));
    let restriction = match decoding.structured_output {
        Some(StructuredOutput::Json(schema)) => json!({"json": schema}),
        Some(StructuredOutput::Regex(regex)) => json!({"regex": regex}),
        Some(StructuredOutput::Choice(choices)) => json!({"choice": choices.choices}),
        Some(StructuredOutput::Grammar(grammar)) => json!({"grammar": grammar}),
        Some(StructuredOutput::JsonObject(any)) => json!({"json_object": any}),
        Some(StructuredOutput::StructuralTag(tag)) => json!({"structural_tag": tag}),
        None => return Ok(()),
    };
    body.insert("structured_outputs".into(), restriction);
    Ok(())
}

fn stops(body: &mut Map<String, Value>, stopping: StoppingCriteria) {
    let most = Some(stopping.max_new_tokens).filter(|most| *most > 0);
    put(body, "max_tokens", Some(most.unwrap_or(DEFAULT_TOKENS)));
    put(body, "min_tokens", Some(stopping.min_new_tokens));
    put(body, "stop_token_ids", Some(stopping.stop_token_ids));
    put(body, "stop", Some(stopping.stop_strings));
    put(body, "ignore_eos", Some(stopping.ignore_eos));
}

/// How many of the likeliest tokens are asked for.
fn top(name: &str, asked: Option<&CandidateTokens>) -> Result<Option<u32>, ApiError> {
    match asked.and_then(|asked| asked.select.as_ref()) {
        None => Ok(None),
        Some(Select::TopN(top)) => Ok(Some(*top)),
        Some(Select::TokenIds(_) | Select::All(_)) => {
            Err(ApiError::invalid(name, format!("{name}: only top_n is supported")))
        }
    }
}

fn refuse_unsupported(request: &GenerateRequest) -> Result<(), ApiError> {
    let decoding = request.decoding.as_ref();
    let budget = request.stopping.as_ref().and_then(|stopping| stopping.thinking_token_budget);
    let kv = request.kv.as_ref();
    let refused = [
        ("media", !request.media.is_empty()),
        ("lora_name", !request.lora_name.is_empty()),
        ("decoding.allowed_token_ids", decoding.is_some_and(|d| !d.allowed_token_ids.is_empty())),
        (
            "decoding.bad_words_token_ids",
            decoding.is_some_and(|d| !d.bad_words_token_ids.is_empty()),
        ),
        ("stopping.thinking_token_budget", budget.is_some_and(|budget| budget >= 0)),
        ("kv.kv_transfer_params", kv.is_some_and(|kv| kv.kv_transfer_params.is_some())),
        ("kv.ec_transfer_params", kv.is_some_and(|kv| kv.ec_transfer_params.is_some())),
    ];
    match refused.iter().find(|(_, set)| *set) {
        Some((name, _)) => Err(ApiError::invalid(*name, format!("{name} is not supported"))),
        None => Ok(()),
    }
}
