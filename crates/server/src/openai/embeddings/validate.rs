//! What an embedding request may contain.

use super::types::EmbeddingRequest;
use crate::app::Model;
use crate::config::Limits;
use crate::error::ApiError;
use crate::openai::completions::validate::prompt;

/// Checks every field; the error names the first that is wrong.
pub fn validate(
    request: &EmbeddingRequest,
    model: &Model,
    limits: &Limits,
) -> Result<(), ApiError> {
    model.check_name(request.model.as_deref())?;
    if let Some(format) = request.encoding_format.as_deref()
        && !matches!(format, "float" | "base64")
    {
        let text = format!("{format:?} is not float or base64");
        return Err(ApiError::invalid("encoding_format", text));
    }
    if let Some(pooling) = request.pooling.as_deref()
        && !matches!(pooling, "mean" | "last")
    {
        let text = format!("{pooling:?} is not mean or last");
        return Err(ApiError::invalid("pooling", text));
    }
    if let (Some(asked), Some(width)) = (request.dimensions, model.embedding)
        && asked != width
    {
        let text =
            format!("this model's vectors have {width} dimensions, and none can be left out");
        return Err(ApiError::invalid("dimensions", text));
    }
    prompt("input", &request.input, model, limits)
}
