//! vLLM's gRPC services through real sockets, with the client of `vllm-proto`.

use crate::bed::{Bed, config, model, repeats, soon};
use mock::MockConfig;
use server::{Exit, Grpc, KvEvents, ServerConfig};
use std::time::Duration;
use tonic::codegen::tokio_stream::{Stream, StreamExt};
use tonic::transport::Channel;
use tonic::{Code, Request, Status};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use vllm_proto::control_client::ControlClient;
use vllm_proto::decoding_parameters::StructuredOutput;
use vllm_proto::finish_info::{FinishReason, StopReason};
use vllm_proto::generate_request::Prompt;
use vllm_proto::inference_client::InferenceClient;
use vllm_proto::{
    AbortRequest, CandidateTokens, DecodingParameters, GenerateRequest, GenerateResponse,
    GetKvEventSourcesRequest, GetModelInfoRequest, GetServerInfoRequest, KvCacheParameters,
    LoadLoraRequest, RandomSampling, ResponseOptions, StoppingCriteria, TokenIds,
    candidate_tokens::Select,
};

fn serving() -> ServerConfig {
    let grpc = Grpc { listen: ([127, 0, 0, 1], 0).into(), model_id: "/models/mock".into() };
    ServerConfig { grpc: Some(grpc), ..config() }
}

/// Repeats prompts, at this speed.
fn mock(step: Duration) -> MockConfig {
    MockConfig { oracle: repeats(), step_time: step, ..MockConfig::default() }
}

async fn bed(config: ServerConfig, step: Duration) -> (Bed, Channel) {
    let bed = Bed::with(config, mock(step), model()).await;
    let url = format!("http://{}", bed.grpc.unwrap());
    let channel = Channel::from_shared(url).unwrap().connect().await.unwrap();
    (bed, channel)
}

/// Asks for so many tokens after a text, with their ids.
fn ask(text: &str, tokens: u32) -> GenerateRequest {
    GenerateRequest {
        prompt: Some(Prompt::Text(text.into())),
        stopping: Some(StoppingCriteria { max_new_tokens: tokens, ..StoppingCriteria::default() }),
        response: Some(ResponseOptions { output_token_ids: true, ..ResponseOptions::default() }),
        ..GenerateRequest::default()
    }
}

/// What a stream said until it ended.
async fn all(
    mut stream: impl Stream<Item = Result<GenerateResponse, Status>> + Unpin,
) -> Result<Vec<GenerateResponse>, Status> {
    let mut messages = Vec::new();
    while let Some(message) = soon("the next message", stream.next()).await {
        messages.push(message?);
    }
    Ok(messages)
}

fn ids(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

#[tokio::test]
async fn a_stream_has_tokens_text_and_one_end() {
    let (_bed, channel) = bed(serving(), Duration::from_millis(1)).await;
    let mut client = InferenceClient::new(channel);
    for given in [Prompt::Text("héllo".into()), Prompt::TokenIds(TokenIds { ids: ids("héllo") })]
    {
        let request = GenerateRequest { prompt: Some(given), ..ask("", 100) };
        let stream = client.generate_stream(request).await.unwrap().into_inner();
        let messages = all(stream).await.unwrap();
        let (mut text, mut tokens) = (String::new(), Vec::new());
        for (at, message) in messages.iter().enumerate() {
            assert_eq!(message.prompt_info.is_some(), at == 0);
            let output = message.outputs.as_ref().unwrap();
            assert_eq!((output.index, output.num_tokens as usize), (0, output.token_ids.len()));
            assert_eq!(output.finish_info.is_some(), at + 1 == messages.len());
            text.push_str(&output.text);
            tokens.extend(&output.token_ids);
        }
        assert_eq!((text.as_str(), tokens), ("héllo", ids("héllo")));
        let prompt = messages[0].prompt_info.as_ref().unwrap();
        assert_eq!(prompt.num_prompt_tokens, 6);
        let end = messages.last().unwrap().outputs.as_ref().unwrap().finish_info.clone().unwrap();
        assert_eq!((end.num_output_tokens, end.finish_reason()), (6, FinishReason::Stop));
        assert!(matches!(end.stop_reason, Some(StopReason::EosTokenId(_))), "{end:?}");
    }
}

#[tokio::test]
async fn options_of_answers() {
    let (_bed, channel) = bed(serving(), Duration::ZERO).await;
    let mut client = InferenceClient::new(channel);
    let one = |response: GenerateResponse| response.outputs.unwrap();

    let cut = one(client.generate(ask("abcdef", 3)).await.unwrap().into_inner());
    let info = cut.finish_info.unwrap();
    assert_eq!((cut.text.as_str(), info.finish_reason()), ("abc", FinishReason::Length));

    let mut request = ask("abcdef", 100);
    let stopping = request.stopping.as_mut().unwrap();
    stopping.stop_strings = vec!["de".into()];
    let stopped = one(client.generate(request.clone()).await.unwrap().into_inner());
    let reason = stopped.finish_info.clone().unwrap().stop_reason;
    assert_eq!(stopped.text, "abc");
    assert_eq!(reason, Some(StopReason::StopString("de".into())));
    assert_eq!(stopped.finish_info.unwrap().num_output_tokens, stopped.num_tokens);
    request.stopping.as_mut().unwrap().include_stop_strings = true;
    assert_eq!(one(client.generate(request).await.unwrap().into_inner()).text, "abcde");

    let mut request = ask("ab", 2);
    request.response = Some(ResponseOptions {
        prompt_token_ids: true,
        prompt_logprobs: true,
        output_text: Some(false),
        output_logprobs: true,
        output_candidates: Some(CandidateTokens { select: Some(Select::TopN(2)) }),
        ..ResponseOptions::default()
    });
    let response = client.generate(request).await.unwrap().into_inner();
    let prompt = response.prompt_info.unwrap();
    assert_eq!(prompt.token_ids.len(), prompt.num_prompt_tokens as usize);
    assert_eq!(prompt.logprobs.len(), prompt.token_ids.len());
    let output = response.outputs.unwrap();
    assert_eq!((output.text.as_str(), output.token_ids.len(), output.num_tokens), ("", 0, 2));
    assert_eq!((output.logprobs.len(), output.ranks.len()), (2, 2));
    assert!(output.candidate_tokens.iter().all(|token| token.tokens.len() == 2));

    let mut several = ask("xy", 2);
    several.sampling = Some(RandomSampling { num_sequences: 3, ..RandomSampling::default() });
    let refused = client.generate(several.clone()).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument, "one message has one sequence");
    let messages = all(client.generate_stream(several).await.unwrap().into_inner()).await.unwrap();
    for index in 0..3 {
        let of = messages.iter().filter_map(|message| message.outputs.as_ref());
        let of: Vec<_> = of.filter(|output| output.index == index).collect();
        assert_eq!(of.iter().map(|output| output.text.as_str()).collect::<String>(), "xy");
        assert_eq!(of.iter().filter(|output| output.finish_info.is_some()).count(), 1);
    }
}

#[tokio::test]
async fn what_is_wrong_or_unsupported_is_said() {
    let mut config = serving();
    config.limits.body_bytes = 4096;
    let (_bed, channel) = bed(config, Duration::ZERO).await;
    let mut client = InferenceClient::new(channel.clone());
    let decoding = |output| {
        Some(DecodingParameters {
            structured_output: Some(output),
            ..DecodingParameters::default()
        })
    };
    let plain = || ask("a", 1);
    let cases = [
        (GenerateRequest { prompt: None, ..plain() }, Code::InvalidArgument),
        (ask("", 1), Code::InvalidArgument),
        (GenerateRequest { model: "other".into(), ..plain() }, Code::NotFound),
        (GenerateRequest { lora_name: "x".into(), ..plain() }, Code::InvalidArgument),
        (GenerateRequest { temperature: Some(f32::NAN), ..plain() }, Code::InvalidArgument),
        (
            GenerateRequest {
                kv: Some(KvCacheParameters {
                    kv_transfer_params: Some(Default::default()),
                    ..KvCacheParameters::default()
                }),
                ..plain()
            },
            Code::InvalidArgument,
        ),
        (
            GenerateRequest {
                decoding: decoding(StructuredOutput::StructuralTag("x".into())),
                ..plain()
            },
            Code::InvalidArgument,
        ),
        (
            GenerateRequest { decoding: decoding(StructuredOutput::Regex("(".into())), ..plain() },
            Code::InvalidArgument,
        ),
        (
            GenerateRequest {
                prompt: Some(Prompt::TokenIds(TokenIds { ids: vec![1 << 30] })),
                ..plain()
            },
            Code::InvalidArgument,
        ),
        (ask(&"x".repeat(8192), 1), Code::ResourceExhausted),
    ];
    for (request, code) in cases {
        let shown = format!("{request:.200?}");
        let status = client.generate(request.clone()).await.unwrap_err();
        assert_eq!(status.code(), code, "{shown}: {status}");
        assert!(!status.message().is_empty(), "{shown}");
        let streamed = match client.generate_stream(request).await {
            Ok(stream) => all(stream.into_inner()).await.unwrap_err(),
            Err(status) => status,
        };
        assert_eq!(streamed.code(), code, "{shown}");
    }
    // The names of the model: its own, others, and the folder of its tokenizer.
    for name in ["mock", "other-name", "/models/mock"] {
        let request = GenerateRequest { model: name.into(), ..plain() };
        client.generate(request).await.unwrap();
    }
    let mut control = ControlClient::new(channel);
    let refused = control.load_lora(LoadLoraRequest::default()).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unimplemented);
}

#[tokio::test]
async fn a_client_that_leaves_or_loses_patience_ends_its_request() {
    let (bed, channel) = bed(serving(), Duration::from_millis(20)).await;
    let mut client = InferenceClient::new(channel.clone());
    let long = || ask(&"long ".repeat(400), 2000);

    let mut stream = client.generate_stream(long()).await.unwrap().into_inner();
    soon("a first token", stream.next()).await.unwrap().unwrap();
    assert_eq!(bed.link.inflight(), 1);
    drop(stream);
    bed.until("the request of a dropped stream ends", || bed.link.inflight() == 0).await;

    let unary = tokio::time::timeout(Duration::from_millis(200), client.generate(long()));
    assert!(unary.await.is_err());
    bed.until("the request of a dropped call ends", || bed.link.inflight() == 0).await;

    // The deadline is the server's own: this client does not watch it.
    let mut request = Request::new(long());
    request.metadata_mut().insert("grpc-timeout", "150m".parse().unwrap());
    let stream = client.generate_stream(request).await.unwrap().into_inner();
    assert_eq!(all(stream).await.unwrap_err().code(), Code::DeadlineExceeded);
    bed.until("the request ends with its time", || bed.link.inflight() == 0).await;

    let named = GenerateRequest { request_id: "mine".into(), ..long() };
    let mut stream = client.generate_stream(named.clone()).await.unwrap().into_inner();
    let again = client.generate_stream(named.clone()).await.unwrap_err();
    assert_eq!(again.code(), Code::AlreadyExists);
    soon("a first token", stream.next()).await.unwrap().unwrap();
    let abort = AbortRequest { request_ids: vec!["unknown".into(), "mine".into()] };
    ControlClient::new(channel).abort(abort).await.unwrap();
    let end = all(stream).await.unwrap().pop().unwrap().outputs.unwrap().finish_info.unwrap();
    assert_eq!(end.finish_reason(), FinishReason::Aborted);
    // The name is free again.
    drop(client.generate_stream(named).await.unwrap());
}

#[tokio::test]
async fn keys_are_metadata_and_health_needs_none() {
    let (_bed, channel) =
        bed(ServerConfig { api_keys: vec!["sesame".into()], ..serving() }, Duration::ZERO).await;
    let mut client = InferenceClient::new(channel.clone());
    assert_eq!(client.generate(ask("a", 1)).await.unwrap_err().code(), Code::Unauthenticated);
    for (name, value) in [("authorization", "Bearer sesame"), ("x-api-key", "sesame")] {
        let mut request = Request::new(ask("a", 1));
        request.metadata_mut().insert(name, value.parse().unwrap());
        client.generate(request).await.unwrap();
    }
    let mut control = ControlClient::new(channel.clone());
    let refused = control.get_model_info(GetModelInfoRequest {}).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unauthenticated);
    let mut health = HealthClient::new(channel);
    let asked = |service: &str| HealthCheckRequest { service: service.into() };
    let found = health.check(asked("vllm.Inference")).await.unwrap().into_inner();
    assert_eq!(found.status(), ServingStatus::Serving);
    assert_eq!(health.check(asked("other")).await.unwrap_err().code(), Code::NotFound);
}

#[tokio::test]
async fn routers_learn_what_is_served_and_where_events_are() {
    let events = KvEvents {
        listen: ([0, 0, 0, 0], 0).into(),
        replay: Some(([127, 0, 0, 1], 0).into()),
        topic: "kv".into(),
        form: server::EventForm::Map,
    };
    let (_bed, channel) =
        bed(ServerConfig { kv_events: Some(events), ..serving() }, Duration::ZERO).await;
    let mut control = ControlClient::new(channel);
    let server = control.get_server_info(GetServerInfoRequest {}).await.unwrap().into_inner();
    assert_eq!((server.api_version.as_str(), server.max_model_len), ("vllm", 8192));
    assert_eq!((server.kv_block_size, server.total_kv_blocks), (16, 65_536));
    assert_eq!(server.max_running_requests, 256);
    let model = control.get_model_info(GetModelInfoRequest {}).await.unwrap().into_inner();
    assert_eq!(
        (model.model_id.as_str(), model.served_model_name.as_str()),
        ("/models/mock", "mock")
    );
    assert!(model.supports_token_ids_input && model.supports_text_input);
    let sources = control.get_kv_event_sources(GetKvEventSourcesRequest {}).await.unwrap();
    let source = sources.into_inner().sources.pop().unwrap();
    // Bound to every interface: where this client found the server.
    let port = source.endpoint.strip_prefix("tcp://127.0.0.1:").unwrap();
    assert_ne!(port, "0");
    assert!(source.replay_endpoint.starts_with("tcp://127.0.0.1:"));
    assert_eq!((source.transport.as_str(), source.topic.as_str()), ("zmq", "kv"));
}

#[tokio::test]
async fn draining_ends_watches_and_lets_streams_finish() {
    let (mut bed, channel) = bed(serving(), Duration::from_millis(10)).await;
    let mut client = InferenceClient::new(channel.clone());
    let mut stream = client.generate_stream(ask(&"x".repeat(100), 100)).await.unwrap().into_inner();
    soon("a first token", stream.next()).await.unwrap().unwrap();
    let mut health = HealthClient::new(channel);
    let mut watch = health.watch(HealthCheckRequest::default()).await.unwrap().into_inner();
    let state = soon("the state", watch.next()).await.unwrap().unwrap();
    assert_eq!(state.status(), ServingStatus::Serving);
    bed.begin_stop();
    let state = soon("the next state", watch.next()).await.unwrap().unwrap();
    assert_eq!(state.status(), ServingStatus::NotServing);
    assert!(soon("the end of the watch", watch.next()).await.is_none());
    let end = all(stream).await.unwrap().pop().unwrap().outputs.unwrap();
    assert_eq!(end.finish_info.unwrap().num_output_tokens, 100);
    assert_eq!(soon("the end of the server", bed.ended()).await, Exit::Drained);
}
