//! Health checks.

use crate::app::App;
use crate::error::ApiError;
use axum::Json;
use axum::extract::State;
use axum::response::IntoResponse;
use serde_json::json;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// `/health/live`: the process responds.
pub(super) async fn live() -> impl IntoResponse {
    Json(json!({"status": "live"}))
}

/// `/health` and `/health/ready`: new requests are accepted, and will be for a while.
pub(super) async fn ready(State(app): State<Arc<App>>) -> Result<impl IntoResponse, ApiError> {
    if app.leaving.load(Ordering::Relaxed) {
        return Err(ApiError::unavailable("the server is shutting down"));
    }
    match app.ready() {
        Ok(()) => Ok(Json(json!({"status": "ready", "model": app.model.name}))),
        Err(why) => Err(ApiError::unavailable(why)),
    }
}
