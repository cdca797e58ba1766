//! Checks rerank, score and classify requests.

use super::types::{ClassifyRequest, RerankRequest, ScoreRequest, Texts};
use crate::app::{Model, Scorer};
use crate::config::Limits;
use crate::error::ApiError;
use crate::openai::sampling::at_most;
use crate::openai::truncate::Truncation;

/// Checks every field; the error names the first invalid one.
pub(crate) fn rerank(
    request: &RerankRequest,
    model: &Model,
    limits: &Limits,
) -> Result<(), ApiError> {
    model.check_name(request.model.as_deref())?;
    if request.query.is_empty() {
        return Err(ApiError::invalid("query", "query must not be empty"));
    }
    if request.documents.is_empty() || request.documents.iter().any(|d| d.text().is_empty()) {
        return Err(ApiError::invalid("documents", "documents must not be empty"));
    }
    at_most("documents", "entries", request.documents.len(), limits.inputs)?;
    match request.top_n {
        Some(0) => Err(ApiError::invalid("top_n", "top_n must be at least 1")),
        _ => Ok(()),
    }
}

/// Checks every field; the error names the first invalid one.
pub(crate) fn score(
    request: &ScoreRequest,
    model: &Model,
    limits: &Limits,
) -> Result<(), ApiError> {
    model.check_name(request.model.as_deref())?;
    texts("text_1", &request.text_1, limits)?;
    texts("text_2", &request.text_2, limits)?;
    let (one, two) = (request.text_1.list().len(), request.text_2.list().len());
    if one != 1 && one != two {
        let text = format!("text_1 has {one} entries; it must have one, or the {two} of text_2");
        return Err(ApiError::invalid("text_1", text));
    }
    Ok(())
}

/// Checks every field; the error names the first invalid one.
pub(crate) fn classify(
    request: &ClassifyRequest,
    model: &Model,
    limits: &Limits,
) -> Result<(), ApiError> {
    model.check_name(request.model.as_deref())?;
    Truncation(request.truncate_prompt_tokens).check(model)?;
    texts("input", &request.input, limits)?;
    match model.scorer {
        Some(Scorer::Classes { .. }) => Ok(()),
        _ => Err(ApiError::invalid("model", "the loaded model is not a classifier")),
    }
}

fn texts(name: &str, texts: &Texts, limits: &Limits) -> Result<(), ApiError> {
    let list = texts.list();
    if list.is_empty() || list.iter().any(String::is_empty) {
        return Err(ApiError::invalid(name, format!("{name} must not be empty")));
    }
    at_most(name, "entries", list.len(), limits.inputs)
}
