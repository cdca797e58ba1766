//! The page at `/`: files embedded in the binary; it loads nothing from other servers.

use crate::error::ApiError;
use axum::extract::Path;
use axum::http::header;
use axum::response::{IntoResponse, Response};

const POLICY: &str = "default-src 'self'; img-src 'self' data:; style-src 'self'; \
    script-src 'self'; connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; \
    form-action 'none'";

const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const JS: &str = "text/javascript; charset=utf-8";

macro_rules! files {
    ($($kind:ident: $($name:literal),+;)+) => {
        &[$($(($name, $kind, include_str!(concat!("page/", $name)))),+),+]
    };
}

/// Name, type and text.
const FILES: &[(&str, &str, &str)] = files! {
    HTML: "index.html";
    CSS: "style.css", "chat.css", "engine.css";
    JS: "theme.js", "app.js", "dom.js", "store.js", "panels.js", "parameters.js";
    JS: "inline.js", "markdown.js", "highlight.js", "render.js";
    JS: "answer.js", "chat.js", "files.js", "list.js", "message.js";
    JS: "engine.js", "experts.js", "strip.js";
};

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
    find("index.html")
}

/// The other files of the page.
pub(crate) async fn file(Path(name): Path<String>) -> Result<Response, ApiError> {
    find(&name)
}
