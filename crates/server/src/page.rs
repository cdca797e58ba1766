//! The page at `/`: three files embedded in the binary; it loads nothing from other servers.

use crate::error::ApiError;
use axum::extract::Path;
use axum::http::header;
use axum::response::{IntoResponse, Response};

const POLICY: &str = "default-src 'self'; img-src 'self' data:; style-src 'self'; \
    script-src 'self'; connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; \
    form-action 'none'";

const FILES: [(&str, &str, &str); 3] = [
    ("", "text/html; charset=utf-8", include_str!("page/index.html")),
    ("style.css", "text/css; charset=utf-8", include_str!("page/style.css")),
    ("app.js", "text/javascript; charset=utf-8", include_str!("page/app.js")),
];

fn find(name: &str) -> Result<Response, ApiError> {
    let file = FILES.iter().find(|(file, _, _)| *file == name);
    let (_, kind, text) = file.ok_or_else(|| ApiError::no_route(&format!("/{name}")))?;
    let headers = [
        (header::CONTENT_TYPE, *kind),
        (header::CACHE_CONTROL, "no-cache"),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::REFERRER_POLICY, "no-referrer"),
    ];
    Ok((headers, *text).into_response())
}

/// `/`.
pub(crate) async fn index() -> Result<Response, ApiError> {
    find("")
}

/// The other files of the page.
pub(crate) async fn file(Path(name): Path<String>) -> Result<Response, ApiError> {
    find(&name)
}
