//! Budgets of reasoning, from the request to the engine.

use crate::bed::{Bed, config, model};
use crate::checkpoint::thinker;
use engine::request::{Request, Thinking};
use mock::{MockConfig, demo};
use serde_json::{Value, json};
use std::sync::{Arc, Mutex};

const CHAT: &str = "/v1/chat/completions";
const MESSAGES: &str = "/v1/messages";

/// A server that keeps what the engine was asked for.
async fn bed(opens: bool) -> (Bed, Arc<Mutex<Vec<Request>>>) {
    let asked: Arc<Mutex<Vec<Request>>> = Arc::default();
    let (kept, answer) = (asked.clone(), demo());
    let oracle = Arc::new(move |request: &Request, choice| {
        kept.lock().unwrap().push(request.clone());
        answer(request, choice)
    });
    let mock = MockConfig { oracle, vocab: 262, ..MockConfig::default() };
    let model = if opens { thinker() } else { model() };
    (Bed::with(config(), mock, model).await, asked)
}

fn ask(extra: Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2000});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

/// What the engine is told for a request.
async fn told(opens: bool, route: &str, extra: Value) -> Vec<Option<Thinking>> {
    let (bed, asked) = bed(opens).await;
    bed.ok(route, &ask(extra)).await;
    let asked = asked.lock().unwrap();
    asked.iter().map(|request| request.sampling.thinking.clone()).collect()
}

fn format() -> Value {
    json!({"type": "json_object"})
}

#[tokio::test]
async fn the_engine_gets_tags_and_budget() {
    let bytes = |tag: &str| tag.bytes().map(u32::from).collect::<Arc<[u32]>>();
    let (open, close) = (bytes("<think>"), bytes("</think>"));
    let tags = |budget| Some(Thinking { open: open.clone(), close: close.clone(), budget });
    let enabled = json!({"thinking": {"type": "enabled", "budget_tokens": 1500}});
    assert_eq!(told(false, MESSAGES, enabled).await, [tags(1500)]);
    let adaptive = json!({"thinking": {"type": "adaptive"}});
    assert_eq!(told(false, MESSAGES, adaptive).await, [None]);
    assert_eq!(told(false, CHAT, json!({"thinking_token_budget": 7})).await, [tags(7)]);
    assert_eq!(told(false, CHAT, json!({})).await, [None]);
    // Several choices, in one request of the engine or in several.
    let several = json!({"thinking_token_budget": 7, "n": 3, "stop": "x"});
    assert_eq!(told(false, CHAT, several).await, [tags(7), tags(7), tags(7)]);

    // With a restriction of the answer the model thinks first only if it is asked to.
    let wants = [
        (json!({}), None),
        (json!({"thinking_token_budget": 0}), None),
        (json!({"thinking_token_budget": 9}), tags(9)),
        (json!({"thinking_token_budget": 9, "reasoning_effort": "none"}), None),
        (json!({"chat_template_kwargs": {"enable_thinking": true}}), tags(u32::MAX)),
        (
            json!({"thinking_token_budget": 9, "chat_template_kwargs": {"enable_thinking": false}}),
            None,
        ),
    ];
    for (mut extra, expected) in wants {
        extra["response_format"] = format();
        assert_eq!(told(false, CHAT, extra.clone()).await, [expected], "{extra}");
    }
}

/// A template that ends with the opening tag, and tokens for both tags.
#[tokio::test]
async fn a_prompt_may_open_the_reasoning() {
    let opened = |budget| Some(Thinking { open: [].into(), close: [261].into(), budget });
    let all = [
        (json!({"thinking_token_budget": 5}), opened(5)),
        (json!({}), None),
        // This template always thinks: then the restriction holds for what follows.
        (json!({"response_format": format()}), opened(u32::MAX)),
        (json!({"response_format": format(), "thinking_token_budget": 0}), opened(0)),
    ];
    for (extra, expected) in all {
        assert_eq!(told(true, CHAT, extra.clone()).await, [expected], "{extra}");
    }
}

#[tokio::test]
async fn budgets_that_anthropic_refuses_are_refused() {
    let (bed, _) = bed(false).await;
    for (thinking, most, param) in [
        (
            json!({"type": "enabled", "budget_tokens": 1023}),
            2000,
            "budget_tokens must be at least 1024",
        ),
        (
            json!({"type": "enabled", "budget_tokens": 0}),
            2000,
            "budget_tokens must be at least 1024",
        ),
        (json!({"type": "enabled"}), 2000, "needs thinking.budget_tokens"),
        (json!({"type": "enabled", "budget_tokens": 2000}), 2000, "max_tokens must be greater"),
        (json!({"type": "adaptive", "budget_tokens": 1024}), 2000, "takes no budget_tokens"),
        (json!({"type": "disabled", "budget_tokens": 1024}), 2000, "takes no budget_tokens"),
        (json!({"type": "enabled", "budget_tokens": -1}), 2000, "budget_tokens"),
    ] {
        let body = ask(json!({"thinking": thinking, "max_tokens": most}));
        let (status, answer) = bed.post(MESSAGES, &body).await;
        assert_eq!(status, 400, "{answer}");
        assert_eq!(answer["type"], "error");
        assert_eq!(answer["error"]["type"], "invalid_request_error");
        let message = answer["error"]["message"].as_str().unwrap();
        assert!(message.contains(param), "{message}");
    }
    // The tokens of a prompt are counted under the same rules, without `max_tokens`.
    let count = |budget: u32| {
        json!({"messages": [{"role": "user", "content": "hi"}],
               "thinking": {"type": "enabled", "budget_tokens": budget}})
    };
    let route = "/v1/messages/count_tokens";
    assert_eq!(bed.post(route, &count(1024)).await.0, 200);
    assert_eq!(bed.post(route, &count(1)).await.0, 400);
}

#[tokio::test]
async fn a_budget_is_not_listed_as_ignored() {
    let (bed, _) = bed(false).await;
    let thinking = json!({"type": "enabled", "budget_tokens": 1024});
    for (route, extra) in
        [(MESSAGES, json!({"thinking": thinking})), (CHAT, json!({"thinking_token_budget": 7}))]
    {
        let body = ask(extra).to_string();
        let (head, _) = bed.try_post(route, body.as_bytes()).await.unwrap();
        assert_eq!((head.status, head.header("x-ignored-fields")), (200, None));
    }
}
