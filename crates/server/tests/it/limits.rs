//! Every limit is enforced.

use crate::bed::{Bed, config, model};
use mock::MockConfig;
use serde_json::{Value, json};
use server::{Limits, Model};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";
const EMBEDDINGS: &str = "/v1/embeddings";

/// Limits whose tests need more than one request, with the names of those tests.
const ELSEWHERE: [(&str, &str); 20] = [
    ("connections", "abuse: too_many_connections_get_an_error"),
    ("streams", "http2: streams_are_limited_per_connection_and_in_total"),
    ("header_bytes", "abuse: headers_too_large_or_too_many"),
    ("headers", "abuse: headers_too_large_or_too_many"),
    ("header_ms", "abuse: slow_heads_are_dropped_and_delay_no_other_client"),
    ("body_ms", "abuse: bodies_too_large_too_slow_or_not_json"),
    ("body_budget_bytes", "large: bodies_share_one_budget"),
    ("body_wait_ms", "large: bodies_share_one_budget"),
    ("work_waiting", "work: a_full_queue_refuses_and_abandoned_jobs_are_skipped"),
    ("inflight", "abuse: requests_beyond_the_limit_are_refused_at_once"),
    ("answer_budget_bytes", "limits: collected_responses_share_one_budget"),
    ("grammar_ms", "grammars: streams_go_on_while_schemas_are_compiled"),
    ("backlog", "streams: a_client_that_stops_reading_loses_its_stream"),
    ("ping_ms", "streams: a_waiting_stream_is_kept_alive"),
    ("write_ms", "large: a_client_that_never_reads_is_disconnected"),
    ("stall_ms", "faults: a_stalled_step_is_reported"),
    ("responses", "responses: kept_responses_are_limited"),
    ("responses_bytes", "responses: kept_responses_are_limited"),
    ("leave_ms", "routes: a_server_that_leaves_first_fails_its_health_checks"),
    ("drain_ms", "routes: the_drain_deadline_ends_streams_with_an_error"),
];

fn chat(more: Value) -> Value {
    let mut ask = json!({"messages": [{"role": "user", "content": "x"}], "max_tokens": 2});
    ask.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    ask
}

fn complete(more: Value) -> Value {
    let mut ask = json!({"prompt": "x", "max_tokens": 2});
    ask.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    ask
}

fn tool(name: &str) -> Value {
    json!({"type": "function", "function": {"name": name, "parameters": {"type": "object"}}})
}

/// A limit, its value, a route, a request just within it, one just beyond it, and the error's
/// status.
fn cases() -> Vec<(&'static str, u64, &'static str, Value, Value, u16)> {
    let list = |n: usize| complete(json!({"prompt": vec!["x"; n]}));
    let echo = |n: usize| complete(json!({"prompt": "x".repeat(n), "echo": true, "logprobs": 1}));
    let tools = |names: &[&str]| {
        chat(json!({"tools": names.iter().map(|name| tool(name)).collect::<Vec<_>>()}))
    };
    let kwargs = |value: Value| chat(json!({"chat_template_kwargs": value}));
    let body = |n: usize| complete(json!({"user": "u".repeat(n)}));
    let schema = |n: usize| {
        let schema = json!({"type": "object", "title": "t".repeat(n)});
        let format = json!({"type": "json_schema", "json_schema": {"schema": schema}});
        chat(json!({"response_format": format}))
    };
    let say = |n: usize| json!({"messages": vec![json!({"role": "user", "content": "x"}); n]});
    let stop = |list: Value| complete(json!({"stop": list}));
    vec![
        ("body_bytes", 500, COMPLETIONS, body(300), body(500), 413),
        ("json_values", 20, COMPLETIONS, list(10), list(20), 400),
        ("json_depth", 3, CHAT, chat(json!({"x": [1]})), chat(json!({"x": [[[1]]]})), 400),
        ("batch", 3, COMPLETIONS, list(3), list(4), 400),
        (
            "inputs",
            2,
            EMBEDDINGS,
            json!({"input": ["a", "b"]}),
            json!({"input": ["a", "b", "c"]}),
            400,
        ),
        ("choices", 3, COMPLETIONS, complete(json!({"n": 3})), complete(json!({"n": 4})), 400),
        (
            "sequences",
            6,
            COMPLETIONS,
            complete(json!({"prompt": ["a", "b"], "n": 3})),
            complete(json!({"prompt": ["a", "b"], "n": 4})),
            400,
        ),
        ("messages", 3, CHAT, say(3), say(4), 400),
        ("tools", 2, CHAT, tools(&["f", "g"]), tools(&["f", "g", "h"]), 400),
        ("tools_bytes", 200, CHAT, tools(&["f", "g"]), tools(&["f", "g", "h"]), 400),
        ("tool_name_bytes", 3, CHAT, tools(&["fgh"]), tools(&["fghi"]), 400),
        ("kwargs", 1, CHAT, kwargs(json!({"a": 1})), kwargs(json!({"a": 1, "b": 1})), 400),
        ("kwargs_bytes", 10, CHAT, kwargs(json!({"a": "xx"})), kwargs(json!({"a": "xxxxx"})), 400),
        ("kwargs_depth", 2, CHAT, kwargs(json!({"a": [[1]]})), kwargs(json!({"a": [[[1]]]})), 400),
        ("stops", 2, COMPLETIONS, stop(json!(["a", "b"])), stop(json!(["a", "b", "c"])), 400),
        ("stop_bytes", 3, COMPLETIONS, stop(json!("abc")), stop(json!(["abcd"])), 400),
        (
            "stop_token_ids",
            1,
            COMPLETIONS,
            complete(json!({"stop_token_ids": [1]})),
            complete(json!({"stop_token_ids": [1, 2]})),
            400,
        ),
        (
            "logit_bias",
            1,
            COMPLETIONS,
            complete(json!({"logit_bias": {"1": 1}})),
            complete(json!({"logit_bias": {"1": 1, "2": 1}})),
            400,
        ),
        (
            "top_logprobs",
            2,
            CHAT,
            chat(json!({"top_logprobs": 2})),
            chat(json!({"top_logprobs": 3})),
            400,
        ),
        (
            "salt_chars",
            3,
            COMPLETIONS,
            complete(json!({"cache_salt": "äöü"})),
            complete(json!({"cache_salt": "abcd"})),
            400,
        ),
        ("schema_bytes", 60, CHAT, schema(10), schema(60), 400),
        (
            "tokenize_tokens",
            5,
            "/tokenize",
            json!({"prompt": "12345"}),
            json!({"prompt": "123456"}),
            400,
        ),
        (
            "tokenize_tokens",
            5,
            "/detokenize",
            json!({"tokens": [1, 2, 3, 4, 5]}),
            json!({"tokens": [1, 2, 3, 4, 5, 6]}),
            400,
        ),
        ("echo_bytes", 50, COMPLETIONS, echo(50), echo(51), 400),
        ("echo_logprobs", 100, COMPLETIONS, echo(50), echo(51), 400),
        (
            "answer_bytes",
            600,
            COMPLETIONS,
            complete(json!({"prompt": "x", "logprobs": 1})),
            complete(json!({"prompt": "xxx", "logprobs": 1, "max_tokens": 3})),
            400,
        ),
        (
            "answer_bytes",
            600,
            CHAT,
            chat(json!({"top_logprobs": 1})),
            chat(json!({"top_logprobs": 1, "max_tokens": 3, "ignore_eos": true})),
            400,
        ),
        (
            "answer_bytes",
            4,
            "/detokenize",
            json!({"tokens": [48, 49, 50, 51]}),
            json!({"tokens": [48, 49, 50, 51, 52]}),
            400,
        ),
    ]
}

#[tokio::test]
async fn every_limit_is_enforced() {
    let mut seen = Vec::new();
    for (name, value, path, within, beyond, status) in cases() {
        let mut config = config();
        config.limits.set(name, value).unwrap();
        let mock = MockConfig { embedding: 8, ..MockConfig::default() };
        let bed = Bed::with(config, mock, Model { embedding: Some(8), ..model() }).await;
        let (found, answer) = bed.post(path, &within).await;
        assert_eq!(found, 200, "{name}={value}: {within} → {answer}");
        let error = bed.error(path, &beyond, status).await;
        let message = error["message"].as_str().unwrap();
        assert!(message.contains(&value.to_string()), "{name}={value}: {message}");
        seen.push(name);
    }
    let elsewhere = ELSEWHERE.map(|(name, _)| name);
    for row in Limits::TABLE {
        let here = seen.contains(&row.name) || row.name == "watchers";
        assert!(here != elsewhere.contains(&row.name), "{} must be tested exactly once", row.name);
    }
}

#[tokio::test]
async fn live_views_are_limited() {
    let mut config = config();
    config.limits.watchers = 2;
    let bed = Bed::with(config, MockConfig::default(), model()).await;
    let mut watching = Vec::new();
    for _ in 0..2 {
        let mut wire = bed.connect().await;
        assert_eq!(wire.request("GET", "/live", &[], b"").await.unwrap().status, 200);
        watching.push(wire);
    }
    let (head, body) = bed.get("/live").await;
    assert_eq!(head.status, 503);
    assert!(String::from_utf8(body).unwrap().contains("2 live views"));
    drop(watching);
    crate::bed::soon("the live views are closed", async {
        loop {
            let mut wire = bed.connect().await;
            if wire.request("GET", "/live", &[], b"").await.unwrap().status == 200 {
                break;
            }
        }
    })
    .await;
}

#[tokio::test]
async fn collected_responses_share_one_budget() {
    let mut config = config();
    config.limits.answer_bytes = 700;
    config.limits.answer_budget_bytes = 1000;
    let mock =
        MockConfig { step_time: std::time::Duration::from_millis(2), ..MockConfig::default() };
    let bed = Bed::with(config, mock, model()).await;
    let ask = json!({"prompt": "x", "ignore_eos": true, "max_tokens": 600});
    bed.ok(COMPLETIONS, &json!({"prompt": "x", "ignore_eos": true, "max_tokens": 200})).await;
    let (one, other) = tokio::join!(bed.post(COMPLETIONS, &ask), bed.post(COMPLETIONS, &ask));
    let statuses = [one.0, other.0];
    assert!(statuses.contains(&503) && statuses.iter().all(|s| [200, 503].contains(s)), "{one:?}");
    // A stream does not count.
    let mut stream = ask.clone();
    stream["stream"] = true.into();
    assert_eq!(bed.stream(COMPLETIONS, &stream).await.last().unwrap(), "[DONE]");
}
