//! `/v1/models`: the served model.

use crate::app::App;
use crate::describe::api_type;
use crate::error::ApiError;
use axum::Json;
use axum::extract::{Path, State};
use std::sync::Arc;

api_type! {
    /// The served models.
    pub struct ModelList {
        /// Always `list`.
        pub object: String,
        /// The models.
        pub data: Vec<ModelCard>,
    }
}

api_type! {
    /// A served model.
    pub struct ModelCard {
        /// Its name.
        pub id: String,
        /// Always `model`.
        pub object: String,
        /// When the server started, in seconds since 1970.
        pub created: u64,
        /// Always `dacapo`.
        pub owned_by: String,
        /// The most tokens of prompt and answer together.
        pub max_model_len: u64,
    }
}

fn card(app: &App, id: &str) -> ModelCard {
    ModelCard {
        id: id.into(),
        object: "model".into(),
        created: app.started,
        owned_by: "dacapo".into(),
        max_model_len: app.model.context,
    }
}

/// Lists the model, under all its names.
pub async fn list(State(app): State<Arc<App>>) -> Json<ModelList> {
    let names = std::iter::once(&app.model.name).chain(&app.model.aliases);
    let data = names.map(|name| card(&app, name)).collect();
    Json(ModelList { object: "list".into(), data })
}

/// One model by name.
pub async fn one(
    State(app): State<Arc<App>>,
    Path(name): Path<String>,
) -> Result<Json<ModelCard>, ApiError> {
    app.model.check_name(Some(&name))?;
    Ok(Json(card(&app, &name)))
}
