//! Checks embedding requests.

use super::types::EmbeddingRequest;
use crate::app::Model;
use crate::config::Limits;
use crate::error::ApiError;
use crate::openai::completions::validate::prompt;
use crate::openai::truncate::Truncation;

/// Checks every field; the error names the first invalid one.
pub(crate) fn validate(
    request: &EmbeddingRequest,
    model: &Model,
    limits: &Limits,
) -> Result<(), ApiError> {
    model.check_name(request.model.as_deref())?;
    if let Some(format) = request.encoding_format.as_deref()
        && !matches!(format, "float" | "base64")
    {
        let text = format!("encoding_format must be float or base64, not {format:?}");
        return Err(ApiError::invalid("encoding_format", text));
    }
    if let Some(pooling) = request.pooling.as_deref()
        && !matches!(pooling, "mean" | "last")
    {
        let text = format!("pooling must be mean or last, not {pooling:?}");
        return Err(ApiError::invalid("pooling", text));
    }
    if let (Some(asked), Some(width)) = (request.dimensions, model.embedding)
        && (asked == 0 || asked > width || (asked < width && model.generates))
    {
        let text = match model.generates {
            true => format!("this model has {width} dimensions, which cannot be reduced"),
            false => format!("dimensions must be between 1 and {width}"),
        };
        return Err(ApiError::invalid("dimensions", text));
    }
    if !model.generates && request.pooling.is_some() {
        let text = "this model has a pooling of its own, which cannot be changed";
        return Err(ApiError::invalid("pooling", text));
    }
    Truncation(request.truncate_prompt_tokens).check(model)?;
    prompt("input", &request.input, model, limits.inputs)
}
