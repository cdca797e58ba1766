//! Who may call.

use crate::error::ApiError;
use axum::extract::Request;
use axum::http::{HeaderMap, HeaderValue, header};
use axum::response::{IntoResponse, Response};

/// The keys that open the server, kept as hashes only.
#[derive(Clone, Debug, Default)]
pub struct Keys(Vec<blake3::Hash>);

impl Keys {
    /// Remembers the keys' hashes. No keys, no questions.
    pub fn new<K: AsRef<str>>(keys: &[K]) -> Self {
        Self(keys.iter().map(|key| blake3::hash(key.as_ref().as_bytes())).collect())
    }

    /// Whether these headers carry a key: as `Bearer KEY`, which API clients send, or as the
    /// password of `Basic`, which a browser sends once it has asked its user.
    pub fn check(&self, headers: &HeaderMap) -> Result<(), ApiError> {
        if self.0.is_empty() {
            return Ok(());
        }
        let Some(value) = headers.get(header::AUTHORIZATION).and_then(|v| v.to_str().ok()) else {
            return Err(ApiError::unauthorized("send the API key: Authorization: Bearer KEY"));
        };
        let (scheme, rest) = value.split_once(' ').unwrap_or((value, ""));
        let key = if scheme.eq_ignore_ascii_case("bearer") {
            Some(rest.trim().as_bytes().to_vec())
        } else if scheme.eq_ignore_ascii_case("basic") {
            password(rest.trim())
        } else {
            None
        };
        let hash = blake3::hash(&key.unwrap_or_default());
        // Every key is compared, and each comparison of hashes takes the same time.
        let known = self.0.iter().fold(false, |known, key| known | (*key == hash));
        if known { Ok(()) } else { Err(ApiError::unauthorized("the API key is not right")) }
    }
}

/// The answer to a request without a key; a browser that wants a page is told to ask for one.
pub(super) fn refuse(request: &Request, error: ApiError) -> Response {
    let accept = request.headers().get(header::ACCEPT).and_then(|v| v.to_str().ok());
    let page = accept.is_some_and(|accept| accept.contains("text/html"));
    let scheme = if page { "Basic realm=\"dacapo\", charset=\"UTF-8\"" } else { "Bearer" };
    let mut response = error.into_response();
    response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static(scheme));
    response
}

/// The password of `user:password` in base64.
fn password(text: &str) -> Option<Vec<u8>> {
    let plain = decode_base64(text.trim_end_matches('='))?;
    let colon = plain.iter().position(|b| *b == b':')?;
    Some(plain[colon + 1..].to_vec())
}

fn decode_base64(text: &str) -> Option<Vec<u8>> {
    let (mut out, mut bits, mut held) = (Vec::new(), 0u32, 0);
    for byte in text.bytes() {
        let six = match byte {
            b'A'..=b'Z' => byte - b'A',
            b'a'..=b'z' => byte - b'a' + 26,
            b'0'..=b'9' => byte - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => return None,
        };
        bits = (bits << 6) | u32::from(six);
        held += 6;
        if held >= 8 {
            held -= 8;
            out.push((bits >> held) as u8);
            bits &= (1 << held) - 1;
        }
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(keys: &Keys, value: Option<&str>) -> bool {
        let mut headers = HeaderMap::new();
        if let Some(value) = value {
            headers.insert(header::AUTHORIZATION, value.parse().unwrap());
        }
        keys.check(&headers).is_ok()
    }

    #[test]
    fn only_a_known_key_opens() {
        assert!(ask(&Keys::default(), None));
        let keys = Keys::new(&["sesame", "other"]);
        assert!(ask(&keys, Some("Bearer sesame")));
        assert!(ask(&keys, Some("bearer other")));
        // "me:sesame"
        assert!(ask(&keys, Some("Basic bWU6c2VzYW1l")));
        for wrong in ["Bearer", "Bearer ", "Bearer sesam", "sesame", "Basic !!!", "Basic bWU="] {
            assert!(!ask(&keys, Some(wrong)), "{wrong}");
        }
        assert!(!ask(&keys, None));
    }
}
