//! What routers ask a worker: what it serves, how large its cache is, how busy it is. Paths and names are those of
//! SGLang, which smg, sglang-router and vllm-router read. Only what this server knows is answered.

use crate::app::App;
use crate::describe::api_type;
use axum::Json;
use axum::extract::State;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

api_type! {
    /// The server as a worker of a router.
    pub struct WorkerInfo {
        /// The name of the model.
        pub model_path: String,
        /// The same.
        pub served_model_name: String,
        /// The version of this server.
        pub version: String,
        /// The most tokens of prompt and answer together.
        pub context_length: u64,
        /// Sequences that run at once.
        pub max_running_requests: u64,
        /// Tokens that the KV cache holds.
        pub max_total_num_tokens: u64,
        /// Tokens of a page of the KV cache.
        pub page_size: u64,
        /// Devices that share the layers of the model: always 1.
        pub tp_size: u32,
        /// Engines behind this address: always 1.
        pub dp_size: u32,
        /// Always `null`, as text: prefill and decode run on the same worker.
        pub disaggregation_mode: String,
    }
}

api_type! {
    /// The served model, as routers ask for it.
    pub struct WorkerModel {
        /// The name of the model.
        pub model_path: String,
        /// The same: `/tokenizer_info` and `/tokenize` have its tokenizer.
        pub tokenizer_path: String,
        /// Whether it generates text: always true.
        pub is_generation: bool,
        /// The most tokens of prompt and answer together.
        pub max_context_length: u64,
        /// Tokens of the vocabulary.
        pub vocab_size: u64,
        /// How often the weights were replaced.
        pub weight_version: u64,
    }
}

api_type! {
    /// How busy the engines behind this address are.
    pub struct WorkerLoads {
        /// When this was asked, in seconds since 1970.
        pub timestamp: f64,
        /// The version of this server.
        pub version: String,
        /// Engines: always 1.
        pub dp_rank_count: u32,
        /// One per engine.
        pub loads: Vec<WorkerLoad>,
    }
}

api_type! {
    /// How busy an engine is.
    pub struct WorkerLoad {
        /// Which: always 0.
        pub dp_rank: u32,
        /// Sequences that run.
        pub num_running_reqs: u64,
        /// Requests that wait to be admitted.
        pub num_waiting_reqs: u64,
        /// Requests accepted and not finished.
        pub num_reqs: u64,
        /// Tokens of pages that running sequences hold.
        pub num_used_tokens: u64,
        /// The same.
        pub num_tokens: u64,
        /// Tokens that the KV cache holds.
        pub max_total_num_tokens: u64,
        /// Used of all pages, from 0 to 1.
        pub token_usage: f64,
        /// Prompt tokens found in the prefix tree of all looked up, from 0 to 1.
        pub cache_hit_rate: f64,
        /// Sequences that run at once.
        pub max_running_requests: u64,
    }
}

/// This program and its version.
pub(crate) fn version() -> String {
    concat!("dacapo ", env!("CARGO_PKG_VERSION")).into()
}

fn of(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

/// `/get_server_info`.
pub(crate) async fn server_info(State(app): State<Arc<App>>) -> Json<WorkerInfo> {
    let snapshot = app.link.snapshot();
    Json(WorkerInfo {
        model_path: app.model.name.clone(),
        served_model_name: app.model.name.clone(),
        version: version(),
        context_length: app.model.context,
        max_running_requests: snapshot.seats,
        max_total_num_tokens: snapshot.pages.total() * snapshot.page_tokens,
        page_size: snapshot.page_tokens,
        tp_size: 1,
        dp_size: 1,
        disaggregation_mode: "null".into(),
    })
}

/// `/get_model_info`.
pub(crate) async fn model_info(State(app): State<Arc<App>>) -> Json<WorkerModel> {
    Json(WorkerModel {
        model_path: app.model.name.clone(),
        tokenizer_path: app.model.name.clone(),
        is_generation: true,
        max_context_length: app.model.context,
        vocab_size: app.model.text.vocab().into(),
        weight_version: app.link.weight_version(),
    })
}

fn load(app: &App) -> WorkerLoad {
    let snapshot = app.link.snapshot();
    let used = snapshot.pages.used * snapshot.page_tokens;
    WorkerLoad {
        dp_rank: 0,
        num_running_reqs: snapshot.running,
        num_waiting_reqs: snapshot.queue,
        num_reqs: app.link.inflight(),
        num_used_tokens: used,
        num_tokens: used,
        max_total_num_tokens: snapshot.pages.total() * snapshot.page_tokens,
        token_usage: of(snapshot.pages.used, snapshot.pages.total()),
        cache_hit_rate: of(snapshot.prefix.found, snapshot.prefix.looked_up),
        max_running_requests: snapshot.seats,
    }
}

/// `/v1/loads`.
pub(crate) async fn loads(State(app): State<Arc<App>>) -> Json<WorkerLoads> {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Json(WorkerLoads {
        timestamp: since.as_secs_f64(),
        version: version(),
        dp_rank_count: 1,
        loads: vec![load(&app)],
    })
}

/// `/get_load`, the older form of `/v1/loads`.
pub(crate) async fn old_loads(State(app): State<Arc<App>>) -> Json<Vec<WorkerLoad>> {
    Json(vec![load(&app)])
}
