//! Which names the server answers to.
//!
//! A page that a browser loaded from `evil.example` may read what `evil.example` answers. If that name
//! is made to resolve to this machine (DNS rebinding), the browser takes the server for the page's own.
//! The browser still says the name in `Host`: a server that knows its names refuses.

use crate::config::ServerConfig;
use crate::error::ApiError;
use axum::extract::Request;
use axum::http::{Version, header};
use std::net::{Ipv4Addr, Ipv6Addr};

/// The names that are served.
#[derive(Clone, Debug, Default)]
pub struct Hosts {
    names: Vec<String>,
    any: bool,
}

impl Hosts {
    /// Names are checked where the operator gave some, and on loopback without keys: a key is what no
    /// strange page has, and by which names other machines know this one only the operator can say.
    pub fn new(config: &ServerConfig) -> Self {
        let names: Vec<String> =
            config.allowed_hosts.iter().map(|name| bare(name).to_ascii_lowercase()).collect();
        let closed = config.listen.ip().is_loopback() && config.api_keys.is_empty();
        Self { any: names.is_empty() && !closed, names }
    }

    /// Whether a request says a name that is served, and says one at all.
    pub fn check(&self, request: &Request) -> Result<(), ApiError> {
        let mut values = request.headers().get_all(header::HOST).iter();
        let (first, second) = (values.next(), values.next());
        if second.is_some() {
            return Err(ApiError::invalid("", "there is more than one Host header"));
        }
        if first.is_none() && request.version() == Version::HTTP_11 {
            return Err(ApiError::invalid("", "there is no Host header; HTTP/1.1 needs one"));
        }
        let host = first.map(|value| value.to_str().map_err(|_| ApiError::misdirected("…")));
        let host = host.transpose()?;
        // A whole address in the first line counts besides the header.
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

/// A host without its port and without the dot that ends a full name.
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
    fn only_addresses_and_known_names_on_loopback() {
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
    fn names_count_where_they_are_given_or_nobody_else_guards() {
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
