//! API keys.

use super::base64;
use crate::error::ApiError;
use crate::openai::random;
use axum::extract::Request;
use axum::http::{HeaderMap, HeaderName, HeaderValue, header};
use axum::response::{IntoResponse, Response};
use std::sync::OnceLock;

/// The accepted API keys, stored as hashes.
#[derive(Clone, Debug, Default)]
pub struct Keys {
    hashes: Vec<blake3::Hash>,
    /// Whether each key has its own prefix cache.
    apart: bool,
}

/// Identifies the client for the prefix cache; 0 if the cache is shared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Caller(u64);

impl Caller {
    /// The caller that the middleware found for a request.
    pub(crate) fn of(request: &Request) -> Self {
        request.extensions().get().copied().unwrap_or_default()
    }

    /// The id under which cached prefixes are shared: the same for the same caller and salt.
    pub(crate) fn tenant(self, salt: Option<&str>) -> u64 {
        match salt {
            None => self.0,
            Some(salt) => tenant(&[&self.0.to_le_bytes(), salt.as_bytes()]),
        }
    }
}

/// An unpredictable hash of these words, never 0.
fn tenant(words: &[&[u8]]) -> u64 {
    static KEY: OnceLock<[u8; 32]> = OnceLock::new();
    let key = KEY.get_or_init(|| {
        let mut key = [0; 32];
        key.chunks_exact_mut(8).for_each(|part| part.copy_from_slice(&random().to_le_bytes()));
        key
    });
    let mut hasher = blake3::Hasher::new_keyed(key);
    for word in words {
        hasher.update(word);
    }
    let hash = hasher.finalize();
    u64::from_le_bytes(*hash.as_bytes().first_chunk().expect("a hash has 32 bytes")).max(1)
}

impl Keys {
    /// Hashes the keys. Without keys every request is accepted. `apart`: clients with different
    /// keys share no cached prefixes.
    pub fn new<K: AsRef<str>>(keys: &[K], apart: bool) -> Self {
        let hashes: Vec<_> = keys.iter().map(|key| blake3::hash(key.as_ref().as_bytes())).collect();
        Self { apart: apart && hashes.len() > 1, hashes }
    }

    /// Checks the key in these headers: `Bearer KEY`, which API clients send, the password of
    /// `Basic`, which browsers send, or `x-api-key`, which Anthropic's clients send.
    pub fn check(&self, headers: &HeaderMap) -> Result<Caller, ApiError> {
        if self.hashes.is_empty() {
            return Ok(Caller::default());
        }
        let value = |name| headers.get(name).and_then(|v: &HeaderValue| v.to_str().ok());
        let own = value(HeaderName::from_static("x-api-key"));
        let Some(value) = value(header::AUTHORIZATION).or(own) else {
            return Err(ApiError::unauthorized("send the API key: Authorization: Bearer KEY"));
        };
        let (scheme, rest) = value.split_once(' ').unwrap_or((value, ""));
        let key = if own == Some(value) {
            Some(value.trim().as_bytes().to_vec())
        } else if scheme.eq_ignore_ascii_case("bearer") {
            Some(rest.trim().as_bytes().to_vec())
        } else if scheme.eq_ignore_ascii_case("basic") {
            password(rest.trim())
        } else {
            None
        };
        let hash = blake3::hash(&key.unwrap_or_default());
        // Compares with every key, in constant time per hash.
        let known = self.hashes.iter().fold(false, |known, key| known | (*key == hash));
        match known {
            true if self.apart => Ok(Caller(tenant(&[hash.as_bytes()]))),
            true => Ok(Caller::default()),
            false => Err(ApiError::unauthorized("the API key is wrong")),
        }
    }
}

/// The response to a request without a valid key; a browser is told to prompt for one.
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
    let plain = base64::decode(text.trim_end_matches('='), *b"+/")?;
    let colon = plain.iter().position(|b| *b == b':')?;
    Some(plain[colon + 1..].to_vec())
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
    fn only_known_keys_are_accepted() {
        assert!(ask(&Keys::default(), None));
        let keys = Keys::new(&["sesame", "other"], true);
        assert!(ask(&keys, Some("Bearer sesame")));
        assert!(ask(&keys, Some("bearer other")));
        // "me:sesame"
        assert!(ask(&keys, Some("Basic bWU6c2VzYW1l")));
        for wrong in ["Bearer", "Bearer ", "Bearer sesam", "sesame", "Basic !!!", "Basic bWU="] {
            assert!(!ask(&keys, Some(wrong)), "{wrong}");
        }
        assert!(!ask(&keys, None));
    }

    #[test]
    fn each_of_several_keys_has_its_own_cache() {
        let caller = |keys: &Keys, key: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::AUTHORIZATION, format!("Bearer {key}").parse().unwrap());
            keys.check(&headers).unwrap()
        };
        let two = Keys::new(&["alice", "bob"], true);
        let (alice, bob) = (caller(&two, "alice"), caller(&two, "bob"));
        assert!(alice != bob && alice != Caller::default() && bob != Caller::default());
        assert_eq!(alice, caller(&two, "alice"));
        let shared = Keys::new(&["alice", "bob"], false);
        assert_eq!(caller(&shared, "alice"), caller(&shared, "bob"));
        assert_eq!(caller(&Keys::new(&["alice"], true), "alice"), Caller::default());
        // A salt separates the cache of one key further; it never joins the caches of two keys.
        assert_eq!(Caller::default().tenant(None), 0);
        assert_eq!(alice.tenant(Some("x")), alice.tenant(Some("x")));
        let all = [
            alice.tenant(None),
            bob.tenant(None),
            alice.tenant(Some("x")),
            bob.tenant(Some("x")),
            alice.tenant(Some("y")),
            Caller::default().tenant(Some("x")),
            0,
        ];
        assert_eq!(std::collections::HashSet::from(all).len(), all.len());
    }
}
