//! Cross-origin requests, for web pages of the origins that the operator allows.

use axum::extract::Request;
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::response::{IntoResponse, Response};

/// The allowed origins.
#[derive(Clone, Debug, Default)]
pub(crate) struct Origins(Vec<String>);

impl Origins {
    /// Exact origins (`https://example.com`), or `*` for all.
    pub(crate) fn new(allowed: &[String]) -> Self {
        Self(allowed.iter().map(|origin| origin.trim_end_matches('/').to_string()).collect())
    }

    /// The origin of a request, if it is allowed.
    pub(crate) fn of(&self, request: &Request) -> Option<HeaderValue> {
        let origin = request.headers().get(header::ORIGIN)?;
        let known = |allowed: &String| {
            allowed == "*" || origin.as_bytes().eq_ignore_ascii_case(allowed.as_bytes())
        };
        self.0.iter().any(known).then(|| origin.clone())
    }
}

/// The response to a preflight request of an allowed origin; `None` for any other request. It needs
/// no key, because browsers send none.
pub(crate) fn preflight(request: &Request) -> Option<Response> {
    let headers = request.headers();
    let asked = headers.contains_key(header::ACCESS_CONTROL_REQUEST_METHOD);
    if request.method() != Method::OPTIONS || !asked {
        return None;
    }
    let mut response = StatusCode::NO_CONTENT.into_response();
    let out = response.headers_mut();
    let methods = HeaderValue::from_static("GET, POST, DELETE");
    out.insert(header::ACCESS_CONTROL_ALLOW_METHODS, methods);
    if let Some(names) = headers.get(header::ACCESS_CONTROL_REQUEST_HEADERS) {
        out.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, names.clone());
    }
    out.insert(header::ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static("600"));
    Some(response)
}

/// Lets the page of an allowed origin read the response.
pub(crate) fn allow(origin: HeaderValue, headers: &mut HeaderMap) {
    headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
    headers.insert(header::VARY, HeaderValue::from_static("Origin"));
    let shown =
        HeaderValue::from_static("x-request-id, x-weight-version, x-ignored-fields, retry-after");
    headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, shown);
}
