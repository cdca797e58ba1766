//! Checks the `Host` header.
//!
//! This prevents DNS rebinding: a web page from `evil.example` may read responses from
//! `evil.example`, and if that name resolves to this machine, the browser treats the server as the
//! page's own origin. The browser still sends the name in `Host`, so the server can refuse it.

use crate::config::ServerConfig;
use crate::error::ApiError;
use axum::extract::Request;
use axum::http::{Version, header};
use std::net::{Ipv4Addr, Ipv6Addr};

/// The accepted host names.
#[derive(Clone, Debug, Default)]
pub struct Hosts {
    names: Vec<String>,
    any: bool,
}

impl Hosts {
    /// Names are checked if the operator listed some, and on loopback without keys. With a key the
    /// check is not needed, because a web page does not have it; on other addresses only the
    /// operator knows the valid names.
    pub fn new(config: &ServerConfig) -> Self {
        let names: Vec<String> =
            config.allowed_hosts.iter().map(|name| bare(name).to_ascii_lowercase()).collect();
        let closed = config.listen.ip().is_loopback() && config.api_keys.is_empty();
        Self { any: names.is_empty() && !closed, names }
    }

    /// Checks that a request has one `Host` header with an accepted name.
    pub fn check(&self, request: &Request) -> Result<(), ApiError> {
        let mut values = request.headers().get_all(header::HOST).iter();
        let (first, second) = (values.next(), values.next());
        if second.is_some() {
            return Err(ApiError::invalid("", "the request has more than one Host header"));
        }
        if first.is_none() && request.version() == Version::HTTP_11 {
            return Err(ApiError::invalid(
                "",
                "the request has no Host header, which HTTP/1.1 requires",
            ));
        }
        let host = first.map(|value| value.to_str().map_err(|_| ApiError::misdirected("…")));
        let host = host.transpose()?;
        // An absolute URI in the request line is checked as well.
        let whole = request.uri().authority().map(|authority| authority.as_str());
        for name in host.into_iter().chain(whole) {
            if !self.any && !self.knows(name) {
                return Err(ApiError::misdirected(name));
            }
        }
        Ok(())
    }

    fn knows(&self, host: &str) -> bool {
        let name = bare(host);
        let six = name.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
        name.parse::<Ipv4Addr>().is_ok()
            || six.is_some_and(|six| six.parse::<Ipv6Addr>().is_ok())
            || name.eq_ignore_ascii_case("localhost")
            || self.names.iter().any(|known| name.eq_ignore_ascii_case(known))
    }
}

/// A host without its port and trailing dot.
fn bare(host: &str) -> &str {
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|b| b.is_ascii_digit()) => name,
        _ => host,
    };
    name.strip_suffix('.').unwrap_or(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hosts(change: impl FnOnce(&mut ServerConfig)) -> Hosts {
        let mut config = ServerConfig::default();
        change(&mut config);
        Hosts::new(&config)
    }

    fn ask(hosts: &Hosts, names: &[&str]) -> u16 {
        let mut request = Request::new(axum::body::Body::empty());
        for name in names {
            request.headers_mut().append(header::HOST, name.parse().unwrap());
        }
        hosts.check(&request).map_or_else(|e| e.status.as_u16(), |()| 200)
    }

    #[test]
    fn loopback_accepts_addresses_and_localhost_only() {
        let own = hosts(|_| {});
        let fine = [
            "127.0.0.1",
            "127.0.0.1:8000",
            "[::1]",
            "[::1]:80",
            "localhost",
            "LocalHost:1",
            "localhost.:1",
            "10.0.0.1",
        ];
        for name in fine {
            assert_eq!(ask(&own, &[name]), 200, "{name}");
        }
        let strange = [
            "evil.example",
            "evil.example:8000",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "",
            "localhost:80:80",
            "127.1",
            "::1",
            "[::1",
            "localhost@evil.example",
            "1",
            "[localhost]",
            "xlocalhost",
        ];
        for name in strange {
            assert_eq!(ask(&own, &[name]), 421, "{name}");
        }
        assert_eq!(ask(&own, &[]), 400);
        assert_eq!(ask(&own, &["localhost", "localhost"]), 400);
    }

    #[test]
    fn names_are_checked_if_listed_or_on_loopback_without_keys() {
        let named = hosts(|c| c.allowed_hosts = vec!["Llm.internal".into(), "other:80".into()]);
        for name in ["llm.internal:8000", "other", "localhost", "127.0.0.1"] {
            assert_eq!(ask(&named, &[name]), 200, "{name}");
        }
        assert_eq!(ask(&named, &["evil.example"]), 421);
        let keyed = hosts(|c| c.api_keys = vec!["sesame".into()]);
        let open = hosts(|c| c.listen = ([0, 0, 0, 0], 8000).into());
        for any in [keyed, open] {
            assert_eq!(ask(&any, &["evil.example"]), 200);
            assert_eq!(ask(&any, &[]), 400);
        }
        let open = hosts(|c| {
            c.listen = ([0, 0, 0, 0], 8000).into();
            c.allowed_hosts = vec!["llm.internal".into()];
        });
        assert_eq!(ask(&open, &["evil.example"]), 421);
    }
}
