//! `/api/tags`: the served model.

use super::time::rfc3339;
use super::types::{Tag, TagList};
use crate::app::App;
use axum::Json;
use axum::extract::State;
use serde_json::json;
use std::sync::Arc;
use std::time::Duration;

/// Lists the model, under all its names.
pub(crate) async fn list(State(app): State<Arc<App>>) -> Json<TagList> {
    let tag = |name: &String| Tag {
        name: name.clone(),
        model: name.clone(),
        modified_at: rfc3339(Duration::from_secs(app.started)),
        size: 0,
        digest: String::new(),
        details: json!({"context_length": app.model.context})
            .as_object()
            .cloned()
            .unwrap_or_default(),
    };
    let names = std::iter::once(&app.model.name).chain(&app.model.aliases);
    Json(TagList { models: names.map(tag).collect() })
}
