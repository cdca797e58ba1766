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
        /// The model that it is an adapter of.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub parent: Option<String>,
    }
}

fn card(app: &App, id: &str) -> ModelCard {
    ModelCard {
        id: id.into(),
        object: "model".into(),
        created: app.started,
        owned_by: "dacapo".into(),
        max_model_len: app.model.context,
        parent: app.model.adapters.get(id).map(|_| app.model.name.clone()),
    }
}

/// Lists the model, under all its names, and its adapters.
pub async fn list(State(app): State<Arc<App>>) -> Json<ModelList> {
    let names = std::iter::once(&app.model.name).chain(&app.model.aliases);
    let adapters = app.model.adapters.names();
    let data = names.chain(&adapters).map(|name| card(&app, name)).collect();
    Json(ModelList { object: "list".into(), data })
}

/// One model by name.
pub async fn one(
    State(app): State<Arc<App>>,
    Path(name): Path<String>,
) -> Result<Json<ModelCard>, ApiError> {
    app.model.check_served(Some(&name))?;
    Ok(Json(card(&app, &name)))
}
