//! Errors as gRPC's status codes.

use crate::error::ApiError;
use axum::response::Response;
use tonic::{Code, Status};

/// The status that says the same as an error of HTTP.
pub(super) fn status(error: &ApiError) -> Status {
    let code = match error.status.as_u16() {
        400 | 405 | 415 | 422 => Code::InvalidArgument,
        401 => Code::Unauthenticated,
        403 => Code::PermissionDenied,
        404 => Code::NotFound,
        408 => Code::DeadlineExceeded,
        413 | 429 => Code::ResourceExhausted,
        503 => Code::Unavailable,
        _ => Code::Internal,
    };
    Status::new(code, &error.message)
}

/// A response without messages.
pub(super) fn refuse(error: &ApiError) -> Response {
    status(error).into_http()
}

/// The status of HTTP that says the same as a response's, to count and log it; a stream counts when it begins.
pub(super) fn http_of(response: &Response) -> u16 {
    let code = response.headers().get("grpc-status").map(|code| Code::from_bytes(code.as_bytes()));
    match code {
        None => response.status().as_u16(),
        Some(Code::Ok) => 200,
        Some(Code::InvalidArgument | Code::FailedPrecondition | Code::OutOfRange) => 400,
        Some(Code::Unauthenticated) => 401,
        Some(Code::PermissionDenied) => 403,
        Some(Code::NotFound) => 404,
        Some(Code::AlreadyExists | Code::Aborted) => 409,
        Some(Code::ResourceExhausted) => 429,
        Some(Code::Cancelled) => 499,
        Some(Code::Unimplemented) => 501,
        Some(Code::Unavailable) => 503,
        Some(Code::DeadlineExceeded) => 504,
        Some(Code::Internal | Code::Unknown | Code::DataLoss) => 500,
    }
}
