//! Converts a chat request to engine requests and to the setup of the answer's splitters.

use super::generic_tools;
use super::schema::{call_list, parameters};
use super::types::{ChatRequest, Content, Message, Part, Tool, ToolChoice};
use crate::answer::{
    CallList, ChoiceSetup, FINAL, HarmonySplit, Reasoning, RunSetup, ToolFormat, ToolSplit,
};
use crate::app::Model;
use crate::config::Limits;
use crate::error::ApiError;
use crate::http::auth::Caller;
use crate::openai::structured::Sourced;
use engine::request::{Request, RequestId, Thinking};
use grammar::Grammar;
use serde_json::{Map, Value, json};
use text::{Chat, Rendered};

/// A converted request, ready to be submitted.
pub(crate) struct Prepared {
    /// The engine requests.
    pub requests: Vec<Request>,
    /// How the replies become choices.
    pub setup: RunSetup,
    /// The grammar of the answers, not yet compiled, with the request field it came from.
    pub grammar: Option<Sourced>,
}

/// Renders, tokenizes and converts a validated request.
pub(crate) fn convert(
    model: &Model,
    limits: &Limits,
    request: &ChatRequest,
    caller: Caller,
) -> Result<Prepared, ApiError> {
    let force = force(request);
    let shared = request.shared();
    let grammar = grammar(request, force.as_ref(), limits)?;
    let constrained = grammar.is_some();
    let Rendered { text, tokens: prompt } = render(model, limits, request, constrained)?;
    let room = model.room("messages", prompt.len())?;
    if let Some(top) = request.prompt_logprobs {
        check_prompt_logprobs("prompt_logprobs", prompt.len(), top, limits)?;
    }
    let mut sampling = shared.convert(model);
    let most = request.max_completion_tokens.or(request.max_tokens).unwrap_or(u32::MAX);
    sampling.max_tokens = most.min(room);
    sampling.logprobs = request.wants_logprobs().then_some(request.top_logprobs.unwrap_or(0));
    let reasoning = reasoning(model, request, &text, constrained);
    if (constrained || request.thinking_token_budget.is_some())
        && let Some((tags, opened)) = &reasoning
    {
        sampling.thinking = Some(thinking(model, tags, *opened, request.thinking_token_budget)?);
    }
    let choice = ChoiceSetup {
        stops: shared.stops(),
        messages: messages(model, request, &text),
        reasoning,
        single_call: force.is_none() && request.parallel_tool_calls == Some(false),
        tools: tool_split(request, model, force),
    };
    let base = Request {
        choices: request.n.unwrap_or(1),
        priority: shared.priority.unwrap_or(0) as i32,
        tenant: caller.tenant(shared.cache_salt),
        adapter: model.adapter(request.model.as_deref()),
        prompt_logprobs: request.prompt_logprobs,
        ..Request::new(RequestId(0), prompt, sampling)
    };
    let mut requests = spread(base, !choice.stops.is_empty() || choice.single_call, model);
    // The log-probabilities of a prompt are computed once for all its choices.
    requests.iter_mut().skip(1).for_each(|request| request.prompt_logprobs = None);
    let choices = requests.iter().map(|r| r.choices).collect();
    let per_prompt = requests.len();
    let token_ids = request.return_token_ids == Some(true);
    let setup = RunSetup { choices, per_prompt, choice, token_ids };
    Ok(Prepared { requests, setup, grammar })
}

/// The tags around the reasoning of the answer, if it may have any, and whether the prompt ends with
/// the opening one. An answer with a grammar has reasoning if it was asked for, or if the template
/// opens it anyway.
fn reasoning(
    model: &Model,
    request: &ChatRequest,
    prompt: &str,
    constrained: bool,
) -> Option<(Reasoning, bool)> {
    let tags = model.reasoning.clone()?;
    let opened = tags.opened_by(prompt);
    (!constrained || opened || asks_to_think(request)).then_some((tags, opened))
}

/// What separates the messages of the answer, for models that write several.
fn messages(model: &Model, request: &ChatRequest, prompt: &str) -> Option<HarmonySplit> {
    let ToolFormat::Harmony(marks) = model.tools else { return None };
    Some(HarmonySplit::new(marks, prompt, offered(request).is_some()))
}

/// Whether the request itself asks for reasoning.
fn asks_to_think(request: &ChatRequest) -> bool {
    let named = |kwargs: &Map<String, Value>| kwargs.get("enable_thinking").map(|on| *on == true);
    let enabled = request.chat_template_kwargs.as_ref().and_then(named);
    let none = request.reasoning_effort.as_deref() == Some("none");
    let budget = request.thinking_token_budget.is_some_and(|budget| budget > 0);
    enabled.unwrap_or(budget && !none)
}

/// The reasoning as the engine sees it.
fn thinking(
    model: &Model,
    tags: &Reasoning,
    opened: bool,
    budget: Option<u32>,
) -> Result<Thinking, ApiError> {
    let encode = |tag: &str| {
        let tokens = model.text.encode(tag, false, tag.len());
        tokens.map(Into::into).map_err(|e| ApiError::text(e, "thinking_token_budget"))
    };
    let open = if opened { [].into() } else { encode(&tags.open)? };
    Ok(Thinking { open, close: encode(&tags.close)?, budget: budget.unwrap_or(u32::MAX) })
}

/// Renders and tokenizes the conversation. `constrained`: a grammar applies to the answer.
fn render(
    model: &Model,
    limits: &Limits,
    request: &ChatRequest,
    constrained: bool,
) -> Result<Rendered, ApiError> {
    let truncation = request.shared().truncation;
    // A cheap lower bound: the template only adds text.
    let said = request.messages.iter().filter_map(|message| message.content.as_ref());
    let most = truncation.most_prompt(model, limits);
    let rendered = model
        .text
        .check_bytes(said.map(Content::len).sum(), most)
        .and_then(|()| model.text.render(&chat(request, model, constrained), most));
    let mut rendered = rendered.map_err(|e| ApiError::text(e, "messages"))?;
    let opens = request.add_generation_prompt.unwrap_or(true)
        && request.continue_final_message != Some(true);
    if matches!(model.tools, ToolFormat::Harmony(_))
        && constrained
        && opens
        && !asks_to_think(request)
    {
        // The grammar begins with the answer, so the header of its message belongs to the prompt.
        let header = model.text.encode(FINAL, false, FINAL.len());
        rendered.tokens.extend(header.map_err(|e| ApiError::text(e, "messages"))?);
        rendered.text.push_str(FINAL);
    }
    truncation.apply(model, &mut rendered.tokens);
    Ok(rendered)
}

/// The number of tokens of the prompt of a validated request.
pub(crate) fn tokens(
    model: &Model,
    limits: &Limits,
    request: &ChatRequest,
) -> Result<usize, ApiError> {
    let constrained = grammar(request, force(request).as_ref(), limits)?.is_some();
    Ok(render(model, limits, request, constrained)?.tokens.len())
}

/// The most choices of one engine request. A request with more would wait until that many seats are
/// free, and delay all requests behind it.
const TOGETHER: u32 = 4;

/// Splits a request into one per choice if the server may stop its choices separately, because the
/// engine cancels only whole requests, or if there are many choices.
pub(crate) fn spread(base: Request, apart: bool, model: &Model) -> Vec<Request> {
    if base.choices == 1 || (!apart && base.choices <= TOGETHER.min(model.at_once)) {
        return vec![base];
    }
    let one = |i: u32| {
        let mut request = base.clone();
        request.choices = 1;
        request.sampling.seed = base.sampling.seed.wrapping_add(u64::from(i));
        request
    };
    (0..base.choices).map(one).collect()
}

/// The tool calls that a grammar enforces.
enum Force<'a> {
    /// The answer is the arguments of this function.
    Named(&'a Tool),
    /// The answer is a list of calls.
    Any(&'a [Tool]),
}

fn force(request: &ChatRequest) -> Option<Force<'_>> {
    let tools = request.tools.as_deref()?;
    match request.tool_choice.as_ref()? {
        ToolChoice::Word(word) if word == "required" => Some(Force::Any(tools)),
        ToolChoice::Word(_) => None,
        ToolChoice::Named(named) => {
            tools.iter().find(|t| t.function.name == named.function.name).map(Force::Named)
        }
    }
}

fn grammar(
    request: &ChatRequest,
    force: Option<&Force<'_>>,
    limits: &Limits,
) -> Result<Option<Sourced>, ApiError> {
    let structured = request.structured().grammar(limits)?;
    let schema = match force {
        None => return Ok(structured),
        Some(Force::Named(tool)) => parameters(tool),
        Some(Force::Any(tools)) => call_list(tools, request.parallel_tool_calls == Some(false)),
    };
    Ok(Some(("tools", Grammar::JsonSchema(schema.to_string()))))
}

/// Bounds the log-probabilities of a prompt, as those of answers are bounded.
pub(crate) fn check_prompt_logprobs(
    param: &str,
    tokens: usize,
    top: u32,
    limits: &Limits,
) -> Result<(), ApiError> {
    let found = (tokens as u64).saturating_mul(u64::from(top) + 1);
    let most = limits.echo_logprobs;
    if found > most {
        let text = format!(
            "{param} would return {found} log-probabilities of prompts; at most {most} are allowed"
        );
        return Err(ApiError::invalid(param, text));
    }
    Ok(())
}

fn offered(request: &ChatRequest) -> Option<&[Tool]> {
    let none = matches!(&request.tool_choice, Some(ToolChoice::Word(word)) if word == "none");
    request.tools.as_deref().filter(|tools| !tools.is_empty() && !none)
}

fn tool_split(request: &ChatRequest, model: &Model, force: Option<Force<'_>>) -> ToolSplit {
    match force {
        Some(Force::Named(tool)) => {
            ToolSplit::Named { name: tool.function.name.clone(), started: false }
        }
        Some(Force::Any(_)) => ToolSplit::List(CallList::default()),
        None => match offered(request) {
            Some(tools) => {
                let names = tools.iter().map(|t| t.function.name.clone()).collect();
                ToolSplit::new(model.tools, names)
            }
            None => ToolSplit::Off,
        },
    }
}

fn chat(request: &ChatRequest, model: &Model, constrained: bool) -> Chat {
    let mut extra = request.chat_template_kwargs.clone().unwrap_or_default();
    if let Some(effort) = &request.reasoning_effort {
        extra.entry("reasoning_effort").or_insert_with(|| effort.clone().into());
        if effort == "none" {
            extra.entry("enable_thinking").or_insert(Value::Bool(false));
        }
    }
    if constrained && model.reasoning.is_some() && !asks_to_think(request) {
        extra.entry("enable_thinking").or_insert(Value::Bool(false));
    }
    let (messages, tools) = template_input(model, &request.messages, offered(request));
    Chat {
        messages,
        tools,
        generation_prompt: request.add_generation_prompt.unwrap_or(true),
        continue_final: request.continue_final_message == Some(true),
        extra,
    }
}

/// The messages and tools for the model's template. If it shows no tools, they are in the messages.
pub(crate) fn template_input(
    model: &Model,
    messages: &[Message],
    tools: Option<&[Tool]>,
) -> (Value, Value) {
    let messages: Vec<Value> = messages.iter().map(template_message).collect();
    match model.tools {
        ToolFormat::Generic { system } => {
            (generic_tools::messages(messages, tools, system).into(), Value::Null)
        }
        ToolFormat::Harmony(_) => {
            let messages = messages.into_iter().map(with_thinking).collect::<Vec<_>>();
            (messages.into(), tools.map_or(Value::Null, described))
        }
        ToolFormat::Hermes | ToolFormat::Llama => {
            (messages.into(), tools.map_or(Value::Null, |tools| json!(tools)))
        }
    }
}

/// The reasoning of a message under the name that templates with channels have for it. Beside a call they take either
/// reasoning or text.
fn with_thinking(mut message: Value) -> Value {
    let Some(fields) = message.as_object_mut() else { return message };
    let said = fields.get("content").and_then(Value::as_str).is_some_and(|text| !text.is_empty());
    if let Some(thought) = fields.remove("reasoning_content")
        && !(said && fields.contains_key("tool_calls"))
    {
        fields.insert("thinking".into(), thought);
    }
    message
}

/// The tools for a template that wants a description of each.
fn described(tools: &[Tool]) -> Value {
    let mut tools = json!(tools);
    for tool in tools.as_array_mut().into_iter().flatten() {
        if let Some(function) = tool["function"].as_object_mut() {
            let text = function.entry("description").or_insert(Value::Null);
            if text.is_null() {
                *text = "".into();
            }
        }
    }
    tools
}

/// A message in the form that templates expect: text content, arguments as objects.
fn template_message(message: &Message) -> Value {
    let mut out = Map::new();
    let role = if message.role == "developer" { "system" } else { message.role.as_str() };
    out.insert("role".into(), role.into());
    let content = match &message.content {
        None => String::new(),
        Some(Content::Text(text)) => text.clone(),
        Some(Content::Parts(parts)) => parts.iter().map(Part::text).collect(),
    };
    out.insert("content".into(), content.into());
    if let Some(name) = &message.name {
        out.insert("name".into(), name.clone().into());
    }
    if let Some(thought) = &message.reasoning_content {
        out.insert("reasoning_content".into(), thought.clone().into());
    }
    if let Some(id) = &message.tool_call_id {
        out.insert("tool_call_id".into(), id.clone().into());
    }
    if let Some(calls) = &message.tool_calls {
        let call = |call: &super::types::ToolCall| {
            let text = &call.function.arguments;
            let arguments = serde_json::from_str::<Map<String, Value>>(text)
                .map_or_else(|_| text.clone().into(), Value::Object);
            json!({
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": arguments},
            })
        };
        out.insert("tool_calls".into(), calls.iter().map(call).collect());
    }
    Value::Object(out)
}
