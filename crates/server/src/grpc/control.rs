//! `vllm.Control`: what is served, where KV events are, and aborting. Adapters, pausing, sleeping and changing weights
//! are refused.

use super::running::Running;
use super::{Described, Reached};
use crate::app::App;
use crate::fleet::version;
use crate::http::auth::Caller;
use crate::kv_events::{EventForm, KvEvents};
use crate::openai::new_id;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use tonic::{Request, Response, Status};
use vllm_proto as proto;

pub(super) struct Control {
    app: Arc<App>,
    described: Arc<Described>,
    running: Running,
    instance: String,
}

impl Control {
    pub(super) fn new(app: Arc<App>, described: Arc<Described>, running: Running) -> Self {
        Self { app, described, running, instance: new_id("worker") }
    }

    /// Refuses while the engine is loading: nothing is known of it yet.
    fn check_ready(&self) -> Result<(), Status> {
        self.app.ready().map_err(Status::unavailable)
    }
}

/// An address as a client can reach it: one of every interface is where the client found this server.
fn reachable(address: SocketAddr, reached: &Reached) -> String {
    match (&reached.0, address.ip().is_unspecified()) {
        (Some(host), true) => format!("tcp://{host}:{}", address.port()),
        (None, true) => format!("tcp://127.0.0.1:{}", address.port()),
        (_, false) => format!("tcp://{address}"),
    }
}

fn source(events: &KvEvents, reached: &Reached) -> proto::KvEventSource {
    proto::KvEventSource {
        transport: "zmq".into(),
        endpoint: reachable(events.listen, reached),
        topic: events.topic.clone(),
        replay_endpoint: events.replay.map(|at| reachable(at, reached)).unwrap_or_default(),
        data_parallel_rank: Some(0),
        encoding: "msgpack".into(),
        schema_version: match events.form {
            EventForm::Array => 1,
            EventForm::Map => 2,
        },
        buffer_steps: crate::kv_events::KEPT as u32,
        hwm: crate::kv_events::BEHIND as u32,
        max_queue_size: crate::kv_events::QUEUED as u32,
    }
}

/// Methods that this server does not have, in the form that `async_trait` gives the others.
macro_rules! refused {
    ($($name:ident($request:ident) -> $response:ident: $what:literal;)*) => {
        $(fn $name<'s, 'f>(
            &'s self,
            _: Request<proto::$request>,
        ) -> Pin<Box<dyn Future<Output = Result<Response<proto::$response>, Status>> + Send + 'f>>
        where
            's: 'f,
            Self: 'f,
        {
            let refused = Status::unimplemented(concat!("this server has no ", $what));
            Box::pin(std::future::ready(Err(refused)))
        })*
    };
}

#[tonic::async_trait]
impl proto::control_server::Control for Control {
    async fn get_server_info(
        &self,
        _: Request<proto::GetServerInfoRequest>,
    ) -> Result<Response<proto::ServerInfo>, Status> {
        self.server_info().map(Response::new)
    }

    async fn get_model_info(
        &self,
        _: Request<proto::GetModelInfoRequest>,
    ) -> Result<Response<proto::ModelInfo>, Status> {
        self.model_info().map(Response::new)
    }

    async fn get_kv_event_sources(
        &self,
        request: Request<proto::GetKvEventSourcesRequest>,
    ) -> Result<Response<proto::GetKvEventSourcesResponse>, Status> {
        let reached = request.extensions().get().cloned().unwrap_or(Reached(None));
        let events = self.described.kv_events.iter();
        let sources = events.map(|events| source(events, &reached)).collect();
        Ok(Response::new(proto::GetKvEventSourcesResponse { sources }))
    }

    async fn abort(
        &self,
        request: Request<proto::AbortRequest>,
    ) -> Result<Response<proto::AbortResponse>, Status> {
        let caller: Caller = request.extensions().get().copied().unwrap_or_default();
        let names = request.into_inner().request_ids;
        let ids = names.iter().flat_map(|name| self.running.find(caller, name));
        self.app.link.end(ids.collect());
        Ok(Response::new(proto::AbortResponse {}))
    }

    async fn list_loras(
        &self,
        _: Request<proto::ListLorasRequest>,
    ) -> Result<Response<proto::ListLorasResponse>, Status> {
        Ok(Response::new(proto::ListLorasResponse { adapters: Vec::new() }))
    }

    async fn is_paused(
        &self,
        _: Request<proto::IsPausedRequest>,
    ) -> Result<Response<proto::IsPausedResponse>, Status> {
        Ok(Response::new(proto::IsPausedResponse { paused: false }))
    }

    async fn is_sleeping(
        &self,
        _: Request<proto::IsSleepingRequest>,
    ) -> Result<Response<proto::IsSleepingResponse>, Status> {
        Ok(Response::new(proto::IsSleepingResponse { sleeping: false }))
    }

    async fn shutdown(
        &self,
        _: Request<proto::ShutdownRequest>,
    ) -> Result<Response<proto::ShutdownResponse>, Status> {
        Err(Status::failed_precondition("send SIGTERM to end this server"))
    }

    refused! {
        load_lora(LoadLoraRequest) -> LoadLoraResponse: "adapters";
        unload_lora(UnloadLoraRequest) -> UnloadLoraResponse: "adapters";
        pause_generation(PauseGenerationRequest) -> PauseGenerationResponse: "pauses";
        resume_generation(ResumeGenerationRequest) -> ResumeGenerationResponse: "pauses";
        sleep(SleepRequest) -> SleepResponse: "sleep mode";
        wake_up(WakeUpRequest) -> WakeUpResponse: "sleep mode";
        init_weight_transfer_engine(InitWeightTransferEngineRequest) -> InitWeightTransferEngineResponse:
            "updates of weights";
        start_weight_update(StartWeightUpdateRequest) -> StartWeightUpdateResponse: "updates of weights";
        start_draft_weight_update(StartDraftWeightUpdateRequest) -> StartDraftWeightUpdateResponse:
            "updates of weights";
        update_weights(UpdateWeightsRequest) -> UpdateWeightsResponse: "updates of weights";
        finish_weight_update(FinishWeightUpdateRequest) -> FinishWeightUpdateResponse:
            "updates of weights";
        update_weight_version(UpdateWeightVersionRequest) -> UpdateWeightVersionResponse:
            "updates of weights";
        get_weight_version(GetWeightVersionRequest) -> GetWeightVersionResponse: "updates of weights";
    }
}

impl Control {
    fn server_info(&self) -> Result<proto::ServerInfo, Status> {
        self.check_ready()?;
        let snapshot = self.app.link.snapshot();
        let page = u32::try_from(snapshot.page_tokens).unwrap_or(u32::MAX);
        Ok(proto::ServerInfo {
            engine_version: version(),
            api_version: "vllm".into(),
            instance_id: self.instance.clone(),
            parallelism: Some(proto::ParallelismInfo {
                tensor_parallel_size: 1,
                pipeline_parallel_size: 1,
                data_parallel_size: 1,
                data_parallel_rank: 0,
                decode_context_parallel_size: 1,
                world_size: 1,
                data_parallel_size_local: 1,
            }),
            max_model_len: u32::try_from(self.app.model.context).unwrap_or(u32::MAX),
            kv_block_size: page,
            total_kv_blocks: snapshot.pages.total(),
            max_running_requests: snapshot.seats,
            // A step takes as many prompt tokens as it finds best; there is no such number.
            max_batched_tokens: 0,
            max_loras: 0,
            rl_capabilities: None,
            proto_version: proto::VERSION.into(),
            effective_attention_block_size: Some(page.into()),
        })
    }

    fn model_info(&self) -> Result<proto::ModelInfo, Status> {
        self.check_ready()?;
        let model = &self.app.model;
        Ok(proto::ModelInfo {
            model_id: self.described.model_id.clone(),
            served_model_name: model.name.clone(),
            served_model_aliases: model.aliases.clone(),
            supports_text_input: true,
            supports_token_ids_input: true,
            supports_lora: false,
            supports_multimodal: false,
            // Tokens are not parsed here: whoever asks for them has the tokenizer.
            reasoning_parser: String::new(),
            tool_call_parser: String::new(),
        })
    }
}
