//! Requests as JSON: prompts with their parameters.

use super::thread::Ready;
use super::{Model, Problem};
use engine::request::{Embed, Pooling, Request, RequestId, Sampling};
use grammar::Compiled;
use serde::Deserialize;
use serde_json::{Map, Value};
use server::openai::structured::StructuredOutputs;
use std::collections::BTreeMap;
use std::sync::Arc;
use text::Chat;

/// A call: its prompts, and parameters for all of them or for each.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Asking {
    prompts: Vec<Prompt>,
    #[serde(default)]
    params: Vec<Params>,
    /// Vectors instead of answers.
    embed: Option<Vector>,
    #[serde(default)]
    priority: i32,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
    Chat(Conversation),
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Conversation {
    messages: Value,
    #[serde(default)]
    tools: Value,
    add_generation_prompt: bool,
    continue_final_message: bool,
    #[serde(default)]
    chat_template_kwargs: Map<String, Value>,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Vector {
    pooling: Pooling,
    normalize: bool,
    truncate_prompt_tokens: Option<u32>,
}

/// Sampling parameters under vLLM's names. What is missing is the model's suggestion, or greedy.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Params {
    n: Option<u32>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    /// 0 and -1 are all.
    top_k: Option<i64>,
    min_p: Option<f32>,
    repetition_penalty: Option<f32>,
    frequency_penalty: f32,
    presence_penalty: f32,
    logit_bias: BTreeMap<u32, f32>,
    seed: Option<u64>,
    max_tokens: Option<u32>,
    min_tokens: u32,
    stop: Vec<String>,
    stop_token_ids: Vec<u32>,
    include_stop_str_in_output: bool,
    ignore_eos: bool,
    logprobs: Option<u32>,
    prompt_logprobs: Option<u32>,
    truncate_prompt_tokens: Option<u32>,
    structured_outputs: Option<StructuredOutputs>,
}

/// A prompt that was read and tokenized.
pub(super) struct Asked {
    index: usize,
    /// Its text, if it was not given as text.
    pub(super) prompt: Option<String>,
    request: Request,
    stop: Vec<String>,
    include_stop: bool,
}

impl Asked {
    pub(super) fn tokens(&self) -> Arc<[u32]> {
        self.request.prompt.clone()
    }

    /// The request with its id, as one of the call that begins with `first`.
    pub(super) fn ready(mut self, id: u64, first: u64) -> Ready {
        self.request.id = RequestId(id);
        self.request.call = Some(RequestId(first));
        let Asked { index, request, stop, include_stop, .. } = self;
        Ready { index, request, stop, include_stop }
    }
}

/// Reads the requests of a call.
pub(super) fn read(text: &str, model: &Model) -> Result<Vec<Asked>, Problem> {
    let asking: Asking =
        serde_json::from_str(text).map_err(|error| Problem::invalid(error.to_string()))?;
    let Asking { prompts, mut params, embed, priority } = asking;
    if params.is_empty() {
        params.push(Params::default());
    }
    if params.len() > 1 && params.len() != prompts.len() {
        let text = format!("{} sampling parameters for {} prompts", params.len(), prompts.len());
        return Err(Problem::invalid(text));
    }
    let grammars: Vec<Option<Compiled>> =
        params.iter().map(|params| params.grammar(model)).collect::<Result<_, _>>()?;
    let several = prompts.len() > 1;
    let one = |(index, prompt): (usize, Prompt)| {
        let at = if params.len() > 1 { index } else { 0 };
        let asked = params[at].asked(index, prompt, embed, &grammars[at], model);
        let name = |p: Problem| match several {
            true => Problem { text: format!("prompt {index}: {}", p.text), ..p },
            false => p,
        };
        let mut asked = asked.map_err(name)?;
        asked.request.priority = priority;
        Ok(asked)
    };
    prompts.into_iter().enumerate().map(one).collect()
}

impl Params {
    fn grammar(&self, model: &Model) -> Result<Option<Compiled>, Problem> {
        let Some(outputs) = &self.structured_outputs else { return Ok(None) };
        let Some(grammar) = outputs.grammar().map_err(Problem::invalid)? else { return Ok(None) };
        let compiled = model.compiler()?.compile(&grammar);
        compiled.map(Some).map_err(|why| Problem::invalid(format!("invalid grammar: {why}")))
    }

    fn asked(
        &self,
        index: usize,
        prompt: Prompt,
        embed: Option<Vector>,
        grammar: &Option<Compiled>,
        model: &Model,
    ) -> Result<Asked, Problem> {
        let truncate = embed.map_or(self.truncate_prompt_tokens, |e| e.truncate_prompt_tokens);
        let most = match truncate {
            None => model.loaded.context as usize,
            Some(_) => usize::MAX,
        };
        let (prompt, mut tokens) = encode(prompt, model, most)?;
        if let Some(last) = truncate {
            tokens.drain(..tokens.len().saturating_sub(last as usize));
        }
        let sampling = match embed {
            Some(_) => Sampling { max_tokens: 1, ..Sampling::default() },
            None => Sampling { grammar: grammar.clone(), ..self.sampling(index, model)? },
        };
        let request = Request {
            choices: self.n.unwrap_or(1),
            prompt_logprobs: self.prompt_logprobs,
            embed: embed
                .map(|Vector { pooling, normalize, .. }| Embed { pooling, unit: normalize }),
            ..Request::new(RequestId(0), tokens, sampling)
        };
        let (stop, include_stop) = (self.stop.clone(), self.include_stop_str_in_output);
        Ok(Asked { index, prompt, request, stop, include_stop })
    }

    fn sampling(&self, index: usize, model: &Model) -> Result<Sampling, Problem> {
        let suggested = model.loaded.defaults;
        let greedy = Sampling::default();
        let top_k = match self.top_k {
            None => suggested.top_k.unwrap_or(greedy.top_k),
            Some(-1) => 0,
            Some(k) => u32::try_from(k)
                .map_err(|_| Problem::invalid(format!("top_k {k}: must be -1, 0 or more")))?,
        };
        Ok(Sampling {
            temperature: self.temperature.or(suggested.temperature).unwrap_or(greedy.temperature),
            top_k,
            top_p: self.top_p.or(suggested.top_p).unwrap_or(greedy.top_p),
            min_p: self.min_p.or(suggested.min_p).unwrap_or(greedy.min_p),
            repetition_penalty: self
                .repetition_penalty
                .or(suggested.repetition_penalty)
                .unwrap_or(greedy.repetition_penalty),
            frequency_penalty: self.frequency_penalty,
            presence_penalty: self.presence_penalty,
            logit_bias: self.logit_bias.iter().map(|(&token, &bias)| (token, bias)).collect(),
            // The place in the list is part of the seed, so that equal prompts get different answers.
            seed: self.seed.unwrap_or(0).wrapping_add(index as u64),
            logprobs: self.logprobs,
            max_tokens: self.max_tokens.unwrap_or(u32::MAX),
            min_tokens: self.min_tokens,
            stop_tokens: self.stop_token_ids.clone(),
            ignore_eos: self.ignore_eos,
            ..greedy
        })
    }
}

/// The text of a prompt, if it was not given as text, and its tokens: at most `most`.
fn encode(
    prompt: Prompt,
    model: &Model,
    most: usize,
) -> Result<(Option<String>, Vec<u32>), Problem> {
    let invalid = |error: text::TextError| Problem::invalid(error.to_string());
    let text = &model.loaded.text;
    match prompt {
        Prompt::Text(words) => Ok((None, text.encode(&words, true, most).map_err(invalid)?)),
        Prompt::Tokens(tokens) => Ok((None, tokens)),
        Prompt::Chat(conversation) => {
            let chat = Chat {
                messages: conversation.messages,
                tools: conversation.tools,
                generation_prompt: conversation.add_generation_prompt,
                continue_final: conversation.continue_final_message,
                extra: conversation.chat_template_kwargs,
            };
            let rendered = text.render(&chat, most).map_err(invalid)?;
            Ok((Some(rendered.text), rendered.tokens))
        }
    }
}
