//! The OpenAPI document, built from the types that serde reads and writes.

use crate::anthropic::error::AnthropicErrorResponse;
use crate::anthropic::types::{
    CountTokensRequest, CountTokensResponse, MessagesEvent, MessagesRequest, MessagesResponse,
};
use crate::app::{App, Model};
use crate::config::Limits;
use crate::describe::{self, Describe, Schemas};
use crate::error::ErrorResponse;
use crate::fleet::{WorkerInfo, WorkerLoad, WorkerLoads, WorkerModel};
use crate::ollama::error::OllamaError;
use crate::ollama::types::{
    OllamaChatRequest, OllamaChatResponse, OllamaEmbedRequest, OllamaEmbedResponse,
    OllamaGenerateRequest, OllamaGenerateResponse, TagList,
};
use crate::openai::chat::types::{ChatChunk, ChatRequest, ChatResponse};
use crate::openai::completions::types::{CompletionRequest, CompletionResponse};
use crate::openai::embeddings::types::{EmbeddingRequest, EmbeddingResponse};
use crate::openai::models::{ModelCard, ModelList};
use crate::openai::responses::types::{
    DeletedResponse, ResponsesEvent, ResponsesRequest, ResponsesResponse,
};
use crate::openai::score::types::{
    ClassifyRequest, ClassifyResponse, RerankRequest, RerankResponse, ScoreRequest, ScoreResponse,
};
use crate::openai::tokenize::types::{
    DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizeResponse, TokenizerInfo,
};
use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// `/openapi.json`.
pub(crate) async fn serve(State(app): State<Arc<App>>) -> Response {
    // Built once: it never changes, and building it is slow.
    let text = app.document.get_or_init(|| document(&app.model, &app.limits).to_string().into());
    ([(header::CONTENT_TYPE, "application/json")], text.clone()).into_response()
}

struct Route {
    path: &'static str,
    method: &'static str,
    about: &'static str,
    request: Option<fn(&mut Schemas) -> Value>,
    response: fn(&mut Schemas) -> Value,
    /// The schema of an event, if the response may be a stream.
    events: Option<fn(&mut Schemas) -> Value>,
    /// The schema of an error.
    error: fn(&mut Schemas) -> Value,
}

fn post(
    path: &'static str,
    about: &'static str,
    request: fn(&mut Schemas) -> Value,
    response: fn(&mut Schemas) -> Value,
) -> Route {
    Route {
        path,
        method: "post",
        about,
        request: Some(request),
        response,
        events: None,
        error: ErrorResponse::describe,
    }
}

fn get(path: &'static str, about: &'static str, response: fn(&mut Schemas) -> Value) -> Route {
    Route {
        path,
        method: "get",
        about,
        request: None,
        response,
        events: None,
        error: ErrorResponse::describe,
    }
}

fn status(_: &mut Schemas) -> Value {
    json!({"type": "object", "properties": {"status": {"type": "string"}}, "required": ["status"]})
}

fn routes() -> Vec<Route> {
    let chat = post(
        "/v1/chat/completions",
        "Continue a conversation",
        ChatRequest::describe,
        ChatResponse::describe,
    );
    let completions = post(
        "/v1/completions",
        "Continue a text",
        CompletionRequest::describe,
        CompletionResponse::describe,
    );
    let mut routes = others();
    routes.extend([
        Route { events: Some(ChatChunk::describe), ..chat },
        Route { events: Some(CompletionResponse::describe), ..completions },
        post(
            "/v1/embeddings",
            "Embed texts",
            EmbeddingRequest::describe,
            EmbeddingResponse::describe,
        ),
        post(
            "/v1/rerank",
            "Order documents by how well they answer a query",
            RerankRequest::describe,
            RerankResponse::describe,
        ),
        post("/v1/score", "Score pairs of texts", ScoreRequest::describe, ScoreResponse::describe),
        post(
            "/v1/classify",
            "Classify texts",
            ClassifyRequest::describe,
            ClassifyResponse::describe,
        ),
        get("/v1/models", "List the served model", ModelList::describe),
        get("/v1/models/{name}", "Describe the model with this name", ModelCard::describe),
        post(
            "/tokenize",
            "Convert text or a conversation to tokens",
            TokenizeRequest::describe,
            TokenizeResponse::describe,
        ),
        post(
            "/detokenize",
            "Convert tokens to text",
            DetokenizeRequest::describe,
            DetokenizeResponse::describe,
        ),
        get("/health/live", "Check that the process responds", status),
        get("/tokenizer_info", "Describe the tokenizer", TokenizerInfo::describe),
        get("/get_server_info", "Describe this worker to a router", WorkerInfo::describe),
        get("/get_model_info", "Describe the model to a router", WorkerModel::describe),
        get("/v1/loads", "Say how busy this worker is", WorkerLoads::describe),
        get(
            "/get_load",
            "Say how busy this worker is, in an older form",
            <Vec<WorkerLoad>>::describe,
        ),
        get("/health/ready", "Check that new requests are accepted", status),
    ]);
    routes
}

/// The routes of responses, and those of Anthropic's and Ollama's APIs.
fn others() -> Vec<Route> {
    let responses = post(
        "/v1/responses",
        "Continue a conversation whose responses are kept",
        ResponsesRequest::describe,
        ResponsesResponse::describe,
    );
    let one = get("/v1/responses/{id}", "Return a kept response", ResponsesResponse::describe);
    let deleted = get("/v1/responses/{id}", "Delete a kept response", DeletedResponse::describe);
    let messages = post(
        "/v1/messages",
        "Continue a conversation (Anthropic's API)",
        MessagesRequest::describe,
        MessagesResponse::describe,
    );
    let count = post(
        "/v1/messages/count_tokens",
        "Count the tokens of a conversation (Anthropic's API)",
        CountTokensRequest::describe,
        CountTokensResponse::describe,
    );
    let chat = post(
        "/api/chat",
        "Continue a conversation (Ollama's API)",
        OllamaChatRequest::describe,
        OllamaChatResponse::describe,
    );
    let generate = post(
        "/api/generate",
        "Answer a prompt (Ollama's API)",
        OllamaGenerateRequest::describe,
        OllamaGenerateResponse::describe,
    );
    let embed = post(
        "/api/embed",
        "Embed texts (Ollama's API)",
        OllamaEmbedRequest::describe,
        OllamaEmbedResponse::describe,
    );
    let tags = get("/api/tags", "List the served model (Ollama's API)", TagList::describe);
    let anthropic = |route: Route| Route { error: AnthropicErrorResponse::describe, ..route };
    let ollama = |route: Route| Route { error: OllamaError::describe, ..route };
    vec![
        Route { events: Some(ResponsesEvent::describe), ..responses },
        one,
        Route { method: "delete", ..deleted },
        anthropic(Route { events: Some(MessagesEvent::describe), ..messages }),
        anthropic(count),
        ollama(Route { events: Some(OllamaChatResponse::describe), ..chat }),
        ollama(Route { events: Some(OllamaGenerateResponse::describe), ..generate }),
        ollama(embed),
        ollama(tags),
    ]
}

const ERRORS: [(&str, &str); 12] = [
    ("400", "A field is missing or invalid"),
    ("401", "The API key is missing or wrong"),
    ("404", "No such model or route"),
    ("405", "The route has other methods"),
    ("408", "The body did not arrive in time"),
    ("413", "The body is too large"),
    ("415", "The body is not JSON"),
    ("421", "The name in the Host header is not accepted"),
    ("429", "A limit is reached; retry after Retry-After"),
    ("500", "Internal error, or the engine failed on this request"),
    ("501", "The loaded model does not support this"),
    ("503", "The engine is not running, or the server is shutting down"),
];

fn operation(route: &Route, all: &mut Schemas) -> Value {
    let json_of = |schema: Value| json!({"application/json": {"schema": schema}});
    let mut content = json_of((route.response)(all));
    if let Some(events) = route.events {
        let about = format!(
            "Events `data: {{…}}` of {}",
            events(all)["$ref"].as_str().unwrap_or("the chunk")
        );
        if route.path.starts_with("/api/") {
            content["application/x-ndjson"] = json!({"schema": {"type": "string"}});
        } else {
            let data = json!({"data": {"type": "string", "description": about}});
            let event = json!({"type": "object", "properties": data, "required": ["data"]});
            content["text/event-stream"] = json!({"schema": event});
        }
    }
    let mut responses = Map::new();
    responses.insert("200".into(), json!({"description": "Success", "content": content}));
    for (status, about) in ERRORS {
        let content = json_of((route.error)(all));
        responses.insert(status.into(), json!({"description": about, "content": content}));
    }
    let mut operation = json!({"summary": route.about, "responses": responses});
    if let Some(request) = route.request {
        operation["requestBody"] = json!({"required": true, "content": json_of(request(all))});
    }
    let named = route.path.split_once('{').and_then(|(_, rest)| rest.split_once('}'));
    if let Some((name, _)) = named {
        operation["parameters"] = json!([{
            "name": name, "in": "path", "required": true, "schema": {"type": "string"},
        }]);
    }
    if route.path.starts_with("/health") {
        operation["security"] = json!([]);
    }
    operation
}

/// The OpenAPI document for the served model and the limits in force.
pub fn document(model: &Model, limits: &Limits) -> Value {
    let mut all = Schemas::default();
    let mut paths = Map::new();
    for route in routes() {
        let path = paths.entry(route.path).or_insert_with(|| json!({}));
        path[route.method] = operation(&route, &mut all);
    }
    // At least one of the two fields is required, which a field's own schema cannot express.
    all.0["TokenizeRequest"]["anyOf"] = json!([
        {"properties": {"prompt": {"type": "string"}}, "required": ["prompt"]},
        {"properties": {"messages": {"type": "array"}}, "required": ["messages"]},
    ]);
    let mut document = json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Dacapo",
            "version": env!("CARGO_PKG_VERSION"),
            "description": "An OpenAI-compatible API for a model that runs as device graphs.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {
            "schemas": all.0,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    });
    describe::fill(&mut document, model.text.vocab(), model.embedding, limits);
    document
}
