//! Routes for the operator, served with `--admin-api` only: memory and weights of the model while it runs. Paths and
//! names are vLLM's and SGLang's.

use crate::app::App;
use crate::describe::api_type;
use crate::error::ApiError;
use crate::http::{RequestBody, read_json, receive};
use crate::link::{Change, ChangeError, NewWeights, Parts, Running, SharedPlace, SharedTensor};
use axum::Json;
use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{Uri, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The routes.
pub(crate) fn routes(app: &Arc<App>) -> Router<Arc<App>> {
    Router::new()
        .route("/sleep", post(sleep))
        .route("/wake_up", post(wake_up))
        .route("/is_sleeping", get(is_sleeping))
        .route("/release_memory_occupation", post(release))
        .route("/resume_memory_occupation", post(resume))
        .route("/pause", post(pause))
        .route("/resume", post(go_on))
        .route("/is_paused", get(is_paused))
        .route("/pause_generation", post(pause_generation))
        .route("/continue_generation", post(go_on))
        .route("/v1/load_lora_adapter", post(load_adapter))
        .route("/v1/unload_lora_adapter", post(unload_adapter))
        .route("/update_weights", post(update))
        .route("/update_weights_from_disk", post(update))
        .layer(from_fn_with_state(app.clone(), no_pages))
}

/// Refuses requests of web pages, which need no CORS preflight for a POST without a body.
async fn no_pages(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let from_page = request.headers().contains_key(header::ORIGIN);
    if from_page && app.origins.of(&request).is_none() {
        return ApiError::foreign_page().into_response();
    }
    next.run(request).await
}

/// The names and values of a query.
fn query(uri: &Uri) -> impl Iterator<Item = (&str, &str)> {
    let pairs = uri.query().unwrap_or("").split('&').filter(|pair| !pair.is_empty());
    pairs.map(|pair| pair.split_once('=').unwrap_or((pair, "")))
}

fn unknown(name: &str) -> ApiError {
    ApiError::invalid(name, format!("the parameter {name} does not exist"))
}

fn wrong(name: &str, value: &str, expected: &str) -> ApiError {
    ApiError::invalid(name, format!("{name} must be {expected}, not {value:?}"))
}

/// Adds a part by its tag.
fn add(parts: &mut Option<Parts>, tag: &str) -> Result<(), ApiError> {
    let parts = parts.get_or_insert(Parts { weights: false, kv: false });
    match tag {
        "weights" => parts.weights = true,
        "kv_cache" => parts.kv = true,
        other => return Err(wrong("tags", other, "weights or kv_cache")),
    }
    Ok(())
}

fn running(mode: &str) -> Result<Running, ApiError> {
    match mode {
        "wait" => Ok(Running::Finish),
        "abort" => Ok(Running::Drop),
        "keep" => Ok(Running::Pause),
        other => Err(wrong("mode", other, "wait, abort or keep")),
    }
}

/// `POST /sleep?level=1|2&mode=wait|abort|keep`.
async fn sleep(State(app): State<Arc<App>>, uri: Uri) -> Result<Json<Value>, ApiError> {
    let (mut keep, mut mode) = (true, Running::Finish);
    for (name, value) in query(&uri) {
        match (name, value) {
            ("level", "1") => keep = true,
            ("level", "2") => keep = false,
            ("level", other) => return Err(wrong("level", other, "1 or 2")),
            ("mode", value) => mode = running(value)?,
            (other, _) => return Err(unknown(other)),
        }
    }
    make(&app, Change::Sleep { parts: Parts::ALL, keep }, mode).await
}

/// `POST /wake_up?tags=weights&tags=kv_cache&reload=true|false`.
async fn wake_up(State(app): State<Arc<App>>, uri: Uri) -> Result<Json<Value>, ApiError> {
    let (mut parts, mut reload) = (None, true);
    for (name, value) in query(&uri) {
        match (name, value) {
            ("tags", value) => add(&mut parts, value)?,
            ("reload", "true") => reload = true,
            ("reload", "false") => reload = false,
            ("reload", other) => return Err(wrong("reload", other, "true or false")),
            (other, _) => return Err(unknown(other)),
        }
    }
    let parts = parts.unwrap_or(Parts::ALL);
    make(&app, Change::Wake { parts, reload }, Running::Pause).await
}

/// The body of SGLang's routes about memory.
#[derive(Debug, Default, Deserialize)]
struct Occupation {
    tags: Option<Vec<String>>,
}

/// A small body, which may be absent.
async fn optional<T: Default + DeserializeOwned>(app: &App, mut body: Body) -> Result<T, ApiError> {
    let mut lease = app.bodies.lease();
    let body = receive(&mut body, &app.limits, &mut lease).await?;
    if body.is_empty() {
        return Ok(T::default());
    }
    serde_json::from_slice(&body)
        .map_err(|error| ApiError::invalid("", format!("the body is not as expected: {error}")))
}

/// The parts that a body of SGLang's routes names; without a body, all.
async fn occupation(app: &App, body: Body) -> Result<Parts, ApiError> {
    let asked: Occupation = optional(app, body).await?;
    let mut parts = None;
    for tag in asked.tags.iter().flatten() {
        add(&mut parts, tag)?;
    }
    Ok(parts.unwrap_or(Parts::ALL))
}

/// `POST /release_memory_occupation`: SGLang's name for sleeping. Weights are kept in host memory.
async fn release(State(app): State<Arc<App>>, body: Body) -> Result<Json<Value>, ApiError> {
    let change = Change::Sleep { parts: occupation(&app, body).await?, keep: true };
    make(&app, change, Running::Finish).await
}

/// `POST /resume_memory_occupation`: SGLang's name for waking up.
async fn resume(State(app): State<Arc<App>>, body: Body) -> Result<Json<Value>, ApiError> {
    let change = Change::Wake { parts: occupation(&app, body).await?, reload: true };
    make(&app, change, Running::Pause).await
}

/// `POST /pause?mode=keep|wait|abort`.
async fn pause(State(app): State<Arc<App>>, uri: Uri) -> Result<Json<Value>, ApiError> {
    let mut mode = Running::Pause;
    for (name, value) in query(&uri) {
        match name {
            "mode" => mode = running(value)?,
            other => return Err(unknown(other)),
        }
    }
    make(&app, Change::Pause { keep: true }, mode).await
}

/// `POST /resume`, and SGLang's name for it.
async fn go_on(State(app): State<Arc<App>>) -> Result<Json<Value>, ApiError> {
    make(&app, Change::Resume, Running::Pause).await
}

/// `GET /is_paused`.
async fn is_paused(State(app): State<Arc<App>>) -> Json<Value> {
    Json(json!({"is_paused": app.link.is_paused()}))
}

/// The body of `/pause_generation`.
#[derive(Debug, Default, Deserialize)]
struct PauseGeneration {
    mode: Option<String>,
}

/// `POST /pause_generation`: SGLang's name for pausing, with its modes.
async fn pause_generation(
    State(app): State<Arc<App>>,
    body: Body,
) -> Result<Json<Value>, ApiError> {
    let asked: PauseGeneration = optional(&app, body).await?;
    let (keep, mode) = match asked.mode.as_deref().unwrap_or("abort") {
        "abort" => (true, Running::Drop),
        "in_place" => (true, Running::Pause),
        "retract" => (false, Running::Pause),
        other => return Err(wrong("mode", other, "abort, in_place or retract")),
    };
    make(&app, Change::Pause { keep }, mode).await
}

api_type! {
    /// The body of `/update_weights`.
    pub struct UpdateRequest {
        /// A folder or file with some or all of the model's tensors, as safetensors.
        pub model_path: Option<String>,
        /// Tensors in the memory of another process, instead of files.
        pub tensors: Option<Vec<TensorPlace>> = {"minItems": 1},
        /// What happens to running requests: `wait`, `abort` or `keep`.
        pub mode: Option<String> = {"enum": ["wait", "abort", "keep"]},
        /// SGLang's name for the mode `abort`.
        pub abort_all_requests: Option<bool>,
    }
}

api_type! {
    /// A tensor in the memory of another process.
    pub struct TensorPlace {
        /// Its name in the model's checkpoint.
        pub name: String,
        /// Its type.
        pub dtype: String = {"enum": ["F32", "F16", "BF16"]},
        /// Dimensions, outermost first.
        pub shape: Vec<u64>,
        /// The CUDA IPC handle of the memory it lies in, 64 bytes as hexadecimal digits.
        pub handle: Option<String> = {"minLength": 128, "maxLength": 128},
        /// A file that it lies in, such as one in `/dev/shm`, instead of a handle.
        pub path: Option<String>,
        /// Where its first byte is in there.
        pub offset: Option<u64>,
    }
}

/// A tensor as the engine finds it.
fn shared(roots: &[PathBuf], place: TensorPlace) -> Result<SharedTensor, ApiError> {
    let memory = match (&place.handle, &place.path) {
        (Some(handle), None) => SharedPlace::CudaIpc(hexadecimal(handle).ok_or_else(|| {
            ApiError::invalid("tensors.handle", "handle must be 128 hexadecimal digits")
        })?),
        (None, Some(path)) => SharedPlace::File(allowed(roots, "tensors.path", path)?),
        _ => return Err(ApiError::invalid("tensors", "a tensor has a handle or a path")),
    };
    let TensorPlace { name, dtype, shape, offset, .. } = place;
    Ok(SharedTensor { name, dtype, shape, memory, offset: offset.unwrap_or(0) })
}

fn hexadecimal(text: &str) -> Option<[u8; 64]> {
    let digits: Option<Vec<u8>> =
        text.chars().map(|c| c.to_digit(16).map(|digit| digit as u8)).collect();
    let bytes: Vec<u8> = digits?.chunks(2).map(|two| two[0] << 4 | two[two.len() - 1]).collect();
    (text.len() == 128).then(|| bytes.try_into().ok()).flatten()
}

impl RequestBody for UpdateRequest {
    const TOKEN_IDS: bool = false;
    const NEEDS_ENGINE: bool = false;
    // The cache is emptied in any case.
    const NO_EFFECT: &'static [&'static str] = &["flush_cache"];
}

/// `POST /update_weights`, and SGLang's name for it.
async fn update(State(app): State<Arc<App>>, request: Request) -> Result<Json<Value>, ApiError> {
    let asked = read_json(&app, request, |_, asked: UpdateRequest| Ok(asked)).await?;
    let mode = match (&asked.mode, asked.abort_all_requests) {
        (Some(mode), _) => running(mode)?,
        (None, Some(true)) => Running::Drop,
        (None, _) => Running::Finish,
    };
    let roots = app.weight_roots.clone();
    let find = move || match (asked.model_path, asked.tensors) {
        (Some(path), None) => allowed(&roots, "model_path", &path).map(NewWeights::Files),
        (None, Some(places)) => {
            let tensors = places.into_iter().map(|place| shared(&roots, place));
            tensors.collect::<Result<Vec<_>, _>>().map(NewWeights::Shared)
        }
        _ => Err(ApiError::invalid("model_path", "model_path or tensors says where weights are")),
    };
    let from = app.compute(0, find).await??;
    make(&app, Change::Update { from }, mode).await
}

/// The path without links, if it lies in one of the allowed folders. Otherwise nothing is said about it, not even
/// whether it exists.
fn allowed(roots: &[PathBuf], param: &str, path: &str) -> Result<PathBuf, ApiError> {
    let found = Path::new(path).canonicalize().ok();
    let below = |found: &PathBuf| roots.iter().any(|root| found.starts_with(root));
    found.filter(below).ok_or_else(|| {
        let text = "no such folder in those that the server was started with (--weight-root)";
        ApiError::invalid(param, text)
    })
}

api_type! {
    /// The body of `/v1/load_lora_adapter`.
    pub struct LoadAdapterRequest {
        /// The name that requests give as `model`.
        pub lora_name: String = {"minLength": 1},
        /// A folder that `peft` saved.
        pub lora_path: String,
    }
}

api_type! {
    /// The body of `/v1/unload_lora_adapter`.
    pub struct UnloadAdapterRequest {
        /// The name of the adapter.
        pub lora_name: String,
    }
}

impl RequestBody for LoadAdapterRequest {
    const TOKEN_IDS: bool = false;
    const NEEDS_ENGINE: bool = false;
}

impl RequestBody for UnloadAdapterRequest {
    const TOKEN_IDS: bool = false;
    const NEEDS_ENGINE: bool = false;
    // vLLM's clients send the number, too.
    const NO_EFFECT: &'static [&'static str] = &["lora_int_id"];
}

/// `POST /v1/load_lora_adapter`.
async fn load_adapter(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Json<Value>, ApiError> {
    let asked = read_json(&app, request, |_, asked: LoadAdapterRequest| Ok(asked)).await?;
    let name = asked.lora_name;
    if name.is_empty() || app.model.check_served(Some(&name)).is_ok() {
        let text = format!("the name {name:?} is empty or in use");
        return Err(ApiError::invalid("lora_name", text));
    }
    let roots = app.weight_roots.clone();
    let path = app.compute(0, move || allowed(&roots, "lora_path", &asked.lora_path)).await??;
    let reader = app.link.adapter_reader().ok_or_else(|| refused(ChangeError::Unsupported))?;
    let adapter = app.compute(0, move || reader(&path)).await?.map_err(refused)?;
    // Random, so that no page of another adapter is ever taken for one of this.
    let number = crate::openai::random() | 1;
    let loaded = make(&app, Change::LoadAdapter { number, adapter }, Running::Pause).await?;
    if !app.model.adapters.insert(&name, number) {
        drop(make(&app, Change::UnloadAdapter { number }, Running::Pause).await);
        return Err(ApiError::invalid("lora_name", format!("the name {name:?} is in use")));
    }
    Ok(loaded)
}

/// `POST /v1/unload_lora_adapter`.
async fn unload_adapter(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Json<Value>, ApiError> {
    let asked = read_json(&app, request, |_, asked: UnloadAdapterRequest| Ok(asked)).await?;
    let name = asked.lora_name;
    let Some(number) = app.model.adapters.get(&name) else {
        return Err(ApiError::not_found("lora_name", format!("no adapter {name:?} is loaded")));
    };
    // Requests that come from now on do not find it; if it is in use, it stays.
    app.model.adapters.remove(&name);
    let unloaded = make(&app, Change::UnloadAdapter { number }, Running::Pause).await;
    match unloaded {
        Ok(_) => app.metrics.forget_adapter(&name),
        Err(_) => drop(app.model.adapters.insert(&name, number)),
    }
    unloaded
}

/// `GET /is_sleeping`.
async fn is_sleeping(State(app): State<Arc<App>>) -> Json<Value> {
    Json(json!({"is_sleeping": app.link.is_asleep()}))
}

async fn make(app: &App, change: Change, running: Running) -> Result<Json<Value>, ApiError> {
    match app.link.change(change, running).await {
        Ok(()) => Ok(Json(json!({
            "success": true,
            "is_sleeping": app.link.is_asleep(),
            "is_paused": app.link.is_paused(),
            "weight_version": app.link.weight_version(),
        }))),
        Err(why) => Err(refused(why)),
    }
}

fn refused(why: ChangeError) -> ApiError {
    match why {
        ChangeError::Refused(why) => ApiError::invalid("", why),
        ChangeError::Unsupported => ApiError::not_supported(why.to_string()),
        ChangeError::Failed(why) => ApiError::internal(why),
    }
}
